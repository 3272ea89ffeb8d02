"""What each defence does to what leaves a party, on planted leaks and in real runs."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.defences import Leaving, Surroundings
from secure_apfed.defences.gradients import (
    ClipAndNoise,
    Compression,
    DiscreteSgd,
    Marvell,
    MaxNorm,
    Pair,
    best_noise,
)
from secure_apfed.defences.trained import ConfusionalLabels, Mid, distance_correlation, gaussian_kl
from secure_apfed.errors import ModelError
from secure_apfed.exchange import Kind, TensorSpec, unpack
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.runs.run import run
from secure_apfed.settings.privacy import (
    ClipAndNoiseSettings,
    CompressionSettings,
    ConfusionalLabelsSettings,
    DiscreteSgdSettings,
    MarvellSettings,
    MaxNormSettings,
    MidSettings,
)

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def around(classes: int = 2, size: int = 4) -> Surroundings:
    noise = NoiseSource(b"k" * 32)
    return Surroundings(party="p", seed=0, noise=noise, classes=classes, size=size)


def config_of(method: str, dataset: str = "breast_cancer", **changes: object) -> Config:
    settings = {
        "name": "test",
        "party_seeds": "shared_for_comparison",
        "method": method,
        "data": {"dataset": dataset, "overlap": 1.0},
        "model": {"hidden": [16], "representation": 8, "projection": 8},
        "train": {"epochs": 10, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "guard": {"mechanism": "none"},
    }
    return Config.model_validate({**settings, **changes})


def released(config: Config) -> tuple[Tensor, Tensor]:
    """Features of the active and what it released of them in the last epoch."""
    recording = run(config, None).recording
    data: VerticalData = recording.data
    rows, z = [], []
    for envelope in recording.transcript.kept[9]:
        if envelope.kind is Kind.REPRESENTATIONS and envelope.receiver == data.passives[0].name:
            expected = {
                "rows": TensorSpec(torch.int64, (None,)),
                "z": TensorSpec(torch.float32, (None, 8)),
            }
            tensors, _ = unpack(envelope.payload, expected, sender=envelope.sender)
            rows.append(tensors["rows"])
            z.append(tensors["z"])
    own = recording.alignment[data.active.name][torch.cat(rows)]
    return data.active.features[own], torch.cat(z)


def test_nopeek_lowers_the_distance_correlation_of_what_is_released() -> None:
    without = distance_correlation(*released(config_of("apfed_r")))
    config = config_of("apfed_r", defences=[{"kind": "nopeek", "weight": 0.5}])
    assert distance_correlation(*released(config)) < without - 0.05


def test_distance_correlation_is_that_of_its_definition() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 30, 3))
    y[:, 0] += x[:, 0] ** 2

    def centred(v: np.ndarray) -> np.ndarray:
        d = np.linalg.norm(v[:, None] - v[None], axis=2)
        return np.asarray(d - d.mean(0)[None] - d.mean(1)[:, None] + d.mean())

    a, b = centred(x), centred(y)
    expected = math.sqrt((a * b).mean() / math.sqrt((a * a).mean() * (b * b).mean()))
    assert float(distance_correlation(torch.tensor(x), torch.tensor(y))) == pytest.approx(expected)
    assert float(distance_correlation(torch.tensor(x), torch.tensor(3 * x + 1))) == pytest.approx(1)


def test_distance_correlation_has_a_finite_gradient_in_edge_cases() -> None:
    x, h, pairs = torch.randn(6, 3), torch.randn(6, 2), [0, 0, 1, 1, 2, 2]
    edges = ((torch.ones(6, 3), h), (x, torch.ones(6, 2)), (x[pairs], h[pairs]), (x[:2], h[:2]))
    for x_B, sent_B in edges:
        h_B = sent_B.clone().requires_grad_()
        distance_correlation(x_B, h_B).backward()
        assert h_B.grad is not None
        assert h_B.grad.isfinite().all()


def trained_kl(weight: float) -> tuple[float, float]:
    """KL and task error of a bottleneck before a linear task, after training."""
    torch.manual_seed(0)
    h_BD = 2 * torch.randn(256, 4)
    target_B = h_BD[:, 0]
    mid, head = Mid(MidSettings(weight=weight), around()), nn.Linear(4, 1)
    adam = torch.optim.Adam([*mid.parameters(), *head.parameters()], lr=0.02)
    error = target_B.var()
    for step in range(300):
        t_BD, penalty = mid(h_BD, h_BD, step)
        error = (head(t_BD)[:, 0] - target_B).square().mean()
        adam.zero_grad()
        (error + penalty).backward()
        adam.step()
    with torch.no_grad():
        return gaussian_kl(mid.mean(h_BD), mid.log_deviation(h_BD)).item(), error.item()


def test_mid_lowers_the_bound_and_keeps_what_the_task_needs() -> None:
    loose, tight = trained_kl(0.0), trained_kl(0.05)
    assert tight[0] < 0.5 * loose[0]
    assert tight[1] < 1.0  # of a target of variance 4


def test_mid_is_the_mean_when_it_only_predicts_and_noisy_when_it_trains() -> None:
    mid, h_BD = Mid(MidSettings(), around()), torch.randn(64, 4)
    noisy_BD, _ = mid(h_BD, h_BD, 0)
    assert torch.allclose((noisy_BD - h_BD).std(), torch.tensor(0.1), rtol=0.2)
    assert not torch.equal(noisy_BD, mid(h_BD, h_BD, 1)[0])
    assert torch.equal(mid.eval()(h_BD, h_BD, 0)[0], mid.mean(h_BD))


def test_the_kl_is_that_of_torch() -> None:
    mean_BD, log_deviation_BD = torch.randn(2, 16, 4)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean_BD, log_deviation_BD.exp()),
        torch.distributions.Normal(0.0, 1.0),
    )
    assert torch.allclose(gaussian_kl(mean_BD, log_deviation_BD), expected.sum(1).mean())


@pytest.mark.parametrize("classes", [2, 30])
def test_confusional_labels_mislead_a_reader_of_gradients_and_decode(classes: int) -> None:
    """A gradient on scores, p minus target, is most negative where the label is."""
    code = ConfusionalLabels(ConfusionalLabelsSettings(), around(classes))
    labels_N = torch.arange(classes).repeat(20)
    scores_NK = 0.1 * torch.randn(len(labels_N), classes)
    for targets, least, most in (
        (nn.functional.one_hot(labels_N, classes), 0.99, 1.0),
        (code.targets(labels_N), 0.0, 0.05),
    ):
        read_N = (scores_NK.softmax(1) - targets).argmin(1)
        assert least <= float((read_N == labels_N).float().mean()) <= most
    assert torch.equal(code.decode(code.targets(labels_N).log()).argmax(1), labels_N)


def test_confusional_labels_keep_the_accuracy_of_joint_training_or_are_refused() -> None:
    without = run(config_of("tvfl"), None).accuracy["tvfl"]
    config = config_of("tvfl", defences=[{"kind": "confusional_labels", "steps": 500}])
    assert run(config, None).accuracy["tvfl"] > without - 0.05
    settings = ConfusionalLabelsSettings(steps=1)
    with pytest.raises(ModelError, match="decodes"):
        ConfusionalLabels(settings, around(20))


def test_compression_keeps_the_largest_numbers() -> None:
    gradient_BD = torch.randn(16, 5)
    for keep in (0.01, 0.25, 1.0):
        compression = Compression(CompressionSettings(keep=keep), around())
        sent_BD = compression.protect(gradient_BD, Leaving(0, "active"))
        kept = sent_BD != 0
        assert int(kept.sum()) == math.ceil(keep * 80)
        assert torch.equal(sent_BD[kept], gradient_BD[kept])
        if keep < 1:
            assert gradient_BD[kept].abs().min() >= gradient_BD[~kept].abs().max()
    compression = Compression(CompressionSettings(keep=0.5), around())
    assert int(compression.protect(torch.ones(4, 4), Leaving(0, "a")).sum()) == 8


@pytest.mark.parametrize("bins", [1, 6])
def test_discrete_sgd_leaves_few_levels(bins: int) -> None:
    defence = DiscreteSgd(DiscreteSgdSettings(bins=bins), around())
    gradient_BD = torch.randn(64, 8)
    sent_BD = defence.protect(gradient_BD, Leaving(0, "a"))
    assert len(sent_BD.unique()) <= bins + 1
    inside = (gradient_BD - gradient_BD.mean()).abs() < 1.9 * gradient_BD.std()
    step = 4 * gradient_BD.std() / bins
    assert (sent_BD - gradient_BD)[inside].abs().max() < 0.51 * step
    same = torch.full((3, 3), 2.0)
    assert torch.equal(defence.protect(same, Leaving(0, "a")), same)


def clip_noise(sigma: float, gradient_BD: Tensor, step: int = 0) -> Tensor:
    defence = ClipAndNoise(ClipAndNoiseSettings(clip=0.5, sigma=sigma), around())
    return defence.protect(gradient_BD, Leaving(step, "aggregator"))


def test_clip_and_noise_keeps_its_bound_for_adversarial_rows() -> None:
    rows = torch.tensor([[1e30, 1e30], [0, 0], [0.1, 0], [1e-30, 5.0], [3.0, 4.0]])
    clipped = clip_noise(0.0, rows)
    assert (clipped.norm(dim=1) <= 0.5 + 1e-6).all()
    assert torch.equal(clipped[1:3], rows[1:3])


def test_clip_and_noise_adds_the_noise_that_it_says() -> None:
    for factor in (2 / 3, 1.0, 3 / 2):
        noise = clip_noise(0.2 * factor, torch.zeros(2000, 4)).flatten().double().numpy() / 0.2
        assert bool(kstest(noise, "norm").pvalue > 1e-4) is (factor == 1)


def test_noise_is_repeated_for_the_same_and_fresh_for_other_content_or_steps() -> None:
    zero, one = torch.zeros(8, 4), torch.full((8, 4), 1e-9)
    assert torch.equal(clip_noise(1.0, zero), clip_noise(1.0, zero))
    assert not torch.equal(clip_noise(1.0, zero), clip_noise(1.0, zero, step=1))
    assert not torch.allclose(clip_noise(1.0, zero), clip_noise(1.0, one))


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
    defence = Marvell(MarvellSettings(strength=8.0), around())
    sent_BD = defence.protect(gradient_BD, Leaving(0, "p1", labels_B))
    norm, direction = attack_aucs(sent_BD, labels_B)
    assert abs(norm - 0.5) < 0.1
    assert direction < 0.7
    noise_BD = sent_BD - gradient_BD
    unit = (gradient_BD[labels_B == 1].mean(0) - gradient_BD[labels_B == 0].mean(0)).square().sum()
    assert noise_BD.square().sum(1).mean() < 1.1 * 8.0 * unit


def sum_kl(along: np.ndarray, across: np.ndarray, spread: Pair, dimension: int) -> np.ndarray:
    """KL of the perturbed classes, both ways, nats (Li et al. 2022, Theorem 2)."""
    a0, a1 = along[0] + spread[0], along[1] + spread[1]
    c0, c1 = across[0] + spread[0], across[1] + spread[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = (dimension - 1) * (c0 / c1 + c1 / c0) if dimension > 1 else 0.0
        return np.asarray((rest + (a0 + 1) / a1 + (a1 + 1) / a0) / 2 - dimension)


def test_sum_kl_is_the_divergence_of_the_two_gaussians() -> None:
    along, across, spread = np.array([1.0, 2.0]), np.array([0.3, 0.4]), (0.2, 0.5)
    means = torch.tensor([[0.0, 0, 0], [1, 0, 0]])
    first, second = (
        torch.distributions.MultivariateNormal(
            mean, torch.diag(torch.tensor([a + u, c + u, c + u]).float())
        )
        for mean, a, c, u in zip(means, along, across, spread, strict=True)
    )
    kl = torch.distributions.kl_divergence
    expected = float(kl(second, first) + kl(first, second))
    assert float(sum_kl(along, across, spread, 3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("spread", [(0.0, 0.0), (0.3, 0.05), (0.001, 2.0)])
@pytest.mark.parametrize("dimension", [1, 2, 64])
def test_marvell_finds_the_numerical_optimum(dimension: int, spread: Pair) -> None:
    for positive, power in ((0.02, 8.0), (0.25, 0.5), (0.5, 8.0), (0.9, 0.5)):
        along, across = best_noise(
            positive=positive, dimension=dimension, spread=spread, power=power
        )
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


def test_marvell_sends_zeros_for_a_batch_of_one_class_and_needs_labels() -> None:
    defence, gradient_BD = Marvell(MarvellSettings(), around()), torch.randn(6, 4)
    for label in (0, 1):
        labels_B = torch.full((6,), label)
        assert not defence.protect(gradient_BD, Leaving(0, "p", labels_B)).any()
    with pytest.raises(LocalProtocolError, match="labels"):
        defence.protect(gradient_BD, Leaving(0, "p"))


def test_marvell_gives_each_passive_other_noise() -> None:
    gradient_BD, labels_B = leaky_gradients(64)
    defence = Marvell(MarvellSettings(), around())
    one, other = (defence.protect(gradient_BD, Leaving(0, name, labels_B)) for name in "ab")
    assert not torch.allclose(one, other)


def test_max_norm_makes_rows_equally_long_on_average() -> None:
    gradient_BD, labels_B = leaky_gradients(200)
    gradient_BD[0] = 0
    defence = MaxNorm(MaxNormSettings(), around())
    mean_B = torch.stack(
        [defence.protect(gradient_BD, Leaving(step, "p")).square().sum(1) for step in range(2000)]
    ).mean(0)
    longest = gradient_BD.square().sum(1).max()
    assert mean_B[0] == 0
    assert torch.allclose(mean_B[1:], longest.expand(199), rtol=0.2)
    sent_BD = defence.protect(gradient_BD, Leaving(0, "p"))
    before, after = (attack_aucs(rows_BD, labels_B)[0] for rows_BD in (gradient_BD, sent_BD))
    assert abs(after - 0.5) < 0.2 < before - 0.5
    parallel = torch.cosine_similarity(sent_BD[1:], gradient_BD[1:]).abs()
    assert torch.allclose(parallel, torch.ones(199), atol=1e-4)
