"""A secure sum at each of its parties: at a passive, at the aggregator and at the active.

A passive (`PassiveSum`) first admits a request: each step once, no row more often than agreed. Its
answer, a contribution to the sum, is counted in the passive's log, its privacy cost is recorded in
the ledger and its noise added; it is bound to the request, and only then encrypted or masked and
sent, in this order; only admitted requests are answered. The aggregator (`ContributionAggregator`)
collects one masked contribution of each present passive and adds them. The active (`ActiveSum`)
decodes the sum of exactly the passives that took part, bound to its request; a sum that fails
verification is recorded on disk before the error is raised.

A step takes 2M + 1 envelopes of M passives, 4M + 1 where the sum has two rounds. Protects from: a
malicious active that probes with repeated steps or too many requests (its representations are
checked by `secure_apfed.learning.release`), and from an adversary that alters sums. Letters: N
alignment positions, B rows of an answer, D numbers of a row.
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
from apfed_protocols.sums import SecureSum, SumAggregator, SumContributor, SumReceiver
from apfed_protocols.sums.interface import StepBinding
from apfed_protocols.sums.recoverable import RecoverableSum
from secure_apfed.base.files import MAX_JSON_BYTES, add_line, open_plain
from secure_apfed.base.names import log_file
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.learning.release import ContributionNoise, parse_representations
from secure_apfed.methods.contributor_log import RunContributorLog
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
from secure_apfed.methods.noise_plans import NoisePlan, make_sum_release, sum_and_noise
from secure_apfed.methods.party import CheckpointPart, PartyContext
from secure_apfed.methods.terms import find_clip
from secure_apfed.networks.models import Shape
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.defences import DefenceChain
from secure_apfed.privacy.ledger import Release, ReleaseCounts

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class SessionSum:
    """The secure sum of a session; from it each party makes its own side of the sum.

    All parties derive an equal one from the public settings.

    Attributes:
        party: the inputs of the party.
        contract: the session's contract.
        secure_sum: the secure sum's protocol.
        noise: the noise that each passive adds to its contributions; None: none is agreed.
    """

    party: PartyContext
    contract: Contract
    secure_sum: SecureSum
    noise: NoisePlan | None

    @classmethod
    def from_contract(cls, party: PartyContext, contract: Contract) -> Self:
        """Return the sum that the public settings give; all parties derive the same."""
        names = tuple(contract.passives)
        shape = contract.passives[names[0]].representation.shape
        protocol, noise = sum_and_noise(party.config, contract.session, party.active, names, shape)
        return cls(party, contract, protocol, noise)

    @property
    def shape(self) -> Shape:
        """The shape of one row of a contribution."""
        return next(iter(self.contract.passives.values())).representation.shape

    @property
    def clip(self) -> float | None:
        """C, the L2 bound of one row of a contribution; None: unbounded."""
        return find_clip(self.party.config)

    @property
    def release(self) -> SummedRelease | None:
        """The privacy mechanism of one noisy sum; None: no noise is agreed.

        It states the cost for a person at the first passive.
        """
        if self.noise is None:
            return None
        return make_sum_release(self.party.config, self.party.passives[0], self.shape, self.noise)

    def make_passive_sum(
        self,
        *,
        person_count: int,
        extra_answers: int = 0,
        is_known_N: Tensor | None = None,
        counts_repeats_once: bool = False,
        defences: DefenceChain | None = None,
    ) -> "PassiveSum":
        """Return a passive's side of the sum.

        Args:
            person_count: number of alignment positions, for each of which it counts its answers.
            extra_answers: how often a position may be answered besides training.
            is_known_N: whether it knows the person at each of the N positions; None: all.
            counts_repeats_once: whether an equal answer to an equal request in another session is
                not counted again, where it reveals nothing new.
            defences: defences that change gradients before they are masked.
        """
        party = self.party
        noise = None
        if self.noise is not None:
            noise = party.open_contribution_noise(self.shape, self.noise, person_count)
        answer_limits = AnswerLimits.from_contract(
            party, self.contract, position_count=person_count, extra_answers=extra_answers
        )
        return PassiveSum(
            party.name,
            self.contract,
            self._make_contributor(),
            noise=noise,
            is_known_N=is_known_N,
            answer_limits=answer_limits,
            rounds=self.secure_sum.rounds,
            counts_repeats_once=counts_repeats_once,
            defences=defences,
            record_contribution=party.record_contribution,
        )

    def _make_contributor(self) -> SumContributor:
        """Return this passive's side of the sum's protocol.

        If a sum may lack passives, it also gets the record of who answered each step together with
        it (`secure_apfed.methods.contributor_log`).
        """
        party = self.party
        protocol = self.secure_sum
        if isinstance(protocol, RecoverableSum) and self.contract.silent_passive == "recover":
            return protocol.make_contributor(
                party.name, contributor_log=RunContributorLog.for_party(party)
            )
        return protocol.make_contributor(party.name)

    def make_active_sum(self, dtype: torch.dtype = torch.float64) -> "ActiveSum":
        """Return the active's side of the sum, which sends requests and decodes sums.

        `dtype`: data type of `ActiveSum.decoded_sum`.
        """
        return ActiveSum(
            self.contract,
            self.secure_sum.make_receiver(),
            RefusedSums(self.party),
            rounding_error=self.secure_sum.compute_rounding_error(),
            dtype=dtype,
        )

    def make_aggregator(self) -> "ContributionAggregator":
        """Return the aggregator's role in this sum."""
        return ContributionAggregator(
            self.contract, self.secure_sum.make_aggregator(), rounds=self.secure_sum.rounds
        )


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that passed all checks and may be answered once.

    Attributes:
        step: the step that the answer is for.
        rows: the B rows that the answer is about: alignment positions, or rows of a network's
            weights where networks are averaged.
        counted_rows: the alignment positions (indices into the common list of people) whose limits
            and ledger the answer is counted in.
        payload: the request's bytes.
        sender: the active or aggregator that sent it.
    """

    step: int
    rows: Tensor
    counted_rows: Tensor
    payload: bytes
    sender: str


class PassiveSum:
    """A passive's side of the secure sum.

    For each request a role calls `admit_request`, computes the answer, applies `defend_gradient` if
    it is a gradient, and calls `send_answer`.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        contributor: SumContributor,
        *,
        answer_limits: "AnswerLimits",
        rounds: int = 1,
        noise: ContributionNoise | None = None,
        is_known_N: Tensor | None = None,
        counts_repeats_once: bool = False,
        defences: DefenceChain | None = None,
        record_contribution: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Make a passive's side of the secure sum; `name`: the passive's name.

        Args:
            contributor: the protocol's object for this passive, which encrypts or masks
                contributions.
            answer_limits: limits on how often it may answer for each position, with the counters.
            rounds: number of messages that a passive sends in one sum, 1 or 2.
            noise: the noise that it adds, with its privacy ledger; None: none.
            is_known_N: whether it knows the person at each of the N positions, bool; None: all.
            counts_repeats_once: whether an equal answer to an equal request in another session is
                not counted again, where it reveals nothing new.
            defences: defences that change gradients before they are masked.
            record_contribution: called with step, alignment positions and values of each
                contribution before it is masked, for the party's own record; None: no record.
        """
        self.name = name
        self.contract = contract
        self.contributor = contributor
        contributor.clipping.quiet = True  # gradients of a run are clipped by design
        self.answer_limits = answer_limits
        self.rounds = rounds
        self.noise = noise
        self.defences = defences or DefenceChain()
        self._record_contribution = record_contribution
        self._is_known_N = is_known_N
        self._gate = StepGate(name)
        self._admitted_request: AdmittedRequest | None = None
        # An equal answer in another session reveals nothing new only if all passives repeat theirs.
        # They may not: a batch can move other passives and leave this one as it is (people that it
        # does not know), and a sum may lack passives; the difference of two sums is then the
        # others' contribution alone. And fresh noise of others averages out. In these cases the
        # digest of an answer contains its session, so that equal answers are counted again.
        knows_all = is_known_N is None or bool(is_known_N.all())
        sum_has_all = contract.silent_passive != "recover"
        counts_once = counts_repeats_once and knows_all and sum_has_all and noise is None
        self._digest_prefix = b"" if counts_once else contract.digest

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
        counted_rows: Tensor | None = None,
    ) -> AdmittedRequest:
        """Check a request about these positions, and admit it for one answer.

        Each step is admitted once, and no position more often than agreed.

        Args:
            request: the message.
            rows_B: the rows that the answer is about.
            step: number of the step that is answered; None: the message's step number.
            counted_rows: the alignment positions that the answer is counted for; None: `rows_B`.

        Raises RemoteProtocolError: a batch too large, a position too often, or a step that was
        answered.
        """
        step = request.step if step is None else step
        counted_rows = rows_B if counted_rows is None else counted_rows
        self.answer_limits.check_batch(step, counted_rows, sender=request.sender)
        self._gate.enter(step, sender=request.sender)
        self._admitted_request = AdmittedRequest(
            step, rows_B, counted_rows, request.payload, request.sender
        )
        return self._admitted_request

    def admit_representations(
        self, message: Envelope, *, position_count: int
    ) -> tuple[AdmittedRequest, Tensor]:
        """Check a request that contains representations, and admit it for one answer.

        `position_count`: number of alignment positions. Returns the request, and its
        representations of B rows. Raises RemoteProtocolError: positions or representations break a
        rule of the contract.
        """
        rows_B, z_BD = parse_representations(
            message,
            self.contract.passives[self.name].representation,
            alignment_size=position_count,
            min_rows=self.contract.minimum_batch,
        )
        return self.admit_request(message, rows_B), z_BD

    def defend_gradient(self, request: AdmittedRequest, gradient_BD: Tensor) -> Tensor:
        """Return the gradient after all configured defences, to be contributed instead.

        `gradient_BD`: D numbers for each of the B rows of the request.
        """
        return self.defences.protect_gradient(gradient_BD, step=request.step, receiver=AGGREGATOR)

    async def send_answer(
        self, links: Links, admitted_request: AdmittedRequest, values_BD: Floats
    ) -> None:
        """Send the aggregator the protected answer to the admitted request.

        In a sum of two rounds, answer the aggregator's second message, too. `values_BD`: the answer
        in real numbers.
        """
        step = admitted_request.step
        contribution = self.protect_answer(admitted_request, values_BD)
        links.send(AGGREGATOR, Kind.CONTRIBUTION, step, contribution)
        if self.rounds == 2:
            unmask_request = await links.receive(
                AGGREGATOR, Kind.SUM_REQUEST, step=step, patience=FOR_THE_AGGREGATOR
            )
            unmask_share = self.contributor.answer(unmask_request.payload)
            links.send(AGGREGATOR, Kind.SUM_ANSWER, step, unmask_share)

    def protect_answer(self, admitted_request: AdmittedRequest, values_BD: Floats) -> bytes:
        """Return one answer as the bytes of a protected contribution.

        In this order it is counted, its privacy cost is recorded in the ledger, its noise is added,
        and it is bound to the request and encrypted or masked. The request must be the one admitted
        last, and cannot be answered again. `values_BD`: the answer in real numbers.

        Raises:
            LocalProtocolError: another request was admitted last.
            RemoteProtocolError: a row was answered as often as agreed; nothing is counted.
            BudgetExhaustedError: contributing would exceed the privacy budget; nothing may be sent.
        """
        if admitted_request is not self._admitted_request:
            raise LocalProtocolError(
                f"{self.name}: an answer is for what was admitted last, and leaves once"
            )
        # Used up: an answer leaves once.
        self._admitted_request = None
        values_BD = np.ascontiguousarray(values_BD)
        digest = compute_answer_digest(self._digest_prefix, admitted_request.payload, values_BD)
        self.count_answer(admitted_request, digest)
        noise_BD = None
        if self.noise is not None:
            noise_BD = self.noise.charge_and_draw(
                values_BD.shape,
                step=admitted_request.step,
                charged_rows_B=self.pick_known_rows(admitted_request.counted_rows),
                digest=digest,
            )
        # The party's own record is in real numbers, noise included.
        if self._record_contribution is not None:
            fixed_point = self.contributor.secure_sum.fixed_point
            step_size = fixed_point.clip_norm / fixed_point.max_level
            noise = 0.0 if noise_BD is None else noise_BD * step_size
            noised_BD = torch.from_numpy(np.asarray(values_BD + noise, dtype=np.float32))
            self._record_contribution(
                admitted_request.step, admitted_request.counted_rows, noised_BD
            )
        return self.contributor.contribute(
            values_BD, self.make_associated_data(admitted_request), noise_BD
        )

    def takes_part(self, step: int) -> bool:
        """Return whether this passive answers a step.

        It does not if others answered the step in an earlier session without it: the difference of
        the two sums would be its contribution.
        """
        contributors = self.contract.find_contributors(step)
        return contributors is None or self.name in contributors

    def pick_known_rows(self, rows_B: Tensor) -> Tensor:
        """Return those of these alignment positions whose people the passive knows, in order."""
        return rows_B if self._is_known_N is None else rows_B[self._is_known_N[rows_B]]

    def count_answer(self, admitted_request: AdmittedRequest, digest: bytes) -> None:
        """Count an answer against the limits of its positions; `digest` identifies it."""
        self.answer_limits.count_answers(
            admitted_request.step,
            admitted_request.counted_rows,
            digest,
            sender=admitted_request.sender,
        )

    def make_associated_data(self, admitted_request: AdmittedRequest) -> StepBinding:
        """Return what the contribution is bound to; its sum decodes for this request only."""
        return make_step_binding(
            self.contract.session,
            admitted_request.step,
            admitted_request.rows,
            admitted_request.payload,
        )

    def resume(self, next_step: int) -> None:
        """Mark all steps before this one as answered, after a resumption."""
        self._gate.last_step = next_step - 1


class SumHelper(HelperRole):
    """A passive that answers through the session's secure sum; see `HelperRole`."""

    def __init__(
        self, passive_sum: PassiveSum, checkpoint_parts: Mapping[str, CheckpointPart] = {}
    ) -> None:
        """Make the role.

        `passive_sum`: the passive's side of the secure sum. `checkpoint_parts`: parts of its state
        for checkpoints, by name, besides the counts of its answers.
        """
        self.name = passive_sum.name
        self.contract = passive_sum.contract
        self.passive_sum = passive_sum
        self.checkpoint_parts = {**checkpoint_parts, "allowance": passive_sum.answer_limits}
        if passive_sum.noise is not None:
            self.contribution_ledger = passive_sum.noise.ledger
            self.ledgers = {self.name: passive_sum.noise.ledger}

    async def set_up(self, links: Links) -> None:
        """Exchange the sum's keys with the other parties."""
        await self.passive_sum.set_up(links)

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state; steps before `next_step` are not answered again."""
        super().load_tensors(tensors, next_step=next_step)
        self.passive_sum.resume(next_step)


class ActiveSum:
    """The active's side of the secure sum: it sends requests to the present passives, and decodes
    the sum of their answers.

    Attributes:
        decoded_sum: the sum that it decoded last, (B, D); None before. Its own record, in no
            message.
        present_passives: the passives that have not fallen silent.
        departure_step_by_passive: the step in which each passive stopped answering in this session.
        incomplete_step_count: number of steps that were finished without some passive.
        rounding_error: the largest error by fixed-point rounding of one number of a sum.
    """

    def __init__(
        self,
        contract: Contract,
        receiver: SumReceiver,
        refused_sums: "RefusedSums",
        *,
        rounding_error: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Make the active's side of the secure sum.

        Args:
            receiver: the protocol's object for the active, which decrypts and decodes sums.
            refused_sums: the record of sums that failed verification.
            rounding_error: the largest error by fixed-point rounding of one number of a sum.
            dtype: data type of `decoded_sum`.
        """
        self.contract = contract
        self.receiver = receiver
        self.rounding_error = rounding_error
        self._refused = refused_sums
        self._dtype = dtype
        self.decoded_sum: Tensor | None = None
        self.present_passives = list(contract.passives)
        self.departure_step_by_passive = dict[str, int]()
        self.incomplete_step_count = 0
        self._contract_digest = contract.digest.hex()

    async def set_up(self, links: Links) -> None:
        """Exchange the sum's keys with the passives and the aggregator."""
        await links.run_conversation(
            Kind.SUM_SETUP, self.receiver, (*self.contract.passives, AGGREGATOR)
        )

    def send_request(self, links: Links, kind: Kind, step: int, payload: bytes) -> None:
        """Send a request to the passives that answer this step.

        `kind`: kind of the message. `payload`: the request's bytes. Raises PartyLeftError: the
        passives that first answered this step together include one that fell silent,
        so the step cannot be repeated.
        """
        self._repeat_with_same_passives(step)
        for name in self.present_passives:
            links.send(name, kind, step, payload)

    def was_answered_without_some(self, step: int) -> bool:
        """Return whether this step was answered in an earlier session without a passive that is
        present now.
        """
        contributors = self.contract.find_contributors(step)
        return contributors is not None and any(
            name not in contributors for name in self.present_passives
        )

    def _repeat_with_same_passives(self, step: int) -> None:
        """Continue a repeated step with the passives that answered it before.

        Raises PartyLeftError: one of them fell silent.
        """
        self._drop_silent_passives(
            self.contract.select_contributors(step, self.present_passives), step
        )

    def _drop_silent_passives(self, present_passives: Sequence[str], step: int) -> None:
        """Continue with these passives only, and record at which step the others fell silent."""
        if present_passives == self.present_passives:
            return
        leavers = [name for name in self.present_passives if name not in present_passives]
        self.departure_step_by_passive |= dict.fromkeys(leavers, step)
        self.present_passives = list(present_passives)

    async def receive_sum(
        self, links: Links, step: int, rows_B: Tensor, payload: bytes, row_size: int
    ) -> Tensor:
        """Receive the aggregator's sum of all answers to a request, and return it decoded.

        Args:
            rows_B: the rows that the request was about.
            payload: the request's bytes.
            row_size: D, number of values that an answer has for each row.

        Returns (B, `row_size`), float64.

        Raises RemoteProtocolError: the sum is altered, of another request, or of passives that the
        contract does not allow. After that no sum of this session is decoded any more.
        """
        self._repeat_with_same_passives(step)
        message = await links.receive(AGGREGATOR, Kind.SUM, step=step, patience=FOR_AN_ANSWER)
        present, protected_sum = _parse_sum(message, self.present_passives, self.contract)
        associated_data = self.make_associated_data(step, rows_B, payload)
        sum_BD = self.decode_sum(protected_sum, (len(rows_B), row_size), associated_data)
        self._drop_silent_passives(present, step)
        # A passive that left stays away until the next session, so this sum lacks it.
        self.incomplete_step_count += bool(self.departure_step_by_passive)
        return sum_BD

    def decode_sum(
        self, protected_sum: bytes, shape: tuple[int, int], associated_data: StepBinding
    ) -> Tensor:
        """Decrypt and decode the aggregator's sum; a sum that fails is recorded on disk before the
        error is raised.

        Args:
            protected_sum: the aggregator's bytes.
            shape: B rows and D numbers of the sum.
            associated_data: the request that the sum must be bound to.

        Raises:
            LocalProtocolError: the receiver is not set up, or is used wrongly; not recorded.
            RemoteProtocolError: the sum is altered or belongs to another request.
        """
        with self._refused.note_refusal(step=associated_data.step, contract=self._contract_digest):
            sum_BD = torch.from_numpy(self.receiver.decode(protected_sum, shape, associated_data))
        self.decoded_sum = sum_BD.to(self._dtype)
        return sum_BD

    def make_associated_data(self, step: int, rows_B: Tensor, payload: bytes) -> StepBinding:
        """Return what the sum of a request's answers is bound to: its step, rows and bytes."""
        return make_step_binding(self.contract.session, step, rows_B, payload)


