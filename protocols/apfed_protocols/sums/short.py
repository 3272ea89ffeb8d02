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
from functools import cached_property
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
from apfed_protocols.sums.put_away import Book, resume_role
from apfed_protocols.sums.recoverable import RecoverableSum
from apfed_protocols.sums.roles import (
    KeepsSecrets,
    ReceivingCombiner,
    SecureSum,
    SumCombiner,
    SumContributor,
    SumReceiver,
    join_sum,
    role_of,
    run_role,
)
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

_SHORT: Mapping[str, str] = {
    "masked": format_sum_name("plain", "pairwise"),
    "recoverable": format_sum_name("plain", "recoverable"),
    "masked bfv": format_sum_name("bfv", "pairwise"),
}
_LOGGER = logging.getLogger(__name__)
_MIN_EXPONENT = -99
_MAX_EXPONENT = 99
_MAX_EARLY = 1024
_FITS = 101
_DOES_NOT_FIT = 102
_HEADROOM_EXPONENTS = 2
"""Headroom of C, in powers of two, above the largest row that counts (see `_SWAY_EXPONENTS`):
values may grow fourfold before one is clipped."""
_SWAY_EXPONENTS = 6
"""Largest rise of C before its headroom, in powers of two, above the lower median of the sizes: the
bits that one contributor can cost the others."""
Role = SumReceiver | SumCombiner | SumContributor | ReceivingCombiner


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
    """Return a sum that is called with all contributors' values, or hands out its roles.

    Examples:
        >>> from apfed_protocols import secure_sum
        >>> total = secure_sum("masked", ["bank", "shop"], to="clinic", clip=10)
        >>> total({"bank": [1, 2], "shop": [3, 4]})
        [4, 6]

    Args:
        name: "masked", "recoverable", "masked bfv", "ckks", "bfv", "crypten" or "plain", or a key
            of `SECURE_SUMS`. "masked" is the one to take unless something speaks against it. "bfv"
            is without masks; "masked bfv" also hides contributions from a combiner that has the
            reader's key.
        contributors: names of those who add, in an order that all parties know.
        to: who reads the sum.
        clip: C, the L2 bound of a row of what one contributes (`apfed_protocols.trees` says what a
            row is); rows beyond it are scaled down to it, with a warning. "agree": 4 times the
            largest row of the first values, as `ClipAgreement` finds it, and anew in any call in
            one process in which 1 % of a contributor's rows are beyond it, or a tenth of its
            numbers are lost below the rounding and a smaller one would help. Each contributor
            tells all parties the power of two at or above its own largest row, and no more.
        by: who combines. None: `to`, which needs a sum under masks.
        bits: of one number in fixed point, sign included; each contributor adds an error of at
            most C / (2^bits - 2) to a number. None: the most that this sum carries at no more bytes
            than 16 bits take, up to 24; with noise, whose steps go by them, 16. Where few values
            are possible (hard votes, say) the last digits of a sum may tell who gave which: say
            fewer.
        session: names this sum, the same at all parties. None: a random one, for one process.
        threshold: under "recoverable", how many must answer; None: all. Below all, whoever reads
            the sum can read one contributor's part out of two sums.
        noise, allow_single: see `SumAgreement`.
        allow_single_reader: accept that one computer can read one contribution, where the other
            settings let it; it warns then. This party's own word, which others must give, too.

    Raises:
        LocalProtocolError: an unknown sum, names that are no names, doubled or too few, numbers
            out of range, `to` combining without masks, or one computer that can read one
            contribution without `allow_single_reader`.
    """
    kind = SECURE_SUMS.get(_SHORT.get(str(name), str(name)))
    if kind is None:
        known = [*_SHORT, *(key for key in SECURE_SUMS if key not in _SHORT.values())]
        raise LocalProtocolError(f"no sum is called {name!r:.80}; there are: {', '.join(known)}")
    if isinstance(clip, str) and clip != "agree":
        raise LocalProtocolError(f'clip is a number or "agree", got {clip!r:.80}')
    agreement = SumAgreement(
        session=f"in one process {fresh_key().hex()}" if session is None else session,
        receiver=to,
        combiner=to if by is None else by,
        contributors=contributors,  # type: ignore[arg-type]  # which makes them a tuple
        clip_norm=1.0 if clip == "agree" else clip,
        bits=USUAL_BITS if bits is None else bits,
        threshold=threshold,
        noise=noise,
        allow_single=allow_single,
    )

    def make_sum(bits: int) -> SecureSum:
        return kind(replace(agreement, bits=bits), allow_single_reader=allow_single_reader)

    is_chosen = bits is None and noise is None
    described = make_sum(choose_bits(make_sum) if is_chosen else agreement.bits)
    return SumSession(described, agreed=clip != "agree")


