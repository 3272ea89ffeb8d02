"""Reads requests out of a view: whom the active asked about, what it sent along, what it opened.

Letters: N rows, B batch, C classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apfed_attacks.observed import Observed, every_position, latest_of
from apfed_attacks.view import AdversaryView
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange import Envelope, Kind, TensorSpec, unpack

__all__ = [
    "Request", "opened_epochs", "opened_sums", "pseudo_labels", "requested_positions", "requests",
]  # fmt: skip

_ROWS = TensorSpec(torch.int64, (None,))
_FORMS = ({"rows": _ROWS}, {"rows": _ROWS, "z": TensorSpec(torch.float64, (None, None))})


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
    return every_position(
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
    return latest_of(sent)


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
    return latest_of(list(opened.values()))


def _request(envelope: Envelope) -> dict[str, Tensor] | None:
    """The tensors of a request about rows; None: it is about something else."""
    for expected in _FORMS:
        try:
            return unpack(envelope.payload, expected, sender=envelope.sender)[0]
        except RemoteProtocolError:
            continue
    return None
