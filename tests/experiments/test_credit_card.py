"""Credit card: lines stand beside the baseline that the active's own labels choose."""

from itertools import product
from pathlib import Path

import pytest

from apfed_experiments.credit_card import LINES, compare_credit, config_of
from secure_apfed.data import load_data
from secure_apfed.errors import DataError
from secure_apfed.solo import BASELINES


def test_lines_differ_in_nothing_but_method_and_labels() -> None:
    for line, labelled in product(LINES, (200, None)):
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
