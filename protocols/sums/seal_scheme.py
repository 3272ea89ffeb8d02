"""The one file that hands homomorphic objects to SEAL and takes them back.

Run by: every role of `ckks`, `ckks_fast` and `bfv`, through SEAL's own interface in TenSEAL:
TenSEAL's vectors cost a fifth more time, insist on a key-switching prime, which sums need
not, and wrap ciphertexts in a format whose length fields they trust. Protects from: hostile
bytes (each blob passes `BlobShape` before SEAL reads it, SEAL's errors become
`RemoteProtocolError`) and from keys in wrong hands: no object but the receiver's ever
holds a secret key. Parameters never come from a peer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed import KeepsSecrets
from protocols.sums.scratch import scratch_file
from protocols.sums.seal_blobs import BlobShape

__all__ = ["Bfv", "Ckks", "ComplexCkks", "Flavour", "SealContext", "SealScheme"]

# What pybind11 makes of SEAL's C++ exceptions.
_SEAL_ERRORS = (ValueError, RuntimeError, IndexError, MemoryError)


class Flavour(Protocol):
    """What differs between the schemes: their parameters and slots."""

    def __hash__(self) -> int: ...

    @property
    def poly_degree(self) -> int: ...

    @property
    def primes(self) -> tuple[int, ...]:
        """Bits of the data prime and, if there are two, of the key-switching prime."""
        ...

    @property
    def slots(self) -> int:
        """Numbers in one ciphertext."""
        ...

    def parameters(self) -> Any:
        """SEAL's parameters, without degree and primes."""
        ...

    def encoder(self, context: Any) -> Any: ...

    def encode(self, encoder: Any, slots_S: NDArray[np.int64], plain: Any) -> None: ...

    def decode(self, encoder: Any, plain: Any) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class Ckks:
    """Cheon, Kim, Kim, Song 2017: approximate, N / 2 real slots."""

    poly_degree: int
    primes: tuple[int, ...]
    scale_bits: int

    @property
    def slots(self) -> int:
        return self.poly_degree // 2

    def parameters(self) -> Any:
        return seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)

    def encoder(self, context: Any) -> Any:
        return seal.CKKSEncoder(context)

    def encode(self, encoder: Any, slots_S: NDArray[np.int64], plain: Any) -> None:
        encoder.encode(slots_S.astype(np.float64).tolist(), 2.0**self.scale_bits, plain)

    def decode(self, encoder: Any, plain: Any) -> NDArray[np.float64]:
        return np.array(encoder.decode_double(plain), dtype=np.float64)


@dataclass(frozen=True)
class ComplexCkks(Ckks):
    """The same with both parts of its N / 2 complex slots in use: N numbers."""

    @property
    def slots(self) -> int:
        return self.poly_degree

    def encode(self, encoder: Any, slots_S: NDArray[np.int64], plain: Any) -> None:
        pairs = slots_S.astype(np.float64).view(np.complex128)
        encoder.encode(pairs.tolist(), 2.0**self.scale_bits, plain)

    def decode(self, encoder: Any, plain: Any) -> NDArray[np.float64]:
        return np.array(encoder.decode_complex(plain), dtype=np.complex128).view(np.float64)


@dataclass(frozen=True)
class Bfv:
    """Brakerski 2012, Fan and Vercauteren 2012: exact, N slots of integers modulo t."""

    poly_degree: int
    primes: tuple[int, ...]
    plain_modulus: int

    @property
    def slots(self) -> int:
        return self.poly_degree

    def parameters(self) -> Any:
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
        parameters.set_plain_modulus(self.plain_modulus)
        return parameters

    def encoder(self, context: Any) -> Any:
        return seal.BatchEncoder(context)

    def encode(self, encoder: Any, slots_S: NDArray[np.int64], plain: Any) -> None:
        encoder.encode((slots_S % self.plain_modulus).tolist(), plain)

    def decode(self, encoder: Any, plain: Any) -> NDArray[np.float64]:
        """Slots in [-t/2, t/2); below 2^42 they are exact in float64."""
        return np.array(encoder.decode_int64(plain), dtype=np.float64)


