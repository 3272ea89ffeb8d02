"""Local models of the active beside every run: all local models, on the same data and rows.

A run's help is worth what it adds to the best of these, chosen by the active's own labels
(`secure_apfed.baselines`). The file depends on data, seed, network and training alone, so that
the runs of a study that share these share it, too.

What is written beside a privacy guarantee is part of it. Where a run randomises its training
labels, its baselines learn from the randomised labels, and are chosen by them; where it trains by
DP-SGD they would reveal what its noise does not cover, and there are none
(`measure_run_baselines`). A study measures the active alone without any privacy, since nothing is
sent: its baselines learn from the true labels (`load_or_measure_baselines`), and its runs'
guarantees do not cover them.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from pydantic import AfterValidator, Field
from torch import Tensor

from secure_apfed.base.files import load_json, own_subfolder, to_json, write_atomically
from secure_apfed.base.seeds import derive_seed, isolate_torch_modes, one_thread
from secure_apfed.base.working import report_work
from secure_apfed.baselines import (
    MAX_SHARE_DISTANCE,
    Baseline,
    BaselineTask,
    compute_mean_log_likelihood,
    compute_validation,
    list_candidates,
    measure_collapse,
    score_out_of_fold,
)
from secure_apfed.baselines.interface import (
    MAX_ROWS,
    FitStore,
    FloatArray,
    IntArray,
    cache_fits,
    fit_once,
)
from secure_apfed.config import Config
from secure_apfed.data import DATASETS, OwnData, VerticalData, compute_files_digest, load_data
from secure_apfed.data.lazy_rows import is_lazy, is_sampled
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.learning.own_code import UserFunctions, split_user_functions
from secure_apfed.measures.intervals import compute_influence, estimate_gain
from secure_apfed.measures.table import (
    ACCURACY,
    MEASURES,
    Measure,
    Scored,
    find_measure,
    normalise_scores,
)
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import SimulationInputs, fresh_secrets
from secure_apfed.methods.student import Student, find_prior
from secure_apfed.methods.votes import VoteSettings
from secure_apfed.runs.folder import (
    RunFolder,
    load_scores,
    load_scores_file,
    load_tested_rows,
    load_with_checksum,
    save_scores,
    write_with_checksum,
)
from secure_apfed.runs.outcome import (
    Count,
    Outcome,
    StoredResult,
    count_measured_rows,
    load_outcome,
)
from secure_apfed.settings.data import DataSettings

OMITTED_FOR_DP_SGD = (
    "what the active does alone is left out: without the noise of dp_sgd it would tell of training "
    "rows what this run's epsilons do not cover; to see it, run method single_view without dp_sgd, "
    "in another folder"
)

OMITTED_FOR_LAZY_ROWS = (
    "what the active does alone is left out: local models hold all rows in memory, and these are "
    "read when a step needs them"
)

DIFFERENT_TEST_ROWS = "the run and its baselines were not measured on the same test rows"

RANKING_MEASURES = ("auc", "average_precision")
"""Measures that are reported of each baseline with two classes, whatever it is chosen by."""
_RIDGE_PENALTIES = tuple(10.0**power for power in range(-3, 5))
_RANDOM_FEATURE_COUNT = 300  # random Fourier features
_FOLDS = 5
_MIN_LABELLED_ROWS = 4  # fewer labelled rows cannot choose a regression
_PROGRESS_TITLE = "local models"  # title in messages of progress
_TIMING_SAMPLE_SIZES = (500, 5000)  # rows on which the time of all rows is estimated
_MAX_TEST_ROWS = 100_000  # test rows of a memory-mapped table that baselines predict at most
TITLE_BY_REGRESSOR: Mapping[str, str] = {
    "ridge": "Ridge regression",
    "cosines": "Ridge on random features",
    "gradient_boosting": "Gradient boosting",
    "random_forest": "Random forest",
    "mean": "Mean of the labels",
}
"""Titles by name, in the order in which equals are preferred."""


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """The result of one baseline, a local model of the active.

    Attributes:
        name, title: name for programs and for people.
        validation: value of the measure on held-out labels; None: no label can be held out, since
            every class has only one, or the labels do not define the measure.
        test: value of the measure on test rows.
        ranked: AUC and average precision on test rows, for two classes.
        influence: influence of each test row on `test`; empty: not stored.
        likelihood: mean log probability of the held-out labels, which decides ties of `validation`.
        apart: total variation distance between the predicted classes and those of the labels, 0 to
            1; None, like `likelihood`, in files of older versions.
    """

    name: str
    title: str
    validation: float | None
    test: float
    ranked: Mapping[str, float] = field(default_factory=dict, compare=False)
    influence: tuple[float, ...] = field(default=(), compare=False, repr=False)
    likelihood: float | None = field(default=None, compare=False)
    apart: float | None = field(default=None, compare=False)

    @property
    def has_collapsed(self) -> bool:
        """Return whether the predicted classes differ too much from those of the labels.

        A model that predicts nearly one class only is an example.
        """
        return self.apart is not None and self.apart > MAX_SHARE_DISTANCE


def pick_best(results: Iterable[BaselineResult], *, measure: Measure = ACCURACY) -> BaselineResult:
    """Return the result with the best `validation`; ties go to the higher likelihood, then to the
    first.

    Results that have collapsed (their predicted classes differ too much from those of the labels)
    are ignored, unless all have.
    """
    all_results = list(results)
    candidates = [result for result in all_results if not result.has_collapsed] or all_results

    def rank_result(result: BaselineResult) -> tuple[float, float]:
        """Return what results are compared by; a value that is not known ranks lowest."""
        likelihood = -math.inf if result.likelihood is None else result.likelihood
        return measure.rank_value(result.validation), likelihood

    return max(candidates, key=rank_result)


class RunGain(StoredResult):
    """The gain of help in one run: its model over the best baseline, on the same test rows.

    Attributes:
        measure: name of the measure of both.
        baseline: title of the best baseline.
        rows: number of test rows.
        reached, alone: value of the measure for the run's model, and for the baseline.
        value: gain in the measure's unit, positive where the run's model is better.
        low, high: 95 % interval of `value` over the test rows, paired; None: predictions were not
            stored, or the rows are too few.
    """

    measure: Annotated[str, AfterValidator(lambda name: find_measure(name).name)]
    baseline: str
    rows: Count
    reached: float
    alone: float
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def value_text(self) -> str:
        """Return the gain with its unit, such as percentage points."""
        return MEASURES[self.measure].format_points(self.value)

    @property
    def interval_text(self) -> str:
        """Return the ends of the interval with their unit; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        low, high = map(MEASURES[self.measure].format_points, (self.low, self.high))
        return f"{low} to {high}"

    @property
    def comparison_text(self) -> str:
        """Return the gain with its baseline, its number of test rows and its interval."""
        gain_text = f"{self.value_text} against {self.baseline} on the same {self.rows:,} test rows"
        if not self.interval_text:
            return gain_text
        return f"{gain_text}, 95 % over them, paired: {self.interval_text}"


