"""Attacks on features: inversions of sums, simulators, regressions, and hijacked encoders."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_attacks.features.contrastive_inversion import (
    SummedStep,
    predict_sum,
    recover_representations,
)
from apfed_attacks.features.decoder_extraction import _align_procrustes
from apfed_attacks.features.feature_space import (
    build_decoder,
    build_simulator,
    compute_slope_penalty,
)
from apfed_attacks.features.hijack import FeatureSpaceHijack, HijackAdversary, ReversedHijack
from apfed_attacks.features.regression import Regression
from apfed_attacks.features.unpaired_inversion import UnpairedInversion
from apfed_attacks.live.runs import JointRun, mount_answering_attack
from apfed_attacks.recorded import make_view, reveal_features, reveal_truth
from apfed_attacks.run import Trial
from apfed_attacks.scoring import DECOY
from apfed_attacks.view import AgreedTerms, Knowledge, KnownRows
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.seeds import seed_draws
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.exchange import Kind, TensorSpec, unpack_tensors
from secure_apfed.networks.objectives import contrastive_loss
from secure_apfed.runs.outcome import Recording
from secure_apfed.settings import ContrastiveSettings
from tests.attacks.recordings import (
    ask,
    live_config,
    normal,
    replace_opened_sums,
    run_attack,
    run_attack_by,
)

PASSIVES = ("passive-1", "passive-2")
SPEC = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float32, (None, None))}


# Contrastive inversion.


def _gradient(h_BD: Tensor, p_BD: Tensor, anchors: str = "both") -> Tensor:
    """Return what a passive contributes: B dL_p/dh."""
    sent = h_BD.clone().requires_grad_()
    loss = contrastive_loss(sent, p_BD, temperature=1.0, anchors=anchors)
    (gradient,) = torch.autograd.grad(loss * len(h_BD), sent)
    return gradient


def _make_terms(
    anchors: Any = "both", *, weight: float = 1.0, clip: float | None = None
) -> AgreedTerms:
    return AgreedTerms(objective=ContrastiveSettings(anchors=anchors), weight=weight, clip=clip)


H_BD = normal(64, 32, seed=0)
P_BD = normal(64, 32, seed=1)


def _likeness(sum_BD: Tensor, agreed: AgreedTerms, truth_BD: Tensor, passives: int = 1) -> Any:
    found = recover_representations([SummedStep.from_batch(H_BD, sum_BD)], [agreed] * passives, 300)
    return found, float(F.cosine_similarity(found, truth_BD).mean())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("anchors", ["both", "active"])
def test_one_passives_representations_are_recovered_from_one_step(anchors: str) -> None:
    agreed = _make_terms(anchors, weight=0.5)
    assert _likeness(0.5 * _gradient(H_BD, P_BD, anchors), agreed, P_BD)[1] > 0.93


@pytest.mark.slow
def test_clipped_rows_are_matched_as_the_passive_clips_them() -> None:
    real_BD = _gradient(H_BD, P_BD)
    bound = float(real_BD.norm(dim=1).median())
    sent_BD = real_BD * (bound / real_BD.norm(dim=1, keepdim=True)).clamp(max=1)
    agreed = _make_terms(clip=bound)
    assert torch.allclose(predict_sum(H_BD, P_BD, [agreed]), sent_BD, atol=1e-12)
    assert _likeness(sent_BD, agreed, P_BD)[1] > 0.85


def test_a_sum_of_several_passives_gives_a_mixture_only() -> None:
    several = [P_BD, *(normal(64, 32, seed=seed) for seed in range(2, 6))]
    total = torch.stack([_gradient(H_BD, p_BD, "active") for p_BD in several]).sum(dim=0)
    found, likeness = _likeness(total, _make_terms("active"), P_BD, passives=5)
    assert likeness < 0.5
    # It explains the sum all the same: leakage is weakened, not absent.
    assert torch.allclose(5 * _gradient(H_BD, found, "active"), total, atol=5e-4)


def compute_opened_sums(recording: Recording, passives: tuple[str, ...]) -> Mapping[int, Tensor]:
    """The sums of real contrastive gradients of fixed encoders of the passives."""
    features = reveal_truth(recording).features
    draw = torch.Generator().manual_seed(7)
    encoders = [torch.randn(features[name].shape[1], 6, generator=draw) for name in PASSIVES]
    opened: dict[int, Tensor] = {}
    for item in (
        item for epoch in recording.transcript.envelopes_by_epoch.values() for item in epoch
    ):
        if item.kind is Kind.REPRESENTATIONS and item.step not in opened:
            tensors, _ = unpack_tensors(item.payload, SPEC, sender=item.sender)
            gradients = [
                _gradient(tensors["z"], features[name][tensors["rows"]] @ mix)
                for name, mix in zip(PASSIVES, encoders, strict=True)
                if name in passives
            ]
            # What is missing of two contributions is the first one again.
            opened[item.step] = torch.stack([*gradients, gradients[0]][:2]).sum(dim=0)
    return opened


@pytest.mark.slow
def test_sums_that_are_zero_hide_no_others(make_recording: Any) -> None:
    recording = make_recording("nothing")
    opened = compute_opened_sums(recording, ("passive-1",))

    def mount_inversion(opened: Mapping[int, Tensor]) -> Any:
        return run_attack(
            replace_opened_sums(recording, opened), "contrastive_inversion", iterations=25
        )

    whole, other = mount_inversion(opened)
    assert other.advantage < 0.05  # passive-2 contributed nothing
    last = max(opened)
    empty = torch.zeros_like(opened[last])
    first = mount_inversion({**opened, last: empty})[0]
    # The last batch is missing, and those to whom the decoy attributes it.
    assert 0 < whole.counts["scored"] - first.counts["scored"] <= 2 * len(empty)
    assert first.advantage > 0.3
    epoch = {item.step for item in recording.transcript.envelopes_by_epoch[1]}
    opened = {step: sums * (step not in epoch) for step, sums in opened.items()}
    assert mount_inversion(opened)[0].advantage > 0.3
    empty_sums = mount_inversion({step: 0 * sums for step, sums in opened.items()})
    assert [one.reason for one in empty_sums if "zero everywhere" not in one.reason] == []


# Unpaired inversion, of skewed features, whose shapes say which is which.


def _skew_features(own: Tensor) -> Tensor:
    """Two features, one with a long tail above, one below."""
    return torch.stack([own[:, 1].exp(), -own[:, 2].exp()], dim=1).clamp(-6, 6)


def make_skewed_recording(make_recording: Any) -> Recording:
    """passive-1 holds the skewed features and releases a function of them."""

    def leak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> Tensor:
        x = _skew_features(own)
        mixed = torch.stack([x[:, 1] - 0.3 * x[:, 0], x[:, 0], x[:, 0] + x[:, 1]], dim=1)
        return torch.tanh(0.2 * mixed)

    recording: Recording = make_recording(leak, method="tvfl")
    table, *others = recording.data.passives
    encoding = ColumnEncoding.for_numeric_columns(["above", "below"])
    victim = replace(table, features=_skew_features(table.features), encoding=encoding)
    return replace(recording, data=replace(recording.data, passives=(victim, *others)))


def invert_skewed_rows(recording: Recording) -> Any:
    attack = UnpairedInversion(
        iterations=500,
        shadow_rows=90,
        hidden=64,
        conditioned=False,
        likeness=0.1,
        decoded_likeness=0.1,
        starts=3,
    )
    result = Trial(attack, recording, ("active",), "passive-1", seed=0).compute_result()
    expected = {"mean of the public rows", "decoded x", f"decoded h{DECOY}"}
    assert set(result.baselines) == expected
    return result


def test_whose_the_public_rows_are_makes_no_difference_where_it_is_not_told(
    make_recording: Any,
) -> None:
    recording = make_skewed_recording(make_recording)
    shadow = reveal_features(recording, "passive-1", 60, 0)
    attack = UnpairedInversion(iterations=20, starts=1, hidden=16, conditioned=False)
    # The same rows of features in the same order, said to be of the same people in another one.
    guesses = []
    for positions in (shadow.positions, shadow.positions.flip(0)):
        known = KnownRows(positions, shadow.values)
        knowledge = Knowledge(classes=3, victim="passive-1", shadow=known)
        view = make_view(recording, ["active"], knowledge=knowledge, iterations=20)
        guesses.append(attack.run(view, 0).attacks["decoded h"].values)
    assert (guesses[0] == guesses[1]).all()


# Regressions, on sums that hold something of each row, on votes and on known pairs.


def test_rounds_of_few_columns_add_up_beneath_the_pseudo_labels_sent(make_recording: Any) -> None:
    """Six features, three columns a round: two rounds tell what one does not."""
    empty = make_recording("nothing", epochs=0)
    tables = [table.features[empty.alignment[table.name]] for table in empty.data.passives]
    whole = torch.hstack(tables).double()
    sent = [normal(len(whole), 3, seed=epoch) for epoch in range(2)]
    opened = [z + whole @ normal(6, 3, seed=7 + epoch) / 100 for epoch, z in enumerate(sent)]
    recording = ask(empty, "mmvfl", z=sent, opened=opened)
    results = run_attack(recording, "sum_regression", shadow_rows=40, iterations=20)
    reached = [{name: one["r2"] for name, one in result.variants.items()} for result in results]
    assert [one for one in reached if not one["ridge on all epochs"] > 0.95] == []
    assert [one for one in reached if not one["ridge on rest of the sums"] < 0.9] == []
    assert [one for one in reached if not one["ridge on sums"] < 0.5] == []


def test_own_labels_are_no_news(make_recording: Any) -> None:
    """A sum that tells the active's labels again tells features that depend on them, too."""
    empty = make_recording("nothing", epochs=0)
    labels_N = empty.data.active.labels[empty.alignment["active"]]
    recording = ask(empty, "split_nn_sum", opened=[F.one_hot(labels_N, 3).double()])
    options = {"shadow_rows": 60, "iterations": 20}
    result = run_attack_by("active", recording, "sum_regression", "passive-1", **options)
    assert result.variants["ridge on sums"]["r2"] > result.baselines["ridge on x"]["r2"] > 0
    assert result.advantage < 0.02


