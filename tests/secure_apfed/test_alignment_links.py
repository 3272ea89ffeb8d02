"""Alignment over sealed links when something is wrong: no hang, no wrong result, a clear error."""

from collections.abc import Sequence

import pytest

from protocols.conversation import Conversation, Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.psi import SET_INTERSECTIONS
from protocols.seal import RunKey, fresh_run_key
from secure_apfed.alignment import AlignmentSettings, canonical_ids, intersection
from secure_apfed.exchange import InMemoryTransport, Kind
from secure_apfed.exchange.conversation import hold_conversation
from secure_apfed.exchange.envelope import Envelope
from secure_apfed.exchange.outbox import Outbox
from tests.with_crypten import usable

BACKENDS = pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
NAMES = ("bank", "shop", "dealer")
IDS = {"bank": list(range(20)), "shop": list(range(10, 30))}


def roles(protocol: str) -> dict[str, Conversation]:
    settings = AlignmentSettings(protocol=protocol, threads=1)
    ends = intersection(settings, session="s", dealer="dealer")
    ids = {name: canonical_ids(name, column, settings) for name, column in IDS.items()}
    found: dict[str, Conversation] = {
        "bank": ends.hub("bank", ["shop"], ids["bank"]),
        "shop": ends.member("shop", "bank", ids["shop"]),
    }
    return found | ({"dealer": ends.dealer("bank", ["shop"])} if ends.needs_dealer else {})


class Flipping(InMemoryTransport):
    """Flips one bit of the frame with this number."""

    def __init__(self, number: int, at: float) -> None:
        keys = {name: fresh_run_key() for name in NAMES}
        super().__init__(session="s", contract_hash=bytes(32), run_keys=keys)
        self.left, self.at = number, at

    def send(self, envelope: Envelope) -> int:
        size = super().send(envelope)
        if self.left == 0:
            queue = self._frames[envelope.sender, envelope.receiver]
            frame = bytearray(queue.pop())
            frame[int(self.at * (len(frame) - 1))] ^= 4
            queue.append(bytes(frame))
        self.left -= 1
        return size


def hold(parties: dict[str, Conversation], transport: InMemoryTransport) -> None:
    outboxes = {name: Outbox("s", name) for name in NAMES}
    hold_conversation(Kind.ALIGNMENT, parties, outboxes, transport)


@BACKENDS
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 1.0])
def test_a_flipped_bit_anywhere_stops_the_alignment(protocol: str, number: int, at: float) -> None:
    parties = roles(protocol)
    with pytest.raises(RemoteProtocolError):
        hold(parties, Flipping(number, at))
    assert not all(party.finished for party in parties.values())


@BACKENDS
def test_without_a_flip_the_same_alignment_succeeds(protocol: str) -> None:
    parties = roles(protocol)
    hold(parties, Flipping(-1, 0.0))
    assert all(party.finished for party in parties.values())


def links(shop_key: RunKey, *, contract: bytes = bytes(32)) -> InMemoryTransport:
    """The bank knows a key of the shop, and the shop holds the one given."""
    keys = {name: fresh_run_key() for name in NAMES}
    transport = InMemoryTransport(session="s", contract_hash=bytes(32), run_keys=keys)
    theirs = InMemoryTransport(
        session="s", contract_hash=contract, run_keys=keys | {"shop": shop_key}
    )
    transport._links["shop", "bank"] = theirs._links["shop", "bank"]
    return transport


@BACKENDS
def test_a_peer_with_another_key_is_refused(protocol: str) -> None:
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        hold(roles(protocol), links(fresh_run_key()))


class Dying:
    """A party whose process is gone after so many messages."""

    def __init__(self, role: Conversation, after: int) -> None:
        self.role, self.left = role, after

    def start(self) -> Sequence[Outgoing]:
        return self.role.start() if self.left >= 0 else []

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        self.left -= 1
        return self.role.receive(sender, body) if self.left >= 0 else []

    @property
    def finished(self) -> bool:
        return self.role.finished


@pytest.mark.parametrize(
    ("protocol", "name"), [(key, name) for key in usable(SET_INTERSECTIONS) for name in roles(key)]
)
@pytest.mark.parametrize("after", [-1, 0, 1])
def test_a_party_that_falls_silent_is_named_among_the_waiting(
    protocol: str, name: str, after: int
) -> None:
    parties = roles(protocol)
    parties[name] = Dying(parties[name], after)
    with pytest.raises(LocalProtocolError, match=r"alignment fell silent while .*still waited"):
        hold(parties, Flipping(-1, 0.0))


@BACKENDS
def test_another_protocol_at_the_peer_is_named_as_such(protocol: str) -> None:
    # the two circuits speak one protocol
    other = "circuit" if protocol == "ecdh" else "ecdh"
    parties = roles(protocol) | {"shop": roles(other)["shop"]}
    with pytest.raises(RemoteProtocolError, match=r"speaks version \d+; use the same protocol"):
        hold(parties, Flipping(-1, 0.0))