class SumLearner(ActiveRole):
    """An active that reads the session's sum; see `ActiveRole`."""

    active_sum: ActiveSum

    def use_active_sum(self, active_sum: ActiveSum) -> None:
        """Read sums by `active_sum`, and share its record of passives that fell silent."""
        self.active_sum = active_sum
        self.departure_step_by_passive = active_sum.departure_step_by_passive
        self.rounding_error = active_sum.rounding_error

    async def set_up(self, links: Links) -> None:
        """Exchange the sum's keys with the other parties."""
        await self.active_sum.set_up(links)

    @property
    def last_sum(self) -> Tensor | None:
        """The sum that was decoded last; None before the first."""
        return self.active_sum.decoded_sum

    @property
    def incomplete_step_count(self) -> int:
        """The number of finished steps whose sum lacked at least one passive."""
        return self.active_sum.incomplete_step_count


class Aggregator(HelperRole):
    """The aggregator's role: in each step it receives one masked contribution of each present
    passive, and sends the active what these add up to.

    A passive that stops answering is left out until the next session. The contract says whether
    the run then ends or continues with the others. For steps that are repeated, it says which
    passives answered them before and must answer again.

    Attributes:
        present_passives: the passives that have not fallen silent.
    """

    name = AGGREGATOR

    def __init__(self, contract: Contract) -> None:
        """Start with all passives present."""
        self.contract = contract
        self.present_passives = list(contract.passives)
        self._gate = StepGate(AGGREGATOR)

    async def run_session(self, links: Links, save: Save) -> None:
        """Combine each step's contributions for the active, until it ends the session.

        The first contribution to a step starts the step. `save`: writes this party's checkpoint.
        Raises RemoteProtocolError: a party sends what it may not; PartyLeftError: a party fell
        silent, and the contract does not allow to continue.
        """
        active = self.contract.active
        while True:
            try:
                message = await links.receive(
                    (active, *self.present_passives),
                    Kind.CONTRIBUTION,
                    Kind.CHECKPOINT,
                    Kind.END,
                    # The active, and as many passives as a sum needs.
                    min_senders=1 + self._find_threshold(),
                    patience=FOR_THE_ACTIVE,
                )
            except PartyLeftError as error:
                if active in error.missing_parties:
                    raise
                self._drop_silent_passives(error, self.present_passives)
                continue
            # Only passives contribute; only the active asks for checkpoints and ends the session.
            comes_from_active = message.sender == active
            is_contribution = message.kind is Kind.CONTRIBUTION
            if is_contribution is comes_from_active:
                raise RemoteProtocolError(
                    f"{message.sender} sent {message.kind}, which only "
                    f"{'a passive' if comes_from_active else active} may"
                )
            if not is_contribution:
                if not save_or_end(message.kind, message.step, links, active, save):
                    return
                continue
            self.present_passives = self.contract.select_contributors(
                message.step, self.present_passives
            )
            if message.sender not in self.present_passives:
                continue  # it was left out of this step in an earlier session, and is so again
            self.admit_step(message)
            bodies = await self.gather_bodies(links, Kind.CONTRIBUTION, message)
            # Called only for its exception: a contributor of the step may have fallen silent
            # meanwhile.
            self.contract.select_contributors(message.step, [*bodies])
            protected_sum = await self.combine_bodies(links, message, bodies)
            links.send(active, Kind.SUM, message.step, protected_sum)

    def admit_step(self, message: Envelope) -> None:
        """Let a contribution start its step, once and in rising order.

        Raises RemoteProtocolError: the step is over.
        """
        self._gate.enter(message.step, sender=message.sender)

    @abstractmethod
    async def combine_bodies(
        self, links: Links, first_message: Envelope, bodies: Mapping[str, bytes]
    ) -> bytes:
        """Return the bytes for the active: what one contribution of each passive adds up to.

        `first_message`: the message that started the step. `bodies`: mapping from passive name to
        the bytes of its contribution.
        """

    def _find_threshold(self) -> int:
        """Return how many passives a sum needs.

        If sums may lack passives, that is the agreed threshold, otherwise all that are present.
        """
        if self.contract.silent_passive != "recover":
            return len(self.present_passives)
        threshold = self.contract.secure_sum["threshold"]
        assert isinstance(threshold, int)
        return threshold

    async def gather_bodies(
        self, links: Links, kind: Kind, first_message: Envelope
    ) -> dict[str, bytes]:
        """Receive one message of this kind and step from every present passive.

        `first_message`: the message that started the step; it is one of them if it is of this kind.
        Passives that fall silent meanwhile are left out. Returns the messages' bytes for each
        passive name. Raises PartyLeftError, RemoteProtocolError: the step cannot be completed.
        """
        bodies = dict[str, bytes]()
        missing = list(self.present_passives)
        if kind is first_message.kind:
            bodies[first_message.sender] = first_message.payload
            missing.remove(first_message.sender)
        while missing:
            try:
                message = await links.receive(
                    missing, kind, step=first_message.step, min_senders=len(missing)
                )
            except PartyLeftError as error:
                self._drop_silent_passives(error, missing)
                missing = [name for name in missing if name in self.present_passives]
            except RemoteProtocolError as error:
                raise RemoteProtocolError(
                    f"{error}; {first_message.sender} began that step, so one of the two is to "
                    "blame"
                ) from error
            else:
                bodies[message.sender] = message.payload
                missing.remove(message.sender)
        return {name: bodies[name] for name in self.present_passives}

    def _drop_silent_passives(self, error: PartyLeftError, awaited_names: Sequence[str]) -> None:
        """Continue without the passives that fell silent, if the contract allows.

        `error`: the error that their silence raised; it may name them. `awaited_names`: names of
        the parties that were waited for, used if the error names none. Raises PartyLeftError: the
        contract says to stop or to wait, or too few passives remain.
        """
        leavers = [
            name for name in error.missing_parties or awaited_names if name in self.present_passives
        ]
        is_prediction_session = bool(self.contract.predicts)
        can_recover = self.contract.silent_passive == "recover"
        if is_prediction_session or (isinstance(error, RunStoppedError) and not can_recover):
            raise error
        reason = str(error)
        if not error.has_left:  # a passive that is gone left the session itself
            reason += f"; or {self.contract.active} did not ask for it"
        if not can_recover:
            remedy = (
                "the contract says to stop when a passive falls silent: go on in a new session "
                f"once {' and '.join(leavers)} is back, or agree on rules.silent_passive: recover, "
                "where the method can, with recoverable masks (secure_sum.masks)"
            )
            if self.contract.silent_passive == "wait":
                remedy = f"the contract says to wait for {' and '.join(leavers)}"
            raise PartyLeftError(f"{reason}; {remedy}", missing_parties=tuple(leavers)) from error
        self.present_passives = [name for name in self.present_passives if name not in leavers]
        if not leavers or len(self.present_passives) < self._find_threshold():
            passives = tuple(self.contract.passives)
            missing = ", ".join(name for name in passives if name not in self.present_passives)
            raise PartyLeftError(
                f"{reason}; this sum needs at least {self._find_threshold()} of {len(passives)} "
                f"passives, missing: {missing}; resume once they are back",
                missing_parties=tuple(leavers),
            ) from error


