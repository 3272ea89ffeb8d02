"""Taking part in a sum over links of one's own: one call for whoever writes the training loop.

Run by: every party that is not run by this project's trainer. The links must be authenticated
(`protocols.seal.SealedLink`); nothing here opens a socket.
"""

from collections.abc import Callable

from protocols.errors import RemoteProtocolError
from protocols.sums.interface import SecureSum, SumCombiner, SumContributor, SumReceiver

__all__ = ["join_sum"]


def join_sum(
    described: SecureSum,
    me: str,
    *,
    send: Callable[[str, bytes], object],
    receive: Callable[[], tuple[str, bytes]],
) -> SumReceiver | SumCombiner | SumContributor:
    """Make the role of `me` and hold its setup with the other parties.

    Args:
        described: the sum that all parties agreed on.
        me: the receiver, the combiner or a contributor.
        send: carries bytes to the party that is named.
        receive: waits for the next setup message and returns (sender, bytes).

    Raises:
        LocalProtocolError: no party of the agreement has that name.
        RemoteProtocolError: a peer's setup message is malformed or unexpected.
    """
    agreement, role = described.agreement, _role(described, me)
    others = {agreement.receiver, agreement.combiner, *agreement.contributors} - {me}
    for out in role.start():
        send(out.receiver, out.body)
    while not role.finished:
        sender, body = receive()
        if sender not in others:
            raise RemoteProtocolError(f"{sender!r} takes no part in this sum and wrote to {me}")
        for out in role.receive(sender, body):
            send(out.receiver, out.body)
    return role


def _role(described: SecureSum, me: str) -> SumReceiver | SumCombiner | SumContributor:
    if me == described.agreement.receiver:
        return described.receiver()
    if me == described.agreement.combiner:
        return described.combiner()
    return described.contributor(me)
