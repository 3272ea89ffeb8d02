"""What a run guarantees, as one text: generated from what was really on, and no more.

Read by: people, in the result, the model card and the report.
"""

import math
from collections.abc import Sequence

from secure_apfed.privacy.label_mechanism import LabelMechanism

__all__ = ["LABEL_ASSUMPTIONS", "NOTHING_RELEASED", "guarantee_of"]

NOTHING_RELEASED = "nothing is released"

LABEL_ASSUMPTIONS = (
    "it covers training labels in whatever this run computed from them, the finished model and the "
    "baselines beside it included, taking as public the features, who is in the table, the class "
    "names, the split into training and test rows and every setting; not covered are test labels "
    "and what is measured with them, nor attacks that were asked for, whose scores compare guesses "
    "with the true labels"
)

_SEEDED = (
    "and label DP holds only against somebody who does not know the run's seed, since the "
    "answers are derived from it"
)


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
    parts = [released]
    if not math.isinf(labels.epsilon):
        parts += [labels.statement(), LABEL_ASSUMPTIONS, *([_SEEDED] if seeded else [])]
    elif not private_training and released != NOTHING_RELEASED:
        parts.append(labels.statement())
    return "; ".join([*parts, *also])