class ContributionAggregator(Aggregator):
    """The aggregator of a secure sum: adds masked contributions that it cannot read."""

    def __init__(self, contract: Contract, sum_role: SumAggregator, *, rounds: int) -> None:
        """Make the aggregator's role.

        `sum_role`: the protocol's object for the aggregator, which adds contributions. `rounds`:
        number of messages that each passive sends in one sum, 1 or 2.
        """
        super().__init__(contract)
        self.sum_role = sum_role
        self._rounds = rounds

    async def set_up(self, links: Links) -> None:
        """Exchange the sum's keys with the active and the passives."""
        peers = (self.contract.active, *self.contract.passives)
        await links.run_conversation(Kind.SUM_SETUP, self.sum_role, peers)

    async def combine_bodies(
        self, links: Links, first_message: Envelope, bodies: Mapping[str, bytes]
    ) -> bytes:
        """Return the present passives and the sum of their protected contributions, packed.

        With two rounds it first collects the passives' unmasking shares. `first_message`: the
        message that started the step. `bodies`: mapping from passive name to the bytes of its
        contribution.
        """
        if self._rounds == 2:
            for name, request in self.sum_role.ask(bodies).items():
                links.send(name, Kind.SUM_REQUEST, first_message.step, request)
            bodies = await self.gather_bodies(links, Kind.SUM_ANSWER, first_message)
        packed: bytes = msgpack.packb([self.present_passives, self.sum_role.combine(bodies)])
        return packed


