"""A4 in live runs: a malicious passive spoils the model for a cohort; accuracy with and without."""

from collections.abc import Iterator

import torch
from sklearn.cluster import KMeans

from attacks.cohort_degradation import CohortDegradation
from attacks.live import LiveRun
from experiments.leaks.sessions import VICTIM, Row, live_config, open_run

__all__ = ["degradation"]

_EPOCHS = 15
_CLUSTERS = 8


def degradation() -> Iterator[Row]:
    """The cohort is a cluster of the adversary's own features: people who look alike to it."""
    for clip, strength in ((1.0, None), (1.0, 1.0), (1.0, 100.0), (None, 10.0)):
        config = live_config("digits", "apfed_c", protocol="plain", clip=clip)
        run = open_run(config, 3)
        cohort = _cohort(run)
        if strength is not None:
            positions = cohort.nonzero().flatten()
            run.hand_over(VICTIM, CohortDegradation(positions, strength=strength))
        run.train(_EPOCHS)
        aligned = run.method.alignment[run.data.active.name]
        rows = {True: aligned[cohort], False: aligned[~cohort]}
        yield {
            "adversary": "none" if strength is None else f"kappa {strength:g}",
            "clip": clip or "none",
            "cohort": int(cohort.sum()),
            **{
                f"accuracy, {who}, {which}": run.method.active.accuracy(_both(rows[inside], part))
                for who, inside in (("cohort", True), ("others", False))
                for which, part in (("train", run.data.train_rows), ("test", run.data.test_rows))
            },
        }


def _both(rows: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return rows[torch.isin(rows, part)]


def _cohort(run: LiveRun) -> torch.Tensor:
    """Which aligned people (A,) are in the cluster of the person with the least ink."""
    table = next(one for one in run.data.passives if one.name == VICTIM)
    own = table.features[run.method.alignment[VICTIM]].flatten(1)
    order = own.sum(dim=1).argsort()
    clusters = KMeans(_CLUSTERS, n_init=4, random_state=0).fit(own[order].numpy()).labels_
    found = torch.empty(len(own), dtype=torch.bool)
    found[order] = torch.from_numpy(clusters == clusters[0])
    return found
