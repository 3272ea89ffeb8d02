"""Who can read one contribution: what is derived is tried, for every sum and every coalition.

Each smallest set of parties that `find_readers` names reads the victim by one of four attacks. No
largest set that contains none of them does, by any attack. Attacks use what their parties hold and
see, and nothing else.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apfed_protocols as ap
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.sums import SECURE_SUMS, SecureSum, StepBinding, SumAgreement
from apfed_protocols.sums.frames import Frame, FrameKind
from apfed_protocols.sums.readers import Readers, find_readers
from apfed_protocols.sums.roles import make_role
from tests.with_crypten import usable

NAMES = ("a", "b", "c")
VICTIM = "c"
RECEIVER = "reader"
AGGREGATOR = "notary"
SHAPE = (1, 4)
OWN = {
    "a": np.array([[1.0, -0.5, 0.25, 2.0]]),
    "b": np.array([[0.5, 0.5, -1.0, 1.0]]),
    "c": np.array([[-1.5, 0.75, 1.25, -0.25]]),
}
Coalition = frozenset[str]


@dataclass(frozen=True)
class Setting:
    """One way of running a sum: which, who combines, how many must answer, over which links."""

    name: str
    one_end: bool = False
    threshold: int | None = None
    hub: bool = False
    signed: bool = True

    def __str__(self) -> str:
        end = "one end" if self.one_end else "two ends"
        links = ("signed hub" if self.signed else "unsigned hub") if self.hub else "links"
        return f"{self.name}, {end}, {self.threshold or 'all'} needed, {links}"

    def make(self) -> SecureSum:
        agreed = SumAgreement(
            session="readers",
            receiver=RECEIVER,
            aggregator=RECEIVER if self.one_end else AGGREGATOR,
            contributors=NAMES,
            clip_norm=8.0,
            threshold=self.threshold,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            return SECURE_SUMS[self.name](agreed, allow_single_reader=True)

    def readers(self) -> list[Readers]:
        found = find_readers(self.make(), hub=self.hub, signed=self.signed)
        return [one for one in found if one.victim == VICTIM]

    def coalitions(self) -> list[Coalition]:
        """Sets of parties that do not hold the victim; a hub has both ends or none."""
        ends = {RECEIVER} if self.one_end else {RECEIVER, AGGREGATOR}
        parties = sorted({*ends, *NAMES} - {VICTIM})
        sets = [frozenset(some) for k in range(len(parties)) for some in combinations(parties, k)]
        sets.append(frozenset(parties))
        return [some for some in sets if not self.hub or len(some & ends) in (0, len(ends))]


def settings() -> Iterable[Setting]:
    for name in usable(SECURE_SUMS):
        masked = SECURE_SUMS[name].masks != "none"
        lacks = [3, 2] if SECURE_SUMS[name].masks == "recoverable" else [None]
        for one_end in (False, True) if masked else (False,):
            for threshold in lacks:
                for hub, signed in ((False, True), (True, True), (True, False)):
                    yield Setting(name, one_end, threshold, hub, signed)


class Played:
    """All parties of a setting after their set-up; a question q is answered by q times one's own.

    Colluding contributors answer with zeros, which are known as well as their own would be.
    """

    def __init__(self, setting: Setting, coalition: Coalition) -> None:
        self.described = setting.make()
        self.coalition = coalition
        agreement = self.described.agreement
        self.combines = agreement.aggregator
        self.ends: dict[str, Any] = {
            me: make_role(self.described, me) for me in (agreement.receiver, agreement.aggregator)
        }
        self.hosts = {me: self.described.make_contributor(me) for me in NAMES}
        ap.converse({**self.hosts, **self.ends})
        self.step = 0

    def ask(self, number: float, names: Iterable[str] = NAMES) -> dict[str, bytes]:
        message = np.float64(number).tobytes()
        self.bound = StepBinding.from_contents("readers", self.step, rows=b"", message=message)
        self.step += 1
        values = {me: number * OWN[me] * (me not in self.coalition) for me in names}
        return {me: self.hosts[me].contribute(values[me], self.bound) for me in names}

    def add(self, frames: Mapping[str, bytes]) -> np.ndarray:
        aggregator = self.ends[self.combines]
        bodies = dict(frames)
        if self.described.rounds == 2:
            requests = aggregator.ask(bodies, self.bound.digest)
            bodies = {me: self.hosts[me].answer(asked) for me, asked in requests.items()}
        return self.open(aggregator.combine(bodies, self.bound.digest))

    def open(self, combined: bytes) -> np.ndarray:
        return np.asarray(self.ends[RECEIVER].decode(combined, SHAPE, self.bound))


def open_single_message(setting: Setting, coalition: Coalition) -> Iterable[np.ndarray]:
    """The aggregator keeps one contribution apart, takes off what colluders know, and opens it."""
    played = Played(setting, coalition)
    if played.combines not in coalition:
        return
    frames = {me: Frame.parse(body, sender=me) for me, body in played.ask(1.0).items()}
    blob = frames[VICTIM].blobs[0]
    for dtype, unit in (("<f8", 1.0), ("<i8", 8 / 32767), ("<i4", 8 / 32767)):
        if len(blob) == OWN[VICTIM].size * np.dtype(dtype).itemsize:
            yield np.frombuffer(blob, dtype).reshape(SHAPE) * unit
    if RECEIVER in coalition and setting.name != "crypten":
        kept = [frame for me, frame in frames.items() if me == VICTIM or me in coalition]
        described: Any = played.described
        if described.masks == "recoverable":
            named = described.agreement.pack_names(NAMES)
            blobs = (described.add_elements(kept).tobytes(), named)
        else:
            blobs = tuple(described.add_frames(kept))
        forged = replace(kept[0], kind=FrameKind.SUM, index_or_count=len(NAMES), blobs=blobs)
        yield played.open(forged.pack())


def subtract_from_sum(setting: Setting, coalition: Coalition) -> Iterable[np.ndarray]:
    """The receiver takes from the sum what colluders contributed: zeros."""
    if RECEIVER in coalition:
        played = Played(setting, coalition)
        yield played.add(played.ask(1.0))


def subtract_two_sums(setting: Setting, coalition: Coalition) -> Iterable[np.ndarray]:
    """The receiver asks q of all and 2 q of all but the victim; nobody else deviates."""
    if RECEIVER in coalition:
        played = Played(setting, coalition)
        everybody = played.add(played.ask(1.0))
        without = played.add(played.ask(2.0, [me for me in NAMES if me != VICTIM]))
        yield everybody - without / 2


def count_fewer(setting: Setting, coalition: Coalition) -> Iterable[np.ndarray]:
    """The aggregator tells the victim that only colluders are counted beside it, too few."""
    played = Played(setting, coalition)
    contributors = [me for me in NAMES if me == VICTIM or me in coalition]
    recoverable = played.described.masks == "recoverable"
    if (
        played.combines in coalition
        and recoverable
        and len(contributors) < played.described.min_contributors
    ):
        frames = {me: Frame.parse(body, sender=me) for me, body in played.ask(1.0).items()}
        parcels = []
        for me in contributors:
            if me != VICTIM:
                receivers = [other for other in NAMES if other != me]
                parcels.append(frames[me].blobs[2 + receivers.index(VICTIM)])
        named = played.described.agreement.pack_names(contributors)
        request = replace(frames[VICTIM], kind=FrameKind.REQUEST, blobs=(named, *parcels))
        with pytest.raises(RemoteProtocolError, match="answers only where it is counted among"):
            played.hosts[VICTIM].answer(request.pack())
    yield from ()


def play_the_others(setting: Setting, coalition: Coalition) -> Iterable[np.ndarray]:
    """The hub answers the victim's set-up in the name of contributors whom it never asks."""
    described = setting.make()
    hub = described.agreement.aggregator
    if not setting.hub or hub not in coalition:
        return
    known = {me: ap.fresh_identity() for me in (*NAMES, RECEIVER, AGGREGATOR)}
    public = {me: identity.public for me, identity in known.items()}
    mine: dict[str, dict[str, Any]] = {me: {} for me in known}
    if setting.signed:  # the hub has no other's identity, and makes some up
        mine = {me: {"identity": one, "peers": public} for me, one in known.items()}
        for me in set(NAMES) - {VICTIM} - coalition:
            mine[me] = {"identity": ap.fresh_identity(), "peers": public}
    roles = {me: described.make_contributor(me) for me in NAMES}
    answers: list[tuple[str, bytes]] = []

    def send(me: str, packet: bytes) -> None:
        own = OWN[me] * (me == VICTIM)
        answers.append((me, ap.answer_hub(roles[me], packet, lambda q: own, **mine[me])))

    ends: dict[str, Any] = {
        me: make_role(described, me) for me in (RECEIVER, described.agreement.aggregator)
    }
    # One signer for both ends, as a hub has one identity under both names.
    if setting.signed and not setting.one_end:
        public[AGGREGATOR] = public[RECEIVER]
    pump = ap.hub_pump(ends, send, lambda: answers.pop(0), **mine[RECEIVER])
    yield np.asarray(pump.step(b"question", SHAPE))


