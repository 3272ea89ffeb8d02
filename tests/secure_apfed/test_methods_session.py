"""A session: every party brings and holds its own, and says what it charged."""

import gc
import math
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import msgpack
import pytest
import torch

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import fresh_identity
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.exchange import InMemory, Kind, Transcript
from secure_apfed.methods import METHODS, Own, Secrets, Session, Simulation, Start, open_session
from secure_apfed.methods.charged import Charged, pack_charged, read_charged, said_of
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.ledger import PrivacyLedger
from tests.secure_apfed.single_steps import ROWS, own_of, passives_of, random_data, step_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


BATCH = torch.arange(16)
NAMES = ("active", "passive-1", "passive-2")
KEYS = {name: bytes([at]) * 32 for at, name in enumerate(NAMES)}
SEEDS = {name: 2**60 + at for at, name in enumerate(NAMES)}
GUARD = {"mechanism": "gaussian", "sigma": 2.0}
NOISE = {"scheme": "plain", "masks": "pairwise", "clip": 0.5, "noise": {"sigma": 0.1}}


def tables() -> VerticalData:
    return random_data(dict.fromkeys(NAMES[1:], range(ROWS)))


def start_of(config: Config) -> Start:
    secrets = {
        name: Secrets(identity=fresh_identity(), noise_key=KEYS[name], seed=SEEDS[name])
        for name in NAMES
    }
    return Start(config=config, data=tables(), secrets=secrets)


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
    assert aggregator.held is None
    assert aggregator.secrets.noise_key not in KEYS.values()
    assert aggregator.secrets.seed not in SEEDS.values()


def held_by(party: object) -> Iterator[object]:
    """Everything that an object leads to, but what all of a program shares."""
    seen, waiting = set[int](), [party]
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
    [("apfed_c", {"secure_sum": NOISE}), ("apfed_r", {"dp_sgd": {"noise_multiplier": 2.0}}),
     ("tvfl", {})],
)  # fmt: skip
def test_no_party_holds_what_is_anothers(method: str, changes: dict[str, Any]) -> None:
    """Neither its table nor its noise key, nor anything that would lead to them."""
    session = Simulation(METHODS[method], start_of(step_config(method, guard=GUARD, **changes)))
    session.step(0, BATCH)
    for name, role in {session.active: session.learner, **session.helpers}.items():
        found = list(held_by(role))
        assert len(found) > 10
        assert not [it for it in found if isinstance(it, Start | VerticalData | Session)]
        assert not [it for it in found if isinstance(it, InMemory | Transcript)]
        assert {it.name for it in found if isinstance(it, PartyTable | Own)} <= {name}
        keys = {it for it in found if isinstance(it, bytes)} & set(KEYS.values())
        assert keys <= {KEYS.get(name)}
        seeds = {it for it in found if isinstance(it, int)} & set(SEEDS.values())
        assert seeds == {SEEDS[name]} if name in SEEDS else not seeds


def test_the_walk_finds_what_a_party_should_not_hold() -> None:
    session = Simulation(METHODS["apfed_c"], start_of(step_config("apfed_c", guard=GUARD)))
    party, secret = passives_of(session)[0], own_of(start_of(step_config("apfed_c")), "passive-2")
    vars(party)["_waiting"] = lambda: secret
    found = list(held_by(session.helpers["passive-1"]))
    assert KEYS["passive-2"] in {it for it in found if isinstance(it, bytes)}
    assert "passive-2" in {it.name for it in found if isinstance(it, PartyTable)}


def test_the_active_contributes_to_no_sum() -> None:
    session = open_session(step_config("apfed_c"), tables())
    session.links.send(AGGREGATOR, Kind.CONTRIBUTION, 0, b"")
    with pytest.raises(RemoteProtocolError, match="active sent contribution, which only a passive"):
        session.step(0, BATCH)


SAID = {"figure": "epsilon_v", "epsilon": 2.0, "delta": 1e-5, "releases": 3, "mu": 0.5}


def test_what_a_ledger_counts_arrives_and_updates_stay() -> None:
    ledger = PrivacyLedger(
        GaussianRelease(noise_multiplier=4.0),
        delta=1e-5, budget=None, rows=4, log=None, figure="epsilon_v",
    )  # fmt: skip
    for step in range(2):
        ledger.charge(step=step, rows=torch.tensor([step, 3]), digest=b"z")
    packed = pack_charged({"shop": ledger, "shop+updates": ledger}.items())
    (told,) = read_charged(packed, sender="shop")
    account = ledger.account()
    said = said_of({"shop": [told]}, among=["shop"], silent={})["shop"]
    assert said["trace"] != account["trace"]
    assert {**said, "trace": ()} == {**account, "trace": ()}
    assert told.releases == 2
    assert read_charged(pack_charged(()), sender="shop") == ()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x90" * 5000, *map(msgpack.packb, (
        None, {}, [SAID] * 3, [{**SAID, "figure": "epsilon_y"}], [{**SAID, "epsilon": -1.0}],
        [{**SAID, "epsilon": math.nan}], [{**SAID, "delta": 0.0}], [{**SAID, "releases": 2**40}],
        [{**SAID, "releases": True}], [{**SAID, "more": 1}], [{"figure": "epsilon_v"}],
    ))],
)  # fmt: skip
def test_anything_else_is_refused_by_the_senders_name(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="checkpoint: shop sent no accounts"):
        read_charged(payload, sender="shop")


def test_of_who_fell_silent_nothing_is_promised_that_it_did_not_say() -> None:
    told = Charged.model_validate(SAID)
    charged = {"bank": [told], "post": [told], "quiet": ()}
    said = said_of(charged, among=["bank", "post", "shop", "quiet"], silent={"post": 7, "shop": 2})
    assert {name: one["epsilon"] for name, one in said.items()} == {
        "bank": 2.0, "post": 2.0, "shop": math.inf,
    }  # fmt: skip
    assert [("fell silent in step" in one["trace"][-1]) for one in said.values()] == [
        False, True, True,
    ]  # fmt: skip
    assert said_of({"quiet": ()}, among=["quiet", "shop"], silent={}) == {}
