"""Repeated private lookups: an asker finds out, many times, which of its IDs a holder has.

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
    """Return the tag of each point (a doubly blinded ID), its first 16 bytes, joined."""
    return np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)[:, :TAG_BYTES].tobytes()


class Holder:
    """The role of the party that holds a set of IDs.

    Args:
        ids: distinct, encoded in the way that both parties agreed on.
        session: 32 bytes that both parties know, used for this session only.

    Attributes:
        published_rows: the holder's own row at each position of the published list.
        blinded_ids: the blinded IDs, which are sent to the asker first.
    """

    def __init__(self, ids: Sequence[bytes], *, session: bytes) -> None:
        """Blind the distinct, encoded IDs: hash each ID to a curve point and multiply it by a fresh
        secret scalar. The list of blinded IDs, `blinded_ids`, is in the random order
        `published_rows`.

        `session`: 32 bytes that both parties know, used once; they key the hash.
        """
        self._scalar = fresh_key()
        self.published_rows = random_permutation(len(ids))
        digests = np.frombuffer(digest_ids(ids, session=session), np.uint8)
        shuffled = digests.reshape(-1, POINT_BYTES)[self.published_rows].tobytes()
        self.blinded_ids = map_in_threads(
            lambda chunk: blind_digests(self._scalar, chunk), shuffled
        )

    def answer(self, request: bytes, *, sender: str, max_ids: int) -> bytes:
        """Blind the asker's blinded IDs once more, by this holder's scalar; return the first 16
        bytes of each (its tag), in the order received.

        Args:
            request: the asker's blinded IDs (curve points), joined.
            sender: the asker, for errors.
            max_ids: how many IDs may be asked about at once.

        Raises RemoteProtocolError: the question has more IDs than `max_ids`, or is no list of
        blinded IDs.
        """
        if len(request) > max_ids * POINT_BYTES:
            raise RemoteProtocolError(
                f"{sender} asked about {len(request) // POINT_BYTES} IDs at once; at most "
                f"{max_ids} are answered"
            )
        check_points(sender, request)
        products = map_in_threads(lambda chunk: multiply_points(self._scalar, chunk), request)
        return _truncate_points(products)


class Asker:
    """The role of the party that asks one holder.

    Args:
        blinded_ids: the holder's blinded IDs, which it sent first.
        holder: name of the holder, for errors.
        session: 32 bytes that both parties know, used for this session only.
        max_ids: how many IDs the holder may have.

    Attributes:
        holder_size: the number of IDs that the holder has.

    Raises RemoteProtocolError: `blinded_ids` is no list of blinded IDs, or too long.
    """

    def __init__(self, blinded_ids: bytes, *, holder: str, session: bytes, max_ids: int) -> None:
        """Blind the holder's blinded IDs once more, by a fresh secret scalar, and index the results
        by their first 16 bytes (tags): an ID that both have will get the same tag.

        Raises RemoteProtocolError: the list is too long, or not of valid points.
        """
        if len(blinded_ids) > max_ids * POINT_BYTES:
            raise RemoteProtocolError(
                f"{holder} sent {len(blinded_ids) // POINT_BYTES} blinded IDs, more than the "
                f"{max_ids} agreed"
            )
        check_points(holder, blinded_ids)
        self._holder = holder
        self._session = session
        self._scalar = fresh_key()
        products = map_in_threads(lambda chunk: multiply_points(self._scalar, chunk), blinded_ids)
        tags = split_points(_truncate_points(products), TAG_BYTES)
        self.holder_size = len(blinded_ids) // POINT_BYTES
        self._position_by_tag = {tag: position for position, tag in enumerate(tags)}

    def ask(self, ids: Sequence[bytes]) -> bytes:
        """Return the question to the holder about these distinct IDs: the IDs hashed to a curve and
        blinded by this party's scalar.
        """
        return blind_digests(self._scalar, digest_ids(ids, session=self._session))

    def parse_answer(self, answer: bytes, id_count: int) -> NDArray[np.int64]:
        """Return the position in the holder's published list of each ID that was asked about, in
        the order of the question; -1 for an ID that the holder lacks.

        `answer`: the holder's tags, 16 bytes for each ID, joined. `id_count`: how many IDs were
        asked about.

        Raises RemoteProtocolError: the bytes are not one different tag for each ID.
        """
        has_expected_length = len(answer) == id_count * TAG_BYTES
        tags = split_points(answer, TAG_BYTES) if has_expected_length else []
        if len(set(tags)) != id_count:
            raise RemoteProtocolError(
                f"{self._holder} sent {len(answer)} bytes of {len(set(tags))} different tags for "
                f"{id_count} blinded IDs"
            )
        return np.array([self._position_by_tag.get(tag, -1) for tag in tags], np.int64)
