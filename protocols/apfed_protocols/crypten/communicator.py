"""What a CrypTen party may say to the others: shares, scattered or gathered, and openings.

Run by: every party of a CrypTen world. CrypTen's own communicator can also leave plaintext
where it does not belong: `reduce`, which `reveal(dst=)` and `get_plain_text(dst=)` call, hands
partial sums to parties that are to learn nothing. Here it is refused; openings to all are put
together from everybody's shares, and to one by `gather`.

How the bytes travel, how long a party waits and whether the way is protected is the business
of the class that carries them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn

import torch
from torch.distributed import ReduceOp

from apfed_protocols.errors import LocalProtocolError

__all__ = ["Communicator", "open_shares"]

Tensor = torch.Tensor
# The operations are no enumeration and have no hash: by name.
_OPENINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "BXOR": torch.bitwise_xor,
}


def open_shares(shares: Sequence[Tensor], op: Any) -> Tensor:
    """Put everybody's shares together, by addition or exclusive or.

    Raises:
        LocalProtocolError: another operation.
    """
    for name, combine in _OPENINGS.items():
        if op == getattr(ReduceOp, name):
            return reduce(combine, shares)
    raise LocalProtocolError(f"shares are opened by {' or '.join(_OPENINGS)}, not by {op}")


class Communicator(ABC):
    """One party's end, in the shape that CrypTen's tensors call.

    Args:
        rank: of this party, from 0.
        size: how many parties there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise LocalProtocolError(f"rank lies in 0..{size - 1}, got {rank}")
        self._rank, self._size = rank, size

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._size

    @abstractmethod
    def scatter(
        self,
        scatter_list: Sequence[Tensor] | None,
        src: int,
        size: Any = None,
        device: Any = None,
    ) -> Tensor:
        """Give the k-th int64 tensor of party `src` to party k.

        All have the shape `size`, or that of this party's own `scatter_list` if it is None.
        """

    @abstractmethod
    def gather(self, tensor: Tensor, dst: int) -> list[Any]:
        """Return everybody's tensor at party `dst`, [None] elsewhere."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return everybody's tensor."""

    def all_reduce(self, tensors: Any, op: Any = ReduceOp.SUM, batched: bool = False) -> Any:
        """Open one tensor, or a list of them if `batched`, to all parties."""
        if batched:
            return [self.all_reduce(each, op) for each in tensors]
        return open_shares(self.all_gather(tensors), op)

    def reduce(self, *_args: object, **_options: object) -> NoReturn:
        """Refuse.

        Raises:
            LocalProtocolError: always; see the top of this file.
        """
        raise LocalProtocolError(
            "reveal(dst=) and get_plain_text(dst=) leave plaintext at other parties; gather the "
            "shares and put them together at the one party"
        )
