from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from apfed_attacks.people.membership import Shadows, halves, likelihood_ratio, logit_confidence
from apfed_attacks.recorded import reveal_candidates
from apfed_attacks.run import mount
from apfed_attacks.scoring import receiver_curve, true_positives_at
from apfed_attacks.view import AttackError
from secure_apfed.config import AttackChoice
from secure_apfed.settings.training import TrainSettings
from tests.attacks.recordings import ByHeart

LIRA = AttackChoice(name="membership", options={"shadow_models": 8, "epochs": 15})


def _shadows(seed: int = 0, **train: Any) -> Shadows:
    settings = {"epochs": 2, "batch_size": 8, "learning_rate": 0.1, **train}
    return Shadows(
        make=lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)),
        train=TrainSettings(**settings),
        seed=seed,
        device=torch.device("cpu"),
    )


def _rows(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(count, 3, generator=draw)
    return features, (features[:, 0] > 0).long()


def _memory(features: torch.Tensor, labels: torch.Tensor) -> ByHeart:
    """Is sure of the rows that it learnt, and guesses the others."""

    def guess(rows: int) -> torch.Tensor:
        return torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))

    return ByHeart(features, labels, guess, 9 * torch.eye(3))


@pytest.mark.parametrize("bound", [None, 0.5])
@pytest.mark.parametrize("between", [nn.ReLU, nn.Tanh])  # a chain of products, and through vmap
def test_all_models_at_once_are_the_models_one_by_one(
    bound: float | None, between: type[nn.Module]
) -> None:
    features, labels = _rows()
    shadows, rows_SH = _shadows(max_gradient_norm=bound), halves(6, 40, 0)
    shadows = replace(
        shadows, make=lambda: nn.Sequential(nn.Linear(3, 5), between(), nn.Linear(5, 2))
    )
    together = shadows.scores(features, labels, rows_SH)
    apart = shadows.one_by_one(features, labels, rows_SH)
    assert together.shape == (6, 40, 2)
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(together[0], together[1])


def test_halves_are_pairs_of_complements() -> None:
    rows_SH = halves(4, 10, 3)
    for first, second in ((0, 1), (2, 3)):
        assert sorted([*rows_SH[first].tolist(), *rows_SH[second].tolist()]) == list(range(10))
    assert not torch.equal(rows_SH[0], rows_SH[2])
    assert halves(3, 11, 0).shape == (3, 5)


def test_batch_norm_is_refused() -> None:
    shadows = replace(_shadows(), make=lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    with pytest.raises(AttackError, match="networks without buffers"):
        shadows.scores(*_rows(), halves(2, 40, 0))


def test_logit_confidence_is_stable_for_sure_models() -> None:
    scores = torch.tensor([[800.0, 0.0], [0.0, 800.0], [1.0, 1.0]])
    phi = logit_confidence(scores, torch.tensor([0, 0, 1]))
    np.testing.assert_allclose(phi, [800, -800, 0], atol=1e-9)


@pytest.mark.parametrize("own", [False, True])
def test_the_ratio_favours_what_models_with_the_row_say(own: bool) -> None:
    draw = np.random.default_rng(0)
    inside = np.arange(64)[:, None] % 2 == np.zeros((1, 5), dtype=int)
    shadow = np.where(inside, 5.0, 1.0) + draw.normal(size=(64, 5))
    ratio = likelihood_ratio(np.array([5.0, 1, 5, 1, 3]), shadow, inside, own_variances=own)
    assert ratio[0] > 1 > -1 > ratio[1]
    assert ratio[2] > 1 > -1 > ratio[3]


def test_low_false_positive_rates_are_read_off_the_curve() -> None:
    scores = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0.0])
    members = np.array([1, 1, 0, 1, 0, 0, 0, 0, 0, 0], dtype=bool)
    curve = receiver_curve(scores, members)
    assert curve[0] == (0.0, 0.0)
    assert curve[-1] == (1.0, 1.0)
    assert true_positives_at(curve, 0.01) == pytest.approx(2 / 3)
    assert true_positives_at(curve, 1 / 7) == 1


@pytest.mark.planted("membership")
def test_a_model_that_learnt_by_heart_gives_its_rows_away(make_recording: Any) -> None:
    recording = make_recording("nothing")
    active, rows = recording.data.active, recording.data.train_rows
    memory = _memory(active.features[rows], active.labels[rows])
    result: Any = mount(replace(recording, model=memory), [LIRA], seed=0)[0]
    assert (result.adversary, result.metric, result.target) == ("outsider", "auc", "membership")
    assert result.score["auc"] > 0.9
    assert result.score["tpr_at_1_percent_fpr"] > 0.3
    assert result.advantage > 0.3
    assert result.roc[0] == (0.0, 0.0)
    assert {"auc of aligned members", "auc of unaligned members"} >= set(result.risk)


def test_a_model_that_saw_nobody_tells_nothing(make_recording: Any) -> None:
    recording = make_recording("nothing")
    active = recording.data.active
    stranger = _memory(active.features[:0], active.labels[:0])
    result: Any = mount(replace(recording, model=stranger), [LIRA], seed=0)[0]
    assert abs(result.score["auc"] - 0.5) < 0.25


def test_without_a_model_of_its_own_there_is_nobody_to_ask(make_recording: Any) -> None:
    (result,) = mount(make_recording("nothing"), [LIRA], seed=0)
    assert not result.applicable
    assert "no party has a model that an outsider could query" in (result.reason or "")


def test_candidates_are_half_members_in_an_order_that_says_nothing(make_recording: Any) -> None:
    recording = make_recording("nothing")
    candidates, members = reveal_candidates(recording, 40, 0)
    assert len(candidates) == len(members) == 40
    assert int(members[:, 0].sum()) == 20
    assert 0 < int(members[:20, 0].sum()) < 20
    with pytest.raises(AttackError, match="two of each"):
        reveal_candidates(recording, 2, 0)
