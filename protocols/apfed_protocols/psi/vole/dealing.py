"""Vector OLE, dealt: to the hub A and C, to a member B and Delta, such that C = A Delta + B.

Run by: the dealer of `apfed_protocols.psi.vole.backend`, a party without IDs; hub and members ask
it, in the intersection or ahead of it (`apfed_protocols.psi.supply`). A and B are expanded from
seeds. The dealer learns the size that the hub announces. Working together with the hub it could try
out guesses of a member's IDs, and with a member guesses of the hub's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.desk import Inbox
from apfed_protocols.psi.interface import IntersectionAgreement
from apfed_protocols.psi.result import Opened
from apfed_protocols.psi.script import Script, Turn
from apfed_protocols.psi.sizes import agreed_size
from apfed_protocols.psi.supply import DealingAhead, Supply
from apfed_protocols.psi.vole.field import (
    ELEMENT_BYTES,
    Elements,
    Multiplier,
    add_random,
    from_bytes,
    random_elements,
    to_bytes,
)
from apfed_protocols.psi.vole.messages import (
    DEAL,
    DEALING_BYTES,
    Desk,
    Kind,
    hub_dealt_bytes,
    longest_message,
    member_dealt_bytes,
    vector_elements,
)
from apfed_protocols.randomness import KEY_BYTES, fresh_key

__all__ = [
    "HubShare", "MemberShare", "VoleStocking", "deal", "dealer_script", "dealt_to_hub",
    "dealt_to_member", "ordered_size",
]  # fmt: skip


@dataclass(frozen=True)
class HubShare:
    """A and C of one member, shape (m, 2).

    Attributes:
        dealing: names what was dealt at once, and tells nothing.
        seed: which A is expanded from each time that it is asked for; it is long, and used once.
    """

    dealing: bytes
    seed: bytes = field(repr=False)
    c: Elements = field(repr=False)

    @classmethod
    def of(cls, dealt: bytes | memoryview) -> "HubShare":
        """Read what the dealer sent."""
        dealing, seed, c = _parts(dealt)
        return cls(dealing, seed, from_bytes(c))

    def masked(self, store: Elements, *, head: bytes = b"") -> bytes:
        """What the hub sends for a vector P, behind `head`: A + P."""
        vector = store.copy()
        add_random(vector, self.seed, b"a")
        return b"".join((head, self.dealing, vector.data.cast("B")))


@dataclass(frozen=True)
class MemberShare:
    """What B is expanded from, and what multiplies by Delta."""

    dealing: bytes
    seed: bytes = field(repr=False)
    delta: Multiplier = field(repr=False)

    @classmethod
    def of(cls, dealt: bytes, *, dealer: str) -> "MemberShare":
        """Read what the dealer sent.

        Raises:
            RemoteProtocolError: a Delta of zero, under which the hub could try out guessed IDs.
        """
        dealing, seed, delta = _parts(dealt)
        if not any(delta):
            raise RemoteProtocolError(
                f"{dealer} dealt a Delta of zero, which hides no ID; it does not follow the "
                "protocol: have another party deal"
            )
        return cls(dealing, seed, Multiplier(bytes(delta)))

    def unmasked(self, hub: str, sent: bytes | memoryview) -> Elements:
        """K = B + (A + P) Delta.

        Raises:
            RemoteProtocolError: the hub masked with what was dealt another time.
        """
        content = memoryview(sent)
        if content[:DEALING_BYTES] != self.dealing:
            raise RemoteProtocolError(
                f"{hub} uses what was dealt another time, so that no ID would be found; "
                "deal again to all parties, under a new session"
            )
        store = self.delta.times(from_bytes(content[DEALING_BYTES:]))
        add_random(store, self.seed, b"b")
        return store


def _parts(dealt: bytes | memoryview) -> tuple[bytes, bytes, memoryview]:
    """The name of the dealing, the seed, and the rest."""
    content, end = memoryview(dealt), DEALING_BYTES + KEY_BYTES
    return bytes(content[:DEALING_BYTES]), bytes(content[DEALING_BYTES:end]), content[end:]


def deal(elements: int) -> tuple[bytes, bytes]:
    """Make one vector OLE so long; return what the hub gets, and what the member gets."""
    dealing, seed_a, seed_b = fresh_key()[:DEALING_BYTES], fresh_key(), fresh_key()
    delta = bytes(ELEMENT_BYTES)
    while not any(delta):
        delta = fresh_key()[:ELEMENT_BYTES]
    c = Multiplier(delta).times(random_elements(seed_a, b"a", elements))
    add_random(c, seed_b, b"b")
    return dealing + seed_a + to_bytes(c), dealing + seed_b + delta


def ordered_size(agreement: IntersectionAgreement, hub: str, order: bytes) -> int:
    """For how many IDs the hub orders.

    Raises:
        RemoteProtocolError: for others than were agreed.
    """
    (size,) = DEAL.unpack(order)
    sizes = agreement.sizes
    most = agreed_size(agreement, hub) if sizes else agreement.maximum_ids
    if size > most or (sizes and size != most):
        raise RemoteProtocolError(
            f"{hub} orders a vector for {size} IDs, the parties agreed on "
            f"{'' if sizes else 'at most '}{most}"
        )
    return int(size)


def dealer_script(desk: Desk, hub: str, members: Sequence[str]) -> Script:
    """Serve the hub's order for each member.

    Raises:
        RemoteProtocolError: of more than was agreed.
    """
    for member in members:
        inbox = yield Turn((), [hub])
        size = ordered_size(desk.agreement, hub, desk.read(inbox, hub, Kind.DEAL, DEAL.size))
        hubs, members_own = deal(vector_elements(size))
        yield desk.turn(Kind.DEALT, {hub: hubs, member: members_own}, ())
    return Opened()


def dealt_to_hub(desk: Desk, inbox: Inbox, size: int) -> bytes:
    """What the dealer sent for one member."""
    length = hub_dealt_bytes(vector_elements(size))
    return desk.read(inbox, desk.agreement.dealer, Kind.DEALT, length)


def dealt_to_member(desk: Desk, inbox: Inbox) -> bytes:
    """What the dealer sent."""
    return desk.read(inbox, desk.agreement.dealer, Kind.DEALT, member_dealt_bytes())


class VoleStocking(DealingAhead):
    """The parties' roles for dealing ahead."""

    def _hub_script(self, me: str, members: Sequence[str], supply: Supply) -> Script:
        desk, size = Desk(me, self._agreement), agreed_size(self._agreement, me)
        order = {self._agreement.dealer: DEAL.pack(size)}
        for _ in members:
            inbox = yield desk.turn(Kind.DEAL, order, [self._agreement.dealer])
            supply.add(dealt_to_hub(desk, inbox, size))
        return Opened()

    def _member_script(self, me: str, hub: str, supply: Supply) -> Script:
        inbox = yield Turn((), [self._agreement.dealer])
        supply.add(dealt_to_member(Desk(me, self._agreement), inbox))
        return Opened()

    def _dealer_script(self, me: str, hub: str, members: Sequence[str]) -> Script:
        return dealer_script(Desk(me, self._agreement), hub, members)

    def _longest(self) -> int:
        return longest_message(self._agreement)
