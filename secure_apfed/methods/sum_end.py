"""The ends of a secure sum: at a passive, at the aggregator and at the active.

A passive first admits a request: each step once, no row more often than agreed. Its answer is
counted in the passive's log, charged with its noise, bound to the request, and only then protected
and sent: `PassiveSum` does this in order, and answers admitted requests only. The aggregator
gathers one masked contribution of each present passive and adds them. The active decodes the sum of
exactly the passives that took part, bound to its request; a refused sum is recorded before the
refusal is visible.

A step takes 2M + 1 envelopes of M passives, 4M + 1 where the sum has two rounds. Protects from: a
malicious active that probes with repeated steps or too many requests (its representations are
checked by `secure_apfed.learning.release`), and from an adversary that alters sums. Letters: B rows
of an answer, D numbers of a row.
"""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.sums import SecureSum, SumCombiner, SumContributor, SumReceiver
from apfed_protocols.sums.interface import StepBinding
from apfed_protocols.sums.recoverable import RecoverableSum
from secure_apfed.base.files import MAX_JSON_BYTES, add_line, open_plain
from secure_apfed.base.names import log_file
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.methods.accounts import NoisePlan, make_sum_release, sum_and_noise
from secure_apfed.methods.circles import RunCircles
from secure_apfed.methods.method import (
    FOR_AN_ANSWER,
    FOR_THE_ACTIVE,
    FOR_THE_AGGREGATOR,
    ActiveRole,
    HelperRole,
    Method,
    Save,
    save_or_end,
)
from secure_apfed.methods.party import CheckpointPart, PartyContext
from secure_apfed.methods.terms import clip_of
from secure_apfed.networks.models import Shape
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.defences import GradientDefence, Leaving
from secure_apfed.privacy.ledger import Release, ReleaseCounts

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class SessionSum:
    """The sum of a session and the noise under it, as each party describes it for itself.

    Attributes:
        own: of the party; contract: of the session.
        protocol: the sum; noise: of each passive under it, None: none is agreed.
    """

    own: PartyContext
    contract: Contract
    protocol: SecureSum
    noise: NoisePlan | None

    @classmethod
    def from_contract(cls, party: PartyContext, contract: Contract) -> Self:
        """Return the sum that this party's settings give; all parties derive the same."""
        names = tuple(contract.passives)
        shape = contract.passives[names[0]].representation.shape
        return cls(
            party,
            contract,
            *sum_and_noise(party.config, contract.session, party.active, names, shape),
        )

    @property
    def shape(self) -> Shape:
        """The shape of one row of a contribution."""
        return next(iter(self.contract.passives.values())).representation.shape

    @property
    def clip(self) -> float | None:
        """C, the L2 bound of one row of a contribution; None: unbounded."""
        return clip_of(self.own.config)

    @property
    def release(self) -> SummedRelease | None:
        """The privacy cost of one sum to a person at a passive; None: no noise is agreed."""
        if self.noise is None:
            return None
        return make_sum_release(self.own.config, self.own.passives[0], self.shape, self.noise)

    def make_passive_end(
        self,
        *,
        people: int,
        extra_answers: int = 0,
        is_known_N: Tensor | None = None,
        repeatable: bool = False,
        defences: Sequence[GradientDefence] = (),
    ) -> "PassiveSum":
        """Return this passive's end of the sum; see `PassiveSum`.

        `people`: rows that it counts answers for. `extra_answers`: answers for each row besides
        those for training. `is_known_N`: positions of people that it knows, (N,), bool; None: all.
        `repeatable`: whether the same request gets the same answer again at no further cost.
        `defences`: applied to gradients before they are protected.
        """
        own = self.own
        noise = None
        if self.noise is not None:
            noise = own.open_contribution_noise(self.shape, self.noise, people)
        return PassiveSum(
            own.name,
            self.contract,
            self._make_contributor(),
            noise=noise,
            is_known_N=is_known_N,
            allowance=Allowance.from_contract(
                own, self.contract, aligned=people, extra_answers=extra_answers
            ),
            rounds=self.protocol.rounds,
            repeatable=repeatable,
            defences=defences,
            contributed=own.contributed,
        )

    def _make_contributor(self) -> SumContributor:
        """Return this passive's protocol end, with its memory of circles if a sum may lack
        passives.
        """
        own = self.own
        protocol = self.protocol
        if isinstance(protocol, RecoverableSum) and self.contract.silent_passive == "recover":
            return protocol.make_contributor(own.name, answered=RunCircles.from_own(own))
        return protocol.make_contributor(own.name)

    def make_active_end(self, dtype: torch.dtype = torch.float64) -> "ActiveSum":
        """Return the active's end of the sum, which decodes it in this dtype."""
        return ActiveSum(
            self.contract,
            self.protocol.make_receiver(),
            RefusedSums(self.own),
            rounding=self.protocol.compute_rounding_error(),
            dtype=dtype,
        )

    def make_aggregator(self) -> "SumAggregator":
        """Return the aggregator's role in this sum."""
        return SumAggregator(
            self.contract, self.protocol.make_combiner(), rounds=self.protocol.rounds
        )


