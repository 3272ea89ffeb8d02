"""Vote regression: a curious active reads a passive's features out of the votes that it opened.

Run by: the active, on the secure sum of votes, or on each passive's answers under randomised
response. A vote says which labelled rows a row is near to in the passive's features. Shadow rows,
whose features at the victim it knows, teach a regression from votes to these features.

Baselines: the same regression from own features, and from own features with what the active's own
labeller makes of them and of its labels: all that it has before anybody votes.

Letters: N rows, K classes.
"""

import numpy as np
import torch

from apfed_attacks.columns import beside, own_columns, own_votes
from apfed_attacks.features.regression import FeatureAttack, Regression
from apfed_attacks.interface import FloatArray, Guess
from apfed_attacks.view import AdversaryView, Asked, asked, votes_read

__all__ = ["VoteRegression"]


class VoteRegression(FeatureAttack):
    """Regress votes, alone and beside own features, to the victim's features."""

    name = "vote_regression"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def applicable(self, view: AdversaryView) -> str | None:
        if view.description.labels is None:
            return f"{view.description}: nobody votes"
        if view.description.opens == "moment of votes":
            return f"{view.description}: a moment of votes is opened, and nothing row by row"
        if view.description.labels == "encrypted":
            return (
                f"{view.description}: whom a ballot of encrypted labels names is not read here yet"
            )
        if asked(view) is None or not votes_read(view):
            return "the transcript kept no votes; set transcript.keep to first_and_last or all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        read, ballot = votes_read(view), asked(view)
        assert ballot is not None
        first = next(iter(read.values()))
        positions = self.choose(view, first.positions, seed)
        answers = {name: seen.at(positions) for name, seen in read.items()}
        columns, victim = {"votes": torch.cat(list(answers.values()), dim=1)}, view.knowledge.victim
        if victim in answers and len(answers) > 1:
            columns["its votes"] = answers[victim]
        scaled = {name: self.scaled(values, seed) for name, values in columns.items()}
        own_NF = self.own(view, positions, seed)
        solo = self._solo(view, ballot, positions, own_NF)
        both = {f"votes, {name}": np.hstack([scaled["votes"], own]) for name, own in solo.items()}
        regress = Regression.of(view, positions, hidden=self.hidden, seed=seed)
        attacks = regress.on({**scaled, **beside("votes", scaled["votes"], own_NF), **both})
        return regress.guess(attacks, {"x": own_NF, **solo})

    def _solo(
        self, view: AdversaryView, ballot: Asked, positions: torch.Tensor, own_NF: FloatArray
    ) -> dict[str, FloatArray]:
        """Own features with what the own labeller says of them; {} where labels were not shown."""
        if ballot.labels is None:
            return {}
        rows_U = ballot.rows.sort().values
        labelled, order = ballot.labelled.sort()
        places = torch.searchsorted(rows_U, labelled)
        features_UF = own_columns(view, rows_U).double().numpy(force=True)
        votes_UK = own_votes(features_UF, places, ballot.labels[order], view.knowledge.classes)
        wanted_N = torch.searchsorted(rows_U, positions).numpy()
        votes_NK = self.scaled(torch.from_numpy(votes_UK[wanted_N]), 0)
        return {"x and own votes": np.hstack([own_NF, votes_NK])}
