"""The three roles that every sum under homomorphic encryption shares.

Run by: the active (`KeyHolder`: makes the key pair, keeps its secret half, decrypts only
the sum, and none after one that it refused), the passives (`Encrypter`: public key; with pairwise
masks a seed with each other passive, too), the aggregator (`CiphertextAdder`: no key at all, 32
bytes of fingerprint). What is encrypted, and under which scheme, says the `HomomorphicSum` that
makes the roles.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import derive_key, fresh_key, keystream
from apfed_protocols.sums.fixed_point import EXACT_FLOAT_BITS, FixedPoint, Packing
from apfed_protocols.sums.frames import AgreedFrames, Frame
from apfed_protocols.sums.interface import (
    ALTERED_CIPHERTEXT,
    FloatArray,
    Reading,
    StepBinding,
    SumLeaks,
    format_sum_name,
)
from apfed_protocols.sums.masked import PairwiseSeeds
from apfed_protocols.sums.roles import (
    NoSetup,
    OneRoundAggregator,
    SecureSum,
    SumContributor,
    SumReceiver,
)
from apfed_protocols.sums.seal_cipher import (
    DEGREE,
    SMALL_DEGREE,
    ScratchFile,
    SealCipher,
    SealContext,
    SealForm,
    open_scratch_file,
)

RESTS_ON_THE_KEY = (
    "ring learning with errors at 128-bit security, and an active and an aggregator who do not "
    "work together"
)
LEAKS_WITHOUT_MASKS = SumLeaks(
    contribution=Reading(
        reads="One ciphertext of each passive and step: its size and time, and a digest of what "
        "it answers.",
        protects="Encryption, whose only secret key is at the active. Contributions that answer "
        "different messages are not added.",
        remains="Who takes part, and when. It can alter the sum without being noticed, and leave "
        "passives out of it.",
    ),
    active_and_aggregator="Every single passive's contribution: the active's key decrypts the "
    "ciphertexts that the aggregator receives.",
    single="active and aggregator together, who read each contribution",
    altered="Each reaction to an altered sum tells of one contribution, " + ALTERED_CIPHERTEXT,
)
"""Leaks of a sum without masks, by any scheme whose only secret key is the active's."""
ROUNDING_TOLERANCE = 0.25
"""Distance of a decrypted slot from an integer at which it is refused: half of what rounding could
repair."""
# In standard deviations, each exceeded with probability below 2^-40. A slot of a product of two
# random polynomials is Laplace: exp(-sqrt(2) t). With two such products of equal variance it
# is (1 + t) exp(-2 t).
_CKKS_TAIL_DEVIATIONS = 20.0
_FRESH_TAIL_DEVIATIONS = 15.5
_MAX_SCALE_BITS = 40
Numbers = NDArray[np.uint64]
_WORD = np.dtype("<i8")
RingSize = tuple[int, tuple[int, ...]]
"""N, and the bits of the data prime and of the key-switching prime if any."""
_BFV_RINGS: Sequence[RingSize] = ((SMALL_DEGREE, (54,)), (DEGREE, (56,)), (DEGREE, (60,)))
"""Rings of BFV in order of preference: residues of 54 and of 56 bits travel in 7 bytes, not 8, and
a step of few numbers takes half as many of the smaller ring."""
_CKKS_RINGS: Sequence[RingSize] = ((DEGREE, (60,)), (DEGREE, (60, 49)))
"""The second prime makes encryption slower and less noisy; additions need none. In the smaller ring
two fields a slot hold 16 bits of two contributors and of no more, one field sends more bytes."""
_MAX_POWER_TO_PRIME = 1 + 2**-10
"""Largest ratio of 2^bits to a prime of so many bits."""
# In standard deviations, exceeded with probability below 2^-40: a coefficient is close to
# Gaussian, and the margin is for free.
_BFV_TAIL_DEVIATIONS = 10.0
_LOW_21_BITS = np.uint64(2**21 - 1)
# Bytes 0 to 254 give each remainder modulo 3 exactly 85 times; byte 255 is drawn again.
_FIRST_REJECTED_BYTE = 255
_TERNARY_BY_BYTE = (np.arange(256) % 3 - 1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class SchemeParameters:
    """The parameters of a homomorphic scheme that fit an agreement: sums neither overflow nor drown
    in the scheme's noise.

    Attributes:
        prime_bits: of the data prime and, if there is one, of the key-switching prime.
        scale_or_modulus_bits: log2 of the encoding scale (CKKS) or of the plain modulus t (BFV):
            the most that the noise allows, so that most numbers modulo t are no possible sum, and a
            damaged sum is noticed.
        packing: how integers are placed into the slots of plaintexts.
        degree: N, the ring degree.
        max_slot_error: bound of a decrypted slot's distance from its integer under CKKS, 0 under
            BFV; less than `ROUNDING_TOLERANCE`, exceeded with probability below 2^-40 in one slot.
    """

    prime_bits: tuple[int, ...]
    scale_or_modulus_bits: int
    packing: Packing
    degree: int = DEGREE
    max_slot_error: float = 0.0


@dataclass(frozen=True)
class HomomorphicSum(SecureSum, ABC):
    """A sum under homomorphic encryption: the facts of its scheme, and its roles."""

    cipher_type: ClassVar[type[SealCipher]]
    needs_receiver_key: ClassVar[bool] = True
    needs_other_contributors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise LocalProtocolError if no parameters fit the agreement."""
        super().__post_init__()
        _ = self.parameters  # read only for its exception, if no parameters fit

    @cached_property
    @abstractmethod
    def parameters(self) -> SchemeParameters:
        """Return the parameters, with the packing, that fit the agreement. Raises
        LocalProtocolError: none fit.
        """

    @cached_property
    def cipher(self) -> SealCipher:
        return self.cipher_type(
            self.parameters.prime_bits,
            self.parameters.scale_or_modulus_bits,
            self.parameters.degree,
        )

    @property
    def packing(self) -> Packing:
        return self.parameters.packing

    @property
    def value_bytes(self) -> float:
        """Return the bytes sent per value of a long contribution: the bytes of a ciphertext (two
        polynomials), divided by the number of values in its slots.
        """
        ciphertext_bytes = 2 * self.parameters.degree * self._residue_bytes
        return ciphertext_bytes / (self.packing.slots_per_vector * self.packing.fields_per_slot)

    @property
    def min_bytes(self) -> int:
        """Return the bytes sent for a contribution of one value: one ciphertext (c0, c1). If the
        scheme allows it, only the coefficients of c0 that are in use are sent.
        """
        last_slots = self.count_slots_sent_in_last(1)
        sent_of_c0 = self.parameters.degree if last_slots is None else last_slots
        return (sent_of_c0 + self.parameters.degree) * self._residue_bytes

    @property
    def _residue_bytes(self) -> int:
        """Return the bytes in which a number modulo the data prime is sent."""
        return math.ceil(self.parameters.prime_bits[0] / 8)

    def count_slots_sent_in_last(self, values: int) -> int | None:
        """Return how many slots of the last ciphertext of a contribution of this number of values
        are sent; None: all, since the scheme cannot leave any out.
        """
        return (
            self.packing.count_slots_sent_in_last(values) if self.cipher_type.can_cut_last else None
        )

    def round_slots(self, slots: NDArray[Any]) -> NDArray[np.int64]:
        """Return decrypted slots as integers. Exact schemes decode integers already; approximate
        ones override this.
        """
        return slots.astype(np.int64, copy=False)

    def list_parameters(self) -> Mapping[str, object]:
        """Return the public parameters: ring degree, primes and packing among them."""
        return {
            **super().list_parameters(),
            "poly_degree": self.parameters.degree,
            "primes": list(self.parameters.prime_bits),
            "fields": self.packing.fields_per_slot,
            "field_bits": self.packing.field_bits,
        }

    def make_receiver(self) -> "KeyHolder":
        return KeyHolder(self)

    def make_contributor(self, me: str) -> "Encrypter":
        return Encrypter(self, me)

    def make_aggregator(self) -> "CiphertextAdder":
        return CiphertextAdder(self)

    def add_frames(self, frames: Sequence[Frame]) -> Sequence[bytes]:
        """Add the contributors' ciphertexts, without any key; return the sum, V blobs.

        `frames`: one contribution (message) of each contributor, with V ciphertexts as blobs.
        """
        names = self.agreement.contributors
        values = frames[0].rows * frames[0].columns
        return self.cipher.add_ciphertexts(
            {names[frame.contributor_position]: frame.blobs for frame in frames},
            vectors=self.packing.count_vectors(values),
            last_slots=self.count_slots_sent_in_last(values),
        )


def _parse_key_setup(frames: AgreedFrames, body: bytes, sender: str) -> Frame:
    """Decode the receiver's set-up message, with its public key (for contributors) or only with a
    fingerprint that covers the key (for the aggregator). Raises RemoteProtocolError: another party
    sent the message, or it is malformed.
    """
    holder = frames.agreement.receiver
    if sender != holder:
        raise RemoteProtocolError(f"keys come from {holder}, but {sender} sent a message")
    return frames.parse_setup(body, sender)


class KeyHolder(SumReceiver):
    """The active's role, which holds the secret key; the key is destroyed when a sum is refused."""

    _sum: HomomorphicSum

    def __init__(self, secure_sum: HomomorphicSum) -> None:
        """Make the role with a new key pair; the frames' fingerprint covers its public key."""
        context = secure_sum.cipher.make_key_pair()
        self._key_context: SealContext | None = context
        self._public_key = secure_sum.cipher.pack_public_key(context)
        self._has_started = False
        super().__init__(secure_sum, secure_sum.make_frames(self._public_key), NoSetup())

    def start(self) -> Sequence[Outgoing]:
        """Return the set-up messages: the public key for every contributor, and for the aggregator,
        which must have no key, only the fingerprint (a digest that covers the key). Raises
        LocalProtocolError: called twice, or after a refused sum.
        """
        self._require_no_refusal()
        if self._has_started:
            raise LocalProtocolError("the key of this sum was sent already; start is called once")
        self._has_started = True
        agreement = self._sum.agreement
        with_key = self._frames.pack_setup(self._public_key)
        without_key = self._frames.pack_setup()
        return (
            *(Outgoing(name, with_key) for name in agreement.contributors),
            Outgoing(agreement.aggregator, without_key),
        )

    @property
    def is_finished(self) -> bool:
        return self._has_started

    def _decrypt_sum(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Decrypt the sum in a frame (message); return its real numbers, (rows, columns).

        `binding`: the step and the active's message, which errors name.

        Raises RemoteProtocolError: the sum does not decrypt, lies outside the range of
        contributions, or has padding slots that are not zero, so that it was altered.
        """
        described = self._sum
        values = frame.rows * frame.columns
        assert self._key_context is not None
        slots = described.cipher.decrypt(
            self._key_context,
            frame.blobs,
            described.packing.count_vectors(values),
            sender=described.agreement.aggregator,
            last_slots=described.count_slots_sent_in_last(values),
        )
        numbers = described.packing.unpack_fields(described.round_slots(slots))
        padding = numbers[values:]
        if padding.any():
            raise self._make_range_error(binding)
        return self._dequantise_sum(numbers[:values].reshape(frame.shape), binding)

    def _forget_secrets(self) -> None:
        self._key_context = None


class Encrypter(SumContributor):
    """A passive's role, which encrypts under the receiver's public key, with pairwise masks below
    the encryption where the sum has some.
    """

    _sum: HomomorphicSum

    def __init__(self, secure_sum: HomomorphicSum, me: str) -> None:
        """Make the role of `me`, before it has the public key; under pairwise masks its set-up also
        agrees a seed with each other contributor.
        """
        frames = secure_sum.make_frames()
        others = [name for name in secure_sum.agreement.contributors if name != me]
        has_masks = secure_sum.masks == "pairwise"
        self._seeds = PairwiseSeeds(me, others, frames) if has_masks else None
        self._key_context: SealContext | None = None
        super().__init__(secure_sum, me, frames, self._seeds or NoSetup())

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the set-up message with the receiver's public key or, under masks, with another
        contributor's mask key; return no messages, since none follow.

        Raises RemoteProtocolError: the sender sent a key before, or the key does not match the
        fingerprint in the message (a digest of agreement, parameters and key).
        """
        if self._seeds is not None and sender != self._sum.agreement.receiver:
            return self._seeds.receive(sender, body)
        if self._key_context is not None:
            raise RemoteProtocolError(f"{sender} sent a second public key to {self.me}")
        frame = _parse_key_setup(self._frames, body, sender)
        if len(frame.blobs) != 1:
            raise RemoteProtocolError(f"{sender} sent {len(frame.blobs)} public keys, expected one")
        (public_key,) = frame.blobs
        frames_with_key = self._sum.make_frames(public_key)
        if frames_with_key.fingerprint != frame.fingerprint:
            raise RemoteProtocolError(
                f"the public key from {sender} does not match its fingerprint; the parties hold "
                "different parameters"
            )
        self._adopt_key(frames_with_key, public_key, sender)
        return ()

    def _adopt_key(self, frames: AgreedFrames, public_key: bytes, sender: str) -> None:
        """Use the receiver's public key from now on, and `frames`, whose fingerprint covers this
        key. Raises RemoteProtocolError, which names `sender`: the bytes are no public key.
        """
        # Before any attribute is set, since it may raise.
        context = self._sum.cipher.make_public_context(public_key, sender=sender)
        self._frames = frames
        self._key_context = context

    def _export_secrets(self) -> dict[str, Any]:
        """Return the public key ("key") and the seeds of pairwise masks ("seeds") in hexadecimal,
        None for what this role does not have, and forget them here.
        """
        public_key = None
        if self._key_context is not None:
            public_key = self._sum.cipher.pack_public_key(self._key_context).hex()
        self._key_context = None
        seeds = None if self._seeds is None else self._seeds.export_secrets()
        return {"key": public_key, "seeds": seeds}

    def _import_secrets(self, state: Mapping[str, Any]) -> None:
        """Restore the public key and the mask seeds that `_export_secrets` returned."""
        if state["key"] is not None:
            public_key = bytes.fromhex(state["key"])
            self._adopt_key(self._sum.make_frames(public_key), public_key, self.me)
        if self._seeds is not None:
            self._seeds.import_secrets(state["seeds"])

    @property
    def is_finished(self) -> bool:
        return self._key_context is not None and self._setup.is_finished

    def _require_setup(self) -> None:
        """Raise LocalProtocolError before the public key and all mask keys have arrived."""
        self._require_key()
        if self._seeds is not None:
            self._seeds.require_completion()

    def _require_key(self) -> SealContext:
        """Return the context with the receiver's public key. Raises LocalProtocolError: the key has
        not arrived yet.
        """
        if self._key_context is None:
            raise LocalProtocolError(f"{self.me} has no public key yet; run the setup first")
        return self._key_context

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Pack a contribution's integers into V vectors of S slots, add the pairwise masks if the
        sum has some, and encrypt; return one encoded ciphertext for each vector.

        `numbers_BD`: B rows of D fixed-point integers. `binding`: the step and the active's
        message, from which the masks are derived.
        """
        context = self._require_key()
        slots_VS = self._sum.packing.pack_fields(numbers_BD)
        if self._seeds is not None:
            # Modulo 2^64; the cipher reduces the result modulo t, which divides 2^64.
            self._seeds.add_cancelling_masks(binding, slots_VS.view(np.uint64))
        return self._sum.cipher.encrypt(
            context, slots_VS, self._sum.count_slots_sent_in_last(numbers_BD.size)
        )


class CiphertextAdder(OneRoundAggregator):
    """The aggregator's role: it adds ciphertexts and holds no key, only the fingerprint that covers
    the receiver's public key.
    """

    def __init__(self, secure_sum: HomomorphicSum) -> None:
        """Make the role, before the fingerprint has arrived."""
        super().__init__(secure_sum.make_frames(), secure_sum.add_frames)
        self._is_set_up = False

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the receiver's set-up message, with a fingerprint (a digest of agreement, parameters
        and public key) that all contributions must carry; return no messages, since none follow.

        Raises RemoteProtocolError: such a message came before, or this one has a key, which the
        aggregator must not have.
        """
        if self._is_set_up:
            raise RemoteProtocolError(f"{sender} sent a second setup to the aggregator")
        frame = _parse_key_setup(self._frames, body, sender)
        if frame.blobs:
            raise RemoteProtocolError(f"{sender} sent a key to the aggregator, who must hold none")
        self._frames.fingerprint = frame.fingerprint
        self._is_set_up = True
        return ()

    @property
    def is_finished(self) -> bool:
        return self._is_set_up

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        if not self._is_set_up:
            raise LocalProtocolError("the aggregator has no fingerprint yet; run the setup first")
        return super().combine(bodies, binding_digest)


def compute_fresh_noise(contributor_count: int, degree: int = DEGREE) -> float:
    """Return the standard deviation of the encryption noise in one coefficient of a sum of fresh
    ciphertexts, in a ring of degree N = `degree`.

    A fresh ciphertext has the error u e + e0 + e1 * s, where u and the secret key s are ternary,
    and e, e0, e1 have variance 21/2 (SEAL's centred binomial). Its variance is 10.5 (1 + 4N/3) in
    each coefficient (Cheon et al. 2017, section 3.4).

    `contributor_count`: how many ciphertexts are added.
    """
    return math.sqrt(contributor_count * 10.5 * (1 + 4 * degree / 3))


def compute_slot_noise(contributor_count: int) -> float:
    """Return the standard deviation of the noise in a decrypted CKKS slot at scale 1, if
    encryption uses a key-switching prime.

    SEAL divides a fresh public-key ciphertext by the key-switching prime, which leaves the rounding
    error e0 + e1 * s, with e0, e1 uniform in [-1/2, 1/2] and the secret key s ternary. Its variance
    is (1 + 2N/3) / 12 in each coefficient, in a ring of degree N; a slot's real part adds N / 2
    coefficients (Cheon et al. 2017, section 3.4). Measured for one ciphertext: 6.8e2.

    `contributor_count`: how many ciphertexts are added.
    """
    return math.sqrt(contributor_count * DEGREE / 2 * (1 + 2 * DEGREE / 3) / 12)


def compute_fresh_slot_noise(contributor_count: int) -> float:
    """Return the standard deviation of the noise in a decrypted CKKS slot at scale 1, without a
    key-switching prime (measured 1.07e4 at M = 1).
    """
    return compute_fresh_noise(contributor_count) * math.sqrt(DEGREE / 2)


def _compute_max_slot(fixed_point: FixedPoint, fields: int) -> int:
    """Return the largest magnitude of a slot of the sum, which holds one or two fields (integers of
    the sum side by side, see `Packing`).
    """
    return fixed_point.max_sum * (1 + (2**fixed_point.field_bits if fields == 2 else 0))


FitParameters = Callable[[FixedPoint, int, RingSize], SchemeParameters | None]
"""Returns the parameters for this number of fields a slot in this ring; None if they do not fit."""


def _find_parameters(
    fixed_point: FixedPoint, fit_parameters: FitParameters, rings: Sequence[RingSize]
) -> SchemeParameters:
    """Return the parameters of a homomorphic scheme that fit the values of a sum: in the
    first ring in which two fields (integers) fit a slot, or else in the first ring in which one
    field does.

    Args:
        fixed_point: the format of the values of the sum.
        fit_parameters: returns those for a number of fields in a ring, or None if they do not fit.
        rings: degree and bits of the primes of candidate rings, in order of preference.

    Raises LocalProtocolError: no ring fits; the error says how many bits of a value would fit.
    """
    # Two fields a slot halve the bytes, so they are tried in every ring before one field.
    for fields, ring in itertools.product((2, 1), rings):
        parameters = fit_parameters(fixed_point, fields, ring)
        if parameters is not None:
            return parameters
    # For the error alone: the largest number of bits that one field in some ring holds.
    smaller_formats = (
        fixed_point.replace_bits(bits) for bits in range(fixed_point.bits - 1, 1, -1)
    )
    fitting_bits = next(
        smaller.bits
        for smaller in smaller_formats
        if any(fit_parameters(smaller, 1, ring) for ring in rings)
    )
    _, last_primes = rings[-1]
    raise LocalProtocolError(
        f"sums of {fixed_point.contributor_count} values of {fixed_point.bits} bits do not fit a "
        f"data prime of {last_primes[0]} bits; {fitting_bits} bits would"
    )


def solve_ckks(fixed_point: FixedPoint) -> SchemeParameters:
    """Choose the parameters for CKKS (primes, scale and packing): the sum's slots must not
    overflow, and their noise must stay below `ROUNDING_TOLERANCE`, so that they round to the right
    integers.

    `fixed_point`: the format of the values of the sum.

    Raises LocalProtocolError: no parameters fit.
    """
    return _find_parameters(fixed_point, _fit_ckks, _CKKS_RINGS)


def _fit_ckks(fixed_point: FixedPoint, fields: int, ring: RingSize) -> SchemeParameters | None:
    """Return the CKKS parameters for this number of fields (integers) in a slot, in this ring; None
    if they do not fit.
    """
    _, primes = ring
    # No coefficient of an encoded polynomial exceeds the scale times the largest slot.
    largest_coefficient = 2 ** (primes[0] - 1) / _MAX_POWER_TO_PRIME
    largest_scale = largest_coefficient / _compute_max_slot(fixed_point, fields)
    scale_bits = min(_MAX_SCALE_BITS, math.floor(math.log2(largest_scale)))
    if len(primes) == 1:
        noise = _FRESH_TAIL_DEVIATIONS * compute_fresh_slot_noise(fixed_point.contributor_count)
    else:
        noise = _CKKS_TAIL_DEVIATIONS * compute_slot_noise(fixed_point.contributor_count)
    deviation = noise * 2.0**-scale_bits
    field_bits = fixed_point.field_bits
    if fields * field_bits > EXACT_FLOAT_BITS or deviation >= ROUNDING_TOLERANCE:
        return None
    packing = Packing(fields_per_slot=fields, field_bits=field_bits, slots_per_vector=DEGREE // 2)
    return SchemeParameters(
        prime_bits=primes,
        scale_or_modulus_bits=scale_bits,
        packing=packing,
        max_slot_error=deviation,
    )


class CkksCipher(SealCipher):
    """The CKKS scheme, which encrypts N / 2 real slots at a scale of 2^bits in a ring of degree N,
    modulo primes of the bits `primes`.
    """

    seal_type = seal.SCHEME_TYPE.CKKS

    def __init__(self, primes: tuple[int, ...], bits: int, degree: int = DEGREE) -> None:
        super().__init__(primes, bits, degree)
        self._encoder = seal.CKKSEncoder(self._seal)
        self.slots = degree // 2

    def _set_scheme_parameters(self, parameters: Any) -> None:
        """Do nothing: the scale belongs to the encoding."""

    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None:
        self._encoder.encode(numbers_S.astype(np.float64).tolist(), 2.0**self._bits, plain)

    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[np.float64]:
        return np.array(self._encoder.decode_double(plain), dtype=np.float64)


def round_to_integers(slots: NDArray[np.float64], *, sender: str) -> NDArray[np.int64]:
    """Return decrypted CKKS slots rounded to integers, which removes the scheme's noise. Raises
    RemoteProtocolError, which names `sender`: a slot is further from an integer than noise can move
    it, so the sum was altered.
    """
    nearest = np.rint(slots)
    distance = np.abs(slots - nearest).max()
    if distance >= ROUNDING_TOLERANCE or np.abs(nearest).max() > 2.0**EXACT_FLOAT_BITS:
        raise RemoteProtocolError(
            f"the sum from {sender} does not decrypt to integers; it was altered, or encrypted "
            "under another key or scale"
        )
    return nearest.astype(np.int64)


@dataclass(frozen=True)
class CkksSum(HomomorphicSum):
    """A sum under CKKS with two fixed-point fields a slot.

    Protects from: a curious aggregator, which sees ciphertexts; a curious active, which sees the
    sum of all passives and no single contribution; an active that sends different representations
    to different passives, as the aggregator adds only what answers one message. Not from: the
    active and the aggregator together, who could decrypt one contribution; M - 1 passives and the
    active together; an aggregator that alters the sum, or leaves contributions out of it.

    The decoded sum is the exact integer sum: rounding removes CKKS's noise, and with it what
    decryptions of approximate schemes reveal about the key (Li and Micciancio 2021). Scheme: Cheon,
    Kim, Kim and Song 2017, N / 2 real slots.

    Raises LocalProtocolError: a sum that could overflow.
    """

    scheme: ClassVar[str] = "ckks"
    unsafe: ClassVar[bool] = False
    name: ClassVar[str] = "ckks"
    rests_on: ClassVar[str] = RESTS_ON_THE_KEY
    leaks: ClassVar[SumLeaks] = LEAKS_WITHOUT_MASKS
    cipher_type: ClassVar[type[SealCipher]] = CkksCipher

    @cached_property
    def parameters(self) -> SchemeParameters:
        return solve_ckks(self.fixed_point)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "scale_bits": self.parameters.scale_or_modulus_bits}

    def round_slots(self, slots: NDArray[Any]) -> NDArray[np.int64]:
        return round_to_integers(slots, sender=self.agreement.aggregator)


def draw_ternary(count: int, key: bytes | None = None) -> NDArray[np.int64]:
    """Draw `count` secret numbers, uniform on {-1, 0, 1}: random bytes modulo 3, where the byte 255
    is rejected, so that each remainder is equally likely.

    `key`: 32 bytes of which the numbers are a function; None: they are random.
    """
    accepted_bytes = np.zeros(0, dtype=np.uint8)
    while len(accepted_bytes) < count:
        # A 256th of the bytes is rejected on average. With a 28th and 32 bytes more than needed, a
        # second round is very rare.
        draw_key = (
            fresh_key() if key is None else derive_key(key, len(accepted_bytes).to_bytes(8, "big"))
        )
        stream = keystream(draw_key, b"ternary", length=count + count // 28 + 32)
        drawn_bytes = np.frombuffer(stream, dtype=np.uint8)
        accepted_bytes = np.concatenate(
            (accepted_bytes, drawn_bytes[drawn_bytes < _FIRST_REJECTED_BYTE])
        )
    numbers: NDArray[np.int64] = _TERNARY_BY_BYTE[accepted_bytes[:count]]
    return numbers


def draw_centred_binomial(count: int, key: bytes | None = None) -> NDArray[np.int64]:
    """Draw `count` secret numbers, each the difference of two sums of 21 fair bits: -21 to 21.

    `key`: 32 bytes of which the numbers are a function; None: they are random.
    """
    draw_key = fresh_key() if key is None else key
    words = np.frombuffer(keystream(draw_key, b"binomial", length=8 * count), dtype="<u8")
    first_sums = np.bitwise_count(words & _LOW_21_BITS)
    second_sums = np.bitwise_count((words >> np.uint64(32)) & _LOW_21_BITS)
    numbers: NDArray[np.int64] = first_sums.view(np.int8).astype(np.int64) - second_sums
    return numbers


class BfvCipher(SealCipher):
    """The BFV scheme, which encrypts N coefficients modulo t = 2^bits, with randomness drawn here.

    SEAL draws each coefficient of u, e0 and e1 on its own behind a lock, which is over half of the
    time of an encryption. Here they come in bulk from AES-256 in counter mode, fresh keys of the
    operating system for each contribution, with SEAL's distributions: u uniform on {-1, 0, 1}; e
    centred binomial of 21 pairs of bits, variance 21/2. The rest is SEAL's: parameters, keys, the
    products with the public key, decryption. A ciphertext is

        (c0, c1) = (b u + e0 + q m / t, a u + e1)  under the public key (b, a):

    Fan and Vercauteren 2012, section 3 (after Lyubashevsky, Peikert, Regev 2010). The ring has
    degree N = `degree`, its data prime q the bits `primes`.
    """

    seal_type = seal.SCHEME_TYPE.BFV

    can_cut_last = True

    def __init__(self, primes: tuple[int, ...], bits: int, degree: int = DEGREE) -> None:
        """Make SEAL's context for `primes` (bits of the data prime q), `bits` (log2 of the plain
        modulus t) and the ring degree N = `degree`.
        """
        super().__init__(primes, bits, degree)
        self.slots = degree
        # As t is a power of two, numbers are reduced modulo t by a mask.
        self._mask = (1 << bits) - 1
        self._half_modulus = 1 << (bits - 1)
        self._plaintext_form = SealForm.from_sample(seal.Plaintext(f"1x^{degree - 1}"), degree)
        self._modulus = self.residues.modulus
        # q / t as an integer and a fraction, so that q m / t is computed in 64 bits.
        plain_modulus = 1 << bits
        self._scale_quotient = self._modulus // plain_modulus
        self._scale_fraction = (self._modulus % plain_modulus) / plain_modulus
        self._level = self._seal.first_parms_id()

    def _set_scheme_parameters(self, parameters: Any) -> None:
        """Set the plain modulus t."""
        parameters.set_plain_modulus(1 << self._bits)

    def encode(self, numbers_S: NDArray[np.int64], plain: Any, scratch: ScratchFile) -> None:
        """Set SEAL's plaintext `plain` to the polynomial whose S = N coefficients are these
        integers modulo t. `scratch`: the file through which SEAL loads it.
        """
        words_S = (numbers_S & self._mask).astype(_WORD, copy=False)
        self._plaintext_form.load_numbers(plain, self._seal, words_S.tobytes(), scratch)

    def decode(self, plain: Any, scratch: ScratchFile) -> NDArray[np.int64]:
        """Return the N coefficients of SEAL's plaintext `plain` as integers in [-t/2, t/2), where t
        is the plain modulus. `scratch`: the file through which SEAL saves it.
        """
        count = plain.coeff_count()  # SEAL leaves out zeros of the highest powers
        content = SealForm.decompress_object(scratch.save(plain))
        words = np.frombuffer(content[-_WORD.itemsize * count :], dtype=_WORD)
        numbers = np.zeros(self.slots, dtype=np.int64)
        numbers[:count] = words
        return ((numbers + self._half_modulus) & self._mask) - self._half_modulus

    def encrypt(
        self, context: SealContext, slots_VS: NDArray[np.int64], last_slots: int | None = None
    ) -> list[bytes]:
        """Encrypt each row of N integers modulo t as one ciphertext (c0, c1) of 2N residues.

        Args:
            context: SEAL's objects for the receiver's public key.
            slots_VS: V rows of S = N integers.
            last_slots: how many coefficients of the last ciphertext's c0 are sent: those that hold
                integers. None: all N. Coefficients of c1 are all sent.
        """
        ciphertexts = self._encrypt_zeros(context, len(slots_VS))
        for ciphertext, slots_S in zip(ciphertexts, slots_VS, strict=True):
            c0_N = ciphertext[: self.slots]
            c0_N[:] = self._reduce_numbers(c0_N.view(np.int64) + self._scale_integers(slots_S))
        blobs = [self.residues.pack(ciphertext) for ciphertext in ciphertexts[:-1]]
        last_c0 = ciphertexts[-1][: self.slots]
        last_c1 = ciphertexts[-1][self.slots :]
        return [*blobs, self.residues.pack(np.concatenate((last_c0[:last_slots], last_c1)))]

    def _encrypt_zeros(self, context: SealContext, count: int) -> Numbers:
        """Return V = `count` encryptions of zero, 2N residues each, (count, 2N). An encryption of
        zero under the public key (b, a) is (b u + e0, a u + e1) modulo q, with random ternary u and
        small errors e0, e1; N is the ring degree.

        `context`: SEAL's objects for the public key.
        """
        u_VN = draw_ternary(count * self.slots).reshape(count, -1)
        # First the errors (e0, e1) of each ciphertext, to which its product is added in place. R is
        # 2N, the residues of a ciphertext.
        ciphertexts_VR = draw_centred_binomial(2 * count * self.slots).reshape(count, -1)
        u = seal.Plaintext()
        product = seal.Ciphertext(self._seal)
        with open_scratch_file() as scratch:
            for u_N, ciphertext_R in zip(u_VN, ciphertexts_VR, strict=True):
                self.encode(u_N, u, scratch)
                self._evaluator.transform_to_ntt_inplace(u, self._level)
                self._evaluator.multiply_plain(context.public_key.data(), u, product)
                self._evaluator.transform_from_ntt_inplace(product)
                product_R = self.ciphertext_form.extract_numbers(product, scratch)
                ciphertext_R += product_R.view(np.int64)
        return self._reduce_numbers(ciphertexts_VR)

    def _scale_integers(self, integers_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Scale the N coefficients of a message from the plain modulus t to the data prime q: for
        each integer m modulo t return q m / t, to within one and below q.
        """
        m_N = integers_N & self._mask
        # q / t is an integer and a fraction (see `__init__`).
        fraction_N = (m_N * self._scale_fraction).astype(np.int64)
        scaled_N: NDArray[np.int64] = m_N * self._scale_quotient + fraction_N
        return scaled_N

    def _reduce_numbers(self, numbers: NDArray[np.int64]) -> Numbers:
        """Reduce residues in [-q, 2q) modulo the data prime q, in place, without branches."""
        numbers -= self._modulus
        for _ in range(2):
            # The sign bit spread over the word selects q for negative numbers, else 0.
            numbers += (numbers >> 63) & self._modulus
        return numbers.view(np.uint64)


def solve_bfv(fixed_point: FixedPoint) -> SchemeParameters:
    """Choose the parameters for BFV (prime, plain modulus and packing): the sum must not overflow
    the plain modulus, and its noise must be so small that decryption is exact.

    `fixed_point`: the format of the values of the sum.

    Raises LocalProtocolError: no parameters fit.
    """
    return _find_parameters(fixed_point, _fit_bfv, _BFV_RINGS)


def _fit_bfv(fixed_point: FixedPoint, fields: int, ring: RingSize) -> SchemeParameters | None:
    """Return the BFV parameters for this number of fields (integers) in a coefficient, in this
    ring; None if they do not fit.
    """
    degree, primes = ring
    # Decryption is exact while the noise of a coefficient, rounding of q m / t included
    # (1 or less for each addend), stays below q / 2t. (Fan and Vercauteren 2012, lemma 1.)
    contributors = fixed_point.contributor_count
    field_bits = fixed_point.field_bits
    noise = _BFV_TAIL_DEVIATIONS * compute_fresh_noise(contributors, degree) + contributors
    plain_bits = math.floor(math.log2(2 ** (primes[0] - 1) / _MAX_POWER_TO_PRIME / noise))
    overflows = 2 * _compute_max_slot(fixed_point, fields) >= 2**plain_bits
    if overflows or fields * field_bits > EXACT_FLOAT_BITS:
        return None
    packing = Packing(fields_per_slot=fields, field_bits=field_bits, slots_per_vector=degree)
    return SchemeParameters(
        prime_bits=primes, scale_or_modulus_bits=plain_bits, packing=packing, degree=degree
    )


@dataclass(frozen=True)
class BfvSum(HomomorphicSum):
    """An exact sum with one prime and up to two fixed-point fields a coefficient.

    Protects from the same as `CkksSum`. For sums, in which nothing is multiplied, slots buy
    nothing: the integers are the coefficients of the message polynomial, with one prime q and a
    plain modulus t = 2^k. That is BFV (Brakerski 2012, Fan and Vercauteren 2012), and CKKS (Cheon
    et al. 2017, section 3.4) with the message above the noise and no canonical embedding.

    Raises LocalProtocolError: a sum that could overflow.
    """

    scheme: ClassVar[str] = "bfv"
    unsafe: ClassVar[bool] = False
    name: ClassVar[str] = "bfv"
    rests_on: ClassVar[str] = RESTS_ON_THE_KEY
    leaks: ClassVar[SumLeaks] = LEAKS_WITHOUT_MASKS
    cipher_type: ClassVar[type[SealCipher]] = BfvCipher

    @cached_property
    def parameters(self) -> SchemeParameters:
        return solve_bfv(self.fixed_point)

    def list_parameters(self) -> Mapping[str, object]:
        return {**super().list_parameters(), "plain_bits": self.parameters.scale_or_modulus_bits}


@dataclass(frozen=True)
class MaskedBfvSum(BfvSum):
    """The same over masks that cancel in the sum, modulo t: no single key opens a contribution.

    Protects also from a curious active and a curious aggregator together, as long as two passives
    are honest (a decrypted contribution is uniform modulo t); an active that sends different
    representations to different passives gets uniform noise. Not from: M - 1 passives and the
    active together; a passive that falls silent (the step then has no sum); an aggregator that adds
    a constant to the sum.
    """

    masks: ClassVar[str] = "pairwise"
    name: ClassVar[str] = format_sum_name(BfvSum.scheme, masks)
    needs_other_contributors: ClassVar[bool] = True
    rests_on: ClassVar[str] = (
        "ring learning with errors at 128-bit security or, should active and aggregator work "
        "together, X25519 and AES-256 and two passives who tell their seeds to nobody"
    )
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="One ciphertext of each passive and step: its size and time.",
            protects="BFV encryption, whose only secret key is at the active, over masks that the "
            "passives share in pairs. The masks cancel only if all answer the same "
            "message.",
            remains="Who takes part, and when. It can alter the sum without being noticed.",
        ),
        active_and_aggregator="The sum only: the masks among the passives remain.",
        altered="Each reaction to an altered sum tells of a sum, " + ALTERED_CIPHERTEXT,
    )
