"""The commands before a run between organisations: `project` and `identity`.

Part of the composition root: what a party would learn is read from the report's tables.
"""

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.faults import JoinedTableError, TableError
from secure_apfed.commands import AsJson, ConfigFile, Overrides, check
from secure_apfed.console import terminal
from secure_apfed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from apfed_experiments.report.who_learns import RunFacts
    from secure_apfed.config import Config
    from secure_apfed.organisations.ending import EndPlan
    from secure_apfed.organisations.engines import EngineName
    from secure_apfed.organisations.project import Proposal, SealedProject
    from secure_apfed.planning.forecast import TrafficForecast
    from secure_apfed.settings.data import DataSettings, TableShape

project_app = typer.Typer(
    no_args_is_help=True,
    help="Set up a run between organisations: propose, join, seal, check and end.",
)
identity_app = typer.Typer(
    no_args_is_help=True, help="Create or show a party's long-term key pair."
)
# Parts of errors' messages by which `join` finds the advice that fits.
_EMPTY_CELLS_MESSAGE = "empty cells in"
_MISSING_COLUMNS_MESSAGE = "lacks the columns"
PartyName = Annotated[str, typer.Option("--as", metavar="NAME", help="Name of this party.")]
PartyFolderOption = Annotated[Path | None, typer.Option(help="The party's folder; default: NAME.")]
ShowColumnNames = Annotated[
    bool,
    typer.Option("--columns", help="Show the names of this table's columns to the other parties."),
]
AllowTogether = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-together",
        metavar="NAME+NAME",
        help="Accept that one organisation runs these parties, which lets it read more; may be "
        "repeated.",
    ),
]
OwnTableSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of this party's table, for example data.parties.NAME.numeric=[age]; may be "
        "repeated.",
    ),
]
CertificateFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder with certificate.pem, key.pem and ca.pem, if the organisation has its own CA."
    ),
]


