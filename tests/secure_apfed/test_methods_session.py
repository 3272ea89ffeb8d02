"""A session: each brings and holds its own; scripts keep to one order; who deviates is named."""

import gc
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import FunctionType, ModuleType
from typing import Any

import msgpack
import pytest
import torch

import secure_apfed.methods.session as session_module
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import fresh_identity
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.exchange import Envelope, InMemoryNetwork, Kind, Links, Transcript
from secure_apfed.methods import (
    METHODS,
    PartyContext,
    PartySecrets,
    Session,
    Simulation,
    SimulationInputs,
    open_session,
)
from secure_apfed.methods.apfed import ApfedPassive
from secure_apfed.methods.privacy_reports import (
    ReportedCost,
    pack_costs,
    parse_costs,
    parse_report,
    sign_report,
    summarise_reported_costs,
)
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.ledger import PrivacyLedger
from tests.secure_apfed.seats import (
    ROWS,
    alter_message,
    contribute_to,
    network,
    own_of,
    passives_of,
    random_data,
    step_config,
)

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
BATCH = torch.arange(16)
NAMES = ("active", "passive-1", "passive-2")
KEYS = {name: bytes([at]) * 32 for at, name in enumerate(NAMES)}
SEEDS = {name: 2**60 + at for at, name in enumerate(NAMES)}
GUARD = {"mechanism": "gaussian", "sigma": 2.0}
NOISE = {"scheme": "plain", "masks": "pairwise", "clip": 0.5, "noise": {"sigma": 0.1}}
PASSIVES = ("passive-1", "passive-2", "passive-3")
SETTINGS: dict[str, dict[str, Any]] = {
    "masked": {"secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 0.5}},
    "recoverable": {"secure_sum": {"scheme": "plain", "masks": "recoverable", "clip": 0.5}},
    "pairwise": {"alignment": {"protocol": "ecdh", "mode": "pairwise"}},
    "tvfl": {"method": "tvfl"},
}


def tables() -> VerticalData:
    return random_data(dict.fromkeys(NAMES[1:], range(ROWS)))


def start_of(config: Config) -> SimulationInputs:
    secrets = {
        name: PartySecrets(identity=fresh_identity(), noise_key=KEYS[name], seed=SEEDS[name])
        for name in NAMES
    }
    return SimulationInputs(config=config, data=tables(), secrets=secrets)


def test_a_party_brings_its_own_and_nothing_of_another() -> None:
    start = start_of(step_config("apfed_c"))
    for name, table in zip(NAMES, start.data.tables, strict=True):
        own = own_of(start, name)
        assert own.data.table is table
        assert (own.secrets.noise_key, own.secrets.seed) == (KEYS[name], SEEDS[name])
        labelled = name == "active"
        assert (len(own.data.train_rows) + len(own.data.test_rows) == ROWS) is labelled
        assert (own.data.classes == start.data.classes) is labelled
        assert (own.data.table.labels is not None) is labelled
    aggregator = own_of(start, AGGREGATOR)
    assert aggregator.data_or_none is None
    assert aggregator.secrets.noise_key not in KEYS.values()
    assert aggregator.secrets.seed not in SEEDS.values()


def walk_objects(party: object) -> Iterator[object]:
    """Yield everything that an object leads to, but what all of a program shares."""
    seen = set[int]()
    waiting = [party]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, ModuleType | type):
            continue
        seen.add(id(thing))
        yield thing
        # A function leads to its whole module; what it was made with is its closure.
        inner = thing.__closure__ if isinstance(thing, FunctionType) else gc.get_referents(thing)
        waiting.extend(inner or ())


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("apfed_c", {"secure_sum": NOISE}),
        ("apfed_r", {"dp_sgd": {"noise_multiplier": 2.0}}),
        ("tvfl", {}),
    ],
)
def test_no_party_holds_what_is_anothers(method: str, changes: dict[str, Any]) -> None:
    session = Simulation(METHODS[method], start_of(step_config(method, guard=GUARD, **changes)))
    session.train_step(0, BATCH)
    for name, role in {session.active_name: session.active_role, **session.helpers}.items():
        found = list(walk_objects(role))
        assert len(found) > 10
        assert not [it for it in found if isinstance(it, SimulationInputs | VerticalData | Session)]
        assert not [it for it in found if isinstance(it, InMemoryNetwork | Transcript)]
        assert {it.name for it in found if isinstance(it, PartyTable | PartyContext)} <= {name}
        keys = {it for it in found if isinstance(it, bytes)} & set(KEYS.values())
        assert keys <= {KEYS.get(name)}
        seeds = {it for it in found if isinstance(it, int)} & set(SEEDS.values())
        assert seeds == {SEEDS[name]} if name in SEEDS else not seeds


