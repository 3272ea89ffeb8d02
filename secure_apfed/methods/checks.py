"""Checks that the settings of a run fit its method; errors name the methods that accept them.

Checks that only one method needs are in `MethodSettings.check_run`. This module compares settings
with the facts that every method declares, and so can list other methods that accept them. Every
check yields the faults that it finds as sentences for an error, the first of which is raised.
"""

from collections.abc import Callable, Iterator

from secure_apfed.measures.table import THRESHOLDS
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import METHODS
from secure_apfed.privacy.defences import check_defences
from secure_apfed.privacy.randomised_response import MultiStageResponse
from secure_apfed.settings import MethodSettings, RunSettings, describe_unknown_name
from secure_apfed.settings.run import ThresholdChoice


def check_method(config: RunSettings) -> None:
    """Refuse settings that the method cannot use.

    Raises ValueError: its text names the setting and a remedy.
    """
    check_defences(config.defences, config.method)
    config.method.check_run(config)
    for check in (
        _check_task,
        _check_noise,
        _check_colluders,
        _check_early_end,
        _check_imbalance,
        _check_parties,
        _check_spreading,
        _check_labels_after,
        _check_pairwise,
        _check_labels,
        _check_private_training,
    ):
        # A check is a generator of error texts. The first text ends all checks.
        for fault in check(config):
            raise ValueError(fault)


def list_methods(accepts: Callable[[MethodSettings], bool]) -> str:
    """Return the names of the methods that a predicate accepts, for an error text: "a, b or c".

    `accepts`: a predicate on a method's settings class, whose attributes say what it can do.
    """
    *others, last = (name for name, method in METHODS.items() if accepts(method.public_facts))
    return f"{', '.join(others)} or {last}" if others else last


def _check_task(config: RunSettings) -> Iterator[str]:
    """Yield an error text if the method cannot learn the task."""
    method = config.method
    named_by_task = TASKS[config.task].learnt_by
    if config.task not in method.tasks and method.name not in named_by_task:
        names = [name for name, other in METHODS.items() if config.task in other.settings.tasks]
        names += named_by_task
        yield (
            f"task: method {method.name} learns {' or '.join(method.tasks)}, not {config.task}; "
            f"use {', '.join(names)}"
        )


def _check_noise(config: RunSettings) -> Iterator[str]:
    """Yield an error text for each noise setting that has nothing to protect in this method.

    Noise is set for secure sums, or for representations (`guard`).
    """
    method = config.method
    if config.secure_sum.noise is not None and method.find_gradient_sender("contributions") is None:
        hint_on_votes = "; noise on votes is method.epsilon" if method.vote_protocol else ""
        summing = list_methods(
            lambda other: other.find_gradient_sender("contributions") is not None
        )
        yield (
            f"secure_sum.noise: method {method.name} adds no gradients or representations of "
            f"passives; leave it out, or use {summing}{hint_on_votes}"
        )
    if method.has_representation_sum and config.guard.mechanism != "none":
        yield (
            f"guard.mechanism: in method {method.name} nobody reads a representation; say none "
            "and add noise under their sum, as secure_sum: {noise: {epsilon: 8}}"
        )
    if method.has_joint_svd and config.guard.mechanism != "none":
        guarded = list_methods(
            lambda other: other.can_predict_locally and other.representation_sender is not None
        )
        yield (
            f"guard.mechanism: method {method.name} adds no noise to what it decomposes; say none "
            f"and accept that, or use {guarded}"
        )


def _check_colluders(config: RunSettings) -> Iterator[str]:
    """Yield an error text if colluders are assumed although passives share no noise.

    Colluders are passives whose share of the noise does not count.
    """
    method = config.method
    # Randomised response protects each vote by itself, so no noise of others counts.
    shares_noise = method.find_noise(config) is not None and method.vote_protocol != "randomised"
    if config.colluders and not shares_noise:
        yield (
            f"colluders: method {method.name} says no noise of passives that would add up, so none "
            "is left uncounted; leave it out, or say secure_sum.noise, or method.epsilon of votes"
        )


