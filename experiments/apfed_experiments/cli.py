"""The commands of `python -m apfed_experiments`: main job, sweeps and benchmarks."""

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from apfed_experiments.bench import BENCHES, Measured, run_bench, run_benches
from apfed_experiments.gains import (
    QUICK,
    QUICK_SEEDS,
    SEEDS,
    cases_like,
    header_of,
    run_gains,
    stored_of,
)
from apfed_experiments.gains import READING as GAIN_READING
from apfed_experiments.main_job import HEADER, READING, run_main_job
from apfed_experiments.performance import cells, write_performance
from apfed_experiments.references import REFERENCES, run_reference
from apfed_experiments.study_page import write_text
from apfed_experiments.sweep import CONFIGS, run_sweep
from apfed_experiments.sweep import HEADER as SWEEP_HEADER
from apfed_experiments.sweep import READING as SWEEP_READING
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from secure_apfed import progress_bars, terminal
from secure_apfed.errors import ApfedError
from secure_apfed.measures import ACCURACY, MEASURES, Measure, names_of
from secure_apfed.parties import Compute
from secure_apfed.plain_json import to_json
from secure_apfed.settings import unknown_name
from secure_apfed.settings.training import TrainSettings

__all__ = [
    "app",
    "audit",
    "bench",
    "experiments",
    "gains",
    "main",
    "main_job",
    "performance",
    "references",
    "sweep",
]


_ALL = "all"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def experiments() -> None:
    """Tables, figures and benchmarks made with Secure APFed."""


@app.command("main")
def main_job(
    output: Annotated[Path, typer.Option(help="Folder of the job.")] = Path("runs/main"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
) -> None:
    """Align, train, protect, attack and report on breast cancer and digits; print the table."""
    with progress_bars.counting("runs", quiet=False) as on_done:
        comparisons = run_main_job(output, seeds=range(seeds), jobs=jobs, on_done=on_done)
    for comparison in comparisons:
        rows = [line.cells() for line in comparison.lines]
        terminal.show_rows(comparison.title(seeds), HEADER, rows)
    Console().print(READING, highlight=False)
    Console().print(f"Tables, pictures and reports: {output / 'index.html'}", highlight=False)


@app.command()
def sweep(
    output: Annotated[Path, typer.Option(help="Folder of the sweep.")] = Path("runs/sweep"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each point.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    config: Annotated[
        list[str] | None, typer.Option(help=f"Some of: {', '.join(CONFIGS)}; all unless given.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Write what `secure-apfed plan` reads to this file, too.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Copy the pictures to this folder.")] = None,
) -> None:
    """Accuracy against epsilon: fresh and frozen noise and label DP; stopped sweeps go on."""
    unknown = set(config or ()) - set(CONFIGS)
    if unknown:
        raise typer.BadParameter(f"no sweep is called {', '.join(sorted(unknown))}")
    with progress_bars.counting("points", quiet=False) as on_done:
        found = run_sweep(
            output, seeds=range(seeds), jobs=jobs, configs=config or CONFIGS, store=store,
            figures=figures, on_done=on_done,
        )  # fmt: skip
    for sweep_of_data in found:
        terminal.show_rows(sweep_of_data.title, SWEEP_HEADER, sweep_of_data.cells())
    Console().print(SWEEP_READING, highlight=False)
    Console().print(f"Tables, pictures and page: {output / 'index.html'}", highlight=False)


@app.command()
def references(
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/references"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Some of: {', '.join(REFERENCES)}; all unless given.")
    ] = None,
) -> None:
    """Attacks beside figures that others published, over several seeds; stopped ones go on."""
    unknown = set(only or ()) - set(REFERENCES)
    if unknown:
        raise typer.BadParameter(f"no reference is called {', '.join(sorted(unknown))}")
    for name in only or REFERENCES:
        with progress_bars.counting(name, quiet=False) as on_done:
            table = run_reference(REFERENCES[name], output, jobs=jobs, on_done=on_done)
        terminal.show_rows(f"{name}, {table.reference.source}", table.header, table.cells())
        Console().print(f"accuracy of the runs {table.accuracy.text(scale=100)} %", highlight=False)


