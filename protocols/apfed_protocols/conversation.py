"""Interactive protocols without I/O: a role is a state machine that eats and emits bytes.

Run by: whoever owns a transport. A role says what it wants to send (`Outgoing`); the
caller carries the bytes, authenticated and in order, and hands over what arrives.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from apfed_protocols.errors import LocalProtocolError

__all__ = ["Conversation", "Outgoing", "converse"]


@dataclass(frozen=True)
class Outgoing:
    """Bytes that a role wants delivered to the party called `receiver`."""

    receiver: str
    body: bytes = field(repr=False)


@runtime_checkable
class Conversation(Protocol):
    """One role's side of an interactive protocol.

    `start` is called once, before any `receive`. `receive` raises
    `RemoteProtocolError` on a message that is malformed, unexpected or repeated. What they return
    is read to its end before the next call, each message sent as it comes: a role may go on
    computing for the ones after it.
    """

    def start(self) -> Iterable[Outgoing]:
        """Return the opening messages of this role (possibly none)."""
        ...

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Take one message from `sender`; return the answers that it calls for."""
        ...

    @property
    def finished(self) -> bool:
        """Whether this role needs no further message."""
        ...


def converse(roles: Mapping[str, Conversation]) -> None:
    """Play all roles of one conversation in this process, first in, first out.

    Guarantee: every role is finished on return.

    Raises:
        LocalProtocolError: a message is addressed to nobody, or the roles fall silent
            before all of them are finished.
        RemoteProtocolError: whatever a role raises on a bad message.
    """
    queue = [(name, out) for name, role in roles.items() for out in role.start()]
    while queue:
        sender, out = queue.pop(0)
        if out.receiver not in roles:
            raise LocalProtocolError(
                f"{sender} wrote to {out.receiver!r}, who takes no part; "
                f"the parties are {', '.join(sorted(roles))}"
            )
        answers = roles[out.receiver].receive(sender, out.body)
        queue.extend((out.receiver, answer) for answer in answers)
    waiting = sorted(name for name, role in roles.items() if not role.finished)
    if waiting:
        raise LocalProtocolError(
            f"the conversation fell silent while {', '.join(waiting)} still expected messages"
        )