def _check_early_end(config: RunSettings) -> Iterator[str]:
    """Yield an error text for each reason against early stopping (`train.patience`).

    A method may have no validation loss, and the time of the stop may break a privacy guarantee.
    """
    method = config.method
    if config.train.patience is None:
        return
    if not method.can_stop_early:
        yield (
            f"train.patience: method {method.name} learns no labels by steps, and has no loss on "
            "rows that were held out; leave it out, or use "
            f"{list_methods(lambda other: other.can_stop_early)}"
        )
    if config.train.keep_best and not method.can_predict_locally:
        yield (
            "train.keep_best: the active goes back to the networks of an earlier epoch; in method "
            f"{method.name} it would need the other parties' networks of that epoch; leave it out"
        )
    if config.dp_sgd is not None:
        yield (
            "train.patience: when training ends would tell of the held-out rows without the noise "
            "of dp_sgd; leave one of the two out"
        )
    if config.labels.mechanism == MultiStageResponse.name:
        yield (
            f"train.patience: {config.labels.mechanism} answers labels as the epochs go on, and "
            "losses before and after do not compare; use randomised_response"
        )


def _check_imbalance(config: RunSettings) -> Iterator[str]:
    """Yield an error text for each misuse of class weights, decision threshold and calibration.

    All three reveal label counts, which a label-privacy guarantee excludes. They also need an
    active that predicts alone, or learns from its own labels.
    """
    method = config.method
    uses_class_weights = config.train.class_weights != "none"
    if uses_class_weights and not method.can_weight_classes:
        yield (
            f"train.class_weights: method {method.name} learns by no steps on the active's own "
            f"labels; leave it out, or use {list_methods(lambda other: other.can_weight_classes)}"
        )
    if config.threshold is not None and not method.can_predict_locally:
        yield (
            f"threshold: in method {method.name} the active does not predict alone, and has no "
            f"model to decide by; use {list_methods(lambda other: other.can_predict_locally)}"
        )
    if config.calibration not in ("auto", "none"):
        if not method.can_predict_locally:
            yield (
                f"calibration: in method {method.name} the active has no model to calibrate; use "
                f"{list_methods(lambda other: other.can_predict_locally)}"
            )
        if config.are_labels_private:
            yield (
                "calibration: it would tell how many labels there are of each class beside a "
                "promise about labels; leave it out"
            )
    fits_threshold = isinstance(config.threshold, str | ThresholdChoice)
    if isinstance(config.threshold, str) and config.threshold not in THRESHOLDS:
        yield f"threshold: {describe_unknown_name(config.threshold, THRESHOLDS)}"
    if config.dp_sgd is not None and (uses_class_weights or fits_threshold):
        key = "train.class_weights" if uses_class_weights else "threshold"
        alternative = "" if uses_class_weights else ", or give the threshold as a number"
        yield (
            f"{key}: it would tell how many labels there are of each class without the noise of "
            f"dp_sgd; leave one of the two out{alternative}"
        )


def _check_parties(config: RunSettings) -> Iterator[str]:
    """Yield an error text if the method cannot use the data partition, or labels at passives."""
    method = config.method
    data = config.data
    if not method.has_passives:
        return
    if data.is_horizontal and method.needs_alignment:
        yield (
            f"data.partition: method {method.name} aligns tables of the same people, and under "
            "horizontal each party has people of its own; take vertical, or use "
            f"{list_methods(lambda other: not other.needs_alignment)}"
        )
    if not data.is_horizontal and not method.needs_alignment:
        yield (
            f"data.partition: in method {method.name} all parties have the same features of other "
            f"people; say horizontal, or use {list_methods(lambda other: other.needs_alignment)}"
        )
    if data.labels_at and not method.can_use_passive_labels:
        yield (
            f"data.labels_at: in method {method.name} the active alone holds labels; leave it out, "
            f"or use {list_methods(lambda other: other.can_use_passive_labels)}"
        )
    if (data.is_horizontal or data.labels_at) and config.labels.mechanism != "none":
        yield (
            f"labels.mechanism: {config.labels.mechanism} answers the active's labels alone, and "
            "passives hold labels, too; say none"
        )


