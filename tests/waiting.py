"""Tests wait for what is to happen, and never for a time: the bound is for what never does."""

import socket
import time
from collections.abc import Callable

LONG_S = 200.0
"""More than anything takes on a busy machine, and less than a test may take in all."""


def wait_until(so: Callable[[], object], subject: str = "it", within_s: float = LONG_S) -> None:
    deadline = time.monotonic() + within_s
    while not so():
        assert time.monotonic() < deadline, f"{subject} did not happen within {within_s:g} s"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
