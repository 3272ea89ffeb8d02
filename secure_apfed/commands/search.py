"""The command `secure-apfed search`: settings by trials, each charged or on public data.

Part of the composition root: `secure_apfed.cli` registers it, nothing else imports this.
"""

from pathlib import Path
from typing import Annotated

import typer

from secure_apfed import progress_bars, terminal
from secure_apfed.commands import AsJson, Overrides

__all__ = ["search"]

_Output = Annotated[
    Path | None, typer.Option(help="Folder; runs/NAME-search unless given. A stopped one goes on.")
]
_HeldBack = Annotated[
    float, typer.Option(min=0.01, max=0.99, help="Share of the labelled rows that judges.")
]
_Budget = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Largest epsilon of all trials and the final run; what exceeds it is refused."
    ),
]


def search(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    space: Annotated[Path, typer.Option(metavar="FILE", help="YAML file of what may vary.")],
    trials: Annotated[int, typer.Option(min=1, help="In all, with those of a stopped search.")],
    output: _Output = None,
    held_back: _HeldBack = 0.3,
    budget: _Budget = None,
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
    with progress_bars.counting(f"{config.name}: trials", quiet=as_json) as on_done:
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
