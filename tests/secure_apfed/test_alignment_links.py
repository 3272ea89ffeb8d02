"""Alignment over sealed links when something is wrong: no hang, no wrong result, a clear error."""

from collections.abc import Iterable
from typing import Any

import pytest

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.seal import SealedLink, fresh_run_key
from secure_apfed.alignment import canonical_ids, intersection
from secure_apfed.exchange import InMemory, Kind
from secure_apfed.settings.alignment import AlignmentSettings
from tests.secure_apfed.seats import network
from tests.with_crypten import usable

BACKENDS = pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
NAMES = ("bank", "shop", "dealer")
IDS = {"bank": list(range(20)), "shop": list(range(10, 30))}
KEYS = {name: fresh_run_key() for name in NAMES}


def roles(protocol: str) -> dict[str, Conversation]:
    settings = AlignmentSettings(protocol=protocol, threads=1)
    ends = intersection(settings, session="s", dealer="dealer")
    ids = {name: canonical_ids(name, column, settings) for name, column in IDS.items()}
    found: dict[str, Conversation] = {
        "bank": ends.hub("bank", ["shop"], ids["bank"]),
        "shop": ends.member("shop", "bank", ids["shop"]),
    }
    return found | ({"dealer": ends.dealer("bank", ["shop"])} if ends.needs_dealer else {})


class Flipping(InMemory):
    """Flips one bit of the frame with this number."""

    left, at = -1, 0.0

    def post(self, sender: str, receiver: str, frame: bytes) -> None:
        changed = bytearray(frame)
        if self.left == 0:
            changed[int(self.at * (len(frame) - 1))] ^= 4
        self.left -= 1
        super().post(sender, receiver, bytes(changed))


def sound() -> Flipping:
    """Links on which nothing is flipped."""
    return network(Flipping, run_keys=KEYS)


def align(parties: dict[str, Conversation], world: InMemory) -> None:
    world.complete_all(
        {
            name: world.links[name].converse(
                Kind.ALIGNMENT, role, [peer for peer in parties if peer != name]
            )
            for name, role in parties.items()
        }
    )


@BACKENDS
def test_a_flipped_bit_anywhere_stops_the_alignment(protocol: str) -> None:
    for number, at in ((0, 0.0), (1, 1.0), (2, 0.3), (3, 0.6)):
        parties, flipping = roles(protocol), sound()
        flipping.left, flipping.at = number, at
        with pytest.raises(RemoteProtocolError):
            align(parties, flipping)
        assert not all(party.finished for party in parties.values())
    parties = roles(protocol)
    align(parties, sound())
    assert all(party.finished for party in parties.values())


def where_the_shop_holds(**changes: Any) -> InMemory:
    """The bank knows the shop's public key, and the shop's end of their link has these."""
    world = sound()
    usual: dict[str, Any] = {"run_key": KEYS["shop"], "contract_hash": bytes(32)}
    shop = SealedLink(me="shop", peer="bank", **{**usual, **changes})
    bank = SealedLink(me="bank", peer="shop", run_key=KEYS["bank"], contract_hash=bytes(32))
    bank.agree(KEYS["shop"].public, shop.hello)
    shop.agree(KEYS["bank"].public, bank.hello)
    for me, seal in (("bank", bank), ("shop", shop)):
        vars(world.links[me])["_seals"][seal.peer] = seal
    return world


@BACKENDS
def test_a_peer_with_another_key_or_contract_is_refused(protocol: str) -> None:
    align(roles(protocol), where_the_shop_holds())
    for other in ({"run_key": fresh_run_key()}, {"contract_hash": b"\1" * 32}):
        with pytest.raises(RemoteProtocolError, match="does not authenticate"):
            align(roles(protocol), where_the_shop_holds(**other))


class Dying:
    """A party whose process is gone after so many messages."""

    def __init__(self, role: Conversation, after: int) -> None:
        self.role, self.left = role, after

    def start(self) -> Iterable[Outgoing]:
        return self.role.start() if self.left >= 0 else []

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        self.left -= 1
        return self.role.receive(sender, body) if self.left >= 0 else []

    @property
    def finished(self) -> bool:
        return self.role.finished


@BACKENDS
def test_a_party_that_falls_silent_is_noticed_by_one_that_waits_for_it(protocol: str) -> None:
    for name in roles(protocol):
        for after in (-1, 0) if (protocol, name) == ("vole", "dealer") else (-1, 1):
            parties = roles(protocol)
            parties[name] = Dying(parties[name], after)
            with pytest.raises(PartyLeftError, match=r"expected alignment .* from .*; nothing"):
                align(parties, sound())


@BACKENDS
def test_another_protocol_at_the_peer_is_named_as_such(protocol: str) -> None:
    # the two circuits speak one protocol
    other = "circuit" if protocol == "ecdh" else "ecdh"
    parties = roles(protocol) | {"shop": roles(other)["shop"]}
    with pytest.raises(RemoteProtocolError, match=r"speaks version \d+; use the same protocol"):
        align(parties, sound())
