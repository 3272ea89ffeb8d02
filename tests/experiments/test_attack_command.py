import json
import stat
from pathlib import Path

import pandas as pd
import pytest
import torch

from apfed_experiments.finished import FILE, mount_attacks, read_examples
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.cli import execute
from secure_apfed.config import AttackChoice
from secure_apfed.errors import CheckpointError
from secure_apfed.runs.run import run
from tests.experiments.run_folder import own_tables
from tests.secure_apfed.small_runs import small_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs") / "small"
    with pytest.warns(UnsafeChoiceWarning):
        run(small_config(
            data={"dataset": "digits", "views": 2}, transcript={"keep": "all"},
            model={"hidden": [16], "representation": 16, "projection": 16},
            secure_sum={"scheme": "plain", "allow_single_passive": True},
            guard={"mechanism": "none"},
        ), folder)  # fmt: skip
    return folder


def test_attacks_are_mounted_and_kept_beside_earlier_ones(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = execute(["attack", str(finished), "--attacks", "temporal", "--json",
                    "--option", "temporal.labels_per_class=4"])  # fmt: skip
    assert code == 0
    first = json.loads(capsys.readouterr().out)["attacks"]
    assert {one["attack"] for one in first} == {"temporal"}
    assert execute(["attack", str(finished), "--attacks", "inverse_network", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["attacks"]
    assert {one["attack"] for one in both} == {"temporal", "inverse_network"}
    assert (finished / "report.html").is_file()
    assert execute(["attack", str(finished), "--attacks", "label_gradients"]) == 0
    assert "label_gradients is not applicable: apfed_c" in capsys.readouterr().err


def test_wrong_arguments_are_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in (
        (["--attacks", "tempral"], "did you mean 'temporal'"),
        (["--option", "temporal"], "expected ATTACK.KEY=VALUE"),
        (["--option", "temporal.windw=3"], "did you mean 'window'"),
        (["--option", "temporal.window=[3"], "is not YAML"),
    ):
        assert execute(["attack", str(finished), *arguments, "--json"]) == 2
        assert told in json.loads(capsys.readouterr().out)["error"]["message"]
    assert execute(["attack", str(tmp_path), "--json"]) == 3
    assert "holds no finished run" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_rebuilt_images_are_their_owners_and_shown_with_originals_on_request_only(
    finished: Path,
) -> None:
    mount_attacks(finished, [AttackChoice(name="inverse_network")])
    picture, page = finished / "pictures" / "rebuilt.png", finished / "report.html"
    for arguments, shown in (([], False), (["--show-originals"], True), ([], False)):
        assert execute(["report", str(finished), *arguments]) == 0
        text = page.read_text("utf-8")
        assert picture.exists() == shown
        assert ("What attacks rebuilt." in text) == shown
        assert ("Attacks rebuilt images of people. They are left out" in text) == (not shown)
        for file in (picture, page) if shown else ():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert execute(["attack", str(finished), "--attacks", "inverse_network", "--json"]) == 0
    assert not picture.exists()
    finished.chmod(0o755)  # as of an older run
    assert execute(["report", str(finished)]) == 0
    assert stat.S_IMODE(finished.stat().st_mode) == 0o700
    examples, path = read_examples(finished), finished / FILE
    assert {key.rpartition("-")[0] for key in examples} == {"inverse_network"}
    images = torch.as_tensor(next(iter(examples.values())).original)
    assert (images.ndim, len(images) <= 8) == (4, True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="holds no rebuilt images"):
        read_examples(finished)
    path.unlink()
    assert read_examples(finished) == {}


def test_damaged_files_are_told(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(name: str) -> str:
        assert execute(["attack", str(finished), "--attacks", name]) != 0
        return " ".join(capsys.readouterr().err.replace("│", "").split())

    for content in ("[{", '[{"attack": "temporal"}]', "3"):
        (finished / "attacks.json").write_text(content)
        assert "remove it and attack again" in refused("label_gradients")
    (finished / "attacks.json").unlink()
    path, digests = finished / "alignment.safetensors", finished / "SHA256SUMS"
    whole, noted = path.read_bytes(), digests.read_bytes()
    path.write_bytes(whole[:100])
    assert "is not as the run left it" in refused("label_gradients")
    digests.unlink()
    assert "cannot be read as this version writes them" in refused("label_gradients")
    digests.write_bytes(noted)
    path.write_bytes(whole)


@pytest.mark.parametrize("method", ["votes", "apfed_c", "tvfl"])
def test_own_tables_with_empty_labels_are_attacked(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most of the cells say nothing: no attack is told a label there, and none is right there."""
    data, empty = own_tables(tmp_path), tmp_path / "active.csv"
    frame = pd.read_csv(empty)
    frame.loc[frame.index % 4 != 0, "label"] = None
    frame.to_csv(empty, index=False)
    few = {
        "model_completion": {"labels_per_class": 4}, "membership": {"shadow_models": 4},
        "unpaired_inversion": {"shadow_rows": 20, "starts": 1}, "semi_supervised": {"hidden": 8},
        "shown_labels": {"labels_per_class": 1}, "vote_regression": {"shadow_rows": 20},
        "inverse_network": {"shadow_rows": 20}, "gradient_direction": {},
        "label_gradients": {}, "representation_network": {"shadow_rows": 20},
    }  # fmt: skip
    attacks = [
        {"name": name, "options": {"iterations": 3, **options}} for name, options in few.items()
    ]
    settings = {
        "name": "own", "method": method, "data": data, "train": {"epochs": 1, "device": "cpu"},
        "model": {"hidden": [8], "representation": 4, "projection": 4},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"}, "guard": {"mechanism": "none"},
        "attacks": attacks,
    }  # fmt: skip
    file, folder = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(json.dumps(settings))
    told = ["run", str(file), "--output", str(folder), "--no-baselines", "--json"]
    assert execute(told) == 0
    mounted = json.loads(capsys.readouterr().out)["attacks"]
    assert {one["attack"] for one in mounted} == set(few)
    of_labels = [one for one in mounted if one["target"] == "labels" and one["applicable"]]
    assert of_labels
    labelled = frame["label"].notna().sum()
    for one in of_labels:
        assert 0 < one["counts"]["scored"] + one["counts"]["known"] <= labelled, one["attack"]
