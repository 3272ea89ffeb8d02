"""APFed (Section 3): passives help during training, the active predicts alone afterwards.

Algorithm 1 in three scripts. `ApfedActive.step`: the active represents a batch, sends the same to
every passive, and updates from the sum of their gradients. `ApfedPassive.answer`: a passive
descends on its own loss, and contributes its gradient on what came. The aggregator adds what it
cannot read (`secure_apfed.methods.sum_end`). SingleVL (Section 5.1) is the active's script alone.

With `train.labels: after` the task loss stays out of these steps: the encoder learns from the
passives' gradients alone, nothing that is sent depends on a label, and local models over the
features and their representation learn the labels at the end (`secure_apfed.methods.local_models`).

The active emits its representations after the guard and nothing else; a passive its contribution to
a secure sum. The arithmetic stands apart (`ActiveTrainer`, `PassiveTrainer`) and knows no message.

Letters: N rows of a table, B batch, A of its rows that are sent, D numbers of a representation,
K classes, F features.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_apfed.base.names import UPDATES
from secure_apfed.base.seeds import draws_nothing, seed_draws
from secure_apfed.contract import AGGREGATOR, Contract, PassiveTerms, RepresentationTerms
from secure_apfed.data import UNLABELLED, OwnData
from secure_apfed.data.lazy_rows import score_in_parts, select_rows
from secure_apfed.errors import ConfigError, ModelError, NarrowBatchWarning
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.labellers import Labeller, Spreading
from secure_apfed.learning.black_box import BlackBox
from secure_apfed.learning.descent import (
    EVERY,
    ActiveNetworks,
    Compute,
    MakeOptimizer,
    Trainer,
    add_prefix,
    joint_loss,
    remove_prefix,
)
from secure_apfed.learning.own_code import FreshFamily, name_part
from secure_apfed.learning.release import (
    Released,
    Releases,
    check_spread,
    is_narrow,
    parse_representations,
    spread_of,
)
from secure_apfed.learning.votes import fit_linear, last_layer
from secure_apfed.measures.table import Scored, compute_balanced_weights, score_model
from secure_apfed.measures.tasks import Classification, Task, score_rows
from secure_apfed.methods.accounts import (
    defences_of,
    describe_sum,
    guard_for,
    ledger_for,
    private_updates,
    whole_training,
)
from secure_apfed.methods.alignment import rows_among
from secure_apfed.methods.local_models import LocalModels, fit_local_models, restore_networks
from secure_apfed.methods.method import (
    ActiveRole,
    HelperRole,
    Lockstep,
    Method,
    PartyContext,
    SessionTerms,
    StepCounter,
    pick_learnt_rows,
)
from secure_apfed.methods.sum_end import (
    ActiveSum,
    Admitted,
    PassiveSum,
    SessionSum,
    SumHelper,
    SumLearner,
    SumMethod,
)
from secure_apfed.methods.terms import (
    check_passives,
    model_of,
    objective_of,
    outputs_of,
    projection_size,
    representation_terms,
    require_own_terms,
    settings_of,
    task_of,
)
from secure_apfed.networks.models import Shape, output_shape, require_scores
from secure_apfed.networks.objectives import OBJECTIVES, Objective
from secure_apfed.networks.rank import count_columns, warn_if_narrow
from secure_apfed.privacy.defences import GradientDefence, Leaving
from secure_apfed.privacy.dp_sgd import PrivateGradient, PrivateUpdates
from secure_apfed.privacy.ledger import NOTHING_RELEASED
from secure_apfed.privacy.measured import check_loss, check_objective, check_row_wise
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import (
    BlackBoxSettings,
    ContrastiveSettings,
    ObjectiveSettings,
    OwnLossSettings,
    ReconstructionSettings,
    TrainSettings,
)
from secure_apfed.solo import SoloTask

_EVALUATION_ROWS = 1000
_LOCAL_MODELS = "local models"
_MOST_COUNTED = 4096
"""Columns of a passive; wider rows are never narrow, and hold much to count."""


class SingleViewSettings(MethodSettings):
    """The active alone; see `MethodSettings`."""

    name: Literal["single_view"]

    title = "SingleVL"
    predicts_alone = True
    has_passives = False
    trains_privately = True
    stops_early = True
    weighs_classes = True
    tasks = ("classification", "regression")

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        """Return 0: nobody sends anything."""
        return 0


class ApfedSettings(MethodSettings):
    """The settings of APFed, whatever passives optimise; see `MethodSettings`."""

    predicts_alone = True
    representations_from = "active"
    sums_gradients = True
    trains_privately = True
    takes_pairwise = True
    stops_early = True
    weighs_classes = True
    tasks = ("classification", "regression")


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


class ApfedActive(SumLearner):
    """The active: holds the labels, sends guarded representations, learns a model; see `Learner`.
    `rows`: of its table by position of the alignment, (number aligned,). `sum_end`: its end of the
    sum; None: nobody helps, and nothing is released.
    """

    def __init__(
        self,
        own: PartyContext,
        contract: Contract,
        rows: Tensor,
        trainer: "ActiveTrainer",
        releases: Releases,
        sum_end: ActiveSum | None,
    ) -> None:
        super().__init__(sum_end)
        self.name = own.name
        self.contract = contract
        self.trainer = trainer
        self._fitted: LocalModels | None = None
        self._own = own
        self._releases = releases
        self.kept = {"": trainer, "guard": releases.guard}
        self._fresh_networks: FreshFamily | None = None
        self.received: ReceivedSums | None = None
        if own.config.train.meets_labels_after:
            self._fresh_networks = own.fresh_networks
        if sum_end is not None and own.config.train.meets_labels_after:
            self.received = ReceivedSums(len(rows))
            self.kept = {**self.kept, "received": self.received}
        self._least_spread = max(
            (terms.representation.minimum_spread for terms in contract.passives.values()), default=0
        )
        self._only = rows if sum_end and not own.config.train.trains_unaligned_rows else None
        self._people = rows
        self.training_rows = rows_among(own.data.train_rows, self._only)
        self._position_N = torch.full((len(own.data.table.ids),), -1, dtype=torch.int64)
        self._position_N[rows] = torch.arange(len(rows))
        released = {self.name: releases.ledger} if sum_end else {}
        private = trainer.private
        updated = {self.name + UPDATES: private.ledger} if private else {}
        self.ledgers = {**released, **updated}
        self.training = whole_training(own.config, releases.ledger, private)
        guard = releases.guard if sum_end else None
        self.guarantee = guard.describe_guarantee() if guard else NOTHING_RELEASED
        if self.training:
            self.guarantee = self.training.describe_guarantee(guard)
        trainer.weigh_classes(self.learnt, len(own.data.classes))
        is_bounded = guard is not None and math.isfinite(guard.mechanism().mu)
        self._check_due = is_bounded or private is not None

    @property
    def learnt(self) -> Tensor:
        return pick_learnt_rows(self, self._own.config)

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """Represent, ask, update (Alg. 1, active client); rows are of its own table.

        Raises:
            BudgetExhaustedError: sending, or the update, would exceed a privacy budget.
            ModelError: representations, gradients or parameters that are not finite.
            RemoteProtocolError: the sum answers something else; nothing is updated then.
        """
        batch, rows_A = self.forward(step, rows_B)
        released = self.release_batch(batch, rows_A)
        if released is None or self.sum is None:
            return self.trainer.train_on_batch(batch)
        payload = released.payload
        numbers = released.z.flatten(1).shape[1]
        self.sum.send_request(links, Kind.REPRESENTATIONS, step, payload)
        sum_AD = await self.sum.receive_sum(links, step, rows_A, payload, numbers)
        return self.train_on_sum(batch, rows_A, released.z, sum_AD)

    def train_on_sum(self, batch: "Batch", rows_A: Tensor, z_A: Tensor, sum_AD: Tensor) -> float:
        """Descend on the sum, of rows at these positions; keep it where labels come afterwards."""
        if self.received is not None:
            self.received.add_sums(rows_A, sum_AD)
        return self.trainer.train_on_batch(batch, z_A, sum_AD)

    def forward(self, step: int, rows_B: Tensor) -> tuple["Batch", Tensor]:
        """Compute one batch; return it, and the alignment positions of its rows to send, (A,).

        Only aligned rows are sent. None is, and the batch trains the active alone, where they are
        fewer than the contract's minimum, or where this step was answered before without a passive
        that is here again: two sums would tell what that one adds.
        """
        position_B = self._position_N[rows_B]
        aligned = (position_B >= 0).nonzero().flatten()
        help_wanted = bool(self.contract.passives) and len(aligned) >= self.contract.minimum_batch
        if self.sum is not None and self.sum.lacks_somebody(step):
            help_wanted = False
            self.sum.steps_without_all += 1
        if self._check_due and len(rows_B) > 1:
            self.trainer.check_rows(rows_B)
            self._check_due = False
        batch = self.trainer.forward(step, rows_B, aligned if help_wanted else None)
        return batch, position_B[aligned]

    def release_batch(self, batch: "Batch", rows_A: Tensor) -> Released | None:
        """Guard, pack and charge what is to be sent, for every passive alike; None: nothing is.

        What passives would refuse is withheld, and stays charged: the guard has drawn its noise.
        Raises BudgetExhaustedError: sending would exceed the privacy budget; nothing is sent;
        ModelError: representations that are not finite.
        """
        if self.sum is not None:
            self.sum.opened = None
        if batch.h is None:
            return None
        released = self._releases.release(batch.h, step=batch.step, rows=rows_A)
        return None if self.is_near_constant(batch.step, released.z) else released

    def is_near_constant(self, step: int, z_BD: Tensor) -> bool:
        """Return whether passives would refuse this batch as near-constant; then warn."""
        least = self._least_spread
        spread = 1.0
        if least:
            spread = spread_of(z_BD)
        if spread < least:
            warnings.warn(
                f"{self.name}: the representations of step {step} point in one direction (spread "
                f"{spread:.2g} below {least:g}); {self.name} trains on such batches alone. Lower "
                "the learning rate if they go on, or agree on another rules.minimum_spread",
                NarrowBatchWarning,
                stacklevel=2,
            )
        return spread < least

    def finish_locally(self) -> None:
        """Fit local models with the labels, or spread these over h, if the settings say so."""
        train = self._own.config.train
        if train.meets_labels_after:
            self._fitted = self._fit_local_models(self.task_alone())
            self.local_models = self._fitted.as_json()
        elif train.spread_labels:
            self.trainer.spread_labels(self.learnt, Spreading())

    @property
    def _rows_alone(self) -> Tensor:
        """The rows of its table that local models learn from, (U,)."""
        config = self._own.config
        data = self._own.data
        return rows_among(data.train_rows, None if config.train.use_unaligned else self._people)

    def task_alone(self) -> SoloTask:
        """Return its training rows and labels as its baselines have them."""
        labels_N = self.trainer.labels_N.cpu()
        task = SoloTask.from_run(
            self._own.config, self._own.data, self._rows_alone, labels_N=labels_N
        )
        return replace(task, family=self._fresh_networks)

    def _fit_local_models(self, task: SoloTask) -> LocalModels:
        received_UD = None
        if self.received is not None:
            received_UD = self.received.average_sums(self._position_N[self._rows_alone])
        return fit_local_models(
            self.trainer.networks.encoder,
            task,
            combine=self._own.config.train.combine,
            inputs=self._own.config.train.local_models,
            received_UD=received_UD,
        )

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        rows = self._own.data.test_rows
        if self._fitted is None:
            scored = self.trainer.score_rows(rows)
        else:
            labels_N = self.trainer.labels_N.cpu()
            scored = score_model(self._fitted.score_rows_of(self._own.data.table), rows, labels_N)
        return {self._own.config.method.name: scored}

    def rows_with_label(self) -> Tensor:
        rows = self.training_rows
        return rows[self.trainer.labels_N[rows].cpu() != UNLABELLED]

    async def compute_held_out_loss(self, links: Links, steps: StepCounter, rows: Tensor) -> float:
        return self.trainer.loss_on(rows)

    def relabel(self, labels_N: Tensor, train_rows: Tensor) -> None:
        self.trainer.replace_labels(labels_N)
        self.training_rows = rows_among(train_rows, self._only)
        self.trainer.weigh_classes(self.learnt, len(self._own.data.classes))

    def get_solo_networks(self) -> ActiveNetworks | None:
        """Return the active's own model: that is the point of the method.

        None before local models are fitted, where labels come after the exchange.
        """
        if self._own.config.train.meets_labels_after:
            return None if self._fitted is None else self._fitted.networks
        return self.trainer.networks

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return local models fitted without the labels of these rows; None: the networks descend.

        The representation stays: it knows no label.
        """
        if self._fitted is None:
            return None
        task = self.task_alone()
        labelled_n = self._rows_alone[torch.from_numpy(task.labelled)]
        part = torch.isin(labelled_n, rows).nonzero().flatten()
        return self._fit_local_models(task.drop_labels(part.numpy())).networks

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        if self._fitted is not None:
            tensors |= add_prefix(_LOCAL_MODELS, self._fitted.networks.state_dict())
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        state = remove_prefix(_LOCAL_MODELS, tensors)
        if state:
            networks = restore_networks(state, self.trainer.networks)
            self._fitted = LocalModels(networks=networks, used=())


