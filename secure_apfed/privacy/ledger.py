"""The account of what a party has released: each release is charged (its privacy cost recorded)
before it happens, and never refunded.

Run by: each party, for its own messages and its limits of answers. T is the number of different
releases of the row that was sent most often, over all sessions of a run, retries and validation
sends included; sending the same bytes again at the same step reveals nothing new and is free.

The write-ahead log is authoritative: its entries count, whatever checkpoint is loaded. It contains
row positions and digests, no representation. Protects from: losing count, by a crash or a
rolled-back checkpoint; and from going on after a change that its hashes show, which are changed,
missing or swapped lines before the last. It does not see whole lines missing at its end, unless a
checkpoint counts them. Nor does it protect from its own party editing it: the log is that party's
own book.

One JSON object a line. The first says what is counted; every other is one release with its
step, digest and rows, and a running hash over all lines so far. The ledger allows a release
only after the operating system has taken the whole line. So the mere beginning of a last line,
left by a process that was killed, was never released and is cut off, once all before it has
been read and found sound. A whole last line counts, whether its newline is there or not.

A machine that loses power may lose lines that the operating system had not written yet: at
most those since `sync`, which the ledger calls for every checkpoint. Resuming from that
checkpoint finds none missing; the steps after it are played again, and where that gives the
same bytes, as it does on one kind of machine, counting them once is right. Waiting for the disk
at every step closes the rest of the gap, at 3 to 8 ms a step: passives do so for answers that leave
their process, and for noise under a sum, which no later session draws again.
"""

import base64
import hashlib
import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import FileIO
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.base.files import PathLike, open_regular
from secure_apfed.base.names import ReleaseEpsilonName
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError
from secure_apfed.privacy import accountants
from secure_apfed.privacy.accountants import EXACT, Mechanism, NoPrivacy, compose_mu
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.randomised_response import LabelMechanism, VoteResponse

__all__ = [
    "NOTHING_RELEASED",
    "BudgetExhaustedError",
    "PrivacyLedger",
    "PrivacySpent",
    "Release",
    "ReleaseCounts",
    "cross_check",
    "holds_releases",
]

_FORMAT = 1
_CHAIN_BYTES = 16
_LINE_START = b'{"chain":"'  # of each line but the first, since keys are sorted
_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

