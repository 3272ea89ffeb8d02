"""What a caller's torch is set to, kept out of our results.

Run by: whatever trains or predicts. A caller may have another default dtype or device, autocast, no
gradients; a run with the same seed gives the same model all the same.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["one_thread", "undisturbed"]


class _DefaultDtype:
    """float32 while somebody needs it: the default is of the process, not of a thread."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._callers = torch.float32

    @contextmanager
    def as_float32(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._callers = torch.get_default_dtype()
            self._users += 1
            if torch.get_default_dtype() != torch.float32:
                torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and torch.get_default_dtype() != self._callers:
                    torch.set_default_dtype(self._callers)


_DEFAULT_DTYPE = _DefaultDtype()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Compute with gradients, in float32 unless told otherwise, on the CPU unless told otherwise.

    All of it is put back after. The default dtype is the process's: where it was another, other
    threads find float32 meanwhile.
    """
    with ExitStack() as stack:
        stack.enter_context(_DEFAULT_DTYPE.as_float32())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """So that fits depend on no number of cores, and small tensors wait for none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
