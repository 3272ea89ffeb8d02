"""What one step of training asks of a machine: operations, and bytes that its kernels touch.

Counted, not timed: operations by torch's counter of matrix products and convolutions, bytes as the
inputs and outputs of every kernel, as if none stayed in a cache. With what a GPU can do of both,
that is the least time of a step there, and how many runs must train together to fill it.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from apfed_experiments.bench.rows import Row
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.simulation import begin, train

__all__ = ["step_row"]

# NVIDIA's data sheet of the H200 (SXM): bfloat16 without sparsity, and memory.
_H200_OPERATIONS, _H200_BYTES = 989e12, 4.8e12


class _Touched(TorchDispatchMode):
    """Adds up the bytes of the inputs and outputs of kernels; views touch nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.kernels = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(one.nbytes for one in leaves if isinstance(one, Tensor))
            self.kernels += 1
        return result


def step_row(case: str, config: Config, data: VerticalData) -> Row:
    """The count of one epoch of this run, which is one step."""
    session = begin(config, data)
    operations, touched = FlopCounterMode(display=False), _Touched()
    with operations, touched:
        steps = train(session, config)
    flops = operations.get_total_flops() / steps
    moved = touched.bytes / steps
    floor = max(flops / _H200_OPERATIONS, moved / _H200_BYTES)
    return Row(
        case=case,
        seconds=None,
        bytes=round(moved),
        more={
            "operations": round(flops),
            "kernels": round(touched.kernels / steps),
            "operations_a_byte": flops / moved,
            "h200_floor_us": 1e6 * floor,
            "bound_by": "memory" if moved / _H200_BYTES == floor else "arithmetic",
        },
    )
