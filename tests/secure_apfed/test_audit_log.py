"""Audit logs: what they hold, how each alteration shows, and what two of them say of a link."""

import hashlib
import json
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import fresh_identity
from secure_apfed.cli import execute
from secure_apfed.commands.apart import _describe_ending
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.runs.audit_log import AuditLog, Disagreement, compare_logs, verify_log
from secure_apfed.settings.promises import Promise
from tests.memory import trace_memory
from tests.secure_apfed.seats import seal_all
from tests.secure_apfed.small_runs import read_stderr, run_as_json
from tests.secure_apfed.test_exchange_links import run_with_frames


class FakeMeter:
    """What releases cost, as a test says."""

    def __init__(self) -> None:
        self.charges = 0
        self.promise = Promise(figure="epsilon_x", epsilon=None)

    def charge(self, epsilon: float) -> None:
        self.charges += 1
        self.promise = replace(self.promise, epsilon=epsilon)


_ENDS = (("ann", "bob"), ("bob", "ann"))


class Pair:
    """Ann and Bob with sealed links and audit logs, who keep their identities over sessions."""

    def __init__(self, folder: Path) -> None:
        self.identities = {name: fresh_identity() for name in ("ann", "bob")}
        self.paths = {name: folder / name / "audit.log" for name in self.identities}
        for path in self.paths.values():
            path.parent.mkdir(exist_ok=True)
        self.meter = FakeMeter()
        self.logs: dict[str, AuditLog] = {}
        self.begin()

    def begin(self) -> None:
        self.on_the_way: dict[str, list[bytes]] = {"ann": [], "bob": []}
        self.logs = {
            me: AuditLog(
                self.paths[me],
                me,
                self.identities[me],
                {peer: self.identities[peer].public},
                self.meter if me == "ann" else FakeMeter(),
            )
            for me, peer in _ENDS
        }
        self.links = {me: self._links(me, peer) for me, peer in _ENDS}
        seal_all(self.links)

    def _links(self, me: str, peer: str) -> Links:
        sent = self.on_the_way[me]
        return Links(
            me, [peer], lambda receiver, frame: sent.append(frame), observers=(self.logs[me],)
        )

    def send(self, sender: str, *steps: int, payload: bytes = b"z", arrive: bool = True) -> None:
        receiver = "bob" if sender == "ann" else "ann"
        for step in steps:
            self.links[sender].send(receiver, Kind.REPRESENTATIONS, step, payload)
            if arrive:
                self.take(receiver, self.on_the_way[sender].pop(0))

    def take(self, receiver: str, frame: bytes) -> Envelope:
        sender = "bob" if receiver == "ann" else "ann"
        waiting = self.links[receiver].receive(sender, Kind.REPRESENTATIONS)
        return run_with_frames(waiting, (sender, frame))

    def close(self, names: Sequence[str] = ("ann", "bob")) -> None:
        for name in names:
            self.logs[name].close()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def parting(one: Path, other: Path) -> Disagreement:
    """Return where what the first log says it sent and what the second received part."""
    found = compare_logs(one, other).directions[0].parting
    assert found is not None
    return found


def forge_chain(lines: list[bytes]) -> bytes:
    """Put the same lines under a chain that fits, as a forger does."""
    head = b""
    found = []
    for line in lines:
        body = line[line.index(b'",') + 2 :]
        head = hashlib.sha256(head + body).digest()
        found.append(b'{"chain":"' + head.hex().encode() + b'",' + body)
    return b"\n".join(found) + b"\n"


def test_both_ends_hold_the_digest_of_the_same_sealed_bytes(pair: Pair) -> None:
    pair.links["ann"].send("bob", Kind.REPRESENTATIONS, 3, b"a secret number")
    (frame,) = pair.on_the_way["ann"]
    pair.take("bob", frame)
    pair.close()
    sent = lines_of(pair.paths["ann"])[1]
    received = lines_of(pair.paths["bob"])[1]
    shared = {
        "kind": "representations",
        "step": 3,
        "sequence": 0,
        "size": len(frame),
        "digest": hashlib.sha256(frame).hexdigest(),
    }
    assert sent.items() >= {**shared, "event": "sent", "peer": "bob"}.items()
    assert received.items() >= {**shared, "event": "received", "peer": "ann"}.items()
    assert b"secret" not in pair.paths["ann"].read_bytes()
    summary = verify_log(pair.paths["ann"].parent, identity=pair.identities["ann"].public.hex())
    assert (summary.party, summary.lines, summary.opened, summary.has_final_signature) == (
        "ann",
        3,
        1,
        True,
    )
    (flow,) = summary.flows
    assert (flow.event, flow.envelopes, flow.size) == ("sent", 1, len(frame))
    with pytest.raises(CheckpointError, match="not of 00"):
        verify_log(pair.paths["ann"], identity="00" * 32)
    assert stat.S_IMODE(pair.paths["ann"].stat().st_mode) == 0o600


