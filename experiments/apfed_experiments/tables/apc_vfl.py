"""APC-VFL's figures: what an encoder that learnt from the passive's code is worth to the active.

Figures 5 and 7 to 16 of the paper: logistic regression on the active's columns (Local), on the code
of its autoencoder alone (Ablation), and on a code that was drawn to the joint one (APC-VFL), each
cross-validated over all of the active's rows, for every number of its features and of aligned rows.
The paper's values are not in the text that we have, so that none stands beside ours. Lambda, the
distance of codes and the share of held-out rows are not in it either: see `READING`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from apfed_experiments.tables.apc_vfl import HELPED, SCENARIOS, USUAL, Part, Scenario
from apfed_experiments.tables.table import Figures, FunctionJob, Line, PaperTable, Size, line_of
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.learning.autoencoder import (
    DistillationSettings,
    Score,
    cross_validated,
    own_codes,
)
from secure_apfed.learning.descent import Compute
from secure_apfed.runs.run import run

__all__ = ["READING", "TABLES", "alone", "helped", "size_of"]

READING = (
    "Mean over the seeds of ten-fold cross-validations, which are drawn with the seed as rows, "
    "aligned rows and weights are; minus: paired by seed. Intervals hold what these change, and "
    "not "
    "that other people would be other people: every seed tests nearly all rows of the table. Adam, "
    "at most 200 epochs, patience 10, "
    "encoders of Table 3. Not legible in the paper, and chosen here: lambda 1, the mean squared "
    "distance of codes, a tenth of the rows held out. The classifier (C = 1) reads columns that "
    "are standardised and codes as they are."
)


_HEADER = ("features", "aligned rows", "method", "score")
_ANY = "any"
_LOCAL, _ABLATION = "Local", "Ablation"


def alone(*, seed: int, config: Mapping[str, Any], scores: Sequence[Score]) -> Figures:
    """Mean scores in per cent on the active's columns and on its own code, by "columns SCORE"."""
    of_run, data, score = _opened(seed, config, scores)
    features_TF = data.active.features[data.train_rows]
    codes_TD, _ = own_codes(
        features_TF, model=of_run.model, settings=DistillationSettings.among(of_run.method),
        owner=data.active.name,
        seed=seed, compute=Compute.of(of_run.train),
    )  # fmt: skip
    return {**score("columns", features_TF), **score("code", codes_TD)}


def helped(*, seed: int, config: Mapping[str, Any], scores: Sequence[Score]) -> Figures:
    """The same on the code of the student of a run, and the bytes that it sent."""
    of_run, data, score = _opened(seed, config, scores)
    result = run(of_run, None, data=data)
    model = result.recording.model
    assert model is not None
    encoder, _ = model.children()
    with torch.no_grad():
        codes_TD = encoder(data.active.features[data.train_rows])
    return {**score("code", codes_TD), "bytes": float(result.wire_bytes)}


def _opened(
    seed: int, config: Mapping[str, Any], scores: Sequence[Score]
) -> tuple[Config, VerticalData, Callable[[str, Tensor], Figures]]:
    """The run of this seed, its data, and what scores values of the active's training rows."""
    of_run = Config.model_validate({**config, "seed": seed})
    data = load_data(of_run.data, seed=seed)
    assert data.active.labels is not None
    labels_T = data.active.labels[data.train_rows]

    def score(what: str, values_TF: Tensor) -> Figures:
        found = cross_validated(values_TF, labels_T, seed=seed, scores=scores)
        return {f"{what} {name}": 100 * float(folds.mean()) for name, folds in found.items()}

    return of_run, data, score


def size_of(scenario: Scenario, full: bool) -> Size:
    """Lines and jobs of a scenario."""
    part = scenario.full if full else scenario.quick
    lines = [line for score in scenario.scores.values() for line in _lines(score, part)]
    jobs = [
        job
        for seed in range(part.seeds)
        for features in part.features
        for job in _jobs(scenario, part, features, seed)
    ]
    return Size(lines=lines, jobs=jobs)


