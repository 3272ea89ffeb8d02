"""MMVFL and FedMV: closed forms against solvers, parties against the papers, nothing shown."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.config.file import load_config
from secure_apfed.data import PartyTable, load_data
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import Kind, Links, pack_tensors
from secure_apfed.methods import METHODS, Simulation, multiview, open_session
from secure_apfed.methods.averaging import LinearViews
from secure_apfed.networks.models import SequenceEncoder, make_encoder_and_head
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.columns import pick_columns, restrict_columns
from secure_apfed.runs.run import run
from secure_apfed.settings import ModelSettings
from tests.secure_apfed.small_runs import Said, run_as_json, small_config
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


ROWS = 40
CLASSES = 3


def joint_scores(views: Sequence[multiview.ViewModel], rows_B: np.ndarray) -> np.ndarray:
    """Z of rows that nobody learns from, where FedMV's Eqs. (12) and (13) end."""
    zetas = [view.zeta for view in views]
    parts = [
        multiview.compute_joint_weight(view.zeta, zetas) * view.compute_scores(rows_B)
        for view in views
    ]
    return np.asarray(np.sum(parts, axis=0))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def views(rng: np.random.Generator) -> list[multiview.ViewModel]:
    return [
        multiview.ViewModel.from_features(
            rng.standard_normal((ROWS, width)), CLASSES, rng, beta=0.7, zeta=zeta
        )
        for width, zeta in ((5, 2.0), (8, 0.5), (3, 4.0))
    ]


def proximal(x_NF: multiview.Floats, z_NC: multiview.Floats, beta: float) -> multiview.Floats:
    """Minimise Eq. (5) by accelerated proximal gradients (Beck and Teboulle 2009)."""
    rate = 1 / (2 * np.linalg.norm(x_NF, 2) ** 2)
    now = ahead = np.zeros((x_NF.shape[1], z_NC.shape[1]))
    momentum = 1.0
    for _ in range(6_000):
        stepped = ahead - rate * 2 * x_NF.T @ (x_NF @ ahead - z_NC)
        norms = np.linalg.norm(stepped, axis=1, keepdims=True)
        shrunk = stepped * np.maximum(0, 1 - rate * beta / np.maximum(norms, 1e-300))
        after = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = shrunk + (momentum - 1) / after * (shrunk - now)
        now = shrunk
        momentum = after
    return now


@pytest.mark.parametrize("beta", [0.0, 0.3, 30.0])
def test_the_weights_minimise_their_objective(rng: np.random.Generator, beta: float) -> None:
    x_NF = rng.standard_normal((ROWS, 6))
    z_NC = rng.standard_normal((ROWS, CLASSES))
    found = multiview.solve_weights(x_NF, z_NC, beta, rng.standard_normal((6, CLASSES)))
    other = proximal(x_NF, z_NC, beta)

    ours, theirs = (multiview.compute_view_loss(x_NF, w, z_NC, beta) for w in (found, other))
    assert ours == pytest.approx(theirs, rel=1e-8)
    if beta == 30.0:  # some features count for nothing there
        assert (multiview.compute_row_norms(other) == 0).any()
        np.testing.assert_allclose(
            multiview.compute_row_norms(found)[multiview.compute_row_norms(other) == 0],
            0,
            atol=1e-4,
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("size", "beta", "said"),
    [
        (0.0, 0.0, "beta above 0"),  # linearly dependent columns
        (1e200, 1.0, "too large to learn from; rescale"),
        (1.0, 1e308, "too large to learn from; rescale"),
    ],
)
def test_what_has_no_weights_is_named(
    rng: np.random.Generator, size: float, beta: float, said: str
) -> None:
    x_NF = np.full((ROWS, 2), size)
    z_NC = rng.standard_normal((ROWS, CLASSES))
    with pytest.raises(ModelError, match=said):
        multiview.solve_weights(x_NF, z_NC, beta, np.full((2, CLASSES), 0.0 if beta else 1.0))


