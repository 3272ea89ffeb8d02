"""All roles of one intersection, played message by message, which a test may watch or change."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.interface import (
    Aligner,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Progress,
    SetIntersection,
)

DEALER = "dealer"
HEADER = 22
Sets = Mapping[str, Sequence[bytes]]
Change = Callable[[str, Outgoing], bytes]
"""Of sender and message, the body that arrives."""


def of_kind(sender: str, kind: int, change: Callable[[bytes], bytes]) -> Change:
    """Another body, whose length its header tells truly, in all messages of one kind."""

    def changed(who: str, out: Outgoing) -> bytes:
        head = out.body[: HEADER - 4]
        body = out.body[HEADER:]
        if (who, head[1]) != (sender, kind):
            return out.body
        body = change(body)
        return head + len(body).to_bytes(4, "big") + body

    return changed


def deliver(
    roles: Mapping[str, Conversation], change: Change | None = None, *, refusing: bool = False
) -> list[tuple[str, Outgoing]]:
    """Deliver all messages in order; return what arrived, and from whom.

    If `refusing`, an intersection that is too small is no error.
    """
    sent = []
    queue = [(name, out) for name, role in roles.items() for out in role.start()]
    while queue:
        sender, out = queue.pop(0)
        if change is not None:
            out = Outgoing(out.receiver, change(sender, out))
        sent.append((sender, out))
        try:
            answers = roles[out.receiver].receive(sender, out.body)
            queue += [(out.receiver, answer) for answer in answers]
        except IntersectionTooSmallError:
            if not refusing:
                raise
    return sent


class Intersection:
    """The roles of a backend under an agreement, or one of `fields`; the first set is the hub's."""

    def __init__(
        self,
        backend: str | type[SetIntersection],
        sets: Sets,
        agreed: IntersectionAgreement | None = None,
        *,
        change: Change | None = None,
        progress: Callable[[Progress], None] | None = None,
        **fields: Any,
    ) -> None:
        kind = SET_INTERSECTIONS[backend] if isinstance(backend, str) else backend
        usual: dict[str, Any] = {"session": "s", "minimum_rows": 0, "dealer": DEALER}
        agreed = agreed or IntersectionAgreement(**usual | fields)
        protocol: Any = kind(agreed, threads=1, progress=progress)
        self.sets = sets
        self._change = change
        self.hub, *self.members = sets
        self.aligners: dict[str, Aligner] = {
            self.hub: protocol.make_hub(self.hub, self.members, sets[self.hub])
        }
        for name in self.members:
            self.aligners[name] = protocol.make_member(name, self.hub, sets[name])
        self.roles: dict[str, Conversation] = {**self.aligners}
        if kind.needs_dealer:
            self.roles[agreed.dealer] = protocol.make_dealer(self.hub, self.members)
        self.sent: list[tuple[str, Outgoing]] = []

    def play(self, *, refusing: bool = False) -> Self:
        """Deliver all messages in order; what arrived is `sent`."""
        self.sent = deliver(self.roles, self._change, refusing=refusing)
        return self

    def opened(self) -> dict[str, list[bytes]]:
        """The IDs in the rows that each party has."""
        return {
            name: [self.sets[name][row] for row in role.rows]
            for name, role in self.aligners.items()
        }

    def check(self) -> None:
        """All parties have the rows of exactly the common IDs, in one order."""
        expected, (first, *others) = (
            set.intersection(*map(set, self.sets.values())),
            (self.opened().values()),
        )
        assert set(first) == expected
        assert len(first) == len(expected)
        assert all(order == first for order in others)
