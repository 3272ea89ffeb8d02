"""Project files before a run: a proposal, an answer of each party, a sealed project.

Run by: each organisation in its own folder. They exchange three kinds of files, which are public
and may go by mail. Each is one JSON object: a document, and the Ed25519 signature of its author.
The organiser, one of the parties, proposes settings and addresses; each party answers
with its identity and a request for a certificate; the organiser seals these together. Protects
from: files that were altered, mixed up or made by somebody else, as far as people compare words
(`secure_apfed.base.fingerprints`) by another way than the files took. Secret keys stay where they
are.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.seal import Identity, verify_signature
from secure_apfed.base.files import load_bytes, load_json, make_private, to_json, write_atomically
from secure_apfed.base.fingerprints import DOCUMENT_WORDS, IDENTITY_WORDS, format_as_words
from secure_apfed.base.names import Name
from secure_apfed.base.peer_text import check_version, escape_text, find_unprintable, quote_text
from secure_apfed.config import Config
from secure_apfed.config.file import load_config, load_config_text
from secure_apfed.config.plain_yaml import format_yaml, load_text, parse_yaml
from secure_apfed.contract import PartyRole
from secure_apfed.data import load_data, load_own_tables, pack_own
from secure_apfed.data.catalogue import party_names
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.exchange.agreement import find_differences
from secure_apfed.exchange.certificates import (
    Authority,
    Credentials,
    make_authority,
    make_request,
    require_caller,
)
from secure_apfed.exchange.grpc_link import is_loopback
from secure_apfed.exchange.sockets import parse_address, spell_address
from secure_apfed.learning.own_code import refuse_user_functions
from secure_apfed.methods import METHODS, assign_roles
from secure_apfed.organisations.coalitions import Conflict, find_conflicts
from secure_apfed.organisations.engines import (
    SERVER_NAME,
    EngineName,
    EnginePlan,
    check_engine,
    write_engine_files,
)
from secure_apfed.organisations.party import ANSWER_FILE as ANSWER_FILE
from secure_apfed.organisations.party import (
    PARTY_FILE,
    OwnLimits,
    PartyFile,
    Place,
    describe_table,
)
from secure_apfed.organisations.revocation import (
    RENEWED_CERTIFICATE_FILE,
    REVOCATION_LIST_FILE,
    find_newest_pem,
)
from secure_apfed.runs.folder import SEALED_PROJECT, PartyFolder, require_open_project
from secure_apfed.settings import EACH_ALONE, Settings
from secure_apfed.settings.data import OWN_TABLES, TableShape

PROPOSAL_FILE = "proposal.json"
RUN_FILE = "run.yaml"
AUTHORITY_KEY_FILE = "authority-key.pem"
"""Name of the file in the organiser's folder with the key that signs project certificates."""
_TABLE_FILE = "table.safetensors"
_CA_FILE = "ca.pem"
_CERTIFICATE_FILE = "certificate.pem"
_KEY_FILE = "key.pem"
_RELAY_NAME = "relay"
_SIGNATURE_PURPOSE = b"project v1"
_MAX_FILE_BYTES = 2**20
_MAX_KEY_LETTERS = 200
_HEX_32 = re.compile("[0-9a-f]{64}")
_KEYS_WITH_LINE_BREAKS = frozenset(
    {"request", "relay_request", "certificate", "ca", "certificates", "answers", "proposal"}
)
Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Pem = Annotated[str, Field(max_length=2**15, pattern=r"^[\n -~]*$")]
_EMPTY_REVOCATION_LIST = (
    b"# Certificates (SHA-256 or serial number) and identities that this party refuses, in hex, a "
    b"line each.\n# It is read again whenever it changes: secure-apfed certs revoke ... --list\n"
)
# Settings that each party sets for itself, but which a proposal contains all the same.
_OWN_KEYS_IN_PROPOSAL = ("name", "dealer", "pairwise_overlaps")
# Settings of `data` that a proposal contains where parties have their own tables.
_SHARED_DATA_KEYS = (
    "dataset",
    "partition",
    "labels_at",
    "active",
    "id_column",
    "label_column",
    "missing",
    "date_formats",
)
_LINK_BY_ENGINE: Mapping[EngineName, str] = {"grpc": "grpc", "nvflare": "nvflare", "flower": "grpc"}
"""The link of the parties' files, by engine: Flower starts parties that use links of their own."""
_DocumentT = TypeVar("_DocumentT", bound="Document")


Show: TypeAlias = Callable[["Proposal", Config, TableShape | None], None]
"""A callback that shows a proposal, a party's settings of the run, and the facts of its table that
the answer reveals (None: none)."""


def digest_content(content: Any) -> bytes:
    """Return the SHA-256 of plain values in their canonical JSON form, 32 bytes."""
    return hashlib.sha256(_encode_canonical(content)).digest()


def _encode_canonical(content: Any) -> bytes:
    """Return plain values as JSON with sorted keys and no spaces."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


class Document(Settings):
    """A document that a party signs, so that others can verify who wrote it.

    Attributes:
        kind: kind of the document, such as "proposal".
        version: version of secure-apfed that wrote it.
        party: name of the author.
        identity: the author's public key (Ed25519), hex.
    """

    kind: str
    version: Annotated[str, AfterValidator(check_version)] = Field(
        default_factory=lambda: metadata.version("secure-apfed")
    )
    party: Name
    identity: Hex32

    @property
    def words(self) -> str:
        """The fingerprint of the author's key in words, which people compare by telephone."""
        return format_as_words(bytes.fromhex(self.identity), IDENTITY_WORDS)


