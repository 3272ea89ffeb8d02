"""APC-VFL's results: what an encoder that learnt from the passive's code is worth to the active.

A code is the hidden representation of an autoencoder. Figures 5 and 7 to 16 of the paper: logistic
regression on the active's columns (Local), on the code of its autoencoder alone (Ablation), and on
a code that was drawn to the joint code of both parties (APC-VFL), each cross-validated over all of
the active's rows, for every number of its features and of aligned rows.
The paper's values are not in the text that we have, so that none stands beside ours. Lambda, the
distance of codes and the share of held-out rows are not in it either: `_READING` says what we use.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apfed_experiments.presets import find_preset
from apfed_experiments.tables.table import Job, MeasuredValues, PaperTable, TableExtent, TableRow
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Kind
from secure_apfed.learning.autoencoder import (
    DistillationSettings,
    FoldScore,
    compute_own_codes,
    cross_validate_scores,
)
from secure_apfed.learning.descent import Compute
from secure_apfed.methods.distilled import ApcVflSettings
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.run import run

_READING = (
    "Mean over the seeds of ten-fold cross-validations, which are drawn with the seed as rows, "
    "aligned rows and weights are; minus: paired by seed. Intervals hold what these change, and "
    "not that other people would be other people: every seed tests nearly all rows of the table. "
    "Adam, at most 200 epochs, patience 10, encoders of Table 3. Not legible in the paper, and "
    "chosen here: lambda 1, the mean squared distance of codes, a tenth of the rows held out. The "
    "classifier (C = 1) reads columns that are standardised and codes as they are."
)
_HEADER = ("features", "aligned rows", "method", "score")
_TABLE2_HEADER = ("data", "aligned rows", "method", "measure")
_ANY_ALIGNED_COUNT = "any"
_LOCAL = "Local"
_ABLATION = "Ablation"
_TABLE2_SEEDS = 5
_QUICK_DATASET = "breast_cancer"
_LAMBDAS = (0.0, 1.0, 10.0, 100.0)
# Outputs and inputs of the passive's last layer, which ends in its representation (Table 3).
_REPRESENTATION_SIZE = 256
_LAST_LAYER_INPUTS = 128
_BYTES_PER_NUMBER = 4
_METHOD_BY_TABLE2_TITLE = {"SplitNN": "split_nn", "APC-VFL": "apc_vfl"}
_TITLE_BY_MEASURE = {
    "accuracy": "accuracy, per cent",
    "rounds": "rounds",
    "megabytes": "MB sent until training ends",
    "counted": "MB as the paper counts them",
}


# Scenarios of APC-VFL's experiments.
#
# Source: section 5 and Appendices A and B of the paper. `apfed_experiments.presets.find_preset`
# has the columns and people of each party; encoders, epochs, patience and Adam are the defaults of
# `secure_apfed.learning.autoencoder.DistillationSettings`, which are the paper's.


@dataclass(frozen=True, kw_only=True)
class ScenarioExtent:
    """How much of a scenario (a data set and what is measured on it) is measured.

    Attributes:
        feature_counts: numbers of columns at the active.
        aligned_counts: numbers of aligned rows.
        seed_count: number of seeds.
    """

    feature_counts: tuple[int, ...]
    aligned_counts: tuple[int, ...]
    seed_count: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A data set, and what is measured on it.

    Attributes:
        dataset: name of the data set.
        row_count: number of the active's rows, all labelled.
        test_fraction: share of all people that are left out, so that `row_count` remain.
        batch_size: batch size of every training.
        title_by_score: measures of each fold, each with its name in the paper.
        quick_extent, full_extent: the default part of the scenario, and all of it.
    """

    dataset: str
    row_count: int
    test_fraction: float
    batch_size: int
    title_by_score: Mapping[FoldScore, str]
    quick_extent: ScenarioExtent
    full_extent: ScenarioExtent

    def make_data(self, feature_count: int, aligned_count: int | None) -> dict[str, Any]:
        """Return the settings under `data` of a run.

        `feature_count`: number of columns at the active. `aligned_count`: number of its people whom
        the passive knows; None: all.

        All `row_count` of the active are cross-validated. The people left out are the run's test
        rows, which the paper does not measure here.
        """
        # The preset is only read for its columns, which do not depend on the number of aligned
        # people.
        any_count = aligned_count or self.full_extent.aligned_counts[0]
        preset = find_preset(f"apc-vfl/{self.dataset}/{feature_count}/{any_count}")
        data_settings = {
            "dataset": preset["dataset"],
            "columns": preset["columns"],
            "aligned": aligned_count,
        }
        active_settings = {
            "limit": self.row_count,
            "test_fraction": self.test_fraction,
            "split": "at_random",
        }
        return data_settings | active_settings

    def make_config(
        self, data: Mapping[str, Any], method: str, changes: Mapping[str, Mapping[str, Any]]
    ) -> Config:
        """Return the configuration of a run of a method on these data.

        `changes`: keys to change in each section of the settings below.
        """
        settings: dict[str, Any] = {
            "name": f"apc-vfl-{self.dataset}".replace("_", "-"),
            "party_seeds": "shared_for_comparison",
            "method": {"name": method, "batch_size": self.batch_size},
            "data": data,
            "model": {"network": "selu", "hidden": [256], "representation": 256},
            "guard": {"mechanism": "none"},
            "secure_sum": {"scheme": "plain"},
            "transcript": {"keep": "none"},
            "train": {"device": "cpu"},
        }
        changed_settings = {
            key: {**settings[key], **changed_keys} for key, changed_keys in changes.items()
        }
        return Config.model_validate(settings | changed_settings)


