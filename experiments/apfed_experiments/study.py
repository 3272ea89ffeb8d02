"""The grid of a study: points, each a run for every seed, that become one table of metrics.

`run_points` runs what the study's folder lacks, in several processes, and reads every finished run
into a table with a row for each metric. A study resumes where it was stopped, or where points or
seeds were added. `apfed_experiments.runner` makes tables and pages of the metrics.
"""

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed

from apfed_attacks.headlines import Direction
from apfed_attacks.interface import AttackResult
from apfed_experiments.baselines import (
    BaselinesRecord,
    load_baselines,
    load_or_measure_baselines,
    locate_baselines,
    make_fit_store,
    restrict_baselines,
    round_influences,
)
from apfed_experiments.finished import FinishedRun, load_finished_run, mount_attacks
from apfed_experiments.summary import estimate_seed_correlation
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.base.files import load_json, own_subfolder, to_json, write_atomically
from secure_apfed.base.seeds import derive_seed, one_thread
from secure_apfed.baselines.interface import use_fit_store
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.data import PartyTable, VerticalData, compute_files_digest, load_data
from secure_apfed.data.encoding import ColumnEncoding, FeatureEncoding, ImageEncoding
from secure_apfed.errors import (
    ApfedError,
    CheckpointError,
    DataError,
    NarrowTableWarning,
    NoHelpWarning,
)
from secure_apfed.measures.table import MEASURES
from secure_apfed.runs.folder import RunFolder, can_resume, load_scores, load_tested_rows
from secure_apfed.runs.outcome import (
    Contributions,
    Outcome,
    Privacy,
    StoredResult,
    count_measured_rows,
)
from secure_apfed.runs.run import PastAlignment, run, share_alignments
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.plugins import list_trusted_code, trust_own_code
from secure_apfed.settings.privacy import LabelSettings

OnDone: TypeAlias = Callable[[int, int], None]
"""Function that is called with the number of finished trials and of all trials."""
MetricRows: TypeAlias = Iterator[Mapping[str, Any]]
"""Metrics of one run as rows, with the columns of `iter_metric_rows`."""
MASKED_SUM: Mapping[str, Any] = {"secure_sum": {"scheme": "plain", "masks": "pairwise"}}
VOTE_STUDENT: Mapping[str, Any] = {"model": {"network": "random_features"}, "train": {"epochs": 1}}
"""Settings that studies share: sums that hide a passive's part, and the student of votes."""

PartySeeds: TypeAlias = Literal["secret", "shared_for_comparison"]
_SHARED_ALIGNMENTS: dict[str, PastAlignment] = {}
"""Alignments of this process: the runs of a study on one data set and seed share one."""


def describe_missing_data(config: Config) -> str:
    """Return why the data of a run are not available on this machine; empty if they are.

    The data are loaded only to see whether that raises an error.
    """
    try:
        load_data(config.data, seed=0)
    except DataError as error:
        return str(error)
    return ""


def load_base_config(name: str) -> Config:
    """Return a configuration that ships with this package, by the name of its file."""
    text = (files("apfed_experiments") / "configs" / f"{name}.yaml").read_text("utf-8")
    return load_config_text(text, source=f"{name}.yaml")


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyRow:
    """A row of a study's table, and how its runs differ from those of other rows.

    Attributes:
        key: short name, used in names of files.
        label: title of the row, for people.
        settings: whole sections of settings, in place of the base's.
        cells: fixed values of the row in the table, by column.
    """

    key: str
    label: str
    settings: Mapping[str, Any]
    cells: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """Return the name of the method of these runs."""
        method = self.settings["method"]
        return str(method["name"] if isinstance(method, Mapping) else method)

    def build_config(self, base: Mapping[str, Any], **further_sections: Any) -> Config:
        """Return the configuration of the runs of this row.

        `base`: plain settings. `further_sections`: further sections. Sections of the row replace
        those of `base`, and those of `further_sections` replace both.
        """
        return Config.model_validate({**base, **self.settings, **further_sections})