class SumSession(KeepsSecrets):
    """A sum, ready to be called, or to hand out its roles. Threads take turns.

    Attributes:
        secure_sum: the sum and its agreement.
    """

    def __init__(self, secure_sum: SecureSum, *, agreed: bool = True) -> None:
        """Start a session of a secure sum; `agreed` is False while its clip is still to be
        agreed.
        """
        self.described = secure_sum
        self._agreed = agreed
        # What an agreement tells is not covered by the noise, so there is one of them.
        self._agrees_anew = not agreed and secure_sum.agreement.noise is None
        self._early_messages: list[tuple[str, bytes]] = []
        self._turn = threading.Lock()
        self._step = 0
        self._left_out = set[str]()
        self._fork_check = ForkCheck("this sum")

    def __call__(self, values: Mapping[str, Tree]) -> Tree:
        """Add what all contributors give, with all roles in this process.

        Args:
            values: by contributor an array or tensor of any rank, or a tree of them, of one
                structure; under recoverable masks some contributors may be left out.

        Returns:
            The sum, in the structure, types and on the device of the first contributor's (of a
            `torch.nn.Parameter`, a plain tensor). Where a tensor requires a gradient the sum stays
            in the graph: its gradient is that of adding the clipped rows
            (`apfed_protocols.gradients`).

        Raises:
            LocalProtocolError: values of somebody else or of nobody, of different shapes, NaN,
                empty or no numbers (no step is used then); or a copy by a fork.

        Warns:
            ClippingWarning: the 1st, 10th, 100th, ... time that a contributor's row is beyond the
                clip, or that a tenth or more of its numbers round to 0.
        """
        self._fork_check.require_own_process()
        require_numbers(values, "this sum")
        flat = self._check_values(values)
        connected = records_gradients(values)
        if connected:
            require_addable_gradients({name: values[name] for name in flat})
        with self._turn:
            if not self._agreed or self._agrees_anew:
                agreement = self.described.agreement
                current = agreement.clip_norm if self._agreed else None
                parties = {
                    name: ClipAgreement(
                        name, flat, flattened.matrix, current=current, bits=agreement.bits
                    )
                    for name, flattened in flat.items()
                }
                converse(parties)
                self._apply_clip(next(iter(parties.values())).clip)
            total: Tree = self._add_contributions(flat)
            clip = self.described.row_bound()
        if not connected:
            return total
        return attach_gradients(total, {name: values[name] for name in flat}, flat, clip)

    def _add_contributions(self, flat: Mapping[str, Flattened]) -> Any:
        """Run one step with all roles in this process and return the sum in the first contributor's
        form.

        `flat`: each contributor's values as rows.
        """
        contributors, hub = self._roles
        first = next(iter(flat.values()))
        session = self.described.agreement.session
        self._step = self._step + 1
        binding = StepBinding.from_contents(session, self._step - 1, rows=first.digest, message=b"")
        bodies: Mapping[str, bytes] = {
            name: contributors[name].contribute(flattened.matrix, binding)
            for name, flattened in flat.items()
        }
        if self.described.rounds == 2:
            requests = hub[-1].ask(bodies, binding.digest)
            bodies = {
                name: contributors[name].answer(request) for name, request in requests.items()
            }
        self._left_out = {name for name in contributors if name not in flat}
        _LOGGER.debug("step %d: %d of %d contribute", binding.step, len(flat), len(contributors))
        combined = hub[-1].combine(bodies, binding.digest)
        total = hub[0].decode(combined, first.matrix.shape, binding)
        return first.restore_tree(total, off=self.described.compute_rounding_error())

    def _check_values(self, values: Mapping[str, Any]) -> Mapping[str, Flattened]:
        """Flatten each contributor's values. Raises LocalProtocolError, which names who: unknown or
        missing contributors, one that was left out earlier, or values of different structure.
        """
        names = self.described.agreement.contributors
        if not isinstance(values, Mapping):
            raise LocalProtocolError(
                f"give the values of each contributor by its name, as {{{names[0]!r}: ...}}; got a "
                f"{type(values).__name__}"
            )
        unknown = [name for name in values if name not in names]
        missing = [name for name in names if name not in values]
        needed = getattr(self.described, "threshold", len(names))  # of recoverable masks
        if unknown or len(names) - len(missing) < needed:
            raise LocalProtocolError(
                f"this sum needs {needed} of {', '.join(names)}; missing: "
                f"{', '.join(missing) or 'nobody'}; unknown: "
                f"{', '.join(map(str, unknown)) or 'nobody'}"
            )
        back = [name for name in names if name in values and name in self._left_out]
        if back:
            raise LocalProtocolError(
                f"{', '.join(back)} was left out of an earlier step, and stays out: the others "
                "opened its masks. Begin a new sum"
            )
        flat: dict[str, Flattened] = {}
        for name in names:
            if name in values:
                try:
                    flat[name] = flatten_tree(values[name])
                    check_matrix(flat[name].matrix)
                except LocalProtocolError as error:
                    raise LocalProtocolError(f"{name}: {error}") from error
        first = next(iter(flat))
        for name, flattened in flat.items():
            if flattened.digest != flat[first].digest:
                raise LocalProtocolError(
                    f"{name} gives {flattened.shapes}, but {first} {flat[first].shapes}; what is "
                    "added has one structure, one shape and the same labels at all contributors"
                )
        return flat

    @cached_property
    def _roles(self) -> tuple[Mapping[str, SumContributor], Sequence[Any]]:
        """Return the contributors' roles by name, set up, and those of receiver and combiner, one
        or two.
        """
        agreement = self.described.agreement
        contributors = {
            name: self.described.make_contributor(name) for name in agreement.contributors
        }
        ends = {me: role_of(self.described, me) for me in (agreement.receiver, agreement.combiner)}
        converse({**contributors, **ends})
        _LOGGER.info("%s set up among %s", self.described.name, ", ".join(agreement.contributors))
        return contributors, [*ends.values()]

    def describe(self, *, hub: bool = False, signed: bool = True) -> str:
        """Return who takes part, and who can read one contribution; see `SecureSum.describe`."""
        return self.described.describe(hub=hub, signed=signed)

    @property
    def clip(self) -> float:
        """Return C. Raises LocalProtocolError: it is to be agreed and is not yet."""
        self._require_clip()
        return self.described.agreement.clip_norm

    @property
    def clipping(self) -> Mapping[str, Clipping]:
        """The clipping by calls in this process, by contributor."""
        return {name: role.clipping for name, role in self._roles[0].items()}

    def make_contributor(
        self, me: str, *, book: str | PathLike[str] | None = None, new_book: bool = False
    ) -> SumContributor:
        """Return the role of one who adds, for a process of its own. See `join` for its set-up.

        Args:
            book: under recoverable masks, a file on this party's disk that remembers which
                questions were answered among whom, in all sessions that name it.
            new_book: make it, for the first session.

        Raises LocalProtocolError: the book is missing, or there already where a new one is to be
        made; a book for a sum that needs all, where circles never differ.
        """
        self._require_clip()
        if book is None:
            return self.described.make_contributor(me)
        if not isinstance(self.described, RecoverableSum):
            raise LocalProtocolError(
                f"{me}: {self.described.name} needs all contributors in every step, so it has no "
                "book of who was counted; leave book out (`resume_role` has a book of its own)"
            )
        return self.described.make_contributor(me, book=book, new_book=new_book)

    def make_receiver(self) -> SumReceiver | ReceivingCombiner:
        """Return the role of who reads, which also combines where nobody else was named."""
        self._require_clip()
        role = role_of(self.described, self.described.agreement.receiver)
        assert isinstance(role, SumReceiver | ReceivingCombiner)
        return role

    def make_combiner(self) -> SumCombiner | ReceivingCombiner:
        """Return the role of who combines.

        Raises LocalProtocolError: the receiver combines; take `make_receiver()`.
        """
        agreement = self.described.agreement
        if agreement.combiner == agreement.receiver:
            raise LocalProtocolError(
                f"{agreement.combiner} receives and combines in one role, that of "
                "`make_receiver()`; two of them would not know each other's keys"
            )
        self._require_clip()
        return self.described.make_combiner()

    def join(
        self,
        me: str,
        *,
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
        first: Any = None,
    ) -> Role:
        """Make the role of `me` and hold its set-up with the others, over links of one's own.

        The links must be authenticated and encrypted (`apfed_protocols.SealedLink`), and all
        parties name the same `session`.

        Args:
            send: carries bytes to the party that is named.
            receive: waits for the next message and returns (sender, bytes).
            first: with `clip="agree"`, a contributor's first values.

        Raises:
            LocalProtocolError: no party has that name; or no first values where there must be.
            RemoteProtocolError: a peer's message is malformed, unexpected or of a stranger.
        """
        if not self._agreed:
            self._agree_clip(me, send, receive, first, anew=False)
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
        """Ask all contributors whether the agreed clip still fits, and agree on another if it does
        not.

        For roles in processes of their own, made by `join` with `clip="agree"`. All parties call it
        between the same two steps, by a rule that all know: before each step, or before steps 1, 2,
        4, 8, ... What is agreed follows from what all heard, so it is the same at every party. Each
        contributor tells all parties one bit; where somebody's values do not fit, each its size as
        in `ClipAgreement`. A contributor that always says no learns the others' sizes anew each
        time, and costs them a set-up if these differ.

        Args:
            role: of `me` so far.
            send, receive: as of `join`; contributions go another way, as another queue.
            values: a contributor's, which it is about to contribute.

        Returns:
            The same role where C stays; else a new one under the new C, with keys of its own, whose
            steps begin at 0. The old one is of no more use.

        Raises:
            LocalProtocolError, RemoteProtocolError: as `join`, or the clip was a number.
        """
        if not self._agrees_anew:
            raise LocalProtocolError(
                f"{me}: nothing is agreed anew where the clip is a number, or under noise, which "
                f'does not cover what an agreement tells; it is {self.clip:g}. Say clip="agree" '
                "and no noise, or begin a new sum"
            )
        self._require_clip()
        if not self._agree_clip(me, send, receive, values, anew=True):
            return role
        joined = self._run_setup(me, send, receive)
        if isinstance(joined, SumContributor) and isinstance(role, SumContributor):
            joined.clipping = role.clipping
        return joined

    def _agree_clip(
        self,
        me: str,
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
        values: Any,
        *,
        anew: bool,
    ) -> bool:
        """Agree on a clip over links; return whether it changed.

        `send`: carries bytes to the party that is named. `receive`: waits for the next message and
        returns (sender, bytes). `anew`: whether a clip was agreed before.
        """
        agreement = self.described.agreement
        names = agreement.contributors
        parties = {agreement.receiver, agreement.combiner, *names}
        matrix = None if values is None else flatten_tree(values).matrix
        if me in names and matrix is None:
            values_name = "its next values" if anew else "its first values"
            raise LocalProtocolError(f"{me} gives {values_name}, for a clip to be agreed")
        current = agreement.clip_norm if anew else None
        agree = ClipAgreement(me, names, matrix, told=parties, current=current, bits=agreement.bits)

        def receive_of_agreement() -> tuple[str, bytes]:
            """Return the next message that is of this agreement; keep those that run ahead."""
            for place, (sender, body) in enumerate(self._early_messages):
                if agree.needs_message(sender, body):
                    del self._early_messages[place]
                    return sender, body
            while True:
                sender, body = receive()
                if sender not in parties or agree.needs_message(sender, body):
                    return sender, body
                self._keep_early(me, sender, body)

        run_role(agree, me, parties - {me}, send=send, receive=receive_of_agreement)
        return self._apply_clip(agree.clip)

    def _run_setup(
        self,
        me: str,
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
    ) -> Role:
        """Run the set-up; keep messages of one byte, which belong to the next agreement.

        `send`: carries bytes to the party that is named. `receive`: waits for the next message and
        returns (sender, bytes).
        """

        def receive_of_setup() -> tuple[str, bytes]:
            """Return the next message of the set-up; store one-byte messages, which belong to a
            clip agreement.
            """
            for place, (_, body) in enumerate(self._early_messages):
                if len(body) != 1:
                    return self._early_messages.pop(place)
            while True:
                sender, body = receive()
                if len(body) != 1:
                    return sender, body
                self._keep_early(me, sender, body)

        return join_sum(self.described, me, send=send, receive=receive_of_setup)

    def _keep_early(self, me: str, sender: str, body: bytes) -> None:
        """Store a message that came before its agreement. Raises RemoteProtocolError: too many
        came.

        `body`: the bytes of the message.
        """
        if len(self._early_messages) >= _MAX_EARLY:
            raise RemoteProtocolError(
                f"{sender} sent {me} {len(body)} bytes, after {_MAX_EARLY} messages that "
                "belong to no agreement or set-up under way; contributions go another way than "
                "what `receive` returns here"
            )
        self._early_messages.append((sender, body))

    def resume_role(self, me: str, sealed: bytes, key: bytes, *, book: Book) -> SumContributor:
        """Resume the role that `suspend_role` sealed; see `apfed_protocols.sums.put_away`."""
        return resume_role(self.described, me, sealed, key, book=book)

    def _apply_clip(self, clip: float) -> bool:
        """Apply an agreed clip; return whether it changed, so that roles must be made again."""
        if self._agreed and clip == self.described.agreement.clip_norm:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)  # of the plain sum, said before
            agreement = replace(self.described.agreement, clip_norm=clip)
            self.described = replace(self.described, agreement=agreement)
            self._agreed = True
        if "_roles" in self.__dict__:
            counted = self.clipping
            del self.__dict__["_roles"]
            for name, role in self._roles[0].items():
                role.clipping = counted[name]
        return True

    def _require_clip(self) -> None:
        """Raise LocalProtocolError while the clip is still to be agreed."""
        if not self._agreed:
            raise LocalProtocolError(
                'this sum has no clip yet: clip="agree" is settled by the first call in one '
                "process, and by join(me, first=...) among several; or say a number"
            )


