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
    ProductAgreement,
    ProductCombiner,
    ProductContributor,
    ProductReceiver,
    SumOfProducts,
)
from apfed_protocols.sums.interface import USUAL_BITS
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import BEFORE_TRAINING, Envelope, Kind, Links
from secure_apfed.labellers import LABELLERS, LinearLabeller, make_labeller
from secure_apfed.labellers.guarantee import build_vote_release
from secure_apfed.labellers.measured import check_votes, require_short
from secure_apfed.learning.votes import Floats
from secure_apfed.methods.ballots import ASK, Ballot, BallotSize
from secure_apfed.methods.method import FOR_AN_ANSWER, ActiveRole, HelperRole, meet_active, meet_all
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.sum_end import DurableLog, RefusedSums, blame_active_too
from secure_apfed.methods.votes import VotesActive, VoteSettings, VotesMethod
from secure_apfed.methods.votes_counted import BallotAggregator, CountingPassive, VoteTerms
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.settings.protection import PASSIVES, lower_is_less
from secure_apfed.settings.run import RunSettings

_MAX_LABELLED = 4096
_HELD_TWICE = 1.4  # peak memory of an answer, in units of the labels; 1.3 measured
_OPEN_AUDITS = 1  # after which a passive still takes part: each is a chance more for a cheat


class EncryptedVotesSettings(VoteSettings):
    """The settings of votes on labels that no passive sees, always soft; see `VoteSettings`.

    Attributes:
        candidates: number of encrypted requests C that the active sends; the passives check all but
            one (cut and choose), so a cheating active stays undetected with probability 1 / C.
            Null: the active is trusted. Required together with an epsilon.
    """

    name: Literal["votes_encrypted"]
    candidates: Annotated[
        int | None, lower_is_less(PASSIVES, "an active that cheats is found out less often")
    ] = Field(None, ge=2, le=1024)

    title = "votes on encrypted labels"
    opens_votes = "encrypted"

    def count_label_bytes(
        self, config: RunSettings, *, labelled: int, classes: int, passives: int
    ) -> int:
        """Return the bytes of encrypted labels that every passive holds in memory, as polynomial
        values.
        """
        bits = config.secure_sum.bits or USUAL_BITS
        agreed = ProductAgreement(
            session="forecast",
            receiver="active",
            combiner=AGGREGATOR,
            contributors=tuple(f"passive {place}" for place in range(max(2, passives))),
            people=max(labelled, 2),
            columns=classes,
            labelled=max(labelled, 1),
            bits=bits,
            # Of noise that is calibrated later, as much as values have.
            noise=None if self.epsilon is None else 2**bits,
            candidates=self.candidates,
        )
        try:
            bytes_each = SumOfProducts(agreed).label_bytes
        except LocalProtocolError:
            return 0  # which the rehearsal refuses, with what fits
        return math.ceil(_HELD_TWICE * bytes_each * passives)

    @model_validator(mode="after")
    def _check_candidates_of_epsilon(self) -> Self:
        """Refuse an epsilon without `candidates`: a cheating active could then read below the
        noise.
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
        """Refuse a labeller whose votes are not linear in the labels, since they are encrypted."""
        if not LABELLERS[self.labeller].linear:
            raise ValueError(
                f"labeller: {self.labeller} is not linear in the labels, and encrypted labels are "
                "only ever multiplied and added; use "
                f"{', '.join(name for name, kind in LABELLERS.items() if kind.linear)}"
            )
        return self


class EncryptedVotesActive(VotesActive):
    """An active that encrypts its labels and opens the sum of the votes; see `VotesActive`."""

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Build the sum of products for this ballot, and state what an active that cheats could
        read.
        """
        terms = _Terms.from_contract(party, contract)
        super().__init__(party, contract, rows, terms.release)
        self._size = BallotSize.from_ballot(self.ballot)
        self._sums = terms.make_sums(contract, self._size)
        agreed = self._sums.products
        noise = self._sums.products.noise or 0
        self._audited = agreed.candidates is not None
        self.guarantee += "; that is so for labels of one class each" if noise else ""
        self.guarantee += f". {self._sums.malicious}"
        if self._audited:
            self.guarantee += (
                f" After {_OPEN_AUDITS + 1} that were broken off there, a passive begins no other."
            )
        # Towards zero a number moves by a step at most, to the nearest by half of one.
        self.rounding = 2 * self._sums.compute_rounding_error()
        self._refused = RefusedSums(party)
        self._receiver: ProductReceiver | None = None
        self._challenges: dict[str, bytes] | None = None

    async def set_up(self, links: Links) -> None:
        """Announce the ballot's size; with candidates also commit to them, and learn which one is
        kept.
        """
        contract = self.contract
        passives = list(self.contract.passives)
        if not contract.is_at_start:
            return
        self._size.announce_size(links, (*passives, AGGREGATOR))
        self._receiver = self._sums.make_receiver(np.eye(self.classes)[self.ballot.labels.numpy()])
        if not self._audited:
            return
        await meet_all(links, passives)  # a coin must not overtake the masks' keys
        for name in passives:
            links.send(name, Kind.COMMITMENT, BEFORE_TRAINING, self._receiver.get_commitment())
        self._challenges = {}
        while waiting := [name for name in passives if name not in self._challenges]:
            message = await links.receive(
                waiting,
                Kind.CHALLENGE,
                step=BEFORE_TRAINING,
                minimum=len(waiting),
                patience=FOR_AN_ANSWER,
            )
            self._challenges[message.sender] = message.payload

    async def gather_votes(self, links: Links) -> Floats:
        """Send the encrypted labels, then decrypt the sum of votes (U, K) block by block."""
        contract = self.contract
        receiver = self._receiver
        assert receiver is not None
        payload = msgpack.packb([self.ballot.payload, receiver.make_request(self._challenges)])
        for name in contract.passives:
            links.send(name, Kind.ENCRYPTED_LABELS, ASK, payload)
        sum_UK = np.zeros((len(self.ballot.rows), self.classes))
        for block in range(self._sums.blocks):
            message = await links.receive(AGGREGATOR, Kind.SUM, step=block, patience=FOR_AN_ANSWER)
            people = self._sums.people_of(block)
            with self._refused.note_refusal(step=block, contract=contract.digest.hex()):
                sum_UK[people.start : people.stop] = receiver.open_block(block, message.payload)
        return sum_UK