class Proposal(Document):
    """The organiser's proposal of a run to all parties.

    Attributes:
        party: the organiser.
        settings: settings of the run that concern all parties; see `list_shared_settings`.
        addresses: "host:port" of the parties that listen; the others only dial out.
        relay: the address of a relay that all parties dial instead; null: there is no relay.
        relay_by: the party that runs the relay.
        over: the framework (engine) that starts the parties: Flower or NVFlare; "grpc": none.
        server: "host:port" of that framework's server.
        run_by: by party, the organisation that runs it, if its name differs from the party's, as
            for an aggregator or a dealer; and under "server" who runs the framework's server.
        together: groups of parties that one organisation may run although it can then read more;
            each party that joins must also allow them by name.
    """

    kind: Literal["proposal"] = "proposal"
    settings: dict[str, Any]
    addresses: dict[Name, Place] = {}
    relay: Place | None = None
    relay_by: Name | None = None
    over: EngineName = "grpc"
    server: Place | None = None
    run_by: dict[Name, Annotated[str, Field(max_length=64, pattern="^[ -~]+$")]] = {}
    together: Annotated[tuple[tuple[Name, ...], ...], Field(max_length=64)] = ()

    @cached_property
    def roles(self) -> dict[str, PartyRole]:
        """The roles of all parties by name, the active first."""
        config = self.build_config()
        active, *passives = party_names(config.data)
        return assign_roles(METHODS[config.method.name], config, active, passives)

    def list_names(self, *roles: PartyRole) -> tuple[str, ...]:
        """Return the names of the parties that have one of these roles."""
        return tuple(name for name, role in self.roles.items() if role in roles)

    @cached_property
    def conflicts(self) -> tuple[tuple[str, Conflict], ...]:
        """The organisations that run several parties which could collude, and what they gain.

        Each entry has the organisation's name, and the parties with what they could read or alter.
        Names that differ only in case or punctuation count as one organisation.
        """
        parties_by_organisation: dict[str, list[str]] = {}
        for name in self.roles:
            organisation = self.run_by.get(name, name)
            key = "".join(filter(str.isalnum, organisation.casefold()))
            parties_by_organisation.setdefault(key or name, []).append(name)
        # The organisation's name is that of its last party in `run_by`, or else of its first party.
        return tuple(
            (self.run_by.get(parties[-1], parties[0]), conflict)
            for parties in parties_by_organisation.values()
            for conflict in find_conflicts(self.build_config(), self.roles, parties)
        )

    def require_allowed_groups(
        self, colluding_groups: Sequence[Sequence[str]], remedy: str
    ) -> None:
        """Raise ValueError if one organisation runs parties that could collude, without permission.

        `colluding_groups`: groups of parties, by name, that one organisation may run all the same.
        `remedy`: what the error advises.
        """
        allowed_groups = [set(group) for group in colluding_groups]
        for organisation, conflict in self.conflicts:
            if not any(set(conflict.party_names) <= group for group in allowed_groups):
                raise ValueError(
                    f"{quote_text(organisation)} would run {' and '.join(conflict.party_names)}, "
                    f"who together {conflict.gained_ability}; {remedy}, or allow it by name, with "
                    "--allow-together and these names joined by +"
                )

    def build_config(self, own_table: Mapping[str, Any] | None = None, party: str = "") -> Config:
        """Return the run's settings, to which one party's own table may be added.

        `own_table`: settings of the party's own table, for `data.parties.PARTY`; None: nothing is
        added. `party`: name of the party.

        Raises ConfigError: the party has no table in the run, or the settings name user-defined
            code, which each party must name for itself.
        """
        settings = self.settings
        if own_table:
            data = self.build_config().data
            if party not in (data.parties or {}):
                raise ConfigError(f"{party} takes part without a table of its own; name none")
            shared_data = settings["data"]
            tables = {**shared_data["parties"], party: own_table}
            settings = {**settings, "data": {**shared_data, "parties": tables}}
        config = load_config_text(format_yaml(settings), source="the proposal's settings")
        refuse_user_functions(config, source="the proposal")
        return config

    @model_validator(mode="after")
    def _check_method_has_passives(self) -> Self:
        """Refuse a method without passives, for which parties have nothing to agree on."""
        method = self.build_config().method.name
        if not METHODS[method].settings.has_passives:
            raise ValueError(
                f"method {method} trains the active alone, so there is nothing to agree on with "
                "others: run it with secure-apfed run, or choose another method"
            )
        return self

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Check all parts of the proposal: settings, names, groups and addresses.

        Raises ValueError: a part is not allowed, or the parts contradict one another.
        """
        self._check_public_settings()
        self._check_names()
        self.require_allowed_groups(
            self.together, "let another organisation run one of them, as --run-by NAME=ORGANISATION"
        )
        self._check_addresses()
        return self

    def _check_public_settings(self) -> None:
        """Refuse settings that each party sets for itself, such as those of its own table."""
        shared = list_shared_settings(self.build_config())
        if private_keys := list(find_differences(self.settings, shared)):
            raise ValueError(
                f"settings: {', '.join(private_keys)} is what each party says for itself"
            )

    def _check_names(self) -> None:
        """Refuse names of parties that the run has not, and parties that nobody is said to run.

        Aggregator and dealer have no rows, so an organisation must be named that runs them.
        """
        # The engine's server is no party, unless the run has a party of this name.
        has_server_organisation = SERVER_NAME in self.run_by and SERVER_NAME not in self.roles
        named_parties = {self.party, *self.addresses, *self.run_by}
        if self.relay_by is not None:
            named_parties.add(self.relay_by)
        if has_server_organisation:
            named_parties.discard(SERVER_NAME)
        check_engine(
            self.over,
            parties=self.roles,
            server=self.server,
            has_server_organisation=has_server_organisation,
            has_addresses=bool(self.addresses or self.relay),
        )
        if unknown := sorted(named_parties - set(self.roles)):
            raise ValueError(f"{', '.join(unknown)} is none of {', '.join(self.roles)}")
        for name in self.list_names("aggregator", "dealer"):
            if name not in self.run_by:
                raise ValueError(
                    f"it is not said who runs the {name}; an organisation without rows runs it, "
                    f"say --run-by {name}=ORGANISATION"
                )
        grouped_parties = {name for group in self.together for name in group}
        if unknown := sorted(grouped_parties - set(self.roles)):
            raise ValueError(f"together: {', '.join(unknown)} is none of {', '.join(self.roles)}")

    def _check_addresses(self) -> None:
        """Check that every two parties can reach each other: by their addresses or by a relay."""
        names_by_address = dict[str, str]()
        for name, address in self.addresses.items():
            if (other_party := names_by_address.setdefault(address, name)) != name:
                raise ValueError(
                    f"{other_party} and {name} have one address, {address}; each listens at its own"
                )
        if (self.relay is None) != (self.relay_by is None) or (self.relay and self.addresses):
            raise ValueError(
                "a relay has an address and a party that runs it, and no other has any"
            )
        parties_without_address = [name for name in self.roles if name not in self.addresses]
        if self.over != "nvflare" and self.relay is None and len(parties_without_address) > 1:
            raise ValueError(
                f"{' and '.join(parties_without_address)} have no address, so they do not reach "
                "each other: give all parties but one an address, or all of them a relay"
            )


class Answer(Document):
    """A party's reply to a proposal, by which it joins the project.

    Attributes:
        proposal: digest of the proposal, hex.
        request: request for a TLS certificate of the project's authority, in PEM; null: the party
            has a certificate.
        certificate: the TLS certificate of a party whose organisation has an authority of its own.
        ca: the certificate of that authority.
        relay_request: request for the relay's TLS certificate, from the party that runs the relay.
        table: facts about the party's table that others may know, such as its rounded number of
            rows; null: it reveals none.
    """

    kind: Literal["answer"] = "answer"
    proposal: Hex32
    request: Pem | None = None
    certificate: Pem | None = None
    ca: Pem | None = None
    relay_request: Pem | None = None
    table: TableShape | None = None


class SignedFile(Settings):
    """A file with a document and its author's signature.

    Attributes:
        document: the document's fields, which name the author and the author's public key.
        signature: the author's Ed25519 signature of the document, hex.
    """

    document: dict[str, Any]
    signature: str = Field(pattern="^[0-9a-f]{128}$")

    @classmethod
    def from_document(cls, identity: Identity, content: Document) -> Self:
        """Sign a document by the key pair of its author, and return the signed file."""
        document = content.model_dump(mode="json")
        signature = identity.sign(
            _SIGNATURE_PURPOSE, content.kind.encode(), _encode_canonical(document)
        )
        return cls(document=document, signature=signature.hex())

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file; its signature is not verified before `open_document`.

        Raises DataError: the file is missing or malformed.
        """
        if not path.exists():
            raise DataError(f"there is no file {path}; correct its path, or --folder")
        try:
            if load_bytes(path, max_bytes=_MAX_FILE_BYTES)[:2] == b"PK":
                raise DataError(f"{path} is an archive; unpack it, and name the file in it")
            return load_json(path, cls)
        except CheckpointError as error:
            fault = str(error).removesuffix("; restore it from a copy")
            raise DataError(f"{fault}; ask who sent it for the file again") from None

    def write_file(self, path: Path) -> None:
        """Write the signed document as JSON."""
        write_atomically(path, to_json(self.model_dump(mode="json"), indent=1).encode() + b"\n")

    def open_document(self, kind: type[_DocumentT], source: object) -> _DocumentT:
        """Verify the signature, and return the document; no field is used or shown before that.

        The signature proves that the document comes from the holder of the key that it names, not
        whose key that is: people compare the keys' words.

        `kind`: the class of the expected document. `source`: what errors call the file.

        Raises RemoteProtocolError: the document was altered, is of another kind or version, or is
            malformed.
        """
        expected_kind = kind.model_fields["kind"].default
        self._verify_signature(source)
        try:
            _require_kind(self.document, expected_kind)
            content = kind.model_validate_json(json.dumps(self.document), strict=True)
        except (ValueError, ConfigError, LocalProtocolError) as error:
            raise RemoteProtocolError(
                f"{source}: {_describe_document_fault(error, expected_kind)}"
            ) from None
        return content

    def _verify_signature(self, source: object) -> None:
        """Raise RemoteProtocolError unless the key that the document names has signed it.

        `source`: what the error calls the file.
        """
        identity = self.document.get("identity")
        kind = self.document.get("kind")
        if not isinstance(identity, str) or not _HEX_32.fullmatch(identity):
            raise RemoteProtocolError(
                f"{source}: names no key by which it is signed (identity: 64 digits in hex); ask "
                "who sent it for the file again"
            )
        purpose = kind.encode("utf-8", "replace") if isinstance(kind, str) else b""
        try:
            signature = bytes.fromhex(self.signature)
            signed = (purpose, _encode_canonical(self.document))
            verify_signature(
                bytes.fromhex(identity), signature, _SIGNATURE_PURPOSE, *signed, signer="its sender"
            )
        except RemoteProtocolError:
            raise RemoteProtocolError(
                f"{source}: its signature does not fit the key that it names ({identity[:16]}...): "
                "it was altered, or somebody else made it; ask who sent it for the file again, and "
                "compare its words by telephone"
            ) from None


