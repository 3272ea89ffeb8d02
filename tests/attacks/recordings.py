"""Recordings that were made up: what is released, asked, opened, shown and voted is planted."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import msgpack
import numpy as np
import torch
from torch import Tensor, nn

from apfed_attacks import ATTACKS
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import ALL_RULES, LiveRun, Rule, mount_live_attack
from apfed_attacks.live.strategy import ActiveAttack
from apfed_attacks.recorded import make_view, reveal_truth
from apfed_attacks.run import Trial, run_attacks
from apfed_attacks.view import Knowledge, iter_batches
from apfed_protocols.sums.frames import Frame, FrameKind
from secure_apfed.config import AttackChoice, Config
from secure_apfed.exchange import Envelope, Kind, pack_tensors
from secure_apfed.methods import METHODS
from secure_apfed.runs.outcome import Recording
from tests.attacks.conftest import PASSIVES, note, note_payload

TWO_TABLES = {
    "dataset": "breast_cancer",
    "columns": {"active": list(range(10)), "passive-1": list(range(10, 20))},
    "overlap": 1.0,
}


def live_config(method: str, *, views: int = 4, **changes: dict[str, Any]) -> Config:
    """Digits of 240 people, in strips; a plain sum without clip. `data` changes as a whole."""
    base: dict[str, Any] = {
        "name": "live",
        "party_seeds": "shared_for_comparison",
        "method": method,
        "data": {"dataset": "digits", "views": views, "overlap": 1.0, "limit": 240},
        "model": {"hidden": [32], "representation": 32, "projection": 64, "dropout": 0.2},
        "train": {
            "batch_size": 64,
            "learning_rate": 0.1,
            "epochs": 8,
            "device": "cpu",
            "max_gradient_norm": 1.0,
        },
        "alignment": {"protocol": "ecdh"},
        "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }
    merged = {
        key: value if key == "data" else {**base.get(key, {}), **value}
        for key, value in changes.items()
    }
    return Config.model_validate(base | merged)


def run_attack(recording: Recording, name: str, seed: int = 0, **options: Any) -> tuple[Any, ...]:
    return run_attacks(recording, [AttackChoice(name=name, options=options)], seed=seed)


def run_attack_by(
    adversary: str,
    recording: Recording,
    name: str,
    victim: str = "active",
    seed: int = 0,
    **options: Any,
) -> Any:
    """The result of one adversary alone."""
    attack = ATTACKS[name].model_validate(options)
    return Trial(attack, recording, (adversary,), victim, seed=seed).compute_result()


def play(
    attack: ActiveAttack, config: Config, *, rules: Collection[Rule] = ALL_RULES, epochs: int = 1
) -> AttackResult:
    """The attack on passive-1 in a session of its own, after so many honest epochs."""
    run = LiveRun(config, rules=rules)
    run.train_epochs(epochs)
    return mount_live_attack(run, attack, "passive-1", seed=0)


def replace_opened_sums(recording: Recording, opened: Mapping[int, Tensor]) -> Recording:
    """The same, with these in the place of the sums that the active decoded, by step."""
    envelopes = recording.transcript.envelopes_by_epoch
    kept: Any = SimpleNamespace(envelopes_by_epoch=envelopes, sums_by_step=opened)
    return replace(recording, transcript=kept)


def replace_sums_by_noise(recording: Recording, seed: int = 0) -> Recording:
    view = make_view(recording, ["active"], knowledge=Knowledge(classes=3))
    draw = torch.Generator().manual_seed(seed)
    return replace_opened_sums(
        recording,
        {
            step: torch.randn(z.shape, generator=draw)
            for epoch in view.epochs
            for step, _, z in iter_batches(view, epoch)
        },
    )


def _iter_projections(
    recording: Recording, seed: int
) -> Iterator[tuple[Any, Tensor, Tensor, Tensor]]:
    """Yield step, positions, what was sent, and a projection of passive-1's features, noised."""
    view = make_view(recording, ["active"], knowledge=Knowledge(classes=3))
    features = reveal_truth(recording).features["passive-1"].flatten(1).double()
    for epoch in view.epochs:
        for step, rows_B, z_BD in iter_batches(view, epoch):
            width = z_BD.flatten(1).shape[1]
            weights = normal(features.shape[1], width, seed=seed)
            noise = 0.1 * normal(len(rows_B), width, seed=step)
            yield step, rows_B, z_BD.double().flatten(1), features[rows_B] @ weights + noise


