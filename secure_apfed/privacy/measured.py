"""Tests of the properties on which privacy bounds rely: does one row of a batch change the results
of others?

A bound per row (epsilon_x of a guard, epsilon_c of noise under a sum, epsilon_model of DP-SGD)
holds where a row's result reads that row alone. No accountant sees whether it does: a network that
normalises over the batch, or a loss that subtracts the batch's mean, looks like any other. So rows
of a real batch are replaced by each other and by extreme ones, and the other rows' results are
compared.

Run by: each party, on the first batch of a session, if a finite epsilon relies on the property; by
authors of plug-ins (`secure_apfed.testing`) and of own loops (`check_row_wise`). A measurement
finds what mixes rows of this batch; it proves nothing of other batches, and finds nothing in code
that waits for a later one.

Nothing here changes a result: copies are measured, and all global generators are put back.

Letters: B rows of a batch, D numbers of a result.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import fresh_key
from secure_apfed.base.seeds import seed_draws
from secure_apfed.errors import PromiseError

__all__ = [
    "Movement",
    "check_graph",
    "check_guard",
    "check_loss",
    "check_objective",
    "check_row_wise",
    "find_moved_gradient",
    "find_moved_row",
    "keep_random_state",
]

# How far outside the data extreme rows lie, in units of the largest magnitude (at least 1).
_EXTREME_ROW_DISTANCE = 1000.0
# Random halves of the batch that are replaced, besides three single rows.
_RANDOM_SPLIT_COUNT = 3
# What floating point may move, relative to the largest number of a result. Products of matrices of
# one shape are equal to the bit; networks that sort rows, as packed sequences, are not.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_PRECISION_SLACK = 2e-2
# A movement counts only if it is this many times the difference of two equal calls.
_MOVEMENT_FACTOR = 10.0
_SEED = 20261128  # of all random draws here: every measurement repeats


@dataclass(frozen=True)
class Movement:
    """A row of a result that changed although only other rows of the input were replaced.

    Attributes:
        replaced: index of the first replaced row; others may have been replaced, too.
        moved: index of the unreplaced row whose result changed most.
        distance: the largest change of one of that row's numbers.
        size: the largest magnitude of all numbers of the result, for comparison.
    """

    replaced: int
    moved: int
    distance: float
    size: float

    def __str__(self) -> str:
        """Return the movement in words, for an error."""
        return (
            f"replacing row {self.replaced} of the batch moved row {self.moved} by "
            f"{self.distance:.3g} (largest number {self.size:.3g})"
        )


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the states of the global generators of Python, NumPy and torch after the block.

    torch's generators on GPUs are restored only if this process uses GPUs already.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - it is the caller's that is put back
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def find_moved_row(call: Callable[[Tensor], Tensor], values_B: Tensor) -> Movement | None:
    """Test whether replacing rows of a batch changes the result of other rows.

    Returns the first change that is found; None: none was found. The caller's random generators are
    restored.

    Args:
        call: the function that is checked, (B, ...) -> (B, D...), deterministic.
        values_B: its input, two rows or more.

    Raises:
        LocalProtocolError: fewer than two rows, or a result with another number of rows.
        PromiseError: two calls with the same rows differ, so that nothing can be measured; or
            results have different shapes.
    """
    if values_B.dim() < 1 or len(values_B) < 2:
        raise LocalProtocolError(
            "whether rows move each other is measured on a batch of two rows or more, got values "
            f"of shape {tuple(values_B.shape)}"
        )
    with keep_random_state():
        return _find_movement(call, values_B)


def _find_movement(call: Callable[[Tensor], Tensor], values_B: Tensor) -> Movement | None:
    """Compare a function's results before and after each replacement, for `find_moved_row`.

    A row has moved if its result changed by more than rounding explains, and by more than two equal
    calls differ. Returns the first such row; None: there is none.

    `call`: the function, (B, ...) -> (B, D...). `values_B`: its input.

    Raises LocalProtocolError, PromiseError: as `find_moved_row` lists them.
    """
    before_B = _evaluate_repeatably(call, values_B)
    largest_magnitude = _find_largest(before_B)
    repeated_B = _evaluate_repeatably(call, values_B)
    repeat_difference = float(_measure_distances(before_B, repeated_B).max())
    rounding_error = _SLACK.get(before_B.dtype, _HALF_PRECISION_SLACK) * largest_magnitude
    if not repeat_difference <= rounding_error:  # written so that NaN is refused, too
        raise PromiseError(
            "two calls with the same rows and the same random numbers differ by "
            f"{repeat_difference:.3g} (largest number {largest_magnitude:.3g}), so whether rows "
            "move each other cannot be measured"
        )
    largest_unexplained = rounding_error + _MOVEMENT_FACTOR * repeat_difference
    for is_replaced_B, changed_B, is_required in _list_replacements(values_B):
        try:
            after_B = _evaluate_repeatably(call, changed_B)
        except (RuntimeError, ValueError, IndexError, ArithmeticError):
            if is_required:
                raise
            continue  # the network does not accept an extreme row
        change_B = _measure_distances(before_B, after_B)
        change_B[is_replaced_B] = 0.0  # the replaced rows themselves may change
        moved_row = int(change_B.argmax())
        change = float(change_B[moved_row])
        if change > largest_unexplained:
            first_replaced = int(is_replaced_B.nonzero()[0, 0])
            return Movement(
                replaced=first_replaced, moved=moved_row, distance=change, size=largest_magnitude
            )
    return None


def _evaluate_repeatably(call: Callable[[Tensor], Tensor], values_B: Tensor) -> Tensor:
    """Return the function's result for these rows (B, ...), detached.

    All random generators are seeded first, so that every call draws the same numbers, as for
    dropout. Autocast is off.

    Raises LocalProtocolError: the result has another number of rows.
    """
    random.seed(_SEED)
    np.random.seed(_SEED)  # noqa: NPY002
    torch.default_generator.manual_seed(_SEED)  # of the CPU alone, which loads no other backend
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(_SEED)
    with seed_draws(_SEED, "measured"), torch.autocast(values_B.device.type, enabled=False):
        result = call(values_B.clone()).detach()
    if result.dim() < 1 or len(result) != len(values_B):
        raise LocalProtocolError(
            f"{len(values_B)} rows give a result of shape {tuple(result.shape)}; expected one row "
            "for each"
        )
    return result


def _measure_distances(before_B: Tensor, after_B: Tensor) -> Tensor:
    """Return the largest change of a number in each row between two results, (B,).

    The change of a number is 0 where both are NaN, and infinite where only one is.

    Raises PromiseError: the shapes differ.
    """
    if before_B.shape != after_B.shape:
        raise PromiseError(
            f"the same number of rows gave results of shapes {tuple(before_B.shape)} and "
            f"{tuple(after_B.shape)}, so one row decides on the shape of others"
        )
    before_BD = before_B.reshape(len(before_B), -1).double()
    after_BD = after_B.reshape(len(after_B), -1).double()
    is_same_BD = (before_BD == after_BD) | (before_BD.isnan() & after_BD.isnan())
    distance_BD = torch.where(is_same_BD, 0.0, (before_BD - after_BD).abs())
    distance_BD = torch.where(distance_BD.isnan(), math.inf, distance_BD)
    if not distance_BD.shape[1]:  # rows without numbers have no maximum
        return distance_BD.new_zeros(len(distance_BD))
    return distance_BD.amax(1)


def _find_largest(values_B: Tensor) -> float:
    """Return the largest finite magnitude of these values; 0 if there is none."""
    values = values_B.detach().double()
    return float(torch.where(values.isfinite(), values.abs(), 0.0).max()) if values.numel() else 0.0


def _list_replacements(values_B: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield changed copies of a batch, on which a function's results are compared.

    Each is yielded as the mask (B,) of replaced rows, the changed batch, and whether a network must
    accept it. Rows are replaced by their neighbours, and by extreme rows far outside of the data,
    which a network may refuse. Batches of integers get no extreme rows.

    First single rows are replaced (the first, the middle and the last), then random halves of the
    batch.
    """
    row_count = len(values_B)
    neighbours_B = values_B.roll(1, 0)
    has_extremes = values_B.is_floating_point()
    extremes_B = values_B
    if has_extremes:
        extremes_B = _EXTREME_ROW_DISTANCE * (values_B.abs().max().clamp(min=1) - values_B)
    generator = torch.Generator().manual_seed(_SEED)
    # Each plan says which positions are replaced, and whether by extreme rows.
    single_positions = [
        torch.tensor([row]) for row in dict.fromkeys((0, row_count // 2, row_count - 1))
    ]
    plans = [
        (positions, is_extreme) for positions in single_positions for is_extreme in (False, True)
    ]
    for _ in range(_RANDOM_SPLIT_COUNT):
        order = torch.randperm(row_count, generator=generator, device="cpu")
        plans += [(order[: row_count // 2], False), (order[row_count // 2 :], True)]
    for positions, is_extreme in plans:
        if is_extreme and not has_extremes:
            continue
        is_replaced_B = torch.zeros(row_count, dtype=torch.bool, device=values_B.device)
        is_replaced_B[positions.to(values_B.device)] = True
        changed_B = values_B.clone()
        replacement_B = extremes_B if is_extreme else neighbours_B
        changed_B[is_replaced_B] = replacement_B[is_replaced_B]
        is_required = not is_extreme
        yield is_replaced_B, changed_B, is_required


def check_row_wise(
    module: Callable[..., Any], x: Tensor, *, training: bool | None = True, owner: str = ""
) -> None:
    """Refuse an encoder in which one row of a batch changes the result of another.

    A guard's guarantee for one row holds for encoders that compute each row from that row alone.
    Layers that do not: batch normalisation in training, attention over the batch, anything else
    that reads a statistic of the batch. Layer, group and instance normalisation read one row alone.

    Rows of `x` are replaced by each other and by extreme ones; a copy of the module is run on them,
    with the same random numbers each time (so dropout passes). The caller's objects do not change.

    Args:
        module: a network, or a function, (B, ...) -> (B, ...).
        x: two rows or more, such as a first batch.
        training: measure in training mode (the default), in evaluation mode (False), or as the
            module stands (None).
        owner: the module's party, for the message.

    Raises:
        PromiseError: names the network, the layer if it is found, and the change.
        LocalProtocolError: fewer than two rows, or a result with another number of rows.

    Examples:
        >>> check_row_wise(nn.Linear(4, 2), torch.randn(8, 4))
        >>> check_row_wise(nn.BatchNorm1d(4), torch.randn(8, 4))
        Traceback (most recent call last):
        secure_apfed.errors.PromiseError: BatchNorm1d mixes the rows of a batch in training ...
    """
    if not isinstance(x, Tensor):
        raise LocalProtocolError(f"x is a tensor of two rows or more, got {type(x).__name__}")

    def call_copy(values_B: Tensor) -> Tensor:
        """Return the result of a fresh copy of the module, without gradients."""
        with torch.no_grad():
            result: Tensor = _copy_module(module, training=training)(values_B)
        return result

    movement = find_moved_row(call_copy, x.detach())
    if movement is None:
        return
    layer_text = _find_first_mixing_layer(module, x.detach(), training)
    mode = {True: " in training mode", False: " in evaluation mode", None: ""}[training]
    prefix = f"{owner}: " if owner else ""
    raise PromiseError(
        f"{prefix}{_get_name(module)} mixes the rows of a batch{mode}: "
        f"{movement}{layer_text}. A bound per row needs an encoder that reads each row alone; "
        "replace what reads the batch (batch normalisation by nn.LayerNorm or nn.GroupNorm, "
        "attention over rows by attention within a row)"
    )


def _get_name(module: object) -> str:
    """Return the name of a function, or of a network's class, for an error."""
    name: str = getattr(module, "__name__", type(module).__name__)
    return name


def _copy_module(module: Callable[..., Any], *, training: bool | None) -> Callable[..., Any]:
    """Return a deep copy of a network or function.

    `training`: whether the copy is put into training or evaluation mode; None: its mode stays.
    """
    module_copy = copy.deepcopy(module)
    if isinstance(module_copy, nn.Module) and training is not None:
        module_copy.train(training)
    return module_copy


def _find_first_mixing_layer(module: Callable[..., Any], x: Tensor, training: bool | None) -> str:
    """Return words that name the first layer that mixes rows, for the error of `check_row_wise`.

    That is the first layer without sublayers whose output rows are mixed and whose input rows are
    not. Returns "" if there is none, or for a function that is no network.

    `module`: the network that mixes rows. `x`: its input, two rows or more. `training`: its mode
    while measured, as in `_copy_module`.
    """
    if not isinstance(module, nn.Module):
        return ""
    for name, layer in module.named_modules():
        has_sublayers = any(True for _ in layer.children())
        is_whole_network = not name
        if is_whole_network or has_sublayers:
            continue
        if _is_mixing_layer(module, name, x, training, is_input_compared=True):
            return ""  # rows were mixed between two layers, by code in a module's forward
        if _is_mixing_layer(module, name, x, training, is_input_compared=False):
            return f"; the layer that does is {name} ({type(layer).__name__})"
    return ""


def _is_mixing_layer(
    module: nn.Module, name: str, x: Tensor, training: bool | None, *, is_input_compared: bool
) -> bool:
    """Return whether one row of x changes another row of a layer's input or output.

    False if this cannot be measured, as for a layer that never runs.

    Args:
        module: the network.
        name: dotted path of the layer in the network.
        x: the network's input, two rows or more.
        training: mode of the network while measured; None: as it is.
        is_input_compared: True: the layer's input is compared; False: its output.
    """

    def call_layer(values_B: Tensor) -> Tensor:
        """Return the input or output of the named layer when a copy of the module is run."""
        copied = _copy_module(module, training=training)
        assert isinstance(copied, nn.Module)
        captured: list[Any] = []
        copied.get_submodule(name).register_forward_hook(
            lambda _layer, inputs, result: captured.append(inputs if is_input_compared else result)
        )
        with torch.no_grad():
            copied(values_B)
        first_call = captured[0]
        tensor = first_call[0] if isinstance(first_call, tuple) else first_call
        if not isinstance(tensor, Tensor):
            raise LocalProtocolError(f"{name} reads or gives no tensor")
        return tensor

    try:
        return find_moved_row(call_layer, x) is not None
    except (LocalProtocolError, PromiseError, IndexError):
        return False  # the layer never runs, or its tensor has no row for each of the batch


def check_objective(objective: Any, z_BD: Tensor, features_B: Tensor, *, owner: str = "") -> None:
    """Refuse an objective (a passive's loss) that wrongly declares `row_wise`.

    The declaration says that one row's features change no other row's gradient. A contribution then
    gets noise for one row only, so it must hold. Rows of the features are replaced, with networks
    and representations z fixed, and the gradients by z are compared. An objective without the
    declaration gets noise for a whole batch, and is not measured.

    Args:
        objective: a module, (z, features) -> scalar loss, mean over the batch.
        z_BD: representations of two rows or more.
        features_B: the passive's features of these rows.
        owner: the party, for the message.

    Raises:
        PromiseError: a row moved; names the class, the declaration and the change.
        LocalProtocolError: fewer than two rows.
    """
    if not getattr(objective, "row_wise", False):
        return
    movement = find_moved_gradient(objective, z_BD, features_B)
    if movement is not None:
        raise PromiseError(
            f"{owner}{': ' if owner else ''}{type(objective).__name__} says row_wise = True, but "
            f"in its gradient {movement}. Noise for one row does not cover a person then: leave "
            "row_wise out of the class (the noise is that of a whole batch), or make its loss a "
            "mean over rows of losses that read one row each"
        )


def find_moved_gradient(objective: Any, z_BD: Tensor, features_B: Tensor) -> Movement | None:
    """Return a row of the gradient by z that changes if other rows' features are replaced.

    None: there is none.

    `objective`: a module, (z, features) -> scalar loss, mean over the batch. `z_BD`:
    representations of two rows or more. `features_B`: the features of these rows.
    """

    def compute_with_features(replaced_features_B: Tensor) -> Tensor:
        """Return each row's gradient by z, with these features, (B, D)."""
        copied_objective = _copy_module(objective, training=True)
        return _compute_row_gradients(lambda z: copied_objective(z, replaced_features_B), z_BD)

    return find_moved_row(compute_with_features, features_B.detach())


def _compute_row_gradients(
    compute_mean_loss: Callable[[Tensor], Tensor], values_BD: Tensor
) -> Tensor:
    """Return the gradient of the summed loss by each row of values, (B, D).

    `compute_mean_loss`: the loss of the B rows, a mean over them, as a function of the values.
    """
    with torch.enable_grad():
        differentiated_BD = values_BD.detach().clone().requires_grad_()
        summed_loss = compute_mean_loss(differentiated_BD) * len(differentiated_BD)
        gradient_BD: Tensor = torch.autograd.grad(summed_loss, differentiated_BD)[0]
    return gradient_BD


def check_loss(task: Any, outputs_BK: Tensor, labels_B: Tensor, *, owner: str = "") -> None:
    """Refuse a task in whose loss one row's outputs or label change another row's gradient.

    DP-SGD clips each row's gradient, which bounds that row's contribution. It does not bound a
    row's influence on other rows' gradients.

    Args:
        task: the learning task, whose `compute_loss(outputs, labels)` is a mean over the batch.
        outputs_BK: K outputs of the network for each of two rows or more.
        labels_B: labels of these rows, none missing.
        owner: the party, for errors.

    Raises PromiseError: names the class and the change.
    """

    def compute_with_outputs(replaced_outputs_BK: Tensor) -> Tensor:
        """Return each row's gradient at these outputs, with the true labels, (B, K)."""
        return _compute_row_gradients(
            lambda scores_BK: task.compute_loss(scores_BK, labels_B), replaced_outputs_BK
        )

    def compute_with_labels_of(rows_B: Tensor) -> Tensor:
        """Return each row's gradient if it has the label of the row given for it, (B, K)."""
        replaced_labels_B = labels_B[rows_B.long()]
        return _compute_row_gradients(
            lambda scores_BK: task.compute_loss(scores_BK, replaced_labels_B), outputs_BK
        )

    # A replaced row number is a replaced label that occurs in the batch, and so is valid.
    row_numbers_B = torch.arange(len(labels_B), device=labels_B.device)
    for replaced_name, compute_gradients, values_B in (
        ("outputs", compute_with_outputs, outputs_BK.detach()),
        ("labels", compute_with_labels_of, row_numbers_B),
    ):
        movement = find_moved_row(compute_gradients, values_B)
        if movement is not None:
            raise PromiseError(
                f"{owner}{': ' if owner else ''}the loss of {type(task).__name__} mixes the rows "
                f"of a batch: of its gradient, by {replaced_name}, {movement}. DP-SGD bounds what "
                "a row adds to an update only where no other row's gradient reads it; make the "
                "loss a mean over rows of losses that read one row each, or leave dp_sgd out"
            )


# Starts of the names of autograd nodes.
_NORMALISER_NODES = ("NativeBatchNormBackward", "CudnnBatchNormBackward", "MiopenBatchNormBackward")
_LOOK_UP_NODES = ("EmbeddingBackward",)
_COMPILED_NODE = "CompiledFunction"
# A larger graph is not checked.
_MAX_NODES = 20_000


def check_graph(h_BD: Tensor) -> bool:
    """Refuse representations whose autograd graph shows that rows of the batch were mixed.

    For callers who have h and not the network. Random gradients of half of the rows of h are
    propagated backwards. At any layer with a row for each row of h, they may reach no more rows
    than they started from. Batch normalisation in training is found also as the first layer.

    Two things are not found: operations before the first layer with parameters (a subtracted mean
    of the features), and anything without a graph. `check_row_wise` finds both. The graph is
    unchanged: none of its hooks runs, and it can be used afterwards.

    Returns whether the graph was checked: not without one, with a single row, above 20,000 nodes,
    or with a node made by `torch.compile`, which hides its layers and may be called only once.

    Raises:
        PromiseError: names the operation.
    """
    if h_BD.grad_fn is None or len(h_BD) < 2:
        return False
    nodes = _sort_nodes(h_BD.grad_fn)
    if nodes is None or any(node.name().startswith(_COMPILED_NODE) for node in nodes):
        return False
    operation = _find_normaliser(nodes) or _find_mixing_operation(h_BD, nodes)
    if operation is not None:
        raise PromiseError(
            f"these representations come from a network that mixes the rows of a batch "
            f"({operation}), so one row's release tells of other rows and no bound per row holds. "
            "Replace what reads the batch, such as batch normalisation in training by "
            "nn.LayerNorm or nn.GroupNorm; secure_apfed.privacy.check_row_wise(encoder, x) names "
            "the layer"
        )
    return True


def _sort_nodes(root: Any) -> list[Any] | None:
    """Return the nodes of an autograd graph in topological order, outputs first.

    Returns None for a graph of more than `_MAX_NODES` nodes, which would take too long.

    `root`: the output's autograd node.
    """
    sorted_nodes: list[Any] = []  # in depth-first order: each node after all nodes that it leads to
    seen: set[Any] = set()
    # A node is on the stack first to visit its successors, and once more to finish it after them.
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, has_visited_successors = stack.pop()
        if has_visited_successors:
            sorted_nodes.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MAX_NODES:
            return None
        stack.append((node, True))
        stack += [
            (successor, False) for successor, _ in node.next_functions if successor is not None
        ]
    return sorted_nodes[::-1]


def _find_normaliser(nodes: list[Any]) -> str | None:
    """Return "batch normalisation in training" if some node uses the batch's statistics, else None.

    Instance normalisation calls the same kind of node with one row, which is allowed.

    `nodes`: the graph's nodes.
    """
    for node in nodes:
        if node.name().startswith(_NORMALISER_NODES) and getattr(node, "_saved_training", True):
            node_input = getattr(node, "_saved_input", None)
            if isinstance(node_input, Tensor) and len(node_input) > 1:
                return "batch normalisation in training"
    return None


def _find_data_nodes(nodes: list[Any]) -> set[Any]:
    """Return the nodes whose result depends on data, as opposed to parameters alone.

    Data is an input without gradient, which autograd shows as None among the next nodes. A look-up
    of embeddings also reads data: its indices.

    `nodes`: the graph's nodes, outputs first.
    """
    data_nodes: set[Any] = set()
    for node in reversed(nodes):
        next_nodes = [successor for successor, _ in node.next_functions]
        reads_data = None in next_nodes or node.name().startswith(_LOOK_UP_NODES)
        if reads_data or any(successor in data_nodes for successor in next_nodes):
            data_nodes.add(node)
    return data_nodes


def _find_mixing_operation(h_BD: Tensor, nodes: list[Any]) -> str | None:
    """Return the name of an operation that mixes rows of the batch; None: there is none.

    Random gradients of half of the rows of h go back through its graph, node by node. If they reach
    more rows of the data than they started from, one row's representation depends on others.

    `nodes`: the graph's nodes, outputs first.
    """
    row_count = len(h_BD)
    data_nodes = _find_data_nodes(nodes)
    generator = torch.Generator().manual_seed(_SEED)
    is_start_row_B = (
        torch.randperm(row_count, generator=generator, device="cpu") < (row_count + 1) // 2
    )
    start_gradient_BD = torch.randn(
        h_BD.shape, generator=generator, dtype=torch.float64, device="cpu"
    )
    start_gradient_BD[~is_start_row_B] = 0.0
    start_gradient_by_output = {h_BD.output_nr: start_gradient_BD.to(h_BD.device, h_BD.dtype)}
    # For each node, and each of its outputs, the sum of the gradients that arrived so far.
    gradients_by_node: dict[Any, dict[int, Tensor]] = {h_BD.grad_fn: start_gradient_by_output}
    last_sender_by_node: dict[
        Any, str
    ] = {}  # for each node, the name of the last one that passed to it
    for node in nodes:
        gradient_by_output = gradients_by_node.pop(node, None)
        if gradient_by_output is None or not node.next_functions:
            continue
        if node in data_nodes and _reaches_more_rows(gradient_by_output, is_start_row_B):
            return last_sender_by_node.get(node) or "its first operation"
        next_gradients = _call_node(node, gradient_by_output)
        for (successor, output_index), gradient in zip(
            node.next_functions, next_gradients, strict=False
        ):
            if successor is None or gradient is None:
                continue
            next_gradient_by_output = gradients_by_node.setdefault(successor, {})
            summed_gradient = _sum_broadcast_axes(gradient, successor, output_index)
            next_gradient_by_output[output_index] = (
                next_gradient_by_output[output_index] + summed_gradient
                if output_index in next_gradient_by_output
                else summed_gradient
            )
            last_sender_by_node[successor] = node.name()
    return None


def _call_node(node: Any, gradient_by_output: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients that an autograd node passes on, one for each next node.

    The tuple is empty if the node cannot be called directly.

    `gradient_by_output`: the gradient by each output of the node, by the output's index.
    """
    output_count = len(getattr(node, "_input_metadata", (None,)))
    with torch.no_grad():
        try:
            gradients = node(*(gradient_by_output.get(index) for index in range(output_count)))
        except (RuntimeError, TypeError):
            return ()
    return gradients if isinstance(gradients, tuple) else (gradients,)


def _sum_broadcast_axes(gradient: Tensor, node: Any, index: int) -> Tensor:
    """Return a gradient summed over the axes along which its tensor was broadcast.

    Autograd does so itself, but not where nodes are called directly. A gradient of unknown or equal
    shape is returned as it is.

    `node`, `index`: the autograd node whose output number `index` is that tensor.
    """
    metadata = getattr(node, "_input_metadata", ())
    if index >= len(metadata):
        return gradient
    shape = tuple(metadata[index].shape)
    if gradient.shape == shape or len(shape) > gradient.dim():
        return gradient
    return gradient.sum_to_size(shape)


def _reaches_more_rows(gradient_by_output: dict[int, Tensor], is_start_row_B: Tensor) -> bool:
    """Return whether gradients at a node are non-zero in more rows than they started from.

    Only numbers of rows are compared, not which rows: networks may reorder rows, as packed
    sequences do.

    `gradient_by_output`: the gradients by the node's outputs, by output index. Gradients without a
    row for each of the batch are skipped. `is_start_row_B`: mask of the rows of h from which they
    started.
    """
    for gradient in gradient_by_output.values():
        if gradient.dim() and len(gradient) == len(is_start_row_B):
            magnitudes = torch.nan_to_num(gradient.detach().abs()).reshape(len(gradient), -1)
            magnitude_B = magnitudes.amax(1)
            is_reached_B = magnitude_B > _SLACK[torch.float32] * magnitude_B.max()
            if int(is_reached_B.sum()) > int(is_start_row_B.sum()):
                return True
    return False


_EXTREME_NORM = 1e6  # norm of the extreme rows, far above any clip
_SURE_STANDARD_ERRORS = (
    6.0  # standard errors: less than once in 10^8 measurements of a guard that keeps its word
)
_ROUNDING_ERROR = 1e-5  # relative, of exact measurements
_MIN_ROWS = 256
_MAX_ROWS = 4096
_ROW_LENGTH = 8  # D of the synthetic rows
_TWIN_KEY = bytes(31) + b"m"  # key for noise that is never sent


def check_guard(guard: Any) -> None:
    """Refuse a guard whose releases reveal more of a row than its mechanism states.

    Releases of synthetic rows under fresh keys are compared: two extreme rows may be at most mu
    noise deviations apart; a replaced row may not move others; and rows that the guard declares as
    repeats must be equal to the bit. A guard without a bound is not measured.

    A twin of a guard is the same guard with another key (`RepresentationGuard.twin`). If twins with
    repeatable noise exist, distances are exact, and noise below nine tenths of its stated deviation
    is found. Other guards are measured statistically, over up to 4,096 rows: the smaller their mu,
    the larger a violation must be to be found.

    `guard`: a `RepresentationGuard`, which clips and perturbs rows. Its twins or copies are
    measured, so its own state stays.

    Raises PromiseError: names the class, the declaration and the measurement.
    """
    mechanism = guard.mechanism()
    name = type(guard).__name__
    if math.isinf(mechanism.mu):
        return
    if guard.unsafe or not 0 < guard.sensitivity() < math.inf:
        raise PromiseError(
            f"{name} says mechanism() {mechanism}, but also unsafe = {guard.unsafe} and a "
            f"sensitivity of {guard.sensitivity()}; a guard that protects has unsafe = False and a "
            "finite sensitivity, and one that does not returns NoPrivacy()"
        )
    for direction_D in _make_directions():
        twins = _make_twin_guards(guard)
        measured_copy = _copy_guard(guard)
        if twins is None:
            distance, noise_deviation, ratio_error = _measure_from_samples(
                measured_copy, direction_D, mechanism.mu
            )
        else:
            distance, noise_deviation, ratio_error = _measure_in_pairs(
                *twins, measured_copy, direction_D
            )
        measured_mu = distance / noise_deviation if noise_deviation > 0 else math.inf
        is_too_far = twins is not None and distance > _compute_allowance(guard)
        if measured_mu - ratio_error > mechanism.mu or is_too_far:
            raise PromiseError(
                f"{name} says sensitivity() {guard.sensitivity():.4g} and mechanism() {mechanism}, "
                f"that is mu {mechanism.mu:.4g}, but two rows lie {distance:.4g} apart under noise "
                f"of deviation {noise_deviation:.4g}: mu {measured_mu:.4g}. Clip rows to half of "
                "the sensitivity, or state the noise that there is"
            )
    _require_others_unmoved(guard, name)
    _check_repeats(_copy_guard(guard), name)


def _compute_allowance(guard: Any) -> float:
    """Return the distance that two releases may have: the guard's sensitivity and some rounding."""
    allowed: float = guard.sensitivity() * (1 + _ROUNDING_ERROR)
    return allowed


def _copy_guard(guard: Any) -> Any:
    """Return a guard like this one, on which can be measured without changing its state.

    It is a twin with a fresh key, or a deep copy if the guard makes no twins.

    Raises PromiseError: the guard has no twin and cannot be copied.
    """
    twin = guard.twin(fresh_key(), repeatable=False)
    if twin is not None:
        return twin
    try:
        return copy.deepcopy(guard)
    except (LocalProtocolError, TypeError, RuntimeError) as error:
        raise PromiseError(
            f"{type(guard).__name__} says mechanism() {guard.mechanism()} and cannot be measured: "
            "give it a method twin(key, *, repeatable) that returns the same guard with this key"
        ) from error


def _make_twin_guards(guard: Any) -> tuple[Any, Any] | None:
    """Return two guards with the settings of this one and equal noise at each step.

    Returns None if the guard makes no such twins, or if two further twins release different
    numbers: this is tested, since a guard could declare repeatable noise wrongly.
    """
    first_twin, second_twin, tested_twin = (
        guard.twin(_TWIN_KEY, repeatable=True) for _ in range(3)
    )
    if first_twin is None or second_twin is None or tested_twin is None:
        return None
    rows = torch.arange(2)
    h_BD = torch.ones(2, _ROW_LENGTH, dtype=torch.float64)
    expected_BD = guard.twin(_TWIN_KEY, repeatable=True).release(h_BD, step=0, rows=rows)
    is_noise_equal = torch.equal(tested_twin.release(h_BD, step=0, rows=rows), expected_BD)
    return (first_twin, second_twin) if is_noise_equal else None


def _make_directions() -> tuple[Tensor, Tensor]:
    """Return two unit vectors (D,): along the first axis, and with all numbers equal.

    A guard that bounds each number instead of the row's norm passes the first and fails the second.
    """
    first_axis_D = torch.eye(_ROW_LENGTH, dtype=torch.float64)[0]
    diagonal_D = torch.ones(_ROW_LENGTH, dtype=torch.float64) / math.sqrt(_ROW_LENGTH)
    return first_axis_D, diagonal_D


def _measure_in_pairs(
    first_twin: Any, second_twin: Any, measured_copy: Any, direction_D: Tensor
) -> tuple[float, float, float]:
    """Return how far the releases of two opposite extreme rows are apart, and under what noise.

    Returned are the distance, the standard deviation of the noise, and the largest error of their
    ratio. The distance is exact, since the noise of both twins is equal and cancels.

    Args:
        first_twin, second_twin: two guards with equal noise.
        measured_copy: a copy of the guard, on which the noise is measured.
        direction_D: unit vector; the extreme rows lie far out along it and against it.
    """
    rows = torch.arange(_MIN_ROWS)
    extreme_BD = (_EXTREME_NORM * direction_D).expand(_MIN_ROWS, _ROW_LENGTH)
    released_BD = first_twin.release(extreme_BD, step=0, rows=rows)
    opposite_released_BD = second_twin.release(-extreme_BD, step=0, rows=rows)
    distance = float((released_BD - opposite_released_BD).double().norm(dim=1).max())
    noisy_BD = measured_copy.release(extreme_BD, step=0, rows=rows).double()
    noise_deviation = float(noisy_BD.var(0).mean().sqrt())
    if not noise_deviation > 0:
        return distance, noise_deviation, 0.0
    relative_error = _SURE_STANDARD_ERRORS / math.sqrt(2 * noisy_BD.numel())
    return distance, noise_deviation, distance / noise_deviation * relative_error


def _measure_from_samples(guard: Any, direction_D: Tensor, mu: float) -> tuple[float, float, float]:
    """Estimate how far the releases of two opposite extreme rows are apart, and under what noise.

    It serves guards whose noise cannot be repeated: means over many rows are compared. Returned are
    the distance, the standard deviation of the noise, and the largest error of their ratio.

    `guard`: a copy of the guard. `mu`: Gaussian DP parameter that the guard states; the smaller,
    the more rows are measured. `direction_D`: unit vector; the extreme rows lie far out along it
    and against it.
    """
    # The first half of the rows lies far out along the direction, the second half against it.
    half_count = min(_MAX_ROWS, max(_MIN_ROWS, math.ceil((_ROW_LENGTH / mu) ** 2)))
    signs_B1 = torch.ones(2 * half_count, 1, dtype=torch.float64)
    signs_B1[half_count:] = -1
    extreme_BD = _EXTREME_NORM * signs_B1 * direction_D
    released_BD = guard.release(extreme_BD, step=0, rows=torch.arange(2 * half_count))
    projection_B = released_BD.double() @ direction_D.double()
    forward_B = projection_B[:half_count]
    opposite_B = projection_B[half_count:]
    noise_deviation = math.sqrt((float(forward_B.var()) + float(opposite_B.var())) / 2)
    distance = abs(float(forward_B.mean() - opposite_B.mean()))
    ratio = distance / noise_deviation if noise_deviation > 0 else 0.0
    return (
        distance,
        noise_deviation,
        _SURE_STANDARD_ERRORS * math.sqrt(2 / half_count + ratio**2 / (4 * half_count)),
    )


def _require_others_unmoved(guard: Any, name: str) -> None:
    """Raise PromiseError if replacing one row of a batch moves the releases of the other rows.

    A guard's privacy is charged for each row alone, so this must not happen.

    `guard`: its twins or copies are measured, so its own state stays. `name`: name of the guard's
    class, for the message.
    """
    rows = torch.arange(_MIN_ROWS)
    usual_BD = torch.ones(_MIN_ROWS, _ROW_LENGTH, dtype=torch.float64) / math.sqrt(_ROW_LENGTH)
    extreme_BD = usual_BD.clone()
    extreme_BD[0] = -_EXTREME_NORM * usual_BD[0]
    twins = _make_twin_guards(guard)
    first_guard, second_guard = twins or (_copy_guard(guard), _copy_guard(guard))
    before_B = first_guard.release(usual_BD, step=1, rows=rows).double()[1:].sum(1)
    after_B = second_guard.release(extreme_BD, step=1, rows=rows).double()[1:].sum(1)
    noise_deviation = math.sqrt((float(before_B.var()) + float(after_B.var())) / 2)
    mean_change = abs(float((after_B - before_B).mean()))
    relative_error = (
        _ROUNDING_ERROR if twins else _SURE_STANDARD_ERRORS * math.sqrt(2 / len(before_B))
    )
    if mean_change > noise_deviation * relative_error:
        raise PromiseError(
            f"{name} is charged by the row, but replacing one row of a batch moved the others by "
            f"{mean_change:.4g} in the mean, under noise of deviation {noise_deviation:.4g}; "
            "release each row by what that row is"
        )


def _check_repeats(guard: Any, name: str) -> None:
    """Raise PromiseError if rows that the guard declares as repeats are sent with other numbers.

    Repeats cost no privacy, so their bytes must be the same. `guard`: a copy, whose state changes.
    `name`: name of the guard's class, for the message.
    """
    rows = torch.arange(32)
    h_BD = torch.ones(len(rows), _ROW_LENGTH, dtype=torch.float64)
    before_BD = guard.release(h_BD, step=2, rows=rows)
    is_repeat_B = guard.repeats(rows)
    after_BD = guard.release(-h_BD, step=3, rows=rows)
    if not torch.equal(before_BD[is_repeat_B], after_BD[is_repeat_B]):
        raise PromiseError(
            f"{name} says that rows repeat, which costs nothing, and sent other numbers for them; "
            "repeats() may name rows only whose bytes come again"
        )
