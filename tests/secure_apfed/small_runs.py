"""Small runs of breast cancer between two parties, and runs that are stopped, for tests."""

from pathlib import Path
from typing import Any

import pytest

from secure_apfed.config import Config
from secure_apfed.data import find_dataset
from secure_apfed.methods import METHODS
from secure_apfed.runs.run import run

__all__ = ["interrupted", "small_config"]


def small_config(method: str = "apfed_c", **changes: Any) -> Config:
    """Seconds of training under a guard whose noise repeats; changes replace whole sections."""
    settings: dict[str, Any] = {
        "name": "test",
        "method": method,
        "party_seeds": "shared_for_comparison",
        "data": {"dataset": "breast_cancer", "overlap": 0.8},
        "model": {"hidden": [8], "representation": 4, "projection": 4},
        "train": {"epochs": 4, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "guard": {"mechanism": "gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"},
    }
    if method in METHODS and METHODS[method].facts.opens_votes in ("randomised", "moment"):
        settings["votes"] = {"epsilon": 4.0}
    if method in METHODS and METHODS[method].facts.teacher == "joint representations":
        settings["model"] = {"network": "selu", "hidden": [8], "representation": 4}
        settings["distilled"] = {"epochs": 3}
    facts = METHODS[method].facts if method in METHODS else None
    if facts and facts.decomposes:
        settings["model"] = {"network": "enriched", "hidden": [8], "representation": 4}
        settings["distilled"] = {"epochs": 3}
    if facts and (facts.sums_representations or facts.averages or facts.decomposes):
        settings["guard"] = {"mechanism": "none", "noise": "reproducible_insecure"}
    if facts and not facts.aligns and facts.has_passives:
        settings["data"] = {"dataset": "breast_cancer", "partition": "horizontal", "clients": 3}
    if facts and facts.averages:
        settings["model"] = {"network": "identity"}
        settings["secure_sum"] = {"scheme": "plain", "masks": "pairwise", "clip": 8.0}
    if facts and facts.reads_sequences:
        kept = {"dataset": "synthetic_keystrokes", "partition": "horizontal", "limit": 240}
        sequences = list(find_dataset("synthetic_keystrokes").sequences.values())
        settings |= {
            "data": kept,
            "model": {"network": "gru", "sequences": sequences, "representation": 4},
            "multiview": {"recurrent": {"rounds": 2}},
        }
    return Config.model_validate({**settings, **changes})


def interrupted(config: Config, folder: Path, *, at_step: int, resume: bool = False) -> None:
    """Start or resume the run and stop it in the middle of a step, as Ctrl-C does."""

    def stop(progress: Any) -> None:
        if progress.step == at_step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, folder, resume=resume, on_progress=stop)
