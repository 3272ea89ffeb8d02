"""What an active reads that encrypts other numbers than bits: as much as is said, and no more.

Rows of hard votes are coarse: 0 or 1, that is 0 or L steps, and L is odd, so that multiples of
1 / L modulo t put the votes of several labels side by side in one number. That is the attack; noise
drowns the lower digits, and the bound `readable_bits` is above what is read in every case.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols import products as roles
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.products import SumOfProducts, encrypt_labels, expand_label
from apfed_protocols.products.ring import (
    LARGEST_ERROR,
    Digits,
    compute_row_limit,
    invert_transform,
    transform_polynomials,
)
from tests.contracts.product_parties import ProductParties, agreement

DIGIT = 2  # bits; two passives vote 0 to 2 times
PEOPLE = 2000


def packing_weights(secure_sum: SumOfProducts) -> NDArray[np.int64]:
    """(n, 1): label j at digit j from the top, modulo t."""
    plain = secure_sum.parameters.plain_bits
    levels = secure_sum.fixed_point.max_level
    inverse = pow(levels, -1, 2**plain)
    places = [plain - DIGIT * (j + 1) for j in range(secure_sum.product_agreement.labelled)]
    return np.array([[inverse * 2**place % 2**plain] for place in places])


def open_packed_votes(
    labelled: int, noise: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[NDArray[np.int64], NDArray[np.int64], SumOfProducts]:
    """Return votes per person and label as they are, and as a packing active reads them."""
    agreed = agreement(people=PEOPLE, columns=1, labelled=labelled, noise=noise)
    described = SumOfProducts(agreed)
    weights = packing_weights(described)
    opened: list[Any] = []
    monkeypatch.setattr(roles, "_check_bits", lambda *_: weights)
    monkeypatch.setattr(
        roles.ProductReceiver, "_require_range", lambda self, found, binding: opened.append(found)
    )
    played = ProductParties(agreed, weights)
    # Each person is close to one label at most, at either passive.
    rng = np.random.default_rng(0)
    near = rng.integers(labelled + 1, size=(2, PEOPLE))
    rows = [np.eye(labelled + 1)[chosen][:, :labelled] for chosen in near]
    answers = {}
    for key, ((name, role), row) in enumerate(zip(played.contributors.items(), rows, strict=True)):
        drawn = (
            discrete_gaussian(bytes([key] * 32), deviation=noise, shape=(PEOPLE, 1))
            if noise
            else None
        )
        answers[name] = role.answer_block(0, row, drawn)
    played.receiver.open_block(0, played.aggregator.combine_block(0, answers))
    plain = described.parameters.plain_bits
    # Half of the lowest digit that is used, so that noise of either sign rounds.
    half = 2 ** (plain - DIGIT * labelled - 1) if plain > DIGIT * labelled else 0
    words = (opened[0][:, 0] + half) % 2**plain
    digits = [words >> (plain - DIGIT * (j + 1)) & (2**DIGIT - 1) for j in range(labelled)]
    return np.sum(rows, axis=0).astype(np.int64), np.stack(digits, axis=1), described


@pytest.mark.parametrize("labelled", [1, 8, 9])
def test_one_number_tells_the_votes_of_many_labels(
    labelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine labels fill t; whatever a tenth is multiplied with lands on their digits."""
    votes, found, described = open_packed_votes(labelled, None, monkeypatch)
    assert np.array_equal(found, votes)
    assert described.parameters.plain_bits == 18
    assert DIGIT * labelled <= 18 < described.readable_bits


