"""Base classes of learning methods: the terms that their parties agree on, and each party's role.

A role is built from its own party's data and secrets and from the contract, which is public, and
from nothing else. Its script is an `async def` over its links (see `secure_apfed.exchange`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, get_args

import torch
from torch import Tensor, nn

from apfed_protocols.errors import LocalProtocolError, PartyLeftError
from secure_apfed.base.seeds import shuffle_rows
from secure_apfed.base.transfers import StepLoss
from secure_apfed.contract import AGGREGATOR, Contract, PassiveTerms, RepresentationBounds
from secure_apfed.data import OwnData
from secure_apfed.exchange import BEFORE_TRAINING, Envelope, Kind, Links
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.release import is_narrow, warn_if_near_constant
from secure_apfed.learning.votes import MeasuredHelp
from secure_apfed.measures.table import Scored
from secure_apfed.methods.party import PartyContext, Role
from secure_apfed.methods.privacy_reports import SignedReport, parse_report
from secure_apfed.networks.models import Shape, family_for
from secure_apfed.privacy.dp_sgd import WholeTraining
from secure_apfed.settings import MethodSettings, ModelSettings, RunSettings

FOR_THE_AGGREGATOR = 2
FOR_AN_ANSWER = 4
FOR_THE_ACTIVE = 8
"""How long a party waits for others, in units of `rules.patience_s`. A party that waits for one
that may itself be waiting waits longer, so that the latter's error, which names the silent party,
comes first.
"""

HELD_OUT_SHARE = 0.1
"""Share of the labelled training rows that are validation rows of early stopping."""

Lockstep: TypeAlias = Callable[[int, Tensor], object]
"""Function that computes a training step of all parties without messages, from the step's number
and rows.
"""

Save: TypeAlias = Callable[[int], bytes]
"""Function that writes a party's checkpoint before the step of this number, and returns its signed
report of privacy costs so far as bytes (`secure_apfed.methods.privacy_reports`), which the active
gets.
"""


Scores: TypeAlias = dict[str, Scored]
"""Scores of test rows, by inference variant."""


@dataclass(frozen=True, kw_only=True)
class SessionTerms:
    """The terms that all parties of a method agree on besides the settings; public.

    Attributes:
        passives: mapping from passive name to its terms; empty where the active trains alone.
        secure_sum: the sum's public parameters, empty where there is none.
    """

    passives: Mapping[str, PassiveTerms] = field(default_factory=dict)
    secure_sum: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_bounds(
        cls,
        bounds_by_passive: Mapping[str, RepresentationBounds],
        *,
        secure_sum: Mapping[str, Any] = {},
        weight_by_passive: Mapping[str, float] = {},
    ) -> Self:
        """Return terms under which no passive names an objective of its own.

        Args:
            bounds_by_passive: mapping from passive name to the bounds on a row that it sends or
                receives.
            secure_sum: the sum's public parameters.
            weight_by_passive: mapping from passive name to the factor of its contribution in the
                sum; 1 for passives not named.
        """
        return cls(
            passives={
                name: PassiveTerms(
                    objective=None, weight=weight_by_passive.get(name, 1.0), representation=bounds
                )
                for name, bounds in bounds_by_passive.items()
            },
            secure_sum=secure_sum,
        )


class StepCounter(Protocol):
    """A counter that numbers the steps of a run: training, evaluation and prediction alike."""

    @property
    def next_step(self) -> int:
        """The number of the first step that has not run yet."""

    def count_step(self, loss: StepLoss | None) -> None:
        """Advance by one finished step and record its task loss; None: the step trained nothing."""


class HelperRole(Role, ABC):
    """The role of a party that answers the active: a passive, or the aggregator.

    Attributes:
        contract: the session's contract, which all parties signed.
        request_kinds: the kinds of messages from the active that it answers.
    """

    contract: Contract
    request_kinds: tuple[Kind, ...] = ()

    async def run_session(self, links: Links, save: Save) -> None:
        """Answer every message of the active from the first step to the end of the session.

        `save`: writes this party's checkpoint; it is called whenever the active requests one.
        """
        active = self.contract.active
        while True:
            message = await links.receive(
                active, *self.request_kinds, Kind.CHECKPOINT, Kind.END, patience=FOR_THE_ACTIVE
            )
            if message.kind in self.request_kinds:
                await self.answer_message(links, message)
            elif not save_or_end(message.kind, message.step, links, active, save):
                return

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Answer one message whose kind is in `request_kinds`.

        Raises LocalProtocolError: the role answers none.
        """
        raise LocalProtocolError(f"{self.name} answers no {message.kind}")

    def is_narrow(self, z_BD: Tensor) -> bool:
        """Return whether the directions of received rows differ less than the contract requires.

        `z_BD`: representations of B rows, D numbers each.
        """
        return is_narrow(z_BD, self.contract.passives[self.name].representation)

    def get_sent_network(self) -> nn.Module | None:
        """Return the network whose output this party sends or adds to a sum; None: it has none.

        No other party knows the network.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class VoteAgreement:
    """Unbiased estimates of how often one passive's votes agree with others' and with the labels.

    The noise of votes may push an estimate below 0 or above 1.

    Attributes:
        others: share of rows on which it votes like another passive, averaged over the others;
            None: there is no other.
        labels: share of the labelled rows on which it votes for the true label.
        others_noise, labels_noise: bounds on the standard deviation of the two, caused by the
            votes' randomness.
    """

    others: float | None
    labels: float
    others_noise: float
    labels_noise: float


class ActiveRole(Role, ABC):
    """The role of the active: learns the model, sends the requests, and ends the session.

    Attributes:
        training_rows: the rows of one epoch, which are split into batches; a method defines what a
            row is.
        min_batch_rows: a last batch with fewer rows is left out.
        dp_sgd_training: the privacy cost of DP-SGD training; None: training is not private.
        guarantee: the privacy guarantee of what it sends or reads, in a sentence for the report.
        rounding_error: the largest error by fixed-point rounding of one number of a secure sum;
            None: there is no sum.
        departure_step_by_passive: the step in which each passive stopped answering in this session.
        agreement_by_party: mapping from passive name to how far its votes agree with others'
            (`VoteAgreement`); empty unless the active reads individual votes.
        help: the measured gain from the passives' votes on labelled rows; None: there are no votes.
        local_models: the names of local models that were "used", and of those "left_out", where
            they learnt the labels.
        fallback_networks: networks trained on the active's own columns alone, for methods whose
            main model needs all parties to predict; None: there are none.
        min_spread: the smallest spread of a batch's representations that every passive accepts.
        model: settings of its networks, where the parties agreed on sizes that the run's settings
            leave open; None: as in the settings.
    """

    training_rows: Tensor
    guarantee: str
    min_batch_rows: int = 2
    min_spread: float = 0.0
    dp_sgd_training: WholeTraining | None = None
    rounding_error: float | None = None
    model: ModelSettings | None = None

    def __init__(self) -> None:
        """Make the active's role; what becomes known in the session is empty."""
        self.departure_step_by_passive: dict[str, int] = {}
        self.agreement_by_party: Mapping[str, VoteAgreement] = {}
        self.help: MeasuredHelp | None = None
        self.local_models: Mapping[str, Sequence[str]] = {}
        self.fallback_networks: ActiveNetworks | None = None

    @abstractmethod
    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> StepLoss:
        """Run one training step on these training rows; return the task loss.

        On a GPU the loss may be a tensor there, so that the step need not wait for it.
        """

    @abstractmethod
    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> Scores:
        """Return scores of the test rows by inference variant (the way in which they are predicted,
        such as alone or jointly).

        `next_step`: step numbers from it on are unused, for variants that need messages.
        `is_final`: whether training is over; only then such variants are measured.
        """

    def relabel(self, labels_N: Tensor, train_rows: Tensor) -> None:
        """Train on other labels and rows from now on.

        A label mechanism in stages calls it with new randomised labels. Only methods whose active
        predicts locally override it. `labels_N`: labels of all N rows of its table. `train_rows`:
        the rows to train on. Raises LocalProtocolError: the method has no such model.
        """
        raise LocalProtocolError(f"{self.name} has no model that could be asked for labels")

    def warn_if_near_constant(
        self, z_BD: Tensor, *, step: int, spread: float | None = None
    ) -> bool:
        """Return whether a passive would refuse a batch since its rows point in one direction.

        If so, warn (NarrowBatchWarning). `z_BD`: representations of B rows. `step`: number of the
        run's step, for the warning. `spread`: how much the batch's directions differ, if it is
        known; None: it is measured here.
        """
        return warn_if_near_constant(
            z_BD, self.min_spread, sender=self.name, step=step, spread=spread
        )

    def list_learnt_rows(self, config: RunSettings) -> Tensor:
        """Return its training rows without the validation rows."""
        return pick_learnt_rows(self, config)

    def rows_with_label(self) -> Tensor:
        """Return the training rows with a label, which can serve as validation rows."""
        return self.training_rows

    async def compute_held_out_loss(self, links: Links, steps: StepCounter, rows: Tensor) -> float:
        """Return the mean task loss of these validation rows, without learning from them.

        Early stopping calls it. Requests that it needs count as steps in `steps`. Raises
        LocalProtocolError: the method does not override it (its settings have no `can_stop_early`).
        """
        raise LocalProtocolError(f"{self.name} tells no loss of rows that it does not learn from")

    async def begin_epoch(self, links: Links, steps: StepCounter) -> bool:
        """Prepare an epoch; return whether it has steps. If it has none, training ends there."""
        return True

    async def finish_training(self, links: Links, steps: StepCounter) -> None:
        """Run the exchange that follows the last step, before the last evaluation."""
        self.finish_locally()

    def finish_locally(self) -> None:
        """Do the last computation that needs no message; by default none."""

    @property
    def incomplete_step_count(self) -> int:
        """The number of finished steps whose sum lacked at least one passive."""
        return 0

    @property
    def last_sum(self) -> Tensor | None:
        """The sum that the last step decoded: D numbers for each of B rows; None: there is none.

        It is for the active's own record, and in no message.
        """
        return None

    def get_active_networks(self) -> ActiveNetworks | None:
        """Return the networks that predict without any other party; None: there are none."""
        return None

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return the local networks, refitted without these rows of the active's table.

        Calibration needs scores of rows that a model has not seen. None: refitting would take
        another training.
        """
        return None


class Method(ABC):
    """A learning procedure: the terms that its parties agree on, and the role of each party.

    Attributes:
        settings: the class of its settings, with facts on what it reveals to whom.
    """

    settings: type[MethodSettings]

    @property
    def public_facts(self) -> MethodSettings:
        """The facts on what the method reveals, which are the same for all settings of a run."""
        # A setting `name: Literal["tvfl"]` gives "tvfl"; a user's class is named by its `code`.
        names = get_args(self.settings.model_fields["name"].annotation) or (
            self.settings.import_path,
        )
        return self.settings.model_construct(name=names[0])

    @property
    def headline(self) -> str:
        """The inference variant whose score a run reports first, a key of `evaluate`'s result."""
        return self.public_facts.name

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return the bounds (shape, dtype, norms) on a row that this party sends, which all parties
        must know; None: it states none.
        """
        return None

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the terms of the contract, by default none; all parties compute the same.

        `proposed_terms`: mapping from party name to the bounds that its `offer_terms` returned;
        parties that returned None are missing. `session`: name of this session, the same at all
        parties.
        """
        return SessionTerms()

    def find_sent_model(self, config: RunSettings, passive: str) -> ModelSettings:
        """Return the settings of the network whose output this passive sends.

        Raises LocalProtocolError: passives of this method send no network's output.
        """
        raise LocalProtocolError(f"{passive} sends no output of a network in {self.settings.title}")

    def build_sent_network(self, config: RunSettings, passive: str, features: Shape) -> nn.Module:
        """Return the untrained network whose output this passive sends.

        `features`: the shape of a row of its table. Raises LocalProtocolError: passives of this
        method send no network's output.
        """
        model = self.find_sent_model(config, passive)
        return family_for(model, features).make_encoder(features, model)

    def resolve_settings(
        self, config: RunSettings, column_count_by_passive: Mapping[str, int]
    ) -> RunSettings:
        """Return the settings with a number for every "auto" that depends on the passives' tables.

        By default there is none. `column_count_by_passive`: mapping from passive name to its number
        of distinct columns. Raises ConfigError: these numbers do not allow the run.
        """
        return config

    def find_learnt_labels(self, config: RunSettings, data: OwnData, aligned: Tensor) -> Tensor:
        """Return the rows of the active's table whose labels training uses.

        `data`: the active's table and row selections. `aligned`: the row of that table at each of
        the N alignment positions.
        """
        rows = data.labelled_rows
        if not self.public_facts.needs_alignment or self.learns_unaligned_labels(config):
            return rows
        return rows[torch.isin(rows, aligned)]

    def learns_unaligned_labels(self, config: RunSettings) -> bool:
        """Return whether training also uses labels of people whom no passive knows."""
        return self.public_facts.can_use_unaligned_rows and config.train.use_unaligned

    def find_testable_rows(self, data: OwnData, aligned: Tensor) -> Tensor:
        """Return the active's test rows that the headline model can predict.

        `data`: the active's table and row selections. `aligned`: the row of that table at each of
        the N alignment positions.
        """
        rows = data.test_rows
        return rows if self.settings.can_predict_locally else rows[torch.isin(rows, aligned)]

    @abstractmethod
    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role.

        `rows`: the row of its table at each of the N alignment positions. Without alignment they
        are all rows of it, or none if there is no passive.
        """

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role.

        `rows`: the row of its table at each of the N alignment positions; -1: it does not know the
        person there. Without alignment they are all rows of it. Raises LocalProtocolError: the
        method has no passives.
        """
        raise LocalProtocolError(f"{party.name}: {self.settings.title} has no passive party")

    def build_aggregator(self, party: PartyContext, contract: Contract) -> HelperRole:
        """Return the role of the aggregator, which adds encrypted or masked contributions.

        Raises LocalProtocolError: the method has no aggregator.
        """
        raise LocalProtocolError(f"{party.name}: {self.settings.title} has no aggregator")

    def make_simulated_step(
        self, active: ActiveRole, passives: Mapping[str, HelperRole]
    ) -> Lockstep:
        """Return a training step that computes what these roles do, without messages, for fast
        simulations.

        Raises LocalProtocolError: the method is not trained step by step.
        """
        raise LocalProtocolError(f"{self.settings.title} is not trained step by step")

    @property
    def can_simulate(self) -> bool:
        """True if its accuracy can be computed without its messages."""
        # Only methods that can be simulated override this function.
        return type(self).make_simulated_step is not Method.make_simulated_step

    async def run_dealer(self, party: PartyContext, links: Links, contract: Contract) -> None:  # noqa: B027
        """Run the dealer: send the correlated randomness that the method's protocol needs after the
        alignment; by default none.
        """


