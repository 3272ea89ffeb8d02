"""Calibrating noise from settings: for an active's releases and private updates, and for noise
under sums.

Run by: each party for its own messages. All parties compute the same deviation of the noise under a
sum from the same settings; a party's keys and ledgers come from its `PartyContext`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from apfed_protocols.noise import MAX_DEVIATION
from apfed_protocols.sums import SecureSum
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.interface import USUAL_BITS
from secure_apfed.errors import ConfigError
from secure_apfed.labellers.guarantee import distance_in_steps
from secure_apfed.methods.terms import clip_of, derive_limits, make_sum, objective_of
from secure_apfed.networks.models import Shape
from secure_apfed.networks.objectives import OBJECTIVES
from secure_apfed.privacy.contributions import SummedRelease, calibrate_noise, sensitivity_in_steps
from secure_apfed.privacy.defences import DEFENCES
from secure_apfed.privacy.dp_sgd import calibrate_updates
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.settings.privacy import DpSgdSettings
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import BlackBoxSettings, NoiseSettings, OwnLossSettings


def plan_updates(config: RunSettings, settings: DpSgdSettings, guard: RepresentationGuard) -> float:
    """Return the noise multiplier of the DP-SGD updates; each row takes part in one update an
    epoch.

    `guard`: of the representations, whose releases share the privacy budget. Raises ConfigError:
    the releases alone exceed dp_sgd.epsilon.
    """
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    assert settings.epsilon is not None
    epochs = config.train.epochs
    active_sends = config.method.representations_from == "active"
    return calibrate_updates(
        settings.epsilon,
        config.delta,
        release=guard.mechanism(),
        releases=guard.count_charges(epochs) if active_sends else 0,
        updates=epochs,
    )


@dataclass(frozen=True, kw_only=True)
class NoisePlan:
    """The agreed noise of passives.

    Attributes:
        steps: deviation of each passive's noise on each number, in steps of fixed point.
        honest: passives whose noise is counted.
    """

    steps: int
    honest: int


def sum_and_noise(
    config: RunSettings, session: str, active: str, passives: Sequence[str], shape: Shape
) -> tuple[SecureSum, NoisePlan | None]:
    """Return the configured sum between these passives, and the noise under it or None.

    `session`: the session's name.

    Raises ConfigError: settings that do not fit, no clip bound, no honest passive, or more noise
    than a sum can carry; LocalProtocolError: parameters that do not fit, or a single passive.
    """
    parts = config, session, active, passives
    quiet = make_sum(*parts)
    noise = config.method.find_noise(config)
    if noise is None:
        return quiet, None
    if clip_of(config) is None:
        raise ConfigError("secure_sum.noise needs a bound on rows: give secure_sum.clip, as 1.0")
    # Under recoverable masks a sum may lack some passives, and with them their noise.
    present_at_least = quiet.list_parameters().get("threshold", len(passives))
    assert isinstance(present_at_least, int)
    honest = present_at_least - config.colluders
    if honest < 1:
        raise ConfigError(
            f"colluders: {config.colluders} of the {present_at_least} passives that a sum "
            "needs leave no honest one whose noise would count"
        )
    steps = _calibrate_steps(config, noise, passives, shape, honest)
    return make_sum(*parts, noise=steps), NoisePlan(steps=steps, honest=honest)


def make_sum_release(
    config: RunSettings, passive: str, shape: Shape, plan: NoisePlan
) -> SummedRelease:
    """Return the privacy cost mechanism of one sum, for a person in this passive's table."""
    return SummedRelease(
        deviation=plan.steps,
        honest=plan.honest,
        sensitivity=_compute_sensitivity(config, passive, shape),
        numbers=_count_numbers(config, shape),
    )


def _calibrate_steps(
    config: RunSettings,
    noise: NoiseSettings,
    passives: Sequence[str],
    shape: Shape,
    honest: int,
) -> int:
    """Return each passive's noise deviation in fixed-point steps: by epsilon, or by the given
    sigma.

    `honest`: passives whose noise is counted. Raises ConfigError: more noise than a sum
        can carry.
    """
    if noise.epsilon is not None:
        return calibrate_noise(
            epsilon=noise.epsilon,
            delta=config.delta,
            releases=derive_limits(config).releases,
            honest=honest,
            sensitivity=max(_compute_sensitivity(config, passive, shape) for passive in passives),
            numbers=_count_numbers(config, shape),
        )
    assert noise.sigma is not None
    quantiser = _make_quantiser(config)
    steps = math.ceil(noise.sigma / quantiser.clip_norm * quantiser.levels)
    if steps > MAX_DEVIATION:
        raise ConfigError(
            f"secure_sum.noise.sigma: {noise.sigma:g} is {steps} steps of fixed point, more than "
            f"{MAX_DEVIATION}; use fewer secure_sum.bits or a larger clip"
        )
    return steps


def _count_numbers(config: RunSettings, shape: Shape) -> int:
    """Return how many numbers of a contribution one person may change."""
    rows = 1 if config.method.asks_once else config.train.batch_size
    return rows * math.prod(shape)


def _compute_sensitivity(config: RunSettings, passive: str, shape: Shape) -> float:
    """Return how far one person's features can move this passive's contribution, in fixed-point
    steps.

    If neither the objective nor a defence mixes rows, one row moves; otherwise all rows of the
    batch. For representations and votes one row moves, with the trained model fixed.
    """
    if config.method.opens_votes:
        quantiser = _make_quantiser(config)
        return distance_in_steps(
            steps=quantiser.levels / quantiser.clip_norm,
            numbers=math.prod(shape),
            signed=config.method.signs_votes,
        )
    if config.method.sums_representations:
        return sensitivity_in_steps(
            levels=_make_quantiser(config).levels, columns=math.prod(shape), rows=1
        )
    kinds = (DEFENCES[choice.kind] for choice in config.defences)
    defended = any("contributions" in kind.protects for kind in kinds)
    objective = objective_of(config, passive)
    if isinstance(objective, OwnLossSettings | BlackBoxSettings):
        row_wise = objective.row_wise
    else:
        row_wise = OBJECTIVES[objective.name].row_wise
    return sensitivity_in_steps(
        levels=_make_quantiser(config).levels,
        columns=math.prod(shape),
        rows=1 if row_wise and not defended else config.train.batch_size,
    )


def _make_quantiser(config: RunSettings) -> FixedPoint:
    """Return the rounding of one passive's contribution to fixed point, with the
    configured bits.
    """
    clip = clip_of(config)
    assert clip is not None
    return FixedPoint(clip_norm=clip, bits=config.secure_sum.bits or USUAL_BITS, contributors=1)
