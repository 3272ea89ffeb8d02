"""`PrivateRelease` as a layer: copies, states, modes, compilers, workers; and what it refuses."""

import copy
import io
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from apfed_protocols.errors import LocalProtocolError
from secure_apfed import PrivateRelease
from secure_apfed.errors import CheckpointError, PromiseError
from secure_apfed.privacy import BudgetExhaustedError

ROWS = 24
BATCH = 4
quiet = pytest.mark.filterwarnings("ignore:PrivateRelease.disable_noise")


def make_guard(**changed: Any) -> PrivateRelease:
    settings = {"clip": 64, "epsilon": 8, "delta": 1e-5, "epochs": 3, "rows": ROWS}
    return PrivateRelease(**{**settings, **changed})


def make_network(guard: nn.Module) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(3, 5), guard, nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


def count_releases(guard: PrivateRelease) -> int:
    return guard.get_privacy_spent().releases


def release_batch(guard: PrivateRelease, value: float = 0.0) -> Tensor:
    return guard(torch.full((BATCH, 8), value), rows=range(BATCH))


COPIES: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "a shallow copy of the layer": lambda network: make_network(copy.copy(network[1])),
    "a deep copy of a deep copy": lambda network: copy.deepcopy(copy.deepcopy(network)),
    "AveragedModel": lambda network: AveragedModel(network).module,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_charges_the_same_account_and_never_draws_the_same_noise(kind: str) -> None:
    guard = make_guard()
    other = cast(Any, COPIES[kind](make_network(guard)))[1]
    assert other is not guard
    first = release_batch(guard)
    second = release_batch(other)
    assert not torch.equal(first, second)
    # Of a shared noise the difference of two releases would be that of the values, exactly.
    moved = release_batch(other, 1.0) - first
    assert moved.std() > guard.sigma / 4
    assert (count_releases(guard), count_releases(other)) == (3, 3)
    assert other.report() == guard.report()
    for layer in (guard, other):
        with pytest.raises(BudgetExhaustedError):
            release_batch(layer)


SERIALISERS: dict[str, Callable[[nn.Module], object]] = {
    "pickle": pickle.dumps,
    "torch.save of the network": lambda network: torch.save(network, io.BytesIO()),
    "a process that is spawned": lambda network: pickle.dumps((network.forward, ())),
}


@pytest.mark.parametrize("kind", SERIALISERS)
def test_a_network_with_the_layer_is_not_pickled_and_the_error_says_what_is(kind: str) -> None:
    with pytest.raises(
        LocalProtocolError, match=r"never serialised: save the network's state_dict"
    ):
        SERIALISERS[kind](make_network(make_guard()))


def save_and_read(network: nn.Module) -> dict[str, Tensor]:
    stored = io.BytesIO()
    torch.save(network.state_dict(), stored)
    stored.seek(0)
    return cast(dict[str, Tensor], torch.load(stored, weights_only=True))


def test_a_state_restores_the_account_in_a_new_layer_under_a_key_of_its_own() -> None:
    guard = make_guard()
    network = make_network(guard)
    release_batch(guard)
    restored = make_network(make_guard())
    restored.load_state_dict(save_and_read(network))
    layer = cast(PrivateRelease, restored[1])
    assert layer.get_privacy_spent() == guard.get_privacy_spent()
    assert not torch.equal(release_batch(guard), release_batch(layer))
    release_batch(layer)
    with pytest.raises(BudgetExhaustedError):
        release_batch(layer)


def test_neither_state_nor_repr_shows_the_key() -> None:
    guard = make_guard()
    key: bytes = guard._account.guard._noise._key
    state = make_network(guard).state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    shown = b"".join(value.numpy().tobytes() for value in state.values())
    parts = [key[start : start + 8] for start in range(0, len(key), 8)]
    assert not any(part in shown for part in parts)
    assert "clip=64, epsilon=8, delta=1e-05, epochs=3, rows=24" in repr(guard)
    assert not any(word in repr(guard) for word in (key.hex(), repr(key), "key"))