# Methods with help, whose encoder turns the active's columns into a code that a classifier reads.
# The first is compared with all others.
_APC_VFL = "APC-VFL"
_VFEDTRANS = "VFedTrans"
_METHOD_BY_TITLE = {_APC_VFL: "apc_vfl", _VFEDTRANS: "vfedtrans"}
_CaseKey: TypeAlias = tuple[int, int | str, str]
"""Number of features, number of aligned people (or `_ANY_ALIGNED_COUNT`), and title of the method.
"""
_ALIGNED_COUNTS = (10_000, 7500, 5000, 2500)
_SMALL_EXTENT = ScenarioExtent(feature_counts=(5, 2), aligned_counts=(10_000, 2500), seed_count=2)
_LARGE_EXTENT = ScenarioExtent(
    feature_counts=(5, 4, 3, 2), aligned_counts=(*_ALIGNED_COUNTS, 100), seed_count=5
)
_BREAST_CANCER_EXTENT = replace(_LARGE_EXTENT, aligned_counts=(250, 200, 150, 100))
SCENARIOS: Mapping[str, Scenario] = {
    "breast_cancer": Scenario(
        dataset="breast_cancer",
        row_count=500,
        test_fraction=69 / 569,
        batch_size=8,
        title_by_score={"accuracy": "accuracy"},
        quick_extent=_BREAST_CANCER_EXTENT,
        full_extent=_BREAST_CANCER_EXTENT,
    ),
    "credit_card": Scenario(
        dataset="credit_card",
        row_count=20_000,
        test_fraction=0.25,
        batch_size=128,
        title_by_score={"f1": "F1"},
        quick_extent=_SMALL_EXTENT,
        full_extent=_LARGE_EXTENT,
    ),
}


def score_local(
    *, seed: int, config: Mapping[str, Any], scores: Sequence[FoldScore]
) -> MeasuredValues:
    """Score the active without help: on its columns, and on the code of its own autoencoder.

    A code is an autoencoder's hidden representation. A classifier reads the columns or the code.
    Returns its mean scores of a cross-validation in per cent, by "columns SCORE" and "code SCORE".
    Letters: T training rows, F features, D dimensions of the code.
    """
    run_config, data, score = _prepare_run(seed, config, scores)
    features_TF = data.active.features[data.train_rows]
    codes_TD, _ = compute_own_codes(
        features_TF,
        model=run_config.model,
        settings=DistillationSettings.from_settings(run_config.method),
        owner=data.active.name,
        seed=seed,
        compute=Compute.from_settings(run_config.train),
    )
    return {**score("columns", features_TF), **score("code", codes_TD)}


def score_student(
    *, seed: int, config: Mapping[str, Any], scores: Sequence[FoldScore]
) -> MeasuredValues:
    """Score the active with help: on the code of the student, the encoder that a run trains.

    A code is the encoder's output, which a classifier reads. Returns the classifier's mean scores
    of a cross-validation in per cent by "code SCORE", and the bytes that the run sent by "bytes".
    """
    run_config, data, score = _prepare_run(seed, config, scores)
    result = run(run_config, None, data=data)
    model = result.recording.model
    assert model is not None
    encoder, _ = model.children()
    with torch.no_grad():
        codes_TD = encoder(data.active.features[data.train_rows])
    return {**score("code", codes_TD), "bytes": float(result.wire_bytes)}


