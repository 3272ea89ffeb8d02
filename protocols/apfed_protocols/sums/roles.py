"""Base classes of sums and their three roles: the order of a step, one refusal, secrets that stay.

Run by: the active (`SumReceiver`), each passive (`SumContributor`), the aggregator (`SumCombiner`).
Guarantee asked of every secure sum: the receiver learns the sum and nothing else of one
contribution; the combiner learns no value. Protects from: values that leave unclipped, before the
setup or twice in a step; roles that are copied with their keys; messages where none is expected;
and peers that learn from what a receiver refuses.
"""

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from numbers import Number
from typing import Any, ClassVar, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import is_whole, require_type
from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.gradients import refuse_gradients
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.randomness import fresh_key
from apfed_protocols.sums.fixed_point import Clipping, FixedPoint
from apfed_protocols.sums.frames import AgreedFrames, Frame, compute_fingerprint
from apfed_protocols.sums.interface import FloatArray, IntArray, StepBinding, SumAgreement, SumLeaks
from apfed_protocols.sums.readers import describe_readers, require_no_single_reader
from apfed_protocols.trees import Flattened, flatten_tree

__all__ = [
    "DescribedSum",
    "KeepsSecrets",
    "NoSetup",
    "OneRoundCombiner",
    "ReceivingCombiner",
    "Role",
    "SecureSum",
    "Setup",
    "SumCombiner",
    "SumContributor",
    "SumReceiver",
    "join_sum",
    "make_template",
    "role_of",
    "run_role",
]


_INTEGER_BYTES = 8.0
Tree = TypeVar("Tree")


class KeepsSecrets:
    """Base of what holds keys or unprotected values: never serialised, never copied."""

    def __reduce__(self) -> str:
        raise LocalProtocolError(
            f"{type(self).__name__} holds secrets of its party and is never serialised"
        )


class DescribedSum:
    """A sum as its agreement describes it.

    Attributes:
        scheme: what encrypts or shares the numbers, masks: what is added to them before; the two
            axes of the table.
        name: both in words, `spelled`; its key in the table.
        unsafe: whether single contributions are readable by anybody but their owner; so they count
            where a class does not say False.
        rounds: between passives and aggregator in one step, 1 or 2 (see `SumCombiner`).
        needs_all: whether a step without one of the contributors has no sum.
        opened_with_receiver, opened_with_others: whether one contribution opens only with what the
            receiver holds, and only with what all other contributors hold.
        rests_on: what must be hard to compute, or true of the parties, for it to protect.
        leaks: who learns what, and what the sum does not give.
    """

    scheme: ClassVar[str]
    masks: ClassVar[str] = "none"
    name: ClassVar[str]
    unsafe: ClassVar[bool] = True
    rounds: ClassVar[int] = 1
    needs_all: ClassVar[bool] = True
    opened_with_receiver: ClassVar[bool]
    opened_with_others: ClassVar[bool]
    rests_on: ClassVar[str]
    leaks: ClassVar[SumLeaks]
    agreement: SumAgreement
    allow_single_reader: bool = False

    @cached_property
    def fixed_point(self) -> FixedPoint:
        return FixedPoint.from_agreement(self.agreement)

    @property
    def least(self) -> int:
        """Return the number of contributors without whom a step has no sum."""
        return len(self.agreement.contributors)

    def encode_contribution(
        self,
        values_BD: FloatArray,
        noise_BD: IntArray | None,
        clipping: Clipping | None = None,
    ) -> NDArray[Any]:
        """Return what a contributor adds, in new memory: clipped rows in fixed point, and noise."""
        return self.fixed_point.quantise_rows(values_BD, noise_BD, clipping=clipping)

    def row_bound(self) -> float | None:
        """Return C, the L2 norm to which longer rows are scaled; None: rows are not clipped."""
        return self.agreement.clip_norm

    def compute_rounding_error(self) -> float:
        """Return the largest error of one value of the sum against the sum of the clipped rows."""
        return self.fixed_point.rounding

    def list_parameters(self) -> Mapping[str, object]:
        """Return the public parameters, for the contract and the report."""
        return {"scheme": self.scheme, "masks": self.masks}

    def make_frames(self, key: bytes = b"", *, minimum: int | None = None) -> AgreedFrames:
        """Return one role's writer and checker of frames, under a public key where there is one."""
        mark = compute_fingerprint(self.agreement, self.list_parameters(), key)
        return AgreedFrames(self.agreement, self.name, mark, minimum)


