"""`python -m experiments`: the main job and the benchmarks."""

import json
import warnings
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.bench import BENCHES, run_bench
from protocols.errors import UnsafeChoiceWarning

__all__ = ["app", "bench", "experiments"]

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def experiments() -> None:
    """Tables, figures and benchmarks made with Secure APFed."""


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES)}.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Stay under 30 seconds.")] = False,
) -> None:
    """Measure one part against its peers, in turns within one run."""
    if name not in BENCHES:
        raise typer.BadParameter(f"no bench is called {name!r}; there are {', '.join(BENCHES)}")
    warnings.simplefilter("ignore", UnsafeChoiceWarning)  # benches measure unsafe peers too
    result = run_bench(name, quick=quick)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_table(name, result)


def _print_table(name: str, result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list)
    table = Table(title=f"bench {name}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in columns))
    console = Console()
    console.print(table)
    console.print(f"measured on {result['machine']}")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app()
