"""Official formats: found, checked and parsed, or refused with the reason.

The CIFAR files here are synthetic: made in the test in the official format.
"""

import contextlib
import gzip
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_apfed.data import DATASETS, catalogue, load_data
from secure_apfed.data.files import DataFile, check_digest, data_folders, default_folder, read_file
from secure_apfed.data.readers import DataSet, is_idx, parse_cifar, parse_idx
from secure_apfed.errors import DataError
from secure_apfed.settings.data import DataSettings


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def test_idx_round_trip() -> None:
    content = idx(IMAGES)
    assert is_idx(content)
    assert np.array_equal(parse_idx(content, dimensions=3, source="x"), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found magic nothing"),
        (b"\x1f\x8b\x08\x00" + bytes(30), "found magic 1f8b0800"),
        (idx(IMAGES[0, 0]), "in 3 dimensions"),
        (idx(IMAGES)[:9], "truncated inside its header"),
        (idx(IMAGES)[:-1], "announces sizes .2, 3, 4., 40 bytes in all, the file has 39"),
        (idx(IMAGES) + b"x", "the file has 41"),
    ],
)
def test_damaged_idx_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_idx(content, dimensions=3, source="train-images")


@given(st.binary(max_size=40) | st.binary(max_size=30).map(lambda tail: idx(IMAGES)[:8] + tail))
def test_any_bytes_parse_or_are_refused(content: bytes) -> None:
    for parse in (
        lambda: parse_idx(content, dimensions=3, source="x"),
        lambda: parse_cifar(content, label_bytes=1, classes=10, source="x"),
    ):
        with contextlib.suppress(DataError):
            parse()


def synthetic_cifar(rows: int, label_bytes: int, classes: int, seed: int) -> bytes:
    """Deterministic synthetic records of CIFAR's binary format; labels go round the classes."""
    draw = np.random.default_rng(seed)
    records = draw.integers(0, 256, (rows, label_bytes + 3072), dtype=np.uint8)
    records[:, label_bytes - 1] = np.arange(rows) % classes
    records[:, : label_bytes - 1] = 200  # a coarse label is not looked at
    return records.tobytes()


@pytest.mark.parametrize(("label_bytes", "classes"), [(1, 10), (2, 100)])
def test_cifar_records(label_bytes: int, classes: int) -> None:
    content = synthetic_cifar(120, label_bytes, classes, 0)
    images, labels = parse_cifar(content, label_bytes=label_bytes, classes=classes, source="x")
    assert images.shape == (120, 3, 32, 32)
    assert labels.tolist() == [at % classes for at in range(120)]
    # The first 1024 bytes after the labels are the red plane, row by row.
    assert images[0, 0, 1, 0] == content[label_bytes + 32]
    assert images[0, 1, 0, 0] == content[label_bytes + 1024]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found 0 bytes"),
        (bytes(3072), "expected records of 3073 bytes"),
        (bytes(3073) + b"\x0a" + bytes(3072), "record 1 has label 10, expected 0 to 9"),
    ],
)
def test_damaged_cifar_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_cifar(content, label_bytes=1, classes=10, source="data_batch_1.bin")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_folder_is_read_with_its_official_split(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = DATASETS[name]
    label_bytes, classes = (1, 10) if name == "cifar10" else (2, 100)
    files = []
    home = tmp_path / entry.subfolders[0]
    home.mkdir()
    for seed, file in enumerate(entry.files):
        content = synthetic_cifar(200, label_bytes, classes, seed)
        (home / file.name).write_bytes(content)
        files.append(replace(file, size=len(content)))
    monkeypatch.setattr(catalogue, "DATASETS", {name: replace(entry, files=tuple(files))})
    data = load_data(DataSettings(dataset=name, views=3, folder=tmp_path), seed=0)
    assert (len(data.train_rows), len(data.test_rows)) == (200 * (len(files) - 1), 200)
    assert data.active.features.shape[1:] == (3, 10, 32)
    assert 0 <= float(data.active.features.min()) < float(data.active.features.max()) == 1


def small_mnist(folder: Path, *, labels: int = 40) -> DataSet:
    """Synthetic images of MNIST's size in `folder`, and MNIST's entry pinned to them."""
    draw = np.random.default_rng(5)
    arrays = [
        draw.integers(0, 256, (40, 28, 28), dtype=np.uint8),
        (np.arange(labels) % 10).astype(np.uint8),
        draw.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        (np.arange(20) % 10).astype(np.uint8),
    ]
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for file, array in zip(DATASETS["mnist"].files, arrays, strict=True):
        content = idx(array)
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(content))
        files.append(DataFile(file.name, size=len(content)))
    return replace(DATASETS["mnist"], files=tuple(files))


def test_idx_folder_is_found_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = small_mnist(tmp_path / "second" / "mnist")
    monkeypatch.setattr(catalogue, "DATASETS", {"mnist": entry})
    monkeypatch.setenv(
        "SECURE_APFED_DATA", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}"
    )
    data = load_data(DataSettings(dataset="mnist"), seed=0)
    assert (len(data.train_rows), len(data.test_rows)) == (40, 20)
    assert data.active.features.shape == (60, 1, 14, 28)


def test_images_and_labels_of_different_number(tmp_path: Path) -> None:
    entry = small_mnist(tmp_path / "mnist", labels=39)
    with pytest.raises(DataError, match="40 images, but 39 labels"):
        entry.read(entry, tmp_path)


def test_images_of_another_size(tmp_path: Path) -> None:
    entry = replace(small_mnist(tmp_path / "mnist"), height=32)
    with pytest.raises(DataError, match="images of 28 rows, mnist's have 32"):
        entry.read(entry, tmp_path)


def test_a_missing_file_names_the_folders_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_data(DataSettings(dataset="cifar10", folder=tmp_path), seed=0)
    for part in (str(tmp_path / "cifar10"), "cifar-10-batches-bin", "data_batch_1.bin.gz"):
        assert part in str(caught.value)
    assert "run `secure-apfed data fetch cifar10`" in str(caught.value)


def test_a_wrong_file_says_what_was_expected_and_found(tmp_path: Path) -> None:
    small_mnist(tmp_path / "mnist")
    (file, *_) = DATASETS["mnist"].files
    (tmp_path / "mnist" / f"{file.name}.gz").write_bytes(gzip.compress(bytes(file.size)))
    with pytest.raises(DataError) as caught:
        load_data(DataSettings(dataset="mnist", folder=tmp_path), seed=0)
    assert f"expected {DATASETS['mnist'].files[0].sha256}" in str(caught.value)
    assert "remove it and run `secure-apfed data fetch mnist`" in str(caught.value)


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    entry = small_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated or damaged gzip file"):
        entry.read(entry, tmp_path)


def test_sizes_and_digests_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 uncompressed bytes, expected 4"):
        check_digest(b"abc", DataFile("a", size=4), path=tmp_path, remedy="")
    with pytest.raises(DataError, match="the SHA-256 of its uncompressed bytes is ba7816bf"):
        check_digest(b"abc", DataFile("a", 3, "0" * 64), path=tmp_path, remedy="")
    right = DataFile("a", 3, hashlib.sha256(b"abc").hexdigest())
    check_digest(b"abc", right, path=tmp_path, remedy="")


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_file(tmp_path)


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SECURE_APFED_DATA", raising=False)
    assert default_folder() == Path("~/.cache/secure-apfed").expanduser()
    monkeypatch.setenv("SECURE_APFED_DATA", str(tmp_path))
    assert data_folders(None) == (tmp_path,)
    assert data_folders(Path("x")) == (Path("x"),)
