"""Parties inside a job of NVFlare's; a site and a server without it: who may call, who waits."""

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load

from apfed_protocols.errors import PartyLeftError
from apfed_protocols.seal import fresh_identity
from secure_apfed.base.files import make_private
from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.data import load_own
from secure_apfed.errors import ConfigError
from secure_apfed.organisations.engines import PARTY_FILE_VARIABLE
from secure_apfed.organisations.local import prepare_parties
from secure_apfed.organisations.party import PartyFile, run_party
from secure_apfed.runs.run import run
from tests.docs.pages import text_of
from tests.local.processes import model_digests
from tests.modules import forget_modules
from tests.secure_apfed.small_runs import small_config
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
needs_nvflare = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None,
    reason="nvflare is missing: the extra `nvflare`",
)
OPEN = {"guard": {"mechanism": "none", "noise": "reproducible_insecure"}}
SHORT = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
WAIT = {"silent_passive": "wait", "patience_s": 60.0, "restarts": 2}
JOB = (
    "import json, sys; from pathlib import Path;"
    "from secure_apfed.organisations.nvflare_job import simulate_job;"
    "files, workspace, resume = json.loads(sys.argv[1]);"
    "files = {name: Path(file) for name, file in files.items()};"
    "simulate_job(files, Path(workspace), resume=resume)"
)
FEW = {"data": {"dataset": "breast_cancer", "labelled": 40}}
DEALT = {"alignment": {"protocol": "circuit"}}