async def meet_all(links: Links, helpers: Sequence[str]) -> None:
    """Wait for READY of each of these parties, then send READY to all; run by the active.

    Messages are ordered between two parties, but not among three. After this barrier no message of
    the next phase can overtake one of the previous phase.

    `helpers`: the names of the parties.
    """
    missing = list(helpers)
    while missing:
        message = await links.receive(
            missing,
            Kind.READY,
            step=BEFORE_TRAINING,
            min_senders=len(missing),
            patience=FOR_AN_ANSWER,
        )
        missing.remove(message.sender)
    for name in helpers:
        links.send(name, Kind.READY, BEFORE_TRAINING)


async def meet_active(links: Links, active: str) -> None:
    """Send READY to the active and wait for its READY: a helper's side of `meet_all`."""
    links.send(active, Kind.READY, BEFORE_TRAINING)
    await links.receive(active, Kind.READY, step=BEFORE_TRAINING, patience=FOR_THE_ACTIVE)


async def save_all(
    links: Links,
    helpers: Sequence[str],
    step: int,
    *,
    contract: Contract,
    may_leave: Collection[str] = (),
) -> Mapping[str, SignedReport | None]:
    """Ask these parties to save a checkpoint before `step`; return their signed privacy reports.

    `helpers`: the names of the parties. `may_leave`: names of the parties whose silence is no
    error. Returns for each party name its signed report, or None if it fell silent.
    Raises PartyLeftError: another party fell silent; RemoteProtocolError: a reply is malformed.
    """
    for name in helpers:
        links.send(name, Kind.CHECKPOINT, step)
    identities = {party.name: party.identity for party in contract.participants}
    report_by_helper: dict[str, SignedReport | None] = {}
    for name in helpers:
        try:
            message = await links.receive(name, Kind.SAVED, step=step)
        except PartyLeftError:
            if name not in may_leave:
                raise
            # This party may be left out; its privacy cost is then unknown.
            report_by_helper[name] = None
        else:
            report_by_helper[name] = parse_report(
                message.payload,
                sender=name,
                identity=identities[name],
                contract=contract.digest,
                step=step,
            )
    return report_by_helper


