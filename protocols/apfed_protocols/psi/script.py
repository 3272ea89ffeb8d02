"""A role written top to bottom: a generator that sends, waits and goes on.

Run by: both ends of protocols with many rounds, where a table of states would hide the
protocol. A script yields a `Turn` (what to send, whose answers it needs), is resumed with
one message of each of these parties, and returns its outcome.
"""

import itertools
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.fork_check import ForkCheck
from apfed_protocols.psi.interface import IntersectionTooSmallError, Output
from apfed_protocols.psi.result import Opened, ResultHolder

__all__ = ["Script", "ScriptedRole", "Turn"]

_MESSAGES_AHEAD = 4


@dataclass(frozen=True)
class Turn:
    """Messages to send, and the parties that must each answer with one message."""

    outgoing: Sequence[Outgoing]
    awaited: Collection[str]


Script = Generator[Turn, Mapping[str, bytes], Opened | IntersectionTooSmallError]
"""Ends with what its party learned, or with the reason why it is nothing."""


class ScriptedRole(ResultHolder):
    """Drives a script as a conversation; satisfies `Aligner`.

    Args:
        me: this party's name; peers: who may write to it; output: what was agreed.
        script: not yet started. What it raises ends the role.
        longest: bytes of the longest message that it takes.
    """

    def __init__(
        self, me: str, peers: Collection[str], output: Output, script: Script, *, longest: int
    ) -> None:
        super().__init__(me, output)
        self._script, self._longest = script, longest
        self._fork_check = ForkCheck(f"{me}: this role of an intersection")
        self._inbox: dict[str, deque[bytes]] = {peer: deque() for peer in peers}
        self._awaited: Collection[str] = ()
        self._started = self._failed = False

    @property
    def awaited(self) -> Collection[str]:
        """The parties that the script waits for: the next message of each is its next step."""
        return self._awaited

    def start(self) -> Iterable[Outgoing]:
        """Run the script up to its first turn, and on where that awaits nobody."""
        self._fork_check.require()
        if self._started:
            raise LocalProtocolError(f"{self._me}: an intersection is started once")
        self._started = True
        return self._run(None)

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Keep a message until the script waits for it; run the script as far as it goes."""
        self._fork_check.require()
        if not self._started:
            raise LocalProtocolError(f"{self._me}: call start before receive")
        if sender not in self._inbox:
            raise RemoteProtocolError(f"{sender} takes no part in this intersection")
        if self.finished or self._failed or len(self._inbox[sender]) >= _MESSAGES_AHEAD:
            raise RemoteProtocolError(
                f"{sender} sent a message when the protocol does not expect it: the intersection "
                f"is over, or {sender} is too far ahead"
            )
        if len(body) > self._longest:
            raise RemoteProtocolError(
                f"{sender} sent {len(body)} bytes, {self._me} takes at most {self._longest} in "
                "this intersection; compare alignment.maximum_ids of both"
            )
        self._inbox[sender].append(body)
        if not all(self._inbox[peer] for peer in self._awaited):
            return []
        return self._run(self._taken())

    def _taken(self) -> Mapping[str, bytes]:
        return {peer: self._inbox[peer].popleft() for peer in self._awaited}

    def _run(self, messages: Mapping[str, bytes] | None) -> Iterable[Outgoing]:
        """Up to the next turn at once; what need not wait follows as the messages are read."""
        return itertools.chain(self._resume(messages), self._rest())

    def _rest(self) -> Iterator[Outgoing]:
        while not self.finished and all(self._inbox[peer] for peer in self._awaited):
            yield from self._resume(self._taken())

    def _resume(self, messages: Mapping[str, bytes] | None) -> Sequence[Outgoing]:
        self._failed = True  # unless the script gets to its next turn or its end
        try:
            turn = next(self._script) if messages is None else self._script.send(messages)
        except StopIteration as end:
            self._outcome, turn = end.value, Turn((), ())
        self._failed, self._awaited = False, turn.awaited
        return turn.outgoing
