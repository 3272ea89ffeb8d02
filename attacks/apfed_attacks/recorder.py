"""Collects what a training loop that is not ours exchanges, for `apfed_attacks.evaluate`.

Run by: whoever trains, beside a network whose output one party sends to another.
"""

import warnings
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apfed_attacks.view import AttackError
from apfed_protocols.labels import order_by_position

__all__ = ["Recorder"]

_MEGABYTE = 2**20


class Recorder:
    """A recorder of a module's output h (B, ...) and the loss's gradients on it, step by step.

    The module is the last before h leaves, after a guard (which clips and perturbs it). Copies are
    stored on the CPU; output, graph and gradients stay as they are. `step` announces the forward
    pass to be recorded, in training or not. One that no step announces is an AttackError in
    training; under `eval()` or without gradients it is not recorded. Gradients of several backward
    passes add up. Copies and pickles of the module do not record.

    Args:
        megabytes: maximum size of all copies; steps beyond are not recorded, with a UserWarning.

    Examples:
        >>> bottom, record = nn.Linear(3, 2), Recorder()
        >>> with record.watch(bottom):
        ...     record.step(rows=[4, 0])
        ...     bottom(torch.ones(2, 3)).sum().backward()
        >>> record.to_arrays()["steps"]
        [array([4, 0])]
    """

    def __init__(self, *, megabytes: float = 1024) -> None:
        """Make a recorder that watches nothing yet; `megabytes` bounds all copies."""
        self._bytes_left = megabytes * _MEGABYTE
        self._handle: RemovableHandle | None = None  # of the hook; None: nothing is watched
        self._rows: Any = None  # announced for the next forward pass; None: nothing is announced
        self._steps = list[Any]()
        self._h = list[Any]()
        self._gradients: dict[int, Tensor] = {}

    def watch(self, module: nn.Module) -> Self:
        """Record the output of `module` until `close`.

        Raises AttackError: this recorder watches a module already, or another one watches this
        module.
        """
        if self._handle is not None or any(
            isinstance(hook, Recorder) for hook in module._forward_hooks.values()
        ):
            raise AttackError("a recorder watches one module and a module has one; close() it")
        self._handle = module.register_forward_hook(self)
        return self

    def step(self, rows: Any) -> None:
        """Announce that the next output is of the rows at these positions (B,)."""
        plain = rows.tolist() if isinstance(rows, Tensor) else rows
        self._rows = np.array(order_by_position(plain, "step(rows)", error=AttackError))

    def close(self) -> None:
        """Stop watching; what was recorded stays."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._rows = None

    def __enter__(self) -> Self:
        """Return the recorder, for a `with` block after `watch`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching at the end of the block."""
        self.close()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle the recorder as a new one, which watches nothing.

        Copies and pickles of a watched module then do not record.
        """
        return type(self), ()

    def to_arrays(self) -> dict[str, Any]:
        """Return `h`, `gradients` and `steps`, each a list over steps, as arguments of `evaluate`.

        A step without backward pass has None for its gradient. Raises AttackError: nothing was
        recorded.
        """
        if not self._h:
            raise AttackError("nothing was recorded; call step(rows) before each forward pass")
        gradient_by_step = self._gradients
        gradients = [
            gradient_by_step[step].numpy() if step in gradient_by_step else None
            for step in range(len(self._h))
        ]
        return {
            "h": self._h,
            "gradients": gradients if gradient_by_step else None,
            "steps": self._steps,
        }

    def __call__(self, module: nn.Module, _: Any, output: Any) -> None:
        """Record the output of a forward pass, and register a hook for the gradient on it.

        This is the module's forward hook; torch calls it.

        Raises AttackError: no `step` announced the pass in training, or it has other rows.
        """
        rows = self._rows
        self._rows = None
        if self._handle is None:  # closed, or a copy
            return
        if rows is None:
            if module.training and torch.is_grad_enabled():
                raise AttackError("a recorder watches: call step(rows) before each forward pass")
            return
        if not isinstance(output, Tensor) or output.shape[:1] != rows.shape:
            received = getattr(output, "shape", type(output).__name__)
            raise AttackError(f"step(rows) told of rows {rows.shape}, and the output is {received}")
        copies = 2 if output.requires_grad else 1  # the output, and the gradient on it
        self._bytes_left -= 4 * output.numel() * copies
        if self._bytes_left < 0:
            warnings.warn("the recorder is full, a step is left out; raise megabytes", stacklevel=2)
            return
        step = len(self._h)
        self._h.append(_copy_to_cpu(output).numpy())
        self._steps.append(rows)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._add_gradient(step, gradient))

    def _add_gradient(self, step: int, gradient: Tensor) -> None:
        """Store the gradient of a step, added to what earlier backward passes gave."""
        copy = _copy_to_cpu(gradient)
        self._gradients[step] = copy + self._gradients[step] if step in self._gradients else copy


def _copy_to_cpu(values: Tensor) -> Tensor:
    """Return a detached copy in float32 on the CPU."""
    return values.detach().to("cpu", torch.float32, copy=True)
