"""Guards: mechanisms that clip representations and add noise before these are sent.

Run by: the party that sends representations (the active of APFed; every passive of TVFL). Protects
from: their receivers. A guard declares its own sensitivity and mechanism, so that the ledger
charges and the report states exactly what was done.

Guarantee of Gaussian noise: two runs that differ in one person's representation at one step give
releases of that row that are (2C / sigma)-GDP apart, under replace-one adjacency and WITH THE
ENCODER HELD FIXED. It is not differential privacy of training: a person's features and label also
move the encoder, and so all the other rows of later steps. Labels have no guarantee. Needs: a key
that no other party has; for the cost of floating point see noise.py.

Letters: B rows of a batch, D numbers of a representation, F rows frozen so far.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.base.transfers import fetch_tensors, send_tensor
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.privacy.accountants import GaussianRelease, Mechanism, NoPrivacy, calibrate_sigma
from secure_apfed.privacy.noise import (
    NoiseSource,
    check_representations,
    clip_finite_rows,
    clip_rows,
    compute_grid_width,
    require_finite_rows,
)
from secure_apfed.settings.plugins import PluginTable, require_class
from secure_apfed.settings.privacy import LARGEST_CLIP, SMALLEST_CLIP, GuardSettings

__all__ = [
    "GUARDS",
    "ClippedNoise",
    "FrozenGaussianGuard",
    "GaussianGuard",
    "NoGuard",
    "NoiseKind",
    "RepresentationGuard",
    "joint_releases_statement",
    "make_guard",
]

NoiseKind: TypeAlias = Literal["secret", "reproducible_insecure"]
# A standard normal exceeds this many deviations with probability 7e-16 (`largest_norm`).
_RARE_DEVIATIONS = 8.0
# Shorter released rows are refused by receivers.
_MIN_SENT_NORM = 1e-3
_ROW_STATEMENT = "row-release guarantee, encoder held fixed"
_SEED_STATEMENT = (
    f"{_ROW_STATEMENT}; and only against somebody who does not know the run's seed, "
    "since the noise is derived from it, and while no step is played twice with other numbers, in "
    "this run or another of that seed"
)


class RepresentationGuard(ABC):
    """A mechanism that protects representations: h, as encoded, becomes z, which is sent.

    A class that declares no noise (`mechanism`) has no guarantee: its epsilon is infinite. Declared
    noise is measured before the first release (`secure_apfed.privacy.measured.check_guard`).

    Attributes:
        name: the guard's key in the table `GUARDS`.
        unsafe: whether it protects nothing.
    """

    name: ClassVar[str]
    unsafe: ClassVar[bool] = True

    @classmethod
    def from_settings(
        cls, settings: GuardSettings, *, delta: float, releases: int, key: bytes
    ) -> "RepresentationGuard":
        """Return the guard that a run's settings describe; this default reads no settings.

        Args:
            settings: the configured mechanism, clip and epsilon or sigma.
            delta: the delta at which epsilon is calibrated.
            releases: T, how often each row is to be released.
            key: 32 secret bytes, from which noise is derived.
        """
        return cls()

    @abstractmethod
    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return z (B, D), which may be sent once the ledger has recorded its privacy cost.

        It is differentiable. The same arguments give the same bytes.

        Args:
            h_BD: representations, float32 or float64.
            step: number of the run's step.
            rows: the positions of their people, int64 of shape (B,).

        Raises:
            LocalProtocolError: arguments of a wrong type or shape.
            ModelError: a row is not finite.
        """

    def twin(self, key: bytes, *, repeatable: bool) -> "RepresentationGuard | None":
        """Return a new guard with the same settings and this key, on which noise is measured.

        The default returns None: a copy of this guard is measured instead.

        `repeatable`: whether the new guard's noise shall depend on key and step only, so that the
        releases of two such guards differ exactly as their inputs do.
        """
        return None

    def sensitivity(self) -> float:
        """Return how far a released row, without noise, can move in L2 if its person is replaced.

        The default is infinite: no bound is known.
        """
        return math.inf

    def mechanism(self) -> Mechanism:
        """Return the privacy mechanism of one release of one row; by default `NoPrivacy`."""
        return NoPrivacy()

    def largest_norm(self, dimension: int) -> float:
        """Return a norm that a released row exceeds with probability below 1e-14.

        The default is infinite: no bound is known. `dimension`: numbers of a row.
        """
        return math.inf

    def smallest_norm(self) -> float:
        """Return the norm of z below which receivers refuse a row.

        Short rows would let the sender single out one passive's answer.
        """
        return _MIN_SENT_NORM

    def describe_guarantee(self) -> str:
        """Return the guarantee in words, for the report."""
        return (
            f"no guarantee: {type(self).__name__} says nothing of its noise (epsilon is infinite)"
        )

    def repeats(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a mask (B,) of the rows whose release would repeat earlier bytes.

        Call it before `release`, and pass the result to the ledger: repeats cost no privacy. By
        default no row repeats.

        `rows`: positions of the rows in the table, int64 of shape (B,).
        """
        return torch.zeros(rows.shape, dtype=torch.bool)

    def count_charges(self, releases: int) -> int:
        """Return how many of `releases` releases of one row cost privacy; repeated bytes do not."""
        return releases

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state that a resumed run needs to release the same bytes; {}: it needs none.

        It is a secret of the party.
        """
        return {}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `tensors` returned.

        Raises CheckpointError: the state was altered or belongs to another guard.
        """
        if tensors:
            raise CheckpointError(
                f"this guard keeps nothing, but the checkpoint holds {sorted(tensors)} for it; "
                "it is of a run with another guard"
            )


class NoGuard(RepresentationGuard):
    """A guard without protection, which sends h itself; its epsilon is infinite.

    It exists so that the absence of protection is a named choice.
    """

    name: ClassVar[str] = "none"
    unsafe: ClassVar[bool] = True

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return h itself, after checking the arguments."""
        _check_release(h_BD, step, rows)
        return h_BD

    def describe_guarantee(self) -> str:
        return "no guarantee: representations are sent as they are (epsilon is infinite)"


def _check_release(h_BD: torch.Tensor, step: int, rows: torch.Tensor) -> None:
    """Check the arguments of a guard's `release`.

    Raises LocalProtocolError: a wrong type or shape, or a negative step.
    """
    check_representations(h_BD)
    if rows.dtype != torch.int64 or rows.shape != h_BD.shape[:1]:
        raise LocalProtocolError(
            f"rows name the {len(h_BD)} representations by int64 positions, "
            f"got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    if step < 0:
        raise LocalProtocolError(f"a step counts from 0, got {step}")


def joint_releases_statement(guarantee: str, passive_count: int) -> str:
    """Return the guarantee, in words, where several passives release rows of the same people.

    Each has a guard of its own, and epsilons for one person add up.

    `guarantee`: the guarantee of one guard, in words. `passive_count`: number of passives.
    """
    if passive_count < 2:
        return guarantee
    return f"{guarantee}; epsilon_x is of one passive's row, and those of one person add up"


class ClippedNoise:
    """The base of guards that clip rows (or examples' gradients) and add Gaussian noise.

    Args:
        clip: C, the L2 bound of one row or gradient.
        sigma: standard deviation of the noise on each number, in the unit of the row.
        key: 32 secret bytes, from which the noise is derived.
        noise: "secret", or "reproducible_insecure": derived from key and step alone.

    Raises:
        ConfigError: clip out of range.
        LocalProtocolError: a key of the wrong length.
    """

    def __init__(self, clip: float, sigma: float, key: bytes, noise: NoiseKind) -> None:
        """Check the clip, and derive the source of noise from the key."""
        if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
            raise ConfigError(f"clip lies in {SMALLEST_CLIP:g}..{LARGEST_CLIP:g}, got {clip}")
        self.clip = float(clip)
        self.sigma = float(sigma)
        self.noise = noise
        self._noise = NoiseSource(key, secret=noise == "secret")

    def __repr__(self) -> str:
        values = f"clip={self.clip:g}, sigma={self.sigma:g}, noise={self.noise!r}"
        return f"{type(self).__name__}({values})"

    def sensitivity(self) -> float:
        """Return 2C, the diameter of the ball in which clipped rows lie.

        A row that is replaced by any other moves no farther.
        """
        return 2 * self.clip

    def mechanism(self) -> GaussianRelease:
        """Return a Gaussian release, with sigma / (2C) as its noise multiplier."""
        return GaussianRelease(noise_multiplier=self.sigma / self.sensitivity())


class GaussianGuard(ClippedNoise, RepresentationGuard):
    """A guard that clips each row's L2 norm to `clip`, and adds Gaussian noise to each number.

    Under noise "secret" the noise is a function of the key, the step, the rows and the clipped
    representations, and the noisy numbers are rounded to a grid. Under "reproducible_insecure" it
    is a function of key and step alone. `secure_apfed.privacy.noise` says why. The gradient of
    `release` is that of the clip; noise and rounding are constants to autograd.

    Args:
        clip: C, the L2 bound of one row.
        sigma: standard deviation of the noise on each number, in the unit of h.
        key: 32 secret bytes; keep them as long as the run may resume.
        noise: "secret", or "reproducible_insecure".

    Raises:
        ConfigError: clip or sigma out of range.
        LocalProtocolError: a key of the wrong length.

    Examples:
        >>> from apfed_protocols.randomness import fresh_key
        >>> guard = GaussianGuard(clip=1.0, sigma=2.0, key=fresh_key())
        >>> z = guard.release(torch.ones(4, 8), step=0, rows=torch.arange(4))
        >>> z.shape, guard.sensitivity(), guard.mechanism().mu
        (torch.Size([4, 8]), 2.0, 1.0)
    """

    name: ClassVar[str] = "gaussian"
    unsafe: ClassVar[bool] = False

    def __init__(
        self, *, clip: float, sigma: float, key: bytes, noise: NoiseKind = "secret"
    ) -> None:
        """Check that sigma is positive, and derive the source of noise from the key."""
        if not (math.isfinite(sigma) and sigma > 0):
            raise ConfigError(f"sigma is a positive number, got {sigma}; use NoGuard for no noise")
        super().__init__(clip, sigma, key, noise)

    @classmethod
    def from_settings(
        cls, settings: GuardSettings, *, delta: float, releases: int, key: bytes
    ) -> "GaussianGuard":
        """Return a guard with the configured sigma, or with sigma calibrated to the epsilon.

        `settings`: the configured clip, noise, and epsilon or sigma. `delta`: the delta at which
        epsilon holds. `releases`: T, how often one row is to be released. `key`: 32 secret bytes of
        the party.
        """
        sigma = settings.sigma
        if sigma is None:
            assert settings.epsilon is not None
            # A frozen row is released once; later messages repeat its bytes, which costs nothing.
            charged_releases = 1 if issubclass(cls, FrozenGaussianGuard) else releases
            sigma = calibrate_sigma(settings.epsilon, delta, charged_releases, settings.clip)
        return cls(clip=settings.clip, sigma=sigma, key=key, noise=settings.noise)

    def twin(self, key: bytes, *, repeatable: bool) -> "GaussianGuard":
        """Return a new guard with the same clip and sigma and this key; see the base class."""
        noise: NoiseKind = "reproducible_insecure" if repeatable else self.noise
        return type(self)(clip=self.clip, sigma=self.sigma, key=key, noise=noise)

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows (B, D), clipped and with noise, in the dtype of `h_BD`.

        `step`: number of the run's step. `rows`: the rows' table positions, int64 of shape (B,).

        Raises LocalProtocolError: a wrong type or shape; ModelError: a row is not finite.
        """
        _check_release(h_BD, step, rows)
        clipped_BD = clip_finite_rows(h_BD, self.clip)
        return self.add_noise(clipped_BD, step=step, rows=rows).to(h_BD.dtype)

    def add_noise(self, clipped_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return clipped float64 rows (B, D) with noise, on their device; the gradient is kept.

        `release` calls it after the clip.

        `step`: number of the run's step. `rows`: the rows' table positions, int64 of shape (B,).

        Raises ModelError: a row is not finite.
        """
        (clean_BD,) = fetch_tensors(clipped_BD)
        require_finite_rows(clean_BD)
        noisy_BD = self._noise.add_noise(clean_BD.numpy(), self.sigma, step=step, rows=rows)
        # Rounded to the grid, a row of few numbers can be all zeros, which receivers refuse. Its
        # first number is moved by one grid step: post-processing, which costs no privacy.
        is_zero_B = ~noisy_BD.any(axis=1)
        noisy_BD[is_zero_B, :1] = compute_grid_width(self.sigma)
        # Zeros in value, which give the result the gradient of the clip (straight-through).
        clip_gradient_BD = clipped_BD - clipped_BD.detach()
        return send_tensor(torch.from_numpy(noisy_BD), clipped_BD.device) + clip_gradient_BD

    def largest_norm(self, dimension: int) -> float:
        """Return C + sigma (sqrt D + 8), which a released row exceeds with probability < 1e-14.

        For a vector g of D standard normals, P(||g|| > sqrt D + t) <= P(one normal > t), which is
        7e-16 at t = 8. The reason is that the norm is 1-Lipschitz with a median below sqrt D
        (Borell 1975; Boucheron, Lugosi and Massart 2013, Concentration Inequalities, Theorem
        10.17).

        `dimension`: D.
        """
        return self.clip + self.sigma * (math.sqrt(dimension) + _RARE_DEVIATIONS)

    def describe_guarantee(self) -> str:
        return _ROW_STATEMENT if self.noise == "secret" else _SEED_STATEMENT


class _FrozenRows:
    """A store of released rows by table position, in arrays that double in size as needed.

    A dictionary of millions of tensors would take too much memory. F is the number of stored rows.
    A slot is a row's index in the arrays, in the order in which rows were added.
    """

    def __init__(self) -> None:
        """Start with an empty store."""
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._row_count = 0
        self._positions = torch.empty(0, dtype=torch.int64)  # the table position of each slot
        self._released_rows = torch.empty(0, 0)  # the released row of each slot
        self._slots = torch.empty(0, dtype=torch.int64)  # each position's slot; -1: not stored

    @property
    def positions(self) -> torch.Tensor:
        """The stored rows' table positions, (F,)."""
        return self._positions[: self._row_count]

    @property
    def released_rows(self) -> torch.Tensor:
        """The stored rows, as they were released, (F, D)."""
        return self._released_rows[: self._row_count]

    def has_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a mask (B,) of the table positions `rows` that are stored."""
        return self._find_slots(rows) >= 0

    def find_first_occurrences(self, rows: torch.Tensor) -> torch.Tensor:
        """Return where in `rows` (B,) new positions are, each at its first occurrence, ascending.

        New positions are the ones that are not stored. One may occur several times in a batch, and
        is to be stored once.
        """
        new_indices = (~self.has_rows(rows)).nonzero().flatten()
        if not len(new_indices):
            return new_indices
        distinct_rows, distinct_index = torch.unique(rows.cpu()[new_indices], return_inverse=True)
        # The smallest index of each distinct position; `len(rows)` is larger than any.
        beyond_all = new_indices.new_full((len(distinct_rows),), len(rows))
        first_indices = beyond_all.scatter_reduce(0, distinct_index, new_indices, "amin")
        return first_indices.sort().values

    def take_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the released rows at these table positions, (B, D); all must be stored."""
        return self._released_rows[self._find_slots(rows)]

    def add_rows(self, rows: torch.Tensor, z_BD: torch.Tensor) -> None:
        """Store released rows (B, D) for these table positions (B,).

        The positions must be distinct and not stored yet.
        """
        if not len(rows):
            return
        if not self._row_count:
            self._released_rows = z_BD.new_empty(0, z_BD.shape[1])
        end = self._row_count + len(rows)
        self._positions = _grow_array(self._positions, end)
        self._released_rows = _grow_array(self._released_rows, end)
        self._slots = _grow_array(self._slots, int(rows.max()) + 1, fill_value=-1)
        self._positions[self._row_count : end] = rows
        self._released_rows[self._row_count : end] = z_BD
        self._slots[rows] = torch.arange(self._row_count, end)
        self._row_count = end

    def _find_slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the slot of each position, (B,); -1: it is not stored."""
        rows = rows.cpu()
        # The usual case: all positions are inside the array.
        if not len(rows) or 0 <= int(rows.min()) <= int(rows.max()) < len(self._slots):
            return self._slots[rows]
        slots = torch.full_like(rows, -1)
        is_inside = (rows >= 0) & (rows < len(self._slots))
        slots[is_inside] = self._slots[rows[is_inside]]
        return slots


def _grow_array(array: torch.Tensor, min_length: int, *, fill_value: int = 0) -> torch.Tensor:
    """Return the array if it has `min_length` rows, else a longer copy whose new rows hold
    `fill_value`.

    The copy is at least twice as long, so that many small additions need few copies.
    """
    if len(array) >= min_length:
        return array
    grown = array.new_full((max(min_length, 2 * len(array)), *array.shape[1:]), fill_value)
    grown[: len(array)] = array
    return grown


class FrozenGaussianGuard(GaussianGuard):
    """A guard that adds noise to each row once, and sends this frozen result in every epoch.

    Protects from averaging over epochs: many epochs reveal no more of a row than its first release.
    Guarantee: that of one Gaussian release of each row, however long the run, with the encoder held
    fixed. The price is that receivers see every row as the encoder computed it when the row was
    first sent, early in the run and hardly trained. The gradient is straight-through: the gradient
    that arrives for the frozen row is applied to the current clipped representation, as if that had
    been sent.

    A frozen row is scaled by 1 / sqrt(1 + D sigma^2 / C^2), which brings the norm of clipped row
    and noise back to about C. The scale is public, so this is post-processing and costs no privacy.
    Without it receivers would get rows as long as the noise, and their networks would diverge where
    epsilon is small. Gradients are not scaled: they help by the passives' features that they carry,
    which does not depend on h (apfed-without-labels.md).

    The frozen rows are state: a resumed run must restore them, or it would release its rows with
    new noise, which the ledger would charge.

    Examples:
        >>> from apfed_protocols.randomness import fresh_key
        >>> guard = FrozenGaussianGuard(clip=1.0, sigma=2.0, key=fresh_key())
        >>> first = guard.release(torch.ones(2, 8), step=0, rows=torch.tensor([4, 7]))
        >>> again = guard.release(torch.zeros(2, 8), step=1, rows=torch.tensor([7, 5]))
        >>> bool((again[0] == first[1]).all()), guard.repeats(torch.tensor([5, 6])).tolist()
        (True, [True, False])
    """

    name: ClassVar[str] = "frozen_gaussian"

    @cached_property
    def _frozen_rows(self) -> "_FrozenRows":
        """The store of frozen rows, empty at first."""
        return _FrozenRows()

    def compute_scale(self, dimension: int) -> float:
        """Return the factor that scales a noisy row back to about the clip norm.

        It is 1 / sqrt(1 + D sigma^2 / C^2) for a row of D = `dimension` numbers.
        """
        return 1 / math.hypot(1, math.sqrt(dimension) * self.sigma / self.clip)

    def largest_norm(self, dimension: int) -> float:
        return self.compute_scale(dimension) * super().largest_norm(dimension)

    def smallest_norm(self) -> float:
        # Scaled rows are about as long as the clip.
        return super().smallest_norm() * min(1.0, self.clip)

    def release(self, h_BD: torch.Tensor, *, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return each row (B, D) as it was first released, with the noise of that time.

        Rows that were never released get noise, and are stored to be repeated in all later calls.
        The gradient is that of the current clipped rows (straight-through).

        `step`: number of the run's step. `rows`: the rows' table positions, int64 of shape (B,).

        Raises LocalProtocolError: a wrong type or shape; ModelError: a row is not finite.
        """
        _check_release(h_BD, step, rows)
        frozen_FD = self._frozen_rows.released_rows
        has_other_format = frozen_FD.shape[1:] != h_BD.shape[1:] or frozen_FD.dtype != h_BD.dtype
        if len(frozen_FD) and has_other_format:
            raise LocalProtocolError(
                f"rows were frozen as {frozen_FD.shape[1]} numbers of {frozen_FD.dtype}, "
                f"got {h_BD.shape[1]} of {h_BD.dtype}; a guard serves one representation"
            )
        clipped_BD = clip_rows(h_BD, self.clip).to(h_BD.dtype)
        if not len(rows):
            return clipped_BD
        new_indices = self._frozen_rows.find_first_occurrences(rows)
        if len(new_indices):
            new_BD = h_BD.detach()[send_tensor(new_indices, h_BD.device)]
            new_rows = rows[new_indices.to(rows.device)]
            z_BD = super().release(new_BD, step=step, rows=new_rows)
            z_BD = z_BD * self.compute_scale(h_BD.shape[1])
            self._frozen_rows.add_rows(new_rows.cpu(), z_BD.cpu())
        frozen_BD = send_tensor(self._frozen_rows.take_rows(rows), h_BD.device)
        # The difference is zero in value; it gives the result the gradient of the clip.
        return frozen_BD + (clipped_BD - clipped_BD.detach())

    def repeats(self, rows: torch.Tensor) -> torch.Tensor:
        return self._frozen_rows.has_rows(rows)

    def count_charges(self, releases: int) -> int:
        return min(releases, 1)

    def describe_guarantee(self) -> str:
        guarantee = super().describe_guarantee()
        return f"{guarantee}; each row is noised once, scaled, and sent unchanged ever after"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the frozen rows: positions (F,), and what was released for them, (F, D)."""
        frozen_rows = self._frozen_rows
        if not len(frozen_rows.positions):
            return {}
        return {"rows": frozen_rows.positions.clone(), "z": frozen_rows.released_rows.clone()}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the frozen rows that `tensors` returned.

        Raises CheckpointError: positions repeat, or shapes do not match.
        """
        rows = tensors.get("rows", torch.zeros(0, dtype=torch.int64))
        z_FD = tensors.get("z", torch.zeros(0, 1))
        if (
            rows.dtype != torch.int64
            or z_FD.ndim != 2
            or rows.shape != z_FD.shape[:1]
            or len(rows.unique()) < len(rows)
            or bool((rows < 0).any())
        ):
            raise CheckpointError(
                f"frozen rows are positions and as many rows of numbers, got {rows.dtype} of shape "
                f"{tuple(rows.shape)} and shape {tuple(z_FD.shape)}; the checkpoint was "
                "altered or is of another run"
            )
        self._frozen_rows.clear()
        self._frozen_rows.add_rows(rows.cpu(), z_FD.cpu())


def make_guard(
    settings: GuardSettings, *, delta: float, releases: int, key: bytes
) -> RepresentationGuard:
    """Return the configured guard, with noise calibrated for all planned releases of each row.

    Args:
        settings: the configured mechanism, clip and epsilon or sigma.
        delta: the delta at which epsilon is calibrated.
        releases: T, how often each row is to be released.
        key: 32 fresh secret bytes; under "reproducible_insecure" derived from the run's seed, of
            which the caller warns.

    Raises:
        ConfigError: sigma is to be calibrated for fewer than one release.
        LocalProtocolError: a key of the wrong length.
    """
    guard_class = GUARDS[settings.mechanism]
    return guard_class.from_settings(settings, delta=delta, releases=releases, key=key)


def _require_guard(candidate: Any, code: str) -> type[RepresentationGuard]:
    """Check that a class named as `package.module:Name` is a RepresentationGuard; return it."""
    del code  # the name, which other kinds of plug-ins use
    guard_class: type[RepresentationGuard] = require_class(candidate, RepresentationGuard)
    return guard_class


GUARDS: PluginTable[type[RepresentationGuard]] = PluginTable(
    {guard.name: guard for guard in (NoGuard, GaussianGuard, FrozenGaussianGuard)},
    plugin_kind="guards",
    make_entry=_require_guard,
)
