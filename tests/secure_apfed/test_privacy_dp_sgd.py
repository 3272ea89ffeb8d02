"""DP-SGD: the private sum of gradients, each with the passives' row, and one budget over all."""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.data import ColumnEncoding, PartyTable
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import TensorSpec, unpack_tensors
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.privacy import dp_sgd
from secure_apfed.privacy.accountants import (
    GaussianRelease,
    Mechanism,
    NoPrivacy,
    gdp_epsilon,
    gdp_mu,
)
from secure_apfed.privacy.guard import GaussianGuard, NoGuard, RepresentationGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger, PrivacySpent
from secure_apfed.settings import TrainSettings
from tests.secure_apfed.seats import LoneActive, random, sum_of
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
KEY = bytes(range(32))


def guard_of(**changes: object) -> dp_sgd.GradientGuard:
    settings: dict[str, object] = {"clip": 1.0, "noise_multiplier": 2.0, "key": KEY}
    return dp_sgd.GradientGuard(**{**settings, **changes})  # type: ignore[arg-type]  # one field at a time


def samples(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, *shape, generator=generator) for shape in ((3, 2), (4,))]


def test_the_sum_is_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dp_sgd.sum_clipped_gradients(samples(9), 0.7)
    monkeypatch.setattr("secure_apfed.privacy.dp_sgd._CHUNK_VALUES", 20)
    torch.testing.assert_close(
        dp_sgd.sum_clipped_gradients(samples(9), 0.7), whole, rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_example_moves_the_sum_beyond_the_clip(dtype: torch.dtype) -> None:
    huge = torch.full((1, 5), torch.finfo(dtype).max * 0.9, dtype=dtype)
    assert float(dp_sgd.sum_clipped_gradients([huge], 0.5).norm()) == pytest.approx(0.5)
    good = samples(4)
    spoilt = [torch.cat([part, torch.full_like(part[:1], math.nan)]) for part in good]
    torch.testing.assert_close(
        dp_sgd.sum_clipped_gradients(spoilt, 1.0), dp_sgd.sum_clipped_gradients(good, 1.0)
    )


@pytest.mark.parametrize(
    ("value", "first", "clip"),
    [
        *product(
            (math.inf, -math.inf, math.nan, 1e30, 3e38, 1e-44, 0.0, -1.0), (0, 9), (1e-6, 0.5, 1e6)
        )
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_example_moves_the_sum_beyond_the_clip_whatever_it_holds(
    value: float, first: int, clip: float, dtype: torch.dtype
) -> None:
    bad = torch.zeros(1, 10, dtype=dtype)
    bad[0, first:] = value
    alone = dp_sgd.sum_clipped_gradients([bad[:, :6].reshape(1, 3, 2), bad[:, 6:]], clip)
    assert bool(alone.isfinite().all())
    assert math.sqrt(math.fsum(x * x for x in alone.tolist())) <= clip


def test_the_noise_has_the_stated_deviation_and_no_other() -> None:
    guard = guard_of(clip=0.5, noise_multiplier=3.0)
    zeros = [torch.zeros(1, 20_000)]
    noise = guard.release(zeros, step=0, rows=torch.tensor([0])).numpy()
    deviation = float(np.sqrt((noise**2).mean()))
    assert guard.sigma == 1.5
    # 20,000 squares have a relative deviation of 1 %; six of them on the root are 3 %.
    off = [abs(deviation / (guard.sigma * factor) - 1) for factor in (1.0, 2 / 3, 1.5)]
    assert [one < 0.03 for one in off] == [True, False, False]
    assert guard.mechanism().mu == pytest.approx(2 / 3)


def test_the_key_stays_inside_and_bad_settings_are_refused() -> None:
    assert repr(guard_of()) == "GradientGuard(clip=1, sigma=2, noise='secret')"
    with pytest.raises(LocalProtocolError, match="a key has 32 bytes, got 5"):
        guard_of(key=b"short")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": 0.0}, "clip lies in"),
        ({"noise_multiplier": 0.0}, "positive number, got 0"),
        ({"noise_multiplier": math.inf}, "positive number, got inf"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        guard_of(**changes)


@pytest.mark.parametrize(
    ("gradients", "step", "rows", "message"),
    [
        (samples(3), 0, torch.arange(4), "one gradient for each of 4 examples"),
        ([], 0, torch.arange(4), "one gradient for each of 4 examples"),
        ([torch.zeros(4)], 0, torch.arange(4), "one gradient for each of 4 examples"),
        (samples(4), -1, torch.arange(4), "a step counts from 0, got -1"),
        (samples(2), 0, torch.tensor([3, 3]), "different int64 positions"),
        (samples(2), 0, torch.tensor([0.0, 1.0]), "different int64 positions"),
    ],
)
def test_wrong_arguments_are_named(
    gradients: list[Tensor], step: int, rows: Tensor, message: str
) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        guard_of().release(gradients, step=step, rows=rows)


ROWS = 12
COLUMNS = 5
CLASSES = 3
SIZE = 3
H = 4
ALIGNMENT = torch.tensor([7, 2, 9, 4, 0, 11, 5])
BATCH = torch.tensor([9, 1, 7, 3, 0])  # rows 9, 7 and 0 are aligned
ALIGNED_IN_BATCH = [0, 2, 4]

SENT = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float64, (None, SIZE))}
TRAIN = TrainSettings(
    learning_rate=0.5, momentum=0.0, weight_decay=0.0, precision="float64", device="cpu"
)
TINY_NOISE = 1e-12


def networks(dropout: float = 0.0) -> ActiveNetworks:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(COLUMNS, H), nn.ReLU())
    head = nn.Sequential(nn.Linear(H, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, CLASSES))
    return ActiveNetworks(encoder, head, nn.Linear(H, SIZE))


def updates(clip: float = 1.0, noise: float = TINY_NOISE) -> dp_sgd.PrivateUpdates:
    guard = dp_sgd.GradientGuard(clip=clip, noise_multiplier=noise, key=KEY)
    ledger = PrivacyLedger(guard.mechanism(), delta=1e-5, budget=None, rows=ROWS, log=None)
    return dp_sgd.PrivateUpdates(guard, ledger)


def active(
    private: dp_sgd.PrivateUpdates | None,
    *,
    parts: ActiveNetworks | None = None,
    guard: RepresentationGuard | None = None,
    train: TrainSettings = TRAIN,
) -> LoneActive:
    encoding = ColumnEncoding.for_numeric_columns(tuple("abcde"))
    table = PartyTable(
        "active",
        tuple(map(str, range(ROWS))),
        random(ROWS, COLUMNS, seed=1),
        torch.arange(ROWS) % CLASSES,
        encoding,
    )
    return LoneActive(
        table,
        parts or networks(),
        guard or NoGuard(),
        alignment=ALIGNMENT,
        private=private,
        train=train,
    )


def answer(sent: bytes | None, rows: Tensor, gradient_AD: Tensor, step: int = 0) -> bytes:
    assert sent is not None
    return sum_of(step, rows, sent, [gradient_AD, torch.zeros_like(gradient_AD)])


def play(party: LoneActive, gradient_AD: Tensor, step: int = 0) -> None:
    sent = party.represent(step, BATCH)
    positions = [ALIGNMENT.tolist().index(row) for row in (9, 7, 0)]
    party.update(answer(sent, torch.tensor(positions), gradient_AD, step))


def parameters(party: LoneActive) -> Tensor:
    return nn.utils.parameters_to_vector(party.role.trainer.networks.parameters()).detach()


def clip_gradients(
    parts: ActiveNetworks, party: LoneActive, gradient_AD: Tensor, clip: float
) -> Tensor:
    """Sum clipped gradients of the batch, one example at a time, in the order of `parameters`."""
    modules = dict(parts.named_children())
    every = [*parts.parameters()]
    total = torch.zeros(sum(one.numel() for one in every), dtype=torch.float64)
    x_N = party.role.trainer.features_N
    y_N = party.role.trainer.labels_N
    for index, row in enumerate(BATCH.tolist()):
        h = modules["encoder"](x_N[row : row + 1])
        loss = F.cross_entropy(modules["head"](h), y_N[row : row + 1])
        if index in ALIGNED_IN_BATCH:
            at = ALIGNED_IN_BATCH.index(index)
            ratio = len(BATCH) / len(ALIGNED_IN_BATCH)
            loss = loss + ratio * (gradient_AD[at] * modules["projection"](h)).sum()
        for one in every:
            one.grad = torch.zeros_like(one)
        loss.backward()
        flat = torch.cat([one.grad.flatten() for one in every if one.grad is not None])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("clip", [1e-3, 0.5, 1e3])
def test_each_example_is_clipped_with_the_passives_row_in_it(clip: float) -> None:
    gradient_AD = 3 * random(3, SIZE, seed=4)
    party = active(updates(clip))
    parts = networks().double()
    before = parameters(party)
    expected = clip_gradients(parts, party, gradient_AD, clip)
    play(party, gradient_AD)
    moved = (before - parameters(party)) / TRAIN.learning_rate * len(BATCH)
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-9 * clip)


