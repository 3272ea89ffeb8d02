"""Recordings in which an active asked about rows: planted pseudo-labels, and planted sums."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.exchange import Envelope, Kind, pack
from secure_apfed.methods import METHODS
from secure_apfed.runs.outcome import Recording

__all__ = ["ask"]


def ask(
    empty: Recording, method: str, *, z: Sequence[Tensor] = (), opened: Sequence[Tensor] = ()
) -> Recording:
    """Fill a recording in which nothing was sent with one request an epoch, about trained rows.

    Args:
        empty: of parties that aligned.
        method: that is said to have trained.
        z: by epoch, what is sent of all aligned rows (A, C).
        opened: by epoch, what the active opens of them (A, D).
    """
    aligned, data = empty.alignment["active"], empty.data
    rows = torch.isin(aligned, data.train_rows).nonzero().flatten().flip(0)
    for epoch in range(max(len(z), len(opened))):
        empty.transcript.begin_epoch(epoch)
        tensors = {"rows": rows} | ({"z": z[epoch][rows].double()} if z else {})
        for passive in data.passives:
            asked = Envelope(
                session="planted", step=epoch, kind=Kind.REQUEST, sender="active",
                receiver=passive.name, sequence=epoch, payload=pack(tensors),
            )  # fmt: skip
            empty.transcript.record(asked, 0)
        if opened:
            empty.transcript.keep_opened(epoch, opened[epoch][rows].double())
    settings = empty.config.model_dump(mode="json")
    network = "identity" if METHODS[method].settings.averages else "mlp"
    said = {
        "method": method, "model": {"network": network},
        "secure_sum": {"clip": 8.0, "scheme": "plain", "masks": "pairwise"},
    }  # fmt: skip
    return replace(empty, config=Config.model_validate(settings | said))