def _prepare_run(
    seed: int, config: Mapping[str, Any], scores: Sequence[FoldScore]
) -> tuple[Config, VerticalData, Callable[[str, Tensor], MeasuredValues]]:
    """Return the configuration with this seed, its data, and a function that scores a classifier.

    The function takes a name, and values of the active's training rows (T rows, F numbers each)
    that the classifier reads. It returns mean scores of a cross-validation in per cent, by "NAME
    SCORE".
    """
    run_config = Config.model_validate({**config, "seed": seed})
    data = load_data(run_config.data, seed=seed)
    assert data.active.labels is not None
    labels_T = data.active.labels[data.train_rows]

    def score_rows(classifier_input: str, values_TF: Tensor) -> MeasuredValues:
        """Return mean scores of a cross-validation in per cent, by "SUBJECT SCORE".

        `classifier_input`: name of what the classifier reads, `values_TF`.
        """
        scores_by_name = cross_validate_scores(values_TF, labels_T, seed=seed, scores=scores)
        return {
            f"{classifier_input} {name}": 100 * float(folds.mean())
            for name, folds in scores_by_name.items()
        }

    return run_config, data, score_rows


def _make_scenario_extent(scenario: Scenario, is_full: bool) -> TableExtent:
    """Return the rows and seeds of the whole scenario if `is_full`, else of its default part."""
    extent = scenario.full_extent if is_full else scenario.quick_extent
    return TableExtent(list(_make_scenario_rows(scenario, extent)), extent.seed_count)


def _make_job(
    scenario: Scenario,
    feature_count: int,
    method: str = _ABLATION,
    aligned_count: int | None = None,
    weight: float = 1.0,
) -> Job:
    """Return the job of one method with one split of the columns.

    Args:
        scenario: the data set.
        feature_count: number of columns at the active.
        method: title of the method.
        aligned_count: number of aligned rows; None: the active learns without help.
        weight: lambda of Eq. (5).
    """
    changes: dict[str, Any] = {} if weight == 1 else {"method": {"weight": weight}}
    if method == _VFEDTRANS:  # as many singular vectors as all parties have columns (section 6.1)
        columns = scenario.make_data(scenario.full_extent.feature_counts[0], None)["columns"]
        width = sum(map(len, columns.values()))
        changes["model"] = {"network": "enriched", "representation": width}
    name = _METHOD_BY_TITLE.get(method, _METHOD_BY_TITLE[_APC_VFL])
    config = scenario.make_config(scenario.make_data(feature_count, aligned_count), name, changes)
    label = f"{method.lower()}-f{feature_count}-n{aligned_count}"
    measure = score_student
    label += "" if weight == 1 else f"-lambda{weight:g}"
    if aligned_count is None:
        label = f"alone-f{feature_count}"
        measure = score_local
    return Job.for_config(label, measure, config, scores=list(scenario.title_by_score))


def _make_scenario_rows(scenario: Scenario, extent: ScenarioExtent) -> Iterator[TableRow]:
    """Yield the rows of a scenario's table for each score.

    First comes a row for each number of features, number of aligned people and method. Then comes
    APC-VFL minus each other method, for each number of features and averaged over them.

    `scenario`: data set. `extent`: numbers of features and of aligned people to measure.
    """
    job_by_key: dict[_CaseKey, Job] = {}
    for feature_count in extent.feature_counts:
        # One job measures both the local model and the ablation.
        local_job = _make_job(scenario, feature_count)
        for method in (_LOCAL, _ABLATION):
            job_by_key[feature_count, _ANY_ALIGNED_COUNT, method] = local_job
        for aligned_count, method in product(extent.aligned_counts, _METHOD_BY_TITLE):
            job_by_key[feature_count, aligned_count, method] = _make_job(
                scenario, feature_count, method, aligned_count
            )
    for score, title in scenario.title_by_score.items():
        row_by_key = _make_measured_rows(job_by_key, extent, score, title)
        yield from row_by_key.values()
        yield from _make_difference_rows(row_by_key, extent, title)


def _make_cells(features: object, rows: object, method: str, score_title: str) -> dict[str, str]:
    """Return the cells of one row of a scenario's table by column."""
    return dict(zip(_HEADER, (str(features), str(rows), method, score_title), strict=True))


