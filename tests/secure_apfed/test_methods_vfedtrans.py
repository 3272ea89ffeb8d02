"""VFedTrans: five exchanges open the vectors of all tables, and a student of the active's alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.svd import SvdAgreement, SvdFrames
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind, Links
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.alignment import DEALER
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.secure_apfed.small_runs import Said, interrupted, small_config
from tests.secure_apfed.test_methods_votes_encrypted import altered

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


def test_the_student_predicts_alone_from_its_features_and_a_code(tmp_path: Path) -> None:
    config = config_of()
    result = run(config, tmp_path / "run")
    assert result.accuracy["vfedtrans"] > 0.85
    data, model = load_data(config.data, seed=config.seed), load_model(tmp_path / "run")
    assert data.active.labels is not None
    guessed = model.predict(data.active.features[data.test_rows]).argmax(dim=1)
    right = float((guessed == data.active.labels[data.test_rows]).double().mean())
    assert right == result.accuracy["vfedtrans"]
    width = model.network[0](data.active.features[:2]).shape[1]  # type: ignore[index]
    assert width == data.active.features.shape[1] + 8


def test_fresh_masks_change_no_figure() -> None:
    first, second = (run(config_of(), None).recording.model for _ in range(2))
    assert first is not None
    assert second is not None
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


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


@pytest.mark.parametrize(
    "cut", [lambda body: body[:-1], lambda body: b"", lambda body: body + b"x"]
)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind.DEALT, "dealer"),
        (Kind.REQUEST, "active"),
        (Kind.CONTRIBUTION, "active|passive-1|passive-2"),
        (Kind.SINGULAR_VECTORS, "aggregator"),
    ],
)
def test_messages_that_are_none_are_refused(
    kind: Kind, said: str, cut: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, kind, cut)
    with pytest.raises(RemoteProtocolError, match=said):
        taught(session_of())


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


@pytest.mark.parametrize(("who", "kind"), [("passive-2", Kind.CONTRIBUTION), (DEALER, Kind.DEALT)])
def test_who_falls_silent_is_named(who: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Links.send

    def silent(self: Links, to: str, what: Kind, step: int, payload: bytes = b"") -> None:
        if not (what is kind and self.me == who):
            send(self, to, what, step, payload)

    monkeypatch.setattr(Links, "send", silent)
    with pytest.raises(PartyLeftError, match=who):
        taught(session_of())


def test_more_vectors_than_features_or_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="31 singular vectors of 30 features"):
        session_of(vectors=31)
    few = {"dataset": "digits", "views": 2, "limit": 40, "overlap": 0.6}
    with pytest.raises(ConfigError, match="fewer than the smallest batch of 64"):
        run(config_of(vectors=64, data=few), None)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("vfedtrans", {"guard": {"mechanism": "gaussian", "epsilon": 1.0}}, "adds no noise to"),
        ("vfedtrans", {"model": {"network": "selu"}}, "use enriched"),
        ("vfedtrans", {"model": {"network": "enriched", "head": [4]}}, r"without model\.head"),
        ("vfedtrans", {"alignment": {"mode": "pairwise"}}, "needs all passives for every row"),
        ({"name": "vfedtrans", "mask_rows": 1}, {}, "greater than or equal to 2"),
        ("apc_vfl", {"model": {"network": "enriched"}}, "use selu or linear"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    method: Said, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        small_config(method, **changes)


@pytest.mark.parametrize("batch_size", [8, 128])
def test_a_plan_forecasts_the_bytes_that_are_sent(batch_size: int) -> None:
    config = config_of(
        vectors=30, train={"epochs": 1, "batch_size": batch_size, "device": "cpu"},
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


def test_frames_are_as_long_as_the_protocol_says() -> None:
    result = run(config_of(), None)
    agreed = SvdAgreement(
        session="s", server=AGGREGATOR, dealer=DEALER, owners=("active", "passive-1", "passive-2"),
        features=(10, 10, 10), receiver="active", vectors=8, mask_rows=1024, most_rows=1000,
    )  # fmt: skip
    sizes: dict[Kind, int] = {}
    for flow in result.recording.transcript.flows:
        sizes[flow.kind] = sizes.get(flow.kind, 0) + flow.payload_bytes
    rows = (sizes[Kind.SINGULAR_VECTORS] - 72) // 64
    lengths = SvdFrames(agreed).lengths(rows)
    assert sizes[Kind.DEALT] == lengths["MASKS"]
    assert sizes[Kind.CONTRIBUTION] == lengths["TABLE"]
    assert sizes[Kind.SINGULAR_VECTORS] == lengths["VECTORS"]
