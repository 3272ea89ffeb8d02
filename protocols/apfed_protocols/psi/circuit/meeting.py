"""Before the circuit: hub and members exchange sizes, agree on a hash key, fill their bins.

Run by: hub and members of `apfed_protocols.psi.circuit.backend`. The hub commits to its part of
the key before it sees the members' parts, and reveals it when it has them all, so that no
party alone chooses where IDs fall. Where IDs do not fit at any party, all go on to the next key
derived from the same parts.

COMMIT: SHA-256 of the hub's part, its size, M, the member's place. JOIN: the member's part,
a mask seed for the hub alone, its size. REVEAL: the hub's part, all members' parts and
sizes. PLACE: the number of the key. PLACED: 1 where it fits. AGREED: empty.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.circuit import hashing
from apfed_protocols.psi.circuit.messages import Desk, Inbox, Kind
from apfed_protocols.psi.script import Turn
from apfed_protocols.psi.sizes import announced_size, check_announced
from apfed_protocols.randomness import KEY_BYTES, derive_key, fresh_key

__all__ = ["Meeting", "MemberBins", "Rows", "meet_as_hub", "meet_as_member"]

Rows: TypeAlias = NDArray[np.int64]
_Prints: TypeAlias = tuple[NDArray[np.uint64], Rows, NDArray[np.uint8]]
_Filled: TypeAlias = tuple[_Prints, NDArray[np.uint64]]

_ATTEMPTS = 64
_COMMIT = struct.Struct(">32sIHH")
_JOIN = struct.Struct(">32s32sI")
_PART = struct.Struct(">32sI")
_PLACE = struct.Struct(">I")


class MemberBins(Protocol):
    """How members hold their IDs in bins."""

    def slots(self, member_size: int, bins: int) -> int:
        """K, for so many IDs."""
        ...

    def table(
        self, prints: NDArray[np.uint64], bins_of: Rows, bins: int, slots: int
    ) -> NDArray[np.uint64] | None:
        """The tags in all slots, shape (K, B), or None where they do not fit."""
        ...


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a party takes into the circuit.

    Attributes:
        key: 32 bytes that hub and members share, unknown to the dealer.
        masks: the mask seeds that the hub shares with each member (a member: with the hub).
        place: this member's place among the members; of no use at the hub.
        slots: K of each member's bins, in the order of the members.
        sizes: what the hub and then each member announced.
        tags: hub: the tag in each bin (B,); member: in each slot (K, B).
        bins_of: the three bins of each own ID, (n, 3).
        prints: 63 bits of each own ID, (n,); tokens: 16 more bytes of each, (n, 16).
        row_of_bin: hub: the row whose ID is in each bin (B,), -1 for none.
    """

    key: bytes = field(repr=False)
    masks: Sequence[bytes] = field(repr=False)
    place: int
    slots: Sequence[int]
    sizes: Sequence[int]
    tags: NDArray[np.uint64] = field(repr=False)
    bins_of: NDArray[np.int64] = field(repr=False)
    prints: NDArray[np.uint64] = field(repr=False)
    tokens: NDArray[np.uint8] = field(repr=False)
    row_of_bin: NDArray[np.int64] = field(repr=False)


def meet_as_hub(
    desk: Desk, bins_of_members: MemberBins, members: Sequence[str], ids: Sequence[bytes]
) -> Generator[Turn, Inbox, Meeting]:
    """The hub's side."""
    own, count, size = fresh_key(), len(members), announced_size(desk.agreement, desk.me, len(ids))
    commitment = hashlib.sha256(own).digest()
    commits = {m: _COMMIT.pack(commitment, size, count, k) for k, m in enumerate(members)}
    inbox = yield desk.turn(Kind.COMMIT, commits, members)
    joins = [_JOIN.unpack(desk.read(inbox, m, Kind.JOIN, _JOIN.size)) for m in members]
    for member, (_, _, announced) in zip(members, joins, strict=True):
        check_announced(desk.agreement, member, [announced], [member])
    parts = b"".join(_PART.pack(part, announced) for part, _, announced in joins)
    yield desk.turn(Kind.REVEAL, dict.fromkeys(members, own + parts), ())
    bins = hashing.bins_for(size)
    keys = [_key(desk, own, parts, attempt) for attempt in range(_ATTEMPTS)]
    key, (prints, bins_of, tokens), row_of_bin = yield from _fill_bins(
        desk, members, ids, keys, bins
    )
    return Meeting(
        key=key,
        masks=[mask for _, mask, _ in joins],
        place=0,
        slots=[bins_of_members.slots(announced, bins) for _, _, announced in joins],
        sizes=[size, *(announced for _, _, announced in joins)],
        tags=hashing.hub_tags(prints, row_of_bin),
        bins_of=bins_of,
        prints=prints,
        tokens=tokens,
        row_of_bin=row_of_bin,
    )


