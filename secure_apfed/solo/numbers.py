"""What the active does alone where labels are numbers: regressions of its own labelled rows.

Run by: whoever measures what help was worth. scikit-learn fits them; the choice among them is by
cross-validation over the labelled rows, in the measure that the run is judged by. Test rows only
measure.

Letters: n labelled rows, B rows to predict, F features of a row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from secure_apfed.errors import DataError
from secure_apfed.measures import Measure, Scored
from secure_apfed.seeds import derive_seed
from secure_apfed.solo.choice import BaselineResult
from secure_apfed.solo.interface import FloatArray

__all__ = ["REGRESSORS", "Regressor", "compare_numbers"]

_LAMBDAS = tuple(10.0**power for power in range(-3, 5))
_COSINES = 300
_FOLDS, _LEAST = 5, 4


@dataclass(frozen=True)
class Regressor:
    """One way to learn alone.

    Attributes:
        title: for people.
        make: from the number of labelled rows and a seed of 32 bits to an unfitted estimator of
            scikit-learn.
    """

    title: str
    make: Callable[[int, int], Any] = field(repr=False)


def _mean(rows: int, seed: int) -> Any:
    from sklearn.dummy import DummyRegressor

    return DummyRegressor()


def _ridge(rows: int, seed: int) -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV(alphas=_LAMBDAS))


def _cosines(rows: int, seed: int) -> Any:
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    cosines = RBFSampler(gamma="scale", n_components=_COSINES, random_state=seed)
    return make_pipeline(StandardScaler(), cosines, RidgeCV(alphas=_LAMBDAS))


def _boosting(rows: int, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(
        max_iter=60, max_leaf_nodes=8, min_samples_leaf=min(max(rows // 8, 1), 20),
        early_stopping=False, random_state=seed,
    )  # fmt: skip


def _forest(rows: int, seed: int) -> Any:
    from sklearn.ensemble import RandomForestRegressor

    return RandomForestRegressor(n_estimators=200, min_samples_leaf=3, random_state=seed)


REGRESSORS: Mapping[str, Regressor] = MappingProxyType({
    "ridge": Regressor("Ridge regression", _ridge),
    "cosines": Regressor("Ridge on random features", _cosines),
    "gradient_boosting": Regressor("Gradient boosting", _boosting),
    "random_forest": Regressor("Random forest", _forest),
    "mean": Regressor("Mean of the labels", _mean),
})  # fmt: skip
"""By name, in the order in which equals are preferred."""


def compare_numbers(
    features_nF: ArrayLike, targets_n: ArrayLike, test_features_BF: ArrayLike,
    test_targets_B: ArrayLike, *, measure: Measure, seed: int = 0,
) -> list[BaselineResult]:  # fmt: skip
    """Fit every regression on all labelled rows for the test rows, and in folds for the choice.

    Args:
        features_nF: of the labelled rows, of any shape.
        targets_n: their labels, in their unit.
        test_features_BF: of the rows that only measure.
        test_targets_B: their labels.
        measure: of regression.
        seed: of folds and of what the regressions draw.

    Raises:
        DataError: too few labelled rows, rows and labels that do not go together, or values that
            are not finite.
    """
    x_nF, y_n = _checked(features_nF, targets_n)
    x_BF, y_B = _checked(test_features_BF, test_targets_B)
    if len(y_n) < _LEAST:
        raise DataError(
            f"solo: {len(y_n)} labelled rows are too few to choose a regression by; label "
            f"{_LEAST} or more"
        )
    found = []
    for name, one in REGRESSORS.items():
        state = derive_seed(seed, "solo", name) % 2**32
        model = one.make(len(y_n), state).fit(x_nF, y_n)
        found.append(
            BaselineResult(
                name=name,
                title=one.title,
                validation=_validation(one.make(len(y_n), state), x_nF, y_n, measure, seed),
                test=measure.of(Scored(truth=y_B, scores=model.predict(x_BF))),
            )
        )
    return found


def _validation(
    model: Any, x_nF: FloatArray, y_n: FloatArray, measure: Measure, seed: int
) -> float | None:
    from sklearn.model_selection import KFold, cross_val_predict

    folds = KFold(
        min(_FOLDS, len(y_n)), shuffle=True, random_state=derive_seed(seed, "solo", "folds") % 2**32
    )
    said_n = cross_val_predict(model, x_nF, y_n, cv=folds)
    value = measure.of(Scored(truth=y_n, scores=said_n))
    return None if math.isnan(value) else value


def _checked(features: ArrayLike, targets: ArrayLike) -> tuple[FloatArray, FloatArray]:
    rows: NDArray[np.float64] = np.asarray(features, dtype=np.float64)
    y: NDArray[np.float64] = np.asarray(targets, dtype=np.float64)
    x = rows.reshape(len(rows), -1)
    if y.shape != (len(x),) or not len(x):
        raise DataError(f"solo: {len(x)} rows need as many labels, got shape {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise DataError("solo: features or labels are not finite; mend or leave out these rows")
    return x, y
