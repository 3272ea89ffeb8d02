"""Who helped: planted passives, what is refused, and that asking changes nothing of the run."""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from apfed_experiments.baselines import locate_baselines
from apfed_experiments.report import write_report
from apfed_experiments.runner import run_study
from apfed_experiments.summary import Interval, measure_difference
from apfed_experiments.who_helped import declare_study, make_points
from apfed_experiments.worth import (
    describe_cost,
    describe_interval_coverage,
    describe_worth,
    list_worth_rows,
    make_worth_interval,
)
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed import measure_worth, run_frames
from secure_apfed.base.seeds import seed_draws
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.data.encoding import ColumnEncoding
from secure_apfed.errors import ConfigError, DataError, NarrowBatchWarning
from secure_apfed.methods import METHODS, open_session
from secure_apfed.runs import worth
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run
from secure_apfed.runs.worth import (
    PassiveWorth,
    WhoHelped,
    check_leaving_out,
    leave_out,
    leave_out_settings,
)
from tests.experiments.run_folder import make_votes_config, own_tables
from tests.secure_apfed.small_runs import read_stderr, run_as_json, small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]
ROWS = 500
LABELLED = 24
COLUMNS = 12
PLANTED = ("signal", "noise", "more-noise")
WITH_PASSIVES = [name for name, method in METHODS.items() if method.public_facts.has_passives]


def make_tables(*names: str) -> VerticalData:
    """The label is a sum of the active's columns, and `signal` has that sum; others have noise."""
    ids = tuple(map(str, range(ROWS)))
    with seed_draws(0, "planted"):
        own_NF = torch.randn(ROWS, COLUMNS)
        score_N = own_NF.sum(1)
        columns = {"signal": score_N[:, None], "noise": torch.randn(ROWS, 2)}
        columns["more-noise"] = torch.randn(ROWS, 2)

    def table(name: str, rows_NF: torch.Tensor, labels: torch.Tensor | None = None) -> PartyTable:
        encoding = ColumnEncoding.for_numeric_columns([str(at) for at in range(rows_NF.shape[1])])
        return PartyTable(name, ids, rows_NF, labels, encoding)

    return VerticalData(
        table=table("active", own_NF, (score_N > 0).long()),
        passives=tuple(table(name, columns[name]) for name in names),
        classes=("no", "yes"),
        train_rows=torch.arange(ROWS - 200),
        test_rows=torch.arange(ROWS - 200, ROWS),
        labelled=torch.arange(LABELLED),
    )


def votes_config(**changes: Any) -> Config:
    own = {"method": {"name": "votes", "help": "always"}, "party_seeds": "shared_for_comparison"}
    network = {"network": "random_features", "random_features": 100}
    return make_votes_config(**{"model": network, **own, **changes})


@pytest.fixture(scope="module")
def whole() -> RunResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(votes_config(), None, data=make_tables(*PLANTED))


@pytest.fixture(scope="module")
def measured_worth(whole: RunResult) -> WhoHelped:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return measure_worth(whole)


def worth_of(found: WhoHelped, name: str) -> PassiveWorth:
    return next(one for one in found.passives if one.passive == name)


def test_a_passive_with_the_labels_signal_is_worth_much(measured_worth: WhoHelped) -> None:
    signal = worth_of(measured_worth, "signal")
    interval = make_worth_interval(signal)
    assert interval is not None
    assert interval.mean > 0.1
    assert describe_worth(interval) == "helped"


@pytest.mark.parametrize("name", ["noise", "more-noise"])
def test_a_passive_with_noise_is_worth_nothing(measured_worth: WhoHelped, name: str) -> None:
    interval = make_worth_interval(worth_of(measured_worth, name))
    assert interval is not None
    assert interval.low <= 0
    assert interval.mean < 0.05


