"""After the circuit: count the common IDs, then open what was agreed, or nothing.

Run by: hub and members of `protocols.psi.circuit.backend`. W words of bins in all.
"""

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from protocols.errors import RemoteProtocolError
from protocols.psi.circuit.bits import WORD, Words, random_words
from protocols.psi.circuit.hashing import TOKEN_BYTES, open_tokens
from protocols.psi.circuit.meeting import Meeting
from protocols.psi.circuit.messages import ENOUGH, TOO_FEW, VERDICT, Desk, Inbox, Kind
from protocols.psi.interface import IntersectionTooSmallError, Membership, Output
from protocols.psi.result import Opened
from protocols.psi.script import Script, Turn
from protocols.randomness import derive_key, random_permutation

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
    tokens = b"".join(open_tokens([ids[row] for row in rows.tolist()], meeting.key))
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
    tokens = [body[k : k + TOKEN_BYTES] for k in range(0, len(body), TOKEN_BYTES)]
    row_of_token = {token: row for row, token in enumerate(open_tokens(ids, meeting.key))}
    rows = [row_of_token[token] for token in tokens if token in row_of_token]
    if len(rows) != len(tokens) or len(set(rows)) != len(rows) or len(rows) < minimum:
        raise RemoteProtocolError(
            f"{hub} opened {len(tokens)} IDs, of which {len(set(rows))} different ones are among "
            f"those of {desk.me}; the parties agreed on at least {minimum}"
        )
    return Opened(rows=np.array(rows, np.int64))


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