class BaselinesRecord(StoredResult):
    """A file of baselines, the local models of the active.

    Attributes:
        settings: digest of the settings that baselines depend on.
        baselines: results of the baselines.
        files: digest of the active's own table; empty: the data are no files.
        labels: whether baselines learnt from true labels, or from those that a run's label
            mechanism randomised ("answered").
        measure: name of the measure that chooses the best baseline.
        people: IDs of the test rows, where influences are stored.
        sample: number of rows that baselines learnt from; None: all.
        learnt: number of rows of which `sample` is a sample; None: no sample, or an older file.
        rows: number of test rows; beside a run those that its model predicts. None in older files:
            all test rows.
        gain: gain of the run in the same folder over the best baseline; None: not measured.
    """

    settings: str
    baselines: tuple[BaselineResult, ...] = Field(min_length=1)
    files: str = ""
    labels: Literal["true", "answered"] = "true"
    measure: Annotated[str, AfterValidator(lambda name: find_measure(name).name)] = ACCURACY.name
    people: tuple[str, ...] = ()
    sample: int | None = None
    learnt: int | None = None
    rows: Count | None = None
    gain: RunGain | None = None

    @property
    def headline_measure(self) -> Measure:
        """Return the measure that chooses the best baseline."""
        return MEASURES[self.measure]

    @property
    def best(self) -> BaselineResult:
        """Return the baseline that the active's own labels choose."""
        return pick_best(self.baselines, measure=self.headline_measure)

    def find_baseline(self, name: str) -> BaselineResult:
        """Return the baseline of this name."""
        return next(baseline for baseline in self.baselines if baseline.name == name)

    @property
    def choice_text(self) -> str:
        """Return in words how the best was chosen: by true labels, or by randomised ones."""
        return "by its own labels" if self.labels == "true" else "by the answers for its labels"

    def describe_best(self) -> str:
        """Return a sentence that names the best baseline, how it was chosen, and its test rows."""
        training_note = "" if self.labels == "true" else ", taught by the same answers,"
        if self.sample:
            training_note += f" fitted on {self.sample:,}"
            training_note += f" of {self.learnt:,} rows" if self.learnt else " rows"
        rows = "" if self.rows is None else f" on {self.rows:,} test rows"
        return (
            f"{self.best.title}, the best that the active does alone{training_note} "
            f"{self.choice_text}: "
            f"{self.headline_measure.title} "
            f"{self.headline_measure.format_value(self.best.test)}{rows}"
        )

    def describe_gain(self, gain: RunGain | None) -> str:
        """Return a sentence on what help added in one run, or on why that is not known.

        `gain`: gain of the run; None: model and baselines were measured on different rows.
        """
        if gain is None:
            return f"no gain can be told over {self.best.title}: {DIFFERENT_TEST_ROWS}"
        return (
            f"{gain.comparison_text}; one run shows no gain, only several seeds do "
            "(secure-apfed run CONFIG --seeds 5)"
        )


