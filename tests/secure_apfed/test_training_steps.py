"""Steps of one's own: shared and frozen weights, groups, schedulers, precision, resumption."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from secure_apfed import Contrastive, FrozenGaussian, Gaussian, Passive, load_model
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.interfaces.training import train
from secure_apfed.learning.descent import Descent, OwnOptimization
from secure_apfed.learning.own_code import UserFunctions
from secure_apfed.learning.release import ChargedGuard
from secure_apfed.privacy.dp_sgd import PrivateGradient
from secure_apfed.settings import TrainSettings
from tests.secure_apfed.test_training import (
    QUICK,
    ROWS,
    agree,
    draw,
    make_active,
    make_passive,
    parameters_of,
)

SAME: Mapping[str, Any] = {**QUICK, "party_seeds": "shared_for_comparison"}


class Tied(nn.Module):
    """A head whose one layer is the last layer of an encoder, transposed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.score = nn.Linear(layer.in_features, 2)

    def forward(self, h: Tensor) -> Tensor:
        scores: Tensor = self.score(h @ self.layer.weight)
        return scores


def make_tied_networks() -> tuple[nn.Sequential, Tied]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        last = nn.Linear(8, 6)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), last), Tied(last)


def make_two() -> list[Passive]:
    return [make_passive(), make_passive("b")]


# Weights that two parts share.


def test_shared_weights_are_trained_once_and_stay_shared() -> None:
    encoder, head = make_tied_networks()
    before = parameters_of(encoder[-1])
    result = train(make_active(encoder=encoder, head=head), make_two(), **QUICK)
    trained: Any = result.model
    assert trained[0][-1] is trained[1].layer
    assert not torch.equal(before, parameters_of(encoder[-1]))


def test_shared_weights_get_the_gradients_of_both_parts() -> None:
    encoder, head = make_tied_networks()
    twin_encoder, twin_head = make_tied_networks()
    active = make_active(encoder=encoder, head=head)
    train(active, [], **{**SAME, "batch_size": 90, "optimizer": partial(torch.optim.SGD, lr=0.1)})
    result = train(make_active(encoder=twin_encoder, head=twin_head), [], **{**SAME, "epochs": 1})
    assert result.model is not None
    rows = active.rows[[*set(range(120)) - set(result.test_rows.tolist())]]
    labels = active.labels[[*set(range(120)) - set(result.test_rows.tolist())]]
    fresh_encoder, fresh_head = make_tied_networks()
    weights = [*dict.fromkeys([*fresh_encoder.parameters(), *fresh_head.parameters()])]
    nn.functional.cross_entropy(fresh_head(fresh_encoder(rows)), labels).backward()
    torch.optim.SGD(weights, lr=0.1).step()
    torch.testing.assert_close(parameters_of(encoder), parameters_of(fresh_encoder))
    torch.testing.assert_close(parameters_of(head), parameters_of(fresh_head))


def test_the_local_baseline_shares_them_too() -> None:
    encoder, head = make_tied_networks()
    active = make_active(encoder=encoder, head=head)
    twin_encoder, twin_head = make_tied_networks()
    result = train(active, make_two(), **{**SAME, "baselines": True})
    alone = train(make_active(encoder=twin_encoder, head=twin_head), [], **SAME)
    assert result.alone == alone.score
    code: Any = UserFunctions(encoder=encoder, head=head).copy_fresh()
    assert code.encoder[-1] is code.head.layer
    family = UserFunctions(encoder=encoder, head=head).copy_networks()
    assert family is not None
    settings: Any = None
    made: Any = family.make_encoder((4,), settings)
    last: Any = family.make_head(6, 2, settings)
    assert made[-1] is last.layer
    assert made[-1] is not encoder[-1]


def test_a_run_with_shared_weights_is_stored_and_loaded(tmp_path: Path) -> None:
    encoder, head = make_tied_networks()
    result = train(
        make_active(encoder=encoder, head=head),
        make_two(),
        folder=tmp_path / "run",
        checkpoint_every=1,
        **QUICK,
    )
    made = make_tied_networks()
    loaded = load_model(tmp_path / "run", encoder=made[0], head=made[1])
    rows = ROWS[:9, :4]
    torch.testing.assert_close(loaded.network(rows), result.model(rows))


