"""Benches measure the cases that are wanted, and no failure ends the others."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from apfed_experiments.bench import (
    BENCHES,
    Measured,
    footprint,
    parties,
    run_bench,
    run_benches,
    secure_sum,
    training,
    votes,
)
from apfed_experiments.bench.rows import Bench, Group, Row
from secure_apfed.cli import execute
from secure_apfed.commands import bench as command
from secure_apfed.errors import ConfigError

# glob, where something is measured, and what of its arguments is seen there; psi has its own test
WANTED: dict[str, tuple[str, ModuleType, str, list[Any]]] = {
    "attacks": ("lira/16", training, "_attacks_row", [16]),
    "audit-log": ("resume", parties, "interleave", [["resume"]]),
    "exchange": ("*", parties, "_exchanged", ["apfed_c/fmnist/2-1/b256"]),
    "footprint": ("split_nn/b8/*", footprint, "_sent", ["split_nn"]),
    "joint-prediction": (
        "summed/plain", parties, "interleave", [["concatenated", "summed/plain"]],
    ),
    "local": ("message/memory", parties, "interleave", [["message/memory"]]),
    "nvflare": ("*/round/*", parties, "_in_a_job", [[2**17]]),
    "secure-sum": ("masked/m4", secure_sum, "OurPath", ["masked"]),
    "training": ("step/tvfl/*", training, "_operations", ["tvfl"]),
    "transport": ("grpc/*", parties, "_apart_row", ["grpc/m3/b256"]),
    "votes": ("encrypted/*", votes, "measure", [10_000]),
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_cases_that_are_not_wanted_are_not_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    glob, module, function, expected = WANTED[name]
    seen: list[Any] = []

    def see(first: Any, *_: object, **__: object) -> None:
        seen.append(list(first) if isinstance(first, dict) else first)
        raise RuntimeError("seen")

    monkeypatch.setattr(module, function, see)
    monkeypatch.setattr(parties, "_why_no_nvflare", lambda: "")
    rows = run_bench(name, quick=True, cases=glob)["rows"]
    assert seen == expected
    assert len(rows) == 1
    assert rows[0]["reason"] == "it failed: RuntimeError: seen"


def test_every_bench_has_such_a_test() -> None:
    assert set(WANTED) | {"psi"} == set(BENCHES)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", BENCHES)
def test_cases_have_names_of_their_own(name: str, quick: bool) -> None:
    cases = [case for group in BENCHES[name].groups(quick) for case in group.cases]
    assert len(set(cases)) == len(cases) > 0


@pytest.mark.parametrize("name", BENCHES)
def test_a_glob_without_cases_is_told_which_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="'nothing' names no case of bench") as told:
        run_bench(name, quick=True, cases="nothing")
    for group in BENCHES[name].groups(True):
        assert set(group.cases) <= set(str(told.value).splitlines())


def _measure(wanted: Collection[str]) -> Iterator[Row]:
    for case in wanted:
        if case == "broken":
            raise ValueError("no such thing")
        yield Row(case=case, seconds=1.0)


def _bench(*cases: str, measure: Callable[[Collection[str]], Iterator[Row]] = _measure) -> Bench:
    return Bench(groups=lambda _quick: [Group(cases, measure)])


def test_groups_by_name_are_measured_where_a_case_is_named_in_full() -> None:
    groups = [Group(("a/1",), _measure), Group(("a/2", "a/3"), _measure, by_name=True)]
    bench = {"one": Bench(groups=lambda _quick: groups)}
    for asked, expected in (("*", ["a/1"]), ("a/*", ["a/1"]), ("a/2", ["a/2"])):
        (found,) = _run_all(bench, None, cases=asked)
        assert [row["case"] for row in found["rows"]] == expected
    with pytest.raises(ConfigError, match=r"'a/\[23\]' names no case"):
        _run_all(bench, None, cases="a/[23]")


def _run_all(benches: dict[str, Bench], folder: Path | None, **changes: Any) -> list[Measured]:
    told: dict[str, Any] = {"quick": True, "cases": "*", "again": False, **changes}
    return list(run_benches(benches=benches, folder=folder, **told))


def test_what_fails_is_a_row_with_the_reason_and_ends_no_other(tmp_path: Path) -> None:
    silent = Bench(groups=lambda _quick: [Group(("nothing",), lambda _: [])])
    benches = {"one": _bench("a", "broken", "b"), "silent": silent, "other": _bench("c")}
    one, mute, other = _run_all(benches, tmp_path)
    assert [row["seconds"] for row in one["rows"]] == [1.0, None, None]
    assert one["rows"][1]["reason"] == "it failed: ValueError: no such thing"
    assert mute["rows"][0]["reason"] == "its bench made no row of it"
    assert [row["seconds"] for row in other["rows"]] == [1.0]
    assert {path.name for path in tmp_path.iterdir()} == {"one.json", "silent.json", "other.json"}
    assert json.loads((tmp_path / "one.json").read_text()) == one


def test_what_is_there_is_taken_unless_it_failed_or_was_measured_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def count(wanted: Collection[str]) -> Iterator[Row]:
        measured.extend(wanted)
        return _measure(wanted)

    whole, broken = _bench("a", measure=count), _bench("broken", measure=count)
    _run_all({"whole": whole, "broken": broken}, tmp_path)
    first = _run_all({"whole": whole, "broken": broken}, tmp_path)
    assert measured == ["a", "broken", "broken"]
    assert first[0]["rows"][0]["case"] == "a"
    (tmp_path / "whole.json").write_text('{"rows": [')
    for changes in ({}, {"quick": False}, {"cases": "a"}, {"cases": "a", "again": True}):
        _run_all({"whole": whole}, tmp_path, **changes)
    monkeypatch.setattr("apfed_experiments.bench._source", lambda: "another")
    _run_all({"whole": whole}, tmp_path, cases="a")
    assert measured[3:] == ["a"] * 5


def test_all_leaves_out_benches_without_wanted_cases() -> None:
    benches = {"one": _bench("a"), "other": _bench("b")}
    (only,) = _run_all(benches, None, cases="b")
    assert only["bench"] == "other"
    with pytest.raises(ConfigError, match="'c' names no case of any bench"):
        _run_all(benches, None, cases="c")


def test_rows_that_nobody_asked_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(case=case, seconds=1.0) for case in ("ours", "peer")]
    bench = Bench(groups=lambda _quick: [Group(("ours", "peer"), lambda _: rows)])
    monkeypatch.setattr("apfed_experiments.bench.BENCHES", {"two": bench})
    found = run_bench("two", quick=True, cases="ours")
    assert [row["case"] for row in found["rows"]] == ["ours"]


def test_the_command_prints_a_line_a_bench_and_fails_where_a_case_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benches = {"whole": _bench("a"), "broken": _bench("broken")}
    monkeypatch.setattr("apfed_experiments.bench.BENCHES", benches)
    monkeypatch.setattr(command, "NAMES", tuple(benches))
    assert execute(["bench", "all", "--json", "--output", str(tmp_path)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["bench"] for line in lines] == ["whole", "broken"]
    assert execute(["bench", "whole", "--json"]) == 0
    capsys.readouterr()
    for option in (["--again"], ["--output", str(tmp_path)]):
        assert execute(["bench", "whole", *option]) == 2
        assert "are for `bench all`" in capsys.readouterr().err
