"""Regressions of what a curious active opened to a passive's features: sums, vectors, votes.

Run by: the active, where what it opened holds something of each row: a sum of the passives'
representations (SplitNN that merges by sum) or random projections (APFed by code), of what they
make of the common pseudo-labels (MMVFL, FedMV) or of votes, or the singular vectors of all parties'
tables (VFedTrans). Shadow rows, whose features at the victim it knows, teach a regression. The
secure sum hides which passive a part came from, and is no protection against this: its receiver
reads the sum.

A passive of MMVFL adds zeta_k / zeta (X_k W_k + zeta_k Z) / (1 + zeta_k) to the sum, and Z was sent
to it. What a regression on Z leaves of the sum is linear in the features of all passives, by
other weights in each round; several rounds side by side are more equations.

Letters: N rows, C numbers of a sum, F columns, K classes.
"""

import numpy as np
import torch
from torch import Tensor

from apfed_attacks.columns import compute_own_votes, join_own_columns, select_own_columns
from apfed_attacks.features.regression import FeatureAttack, Regression, guess_features
from apfed_attacks.interface import FloatArray, Guess
from apfed_attacks.view import (
    AdversaryView,
    VoteRequest,
    collect_opened_sums,
    collect_pseudo_labels,
    collect_votes,
    find_vote_request,
    list_opened_epochs,
)


class SumRegression(FeatureAttack):
    """A regression from revealed sums, alone and beside what the active has, to the victim's
    features.

    Attacks use the last epoch's sums and those of all recorded epochs. Where the active sent
    pseudo-labels, they use the residuals of the sums after a fit to these, too. Baselines, with the
    same shadow rows (rows whose features the adversary knows): their mean, own features x, own
    labels, and both.
    """

    name = "sum_regression"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no row-by-row sum was revealed or recorded. None: some were."""
        if view.description.opens not in ("representations", "projections", "pseudo-labels"):
            return (
                f"{view.description}: no sum of representations, projections or pseudo-labels is "
                "opened"
            )
        if not list_opened_epochs(view):
            return "the transcript kept no sums; set transcript.keep to first_and_last or all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress the last epoch's sums, and those of all epochs side by side, to the victim's
        features.

        Where pseudo-labels were sent, what these leave unexplained of the sums' C columns is used,
        too.
        """
        sums_by_epoch = {
            epoch: collect_opened_sums(view, epoch) for epoch in list_opened_epochs(view)
        }
        last = max(sums_by_epoch)
        positions = self.choose_rows(view, sums_by_epoch[last].positions, seed)
        complete_epochs = [
            epoch
            for epoch, sums in sums_by_epoch.items()
            if torch.isin(positions, sums.positions).all()
        ]
        observed_by_epoch = {
            epoch: sums_by_epoch[epoch].select_positions(positions) for epoch in complete_epochs
        }
        columns = {"sums": observed_by_epoch[last]}
        if view.description.opens == "pseudo-labels":
            observed_by_epoch = {
                epoch: _compute_residuals(
                    sums_NC, collect_pseudo_labels(view, epoch).select_positions(positions)
                )
                for epoch, sums_NC in observed_by_epoch.items()
            }
            columns["rest of the sums"] = observed_by_epoch[last]
        if len(observed_by_epoch) > 1:
            columns["all epochs"] = torch.cat(list(observed_by_epoch.values()), dim=1)
        x_NF = self.scale_own_columns(view, positions, seed)
        labels_NF = _encode_own_labels(view, positions)
        own_NF = np.hstack([x_NF, labels_NF])
        scaled = {name: self.scale_columns(values, seed) for name, values in columns.items()}
        joined = {
            f"{key} and labels": columns_NF
            for name, released_NF in scaled.items()
            for key, columns_NF in join_own_columns(name, released_NF, own_NF).items()
        }
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        own_sets = {"x": x_NF, "labels": labels_NF, "x and labels": own_NF}
        return regress.make_guess(regress.predict_from_columns({**scaled, **joined}), own_sets)


class VectorRegression(FeatureAttack):
    """A regression from singular vectors, alone and beside own features, to the victim's features.

    If as many vectors are taken as the tables have rank, each column of each table is a linear
    combination of them. Shadow rows (rows whose features the adversary knows) determine which one:
    exactly if they are as many as the vectors, else roughly. Baseline: the same from own features.
    """

    name = "vector_regression"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no singular vectors were opened or recorded. None: some were."""
        if view.description.opens != "singular vectors":
            return f"{view.description}: no table is decomposed"
        if not list_opened_epochs(view):
            return "the transcript kept no vectors; set transcript.keep to first_and_last or all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress the left singular vectors u to the victim's features."""
        vectors = collect_opened_sums(view, list_opened_epochs(view)[0])
        positions = self.choose_rows(view, vectors.positions, seed)
        return guess_features(
            self, view, positions, {"u": vectors.select_positions(positions)}, seed
        )


