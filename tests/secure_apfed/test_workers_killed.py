"""A worker killed in the middle of its result: an error at once, and no wait without end."""

import os
import signal
import threading
from concurrent.futures import BrokenExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from secure_apfed.workers import close_workers, open_worker


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