class TrialOutcome(Outcome):
    """The outcome of a run of which only metrics are stored, and no model or transcript.

    Attributes:
        influence: influence of each test row on the measure of the method's own inference, for
            intervals over seeds that share test rows.
    """

    influence: tuple[float, ...] = ()


def measure_outcome(config: Config, data: VerticalData) -> TrialOutcome:
    """Run these settings on these tables without a run folder, and return the metrics to store.

    This is how points whose runs store metrics only (`Point.has_metrics_only`) are measured.
    """
    began = time.monotonic()
    result = run(config, None, data=data)
    aligned = result.recording.alignment.get(data.active.name, ())
    contributions = result.contributions.items()
    own_scores = next(iter(result.test_scores.values()))  # the method's own inference comes first
    return TrialOutcome(
        method=result.method,
        accuracy=result.accuracy,
        measure=result.measure,
        measures=result.measures,
        wire_bytes=result.wire_bytes,
        privacy=Privacy.from_spent(result.privacy),
        seconds=time.monotonic() - began,
        aligned_rows=len(aligned),
        train_rows=len(data.train_rows),
        labelled_rows=len(data.labelled_rows),
        test_rows=len(data.test_rows),
        contributions={
            name: Contributions.model_validate(account) for name, account in contributions
        },
        help=result.help,
        influence=round_influences(config.data, own_scores, MEASURES[result.measure]),
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a study: one choice of settings, whose runs are averaged over seeds.

    Attributes:
        config: settings of the runs, except their seeds; its name is the point's.
        folder: folder in which the runs are stored.
        has_metrics_only: whether each run is one small file of metrics in place of a run folder;
            such runs are not attacked.
        baseline_config: settings whose network and training the local models use; None: `config`.
        is_centralised: whether the active holds all features in one table. Only metrics are stored,
            since a run folder would look like a run of the active alone.
        party_seeds: origin of the parties' seeds, whatever `config` says; by default a repeated
            study gives the same metrics.
        study_row: row of the study's table that shows this point; None: the study makes its rows
            otherwise.
        make_tables: function from a seed to the parties' tables; None: those that `config` names.
        measure: function that runs a configuration on tables and returns the metrics. It is called
            only where runs store nothing but metrics.
    """

    config: Config
    folder: Path
    has_metrics_only: bool = False
    baseline_config: Config | None = None
    is_centralised: bool = False
    party_seeds: PartySeeds = "shared_for_comparison"
    study_row: Any = None
    make_tables: Callable[[int], VerticalData] | None = None
    measure: Callable[[Config, VerticalData], TrialOutcome] = measure_outcome

    @property
    def name(self) -> str:
        """Return the name, unique within the study."""
        return self.config.name

    def make_trial(self, seed: int) -> "Trial":
        """Return the run of this point with one seed."""
        return Trial(self, seed)

    def load_tables(self, seed: int) -> VerticalData:
        """Return the tables of one seed: all in the active's table if the point is centralised."""
        if self.make_tables is not None:
            return self.make_tables(seed)
        data = load_seed_tables(self.config.data, seed)
        return centralise_data(data) if self.is_centralised else data


@dataclass(frozen=True)
class Trial:
    """One run of a study: a point (choice of settings) with its seed."""

    point: Point
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the run, also the name of its folder or file."""
        return f"{self.point.name}-seed{self.seed}"

    @property
    def config(self) -> Config:
        """Return the point's configuration with this trial's name and seed."""
        trial_settings = {
            "name": self.name,
            "seed": self.seed,
            "party_seeds": self.point.party_seeds,
        }
        return self.point.config.model_copy(update=trial_settings)

    @property
    def baseline_config(self) -> Config:
        """Return the settings that measure the active's local models for this trial.

        Private labels and DP-SGD are switched off, since a local model sends nothing.
        """
        public_settings = {"seed": self.seed, "labels": LabelSettings(), "dp_sgd": None}
        return (self.point.baseline_config or self.config).model_copy(update=public_settings)

    @property
    def has_metrics_only(self) -> bool:
        """Return whether the trial's path is a file of metrics in place of a run folder."""
        return self.point.has_metrics_only or self.point.is_centralised

    @property
    def path(self) -> Path:
        """Return the run's folder, or its file of metrics."""
        return self.point.folder / (f"{self.name}.json" if self.has_metrics_only else self.name)

    @property
    def settings_digest(self) -> str:
        """Return the SHA-256 digest of what the metrics depend on, except the code.

        It covers the settings that differ from the defaults, and the files of users' own tables.
        """
        settings = self.config.model_dump_json(exclude_defaults=True) + str(
            self.point.is_centralised
        )
        settings += compute_files_digest(self.config.data)
        return hashlib.sha256(settings.encode()).hexdigest()

    def measure(self) -> TrialOutcome:
        """Run the trial without a run folder, and return the metrics to store."""
        return self.point.measure(self.config, self.point.load_tables(self.seed))

    def refuse_other_settings(self) -> None:
        """Raise CheckpointError if the trial's path holds a run of other settings."""
        if self.has_metrics_only:
            if self.path.exists():
                # Called for its exception: it raises if the stored settings differ.
                _load_metrics(self.path, _StoredOutcome, self.settings_digest)
            return
        folder = RunFolder(self.path)
        has_begun = folder.result.exists() or can_resume(self.path, self.config)
        if has_begun and folder.load_config() != self.config:
            raise CheckpointError(
                f"{self.path} holds a run with other settings; remove it, or choose another folder"
            )


class StoredMetrics(StoredResult):
    """A file of metrics.

    Attributes:
        settings: digest of all that the metrics depend on, except the code.
    """

    settings: str


_K = TypeVar("_K", bound=StoredMetrics)
_T = TypeVar("_T")


def measure_once(
    path: Path,
    metrics_class: type[_K],
    settings_digest: str,
    measure: Callable[[], Mapping[str, Any]],
) -> _K:
    """Return the metrics stored at `path`, or measure them on one thread and store them.

    Args:
        path: file of the metrics.
        metrics_class: class of the stored metrics.
        settings_digest: digest of the settings that the metrics depend on.
        measure: function that returns all fields of `metrics_class` except the digest, by name.

    Raises CheckpointError: the file holds something else, or metrics of other settings.
    """
    if not path.is_file():
        with _prepare_measurement(path.parent):
            stored = metrics_class(settings=settings_digest, **measure())
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, to_json(stored.model_dump(exclude_unset=True)).encode())
    return _load_metrics(path, metrics_class, settings_digest)


