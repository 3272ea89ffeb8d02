"""What a party has given away so far, in figures and in words.

Read by: the run, its report and its result; a ledger makes one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from secure_apfed.privacy.accountants import EXACT
from secure_apfed.privacy.label_mechanism import LabelMechanism

__all__ = ["PrivacySpent"]


@dataclass(frozen=True, kw_only=True)
class PrivacySpent:
    """What was given away so far.

    Attributes:
        epsilon_x: one row's releases together, replace-one, encoder held fixed.
        epsilon_y: one training label, in all that is sent and in the finished model; infinite
            unless a label mechanism stood before training (then at delta 0) or it was private.
        epsilon_model: whole records in the trained model; infinite where nothing is claimed.
        delta: at which epsilon_x holds.
        releases: T, the releases of the row that was sent most often.
        mu: parameter of Gaussian DP of those releases together.
        accountants: epsilon_x by each accountant that was asked, by its name in `ACCOUNTANTS`;
            where one has no figure, words that say why.
        trace: how epsilon_x came about, line by line.
    """

    epsilon_x: float
    epsilon_y: float = math.inf
    epsilon_model: float = math.inf
    delta: float
    releases: int
    mu: float = math.inf
    accountants: Mapping[str, float | str] = field(default_factory=dict)
    trace: tuple[str, ...] = ()

    def with_labels(self, labels: LabelMechanism) -> "PrivacySpent":
        """The same account of a run that trained on the answers of `labels` only."""
        line = f"labels: {labels.name}, each answered once: epsilon_y {labels.epsilon:.4g}"
        epsilon_y = min(self.epsilon_y, labels.epsilon)
        return replace(self, epsilon_y=epsilon_y, trace=(*self.trace, line))

    @classmethod
    def nothing(cls, *, delta: float) -> "PrivacySpent":
        """The account of a party that has sent nothing; its model may tell of labels still."""
        return cls(
            epsilon_x=0.0,
            delta=delta,
            releases=0,
            mu=0.0,
            accountants={EXACT.name: 0.0},
            trace=("no representation was sent",),
        )
