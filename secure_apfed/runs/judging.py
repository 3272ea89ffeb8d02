"""How the active judges its model: measures on its test rows, by the run's settings.

Run by: the active, or whoever plays it. Test rows only measure; a threshold is chosen on labels
that the run may train on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding
from secure_apfed.data.inputs import Extremes, extremes_of
from secure_apfed.errors import ConfigError
from secure_apfed.learning.networks import predictor_of
from secure_apfed.measures import (
    ACCURACY,
    MEASURES,
    Measure,
    Scored,
    ScoreRanges,
    best_threshold,
    measure_all,
    undefined_in,
)
from secure_apfed.methods import Session
from secure_apfed.methods.terms import task_of
from secure_apfed.runs.training_labels import TrainingLabels
from secure_apfed.tasks import scored_rows

__all__ = ["Judge", "Judged"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """What a model is found to be worth.

    Attributes:
        measure: that the run is judged by.
        said: of test rows, by inference variant.
        accuracy: by variant; NaN where it was asked for no row, or nothing is classified.
        measures: by variant and name: the run's measure, or all where the model is finished.
        threshold: that the active's model decides at; None: it takes the likeliest class.
        ranges: how its scores of training rows are spread, where it is finished and may be told.
        extremes: by column of numbers, between which these rows lie; likewise.
    """

    measure: str
    said: Mapping[str, Scored]
    accuracy: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float]]
    threshold: float | None = None
    ranges: ScoreRanges | None = None
    extremes: Mapping[str, Extremes] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """What `RunResult` and `Outcome` say of it."""
        undefined = {name: undefined_in(scored) for name, scored in self.said.items()}
        return {
            "measure": self.measure, "accuracy": dict(self.accuracy), "measures": self.measures,
            "threshold": self.threshold,
            "undefined": {name: reasons for name, reasons in undefined.items() if reasons},
        }  # fmt: skip


class Judge:
    """Judges what a session's model says of test rows.

    Args:
        config: of the run.
        session: set up.
        labels: that it trains on.

    Raises:
        ConfigError: a threshold where there are not two classes with labels of both.
    """

    def __init__(self, config: Config, session: Session, labels: TrainingLabels) -> None:
        self._config, self._session, self._labels = config, session, labels
        if config.threshold is not None:
            _require_two_classes(labels)

    def judge(self, said: Mapping[str, Scored], *, final: bool) -> Judged:
        """Measure what is said; `final`: by all measures, at the threshold that is to be kept."""
        trained = self._training_rows() if final else None
        # What the card keeps is of rows, and private training must not tell of them without noise.
        kept = None if self._config.dp_sgd else trained
        threshold = self._threshold(trained)
        own = self._session.headline
        said = {
            name: scored.at(threshold) if name == own else scored for name, scored in said.items()
        }
        ours = MEASURES[self._config.measure]
        return Judged(
            measure=ours.name,
            said=said,
            accuracy={name: _accuracy(scored) for name, scored in said.items()},
            measures={
                name: measure_all(scored) if final else _defined(ours, scored)
                for name, scored in said.items()
            },
            threshold=threshold,
            ranges=None if kept is None else _ranges(kept),
            extremes={} if kept is None else self._extremes(),
        )

    def _extremes(self) -> dict[str, Extremes]:
        data = self._labels.data()
        encoding = data.table.encoding
        if not isinstance(encoding, ColumnEncoding):
            return {}
        return extremes_of(encoding, data.table.features[data.train_rows])

    def _threshold(self, trained: Scored | None) -> float | None:
        chosen = self._config.threshold
        if not isinstance(chosen, str):
            return chosen
        return None if trained is None else best_threshold(trained, chosen)

    def _training_rows(self) -> Scored | None:
        """What the finished model says of labelled training rows; None: it needs others for it."""
        network = predictor_of(self._session.learner.solo())
        if network is None:
            return None
        data = self._labels.data()
        features_N, labels_N = data.table.features, data.table.labels
        assert labels_N is not None
        dtype = next((one.dtype for one in network.parameters()), torch.float32)

        def predict(rows_B: Tensor) -> Tensor:
            scores_BK: Tensor = network(features_N[rows_B].to(dtype))
            return scores_BK

        task = task_of(self._session.entered.own)
        return scored_rows(
            task, predict, data.labelled_rows, labels_N=labels_N, features_N=features_N
        )


def _accuracy(scored: Scored) -> float:
    return ACCURACY.of(scored) if scored.classes else math.nan


def _defined(measure: Measure, scored: Scored) -> dict[str, float]:
    value = measure.of(scored)
    return {} if math.isnan(value) else {measure.name: value}


def _ranges(trained: Scored) -> ScoreRanges | None:
    """None of no rows, and of a training that diverged."""
    told = len(trained.truth) and trained.finite
    return ScoreRanges.of(trained.scores) if told else None


def _require_two_classes(labels: TrainingLabels) -> None:
    held = labels.held
    assert held.table.labels is not None
    # Of labels that a mechanism answers nobody is told which there are.
    answered = not labels.mechanism.unsafe
    labelled = 2 if answered else len(held.table.labels[held.labelled_rows].unique())
    if len(held.classes) != 2 or labelled != 2:
        raise ConfigError(
            f"threshold: it decides between two classes with labelled rows of both, and "
            f"{held.table.name} has {len(held.classes)} classes"
            f"{'' if answered else f' and labels of {labelled}'}; leave it out"
        )