class SumMethod(Method):
    """A method whose passives answer through a secure sum; see `Method`."""

    def build_aggregator(self, party: PartyContext, contract: Contract) -> HelperRole:
        """Return the role of the aggregator of the session's secure sum."""
        return SessionSum.from_contract(party, contract).make_aggregator()


@contextmanager
def blame_active_too(active: str) -> Iterator[None]:
    """Name the active, too, in a PartyLeftError that is raised in this block.

    The passives that are silent may have got no request from it. An error about a party that left
    the session itself (`gone`) is passed on unchanged.
    """
    try:
        yield
    except PartyLeftError as error:
        if error.has_left:
            raise
        raise PartyLeftError(
            f"{error}; or {active}, who asks them, asked others and not them",
            missing_parties=(*error.missing_parties, active),
        ) from error


def compute_answer_digest(session: bytes, payload: bytes, values: NDArray[np.generic]) -> bytes:
    """Return the digest by which an answer is counted: answers with equal digests count once.

    `session`: digest of the session's contract, where an equal answer in another session reveals
    something new; empty bytes: equal answers of all sessions count once. `payload`: the request's
    bytes. `values`: the answer.
    """
    content = hashlib.blake2b(session)
    content.update(payload)
    content.update(np.ascontiguousarray(values).data)
    return content.digest()


