"""Attacks of a config's entries, how their guesses are scored, and whom a guess hurts."""

import ast
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score, recall_score, roc_auc_score

import apfed_attacks
import apfed_attacks.run
from apfed_attacks import ATTACKS
from apfed_attacks.interface import AttackResult, Guess, Prediction, select_headlines
from apfed_attacks.labels.completion import name_clusters
from apfed_attacks.labels.representations import ModelCompletion
from apfed_attacks.recorded import make_view, reveal_labels, reveal_truth
from apfed_attacks.run import run_attacks
from apfed_attacks.scoring import DECOY, METRICS_BY_TARGET, compute_r2, score_guess
from apfed_attacks.table import expand_choices, full_suite, prepare_attack
from apfed_attacks.view import AttackError, Knowledge
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ConfigError
from secure_apfed.methods import METHODS
from tests.architecture_rules import list_loaded_modules
from tests.docs.pages import program_of
from tests.secure_apfed.small_runs import rename_method

COMPLETION = AttackChoice(name="model_completion")
EXPERIMENTER_ONLY = (
    "apfed_attacks.decoys",
    "apfed_attacks.recorded",
    "apfed_attacks.scoring",
    "apfed_attacks.run",
    "secure_apfed.runs",
)


def test_no_attack_imports_what_only_the_experimenter_holds() -> None:
    folder = Path(*apfed_attacks.__path__)
    shared = ("view", "interface", "columns")
    paths = {path for name in ("labels", "features", "people") for path in folder.glob(f"{name}/*")}
    assert {Path(inspect.getfile(kind)) for kind in ATTACKS.values()} < paths
    paths |= {folder / f"{name}.py" for name in (*shared, "live/strategy")}
    forbidden = [
        (path.name, f"{node.module}.{alias.name}")
        for path in paths
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}.{alias.name}".startswith(EXPERIMENTER_ONLY)
    ]
    assert forbidden == []


def test_each_passive_mounts_the_attack_and_the_worst_is_the_headline(make_recording: Any) -> None:
    heard: list[tuple[AttackResult, Guess]] = []
    results = run_attacks(
        make_recording("labels"), [COMPLETION], seed=0, on_score=lambda *each: heard.append(each)
    )
    assert [result.adversary for result in results] == ["passive-1", "passive-2"]
    assert [result for result, _ in heard] == list(results)
    assert all(len(guess.positions) for _, guess in heard)
    nothing = run_attacks(make_recording("nothing", method="single_view"), [COMPLETION], seed=0)
    assert select_headlines(nothing) == nothing[:1]
    (worst,) = select_headlines(results)
    assert worst.advantage == max(result.advantage or 0 for result in results)
    assert {f"recall of class {k}" for k in range(3)} < set(worst.risk)
    assert AttackResult(**json.loads(json.dumps(worst.as_json()))) == worst


@pytest.mark.slow
def test_features_that_do_not_vary_are_a_result_and_stop_no_other_attack(
    make_recording: Any,
) -> None:
    recording = make_recording("labels")
    table = recording.data.active
    flat = replace(table, features=torch.full_like(table.features, 0.1))
    recording = replace(recording, data=replace(recording.data, table=flat))
    names = ("inverse_network", "model_completion")
    results = run_attacks(recording, [AttackChoice(name=name) for name in names], seed=0)
    (first, *_), (last, *_) = results, results[::-1]
    assert (first.attack, first.victim, first.applicable) == (names[0], "active", False)
    # Equal features have equal representations, so there is nothing to compare.
    expected = "exchanging releases between rows changes nothing: either all"
    assert (first.reason or "").startswith(expected)
    assert (last.attack, last.applicable) == (names[1], True)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("model_complete", {}, "attacks: 'model_complete' is unknown; did you mean 'model_comple"),
        ("model_completion", {"label_per_class": 4}, "did you mean 'labels_per_class'"),
        ("model_completion", {"labels_per_class": -1}, "labels_per_class expected a number >= 0"),
        ("semi_supervised", {"decay": 1.0}, "decay expected a number < 1"),
        ("decoder_extraction", {"repeats": 1.5}, "repeats expected"),
        ("all", {"labels_per_class": 2}, "all mounts each attack with its usual options"),
    ],
)
def test_what_an_entry_may_not_say_is_told_before_any_attack_runs(
    name: str, options: dict[str, Any], says: str
) -> None:
    choices = [COMPLETION, AttackChoice(name=name, options=options)]
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_attacks(None, choices, seed=0)  # type: ignore[arg-type]  # it must not be touched


