"""Compares what an attack guessed with the truth, beside its baselines.

Run by: the experimenter. Of each guess also how unevenly it hurts, since an average hides people:
an attack that is useless on most rows and sure of a few harms those few.

Letters: N scored rows, K classes, F features, n candidates.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from apfed_attacks.interface import Attack, AttackResult, Guess, Prediction, Target
from apfed_attacks.view import AdversaryView, AttackError, GuessError
from secure_apfed.data import UNLABELLED

_WINDOW = 7  # side of SSIM's windows, pixels
Array: TypeAlias = NDArray[Any]
DECOY = ", decoy"
"""Suffix of a variant's name for its decoy: the same attack, with releases of other rows."""
Metrics: TypeAlias = Mapping[str, float | None]


def _compute_macro_auc(scores_NK: Array, labels_N: Array) -> float | None:
    """Return the mean one-vs-rest AUC over the classes that occur; None if only one does.

    It is computed by ranks (Mann-Whitney) for all classes at once, which is fast: this runs for
    every variant of every attack.
    """
    is_class_NK = labels_N[:, None] == np.arange(scores_NK.shape[1])
    positives_K = is_class_NK.sum(axis=0)
    negatives_K = len(labels_N) - positives_K
    is_defined_K = (positives_K > 0) & (negatives_K > 0)
    if not is_defined_K.any():
        return None
    rank_sum_K = np.where(is_class_NK, scipy.stats.rankdata(scores_NK, axis=0), 0).sum(axis=0)
    # Pairs (positive, negative) in which the positive row has the higher score.
    wins_K = rank_sum_K - positives_K * (positives_K + 1) / 2
    pairs_K = positives_K * negatives_K
    return float((wins_K[is_defined_K] / pairs_K[is_defined_K]).mean())


def _match_class_scores(prediction: Prediction, labels_N: Array) -> Array:
    """Return scores (N, K) by class.

    Clusters are assigned to the classes so that accuracy is highest. This is the usual clustering
    accuracy (Hungarian matching on the confusion matrix; Xie et al., Unsupervised Deep Embedding,
    2016). It uses the truth: an upper bound for an adversary that can name its K clusters, for
    instance by one label each.

    `prediction`: scores by class or by cluster. `labels_N`: the true classes.
    """
    from sklearn.metrics import confusion_matrix

    scores_NK = prediction.values
    if not prediction.clusters:
        return scores_NK
    classes = range(scores_NK.shape[1])
    confusion_KK = confusion_matrix(labels_N, scores_NK.argmax(axis=1), labels=list(classes))
    _, cluster_of_class = scipy.optimize.linear_sum_assignment(-confusion_KK)
    return scores_NK[:, cluster_of_class]


def compute_r2(guess_NF: Array, truth_NF: Array) -> float | None:
    """Return R^2 over all features together, weighted by variance; None if the truth is
    constant.
    """
    total_squares = float(np.square(truth_NF - truth_NF.mean(axis=0)).sum())
    if not total_squares:
        return None
    return 1 - float(np.square(guess_NF - truth_NF).sum()) / total_squares


