"""What a party's attacks on itself say where nothing was let out: nobody reads himself."""

import pytest

from apfed_attacks import ATTACKS
from apfed_attacks.headlines import Direction
from apfed_attacks.own import measure_own
from secure_apfed.config import AttackChoice
from secure_apfed.contract import PartyRole
from secure_apfed.data import load_data
from secure_apfed.organisations.own_record import OwnRecord
from tests.secure_apfed.small_runs import small_config

ACTIVE = "active"
PASSIVE = "passive-1"


def directions_of(party: str) -> set[str]:
    config = small_config("votes")
    data = load_data(config.data, seed=0)
    role: PartyRole = "active" if party == ACTIVE else "passive"
    record = OwnRecord(party, role, config, data.select_party(party), active=ACTIVE)
    found = measure_own(record, [AttackChoice(name=name) for name in ATTACKS], seed=0)
    assert not any(one.applicable for one in found)
    return {Direction.from_result(one).title for one in found}


@pytest.mark.parametrize(("party", "unread"), [(ACTIVE, "active reads"), (PASSIVE, "labels")])
def test_nobody_reads_himself_or_what_the_party_does_not_have(party: str, unread: str) -> None:
    found = directions_of(party)
    assert found, "what could have been read is told"
    assert not [title for title in found if unread in title and "who trained" not in title]
