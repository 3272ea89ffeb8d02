"""A finished run, read once from its folder: all that a report is made from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from attacks.interface import AttackResult
from experiments.reconstructions import FILE, Reconstruction, read_examples
from experiments.report.who_learns import Role, RunFacts
from secure_apfed import runs
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Flow
from secure_apfed.folder_files import count_lines, read_json, read_json_lines

__all__ = [
    "Attendance", "Contributions", "EpochMetrics", "FinishedRun", "Outcome", "Privacy", "read_run",
]  # fmt: skip


def _unbounded(value: Any) -> Any:
    """JSON has no infinity: null and texts stand for it."""
    return math.inf if value in (None, "inf", "infinity", "Infinity") else value


Count = Annotated[int, Field(ge=0, le=2**31)]
Epsilon = Annotated[float, BeforeValidator(_unbounded)]


class _Part(BaseModel):
    """Something that a run wrote; what a report does not use may be there as well."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Privacy(_Part):
    """What the run spent; inf where there is no guarantee."""

    model_config = ConfigDict(frozen=True, extra="allow")

    epsilon_x: Epsilon
    epsilon_y: Epsilon
    epsilon_model: Epsilon
    delta: float | None = None
    releases: Count | None = None
    accountants: Mapping[str, float | str] = {}
    trace: tuple[str, ...] = ()


class Attendance(_Part):
    """Passives who fell silent in the last session, and in which step."""

    left: Mapping[str, int] = {}
    steps_without_all: int = 0


class Contributions(_Part):
    """What one passive's contributions to noisy sums cost it."""

    epsilon: Epsilon
    delta: float
    releases: Count
    trace: tuple[str, ...] = ()


class Outcome(_Part):
    """result.json."""

    method: str
    accuracy: Mapping[str, float]
    wire_bytes: int
    privacy: Privacy
    seconds: float
    aligned_rows: int | None = None
    train_rows: int | None = None
    test_rows: int | None = None
    sum: Mapping[str, Any] = {}
    attendance: Attendance = Attendance()
    guarantee: str | None = None
    contributions: Mapping[str, Contributions] = {}


class EpochMetrics(_Part):
    """One line of metrics.jsonl."""

    epoch: int
    step: int
    loss: float
    accuracy: Mapping[str, float] | None = None
    epsilon: Epsilon = math.inf
    wire_bytes: int = 0
    seconds: float = 0.0


class _Participant(_Part):
    name: str
    role: Role


class _Document(_Part):
    participants: tuple[_Participant, ...]


class _Contract(_Part):
    document: _Document
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One finished run.

    Attributes:
        config, outcome, epochs, flows: what was asked, reached, measured and sent.
        contract_sha256: hash of what the parties agreed on; roles: of its participants, the
            active first.
        seeds, versions: for repeating the run.
        charges: by party that released anything, how often its ledger was charged.
        attacks: their results; None where none were mounted.
        examples: what attacks rebuilt, by `key_of` of their result; None: it is not to be shown.
        rebuilt: whether there is any.
    """

    path: Path
    config: Config
    outcome: Outcome
    epochs: tuple[EpochMetrics, ...]
    flows: tuple[Flow, ...]
    contract_sha256: str
    roles: Mapping[str, Role]
    seeds: Mapping[str, Any]
    versions: Mapping[str, Any]
    charges: Mapping[str, int]
    attacks: tuple[AttackResult, ...] | None
    examples: Mapping[str, Reconstruction] | None
    rebuilt: bool

    @property
    def facts(self) -> RunFacts:
        """What decides who can read what."""
        config = self.config
        return RunFacts(
            method=config.facts,
            secure_sum=config.secure_sum.name,
            passives=sum(role == Role.PASSIVE for role in self.roles.values()),
            guarded=config.guard.mechanism != "none",
            pairwise=config.alignment.mode == "pairwise",
            label_dp=config.labels.mechanism != "none",
            private=config.dp_sgd is not None,
            noisy=config.secure_sum.noise is not None,
            defended=bool(config.defences),
        )

    def title_of(self, variant: str) -> str:
        """The name for people of a way to predict, as `outcome.accuracy` names it."""
        title, suffix = self.facts.method.title, variant.removeprefix(f"{self.config.method}_")
        if variant == self.config.method:
            return title
        return variant if suffix == variant else f"{title.partition(',')[0]}-{suffix.upper()}"


def read_run(path: Path, *, examples: bool = False) -> FinishedRun:
    """Read a run folder; of what attacks rebuilt that there is some, or with `examples` itself.

    Raises:
        CheckpointError: a file is missing or not as this version writes it, or the run has not
            finished.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such run folder")
    if not (path / "result.json").is_file():
        reason = "the run has not finished; continue it with --resume" if (
            path / "config.yaml"
        ).is_file() else "it is no run folder"  # fmt: skip
        raise CheckpointError(f"{path}: has no result.json: {reason}")
    files = runs.RunFolder(path)
    files.check(
        files.config, files.contract, files.result, files.metrics, files.flows, files.seeds,
        files.versions, *files.logs(),
    )  # fmt: skip
    contract = read_json(files.contract, _Contract)
    by_role = sorted(contract.document.participants, key=lambda party: list(Role).index(party.role))
    outcome, attacks = read_json(files.result, Outcome), path / "attacks.json"
    if files.accountants.is_file():
        checks = {"accountants": read_json(files.accountants, dict[str, float | str])}
        privacy = outcome.privacy.model_copy(update=checks)
        outcome = outcome.model_copy(update={"privacy": privacy})
    return FinishedRun(
        path=path,
        config=files.load_config(),
        outcome=outcome,
        epochs=read_json_lines(files.metrics, EpochMetrics),
        flows=read_json(files.flows, tuple[Flow, ...]),
        contract_sha256=contract.sha256,
        roles={party.name: party.role for party in by_role},
        seeds=read_json(files.seeds, dict[str, Any]),
        versions=read_json(files.versions, dict[str, Any]),
        # The first line of a ledger says what it is.
        charges={
            ledger.stem.removeprefix("ledger-"): count_lines(ledger) - 1
            for ledger in sorted(path.glob("ledger-*.jsonl"))
        },
        attacks=read_json(attacks, tuple[AttackResult, ...]) if attacks.is_file() else None,
        examples=read_examples(path) if examples else None,
        rebuilt=(path / FILE).is_file(),
    )
