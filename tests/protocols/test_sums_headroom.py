"""The numbers of sums: what is accepted decodes exactly, and one step more does not."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.fixed_point import SECURE_MODULUS_BITS, FixedPoint, Packing, clip_rows
from apfed_protocols.sums.homomorphic import (
    ROUNDING_TOLERANCE,
    BfvCipher,
    CkksCipher,
    SchemeParameters,
    compute_fresh_noise,
    compute_fresh_slot_noise,
    compute_slot_noise,
    draw_centred_binomial,
    draw_ternary,
    round_to_integers,
    solve_bfv,
    solve_ckks,
)
from apfed_protocols.sums.seal_cipher import (
    DEGREE,
    SMALL_DEGREE,
    SealCipher,
    SealContext,
    open_scratch_file,
)


def make_fixed_point(passives: int, bits: int = 16) -> FixedPoint:
    return FixedPoint(clip_norm=1.0, bits=bits, contributor_count=passives)


def test_the_published_parameters() -> None:
    found = solve_ckks(make_fixed_point(16))
    assert (
        found.scale_or_modulus_bits,
        found.packing.fields_per_slot,
        found.packing.field_bits,
    ) == (19, 2, 20)
    assert found.prime_bits == (60, 49)
    assert solve_ckks(make_fixed_point(8)).prime_bits == (60,)  # the noise fits without the other
    assert solve_ckks(make_fixed_point(23)).packing.fields_per_slot == 2
    assert solve_ckks(make_fixed_point(24)).packing.fields_per_slot == 1
    assert solve_bfv(make_fixed_point(65)).packing.fields_per_slot == 1


@pytest.mark.parametrize(
    ("passives", "degree", "prime", "bits"),
    [(2, 2048, 54, 41), (16, 2048, 54, 40), (17, 4096, 60, 45), (64, 4096, 60, 44)],
)
def test_the_published_parameters_of_bfv(passives: int, degree: int, prime: int, bits: int) -> None:
    fast = solve_bfv(make_fixed_point(passives))
    assert (fast.prime_bits, fast.scale_or_modulus_bits, fast.degree) == ((prime,), bits, degree)
    assert (fast.packing.fields_per_slot, fast.packing.slots_per_vector) == (2, degree)


@pytest.mark.parametrize(("passives", "maximum"), [(2, 19), (3, 18), (10, 16)])
def test_the_smaller_ring_of_bfv_carries_so_many_bits_and_no_more(
    passives: int, maximum: int
) -> None:
    assert solve_bfv(make_fixed_point(passives, maximum)).degree == SMALL_DEGREE
    assert solve_bfv(make_fixed_point(passives, maximum + 1)).degree == DEGREE


@pytest.mark.parametrize(("degree", "maximum"), [(SMALL_DEGREE, 54), (DEGREE, 109)])
def test_seal_takes_no_larger_modulus_in_a_ring(degree: int, maximum: int) -> None:
    """128-bit security by the table of HomomorphicEncryption.org, which SEAL enforces."""
    assert SECURE_MODULUS_BITS[degree] == maximum
    primes = (54,) if degree == SMALL_DEGREE else (60, 49)
    assert BfvCipher(primes, 20, degree).degree == degree
    with pytest.raises(LocalProtocolError, match=f"SEAL refuses N = {degree}"):
        BfvCipher((*primes[:-1], primes[-1] + 1), 20, degree)


@pytest.mark.parametrize(("more", "exact"), [(0, True), (4, False)])
@pytest.mark.parametrize("passives", [2, 10])
def test_the_noise_limit_of_the_smaller_ring_is_real(passives: int, more: int, exact: bool) -> None:
    """The largest numbers decrypt in it; of a plain modulus of four bits more they do not."""
    found = solve_bfv(make_fixed_point(passives))
    highest = np.full((1, SMALL_DEGREE), 2 ** (found.scale_or_modulus_bits - 1) // passives - 1)
    cipher = BfvCipher(found.prime_bits, found.scale_or_modulus_bits + more, found.degree)
    keys = cipher.make_key_pair()
    parts = {str(k): cipher.encrypt(keys, highest) for k in range(passives)}
    total = cipher.decrypt(keys, cipher.add_ciphertexts(parts, 1), 1, sender="the test")
    assert np.array_equal(total, passives * highest[0]) == exact


@pytest.mark.parametrize("values", [1, 5, 4080, 4096, 4097])
def test_only_coefficients_that_hold_numbers_are_sent(values: int) -> None:
    found = solve_bfv(make_fixed_point(2))
    cipher = BfvCipher(found.prime_bits, found.scale_or_modulus_bits, found.degree)
    keys = cipher.make_key_pair()
    numbers = np.arange(values) - 7
    slots_VS = found.packing.pack_fields(numbers)
    last = found.packing.count_slots_sent_in_last(values)
    filled = -(-values // 2) - (len(slots_VS) - 1) * SMALL_DEGREE
    assert last == min(SMALL_DEGREE, filled + 8)
    parts = {name: cipher.encrypt(keys, slots_VS, last) for name in "ab"}
    whole = 2 * SMALL_DEGREE * 7
    sizes = [whole] * (len(slots_VS) - 1) + [(SMALL_DEGREE + last) * 7]
    assert [len(blob) for blob in parts["a"]] == sizes
    added = cipher.add_ciphertexts(parts, len(slots_VS), last)
    assert [len(blob) for blob in added] == sizes
    total = cipher.decrypt(keys, added, len(slots_VS), sender="the test", last_slots=last)
    fields = found.packing.unpack_fields(total)
    assert np.array_equal(fields[:values], 2 * numbers)
    assert not fields[values:].any()
    with pytest.raises(RemoteProtocolError, match="bytes, expected"):
        cipher.decrypt(keys, added, len(slots_VS), sender="the test", last_slots=last - 1)


@pytest.mark.parametrize("passives", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("bits", [2, 8, 16, 24])
def test_every_sum_that_is_accepted_has_room(passives: int, bits: int) -> None:
    wanted = make_fixed_point(passives, bits)
    one = wanted.max_sum
    two = wanted.max_sum * (1 + 2**wanted.field_bits)
    found = solve_ckks(wanted)
    peak = two if found.packing.fields_per_slot == 2 else one
    assert peak * 2**found.scale_or_modulus_bits < 2 ** (found.prime_bits[0] - 1)
    assert found.max_slot_error < ROUNDING_TOLERANCE
    found = solve_bfv(wanted)
    assert 2 * (two if found.packing.fields_per_slot == 2 else one) < 2**found.scale_or_modulus_bits
    noise = 10 * compute_fresh_noise(passives, found.degree)
    assert noise * 2 ** (found.scale_or_modulus_bits + 1) < 2 ** found.prime_bits[0]
    assert sum(found.prime_bits) <= SECURE_MODULUS_BITS[found.degree]


def test_margins_are_exceeded_once_in_2_to_the_40_slots() -> None:
    """The tails of the error's distribution, from the deviation that the solver reports."""
    switched = solve_ckks(make_fixed_point(16))
    fresh = solve_ckks(make_fixed_point(8))
    assert (len(switched.prime_bits), len(fresh.prime_bits)) == (2, 1)
    laplace = switched.max_slot_error * 2**switched.scale_or_modulus_bits / compute_slot_noise(16)
    assert math.exp(-math.sqrt(2) * laplace) < 2**-40
    two_products = (
        fresh.max_slot_error * 2**fresh.scale_or_modulus_bits / compute_fresh_slot_noise(8)
    )
    assert (1 + two_products) * math.exp(-2 * two_products) < 2**-40
    found = solve_bfv(make_fixed_point(64))
    deviation = compute_fresh_noise(64)
    gaussian = 2 ** (found.prime_bits[0] - 1 - found.scale_or_modulus_bits) / deviation
    assert math.erfc(gaussian / math.sqrt(2)) < 2**-40


