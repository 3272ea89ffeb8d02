"""What every sum and its roles are built on: the order of a step, one refusal, secrets that stay.

Run by: every role. Protects from: values that leave unclipped, before the setup or twice in a
step; roles that are copied with their keys; messages where none is expected; and peers that learn
from what a receiver refuses.
"""

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.frames import AgreedFrames, Frame, fingerprint
from apfed_protocols.sums.interface import (
    FloatArray,
    IntArray,
    StepBinding,
    SumAgreement,
    SumLeaks,
)
from apfed_protocols.sums.roles import SecureSum, SumCombiner, SumContributor, SumReceiver

__all__ = [
    "DescribedSum",
    "KeepsSecrets",
    "NoSetup",
    "OneRefusalReceiver",
    "OneRoundCombiner",
    "OneRoundContributor",
    "Role",
    "StepContributor",
    "join_sum",
]


class KeepsSecrets:
    """Base of what holds keys or unprotected values: never serialised, never copied."""

    def __reduce__(self) -> str:
        raise LocalProtocolError(
            f"{type(self).__name__} holds secrets of its party and is never serialised"
        )


class DescribedSum:
    """What a sum derives from its agreement; see `SecureSum` for the attributes."""

    scheme: ClassVar[str]
    masks: ClassVar[str] = "none"
    name: ClassVar[str]
    unsafe: ClassVar[bool] = False
    rounds: ClassVar[int] = 1
    needs_all: ClassVar[bool] = True
    rests_on: ClassVar[str]
    leaks: ClassVar[SumLeaks]
    agreement: SumAgreement

    @cached_property
    def fixed_point(self) -> FixedPoint:
        """The shared quantiser."""
        return FixedPoint.of(self.agreement)

    def numbers(self, values_BD: FloatArray, noise_BD: IntArray | None) -> NDArray[Any]:
        """What a contributor adds, in new memory: clipped rows in fixed point, and the noise."""
        return self.fixed_point.quantise(values_BD, noise_BD)

    def rounding(self) -> float:
        return self.fixed_point.rounding

    def parameters(self) -> Mapping[str, object]:
        return {"scheme": self.scheme, "masks": self.masks}

    def frames(self, key: bytes = b"", *, least: int | None = None) -> AgreedFrames:
        """One role's writer and checker of frames, under a public key where there is one."""
        mark = fingerprint(self.agreement, self.parameters(), key)
        return AgreedFrames(self.agreement, self.name, mark, least)


class NoSetup:
    """The conversation of a role that needs no setup message."""

    def start(self) -> Iterable[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        raise RemoteProtocolError(f"{sender} sent {len(body)} bytes of setup, but none is expected")

    @property
    def finished(self) -> bool:
        return True


class Role(KeepsSecrets):
    """One party's end of a sum.

    Args:
        frames: its writer and checker of frames.
        setup: the conversation before the first step.
    """

    def __init__(self, frames: AgreedFrames, setup: Conversation) -> None:
        self._frames = frames
        self._setup = setup

    def start(self) -> Iterable[Outgoing]:
        return self._setup.start()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        return self._setup.receive(sender, body)

    @property
    def finished(self) -> bool:
        return self._setup.finished


class StepContributor(Role, ABC):
    """A passive's end: clip, quantise, use the step, protect, in this order and no other."""

    def __init__(
        self, described: DescribedSum, me: str, frames: AgreedFrames, setup: Conversation
    ) -> None:
        self._position = described.agreement.position(me)
        self.me = me
        self._sum = described
        super().__init__(frames, setup)

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        """See `SumContributor`."""
        numbers_BD = self._sum.numbers(values_BD, noise_BD)
        self._require_setup()
        self._frames.begin_step(binding)
        blobs = self._protect(numbers_BD, binding)
        rows, columns = values_BD.shape
        return self._frames.contribution(self.me, binding, (rows, columns), blobs)

    @abstractmethod
    def _require_setup(self) -> None:
        """Raise LocalProtocolError before the setup is finished; it names what is missing."""

    @abstractmethod
    def _protect(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """What may leave of these numbers, which may be changed in place."""


class OneRoundContributor(StepContributor, ABC):
    """A contributor whose contribution is all that it sends."""

    def answer(self, request: bytes) -> bytes:
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: its contribution is all that it sends, and a "
            f"request of {len(request)} bytes has no answer"
        )


class OneRoundCombiner(Role):
    """The aggregator's end where nobody is asked anything: adds what it cannot read.

    Args:
        frames: its writer and checker of frames.
        add: the blobs of the sum of contributions, which takes no key; RemoteProtocolError where
            one does not carry what its shape says.
    """

    def __init__(
        self, frames: AgreedFrames, add: Callable[[Sequence[Frame]], Sequence[bytes]]
    ) -> None:
        self._add = add
        super().__init__(frames, NoSetup())

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        del binding_digest
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: combine the {len(contributions)} contributions, "
            "nobody is asked anything"
        )

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """See `SumCombiner`."""
        frames = self._frames.open_contributions(bodies, binding_digest)
        return self._frames.sum_of(frames, self._add(frames))


