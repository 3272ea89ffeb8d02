"""Tables of parties refuse what no training should start with."""

from dataclasses import replace

import pytest
import torch

from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.errors import DataError


def table(name: str = "active", rows: int = 4, labels: list[int] | None = None) -> PartyTable:
    return PartyTable(
        name,
        tuple(f"id-{row}" for row in range(rows)),
        torch.zeros(rows, 2),
        None if labels is None else torch.tensor(labels),
        ColumnEncoding.plain(["age", "income"]),
    )


ACTIVE = table(labels=[0, 1, 0, 1])
GOOD = VerticalData(
    ACTIVE, (table("shop"),), ("no", "yes"), torch.tensor([0, 1, 2]), torch.tensor([3])
)
HOLES = torch.tensor([[0.0, 1.0], [0.0, float("nan")], [0.0, float("inf")], [float("nan"), 0.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": ()}, "active: its table is empty"),
        (
            {"ids": ("a", "b", "a", "b")},
            "active: 2 IDs occur more than once, the first in row 0",
        ),
        ({"ids": ("a", "b", "c")}, "active: 3 IDs, but features of 4 rows"),
        ({"features": torch.zeros(5, 2)}, "4 IDs, but features of 5 rows"),
        ({"labels": torch.zeros(3)}, r"4 IDs, but labels of shape \(3,\)"),
        ({"features": torch.zeros(4, 3)}, r"rows of shape \(2,\), the features have \(3,\)"),
        ({"features": HOLES}, "active: 3 features are NaN or infinite, 2 of them in 'income'"),
    ],
)
def test_a_partys_table_is_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(ACTIVE, **change)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passives": (table("active"),)}, "two parties have one name"),
        (
            {"passives": (table("shop", labels=[0, 1, 0, 1]),)},
            "shop is passive and holds no labels",
        ),
        ({"active": table()}, "active is the active and needs labels"),
        ({"active": table(labels=[0, 1, 5, -1])}, "2 labels lie outside the 2 classes, first 5"),
        (
            {"active": table(labels=[0, 0, 0, 1])},
            "the 3 labelled training rows are all of one class",
        ),
        ({"test_rows": torch.tensor([4])}, "lie in 0 to 3, got 0 to 4"),
        ({"test_rows": torch.tensor([2])}, "listed twice"),
    ],
)
def test_the_tables_together_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(GOOD, **change)  # type: ignore[arg-type]  # wrong on purpose


def test_no_row_shows_in_the_text_form() -> None:
    assert "id-0" not in repr(GOOD)
    assert "tensor" not in repr(GOOD)
