"""How often each row left its party, over all sessions of a run: counted before it leaves.

Run by: each party, for its own ledger and for what it answers at most. The write-ahead log is
the truth: what it holds counts, whatever checkpoint is loaded. The very same bytes again at the
same step tell nobody anything new and count once.

Letters: N rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.privacy.release_log import Release, ReleaseLog

__all__ = ["ReleaseCounts"]


class ReleaseCounts:
    """Releases by row.

    Args:
        rows: N, how many rows there are; positions are 0..N-1.
        log: file of the write-ahead log, readable by its owner only. None keeps the counts in
            memory and checkpoints only, so that a rolled-back checkpoint forgets what was sent
            since; for simulations.
        about: facts that must be the same whenever the log is continued.

    Raises:
        ConfigError: a negative number of rows.
        CheckpointError: the log was altered, or is of another run.
    """

    def __init__(self, *, rows: int, log: Path | None, about: Mapping[str, Any]) -> None:
        if rows < 0:
            raise ConfigError(f"a ledger counts at least 0 rows, got {rows}")
        self.of_row_N = np.zeros(rows, dtype=np.int64)
        self.most = 0
        self.steps: set[int] = set()
        self.step_repeated = False
        self._seen: set[bytes] = set()
        self._log: ReleaseLog | None = None
        if log is not None:
            self._log = ReleaseLog.open(log, {**about, "rows": rows}, total=rows, visit=self._count)

    def knows(self, release: Release) -> bool:
        """Whether these bytes left at this step before."""
        return release.identity in self._seen

    def after(self, release: Release) -> int:
        """The most releases of one row once this one is made too."""
        different, times = np.unique(release.rows, return_counts=True)
        return max(self.most, int((self.of_row_N[different] + times).max(initial=0)))

    def add(self, release: Release) -> None:
        """Count a release before it is made; on return the operating system holds it.

        Raises:
            LocalProtocolError: more rows than there are.
        """
        if len(release.rows) > len(self.of_row_N):
            raise LocalProtocolError(
                f"a release names {len(release.rows)} rows of {len(self.of_row_N)}"
            )
        if self.knows(release):
            return
        if self._log:
            self._log.append(release)
        self._count(release)

    def sync(self) -> None:
        """Return once all that was counted is on the disk."""
        if self._log:
            self._log.sync()

    def _count(self, release: Release) -> None:
        """`steps` are those that released any row; `step_repeated`: one did so twice."""
        if self.knows(release):
            return
        self._seen.add(release.identity)
        if len(release.rows):
            self.step_repeated |= release.step in self.steps
            self.steps.add(release.step)
        np.add.at(self.of_row_N, release.rows, 1)
        self.most = max(self.most, int(self.of_row_N[release.rows].max(initial=0)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the counts for a checkpoint, (N,) int64; sync the log."""
        self.sync()
        return {"counts": torch.from_numpy(self.of_row_N.copy())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a checkpoint; what is counted already, here or in the log, stays so.

        Raises:
            CheckpointError: of another number of rows, or it counts releases that the log misses.
        """
        counts = state.get("counts")
        if counts is None or counts.dtype != torch.int64 or counts.shape != self.of_row_N.shape:
            raise CheckpointError(
                f"the checkpoint does not count {len(self.of_row_N)} rows; it is of another run"
            )
        if self._log and bool((counts.numpy() > self.of_row_N).any()):
            raise CheckpointError(
                f"{self._log.path} misses releases that the checkpoint counts; it was deleted "
                "or replaced: restore it, or begin a new run"
            )
        self.of_row_N = np.maximum(self.of_row_N, counts.numpy())
        self.most = int(self.of_row_N.max(initial=0))
