"""Points in several threads: same results, really at once, and over when it is called off."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi import ecdh
from apfed_protocols.psi.ecdh import in_threads, split_points
from tests.waiting import LONG_S

SCALAR = b"a" * 32
DIGESTS = ecdh.digest_ids([b"%d" % k for k in range(41)], session=bytes(32))
POINTS = ecdh.blind_digests(SCALAR, DIGESTS, threads=1)


def test_each_multiplication_is_that_of_another_library() -> None:
    key = X25519PrivateKey.from_private_bytes(SCALAR)
    one_by_one = [
        key.exchange(X25519PublicKey.from_public_bytes(point)) for point in ecdh.to_curve(DIGESTS)
    ]
    assert split_points(POINTS) == one_by_one
    random = np.random.default_rng(3).bytes(32 * 200)
    assert split_points(ecdh.multiply_points(SCALAR, random)) == [
        key.exchange(X25519PublicKey.from_public_bytes(point)) for point in split_points(random)
    ]


@pytest.mark.parametrize(("count", "most"), [(0, 2), (1, None), (3, 2), (40, 1), (40, None)])
def test_many_small_pieces_come_back_in_order(
    count: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ecdh, "_POINTS_OF_A_PIECE", 3)
    some, seen = DIGESTS[: 32 * count], list[int]()
    found = ecdh.blind_digests(SCALAR, some, threads=most, report=seen.append)
    assert found == POINTS[: 32 * count]
    assert seen == sorted(seen)
    assert seen[-1] == count
    again = ecdh.multiply_points(SCALAR, found, threads=most)
    assert again == ecdh.multiply_points(SCALAR, found, threads=1)


@pytest.fixture
def no_switching() -> Iterator[None]:
    """A thread gives Python's lock away of its own accord only."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_switching")
def test_a_multiplication_leaves_pythons_lock_to_others() -> None:
    done: list[str] = []
    points = split_points(POINTS) * 100

    def multiply(name: str) -> None:
        for point in points:
            ecdh.multiply(SCALAR, point)
            done.append(name)

    two = [threading.Thread(target=multiply, args=(name,)) for name in "ab"]
    for thread in two:
        thread.start()
    for thread in two:
        thread.join(60)
    assert len(done) == 2 * len(points)
    # with the lock kept all the time, one would be over before the other began
    assert sum(one != following for one, following in itertools.pairwise(done)) > 5


@pytest.mark.parametrize(("most", "expected"), [(None, 3), (2, 2), (1, 1), (9, 7)])
def test_long_lists_use_a_thread_for_each_processor(
    most: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(ecdh, "_POINTS_OF_A_PIECE", 6)
    seen: set[int] = set()
    together = threading.Barrier(expected)

    def work(blocks: bytes) -> bytes:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait(20)
        return blocks

    assert in_threads(work, DIGESTS, threads=most) == DIGESTS
    assert len(seen) == expected
    assert (threading.get_ident() in seen) == (expected == 1)


def test_work_that_is_called_off_stops_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ecdh, "_POINTS_OF_A_PIECE", 3)
    begun: list[int] = []

    def slow(blocks: bytes) -> bytes:
        begun.append(1)
        # All of them would take minutes; the first few are soon reported.
        time.sleep(0.01 if len(begun) < 50 else 1.0)
        return blocks

    def call_off(_done: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        in_threads(slow, DIGESTS * 50, threads=2, report=call_off)
    assert len(begun) < 684  # of them
    assert threading.active_count() == before


def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(RuntimeError, match="library error"):
        ecdh.multiply_points(SCALAR, bytes(32) * 5000, threads=2)


def test_no_threads_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="threads is at least 1, got 0"):
        in_threads(bytes, DIGESTS, threads=0)


def test_a_party_that_is_told_to_end_ends_soon() -> None:
    script = (
        "import signal\n"
        "from apfed_protocols.psi import ecdh\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def tell(done):\n"
        "    print(done, flush=True)\n"
        "ecdh.blind_digests(bytes(32), b'1' * 32 * 300_000, threads=2, report=tell)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as party:
        assert party.stdout is not None
        assert party.stdout.readline()
        os.kill(party.pid, signal.SIGINT)
        done, complaint = party.communicate(timeout=LONG_S)
    assert "300000" not in done.split()
    assert complaint.count("Traceback") == 1
