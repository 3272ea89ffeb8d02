"""Every word that a bound rests on, over its table: it holds when measured, and planted liars fail.

The functions of `secure_apfed.testing` are what authors of plug-ins call, and what runs call on
their first batch (`tests/secure_apfed/test_words_in_runs.py`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_protocols.randomness import fresh_key
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.roles import DescribedSum
from secure_apfed import testing
from secure_apfed.data.labels import TargetScale
from secure_apfed.errors import PromiseError
from secure_apfed.labellers import LABELLERS, Labeller, Logistic, Ridge, Spreading, harden_votes
from secure_apfed.labellers.guarantee import build_vote_release, compute_distance_in_steps
from secure_apfed.labellers.kinds import PrivateLogistic, divide_by_norm
from secure_apfed.measures.tasks import TASKS, Classification, Regression
from secure_apfed.networks.models import NETWORKS
from secure_apfed.networks.objectives import OBJECTIVES, Objective, Reconstruction
from secure_apfed.privacy.accountants import GaussianRelease, NoPrivacy
from secure_apfed.privacy.contributions import sensitivity_in_steps
from secure_apfed.privacy.defences import DEFENCES, Compression, GradientDefence
from secure_apfed.privacy.dp_sgd import GradientGuard, sum_clipped_gradients
from secure_apfed.privacy.guard import GUARDS, GaussianGuard, NoGuard, RepresentationGuard
from secure_apfed.privacy.measured import find_moved_gradient
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.privacy.randomised_response import (
    LABEL_MECHANISMS,
    LabelMechanism,
    LabelResponse,
    VoteResponse,
)
from secure_apfed.settings import (
    ClusteringSettings,
    ContrastiveSettings,
    MethodSettings,
    ModelSettings,
    ReconstructionSettings,
)

Planted = Mapping[str, tuple[Any, str]]
"""By what is wrong: a liar, and what must be said of it."""


def parametrize_liars(liars: Planted) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("liar", "said"), liars.values(), ids=liars)


# Defaults.

PESSIMISTIC = {
    "objective": (Objective, "row_wise", False),
    "labeller, inductive": (Labeller, "inductive", False),
    "labeller, signed": (Labeller, "signed", True),
    "labeller, linear": (Labeller, "linear", False),
    "guard": (RepresentationGuard, "unsafe", True),
    "label mechanism": (LabelMechanism, "unsafe", True),
    "sum": (DescribedSum, "unsafe", True),
    "defence": (GradientDefence, "protects", ()),
    "method, alone": (MethodSettings, "can_predict_locally", False),
    "method, private": (MethodSettings, "can_use_dp_sgd", False),
}


@pytest.mark.parametrize(("base", "word", "value"), PESSIMISTIC.values(), ids=PESSIMISTIC)
def test_a_class_that_says_nothing_promises_nothing(base: type, word: str, value: object) -> None:
    assert getattr(base, word) == value


class SaysNothing(RepresentationGuard):
    name: ClassVar[str] = "says_nothing"

    def release(self, h_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        return h_BD


def test_a_guard_that_says_nothing_has_an_infinite_epsilon_and_a_sentence() -> None:
    guard = SaysNothing()
    assert guard.sensitivity() == math.inf
    assert guard.mechanism() == NoPrivacy()
    assert guard.mechanism().epsilon_of(1, 1e-5) == math.inf
    assert guard.describe_guarantee().startswith("no guarantee: SaysNothing says nothing")
    testing.check_guard(guard)


def test_methods_that_say_nothing_of_votes_are_charged_for_signs_and_for_all_records() -> None:
    class Bare(MethodSettings):
        name: str = "bare"

    assert Bare().has_signed_votes
    assert not Bare().has_inductive_votes


# Objectives: `row_wise`.

SETTINGS: Mapping[str, Any] = {
    "reconstruction": ReconstructionSettings(),
    "contrastive": ContrastiveSettings(),
    "clustering": ClusteringSettings(clusters=3),
}
MODEL = ModelSettings(network="mlp", hidden=(8,), representation=4)
BATCHES = {
    "two rows": (torch.randn(2, 4), torch.randn(2, 6)),
    "twelve rows": (torch.randn(12, 4), torch.randn(12, 6)),
    "large numbers": (torch.randn(9, 4), 1e3 * torch.randn(9, 6)),
    "equal rows": (torch.randn(8, 4), torch.ones(8, 6)),
    "zeros": (torch.randn(8, 4), torch.zeros(8, 6)),
}


def objective(kind: type[Any], name: str = "reconstruction") -> Any:
    made = kind(SETTINGS[name], representation=(4,), features=(6,), model=MODEL)
    made.fit(torch.randn(20, 6))
    return made.float()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_row_wise_where_they_say_so(name: str, batch: str) -> None:
    testing.check_objective(objective(OBJECTIVES[name], name), *BATCHES[batch])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_measurement_finds_exactly_the_objectives_that_mix_rows(name: str) -> None:
    made = objective(OBJECTIVES[name], name)
    moved = find_moved_gradient(made, *BATCHES["twelve rows"])
    assert (moved is None) is made.row_wise


class Centred(Reconstruction):
    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(z_BD), features_B - features_B.mean(0))


class Scaled(Reconstruction):
    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(z_BD), features_B / features_B.abs().max())


class Shifted(Reconstruction):
    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(z_BD), features_B.roll(1, 0))


class Ranked(Reconstruction):
    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(z_BD), features_B.argsort(0).argsort(0).to(z_BD.dtype))


class Normalised(Reconstruction):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decoder = nn.Sequential(nn.BatchNorm1d(4), self.decoder)


class Weighed(Reconstruction):
    def forward(self, z_BD: Tensor, features_B: Tensor) -> Tensor:
        weight_B = features_B.norm(dim=1).softmax(0)
        total: Tensor = (weight_B * (self.decoder(z_BD) - features_B).square().mean(1)).sum()
        return total


@pytest.mark.parametrize("kind", [Centred, Scaled, Shifted, Ranked, Normalised, Weighed])
def test_an_objective_that_mixes_rows_and_denies_it_is_found(kind: type[Reconstruction]) -> None:
    with pytest.raises(PromiseError, match=f"^bank: {kind.__name__} says row_wise = True, but"):
        testing.check_objective(objective(kind), *BATCHES["twelve rows"], owner="bank")
    honest = type(kind.__name__, (kind,), {"row_wise": False})
    testing.check_objective(objective(honest), *BATCHES["twelve rows"])


# Networks: no word, since no other kind can be had; measured all the same.

SHAPES: Mapping[str, tuple[int, ...]] = {"conv_mnist": (1, 8, 8), "conv_cifar": (3, 8, 8)}
SEQUENCES = ModelSettings(network="gru", sequences=((3, 2),), representation=4)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_encoders_and_heads_read_each_row_alone(name: str, training: bool) -> None:
    shape = SHAPES.get(name, (7,))
    settings = (
        SEQUENCES
        if name == "gru"
        else ModelSettings(
            network="mlp", hidden=(8,), representation=4, random_features=12, dropout=0.5
        )
    )
    x_B = torch.randn(9, *shape)
    encoder = NETWORKS[name].make_encoder(shape, settings)
    testing.check_row_wise(encoder, x_B, training=training)
    h_BD = encoder(x_B)
    classes = 4 if name == "glm" else 3  # whose representation is the scores
    head = NETWORKS[name].make_head(math.prod(h_BD.shape[1:]), classes, settings)
    testing.check_row_wise(head, h_BD.flatten(1), training=training)
    testing.check_graph(head(h_BD.flatten(1)))


class OverBatch(nn.Module):
    """Attention whose sequence is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BD = self.first(x_BF)
        attended: Tensor = self.attention(h_BD, h_BD, h_BD)[0]
        return attended


