"""A caller's numbers as one matrix, and back: arrays of any rank and library, and trees of them.

Run by: every contributor and the receiver of a sum. Protects from: numbers that would be added in
the wrong places, since the structure and the shapes of what was flattened have a digest that both
ends bind to; and from types that change on the way.

One array of rank 2 or more is a batch: row k is what lies under index k of its first axis. All
else is one row: an array of rank 0 or 1, and a list, tuple or dict of arrays and numbers (a tree),
whose leaves follow each other; of a dict in the order of its sorted keys.

Frames and series of pandas go by their labels (`apfed_protocols.labels`): their numbers are put
into one order, and the labels are part of the digest, so that others' numbers are added to those of
the same label or not at all. Whoever sees the digest can test a guess of all labels together.
"""

import copy
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.labels import Labels, find_labels

__all__ = ["Flattened", "flatten_tree", "rebuild_tree"]

_MAX_DEPTH = 64
_CONTAINER_TYPES = (Mapping, list, tuple)
_EXPECTED_TYPES_TEXT = (
    "expected an array or tensor of floats or integers, or lists, tuples and dicts of them"
)
Matrix = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Flattened:
    """A tree of arrays as one matrix, and what is needed to restore the tree.

    Attributes:
        matrix: the numbers in float32 or float64, (rows, columns); a sum clips each row by itself.
    """

    matrix: Matrix
    _structure: Any
    _leaves: Sequence["_Leaf"]
    _tree: Any

    def restore_tree(self, matrix_BD: Matrix, *, max_error: float = 0.0) -> Any:
        """Return the numbers of a matrix, e.g. of a sum, in the structure, types and devices of the
        tree that was flattened.

        Args:
            matrix_BD: the numbers, in the shape of the flattened matrix.
            max_error: the largest error of each number.

        Raises LocalProtocolError: integers cannot be recovered from numbers with this error, or a
        number does not fit its type.
        """
        flat_numbers = matrix_BD.reshape(-1)
        start = 0
        restored_leaves = []
        for leaf in self._leaves:
            end = start + math.prod(leaf.shape)
            values = flat_numbers[start:end].reshape(leaf.shape)
            restored_leaves.append(leaf.restore_leaf(values, max_error))
            start = end
        return rebuild_tree(self._tree, iter(restored_leaves))

    @cached_property
    def digest(self) -> bytes:
        """Return SHA-256 of structure, shapes and labels, by which parties notice that they would
        add different things. Types do not matter: a list at one party and a tuple at another give
        the same digest.
        """
        canonical = json.dumps(self._structure, separators=(",", ":")).encode()
        return hashlib.sha256(b"secure-apfed tree v1" + canonical).digest()

    @property
    def shapes_text(self) -> str:
        """Return the shapes of the first four arrays in words, for errors."""
        first_shapes = ", ".join(f"{leaf.path} {leaf.shape_text}" for leaf in self._leaves[:4])
        other_count = len(self._leaves) - 4
        return f"{first_shapes} and {other_count} more" if other_count > 0 else first_shapes


@dataclass(frozen=True)
class _Leaf:
    """An array or number of a tree.

    Attributes:
        path: where it stands in the tree, for errors.
        values: numbers of the leaf as float32 or float64, in its shape.
        type_range: smallest and largest number of its type.
        is_integer: whether its type is an integer type.
        restore: converts values, in float, to its type, library and device.
        labels: labels of its rows and columns; None: it has none.
    """

    path: str
    values: NDArray[Any]
    type_range: tuple[float, float]
    is_integer: bool
    restore: Callable[[NDArray[Any]], Any]
    labels: Labels | None = None

    @property
    def structure(self) -> dict[str, Any]:
        """Return shape and labels (if they are no positions) as JSON values, for the digest."""
        if self.labels is None or self.labels.are_positions:
            return {"shape": self.shape}
        return {"shape": self.shape, "labels": self.labels.names_by_axis}

    @property
    def shape_text(self) -> str:
        """Return shape and first labels in words, for errors."""
        axis_names = [names for names in self.labels.names_by_axis if names] if self.labels else []
        labels = " x ".join(", ".join(names[:4]) for names in axis_names)
        return f"{list(self.shape)} labelled {labels}" if axis_names else f"{list(self.shape)}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def restore_leaf(self, values: NDArray[Any], max_error: float) -> Any:
        """Return new values for this leaf, in its type, library and device.

        Args:
            values: the new numbers in float, in the shape of the leaf.
            max_error: the largest error of each number.

        Raises LocalProtocolError: integers cannot be recovered, as their error may be a half or
        more; or a number exceeds the range of the type.
        """
        if self.is_integer and max_error >= 0.5:
            raise LocalProtocolError(
                f"{self.path} is of integers, and a sum is off by up to {max_error:.3g}; take "
                "more bits or a smaller clip, or add floats"
            )
        values = np.rint(values) if self.is_integer else values
        type_minimum, type_maximum = self.type_range
        if values.size and not type_minimum <= values.min() <= values.max() <= type_maximum:
            raise LocalProtocolError(
                f"the sum of {self.path} goes up to {np.abs(values).max():g}, beyond "
                f"{type_maximum:g}, the end of its type; add a wider one"
            )
        return self.restore(values)


