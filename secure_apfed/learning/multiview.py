"""Multi-view learning by pseudo-labels: the closed forms of MMVFL and FedMV.

Run by: each party on its own view X_k (weights W_k, pseudo-labels Z_k), and whoever averages (Z).
Sources: MMVFL, Eqs. 5 to 14, where the labels tie the first party's pseudo-labels; FedMV, Eqs. 1
to 13, where they tie the common ones. All of them minimise

    sum over k of |X_k W_k - Z_k|^2 + beta |W_k|_21 + zeta_k |Z_k - Z|^2,   plus eta times
    |Z_1 - Y|^2 (MMVFL, Eq. 4) or |Z - Y|^2 (FedMV, Eq. 1; there once in each summand, while
    its Eq. 10 is the minimiser of it taken once: we take it once).

|W|_21 is the sum of the Euclidean norms of W's rows, one a feature. Letters: N rows, F features of
a view, C classes.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import ModelError

__all__ = [
    "View",
    "common_labels",
    "importance",
    "own_labels",
    "row_norms",
    "start",
    "view_objective",
    "weights_of",
]

Floats = NDArray[np.float64]

_LEAST_NORM = 1e-10
"""Epsilon of Eq. (7): of the norm of a feature's row, so that its weight stays finite."""
_TOLERANCE = 1e-12
_MOST_ROUNDS = 10_000


def row_norms(weights_FC: Floats) -> Floats:
    """The Euclidean norm of each feature's row: how much it counts (MMVFL, section 4.2)."""
    return np.asarray(np.linalg.norm(weights_FC, axis=1))


def view_objective(x_NF: Floats, weights_FC: Floats, labels_NC: Floats, beta: float) -> float:
    """Eq. (5): |X W - Z|^2 + beta |W|_21."""
    residual_NC = x_NF @ weights_FC - labels_NC
    return float((residual_NC**2).sum() + beta * row_norms(weights_FC).sum())


def weights_of(
    x_NF: Floats, labels_NC: Floats, beta: float, weights_FC: Floats, *,
    tolerance: float = _TOLERANCE, most_rounds: int = _MOST_ROUNDS,
) -> Floats:  # fmt: skip
    """Minimise Eq. (5) by reweighting, Eqs. (7) and (8), from these weights on.

    Each round minimises a quadratic that lies above the objective and touches it at the last
    weights (|w| <= |w|^2 / 2a + a / 2), so that none raises it. A row that is 0 stays there.

    Args:
        x_NF: the view.
        labels_NC: the pseudo-labels.
        beta: of Eq. (5).
        weights_FC: to begin with.
        tolerance: of the objective, relative, below which rounds end.
        most_rounds: at most.

    Raises:
        ModelError: X^T X is singular and beta 0.
    """
    gram_FF, cross_FC = x_NF.T @ x_NF, x_NF.T @ labels_NC
    before = view_objective(x_NF, weights_FC, labels_NC, beta)
    for _ in range(most_rounds):
        ridge_F = beta / (2 * (row_norms(weights_FC) + _LEAST_NORM))
        try:
            weights_FC = np.asarray(
                np.linalg.solve(gram_FF + np.diag(ridge_F), cross_FC), dtype=np.float64
            )
        except np.linalg.LinAlgError as error:
            raise ModelError(
                "a view's columns are linearly dependent; take a beta above 0, or fewer columns"
            ) from error
        now = view_objective(x_NF, weights_FC, labels_NC, beta)
        if before - now <= tolerance * max(before, 1.0):
            break
        before = now
    return np.asarray(weights_FC)


def own_labels(
    scores_NC: Floats, common_NC: Floats, zeta: float, *, truth_NC: Floats | None = None,
    eta: float | Floats = 0.0,
) -> Floats:  # fmt: skip
    """Z_k: MMVFL's Eqs. (11) and (12), FedMV's Eqs. (8) and (13).

    Args:
        scores_NC: X_k W_k.
        common_NC: Z.
        zeta: how much Z_k is drawn to it.
        truth_NC: Y, at the party whose pseudo-labels the labels tie.
        eta: how much they tie them; of each row, (N, 1), where some have no label.
    """
    total_NC = scores_NC + zeta * common_NC
    if truth_NC is None:
        return np.asarray(total_NC / (1 + zeta))
    return np.asarray((total_NC + eta * truth_NC) / (1 + zeta + eta))


