"""The circuit whose gates CrypTen computes: `circuit` in all else, message by message.

Run by: hub, members and dealer as in `apfed_protocols.psi.circuit.backend`, with the same
guarantees; parties of the two backends may even be mixed, as they send the same bytes. CrypTen
evaluates each AND on its `BinarySharedTensor`, with the triples of our dealer as its provider; it
is an optional extra and slower than our own arrays. It is here for who trusts CrypTen's arithmetic,
or wants to go on with its tensors.
"""

from collections.abc import Callable
from typing import ClassVar

from apfed_protocols.crypten.shim import load_crypten
from apfed_protocols.psi.circuit.backend import CircuitIntersection
from apfed_protocols.psi.circuit.bits import And
from apfed_protocols.psi.interface import Admit, IntersectionAgreement, Progress

__all__ = ["CryptenCircuitIntersection"]


class CryptenCircuitIntersection(CircuitIntersection):
    """The backend `circuit_crypten`; for arguments, outputs and leaks see `CircuitIntersection`.

    Raises:
        LocalProtocolError: CrypTen is not installed.
    """

    name: ClassVar[str] = "circuit_crypten"

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        admit: Admit | None = None,
    ) -> None:
        load_crypten()
        super().__init__(agreement, threads=threads, progress=progress, admit=admit)

    def _gate(self) -> type[And]:
        # torch takes a second to load, and only here is it needed
        from apfed_protocols.psi.circuit.crypten_and import CryptenAnd

        return CryptenAnd
