"""How every picture looks: colours that keep their meaning, and matplotlib's settings."""

from typing import Any

__all__ = ["ATTACK", "FAINT", "INK", "OTHER", "OURS", "STYLE"]

OURS, OTHER, ATTACK, INK, FAINT = "#1f6fb4", "#8a8f98", "#c8501e", "#24292f", "#d8dce1"
# matplotlib's stubs type the keys as one literal each.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": OTHER,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
}
