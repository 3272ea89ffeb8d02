"""The active's part of APC-VFL: a joint code of aligned rows, and a student whose own resembles it.

Run by: the active, alone, once passives released their codes. Source: APC-VFL, sections 4.2 to 4.4
and Figure 3: g1 on own aligned rows; g2 on all parties' codes of them; g3 on all own rows, drawn to
g2's codes where there are any; logistic regression on g3's codes of labelled rows. Two things are
ours: each code's numbers are brought to mean 0 and variance 1 before a classifier reads them, which
its layer's weights hold then, and it is held as C = 1 of scikit-learn holds it.

Letters: N rows of the active's table, U aligned training rows, T training rows, n labelled ones, F
features, D numbers of a code, K classes.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from secure_apfed.data import OwnData
from secure_apfed.labellers.softmax import minimiser, with_constant
from secure_apfed.learning.apfed import ActiveNetworks, accuracy_of
from secure_apfed.learning.autoencoder import Autoencoder, Resembled, fit_autoencoder
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.votes import last_layer
from secure_apfed.settings.teaching import DistillationSettings

__all__ = ["Distilled", "fit_classifier"]

_TOLERANCE = 1e-6


class Distilled:
    """Four fits, one after the other; see `secure_apfed.methods.students.Pupil`.

    Args:
        owner: the active; data: what it holds, with the labels that it may train on.
        rows_U: of its table, of which passives release codes.
        own: g1; joint: g2, which reads all parties' codes; student: g3; head: reads g3's code.
        together: reads g2's code, where all parties predict.
        settings, compute, seed: how they are fitted.

    Attributes:
        networks: g3's encoder and its head, which predict alone.
        epochs: trained by g1, g2 and g3.
    """

    in_one_go = True

    def __init__(
        self, owner: str, *, data: OwnData, rows_U: Tensor, own: Autoencoder, joint: Autoencoder,
        student: Autoencoder, head: nn.Module, together: nn.Module,
        settings: DistillationSettings, compute: Compute, seed: int,
    ) -> None:  # fmt: skip
        assert data.table.labels is not None
        self.rows_U, self.epochs = rows_U, (0, 0, 0)
        self.networks = ActiveNetworks(student.encoder, head)
        self._owner, self._data, self._settings = owner, data, settings
        self._compute, self._seed = compute, seed
        self._parts = {"own": own, "joint": joint, "student": student}
        self._heads = {"alone": self.networks, "together": ActiveNetworks(joint.encoder, together)}
        for module in (*self._parts.values(), *self._heads.values()):
            module.to(compute.device, compute.dtype)
        self._features_N = compute.place(data.table.features)
        self._labels_N = compute.place(data.table.labels)

    def teach(self, released_UD: Tensor) -> None:
        """Fit everything to the passives' codes of `rows_U`, beside each other."""
        joint, student = self._parts["joint"], self._parts["student"]
        rows_T, labelled_n = self._data.train_rows, self._data.labelled_rows
        first = self._fit("own", self._features_N[self.rows_U])
        codes_UD = self.beside_own(self.rows_U, released_UD)
        second = self._fit("joint", codes_UD)
        places_U = torch.searchsorted(rows_T, self.rows_U)
        joint_UD = joint.codes(codes_UD)
        third = self._fit(
            "student", self._features_N[rows_T], Resembled(rows=places_U, codes=joint_UD)
        )
        self.epochs = first, second, third
        self._classify("alone", student.codes(self._features_N[labelled_n]), labelled_n)
        known_U = torch.isin(self.rows_U, labelled_n)
        self._classify("together", joint_UD[known_U], self.rows_U[known_U])

    def beside_own(self, rows_B: Tensor, released_BD: Tensor) -> Tensor:
        """The own codes of these rows with what passives released of them."""
        own_BD = self._parts["own"].codes(self._features_N[rows_B])
        return torch.cat([own_BD, self._compute.place(released_BD)], dim=1)

    def _fit(self, name: str, rows_NF: Tensor, resembled: Resembled | None = None) -> int:
        return fit_autoencoder(
            self._parts[name], rows_NF, self._settings,
            owner=f"{self._owner} {name}", seed=self._seed, resembled=resembled,
        )  # fmt: skip

    def _classify(self, name: str, codes_nD: Tensor, rows_n: Tensor) -> None:
        labels_n = self._labels_N[rows_n].cpu()
        if len(labels_n.unique()) > 1:
            fit_classifier(self._heads[name], codes_nD, labels_n)

    def together(self, rows_B: Tensor, released_BD: Tensor) -> Tensor:
        """Which of these rows all parties label correctly, (B,)."""
        codes_BD = self._parts["joint"].codes(self.beside_own(rows_B, released_BD))
        with torch.no_grad():
            scores_BK = self._heads["together"].head(codes_BD)
        right_B: Tensor = scores_BK.argmax(1) == self._labels_N[rows_B]
        return right_B

    def learn(self, step: int, rows_B: Tensor) -> float:
        """It takes no steps."""
        raise AssertionError(f"{self._owner}: step {step} of a student that is fitted in one go")

    def accuracy(self, rows: Tensor) -> float:
        """Share of `rows` of the table that it labels correctly, alone."""
        with torch.no_grad():
            return accuracy_of(
                lambda rows_B: self.networks(self._features_N[rows_B], None)[0], rows,
                self._labels_N,
            )  # fmt: skip

    def _modules(self) -> dict[str, nn.Module]:
        return {**self._parts, **{name: one.head for name, one in self._heads.items()}}

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
