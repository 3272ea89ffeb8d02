"""What every label mechanism owes, parametrised over the table, and an audit of its epsilon.

Then LP-MST's RRWithPrior: the chances of every answer, the choice of k, and priors that are none.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.privacy.randomised_response import (
    LABEL_MECHANISMS,
    LabelMechanism,
    LabelResponse,
    MultiStageResponse,
)
from secure_apfed.privacy.randomised_response import make_label_mechanism as make
from secure_apfed.settings.privacy import LabelSettings

KEY = bytes(range(32))
CLASSES = 5
LABELS = torch.arange(100_000) % CLASSES
PROTECTING = [name for name, kind in LABEL_MECHANISMS.items() if not kind.unsafe]

every = pytest.mark.parametrize("name", LABEL_MECHANISMS)
each_protecting = pytest.mark.parametrize("name", PROTECTING)


def mechanism(name: str, epsilon: float = 1.0, classes: int = CLASSES) -> LabelMechanism:
    told = {"mechanism": name} | ({} if name == "none" else {"epsilon": epsilon})
    return make(LabelSettings.model_validate(told), classes=classes)


def keep_probability(epsilon: float) -> float:
    """Of a label of which nothing is expected (Kairouz, Oh and Viswanath 2016)."""
    return math.exp(epsilon) / (math.exp(epsilon) + CLASSES - 1)


def kept_as_often_as(answers: torch.Tensor, probability: float) -> bool:
    deviation = math.sqrt(len(LABELS) * probability * (1 - probability))
    return abs(int((answers == LABELS).sum()) - len(LABELS) * probability) < 5 * deviation


def correlated(first: torch.Tensor, second: torch.Tensor) -> bool:
    return abs(float(torch.corrcoef(torch.stack([first, second]).double())[0, 1])) > 0.03


def epsilon_below(answer: Callable[[torch.Tensor], torch.Tensor], level: float = 1e-3) -> float:
    """The epsilon that 60,000 answers for each of two labels contradict (Clopper and Pearson).

    The attacker looks at one answer and asks which of two labels it was given for; of all
    answers, the one that tells most is taken, and the level is shared among them.
    """
    count, share = 60_000, level / (2 * CLASSES)
    said = [torch.bincount(answer(torch.full((count,), y)), minlength=CLASSES) for y in (0, 1)]
    bounds = [0.0]
    for first, second in (said, said[::-1]):
        for mine, others in zip(first.tolist(), second.tolist(), strict=True):
            low = stats.beta.ppf(share, mine, count - mine + 1) if mine else 0.0
            high = stats.beta.ppf(1 - share, others + 1, count - others) if others < count else 1.0
            bounds.append(math.log(low / high) if low > 0 else 0.0)
    return max(bounds)


def prior_for(labels_N: torch.Tensor) -> torch.Tensor:
    """Class 0 and 1 likeliest, so that k is 2 or less."""
    return torch.tensor([0.5, 0.44, 0.02, 0.02, 0.02]).expand(len(labels_N), CLASSES)


@each_protecting
def test_labels_are_kept_as_often_as_stated_and_not_as_at_two_thirds_or_three_halves(
    name: str,
) -> None:
    for epsilon in (0.3, 1.0, 4.0):
        answers = mechanism(name, epsilon).answer(LABELS, key=KEY)
        assert kept_as_often_as(answers, keep_probability(epsilon))
        for wrong in (2 / 3, 3 / 2):
            assert not kept_as_often_as(answers, keep_probability(epsilon * wrong))
            bad = mechanism(name, epsilon * wrong).answer(LABELS, key=KEY)
            assert not kept_as_often_as(bad, keep_probability(epsilon))


@pytest.mark.parametrize("prior", [None, prior_for])
@each_protecting
def test_an_audit_stays_under_the_claim_and_catches_too_little_noise(
    name: str, prior: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    def answer(strength: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda labels_N: mechanism(name, strength).answer(
            labels_N, key=KEY, prior_NK=prior(labels_N) if prior else None
        )

    for epsilon in (1.0, 4.0, 8.0):
        assert epsilon_below(answer(epsilon)) <= epsilon
        assert epsilon_below(answer(1.5 * epsilon)) > epsilon


def test_the_audit_catches_an_answer_that_is_given_twice() -> None:
    """Two answers for one label, joined: together they cost twice epsilon."""
    once = mechanism("randomised_response", 1.0)

    def agreed(labels_N: torch.Tensor) -> torch.Tensor:
        one, other = (once.answer(labels_N, key=bytes([at]) * 32) for at in (1, 2))
        return torch.where(one == other, one, 4)

    assert epsilon_below(agreed) > 1.0


def test_no_mechanism_gives_labels_away_and_says_so() -> None:
    none = mechanism("none")
    assert (none.unsafe, none.epsilon, none.statement()) == (True, math.inf, "no label DP")
    assert torch.equal(none.answer(LABELS, key=KEY), LABELS)
    assert epsilon_below(lambda labels_N: none.answer(labels_N, key=KEY)) > 8


@every
def test_it_is_in_the_table_under_its_name_and_answers_with_labels(name: str) -> None:
    made = mechanism(name)
    assert made.name == name
    assert made.stages >= 1
    answers = made.answer(LABELS, key=KEY)
    assert (answers.dtype, answers.shape) == (torch.int64, LABELS.shape)
    assert set(answers.tolist()) <= set(range(CLASSES))
    assert made.answer(LABELS[:0], key=KEY).shape == (0,)
    assert LABELS[:5].tolist() == [0, 1, 2, 3, 4]  # its argument is left alone


@each_protecting
def test_the_same_labels_and_key_give_the_same_answers_and_others_others(name: str) -> None:
    first = mechanism(name).answer(LABELS, key=KEY)
    assert torch.equal(first, mechanism(name).answer(LABELS, key=KEY))
    assert not torch.equal(first, mechanism(name).answer(LABELS, key=bytes(32)))
    assert not torch.equal(first, mechanism(name, 1.1).answer(LABELS, key=KEY))
    # One other label changes all chances.
    changed = LABELS.clone()
    changed[0] = 1
    assert not correlated(first != LABELS, mechanism(name).answer(changed, key=KEY) != changed)


@each_protecting
def test_the_statement_names_epsilon_and_what_is_left_out(name: str) -> None:
    told = mechanism(name, 2.5).statement()
    assert told.startswith("label DP, epsilon_y 2.5, delta 0")
    assert told.endswith("features are not covered")


@each_protecting
def test_what_is_out_of_range_is_refused(name: str) -> None:
    for epsilon in (0.0, -1.0, 41.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=f"up to 40, got {epsilon}"):
            LABEL_MECHANISMS[name](epsilon=epsilon, classes=5)
    with pytest.raises(ConfigError, match="at least 2 classes, got 1"):
        mechanism(name, classes=1)
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 1"):
        mechanism(name).answer(LABELS, key=b"x")


@every
def test_what_are_no_labels_is_refused(name: str) -> None:
    for label, row in ((5, 3), (-1, 0)):
        labels = torch.zeros(6, dtype=torch.int64)
        labels[row] = label
        with pytest.raises(DataError, match=f"row {row} has label {label}, expected 0..4"):
            mechanism(name).answer(labels, key=KEY)
    for other in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(LocalProtocolError, match="labels are int64 of shape"):
            mechanism(name).answer(other, key=KEY)


def test_any_answer_is_at_most_e_to_epsilon_likelier_for_one_label_than_for_another() -> None:
    for epsilon, classes in ((0.5, 2), (1.0, 5), (8.0, 100), (40.0, 3)):
        response = LabelResponse(epsilon=epsilon, classes=classes)
        other = response.replace_probability / (classes - 1)
        assert math.log(response.keep_probability / other) == pytest.approx(epsilon)
    assert torch.equal(mechanism("randomised_response", 40.0).answer(LABELS, key=KEY), LABELS)


def test_rounding_to_64_bits_never_raises_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """At epsilon 40 and 2 classes a replacement's chance is 78.4 of 2^64: 79 words replace."""
    words = [0, 78, 79, 2**64 - 1]
    stream = b"".join(word.to_bytes(8, "little") for word in words) + bytes(32)
    monkeypatch.setattr(
        "secure_apfed.privacy.randomised_response.keystream", lambda *_, length: stream
    )
    labels = torch.zeros(4, dtype=torch.int64)
    response = LabelResponse(epsilon=40.0, classes=2)
    assert response.answer(labels, key=KEY).tolist() == [1, 1, 0, 0]


