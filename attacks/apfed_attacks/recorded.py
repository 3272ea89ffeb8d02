"""The experimenter's side: cuts a finished run into views, knowledge and truth.

Run by: whoever holds the recording of all parties, which no real party does. Attacks import
`apfed_attacks.view` and never this module (a test holds them to it).
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_attacks.people.membership import Strangers
from apfed_attacks.scoring import Truth
from apfed_attacks.view import (
    AdversaryView,
    AgreedTerms,
    AttackError,
    Behaviour,
    Candidates,
    Exchange,
    Knowledge,
    KnownRows,
    Opened,
    PlayedAttack,
    Role,
    Sent,
    Side,
    draw_weights_anew,
    iter_batches,
    iter_requests,
)
from secure_apfed.base.seeds import derive_seed, shuffle_rows
from secure_apfed.config import Config
from secure_apfed.data import UNLABELLED, PartyTable
from secure_apfed.methods.alignment import find_positions_in_table_order, intersect_rows
from secure_apfed.methods.averaging import AveragingSettings, LinearViews
from secure_apfed.methods.multiview import LabelTerm
from secure_apfed.methods.terms import find_objective
from secure_apfed.networks.models import SequenceEncoder, make_encoder_and_head
from secure_apfed.runs.outcome import Recording


def truth_of(recording: Recording, victim: str | None = None) -> Truth:
    """Return labels of all aligned rows, and the victim's features.

    `trained` lists the training rows that the victim holds. Where it is None, features are of all
    parties, and all training rows are listed.
    """
    data = recording.data
    if data.active.name not in recording.alignment or not exchange_of(recording.config).aligned:
        raise AttackError("the run aligned no rows, so there is nothing to attack or to score")
    rows = recording.alignment[data.active.name]
    if data.active.labels is None:
        raise AttackError(f"{data.active.name} holds no labels, so no attack on them can be scored")
    return Truth(
        classes=len(data.classes),
        labels=data.active.labels[rows],
        trained=_list_training_positions(recording, victim).sort().values,
        features=_collect_features(
            recording, tuple(_get_tables(recording)) if victim is None else (victim,)
        ),
    )


def class_priors(truth: Truth) -> tuple[float, ...]:
    """Return the share of each class among the labelled training rows; nothing where labels are
    numbers.
    """
    if not truth.classes:
        return ()
    if not len(truth.positions_with_labels):
        raise AttackError("no aligned training row has a label, so that classes have no shares")
    counts_K = torch.bincount(truth.labels[truth.positions_with_labels], minlength=truth.classes)
    return tuple((counts_K / counts_K.sum()).tolist())


def reveal_labels(recording: Recording, per_class: int, seed: int) -> KnownRows:
    """Choose `per_class` aligned training rows of each class; fewer are a subset of more."""
    truth = truth_of(recording, recording.data.active.name)
    trained = _list_training_positions(recording)
    draw = np.random.default_rng(derive_seed(seed, "attacks", "labels"))
    chosen: list[int] = []
    for label in range(truth.classes if per_class else 0):
        rows = trained[truth.labels[trained] == label].numpy()
        if len(rows) <= per_class:
            raise AttackError(
                f"class {recording.data.classes[label]!r} has {len(rows)} aligned training rows; "
                f"{per_class} known ones leave none to score; lower labels_per_class"
            )
        chosen += draw.permutation(rows)[:per_class].tolist()
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    return KnownRows(positions, truth.labels[positions])


def reveal_features(recording: Recording, victim: str, rows: int, seed: int) -> KnownRows:
    """Choose `rows` aligned training rows of `victim` whose features there become known."""
    truth = truth_of(recording, victim)
    trained = _list_training_positions(recording, victim)
    if rows and rows >= len(trained):
        raise AttackError(
            f"{victim} holds {len(trained)} aligned training rows; {rows} known ones leave none "
            "to score; lower shadow_rows"
        )
    draw = np.random.default_rng(derive_seed(seed, "attacks", "features"))
    positions = torch.from_numpy(np.sort(draw.permutation(trained.numpy())[:rows]))
    return KnownRows(positions, truth.features[victim][positions])


def reveal_architecture(recording: Recording) -> Callable[[], nn.Module]:
    """Return what makes the active's networks with fresh weights, rows -> scores (N, K).

    Of networks that are code of its own, a copy of the recorded ones whose weights are drawn anew.
    """
    settings = recording.config.model
    shape = recording.data.table.shape
    classes = len(recording.data.classes)

    def make_network() -> nn.Module:
        """Return the active's networks in sequence, with fresh weights."""
        if not settings.is_own or recording.model is None:
            return nn.Sequential(*make_encoder_and_head(settings, shape, classes))
        network = copy.deepcopy(recording.model)
        draw_weights_anew(network)
        return network

    return make_network


