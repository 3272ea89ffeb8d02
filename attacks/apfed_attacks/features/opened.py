"""The sums of gradients that an active opened, as attacks of its own read them.

Letters: N rows, B rows of a batch, D numbers of a representation.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from apfed_attacks.view import AdversaryView, Observed, iter_batches

_MIN_BATCH = 2


def explain_missing_gradient_sums(view: AdversaryView) -> str | None:
    """Return why the active receives no sum of gradients; None: it does."""
    if view.description.opens != "gradients":
        return f"{view.description}: the active receives no sum of gradients"
    return None


def explain_missing_sums(view: AdversaryView) -> str | None:
    """Return why the recording holds no revealed sum; None: it holds some."""
    if any(list_opened_batches(view, epoch) for epoch in view.epochs):
        return None
    return (
        "the recording holds no sum as the active decoded it; set transcript.keep to "
        "first_and_last or all"
    )


def list_opened_batches(view: AdversaryView, epoch: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return the steps of an epoch whose sum was decrypted, with two rows or more.

    Each is (step, rows (B,), representations that were sent (B, D)).
    """
    return [
        (step, rows_B, h_BD)
        for step, rows_B, h_BD in iter_batches(view, epoch)
        if step in view.revealed and len(rows_B) >= _MIN_BATCH
    ]


def average_rows(parts: Iterable[tuple[Tensor, Tensor]]) -> Observed | None:
    """Return the mean of each row's values over all batches; None: no batch has a row.

    `parts`: batches, each with alignment positions (B,) and their values (B, D).
    """
    pairs = [(rows_B, values_BD) for rows_B, values_BD in parts if len(rows_B)]
    if not pairs:
        return None
    all_rows = torch.cat([rows_B for rows_B, _ in pairs])
    # For each of the A rows of all batches, its index among the N distinct positions.
    positions, index_A, count_N = all_rows.unique(return_inverse=True, return_counts=True)
    _, first_BD = pairs[0]
    total_ND = first_BD.new_zeros(len(positions), first_BD.shape[1])
    sizes = [len(rows_B) for rows_B, _ in pairs]
    for index_B, (_, values_BD) in zip(index_A.split(sizes), pairs, strict=True):
        total_ND.index_add_(0, index_B.to(total_ND.device), values_BD)
    return Observed(positions, total_ND / count_N[:, None].to(total_ND.device))
