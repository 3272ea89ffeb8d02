"""The guesses of one attack on one view, beside its decoys: guesses from other rows' releases.

Run by: the experimenter, on a view of a recorded run or of a foreign training loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from apfed_attacks.interface import Attack, Guess, Prediction
from apfed_attacks.view import AdversaryView, AttackError, list_seen_positions
from secure_apfed.base.seeds import derive_seed, shuffle_rows

__all__ = ["add_decoys", "compute_guesses", "exchange_releases"]


@cache
def _find_libraries() -> ThreadpoolController:
    """Return the loaded libraries that have threads of their own.

    They are looked up once, since that reads the list of all loaded ones.
    """
    # Loaded first, with SciPy: a library that is loaded later would not be limited.
    import sklearn  # noqa: F401

    return ThreadpoolController()


def compute_guesses(
    attack: Attack,
    view: AdversaryView,
    seed: int,
    exchanges: int = 1,
    on_pass: Callable[[], None] = lambda: None,
    check: Callable[[Guess], None] = lambda guess: None,
) -> list[Guess]:
    """Return what the attack guesses, with the decoys of each exchange of releases between rows.

    A decoy is what the same attack guesses from releases of other rows. There is one guess for each
    exchange; the guesses differ only in their decoys.

    `exchanges`: number of exchanges. `on_pass`: function that is called after each run of the
    attack; an error that it raises ends them. `check`: function that is called with the first
    guess; it raises an error for one that cannot be scored.
    """
    from sklearn import config_context

    # Small fits get slower with more threads, and their sums would differ.
    with _find_libraries().limit(limits=1), config_context(skip_parameter_validation=True):
        guesses = [attack.run(view, seed)] * exchanges
        check(guesses[0])
        on_pass()
        if not attack.is_exchangeable:
            return guesses
        for number, guess in enumerate(guesses):
            # The first exchange has the attack's own seed.
            exchange_seed = derive_seed(seed, "exchange", number) if number else seed
            decoy_view = exchange_releases(view, exchange_seed)
            if decoy_view is None:
                continue
            try:
                decoy = attack.run(decoy_view, seed)
            except AttackError:
                continue  # the guess is kept without decoys
            guesses[number] = add_decoys(guess, decoy)
            on_pass()
        return guesses


def exchange_releases(view: AdversaryView, seed: int) -> AdversaryView | None:
    """Return `view` with every release attributed to another row; None if it shows no two rows.

    The result is a decoy. Columns of noise beside the own features make a classifier better or
    worse by chance, and the best of many such variants looks good. A decoy has the same luck and
    knows nothing of any row. If releases are independent of all that the adversary has, an attack
    and its decoys are exchangeable, so the expected advantage is exactly 0, whatever the attack (a
    permutation test; Good, 2005, Permutation, Parametric, and Bootstrap Tests of Hypotheses,
    Section 1.2). Baselines that compute functions of what the adversary has are left to the attack.

    The order is the same in all epochs. Rows are exchanged within groups of which equally much was
    seen, so that a decoy guesses the same rows. The groups are people whom a malicious adversary
    asked about; rows with a reply (gradients, pseudo-labels, or a revealed sum), which trained; and
    the others, which are test rows. Each is divided into people of whom the victim has a row and
    others.

    `seed`: seed of the random exchange.
    """
    observed, answered = list_seen_positions(view)
    asked = observed[:0]
    if view.deviation is not None:
        asked = view.deviation.notes.get("people", asked)
    groups = {
        "asked": asked.unique(),
        "answered": answered[~torch.isin(answered, asked)],
        "others": observed[~torch.isin(observed, torch.cat([asked, answered]))],
    }
    all_positions = torch.cat(list(groups.values()))
    if len(all_positions) < 2:
        return None
    attributed_positions = torch.arange(int(all_positions.max()) + 1)
    for name, group in groups.items():
        is_held_N = view.has_rows(view.knowledge.victim, group)
        halves = {name: group[is_held_N], f"{name}, not held": group[~is_held_N]}
        for half_name, rows in halves.items():
            order = shuffle_rows(rows, seed, "attacks", "decoy", half_name)
            attributed_positions[order] = order.roll(
                1
            )  # of two rows or more, none keeps its own release
    return replace(view, attributed_positions=attributed_positions)


def add_decoys(guess: Guess, decoy: Guess) -> Guess:
    """Return `guess` with decoys: what the attack guessed from exchanged releases.

    Only rows that both guess remain; epochs may lack some.

    `decoy`: the guess of the same attack from a view whose releases were exchanged between rows.

    Raises:
        AttackError: exchanging the releases changed nothing, so that the decoys would hide all that
            the attack found.
    """
    has_same_rows = torch.equal(guess.positions, decoy.positions)
    if has_same_rows and all(
        np.array_equal(prediction.values, decoy.attacks[name].values, equal_nan=True)
        for name, prediction in guess.attacks.items()
        if name in decoy.attacks
    ):
        raise AttackError(
            "exchanging releases between rows changes nothing: either all rows' are the same, or "
            "the attack reads them other than by apfed_attacks.view"
        )
    if has_same_rows:
        return replace(guess, decoys=decoy.attacks)
    is_common_N = torch.isin(guess.positions, decoy.positions)
    positions = guess.positions[is_common_N]
    order = decoy.positions.argsort()
    decoy_order = order[torch.searchsorted(decoy.positions[order], positions)]
    return Guess(
        positions=positions,
        attacks=_select_rows(guess.attacks, is_common_N),
        baselines=_select_rows(guess.baselines, is_common_N),
        references=_select_rows(guess.references, is_common_N),
        decoys=_select_rows(decoy.attacks, decoy_order),
    )


def _select_rows(predictions: Mapping[str, Prediction], rows: Tensor) -> dict[str, Prediction]:
    """Return the predictions for `rows`: indices, or a mask of the rows that stay."""
    return {name: prediction.select_rows(rows.numpy()) for name, prediction in predictions.items()}
