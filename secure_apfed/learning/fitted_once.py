"""The active's student where it is fitted in one go: autoencoders, and a linear layer on a code.

Run by: the active, alone, once it was told what its code is to resemble (APC-VFL, VFedTrans).
Logistic regression reads the codes (APC-VFL, section 4.4); two things are ours: each code's numbers
are brought to mean 0 and variance 1 before it does, which its layer's weights hold then, and it is
held as C = 1 of scikit-learn holds it.

Letters: N rows of the active's table, U aligned training rows, T training rows, n labelled ones, F
features, D numbers of a code, K classes.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from secure_apfed.data import OwnData
from secure_apfed.labellers.kinds import minimiser, with_constant
from secure_apfed.learning.autoencoder import Autoencoder, Resembled, fit_autoencoder
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.learning.votes import last_layer
from secure_apfed.measures import Scored, scored_by
from secure_apfed.settings.distillation import DistillationSettings

__all__ = ["FittedOnce", "fit_classifier"]

_TOLERANCE = 1e-6


class FittedOnce:
    """Autoencoders and classifiers that are fitted in one go; see `methods.students.Pupil`.

    Args:
        owner: the active; data: what it holds, with the labels that it may train on.
        rows_U: of its table, of which it is told something.
        parts: autoencoders by name, at their start.
        heads: by name, what classifies; "alone" predicts.
        settings, compute, seed: how they are fitted.

    Attributes:
        networks: of "alone".
        features_N, labels_N: of its table, on the device.
    """

    in_one_go = True

    def __init__(
        self, owner: str, *, data: OwnData, rows_U: Tensor, parts: Mapping[str, Autoencoder],
        heads: Mapping[str, ActiveNetworks], settings: DistillationSettings, compute: Compute,
        seed: int,
    ) -> None:  # fmt: skip
        assert data.table.labels is not None
        self.rows_U, self.networks = rows_U, heads["alone"]
        self._owner, self.data, self._settings = owner, data, settings
        self.compute, self._seed = compute, seed
        self.parts, self.heads = dict(parts), dict(heads)
        for module in (*self.parts.values(), *self.heads.values()):
            module.to(compute.device, compute.dtype)
        self.features_N = compute.place(data.table.features)
        self.labels_N = compute.place(data.table.labels)

    def draw(self, name: str, codes_UD: Tensor) -> int:
        """Fit this part to all training rows, drawn to these codes of `rows_U`; return epochs."""
        rows_T = self.data.train_rows
        places_U = torch.searchsorted(rows_T, self.rows_U)
        return self.fit(name, self.features_N[rows_T], Resembled(rows=places_U, codes=codes_UD))

    def fit(self, name: str, rows_NF: Tensor, resembled: Resembled | None = None) -> int:
        """Fit this part to these rows; return for how many epochs."""
        return fit_autoencoder(
            self.parts[name], rows_NF, self._settings,
            owner=f"{self._owner} {name}", seed=self._seed, resembled=resembled,
        )  # fmt: skip

    def classify(self, name: str, codes_nD: Tensor, rows_n: Tensor) -> None:
        """Fit this head to codes of labelled rows; not where they have one label only."""
        labels_n = self.labels_N[rows_n].cpu()
        if len(labels_n.unique()) > 1:
            fit_classifier(self.heads[name], codes_nD, labels_n)

    def learn(self, step: int, rows_B: Tensor) -> float:
        """It takes no steps."""
        raise AssertionError(f"{self._owner}: step {step} of a student that is fitted in one go")

    def scored(self, rows: Tensor) -> Scored:
        """What it says of `rows` of the table, alone."""
        return scored_by(
            lambda rows_B: self.networks(self.features_N[rows_B], None)[0], rows, self.labels_N
        )

    def _modules(self) -> dict[str, nn.Module]:
        return {**self.parts, **{name: one.head for name, one in self.heads.items()}}

    def tensors(self) -> dict[str, Tensor]:
        return {
            key: value
            for name, module in self._modules().items()
            for key, value in prefixed(name, module.state_dict()).items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, module in self._modules().items():
            module.load_state_dict(without_prefix(name, tensors))


def fit_classifier(networks: ActiveNetworks, codes_nD: Tensor, labels_n: Tensor) -> None:
    """Fit the linear layer in which a head ends to these codes, by logistic regression."""
    layer, codes = last_layer(networks), codes_nD.double().cpu().numpy()
    mean_D, size_D = codes.mean(axis=0), codes.std(axis=0)
    size_D[size_D == 0] = 1.0
    theta_DK = minimiser(
        with_constant((codes - mean_D) / size_D, 1.0), labels_n.numpy(), layer.out_features,
        strength=1 / len(codes), tolerance=_TOLERANCE,
    )  # fmt: skip
    weight_DK = theta_DK[:-1] / size_D[:, None]
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight_DK.T))
        layer.bias.copy_(torch.from_numpy(np.asarray(theta_DK[-1] - mean_D @ weight_DK)))