def _compute_ssim(guess_NF: Array, truth_N: Array) -> float | None:
    """Return the mean SSIM of images (N, channels, height, width) over windows of 7 x 7.

    None where the truth is no image, has a side below the window, or does not vary.

    `guess_NF`: the guessed images, flattened. `truth_N`: the true ones, (N, ...).
    """
    span = float(truth_N.max() - truth_N.min())
    if truth_N.ndim != 4 or min(truth_N.shape[2:]) < _WINDOW or not span:
        return None
    truth = torch.from_numpy(truth_N)
    guess = torch.from_numpy(guess_NF).reshape(truth.shape).to(truth.dtype)
    # The mean of the window around each pixel, by channel; edges are reflected.
    images = torch.cat([guess, truth, guess * guess, truth * truth, guess * truth])
    padded = functional.pad(images, (_WINDOW // 2,) * 4, mode="reflect")
    means = functional.avg_pool2d(padded, _WINDOW, stride=1)
    guess_mean, truth_mean, guess_square, truth_square, product = means.chunk(5)
    # Wang et al. 2004, Image Quality Assessment, Eq. (13)
    c1 = (0.01 * span) ** 2
    c2 = (0.03 * span) ** 2
    guess_mean_square = guess_mean.pow(2)
    truth_mean_square = truth_mean.pow(2)
    mean_product = guess_mean * truth_mean
    covariance = product - mean_product
    guess_variance = (guess_square - guess_mean_square).clamp(min=0.0)
    truth_variance = (truth_square - truth_mean_square).clamp(min=0.0)
    numerator = (2 * mean_product + c1) * (2 * covariance + c2)
    means_term = guess_mean_square + truth_mean_square + c1
    variance_term = guess_variance + truth_variance + c2
    return float((numerator / (means_term * variance_term)).flatten(1).mean(1).mean())


def _compute_roc_corners(scores_n: Array, members_n2: Array) -> list[tuple[float, float]]:
    """Return the corners (false positive rate, true positive rate) of the ROC, ascending.

    `scores_n`: score of each candidate. `members_n2`: whether each candidate trained the model, and
    whether it was aligned.
    """
    from sklearn.metrics import roc_curve

    false_positive_rates, true_positive_rates, _ = roc_curve(members_n2[:, 0], scores_n)
    return list(zip(false_positive_rates.tolist(), true_positive_rates.tolist(), strict=True))


def _measure_label_risk(scores_NK: Array, labels_N: Array) -> dict[str, float]:
    """Return how unevenly a guess of labels hits people.

    These are the recall of each class that occurs, and the precision on the surest tenth of the
    rows. The adversary can choose these rows itself: where the softmax of its best score is
    furthest above that of the second.
    """
    from sklearn.metrics import recall_score

    guessed_N = scores_NK.argmax(axis=1)
    present = np.unique(labels_N)
    recalls = recall_score(labels_N, guessed_N, labels=present, average=None, zero_division=0)
    ascending_NK = np.sort(scipy.special.softmax(np.nan_to_num(scores_NK), axis=1), axis=1)
    margin_N = ascending_NK[:, -1] - ascending_NK[:, -2]
    surest = np.argsort(-margin_N, kind="stable")[: math.ceil(len(labels_N) / 10)]
    precision = float((guessed_N == labels_N)[surest].mean())
    names = (f"recall of class {k}" for k in present)
    recall_by_class = dict(zip(names, map(float, recalls), strict=True))
    return {**recall_by_class, "precision on the surest decile": precision}


def _measure_feature_risk(guess_NF: Array, truth_N: Array) -> dict[str, float]:
    """Return the share of variance recovered on the tenth of the rows that the guess recovers best.

    These rows are chosen by the truth, so no adversary could choose them. Empty if they do not
    vary.

    `guess_NF`: guessed features, flattened. `truth_N`: the true ones, (N, ...).
    """
    truth_NF = truth_N.reshape(len(truth_N), -1)
    error_N = np.square(guess_NF - truth_NF).sum(axis=1)
    variation_N = np.square(truth_NF - truth_NF.mean(axis=0)).sum(axis=1)
    best = np.argsort(error_N - variation_N, kind="stable")[: math.ceil(len(truth_NF) / 10)]
    variation = float(variation_N[best].sum())
    if not variation:
        return {}
    return {"r2 on the best decile": 1 - float(error_N[best].sum()) / variation}


def _measure_membership_risk(scores_n: Array, members_n2: Array) -> dict[str, float]:
    """Return the AUC of aligned and of unaligned candidates that trained, each against all others.

    The others are all rows that did not train. `scores_n`: score of each candidate. `members_n2`:
    whether each candidate trained the model, and whether it was aligned.
    """
    from sklearn.metrics import roc_auc_score

    trained_n, aligned_n = members_n2.T
    groups = {"aligned": trained_n & aligned_n, "unaligned": trained_n & ~aligned_n}
    risks = {}
    for name, group_n in groups.items():
        if group_n.any():
            rows_n = group_n | ~trained_n
            area = roc_auc_score(group_n[rows_n], scores_n[rows_n])
            risks[f"auc of {name} members"] = float(area)
    return risks


def _measure_labels(scores_NK: Array, labels_N: Array) -> Metrics:
    """Return accuracy, balanced accuracy (mean recall of the classes that occur) and macro AUC.

    Without scikit-learn, whose checks take longer than all else that is measured of a variant.
    """
    is_hit_N = scores_NK.argmax(axis=1) == labels_N
    _, class_N, count_K = np.unique(labels_N, return_inverse=True, return_counts=True)
    recall_K = np.bincount(class_N, weights=is_hit_N) / count_K
    return {
        "accuracy": float(is_hit_N.mean()),
        "balanced_accuracy": float(recall_K.mean()),
        "auc": _compute_macro_auc(scores_NK, labels_N),
    }


def _measure_features(guess_NF: Array, truth_N: Array) -> Metrics:
    """Return the mean squared error, R^2 of all features together, PSNR, and SSIM for images.

    PSNR is in decibels, with the range of the truth as its peak; None where that or the error is 0.

    `guess_NF`: guessed features, flattened. `truth_N`: the true features, (N, ...): vectors or
    images (N, channels, height, width).
    """
    truth_NF = truth_N.reshape(len(truth_N), -1)
    mse = float(np.square(guess_NF - truth_NF).mean())
    peak = float(np.ptp(truth_NF))
    metrics = {
        "mse": mse,
        "r2": compute_r2(guess_NF, truth_NF),
        "psnr": 10 * math.log10(peak**2 / mse) if mse and peak else None,
    }
    similarity = _compute_ssim(guess_NF, truth_N)
    if similarity is not None:
        metrics["ssim"] = similarity
    return metrics


def _measure_membership(scores_n: Array, members_n2: Array) -> Metrics:
    """Return AUC, and true positive rates at false positive rates of 1 % and 0.1 %.

    `scores_n`: higher where a candidate more likely trained the model. `members_n2`: whether each
    candidate trained the model, and whether it was aligned.
    """
    from sklearn.metrics import roc_auc_score

    corners = _compute_roc_corners(scores_n, members_n2)

    def find_true_positive_rate(max_false_positive_rate: float) -> float:
        """Return the largest true positive rate at a false positive rate of at most this."""
        return max(
            true_positive_rate
            for false_positive_rate, true_positive_rate in corners
            if false_positive_rate <= max_false_positive_rate
        )

    return {
        "auc": float(roc_auc_score(members_n2[:, 0], scores_n)),
        "tpr_at_1_percent_fpr": find_true_positive_rate(0.01),
        "tpr_at_0.1_percent_fpr": find_true_positive_rate(0.001),
    }


@dataclass(frozen=True, eq=False, repr=False)
class Truth:
    """The truth that guesses are compared with.

    Attributes:
        classes: K, number of classes; 0 where labels are numbers.
        labels: labels by alignment position, (A,); `UNLABELLED` where nobody knows one.
        training_positions: positions of the training rows of which the victim has a row, (T,)
            int64, ascending.
        features: features of each party by alignment position, (A, ...); NaN where it has no row.
        members: for an attack on membership, whether each of n candidates trained the model, and
            whether it was aligned, (n, 2) bool.
    """

    classes: int
    labels: Tensor
    training_positions: Tensor
    features: Mapping[str, Tensor]
    members: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.bool))

    @property
    def positions_with_labels(self) -> Tensor:
        """The positions of the labelled rows among `training_positions`.

        Known labels are drawn from them, and guesses of labels are scored on them.
        """
        return self.training_positions[self.labels[self.training_positions] != UNLABELLED]

    def compute_class_priors(self) -> tuple[float, ...]:
        """Return the share of each class among the labelled training rows; nothing if labels are
        numbers.

        Raises AttackError: no training row has a label.
        """
        is_regression = not self.classes
        if is_regression:
            return ()
        labels = self.labels[self.positions_with_labels]
        if not len(labels):
            raise AttackError("no aligned training row has a label, so that classes have no shares")
        counts_K = torch.bincount(labels, minlength=self.classes)
        return tuple((counts_K / counts_K.sum()).tolist())

    @classmethod
    def for_members(cls, members: Tensor, *, classes: int) -> "Truth":
        """Return the truth of an attack on membership, which has no labels and features.

        `members`: whether each candidate trained the model, and whether it was aligned, (n, 2).
        """
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(classes, nothing, nothing, {}, members)


