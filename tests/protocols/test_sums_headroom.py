"""The solver's limits are real: what it accepts decodes exactly, one step more does not."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.fixed_point import FixedPoint, Packing, fresh_noise
from apfed_protocols.sums.homomorphic import (
    ROUNDING_TOLERANCE,
    BfvCipher,
    CkksCipher,
    Headroom,
    fresh_slot_noise,
    nearest_integers,
    slot_noise,
    solve_bfv,
    solve_ckks,
)


def fixed_point(passives: int, bits: int = 16) -> FixedPoint:
    return FixedPoint(clip_norm=1.0, bits=bits, contributors=passives)


def test_the_published_parameters() -> None:
    found = solve_ckks(fixed_point(16))
    assert (found.bits, found.packing.fields, found.packing.field_bits) == (19, 2, 20)
    assert found.primes == (60, 49)
    assert solve_ckks(fixed_point(8)).primes == (60,)  # the noise fits without the other
    assert solve_ckks(fixed_point(23)).packing.fields == 2
    assert solve_ckks(fixed_point(24)).packing.fields == 1
    fast = solve_bfv(fixed_point(4), poly_degree=4096, primes=(60,))
    assert (fast.bits, fast.packing.fields, fast.packing.slots) == (46, 2, 4096)
    assert solve_bfv(fixed_point(64), poly_degree=4096, primes=(60,)).packing.fields == 2
    assert solve_bfv(fixed_point(65), poly_degree=4096, primes=(60,)).packing.fields == 1


def test_every_sum_that_is_accepted_has_room() -> None:
    for passives, bits in product((1, 2, 7, 64, 1024), (2, 8, 16, 24)):
        wanted = fixed_point(passives, bits)
        one, two = wanted.limit, wanted.limit * (1 + 2**wanted.field_bits)
        found = solve_ckks(wanted)
        peak = two if found.packing.fields == 2 else one
        assert peak * 2**found.bits < 2 ** (found.primes[0] - 1)
        assert found.deviation < ROUNDING_TOLERANCE
        for degree, primes in product((4096, 8192), ((60,), (56, 60))):
            found = solve_bfv(wanted, poly_degree=degree, primes=primes)
            assert 2 * (two if found.packing.fields == 2 else one) < 2**found.bits
            noise = 10 * fresh_noise(degree, passives)
            assert noise * 2 ** (found.bits + 1) < 2 ** found.primes[0]


def test_insecure_and_impossible_parameters_are_refused() -> None:
    no_primes = ((), (0, 0), (-10, 60), (61,), (109,), (60, 12), (36, 36, 37), (60, 49, 0))
    refused: dict[str, list[dict[str, Any]]] = {
        r"less than 128-bit security; degrees .* 8192, 16": [{"primes": (60, 50)}],
        "ring degree": [
            {"poly_degree": degree, "primes": (60,)} for degree in (0, -4096, 1000, 3000, 2**20)
        ],
        "one prime for the data and at most one more": [{"primes": each} for each in no_primes],
    }
    for message, cases in refused.items():
        for changes in cases:
            with pytest.raises(LocalProtocolError, match=message):
                solve_ckks(fixed_point(2), **changes)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(LocalProtocolError, match=r"values of 24 bits do not fit .* 13 bits would"):
        solve_ckks(fixed_point(16, 24), primes=(36, 36))
    with pytest.raises(LocalProtocolError, match="use a larger data prime"):
        solve_ckks(fixed_point(16, 2), primes=(20, 20))


def test_margins_are_exceeded_once_in_2_to_the_40_slots() -> None:
    """The tails of the error's distribution, from the deviation that the solver reports."""
    switched, fresh = solve_ckks(fixed_point(16)), solve_ckks(fixed_point(8))
    assert (len(switched.primes), len(fresh.primes)) == (2, 1)
    laplace = switched.deviation * 2**switched.bits / slot_noise(4096, 16)
    assert math.exp(-math.sqrt(2) * laplace) < 2**-40
    two_products = fresh.deviation * 2**fresh.bits / fresh_slot_noise(4096, 8)
    assert (1 + two_products) * math.exp(-2 * two_products) < 2**-40
    found = solve_bfv(fixed_point(64), poly_degree=4096, primes=(60,))
    deviation = fresh_noise(4096, 64)
    gaussian = 2 ** (found.primes[0] - 1 - found.bits) / deviation
    assert math.erfc(gaussian / math.sqrt(2)) < 2**-40


def cipher_of(found: Headroom) -> CkksCipher:
    return CkksCipher(found.poly_degree, found.primes, found.bits)


