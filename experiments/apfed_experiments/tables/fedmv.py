"""FedMV's tables and figures, on Handwritten and on synthetic sessions of typing.

Tables 1 to 3 of the paper (views that are shared, people that are shared, and sequences) and its
Figure 6 (how much the weights of the objective matter). The paper's sessions are not public, so
that ours are synthetic, and its figures stand beside them as a guide to the order of methods alone.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from sklearn.manifold import TSNE

from apfed_experiments.drawing import ATTACK, OURS, drawing
from apfed_experiments.tables.fedmv import (
    METRICS,
    VIEWS,
    measure_handwritten,
    measure_sessions,
    measure_spaces,
    measure_weights,
    spaces,
    wanted_labels,
)
from apfed_experiments.tables.table import FunctionJob, Line, PaperTable, Printed, Size, line_of

__all__ = ["TABLES"]

# Tables 1 to 3 of the paper, on BiAffect: accuracy, precision, recall, F1, mean and deviation.
_PRINTED: Mapping[str, tuple[float, ...]] = {
    "V-FedMV": (88.76, 0.74, 90.89, 0.83, 87.09, 1.89, 88.93, 0.84),
    "V w/o special": (88.30, 0.64, 89.54, 0.69, 87.72, 1.47, 88.61, 0.70),
    "V w/o accel": (84.92, 0.50, 89.00, 1.34, 81.01, 2.00, 84.79, 0.67),
    "V w/o alphanum": (78.71, 0.74, 79.63, 1.59, 79.42, 3.34, 79.45, 1.11),
    "alphanum w/o FL": (84.53, 0.68, 87.58, 0.88, 81.81, 1.40, 84.59, 0.75),
    "accel w/o FL": (76.94, 0.91, 75.51, 1.03, 82.32, 2.73, 78.73, 1.13),
    "special w/o FL": (62.30, 0.64, 70.19, 1.81, 47.83, 3.09, 56.79, 1.87),
    "H-FedMV": (88.98, 0.52, 91.01, 0.80, 87.42, 1.33, 89.17, 0.57),
    "MV w/o FL": (87.92, 0.51, 90.21, 1.53, 86.15, 2.58, 88.09, 0.72),
    "H w/o special": (88.28, 0.65, 89.67, 0.69, 87.52, 1.54, 88.57, 0.72),
    "H w/o accel": (84.72, 1.01, 89.06, 1.10, 80.47, 2.40, 84.52, 1.23),
    "H w/o alphanum": (78.77, 0.72, 79.70, 1.60, 79.45, 3.17, 79.51, 0.99),
    "alphanum FL": (84.57, 0.65, 87.53, 0.79, 81.97, 1.44, 84.65, 0.73),
    "accel FL": (76.96, 0.91, 75.51, 1.07, 82.39, 2.60, 78.77, 1.09),
    "special FL": (62.26, 0.58, 70.20, 1.81, 47.65, 3.02, 56.67, 1.81),
    "S-FedMV": (88.90, 0.53, 89.93, 0.82, 88.54, 1.16, 89.22, 0.55),
    "Local sequential H-FedMV": (68.31, 5.58, 74.77, 5.39, 58.10, 9.06, 65.24, 7.82),
    "Local sequential LocalMV": (82.27, 0.91, 84.87, 1.50, 80.34, 0.44, 82.44, 0.77),
}
_PANELS = {"Table 1": 7, "Table 2": 8, "Table 3": 3}
_SHARED = 0.25  # a quarter tests, all others have a label: `apfed_experiments.summary.shared_share`
_SIZE = {"rows": 1200, "units": 12, "epochs": 30}
_READING = (
    "SYNTHETIC sessions of typing (`synthetic_keystrokes`), 1,200 of them, a quarter to test: the "
    "paper's 14,971 sessions of BiAffect are not public, so that only the order of methods can be "
    "compared. Four clients; GRUs of 12 units a direction, 30 epochs, or 20 rounds of 3 epochs "
    "(paper: 500 epochs, or 150 rounds of 10 to 15); beta 4, all other weights 8."
)


def _session_lines() -> list[Line]:
    panels = [name for name, many in _PANELS.items() for _ in range(many)]
    lines = []
    for panel, (method, printed) in zip(panels, _PRINTED.items(), strict=True):
        for at, metric in enumerate(METRICS):
            lines.append(
                Line(
                    cells={"table": panel, "method": method, "metric": metric},
                    paper=Printed(mean=printed[2 * at], sd=printed[2 * at + 1]),
                    panels=(panel,),
                    series=method if metric == "accuracy" else "",
                )
            )
    return lines


def _keystrokes(full: bool) -> Size:
    lines = _session_lines()
    named = {line.name: f"{line.cells['method']} {line.cells['metric']}" for line in lines}
    settings = {**_SIZE, "rounds": 20, "local_epochs": 3}
    jobs = [
        FunctionJob(
            label="sessions", seed=seed, measure=measure_sessions, settings=settings, lines=named
        )
        for seed in range(10 if full else 3)
    ]
    return Size(lines=lines, jobs=jobs)


_VALUES = tuple(2.0**power for power in range(6))


def _weights(full: bool) -> Size:
    lines, named = [], {}
    for weight in (*(f"zeta of {view}" for view in VIEWS), "eta"):
        for method in ("V-FedMV", "H-FedMV"):
            for value in _VALUES:
                cells = {"weight": weight, "method": method, "value": f"{value:g}"}
                line = Line(cells=cells, panels=(weight,), series=method, at=np.log2(value))
                lines.append(line)
                named[line.name] = f"{method} {weight} {value:g}"
    jobs = [
        FunctionJob(
            label="weights", seed=seed, measure=measure_weights,
            settings={**_SIZE, "values": list(_VALUES)}, lines=named,
        )
        for seed in range(10 if full else 3)
    ]  # fmt: skip
    return Size(lines=lines, jobs=jobs)


def _by_views(full: bool) -> Size:
    lines, named = [], {}
    for method in ("V-FedMV", "H-FedMV", "MV w/o FL"):
        for many in range(1, 6):
            cells = {"method": method, "views": str(many)}
            lines.append(Line(cells=cells, series=method, at=many))
            named[line_of(*cells.values())] = f"{method} {many}"
    jobs = [
        FunctionJob(label="handwritten", seed=seed, measure=measure_handwritten, settings={},
                    lines=named)
        for seed in range(10 if full else 5)
    ]  # fmt: skip
    return Size(lines=lines, jobs=jobs)


def _spaces(full: bool) -> Size:
    names = [f"before: {view}" for view in VIEWS]
    names += [f"{method}: {of}" for method in ("V-FedMV", "H-FedMV") for of in (*VIEWS, "Z")]
    lines = [Line(cells={"space": name}, series=name) for name in names]
    jobs = [
        FunctionJob(
            label="spaces", seed=seed, measure=measure_spaces, settings=_SIZE,
            lines={line.name: name for line, name in zip(lines, names, strict=True)},
        )
        for seed in range(10 if full else 3)
    ]  # fmt: skip
    return Size(lines=lines, jobs=jobs)


def _draw_spaces(path: Path) -> None:
    """t-SNE of the first seed's test rows in every space, a colour a class."""
    found, wanted_N = spaces(seed=0, **_SIZE), wanted_labels(seed=0, rows=_SIZE["rows"])
    with drawing(path, (12.0, 9.0)) as figure:
        grid = figure.subplots(3, 4)
        places = [at for at in range(12) if at != 3]
        grid.flat[3].remove()
        for at, (name, of_NF) in zip(places, found.items(), strict=True):
            flat_N2 = TSNE(init="pca", random_state=0).fit_transform(of_NF)
            for label, colour in enumerate((OURS, ATTACK)):
                kept = wanted_N == label
                grid.flat[at].scatter(*flat_N2[kept].T, s=6, color=colour, label=f"class {label}")
            grid.flat[at].set(title=name, xticks=[], yticks=[])
        figure.suptitle("synthetic sessions of typing: test rows, t-SNE")
        figure.legend(
            *grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
        )


