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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import solve
from torch import Tensor

from secure_apfed.errors import ModelError

__all__ = [
    "Floats",
    "Pull",
    "ViewModel",
    "averaged",
    "common_labels",
    "importance",
    "iterate",
    "joint_scores",
    "joint_weights",
    "objective",
    "own_labels",
    "row_norms",
    "start",
    "train_locally",
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
    tolerance: float = _TOLERANCE, most_rounds: int = _MOST_ROUNDS, gram_FF: Floats | None = None,
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
        gram_FF: X^T X, where it is known already.

    Raises:
        ModelError: X^T X is singular and beta 0, or numbers are not finite.
    """
    gram_FF, cross_FC = x_NF.T @ x_NF if gram_FF is None else gram_FF, x_NF.T @ labels_NC
    before = view_objective(x_NF, weights_FC, labels_NC, beta)
    for _ in range(most_rounds):
        ridge_F = beta / (2 * (row_norms(weights_FC) + _LEAST_NORM))
        try:
            weights_FC = solve(gram_FF + np.diag(ridge_F), cross_FC, assume_a="pos")
        except np.linalg.LinAlgError as error:
            raise ModelError(
                "a view's columns are linearly dependent; take a beta above 0, or fewer columns"
            ) from error
        except ValueError as error:
            raise ModelError(
                "a view's numbers are too large to learn from; rescale its columns, or take a "
                "smaller method.beta"
            ) from error
        now = view_objective(x_NF, weights_FC, labels_NC, beta)
        if before - now <= tolerance * max(before, 1.0):
            break
        before = now
    return np.asarray(weights_FC)


@dataclass(frozen=True, eq=False)
class Pull:
    """What labels draw to them.

    Attributes:
        truth_NC: Y, one-hot; zeros where a row has no label to learn from.
        eta_N1: how much; 0 for these rows.
        own: pseudo-labels of the one view that holds the labels (MMVFL), or the common ones.
    """

    truth_NC: Floats = field(repr=False)  # noqa: N815
    eta_N1: Floats = field(repr=False)  # noqa: N815
    own: bool = False

    def of(self, rows_B: NDArray[np.int64], *, own: bool) -> "Pull | None":
        """Of these rows, on pseudo-labels of this kind; None where the labels draw the other."""
        if own is not self.own:
            return None
        return Pull(self.truth_NC[rows_B], self.eta_N1[rows_B], own)


def own_labels(
    scores_NC: Floats, common_NC: Floats, zeta: float, pull: Pull | None = None
) -> Floats:
    """Z_k: MMVFL's Eqs. (11) and (12), FedMV's Eqs. (8) and (13).

    Args:
        scores_NC: X_k W_k.
        common_NC: Z.
        zeta: how much Z_k is drawn to it.
        pull: of the labels, where they draw this view's; None: they do not.
    """
    return _drawn(scores_NC + zeta * common_NC, 1 + zeta, pull)


def common_labels(summed_NC: Floats, zetas: float, pull: Pull | None = None) -> Floats:
    """Z: MMVFL's Eq. (14), FedMV's Eqs. (10) and (12).

    Args:
        summed_NC: sum of zeta_k Z_k over all parties, which is all that is read of them.
        zetas: sum of zeta_k.
        pull: of the labels, where they draw Z; None: they do not.
    """
    return _drawn(summed_NC, zetas, pull)


def _drawn(total_NC: Floats, weight: float, pull: Pull | None) -> Floats:
    if pull is None:
        return np.asarray(total_NC / weight)
    return np.asarray((total_NC + pull.eta_N1 * pull.truth_NC) / (weight + pull.eta_N1))


@dataclass(eq=False)
class ViewModel:
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
    _gram: tuple[bytes, Floats] | None = field(default=None, init=False, repr=False)

    @classmethod
    def begin(
        cls, x_NF: Floats, classes: int, rng: np.random.Generator, **settings: float
    ) -> "ViewModel":
        """With random weights and pseudo-labels (Algorithm 1, line 1)."""
        rows, features = x_NF.shape
        weights_FC = rng.standard_normal((features, classes))
        labels_NC = start(rows, classes, rng)
        return cls(x_NF=x_NF, weights_FC=weights_FC, labels_NC=labels_NC, **settings)  # type: ignore[arg-type]

    def learn(
        self, rows_B: NDArray[np.int64], common_BC: Floats, pull: Pull | None = None
    ) -> Floats:
        """Update W_k, then Z_k of these rows; return the latter (Algorithm 1, lines 4 to 12)."""
        self.fit(rows_B)
        return self.relabel(rows_B, common_BC, pull)

    def fit(self, rows_B: NDArray[np.int64]) -> None:
        """Update W_k: Eq. (5) of these rows."""
        x_BF, rows = self.x_NF[rows_B], np.sort(rows_B).tobytes()
        if self._gram is None or self._gram[0] != rows:
            self._gram = rows, x_BF.T @ x_BF
        self.weights_FC = weights_of(
            x_BF, self.labels_NC[rows_B], self.beta, self.weights_FC,
            tolerance=self.tolerance, most_rounds=self.most_rounds, gram_FF=self._gram[1],
        )  # fmt: skip

    def relabel(
        self, rows_B: NDArray[np.int64], common_BC: Floats, pull: Pull | None = None
    ) -> Floats:
        """Update Z_k of these rows, and return it."""
        labels_BC = own_labels(self.scores(rows_B), common_BC, self.zeta, pull)
        self.labels_NC[rows_B] = labels_BC
        return labels_BC

    def scores(self, rows_B: NDArray[np.int64]) -> Floats:
        """X_k W_k of these rows."""
        return np.asarray(self.x_NF[rows_B] @ self.weights_FC)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "weights": torch.from_numpy(self.weights_FC),
            "labels": torch.from_numpy(self.labels_NC),
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.weights_FC = tensors["weights"].numpy().copy()
        self.labels_NC = tensors["labels"].numpy().copy()

    def loss(self, rows_B: NDArray[np.int64], common_BC: Floats) -> float:
        """This view's part of the objective, a row."""
        labels_BC = self.labels_NC[rows_B]
        own = view_objective(self.x_NF[rows_B], self.weights_FC, labels_BC, self.beta)
        return (own + self.zeta * float(((labels_BC - common_BC) ** 2).sum())) / len(rows_B)


def iterate(
    views: Sequence[ViewModel], common_NC: Floats, pull: Pull, *, told: Collection[int] = (0,)
) -> Floats:
    """One iteration on all views (MMVFL, Algorithm 1; FedMV, Algorithms 1 and 2); return Z.

    Args:
        views: of one table, updated in place.
        common_NC: Z.
        pull: of the labels.
        told: which views' parties hold the labels, under `pull.own`.
    """
    rows = np.arange(len(common_NC))
    for index, view in enumerate(views):
        view.learn(rows, common_NC, pull if pull.own and index in told else None)
    return averaged(views, None if pull.own else pull)


def averaged(views: Sequence[ViewModel], pull: Pull | None) -> Floats:
    """Z from all views' pseudo-labels."""
    summed_NC = np.sum([view.zeta * view.labels_NC for view in views], axis=0)
    return common_labels(summed_NC, sum(view.zeta for view in views), pull)


def objective(views: Sequence[ViewModel], common_NC: Floats, pull: Pull) -> float:
    """What all of them minimise, of a table; see the head of this module."""
    rows = np.arange(len(common_NC))
    drawn_NC = views[0].labels_NC if pull.own else common_NC
    apart = float((pull.eta_N1 * (drawn_NC - pull.truth_NC) ** 2).sum())
    return len(rows) * sum(view.loss(rows, common_NC) for view in views) + apart


def joint_scores(views: Sequence[ViewModel], rows_B: NDArray[np.int64]) -> Floats:
    """Z of rows that nobody learns from, where FedMV's Eqs. (12) and (13) end."""
    weights = joint_weights([view.zeta for view in views])
    parts = [weight * view.scores(rows_B) for weight, view in zip(weights, views, strict=True)]
    return np.asarray(np.sum(parts, axis=0))


def joint_weights(zetas: Sequence[float]) -> list[float]:
    """Of X_k W_k in these: zeta_k / (1 + zeta_k), of 1 in all.

    Put Eq. (13) in Eq. (12), and solve for Z.
    """
    weights = [zeta / (1 + zeta) for zeta in zetas]
    return [weight / sum(weights) for weight in weights]


def train_locally(views: Sequence[ViewModel], pull: Pull, *, tolerance: float, rounds: int) -> int:
    """What a client of H-FedMV does in a round (Algorithm 3); return the updates it took.

    Args:
        views: all of this client, with the weights that it was sent; updated in place.
        pull: of its labels, on the common pseudo-labels.
        tolerance: of the objective, relative, below which updates end.
        rounds: of updates, at most.
    """
    rows = np.arange(len(pull.truth_NC))
    common_NC, before = averaged(views, pull), np.inf
    for done in range(1, rounds + 1):
        for view in views:
            view.relabel(rows, common_NC)
        common_NC = averaged(views, pull)
        for view in views:
            view.fit(rows)
        now = objective(views, common_NC, pull)
        if before - now <= tolerance * max(now, 1.0):
            return done
        before = now
    return rounds


def start(rows: int, classes: int, rng: np.random.Generator) -> Floats:
    """A random matrix with Z^T Z = I, (N, C); of fewer rows than classes with Z Z^T = I."""
    drawn_NC = rng.standard_normal((rows, classes))
    if rows < classes:
        return np.asarray(np.linalg.qr(drawn_NC.T)[0].T)
    return np.asarray(np.linalg.qr(drawn_NC)[0])


def importance(weights_FC: Floats, share: float) -> NDArray[np.int64]:
    """The features that count most, as many as this share of all, at least one; ascending."""
    kept = max(1, round(share * len(weights_FC)))
    return np.sort(np.argsort(-row_norms(weights_FC), kind="stable")[:kept])
