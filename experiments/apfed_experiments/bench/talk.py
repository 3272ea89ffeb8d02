"""Two parties of which one sends back what it gets, for benches of links."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from secure_apfed.exchange import Kind, Links
from secure_apfed.exchange.links import Script

__all__ = ["COUNTS", "ask", "echo", "seconds_of"]

COUNTS = {64: 200, 2**17: 100, 2**24: 5}
"""By size of a payload in bytes, how many there are."""

_WARM_UP = 3


async def ask(links: Links, payload: bytes) -> None:
    """Send to "there" and wait for the same."""
    links.send("there", Kind.REQUEST, 0, payload)
    await links.receive("there", Kind.SUM, step=0)


async def echo(links: Links) -> None:
    """Send back to "here" until it ends."""
    while (asked := await links.receive("here", Kind.REQUEST, Kind.END)).kind is Kind.REQUEST:
        links.send("here", Kind.SUM, 0, asked.payload)


def seconds_of(
    links: Links, play: Callable[[Script[None]], Any], sizes: Iterable[int]
) -> Mapping[int, Sequence[float]]:
    """By size of the payload, a key of `COUNTS`, seconds of each message.

    A message is half of there and back again.
    """
    found: dict[int, list[float]] = {}
    for size in sizes:
        payload, found[size] = bytes(size), []
        for repetition in range(-_WARM_UP, COUNTS[size]):
            began = time.perf_counter()
            play(ask(links, payload))
            if repetition >= 0:
                found[size].append((time.perf_counter() - began) / 2)
    return found
