"""The parties of vertical multi-view learning: each has a view, all agree on pseudo-labels.

Run by: the active, which holds the labels and the common pseudo-labels Z and sends them to the
passives; and the passives, of whose pseudo-labels Z_k the active reads the weighted sum alone.
Gives a passive Z, which tends to the labels, and the active that sum. Letters: N aligned people,
B of them in a step, F features, C classes, U labelled rows.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import SumContributor
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.learning.checks import check_norms, check_rows
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.multiview import Floats, Pull, ViewModel, common_labels, joint_weights
from secure_apfed.parties.party import Party
from secure_apfed.parties.rules import Allowance, AnswersLog, StepGate, bind_step

__all__ = ["PseudoLabelActive", "PseudoLabelPassive", "check_clip", "read_request", "shares"]


class PseudoLabelActive(Party):
    """Holds the labels, its own view and the common pseudo-labels.

    Args:
        view: its own; common_NC: Z to begin with; pull: of the labels.
        zetas: by party, the active's too.
    """

    def __init__(
        self, name: str, contract: Contract, *, view: ViewModel, common_NC: Floats, pull: Pull,
        zetas: Mapping[str, float],
    ) -> None:  # fmt: skip
        super().__init__(name, contract)
        self.view, self.common_NC = view, common_NC
        self._pull, self._zetas = pull, zetas

    def request(self, rows_B: Tensor) -> bytes:
        """Z of these alignment positions, for every passive alike."""
        return pack({"rows": rows_B, "z": torch.from_numpy(self.common_NC[rows_B.numpy()])}, {})

    def question(self, rows_B: Tensor) -> bytes:
        """Ask what the passives' models say of these positions, of which nobody learns."""
        return pack({"rows": rows_B, "z": torch.from_numpy(self.common_NC[:0])}, {})

    def learn(self, rows_B: Tensor) -> None:
        """Update its own view from Z, as the passives do meanwhile."""
        rows = rows_B.numpy()
        self.view.learn(rows, self.common_NC[rows], self._pull.of(rows, own=True))

    def average(self, rows_B: Tensor, opened_BC: Floats) -> float:
        """Make Z of the passives' weighted sum and its own; return its own part of the objective.

        Args:
            rows_B: the positions.
            opened_BC: sum over the passives of zeta_k Z_k / sum of all zetas.
        """
        rows, zetas = rows_B.numpy(), sum(self._zetas.values())
        summed_BC = zetas * opened_BC + self._zetas[self.name] * self.view.labels_NC[rows]
        common_BC = common_labels(summed_BC, zetas, self._pull.of(rows, own=False))
        self.common_NC[rows] = common_BC
        return self.view.loss(rows, common_BC)

    def joint(self, rows_B: Tensor, opened_BC: Floats) -> Floats:
        """Z of rows that nobody learns from, where Eqs. (12) and (13) of FedMV end."""
        share = shares(self._zetas, learn=False)[self.name]
        return np.asarray(opened_BC + share * self.view.scores(rows_B.numpy()))

    def tensors(self) -> dict[str, Tensor]:
        return _state(self.view, common=torch.from_numpy(self.common_NC))

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.common_NC = tensors["pseudo_labels.common"].numpy().copy()
        _restore(self.view, tensors)


