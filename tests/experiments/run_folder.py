"""Runs for tests of what reads them: folders, finished ones in memory, and small ones to play."""

import json
import math
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apfed_attacks import ATTACKS
from apfed_attacks.headlines import list_directions
from apfed_attacks.interface import AttackResult
from apfed_attacks.table import expand_choices
from apfed_experiments.finished import FinishedRun
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.runs.outcome import Outcome

APFED: dict[str, Any] = {
    "method": "apfed_c",
    "model": {"hidden": [16], "representation": 8, "projection": 8, "dropout": 0.0},
    "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.05},
    "secure_sum": {"scheme": "plain", "clip": None},
}


class Page(HTMLParser):
    """Collects addresses, rows and scripts of a page, whose tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.rows: list[dict[str, str | None]] = []
        self.open: list[str] = []
        self.data: dict[str, str] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        if "data-at" in given:
            self.rows.append(given)
        if tag not in ("meta", "img", "br", "link", "input"):
            self.open.append(tag if tag != "script" else given.get("id") or "script")

    def handle_endtag(self, tag: str) -> None:
        opened = self.open.pop()
        assert opened == tag or tag == "script"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.data[self.open[-1]] = self.data.get(self.open[-1], "") + data


def config_of(method: str = "apfed_c", guard: str = "{mechanism: none}", **settings: str) -> Config:
    """Return a small config; further settings are YAML by top-level key."""
    told = {
        "name": f"digits-{method}",
        "method": method,
        "data": "{dataset: digits, views: 4, overlap: 0.8}",
        "guard": guard,
        "train": "{epochs: 6, batch_size: 64, learning_rate: 0.05}",
        **settings,
    }
    return load_config_text("\n".join(f"{key}: {value}" for key, value in told.items()))


def flow(
    sender: str, receiver: str, kind: str, messages: int, each: int, last: int
) -> dict[str, Any]:
    """Return one entry of transcript.json; `each` is the payload bytes of one message."""
    return {
        "sender": sender,
        "receiver": receiver,
        "kind": kind,
        "messages": messages,
        "payload_bytes": messages * each,
        "wire_bytes": messages * (each + 90),
        "first_step": -1 if last < 0 else 0,
        "last_step": last,
    }


def attack_result(**changed: Any) -> dict[str, Any]:
    """Return one entry of attacks.json."""
    scores = {"accuracy": 0.71, "balanced_accuracy": 0.70}
    return {
        "attack": "model_completion",
        "target": "labels",
        "adversary": "passive-1",
        "role": "passive",
        "behaviour": "curious",
        "method": "apfed_c",
        "applicable": True,
        "reason": None,
        "victim": "active",
        "metric": "balanced_accuracy",
        "variant": "h and x, logistic",
        "score": scores,
        "variants": {"h and x, logistic": scores},
        "baseline": "x, logistic",
        "baselines": {"x, logistic": {"accuracy": 0.5, "balanced_accuracy": 0.48}},
        "references": {},
        "advantage": 0.22,
        "knowledge": {"labels": 40, "priors": True},
        "counts": {"known": 40, "scored": 900},
        "seed": 0,
        **changed,
    }


def _flows(method: str, steps: int, passives: int) -> list[dict[str, Any]]:
    names = [f"passive-{at + 1}" for at in range(passives)]
    if method == "single_view":
        return []
    told = [flow("active", name, "alignment", 2, 40_000, -1) for name in names]
    told += [flow(name, "active", "alignment", 2, 40_000, -1) for name in names]
    last = steps - 1
    if method == "tvfl":
        for name in names:
            told.append(flow("active", name, "request", steps, 600, last))
            told.append(flow(name, "active", "representations", steps, 8_900, last))
            told.append(flow("active", name, "gradients", steps, 8_400, last))
        return told
    told += [flow("active", name, "sum-setup", 1, 90_000, -1) for name in [*names, "aggregator"]]
    for name in names:
        told.append(flow("active", name, "representations", steps, 17_000, last))
        told.append(flow(name, "aggregator", "contribution", steps, 70_000, last))
    told.append(flow("aggregator", "active", "sum", steps, 70_000, last))
    return told


def write_run(
    folder: Path,
    config: Config,
    *,
    accuracy: Mapping[str, float],
    passives: int = 3,
    epsilon: float | None = None,
    attacks: list[dict[str, Any]] | None = None,
) -> Path:
    """Write a finished run; epsilon None is infinite."""
    folder.mkdir(parents=True)
    epochs = config.train.epochs
    steps = 16 * config.train.epochs
    flows = _flows(config.method.name, steps, passives)
    wire = sum(one["wire_bytes"] for one in flows)
    metrics = [
        {
            "epoch": at + 1,
            "step": 16 * (at + 1),
            "loss": 2.3 / (1 + at),
            "accuracy": {name: value * (at + 1) / epochs for name, value in accuracy.items()},
            "epsilon": epsilon,
            "wire_bytes": wire * (at + 1) // epochs,
            "seconds": 1.5 * (at + 1),
        }
        for at in range(epochs)
    ]
    result = {
        "method": config.method.name,
        "accuracy": dict(accuracy),
        "wire_bytes": wire,
        "privacy": {
            "epsilon_x": epsilon,
            "epsilon_y": None,
            "epsilon_model": None,
            "delta": 1e-5,
            "releases": epochs,
        },
        "seconds": 9.25,
        "aligned_rows": 980,
        "train_rows": 1230,
        "test_rows": 410,
        "measured_rows": dict.fromkeys(accuracy, 410),
        "sum": {"scheme": config.secure_sum.scheme, "poly_degree": 4096, "rounding": 3.1e-5},
        "guarantee": "Row-release guarantee, encoder held fixed; no label privacy.",
    }
    roles = {"active": "active"}
    if config.method.has_passives:
        roles |= {f"passive-{at + 1}": "passive" for at in range(passives)}
    if config.method.needs_aggregator:
        roles |= {"aggregator": "aggregator"}
    participants = [{"name": name, "role": role} for name, role in roles.items()]
    files = {
        "contract.json": {
            "document": {"schema_version": 2, "participants": participants},
            "sha256": "ab" * 32,
        },
        "seeds.json": {"run": config.seed},
        "versions.json": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "device": "cpu"},
        "transcript.json": flows,
        "result.json": result,
    }
    if attacks is not None:
        files["attacks.json"] = attacks
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "config.yaml").write_text(dump_settings(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


CONFIG: Config = config_of()


def make_votes_config(**changes: Any) -> Config:
    """A run of votes on digits, with these sections in place of its own."""
    settings: dict[str, Any] = {
        "name": "few-labels",
        "method": {"name": "votes", "prior": "labeller"},
        "data": {"dataset": "digits", "views": 4, "labelled": 60, "limit": 300},
        "model": {"network": "random_features"},
        "train": {"epochs": 1},
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "transcript": {"keep": "none"},
    }
    return Config.model_validate({**settings, **changes})


def make_attack_result(advantage: float, **changed: Any) -> AttackResult:
    """An attack on labels over a baseline of 0.5."""
    settings: dict[str, Any] = {
        "variant": "x",
        "baseline": "y",
        "baselines": {"y": {"balanced_accuracy": 0.5}},
        "score": {"balanced_accuracy": 0.5 + advantage},
        "advantage": advantage,
        **changed,
    }
    return AttackResult(**attack_result(**settings))


def make_finished_run(
    accuracy: float | Mapping[str, float],
    *,
    epsilon: float = math.inf,
    releases: int = 2,
    wire_bytes: int = 1_000_000,
    attacks: Sequence[AttackResult] | None = None,
) -> FinishedRun:
    """A run that reached this."""
    by_inference = accuracy if isinstance(accuracy, Mapping) else {"apfed_c": accuracy}
    privacy = {
        "epsilon_x": epsilon,
        "epsilon_y": math.inf,
        "epsilon_model": math.inf,
        "releases": releases,
    }
    outcome = {
        "method": "apfed_c",
        "accuracy": by_inference,
        "wire_bytes": wire_bytes,
        "privacy": privacy,
        "seconds": 1.0,
    }
    return FinishedRun(
        config=CONFIG,
        outcome=Outcome.model_validate(outcome),
        attacks=None if attacks is None else tuple(attacks),
    )


def own_tables(folder: Path) -> dict[str, Any]:
    """Three parties' CSV files of the same people, and the settings of data that name them."""
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(150, 4)), columns=list("abcd"))
    frame.insert(0, "id", [f"p{row}" for row in range(150)])
    frame["label"] = np.where(frame["a"] + frame["c"] > 0, "yes", "no")
    for name, columns in (("active", "ab"), ("shop", "c"), ("post", "d")):
        more = ["label"] if name == "active" else []
        frame[["id", *columns, *more]].to_csv(folder / f"{name}.csv", index=False)
    parties = {name: {"file": f"{name}.csv"} for name in ("active", "shop", "post")}
    return {"dataset": "tables", "folder": str(folder), "parties": parties}


def check_all_directions(config: Config) -> None:
    """Check that a run names an attack for every direction in which something leaves."""
    attacked = {
        (role, ATTACKS[choice.name].target)
        for choice in expand_choices(config.attacks)
        for role in ATTACKS[choice.name].roles
    }
    for direction, nothing_leaves in list_directions(config).items():
        assert nothing_leaves or (direction.reader, direction.target) in attacked, direction