def reveal_encoder(recording: Recording, victim: str) -> Callable[[Tensor], Tensor] | None:
    """Return the victim's network behind a function of rows of features, if it was recorded."""
    if (recorded := recording.encoders.get(victim)) is None:
        return None
    network = copy.deepcopy(recorded).requires_grad_(False)
    dtype = next(iter(network.state_dict().values())).dtype

    def encode_features(features_N: Tensor) -> Tensor:
        h_ND: Tensor = network.to(features_N.device)(features_N.to(dtype))
        return h_ND.flatten(1)

    return encode_features


def reveal_order(recording: Recording) -> dict[int, Tensor]:
    """Return the positions of the rows of each step to which the active asked for a sum, by step.

    They stand in what it sent to all passives, so that any of these can tell the aggregator.
    """
    ignorance = Knowledge(classes=len(recording.data.classes))
    view = view_of(recording, [recording.data.active.name], knowledge=ignorance)
    rows_by_step = {
        step: rows_B for epoch in view.epochs for step, rows_B, _ in iter_batches(view, epoch)
    }
    requests = (request for epoch in view.envelopes for request in iter_requests(view, epoch))
    return rows_by_step | {request.step: request.rows for request in requests}


def reveal_public(
    recording: Recording, parties: Sequence[str], rows: int, seed: int
) -> dict[str, Tensor]:
    """Choose up to `rows` people outside the training whom all of these and the active hold.

    `parties`: names of the coalition.
    """
    truth = truth_of(recording)
    active = recording.data.active.name
    names = (active, *parties)
    outside = find_positions_in_table_order(recording.alignment[active], recording.data.test_rows)
    for present_A in _find_present_rows(recording, names).values():
        outside = outside[present_A[outside]]
    chosen = shuffle_rows(outside, seed, "attacks", "public")[:rows]
    return {name: truth.features[name][chosen] for name in dict.fromkeys(names)}


def _list_training_positions(recording: Recording, victim: str | None = None) -> Tensor:
    """Return positions of the training rows, in the order of the active's table, so that a draw
    depends on the seed alone.

    `victim`: a passive; None: the active.
    """
    data = recording.data
    trained = find_positions_in_table_order(recording.alignment[data.active.name], data.train_rows)
    present_A = _find_present_rows(recording, [victim] if victim else []).get(victim or "")
    return trained if present_A is None else trained[present_A[trained]]


def view_of(
    recording: Recording,
    parties: Sequence[str],
    *,
    knowledge: Knowledge,
    behaviour: Behaviour = "curious",
    played: PlayedAttack | None = None,
    iterations: int = 300,
    device: torch.device | None = None,
) -> AdversaryView:
    """Return what `parties` saw: the adversary first, which `played`, then who colludes with it.

    An "outsider", who sees nothing of the training, is an adversary too. What the active decoded
    gets only a coalition with it.

    `iterations`: of any optimiser of an attack, at most.
    """
    tables = _get_tables(recording)
    active = recording.data.active.name
    known = (*tables, "aggregator", "outsider")  # whoever holds a table, or none
    if not parties or len(set(parties)) != len(parties) or not set(parties) <= set(known):
        raise AttackError(
            f"an adversary is one or several of {', '.join(known)}, each once; got {list(parties)}"
        )
    members = set(parties)
    transcript = recording.transcript
    first = parties[0]
    role = "active" if first == active else "passive" if first in tables else first
    exchange = exchange_of(recording.config)
    networks = recording.encoders
    if exchange.opens == "weights" and recording.model is not None:  # their average
        networks = dict.fromkeys(tables, recording.model)
    return AdversaryView(
        role=cast(Role, role),
        parties=tuple(parties),
        behaviour=behaviour,
        description=exchange,
        envelopes={
            epoch: tuple(item for item in envelopes if {item.sender, item.receiver} & members)
            for epoch, envelopes in transcript.envelopes_by_epoch.items()
        },
        revealed=transcript.sums_by_step if active in members else {},
        terms_by_passive=_collect_terms(recording),
        deviation=played,
        features=_collect_features(recording, parties),
        labels=_collect_labels(recording, parties),
        presence=_find_present_rows(recording, tuple(tables) if active in members else parties),
        networks={
            name: copy.deepcopy(network) for name, network in networks.items() if name in members
        },
        answers=_build_model_query(recording) if first == "outsider" else None,
        knowledge=knowledge,
        iterations=iterations,
        device=device or torch.device("cpu"),
    )


_OPENS: Mapping[str, Opened] = {
    "gradients are summed": "gradients",
    "representations are summed": "representations",
    "projections are summed": "projections",
    "tables are decomposed": "singular vectors",
    "pseudo-labels are averaged": "pseudo-labels",
    "weights are averaged": "weights",
    "the sum of votes is revealed": "sum of votes",
    "votes of encrypted labels are summed": "sum of votes",
}


