"""`run --transport local` and `party`: what they print and leave behind, and how they fail."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apfed_experiments.finished import load_finished_run
from apfed_protocols.errors import PartyLeftError
from secure_apfed.cli import TransportName, execute
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.organisations import local
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.run import TRANSPORTS, run
from tests.local.processes import Parties, model_digests, require_no_failure
from tests.secure_apfed.small_runs import read_stderr, small_config
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

LONG = {"epochs": 4000, "batch_size": 64, "learning_rate": 0.01, "device": "cpu"}


def test_of_ports_each_is_named_once_and_too_few_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_PORT_RANGE", range(31_900, 32_000))
    held = local.find_free_addresses(80)
    assert len({*held}) == 80
    assert {int(place.rpartition(":")[2]) for place in held} <= {*range(31_900, 32_000)}
    with pytest.raises(ConfigError, match=r"31900 to 31999 of 127\.0\.0\.1 \d+ are free and 101"):
        local.find_free_addresses(101)


def command(config: Path, folder: Path, *more: str) -> list[str]:
    arguments = ["run", str(config), "--output", str(folder), "--transport", "local"]
    return [sys.executable, "-m", "secure_apfed.cli", *arguments, *more]


def processes_of(folder: Path) -> dict[str, int]:
    """Process IDs by party, of those whose command line names its file in this folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            files = [Path(word) for word in words if word.endswith("/party.yaml")]
            if files and folder in files[0].parents and state != "Z":
                found[files[0].parent.name] = int(entry.name)
    return found


@pytest.fixture
def training(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Path, "subprocess.Popen[bytes]"]]:
    """A long run in processes, which has begun to train."""
    config = tmp_path / "run.yaml"
    folder = tmp_path / "run"
    config.write_text(dump_settings(small_config(getattr(request, "param", "apfed_c"), train=LONG)))
    process = subprocess.Popen(
        command(config, folder, "--timeout", "5", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    metrics = folder / "parties" / "active" / "metrics.jsonl"

    def trains() -> bool:
        assert process.poll() is None, process.communicate()
        return metrics.exists() and bool(metrics.read_bytes())

    wait_until(trains, "training")
    yield folder, process
    process.kill()
    process.communicate()


IN_PROC = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="finds processes as on Linux"
)
FROZEN = "the link to active was broken for 3 s (no sign of life for 15 s)"


@IN_PROC
@pytest.mark.parametrize("training", ["single_view"], indirect=True)
def test_a_killed_launcher_leaves_no_process(
    training: tuple[Path, "subprocess.Popen[bytes]"],
) -> None:
    folder, launcher = training
    assert set(processes_of(folder)) == {"active"}
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: not processes_of(folder), "that no process is left")


@IN_PROC
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "code", "told"),
    [
        ("passive-2", signal.SIGKILL, 4, "passive-2: its process was ended by SIGKILL"),
        ("aggregator", signal.SIGKILL, 4, "aggregator: its process was ended by SIGKILL"),
        ("active", signal.SIGKILL, 4, "active: its process was ended by SIGKILL"),
        ("active", signal.SIGSTOP, 4, FROZEN),
        ("", signal.SIGINT, 130, "--resume --transport local"),  # the launcher
    ],
)
def test_whoever_is_harmed_is_named_and_nothing_is_left_running(
    name: str,
    number: int,
    code: int,
    told: str,
    training: tuple[Path, "subprocess.Popen[bytes]"],
) -> None:
    folder, launcher = training
    os.kill(processes_of(folder).get(name, launcher.pid), number)
    out, _ = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == code
    message = json.loads(out)["error"]["message"]
    assert told in message
    if number == signal.SIGKILL:
        assert f"the link to {name} was broken for 3 s" in message or f"{name} closed" in message
    wait_until(lambda: not processes_of(folder), "that no process is left")


