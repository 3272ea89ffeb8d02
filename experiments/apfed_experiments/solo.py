"""Local models of the active beside every run: all solo baselines, on the same data and rows.

A run's help is worth what it adds to the best of these, chosen by the active's own labels
(`secure_apfed.solo`). The file depends on data, seed, network and training alone, so that
the runs of a study that share these share it, too.

What is written beside a promise is part of it. Where a run answers its training labels through a
mechanism, its baselines learn from those answers, and are chosen by them; where it trains by DP-SGD
they would tell of rows what its noise does not cover, and there are none (`beside_run`). A study
measures the active alone without any privacy, since nothing is sent: its baselines know the labels
as they are (`keep_solo`), and it is no part of what its runs promise.
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
from secure_apfed.config import Config
from secure_apfed.data import DATASETS, OwnData, VerticalData, files_digest, load_data
from secure_apfed.data.lazy_rows import is_lazy, is_sampled
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.learning.own_code import OwnCode, split_code
from secure_apfed.measures.intervals import compute_influence, gain_between
from secure_apfed.measures.table import (
    ACCURACY,
    MEASURES,
    Measure,
    Scored,
    find_measure,
    probabilities_of,
)
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import SimulationInputs, fresh_secrets
from secure_apfed.methods.student import Student, train_student, weigh_votes
from secure_apfed.methods.votes import prior_of
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
    Written,
    count_measured_rows,
    load_outcome,
)
from secure_apfed.settings.data import DataSettings
from secure_apfed.solo import (
    MAX_APART,
    Baseline,
    SoloTask,
    every_baseline,
    likelihood_of,
    measure_collapse,
    score_out_of_fold,
    validation_of,
)
from secure_apfed.solo.interface import (
    MAX_ROWS,
    FitStore,
    FloatArray,
    IntArray,
    cache_fits,
    fit_once,
)

LEFT_OUT = (
    "what the active does alone is left out: without the noise of dp_sgd it would tell of training "
    "rows what this run's epsilons do not cover; to see it, run method single_view without dp_sgd, "
    "in another folder"
)

NOT_IN_MEMORY = (
    "what the active does alone is left out: local models hold all rows in memory, and these are "
    "read when a step needs them"
)

OTHER_ROWS = "the run and its baselines were not measured on the same test rows"

RANKINGS = ("auc", "average_precision")
"""Told of each baseline of two classes, whatever it is chosen by."""
_LAMBDAS = tuple(10.0**power for power in range(-3, 5))
_COSINES = 300
_FOLDS = 5
_FEWEST = 4
_BASELINES = "solo baselines"
_SAMPLES = (500, 5000)
_MAX_TESTED = 100_000  # rows of a mapped table that baselines predict
REGRESSORS: Mapping[str, str] = {
    "ridge": "Ridge regression",
    "cosines": "Ridge on random features",
    "gradient_boosting": "Gradient boosting",
    "random_forest": "Random forest",
    "mean": "Mean of the labels",
}
"""Titles by name, in the order in which equals are preferred."""


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """The result of one baseline, by the measure on held-out labels and on test rows.

    The first is None where none could be held out, since every class has one, or where they do not
    define it. `ranked`: of two classes AUC and average precision on test rows. `influence`: of each
    test row on `test`, where a study keeps it. `likelihood`: the mean log probability of the
    held-out labels, which decides between equals. `apart`: how far the classes that it predicts lie
    from those of the labels, in total variation; None of both: an older version's.
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
        """Return whether the classes that it predicts lie too far from those of the labels."""
        return self.apart is not None and self.apart > MAX_APART


def pick_best(results: Iterable[BaselineResult], *, measure: Measure = ACCURACY) -> BaselineResult:
    """Return the one with the best validation; of equals the likelier, and then the first.

    One that has collapsed is passed over, unless all have.
    """
    every = list(results)
    standing = [result for result in every if not result.has_collapsed] or every

    def rank_result(result: BaselineResult) -> tuple[float, float]:
        likelihood = -math.inf if result.likelihood is None else result.likelihood
        return measure.rank_value(result.validation), likelihood

    return max(standing, key=rank_result)


