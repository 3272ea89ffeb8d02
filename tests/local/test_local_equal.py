"""Local processes and memory give the same models, for every method and every secure sum."""

import json
from pathlib import Path
from typing import Any

import pytest

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.local.processes import Parties, model_digests, nobody_failed
from tests.secure_apfed.small_runs import Said, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

SUMS = {
    name: {"secure_sum": {"scheme": kind.scheme, "masks": kind.masks}}
    for name, kind in SECURE_SUMS.items()
}
OPEN = {"mechanism": "none", "noise": "reproducible_insecure"}
FEW = {"data": {"dataset": "breast_cancer", "labelled": 40}}
NOISED: dict[str, Any] = {"epsilon": 4.0, "prior": "ridge"}
MOMENT = NOISED | {"name": "votes_moment", "moment_features": 32}
DEALT = {"alignment": {"protocol": "circuit"}}
NOISE = {"scheme": "plain", "masks": "pairwise", "clip": 0.5, "noise": {"sigma": 0.1}}
CASES: dict[str, tuple[Said, dict[str, Any]]] = {
    **{name: ("apfed_c", changes) for name, changes in SUMS.items()},
    "apfed_r": ("apfed_r", {}),
    "mixed": ("apfed", {}),
    "tvfl": ("tvfl", {}),
    "alone": ("single_view", {}),
    "dealt": ("apfed_c", DEALT),
    "pair by pair": (
        "apfed_c",
        {
            "alignment": {"mode": "pairwise"},
            "secure_sum": {"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        },
    ),
    "guarded": ("apfed_c", {"guard": small_config().guard.model_dump()}),
    "noise under the sum": ("apfed_c", {"secure_sum": NOISE}),
    "private training": ("apfed_c", {"dp_sgd": {"clip": 0.5, "noise_multiplier": 2.0}}),
    "votes": ("votes", FEW),
    "votes, noised": (NOISED | {"name": "votes"}, FEW),
    "votes, randomised": (NOISED | {"name": "votes_randomised"}, FEW),
    "votes, encrypted": (NOISED | {"name": "votes_encrypted", "candidates": 3}, FEW),
    "votes, encrypted, dealt": ({"name": "votes_encrypted", "prior": "ridge"}, FEW | DEALT),
    "votes, moment": (MOMENT, FEW),
    "votes, moment, dealt": (MOMENT, FEW | DEALT),
    "decomposed": ("vfedtrans", {}),
    "decomposed, dealt": ("vfedtrans", DEALT),
    "label stages": ("apfed_c", {"labels": {"mechanism": "lp_mst", "epsilon": 1.0}}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(every=4)
def test_the_same_models_in_one_process_and_in_many(case: str, tmp_path: Path) -> None:
    method, changes = CASES[case]
    train = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
    config = small_config(method, **{"train": train, "guard": OPEN, **changes})
    run(config, tmp_path / "memory")
    nobody_failed(Parties(config, tmp_path / "local").play())
    assert model_digests(tmp_path / "local") == model_digests(tmp_path / "memory")
    whole = json.loads((tmp_path / "memory" / "result.json").read_bytes())
    active = tmp_path / "local" / "parties" / config.data.active_name
    result = json.loads((active / "result.json").read_bytes())
    assert result["accuracy"] == whole["accuracy"]
    assert result["sum"] == whole["sum"]
    if config.method.predicts_alone:
        assert load_model(active).classes == load_model(tmp_path / "memory").classes


def test_secret_seeds_give_other_models_each_time(tmp_path: Path) -> None:
    config = small_config(party_seeds="secret")
    digests = []
    for name in ("one", "other"):
        run(config, tmp_path / name)
        digests.append(model_digests(tmp_path / name))
    assert not set(digests[0].values()) & (set(digests[1].values()) - {digests[1]["aggregator"]})