def test_one_client_alone_ends_where_multi_view_learning_does(rng: np.random.Generator) -> None:
    """H-FedMV's other order of updates has the same end: the objective is convex in all."""
    truth_NC = np.eye(CLASSES)[rng.integers(0, CLASSES, ROWS)]
    labelled_N1 = (np.arange(ROWS) < 30).astype(float)[:, None]
    pull = multiview.LabelTerm(truth_NC * labelled_N1, 5.0 * labelled_N1)
    held = views(rng)
    client = views(rng)
    for own, other in zip(client, held, strict=True):
        own.x_NF = other.x_NF
    common = multiview.draw_orthonormal(ROWS, CLASSES, rng)
    for _ in range(600):
        common = multiview.run_iteration(held, common, pull)
    reached = ROWS * LinearViews(client, pull, tolerance=1e-14, rounds=600).train(0)
    assert reached == pytest.approx(
        multiview.compute_objective(client, multiview.average_views(client, pull), pull)
    )
    assert reached == pytest.approx(multiview.compute_objective(held, common, pull), rel=1e-6)
    rows = np.arange(ROWS)
    np.testing.assert_allclose(joint_scores(client, rows), joint_scores(held, rows), atol=2e-3)


METHODS_OF_VIEWS = [
    name for name, method in METHODS.items() if method.settings.averaged_quantity == "pseudo-labels"
]
ROUNDS = 6
CLEAR = {"scheme": "plain", "masks": "none", "clip": None}


config_of = partial(
    small_config, secure_sum=CLEAR, train={"epochs": 3, "device": "cpu", "precision": "float64"}
)


