"""Autoencoders with early stopping; one's code may be trained to resemble another's for some rows.

Run by: every party on its own rows, and the active on the parties' codes (APC-VFL, Eqs. 1 and 5).
Letters: N rows, n of them with a code to resemble, F features, D numbers of a code.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from secure_apfed.base.seeds import seed_draws
from secure_apfed.data import UNLABELLED
from secure_apfed.errors import DataError, ModelError
from secure_apfed.learning.descent import Compute, make_eager_class
from secure_apfed.networks.models import Enriched, Shape, family_for, output_shape
from secure_apfed.settings import THE_ACTIVE, ModelSettings, Settings, protects

_ADAM = make_eager_class(torch.optim.Adam)
_LOSSES = {"mse": F.mse_loss, "mae": F.l1_loss}
Floats = NDArray[np.float64]
FoldScore: TypeAlias = Literal["accuracy", "f1", "f1_macro", "f1_weighted"]
"""Names of scores of a cross-validation fold; "f1" is the F1 of class 1 of two."""
_MAX_ITERATIONS = 5000
"""Largest number of iterations of logistic regression."""


class DistillationSettings(Settings):
    """The settings of autoencoders with early stopping, and of a student's loss.

    The student's code learns to resemble a joint code, which was made with other parties' data. The
    defaults are APC-VFL's (section 4, Table 3, Appendix B); its value of lambda is not legible.

    Attributes:
        loss: the loss between the two codes of an aligned row.
        weight: lambda of Eq. (5), the weight of that loss.
        classifier: the model that reads the student's code: logistic regression as in the papers,
            or the strongest local model, chosen by held-out labels. A model of the active's own
            columns predicts instead if the latter is not significantly better on these labels.
        epochs: the largest number of epochs. Training ends after 10 epochs without a lower loss on
            a held-out tenth of the rows, and the best weights are taken.
        learning_rate: the learning rate of Adam.
        batch_size: the number of rows in one step.
    """

    loss: Annotated[Literal["mse", "mae"], THE_ACTIVE, protects("nobody")] = "mse"
    weight: Annotated[float, Field(ge=0), THE_ACTIVE, protects("nobody")] = 1.0
    classifier: Annotated[Literal["logistic", "strongest"], THE_ACTIVE, protects("nobody")] = (
        "logistic"
    )
    epochs: Annotated[int, protects("nobody")] = Field(200, ge=1)
    learning_rate: Annotated[float, protects("nobody")] = Field(1e-3, gt=0)
    batch_size: Annotated[int, protects("nobody")] = Field(128, ge=1)

    patience: ClassVar[int] = 10
    held_out: ClassVar[float] = 0.1

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return the fields that a distilling method's settings give; defaults otherwise."""
        return cls.model_validate(settings.model_dump(include=set(cls.model_fields)))


@dataclass(frozen=True, eq=False)
class TargetCodes:
    """Target codes for some rows, which the codes of an autoencoder learn to resemble.

    Attributes:
        rows: indices of the n rows with a target code.
        codes: their target codes, D numbers each, (n, D).
    """

    rows: Tensor
    codes: Tensor


