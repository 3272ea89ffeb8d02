"""Errors on the command line: one panel or one JSON object, and an exit code that tells."""

import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.interface import IntersectionTooSmallError
from secure_apfed import terminal
from secure_apfed.cli import execute
from secure_apfed.errors import CheckpointError, ConfigError, DataError, ModelError
from secure_apfed.privacy.ledger import BudgetExhaustedError

CONFIG = """\
name: small
method: apfed_c
data: {dataset: breast_cancer}
guard: {mechanism: gaussian, epsilon: 8}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_each_kind_of_error_has_its_exit_code(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: Exception = ZeroDivisionError()

    def fails(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("secure_apfed.runs.run.run", fails)
    arguments = ["run", str(config_file), "--output", str(config_file.parent / "r")]
    with pytest.raises(ZeroDivisionError):  # a fault of the program keeps its traceback
        execute(arguments)
    for kind, code in (
        (ConfigError, 2), (DataError, 3), (ModelError, 3), (CheckpointError, 3),
        (IntersectionTooSmallError, 3), (OSError, 3), (LocalProtocolError, 4),
        (RemoteProtocolError, 4), (BudgetExhaustedError, 5),
    ):  # fmt: skip
        raised = kind("x")
        assert execute(arguments) == code, kind


@pytest.mark.parametrize("module", ["matplotlib", "torch"])
def test_a_missing_extra_is_named_and_nothing_else(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("apfed_experiments.report.write_report", fails)
    if module == "torch":
        with pytest.raises(ModuleNotFoundError, match="torch"):
            execute(["report", "runs/one"])
        return
    assert execute(["report", "runs/one"]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "matplotlib is not installed; pip install 'secure-apfed[experiments]'" in said


def test_an_error_is_one_panel_on_stderr_without_traceback(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["run", str(config_file), "--set", "train.epoch=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "The configuration is wrong" in err
    assert "did you mean 'epochs'?" in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback_wherever_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent.yaml")
    for arguments in (["--debug", "run", absent], ["run", absent, "--debug"]):
        assert execute(arguments) == 2
        assert "Traceback" in capsys.readouterr().err


def test_errors_are_one_json_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, kind, message in (
        ("run absent.yaml", 2, "ConfigError", "absent.yaml: there is no such file"),
        ("plan absent.yaml", 2, "ConfigError", "absent.yaml: there is no such file"),
        ("report absent", 3, "CheckpointError", "absent: there is no such run folder"),
        ("predict --model absent --data x.csv", 3, "CheckpointError", "absent"),
        ("data fetch digit", 2, "ConfigError", "did you mean 'digits'?"),
        ("attack absent --attacks ,", 2, "ConfigError", "no name is given"),
        ("run", 2, "UsageError", "Missing argument"),
        ("rnu", 2, "UsageError", "No such command"),
        ("doctor --hurry", 2, "UsageError", "No such option"),
    ):
        assert execute([*arguments.split(), "--json"]) == code
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["exit_code"], error["kind"]) == (code, kind)
        assert message in error["message"]


def test_without_a_command_there_is_help_and_no_empty_panel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for group in ("", "data", "certs", "audit-log"):
        assert execute(group.split()) in (0, 2)  # click before 8.2 says 0
        out, err = capsys.readouterr()
        assert "Usage:" in out
        assert err == ""


def test_a_file_that_an_unfinished_run_lacks_needs_no_copy(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_file.parent
    config_file.rename(folder / "config.yaml")
    arguments = ["predict", "--model", str(folder), "--data", "x.csv", "--json"]
    assert execute(arguments) == 3
    assert "has not finished; continue it with --resume" in capsys.readouterr().out
    (folder / "result.json").write_text("{}")
    assert execute(arguments) == 3
    assert "restore it from a copy" in capsys.readouterr().out


ROWS = [
    ("a-run/in-a-folder-of-a-long-name", "3.1", "of people who are told apart by their words"),
    ("another/one", "22.0", ""),
]


def test_tables_cut_no_word_where_nobody_reads_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.show_rows("Runs", ("run", "figure", "note"), [(*row[:2], 9 * row[2]) for row in ROWS])
    title, _, first, second = capsys.readouterr().out.splitlines()
    assert (title, second.split()) == ("Runs", ["another/one", "22.0"])
    assert first.endswith(9 * ROWS[0][2])
    assert second == second.rstrip()


def test_tables_cut_no_word_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for row in ROWS for cell in row for word in cell.split()]
    for width in (34, 60, 200):
        shown = partial(Console, force_terminal=True, width=width, color_system=None)
        monkeypatch.setattr(terminal, "Console", shown)
        terminal.show_rows("Runs", ("run", "figure", "note"), ROWS)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= max(width, len("figure") + 2 + len(ROWS[0][0]))
        assert not [word for word in words if word not in out.split()]


def test_a_misspelt_attack_is_refused_before_training(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_file.parent / "r"
    arguments = ["run", str(config_file), "--output", str(folder), "--json"]
    assert execute([*arguments, "--set", "attacks=[{name: model_completoin}]"]) == 2
    assert "model_completion" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not folder.exists()


def test_missing_data_say_what_to_run(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["--set", "data.dataset=cifar100", "--set", f"data.folder={tmp_path}", "--json"]
    assert execute(["run", str(config_file), "--output", str(tmp_path / "r"), *missing]) == 3
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "secure-apfed data fetch cifar100" in message


def test_markup_in_a_message_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    failure = terminal.Failure(code=3, title="Data", kind="DataError", message="column [bold]x[/]")
    terminal.show_failure(failure, as_json=False, debug=False)
    assert "[bold]x[/]" in capsys.readouterr().err


def test_a_name_that_is_no_folder_name_is_refused(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("..", " ", "a\nb", "x" * 201):
        arguments = ["run", str(config_file), "--set", f"name={json.dumps(name)}", "--json"]
        assert execute(arguments) == 2
        assert "--set: name: expected" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_folder_that_cannot_be_used_says_why_and_is_left_alone(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "result.json").write_text("{}")
    for place, more, message in (
        ("done", ["--resume"], "holds a finished run; there is nothing to resume"),
        ("done", [], "holds a run already, which is finished; choose another folder"),
        ("absent", ["--resume"], "checkpoint"),
        ("absent", ["--resume"], "start the run without --resume"),
        ("file", [], "cannot be a run folder (File exists); choose another folder"),
        ("file/below", [], "cannot be a run folder (Not a directory); choose another folder"),
    ):
        arguments = ["run", str(config_file), "--output", str(tmp_path / place), "--json", *more]
        assert execute(arguments) == 3
        assert message in json.loads(capsys.readouterr().out)["error"]["message"]
        assert not (tmp_path / "absent").exists()
