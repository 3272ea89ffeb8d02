"""Opening what all share, where the hub knows which of its rows it shares with each member.

Run by: backends whose `leaks` say so. The hub names to each member places in the list that the
member sent, in one random order for all; each member checks them against what it sent.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.interface import IntersectionTooSmallError
from apfed_protocols.randomness import random_permutation

__all__ = ["POSITION_BYTES", "check_places", "common_rows"]

Rows = NDArray[np.int64]

POSITION_BYTES = 4


def common_rows(
    me: str, places: Mapping[str, Rows], minimum: int
) -> Rows | IntersectionTooSmallError:
    """The hub's rows that all share, in a random order; or why they stay closed.

    Args:
        me: the hub.
        places: for each member where it has each of the hub's rows, -1 for nowhere; shape (n,).
        minimum: how many must be common.
    """
    shared = {member: place >= 0 for member, place in places.items()}
    common = np.flatnonzero(np.logical_and.reduce(list(shared.values())))
    if len(common) < minimum:
        found = ", ".join(f"{int(with_it.sum())} with {name}" for name, with_it in shared.items())
        detail = f" ({len(common)} in common to all; {found})"
        return IntersectionTooSmallError.of(me, minimum, detail)
    return common[random_permutation(len(common))]


def check_places(sender: str, items: bytes, *, minimum: int, own_size: int, hub_size: int) -> Rows:
    """Read the places that the hub opened in a member's list.

    Raises:
        RemoteProtocolError: too few or too many, repeated, or outside of the list.
    """
    if len(items) % POSITION_BYTES:
        raise RemoteProtocolError(f"{sender} opened rows in {len(items)} bytes, not whole places")
    places = np.frombuffer(items, ">u4").astype(np.int64)
    if len(places) < minimum:
        raise RemoteProtocolError(
            f"{sender} opened {len(places)} rows, the parties agreed on at least {minimum}"
        )
    if len(places) and int(places.max()) >= own_size:
        raise RemoteProtocolError(
            f"{sender} names place {int(places.max())} of a list of {own_size} IDs"
        )
    if len(np.unique(places)) != len(places) or len(places) > hub_size:
        raise RemoteProtocolError(
            f"{sender} opened {len(places)} rows, of which {len(np.unique(places))} differ, "
            f"with a set of {hub_size} IDs"
        )
    return places
