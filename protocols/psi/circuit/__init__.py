"""The backend `circuit`; start reading at `protocols.psi.circuit.backend`."""

__all__: list[str] = []
