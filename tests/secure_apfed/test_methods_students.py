"""Students of a joint teacher, passives that answer once, and labels spread over h."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import UNLABELLED, ColumnEncoding, PartyTable, VerticalData
from secure_apfed.exchange import Envelope, Kind, TensorSpec, pack, unpack
from secure_apfed.labellers import Spreading
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.distilled import ApcVflActive, ApcVflPassive
from secure_apfed.methods.joint import JointTeacherActive, JointTeacherSettings, TvflPassive
from secure_apfed.runs.run import run
from secure_apfed.solo import BASELINES, SoloTask
from tests.secure_apfed.single_steps import active_of, step_config
from tests.secure_apfed.small_runs import Said, interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

K, TRAIN, TEST, LABELLED = 4, 240, 160, 8


def planted(seed: int = 0) -> VerticalData:
    """The active's features tell the class dimly, the passives' clearly; two labels a class."""
    draw = torch.Generator().manual_seed(seed)
    people = TRAIN + TEST
    labels = torch.arange(people) % K
    names = tuple(f"person {row}" for row in range(people))

    def table(name: str, columns: int, noise: float) -> PartyTable:
        centres = torch.randn(K, columns, generator=draw)
        features = centres[labels] + noise * torch.randn(people, columns, generator=draw)
        encoding = ColumnEncoding.plain(tuple(f"{name}{at}" for at in range(columns)))
        own = labels if name == "active" else None
        return PartyTable(name, names, features, own, encoding)

    tables = [table("active", 12, 1.6), table("passive-1", 6, 0.3), table("passive-2", 5, 0.3)]
    rows = torch.arange(people)
    return VerticalData(
        table=tables[0], passives=tuple(tables[1:]), classes=tuple("abcd"),
        train_rows=rows[:TRAIN], test_rows=rows[TRAIN:], labelled=rows[:LABELLED].clone(),
    )  # fmt: skip


def config_of(method: Said, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "model": {"network": "random_features", "random_features": 60},
        "train": {
            "epochs": 30, "batch_size": 64, "learning_rate": 0.1, "device": "cpu",
            "precision": "float64",
        },
    }  # fmt: skip
    return step_config(method, **{**usual, **changes})


def answering(**changes: Any) -> Config:
    """A method whose passives answer for each row once."""
    model = {"network": "selu", "hidden": [16], "representation": 8}
    return config_of({"name": "apc_vfl", "epochs": 2}, model=model, **changes)


def alone(data: VerticalData) -> float:
    """The best that the active does alone, of what uses its unlabelled rows and what does not."""
    assert data.active.labels is not None
    task = SoloTask.of(
        data.active.features[data.train_rows], np.arange(LABELLED),
        data.active.labels[:LABELLED], classes=K,
    )  # fmt: skip
    x_BF = data.active.features[data.test_rows].double().numpy()
    y_B = data.active.labels[data.test_rows].numpy()
    names = ("ridge", "logistic", "label_spreading", "label_spreading_ridge")
    return max(
        float((BASELINES[name].fit(task).scores(x_BF).argmax(1) == y_B).mean()) for name in names
    )


WAYS: Mapping[str, dict[str, Any]] = {
    "head": {"name": "joint_teacher"},
    "labeller, hard": {"name": "joint_teacher", "labels": "spreading", "form": "hard"},
    "response": {"name": "joint_teacher", "epsilon": 4.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_student_beats_the_active_alone_where_passives_tell_the_class(way: str) -> None:
    gains = []
    for seed in range(2):
        data = planted(seed)
        found = run(config_of(WAYS[way]), None, data=data)
        gains.append(found.accuracy[found.method] - alone(data))
    assert np.mean(gains) > 0.05


class Counted:
    """A course of which only the number of steps is asked."""

    next_step = 100

    def stepped(self, loss: float | None) -> None:
        assert loss is None
        self.next_step += 1


def test_the_teacher_is_the_joint_model_and_its_labels_are_its_probabilities() -> None:
    data = planted()
    config = config_of("joint_teacher")
    session = open_session(config, data)
    model = JointTeacherSettings.of(config).model
    joint = open_session(config_of("tvfl", model=model.model_dump()), data)
    order = session.learner.training_rows
    assert len(order) == LABELLED
    for step in range(5):
        losses = [one.step(step, one.learner.training_rows) for one in (session, joint)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    learner = session.learner
    assert isinstance(learner, JointTeacherActive)
    session.play(learner.conclude(session.links, Counted()))
    trainer = learner.trainer
    parts = [trainer.encoder(trainer.features_N[:TRAIN])]
    for name, table in zip(session.contract.passives, data.passives, strict=True):
        helper = session.helpers[name]
        assert isinstance(helper, TvflPassive)
        parts.append(helper.trainer.encoder(table.features[:TRAIN].double()))
    expected = trainer.head(torch.cat(parts, dim=1)).softmax(1).detach()
    expected[:LABELLED] = torch.eye(K, dtype=torch.float64)[torch.arange(LABELLED) % K]
    targets = learner.student.tensors()["targets"]
    torch.testing.assert_close(targets[:TRAIN], expected, rtol=0, atol=1e-12)
    assert not targets[TRAIN:].any()


@pytest.mark.parametrize(("labels", "again"), [("head", 0), ("logistic", 1)])
def test_every_ask_is_in_the_passives_accounts(labels: str, again: int) -> None:
    data = planted()
    guard = {"mechanism": "gaussian", "epsilon": 8.0}
    config = config_of(
        {"name": "joint_teacher", "labels": labels}, guard=guard,
        train={"epochs": 3, "batch_size": 64, "device": "cpu"},
    )  # fmt: skip
    result = run(config, None, data=data)
    assert result.privacy.releases == 3 + again
    assert result.privacy.epsilon_x == pytest.approx(8.0, rel=1e-3)


def test_a_row_that_is_answered_once_is_released_once_and_takes_no_label_along() -> None:
    guard = {"mechanism": "frozen_gaussian", "epsilon": 8.0}
    result = run(answering(guard=guard), None, data=planted())
    assert result.privacy.releases == 1
    assert result.privacy.epsilon_x == pytest.approx(8.0, rel=1e-3)
    sent = {flow.kind for flow in result.recording.transcript.flows}
    assert not sent & {Kind.GRADIENTS, Kind.LABELS, Kind.CONTRIBUTION, Kind.SUM}


def request(session: Simulation, name: str, rows: list[int], *, step: int) -> Envelope:
    return Envelope(
        session=session.contract.session, step=step, kind=Kind.REQUEST, sender="active",
        receiver=name, sequence=0, payload=pack({"rows": torch.tensor(rows)}),
    )  # fmt: skip


def test_a_row_is_told_once_and_as_often_more_as_agreed() -> None:
    config = answering(rules={"spare_answers": 1}, guard={"mechanism": "none"})
    session = open_session(config, planted())
    helper = session.helpers["passive-1"]
    assert isinstance(helper, ApcVflPassive)
    for step in range(3):
        helper.represent(request(session, "passive-1", [0, 1], step=step))
    with pytest.raises(RemoteProtocolError, match="more than 3 times"):
        helper.represent(request(session, "passive-1", [0, 1], step=3))


@pytest.mark.parametrize(("known", "asked"), [(1, False), (2, True)])
def test_fewer_test_people_than_passives_answer_are_asked_of_nobody(
    known: int, asked: bool
) -> None:
    def without(table: PartyTable) -> PartyTable:
        here = TRAIN + known
        return replace(table, ids=table.ids[:here], features=table.features[:here])

    data = planted()
    data = replace(data, passives=tuple(without(table) for table in data.passives))
    train = {"epochs": 1, "batch_size": 64, "learning_rate": 0.1, "device": "cpu"}
    assert ("apc_vfl_together" in run(answering(train=train), None, data=data).accuracy) is asked


@pytest.mark.parametrize(
    "config", [config_of("joint_teacher"), answering()], ids=["trained", "released"]
)
def test_the_active_refuses_answers_for_other_rows(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(config, planted())
    helper = session.helpers["passive-2"]
    assert isinstance(helper, TvflPassive)
    width = session.contract.passives["passive-2"].representation.shape[0]

    def lie(message: Envelope) -> bytes:
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        rows = unpack(message.payload, expected, sender="active")[0]["rows"]
        return pack({"rows": rows.flip(0), "z": torch.ones(len(rows), width).double()})

    monkeypatch.setattr(helper, "represent", lie)
    learner, course = session.learner, Counted()
    assert isinstance(learner, JointTeacherActive | ApcVflActive)
    ask = learner.conclude if isinstance(learner, JointTeacherActive) else learner.teach
    with pytest.raises(RemoteProtocolError, match="answered for other rows"):
        session.play(ask(session.links, course))


def test_under_strong_randomised_response_the_student_falls_back_to_its_own_labels() -> None:
    data = planted()
    session = open_session(config_of("joint_teacher"), data)
    learner = session.learner
    assert isinstance(learner, JointTeacherActive)
    told = np.eye(K)[np.arange(TRAIN) % K]
    shares = []
    for epsilon in (0.1, 12.0):
        targets = learner.randomised(told, epsilon)
        shares.append(float((targets.argmax(1) == told.argmax(1)).mean()))
        np.testing.assert_allclose(targets.sum(1), 1.0)
    own = Spreading().label(
        learner.student.features_UF, learner.student.labelled, learner.student.labels, K
    )
    assert shares[0] == pytest.approx(float((own.argmax(1) == told.argmax(1)).mean()), abs=0.05)
    assert shares[1] > 0.95


def test_what_a_response_covers_is_said_with_what_it_does_not() -> None:
    session = open_session(config_of({"name": "joint_teacher", "epsilon": 2.0}), planted())
    said = session.learner.guarantee
    assert "epsilon 2, delta 0" in said
    assert "one person without a label" in said
    assert "against the active" in said
    assert "gives nothing" in said
    quiet = open_session(config_of("joint_teacher"), planted()).learner.guarantee
    assert "randomised response" not in quiet


def h_of(session: Simulation) -> Tensor:
    trainer = active_of(session).trainer
    trainer.set_training(False)
    with torch.no_grad():
        return trainer.networks.encoder(trainer.features_N)  # type: ignore[no-any-return] # nn


def test_labels_spread_over_h_are_what_the_head_says() -> None:
    data = planted()
    assert data.active.labels is not None
    shown = data.active.labels.clone()
    shown[LABELLED:TRAIN] = UNLABELLED
    data = replace(data, table=replace(data.active, labels=shown))
    config = config_of(
        "apfed_c", model={"network": "mlp", "hidden": [16], "representation": 8, "dropout": 0.5},
        train={"epochs": 1, "batch_size": 240, "device": "cpu", "precision": "float64",
               "spread_labels": True},
    )  # fmt: skip
    session = open_session(config, data)
    before = [one.clone() for one in active_of(session).trainer.networks.encoder.parameters()]
    session.play(session.learner.conclude(session.links, Counted()))
    h = h_of(session)[:TRAIN]
    said = Spreading().label(h, np.arange(LABELLED), np.arange(LABELLED) % K, K)
    networks = active_of(session).trainer.networks
    assert all(map(torch.equal, networks.encoder.parameters(), before))
    assert isinstance(networks.head, nn.Sequential)
    head = networks.head.eval()
    with torch.no_grad():
        scores, read = head(h).numpy(), head[:-1](h).numpy()
    said[:LABELLED] = np.eye(K)[np.arange(LABELLED) % K]
    reached = said.any(1)
    size = np.sqrt((read**2).sum(1).mean())
    phi = np.hstack([read / size, np.ones((TRAIN, 1))])
    fits = [
        phi
        @ np.linalg.solve(
            phi[reached].T @ phi[reached] + strength * np.eye(phi.shape[1]),
            phi[reached].T @ said[reached],
        )
        for strength in (0.01, 0.1, 1.0, 10.0)
    ]
    assert min(np.abs(scores - fit).max() for fit in fits) < 1e-9


def test_a_spread_head_is_kept_and_comes_back(tmp_path: Path) -> None:
    config = small_config(
        data={"dataset": "breast_cancer", "labelled": 30},
        train={"epochs": 2, "batch_size": 64, "learning_rate": 0.05, "device": "cpu",
               "spread_labels": True},
    )  # fmt: skip
    whole = run(config, tmp_path / "whole")
    train = config.train.model_copy(update={"spread_labels": False})
    plain = run(config.model_copy(update={"train": train}), None)
    assert whole.recording.model is not None
    assert plain.recording.model is not None
    last = [list(one.parameters())[-1] for one in (whole.recording.model, plain.recording.model)]
    assert not torch.equal(*last)
    interrupted(config, tmp_path / "broken", at_step=8)
    resumed = run(config, tmp_path / "broken", resume=True).recording.model
    assert resumed is not None
    assert all(map(torch.equal, resumed.parameters(), whole.recording.model.parameters()))
