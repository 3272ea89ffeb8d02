"""Every text of every document that a peer writes, generated from the declared types."""

import datetime as dt
import io
import json
import shutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import BaseModel
from rich.console import Console

from apfed_experiments.report import write_report
from apfed_protocols.errors import ApfedError, RemoteProtocolError
from apfed_protocols.seal import fresh_identity
from secure_apfed.cli import execute
from secure_apfed.console import terminal
from secure_apfed.console.progress import Board, _format_status_line, _LinePrinter
from secure_apfed.exchange import Kind
from secure_apfed.exchange.certificates import make_authority, require_caller
from secure_apfed.exchange.codec import TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.exchange.envelope import Envelope
from secure_apfed.exchange.grpc_link import _describe_error
from secure_apfed.exchange.relay import _Entry
from secure_apfed.exchange.sealed_connection import LocalEnd, _Hello, _require_expected_peer
from secure_apfed.exchange.status import LinkBreak, PeerStatus, Status
from secure_apfed.organisations import project
from secure_apfed.runs.active_model import _NetworkCard, load_model
from secure_apfed.runs.outcome import Outcome
from secure_apfed.runs.run import run
from tests.links.test_hostile_text import COMMAND, EVIL, HIDDEN, is_shown_safely
from tests.links.test_project import OTHERS, Organisations
from tests.secure_apfed.small_runs import small_config

TEXTS = {"hidden": HIDDEN, "command": COMMAND}
ANY = "*"
_ONE = torch.zeros(1)


