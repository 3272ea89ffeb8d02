"""What a receiver of representations checks before it computes anything from them.

Run by: passives (APFed) and the active (TVFL). Protects from: a malicious sender that
probes with chosen rows (duplicates, tiny batches, replayed steps, zero or huge norms,
near-constant batches).
Letters: B batch, D numbers of a representation.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protocols.errors import RemoteProtocolError
from protocols.sums.interface import StepBinding
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.exchange import Envelope, TensorSpec, unpack
from secure_apfed.parties.directions import spread_of
from secure_apfed.privacy.release_log import Release, ReleaseCounts

__all__ = [
    "Allowance",
    "StepGate",
    "bind_step",
    "check_norms",
    "check_rows",
    "check_spread",
    "is_narrow",
    "read_representations",
    "representation_specs",
]

_NORM_SLACK = 1e-5


class StepGate:
    """Lets every step of a session through once, in rising order."""

    def __init__(self, me: str) -> None:
        self._me = me
        self.last = -1

    def enter(self, envelope: Envelope) -> None:
        """Raise RemoteProtocolError on a step that was seen."""
        if envelope.step <= self.last:
            raise RemoteProtocolError(
                f"{self._me}: {envelope.sender} sent step {envelope.step} after step {self.last}; "
                "a step is never answered twice in one session"
            )
        self.last = envelope.step


class Allowance:
    """What the contract lets the active ask of one party: batch sizes, and answers for each row.

    Answers are counted over all sessions of the run, in a write-ahead log: breaking off and
    resuming gets no more of them. An answer with the same digest to the same step counts once.

    Args:
        me: the party; contract: of the session.
        aligned: number of positions; beyond: answers for a row above those for training.
        log: file of the write-ahead log; None: memory and checkpoints only.

    Raises:
        CheckpointError: the log was altered, or is of another run.
    """

    def __init__(
        self, me: str, contract: Contract, *, aligned: int, log: Path | None, beyond: int = 0
    ) -> None:
        self._me, self._largest = me, contract.batch_size
        self._answers = contract.epochs + contract.spare_answers + beyond
        self._counts = ReleaseCounts(rows=aligned, log=log, about={"answers": self._answers})

    def check(self, step: int, rows_B: Tensor, *, sender: str) -> None:
        """Refuse before anything is computed, unless it may be an answer that was given before.

        Raises:
            RemoteProtocolError: a larger batch, or a row more often, than agreed.
        """
        if len(rows_B) > self._largest:
            raise RemoteProtocolError(
                f"{sender} sent a batch of {len(rows_B)} rows to {self._me}; the contract says at "
                f"most {self._largest}"
            )
        if step not in self._counts.steps:
            self._check_answers(rows_B, sender)

    def take(self, step: int, rows_B: Tensor, digest: bytes, *, sender: str) -> None:
        """Count one answer for each of these rows; on return it is on the disk and may leave.

        Args:
            step: of the run.
            rows_B: that are answered, without repeats.
            digest: of the answer.
            sender: who asks.

        Raises:
            RemoteProtocolError: a row was answered as often as agreed; nothing is counted.
        """
        answer = Release(step, digest, np.sort(rows_B.cpu().numpy()))
        if self._counts.knows(answer):
            return
        self._check_answers(rows_B, sender)
        self._counts.add(answer)
        self._counts.sync()

    def _check_answers(self, rows_B: Tensor, sender: str) -> None:
        if int(self._counts.of_row_N[rows_B.cpu().numpy()].max(initial=0)) >= self._answers:
            raise RemoteProtocolError(
                f"{sender} asked {self._me} for a row more than {self._answers} times, all "
                "sessions of the run counted; the contract agrees to no more. If the run broke "
                "off often, begin a new one with more rules.spare_answers"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Its state, for a checkpoint."""
        return self._counts.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned; what the log counts stays counted.

        Raises:
            CheckpointError: of another number of rows, or the log misses answers.
        """
        self._counts.load_state_dict(tensors)


def check_rows(rows_B: Tensor, *, aligned: int, minimum: int, sender: str) -> None:
    """Refuse positions outside the alignment, repeated ones, and batches below the minimum.

    Raises:
        RemoteProtocolError: names the sender and the rule.
    """
    if len(rows_B) < minimum:
        raise RemoteProtocolError(
            f"{sender} sent a batch of {len(rows_B)} rows; the contract says at least {minimum}"
        )
    if not 0 <= int(rows_B.min()) <= int(rows_B.max()) < aligned:
        raise RemoteProtocolError(
            f"{sender} named row positions outside the alignment of {aligned} rows"
        )
    if len(torch.unique(rows_B)) != len(rows_B):
        raise RemoteProtocolError(f"{sender} repeated a row within one batch")


def representation_specs(terms: RepresentationTerms) -> dict[str, TensorSpec]:
    """What a message of representations holds: rows (B,) and z (B, *shape)."""
    dtype = torch.float64 if terms.dtype == "float64" else torch.float32
    return {
        "rows": TensorSpec(torch.int64, (None,)),
        "z": TensorSpec(dtype, (None, *terms.shape)),
    }


def read_representations(
    envelope: Envelope, terms: RepresentationTerms, *, aligned: int, minimum: int
) -> tuple[Tensor, Tensor]:
    """Parse and check a batch of representations; returns rows (B,) and z (B, *shape).

    Raises:
        RemoteProtocolError: anything that the contract does not allow.
    """
    tensors, _ = unpack(envelope.payload, representation_specs(terms), sender=envelope.sender)
    rows_B, z_BD = tensors["rows"], tensors["z"]
    if len(rows_B) != len(z_BD):
        raise RemoteProtocolError(
            f"{envelope.sender} sent {len(rows_B)} row positions for {len(z_BD)} representations"
        )
    check_rows(rows_B, aligned=aligned, minimum=minimum, sender=envelope.sender)
    check_norms(z_BD, terms, sender=envelope.sender)
    return rows_B, z_BD


def check_norms(z_BD: Tensor, terms: RepresentationTerms, *, sender: str) -> None:
    """Refuse rows whose L2 norm is outside the contract's bounds, or not a number.

    Raises:
        RemoteProtocolError: names the sender, the bounds and the extremes.
    """
    norm_B = torch.linalg.vector_norm(z_BD.flatten(1).double(), dim=1)
    low, high = terms.minimum_norm, terms.maximum_norm * (1 + _NORM_SLACK)
    if not bool(((norm_B >= low) & (norm_B <= high)).all()):
        raise RemoteProtocolError(
            f"{sender} sent representations whose norm is not within "
            f"{terms.minimum_norm:g} to {terms.maximum_norm:g}, as the contract says "
            f"(smallest {float(norm_B.min()):g}, largest {float(norm_B.max()):g})"
        )


def is_narrow(z_BD: Tensor, terms: RepresentationTerms) -> bool:
    """Whether these rows point in fewer directions than the contract asks for."""
    return bool(terms.minimum_spread) and spread_of(z_BD) < terms.minimum_spread


def check_spread(z_BD: Tensor, terms: RepresentationTerms, *, sender: str) -> None:
    """Refuse a batch whose rows point in one direction, or in few.

    Raises:
        RemoteProtocolError: names the sender, the spread and the contract's bound.
    """
    if is_narrow(z_BD, terms):
        raise RemoteProtocolError(
            f"{sender} sent a near-constant batch: its directions spread by "
            f"{spread_of(z_BD):.2g}, the "
            f"contract says at least {terms.minimum_spread:g} (rules.minimum_spread); such "
            "batches read a passive's representations out of its gradients"
        )


def bind_step(session: str, step: int, rows_B: Tensor, payload: bytes) -> StepBinding:
    """What a contribution answers: this session, step, rows and representations."""
    rows = rows_B.detach().cpu().contiguous().numpy().astype("<i8").tobytes()
    return StepBinding(
        session=session,
        step=step,
        rows=hashlib.sha256(rows).digest(),
        message=hashlib.sha256(payload).digest(),
    )
