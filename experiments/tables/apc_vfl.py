"""APC-VFL's figures: what an encoder that learnt from the passive's code is worth to the active.

Figures 5 and 7 to 16 of the paper: logistic regression on the active's columns (Local), on the code
of its autoencoder alone (Ablation), and on a code that was drawn to the joint one (APC-VFL), each
cross-validated over all of the active's rows, for every number of its features and of aligned rows.
The paper's values are not in the text that we have, so that none stands beside ours. Lambda, the
distance of codes and the share of held-out rows are not in it either: see `READING`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from experiments.overlap import with_overlap
from experiments.tables.table import Figures, FunctionJob, Line, PaperTable, Size, line_of
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.data.catalogue import DATASETS, find_dataset
from secure_apfed.learning.encoder_quality import Score, cross_validated, own_codes
from secure_apfed.parties import Compute
from secure_apfed.runs import run

__all__ = [
    "HELPED", "READING", "SCENARIOS", "TABLES", "Part", "Scenario", "alone", "helped", "size_of",
]  # fmt: skip

READING = (
    "Mean over the seeds of ten-fold cross-validations, which are drawn with the seed as rows, "
    "aligned rows and weights are; minus: paired by seed. Adam, at most 200 epochs, patience 10, "
    "encoders of Table 3. Not legible in the paper, and chosen here: lambda 1, the mean squared "
    "distance of codes, a tenth of the rows held out. The classifier (C = 1) reads columns that "
    "are standardised and codes as they are."
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """How much of a scenario is measured.

    Attributes:
        features: numbers of the active's columns; aligned: numbers of aligned rows.
        helped: of `HELPED`, the first of which is compared with what the active does alone.
    """

    features: tuple[int, ...]
    aligned: tuple[int, ...]
    seeds: int
    helped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A data set as section 5 and Appendices A and B of the paper cut it.

    Attributes:
        columns: the active's, in the order in which they move to the passive.
        people: of the data set; rows: of the active, all with a label; test_fraction: of the
            people, which leaves that many for training.
        batch_size: of every training.
        scores: of a fold, each with what the paper calls it.
        tested: aligned rows that test where all parties predict.
        quick, full: the default part, and all.
    """

    dataset: str
    columns: tuple[str, ...]
    people: int
    rows: int
    test_fraction: float
    batch_size: int
    scores: Mapping[Score, str]
    tested: int
    quick: Part
    full: Part

    def config(self, features: int, changes: Mapping[str, Any]) -> Config:
        """A run in which the active has the last so many of its columns.

        Args:
            features: how many.
            changes: of the settings below, the method among them; sections are merged.
        """
        own = self.columns[len(self.columns) - features :]
        views = find_dataset(self.dataset).natural_views.values()
        others = [column for view in views for column in view if column not in own]
        settings: dict[str, Any] = {
            "name": f"apc-vfl-{self.dataset}".replace("_", "-"),
            "party_seeds": "shared_for_comparison",
            "data": {
                "dataset": self.dataset, "columns": {"active": own, "passive-1": others},
                "limit": self.rows, "test_fraction": self.test_fraction, "split": "at_random",
            },
            "model": {"network": "selu", "hidden": [256], "representation": 256},
            "distilled": {"batch_size": self.batch_size},
            "guard": {"mechanism": "none"},
            "secure_sum": {"scheme": "plain"},
            "transcript": {"keep": "none"},
            "train": {"device": "cpu"},
        }  # fmt: skip
        for key, value in changes.items():
            settings[key] = {**settings[key], **value} if isinstance(value, Mapping) else value
        return Config.model_validate(settings)


_USUAL = "APC-VFL"
# Label -> method, and what its settings are besides the scenario's. Any method is one line here
# whose encoder turns the active's columns into what a classifier reads.
HELPED: Mapping[str, Mapping[str, Any]] = {
    _USUAL: {"method": "apc_vfl"},
    "APC-VFL, lambda 0.1": {"method": "apc_vfl", "distilled": {"weight": 0.1}},
    "APC-VFL, lambda 10": {"method": "apc_vfl", "distilled": {"weight": 10.0}},
    "APC-VFL, absolute distance": {"method": "apc_vfl", "distilled": {"loss": "mae"}},
}
_FEATURES, _SEEDS = (5, 4, 3, 2), 5
_MANY = (10_000, 7_500, 5_000, 2_500, 750, 500, 250, 100)
_SMALL = Part(features=(5, 2), aligned=(10_000, 2_500), seeds=2, helped=(_USUAL,))
_LARGE = Part(features=_FEATURES, aligned=_MANY, seeds=_SEEDS, helped=(_USUAL,))
_BREAST_CANCER = Part(
    features=_FEATURES, aligned=(250, 200, 150, 100), seeds=_SEEDS, helped=(_USUAL,)
)
_HEADER = ("features", "aligned rows", "method", "score")
_ANY = "any"
_LOCAL, _ABLATION = "Local", "Ablation"

