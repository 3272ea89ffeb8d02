"""What every guard owes, and what each does beyond: noise of the stated scale, frozen rows."""

import copy
import doctest
import math
import pickle
from typing import get_args

import numpy as np
import pytest
import torch

import secure_apfed.privacy.guard
from apfed_experiments.audit.release import audit_release
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.privacy.accountants import GaussianRelease, NoPrivacy
from secure_apfed.privacy.guard import (
    GUARDS,
    FrozenGaussianGuard,
    GaussianGuard,
    NoGuard,
    RepresentationGuard,
    make_guard,
)
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.noise import clip_rows
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


def made(name: str) -> RepresentationGuard:
    return make_guard(settings_of(name), delta=1e-5, releases=5, key=KEY)


@pytest.fixture(params=sorted(GUARDS))
def guard(request: pytest.FixtureRequest) -> RepresentationGuard:
    return made(request.param)


class TestEveryGuard:
    def test_shape_type_and_graph_are_kept(self, guard: RepresentationGuard) -> None:
        names = get_args(GuardSettings.model_fields["mechanism"].annotation)
        assert set(names) == set(GUARDS) == {guard.name for guard in GUARDS.values()}
        for dtype in (torch.float32, torch.float64):
            h_BD = batch(dtype=dtype).requires_grad_()
            z_BD = made(guard.name).release(h_BD, step=0, rows=ROWS)
            assert (z_BD.shape, z_BD.dtype) == (h_BD.shape, dtype)
            z_BD.sum().backward()
            assert h_BD.grad is not None

    def test_what_it_keeps_makes_another_release_the_same(self, guard: RepresentationGuard) -> None:
        guard.release(batch(), step=0, rows=ROWS)
        again = made(guard.name)
        again.load_tensors(guard.tensors())
        assert torch.equal(again.repeats(ROWS + 1), guard.repeats(ROWS + 1))
        assert again.planned(9) == guard.planned(9) <= 9
        rows = ROWS.flip(0) + 1
        first = guard.release(batch(1), step=1, rows=rows)
        assert torch.equal(again.release(batch(1), step=1, rows=rows), first)

    def test_the_same_release_gives_the_same_bytes(self, guard: RepresentationGuard) -> None:
        first = guard.release(batch(), step=3, rows=ROWS)
        assert torch.equal(first, made(guard.name).release(batch(), step=3, rows=ROWS))

    def test_unsafe_means_unbounded_sensitivity(self, guard: RepresentationGuard) -> None:
        assert guard.unsafe is math.isinf(guard.sensitivity())
        assert guard.unsafe is isinstance(guard.mechanism(), NoPrivacy)
        assert guard.unsafe is guard.statement().startswith("no guarantee")

        norms = guard.release(batch() * 100, step=0, rows=ROWS).norm(dim=1)
        assert float(norms.max()) <= guard.largest_norm(64)

    def test_wrong_arguments_are_named(self, guard: RepresentationGuard) -> None:
        for h_BD, step, rows, message in (
            (torch.zeros(3), 0, torch.arange(3), r"matrix, one row a person.*\(3,\)"),
            (torch.zeros(3, 2).half(), 0, torch.arange(3), "got torch.float16"),
            (torch.zeros(3, 2), 0, torch.arange(4), r"the 3 representations.*\(4,\)"),
            (torch.zeros(3, 2), 0, torch.zeros(3), "int64 positions, got torch.float32"),
            (torch.zeros(3, 2), -1, torch.arange(3), "a step counts from 0, got -1"),
        ):
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
        for claimed in (1, 2 / 3, 3 / 2):
            chi = (added**2).sum() / (claimed * gaussian.sigma) ** 2
            assert bool(abs(chi - added.size) < 5 * np.sqrt(2 * added.size)) is (claimed == 1)
        assert gaussian.sensitivity() == 3.0
        assert gaussian.mechanism() == GaussianRelease(noise_multiplier=0.5 / 3)

    def test_noise_is_a_constant_to_autograd(self, gaussian: GaussianGuard) -> None:
        weights = batch(1)
        noisy, clipped = batch().requires_grad_(), batch().requires_grad_()
        (gaussian.release(noisy, step=0, rows=ROWS) * weights).sum().backward()
        (clip_rows(clipped, 1.5).float() * weights).sum().backward()
        assert noisy.grad is not None
        assert clipped.grad is not None
        assert torch.equal(noisy.grad, clipped.grad)

    def noise(
        self, guard: GaussianGuard, h_BD: torch.Tensor, step: int, rows: torch.Tensor = ROWS
    ) -> torch.Tensor:
        return guard.release(h_BD, step=step, rows=rows) - clip_rows(h_BD, guard.clip)

    def correlated(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        stacked = torch.stack([first.flatten(), second.flatten()])
        return abs(float(torch.corrcoef(stacked)[0, 1])) > 5 / math.sqrt(first.numel())

    def test_steps_rows_and_keys_have_independent_noise(self, gaussian: GaussianGuard) -> None:
        h_BD = batch(dtype=torch.float64)
        first = self.noise(gaussian, h_BD, 0)
        other = GaussianGuard(clip=1.5, sigma=0.5, key=bytes(32))
        assert self.correlated(first, self.noise(gaussian, h_BD, 0))
        assert not self.correlated(first, self.noise(gaussian, h_BD, 1))
        assert not self.correlated(first, self.noise(gaussian, h_BD, 0, ROWS.flip(0)))
        assert not self.correlated(first, self.noise(other, h_BD, 0))
        changed = h_BD.clone()
        changed[5, 3] += 1e-9
        assert not self.correlated(first, self.noise(gaussian, changed, 0))

    def test_reproducible_noise_depends_on_the_step_and_not_on_content(self) -> None:
        guard = GaussianGuard(clip=1.5, sigma=0.5, key=KEY, noise="reproducible_insecure")
        h_BD, other = batch(dtype=torch.float64), batch(1, dtype=torch.float64)
        assert torch.allclose(self.noise(guard, h_BD, 0), self.noise(guard, other, 0), atol=1e-12)
        assert not self.correlated(self.noise(guard, h_BD, 0), self.noise(guard, h_BD, 1))
        assert "does not know the run's seed" in guard.statement()

    def test_the_key_is_in_no_text_and_no_pickle(self, gaussian: GaussianGuard) -> None:
        assert gaussian.statement() == "row-release guarantee, encoder held fixed"
        assert repr(gaussian) == "GaussianGuard(clip=1.5, sigma=0.5, noise='secret')"
        for serialise in (pickle.dumps, copy.deepcopy):
            with pytest.raises(LocalProtocolError, match="never serialised"):
                serialise(gaussian)

    def test_bad_strengths_and_a_short_key_are_refused(self) -> None:
        for clip, sigma, message in (
            (0, 1, "clip lies in 1e-06..1e[+]06, got 0"),
            (math.nan, 1, "clip lies in .* got nan"),
            (1, 0, "sigma is a positive number, got 0; use NoGuard"),
            (1, math.inf, "sigma is a positive number, got inf"),
        ):
            with pytest.raises(ConfigError, match=message):
                GaussianGuard(clip=clip, sigma=sigma, key=KEY)
        with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 1"):
            GaussianGuard(clip=1, sigma=1, key=b"x")

    def test_the_examples_run(self) -> None:
        assert doctest.testmod(secure_apfed.privacy.guard).failed == 0


class TestSettings:
    def test_sigma_is_calibrated_for_the_planned_releases(self) -> None:
        settings = GuardSettings(mechanism="gaussian", clip=0.5, epsilon=8.0)
        guard = make_guard(settings, delta=1e-5, releases=50, key=KEY)
        assert isinstance(guard, GaussianGuard)
        assert guard.sigma == pytest.approx(4.24, abs=0.005)

    def test_no_planned_release_cannot_be_calibrated(self) -> None:
        with pytest.raises(ConfigError, match="at least 1 planned release, got 0"):
            make_guard(
                settings_of("gaussian", sigma=None, epsilon=1), delta=1e-5, releases=0, key=KEY
            )

    def test_bad_settings_say_what_is_wrong(self) -> None:
        for fields, message in (
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
        ):
            with pytest.raises(ValueError, match=message):
                GuardSettings.model_validate(fields)

    def test_where_the_noise_comes_from_reaches_the_guard(self) -> None:
        settings = settings_of("gaussian", noise="reproducible_insecure")
        told = make_guard(settings, delta=1e-5, releases=1, key=KEY).statement()
        assert "does not know the run's seed" in told


CLIP, SIGMA = 1.5, 0.5


def frozen(key: bytes = KEY) -> FrozenGaussianGuard:
    return FrozenGaussianGuard(clip=CLIP, sigma=SIGMA, key=key)


def some(seed: int, rows: int = 4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def positions(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_sent_unchanged_in_whatever_batch_it_comes_again(dtype: torch.dtype) -> None:
    guard = frozen()
    first = guard.release(some(0, dtype=dtype), step=0, rows=positions(3, 9, 0, 5))
    again = guard.release(some(1, dtype=dtype), step=7, rows=positions(5, 1, 3, 9))
    assert torch.equal(again[[0, 2, 3]], first[[3, 0, 1]])
    assert again.dtype == dtype
    assert guard.repeats(positions(1, 2, 0)).tolist() == [True, False, True]
    third = guard.release(some(2, dtype=dtype), step=8, rows=positions(1, 5, 9, 3))
    assert torch.equal(third, again[[1, 0, 3, 2]])


def test_a_first_release_is_clipped_and_noised_as_by_the_gaussian_guard() -> None:
    rows, h_BD = positions(0, 1, 2, 3), some(0)
    plain = GaussianGuard(clip=CLIP, sigma=SIGMA, key=KEY).release(h_BD, step=0, rows=rows)
    assert torch.equal(frozen().release(h_BD, step=0, rows=rows), plain)


def test_frozen_noise_has_the_stated_scale_and_averaging_does_not_remove_it() -> None:
    guard, rows = frozen(), torch.arange(2000)
    h_BD = some(0, 2000)
    mean = sum(guard.release(h_BD, step=step, rows=rows) for step in range(10)) / 10
    added = mean - clip_rows(h_BD, CLIP)
    for claimed in (1, 2 / 3, 3 / 2):
        chi = float(((added / (claimed * SIGMA)) ** 2).sum())
        assert (abs(chi - added.numel()) < 5 * (2 * added.numel()) ** 0.5) is (claimed == 1)
    z_BD = frozen().release(some(0), step=0, rows=positions(2, 8, 2, 8))
    assert torch.equal(z_BD[:2], z_BD[2:])


def test_the_gradient_goes_through_to_todays_clipped_row() -> None:
    guard, rows, weights = frozen(), positions(0, 1, 2, 3), some(5)
    guard.release(some(0), step=0, rows=rows)
    today, clipped = some(1).requires_grad_(), some(1).requires_grad_()
    (guard.release(today, step=1, rows=rows) * weights).sum().backward()
    (clip_rows(clipped, CLIP) * weights).sum().backward()
    assert today.grad is not None
    assert clipped.grad is not None
    assert torch.equal(today.grad, clipped.grad)


def test_a_release_without_gradients_still_freezes() -> None:
    guard = frozen()
    with torch.no_grad():
        first = guard.release(some(0), step=0, rows=positions(0, 1, 2, 3))
    again = guard.release(some(1).requires_grad_(), step=1, rows=positions(0, 1, 2, 3))
    assert torch.equal(again, first)
    assert again.requires_grad


def test_loading_replaces_what_was_there_and_an_empty_batch_freezes_nothing() -> None:
    guard = frozen()
    guard.release(some(0), step=0, rows=positions(0, 1, 2, 3))
    guard.load_tensors({})
    assert not guard.repeats(positions(0)).any()
    assert guard.release(some(0)[:0], step=0, rows=positions()).shape == (0, 6)
    assert guard.tensors() == {}


class TestCheckpoints:
    def test_a_damaged_checkpoint_is_refused(self) -> None:
        for tensors in (
            {"rows": torch.arange(2)},
            {"z": torch.zeros(2, 3)},
            {"rows": torch.arange(2), "z": torch.zeros(3, 3)},
            {"rows": torch.arange(2.0), "z": torch.zeros(2, 3)},
            {"rows": torch.tensor([1, 1]), "z": torch.zeros(2, 3)},
            {"rows": torch.tensor([-1, 1]), "z": torch.zeros(2, 3)},
            {"rows": torch.arange(2), "z": torch.zeros(2)},
        ):
            with pytest.raises(CheckpointError, match="frozen rows are positions and as many rows"):
                frozen().load_tensors(tensors)

    def test_a_guard_without_memory_refuses_frozen_rows(self) -> None:
        guard = GaussianGuard(clip=CLIP, sigma=SIGMA, key=KEY)
        guard.load_tensors(guard.tensors())
        with pytest.raises(CheckpointError, match=r"keeps nothing, .* holds \['z'\]"):
            guard.load_tensors({"z": torch.zeros(1, 2)})


class TestAccount:
    """The frozen guard with the ledger, as a party uses them."""

    def ledger(self, guard: FrozenGaussianGuard, budget: float | None = None) -> PrivacyLedger:
        return PrivacyLedger(guard.mechanism(), delta=1e-5, budget=budget, rows=12, log=None)

    def send(
        self, guard: FrozenGaussianGuard, ledger: PrivacyLedger, step: int, *rows: int, seed: int
    ) -> None:
        repeats = guard.repeats(positions(*rows))
        z_BD = guard.release(some(seed, len(rows)), step=step, rows=positions(*rows))
        digest = z_BD.numpy().tobytes()
        ledger.charge(step=step, rows=positions(*rows), digest=digest, repeats=repeats)

    def test_a_calibrated_run_of_many_epochs_costs_one_release(self) -> None:
        settings = GuardSettings(mechanism="frozen_gaussian", epsilon=4.0)
        guard = make_guard(settings, delta=1e-5, releases=50, key=KEY)
        assert isinstance(guard, FrozenGaussianGuard)
        assert guard.planned(50) == 1
        ledger = self.ledger(guard, budget=4.0)
        for step in range(50):
            self.send(guard, ledger, step, 0, 1, 2 + step % 10, seed=step)
        assert ledger.spent().releases == 1
        assert ledger.spent().epsilon_x == pytest.approx(4.0, rel=1e-5)

    def test_rows_noised_anew_after_a_lost_checkpoint_are_charged_again(self) -> None:
        guard = frozen()
        ledger = self.ledger(guard)
        self.send(guard, ledger, 0, 0, 1, seed=0)
        self.send(guard, ledger, 1, 1, 2, seed=1)
        self.send(frozen(), ledger, 2, 1, 3, seed=2)
        assert ledger.spent().releases == 2

    def test_the_same_steps_played_again_are_free(self) -> None:
        guard = frozen()
        ledger = self.ledger(guard)
        self.send(guard, ledger, 0, 0, 1, seed=0)
        checkpoint = guard.tensors()
        self.send(guard, ledger, 1, 1, 2, seed=1)
        resumed = frozen()
        resumed.load_tensors(checkpoint)
        self.send(resumed, ledger, 1, 1, 2, seed=1)
        assert ledger.spent().releases == 1

    def test_a_repeat_that_was_never_charged_is_charged(self) -> None:
        """As when a party goes on after its budget stopped the first release."""
        guard = frozen()
        ledger = self.ledger(guard)
        guard.release(some(0), step=0, rows=positions(0, 1, 2, 3))
        self.send(guard, ledger, 1, 0, 1, seed=1)
        assert ledger.spent().releases == 1
        self.send(guard, ledger, 2, 0, 1, seed=2)
        assert ledger.spent().releases == 1

    def test_repeats_of_another_kind_are_refused(self) -> None:
        rows = positions(0, 1)
        for repeats in (torch.tensor([True]), torch.tensor([1, 0])):
            with pytest.raises(LocalProtocolError, match=r"repeats are bool of shape \(2,\)"):
                self.ledger(frozen()).charge(step=0, rows=rows, digest=b"z", repeats=repeats)


def test_another_representation_under_the_same_guard_is_refused() -> None:
    guard, rows = frozen(), positions(0, 1, 2, 3)
    guard.release(some(0), step=0, rows=rows)
    with pytest.raises(LocalProtocolError, match=r"6 numbers of torch\.float64, got 5 of"):
        guard.release(some(0)[:, :5], step=1, rows=rows)
    with pytest.raises(LocalProtocolError, match=r"got 6 of torch\.float32"):
        guard.release(some(0).float(), step=1, rows=rows + 2)
    assert guard.repeats(rows + 2).tolist() == [True, True, False, False]


def test_the_statement_says_that_rows_are_frozen_and_the_key_is_nowhere() -> None:
    guard = frozen()
    assert guard.statement() == (
        "row-release guarantee, encoder held fixed; "
        "each row is noised once and sent unchanged ever after"
    )
    assert repr(guard) == "FrozenGaussianGuard(clip=1.5, sigma=0.5, noise='secret')"


@pytest.mark.parametrize("forget", [False, True])
def test_ten_epochs_show_no_more_than_one_unless_rows_are_forgotten(forget: bool) -> None:
    """Under a claim for one release, attacked by adding up what was sent."""
    settings = GuardSettings(mechanism="frozen_gaussian", epsilon=4.0)
    guard = make_guard(settings, delta=1e-5, releases=10, key=KEY)

    def release(h_BD: torch.Tensor, step: int, rows: torch.Tensor) -> torch.Tensor:
        if forget:
            guard.load_tensors({})
        return guard.release(h_BD, step=step, rows=rows)

    found = audit_release(release, releases=10, delta=1e-5, seed=7, canaries=4000, guesses=400)
    assert found.contradicts(4.0) is forget
