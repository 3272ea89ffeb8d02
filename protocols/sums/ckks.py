"""CKKS sum: passives encrypt under the active's public key, the aggregator adds ciphertexts.

Run by: the active (holds the only secret key, decrypts only the sum), the passives
(public key), the aggregator (no key at all). Protects from: a curious aggregator, which
sees ciphertexts; a curious active, which sees the sum of all passives and no single
contribution; an active that sends different representations to different passives,
as the aggregator adds only what answers one message. Does not protect from: the active
and the aggregator together, who could decrypt one contribution; M - 1 passives and the
active together.

Values are fixed-point integers, two to a slot where they fit, so the decoded sum is the
exact integer sum: rounding removes CKKS's noise, and with it what decryptions of
approximate schemes reveal about the key (Li and Micciancio 2021). Scheme: Cheon, Kim,
Kim and Song 2017, through TenSEAL. Shapes: see `fixed_point`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import tenseal as ts
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed import AgreedFrames, KeepsSecrets, fingerprint
from protocols.sums.ckks_scheme import CkksScheme
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.frame import frame_bytes
from protocols.sums.headroom import ROUNDING_TOLERANCE, CkksHeadroom, solve_ckks
from protocols.sums.interface import FloatArray, StepBinding, SumAgreement

__all__ = ["CkksCombiner", "CkksContributor", "CkksReceiver", "CkksSum"]


@dataclass(frozen=True)
class CkksSum:
    """Sum under CKKS with two fixed-point fields a slot.

    Args:
        agreement: what the parties fixed.
        poly_degree: N, the ring degree.
        primes: bits of the data prime and of the key-switching prime; their sum is
            limited by 128-bit security.

    Attributes:
        headroom: the scale and the packing that fit these parameters.

    Raises:
        LocalProtocolError: parameters that are insecure or could overflow.
    """

    agreement: SumAgreement
    poly_degree: int = 4096
    primes: tuple[int, int] = (60, 49)
    headroom: CkksHeadroom = field(init=False, repr=False)
    name: ClassVar[str] = "ckks"
    unsafe: ClassVar[bool] = False

    def __post_init__(self) -> None:
        solved = solve_ckks(self.fixed_point, poly_degree=self.poly_degree, primes=self.primes)
        object.__setattr__(self, "headroom", solved)

    @cached_property
    def fixed_point(self) -> FixedPoint:
        """The shared quantiser."""
        return FixedPoint.of(self.agreement)

    @cached_property
    def scheme(self) -> CkksScheme:
        """The local library under these parameters."""
        return CkksScheme(self.headroom)

    def receiver(self) -> "CkksReceiver":
        return CkksReceiver(self)

    def contributor(self, me: str) -> "CkksContributor":
        return CkksContributor(self, me)

    def combiner(self) -> "CkksCombiner":
        return CkksCombiner(self)

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        vectors = self.headroom.packing.vectors(shape[0] * shape[1])
        return frame_bytes((self.scheme.ciphertext.most_bytes,) * vectors)

    def rounding(self) -> float:
        return self.fixed_point.rounding

    def parameters(self) -> Mapping[str, object]:
        return {
            "backend": self.name,
            "poly_degree": self.poly_degree,
            "primes": list(self.primes),
            "scale_bits": self.headroom.scale_bits,
            "fields": self.headroom.packing.fields,
            "field_bits": self.headroom.packing.field_bits,
        }

    def frames(self, public_key: bytes) -> AgreedFrames:
        """One role's writer and checker of frames under `public_key`."""
        return self.frames_marked(fingerprint(self.agreement, self.parameters(), public_key))

    def frames_marked(self, mark: bytes) -> AgreedFrames:
        """The same for a role that knows the fingerprint only."""
        return AgreedFrames(self.agreement, self.name, mark)