def make_step_binding(session: str, step: int, rows_B: Tensor, payload: bytes) -> StepBinding:
    """Return what a contribution and its sum are bound to: session, step, rows and request.

    A sum decodes only if all contributions and the active have the same binding. Rows are hashed as
    little-endian 64-bit integers, so that all parties derive the same.

    `session`: the session's name. `payload`: the request's bytes.
    """
    rows = rows_B.detach().cpu().contiguous().numpy().astype("<i8").tobytes()
    return StepBinding.from_contents(session, step, rows=rows, message=payload)


def _parse_sum(
    message: Envelope, passives: Sequence[str], contract: Contract
) -> tuple[Sequence[str], bytes]:
    """Return the passives in a sum and its protected bytes, from the aggregator's message.

    `passives`: names of the passives that were present when the sum was requested. Raises
    RemoteProtocolError: the message is malformed, or counts passives that the contract does not
    allow.
    """
    try:
        counted_passives, protected_sum = msgpack.unpackb(message.payload)
    except (ValueError, TypeError, msgpack.UnpackException):
        counted_passives = None
        protected_sum = None
    if (
        not isinstance(counted_passives, list)
        or not isinstance(protected_sum, bytes)
        or not all(type(name) is str for name in counted_passives)
    ):
        raise RemoteProtocolError(
            f"{message.sender} sent something else than a sum and who takes part still"
        )
    # Passives may be missing under this rule only, down to the agreed threshold.
    may_leave = contract.silent_passive == "recover"
    min_passives = contract.secure_sum["threshold"] if may_leave else len(passives)
    allowed_passives = (
        [name for name in passives if name in counted_passives] if may_leave else list(passives)
    )
    if counted_passives != allowed_passives or len(counted_passives) < min_passives:
        raise RemoteProtocolError(
            f"{message.sender} counts {', '.join(counted_passives)[:200] or 'nobody'} in the sum "
            f"of step {message.step}; the contract allows {'at least' if may_leave else 'exactly'} "
            f"{min_passives} of {', '.join(passives)}"
        )
    return counted_passives, protected_sum


