"""A1, semi-supervised: model completion that also learns from the rows without known labels.

Run by: one passive, or several that pool what they have. It trains the head with MixMatch
(Berthelot et al., 2019), as Fu et al. (2022, Label Inference Attacks Against Vertical Federated
Learning) do: labels of the other rows are guessed, sharpened and mixed with the known ones. Their
settings are the defaults, but for the number of iterations (they take 25 x 1024), and rows are
augmented by noise, since vectors have no flips and crops.

In joint training (TVFL) the passive's bottom model is its own: with `own_network` it puts the head
on this network and trains both further on its own features, which is that paper's passive attack.

Letters: N observed rows, F columns, D numbers of h, B batch, K classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from apfed_attacks.columns import join_own_columns, select_own_columns
from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.completion import (
    LabelProbe,
    apply_in_parts,
    collect_known_labels,
    copy_own_networks,
    guess_labels,
)
from apfed_attacks.labels.label_gradients import explain_missing_gradients, gradients_over_time
from apfed_attacks.view import AdversaryView, AttackError, collect_representations, combine_epochs
from secure_apfed.base.seeds import derive_seed, seed_draws

_TRAINED_FURTHER = "own network, trained further"
_FRESH = "own network, fresh weights"


class SemiSupervised(LabelProbe):
    """An attack on labels by MixMatch (semi-supervised training) on representations h.

    It also learns from h beside the own features x, with several weights. Baselines: the majority
    class, MixMatch on x with the same labels, and supervised classifiers on x. For the own network
    the baseline is the same network from fresh weights, trained in the same way.

    Attributes:
        batch: number of labelled rows in a step, and of others.
        temperature, alpha, unlabelled_weight, decay: T, alpha, lambda_u and EMA decay of MixMatch.
        noise: standard deviation of the augmentation, in standard deviations of a column.
        own_network: whether the adversary reads no h, and trains its own network further, below the
            head.
    """

    name = "semi_supervised"
    suite = ({"labels_per_class": 4}, {"labels_per_class": 4, "own_network": True})

    labels_per_class: int = Field(4, ge=1)
    iterations: int = Field(1_500, ge=1)
    rate: float = Field(2e-3, gt=0)
    batch: int = Field(16, ge=1)
    temperature: float = Field(0.8, gt=0, le=1)
    alpha: float = Field(0.75, gt=0)
    unlabelled_weight: float = Field(50.0, ge=0)
    decay: float = Field(0.999, ge=0, lt=1)
    noise: float = Field(0.1, ge=0)
    hidden: int = Field(128, ge=1)
    own_network: bool = False

    @property
    def is_exchangeable(self) -> bool:
        """Whether the attack reads releases, so that exchanging these between rows makes a decoy.

        The own network is no release: its decoy is the same network from other fresh weights.
        """
        return not self.own_network

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why there is nothing to learn from; None: there is something.

        There are no releases or gradients, or the recording holds no network of a member to train
        further.
        """
        if self.own_network and view.description.opens == "representations":
            reason = explain_missing_gradients(view)
        else:
            reason = super().explain_missing_input(view)
        missing = [name for name in view.parties if name not in view.networks]
        if reason is None and self.own_network and missing:
            return (
                f"{view.name} has no network to train further: the recording holds no encoder of "
                f"{', '.join(missing)} ({view.description})"
            )
        return reason

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Train MixMatch on h, or the own network further, and on x as a baseline; score the
        unknown rows.
        """
        if view.description.opens == "representations":
            # The own network reads no release; the gradients say which rows it was trained on.
            observed = gradients_over_time(view)["first epoch"]
        else:
            observed = combine_epochs(collect_representations, view, view.epochs)["last"]
        positions = self.choose_rows(view, observed.positions, seed)
        x_NF = self.scale_own_columns(view, positions, seed)
        guess = guess_labels(view, positions, baselines={"x": x_NF}, seed=seed)
        labels_N = collect_known_labels(view, positions)
        if not (labels_N >= 0).any():
            raise AttackError(
                f"{view.name} knows no label of an observed row; raise labels_per_class"
            )
        match = partial(self.mix_match, view, labels_N)
        baselines = dict[str, Tensor]()
        decoys = dict[str, Tensor]()
        if not view.is_decoy:
            baselines["MixMatch on x"] = match(torch.from_numpy(x_NF), seed)
        if self.own_network:
            own_NF = select_own_columns(view, positions)
            fresh = partial(copy_own_networks, view, has_fresh_weights=True)
            attacks = {_TRAINED_FURTHER: match(own_NF, seed, partial(copy_own_networks, view))}
            baselines[_FRESH] = match(own_NF, seed, fresh)
            decoys[_TRAINED_FURTHER] = match(own_NF, derive_seed(seed, "decoy"), fresh)
        else:
            h_NF = self.scale_columns(observed.select_positions(positions), seed)
            attacks = {
                f"MixMatch on {name}": match(torch.from_numpy(columns), seed)
                for name, columns in {"h": h_NF, **join_own_columns("h", h_NF, x_NF)}.items()
            }
        select_unknown = partial(_select_predictions, torch.isin(positions, guess.positions))
        return replace(
            guess,
            attacks=select_unknown(attacks),
            baselines={**guess.baselines, **select_unknown(baselines)},
            decoys=select_unknown(decoys),
        )

    def mix_match(
        self,
        view: AdversaryView,
        labels_N: Tensor,
        columns_NF: Tensor,
        seed: int,
        build_bottom: Callable[[Tensor], nn.Module] | None = None,
    ) -> Tensor:
        """Train MixMatch on all rows; return class probabilities (N, K): N rows, K classes.

        They are computed with the moving average of the network's weights.

        Args:
            view: view of the adversary, for the number of classes and the device.
            labels_N: known labels, at least one; -1 where unknown.
            columns_NF: columns of all rows; standardised unless `build_bottom` is given.
            seed: seed of all random draws.
            build_bottom: function of the rows that returns a network to be trained below the head;
                None: the head reads the columns.
        """
        classes = view.knowledge.classes
        device = view.device
        rows_NF = columns_NF.float().to(device)
        known = (labels_N >= 0).nonzero()[:, 0]
        other = (labels_N < 0).nonzero()[:, 0]
        with seed_draws(seed, "attacks", "mixmatch"):
            bottom = nn.Identity() if build_bottom is None else build_bottom(rows_NF)
            head = nn.Sequential(
                bottom,
                nn.Linear(bottom(rows_NF[:1]).shape[1], self.hidden),  # as wide as one row's output
                nn.ReLU(),
                nn.Linear(self.hidden, classes),
            ).to(device)
            # The augmentation's standard deviation by column; standardised columns get the same.
            column_deviation_F = (
                torch.ones_like(rows_NF[0]) if build_bottom is None else rows_NF.std(dim=0)
            )
            deviation_F = self.noise * column_deviation_F
            average = AveragedModel(head, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
            adam = torch.optim.Adam(head.parameters(), lr=self.rate)
            for step in range(self.iterations):
                labelled = known[torch.randint(len(known), (self.batch,))]
                unlabelled = other[torch.randint(len(other), (self.batch,))]
                target_BK = F.one_hot(labels_N[labelled], classes).float().to(device)
                loss = self._compute_loss(
                    head,
                    rows_NF[labelled],
                    target_BK,
                    rows_NF[unlabelled],
                    deviation_F,
                    ramp=(step + 1) / self.iterations,
                )
                adam.zero_grad()
                loss.backward()
                adam.step()
                average.update_parameters(head)
        return apply_in_parts(average, rows_NF).softmax(dim=1).cpu()

    def _compute_loss(
        self,
        head: nn.Module,
        rows_BF: Tensor,
        target_BK: Tensor,
        others_BF: Tensor,
        deviation_F: Tensor,
        *,
        ramp: float,
    ) -> Tensor:
        """Return MixMatch's loss (Algorithm 1, Eqs. (2) to (5)), with two augmentations.

        Args:
            head: the network that is trained.
            rows_BF, target_BK: labelled rows, and their one-hot labels.
            others_BF: unlabelled rows.
            deviation_F: standard deviation of the augmentation by column.
            ramp: factor of lambda_u, which rises from 0 to 1.
        """
        batch = len(rows_BF)
        # The guessed label of an unlabelled row is the mean prediction over its augmentations,
        # sharpened.
        augmented = [_augment_rows(others_BF, deviation_F) for _ in range(2)]
        with torch.no_grad():
            guess_BK = torch.stack([head(rows).softmax(dim=1) for rows in augmented]).mean(dim=0)
            sharp_BK = guess_BK ** (1 / self.temperature)
            sharp_BK = sharp_BK / sharp_BK.sum(dim=1, keepdim=True)
        inputs = torch.cat([_augment_rows(rows_BF, deviation_F), *augmented])
        targets = torch.cat([target_BK, sharp_BK, sharp_BK])
        order = torch.randperm(len(inputs))
        # MixUp, where each row's own share is the larger one.
        share = torch.distributions.Beta(self.alpha, self.alpha).sample((len(inputs), 1))
        share = torch.maximum(share, 1 - share).to(rows_BF.device)
        mixed = share * inputs + (1 - share) * inputs[order]
        mixed_targets = share * targets + (1 - share) * targets[order]
        logits = head(mixed)
        labelled = F.cross_entropy(logits[:batch], mixed_targets[:batch])
        unlabelled = F.mse_loss(logits[batch:].softmax(dim=1), mixed_targets[batch:])
        return labelled + self.unlabelled_weight * ramp * unlabelled


def _select_predictions(
    is_selected_N: Tensor, scores_by_name: Mapping[str, Tensor]
) -> dict[str, Prediction]:
    """Return the selected rows of class scores (N, K) as predictions, by name."""
    return {
        name: Prediction(scores_NK[is_selected_N].numpy())
        for name, scores_NK in scores_by_name.items()
    }


def _augment_rows(rows_BF: Tensor, deviation_F: Tensor) -> Tensor:
    """Return rows with Gaussian noise, which has this standard deviation by column."""
    return rows_BF + deviation_F * torch.randn_like(rows_BF)