def slots_of_sum(found: SchemeParameters, slot: int, addends: int = 1) -> NDArray[np.float64]:
    """Add `addends` ciphertexts that hold `slot` everywhere."""
    cipher = CkksCipher(found.prime_bits, found.scale_or_modulus_bits)
    keys = cipher.make_key_pair()
    slots = np.full((1, found.packing.slots_per_vector), slot)
    parts = {str(k): cipher.encrypt(keys, slots) for k in range(addends)}
    return cipher.decrypt(keys, cipher.add_ciphertexts(parts, 1), 1, sender="the test")


def test_one_bit_more_scale_wraps_around() -> None:
    """The solver leaves less than one bit of the modulus unused."""
    wanted = make_fixed_point(7)
    found = solve_ckks(wanted)
    one = wanted.max_level * (1 + 2**found.packing.field_bits)
    exact = slots_of_sum(found, one, 7)
    assert np.array_equal(np.rint(exact), np.full(found.packing.slots_per_vector, 7.0 * one))
    wrapped = slots_of_sum(
        replace(found, scale_or_modulus_bits=found.scale_or_modulus_bits + 1), one, 7
    )
    assert np.abs(wrapped - 7 * one).min() > 2**20


def test_the_noise_limit_of_the_scale_is_real() -> None:
    """The solver stays twenty deviations below the tolerance; four bits less leave three."""
    found = solve_ckks(make_fixed_point(16))
    slots = slots_of_sum(found, 1, 16)
    assert (round_to_integers(slots, sender="the test") == 16).all()
    slots = slots_of_sum(
        replace(found, scale_or_modulus_bits=found.scale_or_modulus_bits - 4), 1, 16
    )
    with pytest.raises(RemoteProtocolError, match="does not decrypt to integers"):
        round_to_integers(slots, sender="the test")


