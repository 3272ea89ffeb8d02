"""`SummedLinear`: loops that merge by torch.cat reach the same parameters under a secure sum."""

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import apfed_protocols as ap
from apfed_protocols import LocalProtocolError, SumSession, secure_sum
from secure_apfed import SummedLinear

ROWS = 12
OUTPUTS = 3
SIZES = {"clinic": 2, "lab": 4, "shop": 1}
PASSIVES = ("lab", "shop")
WIDTHS = {"clinic": 3, "lab": 5, "shop": 2}


def make_sum(contributors: Iterable[str] = PASSIVES, **settings: Any) -> SumSession:
    return secure_sum("masked", contributors, to="clinic", clip=64, bits=24, **settings)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_parties(names: Iterable[str]) -> tuple[nn.ModuleDict, nn.Sequential]:
    """Return encoders and a head, with drawn weights."""
    encoders = nn.ModuleDict(
        {name: nn.Sequential(nn.Linear(WIDTHS[name], SIZES[name]), nn.Tanh()) for name in names}
    )
    inputs = sum(SIZES[name] for name in names)
    head = nn.Sequential(nn.Linear(inputs, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, 2))
    with torch.no_grad():
        for place, parameter in enumerate([*encoders.parameters(), *head.parameters()]):
            parameter.copy_(draw(*parameter.shape, seed=place))
    return encoders, head


def encode(encoders: nn.ModuleDict, step: int) -> dict[str, Tensor]:
    return {
        name: encoder(draw(ROWS, WIDTHS[name], seed=step)) for name, encoder in encoders.items()
    }


def descend(
    encoders: nn.ModuleDict,
    head: nn.Module,
    merge: Callable[[dict[str, Tensor]], Any],
    make_optimiser: Callable[[Any], torch.optim.Optimizer],
) -> None:
    optimiser = make_optimiser([*encoders.parameters(), *head.parameters()])
    for step in range(6):
        scores = head(merge(encode(encoders, step)))
        optimiser.zero_grad()
        F.cross_entropy(scores, torch.arange(ROWS) % 2).backward()
        optimiser.step()


def concatenate(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([*parts.values()], dim=1)


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.2, momentum=0.9, weight_decay=0.01),
    "Adam": lambda given: torch.optim.Adam(given, lr=0.02),
}


@pytest.mark.parametrize("names", [("clinic", *PASSIVES), PASSIVES], ids=["own part", "no own"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_loop_reaches_the_parameters_of_torch_cat(optimiser: str, names: tuple[str, ...]) -> None:
    encoders, head = make_parties(names)
    descend(encoders, head, concatenate, OPTIMISERS[optimiser])
    others, summed = make_parties(names)
    first = SummedLinear(
        cast(nn.Linear, summed[0]), {name: SIZES[name] for name in names}, make_sum()
    )
    summed[0] = first
    descend(others, summed, lambda parts: parts, OPTIMISERS[optimiser])
    summed[0] = first.to_linear()
    for one, other in ((encoders, others), (head, summed)):
        torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=1e-4, atol=1e-4)


def test_parties_of_their_own_reach_the_parameters_of_torch_cat() -> None:
    """Blocks at the parties, detached contributions out, the gradient on the sum back."""
    encoders, head = make_parties(PASSIVES)
    descend(encoders, head, concatenate, OPTIMISERS["SGD"])
    others, summed = make_parties(PASSIVES)
    session = make_sum(session="s")
    sizes = {name: SIZES[name] for name in PASSIVES}
    first = SummedLinear(cast(nn.Linear, summed[0]), sizes, session)
    roles: dict[str, Any] = {name: session.make_contributor(name) for name in PASSIVES}
    receiver: Any = session.make_receiver()
    ap.converse({**roles, "clinic": receiver})
    own = {name: nn.Sequential(others[name], first.parts[name]) for name in PASSIVES}
    bias = cast(nn.Parameter, first.bias)
    top = summed[1:]
    held = [[bias, *top.parameters()], *([*network.parameters()] for network in own.values())]
    optimisers = [OPTIMISERS["SGD"](parameters) for parameters in held]
    for step in range(6):
        terms = {name: own[name](draw(ROWS, WIDTHS[name], seed=step)) for name in PASSIVES}
        sent = {name: roles[name].contribute(term.detach()) for name, term in terms.items()}
        total = receiver.decode(receiver.combine(sent), torch.empty(ROWS, OUTPUTS)).requires_grad_()
        for optimiser in optimisers:
            optimiser.zero_grad()
        F.cross_entropy(top(total + bias), torch.arange(ROWS) % 2).backward()
        for term in terms.values():
            term.backward(total.grad)
        for optimiser in optimisers:
            optimiser.step()
    summed[0] = first.to_linear()
    for one, other in ((encoders, others), (head, summed)):
        torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=1e-4, atol=1e-4)