class After(nn.Module):
    """A linear layer, then something on its result."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.then = then

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.then(self.first(x_BF))


class Before(After):
    def forward(self, x_BF: Tensor) -> Tensor:
        first: Tensor = self.first(self.then(x_BF))
        return first


MIXING: Mapping[str, Callable[[], nn.Module]] = {
    "batch normalisation": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)),
    "batch normalisation first": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8)),
    "batch normalisation without parameters": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False, track_running_stats=False)
    ),
    "attention over the batch": OverBatch,
    "a mean": lambda: After(lambda h: h - h.mean(0)),
    "a norm": lambda: After(lambda h: h / h.norm()),
    "a rank": lambda: After(lambda h: h * h.sort(0).values),
    "a neighbour": lambda: After(lambda h: h + 1e-3 * h.roll(1, 0)),
    "a sum so far": lambda: After(lambda h: h.cumsum(0)),
    "a softmax": lambda: After(lambda h: h.softmax(0)),
}
MIXING_BEFORE: Mapping[str, Callable[[], nn.Module]] = {
    "a mean of the features": lambda: Before(lambda x: x - x.mean(0)),
    "a largest of the features": lambda: Before(lambda x: x / x.amax(0)),
}


@pytest.mark.parametrize("name", [*MIXING, *MIXING_BEFORE])
def test_an_encoder_that_mixes_rows_is_found(name: str) -> None:
    encoder = {**MIXING, **MIXING_BEFORE}[name]()
    with pytest.raises(PromiseError, match="mixes the rows of a batch"):
        testing.check_row_wise(encoder, torch.randn(16, 6))


@pytest.mark.parametrize("name", MIXING)
def test_the_graph_alone_shows_what_mixed_rows(name: str) -> None:
    with pytest.raises(PromiseError, match="come from a network that mixes the rows of a batch"):
        testing.check_graph(MIXING[name]()(torch.randn(16, 6)))


ALONE: Mapping[str, Callable[[], nn.Module]] = {
    "layer normalisation": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)),
    "group normalisation": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8)),
    "instance normalisation": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU()),
    "as wide as the batch": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16)),
    "normalised weights": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 16)),
    "attention within a row": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 4, batch_first=True),
        nn.Flatten(),
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_an_encoder_that_reads_each_row_alone_passes(name: str) -> None:
    encoder = ALONE[name]()
    x_BF = torch.randn(16, 6)
    testing.check_row_wise(encoder, x_BF)
    testing.check_graph(encoder(x_BF))


def test_the_layer_is_named_and_evaluation_mode_is_another_question() -> None:
    encoder = MIXING["batch normalisation"]()
    with pytest.raises(PromiseError, match=r"the layer that does is 1 \(BatchNorm1d\)"):
        testing.check_row_wise(encoder, torch.randn(16, 6))
    testing.check_row_wise(encoder, torch.randn(16, 6), training=False)
    testing.check_graph(encoder.eval()(torch.randn(16, 6)))


def numpy_state() -> bytes:
    state: Any = np.random.get_state()  # noqa: NPY002 - it is to stay as it was
    found: bytes = state[1].tobytes()
    return found


def test_a_measurement_changes_nothing() -> None:
    encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    states = torch.get_rng_state(), numpy_state()
    with pytest.raises(PromiseError):
        testing.check_row_wise(encoder, torch.ones(16, 6) * torch.arange(16)[:, None])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == numpy_state()
    assert not encoder.training
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())


def test_the_graph_is_looked_at_without_its_hooks_and_can_be_used_after() -> None:
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    seen = list[str]()
    encoder[1].register_full_backward_hook(lambda *_: seen.append("hook"))
    h_BD = encoder(torch.randn(16, 6))
    h_BD.register_hook(lambda _: seen.append("tensor"))
    testing.check_graph(h_BD)
    assert seen == []
    assert all(p.grad is None for p in encoder.parameters())
    h_BD.sum().backward()
    assert sorted(seen) == ["hook", "tensor"]


# Guards: `sensitivity`, `mechanism`, `repeats`.


def guard_of(kind: type[Any], sigma: float = 2.0, noise: str = "secret") -> Any:
    return kind() if kind is NoGuard else kind(clip=1.5, sigma=sigma, key=fresh_key(), noise=noise)


@pytest.mark.parametrize("noise", ["secret", "reproducible_insecure"])
@pytest.mark.parametrize("sigma", [0.05, 2.0, 500.0])
@pytest.mark.parametrize("name", GUARDS)
def test_guards_keep_what_they_say(name: str, sigma: float, noise: str) -> None:
    testing.check_guard(guard_of(GUARDS[name], sigma, noise))


class SmallerSensitivity(GaussianGuard):
    def sensitivity(self) -> float:
        return self.clip


class MoreNoiseThanThere(GaussianGuard):
    def mechanism(self) -> GaussianRelease:
        return GaussianRelease(noise_multiplier=1.5 * self.sigma / self.sensitivity())


class LessNoise(GaussianGuard):
    def add_noise(self, clipped_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        noisy_BD = super().add_noise(clipped_BD, step=step, rows=rows)
        return clipped_BD + 2 / 3 * (noisy_BD - clipped_BD)


class NoNoise(GaussianGuard):
    def add_noise(self, clipped_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        return clipped_BD


class NoClip(GaussianGuard):
    def release(self, h_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        return self.add_noise(h_BD.double(), step=step, rows=rows).to(h_BD.dtype)


class ClipsNumbers(GaussianGuard):
    def release(self, h_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        clipped_BD = h_BD.double().clamp(-self.clip, self.clip)
        return self.add_noise(clipped_BD, step=step, rows=rows).to(h_BD.dtype)


class Centring(GaussianGuard):
    def release(self, h_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        return super().release(h_BD - h_BD.mean(0), step=step, rows=rows)


class FreeRepeats(GaussianGuard):
    def repeats(self, rows: Tensor) -> Tensor:
        return torch.ones(len(rows), dtype=torch.bool)


class ForgetsUnsafe(GaussianGuard):
    unsafe: ClassVar[bool] = True


GUARD_LIARS: Planted = {
    kind.__name__: (kind, said)
    for kind, said in (
        (SmallerSensitivity, "SmallerSensitivity says sensitivity"),
        (MoreNoiseThanThere, "or state the noise that there is"),
        (LessNoise, "or state the noise that there is"),
        (NoNoise, "mu inf"),
        (NoClip, "Clip rows to half of the sensitivity"),
        (ClipsNumbers, "Clip rows to half of the sensitivity"),
        (Centring, "replacing one row of a batch moved the others"),
        (FreeRepeats, "says that rows repeat"),
        (ForgetsUnsafe, "unsafe = True"),
    )
}


@parametrize_liars(GUARD_LIARS)
@pytest.mark.parametrize("sigma", [0.5, 20.0])
def test_a_guard_that_says_too_much_is_found(liar: Any, said: str, sigma: float) -> None:
    with pytest.raises(PromiseError, match=said):
        testing.check_guard(guard_of(liar, sigma))


class ByChance(RepresentationGuard):
    """A newcomer's guard: Laplace noise out of torch, no twin; its copy can be measured."""

    name: ClassVar[str] = "by_chance"
    unsafe: ClassVar[bool] = False

    def __init__(self, claimed: float) -> None:
        self.claimed = claimed

    def sensitivity(self) -> float:
        return 2.0

    def mechanism(self) -> GaussianRelease:
        return GaussianRelease(noise_multiplier=self.claimed)

    def release(self, h_BD: Tensor, *, step: int, rows: Tensor) -> Tensor:
        clipped_BD: Tensor = h_BD / h_BD.norm(dim=1, keepdim=True).clamp(min=1)
        return clipped_BD + 2 * torch.randn_like(h_BD)


