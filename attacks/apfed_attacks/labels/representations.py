"""A1 and A2: a curious passive reads labels out of the representations that it got.

Run by: one passive, or several that pool what they have. They complete the model that they lack,
a head, from the few labels that they know; without labels they cluster. In TVFL the
representations are those that the passive itself computed and sent, whose encoder the label
gradients trained (passive model completion; Fu et al., 2022, Label Inference Attacks Against
Vertical Federated Learning). Probes are supervised; `semi_supervised` trains as that paper does.

Letters: E epochs, N rows, D numbers of a representation.
"""

import torch
from pydantic import Field
from torch import Tensor

from apfed_attacks.columns import join_own_columns
from apfed_attacks.interface import Guess
from apfed_attacks.labels.completion import LabelProbe, compute_fresh_columns, guess_labels
from apfed_attacks.view import (
    AdversaryView,
    collect_representations,
    combine_epochs,
    list_released_positions,
)


class ModelCompletion(LabelProbe):
    """The attack A1 on labels: classifiers with known labels, or clusters without any, on the last
    epoch.

    Attacks use the representation h, and h together with the own features x. Baselines: the
    majority class, and the same on x alone and, where h is of the adversary's own network, on what
    this network makes of x before training. Reference: the same on h of the first recorded epoch,
    which shows what training added to the leak; it was released too, so it takes no part in the
    advantage.
    """

    name = "model_completion"

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess labels from the last epoch's representations, alone and with own features."""
        releases = combine_epochs(collect_representations, view, view.epochs)
        positions = self.choose_rows(view, releases["last"].positions, seed)
        h_NF, first_NF = (
            self.scale_columns(releases[name].select_positions(positions), seed)
            for name in ("last", "first")
        )
        x_NF = self.scale_own_columns(view, positions, seed)
        baselines = {"x": x_NF}
        fresh = compute_fresh_columns(view, positions, seed)
        if fresh is not None:
            fresh_NF = self.scale_columns(fresh, seed)
            name = "fresh own network"
            baselines |= {name: fresh_NF, **join_own_columns(name, fresh_NF, x_NF)}
        return guess_labels(
            view,
            positions,
            attacks={"h": h_NF},
            fused={"h": (h_NF, x_NF)},
            baselines=baselines,
            references={"h of the first epoch": first_NF} if len(view.epochs) > 1 else {},
            seed=seed,
        )


class Temporal(LabelProbe):
    """The attack A2 on labels: model completion on the representations of all epochs together.

    Noise that is fresh in every epoch averages out over a row's releases, so a budget for one
    release says little about all of them; noise that is drawn once for each row does not. How a
    row's representation moved during training also depends on its label.

    Attacks use the mean of all epochs, the mean of the last ones, the difference of the last to
    the first, all epochs side by side (as principal components), and the mean of all together
    with the own features x. Baselines are those of model completion (`ModelCompletion`). The
    reference is the same on the last epoch alone.

    Attributes:
        window: epochs in the mean of the last ones.
    """

    name = "temporal"
    needs = ("steps",)

    window: int = Field(10, ge=2)
    components: int = Field(64, ge=2)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why change over epochs cannot be read; None: it can.

        There is one epoch, or some epochs were not recorded.
        """
        reason = super().explain_missing_input(view)
        if reason is not None:
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
        """Guess labels from means over epochs, the change, and all E epochs side by side."""
        positions = self.choose_rows(view, list_released_positions(view), seed)
        h_END = _stack_epochs(view, positions)
        columns = {
            "mean of all epochs": h_END.mean(dim=0),
            "mean of the last epochs": h_END[-self.window :].mean(dim=0),
            "last minus first epoch": h_END[-1] - h_END[0],
            "all epochs": h_END.transpose(0, 1).flatten(1),
        }
        attacks = {name: self.scale_columns(values, seed) for name, values in columns.items()}
        x_NF = self.scale_own_columns(view, positions, seed)
        return guess_labels(
            view,
            positions,
            attacks=attacks,
            baselines={"x": x_NF},
            seed=seed,
            fused={"mean of all epochs": (attacks["mean of all epochs"], x_NF)},
            references={"the last epoch": self.scale_columns(h_END[-1], seed)},
        )


def _stack_epochs(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return the representations of these positions (N,) in every epoch, (E, N, D).

    Where a row was in no batch of an epoch, its mean over the other epochs is used.
    """
    epochs = [collect_representations(view, epoch) for epoch in view.epochs]
    present_EN = torch.stack([torch.isin(positions, observed.positions) for observed in epochs])
    h_END = epochs[0].z.new_zeros(len(epochs), len(positions), epochs[0].z.shape[1])
    for h_ND, present_N, observed in zip(h_END, present_EN, epochs, strict=True):
        h_ND[present_N] = observed.select_positions(positions[present_N])
    present_EN = present_EN.to(h_END.device)
    mean_ND = h_END.sum(dim=0) / present_EN.sum(dim=0)[:, None]
    return torch.where(present_EN[:, :, None], h_END, mean_ND)