@project_app.command()
def new(
    config_file: ConfigFile,
    party: PartyName,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=HOST:PORT", help="Address of a party; may be repeated."),
    ] = None,
    relay: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=HOST:PORT",
            help="The party that runs a relay to which all connect, and its address.",
        ),
    ] = None,
    run_by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ORGANISATION",
            help="The organisation that runs the aggregator or the dealer.",
        ),
    ] = None,
    over: Annotated[
        str,
        typer.Option(
            metavar="grpc|nvflare|flower",
            help="How parties connect: gRPC, or inside NVFlare or Flower.",
        ),
    ] = "grpc",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address of NVFlare's server or Flower's SuperLink."
        ),
    ] = None,
    allow_together: AllowTogether = None,
    folder: PartyFolderOption = None,
    show_columns: ShowColumnNames = False,
    certificates: CertificateFolder = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Propose a run; send the resulting file to all other parties."""
    from secure_apfed.config.file import load_config
    from secure_apfed.organisations.project import PROPOSAL_FILE, propose_project

    engine = _parse_engine(over)
    config = load_config(config_file, overrides=overrides or (), own=True)
    party_folder = folder or Path(party)
    relay_by: str | None = None
    relay_address: str | None = None
    if relay:
        ((relay_by, relay_address),) = _parse_pairs("--relay", [relay]).items()
    proposal = propose_project(
        config,
        party,
        party_folder,
        certificate_folder=certificates,
        shows_column_names=show_columns,
        relay_by=relay_by,
        relay=relay_address,
        addresses=_parse_pairs("--at", at or ()),
        run_by=_parse_pairs("--run-by", run_by or ()),
        over=engine,
        server=server,
        together=_parse_groups(allow_together or ()),
        show=partial(_show_proposal, party=party, as_json=as_json),
    )
    if not as_json:
        others = ", ".join(name for name in proposal.roles if name != party)
        typer.echo(
            f"\nSend {party_folder / PROPOSAL_FILE} to {others}; each joins it, and sends back an "
            "answer."
        )


@project_app.command()
def join(
    file: Annotated[
        Path, typer.Argument(help="The proposal or the sealed project that you received.")
    ],
    party: PartyName,
    folder: PartyFolderOption = None,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="This party's table: CSV, Parquet or Arrow; may be several files."
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="Column of IDs; default: as in the proposal.")
    ] = None,
    missing: Annotated[
        Literal["error", "mean", "drop"] | None,
        typer.Option(help="How to treat empty cells; default: error."),
    ] = None,
    show_columns: ShowColumnNames = False,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="grpc|nvflare|flower", help="How parties connect, as in the proposal."
        ),
    ] = None,
    words: Annotated[
        str | None,
        typer.Option(
            help="The words that the organiser read to you by telephone, to verify the file."
        ),
    ] = None,
    certificates: CertificateFolder = None,
    allow_together: AllowTogether = None,
    own_settings: OwnTableSettings = None,
    as_json: AsJson = False,
) -> None:
    """Reply to a proposal, or install the sealed project, by the kind of the file."""
    from secure_apfed.organisations import project

    party_folder = folder or Path(party)
    signed_file = project.SignedFile.from_file(file)
    is_sealed = signed_file.document.get("kind") == "sealed project"
    received_document: SealedProject | Proposal = (
        signed_file.open_document(project.SealedProject, file)
        if is_sealed
        else signed_file.open_document(project.Proposal, file)
    )
    if words is not None:
        _require_words(words, file, received_document)
    if over is not None:
        _require_engine(over, file, received_document)
    if is_sealed:
        accepted = project.accept_project(file, party, party_folder)
        next_step = f"Next: secure-apfed project check --config {party_folder / 'party.yaml'}"
        _show_sealed_project(accepted, party_folder, next_step, as_json=as_json)
        return
    # Settings of the party's table; those without an option stay as in the proposal.
    table_settings: dict[str, str] = {}
    if table is not None:
        table_settings["file"] = str(table.absolute())
    if id_column is not None:
        table_settings["id_column"] = id_column
    if missing is not None:
        table_settings["missing"] = missing
    try:
        proposal = project.answer_proposal(
            file,
            party,
            party_folder,
            shows_column_names=show_columns,
            certificate_folder=certificates,
            table=table_settings,
            colluding_groups=_parse_groups(allow_together or ()),
            settings=own_settings or (),
            show=partial(_show_proposal, party=party, as_json=as_json),
        )
    except TableError as error:
        reworded_faults = [
            replace(fault, message=_reword_for_joining(fault.message)) for fault in error.faults
        ]
        raise JoinedTableError(reworded_faults) from error
    except DataError as error:
        raise DataError(_reword_for_joining(str(error))) from error
    if not as_json:
        answer = party_folder / project.ANSWER_FILE.format(party)
        settings = party_folder / project.RUN_FILE
        typer.echo(f"\nTo take part, send {answer} to {proposal.party}. Settings: {settings}.")


@project_app.command("seal")
def seal_answers(
    answers: Annotated[
        list[Path],
        typer.Argument(metavar="ANSWER...", help="Answer files of all other parties."),
    ],
    folder: Annotated[Path, typer.Option(help="The organiser's folder.")],
    days: Annotated[
        float, typer.Option(min=0.01, max=3650, help="Days that certificates are valid.")
    ] = 365,
    as_json: AsJson = False,
) -> None:
    """Collect all parties' replies into the sealed project, which goes to all parties."""
    from secure_apfed.organisations.project import seal_project
    from secure_apfed.runs.folder import SEALED_PROJECT

    sealed = seal_project(answers, folder, days=days)
    next_step = f"Send {folder / SEALED_PROJECT} to all others; each joins it."
    _show_sealed_project(sealed, folder, next_step, as_json=as_json)


project_app.command()(check.check)


