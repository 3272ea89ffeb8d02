"""The comparison's table, its trials, and the page that is made of them."""

import csv
import io
import json
import math
from pathlib import Path

import pytest

from experiments import main_job
from experiments import sweep as sweeps
from experiments.comparison import HEADER, Spread, as_csv, as_markdown, compare
from experiments.main_job import CONFIGS, base_config
from experiments.report.comparison import Part, write_comparison
from experiments.trials import VARIANTS, TrialResult, Variant, run_trial, trials

SINGLE, TVFL, PLAIN, GUARDED = VARIANTS[0], VARIANTS[1], VARIANTS[5], VARIANTS[6]


def result(variant: Variant, seed: int = 0, **changes: object) -> TrialResult:
    usual: dict[str, object] = {
        "variant": variant,
        "seed": seed,
        "accuracy": {variant.method: 0.9},
        "wire_bytes": 1_000_000,
        "epsilon": math.inf,
        "seconds": 1.0,
        "advantages": {"one by shop": 0.1},
    }
    return TrialResult(**{**usual, **changes})  # type: ignore[arg-type]  # a test's defaults


def test_intervals_are_students() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert spread.mean == 3
    assert spread.half_width == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)
    assert spread.text(digits=2) == "3.00 ± 1.96"
    assert Spread.of([0.5]).text(scale=100) == "50.0"


def test_one_line_for_each_inference() -> None:
    lines = compare(
        [
            result(SINGLE, epsilon=0.0, wire_bytes=0, advantages={}),
            result(TVFL, accuracy={"tvfl": 0.9, "tvfl_0": 0.2}),
            result(GUARDED, 0, epsilon=8.0),
            result(GUARDED, 1, epsilon=7.5),
        ]
    )
    assert [line.method for line in lines] == ["SingleVL", "TVFL, all parties", "TVFL-0", "APFed-C"]
    assert lines[0].cells() == ("SingleVL", "nothing is sent", "90.0", "0", "0", "not applicable")
    assert lines[1].cells()[4] == "∞"
    assert lines[3].epsilon == 8
    assert lines[3].protection == "guard + secure sum"


def test_tables_hold_every_line() -> None:
    lines = compare([result(PLAIN), result(GUARDED, epsilon=8.0)])
    markdown = as_markdown(lines).splitlines()
    assert markdown[0] == f"| {' | '.join(HEADER)} |"
    assert len(markdown) == 4
    rows = list(csv.DictReader(io.StringIO(as_csv(lines))))
    assert [row["epsilon"] for row in rows] == ["inf", "8.0"]


@pytest.mark.parametrize("name", CONFIGS)
def test_variants_differ_only_in_method_and_protection(name: str) -> None:
    base = base_config(name)
    for variant in VARIANTS:
        config = variant.of(base, seed=3)
        same = {"seed", "name", "method", "guard", "secure_sum"}
        assert config.model_dump(exclude=same) == base.model_dump(exclude=same)
        assert config.seed == 3
        assert (config.guard == base.guard) == bool(variant.protected)
        assert (config.secure_sum.name == "ckks") == bool(variant.protected)
    assert len({variant.key for variant in VARIANTS}) == len(VARIANTS)


def test_a_trial_is_run_once(tmp_path: Path) -> None:
    base = base_config("main-breast-cancer")
    train = base.train.model_copy(update={"epochs": 1})
    listed = list(trials(base.model_copy(update={"train": train}), tmp_path, [0]))
    trial = next(trial for trial in listed if trial.variant == TVFL)
    first = run_trial(trial)
    written = (trial.folder / "result.json").stat().st_mtime_ns
    assert run_trial(trial) == first
    assert (trial.folder / "result.json").stat().st_mtime_ns == written
    assert set(first.accuracy) == {"tvfl", "tvfl_0", "tvfl_a", "tvfl_r"}
    assert first.epsilon == math.inf
    attacks = json.loads((trial.folder / "attacks.json").read_bytes())
    scores = [item["advantage"] for item in attacks if item["advantage"] is not None]
    assert sorted(first.advantages.values()) == sorted(scores)


def test_the_worst_attack_is_the_one_that_gains_most_on_average() -> None:
    # The highest of each seed would be 0.3 where each of the two is 0.1 on average.
    gains = [{"by shop": 0.3, "by bank": -0.1}, {"by shop": -0.1, "by bank": 0.3}]
    (line,) = compare([result(PLAIN, seed, advantages=one) for seed, one in enumerate(gains)])
    assert line.advantage is not None
    assert line.advantage.mean == pytest.approx(0.1)


def test_an_attack_that_some_seeds_lack_is_shown_with_their_number() -> None:
    gains = [{"by shop": 0.1, "by bank": math.nan}, {"by shop": 0.1, "once": 0.9}]
    (line,) = compare([result(PLAIN, seed, advantages=one) for seed, one in enumerate(gains)])
    assert line.cells()[-1] == "0.900 (1 of 2 seeds)"


def test_the_page_holds_pictures_and_links(tmp_path: Path) -> None:
    lines = compare([result(SINGLE, advantages={}, epsilon=0.0), result(PLAIN), result(GUARDED)])
    part = Part(name="digits", title="digits <4>", lines=lines, reports=[("one", "a/report.html")])
    page = write_comparison(tmp_path, title="All", reading="How", parts=[part]).read_text("utf-8")
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert "digits &lt;4&gt;" in page
    assert 'href="a/report.html"' in page
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page


def test_pages_that_name_a_delta_name_that_of_their_configurations() -> None:
    for reading, names in ((main_job.READING, CONFIGS), (sweeps.READING, sweeps.CONFIGS)):
        assert "at delta 1e-5" in reading
        assert {base_config(name).guard.delta for name in names} == {1e-5}
