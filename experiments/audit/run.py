"""Playing the slow audit: retrain, score, bound, write."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.audit.bounds import evidence_from
from experiments.audit.cases import CASES, Case, networks, task_of
from experiments.audit.outcome import CaseResult
from experiments.audit.retraining import Retrainings
from experiments.audit.scores import OtherRows, WhiteBox, directions
from experiments.bench.rows import machine
from secure_apfed.plain_json import to_json

__all__ = ["play_case", "run_audit"]

_CONFIDENCE = 0.95
_PAIRS = 50
# Retrainings that are held in memory at once.
_TOGETHER = 1000


def run_audit(
    folder: Path,
    *,
    retrainings: int,
    seed: int = 0,
    device: torch.device,
    on_done: Callable[[CaseResult], None] = lambda result: None,
) -> list[CaseResult]:
    """Play all cases; write audit.json and audit.png into `folder`.

    Args:
        folder: made where missing.
        retrainings: of both worlds together in each case, even, at least 80.
        seed: of the noise.
        device: where to compute.
        on_done: called after every case.
    """
    from experiments.audit.picture import draw

    results = []
    for index, case in enumerate(CASES.values()):
        level = (1 - _CONFIDENCE) / len(CASES)
        results.append(
            play_case(case, retrainings=retrainings, seed=1000 * seed + 100 * index,
                      level=level, device=device)
        )  # fmt: skip
        on_done(results[-1])
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "confidence": _CONFIDENCE, "seed": seed, "device": str(device), "machine": machine(),
        "cases": [result.as_json() for result in results],
    }  # fmt: skip
    (folder / "audit.json").write_text(to_json(told), encoding="utf-8")
    draw(results, folder / "audit.png")
    return results


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
