"""The verdict of four lines: what it says of runs of every kind, and of what is not known."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apfed_attacks.interface import AttackResult
from apfed_experiments.baselines import BaselineResult, BaselinesRecord, RunGain
from apfed_experiments.columns import Table
from apfed_experiments.finished import FinishedRun
from apfed_experiments.report.page import Part, write_study_page
from apfed_experiments.summary import Interval
from apfed_experiments.variants import title_inference
from apfed_experiments.verdict import (
    ComparedRow,
    describe_comparison,
    describe_run,
)
from secure_apfed.config import Config
from secure_apfed.learning.votes import MeasuredHelp
from secure_apfed.methods import METHODS
from secure_apfed.runs.outcome import Outcome, compute_guarantees
from secure_apfed.settings.promises import MEANING_BY_EPSILON
from tests.experiments.run_folder import config_of, make_attack_result
from tests.secure_apfed.small_runs import small_config

ANSWERS = (
    "protected, at what cost",
    "what help was worth",
    "what attacks still read",
    "not attacked",
)
BASELINE = BaselineResult(name="ridge", title="Ridge", validation=0.8, test=0.6)
SOLO = BaselinesRecord(settings="x", baselines=(BASELINE,), rows=250)
GAIN = RunGain(
    measure="accuracy",
    baseline="Ridge",
    rows=250,
    reached=0.9,
    alone=0.6,
    value=0.3,
    low=0.2,
    high=0.4,
)
DISABLED = MeasuredHelp(
    row_count=30, gain=-0.1, standard_error=0.05, vote_accuracy=0.5, local_accuracy=0.7
)
AVERAGED = MeasuredHelp(
    row_count=30,
    gain=-0.1,
    standard_error=0.05,
    vote_accuracy=0.5,
    local_accuracy=0.7,
    is_averaged=True,
)
USED = MeasuredHelp(
    row_count=30, gain=0.2, standard_error=0.05, vote_accuracy=0.8, local_accuracy=0.7
)


def make_finished_run(
    config: Config,
    *,
    attacks: Sequence[AttackResult] | None = None,
    local_models: BaselinesRecord | None = SOLO,
    gain: RunGain | None = GAIN,
    epsilon: float = math.inf,
    **changed: Any,
) -> FinishedRun:
    """Return a finished run of 410 test rows, 250 of which its model says something of."""
    method = config.method.name
    told = {
        "method": method,
        "accuracy": {method: 0.9},
        "wire_bytes": 1_500_000,
        "seconds": 12.0,
        "privacy": {
            "epsilon_x": epsilon,
            "epsilon_y": math.inf,
            "epsilon_model": math.inf,
            "delta": 1e-5,
            "releases": 6,
        },
        "test_rows": 410,
        "measured_rows": {method: 250},
    }
    outcome = Outcome.model_validate({**told, **changed})
    mounted = None if attacks is None else tuple(attacks)
    return FinishedRun(
        config=config, outcome=outcome, attacks=mounted, local_models=local_models, gain=gain
    )


def lines_of(run: FinishedRun) -> dict[str, str]:
    return dict(describe_run(run))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_four_lines_that_name_every_promise(method: str) -> None:
    config = small_config(method)
    run = make_finished_run(config)
    lines = lines_of(run)
    assert tuple(lines) == ANSWERS
    protected = lines[ANSWERS[0]]
    named = [
        MEANING_BY_EPSILON[promise.figure][0] for promise in compute_guarantees(config, run.outcome)
    ]
    assert [name for name in named if name not in protected] == []
    assert "Cost: 1.5" in protected
    assert lines[ANSWERS[2]] == "Not known: no attack ran."
    titles = [headline.direction.title for headline in run.headlines]
    assert [title for title in titles if title not in lines[ANSWERS[3]]] == []
    assert "outsider reads who trained" in lines[ANSWERS[3]]


def test_a_finite_epsilon_is_told_by_name_with_whose_and_from_whom() -> None:
    run = make_finished_run(config_of(guard="{mechanism: gaussian, epsilon: 8.0}"), epsilon=7.98)
    protected = lines_of(run)[ANSWERS[0]]
    assert protected.startswith(
        "Bounded: one row's releases of the active, from the passives: epsilon_x 7.98 at delta "
        "1e-05, T 6."
    )
    assert "No guarantee for" in protected
    noisy = {"p1": {"figure": "epsilon_c", "epsilon": 2.0, "delta": 1e-5, "releases": 3}}
    of_passive = lines_of(make_finished_run(config_of(), contributions=noisy))[ANSWERS[0]]
    assert "one person in sums of p1, from whoever reads the sum: epsilon_c 2 at" in of_passive


def test_a_run_without_a_guard_bounds_nothing_and_says_so() -> None:
    protected = lines_of(make_finished_run(config_of()))[ANSWERS[0]]
    assert protected.startswith("No epsilon bounds anything. No guarantee for one row's releases")
    assert "representations are sent without a guard" in protected


def test_nothing_is_said_to_be_hidden_where_one_passive_sums_alone() -> None:
    summed = {"secure_sum": "{scheme: plain, masks: pairwise, allow_single_passive: true}"}
    assert (
        "hides single contributions" in lines_of(make_finished_run(config_of(**summed)))[ANSWERS[0]]
    )
    two = "{dataset: digits, views: 2}"
    alone = lines_of(make_finished_run(config_of(data=two, **summed)))[ANSWERS[0]]
    assert "its sum is its own contribution" in alone
    assert "hides single" not in alone
    plain = lines_of(make_finished_run(config_of(secure_sum="{scheme: plain, masks: none}")))
    assert "hides nothing from the aggregator" in plain[ANSWERS[0]]


# By case: what changes in the run, what the line says, and what it must not say.
WORTH: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "gain": (
        {},
        "+30.0 points over Ridge, the best of the active alone, on the same 250 rows",
        "no gain",
    ),
    "interval": (
        {},
        "(95 % over these rows: +20.0 points to +40.0 points); better with help",
        "worse",
    ),
    "none shown": ({"gain": GAIN.model_copy(update={"low": -0.1})}, "no gain shown.", "better"),
    "negative": (
        {"gain": GAIN.model_copy(update={"value": -0.3, "low": -0.4, "high": -0.2})},
        "-30.0 points over Ridge",
        "better",
    ),
    "worse": (
        {"gain": GAIN.model_copy(update={"value": -0.3, "low": -0.4, "high": -0.2})},
        "worse than alone in this run.",
        "better",
    ),
    "no interval": (
        {"gain": GAIN.model_copy(update={"low": None, "high": None})},
        "without an interval, which shows nothing yet",
        "better",
    ),
    "no baselines": (
        {"local_models": None, "gain": None},
        "nobody measured what the active would do alone",
        "points",
    ),
    "other rows": (
        {"gain": None},
        "were not measured on the same test rows",
        "points over",
    ),
    "other measure": (
        {"local_models": SOLO.model_copy(update={"measure": "auc"}), "gain": None},
        "the active alone was measured by AUC",
        "points over",
    ),
    "rows": ({}, "Accuracy 90.0 % of 250 of 410 test rows", "of 410 test rows:"),
    "help disabled": (
        {"help": DISABLED},
        "Help was disabled, labelled rows did not let it in",
        "Help was used",
    ),
    "help used": ({"help": USED}, "+30.0 points", "disabled"),
    "help averaged": (
        {"help": AVERAGED},
        "leave help in doubt (help is averaged with the best three local models: of 30",
        "disabled",
    ),
}


@pytest.mark.parametrize("case", WORTH)
def test_what_help_was_worth_is_told_with_its_rows_or_why_not(case: str) -> None:
    changed, expected, absent = WORTH[case]
    text = lines_of(make_finished_run(config_of("votes"), **changed))[ANSWERS[1]]
    assert expected in text
    assert absent not in text


def test_the_active_alone_had_no_help() -> None:
    lines = lines_of(make_finished_run(config_of("single_view")))
    assert lines[ANSWERS[1]].startswith("No party helped, the active trained alone.")
    assert "Nothing is sent of one row's releases" in lines[ANSWERS[0]]
    assert "nothing that depends on the active's labels is sent" in lines[ANSWERS[3]]


def test_private_training_has_no_gain_and_says_why() -> None:
    private = "{noise_multiplier: 1.0, clip: 1.0}"
    config = config_of("single_view", dp_sgd=private)
    text = lines_of(make_finished_run(config, local_models=None, gain=None))[ANSWERS[1]]
    assert "the gain is not known; what the active does alone is left out" in text


def test_attacks_are_told_by_direction_with_their_variant() -> None:
    run = make_finished_run(
        config_of(),
        attacks=[make_attack_result(0.2), make_attack_result(0.3, adversary="passive-2")],
    )
    lines = lines_of(run)
    assert (
        "passive reads labels +0.300, balanced accuracy by model completion (x)"
        in lines[ANSWERS[2]]
    )
    assert "passive reads labels" not in lines[ANSWERS[3]]
    assert "passive reads features of active" in lines[ANSWERS[3]]


def test_attacks_that_found_nothing_prove_nothing() -> None:
    lines = lines_of(make_finished_run(config_of(), attacks=[make_attack_result(-0.01)]))
    assert lines[ANSWERS[2]].startswith("The attacks that ran found nothing, which proves no")


def test_who_declined_is_not_attacked_with_the_reason() -> None:
    declined = replace(
        make_attack_result(0.1), applicable=False, reason="nothing was kept", advantage=None
    )
    lines = lines_of(make_finished_run(config_of(), attacks=[declined]))
    assert lines[ANSWERS[2]] == "Not known: no attack ran."
    assert "passive reads labels: 1 of 1 attacks declined: nothing was kept" in lines[ANSWERS[3]]


def test_membership_is_named_where_nobody_chose_it_and_not_where_it_ran() -> None:
    asked = {"target": "membership", "role": "outsider", "adversary": "outsider", "victim": None}
    without = lines_of(make_finished_run(config_of(), attacks=[make_attack_result(0.1)]))
    ran = lines_of(make_finished_run(config_of(), attacks=[make_attack_result(0.1, **asked)]))
    assert "outsider reads who trained: no attack" in without[ANSWERS[3]]
    assert "outsider reads who trained +0.100" in ran[ANSWERS[2]]
    assert "outsider" not in ran[ANSWERS[3]]


def line(name: str, **changed: Any) -> ComparedRow:
    usual: dict[str, Any] = {
        "epsilon": math.inf,
        "wire_bytes": 1e6,
        "gain": Interval(0.1, 0.05, 0.15),
        "leak_by_direction": {},
    }
    return ComparedRow(name=name, **{**usual, **changed})


def test_a_comparison_says_who_paid_and_which_lines_have_no_guarantee() -> None:
    leaks = {"passive reads labels": Interval(0.2, 0.1, 0.3)}
    lines = dict(
        describe_comparison(
            [
                line("a", epsilon=8.0, leak_by_direction=leaks),
                line(
                    "b",
                    gain=Interval(-0.1, -0.15, -0.05),
                    reason_by_direction={"passive reads labels": "why"},
                ),
                line("c", epsilon=0.0, gain=Interval(0.0, -0.1, 0.1), wire_bytes=0),
            ]
        )
    )
    assert tuple(lines) == ANSWERS
    assert lines[ANSWERS[0]].startswith(
        "With a finite epsilon: 1 of 3 lines (a 8). Nothing is sent by c."
    )
    assert "No guarantee: b." in lines[ANSWERS[0]]
    assert (
        "in 1 of 3 lines, most in a: +10.0 [+5.0, +15.0] points. It cost in b." in lines[ANSWERS[1]]
    )
    assert "passive reads labels: at most +0.200 [+0.100, +0.300] (a)" in lines[ANSWERS[2]]
    assert lines[ANSWERS[3]] == "passive reads labels, why: b."


@pytest.mark.parametrize(("p_of_b", "told"), [(0.2, "1"), (0.01, "2"), (math.nan, "")])
def test_a_comparison_says_where_help_still_paid_after_correction(p_of_b: float, told: str) -> None:
    lines = [line("a", p_holm=0.01), line("b", p_holm=p_of_b)]
    worth = dict(describe_comparison(lines))[ANSWERS[1]]
    assert ("after correction" in worth) is bool(told)
    assert f"after correction for all 2 (Holm) in {told}." in worth or not told
    lost = [line("a", p_holm=0.3), line("b", gain=Interval(-0.1, -0.2, -0.05), p_holm=0.01)]
    assert "(Holm) in none." in dict(describe_comparison(lost))[ANSWERS[1]]


@pytest.mark.parametrize("gain", [None, Interval(0.1, math.nan, math.nan)])
def test_a_comparison_without_intervals_claims_no_gain(gain: Interval | None) -> None:
    worth = dict(describe_comparison([line("a", gain=gain)]))[ANSWERS[1]]
    assert "Help paid" not in worth


def test_an_empty_comparison_is_four_lines_too() -> None:
    assert tuple(dict(describe_comparison([]))) == ANSWERS


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    hostile = make_attack_result(0.1, victim="<b>x</b>", variant="<script>", target="features")
    run = make_finished_run(config_of(), attacks=[hostile])
    part = Part(name="p", table=Table([], []), verdict_lines=describe_run(run))
    write_study_page(tmp_path / "page.html", title="t", reading_guide="", parts=[part])
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


# Keys of `accuracy` beside the method's own name, by method.
KEYS: Mapping[str, Sequence[str]] = {
    "tvfl": ("tvfl_0", "tvfl_a", "tvfl_r", "tvfl_alone"),
    "split_nn": ("split_nn_alone",),
    "split_nn_sum": ("split_nn_sum_alone",),
    "joint_teacher_sum": ("joint_teacher_sum_together",),
    "apc_vfl": ("apc_vfl_together",),
    "vfedtrans": ("vfedtrans_together",),
    "mmvfl": ("mmvfl_together",),
    "v_fedmv": ("v_fedmv_together",),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_accuracy_has_a_title_of_its_own(method: str) -> None:
    settings = METHODS[method].public_facts
    keys = (method, *KEYS.get(method, ()))
    titles = [title_inference(settings, key) for key in keys]
    assert titles[0] == settings.title
    assert len(set(titles)) == len(keys)
    assert not set(titles) & set(keys)
