"""Alignment: which rows of which party belong to the same person, and who may learn how many."""

from secure_apfed.alignment.history import AlignmentHistory
from secure_apfed.alignment.ids import IdColumn, IdNormalisation
from secure_apfed.alignment.settings import AlignmentSettings
from secure_apfed.alignment.tables import (
    align,
    canonical_ids,
    choose_protocol,
    count_common,
    intersection,
    most_guesses,
    share_membership,
)
from secure_apfed.alignment.taking_part import take_part
from secure_apfed.id_files import IdFile

__all__ = [
    "AlignmentHistory",
    "AlignmentSettings",
    "IdColumn",
    "IdFile",
    "IdNormalisation",
    "align",
    "canonical_ids",
    "choose_protocol",
    "count_common",
    "intersection",
    "most_guesses",
    "share_membership",
    "take_part",
]
