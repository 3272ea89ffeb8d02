"""Votes on encrypted labels: no passive sees a label, and the active decodes only the sum of votes.

The active sends its labels under its own key, each passive multiplies them with the matrix of a
labeller that is linear in the labels, the aggregator adds, the active decrypts. For what each of
them learns see `apfed_protocols.products`, and for a malicious active `SumOfProducts.malicious`.
With `candidates` the passives detect most malicious actives.

Letters: U rows to vote on, n of them labelled, F features of a passive, K classes.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, Self

import msgpack
import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from apfed_protocols.checks import MAX_ANNOUNCED_BYTES
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.products import (
    ProductAggregator,
    ProductAgreement,
    ProductContributor,
    ProductReceiver,
    SumOfProducts,
)
from apfed_protocols.sums.interface import USUAL_BITS
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import BEFORE_TRAINING, Envelope, Kind, Links
from secure_apfed.labellers import LABELLERS, make_labeller
from secure_apfed.labellers.guarantee import build_vote_release
from secure_apfed.learning.votes import Floats
from secure_apfed.methods.ballots import Ballot, BallotSize
from secure_apfed.methods.method import FOR_AN_ANSWER, ActiveRole, HelperRole, meet_active, meet_all
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import DurableLog, RefusedSums, blame_active_too
from secure_apfed.methods.votes import VotesActive, VoteSettings, VotesMethod
from secure_apfed.methods.votes_counted import BallotAggregator, CountingPassive, VoteTerms
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.settings import RunSettings, protects

_MAX_LABELLED = 4096
"""Labels that a sum of products takes at most."""
_PEAK_FACTOR = 1.4
"""A passive's peak memory while it answers, divided by the size of the encrypted labels; 1.3 was
measured."""
_MAX_OPEN_AUDITS = 1
"""Unfinished audits after which a passive still takes part; each is one more chance to cheat."""


class EncryptedVotesSettings(VoteSettings):
    """The settings of votes on labels that no passive sees, always soft; see `VoteSettings`.

    Attributes:
        candidates: number of encrypted requests C that the active sends; the passives check all but
            one (cut and choose), so a cheating active stays undetected with probability 1 / C.
            Null: the active is trusted. Required together with an epsilon.
    """

    name: Literal["votes_encrypted"]
    candidates: Annotated[
        int | None, protects("the passives", lower="an active that cheats is found out less often")
    ] = Field(None, ge=2, le=1024)

    title = "votes on encrypted labels"
    vote_protocol = "encrypted"

    def count_label_bytes(
        self, config: RunSettings, *, labelled: int, classes: int, passives: int
    ) -> int:
        """Return the peak memory in bytes that one encrypted label takes at all passives together.

        The result is 0 if the protocol cannot carry so many labels. `labelled`: number of labels.
        `classes`: number of classes. `passives`: number of passives.
        """
        bits = config.secure_sum.bits or USUAL_BITS
        agreement = ProductAgreement(
            session="forecast",
            receiver="active",
            aggregator=AGGREGATOR,
            contributors=tuple(f"passive {index}" for index in range(max(2, passives))),
            people=max(labelled, 2),
            columns=classes,
            labelled=max(labelled, 1),
            bits=bits,
            # The noise is calibrated later; here it has as many bits as the values.
            noise=None if self.epsilon is None else 2**bits,
            candidates=self.candidates,
        )
        try:
            label_bytes = SumOfProducts(agreement).label_bytes
        except LocalProtocolError:
            return 0  # the rehearsal raises the error, and says what fits
        return math.ceil(_PEAK_FACTOR * label_bytes * passives)

    @model_validator(mode="after")
    def _check_candidates_of_epsilon(self) -> Self:
        """Refuse an epsilon without `candidates`.

        They are encrypted requests, all but one of which the passives check. Without this audit, a
        cheating active can encrypt other values than labels, and so read single votes in spite of
        the noise.
        """
        if self.epsilon is not None and self.candidates is None:
            raise ValueError(
                f"candidates: method {self.name} counts an epsilon for labels of one class each, "
                "and an active that encrypts others reads below the noise; let the passives look, "
                f"as method: {{name: {self.name}, candidates: 20}}"
            )
        return self

    @model_validator(mode="after")
    def _check_labeller_is_linear(self) -> Self:
        """Refuse a labeller whose votes are not linear in the labels.

        Encrypted labels can only be added, and multiplied by known numbers.
        """
        if not LABELLERS[self.labeller].linear:
            raise ValueError(
                f"labeller: {self.labeller} is not linear in the labels, and encrypted labels are "
                "only ever multiplied and added; use "
                f"{', '.join(name for name, kind in LABELLERS.items() if kind.linear)}"
            )
        return self


class EncryptedVotesActive(VotesActive):
    """An active that encrypts its labels and decrypts the sum of the votes; see `VotesActive`."""

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Build the protocol for this ballot (request for votes), and state the guarantee.

        The guarantee also says what an active that cheats could read. `rows`: the row of its table
        at each of the N alignment positions.
        """
        terms = _Terms.from_contract(party, contract)
        super().__init__(party, contract, rows, terms.release)
        self._size = BallotSize.from_ballot(self.ballot)
        self._sums = terms.make_sums(contract, self._size)
        agreement = self._sums.product_agreement
        noise = self._sums.product_agreement.noise or 0
        self._is_audited = agreement.candidates is not None
        self.guarantee += "; that is so for labels of one class each" if noise else ""
        self.guarantee += f". {self._sums.malicious}"
        if self._is_audited:
            self.guarantee += (
                f" After {_MAX_OPEN_AUDITS + 1} that were broken off there, a passive begins no "
                "other."
            )
        # `compute_rounding_error` assumes rounding to the nearest step, by half a step at most.
        # Here passives round towards zero, by a whole step at most.
        self.rounding_error = 2 * self._sums.compute_rounding_error()
        self._refused = RefusedSums(party)
        self._receiver: ProductReceiver | None = None  # has the key for this session's labels
        # Each passive's challenge, which says which candidate to use; None: without candidates.
        self._challenges: dict[str, bytes] | None = None

    async def set_up(self, links: Links) -> None:
        """Announce the size of the request for votes, and encrypt the labels.

        In a resumed session do nothing: the votes have arrived.

        With an audit, the active encrypts the labels several times (candidates), and commits to
        them. Every passive's challenge then names the candidate to use for the votes. All other
        candidates are opened for the audit.
        """
        contract = self.contract
        passives = list(self.contract.passives)
        if not contract.is_at_start:
            return
        self._size.announce_size(links, (*passives, AGGREGATOR))
        self._receiver = self._sums.make_receiver(np.eye(self.classes)[self.ballot.labels.numpy()])
        if not self._is_audited:
            return
        # Passives agree on mask keys first; a message of the coin toss must not overtake these.
        await meet_all(links, passives)
        for name in passives:
            links.send(name, Kind.COMMITMENT, BEFORE_TRAINING, self._receiver.get_commitment())
        self._challenges = {}
        while waiting := [name for name in passives if name not in self._challenges]:
            message = await links.receive(
                waiting,
                Kind.CHALLENGE,
                step=BEFORE_TRAINING,
                min_senders=len(waiting),
                patience=FOR_AN_ANSWER,
            )
            self._challenges[message.sender] = message.payload

    async def gather_votes(self, links: Links) -> Floats:
        """Send the encrypted labels, and return the decrypted sum of votes.

        The sum has scores of K classes for U rows, (U, K), and arrives in blocks of rows. A block
        that fails verification is recorded on disk before the error is raised.
        """
        contract = self.contract
        receiver = self._receiver
        assert receiver is not None
        payload = msgpack.packb([self.ballot.payload, receiver.make_request(self._challenges)])
        for name in contract.passives:
            links.send(name, Kind.ENCRYPTED_LABELS, self.ballot.step, payload)
        sum_UK = np.zeros((len(self.ballot.rows), self.classes))
        for block in range(self._sums.block_count):
            message = await links.receive(AGGREGATOR, Kind.SUM, step=block, patience=FOR_AN_ANSWER)
            people = self._sums.get_block_people(block)
            with self._refused.note_refusal(step=block, contract=contract.digest.hex()):
                sum_UK[people.start : people.stop] = receiver.open_block(block, message.payload)
        return sum_UK


