"""Audit logs and live views of parties in processes of their own, whole, killed and stopped."""

import itertools
import json
from pathlib import Path

import pytest

from secure_apfed.audit_log import compare_logs, verify_log
from secure_apfed.exchange import Kind
from tests.local.processes import Harm, Parties, nobody_failed
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

TRAIN = {"epochs": 3, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}


def unreceived_of_every_link(run: Path) -> int:
    """Envelopes that never arrived; all logs must verify and agree."""
    count = 0
    for one, other in itertools.combinations(sorted((run / "parties").iterdir()), 2):
        found = compare_logs(one, other)
        assert found.agree, found.directions
        assert all(direction.equal for direction in found.directions)
        count += sum(direction.unreceived for direction in found.directions)
    return count


def test_the_logs_of_a_run_are_signed_and_agree_on_every_link(tmp_path: Path) -> None:
    nobody_failed(Parties(small_config(train=TRAIN), tmp_path / "run").play())
    assert unreceived_of_every_link(tmp_path / "run") == 0
    for party in (tmp_path / "run" / "parties").iterdir():
        summary = verify_log(party)
        assert summary.signed
        assert (summary.opened, summary.agreed) == (1, 1)
        sent = {(one.peer, one.kind): (one.envelopes, one.size)
                for one in summary.flows if one.event == "sent"}  # fmt: skip
        # The active writes its results before it says that the session ends.
        sent = {at: count for at, count in sent.items() if at[1] is not Kind.END}
        flows = json.loads((party / "transcript.json").read_bytes())
        assert sent == {
            (flow["receiver"], Kind(flow["kind"])): (flow["messages"], flow["wire_bytes"])
            for flow in flows
        }
        privacy = json.loads((party / "ended.json").read_bytes())["privacy"]
        assert summary.epsilon == pytest.approx(privacy["epsilon_x"] if privacy else 0.0)
    lines = (tmp_path / "run/parties/active/audit.log").read_bytes().splitlines()
    releases = [json.loads(line) for line in lines if b"representations" in line]
    assert all("epsilon" in line for line in releases)
    assert not [line for line in lines if b"epsilon" in line and b"representations" not in line]


def test_a_killed_party_goes_on_in_its_log_and_all_agree_still(tmp_path: Path) -> None:
    parties = Parties(small_config(train=TRAIN), tmp_path / "run", timeout_s=5)
    parties.play({"passive-1": Harm(Kind.CONTRIBUTION, at=4)})
    killed = tmp_path / "run" / "parties" / "passive-1"
    summary = verify_log(killed)
    assert not summary.signed, "who is killed signs nothing"
    assert verify_log(killed.with_name("active")).signed
    with (killed / "audit.log").open("ab") as log:
        log.write(b'{"chain":"12')
    nobody_failed(parties.play(resume=True))
    again = verify_log(killed)
    assert (again.opened, again.agreed, again.cut, again.signed) == (2, 2, 12, True)
    # What was on its way to the killed one, and its last contribution, which it logged.
    assert 0 < unreceived_of_every_link(tmp_path / "run") < 12
