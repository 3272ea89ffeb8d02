"""Clipping and keyed noise: bounded rows, and noise derived from a key, the step, and the values
that it is added to.

Run by: every party that adds noise, in a guard, a defence or under a sum. The sensitivity that a
guard states rests on the clip's bound alone, so it is kept for any finite row: huge, tiny or zero.
The noise is against anybody without
the key, to whom the noise is computationally indistinguishable from 64 independent bits a number
(AES-256 in counter mode, then the inverse normal CDF).

Freshness. Bound to the rows and values that it is added to (`NoiseSource` as it is), noise never
serves two different releases: a resumed run that computes the same batch again sends the same
bytes, which tell nothing more and cost nothing more, and a run that resumes differently gets
independent noise. Bound to the step alone (`secret=False`, "reproducible_insecure" in settings),
experiments repeat with the run's seed; but two different releases of one step then differ by no
noise at all, which ledgers take into account, and anyone who knows the seed can remove the noise.

Floating point. A bound of Gaussian DP is about real numbers, and the low bits of a sum of floats
tell what was added (Mironov 2012, On Significance of the Least Significant Bits). So guards
round the noisy numbers to a grid of width g, about sigma / 10, far above those bits:
`round_to_grid`.

Were the noise exact, that would be post-processing of an exact Gaussian release. What is
computed differs from it only where its error crosses one of the borders between two points of
the grid. In units of sigma the error is at most

    e = 1e-15 |n| + 2e-16 (1 + C / sigma) + 2^-63 / phi(n):

the inverse CDF (below 7.2e-16 relative, as Cephes states), its argument, the product by sigma
and the sum; and the 64 bits from which n is drawn, a sign and a tail probability of 63 bits.
With borders at least sigma / 16 apart, the chance of a crossing is at most the integral of
32 e phi(n), below 4e-14 (1 + C / sigma) a number; beyond 9.1 sigma, where the drawn noise ends,
the true one has 2e-19. N numbers that concern one record are so within N 4e-14 (1 + C / sigma)
of the stated law in total variation, which costs (1 + e^epsilon) times that in delta: for 64
numbers released 50 times with sigma >= C, 1e-9 at epsilon 1 and 8e-7 at epsilon 8. It is not
added to the delta that is reported.

The grid adds at most 0.14 % to the variance and nothing that could be measured to the mean.

Shapes: B rows of a batch, D numbers of a representation, P parameters.
"""

import hashlib
import math
from functools import lru_cache
from operator import index

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.randomness import KEY_BYTES, derive_key, keystream
from secure_apfed.base.transfers import fetch_tensors
from secure_apfed.errors import ModelError

_FLOAT64_EPS = torch.finfo(torch.float64).eps
_PURPOSE = b"secure-apfed gaussian noise v1"
# Integers below it are exact in float64.
_LARGEST_EXACT_INTEGER = 2.0**53


