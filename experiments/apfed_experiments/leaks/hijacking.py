"""What a curious active rebuilds of a passive's features, and who rebuilds by hijacking encoders.

Digits in strips of two rows, MNIST in halves, images as numbers between 0 and 1.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_attacks.features.hijack import FeatureSpaceHijack, Hijack, ReversedHijack
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import play_answers
from apfed_attacks.run import mount
from apfed_attacks.view import Knowledge
from apfed_experiments.drawing import drawing
from apfed_experiments.leaks.live import VICTIM, Setting, live_config
from apfed_experiments.summary import Row
from secure_apfed.config import AttackChoice, Config
from secure_apfed.contract import RepresentationTerms
from secure_apfed.data import VerticalData, find_dataset, load_data
from secure_apfed.data.files import ImagePool
from secure_apfed.models import Shape, output_shape
from secure_apfed.runs.run import run
from secure_apfed.seeds import seeded

__all__ = [
    "Case", "Outcome", "draw_both_cases", "draw_rebuilt", "hijack_client", "hijacking",
    "joint_inversion", "reversed_hijacking", "split_learning",
]  # fmt: skip

_SEEDS = range(5)
_FEWER_SEEDS = range(3)  # of MNIST and of APFed-C, where a run takes several times as long
_EPOCHS = 300
_RATE = 0.03
_HIDDEN = 128
_CURIOUS = ("inverse_network", "representation_network", "unpaired_inversion")
_REVERSED = (
    # strength of the answers, clip of the sum, noise of the guard (0: none)
    (1.0, 1.0, 0.0),
    (5.0, 1.0, 0.0),
    (5.0, 0.1, 0.0),
    (5.0, 1.0, 0.1),
)
PUBLISHED = 0.0193
_CLIENT_SEEDS = range(3)
_BATCH = 64
_SCORED = 2_000  # private images whose rebuilt forms are compared
_CLIENT_RATE = 3e-4
_COLUMNS = 12  # images of a row of the picture
_SIDE = 0.7  # inches of an image
_SERVER = FeatureSpaceHijack(conditioned=False)


def joint_inversion() -> Iterator[Setting]:
    """Pairs, public rows without pairs, or the encoder itself: curious actives."""
    for name in _CURIOUS:
        yield Setting(columns={"attack": name}, measure=partial(_curious, name), seeds=_SEEDS)


def _curious(name: str, seed: int) -> Row:
    config, data = _with_one_passive(live_config("digits", "tvfl", seed=seed))
    results = mount(run(config, None, data=data).recording, [AttackChoice(name=name)], seed=seed)
    return _figures(next(result for result in results if result.victim == VICTIM))


def hijacking() -> Iterator[Setting]:
    """FSHA against real passives: told one's own features of the same people, and not."""
    cases = (
        ("digits", True, _EPOCHS, _SEEDS),
        ("digits", False, _EPOCHS, _SEEDS),
        ("mnist-in-2", True, 100, _FEWER_SEEDS),
        ("mnist-in-2", True, _EPOCHS, _FEWER_SEEDS),
    )
    for name, told, epochs, seeds in cases:
        columns = {"data": name, "told x": "yes" if told else "no", "epochs": epochs}
        attack = FeatureSpaceHijack(hidden=_HIDDEN, conditioned=told)
        measure = partial(_hijacked, attack, partial(live_config, name, "tvfl"), epochs)
        yield Setting(columns={**columns, "attack": "hijack"}, measure=measure, seeds=seeds)


def _hijacked(
    attack: FeatureSpaceHijack | ReversedHijack, config_of: Callable[..., Config], epochs: int,
    seed: int,
) -> Row:  # fmt: skip
    """So many epochs at a rate under which the pull is steady."""
    config = config_of(seed=seed)
    train = config.train.model_copy(update={"epochs": epochs, "learning_rate": _RATE})
    config, data = _with_one_passive(config.model_copy(update={"train": train}))
    return _figures(play_answers(attack, config, VICTIM, data=data, seed=seed))


