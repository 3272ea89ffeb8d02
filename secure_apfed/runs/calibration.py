"""Calibration of the active's model: its probabilities become observed frequencies.

Run by: the active, once, before its finished model is measured. Slope and offset of the log-odds of
two classes go into the last layer of its head, so that the card, `predict`, the estimator and ONNX
give the same probabilities. The ranking of rows stays the same, and with it AUC, average precision
and KS. Decisions at probability one half may change. Only training rows are read. See
`secure_apfed.learning.calibration`.

Scores of unseen rows come from models that are trained without a part of the labels. If the run's
model is fitted in one step, it is fitted again without them. Else the run's own network is trained
locally without them. The gain by the passives' help is then left out, so that probabilities are too
cautious rather than too confident.

Letters: N training rows, n of them labelled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from secure_apfed.base.seeds import one_thread
from secure_apfed.baselines import BASELINES, FOLDS, BaselineTask
from secure_apfed.baselines.interface import FloatArray, IntArray, split_folds
from secure_apfed.data import OwnData
from secure_apfed.data.lazy_rows import score_in_parts
from secure_apfed.errors import ModelError
from secure_apfed.learning.calibration import RARE_SHARE, PlattLine, is_rare, standardise_scores
from secure_apfed.learning.descent import ActiveNetworks, copy_predictor
from secure_apfed.learning.votes import find_last_layer
from secure_apfed.measures.table import compute_outputs
from secure_apfed.measures.tasks import Classification
from secure_apfed.methods import Session
from secure_apfed.networks.models import RandomFeatures
from secure_apfed.runs.outcome import Calibration
from secure_apfed.settings import RunSettings

_MIN_PROBABILITY = 1e-12  # smaller probabilities are raised to this one before their logarithm
_MIN_UNLABELLED_ROWS = 30
"""Unlabelled rows that are needed to compute mean and spread of the scores of unseen rows; if there
are fewer, all training rows are used."""


@dataclass(frozen=True)
class _Folds:
    """Folds of the training rows for cross-fitting: a fold's model is trained without its rows.

    Each list has one array for each fold. A position is a row's index among the training rows.

    Attributes:
        labelled: for each fold the indices of its labelled rows among the labelled rows.
        labelled_positions: positions of the same rows.
        unseen: for each fold the positions of rows without a label that its model is not trained
            on, either; the same as `labelled_positions` if there are few rows without a label.
        reference: positions of the rows by whose scores a model's scores are standardised (their
            mean and spread). For a fold's model the fold's `unseen` rows are left out.
    """

    labelled: list[IntArray]
    labelled_positions: list[IntArray]
    unseen: list[IntArray]
    reference: IntArray


def calibrate_networks(session: Session, data: OwnData) -> Calibration | None:
    """Calibrate the finished networks in place, if the settings ask for it (Platt scaling).

    Return the calibration that was applied. None means that the networks are unchanged. This is so
    if the settings do not ask for it, if the model is no classifier by networks of the active, if
    their last layer accepts no offset, or if training diverged.

    `data`: the active's data, with the labels that the run may train on.
    """
    config = session.party_session.party.config
    networks = session.active_role.get_active_networks()
    if networks is None or not isinstance(session.party_session.party.task, Classification):
        return None
    assert data.table.labels is not None
    labels_n: IntArray = data.table.labels[data.labelled_rows].numpy().astype(np.int64)
    should_calibrate = _should_calibrate(config, labels_n, len(data.classes))
    if not should_calibrate or not _accepts_offset(networks):
        return None
    log_odds_N = _compute_log_odds(networks, data, data.train_rows)
    if not np.isfinite(log_odds_N).all():
        return None  # the training diverged
    folds = _split_rows(data, labels_n, config.seed)
    try:
        log_odds_by_fold = list(_predict_out_of_fold(session, data, folds))
    except ModelError:
        return None  # the run's model cannot be trained without the other parties
    if isinstance(config.calibration, str):
        target_rate = float(labels_n.mean())
    else:
        target_rate = config.calibration  # the known share of the positive class
    line = _fit_line(log_odds_N, log_odds_by_fold, folds, labels_n, target_rate)
    _apply_line(networks, line)
    return Calibration(rate=target_rate, slope=line.slope, offset=line.offset)


def _split_rows(data: OwnData, labels_n: IntArray, seed: int) -> _Folds:
    """Split the labelled rows into folds, and choose further rows that each fold leaves out.

    A model may memorise its training rows, and on other rows mean and spread of its scores may
    differ. So a fold also leaves out rows without a label, if there are enough. Otherwise its
    labelled rows serve as `unseen` rows.

    `data`: the active's data. `labels_n`: classes of its n labelled rows. `seed`: seed of the
    folds.
    """
    labelled = split_folds(labels_n, FOLDS, seed)
    positions_n = torch.searchsorted(data.train_rows, data.labelled_rows).numpy()
    labelled_positions = [positions_n[fold] for fold in labelled]
    all_rows = np.arange(len(data.train_rows))
    unlabelled = np.setdiff1d(all_rows, positions_n)
    if len(unlabelled) < _MIN_UNLABELLED_ROWS:
        return _Folds(labelled, labelled_positions, labelled_positions, all_rows)
    unseen = [unlabelled[fold::FOLDS] for fold in range(len(labelled))]
    return _Folds(labelled, labelled_positions, unseen, unlabelled)


def _fit_line(
    log_odds_N: FloatArray,
    log_odds_by_fold: list[FloatArray],
    folds: _Folds,
    labels_n: IntArray,
    target_rate: float,
) -> PlattLine:
    """Return slope and offset for the finished model's log-odds, fitted by out-of-fold scores.

    Each model's scores are standardised by its own mean and spread, so that the scores of different
    models are comparable. Without folds, no slope is fitted: only the mean probability is set.

    Args:
        log_odds_N: log-odds of all N training rows by the finished model.
        log_odds_by_fold: log-odds of all training rows by each fold's model; empty: no folds.
        folds: the rows that each fold leaves out.
        labels_n: labels of the n labelled rows, 0 or 1.
        target_rate: share of the second class among future rows.
    """
    labelled_scores = list[FloatArray]()
    unseen_scores = list[FloatArray]()
    for positions, unseen, fold_log_odds_N in zip(
        folds.labelled_positions, folds.unseen, log_odds_by_fold, strict=True
    ):
        reference_log_odds = fold_log_odds_N[np.setdiff1d(folds.reference, unseen)]
        labelled_scores.append(standardise_scores(fold_log_odds_N[positions], reference_log_odds))
        unseen_scores.append(standardise_scores(fold_log_odds_N[unseen], reference_log_odds))
    model_log_odds = log_odds_N[folds.reference]
    if not log_odds_by_fold:
        standardised = standardise_scores(model_log_odds, model_log_odds)
        return PlattLine.from_scores(
            model_log_odds, np.empty(0), labels_n[:0], standardised, positive_rate=target_rate
        )
    return PlattLine.from_scores(
        model_log_odds,
        np.concatenate(labelled_scores),
        labels_n[np.concatenate(folds.labelled)],
        np.concatenate(unseen_scores),
        positive_rate=target_rate,
    )


def _should_calibrate(config: RunSettings, labels_n: IntArray, classes: int) -> bool:
    """Return whether to calibrate a model of two classes, as the settings say.

    By default a model is calibrated if one class is rare and no privacy guarantee covers labels: a
    fit to labels would break it.

    `labels_n`: classes of the labelled rows. `classes`: number of classes.
    """
    if config.calibration == "none" or classes != 2 or len(np.unique(labels_n)) < 2:
        return False
    if config.calibration != "auto":
        return True
    return not config.are_labels_private and is_rare(labels_n, RARE_SHARE)


def _accepts_offset(networks: ActiveNetworks) -> bool:
    """Return whether an offset can be added to the networks' two scores.

    The last layer must be linear. It must have a bias, or a constant among its inputs as the first
    of `RandomFeatures` is.
    """
    last_layer = list(networks.head.modules())[-1]
    if not isinstance(last_layer, nn.Linear) or last_layer.out_features != 2:
        return False
    has_bias = "bias" in dict(last_layer.named_parameters())
    return has_bias or isinstance(networks.encoder, RandomFeatures)


def _compute_log_odds(networks: ActiveNetworks, data: OwnData, rows: torch.Tensor) -> FloatArray:
    """Return the log-odds of the second class for these N rows of the table, (N,).

    `networks`: an encoder and a head with two scores. `rows`: positions in the active's table.
    """
    network = copy_predictor(networks)
    assert network is not None
    dtype = next(network.parameters()).dtype

    def score_features(features_B: torch.Tensor) -> torch.Tensor:
        """Return the network's scores (B, 2), computed in the precision of its parameters."""
        scores_BK: torch.Tensor = network(features_B.to(dtype))
        return scores_BK

    score_rows = partial(score_in_parts, score_features, data.table.features)
    scores_NK = compute_outputs(score_rows, rows)
    return np.asarray((scores_NK[:, 1] - scores_NK[:, 0]).numpy())


