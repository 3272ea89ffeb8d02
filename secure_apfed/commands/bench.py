"""The commands `secure-apfed bench`, `performance` and `audit`: what things cost, and a slow check.

Part of the composition root: `secure_apfed.cli` registers them, nothing else imports this.
"""

import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed import terminal
from secure_apfed.errors import ConfigError
from secure_apfed.files import to_json

if TYPE_CHECKING:
    from apfed_bench.table import Measured

__all__ = ["NAMES", "audit", "bench", "performance"]

# Of benches, for the help, which loads none of them; a test compares.
NAMES = (
    "attacks", "audit-log", "exchange", "footprint", "joint-prediction", "local", "nvflare", "psi",
    "secure-sum", "training", "transport", "votes",
)  # fmt: skip
_ALL = "all"


def bench(
    name: Annotated[str, typer.Argument(help=f"{_ALL}, or one of: {', '.join(NAMES)}.")],
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
    if name not in (*NAMES, _ALL):
        there = ", ".join((*NAMES, _ALL))
        raise typer.BadParameter(f"no bench is called {name!r}; there are {there}")
    if name != _ALL and (output is not None or again):
        raise typer.BadParameter("--output and --again are for `bench all`")
    run_bench, run_benches = _benches().run_bench, _benches().run_benches
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


def _benches() -> ModuleType:
    """What runs them, which lies beside the packages of a checkout and in no wheel.

    Raises:
        ConfigError: this is no checkout.
    """
    try:
        return import_module("apfed_bench.table")
    except ModuleNotFoundError as error:
        if error.name not in ("apfed_bench", "apfed_bench.table"):
            raise
        raise ConfigError(
            "benches are not installed with secure-apfed; run them from a checkout of the project, "
            "after `make setup` or `pip install -e ./protocols -e '.[experiments]'` there"
        ) from None


def _show(measured: "Measured", *, as_json: bool) -> None:
    if as_json:
        typer.echo(to_json(measured))
        return
    terminal.show_rows(f"bench {measured['bench']}", *_benches().cells(measured))
    for row in measured["rows"]:
        if "reason" in row:
            typer.echo(f"{row['case']}: {row['reason']}")
    typer.echo(
        f"measured on {measured['machine']}; {measured['stolen']:.1%} of its processor time was "
        "stolen"
    )


def performance(
    folder: Annotated[Path, typer.Argument(help="What `bench all --output` wrote.")] = Path(
        "docs/performance"
    ),
    page: Annotated[Path, typer.Option(help="The page with the tables.")] = Path(
        "docs/performance.md"
    ),
) -> None:
    """Renew the tables of docs/performance.md from what benches measured."""
    _benches().write_performance(page, folder)
    typer.echo(page)


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
    from secure_apfed.learning.descent import find_device

    typer.echo("claims and proved lower bounds; of trainings, and of votes, at 95 % together")
    run_audit(
        output, retrainings=1000 if quick else retrainings, seed=seed, device=find_device(device),
        on_done=lambda result: typer.echo(result.sentence()),
    )  # fmt: skip
    typer.echo(output)
