"""What every private set intersection offers: one hub, any number of members.

Run by: the active as the hub, every passive as a member. Guarantee asked of every
backend: an ID outside the intersection stays unknown to every other party; what a
backend reveals beyond the M-way intersection, it lists in `leaks`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Conversation
from protocols.errors import LocalProtocolError

__all__ = [
    "DEFAULT_MAXIMUM_IDS",
    "Aligner",
    "IntersectionAgreement",
    "IntersectionTooSmallError",
    "SetIntersection",
    "check_ids",
    "check_parties",
    "opened_rows",
]

DEFAULT_MAXIMUM_IDS = 10_000_000
_POSITIONS = 2**32
_ROWS_SHOWN = 5


class IntersectionTooSmallError(LocalProtocolError):
    """The parties share fewer IDs than they agreed on as a minimum; nothing was opened."""

    @classmethod
    def of(cls, me: str, minimum_rows: int, detail: str = "") -> "IntersectionTooSmallError":
        """Say it at the party `me`; `detail` may name sizes that this party knows."""
        return cls(
            f"{me}: the parties share fewer IDs than the agreed minimum of {minimum_rows}{detail}; "
            "nothing was opened. Check that all parties use the same ID column and the same "
            "normalisation"
        )


@dataclass(frozen=True, kw_only=True)
class IntersectionAgreement:
    """What all parties fix before an intersection; public.

    Attributes:
        session: names the intersection; non-empty, used once.
        minimum_rows: below this size no party's rows are opened; 0 or more.
        maximum_ids: the largest set that a party accepts from a peer, 1 to 2^32 - 1. It
            limits what a party can probe by filling its set with guessed IDs.
        encoding: how records became ID bytes (normalisation), in any canonical text;
            parties that encode differently would find no common ID.
        dealer: the party that hands out randomness, for backends that need one. It holds no
            IDs and must not work together with any other party.
    """

    session: str
    minimum_rows: int = 2
    maximum_ids: int = DEFAULT_MAXIMUM_IDS
    encoding: str = ""
    dealer: str = ""

    def __post_init__(self) -> None:
        if not self.session:
            raise LocalProtocolError("an intersection needs a session name")
        if not 0 < self.maximum_ids < _POSITIONS:
            raise LocalProtocolError(f"maximum_ids lies in 1..2^32 - 1, got {self.maximum_ids}")
        if not 0 <= self.minimum_rows <= self.maximum_ids:
            raise LocalProtocolError(
                f"minimum_rows lies in 0..maximum_ids ({self.maximum_ids}), got {self.minimum_rows}"
            )

    @property
    def digest(self) -> bytes:
        """SHA-256 over all fields, each with its length."""
        numbers = (self.minimum_rows.to_bytes(4, "big"), self.maximum_ids.to_bytes(4, "big"))
        texts = (self.session, self.encoding, self.dealer)
        parts = (*numbers, *(text.encode() for text in texts))
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.sha256(b"secure-apfed intersection v1" + framed).digest()


class Aligner(Conversation, Protocol):
    """One party's side of an intersection; `rows` is ready when `finished`."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """Positions in this party's own ID list, in the order that all parties share.

        `rows[k]` of every party belongs to the same ID, for each k of the intersection.

        Raises:
            IntersectionTooSmallError: the intersection is below the agreed minimum.
            LocalProtocolError: read before the intersection is finished.
        """
        ...


class SetIntersection(Protocol):
    """A backend: makes the roles. IDs are bytes, distinct and not empty.

    Attributes:
        name: its key in the table of backends.
        needs_dealer: whether the party that `agreement.dealer` names must take part.
        leaks: what it reveals beyond the intersection and the sizes, in sentences.
    """

    name: ClassVar[str]
    needs_dealer: ClassVar[bool]
    leaks: ClassVar[tuple[str, ...]]
    agreement: IntersectionAgreement

    def __init__(self, agreement: IntersectionAgreement, *, processes: int | None = None) -> None:
        """Describe one party's end; `processes` is its own choice, None lets the backend choose."""
        ...

    def hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Aligner:
        """The active's side. Raises LocalProtocolError on duplicate or empty IDs."""
        ...

    def member(self, me: str, hub: str, ids: Sequence[bytes]) -> Aligner:
        """A passive's side. Raises LocalProtocolError on duplicate or empty IDs."""
        ...

    def dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        """The dealer's side. Raises LocalProtocolError if the backend needs none."""
        ...


def check_parties(hub: str, members: Sequence[str], *others: str) -> None:
    """Refuse an intersection without members or with one party in two roles.

    Raises:
        LocalProtocolError: names the parties.
    """
    parties = (hub, *members, *others)
    if not members or not all(parties) or len(set(parties)) != len(parties):
        raise LocalProtocolError(
            "an intersection has one hub and one or more different members, got hub "
            f"{hub!r}, members {', '.join(map(repr, members)) or 'none'}"
            + "".join(f", dealer {other!r}" for other in others)
        )


def opened_rows(
    me: str, outcome: NDArray[np.int64] | IntersectionTooSmallError | None
) -> NDArray[np.int64]:
    """Return the rows that `me` learned, or raise why there are none; see `Aligner.rows`."""
    if outcome is None:
        raise LocalProtocolError(f"{me}: the intersection is not finished")
    if isinstance(outcome, IntersectionTooSmallError):
        raise outcome
    return outcome


def check_ids(me: str, ids: Sequence[bytes], maximum_ids: int) -> None:
    """Refuse a set that an intersection would get wrong; names rows, never an ID.

    Raises:
        LocalProtocolError: too many, empty or repeated IDs.
    """
    if len(ids) > maximum_ids:
        raise LocalProtocolError(
            f"{me} has {len(ids)} IDs, the parties agreed on at most {maximum_ids}"
        )
    empty = [row for row, identity in enumerate(ids) if not identity]
    if empty:
        raise LocalProtocolError(
            f"{me} has {len(empty)} empty ID(s), in row(s) {_first(empty)}; remove these rows"
        )
    if len(set(ids)) == len(ids):
        return
    first_row: dict[bytes, int] = {}
    repeats = [
        row for row, identity in enumerate(ids) if first_row.setdefault(identity, row) != row
    ]
    pairs = ", ".join(f"{row} (as {first_row[ids[row]]})" for row in repeats[:_ROWS_SHOWN])
    more = ", ..." if len(repeats) > _ROWS_SHOWN else ""
    raise LocalProtocolError(
        f"{me} has {len(repeats)} repeated ID(s), in row(s) {pairs}{more}; keep one row for each ID"
    )


def _first(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_ROWS_SHOWN]))
    return shown + ", ..." if len(rows) > _ROWS_SHOWN else shown
