"""The active's part of VFedTrans: a student whose code resembles singular vectors of all tables.

Run by: the active, alone, once it read the vectors. Source: Huang et al. 2023 (VFedTrans) with its
release: an autoencoder on all own rows, whose code is drawn to the left singular vectors U where a
row is aligned; a classifier on the own features beside the code. Ours: the vectors times the root
of the number of rows, so that their numbers are about as large as the features', whatever that
number; and the code itself beside the features, where the release puts the decoder's output.

Letters: U aligned training rows, n labelled rows, D singular vectors.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from secure_apfed.learning.autoencoder import Autoencoder
from secure_apfed.learning.fitted_once import FittedOnce
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.models import Enriched

__all__ = ["Transferred"]

_GRID = 2.0**-16  # far above what rounding under fresh masks moves, so that runs repeat


class Transferred(FittedOnce):
    """The active of VFedTrans: one fit, and a classifier; see `FittedOnce`.

    Args:
        owner, rows_U: see `FittedOnce`; the singular vectors are of these rows.
        enriched: the row beside its code, at its start.
        decoder: of the code.
        head: reads `enriched`.
        others: see `FittedOnce`.

    Attributes:
        networks: `enriched` and the head, which predict alone.
        epochs: trained.
    """

    def __init__(
        self, owner: str, *, rows_U: Tensor, enriched: Enriched, decoder: nn.Module,
        head: nn.Module, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            owner,
            rows_U=rows_U,
            parts={"student": Autoencoder(enriched.code, decoder)},
            heads={"alone": ActiveNetworks(enriched, head)},
            **others,
        )
        self.epochs = 0

    def teach(self, vectors_UD: Tensor) -> None:
        """Fit the student to these vectors, and the classifier to what it makes of own rows."""
        wanted_UD = (vectors_UD * math.sqrt(len(vectors_UD)) / _GRID).round() * _GRID
        self.epochs = self.draw("student", wanted_UD)
        labelled_n = self.data.labelled_rows
        with torch.no_grad():
            enriched_nD = self.networks.encoder(self.features_N[labelled_n])
        self.classify("alone", enriched_nD, labelled_n)
