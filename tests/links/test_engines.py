"""Projects over engines: the files that a sealed project writes, and who may begin how."""

import importlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.cli import execute
from secure_apfed.commands.check import Checks
from secure_apfed.config.plain_yaml import parse_yaml
from secure_apfed.errors import ConfigError
from secure_apfed.organisations import engines, project
from secure_apfed.organisations.engines import (
    LOG_FILE_VARIABLE,
    PARTY_FILE_VARIABLE,
    EnginePlan,
    find_engine,
    write_engine_files,
)
from secure_apfed.organisations.flower_parties import (
    COMMAND_VARIABLE,
    IDENTITY_QUERY,
    IDLE_QUERY,
    RUN_REQUEST,
    Reply,
    RunLeader,
    run_own_party,
)
from secure_apfed.organisations.party import PartyFile, run_party
from secure_apfed.runs.folder import SEALED_PROJECT
from tests.links.test_project import OTHERS, PARTIES, Organisations

NVFLARE: dict[str, Any] = {
    "over": "nvflare",
    "server": "fl.example:8002",
    "addresses": {},
    "run_by": {"aggregator": "Sums", "server": "Neutral"},
}
FLOWER: dict[str, Any] = {
    "over": "flower",
    "server": "fl.example:9092",
    "run_by": {"aggregator": "Sums", "server": "Neutral"},
}
SITES = (
    "nvflare.collab.runtime.",
    "secure_apfed.organisations.nvflare_site.",
    "secure_apfed.commands.nvflare_check.",
)


def seal_project_over(base: Path, where: dict[str, Any]) -> Organisations:
    made = Organisations(base)
    proposal = made.propose(**where)
    answers = [made.answer(name, proposal) for name in OTHERS]
    project.seal_project(answers, made.home("bank"))
    for name in OTHERS:
        project.accept_project(made.home("bank") / SEALED_PROJECT, name, made.home(name))
    return made


