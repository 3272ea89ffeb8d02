"""`fetch`: downloads a data set from its official addresses, once, and checks it.

Run by: a person, at the command line. Trusts: only the catalogue's digests; servers and mirrors
may send anything. A download lies beside its place until it is whole and right; an address that
breaks off is tried again, from the start.
"""

import tarfile
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from secure_apfed.data.catalogue import find_dataset
from secure_apfed.data.files import (
    DataFile,
    Download,
    check_digest,
    default_folder,
    read_checked,
)
from secure_apfed.errors import DataError

__all__ = ["Progress", "fetch", "fetch_file"]

# (file, bytes so far, bytes in all or None where the server does not say)
Progress = Callable[[str, int, int | None], None]

_REPEATS = 2
_PAUSE_SECONDS = 1.0
_TIMEOUT_SECONDS = 30.0
_CHUNK = 2**16


def _quiet(file: str, done: int, total: int | None) -> None:
    """Show nothing."""


def fetch(name: str, folder: Path | None = None, progress: Progress = _quiet) -> tuple[Path, ...]:
    """Put the files of a data set into `folder`/`name` and return where they are.

    Args:
        name: a key of `DATASETS`.
        folder: a data folder; None takes `default_folder()`.
        progress: called as bytes arrive.

    Returns:
        The files; empty where the set ships with a library.

    Raises:
        ConfigError: no such set.
        DataError: it cannot be fetched, or no address gave the right bytes; files that are
            here and right are not fetched again.
    """
    dataset = find_dataset(name)
    if dataset.files and not dataset.downloads:
        raise DataError(f"{name} cannot be fetched: {dataset.how}; see {dataset.source}")
    target = (folder or default_folder()).expanduser() / name
    paths: list[Path] = []
    for download in dataset.downloads:
        paths += fetch_file(download, target, dataset=name, progress=progress)
    return tuple(paths)


def fetch_file(
    download: Download, folder: Path, *, dataset: str, progress: Progress = _quiet
) -> list[Path]:
    """Fetch one file, or one archive and its members, into `folder`.

    Raises:
        DataError: as `fetch`; names every address and what went wrong there.
    """
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
    address: str, place: Path, file: DataFile, progress: Progress, *, packed: bool
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


def _download(address: str, written: Path, file: DataFile, progress: Progress) -> None:
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
