"""Benches measure the cases that are wanted; no failure ends the others; pages show the same."""

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from apfed_bench import __main__ as command
from apfed_bench import apart, parties, psi_case, rows, secure_sum, tables, user
from apfed_bench.rows import Bench, Group, Row, compute_median_ratio, make_row, time_calls_in_turns
from apfed_bench.table import BENCHES, format_bench, load_bench_results, run_benches
from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import ConfigError, DataError
from tests.conftest import Children
from tests.refusals import list_unrefused
from tests.secure_apfed.small_runs import read_stderr
from tests.waiting import LONG_S

STORED = Path(__file__).resolve().parents[2] / "docs" / "performance"
# glob, where something is measured, and what of its arguments is seen there
WANTED: dict[str, tuple[str, ModuleType, str, list[Any]]] = {
    "exchange": ("apfed_c/*", parties, "_measure_exchange", ["apfed_c/fmnist/2-1/b256"]),
    "ids": ("encode/100000", user, "_measure_encoding", ["encode/100000"]),
    "protected": ("masked/guard/b64", parties, "_measure_protected", [["masked/guard/b64"]]),
    "psi": ("circuit-crypten/1000", apart, "_run_case", ["circuit"]),
    "secure-sum": ("masked/m4", secure_sum, "OurSumRun", ["masked"]),
    "startup": ("predict", user, "_measure_starts", [1]),
    "tables": ("mapped/20000", tables, "compare_readings", [20_000]),
    "transport": ("grpc/*", parties, "_measure_transport", ["grpc/m3/b256"]),
    "user": ("votes/csv/*", user, "_measure_run", ["votes"]),
}


def _run(name: str, cases: str) -> dict[str, Row]:
    (found,) = run_benches([name], quick=True, case_glob=cases)
    return {line["case"]: line for line in found["rows"]}


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("name", BENCHES)
def test_cases_that_are_not_wanted_are_not_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    glob, module, function, expected = WANTED[name]
    seen: list[Any] = []

    def see(first: Any, *_: object, **__: object) -> None:
        seen.append(first)
        raise RuntimeError("seen")

    monkeypatch.setattr(module, function, see)
    monkeypatch.setattr(apart, "find_crypten_error", lambda: "")
    # Data that only somebody who measures needs.
    monkeypatch.setattr(parties, "_make_image_run", lambda *_, **__: (None, None))
    (found,) = _run(name, glob).values()
    assert seen == expected
    assert found["reason"] == "it failed: RuntimeError: seen"


def test_every_bench_is_stored() -> None:
    timed_by_hand = {"commands"}
    assert {path.stem for path in STORED.iterdir()} == set(BENCHES) | timed_by_hand


@pytest.mark.parametrize(("name", "bench"), BENCHES.items())
def test_cases_have_names_of_their_own(name: str, bench: Any) -> None:
    brief, cases = (
        [case for group in bench.make_groups(quick) for case in group.cases]
        for quick in (True, False)
    )
    assert all(len(set(each)) == len(each) > 0 for each in (brief, cases))
    with pytest.raises(ConfigError, match="'nothing' names no case of bench") as told:
        list(run_benches([name], case_glob="nothing"))
    assert set(cases) <= set(str(told.value).splitlines())


def _measure(wanted: Collection[str]) -> Iterator[Row]:
    for case in wanted:
        if case == "broken":
            raise ValueError("no such thing")
        yield make_row(case, 1.0)
    yield make_row("a case that nobody asked for", 1.0)


def exit_code(*arguments: str) -> object:
    """Return the exit code of `python -m apfed_bench` with these arguments."""
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    return ended.value.code


def test_what_fails_is_a_row_with_the_reason_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {
        "one": Group(("a", "broken", "b"), _measure),
        "silent": Group(("nothing",), lambda _: []),
        "other": Group(("c",), _measure),
    }
    benches = {
        name: Bench(make_groups=partial(lambda of, _: [of], group))
        for name, group in groups.items()
    }
    monkeypatch.setattr("apfed_bench.table.BENCHES", benches)
    monkeypatch.setattr(command, "NAMES", tuple(benches))
    assert exit_code("all", "--json", "--output", str(tmp_path)) == 1
    one, silent, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["seconds"] for line in one["rows"]] == [1.0, None, None]
    assert one["rows"][1]["reason"] == "it failed: ValueError: no such thing"
    assert silent["rows"][0]["reason"] == "its bench made no row of it"
    assert [line["seconds"] for line in other["rows"]] == [1.0]
    assert {path.stem for path in tmp_path.iterdir()} == set(benches)
    assert json.loads((tmp_path / "one.json").read_text()) == one
    assert exit_code("other") == 0
    assert "its processor time was stolen" in capsys.readouterr().out
    assert exit_code("othr") == 2
    assert "no bench is called 'othr'" in read_stderr(capsys)
    assert exit_code("one", "--only", "nothing") == 2
    assert "'nothing' names no case of bench one" in read_stderr(capsys)


