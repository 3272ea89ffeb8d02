"""The sum without protection: a named choice for comparison, never a default.

Run by: all three roles. Protects from nobody: the aggregator reads every passive's
contribution, and with `clip=False` and `quantise=False` the sum is exactly the one that
a single autograd graph computes, which is what the tests need it for.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.sums.fixed_point import Clipping, check_matrix, clip_rows
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.interface import (
    ALTERED_SUM,
    FloatArray,
    IntArray,
    Reading,
    StepBinding,
    SumLeaks,
)
from apfed_protocols.sums.roles import (
    NoSetup,
    OneRoundAggregator,
    SecureSum,
    SumContributor,
    SumReceiver,
)

_FLOAT_TYPES = (np.dtype("<f4"), np.dtype("<f8"))
_INTEGER_TYPE = np.dtype("<i8")


@dataclass(frozen=True)
class PlainSum(SecureSum):
    """A sum by unprotected addition: everybody on the way reads every contribution.

    Args:
        agreement: what the parties agreed on; its `bits` matter only with `quantise`.
        clip: whether to scale rows down to the agreement's L2 bound.
        quantise: whether to send fixed-point integers, as the protected sums do; implies `clip`.
    """

    clip: bool = True
    quantise: bool = False
    scheme: ClassVar[str] = "plain"
    name: ClassVar[str] = "plain"
    unsafe: ClassVar[bool] = True
    needs_receiver_key: ClassVar[bool] = False
    needs_other_contributors: ClassVar[bool] = False
    rests_on: ClassVar[str] = "nothing"
    leaks: ClassVar[SumLeaks] = SumLeaks(
        contribution=Reading(
            reads="Every passive's contribution in the clear.",
            protects="Nothing: `plain` without masks is no secure sum.",
            remains="From contributions a passive's features can be rebuilt, wholly or in part. "
            "It can alter the sum without being noticed.",
        ),
        active_and_aggregator="Every single passive's contribution, which the aggregator reads "
        "alone.",
        single="the aggregator, which reads each contribution",
        altered=ALTERED_SUM,
    )

    def __post_init__(self) -> None:
        """Warn (UnsafeChoiceWarning) that nothing is protected. Raises LocalProtocolError: the
        agreement has noise, which is added to integers, but `quantise` is False.
        """
        super().__post_init__()
        if self.agreement.noise and not self.quantise:
            raise LocalProtocolError(
                "discrete noise is added to fixed-point integers; use PlainSum(quantise=True)"
            )
        warnings.warn(
            f"the plain sum hides nothing: {self.agreement.aggregator} reads each contribution; "
            "choose pairwise masks to protect them",
            UnsafeChoiceWarning,
            stacklevel=3,
        )

    def make_receiver(self) -> "PlainReceiver":
        return PlainReceiver(self, self.make_frames(), NoSetup())

    def make_contributor(self, me: str) -> "PlainContributor":
        return PlainContributor(self, me, self.make_frames(), NoSetup())

    def make_aggregator(self) -> OneRoundAggregator:
        return OneRoundAggregator(self.make_frames(), self.add_frames)

    def compute_rounding_error(self) -> float:
        """Return the largest error of one value of the sum; 0 without `quantise`, when only
        floating-point addition rounds.
        """
        return super().compute_rounding_error() if self.quantise else 0.0

    def get_clip_norm(self) -> float | None:
        return super().get_clip_norm() if self.clip or self.quantise else None

    def list_parameters(self) -> Mapping[str, object]:
        return {
            **super().list_parameters(),
            "clip": self.clip,
            "quantise": self.quantise,
        }

    def encode_contribution(
        self,
        values_BD: FloatArray,
        noise_BD: IntArray | None,
        clipping: Clipping | None = None,
    ) -> NDArray[Any]:
        """Return the numbers that one contributor sends, (B, D), in little-endian order. With
        `quantise` they are 64-bit fixed-point integers, plus noise; without it they are floats of
        the type of `values_BD`, clipped if `clip` is set.

        Args:
            values_BD: B rows of D real numbers to contribute.
            noise_BD: integer noise to add, in steps of fixed point, only with `quantise`; None: no
                noise.
            clipping: counts the rows that are clipped; None: nothing is counted.

        Raises LocalProtocolError: the values are unfit, or noise was given that was not agreed.
        """
        if self.quantise:
            numbers_BD = super().encode_contribution(values_BD, noise_BD, clipping)
            return numbers_BD.astype(_INTEGER_TYPE, copy=False)
        if noise_BD is not None:
            raise LocalProtocolError("no noise was agreed for this sum, but some was given")
        values_BD = check_matrix(values_BD)
        bound = self.agreement.clip_norm
        sent_BD = clip_rows(values_BD, bound, clipping) if self.clip else values_BD
        return sent_BD.astype(values_BD.dtype.newbyteorder("<"))

    def add_frames(self, frames: Sequence[Frame]) -> Sequence[bytes]:
        """Add the contributions in the order of `frames`, which is the agreement's order, so that
        floating-point rounding is the same each time; return the sum as one blob.

        Raises RemoteProtocolError: a contribution is malformed or out of range, or some are float32
        and some float64.
        """
        names = self.agreement.contributors
        addends = [
            self.parse_values(frame, names[frame.contributor_position], addend_count=1)
            for frame in frames
        ]
        if len({addend.dtype for addend in addends}) > 1:
            raise RemoteProtocolError(
                "some passives contributed float32 and some float64; all must use one precision"
            )
        total = addends[0].copy()
        # An infinite sum of floats is refused by the receiver, and needs no warning here.
        with np.errstate(over="ignore"):
            for addend in addends[1:]:
                total += addend
        return (total.tobytes(),)

    def parse_values(self, frame: Frame, sender: str, *, addend_count: int) -> NDArray[Any]:
        """Return the values in a frame (message), (rows, columns).

        `addends`: how many contributions were added: 1 in a contribution, all in a sum.

        Raises RemoteProtocolError, which names `sender`: the values are malformed, not finite or
        out of range.
        """
        count = frame.rows * frame.columns
        allowed_types = (_INTEGER_TYPE,) if self.quantise else _FLOAT_TYPES
        # The size of the blob tells which of the types the sender used.
        dtype_by_size = {count * dtype.itemsize: dtype for dtype in allowed_types}
        if count == 0 or len(frame.blobs) != 1 or len(frame.blobs[0]) not in dtype_by_size:
            raise RemoteProtocolError(
                f"{sender} announced {frame.rows}x{frame.columns} values and sent other bytes"
            )
        blob = frame.blobs[0]
        values: NDArray[Any] = np.frombuffer(blob, dtype=dtype_by_size[len(blob)])
        limit = addend_count * self.fixed_point.max_contribution
        is_in_range = -limit <= values.min() <= values.max() <= limit
        if (self.quantise and not is_in_range) or not np.isfinite(values).all():
            raise RemoteProtocolError(f"{sender} sent values beyond the agreed range, or NaN")
        return values.reshape(frame.shape)


class PlainContributor(SumContributor):
    """A passive's role, which sends its values unprotected."""

    def _protect_numbers(self, numbers_BD: NDArray[Any], binding: StepBinding) -> Sequence[bytes]:
        del binding
        return (numbers_BD.tobytes(),)

    def _export_secrets(self) -> dict[str, Any]:
        return {}  # it holds no key


class PlainReceiver(SumReceiver):
    """The active's role, which holds no key; after a refused sum it refuses all, like every
    receiver.
    """

    _sum: PlainSum

    def _decrypt_sum(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Return the sum in real numbers, in this machine's byte order."""
        agreement = self._sum.agreement
        total_BD = self._sum.parse_values(
            frame, agreement.aggregator, addend_count=len(agreement.contributors)
        )
        if self._sum.quantise:
            return self._dequantise_sum(total_BD.astype(np.int64), binding)
        return total_BD.astype(total_BD.dtype.newbyteorder("="))

    def _forget_secrets(self) -> None:
        """Do nothing: a plain sum has no keys."""
