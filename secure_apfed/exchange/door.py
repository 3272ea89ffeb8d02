"""Where peers come in that dial: strangers wait there until they have proved who they are.

Run by: whoever listens. Protects from: crowds of strangers (who waits longest goes when more come),
and from whoever comes in a peer's name. Who comes a second time takes the place of its former
connection, which may hang unnoticed.
"""

import queue
import threading
from collections.abc import Callable

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange.resumable_link import Connection
from secure_apfed.exchange.sealed_connection import Carrier, LocalEnd, prove, refuse

__all__ = ["Crowd", "Door"]

_MOST_STRANGERS = 64
_LOOK_S = 1.0


class Crowd:
    """Connections of which nobody knows yet whose they are; a few, and the newest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._strangers: dict[Connection, None] = {}

    def add(self, stranger: Connection) -> None:
        """Let one more wait; where it is too crowded, who waits longest is sent away."""
        with self._lock:
            self._strangers[stranger] = None
            first = next(iter(self._strangers))
            if len(self._strangers) <= _MOST_STRANGERS:
                return
            del self._strangers[first]
        first.close()

    def remove(self, known: Connection) -> None:
        with self._lock:
            self._strangers.pop(known, None)


class Door:
    """One party's; peers take their place by name.

    Args:
        me: the party, with those whom it knows.
        awaited: the peers that dial.
        require: raises RemoteProtocolError where a peer's certificate of TLS is not its own.
        absent: what may be so where a peer does not come.
    """

    def __init__(
        self, me: LocalEnd, awaited: tuple[str, ...],
        require: Callable[[str, bytes], None] = lambda name, certificate: None,
        absent: str = "it did not dial, or came without a certificate that TLS takes",
    ) -> None:  # fmt: skip
        self._me, self._require, self._absent = me, require, absent
        self._crowd = Crowd()
        self._places: dict[str, queue.SimpleQueue[Connection]] = {
            name: queue.SimpleQueue() for name in awaited
        }
        self._standing: dict[str, Connection] = {}
        self._trouble: dict[str, str] = {}
        self._lock = threading.Lock()

    def welcome(self, stranger: Carrier, certificate: bytes) -> None:
        """Let a stranger prove who it is, and take its place."""
        claimed: list[str] = []

        def seen(name: str) -> None:
            if name in self._places:
                claimed.append(name)
            self._require(name, certificate)

        self._crowd.add(stranger)
        try:
            name, connection = prove(stranger, self._me, seen=seen)
        except (OSError, EOFError, RemoteProtocolError) as error:
            told = dict.fromkeys(claimed, f"somebody came in its name: {error}")
            # A refusal says more than that the attempt after it broke.
            refused = isinstance(error, ConnectionRefusedError | RemoteProtocolError)
            self._trouble = self._trouble | told if refused else told | self._trouble
            stranger.close()
            return
        finally:
            self._crowd.remove(stranger)
        if name not in self._places:
            me = self._me.name
            refuse(stranger, f"{me} dials {name}, not the other way: correct the file of {name}")
            stranger.close()
            return
        with self._lock:
            self._trouble.pop(name, None)
            former = self._standing.get(name)
            self._standing[name] = connection
            self._places[name].put(connection)
        if former is not None:
            former.close()

    def connect(self, name: str) -> Connection:
        """The peer's newest connection.

        Raises:
            TimeoutError: it did not come within a second.
        """
        try:
            return self._places[name].get(timeout=_LOOK_S)
        except queue.Empty:
            told = self._trouble.get(name)
            raise TimeoutError(told or self._absent) from None