def test_a_huge_clip_and_no_noise_is_the_plain_step_with_dropout_and_all() -> None:
    gradient_AD = random(3, SIZE, seed=4)
    train = TRAIN.model_copy(update={"momentum": 0.9, "weight_decay": 1e-2})
    ours = active(updates(1e6, 1e-18), parts=networks(0.5), train=train)
    plain = active(None, parts=networks(0.5), train=train)
    for step in range(3):
        play(ours, gradient_AD, step)
        play(plain, gradient_AD, step)
    torch.testing.assert_close(parameters(ours), parameters(plain), rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e20])
def test_one_record_moves_the_update_by_no_more_than_twice_the_clip(size: float) -> None:
    clip, gradient_AD = 0.25, random(3, SIZE, seed=4)

    def measure_move(scale: float, label: int, row: Tensor) -> Tensor:
        party = active(updates(clip))
        party.role.trainer.features_N[9] *= scale
        party.role.trainer.labels_N[9] = label
        before = parameters(party)
        play(party, torch.cat([row[None], gradient_AD[1:]]))
        return (before - parameters(party)) / TRAIN.learning_rate * len(BATCH)

    one = measure_move(1.0, 0, gradient_AD[0])
    other = measure_move(size, 1, 1e6 * gradient_AD[0])
    assert 0 < float((one - other).norm()) <= 2 * clip * (1 + 1e-9)


