"""Live runs: what an adversary may ask, and who may be played."""

import pytest
import torch

from apfed_attacks.live.runs import LiveRun
from apfed_attacks.view import AttackError
from apfed_protocols.errors import RemoteProtocolError
from tests.attacks.live_runs import live_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@pytest.fixture(scope="module")
def spread() -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["tvfl", "single_view"])
def test_only_apfed_has_an_active_that_receives_sums(method: str) -> None:
    with pytest.raises(AttackError, match=f"not in {method}"):
        LiveRun(live_config(method))


@pytest.mark.parametrize(
    ("rows", "scale", "refusal"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], float("nan"), "norm is not within"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 1e5, "norm is not within"),
        ([0, 1, 2, 3, 4, 5, 6, 6], 1.0, "repeated a row"),
        ([0, 1, 2, 3, 4, 5, 6, 10_000], 1.0, "outside the alignment"),
        ([0], 1.0, "at least 2"),
    ],
)
def test_the_protocol_holds_the_adversary_to_its_rules(
    spread: torch.Tensor, rows: list[int], scale: float, refusal: str
) -> None:
    run = LiveRun(live_config("apfed_c", views=2))
    with pytest.raises(RemoteProtocolError, match=refusal):
        run.ask(torch.tensor(rows), scale * spread[: len(rows)])


def test_a_question_within_the_rules_is_answered_and_recorded(spread: torch.Tensor) -> None:
    run = LiveRun(live_config("apfed_c", views=4))
    answer = run.ask(torch.arange(8), spread)
    parts = [run.contributed(name) for name in run.passives]
    assert torch.allclose(answer, torch.stack(parts).sum(dim=0).float(), atol=1e-6)
    assert torch.equal(run.recording.transcript.opened[0], answer)


def test_honest_training_after_a_question_goes_on(spread: torch.Tensor) -> None:
    run = LiveRun(live_config("apfed_r", views=2))
    run.ask(torch.arange(8), spread)
    people: list[int] = []
    run.train(1, before=lambda step, rows_B: people.append(len(run.sent(rows_B))))
    assert sum(people) == len(run.learner.training_rows)


def test_a_reconstructing_passive_holds_no_contrasted_representations() -> None:
    run = LiveRun(live_config("apfed_r", views=2))
    with pytest.raises(AttackError, match="holds no contrasted representations"):
        run.representations("passive-1", torch.arange(3))
