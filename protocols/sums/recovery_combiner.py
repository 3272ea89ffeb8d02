"""The aggregator's end of the masked sum with recovery: adds, asks, and takes off what is left.

Run by: the aggregator. It holds no key of its own; what it rebuilds from shares opens one
step's self-masks and the pair masks of those who fell silent, and is forgotten with the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.frame import Frame
from protocols.sums.masked import Elements, MaskedSum, require_blobs
from protocols.sums.pairwise import add_keystream
from protocols.sums.roles import KeepsSecrets
from protocols.sums.roster import pack_names
from protocols.sums.rounds import TwoRoundFrames
from protocols.sums.shares import SECRET_BYTES
from protocols.sums.step_keys import (
    PARCEL_BYTES,
    Announcement,
    pair_seed,
    rebuilt_key,
    rebuilt_seed,
)

__all__ = ["RecoveryCombiner"]


@dataclass(frozen=True)
class _Underway:
    """A step between its contributions and its answers.

    Attributes:
        roster: what was announced for it by all who could contribute, in order.
        frames: of the contributions that came.
        counted: whose they are, in order.
        total: their sum, masked.
    """

    roster: Mapping[str, Announcement]
    frames: Sequence[Frame] = field(repr=False)
    counted: Sequence[str]
    total: Elements = field(repr=False)


class RecoveryCombiner(KeepsSecrets):
    """The aggregator's end.

    Args:
        masked: the sum.
        frames: of this role; its `least` is the threshold.
    """

    def __init__(self, masked: MaskedSum, frames: TwoRoundFrames) -> None:
        self._masked, self._frames = masked, frames
        self._announced: dict[str, Announcement] = {}
        self._underway: _Underway | None = None
        self._set_up = False

    def start(self) -> Sequence[Outgoing]:
        return ()

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take what one passive announces for the first step."""
        contributors = self._masked.agreement.contributors
        if sender not in contributors or self._set_up or sender in self._announced:
            raise RemoteProtocolError(
                f"{sender} sent a setup message to the aggregator, who expects one from each of "
                f"{', '.join(contributors)}"
            )
        frame = self._frames.open_own_setup(body, sender, "the aggregator")
        require_blobs(frame, sender, 1)
        self._announced[sender] = Announcement.parse(frame.blobs[0], sender=sender)
        self._set_up = len(self._announced) == len(contributors)
        return ()

    @property
    def finished(self) -> bool:
        return self._set_up

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        """See `SumCombiner`: tells who is counted, and passes on the keys for the next step."""
        if not self._set_up:
            raise LocalProtocolError("the aggregator has no keys announced yet; run the setup")
        agreed = self._masked.agreement.contributors
        roster = {name: self._announced[name] for name in agreed if name in self._announced}
        gone = [name for name in agreed if name in contributions and name not in roster]
        if gone:
            raise RemoteProtocolError(
                f"{', '.join(gone)} fell silent in an earlier step, and stays out until a new "
                "session"
            )
        frames = self._frames.open_contributions(contributions, binding_digest)
        counted = [agreed[frame.party] for frame in frames]
        announced = dict(
            zip(counted, (self._announcement(frame, len(roster)) for frame in frames), strict=True)
        )
        total = self._masked.added(frames).reshape(frames[0].rows, frames[0].columns)
        self._underway = _Underway(roster, frames, counted, total)
        self._announced = announced
        return {name: self._request(name, self._underway) for name in counted}

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        """See `SumCombiner`: takes off the self-masks, and the pair masks of the silent."""
        underway = self._underway
        if underway is None:
            raise LocalProtocolError("nobody was asked yet; ask with the contributions first")
        frames = self._frames.open_answers(bodies, underway.counted, binding_digest)
        self._underway = None
        shares = self._shares(frames, underway)
        binding, total = underway.frames[0].binding, underway.total
        for name, announced in underway.roster.items():
            if name in underway.counted:
                seed = rebuilt_seed(shares[name], announced, self._masked.agreement, name)
                add_keystream(total, seed, binding, sign=-1)
            else:
                self._take_off_pairs(name, shares[name], underway)
        counted = pack_names(underway.counted, self._masked.agreement)
        return self._frames.sum_of(underway.frames, (total.tobytes(), counted))

    def _announcement(self, frame: Frame, roster: int) -> Announcement:
        """What a contribution announces for the next step, if its parcels are complete."""
        sender = self._masked.agreement.contributors[frame.party]
        require_blobs(frame, sender, 1 + roster)
        if any(len(parcel) != PARCEL_BYTES for parcel in frame.blobs[2:]):
            raise RemoteProtocolError(f"{sender} sent keys of another size for the next step")
        return Announcement.parse(frame.blobs[1], sender=sender)

    def _request(self, to: str, underway: _Underway) -> bytes:
        """Who is counted, and of each of them what it sealed for `to`."""
        parcels = []
        for name, frame in zip(underway.counted, underway.frames, strict=True):
            if name != to:
                receivers = [other for other in underway.roster if other != name]
                parcels.append(frame.blobs[2 + receivers.index(to)])
        counted = pack_names(underway.counted, self._masked.agreement)
        return self._frames.request(to, (counted, *parcels))

    def _shares(
        self, frames: Sequence[Frame], underway: _Underway
    ) -> Mapping[str, Mapping[int, bytes]]:
        """Of each passive of the step as many shares as the threshold, by their holders."""
        agreed = self._masked.agreement.contributors
        for frame in frames:
            require_blobs(frame, agreed[frame.party], len(underway.roster))
            if any(len(share) != SECRET_BYTES for share in frame.blobs):
                raise RemoteProtocolError(f"{agreed[frame.party]} sent a share of another size")
        return {
            name: {frame.party: frame.blobs[at] for frame in frames[: self._frames.least]}
            for at, name in enumerate(underway.roster)
        }

    def _take_off_pairs(
        self, silent: str, shares: Mapping[int, bytes], underway: _Underway
    ) -> None:
        """Take off the masks that those counted share with one who fell silent."""
        agreement, binding = self._masked.agreement, underway.frames[0].binding
        key = rebuilt_key(shares, underway.roster[silent], agreement, silent)
        for name in underway.counted:
            seed = pair_seed(key, underway.roster[name].public, agreement, (name, silent))
            # The counted one added it where it comes first.
            added = agreement.position(name) < agreement.position(silent)
            add_keystream(underway.total, seed, binding, sign=-1 if added else 1)
