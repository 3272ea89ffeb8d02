"""The command `project check`: tests whether a party could start a run now, by its files and its
connections.

Part of the composition root. It connects to peers that listen, and both ends prove their identity.
With --meet all parties run it at once, connect as for a run, and compare contracts, versions and
clocks. The patterns of a table's IDs and their shares are sent, nothing else of it. Nothing is
written, and a run in progress continues.
"""

import datetime as dt
import re
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgpack
import typer

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.base.faults import describe_pasting
from secure_apfed.commands import AsJson, Finding, State
from secure_apfed.console import progress, terminal
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from secure_apfed.data import OwnData
    from secure_apfed.exchange import Links
    from secure_apfed.organisations.party import Connect
    from secure_apfed.organisations.project import SealedProject

_RENEWAL_DAYS = 30
_MIN_FREE_BYTES = 2**30
_MAX_CLOCK_DIFFERENCE_S = 300.0
_NOT_RUNNING_CAUSES = ("nobody listens there", "reached nobody", "did not come to the relay")
# Exit codes, as of a run that meets the same error.
_SETTINGS_EXIT_CODE = 2
_DATA_EXIT_CODE = 3
_REFUSED_EXIT_CODE = 4
SUBMIT_CHECK = (
    "start all sites, then the organiser submits nvflare/job-check of its folder, and check.txt of "
    "each party's folder says what was found"
)
_PATTERNS_KEY = "patterns of IDs"
_MAX_PATTERNS = 12
_MAX_PATTERN_LENGTH = 64
# Marks for kinds of characters, and the code points of invisible characters.
_PATTERN_OF_MARKS = re.compile(r"A?a?(?:0?9)?|#")
_CODE_POINT = re.compile(r"U\+[0-9A-F]{4,6}")
_CHECK_ERRORS = (ApfedError, LocalProtocolError, RemoteProtocolError, OSError, EOFError)
_PROPOSE_AGAIN = (
    "a sealed project keeps its settings, so the organiser proposes another one, and all join it, "
    "in new folders"
)
_MARK_BY_STATE = {"ok": "ok", "optional": "note", "missing": "WRONG"}


