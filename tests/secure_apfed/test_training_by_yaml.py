"""A dozen lines of Python, as somebody types them, and the same run as a YAML file.

Images, a table and sequences: the trained parameters are equal to the last bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from secure_apfed import load_config, run
from tests.secure_apfed.test_training import parameters_of

N = 60
PARTIES = ("clinic", "lab", "registry")
NETS = """
from torch import nn
from torch.nn import functional as F


class LastState(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gru = nn.GRU(channels, 6, batch_first=True)

    def forward(self, steps_BTC):
        return self.gru(steps_BTC)[1][0]


def encode(features):
    if len(features) == 3:
        return nn.Sequential(nn.Conv2d(features[0], 2, 3), nn.Flatten(), nn.Linear(72, 6))
    return LastState(features[1]) if len(features) == 2 else nn.Linear(features[0], 6)


def score(features, classes):
    return nn.Linear(features[0], classes)


def agree(z, x):
    return 1 - F.cosine_similarity(z, x.flatten(1)[:, : z.shape[1]]).mean()
"""
ARRAYS = """
import my_nets
import pandas as pd
from secure_apfed import Active, Passive, train

people = pd.read_csv("people.csv", dtype=str)
result = train(
    Active("clinic", people.id, "clinic.npy", people.label, encoder=my_nets.encode),
    [Passive(name, people.id, f"{name}.npy", loss=my_nets.agree) for name in ("lab", "registry")],
    alignment="ecdh", secure_sum="masked", epochs=2, batch_size=15, baselines=False,
    model={"projection": 4}, party_seeds="shared_for_comparison",
)
"""
FRAMES = """
import my_nets
import pandas as pd
from secure_apfed import Active, Passive, train

tables = {name: pd.read_csv(f"{name}.csv").set_index("id") for name in ("lab", "registry")}
clinic = pd.read_csv("clinic.csv").set_index("id")
result = train(
    Active("clinic", clinic.index, clinic.iloc[:, :4], clinic.label, encoder=my_nets.encode),
    [Passive(name, rows.index, rows, loss=my_nets.agree) for name, rows in tables.items()],
    alignment="ecdh", secure_sum="masked", epochs=2, batch_size=15, baselines=False,
    model={"projection": 4}, party_seeds="shared_for_comparison",
)
"""
YAML = """
name: the-same
party_seeds: shared_for_comparison
method: apfed
data:
  dataset: tables
  active: clinic
  classes: ["no", "yes"]
  parties:
    clinic: {clinic}
    lab: {lab}
    registry: {registry}
model: {{network: "my_nets:encode", projection: 4}}
passives: {{default: {{objective: "my_nets:agree", model: {{network: auto, projection: 4}}}}}}
alignment: {{protocol: ecdh}}
secure_sum: {{scheme: plain, masks: pairwise}}
guard: {{mechanism: none}}
train: {{epochs: 2, batch_size: 15, evaluate_every: 2}}
"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of rows: what somebody types, and the shape of each party's rows."""

    typed: str
    shapes: Mapping[str, tuple[int, ...]]

    def write_files(self, folder: Path) -> str:
        """Write all parties' rows; return the same run as YAML."""
        draw = np.random.default_rng(0)
        ids = [f"person-{number}" for number in range(N)]
        labels = draw.choice(["no", "yes"], N)
        pd.DataFrame({"id": ids, "label": labels}).to_csv(folder / "people.csv", index=False)
        pd.DataFrame({"id": ids}).to_csv(folder / "ids.csv", index=False)
        tables = {}
        for name, shape in self.shapes.items():
            rows = draw.normal(size=(N, *shape))
            if self.typed == FRAMES:
                table = pd.DataFrame(rows, index=pd.Index(ids, name="id")).add_prefix("x")
                if name == "clinic":
                    table["label"] = labels
                table.to_csv(folder / f"{name}.csv")
                tables[name] = f"{{file: {name}.csv}}"
            else:
                np.save(folder / f"{name}.npy", rows.astype(np.float32))
                people = "people.csv" if name == "clinic" else "ids.csv"
                tables[name] = f"{{file: {people}, rows: {name}.npy}}"
        return YAML.format(**tables)


KINDS: Mapping[str, Kind] = {
    "images": Kind(
        typed=ARRAYS, shapes={"clinic": (1, 8, 8), "lab": (3, 6, 6), "registry": (1, 4, 4)}
    ),
    "a table": Kind(typed=FRAMES, shapes={"clinic": (4,), "lab": (5,), "registry": (8,)}),
    "sequences": Kind(typed=ARRAYS, shapes={"clinic": (5, 3), "lab": (7, 2), "registry": (4, 4)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_typed_is_a_dozen_lines(kind: str) -> None:
    assert len(KINDS[kind].typed.strip().splitlines()) <= 12


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_typed_equals_the_run_of_a_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "run.yaml").write_text(KINDS[kind].write_files(tmp_path))
    typed: dict[str, Any] = {}
    exec(KINDS[kind].typed, typed)
    named = run(load_config("run.yaml"), None).own_networks
    assert named is not None
    networks = nn.Sequential(named.encoder, named.head)
    assert torch.equal(parameters_of(typed["result"].model), parameters_of(networks))
