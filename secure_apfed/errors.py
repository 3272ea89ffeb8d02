"""The errors and warnings of the library, including those of the protocols.

`secure_apfed.privacy.BudgetExhaustedError` is defined in the module of the ledger, which raises it.
"""

from apfed_protocols.errors import (
    ApfedError,
    ClippingWarning,
    DataError,
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    UnsafeChoiceWarning,
)

__all__ = [
    "ApfedError",
    "CheckpointError",
    "ClippingWarning",
    "ConfigError",
    "DataError",
    "FewRowsWarning",
    "LeftOutWarning",
    "LocalProtocolError",
    "ModelError",
    "NarrowBatchWarning",
    "NarrowTableWarning",
    "NoHelpWarning",
    "PartyLeftError",
    "PromiseError",
    "RemoteProtocolError",
    "SuspectColumnWarning",
    "UnmatchedIdsWarning",
    "UnsafeChoiceWarning",
    "UnseenCellsWarning",
]


class ConfigError(ApfedError):
    """A setting is unknown, missing or out of range; names the file, key and values.

    Examples:
        >>> from secure_apfed import ConfigError, PrivateLabels
        >>> try:
        ...     PrivateLabels(epsilon=100, classes=10)
        ... except ConfigError as error:
        ...     print(error)
        epsilon_y lies above 0 and up to 40, got 100; leave label privacy out for none
    """


class ModelError(ApfedError):
    """A network, objective or saved model does not fit the data that it was given."""


class CheckpointError(ApfedError):
    """A checkpoint or run folder is truncated, altered, of another run, or not to be resumed."""


class PromiseError(ApfedError):
    """A user's class violates a property on which a privacy bound relies.

    The message names the class, the property and the measured deviation.
    """


class _AdvisingWarning(UserWarning):
    """A warning whose text names settings, in the words of the interface that is used."""

    def __init__(self, text: str = "") -> None:
        """Translate the names of settings in the text, such as for a caller from Python."""
        # Imported late, so that importing only the errors loads no other module.
        from secure_apfed.base.translation import translate

        super().__init__(translate(text))


class FewRowsWarning(_AdvisingWarning):
    """A class has so few rows that a model cannot learn it, or its measures are unreliable."""


class LeftOutWarning(_AdvisingWarning):
    """A resumed session repeats steps that a passive did not answer, so they run without it."""


class NarrowBatchWarning(_AdvisingWarning):
    """A batch's representations point in almost one direction, so the passives refuse it.

    The active trains on such a batch without them.
    """


class NarrowTableWarning(_AdvisingWarning):
    """A passive's table has so few columns that its contributions may reveal most of them."""


class SuspectColumnWarning(_AdvisingWarning):
    """A column among the features looks like an ID or like the label."""


class UnmatchedIdsWarning(_AdvisingWarning):
    """A party's IDs of one pattern hardly ever match; other parties may write them differently."""


class UnseenCellsWarning(_AdvisingWarning):
    """Some cells to predict from are unlike all cells in training, so they are ignored."""


class NoHelpWarning(_AdvisingWarning):
    """The passives of a run never got a request, so the active trained without help."""
