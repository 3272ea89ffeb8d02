from typing import Any

import pytest
import torch

from apfed_attacks.labels.model_completion import ModelCompletion
from apfed_attacks.recorded import reveal_labels, view_of
from apfed_attacks.run import mount
from apfed_attacks.scoring import DECOY
from apfed_attacks.view import AttackError, Knowledge, KnownRows
from secure_apfed.config import AttackChoice


def _mount(recording: Any, seed: int = 0, **options: Any) -> Any:
    choice = AttackChoice(name="model_completion", options=options)
    return mount(recording, [choice], seed=seed)


@pytest.mark.planted("model_completion")
@pytest.mark.parametrize(
    ("per_class", "least", "score"), [(1, 0.2, 0.65), (4, 0.25, 0.8), (40, 0.25, 0.8)]
)
def test_a_planted_label_is_found(
    make_recording: Any, per_class: int, least: float, score: float
) -> None:
    recording = make_recording("labels")
    for result in _mount(recording, labels_per_class=per_class):
        assert result.applicable
        assert result.advantage > least
        assert result.score["balanced_accuracy"] > score
        assert result.counts["known"] == 3 * per_class


def test_planted_clusters_are_found_without_any_label(make_recording: Any) -> None:
    first, second = _mount(make_recording("labels"), labels_per_class=0)
    assert first.counts["known"] == 0
    assert second.advantage > 0.3
    assert second.variants["clusters named by the truth on h"]["accuracy"] > 0.9


def test_clusters_are_named_by_priors_only_where_these_are_known(make_recording: Any) -> None:
    recording = make_recording("labels")
    named = "clusters named by priors on h"
    assert named in _mount(recording, labels_per_class=0)[0].variants
    assert named not in _mount(recording, labels_per_class=0, priors=False)[0].variants


@pytest.mark.parametrize(
    ("leak", "per_class"),
    [("nothing", 0), ("copy", 0), ("nothing", 4), ("echo", 4), ("nothing", 40), ("echo", 40)],
)
def test_without_a_leak_the_advantage_is_about_zero(
    make_recording: Any, leak: str, per_class: int
) -> None:
    recording = make_recording(leak)
    results = [_mount(recording, seed, labels_per_class=per_class)[0] for seed in range(2)]
    assert sum(result.advantage for result in results) / len(results) < 0.06


def test_the_first_epoch_is_a_reference_and_no_baseline(make_recording: Any) -> None:
    result = _mount(make_recording("labels"))[0]
    assert all("first epoch" in name for name in result.references)
    assert not any("first epoch" in name for name in result.baselines)
    assert all(name.endswith(DECOY) for name in result.baselines if " h" in name)
    before = result.references["logistic on h of the first epoch"]["balanced_accuracy"]
    assert before < 0.5
    assert _mount(make_recording("labels", epochs=1))[0].references == {}


def test_in_tvfl_a_passive_completes_what_it_sent_itself(make_recording: Any) -> None:
    results = _mount(make_recording("labels", method="tvfl"))
    assert all(result.advantage > 0.25 for result in results)
    assert results[0].method == "tvfl"


def test_colluders_pool_their_features(make_recording: Any) -> None:
    (result,) = _mount(make_recording("labels"), coalition="all")
    assert result.adversary == "passive-1 + passive-2"
    assert result.knowledge["own_features"] == 6


def test_single_view_releases_nothing_to_attack(make_recording: Any) -> None:
    for result in _mount(make_recording("nothing", method="single_view")):
        assert not result.applicable
        assert result.advantage is None
        assert result.reason.startswith("single_view: nobody is aligned")


def test_an_empty_transcript_is_said(make_recording: Any) -> None:
    result = _mount(make_recording("nothing", epochs=0))[0]
    assert "set transcript.keep to first_and_last" in result.reason


def test_another_role_is_said(make_recording: Any) -> None:
    view = view_of(make_recording("labels"), ["active"], knowledge=Knowledge(classes=3))
    reason = ModelCompletion().why_not(view)
    assert reason == "model_completion is mounted by the passive party, not by the active"


def test_too_many_known_labels_are_a_reason_not_a_crash(make_recording: Any) -> None:
    result = _mount(make_recording("labels"), labels_per_class=200)[0]
    assert not result.applicable
    assert "lower labels_per_class" in result.reason


def test_a_limit_of_rows_keeps_the_known_ones(make_recording: Any) -> None:
    result = _mount(make_recording("labels"), most_rows=60)[0]
    assert result.counts == {"known": 12, "scored": 48}


def test_wide_columns_are_reduced(make_recording: Any) -> None:
    assert _mount(make_recording("labels"), components=3)[0].advantage > 0.2


def test_results_are_a_function_of_the_seed(make_recording: Any) -> None:
    recording = make_recording("labels")
    assert _mount(recording, 1) == _mount(recording, 1)
    assert _mount(recording, 1) != _mount(recording, 2)


def test_known_labels_of_one_class_only_are_a_reason(make_recording: Any) -> None:
    recording = make_recording("labels")
    known = reveal_labels(recording, 1, 0)
    kept = KnownRows(known.positions[:1], known.values[:1])
    view = view_of(recording, ["passive-1"], knowledge=Knowledge(classes=3, labels=kept))
    with pytest.raises(AttackError, match="fewer than two classes; raise labels_per_class"):
        ModelCompletion().run(view, 0)


def test_values_that_are_not_finite_are_a_reason_not_a_crash(make_recording: Any) -> None:
    def broken(labels: Any, own: Any, draw: Any, epoch: int) -> torch.Tensor:
        return torch.full((len(labels), 6), float("nan"))

    (first, *_) = mount(make_recording(broken), [AttackChoice(name="model_completion")], seed=0)
    assert first.reason is not None
    assert "representations in step" in first.reason
    assert "are not finite; there is nothing to fit" in first.reason