def make_twice() -> tuple[nn.Sequential, nn.Sequential]:
    """Return an encoder and a head with layers that share one weight."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
        head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    head[0].weight = encoder[2].weight
    return encoder, head


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_private_updates_read_both_uses_of_a_shared_weight() -> None:
    encoder, head = make_twice()
    watched = PrivateGradient("clinic", {"encoder": encoder, "head": head}, None)  # type: ignore[arg-type]
    rows = ROWS[:5, :4]
    labels = torch.tensor([0, 1, 0, 1, 1])
    nn.functional.cross_entropy(head(encoder(rows)), labels).backward()
    shared: Any = head[0].weight
    found = shared.grad_sample
    for row in range(5):
        encoder_1, head_1 = make_twice()
        scores = head_1(encoder_1(rows[row : row + 1]))
        nn.functional.cross_entropy(scores, labels[row : row + 1]).backward()
        alone: Any = head_1[0].weight
        torch.testing.assert_close(found[row], alone.grad)
    watched.forget_batch()


@pytest.mark.parametrize("make", [make_tied_networks, make_twice])
def test_private_updates_refuse_a_weight_that_is_read_past_its_layer(make: Any) -> None:
    encoder, head = make()
    private: Mapping[str, Any] = {"dp_sgd": {"noise_multiplier": 1.0, "clip": 1.0}}
    if make is make_twice:
        assert train(make_active(encoder=encoder, head=head), make_two(), **private, **QUICK).run
        return
    with pytest.raises(ModelError, match=r"dp_sgd cannot clip .* 2 weights: .* past their layer"):
        train(make_active(encoder=encoder, head=head), make_two(), **private, **QUICK)


def test_weights_of_another_party_are_refused_in_a_function_too() -> None:
    active = make_active()

    def use_others_weights(z: Tensor, x: Tensor) -> Tensor:
        hidden: Tensor = active.encoder(x)
        return (hidden[:, :2] - z).square().mean()

    with pytest.raises(ModelError, match=r"lab: its code reads 4 weights that are no part of what"):
        train(active, [make_passive(loss=use_others_weights), make_passive("b")], **QUICK)


def test_a_frozen_network_may_be_read_by_a_function() -> None:
    teacher = nn.Linear(4, 2).requires_grad_(False)
    loss = lambda z, x: (z - teacher(x)).square().mean()  # noqa: E731
    assert train(make_active(), [make_passive(loss=loss), make_passive("b")], **QUICK).run


# Frozen parts.


def test_a_frozen_encoder_stays_and_its_head_learns() -> None:
    active = make_active()
    active.encoder.requires_grad_(False)
    before = parameters_of(active.encoder), parameters_of(active.head)
    train(active, make_two(), **QUICK)
    assert torch.equal(before[0], parameters_of(active.encoder))
    assert not torch.equal(before[1], parameters_of(active.head))


@pytest.mark.parametrize("method", ["split_nn", "split_nn_sum", "tvfl"])
def test_a_passives_frozen_encoder_is_sent_and_stays(method: str) -> None:
    frozen = nn.Linear(4, 6).requires_grad_(False)
    before = parameters_of(frozen)
    passives = [make_passive(encoder=frozen), make_passive("b", encoder=nn.Linear(4, 6))]
    changes = {"method": method, "model": {"projection": "none", "representation": 6}}
    width = 6 if method == "split_nn_sum" else 18
    result = train(make_active(head=nn.Linear(width, 2)), passives, **{**QUICK, **changes})
    assert torch.equal(before, parameters_of(frozen))
    assert 0 <= result.score <= 1


def test_frozen_parts_take_no_part_in_private_updates() -> None:
    active = make_active()
    active.encoder[0].requires_grad_(False)
    before = parameters_of(active.encoder[0])
    guard = FrozenGaussian(epsilon=4)
    result = train(active, make_two(), dp_sgd={"epsilon": 8}, guard=guard, **QUICK)
    assert torch.equal(before, parameters_of(active.encoder[0]))
    assert math.isfinite(result.run.privacy.epsilon_y)


# Groups.


def make_grouped_adamw(modules: Mapping[str, nn.Module]) -> torch.optim.Optimizer:
    slow: dict[str, Any] = {"params": [*modules["encoder"].parameters()], "lr": 0.0}
    rest = [module for name, module in modules.items() if name != "encoder"]
    return torch.optim.AdamW(
        [slow, {"params": [weight for module in rest for weight in module.parameters()]}], lr=0.1
    )


def test_groups_are_made_of_modules_by_name() -> None:
    active = make_active(optimizer=make_grouped_adamw)
    before = parameters_of(active.encoder), parameters_of(active.head)
    result = train(active, make_two(), **{**QUICK, "baselines": True})
    assert torch.equal(before[0], parameters_of(active.encoder))
    assert not torch.equal(before[1], parameters_of(active.head))
    assert result.alone is not None


def test_a_passives_modules_are_its_loss() -> None:
    asked: list[list[str]] = []

    def note(modules: Mapping[str, nn.Module]) -> torch.optim.Optimizer:
        asked.append([*modules])
        return torch.optim.SGD(modules["objective"].parameters(), lr=0.1)

    loss = Contrastive(encoder=nn.Linear(4, 3))
    train(make_active(), [make_passive(loss=loss, optimizer=note), make_passive("b")], **QUICK)
    assert asked == [["objective"]]


def test_the_usual_filter_of_frozen_weights_works() -> None:
    active = make_active(
        optimizer=lambda weights: torch.optim.SGD([w for w in weights if w.requires_grad], lr=0.1)
    )
    active.encoder[0].requires_grad_(False)
    before = parameters_of(active.head)
    train(active, make_two(), **QUICK)
    assert not torch.equal(before, parameters_of(active.head))


# Schedulers.


class Rates:
    """Takes note of the rates of each step of an optimizer."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        rates = self.seen

        class Noted(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                rates.append(float(self.param_groups[0]["lr"]))
                return super().step(closure)

        return Noted(weights, lr=1.0)


@pytest.mark.parametrize(
    ("every", "rates"),
    [
        (1, [1, 0.5, 0.25, 0.125]),
        (2, [1, 1, 0.5, 0.5]),
        (9, [1, 1, 1, 1]),
        ("epoch", [1, 1, 0.5, 0.5]),
    ],
)
def test_a_scheduler_steps_after_so_many_steps_of_its_party(every: Any, rates: list[float]) -> None:
    noted = Rates()
    halve = partial(StepLR, step_size=1, gamma=0.5)
    changes = {"epochs": 2, "batch_size": 45, "scheduler_every": every}
    train(make_active(optimizer=noted, scheduler=halve), make_two(), **{**QUICK, **changes})
    assert noted.seen == rates


def make_encoders() -> tuple[list[Passive], dict[str, Any]]:
    """Return passives that send what they encode, and the settings of a method that reads it."""
    passives = [make_passive(name, encoder=nn.Linear(4, 6)) for name in ("lab", "b")]
    return passives, {"method": "split_nn", "model": {"representation": 6}}


@pytest.mark.parametrize("method", ["apfed", "split_nn"])
def test_every_party_counts_epochs_by_its_own_rows(method: str) -> None:
    """Nobody is told where an epoch ends; 75 rows in batches of 45 are two steps an epoch."""
    by_party = {name: Rates() for name in ("clinic", "lab", "b")}
    passives = [
        make_passive(name, loss=Contrastive(encoder=nn.Linear(4, 3)), optimizer=by_party[name])
        for name in ("lab", "b")
    ]
    changes: dict[str, Any] = {}
    if method == "split_nn":
        passives, changes = make_encoders()
        passives = [replace(party, optimizer=by_party[party.name]) for party in passives]
    active = make_active(
        optimizer=by_party["clinic"], head=nn.Linear(18 if method == "split_nn" else 6, 2)
    )
    halve = partial(StepLR, step_size=1, gamma=0.5)
    changes = {**QUICK, **changes, "epochs": 3, "batch_size": 45, "scheduler": halve}
    train(active, passives, **changes)
    for name, rates in by_party.items():
        assert rates.seen == [1, 1, 0.5, 0.5, 0.25, 0.25], name


def test_a_plateau_of_the_losses_of_epochs_lowers_the_rate() -> None:
    class Plateau(ReduceLROnPlateau):
        losses: list[float] = []

        def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]  # as torch
            self.losses.append(metrics)
            super().step(0.0)  # as if no epoch were better than the first

    noted = Rates()
    changes = {"epochs": 4, "batch_size": 45, "scheduler": partial(Plateau, patience=0, factor=0.5)}
    train(make_active(optimizer=noted), make_two(), **{**QUICK, **changes})
    assert noted.seen == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]
    assert len(Plateau.losses) >= 3
    assert all(math.isfinite(loss) for loss in Plateau.losses)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"scheduler_every": 2}, "clinic: ReduceLROnPlateau reads the mean .* scheduler_every: ep"),
        ({"dp_sgd": {"epsilon": 8}}, "clinic: ReduceLROnPlateau waits for a loss, .* dp_sgd"),
        ({"train": {"labels": "after"}}, "clinic: ReduceLROnPlateau waits for a loss"),
    ],
)
def test_a_plateau_without_a_loss_is_refused(changes: Mapping[str, Any], advice: str) -> None:
    active = make_active(scheduler=ReduceLROnPlateau)
    guarded = {"guard": FrozenGaussian(epsilon=4)} if "dp_sgd" in changes else {}
    with pytest.raises(ConfigError, match=advice):
        train(active, make_two(), **{**QUICK, **guarded, **changes})


