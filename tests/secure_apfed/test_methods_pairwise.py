"""Each passive helps on the people that it shares with the active, and gives zeros elsewhere."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from protocols.errors import RemoteProtocolError
from protocols.psi.interface import IntersectionTooSmallError
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Envelope, Kind, TensorSpec, pack, unpack
from secure_apfed.methods import Apfed, aligning, open_method
from secure_apfed.methods.aligning import place_rows
from secure_apfed.runs import run
from tests.secure_apfed.single_steps import random_data, step_config
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")

OVERLAPS = {"passive-1": range(20), "passive-2": range(12, 30)}


def vertical_data(overlaps: dict[str, range] | None = None) -> VerticalData:
    """Each passive knows its own range of the active's people."""
    return random_data(overlaps or OVERLAPS)


def config_of(mode: str = "pairwise", method: str = "apfed_c", **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "model": {
            "network": "mlp", "hidden": [6], "representation": 4, "projection": 4, "dropout": 0,
        },
        "passives": {"passive-1": {"weight": 2.0}, "default": {"weight": 0.3}},
        "alignment": {"mode": mode},
    }  # fmt: skip
    return step_config(method, **{**usual, **changes})


def opened(config: Config, data: VerticalData) -> Apfed:
    method = open_method(config, data)
    assert isinstance(method, Apfed)
    return method


@pytest.mark.parametrize("protocol", ["ecdh", "circuit"])
def test_positions_name_the_same_person_at_whoever_knows_them(protocol: str) -> None:
    data = vertical_data()
    config = config_of(alignment={"mode": "pairwise", "protocol": protocol})
    alignment = opened(config, data).alignment
    people = [data.active.ids[row] for row in alignment["active"].tolist()]
    assert sorted(people) == sorted(f"person {row}" for row in range(30))
    for table in data.passives:
        rows = alignment[table.name].tolist()
        found = [table.ids[row] if row >= 0 else None for row in rows]
        known = {f"person {row}" for row in OVERLAPS[table.name]}
        assert found == [person if person in known else None for person in people]


def test_a_passive_is_told_the_positions_of_its_own_people_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, Envelope] = {}

    def watched(envelope: Envelope, rows_P: Tensor, *, most: int) -> Tensor:
        told[envelope.receiver] = envelope
        return place_rows(envelope, rows_P, most=most)

    monkeypatch.setattr(aligning, "place_rows", watched)
    alignment = opened(config_of(), vertical_data()).alignment
    assert told.keys() == OVERLAPS.keys()
    for name, envelope in told.items():
        expected = {"positions": TensorSpec(torch.int64, (len(OVERLAPS[name]),))}
        tensors, meta = unpack(envelope.payload, expected, sender="active")
        known = (alignment[name] >= 0).nonzero().flatten()
        assert sorted(tensors["positions"].tolist()) == known.tolist()
        assert meta == {"total": 30}


class Monolith:
    """One graph without messages: L + sum over p of lambda_p n_p / B L_p(rows that p knows)."""

    def __init__(self, method: Apfed, data: VerticalData, config: Config) -> None:
        self.active = nn.ModuleDict(copy.deepcopy(method.active.networks.modules()))
        self.passives = [copy.deepcopy(party._modules["objective"]) for party in method.passives]
        self.weights = [party.terms.weight for party in method.passives]
        self.data = data
        self.optimisers = [
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
            for module in (self.active, *self.passives)
        ]

    def step(self, rows_B: Tensor) -> None:
        active, people = self.data.active, [self.data.active.ids[row] for row in rows_B.tolist()]
        assert active.labels is not None
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        h_BD = self.active["encoder"](active.features[rows_B].double())
        z_BD = self.active["projection"](h_BD)
        total = F.cross_entropy(self.active["head"](h_BD), active.labels[rows_B])
        tables = self.data.passives
        sent = [who for who in people if any(who in table.ids for table in tables)]
        for table, objective, weight in zip(tables, self.passives, self.weights, strict=True):
            known = [at for at, who in enumerate(people) if who in table.ids]
            if len(known) < 2:
                continue
            own = [table.ids.index(people[at]) for at in known]
            loss = objective(z_BD[known], table.features[own].double())
            self._descend_on_own(loss, objective)
            total = total + weight * len(known) / len(sent) * loss
        gradients = torch.autograd.grad(total, list(self.active.parameters()))
        for parameter, gradient in zip(self.active.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for optimiser in self.optimisers:
            optimiser.step()

    def _descend_on_own(self, loss: Tensor, objective: nn.Module) -> None:
        inputs = list(objective.parameters())
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True)
        for parameter, gradient in zip(inputs, gradients, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize("method_name", ["apfed_c", "apfed_r"])
def test_steps_equal_one_autograd_graph(method_name: str) -> None:
    config, data = config_of(method=method_name), vertical_data()
    method = opened(config, data)
    monolith = Monolith(method, data, config)
    for step, rows_B in enumerate([*data.train_rows.split(16)] * 3):
        method.step(step, rows_B)
        monolith.step(rows_B)
    theirs = [*monolith.active.values(), *monolith.passives]
    ours = [
        *method.active.networks.modules().values(),
        *(party._modules["objective"] for party in method.passives),
    ]
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-10)


