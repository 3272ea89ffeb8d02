"""The passive party of APFed: helps during training, learns no label, keeps its features.

Run by: every organisation that helps. Gives only its contribution to a secure sum.
Letters: B batch, D numbers of a representation.
"""

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_protocols.sums import SumContributor
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.defences import GradientChain, Leaving
from secure_apfed.exchange import Envelope
from secure_apfed.learning.apfed import PassiveTrainer
from secure_apfed.learning.checks import is_narrow
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.parties.party import Party
from secure_apfed.parties.rules import Acceptance, Allowance, AnswersLog
from secure_apfed.settings.training import TrainSettings

__all__ = ["PassiveParty"]


class PassiveParty(Party):
    """Answers representations with its protected gradient (Alg. 1, passive client).

    Args:
        features_N: its features in the order of the alignment, (N, *shape).
        objective: (z, own features) -> loss, with its networks.
        contributor: its end of the secure sum.
        seed: of its dropout; train, compute: how it optimises and where.
        answers: file in which it counts what it answers; None: memory and checkpoints only.
        held_N: which positions are of people that it knows, (N,), bool; the features of the
            others are not used. None: all.
        defences: what its gradient goes through before the sum.
        waiting: what it does while it waits for the next batch.
        noise: what it adds under the sum, as agreed; None: nothing.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        *,
        features_N: Tensor,
        objective: nn.Module,
        contributor: SumContributor,
        train: TrainSettings,
        compute: Compute,
        seed: int,
        answers: AnswersLog | None,
        held_N: Tensor | None = None,
        defences: GradientChain | None = None,
        waiting: Callable[[], None] | None = None,
        noise: ContributionNoise | None = None,
    ) -> None:
        super().__init__(name, contract)
        self.terms = self.contract.passives[self.name]
        self.contributor, self.noise = contributor, noise
        self._defences = defences or GradientChain()
        self._waiting = waiting
        allowance = Allowance(self.name, contract, aligned=len(features_N), log=answers)
        self.acceptance = Acceptance(self.name, contract, allowance, aligned=len(features_N))
        everybody = torch.ones(len(features_N), dtype=torch.bool)
        self._held_N = everybody if held_N is None else held_N
        self.trainer = PassiveTrainer(
            self.name, objective, features_N=features_N, train=train, compute=compute, seed=seed
        )

    @property
    def objective(self) -> nn.Module:
        return self.trainer.objective

    def contribute(self, envelope: Envelope) -> bytes:
        """Check the batch, take one step of its own, and answer for the aggregator.

        The answer is lambda_p times the gradient of each row's own loss; see `PassiveTrainer`.

        Raises:
            RemoteProtocolError: the batch breaks a rule of the contract; nothing is sent, and,
                unless it may be a batch that was answered in another session, computed.
            BudgetExhaustedError: contributing would exceed its budget; nothing is sent.
        """
        rows_B, sent_BD = self.acceptance.read(envelope)
        gradient_BD = self.gradient(envelope.step, rows_B, sent_BD)
        gradient_BD = self._defences.protect(gradient_BD, Leaving(envelope.step, AGGREGATOR))
        values_BD = gradient_BD.flatten(1).cpu().numpy()
        digest = self._digest(rows_B, values_BD)
        self.acceptance.count(envelope, rows_B, digest)
        return self.contributor.contribute(
            values_BD,
            self.acceptance.binding(envelope, rows_B),
            self._draw(envelope.step, rows_B, values_BD.shape, digest),
        )

    def _digest(self, rows_B: Tensor, values_BD: NDArray[np.floating]) -> bytes:
        """Of an answer; one that counts as the same in a later session must tell nothing new.

        That holds only where all passives repeat theirs. It may not where a batch moves other
        passives and leaves this one as it is (people that it does not know), nor where a sum may
        lack passives: the difference of two sums is then the others' alone. And noise of others
        that is drawn anew averages theirs away. So in these cases an answer is its session's.
        """
        knows_all = bool(self._held_N.all())
        lacks_nobody = self.contract.silent_passive != "recover"
        repeats = knows_all and lacks_nobody and self.noise is None
        content = hashlib.blake2b(b"" if repeats else self.contract.digest)
        content.update(rows_B.cpu().numpy().tobytes())
        content.update(np.ascontiguousarray(values_BD).tobytes())
        return content.digest()

    def wait(self) -> None:
        """Use the time until the next batch comes; sends nothing.

        Raises:
            LocalProtocolError: its worker process ended on its own.
        """
        if self._waiting is not None:
            self._waiting()

    def _draw(
        self, step: int, rows_B: Tensor, shape: tuple[int, ...], digest: bytes
    ) -> NDArray[np.int64] | None:
        if self.noise is None:
            return None
        known_B = rows_B[self._held_N[rows_B]]
        return self.noise.draw(shape, step=step, known_B=known_B, digest=digest)

    def answer(self, request: bytes) -> bytes:
        """Answer what the aggregator asks about the last contribution (second round).

        Raises:
            LocalProtocolError: the sum has one round, or nothing waits for a request.
            RemoteProtocolError: the request is about something else.
        """
        return self.contributor.answer(request)

    def gradient(self, step: int, rows_B: Tensor, sent_BD: Tensor) -> Tensor:
        """Take one step of its own; return lambda_p times the gradient of each row's loss.

        Zeros for people that it does not know. It learns and helps from no fewer of its own people
        than the contract's minimum batch, and from none whose representations are near-constant
        among those of strangers. An honest batch may have such a part, so it is not refused: zeros
        tell what the sender can compute.
        """
        held_B, weight = self._held_N[rows_B], self.acceptance.weight
        known = int(held_B.sum())
        if known == len(rows_B):
            return self.trainer.answer(step, rows_B, sent_BD, weight=weight)
        gradient_BD, own_BD = torch.zeros_like(sent_BD), sent_BD[held_B]
        if known < self.contract.minimum_batch or is_narrow(own_BD, self.terms.representation):
            return gradient_BD
        gained_BD = self.trainer.answer(step, rows_B[held_B], own_BD, weight=weight)
        gradient_BD[held_B] = gained_BD.to(gradient_BD.device)
        return gradient_BD

    def tensors(self) -> dict[str, Tensor]:
        return self.trainer.tensors() | prefixed("allowance", self.acceptance.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        """Restore its state; steps up to `last_step` count as answered."""
        self.trainer.load_tensors(tensors)
        self.acceptance.load_tensors(without_prefix("allowance", tensors), last_step=last_step)