class EncryptedVotesPassive(CountingPassive):
    """A passive that votes by multiplying encrypted labels with its matrix; see `VotesPassive`."""

    request_kinds = (Kind.ENCRYPTED_LABELS,)

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Make the passive's role with its noise and ledger, and its log of unfinished audits.

        `rows`: the row of its table at each of the N alignment positions, -1 for a person that it
        does not know.
        """
        self._terms = _Terms.from_contract(party, contract)
        self._audits = LabelAuditLog(party)
        super().__init__(party, contract, rows, self._terms.make_noise(len(rows)))
        self._contributor: ProductContributor | None = None
        self._size: BallotSize | None = None

    async def set_up(self, links: Links) -> None:
        """Receive the size of the request for votes, and agree on mask keys with other passives.

        With an audit, also receive the active's commitment to its candidates (several encryptions
        of the labels). Then toss a common random number (coin) with the other passives, and send it
        to the active as the challenge; it names the candidate to use. In a resumed session do
        nothing.
        """
        contract = self.contract
        if not contract.is_at_start:
            return
        others = [name for name in contract.passives if name != self.name]
        self._size = await self._terms.receive_size(
            links, contract, max_people=len(self.is_known_N)
        )
        sums = self._terms.make_sums(contract, self._size)
        _require_memory(self.name, contract.active, sums)
        self._contributor = sums.make_contributor(self.name)
        with blame_active_too(contract.active):
            await links.run_conversation(Kind.SUM_SETUP, self._contributor, others)
        if sums.product_agreement.candidates is None:
            return
        await meet_active(links, contract.active)
        message = await links.receive(contract.active, Kind.COMMITMENT, step=BEFORE_TRAINING)
        with blame_active_too(contract.active):
            await links.run_conversation(
                Kind.COIN, self._contributor.toss_coin(message.payload), others
            )
        # It is on disk before the choice is revealed, so that a session that the active then aborts
        # is counted.
        self._audits.begin_audit(contract=contract.digest.hex())
        links.send(
            contract.active, Kind.CHALLENGE, BEFORE_TRAINING, self._contributor.pack_challenge()
        )

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Vote: multiply the encrypted labels by the labeller's matrix, and send block by block.

        The labeller is the rule by which the passive votes; its votes are linear in the labels.

        Raises RemoteProtocolError: the request breaks a rule, differs from the announced ballot, or
        fails the audit; CheckpointError: the log of audits cannot be written.
        """
        ballot_bytes, request = _parse_request(message)
        ballot = self.admit_ballot(replace(message, payload=ballot_bytes))
        contributor = self._contributor
        if self._size is None or contributor is None:
            raise RemoteProtocolError(f"{message.sender} asks for votes that are opened already")
        self._size.require_same_ballot(ballot, sender=message.sender)
        # With candidates this audits the opened ones, and raises if one is false.
        contributor.accept_request(request)
        if self._terms.settings.candidates is not None:
            self._audits.end_audit(contract=self.contract.digest.hex())
        matrix_Un = self.compute_matrix(ballot)
        noise_UK = self.draw_noise(ballot, matrix_Un, (len(ballot.rows), self.classes))
        for block, body in enumerate(contributor.answer_blocks(matrix_Un, noise_UK)):
            links.send(AGGREGATOR, Kind.CONTRIBUTION, block, body)

    def compute_matrix(self, ballot: Ballot) -> Floats:
        """Return the matrix by which this passive multiplies the labels to vote, (U, n).

        It has U rows to vote on and n labelled rows. Its numbers are rounded towards zero to
        multiples of a fixed-point step, so that rounding never lengthens a vote. Raises
        PromiseError: the labeller breaks a property that the epsilon rests on.
        """
        matrix_Un = self.voter.compute_matrix(
            self.pick_features(ballot), ballot.labelled.numpy(), self.classes
        )
        levels = self._terms.levels
        return np.trunc(matrix_Un * levels) / levels


