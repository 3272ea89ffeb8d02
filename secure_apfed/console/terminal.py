"""Output of the command line: results on stdout, errors on stderr, exit codes.

An error that is meant for people becomes one panel and one exit code, or one JSON object;
anything else is a fault of this program and keeps its traceback.
"""

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.installing import install_extra
from secure_apfed import errors
from secure_apfed.base.faults import TableError
from secure_apfed.base.files import to_json
from secure_apfed.base.peer_text import escape_text

if TYPE_CHECKING:
    from secure_apfed.base.phases import Phases
    from secure_apfed.planning.forecast import Forecast, TrafficForecast
    from secure_apfed.settings.protection import WeakenedSetting

INTERRUPTED_EXIT_CODE = 130
RESEARCH_MODULES = ("matplotlib", "jinja2", "adjustText", "joblib", "dp_accounting")
"""Names of modules that reports and research import and runs do not; where one is missing, errors
name the extra `experiments`."""
_UNWRAPPED_WIDTH = 100_000
_ORDINARY_SPACE_BY_BLANK = str.maketrans("\u202f\u00a0", "  ")
_USAGE_EXIT_CODE = 2
_DATA_EXIT_CODE = 3
_PROTOCOL_EXIT_CODE = 4
_BUDGET_EXIT_CODE = 5


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A description of an error for the user of the command line.

    Attributes:
        code: exit code of the process.
        title: title of the panel in which people see the error.
        kind: name of the error's class, for programs.
        message: what went wrong, and what to do.
        cause: the error itself, for its traceback; None: there is none, as after an interruption.
    """

    code: int
    title: str
    kind: str
    message: str
    cause: Exception | None = field(default=None, repr=False)


def describe_failure(error: Exception) -> Failure:
    """Return the exit code, title and message by which users see an error.

    A missing module means that an extra of the package is not installed.
    """
    if isinstance(error, ModuleNotFoundError):
        message = f"{error.name} is not installed; run: {install_extra('experiments')}"
        return Failure(
            code=_USAGE_EXIT_CODE, title="An extra is missing", kind="ConfigError", message=message
        )
    # Imported here, since they take longer to load than the help text should.
    from apfed_protocols.psi.interface import IntersectionTooSmallError
    from secure_apfed.privacy.ledger import BudgetExhaustedError

    # The first class that fits counts: a subclass stands before its base class.
    code_and_title_by_class: tuple[tuple[type[Exception], int, str], ...] = (
        (errors.ConfigError, _USAGE_EXIT_CODE, "The configuration is wrong"),
        (errors.DataError, _DATA_EXIT_CODE, "The data do not fit"),
        (errors.ModelError, _DATA_EXIT_CODE, "The model does not fit"),
        (errors.CheckpointError, _DATA_EXIT_CODE, "The run folder cannot be used"),
        (IntersectionTooSmallError, _DATA_EXIT_CODE, "The parties share too few rows"),
        (LocalProtocolError, _PROTOCOL_EXIT_CODE, "The protocol was refused"),
        (RunStoppedError, _PROTOCOL_EXIT_CODE, "Another party stopped the run"),
        (PartyLeftError, _PROTOCOL_EXIT_CODE, "Another party left"),
        (RemoteProtocolError, _PROTOCOL_EXIT_CODE, "The protocol was violated"),
        (BudgetExhaustedError, _BUDGET_EXIT_CODE, "The privacy budget is spent"),
        (OSError, _DATA_EXIT_CODE, "A file or folder cannot be used"),
        (Exception, _DATA_EXIT_CODE, "This cannot be done"),
    )
    exit_code, title = next(
        (exit_code, title)
        for error_class, exit_code, title in code_and_title_by_class
        if isinstance(error, error_class)
    )
    kind = "DataError" if isinstance(error, TableError) else type(error).__name__
    return Failure(code=exit_code, title=title, kind=kind, message=str(error), cause=error)


def show_failure(failure: Failure, *, as_json: bool, debug: bool) -> None:
    """Print an error: as a panel on stderr, or as one JSON object on stdout if `as_json`.

    Faults of a table come with settings that repair them. `debug`: also print the traceback on
    stderr.
    """
    if debug and failure.cause is not None:
        sys.stderr.write(_make_printable("".join(traceback.format_exception(failure.cause))))
    faults, settings, remedy = _list_table_faults(failure.cause)
    if as_json:
        error: dict[str, Any] = {
            "kind": failure.kind,
            "exit_code": failure.code,
            "message": failure.message,
        }
        if faults:
            error |= {"faults": faults, "settings": settings}
        print_json({"error": error})
        return
    panel = Panel(
        Text(_make_printable(failure.message)),
        title=failure.title,
        title_align="left",
        border_style="red",
    )
    Console(stderr=True).print(panel)
    if settings:
        show_remedy(*remedy, stderr=True)


def _list_table_faults(error: Exception | None) -> tuple[list[str], str, tuple[str, str]]:
    """Return the faults of a table that an error reports, and how to repair them.

    Returns the messages of the faults, settings that repair them as YAML, and the two arguments of
    `show_remedy`. All are empty for an error that is not about a table.
    """
    if not isinstance(error, TableError):
        return [], "", ("", "")
    return [fault.message for fault in error.faults], error.settings, error.remedy


def show_remedy(what_to_do: str, text: str, *, stderr: bool = False) -> None:
    """Print advice on stdout, or on `stderr`, and below it settings that can be copied.

    `what_to_do`: the advice. `text`: settings as YAML, which are printed without a border.
    """
    console = _make_console(stderr=stderr)
    console.print(Text(_make_printable(f"\n{what_to_do}"), style="bold"))
    console.print(Text(_make_printable(text)), soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; infinity becomes the text "inf"."""
    sys.stdout.write(to_json(value) + "\n")


