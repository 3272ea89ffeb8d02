"""Attacks on loops that are not ours: what is found, what is refused, and what a recorder keeps."""

import copy
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

from apfed_attacks import ATTACKS, AttackError, Recorder, evaluate
from apfed_attacks.view import AdversaryView, Exchange, Knowledge, KnownRows, Opened, Played
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ApfedError
from secure_apfed.exchange import Envelope, Kind, pack

A, DRAW = 240, np.random.default_rng(0)
Y, X, NOISE = DRAW.integers(0, 3, A), DRAW.normal(size=(A, 4)), DRAW.normal(size=(2, A, 8))
LOGITS = torch.tensor(DRAW.normal(size=(A, 3)), dtype=torch.float32)
ERROR = LOGITS.softmax(1) - F.one_hot(torch.tensor(Y), 3)  # p - onehot
SLOW = {"semi_supervised", "unpaired_inversion"}  # they train networks
FAST = [name for name in ATTACKS if name not in SLOW]
TWICE = [(np.arange(A), h) for h in NOISE]


def test_gradients_of_logits_are_labels_and_luck_is_chance() -> None:
    found = evaluate(h=LOGITS, gradients=ERROR, labels=Y, attacks=FAST)
    for one in (one for one in found.findings if one.result.attack != "model_completion"):
        assert one.found
        assert one.baseline == pytest.approx(1 / 3)
        assert one.score > 0.98
        assert np.mean(one.null) == pytest.approx(1 / 3, abs=0.1)
    assert found["model_completion"].verdict == "nothing found"
    assert set(found.to_frame()["attack"]) | set(found.lacking) == set(FAST)
    assert all(f"  {name}: {reason}" in str(found) for name, reason in found.lacking.items())
    with pytest.raises(AttackError, match="temporal: needs steps=, with h of two passes"):
        found["temporal"]
    lacking = evaluate(h=NOISE[0], features=X, attacks=FAST, known=range(40)).lacking
    assert lacking["label_gradients"].startswith("needs gradients=, those that the party that made")
    assert lacking["model_completion"].startswith("needs labels=, the class of each row")
    assert lacking["vote_regression"] == "this loop: nobody votes"


# The first case mounts these as usual; beside more arrays they read the same, and do less.
AGAIN = [
    AttackChoice(name=name, options={"iterations": 5})
    if name in ("model_completion", "temporal") else name
    for name in FAST
]  # fmt: skip


