"""Runs a study: every trial that is not done yet, in several processes, then its pages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from joblib import Parallel, delayed, parallel_config

from experiments.report import write_report
from experiments.tradeoff.board import Board
from experiments.tradeoff.outcome import Outcome, read_outcome
from experiments.tradeoff.page import write_page
from experiments.tradeoff.study import Study, points
from experiments.trials import finish_trial
from secure_apfed.config import Config
from secure_apfed.config_file import dump_settings
from secure_apfed.errors import ConfigError
from secure_apfed.plain_json import to_json
from secure_apfed.runs.folder import write_atomically

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

    Every trial is a run folder of its own below `folder`; finished ones are not run again.

    Args:
        study: as `load_study` returns it.
        folder: of the study; made where missing.
        jobs: processes, each with one thread.
        backend: "loky" starts them here; "ray" gives the trials to a Ray cluster whose nodes
            share this file system.
        on_done: called with trials done and in all.

    Raises:
        ConfigError: a defence that no run accepts, or Ray is not installed.
        CheckpointError: a trial's folder holds a run with other settings.
    """
    every = list(points(study))
    work = [(config, folder / config.name) for point in every for config in point.configs]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "study.yaml", dump_settings(study).encode())
    outcomes: dict[str, Outcome] = {}
    with _processes(backend):
        finished = Parallel(n_jobs=jobs, return_as="generator_unordered")(
            delayed(_finished)(config, path) for config, path in work
        )
        for name, outcome in finished:
            outcomes[name] = outcome
            on_done(len(outcomes), len(work))
        Parallel(n_jobs=jobs)(
            delayed(write_report)(folder / point.configs[0].name) for point in every
        )
    board = Board.of([(point, [outcomes[c.name] for c in point.configs]) for point in every])
    write_atomically(folder / "leaderboard.csv", board.as_csv().encode())
    write_atomically(folder / "leaderboard.md", board.as_markdown().encode())
    write_atomically(folder / "points.json", to_json(board.as_json(), indent=2).encode())
    write_page(study, board, folder)
    return board


def _finished(config: Config, path: Path) -> tuple[str, Outcome]:
    finish_trial(config, path)
    return config.name, read_outcome(path)


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