def test_a_guard_without_a_twin_is_measured_by_chance() -> None:
    testing.check_guard(ByChance(1.0))
    with pytest.raises(PromiseError, match="ByChance says sensitivity"):
        testing.check_guard(ByChance(3.0))


# Labellers: `inductive`, `signed`, `linear`, `model`, and rows of norm 1.


def labeller_of(kind: type[Any]) -> Any:
    private: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "key": bytes(32)}
    return kind(**private) if issubclass(kind, PrivateLogistic) else kind()


@pytest.mark.parametrize("name", LABELLERS)
def test_labellers_keep_what_they_say(name: str) -> None:
    testing.check_labeller(labeller_of(LABELLERS[name]))


class SpreadsAlone(Spreading):
    inductive: ClassVar[bool] = True


class ScalesByAll(Logistic):
    def label_rows(self, features_UF: Any, labelled_n: Any, labels_n: Any, classes: int) -> Any:
        scaled_UF = (features_UF - features_UF.mean(0)) / features_UF.std(0)
        return super().label_rows(scaled_UF, labelled_n, labels_n, classes)


class NeverNegative(Ridge):
    signed: ClassVar[bool] = False


class Loud(Logistic):
    def label_rows(self, features_UF: Any, labelled_n: Any, labels_n: Any, classes: int) -> Any:
        return 2 * super().label_rows(features_UF, labelled_n, labels_n, classes)


