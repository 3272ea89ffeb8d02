"""The labellers: classifiers that give votes for all aligned rows from one party's features. A vote
is one row of K class scores with L1 norm at most 1; a row of zeros is no vote.

They are label spreading, ridge, and logistic regression without and with noisy weights. Run by:
each party alone; the labels of n people are the active's. The sum of all parties' votes labels the
rows for the active's model. The norm of a row of votes is bounded whatever the data (`signed`), so
that the privacy cost of one row under noise is known before any votes are made. Regressions are
fitted on the labelled rows alone, their scale included: other rows are only classified.

Letters: U aligned rows, V some of these, F numbers of a row, P numbers of its expansion, R random
features among these, n labelled rows, C columns that are spread at once, N nearest rows of a row, A
values of alpha, K classes, T weights (F, K). As a subscript, 1 is an axis of length 1 for
broadcasting.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from secure_apfed.base.seeds import derive_seed, one_thread, usable_cores
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.privacy.accountants import GaussianRelease, Mechanism, NoPrivacy, gdp_mu
from secure_apfed.privacy.noise import NoiseSource

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Features = Floats | torch.Tensor
"""Features of U people, one flattened row of F numbers each, (U, F)."""


class Labeller(ABC):
    """A classifier by which a passive votes on labels, from its features and a few labels.

    A vote is one row of class scores for a person. `name` is its key in the table `LABELLERS`.

    Attributes:
        linear: whether votes are a matrix that depends on features only, times the labels; then
            they can be computed from encrypted labels (`LinearLabeller`).
        inductive: whether the row of a person without a label changes no other person's vote.
        signed: whether votes may be negative. Rows have L1 norm 1 at most; the L2 distance of two
            rows is at most sqrt 2 without negative votes, and 2 with them.

    A subclass that declares nothing promises nothing: its votes may be negative, and depend on each
    other's rows. Declared properties are tested if an epsilon relies on them
    (`secure_apfed.labellers.measured`).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    linear: ClassVar[bool] = False
    inductive: ClassVar[bool] = False
    signed: ClassVar[bool] = True

    @property
    def model(self) -> Mechanism:
        """The privacy mechanism of the fitted classifier's weights.

        It bounds the cost for a labelled person whose features are replaced. By default there is no
        noise, so it is `NoPrivacy`.
        """
        return NoPrivacy()

    def for_request(self, request: bytes) -> "Labeller":
        """Return this labeller with noise of its own for one request for votes.

        A labeller without noise, which is the default, returns itself. `request`: the request's
        bytes, which list its people and labels; the noise is derived from them.
        """
        return self

    @abstractmethod
    def label_rows(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return the votes on all U rows: K class scores each, with L1 norm at most 1.

        A row of zeros is no vote.

        Args:
            features_UF: the party's finite features, one flattened row a person, at any scale
                unless the labeller states one.
            labelled_n: indices of the labelled rows, in 0..U-1, each once, at least one.
            labels_n: the labels of those rows, in 0..K-1.
            classes: K, number of classes.

        Raises:
            DataError: an argument is invalid.
        """

    @abstractmethod
    def label_without_own(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return votes on all rows in which a labelled row's vote does not use the row's own label.

        A party that knows the labels can thus estimate how good votes are on rows without labels.
        At most `MAX_VALIDATION_ROWS` labelled rows receive votes.

        `features_UF`: F features of U rows. `labelled_n`, `labels_n`: indices and labels of the n
        labelled rows. `classes`: K, number of classes. Returns votes (U, K).
        """

    @abstractmethod
    def describe_labelling(self) -> str:
        """Return in words, for the report: how it works, and whose votes a person's row changes."""


class LinearLabeller(Labeller):
    """A labeller whose votes are linear in the labels: a matrix A times the one-hot labels Y.

    A (U, n) is computed from features only, without noise, for U rows and n labels; Y is (n, K). So
    votes can be computed from encrypted labels.
    """

    linear: ClassVar[bool] = True

    def label_rows(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return the votes A Y on all U rows, (U, K) for K classes.

        `labelled_n`, `labels_n`: indices and labels of the n labelled rows.
        """
        return _sum_by_class(self.compute_matrix(features_UF, labelled_n), labels_n, classes)

    def label_without_own(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return votes (U, K) in which no labelled row's vote uses the row's own label."""
        matrix_Un = self.compute_matrix_without_own(features_UF, labelled_n)
        return _sum_by_class(matrix_Un, labels_n, classes)

    @abstractmethod
    def compute_matrix(self, features_UF: Features, labelled_n: Integers) -> Floats:
        """Return the matrix A, (U, n), which maps the n labels to votes on U rows.

        Each row has L1 norm 1, or 0 for no vote.
        """

    def compute_matrix_without_own(self, features_UF: Features, labelled_n: Integers) -> Floats:
        """Return the matrix A, (U, n), in which a labelled row's own label has weight 0.

        Each row is divided by its L1 norm again. Only the first `MAX_VALIDATION_ROWS` labelled rows
        receive votes.

        For label spreading, these are exactly the votes without the row's label. For ridge
        regression they are, too, except for the scale of the features: the fit without a row gives
        this row (A Y - a y) / (1 - a), where a is the row's own entry of A, and y its label.
        """
        matrix_Un = self.compute_matrix(features_UF, labelled_n)
        matrix_Un[labelled_n, np.arange(len(labelled_n))] = 0.0
        matrix_Un[labelled_n[MAX_VALIDATION_ROWS:]] = 0.0
        return divide_by_norm(matrix_Un)


def _sum_by_class(matrix_Un: Floats, labels_n: Integers, classes: int) -> Floats:
    """Return the votes (U, K): a matrix (U, n) times the one-hot labels."""
    labels_n = check_labels(labels_n, matrix_Un.shape[1], classes)
    return np.asarray(matrix_Un @ np.eye(classes)[labels_n], dtype=np.float64)


def divide_by_norm(matrix_Un: Floats, order: int = 1) -> Floats:
    """Return the matrix with every row divided by its norm; rows of zeros stay zero.

    `order`: 1 for the L1 norm, 2 for the L2 norm.
    """
    # First divided by the largest magnitude, since a norm of tiny numbers may round to 0.
    largest_U = np.abs(matrix_Un).max(axis=1, keepdims=True, initial=0.0)
    scaled_Un = matrix_Un / np.where(largest_U > 0, largest_U, 1.0)
    norm_U = np.linalg.norm(scaled_Un, order, axis=1, keepdims=True)
    return np.asarray(scaled_Un / np.where(norm_U > 0, norm_U, 1.0), dtype=np.float64)


def harden_votes(votes_UK: Floats) -> Floats:
    """Turn each row of soft votes into a vote for one class: 1 at its largest number, (U, K).

    Ties go to the lowest class, so that a vote depends on no other row. A row of zeros stays zero,
    since it is no vote.
    """
    hard_UK = np.zeros_like(votes_UK)
    voting_rows_V = np.flatnonzero(votes_UK.any(axis=1))
    hard_UK[voting_rows_V, votes_UK[voting_rows_V].argmax(axis=1)] = 1.0
    return hard_UK


def check_features(features_UF: Features) -> Floats:
    """Return features as a float64 matrix (U, F), after checking it.

    Raises DataError: it is empty, has another rank, or is not finite.
    """
    if isinstance(features_UF, torch.Tensor):
        features_UF = features_UF.detach().cpu().numpy()
    features: Floats = np.asarray(features_UF, dtype=np.float64)
    if features.ndim != 2 or 0 in features.shape:
        raise DataError(f"features are a non-empty matrix (rows, columns), got {features.shape}")
    if not np.isfinite(features).all():
        raise DataError(f"{np.count_nonzero(~np.isfinite(features))} features are not finite")
    return features


def check_positions(labelled_n: Integers, row_count: int) -> Integers:
    """Return the indices of labelled rows unchanged, int64 (n,), after checking them.

    Raises DataError: they have another type or shape, repeat, or are not in 0 to `row_count` - 1.
    """
    positions: Integers = np.asarray(labelled_n)
    if positions.dtype != np.int64 or positions.ndim != 1 or not len(positions):
        raise DataError(
            f"positions of labelled rows are int64 of shape (n,) with n at least 1, got "
            f"{positions.dtype} of shape {positions.shape}"
        )
    distinct_count = len(np.unique(positions))
    is_in_range = 0 <= positions.min() <= positions.max() < row_count
    if distinct_count < len(positions) or not is_in_range:
        raise DataError(
            f"positions of labelled rows are different and lie in 0..{row_count - 1}, got "
            f"{len(positions)} of which {distinct_count} differ, "
            f"{positions.min()}..{positions.max()}"
        )
    return positions


def check_labels(labels_n: Integers, label_count: int, classes: int) -> Integers:
    """Return labels unchanged, int64 (n,), after checking them.

    `label_count`: how many labels are expected. `classes`: number of classes. Raises DataError: the
    labels have another type or number, or are not below `classes`.
    """
    labels: Integers = np.asarray(labels_n)
    if labels.dtype != np.int64 or labels.shape != (label_count,):
        raise DataError(
            f"labels of {label_count} rows are int64 of shape ({label_count},), got {labels.dtype} "
            f"of shape {labels.shape}"
        )
    if classes < 2 or not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(
            f"labels lie in 0..{classes - 1} and there are 2 classes or more, got "
            f"{labels.min()}..{labels.max()}"
        )
    return labels


MAX_VALIDATION_ROWS = 2_000
"""Largest number of labelled rows that receive votes without their own label, and so can validate
votes. They are the first ones."""
_COLUMNS_AT_ONCE = 32
"""Columns that one thread spreads at once."""
_MAX_THREADS = 8
_FOLD_COUNT = 10
"""Folds of cross-fitting in logistic regression."""
_ALPHA = 0.2
"""The share that a row takes from its neighbours in label spreading."""
_MAX_HOPS = 50
"""Largest number of edges of a path; on longer ones a label has a weight below alpha^50."""
_CONVERGED_SHARE = 1e-12
"""Relative weight of longer paths below which spreading stops."""
_MAX_TREE_COLUMNS = 8
"""With more columns a k-d tree is slower than all distances (16 columns, 40,000 rows: 72 s against
10 s)."""
_MAX_EXACT_ROWS = 20_000
"""With more rows nearest neighbours are approximate."""
_GRAPH_LINKS = 16
"""Links of a row in the search graph (HNSW's M)."""
_SEARCH_BREADTH = 48
"""Smallest number of candidates of a search in the search graph (HNSW's ef)."""
_JITTER_DEVIATION = 1e-4
"""Deviation by which rows are moved for the search graph, relative to the largest number."""
_TOLERANCE = 1e-5
_PRIVATE_TOLERANCE = 1e-9
"""Norm of the gradient at which logistic regression stops, without and with noise on its
weights.
"""
_COSINE_COUNT = 300
"""R, the number of random cosine features of ridge regression."""
_RIDGE_PENALTY = 0.1
"""Regularisation strength lambda of ridge regression on a constant, x and random cosine features,
whose rows have a squared norm of about 3."""
_LOGISTIC_PENALTY = 1.0
"""Regularisation strength n Lambda of logistic regression: the factor of |weights|^2 / 2 that is
added to the sum of the n losses. It is the usual choice for standardised columns, whose rows have
norm sqrt(F) in the mean."""
_GRADIENT_BOUND = 2 * _PRIVATE_TOLERANCE
"""t, the bound on the gradient's norm at the fitted weights: twice the tolerance, which covers
rounding errors."""
_ROUNDING_FACTOR = 1 + 1e-9
"""Factor for norms of rows that exceed 1 by rounding errors."""


@dataclass(frozen=True, kw_only=True)
class Spreading(LinearLabeller):
    """A labeller that spreads labels along the edges of a nearest-neighbour graph.

    A row without a path to a label has no vote.

    D. Zhou, O. Bousquet, T. N. Lal, J. Weston, B. Schoelkopf, "Learning with Local and Global
    Consistency", NIPS 2004: F = (I - alpha S)^-1 Y with S = D^-1/2 W D^-1/2. Y are the one-hot
    labels. W has 1 where either of two rows is among the other's 10 nearest, 0 elsewhere; D has the
    sums of W's rows. The paper takes the class of F's largest entry. Here each row of the n
    labelled columns of (I - alpha S)^-1 is divided by its sum, which needs no label and leaves the
    largest entry where it was.

    A person's features change the graph, and so the votes on others, without a bound. So a
    guarantee for one row of votes does not cover a person's record. Votes do not depend on the
    features' common scale.

    Attributes:
        neighbours: nearest rows that a row is linked to.
        alpha: the share that a row takes from its neighbours, between 0 and 1.
    """

    name: ClassVar[str] = "spreading"
    title: ClassVar[str] = "label spreading over a graph of nearest neighbours"
    inductive: ClassVar[bool] = False
    signed: ClassVar[bool] = False

    neighbours: int = 10
    alpha: float = _ALPHA

    def __post_init__(self) -> None:
        """Raise ConfigError unless there is a neighbour, and alpha is between 0 and 1."""
        if self.neighbours < 1 or not 0 < self.alpha < 1:
            raise ConfigError(
                "label spreading takes 1 neighbour or more and an alpha between 0 and 1, got "
                f"{self.neighbours} and {self.alpha:g}"
            )

    def compute_matrix(self, features_UF: Features, labelled_n: Integers) -> Floats:
        """Return how much each labelled row contributes to each row's vote, (U, n).

        These are the labelled rows' columns of (I - alpha S)^-1, S being the normalised graph; each
        row is divided by its L1 norm.
        """
        features_UF = check_features(features_UF)
        labelled_n = check_positions(labelled_n, len(features_UF))
        columns_Un = self._spread_columns(features_UF, labelled_n, np.eye(len(labelled_n)))
        return divide_by_norm(columns_Un)

    def label_rows(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return the votes A Y, (U, K), without computing the matrix A.

        A (U, n) maps the n one-hot labels Y to votes on U rows. It would take 4 GB for 22,500
        labels of as many rows. It has no negative entries, so that its rows have the same L1 norm
        as the rows of A Y.
        """
        features_UF, labelled_n, labels_n = _check_inputs(
            features_UF, labelled_n, labels_n, classes
        )
        spread_UK = self._spread_columns(features_UF, labelled_n, np.eye(classes)[labels_n])
        return divide_by_norm(spread_UK)

    def label_without_own(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return votes (U, K); a labelled row's vote is computed from the other labels only.

        Its own label has the largest weight. Subtracting it from the sum afterwards would leave
        mostly rounding errors.
        """
        features_UF, labelled_n, labels_n = _check_inputs(
            features_UF, labelled_n, labels_n, classes
        )
        graph_UU = self._build_graph(features_UF)
        truth_nK = np.eye(classes)[labels_n]
        truth_UK = scatter_columns(len(features_UF), labelled_n, truth_nK)
        votes_UK = divide_by_norm(self.propagate_columns(graph_UU, truth_UK))
        (without_own_nK,) = spread_without_own(graph_UU, labelled_n, truth_nK, (self.alpha,))
        votes_UK[labelled_n] = without_own_nK
        return votes_UK

    def _spread_columns(
        self, features_UF: Floats, labelled_n: Integers, columns_nC: Floats
    ) -> Floats:
        """Spread C columns of numbers from n labelled rows over the graph to all rows, (U, C)."""
        term_UC = scatter_columns(len(features_UF), labelled_n, columns_nC)
        return self.propagate_columns(self._build_graph(features_UF), term_UC)

    def propagate_columns(self, graph_UU: "scipy.sparse.csr_array", term_UC: Floats) -> Floats:
        """Return (I - alpha S)^-1 times these columns, (U, C).

        S is the normalised graph, alpha the weight of neighbours. (I - alpha S)^-1 is the sum of
        (alpha S)^t over path lengths t. Paths of more than 50 edges are omitted. No term is
        negative, so a row far from all labels is as exact as the others.

        `graph_UU`: S, the normalised graph of the U rows. `term_UC`: C columns of numbers.
        """
        step_UU = self.alpha * graph_UU
        sum_UC = term_UC.copy()
        for _ in range(_MAX_HOPS):
            term_UC = step_UU @ term_UC
            sum_UC += term_UC
            if (term_UC.sum(axis=1) <= _CONVERGED_SHARE * sum_UC.sum(axis=1)).all():
                break
        return sum_UC

    def _build_graph(self, features_UF: Floats) -> "scipy.sparse.csr_array":
        """Return S, the normalised graph of the rows, (U, U)."""
        return build_graph(find_nearest_rows(features_UF, self.neighbours))

    def describe_labelling(self) -> str:
        """Return in words how label spreading works, and whose votes a row changes."""
        return (
            f"{self.title}, {self.neighbours} neighbours, alpha {self.alpha:g}: linear in the "
            "labels; a person's features move other people's votes without a bound"
        )


def find_nearest_rows(features_UF: Floats, neighbour_count: int) -> Integers:
    """Return the indices of the N nearest other rows of each of U rows, nearest first, (U, N).

    N is `neighbour_count`, or the number of all other rows if they are fewer. With more than
    `_MAX_EXACT_ROWS` rows, neighbours are approximate, by graph search (Malkov and Yashunin 2018,
    HNSW), whose time grows little faster than the number of rows.
    """
    from sklearn.neighbors import NearestNeighbors

    row_count = len(features_UF)
    # A single row has no other row: N = 0.
    if row_count == 1:
        return np.zeros((1, 0), dtype=np.int64)
    # Centring changes no distance, and lessens rounding errors.
    centred_UF = features_UF - features_UF.mean(axis=0)
    if row_count > _MAX_EXACT_ROWS:
        return _find_nearest_approximately(centred_UF, neighbour_count)
    index = NearestNeighbors(
        n_neighbors=min(neighbour_count, row_count - 1),
        algorithm="kd_tree" if features_UF.shape[1] <= _MAX_TREE_COLUMNS else "brute",
    ).fit(centred_UF)
    nearest_UN: Integers = index.kneighbors(return_distance=False)
    return nearest_UN


def _find_nearest_approximately(features_UF: Floats, neighbour_count: int) -> Integers:
    """Return the indices of the approximate nearest other rows of each row, (U, `neighbour_count`).

    The search graph is built on one thread, so that results repeat, at a scale that float32 can
    square. Equal rows would be linked only to each other and isolate others, so each row is moved a
    little.

    `features_UF`: centred features.
    """
    import faiss

    jitter_UF = _JITTER_DEVIATION * np.random.default_rng(0).standard_normal(features_UF.shape)
    largest_number = np.abs(features_UF).max() or 1.0
    moved_UF = (features_UF / largest_number + jitter_UF).astype("f4")
    with one_thread():
        search_graph = faiss.IndexHNSWFlat(moved_UF.shape[1], _GRAPH_LINKS)
        search_graph.add(moved_UF)
    search_graph.hnsw.efSearch = max(_SEARCH_BREADTH, 2 * neighbour_count)
    with threadpool_limits(usable_cores(), "openmp"):
        _, found_UN = search_graph.search(moved_UF, neighbour_count + 1)
    # A row finds itself, too. If it finds too few rows, the rest are -1, which the row's own index
    # replaces. Own indices are sorted to the end.
    own_U1 = np.arange(len(moved_UF))[:, None]
    found_UN = np.where(found_UN < 0, own_U1, found_UN)
    order_UN = np.argsort(found_UN == own_U1, axis=1, kind="stable")
    nearest_UN: Integers = np.take_along_axis(found_UN, order_UN, axis=1)[:, :neighbour_count]
    return nearest_UN


def build_graph(nearest_UN: Integers) -> "scipy.sparse.csr_array":
    """Return the normalised nearest-neighbour graph S = D^-1/2 W D^-1/2, (U, U), sparse.

    W is 1 where either of two rows is among the other's nearest; D has the sums of W's rows.

    `nearest_UN`: the indices of the N nearest rows of each of U rows.
    """
    row_count, neighbour_count = nearest_UN.shape
    if not neighbour_count:
        return scipy.sparse.csr_array((row_count, row_count))
    row_starts = np.arange(0, row_count * neighbour_count + 1, neighbour_count)
    column_indices = nearest_UN.ravel()
    # Both directions of all edges can be counted in int32, which saves memory.
    if row_count * neighbour_count < 2**30:
        row_starts = row_starts.astype(np.int32)
        column_indices = column_indices.astype(np.int32)
    edge_weights = np.ones(row_count * neighbour_count)
    adjacency_UU = scipy.sparse.csr_array(
        (edge_weights, column_indices, row_starts), (row_count, row_count)
    )
    weight_UU = adjacency_UU.maximum(adjacency_UU.T)
    degree_U = np.asarray(weight_UU.sum(axis=1)).ravel()  # at least 1, so it can be divided by
    inverse_root_UU = scipy.sparse.diags_array(1 / np.sqrt(degree_U))
    return scipy.sparse.csr_array(inverse_root_UU @ weight_UU @ inverse_root_UU)


def scatter_columns(row_count: int, labelled_n: Integers, columns_nC: Floats) -> Floats:
    """Return a matrix (rows, C) that has these C columns in its labelled rows, and 0 elsewhere.

    `labelled_n`: indices of the n labelled rows. `columns_nC`: their numbers.
    """
    scattered_UC = np.zeros((row_count, columns_nC.shape[1]), columns_nC.dtype)
    scattered_UC[labelled_n] = columns_nC
    return scattered_UC


def spread_without_own(
    graph_UU: "scipy.sparse.csr_array",
    labelled_n: Integers,
    truth_nK: Floats,
    alphas: Sequence[float],
) -> list[Floats]:
    """Return the votes of label spreading on labelled rows, each without the row's own label.

    There is one array (n, K) for each alpha; rows after the first `MAX_VALIDATION_ROWS` are zeros.

    The same paths serve all alphas. (I - alpha S)^-1 is symmetric, so that the columns of the rows
    that are voted on suffice. S lengthens no column, so that paths beyond t edges add at most
    alpha^t alpha / (1 - alpha) to an entry.

    A large graph is approximate anyway, so its paths are computed in float32; nothing is negative,
    so no other accuracy is lost. Its rows are reordered so that neighbours are close in memory,
    since fetching them takes most of the time (Cuthill and McKee 1969). Several threads share the
    work, which changes no result.

    Args:
        graph_UU: S, the normalised graph of U rows.
        labelled_n: indices of the n labelled rows.
        truth_nK: their one-hot labels, K classes.
        alphas: values of `Spreading.alpha` to compare.
    """
    row_count = graph_UU.shape[0]
    scores_AnK = np.zeros((len(alphas), *truth_nK.shape))
    is_large = row_count > _MAX_EXACT_ROWS
    if is_large:
        order_U = scipy.sparse.csgraph.reverse_cuthill_mckee(graph_UU, symmetric_mode=True)
        graph_UU = graph_UU[order_U][:, order_U].astype(np.float32)
        labelled_n = np.argsort(order_U)[labelled_n]

    def spread_part(part: Integers) -> None:
        """Store the votes on a part of the labelled rows in `scores_AnK`, for every alpha."""
        reach_AnC = _find_reach_of_part(graph_UU, labelled_n, part, alphas)
        for scores_nK, reach_nC in zip(scores_AnK, reach_AnC, strict=True):
            scores_nK[part] = divide_by_norm(reach_nC.T @ truth_nK)

    voted_rows = np.arange(min(len(labelled_n), MAX_VALIDATION_ROWS))
    parts = _split_columns(voted_rows)
    threads = min(_MAX_THREADS, usable_cores()) if is_large else 1
    with ThreadPoolExecutor(threads) as pool:
        # `list` waits for all parts, and passes their errors on.
        list(pool.map(spread_part, parts))
    return [*scores_AnK]


def find_reach(
    graph_UU: "scipy.sparse.csr_array", labelled_n: Integers, alphas: Sequence[float]
) -> Floats:
    """Return how much each labelled row's label counts for each other labelled row, (A, n, n).

    Entry (a, i, j) is the weight of row i's label in the vote on row j, for the a-th alpha; it is 0
    for i = j. Spreading is linear in the labels, so these weights serve every choice of labels of
    these rows. For many labels `spread_without_own` takes less memory.

    `graph_UU`: S, the normalised graph. `labelled_n`: indices of the n labelled rows. `alphas`: A
    values of alpha.
    """
    parts = _split_columns(np.arange(len(labelled_n)))
    return np.concatenate(
        [_find_reach_of_part(graph_UU, labelled_n, part, alphas) for part in parts], axis=2
    )


def _split_columns(columns: Integers) -> list[Integers]:
    """Split column numbers into parts of at most `_COLUMNS_AT_ONCE`."""
    return np.split(columns, range(_COLUMNS_AT_ONCE, len(columns), _COLUMNS_AT_ONCE))


def _find_reach_of_part(
    graph_UU: "scipy.sparse.csr_array",
    labelled_n: Integers,
    part: Integers,
    alphas: Sequence[float],
) -> Floats:
    """Return how much each of n labelled rows' labels counts for C of these rows, (A, n, C).

    A row's own label counts 0. `graph_UU`: S, the normalised graph. `labelled_n`: indices of the
    labelled rows. `part`: indices of the C rows among the labelled ones. `alphas`: A values of
    alpha.
    """
    labelled_count = len(labelled_n)
    alpha_A11 = np.reshape(alphas, (-1, 1, 1))
    # One column for each row of the part, with weight 1 at this row.
    unit_CC = np.eye(len(part), dtype=graph_UU.dtype)
    term_UC = scatter_columns(graph_UU.shape[0], labelled_n[part], unit_CC)
    reach_AnC = np.zeros((len(alphas), labelled_count, len(part)))
    for hop in range(1, _MAX_HOPS + 1):
        term_UC = graph_UU @ term_UC
        term_nC = term_UC[labelled_n]
        # A row's own label never counts for the row itself.
        term_nC[part, np.arange(len(part))] = 0.0
        reach_AnC += alpha_A11**hop * term_nC
        # A bound on what longer paths can still add; see `spread_without_own`.
        remaining_A11 = labelled_count * alpha_A11 ** (hop + 1) / (1 - alpha_A11)
        reached_A1C = reach_AnC.sum(axis=1, keepdims=True)
        if (remaining_A11 <= _CONVERGED_SHARE * reached_A1C).all():
            break
    return reach_AnC


class Ridge(LinearLabeller):
    """A ridge regression to one-hot labels, on features and random cosines of them.

    A. Rahimi, B. Recht, "Random Features for Large-Scale Kernel Machines", NIPS 2007, Algorithm 1:
    R cosines sqrt(2 / R) cos(w x + b) with normal w stand for a Gaussian kernel. Let phi be the
    expanded features of a row, and P those of the n labelled rows. Votes are A Y with A = phi P^T
    (P P^T + lambda I)^-1, which needs no label; lambda is the penalty, Y are the one-hot labels.
    Each row of A is divided by its L1 norm, which leaves the largest vote where it was. The
    cosines' random numbers are public.
    """

    name: ClassVar[str] = "ridge"
    title: ClassVar[str] = "ridge regression on the labelled rows"
    inductive: ClassVar[bool] = True
    signed: ClassVar[bool] = True

    def compute_matrix(self, features_UF: Features, labelled_n: Integers) -> Floats:
        """Return the matrix A from n labels to votes on U rows, (U, n), with rows of L1 norm 1."""
        features_UF = check_features(features_UF)
        labelled_n = check_positions(labelled_n, len(features_UF))
        mean_F, rms_distance = measure_scale(features_UF[labelled_n])
        expanded_UP = self._expand_features((features_UF - mean_F) / rms_distance)
        expanded_nP = expanded_UP[labelled_n]
        gram_nn = expanded_nP @ expanded_nP.T + _RIDGE_PENALTY * np.eye(len(labelled_n))
        solved_nP = scipy.linalg.solve(gram_nn, expanded_nP, assume_a="pos")
        return divide_by_norm(expanded_UP @ solved_nP.T)

    def _expand_features(self, scaled_UF: Floats) -> Floats:
        """Return the expanded features of U rows: a constant 1, the row, and random cosines of it.

        `scaled_UF`: rows scaled to a norm of about 1, which is the norm of their cosines, too.
        """
        generator = np.random.default_rng(derive_seed(0, "labellers", self.name))
        frequencies_FR = generator.standard_normal((scaled_UF.shape[1], _COSINE_COUNT))
        phases_R = generator.uniform(0, 2 * np.pi, _COSINE_COUNT)
        cosines_UR = np.sqrt(2 / _COSINE_COUNT) * np.cos(scaled_UF @ frequencies_FR + phases_R)
        return np.hstack([np.ones((len(scaled_UF), 1)), scaled_UF, cosines_UR])

    def describe_labelling(self) -> str:
        """Return in words how ridge regression votes, and whose votes a row changes."""
        return (
            f"{self.title}, {_COSINE_COUNT} random features, lambda {_RIDGE_PENALTY:g}: linear in "
            "the labels; fitted on the labelled rows alone, so that another person's features "
            "move that person's own vote and no other"
        )


class Logistic(Labeller):
    """A softmax (multinomial logistic) regression, whose class probabilities are the votes."""

    name: ClassVar[str] = "logistic"
    title: ClassVar[str] = "logistic regression on the labelled rows"
    inductive: ClassVar[bool] = True
    signed: ClassVar[bool] = False

    def label_rows(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return class probabilities by a regression fitted to the labelled rows, (U, K).

        `labelled_n`, `labels_n`: indices and labels of these n rows. `classes`: K.
        """
        features_UF, labelled_n, labels_n = _check_inputs(
            features_UF, labelled_n, labels_n, classes
        )
        mean_F, rms_distance = measure_scale(features_UF[labelled_n])
        # The usual penalty suits rows with the norm of standardised columns.
        usual_norm = np.sqrt(features_UF.shape[1])
        inputs_UF = append_constant((features_UF - mean_F) / rms_distance * usual_norm, 1.0)
        penalty = _LOGISTIC_PENALTY / len(labelled_n)
        weights_FK = minimise_loss(
            inputs_UF[labelled_n], labels_n, classes, penalty=penalty, tolerance=_TOLERANCE
        )
        return compute_probabilities(inputs_UF, weights_FK)

    def label_without_own(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return votes (U, K); a labelled row's vote is by a regression without its fold.

        If there is a single labelled row, it gets no vote.
        """
        votes_UK = self.label_rows(features_UF, labelled_n, labels_n, classes)
        votes_UK[labelled_n] = 0.0
        # A single labelled row leaves nothing to fit to, so there is no fold.
        fold_count = min(_FOLD_COUNT, len(labelled_n)) if len(labelled_n) > 1 else 0
        for fold in range(fold_count):
            is_held_out_n = np.zeros(len(labelled_n), dtype=bool)
            is_held_out_n[fold::_FOLD_COUNT] = True
            held_out_rows = labelled_n[is_held_out_n]
            fold_votes_UK = self.label_rows(
                features_UF, labelled_n[~is_held_out_n], labels_n[~is_held_out_n], classes
            )
            votes_UK[held_out_rows] = fold_votes_UK[held_out_rows]
        # Only the first labelled rows validate votes, as with all labellers.
        votes_UK[labelled_n[MAX_VALIDATION_ROWS:]] = 0.0
        return votes_UK

    def describe_labelling(self) -> str:
        """Return in words how the regression votes, and whose votes a row changes."""
        return (
            f"{self.title}, regularised by {_LOGISTIC_PENALTY:g}: fitted on the labelled rows "
            "alone, so that another person's features move that person's own vote and no other"
        )


class PrivateLogistic(Labeller):
    """A logistic regression with Gaussian noise on its weights; every row has norm 1.

    Protects from: any reader of the votes.

    Guarantee: the weights are mu-GDP for the replacement of one labelled person's features (and
    label) at this party; the set of labelled people and the other rows are fixed. A person without
    a label changes no weight. So all votes but the person's own are post-processing of private
    weights; the cost of the own vote is added in `secure_apfed.labellers.guarantee`.

    Output perturbation (Chaudhuri, Monteleoni and Sarwate 2011, Differentially Private Empirical
    Risk Minimization, Algorithm 1 and Corollary 8; there for two classes, and with noise of another
    distribution). With one row x_i replaced by x', the objectives are

        J(T)  = 1/n sum l(T x_j, y_j) + Lambda/2 |T|^2,    l(z, y) = -log softmax(z)[y],
        J'(T) = J(T) + 1/n (l(T x', y') - l(T x_i, y_i)).

    1. The gradient of l(T x, y) is (p - e_y) x^T with p = softmax(T x): with |x| <= 1 its Frobenius
       norm is at most |p - e_y|. Call r a bound of that, see 4.
    2. J' is Lambda-strongly convex with its minimum at T'. At J's minimum T the gradient of J' is
       1/n ((p' - e_y') x'^T - (p - e_y) x_i^T), at most 2 r / n. Hence |T - T'| <= 2 r / (n
       Lambda).
    3. What is computed has |grad J| <= t, so it lies within t / Lambda of the minimum, for the data
       with the row and with its replacement:

           sensitivity = 2 r / (n Lambda) + 2 t / Lambda.

    4. |p - e_y|^2 <= 2 (1 - p_y)^2, so r = sqrt 2 always does. At the minimum
       T = -1/(n Lambda) sum (p_j - e_y_j) x_j^T, so |T| <= r / Lambda, and |T x| for any x, too.
       softmax is 1/2-Lipschitz (its Jacobian diag p - p p^T has no eigenvalue above 1/2), and
       |softmax(0) - e_y| = sqrt(1 - 1/K): so r <= sqrt(1 - 1/K) + r / (2 Lambda), that is
       r <= sqrt(1 - 1/K) / (1 - 1/(2 Lambda)) where Lambda > 1/2.

    Each row is divided by its own norm: it does not depend on other rows, and its norm is within
    the bound. There is no constant among the features. Votes are probabilities at scores in units
    of the noise's deviation.
    """

    name: ClassVar[str] = "private_logistic"
    title: ClassVar[str] = "logistic regression on the labelled rows, with noise on its weights"
    inductive: ClassVar[bool] = True
    signed: ClassVar[bool] = False

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        key: bytes,
        strength: float = 10.0,
        is_reproducible: bool = False,
    ) -> None:
        """Convert epsilon to mu of Gaussian DP, and prepare the noise.

        Args:
            epsilon, delta: privacy cost of releasing the weights, for one labelled person's
                features.
            key: 32 secret bytes of the party, kept as long as the run may resume.
            strength: Lambda, the weight of the L2 penalty. Beyond 10 the noise over the signal
                hardly falls any further; below, the weights fit better and are noisier.
            is_reproducible: whether the key follows from the run's seed, for simulations; then
                nothing is protected from a party that knows the seed.

        Raises ConfigError: a strength that is not positive.
        """
        if not (math.isfinite(strength) and strength > 0):
            raise ConfigError(f"the strength of a regularisation is positive, got {strength}")
        self.epsilon = epsilon
        self.delta = delta
        self.strength = strength
        self.is_reproducible = is_reproducible
        self._mu = gdp_mu(epsilon, delta)
        self._noise = NoiseSource(key, secret=not is_reproducible)

    def for_request(self, request: bytes) -> "PrivateLogistic":
        """Return a copy whose noise is independent of that for other requests for votes.

        `request`: the request's bytes.
        """
        copied = copy.copy(self)
        copied._noise = self._noise.for_content(request)
        return copied

    @property
    def model(self) -> GaussianRelease:
        """The mechanism of the noisy weights, mu-GDP."""
        return GaussianRelease(noise_multiplier=1 / self._mu)

    def bound_residual(self, classes: int) -> float:
        """Return the largest norm of a row's error at the loss's minimum: r in the class's proof.

        The error is the predicted probabilities minus the one-hot label; see step 4 of the proof.
        """
        general_bound = math.sqrt(2)
        bound_at_zero = math.sqrt(1 - 1 / classes)
        # Step 4 of the class's proof divides by 1 - 1/(2 Lambda), so it needs Lambda above 1/2.
        if self.strength <= 0.5:
            return general_bound
        return min(general_bound, bound_at_zero / (1 - 1 / (2 * self.strength)))

    def compute_sensitivity(self, *, labelled_count: int, classes: int) -> float:
        """Return how far replacing one labelled row can move the fitted weights, in L2 norm.

        This is step 3 of the class's proof. `labelled_count`: number of rows that they are fitted
        to.
        """
        minimiser_distance = (
            2 * self.bound_residual(classes) * _ROUNDING_FACTOR / (labelled_count * self.strength)
        )
        fitting_error = 2 * _GRADIENT_BOUND / self.strength
        return minimiser_distance + fitting_error

    def compute_sigma(self, *, labelled_count: int, classes: int) -> float:
        """Return the standard deviation of the noise on each weight.

        `labelled_count`: number of rows that the weights are fitted to.
        """
        return self.compute_sensitivity(labelled_count=labelled_count, classes=classes) / self._mu

    def label_rows(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return class probabilities by a regression with noisy weights, (U, K).

        Scores are in units of the noise's deviation.
        """
        features_UF, labelled_n, labels_n = _check_inputs(
            features_UF, labelled_n, labels_n, classes
        )
        normalised_UF = self.normalise_rows(features_UF)
        fitted_FK = self.fit_weights(normalised_UF[labelled_n], labels_n, classes)
        sigma = self.compute_sigma(labelled_count=len(labelled_n), classes=classes)
        weights_FK = self._noise.add_noise(
            fitted_FK, sigma, step=0, rows=torch.from_numpy(labelled_n)
        )
        return compute_probabilities(normalised_UF, weights_FK / sigma)

    def label_without_own(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return votes (U, K), also on labelled rows, by a single noisy regression.

        Regressions without a row's label would be further releases, which cost privacy. So a
        labelled row's own label is used; it moves the weights by no more than their noise covers.
        """
        votes_UK = self.label_rows(features_UF, labelled_n, labels_n, classes)
        # Only the first labelled rows validate votes, as with all labellers.
        votes_UK[labelled_n[MAX_VALIDATION_ROWS:]] = 0.0
        return votes_UK

    def normalise_rows(self, features_UF: Floats) -> Floats:
        """Return the rows divided by their L2 norm; the sensitivity assumes a norm of at most 1."""
        return divide_by_norm(features_UF, order=2)

    def fit_weights(self, x_nF: Floats, labels_n: Integers, classes: int) -> Floats:
        """Return the weights without noise, (F, K), which must not be released.

        `x_nF`: normalised labelled rows.
        """
        return minimise_loss(
            x_nF, labels_n, classes, penalty=self.strength, tolerance=_PRIVATE_TOLERANCE
        )

    def describe_labelling(self) -> str:
        """Return in words how the regression votes, and its privacy cost."""
        seed = "; the noise is derived from a seed: once, and against nobody who knows it"
        return (
            f"{self.title}, Lambda {self.strength:g}, weights at epsilon {self.epsilon:g}, delta "
            f"{self.delta:g} for one labelled person's features at this party; another person's "
            "features move that person's own vote and no "
            f"other{seed if self.is_reproducible else ''}"
        )


def _check_inputs(
    features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
) -> tuple[Floats, Integers, Integers]:
    """Return features, indices of labelled rows, and their labels, after checking all three.

    Raises DataError: one of them is malformed, or they do not fit together.
    """
    features_UF = check_features(features_UF)
    labelled_n = check_positions(labelled_n, len(features_UF))
    return features_UF, labelled_n, check_labels(labels_n, len(labelled_n), classes)


def append_constant(rows_UF: Floats, constant: float) -> Floats:
    """Return rows with a constant feature appended, (U, F + 1)."""
    return np.hstack([rows_UF, np.full((len(rows_UF), 1), constant)])


def compute_probabilities(inputs_UF: Floats, weights_FK: Floats) -> Floats:
    """Return the class probabilities of a softmax regression, (U, K).

    `inputs_UF`: F features of U rows. `weights_FK`: weights for K classes.
    """
    return np.asarray(scipy.special.softmax(inputs_UF @ weights_FK, axis=1), dtype=np.float64)


def minimise_loss(
    inputs_nF: Floats, labels_n: Integers, classes: int, *, penalty: float, tolerance: float
) -> Floats:
    """Return the weights T of a regularised softmax regression, (F, K).

    They minimise J(T) = 1/n sum over i of -log softmax(T x_i)[y_i] + Lambda/2 |T|^2, up to
    |grad J(T)| <= tolerance in the Frobenius norm.

    J is Lambda-strongly convex, so that |T - T*| <= |grad J(T)| / Lambda for every T: the gradient
    shows how far the minimiser T* still is. If the features have a constant, its weights are
    penalised like the others, so that labels of a single class have a minimiser, too.

    L-BFGS comes near. Gradient steps of length 1 / L go the rest of the way, however far it is;
    each shrinks the distance to the minimiser by the factor 1 - Lambda / L. L = max |x|^2 / 2 +
    Lambda, since the Hessian of -log softmax has no eigenvalue above 1/2. The tolerance must lie
    far above 1e-15 times the longest row.

    Args:
        inputs_nF: F features of the n labelled rows.
        labels_n: class of each row, in 0..K-1.
        classes: K, number of classes.
        penalty: Lambda, weight of the L2 penalty.
        tolerance: the largest norm of the gradient at the result.
    """
    target_nK = np.eye(classes)[labels_n]
    shape = (inputs_nF.shape[1], classes)

    def compute_value_and_gradient(flat_weights: Floats) -> tuple[float, Floats]:
        """Return J (mean cross-entropy plus L2 penalty) and its gradient at flattened weights."""
        weights_FK = flat_weights.reshape(shape)
        logits_nK = inputs_nF @ weights_FK
        loss = -float((target_nK * scipy.special.log_softmax(logits_nK, axis=1)).sum()) / len(
            inputs_nF
        )
        residual_nK = scipy.special.softmax(logits_nK, axis=1) - target_nK
        gradient_FK = inputs_nF.T @ residual_nK / len(inputs_nF) + penalty * weights_FK
        return loss + penalty / 2 * float((flat_weights**2).sum()), gradient_FK.ravel()

    result = scipy.optimize.minimize(
        compute_value_and_gradient,
        np.zeros(shape[0] * classes),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": 5000,
            "maxfun": 20000,
            "gtol": tolerance / shape[0] / classes,
            "ftol": 0.0,
            "maxcor": 20,
        },
    )
    solution = np.asarray(result.x, dtype=np.float64)
    lipschitz = float((inputs_nF**2).sum(axis=1).max()) / 2 + penalty  # L
    step_size = 1 / lipschitz
    _, gradient = compute_value_and_gradient(solution)
    while float(np.linalg.norm(gradient)) > tolerance:
        solution = solution - step_size * gradient
        _, gradient = compute_value_and_gradient(solution)
    return solution.reshape(shape)


def measure_scale(rows_nF: Floats) -> tuple[Floats, float]:
    """Return the rows' mean, (F,), and their root-mean-square distance from it.

    The distance scales all columns alike, since tables come standardised, and pixels share one
    unit. If it is 0 up to rounding errors, 1 is returned instead, by which rows can be divided.
    """
    mean_F = np.asarray(rows_nF.mean(axis=0))
    rms_distance = float(np.sqrt(((rows_nF - mean_F) ** 2).sum(axis=1).mean()))
    rounding_error = 1e-12 * float(np.abs(rows_nF).max(initial=0.0))
    return mean_F, rms_distance if rms_distance > rounding_error else 1.0
