"""A finished run, read once from its folder: all that a report is made from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apfed_experiments.finished import (
    FILE,
    FinishedRun,
    Reconstruction,
    read_examples,
    read_finished_run,
)
from apfed_experiments.report.who_learns import Role, RunFacts
from secure_apfed.config import Config
from secure_apfed.exchange import Flow
from secure_apfed.files import count_lines, read_json, read_json_lines
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Epsilon, Written, scores_of
from secure_apfed.secure_sums import sum_kind

__all__ = ["EpochMetrics", "ReportedRun", "read_run"]


class EpochMetrics(Written):
    """One line of metrics.jsonl."""

    epoch: int
    step: int
    loss: float | None = None
    accuracy: Mapping[str, float] | None = None
    measures: Mapping[str, Mapping[str, float]] | None = None
    epsilon: Epsilon = math.inf
    wire_bytes: int = 0
    seconds: float = 0.0

    def scores(self, measure: str) -> dict[str, float]:
        """One measure by inference variant; empty where the epoch was not evaluated."""
        return scores_of(measure, self.accuracy or {}, self.measures or {})


class _Participant(Written):
    name: str
    role: Role


class _Document(Written):
    participants: tuple[_Participant, ...]


class _Contract(Written):
    document: _Document
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ReportedRun(FinishedRun):
    """One finished run, with all that a report is made from.

    Attributes:
        path: its folder.
        epochs, flows: what was measured and sent.
        contract_sha256: hash of what the parties agreed on; roles: of its participants, the
            active first.
        seeds, versions: for repeating the run.
        charges: by party that released anything, how often its ledger was charged.
        examples: what attacks rebuilt, by `key_of` of their result; None: it is not to be shown.
        rebuilt: whether there is any.
    """

    path: Path
    epochs: tuple[EpochMetrics, ...]
    flows: tuple[Flow, ...]
    contract_sha256: str
    roles: Mapping[str, Role]
    seeds: Mapping[str, Any]
    versions: Mapping[str, Any]
    charges: Mapping[str, int]
    examples: Mapping[str, Reconstruction] | None
    rebuilt: bool

    @property
    def facts(self) -> RunFacts:
        """What decides who can read what."""
        config = self.config
        return RunFacts(
            happens=config.method.happens,
            secure_sum=sum_kind(config.secure_sum).name,
            passives=sum(role == Role.PASSIVE for role in self.roles.values()),
            guarded=config.guard.mechanism != "none",
            pairwise=config.alignment.mode == "pairwise",
            label_dp=config.labels.mechanism != "none",
            private=config.dp_sgd is not None,
            noisy=_noise(config) is not None,
            inductive=config.method.inductive,
            labelled_passives=bool(config.data.labels_at),
            defended=bool(config.defences),
            apart=self.outcome.apart,
            shared_seeds=config.party_seeds == "shared_for_comparison",
        )

    @property
    def helped(self) -> bool:
        """Whether passives took part."""
        return "passives take part" in self.config.method.happens

    def title_of(self, variant: str) -> str:
        """The name for people of a way to predict, as `outcome.accuracy` names it."""
        title, suffix = (
            self.config.method.title,
            variant.removeprefix(f"{self.config.method.name}_"),
        )
        if variant == self.config.method.name:
            return title
        return variant if suffix == variant else f"{title.partition(',')[0]}-{suffix.upper()}"


def _noise(config: Config) -> object:
    """What passives add to what they let out, as its settings say; None: nothing."""
    return config.method.noise(config)


def read_run(path: Path, *, examples: bool = False) -> ReportedRun:
    """Read a run folder; of what attacks rebuilt that there is some, or with `examples` itself.

    Raises:
        CheckpointError: a file is missing or not as this version writes it, or the run has not
            finished.
    """
    finished, files = read_finished_run(path), RunFolder(path)
    files.check(
        files.contract, files.metrics, files.flows, files.seeds, files.versions, *files.logs()
    )
    contract = read_json(files.contract, _Contract)
    by_role = sorted(contract.document.participants, key=lambda party: list(Role).index(party.role))
    return ReportedRun(
        path=path,
        config=finished.config,
        outcome=finished.outcome,
        attacks=finished.attacks,
        solo=finished.solo,
        epochs=read_json_lines(files.metrics, EpochMetrics),
        flows=read_json(files.flows, tuple[Flow, ...]),
        contract_sha256=contract.sha256,
        roles={party.name: party.role for party in by_role},
        seeds=read_json(files.seeds, dict[str, Any]),
        versions=read_json(files.versions, dict[str, Any]),
        # The first line of a ledger says what it is.
        charges={
            ledger.stem.removeprefix("ledger-"): count_lines(ledger) - 1
            for ledger in files.logs()
            if ledger.name.startswith("ledger-")
        },
        examples=read_examples(path) if examples else None,
        rebuilt=(path / FILE).is_file(),
    )
