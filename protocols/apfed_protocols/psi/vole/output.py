"""From values of the field to tags, and where two lists of tags agree.

Run by: hub and members of `apfed_protocols.psi.vole.backend`.
"""

from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.vole.field import ELEMENT_BYTES, Elements, Multiplier, from_bytes
from apfed_protocols.psi.vole.store import DENSE, Digests, Rows, decode, targets_of

__all__ = ["Tags", "hash_elements", "hash_values", "hub_tags", "match", "member_tags"]

_CHUNK = 2**12
_EVALUATED = 2**16
_MATCHED = 2**21

Tags = NDArray[np.uint8]
"""Shape (n, bytes of a tag), 8 to 16."""


def hash_values(values: Elements, key: bytes, length: int) -> Tags:
    """The first bytes of `hash_elements`, shape (n, length)."""
    return np.ascontiguousarray(hash_elements(values, key).view(np.uint8)[:, :length])


def hash_elements(values: Elements, key: bytes) -> Elements:
    """Return E(s(v)) + s(v), where E is AES-256 under `key`; shape (n, 2).

    s adds the upper half of v to the lower one and swaps them. With E an ideal cipher this hash is
    circular correlation robust (Guo, Katz, Wang and Yu, IEEE S&P 2020, section 7.3).
    """
    # blocks are independent of each other on purpose: each is hashed for itself
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
    hashed = np.empty(values.shape, "<u8")
    buffer = np.empty(ELEMENT_BYTES * (_CHUNK + 1), np.uint8).data
    for start in range(0, len(values), _CHUNK):  # what is worked on stays in the cache
        part, shuffled = values[start : start + _CHUNK], hashed[start : start + _CHUNK]
        shuffled[:, 0] = part[:, 1]
        shuffled[:, 1] = part[:, 0] ^ part[:, 1]
        size = cipher.update_into(shuffled.tobytes(), buffer)
        shuffled ^= from_bytes(buffer[:size])
    return hashed


def hub_tags(store: Elements, rows: Rows, key: bytes, length: int) -> Tags:
    """The tag of each of the hub's IDs, out of C; shape (n, length)."""
    tags = np.empty((len(rows), length), np.uint8)
    for start in range(0, len(rows), _EVALUATED):
        chunk = slice(start, start + _EVALUATED)
        tags[chunk] = hash_values(decode(store, rows[chunk]), key, length)
    return tags


def member_tags(
    digests: Digests, store: Elements, delta: Multiplier, key: bytes, length: int,
    *, report: Callable[[int, int], None],
) -> Tags:  # fmt: skip
    """The tag of each of a member's IDs, out of K and Delta; shape (n, length).

    `report` is told how many IDs are done, and how many there are.
    """
    count, cells = len(digests), len(store) - DENSE
    tags = np.empty((count, length), np.uint8)
    for start in range(0, count, _EVALUATED):
        part = digests[start : start + _EVALUATED]
        values = decode(store, Rows.of(part, cells)) ^ delta.times(targets_of(part))
        tags[start : start + len(part)] = hash_values(values, key, length)
        report(start + len(part), count)
    return tags


def match(own: Tags, theirs: Tags, *, sender: str) -> NDArray[np.int64]:
    """Return where each own tag is among those of `sender`, -1 for nowhere; shape (n,).

    Raises:
        RemoteProtocolError: `sender` sent one tag twice.
    """
    place = np.full(len(own), -1, np.int64)
    parts = 1 + (len(own) + len(theirs)) // _MATCHED
    for part in range(parts):  # equal tags are in the same part, whose sorting takes little memory
        of_own, of_theirs = _in_part(own, part, parts), _in_part(theirs, part, parts)
        found = _match(own.take(of_own, axis=0), theirs.take(of_theirs, axis=0), sender)
        place[of_own] = np.append(of_theirs, -1)[found]
    return place


def _in_part(tags: Tags, part: int, parts: int) -> NDArray[np.int64]:
    """Which of the tags are in this part, by their first two bytes."""
    if parts == 1:
        return np.arange(len(tags))
    first = tags[:, 0].astype(np.uint16) << np.uint16(8) | tags[:, 1]
    return np.flatnonzero(first % np.uint16(parts) == part)


def _match(own: Tags, theirs: Tags, sender: str) -> NDArray[np.int64]:
    words = from_bytes(_padded(own) + _padded(theirs))
    order = np.argsort(words[:, 0], kind="stable")
    same = words[order[1:], 0] == words[order[:-1], 0]
    if (same[1:] & same[:-1]).any():  # three that begin alike: look at the rest of them, too
        order = np.lexsort((words[:, 1], words[:, 0]))
        same = words[order[1:], 0] == words[order[:-1], 0]
    first, second = order[:-1][same], order[1:][same]
    equal = words[first, 1] == words[second, 1]
    low, high = np.minimum(first, second)[equal], np.maximum(first, second)[equal]
    if (low >= len(own)).any():
        raise RemoteProtocolError(
            f"{sender} sent a tag twice; its set has duplicates, or it does not follow the protocol"
        )
    place = np.full(len(own), -1, np.int64)
    across = high >= len(own)  # two own IDs may have one tag, too
    place[low[across]] = high[across] - len(own)
    return place


def _padded(tags: Tags) -> bytes:
    wide = np.zeros((len(tags), ELEMENT_BYTES), np.uint8)
    wide[:, : tags.shape[1]] = tags
    return wide.tobytes()