def test_a_passive_that_learns_from_gradients_has_no_loss() -> None:
    passives, changes = make_encoders()
    passives[0] = replace(passives[0], scheduler=ReduceLROnPlateau)
    with pytest.raises(ConfigError, match="lab: ReduceLROnPlateau waits for a loss"):
        train(make_active(head=nn.Linear(18, 2)), passives, **{**QUICK, **changes})


def test_each_party_may_have_its_own() -> None:
    active, lab, b = Rates(), Rates(), Rates()
    passives = [
        make_passive(loss=Contrastive(encoder=nn.Linear(4, 3)), optimizer=lab),
        make_passive(
            "b",
            loss=Contrastive(encoder=nn.Linear(4, 3)),
            optimizer=b,
            scheduler=partial(StepLR, step_size=1, gamma=0.25),
        ),
    ]
    halve = partial(StepLR, step_size=1, gamma=0.5)
    changes = {"batch_size": 45, "scheduler": halve, "scheduler_every": 1}
    train(make_active(optimizer=active), passives, **{**QUICK, **changes})
    assert (active.seen, lab.seen, b.seen) == ([1, 0.5], [1, 0.5], [1, 0.25])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_scheduler_steps_an_optimizer_of_the_settings(optimizer: Any) -> None:
    active = make_active()
    before = parameters_of(active.encoder)
    stop = partial(LambdaLR, lr_lambda=lambda step: 0.0)
    train(active, make_two(), optimizer=optimizer, scheduler=stop, **QUICK)
    assert torch.equal(before, parameters_of(active.encoder))


