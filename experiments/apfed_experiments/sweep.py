"""Accuracy against epsilon: fresh noise, frozen noise and label DP, beside lines to compare with.

`secure-apfed study sweep`: each point is a run of a shipped configuration with one thing
changed. A stopped sweep goes on where it was; `secure-apfed plan` reads what it stores.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from apfed_experiments.columns import markdown, write_text
from apfed_experiments.drawing import OTHER, Picture, drawing
from apfed_experiments.report.page import Part, write_comparison
from apfed_experiments.study import OnDone, Point, Results, Study, base_config
from apfed_experiments.summary import Gain, Interval, Summary, accuracy_of
from secure_apfed.config import Config
from secure_apfed.data.catalogue import view_count
from secure_apfed.files import to_json
from secure_apfed.methods import method_settings
from secure_apfed.settings.privacy import GuardSettings, LabelSettings

__all__ = [
    "CONFIGS", "EPSILONS", "HEADER", "LINES", "READING", "Line", "PointSummary", "Sweep",
    "SweepPoint", "draw", "points_of", "run_sweep", "summarise",
]  # fmt: skip

READING = (
    "Accuracy on the active's test rows and what is lost against the same method and seed without "
    "protection, each a mean over the seeds with its 95 % interval (corrected resampled t). "
    "epsilon_x covers one "
    "row's releases with the encoder held fixed, at delta 1e-5, and no label; epsilon_y covers one "
    "training label and no features; whole records of the finished model have no guarantee in any "
    'line. Every training row is aligned, few have a label. "Centralised" is one model on all '
    "parties' features, which nobody holds."
)

CONFIGS = ("sweep-digits", "sweep-breast-cancer")
EPSILONS = (1.0, 4.0, 8.0)
HEADER = ("line", "protects", "epsilon", "accuracy %", "lost against no protection")
_UNPROTECTED = {"apfed_c": "plain", "single_view": "single"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One way of protecting, at several strengths or at none.

    Attributes:
        key: for files; label: for people.
        method: a key of METHODS.
        guard, labels: the mechanism that takes the sweep's epsilons; "none" where it has none.
        centralised: all features in one table.
    """

    key: str
    label: str
    method: str
    guard: str = "none"
    labels: str = "none"
    centralised: bool = False

    @property
    def swept(self) -> bool:
        """Whether the line has a point for each epsilon, or one for all."""
        return self.guard != "none" or self.labels != "none"

    def of(self, base: Config, epsilon: float) -> Config:
        """The run of one point."""
        changes: dict[str, Any] = {
            "name": f"{base.name}-{self.key}-{epsilon:g}".replace("+", ""),
            "method": method_settings(self.method),
            "guard": GuardSettings.model_validate(
                # Noise that the seed repeats: the sweep must be repeatable, nobody is protected.
                {"mechanism": self.guard, "clip": base.guard.clip,
                 "noise": "reproducible_insecure"}
                | ({"epsilon": epsilon} if self.guard != "none" else {})
            ),
            "labels": LabelSettings.model_validate(
                {"mechanism": self.labels}
                | ({"epsilon": epsilon} if self.labels != "none" else {})
            ),
        }  # fmt: skip
        return base.model_copy(update=changes)


