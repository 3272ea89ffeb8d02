"""Shown labels: a curious passive reads the labels that come with a request for votes.

Run by: a passive of a method whose active shows labels, or several that pool their features. It
reads the shown ones as they are (what a label mechanism answered is the likeliest label, whatever
its epsilon), and guesses those of all other rows by what it computes for its own vote.

Baselines: the same computation with the labels that it knew before. Where labels are encrypted
nothing is shown, and it does not apply.

Letters: N rows, n of them with a label, K classes.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from apfed_attacks.columns import FloatArray, own_votes
from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.completion import LabelProbe, guess_labels, known_labels
from apfed_attacks.view import AdversaryView, Asked, KnownRows, asked

__all__ = ["ShownLabels"]

_CERTAIN = 2.0  # above every probability


class ShownLabels(LabelProbe):
    """Shown labels as they are; probes and votes, taught by them, for other rows."""

    name: ClassVar[str] = "shown_labels"

    def applicable(self, view: AdversaryView) -> str | None:
        """Labels must have been shown."""
        if reason := self.wrong_role(view):
            return reason
        if view.description.labels is None:
            return f"{view.description}: nobody votes, and no label is sent"
        if view.description.labels == "encrypted":
            return f"{view.description}: labels are encrypted, and a passive reads none of them"
        if asked(view) is None:
            return "the transcript kept no request for votes; set transcript.keep to all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the labels of the rows asked about that are not known."""
        ballot = asked(view)
        assert ballot is not None
        positions = self.choose(view, ballot.rows.sort().values, seed)
        x_NF = self.own(view, positions, seed)
        before = self.from_own_columns(view, positions, seed)
        known_N = known_labels(view, positions)
        told_N = torch.where(known_N >= 0, known_N, _shown(view, ballot, positions))
        guessed = (known_N < 0).numpy()
        return Guess(
            positions=before.positions,
            attacks={
                name: Prediction(_with_shown(values_NK, told_N)[guessed])
                for name, values_NK in self._taught(view, positions, x_NF, told_N, seed).items()
            },
            baselines={**before.baselines, **_voted(view, x_NF, known_N)},
        )

    def _taught(
        self, view: AdversaryView, positions: Tensor, x_NF: FloatArray, told_N: Tensor, seed: int
    ) -> dict[str, FloatArray]:
        """Class scores (N, K) of all rows, by everything that learns from these labels."""
        rows = told_N >= 0
        classes = view.knowledge.classes
        found = {"own votes": _votes(x_NF, told_N, classes)}
        if rows.all():
            return found  # nobody is left whom a probe could guess
        labels = KnownRows(positions[rows], told_N[rows])
        as_known = replace(view, knowledge=replace(view.knowledge, labels=labels))
        guess = guess_labels(
            as_known, positions, attacks={"x": x_NF}, baselines={}, references={}, seed=seed
        )
        for name, prediction in guess.attacks.items():
            values_NK = np.zeros((len(positions), classes))
            values_NK[(~rows).numpy()] = prediction.values
            found[f"{name}, taught by shown labels"] = values_NK
        return found


def _shown(view: AdversaryView, ballot: Asked, positions: Tensor) -> Tensor:
    """(N,) what was shown of each position; -1: nothing."""
    assert ballot.labels is not None
    of_all = torch.full((int(ballot.rows.max()) + 1,), -1, dtype=torch.int64)
    of_all[view.attributed(ballot.labelled)] = ballot.labels
    return of_all[positions]


def _votes(x_NF: FloatArray, labels_N: Tensor, classes: int) -> FloatArray:
    places = (labels_N >= 0).nonzero().flatten()
    return own_votes(x_NF, places, labels_N[places], classes)


def _voted(view: AdversaryView, x_NF: FloatArray, known_N: Tensor) -> dict[str, Prediction]:
    """The own vote by the labels known before, where there are any."""
    if not (known_N >= 0).any():
        return {}
    votes_NK = _votes(x_NF, known_N, view.knowledge.classes)
    return {"own votes": Prediction(votes_NK[(known_N < 0).numpy()])}


def _with_shown(values_NK: FloatArray, told_N: Tensor) -> FloatArray:
    """The same, certain of what was told."""
    certain_NK = values_NK.copy()
    told = (told_N >= 0).numpy()
    certain_NK[told] = 0.0
    certain_NK[told, told_N[told].numpy()] = _CERTAIN
    return certain_NK
