"""APC-VFL's figures: what an encoder that learnt from the passive's code is worth to the active.

Figures 5 and 7 to 16 of the paper: logistic regression on the active's columns (Local), on the code
of its autoencoder alone (Ablation), and on a code that was drawn to the joint one (APC-VFL), each
cross-validated over all of the active's rows, for every number of its features and of aligned rows.
The paper's values are not in the text that we have, so that none stands beside ours. Lambda, the
distance of codes and the share of held-out rows are not in it either: see `_READING`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from apfed_experiments.presets import find_preset
from apfed_experiments.tables.table import Figures, Job, Line, PaperTable, Size
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Kind
from secure_apfed.learning.autoencoder import (
    DistillationSettings,
    Score,
    cross_validate_scores,
    own_codes,
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
_ANY = "any"
_LOCAL = "Local"
_ABLATION = "Ablation"
_TABLE2_SEEDS = 5
_QUICK = "breast_cancer"
_LAMBDAS = (0.0, 1.0, 10.0, 100.0)
# Of the passive's representation, and of the layer that ends in it (Table 3).
_WIDTH = 256
_BEFORE = 128
_BYTES = 4
_METHODS = {"SplitNN": "split_nn", "APC-VFL": "apc_vfl"}
_MEASURES = {
    "accuracy": "accuracy, per cent",
    "rounds": "rounds",
    "megabytes": "MB sent until training ends",
    "counted": "MB as the paper counts them",
}


# What APC-VFL's experiments measure of each data set, and which methods they compare.
#
# Source: section 5 and Appendices A and B of the paper. Who holds which columns and people says
# `apfed_experiments.presets.find_preset`; encoders, epochs, patience and Adam are the defaults of
# `secure_apfed.learning.autoencoder.DistillationSettings`, which are the paper's.


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a scenario to measure: numbers of the active's columns and of aligned rows, and how
    many seeds.
    """

    features: tuple[int, ...]
    aligned: tuple[int, ...]
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A data set, and what is measured on it.

    Attributes:
        rows: of the active, all with a label; test_fraction: of all people, which leaves as many.
        batch_size: of every training; scores: of a fold, each with what the paper calls it.
        quick, full: the default part, and all.
    """

    dataset: str
    rows: int
    test_fraction: float
    batch_size: int
    scores: Mapping[Score, str]
    quick: Part
    full: Part

    def make_data(self, features: int, aligned: int | None) -> dict[str, Any]:
        """Return the data: `features` columns at the active, `aligned` people at the passive.

        Every row of the active is cross-validated, so that people beside them test what all parties
        predict, which the paper does not measure here.
        """
        cut = find_preset(f"apc-vfl/{self.dataset}/{features}/{aligned or self.full.aligned[0]}")
        data_settings = {"dataset": cut["dataset"], "columns": cut["columns"], "aligned": aligned}
        active_settings = {
            "limit": self.rows,
            "test_fraction": self.test_fraction,
            "split": "at_random",
        }
        return data_settings | active_settings

    def make_config(
        self, data: Mapping[str, Any], method: str, changes: Mapping[str, Mapping[str, Any]]
    ) -> Config:
        """Return a run of a method on these data, with changes to the sections below."""
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
        merged = {key: {**settings[key], **changed} for key, changed in changes.items()}
        return Config.model_validate(settings | merged)


# Those that are helped: a method is one line here if its encoder turns the active's columns into
# what a classifier reads. The first is compared with all others.
_USUAL = "APC-VFL"
_VECTORS = "VFedTrans"
_HELPED = {_USUAL: "apc_vfl", _VECTORS: "vfedtrans"}
_MANY = (10_000, 7500, 5000, 2500)
_SMALL = Part(features=(5, 2), aligned=(10_000, 2500), seeds=2)
_LARGE = Part(features=(5, 4, 3, 2), aligned=(*_MANY, 100), seeds=5)
_BREAST_CANCER = replace(_LARGE, aligned=(250, 200, 150, 100))
SCENARIOS: Mapping[str, Scenario] = {
    "breast_cancer": Scenario(
        dataset="breast_cancer",
        rows=500,
        test_fraction=69 / 569,
        batch_size=8,
        scores={"accuracy": "accuracy"},
        quick=_BREAST_CANCER,
        full=_BREAST_CANCER,
    ),
    "credit_card": Scenario(
        dataset="credit_card",
        rows=20_000,
        test_fraction=0.25,
        batch_size=128,
        scores={"f1": "F1"},
        quick=_SMALL,
        full=_LARGE,
    ),
}


def score_alone(*, seed: int, config: Mapping[str, Any], scores: Sequence[Score]) -> Figures:
    """Return mean scores in per cent on the active's columns and its code, by "columns SCORE"."""
    run_config, data, score = _prepare_run(seed, config, scores)
    features_TF = data.active.features[data.train_rows]
    codes_TD, _ = own_codes(
        features_TF,
        model=run_config.model,
        settings=DistillationSettings.from_settings(run_config.method),
        owner=data.active.name,
        seed=seed,
        compute=Compute.from_settings(run_config.train),
    )
    return {**score("columns", features_TF), **score("code", codes_TD)}


