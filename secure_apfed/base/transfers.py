"""Copies between the memory of the CPU and of a GPU, with as few waits as possible.

Run by: every party whose `train.device` is a GPU. A GPU computes asynchronously. Each number that
the program reads from it waits until all earlier work is done, and leaves the GPU idle afterwards.
A copy to the GPU goes through pinned memory without waiting; torch keeps the pinned copy until it
is done. A copy from the GPU needs a wait, so several that are needed together share one. On the CPU
nothing is copied, pinned or waited for.
"""

from typing import TypeAlias

import torch
from torch import Tensor

HOST = torch.device("cpu")
StepLoss: TypeAlias = float | Tensor
"""The task loss of a step: a number, or a scalar on a GPU that may not be computed yet."""


def send_tensor(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values on a device and of this dtype (None: theirs), not waiting for the copy.

    Use it for batches, not for tables: torch keeps the pinned memory for the next copy. Values that
    are already there with this dtype are returned without a copy. Values from the CPU are converted
    to the dtype before the transfer.
    """
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device, dtype)
    return values.to(dtype=dtype or values.dtype).pin_memory().to(device, non_blocking=True)


def fetch_tensors(*values: Tensor) -> tuple[Tensor, ...]:
    """Return these tensors in CPU memory, waiting for the GPU only once; detached from autograd.

    Tensors on the CPU are not copied.
    """
    copies = tuple(tensor.detach().to(HOST, non_blocking=True) for tensor in values)
    for device in {tensor.device for tensor in values if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def defer_reading(loss: Tensor) -> StepLoss:
    """Return a scalar loss as a number if it is on the CPU, else as a detached tensor.

    Reading a number waits for the GPU, so `read_losses` reads several together later.
    """
    return loss.item() if loss.device.type == "cpu" else loss.detach()


def read_losses(losses: list[Tensor]) -> list[float]:
    """Return the values of scalar tensors on one GPU, waiting for it only once."""
    if not losses:
        return []
    (host_losses,) = fetch_tensors(torch.stack(losses))
    return [float(loss) for loss in host_losses]