def test_a_record_that_overflows_stops_nothing_and_moves_no_more_than_any_other() -> None:
    """An error would tell everybody of this one record; the claim is about any record."""
    clip = 0.25
    gradient_AD = random(3, SIZE, seed=4)
    moved = []
    for overflows in (False, True):
        guard = GaussianGuard(clip=1.0, sigma=1e-9, key=KEY)
        party = active(updates(clip), guard=guard)
        if overflows:
            trainer = party.role.trainer
            encoder = trainer.networks.encoder
            trainer.features_N[9] = 1.7e308 * next(encoder.parameters()).detach()[0].sign()
            with torch.no_grad():
                assert not encoder(trainer.features_N[9:10]).isfinite().all()
        before = parameters(party)
        sent = party.represent(0, BATCH)
        assert sent is not None
        z_AD = unpack_tensors(sent, SENT, sender="active")[0]["z"]
        assert bool(z_AD.isfinite().all())
        # A row of zeros is lengthened to what the contract of these tests takes.
        assert (float(z_AD[0].norm()) < 2e-6) is overflows
        party.update(answer(sent, torch.tensor([2, 0, 4]), gradient_AD))
        moved.append((before - parameters(party)) / TRAIN.learning_rate * len(BATCH))
    assert bool(moved[1].isfinite().all())
    assert 0 < float((moved[0] - moved[1]).norm()) <= 2 * clip * (1 + 1e-9)


def test_parameters_that_diverged_are_an_error() -> None:
    party = active(updates(), guard=GaussianGuard(clip=1.0, sigma=1.0, key=KEY))
    with torch.no_grad():
        next(party.role.trainer.networks.head.parameters()).fill_(math.nan)
    with pytest.raises(ModelError, match="active: training diverged, its parameters are not"):
        party.represent(0, BATCH)


def test_a_spent_budget_changes_nothing() -> None:
    guard = GaussianGuard(clip=1.0, sigma=20.0, key=KEY)
    private = updates(1.0, 20.0)
    party = active(private, guard=guard)
    once = gdp_epsilon(math.hypot(0.1, 0.1), 1e-5)
    dp_sgd.WholeTraining(
        releases=party.role.ledgers["active"],
        updates=private.ledger,
        delta=1e-5,
        budget=1.01 * once,
    )
    play(party, random(3, SIZE))
    before = parameters(party)
    with pytest.raises(BudgetExhaustedError, match="step 1 was not played"):
        play(party, random(3, SIZE), step=1)
    assert torch.equal(parameters(party), before)
    assert private.ledger.get_privacy_spent().releases == 1
    assert party.role.ledgers["active"].get_privacy_spent().releases == 1


