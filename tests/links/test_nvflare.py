"""Parties inside a job of NVFlare's: memory's models, and errors that name who and what.

Each job takes half a minute, of which NVFlare's simulator takes most to start and to end.
"""

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.data import read_own
from secure_apfed.errors import ConfigError
from secure_apfed.runs.party import play_party
from secure_apfed.runs.run import run
from tests.links.jobs import OPEN, SHORT, WAIT, Job, job_of, needs_nvflare
from tests.local.processes import model_digests
from tests.local.test_local_harm import recovering
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

FEW = {"data": {"dataset": "breast_cancer", "labelled": 40}}
DEALT = {"alignment": {"protocol": "circuit"}}


def secrets_of(job: Job) -> list[bytes]:
    """Bytes and texts of features, parameters and keys that nobody else has."""
    found = []
    for name, file in job.files.items():
        pem = (file.parent / "identity.pem").read_bytes().splitlines()
        found.append(pem[1])
        if (file.parent / "table.safetensors").exists():
            rows = read_own(file.parent / "table.safetensors", name).table.features[:50]
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
    job = job_of(tmp_path, method, **changes)
    run(load_config(job.run / "config.yaml"), tmp_path / "memory")
    assert job.play() == 0
    assert model_digests(job.run) == model_digests(tmp_path / "memory")
    assert not job.processes()
    written = job.nvflares()
    assert b"active: its party has ended" in written[job.log("active")]
    secret = secrets_of(job)
    assert len(secret) > 150
    assert not [one for one in secret if any(one in content for content in written.values())]
    code = [path for path in written if path.suffix in (".py", ".pyc")]
    assert not code  # no code travels, so sites may deny it


@needs_nvflare
@pytest.mark.slow
def test_a_site_with_anothers_file_plays_nobody(tmp_path: Path) -> None:
    job = job_of(tmp_path, "apfed_c", **OPEN)
    job.files["passive-1"].write_text(job.files["passive-2"].read_text())
    assert job.play() != 0
    told = "SECURE_APFED_PARTY names the file of passive-2 here, and this site is passive-1"
    assert told in job.nvflares()[job.log("server")].decode()
    assert "has no link to" in job.said("active")


@needs_nvflare
@pytest.mark.slow
def test_a_party_that_cannot_begin_is_named_and_its_words_stay_its_own(tmp_path: Path) -> None:
    job = job_of(tmp_path, "apfed_c", **OPEN)
    (job.files["passive-1"].parent / "table.safetensors").write_bytes(b"4711 is secret")
    assert job.play() != 0
    assert "table.safetensors holds no prepared rows" in job.said("passive-1")
    log = job.nvflares()[job.log("server")].decode()
    assert "passive-1: DataError: its own log.txt says more" in log
    for name in ("active", "aggregator", "passive-2"):
        assert job.said(name).startswith(f"PartyLeftError: agreement: {name} has no link to ")
        assert "passive-1 stopped: DataError: its own log.txt says more" in job.said(name)
        assert f"agreement: {name} has no link to " in log
    assert not [path for path, content in job.nvflares().items() if b"prepared rows" in content]


@needs_nvflare
@pytest.mark.slow
def test_a_site_that_is_killed_is_named_and_the_next_job_resumes(tmp_path: Path) -> None:
    """The simulator leaves it to the parties to notice; a deployed server ends the job at once."""
    job = job_of(tmp_path, "apfed_c", **OPEN, train={**SHORT, "epochs": 60})
    killed: list[float] = []

    def kill() -> None:
        metrics = job.run / "parties" / "active" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if metrics.exists() and metrics.read_text().count("\n") > 3:
                (pid,) = job.processes("passive-1")
                os.kill(pid, signal.SIGKILL)
                killed.append(time.time())
                return
            time.sleep(0.1)

    assert job.play(meanwhile=kill) != 0
    for name in ("active", "aggregator", "passive-2"):
        assert re.search("training|checkpoint", job.said(name))
        assert "passive-1" in job.said(name)
        assert (job.files[name].parent / "log.txt").stat().st_mtime < killed[0] + 30
    log = job.nvflares()[job.log("server")].decode()
    assert "passive-1: it was not heard of any more" in log
    assert job.play(resume=True) == 0
    assert set(model_digests(job.run)) == {"active", "aggregator", "passive-1", "passive-2"}


