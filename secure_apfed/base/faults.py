"""Faults of the parties' tables: all are reported at once, each with the settings that mend it.

Run by: a party on its own table. A reader raises `TableError` for what it finds; `FaultList`
gathers the faults of a table, or of several, until everything that can be read was read.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from secure_apfed.errors import DataError

# Texts that YAML 1.1 reads as written, except for words that it takes for booleans or null.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_ -]*[A-Za-z0-9_]|[A-Za-z_]")
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"})


@dataclass(frozen=True)
class SettingLine:
    """A setting of a run's file: its path, its value, and a remark.

    Examples:
        >>> str(SettingLine(("data", "parties", "bank", "categorical"), ("cylinders",)))
        'data.parties.bank.categorical: [cylinders]'
    """

    path: tuple[str, ...]
    value: Any
    remark: str = ""

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {format_value(self.value)}"


Remedy: TypeAlias = tuple[SettingLine, ...]
"""Settings that mend a fault together."""


@dataclass(frozen=True)
class Fault:
    """A fault of a table.

    Attributes:
        message: party, column, count, place and what to do.
        remedies: alternatives, each a group of settings that together mend the fault; the first
            one is proposed.
    """

    message: str
    remedies: tuple[Remedy, ...] = ()


class TableError(DataError):
    """An error for unusable tables of one or several parties; contains all detected faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        """Store the faults; the error's text has their messages, one a line."""
        self.faults = tuple(faults)
        lines = [fault.message for fault in self.faults]
        if len(lines) > 1:
            lines = [f"{len(lines)} faults:", *(f"- {line}" for line in lines)]
        super().__init__("\n".join(lines))

    @property
    def lines(self) -> list[SettingLine]:
        """The proposed settings: for each fault that has a remedy, the settings of the first."""
        first_remedies = [fault.remedies[0] for fault in self.faults if fault.remedies]
        return [line for remedy in first_remedies for line in remedy]

    @property
    def settings(self) -> str:
        """The proposed settings of all faults as YAML, to paste into the run's file."""
        return format_settings(self.lines)

    @property
    def remedy(self) -> tuple[str, str]:
        """Advice on the proposed settings, and these settings ready to paste."""
        return describe_pasting("the run's file"), self.settings


class JoinedTableError(TableError):
    """An error for the unusable table of a party that joins a project.

    Such a party has no settings file of the run yet, so settings are proposed as command-line
    options.
    """

    @property
    def remedy(self) -> tuple[str, str]:
        """A line of advice, and the proposed settings as command-line options."""
        return "Or join with these options, too:", format_options(self.lines)


class FaultList:
    """A collection of the faults found so far in one or several tables."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def __bool__(self) -> bool:
        return bool(self.faults)

    def add_error(self, error: DataError) -> None:
        """Add the faults of an error, except those that were added before.

        An error other than a TableError counts as one fault without remedy.
        """
        faults = error.faults if isinstance(error, TableError) else (Fault(str(error)),)
        self.faults += [fault for fault in faults if fault not in self.faults]

    @contextmanager
    def gather_faults(self) -> Iterator[None]:
        """Collect the faults of a DataError that the `with` block raises, instead of raising it.

        The rest of the block is skipped; the program continues after it.
        """
        try:
            yield
        except DataError as error:
            self.add_error(error)

    def raise_faults(self) -> None:
        """Raise one TableError with all collected faults, if there are any."""
        if self.faults:
            raise TableError(self.faults)


@dataclass(frozen=True)
class Advice:
    """A builder of the settings that errors propose for one party's table.

    Attributes:
        party: the table's party.
        lists: the party's present settings that are lists, by key, such as `ignore`.
    """

    party: str
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def add_to_list(self, key: str, *names: str, remark: str = "") -> SettingLine:
        """Return the setting that adds these names to the party's list under this key.

        `remark`: a comment for the line.
        """
        extended = tuple(dict.fromkeys((*self.lists.get(key, ()), *names)))
        return self.set_value(key, extended, remark=remark)

    def drop_from_list(self, key: str, *names: str) -> SettingLine:
        """Return the setting that removes these names from the party's list under this key."""
        remaining = tuple(name for name in self.lists.get(key, ()) if name not in names)
        return self.set_value(key, remaining)

    def set_value(self, key: str, value: Any, *, remark: str = "") -> SettingLine:
        """Return the setting that gives the party this value under this key."""
        return SettingLine(("data", "parties", self.party, key), value, remark)


def describe_pasting(file: str) -> str:
    """Return in words where proposed settings are pasted."""
    return (
        f"Or add these lines below the same keys of {file} (inside the braces, where it has these "
        "keys in braces):"
    )


def describe_remedies(remedies: Sequence[Remedy]) -> str:
    """Return the remedies in words, as "A and B, or C"."""
    return ", or ".join(" and ".join(map(str, remedy)) for remedy in remedies)


def _merge_lines(lines: Sequence[SettingLine]) -> dict[tuple[str, ...], Any]:
    """Return one value for each path of the settings, which may propose several.

    Several lists for a path are merged; of several other values the first is taken.
    """
    values = dict[tuple[str, ...], Any]()
    for line in lines:
        first_value = values.setdefault(line.path, line.value)
        if isinstance(first_value, tuple) and isinstance(line.value, tuple):
            values[line.path] = tuple(dict.fromkeys((*first_value, *line.value)))
    return values


def format_options(lines: Sequence[SettingLine]) -> str:
    """Return the settings as `--set` options of a command, quoted for a shell.

    Each stands on a line of its own; lines are joined by a backslash.
    """
    settings = [
        f"{'.'.join(path)}={format_value(value)}" for path, value in _merge_lines(lines).items()
    ]
    return " \\\n".join(f"--set {shlex.quote(setting)}" for setting in settings)


def format_settings(lines: Sequence[SettingLine]) -> str:
    """Return the settings as nested YAML, with remarks as comments.

    Several lists for a key are merged; of several other values the first is taken.
    """
    values = _merge_lines(lines)
    remarks = dict[tuple[str, ...], str]()
    for line in lines:
        if line.remark:
            remarks.setdefault(line.path, line.remark)
    yaml_lines = list[str]()
    open_keys: tuple[str, ...] = ()  # the parent keys of the last written line
    # Sorted by parent keys, so that each parent key is written once.
    for path in sorted(values, key=lambda path: path[:-1]):
        for depth, key in enumerate(path[:-1]):
            if path[: depth + 1] != open_keys[: depth + 1]:
                yaml_lines.append(f"{'  ' * depth}{format_value(key)}:")
                open_keys = path[: depth + 1]
        remark = f"  # {remarks[path]}" if path in remarks else ""
        indent = "  " * (len(path) - 1)
        yaml_lines.append(f"{indent}{format_value(path[-1])}: {format_value(values[path])}{remark}")
        open_keys = path[:-1]
    return "\n".join(yaml_lines)


def format_value(value: Any) -> str:
    """Return a value as YAML in one line; texts are quoted where YAML would misread them."""
    if isinstance(value, Mapping):
        inner = (
            f"{format_value(key)}: {format_value(inner_value)}"
            for key, inner_value in value.items()
        )
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
            return value
        # Unprintable characters become escapes; printable ones of any script stay readable.
        return json.dumps(value, ensure_ascii=not value.isprintable())
    return json.dumps(value)
