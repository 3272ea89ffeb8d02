"""What one adversary saw and knows: the only input that an attack ever gets.

Run by: the experimenter, after a run, who cuts a recording into views. A view holds the
envelopes that the coalition itself sent or received and its members' own features; nothing
of the other parties, so no attack can touch a victim's state by accident. Views are cut in
`attacks.recorded`; code that is not ours can build one from its own messages.

Letters: A aligned rows, N observed rows, B batch, D numbers of a representation,
F features, K classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from protocols.errors import RemoteProtocolError
from secure_apfed.exchange import Envelope, Flow, Kind, TensorSpec, unpack
from secure_apfed.models.settings import ModelSettings

__all__ = [
    "AdversaryView",
    "Behaviour",
    "Budget",
    "Knowledge",
    "KnownRows",
    "Observed",
    "Role",
    "batches",
    "collect",
    "representations",
]

Role: TypeAlias = Literal["passive", "active", "aggregator", "eavesdropper", "outsider"]
Behaviour: TypeAlias = Literal["curious", "malicious"]

# Vectors or convolution maps; what is sent is never narrower than float32.
_LAYOUTS = tuple(
    (dtype, dimensions) for dtype in (torch.float32, torch.float64) for dimensions in (2, 4, 3)
)


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class KnownRows:
    """Rows of which the adversary knows something that it did not observe.

    Attributes:
        positions: (n,) int64 alignment positions, each once.
        values: (n, ...) the labels (n,), or a victim's features (n, F).
    """

    positions: Tensor = field(default_factory=_no_rows)
    values: Tensor = field(default_factory=_no_rows)

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False, kw_only=True)
class Knowledge:
    """What is declared that the adversary knows beyond what it saw.

    Attributes:
        classes: K.
        victim: the party whose labels or features are attacked.
        labels: known labels by alignment position.
        priors: the share of each class among the training rows; None: unknown to it.
        shadow: rows of which it knows the victim's features, for paired inversion.
        architecture: the victim's networks; None: unknown to it.
    """

    classes: int
    victim: str | None = None
    labels: KnownRows = field(default_factory=KnownRows)
    priors: tuple[float, ...] | None = None
    shadow: KnownRows = field(default_factory=KnownRows)
    architecture: ModelSettings | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much the adversary computes.

    Attributes:
        iterations: of any optimiser that the attack runs. Not seconds: a result must not
            depend on the machine.
    """

    iterations: int = 300


