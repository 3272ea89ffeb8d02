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

_DEEPEST = 64
_BRANCHES = (Mapping, list, tuple)
_EXPECTED = "expected an array or tensor of floats or integers, or lists, tuples and dicts of them"
Matrix = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Flattened:
    """A tree as one matrix.

    Attributes:
        matrix: float32 or float64, (B, D); its rows are what is clipped.
    """

    matrix: Matrix
    _spec: Any
    _leaves: Sequence["_Leaf"]
    _tree: Any

    def restore_tree(self, matrix_BD: Matrix, *, off: float = 0.0) -> Any:
        """Return the matrix in the form of what was flattened: structure, type and device.

        Args:
            off: how far each number may be off. Raises LocalProtocolError where integers would
                not come out whole, or do not fit their type.
        """
        flat = matrix_BD.reshape(-1)
        start = 0
        restored = []
        for leaf in self._leaves:
            end = start + math.prod(leaf.shape)
            restored.append(leaf.restore_leaf(flat[start:end].reshape(leaf.shape), off))
            start = end
        return rebuild_tree(self._tree, iter(restored))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes; of structure and shapes, not of types: a list in one library and a tuple in
        another are the same.
        """
        canonical = json.dumps(self._spec, separators=(",", ":")).encode()
        return hashlib.sha256(b"secure-apfed tree v1" + canonical).digest()

    @property
    def shapes(self) -> str:
        """The shapes in words, for errors."""
        return ", ".join(f"{leaf.path} {leaf.form}" for leaf in self._leaves[:4]) + (
            f" and {len(self._leaves) - 4} more" if len(self._leaves) > 4 else ""
        )


@dataclass(frozen=True)
class _Leaf:
    """An array of a tree: path, values, range of its type, and the function that restores it."""

    path: str
    values: NDArray[Any]
    range: tuple[float, float]
    whole: bool
    back: Callable[[NDArray[Any]], Any]
    labels: Labels | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """The shape for JSON and, where it has any, its labels."""
        if self.labels is None or self.labels.are_positions:
            return {"shape": self.shape}
        return {"shape": self.shape, "labels": self.labels.names}

    @property
    def form(self) -> str:
        """The form in words, for errors."""
        axis_names = [names for names in self.labels.names if names] if self.labels else []
        labels = " x ".join(", ".join(names[:4]) for names in axis_names)
        return f"{list(self.shape)} labelled {labels}" if axis_names else f"{list(self.shape)}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def restore_leaf(self, values: NDArray[Any], off: float) -> Any:
        """Return values in this leaf's type. Raises LocalProtocolError: integers that are off by up
        to a half, or numbers beyond the range of the type.
        """
        if self.whole and off >= 0.5:
            raise LocalProtocolError(
                f"{self.path} is of integers, and a sum is off by up to {off:.3g}; take more bits "
                "or a smaller clip, or add floats"
            )
        values = np.rint(values) if self.whole else values
        smallest, largest = self.range
        if values.size and not smallest <= values.min() <= values.max() <= largest:
            raise LocalProtocolError(
                f"the sum of {self.path} goes up to {np.abs(values).max():g}, beyond {largest:g}, "
                "the end of its type; add a wider one"
            )
        return self.back(values)


def flatten_tree(tree: Any) -> Flattened:
    """Return the numbers of a tree as a matrix, and the way back.

    Args:
        tree: an array (numpy, torch, or of another library with `__array__`) of floats or
            integers, a number, or lists, tuples and dicts of them. Gradients of torch are not
            recorded through it (`apfed_protocols.gradients` does that for a sum).

    Raises:
        LocalProtocolError: what is none of these, or nothing at all; names the place.
    """
    leaves: list[_Leaf] = []
    spec = _add_leaves(tree, "", leaves, 0)
    if not any(leaf.values.size for leaf in leaves):
        raise LocalProtocolError(
            f"a contribution is non-empty, got {_describe_kind(tree)} without numbers"
        )
    if isinstance(tree, _BRANCHES):
        matrix_BD = np.concatenate([leaf.values.reshape(-1) for leaf in leaves])[None]
    else:
        matrix_BD = leaves[0].values.reshape(
            len(leaves[0].values) if leaves[0].values.ndim > 1 else 1, -1
        )
    return Flattened(matrix_BD, spec, leaves, tree)


def _add_leaves(node: Any, path: str, leaves: list[_Leaf], depth: int) -> Any:
    """Append the leaves under `node`; return their structure and shapes as JSON values.

    `depth`: how many levels are above this node.
    """
    if depth > _DEEPEST:
        raise LocalProtocolError(f"lists within lists, more than {_DEEPEST} deep, are no tree")
    if isinstance(node, Mapping):
        odd = [key for key in node if type(key) not in (str, int)]
        if odd:
            raise LocalProtocolError(
                f"a dict of arrays has texts or integers as keys, got {odd[0]!r:.80}"
            )
        keys = sorted(node, key=repr)
        return {
            repr(key): _add_leaves(node[key], f"{path}[{key!r}]", leaves, depth + 1) for key in keys
        }
    if isinstance(node, list | tuple):
        return [_add_leaves(item, f"{path}[{k}]", leaves, depth + 1) for k, item in enumerate(node)]
    leaves.append(_make_leaf(node, path))
    return leaves[-1].spec


def rebuild_tree(node: Any, leaves: Iterator[Any]) -> Any:
    """Rebuild the same structure with other leaves, taken in the order of `_add_leaves`.

    `node`: its structure, as JSON values.
    """
    if isinstance(node, Mapping):
        children = {key: rebuild_tree(node[key], leaves) for key in sorted(node, key=repr)}
        if type(node) is dict:
            return {key: children[key] for key in node}
        filled: Any = copy.copy(node)  # keeps what a subclass holds besides
        filled.update(children)
        return filled
    if isinstance(node, list | tuple):
        items = [rebuild_tree(item, leaves) for item in node]
        kind = type(node)
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    return next(leaves)


def _make_leaf(node: Any, path: str) -> _Leaf:
    """Return one array or number as a leaf. Raises LocalProtocolError, which names the place: it is
    no array of floats or integers.

    `node`: an array, tensor or number.
    """
    path = f"leaf {path}" if path else "a contribution"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(node, torch.Tensor):
        return _make_torch_leaf(torch, node, path)
    if type(node) in (float, int):
        ends = (-math.inf, math.inf)
        return _Leaf(
            path, np.array(node, np.float64), ends, type(node) is int, lambda v: type(node)(v)
        )
    if isinstance(node, np.ndarray) and type(node) is not np.ndarray:
        raise LocalProtocolError(
            f"{path} is {_describe_kind(node)}, which may hide or reorder numbers; give "
            "numpy.asarray of it"
        )
    if not hasattr(node, "__array__"):
        hint = "; leave out parameters without a gradient" if node is None else ""
        raise LocalProtocolError(f"{path} is {_describe_kind(node)}; {_EXPECTED}{hint}")
    labels = find_labels(node, path)
    try:
        values = np.asarray(node)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LocalProtocolError(f"{path} is no array: {error}") from error
    dtype = values.dtype
    is_whole = values.dtype.kind in "iu"
    if not is_whole and dtype.kind != "f" and "float" not in dtype.name:  # as bfloat16 of ml_dtypes
        raise LocalProtocolError(f"{path} is of {dtype}; {_EXPECTED}")
    back: Callable[[NDArray[Any]], Any] = dtype.newbyteorder("=").type
    if not isinstance(node, np.generic):
        back = lambda v: v.astype(dtype.newbyteorder("="))  # noqa: E731
    if not isinstance(node, np.generic | np.ndarray) and hasattr(node, "__array_namespace__"):
        back = lambda v: node.__array_namespace__().asarray(v, dtype=node.dtype)  # noqa: E731
    limits: Any = (
        np.iinfo(dtype) if is_whole else np.finfo(dtype if dtype.kind == "f" else np.float32)
    )
    if labels is not None:
        values = labels.arrange_values(values)
        back = partial(_make_frame_like, node, labels, dtype)
    ends = (float(limits.min), float(limits.max))
    return _Leaf(path, _cast_floats(values), ends, is_whole, back, labels)


def _make_frame_like(node: Any, labels: Labels, dtype: Any, values: NDArray[Any]) -> Any:
    """Return values in canonical order as a frame or series like `node`."""
    restored = labels.restore_order(values).astype(dtype.newbyteorder("="))
    if hasattr(node, "columns"):
        return type(node)(restored, index=node.index, columns=node.columns)
    return type(node)(restored, index=node.index, name=node.name)


def _make_torch_leaf(torch: Any, node: Any, path: str) -> _Leaf:
    """Return a tensor as a leaf; the way back restores device and type.

    `torch`: the module. `node`: the tensor.
    """
    dtype = node.dtype
    device = node.device
    is_whole = str(dtype).startswith(("torch.int", "torch.uint"))
    if node.layout is not torch.strided or not (is_whole or dtype.is_floating_point):
        raise LocalProtocolError(f"{path} is a {node.layout} tensor of {dtype}; {_EXPECTED}")
    limits = torch.iinfo(dtype) if is_whole else torch.finfo(dtype)
    values = node.detach().cpu()
    values = values if is_whole or dtype in (torch.float32, torch.float64) else values.float()
    return _Leaf(
        path,
        _cast_floats(values.numpy()),
        (float(limits.min), float(limits.max)),
        is_whole,
        lambda v: torch.from_numpy(np.array(v)).to(device=device, dtype=dtype),
    )


def _cast_floats(values: NDArray[Any]) -> Matrix:
    """Return values in float32 or float64: shorter floats become the first, all else the second."""
    if values.dtype in (np.float32, np.float64):
        return values
    short = values.dtype.kind not in "iu" and values.dtype.itemsize < 4
    return values.astype(np.float32 if short else np.float64)


def _describe_kind(node: Any) -> str:
    """Return the type of a value in words, for errors."""
    return "None" if node is None else f"a {type(node).__name__}"
