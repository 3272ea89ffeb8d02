"""Carrying an interactive protocol over a transport: alignment, set-up of the sum.

Run by: whoever plays the roles. The protocol itself is a state machine without I/O, see
`protocols.conversation`; here its messages become envelopes.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from protocols.conversation import Conversation, Outgoing
from protocols.errors import LocalProtocolError
from secure_apfed.exchange.envelope import Envelope, Kind
from secure_apfed.exchange.outbox import Outbox
from secure_apfed.exchange.transport import Transport

__all__ = ["BEFORE_TRAINING", "hold_conversation"]

BEFORE_TRAINING = -1


def hold_conversation(
    kind: Kind,
    roles: Mapping[str, Conversation],
    outboxes: Mapping[str, Outbox],
    transport: Transport,
) -> None:
    """Play all `roles` over `transport` until they are finished.

    Raises:
        LocalProtocolError: a message is addressed to nobody, or the roles fell silent before
            all of them were finished.
        RemoteProtocolError: a role refused a message.
    """
    underway: deque[Envelope] = deque()

    def send(sender: str, messages: Iterable[Outgoing]) -> None:
        for message in messages:
            if message.receiver not in roles:
                raise LocalProtocolError(
                    f"{sender} wrote to {message.receiver!r}, who takes no part in {kind}; "
                    f"the parties are {', '.join(sorted(roles))}"
                )
            envelope = outboxes[sender].write(kind, BEFORE_TRAINING, message.receiver, message.body)
            transport.send(envelope)
            underway.append(envelope)

    for name, role in roles.items():
        send(name, role.start())
    while underway:
        sent = underway.popleft()
        arrived = transport.receive(
            sent.receiver, sender=sent.sender, kind=kind, step=BEFORE_TRAINING
        )
        send(sent.receiver, roles[sent.receiver].receive(arrived.sender, arrived.payload))
    waiting = sorted(name for name, role in roles.items() if not role.finished)
    if waiting:
        raise LocalProtocolError(f"{kind} fell silent while {', '.join(waiting)} still waited")
