"""Rows are clipped for any numbers; noise has the law, the grid and the errors that are stated."""

import math
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ModelError
from secure_apfed.privacy.dp_sgd import GradientGuard
from secure_apfed.privacy.guard import GaussianGuard
from secure_apfed.privacy.noise import clip_rows, on_grid, standard_normals

KEY = bytes(range(32))


def scale_fits(noise: np.ndarray, sigma: float) -> bool:
    """Whether the sum of squares lies within 5 deviations of what `sigma` would give."""
    return bool(abs((noise**2).sum() / sigma**2 - noise.size) < 5 * np.sqrt(2 * noise.size))


def normals(*context: bytes, rows: int = 128, columns: int = 64) -> np.ndarray:
    return standard_normals(KEY, *context, shape=(rows, columns))


def test_the_distribution_is_normal_and_not_merely_of_that_scale() -> None:
    sample = normals(b"shape", rows=1024).ravel()
    assert stats.kstest(sample, "norm").pvalue > 0.01
    uniform = (np.random.default_rng(0).random(sample.size) - 0.5) * np.sqrt(12)
    assert stats.kstest(uniform, "norm").pvalue < 1e-9
    assert abs(stats.skew(sample)) < 5 * np.sqrt(6 / sample.size)
    assert abs(stats.kurtosis(sample)) < 5 * np.sqrt(24 / sample.size)


def test_numbers_of_one_batch_and_of_two_steps_are_uncorrelated() -> None:
    first, second = normals(b"1").ravel(), normals(b"2").ravel()
    bound = 5 / np.sqrt(first.size)
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < bound
    assert abs(np.corrcoef(np.abs(first[:-1]), np.abs(first[1:]))[0, 1]) < bound


def test_it_is_a_function_of_key_context_and_shape() -> None:
    first = normals(b"a", b"b")
    assert first.tobytes() == normals(b"a", b"b").tobytes()
    assert not np.isin(first, normals(b"ab")).any()
    assert not np.isin(first, normals(b"a", b"c")).any()
    assert not np.isin(first, normals(b"a", b"b", rows=64, columns=128)).any()
    assert not np.isin(first, standard_normals(bytes(32), b"a", b"b", shape=(128, 64))).any()


def test_extreme_words_give_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"".join(word.to_bytes(8, "little") for word in (0, 1, 2**64 - 1))
    monkeypatch.setattr("secure_apfed.privacy.noise.keystream", lambda *_, length: stream)
    drawn = standard_normals(KEY, shape=(3,)).tolist()
    assert drawn == pytest.approx([-9.08, 9.08, 0.0], abs=0.01)


def test_an_empty_batch_needs_no_noise_and_a_short_key_is_refused() -> None:
    assert standard_normals(KEY, shape=(0, 8)).shape == (0, 8)
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 5"):
        standard_normals(b"short", shape=(1,))


def shares_of_coarse_numbers(guard: GaussianGuard, value: float) -> float:
    """How many of the released numbers are multiples of 2^-52, as every sum with 1.0 must be."""
    h_BD = torch.zeros(512, 64, dtype=torch.float64)
    h_BD[:, 0] = value
    z_B = guard.release(h_BD, step=0, rows=torch.arange(512))[:, 0] * 2.0**52
    return float((z_B == z_B.round()).double().mean())


@pytest.mark.parametrize(
    ("noise", "told_apart"), [("secret", False), ("reproducible_insecure", True)]
)
def test_low_bits_do_not_tell_what_the_noise_was_added_to(noise: Any, told_apart: bool) -> None:
    """Mironov 2012: a sum with 1 has no bits below those of 1, one with 0 has."""
    guard = GaussianGuard(clip=2.0, sigma=0.25, key=KEY, noise=noise)
    apart = shares_of_coarse_numbers(guard, 1.0) - shares_of_coarse_numbers(guard, 0.0)
    assert (apart > 0.5) is told_apart


@pytest.mark.parametrize("sigma", [1e-100, 0.3, 1.0, 2.0**20])
def test_the_grid_is_a_power_of_two_near_a_tenth_of_sigma(sigma: float) -> None:
    values = sigma * normals(b"grid").ravel()
    rounded = on_grid(values, sigma)
    grid = np.abs(rounded[rounded != 0]).min()
    assert sigma / 16 < grid <= sigma / 8
    assert np.log2(grid) == np.round(np.log2(grid))
    assert np.array_equal(rounded / grid, np.round(rounded / grid))
    assert np.abs(rounded - values).max() <= grid / 2
    assert scale_fits(rounded, sigma)


