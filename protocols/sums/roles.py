"""What roles are built on: secrets that stay, no setup, one round, one refusal.

Run by: every role of a sum. Protects from: roles that are copied with their keys, messages
where none is expected, and peers that learn from what a receiver refuses.
"""

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed_frames import AgreedFrames
from protocols.sums.agreement import StepBinding
from protocols.sums.frame import Frame
from protocols.sums.interface import FloatArray

__all__ = [
    "KeepsSecrets",
    "NoSetup",
    "OneRefusalReceiver",
    "OneRoundCombiner",
    "OneRoundContributor",
]


class KeepsSecrets:
    """Base of what holds keys or unprotected values: never serialised, never copied."""

    def __reduce__(self) -> str:
        raise LocalProtocolError(
            f"{type(self).__name__} holds secrets of its party and is never serialised"
        )


class NoSetup:
    """The conversation of a role that needs no setup message."""

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        raise RemoteProtocolError(f"{sender} sent {len(body)} bytes of setup, but none is expected")

    @property
    def finished(self) -> bool:
        return True


class OneRoundContributor:
    """The second round of a contributor that has none."""

    def answer(self, request: bytes) -> bytes:
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: its contribution is all that it sends, and a "
            f"request of {len(request)} bytes has no answer"
        )


class OneRoundCombiner:
    """The second round of a combiner that has none."""

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        del binding_digest
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: combine the {len(contributions)} contributions, "
            "nobody is asked anything"
        )


class OneRefusalReceiver(KeepsSecrets, ABC):
    """The receiver's end: it opens sums until it refuses one, and none after that.

    Whether an altered sum is taken or refused depends on the secret key and on what the sum holds,
    and whoever altered it sees which, if only from the run that ends. Each further answer would
    tell more, up to a whole contribution and the whole key (a reaction attack). So with the first
    refusal, for whatever reason, an interruption included, what opens sums is thrown away: all that
    reactions ever tell is which step was the first to be refused, log2(S + 1) bits of a session of
    S steps.
    """

    _frames: AgreedFrames
    _refused_step: int | None = None

    def __init__(self) -> None:
        self._opening = threading.RLock()

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
