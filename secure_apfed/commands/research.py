"""The commands `contributions`, `search` and `table`: many runs for one answer.

Part of the composition root: `secure_apfed.cli` registers them, nothing else imports this.
"""

from pathlib import Path
from typing import Annotated

import typer

from secure_apfed import progress, terminal
from secure_apfed.commands import AsJson, ConfigFile, Jobs, Overrides

__all__ = ["contributions", "search", "table"]

_FAILED = 3


def contributions(
    config_file: ConfigFile,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder; runs/NAME-contributions unless given. A stopped study goes on."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each coalition.")] = 5,
    jobs: Jobs = 2,
    held_back: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Share of the labelled rows that measures.")
    ] = 0.3,
    orders: Annotated[
        int | None,
        typer.Option(min=2, help="Draw so many orders of passives; all of up to 6 unless given."),
    ] = None,
    noise: Annotated[
        list[str] | None,
        typer.Option(metavar="PASSIVE", help="Replace its features by noise: a check."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what each passive adds, by runs of coalitions; their bytes and epsilons are added up."""
    from apfed_experiments.who_helped import READING, measure_passives
    from secure_apfed.config.file import load_config

    config = load_config(config_file, overrides=overrides or ())
    folder = output or Path("runs", f"{config.name}-contributions")
    with progress.counting(f"{config.name}: coalitions", quiet=as_json) as on_done:
        board = measure_passives(
            config, folder, seeds=range(seeds), jobs=jobs, share=held_back, drawn=orders,
            noise=noise or (), on_done=on_done,
        )  # fmt: skip
    if as_json:
        terminal.print_json({**board.as_json(), "folder": folder})
        return
    terminal.show_rows(board.table.title, board.table.header, board.table.cells)
    for note in (READING, *board.notes):
        terminal.show_note(note)
    typer.echo(folder / "index.html")


def search(
    config_file: ConfigFile,
    space: Annotated[Path, typer.Option(metavar="FILE", help="YAML file of what may vary.")],
    trials: Annotated[int, typer.Option(min=1, help="In all, with those of a stopped search.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder; runs/NAME-search unless given. A stopped one goes on."),
    ] = None,
    held_back: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Share of the labelled rows that judges.")
    ] = 0.3,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest epsilon of all trials and the final run; what exceeds it is refused.",
        ),
    ] = None,
    final: Annotated[bool, typer.Option(help="Run the best settings on all labels.")] = True,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Search settings by trials on labels that the active holds back; say what all of it costs."""
    from apfed_experiments.search import load_space
    from apfed_experiments.search import search as find
    from secure_apfed.config.file import load_config

    config = load_config(config_file, overrides=overrides or ())
    folder = output or Path("runs", f"{config.name}-search")
    with progress.counting(f"{config.name}: trials", quiet=as_json) as on_done:
        found = find(
            config, load_space(space), folder, trials=trials, share=held_back, budget=budget,
            final=final, on_done=on_done,
        )  # fmt: skip
    if as_json:
        terminal.print_json({**found.as_json(), "folder": folder})
        return
    terminal.show_rows(f"Search of {config.name}", found.table.header, found.table.cells)
    for note in found.notes:
        terminal.show_note(note)
    typer.echo(folder / "best.yaml")


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
        _list_tables(as_json=as_json)
        return
    from apfed_experiments.tables import find_table
    from apfed_experiments.tables.table import fill, write

    wanted = find_table(name)
    folder = output or Path("runs", "tables", name)
    with progress.counting(f"{name}: jobs", quiet=as_json) as on_done:
        board = fill(wanted, folder, full=full, jobs=jobs, minutes=minutes, on_done=on_done)
    files = write(board, folder)
    if as_json:
        terminal.print_json({**board.as_json(), "files": files})
    else:
        terminal.show_rows(
            f"{wanted.title}: {wanted.source}", board.lines.header, board.lines.cells
        )
        terminal.show_note(". ".join(filter(None, (wanted.unit.capitalize(), wanted.reading))))
        if wanted.leaves_out and not full:
            terminal.show_note(f"Left out, and run by --full: {wanted.leaves_out}.")
        terminal.show_note(f"{board.sentence}.")
        for reason in dict.fromkeys(board.failures.values()):
            names = [name for name, why in board.failures.items() if why == reason]
            terminal.show_note(f"failed, left out: {', '.join(names)}: {reason}")
        typer.echo("\n".join(map(str, files.values())))
    if board.failures:
        raise typer.Exit(_FAILED)  # as for data or files; the same command tries them again


def _list_tables(*, as_json: bool) -> None:
    from apfed_experiments.tables import TABLES

    if as_json:
        keys = ("name", "source", "title", "leaves_out", "hours")
        entries = [{key: getattr(table, key) for key in keys} for table in TABLES.values()]
        terminal.print_json({"tables": entries})
        return
    columns = ("name", "source", "what the default leaves out", "hours with --full")
    rows = [
        (table.name, table.source, table.leaves_out, f"{table.hours:g}")
        for table in TABLES.values()
    ]
    terminal.show_rows("Tables and figures of the papers", columns, rows)
