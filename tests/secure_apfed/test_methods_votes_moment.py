"""Votes as a moment: what is opened, under which noise, and what is refused on the way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.moments import MomentAgreement
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind, Links
from secure_apfed.methods import METHODS, Simulation, open_session, roles_of
from secure_apfed.methods.alignment import DEALER
from secure_apfed.methods.votes_moment import hyperplane_signs, smoothed_votes
from secure_apfed.runs.run import run
from tests.secure_apfed.meddling import altered
from tests.secure_apfed.test_methods_votes import clear_votes, config_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

VOTES = {"name": "votes_moment", "epsilon": 4.0, "moment_features": 64}


def session_of(**changes: Any) -> tuple[Simulation, np.ndarray]:
    """A session that is set up, and the votes that its passives would cast in the clear."""
    config = config_of(VOTES, **changes)
    held = load_data(config.data, seed=config.seed)
    return open_session(config, held), clear_votes(config, held)


def gathered(session: Simulation) -> Any:
    return session.play(session.learner.gather(session.links))  # type: ignore[attr-defined]  # of votes alone


@pytest.mark.parametrize("protocol", ["ecdh", "circuit"])
def test_the_moment_of_the_votes_is_opened_under_the_noise_that_is_told(protocol: str) -> None:
    session, clear_UK = session_of(alignment={"protocol": protocol})
    gathered(session)
    learner: Any = session.learner
    signs_Ud = hyperplane_signs(learner.student.features_UF, 64, seed=0)
    noise_dK = learner.moment - signs_Ud.T @ clear_UK / np.sqrt(64)
    steps = session.contract.secure_sum["noise"]["steps"]
    told = np.sqrt(3) * steps / (2**12 * np.sqrt(64))
    assert 0.9 < noise_dK.std() / told < 1.1
    agreed: MomentAgreement = learner.agreed
    release = next(iter(session.contributions.values())).spent()
    assert 3.9 < release.epsilon_x <= 4.0
    assert release.releases == 1
    assert agreed.scale * agreed.sensitivity() == pytest.approx(np.sqrt(2))


def test_colluders_make_the_others_add_more() -> None:
    steps = [
        session_of(colluders=colluders)[0].contract.secure_sum["noise"]["steps"]
        for colluders in (0, 2)
    ]
    assert steps[1] == pytest.approx(np.sqrt(3) * steps[0], rel=0.01)
    with pytest.raises(ConfigError, match="leave no honest one"):
        session_of(colluders=3)


def test_a_dealer_takes_part_and_holds_nothing() -> None:
    config = config_of(VOTES)
    roles = roles_of(METHODS["votes_moment"], config, "active", ("a", "b"))
    assert roles[DEALER] == "dealer"
    assert DEALER not in roles_of(METHODS["votes"], config, "active", ("a", "b"))


def test_the_dealer_is_never_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apfed_protocols.moments.BLOCK_BYTES", 2**15)
    sent: list[tuple[Kind, int]] = []
    send = Links.send

    def noted(links: Links, to: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        if kind in (Kind.DEALT, Kind.REQUEST) and to != AGGREGATOR:
            sent.append((kind, step))
        send(links, to, kind, step, payload)

    monkeypatch.setattr(Links, "send", noted)
    session, _ = session_of()
    agreed: MomentAgreement = session.learner.agreed  # type: ignore[attr-defined]  # of a moment
    asked = [step for kind, step in sent if kind is Kind.REQUEST]
    assert agreed.blocks > 16
    assert asked == list(range(8, agreed.blocks, 8))
    for step in asked:
        assert sent.index((Kind.REQUEST, step)) < sent.index((Kind.DEALT, step))
    gathered(session)


def test_help_is_kept_under_noise() -> None:
    data = {"dataset": "digits", "views": 4, "labelled": 30}
    alone, helped = (
        run(config_of({"name": "votes_moment", "epsilon": epsilon}, data=data), None).accuracy
        for epsilon in (0.01, 8.0)
    )
    assert helped["votes_moment"] > alone["votes_moment"] + 0.03


def test_smoothing_follows_the_noise() -> None:
    rng = np.random.default_rng(0)
    x_UF = rng.normal(size=(600, 4))
    votes_UK = 3 * np.eye(3)[(x_UF[:, 0] > 0).astype(int) + (x_UF[:, 1] > 0)]
    signs_Ud = hyperplane_signs(x_UF, 64, seed=1)
    moment_dK = signs_Ud.T @ votes_UK / 8
    errors = []
    for deviation in (1e-3, 2.0, 1e3):
        noisy_dK = moment_dK + rng.normal(size=moment_dK.shape) * deviation
        found = smoothed_votes(signs_Ud, noisy_dK, variance=deviation**2, voters=3)
        errors.append(float(((found.totals - votes_UK) ** 2).mean()))
        assert found.variance.shape == (600,)
        assert np.isfinite(found.variance).all()
    nothing = float(((votes_UK - 1) ** 2).mean())
    assert errors[0] < errors[1] < 0.7 * nothing
    assert errors[2] < 1.2 * nothing


def test_an_answer_that_is_altered_is_refused_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, Kind.SUM, lambda body: body[:-64] + b"\x7f" * 64)
    with pytest.raises(RemoteProtocolError, match="beyond the range"):
        run(config_of(VOTES), tmp_path / "run")
    (noted,) = (tmp_path / "run" / "parties").rglob("refused-*.jsonl")
    assert '"step": 0' in noted.read_text(encoding="utf-8")
