"""Runs on data frames by one call: align, train, and compare with the best local model.

Run by: a user with all parties' frames in one process, to measure the gain by the passives' help.
Parties that do not share their frames take part in a run between processes (`secure-apfed party`).
Frames may be of any library that narwhals reads. Errors name party and column, never a person's ID.
Frames are written as files, which a run with `dataset: tables` then reads. Part of the composition
root: `secure_apfed` exports its names, no module but the estimator imports it.

Letters: N rows, K classes.
"""

import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pyarrow import ArrowException, Table
from torch import Tensor

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.ids import IdNormalisation, id_texts, require_comparable
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.base.faults import FaultList
from secure_apfed.base.files import PathLike, make_private
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.baselines.interface import cache_fits
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_values
from secure_apfed.config.plain_yaml import KeyPath
from secure_apfed.data.frames import as_pandas, collect_frame, format_cell
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.interfaces.arguments import describe_argument
from secure_apfed.measures.intervals import Estimate, estimate_measures
from secure_apfed.measures.table import MEASURES, Measure
from secure_apfed.measures.tasks import Classification
from secure_apfed.methods import METHODS
from secure_apfed.methods.checks import list_methods
from secure_apfed.runs.active_model import ActiveModel, load_model
from secure_apfed.runs.folder import RunFolder, load_scores
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.promises import list_epsilons_by_title

if TYPE_CHECKING:
    from apfed_attacks.interface import AttackResult
    from apfed_experiments.baselines import BaselinesRecord

_TABLES_NAME = "tables"  # the data set's name in the settings, and the folder of the written frames
_REPORT_PACKAGES = ("matplotlib", "jinja2", "adjustText")  # packages that reports need


@dataclass(frozen=True)
class FramesModel:
    """The active's model for frames of the active's columns; it needs no other party.

    Attributes:
        classes_: labels as in the active's frame, in the order of the probabilities; empty for a
            regression.
        model: the model in the form that the run stored, with its card.
    """

    classes_: tuple[Any, ...]
    model: ActiveModel = field(repr=False)

    def predict_proba(self, frame: Any) -> NDArray[np.float64]:
        """Return probabilities (N, K) in the order of `classes_`; other columns are ignored.

        Raises:
            DataError: a column of training is missing, or its cells do not fit.
            ModelError: the model predicts no probabilities.
        """
        if self.model.task.tells != Classification.tells:
            raise ModelError(
                f"a model of task {self.model.task.name} tells one number a row and no "
                "probabilities; ask predict"
            )
        outputs_NK = self._predict_rows(frame)
        # Probabilities computed in float32 do not add up to 1 exactly.
        probabilities_NK: NDArray[np.float64] = (
            outputs_NK / outputs_NK.sum(1, keepdim=True)
        ).numpy()
        return probabilities_NK

    def predict(self, frame: Any) -> NDArray[Any]:
        """Return the label of each row, (N,): the likeliest, or as the run's `threshold` decides.

        A regression returns numbers in the unit of the labels.

        Raises:
            DataError: see `predict_proba`.
        """
        if self.model.task.tells != Classification.tells:
            return np.asarray(self._predict_rows(frame).numpy())
        class_N = self.model.decide_classes(torch.from_numpy(self.predict_proba(frame)))
        labels: NDArray[Any] = np.array(self.classes_)[class_N.numpy()]
        return labels

    @isolate_torch_modes()
    def _predict_rows(self, frame: Any) -> Tensor:
        """Return probabilities (N, K), or predicted numbers (N,), as float64."""
        return self.model.predict_frame(as_pandas(frame, party="the input"))


