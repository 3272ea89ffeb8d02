"""Recordings of ballots that were made up: what is shown and voted is planted."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.exchange import Envelope, Kind, pack
from secure_apfed.runs.outcome import Recording

__all__ = ["Voting", "ballot_of"]

Voting: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""(features of passive-1 by row asked about, generator) -> votes (U, K)."""

_LABELLED = 60


def ballot_of(
    empty: Recording, *, method: str, voting: Voting, true_labels: bool = True, seed: int = 0
) -> Recording:
    """Fill a recording in which nothing was sent with one ballot over all training rows.

    With `true_labels` the labels shown are those of the people, else any. Randomised answers are
    the same at each passive.
    """
    draw = torch.Generator().manual_seed(seed)
    data, transcript = empty.data, empty.transcript
    aligned = empty.alignment["active"]
    rows = torch.isin(aligned, data.train_rows).nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=draw)]
    assert data.active.labels is not None
    labels = data.active.labels[aligned][rows[:_LABELLED]]
    if not true_labels:
        labels = torch.randint(0, len(data.classes), labels.shape, generator=draw)
    votes = voting(data.passives[0].features[empty.alignment["passive-1"]][rows], draw)
    payload = pack({"rows": rows, "labelled": torch.arange(_LABELLED), "labels": labels})
    answers = pack({"votes": votes.argmax(dim=1).short()})
    transcript.begin_epoch(0)
    for number, passive in enumerate(("passive-1", "passive-2")):
        transcript.record(_sent(Kind.LABELS, "active", passive, number, payload), 0)
        if method == "votes_randomised":
            transcript.record(_sent(Kind.VOTES, passive, "active", number, answers), 0)
    transcript.keep_opened(0, votes.double())
    settings = empty.config.model_dump(mode="json")
    settings |= {"method": {"name": method, "epsilon": 4.0}}
    return replace(empty, config=Config.model_validate(settings))


def _sent(kind: Kind, sender: str, receiver: str, sequence: int, payload: bytes) -> Envelope:
    return Envelope(
        session="planted", step=0, kind=kind, sender=sender, receiver=receiver,
        sequence=sequence, payload=payload,
    )  # fmt: skip
