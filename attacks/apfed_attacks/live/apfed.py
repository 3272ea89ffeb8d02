"""Live runs in which the active deviates: the real parties, links and sums, and one adversary.

Run by: the experimenter. The passives, the aggregator and the sum are the ones of every run;
`rules` takes single rules of the protocol away, to show what each is good for.

Letters: B batch, D numbers of a representation.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_attacks.live.runs import ALL_RULES, Lenient, LiveSession, Rule, unbound
from apfed_attacks.live.strategy import Answering
from apfed_attacks.view import AttackError
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums import PlainSum
from apfed_protocols.sums.fixed_point import clip_rows
from apfed_protocols.sums.interface import FloatArray, IntArray, StepBinding, SumAgreement
from apfed_protocols.sums.roles import SumContributor
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR, RepresentationTerms
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Kind, Links, pack, unpack
from secure_apfed.learning.descent import without_prefix
from secure_apfed.learning.release import representation_specs
from secure_apfed.methods.alignment import positions_of
from secure_apfed.methods.apfed import ApfedActive, ApfedPassive
from secure_apfed.methods.charged import pack_charged
from secure_apfed.methods.method import keep_or_end
from secure_apfed.methods.sum_end import ActiveSum, SumAggregator, bind_step
from secure_apfed.methods.terms import model_of, objective_of
from secure_apfed.objectives import OBJECTIVES, Contrastive
from secure_apfed.secure_sums import sum_kind
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


class LiveRun(LiveSession[ApfedActive]):
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
        super().__init__(config, data, ApfedActive, alignment=alignment)
        self.rules = frozenset(rules)
        for passive in self._parties.values():
            if self.rules != ALL_RULES:
                Lenient(passive, self.rules)
        if Rule.BINDING not in self.rules:
            session = self.session.contract.session
            self._sum.binding = lambda step, *_: unbound(session, step)  # type: ignore[method-assign]
        self._watch()
        self._asking = False

    @property
    def _parties(self) -> dict[str, ApfedPassive]:
        """The passives, by name."""
        roles = self.session.helpers.values()
        return {role.name: role for role in roles if isinstance(role, ApfedPassive)}

    @property
    def _sum(self) -> ActiveSum:
        """The active's end of the sum."""
        assert self.learner.sum is not None
        return self.learner.sum

    def _watch(self) -> None:
        for passive in self._parties.values():
            watched = _Watched(passive.sum.contributor)
            passive.sum.contributor = watched  # type: ignore[assignment]  # its set-up is done

    def hand_over(self, passive: str, strategy: Answering) -> None:
        """Let an adversary play this passive from now on."""
        honest, network = self.session.helpers[passive], self.session.network
        assert isinstance(honest, ApfedPassive)
        script = _answer_what_it_likes(honest, network.links[passive], strategy)
        network.replace(passive, script)

    @property
    def trained(self) -> Tensor:
        """Alignment positions of the training rows, in an order of the seed."""
        aligned = self.alignment[self.data.active.name]
        own = positions_of(aligned, self.data.train_rows)
        return shuffled(own, self.config.seed, "attacks", "live")

    @property
    def terms(self) -> RepresentationTerms:
        """What a row of representations may be."""
        return next(iter(self.session.contract.passives.values())).representation

    @property
    def batch_size(self) -> int:
        """The largest agreed batch."""
        return self.session.contract.batch_size

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
        return self.alignment[passive][positions] >= 0

    def contributed(self, passive: str) -> Tensor:
        """What a passive contributed to its last sum (B, D), after its clip.

        Only that passive knows it: an attack may ask those that collude, the experimenter all.
        """
        watched, bound = self._parties[passive].sum.contributor, self.config.secure_sum.clip
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
        table = next(one for one in self.data.passives if one.name == passive)
        features_N = table.features[self.alignment[passive][positions]]
        agreed = objective_of(self.config, passive)
        objective = OBJECTIVES[agreed.name](
            agreed,
            representation=self.terms.shape,
            features=tuple(features_N.shape[1:]),
            model=model_of(self.config, passive),
        )
        if not isinstance(objective, Contrastive):
            raise AttackError(f"{passive} holds no contrasted representations")
        state = without_prefix("objective", self._parties[passive].tensors())
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
        aligned = self.alignment[self.data.active.name]
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
        dtype = representation_specs(self.terms)["z"].dtype
        question = _Question(
            step=self._next_step(),
            rows=rows_B,
            z=z_BD.to(dtype),
            instead={name: one.to(dtype) for name, one in (instead or {}).items()},
            weights=weights or {},
            to=[name for name in self.passives if participants is None or name in participants],
        )
        if len(question.to) < len(self.passives) and Rule.PARTICIPANTS not in self.rules:
            self._sum_over(question.to)
        script = _ask(self._sum, self.session.links, question)
        return self.session.play_step(question.step, script)

    def _sum_over(self, names: Sequence[str]) -> None:
        """Set up a plain sum over just these."""
        contract, settings = self.session.contract, self.config.secure_sum
        if not sum_kind(settings).unsafe:
            _refuse_to_simulate()
        plain = PlainSum(
            SumAgreement(
                session=contract.session, receiver=contract.active, combiner=AGGREGATOR,
                contributors=tuple(names), clip_norm=settings.clip or 1.0, bits=settings.bits,
                allow_single=True,
            ),
            clip=settings.clip is not None,
        )  # fmt: skip
        agreed = {name: contract.passives[name] for name in names}
        aggregator = SumAggregator(
            contract.model_copy(update={"passives": agreed}), plain.combiner(), rounds=1
        )
        network = self.session.network
        network.replace(AGGREGATOR, aggregator.help(network.links[AGGREGATOR], _saves_nothing))
        self._sum.receiver = plain.receiver()
        for name in names:
            self._parties[name].sum.contributor = plain.contributor(name)
        self._watch()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Question:
    """What is sent in place of the active's own representations; see `ActiveSeat.ask`."""

    step: int
    rows: Tensor
    z: Tensor
    instead: Mapping[str, Tensor]
    weights: Mapping[str, float]
    to: Sequence[str]

    def payload(self, passive: str) -> bytes:
        """What this passive gets."""
        meta = {"weights": dict(self.weights)} if self.weights else {}
        return pack({"rows": self.rows, "z": self.instead.get(passive, self.z)}, meta)