def replace_sums_by_projections(
    recording: Recording, seed: int = 0, *, along: float = 0.0
) -> Recording:
    """The same, whose sums are a projection of the first passive's features, noised every step.

    `along` times a linear image of what was sent is added, as a linear decoder's gradient has it.
    """
    opened = {
        step: projected_BD + along * z_BD @ normal(z_BD.shape[1], z_BD.shape[1], seed=seed + 1)
        for step, _, z_BD, projected_BD in _iter_projections(recording, seed)
    }
    return replace_opened_sums(recording, opened)


def replace_sums_by_contrasts(recording: Recording, seed: int = 0) -> Recording:
    """The same, whose sums are -(I - u u^T) p / |z|, p a projection of passive-1's features."""
    opened: dict[int, Tensor] = {}
    for step, _, z_BD, p_BD in _iter_projections(recording, seed):
        length_B1 = z_BD.norm(dim=1, keepdim=True)
        u_BD = z_BD / length_B1
        opened[step] = -(p_BD - u_BD * (u_BD * p_BD).sum(dim=1, keepdim=True)) / length_B1
    return replace_opened_sums(recording, opened)


def add_contributions(recording: Recording, *, planted: bool, seed: int = 0) -> Recording:
    """The same, where the aggregator got a frame of passive-1 in every step.

    A projection of its features under a plain sum, or words as masks make them.
    """
    name = "plain" if planted else "plain + pairwise masks"
    draw = np.random.default_rng(seed)
    kept = {epoch: list(sent) for epoch, sent in recording.transcript.envelopes_by_epoch.items()}
    epoch_of = {one.step: epoch for epoch, sent in kept.items() for one in sent}
    for step, rows_B, z_BD, projected_BD in _iter_projections(recording, seed):
        words = draw.integers(2**32, size=projected_BD.shape, dtype=np.uint32)
        sent_BD = projected_BD.float().numpy() if planted else words
        frame = Frame(
            kind=FrameKind.CONTRIBUTION,
            name=name,
            index_or_count=0,
            step=step,
            rows=len(rows_B),
            columns=z_BD.shape[1],
            binding=bytes(32),
            fingerprint=bytes(32),
            blobs=(sent_BD.tobytes(),),
        )
        envelope = Envelope(
            session="planted",
            step=step,
            kind=Kind.CONTRIBUTION,
            sender="passive-1",
            receiver="aggregator",
            sequence=step,
            payload=frame.pack(),
        )
        kept[epoch_of[step]].append(envelope)
    by_epoch = {epoch: tuple(sent) for epoch, sent in kept.items()}
    transcript: Any = SimpleNamespace(envelopes_by_epoch=by_epoch, sums_by_step={})
    return replace(recording, transcript=transcript)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class ByHeart(nn.Module):
    """Scores rows as `others` does; to rows that it learnt it adds what their class is to get."""

    def __init__(
        self, features: Tensor, labels: Tensor, others: Callable[[int], Tensor], learnt_KK: Tensor
    ) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.others = others
        keys = (tuple(row.flatten().tolist()) for row in features)
        self.known = dict(zip(keys, learnt_KK[labels], strict=True))

    def forward(self, rows: Tensor) -> Tensor:
        scores = self.others(len(rows))
        for at, row in enumerate(rows):
            scores[at] += self.known.get(tuple(row.flatten().tolist()), 0)
        return scores


def list_trained_rows(recording: Recording) -> Tensor:
    aligned = recording.alignment["active"]
    return torch.isin(aligned, recording.data.train_rows).nonzero().flatten()


def _change_settings(recording: Recording, **settings: Any) -> Recording:
    """The same, said to have been made with these settings."""
    said = recording.config.model_dump(mode="json") | settings
    return replace(recording, config=Config.model_validate(said))


