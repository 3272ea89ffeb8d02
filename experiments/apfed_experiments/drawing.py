"""Style and output of pictures: colours that keep their meaning, settings, margins."""

import math
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apfed_experiments.summary import Interval
from secure_apfed.base.files import write_atomically

OUR_COLOUR = "#1f6fb4"
OTHER_COLOUR = "#8a8f98"
ATTACK_COLOUR = "#c8501e"
TEXT_COLOUR = "#24292f"
GRID_COLOUR = "#d8dce1"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's (2008), which people with any colour vision can tell apart."""
_PICTURE_DPI = 150
# matplotlib's stubs type the keys as one literal each.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.titley": 1.0,  # else matplotlib searches for the position through all that is drawn
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": OTHER_COLOUR,
    "axes.labelcolor": TEXT_COLOUR,
    "text.color": TEXT_COLOUR,
    "xtick.color": TEXT_COLOUR,
    "ytick.color": TEXT_COLOUR,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID_COLOUR,
    "grid.linewidth": 0.7,
    "figure.facecolor": "white",
    "savefig.dpi": _PICTURE_DPI,
}
_PNG_HEADER_BYTES = 24  # bytes
_PNG_WIDTH = slice(16, 20)  # bytes of the header that hold the width in pixels
_PAGE_DPI = 96
_PHONE_PIXELS = 640  # greatest width of a picture that is legible on a phone
_LETTER_INCHES = 0.074
"""Width of a letter of this font and size, a little above the average."""
_LABEL_BELOW_INCHES = 0.27
_LABEL_BESIDE_INCHES = 0.5
"""Distances of the labels of axes from the axes."""


def estimate_text_inches(texts: Iterable[str]) -> float:
    """Estimate the width in inches of the longest line of these texts."""
    return _LETTER_INCHES * max(
        (len(line) for text in texts for line in text.splitlines()), default=0
    )


def set_margins(
    figure: Figure, *, left: float, right: float, bottom: float, top: float, column_gap: float = 0.0
) -> None:
    """Set the margins of a figure and the space between its columns of axes, in inches.

    The margins are `left`, `right`, `bottom` and `top`; the axes get the rest. Labels of axes get
    fixed positions. matplotlib's own layouts, and its search for the positions of labels, measure
    every text and take most of the time of a picture.
    """
    width, height = figure.get_size_inches()
    column_count = max(1, len({axes.get_position().x0 for axes in figure.axes}))
    axes_width = (width - left - right - (column_count - 1) * column_gap) / column_count
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom / height,
        top=1 - top / height,
        wspace=column_gap / axes_width,
    )
    for axes in figure.axes:
        # Label positions are in shares of the axes; 0.5 is the middle.
        box = axes.get_position()
        axes.xaxis.set_label_coords(0.5, -_LABEL_BELOW_INCHES / (box.height * height))
        axes.yaxis.set_label_coords(-_LABEL_BESIDE_INCHES / (box.width * width), 0.5)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A written picture: its file, and a sentence that says what it shows."""

    path: Path
    title: str
    caption: str

    @property
    def width(self) -> int:
        """Return the width on a page, in CSS pixels of 1/96 inch, at which letters have their font
        size.

        It is read from the header of the PNG.
        """
        header = self.path.read_bytes()[:_PNG_HEADER_BYTES]
        pixels = int.from_bytes(header[_PNG_WIDTH], "big")
        return round(pixels * _PAGE_DPI / _PICTURE_DPI)

    @property
    def is_too_wide_for_phone(self) -> bool:
        """Return whether its letters are too small on a phone's narrow screen."""
        return self.width > _PHONE_PIXELS

    @property
    def base64(self) -> str:
        """Return the file's content in base 64, as a page without other files embeds it."""
        return b64encode(self.path.read_bytes()).decode("ascii")