@dataclass(frozen=True, kw_only=True)
class FramesResult:
    """The result of a run on frames.

    Attributes:
        config: complete settings of the run.
        run: result of the run, with its bytes and privacy cost.
        measures: name of a measure -> its value on the test rows, with a 95 % interval over these
            rows; `run.undefined` says why others are missing.
        alone: the results of the active's local models; None: not requested, or under dp_sgd,
            whose noise would not cover them.
        attacks: results of the attacks that the settings name.
        who_learns: party -> the kinds of messages that it received, and what it can read in them;
            empty without the extra `experiments`.
        report: the HTML page; None without a folder or without that extra.
    """

    config: Config = field(repr=False)
    run: RunResult = field(repr=False)
    measures: Mapping[str, Estimate]
    alone: "BaselinesRecord | None" = field(repr=False)
    attacks: "tuple[AttackResult, ...]" = field(repr=False)
    who_learns: Mapping[str, Sequence[Any]] = field(repr=False)
    report: Path | None
    _model: FramesModel | None = field(repr=False)

    @property
    def model(self) -> FramesModel:
        """The model that the active keeps.

        Raises ModelError: the method needs every party to predict.
        """
        if self._model is None:
            method_names = list_methods(lambda method: method.can_predict_locally)
            raise ModelError(
                f"method {self.config.method.name} needs every party to predict, so the active "
                f"keeps no model of its own; train with one of {method_names}"
            )
        return self._model

    @property
    def headline_measure(self) -> Measure:
        """The run's main measure."""
        return MEASURES[self.config.measure]

    @property
    def score(self) -> Estimate:
        """The run's main measure on the test rows, with its interval; NaN if undefined."""
        return self.measures.get(self.config.measure, Estimate(math.nan))

    @property
    def gain(self) -> float | None:
        """The gain over the best local model, by the run's main measure.

        None: local models were not measured, or the measure is undefined on the test rows. One run
        proves no gain. Repeat it with several values of `seed`, which draws the split. Each party
        draws its initial weights from a secret seed, unless `party_seeds` says otherwise.
        """
        if self.alone is None or math.isnan(self.score.value):
            return None
        return self.headline_measure.compute_gain(self.score.value, self.alone.best.test)

    @property
    def epsilon(self) -> dict[str, float]:
        """The epsilons of the run by their names, such as epsilon_x.

        Infinite: no guarantee. An epsilon is missing if the run sends nothing that it would bound.
        """
        return list_epsilons_by_title(self.run.promises)

    @property
    def wire_bytes(self) -> int:
        """The bytes sent on all links."""
        return self.run.wire_bytes

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each measure: its value and the ends of its interval.

        The row of the main measure also has its value for the best local model, and the gain.
        """
        table = pd.DataFrame(
            {
                name: (estimate.value, estimate.low, estimate.high)
                for name, estimate in self.measures.items()
            },
            index=["value", "low", "high"],
        ).T.rename_axis("measure")
        if self.alone is not None:
            headline = self.config.measure
            table.loc[headline, ["best_alone", "gain"]] = [self.alone.best.test, self.gain]
        return table


@isolate_torch_modes()
def run_frames(
    active: Any,
    passives: Mapping[str, Any],
    *,
    label: str,
    id: str = "id",  # noqa: A002 - the word that people use for it
    method: str | Mapping[str, Any] = "votes",
    folder: PathLike | None = None,
    baselines: bool = True,
    **settings: Any,
) -> FramesResult:
    """Train with all parties' frames, and measure.

    Args:
        active: frame of pandas, polars or pyarrow, or a lazy one, with IDs, labels and features.
        passives: passive's name -> its frame, with the same IDs and other features.
        label: the active's column of labels; a row without one is unlabelled, and never tested.
        id: the column of IDs in every frame, or the name of a pandas index.
        method: a key of `secure_apfed.methods.METHODS`, alone or with its settings, such as
            {"name": "votes", "epsilon": 4}.
        folder: folder of the run, for its model, report and privacy ledgers, and for copies of the
            frames that attacks and reports read; None: a temporary folder that is removed.
        baselines: whether to measure the active's local models.
        settings: further settings of a run's YAML file by section, such as train={"epochs": 4}. The
            section `data` must not name files, as in data={"labelled": 50}. It may say how a
            party's columns are read: data={"parties": {"shop": {"categorical": ["branch"]}}}.

    Raises:
        DataError: a frame does not fit; the error names party and column.
        ConfigError: a setting is wrong.
        CheckpointError: the folder has a run already.
        ProtocolError, BudgetExhaustedError: the run stops, as for `secure_apfed.run`.

    Examples:
        >>> from sklearn.datasets import load_breast_cancer
        >>> from secure_apfed import run_frames
        >>> people = load_breast_cancer(as_frame=True).frame.rename_axis("id").reset_index()[:80]
        >>> result = run_frames(
        ...     active=people[["id", "mean radius", "mean texture", "target"]],
        ...     passives={
        ...         "lab": people[["id", "mean area", "mean concavity"]],
        ...         "ward": people[["id", "worst area", "worst texture"]],
        ...     },
        ...     label="target",
        ...     method="apfed_r",
        ...     model={"projection": 1},
        ...     train={"epochs": 1, "batch_size": 20},
        ...     guard={"mechanism": "none"},
        ...     secure_sum={"scheme": "plain", "masks": "pairwise"},
        ...     baselines=False,
        ... )
        >>> result.measures["accuracy"].low <= result.measures["accuracy"].high
        True
    """
    active_name = (settings.get("data") or {}).get("active", "active")
    frames = check_frames(
        active,
        passives,
        active_name=active_name,
        id_column=id,
        label_column=label,
        id_rules=_parse_id_rules(settings),
    )
    with ExitStack() as stack:
        run_folder = Path(folder or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        if (run_folder / _TABLES_NAME).exists():
            raise CheckpointError(
                f"{run_folder} holds frames of a run already; choose a new folder"
            )
        config = _build_config(
            settings,
            _name_files(frames),
            method=method,
            data_of_frames={
                "active": active_name,
                "folder": str(run_folder / _TABLES_NAME),
                "id_column": id,
                "label_column": label,
            },
        )
        run_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with cache_fits():
            try:
                _write_frames(frames, run_folder / _TABLES_NAME)
                with warnings.catch_warnings():
                    # This process has all tables, so a secure sum would hide nothing from it.
                    warnings.simplefilter("ignore", UnsafeChoiceWarning)
                    run_result = run(config, run_folder)
            except BaseException:
                # If the run has not begun, the folder can be used again.
                if not RunFolder(run_folder).config.exists():
                    shutil.rmtree(run_folder / _TABLES_NAME, ignore_errors=True)
                raise
            result = _load_result(
                config,
                run_folder,
                run_result,
                _map_labels_by_text(frames[active_name], label),
                needs_baselines=baselines,
                is_folder_kept=folder is not None,
            )
            if folder is None and run_result.recorded:
                # Stored messages move out of the temporary folder, which is removed now.
                run_result.recorded.transcript.take_along()
            return result


def _parse_id_rules(settings: Mapping[str, Any]) -> IdNormalisation | None:
    """Return the rules by which IDs are compared, from the run's section `alignment`.

    None if that section is wrong, which `_build_config` then reports.
    """
    alignment = settings.get("alignment") or {}
    try:
        return make_id_rules(AlignmentSettings.model_validate(alignment))
    except ValueError:
        return None


def _build_config(
    settings: Mapping[str, Any],
    file_by_party: Mapping[str, str],
    *,
    method: str | Mapping[str, Any],
    data_of_frames: Mapping[str, str],
) -> Config:
    """Return the settings of a run whose tables are the written frames.

    Args:
        settings: sections of a run's YAML file, as the user passed them.
        file_by_party: name of each party's file, by party.
        method: name of the method, or its section.
        data_of_frames: settings of the section `data` that follow from the frames.

    Raises ConfigError: a setting is wrong, or contradicts the frames.
    """
    config_values = {"name": "frames", **settings, "method": method}
    data_settings = config_values.get("data") or {}
    keys_of_frames = {"dataset", "folder", "id_column", "label_column"}
    refused_keys = sorted(keys_of_frames & set(data_settings))
    if refused_keys:
        raise ConfigError(
            f"data.{refused_keys[0]}: the frames say this; leave it out, or say label or id"
        )
    parties = _build_parties(data_settings.get("parties") or {}, file_by_party)
    method_name = method.get("name") if isinstance(method, Mapping) else method
    method_class = METHODS.get(str(method_name))
    if method_class and method_class.settings.representation_sender is None:
        # No representations are sent, so a guard has nothing to protect.
        config_values.setdefault("guard", {"mechanism": "none"})
    config_values["data"] = {
        "dataset": _TABLES_NAME,
        "missing": "mean",
        **data_of_frames,
        **data_settings,
        "parties": parties,
    }
    plain_values = json.loads(json.dumps(config_values, default=_convert_to_plain))

    def describe_place(path: KeyPath) -> str:
        """Return how the user passed the setting at this path, for errors."""
        return describe_argument(path, plain_values.get(str(path[0]))) if path else ""

    return load_config_values(plain_values, describe_place=describe_place)


def _build_parties(
    settings_by_party: Mapping[str, Mapping[str, Any]], file_by_party: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the settings of each party's table, by party: its file, and how columns are read.

    `settings_by_party`: settings that the user passed. `file_by_party`: name of each party's file.

    Raises ConfigError: there is no frame of a party, or its settings name a file or IDs.
    """
    if unknown_parties := sorted(set(settings_by_party) - set(file_by_party)):
        raise ConfigError(
            f"data.parties: there is no frame of {', '.join(unknown_parties)}; there are those of "
            f"{', '.join(file_by_party)}"
        )
    for name, party_settings in settings_by_party.items():
        if refused_keys := sorted({"file", "database", "id_column"} & set(party_settings)):
            raise ConfigError(
                f"data.parties.{name}.{refused_keys[0]}: the frames say this; leave it out"
            )
    return {
        name: {**settings_by_party.get(name, {}), "file": file}
        for name, file in file_by_party.items()
    }