def _load_metrics(path: Path, metrics_class: type[_K], settings_digest: str) -> _K:
    """Return the metrics stored at `path`.

    `metrics_class`: class of the stored metrics. `settings_digest`: digest of the settings that
    they must have.

    Raises CheckpointError: the file holds something else, or metrics of other settings.
    """
    try:
        stored = load_json(path, metrics_class)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} holds no figures of a run; remove it and run again"
        ) from error
    if stored.settings != settings_digest:
        raise CheckpointError(
            f"{path} is of a run with other settings; remove it, or choose another folder"
        )
    return stored


@contextmanager
def _prepare_measurement(folder: Path) -> Iterator[None]:
    """Prepare the block for a measurement: one thread, stored fits, and fewer warnings.

    Models that several runs of the study fit are fitted once and stored in `folder`. Warnings of
    unsafe choices, of help without gain and of narrow tables are off, since the study's tables show
    the same.
    """
    with one_thread(), warnings.catch_warnings(), use_fit_store(make_fit_store(folder)):
        for category in (UnsafeChoiceWarning, NoHelpWarning, NarrowTableWarning):
            warnings.simplefilter("ignore", category)
        yield


class _StoredOutcome(StoredMetrics):
    """The stored outcome of a trial of which only metrics are stored."""

    outcome: TrialOutcome


