"""The experimenter's side: cuts a finished run into views, knowledge and truth.

Run by: whoever holds the recording of all parties, which no real party does. Attacks import
`apfed_attacks.view` and never this module (a test holds them to it).
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from secure_apfed.alignment.positions import find_positions_in_table_order
from secure_apfed.base.seeds import derive_seed, shuffle_rows
from secure_apfed.config import Config
from secure_apfed.data import UNLABELLED, PartyTable, VerticalData
from secure_apfed.methods.alignment import intersect_rows
from secure_apfed.methods.averaging import AveragingSettings, LinearViews
from secure_apfed.methods.multiview import LabelTerm
from secure_apfed.methods.terms import find_objective
from secure_apfed.networks.models import SequenceEncoder, make_encoder_and_head
from secure_apfed.runs.outcome import Recording


def reveal_truth(recording: Recording, victim: str | None = None) -> Truth:
    """Return the truth that guesses are scored by: labels of all aligned rows, and the victim's
    features.

    It also has the positions of the training rows that the victim has. `victim`: a party; None:
    features of all parties, and all training rows.

    Raises AttackError: the run aligned no rows, or the active has no labels.
    """
    data = recording.data
    if (
        data.active.name not in recording.alignment
        or not describe_exchange(recording.config).aligned
    ):
        raise AttackError("the run aligned no rows, so there is nothing to attack or to score")
    rows = recording.alignment[data.active.name]
    if data.active.labels is None:
        raise AttackError(f"{data.active.name} holds no labels, so no attack on them can be scored")
    return Truth(
        classes=len(data.classes),
        labels=data.active.labels[rows],
        training_positions=_list_training_positions(recording, victim).sort().values,
        features=_collect_features(
            recording, tuple(_get_tables(recording)) if victim is None else (victim,)
        ),
    )


def reveal_labels(recording: Recording, per_class: int, seed: int) -> KnownRows:
    """Choose `per_class` aligned training rows of each class whose labels the adversary knows.

    With one seed a smaller choice is a subset of a larger one.

    Raises AttackError: a class has no rows left to guess.
    """
    truth = reveal_truth(recording, recording.data.active.name)
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
    """Choose `rows` aligned training rows whose features at `victim` the adversary knows.

    Raises AttackError: no rows are left to guess.
    """
    truth = reveal_truth(recording, victim)
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
    """Return a function that makes the active's networks with fresh weights, from rows to scores
    (N, K).

    User-defined networks are copies of the recorded ones with weights drawn again.
    """
    settings = recording.config.model
    shape = recording.data.table.shape
    classes = len(recording.data.classes)

    def make_network() -> nn.Module:
        """Return the active's networks in sequence, with fresh weights."""
        if not settings.is_user_defined or recording.model is None:
            return nn.Sequential(*make_encoder_and_head(settings, shape, classes))
        network = copy.deepcopy(recording.model)
        draw_weights_anew(network)
        return network

    return make_network


def reveal_encoder(recording: Recording, victim: str) -> Callable[[Tensor], Tensor] | None:
    """Return the victim's network as a function of rows of features; None: it was not recorded.

    Its results are flattened, (N, D).
    """
    recorded = recording.encoders.get(victim)
    if recorded is None:
        return None
    network = copy.deepcopy(recorded).requires_grad_(False)
    dtype = next(iter(network.state_dict().values())).dtype

    def encode_features(features_N: Tensor) -> Tensor:
        """Return the representations of these rows, (N, D), computed on their device."""
        h_ND: Tensor = network.to(features_N.device)(features_N.to(dtype))
        return h_ND.flatten(1)

    return encode_features


def reveal_order(recording: Recording) -> dict[int, Tensor]:
    """Return by step the alignment positions (B,) of the rows that passives were to contribute for.

    The active sent them to all passives, any of which can tell the aggregator.
    """
    no_knowledge = Knowledge(classes=len(recording.data.classes))
    view = make_view(recording, [recording.data.active.name], knowledge=no_knowledge)
    rows_by_step = {
        step: rows_B for epoch in view.epochs for step, rows_B, _ in iter_batches(view, epoch)
    }
    requests = (request for epoch in view.envelopes for request in iter_requests(view, epoch))
    return rows_by_step | {request.step: request.rows for request in requests}


def reveal_public(
    recording: Recording, parties: Sequence[str], rows: int, seed: int
) -> dict[str, Tensor]:
    """Choose up to `rows` people outside the training of whom the active and all `parties` have a
    row.

    Returns their features (P, ...) by party; row k is the same person in each.
    """
    truth = reveal_truth(recording)
    active = recording.data.active.name
    names = (active, *parties)
    outside = find_positions_in_table_order(recording.alignment[active], recording.data.test_rows)
    # For each alignment position, whether a party has a row.
    for present_A in _find_present_rows(recording, names).values():
        outside = outside[present_A[outside]]
    chosen = shuffle_rows(outside, seed, "attacks", "public")[:rows]
    return {name: truth.features[name][chosen] for name in dict.fromkeys(names)}