def test_the_walk_finds_what_a_party_should_not_hold() -> None:
    session = Simulation(METHODS["apfed_c"], start_of(step_config("apfed_c", guard=GUARD)))
    party = passives_of(session)[0]
    secret = own_of(start_of(step_config("apfed_c")), "passive-2")
    vars(party)["_waiting"] = lambda: secret
    found = list(walk_objects(session.helpers["passive-1"]))
    assert KEYS["passive-2"] in {it for it in found if isinstance(it, bytes)}
    assert "passive-2" in {it.name for it in found if isinstance(it, PartyTable)}


def test_the_active_contributes_to_no_sum() -> None:
    session = open_session(step_config("apfed_c"), tables())
    session.links.send(AGGREGATOR, Kind.CONTRIBUTION, 0, b"")
    with pytest.raises(RemoteProtocolError, match="active sent contribution, which only a passive"):
        session.train_step(0, BATCH)


SAID = {"figure": "epsilon_v", "epsilon": 2.0, "delta": 1e-5, "releases": 3, "mu": 0.5}


def test_what_a_ledger_counts_arrives_and_updates_stay() -> None:
    ledger = PrivacyLedger(
        GaussianRelease(noise_multiplier=4.0),
        delta=1e-5,
        budget=None,
        rows=4,
        log=None,
        figure="epsilon_v",
    )
    for step in range(2):
        ledger.charge(step=step, rows=torch.tensor([step, 3]), digest=b"z")
    packed = pack_costs({"shop": ledger, "shop+updates": ledger}.items())
    (told,) = parse_costs(packed, sender="shop")
    account = ledger.summarise_cost()
    said = summarise_reported_costs(
        {"shop": [told]}, passives=["shop"], silence_step_by_passive={}
    )["shop"]
    assert said["trace"] != account["trace"]
    assert {**said, "trace": ()} == {**account, "trace": ()}
    assert told.releases == 2
    assert parse_costs(pack_costs(()), sender="shop") == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90" * 5000,
        *map(
            msgpack.packb,
            (
                None,
                {},
                [SAID] * 3,
                [{**SAID, "figure": "epsilon_y"}],
                [{**SAID, "epsilon": -1.0}],
                [{**SAID, "epsilon": math.nan}],
                [{**SAID, "delta": 0.0}],
                [{**SAID, "releases": 2**40}],
                [{**SAID, "releases": True}],
                [{**SAID, "more": 1}],
                [{"figure": "epsilon_v"}],
            ),
        ),
    ],
)
def test_anything_else_is_refused_by_the_senders_name(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="checkpoint: shop sent no accounts"):
        parse_costs(payload, sender="shop")


SHOP = fresh_identity()
CONTRACT = b"c" * 32
SIGNED = sign_report((), SHOP, CONTRACT, 7)


def test_a_signed_account_is_the_partys_own_word_and_can_be_verified_later() -> None:
    statement = parse_report(
        SIGNED, sender="shop", identity=SHOP.public.hex(), contract=CONTRACT, step=7
    )
    assert type(statement).model_validate(statement.as_json("shop")).verify_costs("shop") == ()


@pytest.mark.parametrize(
    ("payload", "changed"),
    [
        (SIGNED, {"step": 8}),
        (SIGNED, {"contract": b"d" * 32}),
        (SIGNED, {"identity": fresh_identity().public.hex()}),
        (sign_report((), fresh_identity(), CONTRACT, 7), {}),
        (msgpack.packb([msgpack.packb([SAID]), msgpack.unpackb(SIGNED)[1]]), {}),
    ],
    ids=["of another step", "of another contract", "of another party", "forged", "altered"],
)
def test_an_account_that_is_not_signed_for_this_is_refused(
    payload: bytes, changed: dict[str, Any]
) -> None:
    given = {"identity": SHOP.public.hex(), "contract": CONTRACT, "step": 7, **changed}
    with pytest.raises(RemoteProtocolError, match="checkpoint: shop did not sign"):
        parse_report(payload, sender="shop", **given)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        SIGNED * 200,
        *map(
            msgpack.packb,
            (
                None,
                [],
                [b"\x90"],
                ["a", "b"],
                [b"\x90", b"short"],
                [b"", b"", b""],
            ),
        ),
    ],
)
def test_what_is_no_signed_account_is_refused(payload: bytes) -> None:
    given: dict[str, Any] = {"identity": SHOP.public.hex(), "contract": CONTRACT, "step": 7}
    with pytest.raises(RemoteProtocolError, match="checkpoint: shop sent no signed accounts"):
        parse_report(payload, sender="shop", **given)