def flatten_tree(tree: Any) -> Flattened:
    """Return the numbers of a tree of arrays as one matrix, with what is needed to restore the
    tree. An array of rank 2 or more gives a row for each index of its first axis; all else is one
    row.

    Args:
        tree: an array (numpy, torch, or of another library with `__array__`) of floats or
            integers, a number, or lists, tuples and dicts of them. Torch records no gradients
            through this function (`apfed_protocols.gradients` does that for a sum).

    Raises:
        LocalProtocolError: a leaf is none of these, or the tree has no numbers; the error names
            the path.
    """
    leaves: list[_Leaf] = []
    structure = _add_leaves(tree, "", leaves, 0)
    if not any(leaf.values.size for leaf in leaves):
        raise LocalProtocolError(
            f"a contribution is non-empty, got {_describe_kind(tree)} without numbers"
        )
    if isinstance(tree, _CONTAINER_TYPES):
        matrix_BD = np.concatenate([leaf.values.reshape(-1) for leaf in leaves])[None]
    else:
        values = leaves[0].values
        row_count = len(values) if values.ndim > 1 else 1
        matrix_BD = values.reshape(row_count, -1)
    return Flattened(matrix_BD, structure, leaves, tree)


def _add_leaves(node: Any, path: str, leaves: list[_Leaf], depth: int) -> Any:
    """Append the leaves (arrays and numbers) of a part of a tree to `leaves`; return the structure,
    shapes and labels of the part as JSON values, for the digest.

    Args:
        node: the part.
        path: keys and indices that lead to the part, for errors, as "['w'][0]".
        leaves: the list to append to.
        depth: the number of levels above the part.

    Raises LocalProtocolError: the tree is too deep, or has keys or leaves of another type.
    """
    if depth > _MAX_DEPTH:
        raise LocalProtocolError(f"lists within lists, more than {_MAX_DEPTH} deep, are no tree")
    if isinstance(node, Mapping):
        unfit_keys = [key for key in node if type(key) not in (str, int)]
        if unfit_keys:
            raise LocalProtocolError(
                f"a dict of arrays has texts or integers as keys, got {unfit_keys[0]!r:.80}"
            )
        # In sorted order, so that the order in which a party filled its dict does not matter.
        structure_by_key = {}
        for key in sorted(node, key=repr):
            structure_by_key[repr(key)] = _add_leaves(
                node[key], f"{path}[{key!r}]", leaves, depth + 1
            )
        return structure_by_key
    if isinstance(node, list | tuple):
        return [
            _add_leaves(item, f"{path}[{index}]", leaves, depth + 1)
            for index, item in enumerate(node)
        ]
    leaf = _make_leaf(node, path)
    leaves.append(leaf)
    return leaf.structure


def rebuild_tree(node: Any, leaves: Iterator[Any]) -> Any:
    """Return a copy of a tree (nested dicts, lists and tuples), or of a part of one, with other
    leaves.

    `node`: the tree. `leaves`: the new leaves, in the order in which `flatten_tree` visits them.
    """
    if isinstance(node, Mapping):
        # Leaves come in the sorted order of keys; the new dict has the keys in the old order.
        children = {key: rebuild_tree(node[key], leaves) for key in sorted(node, key=repr)}
        if type(node) is dict:
            return {key: children[key] for key in node}
        node_copy: Any = copy.copy(node)  # keeps other attributes of a subclass of dict
        node_copy.update(children)
        return node_copy
    if isinstance(node, list | tuple):
        items = [rebuild_tree(item, leaves) for item in node]
        sequence_type: Any = type(node)
        is_named_tuple = hasattr(sequence_type, "_make")
        return sequence_type._make(items) if is_named_tuple else sequence_type(items)
    return next(leaves)


def _make_leaf(node: Any, path: str) -> _Leaf:
    """Return one array, tensor or number of a tree as a leaf: its numbers in float, and how to
    restore its type.

    `path`: keys and indices that lead to it in the tree, for errors; "": it is the whole tree.

    Raises LocalProtocolError, which names the path: the node is no array of floats or integers.
    """
    path = f"leaf {path}" if path else "a contribution"
    torch = sys.modules.get("torch")  # a tensor exists only if torch was imported
    if torch is not None and isinstance(node, torch.Tensor):
        return _make_torch_leaf(torch, node, path)
    if type(node) in (float, int):
        number_type = type(node)
        return _Leaf(
            path,
            np.array(node, np.float64),
            type_range=(-math.inf, math.inf),
            is_integer=number_type is int,
            restore=lambda value: number_type(value),
        )
    if isinstance(node, np.ndarray) and type(node) is not np.ndarray:
        raise LocalProtocolError(
            f"{path} is {_describe_kind(node)}, which may hide or reorder numbers; give "
            "numpy.asarray of it"
        )
    if not hasattr(node, "__array__"):
        parameter_hint = "; leave out parameters without a gradient" if node is None else ""
        raise LocalProtocolError(
            f"{path} is {_describe_kind(node)}; {_EXPECTED_TYPES_TEXT}{parameter_hint}"
        )
    return _make_array_leaf(node, path)