def finish_trial(trial: Trial) -> FinishedRun:
    """Run and attack a trial on one thread, as far as its folder lacks that, and return the run.

    Raises CheckpointError: the folder is a link or holds other settings. Errors of the run itself
    are passed on.
    """
    # Runs of one data set and seed have the same people, so they share one alignment.
    with share_alignments(_SHARED_ALIGNMENTS):
        if trial.has_metrics_only:
            return _finish_metrics(trial)
        _finish_run_folder(trial)
    return _load_trial(trial)


def _finish_metrics(trial: Trial) -> FinishedRun:
    """Return the metrics of a trial that stores nothing else, measured unless they are stored."""
    stored = measure_once(
        trial.path, _StoredOutcome, trial.settings_digest, lambda: {"outcome": trial.measure()}
    )
    return FinishedRun(
        config=trial.config,
        outcome=stored.outcome,
        attacks=None,
        local_models=_select_tested_baselines(trial, stored.outcome),
        influence=stored.outcome.influence,
    )


def _finish_run_folder(trial: Trial) -> None:
    """Run and attack a trial, as far as its run folder lacks that.

    Raises CheckpointError: the folder is a link or holds other settings.
    """
    own_subfolder(trial.path)
    trial.refuse_other_settings()
    recording = None  # a run of this process; otherwise the attacks load it from the folder
    with _prepare_measurement(trial.point.folder):
        if not RunFolder(trial.path).result.exists():
            should_resume = can_resume(trial.path, trial.config)
            data = load_seed_tables(trial.config.data, trial.seed)
            recording = run(trial.config, trial.path, data=data, resume=should_resume).recording
        if not (trial.path / "attacks.json").exists():
            mount_attacks(
                trial.path,
                data=load_seed_tables(trial.config.data, trial.seed),
                recording=recording,
            )


def _load_trial(trial: Trial) -> FinishedRun:
    """Return the run in a finished trial's folder.

    Local models, and the influence of each test row on the run's measure, are added.
    """
    run = load_finished_run(trial.path)
    outcome = run.outcome
    folder = RunFolder(trial.path)
    name = next(iter(outcome.scores))  # the method's own inference comes first
    measure = MEASURES[outcome.measure]
    scores = load_scores(folder, name, threshold=outcome.threshold)
    influence: tuple[float, ...] = ()
    if scores is not None:
        influence = round_influences(run.config.data, scores, measure)
    return replace(run, local_models=_select_tested_baselines(trial, outcome), influence=influence)


def _store_baselines(config: Config, path: Path, *, should_store_predictions: bool) -> None:
    """Measure the local models of a run and store them at `path`, unless they are there.

    `should_store_predictions`: whether the local models' test predictions are stored, too.
    """
    with use_fit_store(make_fit_store(path.parent)):
        load_or_measure_baselines(
            config,
            path,
            data=load_seed_tables(config.data, config.seed),
            should_store_predictions=should_store_predictions,
        )


def load_seed_tables(settings: DataSettings, seed: int) -> VerticalData:
    """Return the tables of a run; they are cached for other runs on the same data and seed."""
    return _load_seed_data(settings.model_dump_json(), seed)


@lru_cache(maxsize=2)
def _load_seed_data(settings: str, seed: int) -> VerticalData:
    """Return the tables of a run from its settings as JSON, which the cache can compare."""
    return load_data(DataSettings.model_validate_json(settings), seed=seed)


def _load_baselines(trial: Trial) -> BaselinesRecord | None:
    """Return the local models on the trial's data; None: the study has not measured them."""
    path = locate_baselines(trial.baseline_config, trial.point.folder)
    return load_baselines(trial.baseline_config, path) if path.is_file() else None


