"""Secure computation between parties: sums, set intersection, sealed links.

Knows nothing of neural networks, opens no socket, reads no clock.
"""

__all__: list[str] = []
