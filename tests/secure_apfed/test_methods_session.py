"""A session in memory: every party brings and holds its own, and checkpoints change no result."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import fresh_identity
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.exchange import InMemory, Kind, Transcript
from secure_apfed.methods import METHODS, Own, Secrets, Session, Simulation, Start, open_session
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from tests.secure_apfed.single_steps import ROWS, own_of, passives_of, random_data, step_config
from tests.secure_apfed.small_runs import small_config

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


def messages_of(result: RunResult) -> dict[tuple[str, str, Kind], int]:
    flows = result.recording.transcript.flows
    return {(flow.sender, flow.receiver, flow.kind): flow.messages for flow in flows}


@pytest.mark.parametrize("method", ["apfed_c", "tvfl", "single_view"])
def test_checkpoints_cost_their_messages_and_change_no_result(method: str, tmp_path: Path) -> None:
    config = small_config(method, train={"epochs": 2, "batch_size": 64, "device": "cpu"})
    without, kept = run(config, None), run(config, tmp_path / "run")
    assert kept.accuracy == without.accuracy
    assert kept.privacy == without.privacy
    flows, more = messages_of(without), messages_of(kept)
    saving = {key: count for key, count in more.items() if key not in flows}
    assert {key: more[key] for key in flows} == flows
    assert {kind for _, _, kind in saving} == ({Kind.CHECKPOINT, Kind.SAVED} if flows else set())
    assert set(saving.values()) <= {config.train.epochs}
