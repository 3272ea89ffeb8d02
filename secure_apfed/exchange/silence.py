"""How long a party bears it that nothing comes: one rule for transports between processes."""

import math
import time
from collections.abc import Callable

from apfed_protocols.errors import PartyLeftError
from secure_apfed.exchange.links import Awaited

__all__ = ["Silence"]

_LAST_WORDS_S = 4.0  # for who is awaited, once somebody else has left
_LOOK_AGAIN_S = 3600.0  # systems take no time-out of months


class Silence:
    """What one party knows of those who left.

    Args:
        why_left: why nothing more comes from a peer; empty while something may.
    """

    def __init__(self, why_left: Callable[[str], str]) -> None:
        self._why_left = why_left
        self._missed: dict[str, float] = {}  # since when

    def bear(self, awaited: Awaited, timeout_s: float, *, deadline: float) -> float:
        """Return the seconds for which to wait now, where nothing of the awaited is there.

        Args:
            awaited: what the party waits for.
            timeout_s: how long it bears the silence of who is there.
            deadline: when that is over, of `time.monotonic`.

        Raises:
            PartyLeftError: too few of the awaited are there still, nothing came in time, or a
                party that is needed has left a while ago.
        """
        gone = tuple(name for name in awaited.senders if self._why_left(name))
        if len(awaited.senders) - len(gone) < awaited.least:
            told = f"{awaited.phase}: {awaited}; {self._why(gone)}"
            raise PartyLeftError(told, left=gone, gone=True)
        left = deadline - time.monotonic()
        if left <= 0:
            raise PartyLeftError(
                f"{awaited.phase}: {awaited}; nothing came for {timeout_s:g} s",
                left=awaited.senders,
            )
        missed = tuple(name for name in awaited.needed if self._why_left(name))
        since = [self._missed.setdefault(name, time.monotonic()) for name in missed]
        grace = min(since, default=math.inf) + _LAST_WORDS_S - time.monotonic()
        if grace <= 0:
            raise PartyLeftError(
                f"{awaited.phase}: {awaited}; nothing came, and {self._why(missed)}", left=missed
            )
        return min(left, grace, _LOOK_AGAIN_S)

    def _why(self, names: tuple[str, ...]) -> str:
        return "; ".join(dict.fromkeys(self._why_left(name) for name in names))
