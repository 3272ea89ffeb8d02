"""Benches print one JSON object in one form; what they measure stays out of the tests."""

import json
import subprocess
import sys

import pytest

from apfed_experiments.bench import BENCHES
from apfed_experiments.bench.rows import Row, interleave, median_ratio


def test_cases_take_turns() -> None:
    turns: list[str] = []
    seconds = interleave(
        {name: lambda name=name: turns.append(name) for name in "ab"},  # type: ignore[misc]  # the default binds the name
        repetitions=3,
    )
    assert turns == ["a", "b"] * 4
    assert {name: len(measured) for name, measured in seconds.items()} == {"a": 3, "b": 3}
    assert median_ratio([2.0, 4.0, 30.0], [1.0, 1.0, 10.0]) == 3


def test_turns_in_which_the_clock_stood_still_tell_nothing() -> None:
    assert median_ratio([2.0, 0.0, 4.0, 30.0], [0.0, 1.0, 1.0, 10.0]) == 3.5
    with pytest.raises(RuntimeError, match="the clock did not move"):
        median_ratio([1.0, 0.0], [0.0, 1.0])


def test_a_row_is_flat() -> None:
    row = Row(case="c", seconds=None, peer="p", more={"reason": "not installed"})
    assert row.as_json() == {
        "case": "c", "seconds": None, "peer": "p", "ratio": None, "bytes": None,
        "reason": "not installed",
    }  # fmt: skip


def test_an_unknown_bench_is_named() -> None:
    command = [sys.executable, "-m", "secure_apfed.cli", "bench", "exchnge"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no bench is called 'exchnge'" in done.stderr
    assert "exchange" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_prints_one_object(name: str) -> None:
    command = [sys.executable, "-m", "secure_apfed.cli", "bench", name, "--json", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = json.loads(done.stdout)
    assert printed["bench"] == name
    declared = [case for group in BENCHES[name].groups(True) for case in group.cases]
    assert [row["case"] for row in printed["rows"]] == declared
    for row in printed["rows"]:
        assert {"case", "seconds", "peer", "ratio", "bytes"} <= row.keys()
        assert row["seconds"] is not None or row.get("reason") or row["bytes"]