class RunGain(Written):
    """The gain of help in one run: its model over the best baseline, on the same test rows.

    Attributes:
        measure: that both are measured by; baseline: title of the best baseline.
        rows: of how many test rows.
        reached, alone: the measure of the model, and of the baseline.
        value: how much better the model is.
        low, high: 95 % interval of `value` over the test rows, paired; None: scores were not kept,
            or the rows are too few.
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
    def points(self) -> str:
        """Return the gain with its unit."""
        return MEASURES[self.measure].format_points(self.value)

    @property
    def interval(self) -> str:
        """Return the ends of the interval with their unit; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        low, high = map(MEASURES[self.measure].format_points, (self.low, self.high))
        return f"{low} to {high}"

    @property
    def text(self) -> str:
        """Return the gain with its baseline, its test rows and its interval."""
        over = f"{self.points} against {self.baseline} on the same {self.rows:,} test rows"
        return f"{over}, 95 % over them, paired: {self.interval}" if self.interval else over


class SoloRecord(Written):
    """The file: digests of the settings and of the active's own table, the measure, each
    baseline's, and whether labels are true or what a run's label mechanism answered for training
    rows. `people`: who tests, where influences are kept. `sample`: of how many rows the baselines
    learnt, where not of all `learnt` ones (None: an older version's). `rows`: of how many test rows
    `test` is: beside a run those that its model was measured on; None: an older version's, of all.
    `gain`: of that run over the best.
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
        return MEASURES[self.measure]

    @property
    def best(self) -> BaselineResult:
        """Return the baseline that the active's own labels choose."""
        return pick_best(self.baselines, measure=self.headline_measure)

    def find_baseline(self, name: str) -> BaselineResult:
        """Return the baseline of this name."""
        return next(baseline for baseline in self.baselines if baseline.name == name)

    @property
    def chosen(self) -> str:
        """Return how the best was chosen: by true labels, or by a label mechanism's answers."""
        return "by its own labels" if self.labels == "true" else "by the answers for its labels"

    def describe_best(self) -> str:
        """Say which baseline is the best, how it was chosen, and on which rows it was tested."""
        learnt = "" if self.labels == "true" else ", taught by the same answers,"
        if self.sample:
            learnt += f" fitted on {self.sample:,}"
            learnt += f" of {self.learnt:,} rows" if self.learnt else " rows"
        rows = "" if self.rows is None else f" on {self.rows:,} test rows"
        return (
            f"{self.best.title}, the best that the active does alone{learnt} {self.chosen}: "
            f"{self.headline_measure.title} "
            f"{self.headline_measure.format_value(self.best.test)}{rows}"
        )

    def describe_gain(self, gain: RunGain | None) -> str:
        """Say what help added in one run, or why that is not known; one run shows no more.

        `gain`: None: not measured.
        """
        if gain is None:
            return f"no gain can be told over {self.best.title}: {OTHER_ROWS}"
        return (
            f"{gain.text}; one run shows no gain, only several seeds do "
            "(secure-apfed run CONFIG --seeds 5)"
        )


