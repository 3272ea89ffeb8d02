"""What a study reads of one finished run: accuracy, epsilons, and what each attack reached."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attacks.interface import AttackResult
from experiments.report import read_run

__all__ = ["Leak", "Outcome", "read_outcome"]


@dataclass(frozen=True)
class Leak:
    """One attack by one adversary: `metric` of the attack and of its best baseline."""

    metric: str
    advantage: float
    score: float
    baseline: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run.

    Attributes:
        accuracy: of the method's own inference, 0 to 1.
        leaks: by (target, setting of the attack).
    """

    accuracy: float
    epsilon_x: float
    epsilon_y: float
    releases: int
    leaks: Mapping[tuple[str, str], Leak]


def read_outcome(folder: Path) -> Outcome:
    """Read a finished run with its attacks.

    Raises:
        CheckpointError: a file is missing or not as this version writes it.
    """
    run = read_run(folder)
    privacy = run.outcome.privacy
    return Outcome(
        accuracy=next(iter(run.outcome.accuracy.values())),
        epsilon_x=privacy.epsilon_x,
        epsilon_y=privacy.epsilon_y,
        releases=privacy.releases or 0,
        leaks={
            (result.target, result.setting): _leak(result)
            for result in run.attacks or ()
            if result.advantage is not None and math.isfinite(result.advantage)
        },
    )


def _leak(result: AttackResult) -> Leak:
    metric, baseline = str(result.metric), str(result.baseline)
    return Leak(
        metric=metric,
        advantage=float(result.advantage or 0.0),
        score=float(result.score[metric] or 0.0),
        baseline=float(result.baselines[baseline][metric] or 0.0),
    )
