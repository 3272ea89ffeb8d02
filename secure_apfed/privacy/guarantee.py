"""What a run guarantees, as one text: generated from what was really on, and no more.

Read by: people, in the result, the model card and the report.
"""

import math

from secure_apfed.privacy.label_mechanism import LabelMechanism

__all__ = ["LABEL_ASSUMPTIONS", "NOTHING_RELEASED", "guarantee_of"]

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


def guarantee_of(
    released: str, labels: LabelMechanism, *, private_training: bool, seeded: bool = False
) -> str:
    """Return the guarantee of a run.

    Args:
        released: what the guard or private training promises, or that nothing is released.
        labels: what the training labels went through.
        private_training: whether `released` speaks of labels already.
        seeded: whether the answers are derived from the run's seed.
    """
    if math.isinf(labels.epsilon):
        told = private_training or released == NOTHING_RELEASED
        return released if told else f"{released}; {labels.statement()}"
    told = f"{released}; {labels.statement()}; {LABEL_ASSUMPTIONS}"
    return f"{told}; {_SEEDED}" if seeded else told
