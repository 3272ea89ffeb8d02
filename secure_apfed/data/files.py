"""Built-in data sets: their files are found in local folders or downloaded, verified, and read.

Run by: code that loads or downloads a built-in set. Checksums are of the UNCOMPRESSED bytes,
because distributors recompress (Debian strips gzip headers, mirrors choose levels). Only these
checksums are trusted: servers and mirrors may send anything. A download is written to its path only
when it is complete and correct.

A pool is a whole data set: all people and all features. It exists only to be cut between parties
for an experiment; no party ever holds one. Only the readers of Scikit-learn's sets import
Scikit-learn, which takes about a second to load. Nothing in a file is trusted: magic number, sizes
and length must fit each other exactly.

Sources: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File
formats" (IDX: big-endian sizes, then unsigned bytes); A. Krizhevsky, "The CIFAR-10 dataset",
section "Binary version". The Python version of CIFAR is a pickle and is never read.
"""

import gzip
import hashlib
import io
import math
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from secure_apfed.base.files import write_atomically
from secure_apfed.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_FOLDERS_VARIABLE = "SECURE_APFED_DATA"
Progress = Callable[[str, int, int | None], None]
"""A function that is called with a file's name, the bytes received so far, and all bytes; None: the
server does not say how many there are."""
_TIMEOUT_SECONDS = 30.0
_CHUNK = 2**16
_KEPT_NOTHING = "it sends other bytes, of which none were kept"

_SHIPPED = Path(__file__).parent
"""The folder of data sets that ship with this package, each in a folder of its name."""


@dataclass(frozen=True)
class DataFile:
    """A file of a data set; it may lie on disk as `name` or compressed as `name.gz`.

    Attributes:
        name: its official name.
        size: number of uncompressed bytes; never more are decompressed.
        sha256: hex digest of the uncompressed bytes; "": only the size is checked, as of a file
            inside an archive that has a digest.
        exact: False for files that differ from user to user: `size` is then only the largest
            allowed number of bytes, and the digest is not checked.
    """

    name: str
    size: int
    sha256: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Download:
    """A file to download: one gzip file, or a .tar.gz archive of several files.

    Attributes:
        file: size and digest of a gzip file's uncompressed content, or of the archive as it is.
        addresses: URLs, tried in this order.
        members: files of the archive, which are stored in its place; empty for a gzip file.
    """

    file: DataFile
    addresses: tuple[str, ...]
    members: tuple[DataFile, ...] = ()


def default_folder() -> Path:
    """Return the folder of downloads by default, which is the first of all default folders."""
    return list_data_folders(None)[0]


def list_data_folders(folder: Path | None) -> tuple[Path, ...]:
    """Return the folders to search for data sets.

    It is `folder` alone if one is given. Otherwise it is the folders in the environment variable
    SECURE_APFED_DATA, or without it the user's cache.
    """
    if folder is not None:
        return (folder.expanduser(),)
    names = os.environ.get(_FOLDERS_VARIABLE, "").split(os.pathsep)
    folders = [Path(name) for name in names if name] or [Path("~/.cache/secure-apfed")]
    return tuple(path.expanduser() for path in folders)


def load_file(path: Path, *, maximum: int | None = None) -> bytes:
    """Return a file's bytes, decompressed if its name ends in .gz.

    `maximum`: bytes beyond which nothing is read or decompressed; None: no limit, for the user's
    own files.

    Raises DataError: the file cannot be read, is damaged, or is longer than `maximum`.
    """
    try:
        with path.open("rb") as file:
            return _decompress_file(file, path, maximum=maximum, packed=path.suffix == ".gz")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _decompress_file(file: BinaryIO, source: object, *, maximum: int | None, packed: bool) -> bytes:
    """Return the uncompressed content of an open file.

    Args:
        file: the open file.
        source: path or address of the file, for errors.
        maximum: largest allowed number of uncompressed bytes; None: no limit.
        packed: whether the file is gzip-compressed.

    Raises DataError: the gzip file is damaged, or the content is longer than `maximum`.
    """
    stream = gzip.GzipFile(fileobj=file) if packed else file
    # One byte more than allowed shows that the content is too long, without reading all of it.
    limit = -1 if maximum is None else maximum + 1
    try:
        content: bytes = stream.read(limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{source}: truncated or damaged gzip file ({error}); get it again"
        ) from error
    if maximum is not None and len(content) > maximum:
        raise DataError(
            f"{source}: more than the {maximum} uncompressed bytes expected; it is another file"
        )
    return content