def test_replacements_are_uniform_over_the_other_classes() -> None:
    changed = mechanism("randomised_response").answer(LABELS, key=KEY)
    shift = (changed - LABELS)[changed != LABELS] % 5
    assert set(shift.tolist()) == {1, 2, 3, 4}
    assert stats.chisquare(torch.bincount(shift)[1:].numpy()).pvalue > 0.001


ROWS = 60_000
PRIORS = {
    "even": [0.25, 0.25, 0.25, 0.25],
    "leaning": [0.4, 0.1, 0.3, 0.2],
    "two of four": [0.02, 0.49, 0.01, 0.48],
    "sure": [0.0, 0.0, 1.0, 0.0],
}


def staged(epsilon: float = 1.0) -> MultiStageResponse:
    return MultiStageResponse(epsilon=epsilon, classes=4)


def stated(prior: list[float], epsilon: float) -> np.ndarray:
    """P(answer | label) as Algorithms 1 and 2 of Ghazi et al. 2021 say, written out anew."""
    order = sorted(range(len(prior)), key=lambda y: (-prior[y], y))

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


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_every_answer_has_the_chance_that_the_algorithm_states(prior: list[float]) -> None:
    prior_NK = torch.tensor(prior, dtype=torch.float64).expand(ROWS, 4)
    for epsilon in (0.5, 1.0, 3.0):
        table = stated(prior, epsilon)
        for one, other in itertools.permutations(table, 2):
            assert (one <= math.exp(epsilon) * other + 1e-12).all()
        for label in range(4):
            answers = staged(epsilon).answer(torch.full((ROWS,), label), key=KEY, prior_NK=prior_NK)
            counts = torch.bincount(answers, minlength=4).numpy()
            deviation = np.sqrt(ROWS * table[label] * (1 - table[label]))
            assert (abs(counts - ROWS * table[label]) <= 5 * deviation).all()


