"""The active's part of APC-VFL: a joint code of aligned rows, and a student whose own resembles it.

Run by: the active, alone, once passives released their codes. Source: APC-VFL, sections 4.2 to 4.4
and Figure 3: g1 on own aligned rows; g2 on all parties' codes of them; g3 on all own rows, drawn to
g2's codes where there are any; logistic regression on g3's codes of labelled rows.

Letters: U aligned training rows, n labelled rows, B some rows, D numbers of a code, K classes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from secure_apfed.learning.autoencoder import Autoencoder
from secure_apfed.learning.fitted_once import FittedOnce
from secure_apfed.learning.networks import ActiveNetworks

__all__ = ["Distilled"]


class Distilled(FittedOnce):
    """The active of APC-VFL: four fits, one after the other; see `FittedOnce`.

    Args:
        owner, rows_U: see `FittedOnce`; what passives release are codes of these rows.
        own: g1; joint: g2, which reads all parties' codes; student: g3; head: reads g3's code.
        together: reads g2's code, where all parties predict.
        others: see `FittedOnce`.

    Attributes:
        networks: g3's encoder and its head, which predict alone.
        epochs: trained by g1, g2 and g3.
    """

    def __init__(
        self, owner: str, *, rows_U: Tensor, own: Autoencoder, joint: Autoencoder,
        student: Autoencoder, head: nn.Module, together: nn.Module, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            owner,
            rows_U=rows_U,
            parts={"own": own, "joint": joint, "student": student},
            heads={
                "alone": ActiveNetworks(student.encoder, head),
                "together": ActiveNetworks(joint.encoder, together),
            },
            **others,
        )
        self.epochs = (0, 0, 0)

    def teach(self, released_UD: Tensor) -> None:
        """Fit everything to the passives' codes of `rows_U`, beside each other."""
        joint, student = self.parts["joint"], self.parts["student"]
        labelled_n = self.data.labelled_rows
        first = self.fit("own", self.features_N[self.rows_U])
        codes_UD = self.beside_own(self.rows_U, released_UD)
        second = self.fit("joint", codes_UD)
        joint_UD = joint.codes(codes_UD)
        self.epochs = first, second, self.draw("student", joint_UD)
        self.classify("alone", student.codes(self.features_N[labelled_n]), labelled_n)
        known_U = torch.isin(self.rows_U, labelled_n)
        self.classify("together", joint_UD[known_U], self.rows_U[known_U])

    def beside_own(self, rows_B: Tensor, released_BD: Tensor) -> Tensor:
        """The own codes of these rows with what passives released of them."""
        own_BD = self.parts["own"].codes(self.features_N[rows_B])
        return torch.cat([own_BD, self.compute.place(released_BD)], dim=1)

    def together(self, rows_B: Tensor, released_BD: Tensor) -> Tensor:
        """Scores (B, K) that all parties give these rows."""
        codes_BD = self.parts["joint"].codes(self.beside_own(rows_B, released_BD))
        with torch.no_grad():
            scores_BK: Tensor = self.heads["together"].head(codes_BD)
        return scores_BK
