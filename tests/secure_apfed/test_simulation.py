"""Simulated runs have the weights of the parties left out; seeds: one purpose, one stream."""

import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.base.seeds import derive_seed, seed_draws, shuffle_rows
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.methods import Simulation
from secure_apfed.methods.method import split_batches
from secure_apfed.runs.run import run
from secure_apfed.runs.simulation import (
    begin_simulation,
    describe_obstacles,
    simulate_run,
    train_simulation,
)
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
_MIXED = {
    "default": {"objective": {"name": "contrastive"}, "weight": 2.0},
    "passive-2": {"objective": {"name": "reconstruction"}},
}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "contrastive": ("apfed_c", {"passives": {"default": {"weight": 10.0}}}),
    "reconstruction": ("apfed_r", {"passives": {"default": {"weight": 0.5}}}),
    "both": ("apfed", {"passives": _MIXED}),
    "alone": ("single_view", {}),
    "typical": ("tvfl", {}),
    "split network": ("split_nn", {}),
    "some labels": ("apfed_c", {"data": {"labelled": 30}}),
    "some aligned": ("apfed_c", {"data": {"overlap": 0.4}}),
    "few aligned": ("apfed_r", {"data": {"overlap": 0.02}}),
    "bounded": ("apfed_c", {"train": {"max_gradient_norm": 0.05}}),
    "adamw": ("apfed_c", {"train": {"optimizer": "adamw", "weight_decay": 0.1, "warmup_steps": 4}}),
    "cosine": ("apfed_r", {"train": {"schedule_steps": 9, "warmup_steps": 2}}),
    "adam, typical": ("tvfl", {"train": {"optimizer": "adam", "learning_rate": 1e-3}}),
    "spread labels": ("apfed_c", {"train": {"spread_labels": True}, "data": {"labelled": 30}}),
    "whole maps": ("apfed_r", {"model": {"projection": "none"}}),
}


def config_of(method: str, changes: Mapping[str, Any]) -> Config:
    usual: dict[str, Any] = {
        "data": {"dataset": "digits", "views": 3, "limit": 200},
        "model": {"hidden": [16], "representation": 8, "projection": 8, "dropout": 0.5},
        "train": {"epochs": 2, "batch_size": 32, "learning_rate": 0.01, "precision": "float64"},
        "guard": {"mechanism": "none"},
        "secure_sum": {"scheme": "plain", "clip": None},
        "transcript": {"keep": "none"},
    }
    merged = {at: {**usual.get(at, {}), **changes.get(at, {})} for at in {**usual, **changes}}
    merged["train"]["device"] = "cpu"
    return small_config(method, **merged)


def weights_of(session: Simulation) -> dict[str, Tensor]:
    """Return the weights of all parties and what their optimizers remember, but no counts."""
    return {
        f"{party}/{name}": value
        for party, tensors in session.tensors().items()
        for name, value in tensors.items()
        if not name.startswith(("guard", "allowance"))
    }