def test_a_state_of_before_lowers_no_count() -> None:
    guard = make_guard()
    early = guard.state_dict()
    release_batch(guard)
    for _ in range(2):
        guard.load_state_dict(early)
    assert count_releases(guard) == 1


@pytest.mark.parametrize("times", [1, 2])
def test_two_branches_of_one_state_add_up_once_however_often_they_are_loaded(times: int) -> None:
    start = make_guard(epochs=9)
    release_batch(start)
    branches = [make_guard(epochs=9) for _ in range(2)]
    for branch in branches:
        branch.load_state_dict(start.state_dict())
        release_batch(branch)
    release_batch(branches[1])
    for _ in range(times):
        branches[0].load_state_dict(branches[1].state_dict())
        branches[0].load_state_dict(start.state_dict())
    assert count_releases(branches[0]) == 1 + 1 + 2


@quiet
def test_a_state_remembers_what_went_without_protection() -> None:
    guard = make_guard()
    with guard.disable_noise():
        guard(torch.zeros(5, 2))
    other = make_guard()
    other.load_state_dict(guard.state_dict())
    assert other.report().startswith("no guarantee for the 5 rows")


WRONG_STATES: dict[str, Callable[[Tensor], object]] = {
    "an average": lambda state: state.double() / 2,
    "narrowed": lambda state: state.int(),
    "of another table": lambda state: state[:, :-1],
    "one line": lambda state: state[0],
    "negative": lambda state: -state.abs(),
    "nothing": lambda state: None,
}


@pytest.mark.parametrize("kind", WRONG_STATES)
def test_a_state_that_is_no_account_of_this_layer_is_refused(kind: str) -> None:
    guard = make_guard()
    release_batch(guard)
    state = WRONG_STATES[kind](guard.state_dict()["_extra_state"])
    other = make_guard()
    with pytest.raises(CheckpointError, match="is no account of 24 rows"):
        other.load_state_dict({"_extra_state": cast(Tensor, state)})
    assert count_releases(other) == 0


@pytest.mark.parametrize("changed", [{"clip": 32}, {"epsilon": 7}, {"delta": 1e-6}, {"epochs": 4}])
def test_a_state_of_other_noise_is_refused(changed: dict[str, Any]) -> None:
    guard = make_guard()
    other = make_guard(**changed)
    if "clip" in changed:  # sigma / clip is the same, and so is what a release costs
        other.load_state_dict(guard.state_dict())
        return
    with pytest.raises(CheckpointError, match="under another noise"):
        other.load_state_dict(guard.state_dict())


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "with gradients": torch.enable_grad,
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_is_noisy_and_charged_like_training(mode: str, training: bool) -> None:
    guard = make_guard()
    network = make_network(guard).train(training)
    with MODES[mode](), guard.name_rows(range(BATCH)):
        scores = [network(torch.zeros(BATCH, 3)) for _ in range(2)]
    assert not torch.equal(*scores)
    assert count_releases(guard) == 2
    with MODES[mode](), pytest.raises(LocalProtocolError, match="say with rows="):
        network(torch.zeros(BATCH, 3))


@quiet
def test_off_holds_for_copies_and_wins_over_named_rows() -> None:
    guard = make_guard()
    other = copy.deepcopy(guard)
    with guard.name_rows(range(BATCH)), other.disable_noise():
        assert torch.equal(guard(torch.ones(BATCH, 2)), torch.ones(BATCH, 2))
    assert count_releases(guard) == 0