def _require_memory(passive_name: str, active_name: str, sums: SumOfProducts) -> None:
    """Refuse a ballot (request for votes) whose encrypted labels would not fit into memory.

    It is called before the labels arrive. `passive_name`, `active_name`: names of this passive and
    of the active, for the error. `sums`: the protocol, with the ballot's size. Raises
    RemoteProtocolError: its text says how much memory is needed.
    """
    label_count = sums.product_agreement.labelled
    needed_bytes = label_count * sums.label_bytes
    if needed_bytes > MAX_ANNOUNCED_BYTES:
        raise RemoteProtocolError(
            f"{active_name} asks about {label_count:,} encrypted labels, which would take "
            f"{passive_name} "
            f"{needed_bytes / 2**30:,.1f} GiB, expected {MAX_ANNOUNCED_BYTES / 2**30:g} GiB at "
            "most; label fewer rows, or agree on fewer secure_sum.bits"
        )


def _parse_request(message: Envelope) -> tuple[bytes, bytes]:
    """Return the bytes of the ballot (request for votes), and the encrypted labels.

    Both are in the active's message.

    Raises RemoteProtocolError: the message contains something else.
    """
    try:
        ballot_bytes, request = msgpack.unpackb(message.payload, max_bin_len=len(message.payload))
    except (ValueError, TypeError, msgpack.UnpackException):
        ballot_bytes = None
        request = None
    if type(ballot_bytes) is not bytes or type(request) is not bytes:
        raise RemoteProtocolError(f"{message.sender} sent no ballot with encrypted labels")
    return ballot_bytes, request


