"""Research from the command line: what help names is there, and what is wrong is told at once."""

import subprocess
import sys

import pytest

from apfed_bench.table import BENCHES
from apfed_experiments import leaks as parts
from apfed_experiments.references import REFERENCES
from apfed_experiments.sweep import CONFIGS
from secure_apfed.cli import execute
from secure_apfed.commands import bench, study

_HELPS = """
import sys
from secure_apfed.cli import execute
codes = [execute(call.split()) for call in ("--help", "study --help", "study gains --help")]
codes.append(execute(["bench", "--help"]))
heavy = {"torch", "matplotlib", "numpy", "pandas", "joblib", "multiprocessing"} & set(sys.modules)
print(codes, sorted(heavy), file=sys.stderr)
"""


def test_names_in_helps_are_those_of_the_tables() -> None:
    assert tuple(BENCHES) == bench.NAMES
    assert tuple(parts.PARTS) == study.LEAKS
    assert tuple(REFERENCES) == study.REFERENCES
    assert CONFIGS == study.SWEEPS


def test_helps_import_nothing_large() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELPS], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0] []"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "--config", "sweep-digts"], "did you mean 'sweep-digits'?"),
        (["references", "--only", "mia"], "Known are membership, model_completion"),
        (["gains", "--only", "votes/nothing"], "no case is like 'votes/nothing'"),
        (["leaks", "--only", "noise", "--only", "nothing"], "'nothing' is unknown"),
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("apfed_experiments.workers.begin", lambda: None)
    assert execute(["study", *arguments, "--debug"]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", "").split())
