"""Runs on own tables: resumed with others, and told by whoever spent most."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.methods import Own, accounts
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import interrupted

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

ROWS = 60
PARTIES = ("bank", "shop", "clinic")


def write_tables(folder: Path) -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, ROWS)
    for name in PARTIES:
        columns: dict[str, Any] = {"id": [f"person-{row}" for row in range(ROWS)]}
        columns |= {f"{name}-x": rng.normal(size=ROWS) + label, f"{name}-y": rng.random(ROWS)}
        columns |= {"label": label} if name == "bank" else {}
        pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)


def config_of(folder: Path, guard: dict[str, Any], **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "name": "test",
        "party_seeds": "shared_for_comparison",
        "method": "apfed_c",
        "data": {
            "dataset": "tables", "folder": folder, "active": "bank",
            "parties": {name: {"file": f"{name}.csv"} for name in PARTIES},
        },
        "model": {"hidden": [8], "representation": 4, "projection": 4},
        "train": {"epochs": 4, "batch_size": 16, "learning_rate": 0.01, "device": "cpu"},
        "secure_sum": {"scheme": "plain"},
        "guard": guard,
    }  # fmt: skip
    return Config.model_validate(settings | changes)


CHANGED: list[tuple[str, Callable[[pd.DataFrame], pd.DataFrame]]] = [
    ("bank", lambda table: table[::-1]),
    ("shop", lambda table: table[::-1]),
    ("clinic", lambda table: pd.concat([table, table[:1].assign(id="somebody else")])),
    ("shop", lambda table: table.assign(id=["somebody else", *table["id"][1:]])),
    ("bank", lambda table: table.assign(label=1 - table["label"])),
]


@pytest.mark.parametrize("mechanism", ["gaussian", "frozen_gaussian"])
def test_other_people_or_labels_are_refused(mechanism: str, tmp_path: Path) -> None:
    """The ledger counts positions, and a frozen guard keeps rows by them."""
    write_tables(tmp_path)
    config = config_of(tmp_path, {"mechanism": mechanism, "sigma": 1.0})
    interrupted(config, tmp_path / "run", at_step=5)
    for party, change in CHANGED:
        file = tmp_path / f"{party}.csv"
        whole = file.read_bytes()
        change(pd.read_csv(file)).to_csv(file, index=False)
        with pytest.raises(CheckpointError, match=f"the table of {party} .* positions"):
            run(config, tmp_path / "run", resume=True)
        file.write_bytes(whole)


def test_changed_features_are_charged_again_and_get_other_noise(tmp_path: Path) -> None:
    """The noise depends on what it hides: the steps after the checkpoint are played anew."""
    write_tables(tmp_path)
    config = config_of(tmp_path, {"mechanism": "gaussian", "epsilon": 8.0})
    interrupted(config, tmp_path / "run", at_step=5)
    table = pd.read_csv(tmp_path / "bank.csv")
    table.assign(**{"bank-x": -table["bank-x"]}).to_csv(tmp_path / "bank.csv", index=False)
    with pytest.raises(BudgetExhaustedError, match="release 5 of one row"):
        run(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(("noise", "ends"), [("reproducible_insecure", True), ("secret", False)])
@pytest.mark.parametrize("method", ["apfed_c", "single_view"])
def test_noise_of_the_seed_under_other_features_ends_every_claim(
    method: str, noise: str, ends: bool, tmp_path: Path
) -> None:
    """The steps that are played anew have the same noise: their difference has none."""
    write_tables(tmp_path)
    guard = {"mechanism": "gaussian", "sigma": 20.0, "noise": noise}
    private: dict[str, Any] = {"method": method, "dp_sgd": {"noise_multiplier": 20.0}}
    config = config_of(tmp_path, guard, **private)
    interrupted(config, tmp_path / "run", at_step=5)
    table = pd.read_csv(tmp_path / "bank.csv")
    table.assign(**{"bank-x": -table["bank-x"]}).to_csv(tmp_path / "bank.csv", index=False)
    privacy = run(config, tmp_path / "run", resume=True).privacy
    sent = method == "apfed_c"
    assert math.isinf(privacy.epsilon_x) is (ends and sent)
    assert math.isinf(privacy.epsilon_y) is math.isinf(privacy.epsilon_model) is ends
    assert privacy.releases == 5 * sent


@pytest.mark.parametrize("busy", ["shop", "clinic"])
def test_the_account_is_that_of_the_passive_that_spent_most(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ledger_for(own: Own, *rest: Any, aligned: int) -> PrivacyLedger:
        ledger = accounts.ledger_for(own, *rest, aligned=aligned)
        if own.name == busy:
            ledger.charge(step=1000, rows=torch.arange(aligned), digest=b"one more")
        return ledger

    monkeypatch.setattr("secure_apfed.methods.joint.ledger_for", ledger_for)
    write_tables(tmp_path)
    guard = {"mechanism": "gaussian", "sigma": 20.0}
    joint = config_of(tmp_path, guard).model_dump() | {"method": "tvfl"}
    config = Config.model_validate(joint)
    result = run(config, None)
    assert result.privacy.releases == config.train.epochs + 1
    once = GaussianRelease(noise_multiplier=10.0).mu
    assert result.privacy.mu == pytest.approx(once * math.sqrt(config.train.epochs + 1))