def _select_tested_baselines(trial: Trial, outcome: Outcome) -> BaselinesRecord | None:
    """Return the local models, measured on the same test rows as the trial's model.

    Joint inference may be measured on fewer test rows than the active has. Returns None if local
    models were not measured, or if these rows are not known.
    """
    baselines = _load_baselines(trial)
    own_inference = next(iter(outcome.accuracy))  # the method's own comes first
    row_count = count_measured_rows(trial.config, outcome, own_inference)
    if baselines is None or row_count is None or row_count == outcome.test_rows:
        return baselines
    is_tested = None if trial.has_metrics_only else load_tested_rows(RunFolder(trial.path))
    if is_tested is None or int(is_tested.sum()) != row_count:
        return None
    return restrict_baselines(
        baselines, locate_baselines(trial.baseline_config, trial.point.folder), is_tested
    )


@dataclass(frozen=True)
class Failure:
    """A trial that ended with an error; the next start of the study tries it again.

    Attributes:
        trial, message: name of the trial, and the error's class and text.
    """

    trial: str
    message: str

    @property
    def point(self) -> str:
        """Return the name of the trial's point (choice of settings)."""
        return self.trial.rpartition("-seed")[0]


@dataclass(frozen=True)
class StudyValues(Generic[_T]):
    """The values that a study measured, and the failures among its measurements."""

    values: _T
    failures: Sequence[Failure] = ()


def catch_failure(name: str, task: Callable[[], _T]) -> _T | Failure:
    """Return the task's result, or a failure named `name` if it raises an error for users."""
    try:
        return task()
    except ApfedError as error:
        return Failure(name, f"{type(error).__name__}: {error}")


def run_tasks(
    tasks: Iterable[tuple[str, Callable[[], _T]]], task_count: int, *, jobs: int, on_done: OnDone
) -> dict[str, _T]:
    """Run tasks in worker processes, and return their results by name.

    Args:
        tasks: name and function of each task; the next one is requested when a worker is free.
        task_count: number of tasks, passed on to `on_done`.
        jobs: number of worker processes.
        on_done: function of the numbers of finished tasks and of all, called after each task.
    """
    result_by_name: dict[str, _T] = {}
    parallel = Parallel(
        n_jobs=jobs, return_as="generator_unordered", pre_dispatch=jobs, batch_size=1
    )
    with warnings.catch_warnings():
        # joblib replaces a worker whose memory has grown between two tasks; no result is lost.
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs")
        # A worker refuses user code that no settings named. It has read no settings itself, so it
        # gets the import paths that the caller's settings named.
        user_modules = list_trusted_code()
        calls = (delayed(_run_task)(*task, user_modules=user_modules) for task in tasks)
        for name, result in parallel(calls):
            result_by_name[name] = result
            on_done(len(result_by_name), task_count)
    return result_by_name


def _run_task(name: str, task: Callable[[], _T], *, user_modules: Iterable[str]) -> tuple[str, _T]:
    """Run a task in a worker process, and return its name and result.

    `user_modules`: import paths of the user's own code, which the task may import.
    """
    for import_path in user_modules:
        trust_own_code(import_path)
    return name, task()