@pytest.mark.parametrize(
    ("pairs", "curved", "expected"),
    [(100, True, ["mlp on h"]), (100, False, []), (4, True, [])],
    ids=["curved", "straight", "four pairs"],
)
def test_a_network_is_a_guess_only_where_it_predicts_known_rows_better(
    pairs: int, curved: bool, expected: list[str]
) -> None:
    """One that is worse than a linear fit on known rows is never chosen, so it is not fitted."""
    draw = np.random.default_rng(0)
    h_NF = draw.normal(size=(300, 2))
    truth_NF = h_NF + 2 * curved * np.abs(h_NF)
    columns = {"noise": draw.normal(size=(300, 2)), "h": h_NF}
    shadow_N = np.arange(300) < pairs
    regress = Regression(
        torch.arange(300), truth_NF[shadow_N], shadow_N, hidden=32, iterations=300, seed=0
    )
    guesses = regress.predict_from_columns(columns)
    assert [name for name in guesses if name.startswith("mlp")] == expected
    best = max(guesses, key=lambda name: guesses[name].held_out or 0)
    error = np.square(guesses[best].values - truth_NF[~shadow_N]).mean()
    assert best in (expected or guesses)
    assert error < 0.1 or pairs < 10


def test_a_feature_that_is_the_same_in_all_pairs_stays_there_and_spoils_no_other() -> None:
    draw = np.random.default_rng(0)
    x_NF = draw.normal(size=(30, 4))
    x_NF[:12, 2] = 0.5
    shadow_N = np.arange(30) < 12
    turn_FF = np.linalg.qr(draw.normal(size=(4, 4)))[0]
    regress = Regression(torch.arange(30), x_NF[:12], shadow_N, hidden=4, iterations=1, seed=0)
    found = _align_procrustes(regress, 3 * x_NF @ turn_FF + 7)
    assert np.abs(found - x_NF[12:])[:, [0, 1, 3]].max() < 1e-12
    assert np.abs(found[:, 2] - 0.5).max() < 1e-12


