"""Research from the command line: what help names is there, and what is wrong is told at once."""

import contextlib
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from apfed_bench.table import BENCHES
from apfed_experiments import leaks as parts
from apfed_experiments import workers
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
# In a process of its own, since a server stays as long as who began it.
_WORKING = """
import gc, json, os, sys, time
from apfed_experiments import workers

def work():
    import torch
    told = {"own": os.getpid(), "parent": os.getppid(), "threads": torch.get_num_threads(),
            "preloaded": "apfed_experiments.main_job" in sys.modules,
            "frozen": gc.get_freeze_count() > 10_000}
    print(json.dumps(told), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    os.environ.pop("OMP_NUM_THREADS", None)
    workers.begin()
    print(json.dumps([os.getpid(), os.environ.get("OMP_NUM_THREADS")]), flush=True)
    from joblib import Parallel, delayed
    Parallel(n_jobs=2)(delayed(work)() for _ in range(2))
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


# Workers come from a server that has imported what they need, and compute on one thread.


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
    with contextlib.suppress(ImportError), workers.uncollected():
        seen.append(gc.isenabled())
        raise ImportError
    gc.unfreeze()
    assert (seen, gc.isenabled()) == ([False], True)


def test_on_other_systems_processes_start_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from joblib.externals.loky.backend.context import get_context

    monkeypatch.setattr(sys, "platform", "darwin")
    workers.begin()
    assert get_context().get_start_method() == "loky"
