"""Passives in processes of their own are killed in the middle of a step; the others finish."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS, KILLED_IN = 6, 3
SCRIPT = """
import json, os, signal, sys, time
from multiprocessing import Pipe, Process
from multiprocessing.connection import wait
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols import RecoverableSum, StepBinding, SumAgreement, join_sum
import numpy as np

PASSIVES, MOMENT, VICTIMS = tuple(sys.argv[1]), sys.argv[2], sys.argv[3]
STEPS, KILLED_IN = int(sys.argv[4]), int(sys.argv[5])
SUM = RecoverableSum(SumAgreement(session="killed", receiver="active", combiner="aggregator",
                                     contributors=PASSIVES, clip_norm=10.0, bits=20, threshold=3))
ABORTED = b""


def bound(step):
    return StepBinding.of("killed", step, rows=b"all", message=b"z of step %d" % step)


def passive(me, links, at_gallows):
    role = setup(me, links)
    for step in range(STEPS):
        if links["active"].recv_bytes() == ABORTED:
            return
        hang(me, step, "before", at_gallows)
        value = np.full((2, 3), 2.0 ** PASSIVES.index(me) / 8)
        links["aggregator"].send_bytes(role.contribute(value, bound(step)))
        hang(me, step, "after", at_gallows)
        request = links["aggregator"].recv_bytes()
        if request == ABORTED:
            return
        links["aggregator"].send_bytes(role.answer(request))


def hang(me, step, moment, at_gallows):
    if me in VICTIMS and (step, moment) == (KILLED_IN, MOMENT):
        at_gallows.send(me)
        time.sleep(100)


def aggregator(me, links):
    role, present = setup(me, links), list(PASSIVES)
    gather = lambda names: {name: links[name].recv_bytes() for name in names if links[name].poll(3)}
    for step in range(STEPS):
        try:
            frames = gather(present)
            requests = role.ask(frames, bound(step).digest)
            for name, request in requests.items():
                links[name].send_bytes(request)
            answers = gather(requests)
            present = list(answers)
            links["active"].send_bytes(role.combine(answers, bound(step).digest))
        except RemoteProtocolError as error:
            print(json.dumps({"aborted": step, "why": str(error)}), flush=True)
            for link in links.values():
                link.send_bytes(ABORTED)
            return


def active(me, links):
    role = setup(me, links)
    for step in range(STEPS):
        for name in PASSIVES:
            links[name].send_bytes(b"z of step %d" % step)
        combined = links["aggregator"].recv_bytes()
        if combined == ABORTED:
            for name in PASSIVES:
                links[name].send_bytes(ABORTED)
            return
        total = role.decode(combined, (2, 3), bound(step))
        print(json.dumps({"step": step, "sum": np.unique(total).tolist()}), flush=True)


def setup(me, links):
    def receive():
        names = {link: name for name, link in links.items()}
        link = wait(list(names))[0]
        return names[link], link.recv_bytes()

    role = join_sum(SUM, me, send=lambda name, body: links[name].send_bytes(body), receive=receive)
    links["gate"].send(me)
    links.pop("gate").recv()
    return role


def main():
    parties = {"active": active, "aggregator": aggregator, **dict.fromkeys(PASSIVES, passive)}
    links = {me: {} for me in parties}
    for me in parties:
        for peer in parties:
            if me < peer:
                links[me][peer], links[peer][me] = Pipe()
    gates, gallows, processes = {}, {}, {}
    for me, play in parties.items():
        gates[me], links[me]["gate"] = Pipe()
        gallows[me], end = Pipe()
        extra = (end,) if play is passive else ()
        processes[me] = Process(target=play, args=(me, links[me], *extra))
        processes[me].start()
    for gate in gates.values():
        gate.recv()
    for gate in gates.values():
        gate.send("all are set up")
    for me in VICTIMS:
        os.kill(processes[gallows[me].recv() and me].pid, signal.SIGKILL)
    for process in processes.values():
        process.join(60)
    print(json.dumps({"codes": {me: process.exitcode for me, process in processes.items()}}))


if __name__ == "__main__":
    main()
"""


def played(tmp_path: Path, moment: str, victims: str, passives: str) -> list[dict[str, Any]]:
    """What the parties print; at least three of the passives are needed."""
    script = tmp_path / "killed.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, str(script), passives, moment, victims, str(STEPS), str(KILLED_IN)],
        cwd=ROOT, env={"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.stderr == ""
    return [json.loads(line) for line in finished.stdout.splitlines()]


def levels(passives: str) -> float:
    """What these contribute together: 1/8, 2/8, 4/8 and so on, in steps of 10 / (2^19 - 1)."""
    step = 10 / (2**19 - 1)
    return sum(round(2.0 ** "abcde".index(me) / 8 / step) for me in passives) * step


# One of four, and two of five: the most that three of them go on without.
@pytest.mark.parametrize(
    ("passives", "victims"), [("abcd", "a"), ("abcd", "c"), ("abcde", "ad"), ("abcde", "ce")]
)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.sampled(every=3)
def test_the_others_finish_when_some_are_killed(
    tmp_path: Path, moment: str, passives: str, victims: str
) -> None:
    *lines, codes = played(tmp_path, moment, victims, passives)
    rest = "".join(me for me in passives if me not in victims)
    last = KILLED_IN - (moment == "before")
    expected = [levels(passives if step <= last else rest) for step in range(STEPS)]
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line, sum_of_step in zip(lines, expected, strict=True):
        assert line["sum"] == [pytest.approx(sum_of_step, rel=1e-12)]
    assert {codes["codes"].pop(victim) for victim in victims} == {-9}
    assert set(codes["codes"].values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize(("passives", "victims"), [("abcd", "ac"), ("abcde", "bde")])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_all_stop_when_too_few_are_left(
    tmp_path: Path, moment: str, passives: str, victims: str
) -> None:
    *lines, codes = played(tmp_path, moment, victims, passives)
    sums = [line for line in lines if "sum" in line]
    assert [line["step"] for line in sums] == list(range(KILLED_IN))
    (aborted,) = [line for line in lines if "aborted" in line]
    assert aborted["aborted"] == KILLED_IN
    what = "contribution" if moment == "before" else "answer"
    named = f"of {', '.join(passives)}; missing: {', '.join(victims)}"
    assert f"one {what} of at least 3 {named}" in aborted["why"]
    assert {codes["codes"].pop(victim) for victim in victims} == {-9}
    assert set(codes["codes"].values()) == {0}
