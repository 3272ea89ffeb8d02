"""APFed at a public code: nothing told, helped where that helps, and charged once."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apfed_experiments.study import shuffle_passives_rows
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import NoHelpWarning
from secure_apfed.exchange import Kind, Links
from secure_apfed.networks.models import CrossView, Projection
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import alter_message
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
DIGITS = {"dataset": "digits", "views": 4, "labelled": 50, "limit": 900}
FEW_DIGITS = {**DIGITS, "limit": 240}


def config_of(**changes: Any) -> Config:
    usual = {
        "data": FEW_DIGITS,
        "train": {"epochs": 1, "device": "cpu"},
        "model": {"network": "cross_view", "representation": 32, "random_features": 300},
        "passives": {"default": {"allow_reading_all": True}},
    }
    return small_config("apfed_code", **{**usual, **changes})


def record_active(data: VerticalData, config: Config) -> list[tuple[str, Kind, int, bytes]]:
    """Record all that the active sends once the contract is signed, which names fresh keys."""
    sent: list[tuple[str, Kind, int, bytes]] = []
    send = Links.send

    def record_message(self: Links, to: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        if self.me == data.active.name and kind.phase != "agreement":
            sent.append((to, kind, step, payload))
        send(self, to, kind, step, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", record_message)
        run(config, None, data=data)
    return sent


@pytest.mark.slow
def test_what_leaves_the_active_is_the_same_whatever_it_holds() -> None:
    config = config_of(alignment={"protocol": "circuit"})
    data = load_data(config.data, seed=0)
    labels = data.active.labels
    assert labels is not None
    table = replace(data.active, features=data.active.features.flip(0) * 3 + 1, labels=9 - labels)
    other = record_active(replace(data, table=table), config)
    mine = record_active(data, config)
    for said in (mine, other):  # random by itself: blinded IDs, and fresh keys of the sum
        said[:] = [
            (to, kind, step, b"" if kind.phase in ("alignment", "set-up") else payload)
            for to, kind, step, payload in said
        ]
    assert mine == other
    assert {payload for _, kind, _, payload in mine if kind is Kind.REQUEST} != {b""}


def test_it_helps_by_what_the_passives_know_and_says_where_it_does_not() -> None:
    config = config_of(data=DIGITS)
    data = load_data(config.data, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoHelpWarning)
        helped = run(config, None, data=data)
    with pytest.warns(NoHelpWarning, match="help is not used"):
        alone = run(config, None, data=shuffle_passives_rows(data, seed=0))
    assert alone.accuracy["apfed_code"] < helped.accuracy["apfed_code"] - 0.05
    assert (helped.privacy.epsilon_x, helped.privacy.releases) == (math.inf, 0)


def test_noise_under_the_sum_is_charged_once_a_person() -> None:
    sums = {"scheme": "plain", "masks": "pairwise", "clip": 1.0, "noise": {"epsilon": 8.0}}
    result = run(config_of(secure_sum=sums), None)
    assert len(result.contributions) == 3
    assert [spent["releases"] for spent in result.contributions.values()] == [1] * 3
    assert all(7.9 < spent["epsilon"] <= 8.0 for spent in result.contributions.values())
    assert result.privacy.epsilon_x == math.inf, "it counts representations, and none is sent"


@pytest.mark.parametrize("ask", [b"", b"\x00"])
def test_another_question_is_refused(ask: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        alter_message(patch, Kind.REQUEST, lambda _: ask, who="active")
        with pytest.raises(RemoteProtocolError, match="asks passive-1 for something else"):
            run(config_of(), None)


def test_a_projection_keeps_distances_and_its_rows_are_about_one_long() -> None:
    rows_NF = torch.randn(200, 50, generator=torch.Generator().manual_seed(1)) * 7 + 3
    rows_NF[:, 4] = 2.0
    torch.manual_seed(0)
    projection = Projection(50, 400, allow_reading_all=True)
    projection.fit(rows_NF)
    told_ND = projection(rows_NF)
    assert told_ND.square().sum(1).mean() == pytest.approx(0.98, rel=0.05)
    z_NF = (rows_NF.double() - rows_NF.double().mean(0)) / rows_NF.double().std(0, correction=0)
    z_NF[:, 4] = 0
    ratios = torch.pdist(told_ND) / torch.pdist(z_NF) * np.sqrt(50)
    assert ratios.std() < 0.06


def test_a_forecast_that_is_forgotten_moves_nothing() -> None:
    draw = torch.Generator().manual_seed(2)
    rows_NF = torch.randn(60, 5, generator=draw)
    forecast_ND = torch.randn(60, 3, generator=draw)
    encoder = CrossView(5, 3, 20)
    encoder.fit(rows_NF)
    before = encoder(rows_NF)
    assert torch.equal(encoder(rows_NF, forecast_ND), before)
    with torch.no_grad():
        encoder.predictor.weight.add_(1.0)
    encoder.fit_pairs(rows_NF, forecast_ND)
    both_NF = encoder.standardise_rows(torch.cat([rows_NF, forecast_ND], dim=1))
    sizes = [float(part_NF.square().sum(1).mean()) for part_NF in both_NF.split([5, 3], dim=1)]
    assert sizes == pytest.approx([8, 8], rel=0.05)
    assert not torch.equal(encoder(rows_NF), before)
    encoder.reset_prediction(rows_NF)
    assert torch.equal(encoder(rows_NF), before)
