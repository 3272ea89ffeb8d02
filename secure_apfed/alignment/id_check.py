"""What normalisation would do to one party's IDs, before any protocol: nothing is sent.

Run by: each party alone, so that all can compare counts and agree on rules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from apfed_protocols.ids import IdNormalisation, IdStream, encode_pieces

__all__ = ["IdCheck", "check_normalisation"]

_SHOWN = 5
_NOTHING = IdNormalisation(unicode_nfc=False, strip=False)
_RULES: Mapping[str, IdNormalisation] = {
    "unicode_nfc": replace(_NOTHING, unicode_nfc=True),
    "strip": replace(_NOTHING, strip=True),
    "case_fold": replace(_NOTHING, case_fold=True),
    "whole_numbers": replace(_NOTHING, whole_numbers=True),
}
_DATES = "date_formats"


@dataclass(frozen=True, kw_only=True)
class IdCheck:
    """What was found; rows are from 0, and no ID is in it.

    Attributes:
        party, rows: whose, and how many.
        by_rule: IDs that each rule changes by itself, whether it was agreed on or not.
        agreed: the rules that were.
        changed: IDs that the agreed rules change together; first: some of their rows.
        repeated: rows whose ID an earlier row has, once normalised; pairs: some of them, each with
            that row.
        repeated_as_written: the same without any rule.
    """

    party: str
    rows: int
    by_rule: Mapping[str, int]
    agreed: tuple[str, ...]
    changed: int
    first: tuple[int, ...]
    repeated: int
    pairs: tuple[tuple[int, int], ...]
    repeated_as_written: int


def check_normalisation(party: str, ids: IdStream, normalisation: IdNormalisation) -> IdCheck:
    """Count what these rules change and make equal.

    Raises:
        DataError: IDs are empty or of another type.
    """
    alone = dict(_RULES)
    if normalisation.date_formats:
        alone[_DATES] = replace(_NOTHING, date_formats=normalisation.date_formats)
    by_rule = {name: len(list(_changes(party, ids, rule))) for name, rule in alone.items()}
    changed = list(_changes(party, ids, normalisation))
    pairs = list(_repeats(party, ids, normalisation))
    return IdCheck(
        party=party,
        rows=len(ids),
        by_rule=by_rule,
        agreed=tuple(name for name in alone if getattr(normalisation, name)),
        changed=len(changed),
        first=tuple(changed[:_SHOWN]),
        repeated=len(pairs),
        pairs=tuple(pairs[:_SHOWN]),
        repeated_as_written=len(list(_repeats(party, ids, _NOTHING))),
    )


def _encoded(party: str, ids: IdStream, rules: IdNormalisation) -> Iterator[bytes]:
    for piece in encode_pieces(party, ids, rules):
        yield from piece


def _changes(party: str, ids: IdStream, rules: IdNormalisation) -> Iterator[int]:
    both = zip(_encoded(party, ids, _NOTHING), _encoded(party, ids, rules), strict=True)
    return (row for row, (written, agreed) in enumerate(both) if written != agreed)


def _repeats(party: str, ids: IdStream, rules: IdNormalisation) -> Iterator[tuple[int, int]]:
    first: dict[bytes, int] = {}
    for row, identity in enumerate(_encoded(party, ids, rules)):
        if first.setdefault(identity, row) != row:
            yield row, first[identity]