def onto_ball(wide_BD: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the rows (B, D), scaled down to an L2 norm of `bound` where it is larger.

    The norm is exact up to rounding. Nothing is checked, so that `torch.func` can trace the
    function. The gradient is that of the map itself: the identity for rows within the bound; for
    the others the projection onto the sphere's tangent, times bound / norm.
    """
    # Divided by its largest entry a row has a norm in [1, sqrt(D)], so no square overflows or
    # vanishes. The scale is a constant to autograd, rightly: the result does not depend on it.
    largest_B1 = wide_BD.detach().abs().amax(dim=-1, keepdim=True)
    scale_B1 = torch.where(largest_B1 > 0, largest_B1, 1.0)
    scaled_BD = wide_BD / scale_B1
    norm_B1 = torch.linalg.vector_norm(scaled_BD, dim=-1, keepdim=True)
    is_too_long_B1 = norm_B1 > bound / scale_B1
    # For rows that stay the divisor is 1, since the gradient of bound / norm would be NaN at 0.
    divisor_B1 = torch.where(is_too_long_B1, norm_B1, 1.0)
    shortened_BD = scaled_BD * (bound / divisor_B1)
    return torch.where(is_too_long_B1, shortened_BD, wide_BD)


def check_representations(h_BD: torch.Tensor) -> None:
    """Raise LocalProtocolError unless this is a matrix of float32 or float64."""
    if h_BD.ndim != 2 or h_BD.dtype not in (torch.float32, torch.float64):
        raise LocalProtocolError(
            "representations are a float32 or float64 matrix, one row a person, "
            f"got {h_BD.dtype} of shape {tuple(h_BD.shape)}"
        )


def clip_rows(h_BD: torch.Tensor, bound: float) -> torch.Tensor:
    """Return `h_BD` in float64 with every row longer than `bound` scaled down onto it.

    Guarantee: the exact norm of each returned row is at most `bound`, also after it is
    rounded to the type of `h_BD`; rows within the bound come back unchanged. To leave room
    for rounding, rows are scaled onto bound (1 - margin), where the margin is a few units
    in the last place (about 5e-7 for float32).

    Raises:
        LocalProtocolError: not a matrix of float32 or float64.
        ModelError: a row holds NaN or an infinity.
    """
    check_representations(h_BD)
    require_finite_rows(h_BD)
    return clip_finite_rows(h_BD, bound)


def clip_finite_rows(h_BD: torch.Tensor, bound: float) -> torch.Tensor:
    """Return `h_BD` in float64 with finite rows clipped to L2 norm `bound`; see `clip_rows`.

    A row that is not finite stays non-finite, for the caller to refuse. No value is read on the
    CPU, so nothing waits for a GPU. It computes in float64 there, too: the bound is exact only
    because the rounding errors of float64 are far below the precision of `h_BD`.
    """
    wide_BD = h_BD.double()
    if not h_BD.numel():
        return wide_BD
    # Room for rounding to the type of `h_BD`, and for the rounding of the norm's D terms.
    rounding_margin = 4 * torch.finfo(h_BD.dtype).eps + (h_BD.shape[1] + 8) * _FLOAT64_EPS
    return onto_ball(wide_BD, bound * (1 - rounding_margin))


def clip_and_fetch(h_BD: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (B, D) clipped as by `clip_rows`, and a copy of the result on the CPU.

    The first is on the device of `h_BD` and in the autograd graph; the copy is detached. The CPU
    waits for a GPU once only. `bound`: C, largest L2 norm of a row. Raises LocalProtocolError:
    not a matrix of float32 or float64; ModelError: a row holds NaN or an infinity.
    """
    check_representations(h_BD)
    clipped_BD = clip_finite_rows(h_BD, bound)
    (fetched_BD,) = fetch_tensors(clipped_BD)
    require_finite_rows(fetched_BD)
    return clipped_BD, fetched_BD


def require_finite_rows(h_BD: torch.Tensor) -> None:
    """Raise ModelError if a row holds NaN or an infinity; name the first one."""
    finite_BD = np.isfinite(h_BD.numpy(force=True))
    if not finite_BD.all():
        raise ModelError(
            f"row {int(np.argwhere(~finite_BD)[0, 0])} of the representations is not finite, so "
            "nothing was released; the encoder has diverged: lower its learning rate or check the "
            "features"
        )


def clip_gradients(gradient_BP: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the gradients (B, P) of B examples, each scaled down to L2 norm `bound` if longer.

    A gradient that is not finite becomes zeros: an error would reveal that example.

    `gradient_BP`: one row of P numbers for each example, float64.
    """
    finite_B1 = gradient_BP.isfinite().all(dim=1, keepdim=True)
    # Slightly below `bound`, so that rounding errors of the norm's P terms do not exceed it.
    inner_max_norm = bound * (1 - (gradient_BP.shape[1] + 8) * _FLOAT64_EPS)
    return onto_ball(torch.where(finite_B1, gradient_BP, 0.0), inner_max_norm)


class NoiseSource:
    """A source of a party's noise for one purpose.

    Args:
        key: 32 secret bytes.
        secret: whether noise depends also on the rows and values that it is added to; otherwise on
            key and step only, and it can be recomputed from them.

    Raises:
        LocalProtocolError: a key of the wrong length.
    """

    def __init__(self, key: bytes, *, secret: bool = True) -> None:
        """Check the key's length."""
        if len(key) != KEY_BYTES:
            raise LocalProtocolError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        self._key = key
        self.secret = secret

    def for_content(self, content: bytes) -> "NoiseSource":
        """Return an independent source of noise, derived from this content, such as a message.

        A source whose noise depends on key and step only (`secret` is False) returns itself.
        """
        return NoiseSource(derive_key(self._key, content)) if self.secret else self

    def __reduce__(self) -> str:
        """Refuse to be pickled. Raises LocalProtocolError."""
        raise LocalProtocolError("a noise key is a secret of its party and is never serialised")

    def add_noise(
        self, values: NDArray[np.float64], sigma: float, *, step: int, rows: Tensor
    ) -> NDArray[np.float64]:
        """Return `values` with Gaussian noise, rounded to the grid if the noise is secret.

        Args:
            values: clipped numbers, of any shape.
            sigma: standard deviation of the noise, in the unit of the values.
            step: number of the run's step.
            rows: table positions of the values' rows, int64; secret noise depends on them.
        """
        positions = rows.cpu().numpy().astype("<i8").tobytes()
        content = hashlib.blake2b(np.ascontiguousarray(values).data).digest()
        context = self._bind_context(step, positions, content)
        # Noise is scaled and added in place, which saves copies of a large batch.
        noisy = draw_standard_normals(self._key, *context, shape=values.shape)
        noisy *= sigma
        noisy += values
        return round_to_grid(noisy, sigma) if self.secret else noisy

    def draw_normals(self, values_BD: Tensor, *, use: str, step: int) -> Tensor:
        """Return standard normals with shape, dtype and device of `values_BD`, for a defence.

        They are independent for each `use` (a text) and step. Secret noise also depends on the
        values.
        """
        content = values_BD.detach().cpu().contiguous().numpy().tobytes()
        context = self._bind_context(step, hashlib.blake2b(content).digest())
        normals = draw_standard_normals(
            self._key, b"defence", use.encode(), *context, shape=tuple(values_BD.shape)
        )
        return torch.from_numpy(normals).to(values_BD.device, values_BD.dtype)

    def draw_integers(
        self, shape: tuple[int, ...], deviation: int, *, step: int, digest: bytes
    ) -> NDArray[np.int64]:
        """Return discrete Gaussian noise of this shape.

        `deviation`: standard deviation of each number, in fixed-point steps. `digest`: digest of
        the rows and values that the noise is added to.
        """
        context = self._bind_context(step, digest)
        return discrete_gaussian(self._key, *context, deviation=deviation, shape=shape)

    def _bind_context(self, step: int, *content: bytes) -> tuple[bytes, ...]:
        """Return the bytes from which noise is derived together with the key.

        They are the step and, if the noise is secret, `content` (digests of rows and values).
        """
        step_bytes = index(step).to_bytes(8, "big")
        return (step_bytes, *content) if self.secret else (step_bytes,)


def draw_standard_normals(
    key: bytes, *context: bytes, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return independent standard normals, a function of (key, context, shape) alone.

    Another context, which names the use, gives independent numbers. `key`: 32 secret bytes.
    """
    sizes = np.array(shape, dtype="<u8").tobytes()
    length = 8 * math.prod(shape)
    words = np.frombuffer(keystream(key, _PURPOSE, sizes, *context, length=length), dtype="<u8")
    # 63 bits of a word give k, and (k + 1) / 2^64 lies in (0, 1/2]: the probability of the lower
    # tail, whose normal is negative or 0. The last bit is the sign.
    tail_probabilities = (words >> np.uint64(1)).astype(np.float64)
    tail_probabilities += 1
    tail_probabilities *= 2.0**-64
    signs = 1 - 2 * (words & np.uint64(1)).astype(np.float64)
    normals: NDArray[np.float64] = scipy.special.ndtri(tail_probabilities)
    normals *= signs
    return normals.reshape(shape)


@lru_cache(maxsize=64)
def compute_grid_width(sigma: float) -> float:
    """Return the distance of the grid's points, to which numbers with noise sigma are rounded.

    It is the power of two in (sigma / 16, sigma / 8].
    """
    exponent = int(np.floor(np.log2(sigma))) - 3
    return float(np.ldexp(1.0, exponent))


def round_to_grid(noisy: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Return noisy numbers rounded to multiples of the grid's width (`compute_grid_width`).

    The low bits of a floating-point sum could reveal what was added; rounding removes them. Numbers
    of 2^53 widths or more are multiples already and stay as they are.
    """
    width = compute_grid_width(sigma)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        steps = noisy / width
        is_roundable = np.abs(steps) < _LARGEST_EXACT_INTEGER
        rounded = np.rint(steps, out=steps)
        rounded *= width
        return np.asarray(np.where(is_roundable, rounded, noisy))
