"""Regression of what single passives contributed to sums, by an aggregator.

Run by: the aggregator, from the messages that it adds. Under a plain sum each holds one passive's
numbers in the clear. Under masks it holds words that are to be as good as random: the same
regression shows whether they are. Ciphertexts hold no numbers without their key, and the attack
says so. The aggregator knows whose row each value belongs to, which the active or any passive could
tell it. Without that it would have to guess the order as well.

Letters: N rows, B rows of a batch, D numbers of a contribution.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_attacks.features.opened import average_rows
from apfed_attacks.features.regression import FeatureAttack, Regression
from apfed_attacks.interface import Guess
from apfed_attacks.view import AdversaryView, AttackError, iter_contributions
from apfed_protocols.sums import SECURE_SUMS
from apfed_protocols.sums.frames import Frame
from secure_apfed.exchange import Kind
from secure_apfed.exchange.secure_sums import explain_unreadable

_ROW_BY_ROW = ("gradients", "representations", "pseudo-labels")
_FLOATS: Mapping[int, np.dtype[Any]] = {4: np.dtype("<f4"), 8: np.dtype("<f8")}
_INTEGERS: Mapping[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<i8")}
_LARGEST_EXACT = 2**53
"""Fixed-point numbers lie below it; the bits of a float64 that is not tiny, read as an integer, lie
above it."""


class ContributionRegression(FeatureAttack):
    """A regression from each row's contributions to sums to the contributor's features, by an
    aggregator.

    It reads the mean contribution and the last. Baseline: the mean of the shadow rows (rows whose
    features the adversary knows). An aggregator has no features of its own.
    """

    name = "contribution_regression"
    roles = ("aggregator",)
    told_order = True
    suite = ({"shadow_rows": 30}, {"shadow_rows": 100})

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why the aggregator sees no contributed values of the victim row by row; None: it
        sees some.

        Nothing is summed so, no contribution was recorded, or contributions are ciphertexts.
        """
        if view.description.opens not in _ROW_BY_ROW:
            return f"{view.description}: nothing is summed row by row through the aggregator"
        victim = view.knowledge.victim or ""
        sent = [
            message for message in view.iter_messages(Kind.CONTRIBUTION) if message.sender == victim
        ]
        if not sent:
            if not any(view.iter_messages(Kind.CONTRIBUTION)):
                return "the transcript kept no contribution; set transcript.keep to all"
            return f"{view.description}: {victim} contributes nothing to a sum"
        frame = Frame.parse(sent[0].payload, sender=victim)
        if reason := explain_unreadable(SECURE_SUMS[frame.name]):
            return reason
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Regress each row's mean and last contribution to the contributor's features."""
        victim = view.knowledge.victim
        contributions: list[tuple[Tensor, Tensor]] = []
        for rows_B, values_BD in _iter_numbers(view, victim or ""):
            present_B = view.has_rows(victim, rows_B)
            contributions.append((rows_B[present_B], values_BD[present_B]))
        means = average_rows(contributions)
        if means is None:
            raise AttackError(f"{view.name} is not told whose rows {view.knowledge.victim} sent")
        positions = self.choose_rows(view, means.positions, seed)
        last_by_position = {
            position: row_D
            for rows_B, values_BD in contributions  # later ones replace earlier ones
            for position, row_D in zip(rows_B.tolist(), values_BD, strict=True)
        }
        last_ND = torch.stack([last_by_position[position] for position in positions.tolist()])
        mean_ND = means.select_positions(positions)
        columns = {
            "contributions": self.scale_columns(mean_ND, seed),
            "last contribution": self.scale_columns(last_ND, seed),
        }
        own_columns = {"nothing": self.scale_own_columns(view, positions, seed)}
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        return regress.make_guess(regress.predict_from_columns(columns), own_columns)


def _iter_numbers(view: AdversaryView, sender: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows (B,), values (B, D), float64) of what `sender` contributed, step by step."""
    for rows_B, frame in iter_contributions(view, sender):
        values_BD = decode_numbers(frame)
        if values_BD is not None:
            yield rows_B, torch.from_numpy(values_BD).to(view.device)


def decode_numbers(frame: Frame) -> NDArray[np.float64] | None:
    """Return the values (B, D) of a contribution that is not encrypted; None: it has none.

    They are floats, fixed-point integers, or masked integers read as signed ones. The kind of sum
    and the size of the values decide which.
    """
    count = frame.rows * frame.columns
    # Numbers of 4 or 8 bytes each.
    candidates = [blob for blob in frame.blobs if count and len(blob) in (4 * count, 8 * count)]
    if not candidates:
        return None
    blob = candidates[0]
    word_bytes = len(blob) // count
    integers = np.frombuffer(blob, dtype=_INTEGERS[word_bytes])
    floats = np.frombuffer(blob, dtype=_FLOATS[word_bytes])
    is_masked = SECURE_SUMS[frame.name].masks != "none"
    is_fixed_point = word_bytes == 8 and bool((np.abs(integers) < _LARGEST_EXACT).all())
    values = integers if is_masked or is_fixed_point else floats
    return np.asarray(values, dtype=np.float64).reshape(frame.shape)
