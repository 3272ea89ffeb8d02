"""Attacks on labels: clusters, the course of time, MixMatch on own networks, and columns fused."""

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import nn

from apfed_attacks.columns import TRUST, correct_priors
from apfed_attacks.labels.completion import copy_own_networks
from apfed_attacks.labels.representations import ModelCompletion
from apfed_attacks.recorded import make_view, reveal_labels
from apfed_attacks.scoring import DECOY
from apfed_attacks.view import AttackError, Knowledge, KnownRows
from tests.attacks.conftest import leak_noised_afresh
from tests.attacks.recordings import ballot_of, fill_with_drawn_labels, run_attack, run_attack_by

completed = partial(run_attack_by, "passive-1", name="model_completion")


def test_clusters_are_named_by_priors_only_where_these_are_known(make_recording: Any) -> None:
    mounted = partial(completed, make_recording("labels"), labels_per_class=0)
    told = mounted().variants
    untold = mounted(priors=False).variants
    assert told["clusters named by the truth on h"]["accuracy"] > 0.9
    assert set(told) - set(untold) == {name for name in told if "named by priors" in name}
    # Own columns are a prior where labels are known.
    known = mounted(labels_per_class=1, iterations=5).variants
    priors = [f"x corrected by {trust:g} of h" for trust in TRUST]
    assert [name for name in known if name.startswith("x corrected")] == priors
    assert not set(priors) & set(told)


def test_the_first_epoch_is_a_reference_and_no_baseline(make_recording: Any) -> None:
    result = completed(make_recording("labels"))
    assert all("first epoch" in name for name in result.references)
    assert not any("first epoch" in name for name in result.baselines)
    assert all(name.endswith(DECOY) for name in result.baselines if " h" in name)
    before = result.references["logistic on h of the first epoch"]["balanced_accuracy"]
    assert before < 0.5
    assert completed(make_recording("labels", epochs=1)).references == {}


def test_colluders_pool_features_a_limit_keeps_known_rows_and_another_role_is_said(
    make_recording: Any,
) -> None:
    recording = make_recording("labels")
    (result,) = run_attack(recording, "model_completion", coalition="all")
    assert result.adversary == "passive-1 + passive-2"
    assert result.knowledge["own_features"] == 6
    assert completed(recording, max_rows=60).counts == {"known": 12, "scored": 48}
    other = run_attack_by("active", recording, "model_completion")
    assert other.reason == "model_completion is mounted by the passive party, not by the active"


def test_known_labels_of_one_class_only_are_a_reason(make_recording: Any) -> None:
    recording = make_recording("labels")
    known = reveal_labels(recording, 1, 0)
    kept = KnownRows(known.positions[:1], known.values[:1])
    view = make_view(recording, ["passive-1"], knowledge=Knowledge(classes=3, labels=kept))
    with pytest.raises(AttackError, match="fewer than two classes; raise labels_per_class"):
        ModelCompletion().run(view, 0)


@pytest.mark.slow
def test_what_was_sent_is_read_as_it_is(make_recording: Any) -> None:
    empty = make_recording("nothing", epochs=0)
    for result in run_attack(fill_with_drawn_labels(empty), "pseudo_labels", labels_per_class=4):
        assert {"largest of z", "largest of mean z"} < set(result.variants)
        (first,) = result.references.values()
        assert first["balanced_accuracy"] < 0.5
    voting = lambda own, draw: torch.rand(len(own), 3, generator=draw)  # noqa: E731
    recording = ballot_of(make_recording("nothing", epochs=0), method="votes", voting=voting)
    for result in run_attack(recording, "shown_labels", labels_per_class=4):
        share = 60 / result.counts["scored"]
        assert min(one["accuracy"] or 0 for one in result.variants.values()) > share


# Temporal, beside what the last epoch alone tells passive-2, whose features say nothing.


def _both(recording: Any, **options: Any) -> list[Any]:
    names = ("temporal", "model_completion")
    return [run_attack_by("passive-2", recording, name, **options) for name in names]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("fresh", [True, False])
