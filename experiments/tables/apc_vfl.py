"""APC-VFL's figures: what an encoder that learnt from the passive's code is worth to the active.

Figures 5 and 7 to 16 of the paper: logistic regression on the active's columns (Local), on the code
of its autoencoder alone (Ablation), and on a code that was drawn to the joint one (APC-VFL), each
cross-validated over all of the active's rows, for every number of its features and of aligned rows.
The paper's values are not in the text that we have, so that none stands beside ours. Lambda, the
distance of codes and the share of held-out rows are not in it either: see `READING`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from experiments.overlap import with_overlap
from experiments.tables.table import Figures, FunctionJob, Line, PaperTable, Size, line_of
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.data.catalogue import find_dataset
from secure_apfed.learning.encoder_quality import Score, cross_validated, own_codes
from secure_apfed.parties import Compute
from secure_apfed.runs import run

__all__ = ["READING", "SCENARIOS", "TABLES", "Scenario", "alone", "helped", "size_of"]

READING = (
    "Mean over the seeds of ten-fold cross-validations, which are drawn with the seed as rows, "
    "aligned rows and weights are; minus: paired by seed. Adam, at most 200 epochs, patience 10, "
    "encoders of Table 3. Not legible in the paper, and chosen here: lambda 1, the mean squared "
    "distance of codes, a tenth of the rows held out. The classifier (C = 1) reads columns that "
    "are standardised and codes as they are."
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A data set as section 5 and Appendices A and B of the paper cut it.

    Attributes:
        columns: the active's, in the order in which they move to the passive.
        rows: of the active, all with a label; test_fraction: leaves them for training.
        aligned: numbers of aligned rows; batch_size: of every training.
        scores: of a fold, each with what the paper calls it.
        quick: features and aligned rows, and seeds, of the default part.
    """

    dataset: str
    columns: tuple[str, ...]
    rows: int
    test_fraction: float
    aligned: tuple[int, ...]
    batch_size: int
    scores: Mapping[Score, str]
    quick: tuple[Sequence[int], Sequence[int], int]

    def config(self, features: int, method: str, distilled: Mapping[str, Any]) -> Config:
        """A run in which the active has the last so many of its columns."""
        own = self.columns[len(self.columns) - features :]
        views = find_dataset(self.dataset).natural_views.values()
        others = [column for view in views for column in view if column not in own]
        return Config.model_validate({
            "name": f"apc-vfl-{self.dataset}".replace("_", "-"),
            "party_seeds": "shared_for_comparison",
            "method": method,
            "data": {
                "dataset": self.dataset, "columns": {"active": own, "passive-1": others},
                "limit": self.rows, "test_fraction": self.test_fraction, "split": "at_random",
            },
            "model": {"network": "selu", "hidden": [256], "representation": 256},
            "distilled": {"batch_size": self.batch_size, **distilled},
            "guard": {"mechanism": "none"},
            "secure_sum": {"scheme": "plain"},
            "transcript": {"keep": "none"},
            "train": {"device": "cpu"},
        })  # fmt: skip


SCENARIOS: Mapping[str, Scenario] = {
    "breast_cancer": Scenario(
        dataset="breast_cancer",
        columns=(
            "worst compactness", "concave points error", "smoothness error", "mean texture",
            "worst fractal dimension",
        ),
        rows=500,
        test_fraction=69 / 569,
        aligned=(250, 200, 150, 100),
        batch_size=8,
        scores={"accuracy": "accuracy"},
        quick=((5, 4, 3, 2), (250, 200, 150, 100), 5),
    ),
    "credit_card": Scenario(
        dataset="credit_card",
        # X3, X5, X7, X9 and X11 of UCI's description.
        columns=("EDUCATION", "AGE", "PAY_2", "PAY_4", "PAY_6"),
        rows=20_000,
        test_fraction=0.25,
        aligned=(10_000, 7_500, 5_000, 2_500),
        batch_size=128,
        scores={"f1": "F1"},
        quick=((5, 2), (10_000, 2_500), 2),
    ),
}  # fmt: skip
_SEEDS = 5
_FEATURES = (5, 4, 3, 2)
_ANY = "any"
_LOCAL, _ABLATION = "Local", "Ablation"

