"""Rows that are not columns of a table: arrays from a file, images from a folder, or results of a
party's own code.

Run by: a party on its own files. Its table (`file`) has the IDs, and the labels where it holds any;
the k-th row of an array belongs to its k-th line, its one further column names the images, and code
is asked for the rows of its IDs. Without a table, IDs and labels come with the rows: as arrays
`ids` and `labels` of the file, or from the code. Arrays are taken as they are: nothing is
normalised. Pixels of images become numbers of 0 to 1.

A file is data alone: a pickled object in it is refused. Letters: N rows, C channels, H height, W
width.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apfed_protocols.installing import install_extra
from secure_apfed.base.failures import find_failed_line
from secure_apfed.base.files import PathLike
from secure_apfed.data.lazy_rows import LazyRows, MappedRows
from secure_apfed.errors import ApfedError, ConfigError, DataError

ARRAY_FILES = (".npy", ".npz", ".safetensors")
"""Suffixes of files that contain arrays."""

MAX_BYTES_IN_MEMORY = 2**28
"""Bytes of a .npy file that is read as a whole; a larger one is memory-mapped."""
_GREY_MODES = ("1", "L", "LA")
"""Pillow's modes of images without colours."""
_NUMBER_KINDS = "biuf"
"""NumPy's kinds of types that are real numbers: bool, signed and unsigned integers, floats."""
_ROWS_ARRAY = "rows"
_IDS_ARRAY = "ids"
_LABELS_ARRAY = "labels"

Features: TypeAlias = Tensor | LazyRows
MakeRows: TypeAlias = Callable[..., Any]
"""A party's own function that makes its rows. It is called with the IDs of its table (`ids`), or
returns IDs together with the rows (`make_code_rows`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnRows:
    """The rows of one party, and what came with them.

    Attributes:
        features: (N, *shape), float32.
        ids: N texts or numbers; None: its table has them.
        labels: N classes or numbers; None: its table has them, or there are none.
    """

    features: Features
    ids: Sequence[Any] | None = None
    labels: Sequence[Any] | None = None


class ImageFiles:
    """A map-style data set of the images of a folder, (C, H, W) float32 of 0 to 1, read when
    indexed.

    Args:
        folder: folder of the files.
        names: name of each row's file, relative to the folder.
        channels: 3 for colours, 1 for greys; None: as each image is.
        size: (H, W) to which all are resized; None: they are of one size.

    Raises:
        ConfigError: Pillow, which reads them, is not installed.
        DataError: a name leads out of the folder.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from secure_apfed import ImageFiles
        >>> with TemporaryDirectory() as folder:
        ...     Image.new("L", (8, 6), color=255).save(f"{folder}/ann.png")
        ...     images = ImageFiles(folder, ["ann.png"], size=(3, 4))
        ...     images[0].shape, float(images[0].mean())  # read when indexed
        (torch.Size([1, 3, 4]), 1.0)
    """

    def __init__(
        self,
        folder: PathLike,
        names: Sequence[str],
        *,
        channels: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Check file names, and that Pillow is installed; for the arguments see the class."""
        try:
            from PIL import Image
        except ModuleNotFoundError as error:
            raise ConfigError(
                "images of a folder are read by Pillow, which is not installed; run: "
                f"{install_extra('images')}"
            ) from error
        self._open_image = Image.open
        self._folder = Path(folder)
        self._file_names = [str(name) for name in names]
        for name in self._file_names:
            path = PurePath(name)
            if path.is_absolute() or ".." in path.parts:
                raise DataError(
                    f"{name!r} leads out of the folder {folder}; name images relative to it"
                )
        # Pillow's mode to which images are converted; None: chosen for each image.
        self._mode: str | None = None
        if channels is not None:
            self._mode = "RGB" if channels == 3 else "L"
        self._size = size

    def __len__(self) -> int:
        return len(self._file_names)

    def __getitem__(self, index: int) -> Tensor:
        """Read one image, converted and resized, (C, H, W) in 0 to 1.

        Raises DataError: its pixels are integers or floats of more than 8 bits.
        """
        with self._open_image(self._folder / self._file_names[index]) as image:
            if image.mode[0] in "IF":  # pixels of 16 or 32 bits, which "L" would cut off at 255
                raise DataError(
                    f"{self._file_names[index]} has pixels of mode {image.mode}; save it with 8 "
                    "bits a channel, or read it in a data set of your own"
                )
            mode_of_image = "L" if image.mode in _GREY_MODES else "RGB"
            pixels = image.convert(self._mode or mode_of_image)
            if self._size is not None:
                height, width = self._size
                pixels = pixels.resize((width, height))
            pixels_HWC = np.atleast_3d(np.asarray(pixels, dtype=np.float32))
        return torch.from_numpy(pixels_HWC / 255).permute(2, 0, 1).contiguous()


