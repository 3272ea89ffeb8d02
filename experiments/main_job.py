"""The main job: align, train, protect, attack and report, on two real data sets.

Breast cancer (three natural parties) and digits (four strips), each with SingleVL, TVFL and
its three lonely inferences, APFed-R and APFed-C, plain and protected, over several seeds. One YAML
file describes the protected run of a data set; every other one is derived from it by a variant, so
that all share data, networks and optimiser. Everything lies in one folder; a stopped job goes on
where it was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import Parallel, delayed
from matplotlib.axes import Axes

from experiments.report import write_report
from experiments.study import OnDone, Point, Results, Study, base_config
from experiments.study_page import (
    ATTACK,
    OTHER,
    OURS,
    Part,
    Picture,
    drawing,
    markdown,
    write_comparison,
    write_text,
)  # fmt: skip
from experiments.summary import Interval, Leakage, Summary
from secure_apfed.config import Config
from secure_apfed.plain_csv import to_csv
from secure_apfed.privacy import GuardSettings
from secure_apfed.settings.training import SumSettings

__all__ = [
    "CONFIGS", "HEADER", "READING", "VARIANTS", "Comparison", "Line", "Variant", "VariantPoint",
    "as_csv", "compare", "draw", "points_of", "run_main_job",
]  # fmt: skip

READING = (
    "Accuracy: on the active's test rows, mean and 95 % bootstrap interval over the seeds. \"TVFL, "
    "all parties\" needs every party to predict; every other row predicts with the active's "
    "features alone. TVFL can train on the aligned rows only, the others train on all of the "
    "active's. Epsilon: of one row's releases, replace-one, encoder held fixed, at delta 1e-5; "
    "labels and the model have no guarantee. Advantage: balanced accuracy of a passive that reads "
    "labels out of what it saw (model completion with 4 labels a class or none; under TVFL also "
    "the gradients it received), minus its best baseline with the same knowledge, each the best of "
    "several on the scored rows, by the attack and passive that gain most on average over the "
    "seeds. Where nothing leaks it is as often below 0 as above; an interval around 0 means that "
    "these attacks found nothing, not that there is nothing, and one that begins just above 0 is "
    "no finding: of five seeds one interval in six misses, and the highest of several means is "
    "shown."
)

CONFIGS = ("main-breast-cancer", "main-digits")
HEADER = ("method", "protection", "accuracy %", "bytes", "epsilon", "attack advantage")

# Inference variants of TVFL, in the paper's words; the others have one, named by the method.
_INFERENCE: Mapping[str, str] = {
    "tvfl": "TVFL, all parties",
    "tvfl_0": "TVFL-0",
    "tvfl_a": "TVFL-A",
    "tvfl_r": "TVFL-R",
}


@dataclass(frozen=True)
class Variant:
    """How a run differs from the protected one.

    Attributes:
        label: for people; method: a key of METHODS.
        protected: None where there is nothing to protect: nothing leaves the active.
        protection: for people.
    """

    label: str
    method: str
    protected: bool | None
    protection: str

    @property
    def key(self) -> str:
        """For folder names."""
        suffix = {None: "", True: "-protected", False: "-plain"}[self.protected]
        return f"{self.method}{suffix}"

    def of(self, base: Config) -> Config:
        """The run of this variant."""
        changes: dict[str, Any] = {"name": f"{base.name}-{self.key}", "method": self.method}
        if not self.protected:
            changes["guard"] = GuardSettings(mechanism="none")
            changes["secure_sum"] = SumSettings(
                scheme="plain", masks="none", clip=base.secure_sum.clip
            )
        return base.model_copy(update=changes)


VARIANTS: tuple[Variant, ...] = (
    Variant("SingleVL", "single_view", None, "nothing is sent"),
    Variant("TVFL", "tvfl", False, "none"),
    Variant("TVFL", "tvfl", True, "guard"),
    Variant("APFed-R", "apfed_r", False, "none"),
    Variant("APFed-R", "apfed_r", True, "guard + secure sum"),
    Variant("APFed-C", "apfed_c", False, "none"),
    Variant("APFed-C", "apfed_c", True, "guard + secure sum"),
)


@dataclass(frozen=True, kw_only=True)
class VariantPoint(Point):
    """The runs of one variant on one data set."""

    variant: Variant


def points_of(base: Config, folder: Path) -> list[VariantPoint]:
    """All variants of one data set, whose runs lie in a folder of its name."""
    return [
        VariantPoint(config=variant.of(base), folder=folder / base.name, variant=variant)
        for variant in VARIANTS
    ]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a variant, and one of its ways of inference."""

    method: str
    variant: Variant
    accuracy: Interval
    summary: Summary

    @property
    def leakage(self) -> Leakage | None:
        """Of labels; None where no attack applied."""
        return self.summary.leakage.get("labels")

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of `HEADER`."""
        epsilon, wire_bytes = self.summary.epsilon_x, self.summary.wire_bytes
        advantage = "not applicable"
        if self.leakage is not None:
            missing = f" ({self.leakage.missing})" if self.leakage.missing else ""
            advantage = self.leakage.advantage.text(form=".3f") + missing
        return (
            self.method,
            self.variant.protection,
            self.accuracy.text(scale=100),
            f"{wire_bytes / 1e6:.1f} MB" if wire_bytes else "0",
            "∞" if math.isinf(epsilon) else f"{epsilon:.3g}",
            advantage,
        )


def compare(points: Sequence[VariantPoint], results: Results) -> list[Line]:
    """Lines in the order of the variants, one for each way of inference."""
    summaries = [(point.variant, Summary.of(results.of(point))) for point in points]
    return [
        Line(
            method=_INFERENCE.get(inference, variant.label),
            variant=variant,
            accuracy=accuracy,
            summary=summary,
        )
        for variant, summary in summaries
        for inference, accuracy in summary.accuracies.items()
    ]


def as_csv(lines: Sequence[Line]) -> str:
    """The table with plain numbers."""
    rows = []
    for line in lines:
        gain = line.leakage.advantage if line.leakage else Interval(math.nan, math.nan, math.nan)
        rows.append({
            "method": line.method, "protection": line.variant.protection,
            "accuracy": line.accuracy.mean, "accuracy_low": line.accuracy.low,
            "accuracy_high": line.accuracy.high, "bytes": line.summary.wire_bytes,
            "epsilon": line.summary.epsilon_x, "advantage": gain.mean, "advantage_low": gain.low,
            "advantage_high": gain.high,
        })  # fmt: skip
    return to_csv(pd.DataFrame(rows))


@dataclass(frozen=True)
class Comparison:
    """A finished table of one data set."""

    config: Config
    points: Sequence[VariantPoint]
    lines: Sequence[Line]

    def title(self, seeds: int) -> str:
        """What was compared, in a line."""
        data = self.config.data
        return (
            f"{data.dataset}: {data.view_count} parties with features, overlap "
            f"{data.overlap:.0%}, {seeds} seed{'' if seeds == 1 else 's'}"
        )


def run_main_job(
    folder: Path, *, seeds: Sequence[int], jobs: int, on_done: OnDone = lambda done, total: None
) -> list[Comparison]:
    """Run every trial that is missing, then write tables, and the reports of the first seed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    parts = [(base, points_of(base, folder)) for base in map(base_config, CONFIGS)]
    points = [point for _, of_base in parts for point in of_base]
    results = Study(points=points, seeds=seeds).run(jobs=jobs, on_done=on_done)
    Parallel(n_jobs=jobs)(delayed(write_report)(point.trial(seeds[0]).path) for point in points)
    found = [Comparison(base, of_base, compare(of_base, results)) for base, of_base in parts]
    for comparison in found:
        path, lines = folder / comparison.config.name, comparison.lines
        write_text(path.with_suffix(".csv"), as_csv(lines))
        write_text(path.with_suffix(".md"), markdown(HEADER, [line.cells() for line in lines]))
    write_comparison(
        folder,
        title="The main job: every method, plain and protected",
        reading=READING,
        header=HEADER,
        parts=[_part(comparison, folder, seeds) for comparison in found],
    )
    return found