def _list_training_positions(recording: Recording, victim: str | None = None) -> Tensor:
    """Return the alignment positions of the training rows of which the victim has a row.

    They are in the order of the active's table, so that a draw from them depends on the seed alone.
    `victim`: a passive; None: all rows.
    """
    data = recording.data
    trained = find_positions_in_table_order(recording.alignment[data.active.name], data.train_rows)
    # For each alignment position, whether the victim has a row; None: it has all.
    present_A = _find_present_rows(recording, [victim] if victim else []).get(victim or "")
    return trained if present_A is None else trained[present_A[trained]]


def make_view(
    recording: Recording,
    parties: Sequence[str],
    *,
    knowledge: Knowledge,
    behaviour: Behaviour = "curious",
    deviation: PlayedAttack | None = None,
    iterations: int = 300,
    device: torch.device | None = None,
) -> AdversaryView:
    """Return the view of a coalition of parties: what they saw in the run, and what they know.

    Sums that the active decrypted are in the view only of a coalition with it.

    Args:
        recording: record of the run.
        parties: the adversary, then those who collude with it: names of parties with tables,
            "aggregator", or "outsider", who sees nothing of the training.
        knowledge: what the adversary knows beyond what it saw.
        behaviour: "malicious" if it deviated from the protocol.
        deviation: what a malicious adversary did; None: it followed the protocol.
        iterations: maximum number of iterations of any optimiser of an attack.
        device: where attacks compute; None: the CPU.

    Raises:
        AttackError: unknown or repeated parties.
    """
    tables = _get_tables(recording)
    active = recording.data.active.name
    allowed = (*tables, "aggregator", "outsider")
    if not parties or len(set(parties)) != len(parties) or not set(parties) <= set(allowed):
        raise AttackError(
            f"an adversary is one or several of {', '.join(allowed)}, each once; "
            f"got {list(parties)}"
        )
    members = set(parties)
    transcript = recording.transcript
    adversary = parties[0]
    role = adversary  # "aggregator" or "outsider"
    if adversary in tables:
        role = "active" if adversary == active else "passive"
    # Whoever colludes with the active knows which rows each party has.
    visible_tables = tuple(tables) if active in members else parties
    exchange = describe_exchange(recording.config)
    networks = recording.encoders
    # Where weights are averaged, every party has the average.
    if exchange.opens == "weights" and recording.model is not None:
        networks = dict.fromkeys(tables, recording.model)
    return AdversaryView(
        role=cast(Role, role),
        parties=tuple(parties),
        behaviour=behaviour,
        description=exchange,
        # Messages that a member sent or received, by epoch.
        envelopes={
            epoch: tuple(item for item in envelopes if {item.sender, item.receiver} & members)
            for epoch, envelopes in transcript.envelopes_by_epoch.items()
        },
        revealed=transcript.sums_by_step if active in members else {},
        terms_by_passive=_collect_terms(recording),
        deviation=deviation,
        features=_collect_features(recording, parties),
        labels=_collect_labels(recording, parties),
        presence=_find_present_rows(recording, visible_tables),
        networks={
            name: copy.deepcopy(network) for name, network in networks.items() if name in members
        },
        answers=_build_model_query(recording) if adversary == "outsider" else None,
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


def describe_exchange(config: Config) -> Exchange:
    """Return what a run's parties exchange, as its method's facts say.

    Attacks read this description, and never the method itself.
    """
    method_facts = config.method.exchange_facts
    side: Side = "passives" if "passives send representations" in method_facts else "active"
    labels: Sent = "shown" if "labels are shown" in method_facts else "encrypted"
    return Exchange(
        name=config.method.name,
        released_by=side if "representations are sent" in method_facts else None,
        returns_gradients="gradients are returned" in method_facts,
        opens=next((opened for fact, opened in _OPENS.items() if fact in method_facts), None),
        labels=labels if "passives vote" in method_facts else None,
        aligned="people are aligned" in method_facts,
    )


def _get_tables(recording: Recording) -> dict[str, PartyTable]:
    """Return all parties' tables by name."""
    return {table.name: table for table in recording.data.tables}


def _collect_terms(recording: Recording) -> dict[str, AgreedTerms]:
    """Return what the contract says about each passive that contributes gradients; else empty."""
    config = recording.config
    if describe_exchange(config).opens != "gradients":
        return {}
    names = [table.name for table in recording.data.passives]
    clip = config.secure_sum.clip
    return {
        name: AgreedTerms(
            objective=find_objective(config, name),
            weight=config.find_passive_settings(name).weight,
            clip=clip,
        )
        for name in names
    }


def _collect_features(recording: Recording, parties: Sequence[str]) -> dict[str, Tensor]:
    """Return by party its features (A, ...) by alignment position, NaN where it has no row.

    Parties without aligned rows are left out.
    """
    tables = _get_tables(recording)
    features = {}
    for name in parties:
        rows = recording.alignment.get(name)
        if name in tables and rows is not None:
            features[name] = tables[name].features[rows.clamp(min=0)]
            # Without a row (-1) row 0 was taken: hide it.
            features[name][rows < 0] = torch.nan
    return features


def _collect_labels(recording: Recording, parties: Sequence[str]) -> dict[str, Tensor]:
    """Return by party the labels that it trains on, (A,) by alignment position.

    They are `UNLABELLED` where it has none; parties without labels are left out.
    """
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
    """Return by party a mask (A,) of the people of whom it has a row.

    Parties with a row of all are left out.
    """
    alignment = recording.alignment
    is_present = {name: alignment[name] >= 0 for name in parties if name in alignment}
    return {name: present_A for name, present_A in is_present.items() if not present_A.all()}


def _build_model_query(recording: Recording) -> Callable[[Tensor], Tensor] | None:
    """Return a function that queries the finished model; None: the recording has no model.

    It takes rows of features and returns log-probabilities (n, K).
    """
    model = recording.model
    if model is None:
        return None
    parameter = next(model.parameters())

    @torch.no_grad()
    def query_model(features_N: Tensor) -> Tensor:
        """Return log-probabilities (N, K), computed on the model's device."""
        scores_NK: Tensor = model(features_N.to(parameter.device, parameter.dtype))
        return scores_NK.log_softmax(1).to(features_N.device)

    return query_model


def reveal_candidates(recording: Recording, maximum: int, seed: int) -> tuple[Candidates, Tensor]:
    """Choose equally many rows that trained the active's model and that did not, `maximum` in all.

    Returns them, shuffled, and a mask (n, 2): which trained the model, and which were aligned.

    Raises AttackError: fewer than two rows trained the model, or fewer than two did not.
    """
    data = recording.data
    config = recording.config
    active = recording.data.active
    aligned = recording.alignment.get(active.name)  # None: it trained alone
    trained = intersect_rows(
        data.train_rows, None if config.train.has_unaligned_rows_in_batches else aligned
    )
    inside, outside = (
        _select_rows_with_labels([(active, rows)]) for rows in (trained, data.test_rows)
    )
    availability = f"{len(inside[0])} rows with a label trained and {len(outside[0])} did not"
    candidates, rows_n, inside_n = _mix_candidates(
        recording, inside, outside, maximum, seed, availability
    )
    aligned_n = torch.isin(rows_n, rows_n[:0] if aligned is None else aligned)
    return candidates, torch.stack([inside_n, aligned_n], dim=1)


def reveal_people(
    recording: Recording, adversary: str, victim: str, maximum: int, seed: int, strangers: Strangers
) -> tuple[Candidates, Tensor]:
    """Choose equally many people whom `victim` trained on and others.

    This is for a run whose parties have no people in common. The adversary's own people are never
    candidates. Returns the people, shuffled, and a mask (n, 2): which trained at the victim, and
    which were aligned (none).

    `maximum`: number of people in all. `strangers`: who the others are: of no party's training
    ("outside"), or of other passives' ("elsewhere").

    Raises AttackError: fewer than two people trained at the victim, or fewer than two are others.
    """
    data = recording.data
    other_rows_by_table = [(data.active, data.test_rows)]
    if strangers == "elsewhere":
        other_passives = [table for table in data.passives if table.name not in (adversary, victim)]
        other_rows_by_table = _list_training_rows(data, other_passives)
    victim_rows = _list_training_rows(data, [_get_tables(recording)[victim]])
    members = _select_rows_with_labels(victim_rows)
    others = _select_rows_with_labels(other_rows_by_table)
    availability = (
        f"{victim} trained on {len(members[0])} people, and there are {len(others[0])} others"
    )
    candidates, _, inside_n = _mix_candidates(
        recording, members, others, maximum, seed, f"{availability} ({strangers})"
    )
    return candidates, torch.stack([inside_n, torch.zeros_like(inside_n)], dim=1)


def _list_training_rows(
    data: VerticalData, tables: Iterable[PartyTable]
) -> list[tuple[PartyTable, Tensor]]:
    """Return each of these tables with the rows that its party trains on."""
    rows_by_table = []
    for table in tables:
        party_data = data.select_party(table.name)
        if party_data is not None:
            rows_by_table.append((table, party_data.train_rows))
    return rows_by_table


def _select_rows_with_labels(parts: Iterable[tuple[PartyTable, Tensor]]) -> list[Tensor]:
    """Return features (n, ...), labels (n,) and row indices (n,) of those rows that have a label.

    `parts`: pairs of a table and row indices; the rows of all tables are joined.
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
    availability: str,
) -> tuple[Candidates, Tensor, Tensor]:
    """Choose equally many rows that trained and that did not, and shuffle them.

    Returns the candidates, their row indices (n,), and a mask (n,) of those inside.

    Args:
        inside, outside: features, labels and indices of rows that trained, and that did not.
        maximum: number of rows in all.
        availability: how many rows there are of both kinds, in words, for the error.

    Raises:
        AttackError: there are fewer than two of one kind.
    """
    count = min(maximum // 2, len(inside[0]), len(outside[0]))
    if count < 2:
        raise AttackError(f"{availability}; an attack on membership needs two of each")
    members_n = shuffle_rows(torch.arange(len(inside[0])), seed, "attacks", "members")[:count]
    others_n = shuffle_rows(torch.arange(len(outside[0])), seed, "attacks", "others")[:count]
    order = shuffle_rows(torch.arange(2 * count), seed, "attacks", "candidates")
    features, labels, rows = (
        torch.cat([member_values[members_n], other_values[others_n]])[order]
        for member_values, other_values in zip(inside, outside, strict=True)
    )
    is_inside_n = order < count  # before the shuffle the first `count` rows are those inside
    return Candidates(features, labels, recording.config.train), rows, is_inside_n


def build_local_training(
    recording: Recording, seed: int
) -> Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """Return a function that trains a model as a party of FedMV would alone (`Knowledge.alike`).

    The function takes rows and labels, and returns the model. Sequences are encoded by the GRUs of
    the recorded averaged model. Each view (group of F columns) gets a linear model with weights
    (F, C) for C classes.
    """
    data = recording.data
    model = recording.model
    assert isinstance(model, nn.Sequential)
    settings = AveragingSettings.from_run_settings(recording.config)
    columns_by_view = {name: view.columns for name, view in data.active.views.items()}
    return _LocalTraining(
        encoder=copy.deepcopy(model[0]),
        view_columns=list(columns_by_view.values()),
        view_settings=settings.for_views([*columns_by_view], len(columns_by_view)),
        label_weight=settings.eta,
        class_count=len(data.classes),
        seed=seed,
    ).train_model


@dataclass(frozen=True, kw_only=True)
class _LocalTraining:
    """Training of linear models of views (groups of columns), as a party of FedMV does it alone.

    Attributes:
        encoder: first layer of the recorded model; GRUs where rows are sequences.
        view_columns: columns of each view.
        view_settings: settings of each view's training.
        label_weight: weight eta of the term that draws pseudo-labels to the labels.
        class_count: K.
        seed: seed of the initial weights.
    """

    encoder: nn.Module
    view_columns: Sequence[slice]
    view_settings: Sequence[AveragingSettings]
    label_weight: float
    class_count: int
    seed: int

    def train_model(self, rows_n: Tensor, labels_n: Tensor) -> Callable[[Tensor], Tensor]:
        """Train on these rows alone; return the model, rows -> scores (N, K)."""
        weight_n1 = torch.full((len(rows_n), 1), self.label_weight, dtype=torch.float64)
        truth_nK = F.one_hot(labels_n, self.class_count).double()
        label_term = LabelTerm(truth_nK.numpy(), weight_n1.numpy())
        view_features = self._split_views(rows_n)
        views = LinearViews.from_views(
            self.view_settings, view_features, label_term, owner="adversary", seed=self.seed
        )
        views.train(0)
        view_weights = [torch.from_numpy(view.weights_FC) for view in views.views]
        return partial(self._score_rows, view_weights)

    def _score_rows(self, view_weights: Sequence[Tensor], rows_N: Tensor) -> Tensor:
        """Return scores (N, K), the mean over all views."""
        scores_by_view = [
            features_NF @ weights_FC
            for features_NF, weights_FC in zip(self._split_views(rows_N), view_weights, strict=True)
        ]
        return torch.stack(scores_by_view).mean(dim=0)

    @torch.no_grad()
    def _split_views(self, rows_N: Tensor) -> list[Tensor]:
        """Return the features of each view, (N, F_v) float64; those of sequences are GRU states."""
        encoder = self.encoder
        if isinstance(encoder, SequenceEncoder):
            weights_dtype = next(encoder.to(rows_N.device).parameters()).dtype
            encoded_views = encoder.encode_views(rows_N.to(weights_dtype))
            return [features_NF.double().cpu() for features_NF in encoded_views]
        flat_NF = rows_N.flatten(1)
        return [flat_NF[:, columns].double().cpu() for columns in self.view_columns]