def ask(
    empty: Recording, method: str, *, z: Sequence[Tensor] = (), opened: Sequence[Tensor] = ()
) -> Recording:
    """Fill a recording in which nothing was sent with one request an epoch, about trained rows.

    By epoch, `z` is sent of all aligned rows (A, C), and `opened` what the active opens (A, D).
    """
    rows = list_trained_rows(empty).flip(0)
    for epoch in range(max(len(z), len(opened))):
        empty.transcript.begin_epoch(epoch)
        tensors = {"rows": rows} | ({"z": z[epoch][rows].double()} if z else {})
        for passive in empty.data.passives:
            note(empty.transcript, Kind.REQUEST, "active", passive.name, epoch, **tensors)
        if opened:
            empty.transcript.record_sum(epoch, opened[epoch][rows].double())
    network = "identity" if METHODS[method].settings.averaged_quantity else "mlp"
    sums = {"clip": 8.0, "scheme": "plain", "masks": "pairwise"}
    return _change_settings(empty, method=method, model={"network": network}, secure_sum=sums)


def fill_with_drawn_labels(empty: Recording) -> Recording:
    """MMVFL's pseudo-labels, which the labels have drawn, but for those of the first round."""
    labels_N = empty.data.active.labels
    assert labels_N is not None
    truth_NC = torch.nn.functional.one_hot(labels_N[empty.alignment["active"]], 3)
    noise = [normal(*truth_NC.shape, seed=seed) / 10 for seed in (1, 2, 3)]
    return ask(empty, "mmvfl", z=[noise[0], *(0.5 * truth_NC + of_NC for of_NC in noise[1:])])


def fill_with_vectors(empty: Recording, *, true: bool, seed: int = 0) -> Recording:
    """Fill a recording in which nothing was sent with vectors of its tables, or of others."""
    draw = np.random.default_rng(seed)
    aligned = empty.alignment
    rows = list_trained_rows(empty)
    rows = rows[torch.from_numpy(draw.permutation(len(rows)))]
    parts = [table.features[aligned[table.name]][rows] for table in empty.data.tables]
    whole = torch.hstack(parts).double().numpy()
    if not true:
        whole = draw.normal(size=whole.shape)
    vectors = np.linalg.svd(whole, full_matrices=False)[0]
    empty.transcript.begin_epoch(0)
    note(empty.transcript, Kind.REQUEST, "active", "passive-1", 0, rows=rows)
    empty.transcript.record_sum(0, torch.from_numpy(vectors))
    return make_vector_recording(empty)


def make_vector_recording(recording: Recording) -> Recording:
    return _change_settings(recording, method="vfedtrans", model={"network": "enriched"})


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
    data = empty.data
    transcript = empty.transcript
    aligned = empty.alignment["active"]
    rows = list_trained_rows(empty)
    rows = rows[torch.randperm(len(rows), generator=draw)]
    assert data.active.labels is not None
    labels = data.active.labels[aligned][rows[:_LABELLED]]
    if not true_labels:
        labels = torch.randint(0, len(data.classes), labels.shape, generator=draw)
    votes = voting(data.passives[0].features[empty.alignment["passive-1"]][rows], draw)
    named = {"rows": rows, "labelled": torch.arange(_LABELLED)}
    answers = votes.argmax(dim=1).short()
    transcript.begin_epoch(0)
    for passive in PASSIVES:
        if method == "votes_encrypted":
            payload = msgpack.packb([pack_tensors(named), b"ciphertexts"])
            note_payload(transcript, Kind.ENCRYPTED_LABELS, "active", passive, 0, payload)
        else:
            note(transcript, Kind.LABELS, "active", passive, 0, **named, labels=labels)
        if method == "votes_randomised":
            note(transcript, Kind.VOTES, passive, "active", 0, votes=answers)
    transcript.record_sum(0, votes.double())
    candidates = {"candidates": 20} if method == "votes_encrypted" else {}
    return _change_settings(empty, method={"name": method, "epsilon": 4.0, **candidates})
