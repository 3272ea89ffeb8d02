"""What every label mechanism owes, an audit, LP-MST's priors, and the guarantee's text."""

import itertools
import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.privacy.contributions import contributions_statement
from secure_apfed.privacy.guard import joint_releases_statement
from secure_apfed.privacy.ledger import NOTHING_RELEASED
from secure_apfed.privacy.randomised_response import (
    LABEL_MECHANISMS,
    LabelMechanism,
    LabelResponse,
    MultiStageResponse,
    NoLabelPrivacy,
)
from secure_apfed.privacy.randomised_response import make_label_mechanism as make
from secure_apfed.runs.spending import LABEL_ASSUMPTIONS, join_guarantees
from secure_apfed.settings.privacy import LabelSettings

KEY = bytes(range(32))
CLASSES = 5
LABELS = torch.arange(100_000) % CLASSES
PROTECTING = [name for name, kind in LABEL_MECHANISMS.items() if not kind.unsafe]
every = pytest.mark.parametrize("name", LABEL_MECHANISMS)
each_protecting = pytest.mark.parametrize("name", PROTECTING)
RELEASED = "row-release guarantee, encoder held fixed"
NONE = NoLabelPrivacy(classes=3)
RESPONSE = LabelResponse(epsilon=1.0, classes=3)


def mechanism(name: str, epsilon: float = 1.0, classes: int = CLASSES) -> LabelMechanism:
    told = {"mechanism": name} | ({} if name == "none" else {"epsilon": epsilon})
    return make(LabelSettings.model_validate(told), classes=classes)


def keep_probability(epsilon: float) -> float:
    """Return how often a label without a prior is kept (Kairouz, Oh and Viswanath 2016)."""
    return math.exp(epsilon) / (math.exp(epsilon) + CLASSES - 1)


def is_kept_as_often(answers: torch.Tensor, probability: float) -> bool:
    deviation = math.sqrt(len(LABELS) * probability * (1 - probability))
    return abs(int((answers == LABELS).sum()) - len(LABELS) * probability) < 5 * deviation


def is_correlated(first: torch.Tensor, second: torch.Tensor) -> bool:
    return abs(float(torch.corrcoef(torch.stack([first, second]).double())[0, 1])) > 0.03


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
@each_protecting
def test_labels_are_kept_as_often_as_stated_and_not_as_at_other_epsilons(
    epsilon: float, name: str
) -> None:
    answers = mechanism(name, epsilon).randomise_labels(LABELS, key=KEY)
    assert is_kept_as_often(answers, keep_probability(epsilon))
    for wrong in (2 / 3, 3 / 2):
        assert not is_kept_as_often(answers, keep_probability(epsilon * wrong))
        bad = mechanism(name, epsilon * wrong).randomise_labels(LABELS, key=KEY)
        assert not is_kept_as_often(bad, keep_probability(epsilon))


def test_no_mechanism_gives_labels_away_and_says_so() -> None:
    none = mechanism("none")
    assert (none.unsafe, none.epsilon, none.describe_guarantee()) == (True, math.inf, "no label DP")
    assert torch.equal(none.randomise_labels(LABELS, key=KEY), LABELS)


@every
def test_it_is_in_the_table_under_its_name_and_answers_with_labels(name: str) -> None:
    made = mechanism(name)
    assert made.name == name
    assert made.stages >= 1
    answers = made.randomise_labels(LABELS, key=KEY)
    assert (answers.dtype, answers.shape) == (torch.int64, LABELS.shape)
    assert set(answers.tolist()) <= set(range(CLASSES))
    assert made.randomise_labels(LABELS[:0], key=KEY).shape == (0,)
    assert LABELS[:5].tolist() == [0, 1, 2, 3, 4]  # its argument is left alone


@each_protecting
def test_the_same_labels_and_key_give_the_same_answers_and_others_others(name: str) -> None:
    first = mechanism(name).randomise_labels(LABELS, key=KEY)
    assert torch.equal(first, mechanism(name).randomise_labels(LABELS, key=KEY))
    assert not torch.equal(first, mechanism(name).randomise_labels(LABELS, key=bytes(32)))
    assert not torch.equal(first, mechanism(name, 1.1).randomise_labels(LABELS, key=KEY))
    # One other label changes all chances.
    changed = LABELS.clone()
    changed[0] = 1
    assert not is_correlated(
        first != LABELS, mechanism(name).randomise_labels(changed, key=KEY) != changed
    )