@project_app.command("end")
def end_party_project(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="The party's folder, instead of --config."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="PARTY.yaml", help="The party's settings file.")
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Delete and sign; without this, only show what would be deleted."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """End a project in a party's folder: delete secrets and saved replies, sign what stays.

    Without --yes, show what would be deleted and, on a terminal, ask. No run can start in the
    folder afterwards. Each party ends the project in its own folder.
    """
    from secure_apfed.organisations.ending import end_project, find_owner, plan_end

    owner = find_owner(folder, config)
    plan = plan_end(owner)
    if not as_json:
        _show_end(plan)
    # JSON is read by programs, which cannot reply; nor can a standard input that is no terminal.
    can_ask = not (yes or as_json or plan.is_done) and sys.stdin.isatty()
    if yes or (can_ask and typer.confirm("Delete these, and end the project here?")):
        ending = end_project(owner, now=time.time())
        if as_json:
            terminal.print_json({**ending.as_json(), "is_ended": True})
        elif not plan.is_done:
            typer.echo(
                f"The project is ended in {owner.folder}, and its audit log says so, signed. Keep "
                "what is listed and the last chain value somewhere else; copies and backups of "
                "what was deleted are yours to delete, and the other parties end their own."
            )
        return
    if as_json:
        terminal.print_json({**plan.as_json(), "is_ended": plan.ended_at is not None})
    elif not plan.is_done:
        typer.echo("Nothing was deleted. To end the project here, say the same with --yes.")


def _show_end(plan: "EndPlan") -> None:
    """Print which files would be deleted and which stay; or that the project has ended before."""
    if plan.is_done:
        terminal.show_note(
            f"the project of {plan.owner.party} was ended in {plan.owner.folder} before; there is "
            "nothing to do"
        )
        return
    rows = [
        (name, terminal.format_size(size), reason) for name, reason, size in plan.files_to_delete
    ]
    terminal.show_rows(f"To be deleted at {plan.owner.party}", ("file", "size", "what it is"), rows)
    terminal.show_rows("\nTo be kept", ("file", "why"), list(plan.kept_reason_by_file.items()))


def _reword_for_joining(message: str) -> str:
    """Return an error's message about a table with advice for a party that joins a project.

    The usual advice is to change the run's file, which such a party does not have yet: it gives
    options of `project join` instead. Messages of other forms are returned as they are.
    """
    message = message.replace(" in the run's file", "")
    if _EMPTY_CELLS_MESSAGE in message:
        message = message.partition(", or train with")[0]
        return f"{message}; or join with --missing mean, or --missing drop"
    if _MISSING_COLUMNS_MESSAGE in message:
        return f"{message}; where its IDs are called otherwise, join with --id-column NAME"
    return message


def _require_words(words: str, file: Path, received_document: "SealedProject | Proposal") -> None:
    """Verify the words that people compared by telephone: a fingerprint of the organiser's identity
    or of the whole project.

    Which of the two it is follows from the number of words.

    Args:
        words: value of the option `--words`, with blanks between the words.
        file: path of what the organiser sent, for errors.
        received_document: its content.

    Raises:
        ConfigError: neither fingerprint has this number of words.
        RemoteProtocolError: the words differ from the fingerprint.
    """
    from secure_apfed.organisations.project import SealedProject

    words_by_owner = {"organiser": received_document.words.split()}
    if isinstance(received_document, SealedProject):
        words_by_owner["whole project"] = received_document.project_words.split()
    given_words = words.split()
    owners = [
        owner
        for owner, right_words in words_by_owner.items()
        if len(right_words) == len(given_words)
    ]
    if not owners:
        expected_numbers = " or ".join(
            f"the {len(right_words)} of the {owner}"
            for owner, right_words in words_by_owner.items()
        )
        raise ConfigError(f"--words: {len(given_words)} words were given; say {expected_numbers}")
    owner = owners[0]
    if words_by_owner[owner] != given_words:
        raise RemoteProtocolError(
            f"{file}: the {owner} has the words {' '.join(words_by_owner[owner])!r}, not "
            f"{words!r}: it is of somebody else, or one was misheard; ask "
            f"{received_document.party} for its words, and its file"
        )


def _require_engine(over: str, file: Path, received_document: "SealedProject | Proposal") -> None:
    """Raise ConfigError if `--over` names another engine than the organiser's file.

    An engine is what carries the messages: gRPC, NVFlare or Flower.

    `over`: value of the option. `file`: path of what the organiser sent. `received_document`: its
    content.
    """
    from secure_apfed.organisations.project import SealedProject

    proposal = (
        received_document.proposal_document
        if isinstance(received_document, SealedProject)
        else received_document
    )
    if _parse_engine(over) != proposal.over:
        raise ConfigError(
            f"--over {over}: {file} is over {proposal.over}; say --over {proposal.over}, or ask "
            f"{proposal.party} for another proposal"
        )


@identity_app.command("new")
def new_identity(folder: Annotated[Path, typer.Option()], as_json: AsJson = False) -> None:
    """Create identity.pem in a party's folder (mode 600), which must not have one."""
    from secure_apfed.base.files import make_private

    if (folder / "identity.pem").exists():
        raise ConfigError(f"{folder} holds an identity already; without it nobody proves who it is")
    make_private(folder)
    _show_identity(folder, as_json=as_json)


