"""Aligning the tables of a session over its links: all parties at once, or pair by pair.

`all`: the rows that all parties share; position k is the same person at every party.
`pairwise`: the active intersects with each passive on its own, and numbers the people that
it shares with any of them in a random order of its own. It tells each passive the
numbers of the people they share; a passive learns how many positions there are, and never
whose the others are. A party without the person of a position has -1 there.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from protocols.conversation import Conversation
from protocols.errors import RemoteProtocolError
from protocols.psi import SET_INTERSECTIONS
from protocols.psi.interface import Aligner
from protocols.randomness import random_permutation
from secure_apfed.alignment import AlignmentSettings, canonical_ids, intersection
from secure_apfed.contract import Contract
from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.exchange import Envelope, Kind, TensorSpec, Transport, pack, unpack
from secure_apfed.exchange.conversation import BEFORE_TRAINING
from secure_apfed.exchange.outbox import Outbox
from secure_apfed.settings.training import TrainSettings

__all__ = [
    "DEALER",
    "Links",
    "align_over",
    "needs_dealer",
    "place_rows",
    "positions_of",
    "training_rows",
]

DEALER = "dealer"


class Links(Protocol):
    """What the parties of a session talk over; see `secure_apfed.methods.stage.Stage`."""

    @property
    def contract(self) -> Contract: ...

    @property
    def transcript(self) -> Transport: ...

    @property
    def outboxes(self) -> Mapping[str, Outbox]: ...

    def hold(self, kind: Kind, roles: Mapping[str, Conversation]) -> None: ...


def positions_of(aligned: Tensor, rows: Tensor) -> Tensor:
    """Alignment positions of these rows of a party, in the order of its own table.

    The alignment's order is random; a table's own order makes what is drawn from these
    positions a function of the seed.

    Args:
        aligned: the party's row at each position.
        rows: of its own table.
    """
    order = aligned.argsort()
    return order[torch.isin(aligned[order], rows)]


def needs_dealer(settings: AlignmentSettings) -> bool:
    """Whether the configured intersection takes one more party."""
    return SET_INTERSECTIONS[settings.protocol].needs_dealer


def align_over(links: Links, data: VerticalData, settings: AlignmentSettings) -> dict[str, Tensor]:
    """Return, by party, the row of its own table at each position, -1 where it has none.

    Raises:
        DataError: IDs that cannot be aligned.
        IntersectionTooSmallError: fewer common IDs than agreed, in `pairwise` of any pair.
    """
    if settings.mode == "pairwise":
        return _align_pairs(links, data, settings)
    return _intersect(links, data.active, data.passives, settings, links.contract.session)


def _intersect(
    links: Links,
    active: PartyTable,
    passives: Iterable[PartyTable],
    settings: AlignmentSettings,
    session: str,
) -> dict[str, Tensor]:
    names = [passive.name for passive in passives]
    protocol = intersection(
        settings, session=session, dealer=DEALER if needs_dealer(settings) else ""
    )
    hub = protocol.hub(active.name, names, canonical_ids(active.name, active.ids, settings))
    aligners: dict[str, Aligner] = {active.name: hub}
    for passive in passives:
        ids = canonical_ids(passive.name, passive.ids, settings)
        aligners[passive.name] = protocol.member(passive.name, active.name, ids)
    helpers = {DEALER: protocol.dealer(active.name, names)} if needs_dealer(settings) else {}
    links.hold(Kind.ALIGNMENT, {**aligners, **helpers})
    return {name: torch.from_numpy(aligner.rows.copy()) for name, aligner in aligners.items()}


def _align_pairs(
    links: Links, data: VerticalData, settings: AlignmentSettings
) -> dict[str, Tensor]:
    active = data.active
    pairs = {
        table.name: _intersect(
            links, active, [table], settings, f"{links.contract.session} {table.name}"
        )
        for table in data.passives
    }
    rows_U = torch.unique(torch.cat([pair[active.name] for pair in pairs.values()]))
    rows_U = rows_U[torch.from_numpy(random_permutation(len(rows_U)))]
    position_N = torch.full((len(active.ids),), -1, dtype=torch.int64)
    position_N[rows_U] = torch.arange(len(rows_U))
    alignment = {active.name: rows_U}
    for name, pair in pairs.items():
        payload = pack({"positions": position_N[pair[active.name]]}, {"total": len(rows_U)})
        outbox = links.outboxes[active.name]
        links.transcript.send(outbox.write(Kind.ALIGNMENT, BEFORE_TRAINING, name, payload))
        told = links.transcript.receive(
            name, sender=active.name, kind=Kind.ALIGNMENT, step=BEFORE_TRAINING
        )
        alignment[name] = place_rows(told, pair[name], most=settings.maximum_ids)
    return alignment


def place_rows(envelope: Envelope, rows_P: Tensor, *, most: int) -> Tensor:
    """Return a passive's own row at each position, (U,), -1 where it does not know the person.

    Args:
        envelope: from the active: the position of each common person, and their number.
        rows_P: the passive's rows, in the order of its intersection with the active.
        most: the largest number of positions.

    Raises:
        RemoteProtocolError: positions that are repeated, missing or out of range.
    """
    expected = {"positions": TensorSpec(torch.int64, (len(rows_P),))}
    tensors, meta = unpack(envelope.payload, expected, sender=envelope.sender)
    positions_P, total = tensors["positions"], meta.get("total")
    if type(total) is not int or not len(rows_P) <= total <= most:
        raise RemoteProtocolError(
            f"{envelope.sender} announces {total} positions for {len(rows_P)} common people; "
            f"expected a number from there to {most}"
        )
    if len(torch.unique(positions_P)) != len(positions_P) or not bool(
        ((positions_P >= 0) & (positions_P < total)).all()
    ):
        raise RemoteProtocolError(
            f"{envelope.sender} gave two people one position, or one outside 0 to {total - 1}"
        )
    rows_U = torch.full((total,), -1, dtype=torch.int64)
    rows_U[positions_P] = rows_P
    return rows_U


def training_rows(data: VerticalData, aligned: Tensor, train: TrainSettings) -> Tensor:
    """All training rows of the active, or its aligned ones only, as `use_unaligned` says."""
    rows = data.train_rows
    return rows if train.use_unaligned else rows[torch.isin(rows, aligned)]
