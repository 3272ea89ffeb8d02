"""Which attacks find something to read under each method, by what a real run of it sends.

Nothing crashes, and what does not apply says why. Malicious attacks are played in live runs.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from apfed_attacks import ATTACKS
from apfed_attacks.interface import AttackResult
from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice
from secure_apfed.methods import METHODS
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

RELEASES_OF_ACTIVE = {
    "model_completion", "semi_supervised", "inverse_network", "unpaired_inversion",
}  # fmt: skip
GRADIENTS = {"label_gradients", "gradient_norm", "gradient_direction", "batch_labels"}
RELEASES_OF_PASSIVES = {"inverse_network", "unpaired_inversion", "representation_network"}
JOINT = {"model_completion", "semi_supervised", "spectral"} | GRADIENTS | RELEASES_OF_PASSIVES
OUTSIDER = {"membership"}
APPLIES: Mapping[str, set[str]] = {
    "apfed": RELEASES_OF_ACTIVE | {"contrastive_inversion"} | OUTSIDER,
    "apfed_r": RELEASES_OF_ACTIVE | OUTSIDER,
    "apfed_c": RELEASES_OF_ACTIVE | {"contrastive_inversion"} | OUTSIDER,
    "tvfl": JOINT,
    "single_view": OUTSIDER,
    "votes": {"shown_labels", "vote_regression"} | OUTSIDER,
    "votes_randomised": {"shown_labels", "vote_regression"} | OUTSIDER,
    "votes_encrypted": OUTSIDER,
    "votes_moment": {"shown_labels"} | OUTSIDER,
    "joint_teacher": JOINT | OUTSIDER,
    "apc_vfl": RELEASES_OF_PASSIVES | OUTSIDER,
    "vfedtrans": {"vector_regression"} | OUTSIDER,
    "split_nn": JOINT,
    "split_nn_sum": GRADIENTS | {"sum_regression"},
    "mmvfl": {"pseudo_labels", "sum_regression"} | OUTSIDER,
    "v_fedmv": {"pseudo_labels", "sum_regression"} | OUTSIDER,
    "h_fedmv": {"averaged_membership"} | OUTSIDER,
    "s_fedmv": {"averaged_membership"} | OUTSIDER,
}
CHEAP: Mapping[str, Mapping[str, Any]] = {
    "membership": {"shadow_models": 4, "epochs": 1, "candidates": 40},
    "averaged_membership": {"candidates": 40},
}


@cache
def recording(method: str) -> Recording:
    return run(small_config(method), None).recording


def attacked(method: str, name: str, **options: Any) -> tuple[AttackResult, ...]:
    options = {"iterations": 3, **CHEAP.get(name, {}), **options}
    return mount(recording(method), [AttackChoice(name=name, options=options)], seed=0)


@pytest.mark.parametrize("method", METHODS)
def test_attacks_apply_where_a_method_gives_them_something_to_read(method: str) -> None:
    applies = set()
    for name in ATTACKS:
        for result in attacked(method, name):
            assert result.applicable or result.reason
            if result.applicable:
                applies.add(name)
    assert applies == APPLIES[method]


def test_a_passive_of_a_sum_trains_its_own_network_further() -> None:
    results = attacked("split_nn_sum", "semi_supervised", own_network=True)
    assert [result.applicable for result in results] == [True, True]
    assert "own network, trained further" in results[0].variants


@pytest.mark.parametrize(
    ("method", "name", "options", "figure", "least"),
    [
        ("mmvfl", "pseudo_labels", {"labels_per_class": 0}, "balanced_accuracy", 0.99),
        ("v_fedmv", "pseudo_labels", {"labels_per_class": 0}, "balanced_accuracy", 0.99),
        ("split_nn_sum", "sum_regression", {"shadow_rows": 100, "iterations": 20}, "advantage", 0),
    ],
)
def test_a_real_run_gives_away(
    method: str, name: str, options: dict[str, Any], figure: str, least: float
) -> None:
    for result in attacked(method, name, **options):
        found = result.advantage if figure == "advantage" else result.score[figure]
        assert found is not None
        assert found > least
        assert name != "pseudo_labels" or result.variant == "largest of z"


def test_real_singular_vectors_give_every_column_away() -> None:
    model = {"network": "enriched", "hidden": [8], "representation": 30}
    recording = run(small_config("vfedtrans", model=model), None).recording
    choice = AttackChoice(name="vector_regression", options={"shadow_rows": 100, "iterations": 50})
    for result in mount(recording, [choice], seed=0):
        assert result.role == "active"
        assert (result.score["r2"] or 0) > 0.99
