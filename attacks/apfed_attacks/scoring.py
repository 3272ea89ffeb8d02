"""Compares what an attack guessed with the truth, beside its baselines.

Run by: the experimenter. The only module besides `apfed_attacks.recorded` that handles `Truth`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from apfed_attacks.interface import Attack, AttackResult, Guess, Prediction, Target
from apfed_attacks.scoring import (
    Truth,
    explained,
    macro_auc,
    mean_recall,
    name_clusters_by_truth,
    peak_ratio,
    receiver_curve,
    risk_of_features,
    risk_of_labels,
    risk_of_membership,
    structural_similarity,
    true_positives_at,
)
from apfed_attacks.view import AdversaryView, AttackError

__all__ = ["DECOY", "SCALES", "Scale", "not_applicable", "score"]

DECOY = ", decoy"
"""Behind a variant's name: its decoy."""

Figures: TypeAlias = Mapping[str, float | None]
Array: TypeAlias = NDArray[Any]


def _measure_labels(prediction: Prediction, labels_N: Array) -> Figures:
    """Accuracy, balanced accuracy (mean recall of the classes that occur) and macro AUC."""
    scores_NK = _class_scores(prediction, labels_N)
    guessed_N = scores_NK.argmax(axis=1)
    return {
        "accuracy": float((guessed_N == labels_N).mean()),
        "balanced_accuracy": mean_recall(guessed_N, labels_N),
        "auc": macro_auc(scores_NK, labels_N),
    }


def _risk_labels(prediction: Prediction, labels_N: Array) -> Mapping[str, float]:
    return risk_of_labels(_class_scores(prediction, labels_N), labels_N)


def _class_scores(prediction: Prediction, labels_N: Array) -> Array:
    if prediction.clusters:
        return name_clusters_by_truth(prediction.values, labels_N)
    return prediction.values


def _measure_features(prediction: Prediction, features_N: Array) -> Figures:
    """Mean squared error, R^2 of all features together, PSNR in decibels; of images SSIM."""
    features_NF = features_N.reshape(len(features_N), -1)
    similarity = structural_similarity(prediction.values, features_N)
    return {
        "mse": float(np.square(prediction.values - features_NF).mean()),
        "r2": explained(prediction.values, features_NF),
        "psnr": peak_ratio(prediction.values, features_NF),
        **({} if similarity is None else {"ssim": similarity}),
    }


def _risk_features(prediction: Prediction, features_N: Array) -> Mapping[str, float]:
    return risk_of_features(prediction.values, features_N.reshape(len(features_N), -1))


def _measure_membership(prediction: Prediction, members_N: Array) -> Figures:
    """AUC, and true positive rates at false positive rates of 1 % and 0.1 %."""
    curve = receiver_curve(prediction.values[:, 0], members_N[:, 0])
    return {
        "auc": float(roc_auc_score(members_N[:, 0], prediction.values[:, 0])),
        "tpr_at_1_percent_fpr": true_positives_at(curve, 0.01),
        "tpr_at_0.1_percent_fpr": true_positives_at(curve, 0.001),
    }


def _curve_membership(prediction: Prediction, members_N: Array) -> list[tuple[float, float]]:
    return receiver_curve(prediction.values[:, 0], members_N[:, 0])


def _risk_membership(prediction: Prediction, members_N: Array) -> Mapping[str, float]:
    return risk_of_membership(prediction.values[:, 0], members_N)


@dataclass(frozen=True)
class Scale:
    """How guesses at one target are judged.

    Attributes:
        metric: in which the best is chosen and the advantage measured; higher is better.
        measure: (prediction, truth of the same rows) -> figures, `metric` among them.
        risk: the same -> how unevenly the guess hurts.
        curve: the same -> the ROC, where the guess is a score for one question.
    """

    metric: str
    measure: Callable[[Prediction, Array], Figures]
    risk: Callable[[Prediction, Array], Mapping[str, float]]
    curve: Callable[[Prediction, Array], list[tuple[float, float]]] = lambda guess, truth: []


SCALES: Mapping[Target, Scale] = {
    "labels": Scale("balanced_accuracy", _measure_labels, _risk_labels),
    "features": Scale("r2", _measure_features, _risk_features),
    "membership": Scale("auc", _measure_membership, _risk_membership, _curve_membership),
}


