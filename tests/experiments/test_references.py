"""Attacks beside published figures: every seed once, what was published, and the distance."""

import dataclasses
from pathlib import Path

import pytest

from apfed_attacks.run import prepare
from apfed_experiments.references import REFERENCES, Reference, run_reference
from apfed_experiments.study import base_config
from secure_apfed.config import AttackChoice, Config
from secure_apfed.errors import CheckpointError
from secure_apfed.methods import method_settings

SMALL = Reference(
    config="main-digits", seeds=2, variant="logistic on h", metrics=("accuracy", "auc"),
    published={"accuracy": 0.5}, source="nobody", setting="a made-up setting",
)  # fmt: skip


def small(name: str) -> Config:
    base = base_config(name)
    return base.model_copy(
        update={
            "method": method_settings("tvfl"),
            "data": base.data.model_copy(update={"views": 2, "labelled": None, "limit": None}),
            "train": base.train.model_copy(update={"epochs": 2, "evaluate_every": 2}),
            "guard": base.guard.model_copy(update={"mechanism": "none", "epsilon": None}),
            "attacks": (
                AttackChoice(name="model_completion", options={"labels_per_class": 4}),
                AttackChoice(name="semi_supervised", options={"iterations": 2}),
            ),
        }
    )


@pytest.mark.parametrize("name", REFERENCES)
def test_every_reference_ships_its_run_and_names_its_attack(name: str) -> None:
    reference = REFERENCES[name]
    config = base_config(reference.config)
    assert name in {"membership", "model_completion"}
    assert reference.seeds >= 3
    assert set(reference.published) <= set(reference.metrics)
    for choice in config.attacks:
        prepare(choice)


def test_a_table_has_every_score_what_was_published_and_the_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apfed_experiments.references.base_config", small)
    told: list[tuple[int, int]] = []
    table, _ = run_reference(SMALL, tmp_path, on_done=lambda *now: told.append(now))
    assert told == [(1, 2), (2, 2)]
    rows = {row[0]: row[1:] for row in table.cells}
    assert table.header == ("", "accuracy", "auc")
    assert {"attack: logistic on h", "attack: MixMatch on h", "baseline: mlp on x"} <= set(rows)
    assert rows["published: a made-up setting"] == ("0.500", "-")
    ours = next(row for row in table.rows if row["name"] == "attack: logistic on h")["accuracy"]
    assert ours.low < ours.mean < ours.high
    assert 0.1 < ours.mean < 1
    assert rows["logistic on h minus published"] == (f"{ours.mean - 0.5:+.3f}", "-")
    assert (tmp_path / "main-digits.md").read_text().endswith(f". nobody.\n\n{table.markdown()}")
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert len(stamps) == 2
    run_reference(SMALL, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_runs_with_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apfed_experiments.references.base_config", small)
    one = dataclasses.replace(SMALL, seeds=1)
    run_reference(one, tmp_path)
    monkeypatch.setattr(
        "apfed_experiments.references.base_config",
        lambda name: small(name).model_copy(update={"attacks": ()}),
    )
    with pytest.raises(CheckpointError, match="a run with other settings"):
        run_reference(one, tmp_path)
