"""The commands for parties in processes of their own: `party`, `serve`, `relay`, `certs` and
`audit-log`.

Part of the composition root: the results of `party` at the active are measured and reported here.
"""

import contextlib
import datetime as dt
import os
import signal
import string
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secure_apfed.base.working import observing_work
from secure_apfed.commands import AsJson, JsonEvents, MetricsFile, finished
from secure_apfed.console import progress, terminal
from secure_apfed.errors import ApfedError, ConfigError

if TYPE_CHECKING:
    from cryptography import x509

    from secure_apfed.organisations.revocation import ListReader
    from secure_apfed.runs.audit_log import LogSummary

_SHUTDOWN_TIME_S = 10.0  # time to notify peers after SIGTERM
certs_app = typer.Typer(
    no_args_is_help=True,
    help="Show, renew and revoke TLS certificates; `secure-apfed project` issues them.",
)
_LOGS_DISAGREE_EXIT_CODE = 4  # exit code if two audit logs disagree
audit_log_app = typer.Typer(
    no_args_is_help=True, help="Verify a party's audit log, or compare those of two parties."
)
PartyConfigOption = Annotated[
    Path, typer.Option("--config", metavar="PARTY.yaml", help="The party's settings file.")
]
LogArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A party's folder, or its audit.log.")
]


def _print_schema(is_requested: bool) -> None:
    """Print the JSON schema of the lines that --json-events prints, and end the process.

    `is_requested`: whether --json-events-schema was given; else nothing happens.
    """
    if is_requested:
        from secure_apfed.runs.events import build_schema

        terminal.print_json(build_schema())
        raise typer.Exit


def party(
    config: Annotated[Path, typer.Option(metavar="PARTY.yaml", help="The party's settings file.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint in the party's folder.")
    ] = False,
    baselines: Annotated[
        bool, typer.Option(help="At the active: compare with its local models after the run.")
    ] = True,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", hidden=True, help="End where stdin ends.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report/--no-report", hidden=True, help="Report and say what came of it."),
    ] = True,
    as_json: AsJson = False,
    json_events: JsonEvents = False,
    json_events_schema: Annotated[
        bool,
        typer.Option(
            "--json-events-schema",
            is_eager=True,
            callback=_print_schema,
            help="Print the JSON schema of the lines of --json-events, and exit.",
        ),
    ] = False,
    metrics_file: MetricsFile = None,
) -> None:
    """Run one party of a training between several processes or organisations.

    The other parties run elsewhere, each by its own settings file. Afterwards each party writes its
    own report, and attacks what it sent if its `attacks` setting says so. The active also evaluates
    the model and prints the result, as `run` does.
    """
    from apfed_attacks.table import expand_choices
    from secure_apfed.config.file import load_config
    from secure_apfed.exchange import StatusTracker
    from secure_apfed.learning.own_code import refuse_user_functions
    from secure_apfed.organisations.own_record import OwnRecord
    from secure_apfed.organisations.party import PartyFile, run_party
    from secure_apfed.runs.folder import RunFolder

    signal.signal(signal.SIGTERM, _end_by_signal)
    if end_with_stdin:
        threading.Thread(target=watch_stdin, daemon=True).start()
    settings_file = PartyFile.from_file(config)
    status = StatusTracker()
    sent_records = list[OwnRecord]()  # gets one entry: what this party sent
    shared_config = load_config(settings_file.config)
    refuse_user_functions(shared_config, source=f"{settings_file.config}, which all parties share,")
    # Attacks may be code all the same: each party sets its own, and a proposal has none.
    shared_config.note_attacks()
    expand_choices(shared_config.attacks)  # refuses a misspelt attack before hours of training
    board = progress.Board(lambda: (status.build_status(),))
    party_name = settings_file.party
    display_options: dict[str, Any] = {"as_json": as_json, "json_events": json_events}

    def show_restart(why: str) -> None:
        """Print why the session restarts, and no longer show work that was interrupted."""
        board.drop_work()
        terminal.show_line(why)

    with (
        progress.write_metrics(board, metrics_file),
        observing_work(lambda work: board.update_work(work, party_name)),
        progress.show_board(board, **display_options),
    ):
        result = run_party(
            config,
            resume=resume,
            on_progress=board.update_progress,
            status=status,
            on_restart=show_restart,
            on_record=sent_records.append,
            on_common=lambda common: terminal.show_note(f"{common.party}: {common.sentence}"),
        )
    is_quiet = as_json or json_events
    with progress.show_work(party_name, **display_options):
        finished.attack_own_messages(sent_records[0], settings_file.folder, is_quiet=is_quiet)
    if result is None or result.folder is None:
        # Only the active has a result. Without `report` the parent process reports for all.
        if report:
            finished.report_passive(settings_file.folder, is_quiet=is_quiet)
        return
    run_config = RunFolder(result.folder).load_config()
    if report:
        finished.finish_run(
            run_config, result, baselines=baselines, is_quiet=is_quiet, json_events=json_events
        )
    elif baselines:
        # Only the active's process has its rows; the measures are stored for the parent's report.
        with progress.show_work(party_name, **display_options):
            finished.measure_local_models(run_config, result, is_quiet=is_quiet)