def test_a_refused_update_leaves_no_gradient_and_no_charge() -> None:
    private = updates(1.0, 20.0)
    party = active(private, guard=GaussianGuard(clip=1.0, sigma=20.0, key=KEY))
    releases = party.role.ledgers["active"]
    # Two releases (mu 0.1 each) and one update fit; a second update does not.
    budget = 1.01 * gdp_epsilon(math.sqrt(3) * 0.1, DELTA)
    dp_sgd.WholeTraining(releases=releases, updates=private.ledger, delta=DELTA, budget=budget)
    play(party, random(3, SIZE))
    before = parameters(party)
    with pytest.raises(BudgetExhaustedError, match="step 1 was not played"):
        play(party, random(3, SIZE), step=1)
    assert releases.get_privacy_spent().releases == 2
    assert private.ledger.get_privacy_spent().releases == 1
    assert torch.equal(parameters(party), before)
    networks = party.role.trainer.networks
    left: list[Any] = [*networks.encoder.parameters(), *networks.head.parameters()]
    assert all(parameter.grad is None for parameter in left)
    assert all(parameter.grad_sample is None for parameter in left)


def test_a_batch_that_was_never_updated_leaves_nothing_behind() -> None:
    gradient_AD = random(3, SIZE, seed=4)
    ours = active(updates())
    twin = active(updates())
    ours.represent(0, torch.arange(ROWS))
    ours.role.trainer.score_rows(torch.arange(ROWS))
    play(ours, gradient_AD, step=1)
    play(twin, gradient_AD, step=1)
    torch.testing.assert_close(parameters(ours), parameters(twin), rtol=1e-9, atol=1e-9)


class Buffered(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        return values - self.mean


MIXERS: Mapping[str, tuple[nn.Module, str]] = {
    "BatchNorm": (nn.BatchNorm1d(H), "depend on its peers in a batch"),
    "BatchNorm without parameters": (
        nn.BatchNorm1d(H, affine=False, track_running_stats=False),
        "depend on its peers in a batch",
    ),
    "buffers": (Buffered(), "keeps encoder.1.mean"),
    "LSTM": (nn.LSTM(H, H), "We do not support nn.LSTM"),
}


@pytest.mark.parametrize("name", MIXERS)
def test_layers_that_mix_examples_are_refused_in_opacus_words(name: str) -> None:
    layer, words = MIXERS[name]
    parts = networks()
    mixing = ActiveNetworks(nn.Sequential(parts.encoder[0], layer), parts.head, parts.projection)  # type: ignore[index]  # a Sequential
    with pytest.raises(ModelError, match=words):
        active(updates(), parts=mixing)
    active(None, parts=mixing)


DELTA = 1e-5


def training(
    released: Mechanism, updated: Mechanism, *, budget: float | None = None
) -> tuple[dp_sgd.WholeTraining, PrivacyLedger, PrivacyLedger]:
    releases, updates = (
        PrivacyLedger(one, delta=DELTA, budget=None, rows=5, log=None)
        for one in (released, updated)
    )
    whole = dp_sgd.WholeTraining(releases=releases, updates=updates, delta=DELTA, budget=budget)
    return whole, releases, updates


def charge(ledger: PrivacyLedger, step: int, *rows: int) -> None:
    ledger.charge(step=step, rows=torch.tensor(rows, dtype=torch.int64), digest=b"z")


def test_the_formula_of_the_docs() -> None:
    """T = 50, sigma_h = 40 at C = 1, sigma = 30 at C_theta = 0.5."""
    whole, releases, updates = training(
        GaussianRelease(noise_multiplier=40 / 2), GaussianRelease(noise_multiplier=30 / 1)
    )
    for step in range(50):
        charge(releases, step, 0, 1)
        charge(updates, step, 0, 1, 2)
    mu = math.sqrt(50 * (2 / 40) ** 2 + 50 * (1 / 30) ** 2)
    assert whole.mu == pytest.approx(mu)
    assert whole.epsilon_model == pytest.approx(gdp_epsilon(mu, DELTA))
    assert whole.epsilon_y == pytest.approx(gdp_epsilon(math.sqrt(50) / 30, DELTA))
    spent = whole.add_training_cost(releases.get_privacy_spent())
    assert (spent.epsilon_x, spent.releases) == (releases.get_privacy_spent().epsilon_x, 50)
    assert (spent.epsilon_y, spent.epsilon_model) == (whole.epsilon_y, whole.epsilon_model)
    assert spent.epsilon_x < spent.epsilon_model
    assert spent.trace[:3] == releases.get_privacy_spent().trace
    assert "updates: 50 of one record at most" in spent.trace[3]


def test_without_noise_on_releases_only_labels_are_covered_and_nothing_sent_costs_nothing() -> None:
    whole, releases, updates = training(NoPrivacy(), GaussianRelease(noise_multiplier=4.0))
    charge(updates, 0, 1)
    unsent = whole.add_training_cost(PrivacySpent.for_no_release(delta=DELTA))
    # The finished model has read the label, whatever was sent.
    label = gdp_epsilon(0.25, DELTA)
    assert (unsent.epsilon_x, unsent.epsilon_y, unsent.epsilon_model) == (0, label, label)
    charge(releases, 0, 1)
    spent = whole.add_training_cost(releases.get_privacy_spent())
    assert (spent.epsilon_x, spent.epsilon_y, spent.epsilon_model) == (math.inf, label, math.inf)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "single_view", "dp_sgd": {"epsilon": 4.0}},
        {"method": "apfed_r"},
        {"defences": [{"kind": "compression"}]},
    ],
    ids=["nothing is sent", "labels alone", "a defence"],
)
def test_what_the_proof_covers_is_taken(changes: dict[str, Any]) -> None:
    """Nothing is sent, or labels alone are promised, or a defence acts on what passives answer."""
    usual: dict[str, Any] = {
        "method": "apfed_c",
        "guard": {"mechanism": "none"},
        "dp_sgd": {"noise_multiplier": 1.0},
    }
    assert small_config(**{**usual, **changes}).dp_sgd


