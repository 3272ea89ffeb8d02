"""Finished runs made up in memory, for tests of what compares runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from apfed_attacks.interface import AttackResult
from apfed_experiments.finished import FinishedRun
from secure_apfed.config import Config
from secure_apfed.runs.outcome import Outcome
from tests.experiments.run_folder import attack_result, config_of

__all__ = ["attacked", "finished"]
CONFIG: Config = config_of()


def attacked(advantage: float, **changed: Any) -> AttackResult:
    """An attack on labels over a baseline of 0.5."""
    settings: dict[str, Any] = {
        "variant": "x", "baseline": "y", "baselines": {"y": {"balanced_accuracy": 0.5}},
        "score": {"balanced_accuracy": 0.5 + advantage}, "advantage": advantage,
        **changed,
    }  # fmt: skip
    return AttackResult(**attack_result(**settings))


def finished(
    accuracy: float | Mapping[str, float], *, epsilon: float = math.inf, releases: int = 2,
    wire_bytes: int = 1_000_000, attacks: Sequence[AttackResult] | None = None,
) -> FinishedRun:  # fmt: skip
    """A run that reached this."""
    by_inference = accuracy if isinstance(accuracy, Mapping) else {"apfed_c": accuracy}
    privacy = {
        "epsilon_x": epsilon, "epsilon_y": math.inf, "epsilon_model": math.inf,
        "releases": releases,
    }  # fmt: skip
    outcome = {
        "method": "apfed_c", "accuracy": by_inference, "wire_bytes": wire_bytes,
        "privacy": privacy, "seconds": 1.0,
    }  # fmt: skip
    return FinishedRun(
        config=CONFIG,
        outcome=Outcome.model_validate(outcome),
        attacks=None if attacks is None else tuple(attacks),
    )
