"""A passive whose table is decomposed together with the others', under the dealer's masks.

Run by: every passive of VFedTrans. It answers one request a session, sends the server its masked
rows, and gets nothing back. What the masks hide, and what not, stands in
`apfed_protocols.svd.roles`. Letters: N aligned rows, U of them asked for, F own features.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.svd import SvdOwner
from secure_apfed.contract import Contract
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.learning.checks import check_rows
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.parties.party import Party
from secure_apfed.parties.rules import Allowance, AnswersLog

__all__ = ["DecomposedPassive", "RowsAsked"]


class RowsAsked:
    """The request for one decomposition, as its sender wrote it.

    Args:
        rows_U: alignment positions, each once.
        payload: the message that names them.
        contract: of the session.

    Attributes:
        people: 32 bytes that stand for these rows in this session, the same at all owners.
    """

    def __init__(self, rows_U: Tensor, payload: bytes, contract: Contract) -> None:
        self.rows, self.payload = rows_U, payload
        self.people = hashlib.sha256(contract.digest + payload).digest()

    @classmethod
    def of(cls, rows_U: Tensor, contract: Contract) -> "RowsAsked":
        """Write it."""
        return cls(rows_U, pack({"rows": rows_U}), contract)

    @classmethod
    def read(
        cls, envelope: Envelope, contract: Contract, *, aligned: int, least: int
    ) -> "RowsAsked":
        """Parse it.

        Raises:
            RemoteProtocolError: rows outside the alignment, repeated ones, or too few.
        """
        sender = envelope.sender
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        rows_U = unpack(envelope.payload, expected, sender=sender)[0]["rows"]
        least = max(least, contract.minimum_batch)
        check_rows(rows_U, aligned=aligned, minimum=least, sender=sender)
        return cls(rows_U, envelope.payload, contract)


class DecomposedPassive(Party):
    """Masks the rows that the active asks for.

    Args:
        features_N: its features in the order of the alignment, (N, *shape).
        owner: its end of the decomposition; None: in a session that decomposes nothing any more.
        answers: file in which it counts what it answers; None: memory and checkpoints only.
    """

    def __init__(
        self, name: str, contract: Contract, *, features_N: Tensor, owner: SvdOwner | None,
        answers: AnswersLog | None,
    ) -> None:  # fmt: skip
        super().__init__(name, contract)
        self._features_NF = features_N.flatten(1).double().cpu().numpy()
        self._allowance = Allowance(name, contract, aligned=len(features_N), log=answers)
        self._owner = owner

    def take(self, dealt: bytes) -> None:
        """Read the masks that the dealer drew.

        Raises:
            RemoteProtocolError: they are none.
        """
        assert self._owner is not None
        self._owner.take(dealt)

    def mask(self, envelope: Envelope) -> bytes:
        """Check the request, count it, and mask its rows for the server; once a session.

        Raises:
            RemoteProtocolError: the request breaks a rule of the contract; nothing is sent.
        """
        owner, self._owner = self._owner, None
        if owner is None:
            raise RemoteProtocolError(
                f"{envelope.sender} asks {self.name} for rows to decompose once more, or after the "
                "step in which that was due; vectors of other rows would tell these apart"
            )
        asked = RowsAsked.read(
            envelope, self.contract, aligned=len(self._features_NF), least=owner.agreement.vectors
        )
        table_UF = self._features_NF[asked.rows.numpy()]
        self._count(asked, table_UF.tobytes(), sender=envelope.sender)
        return owner.mask(table_UF, asked.people)

    def _count(self, asked: RowsAsked, values: bytes, *, sender: str) -> None:
        """Count one answer for each row, in the log, before it leaves.

        The same rows again, in another session, are under other masks and tell nothing new.
        """
        rows_U = asked.rows
        digest = hashlib.sha256(rows_U.numpy().tobytes() + values).digest()
        blocks = rows_U.split(self.contract.batch_size)
        for step, block in enumerate(blocks):
            self._allowance.check(step, block, sender=sender)
        for step, block in enumerate(blocks):
            self._allowance.take(step, block, digest, sender=sender)

    def tensors(self) -> dict[str, Tensor]:
        """What it answered so far."""
        return prefixed("allowance", self._allowance.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned."""
        self._allowance.load_tensors(without_prefix("allowance", tensors))