def iter_metric_rows(run: FinishedRun) -> MetricRows:
    """Yield a row for each mode of inference, each local model and each attack that applied.

    Columns:
        target: "task", "solo" (a local model), or the attack's direction (who reads whose what).
        name: the mode of inference (the method's own first), the local model, or the attack's
            setting.
        metric, score: name and value of the measure.
        rows: number of test rows of the score.
        baseline: measure of a local model on held-out labels, or score of an attack's best
            baseline.
        advantage: score of an attack minus its baseline; only attacks have one.
        influence: influence of each person on the score, for the method's own inference and local
            models.

    Local models measured on other test rows than the method's own inference are left out.
    """
    # IDs of the test rows' people; only the file of local models stores them.
    test_people = () if run.local_models is None else run.local_models.people
    row_count_by_inference = {
        name: count_measured_rows(run.config, run.outcome, name) for name in run.outcome.scores
    }
    own_inference = next(iter(row_count_by_inference))
    own_row_count = row_count_by_inference[own_inference]
    for name, score in run.outcome.scores.items():
        columns = {
            "name": name,
            "metric": run.outcome.measure,
            "score": score,
            "rows": row_count_by_inference[name],
        }
        influence = run.influence if name == own_inference else ()
        yield {"target": "task", **columns, "influence": _index_influence(influence, test_people)}
    if run.local_models is not None and _has_equal_row_count(
        run.local_models, run.outcome, own_row_count
    ):
        for local_model in run.local_models.baselines:
            columns = {
                "name": local_model.name,
                "metric": run.local_models.measure,
                "score": local_model.test,
                "rows": own_row_count,
                "influence": _index_influence(local_model.influence, test_people),
            }
            yield {"target": "solo", **columns, "baseline": local_model.validation}
    yield from _iter_attack_rows(run.attacks or ())


def _iter_attack_rows(attacks: Iterable[AttackResult]) -> MetricRows:
    """Yield a row for each attack result that has a finite advantage over its best baseline.

    Others did not apply to the run, or their metric is not defined. `iter_metric_rows` names the
    columns.
    """
    for attack in attacks:
        if attack.advantage is None or not math.isfinite(attack.advantage):
            continue
        metric = str(attack.metric)
        baseline = str(attack.baseline)
        yield {
            "target": Direction.from_result(attack).kind,
            "name": attack.setting,
            "metric": metric,
            "score": attack.score[metric] or 0.0,
            "baseline": attack.baselines[baseline][metric] or 0.0,
            "advantage": attack.advantage,
        }


def _has_equal_row_count(
    local_models: BaselinesRecord, outcome: Outcome, row_count: int | None
) -> bool:
    """Return whether the local models were measured on as many test rows as the run's model.

    `row_count`: number of test rows of the run's model; None: not known. A number that is not
    known, as in files of older versions, counts as equal.
    """
    local_row_count = outcome.test_rows if local_models.rows is None else local_models.rows
    return row_count is None or local_row_count is None or row_count == local_row_count


def _index_influence(
    influence: Sequence[float], people: Sequence[str]
) -> "pd.Series[float] | None":
    """Return the influence of each test row by person; None: it was not stored."""
    if not influence or len(influence) != len(people):
        return None
    return pd.Series(influence, index=list(people))


@dataclass(frozen=True)
class StudyMetrics:
    """The metrics of all runs of a study, and the failures.

    Attributes:
        table: a row for each metric of each run, seed by seed. Columns: point, seed, those of
            `iter_metric_rows`, epsilons, releases, bytes and use of help of the run, and shared,
            the correlation of two seeds' metrics (`estimate_seed_correlation`).
    """

    table: pd.DataFrame
    failures: tuple[Failure, ...] = ()

    def select_rows(self, point: Point) -> pd.DataFrame:
        """Return the rows of one point (choice of settings), of all its seeds."""
        return self.table[self.table["point"] == point.name]


