"""APC-VFL's figures: what an encoder that learnt from the passive's code is worth to the active.

Figures 5 and 7 to 16 of the paper: logistic regression on the active's columns (Local), on the code
of its autoencoder alone (Ablation), and on a code that was drawn to the joint one (APC-VFL), each
cross-validated over all of the active's rows, for every number of its features and of aligned rows.
The paper's values are not in the text that we have, so that none stands beside ours. Lambda, the
distance of codes and the share of held-out rows are not in it either: see `READING`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apfed_experiments.presets import preset
from apfed_experiments.tables.table import (
    Figures,
    FunctionJob,
    Line,
    PaperTable,
    Printed,
    Size,
    line_of,
)
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Kind
from secure_apfed.learning.autoencoder import (
    DistillationSettings,
    Score,
    cross_validated,
    own_codes,
)
from secure_apfed.learning.descent import Compute
from secure_apfed.methods.distilled import ApcVflSettings
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.run import run

__all__ = [
    "HELPED", "READING", "SCENARIOS", "TABLES", "USUAL", "Changes", "Part", "Scenario", "alone",
    "exchanged", "helped", "size_of", "table2_size",
]  # fmt: skip

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
_TABLE2_HEADER = ("data", "aligned rows", "method", "measure")
_ANY = "any"
_LOCAL, _ABLATION = "Local", "Ablation"
_TABLE2_SEEDS, _QUICK = 5, "breast_cancer"
# Of the passive's representation, and of the layer that ends in it (Table 3).
_WIDTH, _BEFORE, _BYTES = 256, 128, 4
_METHODS = {"SplitNN": "split_nn", "APC-VFL": "apc_vfl"}
_MEASURES = {
    "accuracy": "accuracy, per cent",
    "rounds": "rounds",
    "megabytes": "MB sent until training ends",
    "counted": "MB as the paper counts them",
}
# What the text of Table 2 still holds, by data set, aligned rows, method and measure.
_PRINTED = {
    ("mimic iii", rows, "APC-VFL", "counted"): megabytes
    for rows, megabytes in ((10_000, 9.73), (7_500, 7.17), (5_000, 4.61), (2_500, 2.05))
}


# What APC-VFL's experiments measure of each data set, and which methods they compare.
#
# Source: section 5 and Appendices A and B of the paper. Who holds which columns and people says
# `apfed_experiments.presets.preset`; encoders, epochs, patience and Adam are the defaults of
# `secure_apfed.learning.autoencoder.DistillationSettings`, which are the paper's.


@dataclass(frozen=True, kw_only=True)
class Part:
    """How much of a scenario is measured: numbers of the active's columns and of aligned rows,
    seeds, and which of `HELPED`, the first of which is compared with all others.
    """

    features: tuple[int, ...]
    aligned: tuple[int, ...]
    seeds: int
    helped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One data set.

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

    def data(self, features: int, aligned: int | None) -> dict[str, Any]:
        """So many columns at the active; the passive knows so many of its people, or all.

        Every row of the active is cross-validated, so that people beside them test what all parties
        predict, which the paper does not measure here.
        """
        cut = preset(f"apc-vfl/{self.dataset}/{features}/{aligned or self.full.aligned[0]}")
        kept = {"dataset": cut["dataset"], "columns": cut["columns"], "aligned": aligned}
        mine = {"limit": self.rows, "test_fraction": self.test_fraction, "split": "at_random"}
        return kept | mine

    @property
    def width(self) -> int:
        """How many columns all parties have."""
        return sum(map(len, self.data(self.full.features[0], None)["columns"].values()))

    def config(
        self, data: Mapping[str, Any], method: str, changes: Mapping[str, Mapping[str, Any]]
    ) -> Config:
        """A run of a method on these data, with changes in sections of what is below."""
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


Changes: TypeAlias = Callable[[Scenario], Mapping[str, Mapping[str, Any]]]
"""What a method needs of the settings of a scenario, by section."""


USUAL = "APC-VFL"
_VECTORS = "VFedTrans"


# Label -> method, and the settings in which it differs from the scenario's. A method is one line
# here if its encoder turns the active's columns into what a classifier reads.
HELPED: Mapping[str, tuple[str, Changes]] = {
    USUAL: ("apc_vfl", lambda scenario: {}),
    # As many singular vectors as all parties have columns (section 6.1).
    _VECTORS: (
        "vfedtrans",
        lambda scenario: {"model": {"network": "enriched", "representation": scenario.width}},
    ),
    "APC-VFL, lambda 0.1": ("apc_vfl", lambda scenario: {"method": {"weight": 0.1}}),
    "APC-VFL, lambda 10": ("apc_vfl", lambda scenario: {"method": {"weight": 10.0}}),
    "APC-VFL, absolute distance": ("apc_vfl", lambda scenario: {"method": {"loss": "mae"}}),
}
_FEATURES, _SEEDS_OF_FIGURES, _COMPARED = (5, 4, 3, 2), 5, (USUAL, _VECTORS)
_MANY, _FEW = (10_000, 7500, 5000, 2500), (750, 500, 250, 100)
_SMALL = Part(features=(5, 2), aligned=(10_000, 2500), seeds=2, helped=_COMPARED)
_LARGE = Part(
    features=_FEATURES, aligned=(*_MANY, *_FEW), seeds=_SEEDS_OF_FIGURES, helped=_COMPARED
)
_BREAST_CANCER = Part(
    features=_FEATURES, aligned=(250, 200, 150, 100), seeds=_SEEDS_OF_FIGURES, helped=_COMPARED
)
_many = partial(Scenario, rows=20_000, test_fraction=0.25, batch_size=128, quick=_SMALL)
SCENARIOS: Mapping[str, Scenario] = {
    "mimic_iii": _many(
        dataset="mimic_iii", full=_LARGE,
        scores={"accuracy": "micro F1", "f1_macro": "macro F1", "f1_weighted": "weighted F1"},
    ),
    "breast_cancer": Scenario(
        dataset="breast_cancer", rows=500, test_fraction=69 / 569, batch_size=8,
        scores={"accuracy": "accuracy"}, quick=_BREAST_CANCER,
        full=replace(_BREAST_CANCER, helped=tuple(HELPED)),
    ),
    "credit_card": _many(
        dataset="credit_card", full=replace(_LARGE, aligned=(*_MANY, 100)), scores={"f1": "F1"}
    ),
}  # fmt: skip


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
    part = scenario.full if full else scenario.quick
    lines = [line for score in scenario.scores.values() for line in _lines(score, part)]
    jobs = [
        job
        for seed in range(part.seeds)
        for features in part.features
        for job in _jobs(scenario, part, features, seed)
    ]
    return Size(lines=lines, jobs=jobs)


def _line(header: Sequence[str], *texts: object, **more: Any) -> Line:
    return Line(cells=dict(zip(header, map(str, texts), strict=True)), **more)


def _lines(score: str, part: Part) -> Iterator[Line]:
    """Of one score: every cell, and what help gains in each and on average over the features."""
    panels = {rows: f"{rows:,} aligned rows, {score}" for rows in part.aligned}
    (usual, *others), weight = part.helped, 1 / len(part.features)

    def name(features: int | str, rows: int | str, method: str) -> str:
        return line_of(str(features), str(rows), method, score)

    def line(features: int | str, rows: int | str, method: str, **more: Any) -> Line:
        return _line(_HEADER, features, rows, method, score, **more)

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

    both = lines(_ANY, _LOCAL, "columns") | lines(_ANY, _ABLATION, "code")
    own: dict[str, Any] = {"seed": seed, "measure": alone, "settings": settings(USUAL, None)}
    yield FunctionJob(label=f"alone-f{features}", lines=both, **own)
    for rows, method in product(part.aligned, part.helped):
        name = method.lower().replace(", ", "-").replace(" ", "-")
        own = {"seed": seed, "measure": helped, "settings": settings(method, rows), "cost": 2.0}
        filled = lines(rows, method, "code")
        yield FunctionJob(label=f"{name}-f{features}-n{rows}", lines=filled, **own)


# APC-VFL's Table 2: what all parties predict together, against SplitNN's rounds and bytes.
#
# All rows are aligned here, and both methods predict with every party: SplitNN trains end to end,
# with Adam and early stopping; APC-VFL classifies the joint code (its Figure 4), after one
# exchange.


def exchanged(*, seed: int, config: Mapping[str, Any], way: str) -> Figures:
    """What one run reached, and what it sent until its last step; inference is left out."""
    of_run = Config.model_validate({**config, "seed": seed})
    data, last = load_data(of_run.data, seed=seed), list[Progress]()

    def note(progress: Progress) -> None:
        if progress.accuracy is None:
            last[:] = [progress]

    result = run(of_run, None, data=data, on_progress=note)
    sent = dict.fromkeys((Kind.REPRESENTATIONS, Kind.GRADIENTS), 0)
    for flow in result.recording.transcript.flows:
        if flow.kind in sent:
            sent[flow.kind] += flow.messages
    steps, rows = sent[Kind.GRADIENTS], len(data.train_rows)
    # Messages in which passives answer for rows that are predicted.
    asked = math.ceil(len(data.test_rows) / of_run.train.batch_size)
    # Eqs. (6) to (9): every epoch sends all rows, every step the gradient of the last layer.
    exchanges = last[0].epoch if steps else 1
    layer = _BEFORE * _WIDTH + _WIDTH
    return {
        "accuracy": 100 * result.accuracy[way],
        "rounds": float(sum(sent.values()) - asked),
        "megabytes": last[0].wire_bytes / 1e6,
        "counted": _BYTES * (exchanges * rows * _WIDTH + steps * layer) / 1e6,
    }


def _table2_config(scenario: Scenario, rows: int, method: str) -> Config:
    """So many aligned rows, some of which test; networks and batches are the same for both."""
    data = preset(f"apc-vfl/{scenario.dataset}/all-aligned/{rows}")
    base = scenario.config(data, _METHODS["APC-VFL"], {})
    settings = base.model_dump(mode="json", exclude_defaults=True)
    if method == _METHODS["APC-VFL"]:
        # One message holds every row.
        settings["train"] |= {"epochs": 1, "batch_size": rows}
        return Config.model_validate(settings)
    codes = ApcVflSettings.of(base)
    return Config.model_validate({
        **settings,
        "method": method,
        "model": {**codes.own.model_dump(exclude_defaults=True), "head": [256, 256]},
        "passives": {"default": {"model": codes.passive.model_dump(exclude_defaults=True)}},
        "train": {
            **settings["train"], "optimizer": "adam", "weight_decay": 0.0, "patience": 10,
            "epochs": codes.epochs, "batch_size": scenario.batch_size,
        },
    })  # fmt: skip


def table2_size(full: bool) -> Size:
    """Lines and jobs; those of breast cancer by default."""
    wanted = [one for name, one in SCENARIOS.items() if full or name == _QUICK]
    jobs = [
        job
        for seed in range(_TABLE2_SEEDS)
        for scenario in wanted
        for rows in _aligned(scenario)
        for job in _table2_jobs(scenario, rows, seed)
    ]
    return Size(lines=[line for scenario in wanted for line in _table2_lines(scenario)], jobs=jobs)


def _aligned(scenario: Scenario) -> tuple[int, ...]:
    """The four numbers of the paper's Table 2."""
    return scenario.full.aligned[:4]


