"""TVFL: equal to one autograd graph, filled as the release fills, and strict with its peers."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Envelope, Kind, pack
from secure_apfed.methods import open_method
from secure_apfed.methods.tvfl import FILLS, Tvfl
from secure_apfed.parties import TvflPassive
from tests.secure_apfed.seats import cloned, same
from tests.secure_apfed.single_steps import CLASSES, ROWS, random_data, step_config

ALIGNED, TRAINED, D = 34, 28, 12


def vertical_data(passives: int, *, aligned: int = ALIGNED) -> VerticalData:
    """The passives know the first `aligned` people."""
    known = {f"passive-{index + 1}": range(aligned) for index in range(passives)}
    return random_data(known, strangers=1, train=TRAINED)


def config(**changes: Any) -> Config:
    model = {"network": "mlp", "hidden": [6], "representation": D, "dropout": 0}
    return step_config("tvfl", **{"model": model, **changes})


def opened(data: VerticalData, settings: Config | None = None) -> Tvfl:
    settings = settings or config()
    method = open_method(settings, data)
    assert isinstance(method, Tvfl)
    return method


def state(method: Tvfl) -> dict[str, Tensor]:
    """What all parties have learned, without the passives' counts of their answers."""
    every = method.tensors()
    flat = {f"{p}/{key}": v for p, own in every.items() for key, v in own.items()}
    return cloned({name: value for name, value in flat.items() if "/allowance." not in name})


class Monolith:
    """All encoders and the head as one graph with one loss."""

    def __init__(self, method: Tvfl, data: VerticalData, settings: Config) -> None:
        passives = [party.encoder for party in method.passives]
        self.encoders = nn.ModuleList(copy.deepcopy([method.active.learner.encoder, *passives]))
        self.head = copy.deepcopy(method.active.learner.head)
        train = settings.train
        self.sgd = torch.optim.SGD(
            [*self.encoders.parameters(), *self.head.parameters()], lr=train.learning_rate,
            momentum=train.momentum, weight_decay=train.weight_decay,
        )  # fmt: skip
        self.data = data

    def scores(self, people: list[int]) -> Tensor:
        tables = self.data.tables
        parts = []
        for encoder, table in zip(self.encoders, tables, strict=True):
            own = [table.ids.index(self.data.active.ids[person]) for person in people]
            parts.append(encoder(table.features[own].double()))
        scores: Tensor = self.head(torch.cat(parts, dim=1))
        return scores

    def step(self, people: list[int]) -> float:
        assert self.data.active.labels is not None
        self.sgd.zero_grad()
        loss = F.cross_entropy(self.scores(people), self.data.active.labels[people])
        loss.backward()
        self.sgd.step()
        return loss.item()


@pytest.mark.parametrize("passives", [1, 2, 3])
def test_steps_equal_one_autograd_graph(passives: int) -> None:
    data, settings = vertical_data(passives), config()
    method = opened(data, settings)
    monolith = Monolith(method, data, settings)
    assert len(method.training_rows) == TRAINED
    for step, rows_B in enumerate(method.training_rows.split(10)):
        people = method.alignment["active"][rows_B].tolist()
        loss = method.step(step, rows_B)
        assert loss == pytest.approx(monolith.step(people), abs=1e-10)
        ours = [method.active.learner.encoder, *(party.encoder for party in method.passives)]
        pairs = zip(
            [*ours, method.active.learner.head], [*monolith.encoders, monolith.head], strict=True
        )
        for module, other in pairs:
            for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)


def test_the_full_inference_is_that_of_all_parties() -> None:
    data = vertical_data(2)
    method = opened(data)
    method.step(0, method.training_rows[:10])
    monolith = Monolith(method, data, config())
    people = list(range(TRAINED, ALIGNED))
    right = monolith.scores(people).argmax(1) == torch.tensor(people) % CLASSES
    accuracies = method.evaluate(next_step=1, final=True)
    assert accuracies["tvfl"] == pytest.approx(right.double().mean().item())
    assert list(accuracies) == ["tvfl", "tvfl_0", "tvfl_a", "tvfl_r"]
    assert list(method.evaluate(next_step=9, final=False)) == list(FILLS)


