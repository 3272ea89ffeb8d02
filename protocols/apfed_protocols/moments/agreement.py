"""What the parties of one noisy moment fix before it, and the numbers that follow from that.

Run by: every role. Protects from: parties that compute under different numbers (each message
carries the digest), and a moment that leaves the ring. All of it is public.

Letters: U people, d features, K columns of votes, P contributors, T = 2^bits steps in a vote of 1.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.integers import take_numpy_integers
from apfed_protocols.names import require_names
from apfed_protocols.noise import MAX_DEVIATION, largest_noise
from apfed_protocols.sums.agreement import SumAgreement

__all__ = ["BLOCK_BYTES", "MomentAgreement"]

BLOCK_BYTES = 2**22
"""About how many bytes of shares are dealt in one message."""

_SIZES = {"people": 2**24, "features": 2**16, "columns": 2**16}
_MOST_PRODUCTS = 2**20  # d K: a block of 8 people then has at most 64 MiB
# A row of votes may exceed 1 by 2^-20 (rounding of floats): below a step while T is below 2^20.
_MOST_BITS = 18


@dataclass(frozen=True, kw_only=True)
class MomentAgreement:
    """What all parties fix before one moment; used once, public.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session: names this one moment; names have 1 to 255 bytes in UTF-8.
        receiver, combiner: the active and the aggregator.
        dealer: holds no data, and works with neither of the two.
        contributors: the passives, in the contract's order; two or more.
        people: U, rows of votes; every person has one row.
        features: d, signs that the active holds of each person.
        columns: K, votes in a row.
        noise: deviation of the discrete Gaussian noise that each contributor adds to each value
            of the moment, in steps; None: none, and the active reads the moment itself.
        bits: of fixed point after the point, 1 to 18; a step is 2^-bits.
        signed: votes may be negative, which makes `sensitivity` larger.
        allow_single: permit one contributor, whose votes are then not hidden among others'.
    """

    session: str
    receiver: str
    combiner: str
    dealer: str
    contributors: tuple[str, ...]
    people: int
    features: int
    columns: int
    noise: int | None
    bits: int = 12
    signed: bool = False
    allow_single: bool = False

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        self._require_parties()
        self._require_sizes()

    def _require_parties(self) -> None:
        if type(self.contributors) is not tuple:
            raise LocalProtocolError(
                f"contributors are a tuple of names, got {type(self.contributors).__name__}"
            )
        parties = (self.receiver, self.combiner, self.dealer, *self.contributors)
        require_names("moment", self.session, parties)
        for field in ("signed", "allow_single"):
            if type(getattr(self, field)) is not bool:
                raise LocalProtocolError(f"{field} is True or False, got {getattr(self, field)!r}")
        # The rules on how many contributors there are, and on their names, are those of sums.
        self._masking("rules")

    def _require_sizes(self) -> None:
        ranges = {name: (1, most) for name, most in _SIZES.items()} | {"bits": (1, _MOST_BITS)}
        if self.noise is not None:
            ranges["noise"] = (1, MAX_DEVIATION)
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise LocalProtocolError(f"{name} is a number in {least}..{most}, got {value!r}")
        if self.features * self.columns > _MOST_PRODUCTS:
            raise LocalProtocolError(
                f"{self.features} features by {self.columns} columns are more than "
                f"{_MOST_PRODUCTS} values; open them in parts"
            )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all fields."""
        canonical = json.dumps(asdict(self), sort_keys=True).encode()
        return hashlib.sha256(b"secure-apfed moment agreement v1" + canonical).digest()

    @cached_property
    def masking(self) -> SumAgreement:
        """The agreement under which contributors and receiver share masks; of this moment alone."""
        return self._masking(f"moment {self.digest.hex()}")

    def _masking(self, session: str) -> SumAgreement:
        return SumAgreement(
            session=session,
            receiver=self.receiver,
            combiner=self.combiner,
            contributors=self.contributors,
            clip_norm=1.0,
            allow_single=self.allow_single,
        )

    @property
    def vote_steps(self) -> int:
        """T: the largest sum of magnitudes in one contributed row, in steps."""
        return int(2**self.bits)

    @property
    def limit(self) -> int:
        """The largest magnitude of an opened value in steps, P (U T + the noise's tail)."""
        return len(self.contributors) * (self.people * self.vote_steps + self.largest_noise)

    @property
    def largest_noise(self) -> int:
        """The largest magnitude of one contributor's noise on one value, in steps."""
        return largest_noise(self.noise or 0)

    @property
    def word(self) -> np.dtype[np.unsignedinteger[Any]]:
        """A ring element on the wire: of 32 bits where every opened value fits, else of 64.

        Whatever an agreement may say fits 64: at most 1024 (2^24 2^18 + 13.4 * 2^24), below 2^53.
        """
        return np.dtype("<u4") if self.limit < 2**31 else np.dtype("<u8")

    @property
    def scale(self) -> float:
        """What one step of an opened value is worth in Phi^T V, Phi = s / sqrt(d)."""
        return float(1 / (self.vote_steps * math.sqrt(self.features)))

    def sensitivity(self) -> float:
        """How far one person's votes at one passive move the moment, in steps, L2 over d x K.

        Votes v instead of v' change it by s_i (v - v')^T, of norm sqrt(d) |v - v'|, whatever signs
        s_i the receiver chose. Both have L1 norm at most T: where votes are not negative |v - v'|
        is at most sqrt(2) T, else 2 T. It holds for the integers sent, rounding included.
        """
        factor = 2.0 if self.signed else math.sqrt(2)
        return float(factor * math.sqrt(self.features) * self.vote_steps)

    def rounding(self) -> float:
        """A bound of what rounding moves one value of Phi^T V: below one step a vote."""
        return float(self.people * len(self.contributors) * self.scale)

    def position(self, me: str) -> int:
        """The place of the contributor called `me`; LocalProtocolError if there is none."""
        return self.masking.position(me)

    @property
    def block_people(self) -> int:
        """People in one block of shares, a multiple of 8 so that packed signs divide too."""
        person = self.features * self.columns * self.word.itemsize
        return max(8, BLOCK_BYTES // person // 8 * 8)

    @property
    def blocks(self) -> int:
        """How many messages of shares the dealer sends to the receiver."""
        return -(-self.people // self.block_people)

    def block(self, index: int) -> slice:
        """The people of one block."""
        start = index * self.block_people
        return slice(start, min(start + self.block_people, self.people))

    def each_block(self) -> Iterator[slice]:
        """The people of all blocks, in order."""
        return map(self.block, range(self.blocks))

    @property
    def sign_bytes(self) -> int:
        """Bytes of U d packed signs."""
        return -(-self.people * self.features // 8)
