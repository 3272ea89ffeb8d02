"""Private set intersection: the common people of several tables, in one process or across links.

The names of `apfed_protocols` that are about intersections, and those of a run's alignment.
"""

from typing import TYPE_CHECKING

from apfed_protocols.lazy_names import give_names

if TYPE_CHECKING:
    from apfed_protocols import (
        SET_INTERSECTIONS,
        IdNormalisation,
        IntersectionAgreement,
        IntersectionName,
        Output,
        align,
        align_with,
        count_common,
        encode_ids,
        share_membership,
    )
    from secure_apfed.alignment import canonical_ids, make_intersection
    from secure_apfed.alignment.records import AlignmentHistory
    from secure_apfed.settings.alignment import AlignmentSettings

__all__ = [
    "SET_INTERSECTIONS",
    "AlignmentHistory",
    "AlignmentSettings",
    "IdNormalisation",
    "IntersectionAgreement",
    "IntersectionName",
    "Output",
    "align",
    "align_with",
    "canonical_ids",
    "count_common",
    "encode_ids",
    "make_intersection",
    "share_membership",
]

_OF_RUNS = {
    "secure_apfed.alignment": ("canonical_ids", "make_intersection"),
    "secure_apfed.alignment.records": ("AlignmentHistory",),
    "secure_apfed.settings.alignment": ("AlignmentSettings",),
}
_OWN = [name for names in _OF_RUNS.values() for name in names]

if not TYPE_CHECKING:  # type checkers read the imports above
    __getattr__, __dir__ = give_names(
        __name__,
        __all__,
        {"apfed_protocols": [name for name in __all__ if name not in _OWN], **_OF_RUNS},
    )
