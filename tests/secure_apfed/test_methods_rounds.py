"""A sum of two rounds trains as one of one round does, with 4M + 1 envelopes a step."""

from collections import Counter

import pytest
import torch

from protocols.sums import SECURE_SUMS
from secure_apfed.exchange import Kind
from tests.protocols.test_sums_rounds import TwiceSum
from tests.secure_apfed.test_methods_apfed import (
    CONTRASTIVE,
    config_of,
    opened,
    vertical_data,
)
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")


def test_two_rounds_train_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECURE_SUMS, TwiceSum.name, TwiceSum)
    passives = {"default": {"objective": CONTRASTIVE}}
    clip = 1e9  # so large that nothing is cut
    data = vertical_data(3)
    one, two = (
        opened(config_of(passives=passives, secure_sum={**pair_of(name), "clip": clip}), data)
        for name in ("plain", TwiceSum.name)
    )
    for step, rows_B in enumerate(data.train_rows.split(16)):
        assert one.step(step, rows_B) == pytest.approx(two.step(step, rows_B), abs=1e-12)
    for mine, other in zip(
        one.active.networks.encoder.parameters(),
        two.active.networks.encoder.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    sent = Counter[Kind]()
    for flow in two.transcript.flows:
        if flow.first_step >= 0:
            sent[flow.kind] += flow.messages
    assert sent == {
        Kind.REPRESENTATIONS: 6,
        Kind.CONTRIBUTION: 6,
        Kind.SUM_REQUEST: 6,
        Kind.SUM_ANSWER: 6,
        Kind.SUM: 2,
    }