def test_fresh_noise_averages_out_over_epochs(make_recording: Any, fresh: bool) -> None:
    def frozen(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        return leak_noised_afresh(labels, own, torch.Generator().manual_seed(1), epoch)

    recording = make_recording(leak_noised_afresh if fresh else frozen, epochs=12)
    temporal, once = _both(recording, labels_per_class=10)
    gain = temporal.advantage - once.advantage
    assert gain > 0.2 if fresh else gain < 0.08


def test_a_course_of_time_is_found_that_no_epoch_shows(make_recording: Any) -> None:
    def drift(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        start = 5 * torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(1))
        return start + epoch * F.one_hot(labels, 3)

    temporal, once = _both(make_recording(drift, epochs=2), labels_per_class=4)
    assert temporal.variant.endswith("last minus first epoch")
    assert temporal.score["balanced_accuracy"] > 0.95
    assert once.score["balanced_accuracy"] < 0.7


@pytest.mark.slow
def test_a_row_that_missed_an_epoch_is_still_guessed(make_recording: Any) -> None:
    recording = make_recording("labels", epochs=3)
    whole = run_attack_by("passive-2", recording, "temporal")
    del recording.transcript._epochs[1].envelopes[:4]  # two batches to two passives
    result = run_attack_by("passive-2", recording, "temporal")
    assert 200 < result.counts["scored"] <= whole.counts["scored"]
    assert result.score["balanced_accuracy"] > 0.8
    assert result.advantage > 0.3


# MixMatch on the passive's own network: what training put into it, and nothing of the others.

FURTHER = "own network, trained further"
FRESH = "own network, fresh weights"


def _mount(recording: Any, **options: Any) -> Any:
    wanted = {"iterations": 200, "labels_per_class": 4, "own_network": True, **options}
    return run_attack(recording, "semi_supervised", **wanted)


def _labels_of(recording: Any) -> torch.Tensor:
    """Return the labels of the rows of passive-1's table."""
    return torch.tensor([int(name.split("-")[1]) % 3 for name in recording.data.passives[0].ids])


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))


@pytest.fixture(scope="module")
def sector_recording(make_recording: Any) -> Any:
    """passive-1 has features that show a label by the sector of a circle, of 12, alone."""
    recording = make_recording("nothing", method="tvfl")
    labels = _labels_of(recording)
    draw = torch.Generator().manual_seed(7)
    sector = labels + 3 * torch.randint(4, labels.shape, generator=draw)
    angle = (sector + 0.8 * torch.rand(labels.shape, generator=draw)) * math.tau / 12
    noise = 0.1 * torch.randn(len(labels), 2, generator=draw)
    features = torch.cat([torch.stack([angle.cos(), angle.sin()], dim=1), noise], dim=1)
    first, *others = recording.data.passives
    passives = (replace(first, features=features), *others)
    return replace(recording, data=replace(recording.data, passives=passives))


def _taught(recording: Any) -> nn.Module:
    """An encoder after joint training: all labels shaped it."""
    torch.manual_seed(1)
    encoder = _network()
    head = nn.Linear(3, 3)
    adam = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=0.01)
    for _ in range(400):
        h_ND = encoder(recording.data.passives[0].features)
        loss = F.cross_entropy(head(h_ND), _labels_of(recording))
        adam.zero_grad()
        loss.backward()
        adam.step()
    return encoder


@pytest.mark.slow
def test_a_network_that_learned_labels_gives_them_away(sector_recording: Any) -> None:
    encoder = _taught(sector_recording)
    before = copy.deepcopy(encoder.state_dict())
    known = replace(sector_recording, encoders={"passive-1": encoder})
    first, _ = _mount(known, iterations=400, unlabelled_weight=5)
    assert list(first.variants) == [FURTHER]
    assert {FRESH, "MixMatch on x", "mlp on x"} <= set(first.baselines)
    # Its decoy has other fresh weights.
    assert [key for key in first.baselines if key.endswith(DECOY)] == [f"{FURTHER}{DECOY}"]
    assert first.score["balanced_accuracy"] > 0.65
    assert first.advantage > 0.2
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_a_coalition_needs_the_networks_of_all(sector_recording: Any) -> None:
    both = {"passive-2": nn.Linear(2, 3), "passive-1": _network().double()}
    first = {"passive-1": both["passive-1"]}
    (whole,), (lacking,) = (
        _mount(replace(sector_recording, encoders=encoders), iterations=2, coalition="all")
        for encoders in (both, first)
    )
    assert whole.adversary == "passive-1 + passive-2"
    assert whole.applicable
    assert "no encoder of passive-2" in lacking.reason


def _holding(network: nn.Module, *shape: int) -> Any:
    """A view of a party with this network and rows of this shape."""
    return SimpleNamespace(networks={"own": network}, features={"own": torch.empty(1, *shape)})


def test_the_bottom_reads_images_and_constants() -> None:
    rows = torch.randn(6, 2 * 3 * 3)
    rows[:, 0] = 1.0
    convolution = nn.Conv2d(2, 4, 3)
    nn.init.zeros_(convolution.weight[0])
    h_ND = copy_own_networks(_holding(nn.Sequential(convolution, nn.ReLU()), 2, 3, 3), rows)(rows)
    assert h_ND.shape == (6, 4)
    assert torch.isfinite(h_ND).all()
    assert torch.allclose(h_ND.mean(dim=0), torch.zeros(4), atol=1e-5)


