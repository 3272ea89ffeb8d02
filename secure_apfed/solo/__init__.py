"""The local baselines, which the active trains alone with few labels, and the choice of the best
one by its own labels.

In addition to the single models there are the mean of their probabilities and the mean of the best
three (`COMBINATIONS`): with 50 labels the winner of ten by cross-validation is often worse than the
mean of all. A model that has collapsed, so that it calls nearly all rows one class that is rare
among the labels, is never chosen and never averaged (`has_collapsed`).

Run by: the active, which uses the chosen baseline as the prior of votes, and by measurements of the
gain by help. Passives' help is measured against the best of these, not against the run's own
network only: with few labels and many unlabelled rows the best baseline is often one that uses the
unlabelled rows. From few labels the choice is often not the one that the test rows would have made,
so a study that claims a gain should also name the baseline with the best mean over its seeds, and
gain over that one. A new baseline is one class and one line here.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self, TypeVar

import numpy as np
from torch import nn

from secure_apfed.base.seeds import derive_seed
from secure_apfed.errors import ModelError
from secure_apfed.measures.table import Measure, Scored, probabilities_of
from secure_apfed.solo.classical import (
    ExtraTrees,
    GradientBoosting,
    Logistic,
    Ridge,
    SelfTraining,
    Spreading,
    SpreadingStudent,
)
from secure_apfed.solo.fitted import FittedModel, View, average_of
from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    Predictor,
    SoloTask,
    cache_fits,
    fit_name,
    fit_once,
    measure_of_classes,
    score_once,
    split_folds,
)
from secure_apfed.solo.networks import Autoencoder, MixMatch, Network

__all__ = [
    "BASELINES",
    "COMBINATIONS",
    "FOLDS",
    "MAX_APART",
    "TEACHERS",
    "Baseline",
    "LocalModel",
    "MeanOfModels",
    "Predictor",
    "SoloTask",
    "average_held_out",
    "choose_baseline",
    "convert_predictor",
    "every_baseline",
    "find_baseline",
    "has_collapsed",
    "likelihood_of",
    "list_local_models",
    "mean_of",
    "measure_collapse",
    "measure_of_classes",
    "pick_models",
    "rank_of",
    "score_out_of_fold",
    "surely_better",
    "validation_of",
]

FOLDS = 3

_ALL: tuple[Baseline, ...] = (
    MixMatch(),
    SpreadingStudent(),
    Spreading(),
    Ridge(),
    Logistic(),
    SelfTraining(),
    Autoencoder(),
    ExtraTrees(),
    GradientBoosting(),
    Network(),
)

BASELINES: Mapping[str, Baseline] = MappingProxyType({baseline.name: baseline for baseline in _ALL})
"""Local baselines by name; of equally good ones the first is preferred."""
TEACHERS = tuple(baseline for name, baseline in BASELINES.items() if name != "network")
"""Baselines that may read others' numbers beside own features: all but the run's own network."""
_RESAMPLES = 200
MAX_APART = 0.4
"""Total variation between the classes that a model predicts and those of the labels, at most."""
_MIN_UNLABELLED = 30
"""Rows needed to detect a collapse."""
_MIN_LIKELY = 1e-6
"""Smallest probability in a log-likelihood, so that one row predicted with certainty and wrongly
decides no tie."""


def list_local_models() -> tuple[Baseline, ...]:
    """Return the single models that can be stored and averaged: all but the run's own network."""
    return tuple(baseline for baseline in BASELINES.values() if not baseline.of_run)


def measure_collapse(predictor: Predictor, task: SoloTask) -> float:
    """Return how far the predicted classes are from the labels' classes, 0 to 1.

    It is the total variation distance between the class shares predicted on rows without a label
    and those of the labels; 0 if fewer than 30 rows have no label.

    `predictor`: a fitted model.
    """
    unlabelled = np.setdiff1d(np.arange(len(task.features)), task.labelled)
    if len(unlabelled) < _MIN_UNLABELLED:
        return 0.0
    predicted = predictor.compute_scores(task.features[unlabelled]).argmax(axis=1)
    predicted_K = np.bincount(predicted, minlength=task.classes) / len(predicted)
    labels_K = np.bincount(task.labels, minlength=task.classes) / len(task.labels)
    return float(np.abs(predicted_K - labels_K).sum() / 2)


