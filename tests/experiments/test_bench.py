"""Benches measure the cases that are wanted; no failure ends the others; pages show the same."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from apfed_bench import footprint, parties, psi, secure_sum, training, votes
from apfed_bench.rows import Bench, Group, Row, interleave, median_ratio, row
from apfed_bench.table import (
    BENCHES,
    Measured,
    block,
    read_measured,
    renewed,
    run_bench,
    run_benches,
    write_performance,
)
from apfed_protocols.products import SumOfProducts
from secure_apfed.cli import execute
from secure_apfed.commands import bench as command
from secure_apfed.errors import ConfigError, DataError
from tests.contracts.product_parties import agreement

DOCS = Path(__file__).resolve().parents[2] / "docs"
# glob, where something is measured, and what of its arguments is seen there; psi has its own test
WANTED: dict[str, tuple[str, ModuleType, str, list[Any]]] = {
    "attacks": ("lira/16", training, "_attacks_row", ["lira/16"]),
    "audit-log": ("resume", parties, "interleave", [["resume"]]),
    "exchange": ("*", parties, "_exchanged", ["apfed_c/fmnist/2-1/b256"]),
    "footprint": ("split_nn/b8/*", footprint, "_sent", ["split_nn"]),
    "joint-prediction": (
        "summed/plain", parties, "interleave", [["concatenated", "summed/plain"]],
    ),
    "local": ("message/memory", parties, "interleave", [["message/memory"]]),
    "nvflare": ("*/round/*", parties, "_in_a_job", [[2**17]]),
    "secure-sum": ("masked/m4", secure_sum, "OurPath", ["masked"]),
    "training": ("step/tvfl/*", training, "_operations", ["step/tvfl/fmnist/2-1/b256"]),
    "transport": ("grpc/*", parties, "_apart_row", ["grpc/m3/b256"]),
    "votes": ("encrypted/*", votes, "measure", ["encrypted/10000x50"]),
}  # fmt: skip
MEASURED: Measured = {
    "bench": "psi", "source": "0", "quick": False, "cases": "*", "date": "2025-01-31",
    "load": 0.25, "stolen": 0.0123, "clock_step": 0.02,
    "machine": {"processor": "P", "cores": 2, "gpu": None, "python": "3", "torch": "2"},
    "rows": [
        {
            "case": "vole/9", "seconds": 0.0125, "peer": "spu-rr22/9", "ratio": 0.664,
            "bytes": 33_000, "rounds": 3, "peak_memory": 470_000_000, "dealt_bytes": 21,
        },
        {"case": "spu-rr22/9", "seconds": None, "peer": None, "reason": "no <spu>\nhere"},
        {"case": "spu-ecdh/9", "seconds": None, "peer": None, "reason": "no <spu>\nhere"},
    ],
}  # fmt: skip
BLOCK = """\
2025-01-31: P, 2 cores, no GPU, Python 3, torch 2, load 0.2 when it began, 1.2% stolen. \
*Ratio*: seconds over the peer's. The clock moved by 20.0 ms.

| case | seconds | peer | ratio | bytes | rounds | peak memory | dealt bytes |
| --- | --- | --- | --- | --- | --- | --- | --- |
| `vole/9` | 12.5 ms | spu-rr22/9 | 0.664 | 33.0 kB | 3 | 470 MB | 21 B |

