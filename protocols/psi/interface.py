"""What every private set intersection offers: one hub, any number of members.

Run by: the active as the hub, every passive as a member. Guarantee asked of every
backend: an ID outside the intersection stays unknown to every other party; what a
backend reveals beyond the M-way intersection, it lists in `leaks`.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from protocols.conversation import Conversation

__all__ = ["Aligner", "SetIntersection"]


class Aligner(Conversation, Protocol):
    """One party's side of an intersection; `rows` is ready when `finished`."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """Positions in this party's own ID list, in the order that all parties share.

        `rows[k]` of every party belongs to the same ID, for each k of the intersection.

        Raises:
            LocalProtocolError: read before the intersection is finished.
        """
        ...


class SetIntersection(Protocol):
    """A backend: makes the two roles. IDs are bytes, distinct and not empty.

    Attributes:
        name: its key in the table of backends.
        leaks: what it reveals beyond the intersection and the sizes, in sentences.
    """

    name: ClassVar[str]
    leaks: ClassVar[tuple[str, ...]]

    def hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Aligner:
        """The active's side. Raises LocalProtocolError on duplicate or empty IDs."""
        ...

    def member(self, me: str, hub: str, ids: Sequence[bytes]) -> Aligner:
        """A passive's side. Raises LocalProtocolError on duplicate or empty IDs."""
        ...