def session_of(method: Said, **changes: Any) -> Simulation:
    config = config_of(method, **changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def trainers_of(session: Simulation) -> list[Any]:
    seats: list[Any] = [
        session.active_role,
        *(session.helpers[name] for name in session.contract.passives),
    ]
    return [seat.trainer for seat in seats]


class Paper:
    """Both papers' equations in numpy, on one table.

    It knows nothing of the product but the parties' rows and random starts.
    """

    def __init__(
        self, session: Simulation, *, zetas: list[float], eta: float, betas: list[float], own: bool
    ) -> None:
        active: Any = session.active_role
        trainers = trainers_of(session)
        self.rows = active.training_rows.numpy()
        self.asked = active.test_positions.numpy()
        self.betas = betas
        self.zeta = np.array(zetas)
        self.own = own
        self.views = [one.view.x_NF.copy() for one in trainers]
        self.w = [one.view.weights_FC.copy() for one in trainers]
        self.z_k = [one.view.labels_NC[self.rows].copy() for one in trainers]
        self.z = active.trainer.common_NC[self.rows].copy()
        people = active._rows[active.training_rows]
        told = np.isin(people.numpy(), active._party.data.labelled_rows.numpy())
        labels = active._party.data.table.labels[people].numpy()
        self.y = np.eye(self.z.shape[1])[np.where(told, labels, 0)] * told[:, None]
        self.pull = eta * told[:, None]

    def step(self) -> None:
        for k, zeta in enumerate(self.zeta):
            x = self.views[k][self.rows]
            for _ in range(ROUNDS):  # Eqs. 7 and 8 of MMVFL
                a = np.diag(1 / (2 * (np.sqrt((self.w[k] ** 2).sum(1)) + 1e-10)))
                self.w[k] = np.linalg.solve(x.T @ x + self.betas[k] * a, x.T @ self.z_k[k])
            drawn = self.pull if self.own and k == 0 else 0.0  # Eq. 11, or 12; FedMV's 8
            said = x @ self.w[k] + zeta * self.z + drawn * self.y
            self.z_k[k] = said / (1 + zeta + drawn)
        drawn = 0.0 if self.own else self.pull  # Eq. 14; FedMV's 10
        said = sum(zeta * one for zeta, one in zip(self.zeta, self.z_k, strict=True))
        self.z = (said + drawn * self.y) / (self.zeta.sum() + drawn)

    def together(self) -> np.ndarray:
        """FedMV's Eqs. 12 and 13 for the test rows, as often as it takes: where a mean ends."""
        scores = [x[self.asked] @ w for x, w in zip(self.views, self.w, strict=True)]
        z: np.ndarray = np.zeros_like(scores[0])
        for _ in range(3000):
            each = [(s + zeta * z) / (1 + zeta) for s, zeta in zip(scores, self.zeta, strict=True)]
            z = np.tensordot(self.zeta, each, 1) / self.zeta.sum()
        return z


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("name", "labelled", "apart"),
    [
        ("plain + pairwise masks", 20, {}),
        ("plain, any length", None, {}),
        ("plain, any length", 20, {"active": {"eta": 3.0}, "passive-2": {"beta": 0.5, "zeta": 8}}),
    ],
)
@pytest.mark.parametrize("method", METHODS_OF_VIEWS)
def test_parties_compute_what_the_papers_say(
    method: str, name: str, labelled: int | None, apart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiview.MultiviewSettings, "tolerance", 1e-300)
    monkeypatch.setattr(multiview.MultiviewSettings, "max_rounds", ROUNDS)
    secure_sum = (
        CLEAR if name == "plain, any length" else {**pair_of(name), "clip": 4.0, "bits": 24}
    )
    session = session_of(
        {"name": method, "beta": 2.0, "zeta": 4.0, "eta": 6.0, "parties": apart},
        data={"dataset": "digits", "views": 3, "limit": 160, "labelled": labelled},
        secure_sum=secure_sum,
        passives={"default": {"weight": 3.0}, "passive-2": {"weight": 0.25}},
    )
    active = session.active_role
    assert isinstance(active, multiview.MultiviewActive)
    assert list(session.contract.passives) == ["passive-1", "passive-2"]
    # whose zeta is 8, and weight a quarter
    own = method == "mmvfl"
    two = 2.0 if apart else 1.0
    eta, betas = (3.0, [2.0, 2.0, 0.5]) if apart else (6.0, [2.0] * 3)
    paper = Paper(session, zetas=[4.0, 12.0, two], eta=eta, betas=betas, own=own)
    assert (paper.pull > 0).sum() < len(paper.rows) or labelled is None
    for step in range(3):
        session.train_step(step, active.training_rows)
        paper.step()
    # The sum is of zeta_k Z_k / zetas, and Z gets at most 1 of it; rounds add up.
    apart = 1e-9 + 20 * (active.rounding_error or 0.0)
    assert apart < 1e-4
    np.testing.assert_allclose(active.trainer.common_NC[paper.rows], paper.z, atol=apart)
    for trainer, z_k, w in zip(trainers_of(session), paper.z_k, paper.w, strict=True):
        np.testing.assert_allclose(trainer.view.labels_NC[paper.rows], z_k, atol=apart)
        np.testing.assert_allclose(trainer.view.weights_FC, w, atol=apart)
    joint = joint_scores([trainer.view for trainer in trainers_of(session)], paper.asked)
    np.testing.assert_allclose(joint, paper.together(), atol=apart)

    accuracy = session.evaluate(next_step=3, is_final=True)[f"{method}_together"]
    truth = active._party.data.table.labels[active._rows[active.test_positions]].numpy()  # type: ignore[index]
    assert float(accuracy) == pytest.approx((paper.together().argmax(1) == truth).mean())


@pytest.mark.parametrize(
    ("method", "parties", "said"),
    [
        ("mmvfl", {"passive-7": {"beta": 2}}, "parties.passive-7: no party has .* are active"),
        ("mmvfl", {"passive-1": {"eta": 2}}, "parties.passive-1.eta: passive-1 holds no labels"),
        ("v_fedmv", {"passive-1": {"eta": 2}}, "parties.passive-1.eta: passive-1 holds no labels"),
    ],
)
def test_weights_that_nobody_reads_are_refused(method: str, parties: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"method.{said}"):
        session_of({"name": method, "parties": parties})


