"""What is read of votes and of the labels shown with them: planted leaks, and none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apfed_attacks.live.runs import Poison, PoisonedVotes, VotesRun
from apfed_experiments.overlap import with_overlap
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.privacy.ledger import BudgetExhaustedError
from tests.secure_apfed.small_runs import Said, small_config

OPENINGS = ("votes", "votes_randomised")
pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
DIGITS = {"dataset": "digits", "views": 4, "overlap": 1.0, "labelled": 50, "limit": 400}
ASKED: Mapping[str, Said] = {
    "sum": "votes",
    "sum, noise": {"name": "votes", "epsilon": 4.0},
    "each": "votes_randomised",
}


def config_of(method: Said, **changes: Any) -> Config:
    data = {"dataset": "breast_cancer", "overlap": 1.0, "labelled": 20}
    usual: dict[str, Any] = {
        "data": data, "model": {"network": "random_features"},
        "train": {"epochs": 1, "device": "cpu"}, "guard": {"mechanism": "none"},
        "secure_sum": {"scheme": "plain", "allow_single_passive": True},
    }  # fmt: skip
    return small_config(method, **{**usual, **changes})


# Live ballots: what a party that deviates reaches, and what stops it.


@pytest.fixture(scope="module")
def aligned() -> dict[str, Any]:
    """Data and alignment, which all sessions here share."""
    run = VotesRun(config_of("votes", data=DIGITS))
    return {"data": run.data, "alignment": run.alignment}


def open_run(aligned: dict[str, Any], opening: str, **others: Any) -> VotesRun:
    return VotesRun(config_of(ASKED[opening], data=DIGITS), **aligned, **others)


def one_against_all(run: VotesRun, person: int) -> dict[int, int]:
    labels = dict.fromkeys(run.ballot.rows.tolist(), 1)
    return labels | {person: 0}


def test_one_label_against_all_reads_a_column_of_the_passives_matrices(
    aligned: dict[str, Any],
) -> None:
    run = open_run(aligned, "sum")
    person = int(run.ballot.rows[7])
    ballot, votes = run.ask(labels=one_against_all(run, person))
    columns_U = np.zeros(len(ballot.rows))
    for name in run.voters:
        columns_U += run.voter(name).vote(ballot)[:, 0]
    # To the rounding of the sum.
    assert np.abs(votes.totals[:, 0] - columns_U).max() < 1e-3
    near = columns_U > 0.01
    assert near.sum() < 100  # of 300: it names neighbours


@pytest.mark.parametrize("opening", ASKED)
def test_a_second_question_in_a_session_is_refused(aligned: dict[str, Any], opening: str) -> None:
    run = open_run(aligned, opening)
    run.ask()
    with pytest.raises(RemoteProtocolError, match="votes once more in one session"):
        run.ask(labels=one_against_all(run, int(run.ballot.rows[0])))


@pytest.mark.parametrize("opening", ["sum, noise", "each"])
def test_a_resumed_run_charges_again_and_stops_at_its_budget(
    aligned: dict[str, Any], opening: str, tmp_path: Path
) -> None:
    open_run(aligned, opening, logs=tmp_path).ask()
    with pytest.raises(BudgetExhaustedError, match="release 2 of one row would cost epsilon"):
        open_run(aligned, opening, logs=tmp_path).ask()


def test_without_noise_a_run_answers_as_often_as_agreed_over_all_its_sessions(
    aligned: dict[str, Any], tmp_path: Path
) -> None:
    agreed = 3  # one, and rules.spare_answers
    for person in range(agreed):
        run = open_run(aligned, "sum", logs=tmp_path)
        run.ask(labels=one_against_all(run, int(run.ballot.rows[person])))
    run = open_run(aligned, "sum", logs=tmp_path)
    with pytest.raises(RemoteProtocolError, match="more than 3 times"):
        run.ask(labels=one_against_all(run, int(run.ballot.rows[agreed])))


def test_new_runs_on_the_same_people_take_the_noise_off(aligned: dict[str, Any]) -> None:
    """No count outlasts a run: the report says so."""
    run = open_run(aligned, "each")
    totals = [open_run(aligned, "each").ask()[1].totals for _ in range(12)]
    truth_UK = np.sum([run.voter(name).vote(run.ballot) for name in run.voters], axis=0)

    def error(found_UK: Any) -> float:
        return float(np.square(found_UK - truth_UK).mean() ** 0.5)

    assert error(np.mean(totals, axis=0)) < 0.5 * error(totals[0])


def test_in_pairs_the_sum_is_a_vote_where_one_passive_alone_knows_somebody() -> None:
    changes: dict[str, Any] = {
        "data": DIGITS, "alignment": {"mode": "pairwise", "protocol": "circuit"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
    }  # fmt: skip
    config = config_of("votes", **changes)
    run = VotesRun(config, with_overlap(load_data(config.data, seed=0), 0.5, seed=1))
    ballot, votes = run.ask()
    held_MU = torch.stack([run.voter(name).held_N[ballot.rows] for name in run.voters])
    alone_U = (held_MU.sum(dim=0) == 1).numpy()
    assert alone_U.mean() > 0.2
    for at, name in enumerate(run.voters):
        here = alone_U & held_MU[at].numpy()
        its = run.voter(name).vote(ballot)
        assert np.abs(votes.totals[here] - its[here]).max(initial=0.0) < 1e-3


@pytest.mark.parametrize("way", ["random", "constant", "rotate"])
def test_poisoned_votes_cost_accuracy_and_show_where_answers_are_single(
    aligned: dict[str, Any], way: Poison
) -> None:
    honest = open_run(aligned, "each")
    honest.learn()
    spoilt = open_run(aligned, "each")
    passive = spoilt.voters[0]
    own = spoilt.voter(passive).labeller
    spoilt.vote_by(passive, PoisonedVotes(honest=own, way=way))
    spoilt.learn()
    before, after = honest.learner.agreement, spoilt.learner.agreement
    assert after[passive].labels < before[passive].labels - 3 * after[passive].labels_noise
    assert (after[passive].others or 0) < (before[passive].others or 0)


def test_a_passive_that_keeps_to_the_form_is_not_refused(aligned: dict[str, Any]) -> None:
    run = open_run(aligned, "sum")
    own = run.voter(run.voters[0]).labeller
    run.vote_by(run.voters[0], PoisonedVotes(honest=own, way="flip"))
    run.learn()
    assert run.learner.agreement == {}  # sums show no single passive
