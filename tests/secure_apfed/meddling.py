"""Messages that become others on their way, or none, whoever sends them."""

from collections.abc import Callable

import pytest

from secure_apfed.exchange import Kind, Links

__all__ = ["altered"]


def altered(
    patch: pytest.MonkeyPatch, kind: Kind, change: Callable[[bytes], bytes | None], who: str = ""
) -> list[str]:
    """Let this party, or whoever is the first to send this kind, send something else; None:
    nothing, now and later. Returns the list of who did, filled once it is sent.
    """
    send = Links.send
    senders: list[str] = []

    def sent(self: Links, to: str, what: Kind, step: int, payload: bytes = b"") -> None:
        if what is kind and self.me == (who or self.me):
            changed = change(payload)
            if changed is None and self.me in (senders or [self.me]):
                senders[:] = [self.me]
                return
            if not senders and changed is not None:
                senders.append(self.me)
                payload = changed
        send(self, to, what, step, payload)

    patch.setattr(Links, "send", sent)
    return senders
