"""How long the launcher waits for parties, and parties for one another."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from secure_apfed.config.file import load_config_text
from secure_apfed.organisations import local
from secure_apfed.organisations.party import PartyFile
from secure_apfed.runs.folder import RunFolder

CONFIG = """
name: mapped
method: apfed_r
data:
  dataset: tables
  active: bank
  memory_map: {memory_map}
  parties: {{bank: {{file: bank.csv}}, shop: {{file: shop.csv}}}}
secure_sum: {{scheme: plain, masks: none, allow_single_passive: true}}
guard: {{mechanism: none}}
"""


@dataclass
class Process:
    """A party's process, which ended with this code; None: it runs."""

    name: str
    exit_code: int | None = None


def has_contract(folder: RunFolder) -> None:
    folder.contract.write_text("signed since the launcher looked")


def has_result(folder: RunFolder) -> None:
    folder.result.write_text("{}")


CASES: dict[str, tuple[int | None, Callable[[RunFolder], None] | None, bool]] = {
    "one party of two dies before the contract": (-9, None, False),
    "its settings are wrong": (2, None, False),
    "one party of two leaves after the contract": (-9, has_contract, True),
    "one party is done, and the active measures": (0, has_result, True),
    "both run": (None, None, True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_active_is_not_left_waiting_for_the_dead(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, happens, ends = CASES[case]
    folder = RunFolder(tmp_path)
    leading = Process("bank")
    others = [Process("shop", code), Process("lab")]
    now = 0.0

    def pass_time(seconds: float) -> None:
        """Let time pass: something happens at once, and the active ends after an hour."""
        nonlocal now
        if happens is not None and now == 0:
            happens(folder)
        now += 10.0
        leading.exit_code = 0 if now > 3600 else None

    monkeypatch.setattr("time.sleep", pass_time)
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert local._wait_for_active(leading, others, folder, patience_s=60) is ends  # type: ignore[arg-type]
    assert (now > 3600) is ends


@pytest.mark.parametrize(("memory_map", "meet_s"), [("always", 86_400.0), ("never", 60.0)])
def test_parties_wait_while_others_read_large_tables(
    memory_map: str, meet_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    for name, more in (("bank", {"label": draw.integers(0, 2, 40)}), ("shop", {})):
        columns = {"id": [f"person-{row}" for row in range(40)], "x": draw.normal(size=40), **more}
        pd.DataFrame(columns).to_csv(tmp_path / f"{name}.csv", index=False)
    monkeypatch.chdir(tmp_path)
    config = load_config_text(CONFIG.format(memory_map=memory_map), source="run.yaml")
    files: list[Path] = []

    class LauncherStoppedError(Exception):
        """The launcher is not followed any further."""

    def stop(prepared: dict[str, Path], *_: object) -> None:
        files.extend(prepared.values())
        raise LauncherStoppedError

    monkeypatch.setattr(local, "_start_processes", stop)
    with pytest.raises(LauncherStoppedError):
        local.run_locally(config, tmp_path / "run")
    assert {PartyFile.from_file(file).meet_s for file in files} == {meet_s}
