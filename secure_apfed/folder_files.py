"""Files of a folder that somebody else may have written: bounds first, then their shape; and
folders of an owner alone.

Run by: whoever opens a run folder, which may have been sent to them. Only plain files are read,
no further than a bound, and JSON becomes a type that is named; everything else is one error that
says which file, what was expected, what was found and what to do.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from secure_apfed.errors import CheckpointError
from secure_apfed.regular_file import open_regular

__all__ = [
    "MOST_BYTES",
    "MOST_JSON_BYTES",
    "add_line",
    "count_lines",
    "make_private",
    "open_plain",
    "own_subfolder",
    "read_bytes",
    "read_json",
    "read_json_lines",
    "read_text",
]

# Of a recording or a checkpoint, which are held in memory: more than any run here has written.
MOST_BYTES = 2**34
# A byte of JSON may take twenty in memory.
MOST_JSON_BYTES = 2**24
# Of a run, of a study of runs, of a party.
_OURS = ("config.yaml", "result.json", "study.yaml", "identity.pem")
_DIGITS = 20
_CHUNK = 2**20

PartT = TypeVar("PartT")


def _why_missing(folder: Path) -> str:
    """What is to be done about a file of a run's folder that is not there."""
    if not folder.is_dir():
        return "there is no such folder"
    begun, finished = ((folder / name).is_file() for name in ("config.yaml", "result.json"))
    if begun and not finished:
        return f"the run in {folder} has not finished; continue it with --resume"
    return "the folder is not complete, restore it from a copy"


def open_plain(path: Path) -> BufferedReader:
    """Open a file that is no pipe, device or folder.

    Raises:
        CheckpointError: missing, of another kind, or it may not be read.
    """
    try:
        # Opening a pipe would wait for its writer.
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; {_why_missing(path.parent)}") from None
    except IsADirectoryError:
        raise _no_plain_file(path) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _no_plain_file(path)
    return file


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Read a plain file of at most so many bytes.

    Raises:
        CheckpointError: missing, no plain file, or larger.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(
                f"{path}: is larger than {most} bytes, which no run writes; restore it from a copy"
            )
        try:
            return file.read(size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None


def read_text(path: Path) -> str:
    """Read a text in UTF-8.

    Raises:
        CheckpointError: missing, too large, or other bytes.
    """
    try:
        return _content(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: is no text in UTF-8 (byte {error.start}); restore it from a copy"
        ) from None


def read_json(path: Path, kind: type[PartT]) -> PartT:
    """Read one JSON document of a type.

    Raises:
        CheckpointError: missing, too large, no JSON, or of another shape.
    """
    return _shaped(path, kind, _parsed(path, _content(path)))


def read_json_lines(path: Path, kind: type[PartT]) -> tuple[PartT, ...]:
    """Read a file with one JSON document of a type a line.

    Raises:
        CheckpointError: missing, too large, or a line that is no JSON or of another shape.
    """
    lines = _content(path).splitlines()
    return tuple(
        _shaped(path, kind, _parsed(path, line, f"line {number}: "))
        for number, line in enumerate(lines, start=1)
        if line
    )


def count_lines(path: Path) -> int:
    """How many lines a file has, however long it is.

    Raises:
        CheckpointError: missing, or no plain file.
    """
    with open_plain(path) as file:
        return sum(chunk.count(b"\n") for chunk in _chunks(file))


def _chunks(file: BufferedReader) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _content(path: Path) -> bytes:
    return read_bytes(path, most=MOST_JSON_BYTES)


def _parsed(path: Path, content: bytes, place: str = "") -> Any:
    try:
        return json.loads(content, parse_int=_whole, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not JSON, so it was cut off or altered: {place}{error}; restore it from "
            "a copy"
        ) from None


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no JSON")


def _shaped(path: Path, kind: type[PartT], value: Any) -> PartT:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        at = f", at {place!r}" if place else ""
        raise CheckpointError(
            f"{path}: is not as this version writes it{at}: {first['msg'].lower()}; restore it "
            "from a copy"
        ) from None


def _no_plain_file(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: is no plain file; restore it from a copy")


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone may enter, and shut an empty or an older one.

    Raises:
        CheckpointError: it cannot be made, or is open to others and was not made for a run.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.stat().st_mode & 0o077:
            return
        if any(folder.iterdir()) and not any((folder / name).is_file() for name in _OURS):
            raise CheckpointError(
                f"{folder} cannot be a run folder: others may read it, and it holds other files, "
                "so it is not shut for them; choose a new folder"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be a run folder ({error.strerror}); choose another folder"
        ) from error


def own_subfolder(folder: Path) -> Path:
    """Make a folder within one that somebody may have sent, or take the one that lies there.

    What is written into it, or removed from it, would be so behind a link.

    Raises:
        CheckpointError: it is a link or a file, or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made ({error.strerror})") from error
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise CheckpointError(
            f"{folder} is a link or a file in place of a folder; nothing is written behind it: "
            "remove it"
        )
    return folder


def add_line(log: Path, fields: Mapping[str, Any]) -> None:
    """Write a line to the disk; it begins with a line's end, since the one before may be torn."""
    with FileIO(open_regular(log, create=True), "a") as lines:
        lines.write(f"\n{json.dumps(fields)}\n".encode())
        os.fsync(lines.fileno())