def serve(
    config: Annotated[Path, typer.Option(metavar="PARTY.yaml", help="The party's settings file.")],
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Exit after this number of sessions.")
    ] = None,
    json_events: JsonEvents = False,
) -> None:
    """Take part in joint predictions, as a passive or the aggregator, until stopped.

    The `serve` section of the party's file limits how many rows it helps to predict.
    """
    from secure_apfed.exchange import StatusTracker
    from secure_apfed.organisations.served import serve_party

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    status = StatusTracker()
    board = progress.Board(lambda: (status.build_status(),))
    with contextlib.suppress(SystemExit), progress.show_board(board, json_events=json_events):
        serve_party(
            config,
            sessions=sessions,
            status=status,
            on_session=terminal.show_line,
        )


class Terminated(ApfedError):  # noqa: N818 - it is no error
    """The process received SIGTERM, from the operator of the machine or its parent."""


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    """Raise `Terminated` at SIGTERM, so that peers are notified and files are completed, as after
    an error.

    `number`, `frame`: what Python passes to a signal handler; not used.
    """
    raise Terminated("ended by SIGTERM")


def watch_stdin() -> None:
    """Wait until stdin is closed, then end this process.

    Run in a thread of a process that another one started and keeps a pipe to: stdin closes when
    the other has ended, even if that crashed. SIGTERM comes first, and leaves 10 seconds to notify
    peers.
    """
    while os.read(sys.stdin.fileno(), 1):  # b"" once stdin is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SHUTDOWN_TIME_S)
    os._exit(1)


def relay(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")],
    ca: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="CA certificates by which parties are verified."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="PEM", help="The relay's own TLS certificate, issued for the name relay."
        ),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Private key of the certificate.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="IDENTITY", help="Accept only this public identity, in hex; may be repeated."
        ),
    ] = None,
    revoked: Annotated[
        Path | None,
        typer.Option(
            metavar="LIST", help="List of revoked certificates and identities, which are refused."
        ),
    ] = None,
    insecure_plaintext_on_loopback: Annotated[
        bool,
        typer.Option("--insecure-plaintext-on-loopback", help="Without TLS; on this machine only."),
    ] = False,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", hidden=True, help="End where stdin ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forward encrypted messages between parties that can only connect outwards."""
    from secure_apfed.exchange.certificates import Credentials
    from secure_apfed.exchange.grpc_link import warn_of_plaintext
    from secure_apfed.exchange.relay import Relay
    from secure_apfed.exchange.sockets import parse_address, spell_address

    address = parse_address(listen)
    credentials = None
    if ca is not None and certificate is not None and key is not None:
        credentials = Credentials.from_files(ca, certificate, key, name=None)
    elif insecure_plaintext_on_loopback:
        warn_of_plaintext(address[0])
    else:
        raise ConfigError("a relay needs --ca, --certificate and --key; `project join` prints all")
    try:
        allowed_identities = None if allow is None else frozenset(map(bytes.fromhex, allow))
    except ValueError as error:
        raise ConfigError("--allow: an identity is 64 letters in hex") from error
    should_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: should_end.set())
    if end_with_stdin:
        threading.Thread(target=watch_stdin, daemon=True).start()
    running_relay = Relay(address, credentials, allowed_identities, revoked=revoked)
    # With the actual port, since the caller may give port 0 for any free one.
    actual_address = spell_address((address[0], running_relay.port))
    if as_json:
        terminal.print_json({"listens": actual_address})
    else:
        terminal.show_note(f"the relay listens at {actual_address}; it ends with Ctrl-C")
    try:
        should_end.wait()
    finally:
        running_relay.close()


@certs_app.command("show")
def show_certificates(
    files: Annotated[list[Path], typer.Argument(metavar="PEM...", help="Certificate files.")],
    as_json: AsJson = False,
) -> None:
    """Show who the certificates belong to, how long they are valid, and their fingerprints."""
    from secure_apfed.exchange.certificates import hash_certificate, list_dns_names

    now = dt.datetime.now(dt.UTC)
    descriptions: list[dict[str, Any]] = []
    for file in files:
        certificate = _load_certificate(file)
        descriptions.append(
            {
                "file": str(file),
                "names": ", ".join(list_dns_names(certificate)),
                "valid_until": f"{certificate.not_valid_after_utc:%Y-%m-%d}",
                "days_left": (certificate.not_valid_after_utc - now).days,
                "issuer": certificate.issuer.rfc4514_string(),
                "serial": f"{certificate.serial_number:x}",
                "sha256": hash_certificate(certificate),
            }
        )
    if as_json:
        terminal.print_json({"certificates": descriptions})
        return
    rows = [tuple(map(str, description.values())) for description in descriptions]
    terminal.show_rows("Certificates", tuple(descriptions[0]), rows)


@certs_app.command("request")
def request_renewal(
    config: PartyConfigOption,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Use a new private key, if the present one leaked.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Request a new certificate from the organiser; the party's identity stays the same."""
    from secure_apfed.organisations.renewal import request_certificate

    path = request_certificate(config, new_key=new_key)
    if as_json:
        terminal.print_json({"request": path})
    else:
        typer.echo(f"Send {path} to the organiser, who runs `secure-apfed certs renew` with it.")


