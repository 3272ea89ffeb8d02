"""What a passive optimises, given the active's representations and its own features.

A new objective is one file, its settings class in `secure_apfed.settings.objective`, and one line
here.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from secure_apfed.models import Shape
from secure_apfed.objectives.contrastive import Contrastive, contrastive_loss
from secure_apfed.objectives.reconstruction import Reconstruction
from secure_apfed.settings.model import ModelSettings
from secure_apfed.settings.objective import ObjectiveSettings

__all__ = [
    "OBJECTIVES",
    "Contrastive",
    "contrastive_loss",
    "make_objective",
]

# A module whose call is (z, own features) -> scalar loss, and which says by `row_wise` whether the
# gradient of a row depends on that row's features alone. Any: each takes its own settings.
OBJECTIVES: Mapping[str, Any] = {
    "reconstruction": Reconstruction,
    "contrastive": Contrastive,
}


def make_objective(
    settings: ObjectiveSettings, *, representation: Shape, features: Shape, model: ModelSettings
) -> nn.Module:
    """Build the objective that `settings.name` names for rows of these shapes.

    Raises:
        ModelError: its networks do not fit the shapes.
    """
    objective: nn.Module = OBJECTIVES[settings.name](
        settings, representation=representation, features=features, model=model
    )
    return objective
