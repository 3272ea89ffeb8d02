"""Links over calls in any order, late, twice or never; commands of certificates and relays."""

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from apfed_protocols.errors import PartyLeftError
from apfed_protocols.seal import fresh_identity
from secure_apfed.config.file import load_settings_text
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.calls import Calls, Carry
from secure_apfed.exchange.certificates import Credentials, load_revocations, make_authority
from secure_apfed.exchange.resumable_link import Connection, LinkTransport
from secure_apfed.exchange.sealed_connection import MAX_FRAME_BYTES, LocalEnd
from secure_apfed.organisations.party import PartyFile
from tests.docs.pages import ROOT, text_of
from tests.links.pair import awaiting
from tests.secure_apfed.small_runs import run_as_json
from tests.waiting import LONG_S, wait_until

NAMES = ("ann", "bob")
NAME = bytes(32)


class Lines:
    """What carries the calls of both: each may be late, and some fail."""

    def __init__(self, *, fails: float = 0.0) -> None:
        identities = {name: fresh_identity() for name in NAMES}
        self._chance = random.Random(4)
        self.fails = fails
        self.inversions = 0
        self._last = 0
        self.failed = False
        self.names: list[bytes] = []  # of connections, in the order in which they began
        self.held_up = -1  # the number of a frame that is late by a second
        self.calls = {
            name: Calls(
                LocalEnd(
                    name=name,
                    identity=identities[name],
                    identity_by_peer={
                        peer: identities[peer].public for peer in NAMES if peer != name
                    },
                ),
                self.carrying(name),
            )
            for name in NAMES
        }
        self.met: dict[str, LinkTransport] = {}

    def carrying(self, caller: str) -> Carry:
        def carry(peer: str, name: bytes, number: int, frame: bytes) -> bool:
            time.sleep(1.0 if number == self.held_up else self._chance.random() * 0.004)
            if name not in self.names:
                self.names.append(name)
            # The word that a connection is over gets through, unless nothing does.
            if (number >= 0 or self.fails == 1.0) and self._chance.random() < self.fails:
                self.failed = True
                raise ConnectionError("a call failed")
            self.inversions += number < self._last
            self._last = number
            return self.calls[peer].take_frame(caller, name, number, frame)

        return carry

    def come(self, name: str) -> None:
        ways = self.calls[name].make_connectors()
        self.met[name] = LinkTransport.meet_peers(name, ways, patience_s=LONG_S, meet_s=LONG_S)


def together(*tasks: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(tasks)) as threads:
        for done in [threads.submit(task) for task in tasks]:
            done.result()


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    made = Lines(fails=getattr(request, "param", 0.0))
    together(*(partial(made.come, name) for name in NAMES))
    yield made
    together(*(linked.close for linked in made.met.values()))


@pytest.mark.parametrize("lines", [0.0, 0.02], ids=["late", "failing"], indirect=True)
def test_messages_come_in_order_each_once(lines: Lines) -> None:
    sent = [bytes([number % 256]) * (1 + 97 * number) for number in range(150)]
    sent.append(bytes(5 * 2**20))
    for message in sent:
        lines.met["ann"].send_frame("bob", message)
    assert [lines.met["bob"].receive_frame(awaiting("bob", "ann"), LONG_S)[1] for _ in sent] == sent
    assert lines.inversions > 0  # else nothing was put in order


def test_the_end_of_the_job_ends_who_waits_and_names_party_phase_and_who_was_gone(
    lines: Lines,
) -> None:
    lines.fails = 1.0
    lines.met["bob"].send_frame("ann", b"lost")
    wait_until(lambda: lines.failed, "that a call failed")
    timer = threading.Timer(0.2, lines.calls["bob"].end_connections, ["the job was aborted"])
    timer.start()
    with pytest.raises(
        PartyLeftError,
        match="training: bob expected sum of step 3 from ann; the job was aborted; calls to ann",
    ):
        lines.met["bob"].receive_frame(awaiting("bob", "ann"), LONG_S)
    lines.calls["ann"].end_connections("the job was aborted")