@contextmanager
def open_figure(path: Path, size_inches: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure, `size_inches` in inches, and write it as a PNG when the block ends."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size_inches, layout="constrained")
        yield figure
        png = BytesIO()
        figure.savefig(png, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, png.getvalue())


def draw_intervals(
    axes: Axes,
    x_positions: Sequence[float],
    intervals: Sequence[Interval],
    *,
    scale: float = 1.0,
    maximum: float = math.inf,
    marker_and_line: str,
    **options: Any,
) -> None:
    """Draw means with their intervals, joined by a line where there are several.

    Args:
        axes: axes to draw on.
        x_positions: horizontal position of each mean.
        intervals: means with their 95 % intervals.
        scale: factor from the intervals to the axis.
        maximum: greatest possible value, before scaling; error bars end there.
        marker_and_line: matplotlib's format: a marker and a line style.
        options: further options of matplotlib's `errorbar`.
    """
    means = [scale * interval.mean for interval in intervals]
    # matplotlib takes lengths below and above the means, (2, number of means).
    error_bars = np.reshape(
        [interval.compute_error_bars(scale, maximum=maximum) for interval in intervals], (-1, 2)
    ).T
    marker_only = (
        marker_and_line.rstrip("-:.") or marker_and_line
    )  # a single mean has a marker and no line
    axes.errorbar(
        x_positions,
        means,
        yerr=error_bars,
        capsize=2.5,
        fmt=marker_and_line if len(means) > 1 else marker_only,
        **options,
    )


def draw_epsilons(
    axes: Axes, epsilons: Sequence[float], *, is_filled_by_row: Sequence[bool], colour: str
) -> list[float]:
    """Draw a dot for each epsilon at the heights 0, -1, ..., on a logarithmic axis.

    An epsilon of 0 (nothing is sent) and an infinite one (no guarantee) have ticks of their own,
    beyond a break of the axis on the left and on the right.

    Args:
        epsilons: values from 0 to infinity, one for each row.
        is_filled_by_row: whether each dot is filled, else hollow.
        colour: colour of the dots.

    Returns:
        The horizontal position of each: log10 of a finite positive epsilon, else that of its tick.
    """
    exponents = [math.log10(epsilon) for epsilon in epsilons if 0 < epsilon < math.inf]
    # The axis covers whole powers of ten, at least one.
    lowest_exponent = math.floor(min(exponents, default=0.0))
    highest_exponent = max(math.ceil(max(exponents, default=0.0)), lowest_exponent + 1)
    label_by_position = (
        {float(power): f"{10.0**power:g}" for power in range(lowest_exponent, highest_exponent + 1)}
        if exponents
        else {}
    )
    zero_position = lowest_exponent - 1.0
    infinity_position = highest_exponent + 1.0
    if 0 in epsilons:
        label_by_position[zero_position] = "nothing\nis sent"
        _draw_break(axes, lowest_exponent - 0.5)
    if math.inf in epsilons:
        label_by_position[infinity_position] = "\u221e, no\nguarantee"
        _draw_break(axes, highest_exponent + 0.5)

    def find_position(epsilon: float) -> float:
        """Return where an epsilon is drawn on the horizontal axis."""
        if epsilon == 0:
            return zero_position
        return infinity_position if math.isinf(epsilon) else math.log10(epsilon)

    positions = [find_position(epsilon) for epsilon in epsilons]
    for height, (position, is_filled) in enumerate(zip(positions, is_filled_by_row, strict=True)):
        fill_colour = colour if is_filled else "white"
        axes.plot(position, -height, "o", color=colour, markerfacecolor=fill_colour)
    axes.set_xticks(list(label_by_position), list(label_by_position.values()), fontsize=7)
    # A little more than half a tick, so that no dot lies on the edge.
    axes.set_xlim(
        min(label_by_position, default=0.0) - 0.6, max(label_by_position, default=0.0) + 0.6
    )
    return positions


def _draw_break(axes: Axes, position: float) -> None:
    """Mark a break of the horizontal axis: its scale does not extend beyond this position."""
    axes.axvline(position, color=OTHER_COLOUR, linewidth=1, linestyle=(0, (1, 3)))
    axes.annotate(
        "//",
        (position, 0),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="center",
        color=TEXT_COLOUR,
        backgroundcolor="white",
        fontsize=8,
    )


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the vertical axis with these names at the heights 0, -1, ..., the first on top."""
    axes.set_yticks([-height for height in range(len(names))], names, fontsize=8)
    axes.grid(visible=False, axis="y")