def slots_of_sum(found: Headroom, slot: int, addends: int = 1) -> NDArray[np.float64]:
    """Add `addends` ciphertexts that hold `slot` everywhere."""
    cipher = cipher_of(found)
    keys = cipher.key_pair()
    slots = np.full((1, found.packing.slots), slot)
    parts = {str(k): cipher.encrypt(keys, slots) for k in range(addends)}
    return cipher.decrypt(keys, cipher.add(parts, 1), 1, sender="the test")


def test_one_bit_more_scale_wraps_around() -> None:
    """The solver leaves less than one bit of the modulus unused."""
    wanted = fixed_point(7)
    found = solve_ckks(wanted)
    one = wanted.levels * (1 + 2**found.packing.field_bits)
    exact = slots_of_sum(found, one, 7)
    assert np.array_equal(np.rint(exact), np.full(found.packing.slots, 7.0 * one))
    wrapped = slots_of_sum(replace(found, bits=found.bits + 1), one, 7)
    assert np.abs(wrapped - 7 * one).min() > 2**20


def test_the_noise_limit_of_the_scale_is_real() -> None:
    """The solver stays twenty deviations below the tolerance; four bits less leave three."""
    for fewer, exact in [(0, True), (4, False)]:
        found = solve_ckks(fixed_point(16))
        slots = slots_of_sum(replace(found, bits=found.bits - fewer), 1, 16)
        if exact:
            assert (nearest_integers(slots, sender="the test") == 16).all()
            return
        with pytest.raises(RemoteProtocolError, match="does not decrypt to integers"):
            nearest_integers(slots, sender="the test")


@pytest.mark.parametrize(("passives", "model"), [(16, slot_noise), (2, fresh_slot_noise)])
def test_the_noise_model_is_the_measured_one(
    passives: int, model: Callable[[int, int], float]
) -> None:
    found = solve_ckks(fixed_point(passives))
    error = (slots_of_sum(found, 12345) - 12345) * 2.0**found.bits
    more = (slots_of_sum(found, -7) + 7) * 2.0**found.bits
    measured = np.concatenate([error, more]).std() / model(4096, 1)
    assert 0.85 < measured < 1.15
    assert not 0.85 < measured * 3 / 2 < 1.15
    assert not 0.85 < measured * 2 / 3 < 1.15


def coefficients_of_sum(
    plain_bits: int, coefficients: NDArray[np.int64], addends: int
) -> NDArray[np.int64]:
    """Add `addends` ciphertexts of the same coefficients under one prime of 60 bits."""
    cipher = BfvCipher(4096, (60,), plain_bits)
    keys = cipher.key_pair()
    parts = {str(k): cipher.encrypt(keys, coefficients[None]) for k in range(addends)}
    return cipher.decrypt(keys, cipher.add(parts, 1), 1, sender="the test")


def test_the_noise_limit_of_the_plain_modulus_is_real() -> None:
    """The solver stays ten deviations below q / 2t; four bits more leave less than one."""
    for more, exact in [(0, True), (4, False)]:
        found = solve_bfv(fixed_point(64), poly_degree=4096, primes=(60,))
        coefficients = np.random.default_rng(0).integers(-(2**36), 2**36, 4096)
        total = coefficients_of_sum(found.bits + more, coefficients, 64)
        assert np.array_equal(total, 64 * coefficients) == exact


def test_one_bit_more_a_value_wraps_around() -> None:
    """64 passives: two fields of 16-bit values just fit; of 17 bits the solver takes one."""
    for bits, exact in [(16, True), (17, False)]:
        plain_bits = solve_bfv(fixed_point(64), poly_degree=4096, primes=(60,)).bits
        assert plain_bits == 44
        wanted = fixed_point(64, bits)
        solved = solve_bfv(wanted, poly_degree=4096, primes=(60,))
        assert solved.packing.fields == (2 if exact else 1)
        packing = Packing(fields=2, field_bits=wanted.field_bits, slots=4096)
        highest = packing.pack(np.full(8192, wanted.levels, dtype=np.int64))[0]
        total = coefficients_of_sum(plain_bits, highest, 64)
        assert (packing.unpack(total) == 64 * wanted.levels).all() == exact


def test_coefficients_that_do_not_fit_say_what_would() -> None:
    wanted = FixedPoint(clip_norm=1.0, bits=40, contributors=1000)
    with pytest.raises(LocalProtocolError, match=r"do not fit a data prime of .* bits; 32 bits"):
        solve_bfv(wanted, poly_degree=4096, primes=(60,))
    with pytest.raises(LocalProtocolError, match="less than 128-bit security"):
        solve_bfv(wanted, poly_degree=2048, primes=(55,))
    with pytest.raises(LocalProtocolError, match="less than 128-bit security"):
        solve_bfv(wanted, poly_degree=1024, primes=(28,))
