"""What every method offers to the run that drives it, and what it is started with."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from secure_apfed.contract import Contract
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Transcript
from secure_apfed.parties import ActiveNetworks
from secure_apfed.privacy import PrivacyLedger, WholeTraining
from secure_apfed.seeds import shuffled
from secure_apfed.settings.run import RunSettings

__all__ = ["Method", "PartyTensors", "Start", "begin_epoch", "restore_state", "state_of"]

PartyTensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a checkpoint, by party and name."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a session begins with.

    Attributes:
        config, data: of the run.
        noise_keys: by party, 32 bytes; secrets of their parties.
        session: unique; names this session in every message.
        alignment: by party, from an earlier session of the run; None: intersect now.
        logs: folder of the ledgers' write-ahead logs; None: keep them in memory.
    """

    config: RunSettings
    data: VerticalData
    noise_keys: Mapping[str, bytes] = field(repr=False)
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    alignment: Mapping[str, Tensor] | None = None
    logs: Path | None = None


class _Active(Protocol):
    name: str

    def tensors(self) -> dict[str, Tensor]: ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class _Passive(Protocol):
    name: str

    def tensors(self) -> dict[str, Tensor]: ...

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None: ...


def state_of(active: _Active, passives: Sequence[_Passive]) -> PartyTensors:
    """State of all parties that hold any."""
    return {
        active.name: active.tensors(),
        **{passive.name: passive.tensors() for passive in passives},
    }


def restore_state(
    active: _Active, passives: Sequence[_Passive], tensors: PartyTensors, *, next_step: int
) -> None:
    """Restore what `state_of` returned before step `next_step`."""
    active.load_tensors(tensors[active.name])
    for passive in passives:
        passive.load_tensors(tensors[passive.name], last_step=next_step - 1)


class Method(Protocol):
    """One learning procedure: parties that exchange envelopes in protocol order.

    Attributes:
        headline: the variant of `evaluate` that the run reports first.
        alignment: by party, positions in its own table of the aligned people; -1 where it
            does not know the person (mode pairwise).
        training_rows: what an epoch goes through, in batches; their meaning is the method's.
        smallest_batch: rows below which a last batch is left out.
        ledgers: by party that releases representations, and of private updates where there are.
        training: the account of private training; None where training is not private.
        contributions: those of `ledgers` that count a passive's contributions to sums with noise.
        guarantee: what the guard promises, in a sentence.
        secure_sum: public parameters of the sum, empty where there is none.
    """

    headline: str
    contract: Contract
    transcript: Transcript
    alignment: Mapping[str, Tensor]
    training_rows: Tensor
    smallest_batch: int
    ledgers: Mapping[str, PrivacyLedger]
    contributions: Mapping[str, PrivacyLedger]
    training: WholeTraining | None
    guarantee: str
    secure_sum: Mapping[str, object]

    def step(self, step: int, rows_B: Tensor) -> float:
        """Play one training step of all parties; return the task loss."""
        ...

    def evaluate(self, *, next_step: int, final: bool) -> dict[str, float]:
        """Test accuracy by inference variant; `final` includes what needs an exchange."""
        ...

    def attendance(self) -> Mapping[str, object]:
        """Who fell silent in this session; empty where the method has no way on without one."""
        ...

    def solo(self) -> ActiveNetworks | None:
        """The networks that predict without any other party, if the method has them."""
        ...

    def encoders(self) -> Mapping[str, nn.Module]:
        """By passive, the network whose output it sends; empty where passives send none."""
        ...

    def tensors(self) -> PartyTensors:
        """State of all parties."""
        ...

    def load_tensors(self, tensors: PartyTensors, *, next_step: int) -> None:
        """Restore what `tensors` returned before step `next_step`."""
        ...


def begin_epoch(method: Method, config: RunSettings, epoch: int) -> list[Tensor]:
    """Tell the transcript, and return the epoch's batches: a function of seed and epoch.

    A last batch that is too small is left out.
    """
    method.transcript.begin_epoch(epoch)
    order = shuffled(method.training_rows, config.seed, "batches", epoch)
    batches = order.split(config.train.batch_size)
    return [rows_B for rows_B in batches if len(rows_B) >= method.smallest_batch]