def check_digest(content: bytes, file: DataFile, *, path: Path | str, remedy: str) -> None:
    """Raise DataError if a file has another size or SHA-256 than the catalogue says.

    A file that is not `exact` is not checked.

    Args:
        content: the file's uncompressed bytes.
        file: the file's entry in the catalogue.
        path: name of the file in the error.
        remedy: advice of the error.
    """
    if not file.exact:
        return
    if len(content) != file.size:
        raise DataError(
            f"{path}: {len(content)} uncompressed bytes, expected {file.size}; it is truncated or "
            f"another set's file: {remedy}"
        )
    digest = hashlib.sha256(content).hexdigest() if file.sha256 else ""
    if digest != file.sha256:
        raise DataError(
            f"{path}: the SHA-256 of its uncompressed bytes is {digest}, expected {file.sha256}; "
            f"it is damaged or another set's file: {remedy}"
        )


def load_checked_file(path: Path, file: DataFile, *, remedy: str) -> bytes:
    """Return the uncompressed bytes of a file, after a check of its size and SHA-256.

    `file`: its entry in the catalogue. `remedy`: advice of the error.

    Raises DataError: the file is missing, or has other bytes than the catalogue says.
    """
    try:
        content = load_file(path, maximum=file.size)
    except DataError as error:
        raise DataError(f"{error}: {remedy}") from error
    check_digest(content, file, path=path, remedy=remedy)
    return content


def fetch_file(
    download: Download, folder: Path, *, dataset: str, progress: Progress | None = None
) -> list[Path]:
    """Download one file, or the members of one archive, into `folder`; return their paths.

    Nothing is downloaded if correct files are there. A file that is no archive is stored as it is
    sent, gzip-compressed. Addresses are tried in order until one sends the right bytes.

    Args:
        download: the file and its addresses.
        folder: where files are written.
        dataset: the data set's name, for errors.
        progress: called with (file, bytes so far, bytes in all); None: not called.

    Raises DataError: no address sends the right bytes, or the folder cannot be written.
    """
    file = download.file
    members = {folder / member.name: member for member in download.members}
    gzip_path = folder / f"{file.name}.gz"
    targets = members or {gzip_path: file}
    if all(_is_correct(path, wanted) for path, wanted in targets.items()):
        return list(targets)
    failures: list[str] = []
    for address in download.addresses:
        try:
            content = _download_file(address, file, progress)
            plain = _decompress_file(
                io.BytesIO(content), address, maximum=file.size, packed=not members
            )
            check_digest(plain, file, path=address, remedy=_KEPT_NOTHING)
            if members:
                contents = _extract_members(content, members, address)
            else:
                contents = {gzip_path: content}
        except DataError as error:
            failures.append(str(error))
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, content in contents.items():
                write_atomically(path, content)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot write ({error.strerror}); free space or choose another folder"
            ) from error
        return list(targets)
    raise DataError(
        f"{dataset}: could not fetch {file.name}: {'; '.join(failures)}. Run it again, or put the "
        f"file into {folder} by hand"
    )


def _is_correct(path: Path, file: DataFile) -> bool:
    """Return whether this file exists and has the catalogue's size and digest."""
    try:
        # The content is not needed here, only the error for a wrong file. Nobody reads its advice.
        load_checked_file(path, file, remedy="")
    except DataError:
        return False
    return True