def _make_measured_rows(
    job_by_key: Mapping[_CaseKey, Job], extent: ScenarioExtent, score: str, title: str
) -> dict[_CaseKey, TableRow]:
    """Return the table's row of each job for one score.

    `job_by_key`: jobs by number of features, number of aligned people and method. `extent`: numbers
    of aligned people, each with a panel of the picture. `score`, `title`: name and title of the
    score.
    """
    panel_by_aligned_count: dict[int | str, str] = {
        rows: f"{rows:,} aligned rows, {title}" for rows in extent.aligned_counts
    }
    row_by_key: dict[_CaseKey, TableRow] = {}
    for (features, rows, method), job in job_by_key.items():
        # A local model does not depend on the aligned people: it is drawn in every panel.
        row_panels = (
            tuple(panel_by_aligned_count.values())
            if rows == _ANY_ALIGNED_COUNT
            else (panel_by_aligned_count[rows],)
        )
        # The job's measured values are those of a classifier on "columns" or on the "code".
        classifier_input = "columns" if method == _LOCAL else "code"
        row_by_key[features, rows, method] = TableRow(
            cells=_make_cells(features, rows, method, title),
            job=job,
            value_name=f"{classifier_input} {score}",
            panel_titles=row_panels,
            curve_name=method,
            axis_position=float(features),
        )
    return row_by_key


def _make_difference_rows(
    row_by_key: Mapping[_CaseKey, TableRow], extent: ScenarioExtent, title: str
) -> Iterator[TableRow]:
    """Yield APC-VFL minus each other method, for each number of features and averaged over them.

    `row_by_key`: rows by number of features, number of aligned people and method. `extent`:
    numbers of features and of aligned people. `title`: title of the score.
    """
    weight = 1 / len(extent.feature_counts)
    for other_method, aligned_count in product(
        (_LOCAL, _ABLATION, _VFEDTRANS), extent.aligned_counts
    ):
        # Local models and the ablation do not depend on the number of aligned rows.
        other_aligned_count = (
            aligned_count if other_method in _METHOD_BY_TITLE else _ANY_ALIGNED_COUNT
        )
        difference = f"{_APC_VFL} minus {other_method}"
        apc_vfl_terms: list[tuple[float, TableRow]] = []
        other_terms: list[tuple[float, TableRow]] = []
        for feature_count in extent.feature_counts:
            apc_vfl_row = row_by_key[feature_count, aligned_count, _APC_VFL]
            other_row = row_by_key[feature_count, other_aligned_count, other_method]
            yield TableRow(
                cells=_make_cells(feature_count, aligned_count, difference, title),
                weighted_rows=((1.0, apc_vfl_row), (-1.0, other_row)),
            )
            apc_vfl_terms.append((weight, apc_vfl_row))
            other_terms.append((-weight, other_row))
        mean_terms = [*apc_vfl_terms, *other_terms]
        yield TableRow(
            cells=_make_cells("mean", aligned_count, difference, title), weighted_rows=mean_terms
        )


def _make_lambda_table(is_full: bool) -> TableExtent:
    """Return the table's rows by lambda, the weight of the distance to the joint code.

    The data are breast cancer, of whose people the passive knows half. Lambda 0 is the ablation,
    which learns from the active's columns alone. `is_full` has no effect: the whole table is always
    measured.
    """
    scenario = SCENARIOS[_QUICK_DATASET]
    extent = scenario.full_extent
    table_rows = list[TableRow]()
    score, title = next(iter(scenario.title_by_score.items()))
    aligned_count = extent.aligned_counts[0]
    gain_terms_by_lambda: dict[str, list[tuple[float, TableRow]]] = {}
    mean_weight = 1 / len(extent.feature_counts)
    for feature_count in extent.feature_counts:
        jobs = [_make_job(scenario, feature_count)]  # lambda 0
        jobs += [
            _make_job(scenario, feature_count, _APC_VFL, aligned_count, weight)
            for weight in _LAMBDAS[1:]
        ]
        lambda_0_row, *lambda_rows = (
            TableRow(
                cells={"features": str(feature_count), "lambda": f"{weight:g}", "score": title},
                job=job,
                value_name=f"code {score}",
                panel_titles=(f"{aligned_count} aligned rows, {title}",),
                curve_name=f"{feature_count} features",
                axis_position=weight,
            )
            for weight, job in zip(_LAMBDAS, jobs, strict=True)
        )
        table_rows += [lambda_0_row, *lambda_rows]
        for table_row in lambda_rows:
            terms = gain_terms_by_lambda.setdefault(table_row.cells["lambda"], [])
            terms += [(mean_weight, table_row), (-mean_weight, lambda_0_row)]
    for weight_text, terms in gain_terms_by_lambda.items():
        cells = {"features": "mean", "lambda": weight_text, "score": f"{title}, minus 0"}
        table_rows.append(TableRow(cells=cells, weighted_rows=terms))
    return TableExtent(table_rows, extent.seed_count)