def check(
    config: Annotated[Path, typer.Option(metavar="PARTY.yaml", help="The party's settings file.")],
    meet: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=86_400,
            help="Also connect to all other parties, which run the same command, within this "
            "number of seconds.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a party is ready to run: its files, and whether it reaches the others.

    A peer that is not running yet is not an error. If there is an error, the exit code is that of
    a run that meets it.
    """
    checks = Checks(config, is_quiet=as_json)
    findings = list(checks.run_checks(meet))
    if as_json:
        reported = [
            {**asdict(finding), "state": _MARK_BY_STATE[finding.state].lower()}
            for finding in findings
        ]
        terminal.print_json(
            {
                "party": checks.file.party,
                "code": checks.code,
                "findings": reported,
                "settings": checks.settings,
            }
        )
    else:
        title = f"{checks.file.party}: {'not ready' if checks.code else 'ready'}"
        rows = [
            (_MARK_BY_STATE[finding.state], finding.name, finding.value) for finding in findings
        ]
        terminal.show_rows(title, ("", "what", "found"), rows)
        if checks.settings:
            terminal.show_remedy(describe_pasting(str(checks.file.config)), checks.settings)
    if checks.code:
        raise typer.Exit(checks.code)


class Checks:
    """The checks of whether one party is ready to start a run.

    Attributes:
        path: path of the party's file.
        file: content of the party's file.
        config: settings of the run.
        role: the party's role in the run: active, passive, aggregator or dealer.
        identity: the party's long-term key pair.
        identities: public identity of each peer, by name.
        is_quiet: whether no progress is printed.
        connect: connects the party to all others; None: connect as the party's file says.
        code: exit code of the first failed check; 0: none failed.
        faults: faults of tables, found so far.
        patterns: how many IDs of the party's table are written in each pattern (kinds of characters
            in place of the characters); set by the check of the table.
        sealed: the sealed project, which holds what all parties agreed on; None: there is none in
            the party's folder.
    """

    def __init__(
        self, path: Path, *, is_quiet: bool = False, connect: "Connect | None" = None
    ) -> None:
        """Load the party's file, settings, role, identity and sealed project.

        `path`: path of the party's file. `is_quiet`: print no progress. `connect`: connects the
        party to all others; None: connect as the party's file says.

        Raises ConfigError: a file is wrong, or the folder has no identity.
        """
        from secure_apfed.base.faults import FaultList
        from secure_apfed.config.file import load_config
        from secure_apfed.organisations.party import PartyFile, determine_role
        from secure_apfed.organisations.project import SealedProject, SignedFile
        from secure_apfed.runs.folder import SEALED_PROJECT, PartyFolder

        self.path = path
        self.is_quiet = is_quiet
        self.connect = connect
        self.faults = FaultList()
        self.patterns: dict[str, int] = {}
        self.file = file = PartyFile.from_file(path)
        self.config = load_config(file.config)
        self.code = 0
        self.role = determine_role(file, self.config)
        if not (file.folder / "identity.pem").is_file():
            raise ConfigError(f"{file.folder} holds no identity.pem; put it back, or answer anew")
        self.identity = PartyFolder(file.folder).load_identity()
        self.identities = {name: bytes.fromhex(peer.identity) for name, peer in file.peers.items()}
        sealed_path = file.folder / SEALED_PROJECT
        self.sealed: SealedProject | None = None
        if sealed_path.exists():
            signed = SignedFile.from_file(sealed_path)
            self.sealed = signed.open_document(SealedProject, sealed_path)

    @property
    def settings(self) -> str:
        """The settings that repair the tables' faults, as YAML to paste into the run's file; "" if
        there are none.
        """
        from secure_apfed.base.faults import TableError

        return TableError(self.faults.faults).settings

    def run_checks(self, meet_s: float | None) -> Iterator[Finding]:
        """Run all checks and yield their findings; `code` is set by the first that fails.

        Checks of the party's own files come first. Connections are tried only if none of these
        failed.

        `meet_s`: seconds within which all parties connect to each other; None: only peers that
        already listen are tried.
        """
        text = f"{self.role} of {self.config.method.title}, version {_get_version()}"
        yield Finding("settings", "settings", "ok", text)
        local_checks = {
            "limits": self._check_limits,
            "contract": self._check_contract,
            "table": self._check_table,
            "others tables": self._check_other_tables,
            "folder": self._check_folder,
            "certificate": self._check_certificate,
        }
        for name, run_check in local_checks.items():
            yield from self._try_check(name, run_check)
        if meet_s is not None and self.file.link == "nvflare" and self.connect is None:
            # Only inside a job of NVFlare can the parties connect, which then gives `connect`.
            self.code = self.code or _SETTINGS_EXIT_CODE
            text = f"the parties of a job of NVFlare's meet inside it: {SUBMIT_CHECK}"
            yield Finding("meeting", "meeting", "missing", text)
        elif meet_s is not None and not self.code:
            yield from self._try_check("meeting", partial(self._meet_peers, meet_s))
        elif not self.code:
            yield from self._try_check("peers", self._check_peers)
            # Clocks and versions are compared only if all parties connect at once.
            advice = (
                f"compared inside NVFlare: {SUBMIT_CHECK}"
                if self.file.link == "nvflare"
                else "compared by project check --meet 60"
            )
            yield Finding("peers", "clock, version", "optional", advice)

    def _try_check(
        self, name: str, run_check: Callable[[], Iterator[Finding]]
    ) -> Iterator[Finding]:
        """Run one check; yield its findings, its failure, and its warnings.

        A failure sets `code`, unless an earlier check has failed.

        `name`: name of the check, for its findings. `run_check`: yields the check's findings.
        """
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            try:
                # A list, so that the whole check runs within this block, which catches warnings.
                yield from list(run_check())
            except _CHECK_ERRORS as error:
                self.code = self.code or terminal.describe_failure(error).code
                yield from self._describe_failure(name, error)
        yield from (
            Finding(name, name, "optional", str(warning.message)) for warning in caught_warnings
        )

    def _describe_failure(self, name: str, error: Exception) -> Iterator[Finding]:
        """Yield a finding for the error of a check, or for each fault of a table.

        A table's faults are also added to `faults`. `name`: name of the check.
        """
        from secure_apfed.base.faults import TableError

        if not isinstance(error, TableError):
            yield Finding(name, name, "missing", str(error))
            return
        self.faults.add_error(error)
        for fault in error.faults:
            yield Finding(name, name, "missing", fault.message)

    def _check_limits(self) -> Iterator[Finding]:
        """Check the run's settings against the limits that the party set in its own file.

        Yields notes on settings that protect less than their defaults, and on organisations that
        run several parties. Raises ConfigError: a limit is exceeded.
        """
        from secure_apfed.organisations.party import require_own_limits
        from secure_apfed.settings.protection import find_weakened_settings

        require_own_limits(self.file, self.config)
        for departure in find_weakened_settings(self.config):
            consequence = f"protects {departure.whom}: {departure.means}"
            text = f"{departure.value}, {departure.default_phrase}; {consequence}"
            yield Finding("limits", departure.setting, "optional", text)
        conflicts = self.sealed.proposal_document.conflicts if self.sealed else ()
        for organisation, conflict in conflicts:
            names = " and ".join(conflict.party_names)
            text = f"{organisation} runs {names}: they {conflict.gained_ability}"
            yield Finding("limits", "one organisation", "optional", text)

    def _check_contract(self) -> Iterator[Finding]:
        """Check that the contract this party would sign agrees with the sealed project.

        Link, identities, signed settings and the choice of the intersection protocol are compared.
        Raises ConfigError: one of them differs. Without a sealed project a note says so.
        """
        from secure_apfed.organisations.project import require_agreed_link
        from secure_apfed.runs.folder import SEALED_PROJECT

        require_agreed_link(self.file)
        if self.sealed is None:
            text = f"{self.file.folder} holds no {SEALED_PROJECT} to compare with"
            yield Finding("contract", "contract", "optional", text)
            return
        self._require_sealed_identities(self.sealed)
        self._require_sealed_settings(self.sealed)
        yield Finding("contract", "contract", "ok", f"as in {self.sealed.project_words}")

    def _require_sealed_identities(self, sealed: "SealedProject") -> None:
        """Raise ConfigError if this party knows another public key of a party than the project."""
        from secure_apfed.runs.folder import SEALED_PROJECT

        file = self.file
        identities = {**self.identities, file.party: self.identity.public}
        sealed_identities = {
            name: answer.identity for name, answer in sealed.answer_documents.items()
        }
        mismatched = [
            name for name, key in identities.items() if sealed_identities.get(name) != key.hex()
        ]
        if mismatched:
            raise ConfigError(
                f"{file.party} knows another identity of {', '.join(mismatched)} than the sealed "
                f"project: join {file.folder / SEALED_PROJECT} again, or put identity.pem back"
            )

    def _require_sealed_settings(self, sealed: "SealedProject") -> None:
        """Raise ConfigError if this party's settings of the run differ from the sealed project.

        Compared are the settings that all parties sign in the contract, and two that are not signed
        but decide what others learn of each party's IDs.
        """
        from secure_apfed.exchange.agreement import find_differences
        from secure_apfed.organisations.project import list_shared_settings

        file = self.file
        own_terms = self.config.collect_terms()
        sealed_terms = sealed.proposal_document.build_config().collect_terms()
        differences = list(find_differences(own_terms, sealed_terms))
        if differences:
            raise ConfigError(
                f"{file.config} differs from the sealed project in {', '.join(differences)}, which "
                "all sign; nobody would begin"
            )
        own_alignment = list_shared_settings(self.config).get("alignment", {})
        agreed_alignment = sealed.proposal_document.settings.get("alignment", {})
        for key in ("pairwise_overlaps", "dealer"):
            if own_alignment.get(key) != agreed_alignment.get(key):
                raise ConfigError(
                    f"{file.config} differs from the sealed project in alignment.{key}, which was "
                    f"proposed to all: put {agreed_alignment.get(key, 'nothing')!r} back"
                )

    def _check_table(self) -> Iterator[Finding]:
        """Load the party's table; yield its rows, columns, ID patterns and labels, as far as it has
        them; nothing for a party without a table.
        """
        from secure_apfed.organisations.party import load_party_data

        data = load_party_data(self.file, self.config, self.role)
        if data is None:
            return
        text = (
            f"{len(data.table.ids):,} rows, no ID twice, {data.table.features[0].numel()} features"
        )
        yield Finding("table", "table", "ok", text)
        yield self._describe_columns(data)
        if self.config.method.needs_alignment:
            yield from self._describe_patterns(data.table.ids)
        if data.table.labels is not None:
            text = (
                f"{len(data.labelled_rows):,} rows to learn from, {len(data.test_rows):,} to test"
            )
            classes = f"; classes {', '.join(data.classes)}" if data.classes else ""
            yield Finding("table", "labels", "ok", f"{text}{classes}")

    def _describe_columns(self, data: "OwnData") -> Finding:
        """Return a finding with the columns that are features, by kind (such as numeric), and those
        left out; or that features are arrays or images.
        """
        encoding = data.table.encoding
        if encoding.kind == "array":
            shape = " x ".join(map(str, encoding.shape))
            return Finding("table", "features", "ok", f"rows of {shape} numbers, as they are")
        if encoding.kind != "columns":
            return Finding("table", "features", "ok", "images")
        names_by_kind: dict[str, list[str]] = {}
        for column in encoding.columns:
            names_by_kind.setdefault(column.kind, []).append(column.name)
        texts = [f"{kind}: {', '.join(names)}" for kind, names in names_by_kind.items()]
        own_settings = (self.config.data.parties or {}).get(self.file.party)
        if own_settings is not None and own_settings.ignore:
            texts.append(f"left out by ignore: {', '.join(own_settings.ignore)}")
        return Finding("table", "features", "ok", "; ".join(texts))

    def _describe_patterns(self, ids: Sequence[str]) -> Iterator[Finding]:
        """Count the patterns in which the IDs are written, after the agreed normalisation, and set
        `patterns`.

        IDs that the parties write in different patterns never match. Yields the patterns, and
        normalisation rules that would turn several of them into one.
        """
        from apfed_protocols.id_patterns import (
            LEGEND,
            count_patterns,
            describe_patterns,
            suggest_rules,
        )
        from apfed_protocols.ids import decode_id
        from secure_apfed.alignment import canonical_ids
        from secure_apfed.alignment.ids import make_id_rules
        from secure_apfed.alignment.overlap import propose_rules

        settings = self.config.alignment
        normalised_ids = canonical_ids(self.file.party, ids, settings)  # bytes
        self.patterns = count_patterns(list(map(decode_id, normalised_ids)))
        text = f"written as {describe_patterns(self.patterns)} ({LEGEND})"
        yield Finding("table", "IDs", "ok", text)
        if remedy := propose_rules(suggest_rules(ids, make_id_rules(settings)), settings):
            text = f"if these are spellings of one kind of ID, {remedy}"
            yield Finding("table", "IDs", "optional", text)

    def _check_other_tables(self) -> Iterator[Finding]:
        """Check tables of other parties whose files are on this machine, as in a simulation.

        Raises TableError: tables have faults; it lists all of them.
        """
        from secure_apfed.base.faults import Fault, TableError
        from secure_apfed.data.tables import find_table_faults, has_table_here

        faults = list[Fault]()
        for name in self.config.data.parties or {}:
            if name != self.file.party and has_table_here(self.config.data, name):
                table_faults = find_table_faults(self.config.data, name, seed=self.config.seed)
                faults += table_faults
                if not table_faults:
                    yield Finding("table", f"table of {name}", "ok", "read here, too: no fault")
        if faults:
            raise TableError(faults)

    def _check_folder(self) -> Iterator[Finding]:
        """Check the party's folder: its project has not ended, it is private, and the disk has
        space.

        Raises CheckpointError: one of these does not hold.
        """
        from secure_apfed.runs.folder import require_open_project

        folder = self.file.folder
        tls = self.file.tls
        require_open_project(folder)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < _MIN_FREE_BYTES:
            raise CheckpointError(
                f"{folder} has {terminal.format_size(free_bytes)} left; make room for 1 GB"
            )
        private_paths = [folder, folder / "identity.pem"]
        if tls is not None:
            private_paths.append(tls.key)
        for path in private_paths:
            rights_of_others = path.stat().st_mode & 0o077 if path.exists() else 0
            if rights_of_others:
                raise CheckpointError(f"others may read {path}; shut it: chmod go-rwx {path}")
        text = f"its owner's alone, {terminal.format_size(free_bytes)} free"
        yield Finding("folder", "folder", "ok", text)

    def _check_certificate(self) -> Iterator[Finding]:
        """Check the party's TLS files and revocation list, and yield the days until its certificate
        expires; nothing without TLS.
        """
        from cryptography.x509 import load_pem_x509_certificate

        from secure_apfed.exchange.certificates import RENEWAL, Credentials, load_revocations
        from secure_apfed.runs.folder import load_project_end

        tls = self.file.tls
        if tls is None or load_project_end(self.file.folder) is not None:
            return  # an ended project has no certificate any more
        yield from self._check_revocations()
        yield from self._compare_certificates()
        revoked = load_revocations(tls.revoked)
        credentials = Credentials.from_files(
            tls.ca, tls.certificate, tls.key, name=self.file.party, revoked=revoked
        )
        expires_at = load_pem_x509_certificate(credentials.certificate).not_valid_after_utc
        days = (expires_at - dt.datetime.now(dt.UTC)).days
        text = f"{days} days left"
        if days >= _RENEWAL_DAYS:
            yield Finding("certificate", "certificate", "ok", text)
        else:
            text += f", until {expires_at:%Y-%m-%d %H:%M} UTC; {RENEWAL}"
            yield Finding("certificate", "certificate", "optional", text)

    def _check_revocations(self) -> Iterator[Finding]:
        """Check that the party's file names its revocation list, and yield which parties the list
        revokes.

        Raises ConfigError: a list beside the party's file revokes something, but is not named.
        """
        from secure_apfed.exchange.certificates import load_revocations
        from secure_apfed.organisations.revocation import find_revoked_names, find_unread_lists

        assert self.file.tls is not None
        path = self.file.tls.revoked
        unread_lists = find_unread_lists(self.file)
        if unread_lists:
            raise ConfigError(
                f"{', '.join(map(str, unread_lists))} revokes something, and tls.revoked of "
                f"{self.path} names {path or 'no list'}, so it protects nobody: name it there, or "
                "remove it"
            )
        if path is None:
            text = f"tls.revoked of {self.path} names no list: a stolen key cannot be revoked here"
            yield Finding("certificate", "revoked", "optional", text)
            return
        revoked = load_revocations(path)
        names = find_revoked_names(self.file, revoked)
        text = f"{path} names {len(revoked)}"
        if names:
            text += f", among them {', '.join(names)}, with whom nothing can begin"
        yield Finding("certificate", "revoked", "optional" if names else "ok", text)

    def _compare_certificates(self) -> Iterator[Finding]:
        """Yield a note if this party's certificate or authority is not that of the sealed project,
        for example since the project was sealed again.
        """
        from secure_apfed.organisations.revocation import find_newest_pem
        from secure_apfed.runs.folder import SEALED_PROJECT

        tls = self.file.tls
        sealed = self.sealed
        if tls is None or sealed is None or self.file.party not in sealed.certificates:
            return
        certificate = tls.certificate.read_text(encoding="utf-8", errors="replace")
        authorities = tls.ca.read_text(encoding="utf-8", errors="replace")
        # The sealed one, unless the organiser renewed it afterwards.
        newest_certificate = find_newest_pem(
            self.file.folder, self.file.party, sealed.certificates[self.file.party]
        )
        if certificate != newest_certificate or sealed.ca not in authorities:
            text = (
                f"{tls.certificate} or {tls.ca} is not the one of "
                f"{self.file.folder / SEALED_PROJECT}: where no authority of your own renewed it, "
                "join that file again"
            )
            yield Finding("certificate", "sealed certificate", "optional", text)

    def _check_peers(self) -> Iterator[Finding]:
        """Connect to each peer that this party dials; yield whether it listens and proves its
        identity.

        A peer that does not listen yet is a note. Any other failure sets `code`. Links that cannot
        be dialled outside of a run yield nothing.
        """
        from secure_apfed.organisations.party import ROUTES_BY_LINK

        file = self.file
        if file.link not in ROUTES_BY_LINK:
            return
        link = ROUTES_BY_LINK[file.link](file, self.identity, self.identities)
        for name in file.peers:
            state: State = "optional"
            if not link.needs_dialling(name):
                text = "it dials this party, which project check --meet 60 tries"
            else:
                try:
                    link.dial_and_prove(name).close()
                    state = "ok"
                    text = "reached, and it is who it should be"
                except (OSError, EOFError, RemoteProtocolError) as error:
                    text = str(error)
                    is_not_running = any(cause in text for cause in _NOT_RUNNING_CAUSES)
                    if not is_not_running:
                        state = "missing"
                        self.code = _REFUSED_EXIT_CODE
            yield Finding("peers", f"{name} by relay" if file.relay else name, state, text)

    def _meet_peers(self, meet_s: float) -> Iterator[Finding]:
        """Connect to all other parties as for a run; compare versions, settings, sealed projects,
        clocks and ID patterns.

        `meet_s`: seconds to wait for the others. Raises RemoteProtocolError: something differs.
        """
        from secure_apfed.organisations.project import digest_content

        own_facts = {
            "version": _get_version(),
            "settings": digest_content(self.config.collect_terms()).hex(),
            "sealed project": self.sealed.digest.hex() if self.sealed else "",
        }
        own_report: dict[str, Any] = dict(own_facts)
        own_shares = compute_pattern_shares(self.patterns)
        if own_shares:
            own_report[_PATTERNS_KEY] = own_shares
        reports = self._connect_and_exchange(own_report, meet_s)
        for name, (report, clock_difference_s) in reports.items():
            self._require_same_facts(name, report, own_facts)
            if clock_difference_s > _MAX_CLOCK_DIFFERENCE_S:
                raise RemoteProtocolError(
                    f"the clocks of {name} and {self.file.party} are {clock_difference_s:,.0f} s "
                    "apart; set them"
                )
            text = (
                f"met, with the same {', '.join(own_facts)}; clocks within "
                f"{clock_difference_s + 1:.0f} s"
            )
            yield Finding("meeting", name, "ok", text)
        patterns_by_peer = {
            name: parse_patterns(report[_PATTERNS_KEY], sender=name)
            for name, (report, _) in reports.items()
            if _PATTERNS_KEY in report
        }
        if own_shares:
            yield from self._compare_patterns(own_shares, patterns_by_peer)

    def _connect_and_exchange(
        self, own_report: Mapping[str, Any], meet_s: float
    ) -> dict[str, tuple[dict[str, Any], float]]:
        """Connect to all peers, send them this party's report, and return their reports by name,
        each with the difference between the two clocks in seconds.

        `meet_s`: seconds to wait for the others.
        """
        from secure_apfed.exchange import Links, StatusTracker, run_role
        from secure_apfed.organisations.party import connect_peers

        file = self.file
        peers = list(file.peers)
        waiting_file = file.model_copy(update={"meet_s": meet_s})
        status = StatusTracker()
        status.start_session(file.party, peers, None, meeting_timeout_s=meet_s)
        board = progress.Board(lambda: (status.build_status(),))
        with progress.show_board(board, as_json=self.is_quiet):
            connect = self.connect or connect_peers
            transport = connect(
                waiting_file, self.identity, self.identities, status.observe_missing
            )
        links = Links(file.party, peers, transport.send_frame)
        exchange = _exchange_reports(links, peers, own_report)
        return run_role(exchange, links, transport, timeout_s=file.timeout_s)

    def _require_same_facts(
        self, peer: str, report: Mapping[str, Any], own_facts: Mapping[str, str]
    ) -> None:
        """Raise RemoteProtocolError if a peer's report has another value than one of this party's
        facts.
        """
        for fact, own_value in own_facts.items():
            if report.get(fact) != own_value:
                raise RemoteProtocolError(
                    f"{peer} has another {fact} than {self.file.party}, where it is "
                    f"{own_value:.16}; at one of them `project check` without --meet names what "
                    "differs"
                )

    def _compare_patterns(
        self,
        own_percent_by_pattern: Mapping[str, int],
        patterns_by_peer: Mapping[str, Mapping[str, int]],
    ) -> Iterator[Finding]:
        """Yield how each other party writes its IDs, the normalisation rules that would make their
        patterns equal, and differences that no rule removes.

        Sets `code` if no ID can be of a peer's patterns and of this party's, since the intersection
        would be empty.

        `own_percent_by_pattern`, `patterns_by_peer`: pattern of IDs -> share of the IDs in per
        cent.
        """
        from apfed_protocols.id_patterns import (
            describe_patterns,
            differ_by_zeros,
            share_no_id,
            suggest_rules_for_patterns,
        )
        from secure_apfed.alignment.ids import make_id_rules

        id_rules = make_id_rules(self.config.alignment)
        text = (
            f"told to {', '.join(self.file.peers)}: {describe_patterns(own_percent_by_pattern)}. "
            "They learn which kinds of characters this party's IDs have, and what share of its "
            "people is written so in whole per cent; no ID, and no number of people"
        )
        yield Finding("meeting", "patterns of IDs", "ok", text)
        uniting_rules = set[str]()
        incompatible_peers = list[str]()  # no rule makes their patterns equal to this party's
        padded_peers = list[str]()  # IDs differ by zeros at the beginning
        for name, peer_patterns in patterns_by_peer.items():
            is_same = peer_patterns.keys() == own_percent_by_pattern.keys()
            text = f"{name} writes IDs as {describe_patterns(peer_patterns)}"
            state: State = "ok" if is_same else "optional"
            if share_no_id(own_percent_by_pattern, peer_patterns):
                state = "missing"
                self.code = self.code or _DATA_EXIT_CODE
                text += "; an ID of these patterns is none of this party's, so hardly anybody "
                text += "would be known to all"
            yield Finding("meeting", f"IDs of {name}", state, text)
            rules = suggest_rules_for_patterns(own_percent_by_pattern, peer_patterns, id_rules)
            if differ_by_zeros(own_percent_by_pattern, peer_patterns, id_rules):
                padded_peers.append(name)
            elif not is_same and not rules:
                incompatible_peers.append(name)
            if not is_same:
                uniting_rules.update(rules)
        yield from self._propose_remedies(uniting_rules, padded_peers, incompatible_peers)

    def _propose_remedies(
        self,
        uniting_rules: Collection[str],
        padded_peers: Sequence[str],
        incompatible_peers: Sequence[str],
    ) -> Iterator[Finding]:
        """Yield what can be done about parties that write their IDs in different ways.

        Args:
            uniting_rules: normalisation rules that would make patterns equal.
            padded_peers: parties whose IDs differ from this party's by zeros at the beginning.
            incompatible_peers: parties whose patterns no rule makes equal to this party's.
        """
        from secure_apfed.alignment.overlap import propose_rules

        if remedy := propose_rules(sorted(uniting_rules), self.config.alignment):
            text = f"if these are spellings of one kind of ID, {remedy}; {_PROPOSE_AGAIN}"
            yield Finding("meeting", "patterns of IDs", "optional", text)
        if padded_peers:
            parties = f"{self.file.party} or of {', '.join(padded_peers)}"
            text = (
                f"numbers of {parties} have zeros before them "
                "(09) that the others lack, and no rule adds or drops zeros behind a name: write "
                "them alike in one of the tables"
            )
            yield Finding("meeting", "patterns of IDs", "optional", text)
        if incompatible_peers:
            text = (
                f"no rule makes these patterns those of {', '.join(incompatible_peers)}: compare "
                "by telephone what the ID columns hold"
            )
            yield Finding("meeting", "patterns of IDs", "optional", text)


async def _exchange_reports(
    links: "Links", peers: list[str], own_report: Mapping[str, Any]
) -> dict[str, tuple[dict[str, Any], float]]:
    """Send this party's report and clock to all peers, and receive theirs.

    Returns for each peer its report, and the difference between its clock and this one in seconds,
    transmission included.

    Raises RemoteProtocolError: a peer connected for a run and not for this check.
    """
    from secure_apfed.exchange import BEFORE_TRAINING, Kind

    for peer in peers:
        links.send(peer, Kind.GREETING, BEFORE_TRAINING, msgpack.packb([time.time(), own_report]))
    reports: dict[str, tuple[dict[str, Any], float]] = {}
    for peer in peers:
        message = await links.receive(peer, Kind.GREETING, step=BEFORE_TRAINING)
        try:
            clock, report = msgpack.unpackb(message.payload)
            reports[peer] = dict(report), abs(time.time() - float(clock))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(
                f"{peer} came for the run, and not to compare; all run project check --meet at once"
            ) from error
    return reports


def format_findings(checks: Checks, findings: Sequence[Finding]) -> str:
    """Return the findings as lines of text, below a line on whether the party is ready.

    `checks`: the checks that made the findings.
    """
    title = f"{checks.file.party}: {'not ready' if checks.code else 'ready'}"
    lines = [
        f"{_MARK_BY_STATE[finding.state]:6}{finding.name}: {finding.value}" for finding in findings
    ]
    return "\n".join([title, *lines, ""])


def compute_pattern_shares(count_by_pattern: Mapping[str, int]) -> dict[str, int]:
    """Return the share in whole per cent of each pattern that at least 1 % of the IDs have; of 12
    patterns at most.

    Peers read the result (`project check --meet`).

    `count_by_pattern`: number of IDs by pattern, most frequent first.
    """
    id_count = sum(count_by_pattern.values())
    percent_by_pattern = {
        pattern: 100 * count // id_count for pattern, count in count_by_pattern.items() if count
    }
    percent_by_frequent_pattern = {
        pattern: share
        for pattern, share in percent_by_pattern.items()
        if share >= 1 and _is_valid_id_pattern(pattern)
    }
    return dict(list(percent_by_frequent_pattern.items())[:_MAX_PATTERNS])


def parse_patterns(value: object, *, sender: str) -> dict[str, int]:
    """Return a peer's ID patterns with their shares in whole per cent, after checking them.

    `value`: value from a message of `sender`. Raises RemoteProtocolError: not such a mapping.
    """
    is_valid = (
        isinstance(value, dict)
        and len(value) <= _MAX_PATTERNS
        and all(_is_valid_id_pattern(pattern) for pattern in value)
        # Not isinstance: True is an int, too.
        and all(type(share) is int and 1 <= share <= 100 for share in value.values())
        and sum(value.values()) <= 100
    )
    if not is_valid or not isinstance(value, dict):  # the second for the type checker
        raise RemoteProtocolError(
            f"{sender} sent no patterns of IDs: at most {_MAX_PATTERNS} are expected, each of at "
            f"most {_MAX_PATTERN_LENGTH} characters with a share of 1 to 100 per cent; all run the "
            "same version of project check --meet"
        )
    return value


def _is_valid_id_pattern(text: object) -> bool:
    """Return whether a value from a peer is a pattern of IDs: a short printable text in which
    letters and digits only stand for kinds of characters (A, a, 9, 09), so that it holds no ID.
    """
    if not isinstance(text, str) or not 1 <= len(text) <= _MAX_PATTERN_LENGTH:
        return False
    # Code points such as U+200B name invisible characters; all other letters must be marks.
    alphanumeric_runs = re.findall(r"[^\W_]+", _CODE_POINT.sub("-", text))
    return text.isprintable() and all(map(_PATTERN_OF_MARKS.fullmatch, alphanumeric_runs))


def _get_version() -> str:
    return metadata.version("secure-apfed")