def test_numbers_beyond_the_grids_reach_stay_as_they_are() -> None:
    values = np.array([1e300, -1e300, 1.5e9, 0.0, 3.0])
    assert np.array_equal(on_grid(values, 1e-12), values)
    assert np.array_equal(on_grid(values, 5e-324), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_released_rows_and_updates_lie_on_the_grid(dtype: torch.dtype) -> None:
    h_BD = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.arange(32)
    guard = GaussianGuard(clip=1.0, sigma=3.0, key=KEY)
    z_BD = guard.release(h_BD, step=0, rows=rows).double() / 0.25
    updates = GradientGuard(clip=1.0, noise_multiplier=3.0, key=KEY)
    u_P = updates.release([h_BD], step=0, rows=rows) / 0.25
    for released in (z_BD, u_P):
        assert torch.equal(released, released.round())
        assert len(released.unique()) > 6


def exact_normals(word: int, near: float) -> list[Any]:
    """The two ends of the normals that a word's 63 bits stand for, to 160 bits."""
    ends = [mpmath.mpf(k) / 2**64 for k in (word >> 1, (word >> 1) + 1) if k]
    return [mpmath.findroot(lambda n, p=p: mpmath.ncdf(n) - p, near) for p in ends]


@pytest.mark.parametrize(("sigma", "value"), [(0.1, -1.0), (7.3, 0.3)])
def test_the_error_is_what_the_bound_is_derived_from(
    sigma: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    usual = rng.integers(0, 2**63, 60, dtype=np.uint64) * np.uint64(2)  # an even word is negative
    words = np.concatenate([usual, np.uint64(2) << np.arange(0, 60, 2, dtype=np.uint64)])
    monkeypatch.setattr(
        "secure_apfed.privacy.noise.keystream", lambda *_, length: words.astype("<u8").tobytes()
    )
    drawn = standard_normals(KEY, shape=words.shape)
    with mpmath.workprec(160):
        for word, normal, noisy in zip(words.tolist(), drawn, value + sigma * drawn, strict=True):
            bound = (
                1e-15 * abs(normal) + 2e-16 * (1 + abs(value) / sigma)
                + mpmath.mpf(2) ** -63 / mpmath.npdf(float(normal))
            )  # fmt: skip
            for exact in exact_normals(word, float(normal)):
                assert abs(value + sigma * exact - mpmath.mpf(float(noisy))) / sigma <= bound


HOSTILE = {
    "zeros": [0.0] * 8,
    "one-hot": [0.0] * 7 + [1e3],
    "huge": [1e30] * 8,
    "largest float32": [3.4e38] * 8,
    "huge and tiny": [1e30, 1e-30, -1e30, 0, 1e-45, 1, -1, 5],
    "subnormal": [1e-45] * 8,
    "on the sphere": [1 / 8**0.5] * 8,
    "just outside": [1.0000001 / 8**0.5] * 8,
    "negative": [-7.0] * 8,
}


def within(rows: torch.Tensor, bound: float) -> bool:
    """By squared norms without any rounding."""
    squares = (sum((Fraction(x) ** 2 for x in row), Fraction(0)) for row in rows.tolist())
    return all(square <= Fraction(bound) ** 2 for square in squares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hostile_rows_stay_within_the_bound(dtype: torch.dtype) -> None:
    h_BD = torch.tensor([*HOSTILE.values(), [0.1] * 8], dtype=dtype)
    for bound in (1e-6, 0.3, 1.0, 1e6):
        assert within(clip_rows(h_BD, bound).to(dtype), bound)
    assert within(clip_rows(torch.full((2, 300), 1e300, dtype=torch.float64), 1.0), 1.0)


@settings(max_examples=60, deadline=None)
@given(
    arrays("float32", (3, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from([1e-6, 0.7, 1.0, 3e5]),
)
def test_any_finite_row_stays_within_the_bound(values: Any, bound: float) -> None:
    assert within(clip_rows(torch.from_numpy(values), bound).float(), bound)


def test_a_long_row_keeps_its_direction_and_a_short_one_is_unchanged() -> None:
    clipped = clip_rows(torch.tensor([[3.0, 4.0]]), 1.0)
    assert torch.allclose(clipped, torch.tensor([[0.6, 0.8]], dtype=torch.float64), rtol=1e-6)
    assert clipped.norm() > 1 - 1e-6
    h_BD = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    h_BD = h_BD / h_BD.norm(dim=1, keepdim=True) * 0.99
    assert torch.equal(clip_rows(h_BD, 1.0).float(), h_BD)


def test_the_gradient_is_that_of_the_projection_and_finite_for_hostile_rows() -> None:
    h_BD = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h_BD[0] *= 0.01
    assert torch.autograd.gradcheck(lambda h: clip_rows(h, 1.0), (h_BD.requires_grad_(),))
    h_BD = torch.tensor(list(HOSTILE.values()), requires_grad=True)
    clip_rows(h_BD, 1.0).sum().backward()
    assert h_BD.grad is not None
    assert torch.isfinite(h_BD.grad).all()
    assert torch.equal(h_BD.grad[0], torch.ones(8))


def test_what_cannot_be_clipped_is_refused_and_empty_batches_pass() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        h_BD = torch.zeros(4, 3)
        h_BD[2, 1] = bad
        with pytest.raises(ModelError, match="row 2 of the representations is not finite"):
            clip_rows(h_BD, 1.0)
    of_type = (torch.float16, torch.bfloat16, torch.int64, torch.complex64)
    others = [torch.zeros(2, 2, dtype=dtype) for dtype in of_type]
    for other in (torch.zeros(3), torch.zeros(2, 2, 2), *others):
        with pytest.raises(LocalProtocolError, match="float32 or float64 matrix"):
            clip_rows(other, 1.0)
    for shape in ((0, 4), (3, 0)):
        assert clip_rows(torch.zeros(shape), 1.0).shape == shape