def show_note(text: str) -> None:
    """Print a note on stderr, in a pale style."""
    _make_console(stderr=True).print(Text(_make_printable(text), style="dim"))


def show_line(text: str) -> None:
    """Print one line on stderr, without wrapping it."""
    sys.stderr.write(escape_text(_replace_blanks(text)) + "\n")


def _make_printable(text: str) -> str:
    """Return the text with control characters escaped, except line breaks.

    A peer may have chosen the text, and control characters could change the terminal.
    """
    return escape_text(_replace_blanks(text), keep="\n")


def _replace_blanks(text: str) -> str:
    """Return the text with ordinary spaces in place of narrow and no-break spaces.

    Some stand before units; not every terminal shows them.
    """
    return text.translate(_ORDINARY_SPACE_BY_BLANK)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as a note on stderr; installed in place of `warnings.showwarning`.

    Only `message` is shown; the other arguments are those that Python passes to such a function.
    """
    show_note(f"note: {message}")


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; columns whose cells begin with digits are right-aligned.

    If stdout is not a terminal, lines are not wrapped.

    `columns`: headers; if all are empty, no header is shown. `rows`: the cells of each row, as many
    as there are columns.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(columns))
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows if row[index]]
        has_numbers = bool(rows) and all(cell[:1].isdigit() for cell in cells)
        table.add_column(
            Text(_make_printable(name)),
            justify="right" if has_numbers else "left",
            header_style="dim",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(escape_text(_replace_blanks(cell))) for cell in row))
    console = _make_console()
    with console.capture() as captured:
        console.print(Text(_make_printable(title), style="bold"))
        console.print(table)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _make_console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr; without a terminal, lines are not wrapped."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNWRAPPED_WIDTH
    return console


def show_forecast(name: str, forecast: "Forecast", *, links: bool = False) -> None:
    """Print a forecast of a run's time, traffic, memory and privacy on stdout.

    `name`: name of the run. `links`: whether the traffic of each link is shown, instead of totals
    by kind of message.
    """
    show_rows(f"Forecast of {name}", ("", ""), _list_forecast_rows(forecast))
    if forecast.links and links:
        _show_links(forecast)
    elif forecast.links:
        _show_message_kinds(forecast)
    if forecast.intersections:
        _show_intersections(forecast)


def _list_forecast_rows(forecast: "Forecast") -> list[tuple[str, str]]:
    """Return the rows of a forecast's table: data, time, traffic, memory and privacy.

    Each row has a title and a text.
    """
    time_text = f"about {_format_duration(sum(forecast.seconds.values()))}: " + ", ".join(
        f"{phase} {_format_duration(seconds)}" for phase, seconds in forecast.seconds.items()
    )
    # The time of local models ("baselines") is in the forecast only if it was measured.
    omitted_baselines = ""
    if "baselines" in forecast.seconds:
        time_text += " (run --no-baselines spares them)"
    else:
        omitted_baselines = (
            "baselines (run --no-baselines spares them, plan --baselines measures them), "
        )
    labelled_text = f"{forecast.labelled_rows:,} of {forecast.teaching_rows:,}"
    rows = [
        ("rows", ", ".join(f"{party} {count:,}" for party, count in forecast.rows.items())),
        ("active trains on", f"{forecast.train_rows:,}, tests on {forecast.test_rows:,}"),
        ("learns from labels of", f"{labelled_text} rows that it could learn from"),
        ("steps", f"{forecast.steps:,}, each about {_format_duration(forecast.seconds_per_step)}"),
        ("time on this machine", time_text),
        ("not counted", f"start, {omitted_baselines}attacks, report"),
    ]
    if forecast.links:
        rows += [
            ("aligned at all parties", f"{forecast.aligned_rows:,}"),
            ("numbers sent of a row", f"{forecast.numbers_per_row:,}"),
            ("sent in all", f"about {format_size(forecast.wire_bytes)}"),
        ]
    rows += [
        (
            f"table of {table.party}",
            f"on disk: {format_size(table.disk_bytes)}; memory: {format_size(table.memory_bytes)}",
        )
        for table in forecast.tables
    ]
    rows += [(promise.format_title(), promise.sentence) for promise in forecast.promises]
    return rows


def _show_links(forecast: "Forecast") -> None:
    """Print the forecast traffic of each link and kind of message."""
    rows = [
        (
            link.sender,
            link.receiver,
            link.kind,
            f"{link.messages:,}",
            format_size(link.wire_bytes),
        )
        for link in forecast.links
    ]
    show_rows("\nBy link", ("from", "to", "kind", "messages", "bytes"), rows)


def _show_message_kinds(forecast: "Forecast") -> None:
    """Print the forecast traffic of each kind of message, summed over links."""
    links_by_kind: dict[str, list[TrafficForecast]] = {}
    for link in forecast.links:
        links_by_kind.setdefault(link.kind, []).append(link)
    rows = [
        (
            kind,
            f"{len(links)}",
            f"{sum(link.messages for link in links):,}",
            format_size(sum(link.wire_bytes for link in links)),
        )
        for kind, links in links_by_kind.items()
    ]
    title = "\nBy kind of message (--links tells each link)"
    show_rows(title, ("kind", "links", "messages", "bytes"), rows)


def _show_intersections(forecast: "Forecast") -> None:
    """Print the forecast costs of each set-intersection protocol, with a mark at the run's own."""
    rows = [
        (
            "*" if cost.chosen else "",
            cost.protocol,
            format_size(cost.wire_bytes),
            _format_duration(cost.seconds),
            "needed" if cost.takes_dealer else "none",
            "shown to the active" if cost.pairwise else "hidden",
        )
        for cost in forecast.intersections
    ]
    show_rows(
        "Set intersections for these tables; the run takes the marked one",
        ("", "protocol", "bytes", "time in one process", "dealer", "pairwise overlaps"),
        rows,
    )