@pytest.mark.slow
def test_columns_are_ranked_and_a_run_is_cut_to_the_first(tmp_path: Path, capsys: Any) -> None:
    run(config_of("mmvfl"), tmp_path / "r")
    found = run_as_json(
        capsys, "data", "columns", tmp_path / "r", "--keep", 0.25, "--output", tmp_path / "c.yaml"
    )
    assert [*found["scores"]] == ["active", "passive-1", "passive-2"]
    model = load_file(tmp_path / "r" / "model.safetensors")["head.weight"]
    ranked = found["scores"]["active"]
    assert [*ranked.values()] == sorted(model.norm(dim=0).tolist(), reverse=True)
    kept = {name: [*own][:2] for name, own in found["scores"].items()}
    assert found["kept"] == kept
    cut = load_config(tmp_path / "c.yaml")
    assert {name: [*own] for name, own in cut.data.columns.items()} == kept  # type: ignore[union-attr]
    assert run(cut, None).accuracy["mmvfl"] > 0.8
    own = tmp_path / "r" / "parties" / "passive-1"
    alone = run_as_json(capsys, "data", "columns", own, "--keep", 3)
    assert {name: len(of) for name, of in alone["kept"].items()} == {"passive-1": 3}
    assert (own / "feature-scores.json").stat().st_mode & 0o077 == 0
    for arguments, code, said in (
        ((tmp_path, "--keep", 3), 3, "none; methods mmvfl and v_fedmv"),
        ((own, "--keep", 2.5), 2, "--keep 2.5: expected a number"),
        ((own, "--output", "c.yaml"), 2, "--output: say how many"),
    ):
        answer = run_as_json(capsys, "data", "columns", *arguments, code=code)
        assert said in answer["error"]["message"]


def test_own_tables_leave_the_other_columns_out() -> None:
    parties = {
        "bank": {"ignore": ["note"]},
        "shop": {"numeric": ["x", "y"], "categorical": ["z"]},
        "gym": {},
    }
    data = {"dataset": "tables", "active": "bank", "parties": parties}
    scores = {"bank": {"a": 2.0, "b": 1.0}, "shop": {"z": 3.0, "x": 2.0, "y": 0.0}}
    config = config_of("mmvfl", data=data)
    cut = restrict_columns(config, scores, pick_columns(scores, 1))
    now: Any = cut.data.parties
    assert now["bank"].ignore == ("note", "b")
    assert (now["shop"].numeric, now["shop"].categorical, now["shop"].ignore) == ((), ("z",), ())
    assert now["gym"] == config.data.parties["gym"]  # type: ignore[index]
    given = config_of("mmvfl", data={**data, "parties": parties | {"shop": {"encoding": "e.json"}}})
    with pytest.raises(ConfigError, match=r"parties\.shop\.encoding lists .* cut it there to z"):
        restrict_columns(given, scores, pick_columns(scores, 1))
    with pytest.raises(ConfigError, match="no scores of active, passive-1, passive-2 here"):
        restrict_columns(config_of("mmvfl"), scores, pick_columns(scores, 1))


