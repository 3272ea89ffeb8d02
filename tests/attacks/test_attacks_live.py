"""Live runs: what an adversary may ask, and who may be played."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.live.runs import LiveRun
from apfed_attacks.live.strategy import CohortDegradation, ask_among_decoys, rows_at_once
from apfed_attacks.view import AttackError
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import RepresentationTerms
from tests.attacks.recordings import live_config

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


# How an active asks about many people among decoys, on a seat that answers what it was sent.


class Echo:
    """Answers each row with what it was sent and noise of deviation 1; keeps the questions."""

    def __init__(self, rows: int) -> None:
        self.trained = torch.arange(rows)
        self.terms = RepresentationTerms(
            shape=(8,), dtype="float32", minimum_norm=0.0, maximum_norm=1e4
        )
        self.batch_size = 20
        self.asked: list[Tensor] = []
        self.draw = torch.Generator().manual_seed(1)

    def ask(self, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        assert len(rows_B) == len(z_BD) <= self.batch_size
        assert len(rows_B.unique()) == len(rows_B)
        self.asked.append(rows_B)
        return z_BD + torch.randn(z_BD.shape, generator=self.draw, dtype=z_BD.dtype)


def _ask(seat: Any, **options: Any) -> Tensor:
    people = torch.arange(30)
    z = torch.arange(30.0, dtype=torch.float64)[:, None].expand(30, 8).clone()
    draw = torch.Generator().manual_seed(0)
    answers = ask_among_decoys(DecoderExtraction(**options), seat, people, z, draw)
    return answers - z


@pytest.mark.parametrize("decoys", [0.0, 0.5])
def test_repeats_average_noise_and_answers_keep_their_order(decoys: float) -> None:
    once = _ask(Echo(200), decoys=decoys)
    often = _ask(Echo(200), decoys=decoys, repeats=16)
    assert once.square().mean().sqrt() == pytest.approx(1, abs=0.2)
    assert often.square().mean().sqrt() == pytest.approx(1 / 4, abs=0.05)


def test_decoys_are_others_and_take_turns() -> None:
    seat = Echo(200)
    _ask(seat, decoys=0.5, repeats=8)
    assert len(seat.asked) == 8 * 3
    counts = torch.cat(seat.asked).bincount(minlength=200)
    assert counts[:30].tolist() == [8] * 30
    assert counts[30:].sum() == 8 * 30
    assert counts[30:].max() <= 8


def test_without_enough_others_the_people_themselves_are_decoys() -> None:
    seat = Echo(30)
    _ask(seat, decoys=0.5)
    assert [len(rows) for rows in seat.asked] == [20, 20, 20]


def test_a_batch_never_grows_beyond_what_was_agreed() -> None:
    seat: Any = Echo(200)
    assert rows_at_once(DecoderExtraction(decoys=0.99), seat) == 1
    _ask(seat, decoys=0.99)


@pytest.mark.parametrize("repeats", [0, -1, 1.5])
def test_it_is_asked_a_whole_number_of_times(repeats: Any) -> None:
    with pytest.raises(ValidationError, match="repeats"):
        DecoderExtraction(repeats=repeats)


# Cohort degradation: the rows of a cohort are pulled towards the others, and nobody else.


def test_only_the_cohort_is_pulled_towards_the_others() -> None:
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([9, 3, 5, 1, 7, 2])
    adversary = CohortDegradation(torch.tensor([5, 2, 8]), strength=2.0)
    answer = adversary.answer(0, rows, z)
    assert torch.equal(answer[[0, 1, 3, 4]], torch.zeros(4, 4))
    # A step against the answer brings the cohort nearer to the others' mean.
    middle = z[[0, 1, 3, 4]].mean(dim=0)
    assert torch.allclose((z - 0.5 * answer)[[2, 5]], middle.expand(2, 4), atol=1e-6)


@pytest.mark.parametrize("cohort", [[0, 1], [5, 6]])
def test_a_batch_of_the_cohort_or_of_others_alone_is_left_in_peace(cohort: list[int]) -> None:
    adversary = CohortDegradation(torch.tensor(cohort))
    assert not adversary.answer(0, torch.tensor([0, 1]), torch.ones(2, 3)).any()


def test_a_victim_that_hears_nothing_else_loses_the_cohort() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=draw)
    x[:40, 0] += 4
    encoder = torch.nn.Linear(3, 8)
    adversary = CohortDegradation(torch.arange(40))
    sgd = torch.optim.SGD(encoder.parameters(), lr=0.05)

    def gap() -> float:
        with torch.no_grad():
            z = encoder(x)
        return float((z[:40].mean(dim=0) - z[40:].mean(dim=0)).norm())

    before = gap()
    for step in range(100):
        rows = torch.randperm(200, generator=draw)[:64]
        z = encoder(x[rows])
        sgd.zero_grad()
        (z * adversary.answer(step, rows, z.detach())).sum().div(64).backward()
        sgd.step()
    assert gap() < 0.1 * before


@pytest.mark.parametrize(("people", "strength"), [(0, 1.0), (2, 0.0), (2, float("nan"))])
def test_a_cohort_of_nobody_or_without_strength_is_refused(people: int, strength: float) -> None:
    with pytest.raises(AttackError, match="a cohort has somebody and a strength above 0"):
        CohortDegradation(torch.arange(people), strength=strength)