def own_and_like() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    own = torch.randn(50, 4, generator=generator, dtype=torch.float64) * 3 + 1
    return own, torch.full((50, 2, 3), float("nan"), dtype=torch.float64)


def test_zero_fill() -> None:
    filled = FILLS["tvfl_0"](*own_and_like())
    assert torch.equal(filled, torch.zeros(50, 2, 3, dtype=torch.float64))


def test_mean_fill_is_the_mean_of_the_actives_representations() -> None:
    own, like = own_and_like()
    filled = FILLS["tvfl_a"](own, like)
    assert filled.shape == (50, 2, 3)
    assert filled.unique().tolist() == pytest.approx([sum(own.flatten().tolist()) / 200])


def test_random_fill_is_uniform_in_the_actives_range() -> None:
    own, like = own_and_like()
    torch.manual_seed(2)
    filled = FILLS["tvfl_r"](own, like)
    low, high = own.min().item(), own.max().item()
    assert low <= filled.min().item() < low + 0.05 * (high - low)
    assert high - 0.05 * (high - low) < filled.max().item() <= high
    assert filled.shape == (50, 2, 3)
    # 300 draws: the mean's deviation is (high - low) / sqrt(12 * 300), a sixtieth.
    assert abs(filled.mean().item() - (low + high) / 2) < (high - low) / 12
    assert abs(filled.std().item() - (high - low) / 12**0.5) < (high - low) / 15


@pytest.mark.parametrize("fill", FILLS)
def test_fills_take_the_place_of_the_passives(fill: str) -> None:
    data = vertical_data(2)
    method = opened(data)
    seen: list[Tensor] = []
    method.active.learner.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    method.evaluate(next_step=0, final=False)
    head_input = seen[list(FILLS).index(fill)]
    own = method.active.learner.encoder(method.active.learner.features_N[TRAINED:]).detach()
    assert torch.equal(head_input[:, :D], own)
    rest = head_input[:, D:]
    assert rest.shape == (ROWS - TRAINED, 2 * D)
    if fill == "tvfl_0":
        assert rest.abs().max() == 0
    elif fill == "tvfl_a":
        torch.testing.assert_close(rest, own.mean().expand_as(rest))
    else:
        assert own.min() <= rest.min() < rest.max() <= own.max()
        assert len(rest.unique()) == rest.numel()