@dataclass(frozen=True)
class Admitted:
    """A request that passed all checks and may be answered once.

    Attributes:
        step: of the run; rows: alignment positions that the answer is about, (B,); counted: the
            rows that it is charged for.
        payload: the request; sender: the active or aggregator that sent it.
    """

    step: int
    rows: Tensor
    counted: Tensor
    payload: bytes
    sender: str


class PassiveSum:
    """A passive's end of the secure sum. For each request: `admit_request`, compute,
    `defend_gradient` for a gradient, `send_answer`.

    Args:
        noise: the noise that it adds, with its privacy account; None: none.
        is_known_N: positions of people that it knows, (N,), bool; None: all.
        repeatable: whether a repeated answer in another session is not charged again, since it
            reveals nothing new.
        defences: of gradients that it contributes.
        contributed: see `PartyContext`.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        contributor: SumContributor,
        *,
        allowance: "Allowance",
        rounds: int = 1,
        noise: ContributionNoise | None = None,
        is_known_N: Tensor | None = None,
        repeatable: bool = False,
        defences: Sequence[GradientDefence] = (),
        contributed: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Make a passive's end of the secure sum, with limits of answers and noise.

        `rounds`: messages of a passive in one sum, 1 or 2. `is_known_N`: positions of people that
        it knows, (N,), bool; None: all. `defences`: applied to gradients before they are protected.
        `contributed`: called with step, rows and values of each contribution; None: nobody records
        them.
        """
        self.name = name
        self.contract = contract
        self.contributor = contributor
        contributor.clipping.quiet = True  # gradients of a run are clipped by design
        self.allowance = allowance
        self.rounds = rounds
        self.noise = noise
        self.defences = defences
        self._contributed = contributed
        self._is_known_N = is_known_N
        self._gate = StepGate(name)
        self._admitted_request: Admitted | None = None
        # The same answer reveals nothing new only where all passives repeat theirs. They may not
        # where a batch moves other passives and leaves this one as it is (people that it does not
        # know), nor where a sum may lack passives: the difference of two sums is then the others'
        # alone. And noise that others draw anew averages theirs away. So there, an answer is its
        # session's.
        knows_all = is_known_N is None or bool(is_known_N.all())
        lacks_nobody = contract.silent_passive != "recover"
        repeats = repeatable and knows_all and lacks_nobody and noise is None
        self._session = b"" if repeats else contract.digest

    async def set_up(self, links: Links) -> None:
        """Exchange the sum's keys with the active, the aggregator and the other passives."""
        peers = [self.contract.active, AGGREGATOR, *self.contract.passives]
        peers.remove(self.name)
        await links.run_conversation(Kind.SUM_SETUP, self.contributor, peers)

    def admit_request(
        self,
        request: Envelope,
        rows_B: Tensor,
        *,
        step: int | None = None,
        counted: Tensor | None = None,
    ) -> Admitted:
        """Check a request about these positions: each step once, and no row more often than agreed.

        `step`: of the answer, if not that of the message. `counted`: the positions whose limit it
        uses up, if not `rows_B`. Raises RemoteProtocolError: a batch too large, a row too often, or
        a step that was answered.
        """
        step = request.step if step is None else step
        counted = rows_B if counted is None else counted
        self.allowance.check_batch(step, counted, sender=request.sender)
        self._gate.enter(step, sender=request.sender)
        self._admitted_request = Admitted(step, rows_B, counted, request.payload, request.sender)
        return self._admitted_request

    def defend_gradient(self, admitted: Admitted, gradient_BD: Tensor) -> Tensor:
        """Return the gradient (B, D) after all configured defences; it is contributed instead."""
        for defence in self.defences:
            leaving = Leaving(admitted.step, AGGREGATOR)
            gradient_BD = defence.protect_gradient(gradient_BD, leaving)
        return gradient_BD

    async def send_answer(self, links: Links, admitted: Admitted, values_BD: Floats) -> None:
        """Send the protected answer (B, D) to the admitted request; in a sum of two rounds, also
        the second.

        `values_BD`: the answer in real numbers.
        """
        step = admitted.step
        links.send(AGGREGATOR, Kind.CONTRIBUTION, step, self.protect_answer(admitted, values_BD))
        if self.rounds == 2:
            request = await links.receive(
                AGGREGATOR, Kind.SUM_REQUEST, step=step, patience=FOR_THE_AGGREGATOR
            )
            answer = self.contributor.answer(request.payload)
            links.send(AGGREGATOR, Kind.SUM_ANSWER, step, answer)

    def protect_answer(self, admitted: Admitted, values_BD: Floats) -> bytes:
        """Count, charge, add noise to, bind and encrypt one answer, (B, D), in this order.

        The request must be the one admitted last, and is used up.

        `values_BD`: the answer in real numbers.

        Raises:
            LocalProtocolError: another request was admitted last.
            RemoteProtocolError: a row was answered as often as agreed; nothing is counted.
            BudgetExhaustedError: contributing would exceed the privacy budget; nothing may be sent.
        """
        if admitted is not self._admitted_request:
            raise LocalProtocolError(
                f"{self.name}: an answer is for what was admitted last, and leaves once"
            )
        self._admitted_request = None
        values_BD = np.ascontiguousarray(values_BD)
        digest = answer_digest(self._session, admitted.payload, values_BD)
        self.count_answer(admitted, digest)
        noise_BD = None
        if self.noise is not None:
            noise_BD = self.noise.draw(
                values_BD.shape,
                step=admitted.step,
                known_B=self.pick_known_rows(admitted.counted),
                digest=digest,
            )
        if self._contributed is not None:
            fixed = self.contributor.described.fixed_point
            noise = 0.0 if noise_BD is None else noise_BD * (fixed.clip_norm / fixed.levels)
            clear_BD = torch.from_numpy(np.asarray(values_BD + noise, dtype=np.float32))
            self._contributed(admitted.step, admitted.counted, clear_BD)
        return self.contributor.contribute(values_BD, self.make_binding(admitted), noise_BD)

    def takes_part(self, step: int) -> bool:
        """Return whether this passive answers a step; not if others answered it
        earlier without it.
        """
        circle = self.contract.circle_of(step)
        return circle is None or self.name in circle

    def pick_known_rows(self, rows_B: Tensor) -> Tensor:
        """Return those of these alignment positions whose people the passive knows."""
        return rows_B if self._is_known_N is None else rows_B[self._is_known_N[rows_B]]

    def count_answer(self, admitted: Admitted, digest: bytes) -> None:
        """Count an answer, identified by its digest, against the limit of its rows."""
        self.allowance.count_answers(
            admitted.step, admitted.counted, digest, sender=admitted.sender
        )

    def make_binding(self, admitted: Admitted) -> StepBinding:
        """Return the step binding of a contribution: it decrypts only for exactly this request."""
        return bind_step(self.contract.session, admitted.step, admitted.rows, admitted.payload)

    def resume(self, next_step: int) -> None:
        """Mark all steps before this one as answered, after a resumption."""
        self._gate.last = next_step - 1


