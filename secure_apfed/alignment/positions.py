"""Alignment positions: indices into the parties' common list of people, and a party's table rows.

Letters: U alignment positions, N rows.
"""

import torch
from torch import Tensor

__all__ = ["find_positions", "find_positions_in_table_order"]


def find_positions_in_table_order(aligned: Tensor, rows: Tensor) -> Tensor:
    """Return the alignment positions of a party's rows, in the order of its table.

    Rows that are not aligned are left out. The table's order makes later random draws reproducible:
    the alignment's order is random in each run, and does not depend on the seed.

    `aligned`: the row of the party's table at each of the U positions. `rows`: rows of its table.
    """
    order = aligned.argsort()
    return order[torch.isin(aligned[order], rows)]


def find_positions(aligned: Tensor, rows: Tensor) -> Tensor:
    """Return the alignment position of each of a party's rows, in the order of `rows`.

    `aligned`: the row of the party's table at each of the U positions. `rows`: rows of its table,
    all of them aligned.
    """
    last_row = max(aligned.tolist(), default=-1)
    position_N = torch.full((last_row + 1,), -1, dtype=torch.int64)
    position_N[aligned] = torch.arange(len(aligned))
    return position_N[rows]
