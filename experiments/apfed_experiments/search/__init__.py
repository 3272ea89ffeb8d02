"""A search for settings, every trial of which is charged or runs on public data.

Run by: whoever plays all parties in one process, or, on public data, by anybody. Trials are judged
on labelled rows that the active holds back (`apfed_experiments.who_helped.held_back`), never
on test rows. Optuna proposes what to try; `charges.py` adds up what the trials and the final run
cost.
"""

from apfed_experiments.search import (
    HEADER,
    Charge,
    Choice,
    Found,
    Range,
    SearchSpace,
    bound_of,
    charge_of,
    load_space,
    search,
)

__all__ = [
    "HEADER", "Charge", "Choice", "Found", "Range", "SearchSpace", "bound_of", "charge_of",
    "load_space", "search",
]  # fmt: skip