def test_of_who_fell_silent_nothing_is_promised_that_it_did_not_say() -> None:
    told = ReportedCost.model_validate(SAID)
    charged = {"bank": [told], "post": [told], "quiet": ()}
    said = summarise_reported_costs(
        charged,
        passives=["bank", "post", "shop", "quiet"],
        silence_step_by_passive={"post": 7, "shop": 2},
    )
    assert {name: one["epsilon"] for name, one in said.items()} == {
        "bank": 2.0,
        "post": 2.0,
        "shop": math.inf,
    }
    assert [("fell silent in step" in one["trace"][-1]) for one in said.values()] == [
        False,
        True,
        True,
    ]
    assert (
        summarise_reported_costs(
            {"quiet": ()}, passives=["quiet", "shop"], silence_step_by_passive={}
        )
        == {}
    )


class Crossing(InMemoryNetwork):
    """Messages of different links overtake each other; those of one link stay in order."""

    chance = random.Random(0)

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.posted: list[Envelope] = []

    def queue_frame(self, sender: str, receiver: str, frame: bytes) -> None:
        length = int.from_bytes(frame[:2], "big")
        self.posted.append(Envelope.parse_header(frame[2 : 2 + length]))
        super().queue_frame(sender, receiver, frame)
        inbox: deque[tuple[str, bytes]] = self._inboxes[receiver]
        last = inbox.pop()
        before = [at for at, (name, _) in enumerate(inbox) if name == sender]
        inbox.insert(self.chance.randint(max(before, default=-1) + 1, len(inbox)), last)
        self.chance.shuffle(self._receivers)


