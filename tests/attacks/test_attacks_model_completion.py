from functools import partial
from typing import Any

import pytest

from apfed_attacks.labels.model_completion import ModelCompletion
from apfed_attacks.recorded import reveal_labels, view_of
from apfed_attacks.scoring import DECOY
from apfed_attacks.view import AttackError, Knowledge, KnownRows
from tests.attacks.recordings import attacked

attack = partial(attacked, name="model_completion")


def test_clusters_are_named_by_priors_only_where_these_are_known(make_recording: Any) -> None:
    recording = make_recording("labels")
    result = attack(recording, labels_per_class=0)[1]
    assert result.variants["clusters named by the truth on h"]["accuracy"] > 0.9
    named = "clusters named by priors on h"
    assert named in attack(recording, labels_per_class=0)[0].variants
    assert named not in attack(recording, labels_per_class=0, priors=False)[0].variants


def test_the_first_epoch_is_a_reference_and_no_baseline(make_recording: Any) -> None:
    result = attack(make_recording("labels"))[0]
    assert all("first epoch" in name for name in result.references)
    assert not any("first epoch" in name for name in result.baselines)
    assert all(name.endswith(DECOY) for name in result.baselines if " h" in name)
    before = result.references["logistic on h of the first epoch"]["balanced_accuracy"]
    assert before < 0.5
    assert attack(make_recording("labels", epochs=1))[0].references == {}


def test_colluders_pool_their_features(make_recording: Any) -> None:
    (result,) = attack(make_recording("labels"), coalition="all")
    assert result.adversary == "passive-1 + passive-2"
    assert result.knowledge["own_features"] == 6


def test_another_role_is_said(make_recording: Any) -> None:
    view = view_of(make_recording("labels"), ["active"], knowledge=Knowledge(classes=3))
    reason = ModelCompletion().why_not(view)
    assert reason == "model_completion is mounted by the passive party, not by the active"


def test_a_limit_of_rows_keeps_the_known_ones(make_recording: Any) -> None:
    result = attack(make_recording("labels"), most_rows=60)[0]
    assert result.counts == {"known": 12, "scored": 48}


def test_known_labels_of_one_class_only_are_a_reason(make_recording: Any) -> None:
    recording = make_recording("labels")
    known = reveal_labels(recording, 1, 0)
    kept = KnownRows(known.positions[:1], known.values[:1])
    view = view_of(recording, ["passive-1"], knowledge=Knowledge(classes=3, labels=kept))
    with pytest.raises(AttackError, match="fewer than two classes; raise labels_per_class"):
        ModelCompletion().run(view, 0)
