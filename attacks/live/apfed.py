"""Live runs in which the active deviates: the real parties, links and sums, and one adversary.

Run by: the experimenter. The passives, the aggregator and the sum are the ones of every run;
`rules` takes single rules of the protocol away, to show what each is good for.

Letters: B batch, D numbers of a representation.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from attacks.interface import AttackError
from attacks.live.answering import AnsweringPassive
from attacks.live.questioning import Question, QuestioningActive
from attacks.live.session import LiveSession
from attacks.live.strategy import Answering
from attacks.live.unprotected import ALL_RULES, Rule, UnprotectedPassive
from protocols.errors import LocalProtocolError
from protocols.sums import PlainSum
from protocols.sums.fixed_point import clip_rows
from protocols.sums.interface import (
    FloatArray,
    IntArray,
    StepBinding,
    SumAgreement,
    SumContributor,
)
from secure_apfed.config import Config
from secure_apfed.contract import RepresentationTerms
from secure_apfed.data import VerticalData, load_data
from secure_apfed.methods import Apfed, open_method
from secure_apfed.methods.aligning import positions_of
from secure_apfed.methods.terms import model_of, objective_of
from secure_apfed.objectives import Contrastive, make_objective
from secure_apfed.parties.descent import named_below
from secure_apfed.parties.rules import representation_specs
from secure_apfed.seeds import shuffled

__all__ = ["LiveRun"]


@dataclass
class _Watched:
    """A passive's end of the sum that the experimenter looks at: the truth for scores."""

    end: SumContributor
    seen: FloatArray | None = None

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        self.seen = values_BD
        return self.end.contribute(values_BD, binding, noise_BD)

    def answer(self, request: bytes) -> bytes:
        return self.end.answer(request)


