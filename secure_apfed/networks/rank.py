"""Counting distinct columns, and describing what a sum of linear functions of them reveals.

A sum of D numbers a person that is linear in the passives' columns is a system of D equations in
as many unknowns as these columns have rank. Known people give its coefficients. If D is at least
that rank it has one solution: least squares reads every column of everybody else.

Run by: the party with the columns; it alone knows their rank. Letters: N rows, F columns.
"""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secure_apfed.errors import NarrowTableWarning

if TYPE_CHECKING:
    from secure_apfed.settings import RunSettings

_MAX_ROWS = 4096
"""Largest number of rows that are read, evenly spread; a part of the rows never has a higher rank.
"""
_MIN_SCALE = 1e-6
"""Smallest standard deviation of a column that counts as varying."""
_MIN_VARIANCE = 1e-4
"""Smallest variance that counts, as a share of the largest direction's; below it a direction is
taken for a copy of other columns."""


def count_columns(rows_NF: Tensor) -> int:
    """Return the number of distinct columns: the numerical rank of the standardised columns.

    Constant columns, copies and sums of other columns do not count. A direction whose standard
    deviation is below 1 % of the largest one's does not count, either.

    `rows_NF`: F columns of N rows.
    """
    row_stride = max(1, math.ceil(len(rows_NF) / _MAX_ROWS))
    rows_NF = rows_NF[::row_stride].flatten(1).detach().to("cpu", torch.float64)
    if not rows_NF.numel():
        return 0
    scale_F = rows_NF.std(0, correction=0)
    is_varying_F = scale_F > _MIN_SCALE
    standardised_NF = (rows_NF - rows_NF.mean(0))[:, is_varying_F] / scale_F[is_varying_F]
    if not standardised_NF.numel():
        return 0
    # Both products have the same positive eigenvalues; the smaller one is decomposed.
    gram_matrix = (
        standardised_NF.T @ standardised_NF
        if standardised_NF.shape[1] <= len(standardised_NF)
        else standardised_NF @ standardised_NF.T
    )
    variances = torch.linalg.eigvalsh(gram_matrix)
    return int((variances > variances[-1] * _MIN_VARIANCE).sum())


def compute_number_limit(columns: int) -> int:
    """Return how many numbers per person a party may contribute: half of its distinct columns."""
    return columns // 2


def warn_if_narrow(party: str, distinct_columns: int, numbers_per_person: int) -> None:
    """Warn (NarrowTableWarning) a passive whose gradients are large for its number of columns.

    They are if they have more numbers per person than half of its distinct columns. A gradient of
    APFed's losses is not linear in the columns, but the average of a person's sums nearly is
    (docs/public-codes.md has what was reconstructed).

    Args:
        party: name of the passive.
        distinct_columns: number of distinct columns of its table; see `count_columns`.
        numbers_per_person: number of values about one person that it contributes in a step.
    """
    max_numbers = compute_number_limit(distinct_columns)
    if numbers_per_person <= max_numbers:
        return
    advice = f"model.projection of {max_numbers:,} or less, or on secure_sum.noise"
    if not max_numbers:
        advice = "secure_sum.noise, or take no part"
    warnings.warn(
        f"{party}: its gradients have {numbers_per_person:,} numbers of a person, and its table "
        f"has {distinct_columns:,} column{'' if distinct_columns == 1 else 's'} that differ: the "
        f"active can learn most of them from the sums. Agree on {advice}",
        NarrowTableWarning,
        stacklevel=2,
    )


def describe_rank(numbers_per_person: float, distinct_columns: int | None) -> str:
    """Return in words how much of the passives' columns decoded sums can reveal.

    Args:
        numbers_per_person: how many numbers about one person a run decodes, each linear in the
            columns.
        distinct_columns: number of distinct columns of all contributing parties; None: each party
            knows only its own.
    """
    text = f"{numbers_per_person:,.0f} number{'' if numbers_per_person == 1 else 's'} of "
    if distinct_columns is None:
        return f"{text}columns that each party alone has counted"
    text += f"{distinct_columns:,} column{'' if distinct_columns == 1 else 's'}"
    if numbers_per_person >= distinct_columns:
        return f"{text}: everything can be read"
    share = numbers_per_person / distinct_columns
    return f"{text}: at most {share:.0%} of what unrelated columns hold can be read"


def describe_opened_numbers(
    config: "RunSettings",
    classes: int,
    columns_by_party: Sequence[int] | None,
    *,
    agreed_numbers: int | None = None,
) -> str | None:
    """Return in words what the sums that the active decodes reveal about the passives' columns.

    Args:
        config: the run's settings.
        classes: number of classes.
        columns_by_party: number of distinct columns of each contributing party; None: unknown here.
        agreed_numbers: how many numbers per person are decoded, if the parties agreed on that;
            None: as configured.

    Returns None if nothing linear in the columns is decoded, or the method does not count it.
    """
    configured_numbers = config.method.bound_linear_combinations(config, classes)
    if not 0 < configured_numbers < math.inf:
        return None
    decoded_numbers = configured_numbers if agreed_numbers is None else agreed_numbers
    return describe_rank(decoded_numbers, sum(columns_by_party) if columns_by_party else None)
