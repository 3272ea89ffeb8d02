"""Label spreading over a graph of nearest neighbours.

D. Zhou, O. Bousquet, T. N. Lal, J. Weston, B. Schoelkopf, "Learning with Local and Global
Consistency", NIPS 2004: F = (I - alpha S)^-1 Y with S = D^-1/2 W D^-1/2. W has 1 where either of
two rows is among the other's 10 nearest, 0 elsewhere. Where the paper takes F's largest entry, each
row of the n labelled columns of (I - alpha S)^-1 is here divided by its sum, which needs no label
and leaves the largest entry where it was.

A person's features move the graph and so the votes of others, without a bound: a guarantee for one
row of votes is none for a person. Nearest neighbours do not depend on a common scale.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import sparse

from secure_apfed.errors import ConfigError
from secure_apfed.labellers.interface import (
    Features,
    Floats,
    Integers,
    LinearLabeller,
    checked_features,
    checked_labels,
    checked_positions,
    rows_of_norm_one,
)

__all__ = ["Spreading"]

# Beyond, what a label sends is below alpha^50.
_HOPS = 50
_CONVERGED = 1e-12
# Above it a tree is slower than all distances (16 columns, 40,000 rows: 72 s against 10 s).
_FEW_COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class Spreading(LinearLabeller):
    """Labels spread along the edges of a graph; who has no path to a label has no vote.

    Attributes:
        neighbours: of each row in the graph; all others where there are fewer.
        alpha: how much a row takes from its neighbours, in (0, 1).
    """

    name: ClassVar[str] = "spreading"
    title: ClassVar[str] = "label spreading over a graph of nearest neighbours"
    inductive: ClassVar[bool] = False
    signed: ClassVar[bool] = False

    neighbours: int = 10
    alpha: float = 0.2

    def __post_init__(self) -> None:
        if not (self.neighbours >= 1 and 0 < self.alpha < 1):
            raise ConfigError(
                "label spreading takes 1 neighbour or more and an alpha between 0 and 1, got "
                f"{self.neighbours} and {self.alpha}"
            )

    def matrix(self, features_UF: Features, labelled_n: Integers) -> Floats:
        """Return A_Un; see `LinearLabeller.matrix`."""
        features_UF = checked_features(features_UF)
        labelled_n = checked_positions(labelled_n, len(features_UF))
        return self._spread(features_UF, labelled_n, np.eye(len(labelled_n)))

    def label(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """See `Labeller.label`: A Y without A, which takes 4 GB for 22,500 labels of as many rows.

        Nothing of A is negative, so the L1 norm of its rows is that of A Y's.
        """
        features_UF = checked_features(features_UF)
        labelled_n = checked_positions(labelled_n, len(features_UF))
        labels_n = checked_labels(labels_n, len(labelled_n), classes)
        return self._spread(features_UF, labelled_n, np.eye(classes)[labels_n])

    def _spread(self, features_UF: Floats, labelled_n: Integers, columns_nC: Floats) -> Floats:
        """What the labelled rows' columns are at all rows, (U, C), each divided by its sum.

        (I - alpha S)^-1 is the sum of (alpha S)^t over paths of length t. No term is negative, so
        a row far from all labels is as exact as the others once its paths are in; those longer than
        50 edges are left out.
        """
        step_UU = self.alpha * self._normalised_graph(features_UF)
        term_UC = np.zeros((len(features_UF), columns_nC.shape[1]))
        term_UC[labelled_n] = columns_nC
        sum_UC = term_UC.copy()
        for _ in range(_HOPS):
            term_UC = step_UU @ term_UC
            sum_UC += term_UC
            if (term_UC.sum(axis=1) <= _CONVERGED * sum_UC.sum(axis=1)).all():
                break
        return rows_of_norm_one(sum_UC)

    def _normalised_graph(self, features_UF: Floats) -> sparse.csr_array:
        """S_UU."""
        from sklearn.neighbors import NearestNeighbors

        rows = len(features_UF)
        if rows == 1:
            return sparse.csr_array((1, 1))
        found = NearestNeighbors(
            n_neighbors=min(self.neighbours, rows - 1),
            algorithm="kd_tree" if features_UF.shape[1] <= _FEW_COLUMNS else "brute",
        ).fit(features_UF - features_UF.mean(axis=0))
        near_UU = sparse.csr_array(found.kneighbors_graph(mode="connectivity"))
        weight_UU = near_UU.maximum(near_UU.T)
        root_U = 1 / np.sqrt(np.asarray(weight_UU.sum(axis=1)).ravel())  # every row has an edge
        return sparse.csr_array(sparse.diags_array(root_U) @ weight_UU @ sparse.diags_array(root_U))

    def statement(self) -> str:
        return (
            f"{self.title}, {self.neighbours} neighbours, alpha {self.alpha:g}: linear in the "
            "labels; a person's features move other people's votes without a bound"
        )