@dataclass(frozen=True, eq=False, kw_only=True)
class AdversaryView:
    """Everything that an attack may use.

    Attributes:
        role: of the first party.
        parties: the adversary and, after it, those that collude with it.
        behaviour: "curious" follows the protocol; "malicious" chose what it sent.
        method: how the run trained.
        envelopes: epoch -> what the coalition sent and received, in that order.
        flows: message counts and sizes of the coalition's links (an eavesdropper's: all).
        opened: step -> (B, D) the sum of lambda_p B dL_p/dz that the active decoded, its rows in
            the order of that step's representations. No message holds it: where sums are
            encrypted only the active's own record does.
        features: member -> (A, ...) its own features; row k is alignment position k.
        knowledge, budget: what is declared.
    """

    role: Role
    parties: tuple[str, ...]
    behaviour: Behaviour
    method: str
    envelopes: Mapping[int, tuple[Envelope, ...]] = field(repr=False)
    flows: tuple[Flow, ...] = field(default=(), repr=False)
    opened: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    features: Mapping[str, Tensor] = field(repr=False)
    knowledge: Knowledge
    budget: Budget = Budget()

    @property
    def name(self) -> str:
        """The coalition in words."""
        return " + ".join(self.parties)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epochs in which the coalition saw representations, ascending."""
        return tuple(sorted(epoch for epoch in self.envelopes if self.senders(epoch)))

    def senders(self, epoch: int) -> frozenset[str]:
        """Who released representations in this epoch, as far as the coalition saw."""
        return frozenset(
            envelope.sender
            for envelope in self.envelopes[epoch]
            if envelope.kind is Kind.REPRESENTATIONS
        )


@dataclass(frozen=True, eq=False)
class Observed:
    """Representations of one epoch.

    Attributes:
        positions: (N,) int64 alignment positions, ascending, each once.
        z: (N, D) what was released for them; maps are flattened.
    """

    positions: Tensor
    z: Tensor

    def at(self, positions: Tensor) -> Tensor:
        """Return (len(positions), D) of positions that were all observed."""
        return self.z[torch.searchsorted(self.positions, positions)]


def representations(view: AdversaryView, epoch: int, sender: str | None = None) -> Observed:
    """Return what the view holds of `epoch`, the latest release of each position.

    Representations of several senders (TVFL's passives) stand side by side, in the order of
    their names, for the positions that all of them released.

    Args:
        view: what to read.
        epoch: one of `view.epochs`.
        sender: leave out what others released.

    Raises:
        KeyError: the view holds no such representation.
        RemoteProtocolError: a payload that is not rows and representations.
    """
    of_sender: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for envelope in view.envelopes.get(epoch, ()):
        if envelope.kind is Kind.REPRESENTATIONS and sender in (None, envelope.sender):
            of_sender.setdefault(envelope.sender, []).append(_open(envelope))
    if not of_sender:
        raise KeyError(f"{view.name} holds no representations of epoch {epoch}")
    blocks = [_latest(of_sender[name]) for name in sorted(of_sender)]
    common = torch.from_numpy(reduce(np.intersect1d, [block.positions.numpy() for block in blocks]))
    return Observed(common, torch.cat([block.at(common) for block in blocks], dim=1))


def batches(view: AdversaryView, epoch: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (step, rows (B,), representations (B, D)) of an epoch, each step once.

    What one sender sends to several receivers in a step is the same.
    """
    seen = set()
    for envelope in view.envelopes[epoch]:
        if envelope.kind is Kind.REPRESENTATIONS and envelope.step not in seen:
            seen.add(envelope.step)
            yield envelope.step, *_open(envelope)


def collect(view: AdversaryView, epochs: Iterable[int], sender: str | None = None) -> Observed:
    """Return for each position its release in the first of `epochs` that holds one.

    A row may be missing from an epoch (a batch with too few aligned rows is not sent), so
    `reversed(view.epochs)` gives the latest releases and `view.epochs` the earliest ones.
    Ends at the first epoch that adds no row.
    """
    found = Observed(torch.empty(0, dtype=torch.int64), torch.empty(0))
    for epoch in epochs:
        seen = representations(view, epoch, sender)
        new_N = ~torch.isin(seen.positions, found.positions)
        if not new_N.any():
            break
        positions, order = torch.cat([found.positions, seen.positions[new_N]]).sort()
        old_ND = found.z if len(found.positions) else seen.z[:0]
        found = Observed(positions, torch.cat([old_ND, seen.z[new_N]])[order])
    return found


def _open(envelope: Envelope) -> tuple[Tensor, Tensor]:
    """Return rows (B,) and representations (B, D)."""
    refusals = []
    for dtype, dimensions in _LAYOUTS:
        expected = {
            "rows": TensorSpec(torch.int64, (None,)),
            "z": TensorSpec(dtype, (None,) * dimensions),
        }
        try:
            tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
        except RemoteProtocolError as refusal:
            refusals.append(refusal)
        else:
            return tensors["rows"], tensors["z"].flatten(1)
    raise refusals[0]


def _latest(batches: Sequence[tuple[Tensor, Tensor]]) -> Observed:
    rows = torch.cat([rows for rows, _ in batches])
    z_ND = torch.cat([z_BD for _, z_BD in batches])
    # np.unique returns the first occurrence, so the order is reversed to keep the last.
    positions, first = np.unique(rows.flip(0).numpy(), return_index=True)
    return Observed(torch.from_numpy(positions), z_ND.flip(0)[torch.from_numpy(first)])