def load_array(path: Path, *, party: str) -> Any:
    """Return the array of rows in a file, (N, *shape).

    Raises DataError: the file is unreadable, or has several arrays and none is named "rows".
    """
    return _pick_rows(load_arrays(path, party=party), path, party=party)


def load_arrays(path: Path, *, party: str) -> Mapping[str, Any]:
    """Return the arrays of a .npy, .npz or .safetensors file by name; a .npy array is named rows.

    Raises DataError: the file is missing, of another kind, damaged, or contains objects.
    """
    kind = path.suffix.lower()
    if kind not in ARRAY_FILES:
        raise DataError(
            f"{party}: {path} is no file of arrays; expected {', '.join(ARRAY_FILES)}, a folder of "
            "images, or code as my_data:make_rows"
        )
    try:
        if kind == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        is_large = path.stat().st_size > MAX_BYTES_IN_MEMORY
        return {_ROWS_ARRAY: np.load(path, mmap_mode="c" if is_large else None, allow_pickle=False)}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{party}: {path} cannot be read ({error}); check the path") from error
    except (ValueError, EOFError) as error:
        raise DataError(
            f"{party}: {path} holds no plain numbers ({error}); save the array with a numeric "
            "dtype, or as texts of dtype str"
        ) from error


def make_features(rows: Any, *, party: str, workers: int = 4) -> Features:
    """Return rows of an array, a tensor or a map-style data set as features, (N, *shape).

    Memory-mapped arrays and data sets become lazy rows, which are read when they are needed. Other
    arrays and tensors become a float32 tensor on the CPU.

    Args:
        rows: the party's rows, of any type.
        party: name of the party, for errors.
        workers: threads that read the rows of a data set.

    Raises DataError: rows of another kind, or single numbers in place of rows.
    """
    _refuse_other_tables(rows, party=party)
    if isinstance(rows, np.memmap):  # it may be larger than memory
        if rows.dtype.kind in _NUMBER_KINDS and rows.ndim > 1:
            return MappedRows(rows, party=party)
        return LazyRows(rows, party=party, workers=workers)
    if isinstance(rows, np.ndarray | Tensor):
        return _convert_array(rows, party=party)
    if isinstance(rows, pd.Series | Mapping):
        raise DataError(
            f"{party}: its rows are a {type(rows).__name__}; expected a frame: give "
            f"{'rows.to_frame()' if isinstance(rows, pd.Series) else 'pandas.DataFrame(rows)'}"
        )
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        return LazyRows(rows, party=party, workers=workers)
    raise DataError(
        f"{party}: its rows are a {type(rows).__name__}; expected an array, a tensor, a pandas "
        "frame, a path, or a map-style data set with __len__ and __getitem__"
    )


def _convert_array(rows: NDArray[Any] | Tensor, *, party: str) -> Tensor:
    """Return an array or a tensor of rows as float32 on the CPU, (N, *shape).

    Raises DataError: cells that are no real numbers, or rows without an axis or without numbers.
    """
    if isinstance(rows, np.ndarray):
        if rows.dtype.kind not in _NUMBER_KINDS:
            raise DataError(
                f"{party}: its rows are an array of {rows.dtype}; expected numbers, as of "
                "rows.astype('float32')"
            )
        # A read-only array is always copied, since a tensor cannot be read-only.
        rows = rows.astype(np.float32, copy=not rows.flags.writeable)
    elif fault := _describe_tensor_fault(rows):
        raise DataError(f"{party}: its rows are a tensor {fault}")
    features = torch.as_tensor(rows).detach().to("cpu", torch.float32)
    if features.ndim < 2:
        raise DataError(
            f"{party}: its rows are an array of shape {tuple(features.shape)}; expected "
            "(N, columns) or (N, ...): give one column as rows[:, None]"
        )
    if not math.prod(features.shape[1:]):
        raise DataError(
            f"{party}: its rows are an array of shape {tuple(features.shape)}, so a row has no "
            "numbers; give at least one column"
        )
    return features


