"""Taking part in an interactive protocol over a link of one's own, e.g. a socket.

Run by: one party in its own process. The link must authenticate and encrypt, and keep the
order of what one party sends.
"""

import queue
import threading
from collections.abc import Callable
from typing import NoReturn

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import RemoteProtocolError

__all__ = ["take_part"]


def take_part(
    role: Conversation,
    *,
    send: Callable[[str, bytes], None],
    receive: Callable[[float], tuple[str, bytes]],
    patience_s: float = 60.0,
) -> None:
    """Play one role until it is finished.

    Messages are sent from a thread, so that two parties that both send first do not wait
    for one another for ever.

    Args:
        role: not yet started.
        send: delivers bytes to the party with this name.
        receive: waits at most this many seconds for the next message, and returns who sent it
            and its bytes; raises TimeoutError, or another OSError or EOFError if the link broke.
        patience_s: how long to wait for a message, and for the last own one to be sent.

    Raises:
        RemoteProtocolError: the peers fell silent, or sent what the protocol does not allow.
        Exception: whatever else `send` or `receive` raised.
    """
    outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
    failures: list[BaseException] = []
    sender = threading.Thread(target=_deliver, args=(outbox, send, failures), daemon=True)
    sender.start()
    try:
        for out in role.start():
            outbox.put(out)
        while not role.finished and not failures:
            peer, body = receive(patience_s)
            for out in role.receive(peer, body):
                outbox.put(out)
    except (OSError, EOFError) as error:
        failures.append(error)  # behind the sender's own failure, which explains it
    finally:
        outbox.put(None)
    if not failures:
        sender.join(patience_s)
    if sender.is_alive():
        failures.append(TimeoutError())
    if failures:
        _fail(failures[0])


def _deliver(
    outbox: queue.SimpleQueue[Outgoing | None],
    send: Callable[[str, bytes], None],
    failures: list[BaseException],
) -> None:
    """Send until told to stop; what a thread raises nobody would hear, so it is kept."""
    try:
        while (out := outbox.get()) is not None:
            send(out.receiver, out.body)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        failures.append(error)


def _fail(error: BaseException) -> NoReturn:
    """Raise it; a link that broke is a peer that fell silent."""
    if not isinstance(error, OSError | EOFError):
        raise error
    why = str(error) or type(error).__name__
    raise RemoteProtocolError(
        f"a peer fell silent before the protocol was finished ({why}); it may have stopped or "
        "refused a message: look at its log, then start all parties again with a new session"
    ) from error
