"""Small runs of breast cancer between two parties, and runs that are stopped, for tests."""

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import pytest
from pydantic import create_model

from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.data import find_dataset
from secure_apfed.learning.autoencoder import DistillationSettings
from secure_apfed.methods import METHODS, Method
from secure_apfed.runs.run import run

Said: TypeAlias = str | Mapping[str, Any]
"""A method: its name, or a mapping with that and its settings."""


def small_config(method: Said = "apfed_c", **changes: Any) -> Config:
    """Seconds of training under a guard whose noise repeats; changes replace whole sections."""
    said: dict[str, Any] = {"name": method} if isinstance(method, str) else dict(method)
    kind = METHODS[said["name"]].public_facts
    settings: dict[str, Any] = {
        "name": "test",
        "party_seeds": "shared_for_comparison",
        "data": {"dataset": "breast_cancer", "overlap": 0.8, "limit": 300},
        "model": {"hidden": [8], "representation": 4, "projection": 4},
        "train": {"epochs": 4, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "guard": {"mechanism": "gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"},
        "transcript": {"keep": "first_and_last"},
    }
    if kind.vote_protocol in ("randomised", "count"):
        said.setdefault("epsilon", 4.0)
    if issubclass(METHODS[said["name"]].settings, DistillationSettings):
        network = "enriched" if kind.has_joint_svd else "selu"
        settings["model"] = {"network": network, "hidden": [8], "representation": 4}
        said.setdefault("epochs", 3)
    if kind.has_gradient_sum and kind.fixed_objective is None:
        settings["passives"] = {"default": {"objective": {"name": "contrastive"}}}
    if kind.has_representation_sum or kind.averaged_quantity or kind.has_joint_svd:
        settings["guard"] = {"mechanism": "none", "noise": "reproducible_insecure"}
    if kind.has_passives and not kind.needs_alignment:
        settings["data"] = {"dataset": "breast_cancer", "partition": "horizontal", "clients": 3}
    if kind.averaged_quantity:
        settings["model"] = {"network": "identity"}
        settings["secure_sum"] = {"scheme": "plain", "masks": "pairwise", "clip": 8.0}
    if "projections are summed" in kind.exchange_facts:
        settings["model"] = {
            "network": "cross_view",
            "representation": 4,
            "random_features": 40,
        }
    if kind.has_sequence_views:
        kept = {"dataset": "synthetic_keystrokes", "partition": "horizontal", "limit": 120}
        sequences = list(find_dataset("synthetic_keystrokes").sequences.values())
        model = {"network": "gru", "sequences": sequences, "representation": 4}
        settings |= {"data": kept, "model": model}
        said.setdefault("rounds", 2)
    return Config.model_validate({**settings, "method": said, **changes})


def rename_method(method: Method, name: str) -> Method:
    """Return the same method under another name."""
    other = copy(method)
    alone = cast("Any", Literal)[name]
    other.settings = create_model(name, __base__=method.settings, name=(alone, ...))
    return other


def interrupt_run(config: Config, folder: Path, *, at_step: int, resume: bool = False) -> None:
    """Start or resume the run and stop it in the middle of a step, as Ctrl-C does."""

    def stop(progress: Any) -> None:
        if progress.step == at_step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, folder, resume=resume, on_progress=stop)


def run_as_json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    """Run a command with --json; its stdout is one object and nothing else."""
    capsys.readouterr()  # what others said before
    assert execute([*map(str, arguments), "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def read_stderr(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what stands on stderr, its panels and lines as one line."""
    return " ".join(capsys.readouterr().err.replace("│", "").split())