def reversed_hijacking() -> Iterator[Setting]:
    """A4 on digits: the only passive, against the active's own loss, clip and guard."""
    for strength, clip, sigma in _REVERSED:
        columns = {"kappa": strength, "clip": clip, "sigma": sigma or "none", "epochs": _EPOCHS}
        attack = ReversedHijack(hidden=_HIDDEN, strength=strength)
        measure = partial(_hijacked, attack, partial(_guarded, clip, sigma), _EPOCHS)
        columns |= {"attack": "reversed_hijack"}
        yield Setting(columns=columns, measure=measure, seeds=_FEWER_SEEDS)


def _guarded(clip: float, sigma: float, *, seed: int) -> Config:
    """A session of APFed-C; the adversary's answers are as long as its strength makes them."""
    config = live_config("digits", "apfed_c", masks="none", clip=clip, seed=seed)
    if not sigma:
        return config
    guard = {"mechanism": "gaussian", "clip": 1.0, "sigma": sigma}
    return Config.model_validate({**config.model_dump(), "guard": guard})


def _with_one_passive(config: Config) -> tuple[Config, VerticalData]:
    data = load_data(config.data, seed=config.seed)
    return config, replace(data, passives=data.passives[:1])


def _figures(result: AttackResult) -> Row:
    floor = result.baselines[result.baseline or ""]
    return {
        "variant": result.variant,
        **{key: result.score.get(key) for key in ("r2", "mse", "psnr", "ssim")},
        "baseline": result.baseline,
        "baseline r2": floor["r2"],
        "advantage": result.advantage,
    }


# FSHA near its published point: MNIST, whole images, a client without a task of its own.
#
# `secure-apfed study leaks --only split_learning`: the table. `secure-apfed study hijacked-images
# FILE`: the images. Each run takes a minute or two on a core of its own.
#
# The published figure (Pasquini et al., 2021, the notebook of the authors' release): MSE 0.0193 of
# images between -1 and 1, a client of residual convolutions that holds MNIST's training images, a
# server that knows the test images and whose answers are all that trains the client, batches of 64,
# 10,000 iterations, Adam everywhere.
#
# The same here: data, who knows what, the batch, Adam, residual convolutions. Different: 28 x 28
# grey images for 32 x 32 of three equal channels, 784 numbers of a representation for 4,096, 16
# channels for up to 256, higher rates, and the deviations of `apfed_attacks.features.hijack`
# itself.
#
# The server is `apfed_attacks.features.hijack`, as in live runs of TVFL. The client is not ours:
# what our parties add (links, rules, SGD, cut images) is measured by `hijacking`.


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting: whether the client sends maps (else a linear layer mixes them to 64 numbers),
    and the server's attack and answers.
    """

    name: str
    maps: bool = True
    attack: FeatureSpaceHijack = _SERVER
    iterations: int = 10_000


CASES = (Case(name="maps of 7 x 7"), Case(name="mixed to 64 numbers", maps=False))


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """Errors on images between -1 and 1, and the first private images as they were rebuilt.

    mse: of what the server decodes from what the client sent; own: of what it decodes from its own
    representations of the same images, which no attack gets below; mean: of the outsiders' mean.
    """

    mse: float
    own: float
    mean: float
    rebuilt: Tensor


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, maps: Tensor) -> Tensor:
        added: Tensor = maps + self.inner(maps)
        return added


def split_learning() -> Iterator[Setting]:
    """Every case with several seeds: the reference in three, the other in one."""
    of_images = _images()
    for case in CASES:
        for seed in _CLIENT_SEEDS if case is CASES[0] else _CLIENT_SEEDS[:1]:
            columns = {"client sends": case.name, "iterations": case.iterations, "seed": seed}
            columns |= {"party_seeds": "shared_for_comparison"}
            measure = partial(_errors, case, *of_images)
            yield Setting(columns=columns, measure=measure, seeds=(seed,))


def _errors(case: Case, private: Tensor, outsiders: Tensor, seed: int) -> Row:
    found = hijack_client(case, private, outsiders, seed=seed)
    return {
        "mse in [-1, 1]": found.mse,
        "over the published": found.mse / PUBLISHED,
        "mean of the outsiders": found.mean,
        "own representations": found.own,
    }


def _images() -> tuple[Tensor, Tensor]:
    """MNIST's training images, the client's, and its test images, the server's."""
    dataset = find_dataset("mnist")
    pool = dataset.read(dataset, None)
    assert isinstance(pool, ImagePool)
    assert pool.official_train is not None
    pixels = torch.from_numpy(pool.pixels).float() * (2 / pool.maximum) - 1
    return pixels[: pool.official_train], pixels[pool.official_train :]


