"""The files of a data set: found in local folders or fetched, decompressed, and checked.

Run by: whoever loads a built-in set or fetches one. Checksums are of the UNCOMPRESSED bytes,
because distributors recompress (Debian strips gzip headers, mirrors choose levels). They alone are
trusted: servers and mirrors may send anything. A download lies beside its place until it is whole
and right; an address that breaks off is tried again, from the start.
"""

import gzip
import hashlib
import os
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from secure_apfed.errors import DataError

__all__ = [
    "DataFile",
    "Download",
    "Progress",
    "check_digest",
    "data_folders",
    "default_folder",
    "fetch_file",
    "read_checked",
    "read_file",
]

_VARIABLE = "SECURE_APFED_DATA"
# (file, bytes so far, bytes in all or None where the server does not say)
Progress = Callable[[str, int, int | None], None]
_REPEATS = 2
_PAUSE_SECONDS = 1.0
_TIMEOUT_SECONDS = 30.0
_CHUNK = 2**16


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


def read_file(path: Path, *, most: int | None = None, compressed: bool | None = None) -> bytes:
    """Return a file's bytes, decompressed where it is.

    Args:
        path: of the file.
        most: bytes, decompressed; beyond them nothing is read or inflated. None: no bound, for
            the user's own files.
        compressed: whether it is a gzip file; None goes by its name.
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
    """Read a file of the catalogue, no further than its size, and check it."""
    try:
        content = read_file(path, most=file.size, compressed=compressed)
    except DataError as error:
        raise DataError(f"{error}: {remedy}") from error
    check_digest(content, file, path=path, remedy=remedy)
    return content


def fetch_file(
    download: Download, folder: Path, *, dataset: str, progress: Progress | None = None
) -> list[Path]:
    """Fetch one file, or one archive and its members, into `folder`."""
    file, members = download.file, {folder / member.name: member for member in download.members}
    place = folder / (file.name if members else f"{file.name}.gz")
    targets = members or {place: file}
    if all(_is_right(path, wanted, packed=None) for path, wanted in targets.items()):
        return list(targets)
    failures: list[str] = []
    for address in download.addresses:
        try:
            _retrieve(address, place, file, progress, packed=not members)
            if members:
                _unpack(place, members, _remedy(address))
        except _InterruptedError as error:
            failures.append(f"{address} was interrupted ({error})")
        except DataError as error:
            failures.append(str(error))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(
                f"{folder}: cannot write ({reason}); free space or choose another folder"
            ) from error
        else:
            return list(targets)
        finally:
            if members:
                place.unlink(missing_ok=True)
    raise DataError(
        f"{dataset}: could not fetch {file.name}: {'; '.join(failures)}. Run it again, or put the "
        f"file into {folder} by hand"
    )


def _remedy(address: str) -> str:
    return f"{address} sends other bytes, which are removed again"


def _is_right(path: Path, file: DataFile, *, packed: bool | None) -> bool:
    if not path.is_file():
        return False
    try:
        read_checked(path, file, remedy="get it again", compressed=packed)
    except DataError:
        return False
    return True


class _InterruptedError(Exception):
    """The connection broke, or the server fell silent."""


def _retrieve(
    address: str, place: Path, file: DataFile, progress: Progress | None, *, packed: bool
) -> None:
    """Bring the file from one address; what lies in its place and is wrong is removed first."""
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    written = place.with_name(f".{place.name}.part")
    try:
        for left in reversed(range(_REPEATS + 1)):
            try:
                _download(address, written, file, progress)
                break
            except _InterruptedError:
                if not left:
                    raise
                time.sleep(_PAUSE_SECONDS)
        read_checked(written, file, remedy=_remedy(address), compressed=packed)
        written.replace(place)
    finally:
        written.unlink(missing_ok=True)


def _download(address: str, written: Path, file: DataFile, progress: Progress | None) -> None:
    # What gzip may take, at its worst, for what does not compress.
    most, done = file.size + file.size // 100 + 2**12, 0
    with written.open("wb") as target:
        for chunk, total in _chunks(address):
            done += len(chunk)
            if done > most:
                raise DataError(
                    f"{address} sends more than the {most} bytes that the file may have"
                )
            target.write(chunk)
            if progress is not None:
                progress(file.name, done, total)


def _chunks(address: str) -> Iterator[tuple[bytes, int | None]]:
    """Yield what comes from an address of the catalogue, and the bytes in all if they are told."""
    request = Request(address, headers={"Accept-Encoding": "identity"})  # noqa: S310  # catalogue
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310  # as above
            total, done = answer.length, 0
            while chunk := answer.read(_CHUNK):
                done += len(chunk)
                yield chunk, total
    except HTTPError as error:
        raise DataError(f"{address} answers {error.code}") from error
    except (OSError, HTTPException) as error:
        raise _InterruptedError(str(error) or type(error).__name__) from error
    if total is not None and done < total:
        raise _InterruptedError(f"{done} of {total} bytes came")


def _unpack(archive: Path, targets: dict[Path, DataFile], remedy: str) -> None:
    """Take exactly the targets out of a checked archive; no path in it is ever followed."""
    wanted = {path.name: path for path in targets}
    with tarfile.open(archive, "r:gz") as tar:
        for entry in tar:
            name = Path(entry.name).name
            stream = tar.extractfile(entry) if entry.isfile() and name in wanted else None
            if stream is None:
                continue
            path = wanted.pop(name)
            content = stream.read()
            check_digest(content, targets[path], path=archive / name, remedy=remedy)
            fresh = path.with_name(f".{name}.fresh")
            fresh.write_bytes(content)
            fresh.replace(path)
    if wanted:
        raise DataError(f"{archive}: lacks {', '.join(wanted)}; {remedy}")
