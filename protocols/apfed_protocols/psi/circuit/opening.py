"""After the circuit: count the common IDs, then open what was agreed, or nothing.

Run by: hub and members of `apfed_protocols.psi.circuit.backend`. W words of bins in all.
"""

import math
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.circuit.bits import WORD, Words, random_words
from apfed_protocols.psi.circuit.hashing import TOKEN_BYTES
from apfed_protocols.psi.circuit.meeting import Meeting, Rows
from apfed_protocols.psi.circuit.messages import ENOUGH, TOO_FEW, VERDICT, Desk, Inbox, Kind
from apfed_protocols.psi.interface import IntersectionTooSmallError, Membership, Output
from apfed_protocols.psi.result import Opened
from apfed_protocols.psi.script import Script, Turn
from apfed_protocols.psi.vole.output import match
from apfed_protocols.randomness import derive_key, random_permutation

__all__ = ["open_at_hub", "open_at_member"]


def open_at_hub(
    desk: Desk,
    members: Sequence[str],
    meeting: Meeting,
    ids: Sequence[bytes],
    share: Words,
) -> Script:
    """The hub's side; `share` has shape (W,)."""
    row_of_bin = meeting.row_of_bin
    size = yield from _common(desk, meeting, len(ids), share)
    if size is None:
        return IntersectionTooSmallError.of(desk.me, desk.agreement.minimum_rows)
    if desk.agreement.output is Output.SIZE:
        return Opened(size=size)
    if desk.agreement.output is Output.SHARED:
        return Opened(membership=Membership(shares=_bits(share), row_of_place=row_of_bin))
    inbox = yield Turn((), members)
    for member in members:
        share = share ^ desk.read_words(inbox, member, Kind.SHARE, share.shape)
    found = row_of_bin[_bits(share)]
    if (found < 0).any():
        raise RemoteProtocolError(
            f"{', '.join(members)} opened bins in which {desk.me} has no ID; a share is wrong"
        )
    rows = found[random_permutation(len(found))]
    if desk.agreement.output is Output.HUB_ROWS:
        return Opened(rows=rows)
    tokens = meeting.tokens[rows].tobytes()
    yield desk.turn(Kind.TOKENS, dict.fromkeys(members, tokens), ())
    return Opened(rows=rows)


def open_at_member(
    desk: Desk, hub: str, meeting: Meeting, ids: Sequence[bytes], share: Words
) -> Script:
    """A member's side; `share` has shape (W,)."""
    minimum = desk.agreement.minimum_rows
    size = yield from _common(desk, meeting, len(ids), share)
    if size is None:
        return IntersectionTooSmallError.of(desk.me, minimum)
    if desk.agreement.output is Output.SIZE:
        return Opened(size=size)
    if desk.agreement.output is Output.SHARED:
        return Opened(membership=Membership(shares=_bits(share)))
    if desk.agreement.output is Output.HUB_ROWS:
        yield desk.turn(Kind.SHARE, {hub: share.tobytes()}, ())
        return Opened()
    inbox = yield desk.turn(Kind.SHARE, {hub: share.tobytes()}, [hub])
    body = desk.read(inbox, hub, Kind.TOKENS)
    return Opened(rows=_rows_of(desk, hub, meeting, body))


def _rows_of(desk: Desk, hub: str, meeting: Meeting, body: bytes) -> Rows:
    """The row of each ID that the hub opened."""
    whole = len(body) // TOKEN_BYTES
    tokens = np.frombuffer(body[: whole * TOKEN_BYTES], np.uint8).reshape(whole, TOKEN_BYTES)
    place = match(meeting.tokens, tokens, sender=hub)
    found = np.flatnonzero(place >= 0)
    minimum = desk.agreement.minimum_rows
    if len(found) != whole or len(body) % TOKEN_BYTES or whole < minimum:
        raise RemoteProtocolError(
            f"{hub} opened {math.ceil(len(body) / TOKEN_BYTES)} IDs, of which {len(found)} "
            f"different ones are among those of {desk.me}; the parties agreed on at least {minimum}"
        )
    return found[np.argsort(place[found])]


def _common(
    desk: Desk, meeting: Meeting, own_size: int, share: Words
) -> Generator[Turn, Inbox, int | None]:
    """Let the dealer count the bits; return what it says, None if below the minimum.

    It says the number only where this is the output, else -1.

    The dealer knows the triples, from which it could work out what a share was made of, so
    every member's share is masked with a seed that it has in common with the hub. It does
    not know the order of the bins either: it learns the number of common IDs only.
    """
    bits = _bits(share)
    keys = random_words(derive_key(meeting.key, b"order"), b"order", len(bits))
    body = np.packbits(bits[np.argsort(keys, kind="stable")], bitorder="little").view(WORD)
    for seed in meeting.masks:
        body = body ^ random_words(seed, b"count", len(body))
    dealer = desk.agreement.dealer
    inbox = yield desk.turn(Kind.COUNT, {dealer: body.tobytes()}, [dealer])
    (size,) = VERDICT.unpack(desk.read(inbox, dealer, Kind.VERDICT, VERDICT.size))
    if size == TOO_FEW and desk.agreement.minimum_rows:
        return None
    counted = desk.agreement.output is Output.SIZE
    if size < desk.agreement.minimum_rows if counted else size != ENOUGH:
        raise RemoteProtocolError(f"{dealer} announces {size} common IDs, which was not agreed")
    if size > own_size:
        raise RemoteProtocolError(
            f"{dealer} announces {size} common IDs, {desk.me} has only {own_size}"
        )
    return int(size)


def _bits(words: Words) -> NDArray[np.bool_]:
    return np.unpackbits(words.astype(WORD).view(np.uint8), bitorder="little").astype(np.bool_)
