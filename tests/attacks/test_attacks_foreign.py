"""Attacks on loops that are not ours: what is found, what is refused, and what a recorder keeps."""

import copy
import io
import math
import pickle
import re
from itertools import product
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apfed_attacks import ATTACKS, AttackError, Recorder, evaluate, foreign, pace
from apfed_attacks.decoys import compute_guesses
from apfed_attacks.pace import EvaluationProgress
from apfed_attacks.view import AdversaryView, Exchange, Knowledge, KnownRows, Opened, PlayedAttack
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ApfedError
from secure_apfed.exchange import Envelope, Kind, pack_tensors

A = 240
DRAW = np.random.default_rng(0)
Y = DRAW.integers(0, 3, A)
X = DRAW.normal(size=(A, 4))
NOISE = DRAW.normal(size=(2, A, 8))
LOGITS = torch.tensor(DRAW.normal(size=(A, 3)), dtype=torch.float32)
ERROR = LOGITS.softmax(1) - F.one_hot(torch.tensor(Y), 3)  # p - onehot
SLOW = {"semi_supervised", "unpaired_inversion"}  # they train networks
FAST = [name for name in ATTACKS if name not in SLOW]
TWICE = [(np.arange(A), h) for h in NOISE]


@pytest.mark.slow
def test_gradients_of_logits_are_labels_and_luck_is_chance() -> None:
    found = evaluate(h=LOGITS, gradients=ERROR, labels=Y, attacks=FAST)
    for one in (one for one in found.findings if one.result.attack != "model_completion"):
        assert one.is_significant
        assert one.baseline == pytest.approx(1 / 3)
        assert one.score > 0.98
        assert np.mean(one.null) == pytest.approx(1 / 3, abs=0.1)
    assert found["model_completion"].verdict == "nothing found"
    assert set(found.to_frame()["attack"]) | set(found.lacking) == set(FAST)
    told = found.explain_omission().splitlines()
    assert told == [f"{name}: {reason}" for name, reason in found.lacking.items()]
    with pytest.raises(AttackError, match="temporal: needs steps=, with h of two passes"):
        found["temporal"]
    lacking = evaluate(h=NOISE[0], features=X, attacks=FAST, known=range(40)).lacking
    assert lacking["label_gradients"].startswith("needs gradients=, those that the party that made")
    assert lacking["model_completion"].startswith("needs labels=, the class of each row")
    assert lacking["vote_regression"] == "this loop: nobody votes"


# A slow case mounts these as usual.
HURRIED = [
    AttackChoice(name=name, options={"iterations": 5})
    if name in ("model_completion", "temporal")
    else name
    for name in FAST
]


@pytest.mark.null
@pytest.mark.parametrize("attacks", [HURRIED, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, set()),
        ({"features": X}, {"inverse_network"}),
        ({"gradients": TWICE}, {"label_gradients", "gradient_direction"}),
    ],
)
def test_of_noise_nothing_is_found(given: dict[str, Any], more: set[str], attacks: Any) -> None:
    found = evaluate(h=TWICE, labels=Y, own=X, attacks=attacks, **given)
    assert {one.verdict for one in found.findings} == {"nothing found"}
    fast = {one.result.attack for one in found.findings} - SLOW
    assert fast == {"model_completion", "temporal"} | more


def test_any_array_gives_the_same_and_no_global_generator_moves() -> None:
    state = torch.get_rng_state()
    halves = [range(A // 2), range(A // 2, A)]
    forms: list[Any] = [NOISE[0].tolist(), torch.tensor(NOISE[0]), pd.DataFrame(NOISE[0])]
    forms.append([(at, NOISE[0][list(at)]) for at in halves])
    texts = pd.Series(Y).map({0: "a", 1: "b", 2: "c"})
    one, *others = (
        evaluate(h=h, labels=labels, attacks="model_completion", known=range(9)).to_frame()
        for h, labels in zip(forms, [Y, texts, torch.tensor(Y), Y], strict=True)
    )
    assert all(one.equals(other) for other in others)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"h": NOISE[0][:9]}, "h, step 0: expected 240 rows of numbers, got float64 of shape (9,"),
        ({"h": np.full((A, 2), np.nan)}, "h, step 0: row 0 holds NaN"),
        ({"h": []}, "h, step 0: expected 240 rows"),
        ({"h": [NOISE[0]], "steps": [range(A)] * 2}, "got 2 steps, 1 of h"),
        ({"h": [NOISE[0]], "steps": [np.arange(A) * 0.5]}, "step 0: expected positions, integers"),
        ({"own": [["a"]] * A}, "own: expected 240 rows of numbers"),
        ({"gradients": NOISE[0][:, :2]}, "expected rows of one length, got [2, 8]"),
        ({"h": TWICE, "gradients": [(range(1, A), X), TWICE[0]]}, "those of the rows of h"),
        (
            {"known": [0, A]},
            "known: expected positions, integers 0 to 239, got int64 of shape (2,)",
        ),
        ({"labels": None}, "give labels= or features="),
        ({"labels": Y * 0}, "labels: expected 2 classes or more, got 1"),
        *(
            ({"labels": of}, "labels: expected a class of each row, integers or texts")
            for of in (Y + 0.5, [None, *Y[1:]], np.eye(3)[Y])
        ),
        ({"attacks": ["gradient_directions"]}, "did you mean 'gradient_direction'?"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ApfedError, match=re.escape(says)):
        evaluate(**{"h": NOISE[0], "labels": Y, **given})