class StepGate:
    """A check that every step of a session is answered at most once, in rising order.

    Attributes:
        last_step: the last step that passed; -1: none.
    """

    def __init__(self, party_name: str) -> None:
        """Let every step pass from 0 on; `party_name`: name of the party that answers, for "
        "errors.
        """
        self._me = party_name
        self.last_step = -1

    def enter(self, step: int, *, sender: str) -> None:
        """Let a step pass if it is later than all before; otherwise raise RemoteProtocolError."""
        if step <= self.last_step:
            raise RemoteProtocolError(
                f"{self._me}: {sender} sent step {step} after step {self.last_step}; "
                "a step is never answered twice in one session"
            )
        self.last_step = step


class AnswerLimits:
    """The contract's limits on what the active may ask of one party: batch sizes, and answers for
    each alignment position.

    Answers are counted over all sessions of the run, in a write-ahead log, so interrupting and
    resuming a run yields no additional answers. A repeated answer (same step and digest) counts
    once.
    """

    @classmethod
    def from_contract(
        cls, party: PartyContext, contract: Contract, *, position_count: int, extra_answers: int = 0
    ) -> Self:
        """Return the limits and counters of this party, in a log if it keeps logs.

        `position_count`: number of alignment positions. `extra_answers`: how often a position may
        be answered besides training.
        """
        log_path = (
            log_file(party.secrets.log_folder, "answers", party.name, "jsonl")
            if party.secrets.log_folder
            else None
        )
        return cls(
            party.name,
            contract,
            position_count=position_count,
            extra_answers=extra_answers,
            log_path=log_path,
            # An answer that stays in this process need not wait for the disk.
            is_durable=party.secrets.needs_durable_logs,
        )

    def __init__(
        self,
        party_name: str,
        contract: Contract,
        *,
        position_count: int,
        log_path: Path | None,
        extra_answers: int = 0,
        is_durable: bool = True,
    ) -> None:
        """Make the counters of answers by position; with a log, answers of earlier sessions count.

        Args:
            party_name: name of the party that answers, for errors.
            position_count: number of alignment positions.
            log_path: the write-ahead log; None: counts are in memory and checkpoints only.
            extra_answers: how often a position may be answered besides training.
            is_durable: whether a line of the log must be on the disk before its answer leaves; the
                operating system's buffers are lost in a power failure.

        Raises CheckpointError: the log was altered, or is of another run.
        """
        self._me = party_name
        self._max_batch = contract.batch_size
        # One answer an epoch; spare ones are for epochs that break off and are repeated.
        self._max_answers = contract.epochs + contract.spare_answers + extra_answers
        self._is_durable = log_path is not None and is_durable
        self._counts = ReleaseCounts(
            rows=position_count, log=log_path, about={"answers": self._max_answers}
        )

    def check_batch(self, step: int, rows_B: Tensor, *, sender: str) -> None:
        """Refuse a request before anything is computed: too large a batch, or a row too often.

        A step that was answered before is not refused for its rows, since repeating its answer
        reveals nothing new. `rows_B`: alignment positions (indices into the common list of people),
        (B,). Raises RemoteProtocolError: names the limit.
        """
        if len(rows_B) > self._max_batch:
            raise RemoteProtocolError(
                f"{sender} sent a batch of {len(rows_B)} rows to {self._me}; the contract says at "
                f"most {self._max_batch}"
            )
        if step not in self._counts.steps:
            self._check_answers(rows_B, sender)

    def count_answers(self, step: int, rows_B: Tensor, digest: bytes, *, sender: str) -> None:
        """Count one answer for each of these positions; when this returns, the answer is in the
        log and may leave.

        `rows_B`: alignment positions (indices into the common list of people), without repeats.
        `digest`: identifies the answer. Raises RemoteProtocolError: a row was answered as often as
        agreed; nothing is counted.
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
        most_answers = int(self._counts.releases_N[rows_B.cpu().numpy()].max(initial=0))
        if most_answers >= self._max_answers:
            raise RemoteProtocolError(
                f"{sender} asked {self._me} for a row more than {self._max_answers} times, all "
                "sessions of the run counted; the contract agrees to no more. If the run broke "
                "off often, begin a new one with more rules.spare_answers"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return the counters for a checkpoint."""
        return self._counts.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore counters from `tensors`; counts in the log are never lowered.

        Raises CheckpointError: the counters have another number of rows, or the log lacks answers.
        """
        self._counts.load_state_dict(tensors)


class DurableLog:
    """A party's list of events that must survive sessions and crashes.

    Each event is a line, on the disk before its effect is visible; only the owner can read the
    file. A partly written line counts too. A party without a log folder keeps no file.
    """

    def __init__(self, party: PartyContext, name: str) -> None:
        """Choose the file NAME-PARTY.jsonl in the party's log folder; `name`: NAME, the kind of
        events.
        """
        logs = party.secrets.log_folder
        self.party_name = party.name
        self.path = log_file(logs, name, party.name, "jsonl") if logs else None

    def load_lines(self) -> Sequence[bytes]:
        """Return the log's lines that are not empty; none if there is no file."""
        if self.path is None or not os.path.lexists(self.path):
            return ()
        with open_plain(self.path) as file:
            return [line for line in file.read(MAX_JSON_BYTES).splitlines() if line.strip()]

    def append_line(self, event: str, advice: str = "", **fields: str | int) -> None:
        """Append these fields as one JSON line, synced to disk; do nothing without a file.

        `event`: the recorded event in words, for an error. `advice`: what to do then, appended to
        the error. Raises CheckpointError: the file cannot be written.
        """
        if self.path is None:
            return
        try:
            add_line(self.path, fields)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{self.path}: cannot note {event} ({error}){advice}") from error


