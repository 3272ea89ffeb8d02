"""Votes on encrypted labels: the same sum as of clear labels, and what is refused on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import load_data
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack, unpack
from secure_apfed.labellers import make_labeller
from secure_apfed.labellers.guarantee import summed_votes
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.votes_encrypted import EncryptedVotesActive
from secure_apfed.runs.run import run
from tests.secure_apfed.meddling import altered
from tests.secure_apfed.test_methods_votes import clear_votes, config_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def voting(*, colluders: int = 0, **said: Any) -> Config:
    """Of votes on encrypted labels, with these settings."""
    return config_of({"name": "votes_encrypted", **said}, colluders=colluders)


def session_of(**said: Any) -> tuple[Simulation, np.ndarray]:
    """A session that is set up, and the votes that its passives would cast in the clear."""
    config = voting(**said)
    held = load_data(config.data, seed=config.seed)
    return open_session(config, held), clear_votes(config, held)


def gathered(session: Simulation) -> Any:
    return session.play(session.learner.gather(session.links))  # type: ignore[attr-defined]  # of votes alone


@pytest.mark.parametrize("candidates", [None, 3])
def test_the_sum_of_the_votes_is_opened_and_no_label_is_sent(candidates: int | None) -> None:
    session, clear = session_of(candidates=candidates)
    votes = gathered(session)
    assert session.learner.rounding is not None
    assert np.abs(votes.totals - clear).max() <= session.learner.rounding < 0.01
    assert not votes.variance.any()
    sent = {flow.kind for flow in session.transcript.flows}
    assert Kind.LABELS not in sent
    assert (Kind.CHALLENGE in sent) is (Kind.COIN in sent) is (candidates is not None)
    told = "found out before anybody answers" if candidates else "trusted to encrypt bits"
    assert told in session.learner.guarantee


def test_noise_is_as_large_as_it_is_told_and_is_charged_once() -> None:
    session, clear = session_of(epsilon=2.0, colluders=1, candidates=2)
    votes = gathered(session)
    noise, told = votes.totals - clear, np.sqrt(votes.variance[0])
    assert 0.9 < noise.std() / told < 1.1
    terms = session.contract.secure_sum["noise"]
    assert terms["honest"] == 2
    release = summed_votes(
        make_labeller("spreading"), hard=False, deviation=terms["steps"], honest=2,
        steps=2**15 - 1, classes=10, integers=True,
    )  # fmt: skip
    assert 1.95 < release.epsilon_of(1, 1e-5) <= 2.0
    assert {name: one.spent().epsilon_x for name, one in session.contributions.items()} == (
        pytest.approx(dict.fromkeys(session.contract.passives, release.epsilon_of(1, 1e-5)))
    )


def test_a_row_of_integers_keeps_its_bound() -> None:
    session, _ = session_of()
    helper: Any = session.helpers["passive-1"]
    ballot = session.learner.ballot  # type: ignore[attr-defined]  # of votes alone
    steps = helper.matrix(ballot) * (2**15 - 1)
    assert np.abs(steps - np.rint(steps)).max() < 1e-6
    assert np.abs(np.rint(steps)).sum(axis=1).max() <= 2**15 - 1


def other_ballot(payload: bytes) -> bytes:
    """The same labels, asked of other people."""
    asked, request = msgpack.unpackb(payload, max_bin_len=len(payload))
    vector = TensorSpec(torch.int64, (None,))
    told, _ = unpack(asked, {"rows": vector, "labelled": vector}, sender="active")
    return bytes(msgpack.packb([pack({**told, "rows": told["rows"].flip(0)}), request]))


def other_labels(payload: bytes) -> bytes:
    asked, request = msgpack.unpackb(payload, max_bin_len=len(payload))
    return bytes(msgpack.packb([asked, request[:-9] + bytes([request[-9] ^ 1]) + request[-8:]]))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (Kind.BALLOT_SIZE, lambda _: msgpack.packb([1, 2]), "something else than a ballot's size"),
        (Kind.ENCRYPTED_LABELS, lambda _: msgpack.packb([b"", 3]), "no ballot with encrypted"),
        (Kind.ENCRYPTED_LABELS, other_ballot, "on another ballot than it told"),
        (Kind.ENCRYPTED_LABELS, other_labels, "aggregator|different|answer"),
        (Kind.COMMITMENT, lambda body: body[:-1], "active"),
        (Kind.COIN, lambda body: body[:-1], "passive"),
        (Kind.CHALLENGE, lambda body: body[:-1], "passive"),
    ],
)
def test_messages_that_are_none_are_refused(
    kind: Kind, change: Callable[[bytes], bytes], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = kind in (Kind.COMMITMENT, Kind.COIN, Kind.CHALLENGE)
    altered(monkeypatch, kind, change)
    with pytest.raises(RemoteProtocolError, match=said):
        gathered(session_of(candidates=3 if audited else None)[0])


@pytest.mark.parametrize(
    "size",
    [
        {"people": 10**9},
        {"people": True},
        {"labelled": 0},
        {"labelled": 10**6},
        {"ballot": b"short"},
    ],
    ids=str,
)
def test_a_size_that_may_not_be_is_refused(
    size: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, Kind.BALLOT_SIZE, lambda body: msgpack.packb(msgpack.unpackb(body) | size))
    with pytest.raises(RemoteProtocolError, match="active asks about"):
        session_of()


def test_a_sum_that_is_refused_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered(monkeypatch, Kind.SUM, lambda body: body[:-200] + bytes(200))
    with pytest.raises(RemoteProtocolError):
        run(config_of("votes_encrypted"), tmp_path / "run")
    (noted,) = (tmp_path / "run" / "parties").rglob("refused-*.jsonl")
    assert '"step": 0' in noted.read_text(encoding="utf-8")


def test_a_passive_is_asked_once_and_for_what_was_told() -> None:
    session, _ = session_of()
    gathered(session)
    helper: Any = session.helpers["passive-1"]
    again = Envelope(
        session=session.contract.session, step=0, kind=Kind.ENCRYPTED_LABELS, sender="active",
        receiver="passive-1", sequence=9,
        payload=msgpack.packb([session.learner.ballot.payload, b""]),  # type: ignore[attr-defined]  # of votes alone
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="once more in one session"):
        session.play(helper.answer(session.network.links["passive-1"], again))


def test_the_aggregator_takes_no_block_that_there_is_none_of() -> None:
    session, _ = session_of()
    session.network.links["passive-1"].send(AGGREGATOR, Kind.CONTRIBUTION, 7, b"")
    with pytest.raises(RemoteProtocolError, match="block 7"):
        gathered(session)


def test_audits_that_are_broken_off_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An active that dislikes the coin and begins again gets two chances, and no third."""
    config = voting(candidates=3)
    request = EncryptedVotesActive.gather

    async def silent(learner: Any, links: Links) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(EncryptedVotesActive, "gather", silent)
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "run", resume=resume)
    monkeypatch.setattr(EncryptedVotesActive, "gather", request)
    with pytest.raises(CheckpointError, match=r"2 sessions ended .* and 1 may"):
        run(config, tmp_path / "run", resume=True)
    log = next((tmp_path / "run" / "parties").rglob("audits-passive-1.jsonl"))
    assert log.read_text().count("begun") == 2


def test_an_audit_that_passed_is_no_broken_one(tmp_path: Path) -> None:
    run(voting(candidates=3), tmp_path / "run")
    for log in (tmp_path / "run" / "parties").rglob("audits-*.jsonl"):
        told = log.read_text()
        assert told.count("begun") == told.count("passed") == 1