def collect_metrics(
    finished_runs: Iterable[tuple[Trial, FinishedRun | Failure]],
    *,
    list_metric_rows: Callable[[FinishedRun], MetricRows] = iter_metric_rows,
) -> StudyMetrics:
    """Return the table of the metrics of all finished runs, and the failures.

    `finished_runs`: trials with their runs. `list_metric_rows`: function that returns the rows of a
    run.
    """
    rows: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for trial, result in finished_runs:
        if isinstance(result, Failure):
            failures.append(result)
            continue
        outcome = result.outcome
        passives = result.outcome.contributions.values()
        labelled_count = outcome.labelled_rows or 0
        test_count = outcome.test_rows or 0
        help_decision = outcome.help  # None: the method does not decide whether it uses help
        # Files of older versions hold the number of aligned rows only.
        train_count = outcome.train_rows or max(
            labelled_count, (outcome.aligned_rows or 0) - test_count
        )
        seed_correlation = 0.0
        if train_count:
            seed_correlation = estimate_seed_correlation(
                trial.config.data, train_count=train_count, test_count=test_count
            )
        run_columns = {
            "point": trial.point.name,
            "seed": trial.seed,
            "epsilon_x": outcome.privacy.epsilon_x,
            "epsilon_y": outcome.privacy.epsilon_y,
            "releases": outcome.privacy.releases or 0,
            "wire_bytes": outcome.wire_bytes,
            "help_used": None if help_decision is None else help_decision.is_in_use,
            "help_averaged": None if help_decision is None else help_decision.is_averaged,
            # Largest privacy cost that a passive recorded for one person; infinite without noise.
            "epsilon_passives": max((account.epsilon for account in passives), default=math.inf),
            "shared": seed_correlation,
        }
        rows += [{**run_columns, **metrics} for metrics in list_metric_rows(result)]
    return StudyMetrics(pd.DataFrame(rows), tuple(failures))


def list_trials(points: Sequence[Point], seeds: Sequence[int]) -> list[Trial]:
    """Return the trials of all points and seeds.

    They are ordered by seed, so that a study that is stopped has complete seeds.
    """
    return [point.make_trial(seed) for seed in seeds for point in points]


_NamedTask: TypeAlias = tuple[str, Callable[[], Any]]
"""Name of a task in messages to users, and the function that does it."""


def _list_baseline_tasks(
    trials: Sequence["Trial"], later_trials: Sequence["Trial"]
) -> list[_NamedTask]:
    """Return the tasks that measure and store local models, one for all trials on the same data.

    `later_trials`: trials that will be run later, with the same local models.
    """
    config_by_path = {
        locate_baselines(trial.baseline_config, trial.point.folder): trial.baseline_config
        for trial in trials
    }
    # Joint inference may be measured on some test rows only: then local models' predictions are
    # stored, to measure them on these rows.
    paths_with_predictions = {
        locate_baselines(trial.baseline_config, trial.point.folder)
        for trial in (*trials, *later_trials)
        if "the active predicts alone" not in trial.config.method.exchange_facts
    }
    tasks: list[_NamedTask] = []
    for path, config in config_by_path.items():
        should_store = path in paths_with_predictions
        task = partial(_store_baselines, config, path, should_store_predictions=should_store)
        tasks.append((str(path), task))
    return tasks


def run_points(
    points: Sequence[Point],
    seeds: Sequence[int],
    *,
    jobs: int = 1,
    on_done: OnDone = lambda done, total: None,
    should_keep_going: bool = False,
    list_metric_rows: Callable[[FinishedRun], MetricRows] = iter_metric_rows,
    should_measure_baselines: bool = False,
    later_points: Sequence[Point] = (),
) -> StudyMetrics:
    """Run the trials that the folder lacks, and return the metrics of all.

    Args:
        points: points of the study.
        seeds: seeds with which each point is run.
        jobs: number of processes, with one thread each.
        on_done: function that is called after each trial.
        should_keep_going: whether an error for users makes a trial a failure; else it ends the
            study.
        list_metric_rows: function that returns the rows of a run.
        should_measure_baselines: whether local models are measured, too, once for all runs on the
            same data.
        later_points: points that will be run later and need the same local models.

    Raises CheckpointError: a trial's path holds another run. Other errors of a trial are passed on.
    """
    trials = list_trials(points, seeds)
    baseline_tasks: list[_NamedTask] = []
    if should_measure_baselines:
        baseline_tasks = _list_baseline_tasks(trials, list_trials(later_points, seeds))
    tasks = list(baseline_tasks)
    for trial in trials:
        task = partial(finish_trial, trial)
        tasks.append(
            (trial.name, partial(catch_failure, trial.name, task) if should_keep_going else task)
        )
    result_by_name = run_tasks(
        tasks,
        len(trials),
        jobs=jobs,
        # Tasks that measure local models are no trials, so they are not counted.
        on_done=lambda done, total: on_done(max(0, done - len(baseline_tasks)), total),
    )
    # Local models may have been measured after the runs that are compared with them.
    for trial in trials:
        result = result_by_name[trial.name]
        if isinstance(result, FinishedRun) and result.local_models is None:
            result_by_name[trial.name] = replace(
                result, local_models=_select_tested_baselines(trial, result.outcome)
            )
    return collect_metrics(
        ((trial, result_by_name[trial.name]) for trial in trials), list_metric_rows=list_metric_rows
    )


