"""One assertion for all the ways to harm one thing: those that were not refused are named."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Error: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]


def list_unrefused(
    error: Error, action: Callable[..., object], cases: Iterable[tuple[Any, ...]]
) -> list[str]:
    """Return the cases in which `action` did anything else than raise `error` with the message.

    A case is a message (a pattern, as in `pytest.raises(match=...)`), then the arguments of
    `action`. Each is named by its place and message, with what happened instead.
    """
    happened = [
        (place, message, _describe_failure(error, message, action, arguments))
        for place, (message, *arguments) in enumerate(cases)
    ]
    assert happened, "no case was tried"
    return [f"case {place}, {message!r}: {what}" for place, message, what in happened if what]


def _describe_failure(
    error: Error, message: str, action: Callable[..., object], arguments: list[Any]
) -> str:
    """Return what an action did instead of the refusal; nothing where it refused."""
    try:
        returned = action(*arguments)
    except error as refusal:
        return "" if re.search(message, str(refusal)) else f"refused otherwise: {refusal}"
    return f"not refused, returned {returned!r:.200}"


def call(action: Callable[[], object]) -> object:
    """Call an action that needs no arguments, so that it can stand in a case."""
    return action()
