"""DP-SGD at the active: each example's gradient with the passives' row, clipped and noised."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secure_apfed.data import ColumnEncoding, PartyTable
from secure_apfed.errors import ModelError
from secure_apfed.exchange import TensorSpec, unpack
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.methods.sum_end import bind_step
from secure_apfed.privacy.accountants import gdp_epsilon
from secure_apfed.privacy.dp_sgd import GradientGuard, PrivateUpdates, WholeTraining
from secure_apfed.privacy.guard import GaussianGuard, NoGuard, RepresentationGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
from secure_apfed.settings.training import TrainSettings
from tests.secure_apfed.seats import SESSION, LoneActive, plain_sum, random

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

ROWS, COLUMNS, CLASSES, D, H = 12, 5, 3, 3, 4
ALIGNMENT = torch.tensor([7, 2, 9, 4, 0, 11, 5])
BATCH = torch.tensor([9, 1, 7, 3, 0])  # rows 9, 7 and 0 are aligned
ALIGNED_IN_BATCH = [0, 2, 4]
KEY = bytes(range(32))
SENT = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float64, (None, D))}
TRAIN = TrainSettings(
    learning_rate=0.5, momentum=0.0, weight_decay=0.0, precision="float64", device="cpu"
)
TINY_NOISE = 1e-12


def networks(dropout: float = 0.0) -> ActiveNetworks:
    torch.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(COLUMNS, H), nn.ReLU())
    head = nn.Sequential(nn.Linear(H, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, CLASSES))
    return ActiveNetworks(encoder, head, nn.Linear(H, D))


def updates(
    clip: float = 1.0, noise: float = TINY_NOISE, log: Path | None = None
) -> PrivateUpdates:
    guard = GradientGuard(clip=clip, noise_multiplier=noise, key=KEY)
    ledger = PrivacyLedger(guard.mechanism(), delta=1e-5, budget=None, rows=ROWS, log=log)
    return PrivateUpdates(guard, ledger)


def active(
    private: PrivateUpdates | None,
    *,
    parts: ActiveNetworks | None = None,
    guard: RepresentationGuard | None = None,
    train: TrainSettings = TRAIN,
) -> LoneActive:
    encoding = ColumnEncoding.plain(tuple("abcde"))
    table = PartyTable(
        "active", tuple(map(str, range(ROWS))), random(ROWS, COLUMNS, seed=1),
        torch.arange(ROWS) % CLASSES, encoding,
    )  # fmt: skip
    guard = guard or NoGuard()
    ledger = PrivacyLedger(
        guard.mechanism(), delta=1e-5, budget=None, rows=len(ALIGNMENT), log=None
    )
    return LoneActive(
        table, parts or networks(), guard, ledger, alignment=ALIGNMENT, private=private,
        train=train,
    )  # fmt: skip


def answer(sent: bytes | None, rows: Tensor, gradient_AD: Tensor, step: int = 0) -> bytes:
    """The sum, of which p1 gives everything."""
    assert sent is not None
    sums = plain_sum()
    binding = bind_step(SESSION, step, rows, sent)
    parts = {"p1": gradient_AD, "p2": torch.zeros_like(gradient_AD)}
    return sums.combiner().combine(
        {
            name: sums.contributor(name).contribute(part.numpy(), binding)
            for name, part in parts.items()
        }
    )


def play(party: LoneActive, gradient_AD: Tensor, step: int = 0) -> None:
    sent = party.represent(step, BATCH)
    positions = [ALIGNMENT.tolist().index(row) for row in (9, 7, 0)]
    party.update(answer(sent, torch.tensor(positions), gradient_AD, step))


def parameters(party: LoneActive) -> Tensor:
    return nn.utils.parameters_to_vector(party.role.trainer.networks.parameters()).detach()


def by_hand(parts: ActiveNetworks, party: LoneActive, gradient_AD: Tensor, clip: float) -> Tensor:
    """The clipped gradients of the batch, one example at a time, in the order of `parameters`."""
    modules = dict(parts.named_children())
    every = [*parts.parameters()]
    total = torch.zeros(sum(one.numel() for one in every), dtype=torch.float64)
    x_N, y_N = party.role.trainer.features_N, party.role.trainer.labels_N
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
    gradient_AD = 3 * random(3, D, seed=4)
    party = active(updates(clip))
    parts = networks().double()
    before = parameters(party)
    expected = by_hand(parts, party, gradient_AD, clip)
    play(party, gradient_AD)
    moved = (before - parameters(party)) / TRAIN.learning_rate * len(BATCH)
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-9 * clip)


def test_a_huge_clip_and_no_noise_is_the_plain_step_with_dropout_and_all() -> None:
    gradient_AD = random(3, D, seed=4)
    train = TRAIN.model_copy(update={"momentum": 0.9, "weight_decay": 1e-2})
    ours = active(updates(1e6, 1e-18), parts=networks(0.5), train=train)
    plain = active(None, parts=networks(0.5), train=train)
    for step in range(3):
        play(ours, gradient_AD, step)
        play(plain, gradient_AD, step)
    torch.testing.assert_close(parameters(ours), parameters(plain), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e20])
def test_one_record_moves_the_update_by_no_more_than_twice_the_clip(size: float) -> None:
    """Whatever its features, its label and its row of the passives' sum become."""
    clip, gradient_AD = 0.25, random(3, D, seed=4)

    def moved(scale: float, label: int, row: Tensor) -> Tensor:
        party = active(updates(clip))
        party.role.trainer.features_N[9] *= scale
        party.role.trainer.labels_N[9] = label
        before = parameters(party)
        play(party, torch.cat([row[None], gradient_AD[1:]]))
        return (before - parameters(party)) / TRAIN.learning_rate * len(BATCH)

    one = moved(1.0, 0, gradient_AD[0])
    other = moved(size, 1, 1e6 * gradient_AD[0])
    assert 0 < float((one - other).norm()) <= 2 * clip * (1 + 1e-9)


