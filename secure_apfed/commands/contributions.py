"""The command `secure-apfed contributions`: what each passive adds to the active's model.

Part of the composition root: `secure_apfed.cli` registers it, nothing else imports this.
"""

from pathlib import Path
from typing import Annotated

import typer

from secure_apfed import progress_bars, terminal
from secure_apfed.commands import AsJson, Jobs, Overrides

__all__ = ["contributions"]

_Output = Annotated[
    Path | None,
    typer.Option(help="Folder; runs/NAME-contributions unless given. A stopped study goes on."),
]
_HeldBack = Annotated[
    float, typer.Option(min=0.01, max=0.99, help="Share of the labelled rows that measures.")
]
_Orders = Annotated[
    int | None,
    typer.Option(min=2, help="Draw so many orders of passives; all of up to 6 unless given."),
]
_Noise = Annotated[
    list[str] | None,
    typer.Option(metavar="PASSIVE", help="Replace its features by noise: a check."),
]


def contributions(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    output: _Output = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each coalition.")] = 5,
    jobs: Jobs = 2,
    held_back: _HeldBack = 0.3,
    orders: _Orders = None,
    noise: _Noise = None,
    count_bytes: Annotated[
        bool, typer.Option("--count-bytes", help="Simulate no run, so that bytes are counted.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what each passive adds, by runs of coalitions; their bytes and epsilons are added up."""
    from apfed_experiments.who_helped import READING, measure_passives
    from secure_apfed.config.file import load_config

    config = load_config(config_file, overrides=overrides or ())
    folder = output or Path("runs", f"{config.name}-contributions")
    with progress_bars.counting(f"{config.name}: coalitions", quiet=as_json) as on_done:
        board = measure_passives(
            config, folder, seeds=range(seeds), jobs=jobs, share=held_back, drawn=orders,
            noise=noise or (), simulated=not count_bytes, on_done=on_done,
        )  # fmt: skip
    if as_json:
        terminal.print_json({**board.as_json(), "folder": folder})
        return
    terminal.show_rows(board.table.title, board.table.header, board.table.cells)
    for note in (READING, *board.notes):
        terminal.show_note(note)
    typer.echo(folder / "index.html")
