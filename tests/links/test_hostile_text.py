"""Text that a peer writes: it stands in no command, and no terminal, log or page obeys it."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apfed_experiments.report.page import _make_environment
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.files import to_json
from secure_apfed.base.peer_text import check_version
from secure_apfed.cli import execute
from secure_apfed.console import terminal
from secure_apfed.errors import DataError
from secure_apfed.exchange.envelope import clean_text, quote_reason
from secure_apfed.exchange.sockets import parse_address
from secure_apfed.organisations import project
from secure_apfed.planning import forecast as planning
from tests.links.test_project import Organisations, sign_changed

EVIL = "http://203.0.113.9/evil"
HIDDEN = f"a\x1b[2J\x9b1m\r\n\u202e\u2066\u200b\x07{EVIL}"
COMMAND = f"0.1.1 -i {EVIL} ; `id` $(id)"
COMMANDS = re.compile(
    r"pip install|openssl|--set|--at |--run-by|--allow"
    r"|secure-apfed [a-z]"
)


def is_shown_safely(text: str) -> None:
    """Nothing that a terminal obeys is in a text, and no command of it holds the peer's words."""
    hidden = {letter for letter in text if not letter.isprintable() and letter != "\n"}
    assert not hidden, hidden
    # Lines of a panel are one sentence; what is quoted is nobody's command.
    sentence = re.sub(r"\s*│\s*│?\s*", " ", text) if "│" in text else text
    for line in sentence.replace(f"'{COMMAND}'", "").splitlines():
        assert not (COMMANDS.search(line) and EVIL in line), line


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from leaves(item, (*path, at))
    else:
        yield path


def make_planter(path: tuple[Any, ...], text: str) -> Callable[[dict[str, Any]], None]:
    def plant(document: dict[str, Any]) -> None:
        holder: Any = document
        for name in path[:-1]:
            holder = holder[name]
        holder[path[-1]] = text

    return plant


