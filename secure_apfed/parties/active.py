"""The active party of APFed: holds the labels, sends guarded representations, learns a model.

Run by: the one organisation that will use the model, alone afterwards. Emits its
representations after the guard and nothing else; reads the sum of the passives' gradients.
Letters: N rows of its table, B batch, D numbers of a representation, K classes.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums import SumReceiver
from apfed_protocols.sums.interface import StepBinding
from secure_apfed.contract import Contract
from secure_apfed.data import UNLABELLED, PartyTable
from secure_apfed.defences import RepresentationChain
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.labellers import Spreading
from secure_apfed.learning.apfed import ActiveNetworks, ActiveTrainer, Batch
from secure_apfed.learning.checks import spread_of
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.private_gradient import PrivateUpdates
from secure_apfed.learning.release import Releases
from secure_apfed.learning.spread import spread_labels
from secure_apfed.measures import ACCURACY, Scored
from secure_apfed.parties.party import Party
from secure_apfed.parties.rules import RefusedSums, bind_step
from secure_apfed.privacy import PrivacyLedger, RepresentationGuard
from secure_apfed.settings.training import TrainSettings
from secure_apfed.tasks import Task

__all__ = ["ActiveParty"]


@dataclass(frozen=True)
class _Pending:
    """What waits for the sum: z in the autograd graph, and what the sum must answer."""

    z: Tensor
    binding: StepBinding


class ActiveParty(Party):
    """Represents a batch, then updates from the task loss and the sum (Alg. 1).

    Args:
        table: its rows and labels.
        alignment: positions in its table of the aligned people, (number aligned,).
        networks: its three modules.
        guard, ledger: what protects the representations, and the account of what was sent.
        receiver: its end of the secure sum; None where there is no passive.
        refused: where it notes a sum that it refuses; None: nowhere.
        private: what makes its updates private; None: nothing does.
        defences: what its representations go through before the guard.
        task: what it learns; None: classes.

    Attributes:
        bind: what a contribution must answer, from session, step, rows and payload.
        opened: what the last step decoded, (B, D): the sum of lambda_p B dL_p/dz. Its own record;
            no message holds it.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        *,
        table: PartyTable,
        alignment: Tensor,
        networks: ActiveNetworks,
        guard: RepresentationGuard,
        ledger: PrivacyLedger,
        receiver: SumReceiver | None,
        refused: RefusedSums | None = None,
        train: TrainSettings,
        compute: Compute,
        seed: int,
        private: PrivateUpdates | None = None,
        defences: RepresentationChain | None = None,
        task: Task | None = None,
    ) -> None:
        super().__init__(name, contract)
        assert table.labels is not None
        self.receiver = receiver
        self.bind: Callable[[str, int, Tensor, bytes], StepBinding] = bind_step
        self._refused = refused or RefusedSums(self.name, None, allowed=0)
        self._agreed = contract.digest.hex()
        self._releases = Releases(guard, ledger)
        self._position_N = torch.full((len(table.ids),), -1, dtype=torch.int64)
        self._position_N[alignment] = torch.arange(len(alignment))
        self.trainer = ActiveTrainer(
            self.name, networks, features_N=table.features, labels_N=table.labels, train=train,
            compute=compute, seed=seed, defences=defences, private=private, task=task,
        )  # fmt: skip
        self._batch: Batch | None = None
        self._pending: _Pending | None = None
        self.opened: Tensor | None = None

    @property
    def networks(self) -> ActiveNetworks:
        return self.trainer.networks

    @property
    def ledger(self) -> PrivacyLedger:
        return self._releases.ledger

    def represent(self, step: int, rows_B: Tensor) -> bytes | None:
        """Compute one batch; return the representations, the same bytes for every passive.

        Only the aligned rows of the batch are sent; with fewer of them than the contract's
        minimum, or near-constant ones, nothing is (None), and the batch trains the active alone.

        Args:
            step: from 0, rising.
            rows_B: positions in its own table.

        Raises:
            BudgetExhaustedError: sending would exceed the privacy budget; nothing is sent.
            ModelError: representations, or under private training parameters, are not finite.
        """
        self._batch = self._pending = self.opened = None
        batch, rows_A = self.forward(step, rows_B)
        payload = None if batch.sent is None else self._release(step, rows_A, batch.sent)
        # Only now: a batch whose release failed waits for no update.
        self._batch = batch
        return payload

    def forward(self, step: int, rows_B: Tensor) -> tuple[Batch, Tensor]:
        """Compute one batch; return it, and the alignment positions of its rows to send, (A,).

        Raises:
            ModelError: see `represent`.
        """
        position_B = self._position_N[rows_B]
        aligned = (position_B >= 0).nonzero().flatten()
        help_wanted = bool(self.contract.passives) and len(aligned) >= self.contract.minimum_batch
        batch = self.trainer.forward(step, rows_B, aligned if help_wanted else None)
        return batch, position_B[aligned]

    def _release(self, step: int, rows_A: Tensor, h_A: Tensor) -> bytes | None:
        released = self._releases.release(h_A, step=step, rows=rows_A)
        if self.is_narrow(step, released.z):
            return None
        # The same payload goes to every passive, and the sum that answers it is waited for.
        binding = self.bind(self.contract.session, step, rows_A, released.payload)
        self._pending = _Pending(released.z, binding)
        return released.payload

    def is_narrow(self, step: int, z_BD: Tensor) -> bool:
        """Whether passives would refuse this batch as near-constant; warns then."""
        least = max(
            terms.representation.minimum_spread for terms in self.contract.passives.values()
        )
        spread = spread_of(z_BD) if least else 1.0
        if spread < least:
            warnings.warn(
                f"{self.name}: the representations of step {step} point in one direction (spread "
                f"{spread:.2g} below {least:g}); {self.name} trains on such batches alone. Lower "
                "the learning rate if they go on, or agree on another rules.minimum_spread",
                NarrowBatchWarning,
                stacklevel=2,
            )
        return spread < least

    def update(self, combined: bytes | None) -> float:
        """Backpropagate the task loss and the sum together (Eq. 9), then step.

        Args:
            combined: the sum as the aggregator sent it, or None where `represent` gave nothing.

        Returns:
            The task loss of the batch, with the penalties of its defences.

        Raises:
            LocalProtocolError: no batch waits, or a sum is missing or was not asked for.
            BudgetExhaustedError: the update would exceed the budget of private training.
            RemoteProtocolError: the sum answers something else. Nothing is updated then, and no
                sum of this session is opened any more; it is noted that one was refused.
        """
        batch, pending = self._batch, self._pending
        if batch is None or (pending is None) != (combined is None):
            raise LocalProtocolError(
                f"{self.name}: every batch is represented first and updated from once, with the "
                "sum where representations were sent and without one where none were"
            )
        z_A = sum_AD = None
        if pending is not None and combined is not None:
            z_A, flat_AD = pending.z, pending.z.flatten(1)
            sum_AD = self.open_sum(combined, (len(flat_AD), flat_AD.shape[1]), pending.binding)
        loss = self.trainer.update(batch, z_A, sum_AD)
        self._batch = self._pending = None
        return loss

    def open_sum(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> Tensor:
        """Open the sum that answers `binding`, (B, D); a refusal is noted before it is raised.

        Raises:
            LocalProtocolError, RemoteProtocolError: see `SumReceiver.decode`.
        """
        assert self.receiver is not None
        with self._refused.noting(step=binding.step, contract=self._agreed):
            sum_BD = torch.from_numpy(self.receiver.decode(combined, shape, binding))
        self.opened = sum_BD.to(self.trainer.compute.dtype)
        return sum_BD

    def relabel(self, labels_N: Tensor) -> None:
        """Train on these labels of its table from now on."""
        self.trainer.relabel(labels_N)

    def weigh_classes(self, rows: Tensor, classes: int) -> None:
        """Count all classes alike in its loss, by the labels of these rows, if it is set to."""
        self.trainer.weigh_classes(rows, classes)

    def spread_labels(self, rows: Tensor) -> None:
        """Spread its labels over h of these rows of its table, and refit its head to them."""
        spread_labels(self.trainer, rows, Spreading())

    def with_label(self, rows: Tensor) -> Tensor:
        """Those of `rows` of its own table with a label to learn from."""
        return rows[self.trainer.labels_N[rows].cpu() != UNLABELLED]

    def loss_on(self, rows: Tensor) -> float:
        """Mean task loss of `rows` of its own table, alone."""
        return self.trainer.loss_on(rows)

    def accuracy(self, rows: Tensor) -> float:
        """Share of `rows` of its own table that the model labels correctly, alone (Eq. 11)."""
        return ACCURACY.of(self.scored(rows))

    def scored(self, rows: Tensor) -> Scored:
        """What the model says of `rows` of its own table, alone."""
        return self.trainer.scored(rows)

    def tensors(self) -> dict[str, Tensor]:
        return self.trainer.tensors() | prefixed("guard", self._releases.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.trainer.load_tensors(tensors)
        self._releases.load_tensors(without_prefix("guard", tensors))
