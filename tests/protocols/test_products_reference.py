"""The whole protocol again with Python's integers alone, and recorded digests of a run.

Polynomials are multiplied as two large integers (Kronecker's substitution): no float, no digits.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from unittest.mock import patch

import numpy as np
import pytest

from apfed_protocols.products import expand_label, open_request
from apfed_protocols.products.ring import LARGEST_ERROR, Digits, Ring, inverse
from apfed_protocols.seal import RunKey
from tests.contracts.product_parties import ProductParties, agreement, matrices

_SLOT = 24  # bytes: products of 2^109 and 2^16 numbers of 16 bits fit

RECORDED = {
    None: "13906c67ce0724caf9744e9907781e1e63510b4cc1ae800985af5847068ea2df",
    3: "0facc8a34756b21d2c8cfaeeb7138308fb7adf11f60c6fcf03a558e245e25536",
}
"""SHA-256 over the request, the first passive's answer and the sum, by candidates."""


def product(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Of polynomials modulo X^N + 1, over the integers."""
    size, half = len(left), 1 << (8 * _SLOT - 1)
    total = _packed(left) * _packed(right) + _packed([half] * (2 * size))
    octets = total.to_bytes(2 * size * _SLOT, "little")
    numbers = [
        int.from_bytes(octets[start : start + _SLOT], "little") - half
        for start in range(0, len(octets), _SLOT)
    ]
    return [numbers[k] - numbers[k + size] for k in range(size)]


def _packed(numbers: Sequence[int]) -> int:
    """The polynomial's value at 2^(8 * _SLOT)."""
    parts = [
        b"".join(max(sign * number, 0).to_bytes(_SLOT, "little") for number in numbers)
        for sign in (1, -1)
    ]
    plus, minus = (int.from_bytes(part, "little") for part in parts)
    return plus - minus


def integers(ring: Ring, numbers: Digits) -> list[int]:
    total = sum(
        digit.astype(object) << offset for digit, offset in zip(numbers, ring.offsets, strict=True)
    )
    return [int(number) for number in np.ravel(total)]


def centred(number: int, bits: int) -> int:
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half


def test_labels_and_answers_decrypt_by_definition() -> None:
    agreed = agreement(people=20, columns=3, labelled=3)
    played, rows = ProductParties(agreed), matrices(agreed)
    found, ring = played.sum.headroom, played.sum.ring
    secret = [int(x) for x in np.rint(inverse(vars(played.receiver)["_secret"]))]
    assert set(secret) == {-1, 0, 1}
    mark = played.sum.frames().fingerprint
    seed, _, *blobs = open_request(played.sum, mark, played.receiver.request(), 5)
    scale = 1 << (ring.bits - found.plain_bits)
    for place, blob in enumerate(blobs):
        a = integers(ring, expand_label(ring, seed, place))
        b = integers(ring, ring.parse(blob, sender="active"))
        phase = [x + y for x, y in zip(b, product(a, secret), strict=True)]
        bits = [*map(int, played.labels[place]), *[0] * (ring.degree - 3)]
        errors = [centred(x - scale * bit, ring.bits) for x, bit in zip(phase, bits, strict=True)]
        assert any(errors)
        assert max(map(abs, errors)) <= LARGEST_ERROR
    role = played.contributors["passive_1"]
    steps = np.rint(rows["passive_1"] * played.sum.fixed_point.levels).astype(np.int64)
    c0, c1 = role._ciphertexts(steps, vars(role)["_labels"])
    sent = _spread(integers(ring, c0), ring, found.stride)
    hidden = product(integers(ring, c1), secret)
    largest = 2 ** (found.smudging_bits - 1) + 2**40
    for person, classes in enumerate(steps @ played.labels.astype(np.int64)):
        for k, value in enumerate(classes):
            place = person * found.stride + k
            noise = centred(sent[place] + hidden[place] - scale * int(value), ring.bits)
            assert abs(noise) <= largest


def _spread(c0: list[int], ring: Ring, stride: int) -> list[int]:
    """The numbers that are sent, at their places; the others are 0."""
    spread = [0] * ring.degree
    for place, number in enumerate(c0):
        person, k = divmod(place, 3)
        spread[person * stride + k] = number
    return spread


@contextmanager
def fixed_randomness() -> Iterator[None]:
    """Keys that are the same in every run; they protect nothing."""
    numbers = count()

    def block(length: int = 32) -> bytes:
        return hashlib.sha256(b"vector %d" % next(numbers)).digest()[:length]

    with ExitStack() as stack:
        for module in ("products", "products.ring", "sums.homomorphic"):
            stack.enter_context(patch(f"apfed_protocols.{module}.fresh_key", block))
        stack.enter_context(
            patch("apfed_protocols.sums.masked.fresh_run_key", lambda: RunKey.restored(block()))
        )
        yield


@pytest.mark.parametrize("candidates", RECORDED)
def test_a_recorded_run_repeats_byte_for_byte(candidates: int | None) -> None:
    agreed = agreement(people=40, columns=3, labelled=2, candidates=candidates)
    rows = {
        name: np.linspace(-0.4, 0.4 + place / 10, 80).reshape(40, 2)
        for place, name in enumerate(agreed.contributors)
    }
    labels = np.array([[0, 1, 0], [1, 0, 0]])
    with fixed_randomness():
        played = ProductParties(agreed, labels)
        answers = played.answers(0, rows)
        combined = played.combiner.combine(0, answers)
    opened = played.receiver.open(0, combined) * played.sum.fixed_point.levels
    assert np.array_equal(np.rint(opened), played.integers(rows))
    parts = played.receiver.request(), answers["passive_1"], combined
    assert hashlib.sha256(b"".join(parts)).hexdigest() == RECORDED[candidates]