def exchange_of(config: Config) -> Exchange:
    """Return what a run's parties exchange: only here do attacks ask what a method is."""
    method_facts = config.method.facts
    side: Side = "passives" if "passives send representations" in method_facts else "active"
    labels: Sent = "shown" if "labels are shown" in method_facts else "encrypted"
    return Exchange(
        name=config.method.name,
        released_by=side if "representations are sent" in method_facts else None,
        returns_gradients="gradients are returned" in method_facts,
        opens=next((opened for word, opened in _OPENS.items() if word in method_facts), None),
        labels=labels if "passives vote" in method_facts else None,
        aligned="people are aligned" in method_facts,
    )


def _get_tables(recording: Recording) -> dict[str, PartyTable]:
    """Return all parties' tables by name."""
    return {table.name: table for table in recording.data.tables}


def _collect_terms(recording: Recording) -> dict[str, AgreedTerms]:
    """Return each passive's agreed terms where it contributes gradients; none elsewhere."""
    config = recording.config
    if exchange_of(config).opens != "gradients":
        return {}
    names = [table.name for table in recording.data.passives]
    clip = config.secure_sum.clip
    return {
        name: AgreedTerms(
            objective=find_objective(config, name),
            weight=config.settings_of(name).weight,
            clip=clip,
        )
        for name in names
    }


def _collect_features(recording: Recording, parties: Sequence[str]) -> dict[str, Tensor]:
    """Return (A, ...) features by alignment position of those parties that hold aligned rows."""
    tables = _get_tables(recording)
    features = {}
    for name in parties:
        if name in tables and (rows := recording.alignment.get(name)) is not None:
            features[name] = tables[name].features[rows.clamp(min=0)]
            # A position without a row must not show somebody else's.
            features[name][rows < 0] = torch.nan
    return features


def _collect_labels(recording: Recording, parties: Sequence[str]) -> dict[str, Tensor]:
    """Return (A,) own labels by alignment position of those parties that train on any."""
    labels = {}
    for name in parties:
        party_data = recording.data.select_party(name)
        if party_data is None or party_data.table.labels is None or name not in recording.alignment:
            continue
        labels_N = torch.full_like(party_data.table.labels, UNLABELLED)
        labels_N[party_data.labelled_rows] = party_data.table.labels[party_data.labelled_rows]
        rows = recording.alignment[name]
        labels[name] = torch.where(rows < 0, UNLABELLED, labels_N[rows.clamp(min=0)])
    return labels


def _find_present_rows(recording: Recording, parties: Sequence[str]) -> dict[str, Tensor]:
    """Return, for each of these parties that lacks somebody, whether it has a row of each person,
    (A,) bool.
    """
    alignment = recording.alignment
    is_present = {name: alignment[name] >= 0 for name in parties if name in alignment}
    return {name: present_A for name, present_A in is_present.items() if not present_A.all()}


def _build_model_query(recording: Recording) -> Callable[[Tensor], Tensor] | None:
    """Return the finished model behind an interface that answers log-probabilities (n, K).

    None: the recording has no model.
    """
    if (model := recording.model) is None:
        return None
    like = next(model.parameters())

    @torch.no_grad()
    def query_model(features_N: Tensor) -> Tensor:
        # Where its owner runs it.
        scores_NK: Tensor = model(features_N.to(like.device, like.dtype))
        return scores_NK.log_softmax(1).to(features_N.device)

    return query_model


def reveal_candidates(recording: Recording, maximum: int, seed: int) -> tuple[Candidates, Tensor]:
    """Choose equally many rows that trained the active's model and that did not, `maximum` in all.

    Returns them, mixed, and (n, 2) bool: who trained the model, and who was aligned.
    """
    data = recording.data
    config = recording.config
    active = recording.data.active
    aligned = recording.alignment.get(active.name)  # None: it trained alone
    trained = intersect_rows(
        data.train_rows, None if config.train.trains_unaligned_rows else aligned
    )
    inside, outside = (
        _select_rows_with_labels([(active, rows)]) for rows in (trained, data.test_rows)
    )
    there_are = f"{len(inside[0])} rows with a label trained and {len(outside[0])} did not"
    candidates, rows_n, inside_n = _mix_candidates(
        recording, inside, outside, maximum, seed, there_are
    )
    aligned_n = torch.isin(rows_n, rows_n[:0] if aligned is None else aligned)
    return candidates, torch.stack([inside_n, aligned_n], dim=1)


