"""The experimenter's side of membership: who is asked about, and who of them trained.

Run by: whoever holds the recording of all parties. Letters: n candidates.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_attacks.view import AttackError, Candidates
from secure_apfed.data import UNLABELLED, PartyTable
from secure_apfed.methods.alignment import rows_among
from secure_apfed.methods.averaging import LinearViews
from secure_apfed.methods.multiview import MultiviewSettings, Pull
from secure_apfed.models import SequenceEncoder
from secure_apfed.runs.outcome import Recording
from secure_apfed.seeds import shuffled

__all__ = ["Strangers", "reveal_candidates", "reveal_people", "trained_alike"]

Strangers: TypeAlias = Literal["outside", "elsewhere"]
"""People who did not train at a party: of no party's training, or of another passive's."""


def reveal_candidates(recording: Recording, most: int, seed: int) -> tuple[Candidates, Tensor]:
    """Choose equally many rows that trained the active's model and that did not, and mix them.

    Args:
        recording: of a run whose active holds labels.
        most: rows in all, at most.
        seed: of the choice and the order.

    Returns:
        The candidates, and (n, 2) bool: who trained the model, and who was aligned.

    Raises:
        AttackError: fewer than two rows with a label trained, or did not.
    """
    data, config = recording.data, recording.config
    aligned = recording.alignment.get(data.active.name)  # None: it trained alone
    only = None if config.train.use_unaligned else aligned
    trained, rest = (
        _with_label(data.active, rows)
        for rows in (rows_among(data.train_rows, only), data.test_rows)
    )
    labels_N, count = data.active.labels, min(most // 2, len(trained), len(rest))
    if count < 2 or labels_N is None:
        raise AttackError(
            f"{len(trained)} rows with a label trained and {len(rest)} did not; an attack on "
            "membership needs two of each"
        )
    inside = shuffled(trained, seed, "attacks", "members")[:count]
    outside = shuffled(rest, seed, "attacks", "others")[:count]
    rows = shuffled(torch.cat([inside, outside]), seed, "attacks", "candidates")
    common = inside[:0] if aligned is None else aligned
    members = torch.stack([torch.isin(rows, inside), torch.isin(rows, common)], dim=1)
    return Candidates(data.active.features[rows], labels_N[rows], config.train), members


def reveal_people(
    recording: Recording, adversary: str, victim: str, most: int, seed: int, strangers: Strangers
) -> tuple[Candidates, Tensor]:
    """Choose as many people whom `victim` trained on as others, of a run whose parties share none.

    Args:
        recording: of the run.
        adversary: its own people are not asked about.
        victim: whose people are.
        most: people in all, at most.
        seed: of the choice and the order.
        strangers: who the others are.

    Returns:
        The candidates, and (n, 2) bool: who trained at the victim; nobody is aligned.

    Raises:
        AttackError: fewer than two of either.
    """
    data = recording.data
    tables = {table.name: table for table in data.tables}
    trained = {name: own.train_rows for name in tables if (own := data.own(name)) is not None}
    inside = [(tables[victim], trained[victim])]
    outside = [(data.active, data.test_rows)]
    if strangers == "elsewhere":
        others = [table for table in data.passives if table.name not in (adversary, victim)]
        outside = [(table, trained[table.name]) for table in others]
    members, rest = _rows_of(inside), _rows_of(outside)
    count = min(most // 2, len(members[1]), len(rest[1]))
    if count < 2:
        raise AttackError(
            f"{victim} trained on {len(members[1])} people, and there are {len(rest[1])} others "
            f"({strangers}); an attack on membership needs two of each"
        )
    chosen = [
        tuple(part[shuffled(torch.arange(len(part)), seed, "attacks", name)[:count]]
              for part in (features_N, labels_N))
        for name, (features_N, labels_N) in (("members", members), ("others", rest))
    ]  # fmt: skip
    order = shuffled(torch.arange(2 * count), seed, "attacks", "candidates")
    features_n, labels_n = (torch.cat(parts)[order] for parts in zip(*chosen, strict=True))
    told_n2 = torch.stack([order < count, torch.zeros_like(order, dtype=torch.bool)], dim=1)
    return Candidates(features_n, labels_n, recording.config.train), told_n2


def _with_label(table: PartyTable, rows: Tensor) -> Tensor:
    """Those of these rows of which the table tells a label."""
    return rows[:0] if table.labels is None else rows[table.labels[rows] != UNLABELLED]


def _rows_of(parts: Sequence[tuple[PartyTable, Tensor]]) -> tuple[Tensor, Tensor]:
    """Features and labels of the labelled ones of these rows of tables, which all hold labels."""
    if not parts:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    features, labels = [], []
    for table, of_table in parts:
        assert table.labels is not None
        rows = _with_label(table, of_table)
        features.append(table.features[rows])
        labels.append(table.labels[rows])
    return torch.cat(features), torch.cat(labels)


def trained_alike(
    recording: Recording, seed: int
) -> Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """Return how a party of the run would train on rows (n, ...) and labels (n,) alone.

    What comes of it is a function rows -> scores (N, K). GRUs are taken as the parties averaged
    them.
    """
    config, model, data = recording.config, recording.model, recording.data
    assert isinstance(model, nn.Sequential)
    encoder, classes = copy.deepcopy(model[0]), len(data.classes)
    columns = [view.columns for view in data.active.views.values()]
    settings = MultiviewSettings.of(config)

    @torch.no_grad()
    def parts(rows_N: Tensor) -> list[Tensor]:
        if isinstance(encoder, SequenceEncoder):
            rows_N = rows_N.to(next(encoder.to(rows_N.device).parameters()).dtype)
            return [part.double().cpu() for part in encoder.parts(rows_N)]
        return [rows_N.flatten(1)[:, view].double().cpu() for view in columns]

    def train(rows_n: Tensor, labels_n: Tensor) -> Callable[[Tensor], Tensor]:
        eta_n1 = torch.full((len(rows_n), 1), settings.eta, dtype=torch.float64)
        truth_nK = F.one_hot(labels_n, classes).double()
        pull = Pull(truth_nK.numpy(), eta_n1.numpy())
        views = LinearViews.begin(settings, parts(rows_n), pull, owner="adversary", seed=seed)
        views.train(0)
        weights = [torch.from_numpy(view.weights_FC) for view in views.views]

        def scores(rows_N: Tensor) -> Tensor:
            said = [part @ one for part, one in zip(parts(rows_N), weights, strict=True)]
            return torch.stack(said).mean(dim=0)

        return scores

    return train
