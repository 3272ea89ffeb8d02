from typing import Any

import numpy as np
import pytest

from apfed_attacks import ATTACKS
from apfed_attacks.interface import AttackResult, Guess
from apfed_attacks.run import full_suite, mount, prepare
from apfed_attacks.scoring import risk_of_features, risk_of_labels
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ConfigError


def test_an_attack_that_is_sure_of_a_few_shows_in_the_surest_decile() -> None:
    labels_N = np.array([0, 1] * 50)
    scores_NK = np.zeros((100, 2))
    scores_NK[:10] = 9 * np.eye(2)[labels_N[:10]]  # right and sure on ten rows
    scores_NK[10:, 0] = 0.1  # says class 0 of all others
    risk = risk_of_labels(scores_NK, labels_N)
    assert risk == {
        "recall of class 0": 1.0,
        "recall of class 1": pytest.approx(5 / 50),
        "precision on the surest decile": 1.0,
    }


def test_a_sure_and_wrong_attack_has_a_low_precision() -> None:
    labels_N = np.zeros(20, dtype=np.int64)
    labels_N[10:] = 1
    scores_NK = np.eye(2)[1 - labels_N] * 5
    assert risk_of_labels(scores_NK, labels_N)["precision on the surest decile"] == 0


def test_infinite_scores_are_taken() -> None:
    scores_NK = np.array([[np.inf, 0.0], [0.0, -np.inf]] * 5)
    risk = risk_of_labels(scores_NK, np.zeros(10, dtype=np.int64))
    assert risk["recall of class 0"] == 1


def test_features_recovered_of_few_people_show_in_the_best_decile() -> None:
    truth_NF = np.random.default_rng(0).normal(size=(50, 3))
    guess_NF = np.tile(truth_NF.mean(axis=0), (50, 1))
    guess_NF[:5] = truth_NF[:5]
    assert risk_of_features(guess_NF, truth_NF)["r2 on the best decile"] == pytest.approx(1)
    assert risk_of_features(np.zeros((5, 2)), np.ones((5, 2))) == {}


def test_a_result_says_its_risk_and_who_listens_is_told(make_recording: Any) -> None:
    told: list[tuple[AttackResult, Guess]] = []
    results = mount(
        make_recording("labels"),
        [AttackChoice(name="model_completion", options={"labels_per_class": 4})],
        seed=0,
        on_score=lambda result, guess: told.append((result, guess)),
    )
    assert [result for result, _ in told] == list(results)
    assert {f"recall of class {k}" for k in range(3)} < set(results[0].risk)
    assert all(len(guess.positions) for _, guess in told)


def test_the_full_suite_holds_every_attack_with_valid_options() -> None:
    choices = full_suite()
    assert {choice.name for choice in choices} == set(ATTACKS)
    for choice in choices:
        prepare(choice)
    known = [c.options["labels_per_class"] for c in full_suite(["model_completion"])]
    assert known == [0, 1, 4, 40]


def test_the_suite_of_an_unknown_attack_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'temporal'"):
        full_suite(["tempral"])
