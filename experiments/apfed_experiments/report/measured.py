"""What a run's model is worth on its test rows, by all measures, with intervals over these rows."""

import math
from dataclasses import dataclass

from apfed_experiments.report.run import ReportedRun
from secure_apfed.intervals import estimates
from secure_apfed.measures import MEASURES, CalibrationPoint, calibration_curve
from secure_apfed.runs.folder import RunFolder, read_scored

__all__ = ["MeasuredModel", "measured_of"]


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """One way to predict, measured.

    Attributes:
        title: of it; rows: how many were tested.
        lines: measure, value, ends of the interval, and whether higher or lower is better.
        calibration: shares foretold and observed, by range of scores; none of what is not
            probabilities.
        finite: whether the model says a finite number of every row.
        binary: whether these are of the second of two classes.
        ranked: whether KS is among the measures.
        threshold: that it decides at; None: it takes the likeliest class.
    """

    title: str
    rows: int
    lines: tuple[tuple[str, str, str, str], ...]
    calibration: tuple[CalibrationPoint, ...]
    finite: bool
    binary: bool
    ranked: bool
    threshold: float | None


def measured_of(run: ReportedRun) -> MeasuredModel | None:
    """Measure the variant that the run reports first; None where no scores were kept.

    Raises:
        CheckpointError: the scores are not as the run left them.
    """
    variant, threshold = next(iter(run.outcome.accuracy)), run.outcome.threshold
    scored = read_scored(RunFolder(run.path), variant, threshold=threshold)
    if scored is None or not len(scored.truth):
        return None
    found = estimates(scored)
    return MeasuredModel(
        title=run.title_of(variant),
        rows=len(scored.truth),
        lines=tuple(
            (
                MEASURES[name].title,
                MEASURES[name].text(one.value),
                "-" if math.isnan(one.low)
                else f"{MEASURES[name].text(one.low)} to {MEASURES[name].text(one.high)}",
                "higher" if MEASURES[name].higher_is_better else "lower",
            )
            for name, one in found.items()
        ),
        calibration=calibration_curve(scored) if scored.classes else (),
        finite=scored.finite,
        binary=scored.classes == 2,
        ranked="ks" in found,
        threshold=scored.threshold,
    )  # fmt: skip
