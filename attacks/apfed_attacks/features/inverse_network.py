"""A3, inverse network, paired: a curious party rebuilds the features behind representations.

Run by: whoever receives a victim's representations: in APFed a passive, or several that pool
what they have, against the active; in TVFL the active against each passive. From shadow rows,
whose features at the victim it knows, it learns h, x -> the victim's features (He et al., 2019,
Model Inversion Attacks Against Collaborative Inference; the paired form).
"""

from apfed_attacks.features.regression import FeatureAttack, guess_features
from apfed_attacks.interface import Guess
from apfed_attacks.view import AdversaryView, collect_releases


class InverseNetwork(FeatureAttack):
    """A regression from releases h, and from h beside the own features x, to the victim's features.

    h is the last release of each row and, where more than two epochs were stored, the mean of all.
    Baselines, with the same shadow rows (rows whose features the adversary knows): their mean, and
    the same regressors from x alone.
    """

    name = "inverse_network"
    roles = ("passive", "active")

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the victim's features by regression on its releases h.

        The baseline regresses on the adversary's own features x.
        """
        releases = collect_releases(view, view.knowledge.victim)
        positions = self.choose_rows(view, releases["h"].positions, seed)
        columns = {
            name: observed.select_positions(positions) for name, observed in releases.items()
        }
        return guess_features(self, view, positions, columns, seed)
