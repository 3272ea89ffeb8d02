"""The bench of sums of products: its row, whose bytes are those of the agreement."""

from apfed_experiments.bench import BENCHES, votes
from apfed_protocols.products import SumOfProducts
from tests.contracts.product_parties import agreement


def test_a_row_of_a_small_size() -> None:
    row = votes.measure(300, 3, 1).as_json()
    described = SumOfProducts(agreement(3, people=300, columns=10, labelled=3))
    assert row["case"] == "encrypted/300x3"
    assert row["bytes_up"] == described.request_bytes
    assert row["bytes_down"] == described.answer_bytes(0)
    assert row["bytes"] == row["bytes_up"] + row["bytes_down"]
    parts = row["passive_seconds"] + row["active_seconds"] + row["aggregator_seconds"]
    assert 0 < row["seconds"] == parts < 30
    assert row["ratio"] == row["seconds"] / row["clear_seconds"]
    assert 10**7 < row["peak_memory"] < 10**9
    assert row["parameters"]["poly_degree"] == described.headroom.degree


def test_a_row_with_candidates() -> None:
    row = votes.measure(300, 3, 1, 3).as_json()
    described = SumOfProducts(agreement(3, people=300, columns=10, labelled=3, candidates=3))
    assert row["case"] == "audited/300x3"
    assert row["bytes_up"] == described.request_bytes
    assert row["bytes_down"] == described.answer_bytes(0)


def test_it_has_its_place_in_the_table() -> None:
    assert BENCHES["votes"] is votes.BENCH
