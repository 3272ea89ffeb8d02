"""What the parties of one decomposition fix before it; used once, and public.

Run by: every role. Protects from: parties that compute under different numbers, since each message
carries the digest. Letters: N rows, F features of all owners together, D singular vectors.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.integers import take_numpy_integers
from apfed_protocols.names import require_names

__all__ = ["MOST_FEATURES", "MOST_MASK_ROWS", "SvdAgreement"]

MOST_FEATURES = 2**13
"""Of all owners together: the dealer decomposes a matrix of so many rows and columns."""

MOST_MASK_ROWS = 2**13
"""In one block of the mask of rows: a block takes half a gigabyte then."""

_RANGES = {
    "vectors": (1, MOST_FEATURES), "mask_rows": (2, MOST_MASK_ROWS), "most_rows": (2, 2**26),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SvdAgreement:
    """What all parties fix before one decomposition; public.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session: names this one decomposition; names have 1 to 255 bytes in UTF-8.
        server, dealer: hold no table, and work with nobody.
        owners: whose tables stand side by side, in this order; two or more.
        features: columns of each of these tables.
        receiver: the owner that gets the singular vectors.
        vectors: D, how many of them, those of the largest singular values first.
        mask_rows: rows of one block of the mask of rows, at most.
        most_rows: of a table.
    """

    session: str
    server: str
    dealer: str
    owners: tuple[str, ...]
    features: tuple[int, ...]
    receiver: str
    vectors: int
    mask_rows: int
    most_rows: int

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        if type(self.owners) is not tuple or type(self.features) is not tuple:
            raise LocalProtocolError("owners and features are tuples, of names and of numbers")
        require_names("decomposition", self.session, (self.server, self.dealer, *self.owners))
        if len(self.owners) < 2 or self.receiver not in self.owners:
            raise LocalProtocolError(
                f"a decomposition is of two tables or more, and one of their owners receives it; "
                f"got {', '.join(self.owners)} and the receiver {self.receiver!r:.100}"
            )
        if len(self.features) != len(self.owners) or not all(
            type(count) is int and count >= 1 for count in self.features
        ):
            raise LocalProtocolError(
                f"each of {len(self.owners)} owners has 1 feature or more, got {self.features!r}"
            )
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise LocalProtocolError(f"{name} is a number in {least}..{most}, got {value!r}")
        if not self.vectors <= self.columns <= MOST_FEATURES:
            raise LocalProtocolError(
                f"the tables have {self.columns} features together; that is at most "
                f"{MOST_FEATURES}, and no fewer than the {self.vectors} singular vectors asked for"
            )

    @property
    def columns(self) -> int:
        """F."""
        return sum(self.features)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all fields."""
        canonical = json.dumps(asdict(self), sort_keys=True).encode()
        return hashlib.sha256(b"secure-apfed svd agreement v1" + canonical).digest()

    def position(self, me: str) -> int:
        """The place of the owner called `me`.

        Raises:
            LocalProtocolError: no owner has that name.
        """
        if me not in self.owners:
            raise LocalProtocolError(
                f"{me!r} holds no table of this decomposition; owners are {', '.join(self.owners)}"
            )
        return self.owners.index(me)

    def columns_of(self, owner: str) -> slice:
        """Where this owner's columns stand among all."""
        place = self.position(owner)
        start = sum(self.features[:place])
        return slice(start, start + self.features[place])
