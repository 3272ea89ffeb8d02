"""Research from the command line: help, errors at once, attacks, and its workers."""

import contextlib
import gc
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from apfed_bench import __main__ as bench
from apfed_bench.table import BENCHES
from apfed_experiments import leaks as parts
from apfed_experiments import workers
from apfed_experiments.study import load_base_config
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.cli import execute
from secure_apfed.commands import study
from secure_apfed.runs.run import run
from tests.experiments.run_folder import own_tables
from tests.secure_apfed.small_runs import read_stderr, run_as_json, small_config

_HELPS = """
import sys
from secure_apfed.cli import execute
codes = [execute(call.split()) for call in ("--help", "study --help", "study gains --help")]
from apfed_bench.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    codes.append(end.code)
heavy = {"torch", "matplotlib", "numpy", "pandas", "joblib", "multiprocessing"} & set(sys.modules)
print(codes, sorted(heavy), file=sys.stderr)
"""
# In a process of its own, since a server stays as long as who began it.
_WORKING = """
import gc, json, os, sys, time
from apfed_experiments import workers
from apfed_experiments.study import base_config

def work():
    import torch
    told = {"own": os.getpid(), "parent": os.getppid(), "threads": torch.get_num_threads(),
            "preloaded": "apfed_experiments.main_job" in sys.modules,
            "frozen": gc.get_freeze_count() > 10_000}
    os.write(1, f"{json.dumps(told)}\\n".encode())  # whole, beside the other's
    time.sleep(600)

if __name__ == "__main__":
    os.environ.pop("OMP_NUM_THREADS", None)
    workers.start_forkserver()
    print(json.dumps([os.getpid(), os.environ.get("OMP_NUM_THREADS")]), flush=True)
    from joblib import Parallel, delayed
    Parallel(n_jobs=2)(delayed(work)() for _ in range(2))
"""


def test_names_in_helps_are_those_of_the_tables() -> None:
    assert tuple(BENCHES) == bench.NAMES
    assert tuple(parts.LIST_ROWS_BY_PART) == study.LEAK_STUDIES
    assert [load_base_config(name).method.has_gradient_sum for name in study.BASE_CONFIGS] == [
        True
    ] * 3