def every_baseline() -> dict[str, Baseline]:
    """Return the single models and their combinations, by name."""
    return {**BASELINES, **COMBINATIONS}


def has_collapsed(baseline: Baseline, task: SoloTask) -> bool:
    """Return whether a baseline fitted to this task has collapsed: predicts classes in other shares
    than the labels have (by more than `MAX_APART`).

    The result is cached where a store of fits is in use. Raises ModelError: the baseline
    cannot be fitted to these rows.
    """

    def compute_collapse() -> FloatArray:
        """Return the distance in an array, as the store has scores."""
        return np.array([measure_collapse(fit_once(baseline, task), task)])

    name = f"apart-{fit_name(baseline, task)}"
    (collapse,) = score_once(name, task, compute_collapse, of_run=baseline.of_run)
    return bool(collapse > MAX_APART)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalModel:
    """A baseline with its training rows and labels; it is fitted at its first use."""

    baseline: Baseline
    task: SoloTask

    @classmethod
    def choose_best(cls, task: SoloTask, *, candidates: Iterable[Baseline] | None = None) -> Self:
        """Return a task's best model by held-out labels; see `choose_baseline`."""
        return cls(baseline=choose_baseline(task, candidates=candidates), task=task.with_few_rows)

    @property
    def name(self) -> str:
        return self.baseline.name

    def fit(self) -> Predictor:
        """Return the fitted baseline; within `cache_fits` it is fitted once."""
        return fit_once(self.baseline, self.task)

    def build_network(self) -> nn.Module:
        """Return the fitted baseline as a network with parameters of its own."""
        make_model = self.fit().kept
        assert make_model is not None  # every baseline has a model
        return copy.deepcopy(make_model())

    def has_collapsed(self) -> bool:
        """Return whether it predicts classes in other shares than the labels have."""
        return has_collapsed(self.baseline, self.task)

    def score_held_out(self) -> Scored | None:
        """Return its out-of-fold predictions; None: no label can be held out."""
        return score_out_of_fold(self.baseline, self.task)

    def compute_rank(self) -> tuple[float, float]:
        """Return the task's measure and the mean log-likelihood of held-out labels, as a key to
        sort by: higher is better.
        """
        scored = self.score_held_out()
        return rank_of(scored, self.task.measure), likelihood_of(scored)


ModelT = TypeVar("ModelT", bound=LocalModel)


def pick_models(
    models: Iterable[ModelT], *, maximum: int | None = None
) -> tuple[list[ModelT], list[str]]:
    """Return the models to use, and the names of the others with the reason.

    A collapsed model is not used, unless all have collapsed: then the labels' class shares are no
    guide.

    Args:
        maximum: how many to use, the best by held-out labels, best first; None: all, in their
            order. Models ranked lower are neither fitted to all labels nor named.

    Raises ModelError: no model can be fitted.
    """
    omitted: list[str] = []
    if maximum is not None:
        models = _rank_models(models, omitted)
    intact: list[ModelT] = []
    collapsed: list[ModelT] = []
    for model in models:
        if maximum is not None and len(intact) == maximum:
            break
        try:
            group = collapsed if model.has_collapsed() else intact
        except ModelError:
            omitted.append(_describe_fit_failure(model))
        else:
            group.append(model)
    if intact:
        omitted += [f"{model.name}: it collapsed" for model in collapsed]
    usable = (intact or collapsed)[:maximum]
    if not usable:
        raise ModelError("no local model can be fitted to the rows of this run")
    return usable, omitted


