"""What stands between a party's representations and the wire: clip, noise, and what that gives.

Run by: the party that sends representations (the active of APFed; every passive of TVFL).
A guard states its own sensitivity and mechanism, so that the ledger charges what was
really done and the report says no more than that.

Shapes: B rows of a batch, D numbers of a representation.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError
from secure_apfed.privacy.gdp import Mechanism, NoPrivacy
from secure_apfed.settings.privacy import GuardSettings

__all__ = [
    "NoGuard",
    "RepresentationGuard",
    "WithoutMemory",
    "check_release",
    "joint_releases_statement",
]


class RepresentationGuard(Protocol):
    """One way of making representations fit to be sent.

    Attributes:
        name: its key in the table `GUARDS`.
        unsafe: whether it protects nothing.
    """

    name: ClassVar[str]
    unsafe: ClassVar[bool]

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return z_BD, fit to be sent once the ledger was charged for it; differentiable.

        Repeating a call with the same arguments returns the same bytes.

        Args:
            h_BD: float32 or float64.
            step: of the run.
            rows: the positions whose representations these are, int64 of shape (B,).

        Raises:
            LocalProtocolError: arguments of a wrong type or shape.
            ModelError: a row is not finite.
        """
        ...

    def sensitivity(self) -> float:
        """How far one released row can move, in L2, if its person is replaced; may be infinite."""
        ...

    def mechanism(self) -> Mechanism:
        """What one release does to one row, for the accountants."""
        ...

    def repeats(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows a release would send as they were sent before, bool of shape (B,).

        Ask before `release`, and hand the answer to the ledger.
        """
        ...

    def planned(self, releases: int) -> int:
        """How many of `releases` of one row the ledger will count."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold for a resumed run to release the same; a secret."""
        ...

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned.

        Raises:
            CheckpointError: it was altered or is of another guard.
        """
        ...

    def largest_norm(self, dimension: int) -> float:
        """A norm that a released row of `dimension` numbers exceeds with probability < 1e-14."""
        ...

    def statement(self) -> str:
        """What is guaranteed, in words for the report."""
        ...


class WithoutMemory:
    """The part of a guard to which every release is a new one, so that nothing is kept."""

    def repeats(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(rows.shape, dtype=torch.bool)

    def planned(self, releases: int) -> int:
        return releases

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if tensors:
            raise CheckpointError(
                f"this guard keeps nothing, but the checkpoint holds {sorted(tensors)} for it; "
                "it is of a run with another guard"
            )


class NoGuard(WithoutMemory):
    """No protection, by name: sends h itself; epsilon is infinite from the first release on."""

    name: ClassVar[str] = "none"
    unsafe: ClassVar[bool] = True

    @classmethod
    def from_settings(
        cls, settings: GuardSettings, *, delta: float, releases: int, key: bytes
    ) -> "NoGuard":
        return cls()

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        check_release(h_BD, step=step, rows=rows)
        return h_BD

    def sensitivity(self) -> float:
        return math.inf

    def mechanism(self) -> Mechanism:
        return NoPrivacy()

    def largest_norm(self, dimension: int) -> float:
        return math.inf

    def statement(self) -> str:
        return "no guarantee: representations are sent as they are (epsilon is infinite)"


def check_release(h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> None:
    """Check what every guard asks of a call of `release`.

    Raises:
        LocalProtocolError: says which argument is wrong.
    """
    if h_BD.ndim != 2 or h_BD.dtype not in (torch.float32, torch.float64):
        raise LocalProtocolError(
            "representations are a float32 or float64 matrix, one row a person, "
            f"got {h_BD.dtype} of shape {tuple(h_BD.shape)}"
        )
    if rows.dtype != torch.int64 or rows.shape != h_BD.shape[:1]:
        raise LocalProtocolError(
            f"rows name the {len(h_BD)} representations by int64 positions, "
            f"got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    if step < 0:
        raise LocalProtocolError(f"a step counts from 0, got {step}")


def joint_releases_statement(released: str, passives: int) -> str:
    """What the guards of several passives promise, who all send rows of the same people."""
    if passives < 2:
        return released
    return f"{released}; epsilon_x is of one passive's row, and those of one person add up"