class LabelAuditLog:
    """A passive's log of unfinished audits of encrypted labels, over all sessions of a run.

    Protects from: an active that aborts sessions until the random choice falls on a false
    encryption of the labels, which is then used without a check. One line is written before the
    choice is revealed, and another after the audit passed. A first line without a second one means
    that the session was aborted.
    """

    def __init__(self, party: PartyContext) -> None:
        """Choose the log file of this party."""
        self._log = DurableLog(party, "audits")

    def begin_audit(self, *, contract: str) -> None:
        """Record an audit on disk, before this passive reveals which candidate is used.

        `contract`: the digest of the session's contract, hex. Raises CheckpointError: too many
        audits never finished, or the log cannot be written.
        """
        lines = b"".join(self._log.load_lines())
        unfinished = lines.count(b'"begun"') - lines.count(b'"passed"')
        if unfinished > _MAX_OPEN_AUDITS:
            raise CheckpointError(
                f"{self._log.party_name}: {unfinished} sessions ended between the word which "
                "request with "
                f"encrypted labels is kept and that request, and {_MAX_OPEN_AUDITS} may. An active "
                "that cheats breaks off where it would be found out; find out who it was, and "
                "begin a new run"
            )
        self._add_note("begun", contract)

    def end_audit(self, *, contract: str) -> None:
        """Record on disk that this session's candidates passed the audit."""
        self._add_note("passed", contract)

    def _add_note(self, event: str, contract: str) -> None:
        """Append an audit's `event`, "begun" or "passed", to the log."""
        self._log.append_line("an audit", audit=event, contract=contract)


class EncryptedVotesAggregator(BallotAggregator):
    """An aggregator that adds encrypted votes, which look uniformly random to it.

    See `BallotAggregator`.
    """

    blocks = 0

    def __init__(self, party: PartyContext, contract: Contract) -> None:
        """Make the aggregator's role; `set_up` then receives the size of the request for votes."""
        super().__init__(contract)
        self._terms = _Terms.from_contract(party, contract)
        self._max_people = party.config.alignment.maximum_ids
        self._aggregator: ProductAggregator | None = None

    async def set_up(self, links: Links) -> None:
        """Receive the size of the request for votes, and build the aggregator for it.

        In a resumed session do nothing, since the votes are already added.
        """
        if self.contract.is_at_start:
            size = await self._terms.receive_size(links, self.contract, max_people=self._max_people)
            sums = self._terms.make_sums(self.contract, size)
            self._aggregator = sums.make_aggregator()
            self.blocks = sums.block_count

    async def combine_bodies(
        self, links: Links, first_message: Envelope, bodies: Mapping[str, bytes]
    ) -> bytes:
        """Return the sum of all passives' encrypted contributions to one block of votes.

        `first_message`: the message that started the block. `bodies`: mapping from passive name to
        the bytes of its contribution.
        """
        assert self._aggregator is not None  # without it there are no blocks
        return self._aggregator.combine_block(first_message.step, bodies)


