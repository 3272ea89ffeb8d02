"""Students of a joint teacher, of shared vectors and of codes; autoencoders and their judges."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import UNLABELLED, ColumnEncoding, PartyTable, VerticalData, load_data
from secure_apfed.errors import ConfigError, ModelError, NoHelpWarning
from secure_apfed.exchange import Envelope, Kind, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.labellers import Spreading
from secure_apfed.learning import autoencoder
from secure_apfed.learning.descent import ActiveNetworks, Compute
from secure_apfed.methods import Simulation, local_models, open_session
from secure_apfed.methods.alignment import DEALER
from secure_apfed.methods.distilled import ApcVflActive, ApcVflPassive, fit_classifier
from secure_apfed.methods.joint_teacher import TeacherActive, TeacherSettings
from secure_apfed.methods.student import StudentActive, standardise_parts
from secure_apfed.networks.models import family_for, output_shape
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.run import run
from secure_apfed.settings import ModelSettings
from tests.secure_apfed.seats import active_of, envelope, step_config
from tests.secure_apfed.small_runs import interrupt_run, read_stderr, run_as_json, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
K = 4
TRAIN = 240
TEST = 160
LABELLED = 8
SETTINGS = autoencoder.DistillationSettings(epochs=40, batch_size=16, learning_rate=3e-3)
MODEL = ModelSettings(network="selu", hidden=(16,), representation=8)


def plant_classes(seed: int = 0) -> VerticalData:
    """Make data whose passives' features tell the class better than the active's."""
    draw = torch.Generator().manual_seed(seed)
    people = TRAIN + TEST
    labels = torch.arange(people) % K
    names = tuple(f"person {row}" for row in range(people))

    def table(name: str, columns: int, noise: float) -> PartyTable:
        centres = torch.randn(K, columns, generator=draw)
        features = centres[labels] + noise * torch.randn(people, columns, generator=draw)
        encoding = ColumnEncoding.for_numeric_columns(tuple(f"{name}{at}" for at in range(columns)))
        own = labels if name == "active" else None
        return PartyTable(name, names, features, own, encoding)

    tables = [table("active", 12, 1.6), table("passive-1", 6, 0.3), table("passive-2", 5, 0.3)]
    rows = torch.arange(people)
    return VerticalData(
        table=tables[0],
        passives=tuple(tables[1:]),
        classes=tuple("abcd"),
        train_rows=rows[:TRAIN],
        test_rows=rows[TRAIN:],
        labelled=rows[:LABELLED].clone(),
    )


config_of = partial(
    step_config,
    model={"network": "random_features", "random_features": 60},
    train={
        "epochs": 30,
        "batch_size": 64,
        "learning_rate": 0.1,
        "device": "cpu",
        "precision": "float64",
    },
)
answering = partial(
    config_of,
    {"name": "apc_vfl", "epochs": 2},
    model={"network": "selu", "hidden": [16], "representation": 8},
)


class Counted:
    """A training loop of which only the number of steps is asked."""

    def __init__(self) -> None:
        self.next_step = 100
        self.losses = list[float | Tensor | None]()

    def count_step(self, loss: float | Tensor | None) -> None:
        self.losses.append(loss)
        self.next_step += 1


@pytest.mark.parametrize("labels", ["head", "spreading"])
def test_the_teacher_is_the_joint_model_and_labels_by_what_its_head_reads(labels: str) -> None:
    data = plant_classes()
    summed = partial(
        config_of,
        guard={"mechanism": "none"},
        secure_sum={"masks": "pairwise", "scheme": "plain", "clip": 64.0, "bits": 24},
    )
    config = summed({"name": "joint_teacher_sum", "labels": labels})
    model = TeacherSettings.from_run_settings(config).model
    session = open_session(config, data)
    joint = open_session(summed("split_nn_sum", model=model.model_dump()), data)
    assert len(session.active_role.training_rows) == LABELLED
    for step in range(5):
        losses = [one.train_step(step, one.active_role.training_rows) for one in (session, joint)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    learner = session.active_role
    loop = Counted()
    assert isinstance(learner, TeacherActive)
    session.run_script(learner.finish_training(session.links, loop))
    assert set(loop.losses) == {None}
    read = learner.trainer.encoder(learner.trainer.features_N[:TRAIN])
    for name, table in zip(session.contract.passives, data.passives, strict=True):
        encoder = session.helpers[name].prediction_networks["encoder"]
        read = read + encoder(table.features[:TRAIN].double())
    expected = learner.trainer.head(read).softmax(1).detach()
    if labels == "spreading":
        known = np.arange(LABELLED)
        expected = torch.from_numpy(
            Spreading().label_rows(standardise_parts([read]), known, known % K, K)
        )
    expected[:LABELLED] = torch.eye(K, dtype=torch.float64)[torch.arange(LABELLED) % K]
    targets = learner.student.tensors()["targets"]
    torch.testing.assert_close(targets[:TRAIN], expected, rtol=0, atol=2e-3)
    assert not targets[TRAIN:].any()


def test_a_teacher_of_sums_shows_no_representation_and_is_charged_its_noise() -> None:
    sums = {"masks": "pairwise", "scheme": "plain", "noise": {"epsilon": 8.0}}
    said = {"name": "joint_teacher_sum", "labels": "logistic"}
    config = config_of(said, secure_sum=sums, guard={"mechanism": "none"})
    result = run(config, None, data=plant_classes())
    kinds = {flow.kind for flow in result.recording.transcript.flows}
    assert Kind.REPRESENTATIONS not in kinds
    assert kinds >= {Kind.CONTRIBUTION, Kind.SUM}
    spent = {one["epsilon"] for one in result.contributions.values()}
    assert all(7.0 < epsilon <= 8.0 for epsilon in spent)
    assert {"joint_teacher_sum", "joint_teacher_sum_together"} == set(result.accuracy)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("said", "again"),
    [
        ({}, 0),
        ({"epsilon": 4.0}, 0),
        ({"labels": "logistic"}, 1),
        ({"labels": "spreading", "form": "hard"}, 1),
    ],
)
def test_every_ask_is_in_the_passives_accounts(said: dict[str, Any], again: int) -> None:
    config = config_of(
        {"name": "joint_teacher_sum", **said},
        secure_sum={"masks": "pairwise", "scheme": "plain", "noise": {"epsilon": 8.0}},
        train={"epochs": 3, "batch_size": 64, "device": "cpu"},
    )
    result = run(config, None, data=plant_classes())
    accounts = [*result.contributions.values()]
    assert {account["releases"] for account in accounts} == {3 + again}
    spent = [account["epsilon"] for account in accounts]
    assert spent == pytest.approx([8.0] * len(accounts), rel=1e-3)


def test_a_row_that_is_answered_once_is_released_once_and_takes_no_label_along() -> None:
    guard = {"mechanism": "frozen_gaussian", "epsilon": 8.0}
    result = run(answering(guard=guard), None, data=plant_classes())
    assert result.privacy.releases == 1
    assert result.privacy.epsilon_x == pytest.approx(8.0, rel=1e-3)
    sent = {flow.kind for flow in result.recording.transcript.flows}
    assert not sent & {Kind.GRADIENTS, Kind.LABELS, Kind.CONTRIBUTION, Kind.SUM}


def test_a_row_is_told_once_and_as_often_more_as_agreed() -> None:
    config = answering(rules={"spare_answers": 1}, guard={"mechanism": "none"})
    session = open_session(config, plant_classes())
    helper = session.helpers["passive-1"]
    assert isinstance(helper, ApcVflPassive)
    rows = pack_tensors({"rows": torch.tensor([0, 1])})
    here = session.contract.session
    asked = [envelope(rows, kind=Kind.REQUEST, step=step, session=here) for step in range(4)]
    for message in asked[:3]:
        helper.represent(message)
    with pytest.raises(RemoteProtocolError, match="more than 3 times"):
        helper.represent(asked[3])


@pytest.mark.parametrize(("known", "asked"), [(1, False), (2, True)])
def test_fewer_test_people_than_are_answered_are_asked_of_nobody(known: int, asked: bool) -> None:
    def keep_first_rows(table: PartyTable) -> PartyTable:
        here = TRAIN + known
        return replace(table, ids=table.ids[:here], features=table.features[:here])

    data = plant_classes()
    data = replace(data, passives=tuple(keep_first_rows(table) for table in data.passives))
    train = {"epochs": 1, "batch_size": 64, "learning_rate": 0.1, "device": "cpu"}
    assert ("apc_vfl_together" in run(answering(train=train), None, data=data).accuracy) is asked


def test_answers_for_other_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(answering(), plant_classes())
    helper = session.helpers["passive-2"]
    assert isinstance(helper, ApcVflPassive)
    width = session.contract.passives["passive-2"].representation.shape[0]

    def lie(message: Envelope) -> bytes:
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        rows = unpack_tensors(message.payload, expected, sender="active")[0]["rows"]
        return pack_tensors({"rows": rows.flip(0), "z": torch.ones(len(rows), width).double()})

    monkeypatch.setattr(helper, "represent", lie)
    learner = session.active_role
    assert isinstance(learner, ApcVflActive)
    with pytest.raises(RemoteProtocolError, match="answered for other rows"):
        session.run_script(learner.teach_student(session.links, Counted()))


def test_under_strong_randomised_response_the_student_falls_back_to_its_own_labels() -> None:
    data = plant_classes()
    session = open_session(config_of("joint_teacher_sum"), data)
    learner = session.active_role
    assert isinstance(learner, TeacherActive)
    told = np.eye(K)[np.arange(TRAIN) % K]
    shares = []
    sums = []
    for epsilon in (0.1, 12.0):
        targets = learner.randomise_labels(told, epsilon)
        shares.append(float((targets.argmax(1) == told.argmax(1)).mean()))
        sums.append(targets.sum(1))
    np.testing.assert_allclose(sums, 1.0)
    own = Spreading().label_rows(
        learner.student.features_UF, learner.student.labelled_n, learner.student.labels_n, K
    )
    assert shares[0] == pytest.approx(float((own.argmax(1) == told.argmax(1)).mean()), abs=0.05)
    assert shares[1] > 0.95
    said = open_session(
        config_of({"name": "joint_teacher_sum", "epsilon": 2.0}), data
    ).active_role.guarantee
    parts = (
        "epsilon 2, delta 0",
        "person without a label",
        "against the active",
        "gives nothing",
    )
    assert not [part for part in parts if part not in said]
    assert "randomised response" not in learner.guarantee


def test_labels_spread_over_h_are_what_the_head_says() -> None:
    data = plant_classes()
    assert data.active.labels is not None
    shown = data.active.labels.clone()
    shown[LABELLED:TRAIN] = UNLABELLED
    data = replace(data, table=replace(data.active, labels=shown))
    config = config_of(
        "apfed_c",
        model={"network": "mlp", "hidden": [16], "representation": 8, "dropout": 0.5},
        train={
            "epochs": 1,
            "batch_size": 240,
            "device": "cpu",
            "precision": "float64",
            "spread_labels": True,
        },
    )
    session = open_session(config, data)
    before = [one.clone() for one in active_of(session).trainer.networks.encoder.parameters()]
    session.run_script(session.active_role.finish_training(session.links, Counted()))
    trainer = active_of(session).trainer
    trainer.set_training(False)
    with torch.no_grad():
        h = trainer.networks.encoder(trainer.features_N)[:TRAIN]
    said = Spreading().label_rows(h, np.arange(LABELLED), np.arange(LABELLED) % K, K)
    networks = trainer.networks
    assert all(map(torch.equal, networks.encoder.parameters(), before))
    assert isinstance(networks.head, nn.Sequential)
    head = networks.head.eval()
    with torch.no_grad():
        scores = head(h).numpy()
        read = head[:-1](h).numpy()
    said[:LABELLED] = np.eye(K)[np.arange(LABELLED) % K]
    reached = said.any(1)
    size = np.sqrt((read**2).sum(1).mean())
    phi = np.hstack([read / size, np.ones((TRAIN, 1))])
    gram = phi[reached].T @ phi[reached]
    cross = phi[reached].T @ said[reached]
    strengths = (strength * np.eye(len(gram)) for strength in (0.01, 0.1, 1.0, 10.0))
    fits = [phi @ np.linalg.solve(gram + ridge, cross) for ridge in strengths]
    assert min(np.abs(scores - fit).max() for fit in fits) < 1e-9


# VFedTrans: five exchanges open the vectors of all tables, and a student of the active's alone.


def vfedtrans(vectors: int = 8, said: Mapping[str, Any] = {}, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "breast_cancer", "overlap": 0.6},
        "model": {"network": "enriched", "hidden": [16], "representation": vectors},
        "train": {"epochs": 1, "device": "cpu"},
    }
    method = {"name": "vfedtrans", "epochs": 8, "batch_size": 32, "loss": "mae", **said}
    return small_config(method, **{**usual, **changes})


def vectors_of(**changes: Any) -> Simulation:
    config = vfedtrans(**changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def taught(session: Simulation) -> Any:
    learner: Any = session.active_role
    session.run_script(learner.teach_student(session.links, Counted()))
    return learner


def whole_table(session: Simulation, data: VerticalData) -> np.ndarray:
    """All parties' columns of the aligned training rows, in the order of the active's table."""
    aligned = session.alignment["active"]
    parts = []
    for table in data.tables:
        own = session.alignment[table.name]
        at = dict(zip(aligned.tolist(), own.tolist(), strict=True))
        rows = [at[row] for row in session.active_role.training_rows.tolist()]
        parts.append(table.features[rows].flatten(1).double().numpy())
    return np.hstack(parts)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mask_rows", [16, 8192])
@pytest.mark.parametrize(
    "data",
    [
        {"dataset": "digits", "views": 2, "limit": 300},
        {"dataset": "breast_cancer", "overlap": 0.6},
        {"dataset": "digits", "views": 4, "limit": 300},
    ],
)
def test_the_vectors_are_those_of_all_tables(data: dict[str, Any], mask_rows: int) -> None:
    session = vectors_of(data=data, said={"mask_rows": mask_rows})
    found = taught(session).last_sum.numpy()
    config = vfedtrans(data=data)
    whole = whole_table(session, load_data(config.data, seed=config.seed))
    expected = np.linalg.svd(whole, full_matrices=False)[0][:, :8]
    assert np.abs(np.abs((found * expected).sum(axis=0)) - 1).max() < 1e-8


def test_nothing_but_the_papers_exchanges_leaves() -> None:
    result = run(vfedtrans(), None)
    flows = result.recording.transcript.flows
    sent = {
        (flow.sender, flow.receiver, flow.kind): flow.messages
        for flow in flows
        if flow.kind in (Kind.DEALT, Kind.CONTRIBUTION, Kind.SINGULAR_VECTORS, Kind.REQUEST)
    }
    owners = ("active", "passive-1", "passive-2")
    assert sent == {
        **{(DEALER, owner, Kind.DEALT): 1 for owner in owners},
        **{("active", owner, Kind.REQUEST): 1 for owner in owners[1:]},
        **{(owner, AGGREGATOR, Kind.CONTRIBUTION): 1 for owner in owners},
        (AGGREGATOR, "active", Kind.SINGULAR_VECTORS): 1,
    }
    told = {flow.kind for flow in flows}
    assert not {Kind.GRADIENTS, Kind.LABELS, Kind.REPRESENTATIONS, Kind.SUM} & told
    assert set(result.accuracy) == {"vfedtrans"}
    assert result.privacy.epsilon_x == np.inf


@pytest.mark.slow
def test_the_code_is_drawn_to_the_vectors() -> None:
    apart = []
    for weight in (0.0, 1.0):
        session = vectors_of(said={"epochs": 60, "loss": "mse", "weight": weight})
        learner = taught(session)
        rows = learner.training_rows
        encoder = learner.student.networks.encoder
        codes = encoder.code(learner.student.features_N[rows]).double()
        wanted = learner.last_sum * len(rows) ** 0.5
        apart.append(float((codes - wanted).square().mean()))
    assert apart[1] < 0.7 * apart[0]


def test_a_broken_run_goes_on_and_counts_the_same_rows_once(tmp_path: Path) -> None:
    config = vfedtrans(rules={"spare_answers": 0})
    interrupt_run(config, tmp_path / "run", at_step=1)
    run(config, tmp_path / "run", resume=True)
    (log,) = (tmp_path / "run").rglob("answers-passive-1.jsonl")
    assert len(log.read_text(encoding="utf-8").splitlines()) == 2  # what it counts, and one answer


def test_a_second_request_in_a_session_is_refused() -> None:
    session = vectors_of()
    taught(session)
    session.links.send("passive-1", Kind.REQUEST, 1, b"")
    with pytest.raises(RemoteProtocolError, match="asks passive-1 for rows to decompose once more"):
        session.run_script(session.links.receive("passive-1", Kind.SAVED))


def test_other_rows_in_another_session_count_anew(tmp_path: Path) -> None:
    config = vfedtrans(rules={"spare_answers": 1})
    data = load_data(config.data, seed=config.seed)
    first = open_session(config, data, logs=tmp_path)
    taught(first)
    for at in range(2):
        session = open_session(config, data, alignment=first.alignment, logs=tmp_path)
        learner: Any = session.active_role
        learner.training_rows = learner.student.rows_U = learner.training_rows[at + 1 :]
        if at == 0:
            taught(session)
            continue
        with pytest.raises(RemoteProtocolError, match="more than 2 times"):
            taught(session)


@pytest.mark.parametrize("twice", ["passive-1", "active"])
def test_the_aggregator_decomposes_once(twice: str) -> None:
    session = vectors_of()
    taught(session)
    session.network.links[twice].send(AGGREGATOR, Kind.CONTRIBUTION, 1, b"")
    with pytest.raises(RemoteProtocolError, match=f"{twice} sent a table twice"):
        session.run_script(session.links.receive(AGGREGATOR, Kind.SAVED))


def test_only_the_active_ends_a_session() -> None:
    session = vectors_of()
    session.network.links["passive-1"].send(AGGREGATOR, Kind.END, 0)
    with pytest.raises(RemoteProtocolError, match="passive-1 may send no end"):
        taught(session)


def test_more_vectors_than_features_or_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="31 singular vectors of 30 features"):
        vectors_of(vectors=31)
    few = {"dataset": "digits", "views": 2, "limit": 40, "overlap": 0.6}
    with pytest.raises(ConfigError, match="fewer than the smallest batch of 64"):
        run(vfedtrans(vectors=64, data=few), None)


def test_a_plan_forecasts_the_bytes_that_are_sent() -> None:
    config = vfedtrans(
        vectors=30,
        train={"epochs": 1, "batch_size": 8, "device": "cpu"},
        transcript={"keep": "none"},
    )
    flows = run(config, None).recording.transcript.flows
    plan = forecast(config)
    told = {(link.sender, link.receiver, link.kind): link for link in plan.links}
    for flow in flows:
        if flow.kind in (Kind.DEALT, Kind.REQUEST, Kind.CONTRIBUTION, Kind.SINGULAR_VECTORS):
            link = told[flow.sender, flow.receiver, flow.kind]
            assert link.messages == flow.messages == 1
            assert link.wire_bytes == pytest.approx(flow.wire_bytes, rel=0.02, abs=150)
    assert plan.epsilon_x == np.inf
    assert any("opened without noise" in line for line in plan.warnings)


# Autoencoders that end early, codes drawn to others, and encoders judged by a classifier.


def network(features: int = 6, seed: int = 0) -> autoencoder.Autoencoder:
    torch.manual_seed(seed)
    family = family_for(MODEL, (features,))
    return autoencoder.Autoencoder(
        family.make_encoder((features,), MODEL), family.make_decoder((8,), (features,), MODEL)
    )


def rows(count: int = 80, features: int = 6) -> Tensor:
    torch.manual_seed(5)
    hidden = torch.randn(count, 2)
    return hidden @ torch.randn(2, features) + 0.05 * torch.randn(count, features)


def error(fitted: autoencoder.Autoencoder, x_NF: Tensor) -> float:
    with torch.no_grad():
        return float((fitted.decoder(fitted.encode_rows(x_NF)) - x_NF).square().mean())


def test_it_learns_to_rebuild_its_rows_and_repeats_with_its_seed() -> None:
    x_NF = rows()
    before = network()
    fitted = network()
    again = network()
    epochs = autoencoder.fit_autoencoder(fitted, x_NF, SETTINGS, owner="ann", seed=1)
    assert autoencoder.fit_autoencoder(again, x_NF, SETTINGS, owner="ann", seed=1) == epochs
    assert error(fitted, x_NF) < 0.1 * error(before, x_NF)
    assert torch.equal(fitted.encode_rows(x_NF), again.encode_rows(x_NF))
    other = network()
    autoencoder.fit_autoencoder(other, x_NF, SETTINGS, owner="bob", seed=1)
    assert not torch.equal(fitted.encode_rows(x_NF), other.encode_rows(x_NF))
    assert not any(one.requires_grad for one in fitted.parameters())


def test_it_ends_once_held_out_rows_gain_nothing_and_takes_the_best_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autoencoder.DistillationSettings, "patience", 5)
    x_NF = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    settings = SETTINGS.model_copy(update={"epochs": 500, "learning_rate": 0.05})
    fitted = network()
    epochs = autoencoder.fit_autoencoder(fitted, x_NF, settings, owner="ann", seed=0)
    assert 5 < epochs < 500
    shorter = network()
    monkeypatch.setattr(autoencoder.DistillationSettings, "patience", 500)
    until_best = settings.model_copy(update={"epochs": epochs - 5})
    autoencoder.fit_autoencoder(shorter, x_NF, until_best, owner="ann", seed=0)
    assert torch.equal(fitted.encode_rows(x_NF), shorter.encode_rows(x_NF))


@pytest.mark.parametrize("loss", ["mse", "mae"])
def test_codes_of_some_rows_are_drawn_to_others(loss: str) -> None:
    x_NF = rows()
    told = torch.arange(0, 80, 2)
    wanted = torch.tanh(x_NF[told] @ torch.randn(6, 8, generator=torch.Generator().manual_seed(3)))
    apart = []
    for weight in (0.0, 5.0):
        settings = SETTINGS.model_copy(update={"weight": weight, "loss": loss})
        fitted = network()
        autoencoder.fit_autoencoder(
            fitted,
            x_NF,
            settings,
            owner="ann",
            seed=0,
            target_codes=autoencoder.TargetCodes(rows=told, codes=wanted),
        )
        apart.append(float((fitted.encode_rows(x_NF[told]) - wanted).square().mean()))
        if weight == 0.0:  # the paper's Ablation
            alone = network()
            autoencoder.fit_autoencoder(alone, x_NF, settings, owner="ann", seed=0)
            assert torch.equal(alone.encode_rows(x_NF), fitted.encode_rows(x_NF))
    assert apart[1] < 0.2 * apart[0]


def test_what_cannot_be_fitted_is_named() -> None:
    with pytest.raises(ModelError, match="ann: an autoencoder takes two rows"):
        autoencoder.fit_autoencoder(network(), rows(1), SETTINGS, owner="ann", seed=0)
    endless = SETTINGS.model_copy(update={"learning_rate": 1e30})
    with pytest.raises(ModelError, match="ann: training of an autoencoder diverged"):
        autoencoder.fit_autoencoder(network(), rows(), endless, owner="ann", seed=0)


def test_the_classifier_is_that_of_scikit_learn() -> None:
    from sklearn.preprocessing import StandardScaler

    codes_nD = torch.randn(90, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
    labels_n = (codes_nD[:, 0] > 1).long() + (codes_nD[:, 1] > 2).long()
    networks = ActiveNetworks(nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(5, 4))).double()
    fit_classifier(networks, codes_nD, labels_n)
    scaled = StandardScaler().fit_transform(codes_nD.double().numpy())
    theirs = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(scaled, labels_n.numpy())
    ours_nK = networks.head(codes_nD.double()).softmax(1).detach().numpy()
    assert (
        abs(ours_nK[:, :3] - theirs.predict_proba(scaled)).max() < 0.05
    )  # theirs leaves the constant free
    assert ours_nK[:, 3].max() < 0.1  # a class without a label


CPU = Compute(torch.device("cpu"))


def make_rows(count: int = 160) -> tuple[Tensor, Tensor]:
    """Make four independent columns, of which two tell the class."""
    torch.manual_seed(0)
    x_NF = torch.randn(count, 4)
    return x_NF, (x_NF[:, 0] + x_NF[:, 1] > 0).long()


def quality(representation: int, labels_N: Tensor | None = None) -> autoencoder.EncoderQuality:
    x_NF, known_N = make_rows()
    model = ModelSettings(network="selu", hidden=(), representation=representation)
    return autoencoder.measure_encoder_quality(
        x_NF,
        known_N if labels_N is None else labels_N,
        model=model,
        settings=SETTINGS,
        owner="ann",
        seed=3,
        compute=CPU,
        threshold=0.05,
        folds=5,
    )


def test_rows_without_a_label_train_the_encoder_and_score_nothing() -> None:
    x_NF, labels_N = make_rows()
    few_N = labels_N.clone()
    few_N[80:] = UNLABELLED
    found = quality(12, few_N)
    assert np.array_equal(
        found.column_scores,
        autoencoder.cross_validate_scores(x_NF[:80], labels_N[:80], folds=5, seed=3)["accuracy"],
    )
    assert found.epoch_count == quality(12).epoch_count


def test_a_command_judges_the_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: first\ndata: {dataset: wine}\nguard: {mechanism: none}\n"
        "model: {network: selu, hidden: [], representation: 1}\n"
        "method: {name: apc_vfl, epochs: 20, batch_size: 16}\n"
    )
    judged = run_as_json(capsys, "data", "check-encoder", path, "--folds", 5)
    assert judged["good_enough"] is False
    assert len(judged["columns"]) == len(judged["code"]) == 5
    judged = run_as_json(capsys, "data", "check-encoder", path, "--threshold", 1, "--folds", 5)
    assert judged["good_enough"] is True
    assert execute(["data", "check-encoder", str(path), "--folds", "60"]) == 3
    private = "labels={mechanism: randomised_response, epsilon: 1}"
    assert execute(["data", "check-encoder", str(path), "--set", private]) == 2
    assert "true training labels" in read_stderr(capsys)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("method", ["apc_vfl", "vfedtrans"])
def test_the_strongest_local_model_reads_the_code_beside_the_features_or_none(
    method: str, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_models, "is_significantly_better", lambda *of, **how: used)
    config = step_config(
        {"name": method, "epochs": 2, "classifier": "strongest"},
        model={"network": "enriched", "hidden": [16], "representation": 8},
    )
    data = plant_classes()
    shape = (12,)
    with nullcontext() if used else pytest.warns(NoHelpWarning, match="its own columns"):
        result = run(config, tmp_path / "run", data=data)
    model = load_model(tmp_path / "run")
    encoder = next(iter(model.network.children()))
    assert output_shape(encoder, shape) == ((12 + 8,) if used else (K,))
    with torch.no_grad():
        said = model.network(data.table.features[data.test_rows].double()).argmax(1)
    assert data.table.labels is not None
    right = (said == data.table.labels[data.test_rows]).double().mean().item()
    assert right == pytest.approx(result.accuracy[method])
    session, other = (open_session(config, data) for _ in range(2))
    session.run_script(session.active_role.begin_epoch(session.links, Counted()))
    learner = session.active_role
    restored = other.active_role
    assert isinstance(learner, StudentActive)
    assert isinstance(restored, StudentActive)
    restored.student.load_tensors(learner.student.tensors())
    one, again = (of.student.score_rows(data.test_rows).scores for of in (learner, restored))
    assert np.array_equal(one, again)
