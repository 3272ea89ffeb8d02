"""What a run guarantees, as one text: generated from what was really on, and no more.

Read by: people, in the result, the model card and the report.
"""

import math
from collections.abc import Sequence

from secure_apfed.privacy.label_mechanism import LabelMechanism

__all__ = [
    "LABEL_ASSUMPTIONS",
    "NOTHING_RELEASED",
    "contributions_told",
    "guarantee_of",
    "joint_releases_told",
]

NOTHING_RELEASED = "nothing is released"

LABEL_ASSUMPTIONS = (
    "it covers training labels in whatever was computed from them, the finished model included, "
    "taking as public the features, who is in the table, the class names, the split into training "
    "and test rows and every setting; not covered are test labels and the accuracy that is "
    "measured with them"
)

_SEEDED = (
    "and label DP holds only against somebody who does not know the run's seed, since the "
    "answers are derived from it"
)

_CONTRIBUTIONS = (
    "contribution guarantee: each passive's epsilon speaks of one person's features at that "
    "passive, its networks held fixed, by the noise of honest passives, against whoever reads the "
    "sums alone; a step that is played again in a later session counts again"
)


def contributions_told(single: str, *, seeded: bool) -> str:
    """What noise under the sum gives.

    Args:
        single: who reads single contributions, as the sum says it; "": nobody.
        seeded: whether the noise is derived from the run's seed.
    """
    seed = (
        "only against somebody who does not know the run's seed, and while no step is played "
        "twice, in this run or with other numbers in another of that seed"
    )
    more = [f"not against {single}"] if single else []
    return "; ".join([_CONTRIBUTIONS, *more, *([seed] if seeded else [])])


def joint_releases_told(released: str, passives: int) -> str:
    """What the guards of several passives promise, who all send rows of the same people."""
    if passives < 2:
        return released
    return f"{released}; epsilon_x is of one passive's row, and those of one person add up"


def guarantee_of(
    released: str, labels: LabelMechanism, *, private_training: bool, seeded: bool = False,
    also: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the guarantee of a run.

    Args:
        released: what the guard or private training promises, or that nothing is released.
        labels: what the training labels went through.
        private_training: whether `released` speaks of labels already.
        seeded: whether the answers are derived from the run's seed.
        also: what else was on, with what it gives or does not.
    """
    told = [released]
    if not math.isinf(labels.epsilon):
        told += [labels.statement(), LABEL_ASSUMPTIONS, *([_SEEDED] if seeded else [])]
    elif not private_training and released != NOTHING_RELEASED:
        told.append(labels.statement())
    return "; ".join([*told, *also])