@dataclass(frozen=True)
class TargetMetrics:
    """The functions that score guesses at one target against the truth of the same rows.

    Attributes:
        metric: name of the metric by which the best variant is chosen.
        compute_metrics: function of values and truth that returns metrics by name.
        compute_risk: function of values and truth that returns how unevenly the guess hits people.
        select_values: function of a prediction and the truth that returns the values to score.
        compute_curve: function of values and truth that returns the corners of the ROC; empty for
            targets without one.
    """

    metric: str
    compute_metrics: Callable[[Array, Array], Metrics]
    compute_risk: Callable[[Array, Array], Mapping[str, float]]
    select_values: Callable[[Prediction, Array], Array] = lambda guess, truth: guess.values
    compute_curve: Callable[[Array, Array], list[tuple[float, float]]] = lambda values, truth: []


METRICS_BY_TARGET: Mapping[Target, TargetMetrics] = {
    "labels": TargetMetrics(
        "balanced_accuracy", _measure_labels, _measure_label_risk, _match_class_scores
    ),
    "features": TargetMetrics("r2", _measure_features, _measure_feature_risk),
    "membership": TargetMetrics(
        "auc",
        _measure_membership,
        _measure_membership_risk,
        select_values=lambda guess, members_n2: guess.values[:, 0],
        compute_curve=_compute_roc_corners,
    ),
}