def _download_file(address: str, file: DataFile, progress: Progress | None) -> bytes:
    """Return the bytes that an address sends.

    Args:
        address: a URL of the catalogue.
        file: the expected file, which limits the number of bytes.
        progress: called with (file, bytes so far, bytes in all); None: not called.

    Raises DataError: the download fails or is cut off, or too many bytes come.
    """
    # Incompressible content grows a little under gzip: at most by 1 % and 4 KiB.
    max_bytes = file.size + file.size // 100 + 2**12
    content = bytearray()
    request = Request(address, headers={"Accept-Encoding": "identity"})  # noqa: S310  # catalogue
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310  # as above
            total = answer.length
            while chunk := answer.read(_CHUNK):
                content += chunk
                if len(content) > max_bytes:
                    raise DataError(
                        f"{address} sends more than the {max_bytes} bytes that the file may have"
                    )
                if progress is not None:
                    progress(file.name, len(content), total)
    except HTTPError as error:
        raise DataError(f"{address} answers {error.code}") from error
    except (OSError, HTTPException) as error:
        raise DataError(f"{address} was interrupted ({error})") from error
    if total is not None and len(content) < total:
        raise DataError(f"{address} was interrupted ({len(content)} of {total} bytes came)")
    return bytes(content)


def _extract_members(
    archive: bytes, targets: dict[Path, DataFile], address: str
) -> dict[Path, bytes]:
    """Return the checked content of the wanted members of an archive, by target path.

    Members are found by file name; directories in the archive's paths are ignored, so that no
    path leads out of the target folder.

    Args:
        archive: the bytes of a .tar.gz file.
        targets: the wanted members by the path where each will be written.
        address: address of the archive, for errors.

    Raises DataError: a member is missing, or has other bytes than the catalogue says.
    """
    wanted = {path.name: path for path in targets}
    contents = dict[Path, bytes]()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
            name = Path(entry.name).name
            stream = tar.extractfile(entry) if entry.isfile() and name in wanted else None
            if stream is not None:
                path = wanted.pop(name)
                contents[path] = stream.read()
                check_digest(contents[path], targets[path], path=name, remedy=_KEPT_NOTHING)
    if wanted:
        raise DataError(f"{address}: lacks {', '.join(wanted)}; {_KEPT_NOTHING}")
    return contents


_IDX_MAGIC = b"\x00\x00\x08"  # two zero bytes, and the code of unsigned bytes
# A CIFAR image: its red, green and blue planes of 32 x 32 pixels, row by row.
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_PIXELS = math.prod(_CIFAR_SHAPE)


@dataclass(frozen=True, eq=False)
class ImagePool:
    """A whole data set of N images and their labels, before it is cut between parties.

    Attributes:
        pixels: (N, channels, height, width), values 0 to `maximum`.
        labels: class of each image, (N,).
        maximum: the largest value of a pixel.
        official_train: number of leading rows that form the official training split; the other rows
            are the official test split. None: the set has no official split.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    maximum: int
    official_train: int | None = None

    def select_rows(self, rows: NDArray[np.int64]) -> "ImagePool":
        """Return the pool of the rows at these positions, which must ascend.

        Training rows of the official split stay training rows.
        """
        train_rows = self.official_train
        if train_rows is not None:
            train_rows = int((rows < train_rows).sum())
        return ImagePool(self.pixels[rows], self.labels[rows], self.maximum, train_rows)


@dataclass(frozen=True, eq=False)
class TablePool:
    """A whole data set of N people as a table, before it is cut between parties.

    Attributes:
        frame: raw columns.
        labels: int64 class of each person, (N,); float64 if labels are numbers to predict.
        categorical: names of the columns that are one-hot encoded.
    """

    frame: "pd.DataFrame"
    labels: NDArray[Any]
    categorical: tuple[str, ...] = ()

    def select_rows(self, rows: NDArray[np.int64]) -> "TablePool":
        """Return the pool of the people at these positions."""
        frame = self.frame.iloc[rows].reset_index(drop=True)
        return replace(self, frame=frame, labels=self.labels[rows])


Pool: TypeAlias = ImagePool | TablePool


def make_column_names(name: str, count: int) -> tuple[str, ...]:
    """Return `count` names for columns that have none: "name-0", "name-1", ..."""
    return tuple(f"{name}-{index}" for index in range(count))


MADE_HERE: Mapping[str, Any] = {
    "files": (),
    "source": "this library",
    "licence": "Apache-2.0",
    "citation": "none",
    "how": "synthetic: made by this library from a fixed seed",
}
"""Fields of `DataSet` that are equal for every synthetic set, by name."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """An entry of the catalogue `DATASETS`: a data set's files, licence, classes and natural views.

    Attributes:
        name: key in the catalogue.
        title, source, licence, citation, shape: descriptions for people.
        how: how to get the files, in one sentence.
        classes: names in the order of the labels; empty if labels are numbers to predict.
        views: number of parties with features, unless a run's settings say otherwise.
        read: function from this entry and a folder to the whole data set.
        height: rows of an image; None for tables.
        natural_views: name -> columns, for tables.
        sequences: natural view -> (steps, channels), for views that are a sequence. Such a view's
            columns are the number of steps in use, then the channels of step after step.
        split: whether the set has an official test split.
        files: the files that `read` needs.
        subfolders: names of folders in which the files usually lie.
        downloads: the files that `fetch_dataset` downloads; empty if nothing can or need be
            downloaded.
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
        """Whether labels are numbers to predict, not classes."""
        return not self.classes


