"""Sets of IDs in buckets: as many for all parties, filled up to sizes that all know.

Run by: each party on its own IDs, before an intersection and between its buckets. Equal IDs fall
into equal buckets, so that each bucket can be intersected alone, in the memory that one bucket
takes. The bucket of an ID is its digest under a key that the parties draw together in the session:
nobody can choose IDs that fill one bucket.

How many IDs of a set fall into a bucket would reveal something about the set, so every list is
filled up with random digests, which no other party has, to a number that follows from the size of
the set and the number of buckets alone (`compute_capacity`).
"""

import hashlib
import math
import os
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.ids import SizedIds, encode_pieces
from apfed_protocols.psi.interface import digest_each
from apfed_protocols.randomness import keystream
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.errors import DataError
from secure_apfed.settings.alignment import AlignmentSettings

Rows = NDArray[np.int64]

BUCKET_IDS = 2**20
"""Sets up to this size are one bucket."""

DIGEST_BYTES = 32
_OVERFLOW_BITS = 40  # a bucket overflows with probability at most 2^-40
_RECORD = np.dtype([("row", "<u4"), ("digest", f"V{DIGEST_BYTES}")])
_ROWS_SHOWN = 5
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def choose_bucket_count(largest: int) -> int:
    """Return how many buckets all parties use for a largest set of this size: a power of two."""
    return 1 << max(0, math.ceil(largest / BUCKET_IDS) - 1).bit_length()


