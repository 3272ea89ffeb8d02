"""Seeds: one purpose one stream, and the global generator as it was."""

import hashlib

import pytest
import torch

from secure_apfed.seeds import derive_seed, seeded, shuffled

PURPOSES: list[tuple[str | int, ...]] = [
    (), ("a",), ("b",), ("a", "b"), ("ab",), ("a", 1), ("a", 2), (1, "a"), (1,), (12,), (1, 2),
]  # fmt: skip


def test_purposes_and_seeds_are_independent() -> None:
    seeds = [derive_seed(seed, *purpose) for seed in (0, 1, 12) for purpose in PURPOSES]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_derived_seed_is_the_same_everywhere() -> None:
    digest = hashlib.sha256(b"0\x1factive\x1fencoder").digest()
    assert derive_seed(0, "active", "encoder") == int.from_bytes(digest[:8], "big") // 2


def drawn(seed: int, *purpose: str | int) -> list[float]:
    with seeded(seed, *purpose):
        return torch.rand(4).tolist()


def test_a_block_draws_by_its_purpose_alone() -> None:
    torch.manual_seed(1)
    first = drawn(0, "a")
    torch.manual_seed(2)
    torch.rand(17)
    assert drawn(0, "a") == first
    assert drawn(0, "b") != first
    assert drawn(1, "a") != first


def test_the_global_generator_is_restored() -> None:
    torch.manual_seed(5)
    expected = torch.rand(8)
    torch.manual_seed(5)
    got = [torch.rand(4)]
    with seeded(0, "outer"):
        before = torch.rand(1)
        with seeded(0, "inner"):
            torch.rand(100)
        after = torch.rand(1)
    got.append(torch.rand(4))
    assert torch.equal(torch.cat(got), expected)
    with seeded(0, "outer"):
        assert torch.equal(torch.rand(2), torch.cat([before, after]))


def test_the_global_generator_is_restored_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="negative"), seeded(0, "a"):
        torch.rand(-1)
    assert torch.equal(torch.get_rng_state(), state)


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
