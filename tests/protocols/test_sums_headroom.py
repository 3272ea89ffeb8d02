"""The solver's limits are real: what it accepts decodes exactly, one step more does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols.errors import LocalProtocolError
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.headroom import (
    ROUNDING_TOLERANCE,
    CkksHeadroom,
    fresh_noise,
    slot_noise,
    solve_ckks,
)
from protocols.sums.seal_scheme import Ckks, ComplexCkks, SealScheme

USUAL: dict[str, Any] = {}
FAST: dict[str, Any] = {"primes": (60,), "complex_slots": True}
both = pytest.mark.parametrize("options", [USUAL, FAST])


def fixed_point(passives: int, bits: int = 16) -> FixedPoint:
    return FixedPoint(clip_norm=1.0, bits=bits, contributors=passives)


def test_the_published_parameters() -> None:
    found = solve_ckks(fixed_point(16))
    assert (found.scale_bits, found.packing.fields, found.packing.field_bits) == (19, 2, 20)
    assert found.primes == (60, 49)
    assert solve_ckks(fixed_point(8)).primes == (60,)  # the noise fits without the other
    assert solve_ckks(fixed_point(23)).packing.fields == 2
    assert solve_ckks(fixed_point(24)).packing.fields == 1
    fast = solve_ckks(fixed_point(8), **FAST)
    assert (fast.scale_bits, fast.packing.fields, fast.packing.slots) == (21, 2, 4096)
    assert solve_ckks(fixed_point(9), **FAST).packing.fields == 1


@pytest.mark.parametrize("bits", [2, 8, 16, 24])
@pytest.mark.parametrize("passives", [1, 2, 7, 64, 1024])
@both
def test_everything_accepted_has_room(bits: int, passives: int, options: dict[str, Any]) -> None:
    wanted = fixed_point(passives, bits)
    found = solve_ckks(wanted, **options)
    width = found.packing.field_bits
    peak = wanted.limit * (1 + (2**width if found.packing.fields == 2 else 0))
    assert peak * 2**found.scale_bits < 2 ** (found.primes[0] - 1)
    assert found.deviation < ROUNDING_TOLERANCE


def test_insecure_parameters_are_refused() -> None:
    with pytest.raises(
        LocalProtocolError, match=r"less than 128-bit security; degrees .* 8192, 16"
    ):
        solve_ckks(fixed_point(2), poly_degree=4096, primes=(60, 50))
    with pytest.raises(LocalProtocolError, match="ring degree 1000 "):
        solve_ckks(fixed_point(2), poly_degree=1000)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(LocalProtocolError, match=r"values of 24 bits do not fit .* 13 bits would"):
        solve_ckks(fixed_point(16, 24), primes=(36, 36))
    with pytest.raises(LocalProtocolError, match="use a larger data prime"):
        solve_ckks(fixed_point(16, 2), primes=(20, 20))


def scheme_of(found: CkksHeadroom) -> SealScheme:
    flavour = ComplexCkks if found.packing.slots == found.poly_degree else Ckks
    return SealScheme(flavour(found.poly_degree, found.primes, found.scale_bits))


def slots_of_sum(found: CkksHeadroom, slot: int, addends: int = 1) -> NDArray[np.float64]:
    """Add `addends` ciphertexts that hold `slot` everywhere."""
    scheme = scheme_of(found)
    keys = scheme.key_pair()
    slots = np.full((1, found.packing.slots), slot)
    parts = {str(k): scheme.encrypt(keys, slots) for k in range(addends)}
    return scheme.decrypt(keys, scheme.add(keys, parts, 1), 1, sender="the test")


@both
def test_two_bits_more_scale_wrap_around(options: dict[str, Any]) -> None:
    """The solver leaves less than two bits of the modulus unused."""
    wanted = fixed_point(8)
    found = solve_ckks(wanted, **options)
    one = wanted.levels * (1 + 2**found.packing.field_bits)
    exact = slots_of_sum(found, one, 8)
    assert np.array_equal(np.rint(exact), np.full(found.packing.slots, 8.0 * one))
    wrapped = slots_of_sum(replace(found, scale_bits=found.scale_bits + 2), one, 8)
    assert np.abs(wrapped - 8 * one).min() > 2**20


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (2 / 3, False), (3 / 2, False)])
@pytest.mark.parametrize(
    ("passives", "options", "model"),
    [(16, USUAL, slot_noise), (2, USUAL, fresh_noise), (2, FAST, fresh_noise)],
)
def test_the_noise_model_is_the_measured_one(
    factor: float,
    accepted: bool,
    passives: int,
    options: dict[str, Any],
    model: Callable[[int, int], float],
) -> None:
    found = solve_ckks(fixed_point(passives), **options)
    error = (slots_of_sum(found, 12345) - 12345) * 2.0**found.scale_bits
    more = (slots_of_sum(found, -7) + 7) * 2.0**found.scale_bits
    measured = np.concatenate([error, more]).std() / (factor * model(4096, 1))
    assert (0.85 < measured < 1.15) == accepted
