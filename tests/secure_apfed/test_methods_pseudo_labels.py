"""MMVFL and V-FedMV by parties: the same as on one table, and nobody's pseudo-labels shown."""

from typing import Any

import numpy as np
import pytest
import torch

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.exchange import Kind, Links, pack
from secure_apfed.methods import METHODS, Simulation, open_session
from secure_apfed.methods.multiview import MultiviewActive, MultiviewSettings, Pull
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import Said, small_config
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

METHODS_OF_VIEWS = [
    name for name, method in METHODS.items() if method.settings.averages == "pseudo-labels"
]
ROUNDS = 6
CLEAR = {"scheme": "plain", "masks": "none", "clip": None}


def config_of(method: Said, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "breast_cancer", "overlap": 0.8, "limit": 120},
        "train": {"epochs": 3, "device": "cpu", "precision": "float64"},
        "secure_sum": CLEAR,
    }
    return small_config(method, **{**usual, **changes})


def session_of(method: Said, **changes: Any) -> Simulation:
    config = config_of(method, **changes)
    return open_session(config, load_data(config.data, seed=config.seed))


def trainers_of(session: Simulation) -> list[Any]:
    """Of the active, and of the passives in the contract's order."""
    seats: list[Any] = [
        session.learner,
        *(session.helpers[name] for name in session.contract.passives),
    ]
    return [seat.trainer for seat in seats]


class Paper:
    """Both papers' equations in numpy, on one table.

    It knows nothing of the product but the parties' rows and random starts.
    """

    def __init__(
        self, session: Simulation, *, zetas: list[float], eta: float, beta: float, own: bool
    ) -> None:
        active: Any = session.learner
        trainers = trainers_of(session)
        self.rows, self.asked = active.training_rows.numpy(), active.tested.numpy()
        self.beta, self.zeta, self.own = beta, np.array(zetas), own
        self.views = [one.view.x_NF.copy() for one in trainers]
        self.w = [one.view.weights_FC.copy() for one in trainers]
        self.z_k = [one.view.labels_NC[self.rows].copy() for one in trainers]
        self.z = active.trainer.common_NC[self.rows].copy()
        people = active._rows[active.training_rows]
        told = np.isin(people.numpy(), active._own.data.labelled_rows.numpy())
        labels = active._own.data.table.labels[people].numpy()
        self.y = np.eye(self.z.shape[1])[np.where(told, labels, 0)] * told[:, None]
        self.pull = eta * told[:, None]

    def step(self) -> None:
        for k, zeta in enumerate(self.zeta):
            x = self.views[k][self.rows]
            for _ in range(ROUNDS):  # Eqs. 7 and 8 of MMVFL
                a = np.diag(1 / (2 * (np.sqrt((self.w[k] ** 2).sum(1)) + 1e-10)))
                self.w[k] = np.linalg.solve(x.T @ x + self.beta * a, x.T @ self.z_k[k])
            drawn = self.pull if self.own and k == 0 else 0.0  # Eq. 11, or 12; FedMV's 8
            said = x @ self.w[k] + zeta * self.z + drawn * self.y
            self.z_k[k] = said / (1 + zeta + drawn)
        drawn = 0.0 if self.own else self.pull  # Eq. 14; FedMV's 10
        said = sum(zeta * one for zeta, one in zip(self.zeta, self.z_k, strict=True))
        self.z = (said + drawn * self.y) / (self.zeta.sum() + drawn)

    def together(self) -> np.ndarray:
        """FedMV's Eqs. 12 and 13 for the test rows, as often as it takes."""
        scores = [x[self.asked] @ w for x, w in zip(self.views, self.w, strict=True)]
        z: np.ndarray = np.zeros_like(scores[0])
        for _ in range(3000):
            each = [(s + zeta * z) / (1 + zeta) for s, zeta in zip(scores, self.zeta, strict=True)]
            z = np.tensordot(self.zeta, each, 1) / self.zeta.sum()
        return z


