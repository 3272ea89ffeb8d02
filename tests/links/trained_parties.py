"""Parties that trained together, whose joint predictions tests ask for."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pandas as pd
import yaml

from secure_apfed.base.files import make_private
from secure_apfed.config import Config
from secure_apfed.organisations.local import prepare_parties
from secure_apfed.organisations.party import run_party

ROWS = 200
NEW = 40
MANY = {"a_day": 100_000, "in_all": 100_000, "lookups_a_day": 100_000}


def write_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Write three parties' tables of the same people, and new people; the shop lacks five."""
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(ROWS + NEW, 6))
    frame = pd.DataFrame(x_NF, columns=[*"abcdef"])
    frame.insert(0, "id", [f"{number:06d}" for number in rng.permutation(9999)[: ROWS + NEW]])
    label = np.where(x_NF[:, 0] + 2 * x_NF[:, 2] + 2 * x_NF[:, 4] > 0, "yes", "no")
    parts = {
        "bank": frame[["id", "a", "b"]].assign(y=label)[:ROWS],
        "shop": frame[["id", "c", "d"]][: ROWS + NEW - 5],
        "clinic": frame[["id", "e", "f"]].iloc[::-1],
        "new": frame[["id", "a", "b"]][ROWS:],
    }
    for name, part in parts.items():
        part.to_csv(folder / f"{name}.csv", index=False)
    return parts


def make_config(folder: Path, method: str, **changes: Any) -> Config:
    """Return the settings of a run on the tables in `folder`."""
    return Config.model_validate(
        {
            "name": "served",
            "method": method,
            "guard": {"mechanism": "none"},
            "data": {
                "dataset": "tables",
                "active": "bank",
                "id_column": "id",
                "label_column": "y",
                "parties": {
                    name: {"file": str(folder / f"{name}.csv")}
                    for name in ("bank", "shop", "clinic")
                },
            },
            "model": {"network": "mlp", "hidden": [8], "representation": 4},
            "train": {"epochs": 3, "batch_size": 64, "learning_rate": 0.1, "device": "cpu"},
            "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 8.0},
            "attacks": [],
            **changes,
        }
    )


def run_together(*calls: Any) -> list[Any]:
    """Make each call in a thread of its own; return what they returned or raised."""
    results: list[Any] = [None] * len(calls)

    def play(at: int) -> None:
        try:
            results[at] = calls[at]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[at] = error

    threads = [Thread(target=play, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def train_parties(folder: Path, method: str, **changes: Any) -> Mapping[str, Path]:
    """Train three parties together; return the files of parties and tables by name."""
    write_tables(folder)
    make_private(folder / "run")
    files = prepare_parties(make_config(folder, method, **changes), folder / "run")
    results = run_together(*(lambda file=file: run_party(file) for file in files.values()))
    assert [result for result in results if isinstance(result, Exception)] == []
    for name, file in files.items():
        settings = yaml.safe_load(file.read_text()) | {"serve": MANY}
        file.write_text(yaml.safe_dump(settings))
        shutil.copytree(file.parent, folder / "trained" / name)
    return {**files, "new": folder / "new.csv", "bank.csv": folder / "bank.csv"}
