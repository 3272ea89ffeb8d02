"""The ring against products of Python's integers, and digits at the edge of what stays exact."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.noise import largest_noise
from apfed_protocols.products.ring import (
    LARGEST_ERROR,
    Digits,
    Ring,
    inverse,
    product_error,
    row_limit,
    solve_products,
    split,
    transform,
)
from apfed_protocols.sums.fixed_point import SECURE_MODULUS_BITS
from tests.contracts.product_parties import ProductParties, agreement, matrices

RING = Ring(16, (13, 14, 14, 9, 20, 32))


def integers(ring: Ring, numbers: Digits) -> list[int]:
    """Coefficients modulo q as Python's integers."""
    total = sum(
        digit.astype(object) << offset for digit, offset in zip(numbers, ring.offsets, strict=True)
    )
    return [int(number) % 2**ring.bits for number in np.ravel(total)]


def schoolbook(left: list[int], right: list[int], modulus: int) -> list[int]:
    size = len(left)
    product = [0] * size
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            sign = 1 if i + j < size else -1
            product[(i + j) % size] += sign * a * b
    return [number % modulus for number in product]


def digits(ring: Ring, numbers: list[int]) -> Digits:
    blob = b"".join(number.to_bytes(-(-ring.bits // 8), "little") for number in numbers)
    return ring.parse(blob, sender="the test")


numbers = st.lists(st.integers(0, 2**RING.bits - 1), min_size=16, max_size=16)


@given(numbers)
@settings(max_examples=50, deadline=None)
def test_bytes_digits_and_carries_round_trip(values: list[int]) -> None:
    parsed = digits(RING, values)
    assert integers(RING, parsed) == values
    assert integers(RING, RING.centred(parsed)) == values
    for digit, width in zip(RING.centred(parsed), RING.widths, strict=True):
        assert -(1 << (width - 1)) <= digit.min() <= digit.max() <= 1 << (width - 1)
    assert np.array_equal(RING.carried(RING.centred(parsed)), parsed)
    blob = RING.pack(RING.centred(parsed))
    assert blob == RING.pack(parsed)
    assert integers(RING, RING.parse(blob, sender="the test")) == values


@given(numbers, st.lists(st.integers(-1, 1), min_size=16, max_size=16))
@settings(max_examples=50, deadline=None)
def test_products_are_those_of_integers(left: list[int], right: list[int]) -> None:
    spectrum = transform(RING.centred(digits(RING, left))) * transform(np.array(right))
    product = np.rint(inverse(spectrum)).astype(np.int64)
    assert integers(RING, product) == schoolbook(left, right, 2**RING.bits)


@given(numbers)
@settings(max_examples=50, deadline=None)
def test_rounding_is_that_of_integers(values: list[int]) -> None:
    kept = RING.bits - RING.offsets[4]
    dropped = RING.bits - kept
    expected = [((v + (1 << (dropped - 1))) >> dropped) % 2**kept for v in values]
    for form in (digits(RING, values), RING.centred(digits(RING, values))):
        assert RING.rounded(form, kept).tolist() == expected


def test_adding_at_a_place() -> None:
    for place in [0, 12, 13, 50, 101]:
        numbers_L = np.zeros((6, 16), dtype=np.int64)
        RING.add_at(numbers_L, place, np.arange(-8, 8))
        expected = [(number << place) % 2**RING.bits for number in range(-8, 8)]
        assert integers(RING, numbers_L) == expected


def test_uniform_noise_has_its_range_and_deviation() -> None:
    for bits in [1, 5, 13, 30, 90]:
        ring = Ring(2**14, RING.widths)
        numbers_L = np.zeros((6, 2**14), dtype=np.int64)
        ring.add_uniform(numbers_L, bits)
        half, modulus = 2 ** (bits - 1), 2**ring.bits
        drawn = [(n + half) % modulus - half for n in integers(ring, numbers_L)]
        assert -half <= min(drawn) <= max(drawn) < half
        assert len({n & 1 for n in drawn}) == 2
        deviation = float(np.std(np.array(drawn, dtype=float) / 2**bits))
        expected = np.sqrt((1 - 4.0**-bits) / 12)
        assert 0.97 < deviation / expected < 1.03
        assert not 0.97 < deviation / (1.5 * expected) < 1.03
        assert not 0.97 < deviation * 1.5 / expected < 1.03


def test_expansion_is_uniform_and_a_function_of_seed_and_place() -> None:
    ring = Ring(4096, (20, 20, 20, 20, 29))
    first = ring.expand(bytes(32), b"a")
    assert np.array_equal(first, ring.expand(bytes(32), b"a"))
    assert not np.array_equal(first, ring.expand(bytes(32), b"b"))
    top = first[-1] >> 26
    assert set(np.unique(top)) == set(range(8))
    assert np.abs(np.bincount(top) - 512).max() < 150


def test_the_bound_of_the_transforms_holds() -> None:
    """Against exact products, for numbers all at their largest, with equal and random signs."""
    for size in [8, 512, 4096]:
        for terms in [1, 50]:
            rng = np.random.default_rng(0)
            for aligned in (True, False):
                shape = (terms, size)
                left = (
                    np.full(shape, 2.0**15) if aligned else rng.choice([-1.0, 1.0], shape) * 2**15
                )
                right = (
                    np.full(shape, 2.0**12) if aligned else rng.choice([-1.0, 1.0], shape) * 2**12
                )
                found = inverse((transform(left) * transform(right)).sum(axis=0))
                exact = _exact(left / 2**15, right / 2**12) * 2**27
                norms = float((np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)).sum())
                assert np.abs(found - exact).max() <= product_error(size, terms) * norms


def _exact(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Products of signs: the sums are small, so that direct convolution is exact."""
    size, total = left.shape[1], np.zeros(left.shape[1])
    for a, b in zip(left, right, strict=True):
        full = np.convolve(a, b)
        total += full[:size]
        total[: size - 1] -= full[size:]
    return total


def test_the_digits_of_agreed_parameters_are_exact_at_the_edge() -> None:
    """All labels' digits and one row's integers at their largest: the float is near its integer."""
    for shape in [{"columns": 10, "labelled": 50}, {"labelled": 200}]:
        agreed = agreement(people=10**5, **shape)
        found = solve_products(agreed)
        largest, level = 2.0 ** (max(found.widths) - 1), 2**15
        signs = np.random.default_rng(1).choice([-1.0, 1.0], (agreed.labelled, found.rows))
        rows = np.zeros((agreed.labelled, found.rows))
        rows[0] = level
        spectrum = (transform(rows) * transform(signs * largest)).sum(axis=0)
        product = inverse(spectrum)
        assert np.abs(product - np.rint(product)).max() < 1 / 8
        assert np.abs(product).max() < 2**53


@given(st.integers(1, 300), st.integers(1, 64))
def test_widths_are_even(bits: int, widest: int) -> None:
    widths = split(bits, widest)
    assert sum(widths) == bits
    assert max(widths) <= widest
    assert max(widths) - min(widths) <= 1
    assert len(widths) == -(-bits // widest)


def test_polynomials_that_are_none() -> None:
    ring = Ring(16, (10, 11))
    good = bytes(16 * 3)
    assert not ring.parse(good, sender="x").any()
    for bad in (good[:-1], good + b"\0", b""):
        with pytest.raises(RemoteProtocolError, match="bytes, expected 48"):
            ring.parse(bad, sender="x")
    with pytest.raises(RemoteProtocolError, match=r"beyond 2\^21"):
        ring.parse(good[:-1] + b"\x20", sender="x")
    ring.parse(good[:-1] + b"\x1f", sender="x")


# Parameters are secure and hold the worst noise; what does not fit says so.


CASES: list[dict[str, Any]] = [
    {"bits": bits, "labelled": n, "columns": K, "people": U, "passives": M, "noise": noise}
    for bits, n, K, U, M, noise in itertools.product(
        (2, 16, 20), (1, 50, 1000), (1, 10, 200), (1, 10**6), (2, 64), (None, 10**4)
    )
] + [{"bits": 16, "labelled": 50, "columns": K, "people": 10**5, "passives": 3, "noise": None,
      "candidates": 20} for K in (1, 2, 10, 64)]  # fmt: skip


def test_parameters_hold_the_bounds() -> None:
    for case in CASES:
        agreed = agreement(**case)
        found, passives = solve_products(agreed), case["passives"]
        assert found.modulus_bits <= SECURE_MODULUS_BITS[found.degree]
        assert sum(found.widths) == found.modulus_bits
        assert found.kept_bits in {sum(found.widths[place:]) for place in range(len(found.widths))}
        assert found.folds == (2 if agreed.candidates else 1)
        assert found.stride >= found.folds * agreed.columns
        limit = passives * (row_limit(agreed) + largest_noise(agreed.noise or 0))
        assert 2 ** (found.plain_bits - 1) > limit
        assert 2**found.plain_bits <= 4 * limit + 1  # no larger than it must be
        own = found.folds * LARGEST_ERROR * (found.rows * row_limit(agreed) + 2 * found.degree)
        values = passives * agreed.people * agreed.columns
        assert own * values * 2**agreed.security <= 2**found.smudging_bits
        noise = (
            passives
            * (own + 2 ** (found.smudging_bits - 1))
            / 2 ** (found.modulus_bits - found.kept_bits)
        )
        tail = 6 * np.sqrt(passives * (found.folds * found.degree + 1) / 4)
        assert noise + tail < found.noise_bound < 2 ** (found.kept_bits - found.plain_bits - 1)


def test_the_published_parameters() -> None:
    found = solve_products(agreement(3, people=100_000, columns=10, labelled=50))
    assert (found.degree, found.modulus_bits, found.kept_bits) == (4096, 109, 32)
    assert (found.plain_bits, found.smudging_bits, found.rows) == (18, 89, 256)
    found = solve_products(agreement(3, people=10**6, columns=10, labelled=200))
    assert (found.degree, found.modulus_bits, found.kept_bits) == (8192, 117, 32)


def test_what_does_not_fit_says_so() -> None:
    agreed = agreement(
        1000, people=2**28, columns=512, security=64, noise=2**24, bits=24, labelled=50
    )
    with pytest.raises(LocalProtocolError, match="take fewer bits"):
        solve_products(agreed)


@pytest.mark.parametrize("candidates", [None, 2])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("opens", [True, False])
def test_the_bound_of_the_noise_is_real(
    opens: bool, sign: int, candidates: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest smudging noise at all passives opens; a sixth beyond the bound does not."""
    agreed = agreement(3, people=100_000, columns=10, labelled=2, candidates=candidates)
    played = ProductParties(agreed)
    found, ring = played.sum.headroom, played.sum.ring

    def largest(c0: Digits) -> None:
        if opens:
            ring.add_at(c0, found.smudging_bits - 1, sign)
        else:
            dropped = found.modulus_bits - found.kept_bits
            ring.add_at(c0, dropped, sign * 7 * found.noise_bound // 18)

    for role in played.contributors.values():
        monkeypatch.setattr(role, "_smudge", largest)
    rows = matrices(agreed)
    combined = played.combiner.combine(0, played.answers(0, rows))
    if opens:
        people = played.sum.people_of(0)
        expected = played.integers(rows)[people.start : people.stop]
        opened = played.receiver.open(0, combined) * played.sum.fixed_point.levels
        assert np.array_equal(np.rint(opened), expected)
    else:
        with pytest.raises(RemoteProtocolError, match="beyond the range"):
            played.receiver.open(0, combined)