def test_a_line_is_in_the_file_before_its_frame_leaves(pair: Pair) -> None:
    seen: list[int] = []
    links = pair.links["ann"]
    links._post_frame = lambda receiver, frame: seen.append(len(lines_of(pair.paths["ann"])))
    pair.send("ann", 0, 1, arrive=False)
    assert seen == [2, 3]
    os.close(pair.logs["ann"]._file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        pair.send("ann", 2, arrive=False)
    assert seen == [2, 3], "it left without a line"


def test_epsilon_stands_where_a_charged_payload_leaves(pair: Pair) -> None:
    pair.send("ann", 0)
    pair.meter.charge(1.5)
    pair.send("ann", 1, payload=b"released")
    pair.send("ann", 1, payload=b"released")  # the same to another passive
    pair.send("ann", 1, payload=b"something else")
    pair.send("ann", 1, payload=b"released")
    pair.meter.charge(float("inf"))
    pair.send("ann", 2)
    pair.close()
    told = [line.get("epsilon") for line in lines_of(pair.paths["ann"]) if line["event"] == "sent"]
    assert told == [None, 1.5, 1.5, None, None, "inf"]
    assert verify_log(pair.paths["ann"]).epsilon == float("inf")


# Each with the first line that does not fit.
ALTERED: tuple[tuple[Callable[[list[bytes]], list[bytes]], int], ...] = (
    (lambda lines: [*lines[:2], lines[2].replace(b'"step":1', b'"step":4'), *lines[3:]], 3),
    (lambda lines: [*lines[:2], lines[2].replace(lines[2][10:12], b"zz", 1), *lines[3:]], 3),
    (lambda lines: [*lines[:2], *lines[3:]], 3),
    (lambda lines: lines[1:], 1),
    (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3),
    (lambda lines: [*lines[:3], *lines[2:]], 4),
    (lambda lines: [*lines[:3], b"", *lines[3:]], 4),
    (lambda lines: [*lines[:-1], lines[-1].replace(b'":"', b'":"0')], 6),
)
ALTERATIONS = (
    "a step",
    "a hash",
    "a line less",
    "no first line",
    "lines in another order",
    "a line twice",
    "an empty line",
    "the last line",
)


@pytest.mark.parametrize(("alter", "line"), ALTERED, ids=ALTERATIONS)
def test_an_alteration_is_found_where_it_is(
    alter: Callable[[list[bytes]], list[bytes]], line: int, pair: Pair
) -> None:
    pair.send("ann", 0, 1, 2, 3)
    pair.close()
    path = pair.paths["ann"]
    path.write_bytes(b"\n".join(alter(path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(CheckpointError, match=f"line {line} is not chained"):
        verify_log(path)
    with pytest.raises(CheckpointError, match=f"line {line} is not chained"):
        pair.begin()


def test_a_log_written_anew_or_shortened_does_not_keep_its_signature(pair: Pair) -> None:
    pair.send("ann", 0, 1, 2)
    pair.close()
    path = pair.paths["ann"]
    lines = path.read_bytes().splitlines()
    path.write_bytes(forge_chain([*lines[:2], *lines[3:]]))
    with pytest.raises(CheckpointError, match=r"line 4 is no signature of the key"):
        verify_log(path)
    path.write_bytes(forge_chain([*lines[:2], *lines[3:-1]]))  # without the signature it shows less
    summary = verify_log(path)
    assert (summary.has_final_signature, summary.unsigned) == (False, 3)
    with pytest.raises(CheckpointError, match="is not signed at its end"):
        verify_log(path, identity=pair.identities["ann"].public.hex())
    parted = parting(path, pair.paths["bob"])
    assert (parted.sent_line, parted.received_line) == (3, 3)


@pytest.mark.parametrize("keep", [1, 60, -2])
def test_a_torn_last_line_is_told_and_cut_and_the_cut_is_logged(keep: int, pair: Pair) -> None:
    pair.send("ann", 0, 1)  # and nobody signs: the process is killed
    path = pair.paths["ann"]
    *whole, last = path.read_bytes().splitlines(keepends=True)
    torn = last[:keep]
    path.write_bytes(b"".join(whole) + torn)
    summary = verify_log(path)
    assert (summary.torn, summary.lines, summary.has_final_signature) == (len(torn), 2, False)
    with pytest.warns(UserWarning, match=f"{len(torn)} bytes are cut off"):
        pair.begin()
    pair.close()
    assert path.read_bytes().startswith(b"".join(whole))
    cut = [line.get("cut") for line in lines_of(path) if line["event"] == "opened"]
    assert cut == [0, len(torn)]
    again = verify_log(path)
    assert (again.cut, again.torn, again.opened, again.has_final_signature) == (
        len(torn),
        0,
        2,
        True,
    )


@pytest.mark.parametrize("altered", [False, True], ids=["something else", "an altered line"])
def test_an_end_that_is_no_line_is_not_cut(altered: bool, pair: Pair) -> None:
    pair.send("ann", 0, 1)
    path = pair.paths["ann"]
    content = path.read_bytes()
    other = content.splitlines()[-1].replace(b'"step":1', b'"step":7')
    end = other if altered else b"something else"
    path.write_bytes(content + end)
    with pytest.raises(CheckpointError, match="line 4 is not chained"):
        pair.begin()
    assert path.read_bytes() == content + end


def test_a_last_line_is_whole_without_its_newline(pair: Pair) -> None:
    pair.send("ann", 0, 1)
    path = pair.paths["ann"]
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert (verify_log(path).torn, verify_log(path).lines) == (0, 3)
    with warnings.catch_warnings(action="error"):
        pair.begin()
    pair.close()
    assert verify_log(path).lines == 5


def test_two_logs_of_one_link_are_equal_over_sessions(pair: Pair) -> None:
    pair.send("ann", 0, 1)
    pair.send("ann", 2, 3, arrive=False)  # the session ended before they arrived
    pair.close()
    pair.begin()
    pair.send("ann", 2, 3)
    pair.send("bob", 2)
    pair.close()
    there, back = compare_logs(pair.paths["ann"], pair.paths["bob"].parent).directions
    assert (there.sender, there.equal, there.unreceived, there.parting) == ("ann", 4, 2, None)
    assert (back.sender, back.equal, back.unreceived, back.parting) == ("bob", 1, 0, None)
    assert there.equal_size == sum(
        one["size"] for one in lines_of(pair.paths["bob"]) if one["event"] == "received"
    )
    pair.begin()
    pair.send("ann", 4, arrive=False)  # of this session nothing arrives
    pair.close()
    pair.begin()
    pair.send("ann", 4)
    pair.logs["ann"].sync()
    there, _ = compare_logs(pair.paths["ann"], pair.paths["bob"]).directions
    assert (there.equal, there.unreceived, there.parting) == (5, 3, None)
    pair.paths["ann"].unlink()
    with pytest.raises(CheckpointError, match="was removed"):
        pair.logs["ann"].sync()


def test_an_altered_frame_shows_in_both_logs(pair: Pair) -> None:
    pair.send("ann", 0)
    pair.send("ann", 1, arrive=False)
    frame = bytearray(pair.on_the_way["ann"].pop())
    frame[-1] ^= 1
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        pair.take("bob", bytes(frame))
    pair.close()
    there, back = compare_logs(pair.paths["ann"], pair.paths["bob"]).directions
    assert back.parting is None
    assert there.parting is not None
    assert there.parting.sent.startswith("representations of step 1, number 1")
    assert there.parting.received.startswith("a frame that was refused")
    assert (there.equal, there.parting.sent_line, there.parting.received_line) == (1, 3, 3)


def test_what_a_log_lacks_in_the_middle_or_has_too_much_is_told(pair: Pair) -> None:
    pair.send("ann", 0, 1, 2)
    pair.close()
    ann = pair.paths["ann"]
    bob = pair.paths["bob"]
    lines = bob.read_bytes().splitlines()
    bob.write_bytes(forge_chain([*lines[:2], *lines[3:-1]]))  # Bob leaves out that he had step 1
    assert "step 1" in parting(ann, bob).sent
    assert "step 2" in parting(ann, bob).received
    bob.write_bytes(forge_chain([*lines[:-1], lines[1]]))  # and here he had something twice
    assert (parting(ann, bob).sent_line, parting(ann, bob).received_line) == (None, 5)


def test_a_log_is_of_one_party_and_compared_with_a_peers(pair: Pair, tmp_path: Path) -> None:
    pair.close()
    (tmp_path / "other").mkdir()
    other = Pair(tmp_path / "other")
    other.close()
    with pytest.raises(CheckpointError, match="knows bob by the identity"):
        compare_logs(pair.paths["ann"], other.paths["bob"])
    with pytest.raises(CheckpointError, match="who has no link to ann"):
        compare_logs(pair.paths["ann"], pair.paths["ann"])
    with pytest.raises(CheckpointError, match="is the audit log of ann, this party is eve"):
        AuditLog(pair.paths["ann"], "eve", fresh_identity(), {}, FakeMeter())
    link = tmp_path / "audit.log"
    link.symlink_to(pair.paths["ann"])
    with pytest.raises(CheckpointError, match="symbolic link"):
        AuditLog(link, "ann", pair.identities["ann"], {}, FakeMeter())


def make_first_line(party: bytes, peers: bytes = b"{}") -> bytes:
    return b"".join(
        (
            b'{"chain":"","at":1.0,"event":"opened","format":1,"party":"',
            party,
            b'","identity":"',
            b"0" * 64,
            b'","peers":',
            peers,
            b',"cut":0}',
        )
    )


CROWD = ",".join(f'"p{n}":"{0:064}"' for n in range(1025)).encode()
SIGNED = b'{"chain":"","at":1.0,"event":"signed","signature":"' + b"0" * 128 + b'"}'
HOSTILE: tuple[tuple[bytes, str], ...] = (
    (b"", "is empty"),
    (b"hello\n", "line 1 is not chained"),
    (b'{"chain":"' + b"0" * 2**20, "longer than 262144 bytes"),
    (forge_chain([b'{"chain":"",' + b'"at":' + b"[" * 100_000]), "line 1 is ch"),
    (forge_chain([b'{"chain":"","at":' + b"1" * 10_000 + b"}"]), "line 1 is chain"),
    (forge_chain([SIGNED]), "does not say whose log it is"),
    (forge_chain([b'{"chain":"","at":1.0,"event":"\\u001b[2J"}']), "line 1 is"),
    (forge_chain([make_first_line(b"../x")]), "at 'opened.party'"),
    (forge_chain([make_first_line(b"x", b"{" + CROWD + b"}")]), "at 'opened.peers'"),
)


@pytest.mark.parametrize(("content", "says"), HOSTILE, ids=[f"{len(c)} bytes" for c, _ in HOSTILE])
def test_a_hostile_log_is_a_short_error(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        verify_log(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 800
    assert str(caught.value).isprintable()


def test_a_huge_log_takes_no_more_memory_than_a_line(pair: Pair) -> None:
    path = pair.paths["ann"]
    for _ in range(2000):
        pair.logs["ann"].observe_refusal("bob", b"x")
    with path.open("ab") as file:
        file.truncate(2**33)  # eight GiB of zeros on a disk that holds none of them
    with trace_memory() as peak:
        with pytest.raises(CheckpointError, match="line 2002 is longer than"):
            verify_log(path)
        assert peak() < 4e6


def test_commands_tell_and_end_with_codes(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.send("ann", 0, 1)
    pair.close()
    ann, bob = (str(pair.paths[name].parent) for name in ("ann", "bob"))
    assert execute(["audit-log", "verify", ann]) == 0
    assert pair.identities["ann"].public.hex()[:20] in capsys.readouterr().out
    own = run_as_json(capsys, "audit-log", "verify", ann)
    assert (own["party"], own["signed"], own["flows"][0]["envelopes"]) == ("ann", True, 2)
    assert run_as_json(capsys, "audit-log", "compare", ann, bob)["agree"] is True
    lines = pair.paths["bob"].read_bytes().splitlines()
    pair.paths["bob"].write_bytes(forge_chain([lines[0], *lines[2:-1]]))
    assert run_as_json(capsys, "audit-log", "compare", ann, bob, code=4)["agree"] is False
    assert execute(["audit-log", "compare", ann, bob]) == 4
    said = read_stderr(capsys)
    assert "ann logged at line 2" in said
    assert "lines after the last signature of bob" in said
    assert "1 line after" in _describe_ending(replace(verify_log(pair.paths["ann"]), unsigned=1))
    pair.paths["bob"].write_bytes(b"\n".join([*lines[:1], *lines[2:]]))
    refused = run_as_json(capsys, "audit-log", "verify", bob, code=3)
    assert "line 2 is not chained" in refused["error"]["message"]
    assert execute(["audit-log", "verify", str(pair.paths["bob"].parent / "none")]) == 3
