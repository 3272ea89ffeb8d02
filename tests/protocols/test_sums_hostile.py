"""Mutated frames in a subprocess: no crash, no hang, no growth; a value or RemoteProtocolError."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protocols.sums import SECURE_SUMS

SCRIPT = """
import json, random, resource, sys
from collections import Counter
import numpy as np
from protocols.errors import RemoteProtocolError
from tests.contracts.sum_parties import Parties, agreement, make

choice, rounds = sys.argv[1], int(sys.argv[2])
rng = random.Random(choice)


def mutate(data):
    data = bytearray(data)
    edge = min(len(data), 256)
    for _ in range(rng.choice((1, 1, 2, 8))):
        kind = rng.randrange(6)
        at = rng.randrange(edge if rng.random() < 0.7 else len(data))
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            del data[at : at + rng.choice((1, 4, len(data)))]
            data = data or bytearray(1)
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 8, 5000)))
        elif kind == 4:
            data[at : at + 8] = rng.choice((b"\\xff", b"\\0")) * 8
        else:
            data[at : at + 3] = data[-3:]
        edge = min(len(data), 256)
    return bytes(data)


played = Parties(make(choice, agreement(2)))
outcomes = Counter()


def attempt(name, action):
    try:
        action()
        outcomes[name + " passed"] += 1
    except RemoteProtocolError:
        outcomes[name + " refused"] += 1


def one_round():
    bound = played.next()
    good = played.contribute([np.full((2, 3), 0.1)] * 2, bound)
    bad = {**good, "passive_2": mutate(good["passive_2"])}
    attempt("combine", lambda: played.combiner.combine(bad, bound.digest))
    bound = played.next()
    combined = played.combiner.combine(played.contribute([np.full((2, 3), 0.1)] * 2, bound))
    attempt("decode", lambda: played.receiver.decode(mutate(combined), (2, 3), bound))


for _ in range(20):
    one_round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(rounds - 20):
    one_round()
for message in played.sum.receiver().start()[:1] * (rounds // 10):
    fresh = played.sum.contributor("passive_1")
    attempt("setup", lambda: fresh.receive("active", mutate(message.body)))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({**outcomes, "grown_kib": grown}))
"""


def attack(choice: str, rounds: int) -> dict[str, int]:
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, choice, str(rounds)],
        cwd=root, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    outcomes: dict[str, int] = json.loads(finished.stdout)
    return outcomes


def judge(outcomes: dict[str, int], rounds: int) -> None:
    for name in ("combine", "decode"):
        refused = outcomes[f"{name} refused"]
        assert refused + outcomes.get(f"{name} passed", 0) == rounds
        assert refused > rounds / 2
    assert outcomes["grown_kib"] < 64 * 1024


@pytest.mark.parametrize("choice", SECURE_SUMS)
def test_mutated_frames(choice: str) -> None:
    judge(attack(choice, 150), 150)


@pytest.mark.slow
@pytest.mark.parametrize("choice", SECURE_SUMS)
def test_ten_thousand_mutated_frames(choice: str) -> None:
    judge(attack(choice, 5000), 5000)
