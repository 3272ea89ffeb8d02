"""Runs a study: every trial that is not done yet, in several processes, then its pages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from joblib import Parallel, delayed, parallel_config

from experiments.report import write_report
from experiments.tradeoff.board import Board
from experiments.tradeoff.outcome import Outcome
from experiments.tradeoff.page import write_page
from experiments.tradeoff.study import Point, Study, StudyError, points
from experiments.tradeoff.trial import Failure, Trial, attempt, trials_of
from secure_apfed.config.file import dump_settings
from secure_apfed.config.plain_yaml import read_text, yaml_value
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.plain_json import to_json
from secure_apfed.runs.folder import make_private, write_atomically

__all__ = ["run_study"]


def run_study(
    study: Study,
    folder: Path,
    *,
    jobs: int = 1,
    backend: Literal["loky", "ray"] = "loky",
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Board:
    """Run what is missing, and write the leaderboard, the pictures and the page.

    Every trial is a run folder of its own below `folder`; finished ones are not run again. A
    trial that ends with an error is named in the board's failures, and its point left out.

    Args:
        study: as `load_study` returns it.
        folder: of the study; made where missing.
        jobs: processes, each with one thread.
        backend: "loky" starts them here; "ray" gives the trials to a Ray cluster whose nodes
            share this file system.
        on_done: called with trials done and in all.

    Raises:
        ConfigError: a defence that no run accepts, or Ray is not installed.
        CheckpointError: the folder holds something else, or a trial's has other settings;
            nothing was run.
        StudyError: the undefended point failed, with which all others are compared.
    """
    every = [(point, trials_of(point, folder)) for point in points(study)]
    work = [trial for _, trials in every for trial in trials]
    with _processes(backend):
        _claim(folder, study, work)
        found: dict[str, Outcome | Failure] = {}
        finished = Parallel(n_jobs=jobs, return_as="generator_unordered")(
            delayed(attempt)(trial) for trial in work
        )
        for name, one in finished:
            found[name] = one
            on_done(len(found), len(work))
        board = _board_of(study, every, found)
        Parallel(n_jobs=jobs)(
            delayed(write_report)(folder / entry.point.configs[0].name)
            for entry in board.entries
            if not entry.point.centralised
        )
    write_atomically(folder / "leaderboard.csv", board.as_csv().encode())
    write_atomically(folder / "leaderboard.md", board.as_markdown().encode())
    write_atomically(folder / "points.json", to_json(board.as_json(), indent=2).encode())
    write_page(study, board, folder)
    return board


def _claim(folder: Path, study: Study, work: Sequence[Trial]) -> None:
    """Make the folder the study's, unless anything in it is not."""
    told = folder / "study.yaml"
    if told.is_file():
        past = _name_in(told)
        if past != study.name:
            raise CheckpointError(
                f"{folder} holds the study {past!r}, this one is {study.name!r}; choose another "
                "--output"
            )
    elif (folder / "config.yaml").exists():
        raise CheckpointError(f"{folder} holds a run, not a study; choose another --output")
    for trial in work:
        trial.refuse_another_run()
    make_private(folder)
    write_atomically(told, dump_settings(study).encode())


def _name_in(file: Path) -> str:
    """The study's name; whatever else the file says may be of an earlier version."""
    try:
        return str(yaml_value(read_text(file), given=str(file))["name"])
    except (ConfigError, TypeError, KeyError):
        raise CheckpointError(f"{file} names no study; remove it, and the study goes on") from None


def _board_of(
    study: Study,
    every: Sequence[tuple[Point, Sequence[Trial]]],
    found: Mapping[str, Outcome | Failure],
) -> Board:
    """The points of which every seed is there, and what failed."""
    whole: list[tuple[Point, list[Outcome]]] = []
    failures: list[Failure] = []
    for point, trials in every:
        results = [found[trial.config.name] for trial in trials]
        failed = [one for one in results if isinstance(one, Failure)]
        if failed and point.undefended:
            raise StudyError(
                f"study {study.name}: {point.label!r}, which the others are compared with, failed "
                f"in {len(failed)} of {len(results)} seeds. {failed[0].trial}: {failed[0].message}"
            )
        failures += failed
        if not failed:
            whole.append((point, [one for one in results if isinstance(one, Outcome)]))
    return Board.of(whole, failures)


@contextmanager
def _processes(backend: str) -> Iterator[None]:
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
