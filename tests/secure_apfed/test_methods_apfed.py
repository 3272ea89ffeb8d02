"""One step through parties, links and a sum equals one step of a single autograd graph."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocols.errors import UnsafeChoiceWarning
from protocols.sums import SumReceiver
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.methods import Apfed, open_method
from tests.secure_apfed.single_steps import ROWS, random_data, step_config
from tests.with_crypten import pair_of, usable

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")

RECONSTRUCTION = {"name": "reconstruction"}
CONTRASTIVE = {"name": "contrastive", "temperature": 0.5}
ONE_SIDED = {"name": "contrastive", "anchors": "active"}
OBJECTIVES: Mapping[str, list[dict[str, Any]]] = {
    "R": [RECONSTRUCTION],
    "C": [CONTRASTIVE],
    "C one-sided": [ONE_SIDED],
    "mixed": [RECONSTRUCTION, CONTRASTIVE, ONE_SIDED],
}


def vertical_data(passives: int, *, aligned: int = ROWS) -> VerticalData:
    """The first `aligned` people of the active are known to all."""
    return random_data({f"passive-{index + 1}": range(aligned) for index in range(passives)})


def config_of(method: str = "apfed", **changes: Any) -> Config:
    return step_config(method, **changes)


def opened(config: Config, data: VerticalData) -> Apfed:
    method = open_method(config, data)
    assert isinstance(method, Apfed)
    return method


def passive_settings(objectives: list[dict[str, Any]], passives: int) -> dict[str, Any]:
    return {
        f"passive-{index + 1}": {
            "objective": objectives[index % len(objectives)],
            "weight": (1.0, 0.3, 10.0, 2.5)[index],
        }
        for index in range(passives)
    }


def sgd(module: nn.Module, config: Config) -> torch.optim.SGD:
    train = config.train
    return torch.optim.SGD(
        module.parameters(),
        lr=train.learning_rate,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
    )


class Monolith:
    """Eq. (8) as one graph: the parties' modules, copied, and no messages.

    Eq. (10) lets each passive descend on its own loss, so its step uses the gradient of L_p
    and not of lambda_p L_p.
    """

    def __init__(self, method: Apfed, data: VerticalData, config: Config) -> None:
        networks = method.active.networks
        self.active = nn.ModuleDict(copy.deepcopy(networks.modules()))
        self.passives = [copy.deepcopy(party._modules["objective"]) for party in method.passives]
        self.optimisers = [sgd(module, config) for module in (self.active, *self.passives)]
        self.weights = [party.terms.weight for party in method.passives]
        self.data = data

    def step(self, rows_B: Tensor) -> None:
        active = self.data.active
        assert active.labels is not None
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        h_BD = self.active["encoder"](active.features[rows_B].double())
        total = F.cross_entropy(self.active["head"](h_BD), active.labels[rows_B])
        aligned = [row for row in rows_B.tolist() if active.ids[row] in self.data.passives[0].ids]
        at = [rows_B.tolist().index(row) for row in aligned]
        z_BD = self.active["projection"](h_BD)[at]
        losses = []
        for table, objective in zip(self.data.passives, self.passives, strict=True):
            own = [table.ids.index(active.ids[row]) for row in aligned]
            losses.append(objective(z_BD, table.features[own].double()))
        for loss, weight in zip(losses, self.weights, strict=True):
            total = total + weight * loss
        for loss, objective in zip(losses, self.passives, strict=True):
            gradients = torch.autograd.grad(loss, list(objective.parameters()), retain_graph=True)
            for parameter, gradient in zip(objective.parameters(), gradients, strict=True):
                parameter.grad = gradient
        inputs = list(self.active.parameters())
        for parameter, gradient in zip(inputs, torch.autograd.grad(total, inputs), strict=True):
            parameter.grad = gradient
        for optimiser in self.optimisers:
            optimiser.step()


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("passives", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_steps_equal_one_autograd_graph(kind: str, passives: int) -> None:
    config = config_of(
        passives=passive_settings(OBJECTIVES[kind], passives),
        model={"network": "mlp", "hidden": [6], "representation": 4, "projection": 4, "dropout": 0},
    )
    data = vertical_data(passives, aligned=30)
    method = opened(config, data)
    monolith = Monolith(method, data, config)
    for step, rows_B in enumerate(data.train_rows.split(16)):
        method.step(step, rows_B)
        monolith.step(rows_B)
        for name, module in method.active.networks.modules().items():
            assert_equal(module, monolith.active[name])
        for party, objective in zip(method.passives, monolith.passives, strict=True):
            assert_equal(party._modules["objective"], objective)


@pytest.mark.parametrize("protocol", ["plain", "ckks"])
@pytest.mark.parametrize("guard", [{"mechanism": "none"}, {"mechanism": "gaussian", "sigma": 2.0}])
def test_without_weight_it_is_single_view_learning_bit_for_bit(
    protocol: str, guard: dict[str, Any]
) -> None:
    passives = {"default": {"objective": CONTRASTIVE, "weight": 0.0}}
    config = config_of(passives=passives, guard=guard, secure_sum=pair_of(protocol))
    data = vertical_data(2, aligned=30)
    apfed, single = opened(config, data), opened(config_of("single_view"), data)
    for step, rows_B in enumerate([*data.train_rows.split(16)] * 2):
        assert apfed.step(step, rows_B) == single.step(step, rows_B)
    assert torch.equal(apfed.training_rows, single.training_rows)
    for mine, other in zip(
        (*apfed.active.networks.encoder.parameters(), *apfed.active.networks.head.parameters()),
        (*single.active.networks.encoder.parameters(), *single.active.networks.head.parameters()),
        strict=True,
    ):
        assert torch.equal(mine, other)


class Spy:
    """A receiver that remembers what it decoded."""

    def __init__(self, inner: SumReceiver) -> None:
        self._inner = inner
        self.decoded: list[Any] = []

    def decode(self, combined: bytes, shape: tuple[int, int], binding: Any) -> Any:
        self.decoded.append(self._inner.decode(combined, shape, binding))
        return self.decoded[-1]


@pytest.mark.parametrize(
    "protocol", usable(["ckks", "bfv + pairwise masks", "plain + pairwise masks", "crypten"])
)
def test_a_protected_sum_is_the_plain_one_within_its_rounding(protocol: str) -> None:
    decoded = {}
    rounding = 0.0
    for name in ("plain", protocol):
        passives = passive_settings([RECONSTRUCTION, CONTRASTIVE], 3)
        sums = {**pair_of(name), "clip": 0.5}
        method = opened(config_of(passives=passives, secure_sum=sums), vertical_data(3))
        assert method.active.receiver is not None
        method.active.receiver = spy = Spy(method.active.receiver)  # type: ignore[assignment]  # decodes only
        method.step(0, torch.arange(16))
        decoded[name] = torch.as_tensor(spy.decoded[0])
        rounding = max(rounding, float(str(method.secure_sum["rounding"])))
    assert 0 < rounding < 1e-3
    worst = (decoded["plain"] - decoded[protocol]).abs().max()
    assert 0 < worst <= rounding + 1e-12


def test_rows_outside_the_intersection_train_the_active_only_if_asked() -> None:
    data = vertical_data(2, aligned=20)
    passives = {"default": {"objective": RECONSTRUCTION}}
    with_them = opened(config_of(passives=passives), data)
    assert len(with_them.training_rows) == 32
    train = {"precision": "float64", "use_unaligned": False, "device": "cpu"}
    without = opened(config_of(passives=passives, train=train), data)
    assert sorted(without.training_rows.tolist()) == list(range(20))


def test_a_batch_with_too_few_aligned_rows_is_not_sent() -> None:
    data = vertical_data(2, aligned=20)
    method = opened(config_of(passives={"default": {"objective": RECONSTRUCTION}}), data)
    before = method.transcript.wire_bytes
    method.step(0, torch.arange(19, 32))  # one aligned row; the contract says two
    assert method.transcript.wire_bytes == before
    assert method.ledgers["active"].spent().releases == 0


def test_five_envelopes_with_two_passives() -> None:
    method = opened(
        config_of(passives={"default": {"objective": RECONSTRUCTION}}), vertical_data(2)
    )
    before = sum(flow.messages for flow in method.transcript.flows)
    method.step(0, torch.arange(16))
    assert sum(flow.messages for flow in method.transcript.flows) - before == 2 * 2 + 1


def test_one_passive_is_refused_unless_the_contract_allows_it() -> None:
    config = config_of(
        passives={"default": {"objective": RECONSTRUCTION}}, secure_sum={"scheme": "ckks"}
    )
    with pytest.raises(ConfigError, match=r"secure_sum\.allow_single_passive: .*hides nothing"):
        opened(config, vertical_data(1))


def test_apfed_wants_an_objective_and_apfed_r_only_its_own() -> None:
    with pytest.raises(ConfigError, match=r"passives\.passive-1\.objective.*got none"):
        opened(config_of(), vertical_data(2))
    wrong = config_of("apfed_r", passives={"passive-2": {"objective": CONTRASTIVE}})
    with pytest.raises(ConfigError, match=r"passives\.passive-2\.objective.*got contrastive"):
        opened(wrong, vertical_data(2))


def test_fixed_point_needs_a_bound() -> None:
    config = config_of("apfed_c", secure_sum={"scheme": "ckks", "clip": None})
    with pytest.raises(ConfigError, match=r"secure_sum\.clip: ckks needs a bound"):
        opened(config, vertical_data(2))


def test_unfit_networks_are_named_before_anything_is_sent() -> None:
    with pytest.raises(ModelError, match="images of 1 channel"):
        opened(config_of("apfed_c", model={"network": "conv_mnist"}), vertical_data(2))


def test_the_plain_sum_warns() -> None:
    with pytest.warns(UnsafeChoiceWarning, match="hides nothing"):
        opened(config_of("apfed_c"), vertical_data(2))
