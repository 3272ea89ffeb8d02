"""Noise drawn once for each row: what was sent first is sent again, unchanged, ever after.

Run by: the party that sends representations. Against: whoever receives them, and above all
against averaging: many epochs show no more of a row than its first release.

Guarantee: that of one Gaussian release of each row, however long the run, WITH THE ENCODER
HELD FIXED, as in gaussian_guard.py. The price: the receivers see every row as the encoder was
when that row was first sent, which early in a run is hardly trained.

The gradient goes straight through: what arrives for the frozen row is passed on to today's
clipped representation, as if that had been sent.

Letters: B rows of a batch, D numbers of a representation, F rows frozen so far.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError
from secure_apfed.privacy.clip import clip_rows
from secure_apfed.privacy.gaussian_guard import GaussianGuard
from secure_apfed.privacy.guard import check_release
from secure_apfed.privacy.mechanism import Mechanism
from secure_apfed.privacy.settings import GuardSettings

__all__ = ["FrozenGaussianGuard"]


class FrozenGaussianGuard:
    """Sends each row through `fresh` once and keeps what came out.

    The frozen rows are state: a run that resumes must restore them, or it would noise its rows
    anew. It would not go unnoticed: the ledger charges bytes that it has not seen.

    Args:
        fresh: where a row goes when it is sent for the first time.

    Example:
        >>> from protocols.randomness import fresh_key
        >>> guard = FrozenGaussianGuard(GaussianGuard(clip=1.0, sigma=2.0, key=fresh_key()))
        >>> first = guard.release(torch.ones(2, 8), step=0, rows=torch.tensor([4, 7]))
        >>> again = guard.release(torch.zeros(2, 8), step=1, rows=torch.tensor([7, 5]))
        >>> bool((again[0] == first[1]).all()), guard.repeats(torch.tensor([5, 6])).tolist()
        (True, [True, False])
    """

    name: ClassVar[str] = "frozen_gaussian"
    unsafe: ClassVar[bool] = False

    def __init__(self, fresh: GaussianGuard) -> None:
        self._fresh = fresh
        self._frozen: dict[int, torch.Tensor] = {}

    @classmethod
    def from_settings(
        cls, settings: GuardSettings, *, releases: int, key: bytes
    ) -> "FrozenGaussianGuard":
        """Build it; sigma is calibrated for a single release, whatever number is planned."""
        del releases
        return cls(GaussianGuard.from_settings(settings, releases=1, key=key))

    def __repr__(self) -> str:
        return f"FrozenGaussianGuard({self._fresh!r})"

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the frozen rows, freezing those that have none yet; see `RepresentationGuard`."""
        check_release(h_BD, step=step, rows=rows)
        known = next(iter(self._frozen.values()), h_BD.new_empty(h_BD.shape[1]))
        if known.shape != h_BD.shape[1:] or known.dtype != h_BD.dtype:
            raise LocalProtocolError(
                f"rows were frozen as {len(known)} numbers of {known.dtype}, "
                f"got {h_BD.shape[1]} of {h_BD.dtype}; a guard serves one representation"
            )
        clipped_BD = clip_rows(h_BD, self._fresh.clip).to(h_BD.dtype)
        if not len(rows):
            return clipped_BD
        new = _first_of_each(rows, ~self.repeats(rows))
        if len(new):
            fresh_BD = h_BD.detach()[new.to(h_BD.device)]
            z_BD = self._fresh.release(fresh_BD, step=step, rows=rows[new.to(rows.device)])
            self._frozen.update(zip(rows[new].tolist(), z_BD.cpu(), strict=True))
        kept = [self._frozen[row] for row in rows.tolist()]
        return torch.stack(kept).to(h_BD.device) + (clipped_BD - clipped_BD.detach())

    def repeats(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows are frozen already, bool of shape (B,)."""
        return torch.tensor([row in self._frozen for row in rows.tolist()], dtype=torch.bool)

    def planned(self, releases: int) -> int:
        """One, unless nothing is sent at all."""
        return min(releases, 1)

    def sensitivity(self) -> float:
        """2C; see `GaussianGuard.sensitivity`."""
        return self._fresh.sensitivity()

    def mechanism(self) -> Mechanism:
        """That of the one release of each row."""
        return self._fresh.mechanism()

    def largest_norm(self, dimension: int) -> float:
        """See `GaussianGuard.largest_norm`."""
        return self._fresh.largest_norm(dimension)

    def statement(self) -> str:
        """The row-release guarantee, and that it is one of a single release."""
        return f"{self._fresh.statement()}; each row is noised once and sent unchanged ever after"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the frozen rows and their positions."""
        if not self._frozen:
            return {}
        return {
            "rows": torch.tensor(list(self._frozen)),
            "z": torch.stack([*self._frozen.values()]),
        }

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the frozen rows.

        Raises:
            CheckpointError: they are not positions and as many rows.
        """
        rows = tensors.get("rows", torch.zeros(0, dtype=torch.int64))
        z_FD = tensors.get("z", torch.zeros(0, 1))
        if (
            rows.dtype != torch.int64 or z_FD.ndim != 2 or rows.shape != z_FD.shape[:1]
            or len(rows.unique()) < len(rows) or bool((rows < 0).any())
        ):  # fmt: skip
            raise CheckpointError(
                f"frozen rows are positions and as many rows of numbers, got {rows.dtype} of shape "
                f"{tuple(rows.shape)} and shape {tuple(z_FD.shape)}; the checkpoint was "
                "altered or is of another run"
            )
        self._frozen = dict(zip(rows.tolist(), z_FD.cpu(), strict=True))


def _first_of_each(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return where each of the `chosen` rows stands first, in order."""
    first: dict[int, int] = {}
    for index in chosen.nonzero().flatten().tolist():
        first.setdefault(int(rows[index]), index)
    return torch.tensor(list(first.values()), dtype=torch.int64)
