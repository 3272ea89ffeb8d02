"""The main job's table and picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from apfed_experiments import main_job, sweep
from apfed_experiments.columns import Table
from apfed_experiments.finished import FinishedRun
from apfed_experiments.main_job import CONFIGS, VARIANTS, compare, config_of, draw, points_of
from apfed_experiments.report.page import Part, write_comparison
from apfed_experiments.study import Line, base_config, finish, results_of
from tests.experiments.finished_runs import attacked, finished

BY_KEY = {variant.key: variant for variant in VARIANTS}
SINGLE, TVFL = BY_KEY["alone"], BY_KEY["tvfl"]
PLAIN, GUARDED, NOISY = BY_KEY["apfed_c"], BY_KEY["apfed_c-protected"], BY_KEY["votes-randomised"]


def lines_of(runs: Mapping[Line, Sequence[FinishedRun]]) -> Table:
    every = points_of(base_config(CONFIGS[0]), Path("out"))
    points = [point for point in every if point.line in runs]
    found = [
        (point.trial(seed), run) for point in points for seed, run in enumerate(runs[point.line])
    ]
    return compare(points, results_of(found))


def test_one_line_for_each_inference() -> None:
    lines = lines_of({
        SINGLE: [finished(0.9, epsilon=0.0, releases=0, wire_bytes=0)],
        TVFL: [finished({"tvfl": 0.9, "tvfl_0": 0.2}, attacks=[attacked(0.1)])],
        GUARDED: [finished(0.9, epsilon=epsilon) for epsilon in (8.0, 7.5)],
    })  # fmt: skip
    cells = lines.cells
    assert [row[0] for row in cells] == ["SingleVL", "TVFL, all parties", "TVFL-0", "APFed-C"]
    assert lines.rows[3]["summary"].epsilon_x == 8
    (line,) = lines_of({NOISY: [finished(0.9, epsilon=0.0)]}).rows
    assert line["epsilon"] == math.inf  # this outcome has no account of a passive


@pytest.mark.parametrize("name", CONFIGS)
def test_variants_share_data_seeds_and_labelled_rows(name: str) -> None:
    base = base_config(name)
    assert base.data.labelled == 20
    for point in points_of(base, Path("out")):
        config = point.trial(3).config
        assert config.data == base.data
        assert config.seed == point.trial(3).alone.seed == 3
        assert point.alone == base
        assert config.attacks == base.attacks
    assert len(BY_KEY) == len(VARIANTS)
    assert config_of(GUARDED, base).guard == base.guard
    assert config_of(PLAIN, base).guard.mechanism == "none"


def test_a_trial_is_run_once(tmp_path: Path) -> None:
    base = base_config("main-breast-cancer")
    point = next(point for point in points_of(base, tmp_path) if point.line == TVFL)
    trial = point.trial(0)
    first = finish(trial)
    written = (trial.path / "result.json").stat().st_mtime_ns
    assert finish(trial) == first
    assert (trial.path / "result.json").stat().st_mtime_ns == written
    assert set(first.outcome.accuracy) == {"tvfl", "tvfl_0", "tvfl_a", "tvfl_r"}
    rows = results_of([(trial, first)]).of(point)
    assert set(rows["epsilon_x"]) == {math.inf}
    gains = [one.advantage for one in first.attacks or () if one.advantage is not None]
    told = rows["advantage"].dropna().tolist() if "advantage" in rows else []
    assert sorted(told) == sorted(gains)


def test_the_worst_attack_is_the_one_that_gains_most_on_average() -> None:
    def lines(*seeds: Mapping[str, float]) -> Table:
        runs = [
            finished(0.9, attacks=[attacked(gain, adversary=who) for who, gain in seed.items()])
            for seed in seeds
        ]
        return lines_of({PLAIN: runs})

    # The highest of each seed would be 0.3 where each of the two is 0.1 on average.
    (line,) = lines({"shop": 0.3, "bank": -0.1}, {"shop": -0.1, "bank": 0.3}).rows
    assert line["labels"].mean == pytest.approx(0.1)
    assert line["features"] is None
    (cells,) = lines({"shop": 0.1, "bank": math.nan}, {"shop": 0.1, "once": 0.9}).cells
    assert cells[-2:] == ("0.900 (1 of 2 seeds)", "not applicable")


def test_the_page_holds_pictures_and_links(tmp_path: Path) -> None:
    lines = lines_of({
        SINGLE: [finished(0.9, epsilon=0.0)],
        PLAIN: [finished(0.9, attacks=[attacked(0.1)])],
        GUARDED: [finished(0.9, attacks=[attacked(0.0)])],
    })  # fmt: skip
    lines = replace(lines, title="digits <4>")
    picture = draw(tmp_path / "digits.png", lines)
    part = Part(table=lines, picture=picture, reports=[("one", "a/report.html")])
    write_comparison(tmp_path, title="All", reading="How", parts=[part])
    page = (tmp_path / "index.html").read_text("utf-8")
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert "digits &lt;4&gt;" in page
    assert 'href="a/report.html"' in page
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page


def test_pages_that_name_a_delta_name_that_of_their_configurations() -> None:
    for reading, names in ((main_job.READING, CONFIGS), (sweep.READING, sweep.CONFIGS)):
        assert "at delta 1e-5" in reading
        assert {base_config(name).delta for name in names} == {1e-5}
