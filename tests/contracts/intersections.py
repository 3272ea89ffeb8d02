"""All roles of one intersection, played message by message, which a test may watch or change."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.interface import (
    Aligner,
    IntersectionAgreement,
    Progress,
    SetIntersection,
    Supply,
)

__all__ = ["DEALER", "HEADER", "Intersection", "Sets"]

DEALER = "dealer"
HEADER = 22
Sets = Mapping[str, Sequence[bytes]]


class Intersection:
    """The roles of a backend under one agreement.

    Args:
        backend: or its key in the table.
        sets: by party; the first is the hub.
        agreed: None: one of the other `fields`.
        supplies: by party, where they were dealt ahead.
        change: of sender and message, the body that arrives.
    """

    def __init__(
        self,
        backend: str | type[SetIntersection],
        sets: Sets,
        agreed: IntersectionAgreement | None = None,
        *,
        supplies: Mapping[str, Supply] | None = None,
        change: Callable[[str, Outgoing], bytes] | None = None,
        progress: Callable[[Progress], None] | None = None,
        **fields: Any,
    ) -> None:
        kind = SET_INTERSECTIONS[backend] if isinstance(backend, str) else backend
        usual: dict[str, Any] = {"session": "s", "minimum_rows": 0, "dealer": DEALER}
        agreed = agreed or IntersectionAgreement(**usual | fields)
        protocol: Any = kind(agreed, threads=1, progress=progress)
        self.sets, self._change = sets, change
        self.hub, *self.members = sets
        given = {name: {"supply": supply} for name, supply in (supplies or {}).items()}
        self.aligners: dict[str, Aligner] = {
            self.hub: protocol.hub(
                self.hub, self.members, sets[self.hub], **given.get(self.hub, {})
            )
        }
        for name in self.members:
            member = protocol.member(name, self.hub, sets[name], **given.get(name, {}))
            self.aligners[name] = member
        self.roles: dict[str, Conversation] = {**self.aligners}
        if kind.needs_dealer:
            self.roles[agreed.dealer] = protocol.dealer(self.hub, self.members)
        self.sent: list[tuple[str, Outgoing]] = []

    def play(self) -> Self:
        """Deliver all messages in order; what arrived is `sent`."""
        queue = [(name, out) for name, role in self.roles.items() for out in role.start()]
        while queue:
            sender, out = queue.pop(0)
            if self._change is not None:
                out = Outgoing(out.receiver, self._change(sender, out))
            self.sent.append((sender, out))
            answers = self.roles[out.receiver].receive(sender, out.body)
            queue += [(out.receiver, answer) for answer in answers]
        return self

    def check(self) -> None:
        """All parties have the rows of exactly the common IDs, in one order."""
        expected = set.intersection(*map(set, self.sets.values()))
        rows = {name: role.rows for name, role in self.aligners.items()}
        orders = [[self.sets[name][row] for row in rows[name]] for name in self.sets]
        assert set(orders[0]) == expected
        assert len(orders[0]) == len(expected)
        assert all(order == orders[0] for order in orders)
