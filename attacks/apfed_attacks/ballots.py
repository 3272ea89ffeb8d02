"""Reads ballots out of a view: who was asked about, which labels were shown, what was voted.

Helpers of the attacks on votes; the counterpart of `apfed_attacks.view`, which reads
representations. Letters: U rows asked about, n of them labelled, K classes, M passives.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apfed_attacks.columns import FloatArray
from apfed_attacks.interface import Attack
from apfed_attacks.view import AdversaryView, AttackError, Observed
from secure_apfed.exchange import Envelope, Kind, TensorSpec, unpack
from secure_apfed.labellers import Spreading

__all__ = ["Asked", "asked", "asked_positions", "own_votes", "votes_read", "why_no_votes"]

_VECTOR = TensorSpec(torch.int64, (None,))


@dataclass(frozen=True, eq=False)
class Asked:
    """A request for votes, as its sender wrote it.

    Attributes:
        rows: (U,) alignment positions.
        labelled: (n,) those with a label.
        labels: (n,) of these; None where the message shows none.
    """

    rows: Tensor
    labelled: Tensor
    labels: Tensor | None


def asked(view: AdversaryView) -> Asked | None:
    """The first request for votes that the view holds; None: there is none.

    Rows are as they were sent; who reads what was said of them exchanges it in a decoy.
    """
    envelope = next(_of_kind(view, Kind.LABELS), None)
    if envelope is None:
        return None
    shown = view.description.labels == "shown"
    expected = {"rows": _VECTOR, "labelled": _VECTOR} | ({"labels": _VECTOR} if shown else {})
    tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
    rows_U = tensors["rows"]
    return Asked(rows_U, rows_U[tensors["labelled"]], tensors.get("labels"))


def asked_positions(view: AdversaryView) -> Tensor:
    """Return the positions (U,) of the request, ascending; none where there is no request."""
    ballot = asked(view)
    return torch.empty(0, dtype=torch.int64) if ballot is None else ballot.rows.sort().values


def why_no_votes(attack: Attack, view: AdversaryView) -> str | None:
    """Return why this view gives `attack` no votes on rows to read."""
    if reason := attack.wrong_role(view):
        return reason
    if view.description.labels is None:
        return f"{view.description}: nobody votes"
    if view.description.opens == "moment of votes":
        return f"{view.description}: a moment of votes is opened, and nothing row by row"
    if view.description.labels == "encrypted":
        return f"{view.description}: whom a ballot of encrypted labels names is not read here yet"
    if asked(view) is None or not votes_read(view):
        return "the transcript kept no votes; set transcript.keep to first_and_last or all"
    return None


def votes_read(view: AdversaryView) -> dict[str, Observed]:
    """What the active read: "sum", or each passive's answers as unit vectors, by its name."""
    ballot = asked(view)
    if ballot is None:
        return {}
    rows_U = view.attributed(ballot.rows)
    if view.description.opens == "sum of votes":
        return {"sum": _in_order(rows_U, view.opened[min(view.opened)])} if view.opened else {}
    found: dict[str, Observed] = {}
    for envelope in _of_kind(view, Kind.VOTES):
        expected = {"votes": TensorSpec(torch.int16, (len(rows_U),))}
        tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
        answer_UK = torch.nn.functional.one_hot(tensors["votes"].long(), view.knowledge.classes)
        found.setdefault(envelope.sender, _in_order(rows_U, answer_UK.double().to(view.device)))
    return found


def own_votes(
    features_UF: FloatArray, labelled_n: Tensor, labels_n: Tensor, classes: int
) -> FloatArray:
    """What a party would vote itself, with label spreading; its places of labelled rows ascend.

    Raises:
        AttackError: nothing is labelled.
    """
    if not len(labelled_n):
        raise AttackError("no row is labelled, so nobody can vote")
    return Spreading().label(features_UF, labelled_n.numpy(), labels_n.numpy(), classes)


def _of_kind(view: AdversaryView, kind: Kind) -> Iterator[Envelope]:
    for epoch in sorted(view.envelopes):
        yield from (one for one in view.envelopes[epoch] if one.kind is kind)


def _in_order(rows_U: Tensor, votes_UK: Tensor) -> Observed:
    """Rows of the votes by ascending position."""
    positions, order = rows_U.sort()
    return Observed(positions, votes_UK[order])