Reader: TypeAlias = Callable[[DataSet, Path | None], Pool]


@cache
def _load_sklearn_set(name: str) -> Any:
    """Load a data set of scikit-learn, and cache it: a study reads it for every run and attack."""
    return getattr(import_module("sklearn.datasets"), f"load_{name}")(as_frame=True)


def load_digits(dataset: DataSet, folder: Path | None) -> ImagePool:
    """Read the digits of scikit-learn: 1797 images of 8 x 8 pixels with values 0 to 16.

    `dataset` and `folder` are unused: scikit-learn has the only file.
    """
    bunch = _load_sklearn_set("digits")
    pixels_NHW = bunch.images.astype(np.uint8)
    return ImagePool(pixels_NHW[:, None], bunch.target.to_numpy(np.int64, copy=True), maximum=16)


def load_sklearn_table(dataset: DataSet, folder: Path | None) -> TablePool:
    """Read the table that scikit-learn has under the name of the data set.

    `folder` is unused: the file is scikit-learn's.
    """
    bunch = _load_sklearn_set(dataset.name)
    kind = np.float64 if dataset.numeric_labels else np.int64
    return TablePool(bunch.data.copy(), bunch.target.to_numpy(kind, copy=True))


def load_idx(dataset: DataSet, folder: Path | None) -> ImagePool:
    """Read MNIST or Fashion-MNIST.

    `dataset`: its `files` are training images, training labels, test images and test labels.
    `folder`: where the files lie; None: as configured in the environment.

    Raises DataError: a file is missing or damaged, or images and labels do not fit each other.
    """
    # Images have 3 axes (N, height, width), labels 1; a channel axis is added to the pixels.
    arrays = [
        parse_idx(load_dataset_file(dataset, file, folder), dimensions=dimensions, source=file.name)
        for file, dimensions in zip(dataset.files, (3, 1, 3, 1), strict=True)
    ]
    train_images_NHW, train_labels_N, test_images_NHW, test_labels_N = arrays
    images = (train_images_NHW, test_images_NHW)
    labels = (train_labels_N, test_labels_N)
    for images_NHW, split_labels_N, file in zip(images, labels, dataset.files[::2], strict=True):
        if len(images_NHW) != len(split_labels_N):
            raise DataError(
                f"{file.name}: {len(images_NHW)} images, but {len(split_labels_N)} labels beside "
                "them"
            )
        if images_NHW.shape[1] != dataset.height:
            raise DataError(
                f"{file.name}: images of {images_NHW.shape[1]} rows, {dataset.name}'s have "
                f"{dataset.height}"
            )
    labels_N = check_labels(dataset, np.concatenate(labels))
    pixels_NCHW = np.concatenate(images)[:, None]
    return ImagePool(pixels_NCHW, labels_N, maximum=255, official_train=len(train_images_NHW))


