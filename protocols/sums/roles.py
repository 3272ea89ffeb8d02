"""What roles are built on: secrets that stay, no setup, one round.

Run by: every role of a sum. Protects from: roles that are copied with their keys, and messages
where none is expected.
"""

from collections.abc import Mapping, Sequence

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["KeepsSecrets", "NoSetup", "OneRoundCombiner", "OneRoundContributor"]


class KeepsSecrets:
    """Base of what holds keys or unprotected values: never serialised, never copied."""

    def __reduce__(self) -> str:
        raise LocalProtocolError(
            f"{type(self).__name__} holds secrets of its party and is never serialised"
        )


class NoSetup:
    """The conversation of a role that needs no setup message."""

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        raise RemoteProtocolError(f"{sender} sent {len(body)} bytes of setup, but none is expected")

    @property
    def finished(self) -> bool:
        return True


class OneRoundContributor:
    """The second round of a contributor that has none."""

    def answer(self, request: bytes) -> bytes:
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: its contribution is all that it sends, and a "
            f"request of {len(request)} bytes has no answer"
        )


class OneRoundCombiner:
    """The second round of a combiner that has none."""

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        del binding_digest
        raise LocalProtocolError(
            f"{type(self).__name__} has one round: combine the {len(contributions)} contributions, "
            "nobody is asked anything"
        )