ActiveT = TypeVar("ActiveT", bound=ApfedActive)


class ApfedPassive(SumHelper):
    """A passive: learns no label, keeps its features; see `Helper`. `trainer`: its objective over
    its features in the order of the alignment. `held_N`: which positions are of people that it
    knows, (N,), bool; None: all.
    """

    asks = (Kind.REPRESENTATIONS,)

    def __init__(
        self,
        sum_end: PassiveSum,
        trainer: "PassiveTrainer | BlackBox",
        *,
        held_N: Tensor | None = None,
        defences: Sequence[GradientDefence] = (),
    ) -> None:
        super().__init__(sum_end, {"": trainer})
        self.trainer = trainer
        self._defences = defences
        terms = self.contract.passives[self.name]
        self.terms = terms.representation
        self.weight = terms.weight
        self._aligned = len(trainer.features_N)
        self._held_N = torch.ones(self._aligned, dtype=torch.bool) if held_N is None else held_N
        self._check_due = sum_end.noise is not None

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Check the batch, take one step of its own, and contribute (Alg. 1, passive client)."""
        await self.sum.send_answer(links, *self.compute_contribution(message))

    def compute_contribution(self, message: Envelope) -> tuple[Admitted, NDArray[np.floating]]:
        """Return the contribution: lambda_p times the gradient of each row's own loss, (B, D).

        Raises RemoteProtocolError: the batch breaks a rule of the contract. Then nothing is sent,
        and nothing computed unless the batch may be one that was answered in another session.
        """
        admitted, z_BD = self.admit_batch(message)
        gradient_BD = self.compute_gradient(admitted.step, admitted.rows, z_BD).flatten(1)
        for defence in self._defences:
            gradient_BD = defence.protect_gradient(gradient_BD, Leaving(admitted.step, AGGREGATOR))
        return admitted, gradient_BD.cpu().numpy()

    def admit_batch(self, message: Envelope) -> tuple[Admitted, Tensor]:
        """Admit rows (B,) with representations (B, *shape) that keep to every rule. Raises
        RemoteProtocolError: they break one.
        """
        rows_B, z_BD = parse_representations(
            message, self.terms, aligned=self._aligned, minimum=self.contract.minimum_batch
        )
        check_spread(z_BD, self.terms, sender=message.sender)
        return self.sum.admit_request(message, rows_B), z_BD

    def compute_gradient(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Take one step of its own; return lambda_p times the gradient of each row's loss.

        Zeros for people that it does not know. It learns and helps from no fewer of its own people
        than the contract's minimum batch, and from none whose representations are near-constant
        among those of strangers. An honest batch may have such a part, so it is not refused: zeros
        tell what the sender can compute.
        """
        held_B = self._held_N[rows_B]
        known = int(held_B.sum())
        if self._check_due and known > 1:
            self.trainer.check_rows(rows_B[held_B], z_BD[held_B])
            self._check_due = False
        if known == len(rows_B):
            return self.trainer.train_on_rows(step, rows_B, z_BD, weight=self.weight)
        gradient_BD = torch.zeros_like(z_BD)
        own_BD = z_BD[held_B]
        if known < self.contract.minimum_batch or is_narrow(own_BD, self.terms):
            return gradient_BD
        gained_BD = self.trainer.train_on_rows(step, rows_B[held_B], own_BD, weight=self.weight)
        gradient_BD[held_B] = gained_BD.to(gradient_BD.device)
        return gradient_BD


