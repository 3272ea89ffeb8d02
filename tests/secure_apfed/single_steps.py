"""Random tables of forty people and configs in double precision, for tests of single steps.

And the roles of a session of APFed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.methods import Own, Session, Start, fresh_secrets
from secure_apfed.methods.apfed import ApfedActive, ApfedPassive
from tests.secure_apfed.small_runs import Said

__all__ = [
    "CLASSES",
    "COLUMNS",
    "ROWS",
    "active_of",
    "own_of",
    "passives_of",
    "random_data",
    "step_config",
]

ROWS, COLUMNS, CLASSES = 40, 5, 3


def random_data(
    known: Mapping[str, Sequence[int]], *, strangers: int = 5, train: int = 32
) -> VerticalData:
    """Each passive knows these of the active's people and some strangers, in an own order."""
    generator = torch.Generator().manual_seed(7)

    def table(name: str, ids: list[str], labels: Tensor | None) -> PartyTable:
        features = torch.randn(len(ids), COLUMNS, generator=generator)
        encoding = ColumnEncoding.plain(tuple(f"{name}{column}" for column in range(COLUMNS)))
        return PartyTable(name, tuple(ids), features, labels, encoding)

    people = [f"person {row}" for row in range(ROWS)]
    rows = torch.arange(ROWS)
    active = table("active", people, rows % CLASSES)
    passives = []
    for name, mine in known.items():
        own = [*(people[row] for row in mine), *(f"stranger {name} {k}" for k in range(strangers))]
        order = torch.randperm(len(own), generator=generator).tolist()
        passives.append(table(name, [own[row] for row in order], None))
    return VerticalData(
        table=active, passives=tuple(passives), classes=("a", "b", "c"), train_rows=rows[:train],
        test_rows=rows[train:],
    )  # fmt: skip


def step_config(method: Said, **changes: Any) -> Config:
    """A plain sum without clip and no guard; changes replace whole sections."""
    settings: dict[str, Any] = {
        "name": "test",
        "method": method,
        "party_seeds": "shared_for_comparison",
        "data": {"dataset": "digits"},
        "model": {"network": "mlp", "hidden": [6], "representation": 4, "projection": 4},
        "train": {"precision": "float64", "learning_rate": 0.1, "device": "cpu", "batch_size": 16},
        "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }
    return Config.model_validate({**settings, **changes})


def active_of(session: Session) -> ApfedActive:
    """The active of an APFed session, or of one without passives."""
    assert isinstance(session.learner, ApfedActive)
    return session.learner


def passives_of(session: Session) -> list[ApfedPassive]:
    """The passives of an APFed session, in the contract's order."""
    helpers = [session.helpers[name] for name in session.contract.passives]
    return [helper for helper in helpers if isinstance(helper, ApfedPassive)]


def own_of(start: Start, name: str) -> Own:
    """What the party of this name brings to a session."""
    secrets = start.secrets.get(name) or fresh_secrets(start.config, name)
    return start.own(name, secrets, {name: secrets.identity.public})
