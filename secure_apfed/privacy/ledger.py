"""The account of what a party has released: charged before each release, never refunded.

Run by: each party that sends representations. T is the number of different releases of
the row that was sent most often, retries and validation sends included; sending the very
same bytes again at the same step tells nobody anything new and is free. `guarantee_of` says in
one text what a run guarantees, from what was really on, and no more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ApfedError, ConfigError
from secure_apfed.names import ReleaseFigure
from secure_apfed.privacy.accountants import (
    ACCOUNTANTS,
    EXACT,
    Accountant,
    Mechanism,
    NoFigureError,
    NoPrivacy,
    compose,
)
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.ledger import Release, ReleaseCounts
from secure_apfed.privacy.randomised_response import LabelMechanism, VoteResponse

__all__ = [
    "LABEL_ASSUMPTIONS",
    "NOTHING_RELEASED",
    "BudgetExhaustedError",
    "PrivacyLedger",
    "PrivacySpent",
    "cross_check",
    "guarantee_of",
]

NOTHING_RELEASED = "nothing is released"
LABEL_ASSUMPTIONS = (
    "it covers training labels in whatever this run computed from them, the finished model and the "
    "baselines beside it included, taking as public the features, who is in the table, the class "
    "names, the split into training and test rows and every setting; not covered are test labels "
    "and what is measured with them, nor attacks that were asked for, whose scores compare guesses "
    "with the true labels"
)
_SEEDED = (
    "and label DP holds only against somebody who does not know the run's seed, since the "
    "answers are derived from it"
)


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """What a party has given away so far, for the run, its report and its result.

    Attributes:
        epsilon_x: one row's releases together, replace-one, encoder held fixed; of a ledger of
            votes or contributions its own figure (`PrivacyLedger.figure`).
        epsilon_y: one training label, in all that is sent and in the finished model; infinite
            unless a label mechanism stood before training (then at delta 0) or it was private.
        epsilon_model: whole records in the trained model; infinite where nothing is claimed.
        delta: at which epsilon_x holds.
        releases: T, the releases of the row that was sent most often.
        mu: parameter of Gaussian DP of those releases together.
        accountants: epsilon_x by each accountant that was asked, by its name in `ACCOUNTANTS`;
            where one has no figure, words that say why.
        trace: how epsilon_x came about, line by line.
    """

    epsilon_x: float
    epsilon_y: float = math.inf
    epsilon_model: float = math.inf
    delta: float
    releases: int
    mu: float = math.inf
    accountants: Mapping[str, float | str] = field(default_factory=dict)
    trace: tuple[str, ...] = ()

    def with_labels(self, labels: LabelMechanism) -> "PrivacySpent":
        """The same account of a run that trained on the answers of `labels` only."""
        line = f"labels: {labels.name}, each answered once: epsilon_y {labels.epsilon:.4g}"
        epsilon_y = min(self.epsilon_y, labels.epsilon)
        return replace(self, epsilon_y=epsilon_y, trace=(*self.trace, line))

    @classmethod
    def nothing(cls, *, delta: float) -> "PrivacySpent":
        """The account of a party that has sent nothing; its model may tell of labels still."""
        return cls(
            epsilon_x=0.0,
            delta=delta,
            releases=0,
            mu=0.0,
            accountants={EXACT.name: 0.0},
            trace=("no representation was sent",),
        )


class BudgetExhaustedError(ApfedError):
    """A release would exceed the privacy budget; it was neither charged nor sent."""


class PrivacyLedger:
    """Counts the releases of every row, and stops at the budget.

    Args:
        mechanism: what one release does.
        delta: in (0, 1).
        budget: the largest epsilon_x; None never stops.
        rows: N, how many rows there are; positions are 0..N-1.
        log: file of the write-ahead log. It is the truth: what it holds counts, whatever
            checkpoint is loaded. None keeps the account in memory and checkpoints only, so
            that a rolled-back checkpoint forgets what was sent since; for simulations.
        seeded: whether noise depends on the step alone. Two different releases of one step then
            differ by no noise at all, so that nothing is claimed after the second.
        figure: by which of `secure_apfed.privacy_rows.FIGURES` what it counts is called.

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
        log: Path | None,
        seeded: bool = False,
        figure: ReleaseFigure = "epsilon_x",
    ) -> None:
        if not 0 < delta < 1:
            raise ConfigError(f"delta lies between 0 and 1, both excluded, got {delta}")
        if budget is not None and not (math.isfinite(budget) and budget > 0):
            raise ConfigError(f"a privacy budget is positive and finite, got {budget}")
        if budget is not None and isinstance(mechanism, NoPrivacy):
            raise ConfigError(
                f"a budget of epsilon {budget} cannot be kept without noise; "
                "choose the guard gaussian or leave the budget out"
            )
        self._mechanism, self._delta, self._budget = mechanism, delta, budget
        self._accountant, self._epsilon = _accountant_of(mechanism)
        self._counts = ReleaseCounts(
            rows=index(rows), log=log, about={"noise_multiplier": _noise_multiplier(mechanism)}
        )
        self._seeded, self.charges, self.figure = seeded, 0, figure
        self._others: Callable[..., None] | None = None

    def ask_before_charging(self, others: Callable[..., None]) -> None:
        """Let `others(ledger, mu=..., step=...)` refuse a charge after which mu would be that."""
        self._others = others

    def charge(
        self, *, step: int, rows: torch.Tensor, digest: bytes, repeats: torch.Tensor | None = None
    ) -> None:
        """Account for one batch BEFORE it is sent; on return it may be sent.

        Args:
            step: of the run.
            rows: positions in the batch, int64 of shape (B,); one that occurs twice counts twice.
            digest: of the bytes that are sent.
            repeats: which of the rows are sent as they were sent before, bool of shape (B,), as
                the guard says; they are free, but for those that this ledger never charged.

        Raises:
            BudgetExhaustedError: the batch may not be sent; nothing was charged.
            LocalProtocolError: arguments of a wrong type or range.
        """
        release = self._release(step, rows, digest, repeats)
        if self._counts.knows(release):
            self.charges += 1
            return
        most, bare = self._counts.after(release), self._is_bare(release)
        epsilon = math.inf if bare else self.would_cost(most)
        if self._budget is not None and epsilon > self._budget:
            raise BudgetExhaustedError(
                f"step {step} was not sent: release {most} of one row would cost epsilon "
                f"{epsilon:.4g}, the budget is {self._budget:.4g} at delta {self._delta:g}; "
                "stop here, or begin a run with more noise, fewer epochs or a larger budget"
            )
        if self._others and len(release.rows):
            self._others(self, mu=math.inf if bare else self._mu(most), step=step)
        self._counts.add(release)
        self.charges += 1

    def sync(self) -> None:
        self._counts.sync()

    def spent(self) -> PrivacySpent:
        """Return what all releases so far cost; cheap enough for a progress display."""
        if self._counts.most == 0:
            return PrivacySpent.nothing(delta=self._delta)
        epsilon = self.would_cost(self._counts.most)
        trace = (
            f"one release: {self._mechanism}",
            f"releases of one row: {self._counts.most} at most, no amplification by subsampling",
            f"{self._accountant} accountant: {self.figure} {epsilon:.4g} at delta {self._delta:g}",
        )
        return PrivacySpent(
            epsilon_x=epsilon,
            delta=self._delta,
            releases=self._counts.most,
            mu=self._mu(self._counts.most),
            accountants={self._accountant: epsilon},
            trace=trace,
        )

    def account(self) -> dict[str, Any]:
        """What all releases so far cost, in plain values: one mechanism's figures and no others."""
        spent = self.spent()
        return {
            "figure": self.figure,
            "epsilon": spent.epsilon_x,
            "delta": spent.delta,
            "releases": spent.releases,
            "trace": list(spent.trace),
        }

    def cross_check(self) -> dict[str, float | str]:
        """Return epsilon_x by every accountant that knows the mechanism; takes seconds.

        Words stand in place of a figure that would take too much memory, or that failed.
        """
        if isinstance(self._mechanism, SummedRelease | VoteResponse):
            return {self._accountant: self.would_cost(self._counts.most)}
        return cross_check(self._mechanism, releases=self._counts.most, delta=self._delta)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the account for a checkpoint, (N,) int64 releases of each row; sync the log."""
        return self._counts.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a checkpoint; what this ledger or its log already counts stays counted.

        Raises:
            CheckpointError: of another number of rows, or it counts releases that the log misses.
        """
        self._counts.load_state_dict(state)

    def _release(
        self, step: int, rows: torch.Tensor, digest: bytes, repeats: torch.Tensor | None
    ) -> Release:
        if step < 0 or not digest:
            raise LocalProtocolError(f"a release has a step from 0 and a digest, got step {step}")
        if rows.dtype != torch.int64 or rows.ndim != 1:
            raise LocalProtocolError(
                f"rows are int64 positions of shape (B,), got {rows.dtype} {tuple(rows.shape)}"
            )
        again = torch.zeros(rows.shape, dtype=torch.bool) if repeats is None else repeats.cpu()
        if again.dtype != torch.bool or again.shape != rows.shape:
            raise LocalProtocolError(
                f"repeats are bool of shape {tuple(rows.shape)} like the rows, "
                f"got {again.dtype} {tuple(again.shape)}"
            )
        sent, total = rows.cpu().numpy(), len(self._counts.of_row_N)
        if len(sent) and not 0 <= sent.min() <= sent.max() < total:
            raise LocalProtocolError(
                f"row positions lie in 0..{total - 1}, got {sent.min()}..{sent.max()}"
            )
        free = again.numpy() & (self._counts.of_row_N[sent] > 0)
        return Release(index(step), digest, np.sort(sent[~free]))

    @property
    def _bare(self) -> bool:
        """Whether two releases of one step shared noise."""
        return self._seeded and self._counts.step_repeated

    def _is_bare(self, release: Release) -> bool:
        """Whether two releases of one step share noise once this one is made."""
        again = len(release.rows) > 0 and release.step in self._counts.steps
        return self._bare or (self._seeded and again)

    def _mu(self, releases: int) -> float:
        return math.inf if self._bare else compose(self._mechanism.mu, releases)

    def would_cost(self, releases: int) -> float:
        """Return epsilon_x after that many releases of one row; charges nothing."""
        return math.inf if self._bare else self._epsilon(releases, self._delta)


