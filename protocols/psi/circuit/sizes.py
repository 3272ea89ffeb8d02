"""The sizes that the parties announce: their own, or those of the agreement.

Run by: all parties of `protocols.psi.circuit.backend`. Agreed sizes hide how many IDs a party has
below them, and let the dealer deal before the IDs are known.
"""

from collections.abc import Sequence

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.psi.circuit import hashing
from protocols.psi.circuit.messages import Desk
from protocols.psi.interface import IntersectionAgreement

__all__ = ["announced_size", "check_announced", "planned_bins_and_slots"]


def announced_size(desk: Desk, true_size: int) -> int:
    """Return what this party announces.

    Raises:
        LocalProtocolError: it has more IDs than agreed.
    """
    if not desk.agreement.sizes:
        return true_size
    agreed = _agreed(desk.agreement, desk.me)
    if true_size > agreed:
        raise LocalProtocolError(
            f"{desk.me} has {true_size} IDs, the parties agreed that it announces {agreed}"
        )
    return agreed


def check_announced(desk: Desk, sender: str, sizes: Sequence[int], parties: Sequence[str]) -> None:
    """Refuse sizes other than the agreed ones, or above the limit.

    Raises:
        RemoteProtocolError: names `sender`, who said so.
    """
    limit = desk.agreement.maximum_ids
    for size in sizes:
        if size > limit:
            raise RemoteProtocolError(
                f"{sender} announces {size} IDs, the parties agreed on at most {limit}"
            )
    if not desk.agreement.sizes:
        return
    agreed = sorted(_agreed(desk.agreement, party) for party in parties)
    if sorted(sizes) != agreed:
        raise RemoteProtocolError(
            f"{sender} announces {', '.join(map(str, sizes))} IDs, the parties agreed on "
            f"{', '.join(map(str, agreed))}"
        )


def planned_bins_and_slots(
    agreement: IntersectionAgreement, hub: str, members: Sequence[str]
) -> tuple[int, Sequence[int]]:
    """Return B and each member's K for the agreed sizes.

    Raises:
        LocalProtocolError: they are agreed for other parties.
    """
    if len(members) != len(agreement.sizes) - 1:
        raise LocalProtocolError(
            f"sizes are agreed for {', '.join(agreement.sizes)}, the members are "
            f"{', '.join(members)}"
        )
    bins = hashing.bins_for(_agreed(agreement, hub))
    return bins, [hashing.slots_for(_agreed(agreement, member), bins) for member in members]


def _agreed(agreement: IntersectionAgreement, party: str) -> int:
    try:
        return agreement.sizes[party]
    except KeyError:
        raise LocalProtocolError(
            f"no size is agreed for {party}, only for {', '.join(agreement.sizes) or 'nobody'}"
        ) from None
