"""Private set intersection. A new backend is one file here and one line in the table."""

from collections.abc import Mapping

from protocols.psi.circuit.backend import CircuitIntersection
from protocols.psi.circuit.crypten_backend import CryptenCircuitIntersection
from protocols.psi.circuit.opprf_backend import OpprfIntersection
from protocols.psi.ecdh import EcdhIntersection
from protocols.psi.interface import SetIntersection
from protocols.psi.vole.backend import VoleIntersection

__all__ = ["SET_INTERSECTIONS"]

SET_INTERSECTIONS: Mapping[str, type[SetIntersection]] = {
    "circuit": CircuitIntersection,
    "circuit_crypten": CryptenCircuitIntersection,
    "ecdh": EcdhIntersection,
    "opprf": OpprfIntersection,
    "vole": VoleIntersection,
}
