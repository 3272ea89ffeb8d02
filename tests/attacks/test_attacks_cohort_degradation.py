import pytest
import torch

from apfed_attacks.live.strategy import CohortDegradation
from apfed_attacks.view import AttackError


def test_only_the_cohort_is_pulled_towards_the_others() -> None:
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([9, 3, 5, 1, 7, 2])
    adversary = CohortDegradation(torch.tensor([5, 2, 8]), strength=2.0)
    answer = adversary.answer(0, rows, z)
    assert torch.equal(answer[[0, 1, 3, 4]], torch.zeros(4, 4))
    # A step against the answer brings the cohort nearer to the others' mean.
    middle = z[[0, 1, 3, 4]].mean(dim=0)
    assert torch.allclose((z - 0.5 * answer)[[2, 5]], middle.expand(2, 4), atol=1e-6)


@pytest.mark.parametrize("cohort", [[0, 1], [5, 6]])
def test_a_batch_of_the_cohort_or_of_others_alone_is_left_in_peace(cohort: list[int]) -> None:
    adversary = CohortDegradation(torch.tensor(cohort))
    assert not adversary.answer(0, torch.tensor([0, 1]), torch.ones(2, 3)).any()


def test_a_victim_that_hears_nothing_else_loses_the_cohort() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=draw)
    x[:40, 0] += 4
    encoder = torch.nn.Linear(3, 8)
    adversary = CohortDegradation(torch.arange(40))
    sgd = torch.optim.SGD(encoder.parameters(), lr=0.05)

    def gap() -> float:
        with torch.no_grad():
            z = encoder(x)
        return float((z[:40].mean(dim=0) - z[40:].mean(dim=0)).norm())

    before = gap()
    for step in range(100):
        rows = torch.randperm(200, generator=draw)[:64]
        z = encoder(x[rows])
        sgd.zero_grad()
        (z * adversary.answer(step, rows, z.detach())).sum().div(64).backward()
        sgd.step()
    assert gap() < 0.1 * before


@pytest.mark.parametrize(("people", "strength"), [(0, 1.0), (2, 0.0), (2, float("nan"))])
def test_a_cohort_of_nobody_or_without_strength_is_refused(people: int, strength: float) -> None:
    with pytest.raises(AttackError, match="a cohort has somebody and a strength above 0"):
        CohortDegradation(torch.arange(people), strength=strength)