ATTACKS: tuple[Callable[[Setting, Coalition], Iterable[np.ndarray]], ...] = (
    open_single_message,
    subtract_from_sum,
    subtract_two_sums,
    count_fewer,
    play_the_others,
)


def attacks_that_read(setting: Setting, coalition: Coalition) -> list[str]:
    """The names of the attacks by which these parties read the victim."""
    found = []
    for attack in ATTACKS:
        try:
            read = [np.allclose(one, OWN[VICTIM], atol=1e-2) for one in attack(setting, coalition)]
        except (LocalProtocolError, RemoteProtocolError):
            continue
        if any(read):
            found.append(attack.__name__)
    return found


SETTINGS = [*settings()]
pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_who_is_said_to_read_one_contribution_reads_it(setting: Setting) -> None:
    readers = setting.readers()
    assert readers
    assert [one for one in readers if not attacks_that_read(setting, frozenset(one.parties))] == []


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_who_is_not_said_to_read_one_contribution_does_not(setting: Setting) -> None:
    """The largest coalitions without a set of readers in them; smaller ones hold less."""
    readers = [frozenset(one.parties) for one in setting.readers()]
    harmless = [some for some in setting.coalitions() if not any(one <= some for one in readers)]
    largest = [some for some in harmless if not any(some < other for other in harmless)]
    found = {some: attacks_that_read(setting, some) for some in largest}
    assert {some: attacks for some, attacks in found.items() if attacks} == {}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_lets_one_computer_read_is_refused_unless_allowed_by_name(setting: Setting) -> None:
    """Plain is allowed by its name; each of the others needs `allow_single_reader`, and warns."""
    allowed = setting.make()
    single = any(one.computer_count == 1 for one in find_readers(allowed))
    if allowed.unsafe:
        with pytest.warns(UnsafeChoiceWarning, match="notary reads each contribution"):
            replace(allowed, allow_single_reader=False)
        return
    if not single:
        assert replace(allowed, allow_single_reader=False).min_contributors == len(NAMES)
        return
    with pytest.raises(LocalProtocolError, match=r"alone can read one.*threshold=3: all must"):
        replace(allowed, allow_single_reader=False)
    with pytest.warns(UnsafeChoiceWarning, match="allow_single_reader says that this is accepted"):
        replace(allowed, allow_single_reader=True)


