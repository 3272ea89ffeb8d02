"""What one case of the slow audit showed, in a sentence and in plain values."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.audit.bounds import Evidence
from experiments.audit.cases import DELTA, EPOCHS, Case
from secure_apfed.privacy.gdp import gdp_epsilon

__all__ = ["CaseResult"]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What one case showed.

    Attributes:
        retrainings: of both worlds together.
        scores_0, scores_1: of world 0 and world 1, each a retraining.
    """

    case: Case
    retrainings: int
    evidence: Evidence
    scores_0: NDArray[np.float64]
    scores_1: NDArray[np.float64]
    seconds: float

    @property
    def exceeded(self) -> bool:
        """Whether the claim is proved wrong for what was read."""
        return self.evidence.mu_low > self.case.claim

    def sentence(self) -> str:
        """Say it in one line."""
        proved, claimed = self.evidence.epsilon_low(DELTA), gdp_epsilon(self.case.claim, DELTA)
        verdict = "EXCEEDS the claim for" if self.exceeded else "stays under the claim for"
        return (
            f"{self.case.title}: epsilon at least {proved:.2f} {verdict} {self.case.says}, "
            f"{claimed:.2f} (mu {self.evidence.mu_low:.2f}, claimed {self.case.claim:.2f}; "
            f"{self.retrainings} retrainings, {self.seconds:.0f} s)"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "title": self.case.title, "claim_of": self.case.says, "view": self.case.view,
            "retrainings": self.retrainings, "epochs": EPOCHS, "delta": DELTA,
            "claim_mu": self.case.claim, "claim_epsilon": gdp_epsilon(self.case.claim, DELTA),
            **asdict(self.evidence), "epsilon_low": self.evidence.epsilon_low(DELTA),
            "exceeded": self.exceeded, "expected": self.case.exceeded, "seconds": self.seconds,
        }  # fmt: skip
