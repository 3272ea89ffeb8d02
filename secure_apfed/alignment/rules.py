"""How IDs become bytes, as the settings have it."""

from apfed_protocols.ids import IdNormalisation
from secure_apfed.settings.alignment import AlignmentSettings

__all__ = ["rules_of"]


def rules_of(settings: AlignmentSettings) -> IdNormalisation:
    """The rules that parties agree on.

    Raises:
        ValueError: formats of dates that are ambiguous; names the key.
    """
    try:
        return IdNormalisation(**dict(settings.normalisation))
    except ValueError as error:
        raise ValueError(f"normalisation.{error}") from error
