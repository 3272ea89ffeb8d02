"""SplitNN, merged by a secure sum: one network on all columns, of which nobody shows any."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind, pack
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.alignment import positions_of
from secure_apfed.runs.run import run
from tests.secure_apfed.meddling import altered
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

MASKED = {"scheme": "plain", "masks": "pairwise", "clip": 4.0}
CLEAR = {"scheme": "plain", "masks": "none", "clip": None}


def config_of(method: str = "split_nn_sum", **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "digits", "views": 4, "limit": 300},
        "model": {"network": "mlp", "hidden": [16], "representation": 8, "dropout": 0.0},
        "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.1, "device": "cpu"},
        "guard": {"mechanism": "none"}, "secure_sum": MASKED,
    }  # fmt: skip
    return small_config(method, **{**usual, **changes})


def session_of(**changes: Any) -> Simulation:
    config = config_of(**changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def test_it_is_one_network_on_the_concatenated_table() -> None:
    """To 1e-10: linear encoders that are added are one linear layer on all columns."""
    config = config_of(
        model={"network": "linear", "representation": 8}, secure_sum=CLEAR,
        train={"epochs": 2, "batch_size": 64, "learning_rate": 0.1, "device": "cpu",
               "precision": "float64"},
    )  # fmt: skip
    data = load_data(config.data, seed=0)
    session = open_session(config, data)
    learner: Any = session.learner
    trainer, helpers = learner.trainer, list(session.helpers.values())
    passives: Any = [one for one in helpers if one.name != "aggregator"]
    encoders = [trainer.encoder, *(one.trainer.encoder for one in passives)]
    layers: Any = [list(one.modules())[-1] for one in encoders]
    joined = nn.Linear(sum(one.in_features for one in layers), 8).double()
    with torch.no_grad():
        joined.weight.copy_(torch.cat([one.weight for one in layers], dim=1))
        joined.bias.copy_(sum(one.bias for one in layers))
    head = nn.Sequential(nn.Flatten(), nn.Linear(8, 10)).double()
    head.load_state_dict(trainer.head.state_dict())
    features = [trainer.features_N[learner._aligned]]
    features += [one.trainer.features_N for one in passives]
    x_UF = torch.cat([part.flatten(1) for part in features], dim=1)
    labels_U = trainer.labels_N[learner._aligned]
    sgd = torch.optim.SGD(
        [*joined.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-4
    )
    for step, rows_B in enumerate(learner.training_rows.split(64)):
        session.step(step, rows_B)
        sgd.zero_grad()
        # Every party's bias takes the gradient of the sum's: together they move as one, so many
        # times faster, and weight decay is of each alone. Without biases it is one network.
        F.cross_entropy(head(joined(x_UF[rows_B])), labels_U[rows_B]).backward()
        assert joined.bias.grad is not None
        joined.bias.grad *= len(layers)
        sgd.step()
    ours = torch.cat([one.weight for one in layers], dim=1)
    assert (ours - joined.weight).abs().max() < 1e-10
    assert (sum(one.bias for one in layers) - joined.bias).abs().max() < 1e-10


def test_another_request_to_one_passive_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    rows_B = positions_of(session.learner._aligned, torch.arange(5))  # type: ignore[attr-defined]
    altered(monkeypatch, Kind.REQUEST, lambda _: pack({"rows": rows_B}, {"learn": True}))
    with pytest.raises(RemoteProtocolError):
        session.step(0, session.learner.training_rows[:64])


def test_noise_under_the_sum_is_charged() -> None:
    config = config_of(secure_sum={**MASKED, "noise": {"epsilon": 8.0}})
    result = run(config, None)
    spent = {one["epsilon"] for one in result.contributions.values()}
    assert all(7.0 < epsilon <= 8.0 for epsilon in spent)


def test_representations_of_other_sizes_are_refused() -> None:
    other = {"network": "mlp", "hidden": [16], "representation": 9, "dropout": 0.0}
    with pytest.raises(ConfigError, match="all have as many numbers"):
        session_of(passives={"default": {"model": other}})


def test_concatenated_it_predicts_with_all_parties() -> None:
    result = run(config_of("split_nn", secure_sum=CLEAR), None)
    assert set(result.accuracy) == {"split_nn"}


def test_the_head_of_selu_networks_has_the_layers_that_were_asked_for() -> None:
    """As APC-VFL compares itself with SplitNN: its joint encoder, and a layer for the classes."""
    session = open_session(
        config := config_of("split_nn", model={
            "network": "selu", "hidden": [16], "representation": 8, "head": [12, 6],
        }), load_data(config.data, seed=0),
    )  # fmt: skip
    learner: Any = session.learner
    layers = [one for one in learner.trainer.head if isinstance(one, nn.Linear)]
    assert [one.out_features for one in layers] == [12, 6, 10]
    assert layers[0].in_features == 4 * 8
    assert not isinstance(learner.trainer.head[-1], nn.SELU)