def _make_envelope(kind: Kind, sender: str, **tensors: torch.Tensor) -> Envelope:
    ends: Any = {"sender": sender, "receiver": "a" if sender == "v" else "v"}
    return Envelope(
        session="x", step=0, kind=kind, sequence=0, payload=pack_tensors(tensors), **ends
    )


def _views(name: str, rows: torch.Tensor, h: torch.Tensor) -> Any:
    """A party's views that claim this and that, and hold some of it."""
    ballot = {"rows": rows, "labelled": rows[:4] + 0}
    seen = [
        (),
        (_make_envelope(Kind.REPRESENTATIONS, "v", rows=rows, z=h),),
        (_make_envelope(Kind.REPRESENTATIONS, "v", rows=rows + 30, z=h),),
        (
            _make_envelope(Kind.REPRESENTATIONS, "a", rows=rows, z=h),
            _make_envelope(Kind.GRADIENTS, "v", gradient=h),
        ),
        (_make_envelope(Kind.REQUEST, "a", rows=rows, z=h),),
        (_make_envelope(Kind.LABELS, "v", labels=rows[:4] % 2, **ballot),),
        (
            _make_envelope(Kind.LABELS, "a", **ballot),
            _make_envelope(Kind.VOTES, "v", votes=(rows % 2).short()),
        ),
    ]
    every = {"labels": KnownRows(rows, rows % 2), "shadow": KnownRows(rows, h)}
    knowledge: list[Any] = [{}, every, {"shadow": KnownRows(rows[:3], h[:3])}]
    sides = (None, "active", "passives")
    opened = (None, *get_args(Opened))
    kind = ATTACKS[name]
    for messages, told, side, opens, role, more in product(
        seen, knowledge, sides, opened, kind.roles, (False, True)
    ):
        labels: Any = "shown" if more else None
        claims: Any = {"released_by": side, "opens": opens, "labels": labels}
        yield AdversaryView(
            role=role,
            parties=("a",),
            behaviour=kind.behaviour,
            iterations=1,
            description=Exchange(name="x", returns_gradients=True, **claims),
            envelopes={0: messages, 1: messages},
            revealed={0: h} if more else {},
            deviation=PlayedAttack(name) if more and kind.behaviour == "malicious" else None,
            features={"a": torch.ones(8, 2)} if more else {},
            knowledge=Knowledge(classes=2, victim="v", **told),
        )


# How little an attack may do where only its refusals are looked at.
LEAST = {"iterations": 1, "starts": 1, "hidden": 4, "batch": 2}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_whose_view_lacks_something_says_so(name: str) -> None:
    few = {option: least for option, least in LEAST.items() if option in ATTACKS[name].model_fields}
    attack = ATTACKS[name].model_validate(few)
    refused = 0
    for view in _views(name, torch.arange(8), torch.eye(8, 3).double()):
        try:
            attack.run(view, 0)
        except RemoteProtocolError:
            pass  # a message is not of the form that the exchange claims
        except AttackError:
            refused += 1
    assert refused


