"""A passive's end of the masked sum with recovery: two masks, and shares of both for the others.

Run by: each passive. Protects from: an aggregator that asks for the share of a self-mask
and for the share of a key of the same passive, or asks twice, or counts fewer than the
threshold: such a request has no answer, and the session of this passive is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.seal import SealedLink, fresh_run_key
from protocols.sums.agreement import StepBinding
from protocols.sums.interface import FloatArray, IntArray
from protocols.sums.masked import Elements, MaskedSum, require_blobs
from protocols.sums.pairwise import PairwiseSeeds, add_keystream
from protocols.sums.roles import KeepsSecrets
from protocols.sums.roster import pack_names, parse_names
from protocols.sums.rounds import TwoRoundFrames
from protocols.sums.step_keys import Held, StepKeys, pair_seed

__all__ = ["RecoveryContributor"]

_SETUP = b"setup"


@dataclass(frozen=True)
class _Step(KeepsSecrets):
    """The secrets of one step: this passive's keys, and what it holds of the others'."""

    own: StepKeys
    held: dict[str, Held]


class RecoveryContributor(KeepsSecrets):
    """A passive's end.

    Args:
        masked: the sum.
        frames: of this role; its `least` is the threshold.
        me: this passive.
    """

    def __init__(self, masked: MaskedSum, frames: TwoRoundFrames, me: str) -> None:
        agreement = masked.agreement
        self.me = me
        self._position = agreement.position(me)
        self._masked, self._frames = masked, frames
        self._others = tuple(name for name in agreement.contributors if name != me)
        self._active = PairwiseSeeds(me, (agreement.receiver,), frames)
        self._link_key = fresh_run_key()
        self._links = {
            name: SealedLink(
                me=me, peer=name, run_key=self._link_key, contract_hash=agreement.digest
            )
            for name in self._others
        }
        self._due = set(self._others)  # passives whose shares for the first step did not come
        self._ready: _Step | None = _Step(self._fresh_keys(), {})
        self._waiting: tuple[_Step, StepKeys] | None = None

    def start(self) -> Sequence[Outgoing]:
        """Send public keys: for masks to the active and the aggregator, for links to passives."""
        assert self._ready is not None
        link, announced = self._link_key.public, self._ready.own.announcement.pack()
        return (
            *self._active.start(),
            *(Outgoing(to, self._frames.setup(link, end.hello)) for to, end in self._links.items()),
            Outgoing(self._masked.agreement.combiner, self._frames.setup(announced)),
        )

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        """Take the active's mask key; of each passive its link, then shares for step one."""
        if sender == self._masked.agreement.receiver:
            return self._active.receive(sender, body)
        step = self._ready
        if sender not in self._due or step is None:
            raise RemoteProtocolError(
                f"{sender} sent a setup message to {self.me}, who expects two from each of "
                f"{', '.join(self._others) or 'nobody'}"
            )
        frame = self._frames.open_own_setup(body, sender, self.me)
        link = self._links[sender]
        require_blobs(frame, sender, 1 if link.agreed else 2)
        if link.agreed:
            opened = link.open(frame.blobs[0], sequence=0, associated=_SETUP)
            step.held[sender] = Held.parse(opened, sender=sender)
            self._due.remove(sender)
            return ()
        link.agree(*frame.blobs)
        parcel = link.seal(step.own.held_by(sender).pack(), sequence=0, associated=_SETUP)
        return (Outgoing(sender, self._frames.setup(parcel)),)

    @property
    def finished(self) -> bool:
        return self._active.finished and not self._due

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        """See `SumContributor`; the keys for the next step travel with it."""
        masked = self._masked
        total_BD = masked.fixed_point.quantise_narrow(values_BD, noise_BD).astype(masked.word)
        rows, columns = values_BD.shape
        self._require_setup()
        self._frames.begin_step(binding)
        step, self._ready = self._require_ready(), None
        self._add_masks(total_BD, step, binding)
        following = self._fresh_keys()
        bound = self._bound(step, binding.digest)
        parcels = [self._seal(peer, following, bound) for peer in self._in_order(step)]
        self._waiting = step, following
        announced = following.announcement.pack()
        blobs = (total_BD.tobytes(), announced, *parcels)
        return self._frames.contribution(self.me, binding, (rows, columns), blobs)

    def answer(self, request: bytes) -> bytes:
        """See `SumContributor`: one share of each passive of this step, never two of one."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            raise LocalProtocolError(
                f"no contribution of {self.me} waits for a request; each step is answered once"
            )
        step, following = waiting
        frame = self._frames.open_request(request, self.me)
        counted = self._checked(frame.blobs, step)
        others = [name for name in counted if name != self.me]
        bound = self._bound(step, frame.binding)
        parcels = zip(others, frame.blobs[1:], strict=True)
        held = {peer: self._open(peer, parcel, bound) for peer, parcel in parcels}
        own = step.own.held_by(self.me)
        everybody = {**step.held, self.me: own}
        shares = [
            everybody[name].seed_share if name in counted else everybody[name].key_share
            for name in self._masked.agreement.contributors
            if name in everybody
        ]
        body = self._frames.answer(self.me, shares)
        self._ready = _Step(following, held)
        return body

    def _checked(self, blobs: Sequence[bytes], step: _Step) -> Sequence[str]:
        """Whom the request counts, if the agreement allows to answer it."""
        agreement = self._masked.agreement
        aggregator = agreement.combiner
        if not blobs:
            raise RemoteProtocolError(f"{aggregator} sent a request that counts nobody")
        counted = parse_names(blobs[0], agreement, sender=aggregator)
        strangers = [name for name in counted if name != self.me and name not in step.held]
        if strangers or self.me not in counted or len(counted) < self._frames.least:
            raise RemoteProtocolError(
                f"{aggregator} counts {', '.join(counted) or 'nobody'} in this step; "
                f"{self.me} answers only where it is counted among {self._frames.least} or more "
                f"of {', '.join(sorted([self.me, *step.held]))}"
            )
        if len(blobs) != len(counted):
            raise RemoteProtocolError(
                f"{aggregator} sent keys of {len(blobs) - 1} passives, expected {len(counted) - 1}"
            )
        return counted

    def _add_masks(self, total_BD: Elements, step: _Step, binding: StepBinding) -> None:
        """Bonawitz et al. 2017, section 4.2, formula of y_u, and the mask for the active."""
        agreement = self._masked.agreement
        add_keystream(total_BD, step.own.seed, binding.digest, sign=1)
        for peer, held in step.held.items():
            seed = pair_seed(step.own.key, held.public, agreement, (self.me, peer))
            # The earlier of two passives adds what the later one subtracts.
            earlier = self._position < agreement.position(peer)
            add_keystream(total_BD, seed, binding.digest, sign=1 if earlier else -1)
        self._active.add_stream(agreement.receiver, binding, total_BD, sign=1)

    def _in_order(self, step: _Step) -> Sequence[str]:
        """The other passives of the step in the agreement's order, as all parties count them."""
        return [name for name in self._others if name in step.held]

    def _fresh_keys(self) -> StepKeys:
        return StepKeys(self._masked.agreement, self._frames.least, self.me)

    def _seal(self, peer: str, keys: StepKeys, bound: bytes) -> bytes:
        link = self._links[peer]
        held = keys.held_by(peer).pack()
        return link.seal(held, sequence=link.next_sequence, associated=bound)

    def _open(self, peer: str, parcel: bytes, bound: bytes) -> Held:
        """Each passive sealed as many parcels for this one as this one for it."""
        link = self._links[peer]
        try:
            opened = link.open(parcel, sequence=link.next_sequence - 1, associated=bound)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"the keys of {peer} for {self.me} do not authenticate: they were altered, or "
                f"{self._masked.agreement.combiner} counted others towards {peer} in the last "
                f"step, or {self._masked.agreement.receiver} sent {peer} another message; no answer"
            ) from error
        return Held.parse(opened, sender=peer)

    def _bound(self, step: _Step, binding_digest: bytes) -> bytes:
        """What seals of this step hold on to: what it answers, and who takes part in it."""
        return binding_digest + pack_names([self.me, *step.held], self._masked.agreement)

    def _require_setup(self) -> None:
        self._active.require_finished()
        if self._due:
            raise LocalProtocolError(
                f"{self.me} holds no keys of {', '.join(sorted(self._due))}; run the setup first"
            )

    def _require_ready(self) -> _Step:
        if self._ready is None:
            raise LocalProtocolError(
                f"the last contribution of {self.me} was never asked about, so it has no keys for "
                "another step; its session is over, open a new one"
            )
        return self._ready
