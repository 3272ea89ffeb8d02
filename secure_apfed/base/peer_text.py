r"""Checking and displaying text from other parties.

Run by: all code that reads or displays another party's files and messages. Protects from: text with
escape sequences for the terminal, with line breaks that imitate output of this program, with
bidirectional marks that change the order of reading, or with parts of a command. Commands that this
program prints contain no text of another party; all its other text is displayed by `quote_text`.

Examples:
    >>> quote_text("all is well\x1b[2J\nsecure-apfed: ok")
    "'all is well\\x1b[2J\\nsecure-apfed: ok'"
    >>> check_version("0.1.1 -i http://203.0.113.9/s")
    Traceback (most recent call last):
    ValueError: expected a version such as 0.1.1, got '0.1.1 -i http://203.0.113.9/s'
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["check_host", "check_version", "escape_text", "find_unprintable", "quote_text"]

_MAX_LETTERS = 80
_MAX_VERSION_LETTERS = 64
_MAX_HOST_LETTERS = 253
_MAX_LEVELS = 64
_NUMBER = "(?:0|[1-9][0-9]*)"
# The canonical form of PEP 440, Appendix B, with a local version behind it.
_VERSION = re.compile(
    rf"(?:[1-9][0-9]*!)?{_NUMBER}(?:\.{_NUMBER})*(?:(?:a|b|rc){_NUMBER})?(?:\.post{_NUMBER})?"
    rf"(?:\.dev{_NUMBER})?(?:\+[a-z0-9]+(?:\.[a-z0-9]+)*)?"
)
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")


def escape_text(text: str, *, keep: str = "") -> str:
    r"""Return the text with everything that is not printable written as an escape.

    Control characters, line breaks, bidirectional marks, characters without a width and lone
    surrogates become \n, \x1b or \u202e. `keep`: characters that stay all the same.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else _escape_character(character)
        for character in text
    )


def quote_text(text: object, *, maximum: int = _MAX_LETTERS) -> str:
    """Return another party's text in quotes, escaped and shortened to `maximum` characters.

    Values of other types are shown as Python's `repr`, also escaped and shortened.
    """
    if not isinstance(text, str):
        return escape_text(repr(text)[:maximum])
    shortened = text if len(text) <= maximum else text[: maximum - 3] + "..."
    return escape_text(repr(shortened))


def find_unprintable(value: Any, prefix: str = "", *, level: int = 0) -> Iterator[str]:
    """Yield the dotted path of each text in nested plain values that is not printable.

    Keys count as text. A value nested too deeply is yielded, too, and not searched. Paths are
    escaped.

    `prefix`, `level`: path and depth of `value` itself, as the function calls itself.
    """
    if level > _MAX_LEVELS:
        yield f"{prefix} (more than {_MAX_LEVELS} levels deep)"
    elif isinstance(value, str):
        if not value.isprintable():
            yield prefix
    elif isinstance(value, Mapping):
        for key, item in value.items():
            name = escape_text(str(key)[:_MAX_LETTERS])
            path = f"{prefix}.{name}" if prefix else name
            if not str(key).isprintable():
                yield f"the name {path}"
            yield from find_unprintable(item, path, level=level + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from find_unprintable(item, f"{prefix}.{index}", level=level + 1)


def check_version(text: str) -> str:
    """Return a version in the canonical form of PEP 440; ValueError: it has another form."""
    if len(text) > _MAX_VERSION_LETTERS or not _VERSION.fullmatch(text):
        raise ValueError(f"expected a version such as 0.1.1, got {quote_text(text)}")
    return text


def check_host(host: str) -> str:
    """Return a host's name or IPv4 address; ValueError: it has another form.

    An international name has the form of the DNS (xn--...).
    """
    if len(host) > _MAX_HOST_LETTERS or not _HOST.fullmatch(host):
        raise ValueError(
            "expected a host of letters (a-z, A-Z), digits, '-', '_' and '.', an international "
            f"name as xn--..., got {quote_text(host)}"
        )
    return host


def _escape_character(character: str) -> str:
    r"""Return a character as an escape, such as \n or \u202e."""
    return character.encode("unicode_escape").decode("ascii")
