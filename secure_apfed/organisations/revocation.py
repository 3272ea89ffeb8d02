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
    "RENEWED_CERTIFICATE_FILE",
    "REVOCATION_LIST_FILE",
    "FilesReplacedError",
    "ListReader",
    "RevocationWatch",
    "SessionFiles",
    "find_newest_pem",
    "find_readers",
    "find_revoked_names",
    "find_unread_lists",
]

REVOCATION_LIST_FILE = "revoked.txt"
"""The file in a party's folder of what it refuses; `project seal` and `project join` make it."""
RENEWED_CERTIFICATE_FILE = "renewed-{}.json"
"""The file in a party's folder with the renewed certificate of a party, by its name."""
_SEALED = "sealed.json"
_PARTY_FILES = ("party.yaml", "party.yml")
_MAX_SUBFOLDERS = 1000


@dataclass(frozen=True)
class ListReader:
    """A party on this machine that may read a revocation list.

    Attributes:
        party: the party's name.
        path: path of its settings file.
        revoked: the revocation list that the file names; None: it names none.
        relay: the address of the relay that the party dials; None: it uses no relay.
    """

    party: str
    path: Path
    revoked: Path | None
    relay: str | None = None


def find_readers(
    revocation_list: Path, *, further_folders: Sequence[Path] = ()
) -> tuple[list[ListReader], list[ListReader]]:
    """Find the parties near a revocation list that read it, and the parties with TLS that do not.

    A party reads the list that its settings file names; a file without TLS is ignored.

    Args:
        revocation_list: the list, whose own folder and subfolders are searched.
        further_folders: further folders to search, with their subfolders.
    """
    from secure_apfed.organisations.party import PartyFile

    readers: list[ListReader] = []
    non_readers: list[ListReader] = []
    for path in _iter_party_files([revocation_list.absolute().parent, *further_folders]):
        try:
            file = PartyFile.from_file(path)
        except (ApfedError, OSError):
            continue  # `project check` reports its fault
        if file.tls is None:
            continue
        named_list = file.tls.revoked
        reader = ListReader(file.party, path, named_list, file.relay)
        if named_list is not None and named_list.resolve() == revocation_list.resolve():
            readers.append(reader)
        else:
            non_readers.append(reader)
    return readers, non_readers


