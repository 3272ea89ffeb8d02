"""A party's own side of a run with parties in processes of their own, read from its folder alone.

Of other parties the folder holds only what they sent or what is public, so the party's report
cannot show more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apfed_attacks.interface import AttackResult
from apfed_experiments import words
from apfed_experiments.report.who_learns import Role, RunFacts
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.alignment.overlap import CommonPeople
from secure_apfed.base.files import count_lines, load_json
from secure_apfed.base.formats import STATEMENT
from secure_apfed.config import Config
from secure_apfed.contract import Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Flow
from secure_apfed.methods.privacy_reports import SignedReport
from secure_apfed.runs.audit_log import AUDIT_LOG_NAME, LogSummary, verify_log
from secure_apfed.runs.checkpoint_store import PartyEnd
from secure_apfed.runs.folder import PartyFolder, RunFolder, load_contract
from secure_apfed.runs.outcome import Outcome, StoredResult, load_common_people
from secure_apfed.settings.promises import (
    NO_PRIVACY_SPENT,
    Promise,
    derive_guarantee,
    find_party_guarantee,
)

_REASON_TO_KEEP_BY_FILE: Mapping[str, str] = {
    "identity.pem": "always, with a copy, for nobody else's eyes: nobody can restore it",
    "contract.json": "always: what all parties signed",
    "statements.json": "always: what the passives signed that they charged",
    AUDIT_LOG_NAME: "as long as anybody may ask what was sent",
    "counters.json": "as long as the audit log, which is believed only with it",
    "ledger-*.jsonl": "as long as its people count on the epsilon: what was spent stands there",
    "answers-*.jsonl": "as the ledgers: how often each row was answered",
    "circles-*.jsonl": "until the run is over: no step is answered among others",
    "model.safetensors": "as long as the model predicts, with model.json",
    "joint.safetensors": "as long as it serves joint predictions; without it, it serves none",
    "attacks.json": "for this party alone: it tells how well its rows are guessed",
    "table.safetensors": "not at all: a copy of its rows for a trial",
}


@dataclass(frozen=True, kw_only=True)
class OwnSide:
    """What a party's own folder holds of a run in which each party had a process of its own.

    Attributes:
        path: the party's folder.
        end: how the party's part of the run ended.
        log: summary of the party's audit log; None: there is none, or it fails verification.
        log_error: why `log` is None; empty if it is not.
    """

    path: Path
    end: PartyEnd
    log: LogSummary | None
    log_error: str = ""

    @property
    def name(self) -> str:
        """Return the party's name."""
        return self.end.party

    @classmethod
    def from_folder(cls, path: Path) -> "OwnSide | None":
        """Return what a party's folder holds; None: it is no party's folder, or the party's part
        has not ended.
        """
        end_path = PartyFolder(path).party_end
        if not end_path.is_file():
            return None
        log = None
        log_error = "there is none"
        if (path / AUDIT_LOG_NAME).is_file():
            try:
                log = verify_log(path)
            except CheckpointError as error:
                log_error = str(error)
        return cls(path=path, end=load_json(end_path, PartyEnd), log=log, log_error=log_error)

    def iter_log_rows(self) -> Iterator[tuple[str, str]]:
        """Yield title and text on the audit log, or why it is not valid.

        The rows are its last chain value (hash over all lines), signature, sessions and traffic.
        """
        log = self.log
        if log is None:
            yield "audit log", self.log_error
            return
        unsigned_text = f"{log.unsigned:,} lines after its last signature, torn bytes: {log.torn:,}"
        yield "last chain value", log.head
        yield "its end", "signed by the identity" if log.has_final_signature else unsigned_text
        yield "identity", log.identity
        yield "lines", f"{words.format_count(log.lines)}, all chained"
        yield "sessions", f"{log.agreed} agreed, in {log.opened} starts of its process"
        for event in ("sent", "received"):
            flows = [flow for flow in log.flows if flow.event == event]
            size = words.format_size(sum(flow.size for flow in flows))
            envelopes = words.format_count(sum(flow.envelopes for flow in flows))
            yield event, f"{envelopes} envelopes, {size}"

    def iter_kept_files(self) -> Iterator[tuple[str, str]]:
        """Yield the files in the folder that the party should keep, each with how long and why."""
        for name, reason in _REASON_TO_KEEP_BY_FILE.items():
            if any(self.path.glob(name)):
                yield name, reason

    def list_guarantees(self, config: Config, role: str) -> tuple[Promise, ...]:
        """Return the guarantees of this party to the people in its table, by its own ledgers.

        `config`: settings of the run. `role`: role of this party. Without a ledger the result is a
        single entry, which says why nothing is guaranteed or why nothing needs a guarantee.
        """
        privacy = self.end.privacy
        contributions = self.end.contributions
        spent_by_epsilon: list[
            dict[str, Any]
        ] = []  # what the party spent, one entry for each epsilon
        if contributions is not None:
            spent_by_epsilon.append(contributions.model_dump())
        if privacy is not None:
            spent_by_epsilon.append(
                {
                    "figure": "epsilon_x",
                    "epsilon": privacy.epsilon_x,
                    "delta": privacy.delta,
                    "releases": privacy.releases,
                }
            )
        if not spent_by_epsilon:
            return (find_party_guarantee(config, role, ()),)
        return tuple(map(derive_guarantee, spent_by_epsilon))


class _StoredContract(StoredResult):
    """The file of a run's contract: what all parties signed, and its hash."""

    document: Contract
    sha256: str


