"""A set of contributors on the wire: their positions in the agreement, rising, two bytes each.

Run by: every role of a sum that may go on without some of its contributors.
"""

import struct
from collections.abc import Collection
from itertools import pairwise

from protocols.errors import RemoteProtocolError
from protocols.sums.agreement import SumAgreement

__all__ = ["pack_names", "parse_names"]

_POSITION_BYTES = 2


def pack_names(names: Collection[str], agreement: SumAgreement) -> bytes:
    """Return the bytes of a set of contributors."""
    positions = sorted(agreement.position(name) for name in names)
    return struct.pack(f">{len(positions)}H", *positions)


def parse_names(data: bytes, agreement: SumAgreement, *, sender: str) -> tuple[str, ...]:
    """Return the contributors that `sender` named, in the agreement's order.

    Raises:
        RemoteProtocolError: anything but the canonical bytes of a set of contributors.
    """
    count, rest = divmod(len(data), _POSITION_BYTES)
    agreed = agreement.contributors
    positions = struct.unpack_from(f">{count}H", data)
    rising = all(low < high for low, high in pairwise(positions))
    if rest or not rising or any(position >= len(agreed) for position in positions):
        raise RemoteProtocolError(
            f"{sender} named a set of contributors in {len(data)} bytes that are none; expected "
            f"rising positions below {len(agreed)}"
        )
    return tuple(agreed[position] for position in positions)
