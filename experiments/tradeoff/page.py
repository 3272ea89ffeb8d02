"""The page of a study: its pictures, its leaderboard, what failed."""

from pathlib import Path

from experiments.report.page import fill, inside
from experiments.tradeoff.board import Board
from experiments.tradeoff.picture import write_picture
from experiments.tradeoff.study import Study

__all__ = ["READING", "write_page"]

READING = (
    "Each point is one defence at one strength: mean and 95 % bootstrap interval over the seeds. "
    "Up is accurate, left is private. Advantage: an attack by one adversary minus its best "
    "baseline with the same knowledge, those that gain most by their mean over the seeds, which is "
    "a little optimistic for the attack. One whose interval holds 0 means that these attacks found "
    "nothing, not that there is nothing; where nothing leaks it is as often below 0 as above. The "
    "legend says (ε_x, ε_y, T): of one row's T releases with the encoder held fixed, and of "
    "labels. Lines: the active alone is the floor; one table of all features, which nobody holds, "
    "is what the same network reaches with them; TVFL needs all parties to predict. DCS is defined "
    "in docs/trade-off.md."
)


def write_page(study: Study, board: Board, folder: Path) -> Path:
    """Write index.html and its pictures; return the page's path."""
    pictures = [write_picture(board, target, folder) for target in board.targets]
    page = folder / "index.html"
    content = fill(
        "tradeoff.html.jinja",
        title=f"Trade-off {study.name}",
        reading=f"{READING} {_deltas(board)}",
        pictures=[inside(picture) for picture in pictures],
        header=board.header,
        rows=board.cells(),
        reports=[
            (entry.point.label, f"{entry.point.configs[0].name}/report.html")
            for entry in board.entries
            if not entry.point.centralised
        ],
        failures=board.failures,
    )
    page.write_text(content, encoding="utf-8")
    return page


def _deltas(board: Board) -> str:
    """At which delta the epsilons of rows hold."""
    deltas = {one.guard.delta for entry in board.entries for one in entry.point.configs}
    return f"ε_x holds at delta {', '.join(f'{delta:g}' for delta in sorted(deltas))}."
