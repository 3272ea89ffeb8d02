"""What the parties of a sum of products fix before the labels are sent. All of it is public.

Run by: every role. Protects from: parties that multiply under different numbers; frames carry the
digest.
"""

from dataclasses import dataclass
from functools import cached_property

from apfed_protocols.checks import take_numpy_integers
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums.interface import SumAgreement

__all__ = ["ProductAgreement"]

_MOST = {"people": 2**28, "columns": 512, "labelled": 4096}
_SECURITY = (20, 64)
_CANDIDATES = (2, 1024)


@dataclass(frozen=True, kw_only=True)
class ProductAgreement:
    """What all parties fix; public.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session, receiver, combiner, contributors, bits, allow_single: as in `SumAgreement`.
        people: U, rows of every passive's matrix, aligned; 1 to 2^28.
        columns: K, columns of the labels; 1 to 512.
        labelled: n, rows of the labels and columns of every matrix; 1 to 4096.
        row_bound: largest sum over j of |A[u, j]| of a person u, so that a product with bits lies
            in [-row_bound, row_bound]. A step of fixed point is row_bound / (2^(bits - 1) - 1).
        noise: deviation of the discrete Gaussian noise that each passive adds to each product, in
            steps; None: none.
        security: lambda; all that the active can tell from the noise of all ciphertexts of all
            passives is at most 2^-lambda in statistical distance; 20 to 64.
        candidates: requests that the active makes, of which the passives see through all but one;
            an active that cheats is found out but for one time in so many (see `audit`). Labels
            are then one-hot. 2 to 1024; None: the active is trusted.
    """

    session: str
    receiver: str
    combiner: str
    contributors: tuple[str, ...]
    people: int
    columns: int
    labelled: int
    bits: int = 16
    row_bound: float = 1.0
    noise: int | None = None
    security: int = 40
    candidates: int | None = None
    allow_single: bool = False

    def __post_init__(self) -> None:
        take_numpy_integers(self)
        for name, most in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise LocalProtocolError(
                    f"{name} of a sum of products lies in 1..{most}, got {value!r}"
                )
        least, most = _SECURITY
        if type(self.security) is not int or not least <= self.security <= most:
            raise LocalProtocolError(f"security lies in {least}..{most}, got {self.security!r}")
        if self.candidates is not None:
            least, most = _CANDIDATES
            if type(self.candidates) is not int or not least <= self.candidates <= most:
                raise LocalProtocolError(
                    f"candidates lies in {least}..{most}, got {self.candidates!r}"
                )
        _ = self.blocks_sum  # which checks the rest

    @cached_property
    def blocks_sum(self) -> SumAgreement:
        """What the products are to the aggregator: one sum of (people, columns) for each block."""
        return SumAgreement(
            session=self.session,
            receiver=self.receiver,
            combiner=self.combiner,
            contributors=self.contributors,
            clip_norm=self.row_bound,
            bits=self.bits,
            noise=self.noise,
            allow_single=self.allow_single,
        )
