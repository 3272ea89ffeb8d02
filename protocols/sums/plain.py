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

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from protocols.sums.agreed_frames import AgreedFrames, fingerprint
from protocols.sums.agreement import StepBinding, SumAgreement
from protocols.sums.fixed_point import FixedPoint, checked_matrix, clip_rows
from protocols.sums.frame import Frame, frame_bytes
from protocols.sums.interface import FloatArray, IntArray
from protocols.sums.roles import (
    NoSetup,
    OneRefusalReceiver,
    OneRoundCombiner,
    OneRoundContributor,
)

__all__ = ["PlainCombiner", "PlainContributor", "PlainReceiver", "PlainSum"]

_FLOAT_TYPES = (np.dtype("<f4"), np.dtype("<f8"))
_INTEGER_TYPE = np.dtype("<i8")


@dataclass(frozen=True)
class PlainSum:
    """Unprotected addition. Everybody on the way reads every contribution.

    Args:
        agreement: what the parties fixed; `bits` counts only with `quantise`.
        clip: scale rows down to the agreement's bound.
        quantise: send fixed-point integers, as the protected backends do; implies the clip.
    """

    agreement: SumAgreement
    clip: bool = True
    quantise: bool = False
    name: ClassVar[str] = "plain"
    unsafe: ClassVar[bool] = True
    rounds: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.agreement.noise and not self.quantise:
            raise LocalProtocolError(
                "discrete noise is added to fixed-point integers; use PlainSum(quantise=True)"
            )
        warnings.warn(
            f"the plain sum hides nothing: {self.agreement.combiner} reads each contribution; "
            "choose masked to protect them",
            UnsafeChoiceWarning,
            stacklevel=3,
        )

    def receiver(self) -> "PlainReceiver":
        return PlainReceiver(self)

    def contributor(self, me: str) -> "PlainContributor":
        return PlainContributor(self, me)

    def combiner(self) -> "PlainCombiner":
        return PlainCombiner(self)

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        return frame_bytes((shape[0] * shape[1] * (8 if self.quantise else 4),))

    def rounding(self) -> float:
        """0 without `quantise`: then only floating-point addition rounds."""
        return FixedPoint.of(self.agreement).rounding if self.quantise else 0.0

    def parameters(self) -> Mapping[str, object]:
        return {"backend": self.name, "clip": self.clip, "quantise": self.quantise}

    def frames(self) -> AgreedFrames:
        """One role's writer and checker of frames."""
        return AgreedFrames(
            self.agreement, self.name, fingerprint(self.agreement, self.parameters())
        )


class PlainContributor(NoSetup, OneRoundContributor):
    """A passive's end."""

    def __init__(self, plain: PlainSum, me: str) -> None:
        plain.agreement.position(me)
        self.me = me
        self._plain = plain
        self._frames = plain.frames()

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        """See `SumContributor`; float32 travels as 4 bytes a value, float64 as 8."""
        agreement = self._plain.agreement
        values_BD = checked_matrix(values_BD)
        if self._plain.quantise:
            integers_BD = FixedPoint.of(agreement).quantise(values_BD, noise_BD)
            blob = integers_BD.astype(_INTEGER_TYPE).tobytes()
        else:
            if noise_BD is not None:
                raise LocalProtocolError("no noise was agreed for this sum, but some was given")
            sent_BD = clip_rows(values_BD, agreement.clip_norm) if self._plain.clip else values_BD
            blob = sent_BD.astype(values_BD.dtype.newbyteorder("<")).tobytes()
        self._frames.begin_step(binding)
        rows, columns = values_BD.shape
        return self._frames.contribution(self.me, binding, (rows, columns), (blob,))


class PlainCombiner(NoSetup, OneRoundCombiner):
    """The aggregator's end."""

    def __init__(self, plain: PlainSum) -> None:
        self._plain = plain
        self._frames = plain.frames()

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """See `SumCombiner`; adds in the order of the agreement."""
        frames = self._frames.open_contributions(bodies, binding_digest)
        names = self._plain.agreement.contributors
        addends = [
            _values(frame, name, self._plain, addends=1)
            for name, frame in zip(names, frames, strict=True)
        ]
        if len({addend.dtype for addend in addends}) > 1:
            raise RemoteProtocolError(
                "some passives contributed float32 and some float64; all must use one precision"
            )
        total = addends[0].copy()
        with np.errstate(over="ignore"):
            for addend in addends[1:]:
                total += addend
        return self._frames.sum_of(frames, (total.tobytes(),))


class PlainReceiver(NoSetup, OneRefusalReceiver):
    """The active's end; it holds no key, and keeps the rule of all receivers."""

    def __init__(self, plain: PlainSum) -> None:
        OneRefusalReceiver.__init__(self)
        self._plain = plain
        self._frames = plain.frames()

    def start(self) -> Sequence[Outgoing]:
        self._require_no_refusal()
        return super().start()

    def _open(self, frame: Frame, binding: StepBinding) -> FloatArray:
        """Returns the precision that the passives used."""
        agreement = self._plain.agreement
        total = _values(
            frame, agreement.combiner, self._plain, addends=len(agreement.contributors)
        ).reshape(frame.rows, frame.columns)
        if self._plain.quantise:
            return FixedPoint.of(agreement).dequantise(total.astype(np.int64))
        return total.astype(total.dtype.newbyteorder("="))

    def _forget(self) -> None:
        """Nothing opens these sums: all may read them."""


def _values(frame: Frame, sender: str, plain: PlainSum, *, addends: int) -> NDArray[Any]:
    """The values of a frame, within the range of a sum of `addends` contributions."""
    count = frame.rows * frame.columns
    kinds = (_INTEGER_TYPE,) if plain.quantise else _FLOAT_TYPES
    dtypes = {count * dtype.itemsize: dtype for dtype in kinds}
    if count == 0 or len(frame.blobs) != 1 or len(frame.blobs[0]) not in dtypes:
        raise RemoteProtocolError(
            f"{sender} announced {frame.rows}x{frame.columns} values and sent other bytes"
        )
    values: NDArray[Any] = np.frombuffer(frame.blobs[0], dtype=dtypes[len(frame.blobs[0])])
    limit = addends * FixedPoint.of(plain.agreement).largest
    out_of_range = plain.quantise and not -limit <= values.min() <= values.max() <= limit
    if out_of_range or not np.isfinite(values).all():
        raise RemoteProtocolError(f"{sender} sent values beyond the agreed range, or NaN")
    return values
