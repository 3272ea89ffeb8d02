"""Many runs for one answer: the commands `secure-apfed study`.

Part of the composition root: `secure_apfed.cli` registers them, nothing else imports this. Worker
processes are started before anything large is imported: see `apfed_experiments.workers`.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.commands import AsJson, ConfigFile, Jobs, Overrides, finished
from secure_apfed.console import terminal
from secure_apfed.errors import NarrowBatchWarning

if TYPE_CHECKING:
    from apfed_experiments.runner import Study

# Names for the help texts. The tables that have them as keys are slow to import; a test compares.
LEAK_STUDIES = (
    "inversion",
    "chosen",
    "decoder",
    "noise",
    "isolation",
    "labels",
    "joint_inversion",
    "hijacking",
    "reversed_hijacking",
    "stuffing",
    "few_labels",
    "chosen_labels",
    "repeated_votes",
    "vote_membership",
    "poisoned_votes",
    "integrity",
    "papers",
)

BASE_CONFIGS = ("main-digits", "main-breast-cancer", "main-handwritten")

_FAILED_EXIT_CODE = 3  # exit code if a run of a study failed
app = typer.Typer(no_args_is_help=True, help="Studies over many runs: gain, cost and leakage.")
Seeds = Annotated[int, typer.Option(min=1, help="Number of runs (seeds) of each setting.")]
Output = Annotated[Path, typer.Option(help="Folder for the results.")]


@app.callback()
def choose_backend(
    context: typer.Context,
    backend: Annotated[
        str,
        typer.Option(
            help="Where runs are computed: loky (this machine), dask or ray (workers that start "
            "here), dask:ADDRESS or ray:ADDRESS of a cluster. Written before the study's name.",
        ),
    ] = "loky",
) -> None:
    """Choose where the runs of the study that follows are computed."""
    if backend != "loky":
        from apfed_experiments.backends import use_backend

        context.with_resource(use_backend(backend))


def _start_workers() -> AbstractContextManager[None]:
    """Start the server from which worker processes are forked, for a `with` block.

    Imports stand in this block: the server imports the same modules at the same time, so that
    nobody waits.
    """
    from apfed_experiments.workers import start_workers

    return start_workers()


def _describe_choice(names: Sequence[str]) -> str:
    """Return the help text of an option that takes some of these names, and all by default."""
    return f"Some of: {', '.join(names)}; all unless given. May be repeated."


@app.command("main")
def main_job(
    output: Output = Path("runs/main"), seeds: Seeds = 5, jobs: Jobs = 2, as_json: AsJson = False
) -> None:
    """Measure gain, cost and leakage of APFed on real data (the main job)."""
    with _start_workers():
        from apfed_experiments.main_job import MAIN, declare_study

    _run_study(declare_study(MAIN, output, seeds=range(seeds)), jobs, as_json=as_json)


@app.command("methods")
def compare_methods(
    output: Output = Path("runs/methods"), seeds: Seeds = 5, jobs: Jobs = 2, as_json: AsJson = False
) -> None:
    """Compare all methods where few rows have a label."""
    with _start_workers():
        from apfed_experiments.main_job import METHOD_COMPARISON, declare_study

    study = declare_study(METHOD_COMPARISON, output, seeds=range(seeds))
    _run_study(study, jobs, as_json=as_json)


@app.command()
def sums(
    output: Output = Path("runs/sums"),
    seeds: Seeds = 3,
    jobs: Jobs = 2,
    base: Annotated[
        str, typer.Option(help=f"Data and network, one of: {', '.join(BASE_CONFIGS)}.")
    ] = BASE_CONFIGS[0],
    as_json: AsJson = False,
) -> None:
    """Measure what each party of APFed can read, by secure sum and guard."""
    _check_names([base], BASE_CONFIGS)
    with _start_workers():
        from apfed_experiments.study import load_base_config
        from apfed_experiments.sum_by_guard import declare_study

    study = declare_study(load_base_config(base), output, seeds=range(seeds))
    _run_study(study, jobs, as_json=as_json)


@app.command()
def gains(
    output: Output = Path("runs/gains"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of runs (seeds) of each case; default: 10.")
    ] = None,
    jobs: Jobs = 2,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only cases that match, such as 'votes/*'; default: all."),
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Folder with your own tables and a splits.yaml.")
    ] = None,
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A quick version: three seeds and three built-in cases.")
    ] = False,
) -> None:
    """Measure the gain over the best local model, case by case."""
    with _start_workers():
        from apfed_experiments import gains as gains_study

    known_cases = gains_study.CASES if tables is None else gains_study.list_own_cases(tables)
    # The quick version takes three of the built-in cases, and all cases of one's own tables.
    default_patterns = gains_study.QUICK_CASES if quick and tables is None else ("*",)
    cases = gains_study.select_cases(only or default_patterns, known_cases)
    default_seeds = gains_study.QUICK_SEED_COUNT if quick else gains_study.SEED_COUNT
    study = gains_study.declare_study(output, cases, seed_count=seeds or default_seeds)
    _run_study(study, jobs, as_json=as_json)


@app.command("who-helped")
def measure_passives(
    config_file: ConfigFile,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: runs/NAME-who-helped.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs (seeds) with all passives.")
    ] = 5,
    jobs: Jobs = 2,
    baselines: Annotated[
        bool, typer.Option(help="Also compare with the active's local models.")
    ] = True,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure each passive's contribution: train without it, paired by seed."""
    from secure_apfed.config.file import load_config

    config = load_config(config_file, overrides=overrides or (), own=True)
    with _start_workers():
        from apfed_experiments.who_helped import declare_study

    folder = output or Path("runs", f"{config.name}-who-helped")
    study = declare_study(config, folder, seed_count=seeds, should_measure_baselines=baselines)
    _run_study(study, jobs, as_json=as_json)


