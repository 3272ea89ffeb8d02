"""The one file that hands homomorphic objects to SEAL and takes them back.

Run by: every role of a homomorphic sum, through SEAL's own interface in TenSEAL: TenSEAL's vectors
cost a fifth more time, insist on a key-switching prime, which sums need not, and wrap ciphertexts
in a format whose length fields they trust. Protects from: hostile bytes, from broken public keys
(what `public_keys` finds, and nothing else) and from keys in wrong hands: no object but the
receiver's ever holds a secret key.

What parties send each other are numbers and nothing else. Under one data prime q a ciphertext is
2N numbers modulo q, and the ciphertext of a sum is the sum of those numbers (Cheon et al. 2017,
section 3.4, Add; the same in BFV), so the aggregator hands nothing to SEAL. What SEAL writes around
them (its header, the parameters, compression) each party adds itself: no byte of a peer's names
parameters or sizes, or reaches a decompressor.

Letters: N coefficients, V ciphertexts, S numbers in each.
"""

import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.roles import KeepsSecrets

DEGREE = 4096
"""N, of the ring of sums: at 128-bit security it takes primes of 109 bits together."""
SMALL_DEGREE = 2048
"""N, of a ring that takes 54 bits at 128-bit security, for half the bytes of a small batch."""
# Of N uniform residues modulo q about N^2 / 2q repeat another one. More than a 16th do with
# probability below 2^-100, for primes of 20 bits or more at any N.
_MAX_REPEATED = 1 / 16
# About a 16th of N uniform residues lies in each 16th of their range. More than an 8th does with
# probability below exp(-N / 39) (Chernoff's bound), 2^-70 from N = 2048 on.
_RANGES = 16
_MAX_IN_ONE_RANGE = 1 / 8
if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd
Numbers = NDArray[np.uint64]
_WORD = np.dtype("<u8")
# What pybind11 makes of SEAL's C++ exceptions.
_SEAL_ERRORS = (ValueError, RuntimeError, IndexError, MemoryError)
# SEAL 4.1's header: magic, its size, version, compression, reserved, total size.
_HEADER_BYTES = 16
_COMPRESSION_AT = 5
_SIZE_AT = 8
_MAGIC = b"\x5e\xa1"
_ZSTANDARD = 2


