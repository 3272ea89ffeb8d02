"""CKKS with complex slots and one prime, straight on SEAL's own interface in TenSEAL.

Run by: every role of `ckks_fast`. Against `seal_scheme`: no key-switching prime (a sum needs
none), so encryption handles half the residues, and both parts of a complex slot carry
values, so ciphertexts are half as many. Protects from: hostile bytes (each blob passes
`BlobShape` before SEAL reads it, SEAL's errors become `RemoteProtocolError`) and from keys
in wrong hands: no object but the receiver's ever holds a secret key.

SEAL saves to and loads from paths only; a path here names memory of this process, or a
private temporary file where the system has no such memory. Only public keys and
ciphertexts pass through it.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed import KeepsSecrets
from protocols.sums.seal_blobs import BlobShape

__all__ = ["ComplexContext", "ComplexScheme"]

# What pybind11 makes of SEAL's C++ exceptions.
_SEAL_ERRORS = (ValueError, RuntimeError, IndexError, MemoryError)


@dataclass(frozen=True)
class ComplexContext(KeepsSecrets):
    """What one party can do: everybody adds, `encryptor` is None without the public key,
    `decryptor` is None without the secret key.
    """

    public_key: seal.PublicKey | None = field(repr=False)
    encryptor: seal.Encryptor | None = field(repr=False)
    decryptor: seal.Decryptor | None = field(repr=False)


class ComplexScheme:
    """SEAL's CKKS under one prime.

    Args:
        poly_degree: N; a ciphertext holds N numbers in N / 2 complex slots.
        prime_bits: of the one prime.
        scale_bits: log2 of the encoding scale.

    Attributes:
        ciphertext: what every serialised ciphertext has in common; `key`: every public key.
        ciphertext_bytes: the usual length of a ciphertext.
    """

    def __init__(self, poly_degree: int, prime_bits: int, scale_bits: int) -> None:
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        parameters.set_poly_modulus_degree(poly_degree)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(poly_degree, [prime_bits]))
        self._seal = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        if not self._seal.parameters_set():
            raise LocalProtocolError(
                f"SEAL refuses N = {poly_degree} with a prime of {prime_bits} bits: "
                f"{self._seal.parameters_error_message()}"
            )
        self._encoder, self._evaluator = seal.CKKSEncoder(self._seal), seal.Evaluator(self._seal)
        self._degree, self._scale = poly_degree, 2.0**scale_bits
        sample = self.key_pair()
        zero = self.zero(sample)
        self._fresh_kind = _kind(zero)
        self.key = BlobShape.of(self.public_key(sample))
        blob = _saved(zero)
        self.ciphertext, self.ciphertext_bytes = BlobShape.of(blob), len(blob)

    def key_pair(self) -> ComplexContext:
        """A context with a fresh secret key, for the receiver only."""
        generator = seal.KeyGenerator(self._seal)
        key = seal.PublicKey()
        generator.create_public_key(key)
        decryptor = seal.Decryptor(self._seal, generator.secret_key())
        return ComplexContext(key, seal.Encryptor(self._seal, key), decryptor)

    def public_key(self, context: ComplexContext) -> bytes:
        """The raw SEAL public key of a context."""
        return _saved(context.public_key)

    def keyless_context(self) -> ComplexContext:
        """A context that can add and nothing else."""
        return ComplexContext(None, None, None)

    def public_context(self, key: bytes, *, sender: str) -> ComplexContext:
        """A context that can encrypt under the raw public key that `sender` sent.

        Raises:
            RemoteProtocolError: the key is damaged or of other parameters.
        """
        self.key.check(key, sender=sender)
        loaded = seal.PublicKey()
        try:
            self._load_into(loaded, key)
            encryptor = seal.Encryptor(self._seal, loaded)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError(f"SEAL refuses the public key from {sender}") from error
        return ComplexContext(loaded, encryptor, None)

    def zero(self, context: ComplexContext) -> Any:
        """A fresh encryption of zeros, for one later ciphertext of `encrypt`."""
        return self._encrypted(context, np.zeros(self._degree, dtype=np.int64))

    def encrypt(
        self, context: ComplexContext, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        """One raw ciphertext for each row of numbers; the first rows use up `zeros`."""
        blobs = []
        for zero, slots_S in zip(zeros, slots_VS, strict=False):
            self._evaluator.add_plain_inplace(zero, self._encoded(slots_S))
            blobs.append(_saved(zero))
        fresh = slots_VS[len(zeros) :]
        return blobs + [_saved(self._encrypted(context, slots_S)) for slots_S in fresh]

    def add(
        self, context: ComplexContext, contributions: Mapping[str, Sequence[bytes]], vectors: int
    ) -> list[bytes]:
        """Add the ciphertexts of all contributors, `vectors` of each.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters.
        """
        del context
        totals: list[Any] = []
        for name, blobs in contributions.items():
            loaded = self._load(blobs, vectors, sender=name)
            if not totals:
                totals = loaded
                continue
            for total, ciphertext in zip(totals, loaded, strict=True):
                self._evaluator.add_inplace(total, ciphertext)
        return [_saved(total) for total in totals]

    def decrypt(
        self, context: ComplexContext, blobs: Sequence[bytes], vectors: int, *, sender: str
    ) -> NDArray[np.float64]:
        """The numbers of `vectors` ciphertexts in order, all finite.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters, or this context
                has no secret key.
        """
        if context.decryptor is None:
            raise RemoteProtocolError(f"SEAL cannot decrypt the sum from {sender}: no secret key")
        plain = seal.Plaintext()
        rows = []
        for ciphertext in self._load(blobs, vectors, sender=sender):
            try:
                context.decryptor.decrypt(ciphertext, plain)
                rows.append(np.array(self._encoder.decode_complex(plain)).view(np.float64))
            except _SEAL_ERRORS as error:
                raise RemoteProtocolError(f"SEAL cannot decrypt the sum from {sender}") from error
        numbers = np.concatenate(rows)
        if not np.isfinite(numbers).all():
            raise RemoteProtocolError(f"the sum from {sender} decrypts to infinite numbers")
        return numbers

    def _encoded(self, slots_S: NDArray[np.int64]) -> Any:
        plain = seal.Plaintext()
        pairs = slots_S.astype(np.float64).view(np.complex128)
        self._encoder.encode(pairs.tolist(), self._scale, plain)
        return plain

    def _encrypted(self, context: ComplexContext, slots_S: NDArray[np.int64]) -> Any:
        if context.encryptor is None:
            raise LocalProtocolError("this party holds no public key and cannot encrypt")
        ciphertext = seal.Ciphertext(self._seal)
        context.encryptor.encrypt(self._encoded(slots_S), ciphertext)
        return ciphertext

    def _load(self, blobs: Sequence[bytes], vectors: int, *, sender: str) -> list[Any]:
        if len(blobs) != vectors or not vectors:
            raise RemoteProtocolError(
                f"{sender} sent {len(blobs)} ciphertexts, expected {vectors} for its shape"
            )
        loaded = []
        for blob in blobs:
            self.ciphertext.check(blob, sender=sender)
            ciphertext = seal.Ciphertext(self._seal)
            try:
                self._load_into(ciphertext, blob)
            except _SEAL_ERRORS as error:
                raise RemoteProtocolError(f"SEAL refuses a ciphertext from {sender}") from error
            if _kind(ciphertext) != self._fresh_kind:
                raise RemoteProtocolError(
                    f"{sender} sent a ciphertext of another scale, level or size"
                )
            loaded.append(ciphertext)
        return loaded

    def _load_into(self, target: Any, blob: bytes) -> None:
        with _scratch() as path:
            Path(path).write_bytes(blob)
            target.load(self._seal, path)


def _kind(ciphertext: Any) -> tuple[int, float, tuple[int, ...]]:
    return ciphertext.size(), ciphertext.scale, tuple(ciphertext.parms_id())


def _saved(thing: Any) -> bytes:
    with _scratch() as path:
        thing.save(path)
        return Path(path).read_bytes()


@contextmanager
def _scratch() -> Iterator[str]:
    """A path that only this process and user can open, for one object."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("seal")
        try:
            yield f"/proc/self/fd/{handle}"
        finally:
            os.close(handle)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder) / "seal")
