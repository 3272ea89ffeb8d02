"""Whether a code of some columns tells a classifier as much as the columns themselves.

Run by: a party with labels, alone, before anybody else takes part: it chooses encoders by it.
Source: APC-VFL, Appendix F (Algorithm 1, Eqs. 11 and 12). The classifier is the paper's, logistic
regression (section 5), and reads columns and codes as they come: the autoencoder reads standardised
columns, and nothing is scaled behind it.

Letters: N rows, F features, D numbers of a code, k folds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_validate
from torch import Tensor

from secure_apfed.data import UNLABELLED
from secure_apfed.errors import DataError
from secure_apfed.learning.autoencoder import DistillationSettings, fit_autoencoder, new_autoencoder
from secure_apfed.learning.compute import Compute
from secure_apfed.settings.training import ModelSettings

__all__ = ["EncoderQuality", "Score", "cross_validated", "encoder_quality", "own_codes"]

Floats = NDArray[np.float64]
Score: TypeAlias = Literal["accuracy", "f1", "f1_macro", "f1_weighted"]
"""What a fold is scored by; f1 is that of class 1 of two."""

_ITERATIONS = 5000


@dataclass(frozen=True, eq=False)
class EncoderQuality:
    """What a classifier reached on the columns and on their code.

    Attributes:
        columns, codes: scores of the k folds, 0 to 1, on the same folds.
        threshold: tau of Eq. (12).
        epochs: that the autoencoder was trained.
    """

    columns: Floats
    codes: Floats
    threshold: float
    epochs: int

    @property
    def difference(self) -> float:
        """Mean score on the code minus mean score on the columns."""
        return float(self.codes.mean() - self.columns.mean())

    @property
    def good_enough(self) -> bool:
        """Eq. (12): the means differ by less than the threshold, or the code's is higher.

        The paper takes the distance of the means; a code that tells more is no worse for it.
        """
        return self.difference > -self.threshold


def encoder_quality(
    features_NF: Tensor, labels_N: Tensor, *, model: ModelSettings, settings: DistillationSettings,
    owner: str, seed: int, compute: Compute, threshold: float = 0.02, folds: int = 10,
    score: Score = "accuracy",
) -> EncoderQuality:  # fmt: skip
    """Train an autoencoder on all rows; cross-validate on the columns and codes of labelled ones.

    Args:
        features_NF: of the rows, standardised.
        labels_N: their classes, `UNLABELLED` where there is none.
        model: of the encoder.
        settings: how it is trained.
        owner: see `own_codes`.
        seed: the same; it draws the folds, too.
        compute: where it is trained.
        threshold: tau of Eq. (12), a difference of mean scores that is not worth mending.
        folds: k.
        score: of a fold.

    Raises:
        DataError: fewer rows of a class than folds.
        ModelError: training diverged.
    """
    codes_ND, epochs = own_codes(
        features_NF, model=model, settings=settings, owner=owner, seed=seed, compute=compute
    )
    known_N = labels_N != UNLABELLED
    columns, codes = (
        cross_validated(values_NF[known_N], labels_N[known_N], folds=folds, seed=seed,
                        scores=(score,))[score]
        for values_NF in (features_NF, codes_ND.cpu())
    )  # fmt: skip
    return EncoderQuality(columns, codes, threshold, epochs)


def own_codes(
    features_NF: Tensor, *, model: ModelSettings, settings: DistillationSettings, owner: str,
    seed: int, compute: Compute,
) -> tuple[Tensor, int]:  # fmt: skip
    """Train an autoencoder on all rows, without labels; return their codes, (N, D), and its epochs.

    It is the one that `owner` trains as its student in APC-VFL, without the others' codes: the
    paper's Ablation (section 5), of the same seed number for number.

    Args:
        features_NF: of the rows, standardised.
        model: of the encoder.
        settings: how it is trained.
        owner: from whose name and the seed its start, batches and held-out rows follow.
        seed: of the party.
        compute: where it is trained.

    Raises:
        ModelError: training diverged.
    """
    shape, placed_NF = tuple(features_NF.shape[1:]), compute.place(features_NF)
    network = new_autoencoder(owner, "g3", model, shape, seed=seed, compute=compute)
    epochs = fit_autoencoder(network, placed_NF, settings, owner=f"{owner} student", seed=seed)
    return network.codes(placed_NF), epochs


def cross_validated(
    values_NF: Tensor, labels_N: Tensor, *, folds: int = 10, seed: int,
    scores: Sequence[Score] = ("accuracy",),
) -> Mapping[str, Floats]:  # fmt: skip
    """Return what logistic regression scores on k folds with equal shares of the classes, (k,).

    The same labels, folds and seed give the same folds, whatever the values are.

    Raises:
        DataError: fewer rows of a class than folds.
    """
    labels = labels_N.cpu().numpy()
    least = int(np.bincount(labels)[np.unique(labels)].min())
    if least < folds:
        raise DataError(
            f"{folds} folds need {folds} rows of every class at least, and one has {least}; take "
            "fewer folds, or more rows"
        )
    found = cross_validate(
        LogisticRegression(max_iter=_ITERATIONS),
        values_NF.flatten(1).double().cpu().numpy(),
        labels,
        cv=StratifiedKFold(folds, shuffle=True, random_state=seed),
        scoring=tuple(scores),
    )
    return {score: found[f"test_{score}"] for score in scores}
