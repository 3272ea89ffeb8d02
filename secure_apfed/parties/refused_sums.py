"""How many sums the active refused, over all sessions of a run: noted before anybody sees it.

Run by: the active. Protects from: whoever alters sums, and learns from which of them the active
takes. One session tells which sum was the first to be refused (see `OneRefusalReceiver`); a
resumed run computes the same numbers, and would be asked about them again. So a run goes on after
as many refused sums as its user allows by name, and no more.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError
from secure_apfed.folder_files import MOST_JSON_BYTES, open_plain
from secure_apfed.regular_file import open_regular

__all__ = ["RefusedSums"]


class RefusedSums:
    """The active's own list of them: a line a refusal, whole or torn, read or not.

    Args:
        me: the active.
        log: file of the list, readable by its owner only; None: nothing is noted.
        allowed: refused sums after which the run may go on.

    Raises:
        CheckpointError: more were refused, or the list cannot be read.
    """

    def __init__(self, me: str, log: Path | None, *, allowed: int) -> None:
        self._me, self._log = me, log
        if (noted := self._noted()) > allowed:
            raise CheckpointError(
                f"{me} refused {noted} sum{'s' * (noted > 1)} of this run, and rules.refused_sums "
                f"is {allowed}. Whoever altered them (the aggregator, or a passive) may have "
                "learnt bits of the passives' numbers from which were taken, and a resumed run "
                "computes the same numbers again. Find out who it was; then begin a new run with "
                "another seed, among parties that you trust. If it was nobody's intent, resume "
                f"with rules.refused_sums: {noted} in the run's config.yaml"
            )

    def _noted(self) -> int:
        if self._log is None or not os.path.lexists(self._log):
            return 0
        with open_plain(self._log) as lines:
            return sum(1 for line in lines.read(MOST_JSON_BYTES).splitlines() if line.strip())

    @contextmanager
    def noting(self, *, step: int, contract: str) -> Iterator[None]:
        """Note a refusal of the sum of `step` within: it is on the disk before the error leaves.

        Our own misuse is none, nor is an interruption.

        Raises:
            CheckpointError: it cannot be noted.
        """
        try:
            yield
        except LocalProtocolError:
            raise
        except Exception:
            self._note(step, contract)
            raise

    def _note(self, step: int, contract: str) -> None:
        if self._log is None:
            return
        # Begins with a line's end, since the line before may be torn.
        line = "\n" + json.dumps({"contract": contract, "step": step}) + "\n"
        try:
            with FileIO(open_regular(self._log, create=True), "a") as lines:
                lines.write(line.encode())
                os.fsync(lines.fileno())
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{self._log}: cannot note that {self._me} refused the sum of step {step} "
                f"({error}); do not resume this run, which could not count it"
            ) from error
