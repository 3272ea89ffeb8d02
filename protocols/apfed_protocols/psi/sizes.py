"""The sizes that the parties announce: their own, or those of the agreement.

Run by: all parties of backends that can hide how many IDs a party has below an agreed size, and
deal before the IDs are known.
"""

from collections.abc import Sequence

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.interface import IntersectionAgreement

__all__ = ["agreed_size", "announced_size", "check_announced", "largest_size"]


def announced_size(agreement: IntersectionAgreement, me: str, true_size: int) -> int:
    """Return what this party announces.

    Raises:
        LocalProtocolError: it has more IDs than agreed.
    """
    if not agreement.sizes:
        return true_size
    agreed = agreed_size(agreement, me)
    if true_size > agreed:
        raise LocalProtocolError(
            f"{me} has {true_size} IDs, the parties agreed that it announces {agreed}"
        )
    return agreed


def check_announced(
    agreement: IntersectionAgreement, sender: str, sizes: Sequence[int], parties: Sequence[str]
) -> None:
    """Refuse sizes other than the agreed ones, or above the limit.

    Raises:
        RemoteProtocolError: names `sender`, who said so.
    """
    limit = agreement.maximum_ids
    for size in sizes:
        if size > limit:
            raise RemoteProtocolError(
                f"{sender} announces {size} IDs, the parties agreed on at most {limit}"
            )
    if not agreement.sizes:
        return
    agreed = sorted(agreed_size(agreement, party) for party in parties)
    if sorted(sizes) != agreed:
        raise RemoteProtocolError(
            f"{sender} announces {', '.join(map(str, sizes))} IDs, the parties agreed on "
            f"{', '.join(map(str, agreed))}"
        )


def largest_size(agreement: IntersectionAgreement) -> int:
    """The most IDs that any party may announce."""
    return max(agreement.sizes.values(), default=agreement.maximum_ids)


def agreed_size(agreement: IntersectionAgreement, party: str) -> int:
    try:
        return agreement.sizes[party]
    except KeyError:
        raise LocalProtocolError(
            f"no size is agreed for {party}, only for {', '.join(agreement.sizes) or 'nobody'}"
        ) from None