def _predict_out_of_fold(session: Session, data: OwnData, folds: _Folds) -> Iterator[FloatArray]:
    """Yield for each fold the log-odds of all N training rows, by a model trained without its rows.

    The run's method fits its model again without a fold's rows, if it can. Otherwise networks with
    the run's settings are trained on the active's data alone, without the labels of a fold.

    `folds`: the rows that each fold leaves out.

    Raises ModelError: the run's model cannot be trained without the other parties.
    """
    training_rows = data.train_rows
    labelled_by_fold = [data.labelled_rows[torch.from_numpy(fold)] for fold in folds.labelled]
    unseen_by_fold = [training_rows[torch.from_numpy(unseen)] for unseen in folds.unseen]
    networks_by_fold = [
        session.active_role.refit_excluding(torch.cat([labelled, unseen]))  # None: it cannot
        for labelled, unseen in zip(labelled_by_fold, unseen_by_fold, strict=True)
    ]
    networks = [network for network in networks_by_fold if network is not None]
    if len(networks) == len(labelled_by_fold):
        for network in networks:
            yield _compute_log_odds(network, data, training_rows)
    else:
        task = BaselineTask.from_run(session.party_session.party.config, data, training_rows)
        for probabilities_NK in _fit_local_networks(task, training_rows, labelled_by_fold):
            log_NK = np.log(probabilities_NK.clip(_MIN_PROBABILITY))
            yield log_NK[:, 1] - log_NK[:, 0]


