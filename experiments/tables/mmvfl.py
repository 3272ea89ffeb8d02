"""MMVFL's figures: how well each participant predicts alone that never saw a label.

Figure 3 and Table 2 of the paper on Handwritten, five views: the features that count most by the
norms of their weights are kept, and each participant predicts by what is left of its weights.
Everything is computed at once here, in the order in which parties would: that a run of theirs
gives the same is tested (`tests/secure_apfed/test_methods_pseudo_labels.py`).
Letters: N rows, F features of a view, C classes.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from experiments.tables.table import Figures, FunctionJob, Line, PaperTable, Printed, Size, line_of
from secure_apfed.data import DataSettings, PartyTable, VerticalData, load_data
from secure_apfed.learning.multiview import (
    Floats,
    Pull,
    ViewModel,
    importance,
    iterate,
    objective,
    start,
    weights_of,
)

__all__ = ["TABLES", "accuracies", "aligned_views", "fit_mmvfl", "measure_fold"]

Rows = NDArray[np.int64]

_VIEWS = ("pix", "fou", "fac", "zer", "kar")  # Table 1: 240, 76, 216, 47, 64
_SHARES = (2, 4, 6, 8, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
_BETAS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_METHODS = ("MMVFL", "supFL")
_FOLDS, _TRAINING = 5, 120
_ZETA, _ETA = 1000.0, 1000.0
_ITERATIONS, _TOLERANCE = 100, 1e-5
_PAPER = {"supFL": (1.46, -2.39, 0.76, 6.48, 0.77), "supMVLFL": (1.99, -2.31, 1.03, 9.67, 1.16)}
_READING = (
    "Five folds of 40 rows a class; 120 of the other 160 of each class train (Table 1). "
    "As in the paper, beta is chosen for each fold, view and share of features by the accuracy on "
    "the rows that are then reported, which flatters all methods alike; zeta = eta = 1000. "
    "supMVLFL (Eq. 16) is a sum over participants, each of whose terms is supFL's (Eq. 15), so it "
    "is the same model, and the paper's difference between the two does not follow from its "
    "equations. Differences are averaged over the shares of features. Intervals are over the "
    "folds, which share training rows."
)


def aligned_views(data: VerticalData) -> tuple[list[Floats], Rows]:
    """All parties' features of the people whom all know, (N, F), and their labels (N,)."""
    common = sorted(set.intersection(*(set(table.ids) for table in data.tables)))
    rows = [_rows_of(table, common) for table in data.tables]
    labels_N = data.active.labels
    assert labels_N is not None
    views = [
        table.features[of].flatten(1).double().numpy()
        for table, of in zip(data.tables, rows, strict=True)
    ]
    return views, labels_N[rows[0]].numpy()


def _rows_of(table: PartyTable, people: Sequence[str]) -> list[int]:
    place = {identity: row for row, identity in enumerate(table.ids)}
    return [place[identity] for identity in people]


def fit_mmvfl(
    views: Sequence[Floats], truth_NC: Floats, *, beta: float, seed: int
) -> list[ViewModel]:
    """Algorithm 1 on aligned training rows, the first view with the labels; return all views."""
    rng = np.random.default_rng(seed)
    rows, classes = truth_NC.shape
    models = [
        ViewModel.begin(x_NF, classes, rng, beta=beta, zeta=_ZETA, tolerance=1e-6, most_rounds=50)
        for x_NF in views
    ]
    pull = Pull(truth_NC, np.full((rows, 1), _ETA), own=True)
    common_NC, before = start(rows, classes, rng), np.inf
    for _ in range(_ITERATIONS):
        common_NC = iterate(models, common_NC, pull)
        now = objective(models, common_NC, pull)
        if before - now <= _TOLERANCE * now:
            break
        before = now
    return models


def accuracies(weights_FC: Floats, x_NF: Floats, labels_N: Rows) -> dict[int, float]:
    """By the share of features that are kept, in per cent: section 4.2."""
    found = {}
    for share in _SHARES:
        kept = importance(weights_FC, share / 100)
        guessed_N = (x_NF[:, kept] @ weights_FC[kept]).argmax(1)
        found[share] = 100 * float((guessed_N == labels_N).mean())
    return found