@pytest.mark.parametrize(
    ("hub", "boxes"), [(False, "2 computers together"), (True, "one computer")]
)
def test_a_description_prints_every_row(hub: bool, boxes: str) -> None:
    told = Setting("ckks").make().describe(hub=hub)
    assert "ckks: a, b, c contribute, reader reads the sum, notary combines." in told
    assert f"reader and notary ({boxes}) can read the contribution of any contributor" in told
    assert "reader and all other contributors (3 computers together) can read" in told


def test_a_description_names_a_reader_who_needs_nobody() -> None:
    told = ap.secure_sum("masked", NAMES, to="x", clip=1).describe(hub=True, signed=False)
    assert "x (one computer) can read the contribution of any contributor: plays" in told


def lacking() -> SecureSum:
    return Setting("plain + recoverable masks", one_end=True, threshold=2).make()


def drive(
    hosts: Mapping[str, Any], answer_of: Callable[[str, bytes], Any]
) -> tuple[ap.Hub, set[str]]:
    """A hub with these hosts, and the set of those that it does not ask."""
    described = next(iter(hosts.values())).secure_sum
    unasked: set[str] = set()
    answers: list[tuple[str, bytes]] = []

    def send(me: str, packet: bytes) -> None:
        if me not in unasked:
            answer = ap.answer_hub(hosts[me], packet, lambda q: answer_of(me, q))
            answers.append((me, answer))

    def receive() -> tuple[str, bytes]:
        if not answers:
            raise TimeoutError
        return answers.pop(0)

    ends: dict[str, Any] = {RECEIVER: make_role(described, RECEIVER)}
    return ap.hub_pump(ends, send, receive), unasked


