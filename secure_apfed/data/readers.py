"""One reader for each format of the built-in sets: local files in, a pool out.

Scikit-learn is imported by the readers of its sets alone: it takes about a second to load.
"""

import io
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.cifar import parse_cifar
from secure_apfed.data.files import DataFile, find_file, read_checked
from secure_apfed.data.idx import parse_idx
from secure_apfed.data.pool import DataSet, ImagePool, TablePool
from secure_apfed.errors import DataError

__all__ = [
    "read_breast_cancer",
    "read_cifar",
    "read_credit_card",
    "read_digits",
    "read_handwritten",
    "read_idx",
]


def read_digits(dataset: DataSet, folder: Path | None) -> ImagePool:
    """Digits of scikit-learn: 1797 images of 8x8, values 0 to 16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels_NHW = bunch.images.astype(np.uint8)
    return ImagePool(pixels_NHW[:, None], bunch.target.astype(np.int64), maximum=16)


def read_breast_cancer(dataset: DataSet, folder: Path | None) -> TablePool:
    """Breast cancer (Wisconsin, diagnostic) of scikit-learn: 569 people, 30 columns."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer(as_frame=True)
    return TablePool(bunch.data, bunch.target.to_numpy(dtype=np.int64))


def read_idx(dataset: DataSet, folder: Path | None) -> ImagePool:
    """MNIST and Fashion-MNIST: `files` are train images, train labels, test images, test labels."""
    parts = [_content(dataset, file, folder) for file in dataset.files]
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
    labels_N = _labels(dataset, np.concatenate(labels))
    return ImagePool(np.concatenate(images)[:, None], labels_N, 255, official_train=len(images[0]))


def read_cifar(dataset: DataSet, folder: Path | None) -> ImagePool:
    """CIFAR-10 and CIFAR-100, binary version: the last of `files` is the test split."""
    label_bytes = 1 if len(dataset.classes) == 10 else 2
    parts = [
        parse_cifar(
            _content(dataset, file, folder),
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
    return TablePool(pd.concat(frames, axis=1), _labels(dataset, labels[0]))


def read_credit_card(dataset: DataSet, folder: Path | None) -> TablePool:
    """UCI's default of credit card clients: an ID, 23 columns, and the label last."""
    frame = _frame(dataset, dataset.files[0], folder)
    labels_N = _labels(dataset, frame.iloc[:, -1].to_numpy(dtype=np.int64))
    return TablePool(frame.iloc[:, 1:-1], labels_N, categorical=("SEX", "EDUCATION", "MARRIAGE"))


def _content(dataset: DataSet, file: DataFile, folder: Path | None) -> bytes:
    get = f"run `secure-apfed data fetch {dataset.name}`" if dataset.downloads else dataset.how
    path = find_file(
        file, dataset=dataset.name, subfolders=dataset.subfolders, folder=folder, remedy=get
    )
    return read_checked(path, file, remedy=f"remove it and {get}")


def _frame(dataset: DataSet, file: DataFile, folder: Path | None) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(_content(dataset, file, folder)))


def _labels(dataset: DataSet, labels_N: NDArray[np.integer]) -> NDArray[np.int64]:
    outside = np.flatnonzero((labels_N < 0) | (labels_N >= len(dataset.classes)))
    if outside.size:
        raise DataError(
            f"{dataset.name}: row {outside[0]} has label {labels_N[outside[0]]}, expected 0 to "
            f"{len(dataset.classes) - 1}; {outside.size} such rows"
        )
    return labels_N.astype(np.int64)