def settings_digest(config: Config) -> str:
    """Hash all that solo baselines depend on: SHA-256, in hex.

    Which code of one's own the network is, only its party knows; it counts as any.
    """
    shared, _ = split_code(config, config.data.active_name, ())
    # A mapped table's baselines learn from a sample.
    unsampled = {"memory_map"} if config.data.memory_map == "auto" else set()
    relevant = {
        "data": config.data.model_dump(mode="json", exclude=unsampled),
        "seed": config.seed,
        "model": shared.model.model_dump(mode="json", exclude={"head_network"}),
        # No baseline weighs classes, or takes another loss.
        "train": config.train.model_dump(mode="json", exclude={"class_weights", "loss"}),
        **({} if config.measure == ACCURACY.name else {"measure": config.measure}),
        **({"labels": config.labels.model_dump(mode="json")} if config.labels_are_private else {}),
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def solo_file(config: Config, folder: Path) -> Path:
    """Return the path of the local models' file, which runs with the same data and
    training share.
    """
    return folder / f"solo-{settings_digest(config)[:16]}.json"


def scores_beside(path: Path) -> Path:
    """Return the path of all baselines' scores beside a study's solo file."""
    return path.with_suffix(".safetensors")


@isolate_torch_modes()
def keep_solo(
    config: Config, path: Path, *, data: VerticalData | None = None, with_scores: bool = False
) -> SoloRecord:
    """Measure the baselines of labels as they are and write the file, unless it is there.

    `with_scores`: what each says of test rows is kept beside it, for `restrict_solo`.

    Raises:
        ConfigError: the labels are private: then they are for a finished run (`beside_run`).
        CheckpointError: what lies there is of other settings, or of a table that was edited.
    """
    if config.labels_are_private:
        raise ConfigError(
            f"{config.name}: labels and dp_sgd keep training labels private, and baselines of the "
            "labels as they are would tell them; measure them for settings without both"
        )
    files = files_digest(config.data, of=[config.data.active_name])
    if path.is_file():
        stored = load_solo(config, path)
        if stored.files not in ("", files):
            raise CheckpointError(
                f"{path} holds solo baselines of a table that was edited since; remove it and "
                "measure again"
            )
        return stored
    own = (data or load_data(config.data, seed=config.seed)).select_party(config.data.active_name)
    assert own is not None
    scores_path = scores_beside(path) if with_scores else None
    return _measure_baselines(config, path, own, files=files, every=scores_path)


def restrict_solo(solo: SoloRecord, path: Path, tested: Tensor) -> SoloRecord | None:
    """Return the baselines of a study as they are on some of its test rows.

    Args:
        path: the study's solo file.
        tested: of all test rows whether each is among them, bool.

    Returns:
        None where the scores of the baselines were not kept, or are of other rows.
    """
    scores = scores_beside(path)
    if not scores.is_file():
        return None
    places = tested.nonzero().flatten().numpy()
    baselines = []
    for baseline in solo.baselines:
        scored = load_scores_file(scores, baseline.name, threshold=None)
        if len(scored.truth) != len(tested):
            return None
        some = scored.select_rows(places)
        moved = (
            compute_influence(some, solo.headline_measure) if baseline.influence else np.empty(0)
        )
        baselines.append(
            replace(
                baseline,
                test=solo.headline_measure.compute_value(some),
                ranked={name: MEASURES[name].compute_value(some) for name in baseline.ranked},
                influence=tuple(moved.tolist()) if np.isfinite(moved).all() else (),
            )
        )
    people = tuple(solo.people[place] for place in places) if solo.people else ()
    changed = {"baselines": tuple(baselines), "people": people, "rows": len(places)}
    return solo.model_copy(update=changed)


def measure_run_baselines(
    config: Config, folder: Path, trained: OwnData | None
) -> SoloRecord | None:
    """Return a finished run's baselines, of the very rows and labels that it trained on.

    `trained` is that of its `RunResult`; None: only what was written is read. None where nobody
    measured them, under DP-SGD (`LEFT_OUT`), and of rows that are read when a step needs them
    (`NOT_IN_MEMORY`).
    """
    path = RunFolder(folder).solo
    if config.dp_sgd is not None:
        return None
    if trained is None:
        return load_solo(config, path) if path.is_file() else None
    if not has_baselines(trained):
        return None
    files = RunFolder(folder)
    own = _select_test_rows(trained, files)
    places = _sample_test_rows(own, config.seed)
    own = replace(own, test_rows=own.test_rows[places])
    record = _measure_baselines(config, path, own, scored=files.solo_scored)
    gain = measure_gain(files, config, record, places) if files.result.is_file() else None
    if gain is not None:
        record = record.model_copy(update={"gain": gain})
        _write_solo(path, record)
    return record


def has_baselines(data: OwnData) -> bool:
    """Return whether local models can read the active's rows, or a sample of them."""
    return not is_lazy(data.table.features) or is_sampled(data.table.features)


def _sample_test_rows(data: OwnData, seed: int) -> Tensor:
    """Return the places of the test rows that baselines predict: all, or a sample of mapped
    ones.
    """
    rows = len(data.test_rows)
    if not is_sampled(data.table.features) or rows <= _MAX_TESTED:
        return torch.arange(rows)
    draw = np.random.default_rng(derive_seed(seed, "solo", "test rows"))
    return torch.from_numpy(draw.permutation(rows)[:_MAX_TESTED]).sort().values


def _select_test_rows(data: OwnData, files: RunFolder) -> OwnData:
    """Return the data with the test rows that the run's model predicts; with all of them if it
    predicts none.
    """
    tested = load_tested_rows(files) if files.scored.exists() else None
    if tested is None or len(tested) != len(data.test_rows) or not bool(tested.any()):
        return data
    return replace(data, test_rows=data.test_rows[tested.to(data.test_rows.device)])


def _write_solo(path: Path, record: SoloRecord) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, to_json(record.model_dump(mode="json")).encode())


