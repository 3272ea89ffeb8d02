"""A run whose aggregator alters a sum: it ends, its key with it; a resumed run has another key."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.homomorphic import KeyHolder
from secure_apfed.parties import AggregatorParty
from secure_apfed.runs import run
from tests.secure_apfed.small_runs import small_config


@pytest.fixture
def key_holders(monkeypatch: pytest.MonkeyPatch) -> list[KeyHolder]:
    """The receivers of all sessions."""
    made: list[KeyHolder] = []
    genuine = KeyHolder.__init__

    def remembered(self: KeyHolder, *args: Any) -> None:
        genuine(self, *args)
        made.append(self)

    monkeypatch.setattr(KeyHolder, "__init__", remembered)
    return made


def test_a_refused_sum_ends_the_run_and_resuming_makes_another_key(
    key_holders: list[KeyHolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, genuine = small_config(secure_sum={"protocol": "ckks_fast"}), AggregatorParty.combine

    def altering(self: AggregatorParty, envelopes: Any) -> Any:
        good = genuine(self, envelopes)
        if good.step < 9:
            return good
        return replace(good, payload=good.payload[:-8] + bytes(8))

    monkeypatch.setattr(AggregatorParty, "combine", altering)
    with pytest.raises(RemoteProtocolError, match="sum of step 9 from aggregator"):
        run(config, tmp_path / "run")
    (first,) = key_holders
    with pytest.raises(LocalProtocolError, match="refused the sum of step 9"):
        first.decode(b"", (1, 1), Any)  # type: ignore[arg-type]  # nothing is looked at any more
    monkeypatch.setattr(AggregatorParty, "combine", genuine)
    run(config, tmp_path / "run", resume=True)
    _, second = key_holders
    keys = {vars(holder)["_public_key"] for holder in key_holders}
    assert len(keys) == 2
    assert "_context" in vars(second)
    assert "_context" not in vars(first)
