"""What a built-in data set is, and what its reader returns: all people, all features.

A pool exists only to be cut between parties for an experiment; no party ever holds one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.files import DataFile

__all__ = ["DataSet", "Download", "ImagePool", "Pool", "TablePool"]


@dataclass(frozen=True, eq=False)
class ImagePool:
    """Images (N, channels, height, width) of 0..maximum and their labels (N,).

    Attributes:
        official_train: the number of leading rows that are the official training split;
            None where the set has no split.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    maximum: int
    official_train: int | None = None


@dataclass(frozen=True, eq=False)
class TablePool:
    """Raw columns of N people and their labels (N,); `categorical` names columns to one-hot."""

    frame: pd.DataFrame
    labels: NDArray[np.int64]
    categorical: tuple[str, ...] = ()
    official_train: int | None = None


Pool: TypeAlias = ImagePool | TablePool


@dataclass(frozen=True)
class Download:
    """One file to fetch.

    Attributes:
        file: a gzip file, named and hashed as its uncompressed content; or, where there
            are members, a .tar.gz archive, named and hashed as it is.
        addresses: where it is, tried in order.
        members: the files to take out of an archive; nothing else is written.
    """

    file: DataFile
    addresses: tuple[str, ...]
    members: tuple[DataFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One entry of `DATASETS`.

    Attributes:
        name: its key.
        title, source, licence, citation: for people.
        how: how it is had, in one sentence.
        classes: names in the order of the labels.
        views: the number of parties with features unless the run says otherwise.
        read: (this entry, data folder or None) -> the pool.
        height: rows of an image; None for tables.
        natural_views: name -> columns, for tables.
        split: whether the set has an official test split.
        files: what its reader looks for.
        subfolders: names of folders in which the files usually lie.
        downloads: what `fetch` gets; empty where nothing can or need be fetched.
    """

    name: str
    title: str
    source: str
    licence: str
    citation: str
    how: str
    classes: tuple[str, ...]
    views: int
    read: Callable[["DataSet", Path | None], Pool] = field(repr=False)
    shape: str
    height: int | None = None
    natural_views: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split: bool = False
    files: tuple[DataFile, ...] = ()
    subfolders: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
