"""What every label mechanism owes, parametrised over the table, and an audit of its epsilon."""

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.privacy.randomised_response import LABEL_MECHANISMS, LabelMechanism
from secure_apfed.privacy.randomised_response import make_label_mechanism as make
from secure_apfed.settings.privacy import LabelSettings

KEY = bytes(range(32))
CLASSES = 5
LABELS = torch.arange(100_000) % CLASSES
PROTECTING = [name for name, kind in LABEL_MECHANISMS.items() if not kind.unsafe]


def mechanism(name: str, epsilon: float = 1.0, classes: int = CLASSES) -> LabelMechanism:
    told = {"mechanism": name} | ({} if name == "none" else {"epsilon": epsilon})
    return make(LabelSettings.model_validate(told), classes=classes)


def keep_probability(epsilon: float) -> float:
    """Of a label of which nothing is expected (Kairouz, Oh and Viswanath 2016)."""
    return math.exp(epsilon) / (math.exp(epsilon) + CLASSES - 1)


def kept_as_often_as(answers: torch.Tensor, probability: float) -> bool:
    deviation = math.sqrt(len(LABELS) * probability * (1 - probability))
    return abs(int((answers == LABELS).sum()) - len(LABELS) * probability) < 5 * deviation


def epsilon_below(answer: Callable[[torch.Tensor], torch.Tensor], level: float = 1e-3) -> float:
    """The epsilon that 60,000 answers for each of two labels contradict (Clopper and Pearson).

    The attacker looks at one answer and asks which of two labels it was given for; of all
    answers, the one that tells most is taken, and the level is shared among them.
    """
    count, share = 60_000, level / (2 * CLASSES)
    said = [torch.bincount(answer(torch.full((count,), one)), minlength=CLASSES) for one in (0, 1)]
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


@pytest.mark.parametrize("name", PROTECTING)
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_labels_are_kept_as_often_as_stated_and_not_as_at_two_thirds_or_three_halves(
    name: str, epsilon: float
) -> None:
    answers = mechanism(name, epsilon).answer(LABELS, key=KEY)
    assert kept_as_often_as(answers, keep_probability(epsilon))
    for wrong in (2 / 3, 3 / 2):
        assert not kept_as_often_as(answers, keep_probability(epsilon * wrong))
        assert not kept_as_often_as(
            mechanism(name, epsilon * wrong).answer(LABELS, key=KEY), keep_probability(epsilon)
        )


@pytest.mark.parametrize("prior", [None, prior_for])
@pytest.mark.parametrize("name", PROTECTING)
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_an_audit_stays_under_the_claim_and_catches_too_little_noise(
    name: str, epsilon: float, prior: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    def answer(strength: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda labels_N: mechanism(name, strength).answer(
            labels_N, key=KEY, prior_NK=prior(labels_N) if prior else None
        )

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
    assert none.unsafe
    assert none.epsilon == math.inf
    assert none.statement() == "no label DP"
    assert torch.equal(none.answer(LABELS, key=KEY), LABELS)
    assert epsilon_below(lambda labels_N: none.answer(labels_N, key=KEY)) > 8


@pytest.mark.parametrize("name", LABEL_MECHANISMS)
def test_it_is_in_the_table_under_its_name_and_answers_with_labels(name: str) -> None:
    made = mechanism(name)
    assert made.name == name
    assert made.stages >= 1
    answers = made.answer(LABELS, key=KEY)
    assert (answers.dtype, answers.shape) == (torch.int64, LABELS.shape)
    assert set(answers.tolist()) <= set(range(CLASSES))
    assert made.answer(LABELS[:0], key=KEY).shape == (0,)
    assert LABELS[:5].tolist() == [0, 1, 2, 3, 4]  # its argument is left alone


@pytest.mark.parametrize("name", PROTECTING)
def test_the_same_labels_and_key_give_the_same_answers(name: str) -> None:
    first = mechanism(name).answer(LABELS, key=KEY)
    assert torch.equal(first, mechanism(name).answer(LABELS, key=KEY))
    assert not torch.equal(first, mechanism(name).answer(LABELS, key=bytes(32)))
    assert not torch.equal(first, mechanism(name, 1.1).answer(LABELS, key=KEY))


@pytest.mark.parametrize("name", PROTECTING)
def test_one_other_label_changes_all_chances(name: str) -> None:
    changed = LABELS.clone()
    changed[0] = 1
    moved = mechanism(name).answer(LABELS, key=KEY) != LABELS
    again = mechanism(name).answer(changed, key=KEY) != changed
    assert abs(float(torch.corrcoef(torch.stack([moved, again]).double())[0, 1])) < 0.02


@pytest.mark.parametrize("name", PROTECTING)
def test_the_statement_names_epsilon_and_what_is_left_out(name: str) -> None:
    told = mechanism(name, 2.5).statement()
    assert told.startswith("label DP, epsilon_y 2.5, delta 0")
    assert told.endswith("features are not covered")


@pytest.mark.parametrize("name", PROTECTING)
@pytest.mark.parametrize("epsilon", [0.0, -1.0, 41.0, math.inf, math.nan])
def test_epsilon_out_of_range_is_refused(name: str, epsilon: float) -> None:
    with pytest.raises(ConfigError, match=f"up to 40, got {epsilon}"):
        LABEL_MECHANISMS[name](epsilon=epsilon, classes=5)


@pytest.mark.parametrize("name", PROTECTING)
def test_one_class_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 2 classes, got 1"):
        mechanism(name, classes=1)


@pytest.mark.parametrize("name", LABEL_MECHANISMS)
@pytest.mark.parametrize(("label", "row"), [(5, 3), (-1, 0)])
def test_a_label_outside_the_classes_is_named(name: str, label: int, row: int) -> None:
    labels = torch.zeros(6, dtype=torch.int64)
    labels[row] = label
    with pytest.raises(DataError, match=f"row {row} has label {label}, expected 0..4"):
        mechanism(name).answer(labels, key=KEY)


@pytest.mark.parametrize("name", LABEL_MECHANISMS)
@pytest.mark.parametrize("labels", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)])
def test_other_types_and_shapes_are_refused(name: str, labels: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="labels are int64 of shape"):
        mechanism(name).answer(labels, key=KEY)


@pytest.mark.parametrize("name", PROTECTING)
def test_a_short_key_is_refused(name: str) -> None:
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 1"):
        mechanism(name).answer(LABELS, key=b"x")
