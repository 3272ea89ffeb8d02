"""A4 in live runs: a malicious passive spoils the model for a cohort; accuracy with and without."""

from collections.abc import Iterator

import torch
from sklearn.cluster import KMeans

from attacks.live.apfed import LiveRun
from attacks.live.cohort_degradation import CohortDegradation
from experiments.leaks.sessions import VICTIM, Row, live_config, open_run, over_seeds

__all__ = ["degradation"]

_SEEDS = range(5)
_EPOCHS = 15
_CLUSTERS = 8


def degradation() -> Iterator[Row]:
    """The cohort is a cluster of the adversary's own features: people who look alike to it."""
    for data in ("digits", "breast_cancer"):
        for clip, strengths in ((1.0, (1.0, 100.0)), (None, (10.0,))):
            honest = [_of_seed(data, clip, None, seed) for seed in _SEEDS]
            yield _row(data, clip, None, honest)
            for strength in strengths:
                spoilt = [_of_seed(data, clip, strength, seed) for seed in _SEEDS]
                yield _row(data, clip, strength, [
                    one | {f"{who}, change": one[who] - before[who] for who in one}
                    for one, before in zip(spoilt, honest, strict=True)
                ])  # fmt: skip


def _row(data: str, clip: float | None, strength: float | None, rows: list[Row]) -> Row:
    return {
        "data": data,
        "adversary": "none" if strength is None else f"kappa {strength:g}",
        "clip": clip or "none",
        **over_seeds(rows, same=()),
    }


def _of_seed(data: str, clip: float | None, strength: float | None, seed: int) -> Row:
    """Test accuracies of the cohort and the others."""
    run = open_run(live_config(data, "apfed_c", masks="none", clip=clip, seed=seed), 3)
    cohort = _cohort(run)
    if strength is not None:
        positions = cohort.nonzero().flatten()
        run.hand_over(VICTIM, CohortDegradation(positions, strength=strength))
    run.train(_EPOCHS)
    aligned = run.alignment[run.data.active.name]
    return {
        who: run.learner.party.accuracy(_both(aligned[inside], run.data.test_rows))
        for who, inside in (("cohort", cohort), ("others", ~cohort))
    }


def _both(rows: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return rows[torch.isin(rows, part)]


def _cohort(run: LiveRun) -> torch.Tensor:
    """Which aligned people (A,) are in the cluster of the person whose features sum to least."""
    table = next(one for one in run.data.passives if one.name == VICTIM)
    own = table.features[run.alignment[VICTIM]].flatten(1)
    order = own.sum(dim=1).argsort()
    clusters = KMeans(_CLUSTERS, n_init=4, random_state=0).fit(own[order].numpy()).labels_
    found = torch.empty(len(own), dtype=torch.bool)
    found[order] = torch.from_numpy(clusters == clusters[0])
    return found