@app.command()
def gains(
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/gains"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each case; 10.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help="Cases, as globs such as 'votes/*'; all unless given.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Write what `secure-apfed plan` reads to this file, too.")
    ] = None,
    measure: Annotated[
        str, typer.Option(help=f"Of classes: {', '.join(names_of('classification'))}.")
    ] = ACCURACY.name,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Three cases, three seeds.")] = False,
) -> None:
    """What help adds to the best that the active does alone, case by case; stopped ones go on."""
    warnings.simplefilter("ignore", UnsafeChoiceWarning)
    judged_by = _measure(measure)
    if store is not None and judged_by is not ACCURACY:
        raise typer.BadParameter("--store is for accuracy, which `secure-apfed plan` tells")
    cases = cases_like(only or (QUICK if quick else ("*",)))
    with progress_bars.counting("runs", quiet=as_json) as on_done:
        rows = run_gains(
            output, cases, seeds=seeds or (QUICK_SEEDS if quick else SEEDS), jobs=jobs,
            on_done=on_done, measure=judged_by,
        )  # fmt: skip
    if store is not None:
        write_text(store, to_json(stored_of(rows), indent=1))
    if as_json:
        terminal.print_json({"rows": [row.as_json() for row in rows]})
        return
    terminal.show_rows("What help is worth", header_of(judged_by), [row.cells() for row in rows])
    Console().print(GAIN_READING, highlight=False)


def _measure(name: str) -> Measure:
    if name not in names_of("classification"):
        raise typer.BadParameter(unknown_name(name, names_of("classification")))
    return MEASURES[name]


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"all, or one of: {', '.join(BENCHES)}.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line and bench, nothing else.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Stay under 30 seconds a bench.")] = False,
    only: Annotated[str, typer.Option(help="Glob of cases, such as 'vole/*'.")] = "*",
    output: Annotated[
        Path | None,
        typer.Option(help="With all: folder of a JSON file a bench; stopped ones go on."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what is there, too.")] = False,
) -> None:
    """Measure one part against its peers, in turns within one run, or all after another."""
    if name not in (*BENCHES, _ALL):
        there = ", ".join((*BENCHES, _ALL))
        raise typer.BadParameter(f"no bench is called {name!r}; there are {there}")
    if name != _ALL and (output is not None or again):
        raise typer.BadParameter("--output and --again are for `bench all`")
    warnings.simplefilter("ignore", UnsafeChoiceWarning)  # benches measure unsafe peers too
    failed = False
    found = (
        run_benches(quick=quick, cases=only, folder=output, again=again)
        if name == _ALL
        else iter([run_bench(name, quick=quick, cases=only)])
    )
    for measured in found:
        _show(measured, as_json=as_json)
        failed |= any(row.get("failed") for row in measured["rows"])
    if failed:
        raise typer.Exit(1)


def _show(measured: Measured, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(measured))
        return
    terminal.show_rows(f"bench {measured['bench']}", *cells(measured))
    for row in measured["rows"]:
        if "reason" in row:
            Console().print(f"{row['case']}: {row['reason']}", highlight=False, markup=False)
    Console().print(
        f"measured on {measured['machine']}; {measured['stolen']:.1%} of its processor time was "
        "stolen", highlight=False,
    )  # fmt: skip


@app.command()
def performance(
    folder: Annotated[Path, typer.Argument(help="What `bench all --output` wrote.")] = Path(
        "docs/performance"
    ),
    page: Annotated[Path, typer.Option(help="The page with the tables.")] = Path(
        "docs/performance.md"
    ),
) -> None:
    """Renew the tables of docs/performance.md from what benches measured."""
    write_performance(page, folder)
    Console().print(f"Tables: {page}", highlight=False)


@app.command()
def audit(
    output: Annotated[Path, typer.Option(help="Folder of audit.json and the picture.")] = Path(
        "runs/audit"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="1,000 retrainings a case.")] = False,
    retrainings: Annotated[
        int, typer.Option(min=120, help="Of both worlds together, a case.")
    ] = 5000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
) -> None:
    """Retrain with and without a record; print what that proves about the claims of privacy."""
    from apfed_experiments.audit import run_audit

    compute = Compute.of(TrainSettings.model_validate({"device": device}))
    console = Console()
    console.print("claims and proved lower bounds; of trainings, and of votes, at 95 % together")
    run_audit(
        output,
        retrainings=1000 if quick else retrainings,
        seed=seed,
        device=compute.device,
        on_done=lambda result: console.print(result.sentence(), highlight=False),
    )
    console.print(f"Figures and picture: {output}", highlight=False)


def main() -> None:
    """Run one command; an error is one panel on stderr, as in `secure-apfed`."""
    try:
        app()
    except (ApfedError, LocalProtocolError, RemoteProtocolError, OSError) as error:
        failure = terminal.failure_of(error)
        terminal.show_failure(failure, as_json=False, debug=False)
        sys.exit(failure.code)