def score_student(*, seed: int, config: Mapping[str, Any], scores: Sequence[Score]) -> Figures:
    """Return the same on the code of a run's student, and the bytes that it sent.

    `scores`: of each fold.
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
    seed: int, config: Mapping[str, Any], scores: Sequence[Score]
) -> tuple[Config, VerticalData, Callable[[str, Tensor], Figures]]:
    """Return the run of this seed, its data, and what scores the active's training rows."""
    run_config = Config.model_validate({**config, "seed": seed})
    data = load_data(run_config.data, seed=seed)
    assert data.active.labels is not None
    labels_T = data.active.labels[data.train_rows]

    def score_rows(subject: str, values_TF: Tensor) -> Figures:
        scores_by_name = cross_validate_scores(values_TF, labels_T, seed=seed, scores=scores)
        return {
            f"{subject} {name}": 100 * float(folds.mean()) for name, folds in scores_by_name.items()
        }

    return run_config, data, score_rows


def _size_of(scenario: Scenario, full: bool) -> Size:
    """Return the lines and seeds of a scenario's default part, or of all of it."""
    part = scenario.full if full else scenario.quick
    return Size(list(_make_lines(scenario, part)), part.seeds)


def _make_job(
    scenario: Scenario,
    features: int,
    method: str = _ABLATION,
    rows: int | None = None,
    weight: float = 1.0,
) -> Job:
    """Return a job of the active alone, or with `rows` aligned; `weight`: lambda of Eq. (5).

    `features`: columns of the active.
    """
    changes: dict[str, Any] = {} if weight == 1 else {"method": {"weight": weight}}
    if method == _VECTORS:  # as many singular vectors as all parties have columns (section 6.1)
        columns = scenario.make_data(scenario.full.features[0], None)["columns"]
        width = sum(map(len, columns.values()))
        changes["model"] = {"network": "enriched", "representation": width}
    name = _HELPED.get(method, _HELPED[_USUAL])
    config = scenario.make_config(scenario.make_data(features, rows), name, changes)
    label = f"{method.lower()}-f{features}-n{rows}"
    measure = score_student
    label += "" if weight == 1 else f"-lambda{weight:g}"
    if rows is None:
        label = f"alone-f{features}"
        measure = score_alone
    return Job.for_config(label, measure, config, scores=list(scenario.scores))


def _make_lines(scenario: Scenario, part: Part) -> Iterator[Line]:
    """Yield for each score every cell, and the gain of help in each and over the features."""
    local_jobs = {features: _make_job(scenario, features) for features in part.features}
    joint = {
        cell: _make_job(scenario, cell[0], cell[2], cell[1])
        for cell in product(part.features, part.aligned, _HELPED)
    }
    for score, title in scenario.scores.items():
        panels = {rows: f"{rows:,} aligned rows, {title}" for rows in part.aligned}

        def make_cells(features: object, rows: object, method: str) -> dict[str, str]:
            texts = (str(features), str(rows), method, title)  # noqa: B023 - called at once
            return dict(zip(_HEADER, texts, strict=True))

        lines: dict[tuple[int, object, str], Line] = {}
        for features in part.features:
            for method, columns in ((_LOCAL, "columns"), (_ABLATION, "code")):
                lines[features, _ANY, method] = Line(
                    cells=make_cells(features, _ANY, method),
                    job=local_jobs[features],
                    figure=f"{columns} {score}",
                    panels=tuple(panels.values()),
                    series=method,
                    at=float(features),
                )
            for rows, method in product(part.aligned, _HELPED):
                lines[features, rows, method] = Line(
                    cells=make_cells(features, rows, method),
                    job=joint[features, rows, method],
                    figure=f"code {score}",
                    panels=(panels[rows],),
                    series=method,
                    at=float(features),
                )
        yield from lines.values()
        for base, rows in product((_LOCAL, _ABLATION, _VECTORS), part.aligned):
            known = rows if base in _HELPED else _ANY
            pairs = {
                features: (lines[features, rows, _USUAL], lines[features, known, base])
                for features in part.features
            }
            minus = f"{_USUAL} minus {base}"
            weight = 1 / len(pairs)
            for features, (usual, other) in pairs.items():
                gain = ((1.0, usual), (-1.0, other))
                yield Line(cells=make_cells(features, rows, minus), combines=gain)
            mean = [(weight, usual) for usual, _ in pairs.values()]
            mean += [(-weight, other) for _, other in pairs.values()]
            yield Line(cells=make_cells("mean", rows, minus), combines=mean)


