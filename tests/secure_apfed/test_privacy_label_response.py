import math

import pytest
import torch
from scipy import stats

from protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.privacy.label_response import LabelResponse, randomise_labels

KEY = bytes(range(32))
LABELS = torch.arange(100_000) % 5


def response(epsilon: float = 1.0, classes: int = 5) -> LabelResponse:
    return LabelResponse(epsilon=epsilon, classes=classes)


def kept(epsilon: float) -> int:
    return int((randomise_labels(LABELS, response(epsilon), key=KEY) == LABELS).sum())


def fits(right: int, probability: float) -> bool:
    deviation = math.sqrt(len(LABELS) * probability * (1 - probability))
    return abs(right - len(LABELS) * probability) < 5 * deviation


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_labels_are_kept_as_often_as_stated_and_not_as_at_another_epsilon(epsilon: float) -> None:
    right = kept(epsilon)
    assert fits(right, response(epsilon).keep_probability)
    assert not fits(right, response(epsilon * 2 / 3).keep_probability)
    assert not fits(right, response(epsilon * 3 / 2).keep_probability)


@pytest.mark.parametrize(("epsilon", "classes"), [(0.5, 2), (1.0, 5), (8.0, 100), (40.0, 3)])
def test_any_answer_is_at_most_e_to_epsilon_likelier_for_one_label_than_for_another(
    epsilon: float, classes: int
) -> None:
    mechanism = response(epsilon, classes)
    other = mechanism.replace_probability / (classes - 1)
    assert math.log(mechanism.keep_probability / other) == pytest.approx(epsilon)


def test_rounding_to_64_bits_never_raises_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """At epsilon 40 and 2 classes a replacement's chance is 78.4 of 2^64: 79 words replace."""
    words = [0, 78, 79, 2**64 - 1]
    stream = b"".join(word.to_bytes(8, "little") for word in words) + bytes(32)
    monkeypatch.setattr("secure_apfed.privacy.label_response.keystream", lambda *_, length: stream)
    labels = torch.zeros(4, dtype=torch.int64)
    assert randomise_labels(labels, response(40.0, 2), key=KEY).tolist() == [1, 1, 0, 0]


def test_replacements_are_uniform_over_the_other_classes() -> None:
    changed = randomise_labels(LABELS, response(), key=KEY)
    shift = (changed - LABELS)[changed != LABELS] % 5
    assert set(shift.tolist()) == {1, 2, 3, 4}
    assert stats.chisquare(torch.bincount(shift)[1:].numpy()).pvalue > 0.001


def test_an_audit_of_single_answers_stays_under_epsilon() -> None:
    """The likelihood ratio that 100,000 answers show, with its interval of 99.9 %."""
    answers = randomise_labels(LABELS, response(1.0), key=KEY)
    said_if_true = stats.binomtest(int((answers[LABELS == 0] == 0).sum()), 20_000)
    said_if_other = stats.binomtest(int((answers[LABELS == 1] == 0).sum()), 20_000)
    low = said_if_true.proportion_ci(0.999).low / said_if_other.proportion_ci(0.999).high
    high = said_if_true.proportion_ci(0.999).high / said_if_other.proportion_ci(0.999).low
    assert 0.8 < math.log(low) < 1.0 < math.log(high) < 1.2


def test_the_same_labels_and_key_give_the_same_answers() -> None:
    first = randomise_labels(LABELS, response(), key=KEY)
    assert torch.equal(first, randomise_labels(LABELS, response(), key=KEY))
    assert not torch.equal(first, randomise_labels(LABELS, response(), key=bytes(32)))
    assert not torch.equal(first, randomise_labels(LABELS, response(1.1), key=KEY))


def test_one_other_label_changes_all_chances() -> None:
    changed = LABELS.clone()
    changed[0] = 1
    moved = randomise_labels(LABELS, response(), key=KEY) != LABELS
    again = randomise_labels(changed, response(), key=KEY) != changed
    assert abs(float(torch.corrcoef(torch.stack([moved, again]).double())[0, 1])) < 0.02


def test_a_large_epsilon_keeps_everything() -> None:
    assert torch.equal(randomise_labels(LABELS, response(40.0), key=KEY), LABELS)


def test_no_labels_are_no_problem() -> None:
    assert randomise_labels(LABELS[:0], response(), key=KEY).shape == (0,)


def test_the_statement_says_exactly_what_holds() -> None:
    assert response(2.0, 10).statement() == (
        "label DP, epsilon_y 2, delta 0, for any number of epochs: 10-ary randomised response "
        "keeps a training label with probability 0.451; features are not covered"
    )


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 41.0, math.inf, math.nan])
def test_epsilon_out_of_range_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match=f"up to 40, got {epsilon}"):
        response(epsilon)


def test_one_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 classes, got 1"):
        response(classes=1)


@pytest.mark.parametrize(("label", "row"), [(5, 3), (-1, 0)])
def test_a_label_outside_the_classes_is_named(label: int, row: int) -> None:
    labels = torch.zeros(6, dtype=torch.int64)
    labels[row] = label
    with pytest.raises(DataError, match=f"row {row} has label {label}, expected 0..4"):
        randomise_labels(labels, response(), key=KEY)


@pytest.mark.parametrize("labels", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)])
def test_other_types_and_shapes_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="labels are int64 of shape"):
        randomise_labels(labels, response(), key=KEY)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 1"):
        randomise_labels(LABELS, response(), key=b"x")
