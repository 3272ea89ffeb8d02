"""Who helped: what each passive adds to the active's model, by runs of coalitions of passives.

Run by: whoever plays all parties in one process. No passive's part is opened: a coalition's worth
is what the active measures on labels that it holds back, of a model trained with sums to which the
whole coalition adds. Retrainings tell more than one run does, so their bytes and epsilons are added
up, and coalitions that the contract's sums do not allow are never asked (`rules.py`).
"""

from apfed_experiments.who_helped import (
    EXACT,
    HEADER,
    READING,
    Board,
    Coalition,
    Game,
    PassiveRow,
    Players,
    measure_passives,
    players_of,
)

__all__ = [
    "EXACT", "HEADER", "READING", "Board", "Coalition", "Game", "PassiveRow", "Players",
    "measure_passives", "players_of",
]  # fmt: skip