def test_a_good_prior_makes_more_answers_right() -> None:
    assert staged().widths(np.full((3, 4), 0.25)).tolist() == [4, 4, 4]
    labels = torch.arange(ROWS) % 4
    prior = torch.full((ROWS, 4), 0.02)
    prior[torch.arange(ROWS), labels] = 0.49
    prior[torch.arange(ROWS), (labels + 1) % 4] = 0.47
    with_prior = staged().answer(labels, key=KEY, prior_NK=prior)
    without = staged().answer(labels, key=KEY)
    assert (with_prior == labels).sum() > 1.3 * (without == labels).sum()


def test_a_prior_belongs_to_its_row_and_another_gives_independent_chances() -> None:
    rows = torch.eye(4)[[2, 0, 3]]
    assert staged().answer(torch.tensor([0, 1, 2]), key=KEY, prior_NK=rows).tolist() == [2, 0, 3]
    labels = torch.zeros(ROWS, dtype=torch.int64)
    prior = torch.full((ROWS, 4), 0.25)
    moved = staged().answer(labels, key=KEY, prior_NK=prior) != 0
    prior[0] = torch.tensor([0.26, 0.25, 0.25, 0.24])
    assert not correlated(moved, staged().answer(labels, key=KEY, prior_NK=prior) != 0)


def test_what_is_no_prior_is_refused() -> None:
    for wrong in (
        torch.full((2, 4), math.nan), torch.full((2, 4), math.inf), torch.full((2, 4), 0.3),
        torch.tensor([[1.5, -0.5, 0, 0], [1, 0, 0, 0]]), torch.zeros(2, 4),
    ):  # fmt: skip
        with pytest.raises(ModelError, match="gives no probabilities"):
            staged().answer(torch.tensor([0, 1]), key=KEY, prior_NK=wrong)
    for shaped in (torch.ones(3, 4) / 4, torch.ones(2, 5) / 5, torch.ones(2, 4).long()):
        with pytest.raises(LocalProtocolError, match=r"a prior has shape \(2, 4\)"):
            staged().answer(torch.tensor([0, 1]), key=KEY, prior_NK=shaped)