class VoteRegression(FeatureAttack):
    """A regression from votes (class scores of a row), or single randomised ones, to the victim's
    features.

    A vote says which labelled rows a row is near to in the passive's features. Baselines regress on
    own features, alone or beside the votes of the active's own labeller (rule that makes votes)
    from its own features and labels. That is all that the active has before any passive votes.
    """

    name = "vote_regression"
    roles = ("active",)
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no votes were requested or recorded. None: some were."""
        if view.description.labels is None:
            return f"{view.description}: nobody votes"
        if find_vote_request(view) is None or not collect_votes(view):
            return "the transcript kept no votes; set transcript.keep to first_and_last or all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress the votes, and single randomised ones if known, to the victim's features."""
        votes_by_name = collect_votes(view)
        vote_request = find_vote_request(view)
        assert vote_request is not None
        first = next(iter(votes_by_name.values()))
        positions = self.choose_rows(view, first.positions, seed)
        answers = {
            name: observed.select_positions(positions) for name, observed in votes_by_name.items()
        }
        columns = {"votes": torch.cat(list(answers.values()), dim=1)}
        victim = view.knowledge.victim
        if victim in answers and len(answers) > 1:
            columns["its votes"] = answers[victim]
        scaled = {name: self.scale_columns(values, seed) for name, values in columns.items()}
        own_NF = self.scale_own_columns(view, positions, seed)
        own_votes_by_name = self._join_own_votes(view, vote_request, positions, own_NF)
        joined = {
            f"votes, {name}": np.hstack([scaled["votes"], own_columns_NF])
            for name, own_columns_NF in own_votes_by_name.items()
        }
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        attacks = regress.predict_from_columns(
            {**scaled, **join_own_columns("votes", scaled["votes"], own_NF), **joined}
        )
        return regress.make_guess(attacks, {"x": own_NF, **own_votes_by_name})

    def _join_own_votes(
        self, view: AdversaryView, ballot: VoteRequest, positions: Tensor, own_NF: FloatArray
    ) -> dict[str, FloatArray]:
        """Return own features joined with the votes of the active's own labeller, by name.

        The labeller (rule that makes votes) uses the labels of the request or, where these were
        encrypted, the active's own labels; the result is empty where it has none.

        `ballot`: the request for votes, with its U rows and the labels of n of them. `positions`:
        alignment positions (N,). `own_NF`: scaled own features.
        """
        labels_n = ballot.labels
        own_labels_A = view.labels.get(view.parties[0])  # by alignment position, -1 for none
        if labels_n is None and own_labels_A is not None:
            labels_n = own_labels_A[ballot.labelled_rows]
        if labels_n is None or bool((labels_n < 0).any()):
            return {}
        rows_U = ballot.rows.sort().values
        labelled, order = ballot.labelled_rows.sort()
        labelled_n = torch.searchsorted(rows_U, labelled)  # indices among the U rows
        features_UF = select_own_columns(view, rows_U).double().numpy(force=True)
        votes_UK = compute_own_votes(
            features_UF, labelled_n, labels_n[order], view.knowledge.classes
        )
        index_N = torch.searchsorted(rows_U, positions).numpy()
        votes_NK = self.scale_columns(torch.from_numpy(votes_UK[index_N]), 0)
        return {"x and own votes": np.hstack([own_NF, votes_NK])}


def _compute_residuals(sums_NC: Tensor, sent_NC: Tensor) -> Tensor:
    """Return the residuals of the sums after least squares on the pseudo-labels that were sent.

    The pseudo-labels are joined to them, (N, 2 C), since they may explain some of the features.
    """
    # On the CPU, whose least squares take columns of any rank.
    sums_NC = sums_NC.double().cpu()
    sent_NC = sent_NC.cpu()
    inputs_NC = torch.cat([sent_NC, torch.ones(len(sent_NC), 1, dtype=sent_NC.dtype)], dim=1)
    residuals_NC = sums_NC - inputs_NC @ torch.linalg.lstsq(inputs_NC, sums_NC).solution
    return torch.cat([residuals_NC, sent_NC], dim=1)


def _encode_own_labels(view: AdversaryView, positions: Tensor) -> FloatArray:
    """Return the active's labels one-hot, (N, K): K classes, zeros where it has no label."""
    # Labels by alignment position, -1 for none.
    no_labels_A = torch.full((int(positions.max()) + 1,), -1)
    labels_A = view.labels.get(view.parties[0], no_labels_A)
    labels_N = labels_A[positions].clamp(min=-1).numpy()
    # One row for each class and one of zeros, the last, which -1 selects.
    one_hot = np.eye(view.knowledge.classes + 1, view.knowledge.classes)
    return np.asarray(one_hot[labels_N])
