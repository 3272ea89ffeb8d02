"""Processes beside a party: the same results, none left behind, a killed one is an error."""

import os
import signal
import subprocess
import sys
from concurrent.futures import BrokenExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi import ecdh
from secure_apfed.workers import worker_pool
from tests.conftest import Children
from tests.waiting import wait_until

SCRIPT = """
import os, time
from secure_apfed.workers import worker_pool
if __name__ == "__main__":
    with worker_pool(2) as pool:
        print(pool.submit(os.getpid).result(60), flush=True)
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
    with worker_pool(2) as pool:
        assert pool is not None
        assert pool.submit(len, b"ab").result(timeout=60) == 2
        assert pool.submit(len, b"abc").result(timeout=60) == 3
        with pytest.raises(BrokenExecutor):
            pool.submit(dies_in_its_result).result(timeout=60)


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