def digest_settings(config: Config) -> str:
    """Return the SHA-256 digest, in hex, of all settings that local models depend on.

    The user's own network counts as any other, since only its party knows which code it is.
    """
    # The shared part names no party's own code.
    public_settings, _ = split_user_functions(config, config.data.active_name, ())
    # A mapped table's baselines learn from a sample.
    excluded_settings = {"memory_map"} if config.data.memory_map == "auto" else set()
    digested_settings: dict[str, Any] = {
        "data": config.data.model_dump(mode="json", exclude=excluded_settings),
        "seed": config.seed,
        "model": public_settings.model.model_dump(mode="json", exclude={"head_network"}),
        # No baseline weighs classes, or takes another loss.
        "train": config.train.model_dump(mode="json", exclude={"class_weights", "loss"}),
    }
    # These enter the digest only where they differ from the usual, as in files of older versions.
    if config.measure != ACCURACY.name:
        digested_settings["measure"] = config.measure
    if config.are_labels_private:
        digested_settings["labels"] = config.labels.model_dump(mode="json")
    return hashlib.sha256(json.dumps(digested_settings, sort_keys=True).encode()).hexdigest()


def locate_baselines(config: Config, folder: Path) -> Path:
    """Return the path of the file of baselines in a study's folder.

    Runs with the same data, seed, network and training have the same file.
    """
    return folder / f"solo-{digest_settings(config)[:16]}.json"


def locate_baseline_predictions(path: Path) -> Path:
    """Return the path of all baselines' test predictions, given a study's file of baselines."""
    return path.with_suffix(".safetensors")


@isolate_torch_modes()
def load_or_measure_baselines(
    config: Config,
    path: Path,
    *,
    data: VerticalData | None = None,
    should_store_predictions: bool = False,
) -> BaselinesRecord:
    """Return a study's baselines (local models of the active): stored ones, or measured and then
    stored.

    They learn from true labels.

    Args:
        config: run whose data, network and training the baselines share.
        path: file of the baselines (`locate_baselines`).
        data: tables of the run, if loaded already.
        should_store_predictions: whether test predictions are stored beside the file, for
            `restrict_baselines`.

    Raises:
        ConfigError: the labels are private; `measure_run_baselines` serves such runs.
        CheckpointError: the stored baselines are of other settings, or of a table since edited.
    """
    if config.are_labels_private:
        raise ConfigError(
            f"{config.name}: labels and dp_sgd keep training labels private, and baselines of the "
            "labels as they are would tell them; measure them for settings without both"
        )
    table_digest = compute_files_digest(config.data, parties=[config.data.active_name])
    if path.is_file():
        stored_baselines = load_baselines(config, path)
        if stored_baselines.files not in ("", table_digest):
            raise CheckpointError(
                f"{path} holds local models of a table that was edited since; remove it and "
                "measure again"
            )
        return stored_baselines
    # Local models see the active's own table only.
    active_data = (data or load_data(config.data, seed=config.seed)).select_party(
        config.data.active_name
    )
    assert active_data is not None
    predictions_path = locate_baseline_predictions(path) if should_store_predictions else None
    return _measure_baselines(
        config, path, active_data, table_digest=table_digest, all_predictions_path=predictions_path
    )


def restrict_baselines(
    record: BaselinesRecord, path: Path, is_tested_T: Tensor
) -> BaselinesRecord | None:
    """Return a study's baselines (local models), measured again on some of its test rows.

    A joint model may be measured on fewer rows than the active tests; gains compare equal rows.

    Args:
        record: baselines, measured on all test rows.
        path: file of the baselines.
        is_tested_T: whether each of the T test rows is used, (T,), boolean.

    Returns:
        None if the baselines' test predictions were not stored, or are of other rows.
    """
    predictions_path = locate_baseline_predictions(path)
    if not predictions_path.is_file():
        return None
    tested_positions = is_tested_T.nonzero().flatten().numpy()
    restricted_baselines = []
    for baseline in record.baselines:
        all_predictions = load_scores_file(predictions_path, baseline.name, threshold=None)
        if len(all_predictions.truth) != len(is_tested_T):
            return None
        tested_predictions = all_predictions.select_rows(tested_positions)
        influence = (
            compute_influence(tested_predictions, record.headline_measure)
            if baseline.influence
            else np.empty(0)
        )
        restricted_baselines.append(
            replace(
                baseline,
                test=record.headline_measure.compute_value(tested_predictions),
                ranked={
                    name: MEASURES[name].compute_value(tested_predictions)
                    for name in baseline.ranked
                },
                influence=tuple(influence.tolist()) if np.isfinite(influence).all() else (),
            )
        )
    people = (
        tuple(record.people[position] for position in tested_positions) if record.people else ()
    )
    changed_fields = {
        "baselines": tuple(restricted_baselines),
        "people": people,
        "rows": len(tested_positions),
    }
    return record.model_copy(update=changed_fields)


