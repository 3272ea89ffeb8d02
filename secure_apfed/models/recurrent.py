"""Bidirectional GRUs, one a view of sequences, whose last states are the representation.

Run by: S-FedMV (FedMV, sections 6 and 8.2), and whoever has sequences in a table. A row is flat:
of each view the number of steps in use, then its steps one after another, as
`secure_apfed.data.views` lays them out. Letters: B batch, T steps, C channels, D numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from secure_apfed.errors import ModelError
from secure_apfed.models.network import Shape
from secure_apfed.models.perceptron import Perceptron
from secure_apfed.settings.model import ModelSettings

__all__ = ["Recurrent", "SequenceEncoder"]


class SequenceEncoder(nn.Module):
    """Sequences -> the last state of each direction of each view, side by side.

    Args:
        sequences: (T, C) of each view; size: numbers of one direction.
    """

    def __init__(self, sequences: Sequence[tuple[int, int]], size: int) -> None:
        super().__init__()
        self.sequences = tuple(sequences)
        self.views = nn.ModuleList(
            nn.GRU(channels, size, batch_first=True, bidirectional=True)
            for _, channels in self.sequences
        )

    def parts(self, features_B: Tensor) -> list[Tensor]:
        """Of each view, (B, 2 D)."""
        widths = [1 + steps * channels for steps, channels in self.sequences]
        split = features_B.flatten(1).split(widths, dim=1)
        return [
            _last_states(view, own_BF[:, 0], own_BF[:, 1:].unflatten(1, sequence))
            for view, own_BF, sequence in zip(self.views, split, self.sequences, strict=True)
        ]

    def forward(self, features_B: Tensor) -> Tensor:
        return torch.cat(self.parts(features_B), dim=1)


def _last_states(view: nn.Module, used_B: Tensor, steps_BTC: Tensor) -> Tensor:
    """Of both directions; a sequence without a step counts as one of zeros."""
    if steps_BTC.is_meta:  # there are shapes alone, and no lengths
        _, last_2BD = view(steps_BTC)
    else:
        lengths_B = used_B.round().clamp(1, steps_BTC.shape[1]).long().cpu()
        _, last_2BD = view(
            pack_padded_sequence(steps_BTC, lengths_B, batch_first=True, enforce_sorted=False)
        )
    return torch.cat([last_2BD[0], last_2BD[1]], dim=1)


class Recurrent:
    """A GRU a view and direction, under one linear layer without a bias."""

    def encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Takes rows of `settings.sequences`.

        Raises:
            ModelError: rows of another width.
        """
        width = sum(1 + steps * channels for steps, channels in settings.sequences)
        if not settings.sequences or features != (width,):
            said = f"of {width} columns" if settings.sequences else "of no sequences"
            raise ModelError(
                f"model.sequences: the network gru was told {said}, and rows have the shape "
                f"{features}; say [steps, channels] of each view, which takes 1 + steps * channels "
                "columns"
            )
        return SequenceEncoder(settings.sequences, settings.representation)

    def head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """One linear layer."""
        return nn.Linear(size, classes, bias=False)

    def decoder(self, representation: Shape, features: Shape, settings: ModelSettings) -> nn.Module:
        """That of the perceptron."""
        return Perceptron().decoder(representation, features, settings)