@identity_app.command("show")
def show_identity(folder: Annotated[Path, typer.Argument()], as_json: AsJson = False) -> None:
    """Show a party's public identity, and its words to compare by telephone (64 bits)."""
    if not (folder / "identity.pem").is_file():
        raise ConfigError(f"{folder} holds no identity.pem; `secure-apfed identity new` makes one")
    _show_identity(folder, as_json=as_json)


def _show_identity(folder: Path, *, as_json: bool) -> None:
    """Print the public identity of the party in a folder, in hex and as words to compare by
    telephone.
    """
    from secure_apfed.base.fingerprints import IDENTITY_WORDS, format_as_words
    from secure_apfed.runs.folder import PartyFolder

    public = PartyFolder(folder).load_identity().public
    fields = {"identity": public.hex(), "words": format_as_words(public, IDENTITY_WORDS)}
    if as_json:
        terminal.print_json(fields)
    else:
        terminal.show_rows(str(folder), ("", ""), list(fields.items()))


def _parse_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the NAME=VALUE texts of an option as a mapping from names to values.

    `option`: name of the option, for errors. Raises ConfigError: a text is malformed, or a name
    repeated.
    """
    value_by_name: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in value_by_name:
            raise ConfigError(
                f"{option} {' '.join(texts)}: expected NAME=VALUE, and each name once"
            )
        value_by_name[name] = value
    return value_by_name


def _parse_engine(text: str) -> "EngineName":
    """Return the engine (gRPC, NVFlare or Flower) that `--over` names. Raises ConfigError:
    unknown.
    """
    from secure_apfed.organisations.engines import find_engine

    try:
        return find_engine(text)
    except ValueError as error:
        raise ConfigError(f"--over: {error}") from None


def _parse_groups(options: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the group of parties that each `--allow-together` option names, as bank+aggregator.

    One organisation may run the parties of a group, although they could collude.

    Raises ConfigError: an option names fewer than two parties.
    """
    groups = tuple(tuple(text.split("+")) for text in options)
    if any(len(group) < 2 or not all(group) for group in groups):
        raise ConfigError(
            f"--allow-together {' '.join(options)}: expected two names or more, as bank+aggregator"
        )
    return groups