class OneRefusalReceiver(Role, ABC):
    """The receiver's end: it opens sums until it refuses one, and none after that.

    Whether an altered sum is taken or refused depends on the secret key and on what the sum holds,
    and whoever altered it sees which, if only from the run that ends. Each further answer would
    tell more, up to a whole contribution and the whole key (a reaction attack). So with the first
    refusal, for whatever reason, an interruption included, what opens sums is thrown away: all that
    reactions ever tell is which step was the first to be refused, log2(S + 1) bits of a session of
    S steps.
    """

    _refused_step: int | None = None

    def __init__(self, described: DescribedSum, frames: AgreedFrames, setup: Conversation) -> None:
        self._opening = threading.RLock()
        self._sum = described
        super().__init__(frames, setup)

    def start(self) -> Iterable[Outgoing]:
        self._require_no_refusal()
        return super().start()

    def decode(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> FloatArray:
        """See `SumReceiver`; sums are opened one at a time."""
        self._frames.require_own_process()  # before the lock, which a fork may have copied shut
        with self._opening:
            self._require_no_refusal()
            self._refused_step = binding.step  # taken back where all goes well, and only there
            try:
                opened = self._open(self._frames.open_sum(combined, shape, binding), binding)
            except LocalProtocolError:  # our own misuse, which shows before any secret is used
                self._refused_step = None
                raise
            except BaseException as error:
                self._forget()
                _clear_frames(error)
                raise
            self._refused_step = None
            return opened

    def _require_no_refusal(self) -> None:
        """Raise LocalProtocolError after a refused sum; what opens sums is gone then."""
        if self._refused_step is None:
            return
        self._forget()  # an interruption may have come before it
        raise LocalProtocolError(
            f"{self._frames.agreement.receiver} refused the sum of step {self._refused_step}, "
            "and threw away what opens sums of this session: more refusals would tell "
            f"{self._frames.agreement.combiner} what they hold; set up a new session"
        )

    def _dequantised(
        self, sum_BD: NDArray[np.signedinteger[Any]], binding: StepBinding
    ) -> FloatArray:
        """The real numbers of a sum; RemoteProtocolError if no contributions add up to it."""
        limit = self._sum.fixed_point.limit
        if not -limit <= sum_BD.min() <= sum_BD.max() <= limit:
            raise self._beyond_range(binding)
        return self._sum.fixed_point.dequantise(sum_BD)

    def _beyond_range(self, binding: StepBinding) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"the sum of step {binding.step} from {self._frames.agreement.combiner} lies beyond "
            "the range of its contributions; it was altered, a passive added other numbers "
            "than agreed, or the passives answered different messages"
        )

    @abstractmethod
    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """The sum in a frame that answers `binding`; RemoteProtocolError if it is none."""

    @abstractmethod
    def _forget(self) -> None:
        """Throw away what opens sums; called again, do nothing."""


def _clear_frames(error: BaseException) -> None:
    """Empty the finished frames that an exception and those before it hold: keys, opened sums."""
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__context__


def join_sum(
    described: SecureSum,
    me: str,
    *,
    send: Callable[[str, bytes], object],
    receive: Callable[[], tuple[str, bytes]],
) -> SumReceiver | SumCombiner | SumContributor:
    """Make the role of `me` and hold its setup with the others, over links of one's own.

    For a training loop that this project does not run. The links must be authenticated
    (`apfed_protocols.seal.SealedLink`).

    Args:
        described: the sum that all parties agreed on.
        me: the receiver, the combiner or a contributor.
        send: carries bytes to the party that is named.
        receive: waits for the next setup message and returns (sender, bytes).

    Raises:
        LocalProtocolError: no party of the agreement has that name.
        RemoteProtocolError: a peer's setup message is malformed or unexpected.
    """
    agreement = described.agreement
    role: SumReceiver | SumCombiner | SumContributor
    if me == agreement.receiver:
        role = described.receiver()
    elif me == agreement.combiner:
        role = described.combiner()
    else:
        role = described.contributor(me)
    others = {agreement.receiver, agreement.combiner, *agreement.contributors} - {me}
    for out in role.start():
        send(out.receiver, out.body)
    while not role.finished:
        sender, body = receive()
        if sender not in others:
            raise RemoteProtocolError(f"{sender!r} takes no part in this sum and wrote to {me}")
        for out in role.receive(sender, body):
            send(out.receiver, out.body)
    return role
