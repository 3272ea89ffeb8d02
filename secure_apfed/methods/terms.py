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
from secure_apfed.contract import AGGREGATOR, RepresentationBounds
from secure_apfed.data import OwnData
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.networks.models import Shape
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.privacy.randomised_response import find_first_epoch
from secure_apfed.settings import ObjectiveSettings, RunSettings

ROWS_AT_ONCE = 4096
"""Largest number of rows in a request, in methods that send passives one request in a run."""
_AUTO_PROJECTION = 64
"""Size of z where `model.projection` is "auto"."""
_UNGUARDED_NORM = 1e4
"""The norm bound of a representation without a guard."""
_MIN_SPREAD = 5e-4
"""The smallest spread of a batch's representations that a passive accepts, unless configured. The
spread says how much their directions differ."""
_SPREAD_NUMBERS = 8
"""Representations with fewer numbers have no default for the smallest spread."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits on requests to a passive.

    Attributes:
        rows: largest number of rows in one request.
        releases: largest number of answers about one row in a run.
    """

    rows: int
    releases: int


def derive_limits(config: RunSettings) -> RequestLimits:
    """Return how much the settings let the active request of passives.

    The contract states these limits, and passives enforce them.
    """
    if config.method.has_single_exchange:
        return RequestLimits(rows=ROWS_AT_ONCE, releases=1)
    if config.method.averaged_quantity:  # a step covers all rows
        return RequestLimits(rows=config.alignment.maximum_ids, releases=config.train.epochs)
    # One answer more if the method requests every row again after training.
    releases = config.train.epochs + config.method.needs_sums_after_training
    return RequestLimits(rows=config.train.batch_size, releases=releases)


def find_objective(config: RunSettings, passive: str) -> ObjectiveSettings:
    """Return one passive's training objective: its configured one, or else the method's default.

    Raises ConfigError: neither exists, or the configured one has another kind than the method's.
    """
    method_objective = config.method.fixed_objective
    passive_objective = config.find_passive_settings(passive).objective
    if method_objective is None and passive_objective is None:
        raise ConfigError(
            f"passives.{passive}.objective: method {config.method.name} needs one for every "
            "passive, got none; name it there or under passives.default, or use apfed_r or apfed_c"
        )
    if (
        method_objective is not None
        and passive_objective is not None
        and passive_objective.name != method_objective.name
    ):
        raise ConfigError(
            f"passives.{passive}.objective: method {config.method.name} is {method_objective.name} "
            f"for every passive, got {passive_objective.name}; use method apfed to mix, or "
            f"{method_objective.name} at every passive"
        )
    objective = passive_objective or method_objective
    assert objective is not None
    return objective


def find_projection_size(config: RunSettings, passives: tuple[str, ...]) -> int | None:
    """Return the size of z, the projection that the active sends; None: it sends all of h.

    h is the output of its encoder. With the setting "auto" z has 64 numbers, as in the authors'
    release of APFed-C. An unprotected APFed-R then sends all of h, as their release does; a
    protected one sends z, since every number costs bytes in a secure sum.
    """
    if config.model.projection == "none":
        return None
    if config.model.projection != "auto":
        return config.model.projection
    is_unprotected = find_sum_class(config.secure_sum).unsafe and config.guard.mechanism == "none"
    objectives = {find_objective(config, passive).name for passive in passives}
    sends_all = is_unprotected and objectives == {"reconstruction"}
    return None if sends_all else _AUTO_PROJECTION


def bound_representations(
    config: RunSettings, shape: Shape, guard: RepresentationGuard, *, is_projected: bool
) -> RepresentationBounds:
    """Return the contract's bounds on a row of representations: shape, norm and smallest spread.

    `rules.minimum_spread` overrides the derived spread.

    Args:
        shape: shape of one row, without the batch axis.
        guard: the sender's guard, which determines the norms.
        projected: whether a linear projection makes the row, which is never zero then.

    Raises ConfigError: the guard clips rows to a norm that cannot be distinguished from zero.
    """
    maximum = guard.largest_norm(math.prod(shape))
    minimum = guard.smallest_norm() if is_projected else 0.0
    # With such bounds receivers would refuse every row.
    if minimum > maximum:
        raise ConfigError(
            f"guard.clip: {config.guard.clip:g} leaves a row at most {maximum:.3g} long with its "
            f"noise, and a row shorter than {minimum:g} is refused as none at all; raise guard.clip"
        )
    spread = config.rules.minimum_spread
    if spread is None:
        spread = _MIN_SPREAD if math.prod(shape) >= _SPREAD_NUMBERS else 0.0
    return RepresentationBounds(
        shape=shape,
        dtype="float64" if config.train.precision == "float64" else "float32",
        minimum_norm=minimum,
        maximum_norm=maximum if math.isfinite(maximum) else _UNGUARDED_NORM,
        minimum_spread=spread,
    )


