"""All roles of one intersection, played message by message, which a test may watch or change."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import pytest

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.psi import SET_INTERSECTIONS, base_ot
from apfed_protocols.psi.interface import (
    Aligner,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Progress,
    SetIntersection,
)
from apfed_protocols.randomness import derive_key, keystream

DEALER = "dealer"
HEADER = 22
Sets = Mapping[str, Sequence[bytes]]
Change = Callable[[str, Outgoing], bytes]
"""Of sender and message, the body that arrives."""


def change_kind(sender: str, kind: int, change: Callable[[bytes], bytes]) -> Change:
    """Another body, whose length its header tells truly, in all messages of one kind."""

    def change_message(who: str, out: Outgoing) -> bytes:
        head = out.body[: HEADER - 4]
        body = out.body[HEADER:]
        if (who, head[1]) != (sender, kind):
            return out.body
        body = change(body)
        return head + len(body).to_bytes(4, "big") + body

    return change_message


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

    def list_common_ids(self) -> dict[str, list[bytes]]:
        """List the IDs in the rows that each party has."""
        return {
            name: [self.sets[name][row] for row in role.rows]
            for name, role in self.aligners.items()
        }

    def check(self) -> None:
        """All parties have the rows of exactly the common IDs, in one order."""
        expected, (first, *others) = (
            set.intersection(*map(set, self.sets.values())),
            (self.list_common_ids().values()),
        )
        assert set(first) == expected
        assert len(first) == len(expected)
        assert all(order == first for order in others)


class QuickSender:
    """A stand-in for `base_ot.Sender` that computes on no curve, and hides nothing."""

    def __init__(self, seed: bytes, *, session: bytes) -> None:
        self._session = session
        self.message = derive_key(seed, b"quick sender")

    def compute_keys(self, points: bytes, *, receiver: str) -> list[tuple[bytes, bytes]]:
        batch = derive_key(self._session, self.message, points[:32])
        return [
            (derive_key(batch, b"%d 0" % number), derive_key(batch, b"%d 1" % number))
            for number in range(len(points) // (2 * base_ot.POINT_BYTES))
        ]


class QuickReceiver:
    """The same for `base_ot.Receiver`."""

    def __init__(self, choices: Sequence[int], seed: bytes, *, session: bytes) -> None:
        self._choices = choices
        self._session = session
        length = 2 * base_ot.POINT_BYTES * len(choices)
        self.message = keystream(seed, b"quick receiver", length=length)

    def compute_keys(self, point: bytes, *, sender: str) -> list[bytes]:
        batch = derive_key(self._session, point, self.message[:32])
        return [
            derive_key(batch, b"%d %d" % (number, choice))
            for number, choice in enumerate(self._choices)
        ]


def use_quick_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play `ot` without its base transfers, which take 0.2 s a pair; `test_psi_ot` plays them."""
    monkeypatch.setattr(base_ot, "Sender", QuickSender)
    monkeypatch.setattr(base_ot, "Receiver", QuickReceiver)
