"""VFedTrans: five exchanges open the vectors of all tables, and a student of the active's alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.alignment import DEALER
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def config_of(vectors: int = 8, said: Mapping[str, Any] = {}, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "breast_cancer", "overlap": 0.6},
        "model": {"network": "enriched", "hidden": [16], "representation": vectors},
        "train": {"epochs": 1, "device": "cpu"},
    }
    method = {"name": "vfedtrans", "epochs": 8, "batch_size": 32, "loss": "mae", **said}
    return small_config(method, **{**usual, **changes})


def session_of(**changes: Any) -> Simulation:
    config = config_of(**changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def taught(session: Simulation) -> Any:
    """The active's role, once it read the vectors."""
    learner: Any = session.learner

    class Course:
        next_step = 0

        def stepped(self, loss: float | None) -> None: ...

    session.play(learner.teach(session.links, Course()))
    return learner


def whole_table(session: Simulation, data: VerticalData) -> np.ndarray:
    """All parties' columns of the aligned training rows, in the order of the active's table."""
    aligned = session.alignment["active"]
    parts = []
    for table in data.tables:
        own = session.alignment[table.name]
        at = dict(zip(aligned.tolist(), own.tolist(), strict=True))
        rows = [at[row] for row in session.learner.training_rows.tolist()]
        parts.append(table.features[rows].flatten(1).double().numpy())
    return np.hstack(parts)


@pytest.mark.parametrize("mask_rows", [16, 8192])
@pytest.mark.parametrize("data", [
    {"dataset": "digits", "views": 2, "limit": 300}, {"dataset": "breast_cancer", "overlap": 0.6},
    {"dataset": "digits", "views": 4, "limit": 300},
])  # fmt: skip
def test_the_vectors_are_those_of_all_tables(data: dict[str, Any], mask_rows: int) -> None:
    session = session_of(data=data, said={"mask_rows": mask_rows})
    found = taught(session).opened.numpy()
    config = config_of(data=data)
    whole = whole_table(session, load_data(config.data, seed=config.seed))
    expected = np.linalg.svd(whole, full_matrices=False)[0][:, :8]
    assert np.abs(np.abs((found * expected).sum(axis=0)) - 1).max() < 1e-8


def test_nothing_but_the_papers_exchanges_leaves() -> None:
    result = run(config_of(), None)
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


def test_the_code_is_drawn_to_the_vectors() -> None:
    apart = []
    for weight in (0.0, 1.0):
        session = session_of(said={"epochs": 60, "loss": "mse", "weight": weight})
        learner = taught(session)
        rows, encoder = learner.training_rows, learner.student.networks.encoder
        codes = encoder.code(learner.student.features_N[rows]).double()
        wanted = learner.opened * len(rows) ** 0.5
        apart.append(float((codes - wanted).square().mean()))
    assert apart[1] < 0.7 * apart[0]


def test_a_broken_run_goes_on_and_counts_the_same_rows_once(tmp_path: Path) -> None:
    whole = run(config_of(rules={"spare_answers": 0}), tmp_path / "whole")
    interrupted(config_of(rules={"spare_answers": 0}), tmp_path / "run", at_step=1)
    resumed = run(config_of(rules={"spare_answers": 0}), tmp_path / "run", resume=True)
    assert resumed.accuracy == whole.accuracy
    (log,) = (tmp_path / "run").rglob("answers-passive-1.jsonl")
    assert len(log.read_text(encoding="utf-8").splitlines()) == 2  # what it counts, and one answer


def test_a_second_request_in_a_session_is_refused() -> None:
    session = session_of()
    taught(session)
    session.links.send("passive-1", Kind.REQUEST, 1, b"")
    with pytest.raises(RemoteProtocolError, match="asks passive-1 for rows to decompose once more"):
        session.play(session.links.receive("passive-1", Kind.SAVED))


def test_other_rows_in_another_session_count_anew(tmp_path: Path) -> None:
    config = config_of(rules={"spare_answers": 1})
    data = load_data(config.data, seed=config.seed)
    first = open_session(config, data, logs=tmp_path)
    taught(first)
    for at in range(2):
        session = open_session(config, data, alignment=first.alignment, logs=tmp_path)
        learner: Any = session.learner
        learner.training_rows = learner.student.rows_U = learner.training_rows[at + 1 :]
        if at == 0:
            taught(session)
            continue
        with pytest.raises(RemoteProtocolError, match="more than 2 times"):
            taught(session)


@pytest.mark.parametrize("twice", ["passive-1", "active"])
def test_the_aggregator_decomposes_once(twice: str) -> None:
    session = session_of()
    taught(session)
    session.network.links[twice].send(AGGREGATOR, Kind.CONTRIBUTION, 1, b"")
    with pytest.raises(RemoteProtocolError, match=f"{twice} sent a table twice"):
        session.play(session.links.receive(AGGREGATOR, Kind.SAVED))


def test_only_the_active_ends_a_session() -> None:
    session = session_of()
    session.network.links["passive-1"].send(AGGREGATOR, Kind.END, 0)
    with pytest.raises(RemoteProtocolError, match="passive-1 may send no end"):
        taught(session)


def test_more_vectors_than_features_or_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="31 singular vectors of 30 features"):
        session_of(vectors=31)
    few = {"dataset": "digits", "views": 2, "limit": 40, "overlap": 0.6}
    with pytest.raises(ConfigError, match="fewer than the smallest batch of 64"):
        run(config_of(vectors=64, data=few), None)


def test_a_plan_forecasts_the_bytes_that_are_sent() -> None:
    config = config_of(
        vectors=30, train={"epochs": 1, "batch_size": 8, "device": "cpu"},
        transcript={"keep": "none"},
    )  # fmt: skip
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
