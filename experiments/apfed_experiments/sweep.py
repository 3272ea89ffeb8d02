"""Accuracy against epsilon: fresh noise, frozen noise and label DP, beside lines to compare with.

`secure-apfed study sweep`: each point is a run of a shipped configuration with one thing
changed. A stopped sweep goes on where it was.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apfed_experiments.columns import EPSILON, Column, Table, stored, within, write_text
from apfed_experiments.study import Line, OnDone, Point, Results, Study, base_config
from apfed_experiments.summary import Interval, Row, Summary, accuracy_of
from secure_apfed.config import Config
from secure_apfed.data.catalogue import view_count
from secure_apfed.files import to_json
from secure_apfed.methods import method_settings
from secure_apfed.settings.privacy import GuardSettings, LabelSettings

READING = (
    "Accuracy on the active's test rows and what is lost against the same method and seed without "
    "protection, each a mean over the seeds with its 95 % interval (corrected resampled t). "
    "epsilon_x covers one row's releases with the encoder held fixed, at delta 1e-5, and no label; "
    "epsilon_y covers one training label and no features; whole records of the finished model have "
    'no guarantee in any line. Every training row is aligned, few have a label. "Centralised" is '
    "one model on all parties' features, which nobody holds."
)
CONFIGS = ("sweep-digits", "sweep-breast-cancer")
EPSILONS = (1.0, 4.0, 8.0)
COLUMNS = (
    Column(name="label", title="line"),
    Column(name="protects", title="protects"),
    EPSILON,
    Column(name="accuracy", title="accuracy %", form=within(".1f", scale=100)),
    Column(name="lost", title="lost against no protection", form=within(".1f", scale=100)),
)
_UNPROTECTED = {"apfed_c": "plain", "single_view": "single"}


LINES: tuple[Line, ...] = (
    Line(key="single", label="SingleVL", settings={"method": "single_view"}),
    Line(key="centralised", label="centralised, all features", settings={"method": "single_view"},
         centralised=True),
    Line(key="plain", label="APFed-C, no protection", settings={"method": "apfed_c"}),
    Line(key="fresh", label="APFed-C, fresh noise",
         settings={"method": "apfed_c", "guard": "gaussian"}),
    Line(key="frozen", label="APFed-C, frozen noise",
         settings={"method": "apfed_c", "guard": "frozen_gaussian"}),
    Line(key="response", label="APFed-C, label DP (randomised response)",
         settings={"method": "apfed_c", "labels": "randomised_response"}),
    Line(key="stages", label="APFed-C, label DP (LP-MST)",
         settings={"method": "apfed_c", "labels": "lp_mst"}),
    Line(key="single-response", label="SingleVL, label DP (randomised response)",
         settings={"method": "single_view", "labels": "randomised_response"}),
)  # fmt: skip


def _swept(line: Line) -> bool:
    """Whether the line has a mechanism, and a point for each epsilon, or one for all."""
    return len(line.settings) > 1


def _config(line: Line, base: Config, epsilon: float) -> Config:
    def mechanism(section: str) -> dict[str, Any]:
        name = line.settings.get(section, "none")
        return {"mechanism": name} | ({} if name == "none" else {"epsilon": epsilon})

    # Noise that the seed repeats: the sweep must be repeatable, nobody is protected.
    guard = {"clip": base.guard.clip, "noise": "reproducible_insecure", **mechanism("guard")}
    return base.model_copy(update={
        "name": f"{base.name}-{line.key}-{epsilon:g}".replace("+", ""),
        "method": method_settings(line.method),
        "guard": GuardSettings.model_validate(guard),
        "labels": LabelSettings.model_validate(mechanism("labels")),
    })  # fmt: skip


def points_of(base: Config, folder: Path, *, epsilons: Sequence[float] = EPSILONS) -> list[Point]:
    """All points of one data set in the order of lines and epsilons; figures alone are kept."""
    return [
        Point(config=_config(line, base, epsilon), folder=folder, figures_only=True, alone=base,
              centralised=line.centralised, line=line)
        for line in LINES
        for epsilon in (sorted(epsilons) if _swept(line) else (math.inf,))
    ]  # fmt: skip


def summarise(points: Sequence[Point], results: Results) -> list[Row]:
    """The points of one data set, each beside the same method without protection.

    `loss`: accuracy of the same method without protection minus this, seed by seed.
    """
    accuracies = {point.name: accuracy_of(results.of(point)) for point in points}
    unprotected = {
        point.line.key: accuracies[point.name] for point in points if not _swept(point.line)
    }
    rows: list[Row] = []
    for point in points:
        line, summary = point.line, Summary.of(results.of(point))
        lost = unprotected[_UNPROTECTED[line.method]] - accuracies[point.name]
        loss = Interval.of(lost.tolist(), shared=float(results.of(point)["shared"].max()))
        guard, labels = (line.settings.get(part, "none") for part in ("guard", "labels"))
        asked = point.config.guard.epsilon, point.config.labels.epsilon
        if _swept(line):
            guarded = guard != "none"
            protects = "released rows (epsilon_x)" if guarded else "training labels (epsilon_y)"
        else:
            protects = "nothing is sent" if summary.releases == 0 else "nothing"
        rows.append({
            "label": line.label, "method": line.method, "guard": guard, "labels": labels,
            "epsilon": asked[0] or asked[1] or math.inf, "releases": summary.releases,
            "accuracy": summary.accuracy, "loss": loss, "protects": protects,
            "lost": loss if _swept(line) else None, "line": line, "gain": summary.gain,
        })  # fmt: skip
    return rows


_STORED = stored("label", "method", "guard", "labels", "epsilon", "releases", "accuracy", "loss")


def _title(base: Config, seeds: Sequence[int]) -> str:
    data, count = base.data, len(seeds)
    rows = f", {data.limit:,} training rows" if data.limit else ""
    rows += f", {data.labelled:,} labelled rows" if data.labelled else ""
    return (
        f"{data.dataset}: {view_count(data)} parties with features{rows}, "
        f"{base.train.epochs} epochs, {count} seed{'' if count == 1 else 's'}"
    )


def _stored(base: Config, seeds: Sequence[int], rows: Sequence[Row]) -> dict[str, Any]:
    """Settings, seeds, and every point that a run can have."""
    settings = base.model_dump(mode="json", include={"data", "model", "train", "secure_sum"})
    possible = [row for row in rows if not row["line"].centralised]
    return {
        "dataset": base.data.dataset, "settings": settings, "delta": base.delta,
        "clip": base.guard.clip, "seeds": list(seeds), "points": Table(_STORED, possible).plain(),
    }  # fmt: skip


def run_sweep(
    folder: Path, *, seeds: Sequence[int], jobs: int, configs: Sequence[str] = CONFIGS,
    on_done: OnDone = lambda done, total: None,
) -> list[Table]:  # fmt: skip
    """Run every point that is missing, then write what all of them say."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    parts = [(base, points_of(base, folder / base.name)) for base in map(base_config, configs)]
    points = [point for _, of_base in parts for point in of_base]
    results = Study(points=points, seeds=seeds).run(jobs=jobs, on_done=on_done, solo=True)
    tables = [
        Table(COLUMNS, summarise(of_base, results), _title(base, seeds)) for base, of_base in parts
    ]
    for (base, _), table in zip(parts, tables, strict=True):
        write_text(folder / f"epsilon-{base.name}.md", table.markdown())
    summary = {
        "format": 1, "command": f"secure-apfed study sweep --seeds {len(seeds)}",
        "sweeps": [
            _stored(base, seeds, table.rows) for (base, _), table in zip(parts, tables, strict=True)
        ],
    }  # fmt: skip
    write_text(folder / "summary.json", to_json(summary, indent=1) + "\n")
    return tables
