"""A3, inverse network, paired: a curious party rebuilds the features behind representations.

Run by: whoever receives a victim's representations: in APFed a passive, or several that pool
what they have, against the active; in TVFL the active against each passive. It knows the
victim's features of some shadow rows (former customers, a leak, a public part), learns from
these pairs h, x -> the victim's features, and applies it to every other row (He et al., 2019,
Model Inversion Attacks Against Collaborative Inference; the paired form).

Letters: N observed rows, n of them shadow rows, U the others, F the victim's features.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.neural_network import MLPRegressor

from attacks.completion import chosen_positions, own_columns, standardised, why_nothing_to_read
from attacks.interface import Attack, Guess, Prediction, Target
from attacks.view import AdversaryView, Role, representations

__all__ = ["InverseNetwork"]

FloatArray: TypeAlias = NDArray[np.float64]

# (hidden width, most iterations, seed) -> an unfitted scikit-learn regressor of many outputs.
_REGRESSORS: Mapping[str, Callable[[int, int, int], Any]] = {
    "ridge": lambda *_: RidgeCV(np.logspace(-2, 4, 13)),
    "mlp": lambda width, iterations, seed: MLPRegressor(
        hidden_layer_sizes=(width,), alpha=1.0, learning_rate_init=2e-3,
        max_iter=iterations, random_state=seed,
    ),
}  # fmt: skip


class InverseNetwork(Attack):
    """Regressors from h, and from h beside the own features x, to the victim's features.

    Baselines, with the same shadow rows: their mean, and the same regressors from x alone.

    Attributes:
        shadow_rows: pairs that the adversary has.
        hidden: width of the MLP's hidden layer.
        most_rows: of more observed rows a random part is used.
        components: wider columns are reduced to this many principal components.
    """

    name: ClassVar[str] = "inverse_network"
    target: ClassVar[Target] = "features"
    roles: ClassVar[tuple[Role, ...]] = ("passive", "active")

    shadow_rows: int = Field(100, ge=2)
    hidden: int = Field(128, ge=1)
    most_rows: int = Field(5_000, ge=2)
    components: int = Field(256, ge=2)

    def applicable(self, view: AdversaryView) -> str | None:
        """The adversary needs representations that the victim released to it."""
        reason = why_nothing_to_read(self, view)
        victim = view.knowledge.victim
        if reason is None and victim not in view.senders(view.epochs[-1]):
            return f"{view.method}: {victim} releases no representation to {view.name}"
        return reason

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the victim's features of the observed rows that are no shadow rows."""
        seen = representations(view, view.epochs[-1], view.knowledge.victim)
        positions = chosen_positions(view, seen.positions, self.most_rows, seed)
        h_NF, x_NF = (
            standardised(columns, components=self.components, seed=seed)
            for columns in (seen.at(positions), own_columns(view, positions))
        )
        shadow = view.knowledge.shadow
        is_shadow_N = torch.isin(positions, shadow.positions)
        # Both are ascending, so the i-th of these pairs is the i-th shadow row of `positions`.
        pairs = shadow.values[torch.isin(shadow.positions, positions)].flatten(1)
        regress = _Regression(
            pairs.double().numpy(), is_shadow_N.numpy(), self.hidden, view.budget.iterations, seed
        )
        return Guess(
            positions=positions[~is_shadow_N],
            attacks=regress.on({"h": h_NF, "h and x": np.hstack([h_NF, x_NF])}),
            baselines={"mean of the shadow rows": regress.mean(), **regress.on({"x": x_NF})},
        )


@dataclass(frozen=True, eq=False)
class _Regression:
    """The same fit for every set of columns.

    Attributes:
        pairs: (n, F) the victim's features of the shadow rows.
        shadow: (N,) which of the rows these are.
        hidden, iterations, seed: of the MLP.
    """

    pairs: FloatArray
    shadow: NDArray[np.bool_]
    hidden: int
    iterations: int
    seed: int

    def mean(self) -> Prediction:
        """Predict the shadow rows' mean for every other row."""
        others = int((~self.shadow).sum())
        return Prediction(np.tile(self.pairs.mean(axis=0), (others, 1)))

    def on(self, columns: Mapping[str, FloatArray]) -> dict[str, Prediction]:
        """Fit each regressor on each of the sets (N, F); predict the other rows."""
        return {
            f"{how} on {name}": self._fit(how, values_NF)
            for name, values_NF in columns.items()
            for how in _REGRESSORS
        }

    def _fit(self, how: str, values_NF: FloatArray) -> Prediction:
        centre_F = self.pairs.mean(axis=0)
        scale = self.pairs.std() or 1.0
        regressor = _REGRESSORS[how](self.hidden, self.iterations, self.seed % 2**32)
        with warnings.catch_warnings():
            # The budget may end the optimiser; that is part of the adversary's description.
            warnings.simplefilter("ignore", ConvergenceWarning)
            regressor.fit(values_NF[self.shadow], (self.pairs - centre_F) / scale)
        found_UF = regressor.predict(values_NF[~self.shadow]).reshape(-1, self.pairs.shape[1])
        return Prediction(found_UF * scale + centre_F)