@pytest.fixture
def parts(make_recording: Any) -> Any:
    """A view, the truth, and the training rows of which the adversary knows no label."""
    recording = make_recording("labels")
    truth = reveal_truth(recording)
    known = reveal_labels(recording, 4, 0)
    view = make_view(recording, ["passive-1"], knowledge=Knowledge(classes=3, labels=known))
    return (
        view,
        truth,
        truth.training_positions[~torch.isin(truth.training_positions, known.positions)],
    )


def _right(truth: Any, rows: torch.Tensor, share: float) -> Any:
    """Scores that are right about the first `share` of the rows, wrong about the others."""
    scores = np.eye(3)[truth.labels[rows].numpy()]
    scores[int(share * len(rows)) :] = np.roll(scores[int(share * len(rows)) :], 1, axis=1)
    return scores


def _score_parts(parts: Any, rows: torch.Tensor, **guessed: dict[str, Any]) -> AttackResult:
    view, truth, _ = parts
    guess = {
        kind: {name: Prediction(values) for name, values in of.items()}
        for kind, of in guessed.items()
    }
    return score_guess(ModelCompletion(), view, Guess(positions=rows, **guess), truth, 0)


def test_a_perfect_guess_is_compared_with_its_floor(parts: Any) -> None:
    _, truth, rows = parts
    constant = {"floor": np.tile([1.0, 0, 0], (len(rows), 1))}
    result = _score_parts(
        parts, rows, attacks={"guess": _right(truth, rows, 1)}, baselines=constant
    )
    assert result.score == {"accuracy": 1.0, "balanced_accuracy": 1.0, "auc": 1.0}
    assert result.baselines["floor"]["auc"] == 0.5
    assert result.advantage == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("attack", "floor", "others", "expected"),
    [
        # Whoever is worse than without releases ignores them.
        (0.2, 0.6, {"decoys": {"guess": 0.2}}, ("floor", "floor", 0)),
        (0.6, 0.6, {}, ("guess", "floor", 0)),
        # A lucky decoy is the floor; references take no part.
        (0.6, 0.4, {"decoys": {"guess": 0.8}}, ("guess", f"guess{DECOY}", -0.2)),
        (0.6, 0.4, {"references": {"best": 1}}, ("guess", "floor", 0.2)),
    ],
)
def test_the_best_is_compared_with_the_best_that_saw_nothing(
    parts: Any, attack: float, floor: float, others: Any, expected: tuple[str, str, float]
) -> None:
    _, truth, rows = parts
    shares = {"attacks": {"guess": attack}, "baselines": {"floor": floor}, **others}
    guessed = {
        kind: {name: _right(truth, rows, share) for name, share in of.items()}
        for kind, of in shares.items()
    }
    result = _score_parts(parts, rows, **guessed)
    assert (result.variant, result.baseline) == expected[:2]
    assert result.advantage == pytest.approx(expected[2], abs=0.02)
    assert result.score == {**result.baselines, **result.variants}[expected[0]]
    assert list(result.variants) == ["guess"]
    decoys = {f"{name}{DECOY}" for name in others.get("decoys", {})}
    assert set(result.baselines) == {"floor", *decoys}