def score_guess(
    attack: Attack, view: AdversaryView, guess: Guess, truth: Truth, seed: int
) -> AttackResult:
    """Return the result of `guess`, which `attack` made from `view`, by comparison with the truth.

    Guesses about rows that did not train are left out (in TVFL a view holds representations of
    test rows as well), and so are guesses of labels where there is none.

    Raises AttackError: a guess is about no training row, a row twice or a known row, or has
    values of another shape.
    """
    check_guess(attack, view, guess, truth=truth)
    truth_A = _select_truth(attack, view, truth)
    scorable = {
        "features": truth.training_positions,
        "labels": truth.positions_with_labels,
        "membership": guess.positions,
    }
    scored_N = torch.isin(guess.positions, scorable[attack.target]).numpy()
    if not scored_N.any():
        raise AttackError(
            f"{attack.name} guesses no row that trained"
            + (" and has a label" if attack.target == "labels" else "")
        )
    actual = truth_A[guess.positions.numpy()[scored_N]]
    scale = METRICS_BY_TARGET[attack.target]
    compute_all_metrics = partial(
        _compute_metrics_by_variant, scale, is_scored=scored_N, actual=actual
    )
    attacks = compute_all_metrics(guess.attacks)
    baselines = compute_all_metrics(guess.baselines)
    decoys = compute_all_metrics(guess.decoys)
    # Decoys (the attack on releases of other rows) know nothing of the rows: they are baselines.
    uninformed = {**baselines, **{f"{name}{DECOY}": metrics for name, metrics in decoys.items()}}
    held_out = _collect_held_out(guess)
    # An adversary may ignore what it saw, so baselines are among its variants. The attack comes
    # first, to be named if both are equal.
    variant, attack_score = _choose_variant({**attacks, **baselines}, held_out, scale.metric)
    baseline, baseline_score = _choose_variant(uninformed, held_out, scale.metric)
    chosen_prediction = {**guess.baselines, **guess.attacks}[variant]
    chosen = scale.select_values(chosen_prediction.select_rows(scored_N), actual)
    return AttackResult(
        **_list_common_fields(attack, view, seed, scored=len(actual)),
        applicable=True,
        metric=scale.metric,
        variant=variant,
        score={**baselines, **attacks}[variant],
        variants=attacks,
        baseline=baseline,
        baselines=uninformed,
        references=compute_all_metrics(guess.references),
        advantage=attack_score - baseline_score,
        risk=scale.compute_risk(chosen, actual),
        roc=scale.compute_curve(chosen, actual),
    )


