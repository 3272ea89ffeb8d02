"""What a run tells: how far it is, and what it gave."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secure_apfed.data import OwnData
from secure_apfed.measures import ACCURACY, Measure
from secure_apfed.privacy.ledger import PrivacySpent
from secure_apfed.runs.recording import Recording, no_recording

__all__ = ["Progress", "RunResult", "measure_text", "scores_of"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, for a display.

    Attributes:
        epoch, step: that are done, of epochs and steps.
        loss: running mean of the task loss in this epoch; None under DP-SGD, whose noise does not
            cover it.
        accuracy: last test accuracy of the headline variant.
        measure, score: that the run is judged by, and its last value of that variant.
        figure, epsilon: what left a party, by its name in `secure_apfed.privacy_rows.FIGURES`, and
            what it cost: 0 where nothing was released, infinite without a guard, None while no
            passive said it.
        wire_bytes: on all links so far.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None
    accuracy: float | None
    epsilon: float | None
    wire_bytes: int
    figure: str = "epsilon_x"
    measure: str = ACCURACY.name
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run gives.

    Attributes:
        accuracy: on the test rows, by inference variant.
        measure: that the run is judged by; measures: all on the test rows, by variant and name.
        undefined: why, by variant and name, of the measures that its test rows do not define.
        threshold: that the active's model decides at; None: it takes the likeliest class.
        privacy: what was spent by the party that spent most.
        contributions: by passive that adds noise of its own, what that cost it, in plain values.
        trained: the active's rows as it trained on them, with what its label mechanism answered;
            None where another process played it.
        recorded: what the experimenter holds, where one process played all parties.
    """

    method: str
    accuracy: Mapping[str, float]
    wire_bytes: int
    privacy: PrivacySpent
    folder: Path | None
    contributions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trained: OwnData | None = field(default=None, repr=False)
    recorded: Recording | None = None
    measure: str = ACCURACY.name
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    threshold: float | None = None
    undefined: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: what the experimenter holds of other parties' rows stays here."""
        return {**self.__dict__, "recorded": None}

    @property
    def scores(self) -> dict[str, float]:
        """The measure that the run is judged by, by inference variant; see `scores_of`."""
        return scores_of(self.measure, self.accuracy, self.measures)

    @property
    def recording(self) -> Recording:
        """What the experimenter holds.

        Raises:
            CheckpointError: nobody holds it, since each party ran in a process of its own.
        """
        if self.recorded is None:
            raise no_recording(self.folder)
        return self.recorded


def scores_of(
    measure: str, accuracy: Mapping[str, float], measures: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """One measure of each inference variant; NaN where its test rows do not define it."""
    if measure == ACCURACY.name:
        return dict(accuracy)
    return {name: measures.get(name, {}).get(measure, math.nan) for name in accuracy}


def measure_text(
    measure: Measure, variant: str, value: float, undefined: Mapping[str, Mapping[str, str]]
) -> str:
    """A value as people read it, or why there is none."""
    why = undefined.get(variant, {}).get(measure.name, "")
    return f"{measure.text(value)}: {why}" if math.isnan(value) and why else measure.text(value)