class RefusedSums:
    """The record of sums that the active refused, over all sessions of a run; a line is on the
    disk before a refusal is visible.

    Protects from: an adversary who alters sums, and learns from which of them the active accepts.
    One session reveals which sum was the first to be refused (see `SumReceiver`); a resumed run
    computes the same numbers, so the adversary could test another alteration. Hence a run continues
    after at most as many refused sums as its user allows (`rules.refused_sums`).
    """

    def __init__(self, party: PartyContext) -> None:
        """Read the active's log of refused sums.

        Raises CheckpointError: more sums were refused than `rules.refused_sums` allows, or the log
        cannot be read.
        """
        self._log = DurableLog(party, "refused")
        allowed_count = party.config.rules.refused_sums
        if (refused_count := len(self._log.load_lines())) > allowed_count:
            raise CheckpointError(
                f"{party.name} refused {refused_count} sum{'s' * (refused_count > 1)} of this run, "
                "and "
                f"rules.refused_sums is {allowed_count}. Whoever altered them (the aggregator, or "
                "a "
                "passive) may have learnt bits of the passives' numbers from which were taken, and "
                "a resumed run computes the same numbers again. Find out who it was; then begin a "
                "new run with another seed, among parties that you trust. If it was nobody's "
                f"intent, resume with rules.refused_sums: {refused_count} in the run's config.yaml"
            )

    @contextmanager
    def note_refusal(self, *, step: int, contract: str) -> Iterator[None]:
        """Record on disk that this block raised an error, and raise the error again.

        A LocalProtocolError is not recorded, since it is this party's own mistake and refuses no
        sum. `step`: step number of the sum. `contract`: digest of the session's contract, hex.
        Raises CheckpointError: the log cannot be written.
        """
        try:
            yield
        except LocalProtocolError:
            raise
        except Exception:
            self._log.append_line(
                f"that {self._log.party_name} refused the sum of step {step}",
                "; do not resume this run, which could not count it",
                contract=contract,
                step=step,
            )
            raise
