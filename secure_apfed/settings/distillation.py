"""Settings of autoencoders that end early, and of the student whose code resembles another."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from secure_apfed.settings import THE_ACTIVE, Settings

__all__ = ["DistillationSettings"]


class DistillationSettings(Settings):
    """Autoencoders that end early, and how the student's code is drawn to the joint one.

    The defaults are APC-VFL's (section 4, Table 3, Appendix B); its value of lambda is not legible.

    Attributes:
        loss: between the two codes of an aligned row; weight: lambda of Eq. (5), 0: none.
        epochs: at most; patience: of them without a better loss on held-out rows, after which
            training ends and the best weights are taken; held_out: share of these rows. The last
            two are no settings.
        learning_rate: of Adam; batch_size: rows of a step.
    """

    loss: Annotated[Literal["mse", "mae"], THE_ACTIVE] = "mse"
    weight: Annotated[float, Field(ge=0), THE_ACTIVE] = 1.0
    epochs: int = Field(200, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    batch_size: int = Field(128, ge=1)

    patience: ClassVar[int] = 10
    held_out: ClassVar[float] = 0.1

    @classmethod
    def among(cls, settings: Settings) -> Self:
        """What other settings say of these, as those of a method that distils; defaults beside."""
        return cls.model_validate(settings.model_dump(include=set(cls.model_fields)))
