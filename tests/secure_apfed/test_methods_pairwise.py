"""Each passive helps on the people that it shares with the active, and gives zeros elsewhere."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.interface import IntersectionTooSmallError
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Envelope, Kind, TensorSpec, pack, unpack
from secure_apfed.methods import alignment as aligned
from secure_apfed.methods import open_session
from secure_apfed.methods.alignment import place_rows
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import envelope as envelope_of
from tests.secure_apfed.single_steps import active_of, passives_of, random_data, step_config
from tests.secure_apfed.test_methods_apfed import Monolith, assert_equal
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

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


@pytest.mark.parametrize("protocol", ["ecdh", "circuit"])
def test_positions_name_the_same_person_at_whoever_knows_them(protocol: str) -> None:
    data = vertical_data()
    config = config_of(alignment={"mode": "pairwise", "protocol": protocol})
    alignment = open_session(config, data).alignment
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

    monkeypatch.setattr(aligned, "place_rows", watched)
    alignment = open_session(config_of(), vertical_data()).alignment
    assert told.keys() == OVERLAPS.keys()
    for name, envelope in told.items():
        expected = {"positions": TensorSpec(torch.int64, (len(OVERLAPS[name]),))}
        tensors, meta = unpack(envelope.payload, expected, sender="active")
        known = (alignment[name] >= 0).nonzero().flatten()
        assert sorted(tensors["positions"].tolist()) == known.tolist()
        assert meta == {"total": 30}


@pytest.mark.parametrize("method_name", ["apfed_c", "apfed_r"])
def test_steps_equal_one_autograd_graph(method_name: str) -> None:
    config, data = config_of(method=method_name), vertical_data()
    session = open_session(config, data)
    monolith = Monolith(session, data, config)
    for step, rows_B in enumerate([*data.train_rows.split(16)] * 3):
        session.step(step, rows_B)
        monolith.step(rows_B)
    for name, module in active_of(session).trainer.networks.named_children():
        assert_equal(module, monolith.active[name])
    for party, objective in zip(passives_of(session), monolith.passives, strict=True):
        assert_equal(party.trainer.objective, objective)


def test_where_all_share_the_same_people_both_modes_are_equal() -> None:
    data = vertical_data({"passive-1": range(25), "passive-2": range(25)})
    losses = []
    for mode in ("all", "pairwise"):
        session = open_session(config_of(mode), data)
        batches = [*data.train_rows.split(16)] * 3
        losses.append([session.step(step, rows_B) for step, rows_B in enumerate(batches)])
        assert len(session.alignment["active"]) == 25
    assert losses[0] == losses[1]


def test_a_passive_that_knows_one_person_of_a_batch_neither_learns_nor_helps() -> None:
    data = vertical_data({"passive-1": range(20), "passive-2": range(15, 22)})
    session = open_session(config_of(), data)
    party = passives_of(session)[1]
    before = copy.deepcopy(party.trainer.objective.state_dict())
    alone = open_session(
        config_of(passives={"passive-1": {"weight": 2.0}, "default": {"weight": 0}}), data
    )
    rows_B = torch.arange(16)  # passive-2 knows person 15 only
    assert session.step(0, rows_B) == alone.step(0, rows_B)
    for key, value in party.trainer.objective.state_dict().items():
        assert torch.equal(value, before[key])
    for one, two in zip(
        active_of(session).trainer.networks.encoder.parameters(),
        active_of(alone).trainer.networks.encoder.parameters(),
        strict=True,
    ):
        assert torch.equal(one, two)


def test_a_whole_run_over_protected_links() -> None:
    config = config_of(
        train={"epochs": 2, "batch_size": 16, "device": "cpu"},
        secure_sum={**pair_of("ckks"), "allow_single_passive": True},
        guard={"mechanism": "gaussian", "sigma": 2.0},
    )
    result = run(config, None, data=vertical_data())
    assert 0 <= result.accuracy["apfed_c"] <= 1
    assert result.recording.alignment["passive-2"].min() == -1


def test_a_pair_below_the_minimum_stops_the_run() -> None:
    data = vertical_data({"passive-1": range(20), "passive-2": range(3)})
    with pytest.raises(IntersectionTooSmallError, match="minimum of 5"):
        open_session(config_of(alignment={"mode": "pairwise", "minimum_rows": 5}), data)


def test_the_normalisation_of_ids_and_the_limits_are_in_the_contract() -> None:
    rules = {"normalisation": ["case_fold", "strip"], "maximum_ids": 99}
    config = config_of(alignment={"mode": "pairwise", **rules})
    alignment = open_session(config, vertical_data()).contract.settings["alignment"]
    assert (alignment["mode"], alignment["normalisation"]) == ("pairwise", ["strip", "case_fold"])
    assert alignment["date_formats"] == []
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
    envelope = envelope_of(payload, kind=Kind.ALIGNMENT, step=-1)
    with pytest.raises(RemoteProtocolError, match=message):
        place_rows(envelope, torch.tensor([4, 5, 6]), most=100)


def test_positions_place_rows() -> None:
    payload = pack({"positions": torch.tensor([3, 0])}, {"total": 4})
    envelope = envelope_of(payload, kind=Kind.ALIGNMENT, step=-1)
    assert place_rows(envelope, torch.tensor([7, 5]), most=9).tolist() == [5, -1, -1, 7]