def _iter_party_files(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the parties' settings files in these folders and their direct subfolders, each once."""
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
    """Return the non-empty revocation lists near a party that its settings do not name.

    An operator may think that they have an effect. Files with "revoked" in their names are searched
    in the party's folder and in the folder of `tls.ca`.

    `file`: the party's settings file, which has `tls`.
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
    """Return whether a file is a readable revocation list with at least one entry."""
    try:
        return bool(load_revocations(path))
    except ConfigError:
        return False


def find_revoked_names(file: "PartyFile", revoked: frozenset[str]) -> list[str]:
    """Return the names of a party's peers whose identity or certificate is revoked.

    `file`: the party's settings file. `revoked`: entries of a revocation list.
    """
    entries_by_peer = _make_entries_by_peer(file)
    return [name for name, entries in entries_by_peer.items() if entries & revoked]


def _make_entries_by_peer(file: "PartyFile") -> dict[str, frozenset[str]]:
    """Return, by peer, the entries of a revocation list that would revoke it.

    They are the peer's identity, and digest and serial number of its newest certificate in the
    party's folder, if there is one.
    """
    entries_by_peer = {name: {peer.identity.lower()} for name, peer in file.peers.items()}
    sealed = file.folder / _SEALED
    if sealed.is_file():
        document = load_json(sealed, dict[str, Any]).get("document", {})
        certificates = document.get("certificates", {}) if isinstance(document, dict) else {}
        if not isinstance(certificates, dict):
            certificates = {}
        for name, pem in certificates.items():
            if name in entries_by_peer and isinstance(pem, str):
                newest = find_newest_pem(file.folder, name, pem)
                entries_by_peer[name] |= make_revocation_entries(newest.encode())
    return {name: frozenset(entries) for name, entries in entries_by_peer.items()}


def find_newest_pem(folder: Path, name: str, sealed: str) -> str:
    """Return a party's newest certificate in a folder, in PEM.

    `name`: the party. `sealed`: the party's certificate in the project that all signed, which is
    returned if none was issued later.
    """
    path = folder / RENEWED_CERTIFICATE_FILE.format(name)
    if not path.is_file():
        return sealed
    document = load_json(path, dict[str, Any]).get("document", {})
    pem = document.get("certificate") if isinstance(document, dict) else None
    return pem if isinstance(pem, str) else sealed


class RevocationWatch:
    """A `LinkObserver` that ends a session if a connected peer is revoked.

    New connections of a revoked peer are refused elsewhere. This reads the party's revocation list
    again at each message, if it changed. A list that is missing or unreadable ends the session,
    too.
    """

    def __init__(self, file: "PartyFile") -> None:
        """Find the entries that would revoke each peer.

        `file`: the party's settings file; without TLS or a list nothing is ever revoked.
        """
        self._me = file.party
        self._list_path = file.tls.revoked if file.tls is not None else None
        self._revocation_list = RevokedList(self._list_path)
        self._entries_by_peer: Mapping[str, frozenset[str]] = (
            _make_entries_by_peer(file) if self._list_path else {}
        )

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Raise PartyLeftError before a message is sent to a revoked peer."""
        self._require_valid_peer(envelope.receiver)

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Raise PartyLeftError if a message is from a revoked peer."""
        self._require_valid_peer(envelope.sender)

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Do nothing: a message that cannot be decrypted ends the session anyway."""

    def _require_valid_peer(self, peer: str) -> None:
        """Read the list again if it changed, and check a peer.

        Raises:
            PartyLeftError: the list revokes the peer.
            ConfigError: the list is missing or unreadable.
        """
        if self._list_path is None:
            return
        try:
            revoked = self._revocation_list.load_entries()
        except ConfigError as error:
            raise ConfigError(
                f"tls.revoked: {self._me} cannot read {self._list_path} any more ({error}); put it "
                "back"
            ) from error
        if self._entries_by_peer.get(peer, frozenset()) & revoked:
            raise PartyLeftError(
                f"{peer} is revoked by the list of {self._me} ({self._list_path}); where {peer} "
                f"has a renewed certificate, take that over at {self._me}: secure-apfed certs "
                f"accept {RENEWED_CERTIFICATE_FILE.format(peer)}",
                missing_parties=(peer,),
            )


class FilesReplacedError(ApfedError):
    """A file of a session was replaced while it waited for others, so the session restarts."""


class SessionFiles:
    """The files with which a session of joint predictions started: settings, TLS, certificates.

    Such a session may wait for days, so it restarts if one of the files is replaced.

    Args:
        path: path of the party's settings file.
        file: content of the party's settings file.
        others: further files, whose replacement matters as well.
        say: called once with a message if a replaced file cannot be used.
    """

    def __init__(
        self, path: Path, file: "PartyFile", *others: Path, show_line: Callable[[str], None]
    ) -> None:
        """Remember the files' present versions. The class describes the arguments."""
        self._settings_path = path
        self._settings = file
        self._further_files = others
        self._show_line = show_line
        self._first_version_by_file = self._read_versions()
        # The versions that were last found unusable; none yet.
        self._unusable_version_by_file = self._first_version_by_file

    def require_same(self, missing: Mapping[str, str]) -> None:
        """Raise FilesReplacedError if a file was replaced by one that a new session can use.

        If the new file cannot be used, this is reported once, and the session goes on.

        Args:
            missing: the peers that have not connected yet; unused. Links pass them to the callback
                that they call while peers are missing, as which this method serves.
        """
        version_by_file = self._read_versions()
        if version_by_file in (self._first_version_by_file, self._unusable_version_by_file):
            return
        party = self._settings.party
        names = ", ".join(
            path.name
            for path, version in version_by_file.items()
            if version != self._first_version_by_file[path]
        )
        try:
            self._require_usable()
        except (ApfedError, OSError) as error:
            self._unusable_version_by_file = version_by_file
            self._show_line(
                f"{party} goes on with what it began with, for {names} was replaced and cannot be "
                f"used: {error}"
            )
            return
        raise FilesReplacedError(
            f"nothing to do: {party} begins its session anew, for {names} was replaced"
        )

    def _require_usable(self) -> None:
        """Read all files as a new session would.

        Raises ApfedError, OSError: a file cannot be used.
        """
        # The results are not needed: each call raises if its file is unusable.
        self._settings.from_file(self._settings_path)
        tls = self._settings.tls
        if tls is not None:
            revoked = load_revocations(tls.revoked)
            name = self._settings.party
            Credentials.from_files(tls.ca, tls.certificate, tls.key, name=name, revoked=revoked)

    def _read_versions(self) -> dict[Path, tuple[int, int, int] | None]:
        """Return, by file, values that change when the file is replaced; None: it is missing."""
        file = self._settings
        paths = [self._settings_path, *self._further_files, file.folder / _SEALED]
        paths += [file.folder / RENEWED_CERTIFICATE_FILE.format(name) for name in file.peers]
        if file.tls is not None:
            paths += [file.tls.ca, file.tls.certificate, file.tls.key]
            paths += [file.tls.revoked] if file.tls.revoked is not None else []
        return {path: _read_version(path) for path in paths}


def _read_version(path: Path) -> tuple[int, int, int] | None:
    """Return time of change, size and inode of a file; None: it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
