"""The secure sum that a run's settings name, looked up where a run is opened."""

from apfed_protocols.sums import SECURE_SUMS, SecureSum, format_sum_name
from secure_apfed.errors import ConfigError
from secure_apfed.settings import SumSettings, suggest_name


def find_sum_class(settings: SumSettings) -> type[SecureSum]:
    """Return the secure-sum class that has the configured scheme and masks.

    Raises ConfigError: there is no such class; names the nearest and all.
    """
    name = format_sum_name(settings.scheme, settings.masks)
    if name not in SECURE_SUMS:
        pairs = ", ".join(
            f"{{scheme: {kind.scheme}, masks: {kind.masks}}}" for kind in SECURE_SUMS.values()
        )
        guess = suggest_name(name, SECURE_SUMS)
        known = f"{guess} There" if guess else "there"
        raise ConfigError(
            f"there is no sum with scheme {settings.scheme!r} and masks {settings.masks!r}; "
            f"{known} are {pairs}"
        )
    return SECURE_SUMS[name]


def explain_unreadable(kind: type[SecureSum]) -> str:
    """Return why an attack by the aggregator on single contributions does not apply to this sum.

    The reason is that they are ciphertexts. "" for the plain scheme: it sends plain or masked
    values, so the attack applies.
    """
    return "" if kind.scheme == "plain" else f"nothing to read: ciphertexts ({kind.name})"
