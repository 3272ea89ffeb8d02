"""A passive whose objective is a black box: a function (step, rows, z) -> gradient, of any
framework.

Run by: the passive alone. The returned gradient is checked: one row for each row of z, of z's
shape, real and finite. Then it is weighted, defended, clipped, noised and summed as that of any
passive (`secure_apfed.methods.session_sum`), and the function is called no more often.

Unknown properties get no guarantee. A row's gradient may depend on other rows, so noise under a sum
is charged for a whole batch; and the state that the code keeps between steps is not bounded.

Letters: B rows of a batch, N people of the alignment.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from secure_apfed.contract import PassiveTerms
from secure_apfed.errors import ModelError
from secure_apfed.settings import BlackBoxSettings

GradientFunction: TypeAlias = Callable[[int, NDArray[np.int64], NDArray[np.floating]], Any]
"""(step, rows, z) -> gradient. `step`: number of the run's step, rising; `rows`: (B,), positions in
the party's own list of IDs; `z`: the received representations, (B, *shape), float32 or float64, a
copy. It returns an array or a tensor of z's shape: of each row the gradient of that row's own loss,
not divided by B."""


class BlackBox:
    """A passive's trainer whose gradients come from the party's own code.

    It stands in for `PassiveTrainer`. Nothing is known about the code, so every answer is checked.
    """

    def __init__(
        self, owner: str, compute_gradient: GradientFunction, *, rows_N: Tensor, ids: Sequence[str]
    ) -> None:
        """Take the party's gradient function, and call its `prepare(ids)` if it has one.

        Args:
            owner: name of the passive, for errors.
            compute_gradient: the party's function, (step, rows, z) -> gradient; its method
                `prepare(ids)`, if any, is called once.
            rows_N: position in the party's own list of each aligned person, (N,); -1: the party
                does not know that person, and the function is not called for it.
            ids: the party's own list.
        """
        self._owner = owner
        self._compute_gradient = compute_gradient
        # The code looks its features up itself; it only gets positions in the party's list.
        self.features_N = rows_N
        prepare = getattr(compute_gradient, "prepare", None)
        if callable(prepare):
            prepare(tuple(ids))

    def train_on_rows(self, step: int, rows_B: Tensor, z_B: Tensor, *, weight: float) -> Tensor:
        """Return the party's gradient of each row's own loss, multiplied by `weight`.

        Args:
            step: number of the run's step.
            rows_B: B positions in the alignment.
            z_B: the representations received for them, (B, *shape).
            weight: lambda_p, the weight of this passive p in the joint loss.

        Raises ModelError: the code fails, changes z, or returns no gradient of z's shape.
        """
        # The code gets a copy; the original shows whether it was changed in place.
        z_before = z_B.detach().cpu().numpy()
        z_passed = z_before.copy()
        try:
            gradient = self._compute_gradient(step, self.features_N[rows_B].numpy(), z_passed)
        except Exception as error:
            raise ModelError(
                f"{self._owner}: its gradient failed at step {step}, for {len(z_before)} rows and "
                f"z of shape {z_before.shape}: {type(error).__name__}: {error}"
            ) from error
        if not np.array_equal(z_passed, z_before):
            raise ModelError(
                f"{self._owner}: its gradient changes z in place; take z.copy(), or operations "
                "that return another array"
            )
        return self._check_gradient(gradient, z_B) * weight

    def _check_gradient(self, gradient: Any, z_B: Tensor) -> Tensor:
        """Check the gradient that the party's function returned; return it as a tensor like z.

        `z_B`: the representations for which it was computed. Raises ModelError: the gradient is no
        array of finite real numbers with z's shape; the error's text says what was returned.
        """
        shape = tuple(z_B.shape)
        expected = f"{self._owner}: its gradient returns a numpy array or a tensor of shape {shape}"
        if not isinstance(gradient, np.ndarray | Tensor):
            advice = {"NoneType": "; end it with return", "list": "; wrap it in np.array(...)"}
            type_name = type(gradient).__name__
            raise ModelError(f"{expected}, as z is; got {type_name}{advice.get(type_name, '')}")
        if tuple(gradient.shape) != shape:
            raise ModelError(
                f"{expected}: one row for each row of z, in the same order, with as many numbers; "
                f"got {tuple(gradient.shape)}"
            )
        is_real = isinstance(gradient, Tensor) or gradient.dtype.kind == "f"
        if not is_real or (isinstance(gradient, Tensor) and not gradient.is_floating_point()):
            raise ModelError(
                f"{expected} of real floating-point numbers; got {gradient.dtype}; convert it, as "
                "with .astype(np.float32)"
            )
        if isinstance(gradient, np.ndarray):
            with np.errstate(over="ignore"):  # what is too large is refused below
                gradient = torch.from_numpy(np.ascontiguousarray(gradient, dtype=np.float64))
        gradient_B: Tensor = gradient.detach().cpu().to(z_B.dtype)
        if not bool(gradient_B.isfinite().all()):
            wrong_row_count = int((~gradient_B.isfinite()).flatten(1).any(1).sum())
            raise ModelError(
                f"{expected} of finite numbers; {wrong_row_count} of {len(gradient_B)} rows are "
                "NaN or infinite; lower its learning rate, or mend its loss"
            )
        return gradient_B

    def tensors(self) -> dict[str, Tensor]:
        """Return no tensors: the code has its own state, which no checkpoint stores."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load nothing; see `tensors`."""


def find_black_boxes(passives: Mapping[str, PassiveTerms]) -> tuple[str, ...]:
    """Return the names of the passives whose terms declare a black box: gradients by own code."""
    return tuple(
        name for name, terms in passives.items() if isinstance(terms.objective, BlackBoxSettings)
    )


def describe_black_boxes(names: Iterable[str]) -> list[str]:
    """Return a sentence on each of these passives: what is not known about its gradients.

    It also says that noise is charged for a whole batch therefore.
    """
    return [
        f"{name} is a black box: shape, finite numbers, norm and counts of its gradients are "
        "checked; whether a row's gradient reads that row alone is not known, so noise is charged "
        "for a whole batch; what it keeps between steps is bounded by nothing"
        for name in names
    ]
