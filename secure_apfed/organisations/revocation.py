"""Lists of revoked keys, and the search for parties that read them; an unread list has no effect.

Run by: `certs revoke` and `project check`, which look for the files of parties that read a list;
and every party over TLS while it runs, which reads its list again whenever it changes and ends its
session with a peer that is on it. A party that serves predictions may wait for days, and must use
the files as they are now: if one of them is replaced while nobody asks, its session restarts
(`SessionFiles`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apfed_protocols.errors import PartyLeftError
from secure_apfed.base.files import load_json
from secure_apfed.errors import ApfedError, ConfigError
from secure_apfed.exchange import Envelope
from secure_apfed.exchange.certificates import (
    Credentials,
    RevokedList,
    load_revocations,
    make_revocation_entries,
)

if TYPE_CHECKING:
    from secure_apfed.organisations.party import PartyFile

__all__ = [
    "RENEWED",
    "REVOKED",
    "FilesReplacedError",
    "Reader",
    "RevocationWatch",
    "SessionFiles",
    "find_newest_pem",
    "find_readers",
    "find_revoked_names",
    "find_unread_lists",
]

REVOKED = "revoked.txt"
"""The file in a party's folder of what it refuses; `project seal` and `project join` make it."""
RENEWED = "renewed-{}.json"
"""The file in a party's folder with the renewed certificate of a party, by its name."""
_SEALED = "sealed.json"
_PARTY_FILES = ("party.yaml", "party.yml")
_MAX_SUBFOLDERS = 1000


@dataclass(frozen=True)
class Reader:
    """A party's file, and the revocation list that it names.

    Attributes:
        party: the party's name.
        path: path of its file.
        revoked: the list; None: it names none.
        relay: the address of the relay that the party dials; None: none.
    """

    party: str
    path: Path
    revoked: Path | None
    relay: str | None = None


def find_readers(
    revoked: Path, *, beside: Sequence[Path] = ()
) -> tuple[list[Reader], list[Reader]]:
    """Return the parties' files near a list that name it, and those with TLS that do not.

    Args:
        revoked: the list.
        beside: further folders to search with their subfolders, in addition to the list's own.
    """
    from secure_apfed.organisations.party import PartyFile

    readers: list[Reader] = []
    others: list[Reader] = []
    for path in _iter_party_files([revoked.absolute().parent, *beside]):
        try:
            file = PartyFile.from_file(path)
        except (ApfedError, OSError):
            continue  # `project check` reports its fault
        if file.tls is None:
            continue
        reader = Reader(file.party, path, file.tls.revoked, file.relay)
        named_list = file.tls.revoked
        if named_list is not None and named_list.resolve() == revoked.resolve():
            readers.append(reader)
        else:
            others.append(reader)
    return readers, others


