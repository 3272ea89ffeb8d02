"""Columns: what an adversary has of each row, its own and released ones, to be learnt from.

Shared by the curious attacks on labels and on features. How both kinds are used together says
`apfed_attacks.columns`.

Letters: N rows, F columns.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Attack
from apfed_attacks.view import AdversaryView
from secure_apfed.seeds import derive_seed, shuffled

__all__ = [
    "ColumnAttack",
    "FloatArray",
    "own_columns",
    "standardised",
    "why_nothing_of_victim",
    "why_nothing_to_read",
]

FloatArray: TypeAlias = NDArray[np.float64]

_ROUNDS, _TO_SPARE = 4, 10


class ColumnAttack(Attack):
    """Base of the curious attacks that learn from columns.

    Attributes:
        most_rows: of more observed rows a random part is used.
        components: wider columns are reduced to this many principal components.
    """

    most_rows: int = Field(5_000, ge=2)
    components: int = Field(256, ge=2)

    def scaled(self, columns_NF: Tensor, seed: int) -> FloatArray:
        """Standardise columns, and reduce those that are wider than `components`."""
        return standardised(columns_NF, components=self.components, seed=seed)

    def own(self, view: AdversaryView, positions: Tensor, seed: int) -> FloatArray:
        """The coalition's own columns x of `positions`, scaled."""
        return self.scaled(own_columns(view, positions), seed)

    def choose(self, view: AdversaryView, seen: Tensor, seed: int) -> Tensor:
        """Return those of `seen` (N,) that are known, others up to `most_rows`, ascending.

        People whom the victim does not hold are left out: of them there is nothing to guess.
        """
        seen = seen[view.holds(view.knowledge.victim, seen)]
        known = torch.isin(
            seen, torch.cat([view.knowledge.labels.positions, view.knowledge.shadow.positions])
        )
        others = shuffled(seen[~known], seed, "attacks", "rows")
        room = max(self.most_rows - int(known.sum()), 1)
        return torch.cat([seen[known], others[:room]]).sort().values


def why_nothing_to_read(attack: Attack, view: AdversaryView) -> str | None:
    """Return why this view gives `attack`, on released representations, nothing to read."""
    if reason := attack.wrong_role(view):
        return reason
    if view.description.released_by is None:
        return f"{view.description}: no party releases a representation"
    if not view.epochs:
        return (
            "the transcript kept no representations; set transcript.keep to first_and_last or all"
        )
    return None


def why_nothing_of_victim(attack: Attack, view: AdversaryView) -> str | None:
    """Return why `attack`, on the victim's representations, has none of them to read."""
    reason = why_nothing_to_read(attack, view)
    victim = view.knowledge.victim
    if reason is None and victim not in view.senders(view.epochs[-1]):
        return f"{view.description}: {victim} releases no representation to {view.name}"
    return reason


def own_columns(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return (N, F): the coalition's own features of `positions`, members side by side.

    A member that does not hold everybody has the mean of those whom it holds in place of the
    others, and one more column, which is 1 for these.
    """
    return torch.cat([_columns_of(view, name, positions) for name in view.features], dim=1)


def _columns_of(view: AdversaryView, name: str, positions: Tensor) -> Tensor:
    own_A = view.features[name]
    own_NF = own_A[positions].flatten(1)
    if name not in view.held:
        return own_NF
    known_F = own_A[view.held[name]].flatten(1)
    mean_F = known_F.mean(dim=0) if len(known_F) else own_NF.new_zeros(own_NF.shape[1])
    unknown_N1 = ~view.holds(name, positions)[:, None].to(own_NF.device)
    return torch.hstack([torch.where(unknown_N1, mean_F, own_NF), unknown_N1.to(own_NF.dtype)])


def standardised(columns_NF: Tensor, *, components: int, seed: int) -> FloatArray:
    """Return columns of mean 0 and variance 1; wider ones as their first principal components.

    Constant columns become 0. The adversary has all rows, so all of them set the scale.
    """
    is_wide = min(columns_NF.shape) > components
    # Convolution maps have thousands of columns: those stay in single precision until reduced.
    values_NF = columns_NF.float() if is_wide else columns_NF.double()
    spread_F, mean_F = torch.std_mean(values_NF, dim=0, correction=0)
    scaled_NF = (values_NF - mean_F) / torch.where(spread_F > 0, spread_F, 1)
    if is_wide:
        scaled_NF = _principal_components(scaled_NF, components, seed)
    return scaled_NF.double().numpy(force=True)


def _principal_components(values_NF: Tensor, count: int, seed: int) -> Tensor:
    """(N, count) of columns of mean 0, where they lie (Halko et al., 2011, Algorithms 4.4, 5.1).

    Four rounds of subspace iteration with ten directions to spare. Signs are those with which each
    component's largest weight is positive.
    """
    draw = torch.Generator().manual_seed(derive_seed(seed, "attacks", "components"))
    start_FQ = torch.randn(values_NF.shape[1], count + _TO_SPARE, generator=draw)
    range_NQ = torch.linalg.qr(values_NF @ start_FQ.to(values_NF)).Q
    for _ in range(_ROUNDS):
        range_FQ = torch.linalg.qr(values_NF.T @ range_NQ).Q
        range_NQ = torch.linalg.qr(values_NF @ range_FQ).Q
    left_QQ, sizes_Q, right_QF = torch.linalg.svd(range_NQ.T @ values_NF, full_matrices=False)
    largest_Q1 = right_QF.abs().argmax(dim=1, keepdim=True)
    signed_Q = sizes_Q * right_QF.gather(1, largest_Q1)[:, 0].sign()
    found_NC: Tensor = range_NQ @ (left_QQ * signed_Q)[:, :count]
    return found_NC
