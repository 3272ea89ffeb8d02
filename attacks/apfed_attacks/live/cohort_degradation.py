"""A4, cohort degradation: a malicious passive spoils the active's model for people of its choice.

Run by: a passive that answers honest representations with kappa (z - z*), for the rows of a
cohort only, where z* is the mean of the other rows: the encoder is pulled to make the cohort
look like everybody else. It needs no knowledge but the row positions, which every passive has.
Integrity, not privacy: there is nothing to guess, so this is no `Attack`; compare the active's
accuracy on the cohort with that of an honest run.

Letters: B batch, C people of the cohort, D numbers of a representation.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from apfed_attacks.view import AttackError

__all__ = ["CohortDegradation"]


class CohortDegradation:
    """What the passive answers (see `apfed_attacks.live.strategy.Answering`).

    Args:
        cohort_C: alignment positions of the people.
        strength: kappa; the sum's clip may shorten the rows.

    Raises:
        AttackError: nobody in the cohort, or a strength that is not positive.
    """

    def __init__(self, cohort_C: Tensor, *, strength: float = 1.0) -> None:
        if not len(cohort_C) or not strength > 0:
            raise AttackError(
                f"a cohort has somebody and a strength above 0, got {len(cohort_C)} people and "
                f"{strength:g}"
            )
        self._cohort_C, self._strength = cohort_C, strength

    def answer(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Return kappa (z - z*) for the cohort's rows and zeros for the others."""
        del step
        inside_B = torch.isin(rows_B, self._cohort_C)
        if not inside_B.any() or inside_B.all():
            return torch.zeros_like(z_BD)
        away_BD = self._strength * (z_BD - z_BD[~inside_B].mean(dim=0))
        return torch.where(inside_B[:, None], away_BD, 0.0)

    def notes(self) -> Mapping[str, Tensor]:
        """The cohort."""
        return {"cohort": self._cohort_C}
