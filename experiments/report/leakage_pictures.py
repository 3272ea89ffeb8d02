"""Pictures of what leaked: rebuilt images beside the originals."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from attacks.interface import AttackResult
from experiments.reconstructions import Reconstruction, key_of
from experiments.report.folder import RunFolder
from experiments.report.picture_style import ATTACK, OTHER

__all__ = ["draw_rebuilt", "draw_roc"]

_COLUMN, _ROW = 0.85, 0.95
_MOST = 4


def draw_roc(run: RunFolder) -> tuple[Figure, str] | None:
    """ROC of attacks on membership, both axes logarithmic; None without any."""
    shown = [result for result in run.attacks or () if result.roc]
    if not shown:
        return None
    figure = Figure(figsize=(5.6, 4.4), layout="constrained")
    axes = figure.subplots()
    for result in shown:
        false, true = (np.array(rates) for rates in zip(*result.roc, strict=True))
        axes.step(false, true, where="post", color=ATTACK, linewidth=1.8,
                  label=f"{result.variant}, AUC {result.score['auc']:.3f}")  # fmt: skip
    least = 1 / max(sum(result.counts.values()) for result in shown)
    axes.plot([least, 1], [least, 1], color=OTHER, linestyle=":", label="guessing")
    axes.set(
        xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1),
        title="Who trained the model",
        xlabel="false positive rate", ylabel="true positive rate",
    )  # fmt: skip
    axes.legend(loc="lower right", frameon=False)
    return figure, (
        "Attacks on membership by an outside querier. What matters is the left end: the share of "
        "the people who trained that are recognised almost without a mistake."
    )


def draw_rebuilt(run: RunFolder) -> tuple[Figure, str] | None:
    """The attacks that rebuilt images, most recovered first; None: none, or not to be shown."""
    examples = run.examples or {}
    shown = sorted(
        (
            (result, examples[key_of(result)])
            for result in run.attacks or ()
            if key_of(result) in examples
        ),
        key=lambda pair: -(pair[0].score.get("r2") or 0.0),
    )[:_MOST]
    if not shown:
        return None
    columns = max(len(example.original) for _, example in shown)
    figure = Figure(figsize=(1.9 + _COLUMN * columns, 0.3 + 2 * _ROW * len(shown)), layout="tight")
    grid = figure.subplots(2 * len(shown), columns, squeeze=False)
    for at, (result, example) in enumerate(shown):
        _draw_pair(grid[2 * at], grid[2 * at + 1], result, example)
    return figure, (
        "People's features as their party holds them, and below them what the attack rebuilt of "
        "the same people: the first rows that were scored, not the best. The owner of the run "
        "folder sees real data here."
    )


def _draw_pair(
    above: list[Axes], below: list[Axes], result: AttackResult, example: Reconstruction
) -> None:
    low, high = float(example.original.min()), float(example.original.max())
    for axes in (*above, *below):
        axes.set(xticks=[], yticks=[])
        axes.set_frame_on(False)
    for line, images in ((above, example.original), (below, example.rebuilt)):
        for axes, image in zip(line, images, strict=False):
            axes.imshow(_as_picture(image, low, high), cmap="gray", vmin=0, vmax=1)
    name = f"{result.victim}\n{result.attack.replace('_', ' ')}"
    for axes, words in ((above[0], f"{name}\noriginal"), (below[0], f"{name}\nrebuilt")):
        axes.set_ylabel(words, rotation=0, ha="right", va="center", fontsize=7.5)


def _as_picture(image: Tensor, low: float, high: float) -> NDArray[np.float32]:
    """Scale (channels, height, width) to 0..1 by the originals' range, channels last."""
    scaled = ((image - low) / (high - low or 1.0)).clamp(0, 1)
    shown: NDArray[np.float32] = (
        scaled.permute(1, 2, 0) if len(scaled) == 3 else scaled[0]
    ).numpy()
    return shown
