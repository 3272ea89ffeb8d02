"""Masked sum that survives passives who fall silent: double masks, Shamir shares, two rounds.

Run by: all three roles. Protects from the same as `masked`, and has a sum as long as
`threshold` (t) of the M passives contribute and answer: a passive that contributed counts,
one that did not is left out of the sum and of the rest of the session. With fewer than t,
contributions or answers, the step has no sum and nothing of any contribution is revealed.
A false share is found out where a secret is put together from it, and the step has no sum then;
one that was not needed goes unnoticed, and changes nothing.

Bounds. c passives that work together with the aggregator learn no single contribution while
2t > M + c, so t must be above M / 2, and the default floor(2M / 3) + 1 holds against c < M / 3:
nobody answers twice about one step, so the aggregator gets t shares of a passive's seed or
t shares of its key, never both. One that tells passives different sets may get a sum of
fewer than t, never of one; and in the next step nobody answers it, for passives seal what
they were told. Not protected from: an aggregator that calls honest passives silent, so that
they are left out, or that adds a constant to the sum; coalitions beyond that bound; all
other passives of a sum and the active together. Nor from active and aggregator together over
several steps: two sums of the same values, the second without a passive that they called
silent, differ by its contribution. With t = M nobody can be left out.

After Bonawitz et al. 2017, section 4.2 and figure 4, for parties that follow the protocol, with
fresh keys for each step. They save a round: what is shared for a step travels with the
contribution to the one before (with the setup, for the first). So a passive whose
contribution was never asked about has no keys for another step; its session ends. The
mask shared with the active, as under `masked`, keeps the sum from the aggregator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed_frames import fingerprint
from protocols.sums.frame import Frame, frame_bytes
from protocols.sums.masked import MaskedReceiver, MaskedSum, require_blobs
from protocols.sums.recovery_combiner import RecoveryCombiner
from protocols.sums.recovery_contributor import RecoveryContributor
from protocols.sums.roster import parse_names
from protocols.sums.rounds import TwoRoundFrames
from protocols.sums.step_keys import ANNOUNCEMENT_BYTES, PARCEL_BYTES

__all__ = ["MaskedRecoverySum", "RecoveryReceiver"]


@dataclass(frozen=True)
class MaskedRecoverySum(MaskedSum):
    """Sum of doubly masked integers modulo 2^ring_bits, of at least `threshold` passives.

    Args:
        agreement: what the parties fixed; its threshold, or floor(2M / 3) + 1 of M.
        ring_bits: 32 or 64.

    Raises:
        LocalProtocolError: a ring that the sum could leave, or a threshold of at most M / 2.
    """

    name: ClassVar[str] = "masked_recovery"
    rounds: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        contributors = len(self.agreement.contributors)
        if 2 * self.threshold <= contributors:
            raise LocalProtocolError(
                f"threshold {self.threshold} of {contributors} contributors is not above half of "
                f"them: an aggregator could open single contributions; take "
                f"{contributors // 2 + 1} or more"
            )

    @cached_property
    def threshold(self) -> int:
        """t: contributions and answers without which a step has no sum."""
        contributors = len(self.agreement.contributors)
        return self.agreement.threshold or min(contributors, 2 * contributors // 3 + 1)

    def receiver(self) -> "RecoveryReceiver":
        return RecoveryReceiver(self)

    def contributor(self, me: str) -> RecoveryContributor:  # type: ignore[override]  # two rounds
        return RecoveryContributor(self, self.frames(), me)

    def combiner(self) -> RecoveryCombiner:  # type: ignore[override]  # two rounds
        return RecoveryCombiner(self, self.frames())

    def contribution_bytes(self, shape: tuple[int, int]) -> int:
        """With the keys for the next step; the answer to the aggregator comes on top."""
        values = shape[0] * shape[1] * self.word.itemsize
        parcels = (PARCEL_BYTES,) * (len(self.agreement.contributors) - 1)
        return frame_bytes((values, ANNOUNCEMENT_BYTES, *parcels))

    def parameters(self) -> Mapping[str, object]:
        return {**super().parameters(), "threshold": self.threshold}

    def frames(self) -> TwoRoundFrames:
        """One role's writer and checker of frames."""
        mark = fingerprint(self.agreement, self.parameters())
        return TwoRoundFrames(self.agreement, self.name, mark, self.threshold)


class RecoveryReceiver(MaskedReceiver):
    """The active's end: takes off the masks that it shares with those whom the sum counts.

    Attributes:
        counted: whose contributions the last sum holds.
    """

    counted: Sequence[str] = ()

    def _counted(self, frame: Frame) -> Sequence[str]:
        agreement = self._masked.agreement
        require_blobs(frame, agreement.combiner, 2)
        counted = parse_names(frame.blobs[1], agreement, sender=agreement.combiner)
        if len(counted) != frame.party:
            raise RemoteProtocolError(
                f"{agreement.combiner} sent a sum of {frame.party} contributions and names "
                f"{len(counted)} contributors"
            )
        self.counted = counted
        return counted
