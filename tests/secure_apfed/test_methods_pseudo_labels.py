"""MMVFL and V-FedMV by parties: the same as on one table, and nobody's pseudo-labels shown."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.exchange import Kind, Links, pack
from secure_apfed.learning.multiview import Pull, ViewModel, iterate, joint_scores
from secure_apfed.methods import METHODS, Simulation, open_session
from secure_apfed.methods.pseudo_labels import PseudoLabelLearner
from secure_apfed.runs import run
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")

METHODS_OF_VIEWS = [
    name for name, method in METHODS.items() if method.facts.averages == "pseudo-labels"
]
CLEAR = {"scheme": "plain", "masks": "none", "clip": None}


def config_of(method: str, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "breast_cancer", "overlap": 0.8, "limit": 120},
        "train": {"epochs": 3, "device": "cpu", "precision": "float64"},
        "secure_sum": CLEAR,
    }
    return small_config(method, **{**usual, **changes})


def session_of(method: str, **changes: Any) -> Simulation:
    config = config_of(method, **changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def copies(session: Simulation) -> tuple[list[ViewModel], Any]:
    """Every party's view, the active's first, and the active."""
    helpers: list[Any] = [one for one in session.helpers.values() if one.name != "aggregator"]
    active: Any = session.learner
    views = [active.party.view, *(one.party.view for one in helpers)]
    rows = active.training_rows.numpy()
    return [
        ViewModel(
            x_NF=one.x_NF[rows],
            beta=one.beta,
            zeta=one.zeta,
            weights_FC=one.weights_FC.copy(),
            labels_NC=one.labels_NC[rows].copy(),
            tolerance=one.tolerance,
            most_rounds=one.most_rounds,
        )
        for one in views
    ], active


@pytest.mark.parametrize("labelled", [None, 20])
@pytest.mark.parametrize("method", METHODS_OF_VIEWS)
def test_it_is_multi_view_learning_on_one_table(method: str, labelled: int | None) -> None:
    data = {"dataset": "breast_cancer", "overlap": 0.8, "limit": 120, "labelled": labelled}
    session = session_of(method, data=data)
    views, active = copies(session)
    rows, party = active.training_rows, active.party
    pull: Pull = party._pull
    pooled = Pull(pull.truth_NC[rows.numpy()], pull.eta_N1[rows.numpy()], pull.own)
    aligned = torch.isin(active._own.labelled_rows, active._aligned).sum()
    assert (pooled.eta_N1 > 0).sum() == aligned
    assert (int(aligned) < len(rows)) is (labelled is not None)
    common = party.common_NC[rows.numpy()].copy()
    for step in range(3):
        session.step(step, rows)
        common = iterate(views, common, pooled)
    np.testing.assert_allclose(party.common_NC[rows.numpy()], common, atol=1e-10)
    np.testing.assert_allclose(party.view.weights_FC, views[0].weights_FC, atol=1e-10)

    accuracy = session.evaluate(next_step=3, final=True)
    asked = active._test_positions
    others: list[Any] = [one for one in session.helpers.values() if one.name != "aggregator"]
    for view, one in zip(views, [active, *others], strict=True):
        view.x_NF = one.party.view.x_NF[asked.numpy()]
    found = joint_scores(views, np.arange(len(asked))).argmax(1)
    labels_N = active._own.rows.labels[active._aligned[asked]].numpy()
    assert accuracy[f"{method}_together"] == pytest.approx((found == labels_N).mean())


@pytest.mark.parametrize("scheme", ["masked", "ckks"])
def test_a_secure_sum_changes_nothing_beyond_its_rounding(scheme: str) -> None:
    masks = {"scheme": "plain", "masks": "pairwise"} if scheme == "masked" else {"scheme": scheme}
    plain, secure = (
        session_of("v_fedmv", secure_sum=said) for said in (CLEAR, {**masks, "clip": 4.0})
    )
    rounding = secure.learner.rounding
    assert rounding is not None
    for step in range(2):
        for session in (plain, secure):
            session.step(step, session.learner.training_rows)
    ones: Any = [one.learner for one in (plain, secure)]
    first, second = (one.party.common_NC[one.training_rows.numpy()] for one in ones)
    # The sum is of zeta_k Z_k / zetas, and Z gets at most 1 of it; two rounds add up.
    assert np.abs(first - second).max() < 10 * rounding


def test_the_model_alone_is_the_active_s_own_view(tmp_path: Path) -> None:
    result = run(config_of("mmvfl"), tmp_path / "run")
    assert result.accuracy["mmvfl"] > 0.8
    assert result.accuracy["mmvfl_together"] > 0.9


@pytest.mark.parametrize("method", METHODS_OF_VIEWS)
def test_a_stopped_run_goes_on_bit_for_bit(method: str, tmp_path: Path) -> None:
    config = config_of(method, train={"epochs": 4, "device": "cpu"})
    whole = run(config, tmp_path / "whole")
    interrupted(config, tmp_path / "parts", at_step=3)
    assert run(config, tmp_path / "parts", resume=True).accuracy == whole.accuracy


def test_the_active_reads_labels_of_passives_out_of_the_sum() -> None:
    """As the who-learns table says: no sum hides whom a passive has a label of, and which."""
    data = {"dataset": "digits", "views": 4, "limit": 200, "labelled": 20,
            "labels_at": ["passive-1"]}  # fmt: skip
    masked = {"scheme": "plain", "masks": "pairwise", "clip": 4.0}
    session = session_of("mmvfl", data=data, secure_sum=masked)
    active, holder = session.learner, session.helpers["passive-1"]
    assert isinstance(active, PseudoLabelLearner)
    rows = active.training_rows.numpy()
    asked = active.party.common_NC[rows].copy()
    session.step(0, active.training_rows)
    assert active.opened is not None
    moved = active.opened.numpy() - 0.75 * asked  # the three passives' equal shares of Z
    pull: Pull = holder.party._pull  # type: ignore[attr-defined]
    told = pull.eta_N1[rows, 0] > 0
    assert 0 < told.sum() < len(rows) / 2
    lengths = np.linalg.norm(moved, axis=1)
    assert lengths[told].min() > lengths[~told].max()
    assert (moved.argmax(1) == pull.truth_NC[rows].argmax(1))[told].all()


@pytest.mark.parametrize("method", METHODS_OF_VIEWS)
def test_fewer_people_than_classes_are_learnt_from(method: str) -> None:
    data = {"dataset": "digits", "views": 3, "aligned": 5, "limit": 200}
    assert run(config_of(method, data=data), None).accuracy[method] > 0


def asked(session: Simulation, request: bytes, step: int = 0) -> None:
    async def ask(links: Links) -> None:
        for name in session.contract.passives:
            links.send(name, Kind.REQUEST, step, request)
        await links.receive("aggregator", Kind.SUM, step=step, patience=4)

    session.play(ask(session.links))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows, z: {"rows": rows, "z": z[:, :1]}, "expected torch.float64"),
        (lambda rows, z: {"rows": rows, "z": z.float()}, "expected torch.float64"),
        (lambda rows, z: {"rows": rows, "z": z[1:]}, "rows of z"),
        (lambda rows, z: {"rows": rows, "z": z * float("nan")}, "norm is not within"),
        (lambda rows, z: {"rows": rows, "z": z + 1e9}, "norm is not within"),
        (lambda rows, z: {"rows": rows[:1], "z": z[:1]}, "at least"),
        (lambda rows, z: {"rows": rows * 0, "z": z}, "repeated a row"),
        (lambda rows, z: {"rows": rows + 10**6, "z": z}, "outside the alignment"),
        (lambda rows, z: {"z": z}, "sent the tensors"),
    ],
)
def test_a_hostile_request_is_refused(change: Any, said: str) -> None:
    session = session_of("mmvfl")
    active: Any = session.learner
    rows = active.training_rows
    z = torch.from_numpy(active.party.common_NC[rows.numpy()])
    with pytest.raises(RemoteProtocolError, match=said):
        asked(session, pack(change(rows, z), {}))


def test_a_passive_answers_as_often_as_agreed() -> None:
    session = session_of("mmvfl")
    active: Any = session.learner
    request = active.party.request(active.training_rows)
    agreed = session.contract.epochs + session.contract.spare_answers + 1  # and one question
    for step in range(agreed):
        asked(session, request, step)
    with pytest.raises(RemoteProtocolError, match=f"more than {agreed} times"):
        asked(session, request, agreed)


def test_a_sum_that_would_cut_rows_is_refused() -> None:
    cut = {"scheme": "plain", "masks": "pairwise", "clip": 1e-4}
    session = session_of("v_fedmv", secure_sum=cut)
    with pytest.raises(LocalProtocolError, match="agree on a clip above"):
        session.step(0, session.learner.training_rows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"network": "mlp"}}, "takes identity"),
        ({"guard": {"mechanism": "gaussian", "epsilon": 8.0}}, "no noise of a guard"),
        ({"secure_sum": {**CLEAR, "clip": 1.0, "noise": {"epsilon": 8.0}}}, "secure_sum.noise"),
        ({"labels": {"mechanism": "lp_mst", "epsilon": 2.0}}, "lp_mst"),
        ({"train": {"spread_labels": True}}, "spread_labels"),
        ({"defences": [{"kind": "max_norm"}]}, "max_norm"),
    ],
)
def test_settings_that_do_nothing_here_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of("mmvfl", **changes)


def test_settings_of_multi_view_learning_go_with_it() -> None:
    with pytest.raises(ValidationError, match="agree on no pseudo-labels"):
        small_config("apfed_c", multiview={"beta": 2.0})
