"""Live joint training in which the active deviates: the real passives and links of TVFL.

Run by: the experimenter, who plays all parties. Letters: B batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from attacks.interface import AttackError
from attacks.live.session import LiveSession
from attacks.live.strategy import Answering
from secure_apfed.config import Config
from secure_apfed.contract import RepresentationTerms
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Envelope, pack
from secure_apfed.methods import Tvfl, open_method
from secure_apfed.parties import TvflActive

__all__ = ["JointRun", "ReturningActive"]


class ReturningActive(TvflActive):
    """The active's place with an adversary in it, which chooses what it returns to `victim`.

    It trains its own networks, and returns to others, as an honest active does.

    Args:
        honest: whose keys, data and networks it takes over.
        victim: a passive.
        strategy: what answers its representations.
    """

    def __init__(self, honest: TvflActive, victim: str, strategy: Answering) -> None:
        # Everything that the honest party holds is the adversary's.
        vars(self).update(vars(honest))
        self._victim, self._strategy = victim, strategy

    def learn(self, step: int, rows_B: Tensor, answers: Sequence[Envelope]) -> list[Envelope]:
        """Return the honest gradients, but for the victim's."""
        h_BD = self.read(rows_B, answers)[self._victim]
        chosen_BD = self._strategy.answer(step, rows_B, h_BD.flatten(1)) / len(rows_B)
        payload = pack({"gradient": chosen_BD.reshape(h_BD.shape).to(h_BD)})
        return [
            replace(one, payload=payload) if one.receiver == self._victim else one
            for one in super().learn(step, rows_B, answers)
        ]


class JointRun(LiveSession[Tvfl]):
    """A session of TVFL whose active an adversary can play.

    Args:
        config: of the run; data: where it is loaded already.
        alignment: of an earlier session with the same data.
    """

    def __init__(
        self,
        config: Config,
        data: VerticalData | None = None,
        *,
        alignment: Mapping[str, Tensor] | None = None,
    ) -> None:
        data = data or load_data(config.data, seed=config.seed)
        method = open_method(config, data, alignment=alignment)
        if not isinstance(method, Tvfl):
            raise AttackError(f"encoders are hijacked in TVFL, not in {config.method}")
        super().__init__(config, data, method)

    def terms(self, passive: str) -> RepresentationTerms:
        """What a row of this passive's representations may be."""
        return self.method.contract.passives[passive].representation

    def hand_over(self, passive: str, strategy: Answering) -> None:
        """Let an adversary play the active, against this passive, from now on."""
        self.method.active = ReturningActive(self.method.active, passive, strategy)
