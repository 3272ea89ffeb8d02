"""`fetch`: downloads a data set from its official addresses, once, and checks it.

Run by: a person, at the command line. Trusts: only the catalogue's digests; servers and mirrors
may send anything. Pooch downloads beside the place and moves a file there when it is whole and
right; an address that breaks off is tried again, from the start.
"""

import gzip
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path

import pooch
from requests.exceptions import HTTPError, RequestException

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
        except RequestException as error:
            failures.append(f"{address} was interrupted ({error or type(error).__name__})")
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


class _Bounded:
    """Counts what pooch has written, shows it, and stops a server that sends too much."""

    total = 0  # pooch sets it; 0 where the server does not say

    def __init__(self, written: Path, file: DataFile, address: str, show: Progress) -> None:
        self._written, self._file, self._address, self._show = written, file, address, show
        # What gzip may take, at its worst, for what does not compress.
        self._most = file.size + file.size // 100 + 2**12

    def update(self, _: int) -> None:
        done = self._written.stat().st_size
        if done > self._most:
            raise DataError(
                f"{self._address} sends more than the {self._most} bytes that the file may have"
            )
        self._show(self._file.name, done, self.total or None)

    def reset(self) -> None:
        """Part of what pooch asks of a progress bar."""

    def close(self) -> None:
        """Part of what pooch asks of a progress bar."""


def _retrieve(
    address: str, place: Path, file: DataFile, progress: Progress, *, packed: bool
) -> None:
    """Bring the file from one address; what lies in its place and is wrong is removed first."""

    def download(url: str, output: str, _: object) -> None:
        written = Path(output)
        stream = pooch.HTTPDownloader(
            progressbar=_Bounded(written, file, url, progress), chunk_size=_CHUNK,
            timeout=_TIMEOUT_SECONDS, headers={"Accept-Encoding": "identity"},
        )  # fmt: skip
        try:
            stream(url, output, None)
        except HTTPError as error:
            code = error.response.status_code if error.response is not None else error
            raise DataError(f"{url} answers {code}") from error
        if packed and _is_right(written, file, packed=False):
            # The server said that the gzip file is an encoding, which was undone on the way.
            written.write_bytes(gzip.compress(written.read_bytes(), mtime=0))
        read_checked(written, file, remedy=_remedy(url), compressed=packed)
        written.chmod(0o644)  # pooch makes it for its owner alone, and data are shared

    place.unlink(missing_ok=True)
    pooch.get_logger().setLevel(logging.ERROR)
    pooch.create(
        place.parent, base_url="", registry={place.name: None}, urls={place.name: address},
        retry_if_failed=_REPEATS,
    ).fetch(place.name, downloader=download)  # fmt: skip


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