_USUAL = "APC-VFL"
# Label -> method and what its settings are besides the paper's; a method whose student reads the
# active's columns is one line here. All but the first are left to `--full`.
_HELPED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    _USUAL: ("apc_vfl", {}),
    "APC-VFL, lambda 0.1": ("apc_vfl", {"weight": 0.1}),
    "APC-VFL, lambda 10": ("apc_vfl", {"weight": 10.0}),
    "APC-VFL, absolute distance": ("apc_vfl", {"loss": "mae"}),
}


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
    features, aligned, seeds = scenario.quick
    helps = dict(list(_HELPED.items())[:1])
    if full:
        features, aligned, seeds, helps = _FEATURES, scenario.aligned, _SEEDS, dict(_HELPED)
    lines = [
        line
        for label in scenario.scores.values()
        for line in _lines(label, features, aligned, list(helps))
    ]
    jobs = [
        job
        for seed in range(seeds)
        for count in features
        for job in _jobs(scenario, seed, count, aligned, helps)
    ]
    return Size(lines=lines, jobs=jobs)


def _lines(
    score: str, features: Sequence[int], aligned: Sequence[int], helps: Sequence[str]
) -> Iterator[Line]:
    """Of one score: every cell, the means over the features, and what the usual one gains."""

    def name(count: int | str, rows: int | str, method: str) -> str:
        return line_of(str(count), str(rows), method, score)

    def line(count: int | str, rows: int | str, method: str, **more: Any) -> Line:
        cells = {
            "features": str(count), "aligned rows": str(rows), "method": method, "score": score,
        }  # fmt: skip
        return Line(cells=cells, **more)

    for count in features:
        for method in (_LOCAL, _ABLATION):
            yield line(count, _ANY, method, series=method, at=float(count))
        for rows, method in product(aligned, helps):
            panel = f"{rows:,} aligned rows, {score}"
            yield line(count, rows, method, panel=panel, series=method, at=float(count))
    for rows, base in product(aligned, (_LOCAL, _ABLATION)):
        for count in features:
            gain = {name(count, rows, _USUAL): 1.0, name(count, _ANY, base): -1.0}
            yield line(count, rows, f"{_USUAL} minus {base}", combines=gain)
        gains = {name(count, rows, _USUAL): 1 / len(features) for count in features}
        gains |= {name(count, _ANY, base): -1 / len(features) for count in features}
        yield line("mean", rows, f"{_USUAL} minus {base}", combines=gains)


def _jobs(
    scenario: Scenario, seed: int, features: int, aligned: Sequence[int],
    helps: Mapping[str, tuple[str, Mapping[str, Any]]],
) -> Iterator[FunctionJob]:  # fmt: skip
    """Of one seed and number of features."""
    named = scenario.scores.items()
    count, scores = str(features), list(scenario.scores)
    own = scenario.config(features, *_HELPED[_USUAL])
    settings = {"config": own.model_dump(mode="json", exclude_defaults=True), "scores": scores}
    yield FunctionJob(
        label=f"alone-f{features}",
        seed=seed,
        measure=alone,
        settings=settings,
        lines={
            line_of(count, _ANY, method, label): f"{what} {score}"
            for what, method in (("columns", _LOCAL), ("code", _ABLATION))
            for score, label in named
        },
    )
    for rows, (method, (key, distilled)) in product(aligned, helps.items()):
        config = scenario.config(features, key, distilled)
        file = method.lower().replace(", ", "-").replace(" ", "-")
        yield FunctionJob(
            label=f"{file}-f{features}-n{rows}",
            seed=seed,
            measure=helped,
            settings={
                **settings, "config": config.model_dump(mode="json", exclude_defaults=True),
                "aligned": rows,
            },
            lines={
                line_of(count, str(rows), method, label): f"code {score}" for score, label in named
            },
            cost=2.0,
        )  # fmt: skip


TABLES: tuple[PaperTable, ...] = (
    PaperTable(
        name="apc-vfl-breast-cancer",
        source="APC-VFL, Figures 5 and 10",
        title="APC-VFL on breast cancer",
        unit="per cent",
        reading=f"500 rows at the active. {READING}",
        leaves_out="other values of lambda, and the absolute distance of codes",
        hours=0.5,
        size=partial(size_of, SCENARIOS["breast_cancer"]),
        axis="features of the active",
    ),
    PaperTable(
        name="apc-vfl-credit-card",
        source="APC-VFL, Figures 5, 11 and 16",
        title="APC-VFL on defaults of credit card clients",
        unit="per cent",
        reading=f"20,000 rows at the active. {READING}",
        leaves_out="3 and 4 features, 5,000 and 7,500 aligned rows, three of five seeds, other "
        "values of lambda, and the absolute distance of codes",
        hours=5.0,
        size=partial(size_of, SCENARIOS["credit_card"]),
        axis="features of the active",
    ),
)
