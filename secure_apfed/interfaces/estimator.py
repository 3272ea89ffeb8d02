"""The active's model as a scikit-learn estimator: `fit` trains with the others, `predict` alone.

Run by: a user with all parties' frames in one process, to try a method out or to compare it with
other estimators. Parties that do not share their frames take part in a run between processes
(`secure-apfed party`). People are matched by the frames' index. After `fit` nothing of a passive is
needed any more. The text of an estimator, and a pickle of it or of a search over it, contain no
rows of passives.

Letters: N rows, K classes, F features.
"""

import copy
import numbers
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.ids import id_texts
from apfed_protocols.labels import order_by_position
from secure_apfed.base.names import column_name
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.config.nested import (
    convert_numpy_numbers,
    find_nearest_name,
    list_declared_names,
    list_parameters,
    list_set_names,
    replace_setting,
)
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.data.encoding import fit_columns
from secure_apfed.data.frames import as_pandas, convert_number_cells, has_measures, require_dense
from secure_apfed.data.labels import TargetScale, require_one_spelling, warn_of_empty_words
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.measures.tasks import TASKS, Classification, Regression
from secure_apfed.methods import ALONE
from secure_apfed.runs.active_model import ActiveModel
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run

_ACTIVE_NAME = "active"
# Settings must name two parties; this name is used if there is no passive.
_PLACEHOLDER_PASSIVES = ("nobody",)
_SETTINGS_PREFIX = "settings__"  # prefix of parameters that are settings of the run
# Task of an estimator -> the estimator for the other task, for errors.
_ADVICE_BY_TASK = {
    Classification.name: "VerticalRegressor for numbers",
    Regression.name: "VerticalClassifier for classes",
}


class _HiddenFrames(dict[str, pd.DataFrame | None]):
    """A mapping of frames by party whose text, HTML page and pickle leave out the rows.

    In a mapping that was pickled and loaded, each frame is None.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the names only."""
        return _HiddenFrames.fromkeys, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_HiddenFrames":
        """Copy the frames, too: scikit-learn's `clone` copies estimators within a process."""
        return _HiddenFrames({name: copy.deepcopy(frame, memo) for name, frame in self.items()})

    def __repr__(self) -> str:
        """Return the names of the parties."""
        return f"<{', '.join(self)}>"


