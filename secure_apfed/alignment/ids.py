"""The IDs of one party: the rules by which they become bytes, and a file's IDs.

Run by: a party on its own file, which may be much larger than its memory: no other column is read,
and of the IDs no more than a piece is held. Nothing is sent.
"""

import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from apfed_protocols.errors import DataError
from apfed_protocols.ids import COLUMN_SEPARATOR, EMPTY_CELL_TEXTS, IdNormalisation, IdReader
from secure_apfed.settings.alignment import ID_RULES, AlignmentSettings

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.dataset import Dataset

_ROWS_PER_BLOCK = 2**16


def _open_csv_file(
    file: Path, text_columns: Sequence[str], *, separator: str, lines_above_header: int
) -> "Dataset":
    """Return a CSV file as a data set, which reads blocks of rows when they are needed.

    A file that is compressed as .xz, or has lines above its header, is read whole instead.

    Args:
        file: path of the file.
        text_columns: columns whose cells are read as texts: those of the IDs.
        separator: character between two cells.
        lines_above_header: number of lines to skip.
    """
    import pyarrow
    from pyarrow import csv, dataset, input_stream

    parse_options = csv.ParseOptions(newlines_in_values=True, delimiter=separator)
    convert_options = csv.ConvertOptions(
        column_types=dict.fromkeys(text_columns, pyarrow.string()),
        strings_can_be_null=True,
        null_values=sorted(EMPTY_CELL_TEXTS),
    )
    is_xz = file.suffix == ".xz"
    if not lines_above_header and not is_xz:
        csv_format = dataset.CsvFileFormat(
            parse_options=parse_options, convert_options=convert_options
        )
        return dataset.dataset(str(file), format=csv_format)
    with lzma.open(file) if is_xz else input_stream(str(file)) as content:
        table = csv.read_csv(
            content,
            read_options=csv.ReadOptions(skip_rows=lines_above_header),
            parse_options=parse_options,
            convert_options=convert_options,
        )
    return dataset.dataset(table)


def make_id_rules(settings: AlignmentSettings) -> IdNormalisation:
    """Return the rules by which IDs are normalised, from the settings that all parties share."""
    enabled = {rule: rule in settings.normalisation for rule in ID_RULES}
    return IdNormalisation(**enabled, date_formats=settings.date_formats)


class IdFile:
    r"""The IDs in a party's table, read from it at each iteration.

    Each row has one ID, a text, so that "007" and "7" differ. Values of several columns are joined
    by a character that normal text files do not contain. A run whose tables have these ID columns
    reads the same IDs.

    Args:
        party: the table's party, for errors.
        source: path of a file or folder, or a pattern of paths, as `secure_apfed.data.frames` reads
            them; or a table in memory.
        columns: name of the ID column, or names of several columns.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "bank.csv"
        ...     _ = path.write_text("id,amount\n007,3.5\n7,1.0\n")
        ...     ids = IdFile("bank", path, "id")
        ...     len(ids), [row for piece in ids.pieces() for row in piece]
        (2, ['007', '7'])
    """

    def __init__(
        self, party: str, source: "Path | pyarrow.Table", columns: str | Sequence[str]
    ) -> None:
        """Open the table and count its rows.

        Raises DataError: the table cannot be read, or does not have each of the columns once.
        """
        self._party = party
        self._source = source
        # How errors call the table; a table in memory is the result of a query.
        self._source_name = str(source) if isinstance(source, Path) else "its query"
        self._column_names = (columns,) if isinstance(columns, str) else tuple(columns)
        with self._translate_errors():
            self._dataset, self._locate_line = self._open_rows()
            names = self._dataset.schema.names
            wrong_columns = [name for name in self._column_names if names.count(name) != 1]
            if wrong_columns:
                raise DataError(
                    f"{party}: {self._source_name} must have each of the columns "
                    f"{', '.join(wrong_columns)} once; it has {', '.join(names)}"
                )
            self._row_count = int(self._dataset.count_rows())

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._row_count

    def pieces(self) -> Iterator[list[str]]:
        """Yield the IDs in blocks of some thousand rows; values of several columns are joined.

        Raises DataError: some cells are not accepted as IDs. The error comes after the last row, so
        that it names all of them.
        """
        has_several_columns = len(self._column_names) > 1
        reader_by_column = {
            name: IdReader(
                f"{self._party}: column {name!r} of {self._source_name}",
                describe_place=self._locate_line,
                should_strip=True,
                is_one_of_several=has_several_columns,
                settings_key="id_column",
            )
            for name in self._column_names
        }
        with self._translate_errors():
            for batch in self._dataset.to_batches(
                columns=list(self._column_names),
                batch_size=_ROWS_PER_BLOCK,
                batch_readahead=1,
                fragment_readahead=1,
            ):
                value_columns = [
                    reader.convert_column(batch.column(name))
                    for name, reader in reader_by_column.items()
                ]
                # After a refused cell no block is yielded: the rest is read to report all faults.
                if not all(reader.has_no_refusals for reader in reader_by_column.values()):
                    continue
                if has_several_columns:
                    yield [
                        COLUMN_SEPARATOR.join(values) for values in zip(*value_columns, strict=True)
                    ]
                else:
                    yield value_columns[0]
        for reader in reader_by_column.values():
            reader.require_no_refusals()

    def _open_rows(self) -> "tuple[Dataset, Callable[[int], str] | None]":
        """Open the table; return its data set, and a function that names a row's line in the file.

        The function is None unless the table is one CSV file. Reading the data set takes the memory
        of one block of rows. CSV files that are compressed as .xz, or that have lines above the
        header, are read whole here, since data sets of pyarrow can neither skip lines nor read .xz.
        """
        # Imported late, since pyarrow takes long to load.
        from pyarrow import dataset

        from secure_apfed.data.frames import (
            infer_file_kind,
            list_files,
            load_csv_head,
            open_packed_files,
        )

        if not isinstance(self._source, Path):
            return dataset.dataset(self._source), None
        files = list_files(self._source, source=self._party)
        if infer_file_kind(files[0]) != "CSV":
            return open_packed_files(files, self._source, self._party), None
        datasets = []
        lines_above_header = []
        for file in files:
            head = load_csv_head(file, source=self._party, are_titles_errors=False)
            lines_above_header.append(head.lines_above)
            datasets.append(
                _open_csv_file(
                    file,
                    self._column_names,
                    separator=head.separator,
                    lines_above_header=head.lines_above,
                )
            )
        if len(files) > 1:
            return dataset.dataset(datasets), None
        first_line_number = lines_above_header[0] + 2  # below the header, counted from 1
        return dataset.dataset(datasets), lambda row: f"line {first_line_number + row}"

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn reading errors in the `with` block into a DataError that names columns and file."""
        from pyarrow import ArrowException

        try:
            yield
        except FileNotFoundError as error:
            from secure_apfed.base.files import describe_missing

            missing = describe_missing(Path(self._source_name))
            raise DataError(f"{self._party}: {missing}") from error
        except (OSError, ArrowException, KeyError) as error:
            raise DataError(
                f"{self._party}: the columns {', '.join(self._column_names)} of "
                f"{self._source_name} cannot be read ({str(error).strip()})"
            ) from error
