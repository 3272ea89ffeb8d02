"""What each set intersection would take for a run's IDs, measured on a part of them.

Run by: the planner, all parties in this process.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from apfed_protocols.conversation import Conversation, Outgoing, converse
from apfed_protocols.psi import SET_INTERSECTIONS
from secure_apfed.alignment import canonical_ids, intersection
from secure_apfed.config import Config
from secure_apfed.data import VerticalData

__all__ = ["IntersectionCost", "intersection_costs"]

_SAMPLE = 1000
_DEALER = "dealer"
_TWINS = frozenset({"circuit_crypten"})  # sends what `circuit` sends, and takes an extra


@dataclass(frozen=True, kw_only=True)
class IntersectionCost:
    """One protocol; bytes and seconds are estimates, seconds of all parties in one process.

    Attributes:
        chosen: whether the run takes it.
        takes_dealer: whether it needs a party without IDs that works with nobody.
        pairwise: whether the active learns its overlap with every single passive.
    """

    protocol: str
    chosen: bool
    wire_bytes: int
    seconds: float
    takes_dealer: bool
    pairwise: bool


def intersection_costs(config: Config, data: VerticalData) -> tuple[IntersectionCost, ...]:
    """Play every protocol with at most 1,000 IDs a party, and scale by the number of real ones."""
    if not config.method.aligns:
        return ()
    settings, real = config.alignment.for_a_trial(), sum(len(one.ids) for one in data.tables)
    ids = {
        table.name: canonical_ids(table.name, table.ids[:_SAMPLE], settings)
        for table in data.tables
    }
    scale = real / sum(map(len, ids.values()))
    hub = data.active.name
    costs = []
    for name, backend in SET_INTERSECTIONS.items():
        if name in _TWINS:
            continue
        chosen = settings.model_copy(update={"protocol": name})
        ends = intersection(chosen, session=f"plan {name}", dealer=_DEALER)
        # IDs of one data set's first rows may share none
        ends.agreement = replace(ends.agreement, minimum_rows=0)
        began, members = time.perf_counter(), [party for party in ids if party != hub]
        roles: dict[str, Conversation] = {hub: ends.hub(hub, members, ids[hub])}
        roles |= {member: ends.member(member, hub, ids[member]) for member in members}
        if backend.needs_dealer:
            roles[_DEALER] = ends.dealer(hub, members)
        counted = {party: _Counted(role) for party, role in roles.items()}
        converse(counted)
        costs.append(
            IntersectionCost(
                protocol=name,
                chosen=name == config.alignment.backend,
                wire_bytes=round(scale * sum(one.bytes for one in counted.values())),
                seconds=scale * (time.perf_counter() - began),
                takes_dealer=backend.needs_dealer,
                pairwise=backend.pairwise,
            )
        )
    return tuple(costs)


class _Counted:
    """A role whose bytes are counted."""

    def __init__(self, role: Conversation) -> None:
        self._role, self.bytes = role, 0

    @property
    def finished(self) -> bool:
        return self._role.finished

    def start(self) -> Iterable[Outgoing]:
        return self._count(self._role.start())

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        return self._count(self._role.receive(sender, body))

    def _count(self, messages: Iterable[Outgoing]) -> Iterator[Outgoing]:
        for message in messages:
            self.bytes += len(message.body)
            yield message
