"""CrypTen as a library of arithmetic on shares; start reading at `apfed_protocols.crypten.shim`."""

__all__: list[str] = []
