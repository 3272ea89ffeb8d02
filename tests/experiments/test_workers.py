"""Workers come from a server that has imported what they need, and compute on one thread."""

import contextlib
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from apfed_experiments import workers

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
