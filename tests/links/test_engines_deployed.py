"""The same run over memory, gRPC, NVFlare and Flower; parties killed under each engine, and back.

NVFlare and Flower run as deployed: by their own commands, over TLS, a process for each part, from
the files that a sealed project writes. A test runs where its engine is installed.
"""

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.base.files import make_private
from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.exchange.sockets import parse_address
from secure_apfed.organisations.engines import EngineName, EnginePlan, write_engine_files
from secure_apfed.organisations.local import find_free_addresses, prepare_parties, run_locally
from secure_apfed.runs.run import LinkType, run
from tests.links.flower import Flower
from tests.links.kits import Kits
from tests.links.test_nvflare import secrets_of
from tests.local.processes import model_digests
from tests.secure_apfed.small_runs import small_config
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]
needs_nvflare = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="nvflare is missing: the extra `nvflare`"
)
needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="flwr is missing: the extra `flwr`"
)
OPEN = {"guard": {"mechanism": "none", "noise": "reproducible_insecure"}}
SHORT = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
WAIT = {"silent_passive": "wait", "patience_s": 200.0, "restarts": 5}
PROJECT = "ab" * 32


def config_of(**changes: Any) -> Config:
    return small_config("apfed_c", **{**OPEN, "train": SHORT, "rules": WAIT, **changes})


class Project:
    """Parties' folders of one run, with the files of an engine in each."""

    def __init__(self, config: Config, folder: Path, engine: EngineName) -> None:
        self.run = folder / "run"
        make_private(self.run)
        way: LinkType = "nvflare" if engine == "nvflare" else "grpc"
        self.files = prepare_parties(config, self.run, link_type=way, timeout_s=60)
        names = tuple(self.files)
        (self.server,) = find_free_addresses(1)
        for name, file in self.files.items():
            plan = EnginePlan(
                party=name,
                organiser=names[0],
                parties=names,
                server=("localhost", parse_address(self.server)[1]),
                server_organisation="Neutral",
                organisation_by_party={},
                project_digest=PROJECT,
                max_restarts=config.rules.restarts,
                folder=file.parent,
            )
            write_engine_files(engine, plan)
        self.organiser = self.files[names[0]].parent / engine
        self.sites = {name: file.parent / engine / "site.env" for name, file in self.files.items()}
        self.metrics = self.files["active"].parent / "metrics.jsonl"

    def has_trained(self, epochs: int) -> bool:
        return self.metrics.exists() and self.metrics.read_text().count("\n") >= epochs

    def start_nodes(self, flower: Flower) -> None:
        """Start a SuperNode for each party, by its own variables."""
        for name, variables in self.sites.items():
            pairs = [line.split("=", 1) for line in variables.read_text().splitlines()]
            environment = {key: shlex.split(value)[0] for key, value in pairs}
            flower.start_node(name, f'party="{name}" project="{PROJECT}"', environment)

    def digests_in_memory(self, folder: Path) -> dict[str, Any]:
        run(load_config(self.run / "config.yaml"), folder)
        return model_digests(folder)


def test_processes_over_grpc_end_with_memorys_models(tmp_path: Path) -> None:
    config = config_of()
    run(config, tmp_path / "memory")
    run_locally(config, tmp_path / "grpc", link_type="grpc")
    assert model_digests(tmp_path / "grpc") == model_digests(tmp_path / "memory")


@needs_nvflare
def test_a_job_between_deployed_sites_ends_with_memorys_models(tmp_path: Path) -> None:
    project = Project(config_of(), tmp_path, "nvflare")
    with Kits(project.organiser, project.sites) as kits:
        assert "FINISHED:COMPLETED" in kits.wait_for(kits.submit("job-check"))
        for file in project.files.values():
            assert f"{file.parent.name}: ready\n" in (file.parent / "check.txt").read_text()
        job = kits.submit("job")
        assert "FINISHED:COMPLETED" in kits.wait_for(job)
        check_what_an_admin_reads(project, kits, job, tmp_path / "downloaded")
    assert model_digests(project.run) == project.digests_in_memory(tmp_path / "memory")


def check_what_an_admin_reads(project: Project, kits: Kits, job: str, folder: Path) -> None:
    """Check that the lead reads no secret, and at another organisation's site nothing at all."""
    key = project.files["passive-1"].parent / "identity.pem"
    places = ["log.txt", "../" * 6 + "passive-1/identity.pem", str(key)]
    answers = kits.read_as_admin(job, ["active", "passive-1"], places, folder)
    answered = {name for name, answer in answers.items() if not answer.startswith("refused: ")}
    own = {"active: ls", "active: log", "active: cat log.txt"}
    assert answered == {"meta", "download", *own}
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    read = [*files, *(answer.encode() for answer in answers.values())]
    secret = secrets_of(project.files)
    assert len(secret) > 150
    assert not [one for one in secret if any(one in content for content in read)]


@needs_nvflare
def test_a_killed_site_ends_the_job_and_the_next_job_goes_on(tmp_path: Path) -> None:
    project = Project(config_of(train={**SHORT, "epochs": 150}), tmp_path, "nvflare")
    with Kits(project.organiser, project.sites) as kits:
        first = kits.submit("job")
        wait_until(lambda: project.has_trained(2), "two epochs", within_s=600)
        kits.kill_job("passive-1")
        assert "FINISHED:COMPLETED" not in kits.wait_for(first)
        assert not (project.files["active"].parent / "result.json").exists()
        assert "FINISHED:COMPLETED" in kits.wait_for(kits.submit("job-resume"))
    assert model_digests(project.run) == project.digests_in_memory(tmp_path / "memory")


@needs_flower
def test_parties_at_supernodes_end_with_memorys_models(tmp_path: Path) -> None:
    project = Project(config_of(), tmp_path, "flower")
    with Flower(tmp_path / "flower", project.server) as flower:
        project.start_nodes(flower)
        with flower.run_app(project.organiser / "app") as app:
            flower.wait_for("active: its party has ended", timeout=900)
            assert app.wait(60) == 0
        told = flower.load_output("app")
        for name in project.files:
            assert f"{name}: its party has ended" in told
        superlink = (flower.home / "superlink.txt").read_bytes()
    assert model_digests(project.run) == project.digests_in_memory(tmp_path / "memory")
    for file in project.files.values():
        assert (file.parent / "identity.pem").read_bytes().splitlines()[1] not in superlink


@needs_flower
def test_a_killed_supernode_comes_back_and_the_run_ends_with_memorys_models(
    tmp_path: Path,
) -> None:
    project = Project(config_of(train={**SHORT, "epochs": 150}), tmp_path, "flower")
    with Flower(tmp_path / "flower", project.server) as flower:
        project.start_nodes(flower)
        with flower.run_app(project.organiser / "app") as app:
            flower.wait_for("active: its party begins", timeout=400)
            wait_until(lambda: project.has_trained(2), "two epochs", within_s=600)
            flower.kill("passive-1")
            assert not (project.files["active"].parent / "result.json").exists()
            flower.start_again("passive-1")
            flower.wait_for("active: its party has ended", timeout=900)
            assert app.wait(60) == 0
        assert flower.load_output("app").count("passive-1: its party begins") == 2
        assert flower.load_output("app").count("passive-2: its party begins") == 1
    assert model_digests(project.run) == project.digests_in_memory(tmp_path / "memory")
