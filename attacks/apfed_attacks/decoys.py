"""Decoys: the same attack on the same releases, each attributed to another row.

Run by: the experimenter, beside every attack. What an attack reaches has a part that is luck and
a part that is the mere number of its variants: columns of noise beside the own features make a
probe better or worse by chance, and of many such probes the best looks good. A decoy has the
same luck and knows nothing of any row: all that was released is there, exchanged between the
rows. Where releases are independent of all that the adversary has, an attack and its decoys are
exchangeable, so the expected advantage is exactly 0, whatever the attack (a permutation test;
Good, 2005, Permutation, Parametric, and Bootstrap Tests of Hypotheses, Section 1.2). Where they
are a function of what it has, they say nothing new either, but exchanging them breaks that tie,
too; baselines that compute such functions are the attack's to give.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.view import (
    AdversaryView,
    AttackError,
    answered_positions,
    asked_positions,
    released_positions,
    requested_positions,
)
from secure_apfed.seeds import shuffled

__all__ = ["NoDecoyError", "exchanged", "with_decoys"]


class NoDecoyError(AttackError):
    """What should be an attack's decoy is the attack itself."""


def exchanged(view: AdversaryView, seed: int) -> AdversaryView | None:
    """Return `view` with every release attributed to another row; None if it shows no two rows.

    The order is the same in all epochs. Exchanged among themselves are rows of which as much was
    seen: people whom a malicious adversary asked about; rows that trained, which got gradients or
    pseudo-labels, or of which a sum was opened; and the others, which are test rows; of each,
    people whom the victim holds and those whom it does not. So a decoy speaks of the same rows.
    """
    requested = requested_positions(view)
    observed = torch.cat([released_positions(view), asked_positions(view), requested]).unique()
    asked = observed[:0] if view.played is None else view.played.notes.get("people", observed[:0])
    told = requested_positions(view, told=True)
    answered = torch.cat([answered_positions(view), told]).unique()
    groups = {
        "asked": asked.unique(),
        "answered": _without(answered, asked),
        "others": _without(observed, torch.cat([asked, answered])),
    }
    every = torch.cat(list(groups.values()))
    if len(every) < 2:
        return None
    stands_for = torch.arange(int(every.max()) + 1)
    for name, group in groups.items():
        held_N = view.holds(view.knowledge.victim, group)
        for part, rows in ((name, group[held_N]), (f"{name}, not held", group[~held_N])):
            order = shuffled(rows, seed, "attacks", "decoy", part)
            stands_for[order] = order.roll(1)  # so that of two rows or more none keeps its own
    return replace(view, stands_for=stands_for)


def _without(positions: Tensor, others: Tensor) -> Tensor:
    return positions[~torch.isin(positions, others)]


def with_decoys(guess: Guess, decoy: Guess) -> Guess:
    """Return `guess` with what the attack guessed from exchanged releases as its decoys.

    Where rows are missing from some epochs the two may be about different rows; those that both
    guess are kept.

    Raises:
        NoDecoyError: exchanging the releases changed nothing, so that the decoys would hide all
            that the attack found.
    """
    if _same(guess, decoy):
        raise NoDecoyError(
            "exchanging releases between rows changes nothing: either all rows' are the same, or "
            "the attack reads them other than by apfed_attacks.view"
        )
    common_N = torch.isin(guess.positions, decoy.positions)
    positions = guess.positions[common_N]
    order = decoy.positions.argsort()
    found = order[torch.searchsorted(decoy.positions[order], positions)]

    def kept(predictions: Mapping[str, Prediction], rows: Tensor) -> dict[str, Prediction]:
        return {
            name: Prediction(prediction.values[rows.numpy()], prediction.clusters)
            for name, prediction in predictions.items()
        }

    return Guess(
        positions=positions,
        attacks=kept(guess.attacks, common_N),
        baselines=kept(guess.baselines, common_N),
        references=kept(guess.references, common_N),
        decoys=kept(decoy.attacks, found),
    )


def _same(guess: Guess, decoy: Guess) -> bool:
    return torch.equal(guess.positions, decoy.positions) and all(
        np.array_equal(prediction.values, decoy.attacks[name].values, equal_nan=True)
        for name, prediction in guess.attacks.items()
        if name in decoy.attacks
    )
