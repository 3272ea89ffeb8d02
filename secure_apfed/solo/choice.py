"""The best that the active does alone, chosen as it would have to choose: by its own labels.

Run by: the active, whose votes have what it chooses as their prior, and whoever measures what help
was worth. Test rows only measure; they choose nothing, but for anomalies. From few labels the
choice is often not the one that the test rows would have made, so a study that claims a gain should
also name the baseline with the best mean over its seeds, and gain over that one.

Letters: n labelled rows, T training rows, B rows to predict, F features of a row, K classes.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from secure_apfed.errors import DataError, ModelError
from secure_apfed.measures import ACCURACY, Measure, Scored, probabilities_of
from secure_apfed.seeds import derive_seed
from secure_apfed.solo import BASELINES
from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    IntArray,
    SoloTask,
    checked_rows,
    fits_kept_meanwhile,
    held_out,
    scored_once,
)

__all__ = [
    "DETECTORS",
    "FOLDS",
    "REGRESSORS",
    "BaselineResult",
    "best",
    "chosen",
    "compare",
    "compare_detectors",
    "compare_numbers",
]

FOLDS = 3
_LAMBDAS = tuple(10.0**power for power in range(-3, 5))
_COSINES = 300
_FOLDS_OF_NUMBERS, _FEWEST = 5, 4
_SHARE = 0.9  # of the variance, that principal components keep
_NEIGHBOURS = 20


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """How one baseline did, by the measure on held-out labels and on test rows.

    The first is None where none could be held out, since every class has one, or where they do not
    define it.
    """

    name: str
    title: str
    validation: float | None
    test: float


def compare(
    task: SoloTask,
    test_features: ArrayLike,
    test_labels: ArrayLike,
    *,
    baselines: Mapping[str, Baseline] = BASELINES,
    measure: Measure = ACCURACY,
) -> list[BaselineResult]:
    """Fit every baseline on all labels for the test rows, and on parts of them for the choice.

    All baselines are judged on the same held-out labels, whose rows stay among the unlabelled ones:
    three parts, fewer where a class has fewer labels, and from 400 labels on one of them. Test rows
    are (B, *shape) or flattened. Scores that are no probabilities are measured by those that they
    stand for (`secure_apfed.measures.probabilities_of`).

    Raises:
        DataError: test rows that do not fit the task.
        ModelError: the run's own network diverged or cannot take such rows.
    """
    x_BF, y_B = _test_rows(task, test_features, test_labels)
    with fits_kept_meanwhile():
        return [
            BaselineResult(
                name=name,
                title=baseline.title,
                validation=_validation(baseline, task, measure),
                test=measure.of(_scored(baseline.fit(task).scores(x_BF), y_B)),
            )
            for name, baseline in baselines.items()
        ]


def chosen(task: SoloTask, *, measure: Measure = ACCURACY) -> Baseline:
    """Return the baseline with the best validation, as `compare` and `best` find it.

    One that cannot be fitted with the settings of the run is passed over.
    """
    found = {}
    with fits_kept_meanwhile():
        for name, baseline in BASELINES.items():
            with suppress(ModelError):
                found[name] = measure.rank(_validation(baseline, task, measure))
    return BASELINES[max(found, key=found.__getitem__)]


def best(results: Iterable[BaselineResult], *, measure: Measure = ACCURACY) -> BaselineResult:
    """Return the one with the best validation; the first of equals. DataError: there is none."""
    ranked = tuple(results)
    if not ranked:
        raise DataError("solo: there is no baseline to choose from")
    return max(ranked, key=lambda result: measure.rank(result.validation))


def _validation(baseline: Baseline, task: SoloTask, measure: Measure) -> float | None:
    """The measure on the labels held out, of each part by what was fitted without it."""
    parts = held_out(task.labels, FOLDS, task.seed)
    if not parts:
        return None

    def out_of_fold() -> FloatArray:
        """Scores of the labelled rows of the parts, one part after the other."""
        tasks = [task.without(part) for part in parts]
        # The whole task, too, where they learn at the same time: it takes hardly longer, and is
        # asked for next. Where they do not, it is not reached.
        fitted = baseline.fit_together([*tasks, task])
        scores = [
            predictor.scores(task.labelled_rows[part])
            for part, predictor in zip(parts, fitted, strict=False)
        ]
        return np.concatenate(scores)

    name = f"without-{len(parts)}-of-{FOLDS}-{baseline.name}"
    scores_nK = scored_once(name, task, out_of_fold)
    value = measure.of(_scored(scores_nK, task.labels[np.concatenate(parts)]))
    return None if math.isnan(value) else value


def _scored(scores_BK: FloatArray, y_B: IntArray) -> Scored:
    return Scored(truth=y_B, scores=probabilities_of(scores_BK))


def _test_rows(
    task: SoloTask, features: ArrayLike, labels: ArrayLike
) -> tuple[FloatArray, IntArray]:
    x_BF, y_B = np.asarray(features, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if x_BF.ndim > 2 and x_BF.shape[1:] == task.shape:
        x_BF = x_BF.reshape(len(x_BF), -1)
    checked_rows(x_BF, task.shape)
    if y_B.shape != (len(x_BF),):
        raise DataError(f"solo: {len(x_BF)} test rows need as many labels, got shape {y_B.shape}")
    return x_BF, y_B


REGRESSORS: Mapping[str, str] = MappingProxyType({
    "ridge": "Ridge regression",
    "cosines": "Ridge on random features",
    "gradient_boosting": "Gradient boosting",
    "random_forest": "Random forest",
    "mean": "Mean of the labels",
})  # fmt: skip
"""Titles by name, in the order in which equals are preferred."""


def _regressor(name: str, rows: int, seed: int) -> Any:
    """An unfitted one of `REGRESSORS` for so many rows; a seed of 32 bits."""
    from sklearn.dummy import DummyRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scale, ridge = StandardScaler(), RidgeCV(alphas=_LAMBDAS)
    cosines = RBFSampler(gamma="scale", n_components=_COSINES, random_state=seed)
    return {
        "ridge": make_pipeline(scale, ridge),
        "cosines": make_pipeline(scale, cosines, ridge),
        "gradient_boosting": HistGradientBoostingRegressor(
            max_iter=60, max_leaf_nodes=8, min_samples_leaf=min(max(rows // 8, 1), 20),
            early_stopping=False, random_state=seed,
        ),
        "random_forest": RandomForestRegressor(
            n_estimators=200, min_samples_leaf=3, random_state=seed
        ),
        "mean": DummyRegressor(),
    }[name]  # fmt: skip


def compare_numbers(
    features_nF: ArrayLike, targets_n: ArrayLike, test_features_BF: ArrayLike,
    test_targets_B: ArrayLike, *, measure: Measure, seed: int = 0,
) -> list[BaselineResult]:  # fmt: skip
    """Where labels are numbers: fit every regression on all labelled rows, and in folds of them.

    Features are of any shape, labels in their unit, and the measure is one of regression.

    Raises:
        DataError: too few labelled rows, rows and labels that do not go together, or values that
            are not finite.
    """
    x_nF, y_n = _checked_numbers(features_nF, targets_n)
    x_BF, y_B = _checked_numbers(test_features_BF, test_targets_B)
    if len(y_n) < _FEWEST:
        raise DataError(
            f"solo: {len(y_n)} labelled rows are too few to choose a regression by; label "
            f"{_FEWEST} or more"
        )
    from sklearn.model_selection import KFold, cross_val_predict

    parts, state = min(_FOLDS_OF_NUMBERS, len(y_n)), derive_seed(seed, "solo", "folds") % 2**32
    folds = KFold(parts, shuffle=True, random_state=state)

    def result(name: str, title: str) -> BaselineResult:
        model = _regressor(name, len(y_n), derive_seed(seed, "solo", name) % 2**32)
        said_n = cross_val_predict(model, x_nF, y_n, cv=folds)
        value = measure.of(Scored(truth=y_n, scores=said_n))
        test_B = model.fit(x_nF, y_n).predict(x_BF)
        return BaselineResult(
            name=name,
            title=title,
            validation=None if math.isnan(value) else value,
            test=measure.of(Scored(truth=y_B, scores=test_B)),
        )

    return [result(name, title) for name, title in REGRESSORS.items()]


def _checked_numbers(features: ArrayLike, targets: ArrayLike) -> tuple[FloatArray, FloatArray]:
    rows: FloatArray = np.asarray(features, dtype=np.float64)
    y: FloatArray = np.asarray(targets, dtype=np.float64)
    x = rows.reshape(len(rows), -1)
    if y.shape != (len(x),) or not len(x):
        raise DataError(f"solo: {len(x)} rows need as many labels, got shape {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise DataError("solo: features or labels are not finite; mend or leave out these rows")
    return x, y


DETECTORS: Mapping[str, str] = MappingProxyType({
    "components": "Probabilistic PCA",
    "neighbours": "Local outlier factor",
    "one_class_svm": "One-class SVM",
    "isolation_forest": "Isolation forest",
})  # fmt: skip
"""Titles by name, in the order in which equals are preferred."""


def _detector(name: str, rows: int, seed: int) -> Any:
    """An unfitted one of `DETECTORS`; its `score_samples` are lower for what is stranger."""
    from sklearn.decomposition import PCA
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import LocalOutlierFactor
    from sklearn.svm import OneClassSVM

    return {
        "components": PCA(n_components=_SHARE, svd_solver="full"),
        "neighbours": LocalOutlierFactor(n_neighbors=min(_NEIGHBOURS, rows - 1), novelty=True),
        "one_class_svm": OneClassSVM(nu=0.1),
        "isolation_forest": IsolationForest(random_state=seed),
    }[name]


def compare_detectors(
    train_TF: ArrayLike, test_BF: ArrayLike, anomalies_B: ArrayLike, *, measure: Measure,
    seed: int = 0,
) -> list[BaselineResult]:  # fmt: skip
    """Where anomalies are to be told: fit every detector on training rows, measure it on test rows.

    Training rows have no label to choose a detector by, so each is chosen by what it does on the
    test rows: that favours the best of them, and a gain over it is rather too small than too large.

    Rows are of any shape, anomalies_B is 1 where a test row is one, else 0.

    Raises:
        DataError: too few rows, rows and labels that do not go together, or values that are not
            finite.
    """
    x_TF, x_BF = _finite_rows(train_TF), _finite_rows(test_BF)
    truth_B = np.asarray(anomalies_B, dtype=np.int64)
    if len(x_TF) < _FEWEST or truth_B.shape != (len(x_BF),):
        raise DataError(
            f"solo: {len(x_TF)} training rows, {len(x_BF)} test rows and labels of shape "
            f"{truth_B.shape}; give {_FEWEST} training rows or more, and each test row a label"
        )
    found = []
    for name, title in DETECTORS.items():
        model = _detector(name, len(x_TF), derive_seed(seed, "solo", name) % 2**32).fit(x_TF)
        value = measure.of(Scored(truth=truth_B, scores=-model.score_samples(x_BF)))
        found.append(BaselineResult(name=name, title=title, validation=value, test=value))
    return found


def _finite_rows(features: ArrayLike) -> Any:
    rows = np.asarray(features, dtype=np.float64)
    x = rows.reshape(len(rows), -1)
    if not np.isfinite(x).all():
        raise DataError("solo: features are not finite; mend or leave out these rows")
    return x