def common_labels(
    summed_NC: Floats, zetas: float, *, truth_NC: Floats | None = None, eta: float | Floats = 0.0
) -> Floats:
    """Z: MMVFL's Eq. (14), FedMV's Eqs. (10) and (12).

    Args:
        summed_NC: sum of zeta_k Z_k over all parties, which is all that is read of them.
        zetas: sum of zeta_k.
        truth_NC: Y, where the labels tie Z.
        eta: how much they do; of each row, (N, 1), where some have no label.
    """
    if truth_NC is None:
        return np.asarray(summed_NC / zetas)
    return np.asarray((summed_NC + eta * truth_NC) / (zetas + eta))


@dataclass(eq=False)
class View:
    """One party's view of the aligned people: its weights and pseudo-labels, and their updates.

    Attributes:
        x_NF: its features, float64.
        beta, zeta: of the objective.
        weights_FC: W_k; labels_NC: Z_k.
        tolerance, most_rounds: see `weights_of`.
    """

    x_NF: Floats = field(repr=False)  # noqa: N815
    beta: float
    zeta: float
    weights_FC: Floats = field(repr=False)  # noqa: N815
    labels_NC: Floats = field(repr=False)  # noqa: N815
    tolerance: float = _TOLERANCE
    most_rounds: int = _MOST_ROUNDS

    @classmethod
    def begin(
        cls, x_NF: Floats, classes: int, rng: np.random.Generator, **settings: float
    ) -> "View":
        """With random weights and pseudo-labels (Algorithm 1, line 1)."""
        rows, features = x_NF.shape
        weights_FC = rng.standard_normal((features, classes))
        labels_NC = start(rows, classes, rng)
        return cls(x_NF=x_NF, weights_FC=weights_FC, labels_NC=labels_NC, **settings)  # type: ignore[arg-type]

    def learn(
        self, rows_B: NDArray[np.int64], common_BC: Floats, *,
        truth_BC: Floats | None = None, eta: float | Floats = 0.0,
    ) -> Floats:  # fmt: skip
        """Update W_k, then Z_k of these rows; return the latter (Algorithm 1, lines 4 to 12)."""
        x_BF = self.x_NF[rows_B]
        self.weights_FC = weights_of(
            x_BF, self.labels_NC[rows_B], self.beta, self.weights_FC,
            tolerance=self.tolerance, most_rounds=self.most_rounds,
        )  # fmt: skip
        labels_BC = own_labels(
            x_BF @ self.weights_FC, common_BC, self.zeta, truth_NC=truth_BC, eta=eta
        )
        self.labels_NC[rows_B] = labels_BC
        return labels_BC

    def scores(self, rows_B: NDArray[np.int64]) -> Floats:
        """X_k W_k of these rows."""
        return np.asarray(self.x_NF[rows_B] @ self.weights_FC)

    def loss(self, rows_B: NDArray[np.int64], common_BC: Floats) -> float:
        """This view's part of the objective, a row."""
        labels_BC = self.labels_NC[rows_B]
        own = view_objective(self.x_NF[rows_B], self.weights_FC, labels_BC, self.beta)
        return (own + self.zeta * float(((labels_BC - common_BC) ** 2).sum())) / len(rows_B)


def start(rows: int, classes: int, rng: np.random.Generator) -> Floats:
    """A random matrix with Z^T Z = I, (N, C)."""
    found, _ = np.linalg.qr(rng.standard_normal((rows, classes)))
    return np.asarray(found)


def importance(weights_FC: Floats, share: float) -> NDArray[np.int64]:
    """The features that count most, as many as this share of all, at least one; ascending."""
    kept = max(1, round(share * len(weights_FC)))
    return np.sort(np.argsort(-row_norms(weights_FC), kind="stable")[:kept])