def test_the_active_reads_labels_of_passives_out_of_the_sum() -> None:
    """As the who-learns table says: no sum hides whom a passive has a label of, and which."""
    data = {
        "dataset": "digits",
        "views": 4,
        "limit": 200,
        "labelled": 20,
        "labels_at": ["passive-1"],
    }
    masked = {"scheme": "plain", "masks": "pairwise", "clip": 4.0}
    session = session_of("mmvfl", data=data, secure_sum=masked)
    active = session.active_role
    holder = session.helpers["passive-1"]
    assert isinstance(active, multiview.MultiviewActive)
    rows = active.training_rows.numpy()
    asked = active.trainer.common_NC[rows].copy()
    session.train_step(0, active.training_rows)
    assert active.last_sum is not None
    moved = active.last_sum.numpy() - 0.75 * asked  # the three passives' equal shares of Z
    pull: multiview.LabelTerm = holder.trainer.label_term  # type: ignore[attr-defined]
    told = pull.eta_N1[rows, 0] > 0
    assert 0 < told.sum() < len(rows) / 2
    lengths = np.linalg.norm(moved, axis=1)
    assert lengths[told].min() > lengths[~told].max()
    assert (moved.argmax(1) == pull.truth_NC[rows].argmax(1))[told].all()


def test_fewer_people_than_classes_are_learnt_from() -> None:
    data = {"dataset": "digits", "views": 3, "aligned": 5, "limit": 200}
    assert run(config_of("mmvfl", data=data), None).accuracy["mmvfl"] > 0


def request_sum(session: Simulation, step: int = 0, **tensors: torch.Tensor) -> None:
    async def ask(links: Links) -> None:
        for name in session.contract.passives:
            links.send(name, Kind.REQUEST, step, pack_tensors(tensors, {}))
        await links.receive("aggregator", Kind.SUM, step=step, patience=4)

    session.run_script(ask(session.links))


def honest(session: Simulation) -> dict[str, torch.Tensor]:
    active: Any = session.active_role
    if session.contract.settings["method"]["name"] == "h_fedmv":
        return {"weights": torch.from_numpy(active.stages.pick_model(0).weights)}
    rows = active.training_rows
    return {"rows": rows, "z": torch.from_numpy(active.trainer.common_NC[rows.numpy()])}


@pytest.mark.parametrize(
    ("method", "name", "change", "said"),
    [
        ("mmvfl", "z", lambda z: z[:, :1], "expected torch.float64"),
        ("mmvfl", "z", lambda z: z[1:], "rows of z"),
        ("mmvfl", "z", lambda z: z * float("nan"), "norm is not within"),
        ("mmvfl", "rows", lambda rows: rows + 10**6, "outside the alignment"),
        ("h_fedmv", "weights", lambda w: w[1:], "need the same views"),
        ("h_fedmv", "weights", lambda w: w.float(), "expected torch.float64"),
        ("h_fedmv", "weights", lambda w: w + 1e9, "norm is not within"),
    ],
)
def test_a_hostile_request_is_refused(method: str, name: str, change: Any, said: str) -> None:
    session = session_of(method)
    request = honest(session)
    with pytest.raises(RemoteProtocolError, match=said):
        request_sum(session, **{**request, name: change(request[name])})


@pytest.mark.parametrize(("method", "questions"), [("mmvfl", 1), ("h_fedmv", 0)])
def test_a_passive_answers_as_often_as_agreed(method: str, questions: int) -> None:
    session = session_of(method)
    request = honest(session)
    agreed = session.contract.epochs + session.contract.spare_answers + questions
    for step in range(agreed):
        request_sum(session, step, **request)
    with pytest.raises(RemoteProtocolError, match=f"more than {agreed} times"):
        request_sum(session, agreed, **request)


@pytest.mark.parametrize(("method", "clip"), [("v_fedmv", 1e-4), ("h_fedmv", 1e-3)])
def test_a_sum_that_would_cut_rows_is_refused(method: str, clip: float) -> None:
    session = session_of(method, secure_sum={"scheme": "plain", "masks": "pairwise", "clip": clip})
    with pytest.raises(LocalProtocolError, match="agree on a clip above"):
        session.train_step(0, session.active_role.training_rows)


def stages_of(session: Simulation) -> dict[str, Any]:
    helpers: dict[str, Any] = dict(session.helpers)
    learner: Any = session.active_role
    stages = {name: one.stages for name, one in helpers.items() if name != "aggregator"}
    return {learner.name: learner.stages, **stages}


