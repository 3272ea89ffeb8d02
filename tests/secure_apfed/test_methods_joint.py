"""TVFL and SplitNN: one autograd graph, fills as the release has them, strict with peers."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.alignment.positions import find_positions_in_table_order
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, Kind, pack_tensors
from secure_apfed.learning.trainers import HeadTrainer, SumTrainer
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.joint import SUBSTITUTES, TvflActive, TvflPassive
from secure_apfed.runs.run import run
from secure_apfed.settings import TrainSettings
from tests.secure_apfed.seats import (
    CLASSES,
    ROWS,
    alter_message,
    clone_tensors,
    descent_of,
    envelope,
    random_data,
    same,
    step_config,
)
from tests.secure_apfed.small_runs import small_config
from tests.secure_apfed.test_methods_apfed import assert_equal

ALIGNED = 34
TRAINED = 28
D = 12
pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
MASKED = {"scheme": "plain", "masks": "pairwise", "clip": 4.0}
CLEAR = {"scheme": "plain", "masks": "none", "clip": None}


def vertical_data(passives: int, *, aligned: int = ALIGNED) -> VerticalData:
    """The passives know the first `aligned` people."""
    known = {f"passive-{index + 1}": range(aligned) for index in range(passives)}
    return random_data(known, strangers=1, train=TRAINED)


def config(**changes: Any) -> Config:
    model = {"network": "mlp", "hidden": [6], "representation": D, "dropout": 0}
    return step_config("tvfl", **{"model": model, **changes})


def open_tvfl(data: VerticalData, settings: Config | None = None) -> Simulation:
    return open_session(settings or config(), data)


def active_of(session: Simulation) -> TvflActive:
    assert isinstance(session.active_role, TvflActive)
    return session.active_role


def passives_of(session: Simulation) -> list[TvflPassive]:
    helpers = [session.helpers[name] for name in session.contract.passives]
    return [helper for helper in helpers if isinstance(helper, TvflPassive)]


def state(session: Simulation) -> dict[str, Tensor]:
    """Return what all parties have learned, without the passives' counts of their answers."""
    every = session.tensors()
    flat = {f"{p}/{key}": v for p, own in every.items() for key, v in own.items()}
    return clone_tensors({name: value for name, value in flat.items() if "/allowance." not in name})


class Monolith:
    def __init__(self, session: Simulation, data: VerticalData, settings: Config) -> None:
        passives = [party.trainer.encoder for party in passives_of(session)]
        self.encoders = nn.ModuleList(
            copy.deepcopy([active_of(session).trainer.encoder, *passives])
        )
        self.head = copy.deepcopy(active_of(session).trainer.head)
        train = settings.train
        self.sgd = torch.optim.SGD(
            [*self.encoders.parameters(), *self.head.parameters()],
            lr=train.learning_rate,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
        )
        self.data = data

    def scores(self, people: list[int]) -> Tensor:
        tables = self.data.tables
        parts = []
        for encoder, table in zip(self.encoders, tables, strict=True):
            own = [table.ids.index(self.data.active.ids[person]) for person in people]
            parts.append(encoder(table.features[own].double()))
        scores: Tensor = self.head(torch.cat(parts, dim=1))
        return scores

    def step(self, people: list[int]) -> float:
        assert self.data.active.labels is not None
        self.sgd.zero_grad()
        loss = F.cross_entropy(self.scores(people), self.data.active.labels[people])
        loss.backward()
        self.sgd.step()
        return loss.item()


@pytest.mark.parametrize("passives", [1, 3])
def test_steps_equal_one_autograd_graph(passives: int) -> None:
    data = vertical_data(passives)
    settings = config()
    session = open_tvfl(data, settings)
    monolith = Monolith(session, data, settings)
    assert len(session.active_role.training_rows) == TRAINED
    for step, rows_B in enumerate(session.active_role.training_rows.split(10)):
        people = session.alignment["active"][rows_B].tolist()
        loss = session.train_step(step, rows_B)
        assert loss == pytest.approx(monolith.step(people), abs=1e-10)
        own = active_of(session).trainer
        encoders = [own.encoder, *(party.trainer.encoder for party in passives_of(session))]
        for mine, other in zip(encoders, monolith.encoders, strict=True):
            assert_equal(mine, other)
        assert_equal(own.head, monolith.head)


