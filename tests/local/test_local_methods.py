"""Every method, one process a party: one is killed at a checkpoint, and all resume to the same."""

from pathlib import Path

import pytest

from secure_apfed.config import Config
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS
from secure_apfed.runs.run import run
from tests.local.processes import (
    Harm,
    Parties,
    model_digests,
    nobody_failed,
    the_others_say_who_and_when,
)
from tests.secure_apfed.small_runs import small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    pytest.mark.filterwarnings("ignore::secure_apfed.errors.NoHelpWarning"),
]

AT_ONCE = ("split_nn_sum", "h_fedmv", "mmvfl")
HELPED = [name for name, method in METHODS.items() if method.settings.has_passives]


# Their answers have noise that a new session draws anew, and the budget is for one.
ONCE_ONLY = ("votes_moment",)


def config_of(method: str) -> Config:
    if METHODS[method].settings.opens_votes:
        few = {"dataset": "breast_cancer", "labelled": 40}
        config = small_config({"name": method, "prior": "labeller"}, data=few)
    else:
        config = small_config(method)
    train = config.train.model_copy(update={"epochs": 2, "batch_size": 128})
    return config.model_copy(update={"train": train})


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in AT_ONCE else pytest.mark.slow) for m in HELPED]
)
@pytest.mark.parametrize("harmed", ["active", "passive-1"])
@pytest.mark.sampled(every=3)
def test_who_is_killed_at_a_checkpoint_resumes_the_same(
    harmed: str, method: str, tmp_path: Path
) -> None:
    config = config_of(method)
    run(config, tmp_path / "memory")
    parties = Parties(config, tmp_path / "run")
    # The active dies where some have saved that step, a passive where it alone has.
    kind, at = (Kind.CHECKPOINT, 1) if harmed == "active" else (Kind.SAVED, 0)
    the_others_say_who_and_when(parties.play({harmed: Harm(kind, at)}), harmed)
    said = parties.play(resume=True)
    if method in ONCE_ONLY:
        assert "BudgetExhaustedError" in {one["kind"] for one in said.values()}
        return
    nobody_failed(said)
    assert model_digests(parties.run.path) == model_digests(tmp_path / "memory")
