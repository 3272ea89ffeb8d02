"""The per-row L2 clip, differentiable and never above its bound: of representations, of gradients.

Run by: whoever adds noise to rows, before the noise. The sensitivity that a guard states rests
on this bound alone, so it is kept for any finite row: huge, tiny or zero.

Shapes: B rows of a batch, D numbers of a representation, P parameters.
"""

import torch

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ModelError

__all__ = ["clip_gradients", "clip_rows", "onto_ball"]

_EPS = torch.finfo(torch.float64).eps


def onto_ball(wide_BD: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the rows with each of a norm above `bound` scaled onto it, up to rounding.

    Checks nothing, so that `torch.func` can trace it. The gradient is that of the map itself: the
    identity for rows within the bound, the projection onto the sphere's tangent, times
    bound / norm, for the others.
    """
    # Scaled by its largest entry a row has a norm in [1, sqrt(D)], so no square overflows or
    # vanishes. The scale is a constant to autograd, rightly: the result does not depend on it.
    largest_B1 = wide_BD.detach().abs().amax(dim=-1, keepdim=True)
    scale_B1 = torch.where(largest_B1 > 0, largest_B1, 1.0)
    scaled_BD = wide_BD / scale_B1
    norm_B1 = torch.linalg.vector_norm(scaled_BD.detach(), dim=-1, keepdim=True)
    over_B1 = norm_B1 > bound / scale_B1
    # Rows that stay get a norm of no consequence, since the gradient of a norm at 0 is NaN.
    unit_BD = torch.where(over_B1, scaled_BD, 1.0)
    onto_BD = unit_BD * (bound / torch.linalg.vector_norm(unit_BD, dim=-1, keepdim=True))
    return torch.where(over_B1, onto_BD, wide_BD)


def clip_rows(h_BD: torch.Tensor, bound: float) -> torch.Tensor:
    """Return `h_BD` in float64 with every row longer than `bound` scaled down onto it.

    Guarantee: the exact norm of each returned row is at most `bound`, also after it is
    rounded to the type of `h_BD`; rows within the bound come back unchanged. To leave room
    for rounding, rows are scaled onto bound (1 - margin), where the margin is a few units
    in the last place (about 5e-7 for float32).

    Args:
        h_BD: float32 or float64, finite.
        bound: C > 0, no unit.

    Raises:
        LocalProtocolError: not a matrix of float32 or float64.
        ModelError: a row holds NaN or an infinity.
    """
    if h_BD.ndim != 2 or h_BD.dtype not in (torch.float32, torch.float64):
        raise LocalProtocolError(
            "representations are a float32 or float64 matrix, one row a person, "
            f"got {h_BD.dtype} of shape {tuple(h_BD.shape)}"
        )
    wide_BD = h_BD.double()
    finite_B = wide_BD.isfinite().all(dim=1)
    if not bool(finite_B.all()):
        raise ModelError(
            f"row {int((~finite_B).nonzero()[0, 0])} of the representations is not finite, so "
            "nothing was released; the encoder has diverged: lower its learning rate or check the "
            "features"
        )
    if not h_BD.numel():
        return wide_BD
    margin = 4 * torch.finfo(h_BD.dtype).eps + (h_BD.shape[1] + 8) * _EPS
    return onto_ball(wide_BD, bound * (1 - margin))


def clip_gradients(gradient_BP: torch.Tensor, bound: float) -> torch.Tensor:
    """Return float64 gradients of examples, each of a norm of at most `bound`.

    One that is not finite becomes zeros: an error here would tell of one example.
    """
    finite_B1 = gradient_BP.isfinite().all(dim=1, keepdim=True)
    inner = bound * (1 - (gradient_BP.shape[1] + 8) * _EPS)
    return onto_ball(torch.where(finite_B1, gradient_BP, 0.0), inner)
