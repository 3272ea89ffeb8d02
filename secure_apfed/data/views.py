"""Which of a party's features are one view, and how a view of sequences lies among them.

Run by: each party on its own columns. A row of a table is flat; where it holds sequences, a view
begins with the number of steps in use, and its steps follow one after another, each with its
channels, zeros behind the last. So that both survive an encoding, the number of steps stays as it
is, and each channel is divided by the root of its mean square over the steps in use, not shifted.
Letters: N rows, F features, T steps, C channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from secure_apfed.data.cells import numbers_of
from secure_apfed.data.encoding import Column, ColumnEncoding, NumericColumn, fit_columns
from secure_apfed.data.frames import only_columns
from secure_apfed.errors import DataError
from secure_apfed.settings.data import Missing, RareCategories, ViewColumns

__all__ = ["View", "check_views", "fit_views", "locate_views"]


@dataclass(frozen=True)
class View:
    """Features `first` to `end` (exclusive) of a party.

    Attributes:
        sequence: (T, C) of a view of sequences; None: plain features.
    """

    first: int
    end: int
    sequence: tuple[int, int] | None = None

    @property
    def columns(self) -> slice:
        """Of a party's features (N, F), those of this view."""
        return slice(self.first, self.end)


def fit_views(
    frame: pd.DataFrame, views: Mapping[str, ViewColumns], *, categorical: Sequence[str] = (),
    missing: Missing = "error", rare: RareCategories | None = None, source: str,
) -> ColumnEncoding:  # fmt: skip
    """Return the encoding of all columns of the views, one after another; see `fit_columns`.

    Raises:
        DataError: as `fit_columns`.
    """
    columns: list[Column] = []
    for view in views.values():
        part = only_columns(frame, view.columns)
        if view.sequence is None:
            fitted = fit_columns(
                part, categorical=categorical, missing=missing, rare=rare, source=source
            )
            columns += fitted.columns
        else:
            columns += _fit_sequence(part, *view.sequence, source=source)
    return ColumnEncoding(columns=tuple(columns), missing=missing)


def _fit_sequence(frame: pd.DataFrame, steps: int, channels: int, *, source: str) -> list[Column]:
    numbers_NF = np.stack([numbers_of(frame[name], source=source) for name in frame], axis=1)
    used_N, steps_NTC = numbers_NF[:, 0], numbers_NF[:, 1:].reshape(-1, steps, channels)
    used_NT = np.arange(steps) < used_N[:, None]
    mean_C = np.nan_to_num(np.square(steps_NTC[used_NT])).sum(0) / max(1, used_NT.sum())
    scale_C = np.where(np.isfinite(mean_C) & (mean_C > 0), np.sqrt(mean_C), 1.0)
    first, *others = map(str, frame.columns)
    scales, constants = np.tile(scale_C, steps).tolist(), np.tile(mean_C == 0, steps).tolist()
    return [
        NumericColumn(name=first),
        *(
            NumericColumn(name=name, scale=scale, constant=constant)
            for name, scale, constant in zip(others, scales, constants, strict=True)
        ),
    ]


def locate_views(
    encoding: ColumnEncoding, views: Mapping[str, ViewColumns], *, source: str
) -> dict[str, View]:
    """Return where each view lies among the features that the encoding gives.

    Raises:
        DataError: the encoding is not of these columns in this order.
    """
    expected = [name for view in views.values() for name in view.columns]
    if [column.name for column in encoding.columns] != expected:
        raise DataError(
            f"{source}: its encoding is of other columns than its views {', '.join(views)}, or of "
            "the same in another order; fit it to a table with these views"
        )
    places, located = iter(encoding.places), {}
    for name, view in views.items():
        own = [next(places) for _ in view.columns]
        located[name] = View(own[0].start, own[-1].stop, view.sequence)
    return located


def check_views(features: Tensor, views: Mapping[str, View], *, party: str) -> None:
    """Refuse views that are not all of a party's features, one after another.

    Raises:
        DataError: names the party and the view.
    """
    if not views:
        return
    ends = [0, *(view.end for view in views.values())]
    follow = all(view.first == end for view, end in zip(views.values(), ends, strict=False))
    if features.dim() != 2 or not follow or ends[-1] != features.shape[1]:
        raise DataError(
            f"{party}: views {', '.join(views)} must follow one another over all its features "
            f"{tuple(features.shape[1:])}"
        )
    for name, view in views.items():
        if view.sequence is None:
            continue
        width, (most, channels) = view.end - view.first, view.sequence
        wrong, steps_N = "", features[:, view.first]
        if width != (expected := 1 + most * channels):
            wrong = f"{width} columns, expected {expected} for {view.sequence}"
        elif not bool(((steps_N >= 0) & (steps_N <= most) & (steps_N == steps_N.round())).all()):
            wrong = f"steps in use that are not whole numbers of 0 to {most}"
        if wrong:
            raise DataError(f"{party}: view {name!r} has {wrong}")
