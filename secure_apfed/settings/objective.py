"""Settings of the passive objectives: one class for each entry of `OBJECTIVES`."""

from typing import Annotated, Literal

from pydantic import Field

from secure_apfed.settings import Settings

__all__ = ["ContrastiveSettings", "ObjectiveSettings", "ReconstructionSettings"]


class ReconstructionSettings(Settings):
    """Eq. (12) with a squared norm: mean squared error of the decoder to the passive's view."""

    name: Literal["reconstruction"] = "reconstruction"


class ContrastiveSettings(Settings):
    """Eqs. (14) to (16).

    Attributes:
        anchors: "active" is the paper's Eq. (14); "both" is symmetric over the two views
            (2N anchors), as in the authors' release.
        temperature: tau > 0, no unit.
    """

    name: Literal["contrastive"] = "contrastive"
    anchors: Literal["both", "active"] = "both"
    temperature: float = Field(1.0, gt=0)


ObjectiveSettings = Annotated[
    ReconstructionSettings | ContrastiveSettings, Field(discriminator="name")
]