def require_uniform_key(key_2N: NDArray[np.uint64], modulus: int, *, sender: str) -> None:
    """Raise RemoteProtocolError, which names `sender`, if the residues of a public key (b, a) are
    not distributed like uniform residues.

    This finds broken keys, under which only noise would hide a contribution: zeros, constants,
    repeated residues, residues within a small range, b = a or b = -a. It does not find a bad key
    that its holder made on purpose (b = X a passes, say); such a holder could as well publish its
    secret key.

    Args:
        key_2N: residues of b and of a, either coefficients or SEAL's transformed values.
        modulus: q, of at most 60 bits.
        sender: the key holder.
    """
    b_N, a_N = key_2N
    degree = len(b_N)
    range_size = np.uint64(modulus // _RANGES + 1)
    sum_N = b_N + a_N
    difference_N = b_N + (np.uint64(modulus) - a_N)
    # Sum and difference find b = -a and b = a.
    for tested_N in (b_N, a_N, sum_N, difference_N):
        residues_N = tested_N % np.uint64(modulus)
        repeated = degree - len(np.unique(residues_N))
        most_in_one_range = int(np.bincount(residues_N // range_size).max())
        if repeated > degree * _MAX_REPEATED or most_in_one_range > degree * _MAX_IN_ONE_RANGE:
            raise RemoteProtocolError(
                f"the public key from {sender} is no RLWE key: of {degree} residues of a "
                f"polynomial, of the sum or difference of both, {repeated} repeat others, expected "
                f"next to none; {most_in_one_range} lie in one {_RANGES}th of the range, expected "
                f"about {degree // _RANGES}; nothing is encrypted under it. {sender} sets up again "
                "with a key of its own library"
            )


@dataclass(frozen=True)
class ScratchFile:
    """A file through which bytes go to and from SEAL, which saves to and loads from paths only.

    The path names memory of this process, or a private temporary file where the system has no such
    memory. Only public keys, ciphertexts and a party's own plaintexts pass through it.
    """

    handle: int
    path: str

    def save(self, seal_object: Any) -> bytes:
        """Return the bytes in which SEAL saves a key, plaintext or ciphertext."""
        seal_object.save(self.path)
        return os.pread(self.handle, os.fstat(self.handle).st_size, 0)

    def load(self, target: Any, context: Any, blob: bytes) -> None:
        """Let SEAL load bytes into `target`, an object of the same type as the saved one."""
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, blob, 0)
        target.load(context, self.path)


@contextmanager
def open_scratch_file() -> Iterator[ScratchFile]:
    """Yield a file that only this process and user can open, and delete it after the `with` block:
    memory of this process, or a temporary file if the system has no such memory.
    """
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("seal")
        try:
            yield ScratchFile(handle, f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
    else:
        with tempfile.NamedTemporaryFile() as file:
            yield ScratchFile(file.fileno(), file.name)


@dataclass(frozen=True)
class SealForm:
    """The byte format in which SEAL saves objects of one kind, uncompressed: constant bytes, then
    numbers of 8 bytes.

    Attributes:
        start: the constant bytes.
        count: how many numbers of 8 bytes follow.
    """

    start: bytes
    count: int

    @classmethod
    def from_sample(cls, sample: Any, count: int) -> "SealForm":
        """Return the byte format of SEAL's objects like `sample`, an object made here whose saved
        form ends in `count` numbers. SEAL saves it compressed; the format is uncompressed.
        """
        with open_scratch_file() as scratch:
            saved = scratch.save(sample)
        content = cls.decompress_object(saved)
        prefix = content[: -_WORD.itemsize * count]
        # The header of the saved object, except for its compression (0 for none) and its size.
        header = bytearray(saved[:_HEADER_BYTES])
        header[_COMPRESSION_AT] = 0
        size = _HEADER_BYTES + len(content)
        header[_SIZE_AT:] = size.to_bytes(8, "little")
        return cls(bytes(header) + prefix, count)

    @staticmethod
    def decompress_object(saved: bytes) -> bytes:
        """Return the uncompressed content, without header, of an object that SEAL saved here. It is
        never called for bytes from a peer, which a decompressor must not get.

        Raises LocalProtocolError: the installed TenSEAL saves in another format.
        """
        if saved[: len(_MAGIC)] != _MAGIC or saved[_COMPRESSION_AT] != _ZSTANDARD:
            raise LocalProtocolError(
                "the installed TenSEAL does not serialise as SEAL 4.1 with Zstandard does; "
                "install a release of tenseal 0.3"
            )
        content: bytes = zstd.decompress(memoryview(saved)[_HEADER_BYTES:])
        return content

    def extract_numbers(self, saved: Any, scratch: ScratchFile) -> Numbers:
        """Return the numbers of an object of SEAL of this kind."""
        content = self.decompress_object(scratch.save(saved))
        return np.frombuffer(content, _WORD, offset=len(content) - _WORD.itemsize * self.count)

    def load_numbers(self, target: Any, context: Any, numbers: bytes, scratch: ScratchFile) -> None:
        """Set `target`, an object of SEAL of this kind, to these numbers, of 8 bytes each."""
        scratch.load(target, context, self.start + numbers)


@dataclass(frozen=True)
class Residues:
    """A wire format of numbers modulo q: each in as many bytes as q has, little endian.

    Attributes:
        count: 2N, the numbers of a whole ciphertext (c0, c1).
        modulus: q.
    """

    count: int
    modulus: int

    @property
    def width(self) -> int:
        """Return the bytes of one number."""
        return -(-self.modulus.bit_length() // 8)

    @property
    def size(self) -> int:
        """Return the bytes of all numbers."""
        return self.count * self.width

    def pack(self, numbers: Numbers) -> bytes:
        """Encode numbers modulo q: the low `width` bytes of each."""
        number_bytes = numbers.astype(_WORD, copy=False).view(np.uint8).reshape(numbers.size, -1)
        return number_bytes[:, : self.width].tobytes()

    def parse(self, blob: bytes, *, sender: str, count: int | None = None) -> Numbers:
        """Decode numbers modulo q from a blob, each in as many bytes as q has.

        `count`: how many numbers the blob must hold; None: the 2N of a whole ciphertext.

        Raises RemoteProtocolError, which names `sender`: the blob has another size, or a number is
        not below the modulus q.
        """
        count = self.count if count is None else count
        if len(blob) != count * self.width:
            raise RemoteProtocolError(
                f"a ciphertext from {sender} has {len(blob)} bytes, expected {count * self.width}"
            )
        number_bytes = np.zeros((count, _WORD.itemsize), dtype=np.uint8)
        number_bytes[:, : self.width] = np.frombuffer(blob, np.uint8).reshape(count, -1)
        numbers: Numbers = number_bytes.view(_WORD).reshape(-1)
        if int(numbers.max()) >= self.modulus:
            raise RemoteProtocolError(
                f"a ciphertext from {sender} holds numbers beyond the modulus"
            )
        return numbers


@dataclass(frozen=True)
class SealContext(KeepsSecrets):
    """SEAL's objects of one party for one key pair.

    Attributes:
        public_key, encryptor: SEAL's objects of the receiver's public key, by which every party
            encrypts.
        decryptor: holds the secret key; None at every party but the receiver.
    """

    public_key: Any = field(repr=False)
    encryptor: Any = field(repr=False)
    decryptor: Any = field(repr=False)


@lru_cache(maxsize=8)
def _make_transform_context(degree: int, modulus: int) -> tuple[Any, SealForm]:
    """Return a SEAL context in which polynomials are transformed modulo one prime, and the byte
    format of its pairs of polynomials. Nothing is encrypted in it, so its security level is none.

    Args:
        degree: N, the ring degree.
        modulus: q, the prime.
    """
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
    parameters.set_poly_modulus_degree(degree)
    parameters.set_coeff_modulus([seal.Modulus(modulus)])
    needs_chain_of_moduli = False  # there is one prime
    context = seal.SEALContext(parameters, needs_chain_of_moduli, seal.SEC_LEVEL_TYPE.NONE)
    sample = seal.PublicKey()
    seal.KeyGenerator(context).create_public_key(sample)
    return context, SealForm.from_sample(sample.data(), 2 * degree)


def compute_coefficients(transformed_2N: Numbers, modulus: int) -> Numbers:
    """Return the N coefficients of two polynomials, (2, N), from their number-theoretic transforms,
    in which SEAL stores keys.

    The second polynomial must not be zero, since SEAL refuses such a pair.

    `transformed_2N`: values of the transforms modulo the prime q, (2, N). `modulus`: q.
    """
    context, form = _make_transform_context(transformed_2N.shape[1], modulus)
    pair = seal.Ciphertext(context)
    with open_scratch_file() as scratch:
        form.load_numbers(pair, context, transformed_2N.tobytes(), scratch)
        seal.Evaluator(context).transform_from_ntt_inplace(pair)
        return form.extract_numbers(pair, scratch).reshape(2, -1)


class SealCipher(ABC):
    """An encryption scheme of SEAL under one set of parameters, which never come from a peer.

    Args:
        primes: bits of the data prime and, if there are two, of the key-switching prime.
        bits: log2 of the scale (CKKS) or of the plain modulus (BFV).
        degree: N, the ring degree.

    Attributes:
        can_cut_last: whether each number is encrypted in one coefficient of c0, so that of the last
            ciphertext only the coefficients that hold numbers are sent; parameters called
            `last_slots` give their number, None: all.
        moduli: the primes; the first is q, the data prime.
        residues: the wire format of a ciphertext.
        slots: S, the numbers in one ciphertext.
    """

    seal_type: ClassVar[Any]
    can_cut_last: ClassVar[bool] = False
    slots: int

    def __init__(self, primes: tuple[int, ...], bits: int, degree: int = DEGREE) -> None:
        """Make SEAL's context for `primes` (bits of the data prime q and of the key-switching prime
        if any), `bits` (log2 of the scale or of the plain modulus) and the ring degree N =
        `degree`. Raises LocalProtocolError: SEAL refuses them, e.g. below 128-bit security.
        """
        self._bits = bits
        self.degree = degree
        parameters = seal.EncryptionParameters(self.seal_type)
        self._set_scheme_parameters(parameters)
        parameters.set_poly_modulus_degree(degree)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(degree, list(primes)))
        expand_mod_chain = True  # SEAL's word: also for ciphertexts with fewer primes
        security = seal.SEC_LEVEL_TYPE.TC128
        self._seal = seal.SEALContext(parameters, expand_mod_chain, security)
        if not self._seal.parameters_set():
            raise LocalProtocolError(
                f"SEAL refuses N = {degree} with primes of {list(primes)} bits: "
                f"{self._seal.parameters_error_message()}"
            )
        self._evaluator = seal.Evaluator(self._seal)
        chain = self._seal.key_context_data().parms().coeff_modulus()
        self.moduli = tuple(prime.value() for prime in chain)
        data = self._seal.first_context_data().parms().coeff_modulus()
        self.residues = Residues(2 * degree, data[0].value())

    @abstractmethod
    def _set_scheme_parameters(self, parameters: Any) -> None:
        """Set the parameters that this scheme has beside degree and primes."""

    @abstractmethod
    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None:
        """Set SEAL's plaintext `plain` to the encoding of these integers, one for each of the S
        slots. `scratch`: the file through which SEAL loads it.
        """

    @abstractmethod
    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[Any]:
        """Return the numbers that SEAL's plaintext `plain` encodes, one for each of its S slots.
        `scratch`: the file through which SEAL saves it.
        """

    @cached_property
    def ciphertext_form(self) -> SealForm:
        """Return SEAL's byte format of ciphertexts, by which residues are moved into and out of
        SEAL's objects. It is taken from an encryption of zeros under a temporary key.
        """
        encrypted = seal.Ciphertext(self._seal)
        plain = seal.Plaintext()
        with open_scratch_file() as scratch:
            self.encode(np.zeros(self.slots, dtype=np.int64), plain, scratch)
        self.make_key_pair().encryptor.encrypt(plain, encrypted)
        return SealForm.from_sample(encrypted, self.residues.count)

    @cached_property
    def _key_form(self) -> SealForm:
        """Return SEAL's byte format of public keys, taken from a temporary key."""
        numbers = self.residues.count * len(self.moduli)
        return SealForm.from_sample(self.make_key_pair().public_key, numbers)

    def make_key_pair(self) -> SealContext:
        """Generate a key pair; the returned context encrypts and decrypts."""
        generator = seal.KeyGenerator(self._seal)
        key = seal.PublicKey()
        generator.create_public_key(key)
        decryptor = seal.Decryptor(self._seal, generator.secret_key())
        return SealContext(key, seal.Encryptor(self._seal, key), decryptor)

    def pack_public_key(self, context: SealContext) -> bytes:
        """Encode the public key (b, a) of a context: b modulo each prime, then a; 8-byte words."""
        with open_scratch_file() as scratch:
            return self._key_form.extract_numbers(context.public_key, scratch).tobytes()

    def make_public_context(self, key: bytes, *, sender: str) -> SealContext:
        """Check an encoded public key that `sender` sent, and return a context that encrypts under
        it.

        Raises RemoteProtocolError: the bytes are no public key, or a key that hides nothing.
        """
        expected = self._key_form.count * _WORD.itemsize
        if len(key) != expected:
            raise RemoteProtocolError(
                f"the public key from {sender} has {len(key)} bytes, expected {expected}"
            )
        # P is the number of primes.
        numbers_2PN = np.frombuffer(key, _WORD).reshape(2, len(self.moduli), self.degree)
        loaded = seal.PublicKey()
        with _seal_errors_as(f"SEAL refuses the public key from {sender}"):
            for index, modulus in enumerate(self.moduli):
                key_2N = numbers_2PN[:, index]
                if int(key_2N.max()) >= modulus:
                    raise RemoteProtocolError(
                        f"the public key from {sender} holds numbers beyond the modulus"
                    )
                require_uniform_key(key_2N, modulus, sender=sender)
                require_uniform_key(compute_coefficients(key_2N, modulus), modulus, sender=sender)
            with open_scratch_file() as scratch:
                self._key_form.load_numbers(loaded, self._seal, key, scratch)
            context = SealContext(loaded, seal.Encryptor(self._seal, loaded), None)
            # SEAL refuses some keys only when it encrypts, so encrypt once, for the exception.
            self.encrypt(context, np.zeros((1, self.slots), dtype=np.int64))
        return context

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], last_slots: int | None = None
    ) -> list[bytes]:
        """Encrypt each row of numbers as one ciphertext; return V encoded ciphertexts.

        Args:
            context: SEAL's objects for the receiver's public key.
            slots_VS: V rows of S numbers.
            last_slots: unused here; a scheme with `can_cut_last` sends only so many coefficients of
                the last ciphertext's c0.
        """
        ciphertext = seal.Ciphertext(self._seal)
        plain = seal.Plaintext()
        blobs = []
        with open_scratch_file() as scratch:
            # One at a time, so that each stays in the processor's cache from end to end.
            for slots_S in slots_VS:
                self.encode(slots_S, plain, scratch)
                context.encryptor.encrypt(plain, ciphertext)
                numbers = self.ciphertext_form.extract_numbers(ciphertext, scratch)
                blobs.append(self.residues.pack(numbers))
        return blobs

    def add_ciphertexts(
        self,
        contributions: Mapping[str, Sequence[bytes]],
        vectors: int,
        last_slots: int | None = None,
    ) -> list[bytes]:
        """Add the contributors' ciphertexts residue by residue, without any key; return V encoded
        ciphertexts.

        Args:
            contributions: V encoded ciphertexts of each contributor, by name.
            vectors: V.
            last_slots: how many coefficients of the last ciphertext's c0 were sent; None: all.

        Raises RemoteProtocolError: a contributor sent another number of ciphertexts, or numbers
        that are no residues modulo q.
        """
        for name, blobs in contributions.items():
            _require_count(blobs, vectors, name)
        sums = []
        for index, residue_count in enumerate(self._count_sent(vectors, last_slots)):
            addends = {name: blobs[index] for name, blobs in contributions.items()}
            sums.append(self._add_vector(addends, residue_count))
        return sums

    def _count_sent(self, vectors: int, last_slots: int | None) -> list[int]:
        """Return how many residues are sent of each of `vectors` ciphertexts (c0, c1) in a ring of
        degree N: all 2N, but of the last ciphertext only `last_slots` of c0 (None: all), and N of
        c1.
        """
        whole = self.residues.count
        sent_of_last = whole if last_slots is None else last_slots + self.degree
        return [whole] * (vectors - 1) + [sent_of_last]

    def _add_vector(self, blobs: Mapping[str, bytes], count: int) -> bytes:
        """Add one ciphertext of each contributor, residue by residue modulo q; return the encoded
        sum.

        `blobs`: encoded ciphertexts by contributor, of `count` residues each.

        Raises RemoteProtocolError: a ciphertext has another size, or a residue is not below q.
        """
        modulus = np.uint64(self.residues.modulus)
        addends = (
            self.residues.parse(blob, sender=name, count=count) for name, blob in blobs.items()
        )
        total = next(addends)
        reduced = np.empty_like(total)
        for addend in addends:
            total += addend
            # For a total below q, total - q wraps around to a large number; so the smaller of the
            # two is the residue modulo q.
            np.subtract(total, modulus, out=reduced)
            np.minimum(total, reduced, out=total)
        return self.residues.pack(total)

    def decrypt(
        self,
        context: SealContext,
        blobs: Sequence[bytes],
        vectors: int,
        *,
        sender: str,
        last_slots: int | None = None,
    ) -> NDArray[Any]:
        """Decrypt ciphertexts; return their numbers joined in order: S numbers of each ciphertext,
        but only `last_slots` of the last one.

        Args:
            context: SEAL's objects with the receiver's secret key.
            blobs: encoded ciphertexts.
            vectors: V, the number of ciphertexts that there must be.
            sender: the party that sent them, for errors.
            last_slots: how many coefficients of the last ciphertext's c0 were sent; None: all.

        Raises RemoteProtocolError: there is another number of ciphertexts, their residues are
        wrong, or SEAL cannot decrypt them.
        """
        if context.decryptor is None:
            raise RemoteProtocolError(f"SEAL cannot decrypt the sum from {sender}: no secret key")
        plain = seal.Plaintext()
        rows = []
        ciphertexts = self.load_ciphertexts(blobs, vectors, sender=sender, last_slots=last_slots)
        refusal = f"SEAL cannot decrypt the sum from {sender}"
        with _seal_errors_as(refusal), open_scratch_file() as scratch:
            for ciphertext in ciphertexts:
                context.decryptor.decrypt(ciphertext, plain)
                rows.append(self.decode(plain, scratch))
        # Coefficients of c0 that were not sent were replaced by zeros, and decrypt to noise.
        rows[-1] = rows[-1][:last_slots]
        numbers = np.concatenate(rows)
        if not np.isfinite(numbers).all():
            raise RemoteProtocolError(f"the sum from {sender} decrypts to infinite numbers")
        return numbers

    def load_ciphertexts(
        self, blobs: Sequence[bytes], vectors: int, *, sender: str, last_slots: int | None = None
    ) -> list[Any]:
        """Return encoded ciphertexts as ciphertexts of SEAL.

        Args:
            blobs: the encoded ciphertexts.
            vectors: the number of ciphertexts that there must be.
            sender: the peer that sent them, for errors.
            last_slots: how many coefficients of the last ciphertext's c0 were sent; None: all.

        Raises RemoteProtocolError: there is another number of ciphertexts, or their residues are
        wrong.
        """
        _require_count(blobs, vectors, sender)
        counts = self._count_sent(vectors, last_slots)
        parsed_ciphertexts = [
            self._restore_zeros(self.residues.parse(blob, sender=sender, count=count))
            for blob, count in zip(blobs, counts, strict=True)
        ]
        loaded = [seal.Ciphertext(self._seal) for _ in blobs]
        refusal = f"SEAL refuses a ciphertext from {sender}"
        with _seal_errors_as(refusal), open_scratch_file() as scratch:
            for ciphertext, numbers in zip(loaded, parsed_ciphertexts, strict=True):
                self.ciphertext_form.load_numbers(
                    ciphertext, self._seal, numbers.tobytes(), scratch
                )
        return loaded

    def _restore_zeros(self, sent: Numbers) -> Numbers:
        """Return all 2N residues of a ciphertext (c0, c1), with zeros in place of the residues of
        c0 that were not sent.

        `sent`: the first residues of c0, then all N residues of c1.
        """
        if len(sent) == self.residues.count:
            return sent
        c0_start = sent[: -self.degree]
        c1 = sent[-self.degree :]
        numbers = np.zeros(self.residues.count, dtype=_WORD)
        numbers[: len(c0_start)] = c0_start
        numbers[self.degree :] = c1
        return numbers


def _require_count(blobs: Sequence[bytes], vectors: int, sender: str) -> None:
    """Raise RemoteProtocolError unless `sender` sent `vectors` ciphertexts, as many as the shape of
    its values needs, and at least one.
    """
    if len(blobs) != vectors or not vectors:
        raise RemoteProtocolError(
            f"{sender} sent {len(blobs)} ciphertexts, expected {vectors} for its shape"
        )


@contextmanager
def _seal_errors_as(refusal: str) -> Iterator[None]:
    """Turn the exceptions that SEAL raises in the `with` block, because of a peer's numbers, into a
    RemoteProtocolError with the text `refusal`.
    """
    try:
        yield
    except RemoteProtocolError:
        raise
    except _SEAL_ERRORS as error:
        raise RemoteProtocolError(refusal) from error
