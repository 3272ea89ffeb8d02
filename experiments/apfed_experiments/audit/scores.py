"""What the auditor makes of a retraining: one number, higher where world 1 is likelier.

`other rows` adds up <z_j, d_j> over all released rows but the record's, where d_j is how far
the record moves row j on average; the auditor takes that from trainings of his own, in pairs
that share their noise. Without noise in the parameters it is the likelihood ratio.

`everything` is the likelihood ratio of all that private training claims to protect the record
in: he knows every parameter, every other row and all answers of the passives, and reads the
record's releases and the noisy sums of its batches.

Letters: R retrainings, B batch, D numbers of a representation, P parameters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from apfed_experiments.audit.retraining import Case, Retrainings, Step, Task, networks

__all__ = ["OtherRows", "WhiteBox", "directions"]


class OtherRows:
    """The linear score of all rows but the record's.

    Args:
        runs: the retrainings it watches; direction: from `directions`.
    """

    def __init__(self, runs: Retrainings, direction: Sequence[Tensor]) -> None:
        self._direction = direction
        self.score_R = torch.zeros(runs.count, dtype=torch.float64, device=runs.world_R.device)

    def __call__(self, step: Step) -> None:
        """Read one step."""
        self.score_R += (step.sent * self._direction[step.number]).sum((1, 2)).double()


class WhiteBox:
    """The likelihood ratio of everything.

    Args:
        runs: the retrainings it watches; their updates are noised.
    """

    def __init__(self, runs: Retrainings) -> None:
        self._sigma, self._gradient_sigma = runs.protection.sigma, runs.noise_deviation()
        self.score_R = torch.zeros(runs.count, dtype=torch.float64, device=runs.world_R.device)

    def __call__(self, step: Step) -> None:
        """Read one step."""
        if step.at < 0:
            return
        (z_0, sum_0), (z_1, sum_1) = step.worlds
        self.score_R += _ratio(step.sent[:, step.at], z_0, z_1, self._sigma)
        self.score_R += _ratio(step.update, sum_0, sum_1, self._gradient_sigma)


def _ratio(seen: Tensor, mean_0: Tensor, mean_1: Tensor, sigma: float) -> Tensor:
    """Log likelihood of mean 1 over that of mean 0 under normal noise."""
    seen, mean_0, mean_1 = seen.double(), mean_0.double(), mean_1.double()
    return ((seen - (mean_0 + mean_1) / 2) * (mean_1 - mean_0)).sum(1) / sigma**2


def directions(case: Case, task: Task, *, pairs: int, seed: int) -> list[Tensor]:
    """How far the record moves each row of each step, (B, D), and 0 for the record itself."""
    modules, objective = networks()
    runs = Retrainings(
        task, case.protection, modules=modules, objective=objective, count=2 * pairs, seed=seed,
        paired=True,
    )  # fmt: skip
    found: list[Tensor] = []

    def watch(step: Step) -> None:
        moved_BD = (step.clean[pairs:] - step.clean[:pairs]).mean(0)
        if step.at >= 0:
            moved_BD[step.at] = 0
        found.append(moved_BD)

    runs.play(watch)
    return found
