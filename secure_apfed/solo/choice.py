"""The best that the active does alone, chosen as it would have to choose: by its own labels.

Run by: the active, whose votes have what it chooses as their prior, and whoever measures what help
was worth. From few labels the choice is often not the one that the test rows would have made, so a
study that claims a gain should also name the baseline with the best mean over its seeds, and gain
over that one.
"""

import math
from contextlib import suppress

import numpy as np

from secure_apfed.errors import ModelError
from secure_apfed.measures import ACCURACY, Measure, Scored, probabilities_of
from secure_apfed.solo import BASELINES
from secure_apfed.solo.interface import (
    Baseline,
    FloatArray,
    SoloTask,
    fits_kept_meanwhile,
    held_out,
    scored_once,
)

__all__ = ["FOLDS", "chosen", "validation_of"]

FOLDS = 3


def chosen(task: SoloTask, *, measure: Measure = ACCURACY) -> Baseline:
    """Return the baseline with the best validation, as a study would find it best.

    One that cannot be fitted with the settings of the run is passed over.
    """
    found = {}
    with fits_kept_meanwhile():
        for name, baseline in BASELINES.items():
            with suppress(ModelError):
                found[name] = measure.rank(validation_of(baseline, task, measure))
    return BASELINES[max(found, key=found.__getitem__)]


def validation_of(baseline: Baseline, task: SoloTask, measure: Measure) -> float | None:
    """The measure on the labels held out, of each part by what was fitted without it.

    Three parts, fewer where a class has fewer labels, and from 400 labels on one of them; their
    rows stay among the unlabelled ones. None where none could be held out, since every class has
    one, or where they do not define the measure.
    """
    parts = held_out(task.labels, FOLDS, task.seed)
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
    scores_nK = scored_once(name, task, out_of_fold)
    truth_n = task.labels[np.concatenate(parts)]
    value = measure.of(Scored(truth=truth_n, scores=probabilities_of(scores_nK)))
    return None if math.isnan(value) else value
