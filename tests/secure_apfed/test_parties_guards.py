"""Each rule of a run with an encrypted sum, tried by an active that breaks it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from protocols.errors import RemoteProtocolError
from secure_apfed.exchange import Envelope, pack
from secure_apfed.methods import Apfed
from tests.secure_apfed.test_methods_apfed import config_of, opened, vertical_data

CLIP, D, B = 1.0, 16, 8
ROWS = torch.arange(B)


def opened_run(weight: float = 1.0) -> Apfed:
    config = config_of(
        "apfed_c",
        model={"network": "mlp", "hidden": [6], "representation": D, "projection": D},
        passives={"default": {"weight": weight}},
        secure_sum={"scheme": "bfv", "clip": CLIP},
        rules={"minimum_batch": 4},
    )
    return opened(config, vertical_data(2))


@pytest.fixture
def played() -> Apfed:
    return opened_run()


def honest(rows: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, D, generator=generator, dtype=torch.float64)


def told(method: Apfed, z: Tensor, rows: Tensor = ROWS, *, step: int = 0, **more: Any) -> Envelope:
    """What a malicious active writes instead of its own representations."""
    template = method.active.represent(step, torch.arange(16))[0]
    return replace(template, payload=pack({"rows": rows, "z": z, **more}))


LINE = torch.linspace(-2, 3, B, dtype=torch.float64)[:, None] * torch.ones(D)


@pytest.mark.parametrize(
    ("z", "rows", "message"),
    [
        (honest() * 1e6, ROWS, "norm is not within"),
        (honest() * 1e-9, ROWS, "norm is not within"),
        (honest(), ROWS.clamp(min=1), "repeated a row"),
        (honest(3), ROWS[:3], "at least 4"),
        (LINE, ROWS, "near-constant"),
        (LINE + 1e-3 * honest(), ROWS, "near-constant"),
        (honest()[torch.arange(B) // 2], ROWS, "near-constant"),
    ],
)
def test_a_chosen_batch_is_refused_before_anything_is_computed(
    played: Apfed, z: Tensor, rows: Tensor, message: str
) -> None:
    passive = played.passives[0]
    before = {name: tensor.clone() for name, tensor in passive.tensors().items()}
    with pytest.raises(RemoteProtocolError, match=message):
        passive.contribute(told(played, z, rows))
    assert all(torch.equal(tensor, before[name]) for name, tensor in passive.tensors().items())


def test_a_step_is_answered_once(played: Apfed) -> None:
    passive = played.passives[0]
    passive.contribute(told(played, honest()))
    with pytest.raises(RemoteProtocolError, match="a step is never answered twice"):
        passive.contribute(told(played, 2 * honest()))


def test_a_message_cannot_carry_another_lambda(played: Apfed) -> None:
    with pytest.raises(RemoteProtocolError, match="expected \\['rows', 'z'\\]"):
        played.passives[0].contribute(told(played, honest(), weight=torch.zeros(1)))


def test_a_sum_over_fewer_or_other_passives_is_not_made(played: Apfed) -> None:
    assert played.aggregator is not None
    first, second = (passive.contribute(told(played, honest())) for passive in played.passives)
    with pytest.raises(RemoteProtocolError, match="missing: passive-2"):
        played.aggregator.combine([first])
    with pytest.raises(RemoteProtocolError, match="contributed twice"):
        played.aggregator.combine([first, first])
    with pytest.raises(RemoteProtocolError, match="missing: passive-2; unknown: stranger"):
        played.aggregator.combine([first, replace(second, sender="stranger")])
    played.aggregator.combine([first, second])


@pytest.mark.parametrize("factor", [1.0000001, 1e3, 1e6])
def test_an_active_that_tells_two_stories_gets_no_sum(factor: float) -> None:
    method = opened_run()
    assert method.aggregator is not None
    least = method.passives[0].terms.representation.maximum_norm
    one, other = honest() / 10, honest() / 10 * factor
    if float(other.norm(dim=1).max()) > least:
        with pytest.raises(RemoteProtocolError, match="norm is not within"):
            method.passives[1].contribute(told(method, other))
        return
    answers = [
        method.passives[0].contribute(told(method, one)),
        method.passives[1].contribute(told(method, other)),
    ]
    with pytest.raises(RemoteProtocolError, match="sent them different representations"):
        method.aggregator.combine(answers)


def test_rows_are_clipped_before_they_are_encrypted() -> None:
    method = opened_run(weight=1e6)
    method.step(0, torch.arange(16))
    assert method.active.opened is not None
    norm_B = method.active.opened.double().norm(dim=1)
    assert float(norm_B.max()) <= len(method.passives) * CLIP * 1.001
    assert float(norm_B.max()) > 0.1  # the gradients were far above the bound
