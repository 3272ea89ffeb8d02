"""A deployment of Flower's on this machine: a SuperLink and SuperNodes as processes, over TLS.

For tests. Each SuperNode has a key that the SuperLink knows. All processes end with the test.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from secure_apfed.organisations.local import find_free_addresses
from tests.links.kits import make_environment
from tests.waiting import wait_until

_IS_ACTIVE = "SuperNode ID:"
_BIN = Path(sys.executable).parent
_REQUEST = (
    "openssl req -x509 -newkey rsa:3072 -nodes -days 2 -keyout superlink.key -out superlink.pem "
    "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
)


class Flower:
    """A SuperLink and its SuperNodes, from entry to exit; `folder` is Flower's own folder."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self.home = folder
        self.address = address or find_free_addresses(1)[0]
        self.certificate = folder / "superlink.pem"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[list[str], Mapping[str, str]]] = {}
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> "Flower":
        self.home.mkdir(parents=True, exist_ok=True)
        subprocess.run(_REQUEST.split(), cwd=self.home, check=True, capture_output=True)
        port = self.address.rpartition(":")[2]
        tls = "--ssl-ca-certfile superlink.pem --ssl-certfile superlink.pem"
        command = f"flower-superlink --host 127.0.0.1 --port {port} {tls}"
        command += " --ssl-keyfile superlink.key --enable-supernode-auth"
        command += " --disable-runtime-dependency-installation"
        self._start("superlink", command.split(), {})
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "trial"\n[superlink.trial]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.certificate}"\n'
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self._processes):
            self.kill(name)
        for log in self._logs:
            log.close()

    def _start(self, name: str, words: Sequence[str], more: Mapping[str, str]) -> None:
        self._started[name] = list(words), more
        log = (self.home / f"{name}.txt").open("ab")
        self._logs.append(log)
        self._processes[name] = subprocess.Popen(
            [str(_BIN / words[0]), *words[1:]],
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**self.environment, **more},
            start_new_session=True,
        )

    @property
    def environment(self) -> dict[str, str]:
        flower = {"FLWR_HOME": str(self.home), "FLWR_TELEMETRY_ENABLED": "0"}
        return {**make_environment(self.home), **flower}

    def load_output(self, name: str) -> str:
        """Return a process's output so far."""
        log = self.home / f"{name}.txt"
        return log.read_text(errors="replace") if log.exists() else ""

    def flwr(self, *words: str, timeout: float = 60.0) -> str:
        """Run Flower's own command to its end; return what it said."""
        ended = subprocess.run(
            [str(_BIN / "flwr"), *words],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        return re.sub(r"\x1b\[\d*m", "", ended.stdout + ended.stderr)

    def start_node(self, name: str, node_config: str, more: Mapping[str, str]) -> None:
        """Make a SuperNode's key, register it, and start the SuperNode."""
        key = self.home / f"{name}-key"
        keygen = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)]
        subprocess.run(keygen, check=True)

        def is_registered() -> bool:
            return "registered" in self.flwr("supernode", "register", f"{key}.pub", "trial")

        wait_until(is_registered)
        port = find_free_addresses(1)[0].rpartition(":")[2]
        words = ["flower-supernode", "--port", port, "--superlink", self.address]
        words += ["--root-certificates", str(self.certificate)]
        words += ["--auth-supernode-private-key", str(key), "--node-config", node_config]
        self._start(name, words, more)

    def start_again(self, name: str, timeout: float = 150.0) -> None:
        """Start a SuperNode that was killed until it stays, as systemd does.

        The SuperLink refuses it until it has missed the heartbeats of the one before.
        """
        deadline = time.monotonic() + timeout
        before = self.load_output(name).count(_IS_ACTIVE)
        while self.load_output(name).count(_IS_ACTIVE) == before:
            assert time.monotonic() < deadline, self.load_output(name)[-2000:]
            if name in self._processes and self._processes[name].poll() is None:
                time.sleep(0.5)
                continue
            if name in self._processes:
                self.kill(name)
                time.sleep(5)
            self._start(name, *self._started[name])

    def kill(self, name: str) -> None:
        """Kill a process with all that it started, as a machine that loses its power."""
        process = self._processes.pop(name)
        for pid in [process.pid, *_list_children(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    @contextlib.contextmanager
    def run_app(self, app: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
        """Submit an app, and yield the process that prints its log to `app.txt`."""
        with (self.home / "app.txt").open("w") as log:
            process = subprocess.Popen(
                [str(_BIN / "flwr"), "run", str(app), "trial", "--stream", *options],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def wait_for(self, text: str, name: str = "app", timeout: float = 200.0) -> str:
        """Wait until a process said this; return all that it said."""
        deadline = time.monotonic() + timeout
        while text not in self.load_output(name):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name} did not say {text!r}:\n{self.load_output(name)[-3000:]}"
                )
            time.sleep(0.2)
        return self.load_output(name)


def _list_children(parent: int) -> list[int]:
    """Return all processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(status[1])
    found = [parent]
    for pid in found:
        found += [child for child, of in parents.items() if of == pid]
    return found[1:]
