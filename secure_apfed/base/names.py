"""Names of parties, runs and studies: one rule for all, since names become file names.

Read by: settings, where names are given; the tables of a run; whatever makes a path of a name.
Letters, digits, "_", "-" and "." alone, a letter or digit first: no folder, no hidden file, no
control character. Names that differ in capitals alone are one, as on many file systems. What
this program adds to a name, it sets apart by "+", which no name has.

Examples:
    >>> log_file(Path("run"), "ledger", "bank" + UPDATES, "jsonl").name
    'ledger-bank+updates.jsonl'
    >>> check_parties(["bank", "Bank"])
    Traceback (most recent call last):
    ValueError: 'bank' and 'Bank' differ in capitals at most, and would share files; rename one
"""

import re
import unicodedata
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator

from apfed_protocols.date_formats import check_date_format
from secure_apfed.errors import ConfigError

_T = TypeVar("_T")
_NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]*"
_MAX_PARTY_NAME_LENGTH = 64
_MAX_RUN_NAME_LENGTH = 200

# Suffix of the name of a party's ledger of private updates (DP-SGD).
UPDATES = "+updates"
# Name of the epsilon of a party's releases; see `promises.MEANING_BY_EPSILON`.
ReleaseEpsilonName: TypeAlias = Literal["epsilon_x", "epsilon_v", "epsilon_c"]
# Roles that are parties of every contract, and the passives' settings for those not named.
RESERVED = ("aggregator", "dealer", "default")


DateFormat: TypeAlias = Annotated[str, AfterValidator(check_date_format)]
"""A format of dates as in `strptime`: %d, %m and %Y once each, such as %d.%m.%Y."""


def check_name(name: str, *, max_length: int = _MAX_PARTY_NAME_LENGTH) -> str:
    """Return the name unchanged if files may be named after it.

    Raises ValueError: it is empty, longer than `max_length` letters, or has a character that names
    may not have.
    """
    if len(name) > max_length or not re.fullmatch(_NAME_PATTERN, name):
        shortened = repr(name if len(name) <= max_length else f"{name[:max_length]}...")
        raise ValueError(
            f"expected a name of 1 to {max_length} letters (a-z, A-Z), digits, '_', '-' and '.', a "
            f"letter or digit first, since files are named after it; got {shortened}"
        )
    return name


def check_parties(names: Iterable[str]) -> None:
    """Check the names of a run's parties.

    Raises ValueError: a name is malformed or reserved, or two are equal up to case, since their
    files would be the same on some file systems.
    """
    name_by_key: dict[str, str] = {}  # the key is the name without capitals
    for name in names:
        _check_party_name(name)
        other_name = name_by_key.get(name.casefold())
        if other_name is not None:
            raise ValueError(
                f"{other_name!r} and {name!r} differ in capitals at most, and would share files; "
                "rename one"
            )
        name_by_key[name.casefold()] = name


def column_name(name: object) -> str:
    """Return a column's name as text in Unicode's form NFC; a number becomes its digits."""
    return unicodedata.normalize("NFC", str(name))


def _check_party_name(name: str) -> str:
    """Return a party's name unchanged. Raises ValueError: malformed or reserved."""
    if check_name(name).casefold() in RESERVED:
        raise ValueError(
            f"a party cannot be called {name!r}, which stands for something else in every run; "
            "rename it"
        )
    return name


def _check_party_keys(value_by_party: dict[str, _T]) -> dict[str, _T]:
    """Return a mapping by party unchanged. Raises ValueError: a key is no valid party name."""
    check_parties(value_by_party)
    return value_by_party


Name: TypeAlias = Annotated[str, AfterValidator(check_name)]
PartyName: TypeAlias = Annotated[str, AfterValidator(_check_party_name)]
ColumnName: TypeAlias = Annotated[str, AfterValidator(column_name)]
"""A column's name in settings: text in Unicode's form NFC, compared with the names in files."""
RunName: TypeAlias = Annotated[
    str, AfterValidator(partial(check_name, max_length=_MAX_RUN_NAME_LENGTH))
]
ByParty: TypeAlias = Annotated[dict[str, _T], AfterValidator(_check_party_keys)]


def log_file(folder: Path, kind: str, name: str, suffix: str) -> Path:
    """Return the path `folder/KIND-NAME.SUFFIX` of a party's log.

    `name`: the party's name; with `UPDATES` ("+updates") appended for its log of DP-SGD updates.

    Raises:
        ConfigError: the name is malformed, so that the path could be outside the folder.
    """
    own_file(folder, name.removesuffix(UPDATES))
    return folder / f"{kind}-{name}.{suffix}"


def own_file(folder: Path, name: str) -> Path:
    """Return the path `folder/NAME` for a party's name.

    Raises ConfigError: the name is malformed, so that the path could be outside the folder.
    """
    try:
        return folder / check_name(name)
    except ValueError as error:
        raise ConfigError(f"no file of {folder} can be named so: {error}") from None
