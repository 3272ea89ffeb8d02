"""What every labeller offers: votes for all aligned rows from one party's features and n labels.

Run by: each party alone, on its own features; the labels of n people are the active's. The sum of
all parties' votes labels the rows for the active's model. A row of votes is short whatever the
data (`signed`), so that what one row costs under noise is known before any are cast.

Letters: U aligned rows, F numbers of a row, n labelled rows, K classes.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from secure_apfed.errors import DataError
from secure_apfed.privacy.accountants import Mechanism, NoPrivacy

__all__ = [
    "Features",
    "Floats",
    "Integers",
    "Labeller",
    "LinearLabeller",
    "checked_features",
    "checked_labels",
    "checked_positions",
    "hard",
    "rows_of_norm_one",
]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Features = Floats | torch.Tensor


class Labeller(ABC):
    """One way of labelling; its name is its key in the table `LABELLERS`.

    Attributes:
        linear: whether votes are a matrix without labels times the labels, so that they can be
            computed on encrypted ones (`LinearLabeller`).
        inductive: whether the row of a person without a label moves nobody's vote but its own.
        signed: whether votes may be negative. Rows have L1 norm 1 at most; where none is negative,
            two rows lie sqrt 2 apart at most in L2, and 2 otherwise.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    linear: ClassVar[bool] = False
    inductive: ClassVar[bool]
    signed: ClassVar[bool] = False

    @property
    def model(self) -> Mechanism:
        """What replacing the features of a labelled person does to the fitted classifier."""
        return NoPrivacy()

    def about(self, question: bytes) -> "Labeller":
        """The same for one question, which names the people and labels: noise is never shared."""
        return self

    @abstractmethod
    def label(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return votes_UK; a row of zeros is no vote.

        Args:
            features_UF: finite, one flattened row a person; of any scale, but for labellers that
                say otherwise.
            labelled_n: positions in 0..U-1, each once, at least one.
            labels_n: of those rows, in 0..K-1.
            classes: K.

        Raises:
            DataError: says which of these is unfit.
        """

    @abstractmethod
    def statement(self) -> str:
        """What it does and whom a row moves, in words for the report."""


class LinearLabeller(Labeller):
    """A labeller whose votes are A Y, with Y the labels as unit vectors, and A without noise."""

    linear: ClassVar[bool] = True

    def label(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        matrix_Un = self.matrix(features_UF, labelled_n)
        labels_n = checked_labels(labels_n, matrix_Un.shape[1], classes)
        return np.asarray(matrix_Un @ np.eye(classes)[labels_n], dtype=np.float64)

    @abstractmethod
    def matrix(self, features_UF: Features, labelled_n: Integers) -> Floats:
        """Return A_Un, whose rows have L1 norm 1, or 0 for no vote.

        Raises:
            DataError: features or positions are unfit.
        """


def rows_of_norm_one(matrix_Un: Floats, order: int = 1) -> Floats:
    """Return the matrix with every row divided by its own L1 or L2 norm; zeros stay zero."""
    # First by the largest magnitude: a sum of tiny numbers may be too small to divide by.
    largest_U = np.abs(matrix_Un).max(axis=1, keepdims=True, initial=0.0)
    scaled_Un = matrix_Un / np.where(largest_U > 0, largest_U, 1.0)
    norm_U = np.linalg.norm(scaled_Un, order, axis=1, keepdims=True)
    return np.asarray(scaled_Un / np.where(norm_U > 0, norm_U, 1.0), dtype=np.float64)


def hard(votes_UK: Floats) -> Floats:
    """Return each row's vote for its largest class alone, a unit vector.

    Of several largest the lowest class is taken, which reads nothing but the row. A row of zeros
    stays zero: no vote is no vote for class 0.
    """
    hard_UK = np.zeros_like(votes_UK)
    voting_V = np.flatnonzero(votes_UK.any(axis=1))
    hard_UK[voting_V, votes_UK[voting_V].argmax(axis=1)] = 1.0
    return hard_UK


def checked_features(features_UF: Features) -> Floats:
    """Return finite features as a float64 matrix; DataError: they are something else."""
    if isinstance(features_UF, torch.Tensor):
        features_UF = features_UF.detach().cpu().numpy()
    found: Floats = np.asarray(features_UF, dtype=np.float64)
    if found.ndim != 2 or 0 in found.shape:
        raise DataError(f"features are a non-empty matrix (rows, columns), got {found.shape}")
    if not np.isfinite(found).all():
        raise DataError(f"{np.count_nonzero(~np.isfinite(found))} features are not finite")
    return found


def checked_positions(labelled_n: Integers, rows: int) -> Integers:
    """Return positions in 0..U-1, each once; DataError: they are not, or there is none."""
    found: Integers = np.asarray(labelled_n)
    if found.dtype != np.int64 or found.ndim != 1 or not len(found):
        raise DataError(
            f"positions of labelled rows are int64 of shape (n,) with n at least 1, got "
            f"{found.dtype} of shape {found.shape}"
        )
    if len(np.unique(found)) < len(found) or not 0 <= found.min() <= found.max() < rows:
        raise DataError(
            f"positions of labelled rows are different and lie in 0..{rows - 1}, got "
            f"{len(found)} of which {len(np.unique(found))} differ, {found.min()}..{found.max()}"
        )
    return found


def checked_labels(labels_n: Integers, count: int, classes: int) -> Integers:
    """Return labels of `count` rows, each in 0..K-1; DataError: they are something else."""
    found: Integers = np.asarray(labels_n)
    if found.dtype != np.int64 or found.shape != (count,):
        raise DataError(
            f"labels of {count} rows are int64 of shape ({count},), got {found.dtype} of shape "
            f"{found.shape}"
        )
    if classes < 2 or not 0 <= found.min() <= found.max() < classes:
        raise DataError(
            f"labels lie in 0..{classes - 1} and there are 2 classes or more, got "
            f"{found.min()}..{found.max()}"
        )
    return found
