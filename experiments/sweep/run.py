"""Running a sweep: every point once, then tables, pictures, a page, and what `plan` reads."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from joblib import Parallel, delayed

from experiments.main_job import base_config
from experiments.report.page import fill, inside
from experiments.sweep.picture import draw
from experiments.sweep.points import CONFIGS, EPSILONS, Point, PointResult, points_of, run_point
from experiments.sweep.summary import HEADER, PointSummary, as_markdown, stored, summarise
from secure_apfed.config import Config
from secure_apfed.plain_json import to_json

__all__ = ["READING", "Sweep", "run_sweep"]

READING = (
    "Accuracy on the active's test rows and what is lost against the same method and seed without "
    "protection, each a mean over the seeds with its 95 % bootstrap interval. epsilon_x covers one "
    "row's releases with the encoder held fixed, at delta 1e-5, and no label; epsilon_y covers one "
    "training label and no features; whole records of the finished model have no guarantee in any "
    'line. Every training row is aligned. "Centralised" is one model on all parties\' features, '
    "which nobody holds."
)


@dataclass(frozen=True)
class Sweep:
    """A finished sweep of one data set."""

    base: Config
    points: Sequence[PointSummary]

    def title(self, seeds: int) -> str:
        """What was swept, in a line."""
        data, train = self.base.data, self.base.train
        rows = f", {data.limit:,} training rows" if data.limit else ""
        return (
            f"{data.dataset}: {data.view_count} parties with features{rows}, "
            f"{train.epochs} epochs, {seeds} seed{'' if seeds == 1 else 's'}"
        )


def run_sweep(
    folder: Path, *, seeds: Sequence[int], jobs: int, epsilons: Sequence[float] = EPSILONS,
    configs: Sequence[str] = CONFIGS, store: Path | None = None, figures: Path | None = None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
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
        on_done: called with points done and in all.

    Raises:
        CheckpointError: the folder holds points with other settings.
    """
    bases = [base_config(name) for name in configs]
    # Seed by seed, so that a stopped sweep has whole seeds.
    every = [
        (base.name, point)
        for seed in seeds
        for base in bases
        for point in points_of(base, folder / base.name, seeds=[seed], epsilons=epsilons)
    ]
    results: list[tuple[str, PointResult]] = []
    finished = Parallel(n_jobs=jobs, return_as="generator_unordered")(
        delayed(_finished)(name, point) for name, point in every
    )
    for one in finished:
        results.append(one)
        on_done(len(results), len(every))
    sweeps = [
        Sweep(base, summarise([result for name, result in results if name == base.name]))
        for base in bases
    ]
    _write(sweeps, folder, seeds=seeds, store=store, figures=figures)
    return sweeps


def _finished(name: str, point: Point) -> tuple[str, PointResult]:
    return name, run_point(point)


def _write(
    sweeps: Sequence[Sweep], folder: Path, *, seeds: Sequence[int], store: Path | None,
    figures: Path | None,
) -> None:  # fmt: skip
    parts = []
    for sweep in sweeps:
        name, title = f"epsilon-{sweep.base.name}", sweep.title(len(seeds))
        (folder / f"{name}.md").write_text(as_markdown(sweep.points), encoding="utf-8")
        picture = draw(folder / f"{name}.png", title=title, points=sweep.points)
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture.path, figures / picture.path.name)
        rows = [point.cells() for point in sweep.points]
        parts.append({"title": title, "picture": inside(picture), "rows": rows, "reports": []})
    page = fill(
        "comparison.html.jinja", title="Accuracy against epsilon", reading=READING, header=HEADER,
        parts=parts,
    )  # fmt: skip
    (folder / "index.html").write_text(page, encoding="utf-8")
    summary = {
        "format": 1,
        "command": f"python -m experiments sweep --seeds {len(seeds)}",
        "sweeps": [stored(sweep.base, seeds, sweep.points) for sweep in sweeps],
    }
    (folder / "summary.json").write_text(to_json(summary, indent=1) + "\n", encoding="utf-8")
    if store is not None:
        shutil.copy(folder / "summary.json", store)
