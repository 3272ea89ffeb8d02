"""Settings of what labels the active's rows for its student, where nobody votes."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from apfed_protocols.svd.agreement import MOST_MASK_ROWS
from secure_apfed.labellers import LABELLERS, PrivateLogistic
from secure_apfed.models.settings import ModelSettings
from secure_apfed.privacy.settings import LARGEST_LABEL_EPSILON
from secure_apfed.settings import Settings, unknown_name

__all__ = [
    "HEAD",
    "DecompositionSettings",
    "DistillationSettings",
    "ImputationSettings",
    "TeacherSettings",
]

HEAD = "head"
# Those that the active may use for itself; noise on weights is against others.
_LABELLERS = [name for name in LABELLERS if name != PrivateLogistic.name]


class TeacherSettings(Settings):
    """The joint model and how it labels rows.

    Attributes:
        model: networks of the active and of passives that have none of their own; the run's
            `model` is the student.
        labels: "head" is the joint model's own head; a key of `LABELLERS` labels the rows from all
            parties' representations, which takes one more of each labelled row.
        form: "soft" labels are probabilities, "hard" ones name one class.
        epsilon: of the randomised response under which the student learns each label that is not
            the active's own; null: none. Labels are hard then. What it covers stands in
            `secure_apfed.methods.joint_teacher`.
    """

    model: ModelSettings = ModelSettings(network="linear", representation=16)
    labels: str = HEAD
    form: Literal["soft", "hard"] = "soft"
    epsilon: float | None = Field(None, gt=0, le=LARGEST_LABEL_EPSILON)

    @field_validator("labels")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in (HEAD, *_LABELLERS):
            raise ValueError(unknown_name(name, (HEAD, *_LABELLERS)))
        return name

    @model_validator(mode="after")
    def _others_move_no_label(self) -> Self:
        if (
            self.epsilon is not None
            and self.labels != HEAD
            and not LABELLERS[self.labels].inductive
        ):
            raise ValueError(
                f"teacher.epsilon: under labels: {self.labels} a person moves other people's "
                f"labels, too, and no epsilon of one label covers that; use {HEAD}, or leave "
                "epsilon out"
            )
        return self


class ImputationSettings(Settings):
    """What passives release once, and how the active labels its rows by it.

    Attributes:
        projection: of a passive's features. "principal_components" are fitted to its own aligned
            rows, without noise; "random" is drawn from the run's seed and moves with nobody's
            features.
        numbers: of one row of the projection, at most.
        labels: a key of `LABELLERS`.
        labels_from: "predicted" reads what the active predicts of the passives' rows; "released"
            the rows as they came, noise and all.
    """

    projection: Literal["principal_components", "random"] = "principal_components"
    numbers: int = Field(16, ge=1, le=4096)
    labels: str = "spreading"
    labels_from: Literal["predicted", "released"] = "predicted"

    @field_validator("labels")
    @classmethod
    def _is_a_labeller(cls, name: str) -> str:
        if name not in _LABELLERS:
            raise ValueError(unknown_name(name, _LABELLERS))
        return name


class DistillationSettings(Settings):
    """Autoencoders that end early, and how the student's code is drawn to the joint one.

    The defaults are APC-VFL's (section 4, Table 3, Appendix B); its value of lambda is not legible.
    What speaks of g1 and g2 is for those who fit them; whose code resembles singular vectors has
    the student alone.

    Attributes:
        own: g1 of the active; passive: g1 of passives that have no `model` of their own.
        joint: hidden widths of g2, whose code is as wide as the student's (the run's `model`).
        loss: between the two codes of an aligned row; weight: lambda of Eq. (5), 0: none.
        epochs: at most; patience: of them without a better loss on held-out rows, after which
            training ends and the best weights are taken; held_out: share of these rows.
        learning_rate: of Adam; batch_size: rows of a step.
    """

    own: ModelSettings = ModelSettings(network="selu", hidden=(64,), representation=128)
    passive: ModelSettings = ModelSettings(network="selu", hidden=(128,), representation=256)
    joint: tuple[int, ...] = (256,)
    loss: Literal["mse", "mae"] = "mse"
    weight: float = Field(1.0, ge=0)
    epochs: int = Field(200, ge=1)
    patience: int = Field(10, ge=1)
    held_out: float = Field(0.1, gt=0, lt=1)
    learning_rate: float = Field(1e-3, gt=0)
    batch_size: int = Field(128, ge=1)


class DecompositionSettings(Settings):
    """How all parties' tables are decomposed; `model.representation` says how many vectors.

    Attributes:
        mask_rows: rows of one block of the orthogonal mask, at most. A block for all rows hides
            most, and takes the cube of their number in time.
    """

    mask_rows: int = Field(1024, ge=2, le=MOST_MASK_ROWS)
