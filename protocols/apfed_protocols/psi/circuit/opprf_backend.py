"""The backend `opprf`: the circuit on one programmed value a bin."""

from typing import ClassVar

from apfed_protocols.psi.circuit.backend import UNCHECKED, CircuitIntersection
from apfed_protocols.psi.circuit.comparing import Comparing
from apfed_protocols.psi.circuit.hashing import bins_for
from apfed_protocols.psi.circuit.programmed import Programmed
from apfed_protocols.psi.digests import PLACES
from apfed_protocols.psi.interface import Guesses
from apfed_protocols.psi.vole.messages import vector_elements

__all__ = ["OpprfIntersection"]


class OpprfIntersection(CircuitIntersection):
    """The backend `opprf`: what `circuit` gives and hides, with a tenth of its bytes.

    Args: as `CircuitIntersection`.
    """

    name: ClassVar[str] = "opprf"
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns how large the hub's set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
    )

    @staticmethod
    def most_guesses(maximum_ids: int) -> Guesses:
        """The hub has one ID a bin; a member's store solves three equations a cell.

        An ID takes three, or one for a chance of a third.
        """
        member = PLACES * vector_elements(maximum_ids)
        return Guesses(hub=bins_for(maximum_ids), member=member)

    def _comparing(self) -> Comparing:
        return Programmed()
