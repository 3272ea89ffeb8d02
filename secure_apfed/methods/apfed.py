"""APFed (Section 3): passives help during training, the active predicts alone afterwards.

Three scripts: the active represents a batch, every passive answers the aggregator with its
protected gradient, the aggregator adds, the active updates. M passives take 2M + 1 envelopes a
step, 4M + 1 where the sum has two rounds. SingleVL (Section 5.1) is the active's script without
anybody else: it trains on its own loss.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError, RunStoppedError
from apfed_protocols.sums import SecureSum, SumCombiner
from secure_apfed.contract import AGGREGATOR, Contract, RepresentationTerms
from secure_apfed.data import OwnData
from secure_apfed.defences import gradient_chain
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.measures import Scored
from secure_apfed.methods.accounts import (
    answers_log,
    guard_for,
    private_updates,
    surroundings_of,
    update_ledgers,
    whole_training,
)
from secure_apfed.methods.actives import active_networks, active_party
from secure_apfed.methods.ahead import waiting_of, worker_for
from secure_apfed.methods.alignment import rows_among
from secure_apfed.methods.method import (
    Agreed,
    Course,
    Helper,
    Learner,
    Method,
    Own,
    Save,
    keep_or_end,
    learnt_rows,
)
from secure_apfed.methods.sum_noise import (
    NoisePlan,
    contribution_noise,
    parameters_of,
    sum_and_noise,
)
from secure_apfed.methods.terms import (
    check_passives,
    model_of,
    passive_terms,
    projection_size,
    representation_terms,
    require_own_terms,
)
from secure_apfed.objectives import make_objective
from secure_apfed.parties import ActiveNetworks, ActiveParty, Compute, PassiveParty
from secure_apfed.parties.rules import StepGate, read_sum, write_sum
from secure_apfed.privacy import PrivacyLedger, WholeTraining
from secure_apfed.privacy.ledger import NOTHING_RELEASED
from secure_apfed.seeds import seeded
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.objective import ContrastiveSettings, ReconstructionSettings
from secure_apfed.settings.run import RunSettings

__all__ = [
    "Apfed",
    "ApfedAggregator",
    "ApfedCSettings",
    "ApfedLearner",
    "ApfedPassive",
    "ApfedRSettings",
    "ApfedSettings",
    "MixedApfedSettings",
    "SingleView",
    "SingleViewSettings",
]


class SingleViewSettings(MethodSettings):
    """The active alone; see `MethodSettings`."""

    name: Literal["single_view"]

    title = "SingleVL"
    predicts_alone = True
    has_passives = False
    trains_privately = True
    stops_early = True
    weighs_classes = True
    simulated = True
    tasks = ("classification", "regression", "anomaly")


class ApfedSettings(MethodSettings):
    """APFed, whatever passives optimise; see `MethodSettings`."""

    predicts_alone = True
    representations_from = "active"
    sums_gradients = True
    trains_privately = True
    takes_pairwise = True
    stops_early = True
    weighs_classes = True
    simulated = True
    tasks = ("classification", "regression", "anomaly")


class MixedApfedSettings(ApfedSettings):
    """Every passive says its objective; see `ApfedSettings`."""

    name: Literal["apfed"]

    title = "APFed"


class ApfedRSettings(ApfedSettings):
    """All passives reconstruct; see `ApfedSettings`."""

    name: Literal["apfed_r"]

    title = "APFed-R"
    own_objective = ReconstructionSettings()


class ApfedCSettings(ApfedSettings):
    """All passives contrast; see `ApfedSettings`."""

    name: Literal["apfed_c"]

    title = "APFed-C"
    own_objective = ContrastiveSettings()


class ApfedLearner(Learner):
    """The active's role; see `Learner`.

    Args:
        party: the active, set up; test_rows: of its table.
        ledgers, training, guarantee, rounding: see `Learner`.
        train_rows: of its table, aligned or not.
        classes: K.
        headline: what its accuracy is called.
        only: rows of its table beside which it trains on none; None: it may train on all.
        config: of the run; says what is held out, and whether labels are spread at the end.
    """

    def __init__(
        self,
        party: ActiveParty,
        *,
        headline: str,
        ledgers: Mapping[str, PrivacyLedger],
        training: WholeTraining | None,
        guarantee: str,
        rounding: float | None,
        train_rows: Tensor,
        test_rows: Tensor,
        classes: int,
        config: RunSettings,
        only: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.name, self.party, self._only, self._config = party.name, party, only, config
        self.ledgers, self.training, self.guarantee = ledgers, training, guarantee
        self.rounding, self.training_rows = rounding, rows_among(train_rows, self._only)
        self._headline, self._test_rows, self._classes = headline, test_rows, classes
        party.weigh_classes(self.learnt, classes)

    @property
    def learnt(self) -> Tensor:
        """The rows of its table that it learns from."""
        return learnt_rows(self, self._config)

    @property
    def opened(self) -> Tensor | None:
        return self.party.opened

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        if self.party.receiver is not None:
            peers = (*self.party.contract.passives, AGGREGATOR)
            await links.converse(Kind.SUM_SETUP, self.party.receiver, peers)

    async def step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """One step of the active (Alg. 1)."""
        sent = self.party.represent(step, rows_B)
        if sent is None:
            return self.party.update(None)
        asked = [name for name in self.party.contract.passives if name not in self.left]
        for name in asked:
            links.send(name, Kind.REPRESENTATIONS, step, sent)
        message = await links.receive(AGGREGATOR, Kind.SUM, step=step, patience=4)
        present, combined = read_sum(message, asked, self.party.contract)
        loss = self.party.update(combined)
        self.left |= {name: step for name in asked if name not in present}
        self.steps_without_all += bool(self.left)
        return loss

    async def conclude(self, links: Links, course: Course) -> None:
        """Spread the labels over h, where it was asked for; sends nothing."""
        if self._config.train.spread_labels:
            self.party.spread_labels(self.learnt)

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """What the active says alone; needs no exchange."""
        return {self._headline: self.party.scored(self._test_rows)}

    def rows_with_label(self) -> Tensor:
        return self.party.with_label(self.training_rows)

    async def loss_on(self, links: Links, course: Course, rows: Tensor) -> float:
        """Its own task loss; needs no exchange."""
        return self.party.loss_on(rows)

    def relabel(self, labels_N: Tensor, train_rows: Tensor) -> None:
        self.party.relabel(labels_N)
        self.training_rows = rows_among(train_rows, self._only)
        self.party.weigh_classes(self.learnt, self._classes)

    def solo(self) -> ActiveNetworks | None:
        """The active's own networks: that is the point of the method."""
        return self.party.networks

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors)


