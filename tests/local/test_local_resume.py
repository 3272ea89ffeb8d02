"""What `run --transport local` makes of folders that were left behind."""

import json
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.cli import execute
from secure_apfed.config.file import load_config
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Kind
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.local.processes import Harm, Parties, model_digests, nobody_failed
from tests.local.test_local_harm import config_of, recovering
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Parties that ran apart, whose active was killed in its second epoch."""
    parties = Parties(config_of(), tmp_path / "apart")
    parties.play({"active": Harm(Kind.REPRESENTATIONS, 7)})
    return parties.run.path


def test_a_run_is_gone_on_with_as_it_was_begun(killed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="resume with --transport local"):
        run(config_of(), killed, resume=True)
    interrupted(small_config(), tmp_path / "memory", at_step=9)
    with pytest.raises(CheckpointError, match="resume with --transport memory"):
        run(small_config(), tmp_path / "memory", resume=True, transport="local")
    run(small_config(), tmp_path / "memory", resume=True)


def test_other_settings_are_refused_and_those_of_the_run_are_kept(killed: Path) -> None:
    config = (killed / "config.yaml").read_bytes()
    other = config_of().model_copy(update={"seed": 9})
    with pytest.raises(CheckpointError, match="another configuration"):
        run(other, killed, resume=True, transport="local")
    with pytest.raises(CheckpointError, match="holds a run already; resume it"):
        run(other, killed, transport="local")
    for arguments in (["--prepare"], ["--prepare", "--json"]):
        assert execute(["run", str(killed / "config.yaml"), "--output", str(killed), *arguments])
    assert (killed / "config.yaml").read_bytes() == config
    assert load_config(killed / "config.yaml") == config_of()


def test_the_result_of_parties_that_went_on_without_one_is_gathered(tmp_path: Path) -> None:
    """The active has its result; its launcher was gone, or somebody else had failed."""
    parties = Parties(recovering(), tmp_path / "run")
    parties.play({"passive-2": Harm(Kind.CONTRIBUTION, 2)})
    result = run(recovering(), tmp_path / "run", resume=True, transport="local")
    alone = json.loads((parties.run.party("active") / "result.json").read_bytes())
    assert result.accuracy == alone["accuracy"]
    assert alone["attendance"]["left"] == {"passive-2": 2}
    assert load_model(tmp_path / "run").classes == load_model(parties.run.party("active")).classes
    with pytest.raises(CheckpointError, match="holds a finished run"):
        run(recovering(), tmp_path / "run", resume=True, transport="local")


@pytest.mark.parametrize("method", ["tvfl", "apfed_c"])
def test_what_passives_spent_is_gathered_from_them(method: str, tmp_path: Path) -> None:
    noise = {"scheme": "plain", "masks": "pairwise", "clip": 0.5, "noise": {"sigma": 2.0}}
    changes: dict[str, Any] = {"secure_sum": noise} if method == "apfed_c" else {}
    config = small_config(method, **changes)
    whole = run(config, tmp_path / "memory")
    Parties(config, tmp_path / "apart").play()
    alone = json.loads((tmp_path / "apart/parties/active/model.json").read_bytes())
    if method == "tvfl":  # the passives said at the end what they had charged
        assert alone["epsilon"]["representations"] == whole.privacy.epsilon_x
    gathered = run(config, tmp_path / "apart", resume=True, transport="local")
    assert gathered.privacy.epsilon_x == whole.privacy.epsilon_x
    assert model_digests(tmp_path / "apart") == model_digests(tmp_path / "memory")
    results = [
        json.loads((tmp_path / name / "result.json").read_bytes()) for name in ("memory", "apart")
    ]
    for key in ("contributions", "guarantee", "accuracy", "aligned_rows"):
        assert results[0][key] == results[1][key], key
    cards = [
        json.loads((tmp_path / name / "model.json").read_bytes()) for name in ("memory", "apart")
    ]
    assert cards[0]["epsilon"] == cards[1]["epsilon"]


@pytest.mark.parametrize("transport", ["memory", "local"])
def test_nothing_outside_of_the_folder_is_touched(transport: str, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "sent"
    for made in (outside, folder, folder / "parties"):
        made.mkdir(mode=0o700)
    (outside / "checkpoint-3.bin").write_bytes(b"precious")
    for name in ("friend", "passive-1"):
        (folder / "parties" / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link or a file in place of a folder"):
        run(small_config(), folder, transport=transport)
    assert [path.name for path in outside.iterdir()] == ["checkpoint-3.bin"]


@pytest.mark.parametrize(("name", "at"), [("active", 3), ("passive-1", 1), ("passive-2", 2)])
@pytest.mark.sampled(every=3)
def test_an_intersection_in_which_a_party_was_killed_goes_on_and_counts_once(
    name: str, at: int, tmp_path: Path
) -> None:
    history = tmp_path / "history"
    alignment = {"protocol": "ecdh", "history": str(history), "runs_with_a_peer": 1}
    parties = Parties(small_config(alignment=alignment), tmp_path / "run")
    said = parties.play({name: Harm(Kind.ALIGNMENT, at)})
    assert all(one["kind"] for one in said.values())
    kept = {one: parties.run.party(one) / "alignment" for one in ("active", "passive-1")}
    assert all((kept[one] / one / "all" / "agreed.msgpack").exists() for one in kept)
    nobody_failed(parties.play())
    noted = {path.stem: path.read_text().count("\n") for path in history.glob("*.jsonl")}
    assert noted == {"active": 1, "passive-1": 1, "passive-2": 1}
    assert not any(folder.exists() for folder in kept.values())
