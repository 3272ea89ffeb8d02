"""Reading files with bounds and checks, and writing them atomically.

Run by: all code that opens a run folder (which may come from somebody else), keeps an account over
sessions, or writes results. Only plain files are read, up to a bound, and JSON is validated as a
given type; anything else raises an error with the file, the expected and actual content, and a
remedy.
"""

import contextlib
import errno
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from secure_apfed.base.formats import FileFormat, find_installed_version, find_writer
from secure_apfed.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import pandas as pd

# Limit for recordings and checkpoints, which are read into memory; no run has written as much.
MAX_BYTES = 2**34
# A byte of JSON may take twenty in memory.
MAX_JSON_BYTES = 2**24
# Files by which a folder is recognised as that of a run, of a study of runs, or of a party.
_OWN_FILES = ("config.yaml", "result.json", "study.yaml", "identity.pem", "party.yaml")
_MAX_DIGITS = 20  # of an integer in JSON
_CHUNK = 2**20
PartT = TypeVar("PartT")
PathLike = str | os.PathLike[str]
"""Type of the path of a file or folder in every public function."""
PARQUET = (".parquet", ".pq")
"""Suffixes of Parquet files."""
ARROW = (".arrow", ".feather", ".ipc")
"""Suffixes of files in Arrow's IPC format, compressed or not."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
# Separators and skipped characters (white space, quotes, semicolons), and a sign behind them that
# may begin a formula; the last four signs are full-width forms.
_FORMULA_START = re.compile(r'(^[\s";]*|[\s";]+)([=+\-@\uff1d\uff0b\uff0d\uff20])?')
_NO_SEPARATORS = ' "'  # skipped characters that begin no new cell
_RESTORE_ADVICE = "restore it from a copy"
VERSIONS = "versions.json"
"""The file of a run that says which versions of all libraries wrote it."""
PAYLOADS = "transcript-*.bin"
"""Name pattern of a run's files that contain the payloads of one epoch each; `*`: the epoch."""


def _explain_missing(folder: Path) -> str:
    """Return advice for a missing file in this folder, which should be a run's."""
    if not folder.is_dir():
        return "there is no such folder"
    has_config, has_result = ((folder / name).is_file() for name in ("config.yaml", "result.json"))
    if has_config and not has_result:
        return f"the run in {folder} has not finished; continue it with --resume"
    return "the folder is not complete, restore it from a copy"


def describe_missing(path: Path) -> str:
    """Return a sentence that a file is missing; it says where a relative path was looked up."""
    if path.is_absolute():
        return f"there is no file {path}; check the path"
    return (
        f"there is no file {path} in {Path.cwd()}, where this command runs; check the path, or "
        "give it from / on, which holds everywhere"
    )


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file to read it.

    Raises CheckpointError: missing or unreadable, or a pipe, device or folder.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; {_explain_missing(path.parent)}") from None
    except IsADirectoryError:
        raise _make_not_a_file_error(path) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _make_not_a_file_error(path)
    return file


