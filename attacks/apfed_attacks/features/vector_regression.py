"""Vector regression: a curious active computes a passive's features out of shared singular vectors.

Run by: the active, which opened the left singular vectors of all parties' tables. Each column of
each table is a linear combination of them where as many are taken as the tables have rank; the
victim's features of as many shadow rows tell which, exactly, and of fewer roughly.

Baseline: the same regression from own features.
"""

from apfed_attacks.features.regression import FeatureAttack, guess_features
from apfed_attacks.interface import Guess
from apfed_attacks.view import AdversaryView, opened_epochs, opened_sums

__all__ = ["VectorRegression"]


class VectorRegression(FeatureAttack):
    """Regress singular vectors, alone and beside own features, to the victim's features."""

    name = "vector_regression"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def applicable(self, view: AdversaryView) -> str | None:
        if view.description.opens != "singular vectors":
            return f"{view.description}: no table is decomposed"
        if not opened_epochs(view):
            return "the transcript kept no vectors; set transcript.keep to first_and_last or all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        seen = opened_sums(view, opened_epochs(view)[0])
        positions = self.choose(view, seen.positions, seed)
        return guess_features(self, view, positions, "u", seen.at(positions), seed)