class PseudoLabelPassive(Party):
    """Updates its view from the common pseudo-labels, and adds its own to the sum.

    Args:
        view: its own; zetas: by party.
        contributor: its end of the sum; clip: the longest row that the sum carries, None: any.
        answers: file in which it counts what it answers; None: memory and checkpoints only.
        pull: of labels of its own; None: it has none.
    """

    def __init__(
        self, name: str, contract: Contract, *, view: ViewModel, zetas: Mapping[str, float],
        contributor: SumContributor, clip: float | None, answers: AnswersLog | None,
        pull: Pull | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, contract)
        self.view, self.contributor, self._pull = view, contributor, pull
        self._learning, self._asked = (shares(zetas, learn=learn)[name] for learn in (True, False))
        self._clip, self._gate = clip, StepGate(name)
        self._aligned = len(view.x_NF)
        self._allowance = Allowance(name, contract, aligned=self._aligned, log=answers, beyond=1)

    def contribute(self, envelope: Envelope) -> bytes:
        """Learn from the common pseudo-labels, or say what it predicts; hidden in the sum.

        Raises:
            RemoteProtocolError: the request breaks a rule.
            LocalProtocolError: a row is longer than what the sum carries.
        """
        rows_B, common_BC = self._read(envelope)
        if common_BC is None:
            values_BC = self._asked * self.view.scores(rows_B.numpy())
        else:
            pull = self._pull and self._pull.of(rows_B.numpy(), own=True)
            values_BC = self._learning * self.view.learn(rows_B.numpy(), common_BC, pull)
        check_clip(values_BC, self._clip, me=self.name)
        content = hashlib.blake2b(self.contract.digest)
        content.update(envelope.payload)
        content.update(np.ascontiguousarray(values_BC).tobytes())
        digest = content.digest()
        self._allowance.take(envelope.step, rows_B, digest, sender=envelope.sender)
        binding = bind_step(self.contract.session, envelope.step, rows_B, envelope.payload)
        return self.contributor.contribute(values_BC, binding)

    def _read(self, envelope: Envelope) -> tuple[Tensor, Floats | None]:
        terms = self.contract.passives[self.name].representation
        rows_B, common_BC = read_request(envelope, terms)
        minimum = self.contract.minimum_batch
        check_rows(rows_B, aligned=self._aligned, minimum=minimum, sender=envelope.sender)
        self._allowance.check(envelope.step, rows_B, sender=envelope.sender)
        self._gate.enter(envelope)
        return rows_B, common_BC

    def tensors(self) -> dict[str, Tensor]:
        return _state(self.view) | prefixed("allowance", self._allowance.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        """Restore its state; steps up to `last_step` count as answered."""
        _restore(self.view, tensors)
        self._allowance.load_tensors(without_prefix("allowance", tensors))
        self._gate.last = last_step


def _state(view: ViewModel, **labels: Tensor) -> dict[str, Tensor]:
    """Of a view; what counts by position of the alignment stands apart from the weights."""
    of_view = view.tensors()
    labels["own"] = of_view.pop("labels")
    return of_view | prefixed("pseudo_labels", labels)


def _restore(view: ViewModel, tensors: Mapping[str, Tensor]) -> None:
    view.load_tensors({**tensors, "labels": tensors["pseudo_labels.own"]})


def read_request(envelope: Envelope, terms: RepresentationTerms) -> tuple[Tensor, Floats | None]:
    """Return the positions that are asked for, and Z of them where a step is to be learnt from.

    Raises:
        RemoteProtocolError: no such message, or Z out of the contract's bounds.
    """
    expected = {
        "rows": TensorSpec(torch.int64, (None,)),
        "z": TensorSpec(torch.float64, (None, *terms.shape)),
    }
    tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
    rows_B, z_BC = tensors["rows"], tensors["z"]
    if not len(z_BC):
        return rows_B, None
    if len(z_BC) != len(rows_B):
        raise RemoteProtocolError(
            f"{envelope.sender} sent {len(rows_B)} row positions for {len(z_BC)} rows of z"
        )
    check_norms(z_BC, terms, sender=envelope.sender)
    return rows_B, z_BC.numpy()


def shares(zetas: Mapping[str, float], *, learn: bool) -> dict[str, float]:
    """By party, the weight of its pseudo-labels in Z, of 1 in all.

    In training zeta_k (MMVFL, Eq. 14; FedMV, Eq. 10); else as `joint_weights`.
    """
    values, total = list(zetas.values()), sum(zetas.values())
    weights = [zeta / total for zeta in values] if learn else joint_weights(values)
    return dict(zip(zetas, weights, strict=True))


def check_clip(values_BC: Floats, clip: float | None, *, me: str) -> None:
    """Refuse to send a sum what it would cut: an average of cut rows is another average.

    Raises:
        LocalProtocolError: names the length of the longest row.
    """
    longest = float(np.linalg.norm(values_BC, axis=1).max(initial=0.0))
    if clip is not None and longest > clip:
        raise LocalProtocolError(
            f"{me}: a row of its contribution is {longest:.3g} long, and secure_sum.clip cuts rows "
            f"to {clip:g}; agree on a clip above {longest:.3g} at all parties"
        )
