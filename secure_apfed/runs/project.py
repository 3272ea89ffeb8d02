"""From an invitation to the parties' files: a proposal, an answer of each party, a sealed project.

Run by: each organisation in its own folder; what goes between them is three kinds of files, which
are public and may go by mail. A file is one JSON object: a document, and the Ed25519 signature of
whoever wrote it. The organiser, one of the parties, proposes settings, roles and addresses; each
party answers with its identity and a request for a certificate; the organiser puts these together
and signs them. Protects from: files that were altered, mixed up or made by somebody else, as far as
people compare fingerprints (`secure_apfed.fingerprints`) by another way than the files took. Secret
keys never leave the folder where they were made.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import Identity, verify
from secure_apfed.between.certificates import (
    Credentials,
    certificate_request,
    make_authority,
    require_caller,
)
from secure_apfed.between.grpc_link import is_loopback
from secure_apfed.config import Config
from secure_apfed.config.file import load_config, load_config_text
from secure_apfed.config.plain_yaml import as_yaml, parse_yaml, read_text
from secure_apfed.contract import PartyRole
from secure_apfed.data import OwnData, load_data, load_own_tables, pack_own
from secure_apfed.data.catalogue import party_names
from secure_apfed.data.tables import party_path
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.exchange.sockets import parse_address, spell_address
from secure_apfed.files import make_private, read_bytes, read_json, to_json, write_atomically
from secure_apfed.fingerprints import DOCUMENT_WORDS, IDENTITY_WORDS, in_words
from secure_apfed.methods import METHODS, roles_of
from secure_apfed.names import Name, PartyName
from secure_apfed.runs.folder import PartyFolder
from secure_apfed.runs.party import PartyFile, Place, Tls
from secure_apfed.settings import EACH_ALONE, Settings
from secure_apfed.settings.data import TABLES, TableShape

__all__ = [
    "ANSWER", "Answer", "Project", "Proposal", "Sealed", "Seat", "SharedRelay", "Signed", "accept",
    "answer", "differing_terms", "named_columns", "propose", "read_project", "read_proposal",
    "seal", "shape_of", "shared_settings", "terms_digest",
]  # fmt: skip

ANSWER = "answer-{}.json"
_PROPOSAL, _SEALED, _RUN, _PARTY = "proposal.json", "sealed.json", "run.yaml", "party.yaml"
_CA, _CERTIFICATE, _KEY, _TABLE = "ca.pem", "certificate.pem", "key.pem", "table.safetensors"
_RELAY, _OF_RELAY = "relay", "relay-"
_PURPOSE = b"project v1"
_MOST_BYTES = 2**20
_MOST_PARTIES = 64
_Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Pem = Annotated[str, Field(max_length=2**15, pattern="^[\\n -~]*$")]
# Of one party, and yet the same at all, since they choose the intersection.
_SAID_TO_ALL = ("name", "dealer", "pairwise_overlaps")
_SAID_OF_TABLES = ("dataset", "partition", "labels_at", "active", "id_column", "label_column",
                   "anomaly")  # fmt: skip
_DocumentT = TypeVar("_DocumentT", bound="_Document")


class _Document(Settings):
    """What somebody signs: `party`, by its `identity`."""

    kind: str
    version: str
    party: Name
    identity: _Hex32

    @property
    def words(self) -> str:
        return in_words(bytes.fromhex(self.identity), IDENTITY_WORDS)


class Seat(Settings):
    """Where a party takes part: its role, the "host:port" where the others reach it (null: it dials
    out only), and the organisation that runs it, where that is not of the party's name.
    """

    role: PartyRole
    address: Place | None = None
    run_by: str | None = Field(None, max_length=64, pattern="^[ -~]+$")


class SharedRelay(Settings):
    """Where all parties dial, and which of them runs it."""

    address: Place
    run_by: Name


class Proposal(_Document):
    """What the organiser asks all to take part in; `settings` as `shared_settings` says."""

    kind: Literal["proposal"] = "proposal"
    settings: dict[str, Any]
    active: PartyName
    passives: Annotated[tuple[PartyName, ...], Field(max_length=_MOST_PARTIES)]
    seats: Annotated[dict[Name, Seat], Field(max_length=_MOST_PARTIES)]
    relay: SharedRelay | None = None

    @model_validator(mode="after")
    def _goes(self) -> Self:
        if self.party not in self.seats:
            raise ValueError(f"{self.party} organises, and is none of {', '.join(self.seats)}")
        holders = {"aggregator": (self.active,), "dealer": (self.active, *self.passives)}
        for name, seat in self.seats.items():
            if seat.run_by in holders.get(seat.role, ()):
                raise ValueError(
                    f"{name}: {seat.run_by} runs it and is a party with rows: together they would "
                    f"read what the {seat.role} keeps apart; let another organisation run it"
                )
        if self.relay is None:
            dialling = [name for name, seat in self.seats.items() if seat.address is None]
            if len(dialling) > 1:
                raise ValueError(
                    f"{' and '.join(dialling)} have no address, so neither reaches the other: give "
                    "all but one an address, or all of them a relay"
                )
        elif self.relay.run_by not in self.seats:
            raise ValueError(f"relay: {self.relay.run_by} is none of {', '.join(self.seats)}")
        elif any(seat.address for seat in self.seats.values()):
            raise ValueError("relay: all dial it, so that no party has an address; leave them out")
        return self

    def config(self, own: Mapping[str, Any] | None = None, party: str = "") -> Config:
        """The run's settings; of `party` with what it says of its table, in `data.parties`."""
        return load_config_text(as_yaml(self.own_settings(own, party)), source="the proposal")

    def own_settings(self, own: Mapping[str, Any] | None, party: str) -> dict[str, Any]:
        data = self.settings.get("data")
        if own is None or not isinstance(data, dict) or "parties" not in data:
            return self.settings
        return {**self.settings, "data": {**data, "parties": {**data["parties"], party: own}}}