@pytest.mark.parametrize(
    ("of", "width", "changes", "says"),
    [
        ("known", 3, {}, "guesses 12 rows that the adversary knew"),
        ("test", 3, {}, "guesses no row that trained"),
        ("none", 3, {}, "at least one, each once"),
        ("twice", 3, {}, "at least one, each once"),
        ("unknown", 2, {}, r"guess: expected values of shape \(\d+, 3\)"),
        ("unknown", 3, {"baselines": {}}, "at least one attack and one baseline"),
        ("unknown", 3, {"decoys": {"guess": np.zeros((1, 3))}}, "guess: expected values of shape"),
    ],
)
def test_a_guess_that_cannot_be_scored_is_refused(
    parts: Any, of: str, width: int, changes: Any, says: str
) -> None:
    view, truth, unknown = parts
    rows = {
        "known": view.knowledge.labels.positions,
        "unknown": unknown,
        "none": unknown[:0],
        "test": torch.arange(270)[~torch.isin(torch.arange(270), truth.training_positions)],
        "twice": unknown[[0, 0]],
    }[of]
    values = np.zeros((len(rows), width))
    guessed = {"attacks": {"guess": values}, "baselines": {"floor": values}, **changes}
    with pytest.raises(AttackError, match=says):
        _score_parts(parts, rows, **guessed)


def test_rows_that_did_not_train_are_left_out(parts: Any) -> None:
    _, truth, unknown = parts
    test = torch.arange(270)[~torch.isin(torch.arange(270), truth.training_positions)]
    # Right about every training row, wrong about every test row.
    rows = torch.cat([unknown, test])
    scores = _right(truth, rows, len(unknown) / len(rows))
    result = _score_parts(parts, rows, attacks={"guess": scores}, baselines={"floor": scores})
    assert result.score["accuracy"] == 1.0
    assert result.counts["scored"] == len(unknown)