class Drawn(Logistic):
    def label_rows(self, features_UF: Any, labelled_n: Any, labels_n: Any, classes: int) -> Any:
        votes_UK = super().label_rows(features_UF, labelled_n, labels_n, classes)
        return divide_by_norm(votes_UK + np.random.default_rng().random(votes_UK.shape))


class LinearByWord(Logistic):
    linear: ClassVar[bool] = True


class SquaredMatrix(Ridge):
    def label_rows(self, features_UF: Any, labelled_n: Any, labels_n: Any, classes: int) -> Any:
        return np.square(super().label_rows(features_UF, labelled_n, labels_n, classes))


class PrivateByWord(Logistic):
    @property
    def model(self) -> GaussianRelease:
        return GaussianRelease(noise_multiplier=2.0)


class HardlyNoised(PrivateLogistic):
    def compute_sigma(self, *, labelled_count: int, classes: int) -> float:
        return super().compute_sigma(labelled_count=labelled_count, classes=classes) / 1000


LABELLER_LIARS: Planted = {
    kind.__name__: (kind, said)
    for kind, said in (
        (SpreadsAlone, "SpreadsAlone says inductive = True"),
        (ScalesByAll, "ScalesByAll says inductive = True"),
        (NeverNegative, "NeverNegative says signed = False"),
        (Loud, "has L1 norm 2"),
        (Drawn, "gave two answers to one question"),
        (LinearByWord, "is no LinearLabeller"),
        (SquaredMatrix, "says linear = True"),
        (PrivateByWord, "there is no noise on what it fitted"),
        (HardlyNoised, "tell one labelled person's features"),
    )
}