def split_into_parts(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from split_into_parts(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from split_into_parts(part)
    else:
        yield annotation


def text_paths(kind: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every text that a model holds, keys of mappings as `*`."""
    for name, field in kind.model_fields.items():
        yield from texts_in(field.annotation, (*above, name))


def texts_in(annotation: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for part in split_into_parts(annotation):
        origin = typing.get_origin(part)
        inner = typing.get_args(part)
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield from text_paths(part, path)
        elif part is str or origin is typing.Literal:
            yield path
        elif origin is tuple or origin is list:
            for one in dict.fromkeys(each for each in inner if each is not Ellipsis):
                yield from texts_in(one, (*path, "0"))
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            yield (*path, ANY)
            yield from texts_in(inner[1], (*path, ANY))


def plant(document: Any, path: tuple[str, ...], text: str) -> None:
    """Write a text where a path leads, and make what lies above it; `*` adds a key of that name."""
    for at, name in enumerate(path):
        last = at == len(path) - 1
        if isinstance(document, list):
            if not document:
                document.append({})
            if last:
                document[0] = text
                return
            document = document[0]
            continue
        key = text if name == ANY and last else next(iter(document), text) if name == ANY else name
        if last:
            document[key] = text
            return
        if not isinstance(document.get(key), dict | list):
            document[key] = [] if path[at + 1] == "0" else {}
        document = document[key]


@pytest.fixture(scope="module")
def project_files(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    made = Organisations(tmp_path_factory.mktemp("made"))
    proposal = made.propose()
    project.seal_project([made.answer(name, proposal) for name in OTHERS], made.home("bank"))
    return made


def sign(content: dict[str, Any], whose: Any) -> dict[str, Any]:
    """Return a document, signed by a key that it then names, as any peer can."""
    content["identity"] = whose.public.hex()
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    signature = whose.sign(
        b"project v1", str(content["kind"]).encode("utf-8", "replace"), canonical
    )
    return {"document": content, "signature": signature.hex()}


SEALED = [".".join(path) for path in dict.fromkeys(text_paths(project.SealedProject))]
ANSWERS = [
    f"answers.clinic.document.{'.'.join(path)}"
    for path in dict.fromkeys(text_paths(project.Answer))
]
PROPOSALS = [
    f"proposal.document.{'.'.join(path)}" for path in dict.fromkeys(text_paths(project.Proposal))
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("field", [*SEALED, *ANSWERS, *PROPOSALS])
def test_a_sealed_project_s_text_is_obeyed_by_nobody(
    field: str,
    text: str,
    project_files: Organisations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = json.loads((project_files.home("bank") / "sealed.json").read_text())["document"]
    path = tuple(field.split("."))
    plant(content, path, TEXTS[text])
    signer = fresh_identity()
    if path[0] == "answers" and len(path) > 3:
        answer = content["answers"]["clinic"]
        content["answers"]["clinic"] = sign(answer["document"], fresh_identity())
    if path[0] == "proposal" and len(path) > 2:
        content["proposal"] = sign(content["proposal"]["document"], signer)
    mail = tmp_path / "mail.json"
    mail.write_text(json.dumps(sign(content, signer)))
    before = (project_files.home("shop") / "run.yaml").read_bytes()
    assert (
        execute(
            [
                "project",
                "join",
                str(mail),
                "--as",
                "shop",
                "--folder",
                str(project_files.home("shop")),
            ]
        )
        != 0
    )
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)
    assert (project_files.home("shop") / "run.yaml").read_bytes() == before


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sent") / "run"
    run(small_config("single_view", train={"epochs": 1, "batch_size": 64}), folder)
    (folder / "SHA256SUMS").unlink()
    return folder


CARD = [".".join(path) for path in dict.fromkeys([*text_paths(_NetworkCard), ("method",)])]
RESULT = [".".join(path) for path in dict.fromkeys(text_paths(Outcome))]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("field", CARD)
def test_a_model_card_s_text_is_obeyed_by_nobody(
    field: str, text: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    card = json.loads((folder / "model.json").read_text())
    plant(card, tuple(field.split(".")), TEXTS[text])
    if field == "method":
        card["predicts_alone"] = False
    (folder / "model.json").write_text(json.dumps(card))
    try:
        model = load_model(folder)
    except ApfedError as error:
        terminal.show_failure(terminal.describe_failure(error), as_json=False, debug=True)
    else:
        terminal.show_rows("Columns", ("class",), [(name,) for name in model.classes])
        terminal.print_json(model.card)
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)


def test_a_result_s_texts_are_shown_as_escapes_in_a_report(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One page of a result in which every text that is read as it stands is hostile."""
    folder = shutil.copytree(run_folder, tmp_path / "run")
    text = f"<script>{HIDDEN}</script>"
    planted = []
    for field in RESULT:
        content = json.loads((folder / "result.json").read_text())
        plant(content, tuple(field.split(".")), text)
        try:
            Outcome.model_validate(content)
        except ValueError:
            continue
        if field.split(".")[0] in ("method", "measure", "accuracy", "measures"):
            continue  # names of tables: refused with a sentence by those who look them up
        (folder / "result.json").write_text(json.dumps(content))
        planted.append(field)
    assert {"guarantee", "privacy.trace.0", "less_protected.0"} <= set(planted)
    page = write_report(folder).read_text()
    assert "<script>\\x1b" not in page
    assert "<script>a" not in page
    hidden = {letter for letter in page if not letter.isprintable()} - set("\n\t\u00a0\u2009\u202f")
    assert not hidden, hidden
    assert "evil" in page
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("field", ["method", "measure", "accuracy.*", "config"])
def test_names_in_a_folder_that_was_sent_are_refused_safely(
    field: str, text: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    if field == "config":
        name = json.dumps(TEXTS[text])
        config = (folder / "config.yaml").read_text().splitlines()
        lines = [f"name: {name}" if line.startswith("name:") else line for line in config]
        (folder / "config.yaml").write_text("\n".join(lines))
    else:
        content = json.loads((folder / "result.json").read_text())
        plant(content, tuple(field.split(".")), TEXTS[text])
        (folder / "result.json").write_text(json.dumps(content))
    execute(["report", str(folder)])
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)


def certificate(*, subject: str, issuer: str, names: list[str]) -> bytes:
    """Return a certificate that somebody made with these texts in it, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


ASCII = {"hidden": "a\x1b[2J\r\n\x07evil", "command": f"a ; `id` $(id) -i {EVIL}"}


@pytest.mark.parametrize("text", ASCII)
@pytest.mark.parametrize("field", ["subject", "issuer", "names"])
def test_a_certificate_s_text_is_obeyed_by_nobody(
    field: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, Any] = {"subject": "shop", "issuer": "ca", "names": ["other"]}
    hostile = (TEXTS[text] if text == "hidden" else ASCII[text])[:60]
    told[field] = [ASCII[text]] * 20 if field == "names" else hostile
    pem = certificate(**told)
    with pytest.raises(RemoteProtocolError) as raised:
        require_caller("shop", pem, frozenset())
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1200
    (tmp_path / "shown.pem").write_bytes(pem)
    assert execute(["certs", "show", str(tmp_path / "shown.pem")]) == 0
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)


def test_of_a_request_nothing_but_its_key_is_taken() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HIDDEN)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    pem = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    signed = make_authority().sign_request(pem, "shop")
    assert x509.load_pem_x509_certificate(signed).subject.rfc4514_string() == "CN=shop"


class _RefusalError(Exception):
    """What gRPC raises: text of the other end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def details(self) -> str:
        return self._text


ME = LocalEnd(name="bank", identity=fresh_identity(), identity_by_peer={"shop": bytes(32)})
FIELDS_OF_ENVELOPE = ("session", "sender", "receiver")


def parse_kind(text: str) -> None:
    Envelope.parse_header(msgpack.packb((1, "s", 0, text, "shop", "bank", 0)))


def parse_envelope(field: str) -> Callable[[str], None]:
    def parse(text: str) -> None:
        said = {"session": "s", "sender": "shop", "receiver": "bank"} | {field: text * 40}
        fields = (1, said["session"], 0, str(Kind.SUM), said["sender"], said["receiver"], 0)
        Envelope.parse_header(msgpack.packb(fields))

    return parse


MESSAGES: dict[str, Callable[[str], object]] = {
    "an envelope's kind": parse_kind,
    **{f"an envelope's {field}": parse_envelope(field) for field in FIELDS_OF_ENVELOPE},
    "a hello's sender": lambda text: _require_expected_peer(
        ME, text, _Hello(text, "bank", b"", "")
    ),
    "a hello's receiver": lambda text: _require_expected_peer(
        ME, "shop", _Hello("shop", text, b"", "")
    ),
    "who answers": lambda text: _require_expected_peer(ME, "shop", _Hello(text, "bank", b"", "")),
    "a hello's version": lambda text: _Hello.from_bytes(
        msgpack.packb((text, "a", "b", bytes(32), ""))
    ),
    "a relay's hello": lambda text: _Entry.parse(msgpack.packb([[text], text, text, text]), b""),
    "names of tensors": lambda text: unpack_tensors(
        pack_tensors({text: _ONE, f"{text}2": _ONE.clone()}),
        {"x": TensorSpec(_ONE.dtype, (1,))},
        sender="shop",
    ),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_s_text_is_quoted_in_what_refuses_it(message: str, text: str) -> None:
    with pytest.raises(ApfedError) as raised:
        MESSAGES[message](TEXTS[text])
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500
    is_shown_safely(str(raised.value))


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_call_over_grpc_ended_with_is_one_line(text: str) -> None:
    assert _describe_error(_RefusalError(TEXTS[text])).isprintable()


@pytest.mark.parametrize("text", TEXTS)
def test_why_a_peer_refuses_is_shown_in_a_status_line_as_escapes(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = PeerStatus(
        state="expected",
        silent_s=None,
        sign_s=0.0,
        sent_bytes=0,
        received_bytes=0,
        refusal=TEXTS[text],
    )
    status = Status(
        party="bank",
        phase="connecting",
        step=None,
        waits=None,
        peers={"shop": peer},
        epsilon=None,
        promise="nothing is sent",
    )
    terminal.show_line(_format_status_line(status))
    terminal.print_json(status.model_dump(mode="json"))
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)
    assert "evil" in shown.err


@pytest.mark.parametrize("text", TEXTS)
def test_why_a_link_broke_is_shown_in_a_log_as_escapes(text: str) -> None:
    broken = LinkBreak(since_s=1.0, patience_s=30.0, why=TEXTS[text])
    peer = PeerStatus(
        state="connected", silent_s=None, sign_s=0.0, sent_bytes=0, received_bytes=0, broken=broken
    )
    status = Status(
        party="bank",
        phase="training",
        step=None,
        waits=None,
        peers={"shop": peer},
        epsilon=None,
        promise="nothing is sent",
    )
    out = io.StringIO()
    board = Board()
    board.update_status(status)
    _LinePrinter(board, Console(file=out, width=200)).tick()
    is_shown_safely(out.getvalue())
    assert "evil" in out.getvalue()
