"""H-FedMV and S-FedMV by parties: weights averaged by rows, of people that nobody shares."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, load_data
from secure_apfed.errors import ModelError
from secure_apfed.exchange import Kind, Links, pack
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.averaging import LinearViews
from secure_apfed.methods.multiview import ViewModel
from secure_apfed.models import SequenceEncoder, encoder_and_head
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.run import run
from secure_apfed.settings.training import ModelSettings
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

CLEAR = {"scheme": "plain", "masks": "none", "clip": None}


def config_of(method: str = "h_fedmv", **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "train": {"epochs": 3, "device": "cpu", "precision": "float64"},
        "secure_sum": CLEAR,
    }
    return small_config(method, **{**usual, **changes})


def session_of(method: str = "h_fedmv", **changes: Any) -> Simulation:
    config = config_of(method, **changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def stages_of(session: Simulation) -> dict[str, Any]:
    """By party with data, its copies of the models."""
    helpers: dict[str, Any] = dict(session.helpers)
    learner: Any = session.learner
    stages = {name: one.stages for name, one in helpers.items() if name != "aggregator"}
    return {learner.name: learner.stages, **stages}


def copied(model: LinearViews) -> LinearViews:
    views = [
        ViewModel(
            x_NF=one.x_NF, beta=one.beta, zeta=one.zeta, weights_FC=one.weights_FC.copy(),
            labels_NC=one.labels_NC.copy(), tolerance=one.tolerance, most_rounds=one.most_rounds,
        )
        for one in model.views
    ]  # fmt: skip
    return LinearViews(views, model._pull, tolerance=model._tolerance, rounds=model._rounds)


def test_a_round_is_the_average_of_all_by_their_rows() -> None:
    config = config_of()
    data = load_data(config.data, seed=0)
    fewer = data.passives[0]
    assert fewer.labels is not None
    part = replace(
        fewer, ids=fewer.ids[:70], features=fewer.features[:70], labels=fewer.labels[:70]
    )
    session = open_session(config, replace(data, passives=(part, *data.passives[1:])))
    stages = stages_of(session)
    models = {name: copied(one.views) for name, one in stages.items()}
    rows = {name: len(model.views[0].x_NF) for name, model in models.items()}
    assert len(set(rows.values())) == 2
    average = models["active"].weights
    for step in range(2):
        session.step(step, session.learner.training_rows)
        for model in models.values():
            model.load(average)
            model.train(step)
        average = np.sum([rows[name] * one.weights for name, one in models.items()], axis=0)
        average /= sum(rows.values())
    np.testing.assert_allclose(stages["active"].at(1).weights, average, atol=1e-12)


def test_parties_apart_whose_features_are_others_do_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of()
    data = load_data(config.data, seed=0)  # of tables at hand this is checked when they are read
    layout = {"passive-1": "1" * 64}
    monkeypatch.setattr(
        PartyTable, "layout", property(lambda self: layout.get(self.name, "0" * 64))
    )
    with pytest.raises(RemoteProtocolError, match=r"passive-1 has other features than active"):
        open_session(config, data)


def test_the_states_of_grus_become_views() -> None:
    session = session_of("s_fedmv")
    stages = stages_of(session)
    for step in range(2):
        session.step(step, session.learner.training_rows)
        assert all(one.views is None for one in stages.values())
    weights = [one.recurrent.weights for one in stages.values()]
    assert not np.array_equal(weights[0], weights[1])
    session.step(2, session.learner.training_rows)
    for one in stages.values():
        assert [view.x_NF.shape[1] for view in one.views.views] == [8, 8, 8]
        np.testing.assert_array_equal(one.recurrent.weights, weights[0])


def asked(session: Simulation, weights_RW: torch.Tensor, step: int = 0) -> None:
    async def ask(links: Links) -> None:
        for name in session.contract.passives:
            links.send(name, Kind.REQUEST, step, pack({"weights": weights_RW}, {}))
        await links.receive("aggregator", Kind.SUM, step=step, patience=4)

    session.play(ask(session.links))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w[1:], "need the same views"),
        (lambda w: w.float(), "expected torch.float64"),
        (lambda w: w * float("nan"), "norm is not within"),
        (lambda w: w + 1e9, "norm is not within"),
    ],
)
def test_hostile_weights_are_refused(change: Any, said: str) -> None:
    session = session_of()
    weights_RW = torch.from_numpy(stages_of(session)["active"].at(0).weights)
    with pytest.raises(RemoteProtocolError, match=said):
        asked(session, change(weights_RW))


def test_a_passive_trains_as_often_as_agreed() -> None:
    session = session_of()
    weights_RW = torch.from_numpy(stages_of(session)["active"].at(0).weights)
    agreed = session.contract.epochs + session.contract.spare_answers
    for step in range(agreed):
        asked(session, weights_RW, step)
    with pytest.raises(RemoteProtocolError, match=f"more than {agreed} times"):
        asked(session, weights_RW, agreed)


def test_weights_that_a_sum_would_cut_are_refused() -> None:
    session = session_of(secure_sum={"scheme": "plain", "masks": "pairwise", "clip": 1e-3})
    with pytest.raises(LocalProtocolError, match="agree on a clip above"):
        session.step(0, session.learner.training_rows)


def test_a_gru_reads_its_steps_and_no_padding() -> None:
    encoder = SequenceEncoder([(3, 2), (2, 1)], 4).double()
    row = torch.tensor([[2.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 1.0, 5.0, 0.0]]).double()
    padded = row.clone()
    padded[0, 5:7], padded[0, 9] = 7.0, 9.0  # behind the last step in use
    assert torch.equal(encoder(row), encoder(padded))
    last = row.clone()
    last[0, 3] = 8.0
    assert not torch.equal(encoder(row), encoder(last))


def test_a_gru_is_told_the_shape_of_its_rows() -> None:
    settings = ModelSettings(network="gru", sequences=((3, 2),))
    with pytest.raises(ModelError, match="model\\.sequences"):
        encoder_and_head(settings, (9,), 2)


@pytest.mark.parametrize("method", ["mmvfl", "h_fedmv"])
def test_a_forecast_counts_rounds_of_all_rows(method: str) -> None:
    config = small_config(method)
    told, sent = forecast(config), run(config, None)
    assert told.steps == config.train.epochs
    assert told.wire_bytes == pytest.approx(sent.wire_bytes, rel=0.1)
