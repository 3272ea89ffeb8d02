"""Rows of which an adversary read something: one vector each, by alignment position.

Letters: N observed rows, D numbers of each, B batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Observed", "every_position", "latest_of"]


@dataclass(frozen=True, eq=False)
class Observed:
    """One vector for each of N rows.

    Attributes:
        positions: (N,) int64 alignment positions, ascending, each once.
        z: (N, D) what was released, returned or opened of them; maps are flattened.
    """

    positions: Tensor
    z: Tensor

    def at(self, positions: Tensor) -> Tensor:
        """Return (len(positions), D) of positions that were all observed."""
        return self.z[torch.searchsorted(self.positions, positions)]


def every_position(rows: Iterable[Tensor]) -> Tensor:
    """Every position once, ascending."""
    positions: Tensor = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).unique()
    return positions


def latest_of(batches: Sequence[tuple[Tensor, Tensor]]) -> Observed:
    """Of batches of rows (B,) and vectors (B, D), at least one, the last vector of each row."""
    rows = torch.cat([rows for rows, _ in batches])
    z_ND = torch.cat([z_BD for _, z_BD in batches])
    # np.unique returns the first occurrence, so the order is reversed to keep the last.
    positions, first = np.unique(rows.flip(0).numpy(), return_index=True)
    return Observed(torch.from_numpy(positions), z_ND.flip(0)[torch.from_numpy(first)])
