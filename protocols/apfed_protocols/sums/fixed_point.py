"""The one quantiser of all secure sums: row clip, fixed point, and packing into slots.

Run by: every passive (clip, quantise, pack) and the active (unpack, dequantise), with
the same public numbers on both ends. Protects: the sum's range, so that no honest
contribution can wrap around; and the receiver's learning, as rows beyond the agreed
bound never leave their owner.

Shapes: B rows, D columns, V slot vectors of S slots.
"""

import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import ClippingWarning, LocalProtocolError
from apfed_protocols.noise import largest_noise
from apfed_protocols.sums.interface import (
    FloatArray,
    IntArray,
    SumAgreement,
    count_number_bits,
)

EXACT_FLOAT_BITS = 53
"""Integers of so many bits are exact in float64."""
CHECKED_SLOTS = 8
"""Slots of zeros behind the numbers of a short vector, by which a damaged sum of few numbers shows:
masks that do not cancel, or an altered ciphertext, leave 8 of them at zero with probability below
2^-300."""
_COLUMNS_PER_CHUNK = 8192  # OpenBLAS uses a single thread for up to 10,000 numbers
SECURE_MODULUS_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
"""Ring degree to the largest modulus at 128-bit classical security, ternary secret.

HomomorphicEncryption.org standard (Albrecht et al. 2018), table 1; SEAL enforces the same.
"""


def check_matrix(values_BD: object) -> FloatArray:
    """Return `values_BD`, B rows of D numbers, unchanged, if it is a finite, non-empty float32 or
    float64 matrix of NumPy. Raises LocalProtocolError: it is something else.
    """
    # No subclass either: masked arrays and matrices add, reshape and copy in other ways.
    if type(values_BD) is not np.ndarray:
        kind = type(values_BD).__name__
        raise LocalProtocolError(f"a contribution is a float32 or float64 array, got {kind}")
    if values_BD.dtype not in (np.float32, np.float64):
        raise LocalProtocolError(
            f"a contribution is a float32 or float64 array, got {values_BD.dtype}"
        )
    if values_BD.ndim != 2 or values_BD.size == 0:
        raise LocalProtocolError(
            f"a contribution is a non-empty matrix (rows, columns), got shape {values_BD.shape}"
        )
    if not np.isfinite(values_BD).all():
        not_finite = int(np.count_nonzero(~np.isfinite(values_BD)))
        raise LocalProtocolError(
            f"{not_finite} of {values_BD.size} values of a contribution are NaN or infinite; "
            "lower the learning rate or check the objective"
        )
    return values_BD


TOO_MANY_CLIPPED = 0.01
"""Share of rows beyond the bound above which another bound is asked for."""
TOO_MANY_LOST = 0.1
"""Share of numbers other than 0 that round to 0 above which a contribution is too small: of normal
numbers that have it a sum is off by about 7 %.
"""


