"""A deployment of NVFlare's on this machine: a server and sites as processes, by their kits.

For tests. The kits come of the project that a party's folder has; all processes end with the test.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from secure_apfed.config.plain_yaml import parse_yaml
from tests.waiting import wait_until

_BIN = Path(sys.executable).parent
_READ = """
import json, sys
from nvflare.fuel.flare_api.flare_api import new_secure_session

kit, user, job, sites, places, folder = json.loads(sys.argv[1])
session = new_secure_session(user, kit)
calls = {"meta": ("get_job_meta", job), "download": ("download_job_result", job, folder)}
for site in ("server", *sites):
    calls[f"{site}: log of the job"] = ("get_job_logs", job, site)
    calls[f"{site}: ls"] = ("ls_target", site, "-R")
    calls[f"{site}: log"] = ("tail_target_log", site)
    calls |= {f"{site}: cat {place}": ("cat_target", site, None, place) for place in places}
said = {}
for name, (call, *options) in calls.items():
    try:
        said[name] = json.dumps(getattr(session, call)(*options), default=str)
    except Exception as error:
        said[name] = f"refused: {type(error).__name__}: {error}"
session.close()
print("\\n" + json.dumps(said))
"""
"""What an admin of NVFlare's can read of a job, by all of its commands that read."""


def make_environment(folder: Path) -> dict[str, str]:
    """Return variables for an engine's processes: this interpreter and its packages, a home."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(_BIN), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }


class Kits:
    """A server and its sites, from entry to exit.

    Args:
        folder: the folder `nvflare` of the organiser's; its kits are made there.
        sites: each party's file of variables.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Path]) -> None:
        self.home = folder
        self._sites = sites
        content, _ = parse_yaml((folder / "project.yml").read_text(), "project.yml")
        assert isinstance(content, dict)
        self.kits = folder / "kits" / content["name"] / "prod_00"
        self._lead = next(one["name"] for one in content["participants"] if one["type"] == "admin")
        self._server = content["participants"][0]["name"]

    def __enter__(self) -> "Kits":
        self.nvflare(
            "provision", "-p", str(self.home / "project.yml"), "-w", str(self.kits.parents[1])
        )
        self._start(self._server, "true")
        for name, variables in self._sites.items():
            self._start(name, f"set -a; . '{variables}'; set +a")
        names = [self._server, *self._sites]
        wait_until(lambda: all((self.kits / name / "log.txt").exists() for name in names))
        text = "New client"
        log = self.kits / self._server / "log.txt"
        wait_until(lambda: log.read_text().count(text) >= len(self._sites), "all sites are up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _ in range(2):  # whoever watches a process starts it again
            for pid in self.list_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def environment(self) -> dict[str, str]:
        return make_environment(self.home)

    def _start(self, name: str, before: str) -> None:
        start = self.kits / name / "startup/start.sh"
        subprocess.run(
            ["bash", "-c", f"{before}; exec bash '{start}'"],
            env=self.environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def nvflare(self, *words: str, timeout: float = 250.0) -> str:
        """Run NVFlare's own command to its end; return what it said."""
        ended = subprocess.run(
            [str(_BIN / "nvflare"), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert ended.returncode == 0 or "job" in words, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def submit(self, job: str) -> str:
        """Submit one of the folders of jobs; return the job's number."""
        kit = str(self.kits / self._lead)
        told = self.nvflare("job", "submit", "--startup-kit", kit, "-j", str(self.home / job))
        (number,) = re.findall(r"job_id: (\S+)", told)
        return str(number)

    def wait_for(self, number: str) -> str:
        """Wait for the end of a job; return what NVFlare says of it."""
        return self.nvflare("job", "wait", "--startup-kit", str(self.kits / self._lead), number)

    def read_as_admin(
        self, number: str, sites: Sequence[str], places: Sequence[str], folder: Path
    ) -> dict[str, str]:
        """Return the answers to the admin who reads at the server and at these sites.

        Args:
            number: of the job, whose result is downloaded into `folder`.
            sites: those asked, besides the server.
            places: files that the admin asks for.
        """
        told = [str(self.kits / self._lead), self._lead, number, sites, places]
        read = subprocess.run(
            [sys.executable, "-c", _READ, json.dumps([*told, str(folder)])],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )
        assert read.returncode == 0, read.stdout + read.stderr
        answers = json.loads(read.stdout.splitlines()[-1])
        assert isinstance(answers, dict)
        return answers

    def list_processes(self, site: str = "") -> list[int]:
        """Return the processes of one kit, or of all."""
        beginning = str(self.kits / site).encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if any(word.startswith(beginning) for word in words):
                    found.append(int(entry.name))
        return found

    def kill_job(self, site: str) -> None:
        """Kill the process that runs a job at a site, and leave the site itself alone."""
        for pid in self.list_processes(site):
            words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
            if any("worker_process" in word for word in words):
                os.kill(pid, signal.SIGKILL)