def _convert_to_plain(value: Any) -> Any:
    """Return a value that JSON can write: a number for one of NumPy's, a text for a path."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _load_result(
    config: Config,
    folder: Path,
    run_result: RunResult,
    label_by_text: Mapping[str, Any],
    *,
    needs_baselines: bool,
    is_folder_kept: bool,
) -> FramesResult:
    """Return the result on frames, from the folder of the finished run.

    Configured attacks are mounted, local models are measured, and the report is written here.

    Args:
        config: settings of the run.
        folder: folder of the run.
        run_result: the result of `run`.
        label_by_text: text that names a class in the run -> the label in the active's frame.
        needs_baselines: whether local models are measured.
        is_folder_kept: whether the folder is kept; only then a report is written to it.
    """
    from apfed_experiments.baselines import measure_run_baselines
    from apfed_experiments.finished import mount_attacks

    first_variant = next(iter(run_result.accuracy))  # the way to predict that is reported first
    scored = load_scores(RunFolder(folder), first_variant, threshold=run_result.threshold)
    attacks = mount_attacks(folder, recording=run_result.recorded) if config.attacks else ()
    baselines_record = (
        measure_run_baselines(config, folder, run_result.trained) if needs_baselines else None
    )
    who_learns, report_path = _write_report(folder, needs_page=is_folder_kept)
    model = None
    if config.method.can_predict_locally:
        active_model = load_model(folder)
        model = FramesModel(
            tuple(label_by_text.get(name, name) for name in active_model.classes), active_model
        )
    return FramesResult(
        config=config,
        run=run_result,
        measures={} if scored is None else estimate_measures(scored),
        alone=baselines_record,
        attacks=attacks,
        who_learns=who_learns,
        report=report_path,
        _model=model,
    )


def _write_report(
    folder: Path, *, needs_page: bool
) -> tuple[Mapping[str, Sequence[Any]], Path | None]:
    """Return what each party can read, by party, and the path of the report's page.

    Without the packages that reports need, these are an empty mapping and None.

    `folder`: folder of the run. `needs_page`: whether the page is written; otherwise its path is
    None.
    """
    try:
        from apfed_experiments.report import load_run, write_report
        from apfed_experiments.report.contents import list_learned
    except ModuleNotFoundError as error:
        if error.name not in _REPORT_PACKAGES:
            raise
        return {}, None
    report_path = write_report(folder) if needs_page else None
    return list_learned(load_run(folder)), report_path


def check_frames(
    active: Any,
    passives: Mapping[str, Any],
    *,
    active_name: str,
    id_column: str,
    label_column: str,
    id_rules: IdNormalisation | None = None,
) -> dict[str, pd.DataFrame]:
    """Return each party's frame in pandas, by party, with IDs as texts; the active comes first.

    IDs and labels are checked.

    Args:
        active: the active's frame.
        passives: passive's name -> its frame.
        active_name: the active's name.
        id_column: the column of IDs in each frame.
        label_column: the active's column of labels.
        id_rules: the rules by which IDs are normalised before they are compared; None: the
            defaults.

    Raises DataError: a frame lacks a column, IDs are repeated or never match, a passive has the
        column of labels, or all labels are of one class.
    """
    if active_name in passives:
        raise DataError(
            f"{active_name}: the active is called so, and a passive, too; rename the passive"
        )
    frame_by_party = {active_name: active, **passives}
    collected_by_party = {
        party: collect_frame(frame, party=party) for party, frame in frame_by_party.items()
    }
    pandas_by_party = {
        party: as_pandas(frame, party=party) for party, frame in collected_by_party.items()
    }
    ids_by_party = {
        party: _extract_ids(frame, collected_by_party[party], id_column, party=party)
        for party, frame in pandas_by_party.items()
    }
    normalise_id = (id_rules or IdNormalisation()).normalise_text
    require_comparable({party: map(normalise_id, texts) for party, texts in ids_by_party.items()})
    pandas_by_party = {
        party: frame.assign(**{id_column: ids_by_party[party]})
        for party, frame in pandas_by_party.items()
    }
    for party in passives:
        if label_column in pandas_by_party[party].columns:
            raise DataError(
                f"{party}: its column {label_column!r} is called like the labels of {active_name}, "
                "which a passive must not train on; drop it or rename it"
            )
    _check_labels(pandas_by_party[active_name], label_column, party=active_name)
    return pandas_by_party


def _map_labels_by_text(frame: pd.DataFrame, label_column: str) -> dict[str, Any]:
    """Return the text that names a class in a run -> the label as in the frame.

    `label_column`: the column of labels.
    """
    labels = frame[label_column].dropna().unique().tolist()
    text_label_pairs = [(format_cell(value), value) for value in labels]
    # Labels that differ only in surrounding blanks have one text. The label without blanks is
    # sorted last, so that the dictionary keeps it.
    return dict(sorted(text_label_pairs, key=lambda pair: pair[0] == pair[1]))


def _name_files(frames: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """Return the name of each party's file, by party, as `_write_frames` writes it."""
    return {party: f"party-{number}.parquet" for number, party in enumerate(frames)}