@pytest.mark.sampled(every=2)
@parametrize_liars(LABELLER_LIARS)
def test_a_labeller_that_says_too_much_is_found(liar: Any, said: str) -> None:
    with pytest.raises(PromiseError, match=said):
        testing.check_labeller(labeller_of(liar))


# Defences: `protects`.


def defence_of(kind: type[GradientDefence]) -> Callable[[], GradientDefence]:
    settings = type("Knobs", (), {"keep": 0.25, "strength": 1.0})()
    return lambda: kind(settings, noise=NoiseSource(bytes(32)), classes=2)


@pytest.mark.parametrize("name", DEFENCES)
def test_defences_change_what_they_say_that_they_protect(name: str) -> None:
    testing.check_defence(defence_of(DEFENCES[name]))


class Idle(Compression):
    def protect_gradient(self, gradient_BD: Tensor, leaving: Any) -> Tensor:
        return gradient_BD.clone()


class Onlooker(Compression):
    protects: ClassVar[Any] = ()


class Dice(Compression):
    def protect_gradient(self, gradient_BD: Tensor, leaving: Any) -> Tensor:
        return gradient_BD + torch.randn_like(gradient_BD)


class Overwrites(Compression):
    def protect_gradient(self, gradient_BD: Tensor, leaving: Any) -> Tensor:
        return gradient_BD.mul_(0.5)


class HalfOfIt(Compression):
    """Returned gradients alone, of which it knows the labels."""

    def protect_gradient(self, gradient_BD: Tensor, leaving: Any) -> Tensor:
        return gradient_BD * 0 if leaving.labels is not None else gradient_BD


class Widens(Compression):
    def protect_gradient(self, gradient_BD: Tensor, leaving: Any) -> Tensor:
        return super().protect_gradient(gradient_BD, leaving).double()


DEFENCE_LIARS: Planted = {
    kind.__name__: (kind, said)
    for kind, said in (
        (Idle, "lets them leave as they came"),
        (Onlooker, "says in `protects` nothing"),
        (Dice, "sends another gradient each time"),
        (Overwrites, "writes to the gradient"),
        (HalfOfIt, "says that it protects contributions, and lets them"),
        (Widens, "float64"),
    )
}


@parametrize_liars(DEFENCE_LIARS)
def test_a_defence_that_says_too_much_is_found(liar: Any, said: str) -> None:
    with pytest.raises(PromiseError, match=said):
        testing.check_defence(defence_of(liar))


# Answers by chance: `epsilon` of label mechanisms, and of votes.


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize("name", LABEL_MECHANISMS)
def test_label_mechanisms_tell_no_more_than_they_say(name: str, epsilon: float) -> None:
    kind = LABEL_MECHANISMS[name]
    chosen = {} if kind.unsafe else {"epsilon": epsilon}
    testing.check_label_mechanism(kind(classes=3, **chosen))


@dataclass(frozen=True, kw_only=True)
class Stingy(LabelResponse):
    @property
    def replace_probability(self) -> float:
        return super().replace_probability / 2


