"""No attack has an advantage, nor a disadvantage, where nothing was leaked.

Each attack is mounted on several recordings of pure noise, each of other people, with another
seed of the attack. The mean advantage then lies within its own interval of 0, and this interval
is narrow enough to find a bias that would matter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t
from torch import nn

from apfed_attacks import ATTACKS
from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.features.isolation import Isolation
from apfed_attacks.interface import AttackResult
from apfed_attacks.labels.completion import PROBES
from apfed_attacks.live import stuffing
from apfed_attacks.live.runs import LiveRun, play_from
from apfed_attacks.live.strategy import ActiveAttack, AnsweringAttack
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.run import Trial
from apfed_attacks.view import Played, batches
from secure_apfed.contract import RepresentationTerms
from secure_apfed.data import VerticalData, load_data
from secure_apfed.seeds import seeded
from secure_apfed.settings.alignment import AlignmentSettings
from tests.attacks.recordings import (
    TWO_TABLES,
    ask,
    attacked_by,
    ballot_of,
    decomposed,
    live_config,
    noise_opened,
    normal,
    two_classes,
)  # fmt: skip
from tests.attacks.test_attacks_people import averaged, people, with_model

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

SEEDS = range(8)
CONFIDENCE = 0.99
# Half an interval, in balanced accuracy, R^2 or AUC: a bias twice as large is always found.
WIDEST = 0.1


def _interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent figures and half the width of its Student t interval."""
    values = np.asarray(figures, dtype=np.float64)
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return float(values.mean()), quantile * float(values.std(ddof=1)) / math.sqrt(len(values))


def why_not_zero(advantages: Sequence[float]) -> str | None:
    """Return how the mean of these independent figures differs from 0, or None.

    Too wide an interval shows nothing, and is an answer as well.
    """
    values = np.asarray(advantages, dtype=np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        return f"{len(values)} figures, all finite: {bool(np.isfinite(values).all())}"
    mean, half = _interval(advantages)
    found = f"{mean:+.3f} +- {half:.3f} ({', '.join(f'{value:+.3f}' for value in values)})"
    if half > WIDEST:
        return f"{found} is too wide to tell"
    return None if abs(mean) <= half else f"{found} is not 0"


@pytest.mark.parametrize(
    ("advantages", "reason"),
    [
        # As the label attacks had them before there were decoys, and a leak as small.
        ([-0.12, -0.15, -0.19, -0.25, -0.14, -0.17, -0.21, -0.16], "is not 0"),
        ([0.06, 0.04, 0.05, 0.08, 0.05, 0.03, 0.07, 0.06], "is not 0"),
        ([-0.02] * 8, "is not 0"),
        ([0.4, -0.4, 0.3, -0.3, 0.2, -0.2, 0.1, -0.1], "too wide"),
        ([0.0], "1 figures"),
        ([0.0, float("nan")], "all finite: False"),
        ([0.02, -0.03, 0.0, 0.01, -0.01, 0.04, -0.02, 0.0], None),
        ([0.0] * 8, None),
    ],
)
def test_a_bias_is_found_and_luck_is_not_one(advantages: list[float], reason: str | None) -> None:
    found = why_not_zero(advantages)
    assert (found is None) is (reason is None)
    assert (reason or "") in (found or "")


def _advantage(result: AttackResult) -> float:
    assert result.advantage is not None, result.reason
    return result.advantage


Make = Callable[[Any, int], Any]


def _network(seed: int, features: int, hidden: int, classes: int) -> nn.Module:
    with seeded(seed, "never trained"):
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def _leak(leak: str, **how: Any) -> Make:
    return lambda make, seed: make(leak, seed=seed, **how)


_noise = partial(_leak, "nothing")


def _narrow(make: Any, seed: int) -> Any:
    """passive-1 releases what an encoder of one number makes of its features."""
    with seeded(3, "encoder"):
        encoder = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 6))

    def leak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        with torch.no_grad():
            h: torch.Tensor = encoder(own)
            return h

    recording = make(leak, method="tvfl", seed=seed)
    return replace(recording, encoders={"passive-1": encoder})