def _part(comparison: Comparison, folder: Path, seeds: Sequence[int]) -> Part:
    title, lines = comparison.title(len(seeds)), comparison.lines
    reported = [point.trial(seeds[0]).path for point in comparison.points]
    return Part(
        title=title,
        picture=draw(folder / f"{comparison.config.name}.png", title=title, lines=lines),
        rows=[line.cells() for line in lines],
        reports=[(path.name, f"{path.relative_to(folder)}/report.html") for path in reported],
    )


def draw(path: Path, *, title: str, lines: Sequence[Line]) -> Picture:
    """Accuracy and attack advantage of each line, side by side."""
    with drawing(path, (8.0, 0.9 + 0.33 * len(lines))) as figure:
        accuracy, advantage = figure.subplots(1, 2, sharey=True)
        _dots(accuracy, lines, [line.accuracy for line in lines], colour=OURS, scale=100)
        accuracy.set(title="Test accuracy", xlabel="per cent")
        alone = next((line for line in lines if line.variant.protected is None), None)
        if alone is not None:
            accuracy.axvline(alone.accuracy.mean * 100, color=OTHER, linestyle=":", linewidth=1.2)
        gains = [line.leakage.advantage if line.leakage else None for line in lines]
        _dots(advantage, lines, gains, colour=ATTACK)
        advantage.set(title="Attack advantage", xlabel="balanced accuracy over baseline")
        advantage.axvline(0, color=OTHER, linewidth=1)
    return Picture(
        path=path,
        title=title,
        caption="Means over the seeds with 95 % intervals. Dotted: SingleVL, the active alone. "
        "Guarded lines are filled, unguarded ones hollow.",
    )


def _dots(
    axes: Axes, lines: Sequence[Line], intervals: Sequence[Interval | None], *, colour: str,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """One dot and interval a line, the first line on top."""
    for height, (line, interval) in enumerate(zip(lines, intervals, strict=True)):
        if interval is not None:
            axes.errorbar(
                interval.mean * scale, -height, xerr=interval.arms(scale), fmt="o", color=colour,
                markerfacecolor=colour if line.variant.protected else "white", capsize=2.5,
            )  # fmt: skip
    axes.set_yticks([-height for height in range(len(lines))])
    axes.set_yticklabels(
        [f"{line.method}, guarded" if line.variant.protected else line.method for line in lines]
    )
    axes.grid(visible=False, axis="y")
