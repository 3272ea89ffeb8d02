"""`fetch`: downloads a data set from its official addresses, once, and checks it.

Run by: a person, at the command line. Trusts: only the catalogue's digests; servers and
mirrors may send anything. A download continues where it was interrupted, and a file
appears under its name only when it is whole and right.
"""

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx

from secure_apfed.data.catalogue import find_dataset
from secure_apfed.data.files import DataFile, check_digest, default_folder, read_checked
from secure_apfed.data.pool import Download
from secure_apfed.errors import DataError

__all__ = ["Progress", "fetch", "fetch_file"]

# (file, bytes so far, bytes in all or None where the server does not say)
Progress = Callable[[str, int, int | None], None]

_ATTEMPTS = 3
_TIMEOUT_SECONDS = 30.0


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
        DataError: it cannot be fetched, or no address gave the right bytes; what has
            arrived stays, so running again continues.
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
    targets = _targets(download, folder)
    if all(_is_here(path, file) for path, file in targets.items()):
        return list(targets)
    failures: list[str] = []
    for address in download.addresses:
        # One part for each address: mirrors may compress the same bytes differently.
        mark = hashlib.sha256(address.encode()).hexdigest()[:8]
        part = folder / f".{download.file.name}.{mark}.part"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _download(address, part, download.file, progress)
            _install(download, part, targets, address)
        except DataError as error:
            failures.append(str(error))
        except OSError as error:
            raise DataError(
                f"{folder}: cannot write ({error.strerror}); free space or choose another folder"
            ) from error
        else:
            return list(targets)
    raise DataError(
        f"{dataset}: could not fetch {download.file.name}: {'; '.join(failures)}. Run it again to "
        f"continue, or put the file into {folder} by hand"
    )


def _targets(download: Download, folder: Path) -> dict[Path, DataFile]:
    """Return what lies in `folder` after the download."""
    if download.members:
        return {folder / file.name: file for file in download.members}
    return {folder / f"{download.file.name}.gz": download.file}


def _is_here(path: Path, file: DataFile) -> bool:
    if not path.is_file():
        return False
    try:
        read_checked(path, file, remedy="get it again")
    except DataError:
        return False
    return True


def _download(address: str, part: Path, file: DataFile, progress: Progress) -> None:
    """Bring `part` to its full length, continuing after interruptions."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _continue(address, part, file, progress)
        except httpx.HTTPStatusError as error:
            raise DataError(f"{address} answers {error.response.status_code}") from error
        except httpx.HTTPError as error:
            if attempt == _ATTEMPTS:
                raise DataError(
                    f"{address} was interrupted ({error or type(error).__name__})"
                ) from error
        except httpx.InvalidURL as error:
            raise DataError(f"{address} is no address ({error})") from error
        else:
            return


def _continue(address: str, part: Path, wanted: DataFile, progress: Progress) -> None:
    """Append what `part` still lacks, or begin again where the server sends the whole file."""
    most = _most_bytes(wanted)
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with httpx.stream(
        "GET", address, headers=headers, follow_redirects=True, timeout=_TIMEOUT_SECONDS
    ) as response:
        if have and response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to send; the digest decides
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            part.unlink(missing_ok=True)
            raise httpx.RemoteProtocolError("it sent another range than it was asked for")
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdecimal() else None
        with part.open("ab" if have else "wb") as file:
            for chunk in response.iter_raw():
                have += len(chunk)
                if have > most:
                    part.unlink()
                    raise DataError(
                        f"{address} sends more than the {most} bytes that the file may have"
                    )
                file.write(chunk)
                progress(wanted.name, have, total)


def _most_bytes(file: DataFile) -> int:
    """How much gzip may take, at its worst, for what does not compress."""
    return file.size + file.size // 100 + 2**12


def _install(download: Download, part: Path, targets: dict[Path, DataFile], address: str) -> None:
    """Check `part` and move it, or what it packs, to its final place; a wrong one is removed."""
    remedy = f"{address} sends other bytes, which are removed again"
    try:
        read_checked(part, download.file, remedy=remedy, compressed=not download.members)
        if download.members:
            _unpack(part, targets, remedy)
    except DataError:
        part.unlink()
        raise
    if download.members:
        part.unlink()
    else:
        part.replace(*targets)


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