@dataclass(frozen=True)
class SecureSum(DescribedSum, ABC):
    """A scheme of secure summation under one agreement.

    Args:
        agreement: what all parties fixed.
        allow_single_reader: this party's own consent that one computer may read one contribution,
            where the settings let it (`apfed_protocols.sums.readers`).

    Raises LocalProtocolError: the combiner is the receiver, who would read single contributions
    since there are no masks; or one computer could read one contribution, and nobody allowed it.
    Warns UnsafeChoiceWarning: it can, and that is allowed.
    """

    agreement: SumAgreement
    allow_single_reader: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Raise LocalProtocolError for parties that could read a single contribution without
        permission.
        """
        require_type(self, bool, "allow_single_reader")
        receiver = self.agreement.receiver
        if receiver == self.agreement.combiner and self.masks == "none":
            raise LocalProtocolError(
                f"{receiver} receives and combines, and {self.name} has no masks: {receiver} would "
                "read each contribution before it adds them. Let another party combine, or take "
                "masks: pairwise, recoverable, or bfv under pairwise ones"
            )
        require_no_single_reader(self, stacklevel=5)

    def describe(self, *, hub: bool = False, signed: bool = True) -> str:
        """Return in words who takes part, what protects, and who can read one contribution.

        Args:
            hub: whether one computer runs receiver and combiner, as under `hub_pump`.
            signed: whether set-up messages are authenticated from end to end.
        """
        agreement = self.agreement
        needed = f"{self.least} of {len(agreement.contributors)}"
        contributors = ", ".join(agreement.contributors)
        ends = f"{agreement.receiver} reads the sum, {agreement.combiner} combines"
        parts = (
            f"{self.name}: {contributors} contribute, {ends}.",
            f"A step needs {needed} contributors. It rests on {self.rests_on}.",
            describe_readers(self, hub=hub, signed=signed),
        )
        return "\n".join(parts)

    @property
    def value_bytes(self) -> float:
        """Return the bytes on the wire of one value of a long contribution, frames apart."""
        return _INTEGER_BYTES

    @property
    def min_bytes(self) -> float:
        """Return the bytes on the wire of a contribution of one value, frames apart."""
        return self.value_bytes

    @abstractmethod
    def make_receiver(self) -> "SumReceiver": ...

    @abstractmethod
    def make_contributor(self, me: str) -> "SumContributor": ...

    @abstractmethod
    def make_combiner(self) -> "SumCombiner": ...


class Setup(Conversation, Protocol):
    def require_completion(self) -> None:
        """Raise LocalProtocolError, which names what is missing, before the set-up is finished."""
        ...


class NoSetup:
    def start(self) -> Iterable[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        raise RemoteProtocolError(f"{sender} sent {len(body)} bytes of setup, but none is expected")

    @property
    def is_finished(self) -> bool:
        return True

    def require_completion(self) -> None:
        """Do nothing: it is always finished."""


class Role(KeepsSecrets):
    def __init__(self, frames: AgreedFrames, setup: Setup) -> None:
        self._frames = frames
        self._setup = setup

    def start(self) -> Iterable[Outgoing]:
        return self._setup.start()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        return self._setup.receive(sender, body)

    @property
    def is_finished(self) -> bool:
        return self._setup.is_finished


class SumContributor(Role, ABC):
    """The end of one passive. Holds no secret key of the receiver.

    With one round a step is `contribute`; with two it is `contribute`, then `answer`.
    """

    def __init__(
        self, secure_sum: DescribedSum, me: str, frames: AgreedFrames, setup: Setup
    ) -> None:
        """Make the role of contributor `me`, with fresh noise keys; nothing is sent yet."""
        self._position = secure_sum.agreement.find_position(me)
        self.me = me
        self.clipping = Clipping()
        self._sum = self.described = secure_sum
        self._turn = threading.Lock()
        self._noise_key = fresh_key()
        self._lifetime_id = fresh_key().hex()
        self._times = 0
        super().__init__(frames, setup)

    def contribute(
        self, values: Any, binding: StepBinding | None = None, noise_BD: IntArray | None = None
    ) -> bytes:
        """Clip each row to C, quantise, add the noise, use the step, protect; in no other order.

        Args:
            values: floats or integers: an array or tensor of any rank, or lists, tuples and dicts
                of them, which are one row (`apfed_protocols.trees`). They stay as they are. A
                tensor that requires a gradient is refused, which names what to do instead.
            binding: what this contribution answers; its step must be above all former ones. None:
                the step after the last one, bound to structure and shapes of the values alone.
            noise_BD: steps of fixed point, from `apfed_protocols.noise` under a key of this party,
                in the shape of the rows; only where the agreement says noise. None: drawn here.

        Raises:
            LocalProtocolError: values that are empty, NaN or infinite, or no numbers; a step
                already answered; or noise that is not agreed, of another shape, or beyond its
                bound.

        Warns:
            ClippingWarning: the 1st, 10th, 100th, ... time that a row is beyond C, or that a tenth
                or more of a contribution's numbers round to 0; `clipping` counts all.
        """
        refuse_gradients(values, self.me)
        flat = flatten_tree(values)
        self._frames.require_own_process()  # before the lock, which a fork may have copied shut
        with self._turn:
            return self._make_contribution(
                flat, binding or self._frames.next_binding(flat), noise_BD
            )

    def _make_contribution(
        self, flat: Flattened, binding: StepBinding, noise_BD: IntArray | None
    ) -> bytes:
        """Encode, use the step, protect and pack one contribution, in this order: a step counts as
        used before any protected value exists, so that a failure cannot make it be used twice.

        `noise_BD`: steps of fixed point to add; None: no noise.
        """
        values_BD = flat.matrix
        deviation = self._sum.agreement.noise
        before = replace(self.clipping)
        if noise_BD is None and deviation is not None:
            noise_BD = discrete_gaussian(
                self._noise_key, binding.digest, deviation=deviation, shape=values_BD.shape
            )
        numbers_BD = self._sum.encode_contribution(values_BD, noise_BD, self.clipping)
        self._require_setup()
        self._frames.begin_step(binding)
        self._note_question(values_BD, binding)
        blobs = self._protect_numbers(numbers_BD, binding)
        rows, columns = values_BD.shape
        body = self._frames.pack_contribution(self.me, binding, (rows, columns), blobs)
        self.clipping.warn_of_clipping(self.me, self._sum.fixed_point, before)
        return body

    @property
    def was_taken_up(self) -> bool:
        """True if this role was put away before, and lives on."""
        return self._times > 0

    def export_state(self) -> dict[str, Any]:
        """Return all of this role, secrets in hexadecimal, and close it.

        Only `apfed_protocols.sums.put_away` calls this.
        """
        self._frames.require_own_process()  # before the lock, which a fork may have copied shut
        with self._turn:
            self._frames.require_here()
            secrets = self._export_secrets()  # or it refuses, and the role stays
            return {
                "role": self._lifetime_id,
                "times": self._times + 1,
                "last": self._frames.export_step(),
                "clipping": asdict(self.clipping),
                "noise": self._noise_key.hex(),
                **secrets,
            }

    def import_state(self, state: Mapping[str, Any]) -> None:
        """Become the role that `export_state` returned.

        `state`: plain values by name.
        """
        self._lifetime_id = state["role"]
        self._times = state["times"]
        self.clipping = Clipping(**state["clipping"])
        self._noise_key = bytes.fromhex(state["noise"])
        self._import_secrets(state)
        self._frames.import_step(state["last"])

    def _export_secrets(self) -> dict[str, Any]:
        """Return what this kind of role adds to `export_state`, and forget it."""
        raise LocalProtocolError(
            f"{self.me}: a role of {self._sum.name} holds shares for the next step, and is never "
            "put away; keep it in memory, or take pairwise masks"
        )

    def _import_secrets(self, state: Mapping[str, Any]) -> None:
        """Restore what `_export_secrets` returned."""

    def _require_setup(self) -> None:
        """Raise LocalProtocolError, which names what is missing, before the set-up is finished."""
        self._setup.require_completion()

    def _note_question(self, values_BD: FloatArray, binding: StepBinding) -> None:
        """Record what is about to be answered, for sums with a second round."""

    @abstractmethod
    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Return what may leave of these numbers, which may be changed in place."""

    def answer(self, request: bytes) -> bytes:
        """Answer, in a second round, what the aggregator asks about the last contribution; once.

        Raises:
            LocalProtocolError: the sum has one round, or nothing waits for a request.
            RemoteProtocolError: the request is malformed, names another step or message, or
                asks for what the agreement does not allow.
        """
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: its contribution is all that it sends, and a "
            f"request of {len(request)} bytes has no answer"
        )


