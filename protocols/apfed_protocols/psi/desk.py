"""What scripted roles of an intersection write and read with: one kind a message, one a turn.

Run by: hub, members and dealer of backends whose roles are scripts (`apfed_protocols.psi.script`).
Every message has a kind and, but for sizes that its receiver reads from an earlier one, a fixed
length; anything else is refused.
"""

from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from typing import Generic, TypeVar

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.framing import Framing
from apfed_protocols.psi.interface import IntersectionAgreement, Progress
from apfed_protocols.psi.script import Turn

__all__ = ["Desk", "Inbox"]

Inbox = Mapping[str, bytes]

_Kind = TypeVar("_Kind", bound=IntEnum)


class Desk(Generic[_Kind]):
    """Frames one party's messages, and reads those of its peers.

    Args:
        me: the party; agreement: of the intersection.
        kinds: of messages; version: names the backend and its version, 0 to 255.
        work: what `report` tells of.
        progress: told of it.
    """

    def __init__(
        self,
        me: str,
        agreement: IntersectionAgreement,
        *,
        kinds: type[_Kind],
        version: int,
        work: str,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.me, self.agreement, self._kinds = me, agreement, kinds
        self._work, self._progress = work, progress
        self._framing = Framing(agreement, version, dict.fromkeys(map(int, kinds), 1), 2**32 - 1)

    def report(self, done: int, total: int) -> None:
        """Tell whoever watches how much of the work is done."""
        if self._progress is not None:
            self._progress(Progress(self.me, self._work, done, total))

    def turn(self, kind: _Kind, bodies: Mapping[str, bytes], awaited: Collection[str]) -> Turn:
        """Send each party its body, then wait for one message of each awaited party."""
        packed = {party: self._framing.pack(kind, body) for party, body in bodies.items()}
        return Turn([Outgoing(party, body) for party, body in packed.items()], awaited)

    def kind_of(self, inbox: Inbox, sender: str) -> _Kind:
        """Return the kind of the message of `sender`, where the protocol allows several."""
        return self._kinds(self._framing.unpack(sender, inbox[sender])[0])

    def read(self, inbox: Inbox, sender: str, kind: _Kind, length: int | None = None) -> bytes:
        """Return the body of the message of `sender`, of this kind and length.

        Raises:
            RemoteProtocolError: it is another one.
        """
        found, body = self._framing.unpack(sender, inbox[sender])
        if found != kind:
            raise RemoteProtocolError(
                f"{sender} sent {self._kinds(found).name.lower()} when the protocol expects "
                f"{kind.name.lower()}; a message was repeated or reordered"
            )
        if length is not None and len(body) != length:
            raise RemoteProtocolError(
                f"{sender} sent {kind.name.lower()} of {len(body)} bytes, expected {length}"
            )
        return body
