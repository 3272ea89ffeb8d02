"""Settings of multi-view learning: of MMVFL and of FedMV in its three forms."""

from pydantic import Field

from secure_apfed.settings import Settings

__all__ = ["MultiviewSettings", "RecurrentSettings"]


class RecurrentSettings(Settings):
    """How the GRUs of S-FedMV are trained before their states become views.

    Attributes:
        rounds: of averaging; the run's other epochs average the weights of the views.
        local_epochs: of each party between two averages; batch_size: rows of a step.
        learning_rate: of RMSProp; dropout: of the states.
    """

    rounds: int = Field(20, ge=1)
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(128, ge=1)
    learning_rate: float = Field(5e-3, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)


class MultiviewSettings(Settings):
    """Weights of the terms of the objective; null takes those of the method's paper.

    Attributes:
        beta: of the l2,1 norm of a view's weights.
        zeta: how much a view's pseudo-labels are drawn to the common ones; a passive's `weight`
            multiplies its own.
        eta: how much the labels draw those that they are tied to.
        tolerance: of the objective, relative, below which updates that repeat until they converge
            end; most_rounds: of them, at most.
        recurrent: where views are sequences (s_fedmv).
    """

    beta: float | None = Field(None, ge=0, allow_inf_nan=False)
    zeta: float | None = Field(None, gt=0, allow_inf_nan=False)
    eta: float | None = Field(None, gt=0, allow_inf_nan=False)
    tolerance: float = Field(1e-6, gt=0, lt=1)
    most_rounds: int = Field(100, ge=1)
    recurrent: RecurrentSettings = RecurrentSettings()