def train_by_messages(session: Simulation, config: Config) -> None:
    session.transcript.begin_epoch(0)
    batches = chain.from_iterable(
        split_batches(session.active_role, config, epoch) for epoch in range(config.train.epochs)
    )
    for step, rows_B in enumerate(batches):
        session.train_step(step, rows_B)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_parties_that_send_messages(case: str) -> None:
    config = config_of(*CASES[case])
    data = load_data(config.data, seed=config.seed)
    together = begin_simulation(config, data)
    sent = begin_simulation(config, data)
    train_simulation(together, config)
    train_by_messages(sent, config)
    assert weights_of(together)
    torch.testing.assert_close(weights_of(together), weights_of(sent), rtol=0, atol=1e-9)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("method", "labelled"),
    [("apfed_c", 30), ("apfed_r", None), ("single_view", 30), ("tvfl", None)],
)
def test_accuracy_is_that_of_a_run(method: str, labelled: int | None) -> None:
    """Also where few rows have a label: those of the others are not learnt from."""
    config = config_of(method, {"data": {"labelled": labelled}, "train": {"epochs": 8}})
    simulated = simulate_run(config)
    played = run(config, None)
    # Where rows stand in the alignment is a secret order of the run, by which TVFL cuts batches.
    if method != "tvfl":
        assert simulated == played.accuracy
    assert simulated.keys() == played.accuracy.keys()


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("votes", {}, "method votes"),
        ("joint_teacher_sum", {}, "method joint_teacher_sum"),
        ("split_nn_sum", {}, "method split_nn_sum"),
        ("apfed_c", {"guard": {"mechanism": "gaussian", "epsilon": 8.0, "clip": 1.0}}, "guard"),
        ("apfed_c", {"secure_sum": {"masks": "pairwise"}}, "secure_sum"),
        ("apfed_c", {"secure_sum": {"clip": 1.0}}, "clip"),
        ("apfed_c", {"train": {"patience": 2}}, "patience"),
        ("apfed_c", {"labels": {"mechanism": "randomised_response", "epsilon": 1.0}}, "labels"),
        (
            "apfed_c",
            {"alignment": {"mode": "pairwise"}, "secure_sum": {"allow_single_passive": True}},
            "pairwise",
        ),
    ],
)
def test_what_is_accounted_for_is_refused(method: str, changes: dict[str, Any], says: str) -> None:
    config = config_of(method, changes)
    assert says in describe_obstacles(config)
    with pytest.raises(ConfigError, match=f"(?s)cannot be simulated.*{says}"):
        simulate_run(config)


def test_nothing_is_written_or_warned(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsafeChoiceWarning)
        simulate_run(config_of("apfed_c", {}))
    assert not list(tmp_path.iterdir())


def test_purposes_and_seeds_are_independent_and_the_same_everywhere() -> None:
    purposes: list[tuple[str | int, ...]] = [
        (),
        ("a",),
        ("b",),
        ("a", "b"),
        ("ab",),
        ("a", 1),
        ("a", 2),
        (1, "a"),
        (1,),
        (12,),
        (1, 2),
    ]
    seeds = [derive_seed(seed, *purpose) for seed in (0, 1, 12) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    digest = hashlib.sha256(b"0\x1factive\x1fencoder").digest()
    assert derive_seed(0, "active", "encoder") == int.from_bytes(digest[:8], "big") // 2


def test_the_global_generator_is_restored() -> None:
    state = torch.get_rng_state()
    with seed_draws(0, "outer"):
        before = torch.rand(1)
        with seed_draws(0, "inner"), pytest.raises(RuntimeError, match="negative"):
            torch.rand(-1)
        after = torch.rand(1)
    assert torch.equal(torch.get_rng_state(), state)
    with seed_draws(0, "outer"):
        assert torch.equal(torch.rand(2), torch.cat([before, after]))


def test_shuffling_keeps_every_row_and_depends_on_its_purpose_alone() -> None:
    rows = torch.arange(100, 200)
    state = torch.get_rng_state()
    first = shuffle_rows(rows, 0, "batches", 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.sort().values, rows)
    assert torch.equal(shuffle_rows(rows, 0, "batches", 0), first)
    assert not torch.equal(shuffle_rows(rows, 1, "batches", 0), first)
    assert not torch.equal(shuffle_rows(rows, 0, "batches", 1), first)
    assert len(shuffle_rows(rows[:0], 0, "batches", 0)) == 0


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
    with seed_draws(3, "x"):
        assert all(torch.equal(draw(), values) for values in expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", BORROWS)
def test_what_takes_no_generator_borrows_one(name: str) -> None:
    state = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with seed_draws(3, "x"), seed_draws(4, "y"):
            drawn += [BORROWS[name](), BORROWS[name]()]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_draw_each_its_own() -> None:
    meet = threading.Barrier(2)

    def draw(seed: int) -> Tensor:
        with seed_draws(seed, "x"):
            parts = []
            for _ in range(20):
                meet.wait(60)
                parts.append(F.dropout(torch.ones(50)))
        return torch.cat(parts)

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(draw, (0, 1)))
    meet = threading.Barrier(1)
    assert all(torch.equal(draw(seed), one) for seed, one in enumerate(together))
