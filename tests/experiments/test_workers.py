"""Workers come from a server that has imported what they need, and compute on one thread."""

import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apfed_experiments import workers

# In a process of its own, since a server stays as long as who began it.
_ASKED = """
import json, os, sys
from apfed_experiments import workers

def seen():
    import torch
    return {"parent": os.getppid(), "preloaded": "apfed_experiments.main_job" in sys.modules,
            "threads": torch.get_num_threads(), "frozen": __import__("gc").get_freeze_count()}

if __name__ == "__main__":
    workers.begin()
    from joblib import Parallel, delayed
    found = Parallel(n_jobs=2)(delayed(seen)() for _ in range(4))
    print(json.dumps({"own": os.getpid(), "omp": os.environ.get("OMP_NUM_THREADS"), "seen": found}))
"""


def test_workers_are_forked_from_a_server_that_imported_everything(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(_ASKED, "utf-8")
    environment = {name: value for name, value in os.environ.items() if "THREADS" not in name}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True,
        env=environment,
    )  # fmt: skip
    told = json.loads(done.stdout)
    parents = {one["parent"] for one in told["seen"]}
    assert len(parents) == 1
    assert told["own"] not in parents
    assert all(one["preloaded"] and one["threads"] == 1 for one in told["seen"])
    assert all(one["frozen"] > 10_000 for one in told["seen"])
    assert told["omp"] is None


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


_COMMAND = """
import os, sys
from secure_apfed.cli import execute

def found(*_, **__):
    from joblib import Parallel, delayed
    told = {os.getppid(), *Parallel(n_jobs=2)(delayed(os.getppid)() for _ in range(2))}
    print(len(told), os.getpid() in told)
    return []

class Fake:
    HEADER, READING, run_main_job = (), "", staticmethod(found)

if __name__ == "__main__":
    from apfed_experiments import workers
    began = workers.begin
    workers.begin = lambda: (print("torch" in sys.modules), began())
    sys.modules["apfed_experiments.main_job"] = Fake
    raise SystemExit(execute(["study", "main"]))
"""


def test_a_command_begins_them_before_it_imports_what_runs_need(tmp_path: Path) -> None:
    script = tmp_path / "commands.py"
    script.write_text(_COMMAND, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[:2] == ["False", "2 False"]


_WORKING = """
import os, sys, time
from apfed_experiments import workers

def work():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    workers.begin()
    from joblib import Parallel, delayed
    Parallel(n_jobs=2)(delayed(work)() for _ in range(2))
"""


def test_workers_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    script = tmp_path / "works.py"
    script.write_text(_WORKING, "utf-8")
    asking = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    at_work = [int(asking.stdout.readline()) for _ in range(2)]
    asking.kill()
    # Whoever still worked would hold the pipe open.
    rest, _ = asking.communicate(timeout=30)
    assert rest == ""
    assert len(set(at_work)) == 2