def make_layer(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(sum(SIZES.values()), OUTPUTS, bias=bias, dtype=dtype)


def make_parts(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: draw(ROWS, size, seed=size).to(dtype) for name, size in SIZES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_plain_one_there_and_back(bias: bool, dtype: torch.dtype) -> None:
    plain = make_layer(bias=bias, dtype=dtype)
    summed = SummedLinear(plain, SIZES, make_sum())
    out = summed(make_parts(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out, plain(concatenate(make_parts(dtype))), rtol=1e-4, atol=1e-4)
    back = summed.to_linear()
    assert {name: value.tolist() for name, value in back.state_dict().items()} == {
        name: value.tolist() for name, value in plain.state_dict().items()
    }
    pairs = zip(back.parameters(), summed.parameters(), strict=False)
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairs)


def test_only_the_passives_are_in_the_sum_and_each_is_in_it_once() -> None:
    session = make_sum()
    asked = list[dict[str, Tensor]]()
    summed = SummedLinear(make_layer(), SIZES, session)

    def add(terms: dict[str, Tensor]) -> Tensor:
        asked.append(terms)
        return sum(terms.values(), torch.zeros(ROWS, OUTPUTS))

    summed.add = cast(SumSession, add)
    parts = make_parts()
    summed(parts)
    assert [*asked[0]] == [*PASSIVES]
    for name, term in asked[0].items():
        torch.testing.assert_close(term, summed.parts[name](parts[name]))


COPIES: dict[str, Callable[[nn.Sequential], Any]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda network: AveragedModel(network).module,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_has_weights_of_its_own_and_the_same_sum(kind: str) -> None:
    network = nn.Sequential(SummedLinear(make_layer(), SIZES, make_sum()))
    other = COPIES[kind](network)
    assert other[0].add is cast(SummedLinear, network[0]).add
    torch.testing.assert_close(other(make_parts()), network(make_parts()))
    with torch.no_grad():
        other[0].parts["lab"].weight.zero_()
    assert not torch.equal(other(make_parts()), network(make_parts()))


def test_a_state_is_of_weights_alone_and_is_loaded_elsewhere() -> None:
    summed = SummedLinear(make_layer(), SIZES, make_sum())
    other = SummedLinear(make_layer(), SIZES, make_sum())
    stored = io.BytesIO()
    torch.save(summed.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert {*summed.state_dict()} == {*(f"parts.{name}.weight" for name in SIZES), "bias"}
    torch.testing.assert_close(other(make_parts()), summed(make_parts()))


def test_no_global_generator_moves() -> None:
    plain = make_layer()
    before = torch.get_rng_state().tolist()
    summed = SummedLinear(plain, SIZES, make_sum())
    summed(make_parts())
    summed.to_linear()
    assert torch.get_rng_state().tolist() == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.slow  # loads torch's compiler
def test_a_compiled_network_adds_anew_at_each_call() -> None:
    torch._dynamo.reset()
    summed = SummedLinear(make_layer(), SIZES, make_sum())
    network = torch.compile(nn.Sequential(summed, nn.Tanh()), backend="eager")
    for value in (0.0, 1.0):
        parts = {name: torch.full((ROWS, size), value) for name, size in SIZES.items()}
        torch.testing.assert_close(network(parts), summed(parts).tanh())


REFUSED_LAYERS: dict[str, tuple[Callable[[], object], str]] = {
    "no linear layer": (lambda: SummedLinear(cast(Any, nn.Tanh()), SIZES, make_sum()), "got Tanh"),
    "no sum": (lambda: SummedLinear(make_layer(), SIZES, cast(Any, sum)), "secure_sum"),
    "too few numbers": (
        lambda: SummedLinear(make_layer(), {**SIZES, "lab": 3}, make_sum()),
        "reads 7 numbers, and sizes add up to 6",
    ),
    "none of a party": (
        lambda: SummedLinear(make_layer(), {"clinic": 3, "lab": 4, "shop": 0}, make_sum()),
        "from 1 on",
    ),
    "a contributor is missing": (
        lambda: SummedLinear(make_layer(), {"clinic": 3, "lab": 4}, make_sum()),
        "the sum adds lab, shop for clinic",
    ),
    "a stranger": (
        lambda: SummedLinear(make_layer(), {**SIZES, "bank": 1}, make_sum()),
        "sizes names clinic, lab, shop, bank",
    ),
    "a dotted name": (
        lambda: SummedLinear(make_layer(), {"a.b": 3, "c": 4}, make_sum(("a.b", "c"))),
        "takes no name with a dot",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_LAYERS)
def test_a_layer_that_is_not_the_sums_is_refused(kind: str) -> None:
    call, sentence = REFUSED_LAYERS[kind]
    with pytest.raises(LocalProtocolError, match=sentence):
        call()


REFUSED_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "the concatenation": (lambda: concatenate(make_parts()), "in place of torch.cat; got a Tensor"),
    "a party is missing": (
        lambda: {name: part for name, part in make_parts().items() if name != "lab"},
        "got those of clinic, shop",
    ),
    "another width": (lambda: {**make_parts(), "lab": draw(ROWS, 3)}, r"shape \(12, 4\) of lab"),
    "another number of rows": (
        lambda: {**make_parts(), "shop": draw(1, 1)},
        r"shape \(12, 1\) of shop",
    ),
    "images": (lambda: {**make_parts(), "lab": draw(ROWS, 2, 2)}, "flatten it before"),
    "no tensor": (lambda: {**make_parts(), "lab": [1.0] * ROWS}, "got list of shape"),
}


@pytest.mark.parametrize("kind", REFUSED_VALUES)
def test_representations_that_do_not_fit_are_refused(kind: str) -> None:
    values, sentence = REFUSED_VALUES[kind]
    with warnings.catch_warnings(), pytest.raises(LocalProtocolError, match=sentence):
        SummedLinear(make_layer(), SIZES, make_sum())(cast(Any, values()))