def show_departures(weakened_settings: Sequence["WeakenedSetting"]) -> None:
    """Print a table of the settings that protect less than by default, or that there are none.

    `weakened_settings`: these settings.
    """
    title = "\nProtects less than by default"
    if weakened_settings:
        columns = ("setting", "is", "default", "protects", "consequence")
        show_rows(title, columns, [departure.table_row for departure in weakened_settings])
    else:
        show_rows(f"{title}: nothing", (), [])


def show_phases(phases: "Phases") -> None:
    """Print the time and the peak memory of each phase of a run, and of the whole run."""
    rows = [
        (
            name,
            _format_duration(phase.seconds),
            _format_duration(phase.processor_seconds),
            format_size(phase.peak_bytes),
        )
        for name, phase in phases.items()
    ]
    seconds = _format_duration(sum(phase.seconds for phase in phases.values()))
    processors = _format_duration(sum(phase.processor_seconds for phase in phases.values()))
    columns = ("phase", "by the clock", "of processors", "peak memory until then")
    last_row = rows[-1]
    total_row = ("together", seconds, processors, last_row[-1])  # the peak until the end
    show_rows("Phases", columns, [*rows, total_row])


def format_size(byte_count: float) -> str:
    """Return a number of bytes as text with a unit, B to TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if byte_count < 1000:
            return f"{byte_count:.3g} {unit}"
        byte_count /= 1000
    return f"{byte_count:,.1f} TB"


def _format_duration(seconds: float) -> str:
    """Return a duration as text, such as "12 ms", "3.4 s", "2 min 5 s" or "1 h 10 min"."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds} s" if minutes else f"{seconds:.1f} s"
    return f"{minutes // 60} h {minutes % 60} min"