class EncryptedVotesPassive(CountingPassive):
    """A passive that multiplies encrypted labels with its own matrix; see `VotesPassive`."""

    asks = (Kind.ENCRYPTED_LABELS,)

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Open the noise account, and the log of audits that were broken off."""
        self._terms = _Terms.from_contract(party, contract)
        self._audits = OpenAudits(party)
        super().__init__(party, contract, rows, self._terms.make_noise(len(rows)))
        self._contributor: ProductContributor | None = None
        self._size: BallotSize | None = None

    async def set_up(self, links: Links) -> None:
        """Agree with the other passives on mask keys, and with candidates on a
        common random coin.
        """
        contract = self.contract
        if not contract.is_at_start:
            return
        others = [name for name in contract.passives if name != self.name]
        self._size = await self._terms.receive_size(links, contract, maximum=len(self.is_known_N))
        sums = self._terms.make_sums(contract, self._size)
        _require_memory(self.name, contract.active, sums)
        self._contributor = sums.make_contributor(self.name)
        with blame_active_too(contract.active):
            await links.run_conversation(Kind.SUM_SETUP, self._contributor, others)
        if sums.products.candidates is None:
            return
        await meet_active(links, contract.active)
        message = await links.receive(contract.active, Kind.COMMITMENT, step=BEFORE_TRAINING)
        with blame_active_too(contract.active):
            await links.run_conversation(
                Kind.COIN, self._contributor.toss_coin(message.payload), others
            )
        self._audits.begin_audit(contract=contract.digest.hex())
        links.send(
            contract.active, Kind.CHALLENGE, BEFORE_TRAINING, self._contributor.pack_challenge()
        )

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Multiply the encrypted labels by the labeller's matrix, and contribute block by block."""
        ballot_bytes, request = _parse_request(message)
        ballot = self.admit_ballot(replace(message, payload=ballot_bytes))
        contributor = self._contributor
        if self._size is None or contributor is None:
            raise RemoteProtocolError(f"{message.sender} asks for votes that are opened already")
        self._size.require_same_ballot(ballot, sender=message.sender)
        contributor.accept_request(request)
        if self._terms.settings.candidates is not None:
            self._audits.end_audit(contract=self.contract.digest.hex())
        matrix_Un = self.compute_matrix(ballot)
        noise_UK = self.draw_noise(ballot, matrix_Un, (len(ballot.rows), self.classes))
        for block, part in enumerate(contributor.answer_blocks(matrix_Un, noise_UK)):
            links.send(AGGREGATOR, Kind.CONTRIBUTION, block, part)

    def compute_matrix(self, ballot: Ballot) -> Floats:
        """Return the labeller's matrix in fixed-point steps, (U, n), rounded towards zero."""
        assert isinstance(self.labeller, LinearLabeller)
        features_UF = self.pick_features(ballot)
        labelled_n = ballot.labelled.numpy()
        if self._method.epsilon is not None:
            labels_n = np.arange(len(labelled_n)) % self.classes  # any: no passive sees the true
            check_votes(
                self.labeller, features_UF, labelled_n, labels_n, self.classes, owner=self.name
            )
        matrix_Un = self.labeller.compute_matrix_without_own(features_UF, labelled_n)
        if self._method.epsilon is not None:
            require_short(self.labeller, matrix_Un, owner=self.name)
        levels = self._terms.levels
        return np.trunc(matrix_Un * levels) / levels


