"""What people are told of a run's epsilons: one name for one thing, and no figure without its delta
and the T it is for.

Run by: the command line, for a forecast and for a result, the live view, audit logs and reports.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from secure_apfed.planning.forecast import Forecast
    from secure_apfed.privacy.ledger import PrivacySpent

FIGURES: Mapping[str, tuple[str, str]] = {
    "epsilon_x": ("one row's releases", "encoder"),
    "epsilon_v": ("one person's votes", "labeller"),
    "epsilon_c": ("one person in sums", "networks"),
    "epsilon_y": ("one training label", ""),
    "epsilon_model": ("one whole record", ""),
}
"""By its name everywhere, of what a privacy figure speaks, and what it holds fixed."""


def figure_title(figure: str, *, of: str = "", fixed: bool = False) -> str:
    """Return the name of a figure, `of` a party, with what it speaks of, and holds `fixed`.

    Example:
        >>> figure_title("epsilon_v", of="shop", fixed=True)
        "epsilon_v of shop, one person's votes, labeller held fixed"
    """
    what, held = FIGURES[figure]
    whose = f" of {of}" if of else ""
    return f"{figure}{whose}, {what}" + (f", {held} held fixed" if fixed and held else "")


def privacy_rows(
    privacy: Union["PrivacySpent", "Forecast"], *, figure: str, counted: bool
) -> list[tuple[str, str]]:
    """Return (name, value) for the three epsilons of a run.

    The figure speaks of what leaves a party in this run; where passives add noise to that, they
    tell in rows of their own what it costs them (`counted`).
    """
    model = privacy.epsilon_model
    if figure == "epsilon_x":
        value = epsilon_text(privacy.epsilon_x, delta=privacy.delta, releases=privacy.releases)
        left = [(figure_title(figure), value)]
    else:
        left = [] if counted else [(figure_title(figure), "inf")]
    return [
        *left,
        (figure_title("epsilon_y"), epsilon_text(privacy.epsilon_y, delta=privacy.delta)),
        (
            figure_title("epsilon_model"),
            "not claimed" if math.isinf(model) else epsilon_text(model, delta=privacy.delta),
        ),
    ]


def epsilon_text(epsilon: float, *, delta: float, releases: int | None = None) -> str:
    """Return an epsilon with what it needs to mean anything.

    Example:
        >>> epsilon_text(8.0, delta=1e-5, releases=10)
        '8 at delta 1e-05, T 10'
        >>> epsilon_text(float("inf"), delta=1e-5)
        'inf'
    """
    if math.isinf(epsilon):
        return "inf"
    counted = "" if releases is None else f", T {releases:,}"
    return f"{epsilon:.3g} at delta {delta:g}{counted}"
