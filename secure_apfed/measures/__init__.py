"""How good a model is on rows whose truth is known: one table of measures for all who ask.

`MEASURES` has them by name; `estimates` gives all with intervals over the test rows. See
docs/measures.md.
"""

from secure_apfed.measures.bootstrap import FEWEST_ROWS, Estimate, estimates
from secure_apfed.measures.imbalance import THRESHOLDS, balanced_weights, best_threshold
from secure_apfed.measures.scored import Scored, probabilities_of, scored_by
from secure_apfed.measures.shifts import (
    CalibrationPoint,
    ScoreRanges,
    calibration_curve,
    rows_for_stability,
    stability_index,
)
from secure_apfed.measures.table import (
    ACCURACY,
    MEASURES,
    Measure,
    find_measure,
    measure_all,
    names_of,
    undefined_in,
)

__all__ = [
    "ACCURACY",
    "FEWEST_ROWS",
    "MEASURES",
    "THRESHOLDS",
    "CalibrationPoint",
    "Estimate",
    "Measure",
    "ScoreRanges",
    "Scored",
    "balanced_weights",
    "best_threshold",
    "calibration_curve",
    "estimates",
    "find_measure",
    "measure_all",
    "names_of",
    "probabilities_of",
    "rows_for_stability",
    "scored_by",
    "stability_index",
    "undefined_in",
]
