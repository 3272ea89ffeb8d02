"""What is opened is the integer sum of products, for every shape; and what is refused before."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.products import SumOfProducts
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
)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_the_sum_of_products_is_exact(changes: dict[str, Any]) -> None:
    agreed = agreement(**changes)
    played, rows = ProductParties(agreed), matrices(agreed)
    opened = played.opened(rows)
    assert np.abs(opened - np.rint(opened)).max() < 1e-6
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


def test_rows_come_from_an_array_or_a_function() -> None:
    agreed = agreement(people=8300, columns=10, labelled=2, noise=5)
    rows, noise = matrices(agreed), np.full((8300, 10), 7)

    def part(whole: Any) -> Any:
        return lambda people: whole[people.start : people.stop]

    opened = []
    for form in (part, np.asarray):
        played = ProductParties(agreed)
        streams = {
            name: role.answers(form(rows[name]), form(noise))
            for name, role in played.contributors.items()
        }
        assert played.sum.blocks == 2
        for block in range(2):
            answers = {name: next(stream) for name, stream in streams.items()}
            opened.append(played.receiver.open(block, played.combiner.combine(block, answers)))
    assert np.array_equal(opened[0], opened[2])
    assert np.array_equal(opened[1], opened[3])


def test_sizes_are_forecast() -> None:
    agreed = agreement(people=8300, columns=10, labelled=2)
    played, rows = ProductParties(agreed), matrices(agreed)
    assert len(played.receiver.request()) == played.sum.request_bytes
    for block in range(2):
        for frame in played.answers(block, rows).values():
            assert len(frame) == played.sum.answer_bytes(block)
    assert [len(played.sum.people_of(block)) for block in range(2)] == [8192, 108]


def test_one_passive_is_refused_unless_asked_for() -> None:
    with pytest.raises(LocalProtocolError, match="hides nothing"):
        agreement(1)
    agreed = agreement(1, allow_single=True)
    played, rows = ProductParties(agreed), matrices(agreed)
    assert np.array_equal(np.rint(played.opened(rows)), played.integers(rows))


def test_agreements_that_make_no_sense() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"people": 0}, "people"),
        ({"people": 2.0}, "people"),
        ({"columns": 513}, "columns"),
        ({"labelled": 0}, "labelled"),
        ({"bits": 25}, "bits"),
        ({"security": 10}, "security"),
        ({"security": True}, "security"),
        ({"row_bound": 0.0}, "clip_norm"),
        ({"noise": 0}, "noise"),
        ({"passives": 0}, "hides nothing"),
    ]
    for changes, says in cases:
        with pytest.raises(LocalProtocolError, match=says):
            agreement(**changes)


def test_every_field_counts_in_the_fingerprint() -> None:
    usual = agreement()
    changes: dict[str, Any] = {
        "people": 31, "columns": 4, "labelled": 5, "bits": 15, "row_bound": 2.0, "noise": 9,
        "security": 41, "session": "other", "allow_single": True,
    }  # fmt: skip
    changed = [replace(usual, **{field: value}) for field, value in changes.items()]
    marks = {SumOfProducts(agreed).frames().fingerprint for agreed in (usual, *changed)}
    assert len(marks) == len(changed) + 1


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
