"""Labels out of columns: probes where some labels are known, clusters where none are.

Shared by the attacks on labels. Attacks, baselines and references get the same probes, the
same labels and the same standardisation; only their columns differ. Each probe is reported by
itself: nothing here chooses among them. How released columns are used together with own ones says
`apfed_attacks.columns`.

Letters: N rows, n of them with known labels, U the others, F columns, K classes.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from torch import Tensor

from apfed_attacks.columns import (
    TRUST,
    ColumnAttack,
    FloatArray,
    beside,
    corrected,
    guessed_once,
    why_nothing_to_read,
)
from apfed_attacks.interface import Guess, Prediction, Target
from apfed_attacks.labels.completion import name_clusters_by_priors
from apfed_attacks.view import AdversaryView, AttackError, Role

__all__ = [
    "PROBES",
    "LabelProbe",
    "guess_labels",
    "known_labels",
    "why_no_label_moves",
]

IntArray: TypeAlias = NDArray[np.int64]

# (most iterations, seed) -> an unfitted scikit-learn classifier.
PROBES: Mapping[str, Callable[[int, int], Any]] = {
    "logistic": lambda iterations, _: LogisticRegression(max_iter=iterations),
    "mlp": lambda iterations, seed: MLPClassifier(
        hidden_layer_sizes=(64,), solver="lbfgs", alpha=0.1, max_iter=iterations,
        random_state=seed,
    ),
}  # fmt: skip
_STARTS = 4


class LabelProbe(ColumnAttack):
    """Base of the attacks that a passive mounts on labels with these probes and clusters.

    Attributes:
        labels_per_class: 1, 4 and 40 are the usual settings; 0 clusters.
    """

    target: ClassVar[Target] = "labels"
    roles: ClassVar[tuple[Role, ...]] = ("passive",)
    suite: ClassVar[tuple[Mapping[str, Any], ...]] = tuple(
        {"labels_per_class": known} for known in (0, 1, 4, 40)
    )

    labels_per_class: int = Field(4, ge=0)
    iterations: int = Field(100, ge=1)

    def from_own_columns(self, view: AdversaryView, positions: Tensor, seed: int) -> Guess:
        """Guess from the own features x alone: the baselines of an attack that scores by itself."""
        x_NF = self.own(view, positions, seed)
        return guess_labels(
            view, positions, attacks={}, baselines={"x": x_NF}, references={}, seed=seed
        )


def why_no_label_moves(attack: LabelProbe, view: AdversaryView) -> str | None:
    """Return why no label moved the representations that `attack` would read, or None."""
    told = view.description
    reason = why_nothing_to_read(attack, view)
    if reason is None and told.released_by == "passives" and not told.returns_gradients:
        return f"{told}: passives make their representations without labels or gradients"
    return reason


def known_labels(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return (N,): known labels, -1 for the others."""
    known = view.knowledge.labels
    labels = dict(zip(known.positions.tolist(), known.values.tolist(), strict=True))
    return torch.tensor(
        [labels.get(position, -1) for position in positions.tolist()], dtype=torch.int64
    )


def guess_labels(
    view: AdversaryView,
    positions: Tensor,
    *,
    attacks: Mapping[str, FloatArray],
    baselines: Mapping[str, FloatArray],
    references: Mapping[str, FloatArray],
    seed: int,
    fused: Mapping[str, tuple[FloatArray, FloatArray]] = MappingProxyType({}),
) -> Guess:
    """Guess the labels of all `positions` (N,) that are not known, from each set of columns.

    Args:
        view: gives the known labels, the priors and the budget.
        positions: observed alignment positions; row i of all columns belongs to the i-th.
        attacks: name -> (N, F) standardised columns that use what was released.
        baselines: the same of what the adversary has anyway; of a decoy nobody reads them.
        references: the same of what is shown beside them; not of a decoy either.
        seed: of the MLP's weights and of the clusters' starts.
        fused: name -> released and own columns, both standardised, to be used together: side by
            side with several weights and, where labels are known, own ones as the prior.

    Raises:
        AttackError: labels are known, but of fewer than two classes among the observed rows.
    """
    labels_N, known = known_labels(view, positions).numpy(), len(view.knowledge.labels)
    if known and len(set(labels_N[labels_N >= 0].tolist())) < 2:
        raise AttackError(
            f"{view.name} knows {known} labels, but those of observed rows are of fewer "
            "than two classes; raise labels_per_class"
        )
    if view.is_decoy:
        baselines = references = {}
    how = _probe if (labels_N >= 0).any() else _cluster
    together = {
        key: columns for name, both in fused.items() for key, columns in beside(name, *both).items()
    }
    found = [
        {
            f"{way} on {name}": scores
            for name, columns_NF in columns.items()
            for way, scores in how(view, columns_NF, labels_N, seed).items()
        }
        for columns in ({**attacks, **together}, baselines, references)
    ]
    if how is _probe:
        found[0].update(_corrections(view, fused, labels_N, seed))
    return Guess(
        positions=positions[torch.from_numpy(labels_N < 0)],
        attacks=found[0],
        baselines={"majority class": _majority(view, labels_N), **found[1]},
        references=found[2],
    )


