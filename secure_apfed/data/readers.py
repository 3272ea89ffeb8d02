"""The built-in sets' formats: what a set is, a reader for each format, and what it returns.

A pool holds all people and all features. It exists only to be cut between parties for an
experiment; no party ever holds one. Scikit-learn is imported by the readers of its sets alone: it
takes about a second to load.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.files import DataFile, Download, find_file, read_checked
from secure_apfed.data.readers import parse_cifar, parse_idx
from secure_apfed.errors import DataError

__all__ = [
    "DataSet", "ImagePool", "Pool", "Reader", "TablePool", "check_labels", "file_content",
    "file_path", "read_breast_cancer", "read_cifar", "read_credit_card", "read_diabetes",
    "read_digits",
    "read_handwritten", "read_idx", "read_wine",
]  # fmt: skip


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

    def at(self, rows: NDArray[np.int64]) -> "ImagePool":
        """Return the same with these rows only, which ascend."""
        train = self.official_train
        kept = None if train is None else int((rows < train).sum())
        return replace(
            self, pixels=self.pixels[rows], labels=self.labels[rows], official_train=kept
        )


@dataclass(frozen=True, eq=False)
class TablePool:
    """Raw columns of N people and their labels (N,); `categorical` names columns to one-hot.

    Labels are float64 where the set's are numbers to predict.
    """

    frame: pd.DataFrame
    labels: NDArray[Any]
    categorical: tuple[str, ...] = ()
    official_train: int | None = None

    def at(self, rows: NDArray[np.int64]) -> "TablePool":
        """Return the same with these rows only, which ascend."""
        train = self.official_train
        kept = None if train is None else int((rows < train).sum())
        frame = self.frame.iloc[rows].reset_index(drop=True)
        return replace(self, frame=frame, labels=self.labels[rows], official_train=kept)


Pool: TypeAlias = ImagePool | TablePool


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One entry of `DATASETS`.

    Attributes:
        name: its key.
        title, source, licence, citation: for people.
        how: how it is had, in one sentence.
        classes: names in the order of the labels; empty where labels are numbers to predict.
        views: the number of parties with features unless the run says otherwise.
        read: (this entry, data folder or None) -> the pool.
        height: rows of an image; None for tables.
        natural_views: name -> columns, for tables.
        sequences: natural view -> (steps, channels), for those whose columns are a sequence: the
            number of steps in use, then step after step (`secure_apfed.data.encoding`).
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
    read: "Reader" = field(repr=False)
    shape: str
    height: int | None = None
    natural_views: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sequences: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    split: bool = False
    files: tuple[DataFile, ...] = ()
    subfolders: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()

    @property
    def numeric_labels(self) -> bool:
        """Whether labels are numbers to predict."""
        return not self.classes


Reader: TypeAlias = Callable[[DataSet, Path | None], Pool]


@cache
def _once(load: Callable[..., Any], *, as_frame: bool) -> Any:
    """What scikit-learn loads, parsed once: a study reads it for every run and its attacks."""
    return load(as_frame=as_frame)


def read_digits(dataset: DataSet, folder: Path | None) -> ImagePool:
    """Digits of scikit-learn: 1797 images of 8x8, values 0 to 16."""
    from sklearn.datasets import load_digits

    bunch = _once(load_digits, as_frame=False)
    pixels_NHW = bunch.images.astype(np.uint8)
    return ImagePool(pixels_NHW[:, None], bunch.target.astype(np.int64), maximum=16)


def read_breast_cancer(dataset: DataSet, folder: Path | None) -> TablePool:
    """Breast cancer (Wisconsin, diagnostic) of scikit-learn: 569 people, 30 columns."""
    from sklearn.datasets import load_breast_cancer

    bunch = _once(load_breast_cancer, as_frame=True)
    return TablePool(bunch.data.copy(), bunch.target.to_numpy(np.int64, copy=True))


def read_wine(dataset: DataSet, folder: Path | None) -> TablePool:
    """Wine recognition of scikit-learn: 178 wines of three growers, 13 columns."""
    from sklearn.datasets import load_wine

    bunch = _once(load_wine, as_frame=True)
    return TablePool(bunch.data.copy(), bunch.target.to_numpy(np.int64, copy=True))


def read_diabetes(dataset: DataSet, folder: Path | None) -> TablePool:
    """Diabetes of scikit-learn: 442 people, 10 columns, and how far the disease came in a year."""
    from sklearn.datasets import load_diabetes

    bunch = _once(load_diabetes, as_frame=True)
    return TablePool(bunch.data.copy(), bunch.target.to_numpy(np.float64, copy=True))


def read_idx(dataset: DataSet, folder: Path | None) -> ImagePool:
    """MNIST and Fashion-MNIST: `files` are train images, train labels, test images, test labels."""
    parts = [file_content(dataset, file, folder) for file in dataset.files]
    images = [
        parse_idx(content, dimensions=3, source=file.name)
        for content, file in zip(parts[::2], dataset.files[::2], strict=True)
    ]
    labels = [
        parse_idx(content, dimensions=1, source=file.name)
        for content, file in zip(parts[1::2], dataset.files[1::2], strict=True)
    ]
    for image, label, file in zip(images, labels, dataset.files[::2], strict=True):
        if len(image) != len(label):
            raise DataError(
                f"{file.name}: {len(image)} images, but {len(label)} labels beside them"
            )
        if image.shape[1] != dataset.height:
            raise DataError(
                f"{file.name}: images of {image.shape[1]} rows, {dataset.name}'s have "
                f"{dataset.height}"
            )
    labels_N = check_labels(dataset, np.concatenate(labels))
    return ImagePool(np.concatenate(images)[:, None], labels_N, 255, official_train=len(images[0]))


def read_cifar(dataset: DataSet, folder: Path | None) -> ImagePool:
    """CIFAR-10 and CIFAR-100, binary version: the last of `files` is the test split."""
    label_bytes = 1 if len(dataset.classes) == 10 else 2
    parts = [
        parse_cifar(
            file_content(dataset, file, folder),
            label_bytes=label_bytes,
            classes=len(dataset.classes),
            source=file.name,
        )
        for file in dataset.files
    ]
    pixels_NCHW = np.concatenate([pixels for pixels, _ in parts])
    labels_N = np.concatenate([labels for _, labels in parts])
    return ImagePool(pixels_NCHW, labels_N, 255, official_train=len(labels_N) - len(parts[-1][1]))


def read_handwritten(dataset: DataSet, folder: Path | None) -> TablePool:
    """UCI's multiple features: one CSV for each view, its label in the last column."""
    frames: list[pd.DataFrame] = []
    labels: list[NDArray[np.int64]] = []
    for file in dataset.files:
        frame = _frame(dataset, file, folder)
        view = file.name.removeprefix("mfeat-").removesuffix(".csv")
        labels.append(frame.iloc[:, -1].to_numpy(dtype=np.int64))
        frame = frame.iloc[:, :-1]
        frames.append(frame.set_axis([f"{view}-{at}" for at in range(frame.shape[1])], axis=1))
        if not np.array_equal(labels[0], labels[-1]):
            raise DataError(f"{file.name}: its labels differ from those of {dataset.files[0].name}")
    return TablePool(pd.concat(frames, axis=1), check_labels(dataset, labels[0]))