@dataclass(frozen=True)
class Batch:
    """A batch that waits for its update, in the autograd graph.

    Attributes:
        rows: positions in the own table, (B,).
        loss: mean task loss; None: labels come after the exchange (`train.labels`).
        h: of the rows that passives may help with, before the guard, (A, *shape); None: the batch
            trains the active alone.
    """

    step: int
    rows: Tensor
    loss: Tensor | None
    h: Tensor | None


class ReceivedSums:
    """The sums that came back, added up for each position of the alignment.

    Args:
        people: positions of the alignment, N.
    """

    def __init__(self, people: int) -> None:
        self._sum_ND = torch.zeros((people, 0), dtype=torch.float64)
        self._count_N = torch.zeros(people, dtype=torch.int64)

    def add_sums(self, rows_A: Tensor, sum_AD: Tensor) -> None:
        """Add the sums (A, D) of distinct positions (A,)."""
        if not self._sum_ND.shape[1]:
            self._sum_ND = self._sum_ND.new_zeros((len(self._sum_ND), sum_AD.shape[1]))
        self._sum_ND[rows_A] += sum_AD.detach().double().cpu()
        self._count_N[rows_A] += 1

    def average_sums(self, positions_U: Tensor) -> NDArray[np.float64]:
        """Return the mean sum at each position, (U, D); NaN at -1, and where none came back."""
        sum_UD = self._sum_ND[positions_U]
        count_U1 = torch.where(positions_U < 0, 0, self._count_N[positions_U])[:, None]
        average_UD = torch.where(count_U1 > 0, sum_UD / count_U1, torch.nan)
        return average_UD.numpy()

    def tensors(self) -> dict[str, Tensor]:
        return {"sum": self._sum_ND, "count": self._count_N}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._sum_ND = tensors["sum"].clone()
        self._count_N = tensors["count"].clone()


