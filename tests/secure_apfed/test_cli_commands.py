"""The command line, from a config to a report: every command on a small real run."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer

from secure_apfed import progress
from secure_apfed.cli import execute
from secure_apfed.commands.doctor import Finding, healthy
from secure_apfed.data import find_dataset
from secure_apfed.runs.outcome import Progress

CONFIG = """\
name: small-run
method: apfed_c
data: {dataset: breast_cancer, overlap: 0.8}
model: {hidden: [8], representation: 8, projection: 8}
guard: {mechanism: gaussian, epsilon: 8, noise: secret}
secure_sum: {scheme: plain, masks: pairwise}
train: {epochs: 3, batch_size: 128, learning_rate: 0.05}
attacks: [{name: model_completion}]
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def printed(config_file: Path) -> tuple[Path, str, str]:
    """The folder of a finished run, and what stood on stdout and stderr."""
    folder, out, err = config_file.parent / "runs" / "one", io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert execute(["run", str(config_file), "--output", str(folder)]) == 0
    return folder, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def finished(printed: tuple[Path, str, str]) -> Path:
    return printed[0]


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    """Run a command with --json; its stdout is one object and nothing else."""
    assert execute([*map(str, arguments), "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_a_run_leaves_everything_that_the_folder_promises(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "config.yaml", "contract.json", "seeds.json", "versions.json", "metrics.jsonl",
        "model.safetensors", "model.json", "transcript.json", "result.json", "attacks.json",
        "pictures", "report.html", "tensorboard",
    }  # fmt: skip
    assert len((finished / "metrics.jsonl").read_text().splitlines()) == 3
    page = (finished / "report.html").read_text()
    assert "masks among the passives remain" in page
    assert "labels of active by model completion" in page


def test_progress_goes_to_stderr_and_the_result_to_stdout(printed: tuple[Path, str, str]) -> None:
    _, out, err = printed
    assert re.search(r"epoch 3/3 +loss \d\.\d{4}.* epsilon_x \S+ +\d+\.\d MB sent", err)
    assert "accuracy, apfed_c" in out
    assert re.search(r"epsilon_x, one row's releases +8 at delta 1e-05, T 3", out)
    assert re.search(r"epsilon_y, one training label +inf", out)
    assert re.search(r"epsilon_model, one whole record +not claimed", out)
    assert "epoch" not in out


def test_json_is_one_object_with_what_the_folder_holds(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = told(capsys, "run", config_file, "--output", tmp_path / "r", "--set", "train.epochs=1")
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert answer["accuracy"] == result["accuracy"]
    assert answer["privacy"]["epsilon_y"] == "inf"
    assert {one["adversary"] for one in answer["attacks"]} == {"passive-1", "passive-2"}
    assert Path(answer["report"]).is_file()


def test_an_interrupted_run_says_how_to_resume_and_then_ends_the_same(
    config_file: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def stops_in_epoch_2(name: str, *, quiet: bool) -> Iterator[Any]:
        def update(progress: Progress) -> None:
            if progress.epoch == 2:
                raise KeyboardInterrupt

        yield update

    arguments = ["run", str(config_file), "--output", str(tmp_path / "r")]
    # Secret noise would differ between the two runs that are compared.
    open_noise = ["--set", "guard={mechanism: none}", "--set", "party_seeds=shared_for_comparison"]
    assert execute([*arguments[:2], "--output", str(tmp_path / "whole"), *open_noise]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(progress, "watching", stops_in_epoch_2)
        assert execute([*arguments, *open_noise]) == 130
    message = "".join(capsys.readouterr().err.replace("│", "").split())
    again = [
        "run",
        str(tmp_path / "r" / "config.yaml"),
        "--output",
        str(tmp_path / "r"),
        "--resume",
    ]
    assert "".join(["secure-apfed", *again]) in message
    assert not (tmp_path / "r" / "result.json").exists()

    assert execute(again) == 0
    whole, resumed = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "r")
    )
    assert resumed["accuracy"] == whole["accuracy"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "r")]
    assert weights[0] == weights[1]


@pytest.fixture
def active_rows(tmp_path: Path) -> Path:
    columns = find_dataset("breast_cancer").natural_views["means"]
    frame: pd.DataFrame = load_breast_cancer(as_frame=True).data[list(columns)].head(5)
    path = tmp_path / "new rows.csv"
    frame.to_csv(path, index=False)
    return path


def test_prediction_needs_no_other_party(
    finished: Path, active_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = told(capsys, "predict", "--model", finished, "--data", active_rows)
    assert answer["classes"] == ["malignant", "benign"]
    assert [one["id"] for one in answer["predictions"]] == ["0", "1", "2", "3", "4"]
    for one in answer["predictions"]:
        assert sum(one["probabilities"]) == pytest.approx(1, abs=1e-5)
        best = max(range(2), key=one["probabilities"].__getitem__)
        assert one["class"] == answer["classes"][best]


def test_predictions_are_written_where_asked(
    finished: Path, active_rows: Path, tmp_path: Path
) -> None:
    arguments = ["predict", "--model", str(finished), "--data", str(active_rows)]
    for name, read in (("p.csv", pd.read_csv), ("p.parquet", pd.read_parquet)):
        assert execute([*arguments, "--output", str(tmp_path / name)]) == 0
        frame = read(tmp_path / name)
        assert list(frame.columns) == ["id", "class", "p(malignant)", "p(benign)"]
        assert len(frame) == 5
    assert execute([*arguments, "--output", str(tmp_path / "p.xlsx")]) == 3


def test_missing_columns_are_named(
    finished: Path, active_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pd.read_csv(active_rows).drop(columns=["mean area"]).to_csv(active_rows, index=False)
    answer = told(capsys, "predict", "--model", finished, "--data", active_rows, code=3)
    assert answer["error"]["kind"] == "DataError"
    assert "1 of 10 columns are missing: mean area" in answer["error"]["message"]


def test_a_report_is_made_again_from_the_folder(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "report.html").unlink()
    assert told(capsys, "report", finished) == {"report": str(finished / "report.html")}
    assert (finished / "report.html").is_file()


def test_a_plan_forecasts_what_the_run_then_sends(
    config_file: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = told(capsys, "plan", config_file)
    result = json.loads((finished / "result.json").read_text())
    assert answer["wire_bytes"] == pytest.approx(result["wire_bytes"], rel=0.05)
    assert answer["epsilon_x"] == pytest.approx(result["privacy"]["epsilon_x"], rel=1e-6)
    assert answer["aligned_rows"] == result["aligned_rows"]
    assert answer["train_rows"] == result["train_rows"]
    assert answer["numbers_per_row"] == 8
    assert answer["seconds"] > 0
    assert answer["warnings"] == []


def test_a_plan_warns_of_unsafe_and_costly_choices(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unsafe = [
        "--set",
        "guard={mechanism: none}",
        "--set",
        "secure_sum={scheme: plain, masks: none}",
    ]
    wide = ["--set", "model={hidden: [8], representation: 2000, projection: none}"]
    warned = " ".join(told(capsys, "plan", config_file, *unsafe, *wide)["warnings"])
    assert "this sends 2,000 numbers a row; with model.projection: 64 it would be 31" in warned
    assert "epsilon is infinite" in warned
    assert "the aggregator reads every gradient" in warned


def test_a_plan_of_the_active_alone_sends_nothing(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ["--set", "method=single_view", "--set", "guard={mechanism: none}"]
    answer = told(capsys, "plan", config_file, *alone)
    assert answer["wire_bytes"] == 0
    assert answer["links"] == []
    assert (answer["epsilon_x"], answer["releases"]) == (0.0, 0)
    # Nobody receives anything, but the model is fitted to the labels.
    assert answer["epsilon_y"] == answer["epsilon_model"] == "inf"
    assert execute(["plan", str(config_file), *alone, "--set", "dp_sgd={epsilon: 4}"]) == 0
    assert re.search(r"epsilon_y, one training label +4 at delta 1e-05", capsys.readouterr().out)


def test_doctor_names_what_is_there_and_how_to_get_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"torch": ("torch", "networks"), "nowhere": ("nowhere_at_all", "tests")}
    monkeypatch.setattr("secure_apfed.commands.doctor._REQUIRED", missing)
    answer = told(capsys, "doctor", code=1)
    assert not answer["healthy"]
    found = {one["name"]: Finding(**one) for one in answer["findings"]}
    assert found["torch"].state == "ok"
    assert found["digits"].value == "ships with scikit-learn"
    assert all(finding.remedy for finding in found.values() if finding.state != "ok")
    lacking = found.pop("nowhere")
    assert lacking.state == "missing"
    assert "pip install" in lacking.remedy
    assert healthy(tuple(found.values()))


def test_the_data_sets_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [one["name"] for one in told(capsys, "data", "list")["datasets"]]
    assert {"digits", "breast_cancer", "mnist", "cifar100"} <= set(names)
    assert execute(["data", "list"]) == 0
    assert "fashion_mnist" in capsys.readouterr().out
    answer = told(capsys, "data", "fetch", "digits", "--folder", tmp_path)
    assert answer == {"name": "digits", "files": []}


def test_help_comes_without_loading_what_commands_need() -> None:
    code = (
        "import sys, secure_apfed.cli\n"
        "heavy = {'torch', 'pandas', 'tenseal', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else secure_apfed.cli.execute(['--help']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("run", "predict", "report", "data", "doctor", "plan"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("imported", "spared"),
    [
        ("secure_apfed.config.file, secure_apfed.runs.run", {"sklearn", "matplotlib", "opacus"}),
        ("apfed_attacks", {"torchmetrics", "matplotlib"}),
    ],
)
def test_a_run_begins_without_loading_what_its_end_needs(imported: str, spared: set[str]) -> None:
    code = f"import sys, {imported}\nsys.exit(str({spared} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("party_seeds", ["secret", "shared_for_comparison"])
def test_several_seeds_by_one_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], party_seeds: str
) -> None:
    """With either kind of party seeds, paired with what the active does alone."""
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.replace("noise: secret", "noise: reproducible_insecure") + "seed: 3\n")

    def found(name: str) -> dict[str, Any]:
        place = tmp_path / name
        one: dict[str, Any] = told(
            capsys, "run", path, "--seeds", "2", "--output", place, "--set",
            f"party_seeds={party_seeds}", "--set", "data.labelled=40", "--set", "measure=auc",
        )  # fmt: skip
        assert one == json.loads((place / "several.json").read_text())
        return one

    first = found("first")
    assert (first["seeds"], first["party_seeds"]) == ([3, 4], party_seeds)
    reached = list(first["reached"].values())
    mean, low = (first["intervals"]["apfed_c"][key] for key in ("mean", "low"))
    assert low < mean == pytest.approx(sum(reached) / 2)
    for seed, folder in first["folders"].items():
        assert (Path(folder) / "report.html").is_file()
        outcome = json.loads((Path(folder) / "result.json").read_text())
        assert outcome["measures"]["apfed_c"]["auc"] == first["reached"][seed]
    gain = first["gain"]
    assert gain["over_chosen"]["mean"] == pytest.approx(gain["reached"] - gain["solo"])
    assert 0 < gain["shared"] < 0.25 * 40 / 100
    again = found("first")
    assert again == first, "what lies there is not run again"

    def losses(one: dict[str, Any]) -> list[float]:
        files = [Path(folder) / "result.json" for folder in one["folders"].values()]
        return [json.loads(file.read_text())["measures"]["apfed_c"]["log_loss"] for file in files]

    same = losses(found("second")) == losses(first)
    assert same is (party_seeds == "shared_for_comparison")


def test_several_seeds_say_what_they_drew_and_refuse_other_ways(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = ["run", str(config_file), "--seeds", "2", "--output", str(tmp_path / "two")]
    assert execute([*several, "--no-baselines", "--set", "attacks=[]"]) == 0
    out, err = capsys.readouterr()
    assert "seed 0" in out
    assert "help" not in out, "nothing was measured to compare with"
    assert re.search(r"each party\s+drew a\s+secret seed", err)
    for other in (["--transport", "local"], ["--resume"]):
        assert execute([*several, *other]) == 2
    assert "--seeds runs in memory" in capsys.readouterr().err
