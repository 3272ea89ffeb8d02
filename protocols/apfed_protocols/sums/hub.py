"""A sum through a hub that alone reaches all parties, by any transport that carries bytes.

Run by: the hub, which is the receiver or aggregator or both (`hub_pump`), and each contributor
(`answer_hub`), which answers one packet with one packet and may keep nothing in between
(`apfed_protocols.sums.suspended_roles`). Protects from: what the sum protects from, if the
transport authenticates hub and hosts. Keys that hosts agree among each other pass through the hub.
One that swaps them reads single contributions, unless each party signs its set-up messages: with
`identity` and the others' public keys in `peers`, a swapped one is refused. Without them both ends
warn. A hub has both roles, so a sum that receiver and aggregator together can open is refused.

Every step binds to the packet's message, so that hosts that were told different things add up to
noise, or are refused.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.gradients import refuse_gradients
from apfed_protocols.seal import SIGNATURE_BYTES, Identity, verify_signature
from apfed_protocols.sums.interface import FloatArray, StepBinding, SumAgreement
from apfed_protocols.sums.readers import require_no_single_reader, warn_of_unsigned_hub
from apfed_protocols.sums.roles import (
    ReceivingAggregator,
    SumAggregator,
    SumContributor,
    SumReceiver,
    make_template,
)
from apfed_protocols.trees import flatten_tree

__all__ = ["Hub", "answer_hub", "hub_pump"]

# A packet is a list of byte strings, its parts; the first part is one of these kinds. A packet of
# the kind `_SETUP` carries set-up messages between roles, each behind its sender's signature if
# messages are signed.
_START = b"start"
_SETUP = b"letters"
_STEP = b"step"
_REQUEST = b"request"
_SIGNATURE_PURPOSE = b"letter through a hub v1"
_SIZE = struct.Struct(">I")
_MAX_PARTS = 4096
_MAX_ROUNDS = 8
HubRole = SumReceiver | SumAggregator | ReceivingAggregator
Tree = TypeVar("Tree")


def hub_pump(
    roles: Mapping[str, HubRole],
    send: Callable[[str, bytes], object],
    receive: Callable[[], tuple[str, bytes]],
    *,
    identity: Identity | None = None,
    peers: Mapping[str, bytes] | None = None,
) -> "Hub":
    """Run the set-up of a sum at its hub, the one party that reaches all contributors; return the
    `Hub` that then runs the steps.

    Each contributor answers every packet that `send` takes there by `answer_hub`.

    Args:
        roles: the roles of this process by party name, not started: the receiver, and the
            aggregator unless one party is both.
        send: sends bytes to the contributor that is named.
        receive: waits for the next answer and returns (sender, bytes), the sender authenticated.
        identity: signs this hub's set-up messages; None: they stay unsigned.
        peers: the public keys of the contributors by name; together with `identity`, or None.

    Raises:
        LocalProtocolError: `roles` are not exactly the receiver and the aggregator of one sum; or
            the hub, which has both roles, could read one contribution, and the sum does not allow
            it (`allow_single_reader`).
        RemoteProtocolError: an answer is malformed, comes from a stranger, or is signed by another
            party than its sender.
        Exception: whatever `send` or `receive` raised.

    Warns:
        UnsafeChoiceWarning: there is no identity, so that the hub can read each contribution.
    """
    hub = Hub(roles, send, receive, _Signer(identity, peers))
    hub.set_up()
    return hub


class Hub:
    """The hub's part in a sum; `hub_pump` makes one and sets it up."""

    def __init__(
        self,
        roles: Mapping[str, HubRole],
        send: Callable[[str, bytes], object],
        receive: Callable[[], tuple[str, bytes]],
        signer: "_Signer",
    ) -> None:
        """Take the roles of one sum, whose set-up `set_up` then runs.

        Args:
            roles: the roles of this process by party name, not started: the receiver's, and the
                aggregator's unless one party is both.
            send: sends bytes to the contributor that is named.
            receive: waits for the next answer and returns (sender, bytes).
            signer: signs and verifies set-up messages.

        Raises LocalProtocolError: the roles are not exactly the receiver's and the aggregator's, or
        the hub could read one contribution and nobody allowed it. Warns UnsafeChoiceWarning: set-up
        messages are not signed.
        """
        receivers = [role for role in roles.values() if not isinstance(role, SumAggregator)]
        agreement = receivers[0].secure_sum.agreement if len(receivers) == 1 else None
        if agreement is None or {*roles} != {agreement.receiver, agreement.aggregator}:
            raise LocalProtocolError(
                "a hub has the receiver of one sum, and its aggregator unless one party is both, "
                f"by their names; got {', '.join(map(str, roles)) or 'none'}"
            )
        self._roles = roles
        self._send = send
        self._receive = receive
        self._agreement = agreement
        secure_sum = receivers[0].secure_sum
        self._has_two_rounds = secure_sum.rounds == 2
        self._receiver: Any = roles[agreement.receiver]
        self._aggregator: Any = roles[agreement.aggregator]
        self._signer = signer
        self._next_step = 0
        # Called for their exception or warnings, which point at the caller of `hub_pump`.
        require_no_single_reader(secure_sum, hub=True, stacklevel=4)
        if not signer.is_signing:
            warn_of_unsigned_hub(secure_sum, stacklevel=4)

    def set_up(self) -> None:
        """Run the set-up of all roles: carry set-up messages between the hub's own roles and the
        contributors, and among contributors, until all roles are finished.

        Each round sends every contributor at most one packet and collects its answer.

        Raises RemoteProtocolError: the hub's roles are not finished when no message is left, or
        after `_MAX_ROUNDS` rounds.
        """
        packets = {name: _pack_parts(_START) for name in self._agreement.contributors}
        messages: list[tuple[str, str, bytes]] = []  # sender, receiver, signed message
        for name, role in self._roles.items():
            messages += self._signer.sign_messages(self._agreement, name, role.start())
        for _ in range(_MAX_ROUNDS):
            if not packets and not messages:
                break
            for sender, parts in self._collect_answers(packets, _SETUP).items():
                messages += [
                    (sender, receiver, message)
                    for receiver, message in _parse_setup_messages(parts, sender)
                ]
            packets = self._deliver_messages(messages)
            messages = []
        unfinished = [name for name, role in self._roles.items() if not role.is_finished]
        if unfinished:
            raise RemoteProtocolError(
                f"the hosts fell silent before {', '.join(unfinished)} was set up"
            )

    def _deliver_messages(self, messages: Iterable[tuple[str, str, bytes]]) -> dict[str, bytes]:
        """Give the hub's own roles the set-up messages for them, and deliver their answers in the
        same way. Return, by contributor, a packet with the messages for it; a contributor without
        messages gets no packet.

        `messages`: (sender, receiver, signed message).

        Raises RemoteProtocolError: a receiver takes no part in the sum, or a signature is wrong.
        """
        undelivered = list(messages)
        parts_by_receiver: dict[str, list[bytes]] = {}
        while undelivered:
            sender, receiver, message = undelivered.pop(0)
            if receiver in self._roles:
                body = self._signer.verify_message(self._agreement, sender, receiver, message)
                answers = self._roles[receiver].receive(sender, body)
                undelivered += self._signer.sign_messages(self._agreement, receiver, answers)
            elif receiver in self._agreement.contributors:
                parts_by_receiver.setdefault(receiver, []).extend((sender.encode(), message))
            else:
                raise RemoteProtocolError(f"{sender} wrote to {receiver!r:.80}, who takes no part")
        return {
            receiver: _pack_parts(_SETUP, *parts) for receiver, parts in parts_by_receiver.items()
        }

    @overload
    def step(self, message: bytes, like: tuple[int, ...]) -> FloatArray: ...

    @overload
    def step(self, message: bytes, like: Tree) -> Tree: ...

    def step(self, message: bytes, like: Any) -> Any:
        """Send all contributors one message, and return the sum of the values with which they
        answer it.

        Under recoverable masks `receive` may raise TimeoutError, by which the sum goes on without
        the contributors that have not answered yet.

        Args:
            message: bytes that the function `values` of `answer_hub` gets at each contributor.
            like: the shape of the sum; or an array or tree whose structure and types the sum gets.

        Raises:
            RemoteProtocolError: a contribution is missing or malformed, contributors answer
                different messages, or the sum is out of range.
        """
        agreement = self._agreement
        flat = make_template(like)[0]
        binding = StepBinding.from_contents(
            agreement.session, self._next_step, rows=flat.digest, message=message
        )
        self._next_step += 1
        packet = _pack_parts(_STEP, binding.step.to_bytes(8, "big"), message)
        bodies = self._collect_bodies(dict.fromkeys(agreement.contributors, packet))
        if self._has_two_rounds:
            requests = self._aggregator.ask(bodies, binding.digest)
            bodies = self._collect_bodies(
                {receiver: _pack_parts(_REQUEST, request) for receiver, request in requests.items()}
            )
        combined = self._aggregator.combine(bodies, binding.digest)
        return self._receiver.decode(combined, like, binding)

    def _collect_bodies(self, packets: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Send the packets of one step, by receiver; return the content of each contributor's
        answer, by sender.

        Raises RemoteProtocolError: an answer does not consist of one part.
        """
        answers = self._collect_answers(packets, _STEP)
        for sender, parts in answers.items():
            if len(parts) != 1:
                raise RemoteProtocolError(f"{sender} answered a step in {len(parts)} parts, not 1")
        return {sender: parts[0] for sender, parts in answers.items()}

    def _collect_answers(
        self, packets: Mapping[str, bytes], kind: bytes
    ) -> Mapping[str, Sequence[bytes]]:
        """Send the packets, by receiver, and wait for one answer from each; return the parts of the
        answers, by sender.

        In a step of a sum with two rounds, which may lack contributors, a TimeoutError of `receive`
        ends the waiting: contributors that did not answer are missing from the result.

        `kind`: kind that the answers must have, `_SETUP` (set-up messages) or `_STEP`.

        Raises RemoteProtocolError: an answer is malformed or of another kind, or comes from a party
        that was not asked or answered already.
        """
        for name, packet in packets.items():
            self._send(name, packet)
        answers: dict[str, Sequence[bytes]] = {}
        while len(answers) < len(packets):
            try:
                sender, packet = self._receive()
            except TimeoutError:
                if kind == _SETUP or not self._has_two_rounds:
                    raise
                break
            if sender not in packets or sender in answers:
                raise RemoteProtocolError(f"{sender!r:.80} answered the hub unasked, or twice")
            answers[sender] = _unpack_packet(packet, sender, kind)
        return answers


def answer_hub(
    role: SumContributor,
    packet: bytes,
    values: Callable[[bytes], Any] | None = None,
    *,
    identity: Identity | None = None,
    peers: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return a contributor's answer to one packet of the hub, to be sent back there.

    Args:
        role: this contributor's role; a new one for the first packet.
        packet: the bytes that the hub sent to this contributor.
        values: called in a step with the hub's message; returns the values to contribute.
        identity: signs this contributor's set-up messages; None: they stay unsigned.
        peers: the public keys of all other parties by name; together with `identity`, or None, and
            at all parties alike.

    Raises:
        LocalProtocolError: the packet asks for a step before the set-up, for one that was used
            before, or for one without `values`; or the hub, which is both receiver and aggregator,
            could read one contribution, and the sum does not allow it.
        RemoteProtocolError: the packet is malformed or out of turn, or a set-up message in it was
            signed by another party than its sender.
    """
    agreement = role.secure_sum.agreement
    signer = _Signer(identity, peers)
    hub = agreement.aggregator
    kind, *parts = _split_packet(packet, hub)
    if kind == _STEP and len(parts) == 2 and len(parts[0]) == 8:
        step = int.from_bytes(parts[0], "big")
        return _pack_parts(_STEP, _contribute(role, step, parts[1], values))
    if kind == _REQUEST and len(parts) == 1:
        return _pack_parts(_STEP, role.answer(parts[0]))
    if kind == _START and not parts:
        require_no_single_reader(role.secure_sum, hub=True)
        if not signer.is_signing:
            warn_of_unsigned_hub(role.secure_sum)
        answers = list(role.start())
    elif kind == _SETUP:
        # All signatures are verified before the role gets the first message.
        bodies = [
            (sender, signer.verify_message(agreement, sender, role.me, message))
            for sender, message in _parse_setup_messages(parts, hub)
        ]
        answers = [answer for sender, body in bodies for answer in role.receive(sender, body)]
    else:
        raise RemoteProtocolError(f"{hub} sent {role.me} a packet that asks for nothing known")
    reply_parts = [_SETUP]
    for _, receiver, message in signer.sign_messages(agreement, role.me, answers):
        reply_parts += [receiver.encode(), message]
    return _pack_parts(*reply_parts)


def _contribute(
    role: SumContributor, step: int, message: bytes, values: Callable[[bytes], Any] | None
) -> bytes:
    """Return a contributor's contribution to one step, bound to the hub's message.

    Args:
        role: the contributor's role.
        step: the step's number.
        message: the hub's message.
        values: returns the values to contribute, given the message.

    Raises LocalProtocolError: `values` is None, or the values do not fit.
    """
    if values is None:
        raise LocalProtocolError(f"{role.me}: a step needs `values`, which computes an answer")
    own_values = values(message)
    refuse_gradients(own_values, role.me)
    flat = flatten_tree(own_values)
    session = role.secure_sum.agreement.session
    binding = StepBinding.from_contents(session, step, rows=flat.digest, message=message)
    return role.contribute(flat.matrix, binding)


class _Signer:
    """A party's signer and verifier of set-up messages that pass through the hub, the party that
    alone reaches all contributors. Without an identity it passes messages on, neither signed nor
    verified.
    """

    def __init__(self, identity: Identity | None, peers: Mapping[str, bytes] | None) -> None:
        """Make a signer that signs with `identity` and verifies with the public keys `peers`, by
        party; if both are None it does neither. Raises LocalProtocolError: only one is given.
        """
        if (identity is None) != (peers is None):
            raise LocalProtocolError("set-up is signed with `identity` and `peers` both, or not")
        self._identity = identity
        self._peers = peers or {}

    @property
    def is_signing(self) -> bool:
        return self._identity is not None

    def sign_messages(
        self, agreement: SumAgreement, me: str, outgoing: Iterable[Outgoing]
    ) -> list[tuple[str, str, bytes]]:
        """Return (sender, receiver, signed message) for every set-up message that the party `me`
        sends. A signed message is the signature, if this party signs, and then the body.
        """
        return [(me, out.receiver, self._sign_body(agreement, me, out)) for out in outgoing]

    def _sign_body(self, agreement: SumAgreement, me: str, outgoing: Outgoing) -> bytes:
        """Return one set-up message that the party `me` sends as a signed message: a signature over
        agreement, sender, receiver and body, and then the body; the body alone without an identity.
        """
        if self._identity is None:
            return outgoing.body
        context = agreement.digest, me.encode(), outgoing.receiver.encode()
        return self._identity.sign(_SIGNATURE_PURPOSE, *context, outgoing.body) + outgoing.body

    def verify_message(
        self, agreement: SumAgreement, sender: str, me: str, message: bytes
    ) -> bytes:
        """Return the body of a signed set-up message to the party `me`, after verifying its
        signature; without an identity the message is its own body.

        Raises RemoteProtocolError: no public key of the sender is known, or the signature is wrong.
        """
        if self._identity is None:
            return message
        if sender not in self._peers:
            raise RemoteProtocolError(f"{me} knows no public key of {sender!r:.80}, who wrote")
        signature = message[:SIGNATURE_BYTES]
        body = message[SIGNATURE_BYTES:]
        context = agreement.digest, sender.encode(), me.encode()
        verify_signature(
            self._peers[sender], signature, _SIGNATURE_PURPOSE, *context, body, signer=sender
        )
        return body


def _pack_parts(*parts: bytes) -> bytes:
    """Join parts to a packet, each preceded by its size in four bytes."""
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def _split_packet(packet: bytes, sender: str) -> Sequence[bytes]:
    """Return the parts of a packet, each of which follows its size in four bytes.

    Raises:
        RemoteProtocolError: the packet is empty, cut, or has more than `_MAX_PARTS` parts; this
            error names the sender.
        LocalProtocolError: the packet is of another type than bytes.
    """
    if type(packet) is not bytes:
        raise LocalProtocolError(f"a packet is bytes, got {type(packet).__name__} from {sender}")
    parts: list[bytes] = []
    rest = memoryview(packet)
    while len(rest) >= _SIZE.size and len(parts) < _MAX_PARTS:
        end = _SIZE.size + _SIZE.unpack_from(rest)[0]
        if end > len(rest):
            break  # the packet was cut: bytes remain
        parts.append(bytes(rest[_SIZE.size : end]))
        rest = rest[end:]
    if rest or not parts:
        raise RemoteProtocolError(f"{sender} sent {len(packet)} bytes that are no packet of a hub")
    return parts


def _unpack_packet(packet: bytes, sender: str, expected: bytes) -> Sequence[bytes]:
    """Return a packet's parts without the first part, which is its kind. Raises
    RemoteProtocolError: the packet is malformed, or not of the expected kind.
    """
    kind, *parts = _split_packet(packet, sender)
    if kind != expected:
        raise RemoteProtocolError(f"{sender} answered {kind!r:.20}, expected {expected!r}")
    return parts


def _parse_setup_messages(parts: Sequence[bytes], sender: str) -> Sequence[tuple[str, bytes]]:
    """Return (party name, signed message) for each pair of parts of a packet of set-up messages.
    The party is the message's receiver in a packet to the hub, its sender in a packet from the hub.

    Raises RemoteProtocolError: the number of parts is odd, or a name is no UTF-8.
    """
    try:
        names = [part.decode() for part in parts[::2]]
        return list(zip(names, parts[1::2], strict=True))
    except ValueError as error:
        raise RemoteProtocolError(
            f"{sender} sent set-up messages without names or bodies"
        ) from error
