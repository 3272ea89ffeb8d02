"""Votes, summed, randomised, on encrypted labels: what opens, costs, and who asks."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.baselines import BASELINES, Baseline, BaselineTask, Predictor
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.labellers import Spreading, make_labeller
from secure_apfed.labellers.guarantee import build_vote_release
from secure_apfed.learning.votes import MeasuredHelp, ValidationRows, pool_opinions
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.ballots import Ballot
from secure_apfed.methods.student import PriorRule, WeighedVotes, compute_learnt_gain
from secure_apfed.methods.votes import VotesPassive
from secure_apfed.methods.votes_encrypted import EncryptedVotesActive
from secure_apfed.methods.votes_randomised import estimate_agreement
from secure_apfed.methods.votes_rehearsal import RehearsalPassive
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import load_outcome
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import alter_message, contract, envelope
from tests.secure_apfed.small_runs import Said, small_config
from tests.secure_apfed.small_runs import run_as_json as said_by

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
OPENINGS = ["votes", "votes_randomised", "votes_encrypted"]


def noisy(method: str, **more: Any) -> dict[str, Any]:
    looked = {"candidates": 2} if method == "votes_encrypted" else {}
    return {"name": method, "epsilon": 4.0, **looked, **more}


def config_of(method: Said = "votes", **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "digits", "views": 4, "limit": 400, "labelled": 30},
        "model": {"network": "random_features", "random_features": 60},
        "train": {"epochs": 1, "device": "cpu"},
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
    }
    return small_config(method, **{**usual, **changes})


def clear_votes(config: Config, data: VerticalData) -> np.ndarray:
    """The sum of the passives' votes as each would cast them, by the active's training rows."""
    assert data.active.labels is not None
    rows = data.train_rows
    labelled = torch.isin(rows, data.labelled_rows).nonzero().flatten().numpy()
    labels = data.active.labels[data.train_rows[labelled]].numpy()
    total = np.zeros((len(rows), len(data.classes)))
    for table in data.passives:
        place = {one: row for row, one in enumerate(table.ids)}
        here = [place[data.active.ids[row]] for row in rows.tolist()]
        features = table.features[here].flatten(1).double().numpy()
        total += Spreading().label_without_own(features, labelled, labels, len(data.classes))
    return total


def session_of(config: Config) -> tuple[Simulation, np.ndarray]:
    """A session that is set up, and the votes that its passives would cast in the clear."""
    held = load_data(config.data, seed=config.seed)
    return open_session(config, held), clear_votes(config, held)


def gather_votes(session: Simulation) -> Any:
    return session.run_script(session.active_role.gather_votes(session.links))  # type: ignore[attr-defined]  # of votes alone


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", SECURE_SUMS)
def test_every_sum_opens_the_sum_of_the_votes(name: str) -> None:
    kind = SECURE_SUMS[name]
    data = {"dataset": "digits", "views": 4, "limit": 120, "labelled": 30}
    config = config_of(data=data, secure_sum={"scheme": kind.scheme, "masks": kind.masks})
    session, clear = session_of(config)
    votes = gather_votes(session)
    assert session.active_role.rounding_error is not None
    assert np.abs(votes - clear).max() <= session.active_role.rounding_error


@pytest.mark.slow
@pytest.mark.parametrize("method", OPENINGS)
def test_a_student_beats_the_active_alone_where_passives_tell_the_class(method: str) -> None:
    config = config_of(method, data={"dataset": "digits", "views": 4, "labelled": 30})
    helped = run(config, None).accuracy[method]
    alone = run(
        config_of(
            "single_view",
            data=config.data,
            model={},
            train={
                "epochs": 30,
                "learning_rate": 0.1,
                "batch_size": 64,
            },
        ),
        None,
    ).accuracy["single_view"]
    assert helped > alone + 0.05


@pytest.mark.slow
def test_a_rehearsal_tells_of_each_passive_how_often_it_is_right_and_charges_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"name": "votes_rehearsal", "epsilon": 50.0}
    config = config_of(said)
    result = run(config, tmp_path / "run")
    told = load_outcome(RunFolder(tmp_path / "run")).agreement
    data = load_data(config.data, seed=config.seed)
    labels = data.active.labels
    assert labels is not None
    labelled = data.labelled_rows
    places = torch.isin(data.train_rows, labelled).nonzero().flatten().numpy()
    names_n = labels[data.train_rows[places]].numpy()
    for table in data.passives:
        alone = replace(data, passives=(table,))
        votes_nK = clear_votes(config, alone)[places]
        right = float((votes_nK.argmax(1) == names_n).mean())
        of = told[table.name]
        assert abs(of.labels - right) <= 6 * of.labels_noise < 0.1
        assert 49 < result.contributions[table.name]["epsilon"] <= 50
    assert told["active"].labels_noise == 0
    path = tmp_path / "run.yaml"
    path.write_text(dump_settings(config_of()))
    planned = said_by(capsys, "plan", path, "--with-peers", 50)
    shares = {name: of["labels"] for name, of in planned["rehearsal"].items()}
    assert shares == pytest.approx({name: of.labels for name, of in told.items()}, abs=0.05)
    for asked in ("0", "nan", "inf"):
        assert execute(["plan", str(path), "--with-peers", asked]) == 2
    assert execute(["plan", str(path), "--with-peers", "1", "--set", "method=single_view"]) == 2


def test_a_rehearsal_takes_no_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: RehearsalPassive, links: Links, message: Envelope) -> None:
        self.admit_ballot(message)
        payload = pack_tensors({"right": torch.zeros(2, dtype=torch.int64)})
        links.send(message.sender, Kind.RIGHT_VOTES, message.step, payload)

    monkeypatch.setattr(RehearsalPassive, "answer_message", answer)
    with pytest.raises(RemoteProtocolError, match="passive-1"):
        run(config_of({"name": "votes_rehearsal", "epsilon": 1.0}), None)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("method", OPENINGS)
def test_a_ridge_student_is_kept_and_its_cost_is_told(method: str, tmp_path: Path) -> None:
    result = run(config_of(noisy(method)), tmp_path / "run")
    outcome = load_outcome(RunFolder(tmp_path / "run"))
    assert set(outcome.contributions) == {"passive-1", "passive-2", "passive-3"}
    assert [spent.releases for spent in outcome.contributions.values()] == [1, 1, 1]
    assert all(0 < spent.epsilon <= 4.0 for spent in outcome.contributions.values())
    assert "one person's own vote, labeller held fixed" in (outcome.guarantee or "")
    assert "NO guarantee for the passive's table" in (outcome.guarantee or "")
    assert outcome.labelled_rows == 30
    assert load_model(tmp_path / "run").classes == tuple("0123456789")
    assert result.accuracy.keys() == {method}


def make_opinion(truth: np.ndarray, classes: int, right: float, seed: int = 1) -> np.ndarray:
    """Make probabilities of a voter that is right so often, and knows how often."""
    rng = np.random.default_rng(seed)
    other = (truth + rng.integers(1, classes, len(truth))) % classes
    named = np.where(rng.random(len(truth)) < right, truth, other)
    return right * np.eye(classes)[named] + (1 - right) / (classes - 1) * (
        1 - np.eye(classes)[named]
    )


def sum_opinions(
    truth: np.ndarray, classes: int, rights: list[float], noise: float = 0.0
) -> np.ndarray:
    rng = np.random.default_rng(7)
    totals = sum(
        make_opinion(truth, classes, right, 10 + at).round() for at, right in enumerate(rights)
    )
    return np.asarray(totals) + noise * rng.normal(size=(len(truth), classes))


def pool_votes(
    truth: np.ndarray,
    own: np.ndarray,
    votes: np.ndarray,
    judges: int,
    seed: int = 0,
    always: bool = False,
) -> tuple[np.ndarray, MeasuredHelp]:
    places = np.random.default_rng(seed).permutation(len(truth))[:judges]
    classes = own.shape[1]
    frequencies = np.bincount(truth, minlength=classes) / len(truth)
    return pool_opinions(
        votes,
        own,
        ValidationRows(
            row_positions=places, labels_J=truth[places], local_probabilities_JK=own[places]
        ),
        frequencies,
        seed=seed,
        is_always_used=always,
    )


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_votes_are_believed_as_far_as_labelled_rows_say(classes: int) -> None:
    truth = np.random.default_rng(0).integers(0, classes, 4000)
    own = make_opinion(truth, classes, 0.5 + 0.3 / classes)
    likely, found = pool_votes(truth, own, sum_opinions(truth, classes, [0.75] * 3), 100)
    assert found.is_in_use
    assert found.row_count == 100
    assert found.vote_accuracy > found.local_accuracy
    right = (likely.argmax(1) == truth).mean()
    assert right > (own.argmax(1) == truth).mean() + 0.1
    assert likely.max(1).mean() == pytest.approx(right, abs=0.1), "it knows how often it is right"
    assert "help is used: of 100 labelled rows" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("judges", [20, 50, 200])
def test_votes_that_tell_nothing_are_hardly_ever_used(judges: int) -> None:
    truth = np.random.default_rng(0).integers(0, 4, 4000)
    own = make_opinion(truth, 4, 0.7)
    used = 0
    for seed in range(60):
        blind = np.random.default_rng(seed).integers(0, 4, 4000)
        votes = sum_opinions(blind, 4, [0.75] * 3)
        likely, found = pool_votes(truth, own, votes, judges, seed)
        used += found.is_in_use
        if not found.is_in_use:
            assert (likely.argmax(1) == own.argmax(1)).all()
            assert "help is not used" in str(found)
    assert used <= 12


def test_noise_takes_weight_from_votes_by_itself() -> None:
    truth = np.random.default_rng(0).integers(0, 4, 4000)
    own = make_opinion(truth, 4, 0.6)
    told = []
    for noise in (0.0, 1.0, 30.0):
        likely, found = pool_votes(truth, own, sum_opinions(truth, 4, [0.9] * 3, noise), 200)
        assert (likely.argmax(1) == truth).mean() > (own.argmax(1) == truth).mean() - 0.02
        told.append(found)
    assert told[0].gain > told[1].gain > max(told[2].gain, 0.0)
    assert not told[2].is_in_use


def test_help_that_own_columns_cannot_tell_is_not_used() -> None:
    """Rows 0 to 3 have no label; a student was asked about 0, 1 and 4."""
    likely_UK = np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0]])
    own_UK = np.array([[0.6, 0.4], [0.4, 0.6], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    told_UK = np.array([[0.3, 0.7], [0.1, 0.9], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    weighed = WeighedVotes(likely_UK, own_UK, PriorRule(lambda task: own_UK))
    labelled = np.array([4])
    assert compute_learnt_gain(told_UK, weighed, labelled) == pytest.approx(
        (0.1 + 0.8 - 0.9 - 0.8) / 2
    )
    assert (
        compute_learnt_gain(None, weighed, labelled)
        == compute_learnt_gain(0 * told_UK, weighed, labelled)
        == 0
    )
    found = MeasuredHelp(
        row_count=50, gain=0.1, standard_error=0.01, vote_accuracy=0.7, local_accuracy=0.5
    )
    assert found.is_in_use
    worse = replace(found, learnt_gain=-0.4)
    assert not worse.is_in_use
    assert "own columns learn it less well" in str(worse)
    assert replace(worse, is_always_used=True).is_in_use


@pytest.mark.parametrize("judges", [0, 1, 4])
def test_who_can_judge_no_rows_uses_no_help(judges: int) -> None:
    truth = np.random.default_rng(0).integers(0, 3, 300)
    own = make_opinion(truth, 3, 0.5)
    _, found = pool_votes(truth, own, sum_opinions(truth, 3, [1.0] * 3), judges)
    assert not found.is_in_use
    assert found.row_count == judges
    likely, always = pool_votes(truth, own, sum_opinions(truth, 3, [1.0] * 3), judges, always=True)
    assert always.is_in_use
    assert (likely.argmax(1) == truth).mean() > 0.9


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["votes", "votes_encrypted"])
def test_a_prior_is_what_held_out_labels_tell(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, in every opening: a baseline that is worse than chance is not asked."""
    asked = list[int]()
    ridge = BASELINES["ridge"]

    class Collapsed(Baseline):
        name = "collapsed"
        title = "Collapsed"

        def fit(self, task: BaselineTask) -> Predictor:
            asked.append(len(task.labels))
            return Predictor(lambda x_BF: np.eye(10)[np.zeros(len(x_BF), int)])

    table = {"collapsed": Collapsed(), "ridge": ridge}
    monkeypatch.setattr("secure_apfed.baselines.BASELINES", table)
    config = config_of(noisy(method, help="judged"))
    default = run(config, None).accuracy
    assert asked
    assert max(asked) < 30, "it was judged by parts of the labels, and fitted to all of them never"
    named = config_of(noisy(method, prior="ridge", help="judged"))
    assert run(named, None).accuracy == default