def _write_frames(frames: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Write each party's frame as a Parquet file in a folder that only its owner may enter.

    Raises DataError: Parquet cannot store a column; the error names all such columns.
    """
    faults = FaultList()
    for party, frame in frames.items():
        for column in frame.columns:
            with faults.gather_faults():
                _check_column(frame[column], party=party)
    faults.raise_faults()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private(folder)
    for party, name in _name_files(frames).items():
        frames[party].to_parquet(folder / name, index=False)


def _check_column(column: "pd.Series", *, party: str) -> None:
    """Raise DataError if a Parquet file cannot store a column."""
    content_type = pd.api.types.infer_dtype(column, skipna=True)
    if content_type.startswith("mixed"):
        raise DataError(
            f"{party}: column {column.name!r} holds cells of several kinds ({content_type}); make "
            "them all numbers or all text, as with .astype(str), or drop the column"
        )
    try:
        # The table is not needed, only pyarrow's errors about cells that Parquet cannot hold.
        Table.from_pandas(column.to_frame(), preserve_index=False)
    except (ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{party}: column {column.name!r} cannot be written as Parquet ({error}); make numbers "
            "or text of it, as with .astype(str), or drop it"
        ) from error


def _extract_ids(
    frame: pd.DataFrame, original_frame: Any, id_column: str, *, party: str
) -> list[str]:
    """Return a frame's IDs as texts.

    Args:
        frame: the party's frame, in pandas.
        original_frame: the same frame as the caller passed it; IDs are read from it, since the
            conversion to pandas changes dates.
        id_column: the column of IDs.
        party: the party's name.

    Raises DataError: the frame has no rows, no such column, or repeated IDs.
    """
    if not len(frame):
        raise DataError(f"{party}: its frame has no rows")
    if id_column not in frame.columns:
        raise DataError(
            f"{party}: it has no column {id_column!r} of IDs; its columns are "
            f"{', '.join(frame.columns[:10])}: name another as id, or add it"
        )
    native_frame = nw.from_native(original_frame, eager_only=True)
    cells = (
        native_frame[id_column].to_native()
        if id_column in native_frame.columns
        else frame[id_column]
    )
    id_texts_N = id_texts(
        cells, party=party, subject=f"column {id_column!r}", should_strip=True, settings_key="id"
    )
    id_series = pd.Series(id_texts_N)
    is_repeated = id_series.duplicated(keep=False)
    if is_repeated.any():
        positions_of_first_repeated = np.flatnonzero(id_series == id_series[is_repeated].iloc[0])
        raise DataError(
            f"{party}: {id_series[is_repeated].nunique()} IDs of column {id_column!r} occur more "
            "than "
            f"once, the first in rows {', '.join(map(str, positions_of_first_repeated[:5]))} (from "
            "0); keep one row of each"
        )
    return id_texts_N


def _check_labels(frame: pd.DataFrame, label_column: str, *, party: str) -> None:
    """Raise DataError unless the label column exists and has two classes or more."""
    if label_column not in frame.columns:
        raise DataError(
            f"{party}: it has no column {label_column!r} of labels; its columns are "
            f"{', '.join(frame.columns[:10])}: name another as label"
        )
    distinct_labels = frame[label_column].dropna().unique()
    if len(distinct_labels) < 2:
        description = f"of one class, {distinct_labels[0]!r}" if len(distinct_labels) else "empty"
        raise DataError(
            f"{party}: all labels of column {label_column!r} are {description}; two classes are "
            "needed"
        )
