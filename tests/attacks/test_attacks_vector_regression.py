"""What is computed of shared singular vectors: every column, and nothing of other tables."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apfed_attacks.interface import AttackResult
from apfed_attacks.recorded import view_of
from apfed_attacks.run import mount, prepare
from apfed_attacks.view import Knowledge
from secure_apfed.config import AttackChoice, Config
from secure_apfed.exchange import Envelope, Kind, pack
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from tests.attacks.test_attacks_null import why_not_zero
from tests.secure_apfed.small_runs import small_config

PARTIES = ("active", "passive-1", "passive-2")


def attack(recording: Recording, seed: int = 0, **options: Any) -> list[AttackResult]:
    choice = AttackChoice(name="vector_regression", options=options)
    return list(mount(recording, [choice], seed=seed))


def decomposed(empty: Recording, *, true: bool, seed: int = 0) -> Recording:
    """Fill a recording in which nothing was sent with vectors of its tables, or of others."""
    draw = np.random.default_rng(seed)
    aligned, data = empty.alignment, empty.data
    rows = torch.isin(aligned["active"], data.train_rows).nonzero().flatten()
    rows = rows[torch.from_numpy(draw.permutation(len(rows)))]
    tables = {one.name: one.features for one in data.tables}
    whole = torch.hstack([tables[name][aligned[name]][rows] for name in PARTIES]).double().numpy()
    if not true:
        whole = draw.normal(size=whole.shape)
    vectors = np.linalg.svd(whole, full_matrices=False)[0]
    empty.transcript.begin_epoch(0)
    asked = Envelope(
        session="planted", step=0, kind=Kind.REQUEST, sender="active", receiver="passive-1",
        sequence=0, payload=pack({"rows": rows}),
    )  # fmt: skip
    empty.transcript.record(asked, 0)
    empty.transcript.keep_opened(0, torch.from_numpy(vectors))
    return replace(empty, config=of_method(empty.config))


def of_method(config: Config) -> Config:
    settings = config.model_dump(mode="json")
    return Config.model_validate(
        settings | {"method": "vfedtrans", "model": {"network": "enriched"}}
    )


@pytest.mark.planted("vector_regression")
def test_every_column_is_a_combination_of_the_vectors(make_recording: Any) -> None:
    recording = decomposed(make_recording("nothing", epochs=0), true=True)
    for result in attack(recording, shadow_rows=30, iterations=50):
        assert result.advantage is not None
        assert result.score["r2"] is not None
        assert result.score["r2"] > 0.999
        assert result.advantage > 0.2


@pytest.mark.null("vector_regression")
def test_vectors_of_other_tables_tell_nothing(make_recording: Any) -> None:
    advantages = []
    for seed in range(8):
        empty = make_recording("nothing", epochs=0, seed=seed)
        recording = decomposed(empty, true=False, seed=seed)
        result = attack(recording, seed, shadow_rows=60, iterations=50)[0]
        assert result.advantage is not None
        advantages.append(result.advantage)
    assert why_not_zero(advantages) is None


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_real_run_is_attacked() -> None:
    model = {"network": "enriched", "hidden": [8], "representation": 30}
    recording = run(small_config("vfedtrans", model=model), None).recording
    for result in attack(recording, shadow_rows=100, iterations=50):
        assert result.role == "active"
        assert result.score["r2"] is not None
        assert result.score["r2"] > 0.99


def test_where_no_table_is_decomposed_or_kept_it_says_so(make_recording: Any) -> None:
    for result in attack(make_recording("labels")):
        assert result.reason is not None
        assert "no table is decomposed" in result.reason
    empty = make_recording("nothing", epochs=0)
    empty = replace(empty, config=of_method(empty.config))
    view = view_of(empty, ["active"], knowledge=Knowledge(classes=3, victim="passive-1"))
    reason = prepare(AttackChoice(name="vector_regression")).applicable(view)
    assert reason is not None
    assert "set transcript.keep" in reason
