import ast
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import apfed_attacks
from apfed_attacks import ATTACKS
from apfed_attacks.interface import AttackResult, Guess, Prediction
from apfed_attacks.labels.model_completion import ModelCompletion
from apfed_attacks.recorded import reveal_labels, truth_of, view_of
from apfed_attacks.run import expand, full_suite, headlines, mount, prepare
from apfed_attacks.scoring import DECOY, score
from apfed_attacks.view import AttackError, Knowledge
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ConfigError
from secure_apfed.methods import METHODS, Apfed
from secure_apfed.methods.apfed import ApfedSettings
from tests.secure_apfed.small_runs import renamed

COMPLETION = AttackChoice(name="model_completion")
EXPERIMENTER_ONLY = (
    "apfed_attacks.recorded", "apfed_attacks.scoring", "apfed_attacks.run", "secure_apfed.runs",
)  # fmt: skip


def test_no_attack_imports_what_only_the_experimenter_holds() -> None:
    for path in _read_by_attacks():
        imports = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        assert not {name for name in names if name.startswith(EXPERIMENTER_ONLY)}, path.name


def _read_by_attacks() -> set[Path]:
    """Modules of attacks, and those that they share."""
    folder = Path(next(iter(apfed_attacks.__path__)))
    shared = ("view", "interface", "columns", "live/strategy")
    found = {
        path for name in ("labels", "features", "people") for path in folder.glob(f"{name}/*.py")
    }
    for kind in ATTACKS.values():
        assert Path(inspect.getfile(kind)) in found, kind.name
    return found | {folder / f"{name}.py" for name in shared}


def test_each_passive_mounts_the_attack_and_the_worst_is_the_headline(make_recording: Any) -> None:
    heard: list[tuple[AttackResult, Guess]] = []
    results = mount(
        make_recording("labels"), [COMPLETION], seed=0, on_score=lambda *each: heard.append(each)
    )
    assert [result.adversary for result in results] == ["passive-1", "passive-2"]
    assert [result for result, _ in heard] == list(results)
    assert all(len(guess.positions) for _, guess in heard)
    (worst,) = headlines(results)
    assert worst.advantage == max(result.advantage or 0 for result in results)
    assert {f"recall of class {k}" for k in range(3)} < set(worst.risk)
    assert AttackResult(**json.loads(json.dumps(worst.as_json()))) == worst


def test_headlines_keep_what_applied_to_nobody(make_recording: Any) -> None:
    results = mount(make_recording("nothing", method="single_view"), [COMPLETION], seed=0)
    assert headlines(results) == results[:1]


@pytest.mark.parametrize("constant", [1.0, 0.1])
def test_features_that_do_not_vary_are_a_result_and_stop_no_other_attack(
    make_recording: Any, constant: float
) -> None:
    recording = make_recording("labels")
    table = recording.data.active
    flat = replace(table, features=torch.full_like(table.features, constant))
    recording = replace(recording, data=replace(recording.data, table=flat))
    names = ("inverse_network", "model_completion")
    results = mount(recording, [AttackChoice(name=name) for name in names], seed=0)
    (first, *_), (last, *_) = results, results[::-1]
    assert (first.attack, first.victim, first.applicable) == (names[0], "active", False)
    assert first.reason == "r2 is undefined: what was guessed is the same for all rows"
    assert (last.attack, last.applicable) == (names[1], True)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("model_complete", {}, "attacks: 'model_complete' is unknown; did you mean 'model_comple"),
        ("model_completion", {"label_per_class": 4}, "did you mean 'labels_per_class'"),
        ("model_completion", {"labels_per_class": -1}, "labels_per_class expected a number >= 0"),
        ("semi_supervised", {"temperature": 0}, "temperature expected a number > 0"),
        ("semi_supervised", {"alpha": -1}, "alpha expected a number > 0"),
        ("semi_supervised", {"decay": 1.0}, "decay expected a number < 1"),
        ("decoder_extraction", {"repeats": 0}, "repeats expected a number >= 1"),
        ("decoder_extraction", {"repeats": 1.5}, "repeats expected"),
        ("all", {"labels_per_class": 2}, "all mounts each attack with its usual options"),
    ],
)
def test_what_an_entry_may_not_say_is_told_before_any_attack_runs(
    name: str, options: dict[str, Any], says: str
) -> None:
    choices = [COMPLETION, AttackChoice(name=name, options=options)]
    with pytest.raises(ConfigError, match=re.escape(says)):
        mount(None, choices, seed=0)  # type: ignore[arg-type]  # it must not be touched


@pytest.fixture
def parts(make_recording: Any) -> Any:
    """A view, the truth, and the training rows of which the adversary knows no label."""
    recording = make_recording("labels")
    truth = truth_of(recording)
    known = reveal_labels(recording, 4, 0)
    view = view_of(recording, ["passive-1"], knowledge=Knowledge(classes=3, labels=known))
    return view, truth, truth.trained[~torch.isin(truth.trained, known.positions)]


def _right(truth: Any, rows: torch.Tensor, share: float) -> Any:
    """Scores that are right about the first `share` of the rows, wrong about the others."""
    scores = np.eye(3)[truth.labels[rows].numpy()]
    scores[int(share * len(rows)) :] = np.roll(scores[int(share * len(rows)) :], 1, axis=1)
    return scores


