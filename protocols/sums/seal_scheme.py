"""The one file that hands homomorphic objects to SEAL and takes them back.

Run by: every role of `ckks`, `ckks_fast` and `bfv`, through SEAL's own interface in TenSEAL:
TenSEAL's vectors cost a fifth more time, insist on a key-switching prime, which sums need
not, and wrap ciphertexts in a format whose length fields they trust. Protects from: hostile
bytes (each blob passes `BlobShape` before SEAL reads it, SEAL's errors become
`RemoteProtocolError`), from broken public keys (what `public_keys` finds, and nothing else) and
from keys in wrong hands: no object but the receiver's ever holds a secret key. Parameters never
come from a peer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.flavours import Flavour
from protocols.sums.public_keys import require_spread
from protocols.sums.residues import Residues
from protocols.sums.roles import KeepsSecrets
from protocols.sums.scratch import scratch_file
from protocols.sums.seal_blobs import BlobShape, unpacked

__all__ = ["SealContext", "SealScheme"]

# What pybind11 makes of SEAL's C++ exceptions.
_SEAL_ERRORS = (ValueError, RuntimeError, IndexError, MemoryError)


@dataclass(frozen=True)
class SealContext(KeepsSecrets):
    """What one party can do; adding needs none.

    Attributes:
        public_key, encryptor: of the receiver's key.
        decryptor: None without the secret key.
    """

    public_key: Any = field(repr=False)
    encryptor: Any = field(repr=False)
    decryptor: Any = field(repr=False)


class SealScheme:
    """SEAL under one set of parameters.

    Attributes:
        flavour: scheme and parameters.
        key, ciphertext: what every serialised public key and ciphertext has in common.
        ciphertext_bytes: the usual length of a ciphertext.
        moduli: the primes of a key; the first is that of the data.
    """

    def __init__(self, flavour: Flavour) -> None:
        parameters, self.flavour = flavour.parameters(), flavour
        degree, primes = flavour.poly_degree, list(flavour.primes)
        parameters.set_poly_modulus_degree(degree)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(degree, primes))
        self._seal = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        if not self._seal.parameters_set():
            raise LocalProtocolError(
                f"SEAL refuses N = {degree} with primes of {primes} bits: "
                f"{self._seal.parameters_error_message()}"
            )
        self._encoder, self._evaluator = flavour.encoder(self._seal), seal.Evaluator(self._seal)
        self.moduli = tuple(
            prime.value() for prime in self._seal.key_context_data().parms().coeff_modulus()
        )
        modulus = self._seal.first_context_data().parms().coeff_modulus()[0].value()
        sample = self.key_pair()
        zero = SealScheme.zero(self, sample)
        self._fresh_kind = _kind(zero)
        self.key = BlobShape.of(self.public_key(sample))
        with scratch_file() as scratch:
            blob = scratch.save(zero)
        self.ciphertext = Residues.of(blob, numbers=2 * degree, modulus=modulus)
        self.ciphertext_bytes = len(blob)

    def key_pair(self) -> SealContext:
        """A context with a fresh secret key, for the receiver only."""
        generator = seal.KeyGenerator(self._seal)
        key = seal.PublicKey()
        generator.create_public_key(key)
        decryptor = seal.Decryptor(self._seal, generator.secret_key())
        return SealContext(key, seal.Encryptor(self._seal, key), decryptor)

    def public_key(self, context: SealContext) -> bytes:
        """The raw SEAL public key of a context."""
        with scratch_file() as scratch:
            return scratch.save(context.public_key)

    def public_context(self, key: bytes, *, sender: str) -> SealContext:
        """A context that can encrypt under the raw public key that `sender` sent.

        Raises:
            RemoteProtocolError: the key is damaged, of other parameters, or no key that encrypts.
        """
        self.key.check(key, sender=sender)
        loaded, refusal = seal.PublicKey(), f"SEAL refuses the public key from {sender}"
        with _seal_errors_as(refusal), scratch_file() as scratch:
            scratch.load(loaded, self._seal, key)
            content = unpacked(scratch.save(loaded))
        degree = self.flavour.poly_degree
        require_spread(content, degree=degree, moduli=self.moduli, sender=sender)
        with _seal_errors_as(refusal):
            context = SealContext(loaded, seal.Encryptor(self._seal, loaded), None)
            self.zero(context)  # what SEAL would refuse only once it encrypts shows here
        return context

    def zero(self, context: SealContext) -> Any:
        """A fresh encryption of zeros, for one later ciphertext of `encrypt`."""
        zero, plain = seal.Ciphertext(self._seal), seal.Plaintext()
        with scratch_file() as scratch:
            self._encoder.encode(np.zeros(self.flavour.slots, dtype=np.int64), plain, scratch)
        context.encryptor.encrypt(plain, zero)
        return zero

    def zeros_in(self, blobs: Sequence[bytes]) -> Sequence[Any]:
        """Zeros that this party's worker encrypted."""
        return self.load(blobs, len(blobs), sender="the worker")

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        """One raw ciphertext for each row of numbers; the first rows use up `zeros`."""
        fresh, plain, blobs = seal.Ciphertext(self._seal), seal.Plaintext(), []
        with scratch_file() as scratch:
            # One at a time, so that each stays in the processor's cache from end to end.
            for row, slots_S in enumerate(slots_VS):
                self._encoder.encode(slots_S, plain, scratch)
                if row < len(zeros):
                    self._evaluator.add_plain_inplace(zeros[row], plain)
                else:
                    context.encryptor.encrypt(plain, fresh)
                blobs.append(scratch.save(zeros[row] if row < len(zeros) else fresh))
        return blobs

    def add(self, contributions: Mapping[str, Sequence[bytes]], vectors: int) -> list[bytes]:
        """Add the ciphertexts of all contributors, `vectors` of each; needs no key.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters.
        """
        return self.ciphertext.add(contributions, vectors)

    def decrypt(
        self, context: SealContext, blobs: Sequence[bytes], vectors: int, *, sender: str
    ) -> NDArray[Any]:
        """The numbers of `vectors` ciphertexts in order, all finite.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters, or this context
                has no secret key.
        """
        if context.decryptor is None:
            raise RemoteProtocolError(f"SEAL cannot decrypt the sum from {sender}: no secret key")
        plain, rows = seal.Plaintext(), []
        loaded = self.load(blobs, vectors, sender=sender)
        refusal = f"SEAL cannot decrypt the sum from {sender}"
        with _seal_errors_as(refusal), scratch_file() as scratch:
            for ciphertext in loaded:
                context.decryptor.decrypt(ciphertext, plain)
                rows.append(self._encoder.decode(plain, scratch))
        numbers = np.concatenate(rows)
        if not np.isfinite(numbers).all():
            raise RemoteProtocolError(f"the sum from {sender} decrypts to infinite numbers")
        return numbers

    def load(self, blobs: Sequence[bytes], vectors: int, *, sender: str) -> list[Any]:
        """The ciphertexts in `vectors` blobs; RemoteProtocolError if one is bad."""
        if len(blobs) != vectors or not vectors:
            raise RemoteProtocolError(
                f"{sender} sent {len(blobs)} ciphertexts, expected {vectors} for its shape"
            )
        for blob in blobs:
            self.ciphertext.check(blob, sender=sender)
        loaded = [seal.Ciphertext(self._seal) for _ in blobs]
        refusal = f"SEAL refuses a ciphertext from {sender}"
        with _seal_errors_as(refusal), scratch_file() as scratch:
            for ciphertext, blob in zip(loaded, blobs, strict=True):
                scratch.load(ciphertext, self._seal, blob)
        if {_kind(ciphertext) for ciphertext in loaded} != {self._fresh_kind}:
            raise RemoteProtocolError(f"{sender} sent a ciphertext of another scale, level or size")
        return loaded


@contextmanager
def _seal_errors_as(refusal: str) -> Iterator[None]:
    """Whatever SEAL raises over a peer's bytes is a RemoteProtocolError that says `refusal`."""
    try:
        yield
    except _SEAL_ERRORS as error:
        raise RemoteProtocolError(refusal) from error


def _kind(ciphertext: Any) -> tuple[int, float, tuple[int, ...]]:
    return ciphertext.size(), ciphertext.scale, tuple(ciphertext.parms_id())
