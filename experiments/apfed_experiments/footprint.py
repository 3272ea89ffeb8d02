"""What APC-VFL, SplitNN and VFedTrans send, by the formulas of APC-VFL's Appendix E.

Run by: whoever compares methods by bytes. Numbers weigh 4 bytes there (float32), nothing frames or
seals them, and requests are not counted. Its own figures of APC-VFL (Table 2: 9.73 MB for 10,000
aligned rows, of which 500 test) are Eq. (6) at MB of 10^6. Where a formula is not legible in the
text, it is written from the exchanges that the appendix lists; `secure-apfed bench
footprint` puts what this library sends beside it.
"""

from collections.abc import Sequence

__all__ = [
    "apc_vfl_bytes",
    "split_nn_backward_bytes",
    "split_nn_bytes",
    "split_nn_forward_bytes",
    "vfedtrans_bytes",
]

_NUMBER = 4


def apc_vfl_bytes(rows: int, *, numbers: int = 256) -> int:
    """Eq. (6): one passive's codes of the aligned rows, once.

    Args:
        rows: N, aligned.
        numbers: of a code (Table 3).

    Example:
        >>> apc_vfl_bytes(9500) / 1e6
        9.728
    """
    return _NUMBER * rows * numbers


def split_nn_forward_bytes(rows: int, *, epochs: int, numbers: int = 256) -> int:
    """Eq. (7): the same in each epoch."""
    return epochs * apc_vfl_bytes(rows, numbers=numbers)


def split_nn_backward_bytes(
    rows: int, *, epochs: int, batch_size: int, inputs: int = 128, numbers: int = 256
) -> int:
    """Eq. (8): for each batch as many numbers as the last layer of the passive's encoder has.

    That is the gradient of weights. What the passive needs, and this library's active sends, is the
    gradient on the batch's representations: `batch_size * numbers` instead of `(inputs + 1) *
    numbers`, which is as much at 129 rows a batch and a sixteenth at 8.

    Args:
        rows: N, aligned.
        epochs: trained.
        batch_size: rows of a batch.
        inputs: of that layer.
        numbers: its outputs (Table 3).
    """
    batches = epochs * -(-rows // batch_size)
    return _NUMBER * batches * (inputs + 1) * numbers


def split_nn_bytes(
    rows: int, *, epochs: int, batch_size: int, inputs: int = 128, numbers: int = 256
) -> int:
    """Eq. (9): the sum of (7) and (8)."""
    back = split_nn_backward_bytes(
        rows, epochs=epochs, batch_size=batch_size, inputs=inputs, numbers=numbers
    )
    return split_nn_forward_bytes(rows, epochs=epochs, numbers=numbers) + back


def vfedtrans_bytes(rows: int, features: Sequence[int]) -> int:
    """Eq. (10): FedSVD's five exchanges, with the mask of rows as a matrix.

    The key generator sends P (N x N) and Q_i (F_i x F) to each party, each party P X_i Q_i (N x F)
    to the server, the server U' to the active, here N x min(N, F) as in VFedTrans' release.

    Args:
        rows: N, aligned.
        features: F_i of each party, the active's first; two in the paper.
    """
    parties, total = len(features), sum(features)
    masks = parties * rows * rows + total * total
    return _NUMBER * (masks + parties * rows * total + rows * min(rows, total))