Not measured: `spu-rr22/9`, `spu-ecdh/9`: no &lt;spu> here
"""


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
    nvflare = ModuleType("nvflare")
    nvflare.__spec__ = ModuleSpec("nvflare", None)
    monkeypatch.setitem(sys.modules, "nvflare", nvflare)
    (found,) = run_bench(name, quick=True, cases=glob)["rows"]
    assert seen == expected
    assert found["reason"] == "it failed: RuntimeError: seen"


def test_every_bench_has_such_a_test_and_cases_with_names_of_their_own() -> None:
    assert set(WANTED) | {"psi"} == set(BENCHES) >= set(read_measured(DOCS / "performance"))
    for name, bench in BENCHES.items():
        brief, cases = ([case for group in bench.groups(quick) for case in group.cases]
                        for quick in (True, False))  # fmt: skip
        assert all(len(set(each)) == len(each) > 0 for each in (brief, cases))
        with pytest.raises(ConfigError, match="'nothing' names no case of bench") as told:
            run_bench(name, cases="nothing")
        assert set(cases) <= set(str(told.value).splitlines())


def _measure(wanted: Collection[str]) -> Iterator[Row]:
    for case in wanted:
        if case == "broken":
            raise ValueError("no such thing")
        yield row(case, 1.0)
    yield row("a case that nobody asked for", 1.0)


def _bench(*cases: str, measure: Callable[[Collection[str]], Iterator[Row]] = _measure) -> Bench:
    return Bench(groups=lambda _quick: [Group(cases, measure)])


def _run_all(benches: dict[str, Bench], folder: Path | None, **changes: Any) -> list[Measured]:
    told: dict[str, Any] = {"quick": True, "cases": "*", "again": False, **changes}
    return list(run_benches(benches=benches, folder=folder, **told))


def test_groups_by_name_are_measured_where_a_case_is_named_in_full() -> None:
    groups = [Group(("a/1",), _measure), Group(("a/2", "a/3"), _measure, by_name=True)]
    benches = {"one": Bench(groups=lambda _quick: groups), "other": _bench("b")}
    for asked, expected in (("a/*", ["a/1"]), ("a/2", ["a/2"]), ("b", ["b"])):
        (found,) = _run_all(benches, None, cases=asked)
        assert [line["case"] for line in found["rows"]] == expected
    with pytest.raises(ConfigError, match=r"'a/\[23\]' names no case of any bench"):
        _run_all(benches, None, cases="a/[23]")


def test_what_fails_is_a_row_with_the_reason_and_ends_no_other(tmp_path: Path) -> None:
    silent = Bench(groups=lambda _quick: [Group(("nothing",), lambda _: [])])
    benches = {"one": _bench("a", "broken", "b"), "silent": silent, "other": _bench("c")}
    one, mute, other = _run_all(benches, tmp_path)
    assert [line["seconds"] for line in one["rows"]] == [1.0, None, None]
    assert one["rows"][1]["reason"] == "it failed: ValueError: no such thing"
    assert mute["rows"][0]["reason"] == "its bench made no row of it"
    assert [line["seconds"] for line in other["rows"]] == [1.0]
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
    monkeypatch.setattr("apfed_bench.table._source", lambda: "another")
    _run_all({"whole": whole}, tmp_path, cases="a")
    assert measured[3:] == ["a"] * 5


def test_the_command_prints_a_line_a_bench_and_fails_where_a_case_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benches = {"whole": _bench("a"), "broken": _bench("broken")}
    monkeypatch.setattr("apfed_bench.table.BENCHES", benches)
    monkeypatch.setattr(command, "NAMES", tuple(benches))
    assert execute(["bench", "all", "--json", "--output", str(tmp_path)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["bench"] for line in lines] == ["whole", "broken"]
    assert execute(["bench", "whole", "--json"]) == 0
    capsys.readouterr()
    for option in (["--again"], ["--output", str(tmp_path)]):
        assert execute(["bench", "whole", *option]) == 2
        assert "are for `bench all`" in capsys.readouterr().err
    assert execute(["bench", "exchnge"]) == 2
    assert "no bench is called 'exchnge'" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.partition(".")[0] == "apfed_bench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        sys, "path", [at for at in sys.path if not Path(at, "apfed_bench").is_dir()]
    )
    assert execute(["bench", "whole"]) == 2
    assert "run them from a checkout" in " ".join(capsys.readouterr().err.split())


def test_cases_take_turns_and_those_without_a_clock_tell_nothing() -> None:
    turns: list[str] = []
    calls = {name: partial(turns.append, name) for name in "ab"}
    seconds = interleave(calls, repetitions=3)
    assert turns == ["a", "b"] * 4
    assert {name: len(measured) for name, measured in seconds.items()} == {"a": 3, "b": 3}
    assert median_ratio([2.0, 0.0, 4.0, 30.0], [0.0, 1.0, 1.0, 10.0]) == 3.5
    with pytest.raises(RuntimeError, match="the clock did not move"):
        median_ratio([1.0, 0.0], [0.0, 1.0])


@pytest.mark.parametrize("candidates", [0, 3])
def test_the_bytes_of_sums_of_products_are_those_of_the_agreement(candidates: int) -> None:
    found = votes.measure("a case", 300, 3, 1, candidates)
    agreed = agreement(3, people=300, columns=10, labelled=3, candidates=candidates or None)
    described = SumOfProducts(agreed)
    assert found["case"] == "a case"
    labels, words = 4 * described.ring.size, described.word_bytes * sum(described.words(0))
    assert labels < found["bytes_up"] < labels + 2000
    assert words < found["bytes_down"] < words + 2000
    assert found["bytes"] == found["bytes_up"] + found["bytes_down"]
    parts = found["passive_seconds"] + found["active_seconds"] + found["aggregator_seconds"]
    assert 0 < found["seconds"] == parts < 30
    assert found["ratio"] == found["seconds"] / found["clear_seconds"]
    assert 10**7 < found["peak_memory"] < 10**9


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_prints_one_object(name: str) -> None:
    command = [sys.executable, "-m", "secure_apfed.cli", "bench", name, "--json", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = json.loads(done.stdout)
    assert printed["bench"] == name
    declared = [case for group in BENCHES[name].groups(True) for case in group.cases]
    assert [line["case"] for line in printed["rows"]] == declared
    for line in printed["rows"]:
        assert {"case", "seconds", "peer", "ratio", "bytes"} <= line.keys()
        assert line["seconds"] is not None or line.get("reason") or line["bytes"]


def test_the_tables_of_the_page_are_what_was_measured_and_name_no_paths() -> None:
    """`secure-apfed performance` writes them."""
    page = (DOCS / "performance.md").read_text("utf-8")
    assert renewed(page, read_measured(DOCS / "performance")) == page
    for path in (DOCS / "performance").glob("*.json"):
        assert path.stat().st_size < 100_000
        assert "/home/" not in path.read_text("utf-8")


def test_a_table_says_what_was_measured_and_all_else_of_the_page_stays(tmp_path: Path) -> None:
    assert block(MEASURED) == BLOCK
    (tmp_path / "psi.json").write_text(json.dumps(MEASURED))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench psi -->\nold\n<!-- end psi -->\nafter\n")
    for _ in range(2):
        write_performance(page, tmp_path)
        text = f"before\n<!-- bench psi -->\n{BLOCK}<!-- end psi -->\nafter\n"
        assert page.read_text() == text
    two = "<!-- bench psi -->\n<!-- end psi -->\n<!-- bench votes -->\n<!-- end votes -->\n"
    for wrong, says in (
        ("", "the page has no place for bench psi; write <!-- bench psi -->"),
        (two, "a place for bench votes, which was not measured"),
    ):
        with pytest.raises(DataError, match=says):
            renewed(wrong, {"psi": MEASURED})


def test_a_place_may_show_some_cases_only_and_a_machine_is_told_once() -> None:
    text = renewed("<!-- bench psi vole/* -->\n<!-- end psi -->\n", {"psi": MEASURED})
    assert text.startswith("<!-- bench psi vole/* -->\n2025-01-31, cases `vole/*`: P, 2 cores")
    assert "Not measured" not in text
    assert renewed(text, {"psi": MEASURED}) == text
    assert block(MEASURED, above=MEASURED["machine"]).startswith("2025-01-31: there, load 0.2")


@pytest.mark.parametrize("change", [{"bench": "none"}, {"rows": [[]]}, {"machine": 1}])
def test_a_file_of_something_else_is_an_error(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no figures"):
        read_measured(tmp_path)
    (tmp_path / "psi.json").write_text(json.dumps(copy.deepcopy(MEASURED) | change))
    with pytest.raises(DataError, match=r"psi\.json is not what a bench wrote"):
        read_measured(tmp_path)


def test_psi_is_measured_by_its_own() -> None:
    assert BENCHES["psi"] is psi.BENCH
