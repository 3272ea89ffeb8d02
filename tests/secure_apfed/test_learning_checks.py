"""Near-constant batches: measured, refused by passives, kept at home by the active."""

import math
import warnings
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config.file import load_config_text
from secure_apfed.contract import RepresentationTerms
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.exchange import Kind
from secure_apfed.learning.release import check_spread, spread_of
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import cloned, contract, contributed, representations, same
from tests.secure_apfed.test_parties_apfed import ALIGNMENT, Active, opened, passive

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

D = 32


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def lengths(rows: int) -> Tensor:
    return torch.linspace(0.5, 50.0, rows, dtype=torch.float64)[:, None]


ONE = normal(1, D)
QUERIES = {
    "one row repeated": ONE.expand(40, D),
    "one direction, all lengths": ONE * lengths(40),
    "a line": ONE * lengths(40) * torch.tensor([1.0, -1.0] * 20)[:, None],
    "two directions": normal(2, D)[torch.arange(40) % 2] * lengths(40),
    "many directions, in pairs": normal(20, D)[torch.arange(40) % 20],
    "one direction and half the bound of noise": ONE + 0.006 * normal(40, D, seed=1),
    "one direction for most": torch.cat([ONE.expand(30, D), normal(10, D, seed=1)]),
}


@pytest.mark.parametrize("query", QUERIES)
def test_chosen_queries_have_no_spread(query: str) -> None:
    for dtype in (torch.float32, torch.float64):
        assert spread_of(QUERIES[query].to(dtype)) < 5e-4


@pytest.mark.parametrize(("rows", "shape"), [(2, (8,)), (3, (64,)), (128, (4, 5, 5))])
def test_random_rows_spread_and_so_do_rows_around_a_common_mean(
    rows: int, shape: tuple[int, ...]
) -> None:
    random = normal(rows, *shape)
    assert spread_of(random) > 0.3
    assert spread_of(5 * torch.ones(shape) + random) > 0.01
    assert spread_of(random * 1e-20) == pytest.approx(spread_of(random))
    assert spread_of(random * 1e30) == pytest.approx(spread_of(random))


def test_the_spread_of_two_rows_is_the_squared_sine_of_their_angle() -> None:
    for angle in (0.0, 0.1, 1.0, math.pi / 2, math.pi):
        rows = torch.tensor([[2.0, 0.0], [math.cos(angle), math.sin(angle)]])
        assert spread_of(rows) == pytest.approx(math.sin(angle) ** 2, abs=1e-6)


def test_rows_of_zeros_add_no_spread() -> None:
    assert spread_of(torch.zeros(5, D)) == 0
    assert spread_of(torch.cat([ONE, torch.zeros(20, D)])) == 0


def test_the_bound_is_the_contracts_and_zero_is_no_rule() -> None:
    terms = RepresentationTerms(
        shape=(D,), dtype="float64", minimum_norm=0.0, maximum_norm=1e3, minimum_spread=0.0005
    )
    check_spread(normal(10, D), terms, sender="active")
    with pytest.raises(RemoteProtocolError, match=r"active sent a near-constant batch: .* 0\.0005"):
        check_spread(QUERIES["a line"], terms, sender="active")
    check_spread(QUERIES["a line"], terms.model_copy(update={"minimum_spread": 0.0}), sender="a")
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="minimum_spread"):
            RepresentationTerms.model_validate(terms.model_dump() | {"minimum_spread": bad})


def test_a_passive_refuses_a_near_constant_batch_and_computes_nothing() -> None:
    party, objective = passive(contract(spread=0.0005))
    state, rows = cloned(party.tensors()), torch.arange(4)
    one = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    for z in (one.expand(4, 3), one * torch.tensor([[1.0], [-2.0], [3.0], [-4.0]])):
        with pytest.raises(RemoteProtocolError, match="near-constant"):
            contributed(party, representations(rows, z.contiguous()))
    assert objective.calls == 0
    assert same(party.tensors(), state)
    contributed(party, representations(rows, normal(4, 3)))


def test_a_passive_does_not_answer_near_constant_rows_among_people_that_it_does_not_know() -> None:
    held_N = torch.arange(len(ALIGNMENT)) < 4
    party, objective = passive(contract(spread=0.0005), held_N=held_N)
    state, rows = cloned(party.tensors()), torch.arange(len(ALIGNMENT))
    z = normal(len(ALIGNMENT), 3)
    narrow = torch.where(held_N[:, None], z[0], z)
    check_spread(narrow, party.terms, sender="active")
    answers = {}
    for step, asked in enumerate((narrow, z)):
        sent = representations(rows, asked, step=step)
        other = passive(contract(weights={"p2": 0.0}), "p2")[0]
        both = {
            "p1": contributed(party, sent),
            "p2": contributed(other, representations(rows, asked, step=step, receiver="p2")),
        }
        answers[step] = opened(both, sent, rows)
        if step == 0:
            assert objective.calls == 0
            assert same(descent_of(party.tensors()), descent_of(state))
    assert not answers[0].any()
    assert answers[1][held_N].all()
    assert not answers[1][~held_N].any()


def descent_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Its networks and momenta, without the count of its answers."""
    return {name: value for name, value in tensors.items() if not name.startswith("allowance")}


def test_the_active_keeps_a_near_constant_batch_at_home() -> None:
    active = Active(agreed=contract(spread=0.5))
    with torch.no_grad():
        assert isinstance(active.networks.projection, nn.Linear)
        active.networks.projection.weight.zero_()
    with pytest.warns(NarrowBatchWarning, match="active trains on such batches alone"):
        assert active.party.represent(0, torch.arange(12)) is None
    assert active.party.update(None) > 0
    assert len(active.ledger.charged) == 1  # counted, though nobody saw it


@pytest.mark.parametrize("method", ["apfed_c", "apfed_r"])
def test_honest_batches_without_noise_are_all_answered(method: str) -> None:
    # under APFed-C their spread was 0.0019 or more; a default of 0.005 kept most of them at home
    text = f"""
        name: honest
        method: {method}
        data: {{dataset: digits, views: 4, overlap: 0.8}}
        train: {{epochs: 2, batch_size: 64, learning_rate: 0.1, device: cpu}}
        secure_sum: {{scheme: plain}}
        guard: {{mechanism: none}}
    """
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", NarrowBatchWarning)
        found = run(
            load_config_text(text, source="honest"),
            None,
            on_progress=lambda progress: steps.append(progress.step),
        )
    (sums,) = (flow for flow in found.recording.transcript.flows if flow.kind is Kind.SUM)
    assert sums.messages == len(set(steps)) == 36
