"""The circuit: equality of 64-bit tags, OR over slots, AND over members.

Run by: hub and members of `apfed_protocols.psi.circuit.backend`, on one chunk of bins. Legend: W
words of bins, K slots, M members. The hub leads: it adds what is public.
"""

from collections.abc import Generator, Mapping, Sequence

import numpy as np

from apfed_protocols.psi.circuit.bits import And, TripleShares, Words
from apfed_protocols.psi.circuit.messages import Desk, Inbox, Kind
from apfed_protocols.psi.script import Turn

__all__ = ["all_members_agree", "any_slot_equals"]


def any_slot_equals(
    desk: Desk,
    planes: Mapping[str, Words],
    triples: Mapping[str, TripleShares],
    *,
    leads: bool,
    gate: type[And],
) -> Generator[Turn, Inbox, Mapping[str, Words]]:
    """Compare with each peer; return shares, shape (W,), of whether a bin holds the same tag.

    Args:
        desk: this party's.
        planes: shares of NOT (hub's tag XOR member's tag) with each peer, (64, K, W): at the
            hub the complement of its tags, at a member its tags.
        triples: shares of 63 K W words with each peer.
        leads: whether this party is the hub.
        gate: computes an AND.

    The 64 bits are halved by AND six times. At most one slot of a bin holds the hub's ID, so
    that XOR is OR.
    """
    for half in (32, 16, 8, 4, 2, 1):
        gates = {
            peer: gate(x[:half], x[half:], triples[peer].take(x[:half].shape), leads=leads)
            for peer, x in planes.items()
        }
        sent = {peer: each.masked() for peer, each in gates.items()}
        inbox = yield desk.turn(
            Kind.MASKED, {peer: words.tobytes() for peer, words in sent.items()}, sent.keys()
        )
        planes = {
            peer: gates[peer].share(words ^ desk.read_words(inbox, peer, Kind.MASKED, words.shape))
            for peer, words in sent.items()
        }
    return {peer: np.bitwise_xor.reduce(x[0], axis=0) for peer, x in planes.items()}


def all_members_agree(
    desk: Desk,
    shares: Words,
    triples: TripleShares,
    *,
    hub: str,
    members: Sequence[str],
    gate: type[And],
) -> Generator[Turn, Inbox, Words]:
    """AND the bits of all members, which all parties share; return shares, shape (W,).

    Args:
        desk: this party's.
        shares: shape (M, W); at a member, zeros but for its own row.
        triples: shares of (M - 1) W words.
        hub: collects the masked shares and sends back what they open.
        members: at the hub only, else empty.
        gate: computes an AND.
    """
    while len(shares) > 1:
        half = len(shares) // 2
        left, right, rest = shares[:half], shares[half : 2 * half], shares[2 * half :]
        each = gate(left, right, triples.take(left.shape), leads=bool(members))
        opened = each.masked()
        if members:
            inbox = yield Turn((), members)
            for member in members:
                opened ^= desk.read_words(inbox, member, Kind.MASKED, opened.shape)
            yield desk.turn(Kind.OPENED, dict.fromkeys(members, opened.tobytes()), ())
        else:
            inbox = yield desk.turn(Kind.MASKED, {hub: opened.tobytes()}, [hub])
            opened = desk.read_words(inbox, hub, Kind.OPENED, opened.shape)
        shares = np.concatenate([each.share(opened), rest])
    bits_W: Words = shares[0]
    return bits_W