def _table2_jobs(scenario: Scenario, rows: int, seed: int) -> Iterator[FunctionJob]:
    for label, method in _METHODS.items():
        config = _table2_config(scenario, rows, method)
        way = method if method == _METHODS["SplitNN"] else f"{method}_together"
        told = config.model_dump(mode="json", exclude_defaults=True)
        title = _title(scenario)
        lines = {line_of(title, str(rows), label, of): name for name, of in _MEASURES.items()}
        yield FunctionJob(
            label=f"{scenario.dataset}-{method}-n{rows}", seed=seed, measure=exchanged, lines=lines,
            settings={"config": told, "way": way}, cost=rows / scenario.batch_size,
        )  # fmt: skip


def _title(scenario: Scenario) -> str:
    return scenario.dataset.replace("_", " ")


def _table2_lines(scenario: Scenario) -> Iterator[Line]:
    title = _title(scenario)
    for (measure, told), rows, label in product(_MEASURES.items(), _aligned(scenario), _METHODS):
        printed = _PRINTED.get((title, rows, label, measure))
        yield _line(
            _TABLE2_HEADER, title, rows, label, told, panels=(f"{title}: {told}",), series=label,
            paper=None if printed is None else Printed(mean=printed), at=float(rows),
        )  # fmt: skip
    for rows in _aligned(scenario):
        told = _MEASURES["accuracy"]
        one, other = (line_of(title, str(rows), label, told) for label in ("APC-VFL", "SplitNN"))
        minus, weights = "APC-VFL minus SplitNN", {one: 1.0, other: -1.0}
        yield _line(_TABLE2_HEADER, title, rows, minus, told, combines=weights)


