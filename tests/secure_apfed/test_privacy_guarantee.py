"""The guarantee's text: what was on is in it, and nothing that was not."""

from itertools import product

import pytest

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.privacy.contributions import contributions_statement
from secure_apfed.privacy.guard import joint_releases_statement
from secure_apfed.privacy.ledger import NOTHING_RELEASED
from secure_apfed.privacy.randomised_response import LabelResponse, NoLabelPrivacy
from secure_apfed.runs.spending import LABEL_ASSUMPTIONS, guarantee_of

ROWS = "row-release guarantee, encoder held fixed"
NONE, RESPONSE = NoLabelPrivacy(classes=3), LabelResponse(epsilon=1.0, classes=3)


def test_what_is_said_of_labels_without_label_dp() -> None:
    assert guarantee_of(ROWS, NONE, private_training=False) == f"{ROWS}; no label DP"
    assert guarantee_of(NOTHING_RELEASED, NONE, private_training=False) == NOTHING_RELEASED
    assert guarantee_of("private training", NONE, private_training=True) == "private training"


def test_label_dp_comes_with_its_assumptions() -> None:
    both = (False, True)
    for released, private, seeded in product([ROWS, NOTHING_RELEASED], both, both):
        told = guarantee_of(released, RESPONSE, private_training=private, seeded=seeded)
        assert told.startswith(f"{released}; label DP, epsilon_y 1, delta 0")
        assert LABEL_ASSUMPTIONS in told
        assert "no label DP" not in told
        assert ("does not know the run's seed" in told) is seeded


@pytest.mark.parametrize("seeded", [False, True])
def test_noise_under_a_sum_is_claimed_against_its_readers_only(seeded: bool) -> None:
    told = {
        name: contributions_statement(kind.leaks.single, seeded=seeded)
        for name, kind in SECURE_SUMS.items()
    }
    for text in told.values():
        assert "whoever reads the sums alone" in text
        assert ("does not know the run's seed" in text) is seeded
        assert "played again in a later session counts again" in text
    assert "not against the aggregator" in told["plain"]
    assert "not against active and aggregator together" in told["ckks"]
    assert "not against" not in told["plain + pairwise masks"]


def test_rows_of_one_person_at_several_passives_add_up() -> None:
    assert joint_releases_statement(ROWS, 1) == ROWS
    assert joint_releases_statement(ROWS, 2) == (
        f"{ROWS}; epsilon_x is of one passive's row, and those of one person add up"
    )
