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

_FAR = 1000.0
_SPLITS = 3
# What floating point may move, relative to the largest number of a result. Products of matrices of
# one shape are equal to the bit; networks that sort rows, as packed sequences, are not.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_SLACK = 2e-2
_ABOVE_FLOOR = 10.0
_SEED = 20261128


@dataclass(frozen=True)
class Movement:
    """A row that moved although another one was replaced.

    Attributes:
        replaced: a row that was replaced; others may have been, too.
        moved: the row that moved most of those that stayed as they were.
        distance: the largest change of one of its numbers; size: the largest number of any row.
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
    """Restore the global generators of Python, NumPy and torch after the block.

    Those of torch on GPUs are restored where GPUs are in use.
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
    """Replace rows of a batch and return a row that moved though it was not replaced; None: none
    did.

    Args:
        call: (B, ...) -> (B, D...), deterministic.
        values_B: two rows or more.

    Raises:
        LocalProtocolError: fewer rows, or a result with another number of them.
        PromiseError: two calls with the same rows differ, so that nothing can be measured.
    """
    if values_B.dim() < 1 or len(values_B) < 2:
        raise LocalProtocolError(
            "whether rows move each other is measured on a batch of two rows or more, got values "
            f"of shape {tuple(values_B.shape)}"
        )
    with keep_random_state():
        return _find_movement(call, values_B)


def _find_movement(call: Callable[[Tensor], Tensor], values_B: Tensor) -> Movement | None:
    """Compare results before and after each replacement; see `find_moved_row`.

    A row has moved if it changed by more than rounding and the difference of two equal calls
    explain.

    `values_B`: rows that the function gets.
    """
    before_B = _evaluate_repeatably(call, values_B)
    size = _find_largest(before_B)
    floor = float(_measure_distances(before_B, _evaluate_repeatably(call, values_B)).max())
    slack = _SLACK.get(before_B.dtype, _HALF_SLACK) * size
    if not floor <= slack:
        raise PromiseError(
            f"two calls with the same rows and the same random numbers differ by {floor:.3g} "
            f"(largest number {size:.3g}), so whether rows move each other cannot be measured"
        )
    allowed = slack + _ABOVE_FLOOR * floor
    for replaced_B, other_B, must_work in _list_replacements(values_B):
        try:
            after_B = _evaluate_repeatably(call, other_B)
        except (RuntimeError, ValueError, IndexError, ArithmeticError):
            if must_work:
                raise
            continue  # an extreme row that the network does not take
        moved_B = _measure_distances(before_B, after_B)
        moved_B[replaced_B] = 0.0
        row = int(moved_B.argmax())
        if float(moved_B[row]) > allowed:
            replaced = int(replaced_B.nonzero()[0, 0])
            return Movement(replaced, row, float(moved_B[row]), size)
    return None


def _evaluate_repeatably(call: Callable[[Tensor], Tensor], values_B: Tensor) -> Tensor:
    """Return the result for these rows; random numbers inside repeat at every call.

    `values_B`: rows that the function gets.
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
    """Return the largest change of each row's numbers, (B,); infinite where only
    one of two is NaN.

    `before_B`: results before and after.
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
    return distance_BD.amax(1) if distance_BD.shape[1] else distance_BD.new_zeros(len(distance_BD))


def _find_largest(values_B: Tensor) -> float:
    """Return the largest finite magnitude of these values; 0 if there is none."""
    values = values_B.detach().double()
    return float(torch.where(values.isfinite(), values.abs(), 0.0).max()) if values.numel() else 0.0


