"""A4 in live runs: a malicious passive spoils the model for a cohort; accuracy with and without."""

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from sklearn.cluster import KMeans

from apfed_attacks.live.runs import LiveRun
from apfed_attacks.live.strategy import CohortDegradation
from apfed_experiments.leaks.sessions import VICTIM, live_config, open_run
from apfed_experiments.summary import Row, Setting
from secure_apfed.measures import ACCURACY

__all__ = ["degradation"]

_SEEDS = range(5)
_EPOCHS = 15
_CLUSTERS = 8


def degradation() -> Iterator[Setting]:
    """The cohort is a cluster of the adversary's own features: people who look alike to it."""
    for data in ("digits", "breast_cancer"):
        for clip, strengths in ((1.0, (None, 1.0, 100.0)), (None, (None, 10.0))):
            for strength in strengths:
                adversary = "none" if strength is None else f"kappa {strength:g}"
                yield Setting(
                    columns={"data": data, "adversary": adversary, "clip": clip or "none"},
                    measure=partial(_changed, data, clip, strength), seeds=_SEEDS,
                )  # fmt: skip


def _changed(data: str, clip: float | None, strength: float | None, seed: int) -> Row:
    """Test accuracies, and how far each lies from that of the honest run."""
    honest = _accuracies(data, clip, None, seed)
    if strength is None:
        return honest
    spoilt = _accuracies(data, clip, strength, seed)
    return spoilt | {f"{who}, change": spoilt[who] - honest[who] for who in spoilt}


@lru_cache
def _accuracies(data: str, clip: float | None, strength: float | None, seed: int) -> Row:
    """Test accuracies of the cohort and the others."""
    run = open_run(live_config(data, "apfed_c", masks="none", clip=clip, seed=seed), 3)
    cohort = _cohort(run)
    if strength is not None:
        positions = cohort.nonzero().flatten()
        run.hand_over(VICTIM, CohortDegradation(positions, strength=strength))
    run.train(_EPOCHS)
    aligned, test = run.alignment[run.data.active.name], run.data.test_rows
    return {
        who: ACCURACY.of(run.learner.trainer.scored(test[torch.isin(test, aligned[inside])]))
        for who, inside in (("cohort", cohort), ("others", ~cohort))
    }


def _cohort(run: LiveRun) -> torch.Tensor:
    """Which aligned people (A,) are in the cluster of the person whose features sum to least."""
    table = next(one for one in run.data.passives if one.name == VICTIM)
    own = table.features[run.alignment[VICTIM]].flatten(1)
    order = own.sum(dim=1).argsort()
    clusters = KMeans(_CLUSTERS, n_init=4, random_state=0).fit(own[order].numpy()).labels_
    found = torch.empty(len(own), dtype=torch.bool)
    found[order] = torch.from_numpy(clusters == clusters[0])
    return found