class EncryptedVotes(VotesMethod):
    """The method of votes on encrypted labels: no passive sees a label; see `Method`.

    The active decrypts only the sum of the votes.
    """

    settings = EncryptedVotesSettings

    def describe_vote_sum(
        self, party: PartyContext, session: str, classes: int
    ) -> Mapping[str, object]:
        """Return the public parameters of the protocol and its noise, for the contract.

        `session` is not used, since the sum is bound to the contract instead. `classes`: number of
        classes.
        """
        terms = _Terms(party, party.passives, classes)
        settings = party.config.secure_sum
        return {
            "scheme": SumOfProducts.scheme,
            "masks": SumOfProducts.masks,
            "bits": settings.bits or USUAL_BITS,
            "candidates": terms.settings.candidates,
            "allow_single_passive": settings.allow_single_passive,
            **terms.describe_noise(),
        }

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role; `rows`: the row of its table at each alignment position."""
        return EncryptedVotesActive(party, contract, rows)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role; `rows`: the row of its table at each alignment position."""
        return EncryptedVotesPassive(party, contract, rows)

    def build_aggregator(self, party: PartyContext, contract: Contract) -> HelperRole:
        """Return the aggregator's role, which adds encrypted votes."""
        return EncryptedVotesAggregator(party, contract)


class _Terms(VoteTerms):
    """The parameters of votes on encrypted labels that follow from the settings; see `VoteTerms`.

    All parties derive the same ones.
    """

    @property
    def settings(self) -> EncryptedVotesSettings:
        """The method's settings in the run's configuration."""
        return EncryptedVotesSettings.from_run_settings(self.party.config)

    @property
    def levels(self) -> int:
        """The number of fixed-point steps in a vote of 1."""
        return int(2 ** ((self.party.config.secure_sum.bits or USUAL_BITS) - 1) - 1)

    @cached_property
    def release(self) -> SummedRelease | None:
        """The privacy mechanism of one vote under the noise of all honest passives; None: no noise.

        Rows of the labeller's matrix are rounded towards zero, so the magnitudes of a row's
        integers add up to `levels` at most. Each label names one class, so the same holds for a row
        of votes. Votes are thus integers (`integers=True`), and rounding adds nothing to the
        sensitivity.
        """
        honest = self.honest_count
        if self.settings.epsilon is None:
            return None
        labeller = make_labeller(self.settings.labeller)

        def make_release(deviation: int) -> SummedRelease:
            """Return the release whose noise has this deviation in fixed-point steps."""
            return build_vote_release(
                labeller,
                hard=False,
                deviation=deviation,
                honest=honest,
                steps=self.levels,
                classes=self.classes,
                integers=True,
            )

        return self.calibrate_release(labeller, make_release)

    def make_sums(self, contract: Contract, size: BallotSize) -> SumOfProducts:
        """Return the protocol for a ballot (request for votes) of this size.

        It is bound to ballot and contract, so that nothing else decodes.
        """
        settings = self.party.config.secure_sum
        release = self.release
        return SumOfProducts(
            ProductAgreement(
                session=size.hash_ballot(contract).hex(),
                receiver=contract.active,
                aggregator=AGGREGATOR,
                contributors=self.contributors,
                people=size.people,
                columns=self.classes,
                labelled=size.labelled,
                bits=settings.bits or USUAL_BITS,
                noise=release.deviation if release else None,
                candidates=self.settings.candidates,
                allow_single=settings.allow_single_passive,
            )
        )

    @staticmethod
    async def receive_size(links: Links, contract: Contract, *, max_people: int) -> BallotSize:
        """Receive and check the size of the active's ballot (request for votes).

        `max_people`: the largest number of people that this party accepts. Raises
        RemoteProtocolError: the size is malformed, or there are too many labels for the protocol.
        """
        size = await BallotSize.receive_size(links, contract, max_people=max_people)
        if size.labelled > _MAX_LABELLED:
            raise RemoteProtocolError(
                f"{contract.active} asks about {size.labelled} labels; a sum of products takes "
                f"{_MAX_LABELLED} at most"
            )
        return size
