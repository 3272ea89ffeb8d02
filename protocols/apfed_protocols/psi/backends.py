"""All set intersections by name. A new backend is one file here and one line in the table."""

from collections.abc import Mapping

from apfed_protocols.psi.circuit.backend import CircuitIntersection
from apfed_protocols.psi.circuit.crypten_backend import CryptenCircuitIntersection
from apfed_protocols.psi.circuit.opprf_backend import OpprfIntersection
from apfed_protocols.psi.ecdh import EcdhIntersection
from apfed_protocols.psi.interface import SetIntersection
from apfed_protocols.psi.vole.backend import VoleIntersection

__all__ = ["SET_INTERSECTIONS"]

SET_INTERSECTIONS: Mapping[str, type[SetIntersection]] = {
    "circuit": CircuitIntersection,
    "circuit_crypten": CryptenCircuitIntersection,
    "ecdh": EcdhIntersection,
    "opprf": OpprfIntersection,
    "vole": VoleIntersection,
}
