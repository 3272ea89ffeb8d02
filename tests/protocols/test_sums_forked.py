"""A forked process repeats nothing: its copies of roles are refused, its randomness is its own."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.contracts.sum_parties import CHOICES

ROOT = Path(__file__).parents[2]
SCRIPT = """
import hashlib, json, os, sys
import numpy as np
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import fresh_key, random_permutation
from apfed_protocols.seal import fresh_run_key
from apfed_protocols.sums.homomorphic import centred_binomial, ternary
from apfed_protocols.sums.recoverable import split
from tests.contracts.sum_parties import CHOICES, Parties, agreement, make


def forked(action):
    reading, writing = os.pipe()
    if os.fork() == 0:
        told = b"died"
        try:
            told = action()
        finally:
            os.write(writing, told)
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    os.wait()
    return told.hex()


def said(action):
    try:
        action()
        return b"done"
    except LocalProtocolError as error:
        return str(error).encode()


def used(played):
    bound, values = played.next(), [np.zeros((1, 2))] * 2
    told = [forked(lambda: said(lambda: played.contribute(values, bound)))]
    frames = played.contribute(values, bound)
    if played.sum.rounds == 2:
        asked = played.combiner.ask(frames)
        one = played.contributors["passive_1"]
        told.append(forked(lambda: said(lambda: one.answer(asked["passive_1"]))))
        frames = {me: role.answer(asked[me]) for me, role in played.contributors.items()}
    combined = played.combiner.combine(frames)
    told.append(forked(lambda: said(lambda: played.receiver.decode(combined, (1, 2), bound))))
    played.receiver.decode(combined, (1, 2), bound)
    return [bytes.fromhex(one).decode() for one in told]


def encrypted(name):
    sums = make(name, agreement(2))
    context = sums.cipher.key_pair()
    zeros = np.zeros((1, sums.packing.slots), dtype=np.int64)
    return lambda: hashlib.sha256(sums.cipher.encrypt(context, zeros)[0]).digest()


def drawn(draw):
    draw()
    return [forked(draw), forked(draw), draw().hex()]


DRAWS = {
    "key": fresh_key,
    "X25519 key": lambda: fresh_run_key().public,
    "permutation": lambda: random_permutation(100).tobytes(),
    "ternary": lambda: ternary(100).tobytes(),
    "centred binomial": lambda: centred_binomial(100).tobytes(),
    "shares": lambda: b"".join(split(bytes(16), threshold=2, holders=3)),
    **{f"error of {name}": encrypted(name) for name in ("ckks", "bfv")},
}
print(json.dumps({
    "used": {choice: used(Parties(make(choice, agreement(2)))) for choice in CHOICES},
    "drawn": {name: drawn(draw) for name, draw in DRAWS.items()},
}))
"""


@cache
def told() -> dict[str, dict[str, list[str]]]:
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    result: dict[str, dict[str, list[str]]] = json.loads(finished.stdout)
    return result


@pytest.mark.parametrize("choice", CHOICES)
def test_a_forked_copy_of_a_role_is_refused_and_the_original_goes_on(choice: str) -> None:
    answers = told()["used"][choice]
    assert len(answers) in (2, 3)
    assert all("belongs to the process that made it" in answer for answer in answers)


@pytest.mark.parametrize(
    "source",
    ["key", "X25519 key", "permutation", "ternary", "centred binomial", "shares",
     "error of ckks", "error of bfv"],
)  # fmt: skip
def test_forked_processes_draw_other_numbers(source: str) -> None:
    numbers = told()["drawn"][source]
    assert len(set(numbers)) == 3
    assert all(len(number) >= 64 for number in numbers)
