"""V-FedMV and H-FedMV on sequences: GRUs against the equations, settings, sums, resumption."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from secure_apfed.base.seeds import seed_draws
from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.data.encoding import View
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.learning.recurrent import require_sequences
from secure_apfed.methods import Simulation, multiview, open_session
from secure_apfed.methods.averaging import LinearViews
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import Said, interrupt_run, small_config
from tests.with_crypten import pair_of, usable_secure_sums

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

PEOPLE = 24
TRAINED = 16
SEQUENCES = {"alphanum": (5, 2), "special": (4, 3), "accel": (6, 1)}
PARTIES = ("active", "passive-1", "passive-2")
ROUNDS = 4
SIZE = 3
CLEAR = {"scheme": "plain", "masks": "none", "clip": None}
TRAIN = {"epochs": 3, "device": "cpu", "precision": "float64"}


def flip_or_stay(rows: int, steps: int, channels: int, labels_N: Tensor, seed: int) -> Tensor:
    """Flat sequences that keep their sign under class 0 and turn it under class 1.

    No single number says anything of the class, nor any linear combination of them.
    """
    draw = torch.Generator().manual_seed(seed)
    sign_N1C = 2.0 * torch.randint(0, 2, (rows, 1, channels), generator=draw) - 1
    turns_NT = (1 - 2.0 * labels_N[:, None]) ** torch.arange(steps)
    steps_NTC = sign_N1C * turns_NT[:, :, None]
    steps_NTC = steps_NTC + 0.3 * torch.randn(rows, steps, channels, generator=draw)
    used_N = torch.randint(2, steps + 1, (rows,), generator=draw)
    steps_NTC[torch.arange(steps) >= used_N[:, None]] = 0.0
    return torch.cat([used_N[:, None].float(), steps_NTC.flatten(1).float()], dim=1)


def table(
    name: str, ids: Sequence[str], labels_N: Tensor | None, true_N: Tensor, views: Sequence[str]
) -> PartyTable:
    parts = [
        flip_or_stay(len(ids), *SEQUENCES[view], true_N, seed=[*SEQUENCES].index(view))
        for view in views
    ]
    ends = np.cumsum([0, *(part.shape[1] for part in parts)])
    features = torch.cat(parts, dim=1)
    return PartyTable(
        name,
        tuple(ids),
        features,
        labels_N,
        ColumnEncoding.for_numeric_columns([str(at) for at in range(features.shape[1])]),
        {
            view: View(int(first), int(end), SEQUENCES[view])
            for view, first, end in zip(views, ends, ends[1:], strict=False)
        },
    )


def vertical_data(people: int = PEOPLE, trained: int = TRAINED) -> VerticalData:
    """One sequence a party, of the same people."""
    ids = [str(at) for at in range(people)]
    labels_N = torch.arange(people) % 2
    active, *passives = (
        table(name, ids, labels_N if name == "active" else None, labels_N, [view])
        for name, view in zip(PARTIES, SEQUENCES, strict=True)
    )
    return VerticalData(
        table=active,
        passives=tuple(passives),
        classes=("negative", "positive"),
        train_rows=torch.arange(trained),
        test_rows=torch.arange(trained, people),
        labelled=torch.arange(trained - 4),
    )


def horizontal_data() -> VerticalData:
    """All sequences at each party, of other people."""
    labels_N = torch.arange(PEOPLE) % 2
    active, *passives = (
        table(name, [f"{name} {at}" for at in range(PEOPLE)], labels_N, labels_N, [*SEQUENCES])
        for name in PARTIES
    )
    return VerticalData(
        table=active,
        passives=tuple(passives),
        classes=("negative", "positive"),
        train_rows=torch.arange(TRAINED),
        test_rows=torch.arange(TRAINED, PEOPLE),
        is_horizontal=True,
    )


def config_of(method: Said, sequences: Sequence[Sequence[int]] = (), **changes: Any) -> Config:
    name = method if isinstance(method, str) else method["name"]
    apart = {"partition": "horizontal", "clients": 3} if name in ("h_fedmv", "s_fedmv") else {}
    model = {"network": "gru", "sequences": sequences, "representation": SIZE}
    usual = {"data": {"dataset": "synthetic_keystrokes", **apart}, "model": model}
    return small_config(method, **{**usual, "secure_sum": CLEAR, "train": TRAIN, **changes})


def vertical_config(method: Said = "v_fedmv", **changes: Any) -> Config:
    return config_of(method, [SEQUENCES["alphanum"]], **changes)


def horizontal_config(method: Said = "h_fedmv", **changes: Any) -> Config:
    return config_of(method, [*SEQUENCES.values()], **changes)


class PlainGru:
    """A bidirectional GRU by its equations (Cho et al. 2014, as torch names the weights), the layer
    above it, and RMSProp (Hinton 2012), all written out. `state`: the product's, at its start.
    """

    def __init__(
        self, state: Mapping[str, Tensor], *, owner: str, seed: int, rate: float, epochs: int
    ) -> None:
        self.weights = {name: of.clone().requires_grad_() for name, of in state.items()}
        self.owner = owner
        self.seed = seed
        self.rate = rate
        self.epochs = epochs

    def direction(self, steps_TC: Tensor, position: int, suffix: str) -> Tensor:
        w = {
            kind: self.weights[f"0.views.{position}.{kind}_l0{suffix}"]
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        h_D = torch.zeros(w["weight_hh"].shape[1], dtype=torch.float64)
        for x_C in steps_TC:
            read_3D = w["weight_ih"] @ x_C + w["bias_ih"]
            kept_3D = w["weight_hh"] @ h_D + w["bias_hh"]
            reset_in, update_in, new_in = read_3D.chunk(3)
            reset_kept, update_kept, new_kept = kept_3D.chunk(3)
            reset_D = torch.sigmoid(reset_in + reset_kept)
            update_D = torch.sigmoid(update_in + update_kept)
            new_D = torch.tanh(new_in + reset_D * new_kept)
            h_D = (1 - update_D) * new_D + update_D * h_D
        return h_D

    def states(self, flat_NF: Tensor, sequence: tuple[int, int], position: int = 0) -> Tensor:
        found = []
        for row in flat_NF.double():
            steps_TC = row[1:].reshape(sequence)[: int(row[0])]
            ahead_D = self.direction(steps_TC, position, "")
            back_D = self.direction(steps_TC.flip(0), position, "_reverse")
            found.append(torch.cat([ahead_D, back_D]))
        return torch.stack(found)

    def train(
        self,
        parts: Sequence[Tensor],
        sequences: Sequence[tuple[int, int]],
        shares_NC: Tensor,
        step: int,
    ) -> None:
        squares = {name: torch.zeros_like(of) for name, of in self.weights.items()}
        with seed_draws(self.seed, self.owner, "recurrent", step):
            # A batch of 128 has all rows here.
            orders = [torch.randperm(len(shares_NC)) for _ in range(self.epochs)]
        for order in orders:
            loss = torch.zeros(())
            for place, (flat_NF, sequence) in enumerate(zip(parts, sequences, strict=True)):
                scores = self.states(flat_NF[order], sequence, place)
                logs = (scores @ self.weights[f"1.{place}.weight"].T).log_softmax(1)
                loss = loss - (shares_NC[order] * logs).sum() / len(order)
            gradients = torch.autograd.grad(loss, list(self.weights.values()))
            for name, gradient in zip(list(self.weights), gradients, strict=True):
                squares[name] = 0.99 * squares[name] + 0.01 * gradient**2
                moved = self.rate * gradient / (squares[name].sqrt() + 1e-8)
                self.weights[name] = (self.weights[name] - moved).detach().requires_grad_()


def trainers_of(session: Simulation) -> dict[str, Any]:
    learner: Any = session.active_role
    helpers: dict[str, Any] = dict(session.helpers)
    return {"active": learner.trainer} | {name: helpers[name].trainer for name in PARTIES[1:]}


def plain_gru(session: Simulation, name: str, recurrent: Any, rate: float, epochs: int) -> PlainGru:
    seed = recurrent._seed
    return PlainGru(recurrent.tensors(), owner=name, seed=seed, rate=rate, epochs=epochs)


def test_v_fedmv_computes_what_the_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eqs. 5 to 10 on the last states of GRUs, which learn from labels, or from Z."""
    monkeypatch.setattr(multiview.MultiviewSettings, "tolerance", 1e-300)
    monkeypatch.setattr(multiview.MultiviewSettings, "max_rounds", ROUNDS)
    said = {"rounds": 2, "local_epochs": 2, "learning_rate": 0.02, "dropout": 0.0}
    method = {"name": "v_fedmv", "beta": 0.5, "zeta": 3.0, "eta": 5.0, **said}
    data = vertical_data()
    session = open_session(vertical_config(method), data)
    active: Any = session.active_role
    trainers = trainers_of(session)
    grus = {
        name: plain_gru(session, name, of.sequence.recurrent, 0.02, 2)
        for name, of in trainers.items()
    }
    tables = dict(zip(PARTIES, data.tables, strict=True))
    rows = active.training_rows.numpy()
    people = {name: of.sequence._rows_N[rows] for name, of in trainers.items()}
    weights = {name: of.view.weights_FC.copy() for name, of in trainers.items()}
    own = {name: of.view.labels_NC[rows].copy() for name, of in trainers.items()}
    common = active.trainer.common_NC[rows].copy()
    labelled_N = np.isin(people["active"].numpy(), data.labelled_rows.numpy())[:, None]
    truth = np.eye(2)[data.active.labels[people["active"]].numpy()] * labelled_N  # type: ignore[index]

    for step in range(4):
        for name, sequence in zip(PARTIES, SEQUENCES.values(), strict=True):
            flat_NF = tables[name].features
            if 0 < step <= 2:
                order = people[name].argsort()
                learnt = people[name][order]
                shares = torch.from_numpy(common).clamp(min=0)[order]
                if name == "active":
                    learnt = data.labelled_rows
                    shares = torch.eye(2).double()[data.active.labels[learnt]]  # type: ignore[index]
                grus[name].train([flat_NF[learnt]], [sequence], shares, step)
            x = grus[name].states(flat_NF[people[name]], sequence).detach().numpy()
            for _ in range(ROUNDS):  # Eqs. 5 and 6
                norms = np.sqrt((weights[name] ** 2).sum(1)) + 1e-10
                ridge = 0.5 * np.diag(1 / (2 * norms))
                weights[name] = np.linalg.solve(x.T @ x + ridge, x.T @ own[name])
            own[name] = (x @ weights[name] + 3 * common) / 4  # Eq. 8
        pull = 5.0 * labelled_N
        common = (3 * sum(own.values()) + pull * truth) / (9 + pull)  # Eq. 10
        session.train_step(step, active.training_rows)

        np.testing.assert_allclose(active.trainer.common_NC[rows], common, atol=1e-7)
        for name, of in trainers.items():
            np.testing.assert_allclose(of.view.weights_FC, weights[name], atol=1e-6)
            for key, value in of.sequence.recurrent.tensors().items():
                np.testing.assert_allclose(value, grus[name].weights[key].detach(), atol=1e-9)
    local_models = active.get_active_networks()(
        data.active.features[people["active"]].double(), None
    )[0]
    last = grus["active"].states(data.active.features[people["active"]], SEQUENCES["alphanum"])
    np.testing.assert_allclose(
        local_models.detach(), last.detach().numpy() @ weights["active"], atol=1e-6
    )


