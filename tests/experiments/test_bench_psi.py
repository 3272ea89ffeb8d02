"""The bench of set intersections: its rows, and peers that are not there."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from apfed_bench import psi, psi_case, rows
from apfed_bench.table import run_bench
from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError
from tests.conftest import Children
from tests.waiting import LONG_S

FIELDS = {"seconds", "bytes", "rounds", "peak_memory", "speedup_vs_openmined", "floor_seconds"}


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECURE_APFED_OPENMINED_PYTHON", "/bin/false")
    monkeypatch.setenv("SECURE_APFED_SPU_PYTHON", "/no/such/python")


def test_rows_of_one_size_and_absent_peers_with_the_reason() -> None:
    found = {row["case"]: row for row in psi.measure(300, 1)}
    assert list(found) == [f"{case}/300" for case in psi_case.CASES]
    assert all(set(row) >= FIELDS for row in found.values())
    ours = [("circuit/300", 16), ("circuit-crypten/300", 16), ("ecdh/300", 3)]
    for case, rounds in ours if find_spec("crypten") else ours[::2]:
        row = found[case]
        assert 0 < row["seconds"] < 60
        assert row["rounds"] == rounds
        assert 10**7 < row["peak_memory"] < 3 * 10**9  # three parties import torch, CUDA or not
        assert row["speedup_vs_openmined"] is None
    assert found["circuit/300"]["floor_seconds"] is None
    assert 0 < found["ecdh/300"]["floor_seconds"] < 60
    assert found["circuit-crypten/300"]["peer"] == "circuit/300"
    # 300 IDs of 32 bytes from each side, 300 tags of 16 bytes, 150 places of 4, four headers
    assert found["ecdh/300"]["bytes"] == 2 * 300 * 32 + 300 * 16 + 150 * 4 + 4 * 22
    for case, module in (("openmined/300", "private_set_intersection"), ("spu-rr22/300", "spu")):
        assert found[case]["seconds"] is None
        assert found[case]["reason"].startswith(f"{module} cannot be imported here; install it")
    assert "/no/such/python" in found["spu-rr22/300"]["reason"]
    assert "reason" not in found["circuit/300"]


def test_ten_million_are_measured_by_name_and_without_rivals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, int]] = []

    def run(case: str, size: int) -> dict[str, float]:
        ran.append((case, size))
        return {"seconds": 40.0, "cpu_seconds": 20.0, "peak_party": 2 * 10**9}

    monkeypatch.setattr(psi, "_run", run)
    (row,) = run_bench("psi", cases="vole/10000000")["rows"]
    assert ran == [("vole", 10_000_000)]
    assert (row["seconds"], row["peer"], row["ratio"]) == (40.0, None, None)
    assert (row["cpu_seconds"], row["peak_party"]) == (20.0, 2 * 10**9)


@pytest.mark.slow
def test_a_peer_that_fails_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: str, size: int) -> dict[str, float]:
        if case.startswith("spu"):
            raise RuntimeError(f"{case}/{size} failed: a long story\nit waited in vain")
        return {"seconds": 2.0}

    monkeypatch.setattr(psi, "_run", run)
    monkeypatch.setattr(psi, "_why_missing", lambda case: "")
    measured = {row["case"]: row for row in psi.measure(100, 2)}
    assert measured["spu-rr22/100"]["reason"] == "it waited in vain"
    assert (measured["vole/100"]["seconds"], measured["vole/100"]["speedup_vs_rr22"]) == (2.0, None)
    monkeypatch.setattr(psi, "_PEERS", {})
    with pytest.raises(RuntimeError, match="spu-rr22/100 failed"):  # our own must not fail
        list(psi.measure(100, 1))


def test_without_crypten_its_case_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise LocalProtocolError("install CrypTen")

    monkeypatch.setattr(rows, "load_crypten", absent)
    monkeypatch.setattr(psi, "_run", lambda case, size: {"seconds": 1.0})
    found = {row["case"]: row for row in psi.measure(100, 1)}
    assert found["circuit-crypten/100"]["seconds"] is None
    assert found["circuit-crypten/100"]["reason"] == "install CrypTen"


@pytest.mark.slow
def test_a_peer_that_can_be_imported_is_measured_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "python"
    found = {"seconds": 4.0, "bytes": 1, "rounds": 2, "peak_memory": 3, "common": 50}
    stand_in.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("SECURE_APFED_OPENMINED_PYTHON", str(stand_in))
    measured = {row["case"]: row for row in psi.measure(100, 1)}
    assert measured["openmined/100"]["speedup_vs_openmined"] == 1.0
    ours = measured["circuit/100"]
    assert ours["speedup_vs_openmined"] == pytest.approx(4.0 / ours["seconds"])
    measured = {row["case"]: row for row in psi.measure(80, 1)}
    assert "found 50 IDs, not 40" in measured["openmined/80"]["reason"]


def test_a_failing_case_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"circuit/-5 failed: .*"):
        psi._run("circuit", -5)


@pytest.mark.parametrize(("protocol", "killed"), [("circuit", 0), ("ecdh", 1)])
def test_a_party_that_dies_ends_the_case_soon(
    protocol: str, killed: int, own_children: Children
) -> None:
    with ThreadPoolExecutor(1) as pool:
        case = pool.submit(psi_case._ours, protocol, 100_000)
        try:
            while len(parties := own_children()) < 2:
                assert not case.done()
            sorted(parties, key=lambda party: party.pid or 0)[killed].kill()
            with pytest.raises(RuntimeError, match=r"^(hub|member) ended without a result"):
                case.result(LONG_S)
        finally:
            for party in own_children():
                party.kill()
                party.join()


def test_rounds_do_not_depend_on_who_is_slow() -> None:
    """What comes before a role waits for it kept nobody waiting."""

    class Slow:
        finished, awaited = False, ["dealer"]

        def receive(self, sender: str, _body: bytes) -> list[Outgoing]:
            self.awaited = ["hub"]
            return [Outgoing(f"answer to {sender}", b"")]

    counted = psi_case._Counted(Slow())
    assert list(counted.receive("hub", b"\0\0\0\7")) == []
    first, second = counted.receive("dealer", b"\0\0\0\6")
    assert (first.receiver, first.body) == ("answer to dealer", b"\0\0\0\7")
    assert (second.receiver, second.body) == ("answer to hub", b"\0\0\0\x08")


def test_a_glob_measures_its_cases_and_what_they_are_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def run(case: str, size: int) -> dict[str, object]:
        ran.append(f"{case}/{size}")
        return {"seconds": 1.0, "bytes": 1, "rounds": 1, "peak_memory": 1}

    monkeypatch.setattr(psi, "_run", run)
    monkeypatch.setattr(psi, "_why_missing", lambda case: "")
    result = run_bench("psi", quick=True, cases="circuit-crypten/1000")
    assert [row["case"] for row in result["rows"]] == ["circuit-crypten/1000"]
    assert set(ran) == {"circuit-crypten/1000", "circuit/1000", "spu-rr22/1000"}
    assert 0 <= result["stolen"] <= 1
