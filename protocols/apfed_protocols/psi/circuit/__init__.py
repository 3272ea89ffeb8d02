"""The backend `circuit`; start reading at `apfed_protocols.psi.circuit.backend`."""

__all__: list[str] = []