class Answer(_Document):
    """What a party says to a proposal, of which `proposal` is the digest.

    Attributes:
        request: for a certificate of the project's authority, PEM; or, of an organisation that has
            an authority, its certificate and that authority's; relay_request: for the relay's.
        table: what it tells of its own table; null: nothing.
    """

    kind: Literal["answer"] = "answer"
    proposal: _Hex32
    request: _Pem | None = None
    certificate: _Pem | None = None
    ca: _Pem | None = None
    relay_request: _Pem | None = None
    table: TableShape | None = None

    @model_validator(mode="after")
    def _asks_once(self) -> Self:
        if (self.request is None) == (self.certificate is None):
            raise ValueError("an answer has a request for a certificate, or a certificate")
        return self


class Signed(Settings):
    """A file: a document, and the signature of who it says wrote it."""

    document: dict[str, Any]
    signature: str = Field(pattern="^[0-9a-f]{128}$")

    @classmethod
    def by(cls, identity: Identity, content: _Document) -> Self:
        document = content.model_dump(mode="json")
        signature = identity.sign(_PURPOSE, content.kind.encode(), _canonical(document))
        return cls(document=document, signature=signature.hex())

    @classmethod
    def read(cls, path: Path) -> Self:
        if read_bytes(path, most=_MOST_BYTES)[:2] == b"PK":
            raise DataError(f"{path} is an archive; unpack it, and name the file that was in it")
        return read_json(path, cls)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(_canonical(self.document)).digest()

    def opened(self, kind: type[_DocumentT], source: str) -> _DocumentT:
        """What was signed. Raises RemoteProtocolError: another kind of document, of another
        version, malformed, or altered since.
        """
        wanted, found = kind.model_fields["kind"].default, str(self.document.get("kind"))[:40]
        theirs, ours = str(self.document.get("version"))[:40], metadata.version("secure-apfed")
        if found != wanted:
            raise RemoteProtocolError(f"{source}: expected the file of a {wanted}, got a {found}")
        if theirs != ours:
            raise RemoteProtocolError(
                f"{source}: version {theirs} of secure-apfed wrote it, and here is {ours}; all "
                f"parties of a run have one: pip install secure-apfed=={theirs}, or ask for "
                "another file"
            )
        try:
            content = kind.model_validate_json(json.dumps(self.document), strict=True)
        except ValidationError as error:
            raise RemoteProtocolError(f"{source}: is no {wanted}: {_first_of(error)}") from None
        key, signature = bytes.fromhex(content.identity), bytes.fromhex(self.signature)
        signed = (wanted.encode(), _canonical(self.document))
        verify(key, signature, _PURPOSE, *signed, signer=content.party)
        return content


