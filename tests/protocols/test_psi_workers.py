"""Helper interpreters that multiply points: same results, kept, ended, and errors when they end."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protocols.errors import LocalProtocolError
from protocols.psi import curve, ladder, workers
from protocols.psi.ecdh import EcdhIntersection
from protocols.psi.interface import IntersectionAgreement
from protocols.psi.workers import Workers

SCALAR = b"a" * 32
DIGESTS = curve.digest_ids([b"%d" % k for k in range(41)], session=bytes(32))
POINTS = curve.blind_digests(SCALAR, DIGESTS)


def test_helpers_compute_the_same() -> None:
    two = Workers(2)
    assert two.work(ladder.DIGESTS, SCALAR, DIGESTS) == POINTS
    assert two.work(ladder.POINTS, SCALAR, POINTS) == curve.multiply_points(SCALAR, POINTS)
    two.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
def test_many_small_jobs_come_back_in_order(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_POINTS_OF_A_JOB", 3)
    some, seen = DIGESTS[: 32 * count], list[int]()
    helpers = Workers(2)
    assert helpers.work(ladder.DIGESTS, SCALAR, some, seen.append) == POINTS[: 32 * count]
    assert seen == sorted(seen)
    assert seen[-1] == count
    helpers.close()


def test_helpers_stay_until_they_are_closed() -> None:
    helpers = Workers(2)
    helpers.work(ladder.DIGESTS, SCALAR, DIGESTS)
    first = [helper.pid for helper in helpers._helpers]
    helpers.work(ladder.DIGESTS, SCALAR, DIGESTS)
    assert [helper.pid for helper in helpers._helpers] == first
    assert len(first) == 2
    assert all(map(is_running, first))
    helpers.close()
    assert not any(map(is_running, first))
    assert helpers.work(ladder.DIGESTS, SCALAR, DIGESTS) == POINTS
    helpers.close()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_helpers_that_nobody_holds_any_longer_end() -> None:
    helpers = Workers(2)
    helpers.work(ladder.DIGESTS, SCALAR, DIGESTS)
    processes = [helper.pid for helper in helpers._helpers]
    del helpers
    gc.collect()
    assert not any(map(is_running, processes))


def test_an_intersection_that_is_over_leaves_no_helper() -> None:
    protocol = EcdhIntersection(IntersectionAgreement(session="s"), processes=2)
    ids = [b"%d" % k for k in range(9)]
    hub, member = protocol.hub("hub", ["p"], ids), protocol.member("p", "hub", ids)
    (to_member,), (to_hub,) = hub.start(), member.start()
    ends = [role._side._workers for role in (hub, member)]
    processes = [helper.pid for end in ends for helper in end._helpers]
    assert len(processes) == 4
    hub.receive("p", to_hub.body)
    (tags,) = member.receive("hub", to_member.body)
    assert not any(map(is_running, processes))
    (opened,) = hub.receive("p", tags.body)
    member.receive("hub", opened.body)
    assert [ids[row] for row in hub.rows] == [ids[row] for row in member.rows]


def test_helpers_need_no_main_guard_of_the_caller_and_end_with_it() -> None:
    script = (
        "from protocols.psi import curve, ladder\n"
        "from protocols.psi.workers import Workers\n"
        "two = Workers(2)\n"
        "d = curve.digest_ids([b'%d' % k for k in range(9)], session=bytes(32))\n"
        "p = curve.blind_digests(b'a' * 32, d, workers=two)\n"
        "assert p == curve.blind_digests(b'a' * 32, d)\n"
        "print(*(helper.pid for helper in two._helpers))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert done.stderr == ""
    processes = [int(word) for word in done.stdout.split()]
    assert len(processes) == 2
    assert not any(map(is_running, processes))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_helpers_end_when_the_party_is_killed() -> None:
    script = (
        "import sys, time\n"
        "from protocols.psi import ladder\n"
        "from protocols.psi.workers import Workers\n"
        "two = Workers(2)\n"
        "two.work(ladder.DIGESTS, bytes(32), bytes(64))\n"
        "print(*(helper.pid for helper in two._helpers), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as party:
        assert party.stdout is not None
        processes = [int(word) for word in party.stdout.readline().split()]
        party.kill()
    assert len(processes) == 2
    assert all_end(processes)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_helpers_of_a_party_that_ends_at_work_end_without_a_word(signal_number: int) -> None:
    script = (
        "import signal\n"
        "from protocols.psi import ladder\n"
        "from protocols.psi.workers import Workers\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "two, told = Workers(2), []\n"
        "def tell(done):\n"
        "    if not told:\n"
        "        print(*(helper.pid for helper in two._helpers), flush=True)\n"
        "    told.append(done)\n"
        "two.work(ladder.DIGESTS, bytes(32), bytes(32 * 300_000), tell)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as party:  # fmt: skip
        assert party.stdout is not None
        assert party.stderr is not None
        processes = [int(word) for word in party.stdout.readline().split()]
        began = time.monotonic()
        if signal_number == signal.SIGINT:
            os.killpg(party.pid, signal_number)  # as a terminal does it
        else:
            party.kill()
        # until all who hold the pipe have closed it, so the helpers too
        complaint = party.stderr.read()
        assert time.monotonic() - began < 10
    assert len(processes) == 2
    assert all_end(processes)
    assert "BrokenPipeError" not in complaint
    assert complaint.count("Traceback") == (signal_number == signal.SIGINT)


def test_work_that_is_called_off_stops_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_POINTS_OF_A_JOB", 3)
    helpers, asked, real = Workers(2), list[int](), workers._answer

    def counted(helper: subprocess.Popen[bytes], job: bytes) -> bytes:
        asked.append(1)
        time.sleep(0.01)  # else they may all be done before the first is reported
        return real(helper, job)

    def call_off(_done: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_answer", counted)
    with pytest.raises(KeyboardInterrupt):
        helpers.work(ladder.DIGESTS, SCALAR, DIGESTS * 50, call_off)
    assert len(asked) < 300  # of 684
    assert helpers.work(ladder.DIGESTS, SCALAR, DIGESTS) == POINTS
    helpers.close()


def all_end(processes: Sequence[int]) -> bool:
    """Whether they end within 20 s."""
    deadline = time.monotonic() + 20
    while any(map(is_at_work, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_at_work, processes))


def is_at_work(process: int) -> bool:
    """Whether it runs; an orphan whose new parent does not ask for its status stays as a zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_helper_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LocalProtocolError, match=r"helper process .* status 1; use processes=1"):
        curve.blind_digests(bytes(32), bytes(64), workers=Workers(2))


