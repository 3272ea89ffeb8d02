"""Accuracy against epsilon: fresh noise, frozen noise and label DP, beside two lines to compare.

`python -m experiments sweep`: each point is a run of a shipped configuration with one thing
changed. A stopped sweep goes on where it was.
"""

from experiments.sweep.points import CONFIGS, EPSILONS, LINES, Line, Point, points_of, run_point
from experiments.sweep.run import READING, run_sweep
from experiments.sweep.summary import PointSummary, summarise

__all__ = [
    "CONFIGS",
    "EPSILONS",
    "LINES",
    "READING",
    "Line",
    "Point",
    "PointSummary",
    "points_of",
    "run_point",
    "run_sweep",
    "summarise",
]
