"""How long the rest of long work takes, who reports such work, and how it is shown."""

import io
import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from rich.console import Console

from apfed_attacks import run as attacks_run
from apfed_experiments import leaks
from apfed_experiments.baselines import compare_baselines, compare_regressions
from apfed_experiments.runner import run_study
from apfed_protocols.psi.interface import Progress as Aligning
from secure_apfed.alignment.over_links import ProgressReporter
from secure_apfed.base.working import (
    TimeLeft,
    Work,
    describe_time_left,
    observing_work,
    parse_work_event,
    report_work,
    working_on,
)
from secure_apfed.baselines import BASELINES, BaselineTask
from secure_apfed.console import progress as shown_progress
from secure_apfed.console.progress import Board, _EventWriter, _LinePrinter
from secure_apfed.exchange import StatusTracker
from secure_apfed.measures.table import MEASURES
from secure_apfed.runs.events import build_schema
from secure_apfed.runs.outcome import Progress

LINE = jsonschema.Draft202012Validator(build_schema())


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def estimate_time_left(
    seconds: Sequence[float], total: float, *, on_it: float = 0.0
) -> float | None:
    """Return the estimate after parts that took so long, so many seconds into the next."""
    clock = Clock()
    time_left = TimeLeft(clock)
    for done, took in enumerate(seconds, start=1):
        clock.now += took
        time_left.note_progress(done)
    clock.now += on_it
    return time_left.estimate_seconds(total)


@pytest.mark.parametrize(
    ("seconds", "total", "on_it", "left"),
    [
        pytest.param([], 10, 0, None, id="nothing ended"),
        pytest.param([60], 10, 0, None, id="a slow first part alone says nothing"),
        pytest.param([2, 2], 10, 0, 16, id="steady"),
        pytest.param([60, 2, 2, 2], 10, 0, 12, id="a slow first part is forgotten"),
        pytest.param([0, 0, 0, 0, 5, 5, 5, 5], 10, 0, 10, id="what was there before is forgotten"),
        pytest.param([2, 2], 10, 1.5, 14.5, id="it falls while a part is on"),
        pytest.param([2, 2], 10, 99, 14, id="a part that takes long is no more than over"),
        pytest.param([2, 2], 2, 0, 0, id="all is done"),
        pytest.param([2, 2], 1, 0, 0, id="more is done than there is"),
        pytest.param([0, 0], 5, 0, 0, id="it took no time"),
    ],
)
def test_the_rest_is_estimated_by_the_later_half(
    seconds: Sequence[float], total: float, on_it: float, left: float | None
) -> None:
    assert estimate_time_left(seconds, total, on_it=on_it) == (
        None if left is None else pytest.approx(left)
    )


def test_a_run_that_goes_on_from_a_checkpoint_counts_no_step_before_it() -> None:
    clock = Clock()
    time_left = TimeLeft(clock)
    for step in (501, 502, 503, 504):
        clock.now += 3
        time_left.note_progress(step)
    assert time_left.estimate_seconds(604) == pytest.approx(300)


def test_an_estimate_of_many_steps_keeps_few_marks_and_begins_anew_where_it_falls_back() -> None:
    clock = Clock()
    time_left = TimeLeft(clock)
    for step in range(1, 5001):
        clock.now += 0.5
        time_left.note_progress(step)
        time_left.note_progress(step)  # the end of an epoch tells the same step once more
    assert time_left.estimate_seconds(6000) == pytest.approx(500)
    assert len(time_left._progress_marks) <= 513
    time_left.note_progress(3)
    assert time_left.estimate_seconds(6000) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (0.0, ""),
        (math.inf, ""),
        (math.nan, ""),
        (-1.0, ""),
        (0.2, "about 1 s left"),
        (59.0, "about 59 s left"),
        (60.0, "about 1 min left"),
        (61.0, "about 2 min left"),
        (7_140.0, "about 119 min left"),
        (9_000.0, "about 2.5 h left"),
    ],
)
def test_an_estimate_reads_in_the_unit_that_fits(seconds: float | None, words: str) -> None:
    assert describe_time_left(seconds) == words


def test_work_is_told_to_whoever_observes_it_and_is_over_when_it_fails() -> None:
    seen: list[Work] = []
    report_work("nobody looks", 0, 3)
    with observing_work(seen.append):
        with pytest.raises(ValueError, match="no"), working_on("checkpoint", "step 3"):
            raise ValueError("no")
        report_work("local models", 1, 8, "Random forest")
    report_work("nobody looks", 1, 3)
    assert [(work.name, work.done, work.total, work.is_over) for work in seen] == [
        ("checkpoint", 0, 1, False),
        ("checkpoint", 1, 1, True),
        ("local models", 1, 8, False),
    ]


def baselines_of_classes() -> None:
    rows = np.linspace(0.0, 1.0, 12)[:, None]
    task = BaselineTask.from_arrays(rows, np.arange(6), np.arange(6) % 2, classes=2)
    baselines = {name: BASELINES[name] for name in ("ridge", "logistic")}
    compare_baselines(task, rows[:4], np.array([0, 1, 1, 1]), baselines)


def baselines_of_numbers() -> None:
    draw = np.random.default_rng(0)
    features = draw.normal(size=(12, 2))
    patch = pytest.MonkeyPatch()
    patch.setattr(
        "apfed_experiments.baselines.TITLE_BY_REGRESSOR", {"ridge": "Ridge", "mean": "Mean"}
    )
    try:
        parts = (features, features[:, 0], features[:4], features[:4, 0])
        compare_regressions(*parts, measure=MEASURES["rmse"])
    finally:
        patch.undo()


