"""Reads an `AdversaryView`: what was released, returned, asked about and opened, row by row.

Letters: N observed rows, B batch, D numbers of a representation, C classes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
import torch
from torch import Tensor

from apfed_attacks.view import AdversaryView, AttackError
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange import Envelope, Kind, TensorSpec, unpack

__all__ = [
    "Observed",
    "Request",
    "answered_positions",
    "batches",
    "collect",
    "first_and_last",
    "gradients",
    "latest",
    "mean",
    "opened_epochs",
    "opened_sums",
    "pseudo_labels",
    "released",
    "released_positions",
    "representations",
    "requested_positions",
    "requests",
]

_FIRST_AND_LAST = 2

# Vectors or convolution maps; what is sent is never narrower than float32.
_LAYOUTS = tuple(
    (dtype, dimensions) for dtype in (torch.float32, torch.float64) for dimensions in (2, 4, 3)
)
_ROWS = TensorSpec(torch.int64, (None,))
# What a request about rows may hold.
_FORMS = ({"rows": _ROWS}, {"rows": _ROWS, "z": TensorSpec(torch.float64, (None, None))})


@dataclass(frozen=True, eq=False)
class Observed:
    """One vector for each of N rows.

    Attributes:
        positions: (N,) int64 alignment positions, ascending, each once.
        z: (N, D) what was released, returned or opened of them; maps are flattened.
    """

    positions: Tensor
    z: Tensor

    def at(self, positions: Tensor) -> Tensor:
        """Return (len(positions), D) of positions that were all observed."""
        return self.z[torch.searchsorted(self.positions, positions)]


@dataclass(frozen=True, eq=False)
class Request:
    """Which rows the active asked a passive about.

    Attributes:
        receiver, step: of the message.
        rows: (B,) alignment positions.
        z: (B, C) pseudo-labels of them; None: none came.
    """

    receiver: str
    step: int
    rows: Tensor
    z: Tensor | None


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
            of_sender.setdefault(envelope.sender, []).append(_open(view, envelope))
    if not of_sender:
        raise KeyError(f"{view.name} holds no representations of epoch {epoch}")
    return _side_by_side(of_sender)


def gradients(view: AdversaryView, epoch: int) -> Observed:
    """Return the task loss's gradients that passives of the coalition received in `epoch`.

    A gradient's rows are those of the representations that it answers or, where these went into a
    sum, of the request for them.

    Raises:
        KeyError: the view holds no gradient of that epoch.
        RemoteProtocolError: a payload of another form.
    """
    of_receiver: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for envelope, rows in _answers(view, epoch):
        values_BD = _tensors(view, envelope, "gradient")["gradient"].flatten(1)
        of_receiver.setdefault(envelope.receiver, []).append((rows, values_BD))
    if not of_receiver:
        raise KeyError(f"{view.name} holds no gradients of epoch {epoch}")
    return _side_by_side(of_receiver)


def answered_positions(view: AdversaryView) -> Tensor:
    """Return the positions (N,) of which the view holds any gradient, ascending."""
    return _every_position(rows for epoch in view.envelopes for _, rows in _answers(view, epoch))


def _answers(view: AdversaryView, epoch: int) -> Iterator[tuple[Envelope, Tensor]]:
    """Yield the gradients of an epoch, and the rows of the representations that each answers."""
    envelopes = view.envelopes.get(epoch, ())
    returned = [envelope for envelope in envelopes if envelope.kind is Kind.GRADIENTS]
    if not returned:
        return
    rows = {(asked.receiver, asked.step): asked.rows for asked in requests(view, epoch)}
    rows |= {
        (envelope.sender, envelope.step): _open(view, envelope)[0]
        for envelope in envelopes
        if envelope.kind is Kind.REPRESENTATIONS
    }
    for envelope in returned:
        if (answered := rows.get((envelope.receiver, envelope.step))) is not None:
            yield envelope, answered


def batches(view: AdversaryView, epoch: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (step, rows (B,), representations (B, D)) of an epoch, each step once.

    What one sender sends to several receivers in a step is the same.
    """
    seen = set()
    for envelope in view.envelopes[epoch]:
        if envelope.kind is Kind.REPRESENTATIONS and envelope.step not in seen:
            seen.add(envelope.step)
            yield envelope.step, *_open(view, envelope)