def _iter_party_files(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield parties' files in these folders and their direct subfolders, each once."""
    yielded: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            continue
        subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
        for searched in (folder, *subfolders[:_MAX_SUBFOLDERS]):
            for name in _PARTY_FILES:
                path = searched / name
                if path.is_file() and path.resolve() not in yielded:
                    yielded.add(path.resolve())
                    yield path


def find_unread_lists(file: "PartyFile") -> list[Path]:
    """Return the non-empty revocation lists beside a party's files that its settings do not name.

    Searched are its folder and that of `tls.ca`, for names with "revoked".
    """
    assert file.tls is not None
    read_list = file.tls.revoked.resolve() if file.tls.revoked is not None else None
    folders = dict.fromkeys((file.folder.resolve(), file.tls.ca.resolve().parent))
    lists = dict.fromkeys(
        path.resolve()
        for folder in folders
        for path in sorted(folder.glob("*revoked*"))
        if path.is_file()
    )
    return [path for path in lists if path != read_list and _revokes_anything(path)]


def _revokes_anything(path: Path) -> bool:
    """Return whether a list has at least one entry."""
    try:
        return bool(load_revocations(path))
    except ConfigError:
        return False


def find_revoked_names(file: "PartyFile", revoked: frozenset[str]) -> list[str]:
    """Return the names of peers whose identity or certificate is revoked."""
    entries_by_peer = _make_entries_by_peer(file)
    return [name for name, entries in entries_by_peer.items() if entries & revoked]


def _make_entries_by_peer(file: "PartyFile") -> dict[str, frozenset[str]]:
    """Return by peer the entries by which a list may revoke it: its identity, and its newest
    certificate in the party's folder.
    """
    entries_by_peer = {name: {peer.identity.lower()} for name, peer in file.peers.items()}
    sealed = file.folder / _SEALED
    if sealed.is_file():
        document = load_json(sealed, dict[str, Any]).get("document", {})
        certificates = document.get("certificates", {}) if isinstance(document, dict) else {}
        for name, pem in certificates.items() if isinstance(certificates, dict) else ():
            if name in entries_by_peer and isinstance(pem, str):
                newest = find_newest_pem(file.folder, name, pem)
                entries_by_peer[name] |= make_revocation_entries(newest.encode())
    return {name: frozenset(entries) for name, entries in entries_by_peer.items()}


def find_newest_pem(folder: Path, name: str, sealed: str) -> str:
    """Return a party's newest certificate (PEM) in a folder: a renewed one, or `sealed`, that of
    the sealed project.
    """
    path = folder / RENEWED.format(name)
    if not path.is_file():
        return sealed
    document = load_json(path, dict[str, Any]).get("document", {})
    pem = document.get("certificate") if isinstance(document, dict) else None
    return pem if isinstance(pem, str) else sealed


class RevocationWatch:
    """A `LinkObserver` that reads a party's list of revoked keys again when it changes.

    A revoked peer is refused when a connection is proved; this also ends a session with a peer that
    was connected before. A list that is missing or unreadable ends it, too.
    """

    def __init__(self, file: "PartyFile") -> None:
        """Find the list that the file names, and the entries that would revoke each peer."""
        self._me = file.party
        self._path = file.tls.revoked if file.tls is not None else None
        self._list = RevokedList(self._path)
        self._entries_by_peer: Mapping[str, frozenset[str]] = (
            _make_entries_by_peer(file) if self._path else {}
        )

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Refuse to send to a revoked peer. Raises PartyLeftError."""
        self._require_valid_peer(envelope.receiver)

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Refuse a message from a revoked peer. Raises PartyLeftError."""
        self._require_valid_peer(envelope.sender)

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Do nothing, since the session ends anyway."""

    def _require_valid_peer(self, peer: str) -> None:
        """Read the list if it changed, and raise PartyLeftError if it revokes the peer."""
        if self._path is None:
            return
        try:
            revoked = self._list.load_entries()
        except ConfigError as error:
            raise ConfigError(
                f"tls.revoked: {self._me} cannot read {self._path} any more ({error}); put it back"
            ) from error
        if self._entries_by_peer.get(peer, frozenset()) & revoked:
            raise PartyLeftError(
                f"{peer} is revoked by the list of {self._me} ({self._path}); where {peer} has a "
                f"renewed certificate, take that over at {self._me}: secure-apfed certs accept "
                f"{RENEWED.format(peer)}",
                left=(peer,),
            )


class FilesReplacedError(ApfedError):
    """The files of a session were replaced while it waited for others; it restarts."""


class SessionFiles:
    """The files with which a serving session started: the party's file and those of TLS.

    The session restarts if one of them is replaced.

    Args:
        path: path of the party's file.
        file: content of the party's file.
        others: further files, whose replacement matters as well.
        say: called once with a message if a replaced file cannot be used.
    """

    def __init__(
        self, path: Path, file: "PartyFile", *others: Path, say: Callable[[str], None]
    ) -> None:
        """Remember the files' present state."""
        self._path = path
        self._file = file
        self._others = others
        self._show_line = say
        self._stamps = self._compute_stamps()  # at the start
        self._unusable = self._stamps  # when they were last found unusable

    def require_same(self, missing: Mapping[str, str]) -> None:
        """Raise FilesReplacedError if a file was replaced by one that a new session can use.

        Args:
            missing: the peers that have not come yet; unused, as this is called like `Missed`.
        """
        stamps = self._compute_stamps()
        if stamps in (self._stamps, self._unusable):
            return
        party = self._file.party
        names = ", ".join(
            path.name for path, stamp in stamps.items() if stamp != self._stamps[path]
        )
        try:
            self._require_usable()
        except (ApfedError, OSError) as error:
            self._unusable = stamps
            self._show_line(
                f"{party} goes on with what it began with, for {names} was replaced and cannot be "
                f"used: {error}"
            )
            return
        raise FilesReplacedError(
            f"nothing to do: {party} begins its session anew, for {names} was replaced"
        )

    def _require_usable(self) -> None:
        """Read all files as a new session would. Raises ConfigError, OSError: one is unusable."""
        # The results are not needed: each call raises if its file is unusable.
        self._file.from_file(self._path)
        tls = self._file.tls
        if tls is not None:
            revoked = load_revocations(tls.revoked)
            name = self._file.party
            Credentials.from_files(tls.ca, tls.certificate, tls.key, name=name, revoked=revoked)

    def _compute_stamps(self) -> dict[Path, tuple[int, int, int] | None]:
        """Return a stamp of each file, which changes when the file is replaced; None: missing."""
        file = self._file
        paths = [self._path, *self._others, file.folder / _SEALED]
        paths += [file.folder / RENEWED.format(name) for name in file.peers]
        if file.tls is not None:
            paths += [file.tls.ca, file.tls.certificate, file.tls.key]
            paths += [file.tls.revoked] if file.tls.revoked is not None else []
        return {path: _read_stamp(path) for path in paths}


def _read_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return modification time, size and inode of a file; None: it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