def bound_sent_rows(
    config: RunSettings, shape: Shape, guard: RepresentationGuard
) -> RepresentationBounds:
    """Return the contract's bounds on a row of this shape that a passive sends to the active.

    `guard`: clips the passive's rows and adds noise, which determines the norms. There is no bound
    on the spread of a batch.
    """
    terms = bound_representations(config, shape, guard, is_projected=False)
    # The spread protects gradients that a receiver returns. The active returns gradients of its own
    # loss, if any, so that the passive's rows need no spread.
    return terms.model_copy(update={"minimum_spread": 0.0})


def make_sum(
    config: RunSettings,
    session: str,
    active: str,
    passives: Sequence[str],
    *,
    noise_deviation: int | None = None,
) -> SecureSum:
    """Return the configured secure sum of these passives' contributions.

    `session`: name of this session, the same at all parties. `active`, `passives`: names of these
    parties. `noise_deviation`: standard deviation of each passive's noise, in fixed-point steps;
    None: no noise.

    Raises ConfigError: a sum in fixed point without a clip bound, a threshold that does not go with
    it, or a single passive that contributes; LocalProtocolError: parameters that do not fit.
    """
    sum_class = find_sum_class(config.secure_sum)
    if not config.secure_sum.allow_single_passive:
        _refuse_single_passive(config, passives)
    clip = find_clip(config)
    if clip is None and sum_class is not PlainSum:
        raise ConfigError(
            f"secure_sum.clip: {sum_class.name} needs a bound for fixed point, got null; start "
            "with 1.0"
        )
    bits = find_fixed_bits(config, has_noise=noise_deviation is not None)
    agreement = SumAgreement(
        session=session,
        receiver=active,
        aggregator=AGGREGATOR,
        contributors=tuple(passives),
        clip_norm=clip or 1.0,
        bits=USUAL_BITS if bits is None else bits,
        allow_single=config.secure_sum.allow_single_passive,
        threshold=_derive_threshold(config, len(passives)),
        noise=noise_deviation,
    )
    if sum_class is PlainSum:
        return PlainSum(agreement, clip=clip is not None, quantise=noise_deviation is not None)
    # Where a sum may lack passives, the active can isolate one passive's contribution; the settings
    # (rules.silent_passive: recover, or a threshold) accept that.
    may_lack_party = agreement.threshold is not None and agreement.threshold < len(passives)
    if bits is None:
        # More bits than usual are taken if they cost no more bytes.
        bits = choose_bits(
            lambda candidate_bits: sum_class(
                replace(agreement, bits=candidate_bits), allow_single_reader=may_lack_party
            )
        )
    return sum_class(replace(agreement, bits=bits), allow_single_reader=may_lack_party)


def _refuse_single_passive(config: RunSettings, passives: Sequence[str]) -> None:
    """Raise ConfigError if only one of these passives takes part, or has a weight above 0."""
    contributing_passives = [
        name for name in passives if config.find_passive_settings(name).weight > 0
    ]
    if len(passives) == 1 or len(contributing_passives) == 1:
        raise ConfigError(
            "secure_sum.allow_single_passive: a sum of one passive hides nothing: the active reads "
            "that passive's gradients. Add passives with a weight above 0, or accept this by "
            "secure_sum: {allow_single_passive: true}"
        )


def find_fixed_bits(config: RunSettings, *, has_noise: bool) -> int | None:
    """Return the fixed-point bits of a contributed number; None: as many as the sum can carry.

    It is None only for gradients and representations without noise, if no bits are configured. With
    noise more bits are useless. The last digits of votes and averages reveal single contributions
    (measured: docs/leaks.md, mmvfl and v_fedmv at 16 and at 24 bits).

    `has_noise`: whether passives add noise.
    """
    method = config.method
    has_real_sum = method.has_gradient_sum or method.has_representation_sum
    if config.secure_sum.bits is None and has_real_sum and not has_noise:
        return None
    return config.secure_sum.bits or USUAL_BITS


def find_clip(config: RunSettings) -> float | None:
    """Return the L2 bound (clip) of one row of a contribution; None: there is no bound.

    For votes the bound is 1, which rows of votes never exceed.
    """
    return 1.0 if config.method.vote_protocol else config.secure_sum.clip


def may_lack_passives(config: RunSettings) -> bool:
    """Return whether a step may continue without a passive that stopped answering.

    The settings must allow it explicitly, because the active can then isolate one passive's
    contribution. They do so by `rules.silent_passive: recover`. Without a rule, a threshold allows
    it, too, unless the method averages: an average over fewer parties is a different average.
    """
    rule = config.rules.silent_passive
    method = config.method
    has_threshold = config.secure_sum.threshold is not None
    allowed_by_threshold = has_threshold and rule is None and method.averaged_quantity is None
    return method.can_continue_without_passive and (rule == "recover" or allowed_by_threshold)