@needs_nvflare
@pytest.mark.slow
def test_all_wait_for_a_site_that_was_frozen_and_end_with_memorys_models(tmp_path: Path) -> None:
    job = job_of(tmp_path, "apfed_c", **OPEN, train={**SHORT, "epochs": 40}, rules=WAIT)
    run(load_config(job.run / "config.yaml"), tmp_path / "memory")

    def freeze() -> None:
        metrics = job.run / "parties" / "active" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        (pid,) = job.processes("passive-1")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "begins session 2 by itself" in job.said("active"))
        os.kill(pid, signal.SIGCONT)

    assert job.play(meanwhile=freeze) == 0
    assert model_digests(job.run) == model_digests(tmp_path / "memory")
    for name in job.files:
        assert job.said(name).count("begins session 2 by itself") == 1, name
        assert "begins session 3" not in job.said(name)
    said = [job.said(name) for name in ("active", "aggregator", "passive-2")]
    assert any("passive-1" in one for one in said)
    assert not job.processes()


@needs_nvflare
@pytest.mark.slow
def test_where_the_sum_recovers_the_others_go_on_without_a_site_that_was_frozen(
    tmp_path: Path,
) -> None:
    rules = {"silent_passive": "recover", "patience_s": 8.0, "restarts": 1, "minimum_spread": 0.0}
    config = recovering().model_dump(exclude_defaults=True)
    config["train"] |= {"epochs": 80}
    job = Job(Config.model_validate(config | {"rules": rules}), tmp_path)
    for file in job.files.values():
        file.write_text(file.read_text().replace("meet_s: 60.0", "meet_s: 15.0"))
    metrics = job.run / "parties" / "active" / "metrics.jsonl"

    def epochs() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def freeze() -> None:
        wait_until(lambda: epochs() > 3)
        (pid,) = job.processes("passive-2")
        os.kill(pid, signal.SIGSTOP)
        frozen = epochs()
        wait_until(lambda: epochs() > frozen + 5)
        os.kill(pid, signal.SIGCONT)

    assert job.play(meanwhile=freeze) != 0
    result = json.loads((job.run / "parties" / "active" / "result.json").read_bytes())
    assert set(result["attendance"]["left"]) == {"passive-2"}
    assert "passive-2 begins session 2 by itself" in job.said("passive-2")
    assert not [name for name in job.files if name != "passive-2" and job.said(name)]
    failed = re.findall(r"(\S+): PartyLeftError", job.nvflares()[job.log("server")].decode())
    assert set(failed) == {"passive-2"}


def test_without_nvflare_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvflare", None)
    for name in ("nvflare_site", "nvflare_job"):
        monkeypatch.delitem(sys.modules, f"secure_apfed.contrib.{name}", raising=False)
        with pytest.raises(ConfigError, match=r"pip install 'secure-apfed\[nvflare\]'"):
            importlib.import_module(f"secure_apfed.contrib.{name}")


def test_outside_a_job_such_a_party_says_where_it_belongs(tmp_path: Path) -> None:
    job = job_of(tmp_path, "apfed_c", **OPEN)
    with pytest.raises(ConfigError, match="active: link: nvflare is for a job of NVFlare's"):
        play_party(job.files["active"])


PAGE = (Path(__file__).parents[2] / "docs/nvflare.md").read_text(encoding="utf-8")


@needs_nvflare
def test_the_pages_project_gives_kits_that_allow_parties_and_no_code(tmp_path: Path) -> None:
    (project,) = re.findall(r"```yaml\n(api_version.*?)```", PAGE, re.DOTALL)
    (tmp_path / "project.yml").write_text(project)
    subprocess.run(
        [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)},
        cwd=tmp_path, check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    kits = tmp_path / "kits/trial/prod_00"
    for owner in ("server.example", "bank", "shop", "clinic", "aggregator"):
        resources = json.loads((kits / owner / "local/resources.json.default").read_bytes())
        assert "secure_apfed.contrib.nvflare_site." in resources["class_allow_list"]
        assert len(resources["class_allow_list"]) > 50  # its own, too
        assert resources["allow_log_streaming"] is False
        told = json.loads((kits / owner / "local/authorization.json.default").read_bytes())
        assert {rights["byoc"] for rights in told["permissions"].values()} == {"none"}
        assert told["permissions"]["lead"]["submit_job"] == "any"