@app.command()
def leaks(
    only: Annotated[list[str] | None, typer.Option(help=_describe_choice(LEAK_STUDIES))] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="JSON file of results, in which the measured parts are replaced."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a curious or malicious party reads, and which rules stop it."""
    _check_names(only, LEAK_STUDIES)
    from apfed_experiments.leaks import declare_study

    # It concerns honest steps before an attack, which are not what is measured.
    warnings.simplefilter("ignore", NarrowBatchWarning)
    _run_study(declare_study(only or LEAK_STUDIES, store), jobs=1, as_json=as_json)


@app.command()
def tradeoff(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="YAML file of the study.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results; default: runs/NAME. An interrupted study continues."
        ),
    ] = None,
    jobs: Jobs = 2,
    as_json: AsJson = False,
) -> None:
    """Sweep defences and their strengths: accuracy against leakage, with pictures and a table."""
    with _start_workers():
        from apfed_experiments.tradeoff import declare_study, load_tradeoff

    tradeoff = load_tradeoff(study_file)
    study = declare_study(tradeoff, output or Path("runs", tradeoff.name))
    _run_study(study, jobs, as_json=as_json)


@app.command()
def audit(
    output: Annotated[Path, typer.Option(help="Folder for audit.json.")] = Path("runs/audit"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A quick version: 1,000 retrainings a case.")
    ] = False,
    retrainings: Annotated[
        int, typer.Option(min=120, help="Retrainings a case, with and without the record together.")
    ] = 5000,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1.")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Audit the privacy claims by retraining with and without one record."""
    from apfed_experiments.audit.retraining import declare_study
    from secure_apfed.learning.descent import find_device

    study = declare_study(
        output,
        retraining_count=1000 if quick else retrainings,
        seed=seed,
        device=find_device(device),
    )
    _run_study(study, jobs=1, as_json=as_json)


def _run_study(study: "Study[Any]", jobs: int, *, as_json: bool) -> None:
    """Run a study, and print its result as text or JSON.

    `jobs`: number of runs at a time. Raises typer.Exit: a run failed; the process then ends with
    an error code, and the same command tries failed runs again.
    """
    warnings.simplefilter("ignore", UnsafeChoiceWarning)  # studies compare with unsafe choices
    answer = finished.run_study(study, jobs, is_quiet=as_json)
    if as_json:
        terminal.print_json(answer.as_json())
    if answer.failures:
        raise typer.Exit(_FAILED_EXIT_CODE)


def _check_names(chosen_names: Sequence[str] | None, known_names: Sequence[str]) -> None:
    """Raise a usage error (typer.BadParameter) if a chosen name is not a known one.

    The error suggests the nearest name. `chosen_names`: None: nothing was chosen.
    """
    for name in chosen_names or ():
        if name not in known_names:
            from secure_apfed.settings import describe_unknown_name

            raise typer.BadParameter(describe_unknown_name(name, known_names))


@app.command()
def table(
    name: Annotated[str | None, typer.Argument(help="Name of a table; see --list.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List all tables and figures.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Measure the whole table, not its default part.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: runs/tables/NAME.")
    ] = None,
    jobs: Jobs = 2,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Start no further job after this number of minutes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or figure of a paper; an interrupted one continues."""
    if list_all == (name is not None):
        raise typer.BadParameter("give the NAME of a table, or --list")
    if name is None:
        _list_tables(as_json=as_json)
        return
    from apfed_experiments.tables import find_table
    from apfed_experiments.tables.table import declare_study

    folder = output or Path("runs", "tables", name)
    study = declare_study(find_table(name), folder, is_full=full, max_minutes=minutes)
    _run_study(study, jobs, as_json=as_json)


def _list_tables(*, as_json: bool) -> None:
    """Print the papers' tables and figures that `study table` can reproduce, with the hours that
    each takes.
    """
    from apfed_experiments.tables import TABLES

    if as_json:
        entries = [
            {
                "name": table.name,
                "source": table.source,
                "title": table.title,
                "leaves_out": table.omission,
                "hours": table.hours,
            }
            for table in TABLES.values()
        ]
        terminal.print_json({"tables": entries})
        return
    columns = ("name", "source", "what the default leaves out", "hours with --full")
    rows = [
        (table.name, table.source, table.omission, f"{table.hours:g}") for table in TABLES.values()
    ]
    terminal.show_rows("Tables and figures of the papers", columns, rows)