def reveal_people(
    recording: Recording, adversary: str, victim: str, maximum: int, seed: int, strangers: Strangers
) -> tuple[Candidates, Tensor]:
    """Choose as many people whom `victim` trained on as others, of a run whose parties share none.

    The adversary's own people are not asked about; `strangers` says who the others are. Returns
    them, mixed, and (n, 2) bool: who trained at the victim; nobody is aligned.

    `maximum`: people at most.
    """
    data = recording.data

    def list_training_rows(tables: Iterable[PartyTable]) -> list[tuple[PartyTable, Tensor]]:
        """Return each of these tables with the rows that its party trains on."""
        table_data = ((table, data.select_party(table.name)) for table in tables)
        return [
            (table, party_data.train_rows)
            for table, party_data in table_data
            if party_data is not None
        ]

    outside = [(data.active, data.test_rows)]
    if strangers == "elsewhere":
        outside = list_training_rows(
            table for table in data.passives if table.name not in (adversary, victim)
        )
    members = _select_rows_with_labels(list_training_rows([_get_tables(recording)[victim]]))
    rest = _select_rows_with_labels(outside)
    there_are = f"{victim} trained on {len(members[0])} people, and there are {len(rest[0])} others"
    mixed = _mix_candidates(recording, members, rest, maximum, seed, f"{there_are} ({strangers})")
    candidates, _, inside_n = mixed
    return candidates, torch.stack([inside_n, torch.zeros_like(inside_n)], dim=1)


def _select_rows_with_labels(parts: Iterable[tuple[PartyTable, Tensor]]) -> list[Tensor]:
    """Return features, labels and numbers of those of these rows of tables with a label.

    `parts`: tables with row indices.
    """
    selected = []
    for table, rows in parts:
        if table.labels is not None:
            rows = rows[table.labels[rows] != UNLABELLED]
            selected.append((table.features[rows], table.labels[rows], rows))
    joined = [torch.cat(columns) for columns in zip(*selected, strict=True)]
    return joined or [torch.empty(0, dtype=torch.int64)] * 3


def _mix_candidates(
    recording: Recording,
    inside: Sequence[Tensor],
    outside: Sequence[Tensor],
    maximum: int,
    seed: int,
    there_are: str,
) -> tuple[Candidates, Tensor, Tensor]:
    """Choose equally many rows of both kinds and shuffle them; return them, and who is inside.

    `outside`: indices of rows that were not used. `maximum`: people at most. `there_are`: begins
    the error if there are too few.
    """
    count = min(maximum // 2, len(inside[0]), len(outside[0]))
    if count < 2:
        raise AttackError(f"{there_are}; an attack on membership needs two of each")
    chosen = [
        [
            part[shuffle_rows(torch.arange(len(part)), seed, "attacks", name)[:count]]
            for part in parts
        ]
        for name, parts in (("members", inside), ("others", outside))
    ]
    order = shuffle_rows(torch.arange(2 * count), seed, "attacks", "candidates")
    features, labels, rows = (torch.cat(parts)[order] for parts in zip(*chosen, strict=True))
    return Candidates(features, labels, recording.config.train), rows, order < count


def build_local_training(
    recording: Recording, seed: int
) -> Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """Return how a party would train alone (`Knowledge.alike`), with the GRUs of the averaged
    model.
    """
    config = recording.config
    model = recording.model
    data = recording.data
    assert isinstance(model, nn.Sequential)
    encoder = copy.deepcopy(model[0])
    classes = len(data.classes)
    columns = [view.columns for view in data.active.views.values()]
    settings = AveragingSettings.from_run_settings(config)
    view_settings = settings.for_views([*data.active.views], len(columns))

    @torch.no_grad()
    def split_views(rows_N: Tensor) -> list[Tensor]:
        """Return the columns of each view, (N, F_v), in double precision; sequences through the
        GRUs.

        `rows_N`: rows of the table.
        """
        if isinstance(encoder, SequenceEncoder):
            rows_N = rows_N.to(next(encoder.to(rows_N.device).parameters()).dtype)
            return [part.double().cpu() for part in encoder.encode_views(rows_N)]
        return [rows_N.flatten(1)[:, view].double().cpu() for view in columns]

    def train_views(rows_n: Tensor, labels_n: Tensor) -> Callable[[Tensor], Tensor]:
        """Train on these rows alone, as a party of FedMV does; return the model, rows -> scores (N,
        K).
        """
        eta_n1 = torch.full((len(rows_n), 1), settings.eta, dtype=torch.float64)
        truth_nK = F.one_hot(labels_n, classes).double()
        pull = LabelTerm(truth_nK.numpy(), eta_n1.numpy())
        views = LinearViews.from_views(
            view_settings, split_views(rows_n), pull, owner="adversary", seed=seed
        )
        views.train(0)
        weights = [torch.from_numpy(view.weights_FC) for view in views.views]

        def score_rows(rows_N: Tensor) -> Tensor:
            """Return scores (N, K), the mean over all views."""
            scored = [
                part @ weights_FC
                for part, weights_FC in zip(split_views(rows_N), weights, strict=True)
            ]
            return torch.stack(scored).mean(dim=0)

        return score_rows

    return train_views