@pytest.mark.parametrize(
    ("passives", "model"), [(16, compute_slot_noise), (2, compute_fresh_slot_noise)]
)
def test_the_noise_model_is_the_measured_one(passives: int, model: Callable[[int], float]) -> None:
    found = solve_ckks(make_fixed_point(passives))
    error = (slots_of_sum(found, 12345) - 12345) * 2.0**found.scale_or_modulus_bits
    more = (slots_of_sum(found, -7) + 7) * 2.0**found.scale_or_modulus_bits
    measured = np.concatenate([error, more]).std() / model(1)
    assert [0.85 < k * measured < 1.15 for k in (1, 2 / 3, 1.5)] == [True, False, False]


def coefficients_of_sum(
    plain_bits: int, coefficients: NDArray[np.int64], addends: int
) -> NDArray[np.int64]:
    """Add `addends` ciphertexts of the same coefficients under one prime of 60 bits."""
    cipher = BfvCipher((60,), plain_bits)
    keys = cipher.make_key_pair()
    parts = {str(k): cipher.encrypt(keys, coefficients[None]) for k in range(addends)}
    return cipher.decrypt(keys, cipher.add_ciphertexts(parts, 1), 1, sender="the test")


@pytest.mark.parametrize(("more", "exact"), [(0, True), (4, False)])
def test_the_noise_limit_of_the_plain_modulus_is_real(more: int, exact: bool) -> None:
    """The solver stays ten deviations below q / 2t; four bits more leave less than one."""
    found = solve_bfv(make_fixed_point(64))
    coefficients = np.random.default_rng(0).integers(-(2**36), 2**36, 4096)
    total = coefficients_of_sum(found.scale_or_modulus_bits + more, coefficients, 64)
    assert np.array_equal(total, 64 * coefficients) == exact


@pytest.mark.parametrize(("bits", "exact"), [(16, True), (17, False)])
def test_one_bit_more_a_value_wraps_around(bits: int, exact: bool) -> None:
    """64 passives: two fields of 16-bit values just fit; of 17 bits the solver takes one."""
    plain_bits = solve_bfv(make_fixed_point(64)).scale_or_modulus_bits
    assert plain_bits == 44
    wanted = make_fixed_point(64, bits)
    assert solve_bfv(wanted).packing.fields_per_slot == (2 if exact else 1)
    packing = Packing(fields_per_slot=2, field_bits=wanted.field_bits, slots_per_vector=4096)
    highest = packing.pack_fields(np.full(8192, wanted.max_level, dtype=np.int64))[0]
    total = coefficients_of_sum(plain_bits, highest, 64)
    assert (packing.unpack_fields(total) == 64 * wanted.max_level).all() == exact