@certs_app.command("renew")
def issue_renewal(
    asked: Annotated[
        Path, typer.Argument(metavar="REQUEST", help="Request file that the party sent.")
    ],
    folder: Annotated[Path, typer.Option(help="The organiser's folder.")],
    days: Annotated[
        float, typer.Option(min=0.01, max=3650, help="Days that the certificate is valid.")
    ] = 365,
    as_json: AsJson = False,
) -> None:
    """At the organiser: issue a certificate under the authority that sealed the project."""
    from secure_apfed.organisations.renewal import renew_certificate

    path = renew_certificate(asked, folder, days=days)
    if as_json:
        terminal.print_json({"renewed": path})
    else:
        typer.echo(f"Send {path} to whoever asked, who runs `secure-apfed certs accept` with it.")


@certs_app.command("accept")
def install_renewal(
    renewed: Annotated[
        Path, typer.Argument(metavar="RENEWED", help="File that the organiser sent.")
    ],
    config: PartyConfigOption,
    as_json: AsJson = False,
) -> None:
    """Install a renewed certificate; at other parties: record it."""
    from secure_apfed.organisations.renewal import accept_certificate

    renewal = accept_certificate(renewed, config)
    if as_json:
        terminal.print_json({"holder": renewal.holder})
    else:
        typer.echo(
            f"The renewed certificate of {renewal.holder} is in its place. A party that trains "
            "shows it from its next start on, one that serves within seconds."
        )