LINES: tuple[Line, ...] = (
    Line(key="single", label="SingleVL", method="single_view"),
    Line(
        key="centralised", label="centralised, all features", method="single_view", centralised=True
    ),
    Line(key="plain", label="APFed-C, no protection", method="apfed_c"),
    Line(key="fresh", label="APFed-C, fresh noise", method="apfed_c", guard="gaussian"),
    Line(key="frozen", label="APFed-C, frozen noise", method="apfed_c", guard="frozen_gaussian"),
    Line(
        key="response", label="APFed-C, label DP (randomised response)", method="apfed_c",
        labels="randomised_response",
    ),
    Line(key="stages", label="APFed-C, label DP (LP-MST)", method="apfed_c", labels="lp_mst"),
    Line(
        key="single-response", label="SingleVL, label DP (randomised response)",
        method="single_view", labels="randomised_response",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepPoint(Point):
    """One line at one epsilon.

    Attributes:
        epsilon: asked for: epsilon_x where a guard takes it, epsilon_y where a label mechanism
            does; infinite where nothing protects.
    """

    line: Line
    epsilon: float


def points_of(
    base: Config, folder: Path, *, epsilons: Sequence[float] = EPSILONS
) -> list[SweepPoint]:
    """All points of one data set in the order of lines and epsilons; figures alone are kept."""
    return [
        SweepPoint(
            config=line.of(base, epsilon), folder=folder, figures_only=True, alone=base,
            centralised=line.centralised, line=line, epsilon=epsilon,
        )
        for line in LINES
        for epsilon in (sorted(epsilons) if line.swept else (math.inf,))
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PointSummary:
    """One point over all seeds.

    Attributes:
        loss: accuracy of the same method without protection minus this, seed by seed.
    """

    point: SweepPoint
    summary: Summary
    loss: Interval

    @property
    def accuracy(self) -> Interval:
        return self.summary.accuracy

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of `HEADER`."""
        line, epsilon = self.point.line, self.point.epsilon
        if line.guard != "none":
            protects = "released rows (epsilon_x)"
        elif line.labels != "none":
            protects = "training labels (epsilon_y)"
        else:
            protects = "nothing is sent" if self.summary.releases == 0 else "nothing"
        return (
            line.label,
            protects,
            "∞" if math.isinf(epsilon) else f"{epsilon:g}",
            self.accuracy.text(scale=100),
            self.loss.text(scale=100) if line.swept else "",
        )


def summarise(points: Sequence[SweepPoint], results: Results) -> list[PointSummary]:
    """The points of one data set, each beside the same method without protection."""
    accuracies = {point.name: accuracy_of(results.of(point)) for point in points}
    unprotected = {
        point.line.key: accuracies[point.name] for point in points if not point.line.swept
    }
    return [
        PointSummary(
            point=point,
            summary=Summary.of(results.of(point)),
            loss=Interval.of(
                (unprotected[_UNPROTECTED[point.line.method]] - accuracies[point.name]).tolist(),
                shared=float(results.of(point)["shared"].max()),
            ),
        )
        for point in points
    ]


@dataclass(frozen=True)
class Sweep:
    """A finished sweep of one data set."""

    base: Config
    seeds: Sequence[int]
    points: Sequence[PointSummary]

    @property
    def title(self) -> str:
        """What was swept, in a line."""
        data, train, count = self.base.data, self.base.train, len(self.seeds)
        rows = f", {data.limit:,} training rows" if data.limit else ""
        rows += f", {data.labelled:,} labelled rows" if data.labelled else ""
        return (
            f"{data.dataset}: {view_count(data)} parties with features{rows}, "
            f"{train.epochs} epochs, {count} seed{'' if count == 1 else 's'}"
        )

    def cells(self) -> list[tuple[str, ...]]:
        return [point.cells() for point in self.points]

    def stored(self) -> dict[str, Any]:
        """What `secure-apfed plan` reads: settings, seeds, and every point that a run can have."""
        settings = self.base.model_dump(
            mode="json", include={"data", "model", "train", "secure_sum"}
        )
        return {
            "dataset": self.base.data.dataset,
            "settings": settings,
            "delta": self.base.delta,
            "clip": self.base.guard.clip,
            "seeds": list(self.seeds),
            "points": [
                {
                    "label": summary.point.line.label, "method": summary.point.line.method,
                    "guard": summary.point.line.guard, "labels": summary.point.line.labels,
                    "epsilon": summary.point.epsilon, "releases": summary.summary.releases,
                    "accuracy": asdict(summary.accuracy), "loss": asdict(summary.loss),
                }
                for summary in self.points if not summary.point.centralised
            ],
        }  # fmt: skip


def run_sweep(
    folder: Path, *, seeds: Sequence[int], jobs: int, epsilons: Sequence[float] = EPSILONS,
    configs: Sequence[str] = CONFIGS, store: Path | None = None, figures: Path | None = None,
    on_done: OnDone = lambda done, total: None,
) -> list[Sweep]:  # fmt: skip
    """Run every point that is missing, then write what all of them say.

    Args:
        folder: of the sweep; made where missing.
        seeds: one run of each point for each.
        jobs: processes; each uses one thread.
        epsilons: of every line that protects.
        configs: names of shipped configurations.
        store: file of the summary that `secure-apfed plan` reads, or None.
        figures: folder to copy the pictures to, or None.
        on_done: called after each run.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    parts = [
        (base, points_of(base, folder / base.name, epsilons=epsilons))
        for base in map(base_config, configs)
    ]
    points = [point for _, of_base in parts for point in of_base]
    results = Study(points=points, seeds=seeds).run(jobs=jobs, on_done=on_done, solo=True)
    sweeps = [Sweep(base, seeds, summarise(of_base, results)) for base, of_base in parts]
    pictures = []
    for sweep in sweeps:
        path = folder / f"epsilon-{sweep.base.name}.png"
        pictures.append(draw(path, title=sweep.title, points=sweep.points))
        write_text(path.with_suffix(".md"), markdown(HEADER, sweep.cells()))
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, figures / path.name)
    write_comparison(
        folder, title="Accuracy against epsilon", reading=READING, header=HEADER,
        parts=[Part(title=sweep.title, picture=picture, rows=sweep.cells())
               for sweep, picture in zip(sweeps, pictures, strict=True)],
    )  # fmt: skip
    summary = {
        "format": 1,
        "command": f"secure-apfed study sweep --seeds {len(seeds)}",
        "sweeps": [sweep.stored() for sweep in sweeps],
    }
    write_text(folder / "summary.json", to_json(summary, indent=1) + "\n")
    if store is not None:
        shutil.copy(folder / "summary.json", store)
    return sweeps


_LOOKS = {
    "fresh": ("#0072b2", "o", "-"),
    "frozen": ("#56b4e9", "s", "-"),
    "response": ("#d55e00", "^", "-"),
    "stages": ("#e69f00", "v", "-"),
    "single-response": ("#cc79a7", "D", "--"),
}
_FLAT = {"single": ("#24292f", ":"), "centralised": ("#009e73", "--"), "plain": ("#8a8f98", "-.")}
_APART = 0.05


def _draw_gain(axes: Axes, gain: Gain) -> None:
    """The best solo model, and on the right what stands above it: the gain of help."""
    solo = 100 * gain.solo
    axes.axhline(solo, color=OTHER, linestyle=":", label=f"best solo model ({gain.baseline})")
    low, high = axes.get_ylim()
    right = axes.twinx()
    right.set_ylim(low - solo, high - solo)
    right.set_ylabel("points over the best solo model")
    right.grid(visible=False)


def _draw_swept(
    axes: Axes, lines: Mapping[str, Sequence[PointSummary]], epsilons: Sequence[float]
) -> None:
    """Each line over its epsilons, moved apart a little, so that no interval hides another."""
    for at, (key, (colour, marker, style)) in enumerate(_LOOKS.items()):
        line = lines[key]
        arms = [summary.accuracy.arms(100) for summary in line]
        shift = (at - (len(_LOOKS) - 1) / 2) * _APART
        axes.errorbar(
            [epsilons.index(summary.point.epsilon) + shift for summary in line],
            [100 * summary.accuracy.mean for summary in line],
            yerr=[[below for (below,), _ in arms], [above for _, (above,) in arms]],
            color=colour, marker=marker, linestyle=style, capsize=2.5, markersize=6,
            label=line[0].point.line.label if line else key,
        )  # fmt: skip


def draw(path: Path, *, title: str, points: Sequence[PointSummary]) -> Picture:
    """Accuracy over epsilon, and lines that bound what one may hope for, of one data set."""
    lines = {key: [one for one in points if one.point.line.key == key] for key in (*_LOOKS, *_FLAT)}
    epsilons = sorted({one.point.epsilon for one in points if one.point.line.swept})
    with drawing(path, (8.0, 5.6)) as figure:
        axes = figure.subplots()
        for key, (colour, style) in _FLAT.items():
            for summary in lines[key]:
                accuracy, label = summary.accuracy, summary.point.line.label
                axes.axhline(100 * accuracy.mean, color=colour, linestyle=style, label=label)
                if math.isfinite(accuracy.low):
                    low, high = 100 * accuracy.low, 100 * accuracy.high
                    axes.axhspan(low, high, color=colour, alpha=0.09, lw=0)
        _draw_swept(axes, lines, epsilons)
        axes.set_xticks(range(len(epsilons)), [f"{epsilon:g}" for epsilon in epsilons])
        axes.set_xlim(-0.35, len(epsilons) - 0.65)
        axes.set(
            title=title, ylabel="test accuracy, per cent",
            xlabel="epsilon\nblue: of one row's releases, at delta 1e-5; red, orange, pink: of one "
            "training label",
        )  # fmt: skip
        axes.grid(visible=False, axis="x")
        if points and points[0].summary.gain:
            _draw_gain(axes, points[0].summary.gain)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return Picture(
        path=path, title=title,
        caption="Means over the seeds with 95 % intervals (corrected resampled t). Blue lines "
        "protect released "
        "rows with the encoder held fixed and no label; red, orange and pink ones protect training "
        "labels and no features: their epsilons do not compare. The bands are intervals of "
        "SingleVL, of one model on all parties' features, and of APFed-C without protection.",
    )  # fmt: skip
