"""Agreement of votes out of randomised answers: without bias, and within its own noise."""

import numpy as np
import pytest

from secure_apfed.methods.votes import agreements
from secure_apfed.privacy.randomised_response import VoteResponse

ROWS, CLASSES = 400, 5
RESPONSE = VoteResponse(epsilon=2.0, classes=CLASSES)


def answered(votes_MU: np.ndarray, seed: int) -> np.ndarray:
    """One answer of each passive for each row, as `VoteResponse` gives them."""
    return np.stack([
        RESPONSE.answer(np.eye(CLASSES)[votes_U], key=bytes([seed, at]) * 16, about=b"0")
        for at, votes_U in enumerate(votes_MU)
    ])  # fmt: skip


def test_shares_have_no_bias_and_the_noise_that_is_told() -> None:
    draw = np.random.default_rng(0)
    labels_U = draw.integers(CLASSES, size=ROWS)
    off_U = (labels_U + 1) % CLASSES
    # a, b: right; c: right on a quarter of the rows, another class elsewhere.
    c_U = np.where(np.arange(ROWS) % 4 == 0, labels_U, off_U)
    found = [
        agreements(
            RESPONSE, answered(np.stack([labels_U, labels_U, c_U]), seed), names=("a", "b", "c"),
            labelled_n=np.arange(100), labels_n=labels_U[:100],
        )
        for seed in range(60)
    ]  # fmt: skip
    for name, others, labels in (("a", 0.625, 1.0), ("b", 0.625, 1.0), ("c", 0.25, 0.25)):
        shares = np.array([[one[name].others, one[name].labels] for one in found], dtype=float)
        noise = np.array([found[0][name].others_noise, found[0][name].labels_noise])
        assert np.abs(shares.mean(axis=0) - [others, labels]).max() < 4 * noise.max() / 60**0.5
        assert (shares.std(axis=0) < 1.2 * noise).all()


def test_a_passive_alone_agrees_with_nobody() -> None:
    answers = answered(np.zeros((1, ROWS), dtype=np.int64), 0)
    (found,) = agreements(
        RESPONSE, answers, names=("a",),
        labelled_n=np.arange(10), labels_n=np.zeros(10, dtype=np.int64),
    ).values()  # fmt: skip
    assert found.others is None
    assert found.labels == pytest.approx(1.0, abs=4 * found.labels_noise)
