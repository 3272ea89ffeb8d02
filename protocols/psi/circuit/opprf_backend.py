"""The backend `opprf`: the circuit on one programmed value a bin."""

from typing import ClassVar

from protocols.psi.circuit.backend import CircuitIntersection
from protocols.psi.circuit.comparing import Comparing
from protocols.psi.circuit.programmed import Programmed

__all__ = ["OpprfIntersection"]


class OpprfIntersection(CircuitIntersection):
    """The backend `opprf`: what `circuit` gives and hides, with a tenth of its bytes.

    Args: as `CircuitIntersection`.
    """

    name: ClassVar[str] = "opprf"
    leaks: ClassVar[tuple[str, ...]] = (
        "The dealer learns how large the hub's set is, and how many IDs are common to all.",
        "All parties learn whether the agreed minimum is reached.",
    )

    def _comparing(self) -> Comparing:
        return Programmed()