def warm_then_fall(optimizer: torch.optim.Optimizer) -> LRScheduler:
    rise = LambdaLR(optimizer, lambda step: (step + 1) / 3)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, 6)], milestones=[3])


SCHEDULERS: Mapping[str, Callable[[Any], LRScheduler]] = {
    "steps": partial(StepLR, step_size=2, gamma=0.3),
    "milestones": partial(MultiStepLR, milestones=[2, 5]),
    "cosine": partial(CosineAnnealingLR, T_max=7),
    "lambda": partial(LambdaLR, lr_lambda=lambda step: 0.8**step),
    "one cycle": partial(OneCycleLR, max_lr=0.3, total_steps=12),
    "one after the other": warm_then_fall,
    "plateau": partial(ReduceLROnPlateau, patience=0, factor=0.4, threshold=1.0),
}


@pytest.mark.parametrize(
    ("name", "every"), [*((name, 1) for name in SCHEDULERS), *((n, "epoch") for n in SCHEDULERS)]
)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_its_state_is_restored_bit_for_bit(name: str, every: Any, optimizer: Any) -> None:
    if name == "plateau" and every == 1:
        return  # refused

    def make() -> tuple[nn.Linear, Descent]:
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight.fill_(0.5)
            layer.bias.fill_(0.1)
        own = OwnOptimization(
            optimizer=optimizer, scheduler=SCHEDULERS[name], scheduler_interval=every
        )
        return layer, Descent("clinic", {"layer": layer}, TrainSettings(), own)

    def descend(layer: nn.Linear, descent: Descent, steps: range) -> None:
        for step in steps:
            descent.zero_grad()
            descent.record_rows(step, torch.tensor([step % 3, 3 + step % 3]))
            loss = layer(draw(4, 3, seed=step)).square().mean()
            loss.backward()
            descent.record_loss(loss)
            descent.step()

    whole, descent = make()
    descend(whole, descent, range(4))
    state = {key: value.clone() for key, value in descent.tensors().items()}
    descend(whole, descent, range(4, 10))
    resumed, other = make()
    descend(resumed, other, range(3))  # whatever it did before is undone
    other.load_tensors(state)
    descend(resumed, other, range(4, 10))
    assert torch.equal(parameters_of(whole), parameters_of(resumed))


