"""The private sum of per-example gradients: clip each, add, and put Gaussian noise on the sum.

Run by: the active, on the gradients that one batch gives its encoder, head and projection
(DP-SGD, Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1). Against:
whoever reads anything that its parameters move: the representations of all later steps, and
the finished model.

Guarantee: replacing one example moves the clipped sum by at most 2C, so that one release is
(2C / sigma)-GDP for each example in it, label included, at fixed parameters. No amplification
by subsampling is claimed: the passives know the batches. Needs: examples that do not enter
each other's gradients, and a key that nobody else has; noise.py says what floating point
costs. The sum and the noise are float64, then rounded to noise.py's grid.

Letters: B examples, P parameters.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import derive_key
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.clip import clip_gradients
from secure_apfed.privacy.gdp import GaussianRelease
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.settings.privacy import LARGEST_CLIP, SMALLEST_CLIP

__all__ = ["GradientGuard", "clipped_sum"]

_PURPOSE = b"secure-apfed dp-sgd v1"
_CHUNK_NUMBERS = 2**23


class GradientGuard:
    """Clips each example's gradient to norm `clip` and noises the sum.

    The noise is a function of the key, the step, the rows and the clipped sum, or under
    "reproducible_insecure" of key and step alone: noise.py says what that is good for.

    Args:
        clip: C, the L2 bound of one example's gradient over all parameters together.
        noise_multiplier: sigma / C as Opacus counts it, sigma being the deviation of the noise
            on each number of the sum.
        key: 32 secret bytes, the party's noise key.
        noise: "secret", or "reproducible_insecure".

    Raises:
        ConfigError: clip or noise multiplier out of range.
        LocalProtocolError: a key of the wrong length.
    """

    def __init__(
        self,
        *,
        clip: float,
        noise_multiplier: float,
        key: bytes,
        noise: Literal["secret", "reproducible_insecure"] = "secret",
    ) -> None:
        if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
            raise ConfigError(f"clip lies in {SMALLEST_CLIP:g}..{LARGEST_CLIP:g}, got {clip}")
        if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
            raise ConfigError(
                f"a noise multiplier is a positive number, got {noise_multiplier}; leave dp_sgd "
                "out for training without noise"
            )
        self.clip, self.noise = float(clip), noise
        self.sigma = float(noise_multiplier * clip)
        self._noise = NoiseSource(derive_key(key, _PURPOSE), secret=noise == "secret")

    def __repr__(self) -> str:
        return f"GradientGuard(clip={self.clip:g}, sigma={self.sigma:g}, noise={self.noise!r})"

    def release(self, samples: Sequence[Tensor], *, step: int, rows: Tensor) -> Tensor:
        """Return the noisy sum, (P,) float64 on the CPU.

        Args:
            samples: gradients of each example, (B, *shape) for each parameter.
            step: of the run.
            rows: positions of the examples, int64 of shape (B,), each once.

        Raises:
            LocalProtocolError: arguments of a wrong type or shape.
        """
        _check(samples, step, rows)
        total_P = clipped_sum(samples, self.clip).numpy()
        return torch.from_numpy(self._noise.add(total_P, self.sigma, step=step, rows=rows))

    def sensitivity(self) -> float:
        """2C: a replaced example moves the sum at most across the ball's diameter."""
        return 2 * self.clip

    def mechanism(self) -> GaussianRelease:
        """Gaussian, with sigma / (2C) as its noise multiplier."""
        return GaussianRelease(noise_multiplier=self.sigma / self.sensitivity())


def clipped_sum(samples: Sequence[Tensor], clip: float) -> Tensor:
    """Return the sum over examples of their gradients, each scaled onto norm `clip` if longer.

    Guarantee: what one example adds has a norm of at most `clip`, for any numbers. An example
    whose gradient is not finite adds nothing: an error here would tell of one example.

    Args:
        samples: gradients of each example, (B, *shape) for each parameter.
        clip: C > 0.

    Returns:
        (P,) float64 on the CPU.
    """
    size = sum(math.prod(part.shape[1:]) for part in samples)
    total_P = torch.zeros(size, dtype=torch.float64, device=samples[0].device)
    rows_each = max(1, _CHUNK_NUMBERS // max(1, size))
    for first in range(0, len(samples[0]), rows_each):
        chunk = [part[first : first + rows_each].flatten(1).double() for part in samples]
        total_P += clip_gradients(torch.cat(chunk, dim=1), clip).sum(dim=0)
    return total_P.cpu()


def _check(samples: Sequence[Tensor], step: int, rows: Tensor) -> None:
    if rows.dtype != torch.int64 or rows.ndim != 1 or len(rows.unique()) < len(rows):
        raise LocalProtocolError(
            "rows name the examples by different int64 positions, "
            f"got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    shapes = [tuple(part.shape) for part in samples]
    if not samples or any(len(shape) < 2 or shape[0] != len(rows) for shape in shapes):
        raise LocalProtocolError(
            f"every parameter needs one gradient for each of {len(rows)} examples, got {shapes}"
        )
    if step < 0:
        raise LocalProtocolError(f"a step counts from 0, got {step}")
