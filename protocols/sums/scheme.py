"""What the roles of a homomorphic sum ask of an encryption library.

Run by: every role. Implementations take bytes of peers and turn what the library thinks of
bad ones into `RemoteProtocolError`; parameters never come from a peer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scheme"]


class Scheme(Protocol):
    """A local library under one set of parameters; `Any` are its contexts and zeros.

    Attributes:
        ciphertext_bytes: the usual length of a ciphertext.
    """

    ciphertext_bytes: int

    def key_pair(self) -> Any:
        """A context with a fresh secret key, for the receiver only."""
        ...

    def public_key(self, context: Any) -> bytes: ...

    def keyless_context(self) -> Any:
        """A context that can add and nothing else."""
        ...

    def public_context(self, key: bytes, *, sender: str) -> Any:
        """A context that can encrypt under what `sender` sent; RemoteProtocolError if bad."""
        ...

    def zero(self, context: Any) -> Any:
        """A fresh encryption of zeros, for one later ciphertext of `encrypt`."""
        ...

    def encrypt(
        self, context: Any, slots_VS: NDArray[np.int64], zeros: Sequence[Any] = ()
    ) -> list[bytes]:
        """One raw ciphertext for each row of slots; the first rows use up `zeros`."""
        ...

    def add(
        self, context: Any, contributions: Mapping[str, Sequence[bytes]], vectors: int
    ) -> list[bytes]:
        """Add the ciphertexts of all contributors; RemoteProtocolError on a bad blob."""
        ...

    def decrypt(
        self, context: Any, blobs: Sequence[bytes], vectors: int, *, sender: str
    ) -> NDArray[np.float64]:
        """The finite slots of `vectors` ciphertexts; RemoteProtocolError on a bad blob."""
        ...
