"""Settings of multi-view learning: of MMVFL and of FedMV in its three forms."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from secure_apfed.settings import Settings
from secure_apfed.settings.method import MethodSettings

if TYPE_CHECKING:
    from secure_apfed.settings.run import RunSettings

__all__ = ["MultiviewSettings", "RecurrentSettings"]


class RecurrentSettings(Settings):
    """How the GRUs of S-FedMV are trained before their states become views.

    Attributes:
        local_epochs: of each party between two averages; batch_size: rows of a step.
        learning_rate: of RMSProp; dropout: of the states.
    """

    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(128, ge=1)
    learning_rate: float = Field(5e-3, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)


class MultiviewSettings(MethodSettings):
    """Weights of the terms of the objective; the defaults are those of the method's paper.

    Attributes:
        beta: of the l2,1 norm of a view's weights.
        zeta: how much a view's pseudo-labels are drawn to the common ones; a passive's `weight`
            multiplies its own.
        eta: how much the labels draw those that they are tied to.
        tolerance: of the objective, relative, below which updates that repeat until they converge
            end; most_rounds: of them, at most. Neither is a setting.
        network: that views are read by, `model.network` of the run.
    """

    beta: float = Field(ge=0)
    zeta: float = Field(gt=0)
    eta: float = Field(gt=0)

    predicts_alone = True
    network: ClassVar[str] = "identity"
    tolerance: ClassVar[float] = 1e-6
    most_rounds: ClassVar[int] = 100

    def check(self, config: "RunSettings") -> None:
        """See `MethodSettings`."""
        if config.guard.mechanism != "none":
            raise ValueError(
                f"guard.mechanism: method {self.name} sends no representation, and one person "
                f"moves all {self.averages} of a party, so that no noise of a guard covers it; say "
                "none"
            )
        if config.model.network != self.network:
            raise ValueError(
                f"model.network: method {self.name} takes {self.network}, got "
                f"{config.model.network}"
            )