def end_all(links: Links, helpers: Sequence[str], step: int) -> None:
    """Tell these parties that the session is over.

    The aggregator is told first: otherwise it would treat the passives' leaving as a failure.
    `helpers`: the names of the parties. `step`: the number of the next step.
    """
    # False sorts before True.
    for name in sorted(helpers, key=lambda name: name != AGGREGATOR):
        links.send(name, Kind.END, step)


def save_or_end(kind: Kind, step: int, links: Links, active: str, save: Save) -> bool:
    """Answer the active's CHECKPOINT or END message; return whether the session continues.

    `kind`, `step`: kind and step number of the received message. `save`: writes the checkpoint and
    returns the signed privacy costs.
    """
    if kind is Kind.CHECKPOINT:
        links.send(active, Kind.SAVED, step, save(step))
    return kind is not Kind.END


def pick_held_out_rows(active_role: ActiveRole, config: RunSettings) -> Tensor:
    """Return the validation rows of early stopping, which training skips; empty without it.

    The same seed gives the same rows.
    """
    if config.train.patience is None:
        # An empty tensor of the same type: no row is held out.
        return active_role.training_rows[:0]
    order = shuffle_rows(active_role.rows_with_label(), config.seed, "held out")
    return order[: max(1, round(HELD_OUT_SHARE * len(order)))]


def pick_learnt_rows(active_role: ActiveRole, config: RunSettings) -> Tensor:
    """Return the training rows without the validation rows."""
    held_out = pick_held_out_rows(active_role, config)
    return active_role.training_rows[~torch.isin(active_role.training_rows, held_out)]


def split_batches(active_role: ActiveRole, config: RunSettings, epoch: int) -> list[Tensor]:
    """Return an epoch's batches of training rows; the same seed and epoch give the same batches.

    A last batch that is too small is left out. For methods that average networks or pseudo-labels
    (`averaged_quantity`), one batch has all rows.
    """
    order = shuffle_rows(pick_learnt_rows(active_role, config), config.seed, "batches", epoch)
    batches = [order] if config.method.averaged_quantity else order.split(config.train.batch_size)
    return [rows_B for rows_B in batches if len(rows_B) >= active_role.min_batch_rows]