def test_helps_import_nothing_large() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELPS], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0] []"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gains", "--only", "votes/nothing"], "no case is like 'votes/nothing'"),
        (["leaks", "--only", "noise", "--only", "nothing"], "'nothing' is unknown"),
        (["sums", "--base", "nothing"], "'nothing' is unknown"),
    ],
)
def test_what_is_wrong_is_told(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("apfed_experiments.workers.start_forkserver", lambda: None)
    assert execute(["study", *arguments, "--debug"]) == 2
    assert said in read_stderr(capsys)


# Workers come from a server that has imported what they need, and compute on one thread.


@pytest.mark.slow
def test_workers_are_forked_from_a_server_that_imported_all_and_end_with_who_asked(
    tmp_path: Path,
) -> None:
    script = tmp_path / "works.py"
    script.write_text(_WORKING, "utf-8")
    asking = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    own, threads = json.loads(asking.stdout.readline())
    seen = [json.loads(asking.stdout.readline()) for _ in range(2)]
    asking.kill()
    # Whoever still worked would hold the pipe open.
    rest, _ = asking.communicate(timeout=30)
    assert rest == ""
    assert threads is None
    assert len({of["own"] for of in seen}) == 2
    assert {of["parent"] for of in seen}.isdisjoint({own})
    assert len({of["parent"] for of in seen}) == 1
    assert all(of["preloaded"] and of["threads"] == 1 and of["frozen"] for of in seen)


def test_collections_go_on_after_imports_that_fail() -> None:
    seen = []
    with contextlib.suppress(ImportError), workers.pause_collection():
        seen.append(gc.isenabled())
        raise ImportError
    gc.unfreeze()
    assert (seen, gc.isenabled()) == ([False], True)


def test_on_other_systems_processes_start_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from joblib.externals.loky.backend.context import get_context

    monkeypatch.setattr(sys, "platform", "darwin")
    workers.start_forkserver()
    assert get_context().get_start_method() == "loky"


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs") / "small"
    with pytest.warns(UnsafeChoiceWarning):
        run(
            small_config(
                data={"dataset": "digits", "views": 2},
                transcript={"keep": "all"},
                model={"hidden": [16], "representation": 16, "projection": 16},
                secure_sum={"scheme": "plain", "allow_single_passive": True},
                guard={"mechanism": "none"},
            ),
            folder,
        )
    return folder


@pytest.mark.slow
def test_attacks_are_mounted_and_kept_beside_earlier_ones(
    finished_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--option", "temporal.labels_per_class=4")
    first = run_as_json(capsys, "attack", finished_folder, "--attacks", "temporal", *few)["attacks"]
    assert {one["attack"] for one in first} == {"temporal"}
    both = run_as_json(capsys, "attack", finished_folder, "--attacks", "inverse_network")["attacks"]
    assert {one["attack"] for one in both} == {"temporal", "inverse_network"}
    assert (finished_folder / "report.html").is_file()
    assert execute(["attack", str(finished_folder), "--attacks", "label_gradients"]) == 0
    assert "label_gradients declined: apfed_c" in capsys.readouterr().err


def test_wrong_arguments_are_refused(
    finished_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, says in (
        (["--attacks", "tempral"], "did you mean 'temporal'"),
        (["--option", "temporal"], "expected ATTACK.KEY=VALUE"),
        (["--option", "temporal.windw=3"], "did you mean 'window'"),
        (["--option", "temporal.window=[3"], "is not YAML"),
    ):
        assert (
            says
            in run_as_json(capsys, "attack", finished_folder, *arguments, code=2)["error"][
                "message"
            ]
        )
    assert (
        "holds no finished run"
        in run_as_json(capsys, "attack", tmp_path, code=3)["error"]["message"]
    )


def test_damaged_files_are_told(finished_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_refused_command(name: str) -> str:
        assert execute(["attack", str(finished_folder), "--attacks", name]) != 0
        return read_stderr(capsys)

    for content in ("[{", '[{"attack": "temporal"}]', "3"):
        (finished_folder / "attacks.json").write_text(content)
        assert "remove it and attack again" in run_refused_command("label_gradients")
    (finished_folder / "attacks.json").unlink()
    path = finished_folder / "alignment.safetensors"
    digests = finished_folder / "SHA256SUMS"
    whole = path.read_bytes()
    noted = digests.read_bytes()
    path.write_bytes(whole[:100])
    assert "is not as the run left it" in run_refused_command("label_gradients")
    digests.unlink()
    assert "cannot be read as this version writes them" in run_refused_command("label_gradients")
    digests.write_bytes(noted)
    path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["votes", "apfed_c", "tvfl"])
def test_own_tables_with_empty_labels_are_attacked(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most of the cells say nothing: no attack is told a label there, and none is right there."""
    data = own_tables(tmp_path)
    empty = tmp_path / "active.csv"
    frame = pd.read_csv(empty)
    frame.loc[frame.index % 4 != 0, "label"] = None
    frame.to_csv(empty, index=False)
    few = {
        "model_completion": {"labels_per_class": 4},
        "membership": {"shadow_models": 4},
        "unpaired_inversion": {"shadow_rows": 20, "starts": 1},
        "semi_supervised": {"hidden": 8},
        "shown_labels": {"labels_per_class": 1},
        "vote_regression": {"shadow_rows": 20},
        "inverse_network": {"shadow_rows": 20},
        "gradient_direction": {},
        "label_gradients": {},
        "representation_network": {"shadow_rows": 20},
    }
    attacks = [
        {"name": name, "options": {"iterations": 3, **options}} for name, options in few.items()
    ]
    settings = {
        "name": "own",
        "method": method,
        "data": data,
        "train": {"epochs": 1, "device": "cpu"},
        "model": {"hidden": [8], "representation": 4, "projection": 4},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "guard": {"mechanism": "none"},
        "attacks": attacks,
    }
    file = tmp_path / "run.yaml"
    folder = tmp_path / "run"
    file.write_text(json.dumps(settings))
    mounted = run_as_json(capsys, "run", file, "--output", folder, "--no-baselines")["attacks"]
    assert {one["attack"] for one in mounted} == set(few)
    of_labels = [one for one in mounted if one["target"] == "labels" and one["applicable"]]
    assert of_labels
    labelled = frame["label"].notna().sum()
    for one in of_labels:
        assert 0 < one["counts"]["scored"] + one["counts"]["known"] <= labelled, one["attack"]
