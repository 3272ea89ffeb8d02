"""The way of representations to the wire: nothing comes out that was not charged for."""

import hashlib
from typing import Any

import pytest
import torch

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.learning.release import Releases
from secure_apfed.privacy.guard import GaussianGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger

ROWS = torch.tensor([4, 1])


def releases(budget: float | None = None) -> Releases:
    guard = GaussianGuard(clip=1.0, sigma=2.0, key=bytes(32))
    ledger = PrivacyLedger(guard.mechanism(), delta=1e-5, budget=budget, rows=5, log=None)
    return Releases(guard, ledger)


def charged(ours: Releases) -> list[int]:
    counts: list[int] = ours.ledger.state_dict()["counts"].tolist()
    return counts


def test_what_comes_out_is_counted_then_charged_by_its_digest() -> None:
    ours, seen = releases(), []

    def count(digest: bytes) -> None:
        assert charged(ours) == [0] * 5
        seen.append(digest)

    h_B = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    released = ours.release(h_B, step=3, rows=ROWS, count=count)
    assert seen == [hashlib.sha256(released.payload).digest()]
    assert charged(ours) == [0, 1, 0, 0, 1]
    assert released.z.shape == h_B.shape
    assert released.z.requires_grad
    again = ours.release(h_B, step=3, rows=ROWS)
    assert again.payload == released.payload
    assert charged(ours) == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("error", [RemoteProtocolError, BudgetExhaustedError])
def test_a_refusal_charges_nothing_and_gives_nothing_out(error: type[Exception]) -> None:
    ours = releases(budget=1e-3 if error is BudgetExhaustedError else None)

    def count(digest: bytes) -> None:
        if error is RemoteProtocolError:
            raise error("asked too often")

    facts: dict[str, Any] = {"step": 0, "rows": ROWS, "count": count}
    with pytest.raises(error):
        ours.release(torch.ones(2, 3), **facts)
    assert charged(ours) == [0] * 5
