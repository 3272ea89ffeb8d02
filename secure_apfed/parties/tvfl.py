"""The parties of typical VFL (Section 2 of APFed): everybody encodes, the active concatenates.

Run by: the same organisations, for comparison. A passive sends its representations h^p
(behind its own guard) and receives the gradient of the task loss on them, which tells it
about labels. Letters: N rows of a table, B batch, K classes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract
from secure_apfed.data import PartyTable
from secure_apfed.defences import (
    GradientChain,
    LabelCode,
    Leaving,
    RepresentationChain,
    TrueLabels,
)
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.models import Shape
from secure_apfed.parties.descent import Descent, named_below, under
from secure_apfed.parties.party import Compute, Party
from secure_apfed.parties.rules import Allowance, StepGate, check_rows, read_representations
from secure_apfed.privacy import PrivacyLedger, RepresentationGuard
from secure_apfed.settings.training import TrainSettings

__all__ = ["TvflActive", "TvflPassive"]


class TvflActive(Party):
    """Encodes its own view, asks for the passives', trains the head on all of them.

    Args:
        table: its rows and labels; alignment: their positions in the common order.
        encoder, head: its networks; the head reads all representations, concatenated.
        defences: what the gradients go through that it returns.
        code: what it learns instead of its labels.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        *,
        table: PartyTable,
        alignment: Tensor,
        encoder: nn.Module,
        head: nn.Module,
        train: TrainSettings,
        compute: Compute,
        seed: int,
        defences: GradientChain | None = None,
        code: LabelCode | None = None,
    ) -> None:
        super().__init__(name, contract)
        assert table.labels is not None
        self.features_N = compute.place(table.features)
        self.labels_N = compute.place(table.labels)
        self._defences, self._code = defences or GradientChain(), code or TrueLabels()
        self._targets_N = compute.place(self._code.targets(self.labels_N))
        self.encoder = encoder.to(compute.device, compute.dtype)
        self.head = head.to(compute.device, compute.dtype)
        self._alignment = alignment
        self._modules = {"encoder": self.encoder, "head": self.head}
        self._descent = Descent(self.name, self._modules, train)
        self.compute, self._seed = compute, seed

    @staticmethod
    def request(rows_B: Tensor, *, learn: bool = True) -> bytes:
        """Ask for the representations of these alignment positions, of every passive alike."""
        return pack({"rows": rows_B}, {"learn": learn})

    def read(self, rows_B: Tensor, answers: Sequence[Envelope]) -> dict[str, Tensor]:
        """The passives' representations of the rows that were asked for, by passive.

        Raises:
            RemoteProtocolError: a passive is missing or answered twice, other rows or shapes,
                or norms out of bounds.
        """
        senders = [envelope.sender for envelope in answers]
        if sorted(senders) != sorted(self.contract.passives):
            raise RemoteProtocolError(
                f"one answer of each of {', '.join(self.contract.passives)} was expected, "
                f"got {', '.join(senders) or 'none'}"
            )
        read: dict[str, Tensor] = {}
        for envelope in answers:
            terms = self.contract.passives[envelope.sender].representation
            got_B, h_BD = read_representations(
                envelope, terms, aligned=len(self._alignment), minimum=1
            )
            if not torch.equal(got_B, rows_B):
                raise RemoteProtocolError(f"{envelope.sender} answered for other rows than asked")
            read[envelope.sender] = self.compute.place(h_BD)
        return read

    def learn(self, step: int, rows_B: Tensor, answers: Sequence[Envelope]) -> dict[str, bytes]:
        """One step on the task loss; return by passive the gradient that goes there."""
        parts = {name: h.requires_grad_() for name, h in self.read(rows_B, answers).items()}
        own_B = self._alignment[rows_B].to(self.compute.device)
        self._descent.begin()
        with self.compute.forward(self._seed, self.name, step):
            scores_BK = self.scores(self.encoder(self.features_N[own_B]), parts)
        self.task_loss = F.cross_entropy(scores_BK.to(self.compute.dtype), self._targets_N[own_B])
        self.task_loss.backward()
        self._descent.step()
        labels_B = self.labels_N[own_B]
        leaving = {
            name: self._defences.protect(_gradient_of(h), Leaving(step, name, labels_B))
            for name, h in parts.items()
        }
        return {name: pack({"gradient": gradient_BD}) for name, gradient_BD in leaving.items()}

    def scores(self, own_BD: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Head over the active's and the passives' representations, in the contract's order."""
        every = [own_BD, *(parts[name] for name in self.contract.names("passive"))]
        scores_BK: Tensor = self.head(torch.cat([h.flatten(1) for h in every], dim=1))
        return scores_BK

    def predict(self, own_BD: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Scores of the true classes."""
        return self._code.decode(self.scores(own_BD, parts))

    def set_training(self, training: bool) -> None:
        """Switch dropout on or off."""
        self.encoder.train(training)
        self.head.train(training)

    def tensors(self) -> dict[str, Tensor]:
        """Its state, for its own checkpoint."""
        return self._descent.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore its state."""
        self._descent.load_tensors(tensors)


class TvflPassive(Party):
    """Encodes its own view on request, and learns from the gradient that comes back.

    Args:
        features_N: its features in the order of the alignment.
        encoder: its network.
        guard, ledger: what protects its representations, and the account of what was sent.
        answers: file in which it counts what it answers; None: memory and checkpoints only.
        defences: what its representations go through before the guard.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        *,
        features_N: Tensor,
        encoder: nn.Module,
        guard: RepresentationGuard,
        ledger: PrivacyLedger,
        train: TrainSettings,
        compute: Compute,
        seed: int,
        answers: Path | None,
        defences: RepresentationChain | None = None,
    ) -> None:
        super().__init__(name, contract)
        self.ledger = ledger
        self.gate = StepGate(self.name)
        # One answer more than for training: the final inference asks for test rows once.
        self._allowance = Allowance(
            self.name, self.contract, aligned=len(features_N), log=answers, beyond=1
        )
        self._guard = guard
        self._features_N = compute.place(features_N)
        self._modules = {
            name: module.to(compute.device, compute.dtype)
            for name, module in (
                ("encoder", encoder),
                ("defences", defences or RepresentationChain()),
            )
        }
        self._descent = Descent(self.name, self._modules, train)
        self._compute, self._seed = compute, seed
        self._sent_BD: Tensor | None = None
        self._penalty: Tensor | None = None

    @property
    def encoder(self) -> nn.Module:
        """Its network, features -> representation."""
        return self._modules["encoder"]

    def represent(self, envelope: Envelope) -> bytes:
        """Encode and guard the rows that the active asked for.

        Raises:
            RemoteProtocolError: the request breaks a rule.
            BudgetExhaustedError: sending would exceed the privacy budget; nothing is sent.
        """
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        tensors, meta = unpack(envelope.payload, expected, sender=envelope.sender)
        rows_B, learn = tensors["rows"], meta.get("learn") is True
        check_rows(
            rows_B,
            aligned=len(self._features_N),
            minimum=self.contract.minimum_batch,
            sender=envelope.sender,
        )
        self._allowance.check(envelope.step, rows_B, sender=envelope.sender)
        self.gate.enter(envelope)
        self._sent_BD = None  # also where sending fails below
        for module in self._modules.values():
            module.train(learn)
        with (
            torch.set_grad_enabled(learn),
            self._compute.forward(self._seed, self.name, envelope.step),
        ):
            seen_B = self._features_N[rows_B.to(self._compute.device)]
            h_BD = self._modules["encoder"](seen_B).to(self._compute.dtype)
            h_BD, self._penalty = self._modules["defences"](h_BD, seen_B, envelope.step)
        repeats_B = self._guard.repeats(rows_B)
        sent_BD = self._guard.release(
            h_BD.flatten(1).to(self._compute.dtype), step=envelope.step, rows=rows_B
        ).reshape(h_BD.shape)
        payload = pack({"rows": rows_B, "z": sent_BD})
        digest = hashlib.sha256(payload).digest()
        self._allowance.take(envelope.step, rows_B, digest, sender=envelope.sender)
        self.ledger.charge(step=envelope.step, rows=rows_B, digest=digest, repeats=repeats_B)
        self._sent_BD = sent_BD if learn else None
        return payload

    def learn(self, envelope: Envelope) -> None:
        """One step from the gradient on what was sent last.

        Raises:
            RemoteProtocolError: no gradient is due, or one of another shape, or not finite.
        """
        if self._sent_BD is None or envelope.step != self.gate.last:
            raise RemoteProtocolError(
                f"{envelope.sender} sent a gradient for step {envelope.step}, which waits for none"
            )
        shape: Shape = tuple(self._sent_BD.shape)
        expected = {"gradient": TensorSpec(self._compute.dtype, shape)}
        tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
        if not bool(tensors["gradient"].isfinite().all()):
            raise RemoteProtocolError(f"{envelope.sender} sent a gradient that is not finite")
        self._descent.begin()
        gradient_BD = self._compute.place(tensors["gradient"])
        if self._penalty is None:
            self._sent_BD.backward(gradient_BD)
        else:
            torch.autograd.backward([self._sent_BD, self._penalty], [gradient_BD, None])
        self._descent.step()
        self._sent_BD = None

    def tensors(self) -> dict[str, Tensor]:
        """Its state, for its own checkpoint."""
        return (
            self._descent.tensors()
            | under("guard", self._guard.tensors())
            | under("allowance", self._allowance.tensors())
        )

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        """Restore its state; steps up to `last_step` count as answered."""
        self._descent.load_tensors(tensors)
        self._guard.load_tensors(named_below("guard", tensors))
        self._allowance.load_tensors(named_below("allowance", tensors))
        self.gate.last = last_step


def _gradient_of(h_BD: Tensor) -> Tensor:
    assert h_BD.grad is not None
    return h_BD.grad
