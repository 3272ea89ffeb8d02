"""Terms that parties agree on, derived from settings: request limits, objectives, sums, steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apfed_protocols.sums import PlainSum, SecureSum, SumAgreement
from apfed_protocols.sums.bits import choose_bits
from apfed_protocols.sums.interface import USUAL_BITS
from apfed_protocols.sums.recoverable import usual_threshold
from secure_apfed.contract import AGGREGATOR, RepresentationTerms
from secure_apfed.data import OwnData
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.networks.models import Shape
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.privacy.randomised_response import first_epoch_of
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import ObjectiveSettings

ROWS_AT_ONCE = 4096
_PROJECTION = 64
_UNGUARDED_NORM = 1e4
_SPREAD = 5e-4
_SPREAD_NUMBERS = 8


@dataclass(frozen=True)
class RequestLimits:
    """The limits on requests to a passive: rows in one request, and answers for each row."""

    rows: int
    releases: int


def derive_limits(config: RunSettings) -> RequestLimits:
    """Return the most that the settings let the active request of passives; the contract enforces
    it.
    """
    if config.method.asks_once:
        return RequestLimits(rows=ROWS_AT_ONCE, releases=1)
    if config.method.averages:
        return RequestLimits(rows=config.alignment.maximum_ids, releases=config.train.epochs)
    extra = config.method.asks_again
    return RequestLimits(rows=config.train.batch_size, releases=config.train.epochs + extra)


def find_objective(config: RunSettings, passive: str) -> ObjectiveSettings:
    """Return one passive's objective: the one set for this passive, else the method's default.

    Raises ConfigError: the method has none and none is set, or another kind than the method's.
    """
    own_objective = config.method.own_objective
    passive_objective = config.settings_of(passive).objective
    if own_objective is None and passive_objective is None:
        raise ConfigError(
            f"passives.{passive}.objective: method {config.method.name} needs one for every "
            "passive, got none; name it there or under passives.default, or use apfed_r or apfed_c"
        )
    if (
        own_objective is not None
        and passive_objective is not None
        and passive_objective.name != own_objective.name
    ):
        raise ConfigError(
            f"passives.{passive}.objective: method {config.method.name} is {own_objective.name} "
            f"for every passive, got {passive_objective.name}; use method apfed to mix"
        )
    objective = passive_objective or own_objective
    assert objective is not None
    return objective


def find_projection_size(config: RunSettings, passives: tuple[str, ...]) -> int | None:
    """Return the size of z, the projection that the active sends; None: its encoder's whole output
    h.

    "auto" is 64, as in the release of APFed-C. A plain APFed-R sends all of h, as its release does;
    a protected one sends z, since every number costs bytes.
    """
    if config.model.projection == "none":
        return None
    if config.model.projection != "auto":
        return config.model.projection
    plain = find_sum_class(config.secure_sum).unsafe and config.guard.mechanism == "none"
    kinds = {find_objective(config, passive).name for passive in passives}
    return None if plain and kinds == {"reconstruction"} else _PROJECTION


def bound_representations(
    config: RunSettings, shape: Shape, guard: RepresentationGuard, *, projected: bool
) -> RepresentationTerms:
    """Return the bounds on the norm of one representation row.

    `rules.minimum_spread` overrides the derived value. `projected`: whether a linear projection
    made the row; an encoder's output may be zero. Raises ConfigError: the guard clips rows to a
    norm that cannot be distinguished from zero.
    """
    maximum = guard.largest_norm(math.prod(shape))
    minimum = guard.smallest_norm() if projected else 0.0
    if minimum > maximum:
        raise ConfigError(
            f"guard.clip: {config.guard.clip:g} leaves a row at most {maximum:.3g} long with its "
            f"noise, and a row shorter than {minimum:g} is refused as none at all; raise guard.clip"
        )
    spread = config.rules.minimum_spread
    if spread is None:
        spread = _SPREAD if math.prod(shape) >= _SPREAD_NUMBERS else 0.0
    return RepresentationTerms(
        shape=shape,
        dtype="float64" if config.train.precision == "float64" else "float32",
        minimum_norm=minimum,
        maximum_norm=maximum if math.isfinite(maximum) else _UNGUARDED_NORM,
        minimum_spread=spread,
    )


def bound_sent_rows(
    config: RunSettings, shape: Shape, guard: RepresentationGuard
) -> RepresentationTerms:
    """Return the bounds on a row of this shape that a passive sends to the active."""
    terms = bound_representations(config, shape, guard, projected=False)
    # Returned gradients, if any, are of the active's own loss, so directions reveal nothing to it.
    return terms.model_copy(update={"minimum_spread": 0.0})


def make_sum(
    config: RunSettings,
    session: str,
    active: str,
    passives: Sequence[str],
    *,
    noise: int | None = None,
) -> SecureSum:
    """Return the configured sum between these parties; `noise` is its deviation in steps.

    `session`: the session's name.

    Raises ConfigError: a sum in fixed point without a clip bound, or a threshold that does not go
    with it; LocalProtocolError: parameters that do not fit, or a single passive.
    """
    settings = config.secure_sum
    kind = find_sum_class(config.secure_sum)
    helping = [name for name in passives if config.settings_of(name).weight > 0]
    if 1 in (len(passives), len(helping)) and not settings.allow_single_passive:
        raise ConfigError(
            "secure_sum.allow_single_passive: a sum of one passive hides nothing: the active reads "
            "that passive's gradients. Add passives with a weight above 0, or accept this by "
            "secure_sum: {allow_single_passive: true}"
        )
    clip = find_clip(config)
    if clip is None and kind is not PlainSum:
        raise ConfigError(
            f"secure_sum.clip: {kind.name} needs a bound for fixed point, got null; start with 1.0"
        )
    bits = find_fixed_bits(config, noise=noise is not None)
    agreement = SumAgreement(
        session=session,
        receiver=active,
        combiner=AGGREGATOR,
        contributors=tuple(passives),
        clip_norm=clip or 1.0,
        bits=USUAL_BITS if bits is None else bits,
        allow_single=settings.allow_single_passive,
        threshold=_derive_threshold(config, len(passives)),
        noise=noise,
    )
    if kind is PlainSum:
        return PlainSum(agreement, clip=clip is not None, quantise=noise is not None)
    # Settings with rules.silent_passive: recover, or a threshold, accept the consequences.
    may_lack_party = agreement.threshold is not None and agreement.threshold < len(passives)

    def make_secure_sum(bits: int) -> SecureSum:
        return kind(replace(agreement, bits=bits), allow_single_reader=may_lack_party)

    return make_secure_sum(choose_bits(make_secure_sum) if bits is None else bits)


def find_fixed_bits(config: RunSettings, *, noise: bool) -> int | None:
    """Return the fixed-point bits of a value, if they are configured; None: as many as the sum can
    carry.

    With noise more bits are useless, and the last digits of votes and averages reveal single
    contributions (measured: docs/leaks.md, mmvfl and v_fedmv at 16 and at 24 bits).
    """
    method = config.method
    sums_reals = method.sums_gradients or method.sums_representations
    if config.secure_sum.bits is None and sums_reals and not noise:
        return None
    return config.secure_sum.bits or USUAL_BITS


def find_clip(config: RunSettings) -> float | None:
    """Return C, the norm bound of one row of a contribution; for votes 1, which rows of votes never
    exceed.
    """
    return 1.0 if config.method.opens_votes else config.secure_sum.clip


def may_lack_passives(config: RunSettings) -> bool:
    """Return whether a step may continue without a passive that fell silent.

    The settings must allow it by name, because the active can then isolate one passive's part: by
    `rules.silent_passive: recover`, or by a threshold where the method averages nothing. (An
    average over fewer parties is a different average.)
    """
    silent = config.rules.silent_passive
    method = config.method
    uses_threshold = silent is None and method.averages is None
    named = config.secure_sum.threshold is not None and uses_threshold
    return method.goes_on_without and (silent == "recover" or named)


def _derive_threshold(config: RunSettings, passives: int) -> int | None:
    """Return how many passives the secure sum needs to be decrypted; None: all, by the sum's kind.

    Raises ConfigError: a threshold that the sum or the silence rule cannot use, or that is not
    above half of the passives.
    """
    settings = config.secure_sum
    silent = config.rules.silent_passive
    kind = find_sum_class(settings)
    threshold = settings.threshold
    if threshold is None and not kind.needs_all:
        threshold = usual_threshold(passives) if may_lack_passives(config) else passives
    if threshold is None or threshold == passives:
        return threshold
    if threshold > passives or kind.needs_all:
        raise ConfigError(
            f"secure_sum.threshold: {threshold} of {passives} passives does not go with "
            f"{kind.name}; only recoverable masks (scheme plain) have a sum without all "
            "passives, and a threshold is at most their number"
        )
    if not may_lack_passives(config):
        rule = f"rules.silent_passive {silent}" if silent else f"method {config.method.name}"
        raise ConfigError(
            f"secure_sum.threshold: under {rule} no step goes on without a passive, and "
            f"{threshold} of {passives} would only open more to an active and an aggregator who "
            "work together; "
            "leave it out, or say rules.silent_passive: recover where the method can"
        )
    if 2 * threshold <= passives:
        raise ConfigError(
            f"secure_sum.threshold: {threshold} is not above half of {passives} passives, so an "
            f"aggregator could open single gradients; say {passives // 2 + 1} or more"
        )
    return threshold


def find_training_rows(
    config: RunSettings, data: OwnData, common: Tensor
) -> tuple[Tensor, float, int]:
    """Return the active's rows in an epoch, their aligned share in [0, 1], and the number of
    aligned people.

    `common`: its rows of people whom passives know.
    """
    method = config.method
    # Whose passives learn from returned gradients trains on rows with a label alone.
    rows = data.labelled_rows if method.returns_gradients else data.train_rows
    if not method.aligns:
        return rows, 1.0, 0
    aligned = int(torch.isin(rows, common).sum())
    # A model that needs every party to predict needs them for every row that it trains on.
    predicts_alone = method.predicts_alone and not method.averages
    if not (predicts_alone and config.train.trains_unaligned_rows):
        rows = rows[:aligned]
    return rows, aligned / max(1, len(rows)), len(common)


def count_rehearsed_rows(
    config: RunSettings, rows: int, *, aligned_share: float, steps: int
) -> int:
    """Return how many rows one rehearsed step uses, if an epoch goes through `rows`.

    `steps`: of an epoch of the rehearsal. `aligned_share`: share of the rows that passives know.
    """
    method = config.method
    if method.averages:  # a step covers all rows
        return rows if method.aligns else max(2, -(-rows // steps))
    batch = min(config.train.batch_size, rows)
    if not method.decomposes:
        return batch
    # There are no fewer aligned rows than vectors, in a rehearsal either.
    needed = config.model.representation_size / max(aligned_share, 1 / rows)
    return min(rows, max(batch, math.ceil(needed)))


def count_batches(config: RunSettings, rows: int, *, stages: int) -> int:
    """Return the total number of batches over all epochs.

    If labels are randomised in stages, an epoch counts only the rows whose label was answered by
    then.
    """
    train = config.train
    if config.method.averages:
        return train.epochs
    starts = [first_epoch_of(stage, stages=stages, epochs=train.epochs) for stage in range(stages)]
    ends: Sequence[int] = [*starts[1:], train.epochs]
    return sum(
        (end - start) * -(-rows * (stage + 1) // (stages * train.batch_size))
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def estimate_growth(config: RunSettings, *, steps: float, rows: float) -> tuple[float, float]:
    """Return the factors by which a full run exceeds the messages and bytes of a rehearsal.

    `steps`: steps of the run for each step of the rehearsal. `rows`: the same for rows.
    """
    if not config.method.asks_once:
        return steps, steps
    # A single request covers all rows, and is not repeated in every epoch.
    return 1.0 if config.method.decomposes else rows, rows


def plan_releases(config: RunSettings, guard: RepresentationGuard) -> int:
    """Return how often the guard will release one person's representation; 0: none is sent."""
    sends_representations = config.method.representations_from is not None
    return guard.count_charges(derive_limits(config).releases) if sends_representations else 0
