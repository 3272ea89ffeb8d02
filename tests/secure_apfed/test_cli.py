"""The command line on a small real run, and its errors: exit code, panel or JSON object."""

import inspect
import io
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pandas as pd
import pytest
import typer
from sklearn.datasets import load_breast_cancer

from apfed_bench import __main__ as bench
from apfed_experiments.finished import load_finished_run
from apfed_experiments.verdict import describe_run
from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.psi.interface import IntersectionTooSmallError
from secure_apfed.base.phases import PhaseName
from secure_apfed.cli import MOVED_COMMANDS, app, execute
from secure_apfed.commands import Finding, project
from secure_apfed.commands.doctor import is_healthy
from secure_apfed.console import progress, terminal
from secure_apfed.data import find_dataset
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.privacy.ledger import BudgetExhaustedError
from secure_apfed.runs.outcome import Progress
from secure_apfed.settings.data import Missing
from tests.secure_apfed.small_runs import read_stderr, run_as_json

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
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def printed(config_file: Path) -> tuple[Path, str, str]:
    """The folder of a finished run, and what stood on stdout and stderr."""
    folder = config_file.parent / "runs" / "one"
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert execute(["run", str(config_file), "--output", str(folder)]) == 0
    return folder, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def finished(printed: tuple[Path, str, str]) -> Path:
    return printed[0]


def test_the_command_has_at_most_18_entries() -> None:
    entries = typer.main.get_group(app).commands
    assert len(entries) <= 18
    assert not entries.keys() & MOVED_COMMANDS.keys()


@pytest.mark.parametrize("old", MOVED_COMMANDS)
def test_a_moved_command_is_refused_by_a_call_that_works(old: str, capsys: Capture) -> None:
    error = run_as_json(capsys, old, "--config", "any.yaml", code=2)["error"]
    advised = error["message"].split("`")[1]
    assert advised == MOVED_COMMANDS[old]
    program, *words = shlex.split(advised)
    if program == "secure-apfed":
        assert execute([*words, "--help"]) == 0
    else:
        with pytest.raises(SystemExit, match="0"):
            bench.main(["--help"])
    assert words[-1] in capsys.readouterr().out


ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    *ROOT.glob("*.md"),
    ROOT / "Makefile",
    *(
        path
        for folder in (
            ".ci",
            ".github",
            "protocols",
            "secure_apfed",
            "attacks",
            "experiments",
            "docs",
        )
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix not in {".gz", ".pdf", ".png", ".pyc", ".woff2"}
        and not any(part.endswith("_cache") for part in path.parts)
    ),
]


@pytest.mark.parametrize("old", MOVED_COMMANDS)
def test_no_text_advises_a_moved_command(old: str) -> None:
    call = re.compile(rf"secure-apfed\s+{old}(?![\w-])")
    assert not [path for path in TEXTS if call.search(path.read_text("utf-8"))]


def test_a_run_leaves_what_the_folder_promises_and_tells_it(printed: tuple[Path, str, str]) -> None:
    folder, out, err = printed
    assert "\\u" not in out, "a sign is shown by its number"
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml",
        "contract.json",
        "seeds.json",
        "versions.json",
        "metrics.jsonl",
        "model.safetensors",
        "model.json",
        "transcript.json",
        "result.json",
        "attacks.json",
        "pictures",
        "report.html",
        "tensorboard",
    }
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    page = (folder / "report.html").read_text()
    assert "masks among the passives remain" in page
    assert "labels of active by model completion" in page
    assert re.search(r"epoch 3/3 +loss \d\.\d{4}.* epsilon_x \S+ +\d+\.\d MB sent", err)
    assert re.search(r"accuracy, APFed-C +\d+\.\d\d % of 142 test rows", out)
    lines = dict(describe_run(load_finished_run(folder)))
    starts = {
        title: re.escape(" ".join(text.split()[:4])).replace(r"\ ", r"\s+")
        for title, text in lines.items()
    }
    verdict = out[out.index("Verdict") :]
    assert not [
        title for title, start in starts.items() if not re.search(rf"{title}\s+{start}", verdict)
    ]
    assert out.index("Verdict") > out.index("run folder"), "the verdict is read last"
    assert re.search(r"epsilon_x, one row's releases +8 at delta 1e-05, T 3", out)
    assert re.search(r"epsilon_y, one training label +no guarantee", out)
    assert re.search(r"epsilon_model, one whole record +no guarantee", out)
    assert "epoch" not in out


