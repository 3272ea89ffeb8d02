"""What is opened is the integer sum of products, for every shape; and what is refused before."""

import hashlib
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.noise import discrete_gaussian, largest_noise
from apfed_protocols.products import SumOfProducts
from apfed_protocols.products.ring import (
    LARGEST_ERROR,
    Digits,
    Ring,
    bound_fft_error,
    compute_row_limit,
    invert_transform,
    solve_products,
    split_widths,
    transform_polynomials,
)
from apfed_protocols.sums.fixed_point import SECURE_MODULUS_BITS
from tests.contracts.product_parties import ProductParties, agreement, labels, matrices
from tests.refusals import list_unrefused
from tests.vectors.recorded import fix_randomness

SHAPES: tuple[dict[str, Any], ...] = (
    {"people": 1, "columns": 1, "labelled": 1},
    {"columns": 10, "people": 8192 + 256 + 7, "labelled": 3},  # two blocks, the last one short
    {"columns": 100, "people": 1500, "labelled": 20},
    {"columns": 512, "people": 9, "labelled": 2},
    {"labelled": 60, "passives": 5},
    {"bits": 24, "people": 10},
    {"bits": 2, "security": 64},
    {"row_bound": 250.0, "passives": 3},
    {"candidates": 3, "columns": 1, "people": 5, "labelled": 1},
    {"candidates": 3, "columns": 10, "people": 4096 + 128 + 5, "labelled": 20},
    {"candidates": 9, "columns": 33, "people": 100, "passives": 3},
    {"candidates": 3, "passives": 1, "allow_single": True},
    {"passives": 1, "allow_single": True},
)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_the_sum_of_products_is_exact(changes: dict[str, Any]) -> None:
    agreed = agreement(**changes)
    played = ProductParties(agreed)
    rows = matrices(agreed)
    opened = played.open_sum(rows)
    assert np.abs(opened - np.rint(opened)).max() < 1e-6
    found_out = f"one time in {agreed.candidates}" in played.sum.malicious
    assert found_out == (agreed.candidates is not None)
    assert np.array_equal(np.rint(opened), played.compute_sum(rows))


def test_it_is_close_to_the_real_product() -> None:
    agreed = agreement(3, labelled=9)
    played = ProductParties(agreed)
    rows = matrices(agreed)
    real = sum(rows.values()) @ played.labels
    opened = played.open_sum(rows) / played.sum.fixed_point.max_level
    assert np.abs(opened - real).max() <= played.sum.compute_rounding_error()


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int64, np.float32])
def test_labels_are_any_bits_of_any_type(kind: Any) -> None:
    agreed = agreement()
    bits = np.random.default_rng(1).integers(2, size=(4, 3)).astype(kind)
    played = ProductParties(agreed, bits)
    rows = matrices(agreed)
    assert np.array_equal(np.rint(played.open_sum(rows)), played.compute_sum(rows))


@pytest.mark.parametrize(
    "single",
    [pytest.param(np.zeros((4, 3)), id="no label"), pytest.param(np.ones((4, 3)), id="all labels")],
)
def test_the_largest_rows_stay_in_range(single: Any) -> None:
    """All of a row in one entry, all entries at half a step, either sign."""
    agreed = agreement(3, people=4)
    played = ProductParties(agreed, single)
    edge = np.zeros((4, 4))
    edge[0, 0] = 1
    edge[1, 3] = -1
    edge[2] = 0.25 + 0.5 / played.sum.fixed_point.max_level
    edge[3] = -edge[2]
    rows = dict.fromkeys(agreed.contributors, edge)
    assert np.array_equal(np.rint(played.open_sum(rows)), played.compute_sum(rows))