@dataclass
class Clipping:
    """Counts of what clipping and rounding changed in one party's contributions; never sent.

    Attributes:
        rows: the rows that it contributed.
        clipped: how many of them exceeded the L2 bound.
        largest_norm: the largest L2 norm of a row before it was clipped; infinite where its
            squares overflow.
        quiet: give no warnings; for a caller that reports these counts itself.
        numbers: the numbers other than 0 that it contributed.
        lost: how many of them are below half a step of fixed point, so that 0 was added.
        too_small: contributions that lost a share of `TOO_MANY_LOST` of their numbers or more.
    """

    rows: int = 0
    clipped: int = 0
    largest_norm: float = 0.0
    quiet: bool = False
    numbers: int = 0
    lost: int = 0
    too_small: int = 0

    def count_rows(self, norm_B: NDArray[np.float64], clip_norm: float) -> None:
        """Add the rows of one contribution to the counts, given their L2 norms before clipping."""
        self.rows += len(norm_B)
        self.clipped += int(np.count_nonzero(norm_B > clip_norm))
        self.largest_norm = max(self.largest_norm, float(norm_B.max()))

    def count_lost(self, numbers: int, kept_numbers: int) -> None:
        """Add one contribution to the counts of lost numbers: those that rounding to fixed point
        turns into 0. A contribution that loses a tenth of its numbers or more counts as too small.

        Args:
            numbers: how many values of the contribution are not 0 before rounding.
            kept_numbers: how many of them are not 0 after rounding.
        """
        lost = numbers - kept_numbers
        self.numbers += numbers
        self.lost += lost
        if lost and lost >= TOO_MANY_LOST * numbers:
            self.too_small += 1

    def warn_of_clipping(
        self, me: str, fixed_point: "FixedPoint", counts_before: "Clipping"
    ) -> None:
        """Warn (ClippingWarning) if, by the last contribution, the number of clipped rows or the
        number of too small contributions reached 1, 10, 100, ...

        Args:
            me: the party's name, for the warning.
            fixed_point: the format in which the party contributes.
            counts_before: a copy of these counts from before the last contribution.
        """
        if self.quiet:
            return
        if passes_power_of_ten(counts_before.clipped, self.clipped):
            warnings.warn(
                f"{me} clipped {self.clipped} of {self.rows} rows to norm "
                f"{fixed_point.clip_norm:g}, the "
                f"largest of norm {self.largest_norm:.3g}: the sum is of what was left. Agree on a "
                f"larger clip where that is not meant; {me}'s `clipping` counts on",
                ClippingWarning,
                stacklevel=4,
            )
        if passes_power_of_ten(counts_before.too_small, self.too_small):
            warnings.warn(
                f"{me}: {self.lost} of {self.numbers} numbers are below half a step of fixed "
                f"point, {fixed_point.clip_norm / fixed_point.max_level / 2:.3g}, and were added "
                "as 0; so were a "
                f"tenth or more in {self.too_small} contributions. Agree on a smaller clip than "
                f"{fixed_point.clip_norm:g} or more bits than {fixed_point.bits}; {me}'s "
                "`clipping` counts on",
                ClippingWarning,
                stacklevel=4,
            )


def passes_power_of_ten(before: int, after: int) -> bool:
    """Return whether a count that grew from `before` to `after` reached or passed a power of ten
    (1, 10, 100, ...): then it has more digits.
    """
    digits_before = len(str(before)) if before else 0
    digits_after = len(str(after)) if after else 0
    return digits_after > digits_before


