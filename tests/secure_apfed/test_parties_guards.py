"""Each rule of a run with an encrypted sum, tried by an active that breaks it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.exchange import Envelope, Kind, pack
from secure_apfed.methods import Simulation, open_session
from secure_apfed.methods.apfed import ApfedActive, ApfedPassive
from secure_apfed.methods.sum_end import SumAggregator
from tests.secure_apfed.seats import contributed
from tests.secure_apfed.single_steps import ROWS as PEOPLE
from tests.secure_apfed.single_steps import random_data, step_config

CLIP, D, B = 1.0, 16, 8
ROWS = torch.arange(B)
PASSIVES = ("passive-1", "passive-2")


def opened(weight: float = 1.0) -> Simulation:
    config = step_config(
        "apfed_c",
        model={"network": "mlp", "hidden": [6], "representation": D, "projection": D},
        passives={"default": {"weight": weight}},
        secure_sum={"scheme": "bfv", "clip": CLIP},
        rules={"minimum_batch": 4},
    )
    return open_session(config, random_data(dict.fromkeys(PASSIVES, range(PEOPLE))))


def party(session: Simulation, name: str = PASSIVES[0]) -> ApfedPassive:
    role = session.helpers[name]
    assert isinstance(role, ApfedPassive)
    return role


@pytest.fixture
def session() -> Simulation:
    return opened()


def honest(rows: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, D, generator=generator, dtype=torch.float64)


def written(
    session: Simulation, z: Tensor, rows: Tensor = ROWS, *, to: str = PASSIVES[0], **more: Any
) -> Envelope:
    """What a malicious active writes instead of its own representations."""
    return Envelope(
        session=session.contract.session, step=0, kind=Kind.REPRESENTATIONS,
        sender=session.active, receiver=to, sequence=0,
        payload=pack({"rows": rows, "z": z, **more}),
    )  # fmt: skip


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
    session: Simulation, z: Tensor, rows: Tensor, message: str
) -> None:
    passive = party(session)
    before = {name: tensor.clone() for name, tensor in passive.tensors().items()}
    with pytest.raises(RemoteProtocolError, match=message):
        contributed(passive, written(session, z, rows))
    assert all(torch.equal(tensor, before[name]) for name, tensor in passive.tensors().items())


def test_a_step_is_answered_once(session: Simulation) -> None:
    contributed(party(session), written(session, honest()))
    with pytest.raises(RemoteProtocolError, match="a step is never answered twice"):
        contributed(party(session), written(session, 2 * honest()))


def test_a_message_cannot_carry_another_lambda(session: Simulation) -> None:
    with pytest.raises(RemoteProtocolError, match="expected \\['rows', 'z'\\]"):
        contributed(party(session), written(session, honest(), weight=torch.zeros(1)))


@pytest.mark.parametrize("factor", [1.0000001, 1e3, 1e6])
def test_an_active_that_tells_two_stories_gets_no_sum(session: Simulation, factor: float) -> None:
    most = party(session).terms.maximum_norm
    stories = dict(zip(PASSIVES, (honest() / 10, honest() / 10 * factor), strict=True))
    sent = {name: written(session, z, to=name) for name, z in stories.items()}
    if float(stories[PASSIVES[1]].norm(dim=1).max()) > most:
        with pytest.raises(RemoteProtocolError, match="norm is not within"):
            contributed(party(session, PASSIVES[1]), sent[PASSIVES[1]])
        return
    answers = {name: contributed(party(session, name), each) for name, each in sent.items()}
    aggregator = session.helpers["aggregator"]
    assert isinstance(aggregator, SumAggregator)
    with pytest.raises(RemoteProtocolError, match="sent them different representations"):
        aggregator.combiner.combine(answers)


def test_rows_are_clipped_before_they_are_encrypted() -> None:
    session = opened(weight=1e6)
    session.step(0, torch.arange(16))
    assert isinstance(session.learner, ApfedActive)
    assert session.learner.opened is not None
    norm_B = session.learner.opened.double().norm(dim=1)
    assert float(norm_B.max()) <= len(PASSIVES) * CLIP * 1.001
    assert float(norm_B.max()) > 0.1  # the gradients were far above the bound