def _compute_metrics_by_variant(
    scale: TargetMetrics,
    predictions: Mapping[str, Prediction],
    *,
    is_scored: Array,
    actual: Array,
) -> dict[str, Metrics]:
    """Return the metrics of each prediction by name.

    `is_scored`: mask of the guessed rows that count. `actual`: the truth of these.
    """
    metrics_by_variant: dict[str, Metrics] = {}
    for name, prediction in predictions.items():
        values = scale.select_values(prediction.select_rows(is_scored), actual)
        metrics_by_variant[name] = dict(scale.compute_metrics(values, actual))
    return metrics_by_variant


def _collect_held_out(guess: Guess) -> dict[str, float]:
    """Return R^2 on held-out known rows, by variant, baseline and decoy that has it.

    It chooses among them. The result is empty if no variant of the attack has it: then nothing can
    be chosen by it.
    """
    if all(item.held_out is None for item in guess.attacks.values()):
        return {}
    decoys = {f"{name}{DECOY}": item for name, item in guess.decoys.items()}
    return {
        name: item.held_out
        for name, item in {**guess.attacks, **guess.baselines, **decoys}.items()
        if item.held_out is not None
    }


def make_inapplicable_result(
    attack: Attack, view: AdversaryView, reason: str, seed: int
) -> AttackResult:
    """Return the result of an attack that does not apply here, for a stated reason."""
    declared = _list_common_fields(attack, view, seed, scored=0)
    return AttackResult(**declared, applicable=False, reason=reason)


def _list_common_fields(
    attack: Attack, view: AdversaryView, seed: int, *, scored: int
) -> dict[str, Any]:
    """Return the fields of a result that describe attack, adversary and its knowledge.

    `seed`: seed of the attack. `scored`: number of scored rows.
    """
    knowledge = view.knowledge
    return {
        "attack": attack.name,
        "options": attack.model_dump(mode="json", exclude_defaults=True),
        "target": attack.target,
        "victim": view.knowledge.victim,
        "adversary": view.name,
        "role": view.role,
        "behaviour": view.behaviour,
        "method": view.description.name,
        "knowledge": {
            "classes": knowledge.classes,
            "labels": len(knowledge.labels),
            "priors": knowledge.priors is not None,
            "shadow_rows": len(knowledge.shadow),
            "architecture": knowledge.architecture is not None,
            "encoder": knowledge.encoder is not None,
            "public_rows": max(map(len, knowledge.public.values()), default=0),
            "own_features": sum(features[0].numel() for features in view.features.values()),
            "epochs": len(view.epochs),
            "iterations": view.iterations,
        },
        "counts": {"known": len(_get_known_positions(attack, view)), "scored": scored},
        "seed": seed,
    }