def test_the_full_inference_is_that_of_all_parties() -> None:
    data = vertical_data(2)
    session = open_tvfl(data)
    session.train_step(0, session.active_role.training_rows[:10])
    monolith = Monolith(session, data, config())
    people = list(range(TRAINED, ALIGNED))
    right = monolith.scores(people).argmax(1) == torch.tensor(people) % CLASSES
    accuracies = session.evaluate(next_step=1, is_final=True)
    assert accuracies["tvfl"] == pytest.approx(right.double().mean().item())
    assert list(accuracies) == ["tvfl", *SUBSTITUTES, "tvfl_alone"]
    assert list(session.evaluate(next_step=9, is_final=False)) == list(SUBSTITUTES)


def test_fills_take_the_place_of_the_passives() -> None:
    session = open_tvfl(vertical_data(2))
    seen = list[Tensor]()
    trainer = active_of(session).trainer
    trainer.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    session.evaluate(next_step=0, is_final=False)
    own = trainer.encoder(trainer.features_N[TRAINED:]).detach()
    rests = dict(zip(SUBSTITUTES, (read[:, D:] for read in seen), strict=True))
    assert all(torch.equal(read[:, :D], own) for read in seen)
    assert {rest.shape for rest in rests.values()} == {(ROWS - TRAINED, 2 * D)}
    assert not rests["tvfl_0"].any()
    torch.testing.assert_close(rests["tvfl_a"], own.mean().expand_as(rests["tvfl_a"]))
    drawn = rests["tvfl_r"]
    low = own.min()
    high = own.max()
    assert low <= drawn.min() < drawn.max() <= high
    assert len(drawn.unique()) == drawn.numel() == 288
    # The mean's deviation is (high - low) / sqrt(12 * 288), a sixtieth.
    assert abs(drawn.mean() - (low + high) / 2) < (high - low) / 12
    assert abs(drawn.std() - (high - low) / 12**0.5) < (high - low) / 15


