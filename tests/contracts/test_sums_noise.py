"""Discrete noise under every sum: added exactly, within the range, never without agreement."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.noise import MAX_DEVIATION, discrete_gaussian, largest_noise
from apfed_protocols.sums import StepBinding
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.homomorphic import solve_bfv, solve_ckks
from tests.contracts.sum_parties import CHOICES, Parties, agreement, make, parties, random_values
from tests.refusals import list_unrefused

# `plain` of the table adds floating-point numbers; its quantised form takes noise.
exact = pytest.mark.parametrize("choice", [name for name in CHOICES if name != "plain"])
NOISE = 5000


def noisy(choice: str, noise: int = NOISE, passives: int = 3, bits: int = 16) -> Parties:
    return Parties(make(choice, agreement(passives, noise=noise, bits=bits)))


def open_noisy_sum(
    played: Parties, contributions: dict[str, bytes], bound: StepBinding, shape: tuple[int, int]
) -> NDArray[Any]:
    return played.receiver.decode(played.combine(contributions, bound.digest), shape, bound)


@exact
@pytest.mark.parametrize("passives", [2, 3])
def test_the_sum_is_that_of_values_and_noise(passives: int, choice: str) -> None:
    played = noisy(choice, passives=passives)
    fixed_point = FixedPoint.from_agreement(played.sum.agreement)
    bound = played.next()
    values = random_values(passives, (40, 5))
    noise = [
        discrete_gaussian(bytes(32), bytes([k]), deviation=NOISE, shape=(40, 5))
        for k in range(passives)
    ]
    contributions = {
        name: played.contributors[name].contribute(value, bound, drawn)
        for name, value, drawn in zip(played.names, values, noise, strict=True)
    }
    total = open_noisy_sum(played, contributions, bound, (40, 5))
    quiet = replace(fixed_point, noise=0)
    integers = np.sum([quiet.quantise_rows(value) for value in values] + noise, axis=0)
    assert np.array_equal(total, fixed_point.dequantise_sum(integers))


@exact
def test_how_noise_lies_in_memory_does_not_matter(choice: str) -> None:
    values = np.full((6, 4), 0.01)
    drawn = discrete_gaussian(bytes(32), deviation=NOISE, shape=(6, 4))
    sums = []
    for laid in (drawn, np.asfortranarray(drawn), np.repeat(drawn, 2, axis=0)[::2]):
        played = noisy(choice)
        bound = played.next()
        contributions = {
            name: role.contribute(np.asfortranarray(values), bound, laid)
            for name, role in played.contributors.items()
        }
        sums.append(open_noisy_sum(played, contributions, bound, (6, 4)))
    assert np.array_equal(sums[0], sums[1])
    assert np.array_equal(sums[0], sums[2])


@exact
def test_the_largest_values_and_noise_do_not_leave_the_range(choice: str) -> None:
    played = noisy(choice)
    bound = played.next()
    most = largest_noise(NOISE)
    contributions = {
        name: played.contributors[name].contribute(
            np.full((6, 1), 1e9), bound, np.full((6, 1), most)
        )
        for name in played.names
    }
    fixed_point = FixedPoint.from_agreement(played.sum.agreement)
    assert fixed_point.max_sum == 3 * (fixed_point.max_level + most)
    total = open_noisy_sum(played, contributions, bound, (6, 1))
    assert np.array_equal(total, fixed_point.dequantise_sum(np.full((6, 1), fixed_point.max_sum)))


@exact
def test_noise_that_was_not_agreed_or_does_not_fit_is_refused(choice: str) -> None:
    values = np.zeros((2, 3))
    none = np.zeros((2, 3), dtype=np.int64)
    without = parties(choice)
    agreed = noisy(choice)
    with pytest.raises(LocalProtocolError, match=r"noise of 0 steps .* but some was given"):
        without.contributors["passive_1"].contribute(values, without.next(), none)
    cases: tuple[tuple[Any, str], ...] = (
        (none.astype(np.int32), "got int32"),
        (none.astype(np.float64), "got float64"),
        (none.T, "of shape"),
        (none[:1], "of shape"),
        (none.tolist(), "got list"),
        (0, "got int"),
        (none + largest_noise(NOISE) + 1, "lies beyond"),
        (none - largest_noise(NOISE) - 1, "lies beyond"),
    )
    contribute = agreed.contributors["passive_1"].contribute
    wrong = [(said, values, agreed.next(), given) for given, said in cases]
    assert list_unrefused(LocalProtocolError, contribute, wrong) == []
    drawn = agreed.add([values] * 3), agreed.add([values] * 3)  # where none is given
    assert all(total.any() for total in drawn)
    assert not np.array_equal(*drawn)


def test_the_plain_sum_of_floating_point_takes_no_noise() -> None:
    with pytest.raises(LocalProtocolError, match="quantise=True"):
        make("plain", agreement(noise=NOISE))
    played = parties("plain")
    with pytest.raises(LocalProtocolError, match="no noise was agreed"):
        played.contributors["passive_1"].contribute(
            np.zeros((1, 1)), played.next(), np.zeros((1, 1), dtype=np.int64)
        )


@pytest.mark.parametrize("bits", [2, 16, 24])
@pytest.mark.parametrize("passives", [1, 2, 3, 24, 1024])
@pytest.mark.parametrize("noise", [0, 1, 1000, MAX_DEVIATION])
def test_a_field_holds_any_sum(bits: int, passives: int, noise: int) -> None:
    fixed_point = FixedPoint(clip_norm=1.0, bits=bits, contributor_count=passives, noise=noise)
    assert fixed_point.max_sum < 2 ** (fixed_point.field_bits - 1)
    assert fixed_point.field_bits < 64, "CrypTen's ring holds it"
    if not noise:
        assert fixed_point.field_bits == bits + (passives - 1).bit_length()


@pytest.mark.parametrize("solve", [solve_ckks, solve_bfv])
def test_headroom_counts_the_tail(solve: Any) -> None:
    quiet = FixedPoint(clip_norm=1.0, bits=16, contributor_count=3)
    loud = replace(quiet, noise=100 * quiet.max_level)
    assert solve(quiet).packing.fields_per_slot == 2
    packing = solve(loud).packing
    assert packing.fields_per_slot == 1
    assert loud.max_sum < 2 ** (packing.field_bits - 1)


def test_noise_beyond_the_ring_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="the ring has 32"):
        make("plain + pairwise masks", agreement(24, bits=24, noise=MAX_DEVIATION))


def test_fewer_bits_keep_the_noise_in_units_of_the_clip() -> None:
    fine = FixedPoint(clip_norm=1.0, bits=16, contributor_count=3, noise=40_000)
    coarse = fine.replace_bits(8)
    assert coarse.bits == 8
    assert (
        40_000 / 32767 <= coarse.noise / coarse.max_level <= 40_000 / 32767 + 1 / coarse.max_level
    )
