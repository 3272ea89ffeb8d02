"""The parties of typical VFL (Section 2 of APFed): everybody encodes, the active concatenates.

Run by: the same organisations, for comparison. A passive sends its representations h^p
(behind its own guard) and receives the gradient of the task loss on them, which tells it
about labels. Letters: N rows of a table, B batch, K classes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums import SumContributor
from secure_apfed.contract import Contract
from secure_apfed.data import PartyTable
from secure_apfed.defences import GradientChain, LabelCode, Leaving, RepresentationChain
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.learning.checks import check_rows
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.release import ContributionNoise, Releases
from secure_apfed.learning.tvfl import EncoderTrainer, HeadTrainer, SumTrainer
from secure_apfed.models import Shape
from secure_apfed.parties.party import Party
from secure_apfed.parties.rules import (
    Allowance,
    AnswersLog,
    StepGate,
    bind_step,
    read_representations,
)
from secure_apfed.privacy import PrivacyLedger, RepresentationGuard
from secure_apfed.privacy.noise import clip_rows
from secure_apfed.settings.training import TrainSettings

__all__ = ["EncodingPassive", "SummedPassive", "TvflActive", "TvflPassive"]


class TvflActive(Party):
    """Encodes its own view, asks for the passives', trains the head on all of them.

    Args:
        table: its rows and labels; alignment: their positions in the common order.
        encoder, head: its networks; the head reads all representations, concatenated.
        others: names of what follows its own representation; None: the passives, concatenated; one
            name: their sum, which is added to its own.
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
        others: Sequence[str] | None = None,
        defences: GradientChain | None = None,
        code: LabelCode | None = None,
    ) -> None:
        super().__init__(name, contract)
        assert table.labels is not None
        kind = HeadTrainer if others is None else SumTrainer
        self._defences = defences or GradientChain()
        self._alignment = alignment
        self.trainer = kind(
            self.name, encoder, head, features_N=table.features, labels_N=table.labels,
            passives=others or self.contract.names("passive"), code=code, train=train,
            compute=compute, seed=seed,
        )  # fmt: skip

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
            read[envelope.sender] = self.trainer.compute.place(h_BD)
        return read

    def own_rows(self, rows_B: Tensor) -> Tensor:
        """Where these alignment positions stand in its own table."""
        return self._alignment[rows_B].to(self.trainer.compute.device)

    def learn(self, step: int, rows_B: Tensor, answers: Sequence[Envelope]) -> dict[str, bytes]:
        """One step on the task loss; return by passive the gradient that goes there."""
        return self.learn_of(step, rows_B, self.read(rows_B, answers))

    def learn_of(self, step: int, rows_B: Tensor, parts: Mapping[str, Tensor]) -> dict[str, bytes]:
        """The same, from representations that were read already, by name."""
        own_B = self.own_rows(rows_B)
        self.task_loss, gradients = self.trainer.learn(step, own_B, parts)
        labels_B = self.trainer.labels_N[own_B]
        leaving = {
            name: self._defences.protect(gradient_BD, Leaving(step, name, labels_B))
            for name, gradient_BD in gradients.items()
        }
        return {name: pack({"gradient": gradient_BD}) for name, gradient_BD in leaving.items()}

    def tensors(self) -> dict[str, Tensor]:
        return self.trainer.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.trainer.load_tensors(tensors)