def test_noise_is_added_in_steps() -> None:
    agreed = agreement(2, noise=3000)
    played = ProductParties(agreed)
    rows = matrices(agreed)
    noise = [discrete_gaussian(bytes([k] * 32), deviation=3000, shape=(30, 3)) for k in (1, 2)]
    answers = {
        name: role.answer_block(0, rows[name], noise[k])
        for k, (name, role) in enumerate(played.contributors.items())
    }
    opened = played.receiver.open_block(0, played.aggregator.combine_block(0, answers))
    steps = np.rint(opened * played.sum.fixed_point.max_level)
    assert np.array_equal(steps, played.compute_sum(rows) + noise[0] + noise[1])


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(np.full((4, 3), 2), id="twos"),
        pytest.param(np.full((4, 3), 0.5), id="halves"),
        pytest.param(np.full((4, 3), "1"), id="texts"),
        pytest.param(np.ones((3, 4)), id="another shape"),
        pytest.param([[1]], id="a list"),
    ],
)
def test_labels_that_are_no_bits(bad: Any) -> None:
    with pytest.raises(LocalProtocolError, match="labels are"):
        SumOfProducts(agreement()).make_receiver(bad)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        pytest.param(np.full((30, 4), 0.3), "adds up to more than row_bound", id="above the bound"),
        pytest.param(
            np.full((30, 4), 1e308), "adds up to more than row_bound", id="far above the bound"
        ),
        pytest.param(np.full((30, 4), np.nan), "NaN", id="nan"),
        pytest.param(np.zeros((29, 4)), "shape", id="a row less"),
        pytest.param(np.zeros((30, 4), dtype=np.int64), "float32 or float64", id="integers"),
        pytest.param([[0.0]], "array", id="a list"),
    ],
)
def test_rows_that_are_refused(bad: Any, says: str) -> None:
    played = ProductParties(agreement())
    role = played.contributors["passive_1"]
    with pytest.raises(LocalProtocolError, match=says):
        role.answer_block(0, bad)
    role.answer_block(0, np.zeros((30, 4)))  # what was refused used no block up


def test_noise_must_be_as_agreed() -> None:
    role = ProductParties(agreement()).contributors["passive_1"]
    with pytest.raises(LocalProtocolError, match="noise"):
        role.answer_block(0, np.zeros((30, 4)), np.zeros((30, 3), dtype=np.int64))
    role = ProductParties(agreement(noise=5)).contributors["passive_1"]
    others = (None, np.zeros((30, 4), dtype=np.int64), np.full((30, 3), 68), np.zeros((30, 3)))
    cases = [("noise", 0, np.zeros((30, 4)), bad) for bad in others]
    assert list_unrefused(LocalProtocolError, role.answer_block, cases) == []


def test_blocks_go_up_and_are_used_once() -> None:
    agreed = agreement(people=8300, columns=10, labelled=2)
    played = ProductParties(agreed)
    rows = matrices(agreed)
    combined = played.aggregator.combine_block(1, played.answers(1, rows))
    played.receiver.open_block(1, combined)
    used = [("used once", block, rows) for block in (1, 0)]
    assert list_unrefused(LocalProtocolError, played.answers, used) == []
    with pytest.raises(LocalProtocolError, match="used once"):
        played.receiver.open_block(1, combined)
    unknown = [("blocks of", block, rows) for block in (2, -1, True)]
    assert list_unrefused(LocalProtocolError, played.answers, unknown) == []


def test_nothing_leaves_before_setup_and_request() -> None:
    described = SumOfProducts(agreement())
    request = described.make_receiver(labels(agreement())).make_request()
    role = described.make_contributor("passive_1")
    with pytest.raises(LocalProtocolError, match="accept the request"):
        role.answer_block(0, np.zeros((30, 4)))
    role.accept_request(request)
    with pytest.raises(LocalProtocolError, match="mask key"):
        role.answer_block(0, np.zeros((30, 4)))
    converse({"passive_1": role, "passive_2": described.make_contributor("passive_2")})
    role.answer_block(0, np.zeros((30, 4)))
    with pytest.raises(LocalProtocolError, match="contributes nothing"):
        described.make_contributor("active")


