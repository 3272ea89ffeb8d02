"""A passive that was left out and can only dial is back at a checkpoint, as one with an address."""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from secure_apfed.exchange import Kind
from secure_apfed.runs.local import Way
from tests.links.pair import Pair, say_and_hear
from tests.local.processes import Harm, Impatient, model_digests, nobody_failed
from tests.local.test_local_harm import recovering
from tests.local.test_local_restarts import RETURN, changed
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


class Dialling(Impatient):
    """Nobody reaches passive-2, which dials all others."""

    def prepared(self, files: Mapping[str, Path]) -> None:
        super().prepared(files)
        (listen,) = re.findall(r"^listen: (.*)$", files["passive-2"].read_text(), re.MULTILINE)
        for name, file in files.items():
            text = file.read_text()
            if name == "passive-2":
                text = text.replace(f"listen: {listen}\n", "")
            assert listen in text or name == "passive-2"
            file.write_text(text.replace(f"address: {listen}", "address: null"))


@pytest.mark.parametrize("relay", [False, True])
def test_who_left_is_found_once_it_waits_and_meets_in_the_next_session(
    relay: bool, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, relay=relay)
    pair.meet()
    say_and_hear(pair)
    pair.met.pop("bob").close()
    assert pair.met["ann"].returned(["bob"]) == []
    coming = pair.come("bob")  # who may only dial
    wait_until(lambda: pair.met["ann"].returned(["bob"]), "that bob was found")
    pair.met["ann"].post("bob", b"is not sent")
    assert coming.is_alive()  # it has met nobody by that
    pair.met.pop("ann").close()
    pair.come("ann").join()
    coming.join()
    say_and_hear(pair)
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("over", ["grpc", "relay"])
def test_who_was_left_out_and_dials_is_back_at_a_checkpoint(over: Way, tmp_path: Path) -> None:
    config = changed(recovering(), RETURN)
    config = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 4})})
    parties = (Dialling if over == "grpc" else Impatient)(config, tmp_path / "run", over=over)
    active = parties.run.party("active")
    # The active asks for it at the checkpoint of the first epoch, and is held at that of the third.
    harms = {
        "passive-2": Harm(Kind.CONTRIBUTION, 2),
        "active": Harm(Kind.CHECKPOINT, 8, signal=None),
    }
    with parties.started(harms):
        parties.processes["passive-2"].join(LONG_S)
        lines = active / "metrics.jsonl"
        wait_until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 2)
        parties.begin("passive-2")
        time.sleep(6)
        (active / "go-on").touch()
        said = parties.watch(list(parties.processes))
    nobody_failed(said)
    (why,) = said["active"]["restarts"]
    assert "checkpoint: passive-2 fell silent and is back at step" in why
    assert said["passive-2"]["restarts"] == []  # it took no session before that for its own
    result = json.loads((active / "result.json").read_bytes())
    assert result["attendance"] == {"left": {}, "steps_without_all": 0}
    assert set(model_digests(parties.run.path)) == {*parties.processes}
