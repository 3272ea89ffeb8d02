"""Every defence of the table: refused where it does nothing, and what it does where it acts."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS
from secure_apfed.privacy.defences import (
    DEFENCES,
    GradientDefence,
    Leaving,
    Pair,
    best_noise,
    describe_defences,
    describe_runners,
    gradient_defences,
)
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.runs.run import run
from secure_apfed.settings.privacy import CompressionSettings, DefenceSettings, MarvellSettings
from tests.secure_apfed.small_runs import interrupt_run, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

APPLIES = [
    (name, method)
    for name in DEFENCES
    for method in ("apfed_c", "tvfl")
    if describe_runners(name, METHODS[method].public_facts)
]


def config_of(method: str, *defences: dict[str, Any], **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
        "defences": list(defences),
    }
    return small_config(method, **{**usual, **changes})


def built(settings: DefenceSettings) -> GradientDefence:
    return DEFENCES[settings.kind](settings, noise=NoiseSource(b"k" * 32), classes=2)


@pytest.mark.parametrize("name", DEFENCES)
def test_table_and_guide_say_the_same_of_a_defence(name: str) -> None:
    text = Path("docs/extend.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    assert f"| {', '.join(DEFENCES[name].protects)} |" in row
    shown = row.rstrip(" |").split(" | ")[-2:]
    run_by = [
        describe_runners(name, METHODS[method].public_facts).removeprefix("the ")
        for method in ("apfed_c", "tvfl")
    ]
    plain = [who or "refused" for who in run_by]
    assert [one if who else one[:7] for one, who in zip(shown, run_by, strict=True)] == plain


def test_table_and_settings_name_the_same_defences() -> None:
    defaults = [cls.model_fields["kind"].default for cls in get_args(get_args(DefenceSettings)[0])]
    assert [kind for kind in defaults if isinstance(kind, str)] == list(DEFENCES)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for method in METHODS
        for name in DEFENCES
        if not describe_runners(name, METHODS[method].public_facts)
    ],
)
def test_a_defence_that_does_nothing_is_refused_with_the_reason(name: str, method: str) -> None:
    text = dump_settings(config_of(method))
    with_it = text.replace("defences: []", f"defences: [{{kind: {name}}}]")
    with pytest.raises(ConfigError, match=f"{name} does not apply to method {method}: no "):
        load_config_text(with_it)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{kind: marvel}", "did you mean 'marvell'"),
        ("{kind: marvell, strenght: 1.0}", "did you mean 'strength'"),
        ("{kind: compression, keep: 0}", "number > 0"),
        ("{kind: compression, keep: 1.5}", "number <= 1"),
        ("{kind: marvell, strength: .nan}", "strength"),
        ("{kind: marvell}, {kind: marvell}", "given 2 times"),
        ("{keep: 1.0}", "kind"),
    ],
)
def test_wrong_settings_are_refused_with_the_nearest_key(given: str, said: str) -> None:
    text = dump_settings(config_of("tvfl"))
    with pytest.raises(ConfigError, match=said):
        load_config_text(text.replace("defences: []", f"defences: [{given}]"))


def test_marvell_refuses_more_than_two_classes_before_training() -> None:
    config = config_of("tvfl", {"kind": "marvell"}, data={"dataset": "digits"})
    with pytest.raises(ConfigError, match="binary labels, the data have 10 classes"):
        run(config, None)


@cache
def sums_or_gradients(method: str, *kinds: str) -> bytes:
    """Return what leaves under a defence in the last epoch, shaped by all training before it."""
    kept = run(config_of(method, *({"kind": kind} for kind in kinds)), None).recording.transcript
    if method == "tvfl":
        return b"".join(
            one.payload for one in kept.envelopes_by_epoch[1] if one.kind is Kind.GRADIENTS
        )
    return b"".join(opened.numpy().tobytes() for opened in kept.sums_by_step.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), APPLIES)
def test_it_changes_what_leaves_and_resumes_bit_for_bit(
    name: str, method: str, tmp_path: Path
) -> None:
    """None is accepted and then forgotten."""
    assert gradient_defences([], "contributions", noise=NoiseSource(b"k" * 32), classes=2) == ()
    assert sums_or_gradients(method) != sums_or_gradients(method, name)
    config = config_of(method, {"kind": name})
    whole = run(config, tmp_path / "whole")
    assert all(not math.isnan(value) for value in whole.accuracy.values())
    interrupt_run(config, tmp_path / "part", at_step=4)
    resumed = run(config, tmp_path / "part", resume=True)
    assert resumed.accuracy == whole.accuracy
    if whole.recording.model is not None and resumed.recording.model is not None:
        models = (whole.recording.model.parameters(), resumed.recording.model.parameters())
        assert all(map(torch.equal, *models))


@pytest.mark.parametrize(
    ("method", "told"),
    [("apfed_c", "compression by every passive"), ("tvfl", "compression by the active")],
)
def test_a_result_tells_who_ran_a_defence_and_that_it_guarantees_nothing(
    method: str, told: str, tmp_path: Path
) -> None:
    run(config_of(method, {"kind": "compression"}), tmp_path / method)
    result = json.loads((tmp_path / method / "result.json").read_bytes())
    assert f"defences without a guarantee: {told}" in result["guarantee"]


def test_without_a_defence_nothing_is_told() -> None:
    assert describe_defences([], METHODS["tvfl"].public_facts) == []


@pytest.mark.parametrize("keep", [0.01, 0.25, 1.0])
def test_compression_keeps_the_largest_numbers(keep: float) -> None:
    gradient_BD = torch.randn(16, 5)
    compression = built(CompressionSettings(keep=keep))
    sent_BD = compression.protect_gradient(gradient_BD, Leaving(0, "active"))
    kept = sent_BD != 0
    assert int(kept.sum()) == math.ceil(keep * 80)
    assert torch.equal(sent_BD[kept], gradient_BD[kept])
    if keep < 1:
        assert gradient_BD[kept].abs().min() >= gradient_BD[~kept].abs().max()


def test_compression_keeps_as_many_of_equal_numbers() -> None:
    compression = built(CompressionSettings(keep=0.5))
    assert int(compression.protect_gradient(torch.ones(4, 4), Leaving(0, "a")).sum()) == 8


def leaky_gradients(rows: int = 4000, dimension: int = 8) -> tuple[Tensor, Tensor]:
    """Rows (p - y) w of an imbalanced binary task: positive ones are longer and point away."""
    generator = torch.Generator().manual_seed(0)
    labels_B = (torch.rand(rows, generator=generator) < 0.25).long()
    scores_B = torch.sigmoid(torch.randn(rows, generator=generator) - 1.5)
    weights_D = torch.randn(dimension, generator=generator)
    wobble_BD = 1 + 0.1 * torch.randn(rows, dimension, generator=generator)
    return (scores_B - labels_B)[:, None] * weights_D * wobble_BD, labels_B


def attack_aucs(gradient_BD: Tensor, labels_B: Tensor) -> tuple[float, float]:
    """Li et al.'s two: by norm, and by cosine with one known positive row's gradient."""
    first = int(labels_B.nonzero()[0])
    cosine_B = torch.cosine_similarity(gradient_BD, gradient_BD[first][None])
    return (
        float(roc_auc_score(labels_B, gradient_BD.norm(dim=1))),
        float(roc_auc_score(labels_B, cosine_B)),
    )


def test_marvell_moves_norm_and_direction_attacks_towards_chance() -> None:
    gradient_BD, labels_B = leaky_gradients()
    plain = attack_aucs(gradient_BD, labels_B)
    assert min(plain) > 0.9
    defence = built(MarvellSettings(strength=8.0))
    sent_BD = defence.protect_gradient(gradient_BD, Leaving(0, "p1", labels_B))
    norm, direction = attack_aucs(sent_BD, labels_B)
    assert abs(norm - 0.5) < 0.1
    assert direction < 0.7
    noise_BD = sent_BD - gradient_BD
    unit = (gradient_BD[labels_B == 1].mean(0) - gradient_BD[labels_B == 0].mean(0)).square().sum()
    assert noise_BD.square().sum(1).mean() < 1.1 * 8.0 * unit


def sum_kl(along: np.ndarray, across: np.ndarray, spread: Pair, dimension: int) -> np.ndarray:
    """KL of the perturbed classes, both ways, nats (Li et al. 2022, Theorem 2)."""
    a0 = along[0] + spread[0]
    a1 = along[1] + spread[1]
    c0 = across[0] + spread[0]
    c1 = across[1] + spread[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = (dimension - 1) * (c0 / c1 + c1 / c0) if dimension > 1 else 0.0
        return np.asarray((rest + (a0 + 1) / a1 + (a1 + 1) / a0) / 2 - dimension)


@pytest.mark.parametrize(("positive", "power"), [(0.02, 8.0), (0.25, 0.5), (0.5, 8.0), (0.9, 0.5)])
@pytest.mark.parametrize(
    ("dimension", "spread"), [(1, (0.3, 0.05)), (2, (0.001, 2.0)), (64, (0.0, 0.0))]
)
def test_marvell_finds_the_numerical_optimum(
    dimension: int, spread: Pair, positive: float, power: float
) -> None:
    along, across = best_noise(positive=positive, dimension=dimension, spread=spread, power=power)
    weights = np.array([1 - positive, positive])
    weights = np.concatenate([weights, (dimension - 1) * weights])
    assert weights @ [*along, *across] <= power * (1 + 1e-9)
    assert all(a >= c >= 0 for a, c in zip(along, across, strict=True))
    # All ways of sharing the power out, on a fine grid in logarithms.
    shares = np.concatenate([[0.0], np.geomspace(1e-5, 1.0, 20)])
    grid = np.stack(np.meshgrid(shares, shares, shares, shares), -1).reshape(-1, 4)
    used = grid @ weights
    grid = (grid[used > 0] * (power / used[used > 0])[:, None]).T
    ordered = (grid[0] >= grid[2]) & (grid[1] >= grid[3])
    least = float(np.nanmin(sum_kl(grid[:2], grid[2:], spread, dimension)[ordered]))
    found = sum_kl(np.array(along), np.array(across), spread, dimension)
    assert found <= least * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize("label", [0, 1])
def test_marvell_sends_zeros_for_a_batch_of_one_class(label: int) -> None:
    labels_B = torch.full((6,), label)
    sent_BD = built(MarvellSettings()).protect_gradient(
        torch.randn(6, 4), Leaving(0, "p", labels_B)
    )
    assert not sent_BD.any()


def test_marvell_needs_labels() -> None:
    with pytest.raises(LocalProtocolError, match="labels"):
        built(MarvellSettings()).protect_gradient(torch.randn(6, 4), Leaving(0, "p"))


def test_marvell_gives_each_passive_and_step_other_noise() -> None:
    gradient_BD, labels_B = leaky_gradients(64)
    defence = built(MarvellSettings())
    first, *others = (
        defence.protect_gradient(gradient_BD, Leaving(step, name, labels_B))
        for step, name in ((0, "a"), (0, "b"), (1, "a"))
    )
    assert torch.equal(first, defence.protect_gradient(gradient_BD, Leaving(0, "a", labels_B)))
    assert not any(torch.allclose(first, other) for other in others)