def _fit_local_networks(
    task: BaselineTask, training_rows: Tensor, labelled_by_fold: Sequence[Tensor]
) -> list[FloatArray]:
    """Train for each fold a network on the active's data without the fold's labels.

    Returns each network's probabilities of K classes for the N training rows, each (N, K).

    `task`: the training rows and their labels. `training_rows`: these rows in the active's table.
    `labelled_by_fold`: for each fold its labelled rows in the active's table.
    """
    labelled_rows = training_rows[torch.from_numpy(task.labelled_indices)]
    tasks_by_fold = []
    for fold_rows in labelled_by_fold:
        is_in_fold = torch.isin(labelled_rows, fold_rows)
        tasks_by_fold.append(task.drop_labels(is_in_fold.nonzero().flatten().numpy()))
    with one_thread():
        networks = BASELINES["network"].fit_together(tasks_by_fold)
        return [network.compute_scores(task.features) for network in networks]


@torch.no_grad()
def _apply_line(networks: ActiveNetworks, line: PlattLine) -> None:
    """Scale the last layer by the line's slope, and add the line's offset to the second class.

    The log-odds of the second class then are slope * log-odds + offset.
    """
    parameters = dict(find_last_layer(networks).named_parameters())
    for parameter in parameters.values():
        parameter.mul_(line.slope)
    if "bias" in parameters:
        parameters["bias"][1] += line.offset
    else:
        parameters["weight"][1, 0] += line.offset  # the first random feature is 1