class Job:
    """Parties' folders, and a job that plays them."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.run = folder / "run"
        self.workspace = folder / "nvflare"
        make_private(self.run)
        self.files = prepare_parties(config, self.run, link_type="nvflare", timeout_s=20)
        for file in self.files.values():
            file.write_text(file.read_text().replace("reconnect_s: 30.0", "reconnect_s: 3.0"))

    def play(self, *, resume: bool = False, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Play to the end; return the exit code. Nothing of it is left."""
        told = [{name: str(file) for name, file in self.files.items()}, str(self.workspace), resume]
        process = subprocess.Popen(
            [sys.executable, "-c", JOB, json.dumps(told)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        harm = threading.Thread(target=meanwhile)
        harm.start()
        try:
            return process.wait(200)
        finally:
            process.kill()
            for pid in self.list_processes():
                os.kill(pid, signal.SIGKILL)
            harm.join()

    def list_processes(self, site: str = "") -> list[int]:
        """List processes of this job's workspace, or of one of its sites."""
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

    def load_log(self, name: str) -> str:
        log = self.files[name].parent / "log.txt"
        return log.read_text() if log.exists() else ""

    def log(self, site: str) -> Path:
        """NVFlare's, of one site or of the server."""
        return self.workspace / "secure-apfed" / site / "log.txt"

    def nvflares(self) -> dict[Path, bytes]:
        """All that NVFlare's server and sites wrote."""
        return {path: path.read_bytes() for path in self.workspace.rglob("*") if path.is_file()}


def make_job(folder: Path, method: str, **changes: Any) -> Job:
    return Job(small_config(method, **{"train": SHORT, **changes}), folder)


def secrets_of(files: Mapping[str, Path]) -> list[bytes]:
    """Bytes and texts of features, parameters and keys that nobody else has, of these parties."""
    found = []
    for name, file in files.items():
        pem = (file.parent / "identity.pem").read_bytes().splitlines()
        found.append(pem[1])
        if (file.parent / "table.safetensors").exists():
            rows = load_own(file.parent / "table.safetensors", name).table.features[:50]
            found += [row.numpy().tobytes() for row in rows]
            found += [repr(number).encode() for number in rows[:, 0].tolist() if number % 1]
        if (file.parent / "model.safetensors").exists():
            saved = load((file.parent / "model.safetensors").read_bytes())
            found += [one.numpy().tobytes() for one in saved.values() if one.numel() > 3]
    return found


@needs_nvflare
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"),
    [("apfed_c", OPEN), ("votes", {**OPEN, **FEW}), ("split_nn_sum", {}), ("vfedtrans", DEALT)],
)
def test_memorys_models_from_a_job_that_keeps_nothing(
    method: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    job = make_job(tmp_path, method, **changes)
    run(load_config(job.run / "config.yaml"), tmp_path / "memory")
    assert job.play() == 0
    assert model_digests(job.run) == model_digests(tmp_path / "memory")
    assert not job.list_processes()
    written = job.nvflares()
    assert b"active: its party has ended" in written[job.log("active")]
    secret = secrets_of(job.files)
    assert len(secret) > 150
    assert not [one for one in secret if any(one in content for content in written.values())]
    code = [path for path in written if path.suffix in (".py", ".pyc")]
    assert not code  # no code travels, so sites may deny it


@needs_nvflare
@pytest.mark.slow
def test_a_site_with_anothers_file_plays_nobody(tmp_path: Path) -> None:
    job = make_job(tmp_path, "apfed_c", **OPEN)
    job.files["passive-1"].write_text(job.files["passive-2"].read_text())
    assert job.play() != 0
    told = "SECURE_APFED_PARTY names the file of passive-2 here, and this site is passive-1"
    assert told in job.nvflares()[job.log("server")].decode()
    assert "has no link to" in job.load_log("active")


@needs_nvflare
@pytest.mark.slow
def test_a_party_that_cannot_begin_is_named_and_its_words_stay_its_own(tmp_path: Path) -> None:
    job = make_job(tmp_path, "apfed_c", **OPEN)
    (job.files["passive-1"].parent / "table.safetensors").write_bytes(b"4711 is secret")
    assert job.play() != 0
    assert "table.safetensors holds no prepared rows" in job.load_log("passive-1")
    log = job.nvflares()[job.log("server")].decode()
    assert "passive-1: DataError: its own log.txt says more" in log
    for name in ("active", "aggregator", "passive-2"):
        assert job.load_log(name).startswith(f"PartyLeftError: agreement: {name} has no link to ")
        assert "passive-1 stopped: 'DataError: its own log.txt says more'" in job.load_log(name)
        assert f"agreement: {name} has no link to " in log
    assert not [path for path, content in job.nvflares().items() if b"prepared rows" in content]


@needs_nvflare
@pytest.mark.slow
def test_a_site_that_is_killed_is_named_and_the_next_job_resumes(tmp_path: Path) -> None:
    """The simulator leaves it to the parties to notice; a deployed server ends the job at once."""
    job = make_job(tmp_path, "apfed_c", **OPEN, train={**SHORT, "epochs": 60})
    killed: list[float] = []

    def kill() -> None:
        metrics = job.run / "parties" / "active" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if metrics.exists() and metrics.read_text().count("\n") > 3:
                (pid,) = job.list_processes("passive-1")
                os.kill(pid, signal.SIGKILL)
                killed.append(time.time())
                return
            time.sleep(0.1)

    assert job.play(meanwhile=kill) != 0
    for name in ("active", "aggregator", "passive-2"):
        assert re.search("training|checkpoint", job.load_log(name))
        assert "passive-1" in job.load_log(name)
        assert (job.files[name].parent / "log.txt").stat().st_mtime < killed[0] + 30
    log = job.nvflares()[job.log("server")].decode()
    assert "passive-1: it was not heard of any more" in log
    assert job.play(resume=True) == 0
    assert set(model_digests(job.run)) == {"active", "aggregator", "passive-1", "passive-2"}


@needs_nvflare
@pytest.mark.slow
def test_all_wait_for_a_site_that_was_frozen_and_end_with_memorys_models(tmp_path: Path) -> None:
    job = make_job(tmp_path, "apfed_c", **OPEN, train={**SHORT, "epochs": 40}, rules=WAIT)
    run(load_config(job.run / "config.yaml"), tmp_path / "memory")

    def freeze() -> None:
        metrics = job.run / "parties" / "active" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        (pid,) = job.list_processes("passive-1")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "begins session 2 by itself" in job.load_log("active"))
        os.kill(pid, signal.SIGCONT)

    assert job.play(meanwhile=freeze) == 0
    assert model_digests(job.run) == model_digests(tmp_path / "memory")
    for name in job.files:
        assert job.load_log(name).count("begins session 2 by itself") == 1, name
        assert "begins session 3" not in job.load_log(name)
    said = [job.load_log(name) for name in ("active", "aggregator", "passive-2")]
    assert any("passive-1" in one for one in said)
    assert not job.list_processes()


def test_without_nvflare_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvflare", None)
    for name in ("nvflare_site", "nvflare_job"):
        forget_modules(monkeypatch, f"secure_apfed.organisations.{name}")
        with pytest.raises(ConfigError, match=r"pip install 'nvflare<3,>=2\.9'"):
            importlib.import_module(f"secure_apfed.organisations.{name}")


def test_outside_a_job_such_a_party_says_where_it_belongs(tmp_path: Path) -> None:
    job = make_job(tmp_path, "apfed_c", **OPEN)
    with pytest.raises(ConfigError, match="active: link: nvflare is for a job of NVFlare's"):
        run_party(job.files["active"])


@needs_nvflare
def test_the_pages_project_gives_kits_that_allow_parties_and_no_code(tmp_path: Path) -> None:
    (project,) = re.findall(r"```yaml\n(api_version.*?)```", text_of("docs/nvflare.md"), re.DOTALL)
    (tmp_path / "project.yml").write_text(project)
    subprocess.run(
        [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=100,
    )
    kits = tmp_path / "kits/trial/prod_00"
    for owner in ("server.example", "bank", "shop", "clinic", "aggregator"):
        resources = json.loads((kits / owner / "local/resources.json.default").read_bytes())
        assert "secure_apfed.organisations.nvflare_site." in resources["class_allow_list"]
        assert len(resources["class_allow_list"]) > 50  # its own, too
        assert resources["allow_log_streaming"] is False
        told = json.loads((kits / owner / "local/authorization.json.default").read_bytes())
        assert {rights["byoc"] for rights in told["permissions"].values()} == {"none"}
        assert told["permissions"]["lead"]["submit_job"] == "any"


class Facade:
    """What a site sees of NVFlare in a call, where no job is; what each peer heard of its end."""

    def __init__(self, job: Job, caller: str) -> None:
        self.site_name = "active"
        self.caller = caller
        self.context = SimpleNamespace(abort_signal=SimpleNamespace(triggered=False))
        self.told: dict[str, str] = {}
        self.other_clients = [self._peer(name) for name in job.files if name != "active"]

    def _peer(self, name: str) -> Any:
        peer = SimpleNamespace(
            carry=lambda *frame: False, stopped=lambda why: self.told.update({name: why})
        )
        return _Named(name, peer)


class _Named:
    def __init__(self, name: str, peer: Any) -> None:
        self.name = name
        self.peer = peer

    def __call__(self, timeout: float) -> Any:
        return self.peer


def site_of(job: Job, caller: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Facade]:
    """The active's, called by somebody."""
    site = importlib.import_module("secure_apfed.organisations.nvflare_site")
    facade = Facade(job, caller)
    monkeypatch.setattr(site, "collab", facade)
    monkeypatch.setenv(PARTY_FILE_VARIABLE, str(job.files["active"]))
    return site, facade


@needs_nvflare
def test_the_server_alone_starts_a_party_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, "apfed_c", **OPEN)
    module, facade = site_of(job, "passive-1", monkeypatch)
    played: list[Path] = []
    monkeypatch.setattr(module, "run_party", lambda path, **options: played.append(path))
    site = module.Site()
    with pytest.raises(module.WrongSiteError, match="once a job, by the server alone"):
        site.play()
    assert not played
    assert not facade.told
    facade.caller = "server"
    assert site.play() == ""
    with pytest.raises(module.WrongSiteError, match="once a job, by the server alone"):
        site.play()
    assert len(played) == 1
    assert set(facade.told.values()) == {"its part is over"}


@needs_nvflare
def test_after_the_end_of_the_job_no_session_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has `rules.restarts` left would wait for peers that never come."""
    job = make_job(tmp_path, "apfed_c", **OPEN, rules=WAIT)
    module, facade = site_of(job, "server", monkeypatch)
    before = threading.active_count()
    aborting = threading.Timer(1.0, lambda: setattr(facade.context.abort_signal, "triggered", True))
    aborting.start()
    assert "NVFlare ended the job" in module.Site().play()
    assert "NVFlare ended the job" in job.load_log("active")
    told = PartyFile.from_file(job.files["active"])
    site = module.Site()
    monkeypatch.setattr(
        module, "run_party", lambda path, **options: meet_twice(options["connect"], told)
    )
    facade.context.abort_signal.triggered = True
    assert "NVFlare ended the job" in site.play()
    wait_until(lambda: threading.active_count() <= before + 1)  # nothing is left of them


def meet_twice(connect: Callable[..., Any], told: PartyFile) -> None:
    identity = fresh_identity()
    known = {name: bytes.fromhex(peer.identity) for name, peer in told.peers.items()}
    for _ in range(2):
        with pytest.raises(PartyLeftError, match="NVFlare ended the job"):
            connect(told, identity, known)
    connect(told, identity, known)


@needs_nvflare
def test_a_job_has_no_site_of_the_servers_name() -> None:
    made = importlib.import_module("secure_apfed.organisations.nvflare_job").PartyRecipe
    with pytest.raises(ConfigError, match="server is the name of NVFlare's own"):
        made(["active", "server"])


class Sites(list[Any]):
    """What the server sees of a job's sites: what each party returns and when (None: never), and
    who says that its party goes on.
    """

    def __init__(self, ends: dict[str, tuple[str, float] | None], answering: set[str]) -> None:
        super().__init__(_Named(name, SimpleNamespace(playing=lambda: True)) for name in ends)
        self._ends = ends
        self._answering = answering
        self.failures = dict[str, Exception]()
        for site in self:
            if site.name not in answering:
                site.peer = SimpleNamespace(playing=self._silent)

    def _silent(self) -> bool:
        error = importlib.import_module("nvflare.collab.api.exceptions").CollabCallError
        raise error("site", "playing", TimeoutError())

    def __call__(self, *, process_resp_cb: Callable[[Any, str], Any], **options: Any) -> Any:
        for name, end in self._ends.items():
            if end is not None:
                call = SimpleNamespace(target_name=name)
                threading.Timer(end[1], process_resp_cb, (call, end[0])).start()
        return SimpleNamespace(play=lambda: self)


@needs_nvflare
@pytest.mark.parametrize(
    ("later", "told"),
    [
        (("", 2.0), "shop: PartyLeftError: out$"),  # it went on without the shop
        (None, "shop: PartyLeftError: out; bank: it was not heard of any more$"),
    ],
)
def test_the_server_waits_for_whoever_goes_on(
    later: tuple[str, float] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("secure_apfed.organisations.nvflare_site")
    ends = {"shop": ("PartyLeftError: out", 0.1)}
    sites = Sites({**ends, "bank": later}, {"bank"} if later else set())
    monkeypatch.setattr(module, "_ASK_AFTER_FAILURE_S", 0.4)
    monkeypatch.setattr(module, "collab", SimpleNamespace(clients=sites, is_aborted=False))
    with pytest.raises(RuntimeError, match=told):
        module.Server().run()


@needs_nvflare
def test_the_servers_log_takes_one_line_from_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("secure_apfed.organisations.nvflare_site")
    sites = Sites({"shop": ("DataError: \n\x1b[2Jall is well" + "!" * 5000, 0.1)}, set())
    monkeypatch.setattr(module, "collab", SimpleNamespace(clients=sites, is_aborted=False))
    with pytest.raises(
        RuntimeError, match=r"^shop: DataError: \\n\\x1b\[2Jall is well!{50}"
    ) as raised:
        module.Server().run()
    assert len(str(raised.value)) < 500
