"""Cross-checks of epsilon: bounded, said where they are left out, and never a run's loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from secure_apfed.privacy import accountants
from secure_apfed.privacy.accountants import (
    ACCOUNTANTS,
    MAX_GRID_POINTS,
    GaussianRelease,
    NoFigureError,
    calibrate_sigma,
)
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.runs.folder import RunFolder, resumable
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

DELTA = 1e-5


def release(epsilon: float, releases: int) -> GaussianRelease:
    return GaussianRelease(noise_multiplier=calibrate_sigma(epsilon, DELTA, releases, clip=0.5))


@pytest.mark.parametrize("epsilon", [0.5, 20.0])
def test_a_foreseen_grid_is_the_librarys(epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from dp_accounting.pld import privacy_loss_distribution

    mechanism = release(epsilon, 1)
    library = privacy_loss_distribution.from_gaussian_mechanism(mechanism.noise_multiplier)
    size = library._pmf_remove.size
    assert accountants._pld_grid(mechanism.noise_multiplier, 1) == pytest.approx(size, rel=0.01)
    monkeypatch.setattr(accountants, "MAX_GRID_POINTS", size / 2)
    with pytest.raises(NoFigureError, match=r"its grid would take .* points"):
        ACCOUNTANTS["pld"].epsilon(mechanism, releases=1, delta=DELTA / 3)


def test_what_is_left_out_stands_where_its_figure_would() -> None:
    mechanism = release(1000.0, 1)
    ledger = PrivacyLedger(mechanism, delta=DELTA, budget=None, rows=1, log=None)
    ledger.load_state_dict({"counts": torch.ones(1, dtype=torch.int64)})
    told = ledger.cross_check()
    assert told["gdp"] == pytest.approx(1000.0, rel=1e-4)
    assert str(told["pld"]).startswith("left out: its grid would take ")
    assert f"(bound {MAX_GRID_POINTS:,})" in str(told["pld"])


@pytest.mark.parametrize("epsilon", [0.5, 500.0])
def test_a_run_of_any_epsilon_is_finished(epsilon: float, tmp_path: Path) -> None:
    guard = {"mechanism": "gaussian", "epsilon": epsilon, "noise": "reproducible_insecure"}
    result = run(
        small_config(guard=guard, train={"epochs": 1, "batch_size": 64, "device": "cpu"}),
        tmp_path / "run",
    )
    told = json.loads((tmp_path / "run" / "accountants.json").read_bytes())
    assert told == dict(result.privacy.accountants)
    assert isinstance(told["pld"], str) == (epsilon > 100)
    assert told["gdp"] == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("does not converge")])
def test_a_cross_check_that_fails_leaves_the_finished_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> float:
        raise error

    monkeypatch.setattr(ACCOUNTANTS["pld"], "epsilon", fail)
    result = run(small_config(), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert str(result.privacy.accountants["pld"]).startswith(f"failed: {type(error).__name__}")
    assert json.loads(folder.accountants.read_bytes())["pld"] == result.privacy.accountants["pld"]
    assert (
        json.loads(folder.result.read_bytes())["privacy"]["epsilon_x"] == result.privacy.epsilon_x
    )


def test_a_process_that_ends_in_the_cross_check_leaves_the_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any, **options: Any) -> float:
        raise SystemExit(137)  # as far as this process can play one that is killed

    monkeypatch.setattr(ACCOUNTANTS["pld"], "epsilon", killed)
    with pytest.raises(SystemExit):
        run(small_config(), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.check()
    load_model(folder.path)
    assert 7.9 < json.loads(folder.result.read_bytes())["privacy"]["epsilon_x"] <= 8.0
    assert (folder.party("active") / "ledger-active.jsonl").stat().st_size > 0
    assert not resumable(folder.path, small_config())
    assert not folder.accountants.exists()
