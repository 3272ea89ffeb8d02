"""What every private set intersection offers: one hub, any number of members.

Run by: the active as the hub, every passive as a member. Guarantee asked of every
backend: an ID outside the intersection stays unknown to every other party; what a
backend reveals beyond the M-way intersection, it lists in `leaks`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import Conversation
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.ids import MOST_IDS
from apfed_protocols.integers import take_numpy_integers

__all__ = [
    "Admit",
    "Aligner",
    "Guesses",
    "IntersectionAgreement",
    "IntersectionTooSmallError",
    "Membership",
    "Output",
    "Progress",
    "SetIntersection",
    "check_parties",
]

_POSITIONS = 2**32


Admit = Callable[[str, Sequence[str]], None]
"""Takes a party's own name and those of the peers with IDs; raises if it is not to take part."""


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


class Output(StrEnum):
    """What opens at the end, and to whom.

    ROWS: the common rows, to all. HUB_ROWS: to the hub alone. SIZE: only how many rows are
    common, to all. SHARED: nothing; all hold shares of which hub rows are common.
    """

    ROWS = "rows"
    HUB_ROWS = "hub_rows"
    SIZE = "size"
    SHARED = "shared"


@dataclass(frozen=True)
class Progress:
    """How far one party is with one piece of its work, in IDs or bins."""

    party: str
    work: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """How many IDs who deviates tries out in one intersection, at most.

    Attributes:
        hub: at each member, of which it may try out others at another; member: at the hub.
    """

    hub: int
    member: int


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One party's shares of which of the hub's IDs all parties have, for further protocols.

    The exclusive or of all parties' `shares` is True where the hub's ID in a place is common.

    Attributes:
        shares: bool, shape (places,); uniformly random to whoever lacks one party's.
        row_of_place: at the hub the row in each place, -1 for an empty one; else None.
    """

    shares: NDArray[np.bool_] = field(repr=False)
    row_of_place: NDArray[np.int64] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class IntersectionAgreement:
    """What all parties fix before an intersection; public.

    Attributes:
        session: names the intersection; non-empty, used once.
        minimum_rows: below this size no party's rows are opened; 0 or more.
        maximum_ids: the largest set that a party accepts from a peer, 1 to 2^32 - 1. It
            limits what a party can probe by filling its set with guessed IDs; one that deviates
            tries out as many as the backend's `most_guesses` says.
        encoding: how records became ID bytes (normalisation), in any canonical text;
            parties that encode differently would find no common ID.
        dealer: the party that hands out randomness, for backends that need one. It holds no
            IDs and must not work together with any other party.
        output: what opens.
        sizes: how many IDs the hub and each member announce, by name; a party may have fewer,
            which stays hidden then. Empty: all announce their true numbers.
        ahead: whether the dealer deals before the intersection; needs `sizes`.
    """

    session: str
    minimum_rows: int = 2
    maximum_ids: int = MOST_IDS
    encoding: str = ""
    dealer: str = ""
    output: Output = Output.ROWS
    sizes: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = False

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        if not self.session:
            raise LocalProtocolError("an intersection needs a session name")
        if not 0 < self.maximum_ids < _POSITIONS:
            raise LocalProtocolError(f"maximum_ids lies in 1..2^32 - 1, got {self.maximum_ids}")
        if any(not 0 <= size <= self.maximum_ids for size in self.sizes.values()):
            raise LocalProtocolError(
                f"sizes lie in 0..maximum_ids ({self.maximum_ids}), got {dict(self.sizes)}"
            )
        if self.ahead and not self.sizes:
            raise LocalProtocolError("to deal ahead, the parties agree on the sizes of their sets")
        if not 0 <= self.minimum_rows <= self.maximum_ids:
            raise LocalProtocolError(
                f"minimum_rows lies in 0..maximum_ids ({self.maximum_ids}), got {self.minimum_rows}"
            )

    @property
    def digest(self) -> bytes:
        """SHA-256 over all fields, each with its length."""
        numbers = (self.minimum_rows.to_bytes(4, "big"), self.maximum_ids.to_bytes(4, "big"))
        texts = [self.session, self.encoding, self.dealer, self.output.value]
        texts.append("ahead" if self.ahead else "")
        texts += [f"{size} {party}" for party, size in sorted(self.sizes.items())]
        parts = (*numbers, *(text.encode() for text in texts))
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.sha256(b"secure-apfed intersection v3" + framed).digest()


class Aligner(Conversation, Protocol):
    """One party's side of an intersection; what the agreed output gives is ready when `finished`.

    Each property raises IntersectionTooSmallError where the intersection is below the agreed
    minimum, and LocalProtocolError before the end or where it does not open to this party.
    """

    @property
    def rows(self) -> NDArray[np.int64]:
        """Positions in this party's own ID list, in the order that all parties share.

        `rows[k]` of every party belongs to the same ID, for each k of the intersection.
        """
        ...

    @property
    def size(self) -> int:
        """How many IDs all parties share."""
        ...

    @property
    def membership(self) -> Membership:
        """This party's shares of which IDs are common."""
        ...


class SetIntersection(Protocol):
    """A backend: makes the roles. IDs are bytes, distinct and not empty.

    Attributes:
        name: its key in the table of backends.
        needs_dealer: whether the party that `agreement.dealer` names must take part.
        outputs: what it can be asked for.
        pairwise: whether the hub learns its intersection with every single member.
        leaks: what it reveals beyond the intersection and the sizes, in sentences.
        agreement: equal at all parties.
        longest: bytes of the longest message that its roles take.
    """

    name: ClassVar[str]
    needs_dealer: ClassVar[bool]
    outputs: ClassVar[frozenset[Output]]
    pairwise: ClassVar[bool]
    leaks: ClassVar[tuple[str, ...]]
    agreement: IntersectionAgreement

    @property
    def longest(self) -> int: ...

    @staticmethod
    def most_guesses(maximum_ids: int) -> Guesses:
        """What a party can try out that announces `maximum_ids` and sends what it likes.

        IDs by chance or search left aside: each costs 2^40 hashes or more.
        """
        ...

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        admit: Admit | None = None,
    ) -> None:
        """Describe one party's end.

        Args:
            agreement: equal at all parties.
            threads: this party's own choice; None lets the backend choose.
            progress: called while this party works.
            admit: asked before each role with IDs is made.

        Raises:
            LocalProtocolError: the backend cannot give the agreed output.
        """
        ...

    def hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Aligner:
        """The active's side.

        Raises LocalProtocolError on duplicate or empty IDs, and what `admit` raises.
        """
        ...

    def member(self, me: str, hub: str, ids: Sequence[bytes]) -> Aligner:
        """A passive's side; as `hub`."""
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
