"""The secure sum that a run's settings name, looked up where a run is opened."""

from apfed_protocols.sums import SECURE_SUMS, SecureSum, format_sum_name
from secure_apfed.errors import ConfigError
from secure_apfed.settings import did_you_mean
from secure_apfed.settings.training import SumSettings


def find_sum_class(settings: SumSettings) -> type[SecureSum]:
    """Return the class of the configured sum, with its facts.

    Raises ConfigError: no class has this scheme and masks; names the nearest.
    """
    name = format_sum_name(settings.scheme, settings.masks)
    if name not in SECURE_SUMS:
        pairs = ", ".join(
            f"{{scheme: {kind.scheme}, masks: {kind.masks}}}" for kind in SECURE_SUMS.values()
        )
        guess = did_you_mean(name, SECURE_SUMS)
        known = f"{guess} There" if guess else "there"
        raise ConfigError(
            f"there is no sum with scheme {settings.scheme!r} and masks {settings.masks!r}; "
            f"{known} are {pairs}"
        )
    return SECURE_SUMS[name]


def explain_unreadable(kind: type[SecureSum]) -> str:
    """Return why the aggregator cannot read a contribution to this sum: it is a ciphertext.

    "" for the plain scheme, whose masked values an attack has to test.
    """
    return "" if kind.scheme == "plain" else f"nothing to read: ciphertexts ({kind.name})"
