"""A party's record of its alignments on disk: how often with which peer.

Run by: each party for itself. A history bounds what guessed IDs can find out. Protects from nothing
if its file is deleted: it is this party's own.
"""

import errno
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from secure_apfed.base.files import PathLike
from secure_apfed.base.names import check_name
from secure_apfed.errors import CheckpointError, DataError
from secure_apfed.settings.alignment import AlignmentSettings

_LOCK_TIMEOUT_S = 30  # seconds to wait for another process that has the file locked


class AlignmentHistory:
    """A record of the intersections that a party took part in, which limits their number by peer.

    A peer may put guessed IDs into its set (ID stuffing, attack A10). In each run it then learns
    which of up to `maximum_ids` guesses are right. If it deviates from the protocol, it can test
    somewhat more guesses (`secure_apfed.alignment.max_guesses`). Over many runs it could try out a
    whole population. With at most R runs a peer tries out at most R times as many IDs as in one.
    Peers are identified by the names that the links authenticate; a peer with two names gets twice
    the runs.

    Call `record_run` before each role is started.

    Args:
        path: the file, in JSON lines.
        runs_with_a_peer: the largest number of runs with the same peer, R.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     history = AlignmentHistory(Path(folder) / "alignments.jsonl", runs_with_a_peer=1)
        ...     history.record_run(session="November", peers=["shop"])
        ...     history.record_run(session="December", peers=["shop"])
        Traceback (most recent call last):
        apfed_protocols.errors.DataError: shop aligned 1 time(s) with this party already, ...
    """

    def __init__(self, path: PathLike, *, runs_with_a_peer: int) -> None:
        """Open the history; the class describes the arguments.

        Raises:
            DataError: the limit is below 1.
            CheckpointError: the file is damaged.
        """
        if runs_with_a_peer < 1:
            raise DataError(f"runs_with_a_peer is at least 1, got {runs_with_a_peer}")
        self._path = Path(path)
        self._max_runs_with_a_peer = runs_with_a_peer
        self._load_sessions()  # called for its error

    @classmethod
    def for_party(
        cls, folder: PathLike, party: str, *, runs_with_a_peer: int
    ) -> "AlignmentHistory":
        """Return a party's history, in a file of its own in this folder.

        In simulations one process runs all parties, and the folder has a file for each.

        `runs_with_a_peer`: how many runs with the same peer are allowed.

        Raises DataError: the party's name cannot name a file, or the limit is below 1.
        """
        try:
            check_name(party)
        except ValueError as error:
            raise DataError(f"this party cannot name the file of a history: {error}") from None
        return cls(Path(folder) / f"{party}.jsonl", runs_with_a_peer=runs_with_a_peer)

    def record_run(self, *, session: str, peers: Sequence[str], resumes: bool = False) -> None:
        """Record a run on the disk before anything is sent.

        Args:
            session: name of the intersection, the same at all parties.
            peers: the parties that this party intersects its IDs with: all others at the party that
                computes the intersection, and only that party at each other.
            resumes: whether this continues an interrupted run on the same sets. If that run is
                recorded with the same peers, nothing is added: two attempts with equal messages
                reveal no more than one.

        Raises:
            DataError: the session was used before, or a peer had all its runs; nothing is recorded.
            CheckpointError: a line of the file is malformed, or another process has it locked.
            OSError: the line cannot be written completely; nothing is recorded.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Locked, so that two processes of this party cannot both use the last allowed run.
        lock = FileLock(self._path.with_name(f"{self._path.name}.lock"))
        try:
            held_lock = lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout:
            raise CheckpointError(
                f"another process has held {lock.lock_file} for {_LOCK_TIMEOUT_S} s; end it"
            ) from None
        with held_lock:
            peers_by_session, runs_by_peer = self._load_sessions()
            if resumes and peers_by_session.get(session) == sorted(peers):
                return
            if session in peers_by_session:
                raise DataError(f"session {session!r} was used before; give every run a new name")
            for peer in peers:
                if runs_by_peer[peer] >= self._max_runs_with_a_peer:
                    raise DataError(
                        f"{peer} aligned {runs_by_peer[peer]} time(s) with this party already, and "
                        f"the limit is {self._max_runs_with_a_peer}; a peer that aligns again and "
                        "again can try out IDs"
                    )
            self._append_run({"session": session, "peers": list(peers)})

    def _append_run(self, run: Mapping[str, object]) -> None:
        """Append one run to the file, as a whole line or not at all.

        Half a line would make the file unreadable, so that no later run could start.

        `run`: the line's fields. Raises OSError: the disk is full; the file is then unchanged.
        """
        line = f"{json.dumps(run)}\n".encode()
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(
                        errno.ENOSPC, "the disk took only part of a line", str(self._path)
                    )
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise

    def _load_sessions(self) -> tuple[dict[str, list[str]], Counter[str]]:
        """Read the file; return the peers of each session, and the number of sessions of each peer.

        Raises CheckpointError: a line is malformed.
        """
        peers_by_session = dict[str, list[str]]()
        runs_by_peer = Counter[str]()
        lines = self._path.read_text("utf-8").splitlines() if self._path.exists() else []
        for line_number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                session = fields["session"]
                peers = fields["peers"]
            except (ValueError, TypeError, KeyError) as error:
                raise self._make_malformed_line_error(line_number) from error
            has_names = isinstance(peers, list) and all(isinstance(peer, str) for peer in peers)
            if not has_names or not isinstance(session, str):
                raise self._make_malformed_line_error(line_number)
            peers_by_session[session] = sorted(peers)
            runs_by_peer.update(set(peers))
        return peers_by_session, runs_by_peer

    def _make_malformed_line_error(self, line_number: int) -> CheckpointError:
        """Return the error for a malformed line of the file; `line_number`: the line's, from 1."""
        return CheckpointError(
            f"{self._path}, line {line_number}, is no run of an alignment; restore the file from a "
            "backup: without it, peers would start again from none"
        )


def admit_run(
    settings: AlignmentSettings,
    me: str,
    peers: Sequence[str],
    *,
    session: str,
    resumes: bool = False,
) -> None:
    """Record an intersection in this party's history, or refuse it if a peer has used up its runs.

    If the settings name no history, the function does nothing.

    Args:
        settings: the agreed settings.
        me: this party.
        peers: the parties that this party intersects its IDs with.
        session: name of the intersection, the same at all parties.
        resumes: whether it continues an interrupted run, which is recorded already.

    Raises:
        DataError: the session was used before, or a peer has used up its runs.
        CheckpointError: the history is malformed, or another process has it locked.
        OSError: the history cannot be written.
    """
    folder = settings.history
    max_runs_with_a_peer = settings.runs_with_a_peer
    if folder is not None and max_runs_with_a_peer is not None:
        history = AlignmentHistory.for_party(folder, me, runs_with_a_peer=max_runs_with_a_peer)
        history.record_run(session=session, peers=peers, resumes=resumes)