# Feature-space hijacking, live against real passives of joint training, and against none.

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
PEOPLE = 800
BASELINES = {"mean of the outsiders", "ridge on x", f"decoded h{DECOY}"}


def _data() -> VerticalData:
    """A passive with one skewed feature, whose distribution says which way up it is."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.arange(PEOPLE) % 2
    own = torch.randn(PEOPLE, 3, generator=draw) + labels[:, None]
    secret = torch.empty(PEOPLE, 1).exponential_(generator=draw).clamp(max=4)
    other = torch.randn(PEOPLE, 2, generator=draw)
    ids = tuple(map(str, range(PEOPLE)))
    tables = [
        PartyTable(
            name=name,
            ids=ids,
            features=values,
            labels=labels if name == "active" else None,
            encoding=ColumnEncoding.for_numeric_columns(
                [f"c{at}" for at in range(values.shape[1])]
            ),
        )
        for name, values in (("active", own), ("passive-1", secret), ("passive-2", other))
    ]
    rows = torch.arange(PEOPLE)
    return VerticalData(
        table=tables[0],
        passives=tuple(tables[1:]),
        classes=("no", "yes"),
        train_rows=rows[200:],
        test_rows=rows[:200],
    )


def _config(epochs: int) -> Any:
    train = {"epochs": epochs, "learning_rate": 0.1, "momentum": 0.5}
    return live_config("tvfl", model={"hidden": [32], "representation": 8}, train=train)


def _times(factor: float) -> Any:
    """Answers with so many times what it was sent."""
    return SimpleNamespace(forge_gradient=lambda step, rows_B, z_BD: z_BD * factor)


def _decode_trained_victim(
    adversary: HijackAdversary, encoder: nn.Module, secret: torch.Tensor, steps: int
) -> Any:
    """Train a victim that only hears the adversary; return what its features decode to."""
    sgd = torch.optim.SGD(encoder.parameters(), lr=0.1)
    batches = len(secret) // 64
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % batches)
        z = encoder(secret[rows])
        sgd.zero_grad()
        (z * adversary.forge_gradient(step, rows, z)).sum().div(64).backward()
        sgd.step()
    return adversary.space.decode_rows(encoder(secret).detach())


def play_hijack(strength: float, epochs: int = 60) -> Any:
    attack = FeatureSpaceHijack(strength=strength, hidden=64, penalty=0.1, rounds=2, ahead=300)
    result = mount_answering_attack(attack, _config(epochs), "passive-1", data=_data())
    assert (result.adversary, result.victim, result.role) == ("active", "passive-1", "active")
    assert set(result.baselines) == BASELINES
    return result


def test_what_others_get_is_the_honest_gradient() -> None:
    data = _data()
    states = []
    everybody = dict.fromkeys(("active", "passive-1", "passive-2"), torch.arange(PEOPLE))
    for deviates in (False, True):
        run = JointRun(_config(1), data, alignment=everybody)
        if deviates:
            run.hand_over("passive-1", _times(0))
        run.train_epochs(1)
        (kept,) = run.recording.transcript.envelopes_by_epoch.values()
        states.append([item.payload for item in kept if item.kind is Kind.GRADIENTS][:2])
    (honest, other), (chosen, same) = states
    assert other == same
    assert honest != chosen


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    run = JointRun(_config(1), _data())
    run.hand_over("passive-1", _times(float("nan")))
    with pytest.raises(RemoteProtocolError, match="not finite"):
        run.train_epochs(1)


# The reversed hijack: by a passive, through a sum.


def measure_hijack(strength: float, steps: int) -> float:
    """Hijack a victim that has nothing else to learn; return R^2 of what its features decode to.

    One skewed feature: its distribution alone says which way up it is.
    """
    with seed_draws(0, "victim"):
        known, secret = torch.distributions.Exponential(1.0).sample((2, 1000, 1))
        encoder = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 8))
    attack = ReversedHijack(strength=strength, penalty=0.1, rounds=2, hidden=64, ahead=300)
    adversary = HijackAdversary(attack, (8,), known, known, known[:, :0], seed=0)
    error = float(
        (_decode_trained_victim(adversary, encoder, secret, steps) - secret).square().sum()
    )
    return 1 - error / float((secret - secret.mean()).square().sum())


@pytest.mark.parametrize(
    ("features", "representation", "convolves"),
    [((1, 14, 28), (64, 10, 24), True), ((3, 9, 7), (4, 2, 3), True), ((1, 2, 8), (32,), False)],
)
def test_rows_go_to_representations_and_back(
    features: tuple[int, ...], representation: tuple[int, ...], convolves: bool
) -> None:
    simulator = build_simulator(features, representation, 16, 4)
    rows = torch.randn(5, torch.Size(features).numel())
    simulated = simulator(rows)
    assert simulated.shape == (5, torch.Size(representation).numel())
    assert build_decoder(features, representation, 16, 4)(simulated).shape == rows.shape
    assert any(isinstance(layer, nn.Conv2d) for layer in simulator.modules()) == convolves


def test_a_slope_costs_its_square_and_none_has_a_finite_gradient() -> None:
    first, second = torch.randn(2, 6, 3)
    assert float(
        compute_slope_penalty(lambda rows: 3 * rows[:, 0], first, second)
    ) == pytest.approx(9)
    flat = nn.Linear(3, 1)
    nn.init.zeros_(flat.weight)
    compute_slope_penalty(flat, first, second).backward()
    assert flat.weight.grad is not None
    assert bool(flat.weight.grad.isfinite().all())
