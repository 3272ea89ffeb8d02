"""An attack of one's own, mounted by the study runner: own_attack.yaml beside this file names it.

    cd docs/examples
    secure-apfed run own_attack.yaml --output runs

A curious passive that knows a few labels gives each other row the label of the nearest known row.
It reads what the active sent; the same with its own columns instead is its baseline. Rows whose
releases are exchanged, its decoys, come for free. Letters: N rows, K classes.
"""

from typing import ClassVar

import torch
from pydantic import Field

from apfed_attacks.columns import explain_missing_releases, select_own_columns, standardise_columns
from apfed_attacks.interface import Attack, Guess, Prediction, Target
from apfed_attacks.view import AdversaryView, Role, collect_representations


class NearestNeighbour(Attack):
    """An attack that gives a row the label of its nearest known row."""

    name: ClassVar[str] = "nearest_neighbour"
    target: ClassVar[Target] = "labels"
    roles: ClassVar[tuple[Role, ...]] = ("passive",)

    labels_per_class: int = Field(4, ge=1)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return what a run must send for this attack, and this one did not."""
        return explain_missing_releases(view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Return a guess of every row whose label it does not know."""
        seen = collect_representations(view, view.epochs[-1])
        told = view.knowledge.labels
        label_by_position = dict(zip(told.positions.tolist(), told.values.tolist(), strict=True))
        is_known = torch.isin(seen.positions, told.positions)
        known = seen.positions[is_known].tolist()
        labels = torch.tensor([label_by_position[position] for position in known])

        def predict(columns: torch.Tensor) -> Prediction:
            values = torch.as_tensor(standardise_columns(columns, components=256, seed=seed))
            distances_NM = torch.cdist(values[~is_known], values[is_known])
            nearest_by_class = [
                distances_NM[:, labels == label].amin(1) for label in range(view.knowledge.classes)
            ]
            return Prediction((-torch.stack(nearest_by_class, dim=1)).numpy())

        return Guess(
            positions=seen.positions[~is_known],
            attacks={"nearest by h": predict(seen.z)},
            baselines={"nearest by x": predict(select_own_columns(view, seen.positions))},
        )
