"""No protection at all, by name: representations leave as they are.

Run by: a party whose contract says that its peers may read its representations.
"""

from typing import ClassVar

import torch

from secure_apfed.privacy.guard import WithoutMemory, check_release
from secure_apfed.privacy.mechanism import Mechanism, NoPrivacy
from secure_apfed.privacy.settings import GuardSettings

__all__ = ["NoGuard"]


class NoGuard(WithoutMemory):
    """Sends h itself; epsilon is infinite from the first release on."""

    name: ClassVar[str] = "none"
    unsafe: ClassVar[bool] = True

    @classmethod
    def from_settings(cls, settings: GuardSettings, *, releases: int, key: bytes) -> "NoGuard":
        """Build it; there is nothing to set."""
        return cls()

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return `h_BD` itself; see `RepresentationGuard.release`."""
        check_release(h_BD, step=step, rows=rows)
        return h_BD

    def sensitivity(self) -> float:
        """Unbounded."""
        return float("inf")

    def mechanism(self) -> Mechanism:
        """No privacy."""
        return NoPrivacy()

    def largest_norm(self, dimension: int) -> float:
        """Unbounded."""
        return float("inf")

    def statement(self) -> str:
        """Nothing is guaranteed."""
        return "no guarantee: representations are sent as they are (epsilon is infinite)"