def test_a_worth_is_the_difference_of_two_runs_by_hand(
    whole: RunResult, measured_worth: WhoHelped
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = run(votes_config(), None, data=make_tables("noise", "more-noise"))
    signal = worth_of(measured_worth, "signal")
    assert signal.without == others.accuracy["votes"]
    assert signal.value == pytest.approx(whole.accuracy["votes"] - others.accuracy["votes"])
    assert signal.wire_bytes == pytest.approx(whole.wire_bytes - others.wire_bytes, abs=200)
    assert signal.wire_bytes > 0


def test_sums_that_differ_by_one_passive_show_its_votes() -> None:
    config = votes_config(
        transcript={"keep": "all"},
        secure_sum={"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
    )

    def list_opened_sums(*names: str) -> torch.Tensor:
        recording = run(config, None, data=make_tables(*names)).recording
        return torch.cat(list(recording.transcript.sums_by_step.values()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        difference = list_opened_sums(*PLANTED) - list_opened_sums("noise", "more-noise")
        alone = list_opened_sums("signal")
    assert torch.allclose(difference, alone, atol=1e-4)
    assert float(alone.abs().max()) > 0.1
    assert "difference is that passive's part" in describe_cost(config, 3)


def test_warnings_of_a_training_are_said_once_and_name_who_was_left_out(
    whole: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warning_run(config: Config, folder: None, *, data: VerticalData) -> RunResult:
        for step in range(3):
            warnings.warn(f"narrow batch in step {step}", NarrowBatchWarning, stacklevel=2)
            warnings.warn("a plain sum", UnsafeChoiceWarning, stacklevel=2)
        return whole

    monkeypatch.setattr(worth, "run", warning_run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measure_worth(whole)
    assert [(one.category, str(one.message)) for one in caught] == [
        (NarrowBatchWarning, f"without {name}: narrow batch in step 0 (and 2 more of this kind)")
        for name in PLANTED
    ]


def test_asking_changes_no_figure_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_settings(votes_config()))
    call = ["run", file, "--no-baselines", "--output"]
    asked = run_as_json(capsys, *call, tmp_path / "asked", "--contributions")
    plain = run_as_json(capsys, *call, tmp_path / "plain")
    own = {"folder", "report", "who_helped"}
    assert {key: asked[key] for key in asked if key not in own | {"verdict"}} == {
        key: plain[key] for key in plain if key not in own | {"verdict"}
    }
    model = "model.safetensors"
    assert (tmp_path / "asked" / model).read_bytes() == (tmp_path / "plain" / model).read_bytes()
    assert plain["who_helped"] is None
    assert not (tmp_path / "plain" / "who-helped.json").exists()
    assert asked["who_helped"] == json.loads((tmp_path / "asked/who-helped.json").read_text())
    assert [one["passive"] for one in asked["who_helped"]["passives"]] == [
        "passive-1",
        "passive-2",
        "passive-3",
    ]
    page = (tmp_path / "asked" / "report.html").read_text()
    assert "<h3>What each passive's help was worth</h3>" in page
    assert "no Shapley values" in page
    assert "An interval that holds 0 shows nothing" in page
    assert "no Shapley values" not in (tmp_path / "plain" / "report.html").read_text()
    # The report is made again from the folder alone.
    assert write_report(tmp_path / "asked").read_text().count("no Shapley values") == 1
    RunFolder(tmp_path / "asked").check_digests()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--resume"], "resume it without, then measure with `secure-apfed study who-helped"),
        (["--transport", "local"], "leave out --transport"),
        (["--seeds", "3"], "study who-helped CONFIG --seeds N"),
        (["--set", "data.views=2"], "passive-1 is the only passive"),
        (["--set", "data.views=3"], "--set secure_sum.allow_single_passive=true"),
    ],
)
def test_a_run_that_cannot_be_compared_is_refused_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_settings(make_votes_config()))
    folder = tmp_path / "r"
    call = ["run", str(file), "--output", str(folder), "--contributions", *more]
    assert execute(call) == 2
    assert why in read_stderr(capsys)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"recorded": None}, "each party ran in a process of its own"),
        ({"sessions": 2}, "played in 2 sessions"),
        ({"test_scores": {}}, "the run measured no test row"),
    ],
    ids=["apart", "resumed", "untested"],
)
def test_a_result_that_cannot_be_compared_is_refused(
    whole: RunResult, changed: Mapping[str, Any], why: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=why):
        measure_worth(replace(whole, **changed))


def test_a_method_without_passives_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose a method with passives"):
        check_leaving_out(small_config("single_view"), ["bank", "shop"])


@pytest.mark.parametrize("method", WITH_PASSIVES)
def test_what_is_refused_is_what_the_other_passive_could_not_train(method: str) -> None:
    config = small_config(method)
    data = load_data(config.data, seed=0)
    only = replace(data, passives=data.passives[:1])
    name = data.passives[0].name
    assert is_accepted(lambda: check_leaving_out(config, [name, "post"])) == is_accepted(
        lambda: open_session(leave_out_settings(config, "post"), only)
    )


def is_accepted(call: Callable[[], object]) -> bool:
    try:
        call()
    except ConfigError:
        return False
    return True


def test_a_threshold_that_the_others_do_not_reach_is_refused() -> None:
    summed = {"scheme": "plain", "masks": "recoverable", "threshold": 3, "clip": 1.0}
    config = small_config("apfed_c", secure_sum=summed, rules={"silent_passive": "recover"})
    with pytest.raises(ConfigError, match=r"without bank: secure_sum.threshold: 3 of 2"):
        check_leaving_out(config, ["bank", "shop", "post"])


def test_settings_of_who_is_left_out_go_with_it(tmp_path: Path) -> None:
    config = votes_config(
        data=own_tables(tmp_path),
        passives={"shop": {"weight": 2.0}, "default": {}},
        attacks=[{"name": "feature_inversion"}],
    )
    without = leave_out_settings(config, "shop")
    assert set(without.passives) == {"default"}
    assert set(without.data.parties or {}) == {"active", "post"}
    assert without.attacks == ()
    assert without.effective_transcript.keep == "none"
    data = leave_out(load_data(config.data, seed=0), "shop")
    assert [table.name for table in data.tables] == ["active", "post"]


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.2, 0.1, 0.3), "helped"),
        ((-0.2, -0.3, -0.1), "the model is better without it"),
        ((0.2, -0.1, 0.5), "nothing shown"),
        ((0.0, 0.0, 0.0), "nothing shown"),
        ((0.2, math.nan, math.nan), "one figure without an interval, which shows nothing yet"),
    ],
)
def test_what_an_interval_shows(interval: tuple[float, float, float], said: str) -> None:
    assert describe_worth(Interval(*interval)) == said


def test_secret_seeds_are_said_beside_the_intervals(measured_worth: WhoHelped) -> None:
    assert "the same initial weights" in describe_interval_coverage(measured_worth)
    secret = measured_worth.model_copy(update={"party_seeds": "secret"})
    assert "draws initial weights of its own" in describe_interval_coverage(secret)


def test_a_worth_on_other_test_rows_is_no_figure(measured_worth: WhoHelped) -> None:
    unknown = measured_worth.passives[0].model_copy(
        update={"value": None, "low": None, "high": None}
    )
    told = list_worth_rows(measured_worth.model_copy(update={"passives": (unknown,)}))
    assert told[0][2:4] == ("not known: measured on other test rows", "")


def runs_of(*scores: float, rows: int = 100) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "seed": range(len(scores)),
            "target": "task",
            "metric": "accuracy",
            "score": scores,
            "rows": rows,
            "shared": 0.0,
        }
    )


def test_a_worth_over_seeds_is_paired_by_seed() -> None:
    whole = runs_of(0.9, 0.7, 0.5)
    difference = measure_difference(whole, runs_of(0.8, 0.6, 0.4))
    assert difference is not None
    # The seeds differ by far more than the passive is worth in each of them.
    assert difference.low == pytest.approx(0.1)
    assert measure_difference(whole, runs_of(0.8, 0.6, 0.4, rows=90)) is None


def test_points_of_a_study_are_the_whole_and_each_left_out(tmp_path: Path) -> None:
    config = make_votes_config(attacks=[{"name": "feature_inversion"}])
    whole, *without = make_points(config, tmp_path, ("passive-1", "passive-2", "passive-3"))
    names = {table.name for table in whole.load_tables(0).passives}
    assert whole.config.attacks == ()
    for point in without:
        left = names - {table.name for table in point.load_tables(0).passives}
        assert point.name.endswith(f"-without-{left.pop()}")
        assert torch.equal(point.load_tables(0).test_rows, whole.load_tables(0).test_rows)
        alone = locate_baselines(point.make_trial(0).baseline_config, tmp_path)
        assert alone == locate_baselines(whole.make_trial(0).baseline_config, tmp_path), (
            "baselines are measured twice"
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_apfed.errors.FewRowsWarning")
def test_the_worth_of_frames_is_measured_when_their_files_are_gone() -> None:
    people = [f"p{row}" for row in range(150)]
    cells = np.random.default_rng(0).normal(size=(150, 4))
    frame = pd.DataFrame(cells, columns=list("abcd")).assign(id=people)
    labels = np.where(frame["a"] + frame["c"] > 0, "yes", "no")
    active = frame[["id", "a"]].assign(label=labels)
    passives = {name: frame[["id", name]] for name in "bcd"}
    result = run_frames(active, passives, label="label", baselines=False)
    assert [one.passive for one in measure_worth(result.run).passives] == list("bcd")


@pytest.mark.slow
def test_a_study_writes_a_table_a_page_and_goes_on(tmp_path: Path) -> None:
    study = declare_study(make_votes_config(), tmp_path, seed_count=2)
    (table,) = run_study(study).tables
    assert [row["passive"] for row in table.rows][:3] == ["passive-1", "passive-2", "passive-3"]
    assert table.rows[3]["passive"].startswith("all 3, over the best local model")
    page = (tmp_path / "index.html").read_text()
    assert "no Shapley values" in page
    assert "further sessions" in page
    stored = json.loads((tmp_path / "who-helped.json").read_text())["rows"]
    assert {"worth", "low", "high", "p_holm", "wire_bytes", "shown"} <= set(stored[0])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("few-labels*.json")}
    assert len(before) == 8
    run_study(study)
    assert before == {path: path.stat().st_mtime_ns for path in before}
