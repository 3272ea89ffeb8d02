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
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from scipy.special import ndtr, ndtri

from apfed_experiments.audit.bounds import Result, evidence_from
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
from apfed_experiments.audit.votes import VOTE_CASES, play_vote_case
from apfed_experiments.columns import write_text
from apfed_experiments.drawing import ATTACK, OTHER, OURS, drawing
from apfed_experiments.machine import machine
from secure_apfed.files import to_json
from secure_apfed.privacy.accountants import gdp_epsilon

__all__ = ["draw", "play_case", "run_audit"]

_CONFIDENCE = 0.95
_PAIRS = 50
# Retrainings that are held in memory at once.
_TOGETHER = 1000


def run_audit(
    folder: Path, *, retrainings: int, seed: int = 0, device: torch.device,
    on_done: Callable[[Result], None] = lambda result: None,
) -> tuple[list[Result], list[Result]]:  # fmt: skip
    """Play all cases; write audit.json and audit.png into `folder`.

    The bounds of each table of cases hold together at 95 %. `retrainings`, of both worlds together
    in each case, are even, at least 120; `seed` is that of the noise.
    """
    results, votes = list[Result](), list[Result]()
    for index, case in enumerate(CASES.values()):
        level = (1 - _CONFIDENCE) / len(CASES)
        drawn = 1000 * seed + 100 * index
        results.append(
            play_case(case, retrainings=retrainings, seed=drawn, level=level, device=device)
        )
        on_done(results[-1])
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
) -> Result:
    """Retrain, score and bound one case at significance `level`."""
    began = time.monotonic()
    task = task_of(case).to(device)
    moved = directions(case, task, pairs=_PAIRS, seed=seed) if case.view == "other rows" else []
    scores: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    batches = math.ceil(retrainings / _TOGETHER)
    for part in range(batches):
        modules, objective = networks()
        count = 2 * (retrainings // (2 * batches))
        runs = Retrainings(task, case.protection, modules=modules, objective=objective,
                           count=count, seed=seed + 1 + part)  # fmt: skip
        score = OtherRows(runs, moved) if case.view == "other rows" else WhiteBox(runs)
        runs.play(score)
        for world in (0, 1):
            scores[world].append(score.score_R[runs.world_R == world].cpu())
    scores_0, scores_1 = (torch.cat(parts).numpy() for parts in scores)
    evidence, count = evidence_from(scores_0, scores_1, level=level), 2 * len(scores_0)
    found = {
        "view": case.view, "retrainings": count, "epochs": EPOCHS, "delta": DELTA,
        "claim_mu": case.claim, "claim_epsilon": gdp_epsilon(case.claim, DELTA),
        **asdict(evidence), "epsilon_low": evidence.epsilon_low(DELTA),
        "seconds": time.monotonic() - began,
    }  # fmt: skip
    counted = f"mu {evidence.mu_low:.2f}, claimed {case.claim:.2f}; {count} retrainings"
    exceeded = evidence.mu_low > case.claim
    return Result(
        case=case, exceeded=exceeded, counted=counted, found=found, scores=(scores_0, scores_1)
    )


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw one panel a case: rates of the score, what the claim allows, the proved bound."""
    with drawing(path, (4.6 * len(results), 5.0)) as figure:
        panels = figure.subplots(1, len(results), squeeze=False)[0]
        for axes, result in zip(panels, results, strict=True):
            _draw_case(axes, result)


def _draw_case(axes: Axes, result: Result) -> None:
    fpr = np.linspace(0, 1, 401)
    claim, found, (scores_0, scores_1) = result.case.claim, result.found, result.scores
    axes.fill_between(fpr, 0, ndtr(ndtri(fpr) + claim), color="#cfe3d4",
                      label=f"allowed by the claim, mu {claim:.2f}")  # fmt: skip
    order = np.sort(np.concatenate([scores_0, scores_1]))[::-1]
    alarms = [float((scores_0 > score).mean()) for score in order]
    hits = [float((scores_1 > score).mean()) for score in order]
    axes.plot(alarms, hits, color=OURS, label="the score, all retrainings")
    axes.plot([found["fpr_high"]], [found["tpr_low"]], "o", color=ATTACK,
              label=f"proved: mu at least {found['mu_low']:.2f}")  # fmt: skip
    axes.plot([0, 1], [0, 1], color=OTHER, linewidth=0.8, linestyle="--")
    verdict = "claim exceeded" if result.exceeded else "under the claim"
    title = result.case.title.replace(": ", ":\n")
    axes.set_title(
        f"{title}\n{verdict}: epsilon at least {found['epsilon_low']:.2f}, "
        f"claimed {found['claim_epsilon']:.2f}", fontsize=9,
    )  # fmt: skip
    axes.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1),
             ylim=(0, 1), aspect="equal")  # fmt: skip
    axes.legend(loc="lower right", fontsize=8)