def hijack_client(case: Case, private: Tensor, outsiders: Tensor, *, seed: int) -> Outcome:
    """Play one case; the images are (N, 1, 28, 28) between -1 and 1."""
    features: Shape = tuple(private.shape[1:])
    with seeded(seed, "client"):
        encoder = _client(case.maps, features)
    shape = output_shape(encoder, features)
    adam = torch.optim.Adam(encoder.parameters(), _CLIENT_RATE, fused=True)
    terms = RepresentationTerms(shape=shape, dtype="float32", minimum_norm=0, maximum_norm=1e9)
    known = Knowledge(classes=10, victim="client", public={"client": outsiders})
    server = case.attack.begin(terms, known, private.new_empty(len(private), 0), seed)
    with seeded(seed, "batches"):
        for step in range(case.iterations):
            rows_B = torch.randint(len(private), (_BATCH,))
            z_BD = encoder(private[rows_B])
            answer_BD = server.answer(step, rows_B, z_BD.flatten(1))
            adam.zero_grad()
            z_BD.flatten(1).backward(answer_BD / _BATCH)
            adam.step()
    return _outcome(encoder, server, private[:_SCORED], outsiders)


@torch.no_grad()
def _outcome(encoder: nn.Module, server: Hijack, private: Tensor, outsiders: Tensor) -> Outcome:
    rebuilt = server.space.decoded(encoder(private).flatten(1)).reshape(private.shape)
    own = server.space.decoded(server.space.simulated(private)).reshape(private.shape)
    return Outcome(
        mse=float(F.mse_loss(rebuilt, private)),
        own=float(F.mse_loss(own, private)),
        mean=float((outsiders.mean(dim=0) - private).square().mean()),
        rebuilt=rebuilt,
    )


def _client(maps: bool, features: Shape) -> nn.Module:
    """Residual convolutions, (1, 28, 28) -> (16, 7, 7)."""
    layers: list[nn.Module] = [
        nn.Conv2d(features[0], 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 4, 2, 1), _Residual(16),
    ]  # fmt: skip
    if not maps:
        layers += [nn.Flatten(), nn.Linear(16 * 49, 64)]
    return nn.Sequential(*layers)


def draw_rebuilt(original: Tensor, rebuilt: Mapping[str, Tensor], path: Path) -> None:
    """Write a PNG: the first images (1, height, width) in a row, and a row for each attack.

    What is black is the least value of the originals, what is white the greatest.
    """
    rows = {"original": original, **rebuilt}
    low, high = float(original.min()), float(original.max())
    size = (2.2 + _SIDE * _COLUMNS, 0.15 + 1.1 * _SIDE * len(rows))
    with drawing(path, size, layout=None) as figure:
        grid = figure.subplots(len(rows), _COLUMNS, squeeze=False)
        for line, (name, images) in zip(grid, rows.items(), strict=True):
            for axes, image in zip(line, images, strict=False):
                axes.imshow(image[0].numpy(), cmap="gray", vmin=low, vmax=high)
                axes.set(xticks=[], yticks=[])
                axes.grid(visible=False)
            line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        figure.subplots_adjust(left=0.22, right=0.99, top=0.97, bottom=0.03, wspace=0.05)


def draw_both_cases(path: Path, *, seed: int) -> None:
    """Write a PNG: the first images of both cases, played with this seed and with 0."""
    private, outsiders = _images()
    found = {
        case.name: hijack_client(case, private, outsiders, seed=of_case)
        for case, of_case in zip(CASES, (seed, 0), strict=True)
    }
    rows = {f"{name}\nMSE {outcome.mse:.3f}": outcome.rebuilt for name, outcome in found.items()}
    draw_rebuilt(private, rows, path)