def load_cifar(dataset: DataSet, folder: Path | None) -> ImagePool:
    """Read CIFAR-10 or CIFAR-100, binary version.

    `dataset`: the last of its `files` is the test split. `folder`: where the files lie; None: as
    configured in the environment.
    """
    classes = len(dataset.classes)
    contents = [
        parse_cifar(
            load_dataset_file(dataset, file, folder),
            # CIFAR-100 writes a coarse label before the fine one.
            label_bytes=1 if classes == 10 else 2,
            classes=classes,
            source=file.name,
        )
        for file in dataset.files
    ]
    # (N, channels, height, width), the last file's rows last: they are the test split.
    pixels_NCHW = np.concatenate([pixels for pixels, _ in contents])
    labels_N = np.concatenate([labels for _, labels in contents])
    _, test_labels = contents[-1]
    return ImagePool(
        pixels_NCHW, labels_N, maximum=255, official_train=len(labels_N) - len(test_labels)
    )


def load_handwritten(dataset: DataSet, folder: Path | None) -> TablePool:
    """Read UCI's multiple features: one CSV file for each view, with the label in the last column.

    `folder`: where the files lie; None: as configured in the environment.
    """
    import pandas as pd

    frames: list[pd.DataFrame] = []
    labels: list[NDArray[np.int64]] = []
    for file in dataset.files:
        frame = _load_csv(dataset, file, folder)
        view = file.name.removeprefix("mfeat-").removesuffix(".csv")
        labels.append(frame.iloc[:, -1].to_numpy(dtype=np.int64))
        frame = frame.iloc[:, :-1]
        frames.append(frame.set_axis(make_column_names(view, frame.shape[1]), axis=1))
        if not np.array_equal(labels[0], labels[-1]):
            raise DataError(f"{file.name}: its labels differ from those of {dataset.files[0].name}")
    return TablePool(pd.concat(frames, axis=1), check_labels(dataset, labels[0]))


def load_credit_card(dataset: DataSet, folder: Path | None) -> TablePool:
    """Read UCI's default of credit card clients: an ID, 23 columns, and the label in the last."""
    frame = _load_csv(dataset, dataset.files[0], folder)
    labels_N = check_labels(dataset, frame.iloc[:, -1].to_numpy(dtype=np.int64))
    return TablePool(frame.iloc[:, 1:-1], labels_N, categorical=("SEX", "EDUCATION", "MARRIAGE"))


def load_dataset_file(dataset: DataSet, file: DataFile, folder: Path | None) -> bytes:
    """Find one file of a data set, check its size and digest, and return its uncompressed bytes.

    `folder`: where the files lie; None: as configured in the environment.
    """
    path = find_dataset_file(dataset, file, folder)
    return load_checked_file(path, file, remedy=f"remove it and {_describe_how_to_get(dataset)}")


def find_dataset_file(dataset: DataSet, file: DataFile, folder: Path | None) -> Path:
    """Return the path of one file of a set, compressed or not.

    These places are searched, in this order: the set's sub-folders in each folder of
    `list_data_folders(folder)`; the folders of system packages; the folders of
    `list_data_folders(folder)` themselves; and the files of this package. The third comes late,
    since files of several sets may have the same name there.

    Raises DataError: the file is in none of them.
    """
    roots = list_data_folders(folder)
    subfolders = dataset.subfolders
    prefixes = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr/local", "/usr"))
    places = [root / sub for root in roots for sub in (dataset.name, *subfolders)]
    places += [Path(prefix, "share", "datasets", sub) for prefix in prefixes for sub in subfolders]
    places += roots
    places += [_SHIPPED / sub for sub in (dataset.name, *subfolders)]
    for place in places:
        for path in (place / file.name, place / f"{file.name}.gz"):
            if path.is_file():
                return path
    raise DataError(
        f"{dataset.name}: neither {file.name} nor {file.name}.gz is in any of "
        f"{', '.join(map(str, places))}; {_describe_how_to_get(dataset)}, or name the folder that "
        "holds it in data.folder or SECURE_APFED_DATA"
    )


