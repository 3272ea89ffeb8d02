"""From settings to the noise under the sum: how much each passive adds, and what it costs it.

All parties find the same deviation from the same settings; each passive keeps its own key and
its own ledger.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from apfed_protocols.noise import MAX_DEVIATION
from apfed_protocols.randomness import derive_key
from apfed_protocols.sums import SecureSum
from apfed_protocols.sums.fixed_point import FixedPoint
from secure_apfed.defences import DEFENCES, GradientDefence
from secure_apfed.errors import ConfigError
from secure_apfed.labellers.guarantee import distance_in_steps
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.methods.accounts import open_ledger
from secure_apfed.methods.method import Own
from secure_apfed.methods.terms import asked_of, clip_of, make_sum, objective_of
from secure_apfed.models import Shape
from secure_apfed.objectives import OBJECTIVES
from secure_apfed.privacy.contributions import SummedRelease, calibrate_noise, sensitivity_in_steps
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import NoiseSettings

__all__ = [
    "NoisePlan", "contribution_noise", "parameters_of", "sum_and_noise",
    "summed_release",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NoisePlan:
    """What is agreed about the noise.

    Attributes:
        steps: deviation of each passive's noise on each number, in steps of fixed point.
        honest: passives whose noise is counted.
    """

    steps: int
    honest: int


def sum_and_noise(
    config: RunSettings, session: str, active: str, passives: Sequence[str], shape: Shape
) -> tuple[SecureSum, NoisePlan | None]:
    """The configured sum between these passives, and the noise under it; None: there is none.

    Args:
        config: of the run.
        session: of the contract.
        active: who opens the sum.
        passives: all of them.
        shape: of one row of a contribution.

    Raises:
        ConfigError: settings that do not fit, no clip bound, no honest passive, or more noise
            than a sum can carry.
        LocalProtocolError: parameters that do not fit, or a single passive.
    """
    parts = config, session, active, passives
    quiet, noise = make_sum(*parts), config.method.noise(config)
    if noise is None:
        return quiet, None
    if clip_of(config) is None:
        raise ConfigError("secure_sum.noise needs a bound on rows: give secure_sum.clip, as 1.0")
    # Under recoverable masks a sum may lack some passives, and with them their noise.
    least = quiet.parameters().get("threshold", len(passives))
    assert isinstance(least, int)
    honest = least - config.colluders
    if honest < 1:
        raise ConfigError(
            f"colluders: {config.colluders} of the {least} passives that a sum "
            "needs leave no honest one whose noise would count"
        )
    steps = _steps(config, noise, passives, shape, honest)
    return make_sum(*parts, noise=steps), NoisePlan(steps=steps, honest=honest)


def parameters_of(
    config: RunSettings, secure_sum: SecureSum, plan: NoisePlan | None
) -> dict[str, Any]:
    """What the contract says about the sum."""
    settings = config.secure_sum.model_dump(mode="json", exclude={"threshold"})
    noise = config.method.noise(config)
    if plan is not None and noise is not None:
        settings["noise"] = noise.model_dump(mode="json") | asdict(plan)
    return {**secure_sum.parameters(), **settings}


def contribution_noise(
    own: Own, shape: Shape, *, plan: NoisePlan | None, aligned: int
) -> ContributionNoise | None:
    """A passive's noise and its account; None where none is agreed."""
    config = own.config
    noise = config.method.noise(config)
    if noise is None or plan is None:
        return None
    release = summed_release(config, own.name, shape, plan)
    ledger = open_ledger(
        own, own.name, release, delta=config.delta, budget=noise.epsilon, rows=aligned,
        figure=config.method.passives_figure,
    )  # fmt: skip
    key = derive_key(own.secrets.noise_key, b"secure-apfed contributions v1")
    return ContributionNoise(
        deviation=plan.steps,
        key=key,
        ledger=ledger,
        secret=config.guard.noise == "secret",
    )


def summed_release(
    config: RunSettings, passive: str, shape: Shape, plan: NoisePlan
) -> SummedRelease:
    """What one sum costs a person at this passive."""
    return SummedRelease(
        deviation=plan.steps,
        honest=plan.honest,
        sensitivity=_sensitivity(config, passive, shape),
        numbers=_numbers(config, shape),
    )


def _steps(
    config: RunSettings, noise: NoiseSettings, passives: Sequence[str], shape: Shape, honest: int
) -> int:
    if noise.epsilon is not None:
        return calibrate_noise(
            epsilon=noise.epsilon,
            delta=config.delta,
            releases=asked_of(config).releases,
            honest=honest,
            sensitivity=max(_sensitivity(config, passive, shape) for passive in passives),
            numbers=_numbers(config, shape),
        )
    assert noise.sigma is not None
    quantiser = _quantiser(config)
    steps = math.ceil(noise.sigma / quantiser.clip_norm * quantiser.levels)
    if steps > MAX_DEVIATION:
        raise ConfigError(
            f"secure_sum.noise.sigma: {noise.sigma:g} is {steps} steps of fixed point, more than "
            f"{MAX_DEVIATION}; use fewer secure_sum.bits or a larger clip"
        )
    return steps


def _numbers(config: RunSettings, shape: Shape) -> int:
    """How many numbers of a contribution one person may move."""
    rows = 1 if config.method.opens_votes else config.train.batch_size
    return rows * math.prod(shape)


def _sensitivity(config: RunSettings, passive: str, shape: Shape) -> float:
    """How far one person's features move this passive's contribution, in steps.

    One row, if neither the objective nor a defence on the gradient mixes rows; all of them else.
    Of representations one row, the encoder held fixed.
    Of votes one row, the labeller held fixed.
    """
    if config.method.opens_votes:
        quantiser = _quantiser(config)
        return distance_in_steps(
            steps=quantiser.levels / quantiser.clip_norm,
            numbers=math.prod(shape),
            signed=config.method.signs_votes,
        )
    if config.method.sums_representations:
        return sensitivity_in_steps(
            levels=_quantiser(config).levels, columns=math.prod(shape), rows=1
        )
    defences = (DEFENCES[choice.kind] for choice in config.defences)
    row_wise = OBJECTIVES[objective_of(config, passive).name].row_wise and all(
        defence.row_wise for defence in defences if issubclass(defence, GradientDefence)
    )
    return sensitivity_in_steps(
        levels=_quantiser(config).levels,
        columns=math.prod(shape),
        rows=1 if row_wise else config.train.batch_size,
    )


def _quantiser(config: RunSettings) -> FixedPoint:
    clip = clip_of(config)
    assert clip is not None
    return FixedPoint(clip_norm=clip, bits=config.secure_sum.bits, contributors=1)
