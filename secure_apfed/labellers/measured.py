"""Measurements of a labeller's declared facts, on a few rows of the first ballot.

Run by: every passive, before it votes, if an epsilon is counted for its votes; by authors of
labellers through `secure_apfed.testing`. The cost of a vote relies on three properties
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

_LABELLED = 20
_UNLABELLED = 40
_FAR = 1000.0
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
    is_judge: bool = True,
) -> None:
    """Refuse a labeller whose votes on some of these rows contradict the properties that its class
    declares.

    Unlabelled people are replaced by copies of labelled ones and by extreme ones, and the votes on
    all others are compared. Takes four ballots of 60 rows at most.

    Args:
        features_UF, labelled_n, labels_n, classes: as `Labeller.label_rows` takes them.
        owner: the labeller's party, for the message.
        is_judge: whether labelled rows are voted on without their own label
            (`label_without_own`), or as the labeller labels them (`label_rows`).

    Raises:
        PromiseError: names the class, the property and the changed votes.
    """
    features_UF, labelled_n, labels_n = _sample_rows(
        check_features(features_UF), labelled_n, labels_n
    )

    def compute_votes(other_UF: Floats) -> Floats:
        vote = labeller.label_without_own if is_judge else labeller.label_rows
        return vote(other_UF.copy(), labelled_n, labels_n, classes)

    prefix = f"{owner}: " if owner else ""
    name = type(labeller).__name__
    before_UK = compute_votes(features_UF)
    if not np.array_equal(before_UK, compute_votes(features_UF)):
        raise PromiseError(
            f"{prefix}the labeller {name} gave two answers to one question; what its votes cost is "
            "counted for votes that follow from features and labels, so draw nothing, or noise of "
            "a key as private_logistic does"
        )
    require_short(labeller, before_UK, owner=owner)
    if not labeller.inductive:
        return
    for replaced_U, other_UF in _build_replacements(features_UF, labelled_n):
        moved_U = np.abs(compute_votes(other_UF) - before_UK).max(axis=1)
        moved_U[replaced_U] = 0.0
        row = int(moved_U.argmax())
        if not moved_U[row] <= _TOLERANCE:
            raise PromiseError(
                f"{prefix}the labeller {name} says inductive = True, but the features of people "
                f"without a label moved the vote on another row by {moved_U[row]:.3g} (of "
                f"{len(moved_U)} rows looked at). Leave inductive out of the class (a whole record "
                "has no guarantee then), or fit it to labelled rows alone, their scale included"
            )


def require_short(labeller: Labeller, votes_UK: Floats, *, owner: str = "") -> None:
    """Refuse votes longer than L1 norm 1, or negative votes of a class that excludes them.

    `owner`: the labeller, for the error.

    Raises PromiseError: names the class and the largest.
    """
    prefix = f"{owner}: " if owner else ""
    name = type(labeller).__name__
    longest = float(np.abs(votes_UK).sum(axis=1).max(initial=0.0))
    if not longest <= 1 + _TOLERANCE:
        raise PromiseError(
            f"{prefix}a row of votes of the labeller {name} has L1 norm {longest:.6g}; noise is "
            "counted for 1 at most, so divide each row by its own norm"
        )
    lowest_vote = float(votes_UK.min(initial=0.0))
    if not labeller.signed and not lowest_vote >= -_TOLERANCE:
        raise PromiseError(
            f"{prefix}the labeller {name} says signed = False, but a number of its votes is "
            f"{lowest_vote:.3g}; two rows lie further apart then, so leave signed out of the class"
        )


def _sample_rows(
    features_UF: Floats, labelled_n: Integers, labels_n: Integers
) -> tuple[Floats, Integers, Integers]:
    """Return some labelled and some other rows, in a fixed order.

    `features_UF`: rows (U, F).
    """
    unlabelled = np.setdiff1d(np.arange(len(features_UF)), labelled_n)
    generator = np.random.default_rng(_SEED)
    chosen_n = generator.permutation(len(labelled_n))[:_LABELLED]
    chosen_U = np.concatenate(
        [labelled_n[chosen_n], generator.permutation(unlabelled)[:_UNLABELLED]]
    )
    return features_UF[chosen_U], np.arange(len(chosen_n)), np.asarray(labels_n)[chosen_n]


def _build_replacements(
    features_UF: Floats, labelled_n: Integers
) -> list[tuple[NDArray[np.bool_], Floats]]:
    """Return which people without a label are replaced, and all features with the replacements."""
    rows = len(features_UF)
    labelled = len(labelled_n)
    places = np.arange(labelled, rows)
    if not len(places):
        return []
    copies_UF = features_UF.copy()
    moved_UF = features_UF.copy()
    copied = places[::2]
    moved = places[1::2] if len(places) > 1 else places
    copies_UF[copied] = features_UF[np.arange(len(copied)) % labelled]
    moved_UF[moved] = _FAR * (np.abs(features_UF).max() + 1 - features_UF[moved])
    replacements = []
    for replaced, other_UF in ((copied, copies_UF), (moved, moved_UF)):
        replaced_U = np.zeros(rows, dtype=np.bool_)
        replaced_U[replaced] = True
        replacements.append((replaced_U, other_UF))
    return replacements
