"""The three roles that every sum under homomorphic encryption shares.

Run by: the active (`KeyHolder`: makes the key pair, keeps its secret half, decrypts only
the sum, and none after one that it refused), the passives (`Encrypter`: public key), the
aggregator (`CiphertextAdder`: no key at all, 32 bytes of fingerprint). What is encrypted, and
under which scheme, says the `HomomorphicSum` that makes the roles.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed_frames import AgreedFrames, fingerprint
from protocols.sums.agreement import StepBinding, SumAgreement
from protocols.sums.fixed_point import FixedPoint, Packing
from protocols.sums.frame import Frame, frame_bytes
from protocols.sums.headroom import CkksHeadroom, CoefficientHeadroom
from protocols.sums.interface import FloatArray, IntArray
from protocols.sums.roles import (
    KeepsSecrets,
    OneRefusalReceiver,
    OneRoundCombiner,
    OneRoundContributor,
)
from protocols.sums.seal_scheme import SealContext, SealScheme
from protocols.sums.zeros import ZeroPool

__all__ = ["CiphertextAdder", "Encrypter", "HomomorphicSum", "KeyHolder"]


class HomomorphicSum(ABC):
    """What the roles need to know about a scheme, and the roles themselves."""

    name: ClassVar[str]
    unsafe: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    agreement: SumAgreement
    headroom: CkksHeadroom | CoefficientHeadroom

    @property
    def packing(self) -> Packing:
        """How integers share slots."""
        return self.headroom.packing

    @property
    @abstractmethod
    def scheme(self) -> SealScheme:
        """The local library under the parameters."""

    @abstractmethod
    def parameters(self) -> Mapping[str, object]: ...

    def contributor(self, me: str) -> "Encrypter":
        return Encrypter(self, me)

    @abstractmethod
    def integers(self, slots: NDArray[Any]) -> NDArray[np.int64]:
        """The integers that decrypted slots stand for.

        Raises:
            RemoteProtocolError: they stand for none.
        """

    @cached_property
    def fixed_point(self) -> FixedPoint:
        """The shared quantiser."""
        return FixedPoint.of(self.agreement)

    def receiver(self) -> "KeyHolder":
        return KeyHolder(self)

    def combiner(self) -> "CiphertextAdder":
        return CiphertextAdder(self)

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        vectors = self.packing.vectors(shape[0] * shape[1])
        return frame_bytes((self.scheme.ciphertext_bytes,) * vectors)

    def rounding(self) -> float:
        return self.fixed_point.rounding

    def frames(self, public_key: bytes) -> AgreedFrames:
        """One role's writer and checker of frames under `public_key`."""
        return self.frames_marked(fingerprint(self.agreement, self.parameters(), public_key))

    def frames_marked(self, mark: bytes) -> AgreedFrames:
        """The same for a role that knows the fingerprint only."""
        return AgreedFrames(self.agreement, self.name, mark)

    def open_key_setup(self, body: bytes, sender: str) -> Frame:
        """Read what the key holder sent; the fingerprint is unchecked.

        Raises:
            RemoteProtocolError: it is malformed or comes from another party.
        """
        if sender != self.agreement.receiver:
            raise RemoteProtocolError(
                f"keys come from {self.agreement.receiver}, but {sender} sent a message"
            )
        return self.frames_marked(b"").open_setup(body, sender)


class KeyHolder(OneRefusalReceiver):
    """The active's end; the secret key is gone once it refused a sum."""

    def __init__(self, described: HomomorphicSum) -> None:
        super().__init__()
        self._sum = described
        context = described.scheme.key_pair()
        self._context: SealContext | None = context
        self._public_key = described.scheme.public_key(context)
        self._frames = described.frames(self._public_key)
        self._started = False

    def start(self) -> Sequence[Outgoing]:
        """Give every passive the public key, and the aggregator its fingerprint."""
        self._require_no_refusal()
        if self._started:
            raise LocalProtocolError("the key of this sum was sent already; start is called once")
        self._started = True
        agreement = self._sum.agreement
        with_key, without_key = self._frames.setup(self._public_key), self._frames.setup()
        return (
            *(Outgoing(name, with_key) for name in agreement.contributors),
            Outgoing(agreement.combiner, without_key),
        )

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        raise RemoteProtocolError(
            f"{sender} sent {len(body)} bytes of setup to {self._sum.agreement.receiver}, "
            "who expects none"
        )

    @property
    def finished(self) -> bool:
        return self._started

    def _open(self, frame: Frame, binding: StepBinding) -> NDArray[np.float64]:
        described, sender = self._sum, self._sum.agreement.combiner
        values = frame.rows * frame.columns
        assert self._context is not None
        slots = described.scheme.decrypt(
            self._context, frame.blobs, described.packing.vectors(values), sender=sender
        )
        fields = described.packing.unpack(described.integers(slots))
        beyond = np.abs(fields[:values]).max() > described.fixed_point.limit
        if beyond or fields[values:].any():
            raise RemoteProtocolError(
                f"the sum of step {binding.step} from {sender} lies beyond the range of its "
                "contributions; it was altered, or the passives answered different messages"
            )
        return described.fixed_point.dequantise(fields[:values].reshape(frame.rows, frame.columns))

    def _forget(self) -> None:
        self._context = None


