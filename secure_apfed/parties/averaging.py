"""The parties that average weights: each trains a copy of one model on people of its own.

Run by: the active, which sends the average and reads the others' weighted sum alone, and the
passives, which hold labels of their own people, too. Gives every party the average of each round.
Letters: R rows of the weights' matrix, W numbers in each.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums import SumContributor
from secure_apfed.contract import Contract
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.learning.averaging import AveragedModel, Stages
from secure_apfed.learning.checks import check_norms
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.multiview import Floats
from secure_apfed.parties.party import Party
from secure_apfed.parties.pseudo_labels import check_clip
from secure_apfed.parties.rules import Allowance, AnswersLog, StepGate, bind_step

__all__ = ["AveragingActive", "AveragingPassive"]

_ONE = torch.zeros(1, dtype=torch.int64)
"""What an answer counts for: there are no rows in common, of which each would be asked for."""


class AveragingActive(Party):
    """Trains like the others, averages, and sends the average.

    Args:
        stages: its copy of the model; share: its own weight in the average, of 1 in all.
    """

    def __init__(self, name: str, contract: Contract, *, stages: Stages, share: float) -> None:
        super().__init__(name, contract)
        self.stages, self._share = stages, share

    def request(self, step: int) -> tuple[Tensor, bytes]:
        """Rows of the answer, and the average to train from, for every passive alike."""
        weights_RW, ended = self.stages.at(step).weights, self.stages.ended_before(step)
        tensors = {"weights": torch.from_numpy(weights_RW)}
        if ended is not None:
            tensors["ended"] = torch.from_numpy(ended.weights)
        return torch.arange(len(weights_RW)), pack(tensors, {})

    def train(self, step: int) -> float:
        """Train on its own rows, as the passives do meanwhile; return the loss a row."""
        return self.stages.at(step).train(step)

    def average(self, step: int, opened_RW: Floats) -> None:
        """Take the average of all: the passives' weighted sum and its own."""
        model = self.stages.at(step)
        model.load(opened_RW + self._share * model.weights)

    def tensors(self) -> dict[str, Tensor]:
        return self.stages.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.stages.load_tensors(tensors)


class AveragingPassive(Party):
    """Trains from the average on its own rows, and adds its weights to the sum.

    Args:
        stages: its copy of the model; share: its weight in the average.
        contributor: its end of the sum; clip: the longest row that the sum carries, None: any.
        answers: file in which it counts what it answers; None: memory and checkpoints only.
    """

    def __init__(
        self, name: str, contract: Contract, *, stages: Stages, share: float,
        contributor: SumContributor, clip: float | None, answers: AnswersLog | None,
    ) -> None:  # fmt: skip
        super().__init__(name, contract)
        self.contributor = contributor
        self.stages, self._share, self._clip = stages, share, clip
        self._gate = StepGate(name)
        self._allowance = Allowance(name, contract, aligned=1, log=answers)

    def contribute(self, envelope: Envelope) -> bytes:
        """Train, and hide the weights in the sum.

        Raises:
            RemoteProtocolError: the request breaks a rule.
            LocalProtocolError: a row is longer than what the sum carries.
        """
        step = envelope.step
        self._allowance.check(step, _ONE, sender=envelope.sender)
        model = self._loaded(envelope)
        self._gate.enter(envelope)
        model.train(step)
        values_RW = self._share * model.weights
        check_clip(values_RW, self._clip, me=self.name)
        content = hashlib.blake2b(self.contract.digest + envelope.payload)
        content.update(np.ascontiguousarray(values_RW).tobytes())
        self._allowance.take(step, _ONE, content.digest(), sender=envelope.sender)
        rows_R = torch.arange(len(values_RW))
        binding = bind_step(self.contract.session, step, rows_R, envelope.payload)
        return self.contributor.contribute(values_RW, binding)

    def _loaded(self, envelope: Envelope) -> AveragedModel:
        """The model of this step, with the average that came.

        Raises:
            RemoteProtocolError: weights of another shape, or out of the contract's bounds.
        """
        terms = self.contract.passives[self.name].representation
        ended = self.stages.ended_before(envelope.step)
        expected = {"weights": TensorSpec(torch.float64, (None, None))}
        if ended is not None:
            expected["ended"] = TensorSpec(torch.float64, ended.weights.shape)
        received, _ = unpack(envelope.payload, expected, sender=envelope.sender)
        for tensor in received.values():
            check_norms(tensor, terms, sender=envelope.sender)
        if ended is not None:
            ended.load(np.asarray(received["ended"].numpy()))
        model, weights_RW = self.stages.at(envelope.step), np.asarray(received["weights"].numpy())
        if weights_RW.shape != model.weights.shape:
            raise RemoteProtocolError(
                f"{envelope.sender} sent weights of shape {weights_RW.shape}, the model of "
                f"{self.name} has {model.weights.shape}; all parties need the same views, and the "
                "same method.rounds"
            )
        model.load(weights_RW)
        return model

    def tensors(self) -> dict[str, Tensor]:
        return prefixed("model", self.stages.tensors()) | prefixed(
            "allowance", self._allowance.tensors()
        )

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        """Restore its state; steps up to `last_step` count as answered."""
        self._allowance.load_tensors(without_prefix("allowance", tensors))
        self._gate.last = last_step
        self.stages.load_tensors(without_prefix("model", tensors))
