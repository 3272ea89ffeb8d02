"""Taking part in an interactive protocol over a link of one's own, e.g. a socket.

Run by: one party in its own process. The link must authenticate and encrypt, and keep the
order of what one party sends; `secure_apfed.exchange` has such links for training.
"""

import queue
import threading
from collections.abc import Callable

from protocols.conversation import Conversation, Outgoing
from protocols.errors import RemoteProtocolError

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
    """
    outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
    failures: list[OSError] = []
    sender = threading.Thread(target=_deliver, args=(outbox, send, failures), daemon=True)
    sender.start()
    try:
        for out in role.start():
            outbox.put(out)
        while not role.finished:
            peer, body = receive(patience_s)
            for out in role.receive(peer, body):
                outbox.put(out)
    except (OSError, EOFError) as error:
        raise _silence(failures[0] if failures else error) from error
    finally:
        outbox.put(None)
    sender.join(patience_s)
    if failures or sender.is_alive():
        raise _silence(failures[0] if failures else TimeoutError())


def _deliver(
    outbox: queue.SimpleQueue[Outgoing | None],
    send: Callable[[str, bytes], None],
    failures: list[OSError],
) -> None:
    try:
        while (out := outbox.get()) is not None:
            send(out.receiver, out.body)
    except OSError as error:
        failures.append(error)


def _silence(error: Exception) -> RemoteProtocolError:
    why = str(error) or type(error).__name__
    return RemoteProtocolError(
        f"a peer fell silent before the protocol was finished ({why}); it may have stopped or "
        "refused a message: look at its log, then start all parties again with a new session"
    )
