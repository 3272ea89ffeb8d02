"""Zeros encrypted ahead: the same results, no process left, a killed worker is an error."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi import ecdh
from apfed_protocols.sums.homomorphic import Encrypter
from secure_apfed.config import Config
from secure_apfed.errors import ConfigError
from secure_apfed.methods.sum_end import encrypting_ahead
from secure_apfed.runs.run import run
from secure_apfed.secure_sums import check_sum
from secure_apfed.settings.training import SumSettings
from secure_apfed.workers import close_workers, open_worker, worker_pool
from tests.conftest import Children
from tests.contracts.sum_parties import parties, random_values
from tests.secure_apfed.small_runs import small_config
from tests.waiting import wait_until

SHAPE = (8, 8)


def config(**secure_sum: Any) -> Config:
    return small_config(
        data={"dataset": "digits", "views": 4, "limit": 200},
        train={"epochs": 1, "batch_size": 64, "device": "cpu"},
        secure_sum={"scheme": "bfv", **secure_sum}, guard={"mechanism": "none"},
    )  # fmt: skip


def pool_of(contributor: object) -> Any:
    return vars(contributor)["_key"][1]


@pytest.mark.parametrize("worker", [False, True])
def test_a_run_with_a_zero_pool_gives_the_same_result(
    worker: bool, own_children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_apfed.methods.sum_end.pays", lambda: worker)
    usual, ahead = run(config(), None), run(config(zero_pool=2), None)
    assert ahead.accuracy == usual.accuracy
    assert ahead.wire_bytes == pytest.approx(usual.wire_bytes, rel=0.01)
    first, second = usual.recording.transcript.opened, ahead.recording.transcript.opened
    assert first
    assert list(first) == list(second)
    assert all(torch.equal(first[step], second[step]) for step in first)
    assert not own_children()


def test_zeros_are_filled_up_to_the_level_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_apfed.methods.sum_end.pays", lambda: False)
    played = parties("bfv")
    contributor = played.contributors["passive_1"]
    assert isinstance(contributor, Encrypter)
    encrypt = encrypting_ahead(SumSettings(scheme="bfv", zero_pool=3), contributor, SHAPE)
    assert encrypt is not None
    for _ in range(2):
        encrypt()
        assert len(pool_of(contributor)) == 3
    played.add(random_values(3, SHAPE))
    assert len(pool_of(contributor)) == 2
    encrypt()
    assert len(pool_of(contributor)) == 3


def test_without_a_pool_nothing_is_encrypted_ahead() -> None:
    contributor = parties("bfv").contributors["passive_1"]
    assert encrypting_ahead(SumSettings(scheme="bfv"), contributor, SHAPE) is None
    with pytest.raises(ConfigError, match=r"zero_pool is for sums that encrypt; plain \+ pairwise"):
        check_sum(SumSettings(scheme="plain", masks="pairwise", zero_pool=1))


SCRIPT = """
import os, time
from secure_apfed.workers import open_worker
if __name__ == "__main__":
    print(open_worker().submit(os.getpid).result(60), flush=True)
    time.sleep(60)
"""


def alive(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rsplit(") ", 1)[1][0] not in "ZX"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_killed_party_leaves_no_worker(tmp_path: Path) -> None:
    (tmp_path / "party.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "party.py")], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as party:  # fmt: skip
        assert party.stdout is not None
        worker = int(party.stdout.readline())
        assert alive(worker)
        party.kill()
    wait_until(lambda: not alive(worker), "that the worker ended")


def dies_in_its_result() -> bytes:
    def half(connection: Connection, body: Any) -> None:
        os.write(connection.fileno(), len(body).to_bytes(4, "big") + bytes(body[:10]))
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send_bytes = half  # type: ignore[attr-defined]  # of this process only
    return bytes(100_000)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_half_a_result_is_an_error_and_closes() -> None:
    worker = open_worker()
    assert worker.submit(len, b"ab").result(timeout=60) == 2
    assert worker.submit(len, b"abc").result(timeout=60) == 3
    with pytest.raises(BrokenExecutor):
        worker.submit(dies_in_its_result).result(timeout=60)
    closing = threading.Thread(target=close_workers, daemon=True)
    closing.start()
    closing.join(timeout=30)
    assert not closing.is_alive()


def test_processes_find_the_same_and_a_dead_one_is_told(own_children: Children) -> None:
    scalar, digests = b"a" * 32, ecdh.digest_ids([b"%d" % k for k in range(41)], session=bytes(32))
    points = ecdh.blind(scalar, digests)
    seen = list[int]()
    with worker_pool(2) as pool:
        assert pool is not None
        found = ecdh.in_threads(
            partial(ecdh.blind, scalar), digests * 60, pool=pool, report=seen.append
        )
        assert found == points * 60
        assert seen == [820, 1640, 2460]
        processes = {pool.submit(os.getpid).result(60) for _ in range(4)}
        assert len(processes - {os.getpid()}) == 2
        os.kill(processes.pop(), signal.SIGKILL)
        with pytest.raises(LocalProtocolError, match="ended before its work was done"):
            ecdh.in_threads(partial(ecdh.multiply, scalar), points * 60, pool=pool)
    assert not own_children()