def measure_fold(*, seed: int, betas: Sequence[float]) -> Figures:
    """All methods, participants and shares of one fold; beta as the paper chooses it."""
    data = load_data(DataSettings(dataset="handwritten", natural_views=_VIEWS), seed=0)
    views, labels_N = aligned_views(data)
    train, test = _fold(labels_N, seed)
    truth_NC = np.eye(labels_N.max() + 1)[labels_N[train]]
    best: dict[str, float] = {}
    for beta in betas:
        joint = fit_mmvfl([x_NF[train] for x_NF in views], truth_NC, beta=beta, seed=seed)
        for at, (x_NF, model) in enumerate(zip(views, joint, strict=True), 1):
            alone = weights_of(x_NF[train], truth_NC, beta, model.weights_FC, tolerance=1e-8)
            for method, weights_FC in zip(_METHODS, (model.weights_FC, alone), strict=True):
                for share, found in accuracies(weights_FC, x_NF[test], labels_N[test]).items():
                    name = f"{method} {at} {share}"
                    best[name] = max(best.get(name, 0.0), found)
    for at in range(1, len(views) + 1):
        apart = [best[f"MMVFL {at} {share}"] - best[f"supFL {at} {share}"] for share in _SHARES]
        best[f"apart {at}"] = float(np.mean(apart))
    best["apart"] = float(np.mean([best[f"apart {at}"] for at in range(1, len(views) + 1)]))
    return best


def _fold(labels_N: Rows, fold: int) -> tuple[Rows, Rows]:
    """Rows to train on and to test on, equally many of each class; folds are one partition."""
    draw, train, test = np.random.default_rng(0), [], []
    for label in np.unique(labels_N):
        parts = np.array_split(draw.permutation(np.flatnonzero(labels_N == label)), _FOLDS)
        test.append(parts.pop(fold % _FOLDS))
        train.append(np.concatenate(parts)[:_TRAINING])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _jobs(lines: dict[str, str]) -> list[FunctionJob]:
    return [
        FunctionJob(
            label="handwritten", seed=fold, measure=measure_fold, settings={"betas": list(_BETAS)},
            lines=lines,
        )
        for fold in range(_FOLDS)
    ]  # fmt: skip


def _curves(full: bool) -> Size:
    lines = list(_curve_lines())
    named = {
        line.name: f"{line.cells['method']} {line.cells['participant']} {line.cells['features %']}"
        for line in lines
    }
    return Size(lines=lines, jobs=_jobs(named))


def _curve_lines() -> Iterator[Line]:
    for participant, view in enumerate(_VIEWS, 1):
        for method in _METHODS:
            for share in _SHARES:
                yield Line(
                    cells={
                        "participant": str(participant), "view": view, "method": method,
                        "features %": str(share),
                    },
                    panels=(f"Participant {participant} ({view})",), series=method, at=share,
                )  # fmt: skip


def _differences(full: bool) -> Size:
    lines, named = [], {}
    for against, printed in _PAPER.items():
        for participant, view in enumerate(_VIEWS, 1):
            cells = {"MMVFL minus": against, "participant": f"{participant} ({view})"}
            mean = printed[participant - 1]
            lines.append(
                Line(cells=cells, paper=Printed(mean=mean), series=" ".join(cells.values()))
            )
            named[lines[-1].name] = f"apart {participant}"
        cells = {"MMVFL minus": against, "participant": "average"}
        average = {"supFL": 1.42, "supMVLFL": 2.31}[against]
        lines.append(Line(cells=cells, paper=Printed(mean=average), series=f"{against} average"))
        named[line_of(*cells.values())] = "apart"
    return Size(lines=lines, jobs=_jobs(named))


TABLES = (
    PaperTable(
        name="mmvfl-handwritten",
        source="MMVFL, Figure 3",
        title="MMVFL on Handwritten: accuracy by the share of features that are kept",
        unit="accuracy, %",
        reading=_READING,
        leaves_out="",
        hours=0.02,
        size=_curves,
        axis="features kept, %",
        ticks={share: "" if 2 < share < 20 else f"{share:g}" for share in _SHARES},
        form=".1f",
    ),
    PaperTable(
        name="mmvfl-differences",
        source="MMVFL, Table 2, Handwritten",
        title="MMVFL minus models that saw the labels, averaged over the shares of features",
        unit="points of accuracy",
        reading=_READING,
        leaves_out="",
        hours=0.02,
        size=_differences,
    ),
)
