"""Base classes of sums and their three roles: the order of a step, one refusal, secrets that stay.

Run by: the active (`SumReceiver`), each passive (`SumContributor`) and the aggregator
(`SumAggregator`).
Guarantee asked of every secure sum: the receiver learns the sum and nothing else of one
contribution; the aggregator learns no value. Protects from: values that leave unclipped, before the
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
    "OneRoundAggregator",
    "ReceivingAggregator",
    "Role",
    "SecureSum",
    "Setup",
    "SumAggregator",
    "SumContributor",
    "SumReceiver",
    "join_sum",
    "make_role",
    "make_template",
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
        name: both in words (`format_sum_name`); the key of the sum in the table of sums.
        unsafe: whether anybody but its owner can read a single contribution; True, the pessimistic
            value, where a class does not say False.
        rounds: messages of each passive to the aggregator in one step, 1 (its contribution) or 2
            (its contribution, and its answer to a request).
        needs_all: whether a step without one of the contributors has no sum.
        needs_receiver_key: whether a contribution can be decrypted only with the receiver's keys.
        needs_other_contributors: whether it can be decrypted only with the keys of all other
            contributors.
        rests_on: the assumptions under which it protects, on computation and on the parties.
        leaks: who learns what, and what the sum does not give.
    """

    scheme: ClassVar[str]
    masks: ClassVar[str] = "none"
    name: ClassVar[str]
    unsafe: ClassVar[bool] = True
    rounds: ClassVar[int] = 1
    needs_all: ClassVar[bool] = True
    needs_receiver_key: ClassVar[bool]
    needs_other_contributors: ClassVar[bool]
    rests_on: ClassVar[str]
    leaks: ClassVar[SumLeaks]
    agreement: SumAgreement
    allow_single_reader: bool = False

    @cached_property
    def fixed_point(self) -> FixedPoint:
        return FixedPoint.from_agreement(self.agreement)

    @property
    def min_contributors(self) -> int:
        """Return the least number of contributors with which a step has a sum."""
        return len(self.agreement.contributors)

    def encode_contribution(
        self,
        values_BD: FloatArray,
        noise_BD: IntArray | None,
        clipping: Clipping | None = None,
    ) -> NDArray[Any]:
        """Return what one contributor adds to the sum, as a new integer array, (B, D): its rows,
        clipped and in fixed point, plus the noise.

        Args:
            values_BD: B rows of D real numbers to contribute.
            noise_BD: integer noise to add, in steps of fixed point; None: no noise.
            clipping: counts the rows that are clipped and the values that are rounded to 0; None:
                nothing is counted.
        """
        return self.fixed_point.quantise_rows(values_BD, noise_BD, clipping=clipping)

    def get_clip_norm(self) -> float | None:
        """Return C, the L2 norm to which longer rows are scaled; None: rows are not clipped."""
        return self.agreement.clip_norm

    def compute_rounding_error(self) -> float:
        """Return the largest error of one value of the sum against the sum of the clipped rows."""
        return self.fixed_point.max_rounding_error

    def list_parameters(self) -> Mapping[str, object]:
        """Return the public parameters, for the contract and the report."""
        return {"scheme": self.scheme, "masks": self.masks}

    def make_frames(self, key: bytes = b"", *, minimum: int | None = None) -> AgreedFrames:
        """Return a new object that writes and checks the frames (messages) of one role. Every frame
        carries a fingerprint, a digest of agreement, parameters and public key.

        Args:
            key: the receiver's public key; empty: the scheme has none, or it is not known yet.
            minimum: the least number of contributors with which a step has a sum; None: all.
        """
        fingerprint = compute_fingerprint(self.agreement, self.list_parameters(), key)
        return AgreedFrames(self.agreement, self.name, fingerprint, minimum)