def _measure_baselines(
    config: Config,
    path: Path,
    data: OwnData,
    *,
    files: str = "",
    scored: Path | None = None,
    every: Path | None = None,
) -> SoloRecord:
    """Measure and write the baselines.

    Args:
        files: digest of the tables' files.
        scored: file for the best baseline's test predictions; None: the influence of each test row
            is kept of every baseline instead.
        every: file for all baselines' test predictions.
    """
    predictions_by_name: dict[str, Scored] = {}
    with one_thread():
        results = _compare_baselines(config, data, predictions_by_name)
    people: tuple[str, ...] = ()
    learnt = _select_learnt_rows(data)
    if scored is None:
        people = tuple(data.table.ids[row] for row in data.test_rows.tolist())
        measure = MEASURES[config.measure]
        results = [
            replace(
                result,
                influence=round_influences(config.data, predictions_by_name[result.name], measure),
            )
            for result in results
        ]
    record = SoloRecord(
        settings=settings_digest(config),
        baselines=tuple(results),
        measure=config.measure,
        files=files,
        labels="answered" if config.labels_are_private else "true",
        people=people,
        sample=MAX_ROWS if len(learnt) > MAX_ROWS else None,
        learnt=len(learnt) if len(learnt) > MAX_ROWS else None,
        rows=len(data.test_rows),
    )
    if every is not None:
        every.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_scores(every, predictions_by_name)
    _write_solo(path, record)
    if scored is not None:
        save_scores(scored, {record.best.name: predictions_by_name[record.best.name]})
    return record


def round_influences(data: DataSettings, scored: Scored, measure: Measure) -> tuple[float, ...]:
    """Return the influence of each test row on the measure, to four digits.

    Studies store it for intervals over seeds whose test rows overlap. Empty where the data set
    fixes its test rows, so that seeds differ by training alone, or where one is not finite.
    """
    if data.dataset in DATASETS and DATASETS[data.dataset].split:
        return ()
    influence = compute_influence(scored, measure)
    return tuple(map(float, np.char.mod("%.4g", influence))) if np.isfinite(influence).all() else ()


def _compare_baselines(
    config: Config, data: OwnData, predictions_by_name: dict[str, Scored]
) -> list[BaselineResult]:
    """Compare regressions in the unit of the labels, or classifiers.

    `predictions_by_name`: filled with each model's predictions.
    """
    table = data.table
    rows = data.train_rows
    known = data.labelled_rows
    seed = config.seed
    assert table.labels is not None

    def flatten_rows(rows: Tensor) -> FloatArray:
        return np.asarray(table.features[rows].flatten(1).double().numpy())

    sampled = _sample_rows(data, seed, MAX_ROWS)
    test_BF = flatten_rows(data.test_rows)
    labels_B = table.labels[data.test_rows]
    if data.targets is not None:
        known_n, truth_B = map(data.targets.decode, (table.labels[sampled], labels_B))
        measure = MEASURES[config.measure]
        are_counts = TASKS[config.task].learns_counts
        if are_counts:  # a count of 0 is rounded as a standardised number
            known_n = known_n.clamp(min=0)
            truth_B = truth_B.clamp(min=0)
        return compare_numbers(
            flatten_rows(sampled),
            known_n,
            test_BF,
            truth_B,
            measure=measure,
            seed=seed,
            are_counts=are_counts,
            predictions_by_name=predictions_by_name,
        )
    rows = rows[~torch.isin(rows, known) | torch.isin(rows, sampled)]
    if is_sampled(table.features) and len(rows) > MAX_ROWS:
        rows = _sample_unlabelled_rows(rows, sampled, seed)
    task = SoloTask.from_run(config, replace(data, labelled=sampled), rows)
    baselines = dict(every_baseline())
    if config.model.is_own:
        # The run that trained this network imported it into this process.
        _, named = split_code(config, data.table.name, ())
        networks = OwnCode.from_file(named[data.table.name]).copy_networks()
        task = replace(task, family=networks)
        if networks is None:  # it was handed in, and nothing makes it anew
            del baselines["network"]
    return compare_baselines(
        task, test_BF, labels_B.numpy(), baselines, predictions_by_name=predictions_by_name
    )