def load_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a file's content. Raises CheckpointError: missing, too large or unreadable.

    `max_bytes`: bytes at most.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{path}: is larger than {max_bytes} bytes, which no run writes; restore it from a "
                "copy"
            )
        try:
            return file.read(size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None


def load_text(path: Path) -> str:
    """Return a file's UTF-8 text. Raises CheckpointError: unreadable, too large, not UTF-8."""
    try:
        return _load_content(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: is no text in UTF-8 (byte {error.start}); restore it from a copy"
        ) from None


def load_json(
    path: Path, content_type: type[PartT], *, file_format: FileFormat | None = None
) -> PartT:
    """Read a JSON file, and return its content as an object of type `content_type`.

    Args:
        path: path of the file.
        content_type: the expected type, which pydantic validates.
        file_format: format of the file, whose number is checked before anything else; None: the
            file has no versioned format.

    Raises CheckpointError: missing, not JSON, of another type, or in an unsupported format.
    """
    content = _parse_json(path, _load_content(path))
    if file_format is None:
        return _validate_content(path, content_type, content)
    return _validate_content(
        path,
        content_type,
        content,
        remedy=file_format.describe_misfit(file_format.parse_format_number(path, content)),
    )


def load_json_lines(path: Path, line_type: type[PartT]) -> tuple[PartT, ...]:
    """Read a file of one JSON value a line; return the values, each of type `line_type`.

    Empty lines are skipped. Raises CheckpointError: unreadable, or a value of another type.
    """
    lines = _load_content(path).splitlines()
    return tuple(
        _validate_content(path, line_type, _parse_json(path, line, f"line {number}: "))
        for number, line in enumerate(lines, start=1)
        if line
    )


def count_lines(path: Path) -> int:
    """Return the number of lines in a file of any length."""
    with open_plain(path) as file:
        return sum(chunk.count(b"\n") for chunk in iter(partial(file.read, _CHUNK), b""))


def _load_content(path: Path) -> bytes:
    """Return the bytes of a text file. Raises CheckpointError: unreadable or too large."""
    return load_bytes(path, max_bytes=MAX_JSON_BYTES)


def _parse_json(path: Path, content: bytes, place: str = "") -> Any:
    """Parse JSON, but refuse NaN, infinities and integers of more than 20 digits.

    `path`, `place`: file and place of the content, for the error; `place` is "line 3: " or empty.

    Raises CheckpointError: not JSON, or with a refused number.
    """
    try:
        return json.loads(content, parse_int=_parse_integer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not JSON, so it was cut off or altered: {place}{error}; restore it from "
            "a copy"
        ) from None


def _parse_integer(digits: str) -> int:
    """Return an integer of JSON. Raises ValueError: it has too many digits."""
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's JSON parser would accept."""
    raise ValueError(f"{name}, which is no JSON")


def describe_origin(path: Path) -> str:
    """Return advice for a run's file that another version of this library wrote.

    The version is read from versions.json in the same folder. Returns "" if this version wrote the
    file, or if versions.json is missing or damaged.
    """
    writer_version = ""
    with contextlib.suppress(CheckpointError):
        writer_version = find_writer(_parse_json(path, _load_content(path.with_name(VERSIONS))))
    if not writer_version:
        return ""
    return (
        f"secure-apfed {writer_version} wrote it, and this is {find_installed_version()}: read it "
        "with that version, or restore it from a copy"
    )


def _validate_content(
    path: Path, content_type: type[PartT], value: Any, *, remedy: str = _RESTORE_ADVICE
) -> PartT:
    """Return a file's parsed value as this type.

    `path`: path of the file, for the error. `remedy`: what the error advises; the default gives
    way to advice on the version that wrote the file, if another one did.

    Raises CheckpointError: names the field that does not fit.
    """
    # Imported late, since it takes long to load.
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(content_type).validate_python(value)
    except ValidationError as error:
        first_fault = error.errors()[0]
        field_path = ".".join(map(str, first_fault["loc"]))
        position = f", at {field_path!r}" if field_path else ""
        if remedy == _RESTORE_ADVICE:
            remedy = describe_origin(path) or remedy
        raise CheckpointError(
            f"{path}: is not as this version writes it{position}: "
            f"{first_fault['msg'].lower()}; {remedy}"
        ) from None


def _make_not_a_file_error(path: Path) -> CheckpointError:
    """Return the error for a folder, pipe or device in the place of a file to be read."""
    return CheckpointError(f"{path}: is no plain file; restore it from a copy")


def make_private(folder: Path) -> None:
    """Create a folder that only its owner may enter, or restrict an existing one to its owner.

    An existing folder is restricted only if it is empty or a run's folder: others may need the
    files of any other folder.

    Raises CheckpointError: others may enter a folder with such other files, or it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others_may_enter = folder.stat().st_mode & 0o077
        if not others_may_enter:
            return
        is_run_folder = any((folder / name).is_file() for name in _OWN_FILES)
        if any(folder.iterdir()) and not is_run_folder:
            raise CheckpointError(
                f"{folder} cannot be a run folder: others may read it, and it holds other files, "
                "so it is not shut for them; choose a new folder"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be a run folder ({error.strerror}); choose another folder"
        ) from error


def own_subfolder(folder: Path) -> Path:
    """Create a subfolder if it is missing, and return its path; refuse a link in its place.

    The folder around it may come from somebody else, who may have put a link there. Through it,
    files elsewhere would be written or deleted.

    Raises CheckpointError: a link or a file is in its place, or it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made ({error.strerror})") from error
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise CheckpointError(
            f"{folder} is a link or a file in place of a folder; nothing is written behind it: "
            "remove it"
        )
    return folder


def open_regular(path: Path, *, create: bool) -> int:
    """Open a log, and return a descriptor that reads anywhere and writes at the end.

    The caller closes it. A symbolic link is refused, since whoever made it would choose which file
    is changed. A pipe is refused, since opening it could wait for ever.

    `create`: make the file if it is missing.

    Raises:
        CheckpointError: a link, a folder, a pipe or a device; or the file is gone.
        OSError: it may not be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is gone, and this session wrote to it; restore it from a copy"
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path} is a symbolic link, which is not followed; put the file itself there"
            ) from None
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _make_irregular_error(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _make_irregular_error(path)
    return descriptor


def add_line(log: Path, fields: Mapping[str, Any], *, is_durable: bool = True) -> None:
    """Append a JSON object as a line to a log, which is created if missing.

    A newline comes first, since a crash may have left the last line incomplete. `is_durable`: wait
    until the line is on the disk, not only with the operating system.
    """
    with FileIO(open_regular(log, create=True), "a") as lines:
        lines.write(f"\n{json.dumps(fields)}\n".encode())
        if is_durable:
            os.fsync(lines.fileno())


def _make_irregular_error(path: Path) -> CheckpointError:
    """Return the error for a folder, pipe or device in the place of a log."""
    return CheckpointError(f"{path} is not a regular file; remove what stands in its place")


# No file of a run folder has one of these suffixes, so predictions and models may be stored in it.
_FREE_SUFFIXES = (".csv", ".parquet", ".onnx")


def refuse_replacing_input(output: Path, option: str, *inputs: Path) -> None:
    """Raise `ConfigError` if `output` is one of the files that the same command reads.

    Args:
        output: file that the command will write, which may exist already.
        option: the option that names it, such as `--output`.
        inputs: files that are read, and run folders, all of whose files count as read.
    """
    if not output.exists():
        return
    for path in inputs:
        is_inside = path.is_dir() and path.resolve() in output.resolve().parents
        is_run_file = is_inside and output.suffix not in _FREE_SUFFIXES
        if is_run_file or (path.exists() and path.samefile(output)):
            raise ConfigError(
                f"{option} {output}: expected a file that this command does not read, but it is "
                f"read from {path} and would be replaced; give {option} another name"
            )


def write_atomically(path: Path, *contents: bytes, private: bool = False) -> None:
    """Write a file, replacing an existing one in one step, so that no reader sees half of it.

    `contents`: the parts of the file, written one after the other. `private`: only its owner may
    read the file.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(contents)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o600 if private else 0o644)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        # On a full disk, for example, the error names no file.
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Return JSON for programs of any language: infinity and NaN as "inf" and "nan", paths as text.

    Terminal control characters are escaped, which every JSON reader reverses.

    `content`: plain values. `indent`: spaces for each level; None: one line.
    """
    text = json.dumps(
        _replace_non_finite(content), indent=indent, allow_nan=False, ensure_ascii=False
    )
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        # json.dumps gives the escape in quotes, which are cut off.
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
        for character in text
    )


def _replace_non_finite(content: Any) -> Any:
    """Return plain values with infinity, NaN and paths as texts, at any depth."""
    if isinstance(content, Mapping):
        return {key: _replace_non_finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replace_non_finite(value) for value in content]
    if isinstance(content, Path):
        return str(content)
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content


def escape_cell(value: object) -> object:
    """Return a cell of CSV, with apostrophes where a spreadsheet could take its text for a formula.

    Numbers, also those written as text, stay as they are.
    """
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return _FORMULA_START.sub(_add_apostrophe, value)
    return value


def _add_apostrophe(match: re.Match[str]) -> str:
    """Return a match of `_FORMULA_START` with an apostrophe before a sign that could begin a
    formula.

    A sign can begin a formula at the start of the text, and behind a character that a spreadsheet
    takes for a separator of cells.
    """
    separators, sign = match.groups(default="")
    is_at_cell_start = match.start() == 0 or separators.strip(_NO_SEPARATORS)
    return f"{separators}'{sign}" if sign and is_at_cell_start else f"{separators}{sign}"


def to_csv(frame: "pd.DataFrame", *, header: bool = True) -> str:
    """Return the frame as CSV without its index, with cells and column names by `escape_cell`.

    People open the file in a spreadsheet, which takes some texts for formulas. IDs and class names
    may come from other parties' tables. As OWASP recommends (CSV Injection), a text that begins
    like a formula gets an apostrophe before it. So does text behind a semicolon, tab or newline:
    where a comma is the decimal mark, a spreadsheet takes semicolons as separators, and quotes do
    not protect such a cell. Numbers, negative ones too, stay as they are.

    `header`: whether column names come first.
    """
    text: str = (
        frame.map(escape_cell).rename(columns=escape_cell).to_csv(index=False, header=header)
    )
    return text