def _refuse_other_tables(rows: Any, *, party: str) -> None:
    """Raise DataError for rows in a form that is not read, and name the conversion.

    These are sparse arrays, masked arrays with hidden cells, frames of libraries other than pandas,
    lists of lists, and arrays of records.

    `rows`: the party's rows, of any type.
    """
    kind = type(rows).__name__
    if hasattr(rows, "toarray") and hasattr(rows, "nnz"):
        raise DataError(
            f"{party}: its rows are a sparse {kind}; expected dense rows: give rows.toarray()"
        )
    hidden = int(np.sum(rows.mask)) if isinstance(rows, np.ma.MaskedArray) else 0
    if hidden:
        raise DataError(
            f"{party}: its rows are a masked array with {hidden} hidden "
            "cells; fill them, as rows.filled(0), or leave these rows and their IDs out"
        )
    if hasattr(rows, "to_pandas") and not isinstance(rows, pd.DataFrame | pd.Series):
        raise DataError(
            f"{party}: its rows are a {kind} of {type(rows).__module__.partition('.')[0]}; "
            "expected a pandas frame: give rows.to_pandas()"
        )
    first = rows[0] if isinstance(rows, list | tuple) and len(rows) else None
    if isinstance(first, list | tuple) and first and isinstance(first[0], int | float):
        raise DataError(
            f"{party}: its rows are a {type(rows).__name__} of {type(first).__name__}s; expected "
            "an array: give numpy.array(rows)"
        )
    if isinstance(rows, np.ndarray) and rows.dtype.names:
        raise DataError(
            f"{party}: its rows are an array of records ({', '.join(rows.dtype.names)}); expected "
            "numbers: give pandas.DataFrame(rows)"
        )


def _describe_tensor_fault(rows: Tensor) -> str:
    """Return why a tensor's numbers cannot be read, and what to give instead.

    The text follows "its rows are a tensor"; it is "" if they can be read.
    """
    if rows.is_meta:
        return "without numbers (on torch's meta device); give one with numbers"
    if rows.is_complex():
        return "of complex numbers; give real ones, as torch.view_as_real(rows).flatten(1)"
    if rows.layout is not torch.strided:
        return f"of layout {rows.layout}; give rows.to_dense()"
    return ""


def load_array_rows(path: Path, *, party: str, has_table: bool, has_labels: bool) -> OwnRows:
    """Return the rows of a file of arrays; if the party has no table, also their IDs and labels.

    Args:
        path: a .npy, .npz or .safetensors file.
        party: the party's name.
        has_table: whether the party also has a table, from which IDs and labels are then taken.
        has_labels: whether the party holds labels.

    Raises DataError: an unreadable file (`load_arrays`); or an array is missing.
    """
    arrays = load_arrays(path, party=party)
    features = make_features(_pick_rows(arrays, path, party=party), party=party)
    if has_table:
        return OwnRows(features=features)
    needed_arrays = [_IDS_ARRAY, _LABELS_ARRAY] if has_labels else [_IDS_ARRAY]
    if absent_arrays := [name for name in needed_arrays if name not in arrays]:
        raise DataError(
            f"{party}: {path} has no array {' and '.join(absent_arrays)}, only "
            f"{', '.join(arrays)}; add "
            f"it, or name a table with IDs and labels: data.parties.{party}.file"
        )
    labels = list_cells(arrays[_LABELS_ARRAY]) if has_labels else None
    return OwnRows(features=features, ids=list_cells(arrays[_IDS_ARRAY]), labels=labels)