def _list_replacements(values_B: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the mask of replaced rows, the batch with replacements, and whether it must be
    accepted.

    Rows are replaced by each other, and by extreme ones, which a network may refuse.

    `values_B`: rows that the function gets.
    """
    rows = len(values_B)
    neighbour_B = values_B.roll(1, 0)
    can_be_far = values_B.is_floating_point()
    far_values_B = values_B
    if can_be_far:
        far_values_B = _FAR * (values_B.abs().max().clamp(min=1) - values_B)
    generator = torch.Generator().manual_seed(_SEED)
    singles = [torch.tensor([row]) for row in dict.fromkeys((0, rows // 2, rows - 1))]
    plans = [(places, is_far) for places in singles for is_far in (False, True)]
    for _ in range(_SPLITS):
        order = torch.randperm(rows, generator=generator, device="cpu")
        plans += [(order[: rows // 2], False), (order[rows // 2 :], True)]
    for places, is_far in plans:
        if is_far and not can_be_far:
            continue
        replaced_B = torch.zeros(rows, dtype=torch.bool, device=values_B.device)
        replaced_B[places.to(values_B.device)] = True
        other_B = values_B.clone()
        other_B[replaced_B] = (far_values_B if is_far else neighbour_B)[replaced_B]
        yield replaced_B, other_B, not is_far


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
            result: Tensor = _copy_module(module, training)(values_B)
        return result

    moved = find_moved_row(call_copy, x.detach())
    if moved is None:
        return
    layer = _find_first_mixing_layer(module, x.detach(), training)
    mode = {True: " in training mode", False: " in evaluation mode", None: ""}[training]
    raise PromiseError(
        f"{owner}{': ' if owner else ''}{_name_of(module)} mixes the rows of a batch{mode}: "
        f"{moved}{layer}. A bound per row needs an encoder that reads each row alone; replace "
        "what reads the batch (batch normalisation by nn.LayerNorm or nn.GroupNorm, attention over "
        "rows by attention within a row)"
    )


def _name_of(module: object) -> str:
    name: str = getattr(module, "__name__", type(module).__name__)
    return name


def _copy_module(module: Callable[..., Any], training: bool | None) -> Callable[..., Any]:
    """Return a copy in the requested mode, which may be run and discarded."""
    copied = copy.deepcopy(module)
    if isinstance(copied, nn.Module) and training is not None:
        copied.train(training)
    return copied


def _find_first_mixing_layer(module: Callable[..., Any], x: Tensor, training: bool | None) -> str:
    """Return in words the first layer that mixes rows which reach it unmixed; "" for none.

    `module`: network or function, (B, ...) -> (B, ...). `training`: whether modules are in training
    mode; None: as they stand.
    """
    if not isinstance(module, nn.Module):
        return ""
    for name, layer in module.named_modules():
        if not name or any(True for _ in layer.children()):
            continue
        if _is_mixing_layer(module, name, x, training, of_input=True):
            return ""  # rows were mixed between layers, in a module's forward
        if _is_mixing_layer(module, name, x, training, of_input=False):
            return f"; the layer that does is {name} ({type(layer).__name__})"
    return ""


def _is_mixing_layer(
    module: nn.Module, name: str, x: Tensor, training: bool | None, *, of_input: bool
) -> bool:
    """Return whether rows of a layer's input (`of_input`) or of its output move each other.

    `training`: whether modules are in training mode; None: as they stand.
    """

    def call_layer(values_B: Tensor) -> Tensor:
        """Return the input or output of the named layer in a fresh copy of the module.

        `values_B`: rows that the module gets.
        """
        copied = _copy_module(module, training)
        assert isinstance(copied, nn.Module)
        captured: list[Any] = []
        copied.get_submodule(name).register_forward_hook(
            lambda _layer, inputs, result: captured.append(inputs if of_input else result)
        )
        with torch.no_grad():
            copied(values_B)
        first = captured[0][0] if isinstance(captured[0], tuple) else captured[0]
        if not isinstance(first, Tensor):
            raise LocalProtocolError(f"{name} reads or gives no tensor")
        return first

    try:
        return find_moved_row(call_layer, x) is not None
    except (LocalProtocolError, PromiseError, IndexError):
        return False  # it never runs, or has no row for each of the batch


def check_objective(objective: Any, z_BD: Tensor, features_B: Tensor, *, owner: str = "") -> None:
    """Refuse an objective that declares `row_wise` and whose gradient of a row reads other rows.

    Rows of the features are replaced, with networks and z fixed, and the gradient on z is compared:
    with noise for one row under a sum, a person may move no row but its own. An objective that does
    not declare `row_wise` gets noise for a whole batch, and is not measured.

    Args:
        objective: a module, (z, features) -> scalar loss, mean over the batch.
        z_BD: representations of two rows or more; features_B: of the same rows.
        owner: the party, for the message.

    Raises:
        PromiseError: names the class, the declaration and the change.
        LocalProtocolError: fewer than two rows.
    """
    if not getattr(objective, "row_wise", False):
        return
    moved = find_moved_gradient(objective, z_BD, features_B)
    if moved is not None:
        raise PromiseError(
            f"{owner}{': ' if owner else ''}{type(objective).__name__} says row_wise = True, but "
            f"in its gradient {moved}. Noise for one row does not cover a person then: leave "
            "row_wise out of the class (the noise is that of a whole batch), or make its loss a "
            "mean over rows of losses that read one row each"
        )


def find_moved_gradient(objective: Any, z_BD: Tensor, features_B: Tensor) -> Movement | None:
    """Return a row of the gradient on z that another row's features move; None: there is none.

    `objective`: (z, features) -> scalar loss.
    """

    def compute_gradient(other_B: Tensor) -> Tensor:
        """Return each row's gradient of the summed loss on z, with these features.

        `other_B`: the features.
        """
        with torch.enable_grad():
            read_BD = z_BD.detach().clone().requires_grad_()
            loss = _copy_module(objective, True)(read_BD, other_B) * len(read_BD)
            (gradient_BD,) = torch.autograd.grad(loss, read_BD)
        gradient: Tensor = gradient_BD
        return gradient

    return find_moved_row(compute_gradient, features_B.detach())


def check_loss(task: Any, outputs_BK: Tensor, labels_B: Tensor, *, owner: str = "") -> None:
    """Refuse a task in whose loss one row's outputs or label change another row's gradient.

    DP-SGD clips each row's gradient, which bounds that row's contribution; it does not bound a
    row's influence on other rows' gradients.

    Args:
        owner: the party, for errors.
        task: its `loss(outputs, labels)` is a mean over the batch.
        outputs_BK: of two rows or more; labels_B: of the same rows, all of them with a label.

    Raises PromiseError: names the class and the change.
    """

    def gradient_of(outputs_BK: Tensor, labelled_B: Tensor) -> Tensor:
        """Return each row's gradient of the summed loss on its outputs, (B, K).

        `labelled_B`: the labels.
        """
        with torch.enable_grad():
            read_BK = outputs_BK.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(
                task.compute_loss(read_BK, labelled_B) * len(read_BK), read_BK
            )
        gradient_BK: Tensor = gradient
        return gradient_BK

    def compute_gradient(order_B: Tensor) -> Tensor:
        return gradient_of(outputs_BK, labels_B[order_B.long()])

    for read, call, values_B in (
        ("outputs", lambda other_BK: gradient_of(other_BK, labels_B), outputs_BK.detach()),
        ("labels", compute_gradient, torch.arange(len(labels_B), device=labels_B.device)),
    ):
        moved = find_moved_row(call, values_B)
        if moved is not None:
            raise PromiseError(
                f"{owner}{': ' if owner else ''}the loss of {type(task).__name__} mixes the rows "
                f"of a batch: of its gradient, by {read}, {moved}. DP-SGD bounds what a row adds "
                "to an update only where no other row's gradient reads it; make the loss a mean "
                "over rows of losses that read one row each, or leave dp_sgd out"
            )


_NORMALISERS = ("NativeBatchNormBackward", "CudnnBatchNormBackward", "MiopenBatchNormBackward")
_LOOK_UPS = ("EmbeddingBackward",)
_COMPILED = "CompiledFunction"
_MAX_NODES = 20_000


def check_graph(h_BD: Tensor) -> bool:
    """Refuse representations whose autograd graph shows that rows of the batch were mixed.

    For callers who see h and not the network. Half of the rows of h get weights, which are
    propagated backwards; at any layer with a row for each of h they may reach no more rows than
    that. Batch normalisation in training is found also as the first layer. Not found: operations
    before the first layer with parameters (a subtracted mean of the features), and anything without
    a graph; `check_row_wise` finds both.

    The graph is unchanged: none of its hooks runs, and it can be used afterwards. A node made by
    `torch.compile` is skipped: it hides its layers, and may be called once.

    Returns whether the graph was checked: not without one, with a single row, above 20,000 nodes,
    or with a compiled node. Raises PromiseError: names the operation.
    """
    if h_BD.grad_fn is None or len(h_BD) < 2:
        return False
    order = _sort_nodes(h_BD.grad_fn)
    if order is None or any(node.name().startswith(_COMPILED) for node in order):
        return False
    operation = _find_normaliser(order) or _find_mixing_operation(h_BD, order)
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
    """Return a graph's nodes in topological order, outputs first; None: too many.

    `root`: the output's autograd node.
    """
    order: list[Any] = []
    seen: set[Any] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MAX_NODES:
            return None
        waiting.append((node, True))
        waiting += [
            (successor, False) for successor, _ in node.next_functions if successor is not None
        ]
    return order[::-1]


def _find_normaliser(order: list[Any]) -> str | None:
    """Return "batch normalisation in training" if some node uses the batch's statistics, else None.

    Instance normalisation reads one row and is allowed.
    """
    for node in order:
        if node.name().startswith(_NORMALISERS) and getattr(node, "_saved_training", True):
            read = getattr(node, "_saved_input", None)
            if isinstance(read, Tensor) and len(read) > 1:
                return "batch normalisation in training"
    return None


def _find_data_nodes(order: list[Any]) -> set[Any]:
    """Return the nodes below which data enters: a result without gradient, not a parameter."""
    reading: set[Any] = set()
    for node in reversed(order):
        next_nodes = [successor for successor, _ in node.next_functions]
        reads = None in next_nodes or node.name().startswith(_LOOK_UPS)
        if reads or any(successor in reading for successor in next_nodes):
            reading.add(node)
    return reading


def _find_mixing_operation(h_BD: Tensor, order: list[Any]) -> str | None:
    """Return the name of an operation that mixes rows of the batch; None: there is none.

    Random gradients of half of the rows go back through the graph of autograd, node by node. If one
    arrives at the data of another row, a row's representation depends on others, so that no bound
    for each row holds.
    """
    rows = len(h_BD)
    data_nodes = _find_data_nodes(order)
    generator = torch.Generator().manual_seed(_SEED)
    weighted_B = torch.randperm(rows, generator=generator, device="cpu") < (rows + 1) // 2
    weights_BD = torch.randn(h_BD.shape, generator=generator, dtype=torch.float64, device="cpu")
    weights_BD[~weighted_B] = 0.0
    start = {h_BD.output_nr: weights_BD.to(h_BD.device, h_BD.dtype)}
    waiting: dict[Any, dict[int, Tensor]] = {h_BD.grad_fn: start}
    sent_by: dict[Any, str] = {}
    for node in order:
        arrived = waiting.pop(node, None)
        if arrived is None or not node.next_functions:
            continue
        if node in data_nodes and _reaches_others(arrived, weighted_B):
            return sent_by.get(node) or "its first operation"
        for (successor, index), gradient in zip(
            node.next_functions, _call_node(node, arrived), strict=False
        ):
            if successor is not None and gradient is not None:
                gradients = waiting.setdefault(successor, {})
                arriving = _sum_broadcast_axes(gradient, successor, index)
                gradients[index] = gradients[index] + arriving if index in gradients else arriving
                sent_by[successor] = node.name()
    return None


def _call_node(node: Any, arrived: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients that a node passes on; empty if it cannot be called by itself.

    `arrived`: gradient by output of the node.
    """
    results = len(getattr(node, "_input_metadata", (None,)))
    with torch.no_grad():
        try:
            gradients = node(*(arrived.get(index) for index in range(results)))
        except (RuntimeError, TypeError):
            return ()
    return gradients if isinstance(gradients, tuple) else (gradients,)


def _sum_broadcast_axes(weight: Tensor, node: Any, index: int) -> Tensor:
    """Sum a gradient over the axes along which its input was broadcast, as autograd does.

    `weight`: the gradient. `node`: that takes it, at input `index`.
    """
    metadata = getattr(node, "_input_metadata", ())
    if index >= len(metadata):
        return weight
    shape = tuple(metadata[index].shape)
    if weight.shape == shape or len(shape) > weight.dim():
        return weight
    return weight.sum_to_size(shape)


def _reaches_others(arrived: dict[int, Tensor], weighted_B: Tensor) -> bool:
    """Return whether more rows have a weight than were given one.

    Only numbers are compared: networks may reorder rows, as packed sequences do.

    `arrived`: gradient by output of the node.
    """
    for weight in arrived.values():
        if weight.dim() and len(weight) == len(weighted_B):
            size_B = torch.nan_to_num(weight.detach().abs()).reshape(len(weight), -1).amax(1)
            reached = size_B > _SLACK[torch.float32] * size_B.max()
            if int(reached.sum()) > int(weighted_B.sum()):
                return True
    return False


_EXTREME = 1e6
_SURE = 6.0  # standard errors: less than once in 10^8 measurements of a guard that keeps its word
_EXACT = 1e-5
_FEWEST = 256
_MOST = 4096
_NUMBERS = 8
_KEY = bytes(31) + b"m"  # key for noise that is never sent


def check_guard(guard: Any) -> None:
    """Refuse a guard whose releases reveal more of a row than its mechanism states.

    Releases of synthetic rows under fresh keys are compared: two extreme rows may be at most mu
    noise deviations apart; a replaced row may not move others; and rows that the guard declares as
    repeats must be equal to the bit. A guard without a bound is not measured.

    If the guard has a `twin` whose noise repeats, distances are exact, and noise below nine tenths
    of its stated deviation is found. Others are measured statistically, over up to 4,096 rows; the
    smaller their mu, the less is found.

    Args:
        guard: see `RepresentationGuard`; twins or a copy are measured, and its own state stays.

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
        pair = _make_twin_guards(guard)
        distance, noise, error = (
            _measure_from_samples(_copy_guard(guard), direction_D, mechanism.mu)
            if pair is None
            else _measure_in_pairs(*pair, _copy_guard(guard), direction_D)
        )
        reach = distance / noise if noise > 0 else math.inf
        if reach - error > mechanism.mu or (pair and distance > _compute_allowance(guard)):
            raise PromiseError(
                f"{name} says sensitivity() {guard.sensitivity():.4g} and mechanism() {mechanism}, "
                f"that is mu {mechanism.mu:.4g}, but two rows lie {distance:.4g} apart under noise "
                f"of deviation {noise:.4g}: mu {reach:.4g}. Clip rows to half of the sensitivity, "
                "or state the noise that there is"
            )
    _require_others_unmoved(guard, name)
    _check_repeats(_copy_guard(guard), name)


def _compute_allowance(guard: Any) -> float:
    """Return the sensitivity of a guard with a margin for rounding."""
    allowed: float = guard.sensitivity() * (1 + _EXACT)
    return allowed


def _copy_guard(guard: Any) -> Any:
    """Return the same guard with a fresh key."""
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
    """Return two twins with the same noise at the same step; None: the guard has no such twins."""
    first, second, probe = (guard.twin(_KEY, repeatable=True) for _ in range(3))
    if first is None or second is None or probe is None:
        return None
    rows = torch.arange(2)
    h_BD = torch.ones(2, _NUMBERS, dtype=torch.float64)
    repeated = guard.twin(_KEY, repeatable=True).release(h_BD, step=0, rows=rows)
    is_paired = torch.equal(probe.release(h_BD, step=0, rows=rows), repeated)
    return (first, second) if is_paired else None


def _make_directions() -> tuple[Tensor, Tensor]:
    """Return two unit directions: one number only, and all numbers equal.

    A guard that bounds each number instead of the row's norm passes the first and fails the second.
    """
    ones_D = torch.ones(_NUMBERS, dtype=torch.float64)
    return torch.eye(_NUMBERS, dtype=torch.float64)[0], ones_D / math.sqrt(_NUMBERS)


def _measure_in_pairs(
    first: Any, second: Any, single: Any, direction_D: Tensor
) -> tuple[float, float, float]:
    """Return the distance of extreme rows, the noise's deviation, and the error of their ratio.

    The distance is exact, since both twins have the same noise; the deviation is measured on
    `single`.

    `first`: two guards with opposite noise. `direction_D`: unit vector between the extreme rows.
    """
    rows = torch.arange(_FEWEST)
    h_BD = (_EXTREME * direction_D).expand(_FEWEST, _NUMBERS)
    difference_BD = first.release(h_BD, step=0, rows=rows) - second.release(
        -h_BD, step=0, rows=rows
    )
    distance = float(difference_BD.double().norm(dim=1).max())
    sent_BD = single.release(h_BD, step=0, rows=rows).double()
    noise = float(sent_BD.var(0).mean().sqrt())
    relative = _SURE / math.sqrt(2 * sent_BD.numel())
    return distance, noise, (distance / noise * relative if noise > 0 else 0.0)


def _measure_from_samples(guard: Any, direction_D: Tensor, mu: float) -> tuple[float, float, float]:
    """Return the same as `_measure_in_pairs` from samples, for a guard without repeatable noise.

    `direction_D`: unit vector between the extreme rows.
    """
    half = min(_MOST, max(_FEWEST, math.ceil((_NUMBERS / mu) ** 2)))
    signs_B1 = torch.ones(2 * half, 1, dtype=torch.float64)
    signs_B1[half:] = -1
    sent_BD = guard.release(_EXTREME * signs_B1 * direction_D, step=0, rows=torch.arange(2 * half))
    along_B = sent_BD.double() @ direction_D.double()
    first_B = along_B[:half]
    second_B = along_B[half:]
    noise = math.sqrt((float(first_B.var()) + float(second_B.var())) / 2)
    distance = abs(float(first_B.mean() - second_B.mean()))
    reach = distance / noise if noise > 0 else 0.0
    return distance, noise, _SURE * math.sqrt(2 / half + reach**2 / (4 * half))


def _require_others_unmoved(guard: Any, name: str) -> None:
    """Raise PromiseError if replacing one row moves the others' releases.

    `guard`: measured by copies; its own state stays.
    """
    rows = torch.arange(_FEWEST)
    usual_BD = torch.ones(_FEWEST, _NUMBERS, dtype=torch.float64) / math.sqrt(_NUMBERS)
    extreme_BD = usual_BD.clone()
    extreme_BD[0] = -_EXTREME * usual_BD[0]
    pair = _make_twin_guards(guard)
    first, second = pair or (_copy_guard(guard), _copy_guard(guard))
    before_B = first.release(usual_BD, step=1, rows=rows).double()[1:].sum(1)
    after_B = second.release(extreme_BD, step=1, rows=rows).double()[1:].sum(1)
    noise = math.sqrt((float(before_B.var()) + float(after_B.var())) / 2)
    moved = abs(float((after_B - before_B).mean()))
    allowed = noise * (_EXACT if pair else _SURE * math.sqrt(2 / len(before_B)))
    if moved > allowed:
        raise PromiseError(
            f"{name} is charged by the row, but replacing one row of a batch moved the others by "
            f"{moved:.4g} in the mean, under noise of deviation {noise:.4g}; release each row by "
            "what that row is"
        )


def _check_repeats(guard: Any, name: str) -> None:
    """Raise PromiseError if rows that the guard declares as repeats are released with other
    numbers.
    """
    rows = torch.arange(32)
    h_BD = torch.ones(len(rows), _NUMBERS, dtype=torch.float64)
    before_BD = guard.release(h_BD, step=2, rows=rows)
    repeats_B = guard.repeats(rows)
    after_BD = guard.release(-h_BD, step=3, rows=rows)
    if not torch.equal(before_BD[repeats_B], after_BD[repeats_B]):
        raise PromiseError(
            f"{name} says that rows repeat, which costs nothing, and sent other numbers for them; "
            "repeats() may name rows only whose bytes come again"
        )
