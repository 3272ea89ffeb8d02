"""Calibrating noise from settings: for an active's releases and private updates, and for the
noise that passives add to their contributions to a secure sum.

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
from secure_apfed.labellers.guarantee import compute_distance_in_steps
from secure_apfed.methods.terms import derive_limits, find_clip, find_objective, make_sum
from secure_apfed.networks.models import Shape
from secure_apfed.networks.objectives import OBJECTIVES
from secure_apfed.privacy.contributions import SummedRelease, calibrate_noise, sensitivity_in_steps
from secure_apfed.privacy.defences import DEFENCES
from secure_apfed.privacy.dp_sgd import calibrate_updates
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.settings import BlackBoxSettings, NoiseSettings, OwnLossSettings, RunSettings
from secure_apfed.settings.privacy import DpSgdSettings


def plan_updates(config: RunSettings, settings: DpSgdSettings, guard: RepresentationGuard) -> float:
    """Return the noise multiplier of the active's DP-SGD updates.

    The settings give it, or an epsilon that it is calibrated to. Each row takes part in one update
    an epoch. `settings`: the DP-SGD settings of `config`. `guard`: clips the active's
    representations and adds noise to them; their releases share the same epsilon. Raises
    ConfigError: the releases alone exceed dp_sgd.epsilon.
    """
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    assert settings.epsilon is not None
    epochs = config.train.epochs
    active_sends = config.method.representation_sender == "active"
    return calibrate_updates(
        settings.epsilon,
        config.delta,
        release=guard.mechanism(),
        releases=guard.count_charges(epochs) if active_sends else 0,
        updates=epochs,
    )


@dataclass(frozen=True, kw_only=True)
class NoisePlan:
    """The agreed noise that each passive adds to its contribution to a secure sum.

    Attributes:
        steps: standard deviation of one passive's noise on each number, in fixed-point steps; the
            contract states it under this name.
        honest: number of passives whose noise counts towards epsilon. It is the smallest number of
            passives that a sum needs, minus the assumed colluders, who know their own noise.
    """

    steps: int
    honest: int


def sum_and_noise(
    config: RunSettings, session: str, active: str, passives: Sequence[str], shape: Shape
) -> tuple[SecureSum, NoisePlan | None]:
    """Return the configured secure sum of these passives' contributions, and the noise in them.

    The noise is None if the settings ask for none. `session`: name of this session, the same at all
    parties. `active`, `passives`: names of these parties. `shape`: shape of one row of a
    contribution, without the batch axis.

    Raises ConfigError: settings that do not fit, no clip bound, no honest passive, or more noise
    than a sum can carry; LocalProtocolError: parameters that do not fit, or a single passive.
    """
    sum_arguments = config, session, active, passives
    noiseless_sum = make_sum(*sum_arguments)
    noise = config.method.find_noise(config)
    if noise is None:
        return noiseless_sum, None
    # Noise is scaled to the largest norm of a row, so a row needs a bound.
    if find_clip(config) is None:
        raise ConfigError("secure_sum.noise needs a bound on rows: give secure_sum.clip, as 1.0")
    # Under recoverable masks a sum may lack some passives, and with them their noise.
    min_passives = noiseless_sum.list_parameters().get("threshold", len(passives))
    assert isinstance(min_passives, int)
    honest_count = min_passives - config.colluders
    if honest_count < 1:
        raise ConfigError(
            f"colluders: {config.colluders} of the {min_passives} passives that a sum "
            "needs leave no honest one whose noise would count"
        )
    steps = _calibrate_steps(config, noise, passives, shape, honest_count)
    return make_sum(*sum_arguments, noise_deviation=steps), NoisePlan(
        steps=steps, honest=honest_count
    )


def make_sum_release(
    config: RunSettings, passive: str, shape: Shape, plan: NoisePlan
) -> SummedRelease:
    """Return the privacy mechanism of one noisy sum: its cost for a person at `passive`.

    `shape`: shape of one row of a contribution, without the batch axis. `plan`: the noise that all
    passives agreed on.
    """
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
    honest_count: int,
) -> int:
    """Return the standard deviation of each passive's noise, in steps of the fixed-point encoding.

    It is calibrated to the epsilon of the settings `noise`, or converted from their sigma, which is
    in units of the contributions. `shape`: shape of one row of a contribution, without the batch
    axis. `honest_count`: number of passives whose noise counts towards epsilon. Raises ConfigError:
    more noise than a sum can carry.
    """
    if noise.epsilon is not None:
        return calibrate_noise(
            epsilon=noise.epsilon,
            delta=config.delta,
            releases=derive_limits(config).releases,
            honest=honest_count,
            # All passives add equal noise, so the largest sensitivity decides.
            sensitivity=max(_compute_sensitivity(config, passive, shape) for passive in passives),
            numbers=_count_numbers(config, shape),
        )
    assert noise.sigma is not None
    quantiser = _make_quantiser(config)
    # Rounded up, so that the noise is never below sigma.
    steps = math.ceil(noise.sigma / quantiser.clip_norm * quantiser.max_level)
    if steps > MAX_DEVIATION:
        raise ConfigError(
            f"secure_sum.noise.sigma: {noise.sigma:g} is {steps} steps of fixed point, more than "
            f"{MAX_DEVIATION}; use fewer secure_sum.bits or a larger clip"
        )
    return steps


def _count_numbers(config: RunSettings, shape: Shape) -> int:
    """Return the largest number of values in one contribution that a person's features may change.

    `shape`: shape of one row of a contribution, without the batch axis.
    """
    # With one request in the whole run a person changes its own row only. Otherwise a batch may
    # have changed as a whole.
    rows = 1 if config.method.has_single_exchange else config.train.batch_size
    return rows * math.prod(shape)


def _compute_sensitivity(config: RunSettings, passive: str, shape: Shape) -> float:
    """Return how far one person's features can move this passive's contribution, in L2 norm.

    The unit is a step of the fixed-point encoding; networks are held fixed. In votes and
    representations a person moves one row. In gradients a person moves one row if neither the
    objective nor a defence mixes rows, otherwise all rows of the batch.

    `shape`: shape of one row of a contribution, without the batch axis.
    """
    quantiser = _make_quantiser(config)
    row_size = math.prod(shape)
    if config.method.vote_protocol:
        return compute_distance_in_steps(
            steps=quantiser.max_level / quantiser.clip_norm,
            numbers=row_size,
            signed=config.method.has_signed_votes,
        )
    if config.method.has_representation_sum:
        return sensitivity_in_steps(
            steps_in_clip=quantiser.max_level, columns=row_size, rows_per_person=1
        )
    defence_kinds = (DEFENCES[choice.kind] for choice in config.defences)
    # A defence reads the whole batch, so it may mix rows.
    is_defended = any("contributions" in kind.protects for kind in defence_kinds)
    objective = find_objective(config, passive)
    if isinstance(objective, OwnLossSettings | BlackBoxSettings):
        is_row_wise = objective.row_wise
    else:
        is_row_wise = OBJECTIVES[objective.name].row_wise
    rows_per_person = 1 if is_row_wise and not is_defended else config.train.batch_size
    return sensitivity_in_steps(
        steps_in_clip=quantiser.max_level, columns=row_size, rows_per_person=rows_per_person
    )


def _make_quantiser(config: RunSettings) -> FixedPoint:
    """Return the fixed-point encoding of one passive's contribution, for sums with a clip bound.

    It rounds to the configured bits; its `clip_norm` is the largest L2 norm of a row.
    """
    clip = find_clip(config)
    assert clip is not None
    return FixedPoint(
        clip_norm=clip, bits=config.secure_sum.bits or USUAL_BITS, contributor_count=1
    )
