"""The active's place with an adversary in it: sends what it is told, and opens the sums.

Run by: a malicious active in a live run. It holds what an honest active holds, and no more.

Letters: B batch, D numbers of a representation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from attacks.live.unprotected import unbound
from secure_apfed.exchange import Envelope, pack
from secure_apfed.parties import ActiveParty

__all__ = ["Question", "QuestioningActive"]


@dataclass(frozen=True, eq=False)
class Question:
    """What is sent in place of the active's own representations; see `ActiveSeat.ask`."""

    rows: Tensor
    z: Tensor
    instead: Mapping[str, Tensor]
    weights: Mapping[str, float]

    def payload(self, passive: str) -> bytes:
        """What this passive gets."""
        meta = {"weights": dict(self.weights)} if self.weights else {}
        return pack({"rows": self.rows, "z": self.instead.get(passive, self.z)}, meta)


class QuestioningActive(ActiveParty):
    """Acts honestly while there is no question.

    Args:
        honest: whose keys, data and networks it takes over.
        bound: whether the passives bind their contributions to what they received.
    """

    def __init__(self, honest: ActiveParty, *, bound: bool) -> None:
        # Everything that the honest party holds is the adversary's.
        vars(self).update(vars(honest))
        self._bound = bound
        self.question: Question | None = None

    def represent(self, step: int, rows_B: Tensor) -> list[Envelope]:
        """Send the question, or one's own rows where there is none."""
        question = self.question
        if question is None:
            return super().represent(step, rows_B)
        envelopes = self._send(step, question.rows, question.z, question.payload(""))
        return [replace(item, payload=question.payload(item.receiver)) for item in envelopes]

    def _send(self, step: int, rows_B: Tensor, z_BD: Tensor, payload: bytes) -> list[Envelope]:
        envelopes = super()._send(step, rows_B, z_BD, payload)
        if not self._bound:
            assert self._pending is not None
            self._pending = replace(self._pending, binding=unbound(self.contract.session, step))
        return envelopes

    def update(self, envelope: Envelope | None) -> float:
        """Open the sum; learn nothing else from it."""
        if self.question is None:
            return super().update(envelope)
        assert envelope is not None
        assert self._pending is not None
        self._decode(envelope, self._pending)
        self._pending = None
        return float("nan")
