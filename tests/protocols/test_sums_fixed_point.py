"""The shared quantiser: clip, range, rounding, packing."""

import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums.fixed_point import FixedPoint, Packing, clip_rows

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
    fixed_point = FixedPoint(clip_norm=bound, bits=bits, contributors=3)
    exact = [Fraction(value) / Fraction(bound) for value in row]
    square = sum(value * value for value in exact)
    # The norm to 20 digits, where it exceeds the bound.
    shrink = Fraction(10**20, math.isqrt(int(square * 10**40))) if square > 1 else Fraction(1)
    (integers,) = fixed_point.quantise(np.array([row]))
    assert np.array_equal(fixed_point.quantise(np.array([row]), width=np.int32), [integers])
    for integer, value in zip(integers.tolist(), exact, strict=True):
        error = abs(integer - value * shrink * fixed_point.levels)
        assert error <= Fraction(1, 2) + Fraction(1, 10**6)


def test_the_bound_itself_takes_the_last_level() -> None:
    fixed_point = FixedPoint(clip_norm=0.3, bits=16, contributors=4)
    assert fixed_point.quantise(np.array([[0.3], [-0.3], [9.0]])).tolist() == [
        [32767],
        [-32767],
        [32767],
    ]
    assert (fixed_point.limit, fixed_point.field_bits) == (4 * 32767, 18)


@given(st.data(), st.sampled_from([1, 2]), st.integers(2, 26))
def test_packing_round_trip(data: st.DataObject, fields: int, width: int) -> None:
    packing = Packing(fields=fields, field_bits=width, slots=4)
    edge = 2 ** (width - 1)
    integers = np.array(
        data.draw(st.lists(st.integers(-edge, edge - 1), min_size=1, max_size=30)), dtype=np.int64
    )
    slots = packing.pack(integers)
    assert slots.shape == (packing.vectors(integers.size), 4)
    assert np.array_equal(slots.astype(np.float64).astype(np.int64), slots)
    back = packing.unpack(slots)
    assert np.array_equal(back[: integers.size], integers)
    assert not back[integers.size :].any()


@given(st.lists(st.integers(-1000, 1000), min_size=6, max_size=6))
def test_packed_sums_are_sums(numbers: list[int]) -> None:
    packing = Packing(fields=2, field_bits=13, slots=2)
    first, second = np.array(numbers[:3]), np.array(numbers[3:])
    total = packing.unpack(packing.pack(first) + packing.pack(second))
    assert np.array_equal(total[:3], first + second)


def test_a_slot_holds_53_bits() -> None:
    Packing(fields=2, field_bits=26, slots=4)
    with pytest.raises(
        LocalProtocolError, match=r"2 field\(s\) of 27 bits do not fit a float64 slot"
    ):
        Packing(fields=2, field_bits=27, slots=4)
    with pytest.raises(LocalProtocolError, match="do not fit"):
        Packing(fields=3, field_bits=2, slots=4)


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
        [sys.executable, "-c", _LONG_ROWS], capture_output=True, text=True, check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert float(done.stdout) < 1.2


def test_a_long_row_is_clipped_to_the_bound() -> None:
    for columns in [1, 8191, 8192, 8193, 20_000]:
        rows = np.random.default_rng(0).uniform(1, 2, size=(3, columns))
        rows[1] *= 1e-9
        clipped = clip_rows(rows, 0.5)
        np.testing.assert_allclose(np.linalg.norm(clipped, axis=1)[[0, 2]], 0.5, rtol=1e-12)
        np.testing.assert_array_equal(clipped[1], rows[1])