def measure_run_baselines(
    config: Config, folder: Path, active_data: OwnData | None
) -> BaselinesRecord | None:
    """Measure or read the baselines (local models) of a finished run, on its own rows and labels.

    Measured baselines are stored in the run's folder, with the gain of the run over the best one.

    Args:
        config: settings of the run.
        folder: folder of the run.
        active_data: the active's data, from the run's `RunResult`; None: stored baselines are read,
            and none are measured.

    Returns:
        None: none are stored, or the run uses DP-SGD (`OMITTED_FOR_DP_SGD`), or its rows are not in
        memory (`OMITTED_FOR_LAZY_ROWS`).
    """
    run_folder = RunFolder(folder)
    path = run_folder.local_models
    if config.dp_sgd is not None:
        return None
    if active_data is None:
        return load_baselines(config, path) if path.is_file() else None
    if not has_baselines(active_data):
        return None
    baseline_data = _select_test_rows(active_data, run_folder)
    sampled_positions = _sample_test_rows(baseline_data, config.seed)
    baseline_data = replace(baseline_data, test_rows=baseline_data.test_rows[sampled_positions])
    record = _measure_baselines(
        config, path, baseline_data, best_predictions_path=run_folder.baseline_predictions
    )
    gain = None
    if run_folder.result.is_file():
        gain = measure_gain(run_folder, config, record, sampled_positions)
    if gain is not None:
        record = record.model_copy(update={"gain": gain})
        _write_baselines(path, record)
    return record


def has_baselines(data: OwnData) -> bool:
    """Return whether local models can be fitted: the active's rows are in memory, or can be
    sampled.
    """
    return not is_lazy(data.table.features) or is_sampled(data.table.features)


def _sample_test_rows(data: OwnData, seed: int) -> Tensor:
    """Return the positions, among the test rows, of those that baselines predict, ascending.

    These are all test rows, or a random sample of a memory-mapped table, which may have too many.
    """
    row_count = len(data.test_rows)
    if not is_sampled(data.table.features) or row_count <= _MAX_TEST_ROWS:
        return torch.arange(row_count)
    rng = np.random.default_rng(derive_seed(seed, "solo", "test rows"))
    return torch.from_numpy(rng.permutation(row_count)[:_MAX_TEST_ROWS]).sort().values


def _select_test_rows(data: OwnData, folder: RunFolder) -> OwnData:
    """Return the data with only the test rows that the run's model predicts; all if it predicts
    none.
    """
    is_tested_T = load_tested_rows(folder) if folder.test_scores.exists() else None
    if (
        is_tested_T is None
        or len(is_tested_T) != len(data.test_rows)
        or not bool(is_tested_T.any())
    ):
        return data
    return replace(data, test_rows=data.test_rows[is_tested_T.to(data.test_rows.device)])


