"""Labels that are sent: shown with a request for votes, or drawn into pseudo-labels.

Run by: a curious passive, or several that pool what they have. A request for votes shows labels
(what a label mechanism answered is the likeliest label, whatever its epsilon), unless they are
encrypted. In every round of MMVFL and FedMV the active sends the common pseudo-labels Z of all
aligned training rows, which the labels draw (MMVFL, Eq. 14; FedMV, Eq. 10): column k speaks of
class k.

Letters: N rows, n of them with a label, K classes.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from apfed_attacks.columns import compute_own_votes
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.labels.completion import LabelProbe, collect_known_labels, guess_labels
from apfed_attacks.view import (
    AdversaryView,
    KnownRows,
    Observed,
    collect_pseudo_labels,
    combine_epochs,
    find_vote_request,
    list_epochs_by_request,
)

_CERTAIN = 2.0  # above every probability


class ShownLabels(LabelProbe):
    """An attack that takes the labels that a request for votes shows, and learns the other rows'
    from them.

    Classifiers and own votes (class scores of a row, by label spreading) learn from them.
    Baselines: the same computation with the labels that the adversary knew before.
    """

    name = "shown_labels"

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no label can be read; None: some can.

        None is sent, they are encrypted, or no request was recorded.
        """
        if view.description.labels is None:
            return f"{view.description}: nobody votes, and no label is sent"
        if view.description.labels == "encrypted":
            return f"{view.description}: labels are encrypted, and a passive reads none of them"
        if find_vote_request(view) is None:
            return "the transcript kept no request for votes; set transcript.keep to all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the shown labels as they are, and the other rows' by what is learnt from them.

        Letters: N rows, K classes.
        """
        request = find_vote_request(view)
        assert request is not None
        assert request.labels is not None
        positions = self.choose_rows(view, request.rows.sort().values, seed)
        x_NF = self.scale_own_columns(view, positions, seed)
        own_guess = self.from_own_columns(view, positions, seed)
        known_N = collect_known_labels(view, positions)
        classes = view.knowledge.classes
        shown_by_position = torch.full((int(request.rows.max()) + 1,), -1, dtype=torch.int64)
        shown_by_position[view.attribute_positions(request.labelled_rows)] = request.labels
        labels_N = torch.where(known_N >= 0, known_N, shown_by_position[positions])
        is_guessed_N = (known_N < 0).numpy()
        learnt = self._learn_from_labels(view, positions, x_NF, labels_N, seed)
        has_label_N1 = (labels_N >= 0).numpy()[:, None]
        # The score of a shown label is above all scores of labels that are learnt.
        certain_NK = _CERTAIN * np.eye(classes)[labels_N.numpy()]
        attacks = {
            name: Prediction(np.where(has_label_N1, certain_NK, scores_NK)[is_guessed_N])
            for name, scores_NK in learnt.items()
        }
        baselines = dict(own_guess.baselines)
        if (known_N >= 0).any():
            votes_NK = _compute_votes(x_NF, known_N, classes)
            baselines["own votes"] = Prediction(votes_NK[is_guessed_N])
        return replace(own_guess, attacks=attacks, baselines=baselines)

    def _learn_from_labels(
        self, view: AdversaryView, positions: Tensor, x_NF: FloatArray, labels_N: Tensor, seed: int
    ) -> dict[str, FloatArray]:
        """Return class scores (N, K) of all rows by own votes (label spreading), and by
        classifiers.

        `positions`: alignment positions (N,). `x_NF`: own features, standardised. `labels_N`:
        labels to learn from, -1 where unknown.
        """
        has_label_N = labels_N >= 0
        classes = view.knowledge.classes
        scores = {"own votes": _compute_votes(x_NF, labels_N, classes)}
        if has_label_N.all():
            return scores  # classifiers have nothing to guess
        labels = KnownRows(positions[has_label_N], labels_N[has_label_N])
        view_with_labels = replace(view, knowledge=replace(view.knowledge, labels=labels))
        guess = guess_labels(
            view_with_labels, positions, attacks={"x": x_NF}, baselines={}, seed=seed
        )
        for name, prediction in guess.attacks.items():
            scores_NK = np.zeros((len(labels_N), classes))
            scores_NK[(~has_label_N).numpy()] = prediction.values
            scores[f"{name}, taught by shown labels"] = scores_NK
        return scores


class PseudoLabels(LabelProbe):
    """An attack on labels that reads the common pseudo-labels Z, whose column k depends on class k.

    It guesses the class of the largest column, and uses classifiers with known labels, or clusters
    without any, on all columns.

    Attacks use Z of the last round and, with three epochs or more, the mean of Z, alone and with
    the own features x. Baselines are those of model completion: the majority class, and the same on
    x. Reference: the first round's Z, which is random.
    """

    name = "pseudo_labels"
    suite = ({"labels_per_class": 0}, {"labels_per_class": 4})

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no pseudo-labels were sent or recorded; None: some were."""
        if view.description.opens != "pseudo-labels":
            return f"{view.description}: no pseudo-labels are sent"
        if not _list_epochs(view):
            return "the transcript kept no pseudo-labels; set transcript.keep to first_and_last"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess labels from the pseudo-labels Z that were sent: by the largest column, and by
        classifiers.

        Classifiers read all columns of Z, and are fitted to the rows whose label is known. Z of the
        last epoch is attacked; Z of the first epoch is a reference.
        """
        epochs = _list_epochs(view)
        combined = combine_epochs(collect_pseudo_labels, view, epochs)
        first = combined.pop("first")
        sent = {"z": combined.pop("last")}
        sent |= {f"{name} z": observed for name, observed in combined.items()}
        positions = self.choose_rows(view, sent["z"].positions, seed)
        x_NF = self.scale_own_columns(view, positions, seed)
        columns = {
            name: self.scale_columns(observed.select_positions(positions), seed)
            for name, observed in sent.items()
        }
        guess = guess_labels(
            view,
            positions,
            attacks=columns,
            fused={"z": (columns["z"], x_NF)},
            baselines={"x": x_NF},
            seed=seed,
        )

        def make_prediction(observed: Observed) -> Prediction:
            """Return Z as scores of the unknown rows: the largest column is the guess."""
            return Prediction(observed.select_positions(guess.positions).numpy(force=True))

        largest = {
            f"largest of {name}": make_prediction(observed) for name, observed in sent.items()
        }
        references = {"largest of the first z": make_prediction(first)} if len(epochs) > 1 else {}
        return replace(guess, attacks={**largest, **guess.attacks}, references=references)


def _list_epochs(view: AdversaryView) -> tuple[int, ...]:
    """Return the epochs in which pseudo-labels were sent."""
    return list_epochs_by_request(view, lambda request: request.z is not None)


def _compute_votes(x_NF: FloatArray, labels_N: Tensor, classes: int) -> FloatArray:
    """Return votes (N, K) by label spreading over own features from these labels; -1: unknown.

    `classes`: K.
    """
    labelled_rows = (labels_N >= 0).nonzero().flatten()
    return compute_own_votes(x_NF, labelled_rows, labels_N[labelled_rows], classes)