@pytest.fixture(scope="module")
def over_nvflare(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    return seal_project_over(tmp_path_factory.mktemp("nvflare"), NVFLARE)


@pytest.fixture(scope="module")
def over_flower(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    return seal_project_over(tmp_path_factory.mktemp("flower"), FLOWER)


def plan_of(folder: Path, **changes: Any) -> EnginePlan:
    plan = EnginePlan(
        party="bank",
        organiser="bank",
        parties=("bank", "shop", "aggregator"),
        server=("fl.example", 8002),
        server_organisation="Neutral",
        organisation_by_party={"aggregator": "Sums"},
        project_digest="ab" * 32,
        max_restarts=20,
        folder=folder,
    )
    return replace(plan, **changes)


def commands_of(page: Path) -> list[list[str]]:
    """All commands of a page, as a shell would split them."""
    lines = [line.strip() for line in page.read_text().splitlines() if line.startswith("       ")]
    return [shlex.split(line) for line in lines]


def test_over_nvflare_everybody_gets_a_site_and_the_organiser_a_project(
    over_nvflare: Organisations,
) -> None:
    for name in PARTIES:
        home = over_nvflare.home(name)
        file = PartyFile.from_file(home / "party.yaml")
        assert (file.link, file.listen, file.relay) == ("nvflare", None, None)
        assert {peer.address for peer in file.peers.values()} == {None}
        assert (home / "nvflare/site.env").read_text() == f"SECURE_APFED_PARTY={home}/party.yaml\n"
        assert (home / "nvflare/project.yml").exists() == (name == "bank")
    home = over_nvflare.home("bank") / "nvflare"
    content, _ = parse_yaml((home / "project.yml").read_text(), "project.yml")
    assert isinstance(content, dict)
    described = [(one["type"], one["name"], one["org"]) for one in content["participants"]]
    assert described == [
        ("server", "fl.example", "Neutral"),
        ("client", "bank", "bank"),
        ("client", "shop", "shop"),
        ("client", "clinic", "clinic"),
        ("client", "aggregator", "Sums"),
        ("admin", "lead@bank.example", "bank"),
    ]
    assert content["participants"][0]["fed_learn_port"] == 8002
    for job in ("job", "job-resume", "job-check"):
        assert json.loads((home / job / "meta.json").read_bytes())["min_clients"] == 4
        for part in (home / job).rglob("config_fed_*.json"):
            paths = [one["path"] for one in json.loads(part.read_bytes())["components"]]
            assert all(path.startswith(SITES) for path in paths)
    words = commands_of(home / "README.md")
    assert [command[:2] for command in words] == [
        ["nvflare", "provision"],
        ["bash", "kit/startup/start.sh"],
        ["set", "-a;"],
        ["bash", "kit/startup/start.sh"],
        *[["nvflare", "job"]] * 3,
    ]


def test_over_flower_everybody_gets_a_supernode_and_the_organiser_an_app(
    over_flower: Organisations,
) -> None:
    path = over_flower.home("bank") / SEALED_PROJECT
    sealed = project.SignedFile.from_file(path).open_document(project.SealedProject, path)
    for name in PARTIES:
        home = over_flower.home(name)
        file = PartyFile.from_file(home / "party.yaml")
        assert (file.link, file.listen) == ("grpc", over_flower.addresses.get(name))
        variables = dict(
            line.split("=", 1) for line in (home / "flower/site.env").read_text().splitlines()
        )
        assert variables == {
            PARTY_FILE_VARIABLE: f"{home}/party.yaml",
            LOG_FILE_VARIABLE: f"{home}/log.txt",
        }
        (node,) = [
            command
            for command in commands_of(home / "flower/README.md")
            if command[0] == "flower-supernode"
        ]
        assert node[node.index("--superlink") + 1] == "fl.example:9092"
        told = f'party="{name}" project="{sealed.digest.hex()}"'
        assert node[node.index("--node-config") + 1] == told
        assert (home / "flower/app").exists() == (name == "bank")
    home = over_flower.home("bank") / "flower"
    app = tomllib.loads((home / "app/pyproject.toml").read_text())
    assert app["tool"]["flwr"]["app"]["config"] == {
        "parties": ",".join(PARTIES),
        "project": sealed.digest.hex(),
        "restarts": 20,
    }
    for component in app["tool"]["flwr"]["app"]["components"].values():
        module, _, value = component.partition(":")
        code = (home / "app" / f"{module.replace('.', '/')}.py").read_text()
        compile(code, module, "exec")
        assert value in code
    connection = tomllib.loads((home / "config.toml").read_text())["superlink"]
    assert connection[connection["default"]]["address"] == "fl.example:9092"


STRANGE = ("it's", 'a "quoted" one', "$(touch made)`touch made`", "back\\slash", "line\nbreak; #")


@pytest.mark.parametrize("over", ["nvflare", "flower"])
@pytest.mark.parametrize("name", STRANGE)
def test_what_is_strange_in_a_path_or_a_name_stays_one_value(
    over: engines.EngineName, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    plan = plan_of(
        folder,
        server_organisation=f"x: [{name}",
        organisation_by_party={"aggregator": f"{name} &b *c"},
    )
    page = write_engine_files(over, plan)
    assert page is not None
    shown = subprocess.run(
        ["sh", "-c", '. "$0"; printf %s "$SECURE_APFED_PARTY"', str(folder / over / "site.env")],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert shown.stdout == os.fsencode(folder / "party.yaml")
    blocks = page.read_text().split("\n\n")
    commands = "\n".join(block for block in blocks if block.startswith("       "))
    words = shlex.split(commands)
    assert any(word.startswith(f"{folder}/{over}/") for word in words)
    assert not any(word.startswith("touch") for word in words)
    if over == "flower":
        connection = tomllib.loads((folder / over / "config.toml").read_text())
        certificate = connection["superlink"]["apfed"]["root-certificates"]
        assert certificate == str(folder / over / "superlink.pem")
    else:
        content, _ = parse_yaml((folder / over / "project.yml").read_text(), "project.yml")
        assert isinstance(content, dict)
        orgs = [one["org"] for one in content["participants"]]
        assert all(org.replace("_", "").isalnum() and org.isascii() for org in orgs)
    assert not (tmp_path / "made").exists()


def test_without_an_engine_nothing_more_is_written(tmp_path: Path) -> None:
    assert write_engine_files("grpc", plan_of(tmp_path)) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"over": "nvflare"}, "say where: --server"),
        ({"over": "flower", "server": "fl.example:1"}, "--run-by server=ORGANISATION"),
        ({"server": "fl.example:1"}, "say --over nvflare or flower"),
        ({"run_by": FLOWER["run_by"]}, "say --over nvflare or flower"),
        ({**NVFLARE, "addresses": {"bank": "bank.example:1"}}, "leave --at and --relay out"),
        ({**NVFLARE, "server": "[::1]:8002"}, "a certificate of NVFlare is for a host"),
        ({**NVFLARE, "server": "a_b.example:8002"}, "a certificate of NVFlare is for a host"),
        ({**NVFLARE, "server": "x; touch y:8002"}, "expected a host of letters"),
        ({**FLOWER, "server": "fl.example"}, "an address is host:port"),
        ({**FLOWER, "over": "ray"}, "over: Input should be 'grpc', 'nvflare' or 'flower'"),
    ],
)
def test_what_an_engine_cannot_carry_is_not_proposed(
    where: dict[str, Any], why: str, tmp_path: Path
) -> None:
    made = Organisations(tmp_path)
    with pytest.raises(ConfigError) as refused:
        made.propose(**where)
    assert why in str(refused.value)


