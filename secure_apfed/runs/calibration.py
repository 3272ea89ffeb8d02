"""Calibration of the active's model: its probabilities become observed frequencies.

Run by: the active, once, before its finished model is measured. Slope and offset of the log-odds of
two classes go into the last layer of its head, so that the card, `predict`, the estimator and ONNX
give the same probabilities. The ranking stays, and with it AUC, average precision and KS; decisions
at one half do not. Only training rows are read. See `secure_apfed.learning.calibration`.

Scores of unseen rows come from the student without a part of the labels, if it is fitted in one
step; else from the run's own network, trained locally without them. The gain by help is then left
out, so that probabilities are too cautious rather than too confident.

Letters: N training rows, n of them labelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from secure_apfed.base.seeds import one_thread
from secure_apfed.data import OwnData
from secure_apfed.data.lazy_rows import score_in_parts
from secure_apfed.errors import ModelError
from secure_apfed.learning.calibration import SKEWED, PlattLine, is_rare, standardise_scores
from secure_apfed.learning.descent import ActiveNetworks, copy_predictor
from secure_apfed.learning.votes import find_last_layer
from secure_apfed.measures.table import outputs_of
from secure_apfed.measures.tasks import Classification
from secure_apfed.methods import Session
from secure_apfed.networks.models import RandomFeatures
from secure_apfed.runs.outcome import Calibration
from secure_apfed.settings.run import RunSettings
from secure_apfed.solo import BASELINES, FOLDS, SoloTask
from secure_apfed.solo.interface import FloatArray, IntArray, split_folds

_MIN_PROBABILITY = 1e-12  # before the logarithm is taken
_MIN_UNLABELLED_ROWS = 30
"""Unlabelled rows needed for mean and spread; with fewer, all training rows are used."""


@dataclass(frozen=True)
class _Folds:
    """Folds of the training rows for cross-fitting: a fold's model is trained without its rows.

    Each list has one array for each fold. A position is a row's index among the training rows.

    Attributes:
        labelled: indices of a fold's labelled rows among the labelled rows.
        labelled_positions: positions of the same rows.
        unseen: positions of further rows that the fold's model is trained without.
        reference: positions of the rows whose scores give mean and spread; for a fold's model they
            are used without `unseen`.
    """

    labelled: list[IntArray]
    labelled_positions: list[IntArray]
    unseen: list[IntArray]
    reference: IntArray


def calibrate_networks(session: Session, data: OwnData) -> Calibration | None:
    """Calibrate the finished networks in place, if the settings ask for it (Platt scaling).

    `data`: the active's data, with the labels that the run may train on. Returns None if the
    networks stay as they are: not asked for, no classification by networks of its own, or training
    diverged.
    """
    config = session.party_session.party.config
    networks = session.learner.get_solo_networks()
    if networks is None or not isinstance(session.party_session.party.task, Classification):
        return None
    assert data.table.labels is not None
    labels_n: IntArray = data.table.labels[data.labelled_rows].numpy().astype(np.int64)
    should_calibrate = _should_calibrate(config, labels_n, len(data.classes))
    if not should_calibrate or not _accepts_offset(networks):
        return None
    scores_N = _compute_scores(networks, data, data.train_rows)
    if not np.isfinite(scores_N).all():
        return None  # the training diverged
    folds = _split_rows(data, labels_n, config.seed)
    try:
        scores_by_fold = list(_predict_out_of_fold(session, data, folds))
    except ModelError:
        return None  # the run's model cannot be trained without the other parties
    rate = float(labels_n.mean()) if isinstance(config.calibration, str) else config.calibration
    line = _fit_line(scores_N, scores_by_fold, folds, labels_n, rate)
    _apply_line(networks, line)
    return Calibration(rate=rate, slope=line.slope, offset=line.offset)


def _split_rows(data: OwnData, labels_n: IntArray, seed: int) -> _Folds:
    """Split the labelled rows into folds, and choose further rows that each fold leaves out.

    A model may memorise its training rows, and on other rows mean and spread of its scores may
    differ. So a fold leaves out unlabelled rows, too, if there are enough; otherwise `unseen` are
    its labelled ones.

    `labels_n`: classes of the labelled rows.
    """
    labelled = split_folds(labels_n, FOLDS, seed)
    positions_n = torch.searchsorted(data.train_rows, data.labelled_rows).numpy()
    labelled_positions = [positions_n[part] for part in labelled]
    all_rows = np.arange(len(data.train_rows))
    unlabelled = np.setdiff1d(all_rows, positions_n)
    if len(unlabelled) < _MIN_UNLABELLED_ROWS:
        return _Folds(labelled, labelled_positions, labelled_positions, all_rows)
    unseen = [unlabelled[fold::FOLDS] for fold in range(len(labelled))]
    return _Folds(labelled, labelled_positions, unseen, unlabelled)


def _fit_line(
    scores_N: FloatArray,
    scores_by_fold: list[FloatArray],
    folds: _Folds,
    labels_n: IntArray,
    rate: float,
) -> PlattLine:
    """Fit slope and offset of the model's scores to the labels, by out-of-fold scores.

    Each model's scores are standardised by its own mean and spread, so that folds compare.

    Args:
        scores_N: scores of the finished model, log-odds for all training rows.
        scores_by_fold: each fold's model's log-odds; empty: there are no folds.
        folds: the rows that each fold leaves out.
        labels_n: labels of the labelled rows, 0 or 1.
        rate: share of the second class among future rows.
    """
    labelled_scores = list[FloatArray]()
    unseen_scores = list[FloatArray]()
    for positions, unseen, fold_scores_N in zip(
        folds.labelled_positions, folds.unseen, scores_by_fold, strict=True
    ):
        reference = fold_scores_N[np.setdiff1d(folds.reference, unseen)]
        labelled_scores.append(standardise_scores(fold_scores_N[positions], reference))
        unseen_scores.append(standardise_scores(fold_scores_N[unseen], reference))
    model_scores = scores_N[folds.reference]
    if not scores_by_fold:
        # No label was held out, so only the mean probability is set.
        standardised = standardise_scores(model_scores, model_scores)
        return PlattLine.from_scores(
            model_scores, np.empty(0), labels_n[:0], standardised, rate=rate
        )
    return PlattLine.from_scores(
        model_scores,
        np.concatenate(labelled_scores),
        labels_n[np.concatenate(folds.labelled)],
        np.concatenate(unseen_scores),
        rate=rate,
    )


def _should_calibrate(config: RunSettings, labels_n: IntArray, classes: int) -> bool:
    """Return whether to calibrate: as configured; by default if one of two classes is rare and no
    privacy guarantee covers labels.
    """
    if config.calibration == "none" or classes != 2 or len(np.unique(labels_n)) < 2:
        return False
    if config.calibration != "auto":
        return True
    return not config.labels_are_private and is_rare(labels_n, SKEWED)


def _accepts_offset(networks: ActiveNetworks) -> bool:
    """Return whether an offset can be added to the networks' two scores: the last layer is linear
    and has a bias, or a constant among its inputs.
    """
    last = list(networks.head.modules())[-1]
    if not isinstance(last, nn.Linear) or last.out_features != 2:
        return False
    return "bias" in dict(last.named_parameters()) or isinstance(networks.encoder, RandomFeatures)


def _compute_scores(networks: ActiveNetworks, data: OwnData, rows: torch.Tensor) -> FloatArray:
    """Return the log-odds of the second class for these rows of the table."""
    network = copy_predictor(networks)
    assert network is not None
    dtype = next(network.parameters()).dtype

    def score_features(features_B: torch.Tensor) -> torch.Tensor:
        scores_BK: torch.Tensor = network(features_B.to(dtype))
        return scores_BK

    score_rows = partial(score_in_parts, score_features, data.table.features)
    scores_NK = outputs_of(score_rows, rows)
    return np.asarray((scores_NK[:, 1] - scores_NK[:, 0]).numpy())


def _predict_out_of_fold(session: Session, data: OwnData, folds: _Folds) -> Iterator[FloatArray]:
    """Yield for each fold the log-odds of all training rows, by a model trained without its rows.

    The run's method trains these models; if it cannot, an own network with the run's settings is
    trained locally.

    `folds`: the rows that each fold leaves out.
    """
    rows = data.train_rows
    parts = [data.labelled_rows[torch.from_numpy(part)] for part in folds.labelled]
    fitted = [
        session.learner.refit_excluding(torch.cat([part, rows[torch.from_numpy(unseen)]]))
        for part, unseen in zip(parts, folds.unseen, strict=True)
    ]
    networks = [network for network in fitted if network is not None]
    if len(networks) == len(parts):
        yield from (_compute_scores(network, data, rows) for network in networks)
        return
    task = SoloTask.from_run(session.party_session.party.config, data, rows)
    labelled_n = rows[torch.from_numpy(task.labelled)]
    tasks = [
        task.drop_labels(torch.isin(labelled_n, part).nonzero().flatten().numpy()) for part in parts
    ]
    with one_thread():
        probabilities_by_fold = [
            model.compute_scores(task.features)
            for model in BASELINES["network"].fit_together(tasks)
        ]
    for probabilities_NK in probabilities_by_fold:
        log_NK = np.log(probabilities_NK.clip(_MIN_PROBABILITY))
        yield log_NK[:, 1] - log_NK[:, 0]


@torch.no_grad()
def _apply_line(networks: ActiveNetworks, line: PlattLine) -> None:
    """Scale the last layer by the line's slope, and add its offset to the second class."""
    parameters = dict(find_last_layer(networks).named_parameters())
    for parameter in parameters.values():
        parameter.mul_(line.slope)
    if "bias" in parameters:
        parameters["bias"][1] += line.offset
    else:
        parameters["weight"][1, 0] += line.offset  # the first random feature is 1