# APC-VFL's Table 2: accuracy, rounds and bytes of joint prediction, against SplitNN.
#
# All rows are aligned here, and both methods predict with every party: SplitNN trains end to end,
# with Adam and early stopping; APC-VFL classifies the joint code (its Figure 4), after one
# exchange.


def measure_exchange(*, seed: int, config: Mapping[str, Any], way: str) -> MeasuredValues:
    """Run a method once; return its accuracy and the communication of its training.

    `way`: mode of inference whose accuracy is returned, a key of the run's `accuracy`.

    Returns:
        "accuracy" in per cent, "rounds" (messages of representations or gradients), "megabytes"
        sent until the last step of training, and "counted": megabytes by the paper's formula.
    """
    run_config = Config.model_validate({**config, "seed": seed})
    data = load_data(run_config.data, seed=seed)
    reports = list[Progress]()
    result = run(run_config, None, data=data, on_progress=reports.append)
    # Reports of an evaluation have an accuracy, those of training have none.
    last_step = [report for report in reports if report.accuracy is None][-1]
    messages_by_kind = dict.fromkeys((Kind.REPRESENTATIONS, Kind.GRADIENTS), 0)
    for flow in result.recording.transcript.flows:
        if flow.kind in messages_by_kind:
            messages_by_kind[flow.kind] += flow.messages
    step_count = messages_by_kind[Kind.GRADIENTS]
    row_count = len(data.train_rows)
    # Messages in which passives send representations of rows that are predicted.
    inference_messages = math.ceil(len(data.test_rows) / run_config.train.batch_size)
    # Eqs. (6) to (9): every epoch sends all rows, every step the gradient of the last layer.
    exchange_count = last_step.epoch if step_count else 1
    layer_weight_count = _LAST_LAYER_INPUTS * _REPRESENTATION_SIZE + _REPRESENTATION_SIZE
    sent_numbers = (
        exchange_count * row_count * _REPRESENTATION_SIZE + step_count * layer_weight_count
    )
    return {
        "accuracy": 100 * result.accuracy[way],
        "rounds": float(sum(messages_by_kind.values()) - inference_messages),
        "megabytes": last_step.wire_bytes / 1e6,
        "counted": _BYTES_PER_NUMBER * sent_numbers / 1e6,
    }


def _make_table2_config(scenario: Scenario, row_count: int, method: str) -> Config:
    """Return a run of APC-VFL or SplitNN in which this number of rows, all of them, are aligned.

    Both methods have the same networks. APC-VFL exchanges all rows in one message; SplitNN trains
    with the batches, epochs and patience of APC-VFL's encoders.

    `method`: name of the method in settings.
    """
    data = find_preset(f"apc-vfl/{scenario.dataset}/all-aligned/{row_count}")
    base = scenario.make_config(data, _METHOD_BY_TABLE2_TITLE["APC-VFL"], {})
    settings = base.model_dump(mode="json", exclude_defaults=True)
    if method == _METHOD_BY_TABLE2_TITLE["APC-VFL"]:
        # One message holds every row.
        settings["train"] |= {"epochs": 1, "batch_size": row_count}
        return Config.model_validate(settings)
    encoders = ApcVflSettings.from_run_settings(base)
    return Config.model_validate(
        {
            **settings,
            "method": method,
            "model": {**encoders.own.model_dump(exclude_defaults=True), "head": [256, 256]},
            "passives": {"default": {"model": encoders.passive.model_dump(exclude_defaults=True)}},
            "train": {
                **settings["train"],
                "optimizer": "adam",
                "weight_decay": 0.0,
                "patience": 10,
                "epochs": encoders.epochs,
                "batch_size": scenario.batch_size,
            },
        }
    )


def _make_table2_extent(is_full: bool) -> TableExtent:
    """Return the rows of Table 2 on one data set, or on all if `is_full`, and the seeds."""
    scenarios = [
        scenario for name, scenario in SCENARIOS.items() if is_full or name == _QUICK_DATASET
    ]
    return TableExtent(
        [table_row for scenario in scenarios for table_row in _make_table2_rows(scenario)],
        _TABLE2_SEEDS,
    )


