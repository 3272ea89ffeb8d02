"""The arithmetic of imputation: a passive's fixed projection, and what the active predicts of it.

Run by: each passive (`fixed_projection`, on its own features) and the active (`predicted`, from its
own). Letters: U aligned training rows, F features, D numbers of a projection.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_apfed.models import RandomFeatures
from secure_apfed.seeds import derive_seed, seeded

__all__ = ["fixed_projection", "linear_projection", "predicted"]

Floats = NDArray[np.float64]

_COSINES = 300
_STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)


def linear_projection(features: int, numbers: int) -> nn.Module:
    """A projection of flattened rows that nothing trains, before it is fitted."""
    layer = nn.Linear(features, numbers)
    layer.requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Flatten(), layer)


def fixed_projection(
    features_UF: Tensor, numbers: int, *, principal: bool, seed: int, party: str
) -> nn.Module:
    """Return x -> D numbers, about 1 long in the mean, for a guard with a clip of 1.

    Args:
        features_UF: of its own aligned rows; without `principal` their number of columns alone
            is read.
        numbers: D.
        principal: whether to take the principal components of these rows, or random directions,
            which standardised features leave about 1 long.
        seed: public, of random directions.
        party: whose projection this is.
    """
    x_UF = features_UF.detach().cpu().flatten(1).double()
    size = x_UF.shape[1]
    if principal:
        mean_F = x_UF.mean(0)
        scales, directions_FF = np.linalg.svd((x_UF - mean_F).numpy(), full_matrices=False)[1:]
        length = np.sqrt((scales[:numbers] ** 2).sum() / len(x_UF))
        weight_DF = torch.from_numpy(directions_FF[:numbers] / (length if length > 0 else 1.0))
    else:
        draw = np.random.default_rng(derive_seed(seed, "projection", party))
        weight_DF = torch.from_numpy(
            draw.standard_normal((numbers, size)) / np.sqrt(numbers * size)
        )
        mean_F = torch.zeros(size, dtype=torch.float64)
    projection = linear_projection(size, numbers)
    layer = list(projection.modules())[-1]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[: len(weight_DF)].copy_(weight_DF)
        layer.bias.copy_(-(layer.weight.double() @ mean_F))
    return projection


def predicted(features_UF: Tensor, released_UD: Floats, *, seed: int) -> Floats:
    """Return what the own features say of the released numbers, (U, D).

    Ridge regression on the features and random cosines of them; of a few strengths it takes the one
    with the least error on rows that were left out, one at a time.
    """
    x_UF = features_UF.detach().cpu().flatten(1).double()
    with seeded(seed, "imputed"):
        cosines = RandomFeatures(x_UF.shape[1], _COSINES).double()
    cosines.fit(x_UF)
    phi_UP = cosines(x_UF).numpy()
    mean_D = released_UD.mean(axis=0)
    left_UU, scales, _ = np.linalg.svd(phi_UP, full_matrices=False)
    seen_D = left_UU.T @ (released_UD - mean_D)

    def fitted(strength: float) -> tuple[float, Floats]:
        shrink = scales**2 / (scales**2 + strength)
        fit_UD = left_UU @ (shrink[:, None] * seen_D)
        leverage_U = (left_UU**2) @ shrink
        error_UD = (released_UD - mean_D - fit_UD) / np.clip(1 - leverage_U, 1e-6, None)[:, None]
        return float((error_UD**2).mean()), fit_UD

    _, fit_UD = min((fitted(strength) for strength in _STRENGTHS), key=lambda found: found[0])
    return np.asarray(fit_UD + mean_D, dtype=np.float64)