@certs_app.command("revoke")
def revoke_certificates(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="PEM|HEX...",
            help="A certificate's file, or its SHA-256 or serial "
            "number, or a party's public identity, in hex.",
        ),
    ],
    revoked: Annotated[
        Path,
        typer.Option(
            "--list", help="The list of revoked certificates that the parties' files name."
        ),
    ],
    note: Annotated[str, typer.Option(help="Reason, as free text.")] = "",
    for_others: Annotated[
        bool,
        typer.Option(
            "--for-others",
            help="Do not require that a party's file on this machine reads the list.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add certificates or identities to a list of revoked ones.

    A running party reads its list again at once, and ends its session with whom it names; so does
    a relay with the list that it was started with. A list that no file here reads protects nobody,
    and is an error.
    """
    from secure_apfed.exchange.certificates import load_revocations
    from secure_apfed.organisations.revocation import find_readers

    _append_revocations(revoked, _parse_revocations(what), note)
    entries = sorted(load_revocations(revoked))
    # Parties' files on this machine: those that name this list, and those that do not.
    readers, non_readers = find_readers(revoked, further_folders=[Path.cwd()])
    if not readers and not for_others:
        raise _make_unread_list_error(revoked, len(entries), non_readers)
    relay_addresses = sorted(
        {file.relay for file in (*readers, *non_readers) if file.relay is not None}
    )
    if as_json:
        terminal.print_json(
            {
                "list": str(revoked),
                "revoked": entries,
                "read_by": [str(file.path) for file in readers],
                "not_read_by": [str(file.path) for file in non_readers],
                "relays": relay_addresses,
            }
        )
        return
    readers_text = ", ".join(f"{file.party} ({file.path})" for file in readers) or "nobody here"
    terminal.show_note(
        f"{revoked} names {len(entries)}; read by {readers_text}: give it to all parties"
    )
    for file in non_readers:
        terminal.show_note(
            f"note: {file.path} of {file.party} reads {file.revoked or 'no list'}, and not this one"
        )
    for address in relay_addresses:
        terminal.show_note(
            f"note: the relay at {address} reads the list that it was started with (--revoked): "
            "give this one to who runs it. Parties refuse by their own lists all the same"
        )


def _parse_revocations(certificates_or_hex: Sequence[str]) -> list[str]:
    """Return what a user revokes as entries of a revocation list: hex without colons, in lower
    case.

    `certificates_or_hex`: each text is the path of a certificate, whose hash becomes the entry, or
    an entry: a certificate's hash or serial number, or a party's identity.

    Raises ConfigError: a text is neither a file nor hex.
    """
    from secure_apfed.exchange.certificates import hash_certificate

    entries = []
    for certificate_or_hex in certificates_or_hex:
        if Path(certificate_or_hex).is_file():
            entry = hash_certificate(_load_certificate(Path(certificate_or_hex)))
        else:
            entry = certificate_or_hex.lower().replace(":", "")
        if not entry or not set(entry) <= set(string.hexdigits):
            raise ConfigError("certs revoke: name files of certificates that are there, or hex")
        entries.append(entry)
    return entries


def _append_revocations(revoked: Path, entries: Sequence[str], note: str) -> None:
    """Append entries to a revocation list, each with today's date and a note.

    `revoked`: path of the list, which is created if it is missing. `entries`: hex. `note`: the
    reason as free text; empty: none.
    """
    existing_text = revoked.read_text(encoding="utf-8") if revoked.exists() else ""
    if existing_text and not existing_text.endswith("\n"):
        existing_text += "\n"
    one_line_note = " ".join(note.split())  # a line break would begin another entry
    remark = f"  # {dt.datetime.now(dt.UTC):%Y-%m-%d} {one_line_note}".rstrip()
    new_lines = "".join(f"{entry}{remark}\n" for entry in entries)
    revoked.write_text(existing_text + new_lines, encoding="utf-8")


def _load_certificate(file: Path) -> "x509.Certificate":
    """Return the certificate in a PEM file.

    Raises ConfigError: the file cannot be read, or holds no certificate.
    """
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} is no certificate in PEM ({error})") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name a certificate") from error


@audit_log_app.command()
def verify(
    folder: LogArgument,
    identity: Annotated[
        str | None, typer.Option(metavar="HEX", help="The party's public identity that you expect.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a log's hash chain and signatures, and summarise it."""
    from secure_apfed.runs.audit_log import verify_log

    summary = verify_log(folder, identity=identity)
    if as_json:
        terminal.print_json(summary.as_json())
    else:
        _show_log_summary(summary)


@audit_log_app.command()
def compare(one: LogArgument, other: LogArgument, as_json: AsJson = False) -> None:
    """Compare two parties' logs of their link; exit code 4 if they disagree."""
    from secure_apfed.runs.audit_log import compare_logs

    comparison = compare_logs(one, other)
    if as_json:
        terminal.print_json(comparison.as_json())
    else:
        for summary in comparison.logs:
            if not summary.has_final_signature:
                terminal.show_note(f"note: {_describe_ending(summary)}")
        rows = [
            (
                direction.sender,
                direction.receiver,
                f"{direction.equal:,}",
                f"{direction.equal_size:,}",
                f"{direction.unreceived:,}",
                "no" if direction.parting is None else "yes",
            )
            for direction in comparison.directions
        ]
        columns = ("from", "to", "equal", "bytes", "sent, never received", "they part")
        terminal.show_rows("Two logs of one link", columns, rows)
        for direction in comparison.directions:
            parting = direction.parting
            if parting is not None:
                place = "its end" if parting.sent_line is None else f"line {parting.sent_line}"
                terminal.show_note(
                    f"{direction.sender} to {direction.receiver}: {direction.sender} logged at "
                    f"{place}: {parting.sent}; {direction.receiver} logged at line "
                    f"{parting.received_line}: {parting.received}"
                )
    if not comparison.agree:
        raise typer.Exit(_LOGS_DISAGREE_EXIT_CODE)


@audit_log_app.command("restart-counter")
def restart_counter(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The party's folder.")],
    counter: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the counter's file in that folder.")
    ],
    party: Annotated[str, typer.Option(metavar="NAME", help="The party whose folder it is.")],
    as_json: AsJson = False,
) -> None:
    """Let a counter continue whose file was lost, shortened or replaced; this is logged.

    An older copy goes on from what it holds. Any other file is set aside, and the counter restarts:
    it forgets what the party gave away.
    """
    from secure_apfed.organisations.counters import restart_and_log

    restart = restart_and_log(folder, counter, party=party)
    if as_json:
        terminal.print_json(restart.as_json())
        return
    aside = (
        f"; the file that lay there is now {restart.renamed_file.name}"
        if restart.renamed_file
        else ""
    )
    terminal.show_note(
        f"{folder / counter} goes on from {restart.log_entry.number:,}, the audit log had noted "
        f"{restart.log_entry.noted:,}{aside}"
    )


def _make_unread_list_error(
    revoked: Path, entry_count: int, non_readers: "Sequence[ListReader]"
) -> ConfigError:
    """Return the error that no party on this machine reads a list of revoked certificates.

    `revoked`: path of the list. `non_readers`: parties' files here, which name another list or
    none.
    """
    other_lists = [
        f"{file.path} of {file.party} names {file.revoked or 'none'}" for file in non_readers
    ]
    reason = "; ".join(other_lists) or "there is no party.yaml beside it or below"
    return ConfigError(
        f"{revoked} names {entry_count} now, and no party's file reads it, so it protects "
        f"nobody here ({reason}). "
        f"Say `revoked: {revoked.absolute()}` under `tls` in the party.yaml, start the party "
        "again, and revoke anew; or say --for-others where it is for other machines"
    )


def _show_log_summary(summary: "LogSummary") -> None:
    """Print the summary of a party's audit log as two tables: facts about the log, and how many
    envelopes (messages with headers) it sent and received.
    """
    terminal.show_rows("Audit log", ("", ""), _list_log_rows(summary))
    flows = [
        (flow.peer, flow.event, flow.kind or "-", f"{flow.envelopes:,}", f"{flow.size:,}")
        for flow in summary.flows
    ]
    terminal.show_rows("\nEnvelopes", ("peer", "", "kind", "envelopes", "bytes"), flows)


def _list_log_rows(summary: "LogSummary") -> list[tuple[str, str]]:
    """Return the facts about a party's audit log, each with a title and a text."""
    from secure_apfed.settings.promises import format_epsilon_title, spell_epsilon

    if summary.figure is None:
        epsilon_row = (
            "epsilon, last",
            "none: no ledger counts what it sent, so nothing is promised of it",
        )
    else:
        epsilon_row = (
            f"{format_epsilon_title(summary.figure)}, last",
            spell_epsilon(summary.epsilon),
        )
    rows = [
        ("party", summary.party),
        ("identity", summary.identity),
        ("last chain", summary.head),
        ("lines", f"{summary.lines:,}, all chained"),
        ("its end", _describe_ending(summary)),
        ("opened", f"{summary.opened:,} times, {summary.agreed:,} sessions agreed"),
        ("cut after a kill", f"{summary.cut:,} bytes"),
        epsilon_row,
        # Counters limit what a party gives away; the log notes how far each has come.
        *((name, f"counted {line.number:,}") for name, line in summary.counters.items()),
    ]
    rows += [
        (
            f"{restart.counter}, restarted",
            f"{restart.why}: {restart.noted:,} were noted, it went on from {restart.number:,}",
        )
        for restart in summary.restarts
    ]
    ended = summary.ended
    if ended is not None:
        day = dt.datetime.fromtimestamp(ended.at, dt.UTC)
        deleted_files = ", ".join(ended.deleted) or "nothing"
        kept_files = ", ".join(ended.kept) or "nothing"
        rows.append(
            ("project ended", f"{day:%Y-%m-%d}; deleted {deleted_files}; kept {kept_files}")
        )
    return rows


def _describe_ending(summary: "LogSummary") -> str:
    """Return in words whether the log's end is signed, or which lines may have been changed.

    An attacker with the party's disk can rewrite lines after the last signature, for which the key
    is needed.
    """
    if summary.has_final_signature:
        return "signed by the identity"
    lines_text = "1 line" if summary.unsigned == 1 else f"{summary.unsigned:,} lines"
    torn_text = f" and {summary.torn:,} bytes of a torn line" if summary.torn else ""
    return (
        f"{lines_text}{torn_text} after the last signature of {summary.party}: there it "
        "may have been shortened or written anew"
    )