@each_protecting
def test_the_statement_names_epsilon_and_what_is_left_out(name: str) -> None:
    told = mechanism(name, 2.5).describe_guarantee()
    assert told.startswith("label DP, epsilon_y 2.5, delta 0")
    assert told.endswith("features are not covered")


@each_protecting
def test_what_is_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 2 classes, got 1"):
        mechanism(name, classes=1)
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 1"):
        mechanism(name).randomise_labels(LABELS, key=b"x")


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 41.0, math.inf, math.nan])
@each_protecting
def test_an_epsilon_out_of_range_is_refused(epsilon: float, name: str) -> None:
    with pytest.raises(ConfigError, match=f"up to 40, got {epsilon}"):
        LABEL_MECHANISMS[name](epsilon=epsilon, classes=5)


@pytest.mark.parametrize(("label", "row"), [(5, 3), (-1, 0)])
@every
def test_what_are_no_labels_is_refused(label: int, row: int, name: str) -> None:
    labels = torch.zeros(6, dtype=torch.int64)
    labels[row] = label
    with pytest.raises(DataError, match=f"row {row} has label {label}, expected 0..4"):
        mechanism(name).randomise_labels(labels, key=KEY)


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)], ids=["floats", "a matrix"]
)
@every
def test_labels_of_another_kind_are_refused(other: torch.Tensor, name: str) -> None:
    with pytest.raises(LocalProtocolError, match="labels are int64 of shape"):
        mechanism(name).randomise_labels(other, key=KEY)


def test_any_answer_is_at_most_e_to_epsilon_likelier_for_one_label_than_for_another() -> None:
    assert torch.equal(
        mechanism("randomised_response", 40.0).randomise_labels(LABELS, key=KEY), LABELS
    )


@pytest.mark.parametrize(("epsilon", "classes"), [(0.5, 2), (1.0, 5), (8.0, 100), (40.0, 3)])
def test_an_answer_is_e_to_epsilon_likelier_for_its_label(epsilon: float, classes: int) -> None:
    response = LabelResponse(epsilon=epsilon, classes=classes)
    other = response.replace_probability / (classes - 1)
    assert math.log(response.keep_probability / other) == pytest.approx(epsilon)


def test_rounding_to_64_bits_never_raises_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """At epsilon 40 and 2 classes a replacement's chance is 78.4 of 2^64: 79 words replace."""
    words = [0, 78, 79, 2**64 - 1]
    stream = b"".join(word.to_bytes(8, "little") for word in words) + bytes(32)
    monkeypatch.setattr(
        "secure_apfed.privacy.randomised_response.keystream", lambda *_, length: stream
    )
    labels = torch.zeros(4, dtype=torch.int64)
    response = LabelResponse(epsilon=40.0, classes=2)
    assert response.randomise_labels(labels, key=KEY).tolist() == [1, 1, 0, 0]


def test_replacements_are_uniform_over_the_other_classes() -> None:
    changed = mechanism("randomised_response").randomise_labels(LABELS, key=KEY)
    shift = (changed - LABELS)[changed != LABELS] % 5
    assert set(shift.tolist()) == {1, 2, 3, 4}
    assert stats.chisquare(torch.bincount(shift)[1:].numpy()).pvalue > 0.001


ROWS = 60_000
PRIORS = {
    "even": [0.25, 0.25, 0.25, 0.25],
    "leaning": [0.4, 0.1, 0.3, 0.2],
    "two of four": [0.02, 0.49, 0.01, 0.48],
    "sure": [0.0, 0.0, 1.0, 0.0],
}


def make_response(epsilon: float = 1.0) -> MultiStageResponse:
    return MultiStageResponse(epsilon=epsilon, classes=4)


def compute_probabilities(prior: list[float], epsilon: float) -> np.ndarray:
    """Compute P(answer | label) by Algorithms 1 and 2 of Ghazi et al. 2021, written anew."""
    order = sorted(range(len(prior)), key=lambda y: (-prior[y], y))

    def right(k: int) -> float:
        return math.exp(epsilon) / (math.exp(epsilon) + k - 1) * sum(prior[y] for y in order[:k])

    k = max(range(1, len(prior) + 1), key=lambda k: (round(right(k), 12), -k))
    table = np.zeros((len(prior), len(prior)))
    for label, answer in itertools.product(range(len(prior)), order[:k]):
        if label not in order[:k]:
            table[label, answer] = 1 / k
        else:
            table[label, answer] = (math.exp(epsilon) if label == answer else 1) / (
                math.exp(epsilon) + k - 1
            )
    return table


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_every_answer_has_the_chance_that_the_algorithm_states(
    epsilon: float, prior: list[float]
) -> None:
    prior_NK = torch.tensor(prior, dtype=torch.float64).expand(ROWS, 4)
    table = compute_probabilities(prior, epsilon)
    for one, other in itertools.permutations(table, 2):
        assert (one <= math.exp(epsilon) * other + 1e-12).all()
    for label in range(4):
        answers = make_response(epsilon).randomise_labels(
            torch.full((ROWS,), label), key=KEY, prior_NK=prior_NK
        )
        counts = torch.bincount(answers, minlength=4).numpy()
        deviation = np.sqrt(ROWS * table[label] * (1 - table[label]))
        assert (abs(counts - ROWS * table[label]) <= 5 * deviation).all()