@pytest.mark.slow
def test_evaluation_changes_no_parameter_and_no_later_step() -> None:
    data = vertical_data(2)
    settings = config(model={"network": "mlp", "hidden": [6], "representation": D, "dropout": 0.5})
    session = open_tvfl(data, settings)
    undisturbed = open_tvfl(data, settings)
    for one in (session, undisturbed):
        one.train_step(0, one.active_role.training_rows[:10])
    before = state(session)
    generator = torch.get_rng_state()
    first = session.evaluate(next_step=1, is_final=True)
    assert same(state(session), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert session.evaluate(next_step=50, is_final=True) == first
    assert active_of(session).trainer.encoder.training
    assert active_of(session).trainer.head.training
    for one in (session, undisturbed):
        one.train_step(100, one.active_role.training_rows[10:20])
    assert same(state(session), state(undisturbed))


def test_every_network_is_evaluated_without_dropout() -> None:
    session = open_tvfl(vertical_data(2))
    modes: list[bool] = []
    encoders = [party.trainer.encoder for party in passives_of(session)]
    for module in (active_of(session).trainer.encoder, active_of(session).trainer.head, *encoders):
        module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    session.evaluate(next_step=0, is_final=True)
    assert len(modes) == 4 * 2 + 2  # each fill and the full inference; passives in the latter only
    assert not any(modes)
    session.train_step(50, session.active_role.training_rows[:10])
    assert modes[-4:] == [True] * 4


def test_without_aligned_test_rows_the_full_inference_asks_nobody() -> None:
    session = open_tvfl(vertical_data(2, aligned=20))
    people = session.alignment["active"][session.active_role.training_rows]
    assert sorted(people.tolist()) == list(range(20)), "nobody else is trained on"
    before = session.transcript.wire_bytes
    accuracies = session.evaluate(next_step=0, is_final=True)
    assert accuracies["tvfl"] != accuracies["tvfl"]  # NaN
    assert 0 <= accuracies["tvfl_0"] <= 1
    assert session.transcript.wire_bytes == before


def envelope_of(session: Simulation, kind: Kind, payload: bytes, **changes: Any) -> Envelope:
    usual = {"session": session.contract.session, "receiver": "passive-1"}
    return envelope(payload, kind=kind, **{**usual, **changes})


class Asked:
    """A passive that has answered one request for training, and waits for its gradient."""

    def __init__(self, *, is_training: bool = True) -> None:
        self.session = open_tvfl(vertical_data(2))
        self.passive = passives_of(self.session)[0]
        self.answer = self.passive.represent(
            self.request(torch.arange(4), step=3, learn=is_training)
        )
        self.before = clone_tensors(descent_of(self.passive.tensors()))

    def request(self, rows: Tensor, *, step: int, learn: object = True) -> Envelope:
        payload = pack_tensors({"rows": rows}, {"learn": learn})
        return envelope_of(self.session, Kind.REQUEST, payload, step=step)

    def gradient(self, values: Tensor, *, step: int = 3) -> Envelope:
        payload = pack_tensors({"gradient": values})
        return envelope_of(self.session, Kind.GRADIENTS, payload, step=step)

    def refuses(self, envelope: Envelope, message: str) -> None:
        with pytest.raises(RemoteProtocolError, match=message):
            self.passive.apply_gradient(envelope)
        assert same(descent_of(self.passive.tensors()), self.before)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(4, D + 1), "sent 'gradient'"),
        (torch.ones(4, D, dtype=torch.float32), r"torch\.float32"),
        (torch.full((4, D), float("nan")), "not finite"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(values: Tensor, message: str) -> None:
    asked = Asked()
    asked.refuses(asked.gradient(values.double() if "32" not in message else values), message)
    asked.passive.apply_gradient(asked.gradient(torch.ones(4, D).double()))
    assert not same(asked.passive.tensors(), asked.before)


def test_a_gradient_is_taken_once_of_its_step_and_where_one_is_due() -> None:
    gradient = torch.ones(4, D).double()
    asked = Asked()
    for step in (2, 4):
        asked.refuses(asked.gradient(gradient, step=step), "waits for none")
    asked.passive.apply_gradient(asked.gradient(gradient))
    asked.before = clone_tensors(descent_of(asked.passive.tensors()))
    asked.refuses(asked.gradient(gradient), "waits for none")
    asked = Asked(is_training=False)
    asked.refuses(asked.gradient(gradient), "waits for none")


def test_after_a_release_that_failed_no_gradient_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    refuse = Mock(side_effect=OverflowError("spent"))
    monkeypatch.setattr(asked.passive.ledgers["passive-1"], "charge", refuse)
    with pytest.raises(OverflowError, match="spent"):
        asked.passive.represent(asked.request(torch.arange(4), step=4))
    asked.refuses(asked.gradient(torch.ones(4, D).double(), step=4), "waits for none")


@pytest.mark.parametrize(
    ("rows", "step", "message"),
    [
        ([1], 4, "at least 2"),
        ([0, ALIGNED], 4, "outside the alignment"),
        ([0, 1], 3, "after step 3"),
        ([0, 1], 0, "after step 3"),
    ],
)
def test_a_request_outside_the_rules_is_refused(rows: list[int], step: int, message: str) -> None:
    asked = Asked()
    releases = asked.passive.ledgers["passive-1"].get_privacy_spent().releases
    with pytest.raises(RemoteProtocolError, match=message):
        asked.passive.represent(asked.request(torch.tensor(rows, dtype=torch.int64), step=step))
    assert asked.passive.ledgers["passive-1"].get_privacy_spent().releases == releases
    asked.passive.apply_gradient(asked.gradient(torch.ones(4, D).double()))  # still due


@pytest.mark.parametrize("learn", ["yes", 1, None])
def test_only_a_plain_true_asks_to_learn(learn: object) -> None:
    asked = Asked()
    asked.passive.represent(asked.request(torch.arange(3), step=4, learn=learn))
    assert not asked.passive.trainer.encoder.training
    asked.refuses(asked.gradient(torch.ones(3, D).double(), step=4), "waits for none")


def answers(session: Simulation, rows: Tensor) -> list[Envelope]:
    request = active_of(session).pack_request(rows)
    return [
        envelope_of(
            session,
            Kind.REPRESENTATIONS,
            sender=party.name,
            receiver="active",
            payload=party.represent(
                envelope_of(session, Kind.REQUEST, request, receiver=party.name)
            ),
        )
        for party in passives_of(session)
    ]


def test_answers_that_are_missing_doubled_or_swapped_are_refused() -> None:
    session = open_tvfl(vertical_data(2))
    rows = torch.arange(4)
    before = clone_tensors(active_of(session).tensors())
    one, other = answers(session, rows)
    for wrong in ([], [one], [one, one], [one, other, one]):
        with pytest.raises(RemoteProtocolError, match="one answer of each of passive-1, passive-2"):
            active_of(session).parse_answers(rows, wrong)
    with pytest.raises(RemoteProtocolError, match="answered for other rows than asked"):
        active_of(session).parse_answers(rows.flip(0), [one, other])
    assert same(active_of(session).tensors(), before)


# SplitNN, merged by a secure sum: one network on all columns, of which nobody shows any.


def config_of(method: str = "split_nn_sum", **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "digits", "views": 4, "limit": 300},
        "model": {"network": "mlp", "hidden": [16], "representation": 8, "dropout": 0.0},
        "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.1, "device": "cpu"},
        "guard": {"mechanism": "none"},
        "secure_sum": MASKED,
    }
    return small_config(method, **{**usual, **changes})