def collect(read: Callable[[int], Observed], epochs: Iterable[int]) -> Observed:
    """Return for each position what the first of `epochs` with that position holds.

    A row may be missing from an epoch (a batch with too few aligned rows is not sent), so
    reversed epochs give the latest values and ascending ones the earliest. All rows of all epochs
    are there, so that an attack and its decoy speak of the same ones.

    Args:
        read: reads one epoch, such as `partial(representations, view)`.
        epochs: in the order of preference.

    Raises:
        AttackError: there is none.
    """
    order = iter(epochs)
    first = next(order, None)
    if first is None:
        raise AttackError("no representation was recorded")
    found = read(first)
    for epoch in order:
        seen = read(epoch)
        new_N = ~torch.isin(seen.positions, found.positions)
        if not new_N.any():
            continue
        positions, ascending = torch.cat([found.positions, seen.positions[new_N]]).sort()
        found = Observed(positions, torch.cat([found.z, seen.z[new_N]])[ascending])
    return found


def latest(view: AdversaryView, sender: str | None = None) -> Observed:
    """Return of each position the last representation that the view holds, of `sender` only."""
    return collect(partial(representations, view, sender=sender), reversed(view.epochs))


def released(view: AdversaryView, sender: str | None = None) -> dict[str, Observed]:
    """Return the last representation of each position as "h" and, of many epochs, "mean h".

    Noise that is fresh in each epoch averages out in the mean. Of two epochs, which is what a
    transcript keeps unless it is asked for more, there is none: between the first and the last
    the network learnt, so that their mean is neither.
    """
    found = {"h": latest(view, sender)}
    if len(view.epochs) > _FIRST_AND_LAST:
        found["mean h"] = mean(partial(representations, view, sender=sender), view.epochs)
    return found


def mean(read: Callable[[int], Observed], epochs: Iterable[int]) -> Observed:
    """Return the mean of what `read` finds of each position in the epochs that have it."""
    found = [read(epoch) for epoch in epochs]
    positions = torch.cat([seen.positions for seen in found]).unique()
    total_ND = found[0].z.new_zeros(len(positions), found[0].z.shape[1], dtype=torch.float64)
    count_N1 = total_ND.new_zeros(len(positions), 1)
    for seen in found:
        rows = torch.searchsorted(positions, seen.positions)
        total_ND[rows] += seen.z.double()
        count_N1[rows] += 1
    return Observed(positions, total_ND / count_N1)


def first_and_last(
    read: Callable[[AdversaryView, int], Observed], view: AdversaryView, epochs: Sequence[int]
) -> tuple[Observed, Observed]:
    """Return what `read` finds first and last of each position in ascending `epochs`."""
    of_epoch = partial(read, view)
    return collect(of_epoch, epochs), collect(of_epoch, reversed(epochs))


def released_positions(view: AdversaryView) -> Tensor:
    """Return the positions (N,) of which the view holds any representation, ascending."""
    return _every_position(
        _open(view, envelope)[0]
        for epoch in view.epochs
        for envelope in view.envelopes[epoch]
        if envelope.kind is Kind.REPRESENTATIONS
    )


def requests(view: AdversaryView, epoch: int) -> Iterator[Request]:
    """Yield the requests about rows of an epoch; the others are about none."""
    for envelope in view.envelopes.get(epoch, ()):
        if envelope.kind is Kind.REQUEST and (tensors := _request(envelope)) is not None:
            rows_B, z_BC = view.attributed(tensors["rows"]), tensors.get("z")
            if z_BC is not None:
                z_BC = z_BC.to(view.device) if len(z_BC) == len(rows_B) else None
            yield Request(envelope.receiver, envelope.step, rows_B, z_BC)


