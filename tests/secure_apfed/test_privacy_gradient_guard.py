"""The private sum of gradients: its clip for any numbers, its noise, its mechanism."""

import math
import pickle
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from apfed_experiments.audit.release import mu_below_if_independent
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.dp_sgd import GradientGuard, clipped_sum
from secure_apfed.privacy.ledger import PrivacyLedger

KEY = bytes(range(32))


def guard_of(**changes: object) -> GradientGuard:
    settings: dict[str, object] = {"clip": 1.0, "noise_multiplier": 2.0, "key": KEY}
    return GradientGuard(**{**settings, **changes})  # type: ignore[arg-type]  # one field at a time


def samples(count: int, *, scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(count, *shape, generator=generator) for shape in ((3, 2), (4,))]


def by_hand(gradients: list[Tensor], clip: float) -> Tensor:
    total = torch.zeros(sum(one[0].numel() for one in gradients), dtype=torch.float64)
    for row in range(len(gradients[0])):
        flat = torch.cat([one[row].flatten().double() for one in gradients])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_is_that_of_clipped_examples(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scale in (1e-3, 1.0, 1e3):
        gradients = [part.to(dtype) for part in samples(9, scale=scale)]
        torch.testing.assert_close(
            clipped_sum(gradients, 0.7), by_hand(gradients, 0.7), rtol=1e-12, atol=1e-12
        )
    whole = clipped_sum(samples(9), 0.7)
    monkeypatch.setattr("secure_apfed.privacy.dp_sgd._CHUNK_NUMBERS", 20)
    torch.testing.assert_close(clipped_sum(samples(9), 0.7), whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_example_moves_the_sum_beyond_the_clip(dtype: torch.dtype) -> None:
    values = (math.inf, -math.inf, math.nan, 1e30, 3e38, 1e-44, 0.0, -1.0)
    for value, first, clip in product(values, (0, 9), (1e-6, 0.5, 1e6)):
        bad = torch.zeros(1, 10, dtype=dtype)
        bad[0, first:] = value
        alone = clipped_sum([bad[:, :6].reshape(1, 3, 2), bad[:, 6:]], clip)
        assert bool(alone.isfinite().all())
        assert math.sqrt(math.fsum(x * x for x in alone.tolist())) <= clip
    huge = torch.full((1, 5), torch.finfo(dtype).max * 0.9, dtype=dtype)
    assert float(clipped_sum([huge], 0.5).norm()) == pytest.approx(0.5)
    good = samples(4)
    spoilt = [torch.cat([part, torch.full_like(part[:1], math.nan)]) for part in good]
    torch.testing.assert_close(clipped_sum(spoilt, 1.0), clipped_sum(good, 1.0))


def test_the_noise_has_the_stated_deviation_and_no_other() -> None:
    guard = guard_of(clip=0.5, noise_multiplier=3.0)
    zeros = [torch.zeros(1, 20_000)]
    noise = guard.release(zeros, step=0, rows=torch.tensor([0])).numpy()
    deviation = float(np.sqrt((noise**2).mean()))
    assert guard.sigma == 1.5
    # 20,000 squares have a relative deviation of 1 %; six of them on the root are 3 %.
    for factor in (1.0, 2 / 3, 1.5):
        assert (abs(deviation / (guard.sigma * factor) - 1) < 0.03) is (factor == 1)
    guard = guard_of(clip=0.5, noise_multiplier=1.1)
    assert guard.sensitivity() == 1.0
    assert guard.mechanism().noise_multiplier == pytest.approx(0.55)
    assert guard.mechanism().mu == pytest.approx(2 / 1.1)


def test_the_same_batch_gets_the_same_noise_and_any_other_an_independent_one() -> None:
    guard, rows = guard_of(), torch.arange(4)

    def noise(step: int = 0, rows: Tensor = rows, seed: int = 0, key: bytes = KEY) -> Tensor:
        gradients = samples(4, seed=seed)
        released = guard_of(key=key).release(gradients, step=step, rows=rows)
        return released - clipped_sum(gradients, guard.clip)

    first = noise()
    torch.testing.assert_close(noise(), first)
    others = (noise(step=1), noise(rows=rows.flip(0)), noise(seed=1), noise(key=bytes(32)))
    # Of ten numbers on one grid a few may be the same by chance.
    assert all(int(torch.isclose(other, first).sum()) < 5 for other in others)


def test_reproducible_noise_is_bound_to_the_step_alone() -> None:
    guard = guard_of(noise="reproducible_insecure")
    rows = torch.arange(4)
    noises = [
        guard.release(samples(4, seed=seed), step=5, rows=rows)
        - clipped_sum(samples(4, seed=seed), 1)
        for seed in (0, 1)
    ]
    torch.testing.assert_close(noises[0], noises[1])


def test_the_key_stays_inside_and_bad_settings_are_refused() -> None:
    guard = guard_of()
    assert KEY.hex() not in repr(guard)
    assert repr(guard) == "GradientGuard(clip=1, sigma=2, noise='secret')"
    with pytest.raises(LocalProtocolError, match="never serialised"):
        pickle.dumps(guard)
    for field, value, message in (
        ("clip", 0.0, "clip lies in"),
        ("clip", math.nan, "clip lies in"),
        ("noise_multiplier", 0.0, "positive number, got 0"),
        ("noise_multiplier", math.inf, "positive number, got inf"),
    ):
        with pytest.raises(ConfigError, match=message):
            guard_of(**{field: value})
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 5"):
        guard_of(key=b"short")


def test_wrong_arguments_are_named() -> None:
    for gradients, step, rows, message in (
        (samples(3), 0, torch.arange(4), "one gradient for each of 4 examples"),
        ([], 0, torch.arange(4), "one gradient for each of 4 examples"),
        ([torch.zeros(4)], 0, torch.arange(4), "one gradient for each of 4 examples"),
        (samples(4), -1, torch.arange(4), "a step counts from 0, got -1"),
        (samples(2), 0, torch.tensor([3, 3]), "different int64 positions"),
        (samples(2), 0, torch.tensor([0.0, 1.0]), "different int64 positions"),
    ):
        with pytest.raises(LocalProtocolError, match=message):
            guard_of().release(gradients, step=step, rows=rows)


def audited_mu(
    guard: GradientGuard, steps: int, *, slack: float = 1.0, canaries: int = 1000
) -> float:
    """One run: each canary has a direction and a secret sign of its own; what a guesser proves."""
    bits = torch.randint(0, 2, (canaries,), generator=torch.Generator().manual_seed(9)) * 2 - 1
    rows = torch.arange(canaries)
    gradients = [torch.diag(slack * bits.double())]
    score = torch.zeros(canaries, dtype=torch.float64)
    for step in range(steps):
        score += guard.release(gradients, step=step, rows=rows)
    return mu_below_if_independent(
        canaries, int((torch.where(score >= 0, 1, -1) == bits).sum()), level=0.05
    )


@pytest.mark.parametrize(("mu", "steps"), [(0.5, 1), (2.0, 16)])
def test_a_fast_audit_stays_under_the_claim_and_near_it(mu: float, steps: int) -> None:
    guard = guard_of(noise_multiplier=2 * math.sqrt(steps) / mu)
    ledger = PrivacyLedger(guard.mechanism(), delta=1e-5, budget=None, rows=1, log=None)
    for step in range(steps):
        ledger.charge(step=step, rows=torch.tensor([0]), digest=b"u")
    assert ledger.spent().mu == pytest.approx(mu)
    assert 0.4 * mu < audited_mu(guard, steps, slack=1e3) <= mu


def test_a_fast_audit_catches_too_little_noise_and_a_clip_that_yields() -> None:
    claimed, steps = 1.0, 4
    right = 2 * math.sqrt(steps) / claimed
    assert audited_mu(guard_of(noise_multiplier=right * 2 / 3), steps, slack=1e3) > claimed
    wide = guard_of(clip=2.0, noise_multiplier=right / 2)  # the noise of C = 1, the clip of 2
    assert audited_mu(wide, steps, slack=1e3) > claimed
    assert audited_mu(guard_of(noise_multiplier=right), 2 * steps, slack=1e3) > claimed
