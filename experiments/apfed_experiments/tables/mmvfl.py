"""MMVFL's results: how well each participant predicts locally without ever seeing a label.

Figure 3 and Table 2 of the paper on Handwritten, five views: the features that count most by the
norms of their weights are kept, and each participant predicts with the weights of these features.
All parties are computed in one process here, in the order of the protocol; a test checks that a
session of parties gives the same (`tests/secure_apfed/test_methods_views.py`).
Letters: N rows, F features of a view, C classes.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from apfed_experiments.tables.table import (
    Job,
    MeasuredValues,
    PaperTable,
    PaperValue,
    TableExtent,
    TableRow,
)
from secure_apfed.data import VerticalData, load_data
from secure_apfed.methods.multiview import (
    Floats,
    LabelTerm,
    ViewModel,
    compute_objective,
    compute_row_norms,
    draw_orthonormal,
    run_iteration,
    solve_weights,
)
from secure_apfed.settings.data import DataSettings

RowNumbers = NDArray[np.int64]
_VIEWS = ("pix", "fou", "fac", "zer", "kar")  # Table 1: 240, 76, 216, 47, 64
_FEATURE_SHARES = (2, 4, 6, 8, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
_BETAS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_FOLDS = 5
_TRAINING_ROWS_PER_CLASS = 120
_SEED_CORRELATION = 1 / _FOLDS  # see `apfed_experiments.summary.estimate_seed_correlation`
_ZETA = 1000.0
_ETA = 1000.0
_ITERATION_LIMITS = (5, 10, 100)
_TOLERANCE = 1e-5
_PAPER_DIFFERENCES = {  # by participant, and on average
    "supFL": (1.46, -2.39, 0.76, 6.48, 0.77, 1.42),
    "supMVLFL": (1.99, -2.31, 1.03, 9.67, 1.16, 2.31),
}
_READING = (
    "Five folds of 40 rows a class; 120 of the other 160 of each class train (Table 1). "
    "As in the paper, beta is chosen for each fold, view and share of features by the accuracy on "
    "the rows that are then reported, which flatters all methods alike; zeta = eta = 1000. "
    "supMVLFL (Eq. 16) is a sum over participants, each of whose terms is supFL's (Eq. 15), so it "
    "is the same model, and the paper's difference between the two does not follow from its "
    "equations. Differences are averaged over the shares of features. The paper ends where the "
    "objective converges (here: falls by less than 1e-5 of it) or at a maximum of iterations that "
    "it does not say; iterations: that maximum. Intervals are over the folds, and corrected for "
    "the training rows that these share (Nadeau and Bengio 2003)."
)


def align_views(data: VerticalData) -> tuple[list[Floats], RowNumbers]:
    """Return the features and labels of the people whom all parties hold, in one common order.

    Returns:
        Each party's features (N, F), the active's first, and the active's labels (N,).
    """
    common_people = sorted(set.intersection(*(set(table.ids) for table in data.tables)))
    row_by_person = [{person: row for row, person in enumerate(table.ids)} for table in data.tables]
    rows_by_party = [[rows[person] for person in common_people] for rows in row_by_person]
    labels_N = data.active.labels
    assert labels_N is not None
    views = [
        table.features[rows].flatten(1).double().numpy()
        for table, rows in zip(data.tables, rows_by_party, strict=True)
    ]
    return views, labels_N[rows_by_party[0]].numpy()


def fit_mmvfl(
    views: Sequence[Floats],
    truth_NC: Floats,
    *,
    beta: float,
    seed: int,
    iteration_limits: Sequence[int] = _ITERATION_LIMITS,
) -> dict[int, list[Floats]]:
    """Train MMVFL (Algorithm 1) on aligned rows and return its weights after each iteration limit.

    One training serves all limits: it runs to the largest one, or until the objective falls by less
    than `_TOLERANCE` of itself. Limits beyond that iteration get the weights at convergence.

    Args:
        views: training features of each participant, (N, F): N rows, F features of a view; the
            first participant has the labels.
        truth_NC: one-hot labels of C classes.
        beta: weight of the sparsity term in the paper's objective.
        seed: seed of the initial weights and the initial common pseudo-labels.
        iteration_limits: limits of the number of iterations.

    Returns:
        By limit: the weights (F, C) of each view.
    """
    rng = np.random.default_rng(seed)
    row_count, class_count = truth_NC.shape
    models = [
        ViewModel.from_features(
            x_NF, class_count, rng, beta=beta, zeta=_ZETA, tolerance=1e-6, max_rounds=50
        )
        for x_NF in views
    ]
    # The term that draws the label holder's pseudo-labels to the labels, with weight eta.
    label_term = LabelTerm(truth_NC, np.full((row_count, 1), _ETA), is_on_own_labels=True)
    common_NC = draw_orthonormal(row_count, class_count, rng)
    previous_objective = np.inf
    weights_by_limit: dict[int, list[Floats]] = {}
    for iteration in range(1, max(iteration_limits) + 1):
        common_NC = run_iteration(models, common_NC, label_term)
        objective = compute_objective(models, common_NC, label_term)
        has_converged = previous_objective - objective <= _TOLERANCE * objective
        weights = [model.weights_FC for model in models]
        for limit in iteration_limits:
            if limit == iteration or (has_converged and limit > iteration):
                weights_by_limit[limit] = weights
        if has_converged:
            break
        previous_objective = objective
    return weights_by_limit


def compute_accuracies(weights_FC: Floats, x_NF: Floats, labels_N: RowNumbers) -> dict[int, float]:
    """Return one participant's accuracy in per cent by the share of features kept (section 4.2).

    Shares are in per cent of the columns. `weights_FC`: weights of the participant's view, F
    features, C classes. `x_NF`, `labels_N`: features and labels of the N test rows.
    """
    accuracy_by_share = {}
    for share in _FEATURE_SHARES:
        columns = select_features(weights_FC, share / 100)
        predicted_N = (x_NF[:, columns] @ weights_FC[columns]).argmax(1)
        accuracy_by_share[share] = 100 * float((predicted_N == labels_N).mean())
    return accuracy_by_share


def select_features(weights_FC: Floats, share: float) -> RowNumbers:
    """Return the columns with the largest norms of weights, ascending; at least one.

    `share`: share of all columns that is returned, 0 to 1.
    """
    selected_count = max(1, round(share * len(weights_FC)))
    return np.sort(np.argsort(-compute_row_norms(weights_FC), kind="stable")[:selected_count])


def measure_fold(*, seed: int, betas: Sequence[float], iterations: Sequence[int]) -> MeasuredValues:
    """Measure MMVFL and supFL for every participant and share of features on one fold.

    supFL fits a participant's view to the labels alone (Eq. 15). As in the paper, each value takes
    the beta with the highest accuracy on the reported test rows.

    Args:
        seed: number of the fold, and seed of the training.
        betas: candidate weights of the sparsity term.
        iterations: limits of the number of iterations, each measured.

    Returns:
        Accuracies in per cent by "MMVFL LIMIT PARTICIPANT SHARE" and "supFL PARTICIPANT SHARE", and
        MMVFL minus supFL averaged over the shares by "apart LIMIT PARTICIPANT" and
        "apart LIMIT average".
    """
    # The rows are those of seed 0 for all folds; `seed` chooses the fold.
    data = load_data(DataSettings(dataset="handwritten", views=_VIEWS), seed=0)
    views, labels_N = align_views(data)
    train_rows, test_rows = _split_fold(labels_N, seed)
    truth_NC = np.eye(labels_N.max() + 1)[labels_N[train_rows]]
    train_views = [x_NF[train_rows] for x_NF in views]
    best_value_by_name: dict[str, float] = {}
    for beta in betas:
        weights_by_limit = fit_mmvfl(
            train_views, truth_NC, beta=beta, seed=seed, iteration_limits=iterations
        )
        for view, x_NF in enumerate(views):
            weights_by_method = {
                f"MMVFL {limit}": weights[view] for limit, weights in weights_by_limit.items()
            }
            initial_FC = weights_by_limit[max(weights_by_limit)][view]
            weights_by_method["supFL"] = solve_weights(
                train_views[view], truth_NC, beta, initial_FC
            )
            for method, weights_FC in weights_by_method.items():
                accuracies = compute_accuracies(weights_FC, x_NF[test_rows], labels_N[test_rows])
                for share, accuracy in accuracies.items():
                    name = f"{method} {view + 1} {share}"
                    best_value_by_name[name] = max(best_value_by_name.get(name, 0.0), accuracy)
    difference_by_name = _compare_with_local_fits(
        best_value_by_name, iterations, participant_count=len(views)
    )
    return best_value_by_name | difference_by_name


def _compare_with_local_fits(
    accuracy_by_name: Mapping[str, float], iterations: Sequence[int], *, participant_count: int
) -> dict[str, float]:
    """Return MMVFL's accuracy minus that of supFL (views fitted alone), averaged over the shares.

    Keys are "apart LIMIT PARTICIPANT" and "apart LIMIT average".

    `accuracy_by_name`: accuracies of both as `measure_fold` names them. `iterations`: limits of the
    number of iterations.
    """
    difference_by_name: dict[str, float] = {}
    for limit in iterations:
        differences = []
        for participant in range(1, participant_count + 1):
            differences_of_shares = [
                accuracy_by_name[f"MMVFL {limit} {participant} {share}"]
                - accuracy_by_name[f"supFL {participant} {share}"]
                for share in _FEATURE_SHARES
            ]
            difference = float(np.mean(differences_of_shares))
            difference_by_name[f"apart {limit} {participant}"] = difference
            differences.append(difference)
        difference_by_name[f"apart {limit} average"] = float(np.mean(differences))
    return difference_by_name


def _split_fold(labels_N: RowNumbers, fold: int) -> tuple[RowNumbers, RowNumbers]:
    """Return the training and test rows of a fold, equally many of each class, in ascending order.

    The partition into folds is the same for all `fold` numbers, so test rows of different folds
    never overlap. Of the rows outside the fold, 120 of each class train. `labels_N`: labels of all
    N rows.
    """
    rng = np.random.default_rng(0)
    train_parts = []
    test_parts = []
    for label in np.unique(labels_N):
        class_rows = rng.permutation(np.flatnonzero(labels_N == label))
        class_folds = np.array_split(class_rows, _FOLDS)
        test_parts.append(class_folds.pop(fold % _FOLDS))
        train_parts.append(np.concatenate(class_folds)[:_TRAINING_ROWS_PER_CLASS])
    return np.sort(np.concatenate(train_parts)), np.sort(np.concatenate(test_parts))


_JOB = Job(
    label="handwritten",
    measure=measure_fold,
    settings={"betas": list(_BETAS), "iterations": list(_ITERATION_LIMITS)},
)


def _make_curves(is_full: bool) -> TableExtent:
    """Return Figure 3: accuracy by participant, method and share of features.

    `is_full` has no effect: all of the figure is always measured.
    """
    table_rows = [
        TableRow(
            cells={
                "participant": str(participant),
                "view": view,
                "method": method,
                "features %": str(share),
            },
            job=_JOB,
            value_name=f"{value_prefix} {participant} {share}",
            panel_titles=(f"Participant {participant} ({view})",),
            curve_name=method,
            axis_position=share,
        )
        for participant, view in enumerate(_VIEWS, 1)
        for method, value_prefix in (
            ("MMVFL", f"MMVFL {max(_ITERATION_LIMITS)}"),
            ("supFL", "supFL"),
        )
        for share in _FEATURE_SHARES
    ]
    return TableExtent(table_rows, _FOLDS)


def _make_differences(is_full: bool) -> TableExtent:
    """Return Table 2: MMVFL minus each supervised model, by participant and iteration limit.

    supFL and supMVLFL are the same model (`_READING` says why), so each measured value stands in
    two rows, beside the paper's value of either. `is_full` has no effect.
    """
    participants = [*(f"{number} ({view})" for number, view in enumerate(_VIEWS, 1)), "average"]
    table_rows = [
        TableRow(
            cells={
                "MMVFL minus": supervised_method,
                "participant": participant,
                "iterations": str(iteration_limit),
            },
            job=_JOB,
            value_name=f"apart {iteration_limit} {participant.partition(' ')[0]}",
            paper_value=PaperValue(mean=mean),
            panel_titles=(f"MMVFL minus {supervised_method}",),
            curve_name=f"{participant}, {iteration_limit} iterations",
        )
        for supervised_method, paper_means in _PAPER_DIFFERENCES.items()
        for participant, mean in zip(participants, paper_means, strict=True)
        for iteration_limit in _ITERATION_LIMITS
    ]
    return TableExtent(table_rows, _FOLDS)


_make_paper_table = partial(
    PaperTable, reading_guide=_READING, omission="", hours=0.02, seed_correlation=_SEED_CORRELATION
)
TABLES: tuple[PaperTable, ...] = (
    _make_paper_table(
        name="mmvfl-handwritten",
        source="MMVFL, Figure 3",
        unit="accuracy, %",
        number_format=".1f",
        title="MMVFL on Handwritten: accuracy by the share of features that are kept",
        make_extent=_make_curves,
        axis_title="features kept, %",
        label_by_position={
            share: "" if 2 < share < 20 else f"{share:g}" for share in _FEATURE_SHARES
        },
    ),
    _make_paper_table(
        name="mmvfl-differences",
        source="MMVFL, Table 2, Handwritten",
        unit="points of accuracy",
        title="MMVFL minus models that saw the labels, averaged over the shares of features",
        make_extent=_make_differences,
    ),
)