REPEATS: dict[str, tuple[bytes, bytes, Callable[[str, bytes], Any]]] = {
    "the same question": (b"q", b"q", lambda me, q: OWN[me]),
    "the same question, other values": (
        b"q",
        b"q",
        lambda me, q: OWN[me] + np.random.default_rng().normal(size=SHAPE),
    ),
    "another question, the same values": (b"q", b"q again", lambda me, q: OWN[me]),
    "one contributor repeats its values": (
        b"1",
        b"2",
        lambda me, q: OWN[me] if me == "a" else OWN[me] * float(q),
    ),
}


@pytest.mark.parametrize("repeat", REPEATS)
def test_a_repeated_request_is_not_answered_in_a_sum_of_others(repeat: str) -> None:
    first, second, values = REPEATS[repeat]
    hosts = {me: lacking().make_contributor(me) for me in NAMES}
    hub, unasked = drive(hosts, values)
    hub.step(first, SHAPE)
    hub.step(second, SHAPE)  # among the same contributors it is no harm
    unasked.add(VICTIM)
    with pytest.raises(RemoteProtocolError, match=r"would differ by what c contributed"):
        hub.step(second, SHAPE)
    with pytest.raises(LocalProtocolError, match="its session is over"):
        hosts["a"].contribute(OWN["a"])


def test_other_requests_are_answered_among_fewer() -> None:
    """And zeros, which say nothing, may be repeated."""
    hub, unasked = drive(
        {me: lacking().make_contributor(me) for me in NAMES},
        lambda me, q: OWN[me] * float(q) if me == "a" else np.zeros(SHAPE),
    )
    hub.step(b"1", SHAPE)
    unasked.add(VICTIM)
    assert np.allclose(hub.step(b"2", SHAPE), 2 * OWN["a"], atol=1e-2)


@pytest.mark.parametrize("session", ["the same", "another"])
def test_what_was_answered_is_known_in_a_later_session(session: str, tmp_path: Path) -> None:
    """A role that restarts with the same log refuses what the last one would have refused."""

    def begin(name: str) -> Any:
        return ap.secure_sum(
            "recoverable",
            NAMES,
            to=RECEIVER,
            clip=8,
            session=name,
            threshold=2,
            allow_single_reader=True,
        )

    first = begin("the same")
    again = begin(session)
    roles = {
        me: first.make_contributor(me, log_file=tmp_path / me, is_new_log=True) for me in NAMES
    }
    drive(roles, lambda me, q: OWN[me])[0].step(b"q", SHAPE)
    roles = {me: again.make_contributor(me, log_file=tmp_path / me) for me in NAMES}
    hub, unasked = drive(roles, lambda me, q: OWN[me])
    unasked.add(VICTIM)
    with pytest.raises(RemoteProtocolError, match="reader asks a again about what"):
        hub.step(b"q", SHAPE)
    with pytest.raises(LocalProtocolError, match="log of answered requests is missing"):
        again.make_contributor("a", log_file=tmp_path / "lost")
    with pytest.raises(LocalProtocolError, match="there is a log already"):
        again.make_contributor("a", log_file=tmp_path / "a", is_new_log=True)
    with pytest.raises(LocalProtocolError, match=r"needs all contributors .* leave log_file out"):
        ap.secure_sum("masked", NAMES, to="x", clip=1).make_contributor(
            "a", log_file=tmp_path / "a"
        )


def test_a_step_is_answered_once_whoever_is_counted_the_second_time() -> None:
    """So nobody gives both its own mask's seed and the key of its masks with others."""
    played = Played(Setting("plain + recoverable masks", threshold=2), frozenset())
    aggregator = played.ends[AGGREGATOR]
    frames = played.ask(1.0)
    everybody = aggregator.ask(dict(frames))["a"]
    without = [me for me in NAMES if me != VICTIM]
    header = replace(Frame.parse(everybody, sender=AGGREGATOR))
    parcels = header.blobs[1:2]
    fewer = replace(header, blobs=(played.described.agreement.pack_names(without), *parcels))
    seeds = Frame.parse(played.hosts["a"].answer(everybody), sender="a").blobs
    with pytest.raises(LocalProtocolError, match="each step is answered once"):
        played.hosts["a"].answer(fewer.pack())
    again = Played(Setting("plain + recoverable masks", threshold=2), frozenset())
    assert len(seeds) == len(NAMES) == len(again.described.agreement.contributors)
