"""What the active's model is made of, whatever method trains it, and the gradient of Eq. (9)."""

import copy

from torch import Tensor, nn

__all__ = ["EVERY", "ActiveNetworks", "joint_loss", "predictor_of"]

EVERY = slice(None)
"""All rows of a batch."""


class ActiveNetworks(nn.Module):
    """f (encoder), g (head), and the projection that is sent (None: the encoder's output)."""

    def __init__(
        self, encoder: nn.Module, head: nn.Module, projection: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.projection = encoder, head, projection

    def forward(
        self, features_B: Tensor, sent: Tensor | slice | None = EVERY
    ) -> tuple[Tensor, Tensor | None]:
        """Return scores (B, K), and the representations of the rows `sent`; None: of none.

        A representation may be a large map, so rows are picked after the projection.
        """
        h_B = self.encoder(features_B)
        scores_BK = self.head(h_B)
        if sent is None:
            return scores_BK, None
        projected_B = h_B if self.projection is None else self.projection(h_B)
        return scores_BK, projected_B[sent]


def predictor_of(networks: ActiveNetworks | None) -> nn.Module | None:
    """A copy on the CPU of what predicts, features -> class scores; None where nothing does."""
    if networks is None:
        return None
    return copy.deepcopy(nn.Sequential(networks.encoder, networks.head)).cpu().eval()


def joint_loss(task: Tensor, z_A: Tensor, gradient_A: Tensor) -> Tensor:
    """A scalar whose gradient is Eq. (9)'s: that of the task, and `gradient_A` through z."""
    return task + (gradient_A * z_A).sum()
