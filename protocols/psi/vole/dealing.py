"""Vector OLE, dealt: to the hub A and C, to a member B and Delta, such that C = A Delta + B.

Run by: the dealer of `protocols.psi.vole.backend`, a party without IDs; hub and members ask it, in
the intersection or ahead of it (`protocols.psi.supply`). A and B are expanded from seeds. The
dealer learns the size that the hub announces. Working together with the hub it could try out
guesses of a member's IDs, and with a member guesses of the hub's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.errors import RemoteProtocolError
from protocols.psi.desk import Inbox
from protocols.psi.result import Opened
from protocols.psi.script import Script, Turn
from protocols.psi.sizes import agreed_size
from protocols.psi.supply import DealingAhead, Supply
from protocols.psi.vole.field import (
    ELEMENT_BYTES,
    Elements,
    Multiplier,
    add_random,
    from_bytes,
    random_elements,
    to_bytes,
)
from protocols.psi.vole.messages import (
    DEAL,
    Desk,
    Kind,
    hub_dealt_bytes,
    member_dealt_bytes,
    vector_elements,
)
from protocols.randomness import KEY_BYTES, fresh_key

__all__ = [
    "HubShare", "MemberShare", "VoleStocking", "deal", "dealer_script", "dealt_to_hub",
    "dealt_to_member",
]  # fmt: skip


@dataclass(frozen=True)
class HubShare:
    """A and C of one member, shape (m, 2).

    Attributes:
        seed: which A is expanded from each time that it is asked for; it is long, and used once.
    """

    seed: bytes = field(repr=False)
    c: Elements = field(repr=False)

    @classmethod
    def of(cls, dealt: bytes | memoryview) -> "HubShare":
        """Read what the dealer sent."""
        content = memoryview(dealt)
        return cls(bytes(content[:KEY_BYTES]), from_bytes(content[KEY_BYTES:]))

    def masked(self, store: Elements, *, head: bytes = b"") -> bytes:
        """What the hub sends for a store P, behind `head`: A + P."""
        vector = store.copy()
        add_random(vector, self.seed, b"a")
        return b"".join((head, vector.data.cast("B")))


@dataclass(frozen=True)
class MemberShare:
    """What B is expanded from, and what multiplies by Delta."""

    seed: bytes = field(repr=False)
    delta: Multiplier = field(repr=False)

    @classmethod
    def of(cls, dealt: bytes) -> "MemberShare":
        """Read what the dealer sent."""
        return cls(dealt[:KEY_BYTES], Multiplier(dealt[KEY_BYTES:]))

    def unmasked(self, vector: Elements) -> Elements:
        """K = B + (A + P) Delta."""
        store = self.delta.times(vector)
        add_random(store, self.seed, b"b")
        return store


def deal(hub_size: int) -> tuple[bytes, bytes]:
    """Make one vector OLE; return what the hub gets, and what the member gets."""
    seed_a, seed_b, delta = fresh_key(), fresh_key(), fresh_key()[:ELEMENT_BYTES]
    count = vector_elements(hub_size)
    c = Multiplier(delta).times(random_elements(seed_a, b"a", count))
    add_random(c, seed_b, b"b")
    return seed_a + to_bytes(c), seed_b + delta


def dealer_script(desk: Desk, hub: str, members: Sequence[str]) -> Script:
    """Serve one order of the hub.

    Raises:
        RemoteProtocolError: of more than was agreed.
    """
    inbox = yield Turn((), [hub])
    (size,) = DEAL.unpack(desk.read(inbox, hub, Kind.DEAL, DEAL.size))
    sizes = desk.agreement.sizes
    most = agreed_size(desk.agreement, hub) if sizes else desk.agreement.maximum_ids
    if size > most or (sizes and size != most):
        raise RemoteProtocolError(
            f"{hub} orders a vector for {size} IDs, the parties agreed on "
            f"{'' if sizes else 'at most '}{most}"
        )
    bodies, to_hub = {}, []
    for member in members:
        hubs, bodies[member] = deal(size)
        to_hub.append(hubs)
    bodies[hub] = b"".join(to_hub)
    yield desk.turn(Kind.DEALT, bodies, ())
    return Opened()


def dealt_to_hub(desk: Desk, inbox: Inbox, size: int, members: Sequence[str]) -> bytes:
    """What the dealer sent, for each member one after the other."""
    length = hub_dealt_bytes(size) * len(members)
    return desk.read(inbox, desk.agreement.dealer, Kind.DEALT, length)


def dealt_to_member(desk: Desk, inbox: Inbox) -> bytes:
    """What the dealer sent."""
    return desk.read(inbox, desk.agreement.dealer, Kind.DEALT, member_dealt_bytes())


class VoleStocking(DealingAhead):
    """The parties' roles for dealing ahead."""

    def _hub_script(self, me: str, members: Sequence[str], supply: Supply) -> Script:
        desk, size = Desk(me, self._agreement), agreed_size(self._agreement, me)
        order = {self._agreement.dealer: DEAL.pack(size)}
        inbox = yield desk.turn(Kind.DEAL, order, [self._agreement.dealer])
        supply.add(dealt_to_hub(desk, inbox, size, members))
        return Opened()

    def _member_script(self, me: str, hub: str, supply: Supply) -> Script:
        inbox = yield Turn((), [self._agreement.dealer])
        supply.add(dealt_to_member(Desk(me, self._agreement), inbox))
        return Opened()

    def _dealer_script(self, me: str, hub: str, members: Sequence[str]) -> Script:
        return dealer_script(Desk(me, self._agreement), hub, members)
