"""Intersections in buckets: the same result, nothing more learned, and on with the next bucket."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import ot
from apfed_protocols.psi.interface import IntersectionTooSmallError
from apfed_protocols.randomness import derive_key
from secure_apfed.alignment import buckets, over_links
from secure_apfed.alignment.buckets import BucketedIds, choose_bucket_count, compute_capacity
from secure_apfed.alignment.over_links import (
    StoredIntersection,
    align_hub,
    align_member,
    count_alignment_heartbeats,
)
from secure_apfed.errors import DataError
from secure_apfed.exchange import Envelope, InMemoryNetwork, Kind
from secure_apfed.exchange import links as exchange_links
from secure_apfed.settings.alignment import AlignmentSettings
from tests.secure_apfed.seats import network

SETTINGS = AlignmentSettings(minimum_rows=1, maximum_ids=1000, threads=1)
IDS = {
    "bank": [f"p{k}" for k in range(120)],
    "shop": [f"p{k}" for k in range(60, 200)],
    "post": [f"p{k}" for k in range(199, 39, -1)],
}
COMMON = {f"p{k}" for k in range(60, 120)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "IDS_PER_BUCKET", 50)


class Session:
    """Parties with a folder each that align, perhaps several times over."""

    def __init__(self, folder: Path | None = None, **ids: Sequence[str]) -> None:
        self.ids: dict[str, Sequence[str]] = ids or dict(IDS)
        self.folder = folder
        self.sent: list[Envelope] = []
        self.settings = dict.fromkeys(self.ids, SETTINGS)
        self.protocol = "auto"
        self.die: Callable[[Envelope], bool] = lambda envelope: False

    def _record(self, envelope: Envelope, wire_bytes: int) -> None:
        if self.die(envelope):
            raise KeyboardInterrupt
        self.sent.append(envelope)

    def align(self, session: str = "s") -> dict[str, list[str]]:
        hub, *members = self.ids
        world = network(InMemoryNetwork, *self.ids, record=self._record)
        everything: dict[str, Any] = {}
        protocol = {"protocol": self.protocol}
        settings = {name: own.model_copy(update=protocol) for name, own in self.settings.items()}
        for name, ids in self.ids.items():
            links = world.links[name]
            most = count_alignment_heartbeats(SETTINGS.maximum_ids, len(members))
            links.heartbeats.set_limits({peer: most for peer in self.ids if peer != name})
            rest: dict[str, Any] = {
                "session": session,
                "folder": self.folder and self.folder / name,
            }
            everything[name] = (
                align_hub(links, members, ids, settings[name], **rest)
                if name == hub
                else align_member(links, hub, ids, settings[name], members=members, **rest)
            )
        try:
            found = world.run_scripts(everything)
        finally:
            world.close()
        return {name: [self.ids[name][row] for row in rows] for name, rows in found.items()}

    def broken_off(self, die: Callable[[Envelope], bool], session: str = "first") -> None:
        self.die = die
        with pytest.raises(KeyboardInterrupt):
            self.align(session)
        self.die = lambda envelope: False


PROTOCOLS = pytest.mark.parametrize("protocol", ["ot", "ecdh"])


@PROTOCOLS
def test_buckets_find_what_one_list_finds(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for limit in (1000, 50, 3 if protocol == "ecdh" else 20):
        monkeypatch.setattr(buckets, "IDS_PER_BUCKET", limit)
        session = Session()
        session.protocol = protocol
        found[limit] = session.align()
    assert found[1000]["bank"] != found[50]["bank"]  # each in an order of its own
    order = found[50]["bank"]  # which tells nothing of buckets
    assert order not in (sorted(order), [name for name in IDS["bank"] if name in COMMON])
    assert [set(rows["bank"]) for rows in found.values()] == [COMMON] * 3
    assert [len(rows["bank"]) for rows in found.values()] == [len(COMMON)] * 3
    assert not [rows for rows in found.values() if not rows["bank"] == rows["shop"] == rows["post"]]


@pytest.mark.parametrize("start", [0, 10**6])
@pytest.mark.parametrize("size", [40, 10_000])
def test_lists_are_as_long_as_the_size_of_a_set_says_whatever_is_in_it(
    size: int, start: int
) -> None:
    count = choose_bucket_count(size)
    own = BucketedIds(
        "bank",
        range(start, start + size),
        AlignmentSettings(),
        key=bytes(32),
        bucket_count=count,
        padding_secret=bytes(32),
    )
    lists = [own.load_bucket(k) for k in range(count)]
    assert {len(entries) for entries, _ in lists} == {compute_capacity(size, count)}
    rows = np.concatenate([rows for _, rows in lists])
    assert sorted(rows[rows >= 0]) == list(range(size))
    everything = [entry for entries, _ in lists for entry in entries]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize(("size", "count"), [(0, 1), (1, 1), (50, 1), (51, 2), (101, 4), (400, 8)])
def test_buckets_are_a_power_of_two(size: int, count: int) -> None:
    assert choose_bucket_count(size) == count
    assert compute_capacity(size, 1) == size


@pytest.mark.parametrize("size", [2_000_000, 10**8])
def test_buckets_hardly_overflow(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "IDS_PER_BUCKET", 2**20)
    count = choose_bucket_count(size)
    room = compute_capacity(size, count)
    assert 0 < count * binom.sf(room, size, 1 / count) < 2**-40
    assert count * binom.sf(int(0.998 * room), size, 1 / count) > 2**-40  # it fills no more
    assert room * count < 1.02 * size


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (["a", "b", "c", " a"], r"bank has repeated ID\(s\), in row\(s\) 3 \(as 0\)"),
        (["a", "", "c"], "bank: its ID column is empty in 1 rows, first in row 1 "),
        ([str(k) for k in range(1001)], "bank has 1001 IDs, the parties agreed on at most 1000"),
    ],
)
def test_unfit_ids_are_refused(ids: list[str], says: str) -> None:
    with pytest.raises((DataError, LocalProtocolError), match=says):
        BucketedIds("bank", ids, SETTINGS, key=bytes(32), bucket_count=2, padding_secret=bytes(32))


def test_full_buckets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "compute_capacity", lambda size, count: size // count)
    full = r"^bank: \d+ IDs fell into bucket \d, which has"
    with pytest.raises((DataError, LocalProtocolError), match=full):
        BucketedIds(
            "bank", IDS["bank"], SETTINGS, key=bytes(32), bucket_count=2, padding_secret=bytes(32)
        )


def test_too_few_common_ids_over_all_buckets_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    session.settings = dict.fromkeys(IDS, SETTINGS.model_copy(update={"minimum_rows": 61}))
    with pytest.raises(IntersectionTooSmallError, match="fewer IDs than the agreed minimum of 61"):
        session.align()
    session.settings = dict.fromkeys(IDS, SETTINGS.model_copy(update={"minimum_rows": 60}))
    assert set(session.align()["bank"]) == COMMON  # more than in any bucket


def dies_after(name: str, messages: int) -> Callable[[Envelope], bool]:
    """The party of this name is killed when it is about to send one more than so many messages."""
    left = iter(range(messages))
    return lambda one: one.sender == name and next(left, None) is None


# how many messages the hub and a member send in the opening, in one bucket, and a half
MESSAGES = {"ot": (2 + 8 + 4, 1 + 3 + 2), "ecdh": (8, 5)}


@PROTOCOLS
@pytest.mark.parametrize("name", IDS)
def test_who_is_killed_in_a_bucket_goes_on_with_it(
    name: str, protocol: str, tmp_path: Path
) -> None:
    session = Session(tmp_path / name)
    whole = Session(tmp_path / f"{name} whole")
    session.protocol = whole.protocol = protocol
    session.broken_off(dies_after(name, MESSAGES[protocol][name != "bank"]))
    kept = {party: len(list((tmp_path / name / party).glob("result-*.bin"))) for party in IDS}
    assert min(kept.values()) > 0
    session.sent.clear()
    assert set(session.align("second")["bank"]) == COMMON
    whole.align()
    assert len(session.sent) < len(whole.sent)


def first_lists(session: Session) -> set[bytes]:
    """The longest messages of all: lists and vectors, without the head of their parts."""
    return {one.payload[20:] for one in session.sent if len(one.payload) > 20 + 32 * 30}


@PROTOCOLS
def test_what_is_sent_again_is_the_same_and_of_other_ids_another(
    protocol: str, tmp_path: Path
) -> None:
    session = Session(tmp_path / "two", bank=IDS["bank"][70:115], shop=IDS["shop"][:45])
    session.protocol = protocol
    session.broken_off(lambda one: len(session.sent) == 4)  # the last list, or the tags
    before = first_lists(session)
    assert before
    session.sent = []
    session.align("second")
    assert before <= first_lists(session)
    fresh = Session(tmp_path / "fresh", bank=IDS["bank"][70:115], shop=IDS["shop"][:45])
    fresh.protocol = protocol
    fresh.align("first")
    assert not before & first_lists(fresh)
    session = Session(tmp_path)
    session.protocol = protocol
    session.broken_off(lambda one: len(session.sent) == 30)
    lists = first_lists(session)
    session.sent = []
    session.ids["shop"] = [f"p{k}" for k in range(61, 200)]
    assert set(session.align("second")["bank"]) == COMMON - {"p60"}
    assert not lists & first_lists(session)


@PROTOCOLS
def test_a_peer_that_sends_another_list_the_second_time_is_refused(
    protocol: str, tmp_path: Path
) -> None:
    """Its own record says that nothing changed; the record of the bank says otherwise."""
    session = Session(tmp_path)
    session.protocol = protocol
    session.broken_off(lambda one: len(session.sent) == 30)
    (tmp_path / "shop" / "secret.bin").write_bytes(bytes(32))
    with pytest.raises(RemoteProtocolError, match=r"^shop sent another message for bucket"):
        session.align("second")


DONE_BYTES = 20 + 22  # the heads of a part and of an empty message


@pytest.mark.parametrize("label", [b"ot challenge", b"ot order"], ids=["challenge", "tags"])
def test_a_later_message_that_differs_the_second_time_is_refused(
    label: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second proof, under another challenge, would tell what the first one's mask hid."""
    session = Session(tmp_path, bank=IDS["bank"][70:115], shop=IDS["shop"][:45])
    session.protocol = "ot"
    session.broken_off(lambda one: one.sender == "bank" and len(one.payload) == DONE_BYTES)

    def derive_another(key: bytes, *context: bytes) -> bytes:
        return derive_key(key, *context, *([b"another"] if label in context else []))

    monkeypatch.setattr(ot, "derive_key", derive_another)
    with pytest.raises(RemoteProtocolError, match=r"^shop sent another message for bucket 0"):
        session.align("second")