def shuffle_passives_rows(data: VerticalData, *, seed: int) -> VerticalData:
    """Return the data with each passive's rows randomly assigned to other people.

    The passives' rows then carry no information on the active's people: this is the ablation
    without help, with messages of the same sizes.
    """
    passives = []
    for table in data.passives:
        rng = np.random.default_rng(derive_seed(seed, "mixed", table.name))
        order = torch.from_numpy(rng.permutation(len(table.ids)))
        passives.append(replace(table, features=table.features[order]))
    return replace(data, passives=tuple(passives))


def centralise_data(data: VerticalData) -> VerticalData:
    """Return the data with one table, the active's, which has all parties' features of its people.

    Columns are joined side by side, strips of images from top to bottom.

    Raises DataError: a passive lacks some of these people, or the views do not make one table.
    """
    tables = [data.active]
    for table in data.passives:
        positions = pd.Index(table.ids).get_indexer(pd.Index(data.active.ids))
        missing_count = int((positions < 0).sum())  # the position of an unknown person is -1
        if missing_count:
            raise DataError(
                f"{table.name} does not know {missing_count} of the active's people; a "
                "centralised table needs data.overlap: 1.0"
            )
        tables.append(select_table_rows(table, positions.tolist()))
    image_blocks = [
        (table.encoding, table.features)
        for table in tables
        if isinstance(table.encoding, ImageEncoding)
    ]
    column_encodings = [
        table.encoding for table in tables if isinstance(table.encoding, ColumnEncoding)
    ]
    if image_blocks and column_encodings:
        raise DataError("images and tables of columns do not make one table")
    encoding: FeatureEncoding
    if column_encodings:
        all_columns = [column for part in column_encodings for column in part.columns]
        encoding = ColumnEncoding(columns=tuple(all_columns))
        features = torch.cat([table.features for table in tables], dim=1)
    else:
        encoding, features = _join_image_blocks(image_blocks)
    active = PartyTable(data.active.name, data.active.ids, features, data.active.labels, encoding)
    return replace(data, table=active, passives=())


def _join_image_blocks(
    image_blocks: Sequence[tuple[ImageEncoding, torch.Tensor]],
) -> tuple[ImageEncoding, torch.Tensor]:
    """Return the encoding and the pixels of the image that blocks of rows make, top to bottom.

    `image_blocks`: pairs of a block's encoding and its pixels, in any order; pixel rows are
    dimension 2.

    Raises DataError: the blocks leave out rows of the image, or overlap.
    """
    blocks = sorted(image_blocks, key=lambda block: block[0].first_row)
    for (above, _), (below, _) in pairwise(blocks):
        if above.end_row != below.first_row:
            raise DataError("the strips leave out rows of the image or overlap")
    top_encoding, _ = blocks[0]
    bottom_encoding, _ = blocks[-1]
    encoding = top_encoding.model_copy(update={"end_row": bottom_encoding.end_row})
    return encoding, torch.cat([pixels for _, pixels in blocks], dim=2)


def select_table_rows(table: PartyTable, rows: Sequence[int]) -> PartyTable:
    """Return a passive's table with these rows only, in this order."""
    ids = tuple(table.ids[row] for row in rows)
    return PartyTable(table.name, ids, table.features[list(rows)], None, table.encoding)
