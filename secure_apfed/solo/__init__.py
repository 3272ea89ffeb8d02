"""What the active can do alone with few labels, and the best of it, chosen by its own labels.

Run by: the active, whose votes have what it chooses as their prior, and whoever measures what help
was worth. Passives' help is measured against the best of these, not against the run's own network
only: with few labels and many unlabelled rows the best baseline is often one that uses the
unlabelled rows. From few labels the choice is often not the one that the test rows would have made,
so a study that claims a gain should also name the baseline with the best mean over its seeds, and
gain over that one. A new baseline is one class and one line here.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

import numpy as np

from secure_apfed.errors import ModelError
from secure_apfed.measures import ACCURACY, Measure, Scored, probabilities_of
from secure_apfed.seeds import derive_seed
from secure_apfed.solo.classical import (
    ExtraTrees,
    GradientBoosting,
    Logistic,
    Ridge,
    SelfTraining,
    Spreading,
    SpreadingStudent,
)
from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    Predictor,
    SoloTask,
    fits_kept_meanwhile,
    held_out,
    scored_once,
)
from secure_apfed.solo.networks import Autoencoder, MixMatch, Network

__all__ = [
    "BASELINES",
    "FOLDS",
    "TEACHERS",
    "Baseline",
    "Predictor",
    "SoloTask",
    "chosen",
    "rank_of",
    "scored_held_out",
    "surely_better",
    "validation_of",
]

FOLDS = 3

_ALL: tuple[Baseline, ...] = (
    MixMatch(),
    SpreadingStudent(),
    Spreading(),
    Ridge(),
    Logistic(),
    SelfTraining(),
    Autoencoder(),
    ExtraTrees(),
    GradientBoosting(),
    Network(),
)

BASELINES: Mapping[str, Baseline] = MappingProxyType({baseline.name: baseline for baseline in _ALL})
"""In the order in which equals are preferred."""
TEACHERS = tuple(baseline for name, baseline in BASELINES.items() if name != "network")
"""Who may learn from others' numbers beside its own features: all but the run's own network."""
_RESAMPLES = 200


def chosen(
    task: SoloTask, *, measure: Measure = ACCURACY, among: Iterable[Baseline] | None = None
) -> Baseline:
    """Return the baseline with the best validation, as a study would find it best; of all unless
    given.

    One that cannot be fitted with the settings of the run is passed over.
    """
    found, task = {}, task.few
    with fits_kept_meanwhile():
        for baseline in BASELINES.values() if among is None else among:
            with suppress(ModelError):
                found[baseline] = measure.rank(validation_of(baseline, task, measure))
    return max(found, key=found.__getitem__)


def validation_of(baseline: Baseline, task: SoloTask, measure: Measure) -> float | None:
    """The measure on the labels held out; None where none could be, or they do not define it."""
    scored = scored_held_out(baseline, task)
    value = math.nan if scored is None else measure.of(scored)
    return None if math.isnan(value) else value


def scored_held_out(baseline: Baseline, task: SoloTask) -> Scored | None:
    """What is said of the labels held out, of each part by what was fitted without it.

    Three parts, fewer where a class has fewer labels, and from 400 labels on one of them; their
    rows stay among the unlabelled ones. None where none could be held out, since every class has
    one.
    """
    task, parts = task.few, held_out(task.labels, FOLDS, task.seed)
    if not parts:
        return None

    def out_of_fold() -> FloatArray:
        """Scores of the labelled rows of the parts, one part after the other."""
        tasks = [task.without(part) for part in parts]
        # The whole task, too, where they learn at the same time: it takes hardly longer, and is
        # asked for next. Where they do not, it is not reached.
        fitted = baseline.fit_together([*tasks, task])
        scores = [
            predictor.scores(task.labelled_rows[part])
            for part, predictor in zip(parts, fitted, strict=False)
        ]
        return np.concatenate(scores)

    name = f"without-{len(parts)}-of-{FOLDS}-{baseline.name}"
    scores_nK = scored_once(name, task, out_of_fold, of_run=baseline.of_run)
    truth_n = task.labels[np.concatenate(parts)]
    return Scored(truth=truth_n, scores=probabilities_of(scores_nK))


def rank_of(scored: Scored | None, measure: Measure) -> float:
    return measure.rank(None if scored is None else measure.of(scored))


def surely_better(one: Scored | None, other: Scored | None, measure: Measure, *, seed: int) -> bool:
    """Whether `one` is better than `other`, of the same rows, by more than the deviation of that.

    The deviation is over bootstrap resamples of the rows; those that do not define the measure are
    left out.
    """
    if one is None or other is None:
        return False
    draw = np.random.default_rng(derive_seed(seed, "help or none"))
    gains = []
    for _ in range(_RESAMPLES):
        rows_n = draw.integers(len(one.truth), size=len(one.truth))
        both = (Scored(truth=of.truth[rows_n], scores=of.scores[rows_n]) for of in (one, other))
        better, worse = (rank_of(of, measure) for of in both)
        if math.isfinite(better) and math.isfinite(worse):
            gains.append(better - worse)
    gain = rank_of(one, measure) - rank_of(other, measure)
    return len(gains) > 1 and math.isfinite(gain) and gain > float(np.std(gains))
