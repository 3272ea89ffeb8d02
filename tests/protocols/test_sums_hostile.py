"""Hostile sums: mutated frames, keys that protect nothing, altered sums and reactions."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.seal import RunKey
from apfed_protocols.sums import SECURE_SUMS, BfvSum, CkksSum, SecureSum
from apfed_protocols.sums.bits import choose_bits
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.homomorphic import Encrypter, HomomorphicSum
from apfed_protocols.sums.interface import USUAL_BITS, count_sessions_to_reveal
from apfed_protocols.sums.seal_cipher import DEGREE, SMALL_DEGREE, compute_coefficients
from tests.contracts import sum_parties
from tests.contracts.hostile import genuine_key, pack_setup, residues_of
from tests.memory import trace_memory
from tests.refusals import list_unrefused
from tests.with_crypten import usable

SCRIPT = """
import json, random, resource, sys
from collections import Counter
import numpy as np
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums.homomorphic import Encrypter
from tests.contracts.hostile import genuine_key, mutate_bytes, residues_of, pack_setup
from tests.contracts.sum_parties import Rearmed
from tests.contracts.sum_parties import Parties, agreement, make

choice, rounds = sys.argv[1], int(sys.argv[2])
rng = random.Random(choice)


def mutate(data):
    return mutate_bytes(rng, data)


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
    attempt("combine", lambda: played.aggregator.combine(bad, bound.digest))
    bound = played.next()
    combined = played.aggregator.combine(played.contribute([np.full((2, 3), 0.1)] * 2, bound))
    attempt("decode", lambda: receiver.decode(mutate(combined), (2, 3), bound))


def two_rounds(turn):
    # One mutated frame a session: a refused request or contribution ends it.
    played = Parties(make(choice, agreement(2)))
    bound = played.next()
    frames = played.contribute([np.full((2, 3), 0.1)] * 2, bound)
    if turn == 0:
        bad = {**frames, "passive_2": mutate(frames["passive_2"])}
        return attempt("ask", lambda: played.aggregator.ask(bad, bound.digest))
    requests = played.aggregator.ask(frames, bound.digest)
    if turn == 1:
        asked = played.contributors["passive_2"]
        return attempt("answer", lambda: asked.answer(mutate(requests["passive_2"])))
    answers = {me: role.answer(requests[me]) for me, role in played.contributors.items()}
    if turn == 2:
        bad = {**answers, "passive_2": mutate(answers["passive_2"])}
        return attempt("combine", lambda: played.aggregator.combine(bad, bound.digest))
    combined = played.aggregator.combine(answers)
    attempt("decode", lambda: played.receiver.decode(mutate(combined), (2, 3), bound))


def play(count):
    for turn in range(count if played.sum.rounds == 1 else 2 * count):
        one_round() if played.sum.rounds == 1 else two_rounds(turn % 4)