def score(
    attack: Attack, view: AdversaryView, guess: Guess, truth: Truth, seed: int
) -> AttackResult:
    """Return the result of `guess`, which `attack` made from `view`.

    Guesses about rows that did not train are left out (in TVFL a view holds representations of
    test rows as well), and guesses of labels where there is none.

    Raises:
        AttackError: the guess is about no training row, about one row twice or about one that
            the adversary knew, or has values of another shape than its rows.
    """
    known = _known(attack, view)
    _check(attack, guess, known)
    truth_A = _actual(attack, view, truth)
    _check_shapes(attack, guess, _columns(attack, truth, truth_A))
    told = truth.labelled if attack.target == "labels" else truth.trained
    scored_N = torch.isin(guess.positions, told).numpy()
    if attack.target == "membership":
        scored_N = np.ones(len(guess.positions), dtype=bool)
    if not scored_N.any():
        raise AttackError(
            f"{attack.name} guesses no row that trained"
            + (" and has a label" if attack.target == "labels" else "")
        )
    actual = truth_A[guess.positions.numpy()[scored_N]]
    scale = SCALES[attack.target]
    attacks, baselines, decoys, references = (
        {name: dict(scale.measure(_rows(item, scored_N), actual)) for name, item in items.items()}
        for items in (guess.attacks, guess.baselines, guess.decoys, guess.references)
    )
    # Whoever saw releases may ignore them. Of equals the attack is named, not the baseline.
    variant, best = _best({**attacks, **baselines}, scale.metric)
    without = {**baselines, **{f"{name}{DECOY}": figures for name, figures in decoys.items()}}
    baseline, floor = _best(without, scale.metric)
    chosen = _rows({**guess.baselines, **guess.attacks}[variant], scored_N)
    return AttackResult(
        **_who(attack, view),
        applicable=True,
        metric=scale.metric,
        variant=variant,
        score={**baselines, **attacks}[variant],
        variants=attacks,
        baseline=baseline,
        baselines=without,
        references=references,
        advantage=best - floor,
        knowledge=_declared(view),
        counts={"known": len(known), "scored": len(actual)},
        risk=scale.risk(chosen, actual),
        roc=scale.curve(chosen, actual),
        seed=seed,
    )


def not_applicable(attack: Attack, view: AdversaryView, reason: str, seed: int) -> AttackResult:
    """Return the result of an attack that says nothing here, for a stated reason."""
    return AttackResult(
        **_who(attack, view),
        applicable=False,
        reason=reason,
        knowledge=_declared(view),
        counts={"known": len(_known(attack, view)), "scored": 0},
        seed=seed,
    )


def _rows(prediction: Prediction, chosen_N: Array) -> Prediction:
    return Prediction(prediction.values[chosen_N], prediction.clusters)


def _who(attack: Attack, view: AdversaryView) -> dict[str, Any]:
    return {
        "attack": attack.name,
        "options": attack.model_dump(mode="json", exclude_defaults=True),
        "target": attack.target,
        "victim": view.knowledge.victim,
        "adversary": view.name,
        "role": view.role,
        "behaviour": view.behaviour,
        "method": view.description.name,
    }


def _declared(view: AdversaryView) -> dict[str, int | bool]:
    knowledge = view.knowledge
    return {
        "classes": knowledge.classes,
        "labels": len(knowledge.labels),
        "priors": knowledge.priors is not None,
        "shadow_rows": len(knowledge.shadow),
        "architecture": knowledge.architecture is not None,
        "encoder": knowledge.encoder is not None,
        "public_rows": max(map(len, knowledge.public.values()), default=0),
        "own_features": sum(own[0].numel() for own in view.features.values()),
        "epochs": len(view.epochs),
        "iterations": view.budget.iterations,
    }


def _check(attack: Attack, guess: Guess, known: torch.Tensor) -> None:
    positions = guess.positions
    if not len(positions) or len(set(positions.tolist())) != len(positions):
        raise AttackError(
            f"{attack.name} guesses {len(positions)} rows; it must guess at least one, each once"
        )
    cheated = int(torch.isin(positions, known).sum())
    if cheated:
        raise AttackError(f"{attack.name} guesses {cheated} rows that the adversary knew")


def _check_shapes(attack: Attack, guess: Guess, columns: int) -> None:
    if not guess.attacks or not guess.baselines:
        raise AttackError(f"{attack.name} must give at least one attack and one baseline")
    expected = (len(guess.positions), columns)
    every = (guess.attacks, guess.baselines, guess.references, guess.decoys)
    for name, item in (pair for items in every for pair in items.items()):
        if item.values.shape != expected:
            raise AttackError(
                f"{attack.name}, {name}: expected values of shape {expected}, "
                f"got {item.values.shape}"
            )


def _columns(attack: Attack, truth: Truth, truth_A: Array) -> int:
    """Return how many values one row's guess has."""
    if attack.target == "features":
        return math.prod(truth_A.shape[1:])
    return truth.classes if attack.target == "labels" else 1


def _known(attack: Attack, view: AdversaryView) -> torch.Tensor:
    """Return the positions of which the adversary knows what it attacks."""
    of_target = view.knowledge.labels if attack.target == "labels" else view.knowledge.shadow
    return of_target.positions


def _actual(attack: Attack, view: AdversaryView, truth: Truth) -> Array:
    """Return labels (A,), the victim's features (A, ...), or membership and alignment (n, 2)."""
    if attack.target == "labels":
        return truth.labels.numpy()
    if attack.target == "membership":
        return truth.members.numpy()
    victim = view.knowledge.victim
    if victim is None or victim not in truth.features:
        raise AttackError(f"{attack.name} guesses features of {victim!r}, which holds none")
    return truth.features[victim].double().numpy()


def _best(figures: Mapping[str, Figures], metric: str) -> tuple[str, float]:
    """Return the name and figure of the first entry with the highest `metric`."""
    values = {
        name: value
        for name, of in figures.items()
        if (value := of[metric]) is not None and math.isfinite(value)
    }
    if not values:
        raise AttackError(f"{metric} is undefined: what was guessed is the same for all rows")
    name = max(values, key=lambda item: values[item])
    return name, values[name]
