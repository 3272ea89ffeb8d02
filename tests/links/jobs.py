"""Jobs of NVFlare's for tests: parties' folders, and a simulator in a process of its own."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.config import Config
from secure_apfed.files import make_private
from secure_apfed.runs.local import prepare_parties
from tests.secure_apfed.small_runs import small_config

__all__ = ["OPEN", "SHORT", "WAIT", "Job", "job_of", "needs_nvflare"]

needs_nvflare = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None,
    reason="nvflare is missing: pip install 'secure-apfed[nvflare]'",
)
OPEN = {"guard": {"mechanism": "none", "noise": "reproducible_insecure"}}
SHORT = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
WAIT = {"silent_passive": "wait", "patience_s": 60.0, "restarts": 2}
JOB = (
    "import json, sys; from pathlib import Path;"
    "from secure_apfed.contrib.nvflare_job import simulate;"
    "files, workspace, resume = json.loads(sys.argv[1]);"
    "simulate({name: Path(file) for name, file in files.items()}, Path(workspace), resume=resume)"
)


class Job:
    """Parties' folders, and a job that plays them.

    Attributes:
        files: by party.
        workspace: of NVFlare's server and sites.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.run, self.workspace = folder / "run", folder / "nvflare"
        make_private(self.run)
        self.files = prepare_parties(config, self.run, over="nvflare", timeout_s=20)
        for file in self.files.values():
            file.write_text(file.read_text().replace("reconnect_s: 30.0", "reconnect_s: 3.0"))

    def play(self, *, resume: bool = False, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Play to the end; return the exit code. Nothing of it is left."""
        told = [{name: str(file) for name, file in self.files.items()}, str(self.workspace), resume]
        process = subprocess.Popen(
            [sys.executable, "-c", JOB, json.dumps(told)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        harm = threading.Thread(target=meanwhile)
        harm.start()
        try:
            return process.wait(200)
        finally:
            process.kill()
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            harm.join()

    def processes(self, site: str = "") -> list[int]:
        """Of this job's workspace, and of one site where one is named."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue
            of_site = not site or (
                "--client" in words and words[words.index("--client") + 1] == site
            )
            if of_site and any(word.startswith(str(self.workspace)) for word in words):
                found.append(int(entry.name))
        return found

    def said(self, name: str) -> str:
        log = self.files[name].parent / "log.txt"
        return log.read_text() if log.exists() else ""

    def log(self, site: str) -> Path:
        """NVFlare's, of one site or of the server."""
        return self.workspace / "secure-apfed" / site / "log.txt"

    def nvflares(self) -> dict[Path, bytes]:
        """All that NVFlare's server and sites wrote."""
        return {path: path.read_bytes() for path in self.workspace.rglob("*") if path.is_file()}


def job_of(folder: Path, method: str, **changes: Any) -> Job:
    return Job(small_config(method, **{"train": SHORT, **changes}), folder)
