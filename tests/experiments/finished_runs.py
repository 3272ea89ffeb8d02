"""Runs for tests of what compares them: finished ones made up in memory, and small ones to play."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from apfed_attacks.interface import AttackResult
from apfed_experiments.finished import FinishedRun
from secure_apfed.config import Config
from secure_apfed.runs.outcome import Outcome
from tests.experiments.run_folder import attack_result, config_of

__all__ = ["APFED", "attacked", "finished", "on_few_labels"]
CONFIG: Config = config_of()
APFED: dict[str, Any] = {
    "method": "apfed_c",
    "model": {"hidden": [16], "representation": 8, "projection": 8, "dropout": 0.0},
    "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.05},
    "secure_sum": {"scheme": "plain", "clip": None},
}


def on_few_labels(**changes: Any) -> Config:
    """A run of votes on digits, with these sections in place of its own."""
    settings: dict[str, Any] = {
        "name": "few-labels",
        "method": {"name": "votes", "prior": "labeller"},
        "data": {"dataset": "digits", "views": 4, "labelled": 60, "limit": 300},
        "model": {"network": "random_features"},
        "train": {"epochs": 1},
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "transcript": {"keep": "none"},
    }
    return Config.model_validate({**settings, **changes})


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
