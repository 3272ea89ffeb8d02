"""Trade-off studies: accuracy against leakage over defences and their strengths.

One YAML file describes a study; `run_tradeoff` runs its trials, resumes a stopped one, and writes
a leaderboard (CSV, Markdown), pictures and one self-contained page.
"""

from apfed_experiments.tradeoff import (
    Board,
    TradeOff,
    TradeOffError,
    load_tradeoff,
    points_of,
    run_tradeoff,
    tradeoff_of,
)

__all__ = [
    "Board", "TradeOff", "TradeOffError", "load_tradeoff", "points_of", "run_tradeoff",
    "tradeoff_of",
]  # fmt: skip
