from typing import Any

import numpy as np
import pytest
import torch

from apfed_attacks.features.decoder_extraction import DecoderExtraction, _procrustes
from apfed_attacks.features.regression import Regression
from apfed_attacks.live.runs import play
from tests.attacks.recordings import TWO_TABLES, live_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
UNPROTECTED: frozenset[Any] = frozenset()


def _play(hidden: list[int], *, pairs: int, **changes: Any) -> Any:
    config = live_config("apfed_r", model={"hidden": hidden}, **changes)
    attack = DecoderExtraction(people=160, shadow_rows=pairs)
    return play(attack, config, victims=["passive-1"], rules=UNPROTECTED)[0]


@pytest.mark.planted("decoder_extraction")
def test_a_linear_decoder_gives_ten_features_away_for_eleven_pairs() -> None:
    result = _play([], pairs=11, data=TWO_TABLES)
    assert result.variants["gram"]["mse"] < 1e-6
    assert result.variants["affine on answers"]["mse"] < 1e-6
    assert result.baselines[result.baseline]["mse"] > 0.1


def test_at_one_point_every_decoder_is_affine() -> None:
    assert _play([64], pairs=11, data=TWO_TABLES).variants["affine on answers"]["mse"] < 1e-6


def test_a_feature_that_is_the_same_in_all_pairs_stays_there_and_spoils_no_other() -> None:
    draw = np.random.default_rng(0)
    x_NF = draw.normal(size=(30, 4))
    x_NF[:12, 2] = 0.5
    shadow_N = np.arange(30) < 12
    turn_FF = np.linalg.qr(draw.normal(size=(4, 4)))[0]
    regress = Regression(torch.arange(30), x_NF[:12], shadow_N, hidden=4, iterations=1, seed=0)
    found = _procrustes(regress, 3 * x_NF @ turn_FF + 7)
    assert np.abs(found - x_NF[12:])[:, [0, 1, 3]].max() < 1e-12
    assert np.abs(found[:, 2] - 0.5).max() < 1e-12


def test_fewer_pairs_than_numbers_do_not_fix_the_answer() -> None:
    result = _play([], pairs=5, data=TWO_TABLES)
    assert result.variants["affine on answers"]["mse"] > 1e-2


def test_a_sum_of_three_is_affine_in_all_their_features() -> None:
    result = _play([32], pairs=90)
    assert result.variants["affine on answers"]["r2"] > 0.95


@pytest.mark.refused("decoder_extraction")
def test_the_protocol_refuses_one_point() -> None:
    config = live_config("apfed_r")
    (result,) = play(DecoderExtraction(people=60), config, victims=["passive-1"])
    assert result.reason is not None
    assert result.reason.startswith("the protocol refused: active sent a near-constant batch")


def test_one_point_among_decoys_is_answered_and_tells() -> None:
    # An honest limit of the rule: less than half of a batch may still be at one point.
    sums = {"scheme": "ckks", "clip": 1.0}
    config = live_config("apfed_r", data=TWO_TABLES, secure_sum=sums)
    attack = DecoderExtraction(people=28, shadow_rows=14, decoys=0.55)
    (result,) = play(attack, config, honest_epochs=3)
    assert result.score["r2"] is not None
    assert result.score["r2"] > 0.7
    assert result.advantage is not None
    assert result.advantage > 0.3