def compute_capacity(size: int, buckets: int) -> int:
    """Return how many entries each bucket of a set of this size has; all parties can compute it.

    One of n keyed digests falls into a given one of B buckets with probability p = 1 / B. By
    Chernoff's bound more than c of them do with probability at most exp(-n KL(c / n, p)), where KL
    is the divergence of two coins; c is the smallest for which B times that is below 2^-40.
    """
    if buckets == 1 or size == 0:
        return size
    required_exponent = math.log(buckets) + _OVERFLOW_BITS * math.log(2)

    def is_rare(count: int) -> bool:
        """Return whether more than `count` IDs in one bucket are improbable enough."""
        share = count / size
        expected = 1 / buckets
        rest = (1 - share) * math.log((1 - share) / (1 - expected)) if share < 1 else 0.0
        return size * (share * math.log(share / expected) + rest) >= required_exponent

    # The search begins at the mean, rounded up; more than all IDs are never in a bucket.
    mean_count = -(-size // buckets)
    return bisect_left(range(size), True, lo=mean_count, key=is_rare)


def fingerprint_ids(
    me: str,
    ids: SizedIds,
    settings: AlignmentSettings,
    key: bytes,
    count_work: Callable[[int], None] = lambda ids: None,
) -> bytes:
    """Return a digest, 32 bytes, of a party's IDs in their order.

    Args:
        me: the party's name, for errors.
        ids: one a row.
        settings: how they are normalised.
        key: key of the digest, 32 bytes.
        count_work: called with the number of IDs that were digested, block by block.
    """
    combined_hash = _make_hasher(key)
    for piece in encode_pieces(me, ids, make_id_rules(settings)):
        combined_hash.update(_hash_ids(piece, key))
        count_work(len(piece))
    return combined_hash.digest()


class BucketedIds:
    """A party's IDs as keyed digests, divided into buckets by digest and read bucket by bucket.

    Args:
        me: the party's name, for errors.
        ids: one a row.
        settings: how they are normalised.
        key: 32 random bytes to which all parties contributed.
        buckets: the agreed number of buckets.
        secret: 32 bytes of this party alone, from which the padding of the buckets is derived.
        folder: where the digests are stored, readable only for the owner; None: in memory.
        count_work: called with the number of IDs that were digested, block by block.

    Attributes:
        size: number of IDs.
        capacity: entries of each bucket, padding included.
        fingerprint: the digest of all IDs that `fingerprint_ids` returns.
    """

    def __init__(
        self,
        me: str,
        ids: SizedIds,
        settings: AlignmentSettings,
        *,
        key: bytes,
        buckets: int,
        secret: bytes,
        folder: Path | None = None,
        count_work: Callable[[int], None] = lambda ids: None,
    ) -> None:
        """Read and digest all IDs, distribute them to buckets, and refuse repeated ones.

        Raises DataError: IDs are repeated, or more than the settings allow.
        """
        self._me = me
        self._secret = secret
        self._buckets = buckets
        self.size = len(ids)
        if self.size > settings.maximum_ids:
            raise DataError(
                f"{me} has {self.size} IDs, the parties agreed on at most {settings.maximum_ids}"
            )
        self.capacity = compute_capacity(self.size, buckets)
        self._folder = folder
        self._parts_by_bucket: dict[int, list[NDArray[np.void]]] = {}
        self.fingerprint = self._fill_buckets(ids, settings, key, count_work)
        self._check_buckets()

    def _fill_buckets(
        self,
        ids: SizedIds,
        settings: AlignmentSettings,
        key: bytes,
        count_work: Callable[[int], None],
    ) -> bytes:
        """Write each ID's digest and row into its bucket; return the digest of all IDs.

        A bucket is chosen by the first 4 bytes of an ID's digest.

        `key`: key of the digests. `count_work`: called with the number of IDs that were digested.
        """
        combined_hash = _make_hasher(key)
        first = 0
        self.clear()
        with ExitStack() as closing:
            files = [
                closing.enter_context(
                    os.fdopen(os.open(self._bucket_path(bucket), _NEW, 0o600), "wb")
                )
                for bucket in (range(self._buckets) if self._folder is not None else ())
            ]
            for piece in encode_pieces(self._me, ids, make_id_rules(settings)):
                digests = _hash_ids(piece, key)
                combined_hash.update(digests)
                records = np.empty(len(piece), _RECORD)
                records["row"] = np.arange(first, first + len(piece))
                records["digest"] = np.frombuffer(digests, f"V{DIGEST_BYTES}")
                first_words = np.frombuffer(digests, "<u4")[:: DIGEST_BYTES // 4]
                bucket_N = first_words & np.uint32(self._buckets - 1)
                ends = np.cumsum(np.bincount(bucket_N, minlength=self._buckets))
                parts = np.split(records[np.argsort(bucket_N, kind="stable")], ends[:-1])
                for bucket, part in enumerate(parts):
                    if files:
                        files[bucket].write(part.tobytes())
                    else:
                        self._parts_by_bucket[bucket].append(part)
                first += len(piece)
                count_work(len(piece))
        if first != self.size:
            raise DataError(
                f"{self._me} had {self.size} IDs, and {first} rows were read; something changed "
                "them meanwhile"
            )
        return combined_hash.digest()

    def _check_buckets(self) -> None:
        """Refuse repeated IDs, and a bucket above its capacity. Raises DataError,
        LocalProtocolError.
        """
        for bucket in range(self._buckets):
            records = self._load_records(bucket)
            if len(records) > self.capacity:
                raise LocalProtocolError(
                    f"{self._me}: {len(records)} IDs fell into bucket {bucket}, which has room for "
                    f"{self.capacity}; start all parties again, so that they draw another key"
                )
            # Most digests differ in their first 8 bytes already.
            starts = np.sort(
                np.frombuffer(records["digest"].tobytes(), "<u8")[:: DIGEST_BYTES // 8]
            )
            if (starts[1:] == starts[:-1]).any():
                self._refuse_repeats(records)

    def _refuse_repeats(self, records: NDArray[np.void]) -> None:
        """Raise DataError if two IDs of a bucket are equal; name their rows.

        `records`: digest and row of each ID.
        """
        first_rows: dict[bytes, int] = {}
        pairs = list[tuple[int, int]]()
        for digest, row in zip(records["digest"].tolist(), records["row"].tolist(), strict=True):
            first_row = first_rows.setdefault(digest, row)
            if first_row != row:
                pairs.append((row, first_row))
        if pairs:
            repeats = ", ".join(f"{row} (as {first_row})" for row, first_row in pairs[:_ROWS_SHOWN])
            raise DataError(
                f"{self._me} has repeated ID(s), in row(s) {repeats}"
                f"{', ...' if len(pairs) > _ROWS_SHOWN else ''} (after normalisation); keep one "
                "row for each ID"
            )

    def load_bucket(self, bucket: int) -> tuple[list[bytes], Rows]:
        """Return the entries of a bucket and the row of each; -1 for padding.

        Both have `capacity` entries, and are the same at every call.
        """
        records = self._load_records(bucket)
        missing = self.capacity - len(records)
        padding = keystream(
            self._secret, b"filling", bucket.to_bytes(4, "big"), length=DIGEST_BYTES * missing
        )
        entries = records["digest"].tobytes() + padding
        rows = np.concatenate([records["row"].astype(np.int64), np.full(missing, -1, np.int64)])
        listed: list[bytes] = np.frombuffer(entries, f"V{DIGEST_BYTES}").tolist()
        return listed, rows

    def clear(self) -> None:
        """Delete all buckets."""
        self._parts_by_bucket = {bucket: [] for bucket in range(self._buckets)}
        if self._folder is not None:
            for file in self._folder.glob("ids-*.bin"):
                file.unlink()

    def _load_records(self, bucket: int) -> NDArray[np.void]:
        """Return the rows and digests of one bucket, from memory or its file."""
        if self._folder is not None:
            return np.fromfile(self._bucket_path(bucket), _RECORD)
        return np.concatenate([np.empty(0, _RECORD), *self._parts_by_bucket[bucket]])

    def _bucket_path(self, bucket: int) -> Path:
        assert self._folder is not None
        return self._folder / f"ids-{bucket}.bin"


def _make_hasher(key: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"apfed all ids")


def _hash_ids(ids: list[bytes], key: bytes) -> bytes:
    """Return the BLAKE2b (RFC 7693) of each ID under `key`, one after the other."""
    hasher = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"apfed bucketed")
    return digest_each(ids, hasher).tobytes()