@pytest.mark.parametrize("like", ["apfed_c", "tvfl"])
def test_a_method_is_attacked_by_what_it_declares(
    like: str, make_recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody has heard of gets the attacks of its like, and is told the same reasons."""
    monkeypatch.setitem(METHODS, "unheard", rename_method(METHODS[like], "unheard"))
    reasons: dict[str, list[str | None]] = {}
    for method in (like, "unheard"):
        recording = make_recording("labels", method=method, gradient="labels")
        views = [
            make_view(recording, [party], knowledge=Knowledge(classes=3, victim=victim))
            for party, victim in (("passive-1", "active"), ("active", "passive-1"))
        ]
        found = [
            prepare_attack(choice).explain_inapplicability(view)
            for choice in full_suite()
            for view in views
        ]
        reasons[method] = [reason and reason.replace(method, "it") for reason in found]
    assert reasons[like] == reasons["unheard"]
    assert None in reasons[like]


def test_all_stands_for_the_full_suite() -> None:
    named = AttackChoice(name="temporal", options={"labels_per_class": 2})
    assert expand_choices([AttackChoice(name="all")]) == full_suite()
    assert expand_choices([named, AttackChoice(name="all")]) == (named, *full_suite())
    assert {choice.name for choice in full_suite()} == set(ATTACKS)
    known = [choice.options["labels_per_class"] for choice in full_suite(["model_completion"])]
    assert known == [0, 1, 4, 40]
    with pytest.raises(ConfigError, match="did you mean 'temporal'"):
        full_suite(["tempral"])


# Figures of guesses beside the truth, as `METRICS_BY_TARGET` gives them.

LABELS, FEATURES, MEMBERSHIP = (
    METRICS_BY_TARGET[name] for name in ("labels", "features", "membership")
)


def test_figures_of_labels_equal_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    scores = draw.dirichlet(np.ones(4), 200)
    labels = draw.integers(0, 4, 200)
    auc = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    assert LABELS.compute_metrics(scores, labels)["auc"] == pytest.approx(auc)
    # Over the classes that occur.
    labels = draw.integers(1, 4, 200)
    guessed = draw.integers(0, 5, 200)
    recall = recall_score(labels, guessed, labels=np.unique(labels), average="macro")
    assert LABELS.compute_metrics(np.eye(5)[guessed], labels)["balanced_accuracy"] == recall
    scores = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    assert LABELS.compute_metrics(scores, np.array([0, 1]))["auc"] == 1.0
    assert LABELS.compute_metrics(scores, np.array([1, 1]))["auc"] is None


def test_clusters_get_the_names_that_fit_the_truth_best_or_their_sizes() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    shuffled = Prediction(np.eye(3)[[2, 2, 0, 0, 1, 1]], clusters=True)
    assert (LABELS.select_values(shuffled, labels).argmax(1) == labels).all()
    labels = np.array([0] * 6 + [1] * 3 + [2])
    shuffled = np.eye(3)[np.array([1, 2, 0])[labels]]
    found = name_clusters(shuffled, (0.6, 0.3, 0.1))
    assert found["clusters named by the truth"].clusters
    assert (found["clusters named by priors"].values.argmax(1) == labels).all()


def test_figures_of_features_equal_scikit_learns_weighted_by_variance_and_decibels() -> None:
    draw = np.random.default_rng(1)
    truth = draw.normal(size=(50, 4)) * np.array([1, 2, 3, 0])
    guess = truth + draw.normal(size=(50, 4)) * np.array([1, 1, 1, 0])
    expected = r2_score(truth, guess, multioutput="variance_weighted")
    assert compute_r2(guess, truth) == pytest.approx(expected)
    assert compute_r2(guess, np.ones((50, 4))) is None
    # The peak ratio is in decibels of the range.
    truth = np.array([[0.0, 1.0], [0.5, 1.0]])
    assert FEATURES.compute_metrics(truth + 0.1, truth)["psnr"] == pytest.approx(20)
    assert FEATURES.compute_metrics(truth, truth)["psnr"] is None


def _similarity(guess: Any, truth: Any) -> Any:
    return FEATURES.compute_metrics(guess.reshape(len(truth), -1), truth).get("ssim")


def test_structural_similarity_is_that_of_every_window() -> None:
    """Wang et al. 2004, Eq. (13), window by window; edges are reflected."""
    draw = np.random.default_rng(0)
    truth, guess = draw.random((2, 2, 2, 8, 9))
    c1 = (0.01 * np.ptp(truth)) ** 2
    c2 = (0.03 * np.ptp(truth)) ** 2
    edges = ((0, 0), (0, 0), (3, 3), (3, 3))
    found = []
    for x, y in zip(
        *(
            np.lib.stride_tricks.sliding_window_view(
                np.pad(images, edges, mode="reflect"), (7, 7), axis=(2, 3)
            ).reshape(-1, 49)
            for images in (truth, guess)
        ),
        strict=True,
    ):
        mean = x.mean()
        other = y.mean()
        both = ((x - x.mean()) * (y - y.mean())).mean()
        spread = x.var() + y.var()
        found.append(
            (2 * mean * other + c1) * (2 * both + c2) / ((mean**2 + other**2 + c1) * (spread + c2))
        )
    assert _similarity(guess, truth) == pytest.approx(np.mean(found))
    assert _similarity(np.ones((3, 5)), draw.random((3, 5))) is None  # no images
    few = (3, 1, 2, 8)
    assert _similarity(np.ones(few), draw.random(few)) is None  # smaller than a window


def test_low_false_positive_rates_are_read_off_the_curve() -> None:
    trained = np.array([True, True, False, True, *[False] * 99])
    members = np.stack([trained, trained], axis=1)
    scores = -np.arange(103.0)
    curve = MEMBERSHIP.compute_curve(scores, members)
    assert (curve[0], curve[-1]) == ((0.0, 0.0), (1.0, 1.0))
    figures = MEMBERSHIP.compute_metrics(scores, members)
    assert figures["tpr_at_0.1_percent_fpr"] == pytest.approx(2 / 3)
    assert figures["tpr_at_1_percent_fpr"] == 1  # one of a hundred


def test_the_surest_decile_of_labels_and_the_best_of_features_are_told() -> None:
    labels_N = np.array([0, 1] * 50)
    scores_NK = np.zeros((100, 2))
    scores_NK[:10] = 9 * np.eye(2)[labels_N[:10]]  # right and sure on ten rows
    scores_NK[10:, 0] = 0.1  # says class 0 of all others
    assert LABELS.compute_risk(scores_NK, labels_N) == {
        "recall of class 0": 1.0,
        "recall of class 1": pytest.approx(5 / 50),
        "precision on the surest decile": 1.0,
    }
    wrong = LABELS.compute_risk(np.eye(2)[1 - labels_N] * 5, labels_N)
    assert wrong["precision on the surest decile"] == 0
    infinite = np.array([[np.inf, 0.0], [0.0, -np.inf]] * 5)
    assert LABELS.compute_risk(infinite, np.zeros(10, dtype=np.int64))["recall of class 0"] == 1
    # Features recovered of few people show in the best decile.
    truth_NF = np.random.default_rng(0).normal(size=(50, 3))
    guess_NF = np.tile(truth_NF.mean(axis=0), (50, 1))
    guess_NF[:5] = truth_NF[:5]
    assert FEATURES.compute_risk(guess_NF, truth_NF)["r2 on the best decile"] == pytest.approx(1)
    assert FEATURES.compute_risk(np.zeros((5, 2)), np.ones((5, 2))) == {}


# The guide's two programs run as they are printed; an attack is read and used alone.


def test_the_printed_attack_finds_a_planted_leak(
    tmp_path: Path, make_recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = program_of("docs/add-an-attack.md", tmp_path, at=0).NearestMean
    monkeypatch.setitem(ATTACKS, kind.name, kind)
    choice = [AttackChoice(name="nearest_mean", options={"labels_per_class": 10})]
    leaking = apfed_attacks.run.run_attacks(make_recording("labels"), choice, seed=0)
    quiet = apfed_attacks.run.run_attacks(make_recording("nothing"), choice, seed=0)
    assert min(result.advantage or 0 for result in leaking) > 0.15
    assert max(result.advantage or 0 for result in quiet) < 0.15


@pytest.mark.slow
def test_both_sides_of_other_peoples_training_can_be_attacked(tmp_path: Path) -> None:
    guide = program_of("docs/add-an-attack.md", tmp_path, at=1)
    assert {one.result.attack for one in guide.shop.findings} == set(guide.few)
    assert guide.shop["gradient_direction"].score > 0.95
    found = guide.bank["inverse_network"]
    assert found.is_significant
    assert found.score > 0.5 > found.baseline


# An attack loads what it computes with, and no method.

MOST = 45
READS_SUMS = {"import apfed_attacks.features.contribution_regression": 55}
"""One attack parses the contributions of every kind of sum."""
MODULES = {f"import {kind.__module__}": kind.__module__ for kind in ATTACKS.values()}


def _offences(loaded: dict[str, set[str]]) -> list[str]:
    many = [
        f"{one} loads {len(own)} of our modules"
        for one, own in loaded.items()
        if len(own) > READS_SUMS.get(one, MOST)
    ]
    return many + [
        f"{one} loads the table of methods"
        for one, own in loaded.items()
        if "secure_apfed.methods" in own
    ]


@pytest.mark.slow
def test_an_attack_loads_few_of_our_modules_and_no_method(tmp_path: Path) -> None:
    loaded = list_loaded_modules(list(MODULES))
    assert all(name in loaded[statement] for statement, name in MODULES.items())
    assert _offences(loaded) == []
    # One that loads all is found.
    (tmp_path / "offender.py").write_text("import apfed_attacks.view, secure_apfed.methods\n")
    many, table = _offences(list_loaded_modules(["import offender"], path=tmp_path))
    assert "of our modules" in many
    assert "table of methods" in table
