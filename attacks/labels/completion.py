"""Labels out of columns: probes where some labels are known, clusters where none are.

Shared by the attacks on labels. Attacks, baselines and references get the same probes, the
same labels and the same standardisation; only their columns differ. Each probe is reported by
itself: nothing here chooses among them. How released columns are used together with own ones says
`attacks.fusion`.

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
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from torch import Tensor

from attacks.fusion import TRUST, beside, corrected
from attacks.interface import Attack, AttackError, Guess, Prediction, Target
from attacks.metrics import name_clusters_by_priors
from attacks.view import AdversaryView, Role
from secure_apfed.seeds import shuffled

__all__ = [
    "PROBES",
    "LabelProbe",
    "chosen_positions",
    "guess_labels",
    "known_labels",
    "own_columns",
    "standardised",
    "why_nothing_of_victim",
    "why_nothing_to_read",
]

FloatArray: TypeAlias = NDArray[np.float64]
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


class LabelProbe(Attack):
    """Base of the attacks that a passive mounts on labels with these probes and clusters.

    Attributes:
        labels_per_class: 1, 4 and 40 are the usual settings; 0 clusters.
        most_rows: of more observed rows a random part is used.
        components: wider columns are reduced to this many principal components.
    """

    target: ClassVar[Target] = "labels"
    roles: ClassVar[tuple[Role, ...]] = ("passive",)
    suite: ClassVar[tuple[Mapping[str, Any], ...]] = tuple(
        {"labels_per_class": known} for known in (0, 1, 4, 40)
    )

    labels_per_class: int = Field(4, ge=0)
    iterations: int = Field(100, ge=1)
    most_rows: int = Field(5_000, ge=2)
    components: int = Field(256, ge=2)

    def from_own_columns(self, view: AdversaryView, positions: Tensor, seed: int) -> Guess:
        """Guess from the own features x alone: the baselines of an attack that scores by itself."""
        x_NF = standardised(own_columns(view, positions), components=self.components, seed=seed)
        return guess_labels(
            view, positions, attacks={}, baselines={"x": x_NF}, references={}, seed=seed
        )


def why_nothing_to_read(attack: Attack, view: AdversaryView) -> str | None:
    """Return why this view gives `attack`, on released representations, nothing to read."""
    if reason := attack.wrong_role(view):
        return reason
    if not view.facts.has_passives:
        return f"{view.method}: the active trains alone and releases no representation"
    if view.facts.representations_from is None:
        return f"{view.method}: no party releases a representation"
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
        return f"{view.method}: {victim} releases no representation to {view.name}"
    return reason


def chosen_positions(view: AdversaryView, seen: Tensor, most: int, seed: int) -> Tensor:
    """Return those of `seen` (N,) that are known, and others up to `most` in all, ascending.

    People whom the victim does not hold are left out: of them there is nothing to guess.
    """
    seen = seen[view.holds(view.knowledge.victim, seen)]
    known = torch.isin(
        seen, torch.cat([view.knowledge.labels.positions, view.knowledge.shadow.positions])
    )
    others = shuffled(seen[~known], seed, "attacks", "rows")
    room = max(most - int(known.sum()), 1)
    return torch.cat([seen[known], others[:room]]).sort().values


def known_labels(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return (N,): known labels, -1 for the others."""
    known = view.knowledge.labels
    labels = dict(zip(known.positions.tolist(), known.values.tolist(), strict=True))
    return torch.tensor(
        [labels.get(position, -1) for position in positions.tolist()], dtype=torch.int64
    )


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
    unknown_N1 = ~view.holds(name, positions)[:, None]
    return torch.hstack([torch.where(unknown_N1, mean_F, own_NF), unknown_N1.to(own_NF.dtype)])


def standardised(columns_NF: Tensor, *, components: int, seed: int) -> FloatArray:
    """Return columns of mean 0 and variance 1; wider ones as their first principal components.

    Constant columns become 0. The adversary has all rows, so all of them set the scale.
    """
    is_wide = min(columns_NF.shape) > components
    # Convolution maps have thousands of columns: those stay in single precision until reduced.
    values_NF = (columns_NF.float() if is_wide else columns_NF.double()).numpy()
    spread_F = values_NF.std(axis=0)
    scaled_NF = (values_NF - values_NF.mean(axis=0)) / np.where(spread_F, spread_F, 1)
    if is_wide:
        reduced = PCA(components, svd_solver="randomized", random_state=seed % 2**32)
        scaled_NF = reduced.fit_transform(scaled_NF)
    return np.asarray(scaled_NF, dtype=np.float64)


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
        baselines: the same of what the adversary has anyway.
        references: the same of what is shown beside them.
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
    predictions = {}
    for name in PROBES:
        probe = _fitted(name, view, columns_NF[known_N], labels_N[known_N], seed)
        scores_UK = np.zeros((int((~known_N).sum()), view.knowledge.classes))
        scores_UK[:, probe.classes_] = probe.predict_proba(columns_NF[~known_N])
        predictions[name] = Prediction(scores_UK)
    return predictions


def _corrections(
    view: AdversaryView,
    fused: Mapping[str, tuple[FloatArray, FloatArray]],
    labels_N: IntArray,
    seed: int,
) -> Iterator[tuple[str, Prediction]]:
    """Correct what a probe finds on own columns by the classes' means of released ones."""
    known_N = labels_N >= 0
    for name, (released_NF, own_NF) in fused.items():
        probe = _fitted("logistic", view, own_NF[known_N], labels_N[known_N], seed)
        prior_NK = np.zeros((len(own_NF), view.knowledge.classes))
        prior_NK[:, probe.classes_] = probe.predict_proba(own_NF)
        for trust in TRUST:
            found_NK = corrected(prior_NK, released_NF, labels_N, trust)
            yield f"x corrected by {trust:g} of {name}", Prediction(found_NK[~known_N])


def _fitted(
    name: str, view: AdversaryView, columns_nF: FloatArray, labels_n: IntArray, seed: int
) -> Any:
    probe = PROBES[name](view.budget.iterations, seed % 2**32)
    with warnings.catch_warnings():
        # The budget may end the optimiser; that is part of the adversary's description.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return probe.fit(columns_nF, labels_n)


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
