"""The networks and losses of the papers' public release, handed in, train as in its own loop.

The classes are written from Tables 3 and 4 and Section 4 of APFed and from what its release settles
(kernels, the projection heads, the symmetric loss). `play_release` is its algorithm in one loop
without parties, messages or sums: the task gradient plus lambda times the passives' gradients on
what was sent, and a step of every optimiser by itself. Where `APFED_RELEASE` names a clone of the
release, its own classes are handed in, and its own clients play the loop.

Letters: B batch, D numbers that are sent, K classes.
"""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secure_apfed import Active, Passive, Reconstruction
from secure_apfed.base.seeds import seed_draws
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.interfaces.training import train

AUTHORS = os.environ.get("APFED_RELEASE", "")
"""A clone of github.com/liujiyuan13/APFed-code_release, which this project does not contain."""
N = 44
"""People, of whom 32 train: two batches an epoch."""
IDS = [f"person-{number}" for number in range(N)]
CLASSES = 4
SENT = 64
TRADE_OFF = 0.1
SEED = 3
WEIGHTS = {"lab": TRADE_OFF, "registry": 10 * TRADE_OFF}
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=1e-4)


class MnistEncoder(nn.Module):
    """Table 3: two convolutions of 5x5, a ReLU after each, no pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, 1, 1)
        self.conv2 = nn.Conv2d(32, 64, 5, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))))


class MnistDecoder(nn.Module):
    """The mirror of `MnistEncoder`, with a ReLU after the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.deconv1 = nn.ConvTranspose2d(64, 32, 5, 1, 1)
        self.deconv2 = nn.ConvTranspose2d(32, 1, 5, 1, 1)

    def forward(self, h: Tensor) -> Tensor:
        return F.relu(self.deconv2(F.relu(self.deconv1(h))))


class CifarEncoder(nn.Module):
    """Table 4: three convolutions, the second of stride 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5, 1, 1)
        self.conv2 = nn.Conv2d(16, 32, 4, 2, 1)
        self.conv3 = nn.Conv2d(32, 64, 5, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))


class CifarDecoder(nn.Module):
    """The mirror of `CifarEncoder`; its last layer has no ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.deconv1 = nn.ConvTranspose2d(64, 32, 5, 1, 1)
        self.deconv2 = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.deconv3 = nn.ConvTranspose2d(16, 3, 5, 1, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.deconv3(F.relu(self.deconv2(F.relu(self.deconv1(h)))))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Flatten, fc(d, width), ReLU, dropout of a half, fc(width, classes), log-softmax."""

    width = 256

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, self.width)
        self.fc2 = nn.Linear(self.width, classes)

    def forward(self, h: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(self.fc1(h.flatten(1))), training=self.training)
        scores: Tensor = F.log_softmax(self.fc2(hidden), dim=1)
        return scores


class CifarHead(Head):
    """The same, of 50 hidden units."""

    width = 50


class ProjectionHead(nn.Module):
    """The linear layer d -> 64 of the release's APFed-C."""

    def __init__(self, size: int, sent: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, sent)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h.flatten(1))  # type: ignore[no-any-return]


def contrast(views: Sequence[Tensor]) -> Tensor:
    """Return the symmetric loss of two views (B, D), Eqs. (14) to (16) with 2 B anchors."""
    both = torch.cat([*views])
    similarity = F.cosine_similarity(both[:, None], both[None], dim=2)
    rows = len(views[0])
    losses = []
    for anchor in range(2 * rows):
        others = torch.arange(2 * rows) != anchor
        positive = similarity[anchor, (anchor + rows) % (2 * rows)]
        losses.append(similarity[anchor, others].exp().sum().log() - positive)
    return torch.stack(losses).mean()