def test_a_record_that_overflows_stops_nothing_and_moves_no_more_than_any_other() -> None:
    """An error would tell everybody of this one record; the claim is about any record."""
    clip, gradient_AD = 0.25, random(3, D, seed=4)
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
        z_AD = unpack(sent, SENT, sender="active")[0]["z"]
        assert bool(z_AD.isfinite().all())
        assert (float(z_AD[0].norm()) < 1e-7) is overflows
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


def test_the_update_carries_noise_of_the_stated_size() -> None:
    gradient_AD = random(3, D, seed=4)
    clip, multiplier = 0.5, 50.0
    quiet, noisy = active(updates(clip)), active(updates(clip, multiplier))
    start = parameters(quiet)
    difference = []
    for step in range(40):
        for party in (quiet, noisy):
            nn.utils.vector_to_parameters(
                start.clone(),
                party.role.trainer.networks.parameters(),
            )
            play(party, gradient_AD, step)
        difference.append(parameters(noisy) - parameters(quiet))
    noise = torch.cat(difference) / TRAIN.learning_rate * len(BATCH)
    # About 3,000 numbers: their deviation is within 5 % but for one case in 10^4.
    assert float(noise.std()) == pytest.approx(clip * multiplier, rel=0.05)


def test_the_ledger_counts_each_row_of_the_batch_before_the_step() -> None:
    private = updates()
    party = active(private)
    play(party, random(3, D))
    assert private.ledger.state_dict()["counts"].tolist() == [
        int(row in BATCH.tolist()) for row in range(ROWS)
    ]


def test_a_spent_budget_changes_nothing() -> None:
    guard = GaussianGuard(clip=1.0, sigma=20.0, key=KEY)
    private = updates(1.0, 20.0)
    party = active(private, guard=guard)
    once = gdp_epsilon(math.hypot(0.1, 0.1), 1e-5)
    WholeTraining(
        releases=party.role.ledgers["active"], updates=private.ledger, delta=1e-5,
        budget=1.01 * once,
    )  # fmt: skip
    play(party, random(3, D))
    before = parameters(party)
    with pytest.raises(BudgetExhaustedError, match="step 1 was not played"):
        play(party, random(3, D), step=1)
    assert torch.equal(parameters(party), before)
    assert private.ledger.spent().releases == 1
    assert party.role.ledgers["active"].spent().releases == 1


def test_a_batch_that_was_never_updated_leaves_nothing_behind() -> None:
    gradient_AD = random(3, D, seed=4)
    ours, twin = active(updates()), active(updates())
    ours.represent(0, torch.arange(ROWS))
    ours.role.trainer.scored(torch.arange(ROWS))
    play(ours, gradient_AD, step=1)
    play(twin, gradient_AD, step=1)
    torch.testing.assert_close(parameters(ours), parameters(twin), rtol=1e-9, atol=1e-9)


class Buffered(nn.Module):
    """A running mean, by which one batch enters the next."""

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