@dataclass(frozen=True, kw_only=True)
class NextClass(LabelResponse):
    """Whoever is replaced becomes the next class, so that two classes are never one another's."""

    def randomise_labels(
        self, labels_N: Tensor, *, key: bytes, prior_NK: Tensor | None = None
    ) -> Tensor:
        answers_N = super().randomise_labels(labels_N, key=key)
        return torch.where(answers_N == labels_N, labels_N, (labels_N + 1) % self.classes)


@dataclass(frozen=True, kw_only=True)
class UnsafeWord(LabelResponse):
    unsafe: ClassVar[bool] = True


MECHANISM_LIARS: Planted = {
    "half of the replacements": (Stingy, "times as often"),
    "the next class": (NextClass, "times as often"),
    "unsafe": (UnsafeWord, "and unsafe = True"),
}


@parametrize_liars(MECHANISM_LIARS)
def test_a_label_mechanism_that_says_too_much_is_found(liar: Any, said: str) -> None:
    with pytest.raises(PromiseError, match=said):
        testing.check_label_mechanism(liar(classes=3, epsilon=2.0))


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_answers_for_votes_tell_no_more_than_they_say(classes: int, epsilon: float) -> None:
    testing.check_vote_response(VoteResponse(epsilon=epsilon, classes=classes))


@dataclass(frozen=True, kw_only=True)
class SilentVotes(VoteResponse):
    """Who has no vote answers class 0: that a person has none is told."""

    def randomise_votes(self, votes_UK: Any, *, key: bytes, about: bytes) -> Any:
        answers_U = super().randomise_votes(votes_UK, key=key, about=about)
        return np.where(votes_UK.any(axis=1), answers_U, 0)


def test_votes_that_tell_of_silence_are_found() -> None:
    with pytest.raises(PromiseError, match="times as often under one input"):
        testing.check_vote_response(SilentVotes(epsilon=1.0, classes=3))


# Tasks under DP-SGD: no word, and measured as networks are.


class InOneScale(Classification):
    def compute_loss(
        self, outputs_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None
    ) -> Tensor:
        return F.cross_entropy(outputs_BK / outputs_BK.detach().std(), labels_B)


class Balanced(Classification):
    def compute_loss(
        self, outputs_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None
    ) -> Tensor:
        counts_K = torch.bincount(labels_B, minlength=outputs_BK.shape[1]).clamp(min=1)
        return F.cross_entropy(outputs_BK, labels_B, weight=1 / counts_K)


class Pairwise(Classification):
    def compute_loss(
        self, outputs_BK: Tensor, labels_B: Tensor, weights_K: Tensor | None = None
    ) -> Tensor:
        scores_B = outputs_BK[:, 1] - outputs_BK[:, 0]
        apart_BB = scores_B[:, None] - scores_B[None]
        return F.softplus(-apart_BB * (labels_B[:, None] > labels_B[None])).mean()


OUTPUTS = torch.randn(12, 3)
CLASSES_OF = torch.arange(12) % 3


@pytest.mark.parametrize("name", TASKS)
def test_losses_of_tasks_read_each_row_alone(name: str) -> None:
    if name == Regression.name:
        targets = TargetScale(mean=0.0, scale=1.0)
        for error in ("squared", "absolute", "huber"):
            task = Regression(targets=targets, error=error)
            testing.check_loss(task, OUTPUTS[:, :1], torch.randn(12))
    elif TASKS[name].learns_numbers:
        counts = TASKS[name].from_targets(TargetScale(mean=3.0, scale=1.0))
        testing.check_loss(counts, OUTPUTS[:, :1], torch.randn(12))
    else:
        testing.check_loss(TASKS[name].from_targets(None), OUTPUTS, CLASSES_OF)


@pytest.mark.parametrize("kind", [InOneScale, Balanced, Pairwise])
def test_a_loss_that_mixes_rows_is_found(kind: type[Classification]) -> None:
    with pytest.raises(PromiseError, match=f"^bank: the loss of {kind.__name__} mixes the rows"):
        testing.check_loss(kind(), OUTPUTS, CLASSES_OF % 2, owner="bank")


# Sensitivities: what is noised, by what one person may be replaced by, and how far it is said to
# move.

