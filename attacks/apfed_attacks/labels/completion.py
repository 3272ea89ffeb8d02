"""Labels out of columns: probes where some labels are known, clusters where none are.

Shared by the attacks on labels. Attacks, baselines and references get the same probes, labels and
standardisation; only their columns differ, and nothing here chooses among the probes. Passives of
TVFL also have networks of their own, which the task's gradients trained: attacks train copies of
them further below a head.

Letters: N rows, F columns, D numbers of h, B batch, K classes.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from apfed_attacks.columns import (
    TRUST,
    ColumnAttack,
    correct_priors,
    explain_missing_releases,
    fit_model,
    guess_once,
    join_own_columns,
    select_own_columns,
)
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.view import AdversaryView, AttackError, draw_weights_anew
from secure_apfed.base.seeds import seed_draws

IntArray: TypeAlias = NDArray[np.int64]
_STARTS = 4  # of k-means
_ROWS_AT_ONCE = 1_000  # of a forward pass


def _make_logistic_probe(iterations: int, seed: int) -> Any:
    """Return an unfitted logistic regression, whose optimiser draws nothing by the seed."""
    from sklearn.linear_model import LogisticRegression

    del seed
    return LogisticRegression(max_iter=iterations)


def _make_network_probe(iterations: int, seed: int) -> Any:
    """Return an unfitted network with one hidden layer."""
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier(
        hidden_layer_sizes=(64,),
        solver="lbfgs",
        alpha=0.1,
        max_iter=iterations,
        random_state=seed,
    )


# (largest number of iterations, seed) -> an unfitted scikit-learn classifier.
PROBES: Mapping[str, Callable[[int, int], Any]] = {
    "logistic": _make_logistic_probe,
    "mlp": _make_network_probe,
}


class LabelProbe(ColumnAttack):
    """Base of the attacks that a passive mounts on labels with classifiers (probes) or clusters.

    Attributes:
        labels_per_class: number of labels of each class that the adversary knows; 1, 4 and 40 are
            the usual settings. 0: it clusters the rows.
    """

    target = "labels"
    roles = ("passive",)
    suite = tuple({"labels_per_class": known} for known in (0, 1, 4, 40))

    labels_per_class: int = Field(4, ge=0)
    iterations: int = Field(100, ge=1)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no label can have influenced the representations in this view; None: one can
        have.
        """
        exchange = view.description
        reason = explain_missing_releases(view)
        if reason is None and exchange.released_by == "passives" and not exchange.returns_gradients:
            return f"{exchange}: passives make their representations without labels or gradients"
        return reason

    def from_own_columns(self, view: AdversaryView, positions: Tensor, seed: int) -> Guess:
        """Return a guess with only the baselines, from the own features x.

        This is for attacks that compute their own scores. `positions`: alignment positions (N,).
        """
        x_NF = self.scale_own_columns(view, positions, seed)
        return guess_labels(view, positions, baselines={"x": x_NF}, seed=seed)