def _rank_models(models: Iterable[ModelT], omitted: list[str]) -> list[ModelT]:
    """Return the models that can be fitted, best first; append the names of the others, with the
    reason, to `omitted`.
    """
    ranks: dict[ModelT, tuple[float, float]] = {}
    for model in models:
        try:
            ranks[model] = model.compute_rank()
        except ModelError:
            omitted.append(_describe_fit_failure(model))
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


def _describe_fit_failure(model: LocalModel) -> str:
    """Return a model's name, and that it cannot be fitted."""
    return f"{model.name}: it cannot be fitted"


def average_held_out(models: Iterable[LocalModel]) -> Scored | None:
    """Return the mean held-out predictions of models of one task; None: no label is held out."""
    predictions = [model.score_held_out() for model in models]
    scored = [held_out for held_out in predictions if held_out is not None]
    if not scored:
        return None
    mean_nK = np.mean([held_out.scores for held_out in scored], axis=0)
    return Scored(truth=scored[0].truth, scores=mean_nK)


class MeanOfModels(Baseline):
    """The mean of the probabilities of local models, all of them or the best by validation.

    Args:
        maximum: how many models, the best by held-out labels; None: all.
    """

    def __init__(self, name: str, title: str, *, maximum: int | None = None) -> None:
        """Set the name, and how many models are averaged; None: all."""
        self.name = name
        self.title = title
        self.reads_measure = maximum is not None
        self._most = maximum

    def pick_members(self, task: SoloTask) -> list[LocalModel]:
        """Return the models to average: no collapsed ones, unless all have collapsed."""
        models = [LocalModel(baseline=baseline, task=task) for baseline in list_local_models()]
        return pick_models(models, maximum=self._most)[0]

    def fit(self, task: SoloTask) -> Predictor:
        """Fit all models of the average, and return the mean of their probabilities."""
        with cache_fits():
            predictors = [member.fit() for member in self.pick_members(task)]
        return mean_of(predictors, features=task.features.shape[1])

    def score_held_out(self, task: SoloTask) -> Scored | None:
        """Return the mean of the averaged models' held-out predictions."""
        return average_held_out(self.pick_members(task))


def mean_of(predictors: Sequence[Predictor], *, features: int) -> Predictor:
    """Return a predictor of the mean of these models' probabilities.

    `features`: F, columns of a row, which all of them read.
    """

    def score_rows(rows_BF: FloatArray) -> FloatArray:
        """Return mean probabilities (B, K)."""
        probabilities = [probabilities_of(predictor.of_block(rows_BF)) for predictor in predictors]
        return np.asarray(np.mean(probabilities, axis=0), dtype=np.float64)

    def build_network() -> FittedModel:
        """Return the mean as one model that can be stored."""
        view = View.for_whole_row(features)
        return average_of([(view, convert_predictor(predictor)) for predictor in predictors])

    return Predictor(score_rows, build_network)


def convert_predictor(predictor: Predictor) -> FittedModel:
    """Return a local model as a fitted model, with tensors of its own."""
    assert predictor.kept is not None  # every local model can be stored
    model = predictor.kept()
    assert isinstance(model, FittedModel)
    return model


_MEANS = (
    MeanOfModels("mean", "Mean of the local models"),
    MeanOfModels("mean_of_three", "Mean of the best three local models", maximum=3),
)
COMBINATIONS: Mapping[str, MeanOfModels] = MappingProxyType(
    {combination.name: combination for combination in _MEANS}
)
"""Means of local models by name, which are candidates in addition to each model."""


def find_baseline(name: str) -> Baseline:
    """Return the single model or combination of this name."""
    return next(baseline for baseline in (*_ALL, *_MEANS) if baseline.name == name)