class ApfedPassive(Helper):
    """A passive's role; see `Helper`."""

    def __init__(self, party: PassiveParty, *, rounds: int) -> None:
        self.name, self.party, self.rounds = party.name, party, rounds
        self.contributions = party.noise.ledger if party.noise else None
        if self.contributions:
            self.ledgers = {party.name: self.contributions}

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        contract = self.party.contract
        peers = (contract.active, AGGREGATOR, *contract.passives)
        await links.converse(
            Kind.SUM_SETUP, self.party.contributor, [name for name in peers if name != self.name]
        )

    async def help(self, links: Links, save: Save) -> None:
        """Answer batch after batch (Alg. 1, passive client)."""
        active = self.party.contract.active
        while True:
            self.party.wait()
            message = await links.receive(
                active, Kind.REPRESENTATIONS, Kind.CHECKPOINT, Kind.END, patience=8
            )
            step = message.step
            if message.kind is not Kind.REPRESENTATIONS:
                if not keep_or_end(message.kind, step, links, active, save):
                    return
                continue
            links.send(AGGREGATOR, Kind.CONTRIBUTION, step, self.party.contribute(message))
            if self.rounds == 2:
                request = await links.receive(AGGREGATOR, Kind.SUM_REQUEST, step=step, patience=2)
                answer = self.party.answer(request.payload)
                links.send(AGGREGATOR, Kind.SUM_ANSWER, step, answer)

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors, last_step=next_step - 1)


