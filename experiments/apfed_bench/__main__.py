"""The entry point of the benches: `python -m apfed_bench NAME`, from a checkout of the project."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.base.files import to_json
from secure_apfed.console import terminal
from secure_apfed.errors import ApfedError

# Names of all benches: the help must not import them; a test compares these with the real ones.
NAMES = (
    "exchange",
    "ids",
    "protected",
    "psi",
    "secure-sum",
    "startup",
    "tables",
    "transport",
    "user",
)
_ALL = "all"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"{_ALL}, or one of: {', '.join(NAMES)}.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A quick version, under 30 seconds a bench.")
    ] = False,
    only: Annotated[str, typer.Option(help="Only cases that match, such as 'vole/*'.")] = "*",
    output: Annotated[
        Path | None, typer.Option(help="Folder for a JSON file of each bench.")
    ] = None,
) -> None:
    """Measure one part, or all one after another; a part and its peers take turns."""
    if name not in (*NAMES, _ALL):
        known = ", ".join((*NAMES, _ALL))
        raise typer.BadParameter(f"no bench is called {name!r}; there are {known}")
    from apfed_bench.table import make_table, run_benches

    warnings.simplefilter("ignore", UnsafeChoiceWarning)  # benches measure unsafe peers too
    has_failed = False
    names = NAMES if name == _ALL else (name,)
    for results in run_benches(names, quick=quick, case_glob=only, folder=output):
        if any(row.get("failed") for row in results["rows"]):
            has_failed = True
        if as_json:
            typer.echo(to_json(results))
            continue
        table = make_table(results)
        terminal.show_rows(table.title, table.header, table.cells)
        for row in results["rows"]:
            if "reason" in row:
                typer.echo(f"{row['case']}: {row['reason']}")
        typer.echo(
            f"measured on {results['machine']}; {results['stolen']:.1%} of its processor time "
            "was stolen"
        )
    if has_failed:
        raise typer.Exit(1)


def main(arguments: Sequence[str]) -> None:
    """Run the benches that the arguments name, and end the process with the exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = terminal.show_warning
        try:
            app(args=list(arguments), prog_name="python -m apfed_bench")
        except (ApfedError, OSError) as error:
            failure = terminal.describe_failure(error)
            terminal.show_failure(failure, as_json="--json" in arguments, debug=False)
            sys.exit(failure.code)


if __name__ == "__main__":
    main(sys.argv[1:])
