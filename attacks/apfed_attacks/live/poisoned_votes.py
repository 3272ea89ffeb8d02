"""Poisoned votes: a malicious passive spoils the student of the active by what it votes.

Run by: a passive that votes at random, for one class always, for another class wherever its own
features say a certain one, or for the next class everywhere. It keeps to every rule: a row of votes
is a row of votes. Integrity, not privacy: there is nothing to guess, so this is no `Attack`;
compare the active's accuracy with that of an honest run.

Letters: U rows, n of them labelled, F features, K classes.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from secure_apfed.labellers import Labeller, hard
from secure_apfed.labellers.interface import Features, Floats, Integers
from secure_apfed.seeds import derive_seed

__all__ = ["Poison", "PoisonedVotes"]

Poison = Literal["random", "constant", "flip", "rotate"]


@dataclass(frozen=True, kw_only=True)
class PoisonedVotes(Labeller):
    """A labeller whose votes serve its party; hard ones, which weigh most.

    Attributes:
        honest: what says whose votes to turn around.
        way: "random" names any class; "constant" the first; "flip" the second where the honest one
            is the first, and is honest elsewhere; "rotate" the class after the honest one.
        seed: of "random".
    """

    name: ClassVar[str] = "poisoned"
    title: ClassVar[str] = "votes that serve the voter"
    inductive: ClassVar[bool] = False

    honest: Labeller
    way: Poison
    seed: int = 0

    def label(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        honest_UK = hard(self.honest.label(features_UF, labelled_n, labels_n, classes))
        of_U = honest_UK.argmax(axis=1)
        if self.way == "random":
            draw = np.random.default_rng(derive_seed(self.seed, "poisoned votes"))
            of_U = draw.integers(classes, size=len(of_U))
        elif self.way == "constant":
            of_U = np.zeros_like(of_U)
        elif self.way == "flip":
            of_U = np.where(of_U == 0, 1, of_U)
        else:
            of_U = (of_U + 1) % classes
        return np.asarray(np.eye(classes)[of_U])

    def statement(self) -> str:
        return self.title
