"""What is opened is the integer sum of products, for every shape; and what is refused before."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.products import SumOfProducts
from apfed_protocols.seal import RunKey
from tests.contracts.product_parties import ProductParties, agreement, labels, matrices

SHAPES: tuple[dict[str, Any], ...] = (
    {"people": 1, "columns": 1, "labelled": 1},
    {"columns": 10, "people": 8192 + 256 + 7, "labelled": 3},  # two blocks, the last one short
    {"columns": 100, "people": 1500, "labelled": 20},
    {"columns": 512, "people": 9, "labelled": 2},
    {"labelled": 60, "passives": 5},
    {"bits": 24, "people": 10},
    {"bits": 2, "security": 64},
    {"row_bound": 250.0, "passives": 3},
    {"candidates": 3, "columns": 1, "people": 5, "labelled": 1},
    {"candidates": 3, "columns": 10, "people": 4096 + 128 + 5, "labelled": 20},
    {"candidates": 9, "columns": 33, "people": 100, "passives": 3},
    {"candidates": 3, "passives": 1, "allow_single": True},
)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_the_sum_of_products_is_exact(changes: dict[str, Any]) -> None:
    agreed = agreement(**changes)
    played, rows = ProductParties(agreed), matrices(agreed)
    opened = played.opened(rows)
    assert np.abs(opened - np.rint(opened)).max() < 1e-6
    found_out = f"one time in {agreed.candidates}" in played.sum.malicious
    assert found_out == (agreed.candidates is not None)
    assert np.array_equal(np.rint(opened), played.integers(rows))


def test_it_is_close_to_the_real_product() -> None:
    agreed = agreement(3, labelled=9)
    played, rows = ProductParties(agreed), matrices(agreed)
    real = sum(rows.values()) @ played.labels
    opened = played.opened(rows) / played.sum.fixed_point.levels
    assert np.abs(opened - real).max() <= played.sum.rounding()


def test_labels_are_any_bits_of_any_type() -> None:
    for kind in [bool, np.uint8, np.int64, np.float32]:
        agreed = agreement()
        bits = np.random.default_rng(1).integers(2, size=(4, 3)).astype(kind)
        played, rows = ProductParties(agreed, bits), matrices(agreed)
        assert np.array_equal(np.rint(played.opened(rows)), played.integers(rows))


def test_the_largest_rows_stay_in_range() -> None:
    """All of a row in one entry, all entries at half a step, either sign."""
    for single in [np.zeros((4, 3)), np.ones((4, 3))]:
        agreed = agreement(3, people=4)
        played = ProductParties(agreed, single)
        edge = np.zeros((4, 4))
        edge[0, 0], edge[1, 3] = 1, -1
        edge[2] = 0.25 + 0.5 / played.sum.fixed_point.levels
        edge[3] = -edge[2]
        rows = dict.fromkeys(agreed.contributors, edge)
        assert np.array_equal(np.rint(played.opened(rows)), played.integers(rows))


def test_noise_is_added_in_steps() -> None:
    agreed = agreement(2, noise=3000)
    played, rows = ProductParties(agreed), matrices(agreed)
    noise = [discrete_gaussian(bytes([k] * 32), deviation=3000, shape=(30, 3)) for k in (1, 2)]
    answers = {
        name: role.answer(0, rows[name], noise[k])
        for k, (name, role) in enumerate(played.contributors.items())
    }
    opened = played.receiver.open(0, played.combiner.combine(0, answers))
    steps = np.rint(opened * played.sum.fixed_point.levels)
    assert np.array_equal(steps, played.integers(rows) + noise[0] + noise[1])


def test_one_passive_is_refused_unless_asked_for() -> None:
    with pytest.raises(LocalProtocolError, match="hides nothing"):
        agreement(1)
    agreed = agreement(1, allow_single=True)
    played, rows = ProductParties(agreed), matrices(agreed)
    assert np.array_equal(np.rint(played.opened(rows)), played.integers(rows))


def test_labels_that_are_no_bits() -> None:
    shape = (4, 3)
    refused: list[Any] = [np.full(shape, 2), np.full(shape, 0.5), np.ones((3, 4)), [[1]]]
    for bad in (*refused, np.full(shape, "1")):
        with pytest.raises(LocalProtocolError, match="labels are"):
            SumOfProducts(agreement()).receiver(bad)


def test_rows_that_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (np.full((30, 4), 0.3), "adds up to more than row_bound"),
        (np.full((30, 4), 1e308), "adds up to more than row_bound"),
        (np.full((30, 4), np.nan), "NaN"),
        (np.zeros((29, 4)), "shape"),
        (np.zeros((30, 4), dtype=np.int64), "float32 or float64"),
        ([[0.0]], "array"),
    ]
    for bad, says in cases:
        played = ProductParties(agreement())
        role = played.contributors["passive_1"]
        with pytest.raises(LocalProtocolError, match=says):
            role.answer(0, bad)
        role.answer(0, np.zeros((30, 4)))  # what was refused used no block up


def test_noise_must_be_as_agreed() -> None:
    role = ProductParties(agreement()).contributors["passive_1"]
    with pytest.raises(LocalProtocolError, match="noise"):
        role.answer(0, np.zeros((30, 4)), np.zeros((30, 3), dtype=np.int64))
    role = ProductParties(agreement(noise=5)).contributors["passive_1"]
    for bad in (None, np.zeros((30, 4), dtype=np.int64), np.full((30, 3), 68), np.zeros((30, 3))):
        with pytest.raises(LocalProtocolError, match="noise"):
            role.answer(0, np.zeros((30, 4)), bad)  # type: ignore[arg-type]  # on purpose


def test_blocks_go_up_and_are_used_once() -> None:
    agreed = agreement(people=8300, columns=10, labelled=2)
    played, rows = ProductParties(agreed), matrices(agreed)
    combined = played.combiner.combine(1, played.answers(1, rows))
    played.receiver.open(1, combined)
    for block in (1, 0):
        with pytest.raises(LocalProtocolError, match="used once"):
            played.answers(block, rows)
    with pytest.raises(LocalProtocolError, match="used once"):
        played.receiver.open(1, combined)
    for block in (2, -1, True):
        with pytest.raises(LocalProtocolError, match="blocks of"):
            played.answers(block, rows)


def test_nothing_leaves_before_setup_and_request() -> None:
    described = SumOfProducts(agreement())
    request = described.receiver(labels(agreement())).request()
    role = described.contributor("passive_1")
    with pytest.raises(LocalProtocolError, match="accept the request"):
        role.answer(0, np.zeros((30, 4)))
    role.accept(request)
    with pytest.raises(LocalProtocolError, match="mask key"):
        role.answer(0, np.zeros((30, 4)))
    converse({"passive_1": role, "passive_2": described.contributor("passive_2")})
    role.answer(0, np.zeros((30, 4)))
    with pytest.raises(LocalProtocolError, match="contributes nothing"):
        described.contributor("active")


def test_it_says_what_each_party_learns() -> None:
    described = SumOfProducts(agreement())
    assert not described.unsafe
    assert described.leaks.request is not None
    assert "sum of products only" in described.leaks.active_and_aggregator
    assert "column" in described.malicious
    found = described.headroom
    assert described.readable_bits == 3 * (found.modulus_bits - found.smudging_bits)
    assert described.answered_bits == (3 + 4) * 32


# The whole protocol again with Python's integers alone, and recorded digests of a run.


RECORDED = {
    None: "13906c67ce0724caf9744e9907781e1e63510b4cc1ae800985af5847068ea2df",
    3: "0facc8a34756b21d2c8cfaeeb7138308fb7adf11f60c6fcf03a558e245e25536",
}
"""SHA-256 over the request, the first passive's answer and the sum, by candidates."""


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
