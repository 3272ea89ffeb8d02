"""The dealer of the circuit intersection: hands out triples and counts common IDs.

Run by: a party without IDs, such as the aggregator. It sees the sizes of all sets and of
the intersection; if it worked together with the hub or a member, they could read the other
parties' tags.
"""

import struct
from collections.abc import Callable, Generator, Sequence

import numpy as np

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.circuit import hashing
from apfed_protocols.psi.circuit.bits import deal_triples
from apfed_protocols.psi.circuit.hashing import BITS
from apfed_protocols.psi.circuit.messages import (
    CHUNK_SLOTS,
    ENOUGH,
    TOO_FEW,
    VERDICT,
    Desk,
    Inbox,
    Kind,
    chunks,
    planned_bins_and_slots,
    triple_words,
)
from apfed_protocols.psi.interface import Output
from apfed_protocols.psi.result import Opened
from apfed_protocols.psi.script import Script, Turn

__all__ = ["deal_request", "dealer_script", "stocking_script"]


def deal_request(words: int, slots: Sequence[int]) -> bytes:
    """Return the hub's order for one chunk: W, and K of each member."""
    return struct.pack(f">{1 + len(slots)}I", words, *slots)


def dealer_script(
    desk: Desk,
    hub: str,
    members: Sequence[str],
    slots_for: Callable[[int, int], int] = hashing.slots_for,
    *,
    hub_size: int | None = None,
) -> Script:
    """Serve one intersection, see `apfed_protocols.psi.circuit.backend`, steps 2 and 3.

    `hub_size` is what the hub announced to the dealer, where it did.
    """
    total, most = 0, desk.agreement.maximum_ids if hub_size is None else hub_size
    turn = Turn((), [hub])
    inbox = yield turn
    if desk.agreement.ahead:
        total = planned_bins_and_slots(desk.agreement, hub, members)[0] // BITS
    while not desk.agreement.ahead and desk.kind_of(inbox, hub) is Kind.DEAL:
        words, turn = _fill_order(desk, hub, members, inbox, slots_for)
        total += words
        if total * BITS > hashing.bins_for(most):
            raise RemoteProtocolError(
                f"{hub} orders triples for {total * BITS} bins, more than the agreed {most} IDs "
                "take"
            )
        inbox = yield turn
    verdict = yield from _count(desk, hub, members, inbox, total)
    yield desk.turn(Kind.VERDICT, dict.fromkeys([hub, *members], verdict), ())
    return Opened()


def stocking_script(
    desk: Desk,
    hub: str,
    members: Sequence[str],
    slots_for: Callable[[int, int], int] = hashing.slots_for,
) -> Script:
    """Deal ahead of one intersection, see `apfed_protocols.psi.supply`."""
    bins, planned = planned_bins_and_slots(desk.agreement, hub, members, slots_for)
    turn = Turn((), [hub])
    for chunk in chunks(bins, planned):
        inbox = yield turn
        words, turn = _fill_order(desk, hub, members, inbox, slots_for)
        if words * BITS != chunk.stop - chunk.start:
            raise RemoteProtocolError(
                f"{hub} orders triples for {words} words of bins, the agreed sizes take "
                f"{(chunk.stop - chunk.start) // BITS}"
            )
    yield Turn(turn.outgoing, ())
    return Opened()


def _fill_order(
    desk: Desk,
    hub: str,
    members: Sequence[str],
    inbox: Inbox,
    slots_for: Callable[[int, int], int],
) -> tuple[int, Turn]:
    """Return how many words of bins the hub ordered for, and what to send."""
    order = desk.read(inbox, hub, Kind.DEAL, 4 * (1 + len(members)))
    words, *slots = struct.unpack(f">{1 + len(members)}I", order)
    # the smallest table has fewest bins, where a large set takes many slots
    most = slots_for(desk.agreement.maximum_ids, hashing.bins_for(0))
    _check_order(hub, words, slots, most)
    return words, _deal(desk, hub, members, words, slots)


def _check_order(hub: str, words: int, slots: Sequence[int], most: int) -> None:
    too_many = words > 1 and words * BITS * max(slots) > CHUNK_SLOTS
    if not words or not min(slots) or too_many or max(slots) > most:
        raise RemoteProtocolError(
            f"{hub} orders triples for {words} words of bins with {max(slots)} slots; a chunk has "
            f"1 to {CHUNK_SLOTS} slots, or one word of bins, and a bin at most {most}"
        )


def _deal(desk: Desk, hub: str, members: Sequence[str], words: int, slots: Sequence[int]) -> Turn:
    pair_words, all_words = triple_words(words, slots)
    all_seeds, all_correction = deal_triples(len(members) + 1, all_words)
    bodies, hub_seeds = {}, b""
    for member, count, all_seed in zip(members, pair_words, all_seeds, strict=False):
        (hub_seed, seed), correction = deal_triples(2, count)
        hub_seeds += hub_seed
        bodies[member] = seed + all_seed + correction
    bodies[hub] = hub_seeds + all_seeds[-1] + all_correction
    return desk.turn(Kind.TRIPLES, bodies, [hub])


def _count(
    desk: Desk, hub: str, members: Sequence[str], inbox: Inbox, words: int
) -> Generator[Turn, Inbox, bytes]:
    """Return whether the common IDs reach the agreed minimum, or their number if agreed."""
    bits = desk.read_words(inbox, hub, Kind.COUNT, (words,))
    inbox = yield Turn((), members)
    for member in members:
        bits = bits ^ desk.read_words(inbox, member, Kind.COUNT, (words,))
    size = int(np.bitwise_count(bits).sum())
    if size < desk.agreement.minimum_rows:
        return VERDICT.pack(TOO_FEW)
    return VERDICT.pack(size if desk.agreement.output is Output.SIZE else ENOUGH)