def _require_memory(me: str, active: str, sums: SumOfProducts) -> None:
    """Refuse a ballot whose encrypted labels would not fit into this passive's memory, before they
    arrive.
    """
    labels = sums.products.labelled
    needed = labels * sums.label_bytes
    if needed > MAX_ANNOUNCED_BYTES:
        raise RemoteProtocolError(
            f"{active} asks about {labels:,} encrypted labels, which would take {me} "
            f"{needed / 2**30:,.1f} GiB, expected {MAX_ANNOUNCED_BYTES / 2**30:g} GiB at most; "
            "label fewer rows, or agree on fewer secure_sum.bits"
        )


def _parse_request(message: Envelope) -> tuple[bytes, bytes]:
    """Return the ballot's bytes and the encrypted labels from the active's message.

    Raises RemoteProtocolError: it contains something else.
    """
    try:
        ballot_bytes, request = msgpack.unpackb(message.payload, max_bin_len=len(message.payload))
    except (ValueError, TypeError, msgpack.UnpackException):
        ballot_bytes = None
        request = None
    if type(ballot_bytes) is not bytes or type(request) is not bytes:
        raise RemoteProtocolError(f"{message.sender} sent no ballot with encrypted labels")
    return ballot_bytes, request


class OpenAudits:
    """The unfinished audits of encrypted labels, over all sessions of a run.

    Protects from: an active that aborts whenever the coin leaves an honest request unchecked, until
    it leaves a false one. One line is written before the coin is revealed, and another after the
    audit passed; a first line without a second is an aborted session.
    """

    def __init__(self, party: PartyContext) -> None:
        self._log = DurableLog(party, "audits")

    def begin_audit(self, *, contract: str) -> None:
        """Record an audit on disk before this passive reveals which request is kept.

        Raises CheckpointError: too many audits were broken off, or the log cannot be written.
        """
        lines = b"".join(self._log.load_lines())
        if (unfinished := lines.count(b'"begun"') - lines.count(b'"passed"')) > _OPEN_AUDITS:
            raise CheckpointError(
                f"{self._log.me}: {unfinished} sessions ended between the word which request with "
                f"encrypted labels is kept and that request, and {_OPEN_AUDITS} may. An active "
                "that cheats breaks off where it would be found out; find out who it was, and "
                "begin a new run"
            )
        self._add_note("begun", contract)

    def end_audit(self, *, contract: str) -> None:
        """Record that this session's request passed the audit."""
        self._add_note("passed", contract)

    def _add_note(self, event: str, contract: str) -> None:
        """Append an audit event to the log."""
        self._log.append_line("an audit", audit=event, contract=contract)