class SealedProject(Document):
    """The project as all parties have it: the proposal, all parties' replies, and certificates.

    The organiser makes ("seals") it. All its signatures are verified when it is built; people
    compare whose keys they are.

    Attributes:
        proposal: the proposal, signed by the organiser.
        answers: by party, its signed reply to the proposal.
        ca: certificates of all certificate authorities, in PEM.
        certificates: by party, its TLS certificate, in PEM; the relay's under "relay".
    """

    kind: Literal["sealed project"] = "sealed project"
    proposal: SignedFile
    answers: dict[Name, SignedFile]
    ca: Annotated[str, Field(max_length=2**20, pattern=r"^[\n -~]*$")]
    certificates: dict[Name, Pem]

    @cached_property
    def proposal_document(self) -> Proposal:
        """The verified proposal."""
        return self.proposal.open_document(Proposal, "the proposal")

    @cached_property
    def answer_documents(self) -> dict[str, Answer]:
        """The verified replies to the proposal, by party."""
        return {
            name: answer.open_document(Answer, f"{name}") for name, answer in self.answers.items()
        }

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the whole project, 32 bytes, which identifies it."""
        return digest_content(self.model_dump(mode="json"))

    @property
    def project_words(self) -> str:
        """The project's fingerprint in words: equal at all parties that have the same project."""
        return format_as_words(self.digest, DOCUMENT_WORDS)

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        """Check that the documents belong together, so that all parties have the same project.

        Its author must be the author of the proposal. Every party must have replied to this
        proposal, each with a key of its own.
        """
        proposal = self.proposal_document
        if (proposal.party, proposal.identity) != (self.party, self.identity):
            raise ValueError(
                f"{proposal.party} proposed it as {proposal.words!r}, and {self.party} sealed it "
                f"as {self.words!r}; who proposes seals: ask {proposal.party} by telephone"
            )
        first_party_by_identity = dict[str, str]()
        for name, answer in self.answer_documents.items():
            first_party = first_party_by_identity.setdefault(answer.identity, name)
            if answer.party != name or name not in proposal.roles:
                raise ValueError(f"{name} answers, and asked were {', '.join(proposal.roles)}")
            if answer.proposal != digest_content(self.proposal.document).hex():
                raise ValueError(
                    f"{name} answered another proposal; send it this one, to join in a new folder"
                )
            if first_party != name:
                raise ValueError(
                    f"{first_party} and {name} answered with one identity, and nobody is two "
                    "parties; one of them has to answer from a folder of its own"
                )
        if missing_parties := [name for name in proposal.roles if name not in self.answers]:
            raise ValueError(f"there is no answer of {', '.join(missing_parties)}; ask for it")
        return self


