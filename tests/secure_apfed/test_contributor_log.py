"""A step of a run is answered by the same passives, over all sessions; an honest run goes on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from safetensors.torch import load_file

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.sums.interface import StepBinding
from secure_apfed.config import Config
from secure_apfed.contract import AnsweredSteps, Contract
from secure_apfed.errors import CheckpointError, LeftOutWarning
from secure_apfed.exchange import Kind
from secure_apfed.exchange.agreement import Greeting
from secure_apfed.methods.contributor_log import RunContributorLog, merge_answered_steps
from secure_apfed.runs.run import run
from tests.secure_apfed import seats
from tests.secure_apfed.seats import envelope
from tests.secure_apfed.small_runs import interrupt_run
from tests.secure_apfed.test_methods_dropout import (
    BEFORE_ANSWERING,
    BEFORE_CONTRIBUTING,
    EPOCH,
    deaths,
    digits,
)

__all__ = ["deaths"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
Deaths = dict[str, tuple[int, Kind]]
ALL = ("a", "b", "c")
FEWER = ("a", "b")
VALUES = np.arange(6.0).reshape(2, 3)


def question(step: int, message: bytes, session: str = "first") -> StepBinding:
    return StepBinding.from_contents(session, step, rows=b"0 1", message=message)


def ask(log: Path, binding: StepBinding, circle: Sequence[str], values: Any = VALUES) -> None:
    """One passive's part of a step, in a process that begins and ends with it."""
    circles = RunContributorLog(log)
    marks = circles.compute_digests(values, binding)
    circles.require_same_contributors(marks, circle, me="a", aggregator="notary")
    circles.record_answer(marks, circle)


# What an active may ask in a session that it resumed, after step 7 was answered.
AGAIN: dict[str, tuple[StepBinding, Any]] = {
    "the same": (question(7, b"q", "second"), VALUES),
    "a related question at the step": (question(7, b"2 q", "second"), 2 * VALUES),
    "the question at a step that nobody answered": (question(9, b"q", "second"), VALUES + 1),
    "another question that gets the same answer": (question(9, b"r", "second"), VALUES),
}


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize(
    ("before", "after", "advice"),
    [
        (ALL, FEWER, "Resume the run once c takes part again, or begin a new run without it"),
        (FEWER, ALL, r"Resume the run at all parties \(--resume\), so that their contract says"),
    ],
)
def test_a_resumed_session_is_answered_in_the_same_circle_only(
    again: str, before: tuple[str, ...], after: tuple[str, ...], advice: str, tmp_path: Path
) -> None:
    log = tmp_path / "circles-a.jsonl"
    ask(log, question(7, b"q"), before)
    binding, values = AGAIN[again]
    with pytest.raises(RemoteProtocolError, match=f"differ by what c contributed.*{advice}"):
        ask(log, binding, after, values)
    ask(log, binding, before, values)
    ask(log, question(10, b"s", "second"), after, VALUES - 9)  # a step that nobody answered


def test_a_torn_line_counts_nothing_and_a_false_one_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "circles-a.jsonl"
    ask(log, question(7, b"q"), ALL)
    with log.open("ab") as file:
        file.write(b'\n{"step": 8, "circ')
    ask(log, question(8, b"r"), FEWER, VALUES + 1)
    ask(log, question(10, b"s"), FEWER, VALUES + 2)
    assert [(s.first, s.last, s.passives) for s in RunContributorLog(log).list_steps(0)] == [
        (7, 7, ALL),
        (8, 8, FEWER),
        (10, 10, FEWER),
    ]
    assert [steps.first for steps in RunContributorLog(log).list_steps(8)] == [8, 10]
    with log.open("ab") as file:
        file.write(b'{"step": 8}\n')
    with pytest.raises(CheckpointError, match=r"put the newest copy of .*circles-a\.jsonl back"):
        RunContributorLog(log)


def stretch(first: int, last: int, circle: Sequence[str]) -> AnsweredSteps:
    return AnsweredSteps(first=first, last=last, passives=tuple(circle))


