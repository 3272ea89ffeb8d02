"""A step through parties, links and any sum equals one step of a single autograd graph."""

import copy
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.interface import IntersectionTooSmallError
from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import Kind, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.learning.trainers import PassiveTrainer
from secure_apfed.methods import Session, open_session
from secure_apfed.methods import alignment as aligned
from secure_apfed.methods.alignment import place_rows
from secure_apfed.methods.apfed import ApfedPassive
from secure_apfed.settings import SumSettings
from tests.memory import trace_memory
from tests.secure_apfed.seats import ROWS, active_of, passives_of, random_data, step_config
from tests.secure_apfed.seats import envelope as envelope_of
from tests.with_crypten import pair_of, usable_secure_sums

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
RECONSTRUCTION = {"name": "reconstruction"}
CONTRASTIVE = {"name": "contrastive", "temperature": 0.5}
ONE_SIDED = {"name": "contrastive", "anchors": "active"}
CLUSTERING = {"name": "clustering", "clusters": 3}
OBJECTIVES: Mapping[str, list[dict[str, Any]]] = {
    "R": [RECONSTRUCTION],
    "C": [CONTRASTIVE],
    "C one-sided": [ONE_SIDED],
    "clusters": [CLUSTERING],
    "mixed": [RECONSTRUCTION, CONTRASTIVE, ONE_SIDED, CLUSTERING],
}
# Of the first batch of 16 the second passive knows one person: it neither learns nor helps.
OVERLAPS = {"passive-1": range(20), "passive-2": range(15, 30)}


def vertical_data(passives: int, *, aligned: int = ROWS) -> VerticalData:
    """The first `aligned` people of the active are known to all."""
    return random_data({f"passive-{index + 1}": range(aligned) for index in range(passives)})


def passive_settings(objectives: list[dict[str, Any]], passives: int) -> dict[str, Any]:
    return {
        f"passive-{index + 1}": {
            "objective": objectives[index % len(objectives)],
            "weight": (1.0, 0.3, 10.0, 2.5)[index],
        }
        for index in range(passives)
    }


def objective_of(party: ApfedPassive) -> nn.Module:
    assert isinstance(party.trainer, PassiveTrainer)
    return party.trainer.objective


class Monolith:
    """Eq. (8) as one graph: the parties' modules, copied, and no messages.

    L + sum over p of lambda_p n_p / n L_p, where p knows n_p of the n people that are sent: all of
    them, unless parties are aligned pair by pair. Eq. (10) lets each passive descend on its own
    loss, so its step uses the gradient of L_p and not of lambda_p L_p.
    """

    def __init__(self, session: Session, data: VerticalData, config: Config) -> None:
        parties = passives_of(session)
        networks = active_of(session).trainer.networks
        self.active = nn.ModuleDict(copy.deepcopy(dict(networks.named_children())))
        self.passives = [copy.deepcopy(objective_of(party)) for party in parties]
        settings: dict[str, Any] = config.train.model_dump(include={"momentum", "weight_decay"})
        self.optimisers = [
            torch.optim.SGD(module.parameters(), lr=config.train.learning_rate, **settings)
            for module in (self.active, *self.passives)
        ]
        self.weights = [party.weight for party in parties]
        self.data = data

    def step(self, rows_B: Tensor) -> None:
        active = self.data.active
        tables = self.data.passives
        assert active.labels is not None
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        people = [active.ids[row] for row in rows_B.tolist()]
        sent = [who for who in people if any(who in table.ids for table in tables)]
        h_BD = self.active["encoder"](active.features[rows_B].double())
        total = F.cross_entropy(self.active["head"](h_BD), active.labels[rows_B])
        z_BD = self.active["projection"](h_BD)
        for table, objective, weight in zip(tables, self.passives, self.weights, strict=True):
            known = [at for at, who in enumerate(people) if who in table.ids]
            if len(known) < 2:
                continue
            own = [table.ids.index(people[at]) for at in known]
            loss = objective(z_BD[known], table.features[own].double())
            take_gradient(objective, loss)
            total = total + weight * len(known) / len(sent) * loss
        take_gradient(self.active, total)
        for optimiser in self.optimisers:
            optimiser.step()

    def equals(self, session: Session) -> None:
        for name, module in active_of(session).trainer.networks.named_children():
            assert_equal(module, self.active[name])
        for party, objective in zip(passives_of(session), self.passives, strict=True):
            assert_equal(objective_of(party), objective)