def test_nvflare_refuses_names_that_it_cannot_have() -> None:
    for name, why in (("b.c", "no dots"), ("Server", "NVFlare's own server")):
        with pytest.raises(ValueError, match=why):
            engines.check_engine(
                "nvflare",
                parties=["bank", name],
                server="fl.example:1",
                has_server_organisation=True,
                has_addresses=False,
            )


@pytest.mark.parametrize(
    ("given", "guess"), [("nvflair", "nvflare"), ("flwr", "flower"), ("grcp", "grpc")]
)
def test_a_misspelt_engine_gets_a_guess(
    given: str, guess: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{guess}'"):
        find_engine(given)
    (tmp_path / "run.yaml").write_text("{name: x, method: votes, data: {dataset: digits}}")
    words = ["project", "new", str(tmp_path / "run.yaml"), "--as", "bank", "--over", given]
    assert execute(words) == 2
    told = " ".join(capsys.readouterr().err.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert f"--over: engine '{given}' is unknown; did you mean '{guess}'?" in told
    assert find_engine(guess.upper()) == guess


def test_another_engine_than_the_sealed_one_is_refused_at_every_door(
    over_nvflare: Organisations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = over_nvflare.home("shop")
    sealed = str(home / SEALED_PROJECT)
    words = ["project", "join", sealed, "--as", "shop", "--folder", str(home), "--over", "flower"]
    assert execute(words) == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "is over nvflare; say --over nvflare, or ask bank for another proposal" in told
    file = home / "party.yaml"
    before = file.read_text()
    try:
        file.write_text(before.replace("link: nvflare", "link: grpc"))
        with pytest.raises(ConfigError, match="sealed project is over nvflare, whose link"):
            run_party(file)
        checks = Checks(file)
        wrong = [finding for finding in checks.run_checks(None) if finding.state == "missing"]
        assert checks.code == 2
        assert [finding.name for finding in wrong] == ["contract"]
        assert "put that back, or ask bank for another proposal" in wrong[0].value
    finally:
        file.write_text(before)


def test_a_check_over_nvflare_says_what_to_start_first(over_nvflare: Organisations) -> None:
    checks = Checks(over_nvflare.home("clinic") / "party.yaml", is_quiet=True)
    findings = {finding.name: finding for finding in checks.run_checks(60)}
    assert checks.code == 2
    assert findings["meeting"].state == "missing"
    assert "the organiser submits nvflare/job-check" in findings["meeting"].value
    alone = Checks(over_nvflare.home("clinic") / "party.yaml", is_quiet=True)
    assert (
        "nvflare/job-check"
        in {one.name: one for one in alone.run_checks(None)}["clock, version"].value
    )
    assert not alone.code


def test_who_joins_reads_which_engine_and_what_its_server_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Organisations(tmp_path)
    proposal = made.propose(**FLOWER)
    words = ["project", "join", str(proposal), "--as", "aggregator", "--over", "flower"]
    assert execute([*words, "--folder", str(made.home("aggregator"))]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Flower, whose server is at fl.example:9092, run by 'Neutral': it sees who takes" in told


@pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="nvflare is missing: the extra `nvflare`"
)
def test_the_jobs_are_those_that_nvflare_exports(tmp_path: Path) -> None:
    made = importlib.import_module("secure_apfed.organisations.nvflare_job")
    plan = plan_of(tmp_path)
    write_engine_files("nvflare", plan)
    for job, options in (("job", {}), ("job-resume", {"resume": True})):
        recipe = made.PartyRecipe(plan.parties, name=plan.title, **options)
        recipe.export(str(tmp_path / "exported" / job))
        exported = tmp_path / "exported" / job / plan.title
        names = sorted(path.relative_to(exported) for path in exported.rglob("*.json"))
        assert names == sorted(
            path.relative_to(tmp_path / "nvflare" / job)
            for path in (tmp_path / "nvflare" / job).rglob("*.json")
        )
        for name in names:
            ours = json.loads((tmp_path / "nvflare" / job / name).read_bytes())
            assert ours == json.loads((exported / name).read_bytes()), name


@pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="nvflare is missing: the extra `nvflare`"
)
def test_the_check_s_class_is_found_by_its_name() -> None:
    loader = importlib.import_module("nvflare.fuel.utils.class_loader")
    site = importlib.import_module("secure_apfed.organisations.nvflare_site").Site
    made = loader.load_class("secure_apfed.commands.nvflare_check.CheckSite")
    assert issubclass(made, site)
    assert made is loader.load_class("secure_apfed.commands.nvflare_check.CheckSite")


class Nodes:
    """SuperNodes by number, and what each answers when it is asked to run its party.

    An answer is a code, ("error", NUMBER of an error of Flower's), or None: it forgot the question.
    """

    def __init__(self, parties: dict[int, dict[str, Any]], **answers: list[Any]) -> None:
        self.parties = dict(parties)
        self.answers = answers
        self.asked: list[tuple[int, str]] = []
        self.waiting: dict[str, Reply] = {}
        self.shown: list[str] = []
        self.looks = 0
        self.at_look: dict[int, Callable[[], object]] = {}

    def list_nodes(self) -> Iterable[int]:
        self.looks += 1
        assert self.looks < 500, "the run does not end"
        self.at_look.get(self.looks, lambda: None)()
        return list(self.parties)

    def ask(self, node: int, question: str) -> str:
        self.asked.append((node, question))
        name = str(len(self.asked))
        told = self.parties[node]
        if question == RUN_REQUEST:
            self._answer(name, self.answers.get(told["party"], [0]).pop(0))
        elif question == IDENTITY_QUERY or (question == IDLE_QUERY and self._is_idle(node)):
            self.waiting[name] = Reply(name, told if question == IDENTITY_QUERY else {})
        return name

    def _answer(self, name: str, code: Any) -> None:
        if isinstance(code, tuple):
            self.waiting[name] = Reply(name, {}, error_code=code[1])
        elif code is not None:
            self.waiting[name] = Reply(name, {"code": code})

    def _is_idle(self, node: int) -> bool:
        return bool(self.answers.get(self.parties[node]["party"]))

    def end_party(self, node: int) -> None:
        """Answer the question that a node was left with."""
        name = str(self.asked.index((node, RUN_REQUEST)) + 1)
        self.waiting[name] = Reply(name, {"code": 0})

    def read_replies(self, asked: Sequence[str]) -> Iterable[Reply]:
        return [self.waiting.pop(name) for name in asked if name in self.waiting]

    def lead(self, *, restarts: int = 1) -> RunLeader:
        return RunLeader(
            ["bank", "shop"],
            "ab",
            self,
            max_restarts=restarts,
            log_line=self.shown.append,
            clock=lambda: float(self.looks),
            sleep=lambda seconds: None,
        )


BANK = {"party": "bank", "project": "ab"}
SHOP = {"party": "shop", "project": "ab"}


def test_the_lead_starts_every_party_once_all_are_there() -> None:
    nodes = Nodes({1: BANK})
    nodes.at_look[5] = lambda: nodes.parties.update({2: SHOP})
    nodes.lead().run()
    played = [node for node, question in nodes.asked if question == RUN_REQUEST]
    assert sorted(played) == [1, 2]
    assert nodes.asked.index((1, RUN_REQUEST)) > nodes.asked.index((2, IDENTITY_QUERY))
    assert nodes.shown[-2:] == ["bank: its party has ended", "shop: its party has ended"]


def test_a_party_that_fails_fails_the_run_with_its_code_and_no_words() -> None:
    nodes = Nodes({1: BANK, 2: SHOP}, bank=[4], shop=["rm -rf /"])
    with pytest.raises(RuntimeError) as failed:
        nodes.lead().run()
    assert str(failed.value) == (
        "bank: its party ended with 4: another party left, or something was refused; "
        "shop: its party ended with 1: its own log says more"
    )


def test_a_node_that_forgot_its_party_is_asked_again() -> None:
    """Killed and back within a heartbeat: the same node answers, and runs nothing."""
    nodes = Nodes({1: BANK, 2: SHOP}, shop=[None, 0])
    nodes.lead().run()
    assert nodes.asked.count((2, RUN_REQUEST)) == 2
    assert nodes.asked.count((1, RUN_REQUEST)) == 1
    assert "shop: its SuperNode began anew" in nodes.shown


def test_a_node_that_comes_back_under_another_number_is_asked_again() -> None:
    nodes = Nodes({1: BANK, 2: SHOP}, bank=[None], shop=[None, 0])

    def replace_node() -> None:
        del nodes.parties[2]
        nodes.parties[3] = SHOP

    nodes.at_look = {8: replace_node, 12: lambda: nodes.end_party(1)}
    nodes.lead().run()
    assert [node for node, question in nodes.asked if question == RUN_REQUEST][2:] == [3]
    assert "shop: its SuperNode is gone" in nodes.shown


def test_a_node_that_stays_away_ends_the_run_with_its_name() -> None:
    nodes = Nodes({1: BANK, 2: SHOP}, shop=[("error", 5)] * 3)
    with pytest.raises(RuntimeError, match=r"^shop: its SuperNode is gone$"):
        nodes.lead(restarts=2).run()
    assert nodes.asked.count((2, RUN_REQUEST)) == 3


def test_strangers_and_second_nodes_start_nothing() -> None:
    stranger = {"party": "eve\x1b[2J", "project": "ab"}
    other = {"party": "shop", "project": "cd"}
    nodes = Nodes({1: BANK, 4: stranger, 5: other, 6: {}, 7: BANK})
    nodes.at_look[9] = lambda: nodes.parties.update({2: SHOP})
    nodes.lead().run()
    played = sorted(node for node, question in nodes.asked if question == RUN_REQUEST)
    assert played in ([1, 2], [2, 7])
    told = "\n".join(nodes.shown)
    assert r"names the party 'eve\x1b[2J', which is not in this run" in told
    assert "shop: its SuperNode is of another project" in told
    assert told.count("another SuperNode in its name waits") == 1


def test_a_site_runs_its_own_command_and_ends_it(tmp_path: Path) -> None:
    script = "import sys; print(sys.argv[1:]); sys.exit(5)"
    log = tmp_path / "log.txt"
    environment = {
        PARTY_FILE_VARIABLE: str(tmp_path / "a b.yaml"),
        COMMAND_VARIABLE: shlex.join([sys.executable, "-c", script]),
        LOG_FILE_VARIABLE: str(log),
    }
    assert run_own_party(environment) == 5
    assert log.read_text().split("'")[1::2] == [
        "--config",
        str(tmp_path / "a b.yaml"),
        "--end-with-stdin",
    ]
    assert log.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="start this SuperNode with SECURE_APFED_PARTY"):
        run_own_party({})


def test_a_party_of_another_user_ends_by_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under sudo: who started it may send it no signal."""
    script = "import sys; sys.exit(len(sys.stdin.read()))"
    own = {
        PARTY_FILE_VARIABLE: "party.yaml",
        COMMAND_VARIABLE: shlex.join([sys.executable, "-c", script]),
    }
    ended: list[int | None] = []
    wait = subprocess.Popen.wait

    def interrupt(process: Any, timeout: float | None = None) -> int:
        if not ended:
            ended.append(process.poll())
            raise RuntimeError("the SuperNode ends")
        ended.append(wait(process, timeout))
        return 0

    def refuse(process: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    monkeypatch.setattr(subprocess.Popen, "terminate", refuse)
    with pytest.raises(RuntimeError, match="the SuperNode ends"):
        run_own_party(own)
    assert ended == [None, 0]


def test_a_log_that_cannot_be_written_names_its_variable(tmp_path: Path) -> None:
    own = {
        PARTY_FILE_VARIABLE: "party.yaml",
        LOG_FILE_VARIABLE: str(tmp_path / "nowhere" / "log.txt"),
    }
    with pytest.raises(ConfigError, match=r"nowhere.*set SECURE_APFED_LOG in the SuperNode's"):
        run_own_party(own)


def test_without_flower_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.modules import forget_modules

    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    forget_modules(monkeypatch, "secure_apfed.organisations.flower_app")
    with pytest.raises(ConfigError, match=r"pip install 'flwr"):
        importlib.import_module("secure_apfed.organisations.flower_app")
