"""The parties of votes: passives label rows from their own features, the active learns from that.

Run by: the active (`VotesActive`), which says which rows to label and which labels there are, and
each passive (`VotingParty`), which answers once. What a vote tells of a passive's features, and
what noise on it costs, says `secure_apfed.labellers.guarantee`.
Letters: U rows to vote on, n of them labelled, B rows at once, K classes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.labellers import Labeller, about, hard
from secure_apfed.learning.checks import check_rows
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.student import Prior, Student, with_prior
from secure_apfed.learning.votes import Votes
from secure_apfed.parties.party import Party
from secure_apfed.parties.rules import Allowance, AnswersLog, StepGate

__all__ = ["Ballot", "VotesActive", "VotingParty"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Ballot:
    """What the active asks votes for.

    Attributes:
        rows: (U,), alignment positions, each once.
        labelled: (n,), places of labelled rows among them.
        labels: (n,), of those, in 0..K-1; zeros where passives see none.
        payload: the message that says so.
        size: B at most.
    """

    rows: Tensor
    labelled: Tensor
    labels: Tensor
    payload: bytes = field(repr=False)
    size: int

    @classmethod
    def of(
        cls, rows_U: Tensor, labelled_n: Tensor, labels_n: Tensor, *, size: int, shown: bool = True
    ) -> "Ballot":
        """Write the message; without `shown` it says of labels only whose they are."""
        tensors = {"rows": rows_U, "labelled": labelled_n}
        if shown:
            tensors["labels"] = labels_n
        return cls(
            rows=rows_U, labelled=labelled_n, labels=labels_n, payload=pack(tensors),
            size=size,
        )  # fmt: skip

    @classmethod
    def read(
        cls, envelope: Envelope, contract: Contract, *, aligned: int, classes: int,
        shown: bool = True,
    ) -> "Ballot":  # fmt: skip
        """Parse a request for votes.

        Raises:
            RemoteProtocolError: rows, places or labels that are none, repeated or out of range.
        """
        sender = envelope.sender
        vector = TensorSpec(torch.int64, (None,))
        expected = {"rows": vector, "labelled": vector} | ({"labels": vector} if shown else {})
        tensors, _ = unpack(envelope.payload, expected, sender=sender)
        rows_U, labelled_n = tensors["rows"], tensors["labelled"]
        check_rows(rows_U, aligned=aligned, minimum=contract.minimum_batch, sender=sender)
        if len(labelled_n):
            check_rows(labelled_n, aligned=len(rows_U), minimum=1, sender=sender)
        labels_n = tensors.get("labels", labelled_n.new_zeros(len(labelled_n)))
        inside = ((labels_n >= 0) & (labels_n < classes)).all()
        if len(labels_n) != len(labelled_n) or not len(labels_n) or not bool(inside):
            raise RemoteProtocolError(
                f"{sender} asks for votes with {len(labels_n)} labels of {len(labelled_n)} rows; "
                f"expected one of each, at least one, in 0..{classes - 1}"
            )
        return cls(
            rows=rows_U, labelled=labelled_n, labels=labels_n, payload=envelope.payload,
            size=contract.batch_size,
        )  # fmt: skip

    @property
    def blocks(self) -> list[slice]:
        """Places of the rows that are voted on at once, in their order."""
        rows, size = len(self.rows), self.size
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class VotingParty(Party):
    """Votes on the rows of its own people that the active asks for.

    Args:
        features_N: its features in the order of the alignment, (N, *shape).
        held_N: which positions are of people that it knows, (N,), bool.
        labeller: its own; form: "soft" or "hard".
        answers: file in which it counts what it answers; None: memory and checkpoints only.

    Attributes:
        classes: K, as agreed.
        labeller: with which it votes.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        *,
        features_N: Tensor,
        held_N: Tensor,
        labeller: Labeller,
        form: str,
        answers: AnswersLog | None,
    ) -> None:
        super().__init__(name, contract)
        (self.classes,) = contract.passives[name].representation.shape
        self.held_N = held_N
        self._features_NF = features_N.flatten(1).double().numpy()
        self.labeller, self._form = labeller, form
        self._allowance = Allowance(name, contract, aligned=len(features_N), log=answers)
        self._gate = StepGate(name)

    def read(self, envelope: Envelope, *, shown: bool = True) -> Ballot:
        """Parse a request for votes, once a session.

        Raises:
            RemoteProtocolError: it breaks a rule of the contract.
        """
        ballot = Ballot.read(
            envelope, self.contract, aligned=len(self.held_N), classes=self.classes, shown=shown
        )
        if self._gate.last >= 0:
            raise RemoteProtocolError(
                f"{envelope.sender} asks {self.name} for votes once more in one session; the "
                "answer to a second question could be taken apart by the first"
            )
        self._gate.enter(envelope)
        return ballot

    def vote(self, ballot: Ballot) -> Floats:
        """Return its votes_UK; zeros for people that it does not know, or cannot tell."""
        known_U, known_n = self._known(ballot)
        votes_UK = np.zeros((len(known_U), self.classes))
        if known_n.any():
            place_U = np.cumsum(known_U) - 1
            here = ballot.rows.numpy()[known_U]
            votes_UK[known_U] = about(self.labeller, ballot.payload).label(
                self._features_NF[here],
                place_U[ballot.labelled.numpy()[known_n]],
                ballot.labels.numpy()[known_n],
                self.classes,
            )
        return votes_UK if self._form == "soft" else hard(votes_UK)

    def features(self, ballot: Ballot) -> tuple[Floats, NDArray[np.bool_]]:
        """Its features of the rows asked for, (U, F), and whose it has, (U,)."""
        known_U, _ = self._known(ballot)
        return self._features_NF[ballot.rows.numpy()], known_U

    def _known(self, ballot: Ballot) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        known_U = self.held_N[ballot.rows].numpy()
        return known_U, known_U[ballot.labelled.numpy()]

    def count(self, ballot: Ballot, block: slice, step: int, *, new: bool, values: bytes) -> bytes:
        """Count one answer for each of these rows, in the log, before it leaves.

        Args:
            ballot: what is answered.
            block: places of the rows.
            step: number of the block.
            new: whether the same answer again, in another session, tells something new.
            values: what the answer is made of.

        Returns:
            The digest under which it was counted.

        Raises:
            RemoteProtocolError: a row was answered as often as agreed.
        """
        rows_B, sender = ballot.rows[block], self.contract.active
        content = hashlib.blake2b(self.contract.digest if new else b"")
        content.update(ballot.payload)
        content.update(values)
        digest = content.digest()
        self._allowance.check(step, rows_B, sender=sender)
        self._allowance.take(step, rows_B, digest, sender=sender)
        return digest

    def tensors(self) -> dict[str, Tensor]:
        return prefixed("allowance", self._allowance.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._allowance.load_tensors(without_prefix("allowance", tensors))


class VotesActive(Party):
    """Asks for votes on the rows of its student, and teaches it what they say.

    Args:
        student: at its start.
        positions_U: of its rows in the alignment.
        prior: what it believes of these rows before it reads votes; seed: of the folds that tell
            how often that is right.
        shown: whether passives see the labels.

    Attributes:
        classes: K.
        votes: what was opened, (U, K); None before.
    """

    def __init__(
        self, name: str, contract: Contract, *, student: Student, positions_U: Tensor,
        prior: Prior, seed: int, shown: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(name, contract)
        self.student, self.classes = student, student.classes
        self._prior, self._seed = prior, seed
        self.ballot = Ballot.of(
            positions_U, torch.from_numpy(student.labelled), torch.from_numpy(student.labels),
            size=contract.batch_size, shown=shown,
        )  # fmt: skip
        self.votes: Votes | None = None

    def take(self, votes: Votes) -> None:
        """Turn what was opened into labels to learn; fit a student that has a best fit."""
        self.votes = votes
        self.student.teach(with_prior(votes, self.student, self._prior, seed=self._seed))

    def tensors(self) -> dict[str, Tensor]:
        """What was opened."""
        if self.votes is None:
            return {}
        return {
            "votes.sum": torch.from_numpy(self.votes.totals),
            "votes.variance": torch.from_numpy(self.votes.variance),
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if "votes.sum" in tensors:
            self.votes = Votes(
                totals=tensors["votes.sum"].numpy(),
                variance=tensors["votes.variance"].numpy(),
                voters=len(self.contract.passives),
            )
