"""The active's model as a scikit-learn classifier: `fit` trains with the others, `predict` alone.

Run by: who has all parties' frames in one process, to try a method out or to compare it with other
classifiers; parties that keep their frames to themselves take part in a run (`secure-apfed party`).
People are matched by the frames' index. After `fit` nothing of a passive is needed any more: what
is shown of a classifier, and a pickle of one or of a search over it, hold none of their rows.
"""

import copy
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.ids import id_texts
from apfed_protocols.labels import by_position
from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.data.encoding import fit_columns
from secure_apfed.data.frames import as_pandas, has_measures, plain_cells
from secure_apfed.data.labels import require_one_spelling, warn_of_empty_words
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.methods import ALONE
from secure_apfed.names import column_name
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import SoloModel
from secure_apfed.seeds import undisturbed
from secure_apfed.tasks import Classification

_ACTIVE = "active"
# Settings name two parties or more, also those of a method that has no passive.
_NOBODY = ("nobody",)


class _Unshown(dict[str, pd.DataFrame | None]):
    """Frames by party, of which no text, page or pickle has the rows."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unshown.fromkeys, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unshown":
        return _Unshown({name: copy.deepcopy(frame, memo) for name, frame in self.items()})

    def __repr__(self) -> str:
        return f"<{', '.join(self)}>"


class VerticalClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier of the active's own columns, which other parties help to train.

    Args:
        passives: by name, a frame whose index names people; None: the active trains alone.
        settings: of the run, as its YAML file has them, but for `data`; with passives they say
            which `method` and `guard`, and may be None without.
        seed: of weights, batches and order.

    Attributes:
        classes_: sorted; n_features_in_, feature_names_in_: as of every estimator.
        model_: the solo model; result_: of the run, with what was spent and sent.
    """

    def __init__(
        self,
        passives: Mapping[str, pd.DataFrame] | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.passives = passives
        self.settings = settings
        self.seed = seed

    @property
    def passives(self) -> Mapping[str, pd.DataFrame | None] | None:
        """As they were given; None for the rows that a pickle left out."""
        given: Mapping[str, pd.DataFrame | None] | None = self.__dict__["passives"]
        return given

    @passives.setter
    def passives(self, given: Mapping[str, pd.DataFrame | None] | None) -> None:
        if isinstance(given, Mapping) and not isinstance(given, _Unshown):
            given = _Unshown(given)
        self.__dict__["passives"] = given

    def __sklearn_tags__(self) -> Tags:
        tags: Tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

    @undisturbed()
    def fit(self, X: Any, y: Any) -> "VerticalClassifier":
        """Align by index, and train.

        Args:
            X: frame (N, columns) of the active, whose index names people; without passives also
                an array.
            y: labels (N,), in the order of X; the index of a Series is X's, or numbers of rows.

        Raises:
            ConfigError, DataError: as `secure_apfed.run`, and for labels that are spelled in
                several ways, or of people in another order.
        """
        y = self._labels_in_order(X, y)
        X = _storable(X)
        raw, labels = self._checked(X, y)
        frame, self._named = _frame(X, raw), isinstance(X, pd.DataFrame)
        self.classes_, numbers_N = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Classifier can't train when only one class is present: {labels[0]}")
        if self.classes_.dtype.kind not in "biuf":
            texts = [str(label) for label in labels.tolist()]
            require_one_spelling(texts, where="the labels y", remedy="number them")
            warn_of_empty_words(texts, party="VerticalClassifier", column="y", count=False)
        config = self._config()
        data = VerticalData(
            table=_table(_ACTIVE, frame, torch.from_numpy(numbers_N).long()),
            passives=tuple(
                _table(name, features)
                for name, features in (self.passives or {}).items()
                if features is not None
            ),
            classes=tuple(map(str, self.classes_)),
            train_rows=torch.arange(len(frame)),
            test_rows=torch.empty(0, dtype=torch.int64),
        )
        with warnings.catch_warnings():
            # All parties are this process: a plain sum hides nothing from whoever has it all.
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            result = run(config, None, data=data)
        network = result.recording.model
        self.result_: RunResult = result
        assert network is not None
        encoding = data.active.encoding
        assert isinstance(encoding, ColumnEncoding)
        self.model_ = SoloModel(network, data.classes, encoding, {}, threshold=result.threshold)
        return self

    def _labels_in_order(self, X: Any, y: Any) -> Any:
        """Return y in the order of X; raise where the frames do not say which row is whose."""
        absent = [name for name, frame in (self.passives or {}).items() if frame is None]
        if absent:
            raise ConfigError(
                f"VerticalClassifier: the rows of {', '.join(absent)} are not here, since a pickle "
                "of a classifier leaves them out; give the frames, set_params(passives=...), and "
                'let a search run in threads, joblib.parallel_config(backend="threading")'
            )
        for name, frame in (self.passives or {}).items():
            if not isinstance(frame, pd.DataFrame):
                raise ConfigError(
                    f"VerticalClassifier: the rows of {name} came as {type(frame).__name__}, which "
                    "names nobody; give a pandas frame whose index names people"
                )
        if self.passives and not isinstance(X, pd.DataFrame):
            raise ConfigError(
                f"VerticalClassifier: people are matched by the index of frames, and the active's "
                f"rows came as {type(X).__name__}, which names nobody; give a pandas frame, and in "
                'a Pipeline say .set_output(transform="pandas") of what stands before'
            )
        named = getattr(y, "index", None)
        if not isinstance(named, pd.Index) or named.equals(pd.RangeIndex(len(named))):
            return y
        if not isinstance(X, pd.DataFrame):
            return by_position(y, "VerticalClassifier: y", error=DataError)
        numbered = named.inferred_type == "integer" != X.index.inferred_type
        if numbered and not named.isin(X.index).any():
            return y  # numbers of rows, such as a split leaves, beside names of people
        if len(named) == len(X) and not named.equals(X.index):
            raise DataError(
                "VerticalClassifier: the index of y names other people than that of X, or in "
                "another order; give y.loc[X.index], or y.to_numpy() where it goes by place"
            )
        return y

    @undisturbed()
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities (N, K) in the order of `classes_`."""
        check_is_fitted(self)
        X = _storable(X)
        raw = validate_data(self, X, reset=False, dtype=None, ensure_all_finite="allow-nan")
        frame = _frame(X, raw)
        encoding = self.model_.encoding
        assert isinstance(encoding, ColumnEncoding)
        if not (isinstance(X, pd.DataFrame) and self._named):
            # Columns have their places alone. Texts that name them scikit-learn has compared, or
            # warned of; numbers it has not looked at.
            if isinstance(X, pd.DataFrame) and _in_another_order(X.columns):
                raise DataError(
                    "the input: its columns are numbered in another order, and the model was "
                    "fitted to an array, whose columns have places alone; give an array"
                )
            frame.columns = pd.Index([column.name for column in encoding.columns])
        shares_NK = self.model_.read(frame)
        normed: NDArray[np.float64] = (shares_NK / shares_NK.sum(1, keepdim=True)).numpy()
        return normed

    def predict(self, X: Any) -> NDArray[Any]:
        """The label of each row, (N,): the likeliest, or as `settings["threshold"]` decides."""
        shares_NK = torch.from_numpy(self.predict_proba(X))
        best_N = self.model_.decide(shares_NK).numpy()
        labels: NDArray[Any] = self.classes_[best_N]
        return labels

    def _checked(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        if y is not None and pd.isna(np.asarray(y, dtype=object)).any():
            raise ValueError("Input y contains NaN: each row of X needs its label")
        raw, labels = validate_data(self, X, y, dtype=None, ensure_all_finite="allow-nan")
        check_classification_targets(labels)
        return raw, np.asarray(labels)

    def _config(self) -> Config:
        alone = not self.passives
        task = (self.settings or {}).get("task", Classification.name)
        if task != Classification.name:
            raise ConfigError(
                f"VerticalClassifier: task {task!r} is no classification; leave it out, or run it "
                "from settings (secure_apfed.run)"
            )
        settings: dict[str, Any] = {
            "name": "estimator",
            **({"method": ALONE.name} if alone else {}),
            "party_seeds": "shared_for_comparison",
            **(self.settings or {}),
            "seed": self.seed,
        }
        settings.setdefault("transcript", {"keep": "none"})
        if alone:  # nothing is sent, so nothing needs a guard
            settings.setdefault("guard", {"mechanism": "none"})
        # What a file of settings would name; the frames stand for these files.
        settings["data"] = {
            "dataset": "tables", "active": _ACTIVE, "id_column": "index", "label_column": "label",
            "parties": {
                name: {"file": "frame"} for name in (_ACTIVE, *(self.passives or _NOBODY))
            },
        }  # fmt: skip
        return Config.model_validate(settings)


def _storable(X: Any) -> Any:
    """Frames of every library as pandas', with moments and durations as objects: an array of
    numbers and moments is none to numpy.
    """
    if not isinstance(X, pd.DataFrame):
        if not isinstance(nw.from_native(X, pass_through=True), nw.DataFrame):
            return X
        X = as_pandas(X, party="the input")
    moments = [name for name, kind in X.dtypes.items() if kind.kind in "mM"]
    if not moments or not X.columns.is_unique:
        return X
    return X.astype(dict.fromkeys(moments, object))


def _in_another_order(columns: "pd.Index[Any]") -> bool:
    """Whether columns are named by their places from 0, and do not stand there."""
    places = list(range(len(columns)))
    return list(columns) != places and sorted(columns, key=str) == sorted(places, key=str)


def _frame(X: Any, raw: Any) -> pd.DataFrame:
    """The rows with names: of columns and people where the caller gave some."""
    if isinstance(X, pd.DataFrame):
        return X.set_axis(list(map(column_name, X.columns)), axis=1)
    if raw.dtype == object:
        _check_cells(raw)
    columns = [f"x{place}" for place in range(raw.shape[1])]
    return pd.DataFrame(np.asarray(raw), columns=columns)


def _check_cells(raw: NDArray[Any]) -> None:
    kinds = {type(cell) for cell in raw.ravel()}
    strange = [kind.__name__ for kind in kinds if not issubclass(kind, (str, numbers.Real))]
    if strange:
        raise TypeError(
            "each cell of the active's columns argument must be a string or a real number, got "
            f"{', '.join(strange)}"
        )


def _table(name: str, frame: pd.DataFrame, labels_N: torch.Tensor | None = None) -> PartyTable:
    frame = plain_cells(frame) if frame.columns.is_unique else frame
    texts = [str(name) for name, cells in frame.items() if not has_measures(cells)]
    encoding = fit_columns(frame, categorical=texts, missing="mean", source=name)
    features = encoding.encode(frame, source=name)
    ids = id_texts(frame.index, party=name, what="its index", strip=True, rows=True)
    return PartyTable(name, tuple(ids), features, labels_N, encoding)
