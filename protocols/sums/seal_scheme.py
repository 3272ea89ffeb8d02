"""CKKS through TenSEAL's vectors, which have a key-switching prime and real slots.

Run by: every role of `ckks`. Protects from: hostile bytes (each blob passes
`BlobShape` before TenSEAL reads it, TenSEAL's framing is made here, its errors become
`RemoteProtocolError`) and from keys in wrong hands: contexts for others are rebuilt from
parameters and public key alone. Parameters never come from a peer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tenseal as ts
from numpy.typing import NDArray

from protocols.errors import RemoteProtocolError
from protocols.sums.seal_blobs import (
    BlobShape,
    proto_bytes,
    proto_double,
    proto_fields,
    proto_numbers,
)

__all__ = ["Ckks", "SealScheme"]

# Field numbers of TenSEAL's messages (its tensealcontext.proto and tensors.proto).
_CONTEXT_PUBLIC, _PUBLIC_KEY = 2, 1
_VECTOR_SIZES, _VECTOR_CIPHERTEXTS, _VECTOR_SCALE = 1, 2, 3
# What pybind11 makes of SEAL's C++ exceptions.
_SEAL_ERRORS = (ValueError, RuntimeError, IndexError, MemoryError)


@dataclass(frozen=True)
class Ckks:
    """Cheon, Kim, Kim, Song 2017: approximate, N / 2 real slots."""

    poly_degree: int
    primes: tuple[int, int]
    scale_bits: int

    @property
    def slots(self) -> int:
        return self.poly_degree // 2

    @property
    def vector_trailer(self) -> bytes:
        return proto_double(_VECTOR_SCALE, 2.0**self.scale_bits)

    def new_context(self) -> ts.Context:
        context = ts.context(
            ts.SCHEME_TYPE.CKKS,
            self.poly_degree,
            coeff_mod_bit_sizes=list(self.primes),
            n_threads=1,
        )
        context.global_scale = 2.0**self.scale_bits
        return context

    def encrypt(self, context: ts.Context, slots_S: NDArray[np.int64]) -> ts.CKKSVector:
        return ts.ckks_vector(context, slots_S.astype(np.float64), 2.0**self.scale_bits)

    def add_plain(self, vector: ts.CKKSVector, slots_S: NDArray[np.int64]) -> None:
        vector.add_(ts.plain_tensor(slots_S.astype(np.float64)))

    def load(self, context: ts.Context, framed: bytes) -> ts.CKKSVector:
        return ts.ckks_vector_from(context, framed)


class SealScheme:
    """TenSEAL under one set of parameters.

    Attributes:
        flavour: the parameters.
        key, ciphertext: what every serialised public key and ciphertext has in common.
        ciphertext_bytes: the usual length of a ciphertext.
    """

    def __init__(self, flavour: Ckks) -> None:
        self.flavour = flavour
        sample = self.key_pair()
        zero = self.zero(sample)
        self._parameters = _serialised(sample, public_key=False)
        (self._fresh_kind,) = _kinds(zero)
        self.key = BlobShape.of(self.public_key(sample))
        (blob,) = _ciphertexts(zero)
        self.ciphertext, self.ciphertext_bytes = BlobShape.of(blob), len(blob)

    def key_pair(self) -> ts.Context:
        """A context with a fresh secret key, for the receiver only."""
        return self.flavour.new_context()

    def public_key(self, context: ts.Context) -> bytes:
        """The raw SEAL public key of a context."""
        (public,) = proto_fields(_serialised(context, public_key=True), _CONTEXT_PUBLIC)
        (key,) = proto_fields(public, _PUBLIC_KEY)
        return key

    def keyless_context(self) -> ts.Context:
        """A context that can add and nothing else."""
        return ts.context_from(self._parameters, n_threads=1)

    def public_context(self, key: bytes, *, sender: str) -> ts.Context:
        """A context that can encrypt under the raw public key that `sender` sent.

        Raises:
            RemoteProtocolError: the key is damaged or of other parameters.
        """
        self.key.check(key, sender=sender)
        # A repeated embedded message is merged, so this adds the key to the public half.
        added = proto_bytes(_CONTEXT_PUBLIC, proto_bytes(_PUBLIC_KEY, key))
        try:
            return ts.context_from(self._parameters + added, n_threads=1)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError(f"SEAL refuses the public key from {sender}") from error

    def zero(self, context: ts.Context) -> Any:
        """A fresh encryption of zeros, for one later ciphertext of `encrypt`."""
        return self.flavour.encrypt(context, np.zeros(self.flavour.slots, dtype=np.int64))

    def encrypt(
        self, context: ts.Context, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        """One raw ciphertext for each row of slots; the first rows use up `zeros`."""
        vectors = list(zeros)
        for vector, slots_S in zip(vectors, slots_VS, strict=False):
            self.flavour.add_plain(vector, slots_S)
        vectors += (self.flavour.encrypt(context, slots_S) for slots_S in slots_VS[len(zeros) :])
        return [blob for vector in vectors for blob in _ciphertexts(vector)]

    def add(
        self, context: ts.Context, contributions: Mapping[str, Sequence[bytes]], vectors: int
    ) -> list[bytes]:
        """Add the ciphertexts of all contributors, `vectors` of each.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters.
        """
        loaded = [
            self._load(context, blobs, vectors, sender=name)
            for name, blobs in contributions.items()
        ]
        total = loaded[0]
        try:
            for vector in loaded[1:]:
                total.add_(vector)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError("SEAL refuses to add the contributions") from error
        return _ciphertexts(total)

    def decrypt(
        self, context: ts.Context, blobs: Sequence[bytes], vectors: int, *, sender: str
    ) -> NDArray[np.float64]:
        """The slots of `vectors` ciphertexts in order, all finite.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters.
        """
        loaded = self._load(context, blobs, vectors, sender=sender)
        try:
            slots = np.array(loaded.decrypt(), dtype=np.float64)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError(f"SEAL cannot decrypt the sum from {sender}") from error
        if not np.isfinite(slots).all():
            raise RemoteProtocolError(f"the sum from {sender} decrypts to infinite numbers")
        return slots

    def _load(
        self, context: ts.Context, blobs: Sequence[bytes], vectors: int, *, sender: str
    ) -> Any:
        if len(blobs) != vectors or not vectors:
            raise RemoteProtocolError(
                f"{sender} sent {len(blobs)} ciphertexts, expected {vectors} for its shape"
            )
        for blob in blobs:
            self.ciphertext.check(blob, sender=sender)
        framed = b"".join(
            (
                proto_numbers(_VECTOR_SIZES, [self.flavour.slots] * vectors),
                *(proto_bytes(_VECTOR_CIPHERTEXTS, blob) for blob in blobs),
                self.flavour.vector_trailer,
            )
        )
        try:
            vector = self.flavour.load(context, framed)
            kinds = _kinds(vector)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError(f"SEAL refuses a ciphertext from {sender}") from error
        if kinds != {self._fresh_kind}:
            raise RemoteProtocolError(f"{sender} sent a ciphertext of another scale, level or size")
        return vector


def _serialised(context: ts.Context, *, public_key: bool) -> bytes:
    serialised: bytes = context.serialize(
        save_public_key=public_key,
        save_secret_key=False,
        save_galois_keys=False,
        save_relin_keys=False,
    )
    return serialised


def _kinds(vector: Any) -> set[tuple[int, float, tuple[int, ...]]]:
    return {(ct.size(), ct.scale, tuple(ct.parms_id())) for ct in vector.ciphertext()}


def _ciphertexts(vector: Any) -> list[bytes]:
    return list(proto_fields(vector.serialize(), _VECTOR_CIPHERTEXTS))