TABLES = (
    PaperTable(
        name="fedmv-spaces",
        source="FedMV, Figure 5",
        title="Where people of the two classes lie before and after FedMV, synthetic sessions",
        unit="silhouette of the classes",
        reading=f"{_READING} Test rows; the picture is t-SNE of the first seed's.",
        leaves_out="seven of ten seeds",
        hours=0.5,
        shared=_SHARED,
        size=_spaces,
        picture=_draw_spaces,
    ),
    PaperTable(
        name="fedmv-keystrokes",
        source="FedMV, Tables 1 to 3",
        title="FedMV on synthetic sessions of typing",
        unit="%",
        reading=_READING,
        leaves_out="seven of ten seeds",
        hours=1.0,
        shared=_SHARED,
        size=_keystrokes,
        form=".1f",
    ),
    PaperTable(
        name="fedmv-weights",
        source="FedMV, Figure 6",
        title="FedMV by the weights of its objective, on synthetic sessions of typing",
        unit="accuracy, %",
        reading=f"{_READING} One weight differs from 8.",
        leaves_out="seven of ten seeds",
        hours=0.5,
        shared=_SHARED,
        size=_weights,
        axis="log2 of the weight",
        form=".1f",
    ),
    PaperTable(
        name="fedmv-handwritten",
        source="FedMV, sections 8.3 and 8.4, on other data",
        title="FedMV on Handwritten by the number of views",
        unit="accuracy, %",
        reading=(
            "Views in the order zer, fou, kar, pix, fac; four clients, equally many rows of each "
            "class; beta 4, all other weights 8. The paper does not use this set."
        ),
        leaves_out="five of ten seeds",
        hours=0.2,
        shared=_SHARED,
        size=_by_views,
        axis="views",
        form=".1f",
    ),
)
