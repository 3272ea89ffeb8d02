"""From settings to noise and its accounts: guards, private updates, noise under sums, ledgers.

Run by: each party for what it sends itself. Its noise key is a secret of its own. All parties find
the same deviation of the noise under a sum from the same settings; each passive keeps its own key
and its own ledger.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apfed_protocols.noise import MAX_DEVIATION
from apfed_protocols.randomness import derive_key, fresh_key
from apfed_protocols.seal import Identity, fresh_identity
from apfed_protocols.sums import SecureSum
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.interface import USUAL_BITS
from secure_apfed.base.names import UPDATES, ReleaseFigure, log_file
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.labellers.guarantee import distance_in_steps
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.methods.method import CheckpointStore, PartyContext, PartySecrets
from secure_apfed.methods.terms import clip_of, derive_limits, make_sum, objective_of
from secure_apfed.networks.models import Shape
from secure_apfed.networks.objectives import OBJECTIVES
from secure_apfed.privacy.accountants import Mechanism
from secure_apfed.privacy.contributions import SummedRelease, calibrate_noise, sensitivity_in_steps
from secure_apfed.privacy.defences import DEFENCES, GradientDefence, gradient_defences
from secure_apfed.privacy.dp_sgd import (
    GradientGuard,
    PrivateUpdates,
    WholeTraining,
    calibrate_updates,
)
from secure_apfed.privacy.guard import RepresentationGuard, make_guard
from secure_apfed.privacy.ledger import PrivacyLedger, holds_releases
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.settings.method import Released
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import BlackBoxSettings, NoiseSettings, OwnLossSettings


def fresh_secrets(
    config: RunSettings,
    name: str,
    *,
    identity: Identity | None = None,
    keeper: CheckpointStore | None = None,
    logs: Path | None = None,
) -> PartySecrets:
    """Return the secrets of a party that begins: fresh ones, or those the configuration derives."""
    seed = int.from_bytes(fresh_key()[:8], "big") >> 1
    derived = hashlib.sha256(f"noise of {name}, seed {config.seed}".encode()).digest()
    return PartySecrets(
        identity=identity or fresh_identity(),
        noise_key=fresh_key() if config.guard.noise == "secret" else derived,
        seed=seed if config.party_seeds == "secret" else config.seed,
        keeper=keeper,
        logs=logs,
    )


def guard_for(own: PartyContext) -> RepresentationGuard:
    """Return the guard of one party that releases representations, for as often as it is asked."""
    config = own.config
    return make_guard(
        config.guard,
        delta=config.delta,
        releases=derive_limits(config).releases,
        key=own.secrets.noise_key,
    )


def open_ledger(
    own: PartyContext,
    name: str,
    mechanism: Mechanism | SummedRelease | VoteResponse,
    *,
    delta: float,
    budget: float | None,
    rows: int,
    figure: ReleaseFigure = "epsilon_x",
) -> PrivacyLedger:
    """Open an account of this session, whose write-ahead log is `ledger-NAME.jsonl`."""
    ledger = PrivacyLedger(
        mechanism,
        delta=delta,
        budget=budget,
        rows=rows,
        log=log_file(own.secrets.logs, "ledger", name, "jsonl") if own.secrets.logs else None,
        seeded=own.config.guard.noise != "secret",
        figure=figure,
    )
    if own.secrets.keeper is not None:
        own.secrets.keeper.register_ledger(name, ledger)
    return ledger


def require_no_releases(own: PartyContext) -> None:
    """Refuse to restart over logs: a new alignment puts other people at the places they count.
    Raises CheckpointError: one holds a release.
    """
    if own.secrets.logs is None or own.aligned is not None:
        return
    logs = [
        log_file(own.secrets.logs, "answers", own.name, "jsonl"),
        *(log_file(own.secrets.logs, "ledger", own.name + end, "jsonl") for end in ("", UPDATES)),
    ]
    held = next(filter(holds_releases, logs), None)
    if held is not None:
        raise CheckpointError(
            f"{own.name}: {own.active} restarts, and {held} counts what {own.name} released in "
            "a run whose rows stood in another order; resume that run, or choose another folder"
        )


def ledger_for(own: PartyContext, guard: RepresentationGuard, *, aligned: int) -> PrivacyLedger:
    return open_ledger(
        own,
        own.name,
        guard.mechanism(),
        delta=own.config.delta,
        budget=own.config.guard.epsilon,
        rows=aligned,
    )


def private_updates(own: PartyContext, guard: RepresentationGuard) -> PrivateUpdates | None:
    """Return what makes this party's updates private, one an epoch for each of its rows, or None.

    `guard`: of its representations, whose releases share the budget. Raises ConfigError: the
    guard's releases alone exceed dp_sgd.epsilon.
    """
    config = own.config
    settings = own.config.dp_sgd
    rows = len(own.data.table.ids)
    if settings is None:
        return None
    epochs = config.train.epochs
    delta = config.delta
    noise_multiplier = settings.noise_multiplier
    if noise_multiplier is None:
        assert settings.epsilon is not None
        noise_multiplier = calibrate_updates(
            settings.epsilon,
            delta,
            release=guard.mechanism(),
            releases=guard.count_charges(epochs)
            if config.method.representations_from == "active"
            else 0,
            updates=epochs,
        )
    gradient_guard = GradientGuard(
        clip=settings.clip,
        noise_multiplier=noise_multiplier,
        key=own.secrets.noise_key,
        noise=config.guard.noise,
    )
    mechanism = gradient_guard.mechanism()
    name = own.name + UPDATES
    ledger = open_ledger(own, name, mechanism, delta=delta, budget=None, rows=rows)
    return PrivateUpdates(gradient_guard, ledger)


def whole_training(
    config: RunSettings, releases: PrivacyLedger, private: PrivateUpdates | None
) -> WholeTraining | None:
    """Return the joint account of releases and updates; None if updates are not private."""
    if config.dp_sgd is None or private is None:
        return None
    return WholeTraining(
        releases=releases,
        updates=private.ledger,
        delta=config.delta,
        budget=config.dp_sgd.epsilon,
        seeded=config.guard.noise != "secret",
    )


def defences_of(own: PartyContext, released: Released) -> tuple[GradientDefence, ...]:
    """Return this party's defences of gradients that it sends, as the run's settings say."""
    key = derive_key(own.secrets.noise_key, b"secure-apfed defences v1")
    return gradient_defences(
        own.config.defences,
        released,
        noise=NoiseSource(key, secret=own.config.guard.noise == "secret"),
        classes=len(own.data.classes),
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
    """Return the configured sum between these passives, and the noise under it, or None.

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
    least = quiet.list_parameters().get("threshold", len(passives))
    assert isinstance(least, int)
    honest = least - config.colluders
    if honest < 1:
        raise ConfigError(
            f"colluders: {config.colluders} of the {least} passives that a sum "
            "needs leave no honest one whose noise would count"
        )
    steps = _calibrate_steps(config, noise, passives, shape, honest)
    return make_sum(*parts, noise=steps), NoisePlan(steps=steps, honest=honest)


