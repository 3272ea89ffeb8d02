"""A victim's features out of columns, learnt from shadow rows; shared by attacks on features.

Attacks and baselines get the same regressors and the same shadow rows; only their columns
differ. Of each fit it is said how well it predicts known rows that it was not fitted to; the
adversary chooses by that, and never by the rows that are scored (`apfed_attacks.scoring`).

Letters: N rows, n of them shadow rows, U the others, C columns, F the victim's features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from apfed_attacks.columns import (
    ColumnAttack,
    explain_missing_releases,
    fit_model,
    guess_once,
    hash_inputs,
    join_own_columns,
    select_own_columns,
    standardise_columns,
)
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.view import AdversaryView, AttackError

if TYPE_CHECKING:
    from apfed_attacks.live.strategy import ActiveAttack

_ALPHAS = np.logspace(-2, 4, 13)
_WEAKER_ALPHAS = np.logspace(-10, 4, 29)
"""Strengths of `LeastSquares`, from next to none: where columns determine features, any more
keeps a part of them back."""
_MIN_SINGULAR = 1e-13
"""Smallest singular value that counts, in units of the largest: a smaller one is rounding."""
_MAX_LEVERAGE = 0.95
"""Largest weight of a row in its own fit: above it the leave-one-out error says little, and the
least of many such errors is luck."""
_HELD_OUT_EVERY = 5
"""One known row in so many is held out to measure how well a network predicts other rows."""
_CROSS_VALIDATED = 10
"""About so many known rows are left out in turn, where a fit has no closed form for that."""
_BATCH = 200


def _make_ridge() -> Any:
    """Return an unfitted ridge regression, which chooses its strength from `_ALPHAS`."""
    from sklearn.linear_model import RidgeCV

    return RidgeCV(_ALPHAS)


def _make_network(width: int, iterations: int, seed: int, rows: int) -> Any:
    """Return an unfitted regressor with one hidden layer of this width, for so many rows."""
    from sklearn.neural_network import MLPRegressor

    return MLPRegressor(
        hidden_layer_sizes=(width,),
        alpha=1.0,
        learning_rate_init=2e-3,
        max_iter=iterations,
        random_state=seed,
        batch_size=min(_BATCH, rows),
        # Where one batch holds all rows their order changes nothing, and shuffling takes half of
        # the time.
        shuffle=rows > _BATCH,
    )


# (hidden width, most iterations, seed, rows) -> an unfitted regressor of many outputs.
REGRESSORS: Mapping[str, Callable[[int, int, int, int], Any]] = {
    "ridge": lambda *_: _make_ridge(),
    "least squares": lambda *_: LeastSquares(),
    "mlp": _make_network,
}

_NETWORK = "mlp"


class LeastSquares:
    """A linear regression of the rank, or with the ridge, that predicts known rows best.

    Letters: n known rows, C columns, F targets, R rank.

    Candidates are least squares of minimum norm at every rank of the known rows (singular values
    that are cut off), and ridge regression from strength 1e-10 on. One is chosen by leave-one-out
    errors, in closed form (Golub, Heath and Wahba 1979, Generalized cross-validation, Section 2,
    PRESS): each known row is predicted by a fit without it.

    Attributes:
        best_score_: minus the mean squared leave-one-out error of the chosen candidate.
    """

    best_score_: float

    def fit(self, rows_nC: FloatArray, targets: NDArray[Any]) -> Self:
        """Choose rank or ridge by leave-one-out errors, and fit.

        Every candidate is a filter on the R singular values, so that one SVD serves all.

        `rows_nC`: C columns of the n known rows. `targets`: their targets, (n,) or (n, F).
        """
        targets_nF = targets.reshape(len(targets), -1).astype(np.float64)
        rows = len(rows_nC)
        self._centre_C = rows_nC.mean(0)
        self._mean_F = targets_nF.mean(0)
        left_nR, sizes_R, right_RC = np.linalg.svd(rows_nC - self._centre_C, full_matrices=False)
        rank = int((sizes_R > max(sizes_R[0], 1e-300) * _MIN_SINGULAR).sum()) if rows > 1 else 0
        left_nR = left_nR[:, :rank]
        sizes_R = sizes_R[:rank]
        right_RC = right_RC[:rank]
        centred_nF = targets_nF - self._mean_F
        along_RF = left_nR.T @ centred_nF
        # A filter is a factor for each singular vector. Least squares of rank 0, 1, ..., R include
        # the first 0, 1, ..., R of them; those of ridge follow.
        is_included = np.tri(rank + 1, rank, -1)
        strengths = _WEAKER_ALPHAS[:, None]
        filters = np.vstack([is_included, sizes_R**2 / (sizes_R**2 + strengths)])
        errors = [
            self._compute_loo_error(filter_R, left_nR, along_RF, centred_nF) for filter_R in filters
        ]
        best = int(np.argmin(errors))
        self.best_score_ = -errors[best]
        self._weight_CF = right_RC.T @ ((filters[best] / sizes_R)[:, None] * along_RF)
        return self

    def predict(self, rows_NC: FloatArray) -> FloatArray:
        """Return the predicted targets (N, F) of rows of C columns."""
        return np.asarray((rows_NC - self._centre_C) @ self._weight_CF + self._mean_F)

    @staticmethod
    def _compute_loo_error(
        filter_R: FloatArray, left_nR: FloatArray, along_RF: FloatArray, centred_nF: FloatArray
    ) -> float:
        """Return the mean squared leave-one-out error of one candidate.

        It is infinite if some row's leverage (weight in its own fit) is too large: the error then
        says little.

        Args:
            filter_R: the candidate's factor for each singular vector.
            left_nR: left singular vectors of the known rows.
            along_RF: the targets along these.
            centred_nF: the targets minus their mean.
        """
        # The fitted mean alone has the leverage 1 / n.
        leverage_n = 1 / len(left_nR) + np.square(left_nR) @ filter_R
        if leverage_n.max() > _MAX_LEVERAGE:
            return float("inf")
        residual_nF = centred_nF - left_nR @ (filter_R[:, None] * along_RF)
        loo_residual_nF = residual_nF / (1 - leverage_n)[:, None]
        return float(np.square(loo_residual_nF).mean())


class FeatureAttack(ColumnAttack):
    """Base of the curious attacks on features, by regression from what was released or summed.

    Attributes:
        shadow_rows: number of rows whose features at the victim the adversary knows.
        hidden: width of networks.
    """

    target = "features"

    shadow_rows: int = Field(100, ge=2)
    hidden: int = Field(128, ge=1)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why this view has no representations of the victim; None: it has some."""
        reason = explain_missing_releases(view)
        victim = view.knowledge.victim
        if reason is None and victim not in view.list_senders(view.epochs[-1]):
            return f"{view.description}: {victim} releases no representation to {view.name}"
        return reason


