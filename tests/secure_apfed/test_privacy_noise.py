import numpy as np
import pytest
from scipy import stats

from protocols.errors import LocalProtocolError
from secure_apfed.privacy.noise import standard_normals

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
