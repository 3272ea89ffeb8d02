"""The scripts of a session's roles: they keep to one order, and one that deviates is named."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import pytest
import torch

import secure_apfed.methods.session as session_module
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange import Envelope, InMemory, Kind, Links
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.apfed import ApfedPassive
from secure_apfed.methods.method import meet, meet_all
from tests.secure_apfed.meddling import altered
from tests.secure_apfed.seats import contributed, network
from tests.secure_apfed.single_steps import ROWS, random_data, step_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

BATCH = torch.arange(16)
PASSIVES = ("passive-1", "passive-2", "passive-3")
SETTINGS: dict[str, dict[str, Any]] = {
    "masked": {"secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 0.5}},
    "recoverable": {"secure_sum": {"scheme": "plain", "masks": "recoverable", "clip": 0.5}},
    "pairwise": {"alignment": {"protocol": "ecdh", "mode": "pairwise"}},
    "tvfl": {"method": "tvfl"},
}


class Crossing(InMemory):
    """Messages of different links overtake each other; those of one link stay in order."""

    chance = random.Random(0)

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.posted: list[Envelope] = []

    def post(self, sender: str, receiver: str, frame: bytes) -> None:
        length = int.from_bytes(frame[:2], "big")
        self.posted.append(Envelope.parse_header(frame[2 : 2 + length]))
        super().post(sender, receiver, frame)
        inbox: deque[tuple[str, bytes]] = self._inboxes[receiver]
        last = inbox.pop()
        before = [at for at, (name, _) in enumerate(inbox) if name == sender]
        inbox.insert(self.chance.randint(max(before, default=-1) + 1, len(inbox)), last)
        self.chance.shuffle(self._due)


def opened(
    method: str = "apfed_c", *, alignment_of: Simulation | None = None, **changes: Any
) -> Simulation:
    """A session of three passives; it aligns anew, and goes on with the rows of another one."""
    config, data = step_config(method, **changes), random_data(dict.fromkeys(PASSIVES, range(ROWS)))
    session = open_session(config, data)
    if alignment_of is not None:
        session = open_session(config, data, alignment=alignment_of.alignment)
    return session


@pytest.mark.parametrize("choice", SETTINGS)
def test_whatever_the_order_among_links_training_is_the_same(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = opened(**SETTINGS[choice])
    losses = [usual.step(step, BATCH) for step in range(2)]
    monkeypatch.setattr(session_module, "InMemory", Crossing)
    for seed in range(2):
        monkeypatch.setattr(Crossing, "chance", random.Random(seed))
        session = opened(alignment_of=usual, **SETTINGS[choice])
        assert [session.step(step, BATCH) for step in range(2)] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("choice", SETTINGS)
def test_no_message_of_a_later_part_is_sent_in_an_earlier_one(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "InMemory", Crossing)
    session = opened(**SETTINGS[choice])
    session.step(0, BATCH)
    assert isinstance(session.network, Crossing)
    agreeing = (Kind.GREETING, Kind.SESSION, Kind.SIGNATURE)
    kinds = [sent.kind for sent in session.network.posted if sent.kind is not Kind.READY]
    named = ("agreement" if kind in agreeing else kind for kind in kinds)
    parts = [part for part, _ in itertools.groupby(named)]
    before = ("agreement", Kind.ALIGNMENT, Kind.SUM_SETUP)
    setting_up = [part for part in parts if part in before]
    assert setting_up in ([*before[:2]], [*before])
    assert parts[: len(setting_up)] == setting_up


def test_nobody_goes_on_before_everybody_is_done() -> None:
    world = network(InMemory, "active", "fast", "slow", "late")
    notes: list[str] = []

    async def active() -> None:
        await meet_all(world.links["active"], ("fast", "slow"))
        notes.append("active goes on")

    async def helper(name: str) -> None:
        if name == "slow":
            await world.links["slow"].receive("late", Kind.SUM_SETUP)
            notes.append("slow is done")
        await meet(world.links[name], "active")
        notes.append(f"{name} goes on")

    async def late() -> None:
        world.links["late"].send("slow", Kind.SUM_SETUP, -1)

    for name in ("fast", "slow"):
        world.begin(name, helper(name))
    world.begin("active", active())
    assert notes == []
    world.complete("late", late())
    assert notes[:2] == ["slow is done", "active goes on"]
    assert sorted(notes[2:]) == ["fast goes on", "slow goes on"]


Script = Callable[[Any, Links], Coroutine[Any, Any, None]]


def deviating(patch: pytest.MonkeyPatch, role: type, script: Script, *, name: str) -> None:
    """From the first step on the party of this name plays another script."""
    honest = role.help  # type: ignore[attr-defined]  # both roles help

    async def play(self: Any, links: Links, save: Any) -> None:
        await (script(self, links) if self.name == name else honest(self, links, save))

    patch.setattr(role, "help", play)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_passive_that_contributes_twice_is_named(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def twice(self: ApfedPassive, links: Links) -> None:
        message = await links.receive("active", Kind.REPRESENTATIONS)
        body = contributed(self, message)
        links.send("aggregator", Kind.CONTRIBUTION, 0, body)
        if rounds == 2:
            request = await links.receive("aggregator", Kind.SUM_REQUEST)
            answer = self.sum.contributor.answer(request.payload)
            links.send("aggregator", Kind.SUM_ANSWER, 0, answer)
        links.send("aggregator", Kind.CONTRIBUTION, 0, body)
        await links.receive("active", Kind.END, patience=9)

    deviating(monkeypatch, ApfedPassive, twice, name="passive-2")
    session = opened(**(SETTINGS["recoverable"] if rounds == 2 else {}))
    with pytest.raises(RemoteProtocolError, match="passive-2 sent step 0 after step 0"):
        session.step(0, BATCH)


@pytest.mark.parametrize("kind", [Kind.CHECKPOINT, Kind.END])
def test_no_passive_ends_or_saves_a_session(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async def bossy(self: ApfedPassive, links: Links) -> None:
        links.send("aggregator", kind, 0)
        await links.receive("active", Kind.REPRESENTATIONS, patience=9)

    deviating(monkeypatch, ApfedPassive, bossy, name="passive-1")
    with pytest.raises(RemoteProtocolError, match=f"passive-1 sent {kind}, which only active may"):
        opened().step(0, BATCH)


def packed(*parts: Any) -> bytes:
    message: bytes = msgpack.packb(parts)
    return message


ALL, SUM = list(PASSIVES), b"a sum"
NO_SUMS = [
    b"", b"\xc1", b"\xff" * 40, b"\x91" * 2000, packed(ALL, SUM)[:-1], packed(ALL, SUM) + b"\0",
    msgpack.packb(5), msgpack.packb(None), msgpack.packb({}), packed(ALL), packed(ALL, SUM, 1),
    packed(SUM, ALL), packed(ALL, "text"), packed("passive-1", SUM), packed([1, 2, 3], SUM),
    packed([ALL], SUM), packed(dict.fromkeys(ALL), SUM),
]  # fmt: skip
OTHERS = [[], ALL[1:], ALL[::-1], [*ALL, "ghost"], [*ALL, ALL[0]]]


def test_what_is_no_sum_of_all_passives_is_refused_and_changes_nothing() -> None:
    session = opened()
    before = {name: value.clone() for name, value in session.learner.tensors().items()}
    step = itertools.count()

    def answered(payload: bytes) -> str:
        """What the active says of this sum."""
        number = next(step)
        world = network(InMemory, session.active, *session.helpers)
        world.links["aggregator"].send("active", Kind.SUM, number, payload)
        script = session.learner.step(world.links["active"], number, BATCH)
        with pytest.raises(RemoteProtocolError) as caught:
            world.complete("active", script)
        return str(caught.value)

    for payload in NO_SUMS:
        assert "something else than a sum and who takes part still" in answered(payload)
    for names in OTHERS:
        assert f"allows exactly 3 of {', '.join(ALL)}" in answered(packed(names, SUM))
    after = session.learner.tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "names", [[], ["passive-1"], ["passive-1", "ghost"], ALL[::-1], ["passive-1"] * 2]
)
def test_where_passives_may_leave_a_sum_counts_none_but_those_that_were_asked(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = {"scheme": "plain", "masks": "recoverable", "clip": 0.5, "threshold": 2}
    session, send = opened(secure_sum=sums), Links.send

    def lying(self: Links, receiver: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        lie = packed(names, msgpack.unpackb(payload)[1]) if kind is Kind.SUM else payload
        send(self, receiver, kind, step, lie)

    monkeypatch.setattr(Links, "send", lying)
    with pytest.raises(RemoteProtocolError, match=f"allows at least 2 of {', '.join(ALL)}"):
        session.step(0, BATCH)


@pytest.mark.parametrize("sums", [{}, SETTINGS["recoverable"]])
def test_an_active_that_tells_two_stories_gets_no_sum(
    sums: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(payload: bytes) -> bytes:
        return payload[:-1] + bytes([payload[-1] ^ 1])

    session = opened(**sums)
    altered(monkeypatch, Kind.REPRESENTATIONS, other)
    with pytest.raises(RemoteProtocolError, match="different representations"):
        session.step(0, BATCH)