@pytest.mark.parametrize(
    ("name", "labelled"), [("plain + pairwise masks", 20), ("plain, any length", None)]
)
@pytest.mark.parametrize("method", METHODS_OF_VIEWS)
def test_parties_compute_what_the_papers_say(
    method: str, name: str, labelled: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights other than 1."""
    monkeypatch.setattr(MultiviewSettings, "tolerance", 1e-300)
    monkeypatch.setattr(MultiviewSettings, "most_rounds", ROUNDS)
    secure_sum = (
        CLEAR if name == "plain, any length" else {**pair_of(name), "clip": 4.0, "bits": 24}
    )
    session = session_of(
        {"name": method, "beta": 2.0, "zeta": 4.0, "eta": 6.0},
        data={"dataset": "digits", "views": 3, "limit": 160, "labelled": labelled},
        secure_sum=secure_sum,
        passives={"default": {"weight": 3.0}, "passive-2": {"weight": 0.25}},
    )  # fmt: skip
    active = session.learner
    assert isinstance(active, MultiviewActive)
    assert list(session.contract.passives) == ["passive-1", "passive-2"]
    own = method == "mmvfl"
    paper = Paper(session, zetas=[4.0, 12.0, 1.0], eta=6.0, beta=2.0, own=own)
    assert (paper.pull > 0).sum() < len(paper.rows) or labelled is None
    for step in range(3):
        session.step(step, active.training_rows)
        paper.step()
    # The sum is of zeta_k Z_k / zetas, and Z gets at most 1 of it; rounds add up.
    apart = 1e-9 + 20 * (active.rounding or 0.0)
    assert apart < 1e-4
    np.testing.assert_allclose(active.trainer.common_NC[paper.rows], paper.z, atol=apart)
    for trainer, z_k, w in zip(trainers_of(session), paper.z_k, paper.w, strict=True):
        np.testing.assert_allclose(trainer.view.labels_NC[paper.rows], z_k, atol=apart)
        np.testing.assert_allclose(trainer.view.weights_FC, w, atol=apart)

    accuracy = session.evaluate(next_step=3, final=True)[f"{method}_together"]
    truth = active._own.data.table.labels[active._rows[active.tested]].numpy()  # type: ignore[index]
    assert float(accuracy) == pytest.approx((paper.together().argmax(1) == truth).mean())


def test_the_active_reads_labels_of_passives_out_of_the_sum() -> None:
    """As the who-learns table says: no sum hides whom a passive has a label of, and which."""
    data = {"dataset": "digits", "views": 4, "limit": 200, "labelled": 20,
            "labels_at": ["passive-1"]}  # fmt: skip
    masked = {"scheme": "plain", "masks": "pairwise", "clip": 4.0}
    session = session_of("mmvfl", data=data, secure_sum=masked)
    active, holder = session.learner, session.helpers["passive-1"]
    assert isinstance(active, MultiviewActive)
    rows = active.training_rows.numpy()
    asked = active.trainer.common_NC[rows].copy()
    session.step(0, active.training_rows)
    assert active.opened is not None
    moved = active.opened.numpy() - 0.75 * asked  # the three passives' equal shares of Z
    pull: Pull = holder.trainer.pull  # type: ignore[attr-defined]
    told = pull.eta_N1[rows, 0] > 0
    assert 0 < told.sum() < len(rows) / 2
    lengths = np.linalg.norm(moved, axis=1)
    assert lengths[told].min() > lengths[~told].max()
    assert (moved.argmax(1) == pull.truth_NC[rows].argmax(1))[told].all()


def test_fewer_people_than_classes_are_learnt_from() -> None:
    data = {"dataset": "digits", "views": 3, "aligned": 5, "limit": 200}
    assert run(config_of("mmvfl", data=data), None).accuracy["mmvfl"] > 0


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
        (lambda rows, z: {"rows": rows, "z": z[1:]}, "rows of z"),
        (lambda rows, z: {"rows": rows, "z": z * float("nan")}, "norm is not within"),
        (lambda rows, z: {"rows": rows + 10**6, "z": z}, "outside the alignment"),
    ],
)
def test_a_hostile_request_is_refused(change: Any, said: str) -> None:
    session = session_of("mmvfl")
    active: Any = session.learner
    rows = active.training_rows
    z = torch.from_numpy(active.trainer.common_NC[rows.numpy()])
    with pytest.raises(RemoteProtocolError, match=said):
        asked(session, pack(change(rows, z), {}))


def test_a_passive_answers_as_often_as_agreed() -> None:
    session = session_of("mmvfl")
    active: Any = session.learner
    rows = active.training_rows
    z = torch.from_numpy(active.trainer.common_NC[rows.numpy()])
    request = pack({"rows": rows, "z": z}, {})
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