OTHER = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    ("scheduler", "advice"),
    [
        (StepLR(OTHER, 1), "scheduler: code of one's own is a function of the optimizer.*StepLR"),
        (lambda optimizer: StepLR(OTHER, 1), "its scheduler is of another optimizer than"),
        (lambda optimizer: None, "makes a torch.optim.lr_scheduler.LRScheduler; got NoneType"),
        (StepLR, "cannot be made of its optimizer: TypeError: .*step_size"),
        (lambda: None, "cannot be made of its optimizer: TypeError"),
    ],
)
def test_no_scheduler_of_its_optimizer_is_refused(scheduler: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"clinic: .*{advice}"):
        train(make_active(scheduler=scheduler), make_two(), **QUICK)


def test_a_schedule_of_the_settings_beside_it_is_refused() -> None:
    changes = {"scheduler": SCHEDULERS["cosine"], "train": {"schedule_steps": 9}}
    with pytest.raises(
        ConfigError, match=r"clinic: it brings a scheduler beside train={'schedule_steps'"
    ):
        train(make_active(), make_two(), **{**QUICK, **changes})


def test_a_scheduler_that_ends_too_early_is_named() -> None:
    short = partial(OneCycleLR, max_lr=0.3, total_steps=1)
    changes = {**QUICK, "scheduler_every": 1}
    with pytest.raises(ModelError, match=r"clinic: its scheduler after step 2 failed: ValueError"):
        train(make_active(scheduler=short), make_two(), **changes)


@pytest.mark.parametrize("every", [0, -1, 1.5, "step"])
def test_steps_of_a_scheduler_are_counted(every: Any) -> None:
    with pytest.raises(ConfigError, match=r'scheduler_every: expected "epoch" or a number of step'):
        train(make_active(), make_two(), scheduler_every=every, **QUICK)


# Precision.