def copy_model(model: LinearViews) -> LinearViews:
    views = [
        multiview.ViewModel(
            x_NF=one.x_NF,
            beta=one.beta,
            zeta=one.zeta,
            weights_FC=one.weights_FC.copy(),
            labels_NC=one.labels_NC.copy(),
            tolerance=one.tolerance,
            max_rounds=one.max_rounds,
        )
        for one in model.views
    ]
    return LinearViews(
        views, model._label_term, tolerance=model._tolerance, rounds=model._max_rounds
    )


def test_a_round_is_the_average_of_all_by_their_rows() -> None:
    config = config_of("h_fedmv")
    data = load_data(config.data, seed=0)
    fewer = data.passives[0]
    assert fewer.labels is not None
    part = replace(
        fewer, ids=fewer.ids[:70], features=fewer.features[:70], labels=fewer.labels[:70]
    )
    session = open_session(config, replace(data, passives=(part, *data.passives[1:])))
    stages = stages_of(session)
    models = {name: copy_model(one.views) for name, one in stages.items()}
    rows = {name: len(model.views[0].x_NF) for name, model in models.items()}
    assert len(set(rows.values())) == 2
    average = models["active"].weights
    for step in range(2):
        session.train_step(step, session.active_role.training_rows)
        for model in models.values():
            model.load(average)
            model.train(step)
        average = np.sum([rows[name] * one.weights for name, one in models.items()], axis=0)
        average /= sum(rows.values())
    np.testing.assert_allclose(stages["active"].pick_model(1).weights, average, atol=1e-12)


def test_parties_whose_features_are_others_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("h_fedmv")
    data = load_data(config.data, seed=0)  # of tables at hand this is checked when they are read
    layout = {"passive-1": "1" * 64}
    monkeypatch.setattr(
        PartyTable, "layout", property(lambda self: layout.get(self.name, "0" * 64))
    )
    with pytest.raises(RemoteProtocolError, match=r"passive-1 has other features than active"):
        open_session(config, data)


@pytest.mark.slow
def test_the_states_of_grus_become_views() -> None:
    session = session_of("s_fedmv")
    stages = stages_of(session)
    for step in range(2):
        session.train_step(step, session.active_role.training_rows)
        assert all(one.views is None for one in stages.values())
    weights = [one.recurrent.weights for one in stages.values()]
    assert not np.array_equal(weights[0], weights[1])
    session.train_step(2, session.active_role.training_rows)
    for one in stages.values():
        assert [view.x_NF.shape[1] for view in one.views.views] == [8, 8, 8]
        np.testing.assert_array_equal(one.recurrent.weights, weights[0])


def test_a_gru_reads_its_steps_and_no_padding() -> None:
    encoder = SequenceEncoder([(3, 2), (2, 1)], 4).double()
    row = torch.tensor([[2.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 1.0, 5.0, 0.0]]).double()
    padded = row.clone()
    # behind the last step in use
    padded[0, 5:7] = 7.0
    padded[0, 9] = 9.0
    assert torch.equal(encoder(row), encoder(padded))
    last = row.clone()
    last[0, 3] = 8.0
    assert not torch.equal(encoder(row), encoder(last))


def test_a_gru_is_told_the_shape_of_its_rows() -> None:
    settings = ModelSettings(network="gru", sequences=((3, 2),))
    with pytest.raises(ModelError, match="model\\.sequences"):
        make_encoder_and_head(settings, (9,), 2)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["mmvfl", "h_fedmv"])
def test_a_forecast_counts_rounds_of_all_rows(method: str) -> None:
    config = small_config(method)
    told = forecast(config)
    sent = run(config, None)
    assert told.steps == config.train.epochs
    assert told.wire_bytes == pytest.approx(sent.wire_bytes, rel=0.1)