def _require_kind(document: Mapping[str, Any], expected_kind: str) -> None:
    """Check a document's kind, version and characters, before its fields are parsed.

    `expected_kind`: the kind that the reader expects, such as "proposal" or "answer".

    Raises ValueError: another kind; another version of secure-apfed; or a text with characters that
        are not shown, such as control characters, by which it could deceive a reader.
    """
    kind = document.get("kind")
    if kind != expected_kind:
        raise ValueError(
            f"expected a file of the kind {expected_kind!r}, got {quote_text(kind, maximum=40)}"
        )
    file_version = document.get("version")
    own_version = metadata.version("secure-apfed")
    if not isinstance(file_version, str):
        raise ValueError(f"version: expected a text, got {quote_text(file_version)}")
    if check_version(file_version) != own_version:
        raise ValueError(
            f"version {file_version} of secure-apfed wrote it, and here is {own_version}; all "
            "parties of a run have one version: agree on it by telephone, install it as "
            "docs/keep-running.md says under Upgrade, or ask for a file of this one"
        )
    if unprintable_field := next(find_unprintable(_drop_pems(document)), None):
        raise ValueError(
            f"{unprintable_field}: holds characters that are not shown, as control characters or "
            "line breaks; leave them out"
        )


def _drop_pems(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document without the fields whose texts may contain line breaks.

    They are certificates and requests, whose characters a pattern checks, and the documents within
    a sealed project, which are checked when they are opened.
    """
    return {key: value for key, value in document.items() if key not in _KEYS_WITH_LINE_BREAKS}


def _describe_document_fault(error: Exception, expected_kind: str) -> str:
    """Return the fault of a document in words that follow the name of its file.

    `error`: the error that parsing the document raised.
    """
    if isinstance(error, ValidationError | ConfigError):
        return f"is no {expected_kind}: {_describe_first_error(error)}"
    return str(error)


def list_shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run that a proposal contains, as nested plain values.

    Settings of single parties are left out: of their own tables, machines and folders.
    """
    shared_settings = _dump_settings(config)
    shared_settings["data"].pop("folder", None)
    if config.data.dataset == OWN_TABLES:  # every party has a table of its own
        shared_keys = {*_SHARED_DATA_KEYS}
        if config.data.is_horizontal or config.data.labels_at:  # several parties number the classes
            shared_keys.add("classes")
        shared_settings["data"] = {
            key: value for key, value in shared_settings["data"].items() if key in shared_keys
        }
        shared_settings["data"]["parties"] = {name: {} for name in config.data.parties or {}}
    return shared_settings


def _dump_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that were set explicitly, as nested plain values.

    Settings that each party sets for itself are left out, except for a few that a proposal contains
    all the same (`_OWN_KEYS_IN_PROPOSAL`).
    """
    value_by_name = settings.model_dump(mode="json", exclude_unset=True)
    for name, field in type(settings).model_fields.items():
        if EACH_ALONE in field.metadata and name not in _OWN_KEYS_IN_PROPOSAL:
            value_by_name.pop(name, None)
            continue
        section = getattr(settings, name)
        if name in value_by_name and isinstance(section, Settings):
            value_by_name[name] = _dump_settings(section)
    return value_by_name


def propose_project(
    config: Config,
    party: str,
    folder: Path,
    *,
    certificate_folder: Path | None = None,
    shows_column_names: bool = False,
    show: Show = lambda *_: None,
    **proposal_fields: Any,
) -> Proposal:
    """Write a proposal, and the organiser's own reply to it, into the organiser's folder.

    The organiser is the party that proposes a run to the others.

    Args:
        config: the run's settings, with the organiser's own table.
        party: the organiser.
        folder: the organiser's folder, in which there is no project yet.
        certificate_folder: folder with certificate.pem, key.pem and ca.pem of an organisation that
            has an authority of its own; None: none.
        shows_column_names: whether the organiser's own reply reveals column names.
        show: called before the reply is written, with the proposal, the party's settings and the
            facts about its table that the reply reveals.
        proposal_fields: addresses, relay, relay_by, over, server, run_by and together of the
            proposal.

    Raises ConfigError: these settings cannot be proposed, or the folder has a project.
    """
    identity = _prepare_folder(folder, party)
    try:
        proposal = Proposal(
            party=party,
            identity=identity.public.hex(),
            settings=list_shared_settings(config),
            **proposal_fields,
        )
    except ValidationError as error:
        raise ConfigError(f"this cannot be proposed: {_describe_first_error(error)}") from None
    own_settings = config.model_dump(mode="json", exclude_unset=True)
    if config.data.dataset == OWN_TABLES:  # an absolute path, valid from any working directory
        own_settings["data"]["folder"] = str((config.data.folder or Path()).expanduser().absolute())
    signed_proposal = SignedFile.from_document(identity, proposal)
    _write_answer(
        signed_proposal,
        own_settings,
        party,
        folder,
        certificate_folder=certificate_folder,
        shows_column_names=shows_column_names,
        show=show,
    )
    return proposal


def answer_proposal(
    path: Path,
    party: str,
    folder: Path,
    *,
    table: Mapping[str, Any] | None = None,
    certificate_folder: Path | None = None,
    shows_column_names: bool = False,
    show: Show = lambda *_: None,
    colluding_groups: Sequence[Sequence[str]] = (),
    settings: Sequence[str] = (),
) -> Proposal:
    """Create a party's folder, keys, settings and signed reply to a proposal; return the proposal.

    Run by each party that takes part, except for the organiser.

    Args:
        path: path of the proposal.
        party: the party that replies.
        folder: the party's folder, in which there is no project yet.
        table: settings of its own table, as in `data.parties`; None: it has none.
        certificate_folder: folder with the certificate.pem, key.pem and ca.pem of an organisation
            that has an authority of its own; None: the organiser is asked for a certificate.
        shows_column_names: whether the reply reveals column names.
        show: called before the reply is written, with the proposal, the party's settings and the
            facts about its table that the reply reveals; it may raise an error to cancel.
        colluding_groups: groups of parties that this party lets one organisation run, although the
            organisation can then read more. Other such groups in the proposal are refused.
        settings: further settings of its own table, each as "data.parties.shop.numeric=[age]".

    Raises:
        ConfigError: the proposal lets one organisation run parties that `colluding_groups` does not
            allow, does not name this party, or `settings` concern more than the party's own table.
        RemoteProtocolError: the proposal was altered, or is of another version.
    """
    signed_proposal = SignedFile.from_file(path)
    proposal = signed_proposal.open_document(Proposal, path)
    try:
        proposal.require_allowed_groups(
            colluding_groups, f"ask {proposal.party} for another proposal"
        )
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if party not in proposal.roles:
        raise ConfigError(
            f"{path} asks for {', '.join(proposal.roles)}, and not for {party}; say --as with the "
            "name that was agreed"
        )
    _prepare_folder(folder, party)
    config = proposal.build_config(table, party)
    if settings:
        config = _set_party_settings(config, party, settings)
    own_settings = config.model_dump(mode="json", exclude_unset=True)
    _write_answer(
        signed_proposal,
        own_settings,
        party,
        folder,
        certificate_folder=certificate_folder,
        shows_column_names=shows_column_names,
        show=show,
    )
    return proposal


def _set_party_settings(config: Config, party: str, assignments: Sequence[str]) -> Config:
    """Return the run's settings after further settings of one party's own table.

    `assignments`: each as "data.parties.PARTY.key=value".

    Raises ConfigError: the party has no table, or a setting is not of its table.
    """
    if party not in (config.data.parties or {}):
        raise ConfigError(f"{party} takes part without a table of its own; leave --set out")
    for setting in assignments:
        if not setting.strip().startswith(f"data.parties.{party}."):
            raise ConfigError(
                f"--set {setting}: who joins sets what is of its own table, as "
                f"data.parties.{party}.numeric=[age]; ask the organiser for another proposal where "
                "all agree on a setting, and change other settings of your own in "
                f"{RUN_FILE} after joining"
            )
    text = format_yaml(config.model_dump(mode="json", exclude_unset=True))
    return load_config_text(text, source="the proposal's settings", overrides=assignments)


def _prepare_folder(folder: Path, party: str) -> Identity:
    """Create a party's folder and its key pair of signatures; return the key pair.

    Raises ConfigError: the folder has a project already.
    """
    if existing := [path.name for path in folder.glob("*.json")]:
        raise ConfigError(
            f"{folder} holds {', '.join(sorted(existing))} already: send what {party} answered, or "
            "name another folder to restart"
        )
    make_private(folder)
    return PartyFolder(folder).load_identity()


def _write_answer(
    proposal: SignedFile,
    settings: Mapping[str, Any],
    party: str,
    folder: Path,
    *,
    certificate_folder: Path | None,
    shows_column_names: bool,
    show: Show,
) -> None:
    """Write a party's signed reply to a proposal, its private TLS keys and its settings of the run.

    The party's own limits are checked, and `show` is called, before anything is written.

    Args:
        proposal: the signed file of the proposal.
        settings: the party's settings of the run.
        party: the party that replies.
        folder: the party's folder, with its key pair of signatures.
        certificate_folder: folder with certificates of the party's own authority; None: the reply
            requests a certificate from the organiser.
        shows_column_names: whether the reply reveals column names.
        show: called with the proposal, the party's settings and the facts about its table that the
            reply reveals.
    """
    identity = PartyFolder(folder).load_identity()
    answer_fields, private_key_by_file = _make_tls_fields(proposal, party, certificate_folder)
    config = load_config_text(format_yaml(settings), source=str(folder / RUN_FILE))
    table_settings = (config.data.parties or {}).get(party)
    if table_settings is not None and table_settings.is_read_from_file:
        data = load_own_tables(config.data, party, seed=config.seed)
        answer_fields["table"] = describe_table(data, shows_column_names=shows_column_names)
    answer = Answer(
        party=party,
        identity=identity.public.hex(),
        proposal=digest_content(proposal.document).hex(),
        **answer_fields,
    )
    proposal_document = proposal.open_document(Proposal, folder)
    party_file_path = folder / PARTY_FILE
    OwnLimits.from_incomplete_file(party_file_path).require_protection(
        config, party=party, path=party_file_path, settings_owner=proposal_document.party
    )
    show(proposal_document, config, answer.table)
    for name, pem in private_key_by_file.items():
        write_atomically(folder / name, pem, private=True)
    write_atomically(folder / RUN_FILE, format_yaml(settings).encode())
    proposal.write_file(folder / PROPOSAL_FILE)
    SignedFile.from_document(identity, answer).write_file(folder / ANSWER_FILE.format(party))


def _make_tls_fields(
    proposal: SignedFile, party: str, certificate_folder: Path | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the TLS fields of a party's reply, and its private keys by the names of their files.

    The party that runs the relay also requests the relay's certificate.

    `certificate_folder`: folder with certificates of the party's own authority; None: the reply
    requests a certificate from the organiser.
    """
    answer_fields = dict[str, Any]()
    if certificate_folder is None:
        request, key = make_request(party)
        answer_fields["request"] = request.decode()
    else:
        pems = (certificate_folder / name for name in (_CA_FILE, _CERTIFICATE_FILE, _KEY_FILE))
        credentials = Credentials.from_files(*pems, name=party)
        key = credentials.key
        answer_fields["certificate"] = credentials.certificate.decode()
        answer_fields["ca"] = credentials.ca.decode()
    private_key_by_file = {_KEY_FILE: key}
    if proposal.document["relay_by"] == party:
        relay_request, relay_key = make_request(_RELAY_NAME)
        private_key_by_file[f"{_RELAY_NAME}-{_KEY_FILE}"] = relay_key
        answer_fields["relay_request"] = relay_request.decode()
    return answer_fields, private_key_by_file


def seal_project(answer_paths: Sequence[Path], folder: Path, *, days: float = 365) -> SealedProject:
    """Combine the proposal and all parties' replies to the sealed project; run by the organiser.

    All TLS certificates are issued, and the project is also installed in the organiser's folder.
    Sealing the same replies again issues new certificates under a new authority, and so changes the
    project's fingerprint. `secure_apfed.organisations.renewal` renews one certificate without that.

    Args:
        answer_paths: paths of the other parties' replies.
        folder: the organiser's folder, with the proposal and the organiser's own reply.
        days: how long certificates are valid.

    Raises:
        ConfigError: the folder is not the organiser's.
        RemoteProtocolError: replies are missing, contradictory or altered.
    """
    signed_proposal = SignedFile.from_file(folder / PROPOSAL_FILE)
    identity = PartyFolder(folder).load_identity()
    proposal = signed_proposal.open_document(Proposal, folder / PROPOSAL_FILE)
    if proposal.identity != identity.public.hex():
        raise ConfigError(f"{folder} is not of {proposal.party}, who proposed this and alone seals")
    signed_answer_by_party = _load_answers(
        (folder / ANSWER_FILE.format(proposal.party), *answer_paths)
    )
    authority = make_authority("secure-apfed project authority")
    certificate_by_name, authority_certificates = _issue_certificates(
        authority, signed_answer_by_party, days=days
    )
    try:
        sealed = SealedProject(
            party=proposal.party,
            identity=proposal.identity,
            proposal=signed_proposal,
            answers=signed_answer_by_party,
            ca=authority_certificates,
            certificates=certificate_by_name,
        )
    except ValidationError as error:
        raise RemoteProtocolError(
            f"this cannot be sealed: {_describe_first_error(error)}"
        ) from None
    write_atomically(folder / AUTHORITY_KEY_FILE, authority.key, private=True)
    SignedFile.from_document(identity, sealed).write_file(folder / SEALED_PROJECT)
    return accept_project(folder / SEALED_PROJECT, proposal.party, folder)


def _load_answers(paths: Iterable[Path]) -> dict[str, SignedFile]:
    """Read the signed replies in these files; return them by party, each verified.

    Raises RemoteProtocolError: a reply was altered, or two of one party differ.
    """
    signed_answer_by_party: dict[str, SignedFile] = {}
    for path in dict.fromkeys(paths):
        signed = SignedFile.from_file(path)
        answer = signed.open_document(Answer, path)
        if signed_answer_by_party.setdefault(answer.party, signed) != signed:
            other_answer = signed_answer_by_party[answer.party].open_document(Answer, path)
            raise RemoteProtocolError(
                f"{path}: {answer.party} answered twice, as {other_answer.words!r} and as "
                f"{answer.words!r}; ask it by telephone which words are its own, and leave the "
                "other file out"
            )
    return signed_answer_by_party


def _issue_certificates(
    authority: Authority, signed_answer_by_party: Mapping[str, SignedFile], *, days: float
) -> tuple[dict[str, str], str]:
    """Issue a TLS certificate for each request in the parties' replies.

    Returns the certificates of all parties (and the relay) by name, also those of other
    authorities; and the certificates of all authorities. All are in PEM.

    `authority`: the project's own authority. `signed_answer_by_party`: signed replies by party.
    `days`: how long issued certificates are valid.
    """
    certificate_by_name = dict[str, str]()
    authority_certificates = [authority.certificate.decode()]
    for name, signed in signed_answer_by_party.items():
        answer = signed.open_document(Answer, name)
        if answer.certificate is not None and answer.ca is not None:
            require_caller(name, answer.certificate.encode(), frozenset())
            certificate_by_name[name] = answer.certificate
            authority_certificates.append(answer.ca)
        for holder, request in {name: answer.request, _RELAY_NAME: answer.relay_request}.items():
            if request is not None:
                certificate = authority.sign_request(request.encode(), holder, days=days)
                certificate_by_name[holder] = certificate.decode()
    distinct_authorities = dict.fromkeys(authority_certificates)
    return certificate_by_name, "".join(distinct_authorities)


def accept_project(path: Path, party: str, folder: Path) -> SealedProject:
    """Install a sealed project in a party's folder; run by each party.

    It writes the TLS files, the party's settings file and the files for the framework that starts
    the parties. Settings in that file which the project does not set stay as they are.

    `path`: path of the sealed project. `party`: this party. `folder`: this party's folder.

    Raises:
        RemoteProtocolError: the project is of another proposal, or lacks this party's reply.
        ConfigError: its settings protect less than the party's own limits, or TLS key and
            certificate do not fit.
    """
    require_open_project(folder)
    sealed = _load_joined_project(path, party, folder)
    proposal = sealed.proposal_document
    _install_certificates(sealed, party, folder)
    if path.absolute() != (folder / SEALED_PROJECT).absolute():
        write_atomically(folder / SEALED_PROJECT, load_bytes(path, max_bytes=_MAX_FILE_BYTES))
    party_settings = _make_party_settings(sealed, party)
    config = load_config(folder / RUN_FILE)
    party_file_path = folder / PARTY_FILE
    OwnLimits.from_incomplete_file(party_file_path).require_protection(
        config, party=party, path=party_file_path, settings_owner=proposal.party
    )
    if not (folder / REVOCATION_LIST_FILE).exists():
        write_atomically(folder / REVOCATION_LIST_FILE, _EMPTY_REVOCATION_LIST)
    if config.data.dataset != OWN_TABLES:  # a trial: every party has the whole set
        data = load_data(config.data, seed=config.seed).select_party(party)
        if data is not None:
            write_atomically(folder / _TABLE_FILE, pack_own(data), private=True)
            party_settings["table"] = _TABLE_FILE
    _update_party_file(party_file_path, party_settings)
    write_engine_files(proposal.over, _plan_engine(sealed, party, folder, config))
    return sealed


def _load_joined_project(path: Path, party: str, folder: Path) -> SealedProject:
    """Read and verify a sealed project to which this party has replied.

    `path`: path of the project. `folder`: the party's folder, with the proposal and the reply.

    Raises RemoteProtocolError: the project is of another proposal, or lacks this party's reply.
    """
    own_answer = SignedFile.from_file(folder / ANSWER_FILE.format(party))
    own_proposal = SignedFile.from_file(folder / PROPOSAL_FILE)
    sealed = SignedFile.from_file(path).open_document(SealedProject, path)
    proposal = sealed.proposal_document
    if sealed.proposal != own_proposal:
        raise RemoteProtocolError(
            f"{path} is of another proposal than {folder / PROPOSAL_FILE}, which {party} answered; "
            f"name the folder of its answer (--folder), or ask {proposal.party} which of the two "
            "holds"
        )
    if sealed.answers.get(party) != own_answer:
        raise RemoteProtocolError(
            f"{path} lacks the answer of {party} that lies in {folder}: it holds another one, of "
            f"{sealed.answer_documents[party].words!r}; send {proposal.party} yours again, and ask "
            "it by telephone who sent the other one"
        )
    return sealed


def _install_certificates(sealed: SealedProject, party: str, folder: Path) -> None:
    """Write a project's certificates into a party's folder: the authorities' and the party's own.

    Renewed certificates in the folder count if they are of this project; others are deleted. The
    party that runs the relay also gets the relay's certificate.

    Raises ConfigError: certificate, key and authority do not fit together.
    """
    _remove_renewals(folder, sealed)
    certificate = sealed.certificates.get(party)
    if certificate is not None:
        certificate = find_newest_pem(folder, party, certificate)
    pem_by_file = {_CA_FILE: sealed.ca, _CERTIFICATE_FILE: certificate}
    if sealed.proposal_document.relay_by == party:
        pem_by_file[f"{_RELAY_NAME}-{_CERTIFICATE_FILE}"] = sealed.certificates.get(_RELAY_NAME)
    for name, pem in pem_by_file.items():
        write_atomically(folder / name, (pem or "").encode())
    # Called for its errors: certificate, key and authority must fit together before the project
    # counts as installed.
    Credentials.from_files(
        folder / _CA_FILE, folder / _CERTIFICATE_FILE, folder / _KEY_FILE, name=party
    )


def _update_party_file(path: Path, new_settings: Mapping[str, Any]) -> None:
    """Write settings into a party's settings file; other settings in it stay as they are.

    A revocation list that the file names stays, too.

    Raises ConfigError: the file would not be valid.
    """
    previous_settings: Any = {}
    if path.exists():
        previous_settings, _ = parse_yaml(load_text(path), str(path))
    previous_tls = previous_settings.get("tls")
    if not isinstance(previous_tls, dict):
        previous_tls = {}
    tls = {**new_settings["tls"], "revoked": previous_tls.get("revoked") or REVOCATION_LIST_FILE}
    write_atomically(path, format_yaml({**previous_settings, **new_settings, "tls": tls}).encode())
    PartyFile.from_file(path)  # called for its error


def _plan_engine(sealed: SealedProject, party: str, folder: Path, config: Config) -> EnginePlan:
    """Return the values from which a party's files for Flower or NVFlare are made."""
    proposal = sealed.proposal_document
    return EnginePlan(
        party=party,
        organiser=proposal.party,
        parties=tuple(proposal.roles),
        server=parse_address(proposal.server or "localhost:8002"),
        server_organisation=proposal.run_by.get(SERVER_NAME, ""),
        organisation_by_party=proposal.run_by,
        project_digest=sealed.digest.hex(),
        max_restarts=config.rules.restarts,
        folder=folder.absolute(),
    )


def require_agreed_link(file: PartyFile) -> None:
    """Raise ConfigError if a party's settings file names another link than its project.

    The project is the document that all parties signed. Without one in the party's folder nothing
    is checked.
    """
    path = file.folder / SEALED_PROJECT
    if not path.is_file():
        return
    proposal = SignedFile.from_file(path).open_document(SealedProject, path).proposal_document
    agreed_link = _LINK_BY_ENGINE[proposal.over]
    if file.link != agreed_link:
        raise ConfigError(
            f"{file.party}: link: {file.link} in {file.folder / PARTY_FILE}, and the sealed "
            f"project is over {proposal.over}, whose link is {agreed_link}: put that back, or ask "
            f"{proposal.party} for another proposal"
        )


def _remove_renewals(folder: Path, sealed: SealedProject) -> None:
    """Delete the renewed certificates in a folder that do not belong to this project."""
    for path in folder.glob(RENEWED_CERTIFICATE_FILE.format("*")):
        document = load_json(path, dict[str, Any]).get("document", {})
        if not isinstance(document, dict) or document.get("project") != sealed.digest.hex():
            path.unlink()


def _make_party_settings(sealed: SealedProject, party: str) -> dict[str, Any]:
    """Return the settings in a party's settings file that follow from the sealed project."""
    proposal = sealed.proposal_document
    party_settings: dict[str, Any] = {
        "party": party,
        "active": proposal.list_names("active")[0],
        "passives": list(proposal.list_names("passive")),
        "config": RUN_FILE,
        "link": _LINK_BY_ENGINE[proposal.over],
        "tls": {"ca": _CA_FILE, "certificate": _CERTIFICATE_FILE, "key": _KEY_FILE},
        "peers": {
            name: {"address": proposal.addresses.get(name), "identity": answer.identity}
            for name, answer in sealed.answer_documents.items()
            if name != party
        },
        "relay": proposal.relay,
        "listen": None,
    }
    if (address := proposal.addresses.get(party)) is not None:
        party_settings["listen"] = choose_listen_address(address)
    return party_settings


def choose_listen_address(address: str) -> str:
    """Return the address at which a party listens, so that others reach it at `address`.

    It is the same port on all interfaces, since the host may have another address inside its own
    network; on loopback it is `address` itself.
    """
    host, port = parse_address(address)
    return address if is_loopback(host) else spell_address(("0.0.0.0", port))  # noqa: S104


def _describe_first_error(error: ValidationError | ConfigError) -> str:
    """Return the first fault that an error reports, in words, after the dotted key it concerns."""
    if isinstance(error, ConfigError):
        return str(error)
    first_fault = error.errors()[0]
    message = first_fault["msg"].removeprefix("Value error, ")
    key = escape_text(".".join(map(str, first_fault["loc"]))[:_MAX_KEY_LETTERS])
    return f"{key}: {message}" if key else message