@dataclass(frozen=True, kw_only=True)
class Release:
    """One of the release's settings: which networks, and what the passives optimise.

    Attributes:
        view: the shape of a party's rows; map: that of the encoder's output.
        contrasts: whether passives contrast (APFed-C); else they reconstruct (APFed-R).
        weights: lambda of each passive.
    """

    encoder: Callable[[], nn.Module]
    decoder: Callable[[], nn.Module]
    head: Callable[[int, int], nn.Module]
    projection: Callable[[int, int], nn.Module] = ProjectionHead
    contrast: Callable[[Sequence[Tensor]], Tensor] = contrast
    view: tuple[int, ...]
    map: tuple[int, ...]
    contrasts: bool
    weights: Mapping[str, float] = field(default_factory=lambda: WEIGHTS)

    @property
    def size(self) -> int:
        return torch.Size(self.map).numel()

    def make_passive(self) -> nn.Module:
        if self.contrasts:
            head = self.projection(self.size, SENT)
            return ContrastingPassive(self.encoder(), head, self.contrast)
        return ReconstructingPassive(self.decoder())


class ContrastingPassive(nn.Module):
    """A passive of APFed-C: its encoder, its projection head, and the loss of both views."""

    def __init__(
        self, encoder: nn.Module, head: nn.Module, loss: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.loss = loss

    def forward(self, z_BD: Tensor, x_B: Tensor) -> Tensor:
        return self.loss([z_BD, self.head(self.encoder(x_B))])


class ReconstructingPassive(nn.Module):
    """A passive of APFed-R: its decoder, and the mean squared error of its own view."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, h: Tensor, x_B: Tensor) -> Tensor:
        loss: Tensor = (self.decoder(h) - x_B).square().mean()
        return loss


_MNIST = Release(
    encoder=MnistEncoder,
    decoder=MnistDecoder,
    head=Head,
    view=(1, 7, 8),
    map=(64, 3, 4),
    contrasts=False,
)
_CIFAR = Release(
    encoder=CifarEncoder,
    decoder=CifarDecoder,
    head=CifarHead,
    view=(3, 10, 12),
    map=(64, 2, 3),
    contrasts=False,
)
RELEASES: Mapping[str, Release] = {
    "APFed-R of MNIST": _MNIST,
    "APFed-C of MNIST": replace(_MNIST, contrasts=True),
    "APFed-R of CIFAR": _CIFAR,
    "APFed-C of CIFAR": replace(_CIFAR, contrasts=True),
}


def load_authors_release(folder: Path, release: Release, *, networks: str) -> Release:
    """Return the same setting with the authors' own classes."""
    found = import_beside(folder, f"utils.nets_{networks}")
    return replace(
        release,
        encoder=found.EncNet,
        decoder=found.DecNet,
        head=found.TaskNet,
        projection=found.Proj_Head,
        contrast=import_beside(folder, "functions").contrastive_loss,
        weights=dict.fromkeys(WEIGHTS, TRADE_OFF),  # one for all of them
    )


def import_beside(folder: Path, name: str) -> Any:
    """Import a module of the authors' release."""
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    spec = spec_from_file_location(f"release_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True, eq=False)
class Models:
    """All modules of one training."""

    encoder: nn.Module
    head: nn.Module
    projection: nn.Module | None
    passives: Mapping[str, nn.Module]

    @classmethod
    def from_release(cls, release: Release) -> "Models":
        with seed_draws(SEED, "the release's networks"):
            return cls(
                encoder=release.encoder(),
                head=release.head(release.size, CLASSES),
                projection=release.projection(release.size, SENT) if release.contrasts else None,
                passives={name: release.make_passive() for name in release.weights},
            )

    def list_modules(self) -> list[nn.Module]:
        own = [self.encoder, self.head, self.projection, *self.passives.values()]
        return [module for module in own if module is not None]


def play_release(
    models: Models,
    batches: Sequence[Tensor],
    images_N: Tensor,
    views_N: Mapping[str, Tensor],
    labels_N: Tensor,
    weights: Mapping[str, float],
) -> None:
    """Train all modules for these batches, as the release does."""
    own = [module for module in models.list_modules() if module not in models.passives.values()]
    active = SGD([weight for module in own for weight in module.parameters()])
    passives = {name: SGD(module.parameters()) for name, module in models.passives.items()}
    for step, rows_B in enumerate(batches):
        with seed_draws(SEED, "clinic", step):  # of dropout
            h = models.encoder(images_N[rows_B])
            loss = F.cross_entropy(models.head(h), labels_N[rows_B])
            sent = h if models.projection is None else models.projection(h)
        total = torch.zeros_like(sent)
        for name, passive in models.passives.items():
            received = sent.detach().clone().requires_grad_()
            passives[name].zero_grad()
            passive(received, views_N[name][rows_B]).backward()
            passives[name].step()
            assert received.grad is not None
            total += weights[name] * received.grad
        active.zero_grad()
        loss.backward(retain_graph=True)
        sent.backward(total)
        active.step()


def play_authors_clients(
    models: Models,
    batches: Sequence[Tensor],
    images_N: Tensor,
    views_N: Mapping[str, Tensor],
    labels_N: Tensor,
    *,
    folder: Path,
) -> None:
    """Train all modules for these batches by the clients of the authors' release."""
    contrasts = models.projection is not None
    clients = import_beside(folder, f"utils.clients_apfed{'c' if contrasts else 'r'}")
    active = clients.ActiveClient()
    projections = [] if models.projection is None else [add_optimizer(models.projection)]
    networks = [add_optimizer(models.encoder), add_optimizer(models.head), *projections]
    active.set_model(*networks, trade_off=TRADE_OFF)
    active.set_loss_fun(nn.NLLLoss())
    passives = {}
    for name, module in models.passives.items():
        passives[name] = clients.PassiveClient()
        passives[name].set_model(*(add_optimizer(part) for part in module.children()))
        passives[name].set_loss_fun(module.loss if contrasts else nn.MSELoss())
    for step, rows_B in enumerate(batches):
        active.set_data(images_N[rows_B], labels_N[rows_B])
        sent = active.output_rep()
        gradients = []
        for name, passive in passives.items():
            passive.set_data(views_N[name][rows_B])
            gradients.append(passive.compute_grad(sent.clone())[0])
        with seed_draws(SEED, "clinic", step):  # of dropout
            active.train(gradients)


def add_optimizer(module: nn.Module) -> list[Any]:
    """Return a module with its optimiser and no schedule, as the authors' clients take them."""
    return [module, SGD(module.parameters()), None]


class Batches:
    """The batches that an encoder reads while it trains, as positions of rows."""

    def __init__(self, encoder: nn.Module, images_N: Tensor) -> None:
        self._positions = {row.numpy().tobytes(): place for place, row in enumerate(images_N)}
        self.seen: list[Tensor] = []
        self._hook = encoder.register_forward_pre_hook(self._note_batch)

    def _note_batch(self, encoder: nn.Module, arguments: tuple[Tensor]) -> None:
        if encoder.training:
            places = [self._positions[row.float().numpy().tobytes()] for row in arguments[0]]
            self.seen.append(torch.tensor(places))


def draw_rows(*shape: int, seed: int) -> Tensor:
    return torch.rand(N, *shape, generator=torch.Generator().manual_seed(seed))


def list_passives(release: Release, models: Models, views_N: Mapping[str, Tensor]) -> list[Passive]:
    """Return the parties that hold the passives' modules."""
    passives = []
    for name, module in models.passives.items():
        loss: Reconstruction | nn.Module = module
        if isinstance(module, ReconstructingPassive):
            loss = Reconstruction(decoder=module.decoder)
        passives.append(Passive(name, IDS, views_N[name], loss=loss, weight=release.weights[name]))
    return passives


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """One training of the library, and what another loop needs to do the same.

    Attributes:
        models, before: all modules after training and before it.
        batches: positions of the rows of each step.
        images, views, labels: what all parties hold.
    """

    models: Models
    before: Models
    batches: Sequence[Tensor]
    images: Tensor
    views: Mapping[str, Tensor]
    labels: Tensor

    @classmethod
    def from_release(cls, release: Release) -> "Trained":
        """Train four steps."""
        models = Models.from_release(release)
        before = copy.deepcopy(models)
        images = draw_rows(*release.view, seed=1)
        views = {
            name: draw_rows(*release.view, seed=2 + place)
            for place, name in enumerate(release.weights)
        }
        labels = torch.arange(N) % CLASSES
        batches = Batches(models.encoder, images)
        train(
            Active(
                "clinic",
                IDS,
                images,
                labels,
                encoder=models.encoder,
                head=models.head,
                projection=models.projection,
            ),
            list_passives(release, models, views),
            alignment="ecdh",
            secure_sum={"scheme": "plain", "clip": None},  # else a row of a sum is cut to 1
            epochs=2,
            batch_size=16,
            optimizer=SGD,
            seed=SEED,
            baselines=False,
            model={"projection": SENT if release.contrasts else "none"},
            train={"precision": "float64"},
            party_seeds="shared_for_comparison",
        )
        assert len(batches.seen) == 4
        return cls(
            models=models,
            before=before,
            batches=batches.seen,
            images=images.double(),
            views={name: rows.double() for name, rows in views.items()},
            labels=labels,
        )

    def check_against(self, play: Callable[..., None]) -> None:
        """Play the same with another loop: all weights move, and to the same place."""
        other = copy.deepcopy(self.before)
        for module in other.list_modules():
            module.double()
        play(other, self.batches, self.images, self.views, self.labels)
        pairs = zip(self.models.list_modules(), other.list_modules(), strict=True)
        apart = max(farthest(mine, theirs) for mine, theirs in pairs)
        starts = zip(self.models.list_modules(), self.before.list_modules(), strict=True)
        moved = min(farthest(mine, start) for mine, start in starts)
        assert apart <= 1e-12 < moved


@pytest.mark.parametrize("named", RELEASES)
def test_the_release_s_classes_train_as_in_its_own_loop(named: str) -> None:
    release = RELEASES[named]
    Trained.from_release(release).check_against(partial(play_release, weights=release.weights))


@pytest.mark.skipif(not AUTHORS, reason="APFED_RELEASE names no folder of the authors' release")
@pytest.mark.parametrize("networks", ["mnist", "cifar"])
@pytest.mark.parametrize("algorithm", ["R", "C"])
def test_the_authors_own_classes_and_clients_train_the_same(algorithm: str, networks: str) -> None:
    folder = Path(AUTHORS)
    setting = RELEASES[f"APFed-{algorithm} of {networks.upper()}"]
    release = load_authors_release(folder, setting, networks=networks)
    Trained.from_release(release).check_against(partial(play_authors_clients, folder=folder))


def farthest(one: nn.Module, other: nn.Module) -> float:
    """Return the largest distance of a weight of one module from that of the other."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize(
    ("changes", "error", "advice"),
    [
        (
            {"model": {"projection": 9}},
            ModelError,
            r"clinic: its projection: .* sends \(9,\); say so",
        ),
        ({"model": {"projection": "none"}}, ConfigError, "as model={'projection': 64}"),
        ({"method": "tvfl"}, ConfigError, "a projection, which method tvfl does not send"),
    ],
)
def test_a_projection_that_is_not_sent_is_refused(
    changes: dict[str, Any], error: type[Exception], advice: str
) -> None:
    release = RELEASES["APFed-C of CIFAR"]
    models = Models.from_release(release)
    views_N = dict.fromkeys(WEIGHTS, draw_rows(*release.view, seed=1))
    active = Active(
        "clinic",
        IDS,
        views_N["lab"],
        torch.arange(N) % CLASSES,
        encoder=models.encoder,
        head=models.head,
        projection=models.projection,
    )
    passives = list_passives(release, models, views_N)
    with pytest.raises(error, match=advice):
        train(active, passives, alignment="ecdh", baselines=False, **changes)
