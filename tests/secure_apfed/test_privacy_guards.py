"""What every guard owes; noise of the stated law and grid; frozen rows; clipped rows."""

import copy
import math
import pickle
from fractions import Fraction
from typing import Any, Literal, get_args, get_origin

import mpmath  # type: ignore[import-untyped]  # it has no types
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError, ConfigError, ModelError
from secure_apfed.privacy.accountants import GaussianRelease, NoPrivacy
from secure_apfed.privacy.dp_sgd import GradientGuard
from secure_apfed.privacy.guard import (
    GUARDS,
    FrozenGaussianGuard,
    GaussianGuard,
    NoGuard,
    RepresentationGuard,
    make_guard,
)
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.noise import clip_rows, draw_standard_normals, round_to_grid
from secure_apfed.settings.privacy import GuardSettings

KEY = bytes(range(32))
ROWS = torch.arange(128)
STRENGTH: dict[str, dict[str, float]] = {"none": {}}


def settings_of(name: str, **more: object) -> GuardSettings:
    return GuardSettings.model_validate(
        {"mechanism": name, **STRENGTH.get(name, {"sigma": 0.5}), **more}
    )


def batch(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_named_guard(name: str) -> RepresentationGuard:
    return make_guard(settings_of(name), delta=1e-5, releases=5, key=KEY)


@pytest.fixture(params=sorted(GUARDS))
def guard(request: pytest.FixtureRequest) -> RepresentationGuard:
    return make_named_guard(request.param)


class TestEveryGuard:
    def test_every_mechanism_has_a_guard(self, guard: RepresentationGuard) -> None:
        parts = get_args(GuardSettings.model_fields["mechanism"].annotation)
        names = [name for part in parts if get_origin(part) is Literal for name in get_args(part)]
        assert set(names) == set(GUARDS) == {guard.name for guard in GUARDS.values()}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_shape_type_and_graph_are_kept(
        self, dtype: torch.dtype, guard: RepresentationGuard
    ) -> None:
        h_BD = batch(dtype=dtype).requires_grad_()
        z_BD = make_named_guard(guard.name).release(h_BD, step=0, rows=ROWS)
        assert (z_BD.shape, z_BD.dtype) == (h_BD.shape, dtype)
        z_BD.sum().backward()
        assert h_BD.grad is not None

    def test_what_it_keeps_makes_another_release_the_same(self, guard: RepresentationGuard) -> None:
        guard.release(batch(), step=0, rows=ROWS)
        again = make_named_guard(guard.name)
        again.load_tensors(guard.tensors())
        assert torch.equal(again.repeats(ROWS + 1), guard.repeats(ROWS + 1))
        assert again.count_charges(9) == guard.count_charges(9) <= 9
        rows = ROWS.flip(0) + 1
        first = guard.release(batch(1), step=1, rows=rows)
        assert torch.equal(again.release(batch(1), step=1, rows=rows), first)

    def test_unsafe_means_unbounded_sensitivity(self, guard: RepresentationGuard) -> None:
        assert guard.unsafe is math.isinf(guard.sensitivity())
        assert guard.unsafe is isinstance(guard.mechanism(), NoPrivacy)
        assert guard.unsafe is guard.describe_guarantee().startswith("no guarantee")

        norms = guard.release(batch() * 100, step=0, rows=ROWS).norm(dim=1)
        assert float(norms.max()) <= guard.largest_norm(64)

    @pytest.mark.parametrize(
        ("h_BD", "step", "rows", "message"),
        [
            (torch.zeros(3), 0, torch.arange(3), r"matrix, one row a person.*\(3,\)"),
            (torch.zeros(3, 2).half(), 0, torch.arange(3), "got torch.float16"),
            (torch.zeros(3, 2), 0, torch.arange(4), r"the 3 representations.*\(4,\)"),
            (torch.zeros(3, 2), 0, torch.zeros(3), "int64 positions, got torch.float32"),
            (torch.zeros(3, 2), -1, torch.arange(3), "a step counts from 0, got -1"),
        ],
    )
    def test_wrong_arguments_are_named(
        self,
        h_BD: torch.Tensor,
        step: int,
        rows: torch.Tensor,
        message: str,
        guard: RepresentationGuard,
    ) -> None:
        with pytest.raises(LocalProtocolError, match=message):
            guard.release(h_BD, step=step, rows=rows)


def test_without_a_guard_it_sends_what_it_got() -> None:
    h_BD = batch()
    assert NoGuard().release(h_BD, step=0, rows=ROWS) is h_BD


class TestGaussianGuard:
    @pytest.fixture
    def gaussian(self) -> GaussianGuard:
        return GaussianGuard(clip=1.5, sigma=0.5, key=KEY)

    def test_what_it_adds_has_the_stated_scale(self, gaussian: GaussianGuard) -> None:
        h_BD = batch(dtype=torch.float64) * 3
        added = (gaussian.release(h_BD, step=0, rows=ROWS) - clip_rows(h_BD, 1.5)).numpy()
        fits = [scale_fits(added, claimed * gaussian.sigma) for claimed in (1, 2 / 3, 3 / 2)]
        assert fits == [True, False, False]
        assert gaussian.sensitivity() == 3.0
        assert gaussian.mechanism() == GaussianRelease(noise_multiplier=0.5 / 3)

    def noise(
        self, guard: GaussianGuard, h_BD: torch.Tensor, step: int, rows: torch.Tensor = ROWS
    ) -> torch.Tensor:
        return guard.release(h_BD, step=step, rows=rows) - clip_rows(h_BD, guard.clip)

    def is_correlated(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        stacked = torch.stack([first.flatten(), second.flatten()])
        return abs(float(torch.corrcoef(stacked)[0, 1])) > 5 / math.sqrt(first.numel())

    def test_steps_rows_and_keys_have_independent_noise(self, gaussian: GaussianGuard) -> None:
        h_BD = batch(dtype=torch.float64)
        first = self.noise(gaussian, h_BD, 0)
        other = GaussianGuard(clip=1.5, sigma=0.5, key=bytes(32))
        assert self.is_correlated(first, self.noise(gaussian, h_BD, 0))
        assert not self.is_correlated(first, self.noise(gaussian, h_BD, 1))
        assert not self.is_correlated(first, self.noise(gaussian, h_BD, 0, ROWS.flip(0)))
        assert not self.is_correlated(first, self.noise(other, h_BD, 0))
        changed = h_BD.clone()
        changed[5, 3] += 1e-9
        assert not self.is_correlated(first, self.noise(gaussian, changed, 0))

    def test_reproducible_noise_depends_on_the_step_and_not_on_content(self) -> None:
        guard = GaussianGuard(clip=1.5, sigma=0.5, key=KEY, noise="reproducible_insecure")
        h_BD = batch(dtype=torch.float64)
        other = batch(1, dtype=torch.float64)
        assert torch.allclose(self.noise(guard, h_BD, 0), self.noise(guard, other, 0), atol=1e-12)
        assert not self.is_correlated(self.noise(guard, h_BD, 0), self.noise(guard, h_BD, 1))
        assert "does not know the run's seed" in guard.describe_guarantee()

    def test_the_key_is_in_no_text_and_no_pickle(self, gaussian: GaussianGuard) -> None:
        usual = "row-release guarantee, encoder held fixed"
        assert gaussian.describe_guarantee() == usual
        once = f"{usual}; each row is noised once, scaled, and sent unchanged ever after"
        assert frozen().describe_guarantee() == once
        for guard in (gaussian, frozen()):
            name = type(guard).__name__
            assert repr(guard) == f"{name}(clip=1.5, sigma=0.5, noise='secret')"
        for serialise in (pickle.dumps, copy.deepcopy):
            with pytest.raises(LocalProtocolError, match="never serialised"):
                serialise(gaussian)

    def test_bad_strengths_and_a_short_key_are_refused(self) -> None:
        with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 1"):
            GaussianGuard(clip=1, sigma=1, key=b"x")

    @pytest.mark.parametrize(
        ("clip", "sigma", "message"),
        [
            (0, 1, "clip lies in 1e-06..1e[+]06, got 0"),
            (math.nan, 1, "clip lies in .* got nan"),
            (1, 0, "sigma is a positive number, got 0; use NoGuard"),
            (1, math.inf, "sigma is a positive number, got inf"),
        ],
    )
    def test_bad_strengths_are_refused(self, clip: float, sigma: float, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            GaussianGuard(clip=clip, sigma=sigma, key=KEY)


class TestSettings:
    def test_sigma_is_calibrated_for_the_planned_releases(self) -> None:
        settings = GuardSettings(mechanism="gaussian", clip=0.5, epsilon=8.0)
        guard = make_guard(settings, delta=1e-5, releases=50, key=KEY)
        assert isinstance(guard, GaussianGuard)
        assert guard.sigma == pytest.approx(4.24, abs=0.005)
        frozen = make_guard(settings_of("frozen_gaussian"), delta=1e-5, releases=9, key=KEY)
        assert frozen.count_charges(9) == 1
        with pytest.raises(ConfigError, match="at least 1 planned release, got 0"):
            make_guard(settings, delta=1e-5, releases=0, key=KEY)
        seeded = settings_of("gaussian", noise="reproducible_insecure")
        told = make_guard(seeded, delta=1e-5, releases=1, key=KEY).describe_guarantee()
        assert "does not know the run's seed" in told

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"mechanism": "none", "sigma": 1}, "guard none adds no noise, but sigma was given"),
            ({"mechanism": "none", "epsilon": 1}, "but epsilon was given"),
            ({"mechanism": "gaussian"}, "exactly one of sigma and epsilon, got neither"),
            ({"mechanism": "gaussian", "sigma": 1, "epsilon": 1}, "got sigma and epsilon"),
            ({"mechanism": "gaussian", "sigma": 0}, "greater than 0"),
            ({"mechanism": "gaussian", "epsilon": math.inf}, "finite number"),
            ({"mechanism": "gaussian", "sigma": 1, "clip": 0}, "greater than or equal to 0.000001"),
            ({"mechanism": "laplace"}, "'none'"),
            ({}, "mechanism\n  Field required"),  # no protection is a choice, and never a default
            ({"mechanism": "none", "sigm": 1}, "Extra inputs"),
        ],
    )
    def test_bad_settings_say_what_is_wrong(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            GuardSettings.model_validate(fields)


CLIP = 1.5
SIGMA = 0.5


def frozen(key: bytes = KEY) -> FrozenGaussianGuard:
    return FrozenGaussianGuard(clip=CLIP, sigma=SIGMA, key=key)


def some(seed: int, rows: int = 4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def positions(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_sent_unchanged_in_whatever_batch_it_comes_again(dtype: torch.dtype) -> None:
    guard = frozen()
    rows = positions(3, 9, 0, 5)
    h_BD = some(0, dtype=dtype)
    first = guard.release(h_BD, step=0, rows=rows)
    plain = GaussianGuard(clip=CLIP, sigma=SIGMA, key=KEY).release(h_BD, step=0, rows=rows)
    assert torch.equal(first, plain * guard.compute_scale(6))
    assert guard.compute_scale(6) == pytest.approx(1 / math.sqrt(1 + 6 * (SIGMA / CLIP) ** 2))
    again = guard.release(some(1, dtype=dtype), step=7, rows=positions(5, 1, 3, 9))
    assert torch.equal(again[[0, 2, 3]], first[[3, 0, 1]])
    assert again.dtype == dtype
    assert guard.repeats(positions(1, 2, 0)).tolist() == [True, False, True]
    third = guard.release(some(2, dtype=dtype), step=8, rows=positions(1, 5, 9, 3))
    assert torch.equal(third, again[[1, 0, 3, 2]])
    with torch.no_grad():
        twice = guard.release(some(3, dtype=dtype), step=9, rows=positions(2, 3, 2, 3))
    assert torch.equal(twice[:2], twice[2:])
    assert torch.equal(twice[1], first[0])


@pytest.mark.parametrize("kind", [GaussianGuard, FrozenGaussianGuard])
def test_the_gradient_is_that_of_todays_clipped_row(kind: type[GaussianGuard]) -> None:
    """Noise, and a row that was frozen before, are constants to autograd."""
    guard = kind(clip=CLIP, sigma=SIGMA, key=KEY)
    rows = positions(0, 1, 2, 3)
    weights = some(5)
    guard.release(some(0), step=0, rows=rows)
    today = some(1).requires_grad_()
    clipped = some(1).requires_grad_()
    (guard.release(today, step=1, rows=rows) * weights).sum().backward()
    (clip_rows(clipped, CLIP) * weights).sum().backward()
    assert today.grad is not None
    assert clipped.grad is not None
    assert torch.equal(today.grad, clipped.grad)


def test_loading_replaces_what_was_there_and_an_empty_batch_freezes_nothing() -> None:
    guard = frozen()
    guard.release(some(0), step=0, rows=positions(0, 1, 2, 3))
    guard.load_tensors({})
    assert not guard.repeats(positions(0)).any()
    assert guard.release(some(0)[:0], step=0, rows=positions()).shape == (0, 6)
    assert guard.tensors() == {}


class TestCheckpoints:
    @pytest.mark.parametrize(
        "tensors",
        [
            {"rows": torch.arange(2)},
            {"z": torch.zeros(2, 3)},
            {"rows": torch.arange(2), "z": torch.zeros(3, 3)},
            {"rows": torch.arange(2.0), "z": torch.zeros(2, 3)},
            {"rows": torch.tensor([1, 1]), "z": torch.zeros(2, 3)},
            {"rows": torch.tensor([-1, 1]), "z": torch.zeros(2, 3)},
            {"rows": torch.arange(2), "z": torch.zeros(2)},
        ],
        ids=range(7),
    )
    def test_a_damaged_checkpoint_is_refused(self, tensors: dict[str, torch.Tensor]) -> None:
        with pytest.raises(CheckpointError, match="frozen rows are positions and as many rows"):
            frozen().load_tensors(tensors)

    def test_a_guard_without_memory_refuses_frozen_rows(self) -> None:
        guard = GaussianGuard(clip=CLIP, sigma=SIGMA, key=KEY)
        guard.load_tensors(guard.tensors())
        with pytest.raises(CheckpointError, match=r"keeps nothing, .* holds \['z'\]"):
            guard.load_tensors({"z": torch.zeros(1, 2)})


class TestAccount:
    def ledger(self, guard: FrozenGaussianGuard, budget: float | None = None) -> PrivacyLedger:
        return PrivacyLedger(guard.mechanism(), delta=1e-5, budget=budget, rows=12, log=None)

    def send(
        self, guard: FrozenGaussianGuard, ledger: PrivacyLedger, step: int, *rows: int, seed: int
    ) -> None:
        repeats = guard.repeats(positions(*rows))
        z_BD = guard.release(some(seed, len(rows)), step=step, rows=positions(*rows))
        digest = z_BD.numpy().tobytes()
        ledger.charge(step=step, rows=positions(*rows), digest=digest, repeats=repeats)

    def test_rows_noised_anew_after_a_lost_checkpoint_are_charged_again(self) -> None:
        guard = frozen()
        ledger = self.ledger(guard)
        self.send(guard, ledger, 0, 0, 1, seed=0)
        self.send(guard, ledger, 1, 1, 2, seed=1)
        self.send(frozen(), ledger, 2, 1, 3, seed=2)
        assert ledger.get_privacy_spent().releases == 2

    def test_a_repeat_that_was_never_charged_is_charged(self) -> None:
        """As when a party goes on after its budget stopped the first release."""
        guard = frozen()
        ledger = self.ledger(guard)
        guard.release(some(0), step=0, rows=positions(0, 1, 2, 3))
        self.send(guard, ledger, 1, 0, 1, seed=1)
        assert ledger.get_privacy_spent().releases == 1
        self.send(guard, ledger, 2, 0, 1, seed=2)
        assert ledger.get_privacy_spent().releases == 1

    @pytest.mark.parametrize(
        "repeats", [torch.tensor([True]), torch.tensor([1, 0])], ids=["one", "numbers"]
    )
    def test_repeats_of_another_kind_are_refused(self, repeats: torch.Tensor) -> None:
        rows = positions(0, 1)
        with pytest.raises(LocalProtocolError, match=r"repeats are bool of shape \(2,\)"):
            self.ledger(frozen()).charge(step=0, rows=rows, digest=b"z", repeats=repeats)


def test_another_representation_under_the_same_guard_is_refused() -> None:
    guard = frozen()
    rows = positions(0, 1, 2, 3)
    guard.release(some(0), step=0, rows=rows)
    with pytest.raises(LocalProtocolError, match=r"6 numbers of torch\.float64, got 5 of"):
        guard.release(some(0)[:, :5], step=1, rows=rows)
    with pytest.raises(LocalProtocolError, match=r"got 6 of torch\.float32"):
        guard.release(some(0).float(), step=1, rows=rows + 2)
    assert guard.repeats(rows + 2).tolist() == [True, True, False, False]


def scale_fits(noise: np.ndarray, sigma: float) -> bool:
    """Tell whether the sum of squares lies within 5 deviations of what `sigma` would give."""
    return bool(abs((noise**2).sum() / sigma**2 - noise.size) < 5 * np.sqrt(2 * noise.size))


def normals(*context: bytes, rows: int = 128, columns: int = 64) -> np.ndarray:
    return draw_standard_normals(KEY, *context, shape=(rows, columns))


def test_the_distribution_is_normal_and_not_merely_of_that_scale() -> None:
    sample = normals(b"shape", rows=1024).ravel()
    assert stats.kstest(sample, "norm").pvalue > 0.01
    uniform = (np.random.default_rng(0).random(sample.size) - 0.5) * np.sqrt(12)
    assert stats.kstest(uniform, "norm").pvalue < 1e-9
    assert abs(stats.skew(sample)) < 5 * np.sqrt(6 / sample.size)
    assert abs(stats.kurtosis(sample)) < 5 * np.sqrt(24 / sample.size)


def test_it_is_a_function_of_key_context_and_shape() -> None:
    first = normals(b"a", b"b")
    assert first.tobytes() == normals(b"a", b"b").tobytes()
    assert not np.isin(first, normals(b"ab")).any()
    assert not np.isin(first, normals(b"a", b"c")).any()
    assert not np.isin(first, normals(b"a", b"b", rows=64, columns=128)).any()
    assert not np.isin(first, draw_standard_normals(bytes(32), b"a", b"b", shape=(128, 64))).any()


def test_extreme_words_give_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"".join(word.to_bytes(8, "little") for word in (0, 1, 2**64 - 1))
    monkeypatch.setattr("secure_apfed.privacy.noise.keystream", lambda *_, length: stream)
    drawn = draw_standard_normals(KEY, shape=(3,)).tolist()
    assert drawn == pytest.approx([-9.08, 9.08, 0.0], abs=0.01)


def test_an_empty_batch_needs_no_noise_and_a_short_key_is_refused() -> None:
    assert draw_standard_normals(KEY, shape=(0, 8)).shape == (0, 8)
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 5"):
        draw_standard_normals(b"short", shape=(1,))


def shares_of_coarse_numbers(guard: GaussianGuard, value: float) -> float:
    """Return the share of released numbers that are multiples of 2^-52, as sums with 1.0 are."""
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
    rounded = round_to_grid(values, sigma)
    grid = np.abs(rounded[rounded != 0]).min()
    assert sigma / 16 < grid <= sigma / 8
    assert np.log2(grid) == np.round(np.log2(grid))
    assert np.array_equal(rounded / grid, np.round(rounded / grid))
    assert np.abs(rounded - values).max() <= grid / 2
    assert scale_fits(rounded, sigma)


def test_numbers_beyond_the_grids_reach_stay_as_they_are() -> None:
    values = np.array([1e300, -1e300, 1.5e9, 0.0, 3.0])
    assert np.array_equal(round_to_grid(values, 1e-12), values)
    assert np.array_equal(round_to_grid(values, 5e-324), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_released_rows_and_updates_lie_on_the_grid(dtype: torch.dtype) -> None:
    h_BD = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.arange(32)
    guard = GaussianGuard(clip=1.0, sigma=3.0, key=KEY)
    z_BD = guard.release(h_BD, step=0, rows=rows).double() / 0.25
    updates = GradientGuard(clip=1.0, noise_multiplier=3.0, key=KEY)
    u_P = updates.release([h_BD], step=0, rows=rows) / 0.25
    assert torch.equal(z_BD, z_BD.round())
    assert torch.equal(u_P, u_P.round())
    assert len(z_BD.unique()) > 6
    assert len(u_P.unique()) > 6


def test_no_row_of_few_numbers_is_released_as_zero() -> None:
    """The contract refuses it, and one in 25 would be."""
    guard = GaussianGuard(clip=1.0, sigma=20.0, key=KEY)
    rows = torch.arange(4000)
    z_BD = guard.release(torch.zeros(4000, 1), step=0, rows=rows)
    assert z_BD.any(dim=1).all()
    assert (z_BD[:, 0] == 2.0).double().mean() > (z_BD[:, 0] == -2.0).double().mean()


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
    drawn = draw_standard_normals(KEY, shape=words.shape)
    with mpmath.workprec(160):
        for word, normal, noisy in zip(words.tolist(), drawn, value + sigma * drawn, strict=True):
            bound = (
                1e-15 * abs(normal)
                + 2e-16 * (1 + abs(value) / sigma)
                + mpmath.mpf(2) ** -63 / mpmath.npdf(float(normal))
            )
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
    squares = (sum((Fraction(x) ** 2 for x in row), Fraction(0)) for row in rows.tolist())
    return all(square <= Fraction(bound) ** 2 for square in squares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hostile_rows_stay_within_the_bound(dtype: torch.dtype) -> None:
    assert within(clip_rows(torch.full((2, 300), 1e300, dtype=torch.float64), 1.0), 1.0)


@pytest.mark.parametrize("bound", [1e-6, 0.3, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hostile_rows_stay_within_any_bound(bound: float, dtype: torch.dtype) -> None:
    h_BD = torch.tensor([*HOSTILE.values(), [0.1] * 8], dtype=dtype)
    assert within(clip_rows(h_BD, bound).to(dtype), bound)


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_clipped(bad: float) -> None:
    h_BD = torch.zeros(4, 3)
    h_BD[2, 1] = bad
    with pytest.raises(ModelError, match="row 2 of the representations is not finite"):
        clip_rows(h_BD, 1.0)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3),
        torch.zeros(2, 2, 2),
        *(
            torch.zeros(2, 2, dtype=dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.complex64)
        ),
    ],
    ids=lambda other: f"{other.dtype} {other.ndim}",
)
def test_what_is_no_matrix_of_floats_is_not_clipped(other: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="float32 or float64 matrix"):
        clip_rows(other, 1.0)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_empty_batches_pass(shape: tuple[int, int]) -> None:
    assert clip_rows(torch.zeros(shape), 1.0).shape == shape


def test_frozen_rows_keep_the_order_of_their_first_release() -> None:
    guard = FrozenGaussianGuard(clip=1.0, sigma=2.0, key=KEY)
    generator = torch.Generator().manual_seed(0)
    released: dict[int, torch.Tensor] = {}
    for step in range(40):
        rows = torch.randint(0, 3**step % 5000 + 1, (37,), generator=generator)
        expected = torch.tensor([row in released for row in rows.tolist()])
        assert torch.equal(guard.repeats(rows), expected)
        z_BD = guard.release(torch.randn(37, 3, generator=generator), step=step, rows=rows)
        for row, z in zip(rows.tolist(), z_BD, strict=True):
            # autograd adds the clipped row and takes it off again
            torch.testing.assert_close(z, released.setdefault(row, z), rtol=0, atol=1e-5)
    state = guard.tensors()
    assert state["rows"].tolist() == list(released)
    torch.testing.assert_close(state["z"], torch.stack([*released.values()]), rtol=0, atol=1e-5)
