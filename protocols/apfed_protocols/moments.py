"""The noisy moment of a sum of votes: M = s^T (V_1 + ... + V_P) + noise, opened to the active.

Run by: the active (`MomentReceiver`, holds signs s), each passive (`MomentContributor`, holds votes
V_p), the aggregator (`MomentCombiner`) and a dealer without data (`MomentDealer`). Protects: every
vote from the active, which learns M and nothing else, and from all others; the signs from all.
Against a malicious active, too: whatever it sends, what multiplies one person's votes is a vector
of d signs, so the sensitivity to one person (`MomentAgreement.sensitivity`) holds by construction.
Does not protect M from an aggregator, a dealer or a passive that deviates. Links must be sealed
(`apfed_protocols.seal`).

Who learns what, alone and together, stands in docs/votes-protocols.md. A further moment about the
same people is a further release: passives charge each, draw new noise, and refuse a list that names
a person twice.

Setup: passives agree seeds of masks in pairs and with the active (`apfed_protocols.sums.masked`).
Then, in the ring Z_q, q = 2^32 or 2^64, with U people, of which N in a block, d features, K columns
of votes, T = 2^bits steps in a vote of 1:

1. dealer -> active: alpha (a seed), and c in blocks; dealer -> aggregator: B and c' (two seeds);
   c_ijk + c'_ijk = alpha_ij B_ik.
2. passive p -> aggregator: V_p and its noise N_p, each under masks that cancel in the sum and one
   more shared with the active; they add up to W = V + R and N + Q, R and Q known to the active.
3. active -> aggregator: the signs e_ij = s_ij alpha_ij, one bit each.
4. aggregator -> active, once, for these e alone:
   F = W - B  and  A_jk = sum_i e_ij c'_ijk + (N + Q)_jk.
5. active: M_jk = A_jk - Q_jk + sum_i e_ij c_ijk + sum_i s_ij (F_ik - R_ik). Correct, since
   sum_i e_ij (c + c')_ijk = sum_i s_ij B_ik, and F - R + B = V.

Why the active learns M only, whatever e it sends. Put sigma_ij = e_ij alpha_ij: signs, fixed by
what it holds and sends. c' and B are uniform and independent of alpha and W, so c = alpha B - c' is
uniform and independent of (alpha, B, W), and then F = W - B is uniform and independent of
(alpha, c, W): together they tell nothing of W. The rest of its view is A. With B = W - F and
W = V + R
   A_jk = sum_i e_ij (alpha_ij B_ik - c_ijk) + (N + Q)_jk
        = [sum_i sigma_ij V_ik + N_jk] + sum_i sigma_ij (R_ik - F_ik) - sum_i e_ij c_ijk + Q_jk.
All but the bracket is in the view already; the bracket is M for the signs sigma. So a simulator
that is given the bracket draws alpha, c and F uniformly and computes A: the same distribution
(where uniform stands for AES-256 in counter mode under keys that the active does not hold). It
holds for any choice of e, also one made after seeing c and F. A second answer for another e would
open a second moment with the same noise: the aggregator answers once.

Why nobody else learns anything: e is a one-time pad of s under alpha, which the aggregator does not
hold; each contribution, and so W and N + Q, is under masks shared with the active; the dealer and
the passives are sent nothing but public keys.

The correlation is that of Beaver (CRYPTO 1991) with signs in place of one factor; masks after
Bonawitz et al. 2017, section 4.1. The combination is ours.
"""

import hashlib
import json
import math
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import (
    require_all,
    require_names,
    require_people,
    require_ranges,
    take_numpy_integers,
)
from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.noise import MAX_DEVIATION, largest_noise
from apfed_protocols.randomness import KEY_BYTES, ForkCheck, fresh_key, keystream
from apfed_protocols.sums.frames import AgreedFrames, fingerprint
from apfed_protocols.sums.interface import FloatArray, IntArray, StepBinding, SumAgreement
from apfed_protocols.sums.masked import Elements, PairwiseSeeds
from apfed_protocols.sums.roles import NoSetup, Role, Setup