class ActiveTrainer(Trainer):
    """The active's batches and updates. `task` says what it learns; None: classes."""

    def __init__(
        self,
        owner: str,
        networks: ActiveNetworks,
        *,
        features_N: Tensor,
        labels_N: Tensor,
        train: TrainSettings,
        seed: int,
        private: PrivateUpdates | None = None,
        task: Task | None = None,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.networks = networks
        self.task = task or Classification()
        modules = dict(networks.named_children())
        super().__init__(owner, modules, train=train, seed=seed, optimizer=optimizer)
        self.features_N, self.labels_N = map(self.compute.move_tensor, (features_N, labels_N))
        self.private = private
        self._private = PrivateGradient(owner, modules, private) if private else None
        self._weighs = train.class_weights == "balanced"
        self._reads_labels = not train.meets_labels_after
        self._weights_K: Tensor | None = None

    def weigh_classes(self, rows: Tensor, classes: int) -> None:
        """Count all classes alike, by the labels of these rows of its table, if it is set to."""
        if self._weighs:
            weights_K = compute_balanced_weights(
                self.labels_N[rows.to(self.labels_N.device)], classes
            )
            self._weights_K = self.compute.move_tensor(weights_K)

    def forward(self, step: int, rows_B: Tensor, aligned: Tensor | None) -> Batch:
        """Compute one batch. `aligned`: places within the batch of the rows to send; None: nothing
        is sent. Raises ModelError: parameters that are not finite, under private training.
        """
        self.zero_grad()
        if self._private:
            self._private.forget_batch()
        here_B = rows_B.to(self.compute.device)
        dtype = self.compute.dtype
        picked: Tensor | slice | None = None
        if aligned is not None:
            picked = EVERY if len(aligned) == len(rows_B) else aligned.to(here_B.device)
        with self.forward_pass(step):
            scores_BK, h_A = self.networks(self.features_N[here_B], picked)
        loss = None
        if self._reads_labels:
            loss = self.task.compute_loss(
                scores_BK.to(dtype), self.labels_N[here_B], self._weights_K
            )
        if h_A is not None:
            h_A = h_A.to(dtype)
            if self._private:
                h_A = self._private.finite_rows(h_A.flatten(1)).reshape(h_A.shape)
        return Batch(step, rows_B, loss, h_A)

    def train_on_batch(
        self, batch: Batch, z_A: Tensor | None = None, sum_AD: Tensor | None = None
    ) -> float:
        """Descend on the task loss and the passives' sum together (Eq. 9); return the task loss, or
        0.0 where labels come after the exchange: then a batch without a sum changes nothing.
        `z_A`: what was released, in its graph; `sum_AD`: of all lambda_p A dL_p/dz, flat. Raises
        BudgetExhaustedError: the update would exceed the budget of private training; ModelError:
        the gradient is not finite, where it has a bound.
        """
        loss = batch.loss
        if z_A is not None and sum_AD is not None:
            gradient_A = self.compute.move_tensor(sum_AD / len(sum_AD)).reshape(z_A.shape)
            loss = joint_loss(0.0 if loss is None else loss, z_A, gradient_A)
        if loss is None:
            return 0.0
        if self._private:
            self._private.backward(loss, step=batch.step, rows=batch.rows)
        else:
            loss.backward()
        self.step()
        return 0.0 if batch.loss is None else batch.loss.item()

    def replace_labels(self, labels_N: Tensor) -> None:
        self.labels_N = self.compute.move_tensor(labels_N)

    def check_rows(self, rows_B: Tensor) -> None:
        """Refuse networks, and in private training a loss, in which one row moves another.

        What the guard promises of a row, and DP-SGD of a record, rests on that. Raises
        PromiseError: names what mixes rows, and what moved.
        """
        here_B = rows_B.to(self.compute.device)
        features_B = self.features_N[here_B]
        labels_B = self.labels_N[here_B]
        check_row_wise(
            RowsOut(self.networks, is_whole=self.private is not None), features_B, owner=self._owner
        )
        if self.private is None:
            return
        labelled_B = labels_B != UNLABELLED
        if int(labelled_B.sum()) > 1:
            with torch.no_grad(), self.forward_pass("check"):
                scores_BK, _ = self.networks(features_B[labelled_B], None)
            scores_BK = scores_BK.to(self.compute.dtype)
            check_loss(self.task, scores_BK, labels_B[labelled_B], owner=self._owner)

    def score_rows(self, rows: Tensor) -> Scored:
        """Return the local scores of `rows` of the active's own table (Eq. 11)."""
        with self.evaluation_mode():
            return score_rows(self.task, self._predict_rows, rows, self.labels_N)

    def spread_labels(self, rows_U: Tensor, labeller: Labeller) -> None:
        """Label these rows of the table over h, and fit the last layer of the head to the labels.

        Labelled rows keep their labels, and rows that no label reaches are left out.
        """
        networks = self.networks
        here_U = rows_U.to(self.compute.device)
        linear = last_layer(networks)
        with self.evaluation_mode(), torch.no_grad(), self.forward_pass("spread"):
            h_UD = networks.encoder(self.features_N[here_U])
            read_UD = _capture_input(networks.head, linear, h_UD)
        labels_U = self.labels_N[here_U].cpu().numpy()
        labelled_n = np.flatnonzero(labels_U != UNLABELLED)
        labels_n = labels_U[labelled_n]
        classes = linear.out_features
        targets_UK = labeller.label_rows(h_UD.flatten(1).double(), labelled_n, labels_n, classes)
        targets_UK[labelled_n] = np.eye(classes)[labels_n]
        said_V = np.flatnonzero(targets_UK.any(axis=1))
        # Ridge knows rows that are about 1 long, and a bias is a column of 1.
        read_UD = read_UD.double().cpu()
        size = float(read_UD.square().sum(1).mean().sqrt()) or 1.0
        constant_U1 = torch.full_like(read_UD[:, :1], linear.bias is not None)
        phi_UD = torch.cat([read_UD / size, constant_U1], dim=1)
        fitted = nn.Linear(phi_UD.shape[1], classes, bias=False, dtype=torch.float64)
        fit_linear(fitted, phi_UD.numpy(), targets_UK, taught_V=said_V, labelled_n=labelled_n)
        with torch.no_grad():
            linear.weight.copy_(fitted.weight[:, :-1] / size)
            if linear.bias is not None:
                linear.bias.copy_(fitted.weight[:, -1])

    @torch.no_grad()
    def loss_on(self, rows: Tensor) -> float:
        """Return the mean task loss of `rows` of its own table."""
        with self.evaluation_mode():
            total = sum(
                float(self._compute_loss(rows_B) * len(rows_B))
                for rows_B in rows.to(self.labels_N.device).split(_EVALUATION_ROWS)
            )
        return total / len(rows)

    def _compute_loss(self, rows_B: Tensor) -> Tensor:
        weights_K = None if self._weights_K is None else self._weights_K.float()
        return self.task.compute_loss(
            self._predict_rows(rows_B).float(), self.labels_N[rows_B], weights_K
        )

    def _predict_rows(self, rows_B: Tensor) -> Tensor:
        with self.forward_pass("predict"):
            return score_in_parts(self._score_features, self.features_N, rows_B)

    def _score_features(self, features_B: Tensor) -> Tensor:
        scores_BK: Tensor = self.networks(features_B, None)[0]
        return scores_BK


@draws_nothing
class RowsOut(nn.Module):
    """The outputs of the active's networks for each row.

    These are the representation that is sent and, where all of it `is_whole` under one bound, the
    scores beside it.
    """

    def __init__(self, networks: ActiveNetworks, *, is_whole: bool) -> None:
        super().__init__()
        self.networks = networks
        self.is_whole = is_whole

    def forward(self, features_B: Tensor) -> Tensor:
        scores_BK, h_B = self.networks(features_B)
        assert h_B is not None
        return torch.cat([h_B.flatten(1), scores_BK], dim=1) if self.is_whole else h_B


class PassiveTrainer(Trainer):
    """A passive's descent; `objective` is (z, own features) -> loss, with its networks."""

    def __init__(
        self,
        owner: str,
        objective: nn.Module,
        *,
        features_N: Tensor,
        train: TrainSettings,
        seed: int,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        modules = {"objective": objective}
        super().__init__(
            owner, modules, train=train, seed=seed, optimizer=optimizer, may_be_fixed=True
        )
        self.objective = objective
        self.features_N = self.compute.move_tensor(features_N)

    def check_rows(self, rows_B: Tensor, sent_B: Tensor) -> None:
        """Measure on this batch that an objective which says `row_wise` mixes no rows.

        The charge of one row for each person rests on that.

        Args:
            rows_B: own rows, positions (B,); sent_B: what came for them, z (B, *shape).

        Raises:
            PromiseError: a row's gradient moves with another row; see `check_objective`.
        """
        features_B = self.features_N[rows_B.to(self.compute.device)]
        check_objective(
            self.objective, self.compute.move_tensor(sent_B), features_B, owner=self._owner
        )

    def train_on_rows(self, step: int, rows_B: Tensor, sent_B: Tensor, *, weight: float) -> Tensor:
        """Descend once on its own loss (Eq. 10); return lambda_p B dL_p/dz (Eqs. 7 and 9).

        That is lambda_p times the gradient of each row's own loss, so that a bound on a row does
        not depend on the batch size; the active divides the sum by the number of rows.
        """
        z_B = self.compute.move_tensor(sent_B).requires_grad_()
        self.zero_grad()
        with self.forward_pass(step):
            loss = self.objective(z_B, self.features_N[rows_B.to(self.compute.device)])
        loss.backward()
        self.step()
        if z_B.grad is None:
            raise ModelError(
                f"{self._owner}: no gradient of its loss reaches z, so that it contributes "
                "nothing; compute the loss from z"
            )
        return z_B.grad * (weight * len(z_B))


def _capture_input(head: nn.Module, linear: nn.Linear, h_UD: Tensor) -> Tensor:
    """Return the input of the head's last layer."""
    read: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    try:
        head(h_UD)
    finally:
        hook.remove()
    return read[0]


class SingleView(Method):
    """The method SingleVL (Section 5.1): the active alone; nothing is aligned, nothing is sent."""

    settings: type[MethodSettings] = SingleViewSettings

    def build_active(self, own: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        return active_of(ApfedActive, own, contract, rows, None)

    def make_simulated_step(
        self, active: ActiveRole, passives: Mapping[str, HelperRole]
    ) -> Lockstep:
        assert isinstance(active, ApfedActive)
        helping = [role for role in passives.values() if isinstance(role, ApfedPassive)]

        def run_step(step: int, rows_B: Tensor) -> None:
            batch, rows_A = active.forward(step, rows_B)
            z_A = batch.h
            if z_A is None or active.is_near_constant(step, z_A):
                active.trainer.train_on_batch(batch)
                return
            sent_A = z_A.detach()
            gradients = [
                passive.compute_gradient(step, rows_A, sent_A.clone()) for passive in helping
            ]
            sum_AD = torch.stack([gradient.flatten(1).double() for gradient in gradients]).sum(0)
            active.train_on_sum(batch, rows_A, z_A, sum_AD)

        return run_step


class Apfed(SumMethod, SingleView):
    """The method APFed: the same active, with passives that help; see `Method`."""

    def __init__(self, settings: type[ApfedSettings]) -> None:
        self.settings = settings

    def find_learnt_labels(self, config: RunSettings, held: OwnData, aligned: Tensor) -> Tensor:
        """Return the labelled rows to learn from, with unaligned people if `use_unaligned` is
        set.
        """
        everybody = config.train.use_unaligned
        return (
            held.labelled_rows if everybody else super().find_learnt_labels(config, held, aligned)
        )

    def offer_terms(self, own: PartyContext) -> RepresentationTerms | None:
        if own.name != own.active:
            return None
        check_passives(own.config, own.passives)
        projected = projection_size(own.config, own.passives)
        if projected is None and own.code.projection is not None:
            raise ConfigError(
                f"{own.name}: it brought a projection, and the run sends the encoder's whole "
                "output; say how many numbers are sent, as model.projection: 64"
            )
        _, shape = _make_networks(own, projected)
        guard = guard_for(own)
        return representation_terms(own.config, shape, guard, projected=projected is not None)

    def derive_terms(
        self, own: PartyContext, offers: Mapping[str, RepresentationTerms], session: str
    ) -> SessionTerms:
        representation = offers[own.active]
        projection = projection_size(own.config, own.passives)
        expected = representation_terms(
            own.config,
            representation.shape if projection is None else (projection,),
            guard_for(own),
            projected=projection is not None,
        )
        require_own_terms(own.name, own.active, representation, expected)
        return SessionTerms(
            passives={
                name: PassiveTerms(
                    objective=objective_of(own.config, name),
                    weight=settings_of(own.config, name).weight,
                    representation=representation,
                )
                for name in own.passives
            },
            secure_sum=describe_sum(own, session, representation.shape),
        )

    def build_active(self, own: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        dtype = Compute.from_settings(own.config.train).dtype
        sum_end = SessionSum.from_contract(own, contract).make_active_end(dtype)
        return active_of(ApfedActive, own, contract, rows, sum_end)

    def build_passive(self, own: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        held_N = rows >= 0
        terms = contract.passives[own.name]
        table = own.data.table
        shape = terms.representation.shape
        is_black_box = isinstance(terms.objective, BlackBoxSettings)
        trainer: PassiveTrainer | BlackBox
        if is_black_box:
            trainer = own.code.make_black_box(owner=own.name, rows_N=rows, ids=table.ids)
        else:
            trainer = _make_passive_trainer(own, terms, rows, held_N)
        sum_end = SessionSum.from_contract(own, contract).make_passive_end(
            people=len(rows), held_N=held_N, repeatable=True
        )
        defences = defences_of(own, "contributions")
        is_counted = not is_black_box and math.prod(table.shape) <= _MOST_COUNTED
        if sum_end.noise is None and not defences and is_counted:
            columns = count_columns(table.features[rows[held_N]])
            warn_if_narrow(own.name, columns, math.prod(shape))
        return ApfedPassive(sum_end, trainer, held_N=held_N, defences=defences)


def _make_passive_trainer(
    own: PartyContext, terms: PassiveTerms, rows: Tensor, held_N: Tensor
) -> PassiveTrainer:
    """Return a passive's descent over its rows in the order of the alignment, fitted to those
    held.
    """
    features = own.data.table.features
    assert terms.objective is not None
    shape = terms.representation.shape
    with seed_draws(own.secrets.seed, own.name, "objective"):
        objective = _make_objective(own, terms.objective, representation=shape)
        objective.fit(select_rows(features, rows[held_N]))
    return PassiveTrainer(
        own.name,
        objective,
        features_N=select_rows(features, rows.clamp(min=0)),
        train=own.config.train,
        seed=own.secrets.seed,
        optimizer=own.code.optimizer,
    )


def _make_objective(
    own: PartyContext, settings: ObjectiveSettings, *, representation: Shape
) -> Objective:
    """Return what a passive optimises: its own loss, or one of ours with its own networks.

    Raises:
        ConfigError: the settings say that it brings a loss, and it brought none.
    """
    if isinstance(settings, OwnLossSettings):
        return own.code.make_objective(settings, owner=own.name)
    model = model_of(own.config, own.name)
    features = own.data.table.shape
    kind: type[Objective] = OBJECTIVES[settings.name]
    return kind(
        settings,
        representation=representation,
        features=features,
        model=model,
        family=own.find_family(model, features),
    )


def active_of(
    kind: type[ActiveT],
    own: PartyContext,
    contract: Contract,
    rows: Tensor,
    sum_end: ActiveSum | None,
) -> ActiveT:
    """Return an active of this kind with networks at their reproducible start; see
    `ApfedActive`.
    """
    config = own.config
    table = own.data.table
    guard = guard_for(own)
    networks, _ = _make_networks(own, projection_size(config, own.passives) if sum_end else None)
    assert table.labels is not None
    private = private_updates(own, guard)
    trainer = ActiveTrainer(
        own.name,
        networks,
        features_N=table.features,
        labels_N=table.labels,
        train=config.train,
        seed=own.secrets.seed,
        private=private,
        task=task_of(own),
        optimizer=own.code.optimizer,
    )
    releases = Releases(guard, ledger_for(own, guard, aligned=len(rows)))
    return kind(own, contract, rows, trainer, releases, sum_end)


def _make_networks(own: PartyContext, projection: int | None) -> tuple[ActiveNetworks, Shape]:
    """Return the active's networks at their reproducible start, and the shape of one row of z."""
    model = own.config.model
    seed = own.secrets.seed
    features = own.data.table.shape
    family = own.find_family(model, features)
    with seed_draws(seed, own.name, "encoder"), name_part(own.name, "encoder"):
        encoder = family.make_encoder(features, model)
    with name_part(own.name, "encoder"):
        shape = output_shape(encoder, features)
    with seed_draws(seed, own.name, "head"), name_part(own.name, "head"):
        head = family.make_head(math.prod(shape), outputs_of(own), model)
    if own.code.head is not None:
        with name_part(own.name, "head"):
            require_scores(head, shape, outputs_of(own))
    if projection is None:
        return ActiveNetworks(encoder, head), shape
    with seed_draws(seed, own.name, "projection"), name_part(own.name, "projection"):
        sent = own.code.make_projection(projection, shape)
    return ActiveNetworks(encoder, head, sent), (projection,)