def test_where_all_share_the_same_people_both_modes_are_equal() -> None:
    data = vertical_data({"passive-1": range(25), "passive-2": range(25)})
    losses = []
    for mode in ("all", "pairwise"):
        method = opened(config_of(mode), data)
        batches = [*data.train_rows.split(16)] * 3
        losses.append([method.step(step, rows_B) for step, rows_B in enumerate(batches)])
        assert len(method.alignment["active"]) == 25
    assert losses[0] == losses[1]


def test_a_passive_that_knows_one_person_of_a_batch_neither_learns_nor_helps() -> None:
    data = vertical_data({"passive-1": range(20), "passive-2": range(15, 22)})
    method = opened(config_of(), data)
    party = method.passives[1]
    before = copy.deepcopy(party._modules["objective"].state_dict())
    alone = opened(
        config_of(passives={"passive-1": {"weight": 2.0}, "default": {"weight": 0}}), data
    )
    rows_B = torch.arange(16)  # passive-2 knows person 15 only
    assert method.step(0, rows_B) == alone.step(0, rows_B)
    for key, value in party._modules["objective"].state_dict().items():
        assert torch.equal(value, before[key])
    for one, two in zip(
        method.active.networks.encoder.parameters(),
        alone.active.networks.encoder.parameters(),
        strict=True,
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("sum_protocol", ["plain + pairwise masks", "ckks"])
def test_a_whole_run_over_protected_links(sum_protocol: str) -> None:
    config = config_of(
        train={"epochs": 2, "batch_size": 16, "device": "cpu"},
        secure_sum={**pair_of(sum_protocol), "allow_single_passive": True},
        guard={"mechanism": "gaussian", "sigma": 2.0},
    )
    result = run(config, None, data=vertical_data())
    assert 0 <= result.accuracy["apfed_c"] <= 1
    assert result.recording.alignment["passive-2"].min() == -1


def test_a_pair_below_the_minimum_stops_the_run() -> None:
    data = vertical_data({"passive-1": range(20), "passive-2": range(3)})
    with pytest.raises(IntersectionTooSmallError, match="minimum of 5"):
        opened(config_of(alignment={"mode": "pairwise", "minimum_rows": 5}), data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "tvfl"}, "pairwise leaves rows that some passives do not know"),
        ({"secure_sum": {"scheme": "ckks"}}, "opens to the active the gradient of every row"),
        ({"alignment": {"mode": "some"}}, "'all' or 'pairwise'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(**changes)


def test_the_mode_is_in_the_contract() -> None:
    contract = opened(config_of(), vertical_data()).contract
    assert contract.alignment["mode"] == "pairwise"


def test_the_normalisation_of_ids_and_the_limits_are_in_the_contract() -> None:
    config = config_of(alignment={"normalisation": {"case_fold": True}, "maximum_ids": 99})
    alignment = opened(config, vertical_data()).contract.alignment
    rules = {"unicode_nfc": True, "case_fold": True, "strip": True}
    assert alignment["normalisation"] == rules
    assert (alignment["maximum_ids"], alignment["minimum_rows"]) == (99, 2)


@pytest.mark.parametrize(
    ("positions", "total", "message"),
    [
        ([0, 1], 3, "'positions' as torch.int64"),
        ([0, 1, 2], 2, "announces 2 positions for 3 common people"),
        ([0, 1, 2], 101, "announces 101 positions"),
        ([0, 1, 2], True, "announces True positions"),
        ([0, 1, 2], None, "announces None positions"),
        ([0, 1, 1], 9, "gave two people one position"),
        ([0, 1, 9], 9, "one outside 0 to 8"),
        ([0, 1, -1], 9, "one outside 0 to 8"),
    ],
)
def test_unfit_positions_are_refused(positions: list[int], total: object, message: str) -> None:
    payload = pack({"positions": torch.tensor(positions)}, {"total": total})
    envelope = Envelope(
        session="s", step=-1, kind=Kind.ALIGNMENT, sender="active", receiver="p", sequence=0,
        payload=payload,
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError, match=message):
        place_rows(envelope, torch.tensor([4, 5, 6]), most=100)


def test_positions_place_rows() -> None:
    payload = pack({"positions": torch.tensor([3, 0])}, {"total": 4})
    envelope = Envelope(
        session="s", step=-1, kind=Kind.ALIGNMENT, sender="active", receiver="p", sequence=0,
        payload=payload,
    )  # fmt: skip
    assert place_rows(envelope, torch.tensor([7, 5]), most=9).tolist() == [5, -1, -1, 7]