def _make_lambda_table(full: bool) -> Size:
    """Return the lines by lambda where the passive knows half of the rows; lambda 0 is Ablation.

    `full`: whether all of the paper's table is measured, or a default part.
    """
    scenario = SCENARIOS[_QUICK]
    part = SCENARIOS[_QUICK].full
    lines = list[Line]()
    score, title = next(iter(scenario.scores.items()))
    rows = part.aligned[0]
    gains: dict[str, list[tuple[float, Line]]] = {}
    share = 1 / len(part.features)
    for features in part.features:
        jobs = [_make_job(scenario, features)]
        jobs += [_make_job(scenario, features, _USUAL, rows, weight) for weight in _LAMBDAS[1:]]
        base_line, *weighted_lines = (
            Line(
                cells={"features": str(features), "lambda": f"{weight:g}", "score": title},
                job=job,
                figure=f"code {score}",
                panels=(f"{rows} aligned rows, {title}",),
                series=f"{features} features",
                at=weight,
            )
            for weight, job in zip(_LAMBDAS, jobs, strict=True)
        )
        lines += [base_line, *weighted_lines]
        for line in weighted_lines:
            gains.setdefault(line.cells["lambda"], []).extend(((share, line), (-share, base_line)))
    cells_by_weight = {
        weight_text: {"features": "mean", "lambda": weight_text, "score": f"{title}, minus 0"}
        for weight_text in gains
    }
    lines += [
        Line(cells=cells_by_weight[weight_text], combines=parts)
        for weight_text, parts in gains.items()
    ]
    return Size(lines, part.seeds)


# APC-VFL's Table 2: what all parties predict together, against SplitNN's rounds and bytes.
#
# All rows are aligned here, and both methods predict with every party: SplitNN trains end to end,
# with Adam and early stopping; APC-VFL classifies the joint code (its Figure 4), after one
# exchange.


def measure_exchange(*, seed: int, config: Mapping[str, Any], way: str) -> Figures:
    """Return what one run reached, and the bytes until its last step, without inference.

    `way`: what is exchanged.
    """
    run_config = Config.model_validate({**config, "seed": seed})
    data = load_data(run_config.data, seed=seed)
    last = list[Progress]()

    def note_progress(progress: Progress) -> None:
        if progress.accuracy is None:
            last[:] = [progress]

    result = run(run_config, None, data=data, on_progress=note_progress)
    sent = dict.fromkeys((Kind.REPRESENTATIONS, Kind.GRADIENTS), 0)
    for flow in result.recording.transcript.flows:
        if flow.kind in sent:
            sent[flow.kind] += flow.messages
    steps = sent[Kind.GRADIENTS]
    rows = len(data.train_rows)
    # Messages in which passives answer for rows that are predicted.
    batches = math.ceil(len(data.test_rows) / run_config.train.batch_size)
    # Eqs. (6) to (9): every epoch sends all rows, every step the gradient of the last layer.
    exchanges = last[0].epoch if steps else 1
    layer = _BEFORE * _WIDTH + _WIDTH
    return {
        "accuracy": 100 * result.accuracy[way],
        "rounds": float(sum(sent.values()) - batches),
        "megabytes": last[0].wire_bytes / 1e6,
        "counted": _BYTES * (exchanges * rows * _WIDTH + steps * layer) / 1e6,
    }


