"""Plays scripted roles of an intersection against each other, message by message."""

from collections.abc import Mapping

from apfed_protocols.conversation import Conversation
from apfed_protocols.psi.interface import IntersectionTooSmallError

__all__ = ["play"]


def play(
    roles: Mapping[str, Conversation], *, refusing: bool = False
) -> dict[tuple[str, str], list[bytes]]:
    """Deliver all messages in order; return them by sender and receiver.

    Args:
        roles: by party.
        refusing: an intersection that is too small is no error.
    """
    sent: dict[tuple[str, str], list[bytes]] = {}
    waiting = [(me, one) for me, role in roles.items() for one in role.start()]
    while waiting:
        sender, message = waiting.pop(0)
        sent.setdefault((sender, message.receiver), []).append(message.body)
        try:
            answers = roles[message.receiver].receive(sender, message.body)
        except IntersectionTooSmallError:
            if not refusing:
                raise
            answers = ()
        waiting += [(message.receiver, one) for one in answers]
    return sent