def test_a_party_that_ended_before_it_came_is_named_at_once_with_why() -> None:
    lines = Lines()
    lines.calls["ann"].note_stop("bob", "DataError: its own log.txt says more\x1b[2J")
    with pytest.raises(
        PartyLeftError, match="ann has no link to bob: bob stopped: 'DataError: "
    ) as told:
        LinkTransport.meet_peers(
            "ann", lines.calls["ann"].make_connectors(), patience_s=20, meet_s=20
        )
    assert "\x1b" not in str(told.value)


def test_calls_of_strangers_and_out_of_turn_are_refused(lines: Lines) -> None:
    """NVFlare says whose a call is; who is there still proves itself."""
    ann = lines.calls["ann"]
    ann.note_stop("eve", "out")
    assert "out" not in repr(vars(ann))
    assert not ann.take_frame("eve", NAME, 0, b"hello")  # not in the session
    assert not ann.take_frame("bob", NAME, 1, b"hello")  # of no connection that began
    assert not ann.take_frame("bob", b"short", 0, b"hello")
    assert not lines.calls["bob"].take_frame(
        "ann", NAME, 0, b"hello"
    )  # who is dialled, does not dial
    assert ann.take_frame("bob", NAME, 0, b"hello")
    assert not ann.take_frame("bob", NAME, 0, b"hello")  # again
    assert not ann.take_frame("bob", NAME, 5, b"hello")  # further ahead than anybody is
    assert not ann.take_frame("bob", NAME, 1, bytes(MAX_FRAME_BYTES + 1))


def test_somebody_in_a_peers_name_cuts_no_connection(lines: Lines) -> None:
    for stranger in range(9):
        lines.calls["ann"].take_frame("bob", bytes([stranger]) * 32, 0, b"no hello")
    lines.met["bob"].send_frame("ann", b"after")
    assert lines.met["ann"].receive_frame(awaiting("ann", "bob"), 30)[1] == b"after"
    assert lines.calls["ann"].take_frame(
        "bob", lines.names[0], -1, b""
    )  # the connection is there yet
    assert len({*lines.names} - {bytes([one]) * 32 for one in range(9)}) == 1


def test_a_call_that_is_late_breaks_no_connection(lines: Lines) -> None:
    lines.held_up = 20
    for number in range(40):
        lines.met["bob"].send_frame("ann", bytes([number]))
    came = [lines.met["ann"].receive_frame(awaiting("ann", "bob"), 20)[1] for _ in range(40)]
    assert came == [bytes([number]) for number in range(40)]
    assert len(lines.names) == 1


def test_what_nobody_reads_is_refused_soon() -> None:
    lines = Lines()
    ways = {name: lines.calls[name].make_connectors() for name in NAMES}
    made: dict[str, Connection] = {}
    together(
        lambda: made.update(bob=ways["bob"]["ann"]()),
        lambda: made.update(ann=wait_for(ways["ann"]["bob"])),
    )
    taken: list[bool] = []

    def pour(number: int) -> None:
        taken.append(lines.calls["ann"].take_frame("bob", lines.names[0], number, b"unread"))

    for number in range(2, 42):  # after the two of the proof
        threading.Thread(target=pour, args=(number,), daemon=True).start()
    wait_until(lambda: taken.count(False) > 30, "that what nobody reads was refused")
    assert taken.count(True) < 8
    for connection in made.values():
        connection.close()


def wait_for(connect: Callable[[], Connection]) -> Connection:
    while True:
        with contextlib.suppress(TimeoutError):
            return connect()


def test_what_was_said_of_a_session_reaches_no_other(lines: Lines) -> None:
    former = lines.calls
    lines.calls = Lines().calls
    for calls in former.values():
        calls.end_connections("its session is over")
    assert not former["ann"].take_frame("bob", lines.names[0], 2, b"late")
    assert not former["ann"].take_frame("bob", NAME, 0, b"late")
    assert not lines.calls["ann"].take_frame("bob", lines.names[0], 2, b"late")


