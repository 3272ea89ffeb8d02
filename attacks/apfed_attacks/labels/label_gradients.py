"""Labels out of gradients: a curious passive of TVFL reads the gradients that it got.

Run by: one passive, or several that pool what they have. In joint training the active returns
the gradient of the task loss for each row of a passive's representation, also where it read the
sum of the passives' alone; all of them get the same then. Its direction and length depend on the
row's label (Li et al., 2022, Label Leakage and Protection in Two-party Split Learning). In APFed
no passive ever receives such a gradient.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.labels.completion import LabelProbe, guess_labels
from apfed_attacks.view import AdversaryView, Observed, collect_gradients, combine_epochs
from secure_apfed.exchange import Kind


class LabelGradients(LabelProbe):
    """An attack on labels by classifiers with known labels, or clusters without any, on gradients.

    Attacks use direction and length of the gradients of the first and of the last recorded epoch,
    and of their mean over many epochs. The first and the mean are also used together with the own
    features x. Baselines are those of model completion: the majority class, and classifiers or
    clusters on x.
    """

    name = "label_gradients"
    needs = ("gradients",)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why this view has no gradients of the task loss; None: it has some."""
        return explain_missing_gradients(view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess labels from direction and length of the gradients of the first and last epoch, and
        of their mean.
        """
        gradients = gradients_over_time(view)
        positions = self.choose_rows(view, gradients["first epoch"].positions, seed)
        x_NF = self.scale_own_columns(view, positions, seed)
        columns = {
            f"gradients of the {name}": self.scale_columns(
                _join_direction_and_length(observed.select_positions(positions)), seed
            )
            for name, observed in gradients.items()
        }
        fused = {
            name: (columns_NF, x_NF) for name, columns_NF in columns.items() if "last" not in name
        }
        return guess_labels(
            view, positions, attacks=columns, fused=fused, baselines={"x": x_NF}, seed=seed
        )


class GradientDirection(LabelProbe):
    """An attack that names a row by the known row whose gradient has the smallest angle to its own.

    Gradients of rows of one class have nearly the same direction, so one known row of each class is
    enough (Li et al., Section 3.2, there for two classes).

    Attacks: the gradients of the first and of the last kept epoch, and their mean over many.
    Baselines: the majority class, and probes on the own features x with the same labels.
    """

    name = "gradient_direction"
    needs = ("gradients",)
    suite = ({"labels_per_class": 1}, {"labels_per_class": 4})

    labels_per_class: int = Field(1, ge=1)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why this view has no gradients of the task loss; None: it has some."""
        return explain_missing_gradients(view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Score each class by the largest cosine to a known row's gradient."""
        over_epochs = gradients_over_time(view)
        positions = self.choose_rows(view, over_epochs["first epoch"].positions, seed)
        guess = self.from_own_columns(view, positions, seed)
        attacks = {
            f"direction in the {name}": _score_by_cosine(view, observed, guess.positions)
            for name, observed in over_epochs.items()
        }
        return replace(guess, attacks=attacks)


def gradients_over_time(view: AdversaryView) -> dict[str, Observed]:
    """Return each position's gradient in the "first epoch" and the "last epoch".

    With three epochs or more there is also the "mean of all epochs".
    """
    epochs = view.epochs_with(Kind.GRADIENTS)
    names = {"first": "first epoch", "last": "last epoch", "mean": "mean of all epochs"}
    gradients = {
        names[name]: observed
        for name, observed in combine_epochs(collect_gradients, view, epochs).items()
    }
    if len(epochs) == 1:  # it is the first one
        del gradients["last epoch"]
    return gradients


def explain_missing_gradients(view: AdversaryView) -> str | None:
    """Return why this view has no gradients of the task loss; None: it has some."""
    if not view.description.returns_gradients:
        return f"{view.description}: a passive receives no gradient of the task loss"
    if not view.epochs_with(Kind.GRADIENTS):
        return "the transcript kept no gradients; set transcript.keep to first_and_last or all"
    return None


def _join_direction_and_length(gradient_ND: Tensor) -> Tensor:
    """Return each row's direction and the logarithm of its length, (N, D + 1)."""
    length_N = gradient_ND.norm(dim=1, keepdim=True)
    smallest = torch.finfo(gradient_ND.dtype).tiny
    return torch.cat([F.normalize(gradient_ND, dim=1), length_N.clamp(min=smallest).log()], dim=1)


def _score_by_cosine(view: AdversaryView, observed: Observed, positions: Tensor) -> Prediction:
    """Score each class by the largest cosine to the gradient of a known row of that class.

    The score is -1 where no such row was observed.

    `observed`: the gradients. `positions`: alignment positions (N,) of the rows to score. Letters:
    n known rows, K classes.
    """
    known = view.knowledge.labels
    is_observed_n = torch.isin(known.positions, observed.positions)
    known_nD = F.normalize(
        observed.select_positions(known.positions[is_observed_n]).double(), dim=1
    )
    cosine_Nn = F.normalize(observed.select_positions(positions).double(), dim=1) @ known_nD.T
    labels_n = known.values[is_observed_n]
    scores_NK = np.full((len(positions), view.knowledge.classes), -1.0)
    for label in labels_n.unique().tolist():
        scores_NK[:, label] = cosine_Nn[:, labels_n == label].amax(dim=1).numpy(force=True)
    return Prediction(scores_NK)