@pytest.mark.parametrize("final", [False, True])
def test_evaluation_changes_no_parameter_and_no_later_step(final: bool) -> None:
    data = vertical_data(2)
    settings = config(
        model={"network": "mlp", "hidden": [6], "representation": D, "dropout": 0.5},
    )
    method, undisturbed = opened(data, settings), opened(data, settings)
    for one in (method, undisturbed):
        one.step(0, one.training_rows[:10])
    before, generator = state(method), torch.get_rng_state()
    first = method.evaluate(next_step=1, final=final)
    assert same(state(method), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert method.evaluate(next_step=50, final=final) == first
    assert method.active.learner.encoder.training
    assert method.active.learner.head.training
    for one in (method, undisturbed):
        one.step(100, one.training_rows[10:20])
    assert same(state(method), state(undisturbed))


def test_every_network_is_evaluated_without_dropout() -> None:
    method = opened(vertical_data(2))
    modes: list[bool] = []
    encoders = [party.encoder for party in method.passives]
    for module in (method.active.learner.encoder, method.active.learner.head, *encoders):
        module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    method.evaluate(next_step=0, final=True)
    assert len(modes) == 4 * 2 + 2  # each fill and the full inference; passives in the latter only
    assert not any(modes)
    method.step(50, method.training_rows[:10])
    assert modes[-4:] == [True] * 4


def test_without_aligned_test_rows_the_full_inference_asks_nobody() -> None:
    method = opened(vertical_data(2, aligned=TRAINED))
    before = method.transcript.wire_bytes
    accuracies = method.evaluate(next_step=0, final=True)
    assert accuracies["tvfl"] != accuracies["tvfl"]  # NaN
    assert 0 <= accuracies["tvfl_0"] <= 1
    assert method.transcript.wire_bytes == before


def test_three_envelopes_a_passive() -> None:
    method = opened(vertical_data(2))
    before = sum(flow.messages for flow in method.transcript.flows)
    method.step(0, method.training_rows[:10])
    assert sum(flow.messages for flow in method.transcript.flows) - before == 3 * 2


def test_only_aligned_people_are_trained_on() -> None:
    method = opened(vertical_data(2, aligned=20))
    people = method.alignment["active"][method.training_rows]
    assert sorted(people.tolist()) == list(range(20))


def test_a_state_comes_back_bit_for_bit() -> None:
    data = vertical_data(2)
    method, again = opened(data), opened(data)
    method.step(0, method.training_rows[:10])
    saved = {name: cloned(tensors) for name, tensors in method.tensors().items()}
    again.load_tensors(saved, next_step=1)
    for one in (method, again):
        one.step(1, one.training_rows[10:20])
    assert same(state(again), state(method))


def learned(party: TvflPassive) -> dict[str, Tensor]:
    """What it has learned, without the count of its answers."""
    tensors = cloned(party.tensors())
    return {name: value for name, value in tensors.items() if not name.startswith("allowance.")}


class Asked:
    """A passive that has answered one request for training, and waits for its gradient."""

    def __init__(self, *, learn: bool = True) -> None:
        self.method = opened(vertical_data(2))
        self.passive = self.method.passives[0]
        self.answer = self.passive.represent(self.request(torch.arange(4), step=3, learn=learn))
        self.before = learned(self.passive)

    def request(self, rows: Tensor, *, step: int, learn: object = True) -> Envelope:
        return self.envelope(Kind.REQUEST, step, pack({"rows": rows}, {"learn": learn}))

    def gradient(self, values: Tensor, *, step: int = 3) -> Envelope:
        return self.envelope(Kind.GRADIENTS, step, pack({"gradient": values}))

    def envelope(self, kind: Kind, step: int, payload: bytes) -> Envelope:
        return Envelope(
            session=self.method.contract.session, step=step, kind=kind, sender="active",
            receiver="passive-1", sequence=0, payload=payload,
        )  # fmt: skip

    def refuses(self, envelope: Envelope, message: str) -> None:
        with pytest.raises(RemoteProtocolError, match=message):
            self.passive.learn(envelope)
        assert same(learned(self.passive), self.before)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(4, D + 1), "sent 'gradient'"),
        (torch.ones(3, D), "sent 'gradient'"),
        (torch.ones(4 * D), "sent 'gradient'"),
        (torch.ones(4, D, dtype=torch.float32), r"torch\.float32"),
        (torch.full((4, D), float("nan")), "not finite"),
        (torch.full((4, D), float("-inf")), "not finite"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(values: Tensor, message: str) -> None:
    asked = Asked()
    asked.refuses(asked.gradient(values.double() if "32" not in message else values), message)
    asked.passive.learn(asked.gradient(torch.ones(4, D).double()))
    assert not same(asked.passive.tensors(), asked.before)


@pytest.mark.parametrize("step", [2, 4])
def test_a_gradient_of_another_step_is_refused(step: int) -> None:
    asked = Asked()
    asked.refuses(asked.gradient(torch.ones(4, D).double(), step=step), "waits for none")


def test_a_gradient_is_taken_once() -> None:
    asked = Asked()
    asked.passive.learn(asked.gradient(torch.ones(4, D).double()))
    asked.before = learned(asked.passive)
    asked.refuses(asked.gradient(torch.ones(4, D).double()), "waits for none")


def test_what_was_sent_for_evaluation_is_not_learnt_from() -> None:
    asked = Asked(learn=False)
    asked.refuses(asked.gradient(torch.ones(4, D).double()), "waits for none")


def test_after_a_release_that_failed_no_gradient_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()

    def refuse(**_: Any) -> None:
        raise OverflowError("spent")

    monkeypatch.setattr(asked.passive.ledger, "charge", refuse)
    with pytest.raises(OverflowError, match="spent"):
        asked.passive.represent(asked.request(torch.arange(4), step=4))
    asked.refuses(asked.gradient(torch.ones(4, D).double(), step=4), "waits for none")


@pytest.mark.parametrize(
    ("rows", "step", "message"),
    [
        ([1, 1], 4, "repeated a row"),
        ([1], 4, "at least 2"),
        ([], 4, "batch of 0 rows"),
        ([0, ALIGNED], 4, "outside the alignment"),
        ([-1, 0], 4, "outside the alignment"),
        ([0, 1], 3, "after step 3"),
        ([0, 1], 0, "after step 3"),
    ],
)
def test_a_request_outside_the_rules_is_refused(rows: list[int], step: int, message: str) -> None:
    asked = Asked()
    releases = asked.passive.ledger.spent().releases
    with pytest.raises(RemoteProtocolError, match=message):
        asked.passive.represent(asked.request(torch.tensor(rows, dtype=torch.int64), step=step))
    assert asked.passive.ledger.spent().releases == releases
    asked.passive.learn(asked.gradient(torch.ones(4, D).double()))  # still due


@pytest.mark.parametrize("learn", ["yes", 1, None, [True]])
def test_only_a_plain_true_asks_to_learn(learn: object) -> None:
    asked = Asked()
    asked.passive.represent(asked.request(torch.arange(3), step=4, learn=learn))
    assert not asked.passive.encoder.training
    asked.refuses(asked.gradient(torch.ones(3, D).double(), step=4), "waits for none")


def answers(method: Tvfl, rows: Tensor) -> list[Envelope]:
    requests = method.active.request(0, rows)
    return [party.represent(sent) for party, sent in zip(method.passives, requests, strict=True)]


def test_answers_that_are_missing_doubled_or_swapped_are_refused() -> None:
    method = opened(vertical_data(2))
    rows = torch.arange(4)
    before = cloned(method.active.tensors())
    one, other = answers(method, rows)
    for wrong in ([], [one], [one, one], [one, other, one]):
        with pytest.raises(RemoteProtocolError, match="one answer of each of passive-1, passive-2"):
            method.active.learn(0, rows, wrong)
    with pytest.raises(RemoteProtocolError, match="answered for other rows than asked"):
        method.active.learn(0, rows.flip(0), [one, other])
    assert same(method.active.tensors(), before)


def test_answers_in_any_order_are_one_step() -> None:
    data = vertical_data(2)
    states = []
    for backwards in (False, True):
        method = opened(data)
        rows = method.training_rows[:4]  # the same people, though each session has its own order
        method.active.learn(0, rows, answers(method, rows)[:: -1 if backwards else 1])
        states.append(cloned(method.active.tensors()))
    assert same(*states)


@pytest.mark.parametrize("scale", [1e9, float("nan")])
def test_representations_out_of_bounds_are_refused(scale: float) -> None:
    method = opened(vertical_data(2))
    rows = torch.arange(4)
    with torch.no_grad():
        for parameter in method.passives[1].encoder.parameters():
            parameter.mul_(scale)
    before = cloned(method.active.tensors())
    with pytest.raises(RemoteProtocolError, match="passive-2 sent representations whose norm"):
        method.active.learn(0, rows, answers(method, rows))
    assert same(method.active.tensors(), before)


def test_a_passives_releases_are_counted_in_training_and_inference() -> None:
    method = opened(vertical_data(2), config(guard={"mechanism": "gaussian", "sigma": 2.0}))
    rows = method.training_rows[:10]
    for step in range(3):
        method.step(step, rows)
    assert {ledger.spent().releases for ledger in method.ledgers.values()} == {3}
    for _ in range(4):
        method.evaluate(next_step=3, final=False)
    assert {ledger.spent().releases for ledger in method.ledgers.values()} == {3}
    method.evaluate(next_step=3, final=True)
    for ledger in method.ledgers.values():
        counts = ledger.state_dict()["counts"]
        assert set(counts[method.aligned_test_rows].tolist()) == {1}
        assert set(counts[rows].tolist()) == {3}
        assert int(counts.sum()) == 3 * len(rows) + len(method.aligned_test_rows)


def test_nothing_is_left_to_predict_alone() -> None:
    assert opened(vertical_data(1)).solo() is None
