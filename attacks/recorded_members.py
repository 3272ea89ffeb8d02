"""The experimenter's side of attacks on membership: candidates, their truth, the model's answers.

Run by: whoever holds the recording of all parties. Attacks never import this module.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attacks.interface import AttackError
from attacks.view import Candidates
from secure_apfed.methods.aligning import training_rows
from secure_apfed.runs import Recording
from secure_apfed.seeds import shuffled

__all__ = ["answers_of", "reveal_candidates"]


def reveal_candidates(recording: Recording, most: int, seed: int) -> tuple[Candidates, Tensor]:
    """Choose equally many rows that trained the active's model and that did not, and mix them.

    Args:
        recording: of a run whose active holds labels.
        most: rows in all, at most.
        seed: of the choice and the order.

    Returns:
        The candidates, and (n, 2) bool: who trained the model, and who was aligned.

    Raises:
        AttackError: fewer than two rows trained, or did not.
    """
    data, config = recording.data, recording.config
    aligned = recording.alignment.get(data.active.name, torch.empty(0, dtype=torch.int64))
    helped = config.facts.has_passives
    trained = training_rows(data, aligned, config.train) if helped else data.train_rows
    count = min(most // 2, len(trained), len(data.test_rows))
    if count < 2 or data.active.labels is None:
        raise AttackError(
            f"{len(trained)} rows trained and {len(data.test_rows)} did not; an attack on "
            "membership needs two of each, with labels"
        )
    inside = shuffled(trained, seed, "attacks", "members")[:count]
    outside = shuffled(data.test_rows, seed, "attacks", "others")[:count]
    rows = shuffled(torch.cat([inside, outside]), seed, "attacks", "candidates")
    members = torch.stack([torch.isin(rows, inside), torch.isin(rows, aligned)], dim=1)
    return Candidates(data.active.features[rows], data.active.labels[rows], config.train), members


def answers_of(recording: Recording) -> Callable[[Tensor], Tensor] | None:
    """The finished model behind an interface that answers with log-probabilities (n, K)."""
    model = recording.model
    if model is None:
        return None
    dtype = next(model.parameters()).dtype

    @torch.no_grad()
    def ask(features_N: Tensor) -> Tensor:
        scores_NK: Tensor = model(features_N.to(dtype))
        return scores_NK.log_softmax(1)

    return ask
