"""How often this party aligned with each peer: the bound on what guessed IDs can find out.

Kept by: each party for itself, in one file. A peer that puts guessed IDs into its set learns
in each run which of up to `maximum_ids` guesses are right (ID stuffing, attack A10); over
many runs it could try out a whole population. With at most R runs a peer tries out at most
R times `maximum_ids` IDs. Protects from nothing if the file is deleted: it is this party's own.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     history = AlignmentHistory(Path(folder) / "alignments.jsonl", runs_with_a_peer=1)
    ...     history.admit(session="November", peers=["shop"])
    ...     history.admit(session="December", peers=["shop"])
    Traceback (most recent call last):
    secure_apfed.errors.DataError: shop aligned 1 time(s) with this party already, ...
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from secure_apfed.errors import CheckpointError, DataError

__all__ = ["AlignmentHistory"]


class AlignmentHistory:
    """The runs that this party took part in; call `admit` before each role is started.

    Args:
        path: of the file; made where missing.
        runs_with_a_peer: how many runs any one peer gets, at least 1.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, path: Path, *, runs_with_a_peer: int) -> None:
        if runs_with_a_peer < 1:
            raise DataError(f"runs_with_a_peer is at least 1, got {runs_with_a_peer}")
        self._path, self._limit = path, runs_with_a_peer
        self._sessions: set[str] = set()
        self._runs: Counter[str] = Counter()
        for number, line in enumerate(
            path.read_text("utf-8").splitlines() if path.exists() else []
        ):
            self._note(*self._read(line, number + 1))

    def admit(self, *, session: str, peers: Sequence[str]) -> None:
        """Note a run on the disk before anything is sent.

        Args:
            session: of the agreement.
            peers: with whom; at a member the hub, at the hub all members.

        Raises:
            DataError: the session was used before, or a peer had all its runs; nothing is noted.
        """
        if session in self._sessions:
            raise DataError(f"session {session!r} was used before; give every run a new name")
        for peer in peers:
            if self._runs[peer] >= self._limit:
                raise DataError(
                    f"{peer} aligned {self._runs[peer]} time(s) with this party already, and the "
                    f"limit is {self._limit}; a peer that aligns again and again can try out IDs"
                )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"session": session, "peers": list(peers)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._note(session, peers)

    def _note(self, session: str, peers: Sequence[str]) -> None:
        self._sessions.add(session)
        self._runs.update(set(peers))

    def _read(self, line: str, number: int) -> tuple[str, list[str]]:
        try:
            fields = json.loads(line)
            session, peers = fields["session"], fields["peers"]
        except (ValueError, TypeError, KeyError) as error:
            raise self._damaged(number) from error
        texts = [session, *peers] if isinstance(peers, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise self._damaged(number)
        return session, peers

    def _damaged(self, number: int) -> CheckpointError:
        return CheckpointError(
            f"{self._path}, line {number}, is no run of an alignment; restore the file from a "
            "backup: without it, peers would start again from none"
        )
