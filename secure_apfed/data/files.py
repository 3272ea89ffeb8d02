"""Finding, decompressing and checking the files of a data set in local folders.

Run by: whoever loads a built-in set. Checksums are of the UNCOMPRESSED bytes, because
distributors recompress (Debian strips gzip headers, mirrors choose levels).
"""

import gzip
import hashlib
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from secure_apfed.errors import DataError

__all__ = [
    "DataFile", "Download", "check_digest", "data_folders", "default_folder", "find_file",
    "read_checked", "read_file",
]  # fmt: skip

_VARIABLE = "SECURE_APFED_DATA"


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Attributes:
        name: its official name, uncompressed; `name.gz` is taken as well.
        size: uncompressed bytes; nothing is inflated beyond them.
        sha256: hex digest of the uncompressed bytes; empty for members of a checked archive.
        exact: False where holders' files differ: `size` is the most that is read, and the reader
            says what is wrong with a file.
    """

    name: str
    size: int
    sha256: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Download:
    """One file to fetch.

    Attributes:
        file: a gzip file, named and hashed as its uncompressed content; or, where there
            are members, a .tar.gz archive, named and hashed as it is.
        addresses: where it is, tried in order.
        members: the files to take out of an archive; nothing else is written.
    """

    file: DataFile
    addresses: tuple[str, ...]
    members: tuple[DataFile, ...] = ()


def default_folder() -> Path:
    """The first of `data_folders(None)`: where a download goes unless told otherwise."""
    return data_folders(None)[0]


def data_folders(folder: Path | None) -> tuple[Path, ...]:
    """Return the folders to search: `folder`, else SECURE_APFED_DATA's, else the user's cache."""
    if folder is not None:
        return (folder.expanduser(),)
    listed = [Path(part) for part in os.environ.get(_VARIABLE, "").split(os.pathsep) if part]
    return tuple(path.expanduser() for path in listed or [Path("~/.cache/secure-apfed")])


def find_file(
    file: DataFile, *, dataset: str, subfolders: Sequence[str], folder: Path | None, remedy: str
) -> Path:
    """Return where `file` lies, compressed or not.

    In each folder of `data_folders(folder)` the set's own sub-folders come first, then those
    that the system's packages use; files lying loose in a folder come last, because several
    sets use the same file names.

    Raises:
        DataError: nowhere; names every folder searched and the remedy.
    """
    roots = data_folders(folder)
    prefixes = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr/local", "/usr"))
    places = [root / sub for root in roots for sub in (dataset, *subfolders)]
    places += [Path(prefix, "share", "datasets", sub) for prefix in prefixes for sub in subfolders]
    places += roots
    for place in places:
        for path in (place / file.name, place / f"{file.name}.gz"):
            if path.is_file():
                return path
    raise DataError(
        f"{dataset}: neither {file.name} nor {file.name}.gz is in any of "
        f"{', '.join(str(place) for place in places)}; {remedy}, or name "
        f"the folder that holds it in data.folder or {_VARIABLE}"
    )


def read_file(path: Path, *, most: int | None = None, compressed: bool | None = None) -> bytes:
    """Return a file's bytes, decompressed where it is.

    Args:
        path: of the file.
        most: bytes, decompressed; beyond them nothing is read or inflated. None: no bound, for
            the user's own files.
        compressed: whether it is a gzip file; None goes by its name.

    Raises:
        DataError: unreadable, larger, or a damaged gzip file.
    """
    packed = path.suffix == ".gz" if compressed is None else compressed
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            content: bytes = file.read(-1 if most is None else most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: truncated or damaged gzip file ({error}); get it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if most is not None and len(content) > most:
        raise DataError(
            f"{path}: more than the {most} uncompressed bytes expected; it is another file"
        )
    return content


def check_digest(content: bytes, file: DataFile, *, path: Path, remedy: str) -> None:
    """Hold the uncompressed bytes against the size and digest of the catalogue.

    Raises:
        DataError: says what was expected, what was found, and the remedy.
    """
    if not file.exact:
        return
    if len(content) != file.size:
        raise DataError(
            f"{path}: {len(content)} uncompressed bytes, expected {file.size}; it is truncated or "
            f"another set's file: {remedy}"
        )
    found = hashlib.sha256(content).hexdigest() if file.sha256 else ""
    if found != file.sha256:
        raise DataError(
            f"{path}: the SHA-256 of its uncompressed bytes is {found}, expected {file.sha256}; it "
            f"is damaged or another set's file: {remedy}"
        )


def read_checked(
    path: Path, file: DataFile, *, remedy: str, compressed: bool | None = None
) -> bytes:
    """Read a file of the catalogue, no further than its size, and check it.

    Raises:
        DataError: as `read_file` and `check_digest`.
    """
    try:
        content = read_file(path, most=file.size, compressed=compressed)
    except DataError as error:
        raise DataError(f"{error}: {remedy}") from error
    check_digest(content, file, path=path, remedy=remedy)
    return content