class LiveRun(LiveSession[Apfed]):
    """A session of APFed whose active an adversary can play; it is its `ActiveSeat`.

    Args:
        config: of the run; data: where it is loaded already.
        rules: what the protocol holds the active to.
        alignment: of an earlier session with the same data.
    """

    def __init__(
        self,
        config: Config,
        data: VerticalData | None = None,
        *,
        rules: Collection[Rule] = ALL_RULES,
        alignment: Mapping[str, Tensor] | None = None,
    ) -> None:
        data = data or load_data(config.data, seed=config.seed)
        method = open_method(config, data, alignment=alignment)
        if not isinstance(method, Apfed) or not method.passives:
            raise AttackError(f"a malicious active is played in APFed, not in {config.method}")
        super().__init__(config, data, method)
        self.rules = frozenset(rules)
        self._place_parties()
        self._asking = False

    def _place_parties(self) -> None:
        method = self.method
        if self.rules != ALL_RULES:
            method.passives = [UnprotectedPassive(one, self.rules) for one in method.passives]
        method.active = QuestioningActive(method.active, bound=Rule.BINDING in self.rules)
        self._watch()

    def _watch(self) -> None:
        for passive in self.method.passives:
            watched = _Watched(passive.contributor)
            passive.contributor = watched  # type: ignore[assignment]  # its set-up is done

    def hand_over(self, passive: str, strategy: Answering) -> None:
        """Let an adversary play this passive from now on."""
        self.method.passives = [
            AnsweringPassive(one, strategy) if one.name == passive else one
            for one in self.method.passives
        ]

    @property
    def trained(self) -> Tensor:
        """Alignment positions of the training rows, in an order of the seed."""
        aligned = self.method.alignment[self.data.active.name]
        own = positions_of(aligned, self.data.train_rows)
        return shuffled(own, self.config.seed, "attacks", "live")

    @property
    def terms(self) -> RepresentationTerms:
        """What a row of representations may be."""
        return next(iter(self.method.contract.passives.values())).representation

    @property
    def batch_size(self) -> int:
        """The largest agreed batch."""
        return self.method.contract.batch_size

    @property
    def passives(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(table.name for table in self.data.passives)

    @property
    def protected(self) -> bool:
        """Whether every rule holds."""
        return self.rules == ALL_RULES

    def holds(self, passive: str, positions: Tensor) -> Tensor:
        """Whether this passive has a row of each of these positions."""
        return self.method.alignment[passive][positions] >= 0

    def told(self, passive: str) -> Tensor:
        """What a passive contributed to its last sum (B, D), after its clip.

        Only that passive knows it: an attack may ask those that collude, the experimenter all.
        """
        (party,) = (one for one in self.method.passives if one.name == passive)
        watched, bound = party.contributor, self.config.secure_sum.clip
        assert isinstance(watched, _Watched)
        assert watched.seen is not None
        clipped = watched.seen if bound is None else clip_rows(watched.seen, bound)
        return torch.from_numpy(clipped)

    def representations(self, passive: str, positions: Tensor) -> Tensor:
        """Unit representations (N, D) that a contrasting passive holds of these people now.

        Raises:
            AttackError: the passive does not contrast, or does not hold them all.
        """
        if not self.holds(passive, positions).all():
            raise AttackError(
                f"{passive} does not hold all of these {len(positions)} people; ask about those "
                "of whom it has a row"
            )
        (party,) = (one for one in self.method.passives if one.name == passive)
        table = next(one for one in self.data.passives if one.name == passive)
        features_N = table.features[self.method.alignment[passive][positions]]
        objective = make_objective(
            objective_of(self.config, passive),
            representation=self.terms.shape,
            features=tuple(features_N.shape[1:]),
            model=model_of(self.config, passive),
        )
        if not isinstance(objective, Contrastive):
            raise AttackError(f"{passive} holds no contrasted representations")
        state = named_below("objective", party.tensors())
        objective.load_state_dict(state)
        with torch.no_grad():
            z_ND: Tensor = objective.projection(objective.encoder(features_N))
        return F.normalize(z_ND.double(), dim=1)

    def train(
        self, epochs: int, *, before: Callable[[int, Tensor], None] = lambda step, rows_B: None
    ) -> None:
        """See `LiveSession`; questions after it are of an epoch of their own."""
        super().train(epochs, before=before)
        self._asking = False

    def sent(self, rows_B: Tensor) -> Tensor:
        """Alignment positions of those of the active's rows that a step over them sends."""
        position_N = torch.full((len(self.data.active.ids),), -1, dtype=torch.int64)
        aligned = self.method.alignment[self.data.active.name]
        position_N[aligned] = torch.arange(len(aligned))
        position_B = position_N[rows_B]
        return position_B[position_B >= 0]

    def ask(
        self,
        rows_B: Tensor,
        z_BD: Tensor,
        *,
        instead: Mapping[str, Tensor] | None = None,
        weights: Mapping[str, float] | None = None,
        participants: Collection[str] | None = None,
    ) -> Tensor:
        """See `ActiveSeat`."""
        if not self._asking:
            self._begin_epoch()
            self._asking = True
        active = self.method.active
        assert isinstance(active, QuestioningActive)
        dtype = representation_specs(self.terms)["z"].dtype
        active.question = Question(
            rows=rows_B,
            z=z_BD.to(dtype),
            instead={name: one.to(dtype) for name, one in (instead or {}).items()},
            weights=weights or {},
        )
        everybody = self.method.passives
        try:
            if participants is not None and set(participants) != set(self.passives):
                self._restrict(participants)
            self.method.step(self._next_step(), rows_B)
        finally:
            active.question = None
            self.method.passives = everybody
            self.method.roll.left.clear()
        assert active.opened is not None
        return active.opened

    def _restrict(self, participants: Collection[str]) -> None:
        """Let only these contribute; without the rule, a plain sum over just them is set up."""
        self.method.passives = [one for one in self.method.passives if one.name in participants]
        if Rule.PARTICIPANTS in self.rules:
            return
        left = [name for name in self.passives if name not in participants]
        self.method.roll.left.update(dict.fromkeys(left, self._step))
        contract = self.method.contract
        if not self.config.secure_sum.kind.unsafe:
            _refuse_to_simulate()
        settings = self.config.secure_sum
        plain = PlainSum(
            SumAgreement(
                session=contract.session, receiver=contract.active, combiner="aggregator",
                contributors=tuple(one.name for one in self.method.passives),
                clip_norm=settings.clip or 1.0, bits=settings.bits, allow_single=True,
            ),
            clip=settings.clip is not None,
        )  # fmt: skip
        assert self.method.aggregator is not None
        self.method.aggregator.combiner = plain.combiner()
        self.method.active.receiver = plain.receiver()
        for passive in self.method.passives:
            passive.contributor = plain.contributor(passive.name)
        self._watch()


def _refuse_to_simulate() -> NoReturn:
    raise LocalProtocolError(
        "only a plain sum can be taken over other participants than agreed; the secure ones have "
        "no such mode"
    )