def test_a_helper_that_is_killed_is_an_error() -> None:
    helpers = Workers(2)
    helpers.work(ladder.DIGESTS, SCALAR, DIGESTS)
    for helper in helpers._helpers:
        helper.kill()
        helper.wait()
    with pytest.raises(LocalProtocolError, match=r"ended with status -9; use processes=1"):
        helpers.work(ladder.DIGESTS, SCALAR, DIGESTS)
    helpers.close()
    assert helpers.work(ladder.DIGESTS, SCALAR, DIGESTS) == POINTS
    helpers.close()


def test_no_secret_is_in_the_arguments_of_a_helper() -> None:
    helpers = Workers(2)
    helpers.work(ladder.DIGESTS, SCALAR, DIGESTS)
    for helper in helpers._helpers:
        assert SCALAR.decode() not in str(helper.args)
        assert "a" * 32 not in repr(helpers)
    helpers.close()


def test_no_workers_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="processes is at least 1, got 0"):
        Workers(0)


def test_long_lists_use_a_helper_for_each_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(workers, "PARALLEL_THRESHOLD", 30)
    rng, chosen = np.random.default_rng(0), Workers(None)
    curve.blind_digests(bytes(32), rng.bytes(29 * 32), workers=chosen)
    assert not chosen._helpers
    curve.blind_digests(bytes(32), rng.bytes(30 * 32), workers=chosen)
    assert len(chosen._helpers) == 3
    chosen.close()
