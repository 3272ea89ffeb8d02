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

IDS_PER_BUCKET = 2**20
"""Sets up to this size are one bucket."""

DIGEST_BYTES = 32
_OVERFLOW_BITS = 40  # a bucket overflows with probability at most 2^-40
_RECORD_TYPE = np.dtype([("row", "<u4"), ("digest", f"V{DIGEST_BYTES}")])
_MAX_ROWS_SHOWN = 5
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def choose_bucket_count(max_id_count: int) -> int:
    """Return into how many buckets all parties divide their IDs: a power of two.

    It is the smallest one with which a bucket has about `IDS_PER_BUCKET` IDs (2^20) at most.

    `max_id_count`: size of the largest set of all parties.
    """
    min_bucket_count = math.ceil(max_id_count / IDS_PER_BUCKET)
    return 1 << max(0, min_bucket_count - 1).bit_length()


def compute_capacity(id_count: int, bucket_count: int) -> int:
    """Return how many entries each bucket has, padding included, for a set of n = `id_count` IDs.

    The true number of IDs in a bucket would reveal something about the set, so every bucket is
    padded to this capacity. Any bucket overflows with probability at most 2^-40. The capacity
    follows from public numbers, so all parties can compute it.

    The keyed digest of an ID falls into a given one of the B = `bucket_count` buckets with
    probability p = 1 / B. By Chernoff's bound more than c of the n digests do with probability at
    most exp(-n KL(c / n, p)), where KL is the divergence of two Bernoulli distributions. The
    capacity is the smallest c for which B exp(-n KL(c / n, p)) is at most 2^-40.
    """
    if bucket_count == 1 or id_count == 0:
        return id_count  # the whole set, whose size is public, needs no padding
    required_exponent = math.log(bucket_count) + _OVERFLOW_BITS * math.log(2)

    def is_rare(count: int) -> bool:
        """Return whether some bucket gets more than `count` IDs with probability <= 2^-40."""
        share = count / id_count
        expected = 1 / bucket_count
        divergence = share * math.log(share / expected)
        if share < 1:
            divergence += (1 - share) * math.log((1 - share) / (1 - expected))
        return id_count * divergence >= required_exponent

    # The search begins at the mean, rounded up, and ends at `size`: no bucket has more.
    mean_count = -(-id_count // bucket_count)
    return bisect_left(range(id_count), True, lo=mean_count, key=is_rare)


def fingerprint_ids(
    me: str,
    ids: SizedIds,
    settings: AlignmentSettings,
    key: bytes,
    count_work: Callable[[int], None] = lambda ids: None,
) -> bytes:
    """Return one digest, 32 bytes, of all IDs of a party in their order.

    A party compares it with an earlier one, to notice that its IDs have changed since an
    intersection was interrupted.

    Args:
        me: the party's name, for errors.
        ids: the IDs, one for each row.
        settings: the agreed settings, which say how IDs are normalised.
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

    Equal IDs of different parties fall into equal buckets, so that each bucket can be intersected
    alone, with less memory.

    Args:
        me: the party's name, for errors.
        ids: the IDs, one for each row.
        settings: how IDs are normalised.
        key: 32 random bytes to which all parties contributed.
        buckets: the agreed number of buckets.
        secret: 32 bytes of this party alone, from which the padding of the buckets is derived.
        folder: where the digests are stored, readable only for the owner; None: in memory.
        count_work: called with the number of IDs that were digested, block by block.

    Attributes:
        id_count: number of IDs.
        bucket_capacity: entries of each bucket, padding included.
        fingerprint: the digest of all IDs that `fingerprint_ids` returns.
    """

    def __init__(
        self,
        me: str,
        ids: SizedIds,
        settings: AlignmentSettings,
        *,
        key: bytes,
        bucket_count: int,
        padding_secret: bytes,
        folder: Path | None = None,
        count_work: Callable[[int], None] = lambda ids: None,
    ) -> None:
        """Read and digest all IDs, and distribute them to buckets; see the class for the arguments.

        Raises:
            DataError: IDs are repeated, or more than the settings allow.
            LocalProtocolError: a bucket overflows, which is very improbable.
        """
        self._me = me
        self._padding_secret = padding_secret
        self._bucket_count = bucket_count
        self.id_count = len(ids)
        if self.id_count > settings.maximum_ids:
            raise DataError(
                f"{me} has {self.id_count} IDs, the parties agreed on at most "
                f"{settings.maximum_ids}"
            )
        self.bucket_capacity = compute_capacity(self.id_count, bucket_count)
        self._folder = folder
        # Without a folder: for each bucket the records (row and digest) of its IDs, in one array
        # for each block of IDs that was read.
        self._record_blocks_by_bucket: dict[int, list[NDArray[np.void]]] = {}
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

        `key`: key of the digests. `count_work`: called with the number of IDs that were digested.

        Raises DataError: the number of IDs has changed since they were counted.
        """
        combined_hash = _make_hasher(key)
        rows_read = 0
        self.clear()
        with ExitStack() as stack:
            bucket_files = []  # empty: records stay in memory
            if self._folder is not None:
                for bucket in range(self._bucket_count):
                    descriptor = os.open(self._bucket_path(bucket), _CREATE_FLAGS, 0o600)
                    bucket_files.append(stack.enter_context(os.fdopen(descriptor, "wb")))
            for encoded_ids in encode_pieces(self._me, ids, make_id_rules(settings)):
                digests = _hash_ids(encoded_ids, key)
                combined_hash.update(digests)
                records_by_bucket = self._split_by_bucket(digests, rows_read)
                for bucket, records in enumerate(records_by_bucket):
                    if bucket_files:
                        bucket_files[bucket].write(records.tobytes())
                    else:
                        self._record_blocks_by_bucket[bucket].append(records)
                rows_read += len(encoded_ids)
                count_work(len(encoded_ids))
        if rows_read != self.id_count:
            raise DataError(
                f"{self._me} had {self.id_count} IDs, and {rows_read} rows were read; something "
                "changed them meanwhile"
            )
        return combined_hash.digest()

    def _split_by_bucket(self, digests: bytes, first_row: int) -> list[NDArray[np.void]]:
        """Return one array for each bucket, with row and digest of each ID that falls into it.

        The bucket's number is the first 4 bytes of the digest modulo the number of buckets, which
        is a power of two.

        `digests`: digests of N IDs, one after another. `first_row`: the row of the first ID; the
        others follow.
        """
        id_count = len(digests) // DIGEST_BYTES
        records = np.empty(id_count, _RECORD_TYPE)
        records["row"] = np.arange(first_row, first_row + id_count)
        records["digest"] = np.frombuffer(digests, f"V{DIGEST_BYTES}")
        first_words = np.frombuffer(digests, "<u4")[:: DIGEST_BYTES // 4]
        bucket_N = first_words & np.uint32(self._bucket_count - 1)
        end_by_bucket = np.cumsum(np.bincount(bucket_N, minlength=self._bucket_count))
        return np.split(records[np.argsort(bucket_N, kind="stable")], end_by_bucket[:-1])

    def _check_buckets(self) -> None:
        """Check all buckets once they are filled.

        Raises:
            DataError: an ID is repeated.
            LocalProtocolError: a bucket has more IDs than its capacity.
        """
        for bucket in range(self._bucket_count):
            records = self._load_records(bucket)
            if len(records) > self.bucket_capacity:
                raise LocalProtocolError(
                    f"{self._me}: {len(records)} IDs fell into bucket {bucket}, which has room for "
                    f"{self.bucket_capacity}; start all parties again, so that they draw another "
                    "key"
                )
            # If the first 8 bytes of all digests differ, no ID is repeated. Whole digests, which
            # are slower, are compared only if two starts are equal.
            digest_starts = np.sort(
                np.frombuffer(records["digest"].tobytes(), "<u8")[:: DIGEST_BYTES // 8]
            )
            if (digest_starts[1:] == digest_starts[:-1]).any():
                self._refuse_repeats(records)

    def _refuse_repeats(self, records: NDArray[np.void]) -> None:
        """Raise DataError if two IDs of a bucket are equal; the error names some of their rows.

        `records`: row and digest of each ID in the bucket.
        """
        first_row_by_digest: dict[bytes, int] = {}
        repeated_and_first_rows = list[
            tuple[int, int]
        ]()  # the row of a repeated ID, and its first row
        for digest, row in zip(records["digest"].tolist(), records["row"].tolist(), strict=True):
            first_row = first_row_by_digest.setdefault(digest, row)
            if first_row != row:
                repeated_and_first_rows.append((row, first_row))
        if repeated_and_first_rows:
            repeats = ", ".join(
                f"{row} (as {first_row})"
                for row, first_row in repeated_and_first_rows[:_MAX_ROWS_SHOWN]
            )
            raise DataError(
                f"{self._me} has repeated ID(s), in row(s) {repeats}"
                f"{', ...' if len(repeated_and_first_rows) > _MAX_ROWS_SHOWN else ''} (after "
                "normalisation); keep one row for each ID"
            )

    def load_bucket(self, bucket: int) -> tuple[list[bytes], Rows]:
        """Return a bucket's entries (digests of 32 bytes), and the party's row of each entry.

        Both have `bucket_capacity` entries; the last ones are padding, with row -1. Padding is
        derived from a secret, so that it is the same at every call: a repeated run of the protocol
        must reveal no more than the first.
        """
        records = self._load_records(bucket)
        padding_count = self.bucket_capacity - len(records)
        padding = keystream(
            self._padding_secret,
            b"filling",
            bucket.to_bytes(4, "big"),
            length=DIGEST_BYTES * padding_count,
        )
        entries = records["digest"].tobytes() + padding
        rows = np.concatenate(
            [records["row"].astype(np.int64), np.full(padding_count, -1, np.int64)]
        )
        digests: list[bytes] = np.frombuffer(entries, f"V{DIGEST_BYTES}").tolist()
        return digests, rows

    def clear(self) -> None:
        """Delete the content of all buckets, in memory and on the disk."""
        self._record_blocks_by_bucket = {bucket: [] for bucket in range(self._bucket_count)}
        if self._folder is not None:
            for file in self._folder.glob("ids-*.bin"):
                file.unlink()

    def _load_records(self, bucket: int) -> NDArray[np.void]:
        """Return the row and digest of each ID in a bucket, from memory or from its file."""
        if self._folder is not None:
            return np.fromfile(self._bucket_path(bucket), _RECORD_TYPE)
        return np.concatenate([np.empty(0, _RECORD_TYPE), *self._record_blocks_by_bucket[bucket]])

    def _bucket_path(self, bucket: int) -> Path:
        """Return the path of a bucket's file; only called if there is a folder."""
        assert self._folder is not None
        return self._folder / f"ids-{bucket}.bin"


def _make_hasher(key: bytes) -> "hashlib.blake2b":
    """Return a new keyed BLAKE2b hash object, for one digest over all IDs of a party."""
    return hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"apfed all ids")


def _hash_ids(ids: list[bytes], key: bytes) -> bytes:
    """Return the keyed BLAKE2b digests (RFC 7693) of these IDs, one after the other."""
    hasher = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"apfed bucketed")
    return digest_each(ids, hasher).tobytes()
