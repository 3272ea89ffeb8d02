"""A worker killed in the middle of its result: an error at once, and no wait without end."""

import os
import signal
import threading
from concurrent.futures import BrokenExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi import ecdh
from secure_apfed.workers import close_workers, open_worker, worker_pool
from tests.conftest import Children


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