def _show_proposal(
    proposal: "Proposal",
    config: "Config",
    own_shape: "TableShape | None",
    *,
    party: str,
    as_json: bool,
) -> None:
    """Print what a proposal requests of a party, what others learn of it, and what it learns.

    The party decides by this whether it takes part.

    Args:
        proposal: the organiser's proposal.
        config: the proposed run.
        own_shape: numbers of rows and columns of the party's table, as it discloses them; None: it
            discloses nothing.
        party: name of this party.
        as_json: print JSON.

    Raises ConfigError: such a run would not start.
    """
    from apfed_experiments.report.who_learns import COALITIONS, RunFacts
    from secure_apfed.settings.protection import find_weakened_settings

    link_traffic = _forecast_link_traffic(proposal, config, own_shape)
    facts = RunFacts.from_settings(
        config, passive_count=len(proposal.list_names("passive")), is_in_separate_processes=True
    )
    request = dict(_describe_request(proposal, config, party, own_shape, link_traffic))
    leaks_to_others = list(_describe_leaks(proposal, facts, link_traffic, sender=party))
    leaks_to_party = list(_describe_leaks(proposal, facts, link_traffic, receiver=party))
    leaks_to_coalitions = [
        (coalition.colluding_parties, coalition.joint_knowledge)
        for coalition in COALITIONS
        if coalition.holds_for(facts)
    ]
    # Title, headers and rows of each table.
    leak_tables: list[tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]] = [
        (
            f"What others learn about {party}",
            ("by whom: from what", "can read", "what remains open"),
            leaks_to_others,
        ),
        (
            f"What {party} learns",
            ("from whom: what", "can read", "what remains open"),
            leaks_to_party,
        ),
        ("What colluding parties learn", ("who", "can read"), leaks_to_coalitions),
    ]
    weakened_settings = find_weakened_settings(config)
    organisations = list(_describe_organisations(proposal))
    if as_json:
        terminal.print_json(
            {
                "words": proposal.words,
                "asked": request,
                "learnt": {title: rows for title, _, rows in leak_tables},
                "departures": [asdict(setting) for setting in weakened_settings],
                "organisations": organisations,
            }
        )
        return
    terminal.show_rows(f"{config.name}: what {party} is asked for", ("", ""), list(request.items()))
    terminal.show_departures(weakened_settings)
    for sentence in organisations:
        terminal.show_note(f"note: {sentence}")
    for title, headers, rows in leak_tables:
        if rows:
            terminal.show_rows(f"\n{title}", headers, rows)


def _forecast_link_traffic(
    proposal: "Proposal", config: "Config", own_shape: "TableShape | None"
) -> "tuple[TrafficForecast, ...]":
    """Return the traffic of each link in the proposed run, if all tables had this party's shape.

    Returns nothing, and prints a note, if this table alone does not allow a forecast.

    `own_shape`: shape of this party's table; None: default numbers of rows and columns are assumed.
    """
    from secure_apfed.planning.forecast import forecast
    from secure_apfed.settings.data import TableShape

    shapes = dict.fromkeys(proposal.list_names("active", "passive"), own_shape or TableShape())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the rows of tables that are only assumed
        try:
            return forecast(config, shapes).links
        except DataError as error:  # the run may still be possible with the other parties' tables
            terminal.show_note(
                f"note: what is sent cannot be predicted from this table alone: {error}"
            )
            return ()


def _describe_organisations(proposal: "Proposal") -> Iterator[str]:
    """Yield a sentence on each organisation that runs several parties which could collude, with
    what it can read or alter.
    """
    for organisation, conflict in proposal.conflicts:
        yield (
            f"{organisation} runs {' and '.join(conflict.party_names)}, which was allowed by name: "
            f"together they {conflict.gained_ability}"
        )


def _describe_request(
    proposal: "Proposal",
    config: "Config",
    party: str,
    own_shape: "TableShape | None",
    link_traffic: "Sequence[TrafficForecast]",
) -> Iterator[tuple[str, str]]:
    """Yield title and text of what a proposal requests of this party: role, columns, training,
    bytes and joint prediction.

    Args:
        proposal: the organiser's proposal.
        config: the proposed run.
        party: name of this party.
        own_shape: shape of its table, as it discloses it; None: it discloses nothing.
        link_traffic: the forecast traffic of each link.
    """
    train = config.train
    format_size = terminal.format_size
    yield "organiser", f"{proposal.party}, by telephone: {proposal.words}"
    yield "role", f"{proposal.roles[party]} of {config.method.title}"
    yield from _describe_parties(proposal)
    if party in proposal.list_names("active", "passive"):  # the roles that have a table
        yield from _describe_requested_table(config.data, party, own_shape)
    yield "training", f"{train.epochs} epochs at most, batches of {train.batch_size}"
    sent_bytes = sum(link.wire_bytes for link in link_traffic if link.sender == party)
    received_bytes = sum(link.wire_bytes for link in link_traffic if link.receiver == party)
    is_row_count_assumed = own_shape is None and bool(config.data.parties)
    assumption = ", for tables of 1,000 rows" if is_row_count_assumed else ""
    sent_text = f"sends about {format_size(sent_bytes)}"
    yield "bytes", f"{sent_text}, gets about {format_size(received_bytes)}{assumption}"
    yield from _describe_serving(config, party, own_shape, role=proposal.roles[party])


