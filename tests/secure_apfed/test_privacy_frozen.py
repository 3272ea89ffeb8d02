"""What the frozen guard does beyond the contract that test_privacy_guards.py holds all to."""

import pytest
import torch

from apfed_experiments.audit.release import audit_release
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError
from secure_apfed.privacy.guard import FrozenGaussianGuard, GaussianGuard, make_guard
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.noise import clip_rows
from secure_apfed.settings.privacy import GuardSettings

KEY = bytes(range(32))
CLIP, SIGMA = 1.5, 0.5


def frozen(key: bytes = KEY) -> FrozenGaussianGuard:
    return FrozenGaussianGuard(clip=CLIP, sigma=SIGMA, key=key)


def batch(seed: int, rows: int = 4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def positions(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_sent_unchanged_in_whatever_batch_it_comes_again(dtype: torch.dtype) -> None:
    guard = frozen()
    first = guard.release(batch(0, dtype=dtype), step=0, rows=positions(3, 9, 0, 5))
    again = guard.release(batch(1, dtype=dtype), step=7, rows=positions(5, 1, 3, 9))
    assert torch.equal(again[[0, 2, 3]], first[[3, 0, 1]])
    assert again.dtype == dtype
    assert guard.repeats(positions(1, 2, 0)).tolist() == [True, False, True]
    third = guard.release(batch(2, dtype=dtype), step=8, rows=positions(1, 5, 9, 3))
    assert torch.equal(third, again[[1, 0, 3, 2]])


def test_a_first_release_is_clipped_and_noised_as_by_the_gaussian_guard() -> None:
    rows, h_BD = positions(0, 1, 2, 3), batch(0)
    plain = GaussianGuard(clip=CLIP, sigma=SIGMA, key=KEY).release(h_BD, step=0, rows=rows)
    assert torch.equal(frozen().release(h_BD, step=0, rows=rows), plain)


def test_frozen_noise_has_the_stated_scale_and_averaging_does_not_remove_it() -> None:
    guard, rows = frozen(), torch.arange(2000)
    h_BD = batch(0, 2000)
    mean = sum(guard.release(h_BD, step=step, rows=rows) for step in range(10)) / 10
    added = mean - clip_rows(h_BD, CLIP)
    for claimed in (1, 2 / 3, 3 / 2):
        chi = float(((added / (claimed * SIGMA)) ** 2).sum())
        assert (abs(chi - added.numel()) < 5 * (2 * added.numel()) ** 0.5) is (claimed == 1)
    z_BD = frozen().release(batch(0), step=0, rows=positions(2, 8, 2, 8))
    assert torch.equal(z_BD[:2], z_BD[2:])


def test_the_gradient_goes_through_to_todays_clipped_row() -> None:
    guard, rows, weights = frozen(), positions(0, 1, 2, 3), batch(5)
    guard.release(batch(0), step=0, rows=rows)
    today, clipped = batch(1).requires_grad_(), batch(1).requires_grad_()
    (guard.release(today, step=1, rows=rows) * weights).sum().backward()
    (clip_rows(clipped, CLIP) * weights).sum().backward()
    assert today.grad is not None
    assert clipped.grad is not None
    assert torch.equal(today.grad, clipped.grad)


def test_a_release_without_gradients_still_freezes() -> None:
    guard = frozen()
    with torch.no_grad():
        first = guard.release(batch(0), step=0, rows=positions(0, 1, 2, 3))
    again = guard.release(batch(1).requires_grad_(), step=1, rows=positions(0, 1, 2, 3))
    assert torch.equal(again, first)
    assert again.requires_grad


def test_loading_replaces_what_was_there_and_an_empty_batch_freezes_nothing() -> None:
    guard = frozen()
    guard.release(batch(0), step=0, rows=positions(0, 1, 2, 3))
    guard.load_tensors({})
    assert not guard.repeats(positions(0)).any()
    assert guard.release(batch(0)[:0], step=0, rows=positions()).shape == (0, 6)
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
        z_BD = guard.release(batch(seed, len(rows)), step=step, rows=positions(*rows))
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
        guard.release(batch(0), step=0, rows=positions(0, 1, 2, 3))
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
    guard.release(batch(0), step=0, rows=rows)
    with pytest.raises(LocalProtocolError, match=r"6 numbers of torch\.float64, got 5 of"):
        guard.release(batch(0)[:, :5], step=1, rows=rows)
    with pytest.raises(LocalProtocolError, match=r"got 6 of torch\.float32"):
        guard.release(batch(0).float(), step=1, rows=rows + 2)
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