def test_fresh_weights_are_other_weights_and_scales_are_drawn_by_reset() -> None:
    linear = nn.Linear(4, 3)
    scale = nn.BatchNorm1d(3)
    nn.init.constant_(scale.weight, 9.0)
    network = nn.Sequential(linear, scale).eval()
    bottom = copy_own_networks(_holding(network, 4), torch.randn(5, 4), has_fresh_weights=True)
    drawn, _, reset, *_ = bottom.parameters()
    assert not torch.equal(drawn, linear.weight)
    assert torch.equal(reset, torch.ones(3))


def test_a_layer_that_cannot_be_drawn_anew_is_told() -> None:
    class Scale(nn.Linear):
        reset_parameters = None  # type: ignore[assignment]

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.weight = nn.Parameter(torch.eye(4))
            self.bias = nn.Parameter(torch.zeros(4))

    with pytest.raises(AttackError, match="weights of a Scale cannot be drawn anew"):
        copy_own_networks(_holding(Scale(), 4), torch.randn(5, 4), has_fresh_weights=True)


# Released columns beside own ones: weights, and what own ones tell as the prior.

ROWS = 600
KNOWN = 30
CLASSES = 3
LABELS = np.arange(ROWS) % CLASSES
TRUTH = np.eye(CLASSES)[LABELS]
Array = NDArray[np.float64]


def _make_known_labels(rows: int = KNOWN) -> NDArray[np.int64]:
    """The labels of the first rows; -1 for the others."""
    return np.where(np.arange(ROWS) < rows, LABELS, -1)


def _draw_columns(strength: float, width: int, seed: int = 1) -> Array:
    """Noise, and the label in the first columns as far as `strength` says; standardised."""
    columns = np.random.default_rng(seed).normal(size=(ROWS, width))
    columns[:, :CLASSES] += strength * TRUTH
    return np.asarray((columns - columns.mean(axis=0)) / columns.std(axis=0))


def _run_probe(columns: Array) -> Any:
    """Return what a probe finds with the known rows."""
    return LogisticRegression().fit(columns[:KNOWN], LABELS[:KNOWN]).predict_proba(columns)


def _accuracy(scores: Array) -> float:
    return float((scores.argmax(axis=1) == LABELS)[KNOWN:].mean())


OWN = _draw_columns(1.3, 3, seed=0)
PRIOR = _run_probe(OWN)


@pytest.mark.parametrize("trust", [trust for trust in TRUST if trust < 1])
def test_noise_corrects_little(trust: float) -> None:
    noise = _draw_columns(0, 30)
    found = _accuracy(correct_priors(PRIOR, noise, _make_known_labels(), trust))
    assert found == pytest.approx(_accuracy(PRIOR), abs=0.05)
    # Noise of unit variance beside own columns does more harm.
    assert found > _accuracy(_run_probe(np.hstack([noise, OWN])))


def test_what_holds_the_label_is_believed_as_far_as_it_is_trusted() -> None:
    before = PRIOR.copy()
    released = _draw_columns(6, 6)
    found = [
        _accuracy(correct_priors(PRIOR, released, _make_known_labels(), trust)) for trust in TRUST
    ]
    assert found == sorted(found)
    assert found[0] > _accuracy(PRIOR)
    assert found[-1] > _accuracy(PRIOR) + 0.15
    np.testing.assert_allclose(
        correct_priors(PRIOR, released, _make_known_labels(), 0.0), PRIOR, atol=1e-9
    )
    np.testing.assert_array_equal(PRIOR, before)


def test_a_class_that_nobody_knows_is_not_guessed() -> None:
    prior = np.zeros((ROWS, 5))
    known = np.where(_make_known_labels() == 1, -1, _make_known_labels())
    prior[:, [0, 2]] = 0.5
    found = correct_priors(prior, _draw_columns(1, 30), known, 0.3)
    assert set(found.argmax(axis=1)) == {0, 2}
    assert found[:, [1, 3, 4]].max() < 1e-6


@pytest.mark.parametrize(
    "released",
    [
        TRUTH,
        np.zeros((ROWS, 0)),
        _draw_columns(2, 2_000),
        np.where(np.arange(ROWS) == 7, 1e6, 0)[:, None],
    ],
    ids=["sure", "none", "wide", "outlier"],
)
def test_scores_are_probabilities(released: Array) -> None:
    found = np.stack(
        [
            correct_priors(prior, released, known, max(TRUST))
            for prior in (TRUTH, np.full((ROWS, CLASSES), 1 / CLASSES))
            for known in (_make_known_labels(), _make_known_labels(0), _make_known_labels(ROWS))
        ]
    )
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(axis=2), 1)
