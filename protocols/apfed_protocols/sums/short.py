"""A secure sum in one line, for your own training loop: all roles in this process, or one of them.

Run by: a caller that does not want to write the agreement, make the roles, run their set-up and
count steps. It protects from what the chosen sum protects from. It does not protect from this
process: with all roles in one process all secrets are in one memory, so that is a simulation, or
the service of an honest host. Parties in separate processes use `SumSession.join`.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import Any, Literal, TypeAlias, TypeVar

from apfed_protocols.conversation import Outgoing, converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.gradients import (
    attach_gradients,
    records_gradients,
    require_addable_gradients,
    require_numbers,
)
from apfed_protocols.randomness import ForkCheck, fresh_key
from apfed_protocols.sums import SECURE_SUMS
from apfed_protocols.sums.bits import choose_bits
from apfed_protocols.sums.fixed_point import (
    TOO_MANY_CLIPPED,
    Clipping,
    FixedPoint,
    check_matrix,
    clip_rows,
)
from apfed_protocols.sums.interface import (
    MAX_BITS,
    USUAL_BITS,
    StepBinding,
    SumAgreement,
    format_sum_name,
)
from apfed_protocols.sums.recoverable import RecoverableSum
from apfed_protocols.sums.roles import (
    KeepsSecrets,
    ReceivingAggregator,
    SecureSum,
    SumAggregator,
    SumContributor,
    SumReceiver,
    join_sum,
    make_role,
    run_role,
)
from apfed_protocols.sums.suspended_roles import RoleLog, resume_role
from apfed_protocols.trees import Flattened, flatten_tree

__all__ = ["ClipAgreement", "SumName", "SumSession", "secure_sum"]

SumName: TypeAlias = Literal[
    "masked",
    "recoverable",
    "masked bfv",
    "ckks",
    "bfv",
    "crypten",
    "plain",
    "plain + pairwise masks",
    "plain + recoverable masks",
    "bfv + pairwise masks",
]
"""The sums that `secure_sum` makes: the short names, and the keys of `SECURE_SUMS`."""
Tree = TypeVar("Tree")
"""The type of what one contributor gives, in which the sum comes back."""

_NAME_BY_SHORT_NAME: Mapping[str, str] = {
    "masked": format_sum_name("plain", "pairwise"),
    "recoverable": format_sum_name("plain", "recoverable"),
    "masked bfv": format_sum_name("bfv", "pairwise"),
}
_LOGGER = logging.getLogger(__name__)
# A report of a clip agreement is one signed byte: an exponent, or one of two codes outside their
# range.
_MIN_EXPONENT = -99
_MAX_EXPONENT = 99
_CLIP_FITS = 101
_CLIP_DOES_NOT_FIT = 102
_MAX_EARLY_MESSAGES = 1024
_HEADROOM_EXPONENTS = 2
"""Headroom of C, in powers of two, above the largest row that counts (see `_SWAY_EXPONENTS`):
values may grow fourfold before one is clipped."""
_MAX_RAISE_EXPONENTS = 6
"""Largest rise of C before its headroom, in powers of two, above the lower median of the sizes: the
bits that one contributor can cost the others."""
Role = SumReceiver | SumAggregator | SumContributor | ReceivingAggregator


def secure_sum(
    name: SumName,
    contributors: Iterable[str],
    *,
    to: str,
    clip: float | Literal["agree"],
    by: str | None = None,
    bits: int | None = None,
    session: str | None = None,
    threshold: int | None = None,
    noise: int | None = None,
    allow_single: bool = False,
    allow_single_reader: bool = False,
) -> "SumSession":
    """Return a secure sum of vectors. In one process it is called with the values of all
    contributors; for separate processes it makes the roles of the parties.

    Examples:
        >>> from apfed_protocols import secure_sum
        >>> total = secure_sum("masked", ["bank", "shop"], to="clinic", clip=10)
        >>> total({"bank": [1, 2], "shop": [3, 4]})
        [4, 6]

    Args:
        name: the scheme: "masked", "recoverable", "masked bfv", "ckks", "bfv", "crypten" or
            "plain", or a key of `SECURE_SUMS`. Take "masked" unless something speaks against it.
            "bfv" has no masks; "masked bfv" also hides contributions from an aggregator that has
            the reader's key.
        contributors: names of the parties that add values, in an order that all parties know.
        to: the party that reads the sum.
        clip: C, the L2 bound of a row of a contribution (`apfed_protocols.trees` says what a row
            is); longer rows are scaled down to it, with a warning. "agree": the contributors agree
            on 4 times the largest row of their first values (`ClipAgreement`). Each tells all
            parties the power of two at or above its own largest row, and no more. In one process
            they agree anew in any call in which 1 % of a contributor's rows are longer than C, or a
            tenth of its numbers round to 0 and a smaller C would help.
        by: the party that combines contributions. None: `to`, which needs a sum under masks.
        bits: width of one number in fixed point, sign included; each contributor adds an error of
            at most C / (2^bits - 2) to a number. None: the most, up to 24, with which this sum
            sends no more bytes than with 16 bits; or 16 with noise, whose unit depends on the bits.
            Choose fewer bits if only few values are possible (hard votes, say): the last digits of
            a sum might tell who gave which value.
        session: names this sum, the same at all parties. None: a random name, for one process.
        threshold: number of contributors that must contribute and answer, under "recoverable";
            None: all. With a smaller number, the reader of the sum can compute one contribution
            from two sums.
        noise: standard deviation of the discrete Gaussian noise that each contributor adds to each
            value, in steps of fixed point; None: no noise.
        allow_single: permit one contributor, whose "sum" is its own vector.
        allow_single_reader: accept, with a warning, that one computer can read one contribution, if
            the other settings make this possible. Every party must accept it for itself.

    Raises:
        LocalProtocolError: an unknown sum, names that are no names, doubled or too few, numbers
            out of range, `to` combining without masks, or one computer that can read one
            contribution without `allow_single_reader`.
    """
    sum_type = _find_sum_type(name)
    if isinstance(clip, str) and clip != "agree":
        raise LocalProtocolError(f'clip is a number or "agree", got {clip!r:.80}')
    agreement = SumAgreement(
        session=f"in one process {fresh_key().hex()}" if session is None else session,
        receiver=to,
        aggregator=to if by is None else by,
        contributors=contributors,  # type: ignore[arg-type]  # which makes them a tuple
        clip_norm=1.0 if clip == "agree" else clip,
        bits=USUAL_BITS if bits is None else bits,
        threshold=threshold,
        noise=noise,
        allow_single=allow_single,
    )
    make_sum = partial(_make_sum, sum_type, agreement, allow_single_reader=allow_single_reader)
    # With noise, which is given in steps of fixed point, other bits would change its size.
    are_bits_free = bits is None and noise is None
    initial_sum = make_sum(choose_bits(make_sum) if are_bits_free else agreement.bits)
    return SumSession(initial_sum, is_clip_agreed=clip != "agree")


def _find_sum_type(name: str) -> type[SecureSum]:
    """Return the class of the sum with this short or long name.

    Raises LocalProtocolError: no sum has this name.
    """
    sum_type = SECURE_SUMS.get(_NAME_BY_SHORT_NAME.get(str(name), str(name)))
    if sum_type is None:
        long_names = [key for key in SECURE_SUMS if key not in _NAME_BY_SHORT_NAME.values()]
        known_names = [*_NAME_BY_SHORT_NAME, *long_names]
        raise LocalProtocolError(
            f"no sum is called {name!r:.80}; there are: {', '.join(known_names)}"
        )
    return sum_type


def _make_sum(
    sum_type: type[SecureSum], agreement: SumAgreement, bits: int, *, allow_single_reader: bool
) -> SecureSum:
    """Return a sum of this class under the agreement, with this number of fixed-point bits."""
    return sum_type(replace(agreement, bits=bits), allow_single_reader=allow_single_reader)


class SumSession(KeepsSecrets):
    """A sum that is called with all contributors' values, or makes the roles of separate processes.
    Threads take turns.

    Attributes:
        secure_sum: the sum and its agreement.
    """

    def __init__(self, secure_sum: SecureSum, *, is_clip_agreed: bool = True) -> None:
        """Start a session of a secure sum. `agreed`: whether its clip (L2 bound of a row) is a
        number; False: the contributors still have to agree on it.
        """
        self.secure_sum = secure_sum
        self._is_clip_agreed = is_clip_agreed
        # Each agreement on a clip reveals sizes that the noise does not cover, so with noise the
        # clip is agreed only once.
        self._can_renegotiate_clip = not is_clip_agreed and secure_sum.agreement.noise is None
        # Set-up and agreement messages that arrived before this party was ready for them.
        self._early_messages: list[tuple[str, bytes]] = []
        self._call_lock = threading.Lock()
        self._next_step = 0  # the next step with all roles in this process
        # Contributors that an earlier step lacked, and that stay out (recoverable masks).
        self._left_out_contributors = set[str]()
        self._fork_check = ForkCheck("this sum")

    def __call__(self, values: Mapping[str, Tree]) -> Tree:
        """Return the sum of all contributors' values, with all roles in this process.

        Args:
            values: an array or tensor of any rank, or a tree of them, by contributor's name, all of
                one structure; under recoverable masks some contributors may be missing.

        Returns:
            The sum, with the structure, types and device of the first contributor's values (a plain
            tensor for a `torch.nn.Parameter`). If a tensor requires a gradient, the sum stays in
            the autograd graph: its gradient is the gradient of adding the clipped rows
            (`apfed_protocols.gradients`).

        Raises:
            LocalProtocolError: values of an unknown contributor, too few contributors, or values
                of different shapes, NaN, empty or no numbers (no step is used then); or this is a
                forked process.

        Warns:
            ClippingWarning: the 1st, 10th, 100th, ... time that a contributor's row is beyond the
                clip, or that a tenth or more of its numbers round to 0.
        """
        self._fork_check.require_own_process()
        require_numbers(values, "this sum")
        flattened_by_contributor = self._check_values(values)
        keeps_graph = records_gradients(values)
        if keeps_graph:
            require_addable_gradients({name: values[name] for name in flattened_by_contributor})
        with self._call_lock:
            if not self._is_clip_agreed or self._can_renegotiate_clip:
                self._agree_clip_in_process(flattened_by_contributor)
            total: Tree = self._add_contributions(flattened_by_contributor)
            clip = self.secure_sum.get_clip_norm()
        if not keeps_graph:
            return total
        return attach_gradients(
            total,
            {name: values[name] for name in flattened_by_contributor},
            flattened_by_contributor,
            clip,
        )

    def _agree_clip_in_process(self, flattened_by_contributor: Mapping[str, Flattened]) -> None:
        """Let all contributors, in this process, agree on a clip (L2 bound of a row), or check
        whether the present clip still fits; apply the result.

        `flat`: the values to add, by contributor.
        """
        agreement = self.secure_sum.agreement
        current_clip = agreement.clip_norm if self._is_clip_agreed else None
        parties = {
            name: ClipAgreement(
                name,
                flattened_by_contributor,
                flattened.matrix,
                current_clip=current_clip,
                bits=agreement.bits,
            )
            for name, flattened in flattened_by_contributor.items()
        }
        converse(parties)
        any_party = next(iter(parties.values()))  # all reach the same clip
        self._apply_clip(any_party.clip)

    def _add_contributions(self, flattened_by_contributor: Mapping[str, Flattened]) -> Any:
        """Run one step with all roles in this process; return the sum in the structure and types of
        the first contributor's values.

        `flat`: the values to add, by contributor.
        """
        contributors, receiver_and_aggregator = self._roles
        # One role, if one party both receives and combines.
        receiver = receiver_and_aggregator[0]
        aggregator = receiver_and_aggregator[-1]
        first = next(iter(flattened_by_contributor.values()))
        session = self.secure_sum.agreement.session
        binding = StepBinding.from_contents(
            session, self._next_step, rows=first.digest, message=b""
        )
        self._next_step += 1
        bodies: Mapping[str, bytes] = {
            name: contributors[name].contribute(flattened.matrix, binding)
            for name, flattened in flattened_by_contributor.items()
        }
        if self.secure_sum.rounds == 2:
            requests = aggregator.ask(bodies, binding.digest)
            bodies = {
                name: contributors[name].answer(request) for name, request in requests.items()
            }
        self._left_out_contributors = {
            name for name in contributors if name not in flattened_by_contributor
        }
        _LOGGER.debug(
            "step %d: %d of %d contribute",
            binding.step,
            len(flattened_by_contributor),
            len(contributors),
        )
        combined = aggregator.combine(bodies, binding.digest)
        total = receiver.decode(combined, first.matrix.shape, binding)
        return first.restore_tree(total, max_error=self.secure_sum.compute_rounding_error())

    def _check_values(self, values: Mapping[str, Any]) -> Mapping[str, Flattened]:
        """Return each contributor's values, flattened to rows, in the agreement's order.

        `values`: what each contributor adds, by its name.

        Raises LocalProtocolError, which names the contributors: some are unknown or missing, were
        left out of an earlier step, or have unfit values or values of another structure than the
        first contributor's.
        """
        self._check_contributors(values)
        flattened_by_contributor: dict[str, Flattened] = {}
        for name in self.secure_sum.agreement.contributors:
            if name in values:
                try:
                    flattened_by_contributor[name] = flatten_tree(values[name])
                    check_matrix(flattened_by_contributor[name].matrix)
                except LocalProtocolError as error:
                    raise LocalProtocolError(f"{name}: {error}") from error
        first = next(iter(flattened_by_contributor))
        for name, flattened in flattened_by_contributor.items():
            if flattened.digest != flattened_by_contributor[first].digest:
                raise LocalProtocolError(
                    f"{name} gives {flattened.shapes_text}, but {first} "
                    f"{flattened_by_contributor[first].shapes_text}; what is added has one "
                    "structure, one shape and the same labels at all contributors"
                )
        return flattened_by_contributor

    def _check_contributors(self, values: Mapping[str, Any]) -> None:
        """Raise LocalProtocolError unless `values` are a mapping from names of enough contributors,
        none of whom was left out of an earlier step.
        """
        names = self.secure_sum.agreement.contributors
        if not isinstance(values, Mapping):
            raise LocalProtocolError(
                f"give the values of each contributor by its name, as {{{names[0]!r}: ...}}; got a "
                f"{type(values).__name__}"
            )
        unknown = [name for name in values if name not in names]
        missing = [name for name in names if name not in values]
        needed = getattr(self.secure_sum, "threshold", len(names))  # only recoverable sums have one
        if unknown or len(names) - len(missing) < needed:
            raise LocalProtocolError(
                f"this sum needs {needed} of {', '.join(names)}; missing: "
                f"{', '.join(missing) or 'nobody'}; unknown: "
                f"{', '.join(map(str, unknown)) or 'nobody'}"
            )
        returning = [
            name for name in names if name in values and name in self._left_out_contributors
        ]
        if returning:
            raise LocalProtocolError(
                f"{', '.join(returning)} was left out of an earlier step, and stays out: the "
                "others opened its masks. Begin a new sum"
            )

    @cached_property
    def _roles(self) -> tuple[Mapping[str, SumContributor], Sequence[Any]]:
        """Return the roles of all parties, for this process, after their set-up: the contributors'
        roles by name, and a list of the roles of receiver and aggregator (one role if one party is
        both).
        """
        agreement = self.secure_sum.agreement
        contributors = {
            name: self.secure_sum.make_contributor(name) for name in agreement.contributors
        }
        receiver_and_aggregator = {
            me: make_role(self.secure_sum, me) for me in (agreement.receiver, agreement.aggregator)
        }
        converse({**contributors, **receiver_and_aggregator})
        _LOGGER.info("%s set up among %s", self.secure_sum.name, ", ".join(agreement.contributors))
        return contributors, [*receiver_and_aggregator.values()]

    def describe(self, *, hub: bool = False, signed: bool = True) -> str:
        """Return in words who takes part, and which parties together can read one contribution; see
        `SecureSum.describe`.
        """
        return self.secure_sum.describe(hub=hub, signed=signed)

    @property
    def clip(self) -> float:
        """Return C, the L2 bound of a row. Raises LocalProtocolError: C is not agreed yet."""
        self._require_clip()
        return self.secure_sum.agreement.clip_norm

    @property
    def clipping(self) -> Mapping[str, Clipping]:
        """Return, by contributor, the counts of what clipping and rounding changed in calls of this
        session.
        """
        return {name: role.clipping for name, role in self._roles[0].items()}

    def make_contributor(
        self, me: str, *, log_file: str | PathLike[str] | None = None, is_new_log: bool = False
    ) -> SumContributor:
        """Return the role of the contributor `me`, for a process of its own, before its set-up
        (`join` makes a role and runs its set-up).

        Args:
            me: the contributor's name.
            log_file: path of a file on this party's disk, under recoverable masks. The file
                records, in all sessions that use it, which requests (rows and messages of the
                active) were answered in a sum of which contributors. None: the log is kept in
                memory.
            is_new_log: create the file, for the first session.

        Raises LocalProtocolError: the clip is not agreed yet; the file is missing without
        `is_new_log`, or exists with it; or `log_file` is given to a sum that always has all
        contributors.
        """
        self._require_clip()
        if log_file is None:
            return self.secure_sum.make_contributor(me)
        if not isinstance(self.secure_sum, RecoverableSum):
            raise LocalProtocolError(
                f"{me}: {self.secure_sum.name} needs all contributors in every step, so it has no "
                "log of who was counted; leave log_file out (`resume_role` has a log of its own)"
            )
        return self.secure_sum.make_contributor(me, log_file=log_file, is_new_log=is_new_log)

    def make_receiver(self) -> SumReceiver | ReceivingAggregator:
        """Return the role of the party that reads the sum, which also combines if no other party
        does.
        """
        self._require_clip()
        role = make_role(self.secure_sum, self.secure_sum.agreement.receiver)
        assert isinstance(role, SumReceiver | ReceivingAggregator)
        return role

    def make_aggregator(self) -> SumAggregator | ReceivingAggregator:
        """Return the role of the party that combines contributions, if it is not the receiver.

        Raises LocalProtocolError: the receiver combines, in the role that `make_receiver` returns;
        or the clip is not agreed yet.
        """
        agreement = self.secure_sum.agreement
        if agreement.aggregator == agreement.receiver:
            raise LocalProtocolError(
                f"{agreement.aggregator} receives and combines in one role, that of "
                "`make_receiver()`; two of them would not know each other's keys"
            )
        self._require_clip()
        return self.secure_sum.make_aggregator()

    def join(
        self,
        me: str,
        *,
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
        first: Any = None,
    ) -> Role:
        """Make the role of `me`, exchange its set-up messages with the others, and return it.

        The links must be authenticated and encrypted (`apfed_protocols.SealedLink`), and all
        parties name the same `session`.

        Args:
            me: the receiver, the aggregator or a contributor.
            send: sends bytes to the party that is named.
            receive: waits for the next message and returns (sender, bytes).
            first: a contributor's first values, by which C is agreed, with `clip="agree"`; else
                None.

        Raises:
            LocalProtocolError: no party has that name; or a contributor gives no first values to
                agree on C.
            RemoteProtocolError: a peer's message is malformed, unexpected or from a stranger.
        """
        if not self._is_clip_agreed:
            self._agree_clip(me, send, receive, first, is_renegotiation=False)
        return self._run_setup(me, send, receive)

    def agree_anew(
        self,
        role: Role,
        me: str,
        *,
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
        values: Any = None,
    ) -> Role:
        """Ask all contributors whether the agreed clip (L2 bound of a row) still fits, and agree on
        another clip if it does not.

        For roles in separate processes, made by `join` with `clip="agree"`. All parties call it
        between the same two steps, by a rule that all know: before each step, or before steps 1, 2,
        4, 8, ... The result follows from messages that all receive, so it is the same at every
        party. Each contributor tells all parties one bit: whether the clip fits. If it does not fit
        some values, each contributor also tells the size of its rows (`ClipAgreement`). So a
        contributor that always says no learns the others' sizes each time, and costs them a set-up
        if the clip changes.

        Args:
            role: the present role of `me`.
            me: this party's name.
            send, receive: functions that send bytes to the party that is named, and that wait for
                the next message and return (sender, bytes); contributions must travel another way,
                e.g. another queue.
            values: what a contributor is about to contribute; None at the other parties.

        Returns:
            The same role if the clip C stays; otherwise a new role under the new C, with new keys,
            whose steps begin at 0. The old role must not be used any more then.

        Raises:
            LocalProtocolError: the clip was a number, there is noise, or a contributor gives no
                values.
            RemoteProtocolError: a peer's message is malformed, unexpected or from a stranger.
        """
        if not self._can_renegotiate_clip:
            raise LocalProtocolError(
                f"{me}: nothing is agreed anew where the clip is a number, or under noise, which "
                f'does not cover what an agreement tells; it is {self.clip:g}. Say clip="agree" '
                "and no noise, or begin a new sum"
            )
        self._require_clip()
        has_changed = self._agree_clip(me, send, receive, values, is_renegotiation=True)
        if not has_changed:
            return role
        new_role = self._run_setup(me, send, receive)
        if isinstance(new_role, SumContributor) and isinstance(role, SumContributor):
            new_role.clipping = role.clipping  # its counts go on
        return new_role

    def _agree_clip(
        self,
        me: str,
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
        values: Any,
        *,
        is_renegotiation: bool,
    ) -> bool:
        """Agree on a clip (L2 bound of a row) over links, and apply it; return whether it changed.

        Args:
            me: this party's name.
            send, receive: functions that send bytes to the party that is named, and that wait for
                the next message and return (sender, bytes).
            values: what a contributor is about to contribute; None at the other parties.
            is_renegotiation: whether a clip was agreed before, so that first only its fit is asked.

        Raises LocalProtocolError: a contributor gives no values.
        """
        agreement = self.secure_sum.agreement
        names = agreement.contributors
        parties = {agreement.receiver, agreement.aggregator, *names}
        matrix = None if values is None else flatten_tree(values).matrix
        if me in names and matrix is None:
            values_name = "its next values" if is_renegotiation else "its first values"
            raise LocalProtocolError(f"{me} gives {values_name}, for a clip to be agreed")
        current_clip = agreement.clip_norm if is_renegotiation else None
        clip_agreement = ClipAgreement(
            me, names, matrix, recipients=parties, current_clip=current_clip, bits=agreement.bits
        )
        receive_clip_message = partial(
            self._receive_clip_message, me, parties, clip_agreement, receive
        )
        run_role(clip_agreement, me, parties - {me}, send=send, receive=receive_clip_message)
        return self._apply_clip(clip_agreement.clip)

    def _receive_clip_message(
        self,
        me: str,
        parties: Collection[str],
        clip_agreement: "ClipAgreement",
        receive: Callable[[], tuple[str, bytes]],
    ) -> tuple[str, bytes]:
        """Return (sender, bytes) of the next message of a clip agreement. Faster parties may send
        messages of the set-up that follows; they are stored until it begins.

        Args:
            me: this party's name.
            parties: names of all parties of the sum.
            clip_agreement: this party's role in the agreement.
            receive: waits for the next message of any kind, and returns (sender, bytes).
        """
        for index, (sender, body) in enumerate(self._early_messages):
            if clip_agreement.needs_message(sender, body):
                del self._early_messages[index]
                return sender, body
        while True:
            sender, body = receive()
            # A stranger's message is returned, too: `run_role` refuses it.
            if sender not in parties or clip_agreement.needs_message(sender, body):
                return sender, body
            self._store_early_message(me, sender, body)

    def _run_setup(
        self,
        me: str,
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
    ) -> Role:
        """Make the role of `me`, exchange its set-up messages with the others, and return it.
        `send` sends bytes to the party that is named; `receive` waits for the next message and
        returns (sender, bytes).
        """

        def receive_setup_message() -> tuple[str, bytes]:
            """Return (sender, bytes) of the next set-up message. Messages of one byte belong to the
            next clip agreement, which faster parties may have begun; they are stored until then.
            """
            for index, (_, body) in enumerate(self._early_messages):
                if len(body) != 1:
                    return self._early_messages.pop(index)
            while True:
                sender, body = receive()
                if len(body) != 1:
                    return sender, body
                self._store_early_message(me, sender, body)

        return join_sum(self.secure_sum, me, send=send, receive=receive_setup_message)

    def _store_early_message(self, me: str, sender: str, body: bytes) -> None:
        """Store a message that arrived before the clip agreement or set-up that it belongs to.
        Raises RemoteProtocolError: `_MAX_EARLY_MESSAGES` are stored already.
        """
        if len(self._early_messages) >= _MAX_EARLY_MESSAGES:
            raise RemoteProtocolError(
                f"{sender} sent {me} {len(body)} bytes, after {_MAX_EARLY_MESSAGES} messages that "
                "belong to no agreement or set-up under way; contributions go another way than "
                "what `receive` returns here"
            )
        self._early_messages.append((sender, body))

    def resume_role(
        self, me: str, sealed_role: bytes, key: bytes, *, role_log: RoleLog
    ) -> SumContributor:
        """Resume the role of the contributor `me` from `sealed_role`, the bytes in which
        `suspend_role` encrypted it under `key`; `role_log` is the log that lets each suspended role
        be resumed once.
        """
        return resume_role(self.secure_sum, me, sealed_role, key, role_log=role_log)

    def _apply_clip(self, clip: float) -> bool:
        """Replace the agreement's clip C by `clip`. If this process has all roles, make them again
        under the new agreement. Return whether C changed, or was agreed for the first time.
        """
        if self._is_clip_agreed and clip == self.secure_sum.agreement.clip_norm:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)  # the plain sum warned before
            agreement = replace(self.secure_sum.agreement, clip_norm=clip)
            self.secure_sum = replace(self.secure_sum, agreement=agreement)
            self._is_clip_agreed = True
        if "_roles" in self.__dict__:  # the cached property was computed
            clipping_by_contributor = self.clipping
            del self.__dict__["_roles"]  # reading it makes new roles
            contributors, _ = self._roles
            for name, role in contributors.items():
                role.clipping = clipping_by_contributor[name]  # its counts go on
        return True

    def _require_clip(self) -> None:
        """Raise LocalProtocolError while the clip is still to be agreed."""
        if not self._is_clip_agreed:
            raise LocalProtocolError(
                'this sum has no clip yet: clip="agree" is settled by the first call in one '
                "process, and by join(me, first=...) among several; or say a number"
            )


class ClipAgreement(KeepsSecrets):
    """A party's part in a message exchange by which contributors agree on one clip, C, that fits
    the values which they hold now.

    Each contributor sends all parties one exponent: that of the power of two at or above the
    largest norm of its rows. This reveals which of about 200 sizes its largest row has, and nothing
    else. A contributor whose values are all zero says so and has no influence. C is 4 times the
    largest reported size, since values may grow, and at most 4 * 64 times the lower median.

    What one lying contributor can do: among three or more reported sizes it can raise C to at most
    256 times the largest honest size, which costs the others 6 of their bits, or lower it to 4
    times the smallest honest size, so that longer honest rows are clipped, with a warning. Between
    two reported sizes no party can tell which is false: a huge size costs 6 bits; a tiny one clips
    the other's rows to nearly nothing, with a warning to that party. A contributor that deviates
    can add any numbers up to C in any case.

    Args:
        me: a contributor, or a party that only receives the reports.
        contributors: the parties that report a size.
        matrix: the rows of `me`, (rows, columns); None: it reports nothing.
        recipients: the parties that receive the reports; None: the contributors.
        current_clip: the present C: each contributor first reports in one bit whether it still
            fits, and sizes only if it does not fit one of them. None: there is no C yet.
        bits: width of one value in fixed point, which decides whether values are too small for C.
    """

    def __init__(
        self,
        me: str,
        contributors: Collection[str],
        matrix: Any = None,
        recipients: Collection[str] | None = None,
        *,
        current_clip: float | None = None,
        bits: int = MAX_BITS,
    ) -> None:
        """Compute what the party `me` reports about its rows."""
        self.me = me
        self._contributors = tuple(contributors)
        self._recipients = sorted({*(contributors if recipients is None else recipients)} - {me})
        self._current_clip = current_clip
        # The least e with every own row's norm at most 2^e; None: this party has no rows.
        self._own_exponent = None if matrix is None else _find_exponent(matrix)
        # The reports so far, by contributor: whether the present C fits, and the exponents.
        self._fits_by_contributor: dict[str, bool] = {}
        self._exponents: dict[str, int] = {}
        if self._own_exponent is not None and current_clip is None:
            self._exponents[me] = self._own_exponent
        elif self._own_exponent is not None and current_clip is not None:
            self._fits_by_contributor[me] = _clip_still_fits(
                matrix, self._own_exponent, current_clip, bits
            )

    def start(self) -> Iterable[Outgoing]:
        """Return the messages with this party's first report: the exponent of its largest row or,
        if there is a clip already, one bit: whether the clip still fits.
        """
        if self._own_exponent is None:
            return []
        if self._current_clip is None:
            return self._make_messages(self._own_exponent)
        fits = self._fits_by_contributor[self.me]
        report = self._make_messages(_CLIP_FITS if fits else _CLIP_DOES_NOT_FIT)
        # If all reports are here already (of a single contributor), the exponent may be due now.
        return [*report, *self._make_exponent_messages()]

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Store a contributor's report. If this was the last report on whether the clip fits, and
        it does not fit all, return the messages with this party's exponent; otherwise return no
        messages.

        `body`: the report, one signed byte: an exponent, or whether the clip fits.

        Raises RemoteProtocolError: `sender` is no contributor or has reported before, or the report
        is not a number in range.
        """
        number = int.from_bytes(body, "big", signed=True) if len(body) == 1 else None
        is_about_fit = self._current_clip is not None and sender not in self._fits_by_contributor
        allowed_numbers: Collection[int] = range(_MIN_EXPONENT, _MAX_EXPONENT + 1)
        if is_about_fit:
            allowed_numbers = (_CLIP_FITS, _CLIP_DOES_NOT_FIT)
        may_report = sender in self._contributors and sender not in self._exponents
        if not may_report or number not in allowed_numbers:
            expected = "whether the clip still fits" if is_about_fit else "one exponent"
            raise RemoteProtocolError(
                f"{sender} told {self.me} no size of its rows: expected {expected} of "
                f"{_MIN_EXPONENT}..{_MAX_EXPONENT} of each of {', '.join(self._contributors)}, "
                f"got {len(body)} bytes"
            )
        assert number is not None
        if is_about_fit:
            self._fits_by_contributor[sender] = number == _CLIP_FITS
            return self._make_exponent_messages()
        self._exponents[sender] = number
        return ()

    def needs_message(self, sender: str, body: bytes) -> bool:
        """Return whether this message belongs to this agreement, as the next report of its sender.

        It may belong to the set-up that follows: a party that has all reports goes on, and its next
        messages may arrive before the others' reports.
        """
        if sender not in self._contributors or sender in self._exponents:
            return False
        if self._current_clip is None or sender not in self._fits_by_contributor:
            return True  # its first report is missing
        # Its exponent is missing, which it reports only if the clip does not fit all.
        number = int.from_bytes(body[:1], "big", signed=True)
        return len(body) == 1 and _MIN_EXPONENT <= number <= _MAX_EXPONENT

    def _make_messages(self, number: int) -> list[Outgoing]:
        """Return a message with this report, one byte, to each party that receives reports."""
        body = number.to_bytes(1, "big", signed=True)
        return [Outgoing(receiver, body) for receiver in self._recipients]

    def _make_exponent_messages(self) -> list[Outgoing]:
        """Return the messages with this party's exponent, if they are due now: all contributors
        have reported whether the clip C fits, it does not fit one of them, and this party has not
        sent its exponent yet. Otherwise return no messages.
        """
        has_exponent_to_send = self._own_exponent is not None and self.me not in self._exponents
        if not has_exponent_to_send or not self._has_all_fit_reports:
            return []
        if all(self._fits_by_contributor.values()):
            return []
        assert self._own_exponent is not None
        self._exponents[self.me] = self._own_exponent
        return self._make_messages(self._own_exponent)

    @property
    def _has_all_fit_reports(self) -> bool:
        """Return whether all contributors have reported whether C still fits."""
        return len(self._fits_by_contributor) == len(self._contributors)

    @property
    def is_finished(self) -> bool:
        """Return whether the result is known: the present C fits all contributors, or all have
        reported an exponent.
        """
        clip_stays = (
            self._current_clip is not None
            and self._has_all_fit_reports
            and all(self._fits_by_contributor.values())
        )
        return clip_stays or len(self._exponents) == len(self._contributors)

    @property
    def clip(self) -> float:
        """Return the agreed clip C: a power of two, or the present C if it stays.

        C is four times the largest reported size, but at most 4 * 64 times the lower median of the
        sizes, so that one lying contributor cannot raise it further.

        Raises LocalProtocolError: no C was agreed before and all values are zero.
        """
        if self._current_clip is not None and all(self._fits_by_contributor.values()):
            return self._current_clip
        # The least exponent stands for rows of zeros, which need no clip.
        exponents = sorted(e for e in self._exponents.values() if e != _MIN_EXPONENT)
        if not exponents and self._current_clip is not None:
            return self._current_clip
        if not exponents:
            raise LocalProtocolError(
                "no clip fits first values that are zero at all contributors; say a number"
            )
        largest = exponents[-1]
        lower_median = exponents[(len(exponents) - 1) // 2]
        exponent = min(largest, lower_median + _MAX_RAISE_EXPONENTS) + _HEADROOM_EXPONENTS
        return float(2.0 ** min(exponent, _MAX_EXPONENT))


def _clip_still_fits(matrix: Any, exponent: int, current_clip: float, bits: int) -> bool:
    """Return whether the present clip (L2 bound of a row) still fits a contributor's rows.

    It does not fit if more than 1 % of the rows (`TOO_MANY_CLIPPED`) exceed it; or if rounding
    turns a tenth or more of their numbers into 0 and a smaller clip would help.

    Args:
        matrix: the rows to be added, (rows, columns).
        exponent: the least exponent with every row's norm at most 2^exponent.
        current_clip: the present clip.
        bits: width of one value in fixed point.
    """
    clipping = Clipping()
    fixed_point = FixedPoint(clip_norm=current_clip, bits=bits, contributor_count=1)
    fixed_point.quantise_rows(matrix, clipping=clipping)
    if clipping.clipped > TOO_MANY_CLIPPED * clipping.rows:
        return False
    smaller_clip_would_help = 2.0 ** (exponent + _HEADROOM_EXPONENTS + 1) <= current_clip
    loses_too_many = clipping.too_small > 0
    return not (loses_too_many and smaller_clip_would_help)


def _find_exponent(matrix: Any) -> int:
    """Return the least exponent e in -99..99 with the L2 norm of every row of `matrix`, (rows,
    columns), at most 2^e. Raises LocalProtocolError: a row exceeds the largest clip, 2^99.
    """
    # `clip_rows` is called for the largest norm, which it counts, whatever the bound (here 1).
    clipping = Clipping()
    clip_rows(check_matrix(matrix), 1.0, clipping)
    largest = clipping.largest_norm
    for exponent in range(_MIN_EXPONENT, _MAX_EXPONENT + 1):
        if largest <= 2.0**exponent:
            return exponent
    raise LocalProtocolError(
        f"rows of norm {largest:.3g} are beyond the largest clip, 2^{_MAX_EXPONENT}; scale them"
    )