class SumHelper(HelperRole):
    """A passive that answers through the session's secure sum; see `HelperRole`. `checkpointed`:
    its state for checkpoints, in addition to the count of its answers.
    """

    def __init__(
        self, sum_end: PassiveSum, checkpointed: Mapping[str, CheckpointPart] = {}
    ) -> None:
        """Make a helper's role around its end of the sum, whose counters, ledger and noise are its
        state.

        `checkpointed`: parts of its state for checkpoints, besides the counters.
        """
        self.name = sum_end.name
        self.contract = sum_end.contract
        self.sum = sum_end
        self.checkpoint_parts = {**checkpointed, "allowance": sum_end.allowance}
        if sum_end.noise is not None:
            self.contributions = sum_end.noise.ledger
            self.ledgers = {self.name: sum_end.noise.ledger}

    async def set_up(self, links: Links) -> None:
        await self.sum.set_up(links)

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        self.sum.resume(next_step)


class ActiveSum:
    """The active's end of the secure sum: `send_request` to the present passives, `receive_sum` of
    their answers.

    Args:
        rounding: the largest error of one number.

    Attributes:
        opened: the sum that it decoded last, (B, D); None before. Its own record, in no message.
        present: the passives that have not fallen silent.
        left: the passives that stopped answering in this session, with the step.
        steps_without_all: steps that were finished without all passives.
    """

    def __init__(
        self,
        contract: Contract,
        receiver: SumReceiver,
        refused: "RefusedSums",
        *,
        rounding: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Make the active's end of the secure sum; `refused` counts the sums that failed
        verification.

        `rounding`: largest error of one number of a sum.
        """
        self.contract = contract
        self.receiver = receiver
        self.rounding = rounding
        self._refused = refused
        self._dtype = dtype
        self.opened: Tensor | None = None
        self.present = list(contract.passives)
        self.left = dict[str, int]()
        self.steps_without_all = 0
        self._agreed = contract.digest.hex()

    async def set_up(self, links: Links) -> None:
        """Exchange the sum's keys with the passives and the aggregator."""
        await links.run_conversation(
            Kind.SUM_SETUP, self.receiver, (*self.contract.passives, AGGREGATOR)
        )

    def send_request(self, links: Links, kind: Kind, step: int, payload: bytes) -> None:
        """Send a request to the passives that answer this step.

        `payload`: the request's bytes.

        Raises PartyLeftError: the passives that first answered this step together (its circle)
        include one that fell silent, so the step cannot be repeated.
        """
        self._keep_to_circle(step)
        for name in self.present:
            links.send(name, kind, step, payload)

    def lacks_somebody(self, step: int) -> bool:
        """Return whether this step was answered earlier without a passive that is present now."""
        circle = self.contract.circle_of(step)
        return circle is not None and any(name not in circle for name in self.present)

    def _keep_to_circle(self, step: int) -> None:
        """Continue a repeated step with the passives that answered it before."""
        self._drop_silent_passives(self.contract.keep_to_circle(step, self.present), step)

    def _drop_silent_passives(self, present: Sequence[str], step: int) -> None:
        """Continue with these passives only, and record at which step the others fell silent."""
        if present == self.present:
            return
        leavers = [name for name in self.present if name not in present]
        self.left |= dict.fromkeys(leavers, step)
        self.present = list(present)

    async def receive_sum(
        self, links: Links, step: int, rows_B: Tensor, payload: bytes, numbers: int
    ) -> Tensor:
        """Return the decoded sum of the answers, (B, `numbers`), float64.

        `payload`: the request's bytes.

        Raises RemoteProtocolError: the sum is altered, of another request, or of passives that the
        contract does not allow. After that no sum of this session is decoded any more.
        """
        self._keep_to_circle(step)
        message = await links.receive(AGGREGATOR, Kind.SUM, step=step, patience=FOR_AN_ANSWER)
        present, combined = _parse_sum(message, self.present, self.contract)
        sum_BD = self.open_sum(
            combined, (len(rows_B), numbers), self.make_binding(step, rows_B, payload)
        )
        self._drop_silent_passives(present, step)
        self.steps_without_all += bool(self.left)
        return sum_BD

    def open_sum(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> Tensor:
        """Decrypt and decode the aggregator's sum; record a refusal on disk before raising it.

        `combined`: what the aggregator sent.

        Raises LocalProtocolError, RemoteProtocolError: see `SumReceiver.decode`.
        """
        with self._refused.note_refusal(step=binding.step, contract=self._agreed):
            sum_BD = torch.from_numpy(self.receiver.decode(combined, shape, binding))
        self.opened = sum_BD.to(self._dtype)
        return sum_BD

    def make_binding(self, step: int, rows_B: Tensor, payload: bytes) -> StepBinding:
        return bind_step(self.contract.session, step, rows_B, payload)


class SumLearner(ActiveRole):
    """An active that reads the session's sum; see `ActiveRole`."""

    sum: ActiveSum

    def read_from(self, sum_end: ActiveSum) -> None:
        """Use this end of the sum, and share its record of passives that fell silent."""
        self.sum = sum_end
        self.left = sum_end.left
        self.rounding = sum_end.rounding

    async def set_up(self, links: Links) -> None:
        await self.sum.set_up(links)

    @property
    def last_sum(self) -> Tensor | None:
        return self.sum.opened

    @property
    def steps_without_all(self) -> int:
        return self.sum.steps_without_all


class Aggregator(HelperRole):
    """The aggregator's role: in each step it receives one masked contribution of each present
    passive.

    A passive that stops answering stays out until the next session. The contract defines whether
    the run then ends, or continues with the others; and, for steps that are repeated, which
    passives answered them before and so answer again.
    """

    name = AGGREGATOR

    def __init__(self, contract: Contract) -> None:
        """Start with all passives present."""
        self.contract = contract
        self.present = list(contract.passives)
        self._gate = StepGate(AGGREGATOR)

    async def run_session(self, links: Links, save: Save) -> None:
        """Combine each step's contributions for the active, until it ends the session."""
        active = self.contract.active
        while True:
            try:
                message = await links.receive(
                    (active, *self.present),
                    Kind.CONTRIBUTION,
                    Kind.CHECKPOINT,
                    Kind.END,
                    minimum=1 + self._find_threshold(),
                    patience=FOR_THE_ACTIVE,
                )
            except PartyLeftError as error:
                if active in error.left:
                    raise
                self._drop_silent_passives(error, self.present)
                continue
            if (message.kind is Kind.CONTRIBUTION) is (message.sender == active):
                raise RemoteProtocolError(
                    f"{message.sender} sent {message.kind}, which only "
                    f"{'a passive' if message.sender == active else active} may"
                )
            if message.kind is not Kind.CONTRIBUTION:
                if not save_or_end(message.kind, message.step, links, active, save):
                    return
                continue
            self.present = self.contract.keep_to_circle(message.step, self.present)
            if message.sender not in self.present:
                continue  # it was left out of this step before, and is so again
            self.admit_step(message)
            bodies = await self.gather_bodies(links, Kind.CONTRIBUTION, message)
            self.contract.keep_to_circle(message.step, [*bodies])
            combined = await self.combine_bodies(links, message, bodies)
            links.send(active, Kind.SUM, message.step, combined)

    def admit_step(self, message: Envelope) -> None:
        """Check that this message begins a new step that the contract allows; each step passes
        once.

        Raises RemoteProtocolError: the step is over, or not in the run.
        """
        self._gate.enter(message.step, sender=message.sender)

    @abstractmethod
    async def combine_bodies(
        self, links: Links, first: Envelope, bodies: Mapping[str, bytes]
    ) -> bytes:
        """Return the message to the active from one contribution of each passive.

        `first`: the first message of the step.
        """

    def _find_threshold(self) -> int:
        """Return how many passives a sum needs: the agreed threshold if the run may lack some, else
        all.
        """
        if self.contract.silent_passive != "recover":
            return len(self.present)
        threshold = self.contract.secure_sum["threshold"]
        assert isinstance(threshold, int)
        return threshold

    async def gather_bodies(self, links: Links, kind: Kind, begun_by: Envelope) -> dict[str, bytes]:
        """Receive one contribution of this kind from every present passive; `begun_by` is the
        first.

        Returns them by passive. Raises PartyLeftError, RemoteProtocolError: the step cannot be
        completed.
        """
        bodies = dict[str, bytes]()
        missing = list(self.present)
        if kind is begun_by.kind:
            bodies[begun_by.sender] = begun_by.payload
            missing.remove(begun_by.sender)
        while missing:
            try:
                message = await links.receive(
                    missing, kind, step=begun_by.step, minimum=len(missing)
                )
            except PartyLeftError as error:
                self._drop_silent_passives(error, missing)
                missing = [name for name in missing if name in self.present]
            except RemoteProtocolError as error:
                raise RemoteProtocolError(
                    f"{error}; {begun_by.sender} began that step, so one of the two is to blame"
                ) from error
            else:
                bodies[message.sender] = message.payload
                missing.remove(message.sender)
        return {name: bodies[name] for name in self.present}

    def _drop_silent_passives(self, error: PartyLeftError, awaited: Sequence[str]) -> None:
        """Continue without the passives that left, if the contract allows.

        `awaited`: passives that did not answer.

        Raises PartyLeftError: it says to stop, or too few passives remain.
        """
        leavers = [name for name in error.left or awaited if name in self.present]
        serves = self.contract.predicts
        recovers = self.contract.silent_passive == "recover"
        if serves or (isinstance(error, RunStoppedError) and not recovers):
            raise error
        reason = str(error)
        if not error.gone:  # a passive that is gone left the session itself
            reason += f"; or {self.contract.active} did not ask for it"
        if not recovers:
            remedy = (
                "the contract says to stop when a passive falls silent: go on in a new session "
                f"once {' and '.join(leavers)} is back, or agree on rules.silent_passive: recover, "
                "where the method can, with recoverable masks (secure_sum.masks)"
            )
            if self.contract.silent_passive == "wait":
                remedy = f"the contract says to wait for {' and '.join(leavers)}"
            raise PartyLeftError(f"{reason}; {remedy}", left=tuple(leavers)) from error
        self.present = [name for name in self.present if name not in leavers]
        if not leavers or len(self.present) < self._find_threshold():
            passives = tuple(self.contract.passives)
            missing = ", ".join(name for name in passives if name not in self.present)
            raise PartyLeftError(
                f"{reason}; this sum needs at least {self._find_threshold()} of {len(passives)} "
                f"passives, missing: {missing}; resume once they are back",
                left=tuple(leavers),
            ) from error


class SumAggregator(Aggregator):
    """The aggregator of a secure sum: adds masked contributions that it cannot read. `combiner`:
    its end of the protocol; rounds: rounds of messages between passives and aggregator, 1 or 2.
    """

    def __init__(self, contract: Contract, combiner: SumCombiner, *, rounds: int) -> None:
        """Take the protocol's combiner, and its number of rounds with the passives."""
        super().__init__(contract)
        self.combiner = combiner
        self._rounds = rounds

    async def set_up(self, links: Links) -> None:
        peers = (self.contract.active, *self.contract.passives)
        await links.run_conversation(Kind.SUM_SETUP, self.combiner, peers)

    async def combine_bodies(
        self, links: Links, first: Envelope, bodies: Mapping[str, bytes]
    ) -> bytes:
        """Add the encrypted contributions; with two rounds, first collect the passives' unmasking
        shares.

        `bodies`: each passive's message.
        """
        if self._rounds == 2:
            for name, request in self.combiner.ask(bodies).items():
                links.send(name, Kind.SUM_REQUEST, first.step, request)
            bodies = await self.gather_bodies(links, Kind.SUM_ANSWER, first)
        packed: bytes = msgpack.packb([self.present, self.combiner.combine(bodies)])
        return packed


class SumMethod(Method):
    """A method whose passives add under the session's sum; see `Method`."""

    def build_aggregator(self, party: PartyContext, contract: Contract) -> HelperRole:
        return SessionSum.from_contract(party, contract).make_aggregator()


@contextmanager
def blame_active_too(active: str) -> Iterator[None]:
    """Add the active to those blamed for a silence in this block: it may have requested nothing."""
    try:
        yield
    except PartyLeftError as silence:
        if silence.gone:
            raise
        raise PartyLeftError(
            f"{silence}; or {active}, who asks them, asked others and not them",
            left=(*silence.left, active),
        ) from silence


def answer_digest(session: bytes, payload: bytes, values: NDArray[np.generic]) -> bytes:
    """Return a digest that identifies an answer.

    `session`: digest of its contract, where the same answer in another session reveals something
    new; empty: the answer is the same in every session. `payload`: the answer's bytes.
    """
    content = hashlib.blake2b(session)
    content.update(payload)
    content.update(values.tobytes())
    return content.digest()


def bind_step(session: str, step: int, rows_B: Tensor, payload: bytes) -> StepBinding:
    """Bind a contribution to its session, step, rows and the request about them."""
    rows = rows_B.detach().cpu().contiguous().numpy().astype("<i8").tobytes()
    return StepBinding.from_contents(session, step, rows=rows, message=payload)


def _parse_sum(
    message: Envelope, passives: Sequence[str], contract: Contract
) -> tuple[Sequence[str], bytes]:
    """Return the passives in a sum and its encrypted body, from the aggregator's message.

    Raises RemoteProtocolError: it is malformed, or counts passives that the contract does not
    allow.
    """
    try:
        present, combined = msgpack.unpackb(message.payload)
    except (ValueError, TypeError, msgpack.UnpackException):
        present = None
        combined = None
    if (
        not isinstance(present, list)
        or not isinstance(combined, bytes)
        or set(map(type, present)) - {str}
    ):
        raise RemoteProtocolError(
            f"{message.sender} sent something else than a sum and who takes part still"
        )
    may_leave = contract.silent_passive == "recover"
    min_passives = contract.secure_sum["threshold"] if may_leave else len(passives)
    allowed = [name for name in passives if name in present] if may_leave else list(passives)
    if present != allowed or len(present) < min_passives:
        raise RemoteProtocolError(
            f"{message.sender} counts {', '.join(present)[:200] or 'nobody'} in the sum of step "
            f"{message.step}; the contract allows {'at least' if may_leave else 'exactly'} "
            f"{min_passives} of {', '.join(passives)}"
        )
    return present, combined


class StepGate:
    """A check that every step of a session is answered at most once, in rising order."""

    def __init__(self, me: str) -> None:
        self._me = me
        self.last = -1

    def enter(self, step: int, *, sender: str) -> None:
        """Let a step pass if it is later than all before; otherwise raise RemoteProtocolError."""
        if step <= self.last:
            raise RemoteProtocolError(
                f"{self._me}: {sender} sent step {step} after step {self.last}; "
                "a step is never answered twice in one session"
            )
        self.last = step


class Allowance:
    """The contract's limits on what the active may ask of one party: batch sizes, and answers for
    each row.

    Answers are counted over all sessions of the run, in a write-ahead log, so interrupting and
    resuming a run yields no additional answers. A repeated answer (same step and digest) counts
    once.

    Args:
        me: the party; contract: of the session.
        aligned: number of alignment positions; extra_answers: answers for a row in addition to
            those for training.
        log: the write-ahead log; None: memory and checkpoints only.
        is_durable: whether a line must be on the disk before its answer leaves; the operating
            system's buffers are lost in a power failure.

    Raises:
        CheckpointError: the log was altered, or is of another run.
    """

    @classmethod
    def from_contract(
        cls, party: PartyContext, contract: Contract, *, aligned: int, extra_answers: int = 0
    ) -> Self:
        """Return the counters of this party, in a log of its own that outlasts the session if it
        keeps one.

        `aligned`: number of alignment positions. `extra_answers`: answers for each row besides
        those for training.
        """
        log = (
            log_file(party.secrets.logs, "answers", party.name, "jsonl")
            if party.secrets.logs
            else None
        )
        return cls(
            party.name,
            contract,
            aligned=aligned,
            extra_answers=extra_answers,
            log=log,
            is_durable=party.secrets.sends_out,
        )

    def __init__(
        self,
        me: str,
        contract: Contract,
        *,
        aligned: int,
        log: Path | None,
        extra_answers: int = 0,
        is_durable: bool = True,
    ) -> None:
        """Make the counters of answers by row; with a log, answers of earlier sessions count.

        `aligned`: number of alignment positions. `extra_answers`: answers for each row besides
        those for training. `is_durable`: whether a line must be on the disk before its answer
        leaves.
        """
        self._me = me
        self._largest = contract.batch_size
        self._answers = contract.epochs + contract.spare_answers + extra_answers
        self._is_durable = log is not None and is_durable
        self._counts = ReleaseCounts(rows=aligned, log=log, about={"answers": self._answers})

    def check_batch(self, step: int, rows_B: Tensor, *, sender: str) -> None:
        """Refuse a request before computing anything: too large a batch, or a row too often.

        A step that was answered before passes, since repeating its answer reveals nothing new.
        Raises RemoteProtocolError.
        """
        if len(rows_B) > self._largest:
            raise RemoteProtocolError(
                f"{sender} sent a batch of {len(rows_B)} rows to {self._me}; the contract says at "
                f"most {self._largest}"
            )
        if step not in self._counts.steps:
            self._check_answers(rows_B, sender)

    def count_answers(self, step: int, rows_B: Tensor, digest: bytes, *, sender: str) -> None:
        """Count one answer for each of these rows; when this returns, it is in the log and may
        leave.

        `rows_B`: the answered rows, without repeats. `digest`: of the answer. Raises
        RemoteProtocolError: a row was answered as often as agreed; nothing is counted.
        """
        answer = Release(step, digest, np.sort(rows_B.cpu().numpy()))
        if self._counts.has_release(answer):
            return
        self._check_answers(rows_B, sender)
        self._counts.add_release(answer)
        if self._is_durable:
            self._counts.sync()

    def _check_answers(self, rows_B: Tensor, sender: str) -> None:
        """Raise RemoteProtocolError if one of these rows was answered as often as agreed."""
        if int(self._counts.of_row_N[rows_B.cpu().numpy()].max(initial=0)) >= self._answers:
            raise RemoteProtocolError(
                f"{sender} asked {self._me} for a row more than {self._answers} times, all "
                "sessions of the run counted; the contract agrees to no more. If the run broke "
                "off often, begin a new one with more rules.spare_answers"
            )

    def tensors(self) -> dict[str, Tensor]:
        return self._counts.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore counters from `tensors`; counts in the log are never lowered.

        Raises CheckpointError: they are of another number of rows, or the log lacks answers.
        """
        self._counts.load_state_dict(tensors)


class DurableLog:
    """A party's list of events that must survive sessions and crashes. Each is a line, on the
    disk before its effect is visible; only the owner can read the file. A partly written line
    counts too.

    Args:
        name: of the list; party: the party. Without a folder for logs the list is empty and in no
            file.
    """

    def __init__(self, party: PartyContext, name: str) -> None:
        """Choose the file NAME-PARTY.jsonl in the party's log folder, if it keeps logs."""
        logs = party.secrets.logs
        self.me = party.name
        self.path = log_file(logs, name, party.name, "jsonl") if logs else None

    def load_lines(self) -> Sequence[bytes]:
        """Return the log's lines that are not empty; none if there is no file."""
        if self.path is None or not os.path.lexists(self.path):
            return ()
        with open_plain(self.path) as file:
            return [line for line in file.read(MAX_JSON_BYTES).splitlines() if line.strip()]

    def append_line(self, event: str, instead: str = "", **fields: str | int) -> None:
        """Append these fields as one JSON line, synced to disk.

        `event`, `instead`: what the line records and what to do, for the error. Raises
        CheckpointError: the file cannot be written.
        """
        if self.path is None:
            return
        try:
            add_line(self.path, fields)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{self.path}: cannot note {event} ({error}){instead}") from error


class RefusedSums:
    """The number of sums that the active refused over all sessions, stored before a refusal is
    visible.

    Protects from: an adversary who alters sums, and learns from which of them the active accepts.
    One session reveals which sum was the first to be refused (see `SumReceiver`); a resumed run
    computes the same numbers, so the adversary could test another alteration. Hence a run continues
    after at most as many refused sums as its user allows (`rules.refused_sums`). Raises
    CheckpointError: more were refused, or the list cannot be read.
    """

    def __init__(self, party: PartyContext) -> None:
        """Make the count of refused sums, with those in the log. Raises CheckpointError: more sums
        were refused than `rules.refused_sums` allows.
        """
        self._log = DurableLog(party, "refused")
        allowed = party.config.rules.refused_sums
        if (count := len(self._log.load_lines())) > allowed:
            raise CheckpointError(
                f"{party.name} refused {count} sum{'s' * (count > 1)} of this run, and "
                f"rules.refused_sums is {allowed}. Whoever altered them (the aggregator, or a "
                "passive) may have learnt bits of the passives' numbers from which were taken, and "
                "a resumed run computes the same numbers again. Find out who it was; then begin a "
                "new run with another seed, among parties that you trust. If it was nobody's "
                f"intent, resume with rules.refused_sums: {count} in the run's config.yaml"
            )

    @contextmanager
    def note_refusal(self, *, step: int, contract: str) -> Iterator[None]:
        """Record a refusal raised in this block on disk before the error leaves.

        An error of our own use, or an interruption, is not recorded. Raises CheckpointError: the
        log cannot be written.
        """
        try:
            yield
        except LocalProtocolError:
            raise
        except Exception:
            self._log.append_line(
                f"that {self._log.me} refused the sum of step {step}",
                "; do not resume this run, which could not count it",
                contract=contract,
                step=step,
            )
            raise