def read_credit_card(dataset: DataSet, folder: Path | None) -> TablePool:
    """UCI's default of credit card clients: an ID, 23 columns, and the label last."""
    frame = _frame(dataset, dataset.files[0], folder)
    labels_N = check_labels(dataset, frame.iloc[:, -1].to_numpy(dtype=np.int64))
    return TablePool(frame.iloc[:, 1:-1], labels_N, categorical=("SEX", "EDUCATION", "MARRIAGE"))


def file_content(dataset: DataSet, file: DataFile, folder: Path | None) -> bytes:
    """Return the uncompressed bytes of one file of a set, found, bounded and checked.

    Raises:
        DataError: it is nowhere, or not what the catalogue says; says how it is had.
    """
    path = file_path(dataset, file, folder)
    return read_checked(path, file, remedy=f"remove it and {_how_to_get(dataset)}")


def file_path(dataset: DataSet, file: DataFile, folder: Path | None) -> Path:
    """Return where one file of a set lies, compressed or not.

    Raises:
        DataError: it is nowhere; says how it is had.
    """
    return find_file(
        file, dataset=dataset.name, subfolders=dataset.subfolders, folder=folder,
        remedy=_how_to_get(dataset),
    )  # fmt: skip


def _how_to_get(dataset: DataSet) -> str:
    return f"run `secure-apfed data fetch {dataset.name}`" if dataset.downloads else dataset.how


def _frame(dataset: DataSet, file: DataFile, folder: Path | None) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(file_content(dataset, file, folder)))


def check_labels(dataset: DataSet, labels_N: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the labels (N,).

    Raises:
        DataError: one is outside the set's classes.
    """
    outside = np.flatnonzero((labels_N < 0) | (labels_N >= len(dataset.classes)))
    if outside.size:
        raise DataError(
            f"{dataset.name}: row {outside[0]} has label {labels_N[outside[0]]}, expected 0 to "
            f"{len(dataset.classes) - 1}; {outside.size} such rows"
        )
    return labels_N.astype(np.int64)
