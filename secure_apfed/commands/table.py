"""The command `secure-apfed table`: a table or figure of a paper, beside what the paper prints.

Part of the composition root: `secure_apfed.cli` registers it, nothing else imports this.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secure_apfed import progress_bars, terminal
from secure_apfed.commands import AsJson, Jobs

if TYPE_CHECKING:
    from apfed_experiments.tables.table import Board

__all__ = ["table"]

_FAILED = 3


def table(
    name: Annotated[str | None, typer.Argument(help="A table of --list.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List all tables and figures.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All of it, not the default part.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder; runs/tables/NAME unless given.")
    ] = None,
    jobs: Jobs = 2,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no other job after so many minutes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a table or figure of a paper; one that was stopped goes on where it was."""
    if list_all == (name is not None):
        raise typer.BadParameter("give the NAME of a table, or --list")
    if name is None:
        _list(as_json=as_json)
        return
    from apfed_experiments.tables import find_table
    from apfed_experiments.tables.table import fill, write

    wanted = find_table(name)
    folder = output or Path("runs", "tables", name)
    with progress_bars.counting(f"{name}: jobs", quiet=as_json) as on_done:
        board = fill(wanted, folder, full=full, jobs=jobs, minutes=minutes, on_done=on_done)
    files = write(board, folder)
    if as_json:
        terminal.print_json({**board.as_json(), "files": files})
    else:
        _show(board)
        typer.echo("\n".join(map(str, files.values())))
    if board.failures:
        raise typer.Exit(_FAILED)  # as for data or files; the same command tries them again


def _list(*, as_json: bool) -> None:
    from apfed_experiments.tables import TABLES

    if as_json:
        entries = [
            {"name": one.name, "source": one.source, "title": one.title,
             "leaves_out": one.leaves_out, "hours": one.hours}
            for one in TABLES.values()
        ]  # fmt: skip
        terminal.print_json({"tables": entries})
        return
    columns = ("name", "source", "what the default leaves out", "hours with --full")
    rows = [(one.name, one.source, one.leaves_out, f"{one.hours:g}") for one in TABLES.values()]
    terminal.show_rows("Tables and figures of the papers", columns, rows)


def _show(board: "Board") -> None:
    told = board.table
    terminal.show_rows(f"{told.title}: {told.source}", board.lines.header, board.lines.cells)
    terminal.show_note(". ".join(filter(None, (told.unit.capitalize(), told.reading))))
    if told.leaves_out and not board.full:
        terminal.show_note(f"Left out, and run by --full: {told.leaves_out}.")
    terminal.show_note(f"{board.forecast.sentence}.")
    for reason in dict.fromkeys(board.failures.values()):
        names = [name for name, why in board.failures.items() if why == reason]
        terminal.show_note(f"failed, left out: {', '.join(names)}: {reason}")