class CkksReceiver(KeepsSecrets):
    """The active's end: makes the key pair and keeps its secret half."""

    def __init__(self, ckks: CkksSum) -> None:
        self._ckks = ckks
        self._context = ckks.scheme.key_pair()
        self._public_key = ckks.scheme.public_key(self._context)
        self._frames = ckks.frames(self._public_key)
        self._started = False

    def start(self) -> Sequence[Outgoing]:
        """Give every passive the public key, and the aggregator its fingerprint."""
        if self._started:
            raise LocalProtocolError("the key of this sum was sent already; start is called once")
        self._started = True
        agreement = self._ckks.agreement
        with_key, without_key = self._frames.setup(self._public_key), self._frames.setup()
        return (
            *(Outgoing(name, with_key) for name in agreement.contributors),
            Outgoing(agreement.combiner, without_key),
        )

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        raise RemoteProtocolError(
            f"{sender} sent {len(body)} bytes of setup to {self._ckks.agreement.receiver}, "
            "who expects none"
        )

    @property
    def finished(self) -> bool:
        return self._started

    def decode(
        self, combined: bytes, shape: tuple[int, int], binding: StepBinding
    ) -> NDArray[np.float64]:
        """See `SumReceiver`."""
        ckks, sender = self._ckks, self._ckks.agreement.combiner
        frame = self._frames.open_sum(combined, shape, binding)
        values = shape[0] * shape[1]
        vectors = ckks.headroom.packing.vectors(values)
        slots = ckks.scheme.decrypt(self._context, frame.blobs, vectors, sender=sender)
        fields = ckks.headroom.packing.unpack(_nearest_integers(slots, sender))
        beyond = np.abs(fields[:values]).max() > ckks.fixed_point.limit
        if beyond or fields[values:].any():
            raise RemoteProtocolError(
                f"the sum of step {binding.step} from {sender} lies beyond the range of its "
                "contributions; it was altered, or a passive did not clip"
            )
        return ckks.fixed_point.dequantise(fields[:values].reshape(shape))


class CkksContributor(KeepsSecrets):
    """A passive's end: knows the active's public key once the setup came."""

    def __init__(self, ckks: CkksSum, me: str) -> None:
        ckks.agreement.position(me)
        self.me = me
        self._ckks = ckks
        self._setup: tuple[ts.Context, AgreedFrames] | None = None

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the public key."""
        if self._setup is not None:
            raise RemoteProtocolError(f"{sender} sent a second public key to {self.me}")
        frame = self._ckks.frames_marked(b"").open_setup(body, sender)
        if len(frame.blobs) != 1:
            raise RemoteProtocolError(f"{sender} sent {len(frame.blobs)} public keys, expected one")
        frames = self._ckks.frames(frame.blobs[0])
        if frames.fingerprint != frame.fingerprint:
            raise RemoteProtocolError(
                f"the public key from {sender} does not match its fingerprint; the parties hold "
                "different parameters"
            )
        self._setup = self._ckks.scheme.public_context(frame.blobs[0], sender=sender), frames
        return ()

    @property
    def finished(self) -> bool:
        return self._setup is not None

    def contribute(self, values_BD: FloatArray, binding: StepBinding) -> bytes:
        """See `SumContributor`."""
        if self._setup is None:
            raise LocalProtocolError(f"{self.me} has no public key yet; run the setup first")
        context, frames = self._setup
        integers_BD = self._ckks.fixed_point.quantise(values_BD)
        frames.begin_step(binding)
        slots_VS = self._ckks.headroom.packing.pack(integers_BD)
        blobs = self._ckks.scheme.encrypt(context, slots_VS)
        rows, columns = values_BD.shape
        return frames.contribution(self.me, binding, (rows, columns), blobs)


class CkksCombiner:
    """The aggregator's end: adds what it cannot read."""

    def __init__(self, ckks: CkksSum) -> None:
        self._ckks = ckks
        self._context = ckks.scheme.keyless_context()
        self._frames: AgreedFrames | None = None

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the public key's fingerprint."""
        if self._frames is not None:
            raise RemoteProtocolError(f"{sender} sent a second setup to the aggregator")
        frame = self._ckks.frames_marked(b"").open_setup(body, sender)
        if frame.blobs:
            raise RemoteProtocolError(f"{sender} sent a key to the aggregator, who must hold none")
        self._frames = self._ckks.frames_marked(frame.fingerprint)
        return ()

    @property
    def finished(self) -> bool:
        return self._frames is not None

    def combine(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> bytes:
        """See `SumCombiner`."""
        if self._frames is None:
            raise LocalProtocolError("the aggregator has no fingerprint yet; run the setup first")
        frames = self._frames.open_contributions(contributions, binding_digest)
        vectors = self._ckks.headroom.packing.vectors(frames[0].rows * frames[0].columns)
        named = zip(self._ckks.agreement.contributors, frames, strict=True)
        blobs = self._ckks.scheme.add(
            self._context, {name: frame.blobs for name, frame in named}, vectors
        )
        return self._frames.sum_of(frames, blobs)


def _nearest_integers(slots: NDArray[np.float64], sender: str) -> NDArray[np.int64]:
    nearest = np.rint(slots)
    if not np.abs(slots - nearest).max() < ROUNDING_TOLERANCE or np.abs(nearest).max() > 2.0**53:
        raise RemoteProtocolError(
            f"the sum from {sender} does not decrypt to integers; it was altered, or encrypted "
            "under another key or scale"
        )
    return nearest.astype(np.int64)