def take_gradient(module: nn.Module, loss: Tensor) -> None:
    inputs = list(module.parameters())
    gradients = torch.autograd.grad(loss, inputs, retain_graph=True)
    for parameter, gradient in zip(inputs, gradients, strict=True):
        parameter.grad = gradient


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("passives", [1, 3])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_steps_equal_one_autograd_graph(kind: str, passives: int) -> None:
    config = step_config(
        "apfed",
        passives=passive_settings(OBJECTIVES[kind], passives),
        model={"network": "mlp", "hidden": [6], "representation": 4, "projection": 4, "dropout": 0},
    )
    data = vertical_data(passives, aligned=30)
    session = open_session(config, data)
    monolith = Monolith(session, data, config)
    for step, rows_B in enumerate(data.train_rows.split(16)):
        session.train_step(step, rows_B)
        monolith.step(rows_B)
        monolith.equals(session)


@pytest.mark.parametrize("protocol", ["plain", "ckks"])
@pytest.mark.parametrize("guard", [{"mechanism": "none"}, {"mechanism": "gaussian", "sigma": 2.0}])
def test_without_weight_it_is_single_view_bit_for_bit(protocol: str, guard: dict[str, Any]) -> None:
    passives = {"default": {"objective": CONTRASTIVE, "weight": 0.0}}
    config = step_config("apfed", passives=passives, guard=guard, secure_sum=pair_of(protocol))
    data = vertical_data(2, aligned=30)
    apfed = open_session(config, data)
    single = open_session(step_config("single_view"), data)
    for step, rows_B in enumerate([*data.train_rows.split(16)] * 2):
        assert apfed.train_step(step, rows_B) == single.train_step(step, rows_B)
    assert torch.equal(apfed.active_role.training_rows, single.active_role.training_rows)
    ours = active_of(apfed).trainer.networks
    theirs = active_of(single).trainer.networks
    mine, other = ([*one.encoder.parameters(), *one.head.parameters()] for one in (ours, theirs))
    assert all(torch.equal(here, there) for here, there in zip(mine, other, strict=True))


def test_more_clusters_than_people_are_refused() -> None:
    passives = {"default": {"objective": {**CLUSTERING, "clusters": 21}}}
    with pytest.raises(ModelError, match=r"21 clusters need .*, got 20; lower objective.clusters"):
        open_session(step_config("apfed", passives=passives), vertical_data(2, aligned=20))


def test_rows_outside_the_intersection_train_the_active_only_if_asked() -> None:
    data = vertical_data(2, aligned=20)
    passives = {"default": {"objective": RECONSTRUCTION}}
    with_them = open_session(step_config("apfed", passives=passives), data)
    assert len(with_them.active_role.training_rows) == 32
    train = {"precision": "float64", "use_unaligned": False, "device": "cpu"}
    without = open_session(step_config("apfed", passives=passives, train=train), data)
    assert sorted(without.active_role.training_rows.tolist()) == list(range(20))


_ALL = {"default": {"objective": RECONSTRUCTION}}