def _judged(parts: Any, rows: torch.Tensor, **guessed: dict[str, Any]) -> AttackResult:
    view, truth, _ = parts
    guess = {
        kind: {name: Prediction(values) for name, values in of.items()}
        for kind, of in guessed.items()
    }
    return score(ModelCompletion(), view, Guess(positions=rows, **guess), truth, 0)


def test_a_perfect_guess_is_compared_with_its_floor(parts: Any) -> None:
    _, truth, rows = parts
    constant = {"floor": np.tile([1.0, 0, 0], (len(rows), 1))}
    result = _judged(parts, rows, attacks={"guess": _right(truth, rows, 1)}, baselines=constant)
    assert result.score == {"accuracy": 1.0, "balanced_accuracy": 1.0, "auc": 1.0}
    assert result.baselines["floor"]["auc"] == 0.5
    assert result.advantage == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("attack", "floor", "others", "variant", "baseline", "advantage"),
    [
        # Whoever is worse than without releases ignores them.
        (0.2, 0.6, {"decoys": {"guess": 0.2}}, "floor", "floor", 0),
        (0.6, 0.6, {}, "guess", "floor", 0),
        # A lucky decoy is the floor; references take no part.
        (0.6, 0.4, {"decoys": {"guess": 0.8}}, "guess", f"guess{DECOY}", -0.2),
        (0.6, 0.4, {"references": {"best": 1}}, "guess", "floor", 0.2),
    ],
)
def test_the_best_is_compared_with_the_best_that_saw_nothing(
    parts: Any,
    attack: float,
    floor: float,
    others: Any,
    variant: str,
    baseline: str,
    advantage: float,
) -> None:
    _, truth, rows = parts
    shares = {"attacks": {"guess": attack}, "baselines": {"floor": floor}, **others}
    guessed = {
        kind: {name: _right(truth, rows, share) for name, share in of.items()}
        for kind, of in shares.items()
    }
    result = _judged(parts, rows, **guessed)
    assert (result.variant, result.baseline) == (variant, baseline)
    assert result.advantage == pytest.approx(advantage, abs=0.02)
    assert result.score == {**result.baselines, **result.variants}[variant]
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
        "known": view.knowledge.labels.positions, "unknown": unknown, "none": unknown[:0],
        "test": torch.arange(270)[~torch.isin(torch.arange(270), truth.trained)],
        "twice": unknown[[0, 0]],
    }[of]  # fmt: skip
    values = np.zeros((len(rows), width))
    guessed = {"attacks": {"guess": values}, "baselines": {"floor": values}, **changes}
    with pytest.raises(AttackError, match=says):
        _judged(parts, rows, **guessed)


def test_rows_that_did_not_train_are_left_out(parts: Any) -> None:
    _, truth, unknown = parts
    test = torch.arange(270)[~torch.isin(torch.arange(270), truth.trained)]
    # Right about every training row, wrong about every test row.
    rows = torch.cat([unknown, test])
    scores = _right(truth, rows, len(unknown) / len(rows))
    result = _judged(parts, rows, attacks={"guess": scores}, baselines={"floor": scores})
    assert result.score["accuracy"] == 1.0
    assert result.counts["scored"] == len(unknown)


@pytest.mark.parametrize("like", ["apfed_c", "tvfl", "single_view"])
def test_a_method_is_attacked_by_what_it_declares(
    like: str, make_recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody has heard of gets the attacks of its like, and is told the same reasons."""
    monkeypatch.setitem(METHODS, "unheard", renamed(METHODS[like], "unheard"))
    reasons: dict[str, list[str | None]] = {}
    for method in (like, "unheard"):
        recording = make_recording("labels", method=method, gradient="labels")
        views = [
            view_of(recording, [party], knowledge=Knowledge(classes=3, victim=victim))
            for party, victim in (("passive-1", "active"), ("active", "passive-1"))
        ]
        found = [prepare(choice).why_not(view) for choice in full_suite() for view in views]
        reasons[method] = [reason and reason.replace(method, "it") for reason in found]
    assert reasons[like] == reasons["unheard"]
    assert (None in reasons[like]) is (like != "single_view")


class Quiet(ApfedSettings):
    name: Literal["quiet"]

    title = "Quiet"
    representations_from = None  # type: ignore[assignment]  # of APFed it is the active
    sums_gradients = False


def test_where_nobody_releases_a_representation_there_is_none_to_attack(
    make_recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "quiet", Apfed(Quiet))
    for result in mount(make_recording("nothing", method="quiet"), [COMPLETION], seed=0):
        assert result.reason == "quiet: no party releases a representation"


def test_all_stands_for_the_full_suite() -> None:
    named = AttackChoice(name="temporal", options={"labels_per_class": 2})
    assert expand([AttackChoice(name="all")]) == full_suite()
    assert expand([named, AttackChoice(name="all")]) == (named, *full_suite())
    assert {choice.name for choice in full_suite()} == set(ATTACKS)
    known = [choice.options["labels_per_class"] for choice in full_suite(["model_completion"])]
    assert known == [0, 1, 4, 40]
    with pytest.raises(ConfigError, match="did you mean 'temporal'"):
        full_suite(["tempral"])