def costs_the_same(memory: Path, apart: Path, figure: str, party: str, capsys: Any) -> None:
    """One thing has one price and one name in all folders, the report, and its payer's log."""
    assert model_digests(memory) == model_digests(apart)
    alone = load_finished_run(memory)
    run_apart = load_finished_run(apart)
    assert alone.outcome.contributions == run_apart.outcome.contributions
    own = load_finished_run(apart / "parties" / "active")
    # What the passives said at the end stands in the active's own folder, too.
    assert (own.epsilon, own.epsilon_name) == (alone.epsilon, alone.epsilon_name)
    assert own.local_models == run_apart.local_models
    cards = [
        json.loads((folder / "model.json").read_bytes())["epsilon"] for folder in (memory, apart)
    ]
    assert cards[0] == cards[1]
    charged = {spent.figure: spent.epsilon for spent in own.outcome.contributions.values()}
    charged.setdefault(own.epsilon_name, own.epsilon)
    assert 0 < charged[figure] < math.inf
    assert figure in (apart / "report.html").read_text("utf-8")
    capsys.readouterr()
    assert execute(["audit-log", "verify", str(apart / "parties" / party)]) == 0
    told = rf"{figure}, [^,]+, last +{charged[figure]:.4g}"
    assert re.search(told, capsys.readouterr().out)


def run_command(config: Config, folder: Path, capsys: Any, *how: str) -> list[str]:
    """Run a command; return the printed rows of its result about privacy."""
    file = folder.with_suffix(".yaml")
    file.write_text(dump_settings(config))
    assert execute(["run", str(file), "--output", str(folder), *how]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if line.startswith("epsilon_")]


@pytest.mark.slow
def test_it_leaves_a_run_folder_as_memory_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config("tvfl", attacks=({"name": "label_gradients"},))
    finished = tmp_path / "run"
    run_command(config, finished, capsys, "--transport", "local", "--no-baselines")
    run(load_config(finished / "config.yaml"), tmp_path / "memory")
    costs_the_same(tmp_path / "memory", finished, "epsilon_x", "passive-1", capsys)
    results = [
        json.loads((folder / "result.json").read_bytes())
        for folder in (finished, tmp_path / "memory")
    ]
    for result in results:
        assert result.pop("seconds") > 0
    assert [result.pop("apart") for result in results] == [True, False]
    assert [len(result.pop("stated")) for result in results] == [2, 0]
    assert results[0].pop("wire_bytes") == pytest.approx(results[1].pop("wire_bytes"), rel=0.01)
    assert results[0] == results[1]
    assert (finished / "report.html").exists()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=finished, check=True)
    active = finished / "parties" / "active"
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=active, check=True)
    assert not list(finished.rglob("checkpoint-*"))
    told = json.loads((finished / "attacks.json").read_bytes())  # what each party found of its own
    assert {one["victim"] for one in told if one["applicable"]} == {"active"}
    with pytest.raises(CheckpointError, match="each ran in a process of its own"):
        load_recording(finished)
    file = finished / "parties" / "passive-1" / "party.yaml"
    assert execute(["party", "--config", str(file), "--resume"]) == 3
    assert "part of a finished run" in read_stderr(capsys)


WRONG: list[tuple[str, str, Any, str]] = [
    ("passive-1", "timeout_s", 1e300, "timeout_s"),
    ("passive-1", "timeout_s", 0, "timeout_s"),
    ("passive-1", "listen", "nowhere", "an address is host:port"),
    ("passive-1", "party", "passive-9", "correct party, active, passives and peers"),
    ("passive-1", "table", "elsewhere.safetensors", "holds no prepared rows"),
    ("passive-1", "table", "../passive-2/table.safetensors", "holds the rows of passive-2"),
    ("passive-1", "table", None, "there is no file of 'passive-1'"),
    ("passive-1", "listen", "192.0.2.1:47001", "passive-1 cannot listen at 192.0.2.1:47001"),
    ("passive-1", "meet_s", 0.3, "reached nobody as active"),
    ("active", "meet_s", 1.5, "did not come to active"),
]


def test_a_wrong_file_of_a_party_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    folder = tmp_path / "run"
    config.write_text(dump_settings(small_config()))
    assert execute(["run", str(config), "--output", str(folder), "--prepare"]) == 0
    files = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert len(files) == 4
    for party, name, value, told in WRONG:
        file = folder / "parties" / party / "party.yaml"
        whole = file.read_text()
        lines = [line for line in whole.splitlines() if not line.startswith(f"{name}:")]
        file.write_text("\n".join([*lines, f"{name}: {json.dumps(value)}"]))
        assert execute(["party", "--config", str(file)]) in (2, 3, 4)
        assert told in read_stderr(capsys)
        file.write_text(whole)


