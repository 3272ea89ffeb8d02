"""A finished run as its folder tells it: what was asked, what it reached, what attacks reached.

Read by: everything that reports or compares runs. A folder may have been sent by somebody else, so
only plain files of bounded size and of the types named here are read
(`secure_apfed.folder_files`), and files that the run noted digests of are as it left them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from attacks.interface import AttackResult
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.folder_files import read_json
from secure_apfed.runs import RunFolder

__all__ = [
    "Attendance", "Contributions", "Count", "Epsilon", "FinishedRun", "Outcome", "Privacy",
    "Written", "read_finished_run",
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
    accountants: Mapping[str, float | str] = {}
    trace: tuple[str, ...] = ()


class Attendance(Written):
    """Passives who fell silent in the last session, and in which step."""

    left: Mapping[str, int] = {}
    steps_without_all: int = 0


class Contributions(Written):
    """What one passive's contributions to noisy sums cost it."""

    epsilon: Epsilon
    delta: float
    releases: Count
    trace: tuple[str, ...] = ()


class Outcome(Written):
    """result.json, with the cross-checks of accountants.json where that was written."""

    method: str
    accuracy: Mapping[str, float] = Field(min_length=1)
    wire_bytes: int
    privacy: Privacy
    seconds: float
    aligned_rows: int | None = None
    train_rows: int | None = None
    test_rows: int | None = None
    sum: Mapping[str, Any] = {}
    attendance: Attendance = Attendance()
    guarantee: str | None = None
    apart: bool = False
    contributions: Mapping[str, Contributions] = {}


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One finished run.

    Attributes:
        config, outcome: what was asked and reached.
        attacks: their results; None where none were mounted.
    """

    config: Config
    outcome: Outcome
    attacks: tuple[AttackResult, ...] | None


def read_finished_run(path: Path) -> FinishedRun:
    """Read a run folder.

    Raises:
        CheckpointError: a file is missing or not as this version writes it, or the run has not
            finished.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such run folder")
    folder = RunFolder(path)
    if not folder.result.is_file():
        begun = folder.config.is_file()
        reason = (
            "the run has not finished; continue it with --resume"
            if begun
            else "it is no run folder"
        )
        raise CheckpointError(f"{path}: has no result.json: {reason}")
    folder.check(folder.config, folder.result)
    attacks = path / "attacks.json"
    return FinishedRun(
        config=folder.load_config(),
        outcome=_outcome(folder),
        attacks=read_json(attacks, tuple[AttackResult, ...]) if attacks.is_file() else None,
    )


def _outcome(folder: RunFolder) -> Outcome:
    outcome = read_json(folder.result, Outcome)
    if not folder.accountants.is_file():
        return outcome
    checked = read_json(folder.accountants, dict[str, float | str])
    privacy = outcome.privacy.model_copy(update={"accountants": checked})
    return outcome.model_copy(update={"privacy": privacy})