BLOCK_BYTES = 2**22
"""About how many bytes of shares are dealt in one message."""
_SIZES = {"people": 2**24, "features": 2**16, "columns": 2**16}
_MOST_PRODUCTS = 2**20  # d K: a block of 8 people then has at most 64 MiB
# A row of votes may exceed 1 by 2^-20 (rounding of floats): below a step while T is below 2^20.
_MOST_BITS = 18
_TOLERANCE = 2.0**-20
DIGEST_BYTES = 32
_MAGIC = b"MOMF"
_VERSION = 1
_HEADER = struct.Struct(">4sBBHI32s32s")
_FIELDS = ("format", "version", "kind", "contributor", "block", "agreement", "list of people")
_NOBODY = bytes(DIGEST_BYTES)
_PEOPLE = "ordered positions voted on"
PackedSigns = NDArray[np.uint8]
_USED: set[tuple[bytes, str]] = set()
_USING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class MomentAgreement:
    """What all parties fix before one moment; used once, public.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session: names this one moment; names have 1 to 255 bytes in UTF-8.
        receiver, combiner: the active and the aggregator.
        dealer: holds no data, and works with neither of the two.
        contributors: the passives, in the contract's order; two or more.
        people: U, rows of votes; every person has one row.
        features: d, signs that the active holds of each person.
        columns: K, votes in a row.
        noise: deviation of the discrete Gaussian noise that each contributor adds to each value
            of the moment, in steps; None: none, and the active reads the moment itself.
        bits: of fixed point after the point, 1 to 18; a step is 2^-bits.
        signed: votes may be negative, which makes `sensitivity` larger.
        allow_single: permit one contributor, whose votes are then not hidden among others'.
    """

    session: str
    receiver: str
    combiner: str
    dealer: str
    contributors: tuple[str, ...]
    people: int
    features: int
    columns: int
    noise: int | None
    bits: int = 12
    signed: bool = False
    allow_single: bool = False

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        self._require_parties()
        self._require_sizes()

    def _require_parties(self) -> None:
        if type(self.contributors) is not tuple:
            raise LocalProtocolError(
                f"contributors are a tuple of names, got {type(self.contributors).__name__}"
            )
        parties = (self.receiver, self.combiner, self.dealer, *self.contributors)
        require_names("moment", self.session, parties)
        for field in ("signed", "allow_single"):
            if type(getattr(self, field)) is not bool:
                raise LocalProtocolError(f"{field} is True or False, got {getattr(self, field)!r}")
        # The rules on how many contributors there are, and on their names, are those of sums.
        self._masking("rules")

    def _require_sizes(self) -> None:
        ranges = {name: (1, most) for name, most in _SIZES.items()} | {"bits": (1, _MOST_BITS)}
        if self.noise is not None:
            ranges["noise"] = (1, MAX_DEVIATION)
        require_ranges(self, ranges)
        if self.features * self.columns > _MOST_PRODUCTS:
            raise LocalProtocolError(
                f"{self.features} features by {self.columns} columns are more than "
                f"{_MOST_PRODUCTS} values; open them in parts"
            )

    @cached_property
    def digest(self) -> bytes:
        canonical = json.dumps(asdict(self), sort_keys=True).encode()
        return hashlib.sha256(b"secure-apfed moment agreement v1" + canonical).digest()

    @cached_property
    def masking(self) -> SumAgreement:
        """The agreement under which contributors and receiver share masks; of this moment alone."""
        return self._masking(f"moment {self.digest.hex()}")

    def _masking(self, session: str) -> SumAgreement:
        return SumAgreement(
            session=session,
            receiver=self.receiver,
            combiner=self.combiner,
            contributors=self.contributors,
            clip_norm=1.0,
            allow_single=self.allow_single,
        )

    @property
    def vote_steps(self) -> int:
        """T: the largest sum of magnitudes in one contributed row, in steps."""
        return int(2**self.bits)

    @property
    def limit(self) -> int:
        """The largest magnitude of an opened value in steps, P (U T + the noise's tail)."""
        return len(self.contributors) * (self.people * self.vote_steps + self.largest_noise)

    @property
    def largest_noise(self) -> int:
        return largest_noise(self.noise or 0)

    @property
    def word(self) -> np.dtype[np.unsignedinteger[Any]]:
        """A ring element on the wire: of 32 bits where every opened value fits, else of 64.

        Whatever an agreement may say fits 64: at most 1024 (2^24 2^18 + 13.4 * 2^24), below 2^53.
        """
        return np.dtype("<u4") if self.limit < 2**31 else np.dtype("<u8")

    @property
    def scale(self) -> float:
        """What one step of an opened value is worth in Phi^T V, Phi = s / sqrt(d)."""
        return float(1 / (self.vote_steps * math.sqrt(self.features)))

    def sensitivity(self) -> float:
        """How far one person's votes at one passive move the moment, in steps, L2 over d x K.

        Votes v instead of v' change it by s_i (v - v')^T, of norm sqrt(d) |v - v'|, whatever signs
        s_i the receiver chose. Both have L1 norm at most T: where votes are not negative |v - v'|
        is at most sqrt(2) T, else 2 T. It holds for the integers sent, rounding included.
        """
        factor = 2.0 if self.signed else math.sqrt(2)
        return float(factor * math.sqrt(self.features) * self.vote_steps)

    def rounding(self) -> float:
        """A bound of what rounding moves one value of Phi^T V: below one step a vote."""
        return float(self.people * len(self.contributors) * self.scale)

    def position(self, me: str) -> int:
        return self.masking.position(me)

    @property
    def block_people(self) -> int:
        """People in one block of shares, a multiple of 8 so that packed signs divide too."""
        person = self.features * self.columns * self.word.itemsize
        return max(8, BLOCK_BYTES // person // 8 * 8)

    @property
    def blocks(self) -> int:
        return -(-self.people // self.block_people)

    def block(self, index: int) -> slice:
        start = index * self.block_people
        return slice(start, min(start + self.block_people, self.people))

    def each_block(self) -> Iterator[slice]:
        return map(self.block, range(self.blocks))

    @property
    def sign_bytes(self) -> int:
        return -(-self.people * self.features // 8)


def vote_steps(agreement: MomentAgreement, votes_UK: FloatArray) -> Elements:
    """Votes in steps of 2^-bits, rounded toward zero, in new memory.

    Toward zero, so that the magnitudes of a row add up to 2^bits at most: rounding to the nearest
    may add half a step a column. The error of a vote is below one step; 0 and 1 are exact.
    """
    shape = (agreement.people, agreement.columns)
    plain = type(votes_UK) is np.ndarray and votes_UK.dtype in (np.float32, np.float64)
    if not plain or votes_UK.shape != shape:
        raise _no_array(f"votes are a float32 or float64 array {shape}", votes_UK)
    wide_UK = votes_UK.astype(np.float64, order="C")
    with np.errstate(over="ignore"):
        norm_U = np.abs(wide_UK).sum(axis=1)
    if not (norm_U <= 1 + _TOLERANCE).all():  # also where a value is not finite
        far = int(np.count_nonzero(~(norm_U <= 1 + _TOLERANCE)))
        raise LocalProtocolError(
            f"{far} of {len(norm_U)} rows of votes have an L1 norm above 1, or are not finite; "
            "scale them down"
        )
    if not agreement.signed and wide_UK.min() < 0:
        raise LocalProtocolError("some votes are negative; agree on signed=True, or shift them")
    steps_UK = np.trunc(wide_UK * agreement.vote_steps).astype(np.int64)
    return _ring(agreement, steps_UK)


def _noise_steps(agreement: MomentAgreement, noise_dK: IntArray | None) -> Elements | None:
    """The noise as ring elements, in new memory; None where none was agreed."""
    if (noise_dK is None) != (agreement.noise is None):
        raise LocalProtocolError(
            f"the agreement says {'no noise' if agreement.noise is None else 'noise'}, and "
            f"{'none' if noise_dK is None else 'some'} was given"
        )
    if noise_dK is None:
        return None
    shape, most = (agreement.features, agreement.columns), agreement.largest_noise
    plain = type(noise_dK) is np.ndarray and noise_dK.dtype == np.int64
    if not plain or noise_dK.shape != shape:
        raise _no_array(f"noise is an int64 array of shape {shape}", noise_dK)
    if not -most <= noise_dK.min() <= noise_dK.max() <= most:
        raise LocalProtocolError(
            f"noise of {agreement.noise} steps ends at {most}; what was given lies beyond"
        )
    return _ring(agreement, noise_dK)


def _no_array(what: str, got: Any) -> LocalProtocolError:
    kind = f"{getattr(got, 'dtype', type(got).__name__)} {np.shape(got)}"
    return LocalProtocolError(f"{what}, got {kind}")


def _ring(agreement: MomentAgreement, steps: NDArray[Any]) -> Elements:
    ring: Elements = np.array(steps, order="C").astype(agreement.word)
    return ring


# The messages: layout, big endian: magic, version, kind, party, block, digest of the agreement,
# people; then the body, whose length follows from the agreement, and nothing after. `party` is a
# contributor's position, or the number of contributors. `people` is the digest of who is voted on,
# and zeros in what is dealt, which depends on nobody.


class MessageKind(IntEnum):
    SIGN_SEED = 1  # dealer to receiver
    SHARE_SEEDS = 2  # dealer to combiner
    SHARES = 3  # dealer to receiver, one block
    VOTES = 4  # contributor to combiner
    SIGNS = 5  # receiver to combiner
    ANSWER = 6  # combiner to receiver


class MomentFrames:
    def __init__(self, agreement: MomentAgreement) -> None:
        self._agreement = agreement

    def pack(
        self,
        kind: MessageKind,
        body: bytes,
        *,
        people: bytes = _NOBODY,
        party: int | None = None,
        block: int = 0,
    ) -> bytes:
        return self._header(kind, people, party, block) + body

    def open(
        self,
        frame: bytes,
        kind: MessageKind,
        sender: str,
        *,
        people: bytes = _NOBODY,
        party: int | None = None,
        block: int = 0,
    ) -> memoryview:
        expected = self._header(kind, people, party, block)
        length = len(expected) + self._body_bytes(kind, block)
        if type(frame) is not bytes:
            raise LocalProtocolError(
                f"a frame of a moment is bytes, got {type(frame).__name__} from {sender}"
            )
        if len(frame) != length:
            raise RemoteProtocolError(
                f"{sender} sent {len(frame)} bytes, expected {length} of {kind.name}; it was cut "
                "or padded, or is another message"
            )
        if frame[: len(expected)] != expected:
            pairs = zip(_FIELDS, _HEADER.unpack_from(frame), _HEADER.unpack(expected), strict=True)
            wrong = next(name for name, *pair in pairs if len({*pair}) > 1)
            raise RemoteProtocolError(
                f"{sender} sent no {kind.name} of this moment: its {wrong} differs; "
                "it is another message, replayed, or made under another agreement"
            )
        return memoryview(frame)[len(expected) :]

    def _header(self, kind: MessageKind, people: bytes, party: int | None, block: int) -> bytes:
        place = len(self._agreement.contributors) if party is None else party
        digest = self._agreement.digest
        return _HEADER.pack(_MAGIC, _VERSION, kind, place, block, digest, people)

    def _body_bytes(self, kind: MessageKind, block: int) -> int:
        agreed = self._agreement
        word, moment = agreed.word.itemsize, agreed.features * agreed.columns
        votes = agreed.people * agreed.columns
        people = agreed.block(block)
        sizes: Mapping[MessageKind, int] = {
            MessageKind.SIGN_SEED: KEY_BYTES,
            MessageKind.SHARE_SEEDS: 2 * KEY_BYTES,
            MessageKind.SHARES: (people.stop - people.start) * moment * word,
            MessageKind.VOTES: (votes + (moment if agreed.noise else 0)) * word,
            MessageKind.SIGNS: agreed.sign_bytes,
            MessageKind.ANSWER: (votes + moment) * word,
        }
        return sizes[kind]


# The dealer draws signs alpha_ij and ring elements B_ik, and shares c + c' = alpha_ij B_ik, c' at
# the combiner from a seed and c at the receiver in blocks of people. A sign is a bit in a message,
# 1 for -1; the product of signs is the exclusive or of their bits.


def packed_signs(agreement: MomentAgreement, signs_Ud: NDArray[np.int8]) -> PackedSigns:
    shape = (agreement.people, agreement.features)
    if type(signs_Ud) is not np.ndarray or signs_Ud.dtype != np.int8 or signs_Ud.shape != shape:
        raise _no_array(f"signs are an int8 array of shape {shape}", signs_Ud)
    if not ((signs_Ud == 1) | (signs_Ud == -1)).all():
        raise LocalProtocolError("signs are -1 and +1, got something else")
    return np.packbits(signs_Ud.reshape(-1) < 0)


def hiding_bits(agreement: MomentAgreement, seed: bytes) -> PackedSigns:
    stream = keystream(seed, b"moment hiding signs v1", length=agreement.sign_bytes)
    bits = np.frombuffer(stream, dtype=np.uint8).copy()
    bits[-1] &= _last_byte(agreement)
    return bits


def _last_byte(agreement: MomentAgreement) -> int:
    unused = 8 * agreement.sign_bytes - agreement.people * agreement.features
    return 0xFF << unused & 0xFF


def block_signs(agreement: MomentAgreement, packed: PackedSigns, people: slice) -> Elements:
    """The signs of a block of people in the ring, N x d; the block begins at a multiple of 8."""
    features = agreement.features
    count = (people.stop - people.start) * features
    start = people.start * features // 8
    bits_Nd = np.unpackbits(packed[start : start + -(-count // 8)], count=count)
    ring: Elements = np.array([1, -1], dtype=np.int64).astype(agreement.word)
    return ring[bits_Nd.reshape(-1, features)]


def mask_of_votes(agreement: MomentAgreement, seed: bytes) -> Elements:
    """B: what hides the sum of votes from the receiver, U x K."""
    count = agreement.people * agreement.columns
    stream = keystream(seed, b"moment votes v1", length=count * agreement.word.itemsize)
    return _elements(agreement, stream, (agreement.people, agreement.columns))


def combiner_shares(agreement: MomentAgreement, seed: bytes, block: int) -> Elements:
    """The combiner's c' of one block, K x N x d."""
    people = agreement.block(block)
    shape = (agreement.columns, people.stop - people.start, agreement.features)
    length = int(np.prod(shape)) * agreement.word.itemsize
    stream = keystream(seed, b"moment shares v1", block.to_bytes(8, "big"), length=length)
    return _elements(agreement, stream, shape)


def dealt_shares(
    agreement: MomentAgreement, hiding: PackedSigns, B_UK: Elements, share_seed: bytes
) -> Iterator[Elements]:
    """Each block of c, K x N x d: alpha B less what the combiner expands."""
    for block, people in enumerate(agreement.each_block()):
        alpha_Nd = block_signs(agreement, hiding, people)
        c_KNd: Elements = B_UK[people].T[:, :, None] * alpha_Nd
        c_KNd -= combiner_shares(agreement, share_seed, block)
        yield c_KNd


def added_shares(e_Nd: Elements, c_KNd: Elements) -> Elements:
    total_dK: Elements = (c_KNd * e_Nd).sum(axis=1, dtype=c_KNd.dtype).T
    return total_dK


def _elements(agreement: MomentAgreement, data: Any, shape: tuple[int, ...]) -> Elements:
    elements: Elements = np.frombuffer(data, dtype=agreement.word).reshape(shape)
    return elements


def _require_unused(agreement: MomentAgreement, me: str) -> None:
    if (agreement.digest, me) in _USED:
        raise LocalProtocolError(
            f"{me} played its part of {agreement.session!r} already; an agreement on a moment "
            "is used once, and a further moment is a further release: agree on a new session"
        )


def _use(agreement: MomentAgreement, me: str) -> None:
    with _USING:
        _require_unused(agreement, me)
        _USED.add((agreement.digest, me))


_MASKED = ("sum of votes", "sum of noise")
"""What is masked, in the order of the masks' steps."""


def _binding(agreement: MomentAgreement, people: bytes, what: str) -> StepBinding:
    step, message = _MASKED.index(what), hashlib.sha256(what.encode()).digest()
    session = agreement.masking.session
    return StepBinding(session=session, step=step, rows=people, message=message)


def _mask_seeds(agreement: MomentAgreement, me: str, peers: Sequence[str]) -> PairwiseSeeds:
    return PairwiseSeeds(me, peers, _setup_frames(agreement))


def _setup_frames(agreement: MomentAgreement) -> AgreedFrames:
    mark = fingerprint(agreement.masking, {"use": "moment"})
    return AgreedFrames(agreement.masking, "moment", mark)


class _MomentRole(Role):
    def __init__(self, agreement: MomentAgreement, me: str, setup: Setup) -> None:
        self.agreement, self.me = agreement, me
        self._messages = MomentFrames(agreement)
        self._fork_check = ForkCheck(f"{me}: this role of a moment")
        super().__init__(_setup_frames(agreement), setup)

    @property
    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """U x K of votes, d x K of the moment."""
        agreed = self.agreement
        return (agreed.people, agreed.columns), (agreed.features, agreed.columns)

    def _split(self, body: memoryview) -> list[Elements]:
        words: Elements = np.frombuffer(body, dtype=self.agreement.word)
        votes, moment = self._shapes
        parts = np.split(words, [self.agreement.people * self.agreement.columns])
        return [
            part.reshape(s) for part, s in zip(parts, (votes, moment), strict=True) if len(part)
        ]


class MomentDealer(_MomentRole):
    """The dealer's end: it draws what hides, sends it, and is sent nothing."""

    def __init__(self, agreement: MomentAgreement) -> None:
        super().__init__(agreement, agreement.dealer, NoSetup())

    def deal(self) -> Iterator[Outgoing]:
        """Return what is to be sent, once: two seeds, and then block after block as they are taken.

        The receiver's messages must reach it in this order.
        """
        self._fork_check.require()
        _use(self.agreement, self.me)
        return self._messages_of(*(fresh_key() for _ in range(3)))

    def _messages_of(
        self, sign_seed: bytes, mask_seed: bytes, share_seed: bytes
    ) -> Iterator[Outgoing]:
        agreed, pack = self.agreement, self._messages.pack
        yield Outgoing(agreed.combiner, pack(MessageKind.SHARE_SEEDS, mask_seed + share_seed))
        yield Outgoing(agreed.receiver, pack(MessageKind.SIGN_SEED, sign_seed))
        hiding, B_UK = hiding_bits(agreed, sign_seed), mask_of_votes(agreed, mask_seed)
        for block, c_KNd in enumerate(dealt_shares(agreed, hiding, B_UK, share_seed)):
            body = c_KNd.tobytes()
            yield Outgoing(agreed.receiver, pack(MessageKind.SHARES, body, block=block))


class MomentContributor(_MomentRole):
    """A passive's end; shares a seed with every other passive and with the active."""

    def __init__(self, agreement: MomentAgreement, me: str) -> None:
        self._position = agreement.position(me)
        others = tuple(name for name in agreement.contributors if name != me)
        self._seeds = _mask_seeds(agreement, me, (*others, agreement.receiver))
        super().__init__(agreement, me, self._seeds)

    def contribute(
        self, votes_UK: FloatArray, people: bytes, noise_dK: IntArray | None = None
    ) -> bytes:
        """Round, add noise, mask and frame the votes of this passive; once.

        Args:
            votes_UK: a row for each person in the agreed order, its L1 norm at most 1. No person
                has two rows, or the sensitivity is that of one row no longer.
            people: 32-byte digest of the ordered positions voted on; with another one at any
                passive or at the receiver the sum is noise.
            noise_dK: steps, from `apfed_protocols.noise` under a key of this party; given exactly
                where the agreement says noise.
        """
        agreed = self.agreement
        parts = [vote_steps(agreed, votes_UK)]
        noise = _noise_steps(agreed, noise_dK)
        parts += [noise] if noise is not None else []
        require_people(people, _PEOPLE)
        _require_unused(agreed, self.me)  # its mask keys are gone then, which says less
        self._seeds.require_finished()
        self._fork_check.require()
        _use(agreed, self.me)
        for part, what in zip(parts, _MASKED, strict=False):
            binding = _binding(agreed, people, what)
            self._seeds.add_cancelling(binding, part)
            self._seeds.add_stream(agreed.receiver, binding, part, sign=1)
        body = b"".join(part.tobytes() for part in parts)
        self._seeds.forget()
        return self._messages.pack(MessageKind.VOTES, body, people=people, party=self._position)


class MomentCombiner(_MomentRole):
    def __init__(self, agreement: MomentAgreement) -> None:
        super().__init__(agreement, agreement.combiner, NoSetup())

    def answer(
        self, dealt: bytes, votes: Mapping[str, bytes], signs: bytes, people: bytes
    ) -> bytes:
        """Return F and A of step 4; once, for one set of signs."""
        self._fork_check.require()
        agreed, read = self.agreement, self._messages.open
        require_people(people, _PEOPLE)
        seeds = bytes(read(dealt, MessageKind.SHARE_SEEDS, agreed.dealer))
        body = read(signs, MessageKind.SIGNS, agreed.receiver, people=people)
        e_packed = np.frombuffer(body, dtype=np.uint8)
        if int(e_packed[-1]) & ~_last_byte(agreed):
            raise RemoteProtocolError(f"{agreed.receiver} sent bits after the last of its signs")
        W_UK, A_dK = self._added(votes, people)
        _use(agreed, self.me)
        mask_seed, share_seed = seeds[:KEY_BYTES], seeds[KEY_BYTES:]
        F_UK = W_UK - mask_of_votes(agreed, mask_seed)
        for block, some in enumerate(agreed.each_block()):
            e_Nd = block_signs(agreed, e_packed, some)
            A_dK += added_shares(e_Nd, combiner_shares(agreed, share_seed, block))
        return self._messages.pack(
            MessageKind.ANSWER, F_UK.tobytes() + A_dK.tobytes(), people=people
        )

    def _added(self, votes: Mapping[str, bytes], people: bytes) -> tuple[Elements, Elements]:
        names = self.agreement.contributors
        require_all("a moment needs the votes of each of", votes, names)
        totals: list[Elements] = [np.zeros(s, self.agreement.word) for s in self._shapes]
        for position, name in enumerate(names):
            body = self._messages.open(
                votes[name], MessageKind.VOTES, name, people=people, party=position
            )
            for total, part in zip(totals, self._split(body), strict=False):
                total += part
        return totals[0], totals[1]


class MomentReceiver(_MomentRole):
    """The active's end: `ask`, then `take` for each block of shares, then `open`."""

    def __init__(self, agreement: MomentAgreement) -> None:
        self._seeds = _mask_seeds(agreement, agreement.receiver, agreement.contributors)
        super().__init__(agreement, agreement.receiver, self._seeds)
        self._asked: tuple[PackedSigns, PackedSigns, bytes] | None = None  # s, e, people
        self._taken = 0
        self._added_dK: Elements = np.zeros(self._shapes[1], agreement.word)

    def ask(self, dealt: bytes, signs_Ud: NDArray[np.int8], people: bytes) -> bytes:
        """Return the hidden signs for the combiner; once.

        Args:
            dealt: the first message of the dealer.
            signs_Ud: -1 and +1, int8.
            people: 32-byte digest of the ordered positions whose votes are asked for.
        """
        self._fork_check.require()
        agreed = self.agreement
        s_packed = packed_signs(agreed, signs_Ud)
        require_people(people, _PEOPLE)
        _require_unused(agreed, self.me)
        self._seeds.require_finished()
        seed = bytes(self._messages.open(dealt, MessageKind.SIGN_SEED, agreed.dealer))
        _use(agreed, self.me)
        e_packed = s_packed ^ hiding_bits(agreed, seed)
        self._asked = (s_packed, e_packed, people)
        return self._messages.pack(MessageKind.SIGNS, e_packed.tobytes(), people=people)

    def take(self, dealt: bytes) -> None:
        """Add up the next block of shares, of which nothing is kept but the sum."""
        agreed, (_, e_packed, _) = self.agreement, self._underway()
        if self.complete:
            raise RemoteProtocolError(f"{agreed.dealer} sent more than {agreed.blocks} block(s)")
        body = self._messages.open(dealt, MessageKind.SHARES, agreed.dealer, block=self._taken)
        e_Nd = block_signs(agreed, e_packed, agreed.block(self._taken))
        c_KNd = _elements(agreed, body, (agreed.columns, *e_Nd.shape))
        self._added_dK += added_shares(e_Nd, c_KNd)
        self._taken += 1

    @property
    def complete(self) -> bool:
        return self._taken == self.agreement.blocks

    def open(self, answer: bytes) -> IntArray:
        """Return M in steps, d x K; times `MomentAgreement.scale` it is Phi^T V plus noise.

        Once, whether it is opened or refused: whoever alters answers and sees which are taken
        learns one bit at most.
        """
        agreed, (s_packed, _, people) = self.agreement, self._underway()
        if not self.complete:
            raise LocalProtocolError(
                f"{self.me} took {self._taken} of {agreed.blocks} block(s) of {agreed.dealer}"
            )
        try:
            body = self._messages.open(answer, MessageKind.ANSWER, agreed.combiner, people=people)
            F_UK, M_dK = (part.copy() for part in self._split(body))
            self._unmask(people, F_UK, M_dK)
            M_dK += self._added_dK
            for some in agreed.each_block():
                M_dK += block_signs(agreed, s_packed, some).T @ F_UK[some]
        finally:
            self._asked = None
            self._seeds.forget()
            self._added_dK = np.zeros_like(self._added_dK)
        return self._in_range(M_dK)

    def _unmask(self, people: bytes, F_UK: Elements, M_dK: Elements) -> None:
        masked = [(F_UK, _MASKED[0])] + ([(M_dK, _MASKED[1])] if self.agreement.noise else [])
        for total, what in masked:
            binding = _binding(self.agreement, people, what)
            for peer in self.agreement.contributors:
                self._seeds.add_stream(peer, binding, total, sign=-1)

    def _in_range(self, M_dK: Elements) -> IntArray:
        signed: NDArray[Any] = M_dK.view(np.dtype(f"<i{M_dK.itemsize}"))
        opened: IntArray = signed.astype(np.int64)
        limit = self.agreement.limit
        if not -limit <= opened.min() <= opened.max() <= limit:
            raise RemoteProtocolError(
                f"the moment from {self.agreement.combiner} lies beyond the range of its votes and "
                "noise; it was altered, or the parties answered about different people, or what "
                f"{self.agreement.dealer} dealt does not fit; agree on a new session"
            )
        return opened

    def _underway(self) -> tuple[PackedSigns, PackedSigns, bytes]:
        self._fork_check.require()
        if self._asked is None:
            raise LocalProtocolError(
                f"{self.me} asked nothing yet, or its moment was opened or refused; each is once"
            )
        return self._asked
