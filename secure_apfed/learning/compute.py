"""Where and in which precision a party computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from secure_apfed.errors import ConfigError
from secure_apfed.seeds import seeded
from secure_apfed.settings.training import DEVICE, TrainSettings

__all__ = ["Compute", "find_device"]


def find_device(choice: str) -> torch.device:
    """The device of "auto" (a GPU where there is one), "cpu", "cuda", or of one GPU as "cuda:1".

    Raises:
        ConfigError: something else, or a GPU that torch does not see.
    """
    if not DEVICE.fullmatch(choice):
        raise ConfigError(f"device: expected auto, cpu, cuda or one GPU, as cuda:1; got {choice!r}")
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(choice)
    if device.type == "cuda":
        # Asked of the driver: this process may yet be forked.
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= gpus:
            seen = f"sees {gpus} GPU(s), counted from cuda:0" if gpus else "sees no GPU"
            raise ConfigError(f"device: {choice} was asked for, but torch {seen}; say auto or cpu")
    return device


@dataclass(frozen=True)
class Compute:
    """Where and in which precision a party computes.

    Attributes:
        device: of its tensors.
        dtype: of features and parameters, float32 or float64; also what is sent.
        autocast: run the networks' forward passes in bfloat16.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    @classmethod
    def of(cls, train: TrainSettings) -> "Compute":
        """Read the settings; "auto" takes the GPU where there is one.

        Raises:
            ConfigError: a GPU is asked for and there is none.
        """
        dtype = torch.float64 if train.precision == "float64" else torch.float32
        return cls(find_device(train.device), dtype, train.precision == "bfloat16")

    def place(self, values: Tensor) -> Tensor:
        """Move to the device; floating-point values take the dtype."""
        return values.to(self.device, self.dtype if values.is_floating_point() else None)

    @contextmanager
    def forward(self, seed: int, *purpose: str | int) -> Iterator[None]:
        """Run a step's networks with their precision and reproducible dropout."""
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)
        with seeded(seed, *purpose), autocast:
            yield