class SumCombiner(Role, ABC):
    """The end of the aggregator. Holds no long-lived key at all.

    With one round a step is `combine` of the contributions; with two it is `ask` with the
    contributions, then `combine` of the answers. Both take frames by the authenticated names of
    their senders, and what these must answer, where the aggregator knows it.
    """

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """Take the contributions in a second round; return one request for each party asked.

        `binding_digest`: what all must answer; None: compared with each other alone.

        Raises LocalProtocolError: the sum has one round; RemoteProtocolError: as `combine`.
        """
        del binding_digest
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: combine the {len(contributions)} contributions, "
            "nobody is asked anything"
        )

    @abstractmethod
    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """Add one contribution of each agreed party. Raises RemoteProtocolError: a contributor is
        missing or unknown, a frame is malformed, or the frames answer different messages
        (equivocation by the active).
        """


class OneRoundCombiner(SumCombiner):
    """The aggregator's end where nobody is asked anything: adds what it cannot read."""

    def __init__(
        self, frames: AgreedFrames, add: Callable[[Sequence[Frame]], Sequence[bytes]]
    ) -> None:
        """Combine by `add`, which maps the checked frames to the blobs of their sum."""
        self._add = add
        super().__init__(frames, NoSetup())

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        frames = self._frames.open_contributions(bodies, binding_digest)
        return self._frames.sum_of(frames, self._add(frames))


