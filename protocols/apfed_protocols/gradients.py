"""Torch's gradients through a sum: kept where one process adds, refused where numbers leave it.

Run by: who calls a sum in one process, and each contributor elsewhere. Protects from: a sum that
cuts the autograd graph in silence, so that what computed the contributions never trains.

In one process the sum is the secure one, bit for bit, and its gradient is that of adding the
clipped rows: each contributor's tensor gets the gradient of the sum, and a row beyond the clip C
gets it through C x / |x|, as under `torch.nn.functional.normalize`. Rounding and noise are
constants. Nothing here imports torch: a tensor that exists has loaded it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.trees import Flattened, rebuild_tree

__all__ = [
    "attach_gradients",
    "records_gradients",
    "refuse_gradients",
    "require_addable_gradients",
    "require_numbers",
]

_MAX_DEPTH = 64
Leaf = tuple[str, Any]
Tree = TypeVar("Tree")


def records_gradients(tree: Any) -> bool:
    """Return whether torch records gradients now, and a tensor of the tree requires a gradient.

    `tree`: an array, or nested dicts, lists and tuples of arrays.
    """
    return any(_requires_gradient(leaf) for _, leaf in _list_leaves(tree))


def refuse_gradients(tree: Any, party: str) -> None:
    """Raise LocalProtocolError if a tensor of a contribution requires a gradient: the contribution
    leaves this process, so no gradient would come back. Under `torch.no_grad()` no tensor does.

    `tree`: the contribution, an array, or nested dicts, lists and tuples of arrays. `party`: the
    party, for errors.
    """
    require_numbers(tree, party)
    for path, leaf in _list_leaves(tree):
        if _requires_gradient(leaf):
            raise LocalProtocolError(
                f"{party}: {path} requires a gradient, and a contribution leaves this process, so "
                "no gradient would come back and what computed it would not train. Contribute "
                "tensor.detach(), let the receiver send the gradient of the sum back, and call "
                "tensor.backward(gradient) here; or add in one process, where secure_sum(...) "
                "called with all values keeps the graph"
            )


def require_numbers(tree: Any, party: str) -> None:
    """Raise LocalProtocolError if a tensor of the tree has no numbers of its own to add, since it
    is on the meta device, under `torch.func` or `torch.vmap`, or in forward-mode differentiation.

    `tree`: an array, or nested dicts, lists and tuples of arrays. `party`: the party, for errors.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for path, leaf in _list_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.is_meta:
            raise LocalProtocolError(
                f"{party}: {path} lies on the meta device and has no numbers; give a tensor of a "
                "real device"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(leaf) or _is_dual(torch, leaf):
            raise LocalProtocolError(
                f"{party}: {path} is inside torch.func, torch.vmap or forward-mode "
                "differentiation, which see none of what is done to its numbers here; make this "
                "call outside, and take gradients by tensor.backward() or torch.autograd.grad"
            )


def require_addable_gradients(values_by_party: Mapping[str, Any]) -> None:
    """Raise LocalProtocolError if the sum could not carry the gradient that a contributor's tensor
    requires.

    The sum has the types of the first contributor's values. So if another contributor's tensor
    requires a gradient, the first contributor must have a tensor of floats in its place.

    `values_by_party`: an array, or nested dicts, lists and tuples of arrays, by contributor; all
    have one structure.
    """
    torch = sys.modules["torch"]
    first_party, *other_parties = values_by_party
    first_leaves = [*_list_leaves(values_by_party[first_party])]
    for party in other_parties:
        leaf_pairs = zip(_list_leaves(values_by_party[party]), first_leaves, strict=False)
        for (path, leaf), (_, first_leaf) in leaf_pairs:
            is_float_tensor = (
                isinstance(first_leaf, torch.Tensor) and first_leaf.is_floating_point()
            )
            if _requires_gradient(leaf) and not is_float_tensor:
                raise LocalProtocolError(
                    f"{party}: {path} requires a gradient, and the sum comes in the form that "
                    f"{first_party} gives, {_describe_type(torch, first_leaf)}, which carries "
                    f"none; let {first_party} give a tensor of floats there, or give "
                    "tensor.detach()"
                )


def attach_gradients(
    total: Tree,
    values_by_party: Mapping[str, Any],
    flattened_by_party: Mapping[str, Flattened],
    clip: float | None,
) -> Tree:
    """Return the sum, connected in autograd's graph to the contributors' tensors that require a
    gradient, as if the clipped values had been added by torch. The numbers of the sum do not
    change.

    Args:
        total: the sum, in the structure of the first contributor's values.
        values_by_party: each contributor's values, by name.
        flattened_by_party: each contributor's values as one matrix (rows, columns), by name.
        clip: C, the L2 bound of one row; None: rows are not clipped.
    """
    sum_leaves = [leaf for _, leaf in _list_leaves(total)]
    for party, tree in values_by_party.items():
        leaves = [leaf for _, leaf in _list_leaves(tree)]
        if any(_requires_gradient(leaf) for leaf in leaves):
            for index, clipped_leaf in _clip_leaves(leaves, flattened_by_party[party], clip):
                # Zeros in value, but with the gradient of the clipped addend.
                zeros_with_gradient = clipped_leaf - clipped_leaf.detach()
                sum_leaves[index] = sum_leaves[index] + zeros_with_gradient.to(sum_leaves[index])
    rebuilt: Tree = rebuild_tree(total, iter(sum_leaves))
    return rebuilt


def _clip_leaves(
    leaves: Sequence[Any], flattened: Flattened, clip: float | None
) -> Iterator[tuple[int, Any]]:
    """Yield (index, tensor) for each of a contributor's leaves that requires a gradient: the index
    in `leaves`, and the values of the leaf as they were added, after clipping, connected to the
    leaf in autograd's graph.

    Args:
        leaves: one contributor's arrays and numbers, in the order of `flatten_tree`.
        flattened: these arrays as one matrix, (rows, columns).
        clip: C, the L2 bound of one row; None: rows are not clipped.
    """
    torch = sys.modules["torch"]
    indices = [index for index, leaf in enumerate(leaves) if _requires_gradient(leaf)]
    device = leaves[indices[0]].device
    rows = torch.from_numpy(flattened.matrix).to(device, torch.float64)
    is_beyond_clip = rows.norm(dim=1) > (torch.inf if clip is None else clip)
    if not is_beyond_clip.any():  # then the values were added unchanged
        for index in indices:
            yield index, leaves[index]
        return
    # The same matrix again, in the order of `flatten_tree`, but of tensors that are in the graph.
    all_numbers = rows.reshape(-1)
    start = 0
    flat_leaves = []
    for leaf in leaves:
        number_count = leaf.numel() if isinstance(leaf, torch.Tensor) else _count_numbers(leaf)
        is_connected = _requires_gradient(leaf)
        flat_leaf = leaf.reshape(-1) if is_connected else all_numbers[start : start + number_count]
        flat_leaves.append(flat_leaf.to(device, torch.float64))
        start += number_count
    matrix = torch.cat(flat_leaves).reshape(rows.shape)
    norms_beyond_clip = matrix[is_beyond_clip].norm(dim=1, keepdim=True)
    clipped = matrix.index_put(
        (is_beyond_clip,), matrix[is_beyond_clip] * (clip / norms_beyond_clip)
    )
    clipped_leaves = clipped.reshape(-1).split([len(flat_leaf) for flat_leaf in flat_leaves])
    for index in indices:
        yield index, clipped_leaves[index].reshape(leaves[index].shape)


def _count_numbers(leaf: Any) -> int:
    """Return how many numbers an array or number has."""
    return int(getattr(leaf, "size", 1))


def _requires_gradient(leaf: Any) -> bool:
    """Return whether a leaf is a tensor that requires a gradient while torch records them."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(leaf, torch.Tensor):
        return False
    return bool(leaf.requires_grad and torch.is_grad_enabled())


def _is_dual(torch: Any, leaf: Any) -> bool:
    """Return whether a tensor carries a tangent of forward-mode differentiation."""
    forward_mode = torch.autograd.forward_ad
    return forward_mode._current_level >= 0 and forward_mode.unpack_dual(leaf).tangent is not None


def _describe_type(torch: Any, leaf: Any) -> str:
    """Return the type of an array or number in words, for errors; `torch` is the module."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype}"
    return f"a {type(leaf).__name__}"


def _list_leaves(tree: Any, path: str = "", depth: int = 0) -> Iterator[Leaf]:
    """Yield (path, leaf) for each array and number of a tree, in the order of `flatten_tree`. The
    path is in words for errors, as "leaf ['w'][0]".

    Args:
        tree: the tree, or a part of one.
        path: keys and indices that lead to the part, as "['w'][0]"; "": the whole tree.
        depth: the number of levels above the part. Parts deeper than `_MAX_DEPTH` are not listed,
            since `flatten_tree` refuses such a tree.
    """
    if depth > _MAX_DEPTH:
        return
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=repr):
            yield from _list_leaves(tree[key], f"{path}[{key!r}]", depth + 1)
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _list_leaves(item, f"{path}[{index}]", depth + 1)
    else:
        yield f"leaf {path}" if path else "a contribution", tree
