"""How IDs become bytes, as the settings of an alignment say it."""

from apfed_protocols.ids import IdNormalisation
from secure_apfed.settings.alignment import ID_RULES, AlignmentSettings

__all__ = ["id_rules"]


def id_rules(settings: AlignmentSettings) -> IdNormalisation:
    """The agreed rules.

    Raises:
        LocalProtocolError: formats of dates that are ambiguous.
    """
    on = {rule: rule in settings.normalisation for rule in ID_RULES}
    return IdNormalisation(**on, date_formats=settings.date_formats)