def check_guess(attack: Attack, view: AdversaryView, guess: Guess, *, truth: Truth) -> None:
    """Refuse a guess that cannot be scored.

    Raises:
        AttackError: it is about no row, or about one row twice.
        GuessError: it is about rows that the adversary knew, lacks an attack or a baseline, or has
            values of another shape or, from a user's own attack, that are NaN.
    """
    known = _get_known_positions(attack, view)
    truth_A = _select_truth(attack, view, truth)
    columns = {"features": math.prod(truth_A.shape[1:]), "labels": truth.classes, "membership": 1}
    is_users_own = not type(attack).__module__.startswith("apfed_attacks.")
    positions = guess.positions
    if not len(positions) or len(set(positions.tolist())) != len(positions):
        raise AttackError(
            f"{attack.name} guesses {len(positions)} rows; it must guess at least one, each once"
        )
    if known_count := int(torch.isin(positions, known).sum()):
        raise GuessError(
            f"{attack.name} guesses {known_count} rows that the adversary knew; leave out the "
            "positions of view.knowledge"
        )
    if not guess.attacks or not guess.baselines:
        raise GuessError(f"{attack.name} must give at least one attack and one baseline")
    expected = (len(guess.positions), columns[attack.target])
    prediction_sets = (guess.attacks, guess.baselines, guess.references, guess.decoys)
    for name, item in (pair for items in prediction_sets for pair in items.items()):
        if item.values.shape != expected:
            raise GuessError(
                f"{attack.name}, {name}: expected values of shape {expected}, "
                f"got {item.values.shape}"
            )
        if is_users_own and (missing := int(np.isnan(item.values).sum())):
            raise GuessError(
                f"{attack.name}, {name}: {missing} of its values of shape {expected} are NaN; "
                "expected a number for each row"
            )


def _get_known_positions(attack: Attack, view: AdversaryView) -> Tensor:
    """Return the positions of the rows whose target the adversary knew."""
    known = view.knowledge.labels if attack.target == "labels" else view.knowledge.shadow
    return known.positions


def _select_truth(attack: Attack, view: AdversaryView, truth: Truth) -> Array:
    """Return what the attack guesses, by alignment position or candidate.

    It is labels (A,), the victim's features (A, ...), or, by candidate (n, 2), membership and
    alignment.

    `truth`: all that guesses about this victim are scored by.

    Raises AttackError: the victim has no features.
    """
    if attack.target == "labels":
        return truth.labels.numpy()
    if attack.target == "membership":
        return truth.members.numpy()
    victim = view.knowledge.victim
    if victim is None or victim not in truth.features:
        raise AttackError(f"{attack.name} guesses features of {victim!r}, which holds none")
    return truth.features[victim].double().numpy()


def _choose_variant(
    metrics_by_variant: Mapping[str, Metrics], held_out: Mapping[str, float], metric: str
) -> tuple[str, float]:
    """Return name and `metric` of the variant that best predicts held-out known rows.

    If no variant has such rows, it is the variant with the highest metric.

    `metrics_by_variant`: metrics on the scored rows, by variant. `held_out`: R^2 on held-out known
    rows, by variant.
    """
    validated = {
        name: held_out[name]
        for name, measured in metrics_by_variant.items()
        if math.isfinite(held_out.get(name, math.nan)) and measured[metric] is not None
    }
    if not validated:
        return _find_best(metrics_by_variant, metric)
    name = max(validated, key=validated.__getitem__)
    value = metrics_by_variant[name][metric]
    assert value is not None
    return name, value


def _find_best(metrics_by_name: Mapping[str, Metrics], metric: str) -> tuple[str, float]:
    """Return the name and value of the first entry with the highest `metric`.

    Raises AttackError: no entry has a finite value.
    """
    values = {
        name: value
        for name, measured in metrics_by_name.items()
        if (value := measured[metric]) is not None and math.isfinite(value)
    }
    if not values:
        raise AttackError(f"{metric} is undefined: what was guessed is the same for all rows")
    return max(values.items(), key=lambda item: item[1])
