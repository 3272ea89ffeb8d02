"""Experiments: configurations, the main job, benches, and the tables and pictures made of them.

`secure-apfed study` and its neighbours play them; the packages below do not know of it.
`tradeoff_figure` draws the picture of a trade-off of one's own training loop.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apfed_experiments.loop_figure import tradeoff_figure

__all__ = ["tradeoff_figure"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, since it brings matplotlib."""
    if name not in __all__:
        raise AttributeError(f"apfed_experiments has no {name!r}; it has {', '.join(__all__)}")
    from apfed_experiments.loop_figure import tradeoff_figure

    return tradeoff_figure