def find_best_local(config: Config, data: OwnData) -> tuple[str, float]:
    """Return the best local model by validation, and its headline measure on the test rows."""
    with one_thread():
        results = _compare_baselines(config, data, {})
    best = pick_best(results, measure=MEASURES[config.measure])
    return best.title, best.test


def seconds_alone(config: Config, data: VerticalData) -> float:
    """Estimate the seconds that the baselines beside such a run take on this machine.

    Two samples of its rows are measured, of which the larger takes some ten seconds; 0 where there
    are no baselines (`LEFT_OUT`, `NOT_IN_MEMORY`). Fits that the method shares with them are
    counted, too.
    """
    if config.dp_sgd is not None:
        return 0.0
    own = data.select_party(config.data.active_name)
    assert own is not None
    if not has_baselines(own):
        return 0.0
    own = replace(own, test_rows=own.test_rows[_sample_test_rows(own, config.seed)])
    learnt = _select_learnt_rows(own)
    others = learnt[~torch.isin(learnt, own.labelled_rows)]
    rows = min(len(learnt), MAX_ROWS)
    took = dict[int, float]()
    with one_thread():
        for size in sorted({min(rows, size) for size in _SAMPLES}):
            sampled = _sample_rows(own, config.seed, size)
            training_rows = (
                torch.cat([sampled, others[: max(0, size - len(sampled))]]).sort().values
            )
            tested = own.test_rows[: math.ceil(len(own.test_rows) * size / rows)]
            began = time.perf_counter()
            _compare_baselines(
                config,
                replace(own, train_rows=training_rows, labelled=sampled, test_rows=tested),
                {},
            )
            took[len(training_rows)] = time.perf_counter() - began
    line = np.polyfit(list(took), list(took.values()), len(took) - 1)
    return max(*took.values(), float(np.polyval(line, rows)))


def _select_learnt_rows(data: OwnData) -> Tensor:
    """Return the rows that baselines learn from; a regression learns from labelled ones only."""
    return data.train_rows if data.targets is None else data.labelled_rows


def _sample_rows(data: OwnData, seed: int, maximum: int) -> Tensor:
    """Draw about `maximum` labelled rows, or take all; of each class its share, and one at
    least.
    """
    known_n = data.labelled_rows
    if len(known_n) <= maximum or data.table.labels is None:
        return known_n
    draw = np.random.default_rng(derive_seed(seed, "solo", "sample"))
    order_n = torch.from_numpy(draw.permutation(len(known_n)))
    kinds_n = torch.zeros_like(known_n) if data.targets else data.table.labels[known_n]
    classes = pd.Series(kinds_n[order_n].numpy())
    groups = classes.groupby(classes)
    share = maximum / len(known_n)
    is_chosen = groups.cumcount() < np.ceil(share * groups.transform("size"))
    return known_n[order_n[torch.tensor(is_chosen.to_numpy())]].sort().values


def _sample_unlabelled_rows(rows: Tensor, labelled: Tensor, seed: int) -> Tensor:
    """Return the labelled rows among these, and so many others that they are `MAX_ROWS`."""
    others = rows[~torch.isin(rows, labelled)]
    draw = np.random.default_rng(derive_seed(seed, "solo", "unlabelled"))
    order = torch.from_numpy(draw.permutation(len(others)))
    chosen = others[order[: max(0, MAX_ROWS - len(labelled))]]
    return torch.cat([labelled, chosen]).sort().values