def test_it_says_what_each_party_learns() -> None:
    described = SumOfProducts(agreement())
    assert not described.unsafe
    assert described.leaks.request is not None
    assert "sum of products only" in described.leaks.active_and_aggregator
    assert "column" in described.malicious
    found = described.parameters
    assert described.readable_bits == 3 * (found.modulus_bits - found.smudging_bits)
    assert described.answer_bits == (3 + 4) * 32


# The whole protocol again with Python's integers alone, and recorded digests of a run.

RECORDED = {
    None: "13906c67ce0724caf9744e9907781e1e63510b4cc1ae800985af5847068ea2df",
    3: "0facc8a34756b21d2c8cfaeeb7138308fb7adf11f60c6fcf03a558e245e25536",
}
"""SHA-256 over the request, the first passive's answer and the sum, by candidates."""


@pytest.mark.parametrize("candidates", RECORDED)
def test_a_recorded_run_repeats_byte_for_byte(candidates: int | None) -> None:
    agreed = agreement(people=40, columns=3, labelled=2, candidates=candidates)
    rows = {
        name: np.linspace(-0.4, 0.4 + place / 10, 80).reshape(40, 2)
        for place, name in enumerate(agreed.contributors)
    }
    labels = np.array([[0, 1, 0], [1, 0, 0]])
    with fix_randomness():
        played = ProductParties(agreed, labels)
        answers = played.answers(0, rows)
        combined = played.aggregator.combine_block(0, answers)
    opened = played.receiver.open_block(0, combined) * played.sum.fixed_point.max_level
    assert np.array_equal(np.rint(opened), played.compute_sum(rows))
    parts = played.receiver.make_request(), answers["passive_1"], combined
    assert hashlib.sha256(b"".join(parts)).hexdigest() == RECORDED[candidates]


# The ring against products of Python's integers, and digits at the edge of what stays exact.

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
    return ring.parse_digits(blob, sender="the test")


numbers = st.lists(st.integers(0, 2**RING.bits - 1), min_size=16, max_size=16)


@given(numbers)
@settings(max_examples=50, deadline=None)
def test_bytes_digits_and_carries_round_trip(values: list[int]) -> None:
    parsed = digits(RING, values)
    assert integers(RING, parsed) == values
    assert integers(RING, RING.centre_digits(parsed)) == values
    half = np.array([1 << (width - 1) for width in RING.widths])
    centred = RING.centre_digits(parsed)
    assert (-half <= centred.min(axis=1)).all()
    assert (centred.max(axis=1) <= half).all()
    assert np.array_equal(RING.carry_digits(RING.centre_digits(parsed)), parsed)
    blob = RING.pack_digits(RING.centre_digits(parsed))
    assert blob == RING.pack_digits(parsed)
    assert integers(RING, RING.parse_digits(blob, sender="the test")) == values


@given(numbers, st.lists(st.integers(-1, 1), min_size=16, max_size=16))
@settings(max_examples=50, deadline=None)
def test_products_are_those_of_integers(left: list[int], right: list[int]) -> None:
    spectrum = transform_polynomials(
        RING.centre_digits(digits(RING, left))
    ) * transform_polynomials(np.array(right))
    product = np.rint(invert_transform(spectrum)).astype(np.int64)
    assert integers(RING, product) == schoolbook(left, right, 2**RING.bits)


@given(numbers)
@settings(max_examples=50, deadline=None)
def test_rounding_is_that_of_integers(values: list[int]) -> None:
    kept = RING.bits - RING.offsets[4]
    dropped = RING.bits - kept
    expected = [((v + (1 << (dropped - 1))) >> dropped) % 2**kept for v in values]
    forms = (digits(RING, values), RING.centre_digits(digits(RING, values)))
    assert [RING.round_digits(form, kept).tolist() for form in forms] == [expected, expected]