def session_of(**changes: Any) -> Simulation:
    config = config_of(**changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def test_it_is_one_network_on_the_concatenated_table() -> None:
    """To 1e-10: linear encoders that are added are one linear layer on all columns."""
    config = config_of(
        model={"network": "linear", "representation": 8},
        secure_sum=CLEAR,
        train={
            "epochs": 2,
            "batch_size": 64,
            "learning_rate": 0.1,
            "device": "cpu",
            "precision": "float64",
        },
    )
    data = load_data(config.data, seed=0)
    session = open_session(config, data)
    learner: Any = session.active_role
    trainer = learner.trainer
    helpers = list(session.helpers.values())
    passives: Any = [one for one in helpers if one.name != "aggregator"]
    encoders = [trainer.encoder, *(one.trainer.encoder for one in passives)]
    layers: Any = [list(one.modules())[-1] for one in encoders]
    joined = nn.Linear(sum(one.in_features for one in layers), 8).double()
    with torch.no_grad():
        joined.weight.copy_(torch.cat([one.weight for one in layers], dim=1))
        joined.bias.copy_(sum(one.bias for one in layers))
    head = nn.Sequential(nn.Flatten(), nn.Linear(8, 10)).double()
    head.load_state_dict(trainer.head.state_dict())
    features = [trainer.features_N[learner._own_row_by_position]]
    features += [one.trainer.features_N for one in passives]
    x_UF = torch.cat([part.flatten(1) for part in features], dim=1)
    labels_U = trainer.labels_N[learner._own_row_by_position]
    sgd = torch.optim.SGD(
        [*joined.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-4
    )
    for step, rows_B in enumerate(learner.training_rows.split(64)):
        session.train_step(step, rows_B)
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
    own_row_by_position = session.active_role._own_row_by_position  # type: ignore[attr-defined]
    rows_B = find_positions_in_table_order(own_row_by_position, torch.arange(5))
    alter_message(
        monkeypatch, Kind.REQUEST, lambda _: pack_tensors({"rows": rows_B}, {"learn": True})
    )
    with pytest.raises(RemoteProtocolError):
        session.train_step(0, session.active_role.training_rows[:64])


def test_noise_under_the_sum_is_charged() -> None:
    config = config_of(secure_sum={**MASKED, "noise": {"epsilon": 8.0}})
    result = run(config, None)
    spent = {one["epsilon"] for one in result.contributions.values()}
    assert all(7.0 < epsilon <= 8.0 for epsilon in spent)


def test_representations_of_other_sizes_are_refused() -> None:
    other = {"network": "mlp", "hidden": [16], "representation": 9, "dropout": 0.0}
    with pytest.raises(ConfigError, match="all have as many numbers"):
        session_of(passives={"default": {"model": other}})


def test_the_head_of_selu_networks_has_the_layers_that_were_asked_for() -> None:
    """As APC-VFL compares itself with SplitNN: its joint encoder, and a layer for the classes."""
    session = open_session(
        config := config_of(
            "split_nn",
            model={
                "network": "selu",
                "hidden": [16],
                "representation": 8,
                "head": [12, 6],
            },
        ),
        load_data(config.data, seed=0),
    )
    learner: Any = session.active_role
    layers = [one for one in learner.trainer.head if isinstance(one, nn.Linear)]
    assert [one.out_features for one in layers] == [12, 6, 10]
    assert layers[0].in_features == 4 * 8
    assert not isinstance(learner.trainer.head[-1], nn.SELU)


@pytest.mark.parametrize("kind", [HeadTrainer, SumTrainer])
def test_class_weights_scale_the_gradients_that_passives_get(kind: type[HeadTrainer]) -> None:
    draw = torch.Generator().manual_seed(0)
    rows_NF = torch.randn(10, 3, generator=draw)
    labels_N = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    others_BD = torch.randn(5, 2, generator=draw)
    width = 2 if kind is SumTrainer else 4
    encoder = nn.Linear(3, 2)
    head = nn.Linear(width, 2)
    own_BD = encoder(rows_NF[:5]).detach()
    read_BD = own_BD + others_BD if kind is SumTrainer else torch.cat([own_BD, others_BD], 1)
    scores_BK = read_BD @ head.weight.detach().T + head.bias.detach()
    errors_BK = scores_BK.softmax(1) - nn.functional.one_hot(labels_N[:5], 2)
    weights_K = torch.tensor([10 / (2 * 2), 10 / (2 * 8)])  # as scikit-learn's "balanced"
    expected_BD = weights_K[labels_N[:5], None] * errors_BK @ head.weight.detach()[:, -2:] / 5
    trainer = kind(
        "clinic",
        encoder,
        head,
        features_N=rows_NF,
        labels_N=labels_N,
        passives=("lab",),
        train=TrainSettings(class_weights="balanced", device="cpu"),
        seed=0,
    )
    trainer.weigh_classes(torch.arange(10), 2)
    _, gradients = trainer.train_on_representations(0, torch.arange(5), {"lab": others_BD})
    torch.testing.assert_close(gradients["lab"], expected_BD)


@pytest.mark.parametrize("method", ["tvfl", "split_nn", "split_nn_sum"])
def test_joint_training_weighs_classes_by_the_rows_that_it_learns(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed = []
    weigh = HeadTrainer.weigh_classes

    def note(self: HeadTrainer, rows: torch.Tensor, classes: int) -> None:
        weigh(self, rows, classes)
        weighed.append((len(rows), self._weights_K))

    monkeypatch.setattr(HeadTrainer, "weigh_classes", note)
    train = {"class_weights": "balanced", "epochs": 1, "batch_size": 64, "device": "cpu"}
    run(small_config(method, train=train), None)
    ((rows, weights_K),) = weighed
    assert rows > 0
    assert weights_K is not None
    assert weights_K[0] != weights_K[1]
