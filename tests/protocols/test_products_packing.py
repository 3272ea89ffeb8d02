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
from apfed_protocols.products import SumOfProducts, encrypt_labels
from tests.contracts.product_parties import ProductParties, agreement

DIGIT = 2  # bits; two passives vote 0 to 2 times
PEOPLE = 2000


def packing_weights(described: SumOfProducts) -> NDArray[np.int64]:
    """(n, 1): label j at digit j from the top, modulo t."""
    plain, levels = described.headroom.plain_bits, described.fixed_point.levels
    inverse = pow(levels, -1, 2**plain)
    places = [plain - DIGIT * (j + 1) for j in range(described.products.labelled)]
    return np.array([[inverse * 2**place % 2**plain] for place in places])


def read(
    labelled: int, noise: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[NDArray[np.int64], NDArray[np.int64], SumOfProducts]:
    """Votes per person and label as they are, and as a packing active reads them."""
    agreed = agreement(people=PEOPLE, columns=1, labelled=labelled, noise=noise)
    described = SumOfProducts(agreed)
    weights = packing_weights(described)
    opened: list[Any] = []
    monkeypatch.setattr(roles, "_checked_bits", lambda *_: weights)
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
        answers[name] = role.answer(0, row, drawn)
    played.receiver.open(0, played.combiner.combine(0, answers))
    plain = described.headroom.plain_bits
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
    votes, found, described = read(labelled, None, monkeypatch)
    assert np.array_equal(found, votes)
    found_bits = described.headroom
    assert found_bits.plain_bits == 18
    assert DIGIT * labelled <= 18 < described.readable_bits


@pytest.mark.parametrize("noise", [100, 3000])
def test_noise_takes_the_lower_digits(noise: int, monkeypatch: pytest.MonkeyPatch) -> None:
    votes, found, described = read(7, noise, monkeypatch)
    right = (votes == found).mean(axis=0)
    usable = int((right > 0.99).sum())
    assert DIGIT * usable <= described.readable_bits
    found_bits, deviation = described.headroom, noise * math.sqrt(2)
    plain = found_bits.plain_bits
    for place in range(7):
        below = plain - DIGIT * (place + 1)
        if 2**below < deviation / 2:
            assert right[place] < 0.9  # as good as the commonest vote, at most
    assert described.readable_bits == pytest.approx(
        found_bits.modulus_bits
        - found_bits.smudging_bits
        - math.log2(deviation * math.sqrt(2 * math.pi * math.e))
    )


class Finer:
    """What encrypts labels at a fraction of a step."""

    def __init__(self, described: SumOfProducts, bits: int) -> None:
        self._described = described
        self.headroom = replace(described.headroom, plain_bits=described.headroom.plain_bits + bits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._described, name)


def test_noise_touches_nothing_below_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, bits = 3000, 8
    agreed = agreement(people=300, columns=3, labelled=12, bits=bits, noise=noise)
    below: list[NDArray[np.int64]] = []
    finer = bits + 1  # two passives' rows of 2^(bits - 1) steps fill half a step then
    monkeypatch.setattr(
        roles, "encrypt_labels",
        lambda described, root, bits_nK: encrypt_labels(Finer(described, finer), root, bits_nK),  # type: ignore[arg-type]
    )  # fmt: skip

    def rest(receiver: Any, phase: NDArray[np.uint64], binding: Any) -> NDArray[np.int64]:
        found = receiver._sum.headroom
        unused, step_bits = np.uint64(64 - found.kept_bits), found.kept_bits - found.plain_bits
        signed = (phase << unused).view(np.int64) >> np.int64(unused)
        steps = (signed + (1 << (step_bits - 1))) >> step_bits
        below.append(signed - (steps << step_bits))
        return np.zeros_like(signed)

    monkeypatch.setattr(roles.ProductReceiver, "_step_of", rest)
    played = ProductParties(agreed)
    rng = np.random.default_rng(1)
    rows = {name: rng.dirichlet(np.full(12, 0.2), 300) for name in agreed.contributors}
    answers = {
        name: role.answer(
            0, rows[name], discrete_gaussian(bytes([key] * 32), deviation=noise, shape=(300, 3))
        )
        for key, (name, role) in enumerate(played.contributors.items())
    }
    played.receiver.open(0, played.combiner.combine(0, answers))
    votes = sum(rows.values()) @ played.labels
    said = votes + rng.normal(size=votes.shape) * math.sqrt(2) * noise / 2 ** (bits - 1)
    assert (said.argmax(axis=1) == votes.argmax(axis=1)).mean() < 0.5
    read_below = np.concatenate(below)[:300]
    assert (read_below.argmax(axis=1) == votes.argmax(axis=1)).mean() > 0.9


def test_one_label_alone_is_its_column() -> None:
    """Within the protocol: labels of one row read that column, summed over the passives."""
    agreed = agreement(people=50, columns=1, labelled=3)
    played = ProductParties(agreed, np.array([[0], [1], [0]]))
    rng = np.random.default_rng(0)
    rows = {name: rng.dirichlet(np.ones(3), 50) for name in agreed.contributors}
    levels = played.sum.fixed_point.levels
    expected = sum(np.rint(A[:, 1] * levels) for A in rows.values())
    assert np.array_equal(np.rint(played.opened(rows)[:, 0]), expected)