def requested_positions(view: AdversaryView, *, told: bool = False) -> Tensor:
    """Return the positions (N,) of all requests, ascending.

    Args:
        view: what to read.
        told: only of those of which it reads more: what was sent with them, or opened of them.
    """
    return _every_position(
        asked.rows
        for epoch in view.envelopes
        for asked in requests(view, epoch)
        if not told or asked.z is not None or asked.step in view.opened
    )


def pseudo_labels(view: AdversaryView, epoch: int) -> Observed:
    """Return the common pseudo-labels that the active sent in `epoch`, the last of each position.

    Raises:
        KeyError: the view holds none of that epoch.
    """
    sent = [(one.rows, one.z) for one in requests(view, epoch) if one.z is not None]
    if not sent:
        raise KeyError(f"{view.name} holds no pseudo-labels of epoch {epoch}")
    return _latest_of(sent)


def opened_epochs(view: AdversaryView) -> tuple[int, ...]:
    """Return the epochs, ascending, of which the view holds anything opened row by row."""
    return tuple(
        epoch
        for epoch in sorted(view.envelopes)
        if any(asked.step in view.opened for asked in requests(view, epoch))
    )


def opened_sums(view: AdversaryView, epoch: int) -> Observed:
    """Return what the active opened of each position that it asked about in `epoch`.

    Raises:
        KeyError: the view holds no such sum of that epoch.
    """
    opened = {
        asked.step: (asked.rows, view.opened[asked.step])
        for asked in requests(view, epoch)
        if asked.step in view.opened
    }
    if not opened:
        raise KeyError(f"{view.name} holds no sums of epoch {epoch}")
    return _latest_of(list(opened.values()))


def _open(view: AdversaryView, envelope: Envelope) -> tuple[Tensor, Tensor]:
    """Return rows (B,) and representations (B, D)."""
    tensors = _tensors(view, envelope, "z", rows=True)
    return view.attributed(tensors["rows"]), tensors["z"].flatten(1)


def _tensors(
    view: AdversaryView, envelope: Envelope, name: str, *, rows: bool = False
) -> dict[str, Tensor]:
    refusals = []
    for dtype, dimensions in _LAYOUTS:
        expected = {name: TensorSpec(dtype, (None,) * dimensions)}
        if rows:
            expected["rows"] = TensorSpec(torch.int64, (None,))
        try:
            tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
        except RemoteProtocolError as refusal:
            refusals.append(refusal)
        else:
            _check_finite(tensors[name], envelope)
            return {**tensors, name: tensors[name].to(view.device)}
    raise refusals[0]


def _check_finite(values: Tensor, envelope: Envelope) -> None:
    if not bool(torch.isfinite(values).all()):
        raise AttackError(
            f"{envelope.sender} sent {envelope.kind} in step {envelope.step} that are not finite; "
            "there is nothing to fit"
        )


def _side_by_side(of_party: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> Observed:
    """Join the parties' columns, in the order of their names, for the rows that all have."""
    blocks = [_latest_of(of_party[name]) for name in sorted(of_party)]
    common = torch.from_numpy(reduce(np.intersect1d, [block.positions.numpy() for block in blocks]))
    return Observed(common, torch.cat([block.at(common) for block in blocks], dim=1))


def _request(envelope: Envelope) -> dict[str, Tensor] | None:
    """The tensors of a request about rows; None: it is about something else."""
    for expected in _FORMS:
        try:
            return unpack(envelope.payload, expected, sender=envelope.sender)[0]
        except RemoteProtocolError:
            continue
    return None


def _every_position(rows: Iterable[Tensor]) -> Tensor:
    """Every position once, ascending."""
    positions: Tensor = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).unique()
    return positions


def _latest_of(batches: Sequence[tuple[Tensor, Tensor]]) -> Observed:
    """Of batches of rows (B,) and vectors (B, D), at least one, the last vector of each row."""
    rows = torch.cat([rows for rows, _ in batches])
    z_ND = torch.cat([z_BD for _, z_BD in batches])
    # np.unique returns the first occurrence, so the order is reversed to keep the last.
    positions, first = np.unique(rows.flip(0).numpy(), return_index=True)
    return Observed(torch.from_numpy(positions), z_ND.flip(0)[torch.from_numpy(first)])
