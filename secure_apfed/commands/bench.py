"""The commands `secure-apfed bench` and `audit`: what things cost, and a slow check.

Part of the composition root: `secure_apfed.cli` registers them, nothing else imports this.
"""

import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.installing import install_checkout
from secure_apfed.base.files import to_json
from secure_apfed.console import terminal
from secure_apfed.errors import ConfigError

# Of benches, for the help, which loads none of them; a test compares.
NAMES = ("exchange", "ids", "psi", "secure-sum", "startup", "transport", "user")
_ALL = "all"


def bench(
    name: Annotated[str, typer.Argument(help=f"{_ALL}, or one of: {', '.join(NAMES)}.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line and bench, nothing else.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Stay under 30 seconds a bench.")] = False,
    only: Annotated[str, typer.Option(help="Glob of cases, such as 'vole/*'.")] = "*",
    output: Annotated[
        Path | None, typer.Option(help="Folder that gets a JSON file of each bench.")
    ] = None,
) -> None:
    """Measure one part against its peers, in turns within one run, or all after another."""
    if name not in (*NAMES, _ALL):
        known = ", ".join((*NAMES, _ALL))
        raise typer.BadParameter(f"no bench is called {name!r}; there are {known}")
    table = _import_benches()
    warnings.simplefilter("ignore", UnsafeChoiceWarning)  # benches measure unsafe peers too
    failed = False
    names = NAMES if name == _ALL else (name,)
    for measured in table.run_benches(names, quick=quick, cases=only, folder=output):
        failed |= any(row.get("failed") for row in measured["rows"])
        if as_json:
            typer.echo(to_json(measured))
            continue
        results = table.table_of(measured)
        terminal.show_rows(results.title, results.header, results.cells)
        for row in measured["rows"]:
            if "reason" in row:
                typer.echo(f"{row['case']}: {row['reason']}")
        typer.echo(
            f"measured on {measured['machine']}; {measured['stolen']:.1%} of its processor time "
            "was stolen"
        )
    if failed:
        raise typer.Exit(1)


def _import_benches() -> ModuleType:
    """Import the module that runs benches, which only a checkout has.

    Raises ConfigError: this is no checkout.
    """
    try:
        return import_module("apfed_bench.table")
    except ModuleNotFoundError as error:
        if error.name not in ("apfed_bench", "apfed_bench.table"):
            raise
        raise ConfigError(
            "benches are not installed with secure-apfed; run them from a checkout of the project, "
            f"after `make setup` or `{install_checkout('experiments', editable=True)}` there"
        ) from None


def audit(
    output: Annotated[Path, typer.Option(help="Folder of audit.json.")] = Path("runs/audit"),
    quick: Annotated[bool, typer.Option("--quick", help="1,000 retrainings a case.")] = False,
    retrainings: Annotated[
        int, typer.Option(min=120, help="Of both worlds together, a case.")
    ] = 5000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
) -> None:
    """Retrain with and without a record; print what that proves about the claims of privacy."""
    from apfed_experiments.audit.retraining import run_audit
    from secure_apfed.learning.descent import find_device

    typer.echo("claims and proved lower bounds; of trainings, and of votes, at 95 % together")
    run_audit(
        output,
        retrainings=1000 if quick else retrainings,
        seed=seed,
        device=find_device(device),
        on_done=lambda result: typer.echo(result.describe_result()),
    )
    typer.echo(output)
