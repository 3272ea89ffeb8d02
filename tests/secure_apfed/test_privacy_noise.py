from typing import Any

import mpmath  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pytest
import torch
from scipy import stats

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.privacy.dp_sgd import GradientGuard
from secure_apfed.privacy.guard import GaussianGuard
from secure_apfed.privacy.noise import on_grid, standard_normals

KEY = bytes(range(32))


def scale_fits(noise: np.ndarray, sigma: float) -> bool:
    """Whether the sum of squares lies within 5 deviations of what `sigma` would give."""
    return bool(abs((noise**2).sum() / sigma**2 - noise.size) < 5 * np.sqrt(2 * noise.size))


def normals(*context: bytes, rows: int = 128, columns: int = 64) -> np.ndarray:
    return standard_normals(KEY, *context, shape=(rows, columns))


@pytest.mark.parametrize(("claimed", "fits"), [(1, True), (2 / 3, False), (3 / 2, False)])
def test_only_the_right_scale_is_accepted(claimed: float, fits: bool) -> None:
    assert scale_fits(normals(b"scale"), claimed) is fits


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


@pytest.mark.parametrize(
    ("word", "value"),
    [(0x0000000000000000, -9.08), (0x0000000000000001, 9.08), (0xFFFFFFFFFFFFFFFF, 0.0)],
)
def test_extreme_words_give_finite_numbers(
    word: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = word.to_bytes(8, "little")
    monkeypatch.setattr("secure_apfed.privacy.noise.keystream", lambda *_, length: stream)
    assert standard_normals(KEY, shape=(1,))[0] == pytest.approx(value, abs=0.01)


def test_an_empty_batch_needs_no_noise() -> None:
    assert standard_normals(KEY, shape=(0, 8)).shape == (0, 8)


def test_a_short_key_is_refused() -> None:
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


@pytest.mark.parametrize("sigma", [1e-100, 1e-6, 0.3, 1.0, 7.0, 2.0**20, 1e12])
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


@pytest.mark.parametrize(("sigma", "value"), [(1.0, 0.7), (0.1, -1.0), (7.3, 0.3)])
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
