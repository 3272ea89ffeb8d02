"""Each example as it stands, in a process of its own: what it prints, and what it adds."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apfed_protocols import hub_pump
from apfed_protocols.errors import LocalProtocolError
from tests.docs.pages import DOCS, HOOK, ROOT, load_module, text_of
from tests.links.flower import Flower

EXAMPLES = DOCS / "examples"


def run_example(name: str, folder: Path) -> str:
    told = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "HOME": str(folder),
        },
        check=False,
        timeout=200,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def figure(before: str, told: str) -> float:
    (found,) = re.findall(rf"{before} +([\d.e+-]+)(?:\s|$)", told)
    return float(found)


def test_what_protects_is_at_most_25_lines_and_the_page_shows_them() -> None:
    shown = HOOK.difference("apfed_plain/apfed_secure")
    assert 10 < len(re.findall(r"^\+(?!\+\+)", shown, re.MULTILINE)) <= 25
    assert shown in text_of("docs/examples.md")


@pytest.mark.slow
def test_apfed_under_a_sum_is_apfed_and_the_guard_spends_its_epsilon(tmp_path: Path) -> None:
    plain = run_example("apfed_plain", tmp_path)
    secure = run_example("apfed_secure", tmp_path)
    first, _, guarded, *attacks = secure.splitlines()
    assert figure("accuracy", plain) == figure("accuracy", first) > 0.6
    assert figure("weights differ", secure) < 1e-3
    assert figure("epsilon", guarded) == 8
    assert "20 releases of the row" in guarded
    assert len([line for line in attacks if line.endswith("found")]) > 5
    assert any(line.startswith("Not mounted, ") for line in attacks)


CAT = ["cat_loop", "cat_parties"]


@pytest.mark.parametrize("loop", CAT)
def test_the_page_shows_what_changes_in_a_loop_that_merges_by_cat(loop: str) -> None:
    shown = HOOK.difference(f"{loop}_plain/{loop}_summed")
    assert "\n+" in shown
    assert shown in text_of("docs/examples.md")


@pytest.mark.slow
@pytest.mark.parametrize("loop", CAT)
def test_a_loop_that_merges_by_cat_has_the_same_weights_under_a_sum(
    loop: str, tmp_path: Path
) -> None:
    plain = run_example(f"{loop}_plain", tmp_path)
    summed = run_example(f"{loop}_summed", tmp_path)
    assert figure("accuracy", summed) == figure("accuracy", plain) > 0.9
    assert figure("weights differ", summed) < 1e-4


@pytest.mark.slow
def test_vertical_models_are_those_of_one_table(tmp_path: Path) -> None:
    lines = run_example("vertical_glm", tmp_path).splitlines()
    models = [line for line in lines if " rows, " in line]
    assert len(models) == 4
    for line in models:
        off, intercept = re.findall(r"off ([\d.e+-]+)", line)
        assert float(off) < 1e-2, line
        assert float(intercept) < 1e-2, line


@pytest.mark.slow
def test_opacus_epsilon_is_the_same_under_a_sum(tmp_path: Path) -> None:
    plain, summed, last = run_example("opacus_beside_sum", tmp_path).splitlines()
    assert figure("epsilon", plain) == figure("epsilon", summed) == pytest.approx(6.25, abs=0.01)
    assert figure("accuracy", summed) > 0.85
    assert figure("weights differ", last) < 1e-3
    assert last.endswith("same epsilons True")


@pytest.mark.slow
def test_hosts_of_one_packet_each_add_up_to_the_counts(tmp_path: Path) -> None:
    lines = run_example("hub_over_files", tmp_path).splitlines()
    assert [figure("counts differ", line) for line in lines] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text_encoder", "graph_network"])
def test_a_network_of_ones_own_learns_behind_a_guard(name: str, tmp_path: Path) -> None:
    told = run_example(name, tmp_path)
    assert figure("accuracy:", told.replace(" on ", "  on ")) > 0.6
    assert "epsilon_x, one row's releases: epsilon 8" in told


@pytest.mark.slow
def test_resnet_and_a_transformer_train_or_name_the_extra(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchvision") is None:
        with pytest.raises(AssertionError, match="torchvision is not installed; run: "):
            run_example("resnet_and_vit", tmp_path)
        return
    told = run_example("resnet_and_vit", tmp_path)
    assert told.rstrip().endswith("is result.model[0]: True")
    assert figure("moved by at most", told) > 1e-4


@pytest.mark.slow
def test_an_attack_of_ones_own_is_swept_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own_attack.py", "own_attack.yaml"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "secure_apfed.cli", "run", "own_attack.yaml", "--output", "runs"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs"
    mounted = json.loads((run / "attacks.json").read_text())
    assert {found["attack"] for found in mounted} == {"nearest_neighbour"}
    assert all(found["advantage"] is not None for found in mounted)
    assert list((run / "tradeoff").glob("*labels*.png"))
    board = (run / "tradeoff" / "leaderboard.csv").read_text()
    assert "nearest_neighbour" in board


def test_the_forty_runs_are_short_ones_under_masks() -> None:
    """`tests/experiments/test_backends.py` computes such runs where a cluster is installed."""
    config = load_module(EXAMPLES / "forty_runs.py").make_config()
    assert (config.method.name, config.train.epochs, config.attacks) == ("apfed_c", 1, ())
    assert (config.secure_sum.masks, config.guard.mechanism) == ("pairwise", "none")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None,
    reason="flwr is missing: the extra `flwr`, see docs/examples.md",
)
def test_hosts_of_flowers_get_the_scores_of_one_process_though_one_is_killed(
    tmp_path: Path,
) -> None:
    app = EXAMPLES / "flower_vertical"
    settle = [sys.executable, str(app / "vertical" / "settle.py"), str(tmp_path / "disks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(settle, env=environment, check=True)
    with Flower(tmp_path / "flower") as flower:
        for name in ("clinic", "laboratory", "pharmacy"):
            disk = tmp_path / "disks" / name
            flower.start_node(name, f'host="{name}" disk="{disk}"', {})
        disk = tmp_path / "disks" / "server"
        with flower.run_app(app, "--run-config", f'disk="{disk}"') as running:
            flower.wait_for("step 4 of 30", timeout=900)
            flower.kill("laboratory")
            flower.start_again("laboratory")
            told = flower.wait_for("s a step", timeout=1800)
            assert running.wait(60) == 0
    assert "step 30 of 30" in told
    assert figure("asked again", told.replace(",", "")) >= 1
    assert figure("accuracy", told) > 0.95
    compared = subprocess.run(
        [*settle, "compare"], env=environment, check=True, capture_output=True, text=True
    )
    assert figure("scores differ", compared.stdout) < 1e-3


@pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None,
    reason="flwr is missing: the extra `flwr`, see docs/examples.md",
)
def test_a_host_of_flowers_repeats_its_answer_and_after_a_lost_role_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "flower_vertical"))
    host, common, settle = (
        importlib.import_module(f"vertical.{name}") for name in ("host", "common", "settle")
    )
    settle.settle_parties(tmp_path)
    labels = np.load(tmp_path / "server" / "table.npy")
    answers: list[tuple[str, bytes]] = []
    every_score: list[Any] = []

    def begin_session(session: str) -> Any:
        def send(name: str, packet: bytes) -> None:
            first = host.answer_once(name, tmp_path / name, session, packet)
            assert host.answer_once(name, tmp_path / name, session, packet) == first
            answers.append((name, first))

        ends = {"server": common.describe_sum(session).make_receiver()}
        signed = common.load_identity(tmp_path / "server")
        return hub_pump(ends, send, lambda: answers.pop(0), **signed)

    def train(hub: Any) -> None:
        residual = np.zeros_like(labels)
        if every_score:
            residual = labels - 1 / (1 + np.exp(-every_score[-1]))
        step = len(every_score).to_bytes(8, "big")
        every_score.append(hub.step(step + residual.tobytes(), labels.shape))

    hub = begin_session("first")
    for _ in range(3):
        train(hub)
    state = tmp_path / "laboratory" / "state.json"
    before = state.read_bytes()
    train(hub)
    every_score.pop()
    state.write_bytes(before)  # it died before this file was replaced
    with pytest.raises(LocalProtocolError):
        train(hub)
    answers.clear()
    hub = begin_session("second")
    for _ in range(3):
        train(hub)
    np.save(tmp_path / "server" / "scores.npy", every_score)
    assert len(every_score) == 6
    assert settle.compare_scores(tmp_path) < 1e-3
