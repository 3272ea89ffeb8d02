"""The circuit on CrypTen: the same bytes as our own gates, alone, mixed, and in a real world."""

import contextlib
import importlib.util
import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("crypten") is None:
    pytest.skip("crypten is absent", allow_module_level=True)

from apfed_protocols import randomness
from apfed_protocols.conversation import Outgoing
from apfed_protocols.crypten.tensors import CryptenAnd
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import circuit, hashing
from apfed_protocols.psi.circuit import Kind
from tests.contracts.intersections import Intersection, of_kind

ROOT = Path(__file__).parents[2]
LEVELS = (32, 16, 8, 4, 2, 1)
HUB = "active"


def play(
    engines: Mapping[str, str], sets: Mapping[str, Sequence[bytes]]
) -> tuple[list[tuple[str, Outgoing]], dict[str, list[int]]]:
    """All messages and rows, where each party computes with an engine of its own."""
    made = {name: Intersection(engine, sets) for name, engine in engines.items()}
    played = made[HUB]
    played.aligners = {name: made[name].aligners[name] for name in sets}
    played.roles |= played.aligners
    played.play()
    return played.sent, {name: played.aligners[name].rows.tolist() for name in sets}


@pytest.fixture
def numbered_keys(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace fresh keys by numbered ones; call it to count from the start again."""
    counter = itertools.count()

    def key() -> bytes:
        return next(counter).to_bytes(32, "big")

    for module in (randomness, hashing, circuit):
        monkeypatch.setattr(module, "fresh_key", key)

    def restart() -> None:
        nonlocal counter
        counter = itertools.count()

    return restart


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_every_message_is_the_same_whoever_computes_the_gates(
    parties: int, numbered_keys: Any
) -> None:
    rng = np.random.default_rng(parties)
    names = [HUB, *(f"p{k}" for k in range(1, parties))]
    sets = {
        name: [f"id {k}".encode() for k in rng.permutation(90)[: rng.integers(30, 80)]]
        for name in names
    }
    native = dict.fromkeys(names, "circuit")
    ways = [
        native,
        dict.fromkeys(names, "circuit_crypten"),
        native | {HUB: "circuit_crypten"},
        native | {"p1": "circuit_crypten"},
    ]
    results = []
    for engines in ways:
        numbered_keys()
        results.append(play(engines, sets))
    assert all(result == results[0] for result in results[1:])
    rows = results[0][1]
    common = set.intersection(*map(set, sets.values()))
    assert {sets[HUB][row] for row in rows[HUB]} == common


def test_the_gates_are_crypten_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from crypten.mpc.primitives import beaver

    calls, genuine = [], beaver.AND

    def counted(x: Any, y: Any) -> Any:
        calls.append(x)
        return genuine(x, y)

    monkeypatch.setattr(beaver, "AND", counted)
    sets = {HUB: [b"a", b"b"], "p": [b"b", b"c"]}
    play(dict.fromkeys(sets, "circuit"), sets)
    assert not calls
    play(dict.fromkeys(sets, "circuit_crypten"), sets)
    assert len(calls) == 2 * 2 * len(LEVELS)  # both parties, each gate up to the opening and after
    assert {type(each).__name__ for each in calls} == {"BinarySharedTensor"}


WORDS = st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5)


@settings(max_examples=60)
@given(st.lists(WORDS, min_size=7, max_size=7), st.booleans())
def test_one_gate_sends_and_gives_the_same_words(words: list[list[int]], leads: bool) -> None:
    x, y, a, b, c, d, e = (np.array(row, np.uint64) for row in words)
    read_only = np.frombuffer(x.tobytes(), np.uint64)
    ours = hashing.BeaverAnd(x, y, (a, b, c), leads=leads)
    theirs = CryptenAnd(read_only, y, (a, b, c), leads=leads)
    assert (ours.masked() == theirs.masked()).all()
    opened = np.stack([d, e])
    assert (ours.share(opened) == theirs.share(opened)).all()
    assert [row.tolist() for row in (x, y, a, b, c)] == words[:5], "inputs are untouched"


def test_a_dead_peer_leaves_no_thread_and_no_seat() -> None:
    from apfed_protocols.crypten import load_crypten

    threads = threading.active_count()
    sets = {HUB: [b"a", b"b"], "p": [b"b", b"c"]}
    roles = Intersection("circuit_crypten", sets).roles
    queue = [(name, out) for name, role in roles.items() for out in role.start()]
    for _ in range(9):  # into the gates, then the member is gone
        sender, out = queue.pop(0)
        queue += [(out.receiver, each) for each in roles[out.receiver].receive(sender, out.body)]
    assert not roles[HUB].finished
    assert threading.active_count() == threads
    assert not load_crypten().is_initialized()


def test_flipped_masks_are_refused_or_give_no_false_rows() -> None:
    """A member that opens wrong bits cannot make the hub crash."""
    sets = {HUB: [f"{k}".encode() for k in range(20)], "p": [f"{k}".encode() for k in range(9, 30)]}
    for at in (3, 38, 178, -1):
        flipped: list[int] = []

        def flip(body: bytes, at: int = at, flipped: list[int] = flipped) -> bytes:
            changed = bytearray(body)
            changed[at] ^= 0 if flipped else 0x40
            flipped.append(at)
            return bytes(changed)

        with contextlib.suppress(RemoteProtocolError):
            Intersection("circuit_crypten", sets, change=of_kind("p", Kind.MASKED, flip)).play()
        assert flipped


def test_an_and_without_its_opening_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from crypten.mpc.primitives import beaver

    monkeypatch.setattr(beaver, "AND", lambda x, y: x)
    gate = CryptenAnd(*(np.zeros(1, np.uint64),) * 2, (np.zeros(1, np.uint64),) * 3, leads=True)
    with pytest.raises(LocalProtocolError, match="opened nothing"):
        gate.masked()
