"""What a party holds its peers to: each step once, answers counted, refusals and audits noted.

Run by: passives (APFed), the active (TVFL), and the active on sums. Protects from: a malicious
sender that probes with chosen rows (see `learning/checks.py`), replayed steps or too many
questions, and from whoever alters sums.
Letters: B batch, D numbers of a representation.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.interface import StepBinding
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, TensorSpec, unpack
from secure_apfed.files import MOST_JSON_BYTES, open_plain, open_regular
from secure_apfed.learning.checks import check_norms, check_rows, check_spread
from secure_apfed.privacy.release_log import Release, ReleaseCounts

__all__ = [
    "Acceptance",
    "Allowance",
    "AnswersLog",
    "OpenAudits",
    "RefusedSums",
    "StepGate",
    "bind_step",
    "read_representations",
    "read_sum",
    "representation_specs",
    "write_sum",
]


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


@dataclass(frozen=True)
class AnswersLog:
    """Where answers are counted, over all sessions of a run.

    Attributes:
        path: of the write-ahead log.
        waits: whether an answer waits until its line is on the disk, and not with the operating
            system alone, which a machine that loses power forgets.
    """

    path: Path
    waits: bool = True


class Allowance:
    """What the contract lets the active ask of one party: batch sizes, and answers for each row.

    Answers are counted over all sessions of the run, in a write-ahead log: breaking off and
    resuming gets no more of them. An answer with the same digest to the same step counts once.

    Args:
        me: the party; contract: of the session.
        aligned: number of positions; beyond: answers for a row above those for training.
        log: the write-ahead log; None: memory and checkpoints only.

    Raises:
        CheckpointError: the log was altered, or is of another run.
    """

    def __init__(
        self, me: str, contract: Contract, *, aligned: int, log: AnswersLog | None, beyond: int = 0
    ) -> None:
        self._me, self._largest = me, contract.batch_size
        self._answers = contract.epochs + contract.spare_answers + beyond
        self._waits = log is not None and log.waits
        self._counts = ReleaseCounts(
            rows=aligned, log=log.path if log else None, about={"answers": self._answers}
        )

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
        """Count one answer for each of these rows; on return it is in the log and may leave.

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
        if self._waits:
            self._counts.sync()

    def _check_answers(self, rows_B: Tensor, sender: str) -> None:
        if int(self._counts.of_row_N[rows_B.cpu().numpy()].max(initial=0)) >= self._answers:
            raise RemoteProtocolError(
                f"{sender} asked {self._me} for a row more than {self._answers} times, all "
                "sessions of the run counted; the contract agrees to no more. If the run broke "
                "off often, begin a new one with more rules.spare_answers"
            )

    def tensors(self) -> dict[str, Tensor]:
        return self._counts.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned; what the log counts stays counted.

        Raises:
            CheckpointError: of another number of rows, or the log misses answers.
        """
        self._counts.load_state_dict(tensors)


class Acceptance:
    """Which batches a passive of APFed answers, and as what it counts and binds its answers.

    Args:
        me: the passive; contract: of the session.
        allowance: what it may be asked for.
        aligned: number of positions.

    Attributes:
        weight: lambda_p, which it applies; terms: what a row of representations may be.
    """

    def __init__(self, me: str, contract: Contract, allowance: Allowance, *, aligned: int) -> None:
        self.weight = contract.passives[me].weight
        self.contract, self.terms = contract, contract.passives[me].representation
        self.allowance, self.aligned = allowance, aligned
        self._gate = StepGate(me)

    def read(self, envelope: Envelope) -> tuple[Tensor, Tensor]:
        """Return rows (B,) and representations (B, *shape) that keep to every rule.

        Raises:
            RemoteProtocolError: they break one.
        """
        rows_B, sent_BD = read_representations(
            envelope, self.terms, aligned=self.aligned, minimum=self.contract.minimum_batch
        )
        check_spread(sent_BD, self.terms, sender=envelope.sender)
        self.admit(envelope, rows_B)
        return rows_B, sent_BD

    def admit(self, envelope: Envelope, rows_B: Tensor) -> None:
        """Let a step through once, and no row more often than agreed."""
        self.allowance.check(envelope.step, rows_B, sender=envelope.sender)
        self._gate.enter(envelope)

    def count(self, envelope: Envelope, rows_B: Tensor, digest: bytes) -> None:
        """Count the answer, in the log, before it leaves."""
        self.allowance.take(envelope.step, rows_B, digest, sender=envelope.sender)

    def binding(self, envelope: Envelope, rows_B: Tensor) -> StepBinding:
        """What the contribution answers: exactly what was received."""
        return bind_step(self.contract.session, envelope.step, rows_B, envelope.payload)

    def tensors(self) -> dict[str, Tensor]:
        """Its state, for a checkpoint."""
        return self.allowance.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None:
        """Restore its state; steps up to `last_step` count as answered."""
        self.allowance.load_tensors(tensors)
        self._gate.last = last_step


class RefusedSums:
    """How many sums the active refused, over all sessions: noted before anybody sees it.

    Protects from: whoever alters sums, and learns from which of them the active takes. One session
    tells which sum was the first to be refused (see `OneRefusalReceiver`); a resumed run computes
    the same numbers, and would be asked about them again. So a run goes on after as many refused
    sums as its user allows by name, and no more. The log has a line a refusal, whole or torn, read
    or not.

    Args:
        me: the active.
        log: file of the list, readable by its owner only; None: nothing is noted.
        allowed: refused sums after which the run may go on.

    Raises:
        CheckpointError: more were refused, or the list cannot be read.
    """

    def __init__(self, me: str, log: Path | None, *, allowed: int) -> None:
        self._me, self._log = me, log
        if (noted := self._noted()) > allowed:
            raise CheckpointError(
                f"{me} refused {noted} sum{'s' * (noted > 1)} of this run, and rules.refused_sums "
                f"is {allowed}. Whoever altered them (the aggregator, or a passive) may have "
                "learnt bits of the passives' numbers from which were taken, and a resumed run "
                "computes the same numbers again. Find out who it was; then begin a new run with "
                "another seed, among parties that you trust. If it was nobody's intent, resume "
                f"with rules.refused_sums: {noted} in the run's config.yaml"
            )

    def _noted(self) -> int:
        if self._log is None or not os.path.lexists(self._log):
            return 0
        with open_plain(self._log) as lines:
            return sum(1 for line in lines.read(MOST_JSON_BYTES).splitlines() if line.strip())

    @contextmanager
    def noting(self, *, step: int, contract: str) -> Iterator[None]:
        """Note a refusal of the sum of `step` within: it is on the disk before the error leaves.

        Our own misuse is none, nor is an interruption.

        Raises:
            CheckpointError: it cannot be noted.
        """
        try:
            yield
        except LocalProtocolError:
            raise
        except Exception:
            self._note(step, contract)
            raise

    def _note(self, step: int, contract: str) -> None:
        if self._log is None:
            return
        try:
            _add_line(self._log, {"contract": contract, "step": step})
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{self._log}: cannot note that {self._me} refused the sum of step {step} "
                f"({error}); do not resume this run, which could not count it"
            ) from error


OPEN_AUDITS = 1
"""After which a passive still takes part; each gives an active that cheats another chance."""


class OpenAudits:
    """Audits of encrypted labels that ended before their request came, over all sessions of a run.

    Protects from: an active that falls silent where the coin keeps a request that is sound, until
    it keeps one that is not. A line is written before anybody hears what the coin says, and another
    once the request stood the test; where the first has no second, the session was broken off.

    Args:
        me: a passive.
        log: file of the list, readable by its owner only; None: nothing is noted.
    """

    def __init__(self, me: str, log: Path | None) -> None:
        self._me, self._log = me, log

    def begin(self, *, contract: str) -> None:
        """Note an audit before what it keeps is told.

        Raises:
            CheckpointError: too many were left open, or it cannot be noted.
        """
        if (left := self._left()) > OPEN_AUDITS:
            raise CheckpointError(
                f"{self._me}: {left} sessions ended between the word which request with encrypted "
                f"labels is kept and that request, and {OPEN_AUDITS} may. An active that cheats "
                "breaks off where it would be found out; find out who it was, and begin a new run"
            )
        self._note("begun", contract)

    def end(self, *, contract: str) -> None:
        """Note that the request of this session stood the test."""
        self._note("passed", contract)

    def _left(self) -> int:
        if self._log is None or not os.path.lexists(self._log):
            return 0
        with open_plain(self._log) as lines:
            told = lines.read(MOST_JSON_BYTES)
        return told.count(b'"begun"') - told.count(b'"passed"')

    def _note(self, what: str, contract: str) -> None:
        if self._log is None:
            return
        try:
            _add_line(self._log, {"audit": what, "contract": contract})
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{self._log}: cannot note an audit ({error})") from error


def _add_line(log: Path, fields: Mapping[str, Any]) -> None:
    """Write a line to the disk; it begins with a line's end, since the one before may be torn."""
    with FileIO(open_regular(log, create=True), "a") as lines:
        lines.write(f"\n{json.dumps(fields)}\n".encode())
        os.fsync(lines.fileno())


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