@dataclass(frozen=True)
class SecureSum(DescribedSum, ABC):
    """A scheme of secure summation under one agreement.

    Args:
        agreement: what all parties fixed.
        allow_single_reader: this party's own consent that one computer may read one contribution,
            where the settings let it (`apfed_protocols.sums.readers`).

    Raises LocalProtocolError: the aggregator is the receiver, who would read single contributions
    since there are no masks; or one computer could read one contribution, and nobody allowed it.
    Warns UnsafeChoiceWarning: it can, and that is allowed.
    """

    agreement: SumAgreement
    allow_single_reader: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Check who could read a single contribution.

        Raises LocalProtocolError: one party could, and the settings do not allow it. Warns
        UnsafeChoiceWarning: one party could, and the settings allow it.
        """
        require_type(self, bool, "allow_single_reader")
        receiver = self.agreement.receiver
        if receiver == self.agreement.aggregator and self.masks == "none":
            raise LocalProtocolError(
                f"{receiver} receives and combines, and {self.name} has no masks: {receiver} would "
                "read each contribution before it adds them. Let another party combine, or take "
                "masks: pairwise, recoverable, or bfv under pairwise ones"
            )
        # Called for its exception or warning. By the level the warning points at the caller that
        # made this sum, past the constructors of dataclasses.
        require_no_single_reader(self, stacklevel=5)

    def describe(self, *, hub: bool = False, signed: bool = True) -> str:
        """Return in words who takes part, on what assumptions the protection rests, and which
        parties together can read one contribution.

        Args:
            hub: whether one computer runs receiver and aggregator, as under `hub_pump`.
            signed: whether set-up messages are authenticated from end to end.
        """
        agreement = self.agreement
        needed = f"{self.min_contributors} of {len(agreement.contributors)}"
        contributors = ", ".join(agreement.contributors)
        receiver_and_aggregator = (
            f"{agreement.receiver} reads the sum, {agreement.aggregator} combines"
        )
        lines = (
            f"{self.name}: {contributors} contribute, {receiver_and_aggregator}.",
            f"A step needs {needed} contributors. It rests on {self.rests_on}.",
            describe_readers(self, hub=hub, signed=signed),
        )
        return "\n".join(lines)

    @property
    def value_bytes(self) -> float:
        """Return the bytes sent per value of a long contribution, without the frame's header."""
        return _INTEGER_BYTES

    @property
    def min_bytes(self) -> float:
        """Return the bytes sent for a contribution of one value, without the frame's header."""
        return self.value_bytes

    @abstractmethod
    def make_receiver(self) -> "SumReceiver": ...

    @abstractmethod
    def make_contributor(self, me: str) -> "SumContributor": ...

    @abstractmethod
    def make_aggregator(self) -> "SumAggregator": ...


class Setup(Conversation, Protocol):
    """The exchange of keys before the first step, as one role takes part in it."""

    def require_completion(self) -> None:
        """Raise LocalProtocolError, which names what is missing, before the set-up is finished."""
        ...


