"""What a run reached, as one typed record: `result.json`, written and read here.

Written by: whoever plays the active, and the launcher that gathers the results of parties that
ran apart. Read by: everything that reports or compares runs. A folder may have been sent by
somebody else, so only plain files of bounded size and of the types named here are read.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from secure_apfed.errors import CheckpointError
from secure_apfed.files import read_json
from secure_apfed.measures import ACCURACY, Measure, find_measure
from secure_apfed.privacy.ledger import PrivacySpent
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import scores_of

__all__ = [
    "AgreementOf", "Attendance", "Contributions", "Count", "Epsilon", "Outcome", "Privacy",
    "Written",
    "read_outcome", "write_outcome",
]  # fmt: skip


def _unbounded(value: Any) -> Any:
    """JSON has no infinity: null and texts stand for it."""
    return math.inf if value in (None, "inf", "infinity", "Infinity") else value


Count = Annotated[int, Field(ge=0, le=2**31)]
Epsilon = Annotated[float, BeforeValidator(_unbounded)]


class Written(BaseModel):
    """Something that a run wrote; what no reader uses may be there as well."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Privacy(Written):
    """What the run spent; inf where there is no guarantee."""

    model_config = ConfigDict(frozen=True, extra="allow")

    epsilon_x: Epsilon
    epsilon_y: Epsilon
    epsilon_model: Epsilon
    delta: float | None = None
    releases: Count | None = None
    mu: Epsilon = math.inf
    accountants: Mapping[str, float | str] = {}
    trace: tuple[str, ...] = ()

    @classmethod
    def of(cls, spent: PrivacySpent) -> "Privacy":
        """The record of an account."""
        return cls.model_validate(asdict(spent))

    def spent(self) -> PrivacySpent:
        """The account that this records."""
        return PrivacySpent(**self.model_dump())


class Attendance(Written):
    """Passives who fell silent in the last session, and in which step."""

    left: Mapping[str, int] = {}
    steps_without_all: int = 0


class Contributions(Written):
    """What one passive's votes or contributions to sums cost it; figure: what epsilon is called."""

    figure: str = "epsilon_c"
    epsilon: Epsilon
    delta: float
    releases: Count
    trace: tuple[str, ...] = ()


class AgreementOf(Written):
    """How far one passive's votes agree with others'; see `secure_apfed.methods.method`."""

    others: float | None
    labels: float
    others_noise: float
    labels_noise: float


class Outcome(Written):
    """result.json, with the cross-checks of accountants.json where that was written."""

    method: str
    accuracy: Mapping[str, float] = Field(min_length=1)
    wire_bytes: int
    privacy: Privacy
    seconds: float
    aligned_rows: int | None = None
    train_rows: int | None = None
    labelled_rows: int | None = None
    test_rows: int | None = None
    sum: Mapping[str, Any] = {}
    attendance: Attendance = Attendance()
    guarantee: str | None = None
    apart: bool = False
    contributions: Mapping[str, Contributions] = {}
    agreement: Mapping[str, AgreementOf] = {}
    measure: str = ACCURACY.name
    measures: Mapping[str, Mapping[str, float]] = {}
    threshold: float | None = None
    undefined: Mapping[str, Mapping[str, str]] = {}

    @property
    def judged_by(self) -> Measure:
        """The measure that the run is judged by.

        Raises:
            CheckpointError: this version has no such measure.
        """
        try:
            return find_measure(self.measure)
        except ValueError as error:
            raise CheckpointError(f"result.json: measure {error}") from None

    @property
    def scores(self) -> dict[str, float]:
        """The measure that the run is judged by, by inference variant; see `scores_of`."""
        return scores_of(self.measure, self.accuracy, self.measures)


def write_outcome(folder: RunFolder, outcome: Outcome) -> None:
    """Write `result.json` and the digests of all that the run wrote: it is finished."""
    folder.finish(outcome.model_dump(mode="python"))


def read_outcome(folder: RunFolder) -> Outcome:
    """Read `result.json`, with the cross-checks of accountants.json where that was written.

    Raises:
        CheckpointError: missing, or not as this version writes it.
    """
    outcome = read_json(folder.result, Outcome)
    if not folder.accountants.is_file():
        return outcome
    checked = read_json(folder.accountants, dict[str, float | str])
    privacy = outcome.privacy.model_copy(update={"accountants": checked})
    return outcome.model_copy(update={"privacy": privacy})
