"""Randomised response: what a single answer tells, and that 64-bit chances are on the safe side."""

import math

import pytest
import torch
from scipy import stats

from secure_apfed.privacy.randomised_response import LabelResponse

KEY = bytes(range(32))
LABELS = torch.arange(100_000) % 5


def response(epsilon: float = 1.0, classes: int = 5) -> LabelResponse:
    return LabelResponse(epsilon=epsilon, classes=classes)


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
    monkeypatch.setattr(
        "secure_apfed.privacy.randomised_response.keystream", lambda *_, length: stream
    )
    labels = torch.zeros(4, dtype=torch.int64)
    assert response(40.0, 2).answer(labels, key=KEY).tolist() == [1, 1, 0, 0]


def test_replacements_are_uniform_over_the_other_classes() -> None:
    changed = response().answer(LABELS, key=KEY)
    shift = (changed - LABELS)[changed != LABELS] % 5
    assert set(shift.tolist()) == {1, 2, 3, 4}
    assert stats.chisquare(torch.bincount(shift)[1:].numpy()).pvalue > 0.001


def test_a_large_epsilon_keeps_everything() -> None:
    assert torch.equal(response(40.0).answer(LABELS, key=KEY), LABELS)


def test_the_statement_says_exactly_what_holds() -> None:
    assert response(2.0, 10).statement() == (
        "label DP, epsilon_y 2, delta 0, for any number of epochs: 10-ary randomised response "
        "keeps a training label with probability 0.451; features are not covered"
    )