class NoSetup:
    """The set-up of a role that exchanges nothing before the first step."""

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
    """A party's part in one sum: its set-up messages go to `setup`, all others through `frames`."""

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
    """The role of one passive. Holds no secret key of the receiver.

    With one round a step is `contribute`; with two it is `contribute`, then `answer`.
    """

    def __init__(
        self, secure_sum: DescribedSum, me: str, frames: AgreedFrames, setup: Setup
    ) -> None:
        """Make the role of contributor `me`, with a fresh noise key; nothing is sent yet.

        Args:
            secure_sum: the sum that all parties agreed on.
            me: this contributor's name in the agreement.
            frames: writes and checks this role's messages.
            setup: this role's part in the exchange of keys before the first step.
        """
        self._position = secure_sum.agreement.find_position(me)
        self.me = me
        self.clipping = Clipping()
        self.secure_sum = secure_sum
        self._sum = secure_sum
        self._contribution_lock = threading.Lock()
        self._noise_key = fresh_key()
        # Names this role through suspensions, so that each suspended state is resumed once.
        self._lifetime_id = fresh_key().hex()
        self._times_suspended = 0
        super().__init__(frames, setup)

    def contribute(
        self, values: Any, binding: StepBinding | None = None, noise_BD: IntArray | None = None
    ) -> bytes:
        """Contribute values to the sum of one step; return the message to the aggregator.

        In this order: clip each row to the agreement's L2 norm C, quantise to fixed point, add the
        noise, mark the step as used, and protect (mask, encrypt or share) the numbers.

        Args:
            values: floats or integers: an array or tensor of any rank, or lists, tuples and dicts
                of them, which are one row (`apfed_protocols.trees`). They are not changed. A
                tensor that requires a gradient is refused; the error names what to do instead.
            binding: the step and the active's message that this contribution answers; its step
                must be above all former ones. None: the step after the last one, bound to
                structure and shapes of the values alone.
            noise_BD: integer noise to add, in steps of fixed point, (B, D) for B rows of D numbers,
                drawn by `apfed_protocols.noise` under a key of this party; only if the agreement
                has noise. None: drawn here.

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
        self._frames.require_own_process()  # before the lock, which a forked copy may hold forever
        with self._contribution_lock:
            step_binding = binding or self._frames.next_binding(flat)
            return self._make_contribution(flat, step_binding, noise_BD)

    def _make_contribution(
        self, flat: Flattened, binding: StepBinding, noise_BD: IntArray | None
    ) -> bytes:
        """Encode one contribution, mark its step as used, protect the numbers, and return the
        message to the aggregator.

        The order matters: a step counts as used before any protected value exists, so that a
        failure cannot lead to a second use of the step's masks or nonces.

        Args:
            flat: the values to contribute, as a matrix of B rows and D columns.
            binding: the step and the active's message that this contribution answers.
            noise_BD: integer noise to add, in steps of fixed point; None: drawn here if the
                agreement has noise.
        """
        values_BD = flat.matrix
        deviation = self._sum.agreement.noise
        counts_before = replace(self.clipping)
        if noise_BD is None and deviation is not None:
            noise_BD = discrete_gaussian(
                self._noise_key, binding.digest, deviation=deviation, shape=values_BD.shape
            )
        numbers_BD = self._sum.encode_contribution(values_BD, noise_BD, self.clipping)
        self._require_setup()
        self._frames.begin_step(binding)
        self._remember_request(values_BD, binding)
        blobs = self._protect_numbers(numbers_BD, binding)
        rows, columns = values_BD.shape
        body = self._frames.pack_contribution(self.me, binding, (rows, columns), blobs)
        self.clipping.warn_of_clipping(self.me, self._sum.fixed_point, counts_before)
        return body

    @property
    def was_resumed(self) -> bool:
        """Return whether this role was ever suspended and resumed (`suspended_roles`)."""
        return self._times_suspended > 0

    def export_state(self) -> dict[str, Any]:
        """Return the whole state of this role, secrets in hexadecimal, and close the role, so that
        no step is used both here and in the role that is resumed from the state.

        Only `apfed_protocols.sums.suspended_roles` calls this, which encrypts the state. Raises
        LocalProtocolError: the role is closed, or its sum has two rounds.
        """
        self._frames.require_own_process()  # before the lock, which a forked copy may hold forever
        with self._contribution_lock:
            self._frames.require_usable()
            secrets = self._export_secrets()  # if this raises, the role stays usable
            return {
                "role": self._lifetime_id,
                "times": self._times_suspended + 1,
                "last": self._frames.export_step(),
                "clipping": asdict(self.clipping),
                "noise": self._noise_key.hex(),
                **secrets,
            }

    def import_state(self, state: Mapping[str, Any]) -> None:
        """Continue as the role whose state `export_state` returned."""
        self._lifetime_id = state["role"]
        self._times_suspended = state["times"]
        self.clipping = Clipping(**state["clipping"])
        self._noise_key = bytes.fromhex(state["noise"])
        self._import_secrets(state)
        self._frames.import_step(state["last"])

    def _export_secrets(self) -> dict[str, Any]:
        """Return the secrets that this kind of role adds to `export_state`, and forget them."""
        raise LocalProtocolError(
            f"{self.me}: a role of {self._sum.name} holds shares for the next step, and is never "
            "put away; keep it in memory, or take pairwise masks"
        )

    def _import_secrets(self, state: Mapping[str, Any]) -> None:
        """Restore what `_export_secrets` returned."""

    def _require_setup(self) -> None:
        """Raise LocalProtocolError, which names what is missing, before the set-up is finished."""
        self._setup.require_completion()

    def _remember_request(self, values_BD: FloatArray, binding: StepBinding) -> None:
        """Record the request (the active's rows and message) that this contribution answers. Sums
        under recoverable masks override this, to refuse the same request for a sum of other
        contributors; all other sums do nothing.
        """

    @abstractmethod
    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        """Protect a contribution (mask, encrypt or secret-share it); return the blobs of its frame
        (byte strings, e.g. ciphertexts), which may be sent.

        Args:
            numbers_BD: B rows of D integers, from `encode_contribution`; may be changed in place.
            binding: the step and the active's message that the contribution answers.
        """

    def answer(self, request: bytes) -> bytes:
        """Return this contributor's answer to the aggregator's second-round request about the last
        contribution; each contribution is answered once. Here, in a sum with one round, only raise.

        Raises:
            LocalProtocolError: the sum has one round, or no contribution waits for a request.
            RemoteProtocolError: the request is malformed, names another step or message, or
                asks for what the agreement does not allow.
        """
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: its contribution is all that it sends, and a "
            f"request of {len(request)} bytes has no answer"
        )


class SumAggregator(Role, ABC):
    """The role of the aggregator. Holds no long-lived key at all.

    With one round a step is `combine` of the contributions; with two it is `ask` with the
    contributions, which returns requests, then `combine` of the contributors' answers to them. Both
    take frames by the authenticated names of their senders, and the digest of the binding (step and
    message) that all frames must answer, where the aggregator knows it.
    """

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """Take the contributions of a sum with two rounds; return the second-round request for each
        contributor that is asked. Here, in a sum with one round, only raise.

        `binding_digest`: SHA-256 digest (`StepBinding.digest`) of the step and of the active's
        message that all contributions must answer; None: the contributions are only compared with
        each other.

        Raises LocalProtocolError: the sum has one round. Raises RemoteProtocolError: a sender is
        missing or unknown, a frame is malformed, or the frames answer different messages.
        """
        del binding_digest
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: combine the {len(contributions)} contributions, "
            "nobody is asked anything"
        )

    @abstractmethod
    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """Add what the parties sent and return the message to the receiver.

        Args:
            bodies: the contributions, by sender; in a sum with two rounds the second-round answers.
            binding_digest: digest of the step and of the active's message that all frames must
                answer; None: the frames are only compared with each other.

        Raises RemoteProtocolError: a sender is missing or unknown, a frame is malformed, or the
        frames answer different messages (equivocation by the active).
        """


class OneRoundAggregator(SumAggregator):
    """The aggregator's role in a sum with one round: it adds contributions that it cannot read."""

    def __init__(
        self, frames: AgreedFrames, add: Callable[[Sequence[Frame]], Sequence[bytes]]
    ) -> None:
        """Make the role; `add` computes the blobs of the sum from the checked contributions."""
        self._add_frames = add
        super().__init__(frames, NoSetup())

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        frames = self._frames.parse_contributions(bodies, binding_digest)
        return self._frames.pack_sum(frames, self._add_frames(frames))


class SumReceiver(Role, ABC):
    """The role of the active, the only one that can read the sum, until it refuses one.

    Whether an altered sum is accepted or refused depends on the secret key and on the sum, and
    whoever altered it sees the reaction, if only because the run ends. Repeated reactions would
    reveal more, up to a whole contribution and the whole key (a reaction attack). So the first
    refusal, for whatever reason, an interruption included, destroys the keys that decrypt sums:
    all that reactions ever reveal is which step was refused first, log2(S + 1) bits in a session
    of S steps.

    Attributes:
        counted: the contributors whose values are in the last sum; all of them, unless the sum may
            lack some (`recoverable`).
    """

    _refused_step: int | None = None

    def __init__(self, secure_sum: DescribedSum, frames: AgreedFrames, setup: Setup) -> None:
        """Make the receiver's role.

        Args:
            secure_sum: the sum that all parties agreed on.
            frames: writes and checks this role's messages.
            setup: this role's part in the exchange of keys before the first step.
        """
        self._decode_lock = threading.RLock()
        self.secure_sum = secure_sum
        self._sum = secure_sum
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
        """Decrypt the sum of all contributions to one step; one thread at a time.

        Args:
            combined: the aggregator's message.
            template: the shape of the sum, to get a new array; or an array, tensor or tree whose
                structure, types and device the result gets.
            binding: the step and the active's message that the sum answers; its step must be above
                all former ones. None: the step after the last one, bound to structure and shapes of
                the values alone.

        Raises:
            LocalProtocolError: this step was decrypted already, nothing was set up, or a sum was
                refused before.
            RemoteProtocolError: a frame of another step or shape, or a sum out of range.
        """
        flat, shape = make_template(template)
        self._frames.require_own_process()  # before the lock, which a forked copy may hold forever
        with self._decode_lock:
            step_binding = binding or self._frames.next_binding(flat)
            sum_BD = self._decode_sum(combined, flat, step_binding)
        if shape is None:
            return flat.restore_tree(sum_BD, max_error=self._sum.compute_rounding_error())
        return sum_BD.reshape(shape)

    def _decode_sum(self, combined: bytes, flat: Flattened, binding: StepBinding) -> FloatArray:
        """Decrypt one sum and return its real numbers, (rows, columns).

        Each reaction to an altered sum reveals something about the sum and the key. So a failure
        that a peer could have caused destroys the keys before it is raised: the peer sees one
        reaction at most.

        Args:
            combined: the aggregator's message.
            flat: the template, whose matrix has the shape (rows, columns).
            binding: the step and the active's message that the sum answers.
        """
        rows, columns = flat.matrix.shape
        self._require_no_refusal()
        self._refused_step = binding.step  # reset only after success, or after our own misuse
        try:
            frame = self._frames.parse_sum(combined, (rows, columns), binding)
            sum_BD = self._decrypt_sum(frame, binding)
        except LocalProtocolError:  # our own misuse, which is noticed before any secret is used
            self._refused_step = None
            raise
        except BaseException as error:  # also an interruption, which is a reaction, too
            self._forget_secrets()
            _clear_tracebacks(error)  # whose local variables hold keys and sums
            raise
        self._refused_step = None
        return sum_BD

    def _require_no_refusal(self) -> None:
        """Raise LocalProtocolError if a sum was refused before; the keys are destroyed then."""
        if self._refused_step is None:
            return
        self._forget_secrets()  # again, since an interruption may have prevented the first time
        raise LocalProtocolError(
            f"{self._frames.agreement.receiver} refused the sum of step {self._refused_step}, "
            "and threw away what opens sums of this session: more refusals would tell "
            f"{self._frames.agreement.aggregator} what they hold; set up a new session"
        )

    def _dequantise_sum(
        self, sum_BD: NDArray[np.signedinteger[Any]], binding: StepBinding
    ) -> FloatArray:
        """Return a decrypted sum in real numbers, (B, D). Raises RemoteProtocolError: a value lies
        outside the range that contributions can add up to.

        `sum_BD`: the sum, B rows of D integers, in steps of fixed point. `binding`: the step, which
        the error names.
        """
        limit = self._sum.fixed_point.max_sum
        if not -limit <= sum_BD.min() <= sum_BD.max() <= limit:
            raise self._make_range_error(binding)
        return self._sum.fixed_point.dequantise_sum(sum_BD)

    def _make_range_error(self, binding: StepBinding) -> RemoteProtocolError:
        """Return the error for a sum outside the range that contributions can add up to."""
        return RemoteProtocolError(
            f"the sum of step {binding.step} from {self._frames.agreement.aggregator} lies beyond "
            "the range of its contributions; it was altered, a passive added other numbers "
            "than agreed, or the passives answered different messages"
        )

    @abstractmethod
    def _decrypt_sum(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Decrypt the sum in a frame (message); return its real numbers, (rows, columns).

        `binding`: the step and the active's message that the sum answers.

        Raises RemoteProtocolError: the frame holds no sum of this step.
        """

    @abstractmethod
    def _forget_secrets(self) -> None:
        """Destroy the keys that decrypt sums; may be called again."""


def make_template(template: Any) -> tuple[Flattened, tuple[int, ...] | None]:
    """Return the form in which a caller wants a sum.

    `template`: a shape (rows, columns, ...), an array or a tree of arrays.

    Returns:
        A flattened tree of that form, whose values do not matter; and the shape if `template` is a
        shape, else None.

    Raises LocalProtocolError: `template` is none of these.
    """
    is_sequence = isinstance(template, tuple | list)
    sizes = template if is_sequence else (template,)
    looks_like_shape = all(size is None or isinstance(size, Number) for size in sizes)
    if not looks_like_shape:
        return flatten_tree(template), None
    is_valid_shape = is_sequence and bool(sizes) and all(map(is_whole, sizes)) and min(sizes) >= 1
    if not is_valid_shape:
        raise LocalProtocolError(
            f"the shape of a sum is numbers (rows, columns, ...) above 0, got {template!r}; or "
            "give an array, or a tree of arrays, in whose form the sum is to come"
        )
    return flatten_tree(np.empty(template)), tuple(map(int, template))


def _clear_tracebacks(error: BaseException) -> None:
    """Delete the local variables of all stack frames in the traceback of an exception, and of the
    exceptions during whose handling it was raised: they may be keys and sums, which whoever logs
    the exception must not keep.
    """
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)
        raised = raised.__context__


class ReceivingAggregator(KeepsSecrets):
    """The roles of receiver and aggregator in one party, for sums whose masks protect from both.

    Its `ask` and `combine` are the aggregator's, its `decode` is the receiver's.
    """

    def __init__(self, secure_sum: SecureSum) -> None:
        """Join the receiver's and the aggregator's roles of one sum in one party."""
        self._receiver = secure_sum.make_receiver()
        self._aggregator = secure_sum.make_aggregator()
        self.secure_sum = secure_sum
        self._me = secure_sum.agreement.receiver
        self._seen_senders = set[str]()
        # The public methods of both roles, under their own names.
        self.ask = self._aggregator.ask
        self.combine = self._aggregator.combine
        self.decode = self._receiver.decode

    def start(self) -> Iterable[Outgoing]:
        return self._route_outgoing([*self._receiver.start(), *self._aggregator.start()])

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Pass a set-up message to the role (receiver or aggregator) that it is for, and return the
        messages to send. A contributor sends the message for the receiver, if there is one, before
        the message for the aggregator, so the order tells them apart.
        """
        is_for_receiver = sender not in self._seen_senders and not self._receiver.is_finished
        self._seen_senders.add(sender)
        role: Role = self._receiver if is_for_receiver else self._aggregator
        return self._route_outgoing(role.receive(sender, body))

    def _route_outgoing(self, outgoing: Iterable[Outgoing]) -> Iterable[Outgoing]:
        """Yield the messages to contributors; deliver the messages from one role of this party to
        the other, which do not leave the party.

        `outgoing`: set-up messages of the two roles.
        """
        for message in outgoing:
            if message.receiver == self._me:  # the receiver sends the aggregator its public key
                yield from self._aggregator.receive(self._me, message.body)
            else:
                yield message

    @property
    def is_finished(self) -> bool:
        return self._receiver.is_finished and self._aggregator.is_finished


def make_role(
    secure_sum: SecureSum, me: str
) -> SumReceiver | SumAggregator | SumContributor | ReceivingAggregator:
    """Return a new role for the party `me`, before its set-up.

    Raises LocalProtocolError: no party of the agreement has that name.
    """
    agreement = secure_sum.agreement
    if me == agreement.receiver == agreement.aggregator:
        return ReceivingAggregator(secure_sum)
    if me == agreement.receiver:
        return secure_sum.make_receiver()
    if me == agreement.aggregator:
        return secure_sum.make_aggregator()
    return secure_sum.make_contributor(me)


def join_sum(
    secure_sum: SecureSum,
    me: str,
    *,
    send: Callable[[str, bytes], object],
    receive: Callable[[], tuple[str, bytes]],
) -> SumReceiver | SumAggregator | SumContributor | ReceivingAggregator:
    """Make the role of `me`, exchange its set-up messages with the others, and return it.

    For a training loop of one's own, over links of one's own. These must be authenticated
    (`apfed_protocols.seal.SealedLink`).

    Args:
        secure_sum: the sum that all parties agreed on.
        me: the receiver, the aggregator or a contributor.
        send: sends bytes to the party that is named.
        receive: waits for the next set-up message and returns (sender, bytes).

    Raises:
        LocalProtocolError: no party of the agreement has that name.
        RemoteProtocolError: a peer's setup message is malformed or unexpected.
    """
    agreement = secure_sum.agreement
    role = make_role(secure_sum, me)
    others = {agreement.receiver, agreement.aggregator, *agreement.contributors} - {me}
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
    """Exchange messages between one role and the other parties until the role is finished.

    Args:
        role: this party's part in the protocol, not started.
        me: this party's name, for errors.
        others: the names of all other parties.
        send: sends bytes to the party that is named.
        receive: waits for the next message and returns (sender, bytes).

    Raises RemoteProtocolError: a party that is not among `others` sent a message; or whatever
    `role` raises.
    """
    for message in role.start():
        send(message.receiver, message.body)
    while not role.is_finished:
        sender, body = receive()
        if sender not in others:
            raise RemoteProtocolError(f"{sender!r} takes no part in this sum and wrote to {me}")
        for message in role.receive(sender, body):
            send(message.receiver, message.body)
