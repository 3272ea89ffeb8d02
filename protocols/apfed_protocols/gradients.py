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

_DEEPEST = 64
Leaf = tuple[str, Any]
Tree = TypeVar("Tree")


def records_gradients(tree: Any) -> bool:
    """Return whether torch records gradients here, and a tensor of the tree requires one."""
    return any(_requires_gradient(leaf) for _, leaf in _list_leaves(tree))


def refuse_gradients(tree: Any, who: str) -> None:
    """Raise LocalProtocolError where a contribution that leaves this process requires a gradient.

    Under `torch.no_grad()` nothing does.

    `tree`: nested dicts and lists of arrays. `who`: the party, named in errors.
    """
    require_numbers(tree, who)
    for path, leaf in _list_leaves(tree):
        if _requires_gradient(leaf):
            raise LocalProtocolError(
                f"{who}: {path} requires a gradient, and a contribution leaves this process, so "
                "no gradient would come back and what computed it would not train. Contribute "
                "tensor.detach(), let the receiver send the gradient of the sum back, and call "
                "tensor.backward(gradient) here; or add in one process, where secure_sum(...) "
                "called with all values keeps the graph"
            )


def require_numbers(tree: Any, who: str) -> None:
    """Raise LocalProtocolError where a tensor has no numbers of its own to add.

    On the meta device, under `torch.func` and `torch.vmap`, and in forward-mode differentiation.

    `tree`: nested dicts and lists of arrays. `who`: the party, named in errors.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for path, leaf in _list_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.is_meta:
            raise LocalProtocolError(
                f"{who}: {path} lies on the meta device and has no numbers; give a tensor of a "
                "real device"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(leaf) or _is_dual(torch, leaf):
            raise LocalProtocolError(
                f"{who}: {path} is inside torch.func, torch.vmap or forward-mode differentiation, "
                "which see none of what is done to its numbers here; make this call outside, and "
                "take gradients by tensor.backward() or torch.autograd.grad"
            )


def require_addable_gradients(values: Mapping[str, Any]) -> None:
    """Raise LocalProtocolError where a gradient would come back to a form that carries none.

    The sum has the first contributor's form: where another's tensor requires a gradient, it must be
    a tensor of floats.
    """
    torch = sys.modules["torch"]
    first, *others = values
    template = [*_list_leaves(values[first])]
    for name in others:
        for (path, leaf), (_, form) in zip(_list_leaves(values[name]), template, strict=False):
            floats = isinstance(form, torch.Tensor) and form.is_floating_point()
            if _requires_gradient(leaf) and not floats:
                raise LocalProtocolError(
                    f"{name}: {path} requires a gradient, and the sum comes in the form that "
                    f"{first} gives, {_describe_form(torch, form)}, which carries none; let "
                    f"{first} give a tensor of floats there, or give tensor.detach()"
                )


def attach_gradients(
    total: Tree, values: Mapping[str, Any], flat: Mapping[str, Flattened], clip: float | None
) -> Tree:
    """Return the sum, connected to the contributors' tensors that require a gradient.

    Args:
        total: the sum, in the first contributor's form.
        values: what each gave, and `flat` the same as matrices.
        clip: C, the L2 bound of one row; None: rows are not clipped.
    """
    sums = [leaf for _, leaf in _list_leaves(total)]
    for name, tree in values.items():
        leaves = [leaf for _, leaf in _list_leaves(tree)]
        if any(_requires_gradient(leaf) for leaf in leaves):
            for place, recorded in _clip_leaves(leaves, flat[name], clip):
                zeros = recorded - recorded.detach()  # with the gradient of what was added
                sums[place] = sums[place] + zeros.to(sums[place])
    rebuilt: Tree = rebuild_tree(total, iter(sums))
    return rebuilt


def _clip_leaves(
    leaves: Sequence[Any], flat: Flattened, clip: float | None
) -> Iterator[tuple[int, Any]]:
    """Yield place and tensor of each leaf that requires a gradient, as it was added."""
    torch = sys.modules["torch"]
    places = [place for place, leaf in enumerate(leaves) if _requires_gradient(leaf)]
    device = leaves[places[0]].device
    rows = torch.from_numpy(flat.matrix).to(device, torch.float64)
    is_long = rows.norm(dim=1) > (torch.inf if clip is None else clip)
    if not is_long.any():
        yield from ((place, leaves[place]) for place in places)
        return
    # From the tensors themselves, in the order in which they were flattened.
    numbers = rows.reshape(-1)
    start = 0
    parts = []
    for leaf in leaves:
        size = leaf.numel() if isinstance(leaf, torch.Tensor) else _count_numbers(leaf)
        connected = _requires_gradient(leaf)
        part = leaf.reshape(-1) if connected else numbers[start : start + size]
        parts.append(part.to(device, torch.float64))
        start += size
    matrix = torch.cat(parts).reshape(rows.shape)
    long_norm = matrix[is_long].norm(dim=1, keepdim=True)
    clipped = matrix.index_put((is_long,), matrix[is_long] * (clip / long_norm))
    split = clipped.reshape(-1).split([len(part) for part in parts])
    for place in places:
        yield place, split[place].reshape(leaves[place].shape)


def _count_numbers(leaf: Any) -> int:
    """Return how many numbers a leaf has."""
    return int(getattr(leaf, "size", 1))


def _requires_gradient(leaf: Any) -> bool:
    """Return whether a leaf is a tensor that requires a gradient while torch records them."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(leaf, torch.Tensor):
        return False
    return bool(leaf.requires_grad and torch.is_grad_enabled())


def _is_dual(torch: Any, leaf: Any) -> bool:
    """Return whether a tensor carries a forward-mode tangent."""
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(leaf).tangent is not None


def _describe_form(torch: Any, form: Any) -> str:
    """Return the type of an array in words, for errors."""
    if isinstance(form, torch.Tensor):
        return f"a tensor of {form.dtype}"
    return f"a {type(form).__name__}"


def _list_leaves(tree: Any, path: str = "", depth: int = 0) -> Iterator[Leaf]:
    """Yield path and leaf of a tree, in the order of `flatten_tree`; deeper trees are left to that
    function, which refuses them.
    """
    if depth > _DEEPEST:
        return
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=repr):
            yield from _list_leaves(tree[key], f"{path}[{key!r}]", depth + 1)
    elif isinstance(tree, list | tuple):
        for place, item in enumerate(tree):
            yield from _list_leaves(item, f"{path}[{place}]", depth + 1)
    else:
        yield f"leaf {path}" if path else "a contribution", tree
