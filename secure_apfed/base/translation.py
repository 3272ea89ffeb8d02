"""How warnings name settings to a caller who has no file of a run.

Run by: a function that takes settings as arguments, around a run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TRANSLATE: ContextVar[Callable[[str], str]] = ContextVar("translate", default=str)


@contextmanager
def translate_warnings(translation: Callable[[str], str]) -> Iterator[None]:
    """Translate the text of the library's warnings in this block, as a caller names settings."""
    token = _TRANSLATE.set(translation)
    try:
        yield
    finally:
        _TRANSLATE.reset(token)


def translate(text: str) -> str:
    """Return a warning's text as the caller names settings."""
    return _TRANSLATE.get()(text)