class EncryptedVotesAggregator(BallotAggregator):
    """An aggregator whose inputs are uniformly random words to it; see `BallotAggregator`."""

    blocks = 0

    def __init__(self, party: PartyContext, contract: Contract) -> None:
        """Wait for the ballot's size, which the combiner needs."""
        super().__init__(contract)
        self._terms = _Terms.from_contract(party, contract)
        self._most = party.config.alignment.maximum_ids
        self._combiner: ProductCombiner | None = None

    async def set_up(self, links: Links) -> None:
        """Receive the ballot's size, and build the combiner for it; nothing in a
        resumed session.
        """
        if self.contract.is_at_start:
            size = await self._terms.receive_size(links, self.contract, maximum=self._most)
            sums = self._terms.make_sums(self.contract, size)
            self._combiner = sums.make_combiner()
            self.blocks = sums.blocks

    async def combine_bodies(
        self, links: Links, first: Envelope, bodies: Mapping[str, bytes]
    ) -> bytes:
        """Add all passives' encrypted contributions to one block."""
        assert self._combiner is not None  # there are no blocks else
        return self._combiner.combine_block(first.step, bodies)


class EncryptedVotes(VotesMethod):
    """The method of votes on labels that no passive sees, opened as their sum; see `Method`."""

    settings = EncryptedVotesSettings

    def sum_terms(self, party: PartyContext, session: str, classes: int) -> Mapping[str, object]:
        """Return the public parameters of the sum of products, its noise included.

        `session`: the session's name.
        """
        terms = _Terms(party, party.passives, classes)
        settings = party.config.secure_sum
        return {
            "scheme": SumOfProducts.scheme,
            "masks": SumOfProducts.masks,
            "bits": settings.bits or USUAL_BITS,
            "candidates": terms.settings.candidates,
            "allow_single_passive": settings.allow_single_passive,
            **terms.noise_terms(),
        }

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        return EncryptedVotesActive(party, contract, rows)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        return EncryptedVotesPassive(party, contract, rows)

    def build_aggregator(self, party: PartyContext, contract: Contract) -> HelperRole:
        return EncryptedVotesAggregator(party, contract)


class _Terms(VoteTerms):
    """The terms of the sums in the settings; see `VoteTerms`."""

    @property
    def settings(self) -> EncryptedVotesSettings:
        return EncryptedVotesSettings.from_run_settings(self.own.config)

    @property
    def levels(self) -> int:
        """L, the number of fixed-point steps in a vote of 1."""
        return int(2 ** ((self.own.config.secure_sum.bits or USUAL_BITS) - 1) - 1)

    @cached_property
    def release(self) -> SummedRelease | None:
        """The privacy cost of the noise of all passives; None: there is none.

        Matrix rows are rounded towards zero, so the magnitudes of a row's integers add up to L at
        most. As each label is of one class, so do those of a row of votes, in integers. Hence
        `integers` holds, and the sensitivity needs no allowance for rounding.
        """
        honest = self.honest
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
        """Return the sum of products for a ballot of this size, in this session."""
        settings = self.own.config.secure_sum
        release = self.release
        return SumOfProducts(
            ProductAgreement(
                session=size.hash_ballot(contract).hex(),
                receiver=contract.active,
                combiner=AGGREGATOR,
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
    async def receive_size(links: Links, contract: Contract, *, maximum: int) -> BallotSize:
        """Receive how many people and labels the active's ballot has.

        Refuses more labels than a sum of products can carry.

        `maximum`: people at most.
        """
        size = await BallotSize.receive_size(links, contract, maximum=maximum)
        if size.labelled > _MAX_LABELLED:
            raise RemoteProtocolError(
                f"{contract.active} asks about {size.labelled} labels; a sum of products takes "
                f"{_MAX_LABELLED} at most"
            )
        return size