def bind_step(session: str, step: int, rows_B: Tensor, payload: bytes) -> StepBinding:
    """What a contribution answers: this session, step, rows and representations."""
    rows = rows_B.detach().cpu().contiguous().numpy().astype("<i8").tobytes()
    return StepBinding(
        session=session,
        step=step,
        rows=hashlib.sha256(rows).digest(),
        message=hashlib.sha256(payload).digest(),
    )


def write_sum(present: Sequence[str], combined: bytes) -> bytes:
    """A message of a sum: the passives that take part still, and the sum."""
    packed: bytes = msgpack.packb([list(present), combined])
    return packed


def read_sum(
    message: Envelope, asked: Sequence[str], contract: Contract
) -> tuple[Sequence[str], bytes]:
    """Return which of the asked passives take part still, and the sum.

    Raises:
        RemoteProtocolError: no such message, or it counts others than the contract allows.
    """
    try:
        present, combined = msgpack.unpackb(message.payload)
    except (ValueError, TypeError, msgpack.UnpackException):
        present, combined = None, None
    if (
        not isinstance(present, list)
        or not isinstance(combined, bytes)
        or not all(isinstance(name, str) for name in present)
    ):
        raise RemoteProtocolError(
            f"{message.sender} sent something else than a sum and who takes part still"
        )
    may_leave = contract.silent_passive == "recover"
    least = contract.secure_sum["threshold"] if may_leave else len(asked)
    allowed = [name for name in asked if name in present or not may_leave]
    if present != allowed or len(present) < least:
        raise RemoteProtocolError(
            f"{message.sender} counts {', '.join(present)[:200] or 'nobody'} in the sum of step "
            f"{message.step}; the contract allows {'at least' if may_leave else 'exactly'} "
            f"{least} of {', '.join(asked)}"
        )
    return present, combined
