"""Credit card: lines stand beside the baseline that the active's own labels choose."""

from pathlib import Path

import pytest

from apfed_experiments.columns import Table
from apfed_experiments.credit_card import COLUMNS, LINES, compare_credit, config_of
from apfed_experiments.summary import Interval
from secure_apfed.data import load_data
from secure_apfed.errors import DataError
from secure_apfed.solo import BASELINES


def test_a_row_has_a_text_for_each_column() -> None:
    row = {
        "labelled": 200, "model": "Votes", "predicts": "the active alone",
        "auc": Interval(0.6, 0.5, 0.7), "ks": Interval(0.2, 0.1, 0.3),
        "gain": Interval(0.01, -0.02, 0.04), "wire_bytes": 1.25e6, "p_holm": 0.04,
    }  # fmt: skip
    assert Table(COLUMNS, [row]).cells == [(
        "Votes", "the active alone", "0.600 [0.500, 0.700]", "0.200 [0.100, 0.300]",
        "+0.010 [-0.020, +0.040]", "0.04", "1.2",
    )]  # fmt: skip


@pytest.mark.parametrize("labelled", [200, None])
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.key)
def test_lines_differ_in_nothing_but_method_and_labels(line, labelled) -> None:  # type: ignore[no-untyped-def]  # of pytest
    config = config_of(line, labelled)
    assert (config.data.dataset, config.data.labelled) == ("credit_card", labelled)
    assert config.measure == "auc"
    assert config.method.predicts_alone is not bool(line.said) or config.method.name == "tvfl"


@pytest.mark.slow
def test_each_line_is_compared_with_the_baseline_that_labels_choose(tmp_path: Path) -> None:
    try:
        load_data(config_of(LINES[0], 200).data, seed=0)
    except DataError as error:
        pytest.skip(str(error))
    single = LINES[:1]
    (table,) = compare_credit(tmp_path, seeds=[0, 1], jobs=2, lines=single, labelled=(200,))
    rows = table.rows
    assert len(rows) == 2 * len(BASELINES) + len(single)
    (reference,) = (row for row in rows if row["gain"] is None)
    assert reference["predicts"] == "the active alone"
    auc = reference["auc"].mean
    for row in rows:
        assert 0.4 < row["auc"].mean < 0.9
        if row["gain"] is not None:
            assert row["gain"].mean == pytest.approx(row["auc"].mean - auc, abs=1e-12)
    together = {
        row["model"].removesuffix(" *"): row for row in rows if row["predicts"].startswith("all")
    }
    assert together["Gradient boosting"]["auc"].mean > auc + 0.05
    (again,) = compare_credit(tmp_path, seeds=[0, 1], jobs=1, lines=single, labelled=(200,))
    assert again.plain() == table.plain()
