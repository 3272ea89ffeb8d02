"""What each party sees of an intersection, bit by bit."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.psi import SET_INTERSECTIONS, circuit, ecdh, hashing
from apfed_protocols.psi.ecdh import EcdhHub
from apfed_protocols.psi.interface import Aligner
from tests.contracts.intersections import HEADER, Intersection
from tests.with_crypten import usable

HUB = "hub"
BACKENDS = pytest.mark.parametrize("backend", usable(SET_INTERSECTIONS))
Sets = dict[str, list[bytes]]
Messages = list[tuple[str, str, bytes]]


def play(backend: str, sets: Sets) -> tuple[dict[str, Aligner], Messages]:
    """Return the roles with rows, and (sender, receiver, body) of every message."""
    played = Intersection(backend, sets).play()
    return played.aligners, [(sender, out.receiver, out.body) for sender, out in played.sent]


def ids_of(prefix: str, *ranges: range) -> list[bytes]:
    return [f"{prefix} {k}".encode() for each in ranges for k in each]


# Views


def worlds_for_the_hub() -> tuple[Sets, Sets]:
    """Nothing is common to all; p shares all of the hub's IDs in one world, none in the other."""
    hub, q = ids_of("h", range(200)), ids_of("q", range(200))
    return {HUB: hub, "p": hub[:], "q": q}, {HUB: hub, "p": ids_of("p", range(200)), "q": q}


def test_with_the_circuit_a_members_share_tells_the_hub_nothing_without_the_others() -> None:
    """Kind 13 is a member's share of the last bits: p's alone is a fair coin in both worlds."""
    for sets in worlds_for_the_hub():
        messages = play("circuit", sets)[1]
        (share,) = (b[HEADER:] for s, r, b in messages if (s, r, b[1]) == ("p", HUB, 13))
        ones = np.unpackbits(np.frombuffer(share, np.uint8))
        assert abs(ones.mean() - 0.5) < 3 / np.sqrt(len(ones))


def test_with_ecdh_the_hub_learns_pairwise_overlaps() -> None:
    """Its tags and the member's are equal for each ID that the two share: so `leaks` says."""
    for sets, overlap in zip(worlds_for_the_hub(), (200, 0), strict=True):
        aligners, _ = play("ecdh", sets)
        assert len(aligners[HUB].rows) == 0
        hub = aligners[HUB]
        assert isinstance(hub, EcdhHub)
        assert len(hub.overlaps["p"]) == overlap
    for backend in SET_INTERSECTIONS.values():
        assert any("pairwise" in leak for leak in backend.leaks) == backend.pairwise


# Views bit by bit: the same small sets again and again, under one hash key, which the member knows

SMALL_FOR_A_MEMBER = (
    {HUB: ids_of("c", range(2)) + ids_of("hub", range(4)), "p": ids_of("c", range(5))},
    {
        HUB: ids_of("c", range(2)) + [bytes([k + 2]) * 40 for k in range(4)],
        "p": ids_of("c", range(5)),
    },
)
SMALL_FOR_THE_HUB = (
    {HUB: ids_of("h", range(5)), "p": ids_of("h", range(5)), "q": ids_of("q", range(5))},
    {HUB: ids_of("h", range(5)), "p": ids_of("p", range(5)), "q": ids_of("q", range(5))},
)
RUNS = 60


def bits_seen(backend: str, sets: Sets, party: str) -> NDArray[np.int64]:
    """Return how often each bit of what `party` receives is one, in so many runs."""
    views, blocks = [], list[bytes]()
    for _ in range(RUNS):
        bodies = [b[HEADER:] for _, receiver, b in play(backend, sets)[1] if receiver == party]
        views.append(np.frombuffer(b"".join(bodies), np.uint8))
        long = [body for body in bodies if len(body) >= 100]
        blocks += [body[k : k + 16] for body in long for k in range(0, len(body) - 15, 16)]
    assert len(set(blocks)) == len(blocks) > RUNS, "what is secret is made anew in each run"
    ones: NDArray[np.int64] = np.unpackbits(np.stack(views), axis=1).sum(axis=0, dtype=np.int64)
    return ones


def largest_difference(backend: str, worlds: Sequence[Sets], party: str) -> float:
    """The most conspicuous bit, in standard deviations of two samples of a fair coin."""
    one, other = (bits_seen(backend, sets, party).astype(float) for sets in worlds)
    assert len(one) == len(other) > 1000
    return float(np.abs(one - other).max() / np.sqrt(RUNS / 2))


@pytest.fixture
def one_hash_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else, such as triples and shares, stays random."""
    monkeypatch.setattr(circuit, "fresh_key", lambda: b"k" * 32)


# the circuit on CrypTen sends the words of our own gates
SENDING = pytest.mark.parametrize("backend", sorted({*SET_INTERSECTIONS} - {"circuit_crypten"}))
# 1e5 bits: one above 6.5 comes by chance once in 10,000 tests
CHANCE = 6.5


@SENDING
@pytest.mark.usefixtures("one_hash_key")
def test_no_bit_that_a_member_sees_depends_on_the_hubs_other_ids(backend: str) -> None:
    assert largest_difference(backend, SMALL_FOR_A_MEMBER, "p") < CHANCE


@SENDING
@pytest.mark.usefixtures("one_hash_key")
def test_no_bit_that_the_hub_sees_depends_on_one_members_overlap(backend: str) -> None:
    assert largest_difference(backend, SMALL_FOR_THE_HUB, HUB) < CHANCE


@pytest.mark.usefixtures("one_hash_key")
def test_one_word_without_its_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hashing.random_words

    def forgetful(seed: bytes, purpose: bytes, count: int) -> hashing.Words:
        words = real(seed, purpose, count).copy()
        words[: purpose == b"a"] = 0
        return words

    monkeypatch.setattr(hashing, "random_words", forgetful)
    assert largest_difference("circuit", SMALL_FOR_A_MEMBER, "p") > CHANCE


@BACKENDS
def test_neither_ids_nor_their_hashes_travel(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: IDs, digests and hashed points are searched for in all bytes sent."""
    secrets: set[bytes] = set()
    spy(monkeypatch, secrets, ecdh, "digest_ids")
    spy(monkeypatch, secrets, ecdh, "to_curve")
    spy(monkeypatch, secrets, hashing, "fingerprints")
    sets = {HUB: ids_of("person", range(60)), "p": ids_of("person", range(30, 90))}
    everything = b"".join(body for *_, body in play(backend, sets)[1])
    secrets |= {identity for ids in sets.values() for identity in ids}
    hashed = {"ecdh": 2 * 60, "vole": 0}.get(backend, 60)
    assert len(secrets) >= 90 + hashed
    assert not any(secret in everything for secret in secrets)


def spy(monkeypatch: pytest.MonkeyPatch, seen: set[bytes], module: ModuleType, name: str) -> None:
    """Keep what a function returns, in pieces of 32 bytes, or the tags that it returns first."""
    real: Callable[..., Any] = getattr(module, name)

    def watched(*arguments: object, **named: object) -> Any:
        found = real(*arguments, **named)
        if isinstance(found, tuple):
            seen.update(tag.tobytes() for tag in found[0])
        else:
            seen.update(ecdh.split_points(found) if isinstance(found, bytes) else found)
        return found

    monkeypatch.setattr(module, name, watched)