def test_a_key_is_of_its_certificate(tmp_path: Path) -> None:
    authority = make_authority()
    for name in ("bank", "Shop_1.a"):
        made = authority.issue_certificate(name)
        (tmp_path / f"{name}.pem").write_bytes(made.certificate)
        (tmp_path / f"{name}-key.pem").write_bytes(made.key)
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    with pytest.raises(ConfigError, match="is not the key of"):
        Credentials.from_files(
            *(tmp_path / name for name in ("ca.pem", "bank.pem", "Shop_1.a-key.pem")), name=None
        )


def test_what_is_revoked_is_listed_as_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path
    listed = tmp_path / "revoked.txt"
    made = make_authority().issue_certificate("bank", days=30)
    for name, pem in (("ca", made.ca), ("certificate", made.certificate), ("key", made.key)):
        (own / f"{name}.pem").write_bytes(pem)
    shown = run_as_json(capsys, "certs", "show", str(own / "certificate.pem"))["certificates"][0]
    assert shown["names"] == "bank"
    assert 28 <= shown["days_left"] <= 30
    for what in (str(own / "certificate.pem"), shown["serial"].upper(), "AB:" * 31 + "AB"):
        run_as_json(
            capsys,
            "certs",
            "revoke",
            what,
            "--list",
            str(listed),
            "--note",
            "stolen\nlaptop",
            "--for-others",
        )
    assert load_revocations(listed) == {shown["sha256"], shown["serial"], "ab" * 32}
    for entry in (shown["sha256"], shown["serial"]):
        with pytest.raises(ConfigError, match="is revoked; have another one made"):
            Credentials.from_files(
                own / "ca.pem",
                own / "certificate.pem",
                own / "key.pem",
                name="bank",
                revoked=frozenset({entry}),
            )
    refused = run_as_json(capsys, "certs", "revoke", "no such", "--list", listed, code=2)
    assert "name files of certificates that are there, or hex" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("listen", "more", "reads", "code"),
    [
        pytest.param("127.0.0.1:7001", [], "needs --ca, --certificate and --key", 2, id="keys"),
        pytest.param(
            "0.0.0.0:7001",
            ["--insecure-plaintext-on-loopback"],
            "for loopback alone",
            2,
            id="loopback",
        ),
        pytest.param("7001", [], "an address is host:port", 4, id="host"),
    ],
)
def test_a_relay_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], listen: str, more: list[str], reads: str, code: int
) -> None:
    assert reads in json.dumps(run_as_json(capsys, "relay", "--listen", listen, *more, code=code))


@pytest.mark.parametrize(
    ("page", "link"), [("between-organisations", "grpc"), ("nvflare", "nvflare")]
)
def test_the_file_of_the_page_is_a_partys(page: str, link: str) -> None:
    (shown,) = re.findall(r"```yaml\n(party:.*?)```", text_of(f"docs/{page}.md"), re.DOTALL)
    for name, digit in (("9f...", "9"), ("3a...", "3"), ("77...", "7")):
        shown = shown.replace(name, f'"{digit * 64}"')
    told = load_settings_text(PartyFile, shown, source="page")
    assert told.link == link
    if link == "grpc":
        assert told.peers["aggregator"].behind_proxy
        assert told.peers["clinic"].address is None


def test_what_the_page_says_people_read_is_what_the_source_says() -> None:
    page = text_of("docs/between-organisations.md")
    folders = ("protocols/apfed_protocols", "secure_apfed/exchange", "secure_apfed/between")
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    sentences = (
        "nobody listens there",
        "its certificate has expired",
        "it ended the connection; where",
        "that is not in tls.ca",
        "its certificate has another name",
        "does not fit the key by which it is known",
        "has not yet ended a session before this one",
        "began anew: its process ended and was started again",
        "was altered, lost or repeated on",
    )
    assert [words for words in sentences if words not in page] == []
    assert [words for words in sentences if words not in source] == []
