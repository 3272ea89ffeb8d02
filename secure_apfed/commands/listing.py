"""The command `secure-apfed runs`: run folders at a glance.

Part of the composition root: `secure_apfed.cli` registers it, nothing else imports this.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson

if TYPE_CHECKING:
    from apfed_experiments.run_list import ListedRun

__all__ = ["runs"]


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where run folders lie, at any depth.")
    ] = Path("runs"),
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page to filter, sort and compare them."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List run folders, the newest first: method, data, gain, epsilon, worst attacks, date."""
    from apfed_experiments.run_list import list_runs

    found = list_runs(folder)
    page = None if html is None else _write(html, folder, found)
    if as_json:
        rows = [run.as_json() for run in found]
        terminal.print_json({"folder": folder, "runs": rows, "page": page})
        return
    _show(folder, found)
    if page is not None:
        typer.echo(page)


def _write(html: Path, folder: Path, found: "list[ListedRun]") -> Path:
    from apfed_experiments.report.page import write_runs_page

    return write_runs_page(found, html, title=f"Runs below {folder}")


def _show(folder: Path, found: "list[ListedRun]") -> None:
    from apfed_experiments.run_list import HEADER

    if not found:
        terminal.show_note(f"{folder}: no run folder lies below it; secure-apfed run makes one")
        return
    terminal.show_rows(f"Runs below {folder}", HEADER, [run.cells() for run in found])
    terminal.show_note(
        "The gain of one run shows no help, only several seeds do (secure-apfed run "
        "CONFIG --seeds 5). The worst of several attacks is "
        "above 0 by chance alone; where none was mounted, nothing is known."
    )
