"""Labels that are numbers to predict: read from texts, and standardised for training.

Run by: the active on its own label column. Mean and scale are of the labelled training rows alone,
and tell of their labels; they lie in the active's model card, so that predictions come in the unit.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from secure_apfed.errors import DataError

__all__ = ["UNLABELLED", "TargetScale", "read_numbers"]

UNLABELLED = -100
"""In place of a label that is not known, or that training may not know."""

# of what Python reads as a number, no digits of other scripts and no underscores
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_FARTHEST = 99.0  # deviations; UNLABELLED is no target


class TargetScale(BaseModel):
    """What was subtracted from targets, and what they were divided by; both in their unit."""

    model_config = ConfigDict(frozen=True)

    mean: float = Field(allow_inf_nan=False)
    scale: float = Field(gt=0, allow_inf_nan=False)

    @classmethod
    def of(cls, targets_n: NDArray[Any], *, party: str) -> Self:
        """Mean and standard deviation of the labelled training rows.

        Raises:
            DataError: all of them are alike, so there is nothing to learn.
        """
        mean, scale = float(np.mean(targets_n)), float(np.std(targets_n))
        if not (math.isfinite(scale) and scale > 1e-12 * abs(mean)):
            raise DataError(
                f"{party}: the labels of its {len(targets_n)} labelled training rows are all "
                f"{mean:g}, or too large to tell apart, so there is nothing to learn; take rows "
                "with other labels"
            )
        return cls(mean=mean, scale=scale)

    def encode(self, targets_N: NDArray[Any], *, party: str) -> Tensor:
        """Standardise, float32 (N,); NaN, where there is no target, becomes `UNLABELLED`.

        Raises:
            DataError: a target lies too far off.
        """
        z_N = (targets_N - self.mean) / self.scale
        far = np.flatnonzero(np.abs(z_N) > _FARTHEST)
        if far.size:
            raise DataError(
                f"{party}: the label of row {far[0]} (from 0), {targets_N[far[0]]:g}, lies "
                f"{abs(z_N[far[0]]):.0f} standard deviations from the mean of the labelled "
                f"training rows; at most {_FARTHEST:g} are taken: mend it, or predict its logarithm"
            )
        return torch.from_numpy(np.where(np.isnan(z_N), UNLABELLED, z_N).astype(np.float32))

    def decode(self, z_B: Tensor) -> Tensor:
        """Back in the unit, float64."""
        return z_B.double() * self.scale + self.mean


def read_numbers(texts: Sequence[str | None], *, party: str, column: str) -> NDArray[np.float64]:
    """Labels as numbers (N,); NaN where the cell is empty.

    Raises:
        DataError: a cell is no finite number; names the first.
    """
    found = np.full(len(texts), np.nan)
    for row, text in enumerate(texts):
        if text is None:
            continue
        found[row] = float(text) if _NUMBER.fullmatch(text) else math.inf
        if not math.isfinite(found[row]):
            raise DataError(
                f"{party}: column {column!r} holds numbers to predict, and row {row} (from 0) has "
                f"{text!r:.40}; mend it, empty the cell, or leave task: regression out if these "
                "are classes"
            )
    return found