@pytest.mark.parametrize("position", [0, 12, 13, 50, 101])
def test_adding_at_a_place(position: int) -> None:
    numbers_L = np.zeros((6, 16), dtype=np.int64)
    RING.add_shifted(numbers_L, position, np.arange(-8, 8))
    expected = [(number << position) % 2**RING.bits for number in range(-8, 8)]
    assert integers(RING, numbers_L) == expected


@pytest.mark.parametrize("bits", [1, 5, 13, 30, 90])
def test_uniform_noise_has_its_range_and_deviation(bits: int) -> None:
    ring = Ring(2**14, RING.widths)
    numbers_L = np.zeros((6, 2**14), dtype=np.int64)
    ring.add_uniform(numbers_L, bits)
    half = 2 ** (bits - 1)
    modulus = 2**ring.bits
    drawn = [(n + half) % modulus - half for n in integers(ring, numbers_L)]
    assert -half <= min(drawn) <= max(drawn) < half
    assert len({n & 1 for n in drawn}) == 2
    deviation = float(np.std(np.array(drawn, dtype=float) / 2**bits))
    expected = np.sqrt((1 - 4.0**-bits) / 12)
    found = [0.97 < k * deviation / expected < 1.03 for k in (1, 2 / 3, 1.5)]
    assert found == [True, False, False]


def test_expansion_is_uniform_and_a_function_of_seed_and_place() -> None:
    ring = Ring(4096, (20, 20, 20, 20, 29))
    first = ring.expand_seed(bytes(32), b"a")
    assert np.array_equal(first, ring.expand_seed(bytes(32), b"a"))
    assert not np.array_equal(first, ring.expand_seed(bytes(32), b"b"))
    top = first[-1] >> 26
    assert set(np.unique(top)) == set(range(8))
    assert np.abs(np.bincount(top) - 512).max() < 150


@pytest.mark.parametrize("size", [8, 512, 4096])
@pytest.mark.parametrize("terms", [1, 50])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_bound_of_the_transforms_holds(size: int, terms: int, aligned: bool) -> None:
    """Against exact products, for numbers all at their largest, with equal and random signs."""
    rng = np.random.default_rng(0)
    shape = (terms, size)
    left, right = (np.ones(shape) if aligned else rng.choice([-1.0, 1.0], shape) for _ in range(2))
    found = invert_transform(
        (transform_polynomials(left * 2**15) * transform_polynomials(right * 2**12)).sum(axis=0)
    )
    norms = 2**27 * float((np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)).sum())
    exact = _exact(left, right) * 2**27
    assert np.abs(found - exact).max() <= bound_fft_error(size, terms) * norms