NOTHING_RELEASED = "nothing is released"
_RELEASED_THING_BY_EPSILON: Mapping[ReleaseEpsilonName, str] = {
    "epsilon_x": "representation",
    "epsilon_v": "vote",
    "epsilon_c": "contribution",
}
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """A batch that was sent: its step, the digest of its bytes, its sorted row positions."""

    step: int
    digest: bytes
    rows: NDArray[np.int64]

    @cached_property
    def identity(self) -> bytes:
        """A digest of step and bytes: equal for the same bytes sent again at the same step."""
        digest = hashlib.blake2b(f"{self.step} {self.digest.hex()} ".encode(), digest_size=32)
        digest.update(self.rows.astype("<i8", copy=False).tobytes())
        return digest.digest()

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The release as fields of a log's line (JSON).

        The sorted rows are stored as differences of successive positions, compressed and in base64.
        """
        differences = np.diff(self.rows, prepend=0).astype("<u4")
        packed = base64.b64encode(zlib.compress(differences.tobytes(), 1)).decode("ascii")
        return {
            "step": self.step,
            "digest": self.digest.hex(),
            "count": len(self.rows),
            "rows": packed,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, table_row_count: int) -> "Release":
        """Parse a release from `fields` of a log's line.

        `table_row_count`: number of rows in the table.

        Raises ValueError, OverflowError, KeyError, TypeError, zlib.error: the fields are not a
        release's.
        """
        # Compressed bytes may inflate a thousandfold: stop at 4 bytes for each row of the table.
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(base64.b64decode(fields["rows"]), 4 * table_row_count + 1)
        differences = np.frombuffer(content, dtype="<u4")
        if not decompressor.eof or len(differences) != fields["count"]:
            raise ValueError("another number of rows")
        rows = np.cumsum(differences, dtype="i8")
        if len(rows) and rows[-1] >= table_row_count:
            raise ValueError("rows that there are not")
        return cls(int(fields["step"]), bytes.fromhex(fields["digest"]), rows)


class _Log:
    """A party's write-ahead log of releases, new or continued.

    Args:
        path: path of the log's file, which is created if missing.
        header: facts of the run, the first line of the log.
        table_row_count: number of rows of the table.
        on_release: called with each release that the log has, oldest first.

    Raises:
        CheckpointError: the path is no file or no log, or its log has another header or was
            altered; it is left unchanged.
    """

    def __init__(
        self,
        path: Path,
        header: dict[str, Any],
        *,
        table_row_count: int,
        on_release: Callable[[Release], None],
    ) -> None:
        """Read all lines, and write the header to a new log.

        A last line that a crash cut off is removed: its release was never sent.
        """
        self.path = path
        self._last_hash = (
            b""  # hash of the last line, which includes the hash of the line before it
        )
        self._size = 0  # bytes of the file
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileIO(open_regular(path, create=True), "r+") as file:
            content = file.readall()
            lines, cut_off_line = _split_lines(content)
            for number, line in enumerate(lines, start=1):
                fields = self._parse_line(line, number)
                if number == 1:
                    self._check_header(fields, header)
                    continue
                try:
                    release = Release.from_fields(fields, table_row_count=table_row_count)
                except (ValueError, OverflowError, TypeError, KeyError, zlib.error) as error:
                    raise self._make_altered_error(number) from error
                on_release(release)
            if not self._may_be_cut_off(cut_off_line, header, is_first=not lines):
                raise self._make_altered_error(len(lines) + 1)
            self._size = len(content) - len(cut_off_line)
            if cut_off_line:
                file.truncate(self._size)
            # A crash may have cut off only the newline of the last line, which counts.
            elif lines and not content.endswith(b"\n"):
                self._size += file.write(b"\n")
        if not lines:
            self.append(header)

    def _check_header(self, fields: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless the log's first line has this run's header."""
        if fields != header:
            raise CheckpointError(
                f"{self.path} is the log of another run: it says {fields}, this run is "
                f"{header}; continue with the settings it was begun with, or use "
                "another folder"
            )

    def _may_be_cut_off(
        self, cut_off_line: bytes, header: dict[str, Any], *, is_first: bool
    ) -> bool:
        """Return whether a crash can have left these bytes: the start of the log's next line.

        Other bytes show that the file was altered.

        `cut_off_line`: the bytes after the last complete line; b"" is the start of any line.
        `is_first`: whether the next line is the first one, with this `header`.
        """
        if is_first:
            return self._make_chained_line(header)[0].encode().startswith(cut_off_line)
        return _LINE_START.startswith(cut_off_line) or cut_off_line.startswith(_LINE_START)

    def append(self, fields: Mapping[str, Any]) -> None:
        """Append one line with these fields to the file, whole or not at all.

        When it returns, the operating system has the line; the disk may not (`sync`).

        Raises CheckpointError: another process wrote to the file; OSError: the disk refused it.
        """
        line, line_hash = self._make_chained_line(fields)
        content = f"{line}\n".encode()
        with FileIO(open_regular(self.path, create=False), "r+") as file:
            if (size := file.seek(0, os.SEEK_END)) != self._size:
                raise CheckpointError(
                    f"{self.path} has {size} bytes, expected {self._size}: another process writes "
                    "to it; give each run a folder of its own"
                )
            try:
                if file.write(content) != len(content):
                    raise OSError(f"{self.path}: the disk took only part of a line")
            except OSError:
                file.truncate(self._size)
                raise
        self._size += len(content)
        self._last_hash = line_hash

    def sync(self) -> None:
        """Wait until everything appended is on the disk."""
        with FileIO(open_regular(self.path, create=False), "r+") as file:
            os.fsync(file.fileno())

    def _make_chained_line(self, fields: Mapping[str, Any]) -> tuple[str, bytes]:
        """Return a line with these fields and a hash, and that hash.

        The hash covers the fields and the hash of the line before, and so all lines.
        """
        content = self._last_hash + _json(fields).encode()
        line_hash = hashlib.blake2b(content, digest_size=_CHAIN_BYTES).digest()
        return _json({**fields, "chain": line_hash.hex()}), line_hash

    def _parse_line(self, line: bytes, number: int) -> dict[str, Any]:
        """Return a line's fields, and remember its hash, after checking that hash.

        `number`: number of the line, for the error.

        Raises CheckpointError: this line or one before it was altered.
        """
        try:
            fields = json.loads(line)
            stored_hash = bytes.fromhex(fields.pop("chain"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._make_altered_error(number) from error
        expected_hash = self._make_chained_line(fields)[1]
        if stored_hash != expected_hash:
            raise self._make_altered_error(number)
        self._last_hash = expected_hash
        return dict(fields)

    def _make_altered_error(self, number: int) -> CheckpointError:
        """Return the error for a log that was altered from line `number` on."""
        return CheckpointError(
            f"{self.path} is not as a ledger wrote it from line {number} on, so it is unknown what "
            "was released; restore the file from a copy, or begin a new run in another folder"
        )


def _split_lines(content: bytes) -> tuple[list[bytes], bytes]:
    """Return a log's complete lines, and the start of a last line that was cut off (b"": none).

    A line is one JSON object with no object inside. So a last line that has a "}" is complete, even
    without its newline.
    """
    *lines, last_line = content.split(b"\n")
    if b"}" in last_line:
        return [*lines, last_line], b""
    return lines, last_line


def holds_releases(path: Path) -> bool:
    """Return whether a log has a line, complete or cut off, after its header: a release.

    False if there is no such file.
    """
    if not os.path.lexists(path):
        return False
    with FileIO(open_regular(path, create=False), "r") as file:
        return bool(file.readline()) and bool(file.readline())


class ReleaseCounts:
    """A count of the releases of each row of a table, with or without a write-ahead log.

    Without a log, which is for simulations, the counts are in memory and checkpoints only. A
    checkpoint that is rolled back then forgets what was sent since.

    Args:
        rows: N, number of rows of the table.
        log: file of the write-ahead log, whose releases are counted; None: none.
        about: facts of the run in the log's header, such as the noise multiplier.

    Attributes:
        releases_N: number of releases of each row, (N,).
        max_count: the largest of these numbers.
        steps: the steps that released any row.
        has_repeated_step: whether one step released rows twice, with different bytes.

    Raises:
        ConfigError: a negative number of rows.
        CheckpointError: the log was altered, or its header has other facts than `about`.
    """

    def __init__(self, *, rows: int, log: Path | None, about: Mapping[str, Any]) -> None:
        """Count the releases in the log; without one, start from zero."""
        if rows < 0:
            raise ConfigError(f"a ledger counts at least 0 rows, got {rows}")
        self.releases_N = np.zeros(rows, dtype=np.int64)
        self.max_count = 0
        self.steps: set[int] = set()
        self.has_repeated_step = False
        self._counted_releases: set[bytes] = set()
        self._log: _Log | None = None
        if log is not None:
            header = {"format": _FORMAT, **about, "rows": rows}
            self._log = _Log(log, header, table_row_count=rows, on_release=self._count_release)

    def has_release(self, release: Release) -> bool:
        """Return whether the same bytes were counted at the same step before."""
        return release.identity in self._counted_releases

    def count_most_after(self, release: Release) -> int:
        """Return the largest count that a row of this release would have if it were added."""
        rows = release.rows  # sorted, so equal positions are adjacent
        occurrences: NDArray[np.int64] | int = 1
        if (rows[1:] == rows[:-1]).any():
            rows, occurrences = np.unique(rows, return_counts=True)
        return int((self.releases_N[rows] + occurrences).max(initial=0))

    def add_release(self, release: Release) -> None:
        """Count a release before it is sent, first in the log, then in memory.

        When it returns, the operating system has the log's line. A release that was counted before
        (`has_release`) is not counted again.

        Raises LocalProtocolError: the release has more rows than the table.
        """
        if len(release.rows) > len(self.releases_N):
            raise LocalProtocolError(
                f"a release names {len(release.rows)} rows of {len(self.releases_N)}"
            )
        if release.identity not in self._counted_releases:
            if self._log:
                self._log.append(release.fields)
            self._count_release(release)

    def sync(self) -> None:
        """Wait until all that was counted is on the disk."""
        if self._log:
            self._log.sync()

    def _count_release(self, release: Release) -> None:
        """Count a release in memory, unless the same bytes were counted at this step."""
        if release.identity in self._counted_releases:
            return
        self._counted_releases.add(release.identity)
        if len(release.rows):
            if release.step in self.steps:
                self.has_repeated_step = True
            self.steps.add(release.step)
        np.add.at(self.releases_N, release.rows, 1)
        self.max_count = max(self.max_count, int(self.releases_N[release.rows].max(initial=0)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the counts as tensors for a checkpoint; first put the log on the disk.

        They are `counts` (N,), `steps`, and `repeated` (`has_repeated_step`).
        """
        self.sync()
        return {
            "counts": torch.from_numpy(self.releases_N.copy()),
            "steps": torch.tensor(sorted(self.steps), dtype=torch.int64),
            "repeated": torch.tensor(self.has_repeated_step),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Merge a checkpoint's counts into these: of two counts of a row the larger one holds.

        So loading an older checkpoint never lowers a count.

        `state`: what `state_dict` returned.

        Raises CheckpointError: the state has another number of rows, or counts releases that the
        log lacks.
        """
        counts = state.get("counts")
        if counts is None or counts.dtype != torch.int64 or counts.shape != self.releases_N.shape:
            raise CheckpointError(
                f"the checkpoint does not count {len(self.releases_N)} rows; it is of another run"
            )
        if self._log and bool((counts.numpy() > self.releases_N).any()):
            raise CheckpointError(
                f"{self._log.path} misses releases that the checkpoint counts; it was deleted "
                "or replaced: restore it, or begin a new run"
            )
        self.releases_N = np.maximum(self.releases_N, counts.numpy())
        self.max_count = int(self.releases_N.max(initial=0))
        if "steps" in state:  # checkpoints of older versions have none
            self.steps.update(state["steps"].tolist())
            self.has_repeated_step = self.has_repeated_step or bool(state["repeated"])


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """The privacy cost of a party so far, for the run, its report and its result.

    Attributes:
        epsilon_x: epsilon of all releases of one row, replace-one, with a fixed encoder. From a
            ledger of votes or contributions it is epsilon_v or epsilon_c (`PrivacyLedger.figure`).
        epsilon_y: epsilon of one training label, for all messages and the finished model; infinite
            unless a label mechanism stood before training (then at delta 0) or it was private.
        epsilon_model: epsilon of a whole record, for the trained model; infinite without a
            guarantee.
        delta: the delta of epsilon_x.
        releases: T, the releases of the row that was sent most often.
        mu: parameter of Gaussian DP of those releases together.
        accountants: epsilon_x by the name of each used accountant in `ACCOUNTANTS`; the reason, as
            text, where one has no value.
        trace: the derivation of epsilon_x, line by line.
    """

    epsilon_x: float
    epsilon_y: float = math.inf
    epsilon_model: float = math.inf
    delta: float
    releases: int
    mu: float = math.inf
    accountants: Mapping[str, float | str] = field(default_factory=dict)
    trace: tuple[str, ...] = ()

    def include_labels(self, label_mechanism: LabelMechanism) -> "PrivacySpent":
        """Return this cost with the epsilon_y of a label mechanism, if that is smaller.

        `label_mechanism`: the mechanism; the run trained on labels that it randomised, and on no
        others.
        """
        label_epsilon = label_mechanism.epsilon
        line = f"labels: {label_mechanism.name}, each answered once: epsilon_y {label_epsilon:.4g}"
        epsilon_y = min(self.epsilon_y, label_epsilon)
        return replace(self, epsilon_y=epsilon_y, trace=(*self.trace, line))

    @classmethod
    def for_no_release(
        cls, *, delta: float, figure: ReleaseEpsilonName = "epsilon_x"
    ) -> "PrivacySpent":
        """Return the cost of a party that has sent nothing; its model may still reveal labels.

        `figure`: name of the ledger's epsilon, which says what it counts: representations, votes or
        contributions.
        """
        return cls(
            epsilon_x=0.0,
            delta=delta,
            releases=0,
            mu=0.0,
            accountants={EXACT.name: 0.0},
            trace=(f"no {_RELEASED_THING_BY_EPSILON[figure]} was sent",),
        )


class BudgetExhaustedError(ApfedError):
    """An error for a release beyond the privacy budget, which was neither charged nor sent."""


class PrivacyLedger:
    """A privacy account, which counts the releases of every row and computes their epsilon.

    It refuses a release beyond the budget.

    Args:
        mechanism: the mechanism of one release.
        delta: the delta at which epsilon is computed, in (0, 1).
        budget: the largest epsilon_x; None never stops.
        rows: N, how many rows there are; positions are 0..N-1.
        log: file of the write-ahead log; None keeps the account in memory and checkpoints only.
        is_reproducible: whether noise depends on the step alone. Two different releases of one step
            then have the same noise, which cancels in their difference; so there is no guarantee
            after the second.
        figure: the name of the ledger's epsilon, which says what it counts: epsilon_x
            (representations), epsilon_v (votes) or epsilon_c (contributions).

    Attributes:
        charges: batches that this object allowed to be sent, repeats included.

    Raises:
        ConfigError: delta or budget out of range, or a budget without noise.
        CheckpointError: the log was altered or is of another run, or it is no regular file.
    """

    def __init__(
        self,
        mechanism: Mechanism | SummedRelease | VoteResponse,
        *,
        delta: float,
        budget: float | None,
        rows: int,
        log: PathLike | None,
        is_reproducible: bool = False,
        figure: ReleaseEpsilonName = "epsilon_x",
    ) -> None:
        """Check delta and budget, and count the releases in the log."""
        if not 0 < delta < 1:
            raise ConfigError(f"delta lies between 0 and 1, both excluded, got {delta}")
        if budget is not None and not (math.isfinite(budget) and budget > 0):
            raise ConfigError(f"a privacy budget is positive and finite, got {budget}")
        if budget is not None and isinstance(mechanism, NoPrivacy):
            raise ConfigError(
                f"a budget of epsilon {budget} cannot be kept without noise; "
                "choose the guard gaussian or leave the budget out"
            )
        self._mechanism = mechanism
        self._delta = delta
        self._budget = budget
        accountant = mechanism.accountant
        noise_multiplier = mechanism.noise_multiplier
        self._release_counts = ReleaseCounts(
            rows=index(rows),
            log=None if log is None else Path(log),
            about={"accountant": accountant, "noise_multiplier": noise_multiplier},
        )
        self._is_noise_reproducible = is_reproducible
        self.charges = 0
        self.figure = figure
        self._check_shared_budget: Callable[..., None] | None = None

    def check_before_charging(self, check: Callable[..., None]) -> None:
        """Register `check`, which is called before each charge and may refuse it by an error.

        It serves a budget that several ledgers share. It is called as
        `check(ledger, mu=..., step=...)`, where mu is the Gaussian DP parameter of all releases of
        this ledger, the new one included.
        """
        self._check_shared_budget = check

    def charge(
        self, *, step: int, rows: torch.Tensor, digest: bytes, repeats: torch.Tensor | None = None
    ) -> None:
        """Charge one batch BEFORE it is sent; when this returns, it may be sent.

        To charge is to check the budget, and then to count a release of each row. The same bytes at
        the same step are charged once only.

        Args:
            step: number of the run's step.
            rows: positions in the batch, int64 of shape (B,); one that occurs twice counts twice.
            digest: digest of the bytes that are sent.
            repeats: mask (B,) of rows whose bytes were sent before, from the guard; they are free,
                except those that this ledger never charged.

        Raises:
            BudgetExhaustedError: the batch may not be sent; nothing was charged.
            LocalProtocolError: arguments of a wrong type or range.
        """
        counts = self._release_counts
        release = self._make_release(step, rows, digest, repeats)
        if not counts.has_release(release):
            self._check_affordable(release)
            counts.add_release(release)
            _LOGGER.debug(
                "step %d: %d rows charged; the row with most releases has %d",
                step,
                len(release.rows),
                counts.max_count,
            )
        self.charges += 1

    def _check_affordable(self, release: Release) -> None:
        """Raise BudgetExhaustedError if this release would exceed the budget.

        A budget that the ledger shares with others is checked, too (`check_before_charging`).
        """
        counts = self._release_counts
        max_releases = max(counts.max_count, counts.count_most_after(release))
        is_repeated_step = len(release.rows) > 0 and release.step in counts.steps
        # Seeded noise depends on the step alone, so it cancels in the difference of two releases of
        # one step.
        is_unprotected = self._is_noise_reproducible and (
            counts.has_repeated_step or is_repeated_step
        )
        if self._budget is not None:
            epsilon = math.inf
            if not is_unprotected:
                epsilon = self._mechanism.epsilon_of(max_releases, self._delta)
            if epsilon > self._budget:
                raise BudgetExhaustedError(
                    f"step {release.step} was not sent: release {max_releases} of one row would "
                    f"cost epsilon {epsilon:.4g}, the budget is {self._budget:.4g} at delta "
                    f"{self._delta:g}; stop here, or begin a run with more noise, fewer epochs "
                    "or a larger budget"
                )
        if self._check_shared_budget and len(release.rows):
            mu = math.inf if is_unprotected else compose_mu(self._mechanism.mu, max_releases)
            self._check_shared_budget(self, mu=mu, step=release.step)

    def sync(self) -> None:
        """Wait until all charges are on the disk."""
        self._release_counts.sync()

    def get_privacy_spent(self) -> PrivacySpent:
        """Return the cost of all releases so far, by the reported accountant alone.

        It is fast enough for a progress display.
        """
        max_releases = self._release_counts.max_count
        name = self._mechanism.accountant
        if max_releases == 0:
            return PrivacySpent.for_no_release(delta=self._delta, figure=self.figure)
        epsilon = self.would_cost(max_releases)
        trace = (
            f"one release: {self._mechanism}",
            f"releases of one row: {max_releases} at most, no amplification by subsampling",
            f"{name} accountant: {self.figure} {epsilon:.4g} at delta {self._delta:g}",
        )
        return PrivacySpent(
            epsilon_x=epsilon,
            delta=self._delta,
            releases=max_releases,
            mu=math.inf if math.isinf(epsilon) else compose_mu(self._mechanism.mu, max_releases),
            accountants={name: epsilon},
            trace=trace,
        )

    def summarise_cost(self) -> dict[str, Any]:
        """Return the cost of all releases so far as plain values for JSON."""
        spent = self.get_privacy_spent()
        return {
            "figure": self.figure,
            "epsilon": spent.epsilon_x,
            "delta": spent.delta,
            "releases": spent.releases,
            "trace": list(spent.trace),
        }

    def cross_check(self) -> dict[str, float | str]:
        """Return the epsilon of all releases so far by every accountant of the mechanism.

        It takes seconds. Where an accountant gives no number, a text says why.
        """
        if isinstance(self._mechanism, SummedRelease | VoteResponse):
            return {self._mechanism.accountant: self.would_cost(self._release_counts.max_count)}
        return cross_check(
            self._mechanism, releases=self._release_counts.max_count, delta=self._delta
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the counts as tensors for a checkpoint; first put the log on the disk."""
        return self._release_counts.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Merge the counts of a checkpoint into this ledger's; none becomes lower."""
        self._release_counts.load_state_dict(state)

    def _make_release(
        self, step: int, rows: torch.Tensor, digest: bytes, repeats: torch.Tensor | None
    ) -> Release:
        """Check the arguments of `charge`; return the release of the rows that cost privacy.

        Rows whose bytes were sent before (`repeats`) are left out if they were charged then.

        Raises LocalProtocolError: an argument of a wrong type, shape or range.
        """
        if step < 0 or not digest:
            raise LocalProtocolError(f"a release has a step from 0 and a digest, got step {step}")
        if rows.dtype != torch.int64 or rows.ndim != 1:
            raise LocalProtocolError(
                f"rows are int64 positions of shape (B,), got {rows.dtype} {tuple(rows.shape)}"
            )
        if repeats is not None and (repeats.dtype != torch.bool or repeats.shape != rows.shape):
            raise LocalProtocolError(
                f"repeats are bool of shape {tuple(rows.shape)} like the rows, "
                f"got {repeats.dtype} {tuple(repeats.shape)}"
            )
        positions = rows.cpu().numpy()
        table_row_count = len(self._release_counts.releases_N)
        if len(positions) and not 0 <= positions.min() <= positions.max() < table_row_count:
            raise LocalProtocolError(
                f"row positions lie in 0..{table_row_count - 1}, got "
                f"{positions.min()}..{positions.max()}"
            )
        if repeats is not None:
            # A repeat is free only if this ledger charged the row before.
            is_free = repeats.cpu().numpy() & (self._release_counts.releases_N[positions] > 0)
            positions = positions[~is_free]
        return Release(index(step), digest, np.sort(positions))

    def would_cost(self, releases: int) -> float:
        """Return the epsilon after this number of releases of one row, and charge nothing.

        It is infinite once seeded noise served two different releases of one step.
        """
        is_unprotected = self._is_noise_reproducible and self._release_counts.has_repeated_step
        return math.inf if is_unprotected else self._mechanism.epsilon_of(releases, self._delta)


def cross_check(mechanism: Mechanism, *, releases: int, delta: float) -> dict[str, float | str]:
    """Return epsilon_x by the name of every accountant whose library is installed.

    It takes seconds. Where an accountant would take too much memory or fails, a text says so.

    `releases`: T, how often one row is released.
    """
    epsilon_by_accountant: dict[str, float | str] = {}  # epsilons, or reasons for their absence
    for name, accountant in accountants.ACCOUNTANTS.items():
        if accountant.is_available():
            try:
                epsilon_by_accountant[name] = accountant.get_epsilon(
                    mechanism, releases=releases, delta=delta
                )
            except accountants.NoFigureError as error:
                epsilon_by_accountant[name] = f"left out: {error}"
            except Exception as error:  # noqa: BLE001 - other people's numerics may fail in any way
                epsilon_by_accountant[name] = f"failed: {type(error).__name__}: {error}"
    return epsilon_by_accountant
