"""How one party turns raw images into features: its strip of rows, scaled to [0, 1].

Run by: that party alone, in training and later in prediction. Letters: N rows, C channels,
H height and W width in pixels, S rows of the strip.
"""

import math
from typing import Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from secure_apfed.data.cells import numbers_of
from secure_apfed.errors import DataError
from secure_apfed.settings import Settings

__all__ = ["ImageEncoding"]


class ImageEncoding(Settings):
    """Rows `first_row` to `end_row` (exclusive) of images of C x H x W, divided by `maximum`.

    No normalisation beyond [0, 1]. `encode` takes whole images or images that are cut
    already, as (N, C, H, W), as (N, H, W) for one channel, or flat as (N, C * H * W); a
    frame is read as one flat image a row, column after column.
    """

    kind: Literal["image"] = "image"
    channels: int = Field(ge=1)
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    maximum: int = Field(255, ge=1)
    first_row: int = Field(0, ge=0)
    end_row: int = Field(ge=1)

    @model_validator(mode="after")
    def _strip_is_inside(self) -> Self:
        if not self.first_row < self.end_row <= self.height:
            raise ValueError(
                f"the strip of rows {self.first_row} to {self.end_row} is not inside 0 to "
                f"{self.height}"
            )
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, S, W) of one row's features."""
        return (self.channels, self.end_row - self.first_row, self.width)

    @property
    def layout(self) -> tuple[int, ...]:
        """What each feature is: its place in a strip of this shape."""
        return self.shape

    def feature_name(self, index: int) -> str:
        """Return the name of a position in the flattened features."""
        channel, row, column = np.unravel_index(index, self.shape)
        return f"channel {channel}, row {row + self.first_row}, column {column}"

    def encode(
        self, raw: pd.DataFrame | NDArray[np.generic], *, source: str = "the input"
    ) -> torch.Tensor:
        """Return float32 features (N, C, S, W) of raw images with values 0 to `maximum`.

        Raises:
            DataError: another size, values out of range or not numbers, or values that
                were scaled to [0, 1] already.
        """
        values = self._numbers(raw, source)
        strip_NCSW = self._strip(values, source)
        self._check_range(strip_NCSW, source)
        scaled_NCSW = strip_NCSW.astype(np.float32)
        scaled_NCSW /= self.maximum
        return torch.from_numpy(scaled_NCSW)

    def _numbers(self, raw: pd.DataFrame | NDArray[np.generic], source: str) -> NDArray[np.generic]:
        if isinstance(raw, pd.DataFrame):
            columns = [numbers_of(raw[name], source=source) for name in raw.columns]
            return np.stack(columns, axis=1) if columns else np.empty((len(raw), 0))
        if not (np.issubdtype(raw.dtype, np.integer) or np.issubdtype(raw.dtype, np.floating)):
            raise DataError(f"{source}: images hold whole numbers or floats, got {raw.dtype}")
        return raw

    def _strip(self, values: NDArray[np.generic], source: str) -> NDArray[np.generic]:
        whole, cut = (self.channels, self.height, self.width), self.shape
        for size in (cut, whole):
            flat = values.ndim == 2 and values.shape[1] == math.prod(size)
            grey = values.ndim == 3 and self.channels == 1 and values.shape[1:] == size[1:]
            if flat or grey or values.shape[1:] == size:
                images_NCHW = values.reshape(len(values), *size)
                rows = slice(None) if size == cut else slice(self.first_row, self.end_row)
                return images_NCHW[:, :, rows]
        raise DataError(
            f"{source}: expected images of {_times(whole)} (channels x height x width), or strips "
            "of "
            f"{_times(cut)}, as arrays or flat ({math.prod(whole)} or {math.prod(cut)} columns); "
            f"got {_times(values.shape[1:]) or 'single numbers'}"
        )

    def _check_range(self, pixels: NDArray[np.generic], source: str) -> None:
        if not pixels.size:
            return
        if np.issubdtype(pixels.dtype, np.floating):
            bad = int(np.count_nonzero(~np.isfinite(pixels.astype(np.float64))))
            if bad:
                raise DataError(f"{source}: {bad} pixels are NaN or infinite; mend them first")
        numbers = pixels.astype(np.float64) if pixels.dtype != np.uint8 else pixels
        low, high = float(numbers.min()), float(numbers.max())
        if low < 0 or high > self.maximum:
            raise DataError(
                f"{source}: pixels run from {low:g} to {high:g}, expected 0 to {self.maximum}"
            )
        if self.maximum > 1 and high <= 1 and bool((numbers != np.rint(numbers)).any()):
            raise DataError(
                f"{source}: pixels run from {low:g} to {high:g} and look scaled to [0, 1] already; "
                f"give the raw values 0 to {self.maximum}"
            )


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