class ApfedAggregator(Helper):
    """The aggregator's role: it adds what it cannot read, and holds no key of the sum.

    Who falls silent stays out until the next session. The contract says whether the run stops for
    all then, or goes on with those who are left.

    Args:
        contract: of the session.
        combiner: its end of the sum; rounds: between the passives and it, 1 or 2.
    """

    name = AGGREGATOR

    def __init__(self, contract: Contract, combiner: SumCombiner, *, rounds: int) -> None:
        self.combiner = combiner
        self._contract, self._rounds = contract, rounds
        self._present = list(contract.passives)
        self._gate = StepGate(AGGREGATOR)

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        peers = (self._contract.active, *self._contract.passives)
        await links.converse(Kind.SUM_SETUP, self.combiner, peers)

    async def help(self, links: Links, save: Save) -> None:
        """Add step after step."""
        active = self._contract.active
        while True:
            try:
                message = await links.receive(
                    (active, *self._present), Kind.CONTRIBUTION, Kind.CHECKPOINT, Kind.END,
                    least=1 + self._least(), patience=8,
                )  # fmt: skip
            except PartyLeftError as error:
                if active in error.left:
                    raise
                self._let_go(error, self._present)
                continue
            if (message.kind is Kind.CONTRIBUTION) is (message.sender == active):
                raise RemoteProtocolError(
                    f"{message.sender} sent {message.kind}, which only "
                    f"{'a passive' if message.sender == active else active} may"
                )
            if message.kind is not Kind.CONTRIBUTION:
                if not keep_or_end(message.kind, message.step, links, active, save):
                    return
                continue
            self._gate.enter(message)
            bodies = await self._gather(links, Kind.CONTRIBUTION, message)
            if self._rounds == 2:
                for name, request in self.combiner.ask(bodies).items():
                    links.send(name, Kind.SUM_REQUEST, message.step, request)
                bodies = await self._gather(links, Kind.SUM_ANSWER, message, first=False)
            combined = self.combiner.combine(bodies)
            links.send(active, Kind.SUM, message.step, write_sum(self._present, combined))

    def _least(self) -> int:
        """Passives without whom there is no step."""
        if self._contract.silent_passive != "recover":
            return len(self._present)
        threshold = self._contract.secure_sum["threshold"]
        assert isinstance(threshold, int)
        return threshold

    async def _gather(
        self, links: Links, kind: Kind, begun_by: Envelope, *, first: bool = True
    ) -> dict[str, bytes]:
        """One body of each passive that sends, beginning with the message that came first."""
        bodies = {begun_by.sender: begun_by.payload} if first else {}
        while missing := [name for name in self._present if name not in bodies]:
            try:
                message = await links.receive(missing, kind, step=begun_by.step, least=len(missing))
            except PartyLeftError as error:
                self._let_go(error, missing)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(
                    f"{error}; {begun_by.sender} began that step, so one of the two is to blame"
                ) from error
            else:
                bodies[message.sender] = message.payload
        return {name: bodies[name] for name in self._present}

    def _let_go(self, error: PartyLeftError, awaited: Sequence[str]) -> None:
        """Go on without those who left where the contract says so.

        Raises:
            PartyLeftError: it says to stop, or too few are left.
        """
        gone = [name for name in error.left or awaited if name in self._present]
        if isinstance(error, RunStoppedError) and self._contract.silent_passive != "recover":
            raise error
        unasked = str(error)
        if not error.gone:  # who left was not merely not asked
            unasked += f"; or {self._contract.active} did not ask for it"
        if self._contract.silent_passive != "recover":
            raise PartyLeftError(
                f"{unasked}; the contract says to {self._contract.silent_passive} when a passive "
                f"falls silent: go on in a new session once {' and '.join(gone)} is back, or agree "
                "on rules.silent_passive: recover, where gradients are summed, with recoverable "
                "masks (secure_sum.masks)",
                left=tuple(gone),
            ) from error
        self._present = [name for name in self._present if name not in gone]
        if not gone or len(self._present) < self._least():
            every = tuple(self._contract.passives)
            missing = ", ".join(name for name in every if name not in self._present)
            raise PartyLeftError(
                f"{unasked}; this sum needs at least {self._least()} of {len(every)} passives, "
                f"missing: {missing}; resume once they are back",
                left=tuple(gone),
            ) from error