def collect_known_labels(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return the labels (N,) of these positions that the adversary knows, -1 for the others."""
    known = view.knowledge.labels
    labels = dict(zip(known.positions.tolist(), known.values.tolist(), strict=True))
    return torch.tensor([labels.get(row, -1) for row in positions.tolist()], dtype=torch.int64)


_NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})


def guess_labels(
    view: AdversaryView,
    positions: Tensor,
    *,
    attacks: Mapping[str, FloatArray] = _NO_COLUMNS,
    fused: Mapping[str, tuple[FloatArray, FloatArray]] = _NO_COLUMNS,
    baselines: Mapping[str, FloatArray],
    references: Mapping[str, FloatArray] = _NO_COLUMNS,
    seed: int,
) -> Guess:
    """Guess the labels of the U unknown ones of all `positions` (N,), from each set of columns.

    Classifiers (probes) are fitted to the known rows; without known labels, rows are clustered.

    Args:
        view: view of the adversary, for its knowledge.
        positions: alignment positions of all rows, (N,).
        attacks: standardised columns (N, F) that use what was released, by name.
        fused: pairs of released and own columns, both standardised, by name, to be used together:
            concatenated with several weights and, where labels are known, with the own ones as
            prior.
        baselines: columns that use nothing released, by name; not used for a decoy (releases of
            other rows).
        references: columns of further scores to compare with, by name; not used for a decoy.
        seed: seed of random models.

    Raises:
        AttackError: no label is to guess, or the known ones are of fewer than two classes.
    """
    labels_N = collect_known_labels(view, positions).numpy()
    known = len(view.knowledge.labels)
    guesser = _LabelGuesser(view=view, labels=labels_N, seed=seed)
    is_unknown_N = guesser.is_unknown
    if not is_unknown_N.any():
        raise AttackError(f"{view.name} knows the label of every observed row; none is to guess")
    if known and len(set(labels_N[~is_unknown_N].tolist())) < 2:
        raise AttackError(
            f"{view.name} knows {known} labels, but those of observed rows are of fewer "
            "than two classes; raise labels_per_class, or say more known ones"
        )
    if view.is_decoy:
        baselines = references = {}

    joined = {
        key: columns
        for name, (released_NF, own_NF) in fused.items()
        for key, columns in join_own_columns(name, released_NF, own_NF).items()
    }
    guesses = guesser.guess_from_column_sets({**attacks, **joined})
    if not is_unknown_N.all():
        for name, (released_NF, own_NF) in fused.items():
            guesses |= guesser.correct_by_released(name, released_NF, own_NF)
    majority = {"majority class": guesser.predict_majority()}
    return Guess(
        positions=positions[torch.from_numpy(is_unknown_N)],
        attacks=guesses,
        baselines={**majority, **guesser.guess_from_column_sets(baselines)},
        references=guesser.guess_from_column_sets(references),
    )


@dataclass(frozen=True, kw_only=True)
class _LabelGuesser:
    """Guesses of the U unknown labels among N rows, from columns of these rows.

    Attributes:
        view: view of the adversary, for its knowledge.
        labels: classes of all rows, (N,), -1 where unknown.
        seed: seed of random models.
    """

    view: AdversaryView
    labels: IntArray
    seed: int

    @property
    def is_unknown(self) -> NDArray[np.bool_]:
        """Return the mask (N,) of the rows whose labels are unknown."""
        return self.labels < 0

    def guess_from_column_sets(self, columns: Mapping[str, FloatArray]) -> dict[str, Prediction]:
        """Return the guesses from each set of columns, by "<classifier> on <columns>"."""
        return {
            f"{probe} on {name}": scores
            for name, columns_NF in columns.items()
            for probe, scores in self._guess_from_columns(columns_NF).items()
        }

    def correct_by_released(
        self, name: str, released_NF: FloatArray, own_NF: FloatArray
    ) -> dict[str, Prediction]:
        """Return class probabilities by own columns that released ones correct.

        There is one prediction for each degree of trust in the released columns.

        `name`: name of the released columns.
        """
        prior_NK = _score_rows("logistic", self.view, own_NF, self.labels, self.seed)
        predictions = {}
        for trust in TRUST:
            corrected_NK = correct_priors(prior_NK, released_NF, self.labels, trust)
            predictions[f"x corrected by {trust:g} of {name}"] = Prediction(
                corrected_NK[self.is_unknown]
            )
        return predictions

    def predict_majority(self) -> Prediction:
        """Return the classes' shares as scores of every unknown row, so the largest is predicted.

        The shares are the priors or, where these are unknown, those among the known labels.
        """
        known_labels = self.labels[~self.is_unknown]
        known_counts_K = np.bincount(known_labels, minlength=self.view.knowledge.classes)
        shares_K = np.array(self.view.knowledge.priors or known_counts_K, np.float64)
        return Prediction(np.tile(shares_K, (int(self.is_unknown.sum()), 1)))

    def _guess_from_columns(self, columns_NF: FloatArray) -> dict[str, Prediction]:
        """Return scores of the unknown rows from one set of columns, (U, K).

        They are by every classifier or, if no label is known, by clusters.
        """
        if self.is_unknown.all():
            return self._cluster_rows(columns_NF)
        scores_by_probe = {
            probe: _score_rows(probe, self.view, columns_NF, self.labels, self.seed)
            for probe in PROBES
        }
        return {
            probe: Prediction(scores_NK[self.is_unknown])
            for probe, scores_NK in scores_by_probe.items()
        }

    def _cluster_rows(self, columns_NF: FloatArray) -> dict[str, Prediction]:
        """Return scores (N, K) of all rows by k-means with one cluster for each class."""
        from sklearn.cluster import KMeans

        means = KMeans(
            self.view.knowledge.classes,
            n_init=_STARTS,
            max_iter=self.view.iterations,
            random_state=self.seed % 2**32,
        )
        fit_model(means, columns_NF, None)
        return name_clusters(-means.transform(columns_NF), self.view.knowledge.priors)


def _score_rows(
    name: str, view: AdversaryView, columns_NF: FloatArray, labels_N: IntArray, seed: int
) -> FloatArray:
    """Fit a classifier (probe) to the known rows, and return class scores (N, K) of all rows.

    Equal fits of one attack are shared.

    `name`: key of `PROBES`. `columns_NF`: what the classifier reads. `labels_N`: classes, -1 where
    unknown.
    """
    iterations = view.iterations
    classes = view.knowledge.classes

    def fit_probe() -> Prediction:
        """Fit the classifier, and score all rows; classes that no known row has get 0."""
        known_N = labels_N >= 0
        probe = PROBES[name](iterations, seed % 2**32)
        fit_model(probe, columns_NF[known_N], labels_N[known_N])
        scores_NK = np.zeros((len(columns_NF), classes))
        scores_NK[:, probe.classes_] = probe.predict_proba(columns_NF)
        return Prediction(scores_NK)

    return guess_once(fit_probe, name, iterations, seed, classes, columns_NF, labels_N).values


def name_clusters(scores_NK: FloatArray, priors: Sequence[float] | None) -> dict[str, Prediction]:
    """Return predictions that assign clusters to classes in two ways.

    By the truth, which is an upper bound, and by the priors (shares of the classes), if known. The
    latter gives each class a cluster of about its share: Hungarian matching on |size / N - prior|.
    It is little informative where the priors are nearly uniform.

    `scores_NK`: score of each of N rows for each of K clusters.
    """
    predictions = {"clusters named by the truth": Prediction(scores_NK, clusters=True)}
    if priors is not None:
        clusters = scores_NK.shape[1]
        sizes_K = np.bincount(scores_NK.argmax(axis=1), minlength=clusters) / len(scores_NK)
        distances_KK = np.abs(np.array(priors)[:, None] - sizes_K[None, :])
        _, cluster_of_class = scipy.optimize.linear_sum_assignment(distances_KK)
        predictions["clusters named by priors"] = Prediction(scores_NK[:, cluster_of_class])
    return predictions


def copy_own_networks(
    view: AdversaryView, rows_NF: Tensor, *, has_fresh_weights: bool = False
) -> "_JoinedNetworks":
    """Return a copy of the coalition's own networks, to be trained below a head on own features.

    The features are flattened rows (N, F), in the order of `select_own_columns`. The output is
    standardised: on these rows it has mean 0 and variance 1. `has_fresh_weights`: whether all
    weights are drawn again.
    """
    networks = nn.ModuleList([copy.deepcopy(view.networks[name]).float() for name in view.features])
    if has_fresh_weights:
        draw_weights_anew(networks)
    shapes = [tuple(features.shape[1:]) for features in view.features.values()]
    joined_networks = _JoinedNetworks(networks, shapes).to(rows_NF.device)
    # Mean and scale are those of the output before training, and stay.
    h_ND = apply_in_parts(joined_networks, rows_NF)
    joined_networks.mean = h_ND.mean(dim=0)
    deviation = h_ND.std(dim=0)
    joined_networks.deviation = torch.where(deviation > 0, deviation, 1)
    return joined_networks


class _JoinedNetworks(nn.Module):
    """A network from flattened features of all members (B, F) to their representations (B, D).

    The members' representations are concatenated and standardised.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, networks: nn.ModuleList, shapes: Sequence[tuple[int, ...]]) -> None:
        """Join the members' networks.

        `shapes`: shape of a row of each member's features.
        """
        super().__init__()
        self._networks = networks
        self._shapes = shapes
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("deviation", torch.ones(1))

    def forward(self, rows_BF: Tensor) -> Tensor:
        """Split the rows into the members' features, apply each network, and standardise."""
        blocks = rows_BF.split([math.prod(shape) for shape in self._shapes], dim=1)
        parts = [
            network(block.reshape(-1, *shape)).flatten(1)
            for network, block, shape in zip(self._networks, blocks, self._shapes, strict=True)
        ]
        return (torch.cat(parts, dim=1) - self.mean) / self.deviation


def compute_fresh_columns(view: AdversaryView, positions: Tensor, seed: int) -> Tensor | None:
    """Return the output (N, D) of the coalition's networks on its features, with fresh weights.

    In joint training the coalition released a function of its own features. A random such function
    contains nothing that it does not know, and may still make a classifier better: it is a
    baseline. None: the view lacks a member's network.

    `positions`: alignment positions (N,).
    """
    if not view.features or any(name not in view.networks for name in view.features):
        return None
    own_NF = select_own_columns(view, positions).float()
    with seed_draws(seed, "attacks", "fresh network"):
        networks = copy_own_networks(view, own_NF, has_fresh_weights=True)
    return apply_in_parts(networks, own_NF)


@torch.no_grad()
def apply_in_parts(network: nn.Module, rows_NF: Tensor) -> Tensor:
    """Return a network's output for rows (N, F).

    It is computed in parts, since the convolution maps of all rows would fill the memory.
    """
    return torch.cat([network(part) for part in rows_NF.split(_ROWS_AT_ONCE)])
