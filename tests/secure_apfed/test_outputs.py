"""What commands write replaces nothing that they read, and who ends one is told how to resume."""

import gc
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from secure_apfed.base.files import refuse_replacing_input
from secure_apfed.cli import execute, main
from secure_apfed.console import progress
from secure_apfed.errors import ConfigError
from secure_apfed.runs.outcome import Progress

CONFIG = """\
name: small
method: single_view
data:
  dataset: tables
  active: bank
  folder: {folder}
  id_column: id
  label_column: y
  parties: {bank: {file: bank.csv}, shop: {file: shop.csv}}
model: {network: random_features}
train: {epochs: 2}
guard: {mechanism: none}
"""
ROWS = 60


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    x, noise = np.random.default_rng(0).normal(size=(2, ROWS))
    bank = pd.DataFrame({"id": range(ROWS), "x": x, "y": np.where(x + noise > 0, "yes", "no")})
    bank.to_csv(folder / "bank.csv", index=False)
    pd.DataFrame({"id": range(ROWS), "u": -x}).to_csv(folder / "shop.csv", index=False)
    path = folder / "run.yaml"
    path.write_text(CONFIG.replace("{folder}", str(folder)))
    return path


@pytest.fixture(scope="module")
def model(run_file: Path) -> Path:
    folder = run_file.parent / "model"
    assert execute(["run", str(run_file), "--output", str(folder), "--no-baselines"]) == 0
    return folder


def write_rows(path: Path) -> bytes:
    pd.DataFrame({"id": range(5), "x": [0.1] * 5, "notes": ["mine"] * 5}).to_csv(path, index=False)
    return path.read_bytes()


@pytest.mark.parametrize("way", ["same name", "symbolic link", "hard link", "other spelling"])
def test_predictions_do_not_replace_the_table(
    way: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "new.csv"
    before = write_rows(rows)
    output = tmp_path / "other.csv"
    if way == "symbolic link":
        output.symlink_to(rows)
    elif way == "hard link":
        os.link(rows, output)
    else:
        output = rows if way == "same name" else tmp_path / "x" / ".." / "new.csv"
        (tmp_path / "x").mkdir()
    call = ["predict", "--model", str(model), "--data", str(rows), "--output", str(output)]
    assert execute(call) == 2
    assert "would be replaced" in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert rows.read_bytes() == before
    assert execute([*call[:-1], str(tmp_path / "predicted.csv")]) == 0


@pytest.mark.parametrize("name", ["model.json", "result.json", "config.yaml"])
def test_predictions_do_not_replace_a_file_of_the_model(
    name: str, model: Path, tmp_path: Path
) -> None:
    before = (model / name).read_bytes()
    write_rows(tmp_path / "new.csv")
    call = ["predict", "--model", str(model), "--data", str(tmp_path / "new.csv"), "--output"]
    assert execute([*call, str(model / name)]) != 0
    assert (model / name).read_bytes() == before


def test_predictions_may_lie_beside_the_model_and_be_written_again(
    model: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "new.csv")
    call = ["predict", "--model", str(model), "--data", str(tmp_path / "new.csv"), "--output"]
    assert execute([*call, str(model / "predicted.csv")]) == 0
    assert execute([*call, str(model / "predicted.csv")]) == 0


def test_an_exported_model_does_not_replace_its_card(model: Path) -> None:
    before = (model / "model.json").read_bytes()
    assert execute(["export", str(model), "--onnx", str(model / "model.json")]) == 2
    assert (model / "model.json").read_bytes() == before


def test_a_run_does_not_replace_its_own_settings_file(run_file: Path) -> None:
    own = run_file.with_name("config.yaml")
    own.write_text("# mine\n" + run_file.read_text())
    assert execute(["run", str(own), "--output", str(own.parent), "--no-baselines"]) == 2
    assert own.read_text().startswith("# mine")
    own.unlink()


def test_what_is_not_there_yet_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    refuse_replacing_input(tmp_path / "b.csv", "--output", tmp_path / "a.csv", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"--onnx .*a\.csv: .* give --onnx another name"):
        refuse_replacing_input(tmp_path / "a.csv", "--onnx", tmp_path / "a.csv")


@pytest.fixture
def process_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what `main` sets for a process of its own."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    handler = signal.getsignal(signal.SIGTERM)
    thresholds = gc.get_threshold()
    yield
    signal.signal(signal.SIGTERM, handler)
    gc.set_threshold(*thresholds)


def test_sigterm_ends_a_run_as_ctrl_c_does(
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    process_settings: None,
) -> None:
    @contextmanager
    def terminate_in_epoch_2(name: str, *, quiet: bool) -> Iterator[Any]:
        def update(progress: Progress) -> None:
            if progress.epoch == 2:
                signal.raise_signal(signal.SIGTERM)

        yield update

    folder = tmp_path / "a run"
    monkeypatch.setattr(progress, "show_run", terminate_in_epoch_2)
    call = ["secure-apfed", "run", str(run_file), "--output", str(folder)]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    shown = re.sub(r"[│\s]", "", capsys.readouterr().err)
    resume = ["run", str(folder / "config.yaml"), "--output", str(folder), "--resume"]
    assert re.sub(r"\s", "", shlex.join(["secure-apfed", *resume])) in shown