def stages_of(session: Simulation) -> dict[str, Any]:
    learner: Any = session.active_role
    helpers: dict[str, Any] = dict(session.helpers)
    return {"active": learner.stages} | {name: helpers[name].stages for name in PARTIES[1:]}


def test_h_fedmv_averages_weights_of_states_of_own_grus() -> None:
    """FedMV's baseline: no party's GRU is another's, and weights of their states are averaged."""
    said = {"rounds": 2, "local_epochs": 1, "learning_rate": 0.02, "dropout": 0.0}
    apart = {"accel": {"zeta": 2.0, "beta": 0.25}, "special": {"zeta": 30.0}}
    data = horizontal_data()
    session = open_session(horizontal_config({"name": "h_fedmv", "views": apart, **said}), data)
    stages = stages_of(session)
    sequences = [*SEQUENCES.values()]
    seen: dict[str, list[Tensor]] = {}
    for (name, of), own in zip(stages.items(), data.tables, strict=True):
        gru = plain_gru(session, name, of.recurrent, 0.02, 2)
        rows_N = torch.arange(PEOPLE if name != "active" else TRAINED)
        parts = own.features[rows_N].split([1 + t * c for t, c in sequences], dim=1)
        gru.train(parts, sequences, torch.eye(2).double()[own.labels[rows_N]], 0)  # type: ignore[index]
        seen[name] = [
            gru.states(part, sequence, place)
            for place, (part, sequence) in enumerate(zip(parts, sequences, strict=True))
        ]
    before = {name: of.recurrent.weights.copy() for name, of in stages.items()}
    session.train_step(0, session.active_role.training_rows)
    for name, of in stages.items():
        assert not np.array_equal(of.recurrent.weights, before[name])
        assert [view.zeta for view in of.views.views] == [8.0, 30.0, 2.0]
        assert [view.beta for view in of.views.views] == [4.0, 4.0, 0.25]
        for view, states_ND in zip(of.views.views, seen[name], strict=True):
            np.testing.assert_allclose(view.x_NF, states_ND.detach(), atol=1e-8)
    learnt = {name: of.recurrent.weights.copy() for name, of in stages.items()}
    session.train_step(1, session.active_role.training_rows)
    for name, of in stages.items():
        np.testing.assert_array_equal(of.recurrent.weights, learnt[name])