MERGED: dict[str, tuple[dict[str, list[Any]], list[Any]]] = {
    "nobody answered": ({"a": [], "b": []}, []),
    "all say the same": ({"a": [(3, 5, ALL)], "b": [(3, 5, ALL)]}, [(3, 5, ALL)]),
    "one was left out": (
        {"a": [(3, 5, ALL), (6, 8, FEWER)], "c": [(3, 5, ALL)]},
        [(3, 5, ALL), (6, 8, FEWER)],
    ),
    "one answered further": ({"a": [(3, 5, ALL)], "b": [(3, 9, ALL)]}, [(3, 9, ALL)]),
    "steps without a question": ({"a": [(3, 4, ALL), (8, 9, ALL)]}, [(3, 9, ALL)]),
    "it was back meanwhile": (
        {"c": [(3, 3, ALL), (6, 9, ALL)], "a": [(3, 3, ALL), (4, 5, FEWER), (6, 9, ALL)]},
        [(3, 3, ALL), (4, 5, FEWER), (6, 9, ALL)],
    ),
    "before the checkpoint": ({"a": [(0, 2, FEWER), (3, 4, ALL)]}, [(3, 4, ALL)]),
    "across the checkpoint": ({"a": [(0, 4, FEWER)]}, [(3, 4, FEWER)]),
    "for ever": ({"a": [(3, 2**63 - 1, ALL)]}, [(3, 2**63 - 1, ALL)]),
}


@pytest.mark.parametrize("case", MERGED)
def test_what_all_say_becomes_stretches_of_steps(case: str) -> None:
    said, expected = MERGED[case]
    stretches = {name: [stretch(*one) for one in told] for name, told in said.items()}
    merged = merge_answered_steps(stretches, passives=ALL, since=3)
    assert [(steps.first, steps.last, steps.passives) for steps in merged] == expected


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"a": [(3, 5, ALL)], "b": [(5, 6, FEWER)]}, "b answered step 5 among a, b, and a among"),
        ({"c": [(3, 5, FEWER)]}, "c says that it answered step 3 among a, b; expected itself"),
        ({"a": [(3, 5, ("a", "x"))]}, "a says .* among a, x; expected itself and others of a, b"),
        ({"a": [(3, 5, ("b", "a"))]}, "in this order"),
    ],
)
def test_who_says_something_else_than_others_is_named(said: Any, message: str) -> None:
    stretches = {name: [stretch(*one) for one in told] for name, told in said.items()}
    with pytest.raises(RemoteProtocolError, match=message):
        merge_answered_steps(stretches, passives=ALL, since=0)


NO_STEPS: list[object] = [
    5,
    "ab",
    [[3, 5]],
    [[3, 5, []]],
    [[5, 3, ["a"]]],
    [[-1, 3, ["a"]]],
    [[0, 1, "ab"]],
    [[0, 2**63, ["a"]]],
    [[0, True, ["a"]]],
    [[3, 5, ["a"]]] * (2**16 + 1),
]


SENT = Greeting(
    identity=bytes(32), run_key=bytes([1]) * 32, holds=(3,), answered=(stretch(3, 5, ALL),)
)


def test_a_greeting_carries_them() -> None:
    assert parse_greeting(SENT.to_bytes()) == SENT


@pytest.mark.parametrize("answered", NO_STEPS, ids=lambda answered: repr(answered)[:30])
def test_a_greeting_with_no_steps_is_refused(answered: object) -> None:
    with pytest.raises(RemoteProtocolError, match="something else than a greeting"):
        parse_greeting(msgpack.packb([bytes(32), bytes([1]) * 32, None, None, [3], answered]))


def parse_greeting(payload: bytes) -> Greeting:
    return Greeting.from_message(envelope(payload, kind=Kind.GREETING, step=-1), bytes(32))


def make_resumed_contract(*answered: AnsweredSteps) -> Contract:
    usual = seats.contract(passives=ALL).model_dump()
    resumes = {"run": "ab" * 32, "step": 3, "answered": answered}
    return Contract.model_validate(usual | {"resumes": resumes})


def test_a_contract_says_who_answers_which_step() -> None:
    contract = make_resumed_contract(stretch(3, 5, ALL), stretch(6, 8, FEWER))
    circles = {3: ALL, 5: ALL, 6: FEWER, 8: FEWER, 9: None, 2: None}
    assert {step: contract.find_contributors(step) for step in circles} == circles
    assert contract.select_contributors(7, ALL) == [*FEWER]
    assert contract.select_contributors(9, ALL) == [*ALL]
    with pytest.raises(PartyLeftError, match=r"resume once c is back: step 4 .* among a, b, c"):
        contract.select_contributors(4, FEWER)
    assert "answered" not in json.loads(make_resumed_contract().document)["resumes"]
    assert Contract.model_validate_json(contract.document) == contract


