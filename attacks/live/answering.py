"""A passive's place with an adversary in it: answers representations with what it likes.

Run by: a malicious passive in a live run. It holds what an honest passive holds, receives the
same envelopes, and contributes through the same end of the sum, which clips its rows.

Letters: B batch, D numbers of a representation.
"""

from torch import Tensor

from attacks.live.strategy import Answering
from secure_apfed.parties import PassiveParty

__all__ = ["AnsweringPassive"]


class AnsweringPassive(PassiveParty):
    """Takes the place of `honest`, with `strategy` instead of its objective."""

    def __init__(self, honest: PassiveParty, strategy: Answering) -> None:
        # Everything that the honest party holds is the adversary's.
        vars(self).update(vars(honest))
        self._strategy = strategy

    def _gradient(self, step: int, rows_B: Tensor, sent_BD: Tensor) -> Tensor:
        flat_BD = sent_BD.flatten(1)
        return self._strategy.answer(step, rows_B, flat_BD).to(sent_BD).reshape(sent_BD.shape)
