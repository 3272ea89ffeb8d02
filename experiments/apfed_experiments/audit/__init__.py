"""The slow audit: what retraining a thousand times proves about a claim of privacy.

`secure-apfed audit [--quick]`: in each case half of the retrainings have a record
and half have its replacement; a score is read from what the others receive, and how well it tells
the two apart bounds mu below (`bounds`). With the guard alone the bound exceeds the row-release
figure: the other rows tell of the record through the encoder. With DP-SGD on it stays under the
claim. Cases of votes (`vote_cases`) play labellers and openings in two such worlds. The fast audit
of a release path is `secure_apfed.privacy.audit`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from apfed_experiments.audit.bounds import Evidence, evidence_from
from apfed_experiments.audit.retraining import (
    CASES,
    DELTA,
    EPOCHS,
    Case,
    OtherRows,
    Retrainings,
    WhiteBox,
    directions,
    networks,
    task_of,
)
from apfed_experiments.audit.votes import VOTE_CASES, VoteResult, play_vote_case
from apfed_experiments.bench.rows import machine
from apfed_experiments.columns import write_text
from apfed_experiments.drawing import ATTACK, OTHER, OURS, drawing
from secure_apfed.files import to_json
from secure_apfed.privacy.accountants import gdp_epsilon

__all__ = ["CaseResult", "VoteResult", "draw", "play_case", "run_audit"]

_CONFIDENCE = 0.95
_PAIRS = 50
# Retrainings that are held in memory at once.
_TOGETHER = 1000


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
        return self.evidence.mu_low > self.case.claim

    def sentence(self) -> str:
        proved, claimed = self.evidence.epsilon_low(DELTA), gdp_epsilon(self.case.claim, DELTA)
        verdict = "EXCEEDS the claim for" if self.exceeded else "stays under the claim for"
        return (
            f"{self.case.title}: epsilon at least {proved:.2f} {verdict} {self.case.says}, "
            f"{claimed:.2f} (mu {self.evidence.mu_low:.2f}, claimed {self.case.claim:.2f}; "
            f"{self.retrainings} retrainings, {self.seconds:.0f} s)"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.case.title, "claim_of": self.case.says, "view": self.case.view,
            "retrainings": self.retrainings, "epochs": EPOCHS, "delta": DELTA,
            "claim_mu": self.case.claim, "claim_epsilon": gdp_epsilon(self.case.claim, DELTA),
            **asdict(self.evidence), "epsilon_low": self.evidence.epsilon_low(DELTA),
            "exceeded": self.exceeded, "expected": self.case.exceeded, "seconds": self.seconds,
        }  # fmt: skip


def run_audit(
    folder: Path,
    *,
    retrainings: int,
    seed: int = 0,
    device: torch.device,
    on_done: Callable[[CaseResult | VoteResult], None] = lambda result: None,
) -> tuple[list[CaseResult], list[VoteResult]]:
    """Play all cases; write audit.json and audit.png into `folder`.

    The bounds of each table of cases hold together at 95 %.

    Args:
        folder: made where missing.
        retrainings: of both worlds together in each case, even, at least 120.
        seed: of the noise.
        device: where to compute.
        on_done: called after every case.
    """
    results = []
    for index, case in enumerate(CASES.values()):
        level = (1 - _CONFIDENCE) / len(CASES)
        results.append(
            play_case(case, retrainings=retrainings, seed=1000 * seed + 100 * index,
                      level=level, device=device)
        )  # fmt: skip
        on_done(results[-1])
    votes = []
    for index, vote_case in enumerate(VOTE_CASES.values()):
        level = (1 - _CONFIDENCE) / len(VOTE_CASES)
        votes.append(
            play_vote_case(vote_case, runs=retrainings // 2, seed=1000 * seed + index, level=level)
        )
        on_done(votes[-1])
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "confidence": _CONFIDENCE, "seed": seed, "device": str(device), "machine": machine(),
        "cases": [result.as_json() for result in results],
        "votes": [result.as_json() for result in votes],
    }  # fmt: skip
    write_text(folder / "audit.json", to_json(found))
    draw(results, folder / "audit.png")
    return results, votes


def play_case(
    case: Case, *, retrainings: int, seed: int, level: float, device: torch.device
) -> CaseResult:
    """Retrain, score and bound one case at significance `level`."""
    began = time.monotonic()
    task = task_of(case).to(device)
    moved = directions(case, task, pairs=_PAIRS, seed=seed) if case.view == "other rows" else []
    scores: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    parts = math.ceil(retrainings / _TOGETHER)
    for part in range(parts):
        modules, objective = networks()
        count = 2 * (retrainings // (2 * parts))
        runs = Retrainings(task, case.protection, modules=modules, objective=objective,
                           count=count, seed=seed + 1 + part)  # fmt: skip
        score = OtherRows(runs, moved) if case.view == "other rows" else WhiteBox(runs)
        runs.play(score)
        for world in (0, 1):
            scores[world].append(score.score_R[runs.world_R == world].cpu())
    scores_0, scores_1 = (torch.cat(one).numpy() for one in scores)
    return CaseResult(
        case=case,
        retrainings=2 * len(scores_0),
        evidence=evidence_from(scores_0, scores_1, level=level),
        scores_0=scores_0,
        scores_1=scores_1,
        seconds=time.monotonic() - began,
    )


def draw(results: Sequence[CaseResult], path: Path) -> None:
    """Draw one panel a case: rates of the score, what the claim allows, the proved bound."""
    with drawing(path, (4.6 * len(results), 5.0)) as figure:
        panels = figure.subplots(1, len(results), squeeze=False)[0]
        for axes, result in zip(panels, results, strict=True):
            _draw_case(axes, result)


def _draw_case(axes: Axes, result: CaseResult) -> None:
    fpr = np.linspace(0, 1, 401)
    claim, evidence = result.case.claim, result.evidence
    axes.fill_between(fpr, 0, ndtr(ndtri(fpr) + claim), color="#cfe3d4",
                      label=f"allowed by the claim, mu {claim:.2f}")  # fmt: skip
    order = np.sort(np.concatenate([result.scores_0, result.scores_1]))[::-1]
    alarms = [float((result.scores_0 > score).mean()) for score in order]
    hits = [float((result.scores_1 > score).mean()) for score in order]
    axes.plot(alarms, hits, color=OURS, label="the score, all retrainings")
    axes.plot([evidence.fpr_high], [evidence.tpr_low], "o", color=ATTACK,
              label=f"proved: mu at least {evidence.mu_low:.2f}")  # fmt: skip
    axes.plot([0, 1], [0, 1], color=OTHER, linewidth=0.8, linestyle="--")
    verdict = "claim exceeded" if result.exceeded else "under the claim"
    title = result.case.title.replace(": ", ":\n")
    axes.set_title(
        f"{title}\n{verdict}: epsilon at least {evidence.epsilon_low(DELTA):.2f}, "
        f"claimed {gdp_epsilon(claim, DELTA):.2f}",
        fontsize=9,
    )
    axes.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1),
             ylim=(0, 1), aspect="equal")  # fmt: skip
    axes.legend(loc="lower right", fontsize=8)