@pytest.mark.parametrize(("solve", "fits"), [(solve_bfv, 32), (solve_ckks, 29)])
def test_what_does_not_fit_says_what_would(solve: Any, fits: int) -> None:
    wanted = FixedPoint(clip_norm=1.0, bits=40, contributor_count=1000)
    with pytest.raises(LocalProtocolError, match=f"fit a data prime of .* bits; {fits} bits"):
        solve(wanted)


# Errors drawn in bulk: their distributions are SEAL's, and SEAL decrypts what they hide.

COUNT = 400_000
RECIPE = (60,), 46


class SealsErrors(BfvCipher):
    """The same cipher, with the errors that SEAL draws."""

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], last: int | None = None
    ) -> list[bytes]:
        return SealCipher.encrypt(self, context, slots_VS)


def fits_binomial(numbers: NDArray[np.int64], pairs: int) -> bool:
    """Every value is as frequent as in the difference of two sums of `pairs` bits, to 6 sigma."""
    values = np.arange(-pairs, pairs + 1)
    chances = np.array([math.comb(2 * pairs, pairs + int(value)) / 4**pairs for value in values])
    counts = np.array([np.count_nonzero(numbers == value) for value in values])
    if counts.sum() != numbers.size:
        return False
    expected = numbers.size * chances
    return bool((np.abs(counts - expected) <= 6 * np.sqrt(expected) + 6).all())


def test_errors_are_centred_binomial_of_21_pairs_and_of_no_other() -> None:
    drawn = draw_centred_binomial(COUNT)
    # and not of 2/3 or 3/2 of the variance
    assert [fits_binomial(drawn, pairs) for pairs in (21, 14, 31)] == [True, False, False]
    assert not fits_binomial(drawn + 1, 21)
    assert drawn.var() == pytest.approx(10.5, rel=0.02)


def largest_deviation(numbers: NDArray[np.int64], *, cells: int) -> float:
    """Return how far a value's count is from an equal share, in standard deviations."""
    counts = np.unique(numbers, return_counts=True)[1]
    assert len(counts) == cells
    share = numbers.size / cells
    return float(np.abs(counts - share).max() / math.sqrt(share))


def test_u_is_uniform_on_three_values_of_independent_neighbours() -> None:
    drawn = draw_ternary(COUNT)
    assert drawn.size == COUNT
    assert largest_deviation(drawn, cells=3) < 6
    assert largest_deviation(3 * drawn[::2] + drawn[1::2], cells=9) < 6
    assert not np.array_equal(draw_ternary(64), draw_ternary(64))
    assert not np.array_equal(draw_centred_binomial(64), draw_centred_binomial(64))


def test_few_accepted_bytes_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([b"\xff" * 40, b"\x00\x01\x02" + b"\xff" * 37, bytes(40)])
    monkeypatch.setattr(
        "apfed_protocols.sums.homomorphic.keystream", lambda *_, **__: next(streams)
    )
    assert draw_ternary(5).tolist() == [-1, 0, 1, -1, -1]


@pytest.mark.parametrize("kind", [SealsErrors, BfvCipher])
def test_the_noise_is_as_large_as_seals(kind: type[BfvCipher]) -> None:
    """SEAL's own meter: bits between the noise of a ciphertext and its limit."""
    cipher = kind(*RECIPE)
    keys = cipher.make_key_pair()
    budgets = []
    for _ in range(8):
        blobs = cipher.encrypt(keys, np.zeros((1, 4096), dtype=np.int64))
        loaded = cipher.load_ciphertexts(blobs, 1, sender="the test")[0]
        budgets.append(keys.decryptor.invariant_noise_budget(loaded))
    # q / 2t over 4 to 6 deviations of sqrt(10.5 (1 + 4N/3)), in whole bits.
    deviation = math.sqrt(10.5 * (1 + 4 * 4096 / 3))
    most, least = (60 - 1 - 46 - math.log2(factor * deviation) for factor in (3, 7))
    assert math.floor(least) <= min(budgets) <= max(budgets) <= math.ceil(most)