def open_three(
    method: str = "apfed_c", *, alignment_of: Simulation | None = None, **changes: Any
) -> Simulation:
    """Open a session of three passives, with the aligned rows of another one, if given."""
    config = step_config(method, **changes)
    data = random_data(dict.fromkeys(PASSIVES, range(ROWS)))
    session = open_session(config, data)
    if alignment_of is not None:
        session = open_session(config, data, alignment=alignment_of.alignment)
    return session


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("choice", SETTINGS)
def test_whatever_the_order_among_links_training_is_the_same_and_parts_stay_apart(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message of a later part of the session is sent in an earlier one."""
    usual = open_three(**SETTINGS[choice])
    losses = [usual.train_step(step, BATCH) for step in range(2)]
    monkeypatch.setattr(session_module, "InMemoryNetwork", Crossing)
    for seed in range(2):
        monkeypatch.setattr(Crossing, "chance", random.Random(seed))
        anew = open_three(**SETTINGS[choice])
        anew.train_step(0, BATCH)
        parts_are_apart(anew.network)
        session = open_three(alignment_of=usual, **SETTINGS[choice])
        assert [session.train_step(step, BATCH) for step in range(2)] == pytest.approx(
            losses, rel=1e-9
        )


def parts_are_apart(network: InMemoryNetwork) -> None:
    assert isinstance(network, Crossing)
    agreeing = (Kind.GREETING, Kind.SESSION, Kind.SIGNATURE)
    kinds = [sent.kind for sent in network.posted if sent.kind is not Kind.READY]
    named = ("agreement" if kind in agreeing else kind for kind in kinds)
    parts = [part for part, _ in itertools.groupby(named)]
    before = ("agreement", Kind.ALIGNMENT, Kind.SUM_SETUP)
    setting_up = [part for part in parts if part in before]
    assert setting_up in ([*before[:2]], [*before])
    assert parts[: len(setting_up)] == setting_up


Script = Callable[[Any, Links], Coroutine[Any, Any, None]]


def deviating(patch: pytest.MonkeyPatch, role: type, script: Script, *, name: str) -> None:
    honest = role.run_session  # type: ignore[attr-defined]  # both roles help

    async def play(self: Any, links: Links, save: Any) -> None:
        await (script(self, links) if self.name == name else honest(self, links, save))

    patch.setattr(role, "run_session", play)


@pytest.mark.parametrize("rounds", [1, 2])
def test_who_contributes_twice_is_named(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def twice(self: ApfedPassive, links: Links) -> None:
        message = await links.receive("active", Kind.REPRESENTATIONS)
        body = contribute_to(self, message)
        links.send("aggregator", Kind.CONTRIBUTION, 0, body)
        if rounds == 2:
            request = await links.receive("aggregator", Kind.SUM_REQUEST)
            answer = self.passive_sum.contributor.answer(request.payload)
            links.send("aggregator", Kind.SUM_ANSWER, 0, answer)
        links.send("aggregator", Kind.CONTRIBUTION, 0, body)
        await links.receive("active", Kind.END, patience=9)

    deviating(monkeypatch, ApfedPassive, twice, name="passive-2")
    session = open_three(**(SETTINGS["recoverable"] if rounds == 2 else {}))
    with pytest.raises(RemoteProtocolError, match="passive-2 sent step 0 after step 0"):
        session.train_step(0, BATCH)


@pytest.mark.parametrize("kind", [Kind.CHECKPOINT, Kind.END])
def test_no_passive_ends_or_saves_a_session(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async def bossy(self: ApfedPassive, links: Links) -> None:
        links.send("aggregator", kind, 0)
        await links.receive("active", Kind.REPRESENTATIONS, patience=9)

    deviating(monkeypatch, ApfedPassive, bossy, name="passive-1")
    with pytest.raises(RemoteProtocolError, match=f"passive-1 sent {kind}, which only active may"):
        open_three().train_step(0, BATCH)


def pack_parts(*parts: Any) -> bytes:
    message: bytes = msgpack.packb(parts)
    return message


ALL = list(PASSIVES)
SUM = b"a sum"
NO_SUMS = [
    b"",
    b"\xc1",
    b"\xff" * 40,
    b"\x91" * 2000,
    pack_parts(ALL, SUM)[:-1],
    pack_parts(ALL, SUM) + b"\0",
    msgpack.packb(5),
    msgpack.packb(None),
    msgpack.packb({}),
    pack_parts(ALL),
    pack_parts(ALL, SUM, 1),
    pack_parts(SUM, ALL),
    pack_parts(ALL, "text"),
    pack_parts("passive-1", SUM),
    pack_parts([1, 2, 3], SUM),
    pack_parts([ALL], SUM),
    pack_parts(dict.fromkeys(ALL), SUM),
]
OTHERS = [[], ALL[1:], ALL[::-1], [*ALL, "ghost"], [*ALL, ALL[0]]]
FEW = [[], ["passive-1"], ["passive-1", "ghost"], ALL[::-1], ["passive-1"] * 2]
TWO_OF_THREE = {"secure_sum": SETTINGS["recoverable"]["secure_sum"] | {"threshold": 2}}


@pytest.mark.parametrize(
    ("changes", "others", "allowed"), [({}, OTHERS, "exactly 3"), (TWO_OF_THREE, FEW, "at least 2")]
)
def test_what_is_no_sum_of_those_that_were_asked_is_refused_and_changes_nothing(
    changes: dict[str, Any], others: list[list[str]], allowed: str
) -> None:
    session = open_three(**changes)
    before = {name: value.clone() for name, value in session.active_role.tensors().items()}
    step = itertools.count()

    def refuse_sum(payload: bytes) -> str:
        number = next(step)
        world = network(InMemoryNetwork, session.active_name, *session.helpers)
        world.links["aggregator"].send("active", Kind.SUM, number, payload)
        script = session.active_role.train_step(world.links["active"], number, BATCH)
        with pytest.raises(RemoteProtocolError) as caught:
            world.run_script("active", script)
        return str(caught.value)

    nothing = "something else than a sum and who takes part still"
    assert not [payload for payload in NO_SUMS if nothing not in refuse_sum(payload)]
    allows = f"allows {allowed} of {', '.join(ALL)}"
    assert not [names for names in others if allows not in refuse_sum(pack_parts(names, SUM))]
    after = session.active_role.tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("sums", [{}, SETTINGS["recoverable"]])
def test_an_active_that_tells_two_stories_gets_no_sum(
    sums: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(payload: bytes) -> bytes:
        return payload[:-1] + bytes([payload[-1] ^ 1])

    session = open_three(**sums)
    alter_message(monkeypatch, Kind.REPRESENTATIONS, other)
    with pytest.raises(RemoteProtocolError, match="different representations"):
        session.train_step(0, BATCH)