class ClipAgreement(KeepsSecrets):
    """A conversation in which contributors find one clip for the values that they hold now.

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
        me: a contributor, or a party that only listens.
        contributors: the parties that report a size.
        matrix: the rows of `me`, (B, D); None: it listens.
        told: the parties that receive the reports; None: the contributors.
        current: the present C where it is agreed again: each contributor first reports in one bit
            whether it still fits, and sizes only if it does not fit one of them. None: no C yet.
        bits: of the sum, by which a contributor knows that its values are too small for C.
    """

    def __init__(
        self,
        me: str,
        contributors: Collection[str],
        matrix: Any = None,
        told: Collection[str] | None = None,
        *,
        current: float | None = None,
        bits: int = MAX_BITS,
    ) -> None:
        """Prepare to agree on a clip bound: compute this party's report from its rows, if it has
        some.

        `contributors`: names of all that add. `matrix`: rows (B, D) to be added. `told`: the
        parties that receive the reports; None: all contributors. `current`: the present clip where
        it is agreed again; None: the first agreement.
        """
        self.me = me
        self._contributors = tuple(contributors)
        self._recipients = sorted({*(contributors if told is None else told)} - {me})
        self._current = current
        self._own_exponent = None if matrix is None else _find_exponent(matrix)
        self._fits_by_contributor: dict[str, bool] = {}
        self._exponents: dict[str, int] = {}
        if self._own_exponent is not None and current is None:
            self._exponents[me] = self._own_exponent
        elif self._own_exponent is not None and current is not None:
            self._fits_by_contributor[me] = _clip_still_fits(
                matrix, self._own_exponent, current, bits
            )

    def start(self) -> Iterable[Outgoing]:
        """Return this party's first report: its exponent or, if there is a clip, whether it still
        fits.
        """
        if self._own_exponent is None:
            return []
        if self._current is None:
            return self._make_messages(self._own_exponent)
        return [
            *self._make_messages(_FITS if self._fits_by_contributor[self.me] else _DOES_NOT_FIT),
            *self._make_answers(),
        ]

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Record a contributor's report, and send the own size if that has become necessary. Raises
        RemoteProtocolError: a stranger, a second report, or a number out of range.

        `body`: the bytes of the message.
        """
        number = int.from_bytes(body[:1], "big", signed=True) if len(body) == 1 else None
        asks = self._current is not None and sender not in self._fits_by_contributor
        allowed = (_FITS, _DOES_NOT_FIT) if asks else range(_MIN_EXPONENT, _MAX_EXPONENT + 1)
        if sender not in self._contributors or sender in self._exponents or number not in allowed:
            expected = "whether the clip still fits" if asks else "one exponent"
            raise RemoteProtocolError(
                f"{sender} told {self.me} no size of its rows: expected {expected} of "
                f"{_MIN_EXPONENT}..{_MAX_EXPONENT} of each of {', '.join(self._contributors)}, "
                f"got {len(body)} bytes"
            )
        assert number is not None
        if asks:
            self._fits_by_contributor[sender] = number == _FITS
            return self._make_answers()
        self._exponents[sender] = number
        return ()

    def needs_message(self, sender: str, body: bytes) -> bool:
        """Return whether this message is the next of its sender in this agreement.

        A party that has all replies continues, and its next messages may overtake others' replies.

        `body`: the bytes of the message.
        """
        if sender not in self._contributors or sender in self._exponents:
            return False
        if self._current is None or sender not in self._fits_by_contributor:
            return True
        number = int.from_bytes(body[:1], "big", signed=True)
        return len(body) == 1 and _MIN_EXPONENT <= number <= _MAX_EXPONENT

    def _make_messages(self, number: int) -> list[Outgoing]:
        body = number.to_bytes(1, "big", signed=True)
        return [Outgoing(receiver, body) for receiver in self._recipients]

    def _make_answers(self) -> list[Outgoing]:
        """Send the own size once all contributors answered and C does not fit one of them."""
        if self._own_exponent is None or self.me in self._exponents or not self._has_all_replies:
            return []
        if all(self._fits_by_contributor.values()):
            return []
        self._exponents[self.me] = self._own_exponent
        return self._make_messages(self._own_exponent)

    @property
    def _has_all_replies(self) -> bool:
        return len(self._fits_by_contributor) == len(self._contributors)

    @property
    def is_finished(self) -> bool:
        stays = (
            self._current is not None
            and self._has_all_replies
            and all(self._fits_by_contributor.values())
        )
        return stays or len(self._exponents) == len(self._contributors)

    @property
    def clip(self) -> float:
        """Return C, a power of two or the one so far. Raises LocalProtocolError: all values are
        zero.
        """
        if self._current is not None and all(self._fits_by_contributor.values()):
            return self._current
        sizes = sorted(size for size in self._exponents.values() if size != _MIN_EXPONENT)
        if not sizes and self._current is not None:
            return self._current
        if not sizes:
            raise LocalProtocolError(
                "no clip fits first values that are zero at all contributors; say a number"
            )
        median = sizes[(len(sizes) - 1) // 2]
        agreed = min(sizes[-1], median + _SWAY_EXPONENTS) + _HEADROOM_EXPONENTS
        return float(2.0 ** min(agreed, _MAX_EXPONENT))


def _clip_still_fits(matrix: Any, exponent: int, current: float, bits: int) -> bool:
    """Return whether rows whose largest norm is at most 2^exponent are added well under the current
    clip.

    They are not if more than `TOO_MANY_CLIPPED` of the rows lie beyond it, or if they are
    `Clipping.too_small` and a smaller clip would help.

    `matrix`: rows (B, D) to be added.
    """
    clipping = Clipping()
    FixedPoint(clip_norm=current, bits=bits, contributors=1).quantise_rows(
        matrix, clipping=clipping
    )
    if clipping.clipped > TOO_MANY_CLIPPED * clipping.rows:
        return False
    smaller = 2.0 ** (exponent + _HEADROOM_EXPONENTS + 1) <= current
    return not (clipping.too_small and smaller)


def _find_exponent(matrix: Any) -> int:
    """Return the least exponent e with every row's norm at most 2^e. Raises LocalProtocolError: it
    is beyond the largest clip.

    `matrix`: rows (B, D) to be added.
    """
    clipping = Clipping()
    clip_rows(check_matrix(matrix), 1.0, clipping)
    largest = clipping.largest_norm
    for exponent in range(_MIN_EXPONENT, _MAX_EXPONENT + 1):
        if largest <= 2.0**exponent:
            return exponent
    raise LocalProtocolError(
        f"rows of norm {largest:.3g} are beyond the largest clip, 2^{_MAX_EXPONENT}; scale them"
    )