def _make_table2_rows(scenario: Scenario) -> Iterator[TableRow]:
    """Yield one data set's rows of Table 2, and the difference in accuracy of the two methods."""
    title = scenario.dataset.replace("_", " ")
    # The first four are the numbers of the paper's Table 2; a fifth, 100, is not in it.
    aligned_counts = scenario.full_extent.aligned_counts[:4]
    jobs = {}
    for aligned_count, (method_title, method) in product(
        aligned_counts, _METHOD_BY_TABLE2_TITLE.items()
    ):
        inference = method if method_title == "SplitNN" else f"{method}_together"
        jobs[aligned_count, method_title] = Job.for_config(
            f"{scenario.dataset}-{method}-n{aligned_count}",
            measure_exchange,
            _make_table2_config(scenario, aligned_count, method),
            way=inference,
        )

    def make_cells(rows: int, method: str, measure: str) -> dict[str, str]:
        """Return the cells of one row of the table by column."""
        texts = (title, str(rows), method, _TITLE_BY_MEASURE[measure])
        return dict(zip(_TABLE2_HEADER, texts, strict=True))

    row_by_key = {}
    for measure, aligned_count, method_title in product(
        _TITLE_BY_MEASURE, aligned_counts, _METHOD_BY_TABLE2_TITLE
    ):
        row_by_key[measure, aligned_count, method_title] = TableRow(
            cells=make_cells(aligned_count, method_title, measure),
            job=jobs[aligned_count, method_title],
            value_name=measure,
            panel_titles=(f"{title}: {_TITLE_BY_MEASURE[measure]}",),
            curve_name=method_title,
            axis_position=float(aligned_count),
        )
    yield from row_by_key.values()
    for aligned_count in aligned_counts:
        apc_vfl_row = row_by_key["accuracy", aligned_count, "APC-VFL"]
        split_nn_row = row_by_key["accuracy", aligned_count, "SplitNN"]
        yield TableRow(
            cells=make_cells(aligned_count, "APC-VFL minus SplitNN", "accuracy"),
            weighted_rows=((1.0, apc_vfl_row), (-1.0, split_nn_row)),
        )


_CREDIT_CARD_OMISSION = "3 and 4 features, most numbers of aligned rows, and three of five seeds"
TABLES: tuple[PaperTable, ...] = (
    *(
        PaperTable(
            name=f"apc-vfl-{dataset}".replace("_", "-"),
            source=f"APC-VFL, Figures {figures}",
            title=f"APC-VFL on {title}",
            unit="per cent",
            hours=hours,
            omission=leaves_out,
            reading_guide=f"{SCENARIOS[dataset].row_count:,} rows at the active. {_READING}",
            make_extent=partial(_make_scenario_extent, SCENARIOS[dataset]),
            axis_title="features of the active",
        )
        for dataset, title, figures, hours, leaves_out in (
            ("breast_cancer", "breast cancer", "5 and 10", 0.3, ""),
            (
                "credit_card",
                "defaults of credit card clients",
                "5, 11 and 16",
                5.0,
                _CREDIT_CARD_OMISSION,
            ),
        )
    ),
    PaperTable(
        name="apc-vfl-lambda",
        source="APC-VFL, Eq. (5)",
        unit="per cent",
        hours=0.15,
        title="APC-VFL on breast cancer by lambda",
        omission="",
        make_extent=_make_lambda_table,
        reading_guide=f"250 aligned rows of 500. {_READING}",
        axis_title="lambda",
    ),
    PaperTable(
        name="apc-vfl-splitnn",
        source="APC-VFL, Table 2",
        unit="",
        hours=6.0,
        make_extent=_make_table2_extent,
        title="APC-VFL and SplitNN where all rows are aligned",
        axis_title="aligned rows",
        reading_guide="50 of the aligned rows test on breast cancer, 500 elsewhere; five features "
        "at the "
        "active. A round is a message of representations or gradients. All are scored by accuracy; "
        "the paper takes F1 on credit cards. Its values are not in the text that we have. SplitNN: "
        "Adam, at most 200 epochs, patience 10, weights of the last epoch. MB sent: alignment and "
        "agreement included; as the paper counts them: by Appendix E, for our epochs and steps.",
        omission="credit cards",
        seed_correlation=50 / 569,  # at most: of 569 people 50 test
    ),
)
