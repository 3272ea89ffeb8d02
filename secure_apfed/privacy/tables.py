"""Which guards and label mechanisms there are, by name."""

from collections.abc import Mapping

from secure_apfed.privacy.gaussian_guard import FrozenGaussianGuard, GaussianGuard
from secure_apfed.privacy.guard import NoGuard, RepresentationGuard
from secure_apfed.privacy.label_mechanism import LabelMechanism, LabelResponse, NoLabelPrivacy
from secure_apfed.privacy.label_stages import MultiStageResponse
from secure_apfed.settings.privacy import GuardSettings, LabelSettings

__all__ = ["GUARDS", "LABEL_MECHANISMS", "make_guard", "make_label_mechanism"]

GUARDS: Mapping[str, type[NoGuard] | type[GaussianGuard] | type[FrozenGaussianGuard]] = {
    guard.name: guard for guard in (NoGuard, GaussianGuard, FrozenGaussianGuard)
}

LABEL_MECHANISMS: Mapping[
    str, type[NoLabelPrivacy] | type[LabelResponse] | type[MultiStageResponse]
] = {mechanism.name: mechanism for mechanism in (NoLabelPrivacy, LabelResponse, MultiStageResponse)}


def make_guard(
    settings: GuardSettings, *, delta: float, releases: int, key: bytes
) -> RepresentationGuard:
    """Build the guard that `settings` describe.

    Args:
        settings: of the guard.
        delta: of the run's epsilons.
        releases: T, the planned releases of each row; sigma is calibrated for it.
        key: 32 bytes: fresh ones, or under "reproducible_insecure" the caller's, who warns.

    Raises:
        ConfigError: fewer than one release planned.
        LocalProtocolError: a key of the wrong length.
    """
    return GUARDS[settings.mechanism].from_settings(
        settings, delta=delta, releases=releases, key=key
    )


def make_label_mechanism(settings: LabelSettings, *, classes: int) -> LabelMechanism:
    """Build the mechanism that `settings` describe, for labels of this many classes.

    Raises:
        ConfigError: fewer than two classes.
    """
    return LABEL_MECHANISMS[settings.mechanism].from_settings(settings, classes=classes)