class Sealed(_Document):
    """The project that all hold: the proposal, all answers, and the parties' certificates (PEM)."""

    kind: Literal["sealed project"] = "sealed project"
    proposal: Signed
    answers: Annotated[dict[Name, Signed], Field(max_length=_MOST_PARTIES)]
    ca: Annotated[str, Field(max_length=2**20)]
    certificates: Annotated[dict[Name, _Pem], Field(max_length=_MOST_PARTIES + 1)]


@dataclass(frozen=True, kw_only=True)
class Project:
    """A sealed project whose signatures all fit.

    words: of the whole, which are the same at all who hold the same; reads every identity in it.
    """

    proposal: Proposal
    answers: Mapping[str, Answer]
    sealed: Sealed
    digest: bytes

    @property
    def words(self) -> str:
        return in_words(self.digest, DOCUMENT_WORDS)


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def shared_settings(config: Config) -> dict[str, Any]:
    """What a proposal says of a run: nothing of one party's own table, machine or folders."""
    told = _told(config)
    if config.data.dataset != TABLES:
        told["data"].pop("folder", None)
        return told
    kept: tuple[str, ...] = _SAID_OF_TABLES
    if config.data.horizontal or config.data.labels_at:
        kept += ("classes",)
    data = {key: value for key, value in told["data"].items() if key in kept}
    return {**told, "data": {**data, "parties": _of_others(config)}}


def _of_others(config: Config) -> dict[str, dict[str, Any]]:
    return {name: {} for name in config.data.parties or {}}


def _told(settings: Settings) -> dict[str, Any]:
    told = settings.model_dump(mode="json", exclude_unset=True)
    for name, field in type(settings).model_fields.items():
        if EACH_ALONE in field.metadata and name not in _SAID_TO_ALL:
            told.pop(name, None)
        elif name in told and isinstance(value := getattr(settings, name), Settings):
            told[name] = _told(value)
    return told


def terms_digest(config: Config) -> bytes:
    """SHA-256 of what all parties sign of the settings, 32 bytes."""
    return hashlib.sha256(_canonical(config.terms())).digest()