def _write_baselines(path: Path, record: BaselinesRecord) -> None:
    """Write a record of baselines to its file, whose folder only the owner may enter."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, to_json(record.model_dump(mode="json")).encode())


def _measure_baselines(
    config: Config,
    path: Path,
    data: OwnData,
    *,
    table_digest: str = "",
    best_predictions_path: Path | None = None,
    all_predictions_path: Path | None = None,
) -> BaselinesRecord:
    """Measure the baselines on one thread, write their file and return them.

    Args:
        config: run whose data, network and training the baselines share.
        path: file that the baselines are written to.
        data: the active's rows, labels and split.
        table_digest: digest of the active's table; empty: the data are no files.
        best_predictions_path: file for the best baseline's test predictions; None: the record
            stores the influence of each test row on every baseline instead.
        all_predictions_path: file for all baselines' test predictions; None: they are not stored.
    """
    predictions_by_name: dict[str, Scored] = {}
    with one_thread():
        results = _compare_baselines(config, data, predictions_by_name)
    people: tuple[str, ...] = ()  # IDs of the test rows
    training_row_count = len(_select_training_rows(data))
    is_sample = training_row_count > MAX_ROWS
    # A study stores influences, by person, for intervals over seeds; a run stores predictions.
    if best_predictions_path is None:
        people = tuple(data.table.ids[row] for row in data.test_rows.tolist())
        measure = MEASURES[config.measure]
        results = [
            replace(
                result,
                influence=round_influences(config.data, predictions_by_name[result.name], measure),
            )
            for result in results
        ]
    record = BaselinesRecord(
        settings=digest_settings(config),
        baselines=tuple(results),
        measure=config.measure,
        files=table_digest,
        labels="answered" if config.are_labels_private else "true",
        people=people,
        sample=MAX_ROWS if is_sample else None,
        learnt=training_row_count if is_sample else None,
        rows=len(data.test_rows),
    )
    if all_predictions_path is not None:
        all_predictions_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_scores(all_predictions_path, predictions_by_name)
    _write_baselines(path, record)
    if best_predictions_path is not None:
        best_name = record.best.name
        save_scores(best_predictions_path, {best_name: predictions_by_name[best_name]})
    return record


def round_influences(
    data: DataSettings, predictions: Scored, measure: Measure
) -> tuple[float, ...]:
    """Return the influence of each test row on the measure of these predictions, to four digits.

    Studies store it for intervals over seeds whose test rows overlap. The result is empty where
    some influence is not finite, or where the data set fixes its test rows: seeds then differ by
    training alone.
    """
    if data.dataset in DATASETS and DATASETS[data.dataset].split:
        return ()
    influence = compute_influence(predictions, measure)
    if not np.isfinite(influence).all():
        return ()
    return tuple(float(text) for text in np.char.mod("%.4g", influence))


def _compare_baselines(
    config: Config, data: OwnData, predictions_by_name: dict[str, Scored]
) -> list[BaselineResult]:
    """Return the result of every baseline: of regressions, or of classifiers.

    `predictions_by_name`: dictionary that is filled with each baseline's test predictions.
    """
    is_regression = data.targets is not None
    compare_models = _compare_run_regressions if is_regression else _compare_run_classifiers
    return compare_models(config, data, predictions_by_name)


def _flatten_rows(data: OwnData, rows: Tensor) -> FloatArray:
    """Return the features of these B rows as a matrix, (B, F), with F numbers each."""
    return np.asarray(data.table.features[rows].flatten(1).double().numpy())


def _compare_run_regressions(
    config: Config, data: OwnData, predictions_by_name: dict[str, Scored]
) -> list[BaselineResult]:
    """Return the result of every regression, in the unit of the labels.

    `predictions_by_name`: dictionary that is filled with each regression's test predictions.
    """
    labels = data.table.labels
    targets = data.targets
    assert labels is not None
    assert targets is not None
    sampled_rows = _sample_labelled_rows(data, config.seed, MAX_ROWS)
    targets_n = targets.decode(labels[sampled_rows])
    truth_B = targets.decode(labels[data.test_rows])
    are_counts = TASKS[config.task].learns_counts
    if are_counts:  # labels are stored standardised: a count of 0 may decode just below 0
        targets_n = targets_n.clamp(min=0)
        truth_B = truth_B.clamp(min=0)
    return compare_regressions(
        _flatten_rows(data, sampled_rows),
        targets_n,
        _flatten_rows(data, data.test_rows),
        truth_B,
        measure=MEASURES[config.measure],
        seed=config.seed,
        are_counts=are_counts,
        predictions_by_name=predictions_by_name,
    )


def _compare_run_classifiers(
    config: Config, data: OwnData, predictions_by_name: dict[str, Scored]
) -> list[BaselineResult]:
    """Return the result of every classifier.

    `predictions_by_name`: dictionary that is filled with each classifier's test predictions.
    """
    table = data.table
    training_rows = data.train_rows
    labelled_rows = data.labelled_rows
    assert table.labels is not None
    sampled_rows = _sample_labelled_rows(data, config.seed, MAX_ROWS)
    test_BF = _flatten_rows(data, data.test_rows)
    labels_B = table.labels[data.test_rows]
    # Labelled rows outside the sample are left out; rows without a label remain.
    training_rows = training_rows[
        ~torch.isin(training_rows, labelled_rows) | torch.isin(training_rows, sampled_rows)
    ]
    if is_sampled(table.features) and len(training_rows) > MAX_ROWS:
        training_rows = _fill_up_with_unlabelled_rows(training_rows, sampled_rows, config.seed)
    task = BaselineTask.from_run(config, replace(data, labelled=sampled_rows), training_rows)
    baseline_by_name = dict(list_candidates())
    if config.model.is_user_defined:
        # The run that trained this network imported it into this process.
        _, code_by_party = split_user_functions(config, data.table.name, ())
        networks = UserFunctions.from_settings(code_by_party[data.table.name]).copy_networks()
        task = replace(task, family=networks)
        # A network that was passed as an object has no untrained copy.
        if networks is None:
            del baseline_by_name["network"]
    return compare_baselines(
        task, test_BF, labels_B.numpy(), baseline_by_name, predictions_by_name=predictions_by_name
    )


def find_best_local(config: Config, data: OwnData) -> tuple[str, float]:
    """Return the title of the best local model by validation, and its measure on the test rows."""
    with one_thread():
        results = _compare_baselines(config, data, {})
    best = pick_best(results, measure=MEASURES[config.measure])
    return best.title, best.test


def estimate_baseline_seconds(config: Config, data: VerticalData) -> float:
    """Estimate the seconds that the baselines of a run take on this machine.

    Two samples of its rows are timed, and a straight line through both times is extended to all
    rows. The larger sample takes some ten seconds. Fits that the method shares with the baselines
    are counted, too. Returns 0 where there are no baselines (`OMITTED_FOR_DP_SGD`,
    `OMITTED_FOR_LAZY_ROWS`).
    """
    if config.dp_sgd is not None:
        return 0.0
    active_data = data.select_party(config.data.active_name)
    assert active_data is not None
    if not has_baselines(active_data):
        return 0.0
    active_data = replace(
        active_data, test_rows=active_data.test_rows[_sample_test_rows(active_data, config.seed)]
    )
    training_rows = _select_training_rows(active_data)
    unlabelled_rows = training_rows[~torch.isin(training_rows, active_data.labelled_rows)]
    row_count = min(len(training_rows), MAX_ROWS)
    seconds_by_row_count = dict[int, float]()
    with one_thread():
        for size in sorted({min(row_count, size) for size in _TIMING_SAMPLE_SIZES}):
            labelled_rows = _sample_labelled_rows(active_data, config.seed, size)
            unlabelled_count = max(0, size - len(labelled_rows))
            sample_rows = (
                torch.cat([labelled_rows, unlabelled_rows[:unlabelled_count]]).sort().values
            )
            test_rows = active_data.test_rows[
                : math.ceil(len(active_data.test_rows) * size / row_count)
            ]
            sample_data = replace(
                active_data, train_rows=sample_rows, labelled=labelled_rows, test_rows=test_rows
            )
            began = time.perf_counter()
            _compare_baselines(config, sample_data, {})
            seconds_by_row_count[len(sample_rows)] = time.perf_counter() - began
    seconds = list(seconds_by_row_count.values())
    # A line through both samples, or the time itself where one sample has all rows.
    line = np.polyfit(list(seconds_by_row_count), seconds, len(seconds) - 1)
    return max(*seconds, float(np.polyval(line, row_count)))


def _select_training_rows(data: OwnData) -> Tensor:
    """Return the rows that baselines learn from.

    A regression learns from labelled rows only, a classifier also from rows without a label.
    """
    is_regression = data.targets is not None
    return data.labelled_rows if is_regression else data.train_rows


def _sample_labelled_rows(data: OwnData, seed: int, max_rows: int) -> Tensor:
    """Return about `max_rows` random labelled rows, ascending, or all if they are fewer.

    Every class keeps its share, and at least one row; a regression counts as one class.
    """
    labelled_n = data.labelled_rows  # positions of the n labelled rows
    if len(labelled_n) <= max_rows or data.table.labels is None:
        return labelled_n
    is_regression = data.targets is not None
    classes_n = torch.zeros_like(labelled_n) if is_regression else data.table.labels[labelled_n]
    rng = np.random.default_rng(derive_seed(seed, "solo", "sample"))
    shuffled_order_n = torch.from_numpy(rng.permutation(len(labelled_n)))
    # In random order, the first rows of each class are chosen.
    shuffled_classes = pd.Series(classes_n[shuffled_order_n].numpy())
    rows_by_class = shuffled_classes.groupby(shuffled_classes)
    share = max_rows / len(labelled_n)
    class_sample_sizes = np.ceil(share * rows_by_class.transform("size"))
    is_chosen = rows_by_class.cumcount() < class_sample_sizes
    chosen_positions = shuffled_order_n[torch.tensor(is_chosen.to_numpy())]
    return labelled_n[chosen_positions].sort().values


def _fill_up_with_unlabelled_rows(rows: Tensor, labelled_rows: Tensor, seed: int) -> Tensor:
    """Return all labelled rows and random others of `rows`, `MAX_ROWS` in all, ascending.

    `rows`: positions of labelled and unlabelled rows. `labelled_rows`: positions of the labelled
    ones.
    """
    unlabelled_rows = rows[~torch.isin(rows, labelled_rows)]
    rng = np.random.default_rng(derive_seed(seed, "solo", "unlabelled"))
    order = torch.from_numpy(rng.permutation(len(unlabelled_rows)))
    chosen_rows = unlabelled_rows[order[: max(0, MAX_ROWS - len(labelled_rows))]]
    return torch.cat([labelled_rows, chosen_rows]).sort().values


def compare_regressions(
    features_nF: ArrayLike,
    targets_n: ArrayLike,
    test_features_BF: ArrayLike,
    test_targets_B: ArrayLike,
    *,
    measure: Measure,
    seed: int = 0,
    are_counts: bool = False,
    predictions_by_name: dict[str, Scored] | None = None,
) -> list[BaselineResult]:
    """Return the results of all regressions.

    Each is validated by five-fold predictions, and tested after a fit on all labelled rows.

    Args:
        features_nF: features of the n labelled rows, F numbers each; rows of any shape are
            flattened.
        targets_n: labels of these rows.
        test_features_BF, test_targets_B: features and labels of the test rows.
        measure: measure of the predictions.
        seed: seed of the folds and of random models.
        are_counts: whether labels are counts; then Poisson regression is compared, too.
        predictions_by_name: dictionary that is filled with each regression's test predictions;
            None: they are not needed.

    Raises DataError: fewer than four rows have a label.
    """
    from sklearn.model_selection import KFold, cross_val_predict

    x_nF, y_n, x_BF, y_B = (
        np.asarray(values, dtype=np.float64)
        for values in (features_nF, targets_n, test_features_BF, test_targets_B)
    )
    x_nF = x_nF.reshape(len(x_nF), -1)
    x_BF = x_BF.reshape(len(x_BF), -1)
    labelled_count = len(y_n)
    if labelled_count < _MIN_LABELLED_ROWS:
        raise DataError(
            f"local models: {labelled_count} labelled rows are too few to choose a regression by; "
            "label "
            f"{_MIN_LABELLED_ROWS} or more"
        )

    model_by_name = _make_regressors(labelled_count, seed)
    title_by_name = dict(TITLE_BY_REGRESSOR)
    if are_counts:
        model_by_name["poisson"] = _make_poisson_regressor()
        title_by_name |= {"poisson": "Poisson regression"}
    folds = KFold(
        min(_FOLDS, labelled_count), shuffle=True, random_state=_derive_random_state(seed, "folds")
    )
    results = []
    make_predictions = partial(Scored, are_counts=are_counts)
    for done_count, (name, title) in enumerate(title_by_name.items()):
        report_work(_PROGRESS_TITLE, done_count, len(title_by_name), title)
        predicted_n = cross_val_predict(model_by_name[name], x_nF, y_n, cv=folds)
        validation = measure.compute_value(make_predictions(truth=y_n, scores=predicted_n))
        predicted_B = model_by_name[name].fit(x_nF, y_n).predict(x_BF)
        predictions = make_predictions(truth=y_B, scores=predicted_B)
        _store_predictions(predictions_by_name, name, predictions)
        results.append(
            BaselineResult(
                name=name,
                title=title,
                validation=None if math.isnan(validation) else validation,
                test=measure.compute_value(predictions),
            )
        )
    report_work(_PROGRESS_TITLE, len(title_by_name), len(title_by_name))
    return results


def _derive_random_state(seed: int, purpose: str) -> int:
    """Return a seed for one model, of 32 bits, as scikit-learn takes."""
    return derive_seed(seed, "solo", purpose) % 2**32


def _make_regressors(labelled_count: int, seed: int) -> dict[str, Any]:
    """Return the untrained models of `TITLE_BY_REGRESSOR` by name.

    `labelled_count`: number of labelled rows. `seed`: seed of random models.
    """
    from sklearn.dummy import DummyRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    ridge = RidgeCV(alphas=_RIDGE_PENALTIES)
    cosines = RBFSampler(
        gamma="scale",
        n_components=_RANDOM_FEATURE_COUNT,
        random_state=_derive_random_state(seed, "cosines"),
    )
    # Small trees and leaves, since few rows may have a label.
    return {
        "ridge": make_pipeline(StandardScaler(), ridge),
        "cosines": make_pipeline(StandardScaler(), cosines, ridge),
        "gradient_boosting": HistGradientBoostingRegressor(
            max_iter=60,
            max_leaf_nodes=8,
            min_samples_leaf=min(max(labelled_count // 8, 1), 20),
            early_stopping=False,
            random_state=_derive_random_state(seed, "gradient_boosting"),
        ),
        "random_forest": RandomForestRegressor(
            n_estimators=200,
            min_samples_leaf=3,
            random_state=_derive_random_state(seed, "random_forest"),
        ),
        "mean": DummyRegressor(),
    }


def _make_poisson_regressor() -> Any:
    """Return an untrained Poisson regression on standardised features."""
    from sklearn.linear_model import PoissonRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), PoissonRegressor(max_iter=1000))


def compare_baselines(
    task: BaselineTask,
    test_BF: FloatArray,
    labels_B: IntArray,
    baseline_by_name: Mapping[str, Baseline],
    *,
    predictions_by_name: dict[str, Scored] | None = None,
) -> list[BaselineResult]:
    """Return the results of all classifiers.

    Each is validated by cross-validation over the labelled rows, and tested after a fit on all of
    them.

    Args:
        task: training rows and labels of the active, and the measure.
        test_BF, labels_B: features of the B test rows, F numbers each, and their classes.
        baseline_by_name: classifiers to compare, by name.
        predictions_by_name: dictionary that is filled with each classifier's test predictions;
            None: they are not needed.

    Raises ModelError: the run's own network diverged or cannot take such rows.
    """
    results = []
    task = task.subsampled  # as many labelled rows as cross-validation can afford
    with cache_fits():
        for done_count, (name, baseline) in enumerate(baseline_by_name.items()):
            report_work(_PROGRESS_TITLE, done_count, len(baseline_by_name), baseline.title)
            # Held-out scores choose the best baseline; a fit on all labelled rows is tested.
            held_out_predictions = score_out_of_fold(baseline, task)
            predictor = fit_once(baseline, task)
            scores_BK = normalise_scores(predictor.compute_scores(test_BF))
            predictions = Scored(truth=labels_B, scores=scores_BK)
            _store_predictions(predictions_by_name, name, predictions)
            ranking_measures = RANKING_MEASURES if task.classes == 2 else ()
            ranking_values = {
                ranking: MEASURES[ranking].compute_value(predictions)
                for ranking in ranking_measures
            }
            ranking_values = {
                ranking: value for ranking, value in ranking_values.items() if not math.isnan(value)
            }
            results.append(
                BaselineResult(
                    name=name,
                    title=baseline.title,
                    validation=compute_validation(held_out_predictions, task.measure),
                    test=task.measure.compute_value(predictions),
                    ranked=ranking_values,
                    likelihood=None
                    if held_out_predictions is None
                    else compute_mean_log_likelihood(held_out_predictions),
                    apart=measure_collapse(predictor, task),
                )
            )
    report_work(_PROGRESS_TITLE, len(baseline_by_name), len(baseline_by_name))
    return results


def _store_predictions(
    predictions_by_name: dict[str, Scored] | None, name: str, predictions: Scored
) -> None:
    """Add the test predictions of one baseline to a dictionary; None: the caller does not need
    them.
    """
    if predictions_by_name is not None:
        predictions_by_name[name] = predictions


def measure_gain(
    folder: RunFolder,
    config: Config,
    baselines: BaselinesRecord,
    baseline_positions: Tensor | None = None,
) -> RunGain | None:
    """Return the gain of a run's model over the best baseline on the same test rows.

    If predictions were not stored, the gain has no interval, and exists only if both were measured
    on equally many test rows of one split.

    Args:
        folder: folder of the run.
        config: settings of the run.
        baselines: baselines of the run.
        baseline_positions: positions of the baselines' test rows among those that the model
            predicts; None: all.

    Returns:
        None: the two were measured on other rows or by other measures, or the rows do not define
        the measure.
    """
    outcome = load_outcome(folder)
    inference = next(iter(outcome.accuracy))  # the method's own inference comes first
    best = baselines.best
    measure = baselines.headline_measure
    if baselines.measure != outcome.measure:
        return None
    model_predictions = load_scores(folder, inference, threshold=outcome.threshold)
    baseline_predictions = load_scores(
        folder, best.name, threshold=None, is_baseline=True
    )  # of local models
    if model_predictions is None or baseline_predictions is None:
        return _compute_gain_without_scores(config, outcome, baselines)
    # Either may have predicted fewer rows than the other: the baseline a sample of the test rows,
    # the model the rows that all parties know. Both are reduced to the common rows.
    baseline_rows = len(baseline_predictions.truth)
    model_rows = len(model_predictions.truth)
    if baseline_positions is not None and len(baseline_positions) == baseline_rows < model_rows:
        model_predictions = model_predictions.select_rows(baseline_positions.numpy())
        model_rows = baseline_rows
    is_tested = load_tested_rows(folder)  # by the model, for each row that the active tests
    if is_tested is not None and len(is_tested) == baseline_rows > model_rows:
        model_positions = is_tested.nonzero().flatten()
        baseline_predictions = baseline_predictions.select_rows(model_positions.numpy())
    gain = estimate_gain(model_predictions, baseline_predictions, measure)
    if gain is None:
        return None
    return RunGain(
        measure=measure.name,
        baseline=best.title,
        rows=len(baseline_predictions.truth),
        reached=measure.compute_value(model_predictions),
        alone=measure.compute_value(baseline_predictions),
        value=gain.value,
        low=None if math.isnan(gain.low) else gain.low,
        high=None if math.isnan(gain.high) else gain.high,
    )


def _compute_gain_without_scores(
    config: Config, outcome: Outcome, baselines: BaselinesRecord
) -> RunGain | None:
    """Return the gain from the stored measures of a run and of its best local model, without an
    interval.

    Returns None if the two were measured on different numbers of test rows, or if the number is not
    known.
    """
    inference = next(iter(outcome.accuracy))
    row_count = count_measured_rows(config, outcome, inference)
    baseline_row_count = outcome.test_rows if baselines.rows is None else baselines.rows
    value = baselines.headline_measure.compute_gain(outcome.scores[inference], baselines.best.test)
    if row_count is None or row_count != baseline_row_count or math.isnan(value):
        return None
    return RunGain(
        measure=baselines.measure,
        baseline=baselines.best.title,
        rows=row_count,
        reached=outcome.scores[inference],
        alone=baselines.best.test,
        value=value,
    )


def train_without_votes(config: Config, data: VerticalData) -> Student:
    """Train the student (the active's model) of a run with votes, on the active's own predictions
    only.

    The student's targets are its prior: the class probabilities of the active's own labeller. This
    is the ablation without help: the same student, without votes (class scores) of passives.
    """
    name = data.active.name
    inputs = SimulationInputs(config=config, data=data)
    # The active takes part alone: it has no links to passives.
    context = inputs.build_context(name, fresh_secrets(config, name), {})
    student = Student(context, torch.arange(len(data.active.ids)))
    votes = VoteSettings.from_run_settings(config)
    prior = find_prior(votes.prior, votes.labeller)
    targets = student.weigh_votes(None, prior, seed=config.seed)  # None: there are no votes
    student.fit_to_labels(targets.likely_UK)
    student.train_by_descent()
    return student


def load_baselines(config: Config, path: Path) -> BaselinesRecord:
    """Read a file of baselines.

    Raises CheckpointError: the file is no file of baselines, or of other data or settings.
    """
    record = load_json(path, BaselinesRecord)
    if record.settings != digest_settings(config):
        raise CheckpointError(
            f"{path} holds local models of other data or settings; remove it and measure again"
        )
    return record


def make_fit_store(folder: Path) -> FitStore:
    """Return a store of fitted models in the subfolder `fits` of a study's folder.

    Runs of the study share a fit by its name, which covers data and settings but not the code:
    after a change of a baseline's code, begin a study in another folder. Two processes that need
    the same fit at once both compute it, with the same result.
    """
    return partial(_load_or_fit, folder)


def _load_or_fit(folder: Path, name: str, fit_model: Callable[[], bytes]) -> bytes:
    """Return the stored fit of this name from a study's folder, or fit the model and store it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = own_subfolder(folder / "fits") / name
    if path.is_file():
        return load_with_checksum(path)
    content = fit_model()
    write_with_checksum(path, content)
    return content
