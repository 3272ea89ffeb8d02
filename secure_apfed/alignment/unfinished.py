"""An intersection under way: what was agreed, and the buckets that are done.

Kept by: each party for itself, in a folder of its own, so that an intersection that was broken off
goes on with the bucket in which it was. What is sent again then is bit for bit what was sent
before: keys and orders follow from a secret that is kept, and a peer is answered nothing but for
the very list that came the first time (`Unfinished.require_same`). So two attempts together teach
what one does, whoever broke off; with fresh keys, or for other lists, each would be an
intersection more. The folder holds digests of IDs and a secret, and is its owner's alone.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import derive_key, fresh_key
from secure_apfed.errors import CheckpointError
from secure_apfed.folder_files import read_bytes
from secure_apfed.regular_file import write_atomically

__all__ = ["NONCE_BYTES", "Agreed", "Unfinished"]

NONCE_BYTES = 32
_VERSION = 1
_AGREED, _SECRET = "agreed.msgpack", "secret.bin"
_RESULT_BYTES = 2**36
_SMALL_BYTES = 2**20


@dataclass(frozen=True)
class Agreed:
    """What the parties of an intersection drew together; public among them.

    Attributes:
        session: in which they did; terms: digest of roles and settings.
        buckets: how many there are.
        nonces: 32 bytes of each party, by name, the hub first.
    """

    session: str
    terms: bytes
    buckets: int
    nonces: Mapping[str, bytes]

    @property
    def _seed(self) -> bytes:
        parts = [self.session.encode(), self.terms, self.buckets.to_bytes(4, "big")]
        for name, nonce in self.nonces.items():
            parts += [name.encode(), nonce]
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.sha256(b"secure-apfed buckets v1" + framed).digest()

    @property
    def identity(self) -> bytes:
        """32 bytes that name this intersection."""
        return derive_key(self._seed, b"identity")

    @property
    def key(self) -> bytes:
        """Under which IDs are digested: nobody knew it before the session."""
        return derive_key(self._seed, b"digests")


@dataclass
class Unfinished:
    """One party's record of an intersection.

    Args:
        folder: of this intersection alone; None: it is kept in memory, and ends with the process.

    Attributes:
        agreed: None before the parties agreed.
        fingerprint: of the own IDs, under the agreed key.
        secret: 32 bytes from which the keys and orders of all buckets follow.
    """

    folder: Path | None
    agreed: Agreed | None = None
    fingerprint: bytes = field(default=b"", repr=False)
    secret: bytes = field(default_factory=fresh_key, repr=False)
    _results: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    _seen: dict[tuple[int, str], bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def found(cls, folder: Path | None, terms: bytes) -> "Unfinished":
        """The one in this folder, where it is of these terms; else a new one.

        Raises:
            CheckpointError: what lies there cannot be read.
        """
        if folder is None or not (folder / _AGREED).exists():
            return cls(folder)
        path = folder / _AGREED
        try:
            version, session, known, buckets, nonces, own = msgpack.unpackb(
                read_bytes(path, most=_SMALL_BYTES)
            )
            agreed = Agreed(session, known, buckets, dict(nonces))
            secret = read_bytes(folder / _SECRET, most=_SMALL_BYTES)
            if version != _VERSION or len(secret) != len(fresh_key()):
                raise ValueError("another version")
            _ = agreed.identity
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise CheckpointError(
                f"{path} is no record of an intersection; remove its folder, then all parties "
                "intersect anew"
            ) from error
        return cls(folder, agreed, own, secret) if known == terms else cls(folder)

    def begin(self, agreed: Agreed) -> None:
        """Forget what was there, and keep what is agreed now."""
        self.forget()
        self.agreed, self.secret, self.fingerprint = agreed, fresh_key(), b""
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            self._write(_SECRET, self.secret)

    def has_ids(self, fingerprint: bytes) -> None:
        """Note which IDs it is of; from here on it can be gone on with."""
        assert self.agreed is not None
        self.fingerprint = fingerprint
        one = self.agreed
        nonces = list(one.nonces.items())
        self._write(
            _AGREED,
            msgpack.packb([_VERSION, one.session, one.terms, one.buckets, nonces, fingerprint]),
        )

    @property
    def finished(self) -> int:
        """How many buckets are done, from the first on."""
        assert self.agreed is not None
        done = range(self.agreed.buckets)
        return next((bucket for bucket in done if not self._has(bucket)), self.agreed.buckets)

    def keep(self, bucket: int, result: NDArray[np.int64]) -> None:
        """Keep what came out of a bucket, (rows, columns)."""
        if self.folder is None:
            self._results[bucket] = result
            return
        shape = np.array(result.shape, "<i8").tobytes()
        self._write(f"result-{bucket}.bin", shape + result.astype("<i8").tobytes())

    def result(self, bucket: int) -> NDArray[np.int64]:
        """What came out of a bucket."""
        if self.folder is None:
            return self._results[bucket]
        content = read_bytes(self.folder / f"result-{bucket}.bin", most=_RESULT_BYTES)
        numbers = np.frombuffer(content, "<i8")
        return numbers[2:].reshape(*numbers[:2].tolist())

    def require_same(self, bucket: int, peer: str, message: bytes) -> None:
        """Keep the digest of a peer's list for this bucket, or compare it with the one kept.

        Raises:
            RemoteProtocolError: it sent another list before.
        """
        digest = hashlib.sha256(message).digest()
        if self.folder is None:
            before = self._seen.setdefault((bucket, peer), digest)
        else:
            path = self.folder / f"seen-{bucket}-{peer.encode().hex()}.bin"
            if not path.exists():
                self._write(path.name, digest)
            before = read_bytes(path, most=_SMALL_BYTES)
        if before != digest:
            raise RemoteProtocolError(
                f"{peer} sent another list of IDs for bucket {bucket} than before the intersection "
                "was broken off; what is repeated must be the same. Remove the record of the "
                "intersection at all parties (the folder `alignment` in the folder of each), and "
                "intersect anew"
            )

    def forget(self) -> None:
        """Remove all of it."""
        self._results.clear()
        self._seen.clear()
        self.agreed = None
        if self.folder is not None and not self.folder.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder)

    def _has(self, bucket: int) -> bool:
        if self.folder is None:
            return bucket in self._results
        return (self.folder / f"result-{bucket}.bin").exists()

    def _write(self, name: str, content: bytes) -> None:
        if self.folder is not None:
            write_atomically(self.folder / name, content, private=True)