class SumReceiver(Role, ABC):
    """The end of the active, the only one that can read the sum; until it refuses one.

    Whether an altered sum is taken or refused depends on the secret key and on what the sum holds,
    and whoever altered it sees which, if only from the run that ends. Each further answer would
    tell more, up to a whole contribution and the whole key (a reaction attack). So with the first
    refusal, for whatever reason, an interruption included, what opens sums is thrown away: all that
    reactions ever tell is which step was the first to be refused, log2(S + 1) bits of a session of
    S steps.

    Attributes:
        counted: whose contributions are in the sum that was opened last; all, unless it may lack
            some (`recoverable`).
    """

    _refused_step: int | None = None

    def __init__(self, secure_sum: DescribedSum, frames: AgreedFrames, setup: Setup) -> None:
        """Make the receiver's role; `counted` names all contributors until a sum says that it lacks
        some.
        """
        self._opening = threading.RLock()
        self._sum = self.described = secure_sum
        self.counted: Sequence[str] = secure_sum.agreement.contributors
        super().__init__(frames, setup)

    def start(self) -> Iterable[Outgoing]:
        self._require_no_refusal()
        return super().start()

    @overload
    def decode(
        self, combined: bytes, template: tuple[int, ...], binding: StepBinding | None = None
    ) -> FloatArray: ...

    @overload
    def decode(
        self, combined: bytes, template: Tree, binding: StepBinding | None = None
    ) -> Tree: ...

    def decode(self, combined: bytes, template: Any, binding: StepBinding | None = None) -> Any:
        """Open the sum of all contributions to the step that `binding` names, one at a time.

        Args:
            combined: what the aggregator sent.
            template: the shape that was asked for, for a new array; or an array, tensor or tree in
                whose structure, types and device the sum comes.
            binding: what was asked; its step must be above all former ones. None: as in
                `SumContributor.contribute`.

        Raises:
            LocalProtocolError: this step was opened already, nothing was set up, or a sum was
                refused before.
            RemoteProtocolError: a frame of another step or shape, or a sum out of range.
        """
        flat, shape = make_template(template)
        self._frames.require_own_process()  # before the lock, which a fork may have copied shut
        with self._opening:
            sum_BD = self._decode_sum(combined, flat, binding or self._frames.next_binding(flat))
        if shape is None:
            return flat.restore_tree(sum_BD, off=self._sum.compute_rounding_error())
        return sum_BD.reshape(shape)

    def _decode_sum(self, combined: bytes, flat: Flattened, binding: StepBinding) -> FloatArray:
        """Open one sum and return its real numbers, (B, D). Whatever the peer caused to fail
        destroys the secrets first, so that a reaction is seen once (see the class).

        `combined`: what the aggregator sent.
        """
        rows, columns = flat.matrix.shape
        self._require_no_refusal()
        self._refused_step = binding.step  # taken back where all goes well, and only there
        try:
            frame = self._frames.open_sum(combined, (rows, columns), binding)
            opened = self._open(frame, binding)
        except LocalProtocolError:  # our own misuse, which shows before any secret is used
            self._refused_step = None
            raise
        except BaseException as error:
            self._forget_secrets()
            _clear_frames(error)
            raise
        self._refused_step = None
        return opened

    def _require_no_refusal(self) -> None:
        """Raise LocalProtocolError after a refused sum; what opens sums is gone then."""
        if self._refused_step is None:
            return
        self._forget_secrets()  # an interruption may have come before it
        raise LocalProtocolError(
            f"{self._frames.agreement.receiver} refused the sum of step {self._refused_step}, "
            "and threw away what opens sums of this session: more refusals would tell "
            f"{self._frames.agreement.combiner} what they hold; set up a new session"
        )

    def _dequantise_sum(
        self, sum_BD: NDArray[np.signedinteger[Any]], binding: StepBinding
    ) -> FloatArray:
        """Return a sum in real numbers; RemoteProtocolError if no contributions add up to it."""
        limit = self._sum.fixed_point.limit
        if not -limit <= sum_BD.min() <= sum_BD.max() <= limit:
            raise self._make_range_error(binding)
        return self._sum.fixed_point.dequantise_sum(sum_BD)

    def _make_range_error(self, binding: StepBinding) -> RemoteProtocolError:
        """Return the error for a sum that no contributions can add up to."""
        return RemoteProtocolError(
            f"the sum of step {binding.step} from {self._frames.agreement.combiner} lies beyond "
            "the range of its contributions; it was altered, a passive added other numbers "
            "than agreed, or the passives answered different messages"
        )

    @abstractmethod
    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Open the sum in a frame that answers `binding`; RemoteProtocolError if it is none."""

    @abstractmethod
    def _forget_secrets(self) -> None:
        """Throw away what opens sums; called again, do nothing."""


def make_template(template: Any) -> tuple[Flattened, tuple[int, ...] | None]:
    """Return the form in which a sum is to come, and its sizes where `template` is a shape.

    `template` is a shape, an array or a tree of arrays. Raises LocalProtocolError: it is none of
    these.
    """
    sizes = template if isinstance(template, tuple | list) else (template,)
    if not all(size is None or isinstance(size, Number) for size in sizes):
        return flatten_tree(template), None
    if (
        sizes is not template
        or not template
        or not all(map(is_whole, template))
        or min(template) < 1
    ):
        raise LocalProtocolError(
            f"the shape of a sum is numbers (rows, columns, ...) above 0, got {template!r}; or "
            "give an array, or a tree of arrays, in whose form the sum is to come"
        )
    return flatten_tree(np.empty(template)), tuple(map(int, template))


def _clear_frames(error: BaseException) -> None:
    """Empty the finished frames that an exception and those before it hold: keys, opened sums."""
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__context__


class ReceivingCombiner(KeepsSecrets):
    """A receiver and combiner in one party, for sums under masks, which protect from both.

    Its `ask`, `combine` and `decode` are theirs.
    """

    def __init__(self, secure_sum: SecureSum) -> None:
        """Join the receiver's and the combiner's roles of one sum in one party."""
        self._receiver = secure_sum.make_receiver()
        self._combiner = secure_sum.make_combiner()
        self.described = secure_sum
        self._me = secure_sum.agreement.receiver
        self._senders = set[str]()
        self.ask = self._combiner.ask
        self.combine = self._combiner.combine
        self.decode = self._receiver.decode

    def start(self) -> Iterable[Outgoing]:
        return self._route_outgoing([*self._receiver.start(), *self._combiner.start()])

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Take a set-up message: a contributor sends the receiver's, if any, before the other."""
        first = sender not in self._senders and not self._receiver.is_finished
        self._senders.add(sender)
        return self._route_outgoing(
            (self._receiver if first else self._combiner).receive(sender, body)
        )

    def _route_outgoing(self, outgoing: Iterable[Outgoing]) -> Iterable[Outgoing]:
        """Deliver set-up messages from one of the two roles to the other here; yield those to
        contributors.

        `outgoing`: messages by one of the two roles.
        """
        for out in outgoing:
            if out.receiver == self._me:  # a key holder tells the combiner under which key it adds
                yield from self._combiner.receive(self._me, out.body)
            else:
                yield out

    @property
    def is_finished(self) -> bool:
        return self._receiver.is_finished and self._combiner.is_finished