def cross_check(mechanism: Mechanism, *, releases: int, delta: float) -> dict[str, float | str]:
    """See `PrivacyLedger.cross_check`."""
    return {
        name: _figure(accountant, mechanism, releases, delta)
        for name, accountant in ACCOUNTANTS.items()
        if accountant.available()
    }


def _accountant_of(
    mechanism: Mechanism | SummedRelease | VoteResponse,
) -> tuple[str, Callable[[int, float], float]]:
    """The accountant whose figure is reported: its name, and (releases, delta) -> epsilon."""
    if isinstance(mechanism, SummedRelease):
        return mechanism.accountant, mechanism.epsilon
    if isinstance(mechanism, VoteResponse):
        return mechanism.accountant, mechanism.epsilon_of
    return EXACT.name, lambda releases, delta: EXACT.epsilon(
        mechanism, releases=releases, delta=delta
    )


def _figure(
    accountant: Accountant, mechanism: Mechanism, releases: int, delta: float
) -> float | str:
    try:
        return accountant.epsilon(mechanism, releases=releases, delta=delta)
    except NoFigureError as error:
        return f"left out: {error}"
    except Exception as error:  # noqa: BLE001 - other people's numerics may fail in any way
        return f"failed: {type(error).__name__}: {error}"


def _noise_multiplier(mechanism: Mechanism | SummedRelease | VoteResponse) -> float | None:
    return None if isinstance(mechanism, NoPrivacy) else mechanism.noise_multiplier


def guarantee_of(
    released: str, labels: LabelMechanism, *, private_training: bool, seeded: bool = False,
    also: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the guarantee of a run.

    Args:
        released: what the guard or private training promises, or that nothing is released.
        labels: what the training labels went through.
        private_training: whether `released` speaks of labels already.
        seeded: whether the answers are derived from the run's seed.
        also: what else was on, with what it gives or does not.
    """
    parts = [released]
    if not math.isinf(labels.epsilon):
        parts += [labels.statement(), LABEL_ASSUMPTIONS, *([_SEEDED] if seeded else [])]
    elif not private_training and released != NOTHING_RELEASED:
        parts.append(labels.statement())
    return "; ".join([*parts, *also])
