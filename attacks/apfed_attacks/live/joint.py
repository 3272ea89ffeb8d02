"""Live joint training in which the active deviates: the real passives and links of TVFL.

Run by: the experimenter, who drives all parties. Letters: B batch.
"""

from collections.abc import Mapping

from torch import Tensor

from apfed_attacks.live.runs import LiveSession
from apfed_attacks.live.strategy import Answering
from secure_apfed.config import Config
from secure_apfed.contract import RepresentationTerms
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Kind, Links, Script, pack
from secure_apfed.methods.joint import TvflActive

__all__ = ["JointRun"]


class JointRun(LiveSession[TvflActive]):
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
        super().__init__(config, data, TvflActive, alignment=alignment)
        self._deviation: tuple[str, Answering] | None = None

    def terms(self, passive: str) -> RepresentationTerms:
        """What a row of this passive's representations may be."""
        return self.session.contract.passives[passive].representation

    def hand_over(self, passive: str, strategy: Answering) -> None:
        """Let an adversary play the active, against this passive, from now on."""
        self._deviation = passive, strategy

    def _script(self, step: int, rows_B: Tensor) -> Script[float]:
        if self._deviation is None:
            return super()._script(step, rows_B)
        return _return_what_it_likes(
            self.learner, self.session.links, step, rows_B, *self._deviation
        )


async def _return_what_it_likes(
    honest: TvflActive, links: Links, step: int, rows_B: Tensor, victim: str, strategy: Answering
) -> float:
    """A step of an active that trains and answers as an honest one does, but for the victim.

    It holds what an honest active holds: its networks, and what the passives send it.
    """
    parts = honest.read(rows_B, await honest.ask(links, step, rows_B, learn=True))
    h_BD = parts[victim].clone()
    chosen_BD = strategy.answer(step, rows_B, h_BD.flatten(1)) / len(rows_B)
    loss, gradients = honest.learn(step, rows_B, parts)
    gradients[victim] = pack({"gradient": chosen_BD.reshape(h_BD.shape).to(h_BD)})
    for name, payload in gradients.items():
        links.send(name, Kind.GRADIENTS, step, payload)
    return loss