@pytest.mark.slow
def test_a_recorder_keeps_h_and_gradients_and_changes_nothing() -> None:
    record = Recorder()
    bottom = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True))
    top = nn.Linear(5, 3)
    plain = copy.deepcopy(bottom)
    record.watch(bottom)
    kept: list[Any] = []
    for rows in torch.arange(A).split(100):
        for network in (plain, bottom):
            record.step(rows)
            kept.append(network(torch.tensor(X[rows]).float()))
            kept[-1].retain_grad()
            F.cross_entropy(top(kept[-1]), torch.tensor(Y)[rows]).backward()
    arrays = record.to_arrays()
    assert np.array_equal(np.concatenate(arrays["steps"]), np.arange(A))
    for h, gradient, seen in zip(arrays["h"], arrays["gradients"], kept[1::2], strict=True):
        assert np.array_equal(h, seen.detach())
        assert np.array_equal(gradient, seen.grad)
    for one, other in zip(bottom.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert np.array_equal(one.grad, other.grad)  # type: ignore[arg-type]  # it has one as well
    assert evaluate(**arrays, labels=Y, attacks="label_gradients")["label_gradients"].score > 0.9


def test_a_recorder_refuses_what_it_would_record_wrongly() -> None:
    bottom = nn.Linear(4, 2)
    x = torch.ones(3, 4)
    record = Recorder(megabytes=5e-5)
    with record.watch(bottom):
        with pytest.raises(AttackError, match="a module has one"):
            record.watch(nn.Linear(1, 1))
        with pytest.raises(AttackError, match="a module has one"):
            Recorder().watch(bottom)
        with pytest.raises(AttackError, match=re.escape("call step(rows) before each forward")):
            bottom(x)
        for twin in (copy.deepcopy(bottom), pickle.loads(pickle.dumps(bottom)), bottom.eval()):
            twin(x)
        record.step([0, 1])
        with pytest.raises(AttackError, match=r"told of rows \(2,\)"):
            bottom(x)
        with pytest.raises(AttackError, match="nothing was recorded"):
            record.to_arrays()
        for says in (None, None, "the recorder is full"):
            record.step([0, 1, 2])
            with pytest.warns(UserWarning, match=says) if says else torch.no_grad():
                bottom(x)
        assert record.to_arrays()["gradients"] is None
    assert not bottom._forward_hooks


# Time, and what a stranger reads.


ORIGINAL = compute_guesses
GUESSES = dict[Any, Any]()


class Clock:
    """A clock that a test moves; each pass of an attack takes so many of its seconds."""

    def __init__(self, seconds_of_a_pass: dict[str, float]) -> None:
        self.now = 1000.0
        self.seconds_of_a_pass = seconds_of_a_pass

    def monotonic(self) -> float:
        return self.now

    def guesses(self, attack: Any, view: Any, seed: int, exchanges: int, on_pass: Any) -> Any:
        """Return what the attack guesses, computed once, as if each pass took its time."""
        key = (attack.name, str(attack), view.description, bool(view.features), exchanges)
        if key not in GUESSES:
            GUESSES[key] = ORIGINAL(attack, view, seed, exchanges)
        for _ in range(1 + exchanges):
            self.now += self.seconds_of_a_pass.get(attack.name, 1.0)
            on_pass()
        return GUESSES[key]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock({"label_gradients": 10.0})
    monkeypatch.setattr(pace, "time", clock)
    monkeypatch.setattr(foreign, "compute_guesses", clock.guesses)
    return clock


FEW = [AttackChoice(name="label_gradients", options={"labels_per_class": 0}), "gradient_direction"]
BOTH = {"label_gradients", "gradient_direction"}
SEEN: dict[str, Any] = {"h": LOGITS, "gradients": ERROR, "labels": Y, "attacks": FEW}


def test_progress_counts_attacks_and_its_forecast_is_measured(clock: Clock) -> None:
    told: list[EvaluationProgress] = []
    found = evaluate(**SEEN, exchanges=2, on_progress=told.append)
    assert told[0].done == 0 < told[0].seconds_left
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert {one.total for one in told} == {len(found.findings)}
    assert told[0].attack == "label_gradients (labels_per_class 0)"
    assert told[1].seconds == 10
    # Two passes of this attack, then those that are not measured yet, predicted by this one.
    assert told[1].seconds_left == 2 * 10 + 3 * 10 * (len(found.findings) - 1)
    assert (told[-1].attack, told[-1].seconds_left) == ("", 0)
    assert told[-1].seconds == clock.now - 1000
    assert told[-1].done == told[-1].total
    assert str(told[1]).startswith(f"evaluate: 0 of {told[0].total} attacks done, label_gradients")


@pytest.mark.parametrize(
    ("seconds", "mounted"),
    [(1e-9, set()), (25.0, {"gradient_direction"}), (1e6, BOTH), (math.inf, BOTH)],
)
def test_what_does_not_fit_into_the_budget_is_named(
    clock: Clock, seconds: float, mounted: set[str]
) -> None:
    every = evaluate(**SEEN, exchanges=2)
    found = evaluate(**SEEN, exchanges=2, seconds=seconds)
    assert {one.result.attack for one in found.findings} == mounted
    assert len(found.findings) + len(found.not_tried) == len(every.findings)
    assert found.findings == tuple(one for one in every.findings if one in found.findings)
    omitted = found.not_tried
    assert {why for why in omitted.values() if f"of seconds={seconds:g}" not in why} == set()
    assert [name for name in omitted if name not in str(found)] == []
    lines = {name: f"{name}: not tried, {reason}" for name, reason in omitted.items()}
    explained = {name: found.explain_omission(name.split()[0]) for name in omitted}
    assert [name for name, line in lines.items() if line not in explained[name]] == []
    assert [name for name in omitted if name not in found.as_json()["not_tried"]] == []
    if not mounted:
        assert "Labels: not attacked, so nothing is known of a leak" in found.verdicts[0]
        with pytest.raises(AttackError, match="not tried, it would take about"):
            found["gradient_direction"]


def test_an_attack_that_proves_slow_ends_after_the_pass_that_shows_it(clock: Clock) -> None:
    found = evaluate(**{**SEEN, "attacks": FEW[:1]}, exchanges=5, seconds=30.0)
    assert found.findings == ()
    assert "after 1 of 6 passes the rest needs about 50 s" in found.explain_omission()


@pytest.mark.parametrize("wrong", [0, -1, math.nan, True, "10", [1]])
def test_a_budget_that_is_no_number_above_0_is_refused(wrong: Any) -> None:
    with pytest.raises(AttackError, match="seconds= is a number above 0"):
        evaluate(**SEEN, seconds=wrong)


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_only_a_terminal_shows_progress_and_no_output_is_touched(
    terminal: bool, given: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    out = Stream(terminal=True)
    err = Stream(terminal=terminal)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    evaluate(**SEEN, exchanges=2, on_progress=(lambda progress: None) if given else None)
    assert out.getvalue() == ""
    assert bool(err.getvalue()) == (terminal and not given)
    assert err.getvalue() == "" or err.getvalue().endswith("\r\x1b[K")  # the line is cleared


def test_a_process_without_standard_error_is_no_error(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert evaluate(**SEEN, exchanges=2).findings


def test_each_direction_is_told_in_one_sentence(clock: Clock) -> None:
    leak, silent = evaluate(**SEEN, exchanges=2).verdicts
    assert re.fullmatch(
        r"Labels leak: whoever makes h and gets gradients back guesses 100% of the labels right "
        r"where guessing without what was sent gets \d+% \(mean over classes\), by .*\.",
        leak,
    )
    assert silent.startswith("Features: not attacked, so nothing is known of a leak (")
    few = [
        AttackChoice(name="model_completion", options={"labels_per_class": 0}),
        "inverse_network",
    ]
    noise = {"h": NOISE[0], "own": X, "attacks": few}
    labels, features = evaluate(**noise, labels=Y, exchanges=2).verdicts
    assert labels.startswith("No leak of labels was found: with its best attack whoever receives h")
    assert features.endswith(
        "(needs features=, those of the party that made h, to score what it guesses)."
    )


def test_refusals_are_one_line_and_why_tells_each(clock: Clock) -> None:
    few: list[Any] = [
        "temporal",
        "inverse_network",
        "label_gradients",
        "gradient_direction",
        "vote_regression",
    ]
    few.append(AttackChoice(name="model_completion", options={"labels_per_class": 0}))
    found = evaluate(h=NOISE[0], labels=Y, attacks=few, exchanges=2)
    (line,) = [one for one in str(found).splitlines() if one.startswith("Not mounted")]
    counts = [int(count) for count in re.findall(r"\((\d+)\)", line)]
    assert sum(counts) == len(found.lacking)
    assert "needs gradients= (" in line
    assert found.explain_omission("temporal") == f"temporal: {found.lacking['temporal']}"
    with pytest.raises(AttackError, match="was mounted"):
        found.explain_omission("model_completion")
    with pytest.raises(AttackError, match="was not asked for"):
        found.explain_omission("nonsense")
