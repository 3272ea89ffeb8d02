"""What an aggregator and an active read of sums in real runs, whatever passives have agreed on."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from apfed_attacks.columns import hash_inputs
from apfed_attacks.features.contribution_regression import decode_numbers
from apfed_attacks.features.gradient_projection import compute_residuals
from apfed_attacks.features.opened import average_rows
from apfed_attacks.interface import AttackResult
from apfed_attacks.recorded import reveal_truth
from apfed_attacks.view import iter_batches
from apfed_protocols.sums.frames import Frame, FrameKind
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from tests.attacks.recordings import (
    live_config,
    normal,
    replace_opened_sums,
    run_attack,
    run_attack_by,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]

SUMS: dict[str, dict[str, Any]] = {
    "plain": {"scheme": "plain", "masks": "none", "clip": None},
    "fixed point": {"scheme": "plain", "masks": "none", "clip": 1.0, "bits": 16},
    "masked": {"scheme": "plain", "masks": "pairwise", "clip": 1.0},
    "recoverable": {"scheme": "plain", "masks": "recoverable", "clip": 1.0, "threshold": 2},
    "ckks": {"scheme": "ckks", "masks": "none", "clip": 1.0},
}
MIXES: dict[str, list[str]] = {
    "reconstruction": ["reconstruction"] * 3,
    "contrastive": ["contrastive"] * 3,
    "clustering": ["clustering"] * 3,
    "two of three": ["reconstruction", "contrastive", "contrastive"],
    "all of them": ["reconstruction", "contrastive", "clustering"],
}


QUICK: dict[str, Any] = {"iterations": 5, "hidden": 8}


def make_objectives(objectives: list[str]) -> dict[str, Any]:
    return {
        f"passive-{at}": {"objective": {"name": name}, "weight": 10.0}
        for at, name in enumerate(objectives, start=1)
    }


@cache
def record_run(total: str, mix: str = "two of three") -> Recording:
    config = live_config(
        "apfed",
        secure_sum=SUMS[total],
        passives=make_objectives(MIXES[mix]),
        train={"epochs": 2},
        transcript={"keep": "all"},
    )
    return run(config, None).recording


def attack_as_aggregator(total: str) -> AttackResult:
    name = "contribution_regression"
    reader = "aggregator"
    victim = "passive-1"
    result: AttackResult = run_attack_by(
        reader, record_run(total), name, victim, shadow_rows=60, **QUICK
    )
    return result


@pytest.mark.parametrize("total", ["plain", "fixed point"])
def test_an_aggregator_reads_a_sum_in_the_clear(total: str) -> None:
    result = attack_as_aggregator(total)
    assert result.advantage is not None
    assert result.advantage > 0.5


@pytest.mark.parametrize("total", ["masked", "recoverable"])
def test_an_aggregator_reads_masked_words_and_finds_nothing(total: str) -> None:
    result = attack_as_aggregator(total)
    assert result.applicable, result.reason
    assert result.counts["scored"] > 50, "words were there to be read"
    assert result.advantage is not None
    assert abs(result.advantage) < 0.2


def test_an_aggregator_of_ciphertexts_says_that_there_is_nothing_to_read() -> None:
    result = attack_as_aggregator("ckks")
    assert not result.applicable
    assert result.reason == "nothing to read: ciphertexts (ckks)"


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("mix", [*MIXES][::-1])
@pytest.mark.parametrize("name", ["gradient_regression", "gradient_projection"])
def test_an_active_reads_sums_of_any_mix(name: str, mix: str) -> None:
    results = run_attack(record_run("masked", mix), name, shadow_rows=60, **QUICK)
    assert [result.victim for result in results] == ["passive-1", "passive-2", "passive-3"]
    assert [result.reason for result in results] == [None] * 3


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("mix", [*MIXES][::-1])
def test_a_projection_under_any_mix_is_found(mix: str) -> None:
    recording = record_run("masked", mix)
    features = reveal_truth(recording).features["passive-2"].flatten(1).double()
    weights = normal(features.shape[1], 64, seed=1)
    opened = {
        step: features[rows_B] @ weights + normal(len(rows_B), 64, seed=step)
        for epoch in (0, 1)
        for step, rows_B, _ in iter_batches(active_view(recording), epoch)
    }
    found = replace_opened_sums(recording, opened)
    attack = "gradient_regression"
    result = run_attack_by("active", found, attack, "passive-2", shadow_rows=60, **QUICK)
    assert result.advantage > 0.3


def active_view(recording: Recording) -> Any:
    from apfed_attacks.recorded import make_view
    from apfed_attacks.view import Knowledge

    return make_view(recording, ["active"], knowledge=Knowledge(classes=10))


def frame_of(values: np.ndarray[Any, Any], name: str) -> Frame:
    return Frame(
        kind=FrameKind.CONTRIBUTION,
        name=name,
        index_or_count=0,
        step=1,
        rows=len(values),
        columns=values.shape[1],
        binding=bytes(32),
        fingerprint=bytes(32),
        blobs=(b"other parts", values.tobytes()),
    )


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<i8"])
def test_numbers_of_a_plain_contribution_are_read_as_they_were_sent(dtype: str) -> None:
    values = (100 * normal(5, 3, seed=0).numpy()).astype(dtype)
    found = decode_numbers(frame_of(values, "plain"))
    assert found is not None
    assert np.array_equal(found, values.astype(np.float64))


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_masked_words_are_read_as_signed_ones(dtype: str) -> None:
    words = np.array([[1, 2], [3, np.iinfo(dtype).max]], dtype=dtype)
    found = decode_numbers(frame_of(words, "plain + pairwise masks"))
    assert found is not None
    assert found.tolist() == [[1, 2], [3, -1]]


def test_ciphertexts_hold_no_numbers() -> None:
    frame = frame_of(np.zeros((1, 4099), dtype=np.uint8), "ckks")
    assert decode_numbers(frame) is None


def test_what_was_sent_explains_a_linear_part_and_no_more() -> None:
    sent_ND = normal(300, 4, seed=1)
    own_ND = normal(300, 6, seed=2)
    sums_ND = 5 * sent_ND @ normal(4, 6, seed=3) + own_ND + 7
    left = compute_residuals(sums_ND, sent_ND)
    assert torch.corrcoef(torch.stack([left.flatten(), own_ND.flatten()]))[0, 1] > 0.99


def test_fewer_rows_than_numbers_keep_their_sums_less_the_mean() -> None:
    sums_ND = normal(4, 6, seed=1)
    left = compute_residuals(sums_ND, normal(4, 6, seed=2))
    assert torch.allclose(left, sums_ND - sums_ND.mean(dim=0))


def test_sums_of_a_row_are_averaged_over_its_steps() -> None:
    first = (torch.tensor([4, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    second = (torch.tensor([4]), torch.tensor([[3.0, 6.0]], dtype=torch.float64))
    nothing = (torch.tensor([], dtype=torch.int64), torch.zeros(0, 2, dtype=torch.float64))
    averages = average_rows([nothing, first, second])
    assert averages is not None
    assert averages.positions.tolist() == [0, 4]
    assert averages.z.tolist() == [[3.0, 4.0], [2.0, 4.0]]
    assert average_rows([nothing]) is None


def test_fits_of_other_columns_have_another_name() -> None:
    columns_NF = np.arange(6.0).reshape(2, 3)
    inputs = [
        (columns_NF,),
        (columns_NF.T,),
        (columns_NF.reshape(3, 2),),
        (columns_NF.astype(np.float32),),
        (columns_NF, 1),
        (columns_NF, "1"),
    ]
    names = [hash_inputs(*values) for values in inputs]
    assert len(set(names)) == len(names)
    assert hash_inputs(columns_NF.copy()) == names[0]
