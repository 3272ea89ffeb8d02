"""The one file that hands CKKS objects to TenSEAL and takes them back.

Run by: every role. Protects from: hostile bytes (each blob passes `BlobShape` before
TenSEAL reads it, TenSEAL's framing is made here, its errors become `RemoteProtocolError`)
and from keys in wrong hands: contexts for others are rebuilt from parameters and public
key alone. Parameters never come from a peer.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tenseal as ts
from numpy.typing import NDArray

from protocols.errors import RemoteProtocolError
from protocols.sums.headroom import CkksHeadroom
from protocols.sums.seal_blobs import (
    BlobShape,
    proto_bytes,
    proto_double,
    proto_fields,
    proto_numbers,
)

__all__ = ["CkksScheme"]

# Field numbers of TenSEAL's messages (its tensealcontext.proto and tensors.proto).
_CONTEXT_PUBLIC, _PUBLIC_KEY = 2, 1
_VECTOR_SIZES, _VECTOR_CIPHERTEXTS, _VECTOR_SCALE = 1, 2, 3
# What pybind11 makes of SEAL's C++ exceptions.
_SEAL_ERRORS = (ValueError, RuntimeError, IndexError, MemoryError)


class CkksScheme:
    """TenSEAL under one set of parameters.

    Args:
        headroom: the solver's answer.
    """

    def __init__(self, headroom: CkksHeadroom) -> None:
        self.headroom = headroom
        self._scale = 2.0**headroom.scale_bits
        sample = self.key_pair()
        self._parameters = self._serialised(sample, public_key=False)
        self.key = BlobShape.of(self.public_key(sample))
        zero = ts.ckks_vector(sample, [0.0] * headroom.packing.slots, self._scale)
        (self._fresh_kind,) = _kinds(zero)
        self.ciphertext = BlobShape.of(_ciphertexts(zero)[0])

    def key_pair(self) -> ts.Context:
        """A context with a fresh secret key, for the receiver only."""
        context = ts.context(
            ts.SCHEME_TYPE.CKKS,
            self.headroom.poly_degree,
            coeff_mod_bit_sizes=list(self.headroom.primes),
            n_threads=1,
        )
        context.global_scale = self._scale
        return context

    def public_key(self, context: ts.Context) -> bytes:
        """The raw SEAL public key of a context."""
        serialised = self._serialised(context, public_key=True)
        (public,) = proto_fields(serialised, _CONTEXT_PUBLIC)
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

    def encrypt(self, context: ts.Context, slots_VS: NDArray[np.int64]) -> list[bytes]:
        """One raw ciphertext for each row of slots."""
        vectors = (ts.ckks_vector(context, row, self._scale) for row in slots_VS.astype(np.float64))
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
        """The slots of `vectors` ciphertexts in order, at most finite numbers.

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
    ) -> ts.CKKSVector:
        if len(blobs) != vectors or not vectors:
            raise RemoteProtocolError(
                f"{sender} sent {len(blobs)} ciphertexts, expected {vectors} for its shape"
            )
        for blob in blobs:
            self.ciphertext.check(blob, sender=sender)
        framed = b"".join(
            (
                proto_numbers(_VECTOR_SIZES, [self.headroom.packing.slots] * vectors),
                *(proto_bytes(_VECTOR_CIPHERTEXTS, blob) for blob in blobs),
                proto_double(_VECTOR_SCALE, self._scale),
            )
        )
        try:
            vector = ts.ckks_vector_from(context, framed)
            kinds = _kinds(vector)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError(f"SEAL refuses a ciphertext from {sender}") from error
        if kinds != {self._fresh_kind}:
            raise RemoteProtocolError(f"{sender} sent a ciphertext of another scale, level or size")
        return vector

    @staticmethod
    def _serialised(context: ts.Context, *, public_key: bool) -> bytes:
        serialised: bytes = context.serialize(
            save_public_key=public_key,
            save_secret_key=False,
            save_galois_keys=False,
            save_relin_keys=False,
        )
        return serialised


def _kinds(vector: ts.CKKSVector) -> set[tuple[int, float, tuple[int, ...]]]:
    return {(ct.size(), ct.scale, tuple(ct.parms_id())) for ct in vector.ciphertext()}


def _ciphertexts(vector: ts.CKKSVector) -> list[bytes]:
    return list(proto_fields(vector.serialize(), _VECTOR_CIPHERTEXTS))