BITS = 12
QUANTISER = FixedPoint(clip_norm=1.0, bits=BITS, contributor_count=1)
LEVELS = QUANTISER.max_level
AXES = np.concatenate([np.eye(3), -np.eye(3), np.ones((1, 3)), -np.ones((1, 3))])
VOTES = np.concatenate([np.eye(3), np.full((1, 3), 1 / 3), [[0.5, 0.5, 0]], np.zeros((1, 3))])
SIGNED = np.concatenate([VOTES, -np.eye(3), [[0.5, -0.5, 0]], [[-0.3, 0.3, 0.4]]])


def quantise_row(row_D: Any) -> Any:
    return QUANTISER.quantise_rows(np.asarray(row_D)[None], None).astype(np.int64)


def clip_gradient(row_P: Any) -> Any:
    return sum_clipped_gradients(
        [torch.as_tensor(row_P)[None], torch.ones(1, 2, dtype=torch.float64)], 1.0
    )


SENSITIVITIES: Mapping[str, tuple[Callable[[Any], Any], Any, float, float]] = {
    "a row under a sum": (
        quantise_row,
        [far * row for far in (1, 1e6, 1e-6) for row in AXES],
        sensitivity_in_steps(steps_in_clip=LEVELS, columns=3, rows_per_person=1),
        1.0,
    ),
    "a batch under a sum": (
        lambda rows: np.stack([quantise_row(row) for row in rows]),
        [np.tile(1e3 * row, (4, 1)) for row in AXES],
        sensitivity_in_steps(steps_in_clip=LEVELS, columns=3, rows_per_person=4),
        1.0,
    ),
    "votes": (
        quantise_row,
        list(VOTES),
        compute_distance_in_steps(steps=LEVELS, numbers=3, signed=False),
        1.0,
    ),
    "signed votes": (
        quantise_row,
        list(SIGNED),
        compute_distance_in_steps(steps=LEVELS, numbers=3, signed=True),
        1.0,
    ),
    "hard votes": (
        lambda row: quantise_row(harden_votes(row[None])[0]),
        list(VOTES),
        build_vote_release(
            Spreading(), hard=True, deviation=1, honest=1, steps=LEVELS, classes=3
        ).sensitivity,
        1.0,
    ),
    "votes of encrypted labels": (
        lambda row: np.trunc(row * LEVELS),
        list(SIGNED),
        build_vote_release(
            Ridge(),
            hard=False,
            deviation=1,
            honest=1,
            steps=LEVELS,
            classes=3,
            integers=True,
        ).sensitivity,
        1.0,
    ),
    "an example's gradient": (
        clip_gradient,
        [far * row for far in (1, 1e6) for row in AXES],
        GradientGuard(clip=1.0, noise_multiplier=1.0, key=bytes(32)).sensitivity(),
        1.0,
    ),
    "weights of a private classifier": (
        lambda x: PrivateLogistic(epsilon=1.0, delta=1e-5, key=bytes(32), strength=1.0).fit_weights(
            np.vstack([[x / np.linalg.norm(x)], np.eye(3)]), np.array([0, 1, 2, 1]), 3
        ),
        list(AXES),
        PrivateLogistic(epsilon=1.0, delta=1e-5, key=bytes(32), strength=1.0).compute_sensitivity(
            labelled_count=4, classes=3
        ),
        0.2,
    ),
}
"""What is noised, inputs, the claim, and the share of it that these inputs reach at least half of:
a bound that is far from being reached would let a wrong one pass."""


@pytest.mark.parametrize("name", SENSITIVITIES)
def test_nobody_moves_numbers_further_than_is_said(name: str) -> None:
    contribute, rows, claimed, reached = SENSITIVITIES[name]
    testing.check_sensitivity(contribute, rows, claimed, name=name)
    with pytest.raises(PromiseError, match=f"^{name} says that one person moves"):
        testing.check_sensitivity(contribute, rows, 0.65 * reached * claimed, name=name)


def test_words_are_measured_for_single_rows_and_without_rows() -> None:
    with pytest.raises(Exception, match="two rows or more"):
        testing.check_row_wise(nn.Linear(6, 2), torch.randn(1, 6))
    with pytest.raises(Exception, match="two rows or more"):
        testing.check_row_wise(nn.Linear(6, 2), torch.randn(0, 6))
    with pytest.raises(Exception, match="expected one row"):
        testing.check_row_wise(lambda x: x.mean(0), torch.randn(5, 6))
    testing.check_graph(torch.randn(1, 3))
