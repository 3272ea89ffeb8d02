"""Footprints by the paper's formulas, and how far what is sent lies from them."""

from typing import Any

import pytest

from apfed_bench.footprint import (
    apc_vfl_bytes,
    split_nn_backward_bytes,
    split_nn_forward_bytes,
    vfedtrans_bytes,
)
from apfed_bench.table import run_bench


@pytest.mark.parametrize(
    ("aligned", "megabytes"), [(10_000, 9.73), (7_500, 7.17), (5_000, 4.61), (2_500, 2.05)]
)
def test_the_papers_own_figures_of_apc_vfl(aligned: int, megabytes: float) -> None:
    """Table 2, MIMIC-III; 500 of the aligned rows are for testing (Appendix A)."""
    assert round(apc_vfl_bytes(aligned - 500) / 1e6, 2) == megabytes


def test_split_nn_sends_forward_and_backward() -> None:
    forward = split_nn_forward_bytes(1000, epochs=3, numbers=10)
    back = split_nn_backward_bytes(1000, epochs=3, batch_size=300, inputs=4, numbers=10)
    assert forward == 3 * 1000 * 10 * 4
    assert back == 3 * 4 * (4 * 10 + 10) * 4


def test_vfedtrans_grows_with_the_square_of_the_rows() -> None:
    exchanges = (
        50 * 50 + 2 * 5, 50 * 50 + 3 * 5,  # P and Q_i to each party
        50 * 5, 50 * 5,  # their masked tables
        50 * 5,  # the masked vectors
    )  # fmt: skip
    assert vfedtrans_bytes(50, (2, 3)) == 4 * sum(exchanges)
    assert vfedtrans_bytes(10_000, (5, 10)) > 90 * vfedtrans_bytes(1_000, (5, 10))


@pytest.fixture(scope="module", name="measured")
def _measured() -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in run_bench("footprint", quick=True)["rows"]}


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        ("apc_vfl", 1.0, 1.03),  # and 16 bytes a row: its position, asked for and answered
        ("split_nn/b128/e2", 0.75, 1.05),  # the gradient of codes for that of weights
        ("split_nn/b8/e2", 0.1, 0.16),
        ("vfedtrans", 0.3, 0.5),  # P as a seed
        ("vfedtrans, P not counted", 1.95, 2.1),  # float64
    ],
)
def test_what_is_sent_lies_as_far_from_the_formula_as_told(
    case: str, least: float, most: float, measured: dict[str, dict[str, Any]]
) -> None:
    row = measured[case]
    assert least < row["ratio"] < most
    assert 1 < row["bytes"] / row["payload"] < 1.02
