"""What a hub that lies about the other members costs an honest one."""

import hashlib
import math
import tracemalloc
from collections.abc import Sequence

import pytest

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import circuit, hashing
from apfed_protocols.psi.circuit import CHUNK_SLOTS, VERSION, CircuitIntersection, Kind, chunks
from apfed_protocols.psi.interface import Aligner, Framing, IntersectionAgreement

HEADER = 22
MOST_MEMBERS = 65_535
HUB_PART = bytes(32)
OWN = [b"%d" % k for k in range(10)]


class Liar:
    """A hub with one true member `p0`, which it tells of many more."""

    def __init__(self, agreement: IntersectionAgreement) -> None:
        self.member: Aligner = CircuitIntersection(agreement).member("p0", "hub", OWN)
        self.member.start()
        self._framing = Framing(agreement, VERSION, dict.fromkeys(map(int, Kind), 1), 2**32 - 1)

    def send(self, kind: Kind, body: bytes, sender: str = "hub") -> Sequence[bytes]:
        answers = self.member.receive(sender, self._framing.pack(kind, body))
        return [answer.body[HEADER:] for answer in answers]

    def meet(self, hub_size: int, members: int, size: int) -> None:
        """Bring the member to the circuit."""
        commitment = hashlib.sha256(HUB_PART).digest()
        (join,) = self.send(Kind.COMMIT, circuit._COMMIT.pack(commitment, hub_size, members, 0))
        true_part, _, own_size = circuit._JOIN.unpack(join)
        parts = circuit._PART.pack(true_part, own_size)
        parts += circuit._PART.pack(bytes(32), size) * (members - 1)
        self.send(Kind.REVEAL, HUB_PART + parts)
        assert self.send(Kind.PLACE, bytes(4)) == [b"\1"]
        self.send(Kind.AGREED, b"")


def test_members_that_are_not_there_take_little_memory() -> None:
    """All bins at once would take 130 MB for each of seven arrays."""
    liar, hub_size, members = Liar(IntersectionAgreement(session="s", dealer="d")), 100_000, 8_192
    tracemalloc.start()
    liar.meet(hub_size, members, size=0)
    bins = hashing.bins_for(hub_size)
    slots = [hashing.slots_for(len(OWN), bins), *[1] * (members - 1)]
    chunk = chunks(bins, slots)[0]
    words = (chunk.stop - chunk.start) // 64
    sent = liar.send(Kind.TRIPLES, bytes(64 + 8 * 63 * words * slots[0]), sender="d")
    for half in (32, 16, 8, 4, 2, 1):
        sent = liar.send(Kind.MASKED, bytes(2 * 8 * half * slots[0] * words))
    assert [len(body) for body in sent] == [2 * 8 * (members // 2) * words]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


def test_no_chunk_grows_with_the_members() -> None:
    bins = hashing.bins_for(10**7)
    for slots, members in ((25, 1), (1, MOST_MEMBERS), (25, 1_000), (473_928, 5)):
        pieces = chunks(bins, [slots] * members)
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == bins
        size = pieces[0].stop - pieces[0].start
        assert size % 64 == 0
        assert size == 64 or size * max(slots, members / 64) <= CHUNK_SLOTS


def test_slots_are_found_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub may claim 65,535 different sizes: for each, a member works out K."""
    calls = []
    real = math.lgamma

    def counted(x: float) -> float:
        calls.append(x)
        return real(x)

    monkeypatch.setattr("math.lgamma", counted)
    assert hashing.slots_for(10**7, 64) > 10**7 * 3 / 64
    assert len(calls) < 200


def test_another_number_of_members_than_agreed_is_refused_at_once() -> None:
    agreement = IntersectionAgreement(session="s", dealer="d", sizes={"hub": 10, "p0": 10})
    with pytest.raises(
        RemoteProtocolError, match="hub speaks of 65535 members, the parties agreed on sizes for 1"
    ):
        Liar(agreement).meet(10, MOST_MEMBERS, size=10)