def _derive_threshold(config: RunSettings, passive_count: int) -> int | None:
    """Return how many passives' contributions a sum needs to be decoded.

    None: the scheme has no threshold, since it always needs all. `passive_count`: number of
    passives.

    Raises ConfigError: the scheme, or the rule for silent passives, cannot use the configured
    threshold, or it is not above half of the passives.
    """
    settings = config.secure_sum
    rule = config.rules.silent_passive
    sum_class = find_sum_class(settings)
    threshold = settings.threshold
    # Not configured: the usual threshold where passives may be missing, otherwise all.
    if threshold is None and not sum_class.needs_all:
        threshold = usual_threshold(passive_count) if may_lack_passives(config) else passive_count
    if threshold is None or threshold == passive_count:
        return threshold
    if threshold > passive_count or sum_class.needs_all:
        raise ConfigError(
            f"secure_sum.threshold: {threshold} of {passive_count} passives does not go with "
            f"{sum_class.name}; only recoverable masks (scheme plain) have a sum without all "
            "passives, and a threshold is at most their number"
        )
    if not may_lack_passives(config):
        reason = f"rules.silent_passive {rule}" if rule else f"method {config.method.name}"
        raise ConfigError(
            f"secure_sum.threshold: under {reason} no step goes on without a passive, and "
            f"{threshold} of {passive_count} would only open more to an active and an aggregator "
            "who work together; "
            "leave it out, or say rules.silent_passive: recover where the method can"
        )
    if 2 * threshold <= passive_count:
        raise ConfigError(
            f"secure_sum.threshold: {threshold} is not above half of {passive_count} passives, so "
            f"an aggregator could open single gradients; say {passive_count // 2 + 1} or more"
        )
    return threshold


def find_training_rows(
    config: RunSettings, data: OwnData, common_rows: Tensor
) -> tuple[Tensor, float, int]:
    """Return what a plan needs to know about the active's training rows.

    `data`: the active's table and row selections. `common_rows`: the rows of that table whose
    people passives know.

    Returns the training rows of an epoch, the share of them that is aligned (in [0, 1]), and the
    number of aligned people. Only the number of the rows is exact, not which rows they are.
    """
    method = config.method
    # Passives that learn from returned gradients need rows with a label.
    rows = data.labelled_rows if method.has_returned_gradients else data.train_rows
    if not method.needs_alignment:
        return rows, 1.0, 0
    aligned_count = int(torch.isin(rows, common_rows).sum())
    # A model that needs every party to predict needs them for every row that it trains on.
    trains_alone = method.can_predict_locally and not method.averaged_quantity
    if not (trains_alone and config.train.has_unaligned_rows_in_batches):
        rows = rows[:aligned_count]  # the first rows stand for the aligned ones
    return rows, aligned_count / max(1, len(rows)), len(common_rows)


def count_rehearsed_rows(
    config: RunSettings, row_count: int, *, aligned_share: float, step_count: int
) -> int:
    """Return how many rows one step of a rehearsal (a short run on random numbers) uses.

    `row_count`: number of training rows in an epoch of the real run. `aligned_share`: the share of
    these rows that passives know. `step_count`: number of steps in an epoch of the rehearsal.
    """
    method = config.method
    if method.averaged_quantity:  # a step covers all rows
        return row_count if method.needs_alignment else max(2, math.ceil(row_count / step_count))
    batch_size = min(config.train.batch_size, row_count)
    if not method.has_joint_svd:
        return batch_size
    # A decomposition needs at least as many aligned rows as vectors.
    needed_rows = config.model.representation_size / max(aligned_share, 1 / row_count)
    return min(row_count, max(batch_size, math.ceil(needed_rows)))


def count_batches(config: RunSettings, row_count: int, *, stage_count: int) -> int:
    """Return the total number of batches over all epochs.

    `row_count`: number of training rows. `stage_count`: number of stages of the label mechanism.
    Each stage randomises the labels of an equal part of the rows, and an epoch trains only on rows
    whose stage has begun.
    """
    train = config.train
    if config.method.averaged_quantity:
        return train.epochs
    starts = [
        find_first_epoch(stage, stages=stage_count, epochs=train.epochs)
        for stage in range(stage_count)
    ]
    ends: Sequence[int] = [*starts[1:], train.epochs]
    batches = 0
    for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
        labelled_parts = stage + 1  # of `stages` equal parts of the rows
        # Integer division of negative numbers rounds up.
        batches_of_epoch = -(-row_count * labelled_parts // (stage_count * train.batch_size))
        batches += (end - start) * batches_of_epoch
    return batches


def estimate_growth(
    config: RunSettings, *, step_ratio: float, row_ratio: float
) -> tuple[float, float]:
    """Return by which factors a run has more messages, and more bytes, than its rehearsal.

    A rehearsal is a short run on random numbers. `step_ratio`: steps of the run divided by steps of
    the rehearsal. `row_ratio`: rows of the run divided by rows of the rehearsal.
    """
    if not config.method.has_single_exchange:
        return step_ratio, step_ratio
    # The rows are requested once, in blocks; a decomposition sends all rows in one message.
    message_factor = 1.0 if config.method.has_joint_svd else row_ratio
    return message_factor, row_ratio


def plan_releases(config: RunSettings, guard: RepresentationGuard) -> int:
    """Return how many releases of one person's representation the ledger will record over a run.

    The result is 0 if the method sends no representations. `guard`: the mechanism that adds noise
    to them; under some, repeated releases are charged once.
    """
    sends_representations = config.method.representation_sender is not None
    return guard.count_charges(derive_limits(config).releases) if sends_representations else 0