def _exact(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Products of signs: the sums are small, so that direct convolution is exact."""
    size = left.shape[1]
    total = np.zeros(left.shape[1])
    for a, b in zip(left, right, strict=True):
        full = np.convolve(a, b)
        total += full[:size]
        total[: size - 1] -= full[size:]
    return total


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"columns": 10, "labelled": 50}, id="ten columns"),
        pytest.param({"labelled": 200}, id="one column"),
    ],
)
def test_the_digits_of_agreed_parameters_are_exact_at_the_edge(shape: dict[str, int]) -> None:
    """All labels' digits and one row's integers at their largest: the float is near its integer."""
    agreed = agreement(people=10**5, **shape)
    found = solve_products(agreed)
    largest = 2.0 ** (max(found.digit_widths) - 1)
    level = 2**15
    signs = np.random.default_rng(1).choice(
        [-1.0, 1.0], (agreed.labelled, found.people_per_ciphertext)
    )
    rows = np.zeros((agreed.labelled, found.people_per_ciphertext))
    rows[0] = level
    spectrum = (transform_polynomials(rows) * transform_polynomials(signs * largest)).sum(axis=0)
    product = invert_transform(spectrum)
    assert np.abs(product - np.rint(product)).max() < 1 / 8
    assert np.abs(product).max() < 2**53


@given(st.integers(1, 300), st.integers(1, 64))
def test_widths_are_even(bits: int, widest: int) -> None:
    widths = split_widths(bits, widest)
    assert sum(widths) == bits
    assert max(widths) <= widest
    assert max(widths) - min(widths) <= 1
    assert len(widths) == -(-bits // widest)


def test_polynomials_that_are_none() -> None:
    ring = Ring(16, (10, 11))
    good = bytes(16 * 3)
    assert not ring.parse_digits(good, sender="x").any()
    cases = [("bytes, expected 48", bad) for bad in (good[:-1], good + b"\0", b"")]
    cases.append((r"beyond 2\^21", good[:-1] + b"\x20"))
    parse = partial(ring.parse_digits, sender="x")
    assert list_unrefused(RemoteProtocolError, parse, cases) == []
    ring.parse_digits(good[:-1] + b"\x1f", sender="x")


# Parameters are secure and hold the worst noise; what does not fit says so.

CASES: list[dict[str, Any]] = [
    {"bits": bits, "labelled": n, "columns": K, "people": U, "passives": M, "noise": noise}
    for bits, n, K, U, M, noise in itertools.product(
        (2, 16, 20), (1, 50, 1000), (1, 10, 200), (1, 10**6), (2, 64), (None, 10**4)
    )
] + [
    {
        "bits": 16,
        "labelled": 50,
        "columns": K,
        "people": 10**5,
        "passives": 3,
        "noise": None,
        "candidates": 20,
    }
    for K in (1, 2, 10, 64)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_hold_the_bounds(case: dict[str, Any]) -> None:
    agreed = agreement(**case)
    found = solve_products(agreed)
    passives = case["passives"]
    assert found.modulus_bits <= SECURE_MODULUS_BITS[found.degree]
    assert sum(found.digit_widths) == found.modulus_bits
    assert found.answer_modulus_bits in {
        sum(found.digit_widths[place:]) for place in range(len(found.digit_widths))
    }
    assert found.folds == (2 if agreed.candidates else 1)
    assert found.powers_per_person >= found.folds * agreed.columns
    limit = passives * (compute_row_limit(agreed) + largest_noise(agreed.noise or 0))
    assert 2 ** (found.plain_bits - 1) > limit
    assert 2**found.plain_bits <= 4 * limit + 1  # no larger than it must be
    own = (
        found.folds
        * LARGEST_ERROR
        * (found.people_per_ciphertext * compute_row_limit(agreed) + 2 * found.degree)
    )
    values = passives * agreed.people * agreed.columns
    assert own * values * 2**agreed.security <= 2**found.smudging_bits
    noise = (
        passives
        * (own + 2 ** (found.smudging_bits - 1))
        / 2 ** (found.modulus_bits - found.answer_modulus_bits)
    )
    tail = 6 * np.sqrt(passives * (found.folds * found.degree + 1) / 4)
    assert (
        noise + tail
        < found.max_answer_noise
        < 2 ** (found.answer_modulus_bits - found.plain_bits - 1)
    )


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
    found = played.sum.parameters
    ring = played.sum.ring

    def largest(c0: Digits) -> None:
        if opens:
            ring.add_shifted(c0, found.smudging_bits - 1, sign)
        else:
            dropped = found.modulus_bits - found.answer_modulus_bits
            ring.add_shifted(c0, dropped, sign * 7 * found.max_answer_noise // 18)

    for role in played.contributors.values():
        monkeypatch.setattr(role, "_smudge", largest)
    rows = matrices(agreed)
    combined = played.aggregator.combine_block(0, played.answers(0, rows))
    if opens:
        people = played.sum.get_block_people(0)
        expected = played.compute_sum(rows)[people.start : people.stop]
        opened = played.receiver.open_block(0, combined) * played.sum.fixed_point.max_level
        assert np.array_equal(np.rint(opened), expected)
    else:
        with pytest.raises(RemoteProtocolError, match="beyond the range"):
            played.receiver.open_block(0, combined)