def test_parties_apart_need_a_folder_and_a_transport_that_there_is() -> None:
    assert {one.value for one in TransportName} == set(TRANSPORTS)
    with pytest.raises(ConfigError, match="name a run folder"):
        run(small_config(), None, transport="local")
    with pytest.raises(ConfigError, match="transport: 'lokal' is unknown; did you mean 'local'"):
        run(small_config(), None, transport="lokal")  # type: ignore[arg-type]


def start_ending_process(name: str, code: int, kind: str = "", message: str = "") -> local._Process:
    """Start a process that ends with this code, after an error of this kind, if any."""
    error = json.dumps({"error": {"kind": kind, "message": message}})
    how = f"os._exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
    says = f"print({error!r}, flush=True); " if kind else ""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os; {says}{how}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    party = local._Process(name, process, lambda status: None)
    party.wait_for_end()
    return party


@pytest.mark.parametrize(
    ("processes", "told", "kind"),
    [
        (
            [
                ("active", 4, "RunStoppedError", "aggregator stopped the run: 'passive-1 left"),
                ("aggregator", 4, "PartyLeftError", "passive-1 closed its link"),
                ("passive-1", -signal.SIGKILL),
                ("passive-2", 4, "RunStoppedError", "active stopped the run: 'passive-1 left"),
            ],
            (
                "passive-1: its process was ended by SIGKILL\n"
                "aggregator: passive-1 closed its link\n"
                "active and passive-2 heard of it, and stopped"
            ),
            PartyLeftError,
        ),
        (
            [
                ("active", 4, "PartyLeftError", "passive-1 closed its link"),
                ("passive-1", 3, "DataError", "its table has no column a"),
            ],
            "passive-1: its table has no column a\nactive: passive-1 closed its link",
            DataError,
        ),
        (
            [("active", 4, "RunStoppedError", "passive-1 stopped the run"), ("passive-1", 0)],
            "active: passive-1 stopped the run",
            PartyLeftError,
        ),
    ],
)
def test_a_death_is_told_once_and_its_cause_first(
    processes: list[tuple[Any, ...]], told: str, kind: type[Exception]
) -> None:
    error = local._find_failure([start_ending_process(*one) for one in processes])
    assert (type(error), str(error)) == (kind, told)


@pytest.mark.slow
def test_noise_under_a_sum_costs_the_same_wherever_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    noised = {"scheme": "plain", "masks": "pairwise", "noise": {"epsilon": 8.0}}
    config = small_config("apfed_r", secure_sum=noised)
    apart = tmp_path / "apart"
    require_no_failure(Parties(config, apart).play())
    rows = run_command(config, tmp_path / "memory", capsys, "--no-baselines")
    gather = ("--resume", "--transport", "local", "--no-baselines")
    assert run_command(config, apart, capsys, *gather) == rows
    costs_the_same(tmp_path / "memory", apart, "epsilon_c", "passive-1", capsys)


@pytest.mark.slow
def test_parties_that_are_started_by_hand_measure_report_and_cost_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    config = small_config(
        {"name": "votes", "epsilon": 8.0, "prior": "ridge"},
        labels={"mechanism": "randomised_response", "epsilon": 2.0},
        data={"dataset": "breast_cancer", "overlap": 0.8, "limit": 200},
    )
    parties = Parties(config, tmp_path / "apart", way="grpc", command=("--json",))
    said = parties.play()
    folder = parties.run.path
    memory = tmp_path / "memory"
    assert {name: told["kind"] for name, told in said.items()} == dict.fromkeys(said, "code 0"), (
        said
    )
    pages = {name: Path(json.loads(told["out"])["report"]) for name, told in said.items()}
    assert pages == {name: parties.run.get_party_path(name) / "report.html" for name in said}
    assert all(page.is_file() for page in pages.values())
    assert json.loads(said["active"]["out"])["solo"]["labels"] == "answered"  # of its mechanism
    rows = run_command(config, memory, capsys)
    assert run_command(config, folder, capsys, "--resume", "--transport", "grpc") == rows
    costs_the_same(memory, folder, "epsilon_v", "passive-1", capsys)
    alone, apart = (load_finished_run(run_folder).local_models for run_folder in (memory, folder))
    assert alone is not None
    assert apart is not None
    measured = {found.name: found for found in apart.baselines}  # here, tests have fewer
    assert all(found == measured[found.name] for found in alone.baselines)
