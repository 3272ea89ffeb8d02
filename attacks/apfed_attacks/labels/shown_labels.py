"""Shown labels: a curious passive reads the labels that come with a request for votes.

Run by: a passive of a method whose active shows labels, or several that pool their features. It
reads the shown ones as they are (what a label mechanism answered is the likeliest label, whatever
its epsilon), and guesses those of all other rows by what it computes for its own vote.

Baselines: the same computation with the labels that it knew before. Where labels are encrypted
nothing is shown, and it does not apply.

Letters: N rows, n of them with a label, K classes.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from apfed_attacks.columns import own_votes
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.labels.completion import LabelProbe, guess_labels, known_labels
from apfed_attacks.view import AdversaryView, KnownRows, asked

__all__ = ["ShownLabels"]

_CERTAIN = 2.0  # above every probability


class ShownLabels(LabelProbe):
    """Shown labels as they are; probes and votes, taught by them, for other rows."""

    name = "shown_labels"

    def applicable(self, view: AdversaryView) -> str | None:
        if view.description.labels is None:
            return f"{view.description}: nobody votes, and no label is sent"
        if view.description.labels == "encrypted":
            return f"{view.description}: labels are encrypted, and a passive reads none of them"
        if asked(view) is None:
            return "the transcript kept no request for votes; set transcript.keep to all"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        ballot = asked(view)
        assert ballot is not None
        assert ballot.labels is not None
        positions = self.choose(view, ballot.rows.sort().values, seed)
        x_NF = self.own(view, positions, seed)
        before = self.from_own_columns(view, positions, seed)
        known_N, classes = known_labels(view, positions), view.knowledge.classes
        shown = torch.full((int(ballot.rows.max()) + 1,), -1, dtype=torch.int64)
        shown[view.attributed(ballot.labelled)] = ballot.labels
        labels_N = torch.where(known_N >= 0, known_N, shown[positions])
        guessed = (known_N < 0).numpy()
        taught = self._taught(view, positions, x_NF, labels_N, seed)
        attacks = {
            name: Prediction(_with_shown(values_NK, labels_N)[guessed])
            for name, values_NK in taught.items()
        }
        baselines = dict(before.baselines)
        if (known_N >= 0).any():
            baselines["own votes"] = Prediction(_votes(x_NF, known_N, classes)[guessed])
        return replace(before, attacks=attacks, baselines=baselines)

    def _taught(
        self, view: AdversaryView, positions: Tensor, x_NF: FloatArray, labels_N: Tensor, seed: int
    ) -> dict[str, FloatArray]:
        """Class scores (N, K) of all rows, by everything that learns from these labels."""
        rows, classes = labels_N >= 0, view.knowledge.classes
        found = {"own votes": _votes(x_NF, labels_N, classes)}
        if rows.all():
            return found  # nobody is left whom a probe could guess
        labels = KnownRows(positions[rows], labels_N[rows])
        as_known = replace(view, knowledge=replace(view.knowledge, labels=labels))
        guess = guess_labels(as_known, positions, attacks={"x": x_NF}, baselines={}, seed=seed)
        for name, prediction in guess.attacks.items():
            values_NK = found[f"{name}, taught by shown labels"] = np.zeros((len(rows), classes))
            values_NK[(~rows).numpy()] = prediction.values
        return found


def _votes(x_NF: FloatArray, labels_N: Tensor, classes: int) -> FloatArray:
    places = (labels_N >= 0).nonzero().flatten()
    return own_votes(x_NF, places, labels_N[places], classes)


def _with_shown(values_NK: FloatArray, labels_N: Tensor) -> FloatArray:
    certain_NK = values_NK.copy()
    shown = (labels_N >= 0).numpy()
    certain_NK[shown] = 0.0
    certain_NK[shown, labels_N[shown].numpy()] = _CERTAIN
    return certain_NK