def make_code_rows(
    make_rows: MakeRows, *, party: str, ids: Sequence[str] | None, has_labels: bool
) -> OwnRows:
    """Return the rows that a party's user-defined function makes.

    Args:
        make_rows: the function. If the party has a table, it returns the rows of the table's lines,
            in their order; it may take their IDs as its argument `ids`. Without a table it takes
            nothing and returns a tuple: IDs and rows, and labels at a party that holds labels.
        party: the party's name.
        ids: IDs of the party's table; None: it has none.
        has_labels: whether the party holds labels.

    Raises DataError: the code fails, or returns something else.
    """
    if ids is not None:
        has_ids_argument = "ids" in inspect.signature(make_rows).parameters
        rows = (
            _call_code(make_rows, party, ids=ids)
            if has_ids_argument
            else _call_code(make_rows, party)
        )
        if isinstance(rows, tuple):
            raise DataError(
                f"{party}: {_name_code(make_rows)} returns a tuple beside a table, which has the "
                f"IDs; return the rows alone, or leave data.parties.{party}.file out"
            )
        return OwnRows(features=make_features(rows, party=party))
    result = _call_code(make_rows, party)
    expected_parts = ("ids", "rows", "labels") if has_labels else ("ids", "rows")
    if not isinstance(result, tuple) or len(result) != len(expected_parts):
        result_text = (
            f"a tuple of {len(result)}"
            if isinstance(result, tuple)
            else f"a {type(result).__name__}"
        )
        raise DataError(
            f"{party}: {_name_code(make_rows)} returns {result_text}; without a table it returns "
            f"({', '.join(expected_parts)}); name a table that has the IDs as "
            f"data.parties.{party}.file"
        )
    own_ids, rows, *labels = result
    return OwnRows(
        features=make_features(rows, party=party),
        ids=list_cells(own_ids),
        labels=list_cells(labels[0]) if labels else None,
    )


def _call_code(make_rows: MakeRows, party: str, **arguments: Sequence[str]) -> Any:
    """Call a party's user-defined function with these arguments, and return its result.

    Raises DataError: the function fails. The message gives its error, and the file and line. Errors
    of this library (`ApfedError`) pass unchanged.
    """
    try:
        return make_rows(**arguments)
    except ApfedError:
        raise
    except Exception as error:
        line = find_failed_line(error)
        raise DataError(
            f"{party}: {_name_code(make_rows)} fails{f' in {line}' if line else ''}: "
            f"{type(error).__name__}: {error}"
        ) from error


def load_images(folder: Path, file_names: Sequence[Any], *, column: str, party: str) -> LazyRows:
    """Return the images that the cells of a column name, read when a step needs them.

    Args:
        folder: where the files are.
        file_names: the column's cells: for each row the name of its file, relative to the folder.
        column: the column's name, for errors.
        party: name of the party, for errors.

    Raises:
        ConfigError: Pillow, which reads images, is not installed.
        DataError: a cell is empty, a name leads out of the folder, or the first image cannot be
            read.
    """
    rows_without_name = [
        row for row, name in enumerate(file_names) if pd.isna(name) or not str(name).strip()
    ]
    if rows_without_name:
        raise DataError(
            f"{party}: column {column!r} names no image in {len(rows_without_name)} rows, the "
            f"first is row {rows_without_name[0]} (from 0); name one, or leave the rows out"
        )
    return LazyRows(ImageFiles(folder, [str(name) for name in file_names]), party=party)


def list_cells(values: Any) -> list[Any]:
    """Return the cells of an array, a tensor, a series or a sequence as plain values."""
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def _pick_rows(arrays: Mapping[str, Any], path: Path, *, party: str) -> Any:
    """Return the array named "rows", or the only array that is not named "ids" or "labels".

    Raises DataError: there are several such arrays, or none.
    """
    if _ROWS_ARRAY in arrays:
        return arrays[_ROWS_ARRAY]
    other_arrays = [name for name in arrays if name not in (_IDS_ARRAY, _LABELS_ARRAY)]
    if len(other_arrays) != 1:
        raise DataError(
            f"{party}: {path} holds the arrays {', '.join(arrays) or 'none'}; call the one that "
            f"has the rows {_ROWS_ARRAY!r}"
        )
    return arrays[other_arrays[0]]


def _name_code(make_rows: MakeRows) -> str:
    """Return the name of a function, or of a callable object's class, for errors."""
    return getattr(make_rows, "__qualname__", type(make_rows).__name__)