def test_people_may_have_different_voters() -> None:
    config = config_of(
        data={"dataset": "digits", "views": 4, "limit": 400, "labelled": 30, "overlap": 0.6},
        alignment={"mode": "pairwise"},
        secure_sum={"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
    )
    data = load_data(config.data, seed=0)
    fewer = tuple(
        PartyTable(one.name, one.ids[at:], one.features[at:], None, one.encoding)
        for at, one in zip((0, 90, 180), data.passives, strict=True)
    )
    session = open_session(config, replace(data, passives=fewer))
    votes = gather_votes(session)
    voters = votes.sum(1).round().astype(int)
    assert {1, 2, 3} <= set(voters.tolist())


def test_ballots_on_others_share_no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an active would read who votes alike from answers that are alike."""
    config = config_of("votes_randomised", guard={"mechanism": "none", "noise": "secret"})
    monkeypatch.setattr(
        VotesPassive, "cast_votes", lambda self, ballot: np.eye(10)[np.arange(40) % 10]
    )
    session = open_session(config, load_data(config.data, seed=0))
    helper: Any = session.helpers["passive-1"]
    answers: list[bytes] = []
    links = SimpleNamespace(send=lambda to, kind, step, payload: answers.append(payload))
    for first in (0, 40, 0):
        rows_U = torch.arange(first, first + 40)
        ballot = Ballot.from_rows(rows_U, torch.tensor([0]), torch.tensor([1]), block_rows=40)
        helper._gate._was_asked = False
        with suppress(StopIteration):
            helper.answer_message(links, replace(ask(), payload=ballot.payload)).send(None)
    assert answers[0] == answers[2]
    one, other = (np.frombuffer(answer[-80:], dtype="<i2") for answer in answers[:2])
    assert (one != other).mean() > 0.05
    assert helper.contribution_ledger.get_privacy_spent().releases == 1


def ask(**tensors: torch.Tensor) -> Envelope:
    usual = {
        "rows": torch.arange(10),
        "labelled": torch.tensor([0, 3]),
        "labels": torch.tensor([1, 0]),
    }
    return envelope(
        pack_tensors({**usual, **tensors}), kind=Kind.LABELS, session="s", receiver="passive-1"
    )


@pytest.mark.parametrize(
    "tensors",
    [
        {"rows": torch.tensor([0, 0, 1, 2])},
        {"rows": torch.tensor([0, 1, 500])},
        {"rows": torch.tensor([-1, 1, 2])},
        {"rows": torch.tensor([3])},
        {"rows": torch.arange(10).int()},
        {"rows": torch.empty(0, dtype=torch.int64)},
        {"labelled": torch.tensor([0, 0])},
        {"labelled": torch.tensor([0, 10])},
        {"labelled": torch.empty(0, dtype=torch.int64), "labels": torch.empty(0).long()},
        {"labels": torch.tensor([1, 10])},
        {"labels": torch.tensor([1, -100])},
        {"labels": torch.tensor([1])},
        {"labels": torch.tensor([1.0, 0.0])},
        {"more": torch.tensor([1])},
    ],
    ids=str,
)
def test_a_request_that_breaks_a_rule_is_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RemoteProtocolError, match="active"):
        Ballot.from_message(ask(**tensors), contract(), position_count=400, class_count=10)


PEOPLE = 400
CLASSES = 5
RESPONSE = VoteResponse(epsilon=2.0, classes=CLASSES)


def randomise_all(votes_MU: np.ndarray, seed: int) -> np.ndarray:
    return np.stack(
        [
            RESPONSE.randomise_votes(
                np.eye(CLASSES)[votes_U], key=bytes([seed, at]) * 16, about=b"0"
            )
            for at, votes_U in enumerate(votes_MU)
        ]
    )


def test_shares_have_no_bias_and_the_noise_that_is_told() -> None:
    draw = np.random.default_rng(0)
    labels_U = draw.integers(CLASSES, size=PEOPLE)
    off_U = (labels_U + 1) % CLASSES
    # a, b: right; c: right on a quarter of the rows, another class elsewhere.
    c_U = np.where(np.arange(PEOPLE) % 4 == 0, labels_U, off_U)
    found = [
        estimate_agreement(
            RESPONSE,
            randomise_all(np.stack([labels_U, labels_U, c_U]), seed),
            names=("a", "b", "c"),
            labelled_n=np.arange(100),
            labels_n=labels_U[:100],
        )
        for seed in range(60)
    ]
    shares = np.array(
        [[[one[name].others, one[name].labels] for name in "abc"] for one in found], dtype=float
    )
    noise = np.array([[found[0][n].others_noise, found[0][n].labels_noise] for n in "abc"])
    expected = [[0.625, 1.0], [0.625, 1.0], [0.25, 0.25]]
    off = np.abs(shares.mean(axis=0) - expected).max(axis=1)
    assert (off < 4 * noise.max(axis=1) / 60**0.5).all()
    assert (shares.std(axis=0) < 1.2 * noise).all()


def test_a_passive_alone_agrees_with_nobody() -> None:
    answers = randomise_all(np.zeros((1, PEOPLE), dtype=np.int64), 0)
    (found,) = estimate_agreement(
        RESPONSE,
        answers,
        names=("a",),
        labelled_n=np.arange(10),
        labels_n=np.zeros(10, dtype=np.int64),
    ).values()
    assert found.others is None
    assert found.labels == pytest.approx(1.0, abs=4 * found.labels_noise)


# Votes on encrypted labels: the same sum as of clear labels, and what is refused on the way.


def open_encrypted(*, colluders: int = 0, **said: Any) -> tuple[Simulation, np.ndarray]:
    return session_of(config_of({"name": "votes_encrypted", **said}, colluders=colluders))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("candidates", [None, 3])
def test_the_sum_of_the_votes_is_opened_and_no_label_is_sent(candidates: int | None) -> None:
    session, clear = open_encrypted(candidates=candidates)
    votes = gather_votes(session)
    assert session.active_role.rounding_error is not None
    assert np.abs(votes - clear).max() <= session.active_role.rounding_error < 0.01
    sent = {flow.kind for flow in session.transcript.flows}
    assert Kind.LABELS not in sent
    assert (Kind.CHALLENGE in sent) is (Kind.COIN in sent) is (candidates is not None)
    told = "found out before anybody answers" if candidates else "trusted to encrypt bits"
    assert told in session.active_role.guarantee


def test_noise_is_as_large_as_it_is_told_and_is_charged_once() -> None:
    session, clear = open_encrypted(epsilon=2.0, colluders=1, candidates=2)
    votes = gather_votes(session)
    terms = session.contract.secure_sum["noise"]
    told = terms["steps"] / (2**15 - 1) * len(session.contract.passives) ** 0.5
    assert 0.9 < (votes - clear).std() / told < 1.1
    assert terms["honest"] == 2
    release = build_vote_release(
        make_labeller("spreading"),
        hard=False,
        deviation=terms["steps"],
        honest=2,
        steps=2**15 - 1,
        classes=10,
        integers=True,
    )
    assert 1.95 < release.epsilon_of(1, 1e-5) <= 2.0
    assert {
        name: one.get_privacy_spent().epsilon_x
        for name, one in session.contribution_ledgers.items()
    } == (pytest.approx(dict.fromkeys(session.contract.passives, release.epsilon_of(1, 1e-5))))


def test_a_row_of_integers_keeps_its_bound() -> None:
    session, _ = open_encrypted()
    helper: Any = session.helpers["passive-1"]
    ballot = session.active_role.ballot  # type: ignore[attr-defined]  # of votes alone
    steps = helper.compute_matrix(ballot) * (2**15 - 1)
    assert np.abs(steps - np.rint(steps)).max() < 1e-6
    assert np.abs(np.rint(steps)).sum(axis=1).max() <= 2**15 - 1


def other_ballot(payload: bytes) -> bytes:
    asked, request = msgpack.unpackb(payload, max_bin_len=len(payload))
    vector = TensorSpec(torch.int64, (None,))
    told, _ = unpack_tensors(asked, {"rows": vector, "labelled": vector}, sender="active")
    return bytes(msgpack.packb([pack_tensors({**told, "rows": told["rows"].flip(0)}), request]))


def other_labels(payload: bytes) -> bytes:
    asked, request = msgpack.unpackb(payload, max_bin_len=len(payload))
    return bytes(msgpack.packb([asked, request[:-9] + bytes([request[-9] ^ 1]) + request[-8:]]))


@pytest.mark.sampled(every=4)
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
    alter_message(monkeypatch, kind, change)
    with pytest.raises(RemoteProtocolError, match=said):
        gather_votes(open_encrypted(candidates=3 if audited else None)[0])


@pytest.mark.sampled(every=5)
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
def test_a_size_that_may_not_be_fails(
    size: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alter_message(
        monkeypatch, Kind.BALLOT_SIZE, lambda body: msgpack.packb(msgpack.unpackb(body) | size)
    )
    with pytest.raises(RemoteProtocolError, match="active asks about"):
        open_encrypted()


def test_a_sum_that_is_refused_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter_message(monkeypatch, Kind.SUM, lambda body: body[:-200] + bytes(200))
    with pytest.raises(RemoteProtocolError):
        run(config_of("votes_encrypted"), tmp_path / "run")
    (noted,) = (tmp_path / "run" / "parties").rglob("refused-*.jsonl")
    assert '"step": 0' in noted.read_text(encoding="utf-8")


def test_a_passive_is_asked_once_and_for_what_was_told() -> None:
    session, _ = open_encrypted()
    gather_votes(session)
    helper: Any = session.helpers["passive-1"]
    body = msgpack.packb([session.active_role.ballot.payload, b""])  # type: ignore[attr-defined]  # of votes alone
    again = envelope(body, kind=Kind.ENCRYPTED_LABELS, session=session.contract.session)
    with pytest.raises(RemoteProtocolError, match="once more in one session"):
        session.run_script(helper.answer_message(session.network.links["passive-1"], again))


def test_the_aggregator_takes_no_block_that_there_is_none_of() -> None:
    session, _ = open_encrypted()
    session.network.links["passive-1"].send(AGGREGATOR, Kind.CONTRIBUTION, 7, b"")
    with pytest.raises(RemoteProtocolError, match="block 7"):
        gather_votes(session)


@pytest.mark.slow
def test_audits_broken_off_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An active that dislikes the coin and begins again gets two chances, and no third."""
    config = config_of({"name": "votes_encrypted", "candidates": 3})
    request = EncryptedVotesActive.gather_votes

    async def silent(learner: Any, links: Links) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(EncryptedVotesActive, "gather_votes", silent)
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "run", resume=resume)
    monkeypatch.setattr(EncryptedVotesActive, "gather_votes", request)
    with pytest.raises(CheckpointError, match=r"2 sessions ended .* and 1 may"):
        run(config, tmp_path / "run", resume=True)
    log = next((tmp_path / "run" / "parties").rglob("audits-passive-1.jsonl"))
    assert log.read_text().count("begun") == 2
    run(config, tmp_path / "other")
    for log in (tmp_path / "other" / "parties").rglob("audits-*.jsonl"):  # one that passed is none
        assert log.read_text().count("begun") == log.read_text().count("passed") == 1


@pytest.mark.slow
def test_colluders_make_the_others_add_more() -> None:
    def steps(colluders: int) -> int:
        config = config_of(noisy("votes_encrypted"), colluders=colluders)
        session, _ = session_of(config)
        return int(session.contract.secure_sum["noise"]["steps"])

    assert steps(2) == pytest.approx(np.sqrt(3) * steps(0), rel=0.01)
    with pytest.raises(ConfigError, match="leave no honest one"):
        steps(3)