class _VerticalEstimator(BaseEstimator):  # type: ignore[misc]
    """A base of estimators of the active's own columns, which other parties help to train.

    Subclasses set `_task`, and check and prepare the labels of this task.
    """

    _task: ClassVar[str]

    def __init__(
        self,
        passives: Mapping[str, pd.DataFrame] | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        """Store the parameters unchanged, as scikit-learn requires."""
        self.passives = passives
        self.settings = settings
        self.seed = seed

    @property
    def passives(self) -> Mapping[str, pd.DataFrame | None] | None:
        """The passives' frames by name; a frame is None if a pickle left it out."""
        passives: Mapping[str, pd.DataFrame | None] | None = self.__dict__["passives"]
        return passives

    @passives.setter
    def passives(self, passives: Mapping[str, pd.DataFrame | None] | None) -> None:
        """Store the frames so that no text or pickle shows their rows."""
        if isinstance(passives, Mapping) and not isinstance(passives, _HiddenFrames):
            passives = _HiddenFrames(passives)
        self.__dict__["passives"] = passives

    def __sklearn_tags__(self) -> Tags:
        """Declare to scikit-learn that cells may be missing, categories or texts."""
        tags: Tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name.

        `deep`: whether to include every setting of the run, such as settings__train__epochs. A
        setting that the user does not give has its default value.
        """
        params: dict[str, Any] = super().get_params(deep=False)
        if deep:
            settings = list_parameters(self.settings, self._build_defaults())
            params |= {f"{_SETTINGS_PREFIX}{key}": value for key, value in settings.items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters; settings of the run have flat names, such as settings__train__epochs=3.

        Raises ValueError: no parameter has this name; the error names the most similar one.
        """
        run_settings = {
            name: value for name, value in params.items() if name.startswith(_SETTINGS_PREFIX)
        }
        own_params = {name: value for name, value in params.items() if name not in run_settings}
        unknown_names = own_params.keys() - super().get_params(deep=False).keys()
        if unknown_names:
            raise self._build_parameter_error(next(iter(unknown_names)))
        super().set_params(**own_params)
        # Sections come before their keys, which would otherwise be overwritten.
        for name in sorted(run_settings, key=lambda name: (name.count("__"), name)):
            self._set_nested_setting(name, run_settings[name])
        return self

    def _set_nested_setting(self, name: str, value: Any) -> None:
        """Set one setting of the run, unless it has that value by default.

        Scikit-learn's `clone` sets every parameter again. A default must not become an explicit
        choice by that.

        `name`: flat name of the setting, such as settings__train__epochs.

        Raises ValueError: unknown name.
        """
        key = name.removeprefix(_SETTINGS_PREFIX)
        settings = self.settings if isinstance(self.settings, Mapping) else {}
        value_by_key = list_parameters(settings, self._build_defaults())
        is_default = key in value_by_key and key not in list_set_names(settings)
        if is_default and _is_equal_setting(value_by_key[key], value):
            return
        try:
            self.settings = replace_setting(
                {**self._copy_default_section(key), **settings}, key, value
            )
        except KeyError:
            raise self._build_parameter_error(name) from None

    def _copy_default_section(self, key: str) -> dict[str, Any]:
        """Return the section of a setting with the estimator's defaults, by the section's name.

        The result is empty if the estimator has no defaults for the section.

        `key`: the setting's flat name without the prefix, such as train__epochs.
        """
        section = key.partition("__")[0]
        defaults = self._build_defaults()
        return {section: defaults[section]} if section in defaults else {}

    def _build_parameter_error(self, name: str) -> ValueError:
        """Return the error for an unknown parameter, with the most similar name."""
        settings_names = (f"{_SETTINGS_PREFIX}{key}" for key in list_declared_names())
        nearest_name = find_nearest_name(name, [*self.get_params(), *settings_names])
        suggestion = f"did you mean {nearest_name!r}? " if nearest_name else ""
        is_from_frames = name.removeprefix(_SETTINGS_PREFIX).partition("__")[0] in ("data", "seed")
        frames_advice = "frames stand for settings.data, and the parameter seed for settings.seed; "
        return ValueError(
            f"Invalid parameter {name!r} for estimator {type(self).__name__}; {suggestion}"
            f"{frames_advice if is_from_frames else ''}get_params() lists all, those of the run as "
            "settings__SECTION__KEY"
        )

    def _build_defaults(self) -> dict[str, Any]:
        """Return the settings that apply unless the user gives others."""
        defaults: dict[str, Any] = {
            "name": "estimator",
            "task": self._task,
            "party_seeds": "shared_for_comparison",
            "transcript": {"keep": "none"},
        }
        has_passives = isinstance(self.passives, Mapping) and bool(self.passives)
        if not has_passives:
            defaults["method"] = ALONE.name
            defaults["guard"] = {"mechanism": "none"}  # nothing is sent that a guard could protect
        return defaults

    @isolate_torch_modes()
    def fit(self, X: Any, y: Any) -> Self:
        """Align the parties by index, and train.

        Set `model_` and `result_`.

        Args:
            X: frame (N, columns) of the active, whose index names people; without passives an array
                is accepted, too.
            y: labels (N,), in the order of X; the index of a Series equals X's, or is row numbers.

        Raises:
            ConfigError: settings or frames do not fit.
            DataError: cells or IDs do not fit, or y has people in another order than X.
            ValueError: labels do not fit the task.
        """
        y = self._require_label_order(X, y)
        X = _convert_frame(X)
        cells, y_N = self._validate_inputs(X, y)
        frame = _name_columns(X, cells)
        self._has_column_names = isinstance(X, pd.DataFrame)
        labels = self._prepare_labels(y_N)
        config = self._build_config()
        passive_tables = [
            _build_table(name, features)
            for name, features in (self.passives or {}).items()
            if features is not None
        ]
        data = VerticalData(
            table=_build_table(_ACTIVE_NAME, frame, labels.numbers),
            passives=tuple(passive_tables),
            classes=labels.classes,
            targets=labels.target_scale,
            train_rows=torch.arange(len(frame)),
            test_rows=torch.empty(0, dtype=torch.int64),  # scikit-learn splits before it calls fit
        )
        with warnings.catch_warnings():
            # This process has all tables, so a secure sum would hide nothing from it.
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            result = run(config, None, data=data)
        network = result.recording.model
        self.result_: RunResult = result
        assert network is not None
        encoding = data.active.encoding
        assert isinstance(encoding, ColumnEncoding)
        task = TASKS[self._task].from_targets(labels.target_scale)
        self.model_ = ActiveModel(
            network,
            data.classes,
            encoding,
            card={},
            threshold=result.threshold,
            task=task,
        )
        return self

    def _prepare_labels(self, y_N: NDArray[Any]) -> "_LearntLabels":
        """Return the labels as a run learns them: class indices, or standardised numbers.

        Each subclass defines it.
        """
        raise NotImplementedError

    def _check_labels(self, y_N: Any) -> NDArray[Any]:
        """Return the labels as an array. Raises ValueError: they do not fit the task.

        Each subclass defines it.
        """
        raise NotImplementedError

    def _require_label_order(self, X: Any, y: Any) -> Any:
        """Return y after a check that its labels are in the order of X's rows.

        If y has an index, it must equal the index of X, or be row numbers. The frames of X and of
        the passives are checked, too.

        Raises:
            ConfigError: a frame has no index that names people, or was left out of a pickle.
            DataError: the index of y names other people than the index of X, or in another order.
        """
        self._require_frames(X)
        estimator_name = type(self).__name__
        index = getattr(y, "index", None)
        if not isinstance(index, pd.Index) or index.equals(pd.RangeIndex(len(index))):
            return y
        if not isinstance(X, pd.DataFrame):
            return order_by_position(y, f"{estimator_name}: y", error=DataError)
        has_row_numbers = index.inferred_type == "integer" and X.index.inferred_type != "integer"
        if has_row_numbers and not index.isin(X.index).any():
            return y  # a split left row numbers, while X has names of people
        if len(index) == len(X) and not index.equals(X.index):
            raise DataError(
                f"{estimator_name}: the index of y names other people than that of X, or in "
                "another order; give y.loc[X.index], or y.to_numpy() where it goes by place"
            )
        return y

    def _require_frames(self, X: Any) -> None:
        """Raise ConfigError unless X and the passives' rows are frames whose index names people.

        Without passives X may be an array.

        Raises SparseRowsError: cells are sparse.
        """
        estimator_name = type(self).__name__
        require_dense(X, party=_ACTIVE_NAME)
        passives_without_rows = [
            name for name, frame in (self.passives or {}).items() if frame is None
        ]
        if passives_without_rows:
            raise ConfigError(
                f"{estimator_name}: the rows of {', '.join(passives_without_rows)} are not here, "
                "since a pickle "
                "of an estimator leaves them out; give the frames, set_params(passives=...), and "
                'let a search run in threads, joblib.parallel_config(backend="threading")'
            )
        for name, frame in (self.passives or {}).items():
            require_dense(frame, party=name)
            if not isinstance(frame, pd.DataFrame):
                raise ConfigError(
                    f"{estimator_name}: the rows of {name} came as {type(frame).__name__}, which "
                    "names nobody; give a pandas frame whose index names people"
                )
        if self.passives and not isinstance(X, pd.DataFrame):
            raise ConfigError(
                f"{estimator_name}: people are matched by the index of frames, and the active's "
                f"rows came as {type(X).__name__}, which names nobody; give a pandas frame, and in "
                'a Pipeline say .set_output(transform="pandas") of what stands before'
            )

    def _predict_rows(self, X: Any) -> torch.Tensor:
        """Return the model's predictions of the rows: probabilities (N, K), or numbers (N,).

        Raises DataError, ValueError: the columns do not fit the columns of training.
        """
        check_is_fitted(self)
        X = _convert_frame(X)
        cells = validate_data(self, X, reset=False, dtype=None, ensure_all_finite="allow-nan")
        frame = _name_columns(X, cells)
        encoding = self.model_.encoding
        assert isinstance(encoding, ColumnEncoding)
        if not (isinstance(X, pd.DataFrame) and self._has_column_names):
            # Columns are matched by position. A frame with numbers as column names, which
            # scikit-learn does not compare, could still have another order.
            if isinstance(X, pd.DataFrame) and _has_other_order(X.columns):
                raise DataError(
                    "the input: its columns are numbered in another order, and the model was "
                    "fitted to an array, whose columns have places alone; give an array"
                )
            frame.columns = pd.Index([column.name for column in encoding.columns])
        return self.model_.predict_frame(frame)

    def _validate_inputs(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        """Return rows and labels as arrays after scikit-learn's checks.

        This also sets `n_features_in_` and `feature_names_in_`.

        Raises ValueError: a check fails.
        """
        if y is not None and pd.isna(np.asarray(y, dtype=object)).any():
            raise ValueError("Input y contains NaN: each row of X needs its label")
        cells, labels = validate_data(self, X, y, dtype=None, ensure_all_finite="allow-nan")
        return cells, self._check_labels(labels)

    def _build_config(self) -> Config:
        """Return the run's configuration from the user's settings.

        Raises ConfigError: the settings are not valid, or are for another task.
        """
        if not isinstance(self.settings, Mapping | None):
            raise ConfigError(
                f"{type(self).__name__}: settings: expected a mapping of a run's sections, such as "
                f"{{'train': {{'epochs': 3}}}}, got {type(self.settings).__name__}"
            )
        user_settings = convert_numpy_numbers(self.settings or {})
        task = user_settings.get("task", self._task)
        if task != self._task:
            raise ConfigError(
                f"{type(self).__name__}: settings.task is {task!r}, and this estimator is for "
                f"{self._task}; leave it out, or take {_ADVICE_BY_TASK[self._task]}"
            )
        settings = {
            **self._build_defaults(),
            **user_settings,
            "task": self._task,
            "seed": self.seed,
        }
        # Settings must name files, but these are never read: `run` gets the frames.
        settings["data"] = {
            "dataset": "tables",
            "active": _ACTIVE_NAME,
            "id_column": "index",
            "label_column": "label",
            "parties": {
                name: {"file": "frame"}
                for name in (_ACTIVE_NAME, *(self.passives or _PLACEHOLDER_PASSIVES))
            },
        }
        return Config.model_validate(settings)


@dataclass(frozen=True, kw_only=True)
class _LearntLabels:
    """The labels as a run learns them.

    Attributes:
        numbers: (N,), indices in `classes`, or numbers standardised by `target_scale`.
        classes: the classes as texts, sorted; empty for a regression.
        target_scale: mean and scale of a regression's labels; None: labels are classes.
    """

    numbers: torch.Tensor
    classes: tuple[str, ...] = ()
    target_scale: TargetScale | None = None


class VerticalClassifier(ClassifierMixin, _VerticalEstimator):  # type: ignore[misc]
    """A classifier of the active's own columns, which other parties help to train.

    Args:
        passives: passive's name -> a frame whose index names people; None: the active trains alone.
        settings: sections of a run's YAML file, without `data`. With passives they must name a
            `method` and a `guard` (noise on representations); without, they may be None. Each
            setting is also a parameter of its own, such as `settings__train__epochs`.
        seed: seed of initial weights and of the order of batches.

    Attributes:
        classes_: the classes, sorted.
        n_features_in_, feature_names_in_: as scikit-learn defines them.
        model_: the trained model, which needs no other party.
        result_: result of the run, with its privacy cost and bytes.

    Examples:
        >>> from sklearn.datasets import load_breast_cancer
        >>> from secure_apfed import VerticalClassifier
        >>> people, labels = load_breast_cancer(return_X_y=True, as_frame=True)
        >>> settings = {
        ...     "method": "apfed_r",
        ...     "train": {"epochs": 1},
        ...     "guard": {"mechanism": "none"},
        ...     "secure_sum": {"allow_single_passive": True},
        ... }
        >>> helped = VerticalClassifier({"lab": people.iloc[:, 10:]}, settings)
        >>> helped.fit(people.iloc[:, :10], labels).predict_proba(people.iloc[:3, :10]).shape
        (3, 2)
    """

    _task = Classification.name

    def _check_labels(self, y_N: Any) -> NDArray[Any]:
        """Return the labels as an array. Raises ValueError: they are no classes."""
        check_classification_targets(y_N)
        return np.asarray(y_N)

    def _prepare_labels(self, y_N: NDArray[Any]) -> _LearntLabels:
        """Return class indices with the classes, and set `classes_`.

        Warn of classes such as "NA", which may stand for missing labels.

        Raises:
            ValueError: there are fewer than two classes.
            TableError: a class has several spellings.
        """
        self.classes_, class_indices_N = np.unique(y_N, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Classifier can't train when only one class is present: {y_N[0]}")
        if self.classes_.dtype.kind not in "biuf":
            texts = [str(label) for label in y_N.tolist()]
            require_one_spelling(texts, where="the labels y", remedy="number them")
            warn_of_empty_words(texts, party="VerticalClassifier", column="y", are_empty=False)
        classes = tuple(map(str, self.classes_))
        return _LearntLabels(numbers=torch.from_numpy(class_indices_N).long(), classes=classes)

    @isolate_torch_modes()
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return probabilities (N, K) in the order of `classes_`."""
        outputs_NK = self._predict_rows(X)
        # Probabilities computed in float32 do not add up to 1 exactly.
        probabilities_NK: NDArray[np.float64] = (
            outputs_NK / outputs_NK.sum(1, keepdim=True)
        ).numpy()
        return probabilities_NK

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the label of each row, (N,).

        It is the likeliest class, or the class that `settings["threshold"]` decides.
        """
        probabilities_NK = torch.from_numpy(self.predict_proba(X))
        class_indices_N = self.model_.decide_classes(probabilities_NK).numpy()
        labels: NDArray[Any] = self.classes_[class_indices_N]
        return labels


class VerticalRegressor(RegressorMixin, _VerticalEstimator):  # type: ignore[misc]
    """A regressor of the active's own columns, which other parties help to train.

    The method `score` returns R2, as of every regressor of scikit-learn.

    Args:
        passives: passive's name -> a frame whose index names people; None: the active trains alone.
        settings: sections of a run's YAML file, without `data`. With passives they must name a
            `method` that allows regression (such as apfed_r or apfed_c) and a `guard` (noise on
            representations); without, they may be None. Each setting is also a parameter of its
            own, such as `settings__train__epochs`.
        seed: seed of initial weights and of the order of batches.

    Attributes:
        n_features_in_, feature_names_in_: as scikit-learn defines them.
        model_: the trained model, which needs no other party.
        result_: result of the run, with its privacy cost and bytes.

    Examples:
        >>> import numpy as np
        >>> from secure_apfed import VerticalRegressor
        >>> rows = np.linspace(0, 1, 60).reshape(20, 3)
        >>> alone = VerticalRegressor(settings={"train": {"epochs": 2}})
        >>> alone.fit(rows, rows.sum(1)).predict(rows[:4]).shape
        (4,)
    """

    _task = Regression.name

    def _check_labels(self, y_N: Any) -> NDArray[Any]:
        """Return the labels as float64. Raises ValueError: they are no finite numbers."""
        numbers_N = np.asarray(y_N)
        if numbers_N.dtype.kind not in "biuf":
            try:
                numbers_N = numbers_N.astype(np.float64)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"VerticalRegressor: y holds {numbers_N.dtype} that are no numbers ({error}); "
                    "give numbers, or take VerticalClassifier where these are classes"
                ) from None
        numbers_N = numbers_N.astype(np.float64)
        if not np.isfinite(numbers_N).all():
            raise ValueError("Input y contains infinity: each row of X needs a finite number")
        return numbers_N

    def _prepare_labels(self, y_N: NDArray[Any]) -> _LearntLabels:
        """Return standardised labels with their mean and scale.

        Raises:
            ValueError: fewer than two rows.
            DataError: all labels are equal.
        """
        if len(y_N) < 2:
            raise ValueError(
                f"VerticalRegressor: got n_samples={len(y_N)}, expected two rows or more"
            )
        target_scale = TargetScale.from_targets(y_N, party="VerticalRegressor")
        return _LearntLabels(
            numbers=target_scale.encode(y_N, party="VerticalRegressor"), target_scale=target_scale
        )

    @isolate_torch_modes()
    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the prediction of each row, (N,), in the unit of the labels."""
        predicted_N: NDArray[np.float64] = self._predict_rows(X).numpy()
        return predicted_N


def _is_equal_setting(value: Any, other: Any) -> bool:
    """Return whether two settings have the same type and value.

    The answer is no for arrays, whose comparison gives an array.
    """
    try:
        return bool(type(value) is type(other) and value == other)
    except ValueError:
        return False


def _convert_frame(X: Any) -> Any:
    """Return a frame of any library as a pandas frame; anything else is returned unchanged.

    Columns of dates and durations become objects: scikit-learn makes one NumPy array of all
    columns, which cannot have both numbers and dates.
    """
    require_dense(X, party=_ACTIVE_NAME)
    if not isinstance(X, pd.DataFrame):
        if not isinstance(nw.from_native(X, pass_through=True), nw.DataFrame):
            return X
        X = as_pandas(X, party="the input")
    date_columns = [name for name, kind in X.dtypes.items() if kind.kind in "mM"]
    if not date_columns or not X.columns.is_unique:
        return X
    return X.astype(dict.fromkeys(date_columns, object))


def _has_other_order(columns: "pd.Index[Any]") -> bool:
    """Return whether columns have the names 0, 1, 2 and so on, but in another order."""
    positions = list(range(len(columns)))
    return list(columns) != positions and sorted(columns, key=str) == sorted(positions, key=str)


def _name_columns(X: Any, cells: Any) -> pd.DataFrame:
    """Return the rows as a pandas frame.

    A frame gets its column names as texts. The columns of an array are called x0, x1 and so on, and
    its rows have no names of people.

    `X`: a pandas frame, or an array. `cells`: rows of `X` as an array, after scikit-learn's checks.

    Raises TypeError: cells of an array are neither texts nor numbers.
    """
    if isinstance(X, pd.DataFrame):
        return X.set_axis(list(map(column_name, X.columns)), axis=1)
    if cells.dtype == object:
        _check_cells(cells)
    columns = [f"x{position}" for position in range(cells.shape[1])]
    return pd.DataFrame(np.asarray(cells), columns=columns)


def _check_cells(cells: NDArray[Any]) -> None:
    """Raise TypeError if cells of an array (N, F) are neither texts nor numbers."""
    cell_types = {type(cell) for cell in cells.ravel()}
    refused_types = [
        kind.__name__ for kind in cell_types if not issubclass(kind, (str, numbers.Real))
    ]
    if refused_types:
        raise TypeError(
            "each cell of the active's columns argument must be a string or a real number, got "
            f"{', '.join(refused_types)}"
        )


def _build_table(
    name: str, frame: pd.DataFrame, labels_N: torch.Tensor | None = None
) -> PartyTable:
    """Return one party's table, with an encoding fitted to all rows of its frame.

    Args:
        name: the party's name.
        frame: the party's features; the index names people.
        labels_N: class indices or standardised numbers, as a run learns them; None: a passive.

    Raises DataError: a column or an ID does not fit.
    """
    require_dense(frame, party=name)
    if frame.columns.is_unique:  # repeated names are refused below
        frame = convert_number_cells(frame)
    text_columns = [str(column) for column, cells in frame.items() if not has_measures(cells)]
    encoding = fit_columns(frame, categorical=text_columns, missing="mean", source=name)
    features = encoding.encode(frame, source=name)
    ids = id_texts(
        frame.index, party=name, subject="its index", should_strip=True, are_tuples_rows=True
    )
    return PartyTable(name, tuple(ids), features, labels_N, encoding)