def _describe_how_to_get(dataset: DataSet) -> str:
    """Return the advice how to get a data set's files, for errors."""
    return f"run `secure-apfed data fetch {dataset.name}`" if dataset.downloads else dataset.how


def _load_csv(dataset: DataSet, file: DataFile, folder: Path | None) -> "pd.DataFrame":
    """Return the table in one CSV file of a data set, whose size and digest are checked."""
    import pandas as pd  # only readers of tables need it, and listing the sets is quick without

    return pd.read_csv(io.BytesIO(load_dataset_file(dataset, file, folder)))


def check_labels(dataset: DataSet, labels_N: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return labels as int64. Raises DataError: a label is not the number of a class."""
    outside = np.flatnonzero((labels_N < 0) | (labels_N >= len(dataset.classes)))
    if outside.size:
        raise DataError(
            f"{dataset.name}: row {outside[0]} has label {labels_N[outside[0]]}, expected 0 to "
            f"{len(dataset.classes) - 1}; {outside.size} such rows"
        )
    return labels_N.astype(np.int64)


def is_idx(content: bytes) -> bool:
    """Return whether these bytes begin like an IDX file of unsigned bytes."""
    return content[:3] == _IDX_MAGIC


def parse_idx(content: bytes, *, dimensions: int, source: str) -> NDArray[np.uint8]:
    """Return the array in the bytes of an uncompressed IDX file.

    Args:
        content: the file's bytes.
        dimensions: number of axes that the array must have.
        source: name of the file, for errors.

    Raises DataError: another format or number of axes, or another length than its header says.
    """
    header = 4 + 4 * dimensions  # bytes: the magic number, and the size of each axis
    if not is_idx(content) or content[3:4] != bytes([dimensions]):
        raise DataError(
            f"{source}: expected an IDX file of unsigned bytes in {dimensions} dimensions (magic "
            f"{(_IDX_MAGIC + bytes([dimensions])).hex()}), found magic "
            f"{content[:4].hex() or 'nothing'}; get the file again"
        )
    if len(content) < header:
        raise DataError(f"{source}: truncated inside its header; get the file again")
    sizes = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    expected = header + math.prod(sizes)
    if len(content) != expected:
        raise DataError(
            f"{source}: its header announces sizes {sizes}, {expected} bytes in all, the file has "
            f"{len(content)}; it was cut off, altered or is no IDX file, get it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(sizes)


def parse_cifar(
    content: bytes, *, label_bytes: int, classes: int, source: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images (N, 3, 32, 32) and labels (N,) from fixed-length records of labels and pixels.

    A record begins with one label byte (CIFAR-10), or with a coarse and a fine one (CIFAR-100), of
    which the fine one is used.

    Args:
        content: the file's bytes.
        label_bytes: number of label bytes before the pixels; the last one is used.
        classes: number of classes; a label is below it.
        source: name of the file, for errors.

    Raises DataError: the length is no multiple of a record, or a label is not below `classes`.
    """
    record = label_bytes + _CIFAR_PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{source}: expected records of {record} bytes ({label_bytes} of labels, "
            f"{_CIFAR_PIXELS} of pixels), found {len(content)} bytes; it is truncated, damaged or "
            "not CIFAR's binary version"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    outside = np.flatnonzero(labels >= classes)
    if outside.size:
        raise DataError(
            f"{source}: record {outside[0]} has label {labels[outside[0]]}, expected 0 to "
            f"{classes - 1}; {outside.size} such records, so this is not the file that its name "
            "says"
        )
    return records[:, label_bytes:].reshape(-1, *_CIFAR_SHAPE), labels