def _encoded(party: str, features: int) -> Make:
    """Where noise is released in joint training, and a party has a network that never trained."""

    def made(make: Any, seed: int) -> Any:
        recording = make("nothing", method="tvfl", epochs=1, seed=seed)
        return replace(recording, encoders={party: _network(seed, features, 32, 6)})

    return made


def _joint(make: Any, seed: int) -> Any:
    return make("nothing", method="tvfl", gradient="nothing", seed=seed)


def _asked(method: str, *, sent: bool, opened: bool) -> Make:
    def made(make: Any, seed: int) -> Any:
        empty = make("nothing", epochs=0, seed=seed)
        rows = len(empty.alignment["active"])
        z, sums = ([normal(rows, 3, seed=10 * seed + at + of) for at in range(2)] for of in (0, 99))
        return ask(empty, method, z=z if sent else (), opened=sums if opened else ())

    return made


def _ballot(method: str, *, true_labels: bool = True) -> Make:
    return lambda make, seed: ballot_of(
        make("nothing", epochs=0, seed=seed), method=method, seed=seed, true_labels=true_labels,
        voting=lambda own, draw: torch.rand(len(own), 3, generator=draw),
    )  # fmt: skip


def _hijacked(trial: Trial) -> Trial:
    """Play the attack against a victim that releases what was recorded, whatever it hears."""
    assert isinstance(trial.attack, AnsweringAttack)
    knowledge, truth = trial.known()
    view = trial.view(knowledge)
    terms = RepresentationTerms(shape=(6,), dtype="float32", minimum_norm=0, maximum_norm=1e4)
    strategy = trial.attack.begin(terms, knowledge, truth.features[trial.parties[0]], trial.seed)
    for epoch in view.epochs:
        for step, rows_B, z_BD in batches(view, epoch):
            strategy.answer(step, rows_B, z_BD)
    return replace(trial, played=Played(trial.attack.name, strategy.notes()))


@dataclass(frozen=True)
class Null:
    """An attack where nothing leaked: its options, the recording by seed, and who mounts it."""

    name: str
    options: dict[str, Any]
    make: Make
    adversary: str
    victim: str = "active"
    prepared: Callable[[Trial], Trial] = field(default=lambda trial: trial)


def _by_either(name: str, options: dict[str, Any], make: Make, fast: int | None = None) -> Any:
    """The first passive's own features tell something of the label and the other's nothing.

    Beside the one noise does harm, beside the other every variant is a ticket in a lottery.
    """
    return [
        pytest.param(
            Null(name, options, make, f"passive-{at}"), id=f"{name}-passive-{at}",
            marks=() if at == fast else pytest.mark.slow,
        )
        for at in (1, 2)
    ]  # fmt: skip


def _of_first(name: str, options: dict[str, Any], make: Make, **more: Any) -> Null:
    return Null(name, options, make, "active", "passive-1", **more)


