"""Vector regression: a curious active computes a passive's features out of shared singular vectors.

Run by: the active, which opened the left singular vectors of all parties' tables. Each column of
each table is a linear combination of them where as many are taken as the tables have rank; the
victim's features of as many shadow rows tell which, exactly, and of fewer roughly.

Baseline: the same regression from own features.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from apfed_attacks.features.regression import FeatureAttack, guess_features
from apfed_attacks.interface import Guess
from apfed_attacks.view import AdversaryView, Role, opened_epochs, opened_sums

__all__ = ["VectorRegression"]


class VectorRegression(FeatureAttack):
    """Regress singular vectors, alone and beside own features, to the victim's features."""

    name: ClassVar[str] = "vector_regression"
    roles: ClassVar[tuple[Role, ...]] = ("active",)
    suite: ClassVar[tuple[Mapping[str, Any], ...]] = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def applicable(self, view: AdversaryView) -> str | None:
        """It needs vectors that were opened, and kept."""
        if reason := self.wrong_role(view):
            return reason
        if view.description.opens != "singular vectors":
            return f"{view.description}: no table is decomposed"
        if not opened_epochs(view):
            return "the transcript kept no vectors; set transcript.keep to first_and_last or all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the victim's features of people whose rows were decomposed."""
        seen = opened_sums(view, opened_epochs(view)[0])
        positions = self.choose(view, seen.positions, seed)
        return guess_features(
            view, positions, {"u": seen.at(positions)}, hidden=self.hidden,
            components=self.components, seed=seed,
        )  # fmt: skip