@pytest.mark.parametrize(
    ("method", "passives", "changes", "error", "said"),
    [
        (
            "apfed",
            1,
            {"passives": _ALL, "secure_sum": {"scheme": "ckks"}},
            ConfigError,
            r"secure_sum\.allow_single_passive: .*hides nothing",
        ),
        ("apfed", 2, {}, ConfigError, r"passives\.passive-1\.objective.*got none"),
        (
            "apfed_r",
            2,
            {"passives": {"passive-2": {"objective": CONTRASTIVE}}},
            ConfigError,
            r"passives\.passive-2\.objective.*got contrastive",
        ),
        (
            "apfed_c",
            2,
            {"secure_sum": {"scheme": "ckks", "clip": None}},
            ConfigError,
            r"secure_sum\.clip: ckks needs a bound",
        ),
        ("apfed_c", 2, {"model": {"network": "conv_mnist"}}, ModelError, "images of 1 channel"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_sent(
    method: str, passives: int, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_session(step_config(method, **changes), vertical_data(passives))


OTHERS = [name for name in usable_secure_sums() if name != "plain + pairwise masks"]
STEPS = 3


def train_steps(passives: int, **secure_sum: Any) -> tuple[Session, list[Tensor]]:
    session = open_session(
        step_config(
            "apfed",
            passives=passive_settings([RECONSTRUCTION, CONTRASTIVE], passives),
            secure_sum={
                "clip": 0.5,
                "bits": 16,
                "allow_single_passive": passives == 1,
                **secure_sum,
            },
        ),
        vertical_data(passives),
    )
    sums = []
    for step in range(STEPS):
        session.train_step(step, torch.arange(16))
        assert session.active_role.last_sum is not None
        sums.append(session.active_role.last_sum.clone())
    return session, sums


def encoder_of(session: Session) -> list[Tensor]:
    return list(active_of(session).trainer.networks.encoder.parameters())


@pytest.mark.parametrize("passives", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_every_secure_sum_trains_the_same_model(name: str, passives: int) -> None:
    usual, expected = train_steps(passives, scheme="plain", masks="pairwise")
    session, sums = train_steps(passives, **pair_of(name))
    assert all(map(torch.equal, sums, expected))
    pairs = zip(encoder_of(session), encoder_of(usual), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize("passives", [1, 2])
def test_and_one_close_to_that_of_the_plain_sum(passives: int) -> None:
    _, expected = train_steps(passives, scheme="plain")
    session, sums = train_steps(passives, scheme="plain", masks="pairwise")
    rounding = float(str(session.secure_sum["rounding"]))
    assert 0 < rounding < 1e-3
    assert 0 < (sums[0] - expected[0]).abs().max() <= rounding + 1e-12
    torch.testing.assert_close(sums[-1], expected[-1], rtol=0, atol=50 * rounding)


@pytest.mark.parametrize("name", ["plain", "bfv"])
def test_a_passive_adds_the_noise_that_is_agreed(name: str) -> None:
    _, quiet = train_steps(1, scheme="plain", masks="pairwise")
    _, sums = train_steps(1, **pair_of(name), noise={"sigma": 0.01})
    noise = sums[0] - quiet[0]
    assert 0.005 < noise.std() < 0.015  # of 64 values: more than five deviations either way


def test_two_rounds_train_like_one_with_4m_plus_1_envelopes_a_step() -> None:
    data = vertical_data(3)
    clip = 10.0
    passives = {"default": {"objective": CONTRASTIVE}}
    one, two = (
        open_session(
            step_config("apfed", passives=passives, secure_sum={**pair_of(name), "clip": clip}),
            data,
        )
        for name in ("plain + pairwise masks", "plain + recoverable masks")
    )
    for step, rows_B in enumerate(data.train_rows.split(16)):
        assert one.train_step(step, rows_B) == pytest.approx(
            two.train_step(step, rows_B), abs=1e-12
        )
    for mine, other in zip(encoder_of(one), encoder_of(two), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    once = {Kind.REPRESENTATIONS: 6, Kind.CONTRIBUTION: 6, Kind.SUM: 2}
    asked = {Kind.SUM_REQUEST: 6, Kind.SUM_ANSWER: 6}
    sent = [Counter[Kind](), Counter[Kind]()]
    for counts, session in zip(sent, (one, two), strict=True):
        for flow in session.transcript.flows:
            if flow.first_step >= 0:
                counts[flow.kind] += flow.messages
    assert sent == [once, once | asked]


@pytest.mark.parametrize("pair", [{"masks": "pairwise"}, {"scheme": "bvf", "masks": "pairwise"}])
def test_a_pair_that_there_is_not_is_refused_with_those_that_are(pair: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no sum with scheme .* did you mean") as caught:
        find_sum_class(SumSettings(**pair))
    kinds = {f"{{scheme: {one.scheme}, masks: {one.masks}}}": one for one in SECURE_SUMS.values()}
    assert not [pair for pair in kinds if pair not in str(caught.value)]
    named = [SumSettings(scheme=one.scheme, masks=one.masks) for one in kinds.values()]
    assert [find_sum_class(settings) for settings in named] == [*kinds.values()]


def overlapping(overlaps: dict[str, range] | None = None) -> VerticalData:
    return random_data(overlaps or OVERLAPS)


pairs = partial(
    step_config,
    method="apfed_c",
    alignment={"mode": "pairwise"},
    model={"network": "mlp", "hidden": [6], "representation": 4, "projection": 4, "dropout": 0},
    passives={"passive-1": {"weight": 2.0}, "default": {"weight": 0.3}},
)


@pytest.mark.parametrize("protocol", ["ecdh", "circuit"])
def test_positions_name_the_same_person_at_whoever_knows_them(protocol: str) -> None:
    data = overlapping()
    config = pairs(alignment={"mode": "pairwise", "protocol": protocol})
    alignment = open_session(config, data).alignment
    people = [data.active.ids[row] for row in alignment["active"].tolist()]
    assert sorted(people) == sorted(f"person {row}" for row in range(30))
    for table in data.passives:
        rows = alignment[table.name].tolist()
        found = [table.ids[row] if row >= 0 else None for row in rows]
        known = {f"person {row}" for row in OVERLAPS[table.name]}
        assert found == [person if person in known else None for person in people]


def test_a_passive_is_told_positions_of_its_own_people_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed = Mock(wraps=place_rows)
    monkeypatch.setattr(aligned, "place_rows", placed)
    alignment = open_session(pairs(), overlapping()).alignment
    told = {envelope.receiver: envelope for (envelope, _), _ in placed.call_args_list}
    assert told.keys() == OVERLAPS.keys()
    for name, envelope in told.items():
        expected = {"positions": TensorSpec(torch.int64, (len(OVERLAPS[name]),))}
        tensors, meta = unpack_tensors(envelope.payload, expected, sender="active")
        known = (alignment[name] >= 0).nonzero().flatten()
        assert sorted(tensors["positions"].tolist()) == known.tolist()
        assert meta == {"total": 30}


@pytest.mark.parametrize("method_name", ["apfed_c", "apfed_r"])
def test_steps_of_pairs_equal_one_autograd_graph(method_name: str) -> None:
    config = pairs(method=method_name)
    data = overlapping()
    session = open_session(config, data)
    monolith = Monolith(session, data, config)
    for step, rows_B in enumerate([*data.train_rows.split(16)] * 3):
        session.train_step(step, rows_B)
        monolith.step(rows_B)
    monolith.equals(session)


def test_a_pair_below_the_minimum_stops_the_run() -> None:
    data = overlapping({"passive-1": range(20), "passive-2": range(3)})
    with pytest.raises(IntersectionTooSmallError, match="minimum of 5"):
        open_session(pairs(alignment={"mode": "pairwise", "minimum_rows": 5}), data)


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
    payload = pack_tensors({"positions": torch.tensor(positions)}, {"total": total})
    envelope = envelope_of(payload, kind=Kind.ALIGNMENT, step=-1)
    with pytest.raises(RemoteProtocolError, match=message):
        place_rows(envelope, torch.tensor([4, 5, 6]), max_positions=100)


def test_positions_that_a_party_could_not_hold_are_refused() -> None:
    """Each takes a row of its features, whoever named so many."""
    payload = pack_tensors({"positions": torch.tensor([0, 1, 2])}, {"total": 10_000_000})
    envelope = envelope_of(payload, kind=Kind.ALIGNMENT, step=-1)
    with trace_memory() as peak, pytest.raises(RemoteProtocolError, match=r"to 4\d{6}$"):
        place_rows(envelope, torch.tensor([4, 5, 6]), max_positions=2**32, row_bytes=4 * 1000)
    assert peak() < 2**20
