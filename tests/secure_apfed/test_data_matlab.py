"""Caltech101-7, read from synthetic MATLAB files of its form; hostile ones are refused."""

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from secure_apfed.data import DATASETS
from secure_apfed.data.readers import TablePool
from secure_apfed.errors import DataError

WIDTHS = (48, 40, 254, 1984, 512, 928)


def pool(name: str, folder: Path | None = None) -> TablePool:
    entry = DATASETS[name]
    read = entry.read(entry, folder)
    assert isinstance(read, TablePool)
    return read


def write_caltech(folder: Path, **change: Any) -> None:
    """A synthetic file of Caltech101-7's form; view v holds v in all places but the first row."""
    cell = np.empty((1, 6), dtype=object)
    for at, width in enumerate(WIDTHS):
        cell[0, at] = np.full((1474, width), at, dtype=np.uint8)
        cell[0, at][0] = np.arange(width) % 250
    labels = 1 + np.arange(1474)[:, None] % 7
    savemat(
        folder / "Caltech101-7.mat", {"X": cell, "Y": labels, "lenSmp": 1} | change,
        do_compression=True,
    )  # fmt: skip


def test_caltech_is_read_view_by_view(tmp_path: Path) -> None:
    write_caltech(tmp_path)
    read = pool("caltech_7", tmp_path)
    assert read.frame.shape == (1474, sum(WIDTHS))
    assert read.labels.tolist() == [at % 7 for at in range(1474)]
    assert read.frame["hog-1983"].tolist() == [1983 % 250] + [3] * 1473
    assert read.frame["gist-0"].tolist() == [0] + [4] * 1473


CELL_OF_FIVE = np.empty((1, 5), dtype=object)
CELL_OF_FIVE[0] = [np.zeros((2, 2))] * 5
BAD_LABELS = np.full((1474, 1), 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.zeros((1474, 5))}, r"X holds matrices of shapes \[\], expected \[\(1474, 48\)"),
        ({"X": CELL_OF_FIVE}, r"shapes \[\(2, 2\), .*expected \[\(1474, 48\)"),
        ({"Y": BAD_LABELS}, "row 0 has label 7, expected 0 to 6; 1474 such rows"),
        ({"Y": np.ones((3, 1))}, "Y holds 3 numbers, expected 1474 labels"),
        ({"Y": "none"}, "must hold finite numbers, got <U4"),
        ({"Y": np.full((1474, 1), np.nan)}, "must hold finite numbers, got float64"),
    ],
)
def test_another_matlab_file_is_refused(
    tmp_path: Path, change: Mapping[str, Any], message: str
) -> None:
    write_caltech(tmp_path, **change)
    with pytest.raises(DataError, match=message):
        pool("caltech_7", tmp_path)


def test_a_hostile_matlab_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Caltech101-7.mat"
    write_caltech(tmp_path)
    whole = path.read_bytes()
    bomb = zlib.compress(bytes(2**28 + 1), 9)
    for content, message in (
        (b"", "not a MATLAB file"),
        (whole[:5000], "not a MATLAB file"),
        (whole[:128] + bytes(200), "not a MATLAB file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(600), "save it with the option -v7"),
        (whole[:128] + struct.pack("<II", 15, len(bomb)) + bomb, "268435456 uncompressed bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            pool("caltech_7", tmp_path)


HEADER = bytes(124) + b"\x00\x01IM"


def compressed(plain: bytes) -> bytes:
    packed = zlib.compress(plain)
    return struct.pack("<II", 15, len(packed)) + packed


def element(kind: int, body: bytes) -> bytes:
    return struct.pack("<II", kind, len(body)) + body + bytes(-len(body) % 8)


def array(kind: int, rows: int, body: bytes, *, name: bytes = b"X") -> bytes:
    """A MATLAB array of this class that claims so many rows."""
    flags, dimensions = struct.pack("<II", kind, 0), struct.pack("<ii", rows, 1)
    return element(14, element(6, flags) + element(5, dimensions) + element(1, name) + body)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (array(1, 2**30, b""), "claims 1073741824 entries and holds 0"),
        (array(4, 2**30, element(16, b"")), "claims 1073741824 entries and holds 0"),
        (array(1, 1, array(1, 2**30, b"", name=b"")), "class 1, expected matrices"),
        (array(2, 2**30, element(5, struct.pack("<i", 8)) + element(1, b"a\0")), "class 2"),
        (array(3, 2**30, b""), "class 3, expected matrices"),
        (array(1, -1, b""), "claims -1 entries"),
    ],
)
def test_what_an_array_claims_takes_no_memory(tmp_path: Path, matrix: bytes, message: str) -> None:
    (tmp_path / "Caltech101-7.mat").write_bytes(HEADER + matrix)
    with pytest.raises(DataError, match=message):
        pool("caltech_7", tmp_path)


def test_an_element_compressed_twice_is_refused(tmp_path: Path) -> None:
    once = compressed(array(6, 2**10, element(2, bytes(2**10))))
    (tmp_path / "Caltech101-7.mat").write_bytes(HEADER + compressed(once))
    with pytest.raises(DataError, match="type 15 where a matrix is expected"):
        pool("caltech_7", tmp_path)
