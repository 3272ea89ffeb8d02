"""Per-row clip and Gaussian noise on representations.

Run by: the party that sends representations. Against: whoever receives them.

Guarantee: two runs that differ in one person's representation at one step give releases
of that row that are (2C / sigma)-GDP apart, under replace-one adjacency and WITH THE
ENCODER HELD FIXED. It is not differential privacy of training: a person's features and
label also move the encoder, and so all the other rows of later steps. Labels have no
guarantee. Needs: a key that nobody else has; noise.py says what floating point costs.

Shapes: B rows of a batch, D numbers of a representation.
"""

import hashlib
import math
from typing import ClassVar, Literal

import torch

from protocols.errors import LocalProtocolError
from protocols.randomness import KEY_BYTES
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.clip import clip_rows
from secure_apfed.privacy.gdp import calibrate_sigma
from secure_apfed.privacy.guard import WithoutMemory, check_release
from secure_apfed.privacy.mechanism import GaussianRelease, Mechanism
from secure_apfed.privacy.noise import on_grid, standard_normals
from secure_apfed.privacy.settings import LARGEST_CLIP, SMALLEST_CLIP, GuardSettings

__all__ = ["GaussianGuard"]

_RARE_DEVIATIONS = 8.0
_ROW_STATEMENT = "row-release guarantee, encoder held fixed"
_SEED_STATEMENT = (
    f"{_ROW_STATEMENT}; and only against somebody who does not know the run's seed, "
    "since the noise is derived from it, and while no step is played twice with other numbers, in "
    "this run or another of that seed"
)


class GaussianGuard(WithoutMemory):
    """Clips each row to norm `clip` and adds Gaussian noise of deviation `sigma` to each number.

    The noise is a pseudo-random function of the key, the step, the rows and the clipped
    representations: a resumed run that computes the same batch again sends the same bytes,
    which cost nothing more, while a run that resumes differently gets independent noise. Noise
    bound to the step alone could be taken off by subtracting two such releases; that is what
    `noise="reproducible_insecure"` does, so that experiments repeat with the run's seed.

    Under "secret" the noisy numbers are rounded to a grid, see noise.py. The gradient of `release`
    is that of the clip; noise and rounding are constants to autograd.

    Args:
        clip: C, the L2 bound of one row.
        sigma: standard deviation of the noise on each number, in the unit of h.
        key: 32 secret bytes; keep them as long as the run may resume.
        noise: "secret", or "reproducible_insecure".

    Raises:
        ConfigError: clip or sigma out of range.
        LocalProtocolError: a key of the wrong length.

    Example:
        >>> from protocols.randomness import fresh_key
        >>> guard = GaussianGuard(clip=1.0, sigma=2.0, key=fresh_key())
        >>> z = guard.release(torch.ones(4, 8), step=0, rows=torch.arange(4))
        >>> z.shape, guard.sensitivity(), guard.mechanism().mu
        (torch.Size([4, 8]), 2.0, 1.0)
    """

    name: ClassVar[str] = "gaussian"
    unsafe: ClassVar[bool] = False

    def __init__(
        self,
        *,
        clip: float,
        sigma: float,
        key: bytes,
        noise: Literal["secret", "reproducible_insecure"] = "secret",
    ) -> None:
        if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
            raise ConfigError(f"clip lies in {SMALLEST_CLIP:g}..{LARGEST_CLIP:g}, got {clip}")
        if not (math.isfinite(sigma) and sigma > 0):
            raise ConfigError(f"sigma is a positive number, got {sigma}; use NoGuard for no noise")
        if len(key) != KEY_BYTES:
            raise LocalProtocolError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        self.clip, self.sigma, self.noise = float(clip), float(sigma), noise
        self._key = key

    @classmethod
    def from_settings(
        cls, settings: GuardSettings, *, releases: int, key: bytes
    ) -> "GaussianGuard":
        """Build it for `releases` planned releases of each row, calibrating sigma if asked to."""
        sigma = settings.sigma
        if sigma is None:
            assert settings.epsilon is not None
            sigma = calibrate_sigma(settings.epsilon, settings.delta, releases, settings.clip)
        return cls(clip=settings.clip, sigma=sigma, key=key, noise=settings.noise)

    def __repr__(self) -> str:
        return f"GaussianGuard(clip={self.clip:g}, sigma={self.sigma:g}, noise={self.noise!r})"

    def __reduce__(self) -> str:
        raise LocalProtocolError("a guard holds the noise key, a secret, and is never serialised")

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return clipped and noisy representations; see `RepresentationGuard.release`."""
        check_release(h_BD, step=step, rows=rows)
        clipped_BD = clip_rows(h_BD, self.clip)
        clean = clipped_BD.detach().cpu().numpy()
        context = [step.to_bytes(8, "big")]
        if self.noise == "secret":
            place = rows.cpu().numpy().tobytes()
            context += [place, hashlib.blake2b(clean.tobytes()).digest()]
        noise = standard_normals(self._key, *context, shape=clean.shape)
        noisy = clean + self.sigma * noise
        if self.noise == "secret":
            noisy = on_grid(noisy, self.sigma)
        through_BD = clipped_BD - clipped_BD.detach()  # zeros, with the gradient of the clip
        return (torch.from_numpy(noisy).to(h_BD.device) + through_BD).to(h_BD.dtype)

    def sensitivity(self) -> float:
        """2C: a clipped row moves at most across the ball's diameter."""
        return 2 * self.clip

    def mechanism(self) -> Mechanism:
        """Gaussian, with sigma / (2C) as its noise multiplier."""
        return GaussianRelease(noise_multiplier=self.sigma / self.sensitivity())

    def largest_norm(self, dimension: int) -> float:
        """C + sigma (sqrt D + 8).

        For D normals g, P(||g|| > sqrt D + t) <= P(one normal > t), which is 7e-16 at t = 8: the
        norm is 1-Lipschitz and its median is below sqrt D (Borell 1975; Boucheron, Lugosi and
        Massart 2013, Concentration Inequalities, Theorem 10.17).
        """
        return self.clip + self.sigma * (math.sqrt(dimension) + _RARE_DEVIATIONS)

    def statement(self) -> str:
        """The row-release guarantee, and what it leaves out."""
        return _ROW_STATEMENT if self.noise == "secret" else _SEED_STATEMENT