@dataclass(frozen=True, eq=False)
class Regression:
    """The regressions of one attack, which fit known rows in the same way for every set of columns.

    Letters: N rows, n of them known (shadow rows), U unknown, C columns, F features of the victim.

    Attributes:
        positions: alignment positions of all rows, (N,), ascending.
        known_features: the victim's features of the known rows, (n, F).
        is_known: mask of the known rows, (N,).
        hidden: width of networks.
        iterations: maximum number of training iterations of a network.
        seed: seed of the networks' initial weights.
        is_decoy: whether rows have other rows' releases, to make a baseline.
    """

    positions: Tensor
    known_features: FloatArray
    is_known: NDArray[np.bool_]
    hidden: int
    iterations: int
    seed: int
    is_decoy: bool = False

    @classmethod
    def from_view(cls, view: AdversaryView, positions: Tensor, *, hidden: int, seed: int) -> Self:
        """Return the regressions for rows at `positions` (N,), ascending.

        The view's shadow rows (rows whose features the adversary knows) among them are the known
        ones. `hidden`: width of networks.

        Raises AttackError: there are fewer than two known rows, or no other.
        """
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
        # Both are ascending, so the i-th of these features is of the i-th shadow row of
        # `positions`.
        pairs = shadow.values[torch.isin(shadow.positions, positions)].flatten(1)
        return cls(
            positions,
            pairs.double().numpy(force=True),
            shadow_N.numpy(),
            hidden,
            view.iterations,
            seed,
            is_decoy=view.is_decoy,
        )

    @property
    def is_guessed(self) -> Tensor:
        """The mask of the rows that are guessed, (N,), bool."""
        return torch.from_numpy(~self.is_known)

    def predict_from_columns(self, columns: Mapping[str, FloatArray]) -> dict[str, Prediction]:
        """Fit each linear regressor on each set of columns (N, C), and predict the unknown rows.

        A network is tried on one set only, that with the best linear fit: measuring it on held-out
        known rows takes another fit. It is among the predictions only if it is better there.
        """
        hashes = {name: hash_inputs(values_NF) for name, values_NF in columns.items()}
        predictions = {
            f"{regressor} on {name}": self._fit_regressor(regressor, values_NF, hashes[name])
            for name, values_NF in columns.items()
            for regressor in REGRESSORS
            if regressor != _NETWORK
        }
        if not predictions:
            return predictions
        best = max(predictions, key=lambda name: predictions[name].held_out or -np.inf)
        name = best.partition(" on ")[2]
        network = self._fit_network(columns[name], hashes[name], predictions[best].held_out)
        return predictions | ({} if network is None else {f"{_NETWORK} on {name}": network})

    def cross_validate_guess(self, guess: Callable[["Regression"], FloatArray]) -> Prediction:
        """Return what a function guesses that fits known rows, with its R^2 on known rows.

        About ten known rows are left out in turn, and guessed by a fit without them.

        `guess`: function of regressions that returns the features (U, F) of the U rows that are
        unknown there.
        """
        errors = []
        known_rows = np.flatnonzero(self.is_known)
        stride = max(1, len(known_rows) // _CROSS_VALIDATED)
        for index in range(0, len(known_rows), stride):
            is_known = self.is_known.copy()
            is_known[known_rows[index]] = False
            known_features = np.delete(self.known_features, index, axis=0)
            without_row = replace(self, is_known=is_known, known_features=known_features)
            index_among_guessed = int((~is_known)[: known_rows[index]].sum())
            guessed_F = guess(without_row)[index_among_guessed]
            errors.append(np.square(guessed_F - self.known_features[index]).mean())
        centred = self.known_features - self.known_features.mean(axis=0)
        variance = float(np.square(centred).mean()) or 1.0
        return Prediction(guess(self), held_out=1 - float(np.mean(errors)) / variance)

    def make_guess(
        self, attacks: Mapping[str, Prediction], own_column_sets: Mapping[str, FloatArray]
    ) -> Guess:
        """Return the guess of an attack for the U unknown rows, with its baselines.

        The baselines are the known rows' mean, and the same regressions on own columns.

        `attacks`: predictions that use what was released. `own_column_sets`: sets of columns (N, C)
        that use nothing released; not used for a decoy (releases of other rows), whose baselines
        are not read.
        """
        unknown_count = int((~self.is_known).sum())
        mean_UF = np.tile(self.known_features.mean(axis=0), (unknown_count, 1))
        shadow_rows = len(self.known_features)
        # R^2 of predicting each known row by the mean of the others: from that mean a row differs
        # n / (n - 1) times as much as from the mean of all n rows.
        error_ratio = shadow_rows / (shadow_rows - 1)
        loo_r2 = 1 - error_ratio**2
        baselines = {"mean of the shadow rows": Prediction(mean_UF, held_out=loo_r2)}
        if not self.is_decoy:
            baselines |= self.predict_from_columns(own_column_sets)
        return Guess(
            positions=self.positions[self.is_guessed], attacks=attacks, baselines=baselines
        )

    def _fit_regressor(self, regressor: str, values_NF: FloatArray, hashed: str) -> Prediction:
        """Fit a linear regressor of `REGRESSORS` to the known rows, and predict the unknown ones,
        (U, F).

        The prediction's `held_out` is its leave-one-out R^2 on the known rows, in closed form.

        `regressor`: its name. `values_NF`: the columns of all rows. `hashed`: a hash of the
        columns, by which equal fits are shared.
        """

        def predict_unknown() -> Prediction:
            """Fit all shadow rows; predict the U unknown ones."""
            model = self._fit_rows(regressor, values_NF, np.arange(len(self.known_features)))
            predicted_UF = self._predict_rows(model, values_NF[~self.is_known])
            return Prediction(predicted_UF, held_out=self._scale_error(-float(model.best_score_)))

        return guess_once(predict_unknown, regressor, *self._cache_key, hashed)

    def _fit_network(
        self, values_NF: FloatArray, hashed: str, threshold: float | None
    ) -> Prediction | None:
        """Return the prediction of a network, (U, F); None: it predicts known rows no better than
        the threshold.

        That is measured on a fifth of the known rows, to which it is not fitted.

        `values_NF`, `hashed`: the columns, and their hash. `threshold`: R^2 that it has to exceed;
        None: any will do.
        """
        rows_n = np.arange(len(self.known_features))
        if len(rows_n) < _HELD_OUT_EVERY:
            return None
        is_held_out_n = rows_n % _HELD_OUT_EVERY == 0

        def predict_held_out() -> Prediction:
            """Fit four fifths of the shadow rows; return squared errors of the others, (h, F)."""
            model = self._fit_rows(_NETWORK, values_NF, rows_n[~is_held_out_n])
            true_hF = self._scaled_features[is_held_out_n]
            columns_hC = values_NF[self.is_known][is_held_out_n]
            predicted_hF = model.predict(columns_hC).reshape(true_hF.shape)
            squared_errors_hF = np.square(predicted_hF - true_hF)
            error_h = squared_errors_hF.mean(axis=1)
            standard_error = error_h.std() / np.sqrt(len(error_h))
            # On so few rows luck is frequent: a network has to be better by a standard error.
            error = float(error_h.mean() + standard_error)
            return Prediction(squared_errors_hF, held_out=self._scale_error(error))

        def predict_unknown() -> Prediction:
            """Fit all shadow rows; predict the unknown ones."""
            model = self._fit_rows(_NETWORK, values_NF, rows_n)
            return Prediction(self._predict_rows(model, values_NF[~self.is_known]))

        r2 = guess_once(predict_held_out, "held out", *self._cache_key, hashed).held_out
        if r2 is None or not r2 > (-np.inf if threshold is None else threshold):
            return None
        predicted = guess_once(predict_unknown, _NETWORK, *self._cache_key, hashed)
        return replace(predicted, held_out=r2)

    @cached_property
    def _cache_key(self) -> tuple[str | int, ...]:
        """All that a fit depends on besides the columns, for `guess_once`."""
        return (
            self.hidden,
            self.iterations,
            self.seed,
            hash_inputs(self.is_known, self.known_features),
        )

    @cached_property
    def _scaled_features(self) -> FloatArray:
        """The known features (n, F), with mean 0 in each column and variance 1 over all."""
        return np.asarray(
            (self.known_features - self.known_features.mean(axis=0)) / self._scale, dtype=np.float64
        )

    @cached_property
    def _scale(self) -> float:
        """The deviation of all known features; 1 if they are constant."""
        return float(self.known_features.std()) or 1.0

    def _scale_error(self, error: float) -> float:
        """Return 1 - error / variance for a mean squared error of scaled features."""
        return 1 - error / (float(np.square(self._scaled_features).mean()) or 1.0)

    def _fit_rows(self, regressor: str, values_NF: FloatArray, rows_n: NDArray[Any]) -> Any:
        """Return a new regressor, fitted to some of the known rows.

        `regressor`: key of `REGRESSORS`. `values_NF`: the columns of all rows. `rows_n`: indices of
        the rows to fit among the known ones.
        """
        model = REGRESSORS[regressor](self.hidden, self.iterations, self.seed % 2**32, len(rows_n))
        wanted_nF = self._scaled_features
        # scikit-learn warns of a single target that is not a vector.
        targets = wanted_nF[rows_n, 0] if wanted_nF.shape[1] == 1 else wanted_nF[rows_n]
        return fit_model(model, values_NF[self.is_known][rows_n], targets)

    def _predict_rows(self, model: Any, rows_NC: FloatArray) -> FloatArray:
        """Return a model's predictions from C columns in the victim's own units, (N, F)."""
        predicted_NF = model.predict(rows_NC).reshape(-1, self.known_features.shape[1])
        return np.asarray(
            predicted_NF * self._scale + self.known_features.mean(axis=0), dtype=np.float64
        )


def predict_by_ridge(
    known_PC: FloatArray, target_PF: FloatArray, columns_NC: FloatArray
) -> Prediction:
    """Fit ridge regression from C columns to the targets of P known rows; predict those of N
    others.

    Returns the targets, (N, F).
    """
    predicted_NF = _make_ridge().fit(known_PC, target_PF).predict(columns_NC)
    return Prediction(predicted_NF.reshape(len(columns_NC), -1))


def guess_features(
    attack: "FeatureAttack | ActiveAttack",
    view: AdversaryView,
    positions_N: Tensor,
    released_by_name: Mapping[str, Tensor],
    seed: int,
) -> Guess:
    """Guess the victim's features by regression on what was released, alone and joined with own
    features.

    The baseline is the same from own features x alone.

    `positions_N`: alignment positions. `released_by_name`: values (N, C) of these people.
    """
    positions, order = positions_N.sort()
    standardise = partial(standardise_columns, components=attack.components, seed=seed)
    own_NF = standardise(select_own_columns(view, positions))
    regression = Regression.from_view(view, positions, hidden=attack.hidden, seed=seed)
    columns: dict[str, FloatArray] = {}
    for name, released_NC in released_by_name.items():
        released_NF = standardise(released_NC[order])
        columns |= {name: released_NF, **join_own_columns(name, released_NF, own_NF)}
    return regression.make_guess(regression.predict_from_columns(columns), {"x": own_NF})
