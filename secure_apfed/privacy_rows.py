"""What people are told of a run's epsilons: no figure without its delta and the T it is for.

Run by: the command line, for a forecast and for a result; the report has words of its own.
"""

import math
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from secure_apfed.planning.forecast import Forecast
    from secure_apfed.privacy import PrivacySpent

__all__ = ["cross_check_rows", "passive_rows", "privacy_rows", "told"]


def privacy_rows(privacy: Union["PrivacySpent", "Forecast"]) -> list[tuple[str, str]]:
    """Return (name, value) for the three epsilons of a run."""
    model = privacy.epsilon_model
    return [
        (
            "epsilon_x, one row's releases",
            told(privacy.epsilon_x, delta=privacy.delta, releases=privacy.releases),
        ),
        ("epsilon_y, one training label", told(privacy.epsilon_y, delta=privacy.delta)),
        (
            "epsilon_model, one whole record",
            "not claimed" if math.isinf(model) else told(model, delta=privacy.delta),
        ),
    ]


def cross_check_rows(privacy: "PrivacySpent") -> list[tuple[str, str]]:
    """Return (name, value) for each accountant; a value is a figure or why there is none."""
    return [
        (f"epsilon_x by {name}", value if isinstance(value, str) else f"{value:.4g}")
        for name, value in privacy.accountants.items()
    ]


def passive_rows(forecast: "Forecast") -> list[tuple[str, str]]:
    """Return (name, value) for each passive that adds noise under the sum."""
    delta, releases = forecast.delta_passives, forecast.releases_passives
    return [
        (f"epsilon of {passive}, in sums", told(epsilon, delta=delta, releases=releases))
        for passive, epsilon in forecast.epsilon_passives.items()
        if delta is not None
    ]


def told(epsilon: float, *, delta: float, releases: int | None = None) -> str:
    """Return an epsilon with what it needs to mean anything.

    Example:
        >>> told(8.0, delta=1e-5, releases=10)
        '8 at delta 1e-05, T 10'
        >>> told(float("inf"), delta=1e-5)
        'inf'
    """
    if math.isinf(epsilon):
        return "inf"
    counted = "" if releases is None else f", T {releases:,}"
    return f"{epsilon:.3g} at delta {delta:g}{counted}"