@dataclass(frozen=True)
class SealContext(KeepsSecrets):
    """What one party can do; everybody can add.

    Attributes:
        public_key, encryptor: None where the party has no public key.
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
        sample = self.key_pair()
        zero = self.zero(sample)
        self._fresh_kind = _kind(zero)
        self.key = BlobShape.of(self.public_key(sample))
        with scratch_file() as scratch:
            blob = scratch.save(zero)
        self.ciphertext, self.ciphertext_bytes = BlobShape.of(blob), len(blob)

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

    def keyless_context(self) -> SealContext:
        """A context that can add and nothing else."""
        return SealContext(None, None, None)

    def public_context(self, key: bytes, *, sender: str) -> SealContext:
        """A context that can encrypt under the raw public key that `sender` sent.

        Raises:
            RemoteProtocolError: the key is damaged or of other parameters.
        """
        self.key.check(key, sender=sender)
        loaded = seal.PublicKey()
        try:
            with scratch_file() as scratch:
                scratch.load(loaded, self._seal, key)
            encryptor = seal.Encryptor(self._seal, loaded)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError(f"SEAL refuses the public key from {sender}") from error
        return SealContext(loaded, encryptor, None)

    def zero(self, context: SealContext) -> Any:
        """A fresh encryption of zeros, for one later ciphertext of `encrypt`."""
        return self._encrypted(context, np.zeros(self.flavour.slots, dtype=np.int64))

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        """One raw ciphertext for each row of numbers; the first rows use up `zeros`."""
        ciphertexts = list(zeros)
        for zero, slots_S in zip(zeros, slots_VS, strict=False):
            self._evaluator.add_plain_inplace(zero, self._encoded(slots_S))
        ciphertexts += (self._encrypted(context, slots_S) for slots_S in slots_VS[len(zeros) :])
        return _saved(ciphertexts)

    def add(
        self, context: SealContext, contributions: Mapping[str, Sequence[bytes]], vectors: int
    ) -> list[bytes]:
        """Add the ciphertexts of all contributors, `vectors` of each.

        Raises:
            RemoteProtocolError: a blob is malformed or of other parameters.
        """
        del context
        totals: list[Any] = []
        for name, blobs in contributions.items():
            loaded = self.load(blobs, vectors, sender=name)
            if not totals:
                totals = loaded
                continue
            for total, ciphertext in zip(totals, loaded, strict=True):
                self._evaluator.add_inplace(total, ciphertext)
        return _saved(totals)

    def decrypt(
        self, context: SealContext, blobs: Sequence[bytes], vectors: int, *, sender: str
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
        for ciphertext in self.load(blobs, vectors, sender=sender):
            try:
                context.decryptor.decrypt(ciphertext, plain)
                rows.append(self.flavour.decode(self._encoder, plain))
            except _SEAL_ERRORS as error:
                raise RemoteProtocolError(f"SEAL cannot decrypt the sum from {sender}") from error
        numbers = np.concatenate(rows)
        if not np.isfinite(numbers).all():
            raise RemoteProtocolError(f"the sum from {sender} decrypts to infinite numbers")
        return numbers

    def _encoded(self, slots_S: NDArray[np.int64]) -> Any:
        plain = seal.Plaintext()
        self.flavour.encode(self._encoder, slots_S, plain)
        return plain

    def _encrypted(self, context: SealContext, slots_S: NDArray[np.int64]) -> Any:
        if context.encryptor is None:
            raise LocalProtocolError("this party holds no public key and cannot encrypt")
        ciphertext = seal.Ciphertext(self._seal)
        context.encryptor.encrypt(self._encoded(slots_S), ciphertext)
        return ciphertext

    def load(self, blobs: Sequence[bytes], vectors: int, *, sender: str) -> list[Any]:
        """The ciphertexts in `vectors` blobs; RemoteProtocolError if one is bad."""
        if len(blobs) != vectors or not vectors:
            raise RemoteProtocolError(
                f"{sender} sent {len(blobs)} ciphertexts, expected {vectors} for its shape"
            )
        for blob in blobs:
            self.ciphertext.check(blob, sender=sender)
        loaded = [seal.Ciphertext(self._seal) for _ in blobs]
        try:
            with scratch_file() as scratch:
                for ciphertext, blob in zip(loaded, blobs, strict=True):
                    scratch.load(ciphertext, self._seal, blob)
        except _SEAL_ERRORS as error:
            raise RemoteProtocolError(f"SEAL refuses a ciphertext from {sender}") from error
        if {_kind(ciphertext) for ciphertext in loaded} != {self._fresh_kind}:
            raise RemoteProtocolError(f"{sender} sent a ciphertext of another scale, level or size")
        return loaded


def _kind(ciphertext: Any) -> tuple[int, float, tuple[int, ...]]:
    return ciphertext.size(), ciphertext.scale, tuple(ciphertext.parms_id())


def _saved(ciphertexts: Sequence[Any]) -> list[bytes]:
    with scratch_file() as scratch:
        return [scratch.save(ciphertext) for ciphertext in ciphertexts]