def _make_array_leaf(node: Any, path: str) -> _Leaf:
    """Return an array of NumPy or of another library, or a frame, as a leaf, which is restored with
    its type.

    `path`: where it is in the tree, in words, for errors.

    Raises LocalProtocolError: the node gives no NumPy array of floats or integers.
    """
    labels = find_labels(node, path)
    try:
        values = np.asarray(node)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LocalProtocolError(f"{path} is no array: {error}") from error
    dtype = values.dtype
    is_integer = values.dtype.kind in "iu"
    # The name tells floats that NumPy does not know, such as bfloat16 of ml_dtypes.
    if not is_integer and dtype.kind != "f" and "float" not in dtype.name:
        raise LocalProtocolError(f"{path} is of {dtype}; {_EXPECTED_TYPES_TEXT}")
    if is_integer:
        type_limits: Any = np.iinfo(dtype)
    else:
        type_limits = np.finfo(dtype if dtype.kind == "f" else np.float32)
    if labels is not None:
        values = labels.arrange_values(values)
    return _Leaf(
        path,
        _cast_floats(values),
        type_range=(float(type_limits.min), float(type_limits.max)),
        is_integer=is_integer,
        restore=_choose_restore(node, labels, dtype),
        labels=labels,
    )


def _choose_restore(node: Any, labels: Labels | None, dtype: Any) -> Callable[[NDArray[Any]], Any]:
    """Return a function that converts float values to an object like `node`, of its type and
    library: a frame, an array of another library, a NumPy scalar or a NumPy array.

    `labels`: row and column labels of a frame; None for all else. `dtype`: NumPy's type of the
    numbers of `node`.
    """
    native_dtype = dtype.newbyteorder("=")
    if labels is not None:
        return partial(_make_frame_like, node, labels, dtype)
    if isinstance(node, np.generic):
        scalar_type: Callable[[NDArray[Any]], Any] = native_dtype.type
        return scalar_type
    if not isinstance(node, np.ndarray) and hasattr(node, "__array_namespace__"):
        return lambda values: node.__array_namespace__().asarray(values, dtype=node.dtype)
    return lambda values: values.astype(native_dtype)


def _make_frame_like(node: Any, labels: Labels, dtype: Any, values: NDArray[Any]) -> Any:
    """Return values as a frame or series like `node`, with its index and columns.

    Args:
        node: a frame or series of pandas.
        labels: row and column labels of `node`.
        dtype: NumPy's type of the numbers of `node`.
        values: the numbers in the sorted order of the labels, in which they were added.
    """
    restored = labels.restore_order(values).astype(dtype.newbyteorder("="))
    if hasattr(node, "columns"):
        return type(node)(restored, index=node.index, columns=node.columns)
    return type(node)(restored, index=node.index, name=node.name)


def _make_torch_leaf(torch: Any, node: Any, path: str) -> _Leaf:
    """Return a torch tensor as a leaf, which is restored with its type and device.

    Args:
        torch: the imported module.
        node: the tensor.
        path: where it is in the tree, in words, for errors.

    Raises LocalProtocolError: the tensor is sparse, or of another type than floats and integers.
    """
    dtype = node.dtype
    device = node.device
    is_integer = str(dtype).startswith(("torch.int", "torch.uint"))
    if node.layout is not torch.strided or not (is_integer or dtype.is_floating_point):
        raise LocalProtocolError(
            f"{path} is a {node.layout} tensor of {dtype}; {_EXPECTED_TYPES_TEXT}"
        )
    type_limits = torch.iinfo(dtype) if is_integer else torch.finfo(dtype)
    values = node.detach().cpu()
    if not is_integer and dtype not in (torch.float32, torch.float64):
        values = values.float()  # e.g. bfloat16, which NumPy does not know
    return _Leaf(
        path,
        _cast_floats(values.numpy()),
        type_range=(float(type_limits.min), float(type_limits.max)),
        is_integer=is_integer,
        restore=lambda sums: torch.from_numpy(np.array(sums)).to(device=device, dtype=dtype),
    )


def _cast_floats(values: NDArray[Any]) -> Matrix:
    """Return values in float32 or float64: shorter floats become float32, all else float64."""
    if values.dtype in (np.float32, np.float64):
        return values
    is_short_float = values.dtype.kind not in "iu" and values.dtype.itemsize < 4
    return values.astype(np.float32 if is_short_float else np.float64)


def _describe_kind(node: Any) -> str:
    """Return the type of a value in words, for errors."""
    return "None" if node is None else f"a {type(node).__name__}"