# Of a run of two epochs, whose checkpoint is before step 4.


def make_small_config() -> Config:
    config = digits(2)
    data = config.data.model_copy(update={"limit": EPOCH * 16})
    train = config.train.model_copy(update={"batch_size": 16})
    return config.model_copy(update={"data": data, "train": train})


def model_of(folder: Path) -> dict[str, Any]:
    return {name: value.tolist() for name, value in load_file(folder / "model.safetensors").items()}


def attendance_of(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_bytes())["attendance"]


def test_who_was_left_out_before_a_kill_is_back_and_the_steps_without_it_are_played_alone(
    deaths: Deaths, tmp_path: Path
) -> None:
    deaths["passive-2"] = (5, BEFORE_CONTRIBUTING)
    interrupt_run(make_small_config(), tmp_path, at_step=7)
    deaths.clear()
    told = "steps from 5 on were answered without passive-2; active plays them alone"
    with pytest.warns(LeftOutWarning, match=told):
        run(make_small_config(), tmp_path, resume=True)
    assert attendance_of(tmp_path) == {"left": {}, "steps_without_all": 2}
    circles = RunContributorLog(tmp_path / "parties" / "passive-1" / "circles-passive-1.jsonl")
    assert [(s.first, s.last, len(s.passives)) for s in circles.list_steps(0)] == [
        (0, 4, 3),
        (5, 6, 2),
        (7, 7, 3),
    ]


@pytest.mark.filterwarnings("ignore::secure_apfed.errors.LeftOutWarning")
def test_who_leaves_again_at_the_same_step_is_gone_on_without_the_same(
    deaths: Deaths, tmp_path: Path
) -> None:
    """It contributed to step 6, whose sum counts it, and answers nothing from there on."""
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    deaths["passive-2"] = (6, BEFORE_ANSWERING)
    run(make_small_config(), whole)
    interrupt_run(make_small_config(), broken, at_step=2 * EPOCH)
    run(make_small_config(), broken, resume=True)
    assert model_of(broken) == model_of(whole)
    assert attendance_of(broken) == attendance_of(whole)


def test_who_answered_before_a_kill_is_waited_for_and_the_run_is_the_same(
    deaths: Deaths, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    run(make_small_config(), whole)
    interrupt_run(make_small_config(), broken, at_step=7)
    deaths["passive-2"] = (5, BEFORE_CONTRIBUTING)
    with pytest.raises(PartyLeftError, match="resume once passive-2 is back: step 5 was answered"):
        run(make_small_config(), broken, resume=True)
    deaths.clear()
    run(make_small_config(), broken, resume=True)
    assert model_of(broken) == model_of(whole)
    assert attendance_of(broken) == {"left": {}, "steps_without_all": 0}


def test_who_leaves_after_what_was_played_again_is_gone_on_without(
    deaths: Deaths, tmp_path: Path
) -> None:
    interrupt_run(make_small_config(), tmp_path, at_step=6)
    deaths["passive-2"] = (7, BEFORE_CONTRIBUTING)
    run(make_small_config(), tmp_path, resume=True)
    assert attendance_of(tmp_path) == {"left": {"passive-2": 7}, "steps_without_all": 1}


def pass_over(contract: Contract, step: int, present: Sequence[str]) -> list[str]:
    return [*present]


def test_an_active_and_an_aggregator_that_leave_one_out_after_a_kill_get_no_answer(
    deaths: Deaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no notice of the contract, and call it silent."""
    interrupt_run(make_small_config(), tmp_path, at_step=7)
    monkeypatch.setattr(Contract, "select_contributors", pass_over)
    deaths["passive-2"] = (5, BEFORE_CONTRIBUTING)
    said = r"aggregator asks passive-1 again .* differ by what passive-2 contributed.*Resume the"
    with pytest.raises(RemoteProtocolError, match=said):
        run(make_small_config(), tmp_path, resume=True)