def compute_coefficients_of(cipher: BfvCipher, ciphertext: Any) -> NDArray[np.int64]:
    """The two polynomials of a ciphertext that is a product in SEAL's transformed form."""
    vars(cipher)["_evaluator"].transform_from_ntt_inplace(ciphertext)
    with open_scratch_file() as scratch:
        numbers = cipher.ciphertext_form.extract_numbers(ciphertext, scratch)
    return numbers.reshape(2, -1).astype(np.int64)


def times_ternary(a_N: NDArray[np.int64], u_N: NDArray[np.int64], q: int) -> NDArray[np.int64]:
    """The product modulo X^N + 1 and q, term by term."""
    product_N = np.zeros_like(a_N)
    for power in np.flatnonzero(u_N):
        shifted_N = np.concatenate((-a_N[len(a_N) - power :], a_N[: len(a_N) - power]))
        product_N = (product_N + u_N[power] * shifted_N) % q
    return product_N


def test_ciphertexts_are_the_public_key_times_u_and_two_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """c0 = b u + e0 and c1 = a u + e1: no draw is left out, halved or used for two ciphertexts."""
    drawn: dict[str, list[NDArray[np.int64]]] = {"draw_ternary": [], "draw_centred_binomial": []}
    for name, draw in (
        ("draw_ternary", draw_ternary),
        ("draw_centred_binomial", draw_centred_binomial),
    ):

        def record_draws(count: int, name: str = name, draw: Any = draw) -> NDArray[np.int64]:
            drawn[name].append(draw(count))
            return drawn[name][-1].copy()

        monkeypatch.setattr(f"apfed_protocols.sums.homomorphic.{name}", record_draws)
    cipher = BfvCipher(*RECIPE)
    keys = cipher.make_key_pair()
    q = cipher.residues.modulus
    assert cipher.ciphertext_form.count == 8192
    for numbers in drawn.values():
        numbers.clear()
    blobs = cipher.encrypt(keys, np.zeros((3, 4096), dtype=np.int64))
    u_VN = np.concatenate(drawn["draw_ternary"]).reshape(3, 4096)
    e_V2N = np.concatenate(drawn["draw_centred_binomial"]).reshape(3, 2, 4096)
    assert len(np.unique(u_VN, axis=0)) == 3
    assert len(np.unique(e_V2N.reshape(6, 4096), axis=0)) == 6
    key_2N = compute_coefficients_of(cipher, keys.public_key.data())
    sent_V2N = [cipher.residues.parse(blob, sender="the test").reshape(2, -1) for blob in blobs]
    expected_V2N = [
        [(times_ternary(half, u_N, q) + e_N) % q for half, e_N in zip(key_2N, e_2N, strict=True)]
        for u_N, e_2N in zip(u_VN, e_V2N, strict=True)
    ]
    assert np.array_equal(np.array(sent_V2N).astype(np.int64), expected_V2N)


# The quantiser: clip, range, rounding, packing.

FULL = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FULL, min_size=1, max_size=30), st.floats(1e-6, 1e6))
def test_clip_holds_for_any_row(row: list[float], bound: float) -> None:
    clipped = clip_rows(np.array([row]), bound)[0]
    assert np.isfinite(clipped).all()
    scaled = clipped / bound
    assert np.sqrt(np.square(scaled).sum()) <= 1 + 1e-12
    assert (np.sign(clipped) * np.sign(row) >= 0).all()


