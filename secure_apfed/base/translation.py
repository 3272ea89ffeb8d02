"""How warnings name settings to a caller who has no file of a run.

Run by: a function that takes settings as arguments, around a run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TRANSLATE: ContextVar[Callable[[str], str]] = ContextVar("translate", default=str)


@contextmanager
def translate_warnings(translation: Callable[[str], str]) -> Iterator[None]:
    """Apply `translation` to the texts of the library's warnings in this block.

    A caller without a run's file passes settings as arguments; the warnings then name these
    arguments, and not keys of the file.
    """
    token = _TRANSLATE.set(translation)
    try:
        yield
    finally:
        _TRANSLATE.reset(token)


def translate(text: str) -> str:
    """Return a warning's text with settings as the caller names them (`translate_warnings`)."""
    return _TRANSLATE.get()(text)
