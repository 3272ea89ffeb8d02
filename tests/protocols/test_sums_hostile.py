"""Mutated frames in a subprocess: no crash, no hang, no growth; a value or RemoteProtocolError."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apfed_protocols.sums import SECURE_SUMS
from apfed_protocols.sums.homomorphic import HomomorphicSum
from tests.with_crypten import usable

SCRIPT = """
import json, random, resource, sys
from collections import Counter
import numpy as np
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums.homomorphic import Encrypter
from tests.contracts.hostile import mutated
from tests.contracts.public_keys import genuine_key, residues_of, setup_with
from tests.contracts.reaction import Rearmed
from tests.contracts.sum_parties import Parties, agreement, make

choice, rounds = sys.argv[1], int(sys.argv[2])
rng = random.Random(choice)


def mutate(data):
    return mutated(rng, data)


played = Parties(make(choice, agreement(2)))
receiver = Rearmed(played.receiver)
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
    attempt("decode", lambda: receiver.decode(mutate(combined), (2, 3), bound))


def two_rounds(turn):
    # One mutated frame a session: a refused request or contribution ends it.
    played = Parties(make(choice, agreement(2)))
    bound = played.next()
    frames = played.contribute([np.full((2, 3), 0.1)] * 2, bound)
    if turn == 0:
        bad = {**frames, "passive_2": mutate(frames["passive_2"])}
        return attempt("ask", lambda: played.combiner.ask(bad, bound.digest))
    requests = played.combiner.ask(frames, bound.digest)
    if turn == 1:
        asked = played.contributors["passive_2"]
        return attempt("answer", lambda: asked.answer(mutate(requests["passive_2"])))
    answers = {me: role.answer(requests[me]) for me, role in played.contributors.items()}
    if turn == 2:
        bad = {**answers, "passive_2": mutate(answers["passive_2"])}
        return attempt("combine", lambda: played.combiner.combine(bad, bound.digest))
    combined = played.combiner.combine(answers)
    attempt("decode", lambda: played.receiver.decode(mutate(combined), (2, 3), bound))


def play(count):
    for turn in range(count if played.sum.rounds == 1 else 2 * count):
        one_round() if played.sum.rounds == 1 else two_rounds(turn % 4)


play(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
play(rounds - 20)
for message in played.sum.contributor("passive_2").start() * (rounds // 30):
    fresh = {"passive_1": played.sum.contributor("passive_1"), "active": played.sum.receiver(),
             "aggregator": played.sum.combiner()}[message.receiver]
    attempt("setup", lambda: fresh.receive("passive_2", mutate(message.body)))
for message in played.sum.receiver().start()[:1] * (rounds // 10):
    fresh = played.sum.contributor("passive_1")
    attempt("setup", lambda: fresh.receive("active", mutate(message.body)))
if hasattr(played.sum, "cipher") and played.sum.masks == "none":
    # The fingerprint of a setup would not fit a mutated key: one that does is made for it.
    key = genuine_key(played.sum)
    for _ in range(rounds):
        fresh = Encrypter(played.sum, "passive_1")
        if rng.random() < 0.5:
            bad = mutate(key)
        else:
            residues = residues_of(key)
            start, stop = sorted(rng.randrange(residues.size) for _ in range(2))
            fill = rng.choice((0, 1, 2**50, 2**64 - 1, int(residues[0, 0])))
            residues.reshape(-1)[start:stop] = fill
            bad = residues.tobytes()
        attempt("key", lambda: (fresh.receive("active", setup_with(played.sum, bad)),
                                fresh.contribute(np.full((2, 3), 0.1), played.next())))
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


def judge(choice: str, outcomes: dict[str, int], rounds: int) -> None:
    two = SECURE_SUMS[choice].rounds == 2
    for name in ("ask", "answer", "combine", "decode") if two else ("combine", "decode"):
        refused, tried = outcomes[f"{name} refused"], rounds // 2 if two else rounds
        assert refused + outcomes.get(f"{name} passed", 0) == tried
        assert refused > tried / 2
    if issubclass(SECURE_SUMS[choice], HomomorphicSum) and SECURE_SUMS[choice].masks == "none":
        assert outcomes["key refused"] > rounds * 2 / 3
        assert outcomes["key refused"] + outcomes.get("key passed", 0) == rounds
    assert outcomes["grown_kib"] < 64 * 1024


@pytest.mark.parametrize("choice", usable(SECURE_SUMS))
def test_mutated_frames(choice: str) -> None:
    judge(choice, attack(choice, 150), 150)


@pytest.mark.slow
@pytest.mark.parametrize("choice", usable(SECURE_SUMS))
def test_ten_thousand_mutated_frames(choice: str) -> None:
    judge(choice, attack(choice, 5000), 5000)