def test_names_of_rows_end_with_their_block_and_stay_in_their_thread() -> None:
    guard = make_guard()
    stranger = make_guard()
    refused = list[str]()

    def call_elsewhere() -> None:
        try:
            guard(torch.zeros(2, 3))
        except LocalProtocolError as error:
            refused.append(str(error))

    with guard.name_rows([0, 1]):
        with guard.name_rows([2, 3]):
            guard(torch.zeros(2, 3))
        guard(torch.zeros(2, 3))
        thread = threading.Thread(target=call_elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(LocalProtocolError, match="named twice"):
            guard(torch.zeros(2, 3), rows=[0, 1])
        with pytest.raises(LocalProtocolError, match="say with rows="):
            stranger(torch.zeros(2, 3))
    call_elsewhere()
    assert len(refused) == 2
    assert guard.get_extra_state()[0, -ROWS:].tolist() == [1] * 4 + [0] * (ROWS - 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_moving_the_network_leaves_the_layer_as_it_is(dtype: torch.dtype) -> None:
    guard = make_guard()
    network = make_network(guard).to(dtype)
    assert [*guard.parameters(), *guard.buffers()] == []
    with guard.name_rows(range(BATCH)):
        h = network[0](torch.zeros(BATCH, 3, dtype=dtype))
        assert guard(h).dtype == dtype
    guard.to("meta")
    assert release_batch(guard).device.type == "cpu"
    assert count_releases(guard) == 2


def measure_gradients(network: nn.Module, guard: PrivateRelease | None) -> list[Tensor]:
    """The lower layer's gradients, which under a loss linear in z are free of the noise."""
    x = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(1))
    if guard is None:
        network(x).sum().backward()
    else:
        with guard.name_rows(range(BATCH)):
            network(x).sum().backward()
    return [cast(Tensor, parameter.grad) for parameter in [*network.parameters()][:2]]


class OwnForward(nn.Module):
    """The same layers, called one by one and not in a loop."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.lower = layers[0]
        self.guard = layers[1]
        self.upper = layers[2]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.upper(self.guard(self.lower(x))))


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """Let no test run out of the recompilations that torch grants one function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Torch hides this warning of its own compiler, unless warnings are errors.
ignore_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
Backend = str | Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


def compile_in_place(network: nn.Sequential, backend: Backend) -> nn.Module:
    network.compile(backend=backend)
    return network


def compile_parts(network: nn.Sequential, backend: Backend) -> nn.Module:
    lower: Any = torch.compile(network[0], backend=backend)
    upper: Any = torch.compile(network[2], backend=backend)
    return nn.Sequential(lower, network[1], upper)


COMPILED: dict[str, Callable[[nn.Sequential, Backend], Any]] = {
    "a Sequential": lambda network, backend: torch.compile(network, backend=backend),
    "own forward": lambda network, backend: torch.compile(OwnForward(network), backend=backend),
    "in place": compile_in_place,
    "its parts": compile_parts,
}


@ignore_grad
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "kind",
    [
        "own forward",
        "a Sequential",
        pytest.param("in place", marks=pytest.mark.slow),
        pytest.param("its parts", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_network_trains_as_without_and_draws_noise_at_each_call(kind: str) -> None:
    guard = make_guard()
    network = COMPILED[kind](make_network(guard), "eager")
    expected = measure_gradients(make_network(nn.Identity()), None)
    torch.testing.assert_close(measure_gradients(network, guard), expected)
    with guard.name_rows(range(BATCH)), torch.no_grad():
        assert not torch.equal(network(torch.zeros(BATCH, 3)), network(torch.zeros(BATCH, 3)))
    assert count_releases(guard) == 3


@ignore_grad
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("kind", ["own forward", "its parts"])
def test_what_stands_around_the_layer_is_compiled(kind: str) -> None:
    graphs = list[torch.fx.GraphModule]()

    def collect(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    guard = make_guard()
    network = COMPILED[kind](make_network(guard), collect)
    with guard.name_rows(range(BATCH)):
        network(torch.zeros(BATCH, 3))
    assert len(graphs) == 2


@ignore_grad
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.slow  # loads torch's compiler of gradients
@pytest.mark.parametrize("kind", ["own forward", "its parts"])
def test_a_graph_that_the_compiler_hides_is_reported_as_not_measured(kind: str) -> None:
    guard = make_guard()
    network = COMPILED[kind](make_network(guard), "aot_eager")
    expected = measure_gradients(make_network(nn.Identity()), None)
    torch.testing.assert_close(measure_gradients(network, guard), expected)
    assert "not measured, since the graph of the first batch is compiled" in guard.report()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_whole_graph_is_refused_in_one_sentence() -> None:
    guard = make_guard()
    network = torch.compile(make_network(guard), backend="eager", fullgraph=True)
    with (
        guard.name_rows(range(BATCH)),
        pytest.raises(Exception, match="leave fullgraph=True out") as refused,
    ):
        network(torch.zeros(BATCH, 3))
    assert type(refused.value).__name__ == "Unsupported"
    assert count_releases(guard) == 0


def test_an_encoder_that_opacus_fixed_mixes_no_rows() -> None:
    encoder = nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32))
    guard = make_guard()
    x = torch.randn(BATCH, 3)
    with pytest.raises(PromiseError, match="GroupNorm"):
        guard.check_encoder(encoder, x)
    guard.check_encoder(ModuleValidator.fix(encoder), x)
    assert f"measured on {BATCH} rows" in guard.report()


class Guarded(Dataset[Tensor]):
    """Rows that are released where they are loaded."""

    def __init__(self, guard: PrivateRelease) -> None:
        self.guard = guard

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        return self.guard(torch.zeros(1, 3), rows=[row])


def load_with(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH, num_workers=2, multiprocessing_context="fork")


def test_rows_that_workers_load_are_released_by_the_loop() -> None:
    guard = make_guard()
    network = make_network(guard)
    table = TensorDataset(torch.randn(ROWS, 3), torch.arange(ROWS))
    for x, rows in load_with(table):
        with guard.name_rows(rows):
            network(x).sum().backward()
    assert guard.get_extra_state()[0, -ROWS:].tolist() == [1] * ROWS


def test_a_worker_that_releases_rows_is_refused() -> None:
    guard = make_guard()
    with pytest.raises(LocalProtocolError, match="belongs to the process that made it"):
        next(iter(load_with(Guarded(guard))))
    assert count_releases(guard) == 0


def trace(network: nn.Module, x: Tensor) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of tracing
        return torch.jit.trace(network, x, check_trace=False)


def recompute(network: nn.Module, x: Tensor) -> object:
    return cast(Tensor, checkpoint(network, x, use_reentrant=False)).sum().backward()


REFUSED: dict[str, tuple[Callable[[nn.Sequential, Tensor], object], str]] = {
    "torch.jit.trace": (trace, "traced or exported"),
    "torch.export": (lambda network, x: torch.export.export(network, (x,)), "traced or exported"),
    "torch.vmap": (lambda network, x: torch.vmap(network)(x[:, None]), r"inside torch\.func"),
    "torch.func.grad": (
        lambda network, x: torch.func.grad(lambda v: network(v).sum())(x),
        r"inside torch\.func",
    ),
    "the meta device": (lambda network, x: network.to("meta")(x.to("meta")), "no numbers"),
    "replicas": (
        lambda network, x: cast(Any, network[1])._replicate_for_data_parallel(),
        "nn.DataParallel deals a batch out to threads",
    ),
    "its own check": (
        lambda network, x: cast(Any, network[1]).check_encoder(network, x),
        "contains a PrivateRelease",
    ),
    "a list": (lambda network, x: network[1](x.tolist()), "got list"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_release_without_account_is_refused_and_costs_nothing(kind: str) -> None:
    call, sentence = REFUSED[kind]
    guard = make_guard()
    with guard.name_rows(range(BATCH)), pytest.raises(LocalProtocolError, match=sentence):
        call(make_network(guard), torch.zeros(BATCH, 3))
    assert count_releases(guard) == 0


def test_a_release_is_not_computed_again_by_backward() -> None:
    guard = make_guard()
    with guard.name_rows(range(BATCH)), pytest.raises(LocalProtocolError, match="checkpointing"):
        recompute(make_network(guard), torch.zeros(BATCH, 3, requires_grad=True))
    assert count_releases(guard) == 1


def test_the_layer_leaves_the_global_generators_and_dtypes_alone() -> None:
    def list_state() -> list[object]:
        numpy_state: Any = np.random.get_state()  # noqa: NPY002
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            [part.tolist() if isinstance(part, np.ndarray) else part for part in numpy_state],
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        ]

    before = list_state()
    guard = make_guard()
    guard.check_encoder(nn.Identity(), torch.randn(4, 3, generator=torch.Generator()))
    release_batch(copy.deepcopy(guard))
    guard.load_state_dict(guard.state_dict())
    assert list_state() == before
