"""Settings of multi-view learning: of MMVFL and of FedMV in its three forms."""

from pydantic import Field

from secure_apfed.settings import Settings

__all__ = ["MultiviewSettings"]


class MultiviewSettings(Settings):
    """Weights of the terms of the objective; null takes those of the method's paper.

    Attributes:
        beta: of the l2,1 norm of a view's weights.
        zeta: how much a view's pseudo-labels are drawn to the common ones; a passive's `weight`
            multiplies its own.
        eta: how much the labels draw those that they are tied to.
        tolerance: of the objective, relative, below which updates that repeat until they converge
            end; most_rounds: of them, at most.
    """

    beta: float | None = Field(None, ge=0, allow_inf_nan=False)
    zeta: float | None = Field(None, gt=0, allow_inf_nan=False)
    eta: float | None = Field(None, gt=0, allow_inf_nan=False)
    tolerance: float = Field(1e-6, gt=0, lt=1)
    most_rounds: int = Field(100, ge=1)