@pytest.mark.parametrize("releases", [0, 1, 6])
def test_a_calibrated_training_ends_at_its_budget_and_not_before(releases: int) -> None:
    release = GaussianRelease(noise_multiplier=8.0)
    multiplier = dp_sgd.calibrate_updates(3.0, DELTA, release=release, releases=releases, updates=6)
    updated = GaussianRelease(noise_multiplier=multiplier / 2)
    whole, released, updates = training(release, updated, budget=3.0)
    for step in range(6):
        if step < releases:
            charge(released, step, 1)
        charge(updates, step, 1)
    assert whole.epsilon_model == pytest.approx(3.0, rel=1e-6)
    for ledger in (released, updates):
        with pytest.raises(BudgetExhaustedError, match=r"step 6 was not played.*budget .* is 3"):
            charge(ledger, 6, 1)
        charge(ledger, 7)  # nobody's rows cost nothing
        charge(updates, 5, 1)  # what happened already is free
    assert (released.get_privacy_spent().releases, updates.get_privacy_spent().releases) == (
        releases,
        6,
    )


def test_updates_alone_take_the_whole_budget_and_what_cannot_be_calibrated_is_said() -> None:
    multiplier = dp_sgd.calibrate_updates(1.0, DELTA, release=NoPrivacy(), releases=0, updates=50)
    # The tabulated sigma/(2C) of epsilon 1 and T = 50, twice, since Opacus counts sigma / C.
    assert multiplier == pytest.approx(2 * 26.4, rel=2e-3)
    assert multiplier == pytest.approx(2 * math.sqrt(50) / gdp_mu(1.0, DELTA))


@pytest.mark.parametrize(
    ("release", "releases", "updates", "message"),
    [
        (GaussianRelease(noise_multiplier=0.1), 5, 5, "5 releases of a row alone cost epsilon"),
        (NoPrivacy(), 1, 5, "alone cost epsilon inf"),
        (NoPrivacy(), 0, 0, "at least 1 planned update, got 0"),
        (NoPrivacy(), -1, 1, "and -1 releases"),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    release: Any, releases: int, updates: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dp_sgd.calibrate_updates(1.0, DELTA, release=release, releases=releases, updates=updates)


def test_statements_say_what_is_covered_and_what_noise_from_the_seed_is_worth() -> None:
    updated = GaussianRelease(noise_multiplier=4.0)
    whole, releases, updates = training(NoPrivacy(), updated)
    seeded = dp_sgd.WholeTraining(
        releases=releases, updates=updates, delta=DELTA, budget=None, is_reproducible=True
    )
    guard = GaussianGuard(clip=1.0, sigma=3.0, key=KEY)
    for by, said in (
        (guard, "(epsilon_model, delta)-DP for one record"),
        (guard, "what all passives receive and the finished model together"),
        (NoGuard(), "labels alone"),
        (NoGuard(), "no guarantee for features"),
        (None, "nothing is sent"),
    ):
        text = whole.describe_guarantee(by)
        for part in (said, "encoding of features", "losses and checkpoints stay with the active"):
            assert part in text
        assert "does not know the run's seed" not in text
        assert "does not know the run's seed" in seeded.describe_guarantee(by)