class Apfed(Method):
    """The method; see `Method`.

    Args:
        settings: see `Method`.
    """

    def __init__(self, settings: type[ApfedSettings]) -> None:
        self.settings = settings

    def labels_learnt(self, config: RunSettings, held: OwnData, aligned: Tensor) -> Tensor:
        """Of people whom only the active knows, too, unless the settings leave them out."""
        everybody = config.train.use_unaligned
        return held.labelled_rows if everybody else super().labels_learnt(config, held, aligned)

    def offer(self, own: Own) -> RepresentationTerms | None:
        """See `Method`: the active sends representations, nobody else does."""
        if own.name != own.active:
            return None
        check_passives(own.config, own.passives)
        projected = projection_size(own.config, own.passives)
        _, shape = active_networks(own, projected)
        guard = guard_for(own)
        return representation_terms(own.config, shape, guard, projected=projected is not None)

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        representation = offers[own.active]
        projection = projection_size(own.config, own.passives)
        expected = representation_terms(
            own.config,
            representation.shape if projection is None else (projection,),
            guard_for(own),
            projected=projection is not None,
        )
        require_own_terms(own.name, own.active, representation, expected)
        parts = own.active, own.passives, representation.shape
        secure_sum, noise = sum_and_noise(own.config, session, *parts)
        return Agreed(
            passives={
                name: passive_terms(own.config, name, representation) for name in own.passives
            },
            secure_sum=parameters_of(own.config, secure_sum, noise),
        )

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        secure_sum, _ = _sum_of_contract(own, contract)
        return _learner(own, contract, rows, secure_sum, self.headline)

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        config, terms = own.config, contract.passives[own.name]
        secure_sum, noise = _sum_of_contract(own, contract)
        contributor, shape = secure_sum.contributor(own.name), terms.representation.shape
        assert terms.objective is not None
        with seeded(own.seed, own.name, "objective"):
            objective = make_objective(
                terms.objective,
                representation=shape,
                features=own.features,
                model=model_of(config, own.name),
            )
        party = PassiveParty(
            own.name,
            contract,
            features_N=own.rows.features[rows.clamp(min=0)],
            objective=objective,
            contributor=contributor,
            train=config.train,
            compute=Compute.of(config.train),
            seed=own.seed,
            answers=answers_log(own),
            held_N=rows >= 0,
            noise=contribution_noise(own, shape, plan=noise, aligned=len(rows)),
            waiting=waiting_of(
                config.secure_sum, contributor, (config.train.batch_size, math.prod(shape)),
                worker_for(config.secure_sum),
            ),
            defences=gradient_chain(config.defences, surroundings_of(own, shape), "contributions"),
        )  # fmt: skip
        return ApfedPassive(party, rounds=secure_sum.rounds)

    def aggregator(self, own: Own, contract: Contract) -> Helper:
        secure_sum, _ = _sum_of_contract(own, contract)
        return ApfedAggregator(contract, secure_sum.combiner(), rounds=secure_sum.rounds)


class SingleView(Method):
    """SingleVL (Section 5.1): the active alone; nothing is aligned, nothing is sent."""

    settings: type[MethodSettings] = SingleViewSettings

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        return _learner(own, contract, rows, None, self.headline)


def _learner(
    own: Own, contract: Contract, rows: Tensor, secure_sum: SecureSum | None, headline: str
) -> ApfedLearner:
    """The active's role; without a sum it trains alone, and nothing is released."""
    guard = guard_for(own)
    updates = private_updates(own, guard)
    party = active_party(own, contract, guard, updates, rows, secure_sum)
    training = whole_training(own.config, party.ledger, updates)
    released = {party.name: party.ledger} if secure_sum else {}
    guarantee = guard.statement() if secure_sum else NOTHING_RELEASED
    return ApfedLearner(
        party,
        headline=headline,
        ledgers={**released, **update_ledgers(party.name, updates)},
        training=training,
        guarantee=training.statement(guard if secure_sum else None) if training else guarantee,
        rounding=secure_sum.rounding() if secure_sum else None,
        train_rows=own.train_rows,
        test_rows=own.test_rows,
        classes=len(own.classes),
        config=own.config,
        only=rows if secure_sum and not own.config.train.use_unaligned else None,
    )


def _sum_of_contract(own: Own, contract: Contract) -> tuple[SecureSum, NoisePlan | None]:
    """The agreed sum, as each party describes it for itself."""
    names = tuple(contract.passives)
    shape = contract.passives[names[0]].representation.shape
    return sum_and_noise(own.config, contract.session, contract.active, names, shape)