class Encrypter(KeepsSecrets, OneRoundContributor):
    """A passive's end: knows the active's public key once the setup came."""

    def __init__(self, described: HomomorphicSum, me: str) -> None:
        described.agreement.position(me)
        self.me = me
        self._sum = described
        self._setup: tuple[SealContext, AgreedFrames, ZeroPool] | None = None

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the public key."""
        if self._setup is not None:
            raise RemoteProtocolError(f"{sender} sent a second public key to {self.me}")
        frame = self._sum.open_key_setup(body, sender)
        if len(frame.blobs) != 1:
            raise RemoteProtocolError(f"{sender} sent {len(frame.blobs)} public keys, expected one")
        frames = self._sum.frames(frame.blobs[0])
        if frames.fingerprint != frame.fingerprint:
            raise RemoteProtocolError(
                f"the public key from {sender} does not match its fingerprint; the parties hold "
                "different parameters"
            )
        context = self._sum.scheme.public_context(frame.blobs[0], sender=sender)
        self._setup = context, frames, ZeroPool(self._sum.scheme, context)
        return ()

    @property
    def finished(self) -> bool:
        return self._setup is not None

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        """See `SumContributor`."""
        context, frames, zeros = self._ready()
        integers_BD = self._sum.fixed_point.quantise(values_BD, noise_BD)
        frames.begin_step(binding)
        slots_VS = self._masked(self._sum.packing.pack(integers_BD), binding)
        rows, columns = values_BD.shape
        blobs = self._sum.scheme.encrypt(context, slots_VS, zeros.take(len(slots_VS)))
        return frames.contribution(self.me, binding, (rows, columns), blobs)

    def prepare(
        self, shape: tuple[int, int], contributions: int = 1, *, worker: Executor | None = None
    ) -> None:
        """Encrypt zeros ahead for contributions of `shape`, while this party waits.

        To encrypt is then to add to a zero. Each zero is used once; where they run out, values
        are encrypted as usual.

        Args:
            shape: (rows, columns) of the contributions to come.
            contributions: for how many zeros are kept; those that are there or on their way count.
            worker: with one (a `ProcessPoolExecutor`), this returns at once, and the zeros
                serve from when they have come.

        Raises:
            LocalProtocolError: the setup is not finished, or the worker died.
        """
        _, _, zeros = self._ready()
        zeros.top_up(contributions * self._sum.packing.vectors(shape[0] * shape[1]), worker)

    def _ready(self) -> tuple[SealContext, AgreedFrames, ZeroPool]:
        if self._setup is None:
            raise LocalProtocolError(f"{self.me} has no public key yet; run the setup first")
        return self._setup

    def _masked(self, slots_VS: NDArray[np.int64], binding: StepBinding) -> NDArray[np.int64]:
        """What a scheme with masks under the encryption adds to them; none here."""
        del binding
        return slots_VS


class CiphertextAdder(OneRoundCombiner):
    """The aggregator's end: adds what it cannot read."""

    def __init__(self, described: HomomorphicSum) -> None:
        self._sum = described
        self._frames: AgreedFrames | None = None

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the public key's fingerprint."""
        if self._frames is not None:
            raise RemoteProtocolError(f"{sender} sent a second setup to the aggregator")
        frame = self._sum.open_key_setup(body, sender)
        if frame.blobs:
            raise RemoteProtocolError(f"{sender} sent a key to the aggregator, who must hold none")
        self._frames = self._sum.frames_marked(frame.fingerprint)
        return ()

    @property
    def finished(self) -> bool:
        return self._frames is not None

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """See `SumCombiner`."""
        if self._frames is None:
            raise LocalProtocolError("the aggregator has no fingerprint yet; run the setup first")
        frames = self._frames.open_contributions(bodies, binding_digest)
        vectors = self._sum.packing.vectors(frames[0].rows * frames[0].columns)
        named = zip(self._sum.agreement.contributors, frames, strict=True)
        blobs = self._sum.scheme.add({name: frame.blobs for name, frame in named}, vectors)
        return self._frames.sum_of(frames, blobs)