def attacks() -> None:
    trial: Any = SimpleNamespace(attack=SimpleNamespace(name="mia"), compute_result=lambda: None)
    assert len([*attacks_run._iter_results([trial, trial])]) == 2


def alignment() -> None:
    signs: Any = SimpleNamespace(count_work=lambda count: None)
    for done in (4, 10):
        ProgressReporter(signs)(Aligning(party="ann", work="blinding", done=done, total=10))


# What reports itself as long work: by name, with how often at least.
REPORTS: dict[str, tuple[Callable[[], None], str, int]] = {
    "baselines of classes": (baselines_of_classes, "local models", 3),
    "baselines of numbers": (baselines_of_numbers, "local models", 3),
    "attacks": (attacks, "attacks", 3),
    "alignment": (alignment, "alignment, blinding", 2),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_long_work_reports_each_part_and_its_end(kind: str) -> None:
    play, name, least = REPORTS[kind]
    seen: list[Work] = []
    with observing_work(seen.append):
        play()
    assert {work.name for work in seen} == {name}
    assert len(seen) >= least
    assert [work.is_over for work in seen] == [False] * (len(seen) - 1) + [True]
    assert sorted(work.done for work in seen) == [work.done for work in seen]


def test_parts_of_a_study_of_leaks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        leaks, "LIST_ROWS_BY_PART", {"one": lambda: iter(()), "two": lambda: iter(())}
    )
    told: list[tuple[int, int]] = []
    study = leaks.declare_study(["one", "two"])
    run_study(study, on_done=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def training(epoch: int, step: int, **more: Any) -> Progress:
    usual: dict[str, Any] = {"loss": 0.5, "accuracy": None, "epsilon": None, "wire_bytes": 0}
    return Progress(epoch=epoch, epochs=9, step=step, steps=90, **{**usual, **more})


def board_of(clock: Clock) -> Board:
    """A training at 2 seconds a step, whose first took a minute, beside a long alignment."""
    board = Board(name="late", clock=clock)
    for step in range(1, 9):
        clock.now += 60 if step == 1 else 2
        board.update_progress(training(1, step))
        board.update_work(Work(name="buckets", done=step, total=50, part="reading"), "ann")
    return board


def test_a_line_says_how_long_the_rest_takes() -> None:
    board = board_of(Clock())
    assert board.progress_line.startswith("late: epoch 1/9  loss 0.5000")
    assert board.progress_line.endswith("about 3 min left")
    (on,) = board.works
    assert on.line == "ann: buckets: 8 of 50, now reading, about 2 min left"
    out = io.StringIO()
    with shown_progress.show_board(
        board, console=Console(file=out, force_terminal=True, width=160)
    ):
        pass
    words = ("epoch 1/9", "about 3 min left", "buckets: 8 of 50")
    assert not [text for text in words if text not in out.getvalue()]
    board.update_work(Work(name="buckets", done=50, total=50), "ann")
    assert not board.works
    board.update_work(Work(name="checkpoint", done=0, total=1, part="step 8"))
    assert [work.line for work in board.works] == ["checkpoint: step 8"]
    board.drop_work()
    assert board.works == ()


def test_a_log_has_a_line_a_minute_and_the_last_one() -> None:
    clock = Clock()
    board = board_of(clock)
    out = io.StringIO()
    lines = _LinePrinter(board, Console(file=out, width=200), clock)
    for second in range(130):
        clock.now += 1
        board.update_progress(training(1 + second // 20, 9 + second // 2))
        lines.tick()
    assert len(out.getvalue().splitlines()) == 2 * 3
    board.update_progress(training(9, 90, loss=0.25))
    lines.print_last()
    lines.print_last()
    assert out.getvalue().splitlines()[6:] == ["late: epoch 9/9  loss 0.2500  0.0 MB sent"]


def test_events_tell_the_time_left_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    board = board_of(Clock())
    events = _EventWriter(board)
    events.tick()
    events.tick()
    board.update_work(Work(name="buckets", done=50, total=50), "ann")
    events.tick()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[*event] for event in said] == [["progress"], ["work"], ["work"]]
    assert said[0]["progress"]["seconds_left"] == pytest.approx(164)
    assert said[1]["work"] == {
        "party": "ann",
        "name": "buckets",
        "done": 8,
        "total": 50,
        "part": "reading",
        "seconds_left": pytest.approx(84),
    }
    assert (said[2]["work"]["done"], said[2]["work"]["seconds_left"]) == (50, 0.0)
    for event in said:
        LINE.validate(event)
    assert not LINE.is_valid({"work": {**said[1]["work"], "secret": 1}})
    assert parse_work_event(said[1]["work"]) == (
        "ann",
        Work(name="buckets", done=8, total=50, part="reading"),
    )


def test_nothing_is_shown_under_json(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress.show_run("late", quiet=True) as on_progress:
        on_progress(training(1, 1))
    with shown_progress.show_work(as_json=True):
        report_work("local models", 1, 8)
    with shown_progress.show_count("runs", quiet=True) as on_done:
        on_done(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_party_says_since_when_it_waits_and_how_long_it_will() -> None:
    clock = Clock()
    tracker = StatusTracker(clock)
    tracker.start_session("ann", ["bob", "cid"], None, meeting_timeout_s=600)
    tracker.observe_missing({"cid": ""})
    clock.now += 12
    status = tracker.build_status()
    assert status.meets is not None
    assert (status.meets.since_s, status.meets.patience_s) == (12, 600)
    assert (
        "waits for cid since 12 s, gives up after 600 s; 2 of 3 parties are here"
        in shown_progress._format_status_line(status)
    )
    LINE.validate({"status": {"at": 0.0, **status.model_dump(mode="json")}})
    tracker.observe_connection()
    assert tracker.build_status().meets is None
