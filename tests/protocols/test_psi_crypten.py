"""The circuit on CrypTen: the same bytes as our own gates, alone, mixed, and in a real world."""

import importlib.util
import itertools
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

if importlib.util.find_spec("crypten") is None:
    pytest.skip("crypten is absent", allow_module_level=True)

from apfed_protocols import randomness
from apfed_protocols.conversation import Outgoing, converse
from apfed_protocols.crypten.tensors import CryptenAnd
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS, circuit, hashing
from apfed_protocols.psi.interface import IntersectionAgreement
from tests.free_port import free_port

ROOT = Path(__file__).parents[2]
LEVELS = (32, 16, 8, 4, 2, 1)
HUB, DEALER = "active", "aggregator"


class Recorder:
    """A role that records what it sends."""

    def __init__(self, role: Any, me: str, sent: list[tuple[str, str, bytes]]) -> None:
        self.role, self.me, self.sent = role, me, sent

    @property
    def finished(self) -> bool:
        return bool(self.role.finished)

    def start(self) -> Sequence[Outgoing]:
        return self._record([*self.role.start()])

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        return self._record([*self.role.receive(sender, body)])

    def _record(self, out: Sequence[Outgoing]) -> Sequence[Outgoing]:
        self.sent.extend((self.me, each.receiver, each.body) for each in out)
        return out


def roles_of(engines: Mapping[str, str], sets: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
    agreement = IntersectionAgreement(session="s", minimum_rows=0, dealer=DEALER)
    made = {name: SET_INTERSECTIONS[engine](agreement) for name, engine in engines.items()}
    members = [name for name in sets if name != HUB]
    roles: dict[str, Any] = {HUB: made[HUB].hub(HUB, members, sets[HUB])}
    roles |= {name: made[name].member(name, HUB, sets[name]) for name in members}
    return roles | {DEALER: made[HUB].dealer(HUB, members)}


def play(
    engines: Mapping[str, str], sets: Mapping[str, Sequence[bytes]]
) -> tuple[list[tuple[str, str, bytes]], dict[str, list[int]]]:
    roles, sent = roles_of(engines, sets), list[tuple[str, str, bytes]]()
    converse({name: Recorder(role, name, sent) for name, role in roles.items()})
    return sent, {name: roles[name].rows.tolist() for name in sets}


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
    roles = roles_of(dict.fromkeys(sets, "circuit_crypten"), sets)
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
    for at in (25, 60, 200, -1):
        roles = roles_of(dict.fromkeys(sets, "circuit_crypten"), sets)
        queue = [(name, out) for name, role in roles.items() for out in role.start()]
        flipped = False
        try:
            while queue:
                sender, out = queue.pop(0)
                body = bytearray(out.body)
                if not flipped and sender == "p" and body[1] == 9:
                    body[at] ^= 0x40
                    flipped = True
                answers = roles[out.receiver].receive(sender, bytes(body))
                queue += [(out.receiver, each) for each in answers]
        except RemoteProtocolError as error:
            assert str(error)  # noqa: PT017
        assert flipped


def test_an_and_without_its_opening_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from crypten.mpc.primitives import beaver

    monkeypatch.setattr(beaver, "AND", lambda x, y: x)
    gate = CryptenAnd(*(np.zeros(1, np.uint64),) * 2, (np.zeros(1, np.uint64),) * 3, leads=True)
    with pytest.raises(LocalProtocolError, match="opened nothing"):
        gate.masked()


PARTY = """
import sys, warnings
warnings.simplefilter("error")
import numpy as np
from apfed_protocols.crypten import load_crypten
from apfed_protocols.crypten.tensors import DealtTriples, bits_of, shared_bits
from apfed_protocols.psi.hashing import TripleShares
from secure_apfed.contrib.crypten_world import crypten_world

folder, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
given = np.load(f"{folder}/in{rank}.npz")
triples = TripleShares(tuple(given[name] for name in "abc"))
load_crypten()
from crypten.mpc.primitives import beaver

with crypten_world(rank, 2, port=port, provider=DealtTriples(triples.take)):
    planes = shared_bits(given["planes"])
    for half in (32, 16, 8, 4, 2, 1):
        planes = beaver.AND(planes[:half], planes[half:])
np.save(f"{folder}/out{rank}.npy", bits_of(planes.share))
"""


def in_a_world(
    folder: Path, inputs: list[dict[str, NDArray[np.uint64]]]
) -> list[NDArray[np.uint64]]:
    started, port = [], str(free_port())
    for rank, arrays in enumerate(inputs):
        np.savez(folder / f"in{rank}.npz", allow_pickle=False, **arrays)
        command = [sys.executable, "-c", PARTY, str(folder), str(rank), port]
        started.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE))
    for party in started:
        _, complaint = party.communicate(timeout=120)
        assert party.returncode == 0, complaint.decode()[-2000:]
    return [np.load(folder / f"out{rank}.npy") for rank in range(2)]


def ours(
    planes: list[NDArray[np.uint64]], triples: list[hashing.TripleShares]
) -> list[NDArray[np.uint64]]:
    for half in LEVELS:
        gates = [
            hashing.BeaverAnd(x[:half], x[half:], triple.take(x[:half].shape), leads=k == 0)
            for k, (x, triple) in enumerate(zip(planes, triples, strict=True))
        ]
        opened = gates[0].masked() ^ gates[1].masked()
        planes = [gate.share(opened) for gate in gates]
    return planes


@pytest.mark.slow
def test_two_processes_over_gloo_get_the_same_shares(tmp_path: Path) -> None:
    slots, bins, rng = 3, 128, np.random.default_rng(11)
    hub_tags = rng.integers(0, 2**64, (slots, bins), np.uint64)
    member_tags = rng.integers(0, 2**64, (slots, bins), np.uint64)
    equal = rng.random((slots, bins)) < 0.4
    member_tags[equal] = hub_tags[equal]
    planes = [~hashing.bit_planes(hub_tags), hashing.bit_planes(member_tags)]
    count = 63 * slots * bins // 64
    seeds, correction = hashing.deal_triples(2, count)
    triples = [
        hashing.TripleShares.expand(seeds[0], count),
        hashing.TripleShares.expand(seeds[1], count, correction),
    ]
    inputs = [
        {"planes": x, **dict(zip("abc", (word.copy() for word in t.words), strict=True))}
        for x, t in zip(planes, triples, strict=True)
    ]
    theirs = in_a_world(tmp_path, inputs)
    mine = ours(planes, triples)
    for one, other in zip(mine, theirs, strict=True):
        assert (one == other).all()
    opened = np.unpackbits((mine[0] ^ mine[1])[0].view(np.uint8), bitorder="little")
    assert (opened.reshape(slots, bins).astype(bool) == equal).all()