def _probe(
    view: AdversaryView, columns_NF: FloatArray, labels_N: IntArray, seed: int
) -> dict[str, Prediction]:
    """Fit each probe on the known rows; return its scores of the others."""
    known_N = labels_N >= 0
    return {
        name: Prediction(_scores(name, view, columns_NF, labels_N, seed)[~known_N])
        for name in PROBES
    }


def _corrections(
    view: AdversaryView,
    fused: Mapping[str, tuple[FloatArray, FloatArray]],
    labels_N: IntArray,
    seed: int,
) -> Iterator[tuple[str, Prediction]]:
    """Correct what a probe finds on own columns by the classes' means of released ones."""
    known_N = labels_N >= 0
    for name, (released_NF, own_NF) in fused.items():
        prior_NK = _scores("logistic", view, own_NF, labels_N, seed)
        for trust in TRUST:
            found_NK = corrected(prior_NK, released_NF, labels_N, trust)
            yield f"x corrected by {trust:g} of {name}", Prediction(found_NK[~known_N])


def _scores(
    name: str, view: AdversaryView, columns_NF: FloatArray, labels_N: IntArray, seed: int
) -> FloatArray:
    """Class scores (N, K) of all rows by a probe that was fitted to the known ones."""
    iterations, classes = view.budget.iterations, view.knowledge.classes

    def guess() -> FloatArray:
        known_N = labels_N >= 0
        probe = PROBES[name](iterations, seed % 2**32)
        with warnings.catch_warnings():
            # The budget may end the optimiser; that is part of the adversary's description.
            warnings.simplefilter("ignore", ConvergenceWarning)
            probe.fit(columns_NF[known_N], labels_N[known_N])
        scores_NK = np.zeros((len(columns_NF), classes))
        scores_NK[:, probe.classes_] = probe.predict_proba(columns_NF)
        return scores_NK

    return guessed_once(guess, name, iterations, seed, classes, columns_NF, labels_N)


def _cluster(
    view: AdversaryView, columns_NF: FloatArray, labels_N: IntArray, seed: int
) -> dict[str, Prediction]:
    """K-means with one cluster a class, named by the priors and, as a bound, by the truth."""
    means = KMeans(
        view.knowledge.classes, n_init=_STARTS, max_iter=view.budget.iterations,
        random_state=seed % 2**32,
    ).fit(columns_NF)  # fmt: skip
    scores_NK: FloatArray = -means.transform(columns_NF)
    predictions = {"clusters named by the truth": Prediction(scores_NK, clusters=True)}
    if view.knowledge.priors is not None:
        priors_K = np.array(view.knowledge.priors)
        named_NK = name_clusters_by_priors(scores_NK, priors_K)
        predictions["clusters named by priors"] = Prediction(named_NK)
    return predictions


def _majority(view: AdversaryView, labels_N: IntArray) -> Prediction:
    """Score every row by the priors or, where they are unknown, by the known labels' shares."""
    classes = view.knowledge.classes
    shares_K = np.bincount(labels_N[labels_N >= 0], minlength=classes).astype(np.float64)
    if view.knowledge.priors is not None:
        shares_K = np.array(view.knowledge.priors)
    return Prediction(np.tile(shares_K, (int((labels_N < 0).sum()), 1)))
