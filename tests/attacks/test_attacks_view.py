"""What a view holds, what is revealed beside it, people whom parties lack, and decoys."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from apfed_attacks import ATTACKS
from apfed_attacks.columns import select_own_columns
from apfed_attacks.decoys import add_decoys, exchange_releases
from apfed_attacks.features.hijack import ReversedHijack
from apfed_attacks.interface import AttackResult, Guess, Prediction
from apfed_attacks.live.runs import LiveRun, mount_answering_attack
from apfed_attacks.live.strategy import people_to_ask
from apfed_attacks.recorded import (
    make_view,
    reveal_encoder,
    reveal_features,
    reveal_labels,
    reveal_public,
    reveal_truth,
)
from apfed_attacks.run import Trial
from apfed_attacks.scoring import DECOY
from apfed_attacks.view import (
    AdversaryView,
    AttackError,
    Exchange,
    Knowledge,
    PlayedAttack,
    collect_gradients,
    collect_representations,
    combine_epochs,
    list_released_positions,
)
from apfed_experiments.gains import sample_people
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Kind, pack_tensors
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.run import run
from tests.attacks.recordings import TWO_TABLES, live_config, replace_sums_by_noise

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@pytest.fixture(scope="module")
def recording(make_recording: Any) -> Any:
    return make_recording("labels")


def _view(recording: Any, *parties: str, victim: str | None = None, **others: Any) -> AdversaryView:
    return make_view(recording, parties, knowledge=Knowledge(classes=3, victim=victim), **others)


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("held", "presence"),
        ("opened", "revealed"),
        ("agreed", "terms_by_passive"),
        ("played", "deviation"),
    ],
)
def test_a_former_name_of_an_attribute_warns(recording: Any, former: str, name: str) -> None:
    view = _view(recording, "passive-1")
    with pytest.warns(
        DeprecationWarning, match=f"AdversaryView.{former} is now AdversaryView.{name};"
    ):
        assert getattr(view, former) is getattr(view, name)


def test_a_view_holds_only_what_its_parties_sent_or_received(recording: Any) -> None:
    view = _view(recording, "passive-1")
    envelopes = [item for epoch in view.envelopes.values() for item in epoch]
    assert envelopes
    assert all("passive-1" in (item.sender, item.receiver) for item in envelopes)
    assert {item.kind for item in envelopes} == {Kind.REPRESENTATIONS}
    assert (view.role, view.name, view.description.name) == ("passive", "passive-1", "apfed_c")
    held = [getattr(view, name) for name in view.__dataclass_fields__]
    assert not any(item is recording or item is recording.transcript for item in held)
    # Own features are in the order of the alignment.
    table = recording.data.passives[0]
    rows = recording.alignment["passive-1"]
    assert list(view.features) == ["passive-1"]
    assert torch.equal(view.features["passive-1"], table.features[rows])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"released_by": "passive"}, "released_by: 'passive' is unknown; did you mean 'passives'?"),
        ({"opens": "votes"}, "opens: 'votes' is unknown; did you mean 'sum of votes'?"),
        ({"labels": "plain"}, "labels: 'plain' is unknown; known are shown, encrypted"),
    ],
)
def test_an_exchange_refuses_what_no_attack_would_look_for(words: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Exchange(name="mine", **words)


SUMS = {Kind.REPRESENTATIONS, Kind.SUM}


@pytest.mark.parametrize(
    ("parties", "role", "kinds"),
    [
        (["passive-2"], "passive", {Kind.REPRESENTATIONS}),
        (["active"], "active", SUMS),
        (["aggregator"], "aggregator", {Kind.SUM}),
        (["outsider"], "outsider", set()),
        (["active", "passive-2"], "active", SUMS),
    ],
)
def test_roles_see_their_own_kinds(
    recording: Any, parties: list[str], role: str, kinds: set[Kind]
) -> None:
    encoder = nn.Linear(4, 3)
    known = replace(recording, encoders={"passive-1": encoder})
    view = _view(replace_sums_by_noise(known), *parties)
    assert view.role == role
    assert {item.kind for epoch in view.envelopes.values() for item in epoch} == kinds
    # Only a coalition with the active gets opened sums, nobody another's network.
    assert bool(view.revealed) is ("active" in parties)
    assert not view.networks
    own = _view(known, "passive-1").networks
    assert list(own) == ["passive-1"]
    assert own["passive-1"] is not encoder


@pytest.mark.parametrize("parties", [[], ["passive-9"], ["passive-1", "passive-1"]])
def test_an_unknown_or_repeated_adversary_is_refused(recording: Any, parties: list[str]) -> None:
    message = "an adversary is one or several of active, passive-1, passive-2, aggregator"
    with pytest.raises(AttackError, match=re.escape(f"{parties}")) as caught:
        _view(recording, *parties)
    assert str(caught.value).startswith(message)


def test_representations_are_those_of_the_epoch_by_position(make_recording: Any) -> None:
    sent: list[Tensor] = []

    def remember(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> Tensor:
        sent.append(torch.randn(len(labels), 3, 2, 2, generator=draw))
        return sent[-1]

    recording = make_recording(remember, epochs=3)
    view = _view(recording, "passive-2")
    assert view.epochs == (0, 1, 2)
    trained = reveal_truth(recording).training_positions
    seen = [collect_representations(view, epoch) for epoch in range(3)]
    assert [torch.equal(one.positions, trained) for one in seen] == [True] * 3
    expected = [z[trained].flatten(1) for z in sent]
    assert [torch.equal(one.z, z) for one, z in zip(seen, expected, strict=True)] == [True] * 3


def test_colluders_hold_tvfls_representations_side_by_side_and_apfeds_once(
    make_recording: Any, recording: Any
) -> None:
    joint = make_recording("labels", method="tvfl")
    alone = collect_representations(_view(joint, "passive-1"), 1)
    both = collect_representations(_view(joint, "passive-2", "passive-1"), 1)
    assert torch.equal(both.z, torch.cat([alone.z, 2 * alone.z], dim=1))
    assert collect_representations(_view(recording, "passive-1", "passive-2"), 1).z.shape[1] == 6


def test_no_representations_and_a_payload_of_another_form_are_errors(recording: Any) -> None:
    with pytest.raises(AttackError, match="aggregator holds no representations of epoch 1"):
        collect_representations(_view(recording, "aggregator"), 1)
    view = _view(recording, "passive-1")
    payload = pack_tensors({"rows": torch.zeros(2, dtype=torch.int64), "h": torch.zeros(2, 2)})
    other = replace(view.envelopes[0][0], payload=payload)
    with pytest.raises(RemoteProtocolError, match="expected"):
        collect_representations(replace(view, envelopes={0: (other,)}), 0)


def test_over_time_the_first_and_the_last_of_a_row_are_told_and_the_mean(
    make_recording: Any,
) -> None:
    def count_epochs(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> Tensor:
        return torch.full((len(labels), 2), float(epoch))

    recording = make_recording(count_epochs, epochs=3)
    del recording.transcript._epochs[2].envelopes[-3:]  # the last epoch lost its last batch
    view = _view(recording, "passive-1")
    seen = combine_epochs(collect_representations, view, view.epochs)
    trained = reveal_truth(recording).training_positions
    assert [name for name, one in seen.items() if not torch.equal(one.positions, trained)] == []
    last = seen["last"].z[:, 0]
    assert set(last.tolist()) == {1.0, 2.0}
    assert set(seen["first"].z[:, 0].tolist()) == {0.0}
    assert torch.equal(seen["mean"].z[:, 0], torch.where(last == 2, 1.0, 0.5).double())
    assert set(combine_epochs(collect_representations, view, view.epochs[:2])) == {"first", "last"}


@pytest.mark.parametrize("per_class", [0, 4])
def test_so_many_labels_of_training_rows_are_revealed(recording: Any, per_class: int) -> None:
    truth = reveal_truth(recording)
    known = reveal_labels(recording, per_class, 3)
    assert torch.equal(known.values, truth.labels[known.positions])
    assert known.values.bincount(minlength=3).tolist() == [per_class] * 3
    assert torch.isin(known.positions, truth.training_positions).all()
    assert len(set(known.positions.tolist())) == len(known)


def test_labels_of_training_rows_are_revealed_by_class_and_seed(recording: Any) -> None:
    truth = reveal_truth(recording)
    few, more, others = (reveal_labels(recording, *how) for how in ((2, 0), (9, 0), (2, 1)))
    assert torch.isin(few.positions, more.positions).all()
    assert not torch.equal(few.positions, others.positions)
    with pytest.raises(AttackError, match="leave none to score; lower labels_per_class"):
        reveal_labels(recording, 100, 0)
    shares = truth.compute_class_priors()
    labels = truth.labels[truth.training_positions]
    assert shares == pytest.approx([float((labels == k).float().mean()) for k in range(3)])


def test_a_run_keeps_the_encoders_for_the_experimenter(tmp_path: Path) -> None:
    config = live_config("tvfl", data=TWO_TABLES, train={"epochs": 1})
    kept = run(config, tmp_path).recording
    loaded = load_recording(tmp_path, data=kept.data)
    rows = kept.data.passives[0].features[:5]
    encode, again = (reveal_encoder(each, "passive-1") for each in (kept, loaded))
    assert encode is not None
    assert again is not None
    assert torch.equal(encode(rows), again(rows))
    path = tmp_path / "encoders.safetensors"
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-4])
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="does not hold the encoders"):
        load_recording(tmp_path, data=kept.data)


# Pairwise alignment: nobody's row stands in for that of a person whom a party does not hold.

ROWS = 270
SOME = torch.arange(0, ROWS, 3)
OTHERS = torch.arange(1, ROWS, 3)


@pytest.fixture(scope="module")
def pairwise(make_recording: Any) -> Any:
    """passive-1 does not hold a third of the people, passive-2 does not hold another third."""
    return _remove_people(make_recording("nothing"), {"passive-1": SOME, "passive-2": OTHERS})


def _remove_people(recording: Any, unknown: Mapping[str, Tensor]) -> Any:
    alignment = {name: rows.clone() for name, rows in recording.alignment.items()}
    for name, positions in unknown.items():
        alignment[name][positions] = -1
    return replace(recording, alignment=alignment)


def _find_present(recording: Any, party: str) -> Any:
    return recording.alignment[party] >= 0


def test_there_is_no_truth_about_people_whom_the_victim_does_not_hold(pairwise: Any) -> None:
    whole = reveal_truth(pairwise)
    everybody = torch.arange(ROWS)
    active = _view(pairwise, "active")
    passive = _view(pairwise, "passive-1")
    for party in ("passive-1", "passive-2"):
        held = _find_present(pairwise, party)
        assert torch.equal(whole.features[party].isnan().all(dim=1), ~held)
        assert torch.equal(
            reveal_truth(pairwise, party).training_positions,
            whole.training_positions[held[whole.training_positions]],
        )
        assert torch.equal(active.has_rows(party, everybody), held)
    assert torch.equal(
        reveal_truth(pairwise, "active").training_positions, whole.training_positions
    )
    # A view says who is held as far as the coalition knows.
    assert active.has_rows("active", everybody).all()
    assert list(passive.presence) == ["passive-1"]
    assert not passive.has_rows("passive-1", SOME).any()


def test_features_are_revealed_of_people_whom_the_victim_holds(
    pairwise: Any, recording: Any
) -> None:
    trained = reveal_truth(pairwise, "passive-1").training_positions
    known = reveal_features(pairwise, "passive-1", len(trained) - 1, 0)
    assert torch.isin(known.positions, trained).all()
    assert len(set(known.positions.tolist())) == len(trained) - 1
    own = pairwise.data.passives[0].features
    assert torch.equal(known.values, own[pairwise.alignment["passive-1"][known.positions]])
    public = reveal_public(pairwise, ["passive-1", "passive-2"], ROWS, 0)
    assert len(public["active"]) > 0
    assert not any(rows.isnan().any() for rows in public.values())
    with pytest.raises(AttackError, match="lower shadow_rows"):
        reveal_features(recording, "active", 270, 0)


def test_own_columns_of_unknown_people_are_means_and_say_so(
    make_recording: Any, pairwise: Any, recording: Any
) -> None:
    view = _view(pairwise, "passive-1", "passive-2")
    own_A = pairwise.data.passives[0].features[pairwise.alignment["passive-1"]]
    mean = own_A[_find_present(pairwise, "passive-1")].mean(dim=0)
    columns = select_own_columns(view, SOME)
    assert columns.shape == (len(SOME), 4 + 1 + 2 + 1)
    assert torch.allclose(columns[:, :4], mean.expand(len(SOME), 4))
    assert columns[:, 4].tolist() == [1.0] * len(SOME)
    assert columns[:, 7].tolist() == [0.0] * len(SOME)
    assert torch.equal(select_own_columns(view, SOME[:2]), columns[:2])
    known = torch.hstack([own_A[OTHERS], torch.zeros(len(OTHERS), 1)])
    assert torch.equal(select_own_columns(view, OTHERS)[:, :5], known)
    # Where all hold everybody nothing is filled; who holds nobody has columns without content.
    whole = _view(recording, "active", "passive-1")
    assert not whole.presence
    assert select_own_columns(whole, torch.arange(ROWS)).shape == (ROWS, 5 + 4)
    nobody = _remove_people(make_recording("nothing"), {"passive-2": torch.arange(ROWS)})
    columns = select_own_columns(_view(nobody, "passive-2"), SOME)
    assert torch.equal(columns, torch.tensor([0.0, 0.0, 1.0]).expand(len(SOME), 3))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "adversary", "victim", "known"),
    [
        ("contrastive_inversion", "active", "passive-1", 100),
        ("model_completion", "passive-1", "active", 12),
    ],
)
def test_only_people_whom_the_victim_holds_are_guessed_and_scored(
    pairwise: Any, name: str, adversary: str, victim: str, known: int
) -> None:
    found: list[tuple[AttackResult, Guess]] = []
    attack = ATTACKS[name].model_validate({"iterations": 20})
    trial = Trial(
        attack,
        replace_sums_by_noise(pairwise),
        (adversary,),
        victim,
        seed=0,
        on_score=lambda *each: found.append(each),
    )
    assert trial.compute_result().applicable
    (result, guess), *_ = found
    assert _find_present(pairwise, victim)[guess.positions].all()
    # Labels are guessed of everybody whose representations a passive got.
    assert _find_present(pairwise, "passive-1")[guess.positions].all() == (victim == "passive-1")
    assert result.counts["scored"] + known == len(reveal_truth(pairwise, victim).training_positions)


def test_live_only_people_whom_a_party_holds_are_asked_about_or_played() -> None:
    changes: Any = {"alignment": {"mode": "pairwise", "protocol": "circuit"}}
    config = live_config("apfed_c", views=3, train={"epochs": 1}, **changes)
    data = sample_people(load_data(config.data, seed=config.seed), 0.5, seed=1)
    live = LiveRun(config, data)
    asked = people_to_ask(
        live, Knowledge(classes=10, victim="passive-2"), len(live.training_positions)
    )
    held = live.alignment["passive-2"][live.training_positions] >= 0
    assert torch.equal(asked.sort().values, live.training_positions[held].sort().values)
    assert not held.all()
    with pytest.raises(AttackError, match="passive-2 does not hold"):
        live.encode_people("passive-2", live.training_positions[~held])
    result = mount_answering_attack(
        ReversedHijack(ahead=5, hidden=16), config, "passive-2", data=data
    )
    assert result.applicable, result.reason
    assert result.baselines["ridge on x"]["r2"] is not None


# Decoys: releases exchanged between rows, and nothing else.


def _decoy(view: AdversaryView, seed: int = 0) -> tuple[AdversaryView, Tensor]:
    decoy = exchange_releases(view, seed)
    assert decoy is not None
    assert decoy.attributed_positions is not None
    return decoy, decoy.attributed_positions


def _make_played_attack(people: list[int]) -> PlayedAttack:
    return PlayedAttack("isolation", {"people": torch.tensor(people, dtype=torch.int64)})


@pytest.mark.parametrize(("method", "reads"), [("apfed_c", 1), ("tvfl", 2)])
def test_releases_are_exchanged_alike_in_all_epochs(
    make_recording: Any, method: str, reads: int
) -> None:
    gradient = "nothing" if method == "tvfl" else None
    made = make_recording("labels", method=method, gradient=gradient, epochs=3)
    view = _view(made, "passive-1")
    decoy, attributed_positions = _decoy(view)
    observed = list_released_positions(view)
    assert torch.equal(attributed_positions[observed].sort().values, observed)
    assert float((attributed_positions[observed] != observed).float().mean()) > 0.95
    for epoch in view.epochs:
        for read in (collect_representations, collect_gradients)[:reads]:
            seen = read(view, epoch)
            moved = read(decoy, epoch)
            assert torch.equal(moved.positions, seen.positions)
            assert torch.equal(moved.select_positions(attributed_positions[seen.positions]), seen.z)
    others = [name for name in view.__dataclass_fields__ if name != "attributed_positions"]
    assert all(getattr(decoy, name) is getattr(view, name) for name in others)
    assert view.attributed_positions is None
    # The order is a function of the seed.
    assert torch.equal(_decoy(view)[1], attributed_positions)
    assert not torch.equal(_decoy(view, 2)[1], attributed_positions)


def test_people_are_exchanged_among_those_of_whom_as_much_was_seen(
    make_recording: Any, pairwise: Any
) -> None:
    made = make_recording("nothing", method="tvfl", gradient="nothing", epochs=1)
    kept = made.transcript._epochs[0].envelopes
    last = max(item.step for item, _ in kept)
    # As test rows: released and never answered.
    kept[:] = [(item, of) for item, of in kept if (item.kind, item.step) != (Kind.GRADIENTS, last)]
    view = _view(made, "passive-1")
    observed = list_released_positions(view)
    trained = collect_gradients(view, 0).positions
    rest = observed[~torch.isin(observed, trained)]
    assert len(rest)
    decoy, attributed_positions = _decoy(view)
    assert torch.equal(attributed_positions[trained].sort().values, trained)
    assert torch.equal(attributed_positions[rest].sort().values, rest)
    assert torch.equal(collect_gradients(decoy, 0).positions, trained)
    # And those whom the victim holds among themselves.
    held = _find_present(pairwise, "passive-1")
    observed = reveal_truth(pairwise).training_positions
    taken = _decoy(_view(pairwise, "active", victim="passive-1"))[0].attribute_positions(observed)
    assert torch.equal(held[taken], held[observed])
    assert torch.equal(taken.sort().values, observed)
    assert not (taken == observed).any()


def test_people_who_were_asked_about_are_exchanged_among_themselves(
    make_recording: Any, recording: Any
) -> None:
    people = torch.tensor([40, 3, 17, 80, 3, 41, 60, 99])
    view = _view(recording, "active", deviation=_make_played_attack(people.tolist()))
    _, attributed_positions = _decoy(view)
    assert set(attributed_positions[people].tolist()) == set(people.tolist())
    assert not torch.equal(attributed_positions[people], people)
    every = torch.cat([list_released_positions(view), people]).unique()
    assert torch.equal(attributed_positions[every].sort().values, every)
    assert not (attributed_positions[every] == every).any()
    # Also where nobody kept their releases.
    empty = make_recording("nothing", epochs=0)
    people = torch.arange(300, 320)
    _, attributed_positions = _decoy(
        _view(empty, "active", deviation=_make_played_attack(people.tolist()))
    )
    assert torch.equal(attributed_positions[people].sort().values, people)
    assert torch.equal(attributed_positions[:300], torch.arange(300))


def test_a_view_of_no_two_rows_has_no_decoy(make_recording: Any) -> None:
    empty = make_recording("nothing", epochs=0)
    assert exchange_releases(_view(empty, "passive-1"), 0) is None
    assert (
        exchange_releases(_view(empty, "active", deviation=_make_played_attack([3, 3])), 0) is None
    )


def _guess(positions: list[int], value: float) -> Guess:
    """Scores that tell whose they are."""
    scores = Prediction(np.array(positions, dtype=np.float64)[:, None] + value, clusters=True)
    every = {"attack": scores}
    return Guess(
        positions=torch.tensor(positions), attacks=every, baselines=every, references=every
    )


def test_rows_that_both_guess_are_kept() -> None:
    both = add_decoys(_guess([2, 5, 7, 8], 0.25), _guess([9, 8, 1, 5, 2], 0.5))
    assert both.positions.tolist() == [2, 5, 8]
    kept = (both.attacks, both.baselines, both.references)
    values = [of["attack"].values.flatten().tolist() for of in kept]
    assert values == [[2.25, 5.25, 8.25]] * 3
    assert both.decoys["attack"].values.flatten().tolist() == [2.5, 5.5, 8.5]
    assert both.decoys["attack"].clusters
    none = add_decoys(_guess([1, 2], 0.0), _guess([3], 0.0))
    assert not len(none.positions)
    assert none.decoys["attack"].values.shape == (0, 1)


def test_decoys_of_a_leak_find_nothing(recording: Any) -> None:
    attack = ATTACKS["model_completion"]()
    result = Trial(attack, recording, ("passive-2",), "active", seed=0).compute_result()
    decoys = {
        key.removesuffix(DECOY): figures["balanced_accuracy"] or 0
        for key, figures in result.baselines.items()
        if key.endswith(DECOY)
    }
    assert set(decoys) == set(result.variants)
    assert (result.score["balanced_accuracy"] or 0) > 0.8
    # Chance is a third; of several decoys one is lucky.
    assert max(decoys.values()) < 0.5
    assert abs(float(np.mean(list(decoys.values()))) - 1 / 3) < 0.08