@pytest.mark.parametrize("noise", [100, 3000])
def test_noise_takes_the_lower_digits(noise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    votes, found, described = open_packed_votes(7, noise, monkeypatch)
    right = (votes == found).mean(axis=0)
    usable = int((right > 0.99).sum())
    assert DIGIT * usable <= described.readable_bits
    found_bits = described.parameters
    deviation = noise * math.sqrt(2)
    plain = found_bits.plain_bits
    hidden = [place for place in range(7) if 2 ** (plain - DIGIT * (place + 1)) < deviation / 2]
    assert (right[hidden] < 0.9).all()  # as good as the commonest vote, at most
    assert described.readable_bits == pytest.approx(
        found_bits.modulus_bits
        - found_bits.smudging_bits
        - math.log2(deviation * math.sqrt(2 * math.pi * math.e))
    )


class Finer:
    """What encrypts labels at a fraction of a step."""

    def __init__(self, secure_sum: SumOfProducts, bits: int) -> None:
        self._described = secure_sum
        self.parameters = replace(
            secure_sum.parameters, plain_bits=secure_sum.parameters.plain_bits + bits
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._described, name)


def test_noise_touches_nothing_below_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = 3000
    bits = 8
    agreed = agreement(people=300, columns=3, labelled=12, bits=bits, noise=noise)
    below: list[NDArray[np.int64]] = []
    finer = bits + 1  # two passives' rows of 2^(bits - 1) steps fill half a step then
    monkeypatch.setattr(
        roles,
        "encrypt_labels",
        lambda described, root, bits_nK: encrypt_labels(Finer(described, finer), root, bits_nK),  # type: ignore[arg-type]
    )

    def rest(receiver: Any, phase: NDArray[np.uint64], binding: Any) -> NDArray[np.int64]:
        found = receiver._sum.parameters
        unused = np.uint64(64 - found.answer_modulus_bits)
        step_bits = found.answer_modulus_bits - found.plain_bits
        signed = (phase << unused).view(np.int64) >> np.int64(unused)
        steps = (signed + (1 << (step_bits - 1))) >> step_bits
        below.append(signed - (steps << step_bits))
        return np.zeros_like(signed)

    monkeypatch.setattr(roles.ProductReceiver, "_round_to_steps", rest)
    played = ProductParties(agreed)
    rng = np.random.default_rng(1)
    rows = {name: rng.dirichlet(np.full(12, 0.2), 300) for name in agreed.contributors}
    answers = {
        name: role.answer_block(
            0, rows[name], discrete_gaussian(bytes([key] * 32), deviation=noise, shape=(300, 3))
        )
        for key, (name, role) in enumerate(played.contributors.items())
    }
    played.receiver.open_block(0, played.aggregator.combine_block(0, answers))
    votes = sum(rows.values()) @ played.labels
    said = votes + rng.normal(size=votes.shape) * math.sqrt(2) * noise / 2 ** (bits - 1)
    assert (said.argmax(axis=1) == votes.argmax(axis=1)).mean() < 0.5
    read_below = np.concatenate(below)[:300]
    assert (read_below.argmax(axis=1) == votes.argmax(axis=1)).mean() > 0.9


# What an active with its key reads in the noise: all without smudging, nothing with it.

Integers = NDArray[np.object_]
Floats = NDArray[np.float64]

# Two labels of the same class: moving weight from one to the other changes no product.
LABELS = np.array([[1, 0], [1, 0]])
ROWS = 4096  # two ciphertexts


class CuriousActive:
    """Reads the noise of ciphertexts before they are rounded, with the key of an honest active."""

    def __init__(self, played: ProductParties) -> None:
        self.played = played
        self.ring = played.sum.ring
        secret = vars(played.receiver)["_secret"]
        self.secret_H = secret
        self.request = played.receiver.make_request()
        self.errors = (
            [self._error(place) for place in range(len(LABELS))]
            if played.sum.parameters.folds == 1
            else []
        )

    def _error(self, position: int) -> Floats:
        """e_j, from b_j + a_j s."""
        seed, _, *blobs = self.played.sum.parse_request(self.request, 4)
        numbers = self._multiply_by_secret(expand_label(self.ring, seed, position))
        numbers += self.ring.parse_digits(blobs[position], sender="itself")
        step = self.ring.bits - self.played.sum.parameters.plain_bits
        self.ring.add_shifted(numbers[:, :2], step, -LABELS[position])
        return self.centre_digits(numbers).astype(np.float64)

    def noise(self, rows: Floats) -> Integers:
        """Return the noise of what is sent for integers `rows` of one passive: (C, U, K)."""
        role = self.played.contributors["passive_1"]
        labels = vars(role)["_label_values"]
        c0, c1 = role._compute_ciphertexts(rows.astype(np.int64), labels)
        folds = self.played.sum.parameters.folds
        phase = self._multiply_by_secret(c1).reshape(*c0.shape[:3], -1)[..., : 2 * folds]
        phase = phase.reshape(*c0.shape[:3], folds, 2).sum(axis=3) + c0
        product = (rows @ LABELS).astype(np.int64).reshape(c0.shape[1:])
        step = self.ring.bits - self.played.sum.parameters.plain_bits
        self.ring.add_shifted(phase, step, -product)
        return self.centre_digits(phase)

    def compute_expected(self, rows: Floats) -> Floats:
        """Compute sum_j e_j A_j for these rows: what the noise holds without smudging."""
        found = self.played.sum.parameters
        total: Floats = np.zeros(
            (
                len(rows) // found.people_per_ciphertext,
                found.people_per_ciphertext,
                found.powers_per_person,
            )
        )
        for error_N, column in zip(self.errors, rows.T, strict=True):
            values_CH = transform_polynomials(column.reshape(-1, found.people_per_ciphertext))
            values_SH = transform_polynomials(
                error_N.reshape(found.people_per_ciphertext, found.powers_per_person).T
            )
            total += invert_transform(values_CH[:, None] * values_SH).swapaxes(1, 2)
        return total[..., :2]

    def _multiply_by_secret(self, numbers: Digits) -> Digits:
        return np.rint(
            invert_transform(
                transform_polynomials(self.ring.centre_digits(numbers)) * self.secret_H
            )
        ).astype(np.int64)

    def centre_digits(self, numbers: Digits) -> Integers:
        total = np.zeros(numbers.shape[1:], dtype=object)
        for digit, offset in zip(self.ring.carry_digits(numbers), self.ring.offsets, strict=True):
            total += digit.astype(object) << offset
        half = 1 << (self.ring.bits - 1)
        centred: Integers = (total + half) % (2 * half) - half
        return centred


def active(
    *, smudged: bool, monkeypatch: pytest.MonkeyPatch, candidates: int | None = None
) -> CuriousActive:
    agreed = agreement(people=ROWS, columns=2, labelled=2, candidates=candidates)
    played = ProductParties(agreed, LABELS)
    if not smudged:
        monkeypatch.setattr(played.contributors["passive_1"], "_smudge", lambda c0: None)
    return CuriousActive(played)


def candidates(levels: int) -> tuple[Floats, Floats]:
    """Two matrices of the same product with the labels."""
    weight = np.random.default_rng(0).integers(0, levels, ROWS).astype(float)
    first = np.stack([weight, levels - weight], axis=1)
    return first, first[:, ::-1].copy()


def correlation_of(noise: Integers, expected: Floats) -> float:
    """Correlation in deviations of what independent numbers would have."""
    scaled = (noise / 2.0 ** math.frexp(float(np.abs(noise).max()))[1]).astype(float)
    correlation = np.corrcoef(scaled.ravel(), expected.ravel())[0, 1]
    return float(correlation * math.sqrt(expected.size))


def guesses(curious: CuriousActive, trials: int) -> tuple[int, float]:
    """Return how often it guesses which of two was multiplied, and the true one's mean score."""
    options = candidates(curious.played.sum.fixed_point.max_level)
    templates = [curious.compute_expected(option) for option in options]
    difference = templates[0] - templates[1]
    right = 0
    scores = []
    for trial in range(trials):
        truth = trial % 2
        noise = curious.noise(options[truth])
        score = correlation_of(noise, difference)
        right += (score > 0) == (truth == 0)
        scores.append(score if truth == 0 else -score)
    return right, float(np.mean(scores))


def test_without_smudging_the_noise_tells_matrices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    right, score = guesses(active(smudged=False, monkeypatch=monkeypatch), 32)
    assert right == 32
    assert score > 15  # deviations; about 30 to 40, by the keys that are drawn


def test_with_smudging_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right, score = guesses(active(smudged=True, monkeypatch=monkeypatch), 60)
    assert 12 <= right <= 48  # five deviations
    assert abs(score) < 5 / math.sqrt(60)


def test_the_noise_without_smudging_is_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    curious = active(smudged=False, monkeypatch=monkeypatch)
    found = curious.played.sum.parameters
    agreed = curious.played.sum.product_agreement
    first, _ = candidates(curious.played.sum.fixed_point.max_level)
    noise = curious.noise(first)
    expected = curious.compute_expected(first)
    rest = (noise - np.rint(expected).astype(np.int64).astype(object)).astype(float)
    # e u and e1 s: two sums of 2N / 3 products of variance 21 / 2 and 1.
    assert 0.8 < rest.std() / math.sqrt(2 * 10.5 * found.degree * 2 / 3) < 1.25
    bound = LARGEST_ERROR * (
        found.people_per_ciphertext * compute_row_limit(agreed) + 2 * found.degree
    )
    assert np.abs(noise).max() < bound
    assert bound * 2**agreed.security * agreed.people < 2**found.smudging_bits
    assert max(np.abs(error).max() for error in curious.errors) <= LARGEST_ERROR
    scales = np.array([error.std() / math.sqrt(10.5) for error in curious.errors])
    assert 0.9 < scales.min() <= scales.max() < 1.1


def test_two_powers_for_a_class_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    curious = active(smudged=False, monkeypatch=monkeypatch, candidates=2)
    found = curious.played.sum.parameters
    agreed = curious.played.sum.product_agreement
    first, _ = candidates(curious.played.sum.fixed_point.max_level)
    bound = (
        2
        * LARGEST_ERROR
        * (found.people_per_ciphertext * compute_row_limit(agreed) + 2 * found.degree)
    )
    assert bound / 2**16 < np.abs(curious.noise(first)).max() < bound
    assert bound * 2**agreed.security * agreed.people < 2**found.smudging_bits


@pytest.mark.parametrize(("factor", "accepted"), [(1, True), (1.5, False), (2 / 3, False)])
def test_the_noise_with_smudging_has_its_scale(
    factor: float, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    curious = active(smudged=True, monkeypatch=monkeypatch)
    first, _ = candidates(curious.played.sum.fixed_point.max_level)
    width = 2.0**curious.played.sum.parameters.smudging_bits
    places = np.sort((curious.noise(first) / width).astype(float).ravel()) * factor + 0.5
    distance = np.abs(places - (np.arange(places.size) + 0.5) / places.size).max()
    assert (distance * math.sqrt(places.size) < 3.5) == accepted  # Kolmogorov and Smirnov, 1e-10