def _lines(score: str, part: Part) -> Iterator[Line]:
    """Of one score: every cell, and what help gains in each and on average over the features."""
    panels = {rows: f"{rows:,} aligned rows, {score}" for rows in part.aligned}
    (usual, *others), weight = part.helped, 1 / len(part.features)

    def name(features: int | str, rows: int | str, method: str) -> str:
        return line_of(str(features), str(rows), method, score)

    def line(features: int | str, rows: int | str, method: str, **more: Any) -> Line:
        cells = (str(features), str(rows), method, score)
        return Line(cells=dict(zip(_HEADER, cells, strict=True)), **more)

    for features in part.features:
        at = float(features)
        for method in (_LOCAL, _ABLATION):
            every = tuple(panels.values())
            yield line(features, _ANY, method, panels=every, series=method, at=at)
        for rows, method in product(part.aligned, part.helped):
            yield line(features, rows, method, panels=(panels[rows],), series=method, at=at)
    for base, rows in product((_LOCAL, _ABLATION, *others), part.aligned):
        known = rows if base in others else _ANY
        for features in part.features:
            gain = {name(features, rows, usual): 1.0, name(features, known, base): -1.0}
            yield line(features, rows, f"{usual} minus {base}", combines=gain)
        gains = {name(features, rows, usual): weight for features in part.features}
        gains |= {name(features, known, base): -weight for features in part.features}
        yield line("mean", rows, f"{usual} minus {base}", combines=gains)


def _jobs(scenario: Scenario, part: Part, features: int, seed: int) -> Iterator[FunctionJob]:
    """Of one seed and number of features."""
    scores = scenario.scores

    def settings(label: str, aligned: int | None) -> dict[str, Any]:
        method, changes = HELPED[label]
        config = scenario.config(scenario.data(features, aligned), method, changes(scenario))
        told = config.model_dump(mode="json", exclude_defaults=True)
        return {"config": told, "scores": list(scores)}

    def lines(rows: int | str, method: str, what: str) -> dict[str, str]:
        return {
            line_of(str(features), str(rows), method, label): f"{what} {score}"
            for score, label in scores.items()
        }

    yield FunctionJob(
        label=f"alone-f{features}",
        seed=seed,
        measure=alone,
        settings=settings(USUAL, None),
        lines=lines(_ANY, _LOCAL, "columns") | lines(_ANY, _ABLATION, "code"),
    )
    for rows, method in product(part.aligned, part.helped):
        yield FunctionJob(
            label=f"{method.lower().replace(', ', '-').replace(' ', '-')}-f{features}-n{rows}",
            seed=seed,
            measure=helped,
            settings=settings(method, rows),
            lines=lines(rows, method, "code"),
            cost=2.0,
        )


TABLES: tuple[PaperTable, ...] = (
    PaperTable(
        name="apc-vfl-breast-cancer",
        source="APC-VFL, Figures 5 and 10",
        title="APC-VFL on breast cancer",
        unit="per cent",
        reading=f"500 rows at the active. {READING}",
        leaves_out="other values of lambda, and the absolute distance of codes",
        hours=0.8,
        size=partial(size_of, SCENARIOS["breast_cancer"]),
        axis="features of the active",
    ),
    *(
        PaperTable(
            name=f"apc-vfl-{dataset}".replace("_", "-"),
            source=f"APC-VFL, Figures {figures}",
            title=f"APC-VFL on {title}",
            unit="per cent",
            reading=f"20,000 rows at the active. {READING}",
            leaves_out="3 and 4 features, most numbers of aligned rows, and three of five seeds",
            hours=5.0,
            size=partial(size_of, SCENARIOS[dataset]),
            axis="features of the active",
        )
        for dataset, title, figures in (
            ("credit_card", "defaults of credit card clients", "5, 11 and 16"),
            ("mimic_iii", "lengths of stay in MIMIC-III", "5, 7 to 9 and 12 to 15"),
        )
    ),
)
