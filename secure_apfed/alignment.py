"""Aligning tables: which rows of which party belong to the same person or thing.

`align` plays all parties in this process, for simulations and for trying out IDs. Parties
in different organisations each build their own end with `intersection` from the same
settings, and carry the messages over their links. Who learns what is the business of the
protocol, see `protocols.psi`. Nothing else of this package is needed to use this module.

Example:
    >>> rows = align({"bank": ["ann", "bob", "eve"], "shop": ["Eve", "bob", "joe"]}, hub="bank",
    ...              settings=AlignmentSettings(normalisation=IdNormalisation(case_fold=True)))
    >>> sorted(zip(rows["bank"].tolist(), rows["shop"].tolist()))
    [(1, 1), (2, 0)]
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from protocols.conversation import converse
from protocols.errors import LocalProtocolError
from protocols.psi import SET_INTERSECTIONS
from protocols.psi.interface import (
    DEFAULT_MAXIMUM_IDS,
    IntersectionAgreement,
    IntersectionTooSmallError,
    SetIntersection,
    check_ids,
)
from protocols.randomness import fresh_key
from secure_apfed.errors import DataError
from secure_apfed.settings import Settings

__all__ = [
    "AlignmentSettings",
    "IdColumn",
    "IdNormalisation",
    "align",
    "canonical_ids",
    "intersection",
]

_DEALER = "dealer (in memory)"


@runtime_checkable
class _Column(Protocol):
    """A NumPy array or a pandas Series."""

    def tolist(self) -> list[object]: ...


@runtime_checkable
class _Table(Protocol):
    """A pandas DataFrame: one ID column each."""

    def itertuples(self, index: bool, name: None) -> Iterable[tuple[object, ...]]: ...


IdColumn = Sequence[object] | _Column | _Table
"""IDs as str, bytes or int, one a row; or rows of several such columns (tuples, a DataFrame)."""


class IdNormalisation(Settings):
    """How IDs become bytes; all parties must agree.

    Numbers count as their decimal digits, so 7 equals "7" but not "07". Bytes are taken as
    they are. The rules below hold for text.

    Attributes:
        unicode_nfc: unite the ways in which Unicode writes one letter, e.g. é as one or two.
        case_fold: unite upper and lower case; off by default, many IDs differ in case.
        strip: drop white space at both ends.
    """

    unicode_nfc: bool = True
    case_fold: bool = False
    strip: bool = True

    def text(self, text: str) -> str:
        """Return the agreed form of one text."""
        if self.case_fold:
            # Unicode 3.13, D145: folding looks at letters taken apart
            text = (unicodedata.normalize("NFD", text) if self.unicode_nfc else text).casefold()
        if self.unicode_nfc:
            text = unicodedata.normalize("NFC", text)
        return text.strip() if self.strip else text


class AlignmentSettings(Settings):
    """How rows are matched; all parties must agree, but for `processes`.

    Attributes:
        protocol: a key of `protocols.psi.SET_INTERSECTIONS`.
        minimum_rows: fewer common rows are not opened; at least 1.
        maximum_ids: the largest set accepted from a peer.
        normalisation: how IDs become bytes.
        processes: how many processes this party computes with; None lets the protocol choose.
    """

    protocol: str = "ecdh"
    minimum_rows: int = Field(default=2, ge=1)
    maximum_ids: int = Field(default=DEFAULT_MAXIMUM_IDS, ge=1, lt=2**32)
    normalisation: IdNormalisation = IdNormalisation()
    processes: int | None = Field(default=None, ge=1)

    @field_validator("protocol")
    @classmethod
    def _is_in_the_table(cls, protocol: str) -> str:
        if protocol not in SET_INTERSECTIONS:
            known = ", ".join(sorted(SET_INTERSECTIONS))
            raise ValueError(f"no set intersection is called {protocol!r}; there are: {known}")
        return protocol

    @model_validator(mode="after")
    def _has_room(self) -> "AlignmentSettings":
        if self.minimum_rows > self.maximum_ids:
            raise ValueError(
                f"minimum_rows ({self.minimum_rows}) is above maximum_ids ({self.maximum_ids})"
            )
        return self


def canonical_ids(party: str, ids: IdColumn, settings: AlignmentSettings) -> list[bytes]:
    """Return the IDs of `party` as the bytes that the parties agreed on, one a row.

    An ID is the number of its columns and the length and bytes of each, so that
    ("ab", "c") and ("a", "bc") differ.

    Raises:
        DataError: IDs are missing, empty, repeated (also if only after normalisation), too
            many or of another type; names the party's rows, never an ID.
    """
    canonical: list[bytes] = []
    empty: list[int] = []
    for row, columns in enumerate(_rows(party, ids)):
        parts = [_part(party, row, value, settings.normalisation) for value in columns]
        if not any(parts):
            empty.append(row)
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        canonical.append(len(parts).to_bytes(2, "big") + framed)
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise DataError(
            f"{party} has {len(empty)} empty ID(s), in row(s) {shown}; remove these rows"
        )
    try:
        check_ids(party, canonical, settings.maximum_ids)
    except LocalProtocolError as error:
        raise DataError(f"{error} (after normalisation: {settings.normalisation})") from error
    return canonical


def intersection(settings: AlignmentSettings, *, session: str, dealer: str = "") -> SetIntersection:
    """Return the protocol that `settings` names, for one `session` that is used once.

    `dealer` names the party that hands out randomness where the protocol needs one.
    The IDs must come from `canonical_ids`; peers with another normalisation are refused.
    """
    agreement = IntersectionAgreement(
        session=session,
        minimum_rows=settings.minimum_rows,
        maximum_ids=settings.maximum_ids,
        encoding=f"ids v1 {settings.normalisation.model_dump_json()}",
        dealer=dealer,
    )
    return SET_INTERSECTIONS[settings.protocol](agreement, processes=settings.processes)


def align(
    ids_by_party: Mapping[str, IdColumn],
    *,
    hub: str,
    settings: AlignmentSettings | None = None,
) -> Mapping[str, NDArray[np.int64]]:
    """Find the rows that all parties share, playing all parties in this process.

    Args:
        ids_by_party: the IDs of two or more parties, distinct within each party.
        hub: the party that all others talk to; with `ecdh` it learns pairwise overlaps.
        settings: how to match; the defaults if None.

    Returns:
        Row positions of each party, int64, shape (common rows,): row k of every party is the
        same ID. The order is random, so that it tells nothing about anybody's table.

    Raises:
        DataError: unfit IDs, unknown hub, or fewer common rows than `minimum_rows`.
    """
    settings = settings or AlignmentSettings()
    members = [party for party in ids_by_party if party != hub]
    if hub not in ids_by_party or not members:
        raise DataError(
            f"alignment takes a hub and at least one other party; the hub is {hub!r}, "
            f"the parties are {', '.join(ids_by_party) or 'none'}"
        )
    ids = {party: canonical_ids(party, ids_by_party[party], settings) for party in ids_by_party}
    protocol = intersection(settings, session=f"in memory {fresh_key().hex()}", dealer=_DEALER)
    aligners = {hub: protocol.hub(hub, members, ids[hub])}
    aligners |= {member: protocol.member(member, hub, ids[member]) for member in members}
    helpers = {_DEALER: protocol.dealer(hub, members)} if protocol.needs_dealer else {}
    converse(aligners | helpers)
    try:
        return {party: aligners[party].rows for party in ids_by_party}
    except IntersectionTooSmallError as error:
        sizes = ", ".join(f"{party} {len(rows)}" for party, rows in ids.items())
        raise DataError(
            f"{error}. Rows by party: {sizes}; normalisation: {settings.normalisation}"
        ) from error


def _rows(party: str, ids: IdColumn) -> Iterable[tuple[object, ...]]:
    if isinstance(ids, _Table):
        return ids.itertuples(index=False, name=None)
    values = ids.tolist() if isinstance(ids, _Column) else ids
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise DataError(
            f"the IDs of {party} are a {type(ids).__name__}; give a list, array, Series or "
            "DataFrame with one ID a row"
        )
    return (tuple(row) if isinstance(row, tuple | list) else (row,) for row in values)


def _part(party: str, row: int, value: object, normalisation: IdNormalisation) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value)).encode()
    if value is None:
        return b""
    if not isinstance(value, str):
        raise DataError(
            f"{party}, row {row}: an ID is str, bytes or int, got {type(value).__name__}; "
            "numbers with a decimal point or missing values must become text first"
        )
    try:
        return normalisation.text(value).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{party}, row {row}: the ID is not valid Unicode text") from error
