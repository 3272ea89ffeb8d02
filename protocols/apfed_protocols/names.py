"""The names that the parties of a protocol and its session go by.

Run by: every role, when an agreement is made. Protects from: two parties under one name, and names
that no message can hold.
"""

from collections.abc import Sequence

from apfed_protocols.errors import LocalProtocolError

__all__ = ["require_names"]

_MOST_NAME_BYTES = 255


def require_names(of: str, session: object, parties: Sequence[object]) -> None:
    """Refuse names that are no text of 1 to 255 bytes in UTF-8, and parties of one name.

    Args:
        of: the protocol, as the noun of a sentence.
        session: its name.
        parties: theirs.

    Raises:
        LocalProtocolError: says which name.
    """
    for name in (session, *parties):
        if not 0 < _size(name) <= _MOST_NAME_BYTES:
            raise LocalProtocolError(
                f"a {of} needs a session name and a name for every party, text of 1 to "
                f"{_MOST_NAME_BYTES} bytes in UTF-8 each, got {name!r:.100}"
            )
    if len(set(parties)) != len(parties):
        raise LocalProtocolError(
            f"the parties of a {of} are all different, got {', '.join(map(str, parties))}"
        )


def _size(name: object) -> int:
    try:
        return len(name.encode()) if isinstance(name, str) else 0
    except UnicodeEncodeError:
        return 0