def _describe_parties(proposal: "Proposal") -> Iterator[tuple[str, str]]:
    """Yield title and text of each proposed party, of the relay and of the engine, if any.

    The text says where the party is reached, and which organisation runs it.
    """
    without_address = "over the engine" if proposal.over == "nvflare" else "dials out only"
    for name, role in proposal.roles.items():
        address = proposal.addresses.get(name, without_address)
        organisation = proposal.run_by.get(name)
        yield f"{name} ({role})", f"{address}, run by {organisation}" if organisation else address
    if proposal.relay is not None:
        yield "relay", f"{proposal.relay}, run by {proposal.relay_by}"
    if proposal.server is not None:
        yield "engine", _describe_engine(proposal)


def _describe_requested_table(
    data: "DataSettings", party: str, own_shape: "TableShape | None"
) -> Iterator[tuple[str, str]]:
    """Yield title and text of the columns that a party needs, and of what it discloses of them.

    Args:
        data: the proposed data settings; without parties they name a built-in data set.
        party: name of this party.
        own_shape: shape of its table, as it discloses it; None: it discloses nothing.
    """
    labels = f", labels in {data.label_column}" if data.has_labels(party) else ""
    ids = ", ".join(data.find_id_columns(party)) if data.parties else data.id_column
    yield "columns", f"IDs in {ids}{labels}; features: numbers, dates or texts"
    if not data.parties:
        yield "table", f"its part of {data.dataset}"
    elif own_shape is None:
        yield "table", "nothing about it is disclosed (--table)"
    else:
        column_names = ", ".join(own_shape.columns or ()) or "names not disclosed"
        size_text = f"about {own_shape.rows:,} rows, {own_shape.features} features"
        yield "table", f"disclosed: {size_text}, {column_names}"


def _describe_engine(proposal: "Proposal") -> str:
    """Return a sentence on the proposal's engine, NVFlare or Flower, which carries the messages.

    It names the engine's server, the organisation that runs the server, and what the server can
    see.
    """
    from secure_apfed.base.peer_text import quote_text
    from secure_apfed.organisations.engines import SERVER_NAME, TITLE_BY_ENGINE

    server_knowledge_by_engine = {
        "nvflare": "it sees who takes part, and times and sizes of sealed frames, and reads none",
        "flower": "it sees who takes part, when, and how each party ended, and gets no frames; "
        "who submits a run sends code to each SuperNode: see docs/flower.md",
    }
    return (
        f"{TITLE_BY_ENGINE[proposal.over]}, whose server is at {proposal.server}, run by "
        f"{quote_text(proposal.run_by[SERVER_NAME])}: {server_knowledge_by_engine[proposal.over]}"
    )


def _describe_serving(
    config: "Config", party: str, own_shape: "TableShape | None", *, role: str
) -> Iterator[tuple[str, str]]:
    """Yield title and text on the joint predictions that a passive takes part in by default, if it
    runs `secure-apfed serve`.

    Yields nothing for other roles, and for methods that predict without passives.

    Args:
        config: the proposed run.
        party: name of this party.
        own_shape: shape of its table, by which the number of answers is limited; None: it discloses
            nothing.
        role: its role.
    """
    from secure_apfed.methods import METHODS
    from secure_apfed.methods.joint import Tvfl
    from secure_apfed.organisations.party import ServeSettings

    if role != "passive" or not isinstance(METHODS[config.method.name], Tvfl):
        return
    if config.alignment.pairwise_overlaps == "hidden":
        yield "joint prediction", "not served, since a lookup tells whom a passive knows"
        return
    limits_text = "a tenth of its people"
    if own_shape is not None:
        limits = ServeSettings().limits_for(own_shape.rows)
        limits_text = f"{limits.a_day:,} people a day and {limits.in_all:,} answers in all"
    yield (
        "joint prediction",
        f"where {party} serves: {limits_text}, unless its party.yaml says otherwise",
    )


