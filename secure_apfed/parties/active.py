"""The active party of APFed: holds the labels, sends guarded representations, learns a model.

Run by: the one organisation that will use the model, alone afterwards. Emits its
representations after the guard and nothing else; reads the sum of the passives' gradients.
Letters: N rows of its table, B batch, D numbers of a representation, K classes.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protocols.errors import LocalProtocolError
from protocols.sums import SumReceiver
from protocols.sums.interface import StepBinding
from secure_apfed.config.training import TrainSettings
from secure_apfed.data import PartyTable
from secure_apfed.defences import RepresentationChain
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.exchange import Envelope, Kind
from secure_apfed.learning.apfed import ActiveLearner, ActiveNetworks, Batch
from secure_apfed.learning.checks import spread_of
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.private_gradient import PrivateUpdates
from secure_apfed.learning.release import Releases
from secure_apfed.parties.party import Party, Seat
from secure_apfed.parties.rules import RefusedSums, bind_step
from secure_apfed.privacy import PrivacyLedger, RepresentationGuard

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

    Attributes:
        opened: what it decoded last, (B, D): the sum of lambda_p B dL_p/dz. Its own record; no
            message holds it.
    """

    def __init__(
        self,
        seat: Seat,
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
    ) -> None:
        super().__init__(seat)
        assert table.labels is not None
        self.receiver = receiver
        self._refused = refused or RefusedSums(self.name, None, allowed=0)
        self._releases = Releases(guard, ledger)
        self._position_N = torch.full((len(table.ids),), -1, dtype=torch.int64)
        self._position_N[alignment] = torch.arange(len(alignment))
        self.learner = ActiveLearner(
            self.name, networks, features_N=table.features, labels_N=table.labels, train=train,
            compute=compute, seed=seed, defences=defences, private=private,
        )  # fmt: skip
        self._batch: Batch | None = None
        self._pending: _Pending | None = None
        self.opened: Tensor | None = None

    @property
    def networks(self) -> ActiveNetworks:
        return self.learner.networks

    @property
    def ledger(self) -> PrivacyLedger:
        return self._releases.ledger

    def represent(self, step: int, rows_B: Tensor) -> list[Envelope]:
        """Compute one batch; return the same representations for every passive.

        Only the aligned rows of the batch are sent; with fewer of them than the contract's
        minimum, or near-constant ones, nothing is, and the batch trains the active alone.

        Args:
            step: from 0, rising.
            rows_B: positions in its own table.

        Raises:
            BudgetExhaustedError: sending would exceed the privacy budget; nothing is sent.
            ModelError: representations, or under private training parameters, are not finite.
        """
        self._batch = self._pending = None
        position_B = self._position_N[rows_B]
        aligned = (position_B >= 0).nonzero().flatten()
        help_wanted = bool(self.contract.passives) and len(aligned) >= self.contract.minimum_batch
        batch = self.learner.forward(step, rows_B, aligned if help_wanted else None)
        envelopes = []
        if batch.sent is not None:
            released = self._releases.release(batch.sent, step=step, rows=position_B[aligned])
            if not self._is_narrow(step, released.z):
                envelopes = self._send(step, position_B[aligned], released.z, released.payload)
        # Only now: a batch whose release failed waits for no update.
        self._batch = batch
        return envelopes

    def _is_narrow(self, step: int, z_BD: Tensor) -> bool:
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

    def _send(self, step: int, rows_B: Tensor, z_BD: Tensor, payload: bytes) -> list[Envelope]:
        """Write the same payload to every passive, and wait for the sum that answers it."""
        self._pending = _Pending(z_BD, bind_step(self.contract.session, step, rows_B, payload))
        return [
            self.outbox.write(Kind.REPRESENTATIONS, step, passive, payload)
            for passive in self.contract.passives
        ]

    def update(self, envelope: Envelope | None) -> float:
        """Backpropagate the task loss and the sum together (Eq. 9), then step.

        Args:
            envelope: the sum, or None where `represent` sent nothing.

        Returns:
            The task loss of the batch, with the penalties of its defences.

        Raises:
            LocalProtocolError: no batch waits, or a sum is missing or was not asked for.
            BudgetExhaustedError: the update would exceed the budget of private training.
            RemoteProtocolError: the sum answers something else. Nothing is updated then, and no
                sum of this session is opened any more; it is noted that one was refused.
        """
        batch, pending = self._batch, self._pending
        if batch is None or (pending is None) != (envelope is None):
            raise LocalProtocolError(
                f"{self.name}: every batch is represented first and updated from once, with the "
                "sum where representations were sent and without one where none were"
            )
        sum_AD = self._decode(envelope, pending) if pending and envelope else None
        loss = self.learner.update(batch, pending.z if pending else None, sum_AD)
        self._batch = self._pending = None
        return loss

    def _decode(self, envelope: Envelope, pending: _Pending) -> Tensor:
        """The sum, flat; a refusal of it is noted."""
        assert self.receiver is not None
        flat_AD = pending.z.flatten(1)
        shape = (len(flat_AD), flat_AD.shape[1])
        step, contract = pending.binding.step, self.contract.digest.hex()
        with self._refused.noting(step=step, contract=contract):
            values_AD = self.receiver.decode(envelope.payload, shape, pending.binding)
        sum_AD = torch.from_numpy(values_AD)
        self.opened = sum_AD.to(pending.z.dtype)
        return sum_AD

    def accuracy(self, rows: Tensor) -> float:
        """Share of `rows` of its own table that the model labels correctly, alone (Eq. 11)."""
        return self.learner.accuracy(rows)

    def tensors(self) -> dict[str, Tensor]:
        return self.learner.tensors() | prefixed("guard", self._releases.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.learner.load_tensors(tensors)
        self._releases.load_tensors(without_prefix("guard", tensors))
