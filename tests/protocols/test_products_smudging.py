"""What an active with its key reads in the noise: all without smudging, nothing with it.

The active made the errors e_j of its labels. Without smudging, the noise of an answer is the sum of
e_j A_j and little else, so that it can tell any two matrices apart that have the same product with
its labels; the same test finds nothing where smudging is on.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.products import expand_label, open_request
from apfed_protocols.products.ring import LARGEST_ERROR, Digits, inverse, row_limit, transform
from tests.contracts.product_parties import ProductParties, agreement

Integers = NDArray[np.object_]
Floats = NDArray[np.float64]

# Two labels of the same class: moving weight from one to the other changes no product.
LABELS = np.array([[1, 0], [1, 0]])
PEOPLE = 4096  # two ciphertexts


class CuriousActive:
    """Reads the noise of ciphertexts before they are rounded, with the key of an honest active."""

    def __init__(self, played: ProductParties) -> None:
        self.played, self.ring = played, played.sum.ring
        secret = vars(played.receiver)["_secret"]
        self.secret_H = secret
        self.request = played.receiver.request()
        self.errors = (
            [self._error(place) for place in range(len(LABELS))]
            if played.sum.headroom.folds == 1
            else []
        )

    def _error(self, place: int) -> Floats:
        """e_j, from b_j + a_j s."""
        mark = self.played.sum.frames().fingerprint
        seed, _, *blobs = open_request(self.played.sum, mark, self.request, 4)
        numbers = self._times_secret(expand_label(self.ring, seed, place))
        numbers += self.ring.parse(blobs[place], sender="itself")
        step = self.ring.bits - self.played.sum.headroom.plain_bits
        self.ring.add_at(numbers[:, :2], step, -LABELS[place])
        return self._centred(numbers).astype(np.float64)

    def noise(self, rows: Floats) -> Integers:
        """Of the coefficients that are sent, for integers `rows` of one passive: (C, U, K)."""
        role = self.played.contributors["passive_1"]
        labels = vars(role)["_labels"]
        c0, c1 = role._ciphertexts(rows.astype(np.int64), labels)
        folds = self.played.sum.headroom.folds
        phase = self._times_secret(c1).reshape(*c0.shape[:3], -1)[..., : 2 * folds]
        phase = phase.reshape(*c0.shape[:3], folds, 2).sum(axis=3) + c0
        product = (rows @ LABELS).astype(np.int64).reshape(c0.shape[1:])
        step = self.ring.bits - self.played.sum.headroom.plain_bits
        self.ring.add_at(phase, step, -product)
        return self._centred(phase)

    def expected(self, rows: Floats) -> Floats:
        """sum_j e_j A_j for these rows: what the noise holds without smudging."""
        found = self.played.sum.headroom
        total: Floats = np.zeros((len(rows) // found.rows, found.rows, found.stride))
        for error_N, column in zip(self.errors, rows.T, strict=True):
            values_CH = transform(column.reshape(-1, found.rows))
            values_SH = transform(error_N.reshape(found.rows, found.stride).T)
            total += inverse(values_CH[:, None] * values_SH).swapaxes(1, 2)
        return total[..., :2]

    def _times_secret(self, numbers: Digits) -> Digits:
        return np.rint(inverse(transform(self.ring.centred(numbers)) * self.secret_H)).astype(
            np.int64
        )

    def _centred(self, numbers: Digits) -> Integers:
        total = np.zeros(numbers.shape[1:], dtype=object)
        for digit, offset in zip(self.ring.carried(numbers), self.ring.offsets, strict=True):
            total += digit.astype(object) << offset
        half = 1 << (self.ring.bits - 1)
        centred: Integers = (total + half) % (2 * half) - half
        return centred


def active(
    *, smudged: bool, monkeypatch: pytest.MonkeyPatch, candidates: int | None = None
) -> CuriousActive:
    agreed = agreement(people=PEOPLE, columns=2, labelled=2, candidates=candidates)
    played = ProductParties(agreed, LABELS)
    if not smudged:
        monkeypatch.setattr(played.contributors["passive_1"], "_smudge", lambda c0: None)
    return CuriousActive(played)


def candidates(levels: int) -> tuple[Floats, Floats]:
    """Two matrices of the same product with the labels."""
    weight = np.random.default_rng(0).integers(0, levels, PEOPLE).astype(float)
    first = np.stack([weight, levels - weight], axis=1)
    return first, first[:, ::-1].copy()


def agreement_with(noise: Integers, expected: Floats) -> float:
    """Correlation in deviations of what independent numbers would have."""
    scaled = (noise / 2.0 ** math.frexp(float(np.abs(noise).max()))[1]).astype(float)
    correlation = np.corrcoef(scaled.ravel(), expected.ravel())[0, 1]
    return float(correlation * math.sqrt(expected.size))


def guesses(curious: CuriousActive, trials: int) -> tuple[int, float]:
    """How often it guesses which of two was multiplied, and its mean score of the true one."""
    options = candidates(curious.played.sum.fixed_point.levels)
    templates = [curious.expected(option) for option in options]
    difference = templates[0] - templates[1]
    right, scores = 0, []
    for trial in range(trials):
        truth = trial % 2
        noise = curious.noise(options[truth])
        score = agreement_with(noise, difference)
        right += (score > 0) == (truth == 0)
        scores.append(score if truth == 0 else -score)
    return right, float(np.mean(scores))


def test_without_smudging_the_noise_tells_matrices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    right, score = guesses(active(smudged=False, monkeypatch=monkeypatch), 8)
    assert right == 8
    assert score > 30


def test_with_smudging_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right, score = guesses(active(smudged=True, monkeypatch=monkeypatch), 60)
    assert 12 <= right <= 48  # five deviations
    assert abs(score) < 5 / math.sqrt(60)


def test_the_noise_without_smudging_is_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    curious = active(smudged=False, monkeypatch=monkeypatch)
    found, agreed = curious.played.sum.headroom, curious.played.sum.products
    first, _ = candidates(curious.played.sum.fixed_point.levels)
    noise, expected = curious.noise(first), curious.expected(first)
    rest = (noise - np.rint(expected).astype(np.int64).astype(object)).astype(float)
    # e u and e1 s: two sums of 2N / 3 products of variance 21 / 2 and 1.
    assert 0.8 < rest.std() / math.sqrt(2 * 10.5 * found.degree * 2 / 3) < 1.25
    bound = LARGEST_ERROR * (found.rows * row_limit(agreed) + 2 * found.degree)
    assert np.abs(noise).max() < bound
    assert bound * 2**agreed.security * agreed.people < 2**found.smudging_bits
    for error in curious.errors:
        assert np.abs(error).max() <= LARGEST_ERROR
        assert 0.9 < error.std() / math.sqrt(10.5) < 1.1


def test_two_powers_for_a_class_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    curious = active(smudged=False, monkeypatch=monkeypatch, candidates=2)
    found, agreed = curious.played.sum.headroom, curious.played.sum.products
    first, _ = candidates(curious.played.sum.fixed_point.levels)
    bound = 2 * LARGEST_ERROR * (found.rows * row_limit(agreed) + 2 * found.degree)
    assert bound / 2**16 < np.abs(curious.noise(first)).max() < bound
    assert bound * 2**agreed.security * agreed.people < 2**found.smudging_bits


def test_the_noise_with_smudging_has_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    for factor, accepted in [(1, True), (1.5, False), (2 / 3, False)]:
        curious = active(smudged=True, monkeypatch=monkeypatch)
        first, _ = candidates(curious.played.sum.fixed_point.levels)
        width = 2.0**curious.played.sum.headroom.smudging_bits
        places = np.sort((curious.noise(first) / width).astype(float).ravel()) * factor + 0.5
        distance = np.abs(places - (np.arange(places.size) + 0.5) / places.size).max()
        assert (
            distance * math.sqrt(places.size) < 3.5
        ) == accepted  # Kolmogorov and Smirnov, 1e-10