@settings(deadline=None)
@given(
    row=st.lists(FULL, min_size=1, max_size=6),
    bound=st.floats(1e-30, 1e30),
    bits=st.sampled_from([2, 16, 24]),
)
def test_quantised_values_are_those_of_exact_arithmetic(
    row: list[float], bound: float, bits: int
) -> None:
    fixed_point = FixedPoint(clip_norm=bound, bits=bits, contributor_count=3)
    exact = [Fraction(value) / Fraction(bound) for value in row]
    square = sum(value * value for value in exact)
    # The norm to 20 digits, where it exceeds the bound.
    shrink = Fraction(10**20, math.isqrt(int(square * 10**40))) if square > 1 else Fraction(1)
    (integers,) = fixed_point.quantise_rows(np.array([row]))
    assert np.array_equal(
        fixed_point.quantise_rows(np.array([row]), integer_type=np.int32), [integers]
    )
    errors = [
        abs(integer - value * shrink * fixed_point.max_level)
        for integer, value in zip(integers.tolist(), exact, strict=True)
    ]
    assert max(errors) <= Fraction(1, 2) + Fraction(1, 10**6)


def test_the_bound_itself_takes_the_last_level() -> None:
    fixed_point = FixedPoint(clip_norm=0.3, bits=16, contributor_count=4)
    levels = fixed_point.quantise_rows(np.array([[0.3], [-0.3], [9.0]]))
    assert levels.ravel().tolist() == [32767, -32767, 32767]
    assert (fixed_point.max_sum, fixed_point.field_bits) == (4 * 32767, 18)


@given(st.data(), st.sampled_from([1, 2]), st.integers(2, 26))
def test_packing_round_trip(data: st.DataObject, fields: int, width: int) -> None:
    packing = Packing(fields_per_slot=fields, field_bits=width, slots_per_vector=4)
    edge = 2 ** (width - 1)
    integers = np.array(
        data.draw(st.lists(st.integers(-edge, edge - 1), min_size=1, max_size=30)), dtype=np.int64
    )
    slots = packing.pack_fields(integers)
    assert slots.shape == (packing.count_vectors(integers.size), 4)
    assert np.array_equal(slots.astype(np.float64).astype(np.int64), slots)
    back = packing.unpack_fields(slots)
    assert np.array_equal(back[: integers.size], integers)
    assert not back[integers.size :].any()


@given(st.lists(st.integers(-1000, 1000), min_size=6, max_size=6))
def test_packed_sums_are_sums(numbers: list[int]) -> None:
    packing = Packing(fields_per_slot=2, field_bits=13, slots_per_vector=2)
    first = np.array(numbers[:3])
    second = np.array(numbers[3:])
    total = packing.unpack_fields(packing.pack_fields(first) + packing.pack_fields(second))
    assert np.array_equal(total[:3], first + second)


@pytest.mark.parametrize(("fields", "bits"), [(2, 27), (3, 2)])
def test_a_slot_holds_53_bits(fields: int, bits: int) -> None:
    Packing(fields_per_slot=2, field_bits=26, slots_per_vector=4)
    with pytest.raises(LocalProtocolError, match=rf"{fields} field\(s\) of {bits} bits do not"):
        Packing(fields_per_slot=fields, field_bits=bits, slots_per_vector=4)


_LONG_ROWS = """
import time
import numpy as np
from apfed_protocols.sums.fixed_point import clip_rows

rows = np.full((64, 20_000), 1e-3)
clip_rows(rows, 10.0)
whole, own = time.process_time(), time.thread_time()
for _ in range(100):
    clip_rows(rows, 10.0)
print((time.process_time() - whole) / (time.thread_time() - own))
"""


def test_norms_of_long_rows_keep_no_second_thread_busy() -> None:
    """BLAS would spread each over threads, whose waiting took ten times the work's time."""
    done = subprocess.run(
        [sys.executable, "-c", _LONG_ROWS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
        cwd=Path(__file__).resolve().parents[2],
    )
    assert float(done.stdout) < 1.2


def test_a_long_row_is_clipped_to_the_bound() -> None:
    for columns in [1, 8191, 8192, 8193, 20_000]:
        rows = np.random.default_rng(0).uniform(1, 2, size=(3, columns))
        rows[1] *= 1e-9
        clipped = clip_rows(rows, 0.5)
        np.testing.assert_allclose(np.linalg.norm(clipped, axis=1)[[0, 2]], 0.5, rtol=1e-12)
        np.testing.assert_array_equal(clipped[1], rows[1])
