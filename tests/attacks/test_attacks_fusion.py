"""Released columns beside own ones: weights, and what own ones tell as the prior."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from apfed_attacks.columns import TRUST, beside, corrected
from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice

ROWS, KNOWN, CLASSES = 600, 30, 3


def _labels() -> NDArray[np.int64]:
    return np.arange(ROWS) % CLASSES


def _known(rows: int = KNOWN) -> NDArray[np.int64]:
    """The labels of the first rows; -1 for the others."""
    return np.where(np.arange(ROWS) < rows, _labels(), -1)


def _own() -> NDArray[np.float64]:
    """Columns that tell something of the label."""
    own = np.random.default_rng(0).normal(size=(ROWS, 3))
    own[:, 0] += _labels()
    return _standardised(own)


def _released(strength: float, *, width: int = 30, seed: int = 1) -> NDArray[np.float64]:
    """Noise, and the label in the first columns as far as `strength` says."""
    released = np.random.default_rng(seed).normal(size=(ROWS, width))
    released[:, :CLASSES] += strength * np.eye(CLASSES)[_labels()]
    return _standardised(released)


def _standardised(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    return scaled


def _probed(columns: NDArray[np.float64]) -> Any:
    """What a probe finds with the known rows."""
    return LogisticRegression().fit(columns[:KNOWN], _labels()[:KNOWN]).predict_proba(columns)


def _accuracy(scores: NDArray[np.float64]) -> float:
    return float((scores.argmax(axis=1) == _labels())[KNOWN:].mean())


def test_released_columns_stand_beside_own_ones_in_several_weights() -> None:
    released, own = _released(0, width=4), _own()
    columns = beside("h", released, own)
    assert list(columns) == ["h and x", "0.3 h and x", "0.1 h and x"]
    for weight, both in zip((1, 0.3, 0.1), columns.values(), strict=True):
        np.testing.assert_array_equal(both, np.hstack([weight * released, own]))


@pytest.mark.parametrize(("per_class", "corrects"), [(0, False), (1, True), (4, True)])
def test_own_columns_are_a_prior_where_labels_are_known(
    make_recording: Any, per_class: int, corrects: bool
) -> None:
    options = {"labels_per_class": per_class, "iterations": 5}
    choice = AttackChoice(name="model_completion", options=options)
    result: Any = mount(make_recording("nothing", epochs=1), [choice], seed=0)[0]
    found = [name for name in result.variants if name.startswith("x corrected")]
    assert found == [f"x corrected by {trust:g} of h" for trust in TRUST if corrects]


@pytest.mark.parametrize("trust", [trust for trust in TRUST if trust < 1])
@pytest.mark.parametrize("seed", range(1, 4))
def test_noise_corrects_little(seed: int, trust: float) -> None:
    prior, noise = _probed(_own()), _released(0, seed=seed)
    found = _accuracy(corrected(prior, noise, _known(), trust))
    assert found == pytest.approx(_accuracy(prior), abs=0.05)
    # Noise of unit variance beside own columns does more harm.
    assert found > _accuracy(_probed(np.hstack([noise, _own()])))


def test_what_holds_the_label_is_believed() -> None:
    prior, released = _probed(_own()), _released(6, width=6)
    found = [_accuracy(corrected(prior, released, _known(), trust)) for trust in TRUST]
    assert found == sorted(found)
    assert found[0] > _accuracy(prior)
    assert found[-1] > _accuracy(prior) + 0.15


def test_of_a_weak_leak_more_is_found_than_by_probes_side_by_side() -> None:
    prior = _probed(_own())
    gains = []
    for seed in range(1, 7):
        released = _released(1, width=200, seed=seed)
        columns = beside("h", released, _own()).values()
        best = max(_accuracy(_probed(both)) for both in columns)
        found = _accuracy(corrected(prior, released, _known(), 0.3))
        gains.append([found - _accuracy(prior), best - _accuracy(prior)])
    ours, probes = np.mean(gains, axis=0)
    assert ours > 0.015
    assert ours > 1.5 * probes


def test_without_trust_the_prior_stays() -> None:
    prior = _probed(_own())
    before = prior.copy()
    np.testing.assert_allclose(corrected(prior, _released(2), _known(), 0.0), prior, atol=1e-9)
    np.testing.assert_array_equal(prior, before)


def test_the_order_of_rows_does_not_matter() -> None:
    prior, released, known = _probed(_own()), _released(1), _known()
    order = np.random.default_rng(5).permutation(ROWS)
    found = corrected(prior[order], released[order], known[order], 0.3)
    np.testing.assert_allclose(found, corrected(prior, released, known, 0.3)[order], atol=1e-9)


def test_a_class_that_nobody_knows_is_not_guessed() -> None:
    prior, known = np.zeros((ROWS, 5)), np.where(_known() == 1, -1, _known())
    prior[:, [0, 2]] = 0.5
    found = corrected(prior, _released(1), known, 0.3)
    assert set(found.argmax(axis=1)) == {0, 2}
    assert found[:, [1, 3, 4]].max() < 1e-6


@pytest.mark.parametrize("trust", [*TRUST, 1.0])
@pytest.mark.parametrize("known", [_known(), _known(1), _known(0), _labels()])
@pytest.mark.parametrize(
    "released",
    [
        _standardised(np.eye(CLASSES)[_labels()]),  # no variance within a class
        np.zeros((ROWS, 4)),
        np.zeros((ROWS, 0)),
        _released(2, width=2_000),
        _standardised(np.where(np.arange(ROWS) == 7, 1e6, 0.0)[:, None]),
    ],
    ids=["sure", "constant", "none", "wide", "outlier"],
)
@pytest.mark.parametrize("sure", [False, True])
def test_scores_are_probabilities(
    released: NDArray[np.float64], known: NDArray[np.int64], trust: float, sure: bool
) -> None:
    prior = np.eye(CLASSES)[_labels()] if sure else np.full((ROWS, CLASSES), 1 / CLASSES)
    found = corrected(prior, released, known, trust)
    assert found.shape == (ROWS, CLASSES)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)