def differing_terms(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Dotted names of the settings that differ."""
    found: list[str] = []
    for key in sorted({*ours, *theirs}):
        one, other = ours.get(key), theirs.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += [f"{key}.{below}" for below in differing_terms(one, other)]
        elif one != other:
            found.append(key)
    return found


def shape_of(own: OwnData, *, columns: tuple[str, ...] | None = None) -> TableShape:
    """What may be told of a table: counts rounded to two digits."""
    table = own.table
    labels: dict[str, int] = {}
    if table.labels is not None:
        labels = {"labelled": _rounded(len(own.labelled_rows)), "classes": len(own.classes)}
    (features,) = table.shape
    return TableShape(rows=_rounded(len(table.ids)), features=features, columns=columns, **labels)


def named_columns(own: OwnData) -> tuple[str, ...]:
    encoding = own.table.encoding
    return tuple(column.name for column in encoding.columns) if encoding.kind == "columns" else ()


def _rounded(count: int) -> int:
    return round(count, 2 - len(str(count)))


def propose(
    config: Config,
    party: str,
    folder: Path,
    *,
    addresses: Mapping[str, str],
    relay: SharedRelay | None = None,
    run_by: Mapping[str, str] = MappingProxyType({}),
    brought: Tls | None = None,
    columns: bool = False,
) -> Proposal:
    """At the organiser, which is `party`: write a proposal and its own answer into its folder."""
    active, *passives = party_names(config.data)
    roles = roles_of(METHODS[config.method.name], config, active, passives)
    if unknown := sorted({*addresses, *run_by, party} - set(roles)):
        raise ConfigError(
            f"{', '.join(unknown)} takes no part in this run, whose parties are {', '.join(roles)}"
        )
    _require_no(folder / _PROPOSAL, "holds a proposal already")
    make_private(folder)
    identity = PartyFolder(folder).identity()
    try:
        proposal = Proposal(
            version=metadata.version("secure-apfed"), party=party, identity=identity.public.hex(),
            settings=shared_settings(config), active=active, passives=tuple(passives), relay=relay,
            seats={
                name: Seat(role=role, address=addresses.get(name), run_by=run_by.get(name))
                for name, role in roles.items()
            },
        )  # fmt: skip
    except ValidationError as error:
        raise ConfigError(f"this cannot be proposed: {_first_of(error)}") from None
    _write(folder / _PROPOSAL, Signed.by(identity, proposal))
    own = config.model_dump(mode="json", exclude_unset=True)
    if parties := config.data.parties:
        table = _below(config, parties[party]) if party in parties else {}
        own["data"] = {**own["data"], "parties": {**_of_others(config), party: table}}
        own["data"].pop("folder", None)
    _answer(folder, proposal, party, own, brought=brought, columns=columns)
    return proposal


def _below(config: Config, own: Settings) -> dict[str, Any]:
    """A party's settings with paths that hold from anywhere."""
    told = own.model_dump(mode="json", exclude_unset=True)
    for key in ("file", "encoding"):
        if told.get(key):
            told[key] = str(party_path(config.data, Path(told[key])).absolute())
    return told


def read_proposal(path: Path) -> Proposal:
    """A proposal whose signature fits, and whose settings say nothing of one party's machine."""
    proposal = Signed.read(path).opened(Proposal, str(path))
    config = proposal.config()
    active, *passives = party_names(config.data)
    roles = roles_of(METHODS[config.method.name], config, active, passives)
    same = (active, tuple(passives)) == (proposal.active, proposal.passives)
    if not same or roles != {name: seat.role for name, seat in proposal.seats.items()}:
        raise RemoteProtocolError(
            f"{path}: its settings are of a run of {', '.join(roles)}, it names "
            f"{', '.join(proposal.seats)}; ask {proposal.party} for another one"
        )
    if shared_settings(config) != proposal.settings:
        told = differing_terms(proposal.settings, shared_settings(config))
        raise RemoteProtocolError(
            f"{path}: it says {', '.join(told)}, which each party says for itself; ask "
            f"{proposal.party} for another one"
        )
    return proposal


def answer(
    path: Path,
    party: str,
    folder: Path,
    *,
    table: Mapping[str, Any] | None = None,
    brought: Tls | None = None,
    columns: bool = False,
) -> Path:
    """At a party that takes part: make its folder, keys and settings; return its answer's file.

    Args:
        table: what it says of its own table, as in `data.parties`; columns: tell their names.
        brought: files of an organisation that has an authority of its own.
    """
    proposal = read_proposal(path)
    if party not in proposal.seats:
        raise ConfigError(
            f"{path} asks for {', '.join(proposal.seats)}, and not for {party}; say --as with the "
            "name that was agreed"
        )
    _require_no(folder / ANSWER.format(party), "holds an answer already: send that")
    make_private(folder)
    if folder.joinpath(_PROPOSAL).exists():
        raise ConfigError(f"{folder} is of another party or project; name another --folder")
    own = proposal.own_settings(table, party)
    made = _answer(folder, proposal, party, own, brought=brought, columns=columns)
    write_atomically(folder / _PROPOSAL, read_bytes(path, most=_MOST_BYTES))
    return made


def _answer(
    folder: Path, proposal: Proposal, party: str, settings: Mapping[str, Any], *,
    brought: Tls | None, columns: bool,
) -> Path:  # fmt: skip
    identity = PartyFolder(folder).identity()
    said: dict[str, Any] = {}
    if brought is None:
        request, key = certificate_request(party)
        said["request"] = request.decode()
    else:
        own = Credentials.load(brought.ca, brought.certificate, brought.key, name=party)
        key, said["certificate"], said["ca"] = own.key, own.certificate.decode(), own.ca.decode()
    secret = {_KEY: key}
    if proposal.relay is not None and proposal.relay.run_by == party:
        request, secret[_OF_RELAY + _KEY] = certificate_request(_RELAY)
        said["relay_request"] = request.decode()
    config = load_config_text(as_yaml(dict(settings)), source="the run")
    held = (config.data.parties or {}).get(party)
    if held is not None and held.file is not None:
        data = load_own_tables(config.data, party, seed=config.seed)
        said["table"] = shape_of(data, columns=named_columns(data) if columns else None)
    elif columns:
        raise ConfigError("--columns: there is no table to tell columns of; say --table, too")
    content = Answer(
        version=proposal.version, party=party, identity=identity.public.hex(),
        proposal=Signed.by(identity, proposal).digest.hex(), **said,
    )  # fmt: skip
    for name, pem in secret.items():
        write_atomically(folder / name, pem, private=True)
    write_atomically(folder / _RUN, as_yaml(dict(settings)).encode())
    made = folder / ANSWER.format(party)
    _write(made, Signed.by(identity, content))
    return made


def seal(paths: Sequence[Path], folder: Path, *, days: float = 365) -> Project:
    """At the organiser: put the answers together, its own among them, and write the project.

    Sealing the same answers again renews all certificates: their authority's key is kept nowhere.
    """
    written, identity = Signed.read(folder / _PROPOSAL), PartyFolder(folder).identity()
    proposal = written.opened(Proposal, str(folder / _PROPOSAL))
    if proposal.identity != identity.public.hex():
        raise ConfigError(
            f"{folder} is not the folder of {proposal.party}, who proposed this; it alone seals it"
        )
    own = folder / ANSWER.format(proposal.party)
    answers: dict[str, Signed] = {}
    for path in dict.fromkeys((own, *paths)):
        signed = Signed.read(path)
        found = signed.opened(Answer, str(path))
        if found.party in answers and answers[found.party] != signed:
            other = answers[found.party].opened(Answer, "another file")
            raise RemoteProtocolError(
                f"{path}: {found.party} answered twice, as {found.words!r} and as {other.words!r}; "
                "ask it by telephone which words are its own, and leave the other file out"
            )
        answers[found.party] = signed
    opened = _checked(written, proposal, answers, str(folder))
    authority, ca, certificates = make_authority(f"secure-apfed {proposal.party}"), [], {}
    ca.append(authority.certificate.decode())
    for name, given in opened.items():
        if given.request is not None:
            certificates[name] = authority.sign(given.request.encode(), name, days=days).decode()
        else:
            certificates[name], brought = str(given.certificate), str(given.ca)
            require_caller(name, certificates[name].encode(), frozenset())
            ca.append(brought)
        if given.relay_request is not None:
            made = authority.sign(given.relay_request.encode(), _RELAY, days=days)
            certificates[_RELAY] = made.decode()
    sealed = Sealed(
        version=proposal.version, party=proposal.party, identity=proposal.identity,
        proposal=written, answers=answers, ca="".join(dict.fromkeys(ca)), certificates=certificates,
    )  # fmt: skip
    _write(folder / _SEALED, Signed.by(identity, sealed))
    return accept(folder / _SEALED, proposal.party, folder)


def _checked(
    written: Signed, proposal: Proposal, answers: Mapping[str, Signed], source: str
) -> dict[str, Answer]:
    """All answers, by party. Raises RemoteProtocolError: one lacks, is of somebody who was not
    asked, or to another proposal; or two come with one key.
    """
    found = {name: signed.opened(Answer, f"answer of {name}") for name, signed in answers.items()}
    for name, given in found.items():
        if given.party != name or name not in proposal.seats:
            raise RemoteProtocolError(
                f"{source}: {given.party} answers, and asked were {', '.join(proposal.seats)}"
            )
        if given.proposal != written.digest.hex():
            raise RemoteProtocolError(
                f"{source}: {name} answered another proposal; send it this one, and let it answer "
                "in a new folder"
            )
    if lacking := [name for name in proposal.seats if name not in found]:
        raise RemoteProtocolError(
            f"{source}: no answer of {', '.join(lacking)} is there; ask for it"
        )
    by_key: dict[str, str] = {}
    for name, given in found.items():
        if (other := by_key.setdefault(given.identity, name)) != name:
            raise RemoteProtocolError(
                f"{source}: {other} and {name} answered with one identity; nobody is two parties, "
                "so one of them has to answer from a folder of its own"
            )
    return found


def read_project(path: Path) -> Project:
    """A sealed project all of whose signatures fit; whose they are, people compare."""
    signed = Signed.read(path)
    sealed = signed.opened(Sealed, str(path))
    proposal = sealed.proposal.opened(Proposal, str(path))
    if (proposal.party, proposal.identity) != (sealed.party, sealed.identity):
        raise RemoteProtocolError(
            f"{path}: {proposal.party} proposed it as {proposal.words!r}, and {sealed.party} "
            f"sealed it as {sealed.words!r}; who proposes seals: ask {proposal.party} by telephone"
        )
    answers = _checked(sealed.proposal, proposal, sealed.answers, str(path))
    return Project(proposal=proposal, answers=answers, sealed=sealed, digest=signed.digest)


def accept(path: Path, party: str, folder: Path) -> Project:
    """At each party: take over a sealed project that holds what it answered, and write party.yaml.

    Of a party.yaml that is there the keys that the project does not say are kept.
    """
    mine = Signed.read(folder / ANSWER.format(party))
    proposed, project = Signed.read(folder / _PROPOSAL), read_project(path)
    proposal, sealed = project.proposal, project.sealed
    if sealed.proposal.digest != proposed.digest:
        raise RemoteProtocolError(
            f"{path} is of another proposal than {folder / _PROPOSAL}, which {party} answered: it "
            f"was altered since, or is of another project; ask {proposal.party}"
        )
    if (given := project.answers.get(party)) is None or sealed.answers[party] != mine:
        words = "no identity" if given is None else repr(given.words)
        raise RemoteProtocolError(
            f"{path} lacks the answer of {party} that lies in {folder}: it holds {words} as "
            f"{party}; send {proposal.party} your answer again, and ask it by telephone who sent "
            "the other one"
        )
    certificates = {name: sealed.certificates.get(name) for name in (party, _RELAY)}
    files = {_CA: sealed.ca, _CERTIFICATE: certificates[party]}
    if proposal.relay is not None and proposal.relay.run_by == party:
        files[_OF_RELAY + _CERTIFICATE] = certificates[_RELAY]
    for name, pem in files.items():
        if pem is None:
            raise RemoteProtocolError(f"{path} holds no {name} of {party}; ask {proposal.party}")
        write_atomically(folder / name, pem.encode())
    Credentials.load(folder / _CA, folder / _CERTIFICATE, folder / _KEY, name=party)
    if path.absolute() != (folder / _SEALED).absolute():
        write_atomically(folder / _SEALED, read_bytes(path, most=_MOST_BYTES))
    written = folder / _PARTY
    kept = parse_yaml(read_text(written), str(written))[0] if written.exists() else {}
    made = {**kept, **_party_file(project, party)}
    config = load_config(folder / _RUN)
    if config.data.dataset != TABLES:  # a trial: everybody has the whole set
        held = load_data(config.data, seed=config.seed).own(party)
        if held is not None:
            write_atomically(folder / _TABLE, pack_own(held), private=True)
            made["table"] = _TABLE
    write_atomically(written, as_yaml(made).encode())
    PartyFile.read(written)
    return project


def _party_file(project: Project, party: str) -> dict[str, Any]:
    proposal, relay = project.proposal, project.proposal.relay
    address = proposal.seats[party].address
    made: dict[str, Any] = {
        "party": party, "active": proposal.active, "passives": list(proposal.passives),
        "config": _RUN, "link": "grpc",
        "tls": {"ca": _CA, "certificate": _CERTIFICATE, "key": _KEY},
        "peers": {
            name: {
                **({} if seat.address is None else {"address": seat.address}),
                "identity": project.answers[name].identity,
            }
            for name, seat in proposal.seats.items() if name != party
        },
    }  # fmt: skip
    if relay is not None:
        made["relay"] = relay.address
    if address is not None:
        host, port = parse_address(address)
        # Others may reach it by a name of which this machine knows nothing.
        made["listen"] = address if is_loopback(host) else spell_address(("0.0.0.0", port))  # noqa: S104
    return made


def _first_of(error: ValidationError) -> str:
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ")
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), said)))


def _require_no(path: Path, why: str) -> None:
    if path.exists():
        raise ConfigError(f"{path.parent} {why} ({path.name}); to begin anew, name another folder")


def _write(path: Path, signed: Signed) -> None:
    write_atomically(path, to_json(signed.model_dump(mode="json"), indent=1).encode() + b"\n")