@pytest.mark.slow
def test_json_is_what_the_folder_holds(config_file: Path, tmp_path: Path, capsys: Capture) -> None:
    answer = run_as_json(
        capsys, "run", config_file, "--output", tmp_path / "r", "--set", "train.epochs=1"
    )
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert answer["accuracy"] == result["accuracy"]
    assert answer["privacy"]["epsilon_y"] == "inf"
    assert len(answer["verdict"]) == 4
    assert {one["adversary"] for one in answer["attacks"]} == {"passive-1", "passive-2"}
    assert Path(answer["report"]).is_file()


@pytest.mark.slow
def test_a_profile_tells_phases_that_add_up(
    config_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    call = ["run", config_file, "--set", "train.epochs=1", "--set", "attacks=[]", "--profile"]
    began = time.perf_counter()
    phases = run_as_json(capsys, *call, "--output", tmp_path / "r")["phases"]
    passed = time.perf_counter() - began
    assert list(phases) == [*get_args(PhaseName)]
    measured = [phase["seconds"] for name, phase in phases.items() if name != "start"]
    assert all(seconds > 0 for seconds in measured)
    assert 0.5 * passed < sum(measured) <= passed
    peaks = [phase["peak_bytes"] for phase in phases.values()]
    assert peaks[-1] == max(peaks) > 10**7
    assert execute([*map(str, call), "--output", str(tmp_path / "s"), "--no-baselines"]) == 0
    assert re.search(r"baselines +\d+ ms +\d+ ms", capsys.readouterr().out)
    assert execute([*map(str, call), "--transport", "local"]) == 2
    assert "--profile measures one run in memory" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_resume(
    config_file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def stops_in_epoch_2(name: str, *, quiet: bool) -> Iterator[Any]:
        def update(progress: Progress) -> None:
            if progress.epoch == 2:
                raise KeyboardInterrupt

        yield update

    folder = tmp_path / "r"
    with monkeypatch.context() as patch:
        patch.setattr(progress, "show_run", stops_in_epoch_2)
        assert execute(["run", str(config_file), "--output", str(folder)]) == 130
    message = "".join(capsys.readouterr().err.replace("│", "").split())
    again = ["run", str(folder / "config.yaml"), "--output", str(folder), "--resume"]
    assert "".join(["secure-apfed", *again]) in message
    assert not (folder / "result.json").exists()
    assert execute([*again, "--no-baselines"]) == 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


def test_prediction_needs_no_other_party(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    columns = find_dataset("breast_cancer").natural_views["means"]
    frame: pd.DataFrame = load_breast_cancer(as_frame=True).data[list(columns)].head(5)
    rows = tmp_path / "new rows.csv"
    frame.to_csv(rows, index=False)
    arguments = ("predict", "--model", str(finished), "--data", str(rows))
    answer = run_as_json(capsys, *arguments)
    assert answer["classes"] == ["malignant", "benign"]
    assert [one["id"] for one in answer["predictions"]] == ["0", "1", "2", "3", "4"]
    shares = [one["probabilities"] for one in answer["predictions"]]
    assert [sum(one) for one in shares] == pytest.approx([1] * 5, abs=1e-5)
    assert [one["class"] for one in answer["predictions"]] == [
        answer["classes"][one.index(max(one))] for one in shares
    ]
    assert execute([*arguments, "--output", str(tmp_path / "p.csv")]) == 0
    assert len(pd.read_csv(tmp_path / "p.csv")) == 5
    assert execute([*arguments, "--output", str(tmp_path / "p.xlsx")]) == 3
    frame.drop(columns=["mean area"]).to_csv(rows, index=False)
    error = run_as_json(capsys, *arguments, code=3)["error"]
    assert error["kind"] == "DataError"
    assert "1 of 10 columns are missing: mean area" in error["message"]


def test_a_report_is_made_again_from_the_folder(finished: Path, capsys: Capture) -> None:
    (finished / "report.html").unlink()
    assert run_as_json(capsys, "report", finished) == {"report": str(finished / "report.html")}
    assert (finished / "report.html").is_file()


def test_a_plan_forecasts_the_run(config_file: Path, finished: Path, capsys: Capture) -> None:
    answer = run_as_json(capsys, "plan", config_file)
    result = json.loads((finished / "result.json").read_text())
    assert answer["wire_bytes"] == pytest.approx(result["wire_bytes"], rel=0.05)
    assert answer["epsilon_x"] == pytest.approx(result["privacy"]["epsilon_x"], rel=1e-6)
    assert answer["aligned_rows"] == result["aligned_rows"]
    assert answer["train_rows"] == result["train_rows"]
    assert answer["numbers_per_row"] == 8
    assert list(answer["seconds"]) == ["read", "align", "train"]
    assert min(answer["seconds"].values()) > 0
    (warned,) = answer["warnings"]
    assert "take frozen_gaussian, or the method apfed_code" in warned


@pytest.mark.slow
def test_doctor_names_what_is_lacking(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"torch": ("torch", "networks"), "nowhere": ("nowhere_at_all", "tests")}
    monkeypatch.setattr("secure_apfed.commands.doctor._REQUIRED_PACKAGES", missing)
    answer = run_as_json(capsys, "doctor", "--load", code=1)
    assert answer["load"]
    assert not answer["healthy"]
    found = {one["name"]: Finding(**one) for one in answer["findings"]}
    assert found["torch"].state == "ok"
    assert found["digits"].value == "ships with scikit-learn"
    assert all(finding.remedy for finding in found.values() if finding.state != "ok")
    lacking = found.pop("nowhere")
    assert lacking.state == "missing"
    assert lacking.remedy.startswith("make setup")
    assert is_healthy(tuple(found.values()))


def test_the_data_sets_are_listed(capsys: Capture, tmp_path: Path) -> None:
    names = [one["name"] for one in run_as_json(capsys, "data", "list")["datasets"]]
    assert {"digits", "breast_cancer", "mnist", "cifar100"} <= set(names)
    answer = run_as_json(capsys, "data", "fetch", "digits", "--folder", tmp_path)
    assert answer == {"name": "digits", "files": []}


_STEPPED = (
    "torch, secure_apfed.learning.descent as d; a = torch.ones(1, requires_grad=True); "
    "a.grad = a.detach(); o = d.make_eager_class(torch.optim.AdamW)([a]); o.step(); "
    "o.zero_grad(); o.load_state_dict(o.state_dict())"
)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("imported", "spared"),
    [
        ("secure_apfed; secure_apfed.align", {"torch", "tenseal"}),
        (
            "secure_apfed.config.file, secure_apfed.runs.run",
            {"sklearn", "matplotlib", "opacus", "scipy.special", "scipy.linalg"},
        ),
        ("apfed_attacks", {"torchmetrics", "matplotlib"}),
        (
            "apfed_attacks.foreign",
            {"scipy.stats", "sklearn", "pandas", "secure_apfed.methods", "secure_apfed.runs"},
        ),
        ("secure_apfed.cli", {"numpy", "pydantic", "torch"}),
        (
            "secure_apfed.commands.doctor as d; d.examine_machine()",
            {"opacus", "scipy.stats", "sklearn", "pandas", "matplotlib"},
        ),
        (_STEPPED, {"torch._dynamo"}),
    ],
)
def test_a_part_does_not_load_what_comes_later(imported: str, spared: set[str]) -> None:
    assert list_loaded(imported, spared) == ""


def list_loaded(imported: str, spared: set[str]) -> str:
    """Return which of the spared modules a fresh process has once it imported these."""
    code = f"import sys, {imported}\nsys.exit(str({spared} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip()


def test_the_result_of_a_run_is_printed_without_the_extra_that_draws() -> None:
    """A party without `experiments` ended with an error after its run."""
    names = ("finished", "baselines", "variants", "verdict", "worth")
    imported = ", ".join(f"apfed_experiments.{name}" for name in names)
    assert list_loaded(imported, {"matplotlib", "jinja2", "adjustText", "dp_accounting"}) == ""


@pytest.mark.slow
def test_one_thread_is_of_libraries_that_load_within(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import threadpoolctl\nfrom secure_apfed.base import seeds\nwith seeds.one_thread():\n"
        " import scipy.linalg, sklearn.ensemble\n"
        " print({pool['num_threads'] for pool in threadpoolctl.threadpool_info()})"
    )
    for of in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{of}_NUM_THREADS", "2")
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "{1}"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process begins with nothing held")
def test_peak_memory_is_of_this_process_and_not_of_who_started_it() -> None:
    told = "from secure_apfed.base import phases; print(phases.peak_memory())"
    code = (
        "import subprocess, sys\nheld = bytearray(500_000_000)\n"
        f"subprocess.check_call([sys.executable, '-c', {told!r}])"
    )
    of_child = int(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert 5_000_000 < of_child < 400_000_000


def test_what_may_be_done_about_empty_cells_is_what_settings_know() -> None:
    """Help loads no settings, so that the option names it, too."""
    option = inspect.signature(project.join).parameters["missing"].annotation
    assert get_args(option)[0] == Missing | None


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("party_seeds", ["secret", "shared_for_comparison"])
def test_several_seeds_by_one_option(tmp_path: Path, capsys: Capture, party_seeds: str) -> None:
    """With either kind of party seeds, paired with what the active does alone."""
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.replace("noise: secret", "noise: reproducible_insecure") + "seed: 3\n")

    def run_two_seeds(name: str) -> dict[str, Any]:
        place = tmp_path / name
        one: dict[str, Any] = run_as_json(
            capsys,
            "run",
            path,
            "--seeds",
            "2",
            "--output",
            place,
            "--set",
            f"party_seeds={party_seeds}",
            "--set",
            "data.labelled=40",
            "--set",
            "measure=auc",
            "--set",
            "attacks=[]",
        )
        assert one == json.loads((place / "several.json").read_text())
        return one

    first = run_two_seeds("first")
    assert (first["seeds"], first["party_seeds"]) == ([3, 4], party_seeds)
    reached = list(first["reached"].values())
    mean, low = (first["intervals"]["apfed_c"][key] for key in ("mean", "low"))
    assert low < mean == pytest.approx(sum(reached) / 2)
    folders = {seed: Path(folder) for seed, folder in first["folders"].items()}
    assert all((folder / "report.html").is_file() for folder in folders.values())
    assert first["reached"] == {
        seed: json.loads((folder / "result.json").read_text())["measures"]["apfed_c"]["auc"]
        for seed, folder in folders.items()
    }
    gain = first["gain"]
    assert gain["over_chosen"]["mean"] == pytest.approx(gain["reached"] - gain["local_score"])
    assert gain["shared"] == pytest.approx(2 / 7)  # of aligned people, those who test
    assert run_two_seeds("first") == first, "what lies there is not run again"
    (ranked,) = first["ranked"]
    assert (ranked["measure"], set(first["rankings"])) == ("average_precision", {"3", "4"})
    assert ranked["gain"]["low"] <= ranked["gain"]["mean"] <= ranked["gain"]["high"]
    assert "small-run-seed3/report.html" in (tmp_path / "first/index.html").read_text()

    def losses(one: dict[str, Any]) -> list[float]:
        files = [Path(folder) / "result.json" for folder in one["folders"].values()]
        return [json.loads(file.read_text())["measures"]["apfed_c"]["log_loss"] for file in files]

    same = losses(run_two_seeds("second")) == losses(first)
    assert same is (party_seeds == "shared_for_comparison")


def test_seeds_refuse_other_ways(config_file: Path, tmp_path: Path, capsys: Capture) -> None:
    several = ["run", str(config_file), "--seeds", "2", "--output", str(tmp_path / "two")]
    assert execute([*several, "--no-baselines", "--set", "attacks=[]"]) == 0
    out, err = capsys.readouterr()
    assert "seed 0" in out
    assert "points over" not in out, "nothing was measured to compare with"
    assert re.search(r"what help was worth\s+Not known", out)
    assert re.search(r"each party\s+drew a\s+secret seed", err)
    others = (["--transport", "local"], ["--resume"], ["--profile"])
    assert [execute([*several, *other]) for other in others] == [2, 2, 2]
    assert "--seeds runs in memory" in capsys.readouterr().err
    assert execute(["run", str(config_file), "--json-events"]) == 2
    assert "parties that run apart" in json.loads(capsys.readouterr().out)["error"]["message"]


# Errors: one panel on stderr or one JSON object, and an exit code that tells.


def test_each_kind_of_error_has_its_exit_code(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    fails = Mock(side_effect=ZeroDivisionError())
    monkeypatch.setattr("secure_apfed.runs.run.run", fails)
    monkeypatch.setattr("apfed_experiments.report.write_report", fails)
    arguments = ["run", str(config_file), "--output", str(tmp_path / "r")]
    with pytest.raises(ZeroDivisionError):  # a fault of the program keeps its traceback
        execute(arguments)
    codes: dict[type[Exception], int] = {
        ConfigError: 2,
        DataError: 3,
        ModelError: 3,
        CheckpointError: 3,
        IntersectionTooSmallError: 3,
        OSError: 3,
        LocalProtocolError: 4,
        RemoteProtocolError: 4,
        BudgetExhaustedError: 5,
    }
    found = {}
    for kind in codes:
        fails.side_effect = kind("x")
        found[kind] = execute(arguments)
    assert found == codes
    fails.side_effect = ModuleNotFoundError("No module named 'torch'", name="torch")
    with pytest.raises(ModuleNotFoundError, match="torch"):
        execute(["report", "runs/one"])
    fails.side_effect = ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    capsys.readouterr()
    assert execute(["report", "runs/one"]) == 2
    said = read_stderr(capsys)
    assert "matplotlib is not installed; run: python -m pip install '" in said
    assert "'matplotlib>=3.9'" in said


def test_an_error_is_a_panel_or_under_debug_a_traceback(config_file: Path, capsys: Capture) -> None:
    wrong = ["run", str(config_file), "--set", "train.epoch=3"]
    assert execute(wrong) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "The configuration is wrong" in err
    assert "did you mean 'epochs'?" in err
    assert "Traceback" not in err
    for arguments in (["--debug", *wrong], [*wrong, "--debug"]):
        assert execute(arguments) == 2
        assert "Traceback" in capsys.readouterr().err
    failure = terminal.Failure(code=3, title="Data", kind="DataError", message="column [bold]x[/]")
    terminal.show_failure(failure, as_json=False, debug=False)
    assert "[bold]x[/]" in capsys.readouterr().err


RUN = "run CONFIG --output"


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "message"),
    [
        ("run absent.yaml", 2, "ConfigError", "absent.yaml: there is no such file"),
        ("plan absent.yaml", 2, "ConfigError", "absent.yaml: there is no such file"),
        ("report absent", 3, "CheckpointError", "absent: there is no such run folder"),
        ("predict --model absent --data x.csv", 3, "CheckpointError", "absent"),
        ("data fetch digit", 2, "ConfigError", "did you mean 'digits'?"),
        ("attack absent --attacks ,", 2, "ConfigError", "no name is given"),
        ("run", 2, "UsageError", "Missing argument"),
        ("rnu", 2, "UsageError", "No such command"),
        ("doctor --hurry", 2, "UsageError", "No such option"),
        (f"{RUN} r --set 'attacks=[{{name: model_completoin}}]'", 2, "ConfigError", "model_comple"),
        (
            f"{RUN} r --set data.dataset=cifar100 --set data.folder=.",
            3,
            "DataError",
            "secure-apfed data fetch cifar100",
        ),
        *(
            (f"{RUN} r --set 'name={name}'", 2, "ConfigError", "--set: name: expected")
            for name in ("..", '" "', r'"a\nb"', "x" * 201)
        ),
        # A folder that cannot be used says why, and is left alone.
        (f"{RUN} done --resume", 3, "CheckpointError", "nothing to do: done holds a finished run"),
        (f"{RUN} done", 3, "CheckpointError", "choose another folder: done holds a run already"),
        (f"{RUN} absent --resume", 3, "CheckpointError", "start the run without --resume"),
        (f"{RUN} file", 3, "CheckpointError", "cannot be a run folder (File exists); choose ano"),
        (f"{RUN} file/below", 3, "CheckpointError", "cannot be a run folder (Not a directory)"),
    ],
)
def test_errors_are_one_json_object_for_programs(
    arguments: str,
    code: int,
    kind: str,
    message: str,
    config_file: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("done").mkdir()
    Path("done/result.json").write_text("{}")
    words = shlex.split(arguments.replace("CONFIG", str(config_file)))
    error = run_as_json(capsys, *words, code=code)["error"]
    assert (error["exit_code"], error["kind"]) == (code, kind)
    assert message in error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done", "file"]


@pytest.mark.parametrize("group", ["", "data", "certs", "audit-log"])
def test_without_a_command_there_is_help_and_no_empty_panel(group: str, capsys: Capture) -> None:
    assert execute(group.split()) in (0, 2)  # click before 8.2 says 0
    out, err = capsys.readouterr()
    assert "Usage:" in out
    assert err == ""


def test_a_file_that_an_unfinished_run_lacks_needs_no_copy(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    for told_of in ("has not finished; continue it with --resume", "restore it from a copy"):
        error = run_as_json(capsys, "predict", "--model", tmp_path, "--data", "x.csv", code=3)[
            "error"
        ]
        assert told_of in error["message"]
        (tmp_path / "result.json").write_text("{}")


def test_tables_cut_no_word(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    note = 9 * "of people who are told apart by their words"
    rows = [("a-run/in-a-folder-of-a-long-name", "3.1", note), ("another/one", "22.0", "")]
    terminal.show_rows("Runs", ("run", "figure", "note"), rows)
    title, _, first, second = capsys.readouterr().out.splitlines()
    assert (title, second.split()) == ("Runs", ["another/one", "22.0"])
    assert first.endswith(note)


@pytest.mark.parametrize(
    ("show", "stream"),
    [
        (lambda text: terminal.show_rows("Run", ("", ""), [("sent", text)]), "out"),
        (lambda text: terminal.show_rows(text, ("a",), [("b",)]), "out"),
        (lambda text: terminal.show_rows("Run", (text,), [("b",)]), "out"),
        (terminal.show_note, "err"),
        (terminal.show_line, "err"),
    ],
    ids=["cell", "title", "head", "note", "line"],
)
@pytest.mark.parametrize("blank", ["\u202f", "\u00a0"])
def test_units_stand_behind_a_plain_blank(
    blank: str, show: Callable[[str], object], stream: str, capsys: Capture
) -> None:
    show(f"3.9{blank}MB")
    assert "3.9 MB" in getattr(capsys.readouterr(), stream)


# What ends a run at another party, and what the panel is headed.
PEERS_ERRORS = {
    "it stopped": (RunStoppedError("bank stopped the run: 'DataError'"), "Another party stopped"),
    "it left": (PartyLeftError("the link to bank was broken"), "Another party left"),
    "it broke the rules": (RemoteProtocolError("bank sent a sum twice"), "The protocol was violat"),
}


@pytest.mark.parametrize("case", PEERS_ERRORS)
def test_who_left_or_stopped_violated_nothing(case: str) -> None:
    error, title = PEERS_ERRORS[case]
    failure = terminal.describe_failure(error)
    assert failure.title.startswith(title)
    assert failure.code == 4
