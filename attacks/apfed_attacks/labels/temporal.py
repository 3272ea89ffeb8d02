"""A2, temporal: a curious passive reads labels out of the representations of many epochs.

Run by: one passive, or several that pool what they have. Noise that is fresh in every epoch
averages out over a row's releases, so a budget for one release says little about all of them;
noise that is drawn once for each row does not. How a row's representation moved during
training speaks of its label too.

The passive's own gradients, which moved the representation as well, are not subtracted: what
it contributed is protected in the transcript, and the attack reads the transcript only.

Letters: E epochs, N rows, D numbers of a representation.
"""

import torch
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Guess
from apfed_attacks.labels.completion import LabelProbe, guess_labels
from apfed_attacks.view import AdversaryView, released_positions, representations

__all__ = ["Temporal"]


class Temporal(LabelProbe):
    """Model completion on what the epochs give together.

    Attacks use the mean of all epochs, the mean of the last ones, the difference of the last to
    the first, all epochs side by side (as principal components), and the mean of all together
    with the own features x. Baselines are those of model completion; its own figures on the last
    epoch alone are the reference.

    Attributes:
        window: epochs in the mean of the last ones.
    """

    name = "temporal"

    window: int = Field(10, ge=2)
    components: int = Field(64, ge=2)

    def applicable(self, view: AdversaryView) -> str | None:
        if (reason := super().applicable(view)) is not None:
            return reason
        if len(view.epochs) < 2:
            return "only one epoch was released, so there is no course of time to read"
        if len(view.epochs) < view.epochs[-1] - view.epochs[0] + 1:
            return (
                f"the transcript kept {len(view.epochs)} of {view.epochs[-1] + 1} epochs, which "
                "would make the attack look weaker than it is; set transcript.keep to all"
            )
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        positions = self.choose(view, released_positions(view), seed)
        h_END = _all_epochs(view, positions)
        columns = {
            "mean of all epochs": h_END.mean(dim=0),
            "mean of the last epochs": h_END[-self.window :].mean(dim=0),
            "last minus first epoch": h_END[-1] - h_END[0],
            "all epochs": h_END.transpose(0, 1).flatten(1),
        }
        attacks = {name: self.scaled(values, seed) for name, values in columns.items()}
        x_NF = self.own(view, positions, seed)
        return guess_labels(
            view, positions, attacks=attacks, baselines={"x": x_NF}, seed=seed,
            fused={"mean of all epochs": (attacks["mean of all epochs"], x_NF)},
            references={"the last epoch": self.scaled(h_END[-1], seed)},
        )  # fmt: skip


def _all_epochs(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return (E, N, D); where a row was in no batch of an epoch, its mean over the others."""
    epochs = [representations(view, epoch) for epoch in view.epochs]
    present_EN = torch.stack([torch.isin(positions, seen.positions) for seen in epochs])
    h_END = epochs[0].z.new_zeros(len(epochs), len(positions), epochs[0].z.shape[1])
    for h_ND, present_N, seen in zip(h_END, present_EN, epochs, strict=True):
        h_ND[present_N] = seen.at(positions[present_N])
    present_EN = present_EN.to(h_END.device)
    mean_ND = h_END.sum(dim=0) / present_EN.sum(dim=0)[:, None]
    return torch.where(present_EN[:, :, None], h_END, mean_ND)
