"""The tables of ballots measure what they say: a planted reading, and a vote that tells nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apfed_experiments.leaks.live import Setting
from apfed_experiments.leaks.votes import chosen_labels, poisoned_votes, repeated_votes
from apfed_experiments.summary import Row

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def measured(table: Callable[[], Iterator[Setting]], **columns: Any) -> Row:
    """The figures of seed 0 in the line that these columns name, of breast cancer unless said."""
    wanted = {"data": "breast_cancer", **columns}
    (line,) = (one for one in table() if wanted.items() <= one.columns.items())
    return line.measure(0)


def test_chosen_labels_name_the_nearest_of_passives_until_noise_hides_them() -> None:
    clear, noisy = (
        measured(chosen_labels, data="digits", opened="sum", epsilon=epsilon, runs=1)
        for epsilon in (None, 4.0)
    )
    assert clear["found"] > clear["baseline"] + 0.1
    assert noisy["found"] < noisy["baseline"]
    assert clear["baseline"] == noisy["baseline"]  # the same person is asked about


def test_new_runs_read_more_and_spend_more() -> None:
    once, often = (
        measured(repeated_votes, opened="each", epsilon=1.0, runs=runs) for runs in (1, 4)
    )
    assert often["class read"] > once["class read"] + 0.05
    assert (once["epsilon spent"], often["epsilon spent"]) == (1.0, 4.0)


def test_an_honest_passive_changes_nothing() -> None:
    row = measured(poisoned_votes, opened="each", adversary="none")
    assert row["change"] == 0
    assert row["its agreement"] > 0.5
    assert measured(poisoned_votes, opened="each", adversary="rotate")["its agreement"] < 0.5