def _describe_leaks(
    proposal: "Proposal",
    facts: "RunFacts",
    link_traffic: "Sequence[TrafficForecast]",
    *,
    sender: str | None = None,
    receiver: str | None = None,
) -> Iterator[tuple[str, ...]]:
    """Yield what messages from a party, or to it, reveal, as rows of a table.

    Each row has the peers with the kind of message, what its receiver can read, and what is not
    protected. Kinds that every run sends, such as keys, reveal nothing of the data and are left
    out.

    Args:
        proposal: the organiser's proposal.
        facts: the facts of the run that decide what can be read.
        link_traffic: the forecast traffic of each link.
        sender, receiver: the party; exactly one of the two is given.
    """
    from apfed_experiments.report.who_learns import Role, Rule, find_rule
    from secure_apfed.exchange import Kind

    peers_by_rule: dict[Rule, list[str]] = {}
    for link in link_traffic:
        if sender is not None:
            is_of_party = link.sender == sender
            peer = link.receiver
        else:
            is_of_party = link.receiver == receiver
            peer = link.sender
        if is_of_party:
            rule = find_rule(Kind(link.kind), Role(proposal.roles[link.receiver]), facts)
            peers_by_rule.setdefault(rule, []).append(peer)
    for rule, peers in peers_by_rule.items():
        is_of_every_run = rule.condition == "always" and rule.receiver is None
        has_risk = rule.remains != "Nothing."  # what is not protected
        if has_risk and not is_of_every_run:
            yield f"{', '.join(peers)}: {rule.kind}", rule.reads, rule.remains


def _format_listen_address(address: str) -> str:
    """Return the address on which a relay listens, given its address in a proposal.

    The organiser chose the text, and it becomes part of a command that is printed for copying. So
    host and port are parsed and formatted again, which leaves no room for other commands.
    """
    from ipaddress import ip_address

    from secure_apfed.exchange.sockets import parse_address, spell_address
    from secure_apfed.organisations.project import choose_listen_address

    host, port = parse_address(choose_listen_address(address))
    return spell_address(("127.0.0.1" if host == "localhost" else str(ip_address(host)), port))


def _show_sealed_project(
    sealed: "SealedProject", folder: Path, next_step: str, *, as_json: bool
) -> None:
    """Print the words of all parties' identities and of the project, and what to do next.

    A party that runs the relay also gets the command that starts it. As JSON only the words are
    printed.

    `folder`: this party's folder, which may have the relay's key. `next_step`: a sentence on what
    to do next.
    """
    words_by_party = {name: answer.words for name, answer in sealed.answer_documents.items()}
    if as_json:
        terminal.print_json({"words": words_by_party, "project_words": sealed.project_words})
        return
    rows = list(words_by_party.items())
    terminal.show_rows("Who takes part", ("", "words of its identity"), rows)
    typer.echo(f"Project words, compare by telephone: {sealed.project_words}")
    relay_address = sealed.proposal_document.relay
    if relay_address is not None and (folder / "relay-key.pem").exists():
        typer.echo(f"The relay: {_format_relay_command(sealed, folder, relay_address)}")
    typer.echo(next_step)
    engine = sealed.proposal_document.over
    if engine != "grpc":
        typer.echo(f"Its engine: commands for this party are in {folder / engine / 'README.md'}.")


def _format_relay_command(sealed: "SealedProject", folder: Path, address: str) -> str:
    """Return the command that starts the project's relay, which only the parties may use.

    `folder`: folder of the party that runs the relay, with its certificate and key. `address`: the
    relay's address in the proposal.
    """
    from secure_apfed.organisations.revocation import REVOCATION_LIST_FILE

    options = [
        f"--listen {_format_listen_address(address)}",
        f"--ca {folder / 'ca.pem'}",
        f"--certificate {folder / 'relay-certificate.pem'}",
        f"--key {folder / 'relay-key.pem'}",
    ]
    if (folder / REVOCATION_LIST_FILE).exists():
        options.append(f"--revoked {folder / REVOCATION_LIST_FILE}")
    options += [f"--allow {answer.identity}" for answer in sealed.answer_documents.values()]
    return f"secure-apfed relay {' '.join(options)}"
