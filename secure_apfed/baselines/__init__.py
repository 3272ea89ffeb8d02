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
from secure_apfed.baselines.classical import (
    ExtraTrees,
    GradientBoosting,
    Logistic,
    Ridge,
    SelfTraining,
    Spreading,
    SpreadingStudent,
)
from secure_apfed.baselines.fitted import ColumnView, FittedModel, average_models
from secure_apfed.baselines.interface import (
    Baseline,
    BaselineTask,
    FloatArray,
    Predictor,
    cache_fits,
    choose_class_measure,
    fit_once,
    name_fit,
    score_once,
    split_folds,
)
from secure_apfed.baselines.networks import Autoencoder, MixMatch, Network
from secure_apfed.errors import ModelError
from secure_apfed.measures.table import Measure, Scored, normalise_scores

__all__ = [
    "BASELINES",
    "COMBINATIONS",
    "FOLDS",
    "MAX_SHARE_DISTANCE",
    "TEACHERS",
    "Baseline",
    "BaselineTask",
    "LocalModel",
    "MeanOfModels",
    "Predictor",
    "average_held_out",
    "average_predictors",
    "choose_baseline",
    "choose_class_measure",
    "compute_mean_log_likelihood",
    "compute_validation",
    "convert_predictor",
    "find_baseline",
    "has_collapsed",
    "is_significantly_better",
    "list_candidates",
    "list_local_models",
    "measure_collapse",
    "pick_models",
    "rank_scores",
    "score_out_of_fold",
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
"""Bootstrap resamples of a comparison."""
MAX_SHARE_DISTANCE = 0.4
"""A model has collapsed if its predicted class shares differ from the labels' by more than this, in
total variation."""
_MIN_UNLABELLED = 30
"""Smallest number of unlabelled rows by which a collapse is measured."""
_MIN_LIKELY = 1e-6
"""Smallest probability in a log-likelihood, so that one row predicted with certainty and wrongly
decides no tie."""


def list_local_models() -> tuple[Baseline, ...]:
    """Return the single models that can be stored and averaged: all but the run's own network."""
    return tuple(baseline for baseline in BASELINES.values() if not baseline.is_run_network)


def measure_collapse(predictor: Predictor, task: BaselineTask) -> float:
    """Return how far the predicted class shares are from the labels' class shares, 0 to 1.

    The measure is their total variation distance. Predictions are made for the rows without a
    label; if these are fewer than 30, the result is 0.

    `predictor`: a fitted model. `task`: the rows, and the labels of some of them.
    """
    unlabelled_rows = np.setdiff1d(np.arange(len(task.features)), task.labelled_indices)
    if len(unlabelled_rows) < _MIN_UNLABELLED:
        return 0.0
    predicted_classes = predictor.compute_scores(task.features[unlabelled_rows]).argmax(axis=1)
    predicted_share_K = np.bincount(predicted_classes, minlength=task.classes) / len(
        predicted_classes
    )
    labelled_share_K = np.bincount(task.labels, minlength=task.classes) / len(task.labels)
    return float(np.abs(predicted_share_K - labelled_share_K).sum() / 2)


def list_candidates() -> dict[str, Baseline]:
    """Return the single models and their combinations, by name."""
    return {**BASELINES, **COMBINATIONS}


def has_collapsed(baseline: Baseline, task: BaselineTask) -> bool:
    """Return whether a baseline fitted to this task has collapsed.

    It has if it predicts classes in other shares than the labels have, by more than
    `MAX_SHARE_DISTANCE`. The result is cached if a store of fits is in use. Raises ModelError: the
    baseline cannot be fitted to these rows.
    """

    def compute_collapse() -> FloatArray:
        """Return the distance as an array, since the store takes arrays of scores."""
        return np.array([measure_collapse(fit_once(baseline, task), task)])

    store_name = f"apart-{name_fit(baseline, task)}"
    (share_distance,) = score_once(
        store_name, task, compute_collapse, is_run_network=baseline.is_run_network
    )
    return bool(share_distance > MAX_SHARE_DISTANCE)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalModel:
    """A baseline with its training rows and labels; it is fitted at its first use."""

    baseline: Baseline
    task: BaselineTask

    @classmethod
    def choose_best(
        cls, task: BaselineTask, *, candidates: Iterable[Baseline] | None = None
    ) -> Self:
        """Return the task's best model by held-out labels; see `choose_baseline`.

        `candidates`: the baselines to choose from; None: all single models and combinations.
        """
        return cls(baseline=choose_baseline(task, candidates=candidates), task=task.subsampled)

    @property
    def name(self) -> str:
        """The baseline's name."""
        return self.baseline.name

    def fit(self) -> Predictor:
        """Fit the baseline, and return it; within `cache_fits` it is fitted once."""
        return fit_once(self.baseline, self.task)

    def build_network(self) -> nn.Module:
        """Fit the baseline, and return it as a network, which can be stored."""
        make_model = self.fit().make_network
        assert make_model is not None  # every baseline has a model
        return copy.deepcopy(make_model())

    def has_collapsed(self) -> bool:
        """Return whether it predicts classes in very different shares than the labels have."""
        return has_collapsed(self.baseline, self.task)

    def score_held_out(self) -> Scored | None:
        """Return its out-of-fold predictions; None: no label can be held out."""
        return score_out_of_fold(self.baseline, self.task)

    def compute_rank(self) -> tuple[float, float]:
        """Return a key by which models are sorted; higher is better.

        It is the task's measure on held-out labels, and for ties their mean log-likelihood.
        """
        scored = self.score_held_out()
        return rank_scores(scored, self.task.measure), compute_mean_log_likelihood(scored)


ModelT = TypeVar("ModelT", bound=LocalModel)


def pick_models(
    models: Iterable[ModelT], *, max_models: int | None = None
) -> tuple[list[ModelT], list[str]]:
    """Return the models to use, and for each omitted one its name with the reason.

    A collapsed model predicts classes in very different shares than the labels have. It is omitted,
    unless all have collapsed: then the labels' class shares are no guide.

    Args:
        models: the models to choose from; they are fitted.
        max_models: how many to use, the best by held-out labels, best first; None: all, in their
            order. Models ranked lower are neither fitted to all labels nor named.

    Raises ModelError: no model can be fitted.
    """
    omitted: list[str] = []
    if max_models is not None:
        models = _rank_models(models, omitted)
    intact: list[ModelT] = []
    collapsed: list[ModelT] = []
    for model in models:
        if max_models is not None and len(intact) == max_models:
            break
        try:
            group = collapsed if model.has_collapsed() else intact
        except ModelError:
            omitted.append(_describe_fit_failure(model))
        else:
            group.append(model)
    if intact:
        omitted += [f"{model.name}: it collapsed" for model in collapsed]
    usable = (intact or collapsed)[:max_models]
    if not usable:
        raise ModelError("no local model can be fitted to the rows of this run")
    return usable, omitted


def _rank_models(models: Iterable[ModelT], omitted: list[str]) -> list[ModelT]:
    """Return the models that can be fitted, best first by held-out labels.

    The names of the others are appended to `omitted`, with the reason.
    """
    rank_by_model: dict[ModelT, tuple[float, float]] = {}
    for model in models:
        try:
            rank_by_model[model] = model.compute_rank()
        except ModelError:
            omitted.append(_describe_fit_failure(model))
    return sorted(rank_by_model, key=rank_by_model.__getitem__, reverse=True)


def _describe_fit_failure(model: LocalModel) -> str:
    """Return a sentence that says that a model cannot be fitted."""
    return f"{model.name}: it cannot be fitted"


def average_held_out(models: Iterable[LocalModel]) -> Scored | None:
    """Return the mean of several models' held-out predictions; None: no label can be held out.

    All models belong to one task, so that they hold out the same rows.
    """
    held_out_by_model = [model.score_held_out() for model in models]
    available = [held_out for held_out in held_out_by_model if held_out is not None]
    if not available:
        return None
    mean_nK = np.mean([held_out.scores for held_out in available], axis=0)
    return Scored(truth=available[0].truth, scores=mean_nK)


class MeanOfModels(Baseline):
    """A baseline that averages the probabilities of local models, of all or of the best."""

    def __init__(self, name: str, title: str, *, max_models: int | None = None) -> None:
        """Set the names, and how many models are averaged.

        Args:
            name: the baseline's key.
            title: the baseline's name for people.
            max_models: how many models are averaged, the best by held-out labels; None: all.
        """
        self.name = name
        self.title = title
        # Only a choice of the best models needs a measure to rank them.
        self.needs_measure = max_models is not None
        self._max_models = max_models

    def pick_members(self, task: BaselineTask) -> list[LocalModel]:
        """Return the models to average; collapsed ones are left out, unless all have collapsed."""
        models = [LocalModel(baseline=baseline, task=task) for baseline in list_local_models()]
        members, _ = pick_models(models, max_models=self._max_models)
        return members

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit all models of the average, and return the mean of their probabilities."""
        with cache_fits():
            predictors = [member.fit() for member in self.pick_members(task)]
        return average_predictors(predictors, feature_count=task.features.shape[1])

    def score_held_out(self, task: BaselineTask) -> Scored | None:
        """Return the mean of the averaged models' held-out predictions."""
        return average_held_out(self.pick_members(task))


def average_predictors(predictors: Sequence[Predictor], *, feature_count: int) -> Predictor:
    """Return a predictor of the mean of these models' probabilities.

    `feature_count`: number of columns of a row; every model reads all of them.
    """

    def score_rows(rows_BF: FloatArray) -> FloatArray:
        """Return mean probabilities of K classes for B rows, (B, K)."""
        probabilities = [
            normalise_scores(predictor.score_block(rows_BF)) for predictor in predictors
        ]
        return np.asarray(np.mean(probabilities, axis=0), dtype=np.float64)

    def build_network() -> FittedModel:
        """Return the mean as one model that can be stored."""
        view = ColumnView.for_whole_row(feature_count)
        return average_models([(view, convert_predictor(predictor)) for predictor in predictors])

    return Predictor(score_rows, build_network)


def convert_predictor(predictor: Predictor) -> FittedModel:
    """Return a local model as a network of tensors (`FittedModel`), which can be stored."""
    assert predictor.make_network is not None  # every local model can be stored
    model = predictor.make_network()
    assert isinstance(model, FittedModel)
    return model


_MEANS = (
    MeanOfModels("mean", "Mean of the local models"),
    MeanOfModels("mean_of_three", "Mean of the best three local models", max_models=3),
)
COMBINATIONS: Mapping[str, MeanOfModels] = MappingProxyType(
    {combination.name: combination for combination in _MEANS}
)
"""Means of local models by name, which are candidates in addition to each model."""


def find_baseline(name: str) -> Baseline:
    """Return the single model or combination of this name."""
    return next(baseline for baseline in (*_ALL, *_MEANS) if baseline.name == name)


def choose_baseline(
    task: BaselineTask, *, candidates: Iterable[Baseline] | None = None
) -> Baseline:
    """Return the baseline with the best measure on held-out labels.

    Between equal ones, the higher likelihood of these labels decides. A baseline that cannot be
    fitted is skipped. A collapsed one, which predicts classes in very different shares than the
    labels have, is skipped, too, unless all have collapsed.

    `candidates`: the baselines to choose from; None: all single models and combinations.

    Raises ModelError: no baseline can be fitted.
    """
    task = task.subsampled  # the labelled rows that cross-validation can afford
    rank_by_baseline: dict[Baseline, tuple[float, float]] = {}
    with cache_fits():
        for baseline in list_candidates().values() if candidates is None else candidates:
            with suppress(ModelError):
                rank_by_baseline[baseline] = LocalModel(baseline=baseline, task=task).compute_rank()
        best_first = sorted(rank_by_baseline, key=rank_by_baseline.__getitem__, reverse=True)
        for baseline in best_first:
            if not has_collapsed(baseline, task):
                return baseline
    if not best_first:
        raise ModelError("no local model can be fitted to the rows of this run")
    return best_first[0]


def compute_mean_log_likelihood(scored: Scored | None) -> float:
    """Return the mean log-probability of the true classes; -inf without scored rows."""
    if scored is None or not len(scored.truth):
        return -math.inf
    truth_n = scored.truth.astype(np.int64)
    probability_n = scored.scores[np.arange(len(truth_n)), truth_n]
    return float(np.log(probability_n.clip(min=_MIN_LIKELY)).mean())


def compute_validation(scored: Scored | None, measure: Measure) -> float | None:
    """Return the measure of these held-out scores; None: there are none, or it is undefined."""
    value = math.nan if scored is None else measure.compute_value(scored)
    return None if math.isnan(value) else value


def score_out_of_fold(baseline: Baseline, task: BaselineTask) -> Scored | None:
    """Return the scores of labelled rows by models that were fitted without their labels.

    The labelled rows are split into three folds. There are fewer folds if a class has fewer labels,
    and only one fold is scored from 400 labels on. A held-out row stays among the unlabelled ones.
    None: no label can be held out, since every class has only one.
    """
    task = task.subsampled
    if isinstance(baseline, MeanOfModels):
        return baseline.score_held_out(task)
    folds = split_folds(task.labels, FOLDS, task.seed)
    if not folds:
        return None

    def compute_scores() -> FloatArray:
        """Return the scores of the held-out rows, one fold after the other."""
        tasks = [task.drop_labels(fold) for fold in folds]
        # The whole task is usually fitted next. A baseline that trains tasks in parallel fits it
        # along with the folds in hardly more time. Other baselines fit a task only when its
        # predictor is read, and the last one is not read here.
        predictors = baseline.fit_together([*tasks, task])
        scores = [
            predictor.compute_scores(task.labelled_features[fold])
            for fold, predictor in zip(folds, predictors, strict=False)
        ]
        return np.concatenate(scores)

    store_name = f"without-{len(folds)}-of-{FOLDS}-{baseline.name}"
    scores_nK = score_once(store_name, task, compute_scores, is_run_network=baseline.is_run_network)
    truth_n = task.labels[np.concatenate(folds)]
    return Scored(truth=truth_n, scores=normalise_scores(scores_nK))


def rank_scores(scored: Scored | None, measure: Measure) -> float:
    """Return the measure of these scores, turned so that higher is better; -inf without scores."""
    return measure.rank_value(None if scored is None else measure.compute_value(scored))


def is_significantly_better(
    first: Scored | None, second: Scored | None, measure: Measure, *, seed: int
) -> bool:
    """Return whether `first` is better than `second` by more than the deviation of the gain.

    Both are scores of the same rows. The standard deviation of the gain in the measure is taken
    over bootstrap resamples of the rows. Resamples on which the measure is undefined are skipped,
    for example those with a single class. Without scores the result is False.
    """
    if first is None or second is None:
        return False
    generator = np.random.default_rng(derive_seed(seed, "help or none"))
    resampled_gains = []
    for _ in range(_RESAMPLES):
        resampled_rows_n = generator.integers(len(first.truth), size=len(first.truth))
        resampled_first = Scored(
            truth=first.truth[resampled_rows_n], scores=first.scores[resampled_rows_n]
        )
        resampled_second = Scored(
            truth=second.truth[resampled_rows_n], scores=second.scores[resampled_rows_n]
        )
        first_rank = rank_scores(resampled_first, measure)
        second_rank = rank_scores(resampled_second, measure)
        if math.isfinite(first_rank) and math.isfinite(second_rank):
            resampled_gains.append(first_rank - second_rank)
    gain = rank_scores(first, measure) - rank_scores(second, measure)
    return (
        len(resampled_gains) > 1 and math.isfinite(gain) and gain > float(np.std(resampled_gains))
    )
