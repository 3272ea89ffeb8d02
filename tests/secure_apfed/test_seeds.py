"""Seeds: one purpose one stream, and the global generator as it was."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secure_apfed.seeds import derive_seed, seeded, shuffled


def test_purposes_and_seeds_are_independent_and_the_same_everywhere() -> None:
    purposes: list[tuple[str | int, ...]] = [
        (), ("a",), ("b",), ("a", "b"), ("ab",), ("a", 1), ("a", 2), (1, "a"), (1,), (12,), (1, 2),
    ]  # fmt: skip
    seeds = [derive_seed(seed, *purpose) for seed in (0, 1, 12) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    digest = hashlib.sha256(b"0\x1factive\x1fencoder").digest()
    assert derive_seed(0, "active", "encoder") == int.from_bytes(digest[:8], "big") // 2


def test_the_global_generator_is_restored() -> None:
    state = torch.get_rng_state()
    with seeded(0, "outer"):
        before = torch.rand(1)
        with seeded(0, "inner"), pytest.raises(RuntimeError, match="negative"):
            torch.rand(-1)
        after = torch.rand(1)
    assert torch.equal(torch.get_rng_state(), state)
    with seeded(0, "outer"):
        assert torch.equal(torch.rand(2), torch.cat([before, after]))


def test_shuffling_keeps_every_row_and_depends_on_its_purpose_alone() -> None:
    rows = torch.arange(100, 200)
    state = torch.get_rng_state()
    first = shuffled(rows, 0, "batches", 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.sort().values, rows)
    assert torch.equal(shuffled(rows, 0, "batches", 0), first)
    for other in (shuffled(rows, 1, "batches", 0), shuffled(rows, 0, "batches", 1)):
        assert not torch.equal(other, first)
    assert len(shuffled(rows[:0], 0, "batches", 0)) == 0


# What draws within a block, and draws on the CPU as torch's own generator would at the same seed.
DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(torch.ones(7, 9), 0.3),
    "dropout of a transposed tensor in place": lambda: nn.Dropout(0.3, inplace=True)(
        torch.ones(9, 7).T
    ),
    "dropout in bfloat16": lambda: torch.dropout(torch.ones(64, dtype=torch.bfloat16), 0.3, True),
    "no dropout": lambda: F.dropout(torch.ones(9), 0.3, training=False),
    "transposed convolution": lambda: nn.ConvTranspose2d(2, 3, 5).weight,
    "GRU": lambda: next(nn.GRU(3, 4).parameters()),
    "rand": lambda: torch.rand(3, 4),
    "rand_like": lambda: torch.rand_like(torch.ones(4, dtype=torch.float64)),
    "randn_like": lambda: torch.randn_like(torch.ones(40)),
    "randint": lambda: torch.randint(9, (30,)),
    "randperm": lambda: torch.randperm(40),
    "normal": lambda: torch.normal(0.0, 1.0, (5,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "beta": lambda: torch.distributions.Beta(0.75, 0.75).sample((8,)),
}
# What draws from torch's own generator alone.
BORROWS: dict[str, Callable[[], Tensor]] = {
    "gumbel": lambda: F.gumbel_softmax(torch.ones(9)),
    "rrelu": lambda: F.rrelu(-torch.ones(9), training=True),
    "channels": lambda: F.dropout2d(torch.ones(2, 9, 4, 4)),
    "recurrent dropout": lambda: nn.GRU(3, 4, 2, dropout=0.5)(torch.ones(9, 3))[0],
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_block_draws_what_torch_would(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(derive_seed(3, "x"))
    expected = [draw(), draw()]
    state = torch.get_rng_state()
    with seeded(3, "x"):
        assert all(torch.equal(draw(), values) for values in expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", BORROWS)
def test_what_takes_no_generator_borrows_one(name: str) -> None:
    state, drawn = torch.get_rng_state(), []
    for _ in range(2):
        with seeded(3, "x"), seeded(4, "y"):
            drawn += [BORROWS[name](), BORROWS[name]()]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_draw_each_its_own() -> None:
    meet = threading.Barrier(2)

    def draw(seed: int) -> Tensor:
        with seeded(seed, "x"):
            parts = []
            for _ in range(20):
                meet.wait(60)
                parts.append(F.dropout(torch.ones(50)))
        return torch.cat(parts)

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(draw, (0, 1)))
    meet = threading.Barrier(1)
    assert all(torch.equal(draw(seed), one) for seed, one in enumerate(together))
