"""LP-MST's RRWithPrior: the chances of every answer, the choice of k, and priors that are none."""

import itertools
import math

import numpy as np
import pytest
import torch

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.privacy.randomised_response import LabelResponse, MultiStageResponse

KEY = bytes(range(32))
ROWS = 60_000
PRIORS = {
    "even": [0.25, 0.25, 0.25, 0.25],
    "leaning": [0.4, 0.1, 0.3, 0.2],
    "two of four": [0.02, 0.49, 0.01, 0.48],
    "sure": [0.0, 0.0, 1.0, 0.0],
}


def mechanism(epsilon: float = 1.0, classes: int = 4) -> MultiStageResponse:
    return MultiStageResponse(epsilon=epsilon, classes=classes)


def stated(prior: list[float], epsilon: float) -> np.ndarray:
    """P(answer | label) as Algorithms 1 and 2 of Ghazi et al. 2021 say, written out anew."""
    order = sorted(range(len(prior)), key=lambda one: (-prior[one], one))

    def right(k: int) -> float:
        return math.exp(epsilon) / (math.exp(epsilon) + k - 1) * sum(prior[y] for y in order[:k])

    k = max(range(1, len(prior) + 1), key=lambda k: (round(right(k), 12), -k))
    table = np.zeros((len(prior), len(prior)))
    for label, answer in itertools.product(range(len(prior)), order[:k]):
        if label not in order[:k]:
            table[label, answer] = 1 / k
        else:
            table[label, answer] = (math.exp(epsilon) if label == answer else 1) / (
                math.exp(epsilon) + k - 1
            )
    return table


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_every_answer_has_the_chance_that_the_algorithm_states(
    prior: list[float], epsilon: float
) -> None:
    table = stated(prior, epsilon)
    for label in range(4):
        labels = torch.full((ROWS,), label)
        answers = mechanism(epsilon).answer(
            labels, key=KEY, prior_NK=torch.tensor(prior, dtype=torch.float64).expand(ROWS, 4)
        )
        counts = torch.bincount(answers, minlength=4).numpy()
        deviation = np.sqrt(ROWS * table[label] * (1 - table[label]))
        assert (abs(counts - ROWS * table[label]) <= 5 * deviation).all()


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_the_stated_chances_are_epsilon_dp(prior: list[float], epsilon: float) -> None:
    table = stated(prior, epsilon)
    for one, other in itertools.permutations(table, 2):
        assert (one <= math.exp(epsilon) * other + 1e-12).all()


def test_without_a_prior_it_is_randomised_response() -> None:
    assert mechanism().widths(np.full((3, 4), 0.25)).tolist() == [4, 4, 4]
    labels = torch.arange(ROWS) % 4
    kept = float((mechanism().answer(labels, key=KEY) == labels).double().mean())
    assert kept == pytest.approx(
        LabelResponse(epsilon=1.0, classes=4).keep_probability, abs=5 * 0.5 / math.sqrt(ROWS)
    )


def test_a_good_prior_makes_more_answers_right() -> None:
    labels = torch.arange(ROWS) % 4
    prior = torch.full((ROWS, 4), 0.02)
    prior[torch.arange(ROWS), labels] = 0.49
    prior[torch.arange(ROWS), (labels + 1) % 4] = 0.47
    with_prior = mechanism().answer(labels, key=KEY, prior_NK=prior)
    without = mechanism().answer(labels, key=KEY)
    assert (with_prior == labels).sum() > 1.3 * (without == labels).sum()


def test_a_prior_belongs_to_its_row() -> None:
    prior = torch.eye(4)[[2, 0, 3]]
    labels = torch.tensor([0, 1, 2])
    assert mechanism().answer(labels, key=KEY, prior_NK=prior).tolist() == [2, 0, 3]


def test_another_prior_gives_independent_chances() -> None:
    labels = torch.zeros(ROWS, dtype=torch.int64)
    prior = torch.full((ROWS, 4), 0.25)
    moved = mechanism().answer(labels, key=KEY, prior_NK=prior) != 0
    prior[0] = torch.tensor([0.26, 0.25, 0.25, 0.24])
    again = mechanism().answer(labels, key=KEY, prior_NK=prior) != 0
    assert abs(float(torch.corrcoef(torch.stack([moved, again]).double())[0, 1])) < 0.03


@pytest.mark.parametrize(
    "prior",
    [
        torch.full((2, 4), float("nan")),
        torch.full((2, 4), float("inf")),
        torch.tensor([[1.5, -0.5, 0, 0], [1, 0, 0, 0]]),
        torch.full((2, 4), 0.3),
        torch.zeros(2, 4),
    ],
)
def test_what_is_no_probability_is_refused(prior: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="gives no probabilities"):
        mechanism().answer(torch.tensor([0, 1]), key=KEY, prior_NK=prior)


@pytest.mark.parametrize(
    "prior", [torch.ones(3, 4) / 4, torch.ones(2, 5) / 5, torch.ones(2, 4, dtype=torch.int64)]
)
def test_a_prior_of_another_shape_or_type_is_refused(prior: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match=r"a prior has shape \(2, 4\)"):
        mechanism().answer(torch.tensor([0, 1]), key=KEY, prior_NK=prior)


def test_one_stage_is_another_mechanism() -> None:
    with pytest.raises(ConfigError, match="at least 2 stages, got 1"):
        MultiStageResponse(epsilon=1.0, classes=4, stages=1)