play(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
play(rounds - 20)
for message in played.sum.make_contributor("passive_2").start() * (rounds // 30):
    fresh = {"passive_1": played.sum.make_contributor("passive_1"),
             "active": played.sum.make_receiver(),
             "aggregator": played.sum.make_aggregator()}[message.receiver]
    attempt("setup", lambda: fresh.receive("passive_2", mutate(message.body)))
for message in played.sum.make_receiver().start()[:1] * (rounds // 10):
    fresh = played.sum.make_contributor("passive_1")
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
        attempt("key", lambda: (fresh.receive("active", pack_setup(played.sum, bad)),
                                fresh.contribute(np.full((2, 3), 0.1), played.next())))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({**outcomes, "grown_kib": grown}))
"""
Residues = NDArray[np.uint64]
SHAPE = (3, 5)
COEFFICIENTS = 100


@pytest.mark.parametrize("rounds", [150, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", usable(SECURE_SUMS))
def test_mutated_frames(choice: str, rounds: int) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, choice, str(rounds)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    outcomes: dict[str, int] = json.loads(finished.stdout)
    two = SECURE_SUMS[choice].rounds == 2
    names = ("ask", "answer", "combine", "decode") if two else ("combine", "decode")
    tried = rounds // 2 if two else rounds
    refused = {name: outcomes[f"{name} refused"] for name in names}
    passed = {name: outcomes.get(f"{name} passed", 0) for name in names}
    assert {name: refused[name] + passed[name] for name in names} == dict.fromkeys(names, tried)
    assert [name for name in names if refused[name] <= tried / 2] == []
    if issubclass(SECURE_SUMS[choice], HomomorphicSum) and SECURE_SUMS[choice].masks == "none":
        assert outcomes["key refused"] > rounds * 2 / 3
        assert outcomes["key refused"] + outcomes.get("key passed", 0) == rounds
    assert outcomes["grown_kib"] < 64 * 1024


SUMS: dict[str, Callable[[], HomomorphicSum]] = {
    "ckks": lambda: _homomorphic("ckks"),
    "ckks, two primes": lambda: CkksSum(sum_parties.agreement(16)),
    "bfv": lambda: _homomorphic("bfv"),
}


def _homomorphic(choice: str) -> HomomorphicSum:
    described = sum_parties.make(choice, sum_parties.agreement())
    assert isinstance(described, HomomorphicSum)
    return described


@pytest.fixture(scope="module", params=SUMS)
def homomorphic_sum(request: pytest.FixtureRequest) -> HomomorphicSum:
    return SUMS[request.param]()


def taken(secure_sum: HomomorphicSum, key: bytes | Residues) -> Encrypter:
    """Return a passive to which the active sent this key."""
    key = key if isinstance(key, bytes) else key.astype("<u8").tobytes()
    passive = Encrypter(secure_sum, "passive_1")
    passive.receive("active", pack_setup(secure_sum, key))
    return passive


def make_key_change(rows: slice, columns: slice = slice(None), template: Any = 0) -> Any:
    """Make a change of a key: these residues are one number, or others of the key."""

    def change(residues: Residues) -> Residues:
        residues[rows, columns] = template(residues) if callable(template) else template
        return residues

    return change


ALL = slice(None)
HALVES = {4: (slice(2), slice(2, None)), 2: (slice(1), slice(1, None))}


def degenerate(rows: int, columns: int) -> dict[str, Callable[[Residues], Residues]]:
    """Return changes to all-zero keys and the like, for so many rows of residues."""
    b, a = HALVES[rows]
    return {
        "zeroed": make_key_change(ALL),
        "without a": make_key_change(a),
        "without b": make_key_change(b),
        "one modulus of a zero": make_key_change(slice(-1, None)),
        "partly zero": make_key_change(ALL, slice(columns // 8)),
        "constant": make_key_change(ALL, ALL, lambda key: key[:, :1]),
        "few values": make_key_change(ALL, slice(columns // 2), lambda key: key[:, columns // 2 :]),
        "equal": make_key_change(a, ALL, lambda key: key[b]),
    }


def test_a_degenerate_public_key_is_refused(homomorphic_sum: HomomorphicSum) -> None:
    """It would put a contribution on the wire with its noise alone over it."""
    key = genuine_key(homomorphic_sum)
    two = len(homomorphic_sum.cipher.moduli) == 2
    assert two == (homomorphic_sum.list_parameters()["primes"] == [60, 49])
    said = "the public key from active is no RLWE key"
    changes = degenerate(*residues_of(key).shape).values()
    cases = [(said, homomorphic_sum, change(residues_of(key))) for change in changes]
    assert list_unrefused(RemoteProtocolError, taken, cases) == []


def test_a_genuine_key_is_taken(homomorphic_sum: HomomorphicSum) -> None:
    """So the refusals are of what is in the keys, not of how the test sends them."""
    residues = residues_of(genuine_key(homomorphic_sum))
    assert taken(homomorphic_sum, residues).contribute(np.ones((2, 3)), sum_parties.binding(1))


def test_what_are_no_residues_is_refused(homomorphic_sum: HomomorphicSum) -> None:
    rows = residues_of(genuine_key(homomorphic_sum))
    said = "the public key from active"
    cases = [
        (rf"{said} has \d+ bytes, expected \d+", homomorphic_sum, rows[:-1]),
        (
            rf"{said} has \d+ bytes, expected \d+",
            homomorphic_sum,
            np.append(rows, rows[-1:], axis=0),
        ),
        (f"{said} holds numbers beyond the modulus", homomorphic_sum, rows + np.uint64(2**60)),
    ]
    assert list_unrefused(RemoteProtocolError, taken, cases) == []


def test_what_seal_refuses_when_it_encrypts_shows_at_the_setup(
    homomorphic_sum: HomomorphicSum, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = genuine_key(homomorphic_sum)
    fails = RuntimeError("result ciphertext is transparent")
    monkeypatch.setattr(type(homomorphic_sum.cipher), "encrypt", Mock(side_effect=fails))
    with pytest.raises(RemoteProtocolError, match="SEAL refuses the public key from active"):
        taken(homomorphic_sum, key)


@cache
def powers_of_x(degree: int, modulus: int) -> tuple[int, ...]:
    """X at SEAL's places: the odd powers of the smallest root of order 2N, bits reversed."""
    bits = degree.bit_length() - 1
    roots = (pow(base, (modulus - 1) // (2 * degree), modulus) for base in range(2, modulus))
    root = next(found for found in roots if pow(found, degree, modulus) == modulus - 1)
    smallest = min(pow(root, power, modulus) for power in range(1, 2 * degree, 2))
    odd = (2 * int(f"{place:0{bits}b}"[::-1], 2) + 1 for place in range(degree))
    return tuple(pow(smallest, power, modulus) for power in odd)


def transform_terms(terms: dict[int, int], degree: int, modulus: int) -> Residues:
    """Return the polynomial with these coefficients by power of X, as SEAL keeps it."""
    values = [
        sum(factor * pow(x, power, modulus) for power, factor in terms.items()) % modulus
        for x in powers_of_x(degree, modulus)
    ]
    return np.array(values, dtype=np.uint64)


@cache
def small(degree: int, modulus: int, *, bits: int, seed: int) -> Residues:
    """Return a polynomial of coefficients of few bits, either sign: by the transform's inverse.

    The inverse of the inverse: it is linear, so a basis of powers would do; this is quicker.
    """
    numbers = np.random.default_rng(seed).integers(-(2**bits), 2**bits, degree)
    values = np.array([int(number) % modulus for number in numbers], dtype=object)
    x = np.array(powers_of_x(degree, modulus), dtype=object)
    total = np.zeros(degree, dtype=object)
    for coefficient in values[::-1]:  # Horner
        total = (total * x + coefficient) % modulus
    return total.astype(np.uint64)


def test_coefficients_are_those_of_the_polynomial(homomorphic_sum: HomomorphicSum) -> None:
    degree = homomorphic_sum.cipher.degree
    modulus = homomorphic_sum.cipher.moduli[0]
    terms = {0: 5, 3: modulus - 7, degree - 1: modulus // 3}
    found_PN = compute_coefficients(
        np.stack([transform_terms(terms, degree, modulus)] * 2), modulus
    )
    assert (found_PN[0] == found_PN[1]).all()
    sizes = sorted(min(int(number), modulus - int(number)) for number in found_PN[0] if number)
    assert sizes == sorted(min(number, modulus - number) for number in terms.values())


HIDDEN: dict[str, Callable[[Residues, int], Residues]] = {
    "b = -a": lambda rows, q: np.stack([rows[0], (q - rows[0]) % q]),
    "b = -a + 1": lambda rows, q: np.stack([rows[0], (q + 1 - rows[0]) % q]),
    "counting": lambda rows, q: np.stack([np.arange(rows.shape[1]), rows[1]]).astype(np.uint64),
    "sparse b": lambda rows, q: np.stack([transform_terms({1: 1}, rows.shape[1], q), rows[1]]),
    "sparse a": lambda rows, q: np.stack(
        [rows[0], transform_terms({3: 9, 5: 2}, rows.shape[1], q)]
    ),
    "small b": lambda rows, q: np.stack([small(rows.shape[1], q, bits=20, seed=2), rows[1]]),
    "b = a + small": lambda rows, q: np.stack(
        [(rows[1] + small(rows.shape[1], q, bits=20, seed=2)) % np.uint64(q), rows[1]]
    ),
}


@pytest.mark.parametrize("change", HIDDEN.values(), ids=list(HIDDEN))
def test_a_key_of_different_residues_that_hides_nothing_is_refused(
    change: Callable[[Residues, int], Residues],
) -> None:
    """Under b = a the difference of a ciphertext's halves is the message with its noise alone."""
    described = _homomorphic("bfv")
    (modulus,) = described.cipher.moduli
    broken = change(residues_of(genuine_key(described)), modulus)
    with pytest.raises(RemoteProtocolError, match=r"the public key from active is no RLWE key"):
        taken(described, broken)


def true_key(played: sum_parties.Parties) -> list[int]:
    """The key's first coefficients, from decrypting (0, step): for the judge alone."""
    assert isinstance(played.sum, BfvSum)
    cipher = played.sum.cipher
    context = vars(played.receiver)["_key_context"]
    step = cipher.residues.modulus >> played.sum.parameters.scale_or_modulus_bits
    numbers = np.zeros(2 * played.sum.packing.slots_per_vector, dtype=np.uint64)
    numbers[played.sum.packing.slots_per_vector] = step
    blob = cipher.residues.pack(numbers)
    found = cipher.decrypt(context, [blob], 1, sender="judge")[:COEFFICIENTS]
    return [int(number) for number in found]


def limit(played: sum_parties.Parties) -> int:
    return FixedPoint.from_agreement(played.sum.agreement).max_sum


def make_sum_frame(played: sum_parties.Parties) -> tuple[Frame, tuple[bytes, ...], int]:
    """A sum's frame, the blobs that an aggregator asks about, and the first number in them.

    Under encryption alone that is one passive's contribution in place of the sum.
    """
    bound = played.next()
    values = sum_parties.random_values(3, SHAPE, seed=7)
    contributions = played.contribute(values, bound)
    frame = Frame.parse(played.combine(contributions, bound.digest), sender="aggregator")
    fixed_point = FixedPoint.from_agreement(played.sum.agreement)
    levels = [int(fixed_point.quantise_rows(value)[0, 0]) for value in values]
    if played.sum.name not in ("ckks", "bfv"):
        return frame, frame.blobs, sum(levels)
    alone = Frame.parse(contributions["passive_2"], sender="passive_2").blobs
    return frame, alone, levels[1]


@pytest.mark.parametrize("choice", ["ckks", "bfv", "bfv + pairwise masks"])
def test_reactions_to_altered_sums_would_tell_a_number_and_end_with_the_first_refusal(
    choice: str,
) -> None:
    """Whoever could ask on reads it in 18 questions, without the active."""
    played = sum_parties.fresh_parties(choice)
    frame, blobs, number = make_sum_frame(played)
    reactions = sum_parties.Reactions(played, sum_parties.Rearmed(played.receiver), frame)

    def takes_with(offset: int) -> bool:
        return reactions.takes(*sum_parties.shift_sum(played, blobs, offset))

    assert sum_parties.number_from_reactions(limit(played), takes_with) == number
    assert reactions.refused > 1
    reactions = sum_parties.Reactions(played, played.receiver, frame)
    with pytest.raises(LocalProtocolError, match="refused the sum of step"):
        sum_parties.number_from_reactions(limit(played), takes_with)
    assert reactions.refused == 1


@pytest.mark.parametrize("choice", ["bfv", "bfv + pairwise masks"])
def test_reactions_would_tell_the_secret_key_and_end_with_the_first_refusal(choice: str) -> None:
    played = sum_parties.fresh_parties(choice)
    bound = played.next()
    combined = played.combine(played.contribute([np.zeros((1, 1))] * 3, bound))
    frame = Frame.parse(combined, sender="aggregator")
    key = true_key(played)
    assert set(key) == {-1, 0, 1}
    without_end = sum_parties.Reactions(played, sum_parties.Rearmed(played.receiver), frame)
    assert sum_parties.key_coefficients(played, without_end.takes, COEFFICIENTS) == key
    reactions = sum_parties.Reactions(played, played.receiver, frame)
    with pytest.raises(LocalProtocolError, match="refused the sum of step"):
        sum_parties.key_coefficients(played, reactions.takes, COEFFICIENTS)
    assert reactions.refused == 1


@pytest.mark.parametrize(
    ("choice", "bits"),
    [("bfv", 16), ("plain + pairwise masks", 16), ("plain + pairwise masks", 24)],
)
def test_every_new_session_about_the_same_values_tells_one_reaction_more(
    choice: str, bits: int
) -> None:
    """The limit of the rule: as many resumed runs in which the same sum is altered tell a number as
    it has bits.
    """
    first = sum_parties.Parties(sum_parties.make(choice, sum_parties.agreement(3, bits=bits)))
    _, _, number = make_sum_frame(first)
    sessions = []

    def takes_with(offset: int) -> bool:
        played = sum_parties.Parties(first.sum)
        frame, blobs, _ = make_sum_frame(played)
        sessions.append(played)
        asked = replace(frame, blobs=sum_parties.shift_sum(played, blobs, offset)).pack()
        try:
            played.receiver.decode(asked, SHAPE, sum_parties.binding(frame.step))
        except RemoteProtocolError:
            return False
        return True

    assert sum_parties.number_from_reactions(limit(first), takes_with) == number
    needed = first.sum.fixed_point.number_bits
    assert needed == (18 if bits == 16 else 26)
    assert len(sessions) in (needed - 1, needed)  # which half is left last is of the number


@pytest.mark.parametrize("choice", ["plain + pairwise masks", "plain + recoverable masks"])
def test_no_mask_seed_is_left_after_a_refusal_nor_the_key_that_agrees_it_again(choice: str) -> None:
    played = sum_parties.fresh_parties(choice)
    seeds = vars(played.receiver)["_seeds"]
    assert any(isinstance(held, RunKey) for held in vars(seeds).values())
    with pytest.raises(RemoteProtocolError):
        played.receiver.decode(b"", SHAPE, played.next())
    assert not [held for held in vars(seeds).values() if isinstance(held, RunKey)]
    assert not vars(seeds)["_seed_by_peer"]


ROWS = 2**15
COLUMNS = 2**16


def enlarge(body: bytes) -> bytes:
    """Return a frame that says it holds 2^31 values, and holds a few."""
    return replace(Frame.parse(body, sender="a peer"), rows=ROWS, columns=COLUMNS).pack()


def play_with_large_shapes(choice: str) -> None:
    """Play a step whose contributors all say that they add 2^31 values each."""
    played = sum_parties.fresh_parties(choice)
    bound = played.next()
    good = played.contribute(sum_parties.random_values(3), bound)
    combined = played.combine({name: enlarge(body) for name, body in good.items()})
    played.receiver.decode(combined, (ROWS, COLUMNS), bound)


@pytest.mark.parametrize("choice", sum_parties.CHOICES)
def test_a_frame_that_says_more_than_it_holds_takes_no_memory(choice: str) -> None:
    with trace_memory() as peak, pytest.raises(RemoteProtocolError):
        play_with_large_shapes(choice)
    assert peak() < 2**23


@pytest.mark.parametrize("kind", [CkksSum, BfvSum])
@pytest.mark.parametrize("contributors", [2, 1024])
@pytest.mark.parametrize("bits", [2, 24])
def test_ring_and_packing_follow_from_the_agreement_and_are_small(
    kind: type[HomomorphicSum], contributors: int, bits: int
) -> None:
    """Nobody names a degree or a prime; what can be named fits, or is refused with what would."""
    agreed = sum_parties.agreement(contributors, bits=bits)
    with trace_memory() as peak:
        try:
            described = kind(agreed)
        except LocalProtocolError as error:
            fits = int(str(error).rsplit("; ", 1)[1].removesuffix(" bits would"))
            described = kind(replace(agreed, bits=fits))
    told = described.list_parameters()
    assert told["poly_degree"] in {DEGREE, SMALL_DEGREE}
    assert 1 <= described.packing.fields_per_slot <= 2
    assert peak() < 2**23


def test_no_sum_is_of_more_contributors() -> None:
    with pytest.raises(LocalProtocolError, match="at most 1024 contributors, got 1025"):
        sum_parties.agreement(1025)


def make_sum_with(name: str, bits: int) -> SecureSum:
    return sum_parties.make(name, sum_parties.agreement(3, bits=bits))


@pytest.mark.parametrize("name", usable(SECURE_SUMS))
@pytest.mark.parametrize("default", [True, False])
def test_how_many_sessions_tell_a_number_is_said_of_the_bits_that_are_used(
    name: str, default: bool
) -> None:
    """With three contributors, at the bits of gradients and at those of votes and of noise."""
    bits = choose_bits(lambda bits: make_sum_with(name, bits)) if default else USUAL_BITS
    described = make_sum_with(name, bits)
    names_step = "a ciphertext names no step" not in described.leaks.altered
    assert names_step is (described.scheme not in ("ckks", "bfv"))
    count = described.fixed_point.number_bits
    assert count == math.ceil(math.log2(2 * 3 * (2 ** (bits - 1) - 1) + 1))
    told = count_sessions_to_reveal(count, steps=1000, names_step=names_step)
    said = f"{told} at {bits}"
    assert re.search(rf"\b{said}\b", described.leaks.altered), (said, described.leaks.altered)


def test_the_page_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "threat-model.md").read_text("utf-8")
    figures = (
        r"Three passives: (\d+) at (\d+) bits \(masks\), (\d+) at (\d+) \(ckks\), "
        r"(\d+) at (\d+) \(bfv\), (\d+) at (\d+)\.(?s:.*)that is (\d+) sessions of a thousand steps"
    )
    said = re.search(figures, page)
    assert said
    *pairs, sessions = map(int, said.groups())
    found = [
        make_sum_with("plain + pairwise masks", bits).fixed_point.number_bits
        for bits in pairs[1::2]
    ]
    assert pairs[::2] == found
    assert sessions == count_sessions_to_reveal(pairs[2], steps=1000, names_step=False)
    needed = {2_097_150: 2, 2_097_151: 1, 127: 3, 100: 4}
    counts = {
        steps: count_sessions_to_reveal(pairs[2], steps=steps, names_step=False) for steps in needed
    }
    assert counts == needed
