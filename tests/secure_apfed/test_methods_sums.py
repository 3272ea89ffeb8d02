"""Training does not depend on which secure sum adds, with one passive or several."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind
from secure_apfed.methods import Session, open_session
from secure_apfed.secure_sums import check_sum, sum_kind
from secure_apfed.settings.training import SumSettings
from tests.secure_apfed.single_steps import active_of
from tests.secure_apfed.test_methods_apfed import (
    CONTRASTIVE,
    RECONSTRUCTION,
    config_of,
    passive_settings,
    vertical_data,
)
from tests.with_crypten import pair_of, usable_secure_sums

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

OTHERS = [name for name in usable_secure_sums() if name != "plain + pairwise masks"]
STEPS = 3


def trained(passives: int, **secure_sum: Any) -> tuple[Session, list[Tensor]]:
    """A session after some steps, and the sums that its active opened."""
    session = open_session(
        config_of(
            passives=passive_settings([RECONSTRUCTION, CONTRASTIVE], passives),
            secure_sum={"clip": 0.5, "allow_single_passive": passives == 1, **secure_sum},
        ),
        vertical_data(passives),
    )
    sums = []
    for step in range(STEPS):
        session.step(step, torch.arange(16))
        assert session.learner.opened is not None
        sums.append(session.learner.opened.clone())
    return session, sums


def encoder_of(session: Session) -> list[Tensor]:
    """The parameters of the active's encoder."""
    return list(active_of(session).trainer.networks.encoder.parameters())


@pytest.mark.parametrize("passives", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_every_secure_sum_trains_the_same_model(name: str, passives: int) -> None:
    usual, expected = trained(passives, scheme="plain", masks="pairwise")
    session, sums = trained(passives, **pair_of(name))
    assert all(map(torch.equal, sums, expected))
    pairs = zip(encoder_of(session), encoder_of(usual), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize("passives", [1, 2])
def test_and_one_close_to_that_of_the_plain_sum(passives: int) -> None:
    _, expected = trained(passives, scheme="plain")
    session, sums = trained(passives, scheme="plain", masks="pairwise")
    rounding = float(str(session.secure_sum["rounding"]))
    assert 0 < rounding < 1e-3
    assert 0 < (sums[0] - expected[0]).abs().max() <= rounding + 1e-12
    torch.testing.assert_close(sums[-1], expected[-1], rtol=0, atol=50 * rounding)


@pytest.mark.parametrize("name", ["ckks", "bfv", "bfv + pairwise masks"])
def test_zeros_ahead_train_the_same_model_with_one_passive(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_apfed.methods.sum_end.pays", lambda: False)
    _, expected = trained(1, scheme="plain", masks="pairwise")
    _, sums = trained(1, **pair_of(name), zero_pool=2)
    assert all(map(torch.equal, sums, expected))


@pytest.mark.parametrize("name", [*OTHERS, "plain + pairwise masks", "plain"])
def test_one_passive_adds_noise_under_every_sum(name: str) -> None:
    _, quiet = trained(1, scheme="plain", masks="pairwise")
    _, sums = trained(1, **pair_of(name), noise={"sigma": 0.01})
    noise = sums[0] - quiet[0]
    assert 0.005 < noise.std() < 0.015  # of 64 values: more than five deviations either way


def test_two_rounds_train_like_one_with_4m_plus_1_envelopes_a_step() -> None:
    data, clip = vertical_data(3), 10.0
    passives = {"default": {"objective": CONTRASTIVE}}
    one, two = (
        open_session(config_of(passives=passives, secure_sum={**pair_of(name), "clip": clip}), data)
        for name in ("plain + pairwise masks", "plain + recoverable masks")
    )
    for step, rows_B in enumerate(data.train_rows.split(16)):
        assert one.step(step, rows_B) == pytest.approx(two.step(step, rows_B), abs=1e-12)
    for mine, other in zip(encoder_of(one), encoder_of(two), strict=True):
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


@pytest.mark.parametrize("pair", [{"masks": "pairwise"}, {"scheme": "bvf", "masks": "pairwise"}])
def test_a_pair_that_there_is_not_is_refused_with_those_that_there_are(
    pair: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=r"no sum with scheme .* did you mean") as caught:
        check_sum(SumSettings(**pair))
    for kind in SECURE_SUMS.values():
        assert f"{{scheme: {kind.scheme}, masks: {kind.masks}}}" in str(caught.value)
        assert sum_kind(SumSettings(scheme=kind.scheme, masks=kind.masks)) is kind