def role_of(
    secure_sum: SecureSum, me: str
) -> SumReceiver | SumCombiner | SumContributor | ReceivingCombiner:
    """Return the role of `me`.

    Raises LocalProtocolError: no party of the agreement has that name.
    """
    agreement = secure_sum.agreement
    if me == agreement.receiver == agreement.combiner:
        return ReceivingCombiner(secure_sum)
    if me == agreement.receiver:
        return secure_sum.make_receiver()
    return (
        secure_sum.make_combiner() if me == agreement.combiner else secure_sum.make_contributor(me)
    )


def join_sum(
    secure_sum: SecureSum,
    me: str,
    *,
    send: Callable[[str, bytes], object],
    receive: Callable[[], tuple[str, bytes]],
) -> SumReceiver | SumCombiner | SumContributor | ReceivingCombiner:
    """Make the role of `me` and hold its setup with the others, over links of one's own.

    For a training loop that this project does not run. The links must be authenticated
    (`apfed_protocols.seal.SealedLink`).

    Args:
        secure_sum: the sum that all parties agreed on.
        me: the receiver, the combiner or a contributor.
        send: carries bytes to the party that is named.
        receive: waits for the next setup message and returns (sender, bytes).

    Raises:
        LocalProtocolError: no party of the agreement has that name.
        RemoteProtocolError: a peer's setup message is malformed or unexpected.
    """
    agreement = secure_sum.agreement
    role = role_of(secure_sum, me)
    others = {agreement.receiver, agreement.combiner, *agreement.contributors} - {me}
    run_role(role, me, others, send=send, receive=receive)
    return role


def run_role(
    role: Conversation,
    me: str,
    others: Collection[str],
    *,
    send: Callable[[str, bytes], object],
    receive: Callable[[], tuple[str, bytes]],
) -> None:
    """Play one role with the others until it is finished. Raises RemoteProtocolError: a stranger
    wrote, or what the role raises.

    `send`: carries bytes to the party that is named. `receive`: waits for the next message and
    returns (sender, bytes).
    """
    for out in role.start():
        send(out.receiver, out.body)
    while not role.is_finished:
        sender, body = receive()
        if sender not in others:
            raise RemoteProtocolError(f"{sender!r} takes no part in this sum and wrote to {me}")
        for out in role.receive(sender, body):
            send(out.receiver, out.body)