NULL: list[Any] = [
    *_by_either("model_completion", {"labels_per_class": 0}, _noise(), 1),
    *_by_either("model_completion", {"labels_per_class": 4, "iterations": 40}, _noise(epochs=1), 2),
    *_by_either("temporal", {"labels_per_class": 4, "iterations": 20}, _noise(epochs=3), 2),
    *_by_either("semi_supervised", {"labels_per_class": 4, "iterations": 30}, _noise(epochs=1), 1),
    *_by_either("label_gradients", {"labels_per_class": 0}, _joint, 2),
    *_by_either("label_gradients", {"labels_per_class": 4, "iterations": 20}, _joint),
    *_by_either("gradient_norm", {}, lambda make, seed: two_classes(_joint(make, seed)), 1),
    *_by_either("gradient_direction", {"labels_per_class": 4, "iterations": 20}, _joint, 2),
    *_by_either("batch_labels", {"labels_per_class": 0, "iterations": 60, "starts": 1}, _joint),
    *_by_either("batch_labels", {"labels_per_class": 4, "iterations": 60, "starts": 1}, _joint, 1),
    *_by_either("spectral", {}, _joint, 2),
]
FEW = {"shadow_rows": 60, "iterations": 50}
NULL += [pytest.param(case, id=case.name) for case in (
    Null("semi_supervised", {"own_network": True, "iterations": 30}, _encoded("passive-1", 4),
         "passive-1"),
    Null("semi_supervised", {"own_network": True, "iterations": 30}, _encoded("passive-2", 2),
         "passive-2"),
    _of_first("inverse_network", {"shadow_rows": 40, "iterations": 40}, _encoded("passive-1", 4)),
    _of_first("unpaired_inversion", {"shadow_rows": 60, "iterations": 20, "hidden": 16, "starts": 1,
                                     "batch": 32}, _encoded("passive-1", 4)),
    _of_first("representation_network", {"shadow_rows": 40, "iterations": 40, "hidden": 32},
              _encoded("passive-1", 4)),
    _of_first("contrastive_inversion", {"shadow_rows": 40, "iterations": 10},
              lambda make, seed: noise_opened(make("nothing", epochs=1, seed=seed), seed)),
    _of_first("hijack", {"ahead": 40, "hidden": 32}, _noise(method="tvfl", epochs=1),
              prepared=_hijacked),
    Null("reversed_hijack", {"ahead": 40, "hidden": 32}, _noise(epochs=1), "passive-1",
         prepared=_hijacked),
    Null("membership", {"shadow_models": 8, "epochs": 4}, lambda make, seed: replace(
        make("nothing", epochs=0, seed=seed), model=_network(seed, 5, 32, 3)), "outsider"),
    *(_of_first("averaged_membership", {"strangers": strangers},
                lambda make, seed: with_model(averaged(), _network(seed, 30, 8, 2)))
      for strangers in ("outside", "elsewhere")),
    *(Null("pseudo_labels", {"labels_per_class": known, "iterations": 20},
           _asked("v_fedmv", sent=True, opened=False), "passive-2") for known in (0, 4)),
    _of_first("sum_regression", {**FEW, "iterations": 20},
              _asked("split_nn_sum", sent=False, opened=True)),
    _of_first("sum_regression", {**FEW, "iterations": 20}, _asked("mmvfl", sent=True, opened=True)),
    _of_first("vector_regression", FEW, lambda make, seed: decomposed(
        make("nothing", epochs=0, seed=seed), true=False, seed=seed)),
    _of_first("vote_regression", FEW, _ballot("votes")),
    _of_first("vote_regression", FEW, _ballot("votes_randomised")),
    Null("shown_labels", {"labels_per_class": 4, "iterations": 50},
         _ballot("votes", true_labels=False), "passive-1"),
)]  # fmt: skip


@pytest.mark.null
@pytest.mark.parametrize("case", NULL)
def test_where_nothing_leaked_nothing_is_told(make_recording: Any, case: Null) -> None:
    attack, advantages = ATTACKS[case.name].model_validate(case.options), []
    for seed in SEEDS:
        recording = case.make(make_recording, seed)
        trial = Trial(attack, recording, (case.adversary,), case.victim, seed=seed)
        advantages.append(_advantage(case.prepared(trial).result()))
    assert why_not_zero(advantages) is None


LABELS = "passive-1", "active"
# Figures of leaks of what the adversary has anyway, and the mean of two seeds at most.
KNOWN_ANYWAY: list[tuple[str, Make, tuple[str, str], dict[str, Any], str, float]] = [
    ("model_completion", _leak("copy"), LABELS, {"labels_per_class": 0}, "advantage", 0.06),
    ("model_completion", _leak("echo"), LABELS, {"labels_per_class": 4}, "advantage", 0.06),
    ("model_completion", _leak("echo"), LABELS, {"labels_per_class": 40}, "advantage", 0.06),
    ("label_gradients", _leak("nothing", method="tvfl", gradient="echo"), LABELS,
     {"labels_per_class": 10}, "advantage", 0.06),
    ("inverse_network", _leak("echo"), LABELS, {}, "advantage", 0.03),
    ("inverse_network", _leak("copy", method="tvfl"), ("active", "passive-2"), {},
     "advantage", 0.03),
    ("representation_network", _narrow, ("active", "passive-1"), {"iterations": 300}, "r2", 0.6),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "by", "options", "figure", "most"), KNOWN_ANYWAY)