async def _ask(sum_end: ActiveSum, links: Links, question: _Question) -> Tensor:
    """A step of an active that sends what it likes; return the sum that it opens, (B, D).

    It holds what an honest active holds: its end of the sum.
    """
    for name in question.to:
        links.send(name, Kind.REPRESENTATIONS, question.step, question.payload(name))
    unasked = {name: question.step for name in sum_end.present if name not in question.to}
    sum_end.left |= unasked
    numbers = question.z.flatten(1).shape[1]
    await sum_end.read(links, question.step, question.rows, question.payload(""), numbers)
    for name in unasked:
        del sum_end.left[name]
    assert sum_end.opened is not None
    return sum_end.opened


async def _answer_what_it_likes(honest: ApfedPassive, links: Links, strategy: Answering) -> None:
    """The script of a passive that answers representations with what it likes.

    It holds what an honest passive holds: its end of the sum, which clips its rows, and what it is
    sent. It adds no noise, where some was agreed.
    """
    contract, active, sum_end = honest.contract, honest.contract.active, honest.sum
    while True:
        message = await links.receive(active, Kind.REPRESENTATIONS, Kind.CHECKPOINT, Kind.END)
        step = message.step
        if message.kind is not Kind.REPRESENTATIONS:
            if not keep_or_end(message.kind, step, links, active, _saves_nothing):
                return
            continue
        tensors, _ = unpack(message.payload, representation_specs(honest.terms), sender=active)
        rows_B, z_BD = tensors["rows"], tensors["z"]
        answer_BD = strategy.answer(step, rows_B, z_BD.flatten(1)).to(z_BD)
        binding = bind_step(contract.session, step, rows_B, message.payload)
        values_BD = answer_BD.flatten(1).cpu().numpy()
        none = np.zeros(values_BD.shape, dtype=np.int64) if sum_end.noise else None
        body = sum_end.contributor.contribute(values_BD, binding, none)
        links.send(AGGREGATOR, Kind.CONTRIBUTION, step, body)
        if sum_end.rounds == 2:
            request = await links.receive(AGGREGATOR, Kind.SUM_REQUEST, step=step, patience=2)
            answer = sum_end.contributor.answer(request.payload)
            links.send(AGGREGATOR, Kind.SUM_ANSWER, step, answer)


def _saves_nothing(step: int) -> bytes:
    return pack_charged(())


def _refuse_to_simulate() -> NoReturn:
    raise LocalProtocolError(
        "only a plain sum can be taken over other participants than agreed; the secure ones have "
        "no such mode"
    )