def compare_numbers(
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
    """Compare every regression of all labelled rows, and of folds of them.

    Rows are of any shape. Counts have Poisson regression, too. Raises DataError where too few rows
    have a label.
    """
    from sklearn.dummy import DummyRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.kernel_approximation import RBFSampler
    from sklearn.linear_model import PoissonRegressor, RidgeCV
    from sklearn.model_selection import KFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x_nF, y_n, x_BF, y_B = (
        np.asarray(values, dtype=np.float64)
        for values in (features_nF, targets_n, test_features_BF, test_targets_B)
    )
    x_nF = x_nF.reshape(len(x_nF), -1)
    x_BF = x_BF.reshape(len(x_BF), -1)
    count = len(y_n)
    if count < _FEWEST:
        raise DataError(
            f"solo: {count} labelled rows are too few to choose a regression by; label "
            f"{_FEWEST} or more"
        )

    def derive_state(purpose: str) -> int:
        return derive_seed(seed, "solo", purpose) % 2**32

    ridge = RidgeCV(alphas=_LAMBDAS)
    cosines = RBFSampler(gamma="scale", n_components=_COSINES, random_state=derive_state("cosines"))
    models: dict[str, Any] = {
        "ridge": make_pipeline(StandardScaler(), ridge),
        "cosines": make_pipeline(StandardScaler(), cosines, ridge),
        "gradient_boosting": HistGradientBoostingRegressor(
            max_iter=60,
            max_leaf_nodes=8,
            min_samples_leaf=min(max(count // 8, 1), 20),
            early_stopping=False,
            random_state=derive_state("gradient_boosting"),
        ),
        "random_forest": RandomForestRegressor(
            n_estimators=200, min_samples_leaf=3, random_state=derive_state("random_forest")
        ),
        "mean": DummyRegressor(),
    }
    titles = dict(REGRESSORS)
    if are_counts:
        models["poisson"] = make_pipeline(StandardScaler(), PoissonRegressor(max_iter=1000))
        titles |= {"poisson": "Poisson regression"}
    folds = KFold(min(_FOLDS, count), shuffle=True, random_state=derive_state("folds"))
    results = []
    score = partial(Scored, are_counts=are_counts)
    for done, (name, title) in enumerate(titles.items()):
        report_work(_BASELINES, done, len(titles), title)
        predicted_n = cross_val_predict(models[name], x_nF, y_n, cv=folds)
        value = measure.compute_value(score(truth=y_n, scores=predicted_n))
        test_B = models[name].fit(x_nF, y_n).predict(x_BF)
        results.append(
            BaselineResult(
                name=name,
                title=title,
                validation=None if math.isnan(value) else value,
                test=measure.compute_value(
                    _store_predictions(predictions_by_name, name, score(truth=y_B, scores=test_B))
                ),
            )
        )
    report_work(_BASELINES, len(titles), len(titles))
    return results


def compare_baselines(
    task: SoloTask,
    test_BF: FloatArray,
    labels_B: IntArray,
    baselines: Mapping[str, Baseline],
    *,
    predictions_by_name: dict[str, Scored] | None = None,
) -> list[BaselineResult]:
    """Compare every baseline on the test rows, and by parts of all labels for the choice.

    `predictions_by_name` is filled with the test predictions of each. Raises ModelError where the
    run's own network diverged or cannot take such rows.
    """
    results = []
    task = task.with_few_rows
    with cache_fits():
        for done, (name, baseline) in enumerate(baselines.items()):
            report_work(_BASELINES, done, len(baselines), baseline.title)
            held_out = score_out_of_fold(baseline, task)
            predictor = fit_once(baseline, task)
            scores_BK = probabilities_of(predictor.compute_scores(test_BF))
            scored = _store_predictions(
                predictions_by_name, name, Scored(truth=labels_B, scores=scores_BK)
            )
            ranked = {
                ranking: value
                for ranking in RANKINGS
                if task.classes == 2
                and not math.isnan(value := MEASURES[ranking].compute_value(scored))
            }
            results.append(
                BaselineResult(
                    name=name,
                    title=baseline.title,
                    validation=validation_of(held_out, task.measure),
                    test=task.measure.compute_value(scored),
                    ranked=ranked,
                    likelihood=None if held_out is None else likelihood_of(held_out),
                    apart=measure_collapse(predictor, task),
                )
            )
    report_work(_BASELINES, len(baselines), len(baselines))
    return results


def _store_predictions(
    predictions_by_name: dict[str, Scored] | None, name: str, scored: Scored
) -> Scored:
    """Store the test predictions of one baseline if they are kept, and return them."""
    if predictions_by_name is not None:
        predictions_by_name[name] = scored
    return scored


def measure_gain(
    folder: RunFolder, config: Config, solo: SoloRecord, places: Tensor | None = None
) -> RunGain | None:
    """Return what help added, by the scores of the model and of the best baseline on the same rows.

    `places`: of the run's tested rows that the baselines predicted, too; None: all. Where scores
    were not kept there is no interval, and a gain only where both were measured on as many test
    rows of one split.

    Returns:
        None: both were measured on other rows or by other measures, or nothing defines it.
    """
    outcome = load_outcome(folder)
    variant = next(iter(outcome.accuracy))
    best = solo.best
    measure = solo.headline_measure
    if solo.measure != outcome.measure:
        return None
    reached = load_scores(folder, variant, threshold=outcome.threshold)
    other = load_scores(folder, best.name, threshold=None, alone=True)
    if reached is None or other is None:
        return _compute_figure_gain(config, outcome, solo)
    if places is not None and len(places) == len(other.truth) < len(reached.truth):
        reached = reached.select_rows(places.numpy())
    tested = load_tested_rows(folder)
    if tested is not None and len(tested) == len(other.truth) > len(reached.truth):
        other = other.select_rows(tested.nonzero().flatten().numpy())
    gain = gain_between(reached, other, measure)
    if gain is None:
        return None
    return RunGain(
        measure=measure.name,
        baseline=best.title,
        rows=len(other.truth),
        reached=measure.compute_value(reached),
        alone=measure.compute_value(other),
        value=gain.value,
        low=None if math.isnan(gain.low) else gain.low,
        high=None if math.isnan(gain.high) else gain.high,
    )


def _compute_figure_gain(config: Config, outcome: Outcome, solo: SoloRecord) -> RunGain | None:
    """Return the difference of two figures of the same rows, without an interval."""
    variant = next(iter(outcome.accuracy))
    rows = count_measured_rows(config, outcome, variant)
    rows_of_baseline = outcome.test_rows if solo.rows is None else solo.rows
    value = solo.headline_measure.compute_gain(outcome.scores[variant], solo.best.test)
    if rows is None or rows != rows_of_baseline or math.isnan(value):
        return None
    return RunGain(
        measure=solo.measure,
        baseline=solo.best.title,
        rows=rows,
        reached=outcome.scores[variant],
        alone=solo.best.test,
        value=value,
    )


def taught_alone(config: Config, data: VerticalData) -> Student:
    """Train the student of a run with votes without help, on the active's prior only."""
    name = data.active.name
    own = SimulationInputs(config=config, data=data).build_context(
        name, fresh_secrets(config, name), {}
    )
    student = Student(own, torch.arange(len(data.active.ids)))
    student.fit_to_labels(weigh_votes(None, student, prior_of(config), seed=config.seed).likely)
    train_student(student, config)
    return student


def load_solo(config: Config, path: Path) -> SoloRecord:
    """Read what `keep_solo` wrote.

    Raises CheckpointError: it is of other data or settings, or none of ours.
    """
    record = load_json(path, SoloRecord)
    if record.settings != settings_digest(config):
        raise CheckpointError(
            f"{path} holds solo baselines of other data or settings; remove it and measure again"
        )
    return record


def fits_beside(folder: Path) -> FitStore:
    """Keep fits that several of a study's runs ask for in a folder `fits` of theirs.

    The code is not in their names, as it is not in a finished run's: a study after a change of a
    baseline begins in another folder. Two processes that ask at once both fit, and find the same.
    """

    def load_or_fit(name: str, make: Callable[[], bytes]) -> bytes:
        """Return the stored fit of this name, or make and store it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = own_subfolder(folder / "fits") / name
        if path.is_file():
            return load_with_checksum(path)
        content = make()
        write_with_checksum(path, content)
        return content

    return load_or_fit
