"""SingleVL (Section 5.1): the active learns alone, from its own features and labels.

`SingleViewActive` is an active without passives: it trains on its task loss and measures its model.
If configured, it ends by spreading labels over h, its representations, or by fitting local models.
Nothing is aligned and nothing is sent. In APFed the same active also requests the passives'
gradients (`secure_apfed.methods.apfed`). The arithmetic is in
`secure_apfed.learning.trainers.ActiveTrainer`.

Letters: N rows of a table, B rows of a batch.
"""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from secure_apfed.contract import Contract
from secure_apfed.data import UNLABELLED
from secure_apfed.exchange import Links
from secure_apfed.learning.descent import ActiveNetworks, add_prefix, remove_prefix
from secure_apfed.measures.table import Scored
from secure_apfed.methods.alignment import intersect_rows
from secure_apfed.methods.local_models import FinalFit
from secure_apfed.methods.method import (
    ActiveRole,
    HelperRole,
    Lockstep,
    Method,
    StepCounter,
)
from secure_apfed.methods.party import ActiveParts, PartyContext
from secure_apfed.settings import MethodSettings, RunSettings

_LOCAL_MODELS = "local models"
"""Prefix of the local models' tensors in a checkpoint."""


class SingleViewSettings(MethodSettings):
    """The active alone; see `MethodSettings`."""

    name: Literal["single_view"]

    title = "SingleVL"
    can_predict_locally = True
    has_passives = False
    can_use_dp_sgd = True
    can_stop_early = True
    can_weight_classes = True
    tasks = ("classification", "regression")

    def bound_linear_combinations(self, config: RunSettings, classes: int) -> float:
        """Return how many linear combinations of a person's features are revealed: none.

        No party sends anything.
        """
        return 0


class SingleViewActive(ActiveRole):
    """The active with a model of its own features; see `ActiveRole`.

    Attributes:
        trainer: the active's networks, their optimiser, and its table.
        final_fit: the local models that learn the labels at the end (`train.labels: after`); None:
            the networks learn them step by step.
    """

    final_fit: FinalFit | None = None

    def __init__(self, parts: ActiveParts) -> None:
        """Make the active's role, and choose its training rows.

        `parts`: the active's inputs, networks and privacy ledgers.
        """
        super().__init__()
        party = parts.party
        protection = parts.protection
        people = parts.aligned_rows
        self.name = party.name
        self.contract = parts.contract
        self.trainer = parts.trainer
        self.checkpoint_parts = {"": parts.trainer, "guard": protection.charged_guard.guard}
        self.ledgers = protection.list_ledgers(party.name)
        self.dp_sgd_training = protection.whole_training
        self.guarantee = protection.describe_guarantee()
        self._party = party
        # The table rows that may be trained on; None: all.
        self._training_people: Tensor | None = None
        if people is not None and not party.config.train.has_unaligned_rows_in_batches:
            self._training_people = people
        if people is not None and party.config.train.is_exchange_label_free:
            self.final_fit = FinalFit(party, people)
            self.checkpoint_parts = {
                **self.checkpoint_parts,
                "received": self.final_fit.received_sums,
            }
        self._set_training_rows(party.data.train_rows)

    def _set_training_rows(self, train_rows: Tensor) -> None:
        """Train on these table rows from now on, and weigh classes by their labels.

        If the settings exclude unaligned rows, only the aligned rows of them are used.
        """
        self.training_rows = intersect_rows(train_rows, self._training_people)
        self.trainer.weigh_classes(self.learnt_rows, len(self._party.data.classes))

    @property
    def learnt_rows(self) -> Tensor:
        """The training rows without the rows that are held out for validation."""
        return self.list_learnt_rows(self._party.config)

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float | Tensor:
        """Take one step of gradient descent on the loss of these table rows; return the loss.

        It sends nothing. Raises BudgetExhaustedError: the update would exceed the privacy budget of
        DP-SGD; ModelError: outputs, parameters or gradients are not finite.
        """
        return self.trainer.train_on_batch(self.trainer.forward(step, rows_B, None))

    def finish_locally(self) -> None:
        """End the training as configured: fit local models, or spread labels over h, or neither.

        h is the representation of a row by the trained encoder.
        """
        trainer = self.trainer
        if self.final_fit is not None:
            local_models = self.final_fit.fit_models(trainer.networks.encoder, trainer.labels_N)
            self.local_models = local_models.as_json()
        elif self._party.config.train.spread_labels:
            trainer.fit_head_by_label_spreading(self.learnt_rows)

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return the scores of the test rows, by the method's name; sends nothing.

        Local models give them once they are fitted, otherwise the networks.
        """
        rows = self._party.data.test_rows
        if self.final_fit is None or self.final_fit.fitted_models is None:
            scored = self.trainer.score_rows(rows)
        else:
            scored = self.final_fit.score_rows(rows, self.trainer.labels_N)
        return {self._party.config.method.name: scored}

    def rows_with_label(self) -> Tensor:
        """Return the training rows that have a label."""
        rows = self.training_rows
        return rows[self.trainer.labels_N[rows].cpu() != UNLABELLED]

    async def compute_held_out_loss(self, links: Links, steps: StepCounter, rows: Tensor) -> float:
        """Return the mean task loss of these rows; no other party is asked."""
        return self.trainer.compute_mean_loss(rows)

    def relabel(self, labels_N: Tensor, train_rows: Tensor) -> None:
        """Train on these labels and table rows from now on.

        It is called when a label mechanism in stages has randomised more labels. `labels_N`: the
        randomised labels of all N rows.
        """
        self.trainer.replace_labels(labels_N)
        self._set_training_rows(train_rows)

    def get_active_networks(self) -> ActiveNetworks | None:
        """Return the active's own model; None if it consists of local models not fitted yet."""
        return self.trainer.networks if self.final_fit is None else self.final_fit.networks

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return local models fitted without the labels of these table rows.

        None: the run has no local models, or they are not fitted yet.
        """
        if self.final_fit is None:
            return None
        trainer = self.trainer
        return self.final_fit.refit_excluding(rows, trainer.networks.encoder, trainer.labels_N)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the networks and of the fitted local models."""
        fitted = {} if self.final_fit is None else self.final_fit.tensors()
        return super().tensors() | add_prefix(_LOCAL_MODELS, fitted)

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the networks, and local models if there are any."""
        super().load_tensors(tensors, next_step=next_step)
        if self.final_fit is not None:
            state = remove_prefix(_LOCAL_MODELS, tensors)
            self.final_fit.restore(state, self.trainer.networks)


class SingleView(Method):
    """The method SingleVL; see `Method`."""

    settings: type[MethodSettings] = SingleViewSettings

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role; `rows` is empty, since nothing is aligned."""
        # No representations are sent, so only DP-SGD updates need an account.
        return SingleViewActive(
            party.build_active_parts(contract, rows, sends_representations=False)
        )

    def make_simulated_step(
        self, active: ActiveRole, passives: Mapping[str, HelperRole]
    ) -> Lockstep:
        """Return a function that runs one training step without messages.

        It maps a step number and table rows to the loss; there are no passives.
        """
        assert isinstance(active, SingleViewActive)
        trainer = active.trainer
        return lambda step, rows_B: trainer.train_on_batch(trainer.forward(step, rows_B, None))
