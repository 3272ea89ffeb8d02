"""Interactive protocols without I/O: a role is a state machine that consumes and emits bytes.

Run by: whoever owns a transport. A role says what it wants to send (`Outgoing`); the
caller carries the bytes, authenticated and in order, and hands over what arrives.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, runtime_checkable

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["Conversation", "Outgoing", "converse", "take_part"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outgoing:
    """A message in bytes that a role wants delivered to the party called `receiver`."""

    receiver: str
    body: bytes = field(repr=False)


@runtime_checkable
class Conversation(Protocol):
    """A party's role in an interactive protocol.

    `start` is called once, before any `receive`. `receive` raises `RemoteProtocolError` on a
    message that is malformed, unexpected or repeated. The messages that they return are iterated
    to the end before the next call, and each is sent as it comes: a role may compute the next one
    meanwhile.
    """

    def start(self) -> Iterable[Outgoing]:
        """Return the opening messages of this role (possibly none)."""
        ...

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Take one message from `sender`; return the answers that it calls for."""
        ...

    @property
    def is_finished(self) -> bool:
        """Return True once this role needs no further message."""
        ...


def converse(
    roles: Mapping[str, Conversation], *, record: Callable[[str, Outgoing], None] | None = None
) -> int:
    """Run all roles of a protocol in this process, and deliver their messages in the order in which
    they were sent. Return how many bytes the roles sent; every role is finished then.

    Args:
        roles: the role of each party, by its name, none of them started.
        record: called with the sender of each message and the message.

    Raises:
        LocalProtocolError: a message is addressed to an unknown party, or no message is left
            before all roles are finished.
        RemoteProtocolError: whatever a role raises on a bad message.
    """
    undelivered_messages = [
        (name, message) for name, role in roles.items() for message in role.start()
    ]
    sent_bytes = 0
    while undelivered_messages:
        sender, message = undelivered_messages.pop(0)
        sent_bytes += len(message.body)
        _LOGGER.debug("%s sends %d bytes to %s", sender, len(message.body), message.receiver)
        if record is not None:
            record(sender, message)
        if message.receiver not in roles:
            raise LocalProtocolError(
                f"{sender} wrote to {message.receiver!r}, who takes no part; "
                f"the parties are {', '.join(sorted(roles))}"
            )
        answers = roles[message.receiver].receive(sender, message.body)
        undelivered_messages.extend((message.receiver, answer) for answer in answers)
    unfinished_roles = sorted(name for name, role in roles.items() if not role.is_finished)
    if unfinished_roles:
        raise LocalProtocolError(
            f"the conversation fell silent while {', '.join(unfinished_roles)} still expected "
            "messages"
        )
    return sent_bytes


def take_part(
    role: Conversation,
    *,
    send: Callable[[str, bytes], None],
    receive: Callable[[float], tuple[str, bytes]],
    patience_s: float = 60.0,
) -> None:
    """Run one role until it is finished, over the caller's links to the other parties.

    The links must authenticate and encrypt, and keep the order of one party's messages. Messages
    are sent from a thread: otherwise two parties that both send first could wait for one another
    for ever.

    Args:
        role: this party's part in the protocol, not started.
        send: delivers bytes to the party with this name.
        receive: waits at most this many seconds for the next message, and returns who sent it
            and its bytes; raises TimeoutError, or another OSError or EOFError if the link broke.
        patience_s: seconds to wait for a message, and for this party's last message to be sent.

    Raises:
        RemoteProtocolError: the peers fell silent, or sent what the protocol does not allow.
        Exception: whatever else `send` or `receive` raised.
    """
    outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
    failures: list[BaseException] = []
    sending_thread = threading.Thread(
        target=_send_outbox, args=(outbox, send, failures), daemon=True
    )
    sending_thread.start()
    try:
        for message in role.start():
            outbox.put(message)
        while not role.is_finished and not failures:
            peer, body = receive(patience_s)
            _LOGGER.debug("receives %d bytes from %s", len(body), peer)
            for message in role.receive(peer, body):
                outbox.put(message)
    except (OSError, EOFError) as error:
        # If the sending thread failed before, its failure is the first one, and the cause.
        failures.append(error)
    finally:
        outbox.put(None)  # ends the sending thread
    if not failures:
        sending_thread.join(patience_s)
    if sending_thread.is_alive():
        failures.append(TimeoutError())
    if failures:
        _raise_failure(failures[0])


def _send_outbox(
    outbox: queue.SimpleQueue[Outgoing | None],
    send: Callable[[str, bytes], None],
    failures: list[BaseException],
) -> None:
    """Send the messages that `outbox` receives, in a thread of its own, until None ends it. If
    `send` raises, append the exception to `failures`, where the main thread finds it.
    """
    try:
        while (message := outbox.get()) is not None:
            _LOGGER.debug("sends %d bytes to %s", len(message.body), message.receiver)
            send(message.receiver, message.body)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        failures.append(error)


def _raise_failure(error: BaseException) -> NoReturn:
    """Raise RemoteProtocolError for a link that broke or timed out (OSError, EOFError); raise any
    other error as it is.
    """
    if not isinstance(error, OSError | EOFError):
        raise error
    reason = str(error) or type(error).__name__
    raise RemoteProtocolError(
        f"a peer fell silent before the protocol was finished ({reason}); it may have stopped or "
        "refused a message: look at its log, then start all parties again with a new session"
    ) from error
