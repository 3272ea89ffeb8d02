"""No attack has an advantage, nor a disadvantage, where nothing was leaked.

Each attack is mounted on several recordings of pure noise, each of other people, with another
seed of the attack. The mean advantage then lies within its own interval of 0, and this interval
is narrow enough to find a bias that would matter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from tests.attacks.live_runs import TWO_TABLES, live_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

SEEDS = range(8)
# The first one's own features tell something of the label and the other's nothing: beside the one
# noise does harm, beside the other every variant is a ticket in a lottery.
by_either_passive = pytest.mark.parametrize("adversary", ["passive-1", "passive-2"])
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


def _trial(
    name: str, recording: Any, adversary: str, victim: str, seed: int, **options: Any
) -> Trial:
    attack = ATTACKS[name].model_validate(options)
    return Trial(attack, recording, (adversary,), victim, seed=seed)


def _advantage(result: AttackResult) -> float:
    assert result.advantage is not None, result.reason
    return result.advantage


@pytest.mark.null("model_completion", "temporal", "semi_supervised")
@by_either_passive
@pytest.mark.parametrize(
    ("name", "epochs", "options"),
    [
        ("model_completion", 2, {"labels_per_class": 0}),
        ("model_completion", 1, {"labels_per_class": 4, "iterations": 40}),
        ("temporal", 3, {"labels_per_class": 4, "iterations": 20}),
        ("semi_supervised", 1, {"labels_per_class": 4, "iterations": 30}),
    ],
)
@pytest.mark.sampled(every=3)
def test_noise_for_representations_tells_no_label(
    make_recording: Any, adversary: str, name: str, epochs: int, options: dict[str, Any]
) -> None:
    advantages = []
    for seed in SEEDS:
        recording = make_recording("nothing", epochs=epochs, seed=seed)
        trial = _trial(name, recording, adversary, "active", seed, **options)
        advantages.append(_advantage(trial.result()))
    assert why_not_zero(advantages) is None


def test_a_leak_that_would_drown_own_features_is_found(make_recording: Any) -> None:
    def weak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        z = torch.randn(len(labels), 128, generator=draw)
        z[:, :3] += 1.5 * nn.functional.one_hot(labels, 3)
        return z

    advantages, unweighted = [], []
    for seed in SEEDS:
        recording = make_recording(weak, epochs=1, seed=seed)
        result = _trial(
            "model_completion", recording, "passive-1", "active", seed,
            labels_per_class=10, iterations=40,
        ).result()  # fmt: skip
        advantages.append(_advantage(result))
        # What was compared before: no weights, no stacking, no falling back on one's own.
        figures = {name: one["balanced_accuracy"] or 0 for name, one in result.variants.items()}
        found = [one for name, one in figures.items() if name.endswith((" on h", " on h and x"))]
        own = [result.baselines[f"{probe} on x"]["balanced_accuracy"] or 0 for probe in PROBES]
        unweighted.append(max(found) - max(own))
    mean, half = _interval(advantages)
    assert mean > half, advantages
    assert np.mean(unweighted) < -0.02, unweighted


@pytest.mark.null("semi_supervised")
@by_either_passive
def test_a_network_that_never_trained_tells_no_label(make_recording: Any, adversary: str) -> None:
    features = {"passive-1": 4, "passive-2": 2}[adversary]
    advantages = []
    for seed in SEEDS:
        with seeded(seed, "never trained"):
            network = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 6))
        recording = make_recording("nothing", method="tvfl", epochs=1, seed=seed)
        recording = replace(recording, encoders={adversary: network})
        trial = _trial(
            "semi_supervised", recording, adversary, "active", seed,
            own_network=True, iterations=30,
        )  # fmt: skip
        advantages.append(_advantage(trial.result()))
    assert why_not_zero(advantages) is None


def _two_classes(recording: Any) -> Any:
    """Class b among the others: about a third."""
    data = recording.data
    active = replace(data.active, labels=(data.active.labels == 1).long())
    relabelled = VerticalData(active, data.passives, ("no", "yes"), data.train_rows, data.test_rows)
    return replace(recording, data=relabelled)


@pytest.mark.null(
    "label_gradients", "gradient_norm", "gradient_direction", "batch_labels", "spectral"
)
@by_either_passive
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("label_gradients", {"labels_per_class": 0}),
        ("label_gradients", {"labels_per_class": 4, "iterations": 20}),
        ("gradient_norm", {}),
        ("gradient_direction", {"labels_per_class": 4, "iterations": 20}),
        ("batch_labels", {"labels_per_class": 0, "iterations": 60, "starts": 1}),
        ("batch_labels", {"labels_per_class": 4, "iterations": 60, "starts": 1}),
        ("spectral", {}),
    ],
)
@pytest.mark.sampled(every=3)
def test_noise_in_joint_training_tells_no_label(
    make_recording: Any, adversary: str, name: str, options: dict[str, Any]
) -> None:
    advantages = []
    for seed in SEEDS:
        recording = make_recording("nothing", method="tvfl", gradient="nothing", seed=seed)
        recording = _two_classes(recording) if name == "gradient_norm" else recording
        trial = _trial(name, recording, adversary, "active", seed, **options)
        advantages.append(_advantage(trial.result()))
    assert why_not_zero(advantages) is None


@pytest.mark.null("inverse_network", "unpaired_inversion", "representation_network")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("inverse_network", {"shadow_rows": 40, "iterations": 40}),
        (
            "unpaired_inversion",
            {"shadow_rows": 60, "iterations": 20, "hidden": 16, "starts": 1, "batch": 32},
        ),
        ("representation_network", {"shadow_rows": 40, "iterations": 40, "hidden": 32}),
    ],
)
def test_noise_for_representations_rebuilds_no_feature(
    make_recording: Any, name: str, options: dict[str, Any]
) -> None:
    advantages = []
    for seed in SEEDS:
        with seeded(seed, "encoder"):
            encoder = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))
        recording = make_recording("nothing", method="tvfl", epochs=1, seed=seed)
        recording = replace(recording, encoders={"passive-1": encoder})
        trial = _trial(name, recording, "active", "passive-1", seed, **options)
        advantages.append(_advantage(trial.result()))
    assert why_not_zero(advantages) is None


@pytest.mark.null("contrastive_inversion")
def test_noise_in_the_place_of_sums_rebuilds_no_feature(make_recording: Any) -> None:
    advantages = []
    for seed in SEEDS:
        recording = make_recording("nothing", epochs=1, seed=seed)
        trial = _trial(
            "contrastive_inversion", recording, "active", "passive-1", seed,
            shadow_rows=40, iterations=10,
        )  # fmt: skip
        view, draw = trial.view(trial.ignorance()), torch.Generator().manual_seed(seed)
        opened = {
            step: torch.randn(z.shape, generator=draw)
            for epoch in view.epochs
            for step, _, z in batches(view, epoch)
        }
        advantages.append(_advantage(replace(trial, opened=opened).result()))
    assert why_not_zero(advantages) is None


def _in_order(data: VerticalData) -> dict[str, torch.Tensor]:
    """Whom all parties have, in an order that repeats, unlike that of a set intersection."""
    rows = {table.name: {one: row for row, one in enumerate(table.ids)} for table in data.tables}
    common = sorted(set.intersection(*(set(row_of) for row_of in rows.values())))
    return {name: torch.tensor([row_of[one] for one in common]) for name, row_of in rows.items()}


class _Deaf(LiveRun):
    """Answers every question with noise."""

    draw: torch.Generator

    def ask(self, rows_B: torch.Tensor, z_BD: torch.Tensor, **deviations: Any) -> torch.Tensor:
        return torch.randn(z_BD.shape, generator=self.draw)


@pytest.mark.null("chosen_representations", "decoder_extraction", "isolation")
@pytest.mark.parametrize(
    ("method", "attack"),
    [
        ("apfed_c", ChosenRepresentations(people=80, shadow_rows=20, iterations=20)),
        ("apfed_r", DecoderExtraction(people=80, shadow_rows=20, iterations=20)),
        ("apfed_r", Isolation(way="subset", people=64, shadow_rows=20, iterations=20)),
    ],
)
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


def _hijacked(trial: Trial) -> AttackResult:
    """Play the attack against a victim that releases what was recorded, whatever it hears."""
    assert isinstance(trial.attack, AnsweringAttack)
    knowledge, truth = trial.known()
    view = trial.view(knowledge)
    terms = RepresentationTerms(shape=(6,), dtype="float32", minimum_norm=0, maximum_norm=1e4)
    strategy = trial.attack.begin(terms, knowledge, truth.features[trial.parties[0]], trial.seed)
    for epoch in view.epochs:
        for step, rows_B, z_BD in batches(view, epoch):
            strategy.answer(step, rows_B, z_BD)
    return replace(trial, played=Played(trial.attack.name, strategy.notes())).result()


@pytest.mark.null("hijack", "reversed_hijack")
@pytest.mark.parametrize(
    ("name", "method", "adversary", "victim"),
    [
        ("hijack", "tvfl", "active", "passive-1"),
        ("reversed_hijack", "apfed_c", "passive-1", "active"),
    ],
)
def test_a_victim_that_releases_noise_is_not_hijacked(
    make_recording: Any, name: str, method: str, adversary: str, victim: str
) -> None:
    advantages = []
    for seed in SEEDS:
        recording = make_recording("nothing", method=method, epochs=1, seed=seed)
        trial = _trial(name, recording, adversary, victim, seed, ahead=40, hidden=32)
        advantages.append(_advantage(_hijacked(trial)))
    assert why_not_zero(advantages) is None


@pytest.mark.null("membership")
def test_a_model_that_never_trained_knows_no_member(make_recording: Any) -> None:
    advantages = []
    for seed in SEEDS:
        with seeded(seed, "never trained"):
            model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
        recording = replace(make_recording("nothing", epochs=0, seed=seed), model=model)
        trial = _trial(
            "membership", recording, "outsider", "active", seed, shadow_models=8, epochs=4
        )
        advantages.append(_advantage(trial.result()))
    assert why_not_zero(advantages) is None


@pytest.mark.null("id_stuffing")
def test_where_no_id_opens_no_candidate_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.empty(0, dtype=np.int64)
    intersect: Callable[..., Any] = lambda *_: nothing  # noqa: E731
    monkeypatch.setattr(stuffing, "_intersect", intersect)
    own, theirs, others = (
        [f"person {number}" for number in range(first, first + 60)] for first in (0, 60, 120)
    )
    tables = stuffing.Tables(own=own, victim=theirs, outsiders=others)
    advantages = []
    for seed in SEEDS:
        result, stuffed = stuffing.play_stuffing(
            IdStuffing(candidates=40), tables, AlignmentSettings(), seed=seed
        )
        assert len(stuffed.tried) == 40
        advantages.append(_advantage(result))
    assert why_not_zero(advantages) is None
