"""The end of an intersection at one party: exactly what the agreed output gives it.

Run by: every role; the properties are those of `apfed_protocols.psi.interface.Aligner`.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.interface import (
    IntersectionAgreement,
    IntersectionTooSmallError,
    Membership,
    Output,
)

__all__ = ["Opened", "ResultHolder", "check_choices"]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What one party learned; None where it did not."""

    rows: NDArray[np.int64] | None = field(default=None, repr=False)
    size: int | None = None
    membership: Membership | None = None


class ResultHolder:
    """Base of the roles: keeps the outcome, and says why there is none."""

    def __init__(self, me: str, output: Output) -> None:
        self._me, self._output = me, output
        self._outcome: Opened | IntersectionTooSmallError | None = None

    @property
    def finished(self) -> bool:
        """Whether this role needs no further message."""
        return self._outcome is not None

    @property
    def rows(self) -> NDArray[np.int64]:
        """See `Aligner.rows`."""
        rows = self._opened().rows
        if rows is None:
            raise self._not_opened("rows")
        return rows

    @property
    def size(self) -> int:
        """See `Aligner.size`."""
        opened = self._opened()
        if opened.size is not None:
            return opened.size
        if opened.rows is not None:
            return len(opened.rows)
        raise self._not_opened("size")

    @property
    def membership(self) -> Membership:
        """See `Aligner.membership`."""
        membership = self._opened().membership
        if membership is None:
            raise self._not_opened("shared membership")
        return membership

    def _opened(self) -> Opened:
        if self._outcome is None:
            raise LocalProtocolError(f"{self._me}: the intersection is not finished")
        if isinstance(self._outcome, IntersectionTooSmallError):
            raise self._outcome
        return self._outcome

    def _not_opened(self, what: str) -> LocalProtocolError:
        return LocalProtocolError(
            f"{self._me} has no {what} of this intersection; the parties agreed on the output "
            f"{self._output.value!r}"
        )


def check_choices(
    backend: str,
    outputs: frozenset[Output],
    agreement: IntersectionAgreement,
    threads: int | None,
) -> None:
    """Refuse an output that the backend cannot give, or no process to work in.

    Raises:
        LocalProtocolError: names what there is.
    """
    if threads is not None and threads < 1:
        raise LocalProtocolError(f"threads is at least 1, got {threads}")
    if agreement.output not in outputs:
        raise LocalProtocolError(
            f"{backend} cannot give the output {agreement.output.value!r}; "
            f"it gives {', '.join(sorted(outputs))}"
        )
