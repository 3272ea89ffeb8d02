"""What the active does alone where anomalies are to be told: detectors of its training rows.

Run by: whoever measures what help was worth. scikit-learn fits them. Training rows have no label to
choose a detector by, so each is chosen by what it does on the test rows: that favours the best of
them, and a gain over it is rather too small than too large.

Letters: T training rows, B test rows, F features of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from secure_apfed.errors import DataError
from secure_apfed.measures import Measure, Scored
from secure_apfed.seeds import derive_seed
from secure_apfed.solo.choice import BaselineResult

__all__ = ["DETECTORS", "Detector", "compare_detectors"]

_SHARE = 0.9  # of the variance, that principal components keep
_NEIGHBOURS = 20
_LEAST = 4


@dataclass(frozen=True)
class Detector:
    """One way to learn alone.

    Attributes:
        title: for people.
        make: from the number of training rows and a seed of 32 bits to an unfitted estimator of
            scikit-learn with `score_samples`, lower for what is stranger.
    """

    title: str
    make: Callable[[int, int], Any] = field(repr=False)


def _components(rows: int, seed: int) -> Any:
    from sklearn.decomposition import PCA

    return PCA(n_components=_SHARE, svd_solver="full")


def _neighbours(rows: int, seed: int) -> Any:
    from sklearn.neighbors import LocalOutlierFactor

    return LocalOutlierFactor(n_neighbors=min(_NEIGHBOURS, rows - 1), novelty=True)


def _support(rows: int, seed: int) -> Any:
    from sklearn.svm import OneClassSVM

    return OneClassSVM(nu=0.1)


def _forest(rows: int, seed: int) -> Any:
    from sklearn.ensemble import IsolationForest

    return IsolationForest(random_state=seed)


DETECTORS: Mapping[str, Detector] = MappingProxyType({
    "components": Detector("Probabilistic PCA", _components),
    "neighbours": Detector("Local outlier factor", _neighbours),
    "one_class_svm": Detector("One-class SVM", _support),
    "isolation_forest": Detector("Isolation forest", _forest),
})  # fmt: skip
"""By name, in the order in which equals are preferred."""


def compare_detectors(
    train_TF: ArrayLike, test_BF: ArrayLike, anomalies_B: ArrayLike, *, measure: Measure,
    seed: int = 0,
) -> list[BaselineResult]:  # fmt: skip
    """Fit every detector on the training rows, and measure it on the test rows.

    Args:
        train_TF: rows of any shape.
        test_BF: likewise.
        anomalies_B: 1 where a test row is one, else 0.
        measure: of anomaly detection.
        seed: of what detectors draw.

    Raises:
        DataError: too few rows, rows and labels that do not go together, or values that are not
            finite.
    """
    x_TF, x_BF = _rows(train_TF), _rows(test_BF)
    truth_B = np.asarray(anomalies_B, dtype=np.int64)
    if len(x_TF) < _LEAST or truth_B.shape != (len(x_BF),):
        raise DataError(
            f"solo: {len(x_TF)} training rows, {len(x_BF)} test rows and labels of shape "
            f"{truth_B.shape}; give {_LEAST} training rows or more, and each test row a label"
        )
    found = []
    for name, one in DETECTORS.items():
        model = one.make(len(x_TF), derive_seed(seed, "solo", name) % 2**32).fit(x_TF)
        value = measure.of(Scored(truth=truth_B, scores=-model.score_samples(x_BF)))
        found.append(BaselineResult(name=name, title=one.title, validation=value, test=value))
    return found


def _rows(features: ArrayLike) -> Any:
    rows = np.asarray(features, dtype=np.float64)
    x = rows.reshape(len(rows), -1)
    if not np.isfinite(x).all():
        raise DataError("solo: features are not finite; mend or leave out these rows")
    return x
