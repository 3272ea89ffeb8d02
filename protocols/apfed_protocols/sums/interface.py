"""What every way of adding private vectors offers: three roles.

Run by: the active (`SumReceiver`), each passive (`SumContributor`) and the aggregator
(`SumCombiner`). Guarantee asked of every secure sum: the receiver learns the sum
and nothing else of one contribution; the combiner learns no value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import Conversation
from apfed_protocols.sums.agreement import StepBinding, SumAgreement

__all__ = [
    "ALTERED_SUM",
    "FloatArray",
    "IntArray",
    "Reading",
    "SecureSum",
    "StepBinding",
    "SumAgreement",
    "SumCombiner",
    "SumContributor",
    "SumLeaks",
    "SumReceiver",
    "spelled",
]

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]


class SumContributor(Conversation, Protocol):
    """The end of one passive. Holds no secret key of the receiver.

    With one round a step is `contribute`; with two it is `contribute`, then `answer`.
    """

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        """Clip each row to C, quantise, add the noise, protect and frame one contribution.

        Args:
            values_BD: float32 or float64, B rows of D numbers, however they lie in memory; they
                stay as they are.
            binding: what this contribution answers; its step must be above all former ones.
            noise_BD: steps of fixed point, from `apfed_protocols.noise` under a key of
            this
                party; given exactly where the agreement says noise.

        Raises:
            LocalProtocolError: not a finite, non-empty matrix; a step already answered; or noise
                that is missing, not agreed, of another shape, or beyond its bound.
        """
        ...

    def answer(self, request: bytes) -> bytes:
        """Second round: answer what the aggregator asks about the last contribution, once.

        Raises:
            LocalProtocolError: the sum has one round, or nothing waits for a request.
            RemoteProtocolError: the request is malformed, names another step or message, or
                asks for what the agreement does not allow.
        """
        ...


class SumCombiner(Conversation, Protocol):
    """The end of the aggregator. Holds no long-lived key at all.

    With one round a step is `combine` of the contributions; with two it is `ask` with the
    contributions, then `combine` of the answers.
    """

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """Second round: take the contributions, return one request for each party asked.

        Args:
            contributions: frames by the authenticated names of their senders.
            binding_digest: what the frames must answer, where the aggregator knows it.

        Raises:
            LocalProtocolError: the sum has one round.
            RemoteProtocolError: as `combine`.
        """
        ...

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """Add one contribution of each agreed party.

        Args:
            bodies: frames by the authenticated names of their senders: contributions with
                one round, answers to `ask` with two.
            binding_digest: what the frames must answer, where the aggregator knows it.

        Raises:
            RemoteProtocolError: a contributor is missing or unknown, a frame is malformed,
                or the frames answer different messages (equivocation by the active).
        """
        ...


class SumReceiver(Conversation, Protocol):
    """The end of the active: the only one that can read the sum."""

    def decode(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> FloatArray:
        """Open the sum of all contributions to the step that `binding` names.

        Args:
            combined: what the aggregator sent.
            shape: (rows, columns) that were asked for.
            binding: what was asked; its step must be above all former ones.

        Raises:
            LocalProtocolError: this step was opened already, nothing was set up, or a sum was
                refused before.
            RemoteProtocolError: a frame of another step or shape, or a sum out of range. What
                opens sums is thrown away then (see `OneRefusalReceiver`).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the receiver of one kind of message learns of it.

    Attributes:
        reads: what it can read.
        protects: what stands between it and more.
        remains: what is not protected.
    """

    reads: str
    protects: str
    remains: str


@dataclass(frozen=True, kw_only=True)
class SumLeaks:
    """Who learns what under one sum, in sentences for reports.

    Attributes:
        contribution: what the aggregator reads of one.
        request, answer: of a second round; what a passive reads of the one, the aggregator of the
            other.
        active_and_aggregator: what these two learn together of two passives or more.
        single: who reads single contributions, as "X, who reads each contribution"; "": nobody.
        altered: what the active's reaction to an altered sum tells whoever altered it; see
            `OneRefusalReceiver`.
    """

    contribution: Reading
    request: Reading | None = None
    answer: Reading | None = None
    active_and_aggregator: str
    single: str = ""
    altered: str


ALTERED_SUM = (
    "Each reaction to an altered sum tells of the sum of one step, and each is about another "
    "number: about twenty sessions tell one."
)
"""`SumLeaks.altered` where what is sent belongs to one step."""


class SecureSum(Protocol):
    """A description of one sum, from which each role's end is made.

    Attributes:
        scheme: what encrypts or shares the numbers, masks: what is added to them before; the two
            axes of the table.
        name: both in words, `spelled`; its key in the table.
        unsafe: whether single contributions are readable by anybody but their owner.
        rounds: between passives and aggregator in one step, 1 or 2 (see `SumCombiner`).
        needs_all: whether a step without one of the contributors has no sum.
        rests_on: what must be hard to compute, or true of the parties, for it to protect.
        leaks: who learns what, and what the sum does not give.
    """

    scheme: ClassVar[str]
    masks: ClassVar[str]
    name: ClassVar[str]
    unsafe: ClassVar[bool]
    rounds: ClassVar[int]
    needs_all: ClassVar[bool]
    rests_on: ClassVar[str]
    leaks: ClassVar[SumLeaks]

    def __init__(self, agreement: SumAgreement) -> None: ...

    @property
    def agreement(self) -> SumAgreement: ...

    def receiver(self) -> SumReceiver: ...

    def contributor(self, me: str) -> SumContributor: ...

    def combiner(self) -> SumCombiner: ...

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        """Forecast the bytes of one float32 contribution of this shape (rows, columns)."""
        ...

    def rounding(self) -> float:
        """The largest error of one value of the sum against the sum of the clipped rows."""
        ...

    def parameters(self) -> Mapping[str, object]:
        """Public parameters, for the contract and the report."""
        ...


def spelled(scheme: str, masks: str) -> str:
    """The one spelling of a pair: "bfv + pairwise masks", and "bfv" without masks."""
    return scheme if masks == "none" else f"{scheme} + {masks} masks"
