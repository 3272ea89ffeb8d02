"""Errors and warnings that people meet when they use the library, those of the protocols included.

`secure_apfed.privacy.BudgetExhaustedError` stands beside the ledger that raises it.
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
    """A setting is unknown, missing or out of range; names the file, key and values."""


class ModelError(ApfedError):
    """A network, objective or saved model does not fit the data that it was given."""


class CheckpointError(ApfedError):
    """A checkpoint or run folder is truncated, altered, of another run, or not to be resumed."""


class PromiseError(ApfedError):
    """A class breaks a word that a bound rests on; names the class, the word and what moved."""


class FewRowsWarning(UserWarning):
    """A class has so few rows that nothing is learnt of it, or that measures say little."""


class LeftOutWarning(UserWarning):
    """A resumed session with steps that were answered without somebody, and are so again."""


class NarrowBatchWarning(UserWarning):
    """A batch whose representations point in one direction: the active trained on it alone."""


class NarrowTableWarning(UserWarning):
    """A passive's table with so few columns that what it contributes may reveal most of them."""


class SuspectColumnWarning(UserWarning):
    """A column that looks like an ID or like the label, among the features."""


class UnmatchedIdsWarning(UserWarning):
    """The IDs of one pattern hardly ever match: other parties may write them in another way."""


class UnseenCellsWarning(UserWarning):
    """Some cells to predict from are unlike all in training, and count for nothing."""


class NoHelpWarning(UserWarning):
    """A run with passives in which they were never asked: the active trained alone."""
