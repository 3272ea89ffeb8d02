"""FSHA, feature-space hijacking: a malicious active of TVFL rebuilds a passive's features.

Run by: an active that returns to one passive, in place of the gradient of the task, the gradient
that pulls its encoder into the active's own feature space (Pasquini et al., 2021, Unleashing the
Tiger: Inference Attacks on Split Learning). The passive cannot tell one gradient from the other.
How: see `attacks.features.hijacking`. In APFed no party returns such a gradient to a passive.
"""

from typing import ClassVar

from attacks.features.hijacking import HijackAttack
from attacks.view import AdversaryView, Role

__all__ = ["FeatureSpaceHijack"]


class FeatureSpaceHijack(HijackAttack):
    """Pull one passive's encoder into one's own feature space; see `HijackAttack`."""

    name: ClassVar[str] = "hijack"
    roles: ClassVar[tuple[Role, ...]] = ("active",)

    def applicable(self, view: AdversaryView) -> str | None:
        """It needs joint training, in which it was played."""
        if view.role in self.roles and not view.facts.returns_gradients:
            return f"{view.method}: the active returns no gradient that trains a passive's encoder"
        return super().applicable(view)
