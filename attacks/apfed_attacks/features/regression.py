"""A victim's features out of columns, learnt from shadow rows; shared by attacks on features.

Attacks and baselines get the same regressors and the same shadow rows; only their columns
differ. Nothing here chooses among the regressors.

Letters: N rows, n of them shadow rows, U the others, F the victim's features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from sklearn.linear_model import RidgeCV
from sklearn.neural_network import MLPRegressor
from torch import Tensor

from apfed_attacks.columns import (
    ColumnAttack,
    beside,
    fitted,
    guessed_once,
    own_columns,
    standardised,
    why_nothing_to_read,
)
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.live.strategy import ActiveAttack
from apfed_attacks.view import AdversaryView, AttackError

_ALPHAS = np.logspace(-2, 4, 13)
_BATCH = 200
# (hidden width, most iterations, seed, rows) -> an unfitted scikit-learn regressor of many outputs.
# Where one batch holds all rows their order changes nothing, and shuffling takes half of the time.
REGRESSORS: Mapping[str, Callable[[int, int, int, int], Any]] = {
    "ridge": lambda *_: RidgeCV(_ALPHAS),
    "mlp": lambda width, iterations, seed, rows: MLPRegressor(
        hidden_layer_sizes=(width,), alpha=1.0, learning_rate_init=2e-3,
        max_iter=iterations, random_state=seed, batch_size=min(_BATCH, rows),
        shuffle=rows > _BATCH,
    ),
}  # fmt: skip


class FeatureAttack(ColumnAttack):
    """Base of the curious attacks on features, out of what was released or summed."""

    target = "features"

    shadow_rows: int = Field(100, ge=2)
    hidden: int = Field(128, ge=1)

    def applicable(self, view: AdversaryView) -> str | None:
        """Return why this view gives an attack on the victim's representations none of them."""
        reason, victim = why_nothing_to_read(view), view.knowledge.victim
        if reason is None and victim not in view.senders(view.epochs[-1]):
            return f"{view.description}: {victim} releases no representation to {view.name}"
        return reason


@dataclass(frozen=True, eq=False)
class Regression:
    """The same fit for every set of columns of the rows at `positions` (N,).

    Attributes:
        pairs: (n, F) the victim's features of the shadow rows; shadow: (N,) which rows these are.
        decoy: whether rows have other rows' releases.
    """

    positions: Tensor
    pairs: FloatArray
    shadow: NDArray[np.bool_]
    hidden: int
    iterations: int
    seed: int
    decoy: bool = False

    @classmethod
    def of(cls, view: AdversaryView, positions: Tensor, *, hidden: int, seed: int) -> Self:
        """Take the shadow rows among `positions` (N,), which are ascending."""
        shadow = view.knowledge.shadow
        shadow_N = torch.isin(positions, shadow.positions)
        if shadow_N.sum() < 2:
            raise AttackError(
                f"{view.name} observed {int(shadow_N.sum())} of its {len(shadow)} shadow rows; "
                "two are needed; raise shadow_rows"
            )
        if shadow_N.all():
            raise AttackError(
                f"{view.name} observed no row but its {len(shadow)} shadow rows, so that there is "
                "none to guess; lower shadow_rows"
            )
        # Both are ascending, so the i-th of these pairs is the i-th shadow row of `positions`.
        pairs = shadow.values[torch.isin(shadow.positions, positions)].flatten(1)
        return cls(
            positions, pairs.double().numpy(force=True), shadow_N.numpy(), hidden,
            view.iterations, seed, decoy=view.is_decoy,
        )  # fmt: skip

    @property
    def unknown(self) -> Tensor:
        """(N,) which rows are guessed."""
        return torch.from_numpy(~self.shadow)

    def on(self, columns: Mapping[str, FloatArray]) -> dict[str, Prediction]:
        """Fit each regressor on each of the sets (N, F); predict the other rows."""
        return {
            f"{how} on {name}": self._fit(how, values_NF)
            for name, values_NF in columns.items()
            for how in REGRESSORS
        }

    def guess(self, attacks: Mapping[str, Prediction], own: Mapping[str, FloatArray]) -> Guess:
        """What these attacks make of the rows that are guessed, beside the same from own columns.

        Own ones, sets of (N, F), hold no release; of a decoy nobody reads what they tell.
        """
        mean_UF = np.tile(self.pairs.mean(axis=0), (int((~self.shadow).sum()), 1))
        baselines = {"mean of the shadow rows": Prediction(mean_UF)}
        if not self.decoy:
            baselines |= self.on(own)
        return Guess(positions=self.positions[self.unknown], attacks=attacks, baselines=baselines)

    def _fit(self, how: str, values_NF: FloatArray) -> Prediction:
        centre_F, scale = self.pairs.mean(axis=0), self.pairs.std() or 1.0

        def guess() -> FloatArray:
            wanted_nF = (self.pairs - centre_F) / scale
            made = REGRESSORS[how](self.hidden, self.iterations, self.seed % 2**32, len(wanted_nF))
            # scikit-learn warns of one column that is no vector.
            wanted = wanted_nF[:, 0] if wanted_nF.shape[1] == 1 else wanted_nF
            found_U = fitted(made, values_NF[self.shadow], wanted).predict(values_NF[~self.shadow])
            return np.asarray(found_U.reshape(-1, wanted_nF.shape[1]) * scale + centre_F)

        made_of = (self.hidden, self.iterations, self.seed, self.shadow, self.pairs, values_NF)
        return Prediction(guessed_once(guess, how, *made_of))


def ridge(known_PC: FloatArray, wanted_PF: FloatArray, columns_NC: FloatArray) -> Prediction:
    """Fit ridge regression on P known rows; predict N others, (N, F)."""
    found_NF = RidgeCV(_ALPHAS).fit(known_PC, wanted_PF).predict(columns_NC)
    return Prediction(found_NF.reshape(len(columns_NC), -1))


def guess_features(
    attack: FeatureAttack | ActiveAttack, view: AdversaryView, people_N: Tensor,
    released: Mapping[str, Tensor], seed: int,
) -> Guess:  # fmt: skip
    """Regress all that was released of these positions, (N, C) by name, to the victim's features,
    as from own ones x.
    """
    positions, order = people_N.sort()
    scaled = partial(standardised, components=attack.components, seed=seed)
    own_NF = scaled(own_columns(view, positions))
    regress = Regression.of(view, positions, hidden=attack.hidden, seed=seed)
    columns: dict[str, FloatArray] = {}
    for name, released_NC in released.items():
        released_NF = scaled(released_NC[order])
        columns |= {name: released_NF, **beside(name, released_NF, own_NF)}
    return regress.guess(regress.on(columns), {"x": own_NF})