def _make_table2_config(scenario: Scenario, rows: int, method: str) -> Config:
    """Return a run on this number of aligned rows; networks and batches are the same for both
    methods.
    """
    data = find_preset(f"apc-vfl/{scenario.dataset}/all-aligned/{rows}")
    base = scenario.make_config(data, _METHODS["APC-VFL"], {})
    settings = base.model_dump(mode="json", exclude_defaults=True)
    if method == _METHODS["APC-VFL"]:
        # One message holds every row.
        settings["train"] |= {"epochs": 1, "batch_size": rows}
        return Config.model_validate(settings)
    codes = ApcVflSettings.from_run_settings(base)
    return Config.model_validate(
        {
            **settings,
            "method": method,
            "model": {**codes.own.model_dump(exclude_defaults=True), "head": [256, 256]},
            "passives": {"default": {"model": codes.passive.model_dump(exclude_defaults=True)}},
            "train": {
                **settings["train"],
                "optimizer": "adam",
                "weight_decay": 0.0,
                "patience": 10,
                "epochs": codes.epochs,
                "batch_size": scenario.batch_size,
            },
        }
    )


def _make_table2_size(full: bool) -> Size:
    """Return the lines and seeds of Table 2: one data set by default, or all."""
    scenarios = [scenario for name, scenario in SCENARIOS.items() if full or name == _QUICK]
    return Size(
        [line for scenario in scenarios for line in _make_table2_lines(scenario)], _TABLE2_SEEDS
    )


def _make_table2_lines(scenario: Scenario) -> Iterator[Line]:
    """Yield the lines of Table 2 of one data set, and the difference in accuracy of both
    methods.
    """
    title = scenario.dataset.replace("_", " ")
    aligned = scenario.full.aligned[:4]
    jobs = {}
    for rows, (label, method) in product(aligned, _METHODS.items()):
        way = method if label == "SplitNN" else f"{method}_together"
        jobs[rows, label] = Job.for_config(
            f"{scenario.dataset}-{method}-n{rows}",
            measure_exchange,
            _make_table2_config(scenario, rows, method),
            way=way,
        )

    def make_cells(rows: int, method: str, measure: str) -> dict[str, str]:
        """Return the cells of one line."""
        texts = (title, str(rows), method, _MEASURES[measure])
        return dict(zip(_TABLE2_HEADER, texts, strict=True))

    lines = {}
    for measure, rows, label in product(_MEASURES, aligned, _METHODS):
        lines[measure, rows, label] = Line(
            cells=make_cells(rows, label, measure),
            job=jobs[rows, label],
            figure=measure,
            panels=(f"{title}: {_MEASURES[measure]}",),
            series=label,
            at=float(rows),
        )
    yield from lines.values()
    for rows in aligned:
        usual, other = (lines["accuracy", rows, label] for label in ("APC-VFL", "SplitNN"))
        yield Line(
            cells=make_cells(rows, "APC-VFL minus SplitNN", "accuracy"),
            combines=((1.0, usual), (-1.0, other)),
        )


_SMALLER = "3 and 4 features, most numbers of aligned rows, and three of five seeds"
TABLES: tuple[PaperTable, ...] = (
    *(
        PaperTable(
            name=f"apc-vfl-{dataset}".replace("_", "-"),
            source=f"APC-VFL, Figures {figures}",
            title=f"APC-VFL on {title}",
            unit="per cent",
            hours=hours,
            leaves_out=leaves_out,
            reading=f"{SCENARIOS[dataset].rows:,} rows at the active. {_READING}",
            size=partial(_size_of, SCENARIOS[dataset]),
            axis="features of the active",
        )
        for dataset, title, figures, hours, leaves_out in (
            ("breast_cancer", "breast cancer", "5 and 10", 0.3, ""),
            ("credit_card", "defaults of credit card clients", "5, 11 and 16", 5.0, _SMALLER),
        )
    ),
    PaperTable(
        name="apc-vfl-lambda",
        source="APC-VFL, Eq. (5)",
        unit="per cent",
        hours=0.15,
        title="APC-VFL on breast cancer by lambda",
        leaves_out="",
        size=_make_lambda_table,
        reading=f"250 aligned rows of 500. {_READING}",
        axis="lambda",
    ),
    PaperTable(
        name="apc-vfl-splitnn",
        source="APC-VFL, Table 2",
        unit="",
        hours=6.0,
        size=_make_table2_size,
        title="APC-VFL and SplitNN where all rows are aligned",
        axis="aligned rows",
        reading="50 of the aligned rows test on breast cancer, 500 elsewhere; five features at the "
        "active. A round is a message of representations or gradients. All are scored by accuracy; "
        "the paper takes F1 on credit cards. Its values are not in the text that we have. SplitNN: "
        "Adam, at most 200 epochs, patience 10, weights of the last epoch. MB sent: alignment and "
        "agreement included; as the paper counts them: by Appendix E, for our epochs and steps.",
        leaves_out="credit cards",
        shared=50 / 569,  # at most: of 569 people 50 test
    ),
)
