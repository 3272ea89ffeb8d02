"""Triples of a dealer as a provider for CrypTen, in place of those that its party 0 makes.

Run by: each party of a computation on bits shared by exclusive or. Protects from: the other
parties, as long as the dealer works with none of them; the shares come from our own
generator (`apfed_protocols.randomness`), expanded before the computation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError

__all__ = ["DealtTriples", "bits_of", "shared_bits"]

Words = NDArray[np.uint64]
Take = Callable[[tuple[int, ...]], tuple[Words, Words, Words]]


def shared_bits(words: Words) -> Any:
    """This party's share as CrypTen's tensor, over the same memory where it may be written to."""
    from crypten.mpc.primitives import BinarySharedTensor

    # torch takes no memory that it must not write to.
    writable = words if words.flags.writeable else words.copy()
    return BinarySharedTensor.from_shares(torch.from_numpy(writable.view(np.int64)), precision=0)


def bits_of(tensor: torch.Tensor) -> Words:
    """The words of a share, over the same memory."""
    words: Words = tensor.numpy().view(np.uint64)
    return words


class DealtTriples:
    """A provider of triples (a, b, a AND b) and of nothing else.

    Args:
        take: hands out this party's next shares in a shape, each word once.
    """

    def __init__(self, take: Take) -> None:
        self._take = take

    def generate_binary_triple(
        self, size0: Any, size1: Any, device: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return shares of a, b and a AND b; CrypTen calls it so.

        Raises:
            LocalProtocolError: two shapes, or a device other than the processor.
        """
        if tuple(size0) != tuple(size1) or str(device or "cpu") != "cpu":
            raise LocalProtocolError(
                f"a dealer's triples are for equal shapes on the processor, got {tuple(size0)} "
                f"and {tuple(size1)} on {device}"
            )
        a, b, c = self._take(tuple(size0))
        return shared_bits(a), shared_bits(b), shared_bits(c)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise LocalProtocolError(
            f"the dealer hands out triples of bits only, and CrypTen asks its provider for {name}"
        )
