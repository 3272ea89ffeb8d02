"""What the slow audit retrains, reads and claims: one entry a case.

The record is an outlier among 40 rows of breast cancer: its ten standardised features have norm
20, where 3 is usual. World 1 has its label flipped, or the whole record replaced by its
opposite. T = 50 epochs, C = 1 throughout; noise is calibrated to epsilon 8 at delta 1e-5.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from apfed_experiments.audit.retraining import Protection, Task
from secure_apfed.data import VerticalData, load_data
from secure_apfed.models import encoder_and_head, projection_to
from secure_apfed.objectives import Reconstruction
from secure_apfed.privacy.accountants import gdp_mu
from secure_apfed.seeds import seeded, shuffled
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.training import ModelSettings, ReconstructionSettings

__all__ = ["CASES", "DELTA", "EPSILON", "Case", "networks", "task_of"]

EPSILON, DELTA, EPOCHS = 8.0, 1e-5, 50
_ROWS, _BATCH, _LENGTH, _SEED = 40, 20, 20.0, 0
_MODEL = ModelSettings(network="mlp", hidden=(), representation=4, dropout=0.0)

View = Literal["other rows", "everything"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One audit.

    Attributes:
        title: for people.
        replaced: whether world 1 replaces the whole record; otherwise its label alone.
        view: what the score reads: the releases of all rows but the record's, or everything
            (releases, updates and parameters of every step).
        protection: what is noised.
        claim: mu that is claimed for this; what it is the claim of stands in `says`.
        exceeded: whether the audit is expected to prove the claim wrong for this view.
        learning_rate: of the active.
    """

    title: str
    says: str
    replaced: bool
    view: View
    protection: Protection
    claim: float
    exceeded: bool
    learning_rate: float


_MU = gdp_mu(EPSILON, DELTA)
_ALONE = Protection(clip=1.0, sigma=2 * math.sqrt(EPOCHS) / _MU, row_clip=0.0)
# Half of mu^2 for the releases, half for the updates.
_SIGMA = 2 * math.sqrt(2 * EPOCHS) / _MU
_BOTH = Protection(
    clip=1.0, sigma=_SIGMA, gradient_clip=1.0, gradient_sigma=_SIGMA, row_clip=1.0
)  # fmt: skip

CASES: Mapping[str, Case] = {
    "guard alone": Case(
        title="guard alone, a label flipped: the other rows' releases",
        says="T releases of one row, encoder held fixed (epsilon_x)",
        replaced=False, view="other rows", protection=_ALONE, claim=_MU, exceeded=True,
        learning_rate=6.0,
    ),
    "private, other rows": Case(
        title="guard and DP-SGD, a label flipped: the other rows' releases",
        says="one label in whole training (epsilon_y)",
        replaced=False, view="other rows", protection=replace(_BOTH, row_clip=0.0),
        claim=_MU / math.sqrt(2), exceeded=False, learning_rate=6.0,
    ),
    "private, everything": Case(
        title="guard and DP-SGD, a record replaced: everything that is claimed",
        says="one record in whole training (epsilon_model)",
        replaced=True, view="everything", protection=_BOTH, claim=_MU, exceeded=False,
        learning_rate=0.1,
    ),
}  # fmt: skip


def networks() -> tuple[dict[str, nn.Module], nn.Module]:
    """The active's networks and the passive's objective, at the start that all retrainings have."""
    with seeded(_SEED, "audit", "networks"):
        encoder, head = encoder_and_head(_MODEL, (10,), 2)
        modules = {"encoder": encoder, "head": head, "projection": projection_to(4, (4,))}
        objective = Reconstruction(
            ReconstructionSettings(), representation=(4,), features=(10,), model=_MODEL
        )
    return modules, objective


def task_of(case: Case, *, epochs: int = EPOCHS) -> Task:
    """What a case trains on.

    Raises:
        DataError: the data are not there.
    """
    data = load_data(DataSettings(dataset="breast_cancer"), seed=_SEED)
    rows = data.train_rows[:_ROWS]
    assert data.active.labels is not None
    x_NF, y_N = data.active.features[rows].float(), data.active.labels[rows].clone()
    x_NF[0] *= _LENGTH / x_NF[0].norm()
    return Task(
        features=x_NF,
        labels=y_N,
        passive_features=_same_people(data, rows).float(),
        record=0,
        other_features=-x_NF[0] if case.replaced else x_NF[0],
        other_label=1 - int(y_N[0]),
        batches=shuffled(torch.arange(_ROWS), _SEED, "audit", "batches").split(_BATCH),
        epochs=epochs,
        learning_rate=case.learning_rate,
        passive_rate=0.01,
    )


def _same_people(data: VerticalData, rows: Tensor) -> Tensor:
    passive = data.passives[0]
    place = {name: at for at, name in enumerate(passive.ids)}
    return passive.features[[place[data.active.ids[row]] for row in rows.tolist()]]
