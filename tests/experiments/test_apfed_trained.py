"""APFed on trained models: rows held out are not learnt, and the control is what it says."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from apfed_experiments.tables import TABLES
from apfed_experiments.tables.apfed_trained import (
    give_active_view,
    hold_out_training_rows,
    measure_training,
)
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import DataError
from secure_apfed.runs.simulation import begin_simulation, finish_simulation, train_simulation
from secure_apfed.settings.data import DataSettings

HELD_OUT = 40
SETTINGS: dict[str, Any] = {
    "name": "small",
    "method": "apfed_r",
    "data": {"dataset": "digits", "views": 2, "limit": 200},
    "model": {"hidden": [16], "representation": 8, "projection": 8},
    "train": {"epochs": 2, "batch_size": 32, "learning_rate": 0.01},
    "passives": {"default": {"weight": 1.0}},
    "guard": {"mechanism": "none"},
    "secure_sum": {"scheme": "plain", "clip": None, "allow_single_passive": True},
    "rules": {"minimum_spread": 0},
    "transcript": {"keep": "none"},
}


def digits(**settings: Any) -> VerticalData:
    data = {**SETTINGS["data"], **settings}
    return load_data(DataSettings.model_validate(data), seed=3)


def judge_run(*, own_view: bool = False, epochs: int = 2) -> dict[str, float]:
    config = {**SETTINGS, "train": {**SETTINGS["train"], "epochs": epochs}}
    return dict(measure_training(seed=3, config=config, held_out=HELD_OUT, reads_own_view=own_view))


def test_rows_held_out_are_taken_from_those_that_would_be_trained_on() -> None:
    whole = digits()
    data = hold_out_training_rows(whole, HELD_OUT)
    assert len(data.test_rows) == HELD_OUT
    assert torch.equal(torch.cat([data.train_rows, data.test_rows]), whole.train_rows)


@pytest.mark.parametrize("views", [2, 4])
def test_the_control_gives_every_passive_the_actives_columns_of_its_people(views: int) -> None:
    data = digits(views=views)
    control = give_active_view(data)
    place = {person: row for row, person in enumerate(data.active.ids)}
    for before, passive in zip(data.passives, control.passives, strict=True):
        assert passive.ids == before.ids != data.active.ids
        assert not torch.equal(passive.features, before.features)
        rows = [place[person] for person in passive.ids]
        assert torch.equal(passive.features, data.active.features[rows])
        assert passive.encoding == data.active.encoding
    assert control.active is data.active


def test_the_control_is_refused_where_a_passive_has_people_of_its_own() -> None:
    with pytest.raises(DataError, match=r"passive-1: .* set data\.overlap to 1\.0"):
        give_active_view(digits(overlap=0.5))
    give_active_view(digits(overlap=1.0))


@pytest.mark.parametrize("own_view", [False, True], ids=["APFed-R", "active_dec"])
def test_figures_are_those_of_a_run_without_the_rows_held_out(own_view: bool) -> None:
    figures = judge_run(own_view=own_view)
    own = {"seed": 3, "party_seeds": "shared_for_comparison"}
    config = Config.model_validate({**SETTINGS, **own})
    whole = load_data(config.data, seed=3)
    for name, rows in (("test", whole.test_rows), ("held out", whole.train_rows[-HELD_OUT:])):
        data = replace(whole, train_rows=whole.train_rows[:-HELD_OUT], test_rows=rows)
        session = begin_simulation(config, give_active_view(data) if own_view else data)
        (accuracy,) = finish_simulation(session, step=train_simulation(session, config)).values()
        assert figures[name] == pytest.approx(100 * accuracy)


def test_half_way_is_the_end_of_half_the_epochs() -> None:
    assert judge_run(epochs=4)["held out, half-way"] == judge_run(epochs=2)["held out"]


def configs_of(table: str, *, full: bool) -> list[Config]:
    jobs = TABLES[table].make_extent(full).jobs
    return [Config.model_validate(job.settings["config"]) for job in jobs]


def products_of(configs: list[Config]) -> set[float]:
    """Lambda times the rate of all that passives help with."""
    helped = [config for config in configs if config.method.name in ("apfed_r", "apfed_c")]
    return {
        round(config.passives["default"].weight * config.train.learning_rate, 9)
        for config in helped
    }


def test_lambda_times_the_rate_is_the_papers() -> None:
    paper = [
        config
        for config in configs_of("apfed-table2", full=True)
        if config.data.dataset in ("mnist", "fashion_mnist")
    ]
    assert products_of(configs_of("apfed-trained", full=False)) == products_of(paper)
    swept = products_of(configs_of("apfed-lambda", full=True))
    assert products_of(configs_of("apfed-trained", full=True)) == swept


@pytest.mark.parametrize("full", [False, True])
def test_all_methods_have_one_grid_and_one_choice(full: bool) -> None:
    size = TABLES["apfed-trained"].make_extent(full)
    best = [line for line in size.rows if line.candidate_rows]
    batches = set()
    for line in best:
        jobs = [point.job for point in line.candidate_rows if point.job]
        configs = [Config.model_validate(job.settings["config"]) for job in jobs]
        batches.add(frozenset(config.train.batch_size for config in configs))
        assert {job.settings["held_out"] for job in jobs} == {1_000}
        assert line.choosing_value_name == "held out"
        assert {point.value_name for point in line.candidate_rows} == {"test"}
    assert len(best) == 8
    assert len(batches) == 1