def list_signed_reports(outcome: Outcome, folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield title and text of the epsilons that each passive states for its messages.

    The passives' statements are in `statements.json` of the run's folder. The text says whether the
    signature is valid and is for this run's contract.
    """
    # Simulated passives sign nothing.
    if not outcome.stated:
        return
    report_by_passive = load_signed_reports(folder.statements)
    contract = load_contract(folder.contract, _StoredContract).document
    identity_by_party = {party.name: party.identity for party in contract.participants}
    for name in outcome.stated:
        title = f"stated by {name}"
        signed_report = report_by_passive.get(name)
        if signed_report is None:
            yield title, "nothing: it never said what it charged"
            continue
        try:
            spent = signed_report.verify_costs(name)
        except RemoteProtocolError as error:
            yield title, f"NOT SIGNED: {error}"
            continue
        has_identity = signed_report.identity == identity_by_party.get(name)
        has_contract = signed_report.contract == contract.digest.hex()
        signature_text = f"signed before step {signed_report.step}"
        if not has_identity or not has_contract:
            signature_text = (
                "NOT OF THIS CONTRACT: signed by another identity, or for another session"
            )
        guarantees = [derive_guarantee(account.model_dump()) for account in spent]
        guarantees_text = "; ".join(
            f"{promise.format_title()} {promise.text}" for promise in guarantees
        )
        yield title, f"{guarantees_text or NO_PRIVACY_SPENT}, {signature_text}"


@dataclass(frozen=True, kw_only=True)
class ReportedParty:
    """A passive with everything that its report shows, read from its own folder.

    Attributes:
        config, contract: settings and contract of the run.
        contract_sha256: hash of the contract.
        flows: numbers and bytes of messages by sender, receiver and kind.
        charges: number of privacy costs recorded, by ledger.
        attacks: results of attacks that the passive ran on its own messages; None: it ran none.
        own_side: how the passive's part ended, and its audit log.
        common_people: number of people that the parties have in common.
    """

    config: Config
    contract: Contract
    contract_sha256: str
    flows: tuple[Flow, ...]
    charges: Mapping[str, int]
    attacks: tuple[AttackResult, ...] | None
    own_side: OwnSide
    common_people: tuple[CommonPeople, ...] = ()

    @property
    def roles(self) -> Mapping[str, Role]:
        """Return the role of each party by name, the active first."""
        role_order = list(Role)
        role_by_party = {party.name: Role(party.role) for party in self.contract.participants}
        return dict(sorted(role_by_party.items(), key=lambda item: role_order.index(item[1])))

    @property
    def facts(self) -> RunFacts:
        """Return the facts of the run that decide who can read what."""
        passives = list(self.roles.values()).count(Role.PASSIVE)
        return RunFacts.from_settings(
            self.config, passive_count=passives, is_in_separate_processes=True
        )

    @property
    def guarantee_rows(self) -> tuple[tuple[str, str], ...]:
        """The guarantees of this party to the people in its table, as title and text."""
        promises = self.own_side.list_guarantees(self.config, str(self.roles[self.own_side.name]))
        return tuple(
            (promise.format_title(names_fixed_part=True), promise.sentence) for promise in promises
        )

    def iter_limit_rows(self) -> Iterator[tuple[str, str]]:
        """Yield title and text of the common people, and of the limits that all parties have
        signed.

        The limits are on what this party sends: its gradients and votes.
        """
        contract = self.contract
        rules = self.config.rules
        for people in self.common_people:
            yield "people", people.sentence
            if people.warning:
                yield "IDs that hardly ever matched", people.warning
        yield (
            "rows of a batch",
            f"{contract.minimum_batch} to {words.format_count(contract.batch_size)}",
        )
        yield "epochs", words.format_count(contract.epochs)
        # "refused_sums" limits the active alone.
        for name, value in rules.model_dump().items():
            if name != "refused_sums" and value is not None:
                yield words.format_key(name), words.format_value(value)


def load_signed_reports(path: Path) -> Mapping[str, SignedReport]:
    """Return the passives' signed statements by name; empty if there are none.

    `path`: the file `statements.json`. Raises an error if a statement's format is unknown.
    """
    if not path.exists():
        return {}
    # Called for the exception only: a statement of another format version is refused.
    for signed_report in load_json(path, dict[str, Any]).values():
        STATEMENT.parse_format_number(path, signed_report)
    return load_json(path, dict[str, SignedReport])


def load_party(path: Path) -> ReportedParty | None:
    """Return the passive whose folder this is; None: it is no passive's, or its part has not ended.

    Raises CheckpointError: a file is missing, since the process was killed before it wrote all.
    """
    folder = RunFolder(path)
    own_side = OwnSide.from_folder(path)
    # A folder with the run's result is no passive's.
    if own_side is None or folder.result.is_file():
        return None
    for file in (folder.config, folder.contract, folder.message_flows):
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing: {own_side.name} was ended before it wrote all of its part; "
                "its audit log says what it sent (secure-apfed audit-log verify)"
            )
    contract = load_contract(folder.contract, _StoredContract)
    attacks_path = path / "attacks.json"
    return ReportedParty(
        config=folder.load_config(),
        contract=contract.document,
        contract_sha256=contract.sha256,
        flows=load_json(folder.message_flows, tuple[Flow, ...]),
        charges=count_charges(folder),
        attacks=load_json(attacks_path, tuple[AttackResult, ...])
        if attacks_path.is_file()
        else None,
        own_side=own_side,
        common_people=load_common_people(folder),
    )


def count_charges(folder: RunFolder) -> dict[str, int]:
    """Return the number of recorded privacy costs by ledger, in this folder and its parties'."""
    ledgers = [log for log in folder.list_logs() if log.name.startswith("ledger-")]
    # The first line of a ledger is its header.
    return {log.stem.removeprefix("ledger-"): count_lines(log) - 1 for log in ledgers}