def _check_spreading(config: RunSettings) -> Iterator[str]:
    """Yield an error text for each reason against spreading labels over similar representations."""
    if not config.train.spread_labels:
        return
    if not config.method.has_local_model_from_start:
        yield (
            f"train.spread_labels: method {config.method.name} trains no model of the active's "
            "alone, or labels its rows already; use "
            f"{list_methods(lambda other: other.has_local_model_from_start)}"
        )
    if config.dp_sgd is not None:
        yield (
            "train.spread_labels: the last layer would be fitted to the rows without the noise of "
            "dp_sgd; leave one of the two out"
        )


def _check_labels_after(config: RunSettings) -> Iterator[str]:
    """Yield an error text for each reason against learning the labels after the exchange.

    The setting is `train.labels: after`.
    """
    train = config.train
    method = config.method
    if not train.is_exchange_label_free:
        return
    if not method.has_gradient_sum:
        yield (
            f"train.labels: in method {method.name} no gradients of passives train an encoder; "
            f"leave it out, or use {list_methods(lambda other: other.has_gradient_sum)}"
        )
    if config.task != "classification":
        yield (
            "train.labels: local models after the exchange learn classes, and task is "
            f"{config.task}; say joint"
        )
    is_set_by_conflict = {
        "train.spread_labels: labels are": train.spread_labels,
        "train.patience: a held-out loss is": train.patience is not None,
        "train.class_weights: a task loss is": train.class_weights != "none",
        "labels.mechanism: labels are": config.labels.mechanism == MultiStageResponse.name,
    }
    for conflict, is_set in is_set_by_conflict.items():
        if is_set:
            yield f"{conflict} read during the exchange, and train.labels is after; leave one out"
    if config.dp_sgd is not None:
        yield (
            "dp_sgd: local models after the exchange (train.labels: after) are fitted without its "
            "noise; leave one of the two out"
        )


def _check_pairwise(config: RunSettings) -> Iterator[str]:
    """Yield an error text for each reason against pairwise alignment.

    In pairwise alignment some passives do not know the people of some rows.
    """
    method = config.method
    if config.alignment.mode == "all" or not method.has_passives:
        return
    if not method.can_align_pairwise:
        yield (
            "alignment.mode: pairwise leaves rows that some passives do not know, and "
            f"{method.name} needs all passives for every row; use all, or "
            f"{list_methods(lambda other: other.can_align_pairwise)}"
        )
    if not config.secure_sum.allow_single_passive:
        yield (
            "alignment.mode: pairwise opens to the active the gradient of every row that one "
            "passive alone knows; say secure_sum.allow_single_passive: true if that is "
            "acceptable, or use all"
        )


def _check_labels(config: RunSettings) -> Iterator[str]:
    """Yield an error text if the method cannot use label privacy in stages.

    A later stage reads the predictions of an active's model that predicts alone at every epoch.
    """
    method = config.method
    mechanism = config.labels.mechanism
    if mechanism != MultiStageResponse.name:
        return
    if method.has_revealed_labels:
        yield (
            f"labels.mechanism: {mechanism} answers labels in stages, and method {method.name} "
            "sends all of them once; use randomised_response"
        )
    if not method.has_local_model_from_start:
        yield (
            f"labels.mechanism: {mechanism} asks the active's model what it expects, and method "
            f"{method.name} has none that predicts alone all along; use randomised_response"
        )


def _check_private_training(config: RunSettings) -> Iterator[str]:
    """Yield an error text for each reason against DP-SGD.

    DP-SGD protects the active's updates; all other messages need noise as well.
    """
    method = config.method
    if config.dp_sgd is None:
        return
    if not method.can_use_dp_sgd:
        returned = " (the gradient of every row's loss)" if method.has_returned_gradients else ""
        yield (
            f"dp_sgd: method {method.name} gives the passives more than DP-SGD makes private"
            f"{returned}; use {list_methods(lambda other: other.can_use_dp_sgd)}, or leave "
            "dp_sgd out"
        )
    if config.train.precision == "bfloat16":
        yield (
            "dp_sgd: gradients of single examples in bfloat16 are too coarse to be clipped; use "
            "train.precision float32 or float64"
        )
    active_sends = method.representation_sender == "active"
    if active_sends and config.guard.mechanism == "none" and config.dp_sgd.epsilon is not None:
        yield (
            "dp_sgd.epsilon cannot be kept where representations are sent without noise; choose "
            "guard.mechanism gaussian or frozen_gaussian, or give noise_multiplier (then labels "
            "alone are protected)"
        )
