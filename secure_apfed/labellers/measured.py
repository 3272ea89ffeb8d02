"""Tests of a labeller's declared properties, on a few rows of the first request for votes (the
ballot).

Run by: every passive, before it votes, if a privacy cost (epsilon) is recorded for its votes; by
authors of labellers through `secure_apfed.testing`. The cost of a vote relies on three properties
(`guarantee`): `inductive`, that the row of a person without a label changes no other person's vote;
`signed`, that votes are never negative where it is False; and that a row of votes has L1 norm 1 at
most.

Letters: U rows, n labelled ones, K classes, F features.
"""

import numpy as np
from numpy.typing import NDArray

from secure_apfed.errors import PromiseError
from secure_apfed.labellers.kinds import Features, Floats, Integers, Labeller, check_features

__all__ = ["check_votes", "require_short"]

_MAX_LABELLED = 20
_MAX_UNLABELLED = 40
"""Largest numbers of labelled and of unlabelled rows on which a labeller is tested."""
_OUTLIER_FACTOR = 1000.0
"""How many times larger replaced features are than the largest ones."""
_TOLERANCE = 1e-9
_SEED = 20261128


def check_votes(
    labeller: Labeller,
    features_UF: Features,
    labelled_n: Integers,
    labels_n: Integers,
    classes: int,
    *,
    owner: str = "",
    is_without_own_label: bool = True,
) -> None:
    """Refuse a labeller whose votes contradict the properties that its class declares.

    It votes on a sample of these rows. Then the features of unlabelled people are replaced by
    copies of labelled ones, and by extreme numbers. If the labeller is declared inductive, the
    votes on all other people must stay. It votes at most four times, on at most 60 rows.

    Args:
        labeller: the labeller to test.
        features_UF: F features of all U rows.
        labelled_n, labels_n: indices and labels of the n labelled rows.
        classes: number of classes.
        owner: the labeller's party, for the error.
        is_without_own_label: whether it votes by `label_without_own`, where a labelled row's vote
            does not use its own label; False: by `label_rows`.

    Raises:
        PromiseError: its text names the class, the property and the changed votes.
    """
    features_UF, labelled_n, labels_n = _sample_rows(
        check_features(features_UF), labelled_n, labels_n
    )

    compute_labels = labeller.label_without_own if is_without_own_label else labeller.label_rows

    def compute_votes(rows_UF: Floats) -> Floats:
        """Return the votes on these features; a copy protects them from changes in place."""
        return compute_labels(rows_UF.copy(), labelled_n, labels_n, classes)

    prefix = f"{owner}: " if owner else ""
    class_name = type(labeller).__name__
    # The labeller is called twice on the same rows: votes must be a function of their inputs.
    votes_UK = compute_votes(features_UF)
    if not np.array_equal(votes_UK, compute_votes(features_UF)):
        raise PromiseError(
            f"{prefix}the labeller {class_name} gave two answers to one question; what its votes "
            "cost is counted for votes that follow from features and labels, so draw nothing, or "
            "noise of a key as private_logistic does"
        )
    require_short(labeller, votes_UK, owner=owner)
    if not labeller.inductive:
        return
    for is_replaced_U, replaced_UF in _build_replacements(features_UF, labelled_n):
        change_U = np.abs(compute_votes(replaced_UF) - votes_UK).max(axis=1)
        change_U[is_replaced_U] = 0.0
        largest_change = float(change_U.max())
        if not largest_change <= _TOLERANCE:  # also where it is NaN
            raise PromiseError(
                f"{prefix}the labeller {class_name} says inductive = True, but the features of "
                f"people without a label moved the vote on another row by {largest_change:.3g} (of "
                f"{len(change_U)} rows looked at). Leave inductive out of the class (a whole "
                "record has no guarantee then), or fit it to labelled rows alone, their scale "
                "included"
            )


def require_short(labeller: Labeller, votes_UK: Floats, *, owner: str = "") -> None:
    """Refuse votes with an L1 norm above 1, and negative votes of a class that declares none.

    `labeller`: the labeller that gave the votes. `votes_UK`: votes, or a matrix A of
    `LinearLabeller`, whose rows have the same bounds. `owner`: the labeller's party, for the error.
    Raises PromiseError: its text names the class and the worst number.
    """
    prefix = f"{owner}: " if owner else ""
    class_name = type(labeller).__name__
    largest_norm = float(np.abs(votes_UK).sum(axis=1).max(initial=0.0))
    if not largest_norm <= 1 + _TOLERANCE:
        raise PromiseError(
            f"{prefix}a row of votes of the labeller {class_name} has L1 norm {largest_norm:.6g}; "
            "noise is counted for 1 at most, so divide each row by its own norm"
        )
    lowest_vote = float(votes_UK.min(initial=0.0))
    if not labeller.signed and not lowest_vote >= -_TOLERANCE:
        raise PromiseError(
            f"{prefix}the labeller {class_name} says signed = False, but a number of its votes is "
            f"{lowest_vote:.3g}; two rows lie further apart then, so leave signed out of the class"
        )


def _sample_rows(
    features_UF: Floats, labelled_n: Integers, labels_n: Integers
) -> tuple[Floats, Integers, Integers]:
    """Return a sample of labelled rows, followed by a sample of unlabelled rows.

    The sample is pseudorandom, and always the same. Returns the sampled features, the indices of
    the labelled rows among them, and their labels.
    """
    unlabelled = np.setdiff1d(np.arange(len(features_UF)), labelled_n)
    generator = np.random.default_rng(_SEED)
    sampled_n = generator.permutation(len(labelled_n))[:_MAX_LABELLED]
    sampled_unlabelled = generator.permutation(unlabelled)[:_MAX_UNLABELLED]
    sampled_U = np.concatenate([labelled_n[sampled_n], sampled_unlabelled])
    return features_UF[sampled_U], np.arange(len(sampled_n)), np.asarray(labels_n)[sampled_n]


def _build_replacements(
    features_UF: Floats, labelled_n: Integers
) -> list[tuple[NDArray[np.bool_], Floats]]:
    """Return the features with unlabelled people replaced, in two ways.

    In the first, every other unlabelled row is a copy of a labelled one. In the second, the rest of
    them are extreme numbers. For each way, returns a mask of the replaced rows, (U,), and all
    features. Labelled rows come first in `features_UF`.
    """
    row_count = len(features_UF)
    labelled_count = len(labelled_n)
    unlabelled = np.arange(labelled_count, row_count)
    if not len(unlabelled):
        return []
    with_copies_UF = features_UF.copy()
    with_outliers_UF = features_UF.copy()
    copied_rows = unlabelled[::2]
    # With a single unlabelled row both replacements are of that row.
    extreme_rows = unlabelled[1::2] if len(unlabelled) > 1 else unlabelled
    with_copies_UF[copied_rows] = features_UF[np.arange(len(copied_rows)) % labelled_count]
    # It is at least 1 everywhere, so that the scaled numbers lie far beyond all features.
    extreme_distance = np.abs(features_UF).max() + 1 - features_UF[extreme_rows]
    with_outliers_UF[extreme_rows] = _OUTLIER_FACTOR * extreme_distance
    replacements = []
    for replaced_rows, replaced_UF in (
        (copied_rows, with_copies_UF),
        (extreme_rows, with_outliers_UF),
    ):
        is_replaced_U = np.zeros(row_count, dtype=np.bool_)
        is_replaced_U[replaced_rows] = True
        replacements.append((is_replaced_U, replaced_UF))
    return replacements
