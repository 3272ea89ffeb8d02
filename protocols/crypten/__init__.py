"""CrypTen as a library of arithmetic on shares; start reading at `protocols.crypten.shim`."""

__all__: list[str] = []