@pytest.mark.null
@pytest.mark.parametrize("attacks", [FAST, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("given", "more"), [
    ({}, set()), ({"features": X}, {"inverse_network"}),
    ({"gradients": TWICE}, {"label_gradients", "gradient_direction"}),
])  # fmt: skip
def test_of_noise_nothing_is_found(given: dict[str, Any], more: set[str], attacks: Any) -> None:
    mounted = AGAIN if given and attacks is FAST else attacks
    found = evaluate(h=TWICE, labels=Y, own=X, attacks=mounted, **given)
    assert {one.verdict for one in found.findings} == {"nothing found"}
    fast = {one.result.attack for one in found.findings} - SLOW
    assert fast == {"model_completion", "temporal"} | more


def test_any_array_gives_the_same_and_no_global_generator_moves() -> None:
    state, halves = torch.get_rng_state(), [range(A // 2), range(A // 2, A)]
    forms: list[Any] = [NOISE[0].tolist(), torch.tensor(NOISE[0]), pd.DataFrame(NOISE[0])]
    forms.append([(at, NOISE[0][list(at)]) for at in halves])
    texts = pd.Series(Y).map({0: "a", 1: "b", 2: "c"})
    one, *others = (
        evaluate(h=h, labels=labels, attacks="model_completion", known=range(9)).to_frame()
        for h, labels in zip(forms, [Y, texts, torch.tensor(Y), Y], strict=True)
    )
    assert all(one.equals(other) for other in others)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("given", "says"), [
    ({"h": NOISE[0][:9]}, "h, step 0: expected 240 rows of numbers, got float64 of shape (9,"),
    ({"h": np.full((A, 2), np.nan)}, "h, step 0: row 0 holds NaN"),
    ({"h": []}, "h, step 0: expected 240 rows"),
    ({"h": [NOISE[0]], "steps": [range(A)] * 2}, "got 2 steps, 1 of h"),
    ({"h": [NOISE[0]], "steps": [np.arange(A) * 0.5]}, "step 0: expected positions, integers"),
    ({"own": [["a"]] * A}, "own: expected 240 rows of numbers"),
    ({"gradients": NOISE[0][:, :2]}, "expected rows of one length, got [2, 8]"),
    ({"h": TWICE, "gradients": [(range(1, A), X), TWICE[0]]}, "those of the rows of h"),
    ({"known": [0, A]}, "known: expected positions, integers 0 to 239, got int64 of shape (2,)"),
    ({"labels": None}, "give labels= or features="),
    ({"labels": Y * 0}, "labels: expected 2 classes or more, got 1"),
    *(({"labels": of}, "labels: expected a class of each row, integers or texts")
      for of in (Y + 0.5, [None, *Y[1:]], np.eye(3)[Y])),
    ({"attacks": ["gradient_directions"]}, "did you mean 'gradient_direction'?"),
])  # fmt: skip
def test_arrays_that_do_not_belong_together_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ApfedError, match=re.escape(says)):
        evaluate(**{"h": NOISE[0], "labels": Y, **given})


def _sent(kind: Kind, sender: str, **tensors: torch.Tensor) -> Envelope:
    ends: Any = {"sender": sender, "receiver": "a" if sender == "v" else "v"}
    return Envelope(session="x", step=0, kind=kind, sequence=0, payload=pack(tensors), **ends)


def _views(name: str, rows: torch.Tensor, h: torch.Tensor) -> Any:
    """A party's views that claim this and that, and hold some of it."""
    ballot = {"rows": rows, "labelled": rows[:4] + 0}
    seen = [
        (), (_sent(Kind.REPRESENTATIONS, "v", rows=rows, z=h),),
        (_sent(Kind.REPRESENTATIONS, "v", rows=rows + 30, z=h),),
        (_sent(Kind.REPRESENTATIONS, "a", rows=rows, z=h), _sent(Kind.GRADIENTS, "v", gradient=h)),
        (_sent(Kind.REQUEST, "a", rows=rows, z=h),),
        (_sent(Kind.LABELS, "v", labels=rows[:4] % 2, **ballot),),
        (_sent(Kind.LABELS, "a", **ballot), _sent(Kind.VOTES, "v", votes=(rows % 2).short())),
    ]  # fmt: skip
    every = {"labels": KnownRows(rows, rows % 2), "shadow": KnownRows(rows, h)}
    knowledge: list[Any] = [{}, every, {"shadow": KnownRows(rows[:3], h[:3])}]
    sides, opened = (None, "active", "passives"), (None, *get_args(Opened))
    kind = ATTACKS[name]
    for messages, told, side, opens, role, more in product(
        seen, knowledge, sides, opened, kind.roles, (False, True)
    ):
        labels: Any = "shown" if more else None
        claims: Any = {"released_by": side, "opens": opens, "labels": labels}
        yield AdversaryView(
            role=role, parties=("a",), behaviour=kind.behaviour, iterations=1,
            description=Exchange(name="x", returns_gradients=True, **claims),
            envelopes={0: messages, 1: messages}, opened={0: h} if more else {},
            played=Played(name) if more and kind.behaviour == "malicious" else None,
            features={"a": torch.ones(8, 2)} if more else {},
            knowledge=Knowledge(classes=2, victim="v", **told),
        )  # fmt: skip


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


def test_a_recorder_keeps_h_and_gradients_and_changes_nothing() -> None:
    record, bottom = Recorder(), nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True))
    top, plain = nn.Linear(5, 3), copy.deepcopy(bottom)
    record.watch(bottom)
    kept: list[Any] = []
    for rows in torch.arange(A).split(100):
        for network in (plain, bottom):
            record.step(rows)
            kept.append(network(torch.tensor(X[rows]).float()))
            kept[-1].retain_grad()
            F.cross_entropy(top(kept[-1]), torch.tensor(Y)[rows]).backward()
    arrays = record.arrays()
    assert np.array_equal(np.concatenate(arrays["steps"]), np.arange(A))
    for h, gradient, seen in zip(arrays["h"], arrays["gradients"], kept[1::2], strict=True):
        assert np.array_equal(h, seen.detach())
        assert np.array_equal(gradient, seen.grad)
    for one, other in zip(bottom.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert np.array_equal(one.grad, other.grad)  # type: ignore[arg-type]  # it has one as well
    assert evaluate(**arrays, labels=Y, attacks="label_gradients")["label_gradients"].score > 0.9


def test_a_recorder_refuses_what_it_would_record_wrongly() -> None:
    bottom, x, record = nn.Linear(4, 2), torch.ones(3, 4), Recorder(megabytes=5e-5)
    with record.watch(bottom):
        for watcher, module in ((record, nn.Linear(1, 1)), (Recorder(), bottom)):
            with pytest.raises(AttackError, match="a module has one"):
                watcher.watch(module)
        with pytest.raises(AttackError, match=re.escape("call step(rows) before each forward")):
            bottom(x)
        for twin in (copy.deepcopy(bottom), pickle.loads(pickle.dumps(bottom)), bottom.eval()):
            twin(x)
        record.step([0, 1])
        with pytest.raises(AttackError, match=r"told of rows \(2,\)"):
            bottom(x)
        with pytest.raises(AttackError, match="nothing was recorded"):
            record.arrays()
        for says in (None, None, "the recorder is full"):
            record.step([0, 1, 2])
            with pytest.warns(UserWarning, match=says) if says else torch.no_grad():
                bottom(x)
        assert record.arrays()["gradients"] is None
    assert not bottom._forward_hooks
