"""The parties of vertical multi-view learning: each has a view, all agree on pseudo-labels.

Run by: the active, which holds the labels and the common pseudo-labels Z and sends them to the
passives; and the passives, of whose pseudo-labels Z_k the active reads the weighted sum alone.
Gives a passive Z, which tends to the labels, and the active that sum. Letters: N aligned people,
B of them in a step, F features, C classes, U labelled rows.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums import SumContributor
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.learning.checks import check_norms, check_rows
from secure_apfed.learning.descent import prefixed, without_prefix
from secure_apfed.learning.multiview import Floats, View, common_labels
from secure_apfed.parties.party import Party
from secure_apfed.parties.rules import Allowance, StepGate, bind_step

__all__ = ["PseudoLabelActive", "PseudoLabelPassive", "Pull"]


@dataclass(frozen=True, eq=False)
class Pull:
    """What the labels draw to them.

    Attributes:
        truth_NC: one-hot, zeros where a row has no label to learn from.
        eta_N1: how much, 0 for these rows.
        own: the active's own pseudo-labels (MMVFL), or the common ones (FedMV).
    """

    truth_NC: Floats  # noqa: N815
    eta_N1: Floats  # noqa: N815
    own: bool

    def of(self, rows_B: Tensor, *, own: bool) -> tuple[Floats | None, Floats | float]:
        """What draws these pseudo-labels of these rows: truth and eta."""
        if own is not self.own:
            return None, 0.0
        return self.truth_NC[rows_B.numpy()], self.eta_N1[rows_B.numpy()]


class PseudoLabelActive(Party):
    """Holds the labels, its own view and the common pseudo-labels.

    Args:
        view: its own; common_NC: Z to begin with; pull: of the labels.
        zetas: by party, the active's too.
    """

    def __init__(
        self, name: str, contract: Contract, *, view: View, common_NC: Floats, pull: Pull,
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
        truth_BC, eta = self._pull.of(rows_B, own=True)
        rows = rows_B.numpy()
        self.view.learn(rows, self.common_NC[rows], truth_BC=truth_BC, eta=eta)

    def average(self, rows_B: Tensor, opened_BC: Floats) -> float:
        """Make Z of the passives' weighted sum and its own; return its own part of the objective.

        Args:
            rows_B: the positions.
            opened_BC: sum over the passives of zeta_k Z_k / sum of all zetas.
        """
        rows, zetas = rows_B.numpy(), sum(self._zetas.values())
        truth_BC, eta = self._pull.of(rows_B, own=False)
        summed_BC = zetas * opened_BC + self._zetas[self.name] * self.view.labels_NC[rows]
        common_BC = common_labels(summed_BC, zetas, truth_NC=truth_BC, eta=eta)
        self.common_NC[rows] = common_BC
        return self.view.loss(rows, common_BC)

    def joint(self, rows_B: Tensor, opened_BC: Floats) -> Floats:
        """Z of rows that nobody learns from, where Eqs. (12) and (13) of FedMV end."""
        share = shares(self._zetas, learn=False)[self.name]
        return np.asarray(opened_BC + share * self.view.scores(rows_B.numpy()))

    def tensors(self) -> dict[str, Tensor]:
        return {"z": torch.from_numpy(self.common_NC), **view_tensors(self.view)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.common_NC = tensors["z"].numpy().copy()
        load_view(self.view, tensors)


class PseudoLabelPassive(Party):
    """Updates its view from the common pseudo-labels, and adds its own to the sum.

    Args:
        view: its own; zetas: by party.
        contributor: its end of the sum; clip: the longest row that the sum carries, None: any.
        answers: file in which it counts what it answers; None: memory and checkpoints only.
    """

    def __init__(
        self, name: str, contract: Contract, *, view: View, zetas: Mapping[str, float],
        contributor: SumContributor, clip: float | None, answers: Path | None,
    ) -> None:  # fmt: skip
        super().__init__(name, contract)
        self.view, self.contributor = view, contributor
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
            values_BC = self._learning * self.view.learn(rows_B.numpy(), common_BC)
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
        return view_tensors(self.view) | prefixed("allowance", self._allowance.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        """Restore its state; steps up to `last_step` count as answered."""
        load_view(self.view, tensors)
        self._allowance.load_tensors(without_prefix("allowance", tensors))
        self._gate.last = last_step


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

    In training zeta_k (MMVFL, Eq. 14; FedMV, Eq. 10). Of rows that nobody learns from zeta_k /
    (1 + zeta_k), which weights X_k W_k where FedMV's Eqs. (12) and (13) end: put Eq. (13) in
    Eq. (12), and solve for Z.
    """
    weights = {name: zeta if learn else zeta / (1 + zeta) for name, zeta in zetas.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


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


def view_tensors(view: View) -> dict[str, Tensor]:
    return {
        "weights": torch.from_numpy(view.weights_FC),
        "labels": torch.from_numpy(view.labels_NC),
    }


def load_view(view: View, tensors: Mapping[str, Tensor]) -> None:
    view.weights_FC = tensors["weights"].numpy().copy()
    view.labels_NC = tensors["labels"].numpy().copy()