@pytest.fixture(scope="module")
def proposal_files(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    made = Organisations(tmp_path_factory.mktemp("made"))
    made.propose(together=[["bank", "aggregator"]], relay=None)
    return made


@pytest.fixture(scope="module")
def text_of_proposal(proposal_files: Organisations) -> str:
    return (proposal_files.home("bank") / project.PROPOSAL_FILE).read_text()


FIELDS = (
    "kind",
    "version",
    "party",
    "identity",
    "relay",
    "relay_by",
    "over",
    "server",
    "addresses.bank",
    "run_by.aggregator",
    "together.0.0",
    "settings.name",
    "settings.method",
    "settings.method.name",
    "settings.guard",
    "settings.guard.mechanism",
    "settings.data.dataset",
    "settings.data.active",
    "settings.data.id_column",
    "settings.data.label_column",
    "settings.rules.silent_passive",
    "settings.alignment.normalisation.0",
    "settings.train.epochs",
    "settings.new",
    "new",
    "settings.data.parties.new",
    "addresses.new",
    "run_by.new",
)


def test_every_field_of_a_proposal_is_walked(text_of_proposal: str) -> None:
    found = {".".join(map(str, path)) for path in leaves(json.loads(text_of_proposal)["document"])}
    numbers = {"settings.rules.patience_s", "settings.rules.restarts"}
    others = {"addresses.shop", "addresses.aggregator", "together.0.1"}
    whole = {
        "settings.data.parties.bank",
        "settings.data.parties.shop",
        "settings.data.parties.clinic",
    }
    numbered = {name for name in found if name.startswith("settings.alignment.normalisation.")}
    assert found - set(FIELDS) - others - numbers - whole - numbered == set(), found


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("text", [HIDDEN, COMMAND], ids=["hidden", "command"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("by_key", [False, True], ids=["value", "signature broken"])
def test_a_proposal_s_text_is_obeyed_by_nobody(
    by_key: bool,
    field: str,
    text: str,
    text_of_proposal: str,
    proposal_files: Organisations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "forecast", _no_forecast)
    mail = tmp_path / "mail.json"
    mail.write_text(text_of_proposal)
    path = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    sign_changed(mail, make_planter(path, text))
    if by_key:
        content = json.loads(mail.read_text())
        content["signature"] = "00" * 64
        mail.write_text(json.dumps(content))
    call = [
        "project",
        "join",
        str(mail),
        "--as",
        "shop",
        "--folder",
        str(tmp_path / "shop"),
        "--table",
        str(proposal_files.base / "shop" / "shop.csv"),
        "--allow-together",
        "bank+aggregator",
    ]
    code = execute(call)
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)
    if by_key or text == HIDDEN:
        assert code != 0
        assert EVIL not in (shown.out + shown.err) or not by_key


OF_AN_ANSWER = (
    "kind",
    "version",
    "party",
    "identity",
    "proposal",
    "request",
    "certificate",
    "ca",
    "relay_request",
    "table.columns.0",
    "table.rows",
    "table.new",
    "new",
)


@pytest.fixture(scope="module")
def text_of_answer(proposal_files: Organisations) -> str:
    proposal = proposal_files.home("bank") / project.PROPOSAL_FILE
    return proposal_files.answer(
        "shop", proposal, shows_column_names=True, colluding_groups=[["bank", "aggregator"]]
    ).read_text()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("text", [HIDDEN, COMMAND], ids=["hidden", "command"])
@pytest.mark.parametrize("field", OF_AN_ANSWER)
def test_an_answer_s_text_is_obeyed_by_nobody(
    field: str,
    text: str,
    text_of_answer: str,
    proposal_files: Organisations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mail = tmp_path / "mail.json"
    mail.write_text(text_of_answer)
    path = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    sign_changed(mail, make_planter(path, text))
    assert (
        execute(["project", "seal", str(mail), "--folder", str(proposal_files.home("bank"))]) != 0
    )
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)


def _no_forecast(*_: Any, **__: Any) -> None:
    raise DataError("not counted here")


SURFACES: dict[str, Callable[[str], object]] = {
    "a failure": lambda text: terminal.show_failure(
        terminal.describe_failure(RemoteProtocolError(text.replace("\n", ""))),
        as_json=False,
        debug=False,
    ),
    "a failure as JSON": lambda text: terminal.show_failure(
        terminal.describe_failure(RemoteProtocolError(text)), as_json=True, debug=False
    ),
    "a note": lambda text: terminal.show_note(text.replace("\n", "")),
    "a table": lambda text: terminal.show_rows("title", ("a", "b"), [(text, text)]),
    "a title": lambda text: terminal.show_rows(text.replace("\n", ""), (text, ""), [("a", "b")]),
    "JSON": lambda text: terminal.print_json({text: [text]}),
    "a warning": lambda text: warnings.warn(text.replace("\n", ""), UserWarning, stacklevel=1),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_no_surface_lets_hidden_characters_through(
    surface: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = terminal.show_warning
        SURFACES[surface](HIDDEN)
    shown = capsys.readouterr()
    is_shown_safely(shown.out + shown.err)
    assert "evil" in shown.out + shown.err


def test_json_that_is_shown_reads_back_equal() -> None:
    assert json.loads(to_json({HIDDEN: [HIDDEN, "\ud800"]})) == {HIDDEN: [HIDDEN, "\ud800"]}


def test_a_page_shows_escapes_and_no_markup() -> None:
    page = _make_environment().from_string("<p>{{ text }}</p>").render(text=f"<script>{HIDDEN}")
    assert "<script>" not in page
    assert not {letter for letter in page if not letter.isprintable() and letter != "\n"}


@pytest.mark.parametrize("read", [clean_text, quote_reason])
def test_reasons_of_peers_are_one_line(read: Callable[[bytes], str]) -> None:
    assert read(HIDDEN.encode()).isprintable()
    assert len(read(b"\xff" * 10_000)) <= 10 * 400


@pytest.mark.parametrize(
    "version",
    [
        "0.1.1 -i x",
        "0.1.1\n",
        "",
        "1",
        "v1.0",
        "1.0-1",
        "1.0+a b",
        "1.0.dev",
        "\u0661.0",
        "1." * 40,
        "01.0",
        "1.0;x",
        "$(id)",
        "1!2.0a1.post2.dev3+local.1",
    ],
)
def test_a_version_is_one_of_pep_440(version: str) -> None:
    if version in ("1", "1!2.0a1.post2.dev3+local.1"):
        assert check_version(version) == version
        return
    with pytest.raises(ValueError, match="expected a version"):
        check_version(version)


@pytest.mark.parametrize(
    "address",
    [
        "a b:1",
        "a;id:1",
        "$(id):1",
        "a\n:1",
        "-x:1",
        "[::1%a;id]:1",
        "[::1%]x:1",
        "\u202ea:1",
        f"{'a' * 300}:1",
        "a/b:1",
        "a@b:1",
        "--set:1",
    ],
)
def test_an_address_is_a_host_and_no_words(address: str) -> None:
    with pytest.raises(
        Exception, match=r"an address is host:port|an IPv6 address stands"
    ) as raised:
        parse_address(address)
    assert str(raised.value).isprintable()