def test_what_the_adversary_has_anyway_is_next_to_no_advantage(
    make_recording: Any, name: str, make: Make, by: Any, options: Any, figure: str, most: float
) -> None:
    recording = make(make_recording, 5)
    results = [attacked_by(by[0], recording, name, by[1], seed, **options) for seed in range(2)]
    found = [one.advantage if figure == "advantage" else one.score[figure] for one in results]
    assert sum(found) / len(found) < most, found


def test_a_leak_that_would_drown_own_features_is_found(make_recording: Any) -> None:
    def weak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        z = torch.randn(len(labels), 128, generator=draw)
        z[:, :3] += 1.5 * nn.functional.one_hot(labels, 3)
        return z

    advantages, unweighted = [], []
    for seed in SEEDS:
        recording = make_recording(weak, epochs=1, seed=seed)
        options: Any = {"labels_per_class": 10, "iterations": 40}
        result = attacked_by("passive-1", recording, "model_completion", seed=seed, **options)
        advantages.append(result.advantage)
        # What was compared before: no weights, no stacking, no falling back on one's own.
        figures = {name: one["balanced_accuracy"] or 0 for name, one in result.variants.items()}
        found = [one for name, one in figures.items() if name.endswith((" on h", " on h and x"))]
        own = [result.baselines[f"{probe} on x"]["balanced_accuracy"] or 0 for probe in PROBES]
        unweighted.append(max(found) - max(own))
    mean, half = _interval(advantages)
    assert mean > half, advantages
    assert np.mean(unweighted) < -0.02, unweighted


def _in_order(data: VerticalData) -> dict[str, torch.Tensor]:
    """Whom all parties have, in an order that repeats, unlike that of a set intersection."""
    rows = {table.name: {one: row for row, one in enumerate(table.ids)} for table in data.tables}
    common = sorted(set.intersection(*(set(row_of) for row_of in rows.values())))
    return {name: torch.tensor([row_of[one] for one in common]) for name, row_of in rows.items()}


class _Deaf(LiveRun):
    draw: torch.Generator

    def ask(self, rows_B: torch.Tensor, z_BD: torch.Tensor, **deviations: Any) -> torch.Tensor:
        return torch.randn(z_BD.shape, generator=self.draw)


DEAF: list[tuple[str, ActiveAttack]] = [
    ("apfed_c", ChosenRepresentations(people=80, shadow_rows=20, iterations=20)),
    ("apfed_r", DecoderExtraction(people=80, shadow_rows=20, iterations=20)),
    ("apfed_r", Isolation(way="subset", people=64, shadow_rows=20, iterations=20)),
]


@pytest.mark.null
@pytest.mark.parametrize(("method", "attack"), DEAF)
def test_noise_in_the_place_of_answers_rebuilds_no_feature(
    method: str, attack: ActiveAttack
) -> None:
    several = ["active", "passive-1", "passive-2"][: 3 if attack.name == "isolation" else 2]
    columns = {name: list(range(10 * at, 10 * at + 10)) for at, name in enumerate(several)}
    config = live_config(
        method,
        data={**TWO_TABLES, "columns": columns},
        # Fewer numbers than features, so that every way of reading an answer is taken.
        model={"projection": 12},
    )
    data = load_data(config.data, seed=config.seed)
    run = _Deaf(config, data, rules=frozenset(), alignment=_in_order(data))
    advantages = []
    for seed in SEEDS:
        run.draw = torch.Generator().manual_seed(seed)
        advantages.append(_advantage(play_from(run, attack, "passive-1", seed=seed)))
    assert why_not_zero(advantages) is None


@pytest.mark.null
def test_where_no_id_opens_no_candidate_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuffing, "_intersect", lambda *_: np.empty(0, dtype=np.int64))
    tables = stuffing.Tables(own=people(0, 60), victim=people(60, 120), outsiders=people(120, 180))
    advantages = []
    for seed in SEEDS:
        result, stuffed = stuffing.play_stuffing(
            IdStuffing(candidates=40), tables, AlignmentSettings(), seed=seed
        )
        assert len(stuffed.tried) == 40
        advantages.append(_advantage(result))
    assert why_not_zero(advantages) is None


def test_every_attack_is_shown_where_nothing_was_leaked() -> None:
    recorded = {case.values[0].name for case in NULL}
    assert recorded | {attack.name for _, attack in DEAF} | {IdStuffing.name} == set(ATTACKS)