def test_a_view_counts_by_its_own_zeta_where_all_views_predict() -> None:
    rng = np.random.default_rng(0)
    models = [
        multiview.ViewModel.from_features(rng.standard_normal((9, 2)), 2, rng, beta=1.0, zeta=zeta)
        for zeta in (1.0, 3.0)
    ]
    pull = multiview.LabelTerm(np.zeros((9, 2)), np.zeros((9, 1)))
    head = LinearViews(models, pull, tolerance=1e-6, rounds=1).head.numpy()
    z = np.zeros((9, 2))
    scores = [view.x_NF @ view.weights_FC for view in models]
    for _ in range(500):  # Eqs. 18 and 19
        each = [(s + zeta * z) / (1 + zeta) for s, zeta in zip(scores, (1.0, 3.0), strict=True)]
        z = (each[0] + 3 * each[1]) / 4
    both = np.concatenate([view.x_NF for view in models], axis=1)
    np.testing.assert_allclose(both @ head.T, z, atol=1e-9)


IDENTITY = {"network": "identity"}


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ({"name": "v_fedmv", "rounds": 5}, {"model": IDENTITY}, "method.rounds: it is of GRUs"),
        ({"name": "v_fedmv", "local_epochs": 5}, {"model": IDENTITY}, "method.local_epochs: it"),
        ({"name": "h_fedmv", "local_epochs": 5}, {"model": IDENTITY}, "method.local_epochs: it"),
        ({"name": "h_fedmv", "dropout": 0.3}, {"model": IDENTITY}, "method.dropout: it is of GRUs"),
        ({"name": "h_fedmv", "learning_rate": 1.0}, {"model": IDENTITY}, "leave learning_rate out"),
        ({"name": "h_fedmv", "dropout": 1.0}, {}, "less than 1"),
        ({"name": "v_fedmv", "learning_rate": 0.0}, {}, "greater than 0"),
        ({"name": "h_fedmv", "views": {"accel": {"zeta": 0.0}}}, {}, "greater than 0"),
        ({"name": "h_fedmv", "views": {"accel": {"eta": 1.0}}}, {}, "'beta' or 'zeta'"),
        ({"name": "v_fedmv"}, {"model": {"network": "mlp"}}, "takes identity or gru, got mlp"),
        (
            {"name": "v_fedmv"},
            {"passives": {"passive-1": {"model": {"network": "mlp"}}}},
            "passives.passive-1.model.network: method v_fedmv takes identity or gru",
        ),
        ({"name": "s_fedmv"}, {"model": IDENTITY}, "takes gru, got identity"),
        ({"name": "mmvfl"}, {}, "takes identity, got gru"),
    ],
)
def test_settings_that_nothing_can_read_are_refused(
    method: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(method, [(5, 2)], **changes)


@pytest.mark.parametrize("method", ["h_fedmv", "s_fedmv"])
def test_weights_of_views_that_are_not_there_are_refused(method: str) -> None:
    config = horizontal_config({"name": method, "views": {"gps": {"zeta": 2.0}}})
    said = "method.views.gps: no view has that name; there are alphanum, special, accel"
    with pytest.raises(ConfigError, match=said):
        open_session(config, horizontal_data())


@pytest.mark.parametrize(
    ("sequences", "passives", "error", "said"),
    [
        ([(5, 3)], {}, ModelError, "active, by model: model.sequences"),
        ([(5, 2), (4, 3)], {}, ConfigError, "model.sequences: .* one view, got 2 for active"),
        (
            [(5, 2)],
            {"passive-2": {"model": {"network": "gru", "sequences": [(7, 1)]}}},
            ModelError,
            "passive-2, by passives.passive-2.model: model.sequences",
        ),
    ],
)
def test_a_party_whose_sequences_are_others_does_not_begin(
    sequences: Any, passives: Any, error: type[Exception], said: str
) -> None:
    config = config_of("v_fedmv", sequences, passives=passives)
    with pytest.raises(error, match=said):
        open_session(config, vertical_data())


@pytest.mark.parametrize("method", ["h_fedmv", "s_fedmv"])
def test_sequences_in_another_order_are_refused(method: str) -> None:
    config = config_of(method, [(4, 3), (5, 2), (6, 1)])
    with pytest.raises(ConfigError, match=r"in this order, got \[4, 3\], \[5, 2\]"):
        open_session(config, horizontal_data())


RAGGED = torch.tensor([[2.0, 1.0, 2.0, 0.0], [3.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("row", "column", "value", "said"),
    [
        (0, 0, 2.5, "bank: sequence 1 of .* whole number, got 2.5 in row 1"),
        (1, 0, 4.0, "got 4 in row 2; pad shorter .* data.view_columns"),
        (2, 0, -1.0, "got -1 in row 3"),
        (0, 0, float("nan"), "got nan in row 1"),
        (1, 3, float("nan"), "finite numbers in the steps in use, got others in row 2"),
        (0, 1, float("inf"), "finite numbers .* row 1"),
        (0, 3, float("nan"), None),  # behind the last step in use
    ],
)
def test_ragged_rows_are_sequences_and_others_are_refused(
    row: int, column: int, value: float, said: str | None
) -> None:
    rows_NF = RAGGED.clone()
    rows_NF[row, column] = value
    if said is None:
        require_sequences(rows_NF, ((3, 1),), owner="bank")
        return
    with pytest.raises(DataError, match=said):
        require_sequences(rows_NF, ((3, 1),), owner="bank")


@pytest.mark.parametrize("party", PARTIES)
def test_whose_rows_are_no_sequences_is_named(party: str) -> None:
    data = vertical_data()
    dict(zip(PARTIES, data.tables, strict=True))[party].features[3, 0] = 1.5
    with pytest.raises(DataError, match=f"{party}: sequence 1 of .* got 1.5 in row 4"):
        open_session(vertical_config(), data)


def test_a_passive_may_have_plain_features_beside_sequences() -> None:
    plain = {"passive-1": {"model": IDENTITY}}
    session = open_session(vertical_config(passives=plain), vertical_data())
    trainers = trainers_of(session)
    assert trainers["passive-1"].sequence is None
    assert trainers["passive-2"].sequence is not None
    session.train_step(0, session.active_role.training_rows)
    learner: Any = session.active_role
    assert learner.feature_scores() is None
    assert trainers["passive-1"].feature_scores().shape == (13,)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", usable_secure_sums())
@pytest.mark.parametrize("method", ["v_fedmv", "h_fedmv"])
def test_every_sum_carries_what_grus_make(method: str, name: str) -> None:
    make, data = {
        "v_fedmv": (vertical_config, vertical_data()),
        "h_fedmv": (horizontal_config, horizontal_data()),
    }[method]
    said = {"name": method, "rounds": 1}
    found = []
    for sums in (CLEAR, {**pair_of(name), "clip": 64.0, "bits": 24}):
        session = open_session(make(said, secure_sum=sums), data)
        for step in range(2):
            session.train_step(step, session.active_role.training_rows)
        learner: Any = session.active_role
        found.append(learner.head.numpy())
    clear, protected = found
    np.testing.assert_allclose(protected, clear, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["v_fedmv", "h_fedmv"])
def test_a_run_that_was_broken_off_goes_on_and_gives_the_same(method: str, tmp_path: Path) -> None:
    apart = {"partition": "horizontal", "clients": 3} if method == "h_fedmv" else {}
    every = [(100, 4), (100, 6), (100, 3)]
    config = config_of(
        {"name": method, "rounds": 2},
        every if method == "h_fedmv" else every[:1],
        data={"dataset": "synthetic_keystrokes", "rows": 24, **apart},
        train={"epochs": 4, "device": "cpu"},
    )
    whole = run(config, tmp_path / "whole")
    interrupt_run(config, tmp_path / "broken", at_step=2)
    again = run(config, tmp_path / "broken", resume=True)
    assert again.accuracy == whole.accuracy
    models = [load_model(tmp_path / name).network.state_dict() for name in ("whole", "broken")]
    pairs = zip(*(model.values() for model in models), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize(("network", "low", "high"), [("gru", 0.85, 1.0), ("identity", 0.0, 0.7)])
def test_grus_learn_what_no_weights_of_columns_can(network: str, low: float, high: float) -> None:
    """All parties together, of sequences of whose single numbers none says anything."""
    sequences = [SEQUENCES["alphanum"]] if network == "gru" else []
    of_gru = {"learning_rate": 0.03, "local_epochs": 3} if network == "gru" else {}
    model = {"network": network, "sequences": sequences, "representation": 8}
    config = config_of(
        {"name": "v_fedmv", **of_gru}, model=model, train={"epochs": 12, "device": "cpu"}
    )
    data = vertical_data(people=160, trained=110)
    session = open_session(config, data)
    for step in range(12):
        session.train_step(step, session.active_role.training_rows)
    accuracy = session.evaluate(next_step=12, is_final=True)
    assert low <= float(accuracy["v_fedmv_together"]) <= high