def clip_rows(
    values_BD: FloatArray, clip_norm: float, clipping: Clipping | None = None
) -> NDArray[np.float64]:
    """Return a C-contiguous float64 copy of `values_BD`, B rows of D numbers, in which every row
    whose L2 norm exceeds `clip_norm` is scaled down to that norm.

    For any finite row the resulting norm is at most `clip_norm` times 1 + 1e-15 * sqrt(D): a row
    whose squares overflow is first divided by its largest magnitude, and a row whose squares
    vanish is below any bound that an agreement may have (1e-30 or more).

    `clipping`: counts all rows, and the rows that are clipped; None: nothing is counted.
    """
    clipped_BD = values_BD.astype(np.float64, order="C")
    squares_B = np.zeros(len(clipped_BD))
    with np.errstate(over="ignore"):
        # In chunks of columns that BLAS multiplies in one thread. It would spread each longer
        # product over threads, which wait for each other many times as long as they work if other
        # processes use the processors.
        for start in range(0, clipped_BD.shape[1], _COLUMNS_PER_CHUNK):
            chunk = clipped_BD[:, start : start + _COLUMNS_PER_CHUNK]
            squares_B += np.vecdot(chunk, chunk)
    norm_B = np.sqrt(squares_B)
    if clipping is not None:
        clipping.count_rows(norm_B, clip_norm)
    has_overflow_B = ~np.isfinite(norm_B)
    if has_overflow_B.any():
        # Scaled so that the largest magnitude is twice the bound: still clipped, without overflow.
        clipped_BD[has_overflow_B] /= np.abs(clipped_BD[has_overflow_B]).max(axis=1, keepdims=True)
        clipped_BD[has_overflow_B] *= 2 * clip_norm
        norm_B[has_overflow_B] = np.linalg.norm(clipped_BD[has_overflow_B], axis=1)
    is_too_long_B = norm_B > clip_norm
    if is_too_long_B.any():
        clipped_BD[is_too_long_B] *= (clip_norm / norm_B[is_too_long_B])[:, None]
    return clipped_BD


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """A signed fixed-point format over [-clip_norm, clip_norm] for the values of a sum. One step is
    clip_norm / (2^(bits - 1) - 1).

    Attributes:
        clip_norm: C, the L2 bound of a row.
        bits: width of one value, sign included.
        contributor_count: M, how many quantised vectors are added.
        noise: standard deviation of the discrete Gaussian noise on each value of each of them, in
            steps; 0: no noise.
    """

    clip_norm: float
    bits: int
    contributor_count: int
    noise: int = 0

    @classmethod
    def from_agreement(cls, agreement: SumAgreement) -> "FixedPoint":
        """Return the format for an agreement's clip norm, bits, contributors and noise."""
        return cls(
            clip_norm=agreement.clip_norm,
            bits=agreement.bits,
            contributor_count=len(agreement.contributors),
            noise=agreement.noise or 0,
        )

    def replace_bits(self, bits: int) -> "FixedPoint":
        """Return this format with another number of bits; the noise keeps its size in real numbers,
        rounded up to whole steps.
        """
        new_max_level = 2 ** (bits - 1) - 1
        new_noise = math.ceil(self.noise * new_max_level / self.max_level)
        return replace(self, bits=bits, noise=new_noise)

    @cached_property
    def max_level(self) -> int:
        """Return the largest magnitude of one quantised value, 2^(bits - 1) - 1."""
        return int(2 ** (self.bits - 1) - 1)

    @cached_property
    def max_contribution(self) -> int:
        """Return the largest magnitude of one contributed value, in steps: `max_level` plus the
        largest noise.
        """
        return self.max_level + largest_noise(self.noise)

    @cached_property
    def max_sum(self) -> int:
        """Return the largest magnitude of one value of the sum, in steps."""
        return self.contributor_count * self.max_contribution

    @property
    def field_bits(self) -> int:
        """Return W, the signed bits that hold any value of a sum; without noise `bits` +
        ceil(log2 M).
        """
        return self.max_contribution.bit_length() + 1 + (self.contributor_count - 1).bit_length()

    @property
    def number_bits(self) -> int:
        """Return the bits of one number of the sum; each reaction to an altered sum (it is accepted
        or refused) may reveal one of them.
        """
        return count_number_bits(self.max_sum)

    @property
    def max_rounding_error(self) -> float:
        """Return the largest rounding error of one value of the sum, in real numbers: half a step
        for each contributor.
        """
        return self.contributor_count * self.clip_norm / self.max_level / 2

    def quantise_rows(
        self,
        values_BD: FloatArray,
        noise_BD: IntArray | None = None,
        integer_type: type[np.signedinteger[Any]] = np.int64,
        clipping: Clipping | None = None,
    ) -> NDArray[np.signedinteger[Any]]:
        """Clip each row to the L2 norm C, and return its values g in steps of fixed point,
        round(g / C * max_level), plus the noise, as integers, (B, D).

        Args:
            values_BD: B rows of D finite numbers, float32 or float64.
            noise_BD: integer noise to add, in steps of fixed point, (B, D); None: no noise, which
                is allowed only if the agreement has none.
            integer_type: type of the result; 32 bits hold a contribution, and sums modulo 2^32.
            clipping: counts the rows that are clipped and the values that are rounded to 0; None:
                nothing is counted.

        Raises LocalProtocolError: the values or the noise are not of that kind.
        """
        levels_BD = clip_rows(check_matrix(values_BD), self.clip_norm, clipping)
        levels_BD *= self.max_level / self.clip_norm
        # A norm of C (1 + 1e-15 sqrt(D)) rounds to `max_level`, never beyond.
        np.rint(levels_BD, out=levels_BD)
        # Under noise lost numbers are not counted: the noise is larger than what rounding loses.
        if clipping is not None and not self.noise:
            kept_numbers = int(np.count_nonzero(levels_BD))
            clipping.count_lost(int(np.count_nonzero(values_BD)), kept_numbers)
        if noise_BD is None and not self.noise:
            return levels_BD.astype(integer_type)
        noise_BD = self.check_noise(noise_BD, values_BD.shape)
        return (levels_BD.astype(np.int64) + noise_BD).astype(integer_type, copy=False)

    def check_noise(self, noise_BD: IntArray | None, shape: tuple[int, ...]) -> IntArray:
        """Return the noise as a contiguous array, if it is an int64 array of this shape within the
        range of the agreement's noise.

        Raises LocalProtocolError: it is not such an array, it is None, or the agreement has no
        noise.
        """
        if noise_BD is None or not self.noise:
            raise LocalProtocolError(
                f"the agreement says noise of {self.noise} steps on each value, but "
                f"{'none' if noise_BD is None else 'some'} was given to a contribution"
            )
        is_array = type(noise_BD) is np.ndarray
        given_type = noise_BD.dtype if is_array else type(noise_BD).__name__
        if given_type != np.int64 or noise_BD.shape != shape:
            raise LocalProtocolError(
                f"noise is an int64 array of shape {shape} like the contribution, got "
                f"{given_type} of shape {np.shape(noise_BD)}"
            )
        max_noise = largest_noise(self.noise)
        if not -max_noise <= noise_BD.min() <= noise_BD.max() <= max_noise:
            raise LocalProtocolError(
                f"noise of {self.noise} steps ends at {max_noise}; what was given "
                "lies beyond and could leave the sum's range"
            )
        return np.ascontiguousarray(noise_BD)

    def dequantise_sum(self, sum_BD: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Return a sum of quantised values as real numbers, (B, D): each integer times one step of
        fixed point, C / max_level.

        `sum_BD`: B rows of D integers.
        """
        real_BD: NDArray[np.float64] = np.multiply(
            sum_BD, self.clip_norm / self.max_level, dtype=np.float64
        )
        return real_BD


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A packing of integers into slot vectors, the plaintexts of a homomorphic scheme; a slot holds
    one or two integers (fields).

    With two fields a slot holds q_even + q_odd * 2^field_bits; slots add up to both sums as long
    as each sum stays below 2^(field_bits - 1) in magnitude.

    Attributes:
        fields_per_slot: integers in one slot, 1 or 2.
        field_bits: W, signed bits of one field.
        slots_per_vector: S.
    """

    fields_per_slot: int
    field_bits: int
    slots_per_vector: int

    def __post_init__(self) -> None:
        """Raise LocalProtocolError unless there are one or two fields whose bits together fit the
        exact integers of a float64.
        """
        if (
            self.fields_per_slot not in (1, 2)
            or self.fields_per_slot * self.field_bits > EXACT_FLOAT_BITS
        ):
            raise LocalProtocolError(
                f"{self.fields_per_slot} field(s) of {self.field_bits} bits do not fit a float64 "
                f"slot of {EXACT_FLOAT_BITS} exact bits; use fewer bits or one field"
            )

    def count_vectors(self, value_count: int) -> int:
        """Return V, the number of slot vectors (plaintexts) that this number of values fills; the
        last vector is padded.
        """
        return math.ceil(value_count / (self.fields_per_slot * self.slots_per_vector))

    def count_slots_sent_in_last(self, value_count: int) -> int:
        """Return how many slots of the last vector are sent for this number of values: the slots
        that hold values, and `CHECKED_SLOTS` zeros behind them, or as many as there is room for. A
        damaged sum shows in the zeros.
        """
        filled_slots = math.ceil(value_count / self.fields_per_slot)
        slots_before_last = (self.count_vectors(value_count) - 1) * self.slots_per_vector
        return min(self.slots_per_vector, filled_slots - slots_before_last + CHECKED_SLOTS)

    def pack_fields(self, integers_BD: IntArray) -> IntArray:
        """Pack the integers, row after row, into slot vectors (plaintexts), `fields_per_slot`
        integers into each slot; return the vectors, (vectors, slots), the last one padded with
        zeros.
        """
        flat = integers_BD.reshape(-1)
        padded = np.zeros(
            (self.count_vectors(flat.size) * self.slots_per_vector, self.fields_per_slot),
            dtype=np.int64,
        )
        padded.reshape(-1)[: flat.size] = flat
        slots = padded[:, 0]
        if self.fields_per_slot == 2:
            slots = slots + (padded[:, 1] << self.field_bits)
        return slots.reshape(-1, self.slots_per_vector)

    def unpack_fields(self, slots_VS: IntArray) -> IntArray:
        """Return the signed integers in all slots, one or two in each, in order, (V S fields,), the
        padding included. This undoes `pack_fields`, also after slots were added.

        `slots_VS`: V slot vectors (plaintexts) of S slots.
        """
        slots = slots_VS.reshape(-1)
        if self.fields_per_slot == 1:
            return slots.copy()
        # The lower field is the slot modulo 2^field_bits, moved into [-half, half).
        half = 1 << (self.field_bits - 1)
        low = ((slots + half) & (2 * half - 1)) - half
        return np.stack((low, (slots - low) >> self.field_bits), axis=1).reshape(-1)