def choose_baseline(task: SoloTask, *, candidates: Iterable[Baseline] | None = None) -> Baseline:
    """Return the baseline with the best measure on held-out labels.

    Ties go to the one with the higher likelihood of these labels. One that cannot be fitted with
    the run's settings is skipped, and so is one that has collapsed, unless all have.

    `candidates`: the baselines to choose from; None: all single models and combinations.

    Raises ModelError: none can be fitted.
    """
    task = task.with_few_rows  # the labelled rows that cross-validation can afford
    ranked: dict[Baseline, tuple[float, float]] = {}
    with cache_fits():
        for baseline in every_baseline().values() if candidates is None else candidates:
            with suppress(ModelError):
                ranked[baseline] = LocalModel(baseline=baseline, task=task).compute_rank()
        best_first = sorted(ranked, key=ranked.__getitem__, reverse=True)
        for baseline in best_first:
            if not has_collapsed(baseline, task):
                return baseline
    if not best_first:
        raise ModelError("no local model can be fitted to the rows of this run")
    return best_first[0]


def likelihood_of(scored: Scored | None) -> float:
    """Return the mean log probability of the true classes; -inf without rows."""
    if scored is None or not len(scored.truth):
        return -math.inf
    truth_n = scored.truth.astype(np.int64)
    probability_n = scored.scores[np.arange(len(truth_n)), truth_n]
    return float(np.log(probability_n.clip(min=_MIN_LIKELY)).mean())


def validation_of(scored: Scored | None, measure: Measure) -> float | None:
    """Return the measure on held-out labels; None: there are none, or it is undefined."""
    value = math.nan if scored is None else measure.compute_value(scored)
    return None if math.isnan(value) else value


def score_out_of_fold(baseline: Baseline, task: SoloTask) -> Scored | None:
    """Return the scores of held-out labelled rows, each fold's by a model fitted without its
    labels.

    There are three folds, fewer where a class has fewer labels, and one from 400 labels on; their
    rows stay among the unlabelled ones. None if no label can be held out, since every class has
    only one.
    """
    task = task.with_few_rows
    if isinstance(baseline, MeanOfModels):
        return baseline.score_held_out(task)
    parts = split_folds(task.labels, FOLDS, task.seed)
    if not parts:
        return None

    def out_of_fold() -> FloatArray:
        """Return the scores of the held-out rows, one fold after the other."""
        tasks = [task.drop_labels(part) for part in parts]
        # With the whole task, which is fitted next: a baseline that trains all tasks in parallel
        # then hardly takes longer. Others fit a task when it is read, and the last is not read.
        fitted = baseline.fit_together([*tasks, task])
        scores = [
            predictor.compute_scores(task.labelled_rows[part])
            for part, predictor in zip(parts, fitted, strict=False)
        ]
        return np.concatenate(scores)

    name = f"without-{len(parts)}-of-{FOLDS}-{baseline.name}"
    scores_nK = score_once(name, task, out_of_fold, of_run=baseline.of_run)
    truth_n = task.labels[np.concatenate(parts)]
    return Scored(truth=truth_n, scores=probabilities_of(scores_nK))


def rank_of(scored: Scored | None, measure: Measure) -> float:
    """Return a number that is higher for better predictions; -inf without predictions."""
    return measure.rank_value(None if scored is None else measure.compute_value(scored))


def surely_better(
    first: Scored | None, second: Scored | None, measure: Measure, *, seed: int
) -> bool:
    """Return whether `first` is better than `second` on the same rows by more than the standard
    deviation of that gain.

    The deviation is over bootstrap resamples of the rows; resamples that do not define the measure
    are skipped.
    """
    if first is None or second is None:
        return False
    draw = np.random.default_rng(derive_seed(seed, "help or none"))
    gains = []
    for _ in range(_RESAMPLES):
        rows_n = draw.integers(len(first.truth), size=len(first.truth))
        pair = (
            Scored(truth=scored.truth[rows_n], scores=scored.scores[rows_n])
            for scored in (first, second)
        )
        first_rank, second_rank = (rank_of(scored, measure) for scored in pair)
        if math.isfinite(first_rank) and math.isfinite(second_rank):
            gains.append(first_rank - second_rank)
    gain = rank_of(first, measure) - rank_of(second, measure)
    return len(gains) > 1 and math.isfinite(gain) and gain > float(np.std(gains))
