"""Settings of defences beyond differential privacy: one class for each entry of `DEFENCES`."""

from typing import Annotated, Literal

from pydantic import Field

from secure_apfed.settings import Settings
from secure_apfed.settings.privacy import LARGEST_CLIP, SMALLEST_CLIP

__all__ = [
    "ClipAndNoiseSettings",
    "CompressionSettings",
    "ConfusionalLabelsSettings",
    "DefenceSettings",
    "DiscreteSgdSettings",
    "MarvellSettings",
    "MaxNormSettings",
    "MidSettings",
    "NoPeekSettings",
]


class _PenaltySettings(Settings):
    weight: float = Field(ge=0)


class NoPeekSettings(_PenaltySettings):
    """Distance correlation in the loss.

    Attributes:
        weight: alpha_1 of the paper, relative to the task loss; 0 changes nothing.
    """

    kind: Literal["nopeek"] = "nopeek"
    weight: float = Field(0.1, ge=0)


class MidSettings(_PenaltySettings):
    """A variational bottleneck.

    Attributes:
        weight: lambda of the paper, relative to the task loss; nats.
    """

    kind: Literal["mid"] = "mid"
    weight: float = Field(1e-3, ge=0)


class ConfusionalLabelsSettings(Settings):
    """The autoencoder.

    Attributes:
        steps: of the autoencoder's training.
    """

    kind: Literal["confusional_labels"] = "confusional_labels"
    steps: int = Field(1500, ge=1, le=1_000_000)


class CompressionSettings(Settings):
    """Top-k by magnitude.

    Attributes:
        keep: share of a batch's numbers that stay, at least one number.
    """

    kind: Literal["compression"] = "compression"
    keep: float = Field(0.1, gt=0, le=1)


class DiscreteSgdSettings(Settings):
    """Few levels.

    Attributes:
        bins: intervals between the lowest and the highest level.
    """

    kind: Literal["discrete_sgd"] = "discrete_sgd"
    bins: int = Field(6, ge=1, le=4096)


class ClipAndNoiseSettings(Settings):
    """Row clip and Gaussian noise.

    Attributes:
        clip: C_g, the L2 bound of one row of the gradient that the passive contributes.
        sigma: standard deviation of the noise on each number, in the same unit; 0: none. The
            sum clips the noisy row once more, at `secure_sum.clip`.
    """

    kind: Literal["clip_and_noise"] = "clip_and_noise"
    clip: float = Field(1.0, ge=SMALLEST_CLIP, le=LARGEST_CLIP)
    sigma: float = Field(0.1, ge=0)


class MarvellSettings(Settings):
    """Optimal perturbation.

    Attributes:
        strength: s; the noise's expected squared norm is at most s |g1 - g0|^2 a row, with g1 and
            g0 the classes' mean gradients in the batch.
    """

    kind: Literal["marvell"] = "marvell"
    strength: float = Field(4.0, gt=0, le=1e6)


class MaxNormSettings(Settings):
    """Nothing to set: the longest gradient of a batch is the measure."""

    kind: Literal["max_norm"] = "max_norm"


DefenceSettings = Annotated[
    NoPeekSettings
    | MidSettings
    | ConfusionalLabelsSettings
    | CompressionSettings
    | DiscreteSgdSettings
    | ClipAndNoiseSettings
    | MarvellSettings
    | MaxNormSettings,
    Field(discriminator="kind"),
]
"""The settings of any defence, told apart by `kind`."""
