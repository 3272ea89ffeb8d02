"""The IDs of one party: the rules by which they become bytes, what these change, and a file's IDs.

Run by: a party on its own file, which may be much larger than its memory: no other column is read,
and of the IDs no more than a piece is held. Nothing is sent.
"""

import lzma
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apfed_protocols.errors import DataError
from apfed_protocols.ids import EMPTY, JOINT, IdNormalisation, IdReader, SizedIds, encode_pieces
from secure_apfed.files import PARQUET
from secure_apfed.settings.alignment import ID_RULES, AlignmentSettings

if TYPE_CHECKING:
    import pyarrow

__all__ = ["IdCheck", "IdFile", "check_normalisation", "id_rules"]

_SHOWN = 5
_NOTHING = IdNormalisation(unicode_nfc=False, strip=False)
_ROWS_OF_A_PIECE = 2**16


def id_rules(settings: AlignmentSettings) -> IdNormalisation:
    on = {rule: rule in settings.normalisation for rule in ID_RULES}
    return IdNormalisation(**on, date_formats=settings.date_formats)


@dataclass(frozen=True, kw_only=True)
class IdCheck:
    """What was found; rows are from 0, and no ID is in it.

    Attributes:
        by_rule: IDs that each rule changes by itself, whether it was agreed on or not.
        agreed: the rules that were.
        changed: IDs that the agreed rules change together; first: some of their rows.
        repeated: rows whose ID an earlier row has, once normalised; pairs: some of them, each with
            that row; repeated_as_written: the same without any rule.
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


def check_normalisation(party: str, ids: SizedIds, normalisation: IdNormalisation) -> IdCheck:
    """Count what these rules change and make equal."""
    alone: dict[str, Any] = dict.fromkeys(ID_RULES, True)
    if normalisation.date_formats:
        alone["date_formats"] = normalisation.date_formats
    by_rule = {
        name: len(list(_changes(party, ids, replace(_NOTHING, **{name: rule}))))
        for name, rule in alone.items()
    }
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


def _encoded(party: str, ids: SizedIds, rules: IdNormalisation) -> Iterator[bytes]:
    for piece in encode_pieces(party, ids, rules):
        yield from piece


def _changes(party: str, ids: SizedIds, rules: IdNormalisation) -> Iterator[int]:
    both = zip(_encoded(party, ids, _NOTHING), _encoded(party, ids, rules), strict=True)
    return (row for row, (written, agreed) in enumerate(both) if written != agreed)


def _repeats(party: str, ids: SizedIds, rules: IdNormalisation) -> Iterator[tuple[int, int]]:
    first: dict[bytes, int] = {}
    for row, identity in enumerate(_encoded(party, ids, rules)):
        if first.setdefault(identity, row) != row:
            yield row, first[identity]


class IdFile:
    r"""The IDs in a CSV or Parquet file; read anew each time that they are asked for.

    What comes out is what `data: tables` makes of the same columns: one text a row, so that "007"
    and "7" differ; several columns joined by a character that no text file holds by accident.

    Args:
        party: whose file it is, for errors.
        path: .parquet or .pq, else CSV (also .gz, .bz2, .xz, .zst) with a header line.
        columns: the one that holds the IDs, or several.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "bank.csv"
        ...     _ = path.write_text("id,amount\n007,3.5\n7,1.0\n")
        ...     ids = IdFile("bank", path, "id")
        ...     len(ids), [row for piece in ids.pieces() for row in piece]
        (2, ['007', '7'])
    """

    def __init__(self, party: str, path: Path, columns: str | Sequence[str]) -> None:
        self._party, self._path = party, path
        self._columns = (columns,) if isinstance(columns, str) else tuple(columns)
        self._packed = path.suffix.lower() in PARQUET
        with self._readable():
            self._rows = self._count()

    def __len__(self) -> int:
        return self._rows

    def pieces(self) -> Iterator[list[str]]:
        """Yield the IDs of some thousand rows after another, those of several columns joined."""
        several = len(self._columns) > 1
        place = None if self._packed else lambda row: f"line {row + 2}"
        readers = {
            name: IdReader(
                f"{self._party}: column {name!r} of {self._path}", place=place, strip=True,
                part=several, key="id_column",
            )
            for name in self._columns
        }  # fmt: skip
        with self._readable():
            for batch in self._batches():
                parts = [reader.texts(batch.column(name)) for name, reader in readers.items()]
                if all(reader.all_taken for reader in readers.values()):
                    yield list(map(JOINT.join, zip(*parts, strict=True))) if several else parts[0]
        for reader in readers.values():
            reader.check()

    def _count(self) -> int:
        if not self._packed:
            return sum(batch.num_rows for batch in self._batches())
        from pyarrow.parquet import ParquetFile

        with ParquetFile(self._path) as file:
            found = file.schema_arrow.names
            if absent := [name for name in self._columns if found.count(name) != 1]:
                raise DataError(
                    f"{self._party}: {self._path} must have each of the columns "
                    f"{', '.join(absent)} once; it has {', '.join(found)}"
                )
            return int(file.metadata.num_rows)

    def _batches(self) -> Iterator["pyarrow.RecordBatch"]:
        if self._packed:
            from pyarrow.parquet import ParquetFile

            with ParquetFile(self._path) as file:
                yield from file.iter_batches(_ROWS_OF_A_PIECE, columns=list(self._columns))
            return
        import pyarrow
        from pyarrow import csv

        options = csv.ConvertOptions(
            include_columns=list(self._columns),
            column_types=dict.fromkeys(self._columns, pyarrow.string()),
            strings_can_be_null=True,
            null_values=sorted(EMPTY),
        )
        lines = csv.ParseOptions(newlines_in_values=True)
        # By its name pyarrow knows how a file is packed, but for xz.
        opened = lzma.open if self._path.suffix == ".xz" else nullcontext
        with (
            opened(self._path) as file,
            csv.open_csv(file, parse_options=lines, convert_options=options) as reader,
        ):
            yield from reader

    @contextmanager
    def _readable(self) -> Iterator[None]:
        from pyarrow import ArrowException

        try:
            yield
        except FileNotFoundError as error:
            raise DataError(
                f"{self._party}: there is no file {self._path}; check the path"
            ) from error
        except (OSError, ArrowException, KeyError) as error:
            raise DataError(
                f"{self._party}: the columns {', '.join(self._columns)} of {self._path} cannot be "
                f"read ({str(error).strip()})"
            ) from error
