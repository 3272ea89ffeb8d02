"""Alignment: which rows of which party belong to the same person, and who may learn how many."""

from secure_apfed.alignment.history import AlignmentHistory
from secure_apfed.alignment.intersection import (
    canonical_ids,
    check_alignment,
    intersection,
    most_guesses,
)
from secure_apfed.id_files import IdFile
from secure_apfed.settings.alignment import AlignmentSettings

__all__ = [
    "AlignmentHistory",
    "AlignmentSettings",
    "IdFile",
    "canonical_ids",
    "check_alignment",
    "intersection",
    "most_guesses",
]
