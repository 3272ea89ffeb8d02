"""Labellers: how one party labels all aligned rows from its own features and a few labels.

A new one is one file and one line in the table. What their votes cost stands in
`secure_apfed.privacy.votes`.
"""

from collections.abc import Mapping

from secure_apfed.labellers.interface import Labeller, LinearLabeller, hard
from secure_apfed.labellers.logistic import Logistic
from secure_apfed.labellers.ridge import Ridge
from secure_apfed.labellers.spreading import Spreading

__all__ = ["LABELLERS", "Labeller", "LinearLabeller", "Logistic", "Ridge", "Spreading", "hard"]

LABELLERS: Mapping[str, type[Spreading] | type[Logistic] | type[Ridge]] = {
    labeller.name: labeller for labeller in (Spreading, Logistic, Ridge)
}