class Autoencoder(nn.Module):
    """An encoder from a row to a code, and a decoder back to the row."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        """Register encoder and decoder as submodules."""
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    @torch.no_grad()
    def encode_rows(self, features_NF: Tensor) -> Tensor:
        """Return the codes of N rows, (N, D), without gradients."""
        codes_ND: Tensor = self.encoder(features_NF)
        return codes_ND


def new_autoencoder(
    owner: str, name: str, model: ModelSettings, features: Shape, *, seed: int, compute: Compute
) -> Autoencoder:
    """Return an untrained autoencoder, whose initial weights depend on owner, name and seed.

    If the configured encoder returns the row beside its code, only the part that makes the code is
    used.

    Args:
        owner: the party's name.
        name: the network's name among the party's autoencoders, such as "g1".
        model: settings of the networks.
        features: shape of one row.
        seed: random seed of the weights.
        compute: device and precision.
    """
    family = family_for(model, features)
    with seed_draws(seed, owner, name):
        encoder = family.make_encoder(features, model)
        encoder = encoder.code if isinstance(encoder, Enriched) else encoder
        decoder = family.make_decoder(output_shape(encoder, features), features, model)
    network = Autoencoder(encoder, decoder)
    network.to(compute.device, compute.dtype)
    return network


def fit_autoencoder(
    network: Autoencoder,
    features_NF: Tensor,
    settings: DistillationSettings,
    *,
    owner: str,
    seed: int,
    target_codes: TargetCodes | None = None,
) -> int:
    """Train an autoencoder with early stopping; return the number of epochs.

    Training stops when the loss on held-out rows has not fallen for `patience` epochs. The network
    then has the weights of the best epoch, and is frozen.

    The loss of a row is its reconstruction loss. If the row has a target code, `settings.weight`
    times the distance of the two codes is added.

    Args:
        network: the untrained autoencoder, changed in place.
        features_NF: F features of N rows.
        settings: epochs, batches, learning rate and weight of the codes' distance.
        owner: the party's name; with `seed` it determines batches and held-out rows.
        seed: the party's random seed.
        target_codes: target codes of some rows; None: the network only reconstructs.

    Raises ModelError: there are fewer than two rows, or training diverges.
    """
    if len(features_NF) < 2:
        raise ModelError(f"{owner}: an autoencoder takes two rows or more, got {len(features_NF)}")
    loss = _AutoencoderLoss(network, features_NF, settings, target_codes)
    generator = seed_draws(seed, owner, "autoencoder").get_generator()
    order_N = torch.randperm(len(features_NF), generator=generator).to(features_NF.device)
    validation_count = max(1, round(settings.held_out * len(order_N)))
    validation_V = order_N[:validation_count]
    rows_N = order_N[validation_count:]
    adam = _ADAM(network.parameters(), lr=settings.learning_rate, fused=True)
    best_loss = torch.inf
    best_weights = copy.deepcopy(network.state_dict())
    epoch_count = 0
    best_epoch = 0
    while epoch_count < settings.epochs and epoch_count - best_epoch < settings.patience:
        epoch_count += 1
        batch_order = torch.randperm(len(rows_N), generator=generator).to(rows_N.device)
        shuffled_N = rows_N[batch_order]
        for rows_B in shuffled_N.split(settings.batch_size):
            adam.zero_grad()
            loss(rows_B).backward()
            adam.step()
        with torch.no_grad():
            validation_loss = float(loss(validation_V))
        if math.isnan(validation_loss):
            raise ModelError(
                f"{owner}: training of an autoencoder diverged; lower method.learning_rate"
            )
        if validation_loss < best_loss:
            best_loss = validation_loss
            best_epoch = epoch_count
            best_weights = copy.deepcopy(network.state_dict())
    network.load_state_dict(best_weights)
    network.requires_grad_(requires_grad=False)
    return epoch_count


class _AutoencoderLoss:
    """The loss of an autoencoder on batches: reconstruction, and distance to target codes.

    Source: APC-VFL, Eqs. (1) and (5).
    """

    def __init__(
        self,
        network: Autoencoder,
        features_NF: Tensor,
        settings: DistillationSettings,
        target_codes: TargetCodes | None,
    ) -> None:
        """Arrange the target codes by row, so that a batch of any rows finds its own.

        `features_NF`: F features of N rows. `settings`: kind and weight of the codes' distance.
        `target_codes`: target codes of some rows; None: there are none.
        """
        self._network = network
        self._features_NF = features_NF
        self._weight = settings.weight
        self._compute_code_loss = _LOSSES[settings.loss]
        row_count = len(features_NF)
        self._has_target_N = torch.zeros(row_count, dtype=torch.bool, device=features_NF.device)
        self._targets_ND = features_NF.new_zeros(row_count, 0)
        # Rows without a target keep zeros, which the mask excludes.
        if target_codes is not None and self._weight:
            self._has_target_N[target_codes.rows] = True
            self._targets_ND = features_NF.new_zeros(row_count, target_codes.codes.shape[1])
            self._targets_ND[target_codes.rows] = target_codes.codes.to(features_NF)

    def __call__(self, rows_B: Tensor) -> Tensor:
        """Return the mean loss of these rows: reconstruction plus weighted distance of codes."""
        codes_BD = self._network.encoder(self._features_NF[rows_B])
        total = F.mse_loss(self._network.decoder(codes_BD), self._features_NF[rows_B])
        has_target_B = self._has_target_N[rows_B]
        if bool(has_target_B.any()):
            code_loss = self._compute_code_loss(
                codes_BD[has_target_B], self._targets_ND[rows_B[has_target_B]]
            )
            # Eq. (5) is the loss of one row; rows without a target count as 0 in the mean.
            total = total + self._weight * code_loss * has_target_B.to(total.dtype).mean()
        return total


# Compares a classifier on the code of some columns with one on the columns themselves.
#
# Run by: a party with labels, alone, to choose an encoder before a run.
# Source: APC-VFL, Appendix F (Algorithm 1, Eqs. 11 and 12). The classifier is the paper's, logistic
# regression (section 5), and reads columns and codes as they come: the autoencoder reads
# standardised columns, and nothing is scaled behind it.
#
# Letters: N rows, F features, D numbers of a code, k folds.


@dataclass(frozen=True, eq=False)
class EncoderQuality:
    """The scores of a classifier on a table's columns, and on an autoencoder's code of them.

    Attributes:
        column_scores, code_scores: scores on columns and on codes, 0 to 1, one for each of the same
            folds.
        threshold: the largest loss of the mean score that is accepted (tau of APC-VFL, Eq. 12).
        epoch_count: number of epochs for which the autoencoder was trained.
    """

    column_scores: Floats
    code_scores: Floats
    threshold: float
    epoch_count: int

    @property
    def score_difference(self) -> float:
        """The mean score on the code minus the mean score on the columns."""
        return float(self.code_scores.mean() - self.column_scores.mean())

    @property
    def is_good_enough(self) -> bool:
        """True if the mean score on the code is not lower than on the columns by the threshold.

        APC-VFL (Eq. 12) takes the absolute difference, so it would also reject a much better code.
        """
        return self.score_difference > -self.threshold


def measure_encoder_quality(
    features_NF: Tensor,
    labels_N: Tensor,
    *,
    model: ModelSettings,
    settings: DistillationSettings,
    owner: str,
    seed: int,
    compute: Compute,
    threshold: float = 0.02,
    folds: int = 10,
    score: FoldScore = "accuracy",
) -> EncoderQuality:
    """Train an autoencoder on all rows; cross-validate a classifier on columns and on codes.

    Args:
        features_NF: F features of N rows.
        labels_N: their classes; `UNLABELLED` for a row without a label.
        model: settings of the networks.
        settings: settings of the autoencoder's training.
        owner: the party's name, which enters the seeds.
        seed: random seed of weights, batches and folds.
        compute: device and precision.
        threshold: the largest loss of the mean score that is accepted (tau of APC-VFL, Eq. 12).
        folds: number of folds.
        score: the score by which columns and codes are compared.

    Raises:
        DataError: a class has fewer rows than there are folds.
        ModelError: training diverged.
    """
    codes_ND, epochs = compute_own_codes(
        features_NF, model=model, settings=settings, owner=owner, seed=seed, compute=compute
    )
    is_labelled_N = labels_N != UNLABELLED

    def score_folds(values_NF: Tensor) -> Floats:
        """Return the score of each fold; folds are equal for all values."""
        scores = cross_validate_scores(
            values_NF[is_labelled_N],
            labels_N[is_labelled_N],
            folds=folds,
            seed=seed,
            scores=(score,),
        )
        return scores[score]

    return EncoderQuality(score_folds(features_NF), score_folds(codes_ND.cpu()), threshold, epochs)


def compute_own_codes(
    features_NF: Tensor,
    *,
    model: ModelSettings,
    settings: DistillationSettings,
    owner: str,
    seed: int,
    compute: Compute,
) -> tuple[Tensor, int]:
    """Train an autoencoder on all rows, without labels; return their codes.

    For the same seed it equals the network that `owner` trains in APC-VFL without the other
    parties' codes: the paper's ablation (section 5).

    Args:
        features_NF: F features of N rows.
        model: settings of the networks.
        settings: settings of the autoencoder's training.
        owner: the party's name, which enters the seeds.
        seed: random seed of weights and batches.
        compute: device and precision.

    Returns the codes, (N, D), and the number of epochs. Raises ModelError: training diverged.
    """
    shape = tuple(features_NF.shape[1:])
    moved_NF = compute.move_tensor(features_NF)
    network = new_autoencoder(owner, "g3", model, shape, seed=seed, compute=compute)
    epochs = fit_autoencoder(network, moved_NF, settings, owner=f"{owner} student", seed=seed)
    return network.encode_rows(moved_NF), epochs


def cross_validate_scores(
    values_NF: Tensor,
    labels_N: Tensor,
    *,
    folds: int = 10,
    seed: int,
    scores: Sequence[FoldScore] = ("accuracy",),
) -> Mapping[str, Floats]:
    """Return the scores of logistic regression on stratified folds, by kind of score.

    Each kind has one score for each fold. Equal labels, folds and seed give equal folds, whatever
    the values are.

    Args:
        values_NF: the classifier's inputs, F numbers for each of N rows.
        labels_N: a class for each row.
        folds: number of folds.
        seed: random seed of the folds.
        scores: kinds of score.

    Raises DataError: a class has fewer rows than there are folds.
    """
    # Imported here, since it takes a second and few runs need it.
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_validate

    labels = labels_N.cpu().numpy()
    smallest_class = int(np.bincount(labels)[np.unique(labels)].min())
    if smallest_class < folds:
        raise DataError(
            f"{folds} folds need {folds} rows of every class at least, and one has "
            f"{smallest_class}; take fewer folds, or more rows"
        )
    results = cross_validate(
        LogisticRegression(max_iter=_MAX_ITERATIONS),
        values_NF.flatten(1).double().cpu().numpy(),
        labels,
        cv=StratifiedKFold(folds, shuffle=True, random_state=seed),
        scoring=tuple(scores),
    )
    return {score: results[f"test_{score}"] for score in scores}
