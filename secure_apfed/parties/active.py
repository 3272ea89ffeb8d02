"""The active party of APFed: holds the labels, sends guarded representations, learns a model.

Run by: the one organisation that will use the model, alone afterwards. Emits its
representations after the guard and nothing else; reads the sum of the passives' gradients.
Letters: N rows of its table, B batch, D numbers of a representation, K classes.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocols.errors import LocalProtocolError
from protocols.sums import SumReceiver
from protocols.sums.interface import StepBinding
from secure_apfed.contract import Contract
from secure_apfed.data import PartyTable
from secure_apfed.defences import RepresentationChain
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.exchange import pack
from secure_apfed.parties.descent import Descent, named_below, under
from secure_apfed.parties.directions import spread_of
from secure_apfed.parties.party import Compute, Party
from secure_apfed.parties.private_gradient import PrivateGradient, PrivateUpdates
from secure_apfed.parties.refused_sums import RefusedSums
from secure_apfed.parties.rules import bind_step
from secure_apfed.privacy import PrivacyLedger, RepresentationGuard
from secure_apfed.settings.training import TrainSettings

__all__ = ["ActiveNetworks", "ActiveParty", "accuracy_of"]

_EVALUATION_ROWS = 1000


@dataclass(frozen=True)
class ActiveNetworks:
    """f (encoder), the projection that is sent (None: the encoder's output), g (head)."""

    encoder: nn.Module
    head: nn.Module
    projection: nn.Module | None = None

    def modules(self) -> dict[str, nn.Module]:
        """By name, those that exist."""
        named = {"encoder": self.encoder, "head": self.head, "projection": self.projection}
        return {name: module for name, module in named.items() if module is not None}


@dataclass(frozen=True)
class _Batch:
    """What waits for its update: the step, positions in the own table, the mean task loss."""

    step: int
    rows: Tensor
    loss: Tensor


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
    ) -> None:
        super().__init__(name, contract)
        assert table.labels is not None
        self.receiver, self.ledger = receiver, ledger
        self.bind: Callable[[str, int, Tensor, bytes], StepBinding] = bind_step
        self._refused = refused or RefusedSums(self.name, None, allowed=0)
        self.networks = networks
        self._guard = guard
        self._defences = defences or RepresentationChain()
        self._features_N = compute.place(table.features)
        self._labels_N = compute.place(table.labels)
        self._position_N = torch.full((len(table.ids),), -1, dtype=torch.int64)
        self._position_N[alignment] = torch.arange(len(alignment))
        self._modules = {
            key: module.to(compute.device, compute.dtype)
            for key, module in {**networks.modules(), "defences": self._defences}.items()
        }
        self._descent = Descent(self.name, self._modules, train)
        self._private = PrivateGradient(self.name, self._modules, private) if private else None
        self._compute, self._seed = compute, seed
        self._batch: _Batch | None = None
        self._pending: _Pending | None = None
        self.opened: Tensor | None = None

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
        self._descent.begin()
        if self._private:
            self._private.forget()
        self._batch = self._pending = self.opened = None
        here_B = rows_B.to(self._compute.device)
        position_B = self._position_N[rows_B]
        aligned = (position_B >= 0).nonzero().flatten()
        help_wanted = bool(self.contract.passives) and len(aligned) >= self.contract.minimum_batch
        with self._compute.forward(self._seed, self.name, step):
            h_BD = self.networks.encoder(self._features_N[here_B])
            scores_BK = self.networks.head(h_BD)
            sent_BD = self._sent_part(h_BD, aligned) if help_wanted else None
        loss = F.cross_entropy(scores_BK.to(self._compute.dtype), self._labels_N[here_B])
        payload = None
        if sent_BD is not None:
            seen_B = self._features_N[here_B[aligned.to(here_B.device)]]
            sent_BD, penalty = self._defences(sent_BD.to(self._compute.dtype), seen_B, step)
            loss = loss if penalty is None else loss + penalty
            payload = self._release(step, position_B[aligned], sent_BD)
        # Only now: a batch whose release failed waits for no update.
        self._batch = _Batch(step, rows_B, loss)
        return payload

    def _sent_part(self, h_BD: Tensor, aligned: Tensor) -> Tensor:
        """The projection of the aligned rows; maps are large, so rows are picked after it."""
        projection = self.networks.projection
        projected: Tensor = h_BD if projection is None else projection(h_BD)
        every = len(aligned) == len(h_BD)
        return projected if every else projected[aligned.to(h_BD.device)]

    def _release(self, step: int, rows_B: Tensor, h_BD: Tensor) -> bytes | None:
        repeats_B = self._guard.repeats(rows_B)
        flat_BD = h_BD.flatten(1)
        if self._private:
            flat_BD = self._private.finite_rows(flat_BD)
        flat_BD = self._guard.release(flat_BD, step=step, rows=rows_B)
        z_BD = flat_BD.reshape(h_BD.shape)
        payload = pack({"rows": rows_B, "z": z_BD})
        digest = hashlib.sha256(payload).digest()
        # Charged even if it stays here: a frozen guard counts what it made as released.
        self.ledger.charge(step=step, rows=rows_B, digest=digest, repeats=repeats_B)
        if self._is_narrow(step, z_BD):
            return None
        # The same payload goes to every passive, and the sum that answers it is waited for.
        binding = self.bind(self.contract.session, step, rows_B, payload)
        self._pending = _Pending(z_BD, binding)
        return payload

    def _is_narrow(self, step: int, z_BD: Tensor) -> bool:
        """Whether passives would refuse this batch as near-constant; warns then."""
        least = max(one.representation.minimum_spread for one in self.contract.passives.values())
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
        sum_BD = None
        if pending is not None and combined is not None:
            sum_BD = self._decode(combined, pending)
        self._backpropagate(batch, pending, sum_BD)
        self._descent.step()
        self._batch = self._pending = None
        return batch.loss.item()

    def _backpropagate(
        self, batch: _Batch, pending: _Pending | None, sum_BD: Tensor | None
    ) -> None:
        """Give every parameter its gradient, the private one where training is private."""
        with self._private.watching() if self._private else nullcontext():
            if pending is None:
                batch.loss.backward()
            else:
                torch.autograd.backward([batch.loss, pending.z], [None, sum_BD])
        if self._private:
            self._private.replace(step=batch.step, rows=batch.rows)

    def _decode(self, combined: bytes, pending: _Pending) -> Tensor:
        z_BD = pending.z
        sum_BD = self.open_sum(combined, (len(z_BD), z_BD.flatten(1).shape[1]), pending.binding)
        return self._compute.place(sum_BD / len(z_BD)).reshape(z_BD.shape)

    def open_sum(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> Tensor:
        """Open the sum that answers `binding`, (B, D); a refusal is noted before it is raised.

        Raises:
            LocalProtocolError, RemoteProtocolError: see `SumReceiver.decode`.
        """
        assert self.receiver is not None
        with self._refused.noting(step=binding.step, contract=self.contract.digest.hex()):
            sum_BD = torch.from_numpy(self.receiver.decode(combined, shape, binding))
        self.opened = sum_BD.to(self._compute.dtype)
        return sum_BD

    def relabel(self, labels_N: Tensor) -> None:
        """Train on these labels of its table from now on."""
        self._labels_N = self._compute.place(labels_N)

    def accuracy(self, rows: Tensor) -> float:
        """Share of `rows` of its own table that the model labels correctly, alone (Eq. 11)."""
        self._set_training(False)
        try:
            return accuracy_of(self._predict, rows, self._labels_N)
        finally:
            self._set_training(True)

    def _predict(self, rows_B: Tensor) -> Tensor:
        networks = self.networks
        with self._compute.forward(self._seed, self.name, "predict"):
            scores_BK: Tensor = networks.head(networks.encoder(self._features_N[rows_B]))
        return scores_BK

    def _set_training(self, training: bool) -> None:
        for module in self._modules.values():
            module.train(training)

    def tensors(self) -> dict[str, Tensor]:
        """Its state, for its own checkpoint."""
        return self._descent.tensors() | under("guard", self._guard.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore its state."""
        self._descent.load_tensors(tensors)
        self._guard.load_tensors(named_below("guard", tensors))


@torch.no_grad()
def accuracy_of(predict: Callable[[Tensor], Tensor], rows: Tensor, labels_N: Tensor) -> float:
    """Share of `rows` whose highest score is the label's; NaN where there are no rows."""
    correct = 0
    for rows_B in rows.to(labels_N.device).split(_EVALUATION_ROWS):
        correct += int((predict(rows_B).argmax(1) == labels_N[rows_B]).sum())
    return correct / len(rows) if len(rows) else float("nan")