def _fill_bins(
    desk: Desk, members: Sequence[str], ids: Sequence[bytes], keys: Sequence[bytes], bins: int
) -> Generator[Turn, Inbox, tuple[bytes, _Prints, Rows]]:
    """Find a key that all take; return it, the IDs' fingerprints and the rows (B,)."""
    refused: list[str] = []
    for attempt, key in enumerate(keys):
        tags, bins_n3, tokens = hashing.fingerprints(ids, key, bins)
        row_of_bin = hashing.cuckoo_table(bins_n3, bins)
        if row_of_bin is None:
            continue
        inbox = yield desk.turn(Kind.PLACE, dict.fromkeys(members, _PLACE.pack(attempt)), members)
        refused = [m for m in members if desk.read(inbox, m, Kind.PLACED, 1) != b"\1"]
        if not refused:
            yield desk.turn(Kind.AGREED, dict.fromkeys(members, b""), ())
            return key, (tags, bins_n3, tokens), row_of_bin
    if refused:
        raise RemoteProtocolError(
            f"{', '.join(refused)} took none of the {len(keys)} hash keys; IDs that were chosen to "
            "collide, or a peer that does not follow the protocol"
        )
    raise LocalProtocolError(
        f"{desk.me}: none of {len(keys)} hash keys gave every ID a bin; "
        "this does not happen by chance"
    )


def meet_as_member(
    desk: Desk, bins_of_members: MemberBins, hub: str, ids: Sequence[bytes]
) -> Generator[Turn, Inbox, Meeting]:
    """A member's side."""
    inbox = yield Turn((), [hub])
    commit = desk.read(inbox, hub, Kind.COMMIT, _COMMIT.size)
    commitment, hub_size, count, place = _COMMIT.unpack(commit)
    check_announced(desk.agreement, hub, [hub_size], [hub])
    _check_place(desk, hub, place, count)
    own, mask = fresh_key(), fresh_key()
    own_size = announced_size(desk.agreement, desk.me, len(ids))
    inbox = yield desk.turn(Kind.JOIN, {hub: _JOIN.pack(own, mask, own_size)}, [hub])
    reveal = desk.read(inbox, hub, Kind.REVEAL, KEY_BYTES + _PART.size * count)
    hub_part, parts = reveal[:KEY_BYTES], reveal[KEY_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(hub_part).digest(), commitment):
        raise RemoteProtocolError(f"{hub} revealed another key part than it committed to")
    if parts[_PART.size * place :][: _PART.size] != _PART.pack(own, own_size):
        raise RemoteProtocolError(f"{hub} repeats the key part or size of {desk.me} wrongly")
    sizes = [size for _, size in _PART.iter_unpack(parts)]
    members = [party for party in desk.agreement.sizes if party != hub]
    check_announced(desk.agreement, hub, sizes, members)
    bins = hashing.bins_for(hub_size)
    slots = [bins_of_members.slots(size, bins) for size in sizes]
    keys = [_key(desk, hub_part, parts, attempt) for attempt in range(_ATTEMPTS)]
    fill = partial(_filled, bins_of_members, ids, slots=slots[place], bins=bins)
    key, ((prints, bins_of, tokens), tags_KB) = yield from _fill_slots(desk, hub, keys, fill)
    return Meeting(
        key=key, masks=[mask], place=place, slots=slots, sizes=[hub_size, *sizes], tags=tags_KB,
        bins_of=bins_of, prints=prints, tokens=tokens, row_of_bin=np.empty(0, np.int64),
    )  # fmt: skip


def _check_place(desk: Desk, hub: str, place: int, count: int) -> None:
    """Refuse a place that there is not, or another number of members than agreed.

    Raises:
        RemoteProtocolError: names the hub and what it said.
    """
    if place >= count:
        raise RemoteProtocolError(f"{hub} gives place {place} among {count} members")
    if desk.agreement.sizes and count != len(desk.agreement.sizes) - 1:
        raise RemoteProtocolError(
            f"{hub} speaks of {count} members, the parties agreed on sizes for "
            f"{len(desk.agreement.sizes) - 1}"
        )


def _filled(
    bins_of_members: MemberBins, ids: Sequence[bytes], key: bytes, *, slots: int, bins: int
) -> _Filled | None:
    """The fingerprints and the tags (K, B); None where this key does not do."""
    prints, bins_of, tokens = hashing.fingerprints(ids, key, bins)
    table = bins_of_members.table(prints, bins_of, bins, slots)
    return None if table is None else ((prints, bins_of, tokens), table)


def _fill_slots(
    desk: Desk, hub: str, keys: Sequence[bytes], fill: Callable[[bytes], _Filled | None]
) -> Generator[Turn, Inbox, tuple[bytes, _Filled]]:
    """Try the keys that the hub proposes; return the one that all take, and what it filled."""
    previous, filled, filled_by = -1, fill(keys[0]), 0  # most likely it will do; the hub tries, too
    inbox = yield Turn((), [hub])
    while True:
        (attempt,) = _PLACE.unpack(desk.read(inbox, hub, Kind.PLACE, _PLACE.size))
        if not previous < attempt < len(keys):
            raise RemoteProtocolError(
                f"{hub} proposes hash key {attempt} after {previous}; keys are numbered upwards "
                f"and end at {len(keys) - 1}"
            )
        previous = attempt
        if attempt != filled_by:
            filled, filled_by = fill(keys[attempt]), attempt
        inbox = yield desk.turn(Kind.PLACED, {hub: bytes([filled is not None])}, [hub])
        if filled is not None and desk.kind_of(inbox, hub) is Kind.AGREED:
            desk.read(inbox, hub, Kind.AGREED, 0)
            return keys[attempt], filled


def _key(desk: Desk, hub_part: bytes, parts: bytes, attempt: int) -> bytes:
    return derive_key(hub_part, desk.agreement.digest, parts, attempt.to_bytes(4, "big"))
