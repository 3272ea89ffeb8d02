"""The main job: align, train, protect, attack and report, on two real data sets.

Breast cancer (three natural parties) and digits (four strips), each with SingleVL, TVFL and
its three lonely inferences, APFed-R and APFed-C, plain and protected, over several seeds.
Everything lies in one folder; a stopped job goes on where it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from joblib import Parallel, delayed

from experiments.comparison import Line, as_csv, as_markdown, compare
from experiments.report import write_report
from experiments.report.comparison import Part, write_comparison
from experiments.trials import Trial, TrialResult, run_trial, trials
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text

__all__ = ["CONFIGS", "READING", "Comparison", "base_config", "run_main_job"]

READING = (
    "Accuracy: on the active's test rows, mean and 95 % interval over the seeds. \"TVFL, all "
    "parties\" needs every party to predict; every other row predicts with the active's features "
    "alone. TVFL can train on the aligned rows only, the others train on all of the active's. "
    "Epsilon: of one row's releases, replace-one, encoder held fixed, at delta 1e-5; labels and "
    "the model have no guarantee. Advantage: balanced accuracy of a passive that reads labels out "
    "of what it saw (model completion with 4 labels a class or none; under TVFL also the gradients "
    "it received), minus its best baseline with the same knowledge, each the best of several on "
    "the scored rows, by the attack and passive that gain most on average over the seeds. Where "
    "nothing leaks it is as often below 0 as above; an interval around 0 means that these attacks "
    "found nothing, not that there is nothing."
)

CONFIGS = ("main-breast-cancer", "main-digits")


@dataclass(frozen=True)
class Comparison:
    """A finished table of one data set, and the folder of its runs."""

    config: Config
    lines: list[Line]
    folder: Path

    def title(self, seeds: int) -> str:
        """What was compared, in a line."""
        data = self.config.data
        return (
            f"{data.dataset}: {data.view_count} parties with features, overlap "
            f"{data.overlap:.0%}, {seeds} seed{'' if seeds == 1 else 's'}"
        )


def base_config(name: str) -> Config:
    """A configuration that ships with this package, by the name of its file."""
    text = (files("experiments") / "configs" / f"{name}.yaml").read_text("utf-8")
    return load_config_text(text, source=f"{name}.yaml")


def run_main_job(
    folder: Path,
    *,
    seeds: Sequence[int],
    jobs: int,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> list[Comparison]:
    """Run every trial, then write tables and the reports of the first seed.

    Args:
        folder: of the job; made where missing.
        seeds: one run of each variant for each.
        jobs: processes; each uses one thread.
        on_done: called with trials done and in all.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    work = {name: list(_trials(name, folder, seeds)) for name in CONFIGS}
    every = [trial for listed in work.values() for trial in listed]
    results: dict[Path, TrialResult] = {}
    finished = Parallel(n_jobs=jobs, return_as="generator_unordered")(
        delayed(_finished)(trial) for trial in every
    )
    for path, result in finished:
        results[path] = result
        on_done(len(results), len(every))
    reported = [trial.folder for trial in every if trial.config.seed == seeds[0]]
    Parallel(n_jobs=jobs)(delayed(write_report)(path) for path in reported)
    comparisons = [
        _write_tables(name, folder, [results[trial.folder] for trial in listed])
        for name, listed in work.items()
    ]
    write_comparison(
        folder,
        title="The main job: every method, plain and protected",
        reading=READING,
        parts=[_part(comparison, folder, reported, seeds=len(seeds)) for comparison in comparisons],
    )
    return comparisons


def _part(comparison: Comparison, folder: Path, reported: Sequence[Path], *, seeds: int) -> Part:
    own = [path for path in reported if path.is_relative_to(comparison.folder)]
    return Part(
        name=comparison.config.name,
        title=comparison.title(seeds),
        lines=comparison.lines,
        reports=[(path.name, f"{path.relative_to(folder)}/report.html") for path in own],
    )


def _trials(name: str, folder: Path, seeds: Sequence[int]) -> list[Trial]:
    base = base_config(name)
    return list(trials(base, folder / base.name, seeds))


def _finished(trial: Trial) -> tuple[Path, TrialResult]:
    return trial.folder, run_trial(trial)


def _write_tables(name: str, folder: Path, results: Sequence[TrialResult]) -> Comparison:
    base = base_config(name)
    lines = compare(results)
    (folder / f"{base.name}.csv").write_text(as_csv(lines), encoding="utf-8")
    (folder / f"{base.name}.md").write_text(as_markdown(lines), encoding="utf-8")
    return Comparison(base, lines, folder / base.name)