SCENARIOS: Mapping[str, Scenario] = {
    "mimic_iii": Scenario(
        dataset="mimic_iii",
        columns=("NumCPTevents", "NumProcs", "Age", "NumCallouts", "NumDiagnosis"),
        people=58_976,
        rows=20_000,
        test_fraction=0.25,
        batch_size=128,
        scores={"accuracy": "micro F1", "f1_macro": "macro F1", "f1_weighted": "weighted F1"},
        tested=500,
        quick=_SMALL,
        full=_LARGE,
    ),
    "breast_cancer": Scenario(
        dataset="breast_cancer",
        columns=(
            "worst compactness", "concave points error", "smoothness error", "mean texture",
            "worst fractal dimension",
        ),
        people=569,
        rows=500,
        test_fraction=69 / 569,
        batch_size=8,
        scores={"accuracy": "accuracy"},
        tested=50,
        quick=_BREAST_CANCER,
        full=replace(_BREAST_CANCER, helped=tuple(HELPED)),
    ),
    "credit_card": Scenario(
        dataset="credit_card",
        # X3, X5, X7, X9 and X11 of UCI's description.
        columns=("EDUCATION", "AGE", "PAY_2", "PAY_4", "PAY_6"),
        people=30_000,
        rows=20_000,
        test_fraction=0.25,
        batch_size=128,
        scores={"f1": "F1"},
        tested=500,
        quick=_SMALL,
        full=_LARGE,
    ),
}  # fmt: skip


def alone(*, seed: int, config: Mapping[str, Any], scores: Sequence[Score]) -> Figures:
    """Mean scores in per cent on the active's columns and on its own code, by "columns SCORE"."""
    of_run, data, score = _opened(seed, config, scores)
    features_TF = data.active.features[data.train_rows]
    codes_TD, _ = own_codes(
        features_TF, model=of_run.model, settings=of_run.distilled, owner=data.active.name,
        seed=seed, compute=Compute.of(of_run.train),
    )  # fmt: skip
    return {**score("columns", features_TF), **score("code", codes_TD)}


def helped(
    *, seed: int, config: Mapping[str, Any], scores: Sequence[Score], aligned: int
) -> Figures:
    """The same on the code of a run in which the passive knows so many of the active's people."""
    of_run, data, score = _opened(seed, config, scores)
    known = with_overlap(data, aligned / len(data.train_rows), seed=seed)
    result = run(of_run, None, data=known)
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
    usual, weight = part.helped[0], 1 / len(part.features)

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
    for base, rows in product((_LOCAL, _ABLATION), part.aligned):
        for features in part.features:
            gain = {name(features, rows, usual): 1.0, name(features, _ANY, base): -1.0}
            yield line(features, rows, f"{usual} minus {base}", combines=gain)
        gains = {name(features, rows, usual): weight for features in part.features}
        gains |= {name(features, _ANY, base): -weight for features in part.features}
        yield line("mean", rows, f"{usual} minus {base}", combines=gains)


def _jobs(scenario: Scenario, part: Part, features: int, seed: int) -> Iterator[FunctionJob]:
    """Of one seed and number of features."""
    scores = scenario.scores

    def settings(label: str) -> dict[str, Any]:
        config = scenario.config(features, HELPED[label])
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
        settings=settings(_USUAL),
        lines=lines(_ANY, _LOCAL, "columns") | lines(_ANY, _ABLATION, "code"),
    )
    for rows, method in product(part.aligned, part.helped):
        yield FunctionJob(
            label=f"{method.lower().replace(', ', '-').replace(' ', '-')}-f{features}-n{rows}",
            seed=seed,
            measure=helped,
            settings={**settings(method), "aligned": rows},
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
            leaves_out="3 and 4 features, six of eight numbers of aligned rows, and three of five "
            "seeds",
            hours=5.0,
            size=partial(size_of, SCENARIOS[dataset]),
            axis="features of the active",
        )
        for dataset, title, figures in (
            ("credit_card", "defaults of credit card clients", "5, 11 and 16"),
            ("mimic_iii", "lengths of stay in MIMIC-III", "5, 7 to 9 and 12 to 15"),
        )
        if dataset in DATASETS
    ),
)