def test_cases_take_turns_and_those_without_a_clock_tell_nothing() -> None:
    turns: list[str] = []
    calls = {name: partial(turns.append, name) for name in "ab"}
    ticks = map(float, itertools.accumulate(range(16)))
    seconds = time_calls_in_turns(calls, repetitions=3, clock=lambda: next(ticks))
    assert turns == ["a", "b"] * 4
    assert seconds == {"a": [3.0, 7.0, 11.0], "b": [5.0, 9.0, 13.0]}
    assert compute_median_ratio([2.0, 0.0, 4.0, 30.0], [0.0, 1.0, 1.0, 10.0]) == 3.5
    with pytest.raises(RuntimeError, match="the clock did not move"):
        compute_median_ratio([1.0, 0.0], [0.0, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_prints_one_object(name: str) -> None:
    call = [sys.executable, "-m", "apfed_bench", name, "--json", "--quick"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    found = {line["case"]: line for line in json.loads(done.stdout)["rows"]}
    assert list(found) == [
        case for group in BENCHES[name].make_groups(True) for case in group.cases
    ]
    for line in found.values():
        assert {"case", "seconds", "peer", "ratio", "bytes"} <= line.keys()
        assert line["seconds"] is not None or line.get("reason") or line["bytes"]
    if name != "secure-sum":
        return
    most_bytes = {
        "ckks": 16.1,
        "ckks-fast": 8.1,
        "bfv+masks": 7.6,
        "masked": 4.1,
        "masked-recovery": 4.1,
        "plain": 4.1,
        # eight bytes of a share, and the frames around it and the keys of the others' shares
        **({"crypten": 8.1} if importlib.util.find_spec("crypten") else {}),
    }
    for case, most in most_bytes.items():
        assert found[f"{case}/m4"]["bytes_per_value"] <= most
        assert found[f"{case}/m4"]["ratio"] > 1 == found["tutorial/m4"]["ratio"]


def test_what_no_bench_wrote_is_refused(tmp_path: Path) -> None:
    measured = load_bench_results(STORED / "psi.json")
    path = tmp_path / "psi.json"
    for line in measured["rows"]:
        line["reason"] = "no <clock>\nhere"
    assert format_bench(measured, "vole/*").endswith(
        "`vole/100000`, `vole/1000000`: no &lt;clock> here"
    )

    def load_with(key: str, value: object) -> object:
        path.write_text(json.dumps(measured | {key: value}))
        return load_bench_results(path)

    said = r"psi\.json is not what a bench wrote"
    cases = [(said, "bench", "none"), (said, "rows", [[]]), (said, "machine", 1)]
    assert list_unrefused(DataError, load_with, cases) == []
    assert not any("/home/" in stored.read_text("utf-8") for stored in STORED.iterdir())


def test_without_crypten_its_cases_are_rows_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> None:
        raise LocalProtocolError("install CrypTen")

    monkeypatch.setattr(rows, "load_crypten", absent)
    monkeypatch.setattr(secure_sum, "_SHAPE_BY_PASSIVE_COUNT", {4: (4, 8)})
    monkeypatch.setattr(apart, "_run_case", lambda case, size: {"seconds": 1.0})
    sums = _run("secure-sum", "*[an]/m4")
    sets = _run("psi", "circuit*/1000")
    missing = {case for case, line in (sums | sets).items() if "reason" in line}
    assert missing == {"crypten/m4", "circuit-crypten/1000"}
    assert sums["crypten/m4"]["reason"] == sets["circuit-crypten/1000"]["reason"]
    assert sums["plain/m4"]["seconds"] > 0


INTERSECTIONS = ("circuit", "ecdh", "ecdh-buckets", "ot", "ot-buckets", "vole", "spu-rr22")


@pytest.mark.slow
def test_intersections_of_one_size_and_an_absent_peer_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECURE_APFED_SPU_PYTHON", "/no/such/python")
    cases = [f"{case}/300" for case in INTERSECTIONS]
    found = {line["case"]: line for line in apart.compare_intersections(300, 1, cases)}
    assert list(found) == cases
    assert "/no/such/python" in found.pop("spu-rr22/300")["reason"]
    for line in found.values():
        assert 0 < line["seconds"] < 60
        assert 0 < line["processor_seconds"] < 60
        assert 10**7 < line["peak_memory"] < 3 * 10**9  # three parties import torch, CUDA or not
    assert (found["circuit/300"]["peer"], found["circuit/300"]["ratio"]) == ("spu-rr22/300", None)
    assert 0 < found["ecdh/300"]["floor_seconds"] < 60
    # 300 IDs of 32 bytes from each side, 300 tags of 16 bytes, 150 places of 4, four headers
    assert found["ecdh/300"]["bytes"] == 2 * 300 * 32 + 300 * 16 + 150 * 4 + 4 * 22
    assert found["vole/300"]["dealt_bytes"] > 0


def test_a_peer_may_fail_and_what_is_ours_must_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = tmp_path / "python"
    found = {"seconds": 4.0, "bytes": 1, "common": 50}
    stand_in.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("SECURE_APFED_SPU_PYTHON", str(stand_in))
    real = apart._run_case
    monkeypatch.setattr(
        apart,
        "_run_case",
        lambda case, size: real(case, size) if case == "spu-rr22" else {"seconds": 2.0},
    )
    (ours,) = apart.compare_intersections(100, 2, ["vole/100"])
    assert (ours["peer"], ours["ratio"]) == ("spu-rr22/100", 0.5)
    (peer,) = apart.compare_intersections(80, 1, ["spu-rr22/80"])
    assert "found 50 IDs, not 40" in peer["reason"]
    with pytest.raises(RuntimeError, match=r"circuit/-5 failed: .*"):
        real("circuit", -5)


def test_a_party_that_dies_ends_the_case_soon(own_children: Children) -> None:
    with ThreadPoolExecutor(1) as pool:
        case = pool.submit(psi_case._run_over_pipes, "circuit", 100_000)
        try:
            while len(parties := own_children()) < 2:
                assert not case.done()
            min(parties, key=lambda party: party.pid or 0).kill()
            with pytest.raises(RuntimeError, match=r"^(hub|member) ended without a result"):
                case.result(LONG_S)
        finally:
            for party in own_children():
                party.kill()
                party.join()