def test_a_prior_belongs_to_its_row_and_another_gives_independent_chances() -> None:
    rows = torch.eye(4)[[2, 0, 3]]
    assert make_response().randomise_labels(
        torch.tensor([0, 1, 2]), key=KEY, prior_NK=rows
    ).tolist() == [
        2,
        0,
        3,
    ]
    labels = torch.zeros(ROWS, dtype=torch.int64)
    prior = torch.full((ROWS, 4), 0.25)
    moved = make_response().randomise_labels(labels, key=KEY, prior_NK=prior) != 0
    prior[0] = torch.tensor([0.26, 0.25, 0.25, 0.24])
    assert not is_correlated(
        moved, make_response().randomise_labels(labels, key=KEY, prior_NK=prior) != 0
    )


@pytest.mark.parametrize(
    "wrong",
    [
        torch.full((2, 4), math.nan),
        torch.full((2, 4), math.inf),
        torch.full((2, 4), 0.3),
        torch.tensor([[1.5, -0.5, 0, 0], [1, 0, 0, 0]]),
        torch.zeros(2, 4),
    ],
    ids=["NaN", "infinite", "more than 1", "negative", "zeros"],
)
def test_what_is_no_prior_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="gives no probabilities"):
        make_response().randomise_labels(torch.tensor([0, 1]), key=KEY, prior_NK=wrong)


@pytest.mark.parametrize(
    "shaped",
    [torch.ones(3, 4) / 4, torch.ones(2, 5) / 5, torch.ones(2, 4).long()],
    ids=["rows", "classes", "whole numbers"],
)
def test_a_prior_of_another_shape_is_refused(shaped: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match=r"a prior has shape \(2, 4\)"):
        make_response().randomise_labels(torch.tensor([0, 1]), key=KEY, prior_NK=shaped)


def test_what_is_said_of_labels_without_label_dp() -> None:
    assert join_guarantees(RELEASED, NONE, is_training_private=False) == f"{RELEASED}; no label DP"
    assert join_guarantees(NOTHING_RELEASED, NONE, is_training_private=False) == NOTHING_RELEASED
    assert join_guarantees("private training", NONE, is_training_private=True) == "private training"


@pytest.mark.parametrize(
    ("released", "private", "seeded"),
    [*product([RELEASED, NOTHING_RELEASED], (False, True), (False, True))],
)
def test_label_dp_comes_with_its_assumptions(released: str, private: bool, seeded: bool) -> None:
    told = join_guarantees(released, RESPONSE, is_training_private=private, is_reproducible=seeded)
    assert told.startswith(f"{released}; label DP, epsilon_y 1, delta 0")
    assert LABEL_ASSUMPTIONS in told
    assert "no label DP" not in told
    assert ("does not know the run's seed" in told) is seeded


@pytest.mark.parametrize("seeded", [False, True])
def test_noise_under_a_sum_is_claimed_against_its_readers_only(seeded: bool) -> None:
    told = {
        name: contributions_statement(kind.leaks.single, is_reproducible=seeded)
        for name, kind in SECURE_SUMS.items()
    }
    assert not [name for name, text in told.items() if "whoever reads the sums alone" not in text]
    again = "played again in a later session counts again"
    assert not [name for name, text in told.items() if again not in text]
    knows = {name: "does not know the run's seed" in text for name, text in told.items()}
    assert knows == dict.fromkeys(told, seeded)
    assert "not against the aggregator" in told["plain"]
    assert "not against active and aggregator together" in told["ckks"]
    assert "not against" not in told["plain + pairwise masks"]


def test_rows_of_one_person_at_several_passives_add_up() -> None:
    assert joint_releases_statement(RELEASED, 1) == RELEASED
    told = f"{RELEASED}; epsilon_x is of one passive's row, and those of one person add up"
    assert joint_releases_statement(RELEASED, 2) == told
