"""Runs a trade-off study, and writes its leaderboard, pictures and page."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from joblib import Parallel, delayed, parallel_config

from apfed_experiments.report import write_report
from apfed_experiments.study import OnDone, Results, Study
from apfed_experiments.study_page import write_page, write_text
from apfed_experiments.tradeoff.board import Board
from apfed_experiments.tradeoff.picture import write_picture
from apfed_experiments.tradeoff.settings import DefencePoint, TradeOff, points_of
from secure_apfed.config.file import dump_settings
from secure_apfed.config.plain_yaml import read_text, yaml_value
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError
from secure_apfed.files import make_private, to_json

__all__ = ["READING", "TradeOffError", "run_tradeoff"]

READING = (
    "Each point is one defence at one strength: mean and 95 % interval over the seeds (corrected "
    "resampled t). "
    "Up is accurate, left is private. Advantage: an attack by one adversary minus its best "
    "baseline with the same knowledge, those that gain most by their mean over the seeds, which is "
    "a little optimistic for the attack. One whose interval holds 0 means that these attacks found "
    "nothing, not that there is nothing; where nothing leaks it is as often below 0 as above. The "
    "legend says (ε_x, ε_y, T): of one row's T releases with the encoder held fixed, and of "
    "labels; where nobody sends representations, ε_x is of all that a person adds to votes or sums "
    "of one passive. Lines: the active alone is the floor; one table of all features, which nobody "
    "holds, is what the same network reaches with them; TVFL needs all parties to predict. DCS is "
    "defined in docs/studies.md."
)


class TradeOffError(ApfedError):
    """A study cannot say what it was asked; its finished trials are kept."""


def run_tradeoff(
    tradeoff: TradeOff,
    folder: Path,
    *,
    jobs: int = 1,
    backend: Literal["loky", "ray"] = "loky",
    on_done: OnDone = lambda done, total: None,
) -> Board:
    """Run what is missing, and write the leaderboard, the pictures and the page.

    Every trial is a run folder of its own below `folder`; finished ones are not run again. A
    trial that ends with an error is named in the board's failures, and its point left out.

    Args:
        tradeoff: as `load_tradeoff` returns it.
        folder: of the study; made where missing.
        jobs: processes, each with one thread.
        backend: "loky" starts processes here; "ray" gives trials to a Ray cluster, the nodes of
            which share this file system.
        on_done: called with trials done and in all.

    Raises:
        ConfigError: a defence that no run accepts, or Ray is not installed.
        CheckpointError: the folder holds something else, or a trial's has other settings;
            nothing was run.
        TradeOffError: the undefended point failed, with which all others are compared.
    """
    points = points_of(tradeoff, folder)
    study = Study(points=points, seeds=range(tradeoff.seeds))
    with _in_processes(backend):
        _claim(folder, tradeoff, study)
        results = study.run(jobs=jobs, keep_going=True, on_done=on_done, solo=True)
        _refuse_without_undefended(tradeoff, points, results)
        board = Board.of(points, results)
        reported = [entry.point for entry in board.entries if not entry.point.centralised]
        Parallel(n_jobs=jobs)(delayed(write_report)(point.trial(0).path) for point in reported)
    write_text(folder / "leaderboard.csv", board.as_csv())
    write_text(folder / "leaderboard.md", board.as_markdown())
    write_text(folder / "points.json", to_json(board.as_json(), indent=2))
    deltas = {entry.point.config.delta for entry in board.entries}
    at_delta = f"ε_x holds at delta {', '.join(f'{delta:g}' for delta in sorted(deltas))}."
    write_page(
        folder,
        "tradeoff.html.jinja",
        pictures=[write_picture(board, target, folder) for target in board.targets],
        title=f"Trade-off {tradeoff.name}",
        reading=f"{READING} {at_delta}",
        header=board.header,
        rows=board.cells(),
        reports=[(point.label, f"{point.trial(0).name}/report.html") for point in reported],
        failures=board.failures,
    )
    return board


@contextmanager
def _in_processes(backend: Literal["loky", "ray"]) -> Iterator[None]:
    if backend == "ray":
        try:
            from ray.util.joblib import register_ray
        except ModuleNotFoundError:
            raise ConfigError(
                "backend ray: Ray is not installed; pip install ray, or use loky"
            ) from None
        register_ray()
    with parallel_config(backend=backend):
        yield


def _claim(folder: Path, tradeoff: TradeOff, study: Study) -> None:
    """Make the folder the study's, unless anything in it is not."""
    settings = folder / "study.yaml"
    if settings.is_file():
        past = _name_in(settings)
        if past != tradeoff.name:
            raise CheckpointError(
                f"{folder} holds the study {past!r}, this one is {tradeoff.name!r}; choose another "
                "--output"
            )
    elif (folder / "config.yaml").exists():
        raise CheckpointError(f"{folder} holds a run, not a study; choose another --output")
    for trial in study.trials:
        trial.refuse_another_run()
    make_private(folder)
    write_text(settings, dump_settings(tradeoff))


def _name_in(file: Path) -> str:
    """The study's name; whatever else the file says may be of an earlier version."""
    try:
        return str(yaml_value(read_text(file), given=str(file))["name"])
    except (ConfigError, TypeError, KeyError):
        raise CheckpointError(f"{file} names no study; remove it, and the study goes on") from None


def _refuse_without_undefended(
    tradeoff: TradeOff, points: Sequence[DefencePoint], results: Results
) -> None:
    """Raise where the point failed with which all others are compared."""
    undefended = next(point for point in points if point.undefended)
    failed = [failure for failure in results.failures if failure.point == undefended.name]
    if failed:
        raise TradeOffError(
            f"study {tradeoff.name}: {undefended.label!r}, which the others are compared with, "
            f"failed in {len(failed)} of {tradeoff.seeds} seeds. {failed[0].trial}: "
            f"{failed[0].message}"
        )
