import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from apfed_attacks.recorded import (
    class_priors,
    reveal_encoder,
    reveal_features,
    reveal_labels,
    truth_of,
    view_of,
)
from apfed_attacks.view import AttackError, Exchange, Knowledge, collect, representations
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind, pack
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.run import run
from tests.attacks.recordings import TWO_TABLES, live_config

IGNORANT = Knowledge(classes=3)


@pytest.fixture(scope="module")
def recording(make_recording: Any) -> Any:
    return make_recording("labels")


def test_a_view_holds_only_what_its_parties_sent_or_received(recording: Any) -> None:
    view = view_of(recording, ["passive-1"], knowledge=IGNORANT)
    envelopes = [item for epoch in view.envelopes.values() for item in epoch]
    assert envelopes
    assert all("passive-1" in (item.sender, item.receiver) for item in envelopes)
    assert {item.kind for item in envelopes} == {Kind.REPRESENTATIONS}
    assert all("passive-1" in (flow.sender, flow.receiver) for flow in view.flows)
    assert list(view.features) == ["passive-1"]
    assert (view.role, view.name, view.description.name) == ("passive", "passive-1", "apfed_c")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"released_by": "passive"}, "released_by: 'passive' is unknown; did you mean 'passives'?"),
        ({"opens": "votes"}, "opens: 'votes' is unknown; did you mean 'sum of votes'?"),
        ({"labels": "plain"}, "labels: 'plain' is unknown; Known are shown, encrypted"),
    ],
)
def test_an_exchange_refuses_what_no_attack_would_look_for(words: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Exchange(name="mine", **words)


def test_a_view_cannot_reach_the_recording(recording: Any) -> None:
    view = view_of(recording, ["passive-1"], knowledge=IGNORANT)
    held = [getattr(view, name) for name in view.__dataclass_fields__]
    assert not any(item is recording or item is recording.transcript for item in held)


@pytest.mark.parametrize(
    ("parties", "role", "kinds"),
    [
        (["active"], "active", {Kind.REPRESENTATIONS, Kind.SUM}),
        (["aggregator"], "aggregator", {Kind.SUM}),
        (["eavesdropper"], "eavesdropper", set()),
        (["outsider"], "outsider", set()),
        (["active", "passive-2"], "active", {Kind.REPRESENTATIONS, Kind.SUM}),
    ],
)
def test_roles_see_their_own_kinds(
    recording: Any, parties: list[str], role: str, kinds: set[Kind]
) -> None:
    view = view_of(recording, parties, knowledge=IGNORANT)
    assert view.role == role
    assert {item.kind for epoch in view.envelopes.values() for item in epoch} == kinds


def test_an_eavesdropper_sees_the_sizes_of_all_flows_and_an_outsider_none(recording: Any) -> None:
    eavesdropper = view_of(recording, ["eavesdropper"], knowledge=IGNORANT)
    assert eavesdropper.flows == recording.transcript.flows
    assert view_of(recording, ["outsider"], knowledge=IGNORANT).flows == ()


def test_own_features_are_in_the_order_of_the_alignment(recording: Any) -> None:
    view = view_of(recording, ["passive-2"], knowledge=IGNORANT)
    table, rows = recording.data.passives[1], recording.alignment["passive-2"]
    assert torch.equal(view.features["passive-2"], table.features[rows])


@pytest.mark.parametrize("parties", [[], ["passive-9"], ["passive-1", "passive-1"]])
def test_an_unknown_or_repeated_adversary_is_refused(recording: Any, parties: list[str]) -> None:
    message = "an adversary is one or several of active, passive-1, passive-2, aggregator"
    with pytest.raises(AttackError, match=re.escape(f"{parties}")) as caught:
        view_of(recording, parties, knowledge=IGNORANT)
    assert str(caught.value).startswith(message)


def test_representations_are_those_of_the_epoch_by_position(make_recording: Any) -> None:
    released: list[torch.Tensor] = []

    def remember(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        released.append(torch.randn(len(labels), 3, 2, 2, generator=draw))
        return released[-1]

    recording = make_recording(remember, epochs=3)
    view = view_of(recording, ["passive-2"], knowledge=IGNORANT)
    assert view.epochs == (0, 1, 2)
    for epoch, z in enumerate(released):
        seen = representations(view, epoch)
        assert torch.equal(seen.positions, truth_of(recording).trained)
        assert torch.equal(seen.z, z[seen.positions].flatten(1))


def test_colluding_tvfl_passives_put_their_representations_side_by_side(
    make_recording: Any,
) -> None:
    recording = make_recording("labels", method="tvfl")
    alone = representations(view_of(recording, ["passive-1"], knowledge=IGNORANT), 1)
    both = representations(view_of(recording, ["passive-2", "passive-1"], knowledge=IGNORANT), 1)
    assert torch.equal(both.z, torch.cat([alone.z, 2 * alone.z], dim=1))


def test_colluding_apfed_passives_hold_the_same_representations_once(recording: Any) -> None:
    both = view_of(recording, ["passive-1", "passive-2"], knowledge=IGNORANT)
    assert representations(both, 1).z.shape[1] == 6


def test_an_epoch_without_representations_is_an_error(recording: Any) -> None:
    view = view_of(recording, ["aggregator"], knowledge=IGNORANT)
    assert view.epochs == ()
    with pytest.raises(KeyError, match="aggregator holds no representations of epoch 1"):
        representations(view, 1)


def test_a_payload_of_another_form_is_refused(recording: Any) -> None:
    view = view_of(recording, ["passive-1"], knowledge=IGNORANT)
    payload = pack({"rows": torch.zeros(2, dtype=torch.int64), "h": torch.zeros(2, 2)})
    envelope = Envelope(
        session="planted", step=0, kind=Kind.REPRESENTATIONS, sender="active",
        receiver="passive-1", sequence=0, payload=payload,
    )  # fmt: skip
    strange = type(view)(**{**vars(view), "envelopes": {0: (envelope,)}})
    with pytest.raises(RemoteProtocolError, match="expected"):
        representations(strange, 0)


@pytest.mark.parametrize("per_class", [0, 1, 4, 40])
def test_exactly_per_class_training_labels_are_revealed(recording: Any, per_class: int) -> None:
    truth = truth_of(recording)
    known = reveal_labels(recording, per_class, 3)
    assert torch.equal(known.values, truth.labels[known.positions])
    assert known.values.bincount(minlength=3).tolist() == [per_class] * 3
    assert torch.isin(known.positions, truth.trained).all()
    assert len(set(known.positions.tolist())) == len(known)


def test_revealed_labels_depend_on_the_seed_and_grow_with_their_number(recording: Any) -> None:
    few, more = reveal_labels(recording, 2, 0), reveal_labels(recording, 9, 0)
    assert torch.isin(few.positions, more.positions).all()
    assert torch.equal(few.positions, reveal_labels(recording, 2, 0).positions)
    assert not torch.equal(few.positions, reveal_labels(recording, 2, 1).positions)


def test_revealing_all_labels_of_a_class_is_refused(recording: Any) -> None:
    with pytest.raises(AttackError, match="leave none to score; lower labels_per_class"):
        reveal_labels(recording, 100, 0)


def test_revealed_features_are_the_actives(recording: Any) -> None:
    known = reveal_features(recording, "active", 20, 0)
    own = recording.data.active.features[recording.alignment["active"]]
    assert torch.equal(known.values, own[known.positions])
    assert len(set(known.positions.tolist())) == 20
    with pytest.raises(AttackError, match="lower shadow_rows"):
        reveal_features(recording, "active", 270, 0)


def test_priors_are_shares_of_the_training_rows(recording: Any) -> None:
    truth = truth_of(recording)
    shares = class_priors(truth)
    assert sum(shares) == pytest.approx(1)
    expected = float((truth.labels[truth.trained] == 2).float().mean())
    assert shares[2] == pytest.approx(expected)


def test_collected_releases_are_the_first_of_the_given_epochs(make_recording: Any) -> None:
    def count_epochs(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        return torch.full((len(labels), 2), float(epoch))

    recording = make_recording(count_epochs, epochs=3)
    # The last epoch lost its last batch.
    missing = recording.transcript._epochs[2][-3:]
    del recording.transcript._epochs[2][-3:]
    view = view_of(recording, ["passive-1"], knowledge=IGNORANT)
    read = partial(representations, view)
    latest, earliest = collect(read, reversed(view.epochs)), collect(read, view.epochs)
    assert torch.equal(latest.positions, truth_of(recording).trained)
    assert torch.equal(earliest.positions, latest.positions)
    lost = {envelope.step for envelope in missing}
    assert len(lost) == 1
    assert set(latest.z[:, 0].tolist()) == {1.0, 2.0}
    assert set(earliest.z[:, 0].tolist()) == {0.0}


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_run_keeps_the_encoders_for_the_experimenter(tmp_path: Path) -> None:
    config = live_config("tvfl", data=TWO_TABLES, train={"epochs": 1})
    kept = run(config, tmp_path).recording
    loaded = load_recording(tmp_path, data=kept.data)
    rows = kept.data.passives[0].features[:5]
    encode, again = (reveal_encoder(one, "passive-1") for one in (kept, loaded))
    assert encode is not None
    assert again is not None
    assert torch.equal(encode(rows), again(rows))
    path = tmp_path / "encoders.safetensors"
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-4])
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="does not hold the encoders"):
        load_recording(tmp_path, data=kept.data)