class Noting(nn.Module):
    """Two layers that note the precision that they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.seen: set[tuple[bool, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x)
        if self.training and torch.is_grad_enabled():
            self.seen.add((torch.is_autocast_enabled("cpu"), h.dtype))
        return h


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
def test_networks_run_in_the_precision_that_is_asked_for(precision: str) -> None:
    encoder = Noting()
    lab = Noting()
    seen = []

    def record_precision(z: Tensor, x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), z.dtype))
        return agree(z, x)

    passives = [
        make_passive(loss=record_precision),
        make_passive("b", loss=Contrastive(encoder=lab)),
    ]
    train(make_active(encoder=encoder), passives, train={"precision": precision}, **QUICK)
    is_half = precision == "bfloat16"
    inside = getattr(torch, precision)
    outside = torch.float64 if precision == "float64" else torch.float32
    assert encoder.seen == {(is_half, inside)}
    assert lab.seen == {(is_half, inside)}
    assert set(seen) == {(is_half, outside)}
    assert {weight.dtype for weight in encoder.parameters()} == {outside}


@pytest.mark.parametrize("guard", [FrozenGaussian(sigma=1e-9), Gaussian(sigma=1e-9)])
@pytest.mark.parametrize("method", ["apfed", "split_nn"])
def test_under_bfloat16_the_guard_clips_in_full_precision(
    method: str, guard: Gaussian, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    release = ChargedGuard.release

    def note(self: ChargedGuard, h_BD: Tensor, **given: Any) -> Any:
        out = release(self, h_BD, **given)
        released.append((h_BD.dtype, out.z_B.dtype, float(out.z_B.detach().norm(dim=1).max())))
        return out

    monkeypatch.setattr(ChargedGuard, "release", note)
    encoders = {name: nn.Linear(4, 6) for name in ("clinic", "lab", "b")}
    for encoder in encoders.values():
        with torch.no_grad():
            encoder.weight.mul_(100)  # every row is longer than the clip
    active = make_active(encoder=encoders.pop("clinic"), head=nn.LazyLinear(2))
    passives = make_two()
    changes = {"method": method, "guard": guard, "train": HALF}
    if method == "split_nn":
        passives = [make_passive(name, encoder=encoder) for name, encoder in encoders.items()]
        changes["model"] = {"projection": "none"}
    train(active, passives, **{**QUICK, **changes})
    assert {dtypes[:2] for dtypes in released} == {(torch.float32, torch.float32)}
    assert 1 - 1e-3 < max(norm for *_, norm in released) < 1 + 1e-5


HALF: Mapping[str, Any] = {"precision": "bfloat16"}


def test_private_updates_refuse_bfloat16() -> None:
    with pytest.raises(
        ConfigError, match=r"dp_sgd=\.\.\.: gradients of single examples in bfloat16"
    ):
        train(make_active(), make_two(), dp_sgd={"epsilon": 8}, train=HALF, **QUICK)


def test_modules_of_another_precision_are_converted() -> None:
    active = make_active(encoder=nn.Linear(4, 6).double(), head=nn.Linear(6, 2).half())
    result = train(active, make_two(), **QUICK)
    assert {weight.dtype for weight in result.model.parameters()} == {torch.float32}


# The gradient's norm.


def test_the_gradient_of_an_own_optimizer_is_clipped_to_the_setting() -> None:
    norms = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            weights = [weight for group in self.param_groups for weight in group["params"]]
            norms.append(
                torch.cat([w.grad.flatten() for w in weights if w.grad is not None]).norm()
            )
            return super().step(closure)

    changes = {"train": {"max_gradient_norm": 1e-3}, "optimizer": partial(Noted, lr=0.1)}
    train(make_active(), make_two(), **{**QUICK, **changes})
    assert norms
    assert max(norms) <= 1e-3 * (1 + 1e-4)


def test_an_optimizer_may_clip_by_itself() -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            weights = [weight for group in self.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(weights, 1e-6)
            return super().step(closure)

    active = make_active()
    before = parameters_of(active.head)
    train(active, make_two(), **{**QUICK, "optimizer": partial(Clipped, lr=1.0)})
    moved = (parameters_of(active.head) - before).norm()
    assert 0 < moved < 1e-4


# Checkpoints and resumption.


class StoppedError(Exception):
    """A run that is broken off."""


class LastState(nn.Module):
    """The last state of a GRU, with dropout, batch statistics and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.gru = nn.GRU(2, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        steps_BTC = self.frozen(x.reshape(len(x), 2, 2))
        h: Tensor = self.drop(self.norm(self.gru(steps_BTC)[1][0]))
        return h


def make_all() -> tuple[Any, list[Passive], Mapping[str, Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        active = make_active(encoder=LastState(), head=nn.Linear(6, 2), optimizer=torch.optim.AdamW)
        lab = Contrastive(encoder=nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2)))
        passives = [make_passive(loss=lab, optimizer=torch.optim.Adam), make_passive("b")]
    changes = {
        "epochs": 3,
        "checkpoint_every": 2,
        "scheduler": SCHEDULERS["one after the other"],
        "scheduler_every": 1,
    }
    return active, passives, {**SAME, **changes}


def make_by_epoch() -> tuple[Any, list[Passive], Mapping[str, Any]]:
    active, passives, settings = make_all()
    plateau = partial(ReduceLROnPlateau, patience=0, factor=0.4, threshold=1.0)
    active = replace(active, scheduler=plateau)
    halve = partial(StepLR, step_size=1, gamma=0.5)
    changes = {"epochs": 4, "scheduler": halve, "scheduler_every": "epoch"}
    return active, passives, {**settings, **changes}


def make_grouped_adam(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    fast: dict[str, Any] = {"params": weights[:2], "lr": 0.1}
    return torch.optim.Adam([fast, {"params": weights[2:]}])


def make_shared_networks() -> tuple[Any, list[Passive], Mapping[str, Any]]:
    encoder, head = make_tied_networks()
    active = make_active(encoder=encoder, head=head, optimizer=make_grouped_adam)
    return active, make_two(), {**SAME, "epochs": 3, "checkpoint_every": 2}


@pytest.mark.parametrize("make", [make_all, make_shared_networks, make_by_epoch])
def test_a_run_goes_on_bit_for_bit(
    make: Callable[[], tuple[Any, list[Passive], Mapping[str, Any]]], tmp_path: Path
) -> None:
    active, passives, settings = make()
    whole = train(active, passives, folder=tmp_path / "whole", **settings)

    def stop(progress: Any) -> None:
        if progress.step >= 5:
            raise StoppedError

    active, passives, settings = make()
    with pytest.raises(StoppedError):
        train(active, passives, folder=tmp_path / "parts", on_progress=stop, **settings)
    active, passives, settings = make()
    resumed = train(active, passives, folder=tmp_path / "parts", resume=True, **settings)
    assert resumed.run.sessions == 2
    weights = [result.model.state_dict() for result in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_without_a_folder_nothing_is_resumed() -> None:
    with pytest.raises(Exception, match="name the folder of the run"):
        train(make_active(), make_two(), resume=True, **QUICK)


def test_state_that_is_no_tensor_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

    with pytest.raises(ConfigError, match=r"clinic: encoder: state_dict\(\) of Extra has _extra_s"):
        train(make_active(encoder=Extra(4, 6)), make_two(), **QUICK)


def test_a_checkpoint_of_ones_own_begins_a_run() -> None:
    active = make_active()
    state = copy.deepcopy(active.encoder.state_dict())
    train(active, make_two(), **QUICK)
    twin = make_active()
    twin.encoder.load_state_dict(state)
    other = make_active(head=copy.deepcopy(twin.head))
    other.encoder.load_state_dict(state)
    for each in (twin, other):
        train(each, make_two(), **SAME)
    assert torch.equal(parameters_of(twin.encoder), parameters_of(other.encoder))


def test_a_network_in_evaluation_trains_like_another() -> None:
    found = []
    for mode in (True, False):
        active, passives, settings = make_all()
        active.encoder.train(mode)
        found.append(parameters_of(train(active, passives, **settings).model))
    assert torch.equal(*found)


# Representations of hardly any length.


@pytest.mark.parametrize(
    "guard", [None, Gaussian(epsilon=1), FrozenGaussian(epsilon=1)], ids=["none", "fresh", "frozen"]
)
def test_an_honest_run_survives_rows_shorter_than_the_bound(
    guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the usual bound one row in some thousands is as short; with this one most are.
    monkeypatch.setattr("secure_apfed.privacy.guard._MIN_SENT_NORM", 1.0)
    result = train(make_active(), make_two(), guard=guard, **QUICK)
    assert result.report is not None
