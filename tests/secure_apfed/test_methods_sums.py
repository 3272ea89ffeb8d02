"""Training does not depend on which secure sum adds, with one passive or several."""

from typing import Any

import pytest
import torch
from torch import Tensor

from protocols.sums import SECURE_SUMS
from secure_apfed.config.training import SumSettings
from secure_apfed.methods.apfed import Apfed
from tests.secure_apfed.test_methods_apfed import (
    CONTRASTIVE,
    RECONSTRUCTION,
    config_of,
    opened,
    passive_settings,
    vertical_data,
)
from tests.with_crypten import pair_of, usable_secure_sums

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")

OTHERS = [name for name in usable_secure_sums() if name != "plain + pairwise masks"]
STEPS = 3


def trained(passives: int, **secure_sum: Any) -> tuple[Apfed, list[Tensor]]:
    """A method after some steps, and the sums that its active opened."""
    method = opened(
        config_of(
            passives=passive_settings([RECONSTRUCTION, CONTRASTIVE], passives),
            secure_sum={"clip": 0.5, "allow_single_passive": passives == 1, **secure_sum},
        ),
        vertical_data(passives),
    )
    sums = []
    for step in range(STEPS):
        method.step(step, torch.arange(16))
        assert method.active.opened is not None
        sums.append(method.active.opened.clone())
    return method, sums


@pytest.mark.parametrize("passives", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_every_secure_sum_trains_the_same_model(name: str, passives: int) -> None:
    usual, expected = trained(passives, scheme="plain", masks="pairwise")
    method, sums = trained(passives, **pair_of(name))
    assert all(map(torch.equal, sums, expected))
    for mine, other in zip(
        method.active.networks.encoder.parameters(),
        usual.active.networks.encoder.parameters(),
        strict=True,
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("passives", [1, 2])
def test_and_one_close_to_that_of_the_plain_sum(passives: int) -> None:
    _, expected = trained(passives, scheme="plain")
    method, sums = trained(passives, scheme="plain", masks="pairwise")
    rounding = float(str(method.secure_sum["rounding"]))
    assert 0 < (sums[0] - expected[0]).abs().max() <= rounding + 1e-12
    torch.testing.assert_close(sums[-1], expected[-1], rtol=0, atol=50 * rounding)


@pytest.mark.parametrize("name", ["ckks", "bfv", "bfv + pairwise masks"])
def test_zeros_ahead_train_the_same_model_with_one_passive(name: str) -> None:
    _, expected = trained(1, scheme="plain", masks="pairwise")
    _, sums = trained(1, **pair_of(name), zero_pool=2, worker=False)
    assert all(map(torch.equal, sums, expected))


@pytest.mark.parametrize("name", [*OTHERS, "plain + pairwise masks", "plain"])
def test_one_passive_adds_noise_under_every_sum(name: str) -> None:
    _, quiet = trained(1, scheme="plain", masks="pairwise")
    _, sums = trained(1, **pair_of(name), noise={"sigma": 0.01})
    noise = sums[0] - quiet[0]
    assert 0.005 < noise.std() < 0.015  # of 64 values: more than five deviations either way


@pytest.mark.parametrize("pair", [{"masks": "pairwise"}, {"scheme": "bvf", "masks": "pairwise"}])
def test_a_pair_that_there_is_not_is_refused_with_those_that_there_are(
    pair: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"no sum with scheme .* did you mean") as caught:
        SumSettings(**pair)
    for kind in SECURE_SUMS.values():
        assert f"{{scheme: {kind.scheme}, masks: {kind.masks}}}" in str(caught.value)
        assert SumSettings(scheme=kind.scheme, masks=kind.masks).kind is kind