_SMALLER = "3 and 4 features, most numbers of aligned rows, and three of five seeds"
TABLES: tuple[PaperTable, ...] = (
    *(
        PaperTable(
            name=f"apc-vfl-{dataset}".replace("_", "-"), source=f"APC-VFL, Figures {figures}",
            title=f"APC-VFL on {title}", unit="per cent", hours=hours, leaves_out=leaves_out,
            reading=f"{SCENARIOS[dataset].rows:,} rows at the active. {READING}",
            size=partial(size_of, SCENARIOS[dataset]), axis="features of the active",
        )
        for dataset, title, figures, hours, leaves_out in (
            ("breast_cancer", "breast cancer", "5 and 10", 0.8,
             "other values of lambda, and the absolute distance of codes"),
            ("credit_card", "defaults of credit card clients", "5, 11 and 16", 5.0, _SMALLER),
            ("mimic_iii", "lengths of stay in MIMIC-III", "5, 7 to 9 and 12 to 15", 5.0, _SMALLER),
        )
    ),
    PaperTable(
        name="apc-vfl-splitnn", source="APC-VFL, Table 2", unit="", hours=6.0, size=table2_size,
        title="APC-VFL and SplitNN where all rows are aligned", axis="aligned rows",
        reading="50 of the aligned rows test on breast cancer, 500 elsewhere; five features at the "
        "active. A round is a message of representations or gradients. All are scored by accuracy; "
        "the paper takes F1 on credit cards. Of its values the text that we have holds only some "
        "megabytes. SplitNN: Adam, at most 200 epochs, patience 10, weights of the last epoch. MB "
        "sent: alignment and agreement included; as the paper counts them: by Appendix E, for our "
        "epochs and steps.",
        leaves_out="credit cards, and MIMIC-III where its files are",
        shared=50 / 569,  # at most: of 569 people 50 test
    ),
)  # fmt: skip
