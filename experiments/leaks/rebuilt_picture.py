"""The picture of `experiments.leaks.split_learning`: images, and what was rebuilt of them."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from torch import Tensor

from experiments.report.picture_style import STYLE

__all__ = ["draw_rebuilt"]

_COLUMNS = 12
_SIDE = 0.7  # inches of an image


def draw_rebuilt(original: Tensor, rebuilt: Mapping[str, Tensor], path: Path) -> None:
    """Write a PNG: the first images (1, height, width) in a row, and a row for each attack.

    What is black is the least value of the originals, what is white the greatest.
    """
    rows = {"original": original, **rebuilt}
    low, high = float(original.min()), float(original.max())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.2 + _SIDE * _COLUMNS, 0.15 + 1.1 * _SIDE * len(rows)))
        grid = figure.subplots(len(rows), _COLUMNS, squeeze=False)
        for line, (name, images) in zip(grid, rows.items(), strict=True):
            for axes, image in zip(line, images, strict=False):
                axes.imshow(image[0].numpy(), cmap="gray", vmin=low, vmax=high)
                axes.set(xticks=[], yticks=[])
                axes.grid(visible=False)
            line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        figure.subplots_adjust(left=0.22, right=0.99, top=0.97, bottom=0.03, wspace=0.05)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
