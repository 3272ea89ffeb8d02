"""Repeated private lookups: one side asks, as often as it likes, which IDs the other side has.

Run by: the holder of a set, and an asker with one ID or many, over an authenticated and encrypted
link. Protects from: semi-honest parties (see `psi.ecdh`, whose blinding
this is). The holder blinds its set once a session with its scalar b and publishes b P(y) in a
random order; the asker multiplies these by its own a once. An ID then costs two points on the wire
and three multiplications: a P(x) there, its tag of b a P(x) back.

The asker learns which of its IDs the holder has, and how many IDs the holder has. The holder learns
how many IDs are asked about, and when one comes again within the session; of an ID that it does not
have it learns nothing else. An asker can try guessed IDs; an honest holder limits how often.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.ecdh import (
    POINT_BYTES,
    TAG_BYTES,
    blind_digests,
    check_points,
    digest_ids,
    map_in_threads,
    multiply_points,
    split_points,
)
from apfed_protocols.randomness import fresh_key, random_permutation


def _truncate_points(points: bytes) -> bytes:
    """Return the first 16 bytes of each point, its tag."""
    return np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)[:, :TAG_BYTES].tobytes()


class Holder:
    """The end of who holds a set.

    Args:
        ids: distinct, as the bytes that both parties agreed on.
        session: 32 bytes that both know, of this session alone.

    Attributes:
        order: the own row at each published place.
        published: what the asker gets first.
    """

    def __init__(self, ids: Sequence[bytes], *, session: bytes) -> None:
        """Blind the set once under a fresh scalar, in a random order."""
        self._scalar = fresh_key()
        self.order = random_permutation(len(ids))
        digests = np.frombuffer(digest_ids(ids, session=session), np.uint8)
        shuffled = digests.reshape(-1, POINT_BYTES)[self.order].tobytes()
        self.published = map_in_threads(lambda piece: blind_digests(self._scalar, piece), shuffled)

    def answer(self, question: bytes, *, sender: str, maximum: int) -> bytes:
        """Return a tag for each blinded ID, in the order received.

        `question`: the blinded IDs, joined.

        Raises RemoteProtocolError: more than `maximum` of them, or no blinded IDs.
        """
        if len(question) > maximum * POINT_BYTES:
            raise RemoteProtocolError(
                f"{sender} asked about {len(question) // POINT_BYTES} IDs at once; at most "
                f"{maximum} are answered"
            )
        check_points(sender, question)
        return _truncate_points(
            map_in_threads(lambda piece: multiply_points(self._scalar, piece), question)
        )


class Asker:
    """The end of who asks one holder.

    Args:
        published: what the holder sent first; maximum: IDs that it may have.

    Raises RemoteProtocolError: no set of blinded IDs, or too large a one.
    """

    def __init__(self, published: bytes, *, holder: str, session: bytes, maximum: int) -> None:
        """Prepare private look-ups: blind the published points by a fresh scalar, and index their
        tags.

        `holder`: the party whose points they are. `session`: 32 bytes that identify the session at
        both parties. `maximum`: IDs that the holder may have.
        """
        if len(published) > maximum * POINT_BYTES:
            raise RemoteProtocolError(
                f"{holder} sent {len(published) // POINT_BYTES} blinded IDs, more than the "
                f"{maximum} agreed"
            )
        check_points(holder, published)
        self._holder = holder
        self._session = session
        self._scalar = fresh_key()
        tags = _truncate_points(
            map_in_threads(lambda piece: multiply_points(self._scalar, piece), published)
        )
        self.size = len(published) // POINT_BYTES
        self._place_of = {tag: place for place, tag in enumerate(split_points(tags, TAG_BYTES))}

    def ask(self, ids: Sequence[bytes]) -> bytes:
        """Return what the holder is sent about these distinct IDs."""
        return blind_digests(self._scalar, digest_ids(ids, session=self._session))

    def parse_answer(self, answer: bytes, people: int) -> NDArray[np.int64]:
        """Return the published place of each ID that was asked about; -1: the holder lacks it.

        `people`: how many were asked about.

        Raises RemoteProtocolError: not one tag for each, or two IDs with one.
        """
        tags = split_points(answer, TAG_BYTES) if len(answer) == people * TAG_BYTES else []
        if len(set(tags)) != people:
            raise RemoteProtocolError(
                f"{self._holder} sent {len(answer)} bytes of {len(set(tags))} different tags for "
                f"{people} blinded IDs"
            )
        return np.array([self._place_of.get(tag, -1) for tag in tags], np.int64)
