"""A1, semi-supervised: model completion that also learns from the rows without known labels.

Run by: one passive, or several that pool what they have. Where `model_completion` fits its head
to the few labelled rows only, this one trains it with MixMatch (Berthelot et al., 2019), as Fu et
al. (2022, Label Inference Attacks Against Vertical Federated Learning) do: labels of the other
rows are guessed, sharpened and mixed with the known ones. Their settings are the defaults,
but for the number of iterations (they take 25 x 1024). Vectors have no flips and crops: rows are
augmented by noise.

Letters: N observed rows, F columns, B batch, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attacks.completion import (
    LabelProbe,
    chosen_positions,
    guess_labels,
    own_columns,
    standardised,
    why_nothing_to_read,
)
from attacks.interface import AttackError, Guess, Prediction
from attacks.reading import collect, representations
from attacks.view import AdversaryView
from secure_apfed.seeds import seeded

__all__ = ["MixMatch", "SemiSupervised"]


class SemiSupervised(LabelProbe):
    """MixMatch on h, and on h beside the own features x.

    Baselines: the majority class, MixMatch on x with the same labels, and the supervised probes
    on x.

    Attributes:
        rate: of Adam; batch: labelled rows in a step, and as many others.
        temperature, alpha, unlabelled_weight, decay: T, alpha, lambda_u and EMA decay of MixMatch.
        noise: standard deviation of the augmentation, in standard deviations of a column.
        hidden: width of the head's hidden layer.
    """

    name: ClassVar[str] = "semi_supervised"
    suite: ClassVar[tuple[Mapping[str, Any], ...]] = ({"labels_per_class": 4},)

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

    def applicable(self, view: AdversaryView) -> str | None:
        """A passive needs representations that were released and recorded."""
        return why_nothing_to_read(self, view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the labels of the observed rows that are not known."""
        seen = collect(partial(representations, view), reversed(view.epochs))
        positions = chosen_positions(view, seen.positions, self.most_rows, seed)
        h_NF, x_NF = (
            standardised(columns, components=self.components, seed=seed)
            for columns in (seen.at(positions), own_columns(view, positions))
        )
        guess = guess_labels(
            view, positions, attacks={}, baselines={"x": x_NF}, references={}, seed=seed
        )
        labels_N = _labels_of(view, positions)
        unknown_N = torch.isin(positions, guess.positions)
        match = MixMatch(self, view.knowledge.classes, seed, torch.device(view.budget.device))
        scores = {
            name: Prediction(match.scores(torch.from_numpy(columns), labels_N)[unknown_N].numpy())
            for name, columns in (
                ("h", h_NF), ("h and x", np.hstack([h_NF, x_NF])), ("x", x_NF)
            )
        }  # fmt: skip
        baseline = {"MixMatch on x": scores.pop("x")}
        return replace(
            guess,
            attacks={f"MixMatch on {name}": one for name, one in scores.items()},
            baselines={**guess.baselines, **baseline},
        )


def _labels_of(view: AdversaryView, positions: Tensor) -> Tensor:
    """Return (N,): known labels, -1 for the others."""
    known = view.knowledge.labels
    labels_N = torch.full((len(positions),), -1, dtype=torch.int64)
    for position, label in zip(known.positions.tolist(), known.values.tolist(), strict=True):
        labels_N[positions == position] = label
    if not (labels_N >= 0).any():
        raise AttackError(f"{view.name} knows no label of an observed row; raise labels_per_class")
    return labels_N


@dataclass(frozen=True)
class MixMatch:
    """One training of a head with labelled and other rows.

    Attributes:
        options: of the attack; classes: K; seed: of weights, batches and noise.
        device: where it trains.
    """

    options: SemiSupervised
    classes: int
    seed: int
    device: torch.device

    def scores(self, columns_NF: Tensor, labels_N: Tensor) -> Tensor:
        """Return class probabilities (N, K) by the averaged head.

        Args:
            columns_NF: standardised.
            labels_N: -1 where unknown; at least one is known.
        """
        options, rows_NF = self.options, columns_NF.float().to(self.device)
        known, other = (labels_N >= 0).nonzero()[:, 0], (labels_N < 0).nonzero()[:, 0]
        with seeded(self.seed, "attacks", "mixmatch"):
            head = nn.Sequential(
                nn.Linear(rows_NF.shape[1], options.hidden), nn.ReLU(),
                nn.Linear(options.hidden, self.classes),
            ).to(self.device)  # fmt: skip
            average = AveragedModel(head, multi_avg_fn=get_ema_multi_avg_fn(options.decay))
            adam = torch.optim.Adam(head.parameters(), lr=options.rate)
            for step in range(options.iterations):
                labelled = known[torch.randint(len(known), (options.batch,))]
                unlabelled = other[torch.randint(len(other), (options.batch,))]
                target_BK = F.one_hot(labels_N[labelled], self.classes).float().to(self.device)
                loss = self._loss(head, rows_NF[labelled], target_BK, rows_NF[unlabelled],
                                  ramp=(step + 1) / options.iterations)  # fmt: skip
                adam.zero_grad()
                loss.backward()
                adam.step()
                average.update_parameters(head)
        with torch.no_grad():
            scores_NK: Tensor = average(rows_NF).softmax(dim=1).cpu()
        return scores_NK

    def _loss(
        self, head: nn.Module, rows_BF: Tensor, target_BK: Tensor, others_BF: Tensor, *, ramp: float
    ) -> Tensor:
        """Algorithm 1 and Eqs. (2) to (5) of MixMatch, two augmentations, lambda_u rising."""
        options, batch = self.options, len(rows_BF)
        augmented = [self._augmented(others_BF) for _ in range(2)]
        with torch.no_grad():
            guess_BK = torch.stack([head(rows).softmax(dim=1) for rows in augmented]).mean(dim=0)
            sharp_BK = guess_BK ** (1 / options.temperature)
            sharp_BK = sharp_BK / sharp_BK.sum(dim=1, keepdim=True)
        inputs = torch.cat([self._augmented(rows_BF), *augmented])
        targets = torch.cat([target_BK, sharp_BK, sharp_BK])
        order = torch.randperm(len(inputs))
        share = torch.distributions.Beta(options.alpha, options.alpha).sample((len(inputs), 1))
        share = torch.maximum(share, 1 - share).to(self.device)
        mixed = share * inputs + (1 - share) * inputs[order]
        mixed_targets = share * targets + (1 - share) * targets[order]
        logits = head(mixed)
        labelled = F.cross_entropy(logits[:batch], mixed_targets[:batch])
        unlabelled = F.mse_loss(logits[batch:].softmax(dim=1), mixed_targets[batch:])
        return labelled + options.unlabelled_weight * ramp * unlabelled

    def _augmented(self, rows_BF: Tensor) -> Tensor:
        return rows_BF + self.options.noise * torch.randn_like(rows_BF)