class EncodingPassive(Party):
    """Encodes its own view on request, and learns from the gradient that comes back.

    Args:
        features_N: its features in the order of the alignment.
        encoder: its network.
        answers: file in which it counts what it answers; None: memory and checkpoints only.
        defences: what its representations go through first.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        *,
        features_N: Tensor,
        encoder: nn.Module,
        train: TrainSettings,
        compute: Compute,
        seed: int,
        answers: AnswersLog | None,
        defences: RepresentationChain | None = None,
    ) -> None:
        super().__init__(name, contract)
        self.gate = StepGate(self.name)
        self.allowance = Allowance(  # the final inference asks once more
            self.name, self.contract, aligned=len(features_N), log=answers, beyond=1
        )
        self.trainer = EncoderTrainer(
            self.name, encoder, features_N=features_N, train=train, compute=compute, seed=seed,
            defences=defences,
        )  # fmt: skip
        self._aligned, self._dtype = len(features_N), compute.dtype
        self._sent_BD: Tensor | None = None

    @property
    def encoder(self) -> nn.Module:
        return self.trainer.encoder

    def encode(self, envelope: Envelope) -> tuple[Tensor, Tensor, bool]:
        """Encode the rows that the active asked for; return them, what they give, and whether this
        party learns from it.

        Raises:
            RemoteProtocolError: the request breaks a rule.
        """
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        tensors, meta = unpack(envelope.payload, expected, sender=envelope.sender)
        rows_B, learn = tensors["rows"], meta.get("learn") is True
        check_rows(
            rows_B,
            aligned=self._aligned,
            minimum=self.contract.minimum_batch,
            sender=envelope.sender,
        )
        self.allowance.check(envelope.step, rows_B, sender=envelope.sender)
        self.gate.enter(envelope)
        self._sent_BD = None  # also where sending fails after this
        return rows_B, self.trainer.represent(envelope.step, rows_B, learn=learn), learn

    def sent(self, z_BD: Tensor, *, learn: bool) -> None:
        """Remember what left, where a gradient on it is due."""
        self._sent_BD = z_BD if learn else None

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
        expected = {"gradient": TensorSpec(self._dtype, shape)}
        tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
        if not bool(tensors["gradient"].isfinite().all()):
            raise RemoteProtocolError(f"{envelope.sender} sent a gradient that is not finite")
        self.trainer.update(self._sent_BD, tensors["gradient"])
        self._sent_BD = None

    def tensors(self) -> dict[str, Tensor]:
        return self.trainer.tensors() | prefixed("allowance", self.allowance.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        """Restore its state; steps up to `last_step` count as answered."""
        self.trainer.load_tensors(tensors)
        self.allowance.load_tensors(without_prefix("allowance", tensors))
        self.gate.last = last_step


class TvflPassive(EncodingPassive):
    """Sends its representations to the active, behind a guard; see `EncodingPassive`.

    Args:
        guard, ledger: what protects its representations, and the account of what was sent.
    """

    def __init__(
        self, name: str, contract: Contract, *, guard: RepresentationGuard, ledger: PrivacyLedger,
        **encoding: Any,
    ) -> None:  # fmt: skip
        super().__init__(name, contract, **encoding)
        self._releases = Releases(guard, ledger)

    @property
    def ledger(self) -> PrivacyLedger:
        return self._releases.ledger

    def represent(self, envelope: Envelope) -> bytes:
        """Encode and guard the rows that the active asked for.

        Raises:
            RemoteProtocolError: the request breaks a rule.
            BudgetExhaustedError: sending would exceed the privacy budget; nothing is sent.
        """
        rows_B, h_BD, learn = self.encode(envelope)
        released = self._releases.release(
            h_BD,
            step=envelope.step,
            rows=rows_B,
            count=lambda digest: self.allowance.take(
                envelope.step, rows_B, digest, sender=envelope.sender
            ),
        )
        self.sent(released.z, learn=learn)
        return released.payload

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | prefixed("guard", self._releases.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        super().load_tensors(tensors, last_step=last_step)
        self._releases.load_tensors(without_prefix("guard", tensors))


class SummedPassive(EncodingPassive):
    """Adds its representations to a secure sum, of which the active reads the sum alone.

    Args:
        contributor: its end of the sum.
        clip: C, the L2 bound of one row.
        noise: under the sum; None: none.
    """

    def __init__(
        self, name: str, contract: Contract, *, contributor: SumContributor, clip: float | None,
        noise: ContributionNoise | None, **encoding: Any,
    ) -> None:  # fmt: skip
        super().__init__(name, contract, **encoding)
        self.contributor, self.noise = contributor, noise
        self._clip = clip

    def contribute(self, envelope: Envelope) -> bytes:
        """Encode the rows that the active asked for, and hide them in the sum.

        Raises:
            RemoteProtocolError: the request breaks a rule.
            BudgetExhaustedError: contributing would exceed the privacy budget.
        """
        rows_B, h_BD, learn = self.encode(envelope)
        z_BD = h_BD.flatten(1)
        if self._clip is not None:
            z_BD = clip_rows(z_BD, self._clip)
        values_BD = np.ascontiguousarray(z_BD.detach().cpu().double().numpy())
        # The same sum again tells nothing new only where all repeat theirs: each session counts.
        content = hashlib.blake2b(self.contract.digest)
        content.update(envelope.payload)
        content.update(values_BD.tobytes())
        digest, step = content.digest(), envelope.step
        self.allowance.take(step, rows_B, digest, sender=envelope.sender)
        noise_BD = None
        if self.noise is not None:
            noise_BD = self.noise.draw(values_BD.shape, step=step, known_B=rows_B, digest=digest)
        self.sent(z_BD, learn=learn)
        binding = bind_step(self.contract.session, step, rows_B, envelope.payload)
        return self.contributor.contribute(values_BD, binding, noise_BD)
