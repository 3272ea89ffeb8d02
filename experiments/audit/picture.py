"""The picture of the slow audit: how well a score tells the worlds apart, beside the claim."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.special import ndtr, ndtri

from experiments.audit.outcome import CaseResult
from secure_apfed.privacy.gdp import gdp_epsilon

__all__ = ["draw"]

_DELTA = 1e-5


def draw(results: Sequence[CaseResult], path: Path) -> None:
    """Draw one panel a case: rates of the score, what the claim allows, the proved bound."""
    figure = Figure(figsize=(4.6 * len(results), 5.0), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results,
                            strict=True):  # fmt: skip
        fpr = np.linspace(0, 1, 401)
        claim, evidence = result.case.claim, result.evidence
        axes.fill_between(fpr, 0, ndtr(ndtri(fpr) + claim), color="#cfe3d4",
                          label=f"allowed by the claim, mu {claim:.2f}")  # fmt: skip
        order = np.sort(np.concatenate([result.scores_0, result.scores_1]))[::-1]
        alarms = [float((result.scores_0 > one).mean()) for one in order]
        hits = [float((result.scores_1 > one).mean()) for one in order]
        axes.plot(alarms, hits, color="#30506b", label="the score, all retrainings")
        axes.plot([evidence.fpr_high], [evidence.tpr_low], "o", color="#b3402a",
                  label=f"proved: mu at least {evidence.mu_low:.2f}")  # fmt: skip
        axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle="--")
        verdict = "claim exceeded" if result.exceeded else "under the claim"
        title = result.case.title.replace(": ", ":\n")
        axes.set_title(
            f"{title}\n{verdict}: epsilon at least "
            f"{evidence.epsilon_low(_DELTA):.2f}, claimed {gdp_epsilon(claim, _DELTA):.2f}",
            fontsize=9,
        )
        axes.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1),
                 ylim=(0, 1), aspect="equal")  # fmt: skip
        axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)