def describe_sum(own: PartyContext, session: str, shape: Shape) -> dict[str, Any]:
    """Return the public parameters of the sum of this session's passives, for their contract."""
    config = own.config
    secure_sum, plan = sum_and_noise(config, session, own.active, own.passives, shape)
    settings = config.secure_sum.model_dump(mode="json", exclude={"threshold"})
    settings["bits"] = secure_sum.agreement.bits  # derived where the settings say none
    noise = config.method.find_noise(config)
    if plan is not None and noise is not None:
        settings["noise"] = noise.model_dump(mode="json") | asdict(plan)
    return {**secure_sum.list_parameters(), **settings}


def contribution_noise(
    own: PartyContext, shape: Shape, *, plan: NoisePlan | None, aligned: int
) -> ContributionNoise | None:
    """Return a passive's noise and its account; None if none is agreed."""
    config = own.config
    noise = config.method.find_noise(config)
    if noise is None or plan is None:
        return None
    release = make_sum_release(config, own.name, shape, plan)
    ledger = open_ledger(
        own,
        own.name,
        release,
        delta=config.delta,
        budget=noise.epsilon,
        rows=aligned,
        figure=config.method.passives_figure,
    )
    key = derive_key(own.secrets.noise_key, b"secure-apfed contributions v1")
    return ContributionNoise(
        deviation=plan.steps, key=key, ledger=ledger, secret=config.guard.noise == "secret"
    )


def make_sum_release(
    config: RunSettings, passive: str, shape: Shape, plan: NoisePlan
) -> SummedRelease:
    """Return the privacy cost of one sum to a person at this passive."""
    return SummedRelease(
        deviation=plan.steps,
        honest=plan.honest,
        sensitivity=_compute_sensitivity(config, passive, shape),
        numbers=_count_numbers(config, shape),
    )


def _calibrate_steps(
    config: RunSettings, noise: NoiseSettings, passives: Sequence[str], shape: Shape, honest: int
) -> int:
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
    """Return how many numbers of a contribution one person may move."""
    rows = 1 if config.method.asks_once else config.train.batch_size
    return rows * math.prod(shape)


def _compute_sensitivity(config: RunSettings, passive: str, shape: Shape) -> float:
    """Return how far one person's features move this passive's contribution, in steps.

    If neither the objective nor a defence mixes rows, one row moves; else all rows of the batch.
    For representations one row moves, with the encoder held fixed. For votes one row moves, with
    the labeller held fixed.
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
    clip = clip_of(config)
    assert clip is not None
    return FixedPoint(clip_norm=clip, bits=config.secure_sum.bits or USUAL_BITS, contributors=1)