def test_a_retry_counts_once_and_other_ids_count_again(tmp_path: Path) -> None:
    session = Session(tmp_path / "parties")
    session.settings = {
        name: SETTINGS.model_copy(update={"history": tmp_path / "history", "runs_with_a_peer": 2})
        for name in IDS
    }

    def count_lines() -> int:
        return (tmp_path / "history" / "bank.jsonl").read_text().count("\n")

    for attempt in range(3):
        session.sent.clear()
        session.broken_off(lambda one: len(session.sent) == 10, f"attempt {attempt}")
        assert count_lines() == 1
    session.align("to the end")
    assert count_lines() == 1
    for name in IDS:
        StoredIntersection(tmp_path / "parties" / name).delete_files()
    session.align("anew")
    assert count_lines() == 2
    session.ids["bank"] = session.ids["bank"][1:]
    with pytest.raises(DataError, match=r"aligned 2 time\(s\) with this party already"):
        session.align("once more")


def test_a_record_is_private_and_forgotten_on_demand(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.align()
    kept = [path for name in IDS for path in (tmp_path / name).iterdir()]
    assert kept
    assert {path.stat().st_mode & 0o077 for path in (*kept, tmp_path / "bank")} == {0}
    assert not [path for path in kept if path.name.startswith("ids-")]
    assert set(session.align("again")["shop"]) == COMMON  # of what is kept, without a bucket
    StoredIntersection(tmp_path / "bank").delete_files()
    assert not (tmp_path / "bank").exists()


@contextmanager
def saying(monkeypatch: pytest.MonkeyPatch, role: str, **changes: Any) -> Iterator[None]:
    """The opening of a member, or the reply of the hub, with some fields changed."""
    cls = getattr(over_links, role)
    pack = cls.pack
    with monkeypatch.context() as patch:
        patch.setattr(cls, "pack", lambda self: pack(self._replace(**changes)))
        yield


Lies = tuple[tuple[dict[str, Any], str], ...]
REPLIES: Lies = (
    ({"bucket_count": 0}, "wants 0 buckets"),
    ({"bucket_count": 2}, "wants 2 buckets, .* a power of two from 4 to 32"),
    ({"bucket_count": 64}, "wants 64 buckets"),
    ({"bucket_count": 5}, "wants 5 buckets"),
    ({"first_bucket": 1}, "from 1 on"),
    ({"resumes": True}, "goes on with bucket 0 of an intersection that (sh|po)"),
    ({"nonces": tuple((n, bytes(32)) for n in IDS)}, "makes the key of buckets of random"),
    ({"nonces": (("bank", bytes(32)),)}, "makes the key of buckets of random bytes of"),
    ({"id_count": 1001}, "announces 1001 IDs, the parties agreed on at most 1000"),
    ({"id_count": -1}, "announces -1 IDs"),
    ({"session": "t"}, "names the intersection 't', (shop|post) 's'"),
    ({"bucket_count": "4"}, "something else than the opening"),
    ({"nonces": tuple((n, b"x") for n in IDS)}, "something else than the opening"),
)
OPENINGS: Lies = (
    ({"id_count": 1001}, "announces 1001 IDs, the parties agreed on at most 1000"),
    ({"id_count": 900}, "sent a list of .* by the size of its set"),
    ({"id_count": 1.5}, "announces 1.5 IDs"),
    ({"nonce": "a"}, "something else than the opening of an intersection"),
    ({"finished_buckets": -1}, "something else than the opening of an intersection"),
)


@pytest.mark.parametrize(
    ("role", "who", "changes", "says"),
    [
        *(("_HubReply", "bank", *lie) for lie in REPLIES),
        *(("_MemberAnnouncement", "(shop|post)", *lie) for lie in OPENINGS),
    ],
)
def test_lies_are_refused(
    role: str, who: str, changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        saying(monkeypatch, role, **changes),
        pytest.raises(RemoteProtocolError, match=f"^{who} .*{says}"),
    ):
        Session().align()


PLACES = [
    (b"", "no list of common rows"),
    (b"\1abc", "no list of common rows"),
    (b"\1", "opened 0 places"),
    (b"\1" + np.array([0, 0], "<u4").tobytes(), "opened 2 places, .* and 1 differ"),
    (b"\1" + np.array([2**31], "<u4").tobytes(), "opened 1 places, of which 0 are of IDs"),
    (b"\1" + np.arange(1000, dtype="<u4").tobytes(), "opened 1000 places"),
]


@pytest.mark.parametrize(("body", "says"), PLACES, ids=[f"{len(body)} bytes" for body, _ in PLACES])
def test_places_that_cannot_be_common_are_refused(
    body: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = over_links._IntersectingParty.send

    def lie(self: Any, peer: str, payload: bytes) -> None:
        send(self, peer, body if payload[:1] == b"\1" else payload)

    monkeypatch.setattr(over_links._IntersectingParty, "send", lie)
    with pytest.raises(RemoteProtocolError, match=f"^bank .*{says}"):
        Session().align()


def test_signs_reach_everybody_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_links, "IDS_PER_HEARTBEAT", 20)
    monkeypatch.setattr("apfed_protocols.psi.ecdh._POINTS_PER_CHUNK", 10)
    session = Session()
    session.protocol = "ecdh"
    assert set(session.align()["bank"]) == COMMON
    alive = {(one.sender, one.receiver) for one in session.sent if one.kind is Kind.ALIVE}
    assert alive >= {("bank", "shop"), ("bank", "post"), ("shop", "bank"), ("post", "bank")}
    assert over_links.count_alignment_heartbeats(1000, 2) == 2 * (10 * 1000 // 20) + 4

    async def flood(self: Any, *given: object) -> None:
        for _ in range(1000):
            self._links.heartbeats.count_work(20)
        await self._links.receive(self._peers, Kind.READY)

    monkeypatch.setattr(over_links._IntersectingParty, "_intersect_bucket", flood)
    with pytest.raises(RemoteProtocolError, match="more heartbeats than its work can take"):
        Session().align()
