"""The ballot: the active's request for votes, with the rows to vote on and, where the method
reveals them to passives, the labels of some rows. A passive's vote on a row is one row of class
scores, (K,).

Run by: the active, which sends it, and by each passive, which checks it before it computes
anything.

Some protocols by which votes are revealed are set up for one ballot, and must know before how many
people are voted on. So the active announces the size to all (`BallotSize`). The announcement
contains the ballot's digest, and so does the protocol's agreement, so that votes on other people or
other labels never add up. All passives must vote then.

Letters: U rows to vote on, n of them labelled, B rows at once, K classes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import msgpack
import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract
from secure_apfed.exchange import (
    BEFORE_TRAINING,
    Envelope,
    Kind,
    Links,
    TensorSpec,
    pack_tensors,
    unpack_tensors,
)
from secure_apfed.learning.release import check_rows
from secure_apfed.methods.method import FOR_THE_ACTIVE

_DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class Ballot:
    """A request for votes: the rows to vote on, and the labels of some of them.

    A vote on a row is one row of class scores; passives learn from the labels how to vote.

    Attributes:
        step: the step number of the request, which is a method's first step.
        rows: alignment positions (indices into the common list of people) to vote on, (U,), each
            once.
        labelled: indices into `rows` of the labelled ones, (n,).
        labels: the labels of the labelled rows, (n,), in 0..K-1; all zeros at a passive where the
            message contains no labels.
        payload: the encoded message.
        block_rows: the largest number of rows in a block, B; votes are sent block by block.
    """

    step: ClassVar[int] = 0

    rows: Tensor
    labelled: Tensor
    labels: Tensor
    payload: bytes = field(repr=False)
    block_rows: int

    @classmethod
    def from_rows(
        cls,
        rows_U: Tensor,
        labelled_n: Tensor,
        labels_n: Tensor,
        *,
        block_rows: int,
        shows_labels: bool = True,
    ) -> "Ballot":
        """Return the ballot (request for votes) on these rows, with its encoded message.

        Args:
            rows_U: alignment positions (indices into the common list of people) to vote on, (U,).
            labelled_n: indices into `rows_U` of rows whose labels are known.
            labels_n: the labels of those rows, classes from 0.
            block_rows: the largest number of rows in a block of votes.
            shows_labels: whether the message has the labels; False: only which rows are labelled.
        """
        tensors = {"rows": rows_U, "labelled": labelled_n}
        if shows_labels:
            tensors["labels"] = labels_n
        return cls(
            rows=rows_U,
            labelled=labelled_n,
            labels=labels_n,
            payload=pack_tensors(tensors),
            block_rows=block_rows,
        )

    @classmethod
    def from_message(
        cls,
        envelope: Envelope,
        contract: Contract,
        *,
        position_count: int,
        class_count: int,
        shows_labels: bool = True,
    ) -> "Ballot":
        """Parse and check the active's request for votes; run by a passive.

        Args:
            envelope: the active's message.
            contract: the session's contract, which has the smallest batch and the block size.
            position_count: number of alignment positions.
            class_count: number of classes; labels are below it.
            shows_labels: whether the message must contain the labels of labelled rows.

        Raises RemoteProtocolError: rows, indices or labels are missing, repeated or out of range.
        """
        sender = envelope.sender
        vector = TensorSpec(torch.int64, (None,))
        expected = {"rows": vector, "labelled": vector}
        if shows_labels:
            expected["labels"] = vector
        tensors, _ = unpack_tensors(envelope.payload, expected, sender=sender)
        rows_U = tensors["rows"]
        labelled_n = tensors["labelled"]
        check_rows(
            rows_U, alignment_size=position_count, min_rows=contract.minimum_batch, sender=sender
        )
        if len(labelled_n):
            check_rows(labelled_n, alignment_size=len(rows_U), min_rows=1, sender=sender)
        # Where the message has no labels, zeros keep the type and length that callers expect.
        labels_n = tensors.get("labels", labelled_n.new_zeros(len(labelled_n)))
        are_classes = bool(((labels_n >= 0) & (labels_n < class_count)).all())
        if len(labels_n) != len(labelled_n) or not len(labels_n) or not are_classes:
            raise RemoteProtocolError(
                f"{sender} asks for votes with {len(labels_n)} labels of {len(labelled_n)} rows; "
                f"expected one of each, at least one, in 0..{class_count - 1}"
            )
        return cls(
            rows=rows_U,
            labelled=labelled_n,
            labels=labels_n,
            payload=envelope.payload,
            block_rows=contract.batch_size,
        )

    @property
    def blocks(self) -> list[slice]:
        """Slices of at most `block_rows` rows that cover the requested rows.

        The votes on each slice are sent in a message of their own.
        """
        row_count = len(self.rows)
        starts = range(0, row_count, self.block_rows)
        return [slice(start, min(start + self.block_rows, row_count)) for start in starts]


class BallotGate:
    """A passive's check of requests for votes.

    A request must keep to the contract, and only one is admitted in a session.
    """

    def __init__(
        self,
        party_name: str,
        contract: Contract,
        *,
        position_count: int,
        class_count: int,
        shows_labels: bool,
    ) -> None:
        """Prepare to admit one request.

        Args:
            party_name: name of the passive, for errors.
            contract: the session's contract, which limits requests.
            position_count: number of alignment positions.
            class_count: number of classes; labels are below it.
            shows_labels: whether the request must contain the labels of labelled rows.
        """
        self._me = party_name
        self._contract = contract
        self._aligned = position_count
        self._classes = class_count
        self._shows_labels = shows_labels
        self._was_asked = False

    def admit_ballot(self, message: Envelope) -> Ballot:
        """Parse a request for votes, and admit it.

        Raises RemoteProtocolError: the request breaks a rule of the contract, or is the second one
        of this session.
        """
        ballot = Ballot.from_message(
            message,
            self._contract,
            position_count=self._aligned,
            class_count=self._classes,
            shows_labels=self._shows_labels,
        )
        if self._was_asked:
            raise RemoteProtocolError(
                f"{message.sender} asks {self._me} for votes once more in one session; the "
                "answer to a second question could be taken apart by the first"
            )
        self._was_asked = True
        return ballot


@dataclass(frozen=True, kw_only=True)
class BallotSize:
    """The public size of a ballot (a request for votes), known to all parties before they vote.

    Some protocols must know before how many votes they will add. The digest binds their sums to one
    ballot.

    Attributes:
        people: U, how many rows are voted on.
        labelled: n, how many of these are labelled.
        ballot: SHA-256 digest of the request for votes as the passives receive it.
    """

    people: int
    labelled: int
    ballot: bytes

    @classmethod
    def from_ballot(cls, ballot: Ballot) -> "BallotSize":
        """Return the size and digest of this ballot (request for votes)."""
        digest = hashlib.sha256(ballot.payload).digest()
        return cls(people=len(ballot.rows), labelled=len(ballot.labelled), ballot=digest)

    def announce_size(self, links: Links, names: Iterable[str]) -> None:
        """Send the size to these parties; run by the active."""
        for name in names:
            links.send(name, Kind.BALLOT_SIZE, BEFORE_TRAINING, msgpack.packb(asdict(self)))

    @classmethod
    async def receive_size(
        cls, links: Links, contract: Contract, *, max_people: int
    ) -> "BallotSize":
        """Receive and check the size of the active's ballot (request for votes).

        It is run by all parties except the active.

        `max_people`: the largest number of people that may be voted on. Raises RemoteProtocolError:
        the message has no size, or a size outside its limits.
        """
        active = contract.active
        message = await links.receive(
            active, Kind.BALLOT_SIZE, step=BEFORE_TRAINING, patience=FOR_THE_ACTIVE
        )
        try:
            size = cls(**msgpack.unpackb(message.payload))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(
                f"{active} sent something else than a ballot's size"
            ) from error
        # A dataclass checks no types, and a peer may send others.
        has_right_types = [type(value) for value in asdict(size).values()] == [int, int, bytes]
        if not (
            has_right_types
            and contract.minimum_batch <= size.people <= max_people
            and 1 <= size.labelled <= size.people
            and len(size.ballot) == _DIGEST_BYTES
        ):
            raise RemoteProtocolError(
                f"{active} asks about {size.people!r:.20} people, {size.labelled!r:.20} of them "
                f"labelled; expected {contract.minimum_batch} to {max_people}, and at least one "
                "label"
            )
        return size

    def require_same_ballot(self, ballot: Ballot, *, sender: str) -> None:
        """Raise RemoteProtocolError if a request for votes is not the announced one.

        `ballot`: the request that the party `sender` sent.
        """
        if BallotSize.from_ballot(ballot) != self:
            raise RemoteProtocolError(
                f"{sender} asks for votes on another ballot than it told all parties of"
            )

    def hash_ballot(self, contract: Contract) -> bytes:
        """Return 32 bytes that identify this request for votes in this session.

        They are the same at all parties.
        """
        return hashlib.sha256(contract.digest + self.ballot).digest()
